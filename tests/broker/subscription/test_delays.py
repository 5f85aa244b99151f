"""Delayed delivery on a real broker, on a clock that the test moves: buckets, restarts, what users met."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.managed_ledger import TopicFenced
from magnetar.broker.log.reader import TopicLogReader
from magnetar.broker.log.snapshot_ledger import TopicStateLedgers
from magnetar.broker.session import summaries
from magnetar.broker.subscription import delays as driver
from magnetar.broker.subscription.core import delays as core
from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.broker.subscription.subscription import Subscription
from magnetar.broker.topic import statistics as backlog
from magnetar.client import aio
from magnetar.client.common.errors import Timeout
from magnetar.client.model.settings import ConsumerType
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, NotAllowed, Unavailable, from_wire
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from tests.broker.topic.test_maintenance import TOPIC, Deployment, deployment
from tests.broker.topic.test_maintenance import at as at
from tests.support.cluster import payloads_of

SHARED, KEY_SHARED, EXCLUSIVE = wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED, wire.Subscribe.EXCLUSIVE
MINUTE = 60_000


def subscription(at: Deployment, name: str = "s") -> Subscription:
    return at.topic.find_subscription(name)


async def delayed(at: Deployment, count: int, delay_ms: int = 10 * MINUTE, step_ms: int = 0) -> list[bytes]:
    """Publishes so many, each due `step_ms` after the one before."""
    producer, now_ms = await at.producer(f"delaying-{count}"), at.clock.wall_ms()
    payloads = [b"d%d" % number for number in range(count)]
    for number, payload in enumerate(payloads):
        producer.publish(payload, deliver_at_ms=now_ms + delay_ms + number * step_ms)
    for _ in payloads:
        await producer.next("receipt")
    await producer.close()
    return payloads


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def moved_on(at: Deployment, seconds: float) -> None:
    """The clock goes on; whoever sleeps looks at it."""
    at.clock.ahead_s += seconds
    for each in at.topic.subscriptions.values():
        each.pump.wake()


async def restarted(at: Deployment) -> None:
    await at.broker.close()
    at.running.brokers.remove(at.broker)
    at.broker = await at.running.add_broker(delayed_seal_entries=20)


async def sealed(at: Deployment, name: str = "s") -> None:
    """All that is far off is on disk, and named."""
    delays = subscription(at, name).delayed
    assert delays is not None
    await until(lambda: delays._sealing is None)
    draft = delays.core.seal_bucket(delays.now_ms, least=1)
    if draft is not None:
        await delays._spawn(delays._store(draft))


async def test_the_end_of_a_terminated_topic_is_told_after_what_was_delayed(at: Deployment) -> None:
    consumer = await at.consumer("s", type=SHARED)
    payloads = await delayed(at, 2, MINUTE, MINUTE)
    await at.topic.log.terminate()
    subscription(at).pump.wake()
    assert await consumer.quiet(), "two messages are to come"
    await moved_on(at, 61)
    assert await consumer.receive_payloads(1) == payloads[:1]
    assert await consumer.quiet(), "one message is to come"
    await moved_on(at, 61)
    assert await consumer.receive_payloads(1) == payloads[1:]
    await consumer.next("end_of_topic")


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
async def test_a12_shared_types_get_it_when_it_is_due_and_others_at_once(type_: int, at: Deployment) -> None:
    at_once = await at.consumer("exclusive")
    shared = await at.consumer("s", type=type_)
    payloads = await delayed(at, 5, MINUTE)
    assert await at_once.receive_payloads(5) == payloads
    assert await shared.quiet()
    stats = subscription(at)
    assert stats.delayed is not None
    assert stats.delayed.core.count == 5
    assert await at.backlog("s") == 5
    assert stats.dispatcher.unacked == 0
    await moved_on(at, 30)
    assert await shared.quiet()
    await moved_on(at, 30)
    found = [await shared.receive() for _ in range(5)]
    assert [each.redelivery_count for each in found] == [0] * 5
    await shared.ack(*found)
    assert await at.backlog("s") == 0


@pytest.mark.parametrize("when", ["waiting", "delivered", "restarted"])
async def test_a_time_of_day_that_runs_back_delivers_later_and_once(
    when: str, monkeypatch: pytest.MonkeyPatch, at: Deployment
) -> None:
    """By as much as it ran back. What is delivered already is not delivered again, unless its broker forgets that."""
    shared, back_ms = await at.consumer("s", type=SHARED), 0
    honest = at.clock.wall_ms
    monkeypatch.setattr(at.clock, "wall_ms", lambda: honest() - back_ms)
    payloads = await delayed(at, 3, MINUTE)
    await moved_on(at, 30 if when == "waiting" else 61)
    found = [] if when == "waiting" else [await shared.receive() for _ in payloads]
    back_ms = MINUTE
    await moved_on(at, 0)
    if when == "restarted":
        await restarted(at)
        found, shared = [], await at.consumer("s", type=SHARED)
    assert await shared.quiet()
    if not found:
        await moved_on(at, 31 if when == "waiting" else 0)
        assert await shared.quiet(), "it would be due, had the clock not run back"
        await moved_on(at, 60)
        found = [await shared.receive() for _ in payloads]
    assert [payload for each in found for payload in payloads_of(each.entry)] == payloads
    await shared.ack(*found)
    assert await shared.quiet()
    await until(lambda: not subscription(at).dispatcher.unacked)
    assert await at.backlog("s") == 0


@pytest.mark.parametrize("comes_first", [True, False])
async def test_it_comes_by_itself_when_nothing_else_happens(comes_first: bool, at: Deployment) -> None:
    """Whether it was noted when it was stored, or read and held."""
    shared = await at.consumer("s", type=SHARED) if comes_first else None
    payloads = await delayed(at, 2, 300, 50)
    shared = shared or await at.consumer("s", type=SHARED)
    assert await shared.receive_payloads(2) == payloads


async def test_others_pass_it_and_it_comes_in_time_order(at: Deployment) -> None:
    shared, producer, now_ms = await at.consumer("s", type=SHARED), await at.producer(), at.clock.wall_ms()
    for number, delay_s in enumerate((30, 0, 10, 0, 20)):
        await producer.send(b"%d" % number, deliver_at_ms=now_ms + delay_s * 1000 if delay_s else 0)
    assert await shared.receive_payloads(2) == [b"1", b"3"]
    for expected in (b"2", b"4", b"0"):
        await moved_on(at, 10)
        assert await shared.receive_payloads(1) == [expected]
    assert next(iter(subscription(at).consumers.values())).member.redelivered_messages == 0


async def test_a14_a_restart_finds_the_buckets_and_reads_nothing_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path, delayed_seal_entries=20) as at:
        await at.consumer("s", type=SHARED)
        payloads = await delayed(at, 100, 10 * MINUTE, 1000)
        await sealed(at)
        await restarted(at)
        reads: list[Position] = []
        read = TopicLogReader.read

        async def counted(self: TopicLogReader, position: Position, *rest: Any) -> Any:
            reads.append(position)
            return await read(self, position, *rest)

        monkeypatch.setattr(TopicLogReader, "read", counted)
        shared = await at.consumer("s", type=SHARED)
        await until(lambda: subscription(at).pump.blocked is Blocked.DELAYED)
        assert subscription(at).dispatcher.delays is not None
        assert subscription(at).dispatcher.delays.count == 100
        assert reads == [], "the buckets say what waits"
        await moved_on(at, 10 * 60 + 50)
        await shared.receive_payloads(50)
        await moved_on(at, 60)
        assert sorted(await shared.receive_payloads(49)) != []
        assert len(payloads) == 100


async def test_buckets_go_when_they_are_drained_and_with_their_subscription(tmp_path: Path) -> None:
    async with deployment(tmp_path, delayed_seal_entries=20) as at:
        shared, _ = await at.consumer("s", type=SHARED), await at.consumer("other", type=SHARED)
        await delayed(at, 50)
        await sealed(at)
        await sealed(at, "other")
        mine, others = (subscription(at, name).store for name in ("s", "other"))
        assert mine is not None
        assert others is not None
        ledgers = [bucket.ledger_id for store in (mine, others) for bucket in store.delay_buckets]
        assert len(ledgers) >= 2
        await moved_on(at, 11 * 60)
        await shared.receive_payloads(50)
        await until(lambda: not mine.delay_buckets)
        await at.topic.registry.unsubscribe("other", force=True)
        ledger_client = at.topic.registry._storage.ledgers
        for ledger_id in ledgers:
            await until_gone(ledger_client, ledger_id)


async def until_gone(ledgers: Any, ledger_id: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await ledgers.read_record(ledger_id)
            except MagnetarError:
                return
            await asyncio.sleep(0.01)


async def test_a_bucket_that_cannot_be_read_costs_reading_the_log_and_no_message(tmp_path: Path) -> None:
    async with deployment(tmp_path, delayed_seal_entries=20) as at:
        await at.consumer("s", type=SHARED)
        payloads = await delayed(at, 50)
        await sealed(at)
        store = subscription(at).store
        assert store is not None
        for bucket in store.delay_buckets:
            await at.topic.registry._storage.ledgers.delete(bucket.ledger_id)
        await restarted(at)
        shared = await at.consumer("s", type=SHARED)
        await until(lambda: subscription(at).pump.blocked is Blocked.DELAYED)
        assert await shared.quiet(), "what is read again is still early"
        await moved_on(at, 10 * 60)
        assert sorted(await shared.receive_payloads(50)) == sorted(payloads)


async def test_switched_off_all_come_at_once_and_a_delay_that_is_too_long_is_refused(at: Deployment) -> None:
    shared, producer = await at.consumer("s", type=SHARED), await at.producer()
    await delayed(at, 10)
    await at.lay_down(max_delay_ms=MINUTE)
    with pytest.raises(NotAllowed, match="longest, 60000 ms"):
        await failed(producer, at.clock.wall_ms() + 2 * MINUTE)
    await producer.send(b"ok", deliver_at_ms=at.clock.wall_ms() + MINUTE // 2)
    await at.lay_down(delayed_delivery=False)
    await moved_on(at, 0)
    assert len(await shared.receive_payloads(11)) == 11


async def failed(producer: Any, at_ms: int) -> None:
    producer.publish(b"late", deliver_at_ms=at_ms)
    raise from_wire((await producer.next("failed")).error)


async def test_complaint_18_a_restart_needs_no_rebuild_and_memory_does_not_hold_the_index(tmp_path: Path) -> None:
    async with deployment(tmp_path, delayed_seal_entries=100) as at:
        await at.consumer("s", type=SHARED)
        await delayed(at, 1000)
        await sealed(at)
        held = subscription(at).dispatcher.delays
        assert held is not None
        assert held.count == 1000
        assert held.memory_bytes < 1000, "two rows"
        await restarted(at)
        await at.consumer("s", type=SHARED)
        await until(lambda: subscription(at).delayed.is_ready)  # type: ignore[union-attr]
        again = subscription(at).dispatcher.delays
        assert again is not None
        assert again.count == 1000
        assert again.memory_bytes == held.memory_bytes, "segments are read when they are near"


async def test_complaint_19_past_the_memory_budget_more_is_sealed_and_nothing_is_dropped_or_paused(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, delayed_memory_bytes=20 * core.UNBUCKETED_KEY_BYTES) as at:
        shared = await at.consumer("s", type=SHARED)
        payloads = await delayed(at, 200, 5000)  # due soon: sealed all the same
        delays = subscription(at).delayed
        assert delays is not None
        await until(lambda: delays._sealing is None and not delays.core.must_make_bucket)
        assert delays.core.bucket_count > 0
        assert delays.core.count == 200
        assert subscription(at).pump.blocked is Blocked.DELAYED
        await moved_on(at, 10)
        assert sorted(await shared.receive_payloads(200)) == sorted(payloads)


async def test_while_buckets_cannot_be_written_it_says_so_and_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BUCKET_RETRY_S", 0.01)
    async with deployment(tmp_path, delayed_memory_bytes=20 * core.UNBUCKETED_KEY_BYTES) as at:
        shared = await at.consumer("s", type=SHARED)
        write = TopicStateLedgers.create_closed_ledger

        async def away(self: TopicStateLedgers, entries: list[bytes]) -> Any:
            raise Unavailable("no bookie")

        monkeypatch.setattr(TopicStateLedgers, "create_closed_ledger", away)
        await delayed(at, 300, 5000)
        await until(lambda: subscription(at).pump.blocked is Blocked.DELAYS)
        assert subscription(at).dispatcher.delays.count < 300  # type: ignore[union-attr]
        monkeypatch.setattr(TopicStateLedgers, "create_closed_ledger", write)
        await until(lambda: subscription(at).dispatcher.delays.count == 300)  # type: ignore[union-attr]
        await moved_on(at, 10)
        assert len(await shared.receive_payloads(300)) == 300


async def test_complaint_20_consumers_that_leave_and_return_cause_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path, cache_bytes=0) as at:
        first = await at.consumer("s", type=SHARED)
        payloads = await delayed(at, 100)
        await first.close()
        await until(lambda: not subscription(at).consumers)

        async def never(self: TopicLogReader, position: Position, *rest: Any) -> Any:
            raise AssertionError(f"{position} is read again")

        read = TopicLogReader.read
        monkeypatch.setattr(TopicLogReader, "read", never)
        second = await at.consumer("s", type=SHARED)
        await until(lambda: subscription(at).pump.blocked is Blocked.DELAYED)
        assert subscription(at).dispatcher.delays.count == 100  # type: ignore[union-attr]
        monkeypatch.setattr(TopicLogReader, "read", read)
        await moved_on(at, 10 * 60)
        assert sorted(await second.receive_payloads(100)) == sorted(payloads)


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that a timer of delayed delivery goes off."""
    found: list[None] = []
    ring = driver.DelayedDelivery._ring

    def counted(self: driver.DelayedDelivery) -> None:
        found.append(None)
        ring(self)

    monkeypatch.setattr(driver.DelayedDelivery, "_ring", counted)
    return found


