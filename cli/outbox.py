"""`magnetar outbox`: the commands of an outbox; what they do is in client/outbox/relay.py.

Also in this file, below its heading: the database and table of every command of an outbox, and what is said when
SQLAlchemy is missing (database).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from .common.exits import NOT_AVAILABLE, NOT_FOUND, USAGE, CommandFailure
from .common.lazy import LazyCommand, LazyGroup
from .common.output import OUTPUT_OPTION, CommandOutput
from .common.session import YES_OPTION, CommandSession, confirm_deletion, with_session
from .common.units import FiniteNumber

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from ..client.outbox import Relay, SQLAlchemyOutbox
    from ..client.outbox.relay import OutboxAdmin

# ------------------------------------------------------------------------------------------------------ database
# The database and table of every command of an outbox, and what is said when SQLAlchemy is missing.


class OutboxDatabase:
    """The database that contains an outbox, with its SQLAlchemy engine and the tables of the outbox. `url` is a URL of
    SQLAlchemy, `table` the name of the table of rows. Raises CommandFailure if the URL is invalid, or if SQLAlchemy or
    the driver is missing. Does not connect yet."""

    def __init__(self, url: str, table: str) -> None:
        try:
            from sqlalchemy import MetaData, create_engine
            from sqlalchemy.exc import ArgumentError, NoSuchModuleError
        except ImportError as error:
            raise CommandFailure("an outbox needs SQLAlchemy: pip install 'magnetar[outbox]'", NOT_AVAILABLE) from error
        from ..client.outbox import SQLAlchemyOutbox

        try:
            self.engine: Engine = create_engine(url, pool_pre_ping=True)
        except (ArgumentError, NoSuchModuleError, ValueError) as error:
            raise CommandFailure(
                f"--database is a URL of SQLAlchemy, as postgresql+psycopg://user@host/orders: {error}", USAGE
            ) from error
        except ImportError as error:
            raise CommandFailure(
                f"the driver of this database is missing: pip install {error.name}", NOT_AVAILABLE
            ) from error
        self.outbox: SQLAlchemyOutbox = SQLAlchemyOutbox(MetaData(), table)

    def open_admin(self, *, checked: bool = True) -> OutboxAdmin:
        """Returns the object that reads and changes the rows of the outbox. `checked`: raises OutboxTableMissing or
        OutboxColumnsMissing if the tables are not complete."""
        from ..client.outbox.relay import OutboxAdmin

        admin = OutboxAdmin(self.engine, self.outbox)
        if checked:
            admin.check()
        return admin

    def close(self) -> None:
        """Closes the connections of the engine."""
        self.engine.dispose()


def with_database_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds the options --database and --table, and passes the OutboxDatabase for them as
    `database`; it is closed when the command ends."""

    @click.option(
        "-d", "--database", "database_url", envvar="MAGNETAR_OUTBOX_DATABASE", required=True, metavar="URL",
        help="Of SQLAlchemy; better in MAGNETAR_OUTBOX_DATABASE when it has a password.",
    )  # fmt: skip
    @click.option("--table", default="magnetar_outbox", show_default=True, help="The table of the rows.")
    @wraps(function)
    def command(*arguments: Any, database_url: str, table: str, **options: Any) -> None:
        database = OutboxDatabase(database_url, table)
        try:
            function(*arguments, database=database, **options)
        finally:
            database.close()

    return command


