"""Acknowledgements in transactions over the wire: joins, receipts, refusals, and what commits, aborts and crashes
leave.

The topic's joins are a fake that behaves: a transaction is joined when the test lets it, and ends when it says so.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyroaring import BitMap

from magnetar.broker.subscription.core import pending_acks, redelivery_backoff
from magnetar.broker.subscription.core.cursor_state import TxnAcks
from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.broker.subscription.pump import RedeliveryReturnQueue
from magnetar.broker.subscription.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    BackPressure,
    ConsumerBusy,
    InvalidRequest,
    NotAllowed,
    TimedOut,
    TransactionAborted,
    TransactionConflict,
    TransactionEnded,
    Unavailable,
)
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId
from tests.broker.subscription.test_delays import until
from tests.broker.topic.coordination import FakeCoordinator, coordinator, settle_at
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, one_by_one

TOPIC = "persistent://public/default/transactional"
EARLIEST, SHARED, KEY_SHARED = wire.Subscribe.EARLIEST, wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED
X, Y = TxnId(0, 1), TxnId(1, (7 << 40) | 3)
__all__ = ["coordinator"]


class Joins:
    """Of a topic; what is not about joins is the topic's own. `refusal`: what a join raises."""

    def __init__(self, honest: Any) -> None:
        self.honest = honest
        self.joins = self
        self.joined: set[TxnId] = set()
        self.ended: set[TxnId] = set()
        self.asked: list[TxnId] = []
        self.refusal: Exception | None = None
        self.asking = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)

    def is_open(self, txn: TxnId) -> bool:
        return txn in self.joined and txn not in self.ended

    def join_nowait(self, txn: TxnId, owner: str | None = None) -> bool:
        return self.is_open(txn)

    async def join(self, txn: TxnId, owner: str | None = None) -> None:
        self.asked.append(txn)
        self.asking.set()
        await self.may.wait()
        if self.refusal is not None:
            raise self.refusal
        self.joined.add(txn)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, cursor_flush_s=3600.0) as running:
        yield running


async def filled(running: Cluster, entries: int, *, batch: int = 1) -> TestProducer:
    producer = await TestProducer(running.world, running.brokers[-1], TOPIC).opened()
    for number in range(entries):
        producer.publish(*(b"%d.%d" % (number, index) for index in range(batch)))
    for _ in range(entries):
        await producer.next("receipt")
    return producer


async def consumer(running: Cluster, **options: Any) -> TestConsumer:
    broker = running.brokers[-1]
    return await TestConsumer(running.world, broker, TOPIC, initial_position=EARLIEST, **options).ready()


def topic_of(running: Cluster) -> Topic:
    return running.brokers[-1].topics[TOPIC]


def joins_of(running: Cluster) -> Joins:
    topic: Any = topic_of(running)
    if not isinstance(topic.transactions, Joins):
        topic.transactions = Joins(topic.transactions)
    found: Joins = topic.transactions
    return found


def subscription_of(running: Cluster) -> Subscription:
    return topic_of(running).find_subscription("s")


def named(*deliveries: wire.Delivery, indexes: Any = ()) -> list[wire.AckedEntry]:
    return [
        wire.AckedEntry(ledger_id=each.ledger_id, entry_id=each.entry_id, batch_indexes=indexes) for each in deliveries
    ]


def frame_of(txn: TxnId, request_id: int, *deliveries: wire.Delivery, indexes: Any = (), **ack: Any) -> wire.Ack:
    id_ = wire.TransactionId(most=txn.most, least=txn.least)
    return wire.Ack(txn=id_, request_id=request_id, entries=named(*deliveries, indexes=indexes), **ack)


async def ack_in(mine: TestConsumer, txn: TxnId, *deliveries: wire.Delivery, indexes: Any = (), **ack: Any) -> None:
    mine.requests += 1
    mine.frame(ack=frame_of(txn, mine.requests, *deliveries, indexes=indexes, **ack))
    await mine.done()


async def received(mine: TestConsumer, entries: int) -> list[wire.Delivery]:
    return [await mine.receive() for _ in range(entries)]


def ids(deliveries: list[wire.Delivery]) -> list[int]:
    return [each.entry_id for each in deliveries]


