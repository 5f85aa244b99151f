"""Makes the row of an outbox for a message. The row is checked when the application writes it, so that a wrong value
fails in the application's transaction and not later in the relay. Also the errors that an outbox and its relays raise
in addition to those of the SDK."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from enum import IntEnum
from random import getrandbits
from typing import TypedDict

from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.errors import MagnetarError
from ...proto.names import TopicName, hash_key
from ...proto.schema import SchemaInfo, SchemaType
from ...runtime.clock import SystemClock
from ..common.errors import MessageTooBig, translate_error
from ..model.schema import BytesSchema, Schema
from ..produce.entry_writer import Extras, make_outgoing_message

OUTBOX_TABLE = "magnetar_outbox"
"""The name of the table of rows; `_shards` and `_positions` are appended for the two tables of the relay."""

ROW_BYTES_MAX = ENTRY_BYTES_MAX - (64 << 10)
"""Most bytes of a row's value, key and properties together: the row must fit into one entry with its metadata."""

_clock = SystemClock()
_BYTES = BytesSchema()


class RowState(IntEnum):
    """The states of a row of an outbox. WAITING: it waits to be claimed. CLAIMED: a relay sends it. HELD: it was
    refused and waits for its next attempt. PARKED: it was refused too often, or an operator parked it; no relay claims
    it."""

    WAITING = 0  # to be claimed
    CLAIMED = 1  # for its outcome
    HELD = 2  # it was refused; for its next attempt
    PARKED = 3  # for a person: it was refused too often, or parked by hand


class RowKeyEncoding(IntEnum):
    """The encodings of a row's key that is not text, in the column `key_form`. BYTES: the key is bytes, and the column
    `key` has their base64. NULL: the key of a (key, value) pair is None. A row without a `key_form` has a text key, or
    no key."""

    BYTES = 1  # base64 of a key of bytes
    NULL = 2  # nothing: the key of its pair is None


class NewOutboxRow(TypedDict):
    """A new row of an outbox: the columns that the application writes, with their values. Times are ms since the epoch;
    `size` is the number of bytes of key, value and properties."""

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
    """Number that is equal for all rows of one database transaction, and different for any other transaction."""
    value_schema: str | None
    """Schema of the value as text, as `encode_row_schema` writes it; None: the value is bytes."""
    key_form: int | None


def make_random_unit_id() -> int:
    """Returns a random id for a unit (the rows that one transaction of the application writes). The id has 62 bits, so
    that two units practically never get the same id."""
    return getrandbits(62)


def now_ms() -> int:
    """Returns the present time of the system's clock, in ms since the epoch."""
    return _clock.wall_ms()


def make_outbox_row(
    topic: str, value: object, key: str | None, properties: Mapping[str, str] | None, event_time: int | None,
    deliver_at: int | None, schema: Schema | None, unit: int,
) -> NewOutboxRow:  # fmt: skip
    """Returns the row of a message, after checking the message's values. `value`: bytes, or a value that `schema`
    encodes; None: a message without a value. Times are ms since the epoch. `unit`: the id of the unit
    (`make_random_unit_id`). Raises InvalidTopicName if `topic` is malformed, InvalidMessage if another value is wrong,
    MessageTooBig if the row is larger than ROW_BYTES_MAX."""
    try:
        name = TopicName.parse(topic)
    except Exception as error:
        raise translate_error(error) from error
    given = Extras(
        dict(properties) if properties else None, key, event_timestamp=event_time, deliver_at=deliver_at
    )
    schema = schema or _BYTES
    message = make_outgoing_message(value, given, schema, now_ms)
    key, info = message.partition_key, schema.info()
    form = RowKeyEncoding.NULL if message.null_key else RowKeyEncoding.BYTES if message.key_is_base64 else None
    text = json.dumps(message.properties, ensure_ascii=False) if message.properties else None
    size = len(message.payload) + len((key or "").encode()) + len((text or "").encode())
    if size > ROW_BYTES_MAX:
        raise MessageTooBig(f"value, key and properties are {size} bytes; an entry takes {ROW_BYTES_MAX}", size=size)
    return NewOutboxRow(
        topic=name.full, key=key, value=None if message.null_value else message.payload, properties=text,
        event_time=event_time, deliver_at=deliver_at, created=now_ms(),
        key_hash=getrandbits(31) if key is None else hash_key(key), size=size, state=RowState.WAITING, attempts=0,
        unit=unit, value_schema=None if info is None else encode_row_schema(info), key_form=form,
    )  # fmt: skip


def encode_row_schema(info: SchemaInfo) -> str:
    """Returns a schema as text for the column `value_schema` of a row: JSON, with the definition as base64.
    `parse_schema` reads the text."""
    told = {"type": info.type.name, "name": info.name, "data": b64encode(info.data).decode()}
    return json.dumps({**told, "properties": dict(info.properties)}, sort_keys=True, ensure_ascii=False)


def parse_schema(text: str) -> SchemaInfo:
    """Parses the text in the column `value_schema` of a row, and returns the schema. Raises ValueError if the text is
    not valid."""
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
    """Base class of the errors that an outbox and its relays raise in addition to those of the SDK."""

    definite = True


class OutboxTableMissing(OutboxError):
    """Raised when the database lacks the tables of the outbox, or has them in another schema of the database."""


class OutboxColumnsMissing(OutboxError):
    """Raised when a table with the name of the outbox exists, but lacks columns of the outbox."""


class OutboxReadOnly(OutboxError):
    """Raised when the database is read-only, or its role may not change the outbox's tables: a relay must update and
    delete rows."""


class OutboxUnreachable(OutboxError):
    """Raised when the database does not answer, a connection to it broke, or it reports an error that is not known
    here, such as a deadlock. The relay retries; its next transaction shows whether the failed one committed."""

    definite = False
    retryable = True


class DeduplicationOff(OutboxError):
    """Raised when the policy `deduplication` is off for a topic: rows that are sent again would be stored twice."""


class RelayFenced(OutboxError):
    """Raised in a relay when a newer relay has claimed its shard. The older relay sends nothing more, and must not be
    started again while the newer one runs."""


class ShardsDiffer(OutboxError):
    """Raised when the outbox is divided into another number of shards than this relay was started with; and when that
    number cannot be changed, because a relay runs or rows are claimed."""


class OutboxBehind(OutboxError):
    """Raised when a topic knows sequence ids of this outbox that the database does not: the database was restored from
    a backup or created again, or another database uses the same name."""


class SequencesForgotten(OutboxError):
    """Raised when a topic lost sequence ids that it had confirmed, and claimed rows may be stored there already: if
    they are sent again, they may be stored twice."""