async def test_while_a_bucket_is_looked_for_the_loop_does_not_turn_in_circles(
    monkeypatch: pytest.MonkeyPatch, rings: list[None], at: Deployment
) -> None:
    await at.consumer("s", type=SHARED)
    for count in (20, 21):
        await delayed(at, count, 11_000)
        await sealed(at)
    go_on = asyncio.Event()
    directory = driver.DelayedDelivery._directory

    async def slow(self: driver.DelayedDelivery, ledger_id: int) -> Any:
        if ledger_id == max(bucket.ledger_id for bucket in self._places.delay_buckets):
            await go_on.wait()
        return await directory(self, ledger_id)

    monkeypatch.setattr(driver.DelayedDelivery, "_directory", slow)
    await restarted(at)
    consumer = await at.consumer("s", type=SHARED)
    at.clock.ahead_s += 9  # what the first bucket holds is near
    await until(lambda: subscription(at).dispatcher.delays.count >= 20)  # type: ignore[union-attr]
    before = len(rings)
    subscription(at).pump.wake()
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(rings) - before < 5
    go_on.set()
    at.clock.ahead_s += 3
    assert len(await consumer.receive_payloads(41)) == 41


async def test_while_nobody_takes_what_is_due_the_loop_does_not_turn_in_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rings: list[None]
) -> None:
    monkeypatch.setattr(driver, "DUE_ENTRIES_WAITING_MAX", 2)
    async with deployment(tmp_path) as at:
        consumer = await at.consumer("s", type=SHARED, permits=1)
        await delayed(at, 5, 1000)
        await (await at.producer("at once")).send(b"takes the permit")
        await consumer.receive()
        await moved_on(at, 2)
        await until(lambda: subscription(at).dispatcher.redelivery_entry_count == 2)
        at.clock.ahead_s += 1
        rings.clear()
        await until(lambda: len(rings) > 0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(rings) < 5
        consumer.permits(5)
        assert len(await consumer.receive_payloads(5)) == 5


async def test_while_a_seek_or_a_close_holds_what_is_due_the_loop_does_not_turn_in_circles(
    rings: list[None], at: Deployment
) -> None:
    consumer = await at.consumer("s", type=SHARED)
    await delayed(at, 5, 1000)
    subscription(at).pump.is_moving = True
    at.clock.ahead_s += 2
    rings.clear()
    await until(lambda: len(rings) > 0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(rings) < 5
    subscription(at).pump.is_moving = False
    subscription(at).pump.wake()
    assert len(await consumer.receive_payloads(5)) == 5


async def test_a_topic_closes_in_order_while_one_bucket_is_sealed_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path, delayed_seal_entries=5) as at:
        go_on = asyncio.Event()
        write = TopicStateLedgers.create_closed_ledger

        async def slow(self: TopicStateLedgers, entries: list[bytes]) -> int:
            await go_on.wait()
            return await write(self, entries)

        monkeypatch.setattr(TopicStateLedgers, "create_closed_ledger", slow)
        await at.consumer("s", type=SHARED)
        await delayed(at, 5)
        await delayed(at, 6)
        delays = subscription(at).delayed
        assert delays is not None
        assert delays._sealing is not None
        closing = asyncio.create_task(delays.close())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        assert delays.core.bucket_count == 2


async def test_a_topic_closes_in_order_when_another_broker_has_it_and_a_bucket_cannot_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path, delayed_seal_entries=5) as at:
        go_on = asyncio.Event()

        async def fenced(*_: Any) -> None:
            await go_on.wait()
            raise TopicFenced("another broker has it")

        monkeypatch.setattr(DurableCursor, "store_delay_bucket_changes", fenced)
        await at.consumer("s", type=SHARED)
        await delayed(at, 5)
        await delayed(at, 6)
        delays = subscription(at).delayed
        assert delays is not None
        await until(lambda: delays._sealing is not None)
        closing = asyncio.create_task(delays.close())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        assert delays.core.bucket_count == 0
        assert delays.core.count == 11, "all of them are held, and none is in a bucket"
        delays.core.check()


