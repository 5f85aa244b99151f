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

from magnetar.broker.cluster import schema_core as avro
from magnetar.broker.cluster.schema_core import SCHEMA_DEPTH_MAX, SCHEMA_FIELDS_MAX, parse_avro_types, why_unreadable
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
    (enum("A", name="F"), enum("A"), "another name"), (enum("A"), enum("A", "B"), "lacks the symbol 'B'"),
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
    assert why_unreadable(parse_avro_types(reader), parse_avro_types(writer)) is None


@pytest.mark.parametrize(("reader", "writer", "why"), UNREADABLE)
def test_what_avro_does_not_resolve_is_refused_with_the_field_that_breaks(reader: Any, writer: Any, why: str) -> None:
    assert why in (why_unreadable(parse_avro_types(reader), parse_avro_types(writer)) or "it is readable")


# ---------------------------------------------------------------- the matrix of Avro's Java library, which Pulsar asks
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
PROMOTED = {
    ("long", "int"), ("float", "int"), ("double", "int"), ("float", "long"), ("double", "long"), ("double", "float"),
    ("bytes", "string"), ("string", "bytes"),
}  # fmt: skip
ARRAY, MAP = {"type": "array", "items": "int"}, {"type": "map", "values": "int"}
ENUM, FIXED, POINT = enum("A"), {"type": "fixed", "name": "F", "size": 4}, record(("x", "int"), name="P")
COMPLEX = {"array": ARRAY, "map": MAP, "enum": ENUM, "fixed": FIXED, "record": POINT}


@pytest.mark.parametrize("reader", PRIMITIVES)
@pytest.mark.parametrize("writer", PRIMITIVES)
@pytest.mark.parametrize("inside", ["alone", "field", "array", "map", "union of the reader", "union of the writer"])
def test_primitives_are_promoted_as_by_avros_java(inside: str, reader: str, writer: str) -> None:
    def put(of: str) -> Any:
        match inside:
            case "field":
                return record(("a", of))
            case "array" | "map":
                return {"type": inside, "items" if inside == "array" else "values": of}
            case _:
                return of

    read, written = put(reader), put(writer)
    if inside == "union of the reader":
        read = [ENUM, reader]
    elif inside == "union of the writer":
        written = [writer]
    assert (why_unreadable(parse_avro_types(read), parse_avro_types(written)) is None) == (
        reader == writer or (reader, writer) in PROMOTED
    )


@pytest.mark.parametrize("reader", COMPLEX)
@pytest.mark.parametrize("writer", [*COMPLEX, *PRIMITIVES])
def test_types_of_another_kind_read_nothing_of_each_other(reader: str, writer: str) -> None:
    found = why_unreadable(parse_avro_types(COMPLEX[reader]), parse_avro_types(COMPLEX.get(writer, writer)))
    assert (found is None) == (reader == writer)
    back = why_unreadable(parse_avro_types(COMPLEX.get(writer, writer)), parse_avro_types(COMPLEX[reader]))
    assert (back is None) == (reader == writer)


def _in(type_: Any, **more: Any) -> dict[str, Any]:
    return record(("a", type_), **more)


def _point(name: str, *more: tuple[Any, ...], **options: Any) -> dict[str, Any]:
    return record(("x", "int"), *more, name=name, **options)  # type: ignore[arg-type]


