"""Entries become Arrow batches of exactly Spark's types, each message once."""

import subprocess
import sys
from base64 import b64encode
from struct import pack

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from magnetar.client.consume.ranges import StoredEntry
from magnetar.proto.entry import encode_batch, encode_broker_part, encode_entry, encode_item_prefix
from magnetar.proto.entry_pb2 import KeyValue, MessageIdData, MessageMetadata, SingleMessageMetadata
from magnetar.proto.errors import InvalidConfiguration
from magnetar.proto.filters import parse_filter
from magnetar.spark_connector.options import parse_source_options
from magnetar.spark_connector.rows import DecodedEntry, RowBuilder, check_source_columns, make_default_columns

BASE = {"service.url": "magnetar://localhost:7650", "topic": "t"}
PARTITION = ("persistent://public/default/t", 2)


def metadata(**fields: object) -> MessageMetadata:
    return MessageMetadata(producer_name="p", sequence_id=0, publish_time=1_700_000_000_123, **fields)


def delivery(first_index: int, *singles: tuple[SingleMessageMetadata, bytes]) -> StoredEntry:
    items: list[bytes] = []
    for single, payload in singles:
        single.payload_size = len(payload)
        items += [encode_item_prefix(single), payload]
    entry = encode_broker_part(first_index + len(singles) - 1, 5) + encode_batch(metadata(), items, len(singles))
    return StoredEntry(2, 7, 9, entry)


def plain(first_index: int, *payloads: bytes) -> StoredEntry:
    return delivery(first_index, *((SingleMessageMetadata(), payload) for payload in payloads))


def build(deliveries: list[StoredEntry], first: int, end: int, **options: str) -> pa.RecordBatch:
    parsed = parse_source_options(BASE | options, streaming=True)
    builder, at = RowBuilder(make_default_columns(parsed), PARTITION, 2), first
    for each in deliveries:
        at = builder.add(DecodedEntry(each), at, end)
    return builder.finish()


def test_the_schema_is_sparks_to_the_last_flag() -> None:
    for kafka in ("magnetar", "kafka"):
        schema = make_default_columns(
            parse_source_options(BASE | {"columns": kafka, "includeProperties": "true"}, streaming=True)
        )
        batch = build([plain(0, b"x")], 0, 1, columns=kafka, includeProperties="true")
        assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))


def test_offsets_are_the_indexes_and_ranges_are_cut_inside_entries() -> None:
    batch = build([plain(10, b"a", b"b", b"c"), plain(13, b"d", b"e")], 11, 14)
    assert batch["offset"].to_pylist() == [11, 12, 13]
    assert batch["value"].to_pylist() == [b"b", b"c", b"d"]


def test_message_ids_are_pulsars_and_count_from_the_entrys_first_message() -> None:
    ids = build([plain(10, b"a", b"b", b"c")], 11, 13)["messageId"].to_pylist()
    expected = [MessageIdData(ledgerId=7, entryId=9, partition=2, batch_index=i) for i in (1, 2)]
    assert [MessageIdData.FromString(each) for each in ids] == expected


def test_messages_that_differ_in_size_alone_share_their_metadata() -> None:
    """A row that has a key of its own among them keeps it."""
    sizes = [b"x" * (number % 3) for number in range(30)]
    assert DecodedEntry(plain(0, *sizes)).uniform
    keyed = [(SingleMessageMetadata(partition_key="k" if number == 7 else None), b"x") for number in range(30)]
    assert not DecodedEntry(delivery(0, *keyed)).uniform
    with_event = [(SingleMessageMetadata(event_time=number), b"x") for number in range(30)]
    assert not DecodedEntry(delivery(0, *with_event)).uniform
    assert build([delivery(0, *keyed)], 0, 30)["key"].to_pylist() == [*[None] * 7, b"k", *[None] * 22]


def test_keys_properties_times_and_tombstones() -> None:
    full = SingleMessageMetadata(partition_key="k", event_time=1_000, properties=[KeyValue(key="a", value="b")])
    binary = SingleMessageMetadata(partition_key=b64encode(b"\xff").decode(), partition_key_b64_encoded=True)
    batch = build([delivery(0, (full, b"v"), (binary, b""), (SingleMessageMetadata(null_value=True), b""))], 0, 3)
    assert batch["key"].to_pylist() == [b"k", b"\xff", None]
    assert batch["value"].to_pylist() == [b"v", b"", None]
    assert batch["properties"].to_pylist() == [[("a", "b")], [], []]
    assert [t and t.timestamp() for t in batch["eventTime"].to_pylist()] == [1.0, None, None]
    assert {t.timestamp() for t in batch["publishTime"].to_pylist()} == {1_700_000_000.123}


