"""The outbox of an application that uses SQLAlchemy: its tables, and `send`.

    outbox = SQLAlchemyOutbox(Base.metadata)
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "orders", b"…", key="17")      # a row in this transaction, and nothing on the network

Three tables: the rows; one record per shard (its holder, the next sequence id); one per shard and destination (the
highest sequence id that is stored). `metadata.create_all(engine)` or Alembic makes them.

A message as a row of an outbox: checked when the application writes it, so that a wrong value fails in the
application's transaction and not later in the relay. Also the errors of an outbox.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from random import getrandbits
from typing import Any, TypedDict
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

from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.errors import MagnetarError
from ...proto.names import TopicName, key_hash
from ...proto.schema import SchemaInfo, SchemaType
from ...runtime.clock import SystemClock
from ..common.errors import MessageTooBig, translate_error
from ..model.schema import BytesSchema, Schema
from ..produce.entry_writer import Extras, make_outgoing_message

TABLE = "magnetar_outbox"
"""The name of the table; `_shards` and `_positions` are appended for the relay's own."""

ROW_BYTES_MAX = ENTRY_BYTES_MAX - (64 << 10)
"""Most bytes of value, key and properties: with its metadata a row must go into one entry."""

_clock = SystemClock()
_BYTES = BytesSchema()


class RowState(IntEnum):
    """The states of a row of an outbox; each names the event for which the row waits."""

    WAITING = 0  # to be claimed
    CLAIMED = 1  # for its outcome
    HELD = 2  # it was refused; for its next attempt
    PARKED = 3  # for a person: it was refused too often, or parked by hand


class RowKeyEncoding(IntEnum):
    """The encodings of a key that is not text in the column `key`. A row without a form has a text key, or no key."""

    BYTES = 1  # base64 of a key of bytes
    NULL = 2  # nothing: the key of its pair is None


class NewRow(TypedDict):
    """A new row of an outbox: the columns that the application writes, with their values."""

    topic: str
    key: str | None
    value: bytes | None
    properties: str | None
    event_time: int | None
    deliver_at: int | None
    created: int
    key_hash: int
    size: int
    state: int
    attempts: int
    unit: int
    """Number that is equal for all rows of one transaction in the database, and for no other."""
    value_schema: str | None
    """Text of the schema, as `encode_row_schema` writes it; None: bytes."""
    key_form: int | None


def make_unit_id() -> int:
    """Returns a random id for a unit: the rows that one transaction of the application writes. The id has 62 bits, so
    that two waiting units do not get the same one."""
    return getrandbits(62)


def now_ms() -> int:
    return _clock.wall_ms()


def make_new_row(
    topic: str, value: object, key: str | None, properties: Mapping[str, str] | None, event_time: int | None,
    deliver_at: int | None, schema: Schema | None, unit: int,
) -> NewRow:  # fmt: skip
    """Makes the row of a message, after checking its values. `value`: bytes, or a value that `schema` encodes; None: a
    message without a value. Raises InvalidTopicName, InvalidMessage if the value is wrong, or MessageTooBig."""
    try:
        name = TopicName.parse(topic)
    except Exception as error:
        raise translate_error(error) from error
    given = Extras(dict(properties) if properties else None, key, event_timestamp=event_time, deliver_at=deliver_at)
    schema = schema or _BYTES
    message = make_outgoing_message(value, given, schema, now_ms)
    key, info = message.partition_key, schema.info()
    form = RowKeyEncoding.NULL if message.null_key else RowKeyEncoding.BYTES if message.key_is_base64 else None
    text = json.dumps(message.properties, ensure_ascii=False) if message.properties else None
    size = len(message.payload) + len((key or "").encode()) + len((text or "").encode())
    if size > ROW_BYTES_MAX:
        raise MessageTooBig(f"value, key and properties are {size} bytes; an entry takes {ROW_BYTES_MAX}", size=size)
    return NewRow(
        topic=name.full, key=key, value=None if message.null_value else message.payload, properties=text,
        event_time=event_time, deliver_at=deliver_at, created=now_ms(),
        key_hash=getrandbits(31) if key is None else key_hash(key), size=size, state=RowState.WAITING, attempts=0,
        unit=unit, value_schema=None if info is None else encode_row_schema(info), key_form=form,
    )  # fmt: skip


def encode_row_schema(info: SchemaInfo) -> str:
    """Encodes a schema as text for the schema column of a row, and returns the text: JSON, with the definition as
    base64."""
    told = {"type": info.type.name, "name": info.name, "data": b64encode(info.data).decode()}
    return json.dumps({**told, "properties": dict(info.properties)}, sort_keys=True, ensure_ascii=False)


