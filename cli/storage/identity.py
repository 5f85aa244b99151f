"""`magnetar bookies forget|move|replace-directory|accept-metadata`: what an operator says when a bookie cannot know.

They change the metadata about a bookie that is stopped (bookie/store/identity.py): over the metadata service, or
in the folder of a stopped `magnetar standalone`.

Also in this file, each below its heading: `magnetar bookies racks|set-rack|delete-rack` (racks); `magnetar cluster
finish-upgrade` (upgrade); what running bookies hold, and their garbage collection (gc).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...proto.alarms import format_count
from ..common.exits import FAILED, CommandFailure
from ..common.output import OUTPUT_OPTION, CommandOutput, OutputRow
from ..common.session import YES_OPTION, CommandSession, confirm_deletion
from ..common.units import FiniteNumber
from ..run.servers import METADATA_HELP
from .admin_port import (
    OPERATOR_ROLE,
    SECURITY_OPTION,
    resolve_context_option,
    with_operator_and_watch_options,
    with_operator_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...metadata.records import CookieRecord
    from ...metadata.store import MetadataStore
    from .admin_port import BookiePeer

METADATA_WAIT_S = 5.0
SESSION_TIMEOUT_S = 10.0

BOOKIE_ARGUMENT = click.argument("bookie")


class MetadataAccessOptions(NamedTuple):
    """The options --metadata and --security: the address of the metadata, and the settings file with the credentials
    for it (None: no credentials)."""

    address: str
    security: str | None


def with_metadata_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds the options --metadata, --security, --data and -o. The first two are passed together as
    `metadata_`, a MetadataAccessOptions."""

    @click.option(
        "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
        help=METADATA_HELP, callback=resolve_context_option,
    )  # fmt: skip
    @SECURITY_OPTION
    @click.option("--data", type=click.Path(file_okay=False, exists=True), help="Or a stopped standalone's folder.")
    @OUTPUT_OPTION
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        where = MetadataAccessOptions(options.pop("metadata_"), options.pop("security"))
        function(*args, metadata_=where, **options)

    return command