# ------------------------------------------------------------------------------------------ pending, and its end
@pytest.mark.parametrize("type_", [wire.Subscribe.EXCLUSIVE, SHARED, wire.Subscribe.FAILOVER, KEY_SHARED])
@pytest.mark.parametrize("committed", [True, False])
async def test_a_pending_entry_is_not_delivered_after_nack_disconnect_or_restart_until_its_abort(
    running: Cluster, type_: int, committed: bool
) -> None:
    await filled(running, 4)
    joins_of(running)
    mine = await consumer(running, type=type_)
    deliveries = await received(mine, 4)
    await ack_in(mine, X, deliveries[1])
    assert not subscription_of(running).cursor.has_unstored_changes, (
        "the broker flushes once an hour: the answer came after a write"
    )
    mine.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=deliveries[1].ledger_id, entry_id=1)]))
    mine.frame(redeliver=wire.Redeliver())
    assert ids(await received(mine, 3)) == [0, 2, 3]
    mine.requests += 1
    await mine.ask(close=mine.requests)
    mine = await consumer(running, type=type_)
    assert ids(await received(mine, 3)) == [0, 2, 3]
    await running.brokers[-1].close()
    await running.add_broker(cursor_flush_s=3600.0)
    mine = await consumer(running, type=type_)
    assert ids(await received(mine, 3)) == [0, 2, 3]
    subscription = subscription_of(running)
    assert subscription.pending_transactions == (X,)
    subscription.settle(X, committed)
    subscription.settle(X, committed)
    await subscription.wait_durable()
    assert not subscription.cursor.has_unstored_changes
    assert subscription.pending_transactions == ()
    if committed:
        await mine.ack(*[each for each in deliveries if each.entry_id != 1])
        assert subscription.cursor.mark.entry_id == 3
    else:
        again = await mine.receive()
        assert (again.entry_id, again.redelivery_count) == (1, 1)


async def test_order_is_kept_after_an_aborted_cumulative_acknowledgement(running: Cluster) -> None:
    await filled(running, 6)
    joins_of(running)
    mine = await consumer(running)
    deliveries = await received(mine, 6)
    await ack_in(mine, X, deliveries[2], kind=wire.Ack.CUMULATIVE)
    with pytest.raises(TransactionConflict, match="cumulative"):
        await ack_in(mine, Y, deliveries[4], kind=wire.Ack.CUMULATIVE)
    await mine.ack(deliveries[4])
    subscription = subscription_of(running)
    assert subscription.cursor.mark.entry_id == -1
    subscription.settle(X, False)
    again = await received(mine, 5)
    assert ids(again) == [0, 1, 2, 3, 5]
    assert [each.redelivery_count for each in again] == [1, 1, 1, 0, 0]
    with pytest.raises(TransactionConflict, match="comes after entries that an aborted transaction freed"):
        await ack_in(mine, Y, deliveries[5], kind=wire.Ack.CUMULATIVE)  # of its first delivery, perhaps
    mine.frame(redeliver=wire.Redeliver())
    assert ids(await received(mine, 5)) == [0, 1, 2, 3, 5]
    await ack_in(mine, Y, deliveries[5], kind=wire.Ack.CUMULATIVE)
    subscription.settle(Y, True)
    assert subscription.cursor.mark.entry_id == 5


@pytest.mark.parametrize("type_", [wire.Subscribe.EXCLUSIVE, SHARED, wire.Subscribe.FAILOVER, KEY_SHARED])
async def test_what_an_abort_frees_of_a_batch_comes_at_once_while_its_holder_has_the_rest(
    running: Cluster, type_: Any
) -> None:
    await filled(running, 1, batch=10)
    mine = await consumer(running, type=type_)
    (batch,) = await received(mine, 1)
    joins_of(running)
    await ack_in(mine, X, batch, indexes=[7, 8, 9])
    await mine.ack(batch, indexes=[0, 1])
    subscription = subscription_of(running)
    subscription.settle(X, committed=False)
    again = await mine.receive()
    assert (again.entry_id, list(again.acked_batch_indexes), again.redelivery_count) == (batch.entry_id, [0, 1], 1)
    await mine.ack(again, indexes=list(range(2, 10)))
    assert subscription.cursor.mark == Position(batch.ledger_id, batch.entry_id)
    assert subscription.dispatcher.unacked == 0


