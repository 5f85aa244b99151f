"""Schemas: they encode the values of a program to payloads, and decode payloads to values. The classes have the names
of `pulsar.schema`. More schemas are in composite_schemas.py.

`encode` raises InvalidMessage if a value does not fit the schema, before anything is sent."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, ClassVar

from ...proto.schema import SchemaInfo, SchemaType
from ..common.checks import TEXT_CHECK, WrongMessageType, WrongValue, check_parameter, make_enum_check, shorten_value
from ..common.errors import ClientEnum, InvalidMessage
from .fields import CheckedSchema, FieldEncoding, add_reader_aliases
from .record import Record

if TYPE_CHECKING:
    from .message import Message

__all__ = ["AvroSchema", "BytesSchema", "JsonSchema", "Schema", "StringSchema"]


class SchemaTypeOfClient(ClientEnum):
    """The types of schemas, with the names and numbers of Pulsar's client. Types with a number below 0 are not
    registered with a topic.

    The numbers above 0 are those of `magnetar.proto.schema.SchemaType`.
    """

    AUTO_PUBLISH = -4
    AUTO_CONSUME = -3
    BYTES = -1
    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20


SchemaTypeOfClient.__name__ = SchemaTypeOfClient.__qualname__ = "SchemaType"


class SchemaDescription:
    """The description of a schema (type, name, definition) as Pulsar's client has it, where the class is called
    `SchemaInfo`."""

    def __init__(self, schema_type: SchemaTypeOfClient, name: str, schema: str) -> None:
        """Makes a description. `schema`: the text of its definition. Raises InvalidConfiguration if an argument has
        another type."""
        check_parameter("schema_type", make_enum_check(SchemaTypeOfClient), schema_type)
        check_parameter("name", TEXT_CHECK, name)
        check_parameter("schema", TEXT_CHECK, schema)
        self._type, self._name, self._schema = schema_type, name, schema

    @classmethod
    def from_info(cls, info: SchemaInfo | None) -> SchemaDescription:
        """Returns the description of the schema `info`; of plain bytes if `info` is None. A type that Pulsar's client
        does not know becomes NONE."""
        if info is None:
            return cls(SchemaTypeOfClient.BYTES, "BYTES", "null")
        kind = SchemaTypeOfClient.__members__.get(info.type.name, SchemaTypeOfClient.NONE)
        return cls(kind, info.name, info.data.decode() or "null")

    def schema_type(self) -> SchemaTypeOfClient:
        """Returns the type of the schema. The type BYTES means that no schema is registered with the topic."""
        return self._type

    def name(self) -> str:
        """Returns the name of the schema."""
        return self._name

    def schema(self) -> str:
        """Returns the text of the schema's definition; the text `null` if it has no definition."""
        return self._schema


