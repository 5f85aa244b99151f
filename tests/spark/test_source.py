"""The source without Spark: what it does with entries that cannot become rows, and with values that do not fit."""

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from magnetar.client.consume.ranges import StoredEntry
from magnetar.proto.entry import encode_broker_part, encode_entry, encode_item_prefix
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.errors import CorruptEntry, DataLost, NotAllowed
from magnetar.proto.names import TopicName
from magnetar.spark_connector import source
from magnetar.spark_connector.offsets import MessageRange
from magnetar.spark_connector.options import parse_source_options
from magnetar.spark_connector.rows import make_default_columns

TOPIC = "persistent://public/default/t"


def delivery(index: int, payload: bytes = b"v", **fields: object) -> StoredEntry:
    head = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **fields)
    entry = encode_broker_part(index, 5) + encode_entry(head, payload)
    return StoredEntry(-1, 7, index, entry)


def torn(index: int) -> StoredEntry:
    """A batch of two whose second item ends after the payload; the checksum is right."""
    item = encode_item_prefix(SingleMessageMetadata(payload_size=1)) + b"x"
    return delivery(
        index, item + encode_item_prefix(SingleMessageMetadata(payload_size=99)) + b"x", num_messages_in_batch=2
    )


class _Topics:
    def __init__(self, deliveries: list[StoredEntry], aborted: tuple[int, ...] = ()) -> None:
        self._deliveries = deliveries
        self._aborted = aborted

    def count_aborted(self, _partition: object, first: int, end: int) -> int:
        return sum(first <= index < end for index in self._aborted)

    def name(self, _partition: object) -> TopicName:
        return TopicName.parse(TOPIC)

    def read_range(self, _partition: object, _first: int, _end: int) -> Iterator[list[StoredEntry]]:
        yield self._deliveries


def offsets(monkeypatch: pytest.MonkeyPatch, deliveries: list[StoredEntry], end: int, **options: str) -> list[int]:
    monkeypatch.setattr(source, "get_query_connection", lambda _options: _Topics(deliveries))
    parsed = parse_source_options({"service.url": "magnetar://localhost", "topic": "t", **options}, streaming=True)
    task = source.RangeTask(MessageRange((TOPIC, 0), 0, end))
    batches = source._read(parsed, make_default_columns(parsed), task)
    return [offset for batch in batches for offset in batch["offset"].to_pylist()]


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (torn(3), CorruptEntry, r"messages 1 to 3 of .* \(7, 3\), cannot be read: .*failOnDataLoss=false"),
        (delivery(3, num_chunks_from_msg=2, chunk_id=0, uuid="u"), NotAllowed, r"messages 1 to 3 .* chunk"),
    ],
)
def test_an_entry_that_cannot_become_rows_ends_the_task_with_its_place_or_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: StoredEntry, error: type[Exception],
    says: str,
) -> None:
    deliveries = [delivery(0), bad, delivery(4)]
    with pytest.raises(error, match=says):
        offsets(monkeypatch, deliveries, 5)
    with caplog.at_level(logging.WARNING):
        assert offsets(monkeypatch, deliveries, 5, failOnDataLoss="false") == [0, 4]
    assert "messages 1 to 3" in caplog.text


def test_an_unreadable_entry_does_not_move_the_task_beyond_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offsets(monkeypatch, [delivery(0), torn(3)], 2, failOnDataLoss="false") == [0]


def test_a_task_logs_how_many_values_did_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nanoseconds = [delivery(index, event_time=1_700_000_000_000_000_000) for index in range(3)]
    with caplog.at_level(logging.WARNING):
        assert offsets(monkeypatch, nanoseconds, 3) == [0, 1, 2]
    assert "eventTime: 3" in caplog.text


@pytest.mark.parametrize(
    ("aborted", "lost"),
    [((1, 2, 4), None), ((1, 2), "1 of the messages 1 to 4"), ((), "3 of the messages 1 to 4"), ((0, 3, 9), "3 of")],
)
def test_indexes_of_aborted_messages_are_skipped_and_all_others_are_lost(
    monkeypatch: pytest.MonkeyPatch, aborted: tuple[int, ...], lost: str | None
) -> None:
    """Entries 0 and 3 of a range of five; what is aborted elsewhere counts for nothing."""
    parsed = parse_source_options({"service.url": "magnetar://localhost", "topic": "t"}, streaming=True)
    elsewhere = tuple(index for index in aborted if index not in (0, 3))
    monkeypatch.setattr(source, "get_query_connection", lambda _options: _Topics([delivery(0), delivery(3)], elsewhere))
    task = source.RangeTask(MessageRange((TOPIC, 0), 0, 5))
    found = source._read(parsed, make_default_columns(parsed), task)
    if lost is None:
        assert [offset for batch in found for offset in batch["offset"].to_pylist()] == [0, 3]
    else:
        with pytest.raises(DataLost, match=lost):
            list(found)
