"""`magnetar ledgers list|show|under-replicated`: what the metadata says of ledgers and their copies.

Any running bookie answers (bookie/admin.py): it reads the metadata at the request.

Also in this file, each below its heading: `magnetar bookies decommission|recover` (departure); `magnetar bookies
rebalance` (rebalancing); `magnetar repair` (repair).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ...proto.alarms import format_count
from ...runtime.clock import SystemClock
from ..common.exits import CommandFailure
from ..common.lazy import LazyCommand, LazyGroup
from ..common.output import show_progress
from ..common.session import YES_OPTION, CommandSession, confirm_deletion
from ..common.units import FiniteNumber
from ..run.metrics import announce_process_ready
from ..run.servers import (
    SECURITY_OPTION,
    close_metadata,
    connect_metadata,
    make_member_world,
    make_registered_world,
    parse_metadata_address,
    run_server,
    serve_until_cancelled,
    with_metadata_service_options,
)
from .admin_port import with_operator_and_watch_options, with_operator_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ...runtime.network import World
    from ..common.output import OutputRow

ledgers = LazyGroup(
    "ledgers",
    {
        "list": LazyCommand(
            ".storage.ledgers", "list_ledgers", "Ledgers: state, quorums, size, bookies, whose they are."
        ),
        "show": LazyCommand(".storage.ledgers", "show", "One ledger: its fragments, its end, what it misses."),
        "under-replicated": LazyCommand(
            ".storage.ledgers", "under_replicated", "Ledgers that miss copies, since when and why."
        ),
        "orphans": LazyCommand(
            ".admin.subscriptions", "orphans", "Ledgers without a topic or cursor; listed ones that are gone."
        ),
    },
    {"list-under-replicated": "under-replicated"},
    help="Ledgers and their copies.\n\nExample: magnetar ledgers under-replicated",
)

LEDGER_COLUMNS = ("ledger", "state", "quorum", "entries", "bytes", "fragments", "bookies", "owner")
MARK_COLUMNS = ("ledger", "missing", "since", "reason", "attempts", "retry", "stuck", "lastError")


def ask_any_bookie(
    session: CommandSession, verb: str, among: Collection[str] | None = None, **options: object
) -> dict[str, Any]:
    """Sends the request `verb` to the registered bookies, one after the other, until a bookie answers, and returns this
    answer. `among`: asks only bookies with these ids. Goes on to the next bookie after ConnectionLost, TimedOut,
    Unavailable and Unauthorized; raises any other error of `BookiePeer.ask` at once. Raises Unauthorized if a bookie
    refused this caller and none answered, CommandFailure if no bookie can be reached, NotFound if none is registered,
    and the errors of the admin client, by which a broker is asked for the bookies."""
    from ...proto.errors import ConnectionLost, TimedOut, Unauthorized, Unavailable
    from ..common.exits import CommandFailure
    from .admin_port import ask_bookies, find_bookies

    failure: Exception | None = None
    refusal: Unauthorized | None = None
    for peer in find_bookies(session, None):
        if among is not None and peer.id not in among:
            continue
        try:
            (answer,) = ask_bookies([peer], verb, **options)
            return answer
        except (ConnectionLost, TimedOut, Unavailable) as error:
            failure = error
        except Unauthorized as error:  # another bookie may be on this machine
            refusal = error
    if refusal is not None:
        raise refusal
    raise CommandFailure(f"no bookie answers: {failure}; 'magnetar bookies list' shows those that are registered")


@click.command("list")
@click.option("--bookie", default="", metavar="ID", help="Only those that name this bookie: its whole id.")
@click.option("--state", type=click.Choice(["open", "in-recovery", "closed"]), default=None, help="Only those.")
@click.option("--after", type=click.IntRange(0), default=None, metavar="LEDGER", help="Only those with a greater id.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="At most so many.")
@with_operator_and_watch_options
def list_ledgers(session: CommandSession, bookie: str, state: str | None, after: int | None, limit: int) -> None:
    """List the ledgers in the metadata, by id: state, quorums, size, bookies, and owner.

    \b
    Examples:
      magnetar ledgers list
      magnetar ledgers list --state open -o json
    """
    found = ask_any_bookie(
        session, "ledgers", bookie=bookie, state=state or "", after=-1 if after is None else after, limit=limit
    )
    rows = found["ledgers"]
    shown = [{**row, "bookies": shorten_bookie_ids(row["bookies"])} for row in rows]
    session.out.print_rows(rows if session.out.is_structured else shown, LEDGER_COLUMNS, empty="no ledgers")
    if found["more"]:
        click.echo(f"There are more: --after {rows[-1]['ledger']}", err=True)


@click.command()
@click.argument("ledger", type=click.IntRange(0))
@with_operator_and_watch_options
def show(session: CommandSession, ledger: int) -> None:
    """Show one ledger: its fragments (ranges of entries) with their bookies, its last entry, and the copies that are
    missing.

    Example: magnetar ledgers show 17
    """
    found = ask_any_bookie(session, "ledger", ledger=ledger)
    if session.out.is_structured:
        session.out.print_document(found)
        return
    mark = found["underReplicated"]
    record = {name: value for name, value in found.items() if name not in ("ensembles", "underReplicated", "bookies")}
    record["properties"] = [f"{name}={value}" for name, value in found["properties"].items()]
    session.out.print_record(record | {"missing": None if mark is None else _missing(mark)})
    click.echo()
    session.out.print_rows(found["ensembles"], ("firstEntry", "bookies"))
    if mark is not None:
        click.echo()
        session.out.print_rows([_mark_row(mark)], MARK_COLUMNS)


@click.command("under-replicated")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="At most so many.")
@with_operator_and_watch_options
def under_replicated(session: CommandSession, limit: int) -> None:
    """List the ledgers of which copies are missing: on which bookie, since when, why, and what the attempts to make
    them led to.

    A bookie is lost when it is not registered for the grace (`lost_bookie_grace_s`); departing when it is being
    emptied; incomplete when it lacks entries; damaged when it reports damage; returned until its copies were compared.

    \b
    Examples:
      magnetar ledgers under-replicated
      magnetar ledgers under-replicated -o json
    """
    found = ask_any_bookie(session, "under-replicated", limit=limit)
    rows = found["ledgers"] if session.out.is_structured else [_mark_row(mark) for mark in found["ledgers"]]
    session.out.print_rows(rows, MARK_COLUMNS, empty="every ledger has its copies")
    if found["count"] > len(rows):
        click.echo(f"{found['count']} in all: --limit shows more", err=True)


def shorten_bookie_ids(bookies: list[str]) -> list[str]:
    """Returns the first eight characters of each bookie id."""
    return [bookie[:8] for bookie in bookies]


def format_duration(seconds: float | None) -> str:
    """Returns a duration as a short text for people: `42s`, `3m`, `2h 5m`, `4d 1h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def _missing(mark: dict[str, Any]) -> list[str]:
    return [f"{bookie[:8]} ({reason})" for bookie, reason in mark["missing"].items()]


def _mark_row(mark: dict[str, Any]) -> OutputRow:
    return {
        **mark, "missing": shorten_bookie_ids(list(mark["missing"])), "since": format_duration(mark["sinceSeconds"]),
        "retry": format_duration(mark["retrySeconds"]) if mark["retrySeconds"] else None,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- departure
# `magnetar bookies decommission|recover`: everything moves off a bookie that leaves, or that is dead.


POLL_S = 1.0
"""Seconds between two requests; each reads every ledger's record."""

WAIT_OPTION = click.option("--wait/--no-wait", default=True, show_default=True, help="Until nothing is left on it.")
WAIT_S_OPTION = click.option("--wait-s", type=FiniteNumber(0), default=None, help="… but at most so many seconds.")


@click.command()
@click.argument("bookie", metavar="BOOKIE")
@click.option("--forget", is_flag=True, help="Once it is empty and stopped, forget its cookie: its place is free.")
@click.option("--cancel", is_flag=True, help="Let it stay: it takes new ledgers again. What has moved stays moved.")
@WAIT_OPTION
@WAIT_S_OPTION
@YES_OPTION
@with_operator_options
def decommission(
    session: CommandSession, bookie: str, forget: bool, cancel: bool, wait: bool, wait_s: float | None, yes: bool
) -> None:
    """Empty a bookie before it is removed: it gets no new ledgers, and every copy on it is made again on other bookies.

    The bookie keeps serving meanwhile. Ctrl-C ends the waiting, not the copying. When all is copied, stop the bookie.
    BOOKIE is its id; the beginning is enough.

    \b
    Examples:
      magnetar bookies decommission 6f9619ff --forget
      magnetar bookies decommission 6f9619ff --cancel
    """
    id_ = find_full_bookie_id(session, bookie)
    if cancel:
        ask_any_bookie(session, "depart", bookie=id_, cancel=True)
        session.out.print_result_text(f"bookie {id_} stays", bookie=id_, departing=False)
        return
    confirm_deletion(f"Move everything off bookie {id_}", yes)
    ask_any_bookie(session, "depart", bookie=id_, forget=forget)
    _show_progress(session, id_, wait, wait_s, "empty: stop it" + (", and it is forgotten" if forget else ""))


@click.command()
@click.argument("bookie", metavar="BOOKIE")
@click.option("--forget", is_flag=True, help="Once nothing names it any more, forget its cookie: its place is free.")
@WAIT_OPTION
@WAIT_S_OPTION
@YES_OPTION
@with_operator_options
def recover(session: CommandSession, bookie: str, forget: bool, wait: bool, wait_s: float | None, yes: bool) -> None:
    """Make again every copy that was stored on a dead bookie, now, without waiting for the grace. The bookie must not
    be registered. Auto-recovery does the same without this command when the grace is over.

    Example: magnetar bookies recover 6f9619ff --forget
    """
    id_ = find_full_bookie_id(session, bookie)
    confirm_deletion(f"Bookie {id_} is dead, and its data lost", yes)
    ask_any_bookie(session, "depart", bookie=id_, dead=True, forget=forget)
    _show_progress(session, id_, wait, wait_s, "nothing is left on it")


def find_full_bookie_id(session: CommandSession, beginning: str) -> str:
    """Returns the complete id of the bookie (registered or not) whose id begins with `beginning`. Raises NotFound if
    there is no such bookie, CommandFailure if there are several, and the errors of `ask_any_bookie`."""
    from ...proto.errors import NotFound

    known = [each["id"] for each in ask_any_bookie(session, "bookies")["bookies"]]
    found = [each for each in known if each.startswith(beginning)]
    if not found:
        raise NotFound(f"no bookie's id begins with {beginning!r}; 'magnetar bookies list' shows them")
    if len(found) > 1 and beginning not in found:
        raise CommandFailure(f"{len(found)} bookies' ids begin with {beginning!r}; give more of it")
    return beginning if beginning in found else str(found[0])


def _show_progress(session: CommandSession, bookie: str, wait: bool, wait_s: float | None, done: str) -> None:
    left = ask_any_bookie(session, "departure", bookie=bookie)
    if nowhere := left.get("nowhere", 0):  # an older bookie does not say it
        click.echo(
            f"no other bookie can take the copies of {format_count(nowhere, 'ledger')}: {left['takers']} take writes "
            "besides it, and have copies of the same entries already; add a bookie", err=True
        )  # fmt: skip
    if not wait:
        session.out.print_result_text(f"{left['ledgers']} ledgers move off bookie {bookie}", **left)
        return
    total = left["ledgers"]
    deadline = None if wait_s is None else SystemClock().monotonic() + wait_s
    with show_progress("ledgers moved", total, shown=not session.out.is_structured) as advance:
        left = _until_empty(session, bookie, left, total, advance, deadline)
    if left["ledgers"]:
        why = ", ".join(f"{count}: {what}" for what, count in left["stuck"].items())
        raise CommandFailure(
            f"{left['ledgers']} of {total} ledgers still lie on bookie {bookie}{f' ({why})' if why else ''}; "
            "the moving goes on, 'magnetar ledgers under-replicated' says how"
        )
    session.out.print_result_text(f"bookie {bookie}: {total} ledgers moved; {done}", **left)


def _until_empty(
    session: CommandSession, bookie: str, left: dict[str, Any], total: int, advance: Callable[[int], None],
    deadline: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Waits until the bookie is empty or the deadline has passed; returns what is left then."""
    while left["ledgers"] and (deadline is None or SystemClock().monotonic() < deadline):
        time.sleep(POLL_S)
        left = ask_any_bookie(session, "departure", bookie=bookie)
        advance(max(0, total - left["ledgers"]))
    return left


# --------------------------------------------------------------------------------------------------- rebalancing
# `magnetar bookies rebalance`: copies of sealed ledgers move from full bookies to emptier ones.


LOAD_COLUMNS = ("bookie", "used", "after", "bytesOut", "bytesIn")


@click.command()
@click.option(
    "--to-share", type=FiniteNumber(0.01, 0.99), default=0.8, show_default=True,
    help="Until no bookie uses more of its disk than this share.",
)  # fmt: skip
@click.option("--group", default="", help="Only between bookies of this group.")
@click.option("--dry-run", is_flag=True, help="Say what would move, how many bytes and how long; change nothing.")
@click.option("--status", "show_status", is_flag=True, help="Show how far the latest rebalancing is.")
@click.option("--stop", is_flag=True, help="Begin no further move. What has moved stays moved.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until the rebalancing has ended.")
@WAIT_S_OPTION
@YES_OPTION
@with_operator_options
def rebalance(
    session: CommandSession, to_share: float, group: str, dry_run: bool, show_status: bool, stop: bool,
    wait: bool, wait_s: float | None, yes: bool,
) -> None:  # fmt: skip
    """Move copies of sealed ledgers from the bookies whose disks are fullest to emptier ones.

    Auto-recovery makes the copies, as fast as missing ones. Groups, racks and the number of copies are kept; a copy is
    dropped by its bookie's garbage collection, after the other one is stored and named. Ctrl-C ends the waiting, not
    the moving: --stop does that, and the same command as before goes on.

    \b
    Examples:
      magnetar bookies rebalance --to-share 0.8 --dry-run
      magnetar bookies rebalance --to-share 0.8
      magnetar bookies rebalance --status
      magnetar bookies rebalance --stop
    """
    if sum((dry_run, show_status, stop)) > 1:
        raise click.UsageError("give one of --dry-run, --status and --stop")
    if show_status or stop:
        _print_rebalancing(session, ask_any_bookie(session, "rebalance-stop" if stop else "rebalance-status"))
        return
    plan = ask_any_bookie(session, "rebalance-plan", share=to_share, group=group)
    if dry_run:
        _print_plan(session, plan)
        return
    confirm_deletion(f"Move {format_count(plan['ledgers'], 'ledger')} ({plan['bytes']:,} bytes) to other bookies", yes)
    plan = ask_any_bookie(session, "rebalance", share=to_share, group=group)
    found = ask_any_bookie(session, "rebalance-status")
    if wait:
        deadline = None if wait_s is None else SystemClock().monotonic() + wait_s
        with show_progress("ledgers moved", plan["ledgers"], shown=not session.out.is_structured) as advance:
            while found["running"] and (deadline is None or SystemClock().monotonic() < deadline):
                time.sleep(POLL_S)
                found = ask_any_bookie(session, "rebalance-status")
                advance(found["ledgers"])
    if wait and found["running"]:
        raise CommandFailure(
            f"{found['ledgers']} of {plan['ledgers']} ledgers were moved; the moving goes on, 'magnetar bookies "
            "rebalance --status' says how far it is"
        )
    _print_rebalancing(session, found)


def _print_plan(session: CommandSession, plan: dict[str, Any]) -> None:
    if session.out.is_structured:
        session.out.print_document(plan)
        return
    rows = [
        {
            "bookie": shorten_bookie_ids([each["id"]])[0], "used": f"{each['used']:.1%}",
            "after": f"{each['after']:.1%}", "bytesOut": each["bytesOut"], "bytesIn": each["bytesIn"],
        }
        for each in plan["bookies"]
    ]  # fmt: skip
    session.out.print_rows(rows, LOAD_COLUMNS, empty="no bookie")
    took = format_duration(plan["seconds"])
    click.echo(f"would move {format_count(plan['ledgers'], 'ledger')}, {plan['bytes']:,} bytes, in about {took}")
    if not plan["full"]:
        click.echo(f"no bookie uses more than {plan['share']:.0%} of its disk", err=True)
    elif not plan["reached"]:
        click.echo(f"not all bookies come below {plan['share']:.0%}: no others can take more copies", err=True)


def _print_rebalancing(session: CommandSession, found: dict[str, Any]) -> None:
    if not found:
        session.out.print_result_text("no rebalancing was ever ordered", running=False)
        return
    planned = format_count(found["plannedLedgers"], "ledger")
    moved = f"{found['ledgers']} of about {planned} moved, {found['bytes']:,} bytes"
    state = f"{found['underWay']} under way" if found["running"] else found["end"]
    later = "" if found["running"] else "; the bookies' garbage collection frees their space"
    session.out.print_result_text(f"{moved}: {state}{later}", **found)


# -------------------------------------------------------------------------------------------------------- repair
# `magnetar repair`: a worker of auto-recovery alone. `magnetar repair status|enable|disable`: the whole cluster's.


REPAIR_COMMANDS = {
    "status": LazyCommand(".storage.ledgers", "status", "Auditor, queue, rate, progress, and how long it will take."),
    "enable": LazyCommand(".storage.ledgers", "enable", "Let missing copies be looked for and made again."),
    "disable": LazyCommand(".storage.ledgers", "disable", "Leave missing copies missing, during maintenance."),
}
WORKER_COLUMNS = ("name", "workingOn", "ledgers", "entries", "bytes", "failures", "bytesPerSecond")


@click.group(cls=LazyGroup, table=REPAIR_COMMANDS, invoke_without_command=True)
@with_metadata_service_options
@SECURITY_OPTION
@click.option("--name", default="", help="Its name in 'magnetar repair status' (default: a random one).")
@click.option("--bytes-per-s", type=click.IntRange(0), default=None, help="It copies at most this; 0: no limit.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=None, help="Settings, TOML.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def repair(
    context: click.Context, metadata_: str, wait_s: float, session_s: float, security: str | None, name: str,
    bytes_per_s: int | None, config: str | None, log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Run a process that makes missing copies of ledgers again, in addition to the bookies, which do that too.

    If a command follows, that command runs instead. In a secured cluster the process has a bookie's certificate. Its
    settings are those of `repair` in the file's [bookie] section.

    \b
    Examples:
      magnetar repair status
      magnetar repair --metadata metadata:7640 --bytes-per-s 0
    """
    if context.invoked_subcommand is not None:
        return 0
    tree = parse_metadata_address(metadata_, security)

    async def main(world: World) -> None:
        from msgspec.structs import replace

        from ...bookie.maintenance.repair import RepairSupervisor
        from ...bookie.server import BookieConfig
        from ...runtime.config import load_config
        from ...runtime.process import ProcessParts
        from ...runtime.tasks import Supervisor

        settings = load_config(BookieConfig, "bookie", file=config, overrides={"data": "-"}).repair
        settings = replace(settings, enabled=True)
        if bytes_per_s is not None:
            settings = replace(settings, bytes_per_s=bytes_per_s)
        world = make_member_world(world, security, "bookie")
        async with ProcessParts(world.clock) as parts:
            sessions = [await parts.start("metadata", connect_metadata(world, tree, wait_s, session_s), close_metadata)]

            async def renew() -> None:
                while True:
                    await sessions[-1].wait_session_lost()
                    sessions.append(await connect_metadata(world, tree, wait_s, session_s))
                    await sessions.pop(0).close()

            serving = await make_registered_world(
                parts, world, security, "bookie", lambda: connect_metadata(world, tree, wait_s, session_s)
            )
            keeper = RepairSupervisor(
                serving, lambda: sessions[-1], settings, name or world.rng.randbytes(4).hex(), 1.0
            )

            async def started() -> Supervisor:
                background = Supervisor()
                background.start_supervised("repair", keeper.run)
                background.start_supervised("repair-session", renew)
                return background

            await parts.start("repair", started(), Supervisor.close)
            announce_process_ready(f"repair://{keeper.name}", metadata=tree)
            await serve_until_cancelled()

    return run_server(main, log_level, log_format)


@click.command()
@with_operator_and_watch_options
def status(session: CommandSession) -> None:
    """Show the state of auto-recovery: which bookie is the auditor, how many ledgers lack copies and why, the workers,
    and the remaining time.

    \b
    Examples:
      magnetar repair status
      magnetar repair status -o json
    """
    found = ask_any_bookie(session, "repair-status")
    if session.out.is_structured:
        session.out.print_document(found)
        return
    shown = {name: found[name] for name in ("enabled", "auditor", "underReplicated")}
    for name in ("reasons", "stuck"):
        shown[name] = [f"{count} {what}" for what, count in found[name].items()] or None
    session.out.print_record(
        shown | {
            "bytesLeft": found["bytesLeft"], "bytesPerSecond": found["bytesPerSecond"],
            "timeToGo": format_duration(found["secondsToGo"]),
        }
    )  # fmt: skip
    click.echo()
    rows = [
        worker | {
            "workingOn": [
                f"{ledger}: {100 * done // max(total, 1)} %" for ledger, (done, total) in worker["workingOn"].items()
            ],
            "name": shorten_bookie_ids([worker["name"]])[0],
        }
        for worker in found["workers"]
    ]  # fmt: skip
    session.out.print_rows(rows, WORKER_COLUMNS, empty="no worker has done anything yet")


@click.command()
@with_operator_options
def enable(session: CommandSession) -> None:
    """Let the whole cluster look for missing copies of ledgers again, and make them.

    Example: magnetar repair enable
    """
    ask_any_bookie(session, "repair-enable", on=True)
    session.out.print_result_text("auto-recovery is on", enabled=True)


@click.command()
@with_operator_options
def disable(session: CommandSession) -> None:
    """Stop making missing copies of ledgers, for maintenance in which bookies are away for longer than the grace. No
    ledger is marked or copied until 'magnetar repair enable'; copies in progress are dropped within seconds.

    Example: magnetar repair disable
    """
    ask_any_bookie(session, "repair-enable", on=False)
    session.out.print_result_text("auto-recovery is off until 'magnetar repair enable'", enabled=False)
