"""Whether one schema reads what another one wrote (pure).

`unreadable(reader, writer)` follows Avro's rules of resolution; its answer names the first field that breaks and why.
Names of enums and fixed match without their namespaces, or by an alias of the reader's. **Names of records are not
compared**, as Avro's Java library, and with it Pulsar's check, does not: a record takes what the record in its place
wrote; aliases of its fields count where the full names are the same, or an alias. In a union the branch of the writer's
full name decides, if there is one; else any that reads it. A pair of types that is being compared counts as readable
(recursive records); when it is not, what was found meanwhile is found anew.
PAIRS_MAX bounds the work of two schemas with many unions.
Guarding tests: tests/broker/schema/test_compatibility.py.
"""

from __future__ import annotations

from ....proto.errors import InvalidSchema
from .avro import Field, Node

PAIRS_MAX = 100_000
"""Pairs of types that are compared, and fields and symbols on the way."""

_PROMOTED = {
    "long": {"int"}, "float": {"int", "long"}, "double": {"int", "long", "float"},
    "string": {"bytes"}, "bytes": {"string"},
}  # fmt: skip
"""Types that a reader's type takes besides itself."""


def unreadable(reader: Node, writer: Node) -> str | None:
    """Returns why `reader` cannot read what `writer` wrote; None: it can. InvalidSchema: the schemas have too many
    types."""
    try:
        return _Comparison().of(reader, writer, "")
    except RecursionError:
        raise InvalidSchema("the types of the schemas are too deep in one another") from None


class _Comparison:
    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str | None] = {}
        self._compared = 0

    def of(self, reader: Node, writer: Node, where: str) -> str | None:
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

    def _of(self, reader: Node, writer: Node, where: str) -> str | None:
        if writer.kind == "union":
            return next((why for each in writer.branches if (why := self.of(reader, each, where))), None)
        if reader.kind == "union":
            self._count(len(reader.branches))
            named = [each for each in reader.branches if each.kind == writer.kind and _is_of(each, writer)]
            if any(self.of(each, writer, where) is None for each in named or reader.branches):
                return None
            return _at(where, f"no branch of the union reads {writer}")
        if reader.kind != writer.kind:
            if writer.kind in _PROMOTED.get(reader.kind, ()):
                return None
            return _at(where, f"{reader} does not read {writer}")
        if reader.logical and writer.logical and reader.logical != writer.logical:
            return _at(where, "the decimals have another precision or scale")
        if reader.kind in ("enum", "fixed") and reader.short != writer.short and writer.name not in reader.aliases:
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
                return self.of(reader.items, writer.items, f"{where}[]")
        return None

    def _record(self, reader: Node, writer: Node, where: str) -> str | None:
        self._count(len(reader.fields) + len(writer.fields))
        written = {each.name: each for each in writer.fields}
        is_of = _is_of(reader, writer)
        for field in reader.fields:
            inside = f"{where}.{field.name}" if where else field.name
            source = _source(field, written) if is_of else written.get(field.name)
            if source is None:
                if not field.has_default:
                    return _at(inside, "it has no default, and the writer's schema does not have it")
            elif why := self.of(field.type, source.type, inside):
                return why
        return None


def _is_of(reader: Node, writer: Node) -> bool:
    return bool(writer.name) and (reader.name == writer.name or writer.name in reader.aliases)


def _source(field: Field, written: dict[str, Field]) -> Field | None:
    return next((written[each] for each in (field.name, *field.aliases) if each in written), None)


def _at(where: str, why: str) -> str:
    return f"field `{where}`: {why}" if where else why