YEAR_1_MS, YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999
TIMES = {
    0: None,  # not set
    1: 1,
    YEAR_9999_MS: YEAR_9999_MS,
    YEAR_9999_MS + 1: None,
    1_700_000_000_000_000_000: None,  # given in ns
    (1 << 64) - 5_000: -5_000,  # before 1970, as Pulsar's Java and C++ clients write it
    (1 << 64) + YEAR_1_MS: YEAR_1_MS,
    (1 << 64) + YEAR_1_MS - 1: None,
    1 << 63: None,
}


def test_only_what_a_filter_wants_becomes_rows_and_all_of_the_range_is_done() -> None:
    singles = []
    for region in ("us", "eu", "eu", "us", "eu", "us"):
        single = SingleMessageMetadata()
        single.properties.append(KeyValue(key="region", value=region))
        singles.append((single, region.encode()))
    parsed = parse_source_options(BASE | {"filter": "region = 'eu'"}, streaming=True)
    assert parsed.wanted is not None
    builder = RowBuilder(make_default_columns(parsed), PARTITION, 2, None, parse_filter(parsed.wanted))
    at = 2
    for first in (0, 6):
        at = builder.add(DecodedEntry(delivery(first, *singles)), at, 11)
    assert at == 11
    batch = builder.finish()
    assert batch["offset"].to_pylist() == [2, 4, 7, 8, 10]
    assert batch["value"].to_pylist() == [b"eu"] * 5
    assert [dict(each)["region"] for each in batch["properties"].to_pylist()] == ["eu"] * 5


def test_an_event_time_that_no_timestamp_holds_is_null_and_counted() -> None:
    singles = [(SingleMessageMetadata(event_time=each), b"v") for each in TIMES]
    parsed = parse_source_options(BASE, streaming=True)
    builder = RowBuilder(make_default_columns(parsed), PARTITION, 2)
    builder.add(DecodedEntry(delivery(0, *singles)), 0, len(singles))
    found = builder.finish()["eventTime"].view(pa.int64()).to_pylist()
    assert found == [None if ms is None else ms * 1000 for ms in TIMES.values()]
    assert builder.unfit == {"eventTime": 4}


def test_a_publish_time_that_no_timestamp_holds_is_the_nearest_one_and_counted() -> None:
    builder = RowBuilder(make_default_columns(parse_source_options(BASE, streaming=True)), PARTITION, 2)
    for index, ms in enumerate([5, 1 << 62, (1 << 64) - 1]):
        head = MessageMetadata(producer_name="p", sequence_id=0, publish_time=ms)
        entry = encode_broker_part(index, 5) + encode_entry(head, b"v")
        builder.add(DecodedEntry(StoredEntry(2, 1, index, entry)), index, index + 1)
    found = builder.finish()["publishTime"].view(pa.int64()).to_pylist()
    assert found == [5_000, YEAR_9999_MS * 1000, -1_000]
    assert builder.unfit == {"publishTime": 1}


def test_a_key_that_is_called_base64_and_is_not_comes_as_its_text_and_is_counted() -> None:
    wrong = SingleMessageMetadata(partition_key="no base64!", partition_key_b64_encoded=True)
    builder = RowBuilder(make_default_columns(parse_source_options(BASE, streaming=True)), PARTITION, 2)
    builder.add(DecodedEntry(delivery(0, (wrong, b"v"))), 0, 1)
    assert builder.finish()["key"].to_pylist() == [b"no base64!"]
    assert builder.unfit == {"key": 1}


def test_a_value_that_is_no_text_comes_with_replacement_characters_and_is_counted() -> None:
    parsed = parse_source_options(BASE | {"valueFormat": "string"}, streaming=True)
    builder = RowBuilder(make_default_columns(parsed), PARTITION, 2)
    builder.add(DecodedEntry(plain(0, b"a\xffb", b"whole", b"")), 0, 3)
    assert builder.finish()["value"].to_pylist() == ["a\ufffdb", "whole", ""]
    assert builder.unfit == {"value": 1}