def with_output_option(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that sends no request to a server: adds the option -o, and passes the CommandOutput as
    `out`."""

    @OUTPUT_OPTION
    @wraps(function)
    def command(*arguments: Any, output: str, **options: Any) -> None:
        function(*arguments, out=CommandOutput(output), **options)

    return command


# -------------------------------------------------------------------------------------------------------- outbox


ROW_STATES = ("waiting", "claimed", "held", "parked")


@click.command()
@with_output_option
@with_database_options
def create(database: OutboxDatabase, out: CommandOutput) -> None:
    """Create the tables of an outbox, if no migration of the application creates them.

    \b
    Example:
      magnetar outbox create --database postgresql+psycopg://shop@localhost/shop
    """
    database.open_admin(checked=False).create()
    out.print_result_text(f"{database.outbox.rows.name} is there", table=database.outbox.rows.name)


@click.command("list")
@click.option("--state", type=click.Choice(ROW_STATES), default=None, help="Only these rows.")
@click.option("--topic", default=None, help="Only rows of this topic, by its full name.")
@click.option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
@with_output_option
@with_database_options
def list_outbox_rows(
    database: OutboxDatabase, out: CommandOutput, state: str | None, topic: str | None, limit: int
) -> None:
    """List the rows of an outbox by state: waiting, claimed by a relay, refused (held), or parked.

    \b
    Examples:
      magnetar outbox list --database sqlite:///shop.db --state parked
      magnetar outbox list --database sqlite:///shop.db -o json | jq '.[].error'
    """
    from ..client.outbox.rows import RowState

    wanted = RowState[state.upper()] if state is not None else None
    rows = [row._asdict() for row in database.open_admin().rows(state=wanted, topic=topic, limit=limit)]
    out.print_rows(rows, ("id", "state", "topic", "key", "size", "attempts", "seq", "unit", "error"), empty="no rows")


@click.command()
@with_output_option
@with_database_options
def status(database: OutboxDatabase, out: CommandOutput) -> None:
    """Show the lag of an outbox: the number of rows by state, the age of the oldest row, and which relay sends which
    shard.

    \b
    Example:
      magnetar outbox status --database sqlite:///shop.db -o json
    """
    from ..client.outbox.store import RelayStore

    admin = database.open_admin()
    lag = RelayStore(database.engine, database.outbox).measure_lag()._asdict()
    shards = [each._asdict() for each in admin.read_shards()]
    if out.is_structured:
        out.print_document({**lag, "shards": shards})
        return
    out.print_record(lag)
    out.print_rows(shards, ("shard", "shards", "holder", "seen_s", "next_seq", "epoch"), empty="no relay had it yet")


def _ids(everything: bool, ids: tuple[int, ...]) -> tuple[int, ...] | None:
    if everything == bool(ids):
        raise click.UsageError("either IDs of rows or --all")
    return None if everything else ids


def _changed(out: CommandOutput, count: int, what: str, asked: int | None) -> None:
    if asked is not None and not count:
        raise CommandFailure(f"none of these rows can be {what}: see 'magnetar outbox list'", NOT_FOUND)
    out.print_result_text(f"{count:,} rows {what}", rows=count)


@click.command()
@click.argument("ids", nargs=-1, type=int, required=True)
@with_output_option
@with_database_options
def park(database: OutboxDatabase, out: CommandOutput, ids: tuple[int, ...]) -> None:
    """Park rows of an outbox: they are not sent until they are revived, and later rows with the same key wait.

    \b
    Example:
      magnetar outbox park 17 18 --database sqlite:///shop.db
    """
    _changed(out, database.open_admin().park_rows(ids), "parked", len(ids))


@click.command()
@click.argument("ids", nargs=-1, type=int)
@click.option("--all", "everything", is_flag=True, help="All that are parked or were refused.")
@with_output_option
@with_database_options
def revive(database: OutboxDatabase, out: CommandOutput, ids: tuple[int, ...], everything: bool) -> None:
    """Send parked and refused rows again: they wait for a relay, and their attempts are counted from 0.

    \b
    Examples:
      magnetar outbox revive 17 --database sqlite:///shop.db
      magnetar outbox revive --all --database sqlite:///shop.db
    """
    chosen = _ids(everything, ids)
    _changed(out, database.open_admin().revive_rows(chosen), "revived", None if chosen is None else len(chosen))


@click.command()
@click.argument("ids", nargs=-1, type=int, required=True)
@YES_OPTION
@with_output_option
@with_database_options
def drop(database: OutboxDatabase, out: CommandOutput, ids: tuple[int, ...], yes: bool) -> None:
    """Delete rows that no relay has claimed. Their messages are never sent.

    \b
    Example:
      magnetar outbox drop 17 --yes --database sqlite:///shop.db
    """
    confirm_deletion(f"delete {len(ids)} rows, whose messages are then never sent", yes)
    _changed(out, database.open_admin().drop(ids), "dropped", len(ids))


@click.command()
@click.argument("count", type=click.IntRange(1, 1024))
@with_output_option
@with_database_options
def shards(database: OutboxDatabase, out: CommandOutput, count: int) -> None:
    """Change the number of shards into which the outbox is divided. No relay may be running, and no row may be claimed.

    \b
    Example:
      magnetar outbox shards 4 --database sqlite:///shop.db
    """
    database.open_admin().set_shard_count(count)
    out.print_result_text(f"{count} shards: start a relay for each", shards=count)


@click.command()
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="Of the relay that stopped.")
@click.option("--name", default=None, help="Of the outbox, as its relay has it (default: the database's).")
@YES_OPTION
@with_database_options
@with_session
def renumber(session: CommandSession, database: OutboxDatabase, shard: int, name: str | None, yes: bool) -> None:
    """Continue after the error OutboxBehind or SequencesForgotten: give the waiting rows numbers after those that their
    topics have. Claimed rows are sent again.

    A message that a topic has already is then there twice; a consumer whose inbox uses keys from the message drops the
    second one.

    \b
    Example:
      magnetar outbox renumber --shard 0 --database sqlite:///shop.db
    """
    from ..client.outbox.relay import producer_name

    confirm_deletion("send claimed rows again, which may then be there twice", yes)
    client = session.client()
    try:
        last = database.open_admin().renumber_shard(client, producer_name(database.engine, name, shard), shard)
    finally:
        client.close()
    rows = [{"destination": each, "last_seq": seq} for each, seq in last.items()]
    session.out.print_rows(rows, ("destination", "last_seq"), empty="no topics")


OUTBOX_COMMANDS = {
    "create": LazyCommand(".outbox", "create", "Make the tables."),
    "relay": LazyCommand(".outbox", "relay", "Send the rows of a shard."),
    "list": LazyCommand(".outbox", "list_outbox_rows", "List rows by state."),
    "status": LazyCommand(".outbox", "status", "The lag, and who relays which shard."),
    "park": LazyCommand(".outbox", "park", "Park rows."),
    "revive": LazyCommand(".outbox", "revive", "Let parked rows wait again."),
    "drop": LazyCommand(".outbox", "drop", "Delete rows."),
    "shards": LazyCommand(".outbox", "shards", "Change the number of shards."),
    "renumber": LazyCommand(".outbox", "renumber", "Continue after a restored backup."),
}

outbox = LazyGroup(
    "outbox", OUTBOX_COMMANDS,
    help="Messages as rows of a database.\n\nExample: magnetar outbox relay --database sqlite:///shop.db",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- relay
# `magnetar outbox relay`: the relay of a shard as a process. One line `ready NAME` when it has its shard, then its
# state every `--report` seconds; SIGTERM and Ctrl-C end it in order.


READY_POLL_S = 1.0


@click.command()
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="The shard to relay.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="How many there are.")
@click.option("--name", default=None, help="Of the outbox: a part of the producers' name (default: the database's).")
@click.option("--standby", is_flag=True, help="Wait while another relay has the shard, and take over when it is gone.")
@click.option(
    "--atomic", is_flag=True, help="Send what one transaction of the application wrote in one transaction; one shard."
)
@click.option("--until-empty", is_flag=True, help="End when no row waits or is claimed.")
@click.option("--report", type=FiniteNumber(0.1), default=10.0, show_default=True, help="Seconds between reports.")
@with_database_options
@with_session
def relay(
    session: CommandSession, database: OutboxDatabase, shard: int, shards: int, name: str | None, standby: bool,
    atomic: bool, until_empty: bool, report: float,
) -> None:  # fmt: skip
    """Send the rows of a shard to their topics, each exactly once, until the relay is stopped.

    Each shard has one relay: a newer relay fences the older one, which then ends with exit code 5. While a database or
    a broker is away, the relay waits as long as it takes.

    \b
    Examples:
      magnetar outbox relay --database postgresql+psycopg://shop@localhost/shop
      magnetar outbox relay --database sqlite:///shop.db --until-empty
      magnetar outbox relay --database sqlite:///shop.db --atomic
      magnetar outbox relay --shard 1 --shards 4 --standby --report 60 -o json
    """
    from ..client.outbox import Relay
    from ..runtime.logs import configure_logging

    if shard >= shards:
        raise click.UsageError(f"--shard {shard} of --shards {shards}: shards count from 0")
    if atomic and shards > 1:
        raise click.UsageError("an atomic relay is alone: --atomic goes with --shards 1")
    configure_logging()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    client = session.client()
    try:
        running = Relay(
            client, database.engine, database.outbox, shard, shards, name=name, standby=standby, atomic=atomic
        ).start()
        try:
            _report(running, session, stopped, report, until_empty)
        finally:
            running.stop()
        if running.error is not None:
            raise running.error
        if not session.out.is_structured:
            print(_line(running), flush=True)
    finally:
        client.close()


def _report(
    running: Relay, session: CommandSession, stopped: threading.Event, every_s: float, until_empty: bool
) -> None:
    while not running.wait_ready(READY_POLL_S):
        if stopped.is_set():
            return
    if running.error is None and not session.out.is_structured:
        print(f"ready {running.name}", flush=True)
    wait_s = min(every_s, 0.2) if until_empty else every_s
    while running.error is None and not stopped.wait(wait_s):
        if until_empty:
            if _is_empty(running):
                return
            continue
        if session.out.is_structured:
            session.out.print_streamed_value(_record(running))
        else:
            print(_line(running), flush=True)


def _is_empty(running: Relay) -> bool:
    from ..client.outbox.rows import OutboxUnreachable

    try:
        lag = running.lag()
    except OutboxUnreachable:
        return False
    return lag.waiting + lag.claimed + lag.held == 0


def _record(running: Relay) -> dict[str, Any]:
    from ..client.outbox.rows import OutboxUnreachable

    record = running.statistics()
    try:
        record["lag"] = running.lag()._asdict()
    except OutboxUnreachable as error:
        record["lag"] = None
        record["trouble"] = error.message
    return record


def _line(running: Relay) -> str:
    record = _record(running)
    lag = record["lag"]
    text = f"{record['name']}: {record['phase']}, {record['stored_rows']:,} rows stored"
    if lag is not None:
        text += f"; lag {lag['waiting'] + lag['claimed'] + lag['held']:,} rows, {lag['oldest_s']:.1f} s"
        text += f"; parked {lag['parked']:,}"
    waits = "; ".join(f"{where}: {why}" for where, why in record["waits"].items())
    return "; waits: ".join(each for each in (text, record["trouble"] or waits) if each)
