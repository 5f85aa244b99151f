"""`magnetar transactions …` and `… halves …`: the commands that show open transactions and half messages, who began
them and what waits for them, and that end them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click import option

from ...proto.pulsar_json import (
    coordinator_to_json,
    half_message_to_json,
    make_table_row,
    topic_transaction_to_json,
    transaction_to_json,
)
from ..common.lazy import LazyCommand, LazyGroup
from ..common.session import CommandSession, confirm_deletion, session_command

if TYPE_CHECKING:
    from ...proto.statistics import TransactionStats

TRANSACTION_COLUMNS = ("txn", "state", "owner", "address", "name", "age_s", "remaining_s", "topics", "reason")
TOPIC_COLUMNS = ("topic", "entries", "bytes", "first", "holds", "waiting", "pending", "error")
COORDINATOR_COLUMNS = ("coordinator", "epoch", "open", "prepared", "unsettled", "committed", "aborted")
HALF_COLUMNS = ("half", "state", "group", "check_key", "age_s", "unknown", "members", "bytes", "topics", "reason")

transactions = LazyGroup(
    "transactions",
    {
        "list": LazyCommand(".admin.transactions", "list_", "Those that are not done, the oldest first."),
        "show": LazyCommand(".admin.transactions", "show", "One transaction."),
        "status": LazyCommand(".admin.transactions", "status", "The coordinators: epochs and counts."),
        "abort": LazyCommand(".admin.transactions", "abort", "Abort an open or prepared transaction."),
        "detach": LazyCommand(
            ".admin.transactions", "detach", "Stop waiting for a topic that cannot store the outcome."
        ),
        "halves": LazyCommand(
            ".admin.transactions", "halves", "Half messages: list, show, park, revive, commit, rollback."
        ),
    },
    with_rows=True,
    help="Transactions over several topics.\n\nExample: magnetar transactions list",
)
halves = LazyGroup(
    "halves",
    {
        "list": LazyCommand(".admin.transactions", "list_halves", "Those that are not decided, the oldest first."),
        "show": LazyCommand(".admin.transactions", "show_half_message", "One half message."),
        "park": LazyCommand(".admin.transactions", "park", "Do not ask any more; keep it until an operator decides."),
        "revive": LazyCommand(".admin.transactions", "revive", "Ask its group again, at once."),
        "commit": LazyCommand(".admin.transactions", "commit", "Publish it, whatever its group says."),
        "rollback": LazyCommand(".admin.transactions", "rollback", "Drop it, whatever its group says."),
    },
    help="Half messages: stored, and published when their group says so.\n\n"
    "Example: magnetar transactions halves list --parked",
)


@session_command(
    option("-c", "--coordinator", type=click.IntRange(0), help="Of this coordinator alone."),
    option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="Of each coordinator."),
    watched=True,
)
def list_(session: CommandSession, coordinator: int | None, limit: int) -> None:
    """List the transactions that are open or prepared, or whose outcome is not stored at each of their topics yet; the
    oldest first. `owner` and `address`: the role and the client that began the transaction. `topics`: the topics that
    take part in it; of an ended transaction, those that have not stored the outcome yet.

    Example: magnetar transactions list -c 3
    """
    if coordinator is None:
        found = session.admin.all_transactions(limit)
    else:
        found = [session.admin.transactions(coordinator, limit)]
    listed = sorted((each for group in found for each in group.items), key=lambda each: -each.age_ms)
    session.out.print_rows([make_table_row(transaction_to_json(each)) for each in listed], TRANSACTION_COLUMNS)


@session_command(watched=True)
def show(session: CommandSession, txn: str) -> None:
    """Show one transaction by its id: who began it, and for each of its topics what it has written there and what waits
    for its end. Of a transaction that has ended everywhere, only the outcome is known.

    `holds`: readers of the topic wait for the transaction, with `waiting` messages. `pending`: entries that the
    transaction has acknowledged, by subscription.

    Example: magnetar transactions show "(3,1099511627781)"
    """
    found = session.admin.transaction(txn)
    record, at = make_table_row(transaction_to_json(found)), [_at(session, found, topic) for topic in found.topics]
    if session.out.is_structured:
        session.out.print_document({**record, "at": at})
        return
    session.out.print_record(record)
    if at:
        print()
        session.out.print_rows([{**each, "pending": _pending(each["pending"])} for each in at], TOPIC_COLUMNS)


@session_command(watched=True)
def status(session: CommandSession) -> None:
    """Show the transaction coordinators: the epoch of each, how many of its transactions are open, prepared or
    unsettled, and how many were committed or aborted since the last take-over. Epoch 0: the coordinator has not run
    yet.

    Example: magnetar transactions status
    """
    rows = [coordinator_to_json(number, each) for number, each in enumerate(session.admin.all_transactions(1))]
    session.out.print_rows(rows, COORDINATOR_COLUMNS)


@session_command()
def abort(session: CommandSession, txn: str, yes: bool) -> None:
    """Abort a transaction that is open or prepared. A transaction that has ended does not change.

    Example: magnetar transactions abort "(3,1099511627781)"
    """
    confirm_deletion(f"Abort transaction {txn}, and drop what it published", yes)
    session.out.print_record({"txn": txn, "state": session.admin.abort_transaction(txn).name})


@session_command()
def detach(session: CommandSession, txn: str, topic: str, yes: bool) -> None:
    """Stop waiting for a topic that can no longer store the outcome of an ended transaction. If the transaction was
    committed, its changes in that topic are lost.

    Example: magnetar transactions detach "(3,1099511627781)" orders
    """
    confirm_deletion(f"Lose what transaction {txn} changes in {topic}", yes)
    session.admin.detach_transaction(txn, topic)


def _at(session: CommandSession, found: TransactionStats, topic: str) -> dict[str, Any]:
    """Returns what one topic has of the transaction. For a topic that does not answer, returns why: the transaction
    may be waiting for it."""
    from ...proto.errors import MagnetarError
    try:
        return {
            "topic": topic,
            **topic_transaction_to_json(session.admin.transaction_at(found.txn, topic), ""),
            "error": "",
        }
    except MagnetarError as error:
        return {"topic": topic, "pending": {}, "error": str(error)}


def _pending(found: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{name}: {each['entries']}" for name, each in found.items())


# ------------------------------------------------------------------------------ half messages
@session_command(
    option("-g", "--group", default="", help="Of this group alone."),
    option("--parked", is_flag=True, help="Those that wait for an operator alone."),
    option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="Of each coordinator."),
    name="list",
    watched=True,
)
def list_halves(session: CommandSession, group: str, parked: bool, limit: int) -> None:
    """List the half messages (stored by a coordinator, not published before their commit) without an outcome: who
    prepared each, which group decides about it, and why it is parked, if it is.

    Example: magnetar transactions halves list --group orders
    """
    rows = [each for found in session.admin.all_halves(group=group, limit=limit) for each in found.items]
    wanted = [each for each in rows if each.state.name == "PARKED" or not parked]
    forms = [half_message_to_json(each) for each in sorted(wanted, key=lambda each: -each.age_ms)]
    session.out.print_rows([*map(make_table_row, forms)], HALF_COLUMNS)


@session_command(name="show", watched=True)
def show_half_message(session: CommandSession, half: str) -> None:
    """Show one half message (stored by a coordinator, not published before its commit), by its id.

    Example: magnetar transactions halves show "(3,1099511627781)"
    """
    session.out.print_record(make_table_row(half_message_to_json(session.admin.half(half))))


@session_command()
def park(session: CommandSession, half: str) -> None:
    """Stop asking the group of a half message for its outcome: the message stays until an operator commits it, rolls it
    back or revives it.

    Example: magnetar transactions halves park "(3,1099511627781)"
    """
    session.admin.park_half(half)


@session_command()
def revive(session: CommandSession, half: str) -> None:
    """Ask the group of a parked half message for its outcome again, at once, and as often as for a new message. The
    group of a message that is not parked is asked now.

    Example: magnetar transactions halves revive "(3,1099511627781)"
    """
    session.admin.revive_half(half)


@session_command()
def commit(session: CommandSession, half: str) -> None:
    """Publish a half message, parked or not, whatever outcome its group answers.

    Example: magnetar transactions halves commit "(3,1099511627781)"
    """
    session.admin.commit_half(half)


@session_command()
def rollback(session: CommandSession, half: str, yes: bool) -> None:
    """Drop a half message, parked or not, whatever outcome its group answers. The content of the message is lost.

    Example: magnetar transactions halves rollback "(3,1099511627781)"
    """
    confirm_deletion(f"Drop half message {half} and its content", yes)
    session.admin.rollback_half(half)
