"""The rules for a schema, by its type, and whether a new one is compatible with those of a topic (pure).

`SchemaDefinitionText.parse(info)` raises InvalidSchema if it is no schema: everything that is registered was checked by
it. Equal definitions have equal fingerprints: of AVRO, JSON and PROTOBUF the canonical form counts
(schema_avro_core.py), of others the bytes, and of KEY_VALUE also the encoding (in Pulsar that does not count).

`why_incompatible` is the rule for a producer's schema, `why_unreadable_by` that for a consumer's. Guarding tests:
tests/broker/cluster/test_definition.py.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from ...proto.errors import InvalidSchema
from ...proto.schema import AVRO_LIKE, DEFINITION_BYTES_MAX, Compatibility, SchemaInfo, SchemaType, split_key_value
from . import schema_avro_core as avro
from .schema_avro_core import AvroField, AvroType

# ------------------------------------------------------------------------------------------------- compatibility
# Whether one schema can read data that was written with another one (pure).
#
# `unreadable(reader, writer)` follows Avro's schema resolution; it returns the first field that cannot be read, and
# why. Names of enums and fixed match without their namespaces, or by an alias of the reader. **Names of records are not
# compared**, as Avro's Java library, and so Pulsar's check, does not either: a record reads the record in its place;
# aliases of its fields count if the full names are equal, or one is an alias. In a union the branch with the writer's
# full name decides, if there is one; else any branch that can read it. While a pair of types is being compared, it
# counts as readable (recursive records); if it turns out not to be, the pairs compared meanwhile are compared again.
# PAIRS_MAX bounds the work for schemas with many unions. Guarding tests: tests/broker/cluster/test_compatibility.py.


PAIRS_MAX = 100_000
"""Most pairs of types, fields and symbols that are compared."""

_PROMOTED = {
    "long": {"int"}, "float": {"int", "long"}, "double": {"int", "long", "float"},
    "string": {"bytes"}, "bytes": {"string"},
}  # fmt: skip
"""The types of a writer that a reader's type can read besides its own."""


def why_unreadable(reader: AvroType, writer: AvroType) -> str | None:
    """Returns why `reader` cannot read what was written with `writer`, or None if it can. Raises InvalidSchema if the
    schemas have too many types to compare."""
    try:
        return _Comparison().compare(reader, writer, "")
    except RecursionError:
        raise InvalidSchema("the types of the schemas are too deep in one another") from None


class _Comparison:
    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str | None] = {}
        self._compared = 0

    def compare(self, reader: AvroType, writer: AvroType, where: str) -> str | None:
        pair = (id(reader), id(writer))
        if pair in self._known:
            return self._known[pair]
        self._count(1)
        before = len(self._known)
        self._known[pair] = None  # while it is compared
        found = self._of(reader, writer, where)
        if found is not None:  # what was readable inside may have been so because this pair counted as readable
            while len(self._known) > before:
                self._known.popitem()
            self._known[pair] = found
        return found

    def _count(self, more: int) -> None:
        self._compared += more
        if self._compared > PAIRS_MAX:
            raise InvalidSchema(f"the schemas have over {PAIRS_MAX} pairs of types: use fewer branches in unions")

    def _of(self, reader: AvroType, writer: AvroType, where: str) -> str | None:
        if writer.kind == "union":
            return next((why for each in writer.branches if (why := self.compare(reader, each, where))), None)
        if reader.kind == "union":
            self._count(len(reader.branches))
            named = [each for each in reader.branches if each.kind == writer.kind and _is_of(each, writer)]
            if any(self.compare(each, writer, where) is None for each in named or reader.branches):
                return None
            return _at(where, f"no branch of the union reads {writer}")
        if reader.kind != writer.kind:
            if writer.kind in _PROMOTED.get(reader.kind, ()):
                return None
            return _at(where, f"{reader} does not read {writer}")
        if reader.logical and writer.logical and reader.logical != writer.logical:
            return _at(where, "the decimals have another precision or scale")
        if (
            reader.kind in ("enum", "fixed")
            and reader.name_without_namespace != writer.name_without_namespace
            and writer.name not in reader.aliases
        ):
            return _at(where, f"{reader} does not read {writer}: it has another name, and no alias for it")
        match reader.kind:
            case "record":
                return self._record(reader, writer, where)
            case "enum":
                self._count(len(reader.symbols) + len(writer.symbols))
                known = {*reader.symbols}
                missing = [each for each in writer.symbols if each not in known]
                if missing and reader.default is None:
                    return _at(where, f"{reader} lacks the symbol {missing[0]!r} and has no default")
            case "fixed":
                if reader.size != writer.size:
                    return _at(where, f"{reader} has {reader.size} bytes, not {writer.size}")
            case "array" | "map":
                assert reader.items is not None, "parsed"
                assert writer.items is not None, "parsed"
                return self.compare(reader.items, writer.items, f"{where}[]")
        return None

    def _record(self, reader: AvroType, writer: AvroType, where: str) -> str | None:
        self._count(len(reader.fields) + len(writer.fields))
        written = {each.name: each for each in writer.fields}
        is_of = _is_of(reader, writer)
        for field in reader.fields:
            inside = f"{where}.{field.name}" if where else field.name
            source = _source(field, written) if is_of else written.get(field.name)
            if source is None:
                if not field.has_default:
                    return _at(inside, "it has no default, and the writer's schema does not have it")
            elif why := self.compare(field.type, source.type, inside):
                return why
        return None


