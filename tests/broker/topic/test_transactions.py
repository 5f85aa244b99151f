"""Transactions of a topic on a cluster: hidden until the end, then all or nothing, whatever crashes in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.server import Broker
from magnetar.broker.topic.topic import Topic
from magnetar.proto.entry import parse_header
from magnetar.proto.errors import TransactionAborted, TransactionEnded, Unavailable, from_wire
from magnetar.proto.names import TopicName
from magnetar.proto.transactions import TxnId, TxnState
from tests.broker.node.test_failover import until_owned_by, vanish
from tests.broker.topic.coordination import FakeCoordinator, coordinator, in_txn, position_of
from tests.support.cluster import TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
__all__ = ["coordinator"]


class TxnProducer(TestProducer):
    def publish_in(self, txn: TxnId, *payloads: bytes, deliver_at_ms: int = 0) -> None:
        part = in_txn(self.name, self.sequence_id, txn, *payloads, deliver_at_ms=deliver_at_ms)
        self.frame(publish=part)
        self.sequence_id += len(payloads)

    async def send_in(self, txn: TxnId, *payloads: bytes) -> Any:
        self.publish_in(txn, *payloads)
        return await self.next("receipt")

    async def opened(self) -> TxnProducer:
        await super().opened()
        return self


async def loaded(broker: Broker) -> Topic:
    return await broker.owned.topic(NAME)


async def shown(broker: Broker) -> list[bytes]:
    """What a reader of committed entries gets."""
    log = (await loaded(broker)).shown
    found: list[bytes] = []
    position = log.shape.at_or_after(log.shape.start)
    while log.shape.readable(position):
        for entry in await log.reader.read(position, 1 << 20):
            found += payloads_of(entry.payload)
            position = log.shape.after(entry.position)
    return found


async def test_entries_are_hidden_until_the_commit_and_shown_with_those_behind_them(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        txn = coordinator.begin()
        await producer.send_in(txn, b"1", b"2")
        await producer.send(b"3")
        assert coordinator.joins == [txn]
        assert await consumer.receive_payloads(1) == [b"0"]
        assert await consumer.quiet()
        topic = await loaded(broker)
        assert topic.shown.shape.end_index == 1
        assert topic.log.shape.end_index == 4
        last = position_of(await producer.send_in(txn, b"4"))
        await coordinator.end(topic, txn, True, entries=2, last=last)
        assert await consumer.receive_payloads(4) == [b"1", b"2", b"3", b"4"]
        assert topic.shown.shape.end_index == 5


async def test_aborted_entries_are_never_shown_and_keep_their_indexes(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0", b"1")
        assert (await producer.send(b"2")).index == 2
        topic = await loaded(broker)
        await coordinator.end(topic, txn, False)
        delivery = await consumer.receive()
        assert payloads_of(delivery.entry) == [b"2"]
        await consumer.ack(delivery)
        subscription = topic.subscription("s")
        assert subscription.cursor.mark == topic.log.shape.last, "the mark moves over what is aborted"
        assert subscription.cursor.hole_entries == 0
        assert await shown(broker) == [b"2"]


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("committed", [False, True])
async def test_a_crash_loses_no_outcome_and_shows_nothing_before_it_is_known(
    tmp_path: Path, coordinator: FakeCoordinator, committed: bool, settled: bool
) -> None:
    async with cluster(tmp_path) as running:
        first = running.brokers[0]
        producer = await TxnProducer(running.world, first, TOPIC).opened()
        await producer.send(b"0")
        txn = coordinator.begin()
        last = position_of(await producer.send_in(txn, b"1"))
        await producer.send(b"2")
        if settled:
            await coordinator.end(await loaded(first), txn, committed, entries=1, last=last)
        await vanish(running, first)
        with coordinator.unreachable():
            second = await running.add_broker()
            await until_owned_by(running, second)
            expected = [b"0", b"1", b"2"] if committed else [b"0", b"2"]
            if settled:
                assert await shown(second) == expected
                assert not coordinator.joins[1:], "what is stored is not asked for"
            else:
                assert await shown(second) == [b"0"], "all before it is served while all coordinators are down"
                again = await TxnProducer(running.world, second, TOPIC, "q").opened()
                await again.send(b"3")
        if not settled:
            topic = await loaded(second)
            await coordinator.end(topic, txn, committed, entries=1, last=last)
            assert await shown(second) == [*expected, b"3"]


async def test_a_refused_send_is_never_in_the_log(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    """A send without a join is refused, definitely; those after it go on, in order."""
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        aborted, over, txn = (coordinator.begin() for _ in range(3))
        coordinator.states[aborted] = TxnState.ABORTED
        coordinator.states[over] = TxnState.COMMITTED
        for each in (aborted, over, txn):
            producer.publish_in(each, b"in %d" % each.counter)
        producer.publish(b"plain")
        errors = [from_wire((await producer.next("failed")).error) for _ in range(2)]
        assert [type(each) for each in errors] == [TransactionAborted, TransactionEnded]
        assert all(each.definite for each in errors)
        receipts = [await producer.next("receipt") for _ in range(2)]
        assert [each.sequence_id for each in receipts] == [2, 3]
        topic = await loaded(broker)
        entries = await topic.log.reader.read(topic.log.shape.after(topic.log.shape.start), 1 << 20)
        assert [parse_header(each.payload).sequence_id for each in entries] == [2, 3]


async def test_a_coordinator_that_does_not_answer_holds_up_its_own_producer_alone(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.topic.transactions.JOIN_S", 0.3)
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        other = await TxnProducer(running.world, broker, TOPIC, "q").opened()
        with coordinator.unreachable():
            producer.publish_in(coordinator.begin(), b"0")
            producer.publish(b"1")
            await other.send(b"2")
            error = from_wire((await producer.next("failed")).error)
        assert isinstance(error, Unavailable)
        await producer.next("receipt")
        assert await shown(broker) == [b"2", b"1"]


async def test_a_settlement_that_comes_during_the_join_wins(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        topic = await loaded(broker)
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn, asked, answer = coordinator.begin(), asyncio.Event(), asyncio.Event()
        honest = coordinator.join

        async def slow(txn: TxnId, name: TopicName) -> TxnState:
            state = await honest(txn, name)
            asked.set()
            await answer.wait()
            return state

        coordinator.join = slow  # type: ignore[method-assign]
        producer.publish_in(txn, b"0")
        await asked.wait()
        await coordinator.end(topic, txn, False)
        answer.set()
        assert isinstance(from_wire((await producer.next("failed")).error), TransactionEnded)
        assert topic.log.shape.end_index == 0
