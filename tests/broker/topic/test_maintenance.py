"""The life of a topic on a real broker, on a clock that the test moves: expiry, quotas, rolling, endings."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.session import summaries
from magnetar.broker.topic import statistics as backlog
from magnetar.broker.topic.maintenance import MAINTENANCE_STEPS, TopicMaintenance
from magnetar.broker.topic.topic import Topic
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    BacklogQuotaExceeded,
    BackPressure,
    Busy,
    ConsumerBusy,
    MessageTooLarge,
    NotAllowed,
    ProducerBusy,
    SubscriptionNotFound,
    Unavailable,
)
from magnetar.proto.names import Position, TopicName
from magnetar.proto.policies import Policies
from magnetar.proto.states import AckedEntry, Blocked, LedgerStays
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
TURNS = 60
BOUNDED = {"Changed", "LedgerDescriptor"}
"""The metadata's history, and what a bookie knows of a ledger until its next garbage collection."""
NAME = TopicName.parse(TOPIC)
EARLIEST = wire.Subscribe.EARLIEST


class Clock:
    """The system's, moved on by hand."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.ahead_s = inner, 0.0

    def wall_ms(self) -> int:
        return int(self._inner.wall_ms() + self.ahead_s * 1000)

    def monotonic(self) -> float:
        return float(self._inner.monotonic() + self.ahead_s)


class Deployment:
    def __init__(self, running: Cluster, clock: Clock) -> None:
        self.running, self.clock = running, clock
        self.broker = running.brokers[0]

    @property
    def topic(self) -> Topic:
        return self.broker.topics[TOPIC]

    async def lay_down(self, **policies: Any) -> None:
        await self.broker.topic_manager.policies.change_policies(NAME.namespace_name, NAME, Policies(**policies))

    async def producer(self, name: str = "p") -> TestProducer:
        return await TestProducer(self.running.world, self.broker, TOPIC, name).opened()

    async def consumer(self, name: str = "s", **options: Any) -> TestConsumer:
        options.setdefault("initial_position", EARLIEST)
        return await TestConsumer(self.running.world, self.broker, TOPIC, name, **options).ready()

    async def later(self, seconds: float) -> None:
        self.clock.ahead_s += seconds
        await self.broker.topic_manager.maintain_topics()

    async def everybody_left(self) -> None:
        while self.topic.connected_client_count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def backlog(self, name: str) -> Any:
        return backlog.count_unacknowledged(self.topic.log, self.topic.find_subscription(name))


@asynccontextmanager
async def deployment(folder: Path, **changes: Any) -> AsyncIterator[Deployment]:
    async with cluster(folder, brokers=0, **changes) as running:
        clock = Clock(running.world.clock)
        running.world = replace(running.world, clock=clock)
        await running.add_broker(**changes)
        yield Deployment(running, clock)


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with deployment(tmp_path) as at:
        yield at


async def test_a15_what_nobody_acknowledged_in_time_expires_exactly_and_for_each_subscription(at: Deployment) -> None:
    await at.lay_down(message_ttl_s=60)
    producer, first, second = await at.producer(), await at.consumer("a"), await at.consumer("b")
    for number in range(20):
        await producer.send(b"%d" % number)
        at.clock.ahead_s += 1
    assert await first.receive_payloads(20) == [b"%d" % number for number in range(20)]
    await second.receive_payloads(20)
    await at.later(49)  # 69 s after the first, 50 after the last
    left = await at.backlog("a")
    assert 10 <= left <= 12, "those that are not a minute old stay, and no others"
    assert await at.backlog("b") == left
    await at.later(60)
    assert await at.backlog("a") == await at.backlog("b") == 0
    assert at.topic.maintenance.expired == 40


async def test_what_expires_at_its_consumer_or_before_it_is_due_does_not_come_and_is_acknowledged_without_error(
    at: Deployment,
) -> None:
    await at.lay_down(message_ttl_s=10)
    producer, consumer = await at.producer(), await at.consumer(type=wire.Subscribe.SHARED)
    await producer.send(b"held")
    held = await consumer.receive()
    await producer.send(b"not due", deliver_at_ms=at.clock.wall_ms() + 60_000)
    await at.later(11)
    assert await at.backlog("s") == 0
    consumer.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=held.ledger_id, entry_id=held.entry_id)]))
    await consumer.ack(held)
    await at.later(60)
    assert await consumer.quiet()


async def test_expiry_reads_no_single_messages_and_nothing_when_nothing_is_due(
    monkeypatch: pytest.MonkeyPatch, at: Deployment
) -> None:
    await at.lay_down(message_ttl_s=60)
    producer, _ = await at.producer(), await at.consumer(permits=0)
    for number in range(200):
        await producer.send(b"%d" % number)
    reads = 0
    entry = at.topic.log.reader.read_entry

    async def counted(position: Any) -> Any:
        nonlocal reads
        reads += 1
        return await entry(position)

    monkeypatch.setattr(at.topic.log.reader, "read_entry", counted)
    for _ in range(10):
        await at.later(1)
    assert reads == 1, "the age of the oldest message is read once"
    await at.later(100)
    assert await at.backlog("s") == 0
    assert reads < 40, "a bisection, not a scan"


def in_memory() -> Counter[str]:
    """How many objects of each of our classes there are, and tasks."""
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    ours = {each.__qualname__: count for each, count in types.items() if str(each.__module__).startswith("magnetar.")}
    return Counter({**ours, "Task": len(asyncio.all_tasks())})


async def test_complaint_23_ledgers_that_come_and_go_leave_nothing_behind_in_memory(at: Deployment) -> None:
    producer, consumer = await at.producer(), await at.consumer()

    async def turn() -> None:
        await producer.send(b"x" * 1000)
        await consumer.ack(await consumer.receive())
        await at.topic.log.roll_ledger()
        await at.topic.trim_ledgers()

    for _ in range(TURNS):  # some that ended are remembered (ledger/client.py)
        await turn()
    before = in_memory()
    for _ in range(TURNS):
        await turn()
    grown = in_memory()
    grown.subtract(before)
    assert {name: count for name, count in grown.items() if count >= TURNS // 2 and name not in BOUNDED} == {}
    assert len(at.topic.log.shape.spans) <= 2


async def test_complaint_26_an_idle_topics_open_ledger_is_rolled_and_retention_frees_it(at: Deployment) -> None:
    await at.lay_down(retention_minutes=10, retention_mib=-1)
    producer, consumer = await at.producer(), await at.consumer()
    await producer.send(b"old")
    await consumer.ack(await consumer.receive())
    old = at.topic.log.shape.tail_span.ledger_id
    await at.later(1)
    assert at.topic.log.shape.tail_span.ledger_id == old, "it is not idle yet"
    await at.later(61)
    assert at.topic.log.shape.tail_span.ledger_id > old
    assert at.topic.log.shape.size > 0, "retained for ten minutes"
    await at.later(601)
    assert [span.ledger_id for span in at.topic.log.shape.spans] == [at.topic.log.shape.tail_span.ledger_id]
    assert at.topic.log.shape.size == 0
    receipt = await producer.send(b"new")
    assert receipt.index == 1, "the numbers go on"
    assert await consumer.receive_payloads(1) == [b"new"]


async def test_messages_are_kept_for_who_subscribes_later_until_their_time_is_over(tmp_path: Path) -> None:
    """A roll-over loses nothing that nobody has subscribed to; the policy of the topic says for how long."""
    async with deployment(tmp_path, roll_entries=1) as at:
        await at.lay_down(unsubscribed_minutes=10, unsubscribed_mib=-1)
        producer = await at.producer()
        for number in range(3):
            await producer.send(b"%d" % number)
        await at.later(500)
        assert (await summaries.collect_topic_stats(at.topic, "")).unsubscribed == "kept for 10 minutes"
        stays = [each.stays for each in summaries.collect_internal_stats(at.topic, 0).ledgers]
        assert stays[:2] == [LedgerStays.NOT_SUBSCRIBED.value] * 2
        consumer = await at.consumer()
        assert await consumer.receive_payloads(3) == [b"0", b"1", b"2"], "a subscription that came later has them all"
        assert (await summaries.collect_topic_stats(at.topic, "")).unsubscribed == ""
        await at.later(700)
        assert at.topic.log.shape.first_index == 0, "the subscription holds them now"
        await at.topic.registry.unsubscribe("s", force=True)
        await at.topic.trim_ledgers()
        assert at.topic.log.shape.first_index > 0, "their time is over"


async def test_by_default_a_topic_without_subscriptions_keeps_seven_days_and_a_gibibyte(tmp_path: Path) -> None:
    async with deployment(tmp_path, roll_entries=1) as at:
        producer = await at.producer()
        for number in range(3):
            await producer.send(b"%d" % number)
        assert (
            await summaries.collect_topic_stats(at.topic, "")
        ).unsubscribed == "kept for 10080 minutes and up to 1024 MiB"
        await at.later(7 * 86_400 - 60)
        assert at.topic.log.shape.first_index == 0
        await at.later(120)
        await at.topic.trim_ledgers()
        assert at.topic.log.shape.first_index > 0


async def test_complaint_28_nothing_changes_when_no_next_ledger_can_be_made(
    monkeypatch: pytest.MonkeyPatch, at: Deployment
) -> None:
    producer, consumer = await at.producer(), await at.consumer()
    await producer.send(b"1")
    await consumer.ack(await consumer.receive())

    async def full(*_: Any, **__: Any) -> Any:
        raise Unavailable("no bookie has room")

    monkeypatch.setattr(at.topic.log._managed_ledger, "make_next_ledger_record", full)
    await at.later(61)
    await producer.send(b"2")
    assert await consumer.receive_payloads(1) == [b"2"], "the ledger goes on"


async def test_a17_past_the_quota_publishes_are_refused_until_there_is_room(at: Deployment) -> None:
    await at.lay_down(backlog_quota_s=60, backlog_quota_policy="producer_exception")
    producer, consumer = await at.producer(), await at.consumer()
    await producer.send(b"1")
    await at.later(61)
    with pytest.raises(BacklogQuotaExceeded):
        await at.producer("late")
    producer.publish(b"x")
    failed = (await producer.next("failed")).error
    assert failed.code == BacklogQuotaExceeded.code
    await consumer.ack(await consumer.receive())
    await at.later(1)
    producer.sequence_id = 10
    await producer.send(b"2")


async def test_a17_past_the_quota_producers_wait_and_go_on_by_themselves(at: Deployment) -> None:
    await at.lay_down(backlog_quota_s=60)
    producer, consumer = await at.producer(), await at.consumer()
    await producer.send(b"1")
    await at.later(61)
    assert at.broker.topic_manager.is_blocking_producers
    producer.publish(b"2")  # was asked for before the stream was left alone
    producer.publish(b"3")
    await consumer.ack(await consumer.receive())
    await at.later(1)
    assert not at.broker.topic_manager.is_blocking_producers
    assert await consumer.receive_payloads(2) == [b"2", b"3"]


async def test_a17_past_the_quota_the_oldest_messages_go_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, at: Deployment
) -> None:
    await at.lay_down(backlog_quota_bytes=1 << 20, backlog_quota_policy="consumer_backlog_eviction")
    producer, _ = await at.producer(), await at.consumer(permits=0)
    for _ in range(15):
        await producer.send(bytes(100_000))
    await at.later(1)
    assert await at.backlog("s") == 10, "a MiB stays"
    for _ in range(3):
        await producer.send(bytes(200_000))
        await at.later(1)
    assert at.topic.maintenance.evicted > 5
    said = [each.message for each in caplog.records if "given up" in each.message]
    assert said == [f"{NAME}: the oldest messages are given up: the backlog quota is reached: 5 entries so far"]


async def test_an_eviction_that_fails_at_another_subscription_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evict, seen = TopicMaintenance.skip_whole_messages, list[str]()

    async def second_fails(of: TopicMaintenance, subscription: Any, mark: Any) -> int:
        seen.append(subscription.name)
        if len(seen) == 2:
            raise Unavailable("the bookies do not answer")
        return await evict(of, subscription, mark)

    async with deployment(tmp_path) as at:
        await at.lay_down(backlog_quota_bytes=1 << 20, backlog_quota_policy="consumer_backlog_eviction")
        producer, _, _ = await at.producer(), await at.consumer("s", permits=0), await at.consumer("t", permits=0)
        for _ in range(15):
            await producer.send(bytes(100_000))
        monkeypatch.setattr(TopicMaintenance, "skip_whole_messages", second_fails)
        await at.later(1)
        assert sorted(seen) == ["s", "t"]
        assert sum("given up" in each.message for each in caplog.records) == 1


async def test_t6_a_topic_that_nobody_uses_is_deleted_with_its_policies(at: Deployment) -> None:
    producer = await at.producer()
    await at.lay_down(inactive_s=60)
    await at.later(100)
    assert TOPIC in at.broker.topics, "a producer is there"
    await producer.close()
    while at.topic.producers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await at.later(1)
    await at.later(58)
    assert TOPIC in at.broker.topics
    await at.later(5)
    assert TOPIC not in at.broker.topics
    assert await at.broker.topic_manager.catalog.count_partitions(NAME) is None
    assert await at.broker.topic_manager.policies.read_uninherited_policies(NAME.namespace_name, NAME) == Policies()


async def test_t6_a_topic_with_a_subscription_goes_only_when_that_is_wanted_and_it_has_read_everything(
    at: Deployment
) -> None:
    producer, consumer = await at.producer(), await at.consumer()
    await producer.send(b"1")
    delivery = await consumer.receive()
    await at.lay_down(inactive_s=60, inactive_mode="delete_when_subscriptions_caught_up")
    await producer.close()
    await consumer.close()
    await at.everybody_left()
    await at.later(1)
    await at.later(100)
    assert TOPIC in at.broker.topics, "something is left to read"
    acked = AckedEntry(Position(delivery.ledger_id, delivery.entry_id))
    at.topic.find_subscription("s").ack(None, [acked])
    await at.later(1)
    assert TOPIC not in at.broker.topics


@pytest.mark.parametrize("mode", ["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"])
async def test_t6_a_topic_that_is_used_again_after_the_look_is_not_deleted(
    at: Deployment, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """What a producer that came just then was confirmed would be lost."""
    producer = await at.producer()
    await at.lay_down(inactive_s=60, inactive_mode=mode)
    await producer.close()
    await at.everybody_left()
    delete, late = at.broker.topic_manager.delete_topic, list[Any]()

    async def delete_later(*args: Any, **options: Any) -> None:
        late.append(await at.producer())
        await late[0].send(b"1")
        await delete(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(at.broker.topic_manager, "delete_topic", delete_later)
        await at.later(100)
    await late[0].send(b"2")
    assert at.topic.log.shape.end_index == 2


async def test_t6_a_client_that_came_and_left_between_two_looks_has_used_its_topic(at: Deployment) -> None:
    await (await at.producer()).close()
    await at.lay_down(inactive_s=60)
    await at.everybody_left()
    for opened in (at.producer, lambda: at.consumer("reader", durable=False)):
        at.clock.ahead_s += 50
        client = await opened()
        await client.close()
        await at.everybody_left()
        await at.later(50)
        assert TOPIC in at.broker.topics
    await at.later(61)
    assert TOPIC not in at.broker.topics


async def test_s16_a_subscription_without_consumers_expires(at: Deployment) -> None:
    await at.lay_down(subscription_expiration_s=60)
    stays, goes = await at.consumer("stays"), await at.consumer("goes")
    await goes.close()
    while at.topic.find_subscription("goes").consumers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await at.later(1)
    await at.later(59)
    assert "goes" in at.topic.subscriptions
    await at.later(2)
    with pytest.raises(SubscriptionNotFound):
        at.topic.find_subscription("goes")
    assert at.topic.find_subscription("stays").consumers
    await stays.close()


async def test_t7_readers_of_a_terminated_topic_see_its_end_after_its_last_message(at: Deployment) -> None:
    producer, consumer = await at.producer(), await at.consumer(permits=1)
    await producer.send(b"1")
    await producer.send(b"2")
    assert await consumer.receive_payloads(1) == [b"1"]
    await at.topic.log.terminate()
    assert await consumer.quiet(), "one message is left"
    consumer.permits(1)
    assert await consumer.receive_payloads(1) == [b"2"]
    await consumer.next("end_of_topic")
    late = await at.consumer("late")
    assert await late.receive_payloads(2) == [b"1", b"2"]
    await late.next("end_of_topic")


async def test_t7_truncating_leaves_no_backlog_and_no_ledger_but_the_one_that_is_written(tmp_path: Path) -> None:
    async with deployment(tmp_path, roll_entries=2) as at:
        await at.lay_down(retention_minutes=-1, retention_mib=-1)
        producer, consumer = await at.producer(), await at.consumer(permits=0)
        for number in range(7):
            await producer.send(b"%d" % number)
        await at.topic.truncate_topic()
        assert await at.backlog("s") == 0
        assert len(at.topic.log.shape.spans) == 1
        assert at.topic.log.shape.size == 0
        await producer.send(b"next")
        consumer.permits(5)
        assert await consumer.receive_payloads(1) == [b"next"]


async def test_t7_truncating_a_compacted_topic_leaves_nothing_to_its_readers_and_nothing_in_its_log(
    tmp_path: Path
) -> None:
    async with deployment(tmp_path, roll_entries=2) as at:
        producer = await at.producer()
        for number in range(7):
            await producer.send(b"%d" % number, key=f"key-{number % 3}")
        at.topic.compaction.start()
        await at.topic.compaction.wait_finished()
        options = {"read_compacted": True, "type": wire.Subscribe.EXCLUSIVE}
        early, connected = await at.consumer("early", **options), await at.consumer("connected", permits=0, **options)
        assert await early.receive_payloads(3) == [b"4", b"5", b"6"]
        await early.leave()
        await producer.send(b"later", key="key-0")
        await at.topic.truncate_topic()
        assert at.topic.log.shape.size == 0
        with pytest.raises(Unavailable, match="was compacted"):
            await connected.next("receipt")
        await producer.send(b"next", key="key-1")
        for name in ("early", "connected", "new"):
            assert await (await at.consumer(name, **options)).receive_payloads(1) == [b"next"]
        await at.broker.topic_manager.unload_topic(NAME)
        reader = await at.consumer("reader", durable=False, **options)
        assert await reader.receive_payloads(1) == [b"next"]


async def test_t7_delete_has_guards_and_force_does_without_them(at: Deployment) -> None:
    await at.producer()
    await at.consumer()
    with pytest.raises(Busy):
        await at.broker.topic_manager.delete_topic(NAME, force=False)
    await at.broker.topic_manager.delete_topic(NAME, force=True)
    assert await at.broker.topic_manager.catalog.count_partitions(NAME) is None


async def test_a_step_that_fails_does_not_keep_the_others_from_being_done(
    monkeypatch: pytest.MonkeyPatch, at: Deployment
) -> None:
    await at.lay_down(subscription_expiration_s=1000)  # something may be due
    await at.producer()
    done: list[str] = []

    def failing(step: Any) -> Any:
        async def run(_: Any) -> None:
            done.append(step.__name__)
            raise Unavailable("bookies do not answer")

        return run

    monkeypatch.setattr(
        "magnetar.broker.topic.maintenance.MAINTENANCE_STEPS", tuple(failing(step) for step in MAINTENANCE_STEPS)
    )
    await at.later(1)
    assert done == [step.__name__ for step in MAINTENANCE_STEPS]


async def test_l1_a_subscription_past_its_dispatch_rate_says_so_and_goes_on_by_itself(at: Deployment) -> None:
    await at.lay_down(subscription_dispatch_rate_messages=50)
    producer, consumer = await at.producer(), await at.consumer()
    for number in range(70):
        producer.publish(b"%d" % number)
    assert await consumer.receive_payloads(50) == [b"%d" % number for number in range(50)]
    assert at.topic.find_subscription("s").pump.blocked is Blocked.THROTTLED
    assert await consumer.receive_payloads(20) == [b"%d" % number for number in range(50, 70)]
    assert at.topic.find_subscription("s").pump.rates[0].throttled > 0


async def test_l1_a_producer_past_the_publish_rate_is_read_slowly_and_loses_nothing(at: Deployment) -> None:
    await at.lay_down(publish_rate_messages=50)
    producer = await at.producer()
    begin = asyncio.get_running_loop().time()
    for number in range(120):
        await producer.send(b"%d" % number)
    assert asyncio.get_running_loop().time() - begin > 0.9, "50 at once, 70 more at 50 a second"
    assert at.topic.log.shape.end_index == 120


async def test_t10_limits_of_numbers_are_kept_and_said(at: Deployment) -> None:
    await at.lay_down(max_producers=1, max_consumers=2, max_consumers_per_subscription=1, max_subscriptions=2)
    await at.producer("one")
    with pytest.raises(ProducerBusy, match="1 producers"):
        await at.producer("two")
    await at.consumer("a")
    with pytest.raises(ConsumerBusy, match="subscription 'a' has 1 consumers"):
        await at.consumer("a", type=wire.Subscribe.SHARED)
    await at.consumer("b")
    with pytest.raises(NotAllowed, match="2 subscriptions"):
        await at.consumer("c")
    await at.lay_down(max_subscriptions=0)
    with pytest.raises(ConsumerBusy, match="has 2 consumers"):
        await at.consumer("c")
    await at.lay_down(max_producers=0)
    await at.producer("two")


async def test_t10_one_address_has_so_many_producers_and_consumers_and_who_returns_is_not_locked_out(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, max_same_address_producers=1, max_same_address_consumers=2) as at:
        open_producer = partial(TestProducer, at.running.world, at.broker, TOPIC)
        await open_producer("one", instance="i").opened()
        with pytest.raises(ProducerBusy, match=r"1 producers from .*127\.0\.0\.1"):
            await open_producer("two", instance="j").opened()
        await open_producer("one", instance="i", connection=1).opened()
        await at.consumer("a", instance="a")
        await at.consumer("b")
        with pytest.raises(ConsumerBusy, match=r"2 consumers from .*127\.0\.0\.1"):
            await at.consumer("c")
        await at.consumer("a", instance="a")


async def test_t5_a_consumer_makes_no_subscription_where_that_is_off(at: Deployment) -> None:
    await at.lay_down(auto_subscription_creation=False)
    with pytest.raises(SubscriptionNotFound, match="'s', and it is not made automatically"):
        await at.consumer("s")
    await at.topic.registry.subscribe("s")
    await at.consumer("s")
    await at.consumer("reader", durable=False)


async def test_l1_who_subscribes_too_often_is_told_to_come_back_and_others_are_not(at: Deployment) -> None:
    await at.lay_down(subscribe_rate=2, subscribe_rate_period_s=3600)
    shared: dict[str, Any] = {"type": wire.Subscribe.SHARED}  # the broker may not yet know that one has gone
    for _ in range(2):
        await (await at.consumer(consumer_name="restless", **shared)).close()
    with pytest.raises(BackPressure, match=r"'restless' has subscribed 2 times within 3600 s"):
        await at.consumer(consumer_name="restless", **shared)
    assert BackPressure.retryable
    await at.consumer(**shared, consumer_name="calm")
    await at.lay_down(subscribe_rate=0)
    await at.consumer(**shared, consumer_name="restless")


async def test_t10_a_smaller_message_size_holds_for_producers_that_are_there(at: Deployment) -> None:
    producer = await at.producer()
    await producer.send(bytes(2000))
    await at.lay_down(max_message_bytes=1000)
    producer.publish(bytes(2000))
    assert (await producer.next("failed")).error.code == MessageTooLarge.code
    assert (await at.producer("late")).answer.max_message_size == 1000


async def test_s13_a_type_that_is_not_allowed_is_refused_with_those_that_are(at: Deployment) -> None:
    await at.lay_down(subscription_types=("Shared",))
    with pytest.raises(NotAllowed, match="allows the subscription types Shared, not Exclusive"):
        await at.consumer("a")
    await at.consumer("a", type=wire.Subscribe.SHARED)


async def test_the_backlog_counts_messages_of_batches_that_are_acknowledged_in_part(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        consumer = await TestConsumer(running.world, running.brokers[0], TOPIC).ready()
        for _ in range(2):
            await producer.send(*(b"x" for _ in range(10)))
        topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
        for delivery, left in ((await consumer.receive(), 13), (await consumer.receive(), 6)):
            await consumer.ack(delivery, indexes=range(7))
            assert await backlog.count_unacknowledged(topic.log, topic.find_subscription("s")) == left
        await consumer.ack(delivery, indexes=range(7, 10))
        assert await backlog.count_unacknowledged(topic.log, topic.find_subscription("s")) == 12, (
            "the second counts as one acknowledged"
        )
