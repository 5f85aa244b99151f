"""Payloads become columns by the schema that wrote them; what is not of it is named, or null."""

import io
import json
import random
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import fastavro
import pyarrow as pa
from pyspark.sql.types import StructType

from magnetar.client.common.errors import InvalidMessage
from magnetar.client.consume.ranges import StoredEntry
from magnetar.proto.entry import encode_batch, encode_broker_part, encode_item_prefix
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.errors import SchemaNotFound
from magnetar.proto.schema import SchemaInfo, SchemaType, encode_version
from magnetar.spark_connector import decoding as of_decoding
from magnetar.spark_connector.decoding import ColumnDecoder
from magnetar.spark_connector.options import parse_source_options
from magnetar.spark_connector.rows import DecodedEntry, RowBuilder, list_metadata_columns
from magnetar.spark_connector.shapes import make_typed_schema, merge_schema_columns

TOPIC = "persistent://public/default/t"
OPTIONS = parse_source_options(
    {"service.url": "magnetar://localhost:7650", "topic": "t", "schema": "registry"}, streaming=True
)
FIELDS = [
    {"name": "b", "type": "boolean"},
    {"name": "i", "type": "int"},
    {"name": "n", "type": ["null", "long"], "default": None},
    {"name": "f", "type": "float"},
    {"name": "class", "type": "double"},  # a word of Python's
    {"name": "s", "type": "string"},
    {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["RED", "BLUE"]}},
    {"name": "again", "type": ["null", "E"], "default": None},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 2}},
    {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
    {"name": "counts", "type": {"type": "map", "values": "int"}},
    {"name": "inner", "type": ["null", {"type": "record", "name": "Inner", "fields": [
        {"name": "x", "type": "int"},
        {"name": "when", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
        {"name": "more", "type": {"type": "map", "values": {"type": "array", "items": "long"}}},
    ]}], "default": None},
]  # fmt: skip
VALUE = {
    "b": True, "i": -5, "n": None, "f": 0.5, "class": 2.25, "s": "grün", "e": "BLUE", "again": "RED",
    "day": date(2026, 11, 24), "at": datetime(2026, 11, 24, 1, 2, 3, 4000, UTC),
    "local": datetime(1969, 12, 31, 23, 59, 59, 999_999), "price": Decimal("12.50"), "tags": ["a", None],
    "counts": [("k", 7)],
    "inner": {"x": 1, "when": datetime(2000, 1, 1, tzinfo=UTC), "more": [("m", [1, 2])]},
}  # fmt: skip
AS_JSON = VALUE | {
    "day": 20781, "at": 1_795_482_123_004, "local": -1, "price": 12.5, "counts": {"k": 7},
    "inner": {"x": 1, "when": 946_684_800_000_000, "more": {"m": [1, 2]}},
}  # fmt: skip
AS_AVRO = AS_JSON | {"price": Decimal("12.50")}


def info(type_: SchemaType, fields: list[dict[str, Any]] | None = None, **more: Any) -> SchemaInfo:
    definition = {"type": "record", "name": "R", "fields": FIELDS if fields is None else fields, **more}
    return SchemaInfo(type=type_, data=json.dumps(definition).encode(), name="R")


def avro(info: SchemaInfo, value: Any) -> bytes:
    """Times are numbers here: fastavro takes both."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(info.data)), value)
    return out.getvalue()


def rows(
    reader: SchemaInfo, *written: tuple[int | None, list[bytes | None]], strict: bool = True,
    versions: Mapping[int, SchemaInfo] = {},
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """The rows of entries with these payloads, each of a version; and how many were not of their schema."""
    def schema(version: int) -> SchemaInfo:
        if version not in versions:
            raise SchemaNotFound(f"no version {version}")
        return versions[version]

    known = make_typed_schema(TOPIC, reader)
    decoding = ColumnDecoder(known, schema, is_strict=strict)
    builder = RowBuilder(merge_schema_columns({TOPIC: known}, list_metadata_columns(OPTIONS)), (TOPIC, 0), -1, decoding)
    first = 0
    for version, payloads in written:
        items: list[bytes] = []
        for payload in payloads:
            single = SingleMessageMetadata(payload_size=len(payload or b""), null_value=payload is None)
            items += [encode_item_prefix(single), payload or b""]
        metadata = MessageMetadata(
            producer_name="p", sequence_id=0, publish_time=1, schema_version=encode_version(version)
        )
        entry = encode_broker_part(first + len(payloads) - 1, 5) + encode_batch(metadata, items, len(payloads))
        builder.add(DecodedEntry(StoredEntry(1, 2, 3, entry)), first, 1 << 40)
        first += len(payloads)
    batch = builder.finish()
    assert batch["__offset"].to_pylist() == list(range(first))
    batch.validate(full=True)
    return batch.to_pylist(), builder.unfit["schema"]


def values(*given: Any, **more: Any) -> list[dict[str, Any]]:
    found, unfit = rows(*given, **more)
    assert not unfit
    return list(map(fields_of, found))


def fields_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("__")}


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
def test_each_type_has_its_column_in_both_forms(kind: SchemaType) -> None:
    schema = info(kind)
    payload = json.dumps(AS_JSON).encode() if kind is SchemaType.JSON else avro(schema, AS_AVRO)
    found = values(schema, (None, [payload, None, payload]))
    assert found == [VALUE, dict.fromkeys(VALUE), VALUE]


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
def test_versions_in_a_batch_are_each_read_by_their_writers(kind: SchemaType) -> None:
    """A field that is new has its default in what is older; one that was dropped is left out; ints become longs."""
    old = info(kind, [{"name": "gone", "type": "string"}, {"name": "n", "type": "int"}], name="Other")
    nested = {"type": "record", "name": "In", "fields": [{"name": "y", "type": "int"}]}
    new = info(kind, [
        {"name": "n", "type": "long"}, {"name": "added", "type": "string", "default": "none"},
        {"name": "list", "type": {"type": "array", "items": "int"}, "default": [1]},
        {"name": "in", "type": nested, "default": {"y": 3}},
    ])  # fmt: skip
    before = {"gone": "x", "n": 1}
    after = {"n": 1 << 40, "added": "there", "list": [], "in": {"y": 4}}
    if kind is SchemaType.JSON:
        encoded = [json.dumps(each).encode() for each in (before, after)]
    else:
        encoded = [avro(old, before), avro(new, after)]
    found = values(new, (0, encoded[:1]), (1, encoded[1:]), (0, encoded[:1]), versions={0: old, 1: new})
    told = {"n": 1, "added": "none", "list": [1], "in": {"y": 3}}
    assert found == [told, after, told]


def test_a_field_that_json_lacks_and_that_has_no_default_is_null() -> None:
    fields = [{"name": "a", "type": "int"}, {"name": "b", "type": ["null", "int"]}]
    assert values(info(SchemaType.JSON, fields), (None, [b'{"other":[{}]}'])) == [{"a": None, "b": None}]


def test_enums_of_pulsars_python_client_are_their_values() -> None:
    fields = [{"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["RED"]}}]
    assert values(info(SchemaType.JSON, fields), (None, [b'{"e":1}', b'{"e":"RED"}'])) == [{"e": "1"}, {"e": "RED"}]


WRONG = {
    "no JSON": b"{", "two values": b"{}{}", "no object": b"[1]", "a text": b'{"i":"1"}',
    "too large": b'{"i":2147483648}', "no UTF-8": b'{"s":"\xff"}', "digits": b'{"price":1.234}',
    "a huge number": b'{"price":1e999999999}', "no number": b'{"price":"NaN"}', "not a number": b'{"f":NaN}',
    "a time": b'{"at":9223372036854775807}', "a null": b"null", "an open text": b'{"s":"}',
    "deep": b'{"other":' * 100_000, "inside": b'{"inner":{"x":{}}}', "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG)
def test_a_payload_that_is_not_of_its_schema_is_named_or_null(payload: bytes) -> None:
    good, schema = json.dumps(AS_JSON).encode(), info(SchemaType.JSON)
    with pytest.raises(InvalidMessage, match=rf"^message 1 of {TOPIC} partition 0 .*schemaErrors=null"):
        rows(schema, (None, [good, payload, good]))
    found, unfit = rows(schema, (None, [good, payload, good]), strict=False)
    assert unfit == 1
    assert found[0]["s"] == found[2]["s"] == "grün"
    assert all(value is None for name, value in found[1].items() if not name.startswith("__"))


PAIRS = {
    "one in two": [b'{"i":1', b'"n":2}'], "two in one, one in two": [b'{"i":1}{"i":2}', b'{"s":', b'"x"}'],
    "closed inside": [b'{"inner":{"x":1}', b'{"inner":{"x":2}}}'], "text over two": [b'{"s":"}', b'{"}'],
    "nothing and two": [b" ", b"{}{}"], "two in one, and none": [b'{"i":1}\n{"i":2}', b"\n"],
}  # fmt: skip


@pytest.mark.parametrize("payloads", PAIRS.values(), ids=PAIRS)
def test_payloads_that_make_rows_only_together_are_not_of_their_schema(payloads: list[bytes | None]) -> None:
    """Each row is of its own message, whatever the messages beside it hold."""
    good = b'{"i":7}'
    found, unfit = rows(info(SchemaType.JSON), (None, [*payloads, good]), strict=False)
    assert [row["i"] for row in found] == [*[None] * len(payloads), 7]
    assert unfit == len(payloads)


def test_json_beside_others_gives_what_it_gives_alone() -> None:
    """Also payloads that a stranger changed, pretty ones, and messages without a value."""
    rng, schema = random.Random(16), info(SchemaType.JSON)
    compact, pretty = json.dumps(AS_JSON).encode(), json.dumps(AS_JSON, indent=True).encode()
    fit = unfit = 0
    for _ in range(300):
        given: list[bytes | None] = [rng.choice((compact, pretty, None, b"{}", b"{ }")) for _ in range(4)]
        if rng.random() < 0.7:
            junk = bytearray(compact)
            for _ in range(rng.randint(1, 3)):
                junk[rng.randrange(len(junk))] = rng.choice(b'{}[]",:0123456789eE.-+\\\n nulltrue\xff\xc3NaInf')
            given[rng.randrange(4)] = bytes(junk)
        found = rows(schema, (None, given), strict=False)
        alone = [rows(schema, (None, [each, None]), strict=False) for each in given]
        assert list(map(fields_of, found[0])) == [fields_of(one[0][0]) for one in alone], given
        assert found[1] == sum(one[1] for one in alone)
        fit, unfit = fit + (not found[1]), unfit + (found[1] > 0)
    assert fit > 50
    assert unfit > 50


def test_what_is_inside_of_json_has_its_nulls_its_defaults_and_its_symbols() -> None:
    line = {"type": "record", "name": "Line", "fields": [
        {"name": "sku", "type": "string"}, {"name": "count", "type": "int", "default": 1},
        {"name": "tags", "type": ["null", {"type": "array", "items": "string"}], "default": None},
    ]}  # fmt: skip
    colour = {"type": "enum", "name": "Colour", "symbols": ["RED"]}
    schema = info(SchemaType.JSON, [
        {"name": "lines", "type": ["null", {"type": "array", "items": ["null", line]}], "default": None},
        {"name": "by", "type": {"type": "map", "values": ["null", "Line"]}},
        {"name": "colours", "type": {"type": "array", "items": colour}},
        {"name": "in", "type": {"type": "record", "name": "In", "fields": [
            {"name": "line", "type": ["null", "Line"]}
        ]}},
    ])  # fmt: skip
    full: dict[str, Any] = {
        "lines": [{"sku": "a", "count": 2, "tags": ["x"]}, None, {"sku": "b"}, {"tags": []}], "by": {"k": {"sku": "c"},
        "none": None}, "colours": ["RED", 7], "in": {"line": {"sku": "d"}},
    }  # fmt: skip
    empty: dict[str, Any] = {"lines": [], "by": {}, "colours": [], "in": {}}
    shown = {
        "lines": [
            {"sku": "a", "count": 2, "tags": ["x"]}, None, {"sku": "b", "count": 1, "tags": None},
            {"sku": None, "count": 1, "tags": []},
        ],
        "by": [("k", {"sku": "c", "count": 1, "tags": None}), ("none", None)], "colours": ["RED", "7"],
        "in": {"line": {"sku": "d", "count": 1, "tags": None}},
    }  # fmt: skip
    nothing = dict.fromkeys(full)
    given = [json.dumps(each).encode() for each in (full, empty, {}, full)]
    assert values(schema, (None, [*given, None])) == [
        shown, {"lines": [], "by": [], "colours": [], "in": {"line": None}}, nothing, shown, nothing,
    ]  # fmt: skip
    assert values(schema, (None, [b"{}", None])) == [nothing, nothing]
    assert values(schema, (None, given[1:2])) == [{"lines": [], "by": [], "colours": [], "in": {"line": None}}]


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
def test_rows_of_all_pieces_of_a_batch_are_there_in_order(kind: SchemaType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is named by its own offset: of what does not decode, and of what its column cannot hold."""
    monkeypatch.setattr(of_decoding, "ROWS_PER_PIECE", 4)
    time = {"type": "long", "logicalType": "timestamp-millis"}
    schema = info(kind, [{"name": "n", "type": "int"}, {"name": "at", "type": time}])

    def payload(value: int, at: int = 0) -> bytes:
        made = {"n": value, "at": at}
        return json.dumps(made).encode() if kind is SchemaType.JSON else avro(schema, made)

    entries = [(None, [payload(entry * 3 + number) for number in range(3)]) for entry in range(5)]
    assert [each["n"] for each in values(schema, *entries)] == list(range(15))
    entries[1][1][2], entries[3][1][1] = b"\xff", payload(0, 1 << 62)
    found, unfit = rows(schema, *entries, strict=False)
    assert [each["n"] for each in found] == [None if each in (5, 10) else each for each in range(15)]
    assert unfit == 2
    with pytest.raises(InvalidMessage, match=r"^message 5 of"):
        rows(schema, *entries)
    entries[1][1][2] = payload(5)
    with pytest.raises(InvalidMessage, match=r"^message 10 of"):
        rows(schema, *entries)


def test_a_message_of_another_type_or_of_an_unknown_version_is_not_of_its_schema() -> None:
    schema = info(SchemaType.AVRO, [{"name": "a", "type": "int"}])
    text = SchemaInfo(type=SchemaType.STRING)
    good = avro(schema, {"a": 1})
    with pytest.raises(InvalidMessage, match="written as STRING, and the query reads AVRO"):
        rows(schema, (3, [b"x"]), versions={3: text})
    with pytest.raises(InvalidMessage, match="no version 9"):
        rows(schema, (9, [good]))
    unlike = info(SchemaType.AVRO, [{"name": "a", "type": "string"}])
    found, unfit = rows(schema, (2, [avro(unlike, {"a": "x"})]), (None, [good]), strict=False, versions={2: unlike})
    assert (unfit, [row["a"] for row in found]) == (1, [None, 1])


SINGLES = {
    SchemaType.BOOLEAN: (b"\x01", True),
    SchemaType.INT8: (b"\xff", -1),
    SchemaType.INT64: ((5).to_bytes(8), 5),
    SchemaType.DOUBLE: (bytes.fromhex("3ff8000000000000"), 1.5),
    SchemaType.STRING: ("ü".encode(), "ü"),
    SchemaType.DATE: ((86_400_000).to_bytes(8), date(1970, 1, 2)),
    SchemaType.TIMESTAMP: ((1500).to_bytes(8), datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)),
    SchemaType.TIME: ((1500).to_bytes(8), 1_500_000),
}