def _is_of(reader: AvroType, writer: AvroType) -> bool:
    return bool(writer.name) and (reader.name == writer.name or writer.name in reader.aliases)


def _source(field: AvroField, written: dict[str, AvroField]) -> AvroField | None:
    return next((written[each] for each in (field.name, *field.aliases) if each in written), None)


def _at(where: str, why: str) -> str:
    return f"field `{where}`: {why}" if where else why


# ---------------------------------------------------------------------------------------------------- definition


TEXT_MAX = 64 << 10
"""Most characters of a schema's name and properties: together with its definition they must fit into a metadata value.
"""
_NEVER = (SchemaType.NONE, SchemaType.AUTO_CONSUME)
_FULL = (Compatibility.FULL, Compatibility.FULL_TRANSITIVE)
_BACKWARD = (Compatibility.BACKWARD, Compatibility.BACKWARD_TRANSITIVE, *_FULL)
_FORWARD = (Compatibility.FORWARD, Compatibility.FORWARD_TRANSITIVE, *_FULL)


class _NativeJson(msgspec.Struct):
    """The definition of a PROTOBUF_NATIVE schema."""

    fileDescriptorSet: str  # base64
    rootMessageTypeName: str
    rootFileDescriptorName: str


class SchemaDefinitionText(NamedTuple):
    """A schema that was checked: its parsed form, and the fingerprint, which equal schemas share."""

    info: SchemaInfo
    fingerprint: bytes  # SHA-256
    node: avro.AvroType | None = None  # of AVRO, JSON, PROTOBUF; None: Jackson's form of JSON
    root: str = ""  # PROTOBUF_NATIVE: the full name of its message
    halves: tuple[SchemaDefinitionText | None, ...] = ()  # KEY_VALUE: key and value; None: bytes

    @classmethod
    def parse(cls, info: SchemaInfo) -> SchemaDefinitionText:
        """Checks and parses a schema. Raises InvalidSchema, whose text says what is wrong, and where."""
        if len(info.data) > DEFINITION_BYTES_MAX:
            raise InvalidSchema(f"a schema of {len(info.data)} bytes; it has {DEFINITION_BYTES_MAX} at most")
        if (size := len(info.name) + sum(len(key) + len(value) for key, value in info.properties.items())) > TEXT_MAX:
            raise InvalidSchema(f"a schema's name and properties have {size} characters; they have {TEXT_MAX} at most")
        if info.type in _NEVER:
            raise InvalidSchema(f"a schema of type {info.type.name} is not registered")
        if info.type in AVRO_LIKE:
            return cls._avro(info)
        if info.type is SchemaType.PROTOBUF_NATIVE:
            return cls(info, _hash(info, info.data), root=_root_of(info.data))
        if info.type is SchemaType.KEY_VALUE:
            return cls._pair(info)
        pythons = info.type is SchemaType.STRING and info.data == b"null"
        if info.data and info.type is not SchemaType.EXTERNAL and not pythons:
            raise InvalidSchema(f"a schema of type {info.type.name} has no definition, and this one has one")
        return cls(info, _hash(info, b"" if info.type is SchemaType.STRING else info.data))

    @classmethod
    def _avro(cls, info: SchemaInfo) -> SchemaDefinitionText:
        loaded = avro.parse_json(info.data)
        if info.type is SchemaType.JSON and isinstance(loaded, dict) and loaded.get("type") == "object":
            return cls(info, _hash(info, avro.encode_sorted_json(loaded)))  # an old client's
        node = avro.parse_avro(loaded)
        if node.kind == "union":
            raise InvalidSchema("the schema is a union: a topic's schema is one type, best a record")
        return cls(info, _hash(info, avro.encode_canonical(loaded)), node)

    @classmethod
    def _pair(cls, info: SchemaInfo) -> SchemaDefinitionText:
        halves = tuple(_half(each, info.type) for each in split_key_value(info))
        told = b"".join(each.fingerprint if each is not None else b"-" for each in halves)
        return cls(info, _hash(info, told + _encoding(info).encode()), halves=halves)


def _half(info: SchemaInfo, whole: SchemaType) -> SchemaDefinitionText | None:
    if info.type is whole:
        raise InvalidSchema("a half of KEY_VALUE is a KEY_VALUE")
    if not info.type and info.data:
        raise InvalidSchema(
            "a half of KEY_VALUE has a definition and no type (properties key.schema.type and value.schema.type)"
        )
    return SchemaDefinitionText.parse(info) if info.type else None