async def test_complaint_21_any_delay_lies_on_disk(at: Deployment) -> None:
    """RocketMQ's timers end after three days; a year is a row in a segment."""
    await at.consumer("s", type=SHARED)
    (payload,) = await delayed(at, 1, 365 * 24 * 60 * MINUTE)
    await sealed(at)
    await restarted(at)
    shared = await at.consumer("s", type=SHARED)
    await moved_on(at, 364 * 24 * 3600)
    assert await shared.quiet()
    await moved_on(at, 24 * 3600)
    assert await shared.receive_payloads(1) == [payload]


async def test_complaint_22_a_quota_may_leave_out_what_is_not_due(at: Deployment) -> None:
    await at.consumer("s", type=SHARED)
    await at.lay_down(backlog_quota_bytes=1 << 20, backlog_quota_counts_delayed=False)
    producer, now_ms = await at.producer(), at.clock.wall_ms()
    for _ in range(3):
        await producer.send(b"x" * (500 << 10), deliver_at_ms=now_ms + 10 * MINUTE)
    await at.later(1)
    assert not at.topic.maintenance.must_pause_producers()
    await at.lay_down(backlog_quota_bytes=1 << 20, backlog_quota_counts_delayed=True)
    await at.later(1)
    assert at.topic.maintenance.must_pause_producers()


