"""Avro schemas: parsing, and the canonical form, which equal schemas share (pure).

`parse_avro` checks a definition and returns its types as a tree, in which a name that is used again is the same node: a
recursive record contains itself. Bounds, as clients send it: DEFINITION_BYTES_MAX, DEPTH_MAX, FIELDS_MAX.

`encode_canonical` returns the form that Pulsar compares: white space, the order of members, `doc` and aliases do not
count; order of fields, defaults and other properties do; all names are full.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...proto.errors import InvalidSchema
from ...proto.schema import DEFINITION_BYTES_MAX

DEPTH_MAX = 64
FIELDS_MAX = 10_000
"""Most fields, branches, symbols and aliases of a definition together."""
NAME_MAX = 512
"""Most characters of a full name: the canonical form repeats the namespace in each name."""

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
NAMED = ("record", "error", "enum", "fixed")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_UNTOLD = ("doc", "aliases", "namespace")
"""Members that `encode_canonical` leaves out; the namespace is part of the full names."""


class AvroType:
    """A parsed Avro type. `kind`: a primitive, "record", "enum", "fixed", "array", "map" or "union"."""

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
        """The name without its namespace."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


class AvroField:
    """A field of a record in a parsed schema."""

    __slots__ = ("aliases", "has_default", "name", "type")

    def __init__(self, name: str, type_: AvroType, has_default: bool, aliases: tuple[str, ...]) -> None:
        self.name, self.type, self.has_default, self.aliases = name, type_, has_default, aliases


def parse_json(text: bytes) -> Any:
    """Parses the text of a definition as JSON. Raises InvalidSchema if the text is too long or no JSON."""
    if len(text) > DEFINITION_BYTES_MAX:
        raise InvalidSchema(f"a schema of {len(text)} bytes; it has {DEFINITION_BYTES_MAX} at most")
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"the schema is no JSON: {error}") from None


def parse_avro(loaded: Any) -> AvroType:
    """Returns the types of an Avro definition as a tree. Raises InvalidSchema, whose text names the part that is
    invalid."""
    return _Parser().type(loaded, "", "the schema", 0)


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._left = FIELDS_MAX

    def type(self, of: Any, namespace: str, where: str, depth: int) -> AvroType:
        if depth > DEPTH_MAX:
            raise InvalidSchema(f"{where}: the schema is deeper than {DEPTH_MAX} types")
        if isinstance(of, str):
            return self._by_name(of, namespace, where)
        if isinstance(of, list):
            return self._union(of, namespace, where, depth)
        if not isinstance(of, dict):
            raise InvalidSchema(f"{where}: a type is a name, an object or a list, not {of!r:.50}")
        kind = of.get("type")
        if isinstance(kind, (dict, list)):
            return self.type(kind, namespace, where, depth + 1)
        if kind in NAMED:
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
        if name in PRIMITIVES:
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
        if len(full) > NAME_MAX:
            raise InvalidSchema(f"{where}: a full name of {len(full)} characters; it has {NAME_MAX} at most")
        if full in PRIMITIVES:
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
            isinstance(each, str) and len(each) <= NAME_MAX for each in aliases
        ):
            raise InvalidSchema(f"{where}: aliases are a list of names")
        self._count(len(aliases), where)
        return tuple(aliases)

    def _count(self, more: int, where: str) -> None:
        self._left -= more
        if self._left < 0:
            raise InvalidSchema(f"{where}: the schema has over {FIELDS_MAX} fields, branches, symbols and aliases")


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
    if not isinstance(name, str) or len(name) > NAME_MAX or not _NAME.fullmatch(name):
        raise InvalidSchema(
            f"{where}: {name!r:.100} is no name: letters, digits and _, parts with dots between, {NAME_MAX} characters"
        )
    return name


# ------------------------------------------------------------------ the canonical form
def encode_canonical(loaded: Any) -> bytes:
    """Returns the canonical form of a definition, which `parse_avro` must have accepted. Raises InvalidSchema if the
    definition is nested too deep."""
    return encode_sorted_json(_canonical(loaded, ""))


def encode_sorted_json(loaded: Any) -> bytes:
    """Encodes a value as JSON with sorted keys. Raises InvalidSchema if the value is nested too deep."""
    try:
        return msgspec.json.encode(loaded, order="deterministic")
    except RecursionError:
        raise InvalidSchema("a value in the schema is too deep") from None


def _canonical(of: Any, namespace: str) -> Any:
    """Returns the canonical form of a type."""
    if isinstance(of, str):
        return of if of in PRIMITIVES else _full(of, namespace)
    if isinstance(of, list):
        return [_canonical(each, namespace) for each in of]
    kind = of["type"]
    rest = {name: value for name, value in of.items() if name not in _UNTOLD}
    if kind in NAMED:
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
