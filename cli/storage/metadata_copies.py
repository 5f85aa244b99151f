"""`magnetar metadata backup|restore`: the commands that copy the metadata while its service runs, and that put such a
copy in the place of its file."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ..common.output import OUTPUT_OPTION, CommandOutput
from ..common.session import YES_OPTION, confirm_deletion
from ..common.units import FiniteNumber
from ..run.servers import get_members_section
from .admin_port import METADATA_OPTION, OPERATOR_ROLE, SECURITY_OPTION, OperatorOptions, resolve_context_option

if TYPE_CHECKING:
    from ...metadata.members import Members
    from ...metadata.records import BookieRecord
    from ...metadata.server import MetadataServer
    from ...metadata.sqlite import BackupContents
    from ...runtime.network import Endpoint, World
    from .admin_port import BookiePeer

BACKUP_TIMEOUT_S = 600.0
"""Seconds for a copy: a gigabyte on a slow disk."""
LOST_TOPICS_SHOWN = 20
"""Topics of lost ledgers that are shown."""
BOOKIE_ASK_TIMEOUT_S = 5.0
BOOKIE_RETRY_S = 0.25
DEFAULT_WAIT_S = 60.0
"""Seconds to wait for bookies: they come to a service that answers again within a second, and after their session's
time at the latest."""


@click.command()
@click.argument("name", default="")
@click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help="The metadata service, HOST:PORT; it runs on this machine.", callback=resolve_context_option,
)  # fmt: skip
@SECURITY_OPTION
@OUTPUT_OPTION
def backup(name: str, metadata_: str, security: str | None, output: str) -> None:
    """Make a complete copy of the metadata while the service runs.

    NAME is a file that the service creates in its own folder (default: a name with the revision of the metadata).
    Commits wait while the metadata is copied: about a second for 500 MB. Move the copy to another machine, because it
    protects against the loss of this disk.

    Example: magnetar metadata backup monday.backup
    """
    from ...metadata.remote import BACKUP_RPC
    from ...metadata.session import get_store_name
    from ...proto import wire_pb2 as wire
    from ...runtime.network import Endpoint
    from ...runtime.process import make_system_world
    from ..run.servers import make_member_world, parse_metadata_address

    address = parse_metadata_address(metadata_)
    if not isinstance(address, Endpoint):
        raise click.UsageError(f"{get_store_name(address)} is backed up with its own tools")

    async def run() -> wire.BackupReply:
        world = make_system_world()
        channel = make_member_world(world, security, OPERATOR_ROLE).network.connect(address)
        try:
            reply: wire.BackupReply = await channel.call(
                BACKUP_RPC, wire.BackupRequest(name=name), timeout_s=BACKUP_TIMEOUT_S
            )
        finally:
            await channel.close()
        return reply

    made = asyncio.run(run())
    CommandOutput(output).print_rows(
        [{"file": made.path, "revision": made.revision, "bytes": made.bytes}], ("file", "revision", "bytes")
    )


@click.command()
@click.argument("copy", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), default="magnetar-metadata", show_default=True,
    help="Folder of the metadata service, which is stopped.",
)  # fmt: skip
@SECURITY_OPTION
@METADATA_OPTION
@click.option("--listen", default="", metavar="HOST:PORT", help="With --security. The service's; default: --metadata.")
@click.option(
    "--wait", "wait_s", type=FiniteNumber(min=0.0), default=DEFAULT_WAIT_S, show_default=True, metavar="SECONDS",
    help="With --security. How long for the bookies to answer; all of them end it.",
)  # fmt: skip
@OUTPUT_OPTION
@YES_OPTION
def restore(
    copy: Path, data: Path, security: str | None, metadata_: str, listen: str, wait_s: float, output: str, yes: bool
) -> None:
    """Put a copy in the place of the metadata's file, and say what is newer elsewhere.

    The service must be stopped; its file, if there is one, is kept beside the new one. The bookies that COPY names are
    asked which ledgers they saw: new ids begin above those, and bookies keep the ledgers that the copy does not contain
    until `magnetar bookies gc --now --force`.

    With --security the command needs the certificates of the service and of an operator. While it asks the bookies, it
    serves the keys of members at the service's address, because bookies recognise an operator by its key there.

    Example: magnetar metadata restore monday.backup --data /var/lib/magnetar/metadata
    """
    from ...metadata import sqlite as copies

    found = copies.read_backup_contents(str(copy))
    target = data.absolute() / "metadata.sqlite"
    copies.check_service_stopped(str(target))
    before = _contents(target, found.ledgers)
    if get_members_section(security) is None:
        answers = asyncio.run(_ask(found))
    else:
        where = RestoreLocations(security, metadata_, listen or metadata_, str(copy), f"{target}.asking")
        answers = asyncio.run(_ask_as_member(found, where, wait_s))
    rows = _compare(found, before, answers)
    CommandOutput(output).print_rows(rows, ("where", "highestLedger", "newer"))
    for text in _describe_lost_ledgers(before.topics if before is not None else {}):
        click.echo(text, err=True)
    confirm_deletion(
        f"Put {copy} (revision {found.revision}, ledger ids up to {found.highest}) in place of {target}", yes
    )
    least = max([found.highest, *(row["highestLedger"] for row in rows if isinstance(row["highestLedger"], int))])
    kept = copies.restore_backup(str(copy), str(target), least, secrets.token_hex(8))
    if kept:
        click.echo(f"what was there is kept: {kept}", err=True)
    click.echo(f"restored; ledger ids go on above {least}", err=True)
    click.echo("start the service; bookies that run register by themselves", err=True)


def _describe_lost_ledgers(topics: dict[str, int]) -> Iterator[str]:
    """Returns a line for each of the topics that have ledgers which the copy lacks; at most LOST_TOPICS_SHOWN of
    them."""
    for topic, ledgers in list(topics.items())[:LOST_TOPICS_SHOWN]:
        yield f"not in the copy: {ledgers} ledger{'' if ledgers == 1 else 's'} of {topic or 'no topic that is known'}"
    if len(topics) > LOST_TOPICS_SHOWN:
        yield f"… and those of {len(topics) - LOST_TOPICS_SHOWN:,} more topics; -o json names all"


def _contents(path: Path, known: frozenset[int]) -> BackupContents | None:
    """Returns the contents of a copy of the metadata, with the topics of the ledgers that are not `known`; None if
    there is no file, or it cannot be read at all."""
    from ...metadata import sqlite as copies
    from ...proto.errors import MagnetarError

    try:
        return copies.read_backup_contents(str(path), known)
    except MagnetarError:
        return None


async def _ask(found: BackupContents) -> dict[str, int | str]:
    """Asks the bookies that a copy names; returns by bookie the largest ledger id that it has or had, or why it does
    not answer."""
    from .admin_port import BookiePeer

    async def ask(bookie: BookieRecord) -> int | str:
        if bookie.key:
            return "not asked: it takes members alone; give --security FILE"
        answer = await _highest(BookiePeer(bookie.bookie, bookie.endpoint, BOOKIE_ASK_TIMEOUT_S))
        return f"not asked: {answer}" if isinstance(answer, Exception) else answer

    answers = await asyncio.gather(*map(ask, found.bookies))
    return {bookie.bookie: answer for bookie, answer in zip(found.bookies, answers, strict=True)}


async def _highest(peer: BookiePeer) -> int | Exception:
    """Returns the largest ledger id that a bookie has or had, or the error; closes its connection."""
    from ...proto.errors import MagnetarError
    from ..common.exits import CommandFailure

    try:
        return int((await peer.ask("state"))["highestLedger"])
    except (MagnetarError, CommandFailure, ValueError, KeyError) as error:
        return error
    finally:
        await peer.close()


@asynccontextmanager
async def serve_metadata_copy(
    world: World, endpoint: Endpoint, copy: str, scratch: str
) -> AsyncIterator[MetadataServer]:
    """While the `async with` block runs, serves the metadata in the file `scratch`, a copy of the file `copy`, at
    `endpoint`, and yields the server. Then deletes `scratch`. Raises Busy if the port is taken. Raises DataLost or
    InvalidConfiguration if the copy cannot be opened."""
    from ...metadata import sqlite
    from ...metadata.server import MembersOnlyService, MetadataServer

    sqlite.remove_store_files(scratch)
    sqlite.restore_backup(copy, scratch, 0, secrets.token_hex(8))
    try:
        server = await MetadataServer.start(world, endpoint, scratch, service=MembersOnlyService)
        try:
            yield server
        finally:
            await server.close()
    finally:
        sqlite.remove_store_files(scratch)


class RestoreLocations(NamedTuple):
    """The files and addresses that `magnetar metadata restore` uses in a secured cluster. `security`: the settings
    file; `metadata`: the address at which this command and the bookies connect; `listen`: the address at which it
    serves a scratch copy there; `copy`: the backup; `scratch`: the file of the scratch copy."""

    security: str | None
    metadata: str
    listen: str
    copy: str
    scratch: str


async def _ask_as_member(found: BackupContents, where: RestoreLocations, wait_s: float) -> dict[str, int | str]:
    """Asks, as `_ask` does, bookies that accept members only (metadata/server.py `MembersOnlyService`)."""
    from ...metadata.session import get_store_name
    from ...runtime.process import make_system_world
    from ..run.servers import make_member_world, parse_endpoint, parse_metadata_address

    address = parse_metadata_address(where.metadata)
    if not isinstance(address, type(parse_endpoint(where.listen, "--listen"))):
        raise click.UsageError(f"{get_store_name(address)} is restored with its own tools")
    world = make_member_world(make_system_world(), where.security, "metadata")
    os.makedirs(os.path.dirname(where.scratch), exist_ok=True)
    async with serve_metadata_copy(world, parse_endpoint(where.listen, "--listen"), where.copy, where.scratch):
        operator, members = await OperatorOptions(where.security, where.metadata).make_operator_world()
        assert members is not None
        try:
            asked = RestoredBookieAsker(operator, members, wait_s)
            answers = await asyncio.gather(*map(asked.ask, found.bookies))
        finally:
            await members.close()
    return {bookie.bookie: answer for bookie, answer in zip(found.bookies, answers, strict=True)}


class RestoredBookieAsker:
    """Asks the bookies in restored metadata which ledgers they have seen. The copy of the metadata contains the keys
    that the bookies had when it was made. A bookie that was restarted later has another key, so all keys that running
    bookies register are tried, until `wait_s` seconds have passed."""

    def __init__(self, world: World, members: Members, wait_s: float) -> None:
        self._world = world
        self._members = members
        self._until = world.clock.monotonic() + wait_s
        self._taken: set[str] = set()  # keys whose bookies have answered

    async def ask(self, bookie: BookieRecord) -> int | str:
        """Returns the largest ledger id that the bookie has or had; if it does not answer in time, a text that says
        why."""
        from .admin_port import BookiePeer

        why: object = "it shows no key; does it run, and reach --metadata?"
        while True:
            for key in self._likely(bookie):
                peer = BookiePeer(bookie.bookie, bookie.endpoint, BOOKIE_ASK_TIMEOUT_S)
                peer.connect_as_member(self._world, key)
                answer = await _highest(peer)
                if isinstance(answer, int):
                    self._taken.add(key)
                    return answer
                why = answer
            if self._world.clock.monotonic() >= self._until:
                return f"not asked: {why}"
            await asyncio.sleep(BOOKIE_RETRY_S)

    def _likely(self, bookie: BookieRecord) -> list[str]:
        shown = self._members.list_keys("bookie")
        return [bookie.key] if bookie.key in shown else [key for key in shown if key not in self._taken]


def _compare(
    found: BackupContents, before: BackupContents | None, bookies: dict[str, int | str]
) -> list[dict[str, object]]:
    """Returns a row for the copy, for the replaced file, and for each bookie. `newer`: what it has and the
    copy lacks."""
    rows: list[dict[str, object]] = [{"where": "the copy", "highestLedger": found.highest, "newer": ""}]
    if before is not None:
        more = len(before.ledgers - found.ledgers)
        newer = f"{more} ledgers, {max(0, before.revision - found.revision)} revisions"
        row = {"where": "the file that it replaces", "highestLedger": before.highest, "newer": newer}
        rows.append({**row, "topics": before.topics})
    for bookie, highest in bookies.items():
        if isinstance(highest, str):
            rows.append({"where": f"bookie {bookie}", "highestLedger": None, "newer": highest})
            continue
        newer = f"ledgers {found.highest + 1} to {highest}" if highest > found.highest else "nothing"
        rows.append({"where": f"bookie {bookie}", "highestLedger": highest, "newer": newer})
    return rows
