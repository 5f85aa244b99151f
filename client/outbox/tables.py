"""The outbox of an application that uses SQLAlchemy (`SQLAlchemyOutbox`): its tables, and `send`.

    outbox = SQLAlchemyOutbox(Base.metadata)
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "orders", b"…", key="17")      # a row in this transaction, and nothing on the network

There are three tables: the rows; one record per shard (its holder, the next sequence id); one record per shard and
destination (the highest stored sequence id). `metadata.create_all(engine)` or Alembic creates them.

Also in this file, under the heading "databases": the translation of a database's errors to OutboxErrors, and the check
of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RootTransaction,
    SmallInteger,
    String,
    Table,
    Text,
    event,
    inspect,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, InterfaceError, SQLAlchemyError
from sqlalchemy.orm import Session

from ..model.schema import Schema
from .rows import (
    OUTBOX_TABLE,
    OutboxColumnsMissing,
    OutboxError,
    OutboxReadOnly,
    OutboxTableMissing,
    OutboxUnreachable,
    make_outbox_row,
    make_random_unit_id,
)

_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts only an INTEGER PRIMARY KEY by itself
_VALUE = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


class SQLAlchemyOutbox:
    """The outbox of an application that uses SQLAlchemy. `metadata`: the application's MetaData, to which the tables
    are added, so that the application's migrations create them. `table`: the name of the table of rows, from which the
    names of the other tables are derived. `schema`: the schema of the database that contains the tables; None: the
    default one."""

    def __init__(self, metadata: MetaData, table: str = OUTBOX_TABLE, *, schema: str | None = None) -> None:
        self.rows = Table(
            table, metadata,
            Column("id", _ID, primary_key=True, autoincrement=True),
            Column("topic", String(600), nullable=False),
            Column("key", Text),
            Column("value", _VALUE),
            Column("properties", Text),
            Column("event_time", BigInteger),
            Column("deliver_at", BigInteger),
            Column("created", BigInteger, nullable=False),
            Column("key_hash", Integer, nullable=False),
            Column("size", Integer, nullable=False),
            Column("state", SmallInteger, nullable=False),
            Column("attempts", SmallInteger, nullable=False),
            Column("error", Text),
            Column("retry_at", BigInteger),
            Column("seq", BigInteger),
            Column("shard", SmallInteger),
            Column("destination", String(640)),
            Column("unit", BigInteger),
            Column("value_schema", Text),
            Column("key_form", SmallInteger),
            Index(f"{table}_state_id", "state", "id"),
            Index(f"{table}_state_topic", "state", "topic"),
            Index(f"{table}_unit", "unit"),
            schema=schema, sqlite_autoincrement=True,  # no id is given twice there either
        )  # fmt: skip
        self.shards = Table(
            f"{table}_shards", metadata,
            Column("shard", SmallInteger, primary_key=True, autoincrement=False),
            Column("shards", SmallInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            Column("next_seq", BigInteger, nullable=False),
            Column("holder", Text, nullable=False),
            Column("seen", BigInteger, nullable=False),
            Column("atomic", SmallInteger),
            schema=schema,
        )  # fmt: skip
        self.positions = Table(
            f"{table}_positions", metadata,
            Column("shard", SmallInteger, primary_key=True, autoincrement=False),
            Column("destination", String(640), primary_key=True),
            Column("seq", BigInteger, nullable=False),
            schema=schema,
        )  # fmt: skip
        self.relays: WeakSet[Any] = WeakSet()  # of this process: they are woken by a commit
        self._insert = self.rows.insert()
        self._units: WeakKeyDictionary[RootTransaction, int] = WeakKeyDictionary()

    def tables(self) -> SQLAlchemyOutbox:
        """Returns this object: a relay calls the method of this name also for a DjangoOutbox."""
        return self

    def send(
        self, session: Session | Connection, topic: str, value: object, *, key: str | None = None,
        properties: Mapping[str, str] | None = None, event_time: int | None = None, deliver_at: int | None = None,
        schema: Schema | None = None,
    ) -> None:  # fmt: skip
        """Writes a message for `topic` as a row. A relay sends it after the transaction of `session` has committed; the
        commit of a Session wakes the relays of this process.

        `value` is bytes, or a value that `schema` encodes; the row stores the schema, and the topic gets it. None: a
        message without a value. With a KeyValue schema whose key is separate, that key replaces `key`. Times are ms
        since the epoch. With an AsyncSession: `await session.run_sync(outbox.send, "orders", value)`. Raises
        InvalidTopicName, InvalidMessage or MessageTooBig before anything is written; later the errors of the
        database."""
        unit = self._unit_of(session)
        row = make_outbox_row(topic, value, key, properties, event_time, deliver_at, schema, unit)
        if isinstance(session, Session) and self.relays and self not in session.info:
            session.info[self] = "commits of this session wake relays"
            event.listen(session, "after_commit", self._committed)
        session.execute(self._insert, row)

    def _unit_of(self, session: Session | Connection) -> int:
        """Returns the unit of the root transaction in which the row will be; savepoints do not change it."""
        if isinstance(session, Session):
            connection = session.connection(bind_arguments={"clause": self._insert})
        else:
            connection = session
        root = connection.get_transaction() or connection.begin()  # as its first statement would
        return self._units.setdefault(root, make_random_unit_id())

    def _committed(self, _session: Session) -> None:
        self.wake()

    def wake(self) -> None:
        """Makes the relays that run in this process search for rows at once instead of after their pause. A program
        calls this after a commit of a Connection; the commit of a Session does it by itself."""
        for relay in list(self.relays):
            relay.wake()


# ----------------------------------------------------------------------------------------------------- databases
# Errors of a database, translated once: what SQLAlchemy raises becomes an OutboxError that says what to do.
#
# What is not known here counts as unreachable, and is tried again: a lock that timed out, a deadlock, a fail-over.


_TABLE = ("no such table", "undefinedtable", "doesn't exist")
_COLUMN = ("no such column", "no column named", "unknown column")
_READ_ONLY = ("readonly database", "read-only", "read only", "permission denied")
_SQLSTATES: dict[str, type[OutboxError]] = {
    "42P01": OutboxTableMissing, "42703": OutboxColumnsMissing, "25006": OutboxReadOnly, "42501": OutboxReadOnly,
}  # fmt: skip
"""SQLSTATE of PostgreSQL → error. The codes are undefined_table, undefined_column, read_only_sql_transaction and
insufficient_privilege."""

DATABASE_ERROR_ADVICE = {
    OutboxTableMissing: "a migration makes it, or metadata.create_all(engine), or 'magnetar outbox create'",
    OutboxColumnsMissing: "a migration of this version is not applied, or another program has a table of that name:"
    " apply it, or choose another name (table=…, --table)",
    OutboxReadOnly: "a relay claims and deletes rows: give it the primary server, and a role that may SELECT, INSERT,"
    " UPDATE and DELETE on the three tables of the outbox",
    OutboxUnreachable: "is the server there, and are URL and password right?",
}


@contextmanager
def translate_database_errors() -> Iterator[None]:
    """Returns a context manager that raises an OutboxError in place of an error of SQLAlchemy, and OutboxUnreachable in
    place of an OSError. The original error is the cause."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _translate(error) from error
    except OSError as error:
        raise OutboxUnreachable(f"the database: {error}; {DATABASE_ERROR_ADVICE[OutboxUnreachable]}") from error


