"""Schemas of single values, in the bytes of Pulsar's Java client: big-endian, and times as counts since the epoch.

`encode` and `decode` raise InvalidMessage: a value of another type or out of range, a payload of another length. Java's
types INSTANT and LOCAL_* have more digits than Python's: their payloads are rounded down to microseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from ...proto.schema import SchemaType
from ..common.errors import InvalidMessage
from .schema import Schema

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_EPOCH = datetime(1970, 1, 1)
_MS, _US = timedelta(milliseconds=1), timedelta(microseconds=1)
_DAY = timedelta(days=1)


class PrimitiveSchema(Schema):
    """The schema of one Python type, by its form in `struct` and two functions."""

    def __init__(
        self, type_: SchemaType, of: type[Any], form: str, to: Callable[[Any], tuple[Any, ...]],
        back: Callable[..., Any],
    ) -> None:  # fmt: skip
        super().__init__(of, type_, None, type_.name)
        self._form, self._to, self._back = struct.Struct(form), to, back

    def encode(self, obj: Any) -> bytes:
        if type(obj) is not self._record_cls and not (self._record_cls is float and type(obj) is int):
            raise InvalidMessage(f"{self} takes {self._record_cls.__name__}, not {type(obj).__name__}")
        try:
            return self._form.pack(*self._to(obj))
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise InvalidMessage(f"{obj!r:.100} is no {self}: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return self._back(*self._form.unpack(data))
        except (struct.error, OverflowError, ValueError) as error:
            raise InvalidMessage(f"a payload of {len(data)} bytes is no {self}: {error}") from error


def _one(value: Any) -> tuple[Any, ...]:
    return (value,)


def _as_it_is(value: Any) -> Any:
    return value


def _truth(byte: int) -> bool:
    if byte > 1:
        raise ValueError("the byte is neither 0 nor 1")
    return bool(byte)


def _since_midnight(value: time) -> timedelta:
    return timedelta(
        hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond
    )


def _number(type_: SchemaType, form: str, of: type[Any] = int) -> PrimitiveSchema:
    return PrimitiveSchema(type_, of, form, _one, _as_it_is)


def BooleanSchema() -> PrimitiveSchema:
    """Returns the schema of `bool`, as one byte."""
    return PrimitiveSchema(SchemaType.BOOLEAN, bool, ">B", _one, _truth)


def Int8Schema() -> PrimitiveSchema:
    """Returns the schema of `int` of 8 bits."""
    return _number(SchemaType.INT8, ">b")


def Int16Schema() -> PrimitiveSchema:
    """Returns the schema of `int` of 16 bits."""
    return _number(SchemaType.INT16, ">h")


def Int32Schema() -> PrimitiveSchema:
    """Returns the schema of `int` of 32 bits."""
    return _number(SchemaType.INT32, ">i")


def Int64Schema() -> PrimitiveSchema:
    """Returns the schema of `int` of 64 bits."""
    return _number(SchemaType.INT64, ">q")


def FloatSchema() -> PrimitiveSchema:
    """Returns the schema of `float` of 32 bits."""
    return _number(SchemaType.FLOAT, ">f", float)


def DoubleSchema() -> PrimitiveSchema:
    """Returns the schema of `float` of 64 bits."""
    return _number(SchemaType.DOUBLE, ">d", float)


def DateSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.date`, as ms of its midnight in UTC since the epoch."""
    return PrimitiveSchema(
        SchemaType.DATE, date, ">q", lambda value: ((value - _EPOCH.date()) // _MS,),
        lambda ms: (_EPOCH + ms * _MS).date(),
    )  # fmt: skip


def TimeSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.time`, as ms since midnight."""
    return PrimitiveSchema(
        SchemaType.TIME, time, ">q", lambda value: (_since_midnight(value) // _MS,),
        lambda ms: (_LOCAL_EPOCH + ms % (_DAY // _MS) * _MS).time(),
    )  # fmt: skip


def TimestampSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.datetime` with a time zone, as ms since the epoch; it comes back in UTC."""
    return PrimitiveSchema(
        SchemaType.TIMESTAMP, datetime, ">q", lambda value: ((value - _EPOCH) // _MS,), lambda ms: _EPOCH + ms * _MS
    )


def InstantSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.datetime` with a time zone, to the microsecond; it comes back in UTC."""
    return PrimitiveSchema(
        SchemaType.INSTANT, datetime, ">qi",
        lambda value: ((value - _EPOCH) // (1_000_000 * _US), (value - _EPOCH) // _US % 1_000_000 * 1000),
        lambda seconds, nanos: _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000),
    )  # fmt: skip


def LocalDateSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.date`, as days since the epoch."""
    return PrimitiveSchema(
        SchemaType.LOCAL_DATE, date, ">q", lambda value: ((value - _EPOCH.date()) // _DAY,),
        lambda days: _EPOCH.date() + days * _DAY,
    )  # fmt: skip


def LocalTimeSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.time` without a time zone, to the microsecond."""
    return PrimitiveSchema(
        SchemaType.LOCAL_TIME, time, ">q", lambda value: (_since_midnight(value) // _US * 1000,),
        lambda nanos: (_LOCAL_EPOCH + nanos // 1000 % (_DAY // _US) * _US).time(),
    )  # fmt: skip


def LocalDateTimeSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.datetime` without a time zone, to the microsecond."""
    return PrimitiveSchema(
        SchemaType.LOCAL_DATE_TIME, datetime, ">qq",
        lambda value: ((value - _LOCAL_EPOCH) // _DAY, (value - _LOCAL_EPOCH) // _US % (_DAY // _US) * 1000),
        lambda days, nanos: _LOCAL_EPOCH + days * _DAY + nanos // 1000 * _US,
    )  # fmt: skip
