from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.common.errors import InvalidMessage
from magnetar.client.model.schemas import (
    Array,
    AvroSchema,
    Boolean,
    Bytes,
    BytesSchema,
    CustomEnum,
    Double,
    Integer,
    JsonSchema,
    Long,
    Map,
    Record,
    Schema,
    String,
    StringSchema,
)


class Measured(Record):
    height = Double()
    heights = Array(Double())
    by_name = Map(Double())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_refused_wherever_it_is(number: float) -> None:
    for fields in ({"height": number}, {"heights": [1.0, number]}, {"by_name": {"a": number}}):
        with pytest.raises(InvalidMessage, match="JSON"):
            JsonSchema(Measured).encode(Measured(**fields))
    whole = Measured(height=1.5, heights=[-0.0, 1e308], by_name={"a": 5e-324})
    assert JsonSchema(Measured).decode(JsonSchema(Measured).encode(whole)) == whole
    with pytest.raises(ValueError, match="JSON"):
        JsonSchema(type("Wrong", (Record,), {"x": Double(default=number, required_default=True)}))


class Colour(Enum):
    RED = 1
    BLUE = 2


class Place(Record):
    name = String(required=True)
    height = Double()


class Flight(Record):
    carrier = String(required=True)
    delay = Integer(default=0)
    cancelled = Boolean()
    miles = Long()
    raw = Bytes()
    colour = CustomEnum(Colour)
    tags = Array(String())
    counts = Map(Integer())
    origin = Place()


FLIGHTS = st.builds(
    Flight,
    carrier=st.text(), delay=st.integers(-(1 << 31), (1 << 31) - 1), cancelled=st.none() | st.booleans(),
    miles=st.none() | st.integers(-(1 << 63), (1 << 63) - 1), raw=st.none() | st.binary(),
    colour=st.none() | st.sampled_from(Colour), tags=st.none() | st.lists(st.text()),
    counts=st.none() | st.dictionaries(st.text(), st.integers(0, 100)),
    origin=st.none() | st.builds(Place, name=st.text(), height=st.none() | st.floats(-1e9, 1e9)),
)  # fmt: skip


class Leg(Record):
    zulu = String(required=True)
    alpha = Colour
    place = Place()


class Trip(Record):
    """Each named type more than once, and its fields not in the order of the alphabet."""

    _avro_namespace = "air"
    zulu = Integer(required=True)
    alpha = CustomEnum(Colour, default=Colour.BLUE)
    other = CustomEnum(Colour, required=True)
    start = Place()
    ways = Array(Leg())
    by_name = Map(Place())


TRIP_SCHEMA = {
    "type": "record", "name": "Trip", "namespace": "air",
    "fields": [
        {"name": "zulu", "type": "int"},
        {"name": "alpha", "type": ["null", {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}]},
        {"name": "other", "type": "Colour"},
        {"name": "start", "type": ["null", {"type": "record", "name": "Place", "fields": [
            {"name": "name", "type": "string"}, {"name": "height", "type": ["null", "double"]}]}]},
        {"name": "ways", "type": ["null", {"type": "array", "items": {"type": "record", "name": "Leg", "fields": [
            {"name": "zulu", "type": "string"}, {"name": "alpha", "type": ["null", "Colour"]},
            {"name": "place", "type": ["null", "Place"]}]}}]},
        {"name": "by_name", "type": ["null", {"type": "map", "values": "Place"}]},
    ],
}  # fmt: skip


def test_fields_stand_in_the_order_of_their_definition_and_a_type_is_defined_once() -> None:
    assert Trip.schema() == TRIP_SCHEMA
    assert [field["name"] for field in Trip.schema()["fields"]] == list(Trip._fields)


def test_a_record_that_asks_for_it_has_its_fields_sorted() -> None:
    class Sorted(Record):
        _sorted_fields = True
        zulu = Integer()
        alpha = Integer()

    assert [field["name"] for field in Sorted.schema()["fields"]] == ["alpha", "zulu"]


