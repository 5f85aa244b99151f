"""Columns become payloads by the topic's schema; what is not of it is refused, with its column."""

import json
from datetime import UTC, date, datetime, time
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from magnetar.client.model.composite_schemas import PRIMITIVE_SCHEMAS
from magnetar.proto.errors import InvalidConfiguration, InvalidRequest
from magnetar.proto.schema import SchemaInfo, SchemaType
from magnetar.spark_connector.decoding import RowEncoder, check_schema_columns
from magnetar.spark_connector.options import parse_sink_options
from magnetar.spark_connector.shapes import TypedSchema, make_typed_schema
from tests.spark.test_decoding import AS_AVRO, AS_JSON, TOPIC, VALUE, avro, info, values

BOTH = [SchemaType.AVRO, SchemaType.JSON]


def spark_types(known: TypedSchema) -> StructType:
    return StructType([StructField(each.name, each.shape.spark) for each in known.record.fields])


def batch(known: TypedSchema, *rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), to_arrow_schema(spark_types(known), timezone="UTC"))


def payloads(known: TypedSchema, *rows: dict[str, Any]) -> list[bytes | None]:
    return RowEncoder(known).encode_rows(batch(known, *rows))


@pytest.mark.parametrize("kind", BOTH)
def test_each_type_is_written_as_it_is_read(kind: SchemaType) -> None:
    schema = info(kind)
    known = make_typed_schema(TOPIC, schema)
    check_schema_columns(spark_types(known), TOPIC, known)
    found = payloads(known, VALUE, VALUE | {"n": 1 << 40, "inner": None, "tags": []})
    if kind is SchemaType.AVRO:
        assert found[0] == avro(schema, AS_AVRO)
    else:
        assert json.loads(found[0] or b"") == AS_JSON
    assert values(schema, (None, found)) == [VALUE, VALUE | {"n": 1 << 40, "inner": None, "tags": []}]


@pytest.mark.parametrize("kind", BOTH)
def test_fields_without_a_column_are_their_default_or_null(kind: SchemaType) -> None:
    schema = info(kind, [
        {"name": "a", "type": "int"}, {"name": "b", "type": "string", "default": "none"},
        {"name": "c", "type": ["null", "int"]},
    ])  # fmt: skip
    known = make_typed_schema(TOPIC, schema)
    only = pa.RecordBatch.from_pylist([{"a": 1}], pa.schema([("a", pa.int32())]))
    written = RowEncoder(known).encode_rows(only)
    assert values(schema, (None, written)) == [{"a": 1, "b": "none", "c": None}]
    if kind is SchemaType.JSON:
        assert json.loads(written[0] or b"") == {"a": 1, "b": "none", "c": None}


