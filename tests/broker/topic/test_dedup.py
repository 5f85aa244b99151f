"""Deduplication on a cluster: what survives a crash, a move, a policy; what holds data; what a client sees of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.managed_ledger import topic_path
from magnetar.broker.log.snapshot_ledger import SnapshotLedger
from magnetar.broker.server import Broker
from magnetar.metadata import paths
from magnetar.metadata.records import TopicRecord, decode_record
from magnetar.proto.entry import encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import BacklogQuotaExceeded, DuplicateInDoubt, InvalidRequest, MessageTooLarge, from_wire
from magnetar.proto.names import TopicName
from magnetar.proto.policies import decode_policies as policies
from tests.broker.node.test_failover import until_owned_by, vanish
from tests.support.cluster import Cluster, TestProducer, client_part, cluster, payloads_of

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)


async def stored(broker: Broker) -> list[bytes]:
    log = (await broker.topic_manager.load_topic(NAME)).log
    found: list[bytes] = []
    position = log.shape.position_after(log.shape.start_position)
    while log.shape.has_visible_entry(position):
        for entry in await log.reader.read(position, 1 << 20):
            found += payloads_of(entry.payload)
            position = log.shape.position_after(entry.position)
    return found


async def record(running: Cluster) -> TopicRecord:
    node = await running.store.get(topic_path(NAME))
    assert node is not None
    return decode_record(node.value, TopicRecord, topic_path(NAME))


async def settle(broker: Broker) -> Any:
    """The topic, when its deduplication has nothing under way."""
    topic = await broker.topic_manager.load_topic(NAME)
    while topic.dedup._working is not None:
        await asyncio.gather(topic.dedup._working, return_exceptions=True)
    return topic


async def test_a_duplicate_is_answered_in_its_place_and_not_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        await producer.send(b"0")
        await producer.send(b"1")
        for number in (2, 0, 3, 1):
            producer.sequence_id = number
            producer.publish(b"%d" % number)
        answers = [await producer.next("receipt") for _ in range(4)]
        assert [(each.sequence_id, each.duplicate) for each in answers] == [
            (2, False), (0, True), (3, False), (1, True)
        ]  # fmt: skip
        assert (answers[1].ledger_id, answers[1].entry_id, answers[1].index) == (-1, -1, -1)
        assert await stored(running.brokers[0]) == [b"0", b"1", b"2", b"3"]


async def test_what_is_on_its_way_is_in_doubt_and_ends_the_connection(tmp_path: Path) -> None:
    """The third answer: neither stored nor refused. The next connection is opened when the outcome is there."""
    async with cluster(tmp_path, deduplication=True) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        producer.publish(b"0")
        producer.sequence_id = 0
        producer.publish(b"0")
        with pytest.raises(DuplicateInDoubt):
            await producer.next("failed")
        assert not DuplicateInDoubt.definite
        assert DuplicateInDoubt.retryable
        again = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        assert again.answer.last_sequence_id == 0
        assert (await again.send(b"0")).duplicate
        assert await stored(running.brokers[0]) == [b"0"]


@pytest.mark.parametrize("snapshot_entries", [4, 1000])
async def test_a_killed_broker_forgets_no_sequence_id(tmp_path: Path, snapshot_entries: int) -> None:
    """From the last snapshot and the entries behind it; or, without any snapshot, from the entries alone."""
    changes = {"deduplication": True, "dedup_snapshot_entries": snapshot_entries}
    async with cluster(tmp_path, **changes) as running:
        first = running.brokers[0]
        producer = await TestProducer(running.world, first, TOPIC).opened()
        for number in range(11):
            await producer.send(b"%d" % number)
        topic = await settle(first)
        assert (topic.dedup.snapshots > 0) is (snapshot_entries == 4)
        await vanish(running, first)
        second = await running.add_broker(**changes)
        await until_owned_by(running, second)
        again = await TestProducer(running.world, second, TOPIC).opened()
        assert again.answer.last_sequence_id == 10
        for number in range(13):
            again.publish(b"%d" % number)
        answers = [await again.next("receipt") for _ in range(13)]
        assert [each.duplicate for each in answers] == [True] * 11 + [False] * 2
        assert await stored(second) == [b"%d" % number for number in range(13)]
        replayed = (await settle(second)).dedup.replayed
        assert replayed == 11 if snapshot_entries == 1000 else replayed < 11


async def test_an_entry_under_another_producers_name_is_refused(tmp_path: Path) -> None:
    """A replay of the log knows nothing but the name in the entry."""
    async with cluster(tmp_path, deduplication=True) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        producer.frame(publish=client_part("somebody else", 0, b"x"))
        error = from_wire((await producer.next("failed")).error)
        assert isinstance(error, InvalidRequest)
        assert "names another producer" in error.message


def _chunk(producer: str, sequence_id: int, number: int, payload: bytes, chunks: int = 3) -> bytes:
    return encode_entry(
        MessageMetadata(
            producer_name=producer, sequence_id=sequence_id, publish_time=1000, uuid=f"u-{sequence_id}",
            chunk_id=number, num_chunks_from_msg=chunks, total_chunk_msg_size=9_000,
        ), payload,
    )  # fmt: skip


@pytest.mark.parametrize("why", ["size", "quota"])
@pytest.mark.parametrize("deduplication", [True, False])
async def test_after_a_chunk_that_is_refused_the_rest_of_its_message_is_too_and_its_id_is_new(
    tmp_path: Path, deduplication: bool, why: str
) -> None:
    """A lowered limit counts at once, and a quota may end, between two chunks."""
    async with cluster(tmp_path, deduplication=deduplication) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        topic = await settle(broker)
        (connected,) = topic.producers
        quota = BacklogQuotaExceeded("full")
        if why == "quota":
            connected.refuse_entry(_chunk("p", 0, 0, b"0"), quota)
        else:
            connected.size_max = 2_000
            producer.frame(publish=_chunk("p", 0, 0, b"0" * 4_000))
        kind = type(from_wire((await producer.next("failed")).error))
        assert kind is (BacklogQuotaExceeded if why == "quota" else MessageTooLarge)
        for number in (1, 2):
            producer.frame(publish=_chunk("p", 0, number, b"small"))
            error = from_wire((await producer.next("failed")).error)
            assert type(error) is kind
            assert error.definite
        producer.frame(publish=client_part("p", 1, b"plain"))
        await producer.next("receipt")
        for number in range(3):
            producer.frame(publish=_chunk("p", 2, number, b"%d" % number))
            assert not (await producer.next("receipt")).duplicate
        for number in range(2):  # the same chunk again is no later one
            if number:
                producer.frame(publish=_chunk("p", 3, 0, b"0"))
                await producer.next("receipt")
            else:
                connected.refuse_entry(_chunk("p", 3, 0, b"0"), quota)
                await producer.next("failed")
        producer.frame(publish=_chunk("p", 3, 1, b"1"))
        await producer.next("receipt")
        assert await stored(broker) == [b"plain", b"0", b"1", b"2", b"0", b"1"]


async def test_the_last_chunk_alone_is_refused_and_the_message_is_stored_when_it_comes_whole(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        producer.frame(publish=_chunk("p", 0, 2, b"2"))
        error = from_wire((await producer.next("failed")).error)
        assert isinstance(error, InvalidRequest)
        assert "chunk before it" in error.message
        assert error.definite
        for number in range(3):
            producer.frame(publish=_chunk("p", 0, number, b"%d" % number))
            assert not (await producer.next("receipt")).duplicate
        await vanish(running, broker)
        second = await running.add_broker(deduplication=True)
        await until_owned_by(running, second)
        assert (await TestProducer(running.world, second, TOPIC).opened()).answer.last_sequence_id == 0
        assert await stored(second) == [b"0", b"1", b"2"]


async def test_another_owner_goes_on_with_the_chunks_that_the_log_has(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        for number in range(2):
            producer.frame(publish=_chunk("p", 0, number, b"%d" % number))
            await producer.next("receipt")
        await vanish(running, broker)
        second = await running.add_broker(deduplication=True)
        await until_owned_by(running, second)
        again = await TestProducer(running.world, second, TOPIC).opened()
        assert again.answer.last_sequence_id == -1
        for number in (1, 2):
            again.frame(publish=_chunk("p", 0, number, b"%d" % number))
        assert [(await again.next("receipt")).duplicate for _ in range(2)] == [True, False]
        assert await stored(second) == [b"0", b"1", b"2"]


async def test_a_batch_that_is_stored_in_part_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        await producer.send(b"0", b"1", b"2")
        producer.sequence_id = 1
        producer.publish(b"1", b"2", b"3")
        assert isinstance(from_wire((await producer.next("failed")).error), InvalidRequest)
        producer.sequence_id = 3
        assert not (await producer.send(b"3")).duplicate


async def test_it_is_turned_on_and_off_while_producers_are_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, dedup_snapshot_entries=2) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        producer.sequence_id = 0
        assert not (await producer.send(b"0")).duplicate, "it is off"
        await _policy(broker, '{"deduplication":true}')
        topic = await broker.topic_manager.load_topic(NAME)
        topic.dedup.run_due_work(topic.applied)
        await settle(broker)
        assert (await record(running)).dedup is not None
        producer.sequence_id = 0
        assert (await producer.send(b"0")).duplicate, "it knows who is connected"
        for number in range(1, 5):
            producer.sequence_id = number
            await producer.send(b"%d" % number)
        topic = await settle(broker)
        assert topic.dedup.snapshots > 0
        ledger_id = (await record(running)).dedup.ledger_id  # type: ignore[union-attr]
        assert ledger_id >= 0
        await _policy(broker, '{"deduplication":false}')
        producer.sequence_id = 0
        await producer.send(b"0")
        topic = await settle(broker)
        producer.sequence_id = 0
        assert not (await producer.send(b"0")).duplicate
        assert (await record(running)).dedup is None
        assert topic.dedup.trim_limit(topic.applied) is None
        assert len(await stored(broker)) == 7


async def test_a_snapshot_is_due_by_the_time_that_the_policy_says(tmp_path: Path) -> None:
    """And by the number of entries alone where it is 0; what is in none is kept, and replayed by the next owner."""
    async with cluster(tmp_path, deduplication=True, dedup_snapshot_s=0) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        topic = await settle(broker)
        assert topic.dedup._timer is None
        before = topic.dedup.trim_limit(topic.applied)
        await _policy(broker, '{"dedup_snapshot_s":3600}')
        assert topic.dedup._timer.when() - topic.dedup._loop.time() > 3000
        await _policy(broker, '{"dedup_snapshot_s":1}')
        assert topic.dedup._timer.when() - topic.dedup._loop.time() <= 1
        async with asyncio.timeout(20):
            while not topic.dedup.snapshots:  # noqa: ASYNC110 - the clock of the event loop is the real one
                await asyncio.sleep(0.05)
        assert topic.dedup.trim_limit(topic.applied) != before
        await producer.send(b"1")
        await _policy(broker, '{"dedup_snapshot_s":0}')
        assert (await settle(broker)).dedup._timer is None


async def _policy(broker: Broker, text: str) -> None:
    await broker.topic_manager.policies.change_policies(NAME.namespace_name, NAME, policies(text))
    topic = await broker.topic_manager.load_topic(NAME)
    topic.applied = broker.topic_manager.policies.get_applied_policies_nowait(NAME)


async def test_what_no_snapshot_holds_is_not_trimmed(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True, roll_entries=2, dedup_snapshot_entries=1000) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        for number in range(7):
            await producer.send(b"%d" % number)
        topic = await settle(broker)
        assert await topic.trim_ledgers(retained=False) == []
        topic.dedup._snapshot()
        await settle(broker)
        assert len(await topic.trim_ledgers(retained=False)) == 3
        await broker.topic_manager.unload_topic(NAME)
        again = await TestProducer(running.world, broker, TOPIC).opened()
        assert again.answer.last_sequence_id == 6


async def test_a_snapshot_counts_when_it_is_stored_and_no_entry_after_the_one_before_is_trimmed_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is on its way when the topic is trimmed, and then its broker is gone."""
    changes = {"deduplication": True, "roll_entries": 2, "dedup_snapshot_entries": 1000}
    async with cluster(tmp_path, **changes) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        for number in range(7):
            await producer.send(b"%d" % number)
        topic = await settle(broker)
        begun = asyncio.Event()

        async def never(*_: Any) -> bool:
            begun.set()
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(SnapshotLedger, "append_pieces", never)
        topic.dedup._snapshot()
        await begun.wait()
        assert await topic.trim_ledgers(retained=False) == [], "the numbers of these entries are nowhere else"
        await vanish(running, broker)
        monkeypatch.undo()
        second = await running.add_broker(**changes)
        await until_owned_by(running, second)
        again = await TestProducer(running.world, second, TOPIC).opened()
        assert again.answer.last_sequence_id == 6


async def test_a_deleted_topic_leaves_no_snapshot_ledger(tmp_path: Path) -> None:
    async with cluster(tmp_path, deduplication=True, dedup_snapshot_entries=1) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        await settle(broker)
        place = (await record(running)).dedup
        assert place is not None
        assert place.ledger_id >= 0
        await producer.close()
        await broker.topic_manager.delete_topic(NAME, force=True)
        assert await running.store.get(paths.ledger(place.ledger_id)) is None
