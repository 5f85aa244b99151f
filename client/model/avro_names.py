"""Records of another name: a reader's record takes what a writer's record in its place wrote, whatever both are called.

Brokers do not compare names of records, as Pulsar's do not (broker/schema/core/compatibility.py); fastavro does. So the
reader's schema is given the writer's names as aliases. In a union the branch is the one with the name, else the first
record whose fields the writer has, or that have defaults. Guard: tests/client/model/test_typed_schemas.py.
"""

from __future__ import annotations

import copy
from typing import Any

from .avro_bounds import names_of

_OF_THE_PARSER = ("__fastavro_parsed__", "__named_schemas")


def reader_for(reader: Any, writer: Any) -> Any:
    """The reader's schema, with aliases for the records of the writer's. Both are parsed; what is given is not."""
    if isinstance(reader, dict):
        reader = {name: value for name, value in reader.items() if name not in _OF_THE_PARSER}
    found = copy.deepcopy(reader)
    _Aliases(names_of(found), names_of(writer)).add(found, writer)
    return found


class _Aliases:
    def __init__(self, readers: dict[str, Any], writers: dict[str, Any]) -> None:
        self._readers, self._writers = readers, writers
        self._seen: set[tuple[str, str]] = set()

    def add(self, reader: Any, writer: Any) -> None:
        """Adds the aliases of the records of two types that meet."""
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