ENUM = {"type": "enum", "name": "E", "symbols": ["RED"]}
UNFIT = {
    "column 'a' holds null": ("int", None),
    r"column 'a\.x' holds null": ({"type": "record", "name": "In", "fields": [{"name": "x", "type": "boolean"}]}, {}),
    r"column 'a\[\]' holds null": ({"type": "array", "items": "float"}, [1.0, None]),
    r"column 'a\{\}' holds null": ({"type": "map", "values": "boolean"}, [("k", None)]),
    "column 'a' holds 'BLUE', which is no symbol": (ENUM, "BLUE"),
    r"column 'a\[\]' holds 'BLUE', which is no symbol": ({"type": "array", "items": ENUM}, ["RED", "BLUE"]),
    "column 'a' holds a value that its field cannot": (
        {"type": "long", "logicalType": "timestamp-nanos"}, datetime(9999, 1, 1, tzinfo=UTC)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("says", UNFIT)
def test_a_row_that_the_schema_does_not_take_names_its_column(kind: SchemaType, says: str) -> None:
    type_, value = UNFIT[says]
    known = make_typed_schema(TOPIC, info(kind, [{"name": "a", "type": type_}]))
    with pytest.raises(InvalidRequest, match=says):
        payloads(known, {"a": value})


def test_json_has_no_number_for_what_is_none() -> None:
    """Encoders write null in their place, silently."""
    inner = {"type": "record", "name": "In", "fields": [{"name": "x", "type": ["null", "double"]}]}
    known = make_typed_schema(TOPIC, info(SchemaType.JSON, [{"name": "a", "type": inner}]))
    assert payloads(known, {"a": {"x": None}}) == [b'{"a":{"x":null}}']
    for wrong in (float("nan"), float("-inf")):
        with pytest.raises(InvalidRequest, match=r"column 'a\.x' holds .*no number of JSON"):
            payloads(known, {"a": {"x": wrong}})


def test_bytes_of_avro_keep_their_size() -> None:
    known = make_typed_schema(
        TOPIC, info(SchemaType.AVRO, [{"name": "a", "type": {"type": "fixed", "name": "F", "size": 2}}])
    )
    assert payloads(known, {"a": b"xy"}) == [b"xy"]
    with pytest.raises(InvalidRequest, match="a row does not fit the schema of its topic"):
        payloads(known, {"a": b"xyz"})


@pytest.mark.parametrize("kind", BOTH)
def test_times_are_cut_to_the_unit_of_the_schema(kind: SchemaType) -> None:
    schema = info(kind, [{"name": "a", "type": {"type": "long", "logicalType": "timestamp-millis"}}])
    written = payloads(make_typed_schema(TOPIC, schema), {"a": datetime(2026, 1, 1, 0, 0, 0, 1999, UTC)})
    assert values(schema, (None, written)) == [{"a": datetime(2026, 1, 1, 0, 0, 0, 1000, UTC)}]


@pytest.mark.parametrize(
    ("kind", "cell", "value"),
    [
        (SchemaType.STRING, "ü", "ü"),
        (SchemaType.INT8, -1, -1),
        (SchemaType.DOUBLE, 1.5, 1.5),
        (SchemaType.DATE, date(2026, 1, 2), date(2026, 1, 2)),
        (SchemaType.TIME, 1_500_000, time(0, 0, 1, 500_000)),
        (SchemaType.TIMESTAMP, datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
    ],
)
def test_a_single_value_is_the_column_value_and_null_is_no_value(kind: SchemaType, cell: Any, value: Any) -> None:
    known = make_typed_schema(TOPIC, SchemaInfo(type=kind))
    found = payloads(known, {"value": cell}, {"value": None})
    assert found == [PRIMITIVE_SCHEMAS[kind].encode(value), None]
    assert values(SchemaInfo(type=kind), (None, found)) == [{"value": cell}, {"value": None}]


WRONG_COLUMNS = {
    "column 'z' is no field of the schema of .*, which has a, b, c": [("a", IntegerType()), ("z", LongType())],
    "column 'a' is bigint, and in the schema of .* it is int: cast it": [("a", LongType())],
    "column 'a' is missing": [("b", StringType())],
    "column 'c' is array<bigint>, and .* array<int>": [("a", IntegerType()), ("c", ArrayType(LongType()))],
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("says", WRONG_COLUMNS)
def test_a_wrong_column_is_named_before_anything_runs(kind: SchemaType, says: str) -> None:
    known = make_typed_schema(TOPIC, info(kind, [
        {"name": "a", "type": "int"}, {"name": "b", "type": "string", "default": "none"},
        {"name": "c", "type": ["null", {"type": "array", "items": "int"}]},
    ]))  # fmt: skip
    with pytest.raises(InvalidConfiguration, match=says):
        check_schema_columns(StructType([StructField(*each) for each in WRONG_COLUMNS[says]]), TOPIC, known)
    read = [("a", IntegerType()), ("__key", BinaryType()), ("__offset", LongType())]
    check_schema_columns(StructType([StructField(*each) for each in read]), TOPIC, known)


def test_a_sink_by_the_registry_has_one_topic() -> None:
    with pytest.raises(InvalidConfiguration, match="a sink with schema=registry needs the option 'topic'"):
        parse_sink_options({"service.url": "magnetar://localhost:7650", "schema": "registry"})