def test_avro_bytes_are_those_of_the_order_of_definition() -> None:
    """As Pulsar's client 3.13 writes them: a branch of each union, then the value; zulu before alpha."""

    class Two(Record):
        zulu = Integer(default=7)
        alpha = String(required=True)

    assert AvroSchema(Two).encode(Two(alpha="x")) == b"\x02\x0e\x02x"


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_a_record_that_uses_a_type_twice_survives(kind: type[Any]) -> None:
    place = Place(name="n")
    trip = Trip(zulu=1, other=Colour.RED, start=place, ways=[Leg(zulu="z", place=place)], by_name={"a": place})
    assert kind(Trip).decode(kind(Trip).encode(trip)) == trip


def test_two_types_of_one_name_are_refused() -> None:
    other = Enum("Colour", ["GREEN"])

    class Both(Record):
        one = CustomEnum(Colour)
        two = CustomEnum(other)

    with pytest.raises(InvalidMessage, match=r"two types.*Colour"):
        Both.schema()


def test_a_default_is_in_the_schema_when_it_is_required_there() -> None:
    class Defaults(Record):
        plain = Integer(default=1)
        null = Integer(required_default=True)
        colour = CustomEnum(Colour, default=Colour.BLUE, required=True, required_default=True)
        raw = Bytes(default=b"\xff", required=True, required_default=True)
        either = String(default="x", required_default=True)

    fields = {field.pop("name"): field for field in Defaults.schema()["fields"]}
    assert fields["plain"] == {"type": ["null", "int"]}
    assert fields["null"] == {"type": ["null", "int"], "default": None}
    assert fields["colour"]["default"] == "BLUE"
    assert fields["raw"]["default"] == "\u00ff"
    assert fields["either"] == {"type": ["null", "string"], "default": "x"}
    AvroSchema(Defaults)


class Fruit(Enum):
    APPLE = "red"
    RED = "apple"
    PAIR = (1, 2)


class Basket(Record):
    fruit = CustomEnum(Fruit)
    colour = Colour


def test_in_json_an_enum_travels_by_its_value_and_is_read_by_its_name_too() -> None:
    schema = JsonSchema(Basket)
    assert schema.encode(Basket(fruit=Fruit.APPLE, colour=Colour.BLUE)) == b'{"fruit":"red","colour":2}'
    assert schema.decode(b'{"fruit":"red","colour":2}') == Basket(fruit=Fruit.APPLE, colour=Colour.BLUE)
    assert schema.decode(b'{"fruit":"APPLE","colour":"BLUE"}') == Basket(fruit=Fruit.APPLE, colour=Colour.BLUE)
    assert schema.encode(Basket(fruit=Fruit.PAIR)) == b'{"fruit":"PAIR","colour":null}', "no text, no number: its name"
    with pytest.raises(InvalidMessage, match="GREEN"):
        schema.decode(b'{"colour":"GREEN"}')
    with pytest.raises(InvalidMessage):
        schema.decode(b'{"colour":[]}')


def test_in_avro_an_enum_travels_by_its_name() -> None:
    schema = AvroSchema(Basket)
    assert schema.decode(schema.encode(Basket(fruit=Fruit.RED))) == Basket(fruit=Fruit.RED)


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
@given(flight=FLIGHTS)
def test_a_record_survives(kind: type[Any], flight: Flight) -> None:
    schema: Schema = kind(Flight)
    assert schema.decode(schema.encode(flight)) == flight


def test_json_is_compact_and_names_its_fields() -> None:
    encoded = JsonSchema(Place).encode(Place(name="Ö", height=1.5))
    assert encoded == '{"name":"Ö","height":1.5}'.encode()


def test_defaults_and_missing_fields() -> None:
    assert Flight(carrier="UA").delay == 0
    assert Flight(carrier="UA").cancelled is False, "as Pulsar's Boolean"
    assert JsonSchema(Flight).decode(b'{"carrier":"UA","unknown":1}') == Flight(carrier="UA")
    with pytest.raises(InvalidMessage, match="carrier"):
        JsonSchema(Flight).encode(Flight())


@pytest.mark.parametrize(
    "values",
    [
        {"delay": "x"}, {"delay": True}, {"delay": 1 << 31}, {"tags": [1]}, {"counts": {1: 1}}, {"colour": "GREEN"},
        {"none": 1}, {"origin": Flight()},
    ],
)  # fmt: skip
def test_values_that_do_not_fit_their_field_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        Flight(carrier="UA", **values)


