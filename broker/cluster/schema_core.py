"""Checks schemas of topics, and decides whether a new one is compatible with those of a topic. This module reads and
writes no data.

`CheckedSchemaDefinition.parse(info)` checks every schema before it is registered, and raises InvalidSchema if it is not
valid. Equal definitions have equal fingerprints. For AVRO, JSON and PROTOBUF, definitions are equal if their canonical
forms are; for other types, if their bytes are; for KEY_VALUE the encoding must be equal, too (not so in Pulsar).

`why_incompatible` is the rule for a producer's schema, `why_consumer_cannot_read` that for a consumer's. Guarding
tests: tests/broker/cluster/test_definition.py.

`parse_avro_types` checks an Avro definition and returns its types as a graph, in which a name that is used again is the
same node: a recursive record contains itself. Definitions come from clients, so their size is bounded:
DEFINITION_BYTES_MAX, SCHEMA_DEPTH_MAX, SCHEMA_FIELDS_MAX.

`encode_canonical_schema` returns the form that Pulsar compares. White space, the order of members, `doc` and aliases do
not count; the order of fields, defaults and other properties do; all names are full.

Also in this file, below its heading: whether one schema can read data that was written with another one
(compatibility).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from ...proto.errors import InvalidSchema
from ...proto.schema import (
    AVRO_DEFINED_TYPES,
    DEFINITION_BYTES_MAX,
    Compatibility,
    SchemaInfo,
    SchemaType,
    split_key_value,
)

SCHEMA_DEPTH_MAX = 64
SCHEMA_FIELDS_MAX = 10_000
"""Most fields, branches, symbols and aliases of a definition together."""
FULL_NAME_CHARACTERS_MAX = 512
"""Most characters of a full name: the canonical form repeats the namespace in each name."""

AVRO_PRIMITIVE_TYPES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
AVRO_NAMED_TYPES = ("record", "error", "enum", "fixed")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_UNTOLD = ("doc", "aliases", "namespace")
"""Members that `encode_canonical_schema` leaves out; the namespace is part of the full names."""


class AvroType:
    """A type of a parsed Avro definition. `kind`: the name of a primitive type, "record", "enum", "fixed", "array",
    "map" or "union"; `name`: its full name, "" if it has none. The other fields apply to some kinds only."""

    __slots__ = ("aliases", "branches", "default", "fields", "items", "kind", "logical", "name", "size", "symbols")

    def __init__(self, kind: str, name: str = "", aliases: frozenset[str] = frozenset()) -> None:
        self.kind = kind
        self.name = name  # full
        self.aliases = aliases  # full
        self.fields: list[AvroField] = []  # of a record, in their order
        self.branches: list[AvroType] = []  # of a union
        self.items: AvroType | None = None  # of an array or a map
        self.symbols: tuple[str, ...] = ()
        self.default: str | None = None  # of an enum
        self.size = 0  # of a fixed
        self.logical: tuple[object, ...] = ()  # of a decimal: its precision and scale

    @property
    def name_without_namespace(self) -> str:
        """Returns the name of the type without its namespace."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


class AvroField:
    """A field of a record type in a parsed Avro definition. `has_default`: True if a reader can do without the
    field."""

    __slots__ = ("aliases", "has_default", "name", "type")

    def __init__(self, name: str, type_: AvroType, has_default: bool, aliases: tuple[str, ...]) -> None:
        self.name, self.type, self.has_default, self.aliases = name, type_, has_default, aliases


def parse_json(text: bytes) -> Any:
    """Returns the value that a JSON text of a schema definition contains. Raises InvalidSchema if the text has more
    than DEFINITION_BYTES_MAX bytes or is not JSON."""
    if len(text) > DEFINITION_BYTES_MAX:
        raise InvalidSchema(f"a schema of {len(text)} bytes; it has {DEFINITION_BYTES_MAX} at most")
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"the schema is no JSON: {error}") from None


