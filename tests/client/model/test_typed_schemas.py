"""Schemas by themselves: golden bytes of Java's client, wrong values and payloads, and the text of Pulsar's client."""

import datetime as dt
import io
import json
import math
import time
from enum import Enum
from typing import Any

import fastavro
import pytest
from google.protobuf.struct_pb2 import Struct

from magnetar import schema
from magnetar.broker.cluster import schema_core as avro
from magnetar.broker.cluster.schema_core import why_unreadable
from magnetar.client.common.errors import InvalidMessage
from magnetar.proto.schema import SchemaInfo, SchemaType, join_key_value
from magnetar.schema import AutoConsumeSchema, AvroSchema, JsonSchema, KeyValueEncodingType, KeyValueSchema
from tests.support.steps import slowness

UTC = dt.UTC
GOLDEN: list[tuple[Any, Any, str]] = [
    (schema.BooleanSchema(), True, "01"), (schema.Int8Schema(), -128, "80"), (schema.Int16Schema(), -2, "fffe"),
    (schema.Int32Schema(), 1 << 30, "40000000"), (schema.Int64Schema(), -(1 << 63), "8000000000000000"),
    (schema.FloatSchema(), 1.5, "3fc00000"), (schema.DoubleSchema(), -0.0, "8000000000000000"),
    (schema.DoubleSchema(), math.inf, "7ff0000000000000"),
    (schema.DateSchema(), dt.date(1970, 1, 2), "0000000005265c00"),
    (schema.TimeSchema(), dt.time(0, 0, 1, 5000), "00000000000003ed"),
    (schema.TimestampSchema(), dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "00000000000003e8"),
    (schema.TimestampSchema(), dt.datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC), "ffffffffffffffff"),
    (schema.InstantSchema(), dt.datetime(1970, 1, 1, 0, 0, 1, 2, tzinfo=UTC), "0000000000000001000007d0"),
    (schema.InstantSchema(), dt.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC), "ffffffffffffffff000003e8"),
    (schema.LocalDateSchema(), dt.date(1969, 12, 31), "ffffffffffffffff"),
    (schema.LocalTimeSchema(), dt.time(0, 0, 0, 1), "00000000000003e8"),
    (schema.LocalDateTimeSchema(), dt.datetime(1970, 1, 2, 0, 0, 0, 1), "000000000000000100000000000003e8"),
    (schema.StringSchema(), "é", "c3a9"),
    (KeyValueSchema(schema.Int8Schema(), schema.StringSchema()), (1, "a"), "00000001010000000161"),
    (KeyValueSchema(schema.Int8Schema(), schema.StringSchema()), (None, "a"), "ffffffff0000000161"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "value", "payload"), GOLDEN)
def test_values_have_javas_bytes_and_come_back(one: Any, value: Any, payload: str) -> None:
    assert one.encode(value).hex() == payload
    assert one.decode(bytes.fromhex(payload)) == value
    assert math.isnan(schema.DoubleSchema().decode(schema.DoubleSchema().encode(math.nan)))
    info = one.info()
    assert AutoConsumeSchema().decode_with_writer_schema(bytes.fromhex(payload), info) == value


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        (schema.Int8Schema(), 128), (schema.Int32Schema(), True), (schema.Int32Schema(), "1"),
        (schema.Int64Schema(), 1 << 63), (schema.LocalDateTimeSchema(), dt.datetime(2020, 1, 1, tzinfo=UTC)),
        (schema.BooleanSchema(), 1), (schema.FloatSchema(), 1e300), (schema.DateSchema(), dt.datetime(2020, 1, 1)),
        (schema.TimestampSchema(), dt.datetime(2020, 1, 1)),
        (schema.ProtobufNativeSchema(Struct), {}), (KeyValueSchema(schema.Int8Schema(), schema.Int8Schema()), 1),
        (KeyValueSchema(schema.Int8Schema(), schema.Int8Schema()), (1, 2, 3)), (AutoConsumeSchema(), 1),
    ],
)  # fmt: skip
def test_what_is_no_value_of_it_is_refused(one: Any, wrong: Any) -> None:
    with pytest.raises(InvalidMessage):
        one.encode(wrong)