@pytest.mark.parametrize(
    ("schema", "value"),
    [(BytesSchema(), "text"), (StringSchema(), b"x"), (JsonSchema(Place), {}), (AvroSchema(Place), 1)],
)
def test_values_that_do_not_fit_their_schema_are_refused(schema: Schema, value: Any) -> None:
    with pytest.raises(InvalidMessage):
        schema.encode(value)


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        (StringSchema(), b"\xff"),
        (JsonSchema(Place), b"{"),
        (JsonSchema(Place), b"[]"),
        (AvroSchema(Place), b"\xff" * 3),
    ],
)
def test_payloads_that_do_not_decode_are_refused(schema: Schema, payload: bytes) -> None:
    with pytest.raises(InvalidMessage):
        schema.decode(payload)


class Shapes(Record):
    a = Array(String())
    m = Map(Integer())
    p = Place()
    b = Bytes()
    places = Array(Place)
    by_name = Map(Place)


@pytest.mark.parametrize(
    "payload",
    ['{"a":5}', '{"a":"text"}', '{"a":{"x":1}}', '{"a":[5]}', '{"m":5}', '{"m":[1]}', '{"p":5}', '{"p":["name"]}',
     '{"p":"name"}', '{"b":"€"}', '{"b":5}', '{"places":[null]}', '{"by_name":{"x":null}}', '{"by_name":{"x":"y"}}'],
)  # fmt: skip
def test_json_of_another_shape_than_its_fields_is_refused(payload: str) -> None:
    with pytest.raises(InvalidMessage):
        JsonSchema(Shapes).decode(payload.encode())


def test_a_plain_avro_definition_takes_dicts() -> None:
    definition = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    schema = AvroSchema(None, schema_definition=definition)
    assert schema.decode(schema.encode({"a": 3})) == {"a": 3}


class Stop(Record):
    gate = String()
    minutes = Integer(default=5)


class Route(Record):
    stop = Stop()
    start = Place(required=True)
    stops = Array(Stop())
    by_name = Map(Stop())
    colour = CustomEnum(Colour)


def test_a_record_that_is_a_field_takes_what_fields_take() -> None:
    fields = {each["name"]: each["type"] for each in Route.schema()["fields"]}
    assert fields["start"]["name"] == "Place", "required: no null in it"
    assert fields["stop"][0] == "null"
    with pytest.raises(InvalidMessage, match="start"):
        JsonSchema(Route).encode(Route())


def test_a_record_in_a_record_that_is_not_given_is_one_of_its_own() -> None:
    one, other = Route(), Route()
    one.stop.gate = "A7"
    assert (one.stop.minutes, other.stop.gate) == (5, None)
    assert Route(stop=None).stop is None
    assert Flight(carrier="UA").origin is None, "what lacks a required field is not made"
    assert JsonSchema(Stop).decode(b'{"gate":null}') == Stop()
    found = JsonSchema(Route).decode(b'{"stop":null,"start":{"name":"x"}}')
    assert found.stop is None, "null stays null"


def test_records_are_given_as_dicts_and_enums_by_name_or_value_as_in_pulsar() -> None:
    route = Route(stop={"gate": "A"}, start={"name": "x"}, stops=[{"gate": "B"}], by_name={"c": {"gate": "C"}})
    assert route.stop == Stop(gate="A")
    assert route.start == Place(name="x")
    assert route.stops == [Stop(gate="B")]
    assert route.by_name == {"c": Stop(gate="C")}
    assert [Route(colour=each).colour for each in ("RED", 1, Colour.RED)] == [Colour.RED] * 3
    stops = [Stop()]
    assert Route(stops=stops).stops is stops
    with pytest.raises(InvalidMessage):
        Route(colour="GREEN")


def test_a_name_that_is_no_field_is_refused_also_when_it_is_set_later() -> None:
    stop = Stop()
    with pytest.raises(InvalidMessage, match="gat"):
        stop.gat = "B"
    with pytest.raises(AttributeError, match="gat"):
        Stop(gat="B")


@pytest.mark.parametrize("given", [dict, Stop(), "Stop", None])
@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_a_schema_is_made_of_a_class_of_records(kind: Any, given: Any) -> None:
    with pytest.raises(InvalidMessage):
        kind(given)


def test_text_without_a_schema_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidMessage, match="takes bytes, not str: encode it, or use StringSchema"):
        BytesSchema().encode("hello")
