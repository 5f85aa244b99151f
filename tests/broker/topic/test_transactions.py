"""Transactions of a topic on a cluster: hidden until the end, then all or nothing, whatever crashes in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.log.appender import LogAppender
from magnetar.broker.server import Broker
from magnetar.broker.topic import transactions_core
from magnetar.broker.topic.outcomes import TransactionOutcomesLedger
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.transactions_core import TxnPhaseAtTopic
from magnetar.client.admin import AdminClient
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_batch, encode_plain_items, parse_header
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import (
    BackPressure,
    DataLost,
    InvalidRequest,
    NotAllowed,
    NotOwner,
    TransactionAborted,
    TransactionEnded,
    TransactionForgotten,
    Unavailable,
    from_wire,
)
from magnetar.proto.names import TopicName
from magnetar.proto.states import ForgottenOutcome, LedgerStays, TxnId, TxnState
from tests.broker.node.test_failover import until_owned_by, vanish
from tests.broker.subscription.test_delays import until
from tests.broker.topic.coordination import FakeCoordinator, coordinator, in_txn, position_of_delay_key, settle_at
from tests.support.cluster import Cluster, TestConsumer, TestProducer, client_part, cluster, payloads_of

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
NO_RETENTION = {"retention_minutes": 0, "retention_mib": 0, "unsubscribed_minutes": 0, "unsubscribed_mib": 0}
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
    return await broker.topic_manager.load_topic(NAME)


async def shown(broker: Broker) -> list[bytes]:
    """What a reader of committed entries gets."""
    log = (await loaded(broker)).shown
    found: list[bytes] = []
    position = log.shape.position_at_or_after(log.shape.start_position)
    while log.shape.has_visible_entry(position):
        for entry in await log.reader.read(position, 1 << 20):
            found += payloads_of(entry.payload)
            position = log.shape.position_after(entry.position)
    return found


async def test_entries_are_hidden_until_the_commit_and_shown_with_those_behind_them(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
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
    last = position_of_delay_key(await producer.send_in(txn, b"4"))
    await coordinator.end(topic, txn, True, entries=2, last=last)
    assert await consumer.receive_payloads(4) == [b"1", b"2", b"3", b"4"]
    assert topic.shown.shape.end_index == 5


async def test_no_outcomes_are_stored_at_once(coordinator: FakeCoordinator, running: Cluster) -> None:
    assert await (await loaded(running.brokers[0])).settle([], 60.0) == []


async def test_aborted_entries_are_never_shown_and_keep_their_indexes(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
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
    subscription = topic.find_subscription("s")
    assert subscription.cursor.mark == topic.log.shape.last_position, "the mark moves over what is aborted"
    assert subscription.cursor.hole_entry_count == 0
    assert await shown(broker) == [b"2"]


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("committed", [False, True])
async def test_a_crash_loses_no_outcome_and_shows_nothing_before_it_is_known(
    coordinator: FakeCoordinator, committed: bool, settled: bool, running: Cluster
) -> None:
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    await producer.send(b"0")
    txn = coordinator.begin()
    last = position_of_delay_key(await producer.send_in(txn, b"1"))
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


async def test_a_refused_send_is_never_in_the_log(coordinator: FakeCoordinator, running: Cluster) -> None:
    """A send without a join is refused, definitely; those after it go on, in order."""
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
    entries = await topic.log.reader.read(topic.log.shape.position_after(topic.log.shape.start_position), 1 << 20)
    assert [parse_header(each.payload).sequence_id for each in entries] == [2, 3]


async def test_a_coordinator_that_does_not_answer_holds_up_its_own_producer_alone(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.topic.txn_joins.JOIN_TIMEOUT_S", 0.3)
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


async def test_a_settlement_that_comes_during_the_join_wins(coordinator: FakeCoordinator, running: Cluster) -> None:
    broker = running.brokers[0]
    topic = await loaded(broker)
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn, asked, answer = coordinator.begin(), asyncio.Event(), asyncio.Event()
    honest = coordinator.join_transaction

    async def slow(txn: TxnId, name: TopicName, owner: str | None = None) -> TxnState:
        state = await honest(txn, name, owner)
        asked.set()
        await answer.wait()
        return state

    coordinator.join_transaction = slow  # type: ignore[method-assign]
    producer.publish_in(txn, b"0")
    await asked.wait()
    await coordinator.end(topic, txn, False)
    answer.set()
    assert isinstance(from_wire((await producer.next("failed")).error), TransactionEnded)
    assert topic.log.shape.end_index == 0


async def test_another_role_does_not_learn_that_a_transaction_has_ended_here(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    """Entries of it are still on their way, so the topic knows that it ended; whose it is, its coordinator knows."""
    topic, txn = await loaded(running.brokers[0]), coordinator.begin()
    coordinator.owners[txn] = "billing"
    await topic.transactions.joins.join(txn, "billing")
    core = topic.transactions.core
    assert core is not None
    core.known[txn].phase = TxnPhaseAtTopic.ENDED
    coordinator.states[txn] = TxnState.ABORTED
    topic.transactions.joins.discard(txn)
    with pytest.raises(InvalidRequest, match="never given"):
        await topic.transactions.joins.join(txn, "thief")
    with pytest.raises(TransactionEnded):
        await topic.transactions.joins.join(txn, "billing")


async def test_at_its_bound_a_topic_tells_another_role_of_a_known_and_an_unknown_transaction_alike(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions_core, "OPEN_TRANSACTIONS_MAX", 1)
    async with cluster(tmp_path) as running:
        topic, known, unknown = await loaded(running.brokers[0]), coordinator.begin(), coordinator.begin()
        coordinator.owners |= {known: "billing", unknown: "billing"}
        await topic.transactions.joins.join(known, "billing")
        for txn in (known, unknown):
            with pytest.raises(InvalidRequest, match="never given"):
                await topic.transactions.joins.join(txn, "thief")
        with pytest.raises(BackPressure):
            await topic.transactions.joins.join(unknown, "billing")


# ------------------------------------------------------------------------------------- numbers
async def test_a_resend_over_a_new_connection_does_not_double_also_after_a_crash(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    """Inside a transaction, with the policy of deduplication off."""
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    txn = coordinator.begin()
    await producer.send_in(txn, b"0")
    await producer.send_in(txn, b"1")
    again = await TxnProducer(running.world, first, TOPIC).opened()
    assert again.answer.last_sequence_id == 1
    assert [(await again.send_in(txn, b"%d" % number)).duplicate for number in range(3)] == [True, True, False]
    await vanish(running, first)
    second = await running.add_broker()
    await until_owned_by(running, second)
    third = await TxnProducer(running.world, second, TOPIC).opened()
    assert third.answer.last_sequence_id == 2
    assert [(await third.send_in(txn, b"%d" % number)).duplicate for number in range(4)] == [True] * 3 + [False]
    await coordinator.end(await loaded(second), txn, True)
    assert await shown(second) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("snapshot_entries", [1, 4, 5, 1000])
@pytest.mark.parametrize("crash", [False, True])
async def test_numbers_of_a_commit_count_and_those_of_an_abort_are_new_again(
    tmp_path: Path, coordinator: FakeCoordinator, crash: bool, snapshot_entries: int
) -> None:
    """With deduplication on, whenever snapshots of numbers are made: none has a number of an open transaction. With 5
    one is made while a transaction is open, and none before the crash."""
    changes = {"deduplication": True, "dedup_snapshot_entries": snapshot_entries}
    async with cluster(tmp_path, **changes) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        kept, gone = coordinator.begin(), coordinator.begin()
        await producer.send(b"0")
        await producer.send_in(kept, b"1")
        other = await TxnProducer(running.world, broker, TOPIC, "q").opened()
        for number in range(3):
            await other.send(b"q%d" % number)
        await settled(broker)
        assert "p" not in (await loaded(broker)).dedup.core.snapshot().persisted or producer.sequence_id == 2
        await coordinator.end(await loaded(broker), kept, True)
        await producer.send_in(gone, b"2")
        await settled(broker)
        await coordinator.end(await loaded(broker), gone, False)
        await settled(broker)
        if crash:
            await vanish(running, broker)
            broker = await running.add_broker(**changes)
            await until_owned_by(running, broker)
        again = await TxnProducer(running.world, broker, TOPIC).opened()
        assert again.answer.last_sequence_id == 1
        assert [(await again.send(b"%d" % number)).duplicate for number in range(4)] == [True, True, False, False]
        assert await shown(broker) == [b"0", b"1", b"q0", b"q1", b"q2", b"2", b"3"]


async def settled(broker: Broker) -> None:
    """Deduplication has nothing under way."""
    topic = await loaded(broker)
    while topic.dedup._working is not None:
        await asyncio.gather(topic.dedup._working, return_exceptions=True)


async def test_with_deduplication_a_prepared_transaction_holds_up_no_new_producer_of_the_name(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn, other = coordinator.begin(), coordinator.begin()
        await producer.send_in(txn, b"0")
        coordinator.states[txn] = TxnState.PREPARED
        await producer.close()
        again = await TxnProducer(running.world, broker, TOPIC).opened()
        again.sequence_id = again.answer.last_sequence_id + 1
        assert not (await again.send(b"1")).duplicate
        assert not (await again.send_in(other, b"2")).duplicate
        await coordinator.end(await loaded(broker), other, True)
        await coordinator.end(await loaded(broker), txn, True)
        assert await shown(broker) == [b"0", b"1", b"2"]


# ------------------------------------------------------------------------------------- outcomes and crashes
async def test_a_settlement_is_answered_when_it_is_stored_and_twice_is_once(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn = coordinator.begin()
    await producer.send_in(txn, b"0")
    topic, go_on = await loaded(broker), asyncio.Event()
    honest = TransactionOutcomesLedger._write

    async def slow(self: TransactionOutcomesLedger) -> None:
        await go_on.wait()
        await honest(self)

    monkeypatch.setattr(TransactionOutcomesLedger, "_write", slow)
    ending = [asyncio.create_task(coordinator.end(topic, txn, False)) for _ in range(3)]
    done, _ = await asyncio.wait(ending, timeout=0.3)
    assert not done, "it is answered before it is durable"
    assert await shown(broker) == []
    go_on.set()
    await asyncio.gather(*ending)
    assert topic.log.record.transactions is not None
    assert topic.log.record.transactions.ledger_id >= 0
    await coordinator.end(topic, txn, False)


async def test_the_last_stable_position_is_right_at_every_step_of_a_load(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    """Before anything is answered, and after each answer; what is plain is served, and taken, all the time."""
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    gone, a, b, c = (coordinator.begin() for _ in range(4))
    receipts: dict[TxnId, Any] = {}
    for number, txn in enumerate((None, gone, a, None, b, c, None)):
        payload = b"%d" % number
        if txn is None:
            await producer.send(payload)
        else:
            receipts[txn] = await producer.send_in(txn, payload)
    await coordinator.end(await loaded(first), gone, False)
    await vanish(running, first)
    with coordinator.unreachable():
        second = await running.add_broker()
        await until_owned_by(running, second)
        topic = await loaded(second)

        def stands(indexes: int, *payloads: bytes) -> None:
            assert topic.shown.shape.end_index == indexes
            assert topic.transactions.core is not None
            topic.transactions.core.check()
            expected.extend(payloads)

        expected: list[bytes] = []
        stands(2, b"0")
        assert await shown(second) == expected
        await (await TxnProducer(running.world, second, TOPIC, "q").opened()).send(b"7")
        stands(2)
        await coordinator.end(topic, b, True, entries=1, last=position_of_delay_key(receipts[b]))
        stands(2)
        assert await shown(second) == expected, "what is committed waits for what is open before it"
        await coordinator.end(topic, a, False)
        stands(5, b"3", b"4")
        assert await shown(second) == expected
        await coordinator.end(topic, c, True, entries=1, last=position_of_delay_key(receipts[c]))
        stands(8, b"5", b"6", b"7")
        assert await shown(second) == expected


async def test_delayed_sends_of_dead_transactions_leave_nothing(coordinator: FakeCoordinator, running: Cluster) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    dead = [coordinator.begin() for _ in range(200)]
    coordinator.states |= dict.fromkeys(dead, TxnState.ABORTED)
    for txn in dead:
        producer.publish_in(txn, b"late")
    producer.publish(b"plain")
    for _ in dead:
        assert isinstance(from_wire((await producer.next("failed")).error), TransactionAborted)
    await producer.next("receipt")
    topic = await loaded(broker)
    assert await shown(broker) == [b"plain"]
    assert not topic.transactions.core.known  # type: ignore[union-attr]
    assert topic.log.shape.end_index == 1


async def test_an_entry_after_the_stored_outcomes_is_found_again(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    gone, txn = coordinator.begin(), coordinator.begin()
    await producer.send_in(gone, b"0")
    await coordinator.end(await loaded(first), gone, False)
    await producer.send_in(txn, b"1")
    await vanish(running, first)
    with coordinator.unreachable():
        second = await running.add_broker()
        await until_owned_by(running, second)
        assert await shown(second) == []
    topic = await loaded(second)
    assert topic.transactions.open_transactions == [txn]


async def test_what_was_on_its_way_when_it_ended_is_never_shown_also_after_a_crash(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    """Late confirmed entries of a transaction: aborted, whatever the outcome; the answer waits for them."""
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn = coordinator.begin()
    last = position_of_delay_key(await producer.send_in(txn, b"0"))
    topic = await loaded(broker)
    appender = topic.log._appender  # type: ignore[attr-defined]
    held, heard = pytest.MonkeyPatch(), []
    held.setattr(LogAppender, "on_appended", lambda self, *told: heard.append(told))
    producer.publish_in(txn, b"late")
    core = topic.transactions.core
    assert core is not None
    await until(lambda: core.count_entries_in_flight(txn) > 0)
    ending = asyncio.create_task(coordinator.end(topic, txn, True, entries=1, last=last))
    done, _ = await asyncio.wait([ending], timeout=0.3)
    assert not done
    held.undo()
    appender.on_appended(*heard[-1])
    await ending
    await producer.next("receipt")
    assert await shown(broker) == [b"0"]
    await vanish(running, broker)
    second = await running.add_broker()
    await until_owned_by(running, second)
    assert await shown(second) == [b"0"]
    assert len(coordinator.joins) == 1


async def test_a_coordinator_whose_record_is_lost_leaves_open_what_is_open_and_holds_no_other_publish_up(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    broker, world = running.brokers[0], running.world
    producer, txn = await TxnProducer(world, broker, TOPIC).opened(), coordinator.begin()
    last = position_of_delay_key(await producer.send_in(txn, b"0"))
    await vanish(running, broker)
    coordinator.down, asked = DataLost("the record of coordinator 3 is missing"), len(coordinator.joins)
    second = await running.add_broker()
    await until_owned_by(running, second)
    topic = await loaded(second)
    await until(lambda: len(coordinator.joins) > asked)
    assert list(topic.transactions.open_transactions) == [txn], "neither committed nor aborted"
    again = await TxnProducer(world, second, TOPIC, name="again").opened()
    again.publish_in(coordinator.begin(), b"in another")
    with pytest.raises(DataLost, match="record of coordinator 3"):
        raise from_wire((await again.next("failed")).error)
    plain = await TxnProducer(world, second, TOPIC, name="plain").opened()
    await plain.send(b"plain")
    assert await shown(second) == [], "what is after it waits"
    coordinator.down = None  # the record was restored
    await coordinator.end(topic, txn, True, entries=1, last=last)
    await until(lambda: not topic.transactions.open_transactions)
    assert await shown(second) == [b"0", b"plain"]


@pytest.mark.parametrize("told", ["the settlement", "COMMITTED"])
async def test_an_entry_after_the_last_receipt_stays_hidden_after_a_crash(
    coordinator: FakeCoordinator, told: str, running: Cluster
) -> None:
    """The new owner asks, and is answered by the settlement, which names the last receipt; or waits for it."""
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    txn = coordinator.begin()
    last = position_of_delay_key(await producer.send_in(txn, b"0"))
    await producer.send_in(txn, b"no receipt, says the client")
    settlement = coordinator.settlement(txn, True, entries=1, last=last)
    if told == "the settlement":
        coordinator.owed[txn] = settlement
    await vanish(running, first)
    second = await running.add_broker()
    await until_owned_by(running, second)
    topic = await loaded(second)
    if told == "COMMITTED":
        await until(lambda: txn in topic.transactions.outcome_resolver._committed_at)
        assert await shown(second) == []
        await settle_at(topic, settlement)
    await until(lambda: not topic.transactions.open_transactions)
    assert await shown(second) == [b"0"]


async def test_an_answer_that_tells_no_outcome_shows_nothing_and_the_topic_asks_again(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinator tells a topic "forgotten" (invariant 87). One that did would not make entries count."""
    monkeypatch.setattr("magnetar.broker.topic.txn_joins.OPEN_STATE_ASK_INTERVAL_S", 0.1)
    monkeypatch.setattr("magnetar.broker.topic.txn_joins.OUTCOME_ASK_PAUSE_S_MAX", 0.1)
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        await producer.send(b"1")
        topic = await loaded(broker)
        coordinator.down = TransactionForgotten("it ended long ago")
        asked = len(coordinator.joins)
        await until(lambda: len(coordinator.joins) > asked + 2)
        assert topic.transactions.open_transactions == [txn]
        assert await shown(broker) == []
        coordinator.down = None
        coordinator.states[txn] = TxnState.ABORTED
        assert await consumer.receive_payloads(1) == [b"1"]