@contextlib.asynccontextmanager
async def open_metadata(where: MetadataAccessOptions, data: str | None) -> AsyncIterator[MetadataStore]:
    """Yields a session with the metadata while the `async with` block runs, and closes it afterwards. The metadata is
    at `where`; if `data` is given, in the folder of a stopped `magnetar standalone`. Raises Unavailable if the service
    does not answer within METADATA_WAIT_S seconds, Busy if the folder is in use, UsageError or InvalidConfiguration if
    `where` is wrong; NewerFormat if a newer release wrote the metadata, DataLost if the file in the folder is damaged.
    """
    from ...runtime.process import make_system_world
    from ..run.servers import connect_metadata, make_member_world, parse_metadata_address

    world = make_system_world()
    if data is None:
        member = make_member_world(world, where.security, OPERATOR_ROLE)
        store: MetadataStore = await connect_metadata(
            member, parse_metadata_address(where.address, where.security), METADATA_WAIT_S, SESSION_TIMEOUT_S
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


BOOKIE_ID_PREFIX_MIN = 8
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
    confirm_deletion(question.format(f"{id_} at {place}"), yes)  # no session of the metadata waits for the answer
    record = asyncio.run(run(id_))
    row = {"bookie": record.bookie, "places": list(record.directories), "starts": record.starts}
    CommandOutput(output).print_rows([row], ("bookie", "places", "starts"))


async def _find_bookie(store: MetadataStore, beginning: str) -> tuple[str, str]:
    """Returns the id and the place of the only bookie with a cookie whose id begins so. Raises CommandFailure if there
    are several or `beginning` is too short, NotFound if there is none."""
    from ...metadata import paths
    from ...metadata.records import CookieRecord
    from ...metadata.store import get_record
    from ...proto.errors import NotFound
    from ..common.exits import CommandFailure

    known = await store.children(paths.COOKIES)
    found = [each for each in known if each.startswith(beginning)]
    if len(beginning) < BOOKIE_ID_PREFIX_MIN and beginning not in known:
        raise CommandFailure(
            f"{beginning!r} is too short for the id of a bookie: give {BOOKIE_ID_PREFIX_MIN} characters of it or more"
        )
    if len(found) > 1:
        raise CommandFailure(f"{len(found)} bookies' ids begin with {beginning!r}; give more of it")
    record = await get_record(store, paths.cookie(found[0]), CookieRecord) if found else None
    if record is None:
        text = f"the metadata knows no bookie {beginning}; `magnetar bookies list` shows them"
        raise NotFound(text, bookie=beginning)
    return found[0], ", ".join(record[0].directories)


@click.command()
@BOOKIE_ARGUMENT
@with_metadata_options
@YES_OPTION
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
@BOOKIE_ARGUMENT
@click.argument("directory")
@with_metadata_options
@YES_OPTION
def replace_directory(
    bookie: str, directory: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool
) -> None:
    """Let a bookie start once with an empty folder in the place of one whose disk is lost for good. BOOKIE is its id,
    and it must be stopped; the beginning of the id is enough. DIRECTORY is `journal`, or `ledgers-0`, `ledgers-1` … in
    the order of its --ledgers. The bookie fetches what was in it from the other bookies.

    Example: magnetar bookies replace-directory 6f9619ff ledgers-1
    """
    from ...bookie.store import identity

    def change(store: MetadataStore, id_: str) -> Awaitable[CookieRecord]:
        return identity.accept_replaced_directory(store, id_, directory)

    question = "Give up what is in " + directory.replace("{", "{{").replace("}", "}}") + " of bookie {}"
    _change(metadata_, data, output, bookie, change, question, yes)


@click.command()
@BOOKIE_ARGUMENT
@click.argument("place")
@with_metadata_options
@YES_OPTION
def move(bookie: str, place: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool) -> None:
    """Register a new place for a bookie whose directory was moved. BOOKIE is its id, and it must be stopped; the
    beginning of the id is enough. PLACE is the bookie's setting `place`; if it has none, HOST:DIRECTORY: its settings
    `advertised_host` (or `host`) and `data`. No copy of the directory may be left at the old place.

    Example: magnetar bookies move 6f9619ff-8b86-4d01-b42d-00cf4fc964ff bookie-7:/data
    """
    from ...bookie.store import identity

    def change(store: MetadataStore, id_: str) -> Awaitable[CookieRecord]:
        return identity.change_bookie_directory(store, id_, place)

    question = "Move bookie {} to " + place.replace("{", "{{").replace("}", "}}")
    _change(metadata_, data, output, bookie, change, question, yes)


@click.command("accept-metadata")
@BOOKIE_ARGUMENT
@with_metadata_options
@YES_OPTION
def accept_metadata(bookie: str, metadata_: MetadataAccessOptions, data: str | None, output: str, yes: bool) -> None:
    """Let a bookie start although the metadata was restored from a backup that is older than the bookie's directory.
    BOOKIE is its id, and it must be stopped; the beginning of the id is enough.

    Example: magnetar bookies accept-metadata 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    from ...bookie.store import identity

    question = "What this metadata does not know of ledgers is kept, and cannot be read. Let bookie {} start so"
    _change(metadata_, data, output, bookie, identity.accept_restored_metadata, question, yes)


# --------------------------------------------------------------------------------------------------------- racks
# `magnetar bookies racks|set-rack|delete-rack`: where bookies stand, said in the metadata (`RacksRecord`).
#
# It overrides the `--rack` that a bookie was started with, and every broker uses it at once for its next choice.
# Ledgers that are already on bookies stay there. Over the metadata service, or in the folder of a stopped `magnetar
# standalone`.


DEPARTED_COLUMNS = ("bookie", "rack", "registered")


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
            for name in await store.children(paths.AVAILABLE_BOOKIES):
                record = await get_record(store, paths.bookie(name), BookieRecord)
                if record is not None:
                    said[name] = record[0].rack
            return (dict(mapped[0].racks) if mapped is not None else {}), said

    mapped, said = asyncio.run(run())
    rows = [
        {"bookie": bookie, "rack": mapped.get(bookie) or said[bookie], "registered": said.get(bookie)}
        for bookie in sorted({*mapped, *said})
    ]
    CommandOutput(output).print_rows(rows, DEPARTED_COLUMNS, empty="no bookies")


@click.command()
@with_metadata_options
def racks(metadata_: MetadataAccessOptions, data: str | None, output: str) -> None:
    """Show the rack of each bookie. `registered` is the rack that the bookie reports itself.

    Example: magnetar bookies racks --metadata 127.0.0.1:7640
    """
    _racks_change(metadata_, data, output, None)


@click.command("set-rack")
@BOOKIE_ARGUMENT
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
@BOOKIE_ARGUMENT
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
    from ..common.exits import CommandFailure

    async def run() -> tuple[int, int, list[str]]:
        async with open_metadata(metadata_, data) as store:
            return await finish(store, dry_run=dry_run)

    before, after, older = asyncio.run(run())
    if older and after > before:
        raise CommandFailure(
            f"the format is raised, and older processes registered meanwhile; stop and upgrade them: {', '.join(older)}"
        )
    if older:
        raise CommandFailure(f"older processes are registered, upgrade them first: {', '.join(older)}")
    CommandOutput(output).print_record({"before": before, "format": after})


# ------------------------------------------------------------------------------------------------------------------- gc
# `magnetar bookies gc` and `magnetar bookies state`: what running bookies hold, and their disk space given back.

POLL_S = 0.2
"""Seconds between two requests about a running collection; each is one small message."""

PLAN_COLUMNS = ("bookie", "log", "state", "bytes", "livePercent", "ledgers", "action", "reason", "heldBy")
DONE_COLUMNS = ("bookie", "ledgersDeleted", "logsDeleted", "logsCompacted", "bytesFreed", "bytesMoved", "badRecords")
STATE_COLUMNS = (
    "bookie", "path", "disk", "freeBytes", "logs", "ledgers", "limboUpto", "restored", "quarantined", "scrubPercent",
    "scrubDamaged", "gc",
)  # fmt: skip
OWNERS_SHOWN = 3

BOOKIE_OPTION = click.option(
    "--bookie", default=None, metavar="ID", help="Only this one; the beginning of its id is enough."
)


@click.command()
@click.option("--plan", "what", flag_value="plan", help="What would be done with each log, and why; changes nothing.")
@click.option("--now", "what", flag_value="now", help="Do it, and wait until it is done.")
@click.option("--status", "what", flag_value="status", help="What a collection that was started does or did.")
@click.option("--major", is_flag=True, help="Also logs of which up to half lives, and small ones.")
@click.option("--roll", is_flag=True, help="With --now: also the open logs, where little of them lives.")
@click.option("--force", is_flag=True, help="With --now: give up, after its grace, all that the metadata lacks now.")
@BOOKIE_OPTION
@YES_OPTION
@with_operator_options
def gc(
    session: CommandSession, what: str | None, major: bool, roll: bool, force: bool, bookie: str | None, yes: bool
) -> None:
    """Show or start garbage collection, which frees the disk space of deleted ledgers.

    Bookies also collect without this command. A ledger that was just deleted is collected after its grace (gc_grace_s).
    A bookie keeps a ledger that the metadata lacks although it was not deleted, until --force is given once. --force
    counts for the present metadata, until the bookie is restarted: after another restore the bookie asks again.

    \b
    Examples:
      magnetar bookies gc --plan
      magnetar bookies gc --now --major
    """
    from .admin_port import ask_bookies, find_bookies

    if what is None:
        raise click.UsageError("what is to be done? --plan, --now or --status")
    if what != "now" and (force or roll):
        raise click.UsageError("--force and --roll go with --now")
    peers = find_bookies(session, bookie)
    if what == "plan":
        answers = ask_bookies(peers, "gc-plan", major=major)
        rows = [_plan_row(peer, log) for peer, found in zip(peers, answers, strict=True) for log in found["logs"]]
        session.out.print_row_stream(rows, PLAN_COLUMNS, empty="no entry logs")
        for peer, found in zip(peers, answers, strict=True):
            if found.get("refused"):  # an older bookie does not say it
                click.echo(f"bookie {peer.id} deletes nothing of some ledgers: {found['refused']}.", err=True)
        return
    if what == "status":
        answers = ask_bookies(peers, "gc-status")
        rows = [{"bookie": peer.id, **_status_row(found)} for peer, found in zip(peers, answers, strict=True)]
        session.out.print_row_stream(rows, ("bookie", "running", "phase", "error", *DONE_COLUMNS[1:]))
        return
    if force:
        confirm_deletion(
            "Delete all ledgers that the metadata lacks, after their grace (it must be the right metadata)", yes
        )
    with show_progress_of_bookies(session.out.is_structured, peers) as hear:
        ended = asyncio.run(_collect(peers, hear, {"major": major, "force": force, "roll": roll}))
    _report(session, peers, ended)


def _plan_row(peer: BookiePeer, log: dict[str, Any]) -> OutputRow:
    """Returns a row: JSON has the holders with all their details; the table has the topics of the largest."""
    owners = list(dict.fromkeys(format_ledger_owner(holder) for holder in log["holders"]))
    more = ["…"] if len(owners) > OWNERS_SHOWN or log["ledgers"] > len(log["holders"]) else []
    return {"bookie": peer.id, **log, "heldBy": owners[:OWNERS_SHOWN] + more}


def format_ledger_owner(holder: dict[str, Any]) -> str:
    """Returns a short text for users that names the owner of a ledger: its topic, with the subscription for a cursor's
    ledger. Names the ledger itself if it has no topic."""
    if "topic" in holder:
        name = str(holder["topic"]).removeprefix("persistent://")
        return f"{name} ({holder['cursor']})" if "cursor" in holder else name
    return f"ledger {holder['ledger']}" + (" (deleted, in its grace)" if holder.get("deleted") else "")


def _status_row(found: dict[str, Any]) -> OutputRow:
    progress, last = found["progress"] or {}, found["last"] or {}
    return {"running": found["running"], "phase": progress.get("phase"), **last, "progress": progress or None}


async def _collect(
    peers: list[BookiePeer], hear: Callable[[int, dict[str, Any]], None], options: dict[str, bool]
) -> list[dict[str, Any]]:
    """Starts a collection at all bookies and waits until they end; returns the last status of each. Ctrl-C ends only
    the waiting. `hear(number, status)` is called with each status."""

    async def one(at: int, peer: BookiePeer) -> dict[str, Any]:
        await peer.ask("gc-start", **options)
        while (status := await peer.ask("gc-status"))["running"]:
            hear(at, status)
            await asyncio.sleep(POLL_S)
        hear(at, status)
        return status

    try:
        return list(await asyncio.gather(*(one(at, peer) for at, peer in enumerate(peers))))
    finally:
        for peer in peers:
            await peer.close()


@contextmanager
def show_progress_of_bookies(json: bool, peers: list[BookiePeer]) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Shows a progress bar for each bookie on stderr if that is a terminal; shows none if the command prints `json`.
    Yields a function that gets the number of a bookie in `peers` and its status, and updates the bar of that bookie."""
    if json or not sys.stderr.isatty():
        yield lambda at, status: None
        return
    from ..common.output import make_progress_bar

    with make_progress_bar() as bar:
        tasks = [bar.add_task(f"bookie {peer.id[:8]}", total=None) for peer in peers]

        def hear(at: int, status: dict[str, Any]) -> None:
            progress = status["progress"]
            if progress is None:
                text = f"bookie {peers[at].id[:8]} {'begins' if status['running'] else 'done'}"
                bar.update(tasks[at], description=text, total=1, completed=0 if status["running"] else 1)
                return
            by_bytes = progress["phase"] == "compact" and progress["bytes"]
            done, total = ("bytes_done", "bytes") if by_bytes else ("logs_done", "logs")
            text = f"bookie {peers[at].id[:8]} {progress['phase']}"
            bar.update(tasks[at], description=text, total=progress[total] or None, completed=progress[done])

        yield hear


def _report(session: CommandSession, peers: list[BookiePeer], ended: list[dict[str, Any]]) -> None:
    rows = [{"bookie": peer.id, **(status["last"] or {})} for peer, status in zip(peers, ended, strict=True)]
    session.out.print_row_stream(rows, DONE_COLUMNS)
    if not session.out.is_structured:
        freed, moved = (sum(row.get(name) or 0 for row in rows) for name in ("bytesFreed", "bytesMoved"))
        print(f"\n{freed:,} bytes freed, {moved:,} bytes moved")
    for row in rows:
        if row.get("suspected") and row.get("graceEndsMs"):  # an older bookie does not say it
            until = datetime.fromtimestamp(row["graceEndsMs"] / 1000, UTC)
            text = (
                f"bookie {row['bookie']}: {format_count(row['suspected'], 'ledger')} not deleted yet, their grace ends "
                f"at {until:%Y-%m-%d %H:%M:%S} UTC; the first pass after that deletes them, without this command"
            )
            click.echo(text, err=True)
    for row in rows:
        if row.get("message"):
            raise CommandFailure(f"bookie {row['bookie']}: garbage collection failed: {row['message']}", FAILED)
        if row.get("refused"):
            raise CommandFailure(f"bookie {row['bookie']} deletes nothing of some ledgers: {row['refused']}.", FAILED)


@click.command()
@BOOKIE_OPTION
@with_operator_and_watch_options
def state(session: CommandSession, bookie: str | None) -> None:
    """Show what each bookie reports about itself: disk, limbo, scrubber, garbage collection. A bookie with several
    ledgers directories has a row for each of them.

    \b
    Examples:
      magnetar bookies state
      magnetar bookies state -o json
    """
    from .admin_port import ask_bookies, find_bookies

    peers = find_bookies(session, bookie)
    rows = [
        _state_row(peer, {**each, **one})
        for peer, each in zip(peers, ask_bookies(peers, "state"), strict=True)
        for one in each.get("directories") or [{}]
    ]
    session.out.print_row_stream(rows, STATE_COLUMNS)


def _state_row(peer: BookiePeer, found: dict[str, Any]) -> OutputRow:
    scrub, gc_, limbo = found["scrub"], found["gc"], found["limbo"]
    return {
        "bookie": peer.id, "endpoint": peer.endpoint, **found,
        "restored": f"{limbo['limbo_ledgers_done']} of {limbo['limbo_ledgers']}" if limbo["upto"] >= 0 else None,
        "gc": found["gcRefused"] or ("running" if gc_["running"] else "idle"),
        "scrubPercent": scrub.get("percent"), "scrubDamaged": scrub.get("damaged"), "scrub": scrub, "gcStatus": gc_,
    }  # fmt: skip


@click.command("accept-loss")
@click.argument("bookie", metavar="ID")
@click.option("--wait", "wait_s", type=FiniteNumber(1), default=600.0, show_default=True, help="Seconds for it.")
@YES_OPTION
@with_operator_options
def accept_loss(session: CommandSession, bookie: str, wait_s: float, yes: bool) -> None:
    """Let a bookie leave limbo although some entries that it lost cannot be copied from any other bookie.

    The bookie asks all other bookies once more, and then gives up the missing entries: entries that only it had are
    lost for good. First try to bring back other bookies, or the old disk. What was given up is printed. The beginning
    of the bookie's ID is enough.

    Example: magnetar bookies accept-loss 1f3c90a2
    """
    from .admin_port import ask_bookies, find_bookies

    peers = find_bookies(session, bookie, wait_s)
    confirm_deletion(f"Give up for good what bookie {peers[0].id} has lost and no other bookie has", yes)
    (answer,) = ask_bookies(peers, "accept-loss")
    rows = [{"ledger": int(ledger), "lacks": reason} for ledger, reason in answer["givenUp"].items()]
    session.out.print_row_stream(rows, ("ledger", "lacks"), empty="limbo has ended; nothing was given up")
