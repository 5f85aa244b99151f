"""The text of a schema is that of Pulsar's client, byte for byte.

Each function makes one class of records with the names of a module: `pulsar.schema`, and then `magnetar.schema`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import pytest

import magnetar
from magnetar import schema as ours

theirs = pytest.importorskip("pulsar.schema")


class Colour(Enum):
    RED = 1
    BLUE = 2


class Size(IntEnum):
    SMALL = 10
    LARGE = 20


class Unit(Enum):
    """A custom enum: its values are text, its members are not its values."""

    METRE = "m"
    FOOT = "ft"


CASES: list[Callable[[Any], type]] = []


def case(make: Callable[[Any], type]) -> Callable[[Any], type]:
    CASES.append(make)
    return make


def _single(**fields: Callable[[Any], Any]) -> None:
    """A class for each field alone, and one with all of them."""

    def one(name: str, make: Callable[[Any], Any]) -> None:
        def single(s: Any) -> type:
            return type(s.Record)("Single", (s.Record,), {name: make(s)})

        single.__name__ = name
        case(single)

    for name, make in fields.items():
        one(name, make)

    @case
    def all_together(s: Any) -> type:
        return type(s.Record)("Together", (s.Record,), {name: make(s) for name, make in fields.items()})


_single(
    nothing=lambda s: s.Null(),
    truth=lambda s: s.Boolean(),
    truth_required=lambda s: s.Boolean(required=True),
    truth_default=lambda s: s.Boolean(default=True, required_default=True),
    truth_said=lambda s: s.Boolean(required=True, required_default=True),
    number=lambda s: s.Integer(),
    number_required=lambda s: s.Integer(required=True),
    number_default_unsaid=lambda s: s.Integer(default=5),
    number_default=lambda s: s.Integer(default=5, required_default=True),
    number_default_required=lambda s: s.Integer(default=-5, required=True, required_default=True),
    number_null=lambda s: s.Integer(required_default=True),
    long_default=lambda s: s.Long(default=1 << 40, required_default=True),
    float_default=lambda s: s.Float(default=1.5, required_default=True),
    float_whole=lambda s: s.Float(default=1, required_default=True),
    double_default=lambda s: s.Double(default=6.4, required_default=True),
    raw=lambda s: s.Bytes(required_default=True),
    text_default=lambda s: s.String(default="grüße\n\"x\"", required_default=True),
    text_of_bytes=lambda s: s.String(default=b"abc", required_default=True),
    positional=lambda s: s.String("abc", True, True),
    array=lambda s: s.Array(s.String()),
    array_default=lambda s: s.Array(s.Long(), default=[1, 2], required_default=True),
    array_required=lambda s: s.Array(s.Double(), required=True),
    array_of_arrays=lambda s: s.Array(s.Array(s.Integer())),
    array_of_maps=lambda s: s.Array(s.Map(s.Boolean())),
    map=lambda s: s.Map(s.Integer()),
    map_default=lambda s: s.Map(s.String(), default={"a": "b"}, required_default=True),
    map_of_maps=lambda s: s.Map(s.Map(s.Bytes()), required=True),
    enum=lambda s: Colour,
    enum_again=lambda s: s.CustomEnum(Colour),
    enum_default=lambda s: s.CustomEnum(Colour, default=Colour.BLUE, required=True, required_default=True),
    enum_by_name=lambda s: s.CustomEnum(Size, default="LARGE", required_default=True),
    enum_by_value=lambda s: s.CustomEnum(Size, default=10, required_default=True),
    enum_of_text=lambda s: s.CustomEnum(Unit, default=Unit.FOOT, required_default=True),
)


def _place(s: Any, **attributes: Any) -> Any:
    return type(s.Record)("Place", (s.Record,), {**attributes, "name": s.String(required=True), "height": s.Double()})


@case
def nested(s: Any) -> type:
    place = _place(s)

    class Trip(s.Record):  # type: ignore[misc,name-defined]
        start = place
        end = place()
        via = place(required=True)
        told = place(required_default=True)

    return Trip


@case
def nested_collections(s: Any) -> type:
    place = _place(s)

    class Trip(s.Record):  # type: ignore[misc,name-defined]
        ways = s.Array(place())
        more = s.Array(place(), required=True)
        by_name = s.Map(place())
        by_names = s.Map(s.Array(place()))

    return Trip


@case
def deep(s: Any) -> type:
    place = _place(s)

    class Leg(s.Record):  # type: ignore[misc,name-defined]
        zulu = s.String(required=True)
        colour = Colour
        place_of = place()

    class Trip(s.Record):  # type: ignore[misc,name-defined]
        colour = Colour
        legs = s.Array(Leg())
        first = Leg()
        start = place()

    return Trip


@case
def namespaces(s: Any) -> type:
    place, hut = _place(s, _avro_namespace="air.places"), _place(s)

    class Trip(s.Record):  # type: ignore[misc,name-defined]
        _avro_namespace = "air"
        start = place()
        end = place()
        hut_one = hut()
        hut_two = hut()
        colour = Colour
        colours = s.CustomEnum(Colour)

    return Trip


@case
def sorted_fields(s: Any) -> type:
    class Sorted(s.Record):  # type: ignore[misc,name-defined]
        _sorted_fields = True
        zulu = s.Integer()
        alpha = s.String(default="a", required_default=True)
        mike = Colour

    return Sorted


@case
def inherits_what_is_no_field(s: Any) -> type:
    class Base(s.Record):  # type: ignore[misc,name-defined]
        _avro_namespace = "base"
        _sorted_fields = True

        def title(self) -> str:
            return "title"

    class Derived(Base):
        zulu = s.Integer()
        alpha = s.Integer()

    return Derived


@case
def no_fields(s: Any) -> type:
    class Empty(s.Record):  # type: ignore[misc,name-defined]
        constant = 5

    return Empty


@case
def names_that_fields_have_as_parameters(s: Any) -> type:
    class Odd(s.Record):  # type: ignore[misc,name-defined]
        type = s.String()
        schema_of = s.String()
        name = s.String(required=True)

    return Odd


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_text_of_a_schema_is_pulsars_byte_for_byte(make: Callable[[Any], type]) -> None:
    for kind in ("JsonSchema", "AvroSchema"):
        expected = getattr(theirs, kind)(make(theirs)).schema_info()
        found = getattr(ours, kind)(make(ours))
        assert found.schema_info().schema() == expected.schema()
        assert found.info().data == expected.schema().encode()
        assert found.schema_info().name() == expected.name()
        assert found.schema_info().schema_type().name == expected.schema_type().name


def test_logical_types_and_unions_of_a_definition_are_told_as_they_are_written() -> None:
    definition = {
        "type": "record", "name": "Logical", "namespace": "a.b", "doc": "ünï",
        "fields": [
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
            {"name": "sum", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
            {"name": "any", "type": ["string", "long", {"type": "array", "items": ["null", "double"]}]},
            {"name": "sum_fixed", "type": {"type": "fixed", "name": "Md5", "size": 16}},
        ],
    }  # fmt: skip
    expected = theirs.AvroSchema(None, schema_definition=definition).schema_info().schema()
    assert ours.AvroSchema(None, schema_definition=definition).schema_info().schema() == expected


def test_single_values_and_protobuf_are_told_as_pulsars() -> None:
    from google.protobuf.timestamp_pb2 import Timestamp

    for make in (
        lambda s: s.StringSchema(), lambda s: s.BytesSchema(), lambda s: s.ProtobufNativeSchema(Timestamp)
    ):  # fmt: skip
        assert make(ours).schema_info().schema() == make(theirs).schema_info().schema()
        assert make(ours).schema_info().name() == make(theirs).schema_info().name()


@pytest.mark.parametrize("kind", ["JsonSchema", "AvroSchema"])
def test_a_default_that_is_not_null_is_read_where_the_writer_did_not_have_the_field(kind: str) -> None:
    """The text says it in a union that begins with null, as Pulsar's."""

    class Old(ours.Record):
        a = ours.Integer()

    class New(ours.Record):
        a = ours.Integer()
        b = ours.Integer(default=5, required_default=True)

    written, reader = getattr(ours, kind)(Old), getattr(ours, kind)(New)
    assert reader.decode_with_writer_schema(written.encode(Old(a=1)), written.info()) == New(a=1, b=5)
    assert reader.decode(reader.encode(New(a=1, b=7))) == New(a=1, b=7)


@pytest.mark.parametrize(
    ("field", "given", "held"),
    [("Integer", 20, 20), ("Double", 20, 20.0), ("Bytes", "text", b"text"), ("String", b"text", "text")],
)
def test_fields_answer_as_pulsars(field: str, given: object, held: object) -> None:
    mine, other = getattr(ours, field)(), getattr(theirs, field)()
    assert mine.validate_type("f", given) == held == other.validate_type("f", given)
    assert (mine.type(), mine.schema(), mine.default()) == (other.type(), other.schema(), other.default())
    assert mine.required_default() is other.required_default() is False
    with pytest.raises(TypeError):
        mine.validate_type("f", object())


def test_a_schema_of_a_programs_own_is_made_with_pulsars_parameters() -> None:
    class Wrapped(magnetar.schema.Schema):
        def __init__(self) -> None:
            super().__init__(dict, 2, {"type": "record", "name": "W", "fields": []}, "JSON")

    info = Wrapped().schema_info()
    assert (info.schema_type().name, info.name(), info.schema()[:1]) == ("JSON", "JSON", "{")
    for wrong in (None, 99, object()):
        with pytest.raises(magnetar.InvalidConfiguration):
            magnetar.schema.Schema(dict, wrong, {}, "x")
