"""Schemas: how a value becomes a payload and back. Names of `pulsar.schema`.

`encode` raises InvalidMessage when the value does not fit, before anything is sent. Others: primitive_schemas.py,
composite_schemas.py.
"""

from __future__ import annotations

import io
import json
from typing import Any, ClassVar

from ...proto.schema import SchemaInfo, SchemaType
from ..common.checks import WrongMessageType, shown
from ..common.errors import InvalidMessage
from .avro_bounds import Parsed
from .fields import Text
from .record import Record

__all__ = ["AvroSchema", "BytesSchema", "JsonSchema", "Schema", "StringSchema"]


class Schema:
    """How a value becomes a payload and back. `encode` and `decode` raise InvalidMessage for what does not fit.

    A topic knows the schema that `info` tells: brokers compare it with its others (docs/schemas.md), and give it
    a version, which messages name. None: bytes. What a program derives from this class overrides `encode` and `decode`.
    """

    by_writer: ClassVar[bool] = False  # it decodes with the schema with which a message was written
    needs_writer: ClassVar[bool] = False  # … and knows no other
    separated = False  # the key of its pair is the key of the message

    def __init__(self, record_class: type[Any], schema_name: str = "") -> None:
        self._record_class = record_class
        self._schema_name = schema_name

    def encode(self, value: Any) -> bytes:
        """The payload of a value."""
        raise NotImplementedError

    def decode(self, payload: bytes) -> Any:
        """The value of a payload."""
        raise NotImplementedError

    def info(self) -> SchemaInfo | None:
        """What a topic is told of it."""
        return None

    def decode_written(self, payload: bytes, writer: SchemaInfo | None) -> Any:
        """`writer`: the schema that the message names; None: it names none."""
        return self.decode(payload)

    def encode_key(self, value: Any) -> bytes:
        """The key of a pair that is `separated`, before it becomes the key of the message."""
        raise InvalidMessage(f"{type(self).__name__} has no pairs")

    def decode_pair(self, key: bytes, payload: bytes) -> Any:
        """The pair of a message that has its key apart."""
        raise InvalidMessage(f"{type(self).__name__} has no pairs")

    def _check(self, value: object) -> None:
        if not isinstance(value, self._record_class):
            what = ": encode it, or use StringSchema" if self._record_class is bytes and isinstance(value, str) else ""
            raise InvalidMessage(
                f"{type(self).__name__} takes {self._record_class.__name__}, not {type(value).__name__}{what}"
            )

    def __str__(self) -> str:
        return self._schema_name or type(self).__name__


class BytesSchema(Schema):
    """The payload itself: `bytes`, or what is like them. The default."""
    def __init__(self) -> None:
        super().__init__(bytes, "BYTES")

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        self._check(value)
        return bytes(value)

    def decode(self, payload: bytes) -> bytes:
        """The payload itself."""
        return payload


class StringSchema(Schema):
    """Text, as UTF-8."""
    def __init__(self) -> None:
        super().__init__(str, "STRING")

    def encode(self, value: Any) -> bytes:
        self._check(value)
        return bytes(value.encode())

    def decode(self, payload: bytes) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage("the payload is not UTF-8 text") from error

    def info(self) -> SchemaInfo:
        return SchemaInfo(type=SchemaType.STRING, name="STRING")


class JsonSchema(Schema):
    """A Record as compact JSON."""

    def __init__(self, record_cls: type[Record]) -> None:
        super().__init__(_class_of_records(record_cls), "JSON")

    def encode(self, value: Any) -> bytes:
        self._check(value)
        value.check_fields()
        return json.dumps(value.plain(Text.JSON), separators=(",", ":"), ensure_ascii=False).encode()

    def decode(self, payload: bytes) -> Any:
        try:
            plain = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"the payload is not JSON: {error}") from error
        if not isinstance(plain, dict):
            raise InvalidMessage(f"the payload is JSON, but a {type(plain).__name__} and not an object")
        return self._record_class.from_plain(plain, Text.JSON)

    def info(self) -> SchemaInfo:
        return _described(SchemaType.JSON, self._record_class.schema())


