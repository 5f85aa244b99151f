"""What is committed is shown, and nothing else, on every path on which entries leave a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.session.summaries import collect_topic_stats
from magnetar.broker.subscription.pump import SubscriptionDeliveryPump
from magnetar.broker.topic import statistics as backlog
from magnetar.broker.topic.topic import Topic
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import NotFound
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId
from magnetar.runtime.network import find_rpc
from tests.broker.topic.coordination import FakeCoordinator, coordinator, position_of_delay_key
from tests.broker.topic.test_transactions import TOPIC, TxnProducer, loaded
from tests.support.cluster import Cluster, TestConsumer, Wire, cluster, payloads_of

__all__ = ["coordinator"]

@asynccontextmanager
async def filled(tmp_path: Path, coordinator: FakeCoordinator, **changes: Any) -> AsyncIterator[Filled]:
    async with cluster(tmp_path, **changes) as running:
        of = Filled(running, coordinator)
        await of.fill()
        yield of


@pytest.fixture
async def at(tmp_path: Path, coordinator: FakeCoordinator) -> AsyncIterator[Filled]:
    async with filled(tmp_path, coordinator) as at:
        yield at


class Filled:
    """Entries 0 plain, 1 2 aborted, 3 plain, 4 5 open (in `txn`), 6 plain, 7 8 aborted."""

    def __init__(self, running: Cluster, coordinator: FakeCoordinator) -> None:
        self.running, self.coordinator = running, coordinator
        self.receipts: list[Any] = []
        self.topic: Topic
        self.txn = TxnId(0, 0)

    async def fill(self) -> None:
        broker = self.running.brokers[0]
        first = TestConsumer(self.running.world, broker, TOPIC, "s", type=wire.Subscribe.SHARED, permits=0)
        await first.ready()
        await first.close()
        self.consumer = await TestConsumer(self.running.world, broker, TOPIC, "t").ready()
        producer = self.producer = await TxnProducer(self.running.world, broker, TOPIC).opened()
        self.topic = await loaded(broker)
        gone, self.txn, late = (self.coordinator.begin() for _ in range(3))
        for number, txn in enumerate((None, gone, gone, None, self.txn, self.txn, None, late, late)):
            payload = b"%d" % number
            self.receipts.append(await (producer.send(payload) if txn is None else producer.send_in(txn, payload)))
        await self.coordinator.end(self.topic, gone, False)
        await self.coordinator.end(self.topic, late, False)

    async def commit(self) -> None:
        await self.coordinator.end(self.topic, self.txn, True, entries=2, last=self.position(5))

    def position(self, number: int) -> Position:
        return position_of_delay_key(self.receipts[number])

    async def read(self, first: int, end: int) -> tuple[list[bytes], int]:
        stream = Wire(self.running.world, self.running.brokers[0], "Read")
        stream.stream.send_nowait(wire.ReadRequest(request_id=1, topic=TOPIC, first_index=first, end_index=end))
        found: list[bytes] = []
        while True:
            for item in await stream.stream.receive():
                if item.HasField("done"):
                    await stream.close()
                    return found, item.done.next_index
                found += payloads_of(item.entry.entry)

    async def call(self, method: str, request: Any, service: str = "Broker") -> Any:
        channel = self.running.world.network.connect(self.running.brokers[0].endpoint)
        try:
            return await channel.call(find_rpc(service, method), request, timeout_s=10)
        finally:
            await channel.close()


async def test_consumers_readers_and_reads_by_index_end_at_the_last_stable_position(
    coordinator: FakeCoordinator, at: Filled
) -> None:
    assert await at.consumer.receive_payloads(2) == [b"0", b"3"]
    assert await at.consumer.quiet()
    reader = await TestConsumer(
        at.running.world, at.running.brokers[0], TOPIC, "r", durable=False,
        start=wire.MessageId(ledger_id=-1, entry_id=-1),
    ).ready()  # fmt: skip
    assert await reader.receive_payloads(2) == [b"0", b"3"]
    assert await reader.quiet()
    assert await at.read(0, 100) == ([b"0", b"3"], 4)
    assert await at.read(1, 3) == ([], 3)
    offsets = await at.call("Offsets", wire.OffsetsRequest(topic=TOPIC))
    assert (offsets.earliest_index, offsets.end_index) == (0, 4)
    await at.commit()
    assert await at.consumer.receive_payloads(3) == await reader.receive_payloads(3) == [b"4", b"5", b"6"]
    assert await at.read(0, 100) == ([b"0", b"3", b"4", b"5", b"6"], 9)


async def test_what_was_read_ahead_or_comes_again_is_filtered_too(coordinator: FakeCoordinator, at: Filled) -> None:
    await at.commit()
    at.topic.log.reader._cache.discard(at.position(0)[0])  # type: ignore[attr-defined]
    shared = await TestConsumer(
        at.running.world, at.running.brokers[0], TOPIC, "s", type=wire.Subscribe.SHARED
    ).ready()
    assert await shared.receive_payloads(5) == [b"0", b"3", b"4", b"5", b"6"]
    shared.frame(redeliver=wire.Redeliver())
    assert await shared.receive_payloads(5) == [b"0", b"3", b"4", b"5", b"6"]
    assert await shared.quiet()


async def test_operators_see_what_consumers_will_see(coordinator: FakeCoordinator, at: Filled) -> None:
    backlogs = SubscriptionAdministration(at.topic)

    async def nth(number: int, *, from_latest: bool) -> list[bytes]:
        return payloads_of((await backlogs.read_nth_message(number, from_latest=from_latest)).entry.payload)

    assert [each.entry.payload[-1:] for each in await backlogs.peek_messages("s", 10)] == [b"0", b"3"]
    assert await nth(2, from_latest=False) == await nth(1, from_latest=True) == [b"3"]
    with pytest.raises(NotFound):
        await backlogs.read_nth_message(3, from_latest=False)
    for hidden in (1, 4, 6, 7):
        with pytest.raises(NotFound):
            await backlogs.read_message(at.position(hidden))
    assert (await backlogs.find_last_message()).position == at.position(3)
    assert (await backlogs.analyze_backlog("s"))[:2] == (2, 2)
    assert (await backlogs.find_message_by_time(1 << 50)).position == at.position(4)
    stats = await collect_topic_stats(at.topic, "")
    assert [each.backlog for each in stats.subscriptions] == [2, 2]
    assert stats.transactions is not None
    assert (stats.transactions.open, stats.transactions.stable_index) == (1, 4)
    assert (stats.transactions.oldest, stats.transactions.aborted_entries) == (at.txn, 4)
    reply = (await at.call("TopicStats", wire.Name(name=TOPIC), "Admin")).transactions
    assert (reply.open, reply.oldest.least, reply.last_stable.entry_id) == (1, at.txn.least, at.position(3)[1])
    await at.commit()
    assert [each.entry.payload[-1:] for each in await backlogs.peek_messages("s", 10)] == [b"0", b"3", b"4", b"5", b"6"]
    assert (await backlogs.find_last_message()).position == at.position(6)
    assert (await backlogs.analyze_backlog("s"))[:2] == (5, 5)


async def test_the_backlog_reaches_0_whatever_is_aborted(coordinator: FakeCoordinator, at: Filled) -> None:
    await at.commit()
    log, subscription = at.topic.shown, at.topic.find_subscription("t")
    for left in (4, 3, 2, 1, 0):
        await at.consumer.ack(await at.consumer.receive())
        assert await backlog.count_unacknowledged(log, subscription) == left
    assert subscription.cursor.mark == at.position(6)
    assert subscription.cursor.trim_limit.mark == at.position(8), "what is aborted needs no acknowledgement"
    await backlog.skip_messages(log, at.topic.find_subscription("s"), 3)
    assert await backlog.count_unacknowledged(log, at.topic.find_subscription("s")) == 2
    await backlog.skip_messages(log, at.topic.find_subscription("s"), -1)
    assert await backlog.count_unacknowledged(log, at.topic.find_subscription("s")) == 0


@pytest.mark.parametrize("committed", [False, True])
async def test_has_message_available_is_true_only_if_one_will_come(
    coordinator: FakeCoordinator, committed: bool, at: Filled
) -> None:
    """The last message id names one that is shown, also where the topic ends with open and aborted ones."""
    await at.consumer.receive_payloads(2)

    async def last() -> Position:
        at.consumer.frame(last_message_id=1)
        answer = await at.consumer.next("last")
        return Position(answer.id.ledger_id, answer.id.entry_id)

    assert await last() == at.position(3)
    await at.coordinator.end(at.topic, at.txn, committed, entries=2 * committed, last=at.position(5))
    assert await last() == at.position(6)
    assert (await at.consumer.receive_payloads(3 if committed else 1))[-1] == b"6"
    assert await at.consumer.quiet()


async def test_a_topic_with_nothing_but_hidden_entries_has_no_last_message(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path) as running:
        producer = await TxnProducer(running.world, running.brokers[0], TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        topic = await loaded(running.brokers[0])
        for _ in range(2):
            assert await topic.shown.reader.read_last_message() is None
            assert (await SubscriptionAdministration(topic).find_last_message()).position[1] == -1
            await coordinator.end(topic, txn, False)


async def test_read_uncommitted_shows_all_that_is_stored(coordinator: FakeCoordinator, at: Filled) -> None:
    subscription = at.topic.find_subscription("s")
    await backlog.skip_messages(at.topic.shown, at.topic.find_subscription("t"), -1)
    consumer = await TestConsumer(
        at.running.world, at.running.brokers[0], TOPIC, "s", type=wire.Subscribe.SHARED,
        isolation=wire.Subscribe.READ_UNCOMMITTED,
    ).ready()  # fmt: skip
    every = [b"%d" % number for number in range(9)]
    deliveries = [await consumer.receive() for _ in range(9)]
    assert [payloads_of(each.entry)[0] for each in deliveries] == every
    await consumer.ack(*deliveries)
    assert subscription.cursor.mark == at.position(8)


async def test_a_seek_lands_on_what_is_shown(coordinator: FakeCoordinator, at: Filled) -> None:
    await at.commit()
    await at.consumer.receive_payloads(5)
    for number, expected in ((1, b"3"), (5, b"5"), (0, b"0")):
        position = at.position(number)
        at.consumer.requests += 1
        seek = wire.Seek(
            request_id=at.consumer.requests, message_id=wire.MessageId(ledger_id=position[0], entry_id=position[1])
        )
        at.consumer.frame(seek=seek)
        await at.consumer.done()
        assert (await at.consumer.receive_payloads(1)) == [expected]
        await at.consumer.receive_payloads({b"3": 3, b"5": 1, b"0": 4}[expected])


async def test_a_subscription_at_the_end_gets_what_commits_after_it_was_made(
    coordinator: FakeCoordinator, at: Filled
) -> None:
    late = await TestConsumer(at.running.world, at.running.brokers[0], TOPIC, "late").ready()
    await at.commit()
    assert await late.receive_payloads(3) == [b"4", b"5", b"6"]


async def test_a_terminated_topic_still_resolves_and_ends_for_its_consumers_after_that(
    coordinator: FakeCoordinator, at: Filled
) -> None:
    await at.topic.log.terminate()
    await at.consumer.receive_payloads(2)
    assert await at.consumer.quiet(), "it has not ended for a consumer: more may come"
    await at.commit()
    assert await at.consumer.receive_payloads(3) == [b"4", b"5", b"6"]
    await at.consumer.next("end_of_topic")


async def test_a_reader_at_the_last_stable_position_sleeps_until_it_moves(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, at: Filled
) -> None:
    await at.consumer.receive_payloads(2)
    pumped: list[int] = []
    honest = SubscriptionDeliveryPump.deliver_available_entries
    monkeypatch.setattr(
        SubscriptionDeliveryPump, "deliver_available_entries", lambda pump: (pumped.append(1), honest(pump))
    )
    for number in range(5):
        await at.producer.send(b"behind %d" % number)
    assert not pumped, "a plain entry behind the last stable position wakes no reader"
    await at.commit()
    assert len(await at.consumer.receive_payloads(8)) == 8
    assert pumped


async def test_a_delayed_entry_is_due_after_its_commit(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        shared = await TestConsumer(running.world, broker, TOPIC, type=wire.Subscribe.SHARED).ready()
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn, now_ms = coordinator.begin(), running.world.clock.wall_ms()
        producer.publish_in(txn, b"due", deliver_at_ms=now_ms + 1)
        producer.publish_in(txn, b"later", deliver_at_ms=now_ms + 3_600_000)
        receipts = [await producer.next("receipt") for _ in range(2)]
        topic = await loaded(broker)
        delayed = topic.find_subscription("s").delayed
        assert delayed is not None
        assert delayed.core.count == 0, "what may be aborted is in no delay index"
        assert await shared.quiet()
        await coordinator.end(topic, txn, True, entries=2, last=position_of_delay_key(receipts[1]))
        assert await shared.receive_payloads(1) == [b"due"]
        assert await shared.quiet()
        assert delayed.core.count == 1


async def test_expiry_and_quota_stop_at_the_last_stable_position(coordinator: FakeCoordinator, at: Filled) -> None:
    subscription = at.topic.find_subscription("s")
    await at.topic.maintenance.expire_messages_older_than(subscription, -3600)
    assert subscription.cursor.mark == at.position(3)
    await at.commit()
    assert await backlog.count_unacknowledged(at.topic.shown, subscription) == 3



async def test_a_compaction_ends_before_the_first_open_transaction_in_its_positions_and_in_its_indexes(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    """Readers by index find what commits later in the log, and not in the compacted ledger, which never had it."""
    async with filled(tmp_path, coordinator, compaction_retain_null_key=True) as at:
        compaction = at.topic.compaction
        assert compaction.start()
        await compaction.wait_finished()
        record = compaction.record
        assert record is not None
        assert (record.horizon_entry, record.end_index, record.messages) == (3, 4, 2)
        assert compaction.view.compacted is not None
        [row] = compaction.view.compacted.rows
        assert row.end_index == 4
        await at.commit()
        assert compaction.start()
        await compaction.wait_finished()
        assert compaction.record is not None
        assert (compaction.record.end_index, compaction.record.messages) == (9, 5)
