"""Schemas in addition to those of client/model/schema.py: schemas of single values in the bytes of Pulsar's Java
client, of (key, value) pairs and of Protobuf messages; and schemas that take the definition from the topic, for
consumers and for producers.

Also in this file, under the heading "without a class": functions that encode and decode Avro payloads to and from plain
values, for programs that have no Record class."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum
from typing import Any

from ...proto.errors import InvalidSchema
from ...proto.schema import NONE_LENGTH, SchemaInfo, SchemaType, join_key_value, split_key_value
from ..common.checks import WrongMessageType
from ..common.errors import InvalidMessage
from .fields import CheckedSchema
from .fields import collect_named_types as collect_named_types
from .schema import BytesSchema, Schema, StringSchema, decode_avro_payload, fastavro, parse_avro_schema

# --------------------------------------------------------------------------------------------- primitive_schemas
# Schemas of single values, in the bytes of Pulsar's Java client: big-endian, and times as counts since the epoch.
#
# `encode` and `decode` raise InvalidMessage: a value of another type or out of range, a payload of another length.
# Java's types INSTANT and LOCAL_* have more digits than Python's: their payloads are rounded down to microseconds.


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_EPOCH = datetime(1970, 1, 1)
_MS, _US = timedelta(milliseconds=1), timedelta(microseconds=1)
_DAY = timedelta(days=1)


class PrimitiveSchema(Schema):
    """The schema of one plain Python type, such as `int` or `datetime`. The functions below make the instances, such as
    `Int32Schema()`. Raises InvalidMessage for a value of another type or out of range, and for a payload of another
    length."""

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
    """Returns the schema of signed integers of 8 bits, -128 … 127."""
    return _number(SchemaType.INT8, ">b")


def Int16Schema() -> PrimitiveSchema:
    """Returns the schema of signed integers of 16 bits, -32768 … 32767."""
    return _number(SchemaType.INT16, ">h")


def Int32Schema() -> PrimitiveSchema:
    """Returns the schema of signed integers of 32 bits."""
    return _number(SchemaType.INT32, ">i")


def Int64Schema() -> PrimitiveSchema:
    """Returns the schema of signed integers of 64 bits."""
    return _number(SchemaType.INT64, ">q")


def FloatSchema() -> PrimitiveSchema:
    """Returns the schema of `float`, stored in 32 bits: digits beyond single precision are lost."""
    return _number(SchemaType.FLOAT, ">f", float)


def DoubleSchema() -> PrimitiveSchema:
    """Returns the schema of `float`, stored in 64 bits."""
    return _number(SchemaType.DOUBLE, ">d", float)


def DateSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.date`, as ms of its midnight in UTC since the epoch."""
    return PrimitiveSchema(
        SchemaType.DATE, date, ">q", lambda value: ((value - _EPOCH.date()) // _MS,),
        lambda ms: (_EPOCH + ms * _MS).date(),
    )  # fmt: skip


def TimeSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.time`, as ms since midnight; microseconds are rounded down."""
    return PrimitiveSchema(
        SchemaType.TIME, time, ">q", lambda value: (_since_midnight(value) // _MS,),
        lambda ms: (_LOCAL_EPOCH + ms % (_DAY // _MS) * _MS).time(),
    )  # fmt: skip


def TimestampSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.datetime` with a time zone, as ms since the epoch. Microseconds are rounded down;
    consumers get the time in UTC."""
    return PrimitiveSchema(
        SchemaType.TIMESTAMP, datetime, ">q", lambda value: ((value - _EPOCH) // _MS,), lambda ms: _EPOCH + ms * _MS
    )


def InstantSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.datetime` with a time zone, to the microsecond; consumers get the time in UTC."""
    return PrimitiveSchema(
        SchemaType.INSTANT, datetime, ">qi",
        lambda value: ((value - _EPOCH) // (1_000_000 * _US), (value - _EPOCH) // _US % 1_000_000 * 1000),
        lambda seconds, nanos: _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000),
    )  # fmt: skip


def LocalDateSchema() -> PrimitiveSchema:
    """Returns the schema of `datetime.date`, as days since 1970-01-01."""
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


# --------------------------------------------------------------------------------------------- composite_schemas


_U32 = struct.Struct(">I")


class KeyValueEncodingType(Enum):
    """The places where the key of a (key, value) pair can be stored. INLINE: in the payload, in front of the value.
    SEPARATED: as the key of the message."""

    INLINE = "INLINE"
    SEPARATED = "SEPARATED"


class KeyValueSchema(Schema):
    """The schema of pairs `(key, value)`, each with its own schema; either may be None. The bytes are those of
    Pulsar's Java client.

    With SEPARATED the key of the pair is the key of the message (`partition_key`, base64), and the payload is the
    value. A message whose key is None has no key (`null_partition_key`); one whose value is None has no value
    (`null_value`). Both differ from an empty key or value. Raises InvalidMessage if `key` or `value` is not a Schema.
    """

    def __init__(
        self, key: Schema, value: Schema, encoding: KeyValueEncodingType = KeyValueEncodingType.INLINE
    ) -> None:
        super().__init__(tuple, schema_name="KEY_VALUE")
        if not isinstance(key, Schema) or not isinstance(value, Schema):
            raise InvalidMessage("KeyValueSchema takes two schemas")
        self._key, self._value = key, value
        self.separated = KeyValueEncodingType(encoding) is KeyValueEncodingType.SEPARATED

    def encode(self, obj: Any) -> bytes:
        self._check(obj)
        if self.separated:
            return _encoded(self._value, obj[1]) or b""
        parts = [_encoded(self._key, obj[0]), _encoded(self._value, obj[1])]
        return b"".join(
            _U32.pack(NONE_LENGTH) if each is None else _U32.pack(len(each)) + each for each in parts
        )

    def encode_separated(self, value: Any) -> tuple[bytes | None, bytes | None]:
        self._check(value)
        return _encoded(self._key, value[0]), _encoded(self._value, value[1])

    def decode(self, data: bytes) -> tuple[Any, Any]:
        key, at = _part(data, 0)
        value, end = _part(data, at)
        if end != len(data):
            raise InvalidMessage(f"{len(data) - end} bytes follow the pair")
        return (
            None if key is None else self._key.decode(key), None if value is None else self._value.decode(value)
        )  # fmt: skip

    def decode_separated(self, key: bytes | None, payload: bytes | None) -> tuple[Any, Any]:
        return (
            None if key is None else self._key.decode(key), None if payload is None else self._value.decode(payload)
        )  # fmt: skip

    def info(self) -> SchemaInfo:
        bytes_ = SchemaInfo(type=SchemaType.NONE, name="BYTES")
        return join_key_value(self._key.info() or bytes_, self._value.info() or bytes_, separated=self.separated)

    def _check(self, value: object) -> None:
        if not isinstance(value, tuple) or len(value) != 2:
            raise InvalidMessage(f"KeyValueSchema takes a pair (key, value), not {type(value).__name__}")


def _encoded(schema: Schema, value: Any) -> bytes | None:
    return None if value is None else schema.encode(value)


def _part(payload: bytes, at: int) -> tuple[bytes | None, int]:
    if len(payload) - at < 4:
        raise InvalidMessage("a pair ends before a length")
    size, at = _U32.unpack_from(payload, at)[0], at + 4
    if size == NONE_LENGTH:
        return None, at
    if size > len(payload) - at:
        raise InvalidMessage(f"a part of a pair has {size} bytes, and {len(payload) - at} are here")
    return payload[at : at + size], at + size


class ProtobufNativeSchema(Schema):
    """The schema of the messages of one Protobuf class, `record_cls`. The descriptor of the class is registered with
    the topic. Raises InvalidMessage if `record_cls` is not a class of Protobuf messages."""

    def __init__(self, record_cls: type[Any]) -> None:
        from google.protobuf.message import Message

        if not (isinstance(record_cls, type) and issubclass(record_cls, Message)):
            raise WrongMessageType("ProtobufNativeSchema takes a class of Protobuf messages")
        descriptors = _descriptors(getattr(record_cls, "DESCRIPTOR"))  # noqa: B009 - of a generated class
        super().__init__(record_cls, SchemaType.PROTOBUF_NATIVE, descriptors, "PROTOBUF_NATIVE")

    def encode(self, obj: Any) -> bytes:
        self._check(obj)
        encoded: bytes = obj.SerializeToString()
        return encoded

    def decode(self, data: bytes) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return self._record_cls.FromString(data)
        except DecodeError as error:
            raise InvalidMessage(f"the payload is no {self._record_cls.__name__}: {error}") from error


def _descriptors(descriptor: Any) -> dict[str, str]:
    """Returns the descriptor files of a message class, each after the files that it imports, as Java's client expects
    them."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    files: dict[str, Any] = {}

    def collect(file: Any) -> None:
        for each in file.dependencies:
            if each.name not in files:
                collect(each)
        files[file.name] = FileDescriptorProto.FromString(file.serialized_pb)

    collect(descriptor.file)
    return {
        "fileDescriptorSet": base64.b64encode(FileDescriptorSet(file=files.values()).SerializeToString()).decode(),
        "rootMessageTypeName": descriptor.full_name,
        "rootFileDescriptorName": descriptor.file.name,
    }


PRIMITIVE_SCHEMAS = {
    SchemaType[each()._schema_name]: each()
    for each in (
        BooleanSchema, Int8Schema, Int16Schema, Int32Schema,
        Int64Schema, FloatSchema, DoubleSchema, DateSchema,
        TimeSchema, TimestampSchema, InstantSchema, LocalDateSchema,
        LocalTimeSchema, LocalDateTimeSchema, StringSchema,
    )
}  # fmt: skip
"""The schemas of single values (numbers, times, text), by their types."""


class AutoConsumeSchema(Schema):
    """The schema for consumers that decodes each message with the schema with which it was written. A record becomes a
    `dict`, a single value a plain value, and a pair a tuple; of a pair with a SEPARATED key only the value is returned.
    The data of a message without a schema, or with a Protobuf schema, is returned as `bytes`. `encode` raises
    InvalidMessage; decoding raises it for a payload that does not fit the writer's schema."""

    by_writer = needs_writer = True

    def __init__(self) -> None:
        super().__init__(object, SchemaType.AUTO_CONSUME, None, "AUTO_CONSUME")
        self._parsed: dict[bytes, CheckedSchema] = {}

    def encode(self, obj: Any) -> bytes:
        raise InvalidMessage("AutoConsumeSchema is a consumer's: a producer has a schema of its own")

    def decode(self, data: bytes) -> bytes:
        return data

    def decode_with_writer_schema(self, payload: bytes, writer: SchemaInfo | None) -> Any:
        if writer is None:
            return payload
        if writer.type is SchemaType.AVRO:
            parsed = self._parsed.get(writer.data)
            if parsed is None:
                parsed = self._parsed[writer.data] = CheckedSchema(parse_avro_schema(writer))
            return decode_avro_payload(payload, parsed)
        if writer.type is SchemaType.JSON:
            try:
                return json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise InvalidMessage(f"the payload is not JSON: {error}") from error
        if writer.type is SchemaType.KEY_VALUE:
            return self._pair(payload, writer)
        single = PRIMITIVE_SCHEMAS.get(writer.type)
        return payload if single is None else single.decode(payload)

    def _pair(self, payload: bytes, writer: SchemaInfo) -> Any:
        """Decodes a pair; of a SEPARATED one only the value, because its key is the key of the message."""
        halves = split_key_value(writer)
        if writer.properties.get("kv.encoding.type") == KeyValueEncodingType.SEPARATED.value:
            return self.decode_with_writer_schema(payload, halves.value)
        key, value = KeyValueSchema(BytesSchema(), BytesSchema()).decode(payload)
        return (
            None if key is None else self.decode_with_writer_schema(key, halves.key),
            None if value is None else self.decode_with_writer_schema(value, halves.value),
        )


class PreEncodedSchema(Schema):
    """The schema for producers whose program encodes the values itself: a value is the payload, as bytes; `encode`
    raises InvalidMessage for any other value. The schema `info` is registered with the topic; payloads are not compared
    with it."""

    def __init__(self, info: SchemaInfo) -> None:
        super().__init__(bytes, schema_name=info.name)
        self._told = info

    def encode(self, data: Any) -> bytes:
        self._check(data)
        return bytes(data)

    def decode(self, data: bytes) -> bytes:
        return data


class AutoPublishSchema(Schema):
    """The schema for producers that send encoded payloads as bytes. Each payload must fit the schema that was the
    newest of the topic when the producer was opened.

    `send` raises InvalidMessage for bytes that do not fit. A topic without a schema accepts any bytes."""

    of_topic = True

    def __init__(self) -> None:
        super().__init__(bytes, schema_name="AUTO_PUBLISH")

    def known(self, info: SchemaInfo | None) -> Schema:
        return BytesSchema() if info is None else _Checked(info)


def _check_json(payload: bytes) -> None:
    """Raises InvalidMessage if the payload is not JSON, also for NaN and infinities, which Python's parser accepts."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"it has {constant}")

    try:
        json.loads(payload, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the payload is not JSON: {error}") from error


class _Checked(PreEncodedSchema):
    _told: SchemaInfo

    def __init__(self, info: SchemaInfo) -> None:
        super().__init__(info)
        self._by = AutoConsumeSchema()

    def encode(self, data: Any) -> bytes:
        payload = super().encode(data)
        if self._told.type is SchemaType.JSON:
            _check_json(payload)
        self._by.decode_with_writer_schema(payload, self._told)
        return payload


# ------------------------------------------------------------------------------------------------- without a class
# Encodes and decodes payloads by a topic's schema for programs that have no class of its records: to and from plain
# values. Used by the Spark connector. An Avro value is what fastavro makes of it.


Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


def parse_avro_definition(info: SchemaInfo) -> Any:
    """Parses the definition of an AVRO or JSON schema. Returns the schema as fastavro parses it, with full names.
    Raises InvalidSchema if the definition is not valid, or is nested too deeply, or fastavro is not installed."""
    try:
        return fastavro().parse_schema(json.loads(info.data))
    except RecursionError:
        raise InvalidSchema(f"the definition of this {info.type.name} schema is too deep") from None
    except Exception as error:  # fastavro's own kinds, and those of JSON
        raise InvalidSchema(f"the definition of this {info.type.name} schema is no Avro: {error}") from error


def make_avro_decoder(writer: Any, reader: Any = None) -> Decode:
    """Returns a function that decodes Avro payloads to plain values. `writer`: the definition with which the payloads
    were written; `reader`: the definition of the values (None: `writer`). The function raises InvalidMessage for a
    payload that does not fit `writer`, or cannot be converted to `reader`. Raises InvalidMessage if fastavro is not
    installed, and fastavro's error if a definition is not valid."""
    parsed = CheckedSchema(fastavro().parse_schema(writer))
    own = None if reader is None else fastavro().parse_schema(reader)
    return lambda payload: decode_avro_payload(payload, parsed, own)


def make_avro_encoder(definition: Any) -> Encode:
    """Returns a function that encodes plain values as Avro payloads, by the Avro schema `definition`. The function
    raises InvalidMessage for a value that does not fit. Raises InvalidMessage if fastavro is not installed, and
    fastavro's error if the definition is not valid."""
    write, schema = fastavro().schemaless_writer, fastavro().parse_schema(definition)

    def encode(value: Any) -> bytes:
        out = io.BytesIO()
        try:
            write(out, schema, value)
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            raise InvalidMessage(f"the value does not fit its Avro schema: {error}") from error
        return out.getvalue()

    return encode