async def test_a_refused_join_makes_the_topic_ask_for_what_else_that_coordinator_lost(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    """Readers do not wait for the next round of questions."""
    broker = running.brokers[0]
    consumer = await TestConsumer(running.world, broker, TOPIC).ready()
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    lost, leased, kept = coordinator.begin(), coordinator.begin(), coordinator.begin()
    await producer.send_in(lost, b"0")
    await producer.send_in(kept, b"1")
    await producer.send(b"2")
    coordinator.states |= dict.fromkeys((lost, leased), TxnState.ABORTED)  # it was taken over, and kept one of them
    producer.publish_in(leased, b"refused")
    assert isinstance(from_wire((await producer.next("failed")).error), TransactionAborted)
    topic = await loaded(broker)
    await until(lambda: topic.transactions.open_transactions == [kept])
    await coordinator.end(topic, kept, True, entries=1)
    assert await consumer.receive_payloads(2) == [b"1", b"2"]


async def test_a_topic_without_transactions_replays_nothing_and_one_with_them_little(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    first = running.brokers[0]
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    for number in range(5):
        await producer.send(b"%d" % number)
    await first.topic_manager.unload_topic(NAME)
    topic = await loaded(first)
    assert topic.transactions.core is None
    assert topic.shown is topic.log
    producer = await TxnProducer(running.world, first, TOPIC).opened()
    txn = coordinator.begin()
    await producer.send_in(txn, b"5")
    await coordinator.end(topic, txn, False)
    await first.topic_manager.unload_topic(NAME)
    topic = await loaded(first)
    assert topic.transactions.replayed == 0
    assert await shown(first) == [b"%d" % number for number in range(5)]


async def test_an_unloaded_topic_keeps_its_open_transactions(coordinator: FakeCoordinator, running: Cluster) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn = coordinator.begin()
    await producer.send_in(txn, b"0")
    await broker.topic_manager.unload_topic(NAME)
    again = await TxnProducer(running.world, broker, TOPIC, "q").opened()
    await again.send_in(txn, b"1")
    assert await shown(broker) == []
    await coordinator.end(await loaded(broker), txn, True)
    assert await shown(broker) == [b"0", b"1"]


async def test_a_load_that_cannot_read_the_outcomes_says_so_and_the_next_one_has_them(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    for committed, payload in ((False, b"0"), (True, b"1")):
        txn = coordinator.begin()
        await producer.send_in(txn, payload)
        await coordinator.end(await loaded(broker), txn, committed)
    await broker.topic_manager.unload_topic(NAME)

    async def no_answer(*_: object) -> None:
        raise Unavailable("no bookie answers")

    with monkeypatch.context() as patched:
        patched.setattr(TransactionOutcomesLedger, "recover", no_answer)
        with pytest.raises(Unavailable, match="no bookie answers"):
            await loaded(broker)
    assert await shown(broker) == [b"1"]


async def _lose_outcomes(running: Cluster, how: str, former: list[bytes]) -> None:
    """The topic is unloaded, and the ledger that its record names as that of its outcomes is not what it was.
    `former`: an earlier snapshot."""
    broker = running.brokers[-1]
    topic = await loaded(broker)
    record, ledgers = topic.log.record.transactions, broker.topic_manager._open().ledgers
    assert record is not None
    if how != "missing":
        writer = await ledgers.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
        for entry in [*former, b"damaged"] if how == "damaged" else []:
            await writer.append(entry)
        await writer.close()
        await topic.log.commit_fields(transactions=msgspec.structs.replace(record, ledger_id=writer.ledger_id))
    await broker.topic_manager.unload_topic(NAME)
    if how == "missing":
        await ledgers.delete(record.ledger_id)


@pytest.mark.parametrize("choice", ["commit", "abort"])
@pytest.mark.parametrize("how", ["missing", "without a snapshot", "damaged"])
async def test_what_a_topic_and_its_coordinator_forgot_is_decided_by_an_operator_alone(
    coordinator: FakeCoordinator, how: str, choice: str, caplog: pytest.LogCaptureFixture, running: Cluster
) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    await producer.send(b"0")
    committed, plain = coordinator.begin(), b"2"
    await producer.send_in(committed, b"1")
    topic = await loaded(broker)
    former, _ = topic.transactions._ledger._plan(topic.log.shape.last_confirmed, {}, set(), 0)
    await coordinator.end(topic, committed, True)
    await producer.send(plain)
    await _lose_outcomes(running, how, former)
    coordinator.forgotten[committed] = ForgottenOutcome.DISCARDED
    topic = await loaded(broker)
    await until(lambda: topic.transactions.core.forgotten_transaction_ids == [committed])
    assert await shown(broker) == [b"0"], "nothing guesses that it is aborted"
    assert f"the outcome of transaction {committed} is lost" in caplog.text
    new = coordinator.begin()
    again = await TxnProducer(running.world, broker, TOPIC, "q").opened()
    await again.send_in(new, b"3")
    await coordinator.end(topic, new, True)
    await until(lambda: topic.log.record.transactions.ledger_id >= 0)
    for _ in range(2):  # the outcomes that are stored now can be read, and tell that others are lost
        await broker.topic_manager.unload_topic(NAME)
        core = (await loaded(broker)).transactions.core
        await until(lambda core=core: core.forgotten_transaction_ids == [committed])
    assert await shown(broker) == [b"0"]
    late = coordinator.begin()
    coordinator.forgotten[late] = ForgottenOutcome.DISCARDED
    third = await TxnProducer(running.world, broker, TOPIC, "r").opened()
    third.publish_in(late, b"refused")
    assert isinstance(from_wire((await third.next("failed")).error), TransactionAborted)

    async with AdminClient(f"magnetar://{broker.endpoint}") as admin:
        with pytest.raises(InvalidRequest, match="commit or abort"):
            await admin.skip_lost(TOPIC, forgotten="guess")
        (seen,) = (await admin.skip_lost(TOPIC)).forgotten
        assert (seen.txn, seen.entries, seen.bytes > 0) == (committed, 1, True)
        assert await shown(broker) == [b"0"]
        decided = await admin.skip_lost(TOPIC, forgotten=choice)
        assert (decided.forgotten, decided.ranges) == ((seen,), ())
        assert (await admin.skip_lost(TOPIC, forgotten=choice)).forgotten == ()
    expected = [b"0", *([b"1"] if choice == "commit" else []), plain, b"3"]
    assert await shown(broker) == expected
    await broker.topic_manager.unload_topic(NAME)
    topic = await loaded(broker)
    assert await shown(broker) == expected
    assert not topic.transactions.open_transactions


@pytest.mark.parametrize("how", ForgottenOutcome)
async def test_of_a_topic_that_lost_nothing_what_was_discarded_is_aborted_and_for_no_other_reason(
    coordinator: FakeCoordinator, how: ForgottenOutcome, running: Cluster
) -> None:
    """A coordinator discards an outcome after each topic has stored it."""
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn, read = coordinator.begin(), coordinator.begin()
    await producer.send_in(txn, b"0")
    await producer.send(b"1")
    await broker.topic_manager.unload_topic(NAME)
    coordinator.forgotten = {txn: how, read: how}
    topic = await loaded(broker)
    core = topic.transactions.core
    assert core is not None
    core.register_unresolved_transaction(read)  # nothing of it is in the log
    if how is ForgottenOutcome.DISCARDED:
        await until(lambda: not topic.transactions.open_transactions)
        assert await shown(broker) == [b"1"]
    else:
        await until(lambda: topic.transactions.open_transactions == core.forgotten_transaction_ids == [txn])
        assert await shown(broker) == []


async def test_a_ledger_switch_inside_a_commit_changes_nothing(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    async with cluster(tmp_path, roll_entries=3) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        kept, gone = coordinator.begin(), coordinator.begin()
        for number in range(10):
            await producer.send_in(kept if number % 2 else gone, b"%d" % number)
        topic = await loaded(broker)
        await asyncio.gather(
            topic.log.roll_ledger(),
            coordinator.end(topic, kept, True),
            topic.log.roll_ledger(),
            coordinator.end(topic, gone, False),
        )
        assert len(topic.log.shape.spans) > 3
        expected = [b"%d" % number for number in range(1, 10, 2)]
        assert await shown(broker) == expected
        await vanish(running, broker)
        second = await running.add_broker(roll_entries=3)
        await until_owned_by(running, second)
        assert await shown(second) == expected


# ------------------------------------------------------------------------------------- what holds data, the end
async def test_an_open_transaction_keeps_its_ledgers_and_what_is_aborted_goes_with_them(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path, **NO_RETENTION) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        topic = await loaded(broker)
        await topic.log.roll_ledger()
        assert [
            stays for _, stays in topic.list_reasons_ledgers_kept()
        ] == [LedgerStays.NOT_IN_OUTCOMES, LedgerStays.OPEN]
        other = coordinator.begin()
        await producer.send_in(other, b"1")
        await coordinator.end(topic, other, False)
        assert [
            stays for _, stays in topic.list_reasons_ledgers_kept()
        ] == [LedgerStays.TRANSACTION_OPEN, LedgerStays.OPEN]
        assert not await topic.trim_ledgers()
        await coordinator.end(topic, txn, False)
        core = topic.transactions.core
        assert core is not None
        assert core.aborted_entries == 2
        assert len(await topic.trim_ledgers()) == 1
        assert core.aborted_entries == 1
        assert core.count_aborted_messages(0, 10) == 1


async def test_plain_traffic_after_the_last_transaction_does_not_keep_ledgers(
    tmp_path: Path, coordinator: FakeCoordinator
) -> None:
    async with cluster(tmp_path, **NO_RETENTION) as running:
        broker = running.brokers[0]
        producer = await TxnProducer(running.world, broker, TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        topic = await loaded(broker)
        await coordinator.end(topic, txn, True)
        for number in range(3):
            await topic.log.roll_ledger()
            await producer.send(b"%d" % number)
        ledger = topic.transactions._ledger
        assert ledger is not None
        writes = ledger.writes
        for part in topic.parts:
            part.run_due_work(topic.applied)
        await until(lambda: ledger.writes > writes)
        assert len(await topic.trim_ledgers()) == 3


async def test_a_settlement_of_what_is_unknown_is_answered_by_the_owner_alone(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    first = running.brokers[0]
    old = await loaded(first)
    await coordinator.end(old, coordinator.begin(), True)
    await vanish(running, first)
    second = await running.add_broker()
    await until_owned_by(running, second)
    await TxnProducer(running.world, second, TOPIC).opened()
    with pytest.raises(NotOwner):
        await coordinator.end(old, coordinator.begin(), True)


async def test_a_non_persistent_topic_takes_part_in_no_transaction(
    coordinator: FakeCoordinator, running: Cluster
) -> None:
    topic = "non-persistent://public/default/t"
    producer = await TxnProducer(running.world, running.brokers[0], topic).opened()
    producer.publish_in(coordinator.begin(), b"0")
    assert isinstance(from_wire((await producer.next("failed")).error), NotAllowed)
    assert not coordinator.joins
    await producer.send(b"1")


async def test_an_id_that_no_coordinator_gives_is_refused(coordinator: FakeCoordinator, running: Cluster) -> None:
    producer = await TxnProducer(running.world, running.brokers[0], TOPIC).opened()
    producer.publish_in(TxnId(1 << 40, 1), b"0")
    assert isinstance(from_wire((await producer.next("failed")).error), InvalidRequest)
    await producer.send(b"1")


# ------------------------------------------------------------------------------------- compaction
async def test_compaction_meets_an_open_transaction(coordinator: FakeCoordinator, running: Cluster) -> None:
    """It ends before the first open entry, and an aborted newer value removes no committed older one."""
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    topic = await loaded(broker)
    gone, txn = coordinator.begin(), coordinator.begin()

    async def put(key: str, value: bytes, of: TxnId | None) -> None:
        producer.frame(publish=in_txn("p", producer.sequence_id, of, value, key=key) if of is not None
                       else client_part("p", producer.sequence_id, value, key=key))  # fmt: skip
        producer.sequence_id += 1
        await producer.next("receipt")

    await put("a", b"a0", None)
    await put("b", b"b0", None)
    await put("a", b"a1", gone)
    await put("b", b"b1", txn)
    await put("a", b"a2", None)
    await coordinator.end(topic, gone, False)
    topic.compaction.start()
    await topic.compaction.wait_finished()
    assert topic.compaction.progress.error == ""
    assert await compacted(running, broker) == [b"a0", b"b0"]
    await coordinator.end(topic, txn, True)
    assert await compacted(running, broker) == [b"a0", b"b0", b"b1", b"a2"]
    topic.compaction.start()
    await topic.compaction.wait_finished()
    assert await compacted(running, broker) == [b"b1", b"a2"]


async def compacted(running: Cluster, broker: Broker) -> list[bytes]:
    reader = await TestConsumer(
        running.world, broker, TOPIC, "c", durable=False, read_compacted=True,
        start=wire.MessageId(ledger_id=-1, entry_id=-1),
    ).ready()  # fmt: skip
    found: list[bytes] = []
    while reader.items or not await reader.quiet():
        found += await reader.receive_payloads(1)
    await reader.close()
    return found


def wide(name: str, txn: TxnId | None, first: int, last: int) -> bytes:
    metadata = MessageMetadata(producer_name=name, sequence_id=first, highest_sequence_id=last, publish_time=1000)
    if txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = txn.most, txn.least
    return encode_batch(metadata, encode_plain_items((b"x", b"y")), 2)


@pytest.mark.parametrize(("first", "last"), [(1, 1 << 32), ((1 << 64) - 2, (1 << 64) - 1)])
async def test_with_deduplication_no_header_makes_a_transaction_note_millions_of_ids(
    tmp_path: Path, coordinator: FakeCoordinator, first: int, last: int
) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        producer = await TxnProducer(running.world, running.brokers[0], TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        producer.frame(publish=wide("p", txn, first, last))
        with pytest.raises(InvalidRequest, match="sequence ids"):
            raise from_wire((await producer.next("failed")).error)
        await producer.send_in(txn, b"1")
        topic = await loaded(running.brokers[0])
        await coordinator.end(topic, txn, committed=False)
        producer.frame(publish=wide("p", None, 0, last))  # over the gaps
        assert not (await producer.next("receipt")).duplicate
        assert topic.dedup.core.last_sequence_id("p") == last
        assert not topic.dedup.core._gaps


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("committed", [False, True])
async def test_ids_of_a_header_that_spans_all_are_not_noted(
    coordinator: FakeCoordinator, crash: bool, committed: bool, running: Cluster
) -> None:
    broker = running.brokers[0]
    producer = await TxnProducer(running.world, broker, TOPIC).opened()
    txn = coordinator.begin()
    producer.frame(publish=wide("p", txn, 1, 1 << 32))
    await producer.next("receipt")
    if crash:
        await vanish(running, broker)
        broker = await running.add_broker()
        await until_owned_by(running, broker)
    topic = await loaded(broker)
    assert not topic.transactions.core.known[txn].numbers["p"].sent
    await coordinator.end(topic, txn, committed)
    assert await shown(broker) == [b"x", b"y"] * committed