_Y, _Y_DEFAULT = ("y", "int"), ("y", "int", 0)
MATRIX: list[tuple[str, Any, Any, bool]] = [
    ("a record of another name", _point("Q"), _point("P"), True),
    ("… of another namespace", _point("n.P"), _point("m.P"), True),
    ("… in a field", _in(_point("Q")), _in(_point("P")), True),
    ("… in an array", _in({"type": "array", "items": _point("Q")}), _in({"type": "array", "items": _point("P")}), True),
    ("… in a map", _in({"type": "map", "values": _point("Q")}), _in({"type": "map", "values": _point("P")}), True),
    ("… in a union of the reader's", _in(["null", _point("Q")]), _in(_point("P")), True),
    ("… in both unions", _in(["null", _point("Q")]), _in(["null", _point("P")]), True),
    ("… in a union of the writer's", _in(_point("Q")), _in([_point("P")]), True),
    ("… and a field that is missing", _point("Q", _Y), _point("P"), False),
    ("… and one that has a default", _point("Q", _Y_DEFAULT), _point("P"), True),
    ("… and a field of another type", record(("x", "string"), name="Q"), _point("P"), False),
    ("a record by its alias", _point("Q", aliases=["P"]), _point("P"), True),
    ("a branch of the writer's name decides", [_point("P", _Y), _point("Q")], _point("P"), False),
    ("… also by its alias", [_point("R", _Y, aliases=["P"]), _point("Q")], _point("P"), False),
    ("a branch of another name that reads it", ["null", _point("R", _Y), _point("Q")], _point("P"), True),
    ("no branch that reads it", ["null", _point("R", _Y)], _point("P"), False),
    ("a field of another name", record(("z", "int"), name="P"), _point("P"), False),
    ("an enum of the same symbols", enum("A", "B"), enum("A", "B"), True),
    ("… in another order", enum("B", "A"), enum("A", "B"), True),
    ("… with more", enum("A", "B", "C"), enum("A", "B"), True),
    ("… with fewer", enum("A"), enum("A", "B"), False),
    ("… with fewer and a default", enum("A", default="A"), enum("A", "B"), True),
    ("… none of them, and a default", enum("C", default="C"), enum("A", "B"), True),
    ("… where the writer has a default", enum("A"), enum("A", "B", default="A"), False),
    ("an enum of another name", enum("A", name="F"), enum("A"), False),
    ("… by an alias", enum("A", name="F", aliases=["E"]), enum("A"), True),
    ("… of another namespace", enum("A", namespace="n"), enum("A", namespace="m"), True),
    ("a fixed of another size", {**FIXED, "size": 5}, FIXED, False),
    ("… of another name", {**FIXED, "name": "G"}, FIXED, False),
    ("… by an alias", {**FIXED, "name": "G", "aliases": ["F"]}, FIXED, True),
    ("… of another namespace", {**FIXED, "namespace": "n"}, FIXED, True),
    ("… as bytes", "bytes", FIXED, False),
    ("… from bytes", FIXED, "bytes", False),
    ("a union of the same branches", ["null", "int"], ["null", "int"], True),
    ("… in another order", ["int", "null"], ["null", "int"], True),
    ("… with more", ["null", "int", "string"], ["null", "int"], True),
    ("… with fewer", ["null", "int"], ["null", "int", "string"], False),
    ("… one of which is promoted", ["null", "double"], ["null", "int"], True),
    ("… one of which is not", ["null", "int"], ["null", "double"], False),
    ("one branch, of the writer's", "int", ["int"], True),
    ("… promoted", "long", ["int"], True),
    ("two branches, each of which is read", "double", ["int", "float"], True),
    ("… one of which is not", "double", ["int", "string"], False),
    ("an empty union of the writer's", "int", [], True),
    ("a field that is new, with a default", _point("P", _Y_DEFAULT), _point("P"), True),
    ("… null, with null as a default", _point("P", ("y", ["null", "int"], None)), _point("P"), True),
    ("… null, without a default", _point("P", ("y", ["null", "int"])), _point("P"), False),
    ("… without one", _point("P", _Y), _point("P"), False),
    ("a field that is gone", _point("P"), _point("P", _Y), True),
    ("fields in another order", record(_Y, ("x", "int"), name="P"), _point("P", _Y), True),
    ("a record without fields", record(name="P"), _point("P"), True),
    ("… written", _point("P"), record(name="P"), False),
    ("a nested field that is new, with a default", _in(_point("P", _Y_DEFAULT)), _in(_point("P")), True),
    ("… without one", _in(_point("P", _Y)), _in(_point("P")), False),
    ("items that are promoted", {"type": "array", "items": "double"}, ARRAY, True),
    ("items that are not", {"type": "array", "items": "string"}, ARRAY, False),
    ("values that are promoted", {"type": "map", "values": "long"}, MAP, True),
    ("values that are not", {"type": "map", "values": "boolean"}, MAP, False),
    ("a record that contains itself, of another name",
     record(("next", ["null", "M"], None), name="M"), record(("next", ["null", "L"], None), name="L"), True),
    ("… with a field that is missing",
     record(("next", ["null", "M"], None), _Y, name="M"), record(("next", ["null", "L"], None), name="L"), False),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "writer", "readable"), [row[1:] for row in MATRIX], ids=[row[0] for row in MATRIX])
def test_the_matrix_of_avros_java(reader: Any, writer: Any, readable: bool) -> None:
    why = why_unreadable(parse_avro_types(reader), parse_avro_types(writer))
    assert (why is None) == readable, why


@pytest.mark.parametrize(
    ("reader_name", "aliases", "readable"),
    [("P", [], True), ("Q", ["P"], True), ("Q", [], False), ("n.P", [], False)],
    ids=["same name", "alias", "another name", "another namespace"],
)
def test_aliases_of_fields_count_in_records_of_the_same_name(
    reader_name: str, aliases: list[str], readable: bool
) -> None:
    reader = {
        "type": "record", "name": reader_name, "aliases": aliases,
        "fields": [{"name": "z", "type": "int", "aliases": ["x"]}],
    }  # fmt: skip
    assert (why_unreadable(parse_avro_types(reader), parse_avro_types(_point("P"))) is None) == readable


