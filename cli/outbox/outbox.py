"""`magnetar outbox`: the commands of an outbox; what they do is in client/outbox/administration.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..common.exits import NOT_FOUND, Failure
from ..common.lazy import Lazy, LazyGroup
from ..common.session import YES, Session, confirm, connected
from .database import Database, with_database, with_output

if TYPE_CHECKING:
    from ..common.output import Output

STATES = ("waiting", "claimed", "held", "parked")


@click.command()
@with_output
@with_database
def create(database: Database, out: Output) -> None:
    """Make the tables of an outbox, where no migration of the application does it.

    \b
    Example:
      magnetar outbox create --database postgresql+psycopg://shop@localhost/shop
    """
    database.admin(checked=False).create()
    out.done(f"{database.outbox.rows.name} is there", table=database.outbox.rows.name)


@click.command("list")
@click.option("--state", type=click.Choice(STATES), default=None, help="Only these rows.")
@click.option("--topic", default=None, help="Only rows of this topic, by its full name.")
@click.option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
@with_output
@with_database
def list_rows(database: Database, out: Output, state: str | None, topic: str | None, limit: int) -> None:
    """List rows: what waits, is claimed by a relay, was refused (held), is parked.

    \b
    Examples:
      magnetar outbox list --database sqlite:///shop.db --state parked
      magnetar outbox list --database sqlite:///shop.db -o json | jq '.[].error'
    """
    from ...client.outbox.rows import RowState

    wanted = RowState[state.upper()] if state is not None else None
    rows = [row._asdict() for row in database.admin().rows(state=wanted, topic=topic, limit=limit)]
    out.rows(rows, ("id", "state", "topic", "key", "size", "attempts", "seq", "unit", "error"), empty="no rows")


@click.command()
@with_output
@with_database
def status(database: Database, out: Output) -> None:
    """Show the lag: rows by state, the age of the oldest, and who relays which shard.

    \b
    Example:
      magnetar outbox status --database sqlite:///shop.db -o json
    """
    from ...client.outbox.store import Store

    admin = database.admin()
    lag = Store(database.engine, database.outbox).lag()._asdict()
    shards = [each._asdict() for each in admin.shards()]
    if out.json:
        out.document({**lag, "shards": shards})
        return
    out.record(lag)
    out.rows(shards, ("shard", "shards", "holder", "seen_s", "next_seq", "epoch"), empty="no relay had it yet")


def _ids(everything: bool, ids: tuple[int, ...]) -> tuple[int, ...] | None:
    if everything == bool(ids):
        raise click.UsageError("either IDs of rows or --all")
    return None if everything else ids


def _changed(out: Output, count: int, what: str, asked: int | None) -> None:
    if asked is not None and not count:
        raise Failure(f"none of these rows can be {what}: see 'magnetar outbox list'", NOT_FOUND)
    out.done(f"{count:,} rows {what}", rows=count)


@click.command()
@click.argument("ids", nargs=-1, type=int, required=True)
@with_output
@with_database
def park(database: Database, out: Output, ids: tuple[int, ...]) -> None:
    """Park rows: they are not sent until they are revived, and later rows of their key wait.

    \b
    Example:
      magnetar outbox park 17 18 --database sqlite:///shop.db
    """
    _changed(out, database.admin().park(ids), "parked", len(ids))


@click.command()
@click.argument("ids", nargs=-1, type=int)
@click.option("--all", "everything", is_flag=True, help="All that are parked or were refused.")
@with_output
@with_database
def revive(database: Database, out: Output, ids: tuple[int, ...], everything: bool) -> None:
    """Let parked and refused rows wait again, with no attempt counted.

    \b
    Examples:
      magnetar outbox revive 17 --database sqlite:///shop.db
      magnetar outbox revive --all --database sqlite:///shop.db
    """
    chosen = _ids(everything, ids)
    _changed(out, database.admin().revive(chosen), "revived", None if chosen is None else len(chosen))


@click.command()
@click.argument("ids", nargs=-1, type=int, required=True)
@YES
@with_output
@with_database
def drop(database: Database, out: Output, ids: tuple[int, ...], yes: bool) -> None:
    """Delete rows that are not claimed: their messages are never sent.

    \b
    Example:
      magnetar outbox drop 17 --yes --database sqlite:///shop.db
    """
    confirm(f"delete {len(ids)} rows, whose messages are then never sent", yes)
    _changed(out, database.admin().drop(ids), "dropped", len(ids))


@click.command()
@click.argument("count", type=click.IntRange(1, 1024))
@with_output
@with_database
def shards(database: Database, out: Output, count: int) -> None:
    """Change into how many shards the outbox is divided: no relay runs, and no row is claimed.

    \b
    Example:
      magnetar outbox shards 4 --database sqlite:///shop.db
    """
    database.admin().divide(count)
    out.done(f"{count} shards: start a relay for each", shards=count)


@click.command()
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="Of the relay that stopped.")
@click.option("--name", default=None, help="Of the outbox, as its relay has it (default: the database's).")
@YES
@with_database
@connected
def renumber(session: Session, database: Database, shard: int, name: str | None, yes: bool) -> None:
    """Continue after OutboxBehind or SequencesForgotten: number rows after those that the topics have.

    Claimed rows are sent again. Those that are in a topic already are there twice then; consumers with an inbox whose
    keys come from the message drop them.

    \b
    Example:
      magnetar outbox renumber --shard 0 --database sqlite:///shop.db
    """
    from ...client.outbox.relay import producer_name

    confirm("send claimed rows again, which may then be there twice", yes)
    client = session.client()
    try:
        last = database.admin().renumber(client, producer_name(database.engine, name, shard), shard)
    finally:
        client.close()
    rows = [{"destination": each, "last_seq": seq} for each, seq in last.items()]
    session.out.rows(rows, ("destination", "last_seq"), empty="no topics")


COMMANDS = {
    "create": Lazy(".outbox.outbox", "create", "Make the tables."),
    "relay": Lazy(".outbox.relay", "relay", "Send the rows of a shard."),
    "list": Lazy(".outbox.outbox", "list_rows", "List rows by state."),
    "status": Lazy(".outbox.outbox", "status", "The lag, and who relays which shard."),
    "park": Lazy(".outbox.outbox", "park", "Park rows."),
    "revive": Lazy(".outbox.outbox", "revive", "Let parked rows wait again."),
    "drop": Lazy(".outbox.outbox", "drop", "Delete rows."),
    "shards": Lazy(".outbox.outbox", "shards", "Change the number of shards."),
    "renumber": Lazy(".outbox.outbox", "renumber", "Continue after a restored backup."),
}

outbox = LazyGroup(
    "outbox", COMMANDS,
    help="Messages as rows of a database.\n\nExample: magnetar outbox relay --database sqlite:///shop.db",
)  # fmt: skip
