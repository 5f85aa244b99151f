"""The sink without Spark: Arrow batches to a broker in memory; it waits for room, and says what no message can hold."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import pyarrow as pa

from magnetar.proto.entry import decode_message_columns, parse_entry
from magnetar.proto.errors import InvalidRequest, TopicTerminated
from magnetar.spark_connector.options import parse_sink_options
from magnetar.spark_connector.sink import _write
from tests.client.conftest import fake  # noqa: F401
from tests.client.fake_broker import FakeBroker

TOPIC = "persistent://public/default/t"
Fake = tuple[str, FakeBroker]


def write(url: str, *batches: pa.RecordBatch, topic: str | None = "t", **producer: object) -> int:
    options = {"service.url": url} | ({} if topic is None else {"topic": topic})
    options |= {f"magnetar.producer.{name}": str(value) for name, value in producer.items()}
    return _write(parse_sink_options(options), iter(batches)).rows


def rows(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def stored(broker: FakeBroker, topic: str = TOPIC) -> Iterator[tuple[Any, bytes]]:
    for entry in broker.topic(topic).entries:
        _, header = parse_entry(entry)
        yield from zip(*decode_message_columns(header, entry), strict=True)


def numbers(count: int) -> pa.Array:
    return pa.array([str(i).encode() for i in range(count)], pa.binary())


def test_the_sink_waits_when_more_rows_come_than_may_be_under_way(fake: Fake) -> None:  # noqa: F811
    url, broker = fake
    assert write(url, rows(value=numbers(5_000)), max_pending_messages=100) == 5_000
    assert [payload for _, payload in stored(broker)] == numbers(5_000).to_pylist()


def test_one_key_of_many_partitions_waits_for_its_partition_alone(fake: Fake) -> None:  # noqa: F811
    url, broker = fake
    broker.partition_counts["hundred"] = 100
    batch = rows(value=numbers(10_000), key=pa.array([b"one"] * 10_000, pa.binary()))
    assert write(url, batch, batch, batch, batch, batch, batch, topic="hundred") == 60_000
    assert [topic.messages for topic in broker.topics.values() if topic.messages] == [60_000]


def test_what_waits_for_room_ends_when_the_broker_refuses(fake: Fake) -> None:  # noqa: F811
    url, broker = fake
    broker.publish_errors.append(TopicTerminated("over"))
    with pytest.raises(Exception, match="TopicTerminated"):
        write(url, rows(value=numbers(500)), max_pending_messages=100)


MICROS = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
UNFIT = {
    "before-1970": ({"eventTime": pa.array([-1_000_000], pa.int64()).cast(MICROS)}, "eventTime.*1970"),
    "no-text-in-properties": (
        {"properties": pa.MapArray.from_arrays([0, 1], pa.array([b"k"]).cast(pa.string()),
                                               pa.array([b"\xff"], pa.binary()).view(pa.string()))},
        "'properties'.*UTF-8",
    ),
    "header-without-a-key": ({"headers": pa.array([[{"key": None, "value": b"x"}]], HEADERS)}, "'headers'.*key"),
    "null-in-headers": ({"headers": pa.array([[{"key": "a", "value": b"x"}, None]], HEADERS)}, "'headers'.*null"),
    "header-that-is-no-text": ({"headers": pa.array([[{"key": "a", "value": b"\xff"}]], HEADERS)}, "'headers'.*UTF-8"),
    "negative-partition": ({"partition": pa.array([-1], pa.int64())}, "partition -1"),
    "no-topic": ({"topic": pa.array([None], pa.string())}, "'topic' is null"),
    "wrong-topic": ({"topic": pa.array(["a/b"], pa.string())}, "'topic'.*a/b"),
    "topic-that-is-no-text": ({"topic": pa.array([b"\xff"], pa.binary()).view(pa.string())}, "'topic'.*UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_a_row_that_no_message_can_hold_is_refused_by_its_column(fake: Fake, case: str) -> None:  # noqa: F811
    column, says = UNFIT[case]
    topic = None if "topic" in column else "t"
    with pytest.raises(InvalidRequest, match=says):
        write(fake[0], rows(value=pa.array([b"x"], pa.binary()), **column), topic=topic)


def test_nulls_of_a_row_have_their_rule(fake: Fake) -> None:  # noqa: F811
    """A null value is a tombstone, a null key none, a null in a map or a header an empty text; 1970 itself: not set."""
    url, broker = fake
    batch = rows(
        value=pa.array([None, b"", b"x"], pa.binary()),
        key=pa.array([None, b"", b"\xff"], pa.binary()),
        properties=pa.array([None, [("a", None)], [("a", "1"), ("\0", "\0")]], PROPERTIES),
        eventTime=pa.array([None, datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)], MICROS),
        partition=pa.array([None, 0, 0], pa.int64()),
    )
    assert write(url, batch) == 3
    (one, _), (two, empty), (three, x) = stored(broker)
    assert (one.null_value, two.null_value, empty, x) == (True, False, b"", b"x")
    assert (one.HasField("partition_key"), two.partition_key, three.partition_key_b64_encoded) == (False, "", True)
    assert [[(p.key, p.value) for p in m.properties] for m in (one, two, three)] == [
        [], [("a", "")], [("a", "1"), ("\0", "\0")],
    ]  # fmt: skip
    assert [m.event_time for m in (one, two, three)] == [0, 0, 253_402_214_400_000]


def test_text_that_is_no_utf_8_is_written_as_the_bytes_that_it_is(fake: Fake) -> None:  # noqa: F811
    url, broker = fake
    broken = pa.array([b"a\xff"], pa.binary()).view(pa.string())
    assert write(url, rows(value=broken)) == 1
    assert write(url, rows(value=broken, key=broken)) == 1
    assert [(payload, m.partition_key_b64_encoded) for m, payload in stored(broker)] == [
        (b"a\xff", False), (b"a\xff", True),
    ]  # fmt: skip