def _translate(error: SQLAlchemyError) -> OutboxError:
    original = getattr(error, "orig", None)
    text = str(original or error).strip().splitlines()[0] if str(original or error).strip() else type(error).__name__
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    kind: type[OutboxError] = OutboxUnreachable
    if state in _SQLSTATES:
        kind = _SQLSTATES[state]
    elif isinstance(error, DBAPIError) and not isinstance(error, InterfaceError):
        lower = text.lower()
        for candidate, signs in (
            (OutboxTableMissing, _TABLE), (OutboxColumnsMissing, _COLUMN), (OutboxReadOnly, _READ_ONLY),
        ):  # fmt: skip
            if any(sign in lower for sign in signs):
                kind = candidate
                break
    return kind(f"the database said: {text}; {DATABASE_ERROR_ADVICE[kind]}")


def check_outbox_tables(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """Checks the tables of `outbox` in the database. Raises OutboxTableMissing if one is missing, OutboxColumnsMissing
    if one lacks columns, OutboxUnreachable or another OutboxError if the database does not answer or refuses."""
    with translate_database_errors():
        found = inspect(engine)
        for table in (outbox.rows, outbox.shards, outbox.positions):
            if not found.has_table(table.name, schema=table.schema):
                what = f"the database {url_without_password(engine)} has no table {table.name}"
                raise OutboxTableMissing(f"{what}; {DATABASE_ERROR_ADVICE[OutboxTableMissing]}")
            there = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
            missing = [column.name for column in table.columns if column.name not in there]
            if missing:
                what = f"table {table.name} of {url_without_password(engine)} has no column {', '.join(missing)}"
                raise OutboxColumnsMissing(f"{what}; {DATABASE_ERROR_ADVICE[OutboxColumnsMissing]}")


def url_without_password(engine: Engine) -> str:
    """Returns the URL of the engine's database, with `***` in place of the password."""
    return engine.url.render_as_string(hide_password=True)
