"""Key_Shared and entries whose keys are long work to find: compressed to very little, or of very many messages."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.broker.log import unfolding
from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.server import Broker
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.compression import Compression
from magnetar.proto.entry import encode_batch, encode_item_prefix
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.names import Position
from magnetar.runtime.process import make_system_world
from tests.support.cluster import TestConsumer, TestProducer, client_part, cluster
from tests.support.steps import Steps, slowness

TOPIC = "persistent://public/default/t"
KEY_SHARED = wire.Subscribe.KEY_SHARED
STEP_S = 0.05
"""Ten times the rule (runtime/alarm.py), as in test_extreme_requests.py."""


def batch(sequence_id: int, sizes: list[int], *, keys: int = 1, kind: int = 0) -> bytes:
    parts: list[bytes] = []
    for number, size in enumerate(sizes):
        item = SingleMessageMetadata(partition_key=f"k{number % keys}", payload_size=size)
        parts += (encode_item_prefix(item), bytes(size))
    metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1000)
    if kind:
        metadata.compression = kind
    return encode_batch(metadata, parts, len(sizes))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps(monkeypatch)
    yield steps
    steps.close()


def as_once(broker: Broker) -> None:
    """The topic takes what declares to unfold to more than a message may have: earlier brokers stored it."""
    for producer in broker.topics[TOPIC].producers:
        producer.size_max = 64 << 20


LONG = [
    *((f"{Compression(kind).name}, 60 MiB", [6 << 20] * 10, 1, kind) for kind in (1, 2, 3, 4)),
    ("200,000 messages", [0] * 200_000, 10, 0),
    ("200,000 messages in some KiB", [0] * 200_000, 10, 2),
]


@pytest.mark.parametrize(("sizes", "keys", "kind"), [case[1:] for case in LONG], ids=[case[0] for case in LONG])
async def test_an_entry_that_is_long_to_unfold_holds_up_nobody_and_keeps_its_place_among_its_keys(
    tmp_path: Path, steps: Steps, sizes: list[int], keys: int, kind: int
) -> None:
    long = batch(1, sizes, keys=keys, kind=kind)
    async with cluster(tmp_path) as running:
        broker, world = running.brokers[0], running.world
        consumers = [
            await TestConsumer(world, broker, TOPIC, permits=1_000_000, type=KEY_SHARED, consumer_name=name).ready()
            for name in "ab"
        ]
        producer = await TestProducer(world, broker, TOPIC).opened()
        as_once(broker)
        parts = [client_part("p", 0, b"before", key="k0"), long, client_part("p", 300_000, b"after", key="k0")]
        steps.clear()
        for part in parts:
            producer.frame(publish=part)
        tasks = [asyncio.create_task(each.receive()) for each in consumers]
        (first,), (other,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        taker = consumers[tasks.index(first)]
        came = [first.result()]
        while len(came) < len(parts):
            await taker.ack(came[-1])  # 50,000 unacknowledged messages are the limit
            came.append(await taker.receive())
        other.cancel()
        assert [each.entry_id for each in came] == [0, 1, 2]
        assert steps.longest < STEP_S * slowness(), steps.where


async def test_a_compaction_takes_a_long_entry_apart_beside_the_event_loop(
    tmp_path: Path, steps: Steps
) -> None:
    async with cluster(tmp_path) as running:
        broker, world = running.brokers[0], running.world
        producer = await TestProducer(world, broker, TOPIC).opened()
        as_once(broker)
        for part in (batch(0, [6 << 20] * 10, kind=Compression.ZLIB), batch(10, [1] * 200_000, keys=7, kind=2)):
            producer.frame(publish=part)
            await producer.next("receipt")
        compaction = broker.topics[TOPIC].compaction
        steps.clear()
        assert compaction.start()
        await compaction.wait_finished()
        assert compaction.progress.error == ""
        assert compaction.view.compacted is not None
        assert compaction.view.compacted.record.messages == 7  # k0 of the first entry comes again in the second
        assert steps.longest < STEP_S * slowness(), steps.where


@pytest.mark.parametrize("kind", list(Compression))
async def test_the_slots_are_the_same_however_they_are_found(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = batch(0, [3] * 700, keys=300, kind=kind)
    here = StoredEntry.parse(Position(1, 0), part)
    assert here.compute_key_slots_if_quick()
    assert len(here.slots) > 250
    monkeypatch.setattr(unfolding, "THREAD_UNFOLD_MESSAGES", 10)
    there = StoredEntry.parse(Position(1, 0), part)
    assert not there.compute_key_slots_if_quick()
    assert not there.has_key_slots
    assert await unfolding.compute_key_slots(part, make_system_world()) == here.slots


DECLARED = {"declared too much": 60 << 20, "declared too little": 2 << 20, "torn": 3 << 20, "too large": 65 << 20}


@pytest.mark.parametrize("damage", DECLARED)
async def test_a_bomb_takes_what_it_declares_and_no_more_and_counts_as_an_entry_without_keys(damage: str) -> None:
    part = batch(0, [1 << 20] * 3, kind=Compression.ZSTD)
    entry = StoredEntry.parse(Position(1, 0), part)
    assert not entry.compute_key_slots_if_quick()
    head = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=3, compression=3)
    head.uncompressed_size = DECLARED[damage]
    payload = unfolding.parse_stored_head(part).payload_offset
    metadata, body = head.SerializeToString(), part[payload:]
    body = body[: len(body) // 2] if damage == "torn" else body
    wrong = part[:6] + len(metadata).to_bytes(4, "big") + metadata + body
    assert await unfolding.compute_key_slots(wrong, make_system_world()) == ()


async def test_who_is_cancelled_while_an_entry_is_unfolded_leaves_the_turn_to_the_next() -> None:
    part, world = batch(0, [6 << 20] * 10, kind=Compression.LZ4), make_system_world()
    tasks = [asyncio.create_task(unfolding.compute_key_slots(part, world)) for _ in range(3)]
    for each in tasks[:2]:
        await asyncio.sleep(0)
        each.cancel()
    assert len(await asyncio.wait_for(tasks[2], 20)) == 1
    assert all(each.cancelled() for each in tasks[:2])
