"""`magnetar bookies forget|move|accept-metadata`: what an operator says when a bookie cannot know.

They change the metadata about a bookie that is stopped (bookie/store/identity.py): over the metadata service, or
in the folder of a stopped `magnetar standalone`.

Also in this file, each below its heading: `magnetar bookies racks|set-rack|delete-rack` (racks); `magnetar cluster
finish-upgrade` (upgrade).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..common.output import OUTPUT, CommandOutput
from ..common.session import YES, confirm
from ..run.servers import METADATA_HELP
from .admin_port import ROLE, SECURITY, resolve_context_option

if TYPE_CHECKING:
    from ...metadata.records import CookieRecord
    from ...metadata.store import MetadataStore

WAIT_S = 5.0
SESSION_S = 10.0

BOOKIE = click.argument("bookie")


class MetadataAccessOptions(NamedTuple):
    """The options --metadata and --security: the address of the metadata, and the file with the credentials for it."""

    address: str
    security: str | None


def with_metadata_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds the options --metadata, --security and --data, which say where the metadata is and
    which credentials to use."""

    @click.option(
        "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
        help=METADATA_HELP, callback=resolve_context_option,
    )  # fmt: skip
    @SECURITY
    @click.option("--data", type=click.Path(file_okay=False, exists=True), help="Or a stopped standalone's folder.")
    @OUTPUT
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        where = MetadataAccessOptions(options.pop("metadata_"), options.pop("security"))
        function(*args, metadata_=where, **options)

    return command


@contextlib.asynccontextmanager
async def open_metadata(where: MetadataAccessOptions, data: str | None) -> AsyncIterator[MetadataStore]:
    from ...runtime.process import make_system_world
    from ..run.servers import connect_metadata, make_member_world, parse_metadata_address

    world = make_system_world()
    if data is None:
        member = make_member_world(world, where.security, ROLE)
        store: MetadataStore = await connect_metadata(
            member, parse_metadata_address(where.address, where.security), WAIT_S, SESSION_S
        )
        try:
            yield store
        finally:
            await store.close()
        return
    from ...bookie.store.identity import lock_directory
    from ...metadata.sqlite import SqliteStore
    from ...metadata.store import adopt_cluster_format

    with contextlib.closing(lock_directory(world.files, data)):
        tree = await SqliteStore.open(world, str(Path(data) / "metadata.sqlite"))
        try:
            session = tree.new_session()
            await adopt_cluster_format(session)
            yield session
        finally:
            await tree.close()


BEGINNING = 8
"""Characters of an id that name a bookie at least: so many are shown where ids are shortened."""


def _change(
    metadata: MetadataAccessOptions, data: str | None, output: str, bookie: str,
    change: Callable[[MetadataStore, str], Awaitable[CookieRecord]], question: str, yes: bool,
) -> None:  # fmt: skip
    """Finds the bookie whose id begins with `bookie`, asks for confirmation, changes the record of the bookie, and
    prints it. `question`: with `{}` for the full id and the place of the bookie."""

    async def find() -> tuple[str, str]:
        async with open_metadata(metadata, data) as store:
            return await _find_bookie(store, bookie)

    async def run(id_: str) -> CookieRecord:
        async with open_metadata(metadata, data) as store:
            return await change(store, id_)

    id_, place = asyncio.run(find())
    confirm(question.format(f"{id_} at {place}"), yes)  # no session of the metadata waits for the answer
    record = asyncio.run(run(id_))
    row = {"bookie": record.bookie, "places": list(record.directories), "starts": record.starts}
    CommandOutput(output).print_rows([row], ("bookie", "places", "starts"))


async def _find_bookie(store: MetadataStore, beginning: str) -> tuple[str, str]:
    """Returns the id and the place of the only bookie with a cookie whose id begins so. Raises Failure if there are
    several or `beginning` is too short, NotFound if there is none."""
    from ...metadata import paths
    from ...metadata.records import CookieRecord
    from ...metadata.store import get_record
    from ...proto.errors import NotFound
    from ..common.exits import Failure

    known = await store.children(paths.COOKIES)
    found = [each for each in known if each.startswith(beginning)]
    if len(beginning) < BEGINNING and beginning not in known:
        raise Failure(f"{beginning!r} is too short for the id of a bookie: give {BEGINNING} characters of it or more")
    if len(found) > 1:
        raise Failure(f"{len(found)} bookies' ids begin with {beginning!r}; give more of it")
    record = await get_record(store, paths.cookie(found[0]), CookieRecord) if found else None
    if record is None:
        text = f"the metadata knows no bookie {beginning}; `magnetar bookies list` shows them"
        raise NotFound(text, bookie=beginning)
    return found[0], ", ".join(record[0].directories)


@click.command()
@BOOKIE
@with_metadata_options
@YES
def forget(bookie: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool) -> None:
    """Remove a bookie whose data is lost for good from the cluster, so that a new bookie may have its place. BOOKIE is
    its id, and it must be stopped; the beginning of the id is enough. If its directory is found again, no bookie can
    start with it.

    Example: magnetar bookies forget 6f9619ff
    """
    from ...bookie.store import identity

    question = "Forget bookie {}; its directory never starts again"
    _change(metadata_, data, output, bookie, identity.delete_bookie, question, yes)


@click.command()
@BOOKIE
@click.argument("place")
@with_metadata_options
@YES
def move(bookie: str, place: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool) -> None:
    """Register a new place for a bookie whose directory was moved. PLACE is HOST:DIRECTORY as the bookie is given it,
    or its setting `place`. No copy of the directory may be left at the old place.

    Example: magnetar bookies move 6f9619ff-8b86-4d01-b42d-00cf4fc964ff bookie-7:/data
    """
    from ...bookie.store import identity

    def change(store: MetadataStore, id_: str) -> Awaitable[CookieRecord]:
        return identity.change_bookie_place(store, id_, place)

    question = "Move bookie {} to " + place.replace("{", "{{").replace("}", "}}")
    _change(metadata_, data, output, bookie, change, question, yes)