def parse_schema(text: str) -> SchemaInfo:
    """Parses the text in the schema column of a row, and returns the schema. Raises ValueError if the text is not
    valid."""
    try:
        found = json.loads(text)
        return SchemaInfo(
            type=SchemaType[found["type"]], name=found["name"], data=b64decode(found["data"], validate=True),
            properties=dict(found["properties"]),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the schema of the row cannot be read: {error!r}") from error


# -------------------------------------------------------------------------------------------------------- errors
# The errors of an outbox and its relay beyond the SDK's. Each text says what is wrong and what to do.
#
# `retryable`: the relay tries again by itself, and raises nothing. The others end it: a person, or the program that
# started it, has to act. Guard: tests/client/outbox/test_databases.py.


class OutboxError(MagnetarError):
    """Base class of the errors of an outbox."""

    definite = True


class OutboxTableMissing(OutboxError):
    """Raised when the database lacks the tables of the outbox, or has them in another schema of the database."""


class OutboxColumnsMissing(OutboxError):
    """Raised when a table with the name of the outbox exists, but lacks columns of the outbox."""


class OutboxReadOnly(OutboxError):
    """Raised when the database or its role is read-only; a relay must update and delete rows."""


class OutboxUnreachable(OutboxError):
    """Raised when the database does not answer, or a connection to it broke. The relay retries; its next transaction
    shows whether the failed one committed."""

    definite = False
    retryable = True


class DeduplicationOff(OutboxError):
    """Raised when the policy `deduplication` is off for a topic: rows that are sent again would be stored twice."""


class RelayFenced(OutboxError):
    """Raised in a relay when a newer relay has claimed its shard. The older relay sends nothing more, and must not be
    started again while the newer one runs."""


class ShardsDiffer(OutboxError):
    """Raised when the outbox is divided into another number of shards than this relay was started with."""


class OutboxBehind(OutboxError):
    """Raised when a topic knows sequence ids of this outbox that the database does not: the database was restored from
    a backup or created again, or another database uses the same name."""


class SequencesForgotten(OutboxError):
    """Raised when a topic lost sequence ids that it had confirmed, and claimed rows may be stored there already: if
    they are sent again, they may be stored twice."""


_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts only an INTEGER PRIMARY KEY by itself
_VALUE = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


class SQLAlchemyOutbox:
    """The outbox of an application that uses SQLAlchemy. `metadata`: the application's, so that its migrations make
    the tables; `table`: the name of the table of rows, from which the others are derived."""

    def __init__(self, metadata: MetaData, table: str = TABLE, *, schema: str | None = None) -> None:
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
        return self

    def send(
        self, session: Session | Connection, topic: str, value: object, *, key: str | None = None,
        properties: Mapping[str, str] | None = None, event_time: int | None = None, deliver_at: int | None = None,
        schema: Schema | None = None,
    ) -> None:  # fmt: skip
        """Writes a message for `topic` as a row; a relay sends it if and when the transaction of `session` commits.

        `value` is bytes, or a value that `schema` encodes; the row stores the schema, and the topic gets it. None: a
        message without a value. With a KeyValue schema whose key is separate, that key is used in place of `key`. Times
        are ms since the epoch. With an AsyncSession: `await session.run_sync(outbox.send, "orders", value)`. Raises
        InvalidTopicName, InvalidMessage or MessageTooBig before anything is written; later what the database raises.
        """
        unit = self._unit_of(session)
        row = make_new_row(topic, value, key, properties, event_time, deliver_at, schema, unit)
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
        return self._units.setdefault(root, make_unit_id())

    def _committed(self, _session: Session) -> None:
        self.wake()

    def wake(self) -> None:
        """Makes the relays that run in this process search for rows at once instead of after their pause."""
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
"""SQLSTATE of PostgreSQL → error: undefined_table, undefined_column, read_only_sql_transaction, insufficient_privilege.
"""

WHAT_TO_DO = {
    OutboxTableMissing: "a migration makes it, or metadata.create_all(engine), or 'magnetar outbox create'",
    OutboxColumnsMissing: "a migration of this version is not applied, or another program has a table of that name:"
    " apply it, or choose another name (table=…, --table)",
    OutboxReadOnly: "a relay claims and deletes rows: give it the primary server, and a role that may SELECT, INSERT,"
    " UPDATE and DELETE on the three tables of the outbox",
    OutboxUnreachable: "is the server there, and are URL and password right?",
}


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raises an OutboxError in place of an error that SQLAlchemy raises in the `with` block; the original error is its
    cause."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _translate(error) from error
    except OSError as error:
        raise OutboxUnreachable(f"the database: {error}; {WHAT_TO_DO[OutboxUnreachable]}") from error


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
    return kind(f"the database said: {text}; {WHAT_TO_DO[kind]}")


def check_tables(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """Checks the tables of `outbox` in the database. Raises OutboxTableMissing if one is missing, OutboxColumnsMissing
    if one lacks columns."""
    with translate_errors():
        found = inspect(engine)
        for table in (outbox.rows, outbox.shards, outbox.positions):
            if not found.has_table(table.name, schema=table.schema):
                what = f"the database {url_without_password(engine)} has no table {table.name}"
                raise OutboxTableMissing(f"{what}; {WHAT_TO_DO[OutboxTableMissing]}")
            there = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
            missing = [column.name for column in table.columns if column.name not in there]
            if missing:
                what = f"table {table.name} of {url_without_password(engine)} has no column {', '.join(missing)}"
                raise OutboxColumnsMissing(f"{what}; {WHAT_TO_DO[OutboxColumnsMissing]}")


def url_without_password(engine: Engine) -> str:
    """Returns the URL of the database without its password."""
    return engine.url.render_as_string(hide_password=True)
