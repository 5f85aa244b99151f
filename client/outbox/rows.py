"""A message as a row of an outbox: checked when the application writes it, so that a wrong value fails in its own
transaction and not later in the relay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from random import getrandbits
from typing import TypedDict

from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.names import TopicName
from ...proto.routing import key_hash
from ...runtime.clock import SystemClock
from ..common.errors import MessageTooBig, translate
from ..model.schema import BytesSchema, Schema
from ..produce.messages import Extras, outgoing

TABLE = "magnetar_outbox"
"""The name of the table; `_shards` and `_positions` are appended for the relay's own."""

ROW_BYTES_MAX = ENTRY_BYTES_MAX - (64 << 10)
"""Of value, key and properties: with its metadata it must go into one entry."""

_clock = SystemClock()
_BYTES = BytesSchema()


class RowState(IntEnum):
    """What a row waits for."""

    WAITING = 0  # to be claimed
    CLAIMED = 1  # for its outcome
    HELD = 2  # it was refused; for its next attempt
    PARKED = 3  # for a person: it was refused too often, or parked by hand


class NewRow(TypedDict):
    """The columns that the application writes."""

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
    """The same for all rows of one transaction in the database, and of no other."""


def new_unit() -> int:
    """Of one transaction of the application. By chance: 2^62 of them, so that two that wait at once are never equal."""
    return getrandbits(62)


def now_ms() -> int:
    return _clock.wall_ms()


def new_row(
    topic: str, value: object, key: str | None, properties: Mapping[str, str] | None, event_time: int | None,
    deliver_at: int | None, schema: Schema | None, unit: int,
) -> NewRow:  # fmt: skip
    """`value` is bytes, or what `schema` encodes; None: a message without a value. InvalidTopicName; InvalidMessage for
    a wrong value; MessageTooBig."""
    try:
        name = TopicName.parse(topic)
    except Exception as error:
        raise translate(error) from error
    given = Extras(dict(properties) if properties else None, key, event_timestamp=event_time, deliver_at=deliver_at)
    message = outgoing(value, given, schema or _BYTES, now_ms)
    text = json.dumps(message.properties, ensure_ascii=False) if message.properties else None
    size = len(message.payload) + len((key or "").encode()) + len((text or "").encode())
    if size > ROW_BYTES_MAX:
        raise MessageTooBig(f"value, key and properties are {size} bytes; an entry takes {ROW_BYTES_MAX}", size=size)
    return NewRow(
        topic=name.full, key=key, value=None if message.null_value else message.payload, properties=text,
        event_time=event_time, deliver_at=deliver_at, created=now_ms(),
        key_hash=getrandbits(31) if key is None else key_hash(key), size=size, state=RowState.WAITING, attempts=0,
        unit=unit,
    )  # fmt: skip