async def test_an_entry_whose_transactions_always_abort_reaches_its_dead_letter_limit(running: Cluster) -> None:
    letters = f"{TOPIC}-letters"
    properties = {redelivery_backoff.TOPIC_PROPERTY: letters, redelivery_backoff.MAX_COUNT_PROPERTY: "2"}
    await filled(running, 2)
    joins_of(running)
    mine = await consumer(running, type=SHARED, subscription_properties=properties)
    subscription = subscription_of(running)
    assert subscription.dead_letters is not None
    assert subscription.dead_letters.may_hold_back_entries
    first = (await received(mine, 2))[0]
    for number in range(3):
        txn = TxnId(0, 100 + number)
        await ack_in(mine, txn, first)
        subscription.settle(txn, False)
        if number < 2:
            first = await mine.receive()
            assert (first.entry_id, first.redelivery_count) == (0, number + 1)
    reader = await TestConsumer(running.world, running.brokers[-1], letters, "l", initial_position=EARLIEST).ready()
    assert len(await reader.receive_payloads(1)) == 1


# ------------------------------------------------------------------------------------------ refusals
async def test_a_refused_acknowledgement_leaves_no_trace(running: Cluster) -> None:
    await filled(running, 4, batch=2)
    joins_of(running)
    mine = await consumer(running, type=SHARED)
    deliveries = await received(mine, 4)
    await mine.ack(deliveries[0])
    await ack_in(mine, Y, deliveries[1])
    subscription = subscription_of(running)
    before, writes = subscription.cursor.copy_cursor_state(), subscription.store.writes if subscription.store else 0
    unacked = subscription.dispatcher.unacked
    beyond = wire.EntrySet(ledger_id=deliveries[0].ledger_id, entries=BitMap([3, 9]).serialize())
    nonsense = wire.EntrySet(ledger_id=deliveries[0].ledger_id, entries=b"\x00nothing")
    for refused in (deliveries[0], deliveries[1]):
        with pytest.raises(TransactionConflict):
            await ack_in(mine, X, deliveries[2], refused)
    for ledgers in ([beyond], [nonsense]):
        with pytest.raises(InvalidRequest):
            await ack_in(mine, X, deliveries[2], ledgers=ledgers)
    with pytest.raises(NotAllowed, match="cumulative"):
        await ack_in(mine, X, deliveries[2], kind=wire.Ack.CUMULATIVE)
    assert (subscription.cursor.copy_cursor_state(), subscription.dispatcher.unacked) == (before, unacked)
    await subscription.wait_durable()
    assert subscription.store is not None
    assert subscription.store.writes == writes
    await ack_in(mine, Y, deliveries[1])
    assert subscription.cursor.copy_cursor_state() == before, "what is pending in it already was taken again"


async def test_a_plain_acknowledgement_of_what_is_pending_is_refused_and_the_rest_of_the_request_counts(
    running: Cluster,
) -> None:
    await filled(running, 300)
    joins_of(running)
    mine = await consumer(running)
    deliveries = await received(mine, 300)
    await ack_in(mine, X, deliveries[1])
    with pytest.raises(TransactionConflict):
        await mine.ack(*deliveries[:250])
    cursor = subscription_of(running).cursor
    assert (cursor.mark.entry_id, cursor.hole_entry_count) == (0, 248)
    entries = wire.EntrySet(ledger_id=deliveries[0].ledger_id, entries=BitMap(range(1, 260)).serialize())
    mine.requests += 1
    mine.frame(ack=wire.Ack(request_id=mine.requests, ledgers=[entries]))
    with pytest.raises(TransactionConflict):
        await mine.done()
    assert cursor.hole_entry_count == 258
    with pytest.raises(TransactionConflict):
        await mine.ack(deliveries[299], cumulative=True)
    assert cursor.hole_entry_count == 258, "a cumulative one that is refused left a trace"
    subscription_of(running).settle(X, True)
    await mine.ack(deliveries[299], cumulative=True)
    assert cursor.mark.entry_id == 299


async def test_what_keeps_nothing_takes_no_transactions(running: Cluster) -> None:
    await filled(running, 1)
    joins_of(running)
    reader = await consumer(running, subscription="reader", durable=False)
    (first,) = await received(reader, 1)
    with pytest.raises(NotAllowed, match="durable"):
        await ack_in(reader, X, first)
    assert not joins_of(running).asked, "it was refused after the join"
    passing = "non-persistent://public/default/passing"
    mine = await TestConsumer(running.world, running.brokers[0], passing).ready()
    with pytest.raises(NotAllowed, match="durable"):
        await ack_in(mine, X, first)