def parse_avro_types(loaded: Any) -> AvroType:
    """Returns the type that an Avro definition describes, with the types that it contains. `loaded`: the parsed JSON of
    the definition. Raises InvalidSchema, whose text names the invalid part."""
    return _Parser().type(loaded, "", "the schema", 0)


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._left = SCHEMA_FIELDS_MAX

    def type(self, of: Any, namespace: str, where: str, depth: int) -> AvroType:
        if depth > SCHEMA_DEPTH_MAX:
            raise InvalidSchema(f"{where}: the schema is deeper than {SCHEMA_DEPTH_MAX} types")
        if isinstance(of, str):
            return self._by_name(of, namespace, where)
        if isinstance(of, list):
            return self._union(of, namespace, where, depth)
        if not isinstance(of, dict):
            raise InvalidSchema(f"{where}: a type is a name, an object or a list, not {of!r:.50}")
        kind = of.get("type")
        if isinstance(kind, (dict, list)):
            return self.type(kind, namespace, where, depth + 1)
        if kind in AVRO_NAMED_TYPES:
            return self._new(of, "record" if kind == "error" else kind, namespace, where, depth)
        if kind in ("array", "map"):
            node = AvroType(kind)
            member = "items" if kind == "array" else "values"
            if member not in of:
                raise InvalidSchema(f"{where}: {kind} has no {member!r}")
            node.items = self.type(of[member], namespace, f"{where}[]", depth + 1)
            return node
        if not isinstance(kind, str):
            raise InvalidSchema(f"{where}: an object has no 'type'")
        node = self._by_name(kind, namespace, where)
        return _logical(of, node)

    def _by_name(self, name: str, namespace: str, where: str) -> AvroType:
        if name in AVRO_PRIMITIVE_TYPES:
            return AvroType(name)
        found = self._named.get(_full(name, namespace)) or self._named.get(name)
        if found is None:
            raise InvalidSchema(f"{where}: there is no type {name!r:.100} (types are named after their definition)")
        return found

    def _union(self, of: list[Any], namespace: str, where: str, depth: int) -> AvroType:
        node, kinds = AvroType("union"), set()
        self._count(len(of), where)
        for number, each in enumerate(of):
            branch = self.type(each, namespace, f"{where}|{number}", depth + 1)
            if branch.kind == "union":
                raise InvalidSchema(f"{where}: a union is directly in a union")
            if str(branch) in kinds:
                raise InvalidSchema(f"{where}: a union has {branch} twice")
            kinds.add(str(branch))
            node.branches.append(branch)
        return node

    def _new(self, of: dict[str, Any], kind: str, namespace: str, where: str, depth: int) -> AvroType:
        space = of.get("namespace", namespace)
        name = _name_in(of, where)
        if not isinstance(space, str) or (space and not _NAME.fullmatch(space)):
            raise InvalidSchema(f"{where}: the namespace {space!r:.100} is no name")
        full = _full(name, space)
        if len(full) > FULL_NAME_CHARACTERS_MAX:
            raise InvalidSchema(
                f"{where}: a full name of {len(full)} characters; it has {FULL_NAME_CHARACTERS_MAX} at most"
            )
        if full in AVRO_PRIMITIVE_TYPES:
            raise InvalidSchema(f"{where}: {full!r} is Avro's own type, and names no other")
        if full in self._named:
            raise InvalidSchema(f"{where}: the type {full!r} is defined twice")
        inner = full.rpartition(".")[0]
        aliases = frozenset(_full(each, inner) for each in self._aliases(of, where))
        node = self._named[full] = AvroType(kind, full, aliases)
        if kind == "record":
            self._fields(of, node, inner, where, depth)
        elif kind == "enum":
            self._symbols(of, node, where)
        else:
            size = of.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 31:
                raise InvalidSchema(f"{where}: the size {size!r:.50} of a fixed is no number of bytes")
            node.size = size
        return _logical(of, node)

    def _fields(self, of: dict[str, Any], node: AvroType, namespace: str, where: str, depth: int) -> None:
        fields, names = of.get("fields"), set[str]()
        if not isinstance(fields, list):
            raise InvalidSchema(f"{where}: a record has a list of 'fields'")
        self._count(len(fields), where)
        for each in fields:
            if not isinstance(each, dict) or "type" not in each:
                raise InvalidSchema(f"{where}: a field is an object with 'name' and 'type'")
            name = _name_in(each, where)
            if name in names or "." in name:
                raise InvalidSchema(f"{where}: the field {name!r:.100} is there twice, or its name has a dot")
            names.add(name)
            type_ = self.type(each["type"], namespace, f"{where}.{name}", depth + 1)
            node.fields.append(AvroField(name, type_, "default" in each, self._aliases(each, where)))

    def _symbols(self, of: dict[str, Any], node: AvroType, where: str) -> None:
        symbols, default = of.get("symbols"), of.get("default")
        if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
            raise InvalidSchema(f"{where}: an enum has a list of 'symbols', which are names")
        self._count(len(symbols), where)
        if len({*symbols}) < len(symbols) or not all(map(_NAME.fullmatch, symbols)):
            raise InvalidSchema(f"{where}: a symbol of an enum is there twice, or is no name")
        if default is not None and default not in symbols:
            raise InvalidSchema(f"{where}: the default {default!r:.50} of an enum is none of its symbols")
        node.symbols, node.default = tuple(symbols), default

    def _aliases(self, of: dict[str, Any], where: str) -> tuple[str, ...]:
        aliases = of.get("aliases") or []
        if not isinstance(aliases, list) or not all(
            isinstance(each, str) and len(each) <= FULL_NAME_CHARACTERS_MAX for each in aliases
        ):
            raise InvalidSchema(f"{where}: aliases are a list of names")
        self._count(len(aliases), where)
        return tuple(aliases)

    def _count(self, more: int, where: str) -> None:
        self._left -= more
        if self._left < 0:
            raise InvalidSchema(
                f"{where}: the schema has over {SCHEMA_FIELDS_MAX} fields, branches, symbols and aliases"
            )