def test_of_a_property_that_comes_twice_the_last_one_counts_as_in_the_sdk() -> None:
    twice = SingleMessageMetadata(
        properties=[KeyValue(key="a", value="1"), KeyValue(key="\0", value="\0"), KeyValue(key="a", value="2")]
    )
    assert build([delivery(0, (twice, b"v"))], 0, 1)["properties"].to_pylist() == [[("a", "2"), ("\0", "\0")]]


def test_what_messages_carry_beside_their_payload_counts_for_the_size_of_a_batch() -> None:
    heavy = SingleMessageMetadata(properties=[KeyValue(key="a", value="x" * 100_000)])
    builder = RowBuilder(make_default_columns(parse_source_options(BASE, streaming=True)), PARTITION, 2)
    for first in range(0, 200, 40):
        builder.add(DecodedEntry(delivery(first, *((heavy, b"") for _ in range(40)))), first, first + 40)
    assert builder.is_full


def test_an_entry_that_is_no_batch_is_one_row() -> None:
    entry = encode_broker_part(4, 5) + encode_entry(metadata(partition_key="k"), b"alone")
    batch = build([StoredEntry(2, 1, 2, entry)], 4, 5)
    assert batch["value"].to_pylist() == [b"alone"]
    assert MessageIdData.FromString(batch["messageId"].to_pylist()[0]).batch_index == -1


def test_kafkas_columns() -> None:
    head = SingleMessageMetadata(properties=[KeyValue(key="a", value="b")])
    batch = build(
        [delivery(0, (head, b"v"), (SingleMessageMetadata(), b"w"))], 0, 2, columns="kafka", includeHeaders="true"
    )
    names = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    assert batch.schema.names == names
    assert batch["headers"].to_pylist() == [[{"key": "a", "value": b"b"}], None]


def test_values_as_text() -> None:
    assert build([plain(0, "ä".encode())], 0, 1, valueFormat="string")["value"].to_pylist() == ["ä"]


def test_a_schema_of_the_users_own_prunes_columns() -> None:
    schema = StructType([StructField("offset", LongType(), False), StructField("value", BinaryType())])
    check_source_columns(schema, parse_source_options(BASE, streaming=True))
    builder = RowBuilder(schema, PARTITION, 2)
    builder.add(DecodedEntry(plain(0, b"x")), 0, 1)
    assert builder.finish().to_pydict() == {"offset": [0], "value": [b"x"]}


@pytest.mark.parametrize(
    ("name", "type_", "says"), [("color", LongType(), "does not exist"), ("offset", StringType(), "is bigint")]
)
def test_columns_that_cannot_be_are_refused(name: str, type_: object, says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        check_source_columns(StructType([StructField(name, type_)]), parse_source_options(BASE, streaming=True))


@pytest.mark.parametrize("kafka", ["magnetar", "kafka"])
def test_a_key_and_a_property_that_are_no_text_are_rows_like_others(kafka: str) -> None:
    foreign, other = SingleMessageMetadata(partition_key="~~~~", payload_size=1), SingleMessageMetadata(payload_size=1)
    foreign.properties.add(key="p", value="}}}}")
    encoded = foreign.SerializeToString().replace(b"~~~~", b"\xff\x00\xfe\x80").replace(b"}}}}", b"caf\xe9")
    items = [pack(">I", len(encoded)) + encoded, b"x", encode_item_prefix(other), b"y"]
    stored = StoredEntry(2, 7, 9, encode_broker_part(1, 5) + encode_batch(metadata(compression=3), items, 2))
    batch = build([stored], 0, 2, columns=kafka, includeProperties="true")
    assert batch["value"].to_pylist() == [b"x", b"y"]
    assert batch["key"].to_pylist() == [b"\xff\x00\xfe\x80", None]
    if kafka == "kafka":
        assert batch["headers"].to_pylist()[0] == [{"key": "p", "value": "caf\ufffd".encode()}]
    else:
        assert batch["properties"].to_pylist()[0] == [("p", "caf\ufffd")]


def test_a_process_of_spark_that_plans_or_commits_loads_no_pandas() -> None:
    """pyarrow imports it for the first array that it makes of Python values: half of the start of such a process."""
    loads = "import magnetar.spark_connector.sink, magnetar.spark_connector.source, sys; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
