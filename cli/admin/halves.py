"""`magnetar transactions halves …`: half messages that are not decided, and how an operator decides them."""

from __future__ import annotations

import click
from click import option

from ..common.lazy import Lazy, LazyGroup
from ..common.session import Session, verb

COLUMNS = ("half", "state", "group", "check_key", "age_s", "unknown", "members", "bytes", "topics", "reason")

halves = LazyGroup(
    "halves",
    {
        "list": Lazy(".admin.halves", "list_", "Those that are not decided, the oldest first."),
        "show": Lazy(".admin.halves", "show", "One half message."),
        "park": Lazy(".admin.halves", "park", "Do not ask any more; keep it until an operator decides."),
        "revive": Lazy(".admin.halves", "revive", "Ask its group again, at once."),
        "commit": Lazy(".admin.halves", "commit", "Publish it, whatever its group says."),
        "rollback": Lazy(".admin.halves", "rollback", "Drop it, whatever its group says."),
    },
    help="Half messages: stored, and published when their group says so.\n\n"
    "Example: magnetar transactions halves list --parked",
)


@verb(
    option("-g", "--group", default="", help="Of this group alone."),
    option("--parked", is_flag=True, help="Those that wait for an operator alone."),
    option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="Of each coordinator."),
)
def list_(session: Session, group: str, parked: bool, limit: int) -> None:
    """Half messages that are not decided: who prepared them, whom it is asked of, and why one is parked.

    Example: magnetar transactions halves list --group orders
    """
    from ...proto.pulsar_json import half_form, in_seconds

    rows = [each for found in session.admin.all_halves(group=group, limit=limit) for each in found.items]
    wanted = [each for each in rows if each.state.name == "PARKED" or not parked]
    session.out.rows([in_seconds(half_form(each)) for each in sorted(wanted, key=lambda each: -each.age_ms)], COLUMNS)


@verb()
def show(session: Session, half: str) -> None:
    """One half message by its id.

    Example: magnetar transactions halves show "(3,1099511627781)"
    """
    from ...proto.pulsar_json import half_form, in_seconds

    session.out.record(in_seconds(half_form(session.admin.half(half))))


@verb()
def park(session: Session, half: str) -> None:
    """Do not ask about a half message any more: it stays until an operator commits, rolls back or revives it.

    Example: magnetar transactions halves park "(3,1099511627781)"
    """
    session.admin.park_half(half)


@verb()
def revive(session: Session, half: str) -> None:
    """Ask the group of a parked half message again, at once, as often as of a new one. One that is not parked is asked
    about now.

    Example: magnetar transactions halves revive "(3,1099511627781)"
    """
    session.admin.revive_half(half)


@verb()
def commit(session: Session, half: str) -> None:
    """Publish a half message, parked or not, whatever its group says.

    Example: magnetar transactions halves commit "(3,1099511627781)"
    """
    session.admin.commit_half(half)


@verb()
def rollback(session: Session, half: str) -> None:
    """Drop a half message, parked or not, whatever its group says. Its content is lost.

    Example: magnetar transactions halves rollback "(3,1099511627781)"
    """
    session.admin.rollback_half(half)
