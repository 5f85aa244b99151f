"""`magnetar metadata backup|restore`: a copy of the tree while it is written to, and back in its place."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.output import Output
from ..common.session import YES, confirm
from .operator import ROLE, SECURITY

if TYPE_CHECKING:
    from ...metadata.backup import Contents

TIMEOUT_S = 600.0
"""For a copy: a gigabyte on a slow disk."""
ASK_S = 5.0

OUTPUT = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)


@click.command()
@click.argument("name", default="")
@click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help="The metadata service, HOST:PORT; it runs on this machine.",
)  # fmt: skip
@SECURITY
@OUTPUT
def backup(name: str, metadata_: str, security: str | None, output: str) -> None:
    """Make a whole copy of the metadata while it is used.

    NAME is a file that the service makes in its own folder (default: one named by the tree's revision). Commits wait
    while it is copied: about a second for 500 MB. Move it to another machine: a copy protects against the loss of this
    disk.

    Example: magnetar metadata backup monday.backup
    """
    from ...metadata.messages import BACKUP
    from ...proto import wire_pb2 as wire
    from ...runtime.network import Endpoint
    from ...runtime.process import real_world
    from ..run.members import as_member
    from ..run.servers import metadata_address

    address = metadata_address(metadata_)
    if not isinstance(address, Endpoint):
        raise click.UsageError("a ZooKeeper is backed up with its own tools")

    async def run() -> wire.BackupReply:
        world = real_world()
        channel = as_member(world, security, ROLE).network.connect(address)
        try:
            reply: wire.BackupReply = await channel.call(BACKUP, wire.BackupRequest(name=name), timeout_s=TIMEOUT_S)
        finally:
            await channel.close()
        return reply

    made = asyncio.run(run())
    Output(output).rows(
        [{"file": made.path, "revision": made.revision, "bytes": made.bytes}], ("file", "revision", "bytes")
    )


@click.command()
@click.argument("copy", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), default="magnetar-metadata", show_default=True,
    help="Folder of the metadata service, which is stopped.",
)  # fmt: skip
@OUTPUT
@YES
def restore(copy: Path, data: Path, output: str, yes: bool) -> None:
    """Put a copy in the place of the metadata's file, and say what is newer elsewhere.

    The service must be stopped; its file, if there is one, is kept beside the new one. The bookies that COPY names are
    asked which ledgers they saw: new ids begin above those, and bookies keep the ledgers that the copy does not contain
    until `magnetar bookies gc --now --force`.

    Example: magnetar metadata restore monday.backup --data /var/lib/magnetar/metadata
    """
    from ...metadata import backup as copies

    found = copies.look(str(copy))
    target = data.absolute() / "metadata.sqlite"
    before = _contents(target)
    rows = _compare(found, before, asyncio.run(_ask(found)))
    Output(output).rows(rows, ("where", "highestLedger", "newer"))
    confirm(f"Put {copy} (revision {found.revision}, ledger ids up to {found.highest}) in place of {target}", yes)
    least = max([found.highest, *(row["highestLedger"] for row in rows if isinstance(row["highestLedger"], int))])
    kept = copies.restore(str(copy), str(target), least, secrets.token_hex(8))
    if kept:
        click.echo(f"what was there is kept: {kept}", err=True)
    click.echo(f"restored; ledger ids go on above {least}. Start the service, then the bookies", err=True)


def _contents(path: Path) -> Contents | None:
    """None: there is no file, or it cannot be read at all."""
    from ...metadata import backup as copies
    from ...proto.errors import MagnetarError

    try:
        return copies.look(str(path))
    except MagnetarError:
        return None


async def _ask(found: Contents) -> dict[str, int | str]:
    """By bookie the largest ledger id that it has or had, or why it does not answer."""
    from ...proto.errors import MagnetarError
    from ..common.exits import Failure
    from .admin_port import BookiePeer

    async def ask(id_: str, endpoint: str) -> int | str:
        peer = BookiePeer(id_, endpoint, ASK_S)
        try:
            return int((await peer.ask("state"))["highestLedger"])
        except (MagnetarError, Failure, ValueError, KeyError) as error:
            return f"not asked: {error}"
        finally:
            await peer.close()

    answers = await asyncio.gather(*(ask(*each) for each in found.bookies))
    return {id_: answer for (id_, _), answer in zip(found.bookies, answers, strict=True)}


def _compare(found: Contents, before: Contents | None, bookies: dict[str, int | str]) -> list[dict[str, object]]:
    """A row for the copy, the replaced file, and each bookie; `newer`: what it has and the copy lacks."""
    rows: list[dict[str, object]] = [{"where": "the copy", "highestLedger": found.highest, "newer": ""}]
    if before is not None:
        more = len(before.ledgers - found.ledgers)
        newer = f"{more} ledgers, {max(0, before.revision - found.revision)} revisions"
        rows.append({"where": "the file that it replaces", "highestLedger": before.highest, "newer": newer})
    for bookie, highest in bookies.items():
        if isinstance(highest, str):
            rows.append({"where": f"bookie {bookie}", "highestLedger": None, "newer": highest})
            continue
        newer = f"ledgers {found.highest + 1} to {highest}" if highest > found.highest else "nothing"
        rows.append({"where": f"bookie {bookie}", "highestLedger": highest, "newer": newer})
    return rows