@click.command("accept-metadata")
@BOOKIE
@with_metadata_options
@YES
def accept_metadata(bookie: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool) -> None:
    """Let a bookie start although the metadata was restored from a backup that is older than the bookie's directory.

    Example: magnetar bookies accept-metadata 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    from ...bookie.store import identity

    question = "What this metadata does not know of ledgers is kept, and cannot be read. Let bookie {} start so"
    _change(metadata_, data, output, bookie, identity.accept_metadata, question, yes)


# --------------------------------------------------------------------------------------------------------- racks
# `magnetar bookies racks|set-rack|delete-rack`: where bookies stand, said in the metadata (`RacksRecord`).
#
# It overrides the `--rack` that a bookie was started with, and every broker uses it at once for its next choice.
# Ledgers that are already on bookies stay there. Over the metadata service, or in the folder of a stopped `magnetar
# standalone`.


COLUMNS = ("bookie", "rack", "registered")


def _bookie(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise click.UsageError(f"{text!r} is no bookie's id; 'magnetar bookies list' shows them") from None


def _racks_change(
    metadata: MetadataAccessOptions, data: str | None, output: str, change: Callable[[dict[str, str]], None] | None
) -> None:
    """Changes the mapping of racks if `change` is given, then prints every bookie that is registered or mapped."""
    from ...metadata import paths
    from ...metadata.records import BookieRecord, RacksRecord
    from ...metadata.store import get_record, update_record

    def changed(found: RacksRecord | None) -> RacksRecord | None:
        mapping = dict(found.racks) if found is not None else {}
        if change is not None:
            change(mapping)
        return RacksRecord(racks=dict(sorted(mapping.items()))) if found is not None or mapping else None

    async def run() -> tuple[dict[str, str], dict[str, str]]:
        async with open_metadata(metadata, data) as store:
            if change is not None:
                await update_record(store, paths.RACKS, RacksRecord, changed)
            mapped = await get_record(store, paths.RACKS, RacksRecord)
            said = {}
            for name in await store.children(paths.BOOKIES):
                record = await get_record(store, paths.bookie(name), BookieRecord)
                if record is not None:
                    said[name] = record[0].rack
            return (dict(mapped[0].racks) if mapped is not None else {}), said

    mapped, said = asyncio.run(run())
    rows = [
        {"bookie": bookie, "rack": mapped.get(bookie) or said[bookie], "registered": said.get(bookie)}
        for bookie in sorted({*mapped, *said})
    ]
    CommandOutput(output).print_rows(rows, COLUMNS, empty="no bookies")


@click.command()
@with_metadata_options
def racks(metadata_: MetadataAccessOptions, data: str | None, output: str) -> None:
    """Show the rack of each bookie. `registered` is the rack that the bookie reports itself.

    Example: magnetar bookies racks --metadata 127.0.0.1:7640
    """
    _racks_change(metadata_, data, output, None)


@click.command("set-rack")
@BOOKIE
@click.argument("rack")
@with_metadata_options
def set_rack(bookie: str, rack: str, metadata_: MetadataAccessOptions, data: str | None, output: str) -> None:
    """Set the rack of a bookie: the copies of an entry are stored in different racks. RACK is any name, as in
    /room-1/rack-7; bookies with the same name are in one rack.

    Example: magnetar bookies set-rack 6f9619ff-8b86-4d01-b42d-00cf4fc964ff /rack-7
    """
    bookie, rack = _bookie(bookie), rack.strip()
    if not rack:
        raise click.UsageError("a rack has a name; 'magnetar bookies delete-rack' goes back to the bookie's own")
    _racks_change(metadata_, data, output, lambda mapping: mapping.update({bookie: rack}))


@click.command("delete-rack")
@BOOKIE
@with_metadata_options
def delete_rack(bookie: str, metadata_: MetadataAccessOptions, data: str | None, output: str) -> None:
    """Delete the rack that was set for a bookie: the rack that the bookie reports itself is used again.

    Example: magnetar bookies delete-rack 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    bookie = _bookie(bookie)

    def forget(mapping: dict[str, str]) -> None:
        mapping.pop(bookie, None)

    _racks_change(metadata_, data, output, forget)


# ------------------------------------------------------------------------------------------------------ upgrade
# `magnetar cluster finish-upgrade`: raises the format of the cluster, after which older processes do not start.


@click.command("finish-upgrade")
@click.option("--dry-run", is_flag=True, help="Only look whether it could be finished.")
@with_metadata_options
def finish_upgrade(metadata_: MetadataAccessOptions, data: str | None, output: str, dry_run: bool) -> None:
    """Let all processes write the formats of this version of Magnetar. Afterwards no older version can start.

    Refused while a registered broker or bookie is older. A process writes the new formats from its next start on.
    Clients and the metadata service are not registered: upgrade the metadata service before.

    \b
    Examples:
      magnetar cluster finish-upgrade --dry-run
      magnetar cluster finish-upgrade
    """
    from ...metadata.store import finish_upgrade as finish
    from ..common.exits import Failure

    async def run() -> tuple[int, int, list[str]]:
        async with open_metadata(metadata_, data) as store:
            return await finish(store, dry_run=dry_run)

    before, after, older = asyncio.run(run())
    if older:
        raise Failure(f"older processes are registered, upgrade them first: {', '.join(older)}")
    CommandOutput(output).print_record({"before": before, "format": after})
