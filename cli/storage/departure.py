"""`magnetar bookies decommission|recover`: everything moves off a bookie that leaves, or that is dead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ...runtime.clock import SystemClock
from ..common.exits import Failure
from ..common.output import progress
from ..common.session import YES, Session, confirm
from ..common.units import Real
from .ledgers import ask_any
from .operator import operating

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 1.0
"""Seconds between two requests; each reads every ledger's record."""

WAIT = click.option("--wait/--no-wait", default=True, show_default=True, help="Until nothing is left on it.")
WAIT_S = click.option("--wait-s", type=Real(0), default=None, help="… but at most so many seconds.")


@click.command()
@click.argument("bookie", metavar="BOOKIE")
@click.option("--forget", is_flag=True, help="Once it is empty and stopped, forget its cookie: its place is free.")
@click.option("--cancel", is_flag=True, help="Let it stay: it takes new ledgers again. What has moved stays moved.")
@WAIT
@WAIT_S
@YES
@operating
def decommission(
    session: Session, bookie: str, forget: bool, cancel: bool, wait: bool, wait_s: float | None, yes: bool
) -> None:
    """Empty a bookie before it is taken away: it takes no new ledgers, and every copy on it is made on others.

    It keeps serving meanwhile. Ctrl-C ends the waiting, not the moving. When it is done, stop the bookie. BOOKIE is
    its id; the beginning is enough.

    \b
    Examples:
      magnetar bookies decommission 6f9619ff --forget
      magnetar bookies decommission 6f9619ff --cancel
    """
    id_ = full_id(session, bookie)
    if cancel:
        ask_any(session, "depart", bookie=id_, cancel=True)
        session.out.done(f"bookie {id_} stays", bookie=id_, departing=False)
        return
    confirm(f"Move everything off bookie {id_}", yes)
    ask_any(session, "depart", bookie=id_, forget=forget)
    _follow(session, id_, wait, wait_s, "empty: stop it" + (", and it is forgotten" if forget else ""))


@click.command()
@click.argument("bookie", metavar="BOOKIE")
@click.option("--forget", is_flag=True, help="Once nothing names it any more, forget its cookie: its place is free.")
@WAIT
@WAIT_S
@YES
@operating
def recover(session: Session, bookie: str, forget: bool, wait: bool, wait_s: float | None, yes: bool) -> None:
    """Make every copy again that lay on a dead bookie, now, without waiting for the grace.

    It must not be registered. Auto-recovery does the same by itself once the bookie is lost.

    Example: magnetar bookies recover 6f9619ff --forget
    """
    id_ = full_id(session, bookie)
    confirm(f"Bookie {id_} is dead, and its data lost", yes)
    ask_any(session, "depart", bookie=id_, dead=True, forget=forget)
    _follow(session, id_, wait, wait_s, "nothing is left on it")


def full_id(session: Session, beginning: str) -> str:
    """Returns the one bookie whose id begins with `beginning`, registered or not. Raises NotFound."""
    from ...proto.errors import NotFound

    known = [each["id"] for each in ask_any(session, "bookies")["bookies"]]
    found = [each for each in known if each.startswith(beginning)]
    if not found:
        raise NotFound(f"no bookie's id begins with {beginning!r}; 'magnetar bookies list' shows them")
    if len(found) > 1 and beginning not in found:
        raise Failure(f"{len(found)} bookies' ids begin with {beginning!r}; give more of it")
    return beginning if beginning in found else str(found[0])


def _follow(session: Session, bookie: str, wait: bool, wait_s: float | None, done: str) -> None:
    left = ask_any(session, "departure", bookie=bookie)
    if not wait:
        session.out.done(f"{left['ledgers']} ledgers move off bookie {bookie}", **left)
        return
    total = left["ledgers"]
    deadline = None if wait_s is None else SystemClock().monotonic() + wait_s
    with progress("ledgers moved", total, shown=not session.out.json) as advance:
        left = _until_empty(session, bookie, left, total, advance, deadline)
    if left["ledgers"]:
        why = ", ".join(f"{count}: {what}" for what, count in left["stuck"].items())
        raise Failure(
            f"{left['ledgers']} of {total} ledgers still lie on bookie {bookie}{f' ({why})' if why else ''}; "
            "the moving goes on, 'magnetar ledgers under-replicated' says how"
        )
    session.out.done(f"bookie {bookie}: {total} ledgers moved; {done}", **left)


def _until_empty(
    session: Session, bookie: str, left: dict[str, Any], total: int, advance: Callable[[int], None],
    deadline: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Waits until the bookie is empty or the deadline has passed; returns what is left then."""
    while left["ledgers"] and (deadline is None or SystemClock().monotonic() < deadline):
        time.sleep(POLL_S)
        left = ask_any(session, "departure", bookie=bookie)
        advance(max(0, total - left["ledgers"]))
    return left
