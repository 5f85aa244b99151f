"""The bounds of an Avro payload: its depth, and its number of items that take no bytes. Decoding a payload beyond them
would crash a process or fill its memory. Also the aliases by which fastavro finds a writer's records
(`add_reader_aliases`).

fastavro descends without a bound, and a few thousand levels of a recursive record end the process; an array of nulls
has any number of items in five bytes. `CheckedSchema` finds once whether a payload of a schema can
do either; then it walks each and refuses it before fastavro sees it. Guard: tests/client/model/test_typed_schemas.py.
"""

from __future__ import annotations

import copy
from typing import Any

from ..common.errors import InvalidMessage

DEPTH_MAX = 200
"""Most types in one another, in a payload."""
EMPTY_ITEMS_MAX = 64
"""Most items without bytes, for each byte of the payload."""

_FIXED = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_VARINTS = ("int", "long", "enum")
_COUNTED = ("bytes", "string")


def named_types(schema: Any, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the named types of a schema that fastavro parsed, by full name."""
    found: dict[str, Any] = {} if names is None else names
    for each in _inner(schema):
        named_types(each, found)
    if isinstance(schema, dict) and "name" in schema and schema["type"] in ("record", "error", "enum", "fixed"):
        found[schema["name"]] = schema
    return found


def _inner(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return schema
    if not isinstance(schema, dict):
        return []
    if "fields" in schema:
        return [field["type"] for field in schema["fields"]]
    return [schema[each] for each in ("items", "values") if each in schema]


def must_check_payload(schema: Any, names: dict[str, Any], around: tuple[str, ...] = ()) -> bool:
    """Whether payloads of this type must be checked before fastavro decodes them: the type contains itself, or items
    of an array may take no bytes."""
    if isinstance(schema, str):
        return schema in around
    if isinstance(schema, dict):
        if "items" in schema and _may_be_empty(schema["items"], names, around):
            return True
        if "name" in schema:
            around = (*around, schema["name"])
    return any(must_check_payload(each, names, around) for each in _inner(schema))


def _may_be_empty(schema: Any, names: dict[str, Any], around: tuple[str, ...]) -> bool:
    if isinstance(schema, str):
        return schema == "null" or (schema in names and (schema in around or _may_be_empty(names[schema], {}, around)))
    if isinstance(schema, list):
        return False  # the number of the branch is a byte
    kind = schema["type"]
    if kind in ("record", "error"):
        return all(_may_be_empty(field["type"], names, around) for field in schema["fields"])
    return bool(kind == "null" or (kind == "fixed" and not schema["size"]))


class _Walk:
    def __init__(self, data: bytes, names: dict[str, Any]) -> None:
        self._data = data
        self._names = names
        self._at = 0
        self._empty = EMPTY_ITEMS_MAX * len(data)

    def walk(self, schema: Any, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise InvalidMessage(f"the payload is deeper than {DEPTH_MAX} types")
        if isinstance(schema, list):
            number = self._varint()
            if not 0 <= number < len(schema):
                raise InvalidMessage(f"the payload has branch {number} of a union of {len(schema)}")
            self.walk(schema[number], depth + 1)
            return
        if isinstance(schema, str) and schema in self._names:
            schema = self._names[schema]
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in _FIXED:
            self._skip(_FIXED[kind])
        elif kind in _VARINTS:
            self._varint()
        elif kind in _COUNTED:
            self._skip(self._varint())
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind in ("record", "error"):
            for field in schema["fields"]:
                self.walk(field["type"], depth + 1)
        elif kind in ("array", "map"):
            self._blocks(schema, depth)
        else:
            self.walk(kind, depth + 1)

    def _blocks(self, schema: dict[str, Any], depth: int) -> None:
        while count := self._varint():
            if count < 0:
                count = -count
                self._varint()  # bytes of the block
            for _ in range(count):
                before = self._at
                if "values" in schema:
                    self._skip(self._varint())
                self.walk(schema.get("items", schema.get("values")), depth + 1)
                if self._at == before:
                    self._empty -= 1
                    if self._empty < 0:
                        raise InvalidMessage("the payload claims many items without bytes")

    def _skip(self, size: int) -> None:
        if not 0 <= size <= len(self._data) - self._at:
            raise InvalidMessage(f"the payload ends in front of {size} bytes that it claims")
        self._at += size

    def _varint(self) -> int:
        found = shift = 0
        while True:
            if self._at >= len(self._data) or shift > 63:
                raise InvalidMessage("the payload ends in a number")
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (found >> 1) ^ -(found & 1)
            shift += 7


class CheckedSchema:
    """A schema that fastavro parsed, and a check of its payloads before fastavro decodes them."""

    __slots__ = ("_names", "schema")

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        names = named_types(schema)
        self._names = names if must_check_payload(schema, names) else None

    def check(self, payload: bytes) -> None:
        """Raises InvalidMessage if the payload is nested too deeply, declares more items than it can contain, or does
        not fit the schema. Takes time linear in the size of the payload."""
        if self._names is not None:
            _Walk(payload, self._names).walk(self.schema, 0)


# ---------------------------------------------------------------------------------------------------- avro_names
# Records of another name: a reader's record takes what a writer's record in its place wrote, whatever both are called.
#
# Brokers do not compare names of records, as Pulsar's do not (broker/cluster/schema_core.py); fastavro
# does. So the reader's schema is given the writer's names as aliases. In a union the branch is the one with the name,
# else the first record whose fields the writer has, or that have defaults. Guard:
# tests/client/model/test_typed_schemas.py.


_OF_THE_PARSER = ("__fastavro_parsed__", "__named_schemas")


def add_reader_aliases(reader: Any, writer: Any) -> Any:
    """Returns a copy of the parsed reader's schema with aliases for the records of the parsed writer's schema."""
    if isinstance(reader, dict):
        reader = {name: value for name, value in reader.items() if name not in _OF_THE_PARSER}
    found = copy.deepcopy(reader)
    _Aliases(named_types(found), named_types(writer)).add(found, writer)
    return found


class _Aliases:
    def __init__(self, readers: dict[str, Any], writers: dict[str, Any]) -> None:
        self._readers, self._writers = readers, writers
        self._seen: set[tuple[str, str]] = set()

    def add(self, reader: Any, writer: Any) -> None:
        """Adds aliases to the records of the reader's type for the records of the writer's type at the same place."""
        if isinstance(writer, str):
            writer = self._writers.get(writer, writer)
        if isinstance(reader, str):
            reader = self._readers.get(reader, reader)
        if isinstance(writer, list):
            for each in writer:
                self.add(reader, each)
        elif isinstance(reader, list):
            self._add_in_union(reader, writer)
        elif isinstance(reader, dict) and isinstance(writer, dict) and reader["type"] == writer["type"]:
            if reader["type"] in ("record", "error"):
                self._add_to_record(reader, writer)
            for inner in ("items", "values"):
                if inner in reader:
                    self.add(reader[inner], writer[inner])

    def _add_in_union(self, branches: list[Any], writer: Any) -> None:
        if not isinstance(writer, dict):
            return
        same = [self._readers.get(each, each) if isinstance(each, str) else each for each in branches]
        same = [each for each in same if isinstance(each, dict) and each["type"] == writer["type"]]
        if "fields" in writer:
            named = [each for each in same if _is_named(each, writer["name"])]
            same = named or [each for each in same if _fits(each, writer)]
        if same:
            self.add(same[0], writer)

    def _add_to_record(self, reader: dict[str, Any], writer: dict[str, Any]) -> None:
        pair = reader["name"], writer["name"]
        if pair in self._seen:
            return
        self._seen.add(pair)
        if not _is_named(reader, writer["name"]):
            reader["aliases"] = [*reader.get("aliases", ()), writer["name"]]
        written = {each["name"]: each["type"] for each in writer["fields"]}
        for field in reader["fields"]:
            if (source := _source(field, written)) is not None:
                self.add(field["type"], written[source])


def _is_named(reader: dict[str, Any], name: str) -> bool:
    return name in reader.get("aliases", ()) or reader["name"].rpartition(".")[2] == name.rpartition(".")[2]


def _fits(reader: dict[str, Any], writer: dict[str, Any]) -> bool:
    written = {each["name"]: each["type"] for each in writer["fields"]}
    return all("default" in each or _source(each, written) is not None for each in reader["fields"])


def _source(field: dict[str, Any], written: dict[str, Any]) -> str | None:
    return next((each for each in (field["name"], *field.get("aliases", ())) if each in written), None)
