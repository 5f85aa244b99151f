"""Schemas as they are registered: types, definitions, versions, and the modes of compatibility.

The numbers of `SchemaType` are those of Pulsar's wire; its names are those of pulsar-admin. A definition (`data`) is
text of JSON for JSON, AVRO, PROTOBUF (an Avro record) and PROTOBUF_NATIVE (a set of descriptors), two definitions for
KEY_VALUE (`split_key_value`), and empty for all others. The rules for definitions that are accepted are in
broker/cluster/schema_core.py.

A version is a number from 0 on; on the wire and in an entry it is 8 bytes, big-endian, as Pulsar's.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from .errors import InvalidSchema

DEFINITION_BYTES_MAX = 512 << 10
NONE_LENGTH = 0xFFFFFFFF
"""The length that stands for a missing definition of the key or the value in a KEY_VALUE schema."""
_U32 = struct.Struct(">I")
_VERSION = struct.Struct(">Q")


class SchemaType(IntEnum):
    """The type of a schema, with Pulsar's numbers. NONE: the payload is plain bytes."""

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
    AUTO_CONSUME = 21
    EXTERNAL = 22


AVRO_DEFINED_TYPES = (SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF)
"""The schema types whose definition is an Avro schema."""


class Compatibility(StrEnum):
    """The rule by which a new schema of a topic must be compatible with the registered ones, as Pulsar's strategies."""

    ALWAYS_INCOMPATIBLE = "always_incompatible"
    ALWAYS_COMPATIBLE = "always_compatible"
    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def transitive(self) -> bool:
        """Returns whether a new schema must be compatible with all versions, not only with the newest one."""
        return self.value.endswith("_transitive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaInfo:
    """A schema: its type, its definition in the format of that type, its name, and its properties (free text)."""

    type: SchemaType
    data: bytes = b""
    name: str = ""
    properties: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """A version of a topic's schema in the registry. `created_ms`: when it was registered, in ms since the epoch."""

    version: int
    info: SchemaInfo
    created_ms: int
    user: str = ""  # the role that registered it
    deleted: bool = False  # it decodes what was written with it, and counts for nothing else


class KeyValuePair(NamedTuple):
    """The schema of the key and the schema of the value of a KEY_VALUE schema."""

    key: SchemaInfo
    value: SchemaInfo


def parse_schema_type(text: str) -> SchemaType:
    """Returns the schema type with this name, in upper or lower case; BYTES is NONE. Raises InvalidSchema if there is
    no such type."""
    name = text.upper()
    if name == "BYTES":
        return SchemaType.NONE
    try:
        return SchemaType[name]
    except KeyError:
        known = ", ".join(SchemaType.__members__)
        raise InvalidSchema(f"there is no schema type {text!r:.50}; there are {known}") from None


BYTES_VERSION = b"\xff" * 8
"""The version that stands for no schema. Go's client sends a version with every message that it writes with a schema,
also of bytes, and asks for this version when it reads."""


def encode_version(version: int | None) -> bytes:
    """Encodes the version of a schema as 8 bytes; None (no version) as empty bytes."""
    return b"" if version is None else _VERSION.pack(version)


def decode_version(data: bytes) -> int | None:
    """Decodes the version of a schema from the first 8 bytes of `data`, of which Pulsar before 2.4 wrote 64. Returns
    None if there are fewer than 8."""
    return _VERSION.unpack_from(data)[0] if len(data) >= _VERSION.size else None


# ------------------------------------------------------------------ KEY_VALUE
def split_key_value(info: SchemaInfo) -> KeyValuePair:
    """Returns the schema of the key and the schema of the value that the KEY_VALUE schema `info` contains. Raises
    InvalidSchema if its definition or its properties are malformed."""
    key, at = _half(info.data, 0)
    value, end = _half(info.data, at)
    if end != len(info.data):
        raise InvalidSchema(f"{len(info.data) - end} bytes follow the two definitions of KEY_VALUE")
    return KeyValuePair(*(
        SchemaInfo(
            type=parse_schema_type(info.properties.get(f"{half}.schema.type", "BYTES")), data=data,
            name=info.properties.get(f"{half}.schema.name", ""), properties=_properties(info, half),
        )
        for half, data in (("key", key), ("value", value))
    ))  # fmt: skip


def _half(data: bytes, at: int) -> tuple[bytes, int]:
    if len(data) - at < 4:
        raise InvalidSchema("a definition of KEY_VALUE ends before a length")
    size = _U32.unpack_from(data, at)[0]
    size, at = 0 if size == NONE_LENGTH else size, at + 4
    if size > len(data) - at:
        raise InvalidSchema(f"a half of KEY_VALUE has {size} bytes, and {len(data) - at} are there")
    return data[at : at + size], at + size


def _properties(info: SchemaInfo, half: str) -> dict[str, str]:
    try:
        found = json.loads(info.properties.get(f"{half}.schema.properties") or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"{half}.schema.properties is no JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise InvalidSchema(f"{half}.schema.properties is no object of texts")
    return found


def join_key_value(key: SchemaInfo, value: SchemaInfo, *, separated: bool = False) -> SchemaInfo:
    """Returns the KEY_VALUE schema of the schemas `key` and `value`. `separated`: the key is stored as the message's
    key; otherwise it is a part of the payload."""
    properties = {"kv.encoding.type": "SEPARATED" if separated else "INLINE"}
    for half, info in (("key", key), ("value", value)):
        properties[f"{half}.schema.name"] = info.name
        properties[f"{half}.schema.type"] = info.type.name if info.type else "BYTES"
        properties[f"{half}.schema.properties"] = json.dumps(info.properties, separators=(",", ":"))
    data = b"".join(_U32.pack(len(each.data) or NONE_LENGTH) + each.data for each in (key, value))
    return SchemaInfo(type=SchemaType.KEY_VALUE, data=data, name="KeyValue", properties=properties)


# ------------------------------------------------------------------ as operators write it
def format_schema_definition(info: SchemaInfo) -> str:
    """Returns the definition of a schema as text. That of a KEY_VALUE schema is JSON with `key` and `value`, as in
    pulsar-admin. Raises InvalidSchema if a KEY_VALUE schema is malformed."""
    if info.type is not SchemaType.KEY_VALUE:
        return info.data.decode(errors="replace")
    halves = {half: _told(each.data) for half, each in zip(("key", "value"), split_key_value(info), strict=True)}
    return json.dumps(halves)


def _told(data: bytes) -> object:
    try:
        return json.loads(data) if data else ""
    except (ValueError, RecursionError):
        return data.decode(errors="replace")


def make_schema_info(type_: str, text: str, properties: dict[str, str], name: str = "") -> SchemaInfo:
    """Makes a schema from the parts that operators write: {"type": …, "schema": text, "properties": …}. `text` has the
    form that `format_schema_definition` returns. Raises InvalidSchema if there is no such type, or if the text of a
    KEY_VALUE schema is malformed; other definitions are not checked."""
    kind, data = parse_schema_type(type_), text.encode()
    if kind is SchemaType.KEY_VALUE:
        try:
            halves = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidSchema(f"the text of KEY_VALUE is no JSON with 'key' and 'value': {error}") from None
        if not isinstance(halves, dict) or set(halves) != {"key", "value"}:
            raise InvalidSchema("the text of KEY_VALUE is an object with 'key' and 'value', and nothing else")
        parts = [b"" if halves[half] == "" else json.dumps(halves[half]).encode() for half in ("key", "value")]
        data = b"".join(_U32.pack(len(each) or NONE_LENGTH) + each for each in parts)
    return SchemaInfo(type=kind, data=data, name=name, properties=properties)
