"""Schemas: how a value becomes a payload and back. Names of `pulsar.schema`.

`encode` raises InvalidMessage when the value does not fit, before anything is sent. What is registered with
a topic is not: brokers do not know schemas yet, so producer and consumer agree by themselves.
"""

from __future__ import annotations

import json
from typing import Any

from ..common.errors import InvalidMessage
from .fields import Text
from .record import Record

__all__ = ["AvroSchema", "BytesSchema", "JsonSchema", "Schema", "StringSchema"]


class Schema:
    """How a value becomes a payload and back. `encode` and `decode` raise InvalidMessage for what does not fit."""
    def __init__(self, record_class: type[Any], schema_name: str = "") -> None:
        self._record_class = record_class
        self._schema_name = schema_name

    def encode(self, value: Any) -> bytes:
        """The payload of a value."""
        raise NotImplementedError

    def decode(self, payload: bytes) -> Any:
        """The value of a payload."""
        raise NotImplementedError

    def _check(self, value: object) -> None:
        if not isinstance(value, self._record_class):
            raise InvalidMessage(
                f"{type(self).__name__} takes {self._record_class.__name__}, not {type(value).__name__}"
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


class JsonSchema(Schema):
    """A Record as compact JSON."""

    def __init__(self, record_cls: type[Record]) -> None:
        super().__init__(record_cls, "JSON")

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


class AvroSchema(Schema):
    """A Record, or a dict when only `schema_definition` is given, as Avro. Needs the extra `avro` (fastavro)."""

    def __init__(self, record_cls: type[Record] | None, schema_definition: dict[str, Any] | None = None) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise InvalidMessage("AvroSchema needs fastavro: pip install 'magnetar[avro]'") from error
        if record_cls is None and schema_definition is None:
            raise InvalidMessage("AvroSchema needs a Record class or a schema_definition")
        super().__init__(dict if record_cls is None else record_cls, "AVRO")
        self._is_record = record_cls is not None
        definition = schema_definition or (record_cls.schema() if record_cls is not None else {})
        self._avro: Any = fastavro
        self._schema = fastavro.parse_schema(definition)

    def encode(self, value: Any) -> bytes:
        import io

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
        import io

        try:
            plain = self._avro.schemaless_reader(io.BytesIO(payload), self._schema, None)
        except Exception as error:  # fastavro raises EOFError, ValueError, IndexError, UnicodeDecodeError and others
            raise InvalidMessage(f"the payload is not of this Avro schema: {error}") from error
        return self._record_class.from_plain(plain, Text.AVRO) if self._is_record else plain
