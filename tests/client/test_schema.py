from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.errors import InvalidMessage
from magnetar.client.schemas import (
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
    assert JsonSchema(Flight).decode(b'{"carrier":"UA","unknown":1}') == Flight(carrier="UA")
    with pytest.raises(InvalidMessage, match="carrier"):
        JsonSchema(Flight).encode(Flight())


@pytest.mark.parametrize(
    "values",
    [
        {"delay": "x"}, {"delay": True}, {"delay": 1 << 31}, {"tags": [1]}, {"counts": {1: 1}}, {"colour": "RED"},
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


def test_a_plain_avro_definition_takes_dicts() -> None:
    definition = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    schema = AvroSchema(None, schema_definition=definition)
    assert schema.decode(schema.encode({"a": 3})) == {"a": 3}