class Schema:
    """Encodes values to payloads, and decodes payloads to values. `encode` and `decode` raise InvalidMessage for a
    value or payload that does not fit.

    Producers and consumers register the schema that `info` returns with the topic (None: plain bytes, no schema is
    registered). The broker compares it with the topic's other schemas (docs/schemas.md) and gives it a version, which
    each message contains. A program's own class overrides `encode` and `decode`."""

    by_writer: ClassVar[bool] = False  # it decodes with the schema with which a message was written
    needs_writer: ClassVar[bool] = False  # … and knows no other
    separated = False  # the key of its pair is the key of the message
    of_topic = False  # a producer learns it from the topic, by `known`
    _schema_name = ""
    _told: SchemaInfo | None = None
    _client: Any = None

    def __init__(
        self, record_cls: Any, schema_type: Any = SchemaType.NONE, schema_definition: Any = None, schema_name: str = ""
    ) -> None:
        """Makes a schema. `record_cls`: the type of its values. `schema_definition`: a value that JSON can represent,
        such as an Avro schema. If `schema_type` is a text, it is the name of a schema that is not registered with
        topics. Raises InvalidConfiguration if there is no such type, or JSON cannot represent the definition."""
        if isinstance(schema_type, str):
            schema_type, schema_name = SchemaType.NONE, schema_type
        self._record_cls = record_cls
        self._schema_name = schema_name
        try:
            number = int(schema_type)  # below 0: Pulsar's client has its own numbers for what a topic is not told
            if number > 0:
                self._told = _told(SchemaType(number), schema_definition, schema_name)
        except (TypeError, ValueError) as error:
            raise WrongValue(
                f"a schema of type {shorten_value(schema_type)} and this definition cannot be: {error}"
            ) from error

    def encode(self, obj: Any) -> bytes:
        """Encodes a value and returns the payload. Raises InvalidMessage if the value does not fit the schema."""
        raise NotImplementedError

    def decode(self, data: bytes) -> Any:
        """Decodes a payload and returns the value. Raises InvalidMessage if the payload does not fit the schema."""
        raise NotImplementedError

    def decode_message(self, msg: Message) -> Any:
        """Decodes a received message and returns its value. `Message.value` calls this. Asks the broker, and
        blocks, for the schema with which the message was written, if it is needed and not cached. Raises InvalidMessage
        if the payload does not fit, the topic lacks that schema, or it is not cached and the caller is in the event
        loop; AlreadyClosed if the event loop has ended; the broker's error if it does not answer."""
        if self.separated:
            key = None if msg.has_null_key() else msg.key_bytes()
            return self.decode_separated(key, None if msg.has_null_value() else msg.data())
        return self.decode_with_writer_schema(msg.data(), msg.writer()) if self.by_writer else self.decode(msg.data())

    def schema_info(self) -> SchemaDescription:
        """Returns `info()` in the form of Pulsar's client: the description of the schema that is registered with the
        topic."""
        return SchemaDescription.from_info(self.info())

    def attach_client(self, client: Any) -> None:
        """Stores the client in the schema. Exists because programs for Pulsar's client call it; Magnetar does not use
        the stored client."""
        self._client = client

    def info(self) -> SchemaInfo | None:
        """Returns the schema that producers and consumers register with the topic; None: plain bytes, for which no
        schema is registered."""
        return self._told

    def decode_with_writer_schema(self, payload: bytes, writer: SchemaInfo | None) -> Any:
        """Decodes a payload that was written with the schema `writer` and returns the value. `writer` None: the message
        does not name the schema with which it was written. Raises InvalidMessage if the payload does not fit. Called
        only for schemas with `by_writer`."""
        return self.decode(payload)

    def known(self, info: SchemaInfo | None) -> Schema:
        """Returns the schema that a producer must use in place of this one. A producer calls this when it is opened, if
        `of_topic` is set. `info`: the newest schema of the topic; None: the topic has none."""
        return self

    def encode_separated(self, value: Any) -> tuple[bytes | None, bytes | None]:
        """Encodes a (key, value) pair whose key is SEPARATED from the payload. Returns the encoded key, which becomes
        the key of the message, and the payload; either is None if its part of the pair is None. Raises InvalidMessage
        if the schema has no pairs, or `value` is not a pair that fits."""
        raise InvalidMessage(f"{type(self).__name__} has no pairs")

    def encode_key(self, value: Any) -> bytes | None:
        """Encodes the key of the (key, value) pair `value`, whose key is SEPARATED, and returns it; None if the key is
        None. Raises InvalidMessage as `encode_separated` does."""
        return self.encode_separated(value)[0]

    def decode_separated(self, key: bytes | None, payload: bytes | None) -> Any:
        """Decodes a (key, value) pair whose key is SEPARATED, and returns the pair. `key`: the key of the message;
        `payload`: the encoded value. None stays None. Raises InvalidMessage if the schema has no pairs, or a part does
        not fit."""
        raise InvalidMessage(f"{type(self).__name__} has no pairs")

    def _check(self, value: object) -> None:
        if not isinstance(value, self._record_cls):
            what = ": encode it, or use StringSchema" if self._record_cls is bytes and isinstance(value, str) else ""
            raise InvalidMessage(
                f"{type(self).__name__} takes {self._record_cls.__name__}, not {type(value).__name__}{what}"
            )

    def __str__(self) -> str:
        return self._schema_name or type(self).__name__


class BytesSchema(Schema):
    """The schema of payloads that are not encoded, which is the default. `encode` accepts `bytes`, `bytearray` and
    `memoryview`, and raises InvalidMessage for any other value."""
    def __init__(self) -> None:
        super().__init__(bytes, schema_name="BYTES")

    def encode(self, data: Any) -> bytes:
        if isinstance(data, bytearray | memoryview):
            return bytes(data)
        self._check(data)
        return bytes(data)

    def decode(self, data: bytes) -> bytes:
        """Returns the payload unchanged."""
        return data


class StringSchema(Schema):
    """The schema of text, which is encoded as UTF-8. `encode` raises InvalidMessage for a value that is no text,
    `decode` for a payload that is not UTF-8."""
    def __init__(self) -> None:
        super().__init__(str, SchemaType.STRING, None, "STRING")

    def encode(self, obj: Any) -> bytes:
        self._check(obj)
        return bytes(obj.encode())

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage("the payload is not UTF-8 text") from error