async def test_skipping_and_clearing_forgets_what_is_delayed(at: Deployment) -> None:
    shared = await at.consumer("s", type=SHARED)
    await delayed(at, 30)
    await sealed(at)
    await backlog.skip_messages(at.topic.log, subscription(at), 10)
    assert subscription(at).dispatcher.delays.count == 20  # type: ignore[union-attr]
    await backlog.skip_messages(at.topic.log, subscription(at), -1)
    assert subscription(at).dispatcher.delays.count == 0  # type: ignore[union-attr]
    await moved_on(at, 11 * 60)
    assert await shared.quiet()


async def test_what_is_reconsumed_later_waits_in_the_retry_topic_also_over_a_restart(tmp_path: Path) -> None:
    """Through the SDK: acknowledged in its topic, delayed in the other one, and counted."""

    async def retrying(client: aio.Client) -> Any:
        return await client.subscribe(TOPIC, "s", ConsumerType.Shared, enable_retry=True)

    async with deployment(tmp_path) as at:
        async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
            mine = await retrying(client)
            async with await client.create_producer(TOPIC) as producer:
                await producer.send(b"later")
            await mine.reconsume_later(await mine.receive(30_000), timedelta(minutes=10), {"why": "busy"})
            with pytest.raises(Timeout):
                await mine.receive(200)
        assert await at.backlog("s") == 0, "it is the other topic's now"
        await restarted(at)
        async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
            mine = await retrying(client)
            with pytest.raises(Timeout):
                await mine.receive(200)
            retries = at.broker.topics[f"{TOPIC}-s-RETRY"].find_subscription("s")
            assert retries.dispatcher.delays is not None
            assert retries.dispatcher.delays.count == 1
            at.clock.ahead_s += 601
            retries.pump.wake()
            again = await mine.receive(30_000)
            assert (again.data(), again.properties()["RECONSUMETIMES"]) == (b"later", "1")
            assert (again.properties()["DELAY_TIME"], again.properties()["why"]) == ("600000", "busy")
            await mine.acknowledge(again)


async def test_statistics_say_that_what_is_left_is_due_later_and_how_old_it_is(at: Deployment) -> None:
    shared, producer, now_ms = await at.consumer("s", type=SHARED), await at.producer(), at.clock.wall_ms()
    await producer.send(b"later", deliver_at_ms=now_ms + 10 * MINUTE)
    await until(lambda: subscription(at).pump.blocked is Blocked.DELAYED)
    (found,) = (await summaries.collect_topic_stats(at.topic, "here")).subscriptions
    assert (found.backlog, found.delayed, found.blocked) == (1, 1, "what is left is to be delivered later")
    assert found.oldest_ms >= now_ms
    assert await shared.quiet()