class AvroSchema(Schema):
    """A Record, or a dict when only `schema_definition` is given, as Avro. Needs the extra `avro` (fastavro).

    A message is decoded with the schema with which it was written, and comes as a value of this one: fields that it did
    not have get their defaults, those that this one does not have are left out.
    """

    by_writer = True

    def __init__(self, record_cls: type[Record] | None, schema_definition: dict[str, Any] | None = None) -> None:
        self._avro = fastavro()
        if record_cls is None and schema_definition is None:
            raise InvalidMessage("AvroSchema needs a Record class or a schema_definition")
        super().__init__(dict if record_cls is None else _class_of_records(record_cls), "AVRO")
        self._is_record = record_cls is not None
        self._definition = schema_definition or (record_cls.schema() if record_cls is not None else {})
        self._schema = self._avro.parse_schema(self._definition)
        self._told = _described(SchemaType.AVRO, self._definition)
        self._own = Parsed(self._schema)
        self._writers = {self._told.data: self._own}

    def encode(self, value: Any) -> bytes:
        self._check(value)
        out = io.BytesIO()
        plain = value
        if self._is_record:
            value.check_fields()
            plain = value.plain(Text.AVRO)
        try:
            self._avro.schemaless_writer(out, self._schema, plain)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidMessage(f"the value does not fit its Avro schema: {error}") from error
        return out.getvalue()

    def decode(self, payload: bytes) -> Any:
        return self._decoded(payload, self._own)

    def decode_written(self, payload: bytes, writer: SchemaInfo | None) -> Any:
        if writer is None:
            return self.decode(payload)
        schema = self._writers.get(writer.data)
        if schema is None:
            schema = self._writers[writer.data] = Parsed(self._renamed(parsed_avro(writer)))
        return self._decoded(payload, schema)

    def _renamed(self, writer: Any) -> Any:
        """Under our name: programs name their classes as they like, as with Pulsar's client."""
        if isinstance(writer, dict) and isinstance(self._schema, dict) and "name" in writer and "name" in self._schema:
            return {**writer, "name": self._schema["name"]}
        return writer

    def _decoded(self, payload: bytes, writer: Parsed) -> Any:
        plain = read_avro(payload, writer, None if writer is self._own else self._schema)
        return self._record_class.from_plain(plain, Text.AVRO) if self._is_record else plain

    def info(self) -> SchemaInfo:
        return self._told


def _class_of_records(given: Any) -> type[Record]:
    if not (isinstance(given, type) and issubclass(given, Record)):
        raise WrongMessageType(f"a schema is made of a class of Record, not of {shown(given)}")
    return given


def fastavro() -> Any:
    """InvalidMessage: it is not installed."""
    try:
        import fastavro
    except ImportError as error:
        raise InvalidMessage("Avro needs fastavro: pip install 'magnetar[avro]'") from error
    return fastavro


def parsed_avro(writer: SchemaInfo) -> Any:
    """InvalidMessage: it is no schema of Avro."""
    if writer.type is not SchemaType.AVRO:
        raise InvalidMessage(f"the message was written with a schema of type {writer.type.name}, not AVRO")
    try:
        return fastavro().parse_schema(json.loads(writer.data))
    except Exception as error:  # fastavro's own kinds
        raise InvalidMessage(f"the schema with which the message was written is no Avro: {error}") from error


def read_avro(payload: bytes, writer: Parsed, reader: Any = None) -> Any:
    """InvalidMessage: the payload is not of the writer's schema, has more bytes than that, or claims too much."""
    writer.check(payload)
    source = io.BytesIO(payload)
    try:
        plain = fastavro().schemaless_reader(source, writer.schema, reader)
    except Exception as error:  # fastavro raises EOFError, ValueError, IndexError, UnicodeDecodeError and others
        raise InvalidMessage(f"the payload is not of this Avro schema: {error}") from error
    if source.tell() != len(payload):
        raise InvalidMessage(f"{len(payload) - source.tell()} bytes of the payload are not of this Avro schema")
    return plain


def _described(type_: SchemaType, definition: dict[str, Any]) -> SchemaInfo:
    """With the text that Pulsar's client makes."""
    return SchemaInfo(type=type_, data=json.dumps(definition, indent=True).encode(), name=type_.name)
