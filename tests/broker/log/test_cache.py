"""The tail cache: what it keeps, and that it weighs what its entries take in memory."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from magnetar.broker.log.cache import StoredEntry, TailCache
from magnetar.proto.entry import encode_broker_part, encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position

ENTRIES = 2000
TIME_MS = 1_800_000_000_000


def published(number: int) -> StoredEntry:
    metadata = MessageMetadata(
        producer_name="p", sequence_id=number, publish_time=1, deliver_at_time=TIME_MS + number,
        partition_key=f"k{number}",
    )  # fmt: skip
    frames = (encode_broker_part(number, TIME_MS + number), encode_entry(metadata, b"x" * 100))
    return StoredEntry(
        Position(5, number), frames, count=1, index=number, size=sum(map(len, frames)), timestamp_ms=TIME_MS + number,
        deliver_at_ms=metadata.deliver_at_time,
    )  # fmt: skip


def read(number: int) -> StoredEntry:
    return StoredEntry.parse(Position(5, number), published(number).payload)


@pytest.mark.parametrize("made", [published, read])
def test_an_entry_weighs_what_it_takes_in_memory(made: Callable[[int], StoredEntry]) -> None:
    """Of messages of 100 bytes the objects are four fifths."""
    made(0)
    cache = TailCache(1 << 30)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000, 1000 + ENTRIES):
            cache.add(made(number))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 < taken / cache.bytes < 1.2, f"{taken / ENTRIES} bytes an entry, weighed {cache.bytes / ENTRIES}"


def test_the_oldest_go_when_the_bound_is_passed_and_a_ledger_when_it_is_forgotten() -> None:
    weight = published(100).memory_bytes
    cache = TailCache(10 * weight)
    for number in range(100, 115):
        cache.add(published(number))
    assert cache.statistics() == {"bytes": 10 * weight, "bytes_max": 10 * weight, "entries": 10}
    assert cache.get(Position(5, 104)) is None
    assert [entry.position.entry_id for entry in cache.get_cached_entries(Position(5, 105), 114, 100, 1 << 20)] == [
        *range(105, 115)
    ]
    cache.discard(5)
    assert cache.statistics() == {"bytes": 0, "bytes_max": 10 * weight, "entries": 0}
