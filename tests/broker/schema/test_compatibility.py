"""Avro's rules of resolution, pair by pair, with fastavro as the judge of what can really be read."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.schema.core import avro
from magnetar.broker.schema.core.avro import DEPTH_MAX, FIELDS_MAX, parse
from magnetar.broker.schema.core.compatibility import unreadable
from magnetar.proto.errors import InvalidSchema
from tests.support.steps import slowness


def record(*fields: tuple[str, Any] | tuple[str, Any, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    described = [{"name": f[0], "type": f[1], **({"default": f[2]} if len(f) == 3 else {})} for f in fields]
    return {"type": "record", "name": name, "fields": described, **more}


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": [*symbols], **more}


LIST = record(("head", "int"), ("tail", ["null", "L"]), name="L")
TREE = record(("head", "long"), ("tail", ["null", "L"], None), name="L")

READABLE: list[tuple[Any, Any]] = [
    ("int", "int"), ("long", "int"), ("float", "long"), ("double", "int"), ("double", "float"), ("bytes", "string"),
    ("string", "bytes"), (["null", "int"], "int"), (["null", "int"], ["int"]), (["null", "long"], ["null", "int"]),
    (record(), record(("a", "int"))), (record(("a", "int", 7)), record()),
    (record(("a", "int")), record(("a", "int"), ("b", "string"))),
    (record(("b", "int"), ("a", "int")), record(("a", "int"), ("b", "int"))),
    (record(("a", "int"), namespace="x"), record(("a", "int"), namespace="y")),
    (record(name="S", aliases=["R"]), record()), (record(name="S", aliases=["n.R"]), record(namespace="n")),
    (enum("A", "B"), enum("A")), (enum("A", default="A"), enum("A", "B")),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}),
    ({"type": "map", "values": ["null", "int"]}, {"type": "map", "values": "int"}),
    ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 4}),
    (LIST, LIST), (TREE, LIST), ({"type": "int", "logicalType": "date"}, "int"),
    (record(("a", record(("x", "int", 1), name="I"))), record(("a", record(name="I")))),
]  # fmt: skip
UNREADABLE: list[tuple[Any, Any, str]] = [
    ("int", "long", "int does not read long"), ("float", "double", "float does not read double"),
    ("int", ["null", "int"], "int does not read null"), (["null", "int"], "string", "no branch of the union"),
    (record(("a", "int")), record(), "field `a`: it has no default"),
    (record(("a", "int")), record(("a", "string")), "field `a`: int does not read string"),
    (record(name="S"), record(), "another name"), (enum("A"), enum("A", "B"), "lacks the symbol 'B'"),
    ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8}, "4 bytes, not 8"),
    ({"type": "array", "items": "int"}, {"type": "map", "values": "int"}, "array does not read map"),
    ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, "field `[]`"),
    (LIST, TREE, "field `head`"),
    (record(("a", record(("x", "int"), name="I"))), record(("a", record(name="I"))), "field `a.x`: it has no default"),
    ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
     {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}, "precision or scale"),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "writer"), READABLE)
def test_what_avro_resolves_is_readable(reader: Any, writer: Any) -> None:
    assert unreadable(parse(reader), parse(writer)) is None


@pytest.mark.parametrize(("reader", "writer", "why"), UNREADABLE)
def test_what_avro_does_not_resolve_is_refused_with_the_field_that_breaks(reader: Any, writer: Any, why: str) -> None:
    assert why in (unreadable(parse(reader), parse(writer)) or "it is readable")


def test_a_type_is_not_readable_because_a_branch_that_failed_was_being_compared() -> None:
    """The reader's first branch fails at its second field, after its first one was readable under the assumption that
    the branch is; the second branch reaches the same pair without that assumption."""

    def node(name: str, link: str, *more: Any) -> dict[str, Any]:
        return record(("l", record(("up", ["null", link], None), name="Link")), *more, name=name)

    writer = node("A", "A")
    second = record(("l", "Link"), name="B", aliases=["A"])
    reader = [node("A", "A", ("missing", "int")), second]
    why = unreadable(parse(reader), parse(writer))
    assert why is not None
    assert "no branch of the union reads record A" in why


# ------------------------------------------------------------------ fastavro agrees
def types(depth: int = 2) -> st.SearchStrategy[Any]:
    simple = st.sampled_from(["int", "long", "float", "double", "boolean", "string", "null"])
    if not depth:
        return simple
    inner = types(depth - 1)
    return st.one_of(
        simple, simple, inner.map(lambda each: {"type": "array", "items": each}),
        st.sampled_from([["null", "int"], ["null", "string"], ["int", "string"]]),
    )  # fmt: skip


FIELDS = st.dictionaries(st.sampled_from("abc"), st.tuples(types(), st.booleans()), max_size=3)
ZERO = {"int": 0, "long": 0, "float": 0.0, "double": 0.0, "boolean": False, "string": "", "null": None}


def value_of(type_: Any, draw: Any) -> Any:
    if isinstance(type_, list):
        return value_of(draw(st.sampled_from(type_)), draw)
    if isinstance(type_, dict):
        return [value_of(type_["items"], draw)]
    return ZERO[type_]


def default_of(type_: Any) -> Any:
    return default_of(type_[0]) if isinstance(type_, list) else [] if isinstance(type_, dict) else ZERO[type_]


@settings(max_examples=300, deadline=None)
@given(FIELDS, FIELDS, st.data())
def test_what_is_called_readable_is_read_by_fastavro(
    written: dict[str, Any], read: dict[str, Any], data: st.DataObject
) -> None:
    writer = record(*((name, type_) for name, (type_, _) in written.items()))
    reader = record(
        *((name, type_, default_of(type_)) if has else (name, type_) for name, (type_, has) in read.items())
    )
    if unreadable(parse(reader), parse(writer)) is not None:
        return
    out = io.BytesIO()
    value = {name: value_of(type_, data.draw) for name, (type_, _) in written.items()}
    fastavro.schemaless_writer(out, fastavro.parse_schema(writer), value)
    found = fastavro.schemaless_reader(io.BytesIO(out.getvalue()), fastavro.parse_schema(writer), reader)
    assert isinstance(found, dict)
    assert sorted(found) == sorted(read)


@given(FIELDS)
def test_a_schema_reads_itself(fields: dict[str, Any]) -> None:
    one = record(*((name, type_) for name, (type_, _) in fields.items()))
    assert unreadable(parse(one), parse(one)) is None
    assert unreadable(parse(one), parse(json.loads(json.dumps(one)))) is None


# ------------------------------------------------------------------ equal ones
def test_what_equality_does_not_count_is_not_in_the_one_form() -> None:
    plain = record(("a", "int"), ("b", enum("X", name="n.E")), namespace="n")
    told = json.loads(json.dumps(plain))
    told["doc"], told["aliases"], told["name"] = "words", ["Q"], "n.R"
    del told["namespace"]
    told["fields"][0] = {"type": {"type": "int"}, "doc": "more", "name": "a"}
    told["fields"][1]["type"]["name"] = "E"
    assert avro.canonical(told) == avro.canonical(plain)
    for changed in (
        record(("b", enum("X", name="n.E")), ("a", "int"), namespace="n"), record(("a", "int"), namespace="n"),
        record(("a", "int", 1), ("b", enum("X", name="n.E")), namespace="n"), {**plain, "owner": "me"},
    ):  # fmt: skip
        assert avro.canonical(changed) != avro.canonical(plain)


# ------------------------------------------------------------------ strangers
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (1, "a type is a name"), ({}, "no 'type'"), ("Unknown", "there is no type"), ({"type": "array"}, "no 'items'"),
        ({"type": "record", "name": "R"}, "a list of 'fields'"), (record(name="1"), "no name"),
        (record(name="a b"), "no name"), (enum("A", "A"), "twice"), (["int", "int"], "twice"), ([["int"]], "union"),
        (record(("a", "int"), ("a", "int")), "there twice"), ({"type": "fixed", "name": "F", "size": -1}, "size"),
        (record(("a", record(name="R"))), "defined twice"), (record(("a.b", "int")), "dot"),
        (enum("A", default="B"), "none of its symbols"), ({"type": "record", "name": "R", "fields": [1]}, "a field is"),
        ({"type": "record", "name": "R", "fields": [], "namespace": 3}, "is no name"),
        (record(("a", "int"), aliases="x"), "list of names"), (record(name="int"), "Avro's own type"),
        (record(name="n" * 600), "512 characters"), (record(namespace="n" * 600), "a full name of 602 characters"),
    ],
)  # fmt: skip
def test_what_is_no_avro_is_refused_with_its_place(schema: Any, why: str) -> None:
    with pytest.raises(InvalidSchema, match=why):
        parse(schema)


def test_bombs_are_refused_by_their_size_depth_and_number() -> None:
    deep: Any = "int"
    for _ in range(DEPTH_MAX + 1):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidSchema, match="deeper"):
        parse(deep)
    with pytest.raises(InvalidSchema, match="over 10000"):
        parse(record(*((f"f{number}", "int") for number in range(FIELDS_MAX + 1))))
    with pytest.raises(InvalidSchema, match="and aliases"):
        parse(record(aliases=[f"A{number}" for number in range(FIELDS_MAX + 1)]))
    for text in (b"[" * 100_000, b'"\xff"', b'"\\ud800"', b"1e400"):
        with pytest.raises(InvalidSchema, match="no JSON"):
            avro.load(text)
    with pytest.raises(InvalidSchema, match="at most"):
        avro.load(b" " * 600_000)


def test_schemas_that_are_slow_to_compare_are_refused_in_bounded_time() -> None:
    def union(prefix: str, width: int) -> list[Any]:
        return [record((f"f{number}", "int"), name=f"{prefix}{number}") for number in range(width)]

    began = time.process_time()
    with pytest.raises(InvalidSchema, match="pairs of types"):
        unreadable(parse(union("A", 700)), parse(union("A", 700)[::-1]))
    aliases = [f"A{number}" for number in range(700)]
    wide = record(*((f"f{number}", "int", 0) for number in range(4000)), name="W", aliases=aliases)
    with pytest.raises(InvalidSchema, match="pairs of types"):
        unreadable(parse(wide), parse(union("A", 700)))
    chain = record(("g0", "int"), name="C0")
    links = [(f"f{number}", record(("p", f"C{number - 1}"), name=f"C{number}"), None) for number in range(1, 3000)]
    fields: list[Any] = [("f0", chain, None), *links]
    one = parse(record(*fields, ("last", "C2999")))
    other = parse(record(*((f"x{f[0]}", *f[1:]) for f in fields), ("last", "C2999")))
    with pytest.raises(InvalidSchema, match="too deep"):
        unreadable(one, other)
    assert time.process_time() - began < 5 * slowness()