def test_a_type_is_not_readable_because_a_branch_that_failed_was_being_compared() -> None:
    """The reader's first branch fails at its second field, after its first one was readable under the assumption that
    the branch is; the second branch reaches the same pair without that assumption."""

    def node(name: str, link: str, *more: Any) -> dict[str, Any]:
        return record(("l", record(("up", ["null", link], None), name="Link")), *more, name=name)

    writer = node("A", "A")
    second = record(("l", "Link"), name="B", aliases=["A"])
    reader = [node("A", "A", ("missing", "int")), second]
    why = why_unreadable(parse_avro_types(reader), parse_avro_types(writer))
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
    if why_unreadable(parse_avro_types(reader), parse_avro_types(writer)) is not None:
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
    assert why_unreadable(parse_avro_types(one), parse_avro_types(one)) is None
    assert why_unreadable(parse_avro_types(one), parse_avro_types(json.loads(json.dumps(one)))) is None


# ------------------------------------------------------------------ equal ones
def test_what_equality_does_not_count_is_not_in_the_one_form() -> None:
    plain = record(("a", "int"), ("b", enum("X", name="n.E")), namespace="n")
    told = json.loads(json.dumps(plain))
    told["doc"], told["aliases"], told["name"] = "words", ["Q"], "n.R"
    del told["namespace"]
    told["fields"][0] = {"type": {"type": "int"}, "doc": "more", "name": "a"}
    told["fields"][1]["type"]["name"] = "E"
    assert avro.encode_canonical_schema(told) == avro.encode_canonical_schema(plain)
    for changed in (
        record(("b", enum("X", name="n.E")), ("a", "int"), namespace="n"), record(("a", "int"), namespace="n"),
        record(("a", "int", 1), ("b", enum("X", name="n.E")), namespace="n"), {**plain, "owner": "me"},
    ):  # fmt: skip
        assert avro.encode_canonical_schema(changed) != avro.encode_canonical_schema(plain)


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
        parse_avro_types(schema)


def test_bombs_are_refused_by_their_size_depth_and_number() -> None:
    deep: Any = "int"
    for _ in range(SCHEMA_DEPTH_MAX + 1):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidSchema, match="deeper"):
        parse_avro_types(deep)
    with pytest.raises(InvalidSchema, match="over 10000"):
        parse_avro_types(record(*((f"f{number}", "int") for number in range(SCHEMA_FIELDS_MAX + 1))))
    with pytest.raises(InvalidSchema, match="and aliases"):
        parse_avro_types(record(aliases=[f"A{number}" for number in range(SCHEMA_FIELDS_MAX + 1)]))
    for text in (b"[" * 100_000, b'"\xff"', b'"\\ud800"', b"1e400"):
        with pytest.raises(InvalidSchema, match="no JSON"):
            avro.parse_json(text)
    with pytest.raises(InvalidSchema, match="at most"):
        avro.parse_json(b" " * 600_000)


def test_schemas_that_are_slow_to_compare_are_refused_in_bounded_time() -> None:
    def union(prefix: str, width: int) -> list[Any]:
        return [record((f"f{number}", "int"), name=f"{prefix}{number}") for number in range(width)]

    began = time.process_time()
    with pytest.raises(InvalidSchema, match="pairs of types"):
        why_unreadable(parse_avro_types(union("A", 700)), parse_avro_types(union("A", 700)[::-1]))
    aliases = [f"A{number}" for number in range(700)]
    wide = record(*((f"f{number}", "int", 0) for number in range(4000)), name="W", aliases=aliases)
    with pytest.raises(InvalidSchema, match="pairs of types"):
        why_unreadable(parse_avro_types(wide), parse_avro_types(union("A", 700)))
    chain = record(("g0", "int"), name="C0")
    links = [(f"f{number}", record(("p", f"C{number - 1}"), name=f"C{number}"), None) for number in range(1, 3000)]
    fields: list[Any] = [("f0", chain, None), *links]
    one = parse_avro_types(record(*fields, ("last", "C2999")))
    other = parse_avro_types(record(*((f"x{f[0]}", *f[1:]) for f in fields), ("last", "C2999")))
    with pytest.raises(InvalidSchema, match="too deep"):
        why_unreadable(one, other)
    assert time.process_time() - began < 5 * slowness()