def _logical(of: dict[str, Any], node: AvroType) -> AvroType:
    """Returns the node with its logical type, if that matters for compatibility: a decimal's precision and scale."""
    if of.get("logicalType") != "decimal":
        return node
    if node.kind == "bytes":
        node = AvroType("bytes")
    node.logical = (of.get("precision"), of.get("scale", 0))
    return node


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _name_in(of: dict[str, Any], where: str) -> str:
    name = of.get("name")
    if not isinstance(name, str) or len(name) > FULL_NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise InvalidSchema(
            f"{where}: {name!r:.100} is no name: letters, digits and _, parts with dots between, "
            f"{FULL_NAME_CHARACTERS_MAX} characters"
        )
    return name


# ------------------------------------------------------------------ the canonical form
def encode_canonical_schema(loaded: Any) -> bytes:
    """Returns the canonical form of an Avro definition, which is the same for equal schemas. `loaded`: the parsed JSON
    of a definition that `parse_avro_types` has accepted. Raises InvalidSchema if the definition is nested too deep."""
    return encode_sorted_json(_canonical(loaded, ""))


def encode_sorted_json(loaded: Any) -> bytes:
    """Returns a value as JSON with sorted keys. Raises InvalidSchema if the value is nested too deep."""
    try:
        return msgspec.json.encode(loaded, order="deterministic")
    except RecursionError:
        raise InvalidSchema("a value in the schema is too deep") from None


def _canonical(of: Any, namespace: str) -> Any:
    """Returns the canonical form of a type."""
    if isinstance(of, str):
        return of if of in AVRO_PRIMITIVE_TYPES else _full(of, namespace)
    if isinstance(of, list):
        return [_canonical(each, namespace) for each in of]
    kind = of["type"]
    rest = {name: value for name, value in of.items() if name not in _UNTOLD}
    if kind in AVRO_NAMED_TYPES:
        rest["name"] = _full(of["name"], of.get("namespace", namespace))
        namespace = rest["name"].rpartition(".")[0]
        if kind in ("record", "error"):
            rest["fields"] = [_canonical_field(each, namespace) for each in of["fields"]]
        return rest
    for member in ("items", "values"):
        if member in rest and kind in ("array", "map"):
            rest[member] = _canonical(rest[member], namespace)
    if kind not in ("array", "map"):
        rest["type"] = _canonical(kind, namespace)
        if len(rest) == 1:  # {"type": "int"} is "int"
            return rest["type"]
    return rest


def _canonical_field(of: dict[str, Any], namespace: str) -> dict[str, Any]:
    rest = {name: value for name, value in of.items() if name not in _UNTOLD}
    rest["type"] = _canonical(rest["type"], namespace)
    return rest


# ------------------------------------------------------------------------------------------------- compatibility
# Whether one schema can read data that was written with another one (pure).
#
# `unreadable(reader, writer)` follows Avro's schema resolution; it returns the first field that cannot be read, and
# why. Names of enums and fixed match without their namespaces, or by an alias of the reader. **Names of records are not
# compared**, as Avro's Java library, and so Pulsar's check, does not either: a record reads the record in its place;
# aliases of its fields count if the full names are equal, or one is an alias. In a union the branch with the writer's
# full name decides, if there is one; else any branch that can read it. While a pair of types is being compared, it
# counts as readable (recursive records); if it turns out not to be, the pairs compared meanwhile are compared again.
# COMPARED_PAIRS_MAX bounds the work for schemas with many unions. Guarding tests:
# tests/broker/cluster/test_compatibility.py.


COMPARED_PAIRS_MAX = 100_000
"""Most pairs of types, fields and symbols that are compared."""

_PROMOTED = {
    "long": {"int"}, "float": {"int", "long"}, "double": {"int", "long", "float"},
    "string": {"bytes"}, "bytes": {"string"},
}  # fmt: skip
"""The types of a writer that a reader's type can read besides its own."""


def why_unreadable(reader: AvroType, writer: AvroType) -> str | None:
    """Returns the reason why a consumer with the schema `reader` cannot read data that was written with the schema
    `writer`; None if it can. Raises InvalidSchema if the schemas have too many types to compare, or types nested too
    deep."""
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
        if self._compared > COMPARED_PAIRS_MAX:
            raise InvalidSchema(
                f"the schemas have over {COMPARED_PAIRS_MAX} pairs of types: use fewer branches in unions"
            )

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