@pytest.mark.parametrize("one", [each[0] for each in GOLDEN if not isinstance(each[0], schema.StringSchema)])
@pytest.mark.parametrize("payload", [b"", b"\xff" * 3, b"\xff" * 17, bytes(5) + b"\xff" * 8])
def test_a_payload_of_another_length_or_range_is_refused_and_never_guessed(one: Any, payload: bytes) -> None:
    with pytest.raises(InvalidMessage):
        one.decode(payload)


def test_a_protobuf_message_tells_its_descriptors() -> None:
    native = schema.ProtobufNativeSchema(Struct)
    value = Struct()
    value["a"] = 1.0
    assert native.decode(native.encode(value)) == value
    text = json.loads(native.info().data)
    assert text["rootMessageTypeName"] == "google.protobuf.Struct"
    with pytest.raises(InvalidMessage):
        native.decode(b"\xff")
    with pytest.raises(InvalidMessage, match="a class of Protobuf"):
        schema.ProtobufNativeSchema(dict)


# ------------------------------------------------------------------ Avro
def of(definition: Any) -> SchemaInfo:
    return SchemaInfo(type=SchemaType.AVRO, data=json.dumps(definition).encode())


def record(*fields: dict[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def test_avro_is_read_with_the_writers_schema_under_any_name() -> None:
    old = AvroSchema(None, record({"name": "a", "type": "int"}, name="Old"))
    new = AvroSchema(
        None, record({"name": "b", "type": "string", "default": "x"}, {"name": "a", "type": "long"}, name="New")
    )
    assert new.decode_with_writer_schema(old.encode({"a": 7}), old.info()) == {"a": 7, "b": "x"}
    assert new.decode_with_writer_schema(new.encode({"a": 7, "b": "y"}), None) == {"a": 7, "b": "y"}
    for payload, writer in (
        (b"\x0e", of("string")), (b"\x0e\x0e", old.info()), (b"", old.info()),
        (b"\x0e", SchemaInfo(type=SchemaType.JSON)),
        (b"\x0e", SchemaInfo(type=SchemaType.AVRO, data=b"{")),
    ):  # fmt: skip
        with pytest.raises(InvalidMessage):
            new.decode_with_writer_schema(payload, writer)


LINKED = record({"name": "n", "type": ["null", "R"]})
TREE = record({"name": "of", "type": {"type": "array", "items": "R"}})
NULLS = {"type": "array", "items": "null"}


def _named(name: str, *fields: tuple[str, object]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


X, X2 = _named("n.P", ("x", "int")), _named("Q", ("x", "long"))
NEXT = _named("L", ("x", "int"), ("next", ["null", "L"]))
NEXT2 = _named("M", ("x", "int"), ("next", ["null", "M"]))


@pytest.mark.parametrize(
    ("written", "read", "value"),
    [
        (X, X2, {"x": 1}),
        (["null", X], ["null", X2], {"x": 1}), (X, ["null", X2], {"x": 1}), ([X], X2, {"x": 1}),
        (["null", X], ["null", _named("R", ("y", "int")), X2], {"x": 1}),
        ({"type": "array", "items": X}, {"type": "array", "items": X2}, [{"x": 1}]),
        ({"type": "map", "values": ["null", X]}, {"type": "map", "values": ["null", X2]}, {"k": {"x": 1}}),
        (NEXT, NEXT2, {"x": 1, "next": {"x": 2, "next": None}}),
        (_named("O", ("p", X), ("q", "n.P")), _named("S", ("p", X2), ("q", _named("T", ("x", "double")))),
         {"p": {"x": 1}, "q": {"x": 2}}),
    ],
    ids=["field", "unions", "to a union", "from a union", "a branch that fits", "array", "map", "itself", "twice"],
)  # fmt: skip
def test_records_of_another_name_are_read_wherever_they_are(written: object, read: object, value: object) -> None:
    """Brokers let them in: names of records are not compared."""
    writer, reader = (_named(name, ("a", type_)) for name, type_ in (("W", written), ("Other", read)))
    assert why_unreadable(avro.parse_avro_types(reader), avro.parse_avro_types(writer)) is None
    payload = AvroSchema(None, writer).encode({"a": value})
    info = SchemaInfo(type=SchemaType.AVRO, data=json.dumps(writer).encode())
    for _ in range(2):
        assert AvroSchema(None, reader).decode_with_writer_schema(payload, info) == {"a": value}


@pytest.mark.parametrize(
    ("definition", "payload", "why"),
    [
        (LINKED, b"\x02" * 100_000 + b"\x00", "deeper"), (TREE, b"\x02" * 100_000, "deeper"),
        (NULLS, b"\x80\xda\xc4\x13\x00", "without bytes"),
        ({"type": "array", "items": record()}, b"\xfe\xff\xff\xff\x0f\x00", "without bytes"),
        (LINKED, b"\x02" * 50, "ends"), (LINKED, b"\x04", "branch 2"), (LINKED, b"\xff" * 12, "ends in a number"),
    ],
)  # fmt: skip
def test_a_payload_that_would_end_the_process_or_fill_it_is_refused(definition: Any, payload: bytes, why: str) -> None:
    began = time.process_time()
    for decode in (
        AvroSchema(None, definition).decode,
        lambda data: AutoConsumeSchema().decode_with_writer_schema(data, of(definition)),
    ):
        with pytest.raises(InvalidMessage, match=why):
            decode(payload)
    assert time.process_time() - began < 2 * slowness()


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        (LINKED, {"n": {"n": {"n": None}}}), (TREE, {"of": [{"of": []}, {"of": [{"of": []}]}]}), (NULLS, [None] * 50),
        (record({"name": "m", "type": {"type": "map", "values": ["null", "R"]}},
                {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
                {"name": "f", "type": {"type": "fixed", "name": "F", "size": 3}},
                {"name": "d", "type": "double"}, {"name": "b", "type": "bytes"},
                {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                {"name": "again", "type": "E"}),
         {"m": {"k": None}, "e": "B", "f": b"abc", "d": 1.5, "b": b"xy",
          "t": dt.datetime(2020, 1, 1, tzinfo=UTC), "again": "A"}),
    ],
)  # fmt: skip
def test_what_refers_to_itself_and_is_as_deep_as_it_may_be_comes_back(definition: Any, value: Any) -> None:
    one = AvroSchema(None, definition)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(definition), value)
    assert one.decode(out.getvalue()) == value


def test_what_has_no_schema_that_it_knows_comes_as_bytes() -> None:
    auto = AutoConsumeSchema()
    assert auto.decode_with_writer_schema(b"\x01", None) == b"\x01"
    assert auto.decode_with_writer_schema(b"\x01", SchemaInfo(type=SchemaType.PROTOBUF_NATIVE)) == b"\x01"
    pair = join_key_value(schema.Int8Schema().info(), SchemaInfo(type=SchemaType.NONE), separated=True)
    assert auto.decode_with_writer_schema(b"\x01", pair) == b"\x01"
    with pytest.raises(InvalidMessage):
        auto.decode_with_writer_schema(b"{", SchemaInfo(type=SchemaType.JSON))
    separated = KeyValueSchema(schema.Int8Schema(), schema.Int8Schema(), KeyValueEncodingType.SEPARATED)
    assert (separated.encode_key((1, 2)), separated.encode((1, 2))) == (b"\1", b"\2")


# ------------------------------------------------------------------ Pulsar's client
class Colour(Enum):
    RED = 1
    BLUE = 2


def classes(of: Any) -> list[Any]:
    inner = type("Inner", (of.Record,), {"x": of.Integer(), "y": of.String(required=True)})
    return [
        type("Empty", (of.Record,), {}),
        type("Plain", (of.Record,), {"b": of.Integer(), "a": of.String(), "c": of.Boolean(), "d": of.Double()}),
        type("Needed", (of.Record,), {"a": of.Long(required=True), "b": of.Float(), "c": of.Bytes(required=True)}),
        type("Nested", (of.Record,), {"one": inner(), "many": of.Array(inner()), "by": of.Map(of.Long())}),
        type("Told", (of.Record,), {"a": of.Integer(required_default=True), "n": of.Null()}),
        type("Spaced", (of.Record,), {"_avro_namespace": "a.b", "a": of.Integer()}),
        type("Chosen", (of.Record,), {"colour": of.CustomEnum(Colour), "more": of.Array(of.String())}),
    ]


def test_the_texts_are_those_of_pulsars_client() -> None:
    pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")
    for theirs, ours in zip(classes(pulsar.schema), classes(schema), strict=True):
        for kind in ("AvroSchema", "JsonSchema"):
            told = getattr(pulsar.schema, kind)(theirs)._schema_info.schema()
            assert getattr(schema, kind)(ours).info().data.decode() == told, theirs
    assert JsonSchema(classes(schema)[0]).info().type is SchemaType.JSON
