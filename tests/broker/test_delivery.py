"""Deliveries written by hand are what protobuf would write."""

from __future__ import annotations

import pytest

from magnetar.broker.cache import StoredEntry
from magnetar.broker.services.delivery import delivery_item, read_item
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_000, 16_383, 16_384, 3_000_000])
@pytest.mark.parametrize(("count", "acked"), [(0, []), (3, [0, 5, 300])])
@pytest.mark.parametrize("position", [(0, 0), (7, 3), (1 << 40, 1 << 31)])
def test_a_delivery_parses_as_what_it_was(
    size: int, count: int, acked: list[int], position: tuple[int, int]
) -> None:
    frames = (b"ab"[: min(2, size)], memoryview(bytes(max(0, size - 2))))
    entry = StoredEntry(Position(*position), frames, count=1, index=0, size=size, timestamp_ms=0)
    delivery = wire.Delivery(
        ledger_id=position[0], entry_id=position[1], redelivery_count=count, acked_batch_indexes=acked,
        entry=entry.payload,
    )  # fmt: skip
    assert wire.ConsumeReply.FromString(delivery_item(entry, count, acked)) == wire.ConsumeReply(delivery=delivery)
    if not count:
        assert wire.ReadReply.FromString(read_item(300, entry)) == wire.ReadReply(request_id=300, entry=delivery)