NAME_AND_PROPERTIES_MAX = 64 << 10
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


class CheckedSchemaDefinition(NamedTuple):
    """A schema definition that was checked: its parsed form, and its fingerprint. Equal schemas have equal
    fingerprints."""

    info: SchemaInfo
    fingerprint: bytes  # SHA-256
    node: AvroType | None = None  # of AVRO, JSON, PROTOBUF; None: Jackson's form of JSON
    root: str = ""  # PROTOBUF_NATIVE: the full name of its message
    halves: tuple[CheckedSchemaDefinition | None, ...] = ()  # KEY_VALUE: key and value; None: bytes

    @classmethod
    def parse(cls, info: SchemaInfo) -> CheckedSchemaDefinition:
        """Checks and parses a schema. Returns the parsed definition. Raises InvalidSchema, whose text names the error
        and its place. A schema of type NONE or AUTO_CONSUME is not valid here."""
        if len(info.data) > DEFINITION_BYTES_MAX:
            raise InvalidSchema(f"a schema of {len(info.data)} bytes; it has {DEFINITION_BYTES_MAX} at most")
        if (
            size := len(info.name) + sum(len(key) + len(value) for key, value in info.properties.items())
        ) > NAME_AND_PROPERTIES_MAX:
            raise InvalidSchema(
                f"a schema's name and properties have {size} characters; they have {NAME_AND_PROPERTIES_MAX} at most"
            )
        if info.type in _NEVER:
            raise InvalidSchema(f"a schema of type {info.type.name} is not registered")
        if info.type in AVRO_DEFINED_TYPES:
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
    def _avro(cls, info: SchemaInfo) -> CheckedSchemaDefinition:
        loaded = parse_json(info.data)
        if info.type is SchemaType.JSON and isinstance(loaded, dict) and loaded.get("type") == "object":
            return cls(info, _hash(info, encode_sorted_json(loaded)))  # an old client's
        node = parse_avro_types(loaded)
        if node.kind == "union":
            raise InvalidSchema("the schema is a union: a topic's schema is one type, best a record")
        return cls(info, _hash(info, encode_canonical_schema(loaded)), node)

    @classmethod
    def _pair(cls, info: SchemaInfo) -> CheckedSchemaDefinition:
        halves = tuple(_half(each, info.type) for each in split_key_value(info))
        told = b"".join(each.fingerprint if each is not None else b"-" for each in halves)
        return cls(info, _hash(info, told + _encoding(info).encode()), halves=halves)


def _half(info: SchemaInfo, whole: SchemaType) -> CheckedSchemaDefinition | None:
    if info.type is whole:
        raise InvalidSchema("a half of KEY_VALUE is a KEY_VALUE")
    if not info.type and info.data:
        raise InvalidSchema(
            "a half of KEY_VALUE has a definition and no type (properties key.schema.type and value.schema.type)"
        )
    return CheckedSchemaDefinition.parse(info) if info.type else None


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
    mode: Compatibility, new: CheckedSchemaDefinition, live: Sequence[tuple[int, CheckedSchemaDefinition]]
) -> str | None:
    """Returns the reason why the compatibility policy `mode` forbids to add the schema `new` to a topic; None if it may
    be added. `live`: the present schemas of the topic, as pairs of version and definition, the newest last. Raises
    InvalidSchema if the schemas have too many types to compare."""
    if not live or mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    if mode is Compatibility.ALWAYS_INCOMPATIBLE:
        return f"{_title(mode)}: the topic has a schema, and takes no other"
    for version, old in live if mode.transitive else live[-1:]:
        if why := _against(mode, new, old):
            return f"{_title(mode)} against version {version}: {why}"
    return None


def why_consumer_cannot_read(
    mode: Compatibility, reader: CheckedSchemaDefinition, live: Sequence[tuple[int, CheckedSchemaDefinition]]
) -> str | None:
    """Returns the reason why a consumer with the schema `reader` cannot read the messages of a topic with the schemas
    `live`; None if it can. Compares with all of `live` if `mode` is transitive, else only with the newest. The schema
    of the consumer need not be registered for the topic. Raises InvalidSchema if the schemas have too many types to
    compare."""
    if mode is Compatibility.ALWAYS_COMPATIBLE:
        return None
    for version, old in live if mode.transitive else live[-1:]:
        if old.fingerprint != reader.fingerprint and (why := _against(Compatibility.BACKWARD, reader, old)):
            return f"it cannot read version {version}: {why}"
    return None


def _against(mode: Compatibility, new: CheckedSchemaDefinition, old: CheckedSchemaDefinition) -> str | None:
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


def _pairs_against(mode: Compatibility, new: CheckedSchemaDefinition, old: CheckedSchemaDefinition) -> str | None:
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