class JsonSchema(Schema):
    """The schema of a Record as compact JSON. `encode` raises InvalidMessage for a value of another class, a record
    without a required field, and what is not JSON: NaN, infinities, and text with half of a pair of surrogates.
    `decode` accepts NaN and infinities, because other clients send them. It raises InvalidMessage for a
    payload that is no JSON object or does not fit the fields of the Record."""

    def __init__(self, record_cls: type[Record]) -> None:
        super().__init__(_class_of_records(record_cls), SchemaType.JSON, record_cls.schema(), "JSON")

    def encode(self, obj: Any) -> bytes:
        self._check(obj)
        obj.check_fields()
        plain = obj.to_plain(FieldEncoding.JSON)
        try:
            return json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            why = "JSON has no NaN, no infinity and no half of a pair of surrogates"
            raise InvalidMessage(f"{why}: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"the payload is not JSON: {error}") from error
        if not isinstance(plain, dict):
            raise InvalidMessage(f"the payload is JSON, but a {type(plain).__name__} and not an object")
        return self._record_cls.from_plain(plain, FieldEncoding.JSON)


class AvroSchema(Schema):
    """The schema of a Record, or of a dict if only `schema_definition` is given, as Avro. Raises InvalidMessage if the
    package fastavro is not installed (`pip install 'magnetar[avro]'`), or neither argument is given.

    A message is decoded with the schema with which it was written, and converted to this one: fields that the message
    lacks get their defaults, and fields that this schema lacks are left out.
    """

    by_writer = True

    def __init__(self, record_cls: type[Record] | None, schema_definition: dict[str, Any] | None = None) -> None:
        self._avro = fastavro()
        if record_cls is None and schema_definition is None:
            raise InvalidMessage("AvroSchema needs a Record class or a schema_definition")
        self._definition = schema_definition if record_cls is None else _class_of_records(record_cls).schema()
        super().__init__(record_cls or dict, SchemaType.AVRO, self._definition, "AVRO")
        self._is_record = record_cls is not None
        self._schema = self._avro.parse_schema(self._definition)
        self._own = CheckedSchema(self._schema)
        own = b"" if self._told is None else self._told.data
        # … and what reads it; None: itself
        self._writers: dict[bytes, tuple[CheckedSchema, Any]] = {own: (self._own, None)}

    def encode(self, obj: Any) -> bytes:
        self._check(obj)
        out = io.BytesIO()
        plain = obj
        if self._is_record:
            obj.check_fields()
            plain = obj.to_plain(FieldEncoding.AVRO)
        try:
            self._avro.schemaless_writer(out, self._schema, plain)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidMessage(f"the value does not fit its Avro schema: {error}") from error
        return out.getvalue()

    def decode(self, data: bytes) -> Any:
        return self._decoded(data, self._own, None)

    def decode_with_writer_schema(self, payload: bytes, writer: SchemaInfo | None) -> Any:
        if writer is None:
            return self.decode(payload)
        known = self._writers.get(writer.data)
        if known is None:
            schema = parse_avro_schema(writer)
            reader = self._avro.parse_schema(add_reader_aliases(self._schema, schema))
            known = self._writers[writer.data] = CheckedSchema(schema), reader
        return self._decoded(payload, *known)

    def _decoded(self, payload: bytes, writer: CheckedSchema, reader: Any) -> Any:
        plain = decode_avro_payload(payload, writer, reader)
        return self._record_cls.from_plain(plain, FieldEncoding.AVRO) if self._is_record else plain


def _class_of_records(given: Any) -> type[Record]:
    if not (isinstance(given, type) and issubclass(given, Record)):
        raise WrongMessageType(f"a schema is made of a class of Record, not of {shorten_value(given)}")
    return given


def fastavro() -> Any:
    """Returns the module `fastavro`. Raises InvalidMessage if it is not installed."""
    try:
        import fastavro
    except ImportError as error:
        raise InvalidMessage("Avro needs fastavro: pip install 'magnetar[avro]'") from error
    return fastavro


def parse_avro_schema(writer: SchemaInfo) -> Any:
    """Parses the schema with which a message was written, and returns the schema as fastavro parses it. Raises
    InvalidMessage if `writer` is not of type AVRO, or not valid."""
    if writer.type is not SchemaType.AVRO:
        raise InvalidMessage(f"the message was written with a schema of type {writer.type.name}, not AVRO")
    try:
        return fastavro().parse_schema(json.loads(writer.data))
    except Exception as error:  # fastavro's own kinds
        raise InvalidMessage(f"the schema with which the message was written is no Avro: {error}") from error


def decode_avro_payload(payload: bytes, writer: CheckedSchema, reader: Any = None) -> Any:
    """Decodes an Avro payload and returns the value. `writer`: the schema with which the payload was written; `reader`:
    a parsed schema to which the value is converted (None: `writer`). Raises InvalidMessage if the payload does not fit,
    has additional bytes, or declares more items than it can contain."""
    writer.check(payload)
    source = io.BytesIO(payload)
    try:
        plain = fastavro().schemaless_reader(source, writer.schema, reader)
    except Exception as error:  # fastavro raises EOFError, ValueError, IndexError, UnicodeDecodeError and others
        raise InvalidMessage(f"the payload is not of this Avro schema: {error}") from error
    if source.tell() != len(payload):
        raise InvalidMessage(f"{len(payload) - source.tell()} bytes of the payload are not of this Avro schema")
    return plain


def _told(type_: SchemaType, definition: Any, name: str) -> SchemaInfo:
    """Returns the schema to register, with the text that Pulsar's client makes."""
    text = "" if definition is None else json.dumps(definition, indent=True, allow_nan=False)
    return SchemaInfo(type=type_, data=text.encode(), name=name or type_.name)
