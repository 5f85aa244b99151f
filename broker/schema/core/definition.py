"""The rules for a schema, by its type, and whether a new one goes with those of a topic (pure).

`Definition.of(info)` refuses what is no schema (InvalidSchema): everything that is registered went through it. Equal
definitions have equal fingerprints: of AVRO, JSON and PROTOBUF the parsed form counts (avro.py), of others the bytes,
and of KEY_VALUE how it is encoded as well (in Pulsar it does not count there).

`refusal` is the rule of a producer's schema, `unreadable_by` that of a consumer's. Guarding tests:
tests/broker/schema/test_definition.py.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from ....proto.errors import InvalidSchema
from ....proto.schema import AVRO_LIKE, DEFINITION_BYTES_MAX, Compatibility, SchemaInfo, SchemaType, pair_of
from . import avro
from .compatibility import unreadable

TEXT_MAX = 64 << 10
"""Characters of a schema's name and properties: with its definition they fit a value of the metadata."""
_NEVER = (SchemaType.NONE, SchemaType.AUTO_CONSUME)
_FULL = (Compatibility.FULL, Compatibility.FULL_TRANSITIVE)
_BACKWARD = (Compatibility.BACKWARD, Compatibility.BACKWARD_TRANSITIVE, *_FULL)
_FORWARD = (Compatibility.FORWARD, Compatibility.FORWARD_TRANSITIVE, *_FULL)


class _NativeJson(msgspec.Struct):
    """The text of PROTOBUF_NATIVE."""

    fileDescriptorSet: str  # base64
    rootMessageTypeName: str
    rootFileDescriptorName: str


class Definition(NamedTuple):
    """A schema that was checked: its parsed form, and the fingerprint that equal ones share."""

    info: SchemaInfo
    fingerprint: bytes  # SHA-256
    node: avro.Node | None = None  # of AVRO, JSON, PROTOBUF; None: Jackson's form of JSON
    root: str = ""  # PROTOBUF_NATIVE: the full name of its message
    halves: tuple[Definition | None, ...] = ()  # KEY_VALUE: key and value; None: bytes

    @classmethod
    def of(cls, info: SchemaInfo) -> Definition:
        """Checks a schema. InvalidSchema: what is wrong, and where."""
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
    def _avro(cls, info: SchemaInfo) -> Definition:
        loaded = avro.load(info.data)
        if info.type is SchemaType.JSON and isinstance(loaded, dict) and loaded.get("type") == "object":
            return cls(info, _hash(info, avro.sorted_json(loaded)))  # an old client's
        node = avro.parse(loaded)
        if node.kind == "union":
            raise InvalidSchema("the schema is a union: a topic's schema is one type, best a record")
        return cls(info, _hash(info, avro.canonical(loaded)), node)

    @classmethod
    def _pair(cls, info: SchemaInfo) -> Definition:
        halves = tuple(_half(each, info.type) for each in pair_of(info))
        told = b"".join(each.fingerprint if each is not None else b"-" for each in halves)
        return cls(info, _hash(info, told + _encoding(info).encode()), halves=halves)


def _half(info: SchemaInfo, whole: SchemaType) -> Definition | None:
    if info.type is whole:
        raise InvalidSchema("a half of KEY_VALUE is a KEY_VALUE")
    if not info.type and info.data:
        raise InvalidSchema(
            "a half of KEY_VALUE has a definition and no type (properties key.schema.type and value.schema.type)"
        )
    return Definition.of(info) if info.type else None


def _encoding(info: SchemaInfo) -> str:
    return info.properties.get("kv.encoding.type", "INLINE")


def _hash(info: SchemaInfo, told: bytes) -> bytes:
    return hashlib.sha256(info.type.name.encode() + b"\0" + told).digest()


def _root_of(data: bytes) -> str:
    """Returns the name of the root message, checked: the set of descriptors has it, and all that its files import."""
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
def refusal(mode: Compatibility, new: Definition, live: Sequence[tuple[int, Definition]]) -> str | None:
    """Returns why `new` may not join those of a topic (version, definition; the newest last); None: it may.
    InvalidSchema: the two have too many types to compare.

    InvalidSchema: the two have too many types to compare.
    """
    if not live or mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    if mode is Compatibility.ALWAYS_INCOMPATIBLE:
        return f"{_title(mode)}: the topic has a schema, and takes no other"
    for version, old in live if mode.transitive else live[-1:]:
        if why := _against(mode, new, old):
            return f"{_title(mode)} against version {version}: {why}"
    return None


def unreadable_by(mode: Compatibility, reader: Definition, live: Sequence[tuple[int, Definition]]) -> str | None:
    """Returns why a consumer's schema cannot read what a topic has; None: it can. It need not be one of the topic's."""
    if mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    for version, old in live if mode.transitive else live[-1:]:
        if old.fingerprint != reader.fingerprint and (why := _against(Compatibility.BACKWARD, reader, old)):
            return f"it cannot read version {version}: {why}"
    return None


def _against(mode: Compatibility, new: Definition, old: Definition) -> str | None:
    if new.info.type is not old.info.type:
        return f"the type is {new.info.type.name}, and not {old.info.type.name}"
    if new.info.type is SchemaType.KEY_VALUE:
        return _pairs_against(mode, new, old)
    if new.root != old.root:
        return f"the message is {new.root}, and not {old.root}"
    if new.node is None or old.node is None:
        return None
    if mode in _BACKWARD and (why := unreadable(new.node, old.node)):
        return f"the new schema cannot read what the old one wrote: {why}"
    if mode in _FORWARD and (why := unreadable(old.node, new.node)):
        return f"the old schema cannot read what the new one writes: {why}"
    return None


def _pairs_against(mode: Compatibility, new: Definition, old: Definition) -> str | None:
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
