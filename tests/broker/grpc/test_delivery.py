"""Deliveries written by hand are what protobuf would write."""

import pytest

from magnetar.broker.grpc.translate import SHARED_ITEM_BYTES_MAX, encode_deliveries, encode_read_reply
from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.subscription.core.dispatch import Delivery
from magnetar.broker.subscription.core.policy import Member
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
    (item,) = encode_deliveries([Delivery(Member(1, "c"), entry, count, acked)], b"\x08\x07")
    assert wire.ServerFrame.FromString(b"".join(item)) == wire.ServerFrame(id=7, delivery=delivery)
    if not count:
        item = encode_read_reply(300, entry)
        assert wire.ReadReply.FromString(b"".join(item)) == wire.ReadReply(request_id=300, entry=delivery)


def stored(ledger_id: int, entry_id: int, size: int = 1000) -> StoredEntry:
    body = bytes([entry_id % 251]) * size
    position, frames = Position(ledger_id, entry_id), (body[:10], body[10:])
    return StoredEntry(position, frames, count=1, index=0, size=size, timestamp_ms=0)


def test_what_is_delivered_for_the_first_time_goes_together_and_in_order() -> None:
    member = Member(1, "c")
    entries = [stored(7, entry_id) for entry_id in (0, 1, 300)] + [stored(8, 5), stored(8, 6), stored(8, 7, 5000)]
    deliveries = [Delivery(member, entry, 0, []) for entry in entries]
    deliveries.insert(5, Delivery(member, stored(8, 9), 2, []))
    deliveries += [Delivery(member, stored(8, 10 + number, SHARED_ITEM_BYTES_MAX // 2), 0, []) for number in range(4)]
    items = [wire.ServerFrame.FromString(b"".join(item)) for item in encode_deliveries(deliveries, b"\x08\x07")]
    several = [item.deliveries for item in items if item.HasField("deliveries")]
    assert [(each.ledger_id, list(each.entry_ids)) for each in several] == [
        (7, [0, 1, 300]), (8, [5, 6]), (8, [7, 10, 11]), (8, [12, 13]),
    ]  # fmt: skip
    assert [item.WhichOneof("kind") for item in items] == ["deliveries", "deliveries", "delivery"] + ["deliveries"] * 2
    assert items[2].delivery.redelivery_count == 2
    found: list[bytes] = []
    for item in items:
        found += item.deliveries.entries or [item.delivery.entry]
    assert found == [each.entry.payload for each in deliveries if isinstance(each.entry, StoredEntry)]