async def test_a_topic_without_coordinators_refuses(running: Cluster) -> None:
    await filled(running, 1)
    mine = await consumer(running)
    (first,) = await received(mine, 1)
    joins_of(running).refusal = NotAllowed("the topic takes no transactions")
    with pytest.raises(NotAllowed):
        await ack_in(mine, X, first)


async def test_past_its_bound_acknowledgements_are_refused_and_nothing_is_dropped(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(running, 4)
    joins_of(running)
    mine = await consumer(running)
    deliveries = await received(mine, 4)
    monkeypatch.setattr("magnetar.broker.subscription.acks.ENTRIES_MAX", 2)
    await ack_in(mine, X, *deliveries[:2])
    with pytest.raises(BackPressure):
        await ack_in(mine, Y, deliveries[2])
    assert pending_acks.ENTRIES_MAX > 2
    subscription_of(running).settle(X, True)
    await ack_in(mine, Y, deliveries[2])


# ------------------------------------------------------------------------------------------ joins and receipts
async def test_a_join_delays_no_other_frame_and_its_acknowledgement_is_answered_without_a_request_id(
    running: Cluster,
) -> None:
    await filled(running, 3)
    joins, mine = joins_of(running), await consumer(running, permits=2)
    deliveries = await received(mine, 2)
    joins.may.clear()
    mine.frame(ack=frame_of(X, 0, deliveries[0]))
    await mine.ack(deliveries[1])
    mine.permits(5)
    await mine.receive()
    assert subscription_of(running).pending_transactions == ()
    joins.may.set()
    answer = await mine.next("done")
    assert (answer.request_id, answer.HasField("error")) == (0, False)
    assert subscription_of(running).pending_transactions == (X,)
    assert not subscription_of(running).cursor.has_unstored_changes


async def test_a_transaction_that_ends_while_the_topic_joins_it_takes_nothing(running: Cluster) -> None:
    await filled(running, 1)
    joins, mine = joins_of(running), await consumer(running)
    (first,) = await received(mine, 1)
    joins.ended.add(X)
    with pytest.raises(TransactionEnded):
        await ack_in(mine, X, first)
    joins.refusal = TransactionAborted("its deadline has passed", reason="timeout")
    with pytest.raises(TransactionAborted):
        await ack_in(mine, Y, first)
    assert subscription_of(running).cursor.version == 0


async def test_a_consumer_that_disconnects_during_the_join_has_acknowledged_nothing(running: Cluster) -> None:
    await filled(running, 2)
    joins, mine = joins_of(running), await consumer(running)
    (first, _) = await received(mine, 2)
    joins.may.clear()
    mine.frame(ack=frame_of(X, 1, first))
    await joins.asking.wait()
    await mine.close()
    subscription_of(running).disconnect_all(Unavailable("as the broker does when the stream ends"))
    other = await consumer(running)
    assert ids(await received(other, 2)) == [0, 1]
    joins.may.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert subscription_of(running).pending_transactions == ()


async def test_the_receipt_comes_after_the_write_and_not_before(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(running, 1)
    joins_of(running)
    mine = await consumer(running)
    (first,) = await received(mine, 1)
    may, write = asyncio.Event(), DurableCursor._write

    async def held(self: DurableCursor) -> None:
        await may.wait()
        await write(self)

    monkeypatch.setattr(DurableCursor, "_write", held)
    mine.frame(ack=frame_of(X, 1, first))
    mine.frame(last_message_id=2)
    await mine.next("last")
    assert subscription_of(running).pending_transactions == (X,)
    may.set()
    assert (await mine.next("done")).request_id == 1


# ------------------------------------------------------------------------------------------ others that move the cursor
async def test_expiry_and_skipping_pass_over_what_is_pending(running: Cluster) -> None:
    await filled(running, 6, batch=3)
    joins_of(running)
    mine = await consumer(running, type=SHARED)
    deliveries = await received(mine, 6)
    await ack_in(mine, X, deliveries[1])
    await ack_in(mine, Y, deliveries[3], indexes=[2])
    topic, subscription = topic_of(running), subscription_of(running)
    assert topic.maintenance.skip_up_to(subscription, subscription.cursor.mark._replace(entry_id=4)) in range(1, 6)
    assert topic.maintenance.skip_up_to(subscription, subscription.cursor.mark._replace(entry_id=4)) == 0, (
        "expired twice"
    )
    assert [each for each in range(6) if subscription.cursor.is_acked(_at(deliveries, each))] == [0, 2, 4]
    assert [each for each in range(6) if subscription.cursor.is_acked_or_pending(_at(deliveries, each))] == [
        0,
        1,
        2,
        3,
        4,
    ]
    subscription.settle(X, False)
    subscription.settle(Y, False)
    again = await received(mine, 2)
    assert [(each.entry_id, list(each.acked_batch_indexes)) for each in again] == [(1, []), (3, [0, 1])]
    await ack_in(mine, X, again[0])
    subscription.skip_up_to(topic.log.shape.last_position)
    subscription.settle(X, True)
    assert subscription.cursor.mark == topic.log.shape.last_position
    subscription.dispatcher.check()


def _at(deliveries: list[wire.Delivery], entry: int) -> Position:
    return Position(deliveries[0].ledger_id, entry)


async def test_a_seek_forgets_what_is_pending_and_a_later_commit_skips_it(running: Cluster) -> None:
    await filled(running, 3)
    joins_of(running)
    mine = await consumer(running)
    deliveries = await received(mine, 3)
    await ack_in(mine, X, *deliveries)
    first = wire.MessageId(ledger_id=deliveries[0].ledger_id, entry_id=0, partition=-1, batch_index=-1)
    mine.requests += 1
    await mine.ask(seek=wire.Seek(request_id=mine.requests, message_id=first))
    assert ids(await received(mine, 3)) == [0, 1, 2]
    subscription_of(running).settle(X, True)
    assert subscription_of(running).cursor.mark.entry_id == -1


async def test_a_subscription_without_consumers_does_not_expire_while_an_acknowledgement_of_it_is_pending(
    running: Cluster,
) -> None:
    await filled(running, 2)
    joins_of(running)
    mine = await consumer(running)
    await ack_in(mine, X, (await received(mine, 2))[0])
    await mine.close()
    await until(lambda: not subscription_of(running).consumers)
    topic = topic_of(running)
    topic.applied = msgspec.structs.replace(topic.applied, subscription_expiration_s=1)
    maintenance, name = topic.maintenance, subscription_of(running).name
    await maintenance.delete_idle_subscriptions()
    maintenance._idle = {each: since - 2 for each, since in maintenance._idle.items()}  # two seconds later
    await maintenance.delete_idle_subscriptions()
    assert subscription_of(running).pending_transactions == (X,)
    subscription_of(running).settle(X, True)
    await maintenance.delete_idle_subscriptions()
    assert name in topic.subscriptions, "its time begins anew with the end of the transaction"
    maintenance._idle = {each: since - 2 for each, since in maintenance._idle.items()}
    await maintenance.delete_idle_subscriptions()
    assert name not in topic.subscriptions


async def test_the_end_of_a_terminated_topic_is_told_when_nothing_can_come_back(running: Cluster) -> None:
    await filled(running, 2)
    joins_of(running)
    mine = await consumer(running)
    deliveries = await received(mine, 2)
    await ack_in(mine, X, deliveries[1])
    await topic_of(running).log.terminate()
    subscription_of(running).pump.wake()
    await mine.ack(deliveries[0])
    subscription_of(running).settle(X, False)
    assert (await mine.receive()).entry_id == 1
    await mine.next("end_of_topic")


async def test_consumers_of_a_subscription_agree_on_what_they_see(running: Cluster) -> None:
    await filled(running, 1)
    uncommitted = wire.Subscribe.READ_UNCOMMITTED
    mine = await consumer(running, type=SHARED, isolation=uncommitted)
    assert subscription_of(running).isolation.name == "READ_UNCOMMITTED"
    with pytest.raises(ConsumerBusy, match="read_uncommitted"):
        await consumer(running, type=SHARED)
    await consumer(running, type=SHARED, isolation=uncommitted)
    assert len(subscription_of(running).consumers) == 2
    await mine.close()


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("cumulative", [True, False])
async def test_the_next_transaction_may_begin_while_the_outcome_of_the_last_is_on_its_way(
    running: Cluster, coordinator: FakeCoordinator, committed: bool, cumulative: bool
) -> None:
    """The coordinator has answered the client, and its settlement has not come yet."""
    await filled(running, 4)
    mine = await consumer(running)
    deliveries = await received(mine, 4)
    kind = {"kind": wire.Ack.CUMULATIVE} if cumulative else {}
    await ack_in(mine, X, deliveries[1], **kind)
    with pytest.raises(TransactionConflict):
        await ack_in(mine, Y, deliveries[2 if cumulative else 1], **kind)
    settlement = coordinator.settlement(X, committed)
    following = asyncio.create_task(ack_in(mine, Y, deliveries[2 if cumulative else 1], **kind))
    topic = topic_of(running)
    if committed:
        await until(lambda: coordinator.joins.count(X) == 3)
        assert not following.done()
        await settle_at(topic, settlement)
    if committed is not cumulative:
        why = "already" if committed else "cumulative"  # given back, and not delivered again: it must not be covered
        with pytest.raises(TransactionConflict, match=why):
            await following
        return
    await following
    assert subscription_of(running).pending_transactions == (Y,)
    await coordinator.end(topic, Y, True)
    mark = subscription_of(running).cursor.mark.entry_id
    assert mark == (2 if cumulative else -1)


async def test_a_subscription_that_cannot_store_an_end_holds_up_no_other_transaction_that_is_settled_with_it(
    running: Cluster, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(running, 2)
    mine, other = await consumer(running), await consumer(running, subscription="other")
    await ack_in(mine, X, (await received(mine, 2))[0])
    await ack_in(other, Y, (await received(other, 2))[1])
    topic, go_on, honest = topic_of(running), asyncio.Event(), Subscription.wait_durable

    async def stored(self: Subscription) -> None:
        if self.name == "s":
            await go_on.wait()
        await honest(self)

    monkeypatch.setattr(Subscription, "wait_durable", stored)
    ends = [coordinator.settlement(each, True) for each in (X, Y)]
    late, done = await topic.settle(ends, 0.2)
    assert isinstance(late, TimedOut), "it is not stored, and not told to be"
    assert done is None
    again = asyncio.create_task(topic.settle(ends, 60.0))
    await asyncio.sleep(0)
    assert not again.done(), "once more waits for the same write"
    go_on.set()
    assert await again == [None, None]


async def test_what_comes_again_comes_after_the_answer_and_all_else_before_it(running: Cluster) -> None:
    """So a consumer knows what was on its way to it: it has permits for both."""
    await filled(running, 3)
    mine = await consumer(running)
    mine.frame(redeliver=wire.Redeliver(request_id=5))
    async with asyncio.timeout(20):
        while len(mine.items) < 7:
            mine.items.extend(one_by_one(await mine.stream.receive()))
    kinds = [item.WhichOneof("kind") for item in mine.items]
    came = [item.delivery.entry_id for item in mine.items if item.WhichOneof("kind") == "delivery"]
    at = kinds.index("done")
    assert mine.items[at].done.request_id == 5
    assert came[:at] == [0, 1, 2][:at]
    assert came[at:] == [0, 1, 2]


@pytest.mark.parametrize("rest", [False, True], ids=["sdk", "pulsar"])
@pytest.mark.parametrize(("aborted", "next_"), [(0b110, 0b001), (0b011, 0b100), (0b001, 0b110)])
async def test_an_acknowledgement_between_an_abort_and_the_return_of_its_batch_means_its_own_messages(
    running: Cluster, monkeypatch: pytest.MonkeyPatch, aborted: int, next_: int, rest: bool
) -> None:
    """A consumer that gives much back is before it in the queue. The batch has fewer messages outstanding than it has,
    which must not be taken for its size: the rest would be acknowledged as well, or this would be acknowledged not at
    all."""
    await filled(running, 1, batch=3)
    mine = await consumer(running, type=SHARED)
    (batch,) = await received(mine, 1)
    joins_of(running)
    subscription, position = subscription_of(running), _at([batch], batch.entry_id)
    (holder,) = subscription.consumers.values()

    def acked(bits: int) -> TxnAcks:
        wanted = TxnAcks()
        wanted.add(position, bits)
        return wanted

    subscription.ack_in_transaction(holder, X, acked(aborted), None, rest=rest)
    with monkeypatch.context() as patched:
        patched.setattr(RedeliveryReturnQueue, "return_next_entries", lambda _: False)
        subscription.settle(X, committed=False)
        assert holder.member.outstanding == {position: 3}
        assert subscription.dispatcher.unacked == 3
        subscription.ack_in_transaction(holder, Y, acked(next_), None, rest=rest)
    subscription.settle(Y, committed=True)
    assert not subscription.cursor.is_acked(position)
    assert subscription.cursor.partial[position].bits == next_
    again = await mine.receive()
    assert sum(1 << index for index in again.acked_batch_indexes) == next_
