"""`magnetar bookies gc` and `magnetar bookies state`: what running bookies hold, and their disk space given back."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ...proto.alarms import format_count
from ..common.exits import FAILED, Failure
from ..common.output import Row
from ..common.session import YES, Session, confirm
from ..common.units import FiniteNumber
from .admin_port import with_operator_and_watch_options, with_operator_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .admin_port import BookiePeer

POLL_S = 0.2
"""Seconds between two requests about a running collection; each is one small message."""

PLAN_COLUMNS = ("bookie", "log", "state", "bytes", "livePercent", "ledgers", "action", "reason", "heldBy")
DONE_COLUMNS = ("bookie", "ledgersDeleted", "logsDeleted", "logsCompacted", "bytesFreed", "bytesMoved", "badRecords")
STATE_COLUMNS = (
    "bookie", "disk", "freeBytes", "logs", "ledgers", "limboUpto", "restored", "quarantined", "scrubPercent",
    "scrubDamaged", "gc",
)  # fmt: skip
OWNERS_SHOWN = 3

BOOKIE = click.option("--bookie", default=None, metavar="ID", help="Only this one; the beginning of its id is enough.")


@click.command()
@click.option("--plan", "what", flag_value="plan", help="What would be done with each log, and why; changes nothing.")
@click.option("--now", "what", flag_value="now", help="Do it, and wait until it is done.")
@click.option("--status", "what", flag_value="status", help="What a collection that was started does or did.")
@click.option("--major", is_flag=True, help="Also logs of which up to half lives, and small ones.")
@click.option("--roll", is_flag=True, help="With --now: also the open logs, where little of them lives.")
@click.option("--force", is_flag=True, help="With --now: give up, after its grace, all that the metadata lacks now.")
@BOOKIE
@YES
@with_operator_options
def gc(session: Session, what: str | None, major: bool, roll: bool, force: bool, bookie: str | None, yes: bool) -> None:
    """Show or start garbage collection, which frees the disk space of deleted ledgers.

    Bookies also collect without this command. A ledger that was just deleted is collected after its grace (gc_grace_s).
    A bookie keeps a ledger that the metadata lacks and nobody deleted until --force is given once. --force counts for
    the present metadata, until the bookie is restarted: after another restore the bookie asks again.

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
        confirm("Delete all ledgers that the metadata lacks, after their grace (it must be the right metadata)", yes)
    with show_progress_of_bookies(session.out.is_structured, peers) as hear:
        ended = asyncio.run(_collect(peers, hear, {"major": major, "force": force, "roll": roll}))
    _report(session, peers, ended)


def _plan_row(peer: BookiePeer, log: dict[str, Any]) -> Row:
    """Returns a row: JSON has the holders with all their details; the table has the topics of the largest."""
    owners = list(dict.fromkeys(format_ledger_owner(holder) for holder in log["holders"]))
    more = ["…"] if len(owners) > OWNERS_SHOWN or log["ledgers"] > len(log["holders"]) else []
    return {"bookie": peer.id, **log, "heldBy": owners[:OWNERS_SHOWN] + more}


def format_ledger_owner(holder: dict[str, Any]) -> str:
    """Returns a short text for users that names the owner of a ledger, such as a topic."""
    if "topic" in holder:
        name = str(holder["topic"]).removeprefix("persistent://")
        return f"{name} ({holder['cursor']})" if "cursor" in holder else name
    return f"ledger {holder['ledger']}" + (" (deleted, in its grace)" if holder.get("deleted") else "")


def _status_row(found: dict[str, Any]) -> Row:
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


def _report(session: Session, peers: list[BookiePeer], ended: list[dict[str, Any]]) -> None:
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
            raise Failure(f"bookie {row['bookie']}: garbage collection failed: {row['message']}", FAILED)
        if row.get("refused"):
            raise Failure(f"bookie {row['bookie']} deletes nothing of some ledgers: {row['refused']}.", FAILED)


@click.command()
@BOOKIE
@with_operator_and_watch_options
def state(session: Session, bookie: str | None) -> None:
    """Show what each bookie reports about itself: disk, limbo, scrubber, garbage collection.

    \b
    Examples:
      magnetar bookies state
      magnetar bookies state -o json
    """
    from .admin_port import ask_bookies, find_bookies

    peers = find_bookies(session, bookie)
    rows = [_state_row(peer, each) for peer, each in zip(peers, ask_bookies(peers, "state"), strict=True)]
    session.out.print_row_stream(rows, STATE_COLUMNS)


def _state_row(peer: BookiePeer, found: dict[str, Any]) -> Row:
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
@YES
@with_operator_options
def accept_loss(session: Session, bookie: str, wait_s: float, yes: bool) -> None:
    """Let a bookie leave limbo although some entries that it lost cannot be copied from any other bookie.

    The bookie asks all other bookies once more, and then gives up the missing entries: entries that only it had are
    lost for good. First try to bring back other bookies, or the old disk. What was given up is printed. The beginning
    of the bookie's ID is enough.

    Example: magnetar bookies accept-loss 1f3c90a2
    """
    from .admin_port import ask_bookies, find_bookies

    peers = find_bookies(session, bookie, wait_s)
    confirm(f"Give up for good what bookie {peers[0].id} has lost and no other bookie has", yes)
    (answer,) = ask_bookies(peers, "accept-loss")
    rows = [{"ledger": int(ledger), "lacks": reason} for ledger, reason in answer["givenUp"].items()]
    session.out.print_row_stream(rows, ("ledger", "lacks"), empty="limbo has ended; nothing was given up")