@pytest.mark.parametrize("kind", SINGLES)
def test_single_values_are_the_column_value(kind: SchemaType) -> None:
    payload, value = SINGLES[kind]
    assert values(SchemaInfo(type=kind), (None, [payload, None])) == [{"value": value}, {"value": None}]
    found, unfit = rows(SchemaInfo(type=kind), (None, [payload + b"\xff", payload]), strict=False)
    assert (unfit, found[1]["value"]) == (1, value)


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
def test_bytes_that_a_stranger_changed_end_in_rows(kind: SchemaType) -> None:
    rng, schema = random.Random(15), info(kind)
    payload = json.dumps(AS_JSON).encode() if kind is SchemaType.JSON else avro(schema, AS_AVRO)
    junk: list[bytes | None] = []
    for _ in range(400):
        found = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            found[rng.randrange(len(found))] = rng.randrange(256)
        junk.append(bytes(found[: rng.choice((len(found), rng.randrange(len(found))))]))
    found, unfit = rows(schema, (None, [*junk, payload]), strict=False)
    assert len(found) == 401
    assert 0 < unfit < 401
    assert found[-1]["s"] == "grün"


def test_columns_that_a_query_does_not_name_are_not_decoded() -> None:
    known = make_typed_schema(TOPIC, info(SchemaType.JSON))
    decoding = ColumnDecoder(known, lambda version: known.info, is_strict=True)
    schema = StructType([each for each in list_metadata_columns(OPTIONS) if each.name == "__offset"])
    builder = RowBuilder(schema, (TOPIC, 0), -1, decoding)
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    entry = encode_batch(metadata, [encode_item_prefix(SingleMessageMetadata(payload_size=4)), b"junk"], 1)
    builder.add(DecodedEntry(StoredEntry(1, 2, 3, encode_broker_part(0, 5) + entry)), 0, 9)
    assert builder.finish().to_pylist() == [{"__offset": 0}]
    assert pa.types.is_int64(builder._schema[0].type)