def _encoding(info: SchemaInfo) -> str:
    return info.properties.get("kv.encoding.type", "INLINE")


def _hash(info: SchemaInfo, told: bytes) -> bytes:
    return hashlib.sha256(info.type.name.encode() + b"\0" + told).digest()


def _root_of(data: bytes) -> str:
    """Returns the full name of the root message of a PROTOBUF_NATIVE schema. Raises InvalidSchema if the set of
    descriptors lacks it, or a file that is imported."""
    try:
        text = msgspec.json.decode(data, type=_NativeJson)
        files = FileDescriptorSet.FromString(base64.b64decode(text.fileDescriptorSet, validate=True)).file
    except (ValueError, DecodeError, RecursionError) as error:
        raise InvalidSchema(f"PROTOBUF_NATIVE: the text is no set of descriptors: {error}") from None
    by_name = {each.name: each for each in files}
    if text.rootFileDescriptorName not in by_name:
        raise InvalidSchema(f"PROTOBUF_NATIVE: the set has no file {text.rootFileDescriptorName!r:.200}")
    for each in files:
        missing = [name for name in each.dependency if name not in by_name]
        if missing:
            raise InvalidSchema(f"PROTOBUF_NATIVE: {each.name!r:.200} imports {missing[0]!r:.200}, which is missing")
    package = by_name[text.rootFileDescriptorName].package
    if not _has_message(by_name[text.rootFileDescriptorName].message_type, text.rootMessageTypeName, package):
        raise InvalidSchema(f"PROTOBUF_NATIVE: there is no message {text.rootMessageTypeName!r:.200} in its file")
    return text.rootMessageTypeName


def _has_message(messages: Sequence[DescriptorProto], name: str, package: str) -> bool:
    if package and not name.startswith(package + "."):
        return False
    here: Sequence[DescriptorProto] = messages
    for part in (name[len(package) + 1 :] if package else name).split("."):
        found = next((each for each in here if each.name == part), None)
        if found is None:
            return False
        here = found.nested_type
    return True


# ------------------------------------------------------------------ together
def why_incompatible(
    mode: Compatibility, new: SchemaDefinitionText, live: Sequence[tuple[int, SchemaDefinitionText]]
) -> str | None:
    """Returns why `new` may not be added to the schemas `live` of a topic (version, definition; the newest last), or
    None if it may. Raises InvalidSchema if the schemas have too many types to compare."""
    if not live or mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    if mode is Compatibility.ALWAYS_INCOMPATIBLE:
        return f"{_title(mode)}: the topic has a schema, and takes no other"
    for version, old in live if mode.transitive else live[-1:]:
        if why := _against(mode, new, old):
            return f"{_title(mode)} against version {version}: {why}"
    return None


def why_unreadable_by(
    mode: Compatibility, reader: SchemaDefinitionText, live: Sequence[tuple[int, SchemaDefinitionText]]
) -> str | None:
    """Returns why a consumer's schema `reader`, which need not be registered for the topic, cannot read the messages of
    a topic with the schemas `live`; None if it can."""
    if mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    for version, old in live if mode.transitive else live[-1:]:
        if old.fingerprint != reader.fingerprint and (why := _against(Compatibility.BACKWARD, reader, old)):
            return f"it cannot read version {version}: {why}"
    return None


def _against(mode: Compatibility, new: SchemaDefinitionText, old: SchemaDefinitionText) -> str | None:
    if new.info.type is not old.info.type:
        return f"the type is {new.info.type.name}, and not {old.info.type.name}"
    if new.info.type is SchemaType.KEY_VALUE:
        return _pairs_against(mode, new, old)
    if new.root != old.root:
        return f"the message is {new.root}, and not {old.root}"
    if new.node is None or old.node is None:
        return None
    if mode in _BACKWARD and (why := why_unreadable(new.node, old.node)):
        return f"the new schema cannot read what the old one wrote: {why}"
    if mode in _FORWARD and (why := why_unreadable(old.node, new.node)):
        return f"the old schema cannot read what the new one writes: {why}"
    return None


def _pairs_against(mode: Compatibility, new: SchemaDefinitionText, old: SchemaDefinitionText) -> str | None:
    if _encoding(new.info) != _encoding(old.info):
        return f"the pair is encoded {_encoding(new.info)}, and not {_encoding(old.info)}"
    for half, one, other in zip(("key", "value"), new.halves, old.halves, strict=True):
        if (one is None) != (other is None):
            return f"the {half} is bytes on one side alone"
        if one is not None and other is not None and (why := _against(mode, one, other)):
            return f"the {half}: {why}"
    return None


def _title(mode: Compatibility) -> str:
    return mode.value.upper()
