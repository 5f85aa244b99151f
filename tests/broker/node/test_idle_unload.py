"""A topic that was not used for long leaves the memory, unless something is still to be done to it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.log.log_shape_core import NO_RETENTION, Retention
from magnetar.broker.node import topic_manager
from magnetar.broker.topic.admission_core import TopicUse, compute_release_delay_s, why_topic_stays
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import ProducerBusy, ProducerFenced
from magnetar.proto.names import TopicName
from magnetar.proto.states import TopicStays
from tests.broker.topic.coordination import FakeCoordinator, coordinator
from tests.broker.topic.test_maintenance import NAME, TOPIC, Deployment, deployment
from tests.broker.topic.test_transactions import TxnProducer, shown
from tests.support.cluster import TestConsumer, TestProducer

IDLE_S = 1800
__all__ = ["coordinator"]


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with deployment(tmp_path, roll_idle_s=1.0) as at:
        yield at


async def _leave(at: Deployment, *clients: TestProducer | TestConsumer) -> None:
    for each in clients:
        await each.close()
    await at.everybody_left()


async def _used_and_left(at: Deployment, *, acknowledge: bool = True) -> None:
    """A topic whose clients have left, with one message for its subscription `s`."""
    producer, consumer = await at.producer(), await at.consumer("s")
    await producer.send(b"1")
    delivery = await consumer.receive()
    if acknowledge:
        await consumer.ack(delivery)
    await _leave(at, producer, consumer)


def _stays(at: Deployment) -> TopicStays | None:
    return at.topic.maintenance.why_stays_loaded(at.broker.topic_manager.config.unload_idle_s)


# ---------------------------------------------------------------------------------------- the decision
IDLE = TopicUse(
    persistent=True, clients=0, unused_s=IDLE_S, transactions=False, backlog=False, work=False, subscriptions=1, bytes=0
)  # fmt: skip
FOR_EVER = AppliedPolicies(retention_minutes=-1, retention_mib=-1)
BY_SIZE = AppliedPolicies(retention_mib=5)
A_WEEK = Retention(10_080, 1024)


@pytest.mark.parametrize(
    ("changes", "applied", "unread", "reason"),
    [
        ({}, AppliedPolicies(), NO_RETENTION, None),
        ({"persistent": False}, AppliedPolicies(), NO_RETENTION, TopicStays.IN_MEMORY),
        ({"clients": 1}, AppliedPolicies(), NO_RETENTION, TopicStays.CLIENTS),
        ({"unused_s": IDLE_S - 1.0}, AppliedPolicies(), NO_RETENTION, TopicStays.USED),
        ({"transactions": True}, AppliedPolicies(), NO_RETENTION, TopicStays.TRANSACTION),
        ({"backlog": True}, AppliedPolicies(), NO_RETENTION, TopicStays.BACKLOG),
        ({"work": True}, AppliedPolicies(), NO_RETENTION, TopicStays.WORK),
        ({"bytes": 1}, AppliedPolicies(), NO_RETENTION, TopicStays.RETENTION),
        ({"bytes": 1}, AppliedPolicies(retention_minutes=5, retention_mib=-1), NO_RETENTION, None),
        ({"bytes": 1}, FOR_EVER, NO_RETENTION, None),
        ({"bytes": 1}, BY_SIZE, NO_RETENTION, None),
        ({"bytes": 1, "subscriptions": 0}, AppliedPolicies(), A_WEEK, None),
        ({"bytes": 1, "subscriptions": 0}, AppliedPolicies(), Retention(-1, -1), None),
        ({"subscriptions": 0}, AppliedPolicies(), A_WEEK, None),
        ({}, AppliedPolicies(inactive_s=9), NO_RETENTION, TopicStays.DELETED_UNUSED),
        ({}, AppliedPolicies(subscription_expiration_s=9), NO_RETENTION, TopicStays.DELETED_UNUSED),
        ({"subscriptions": 0}, AppliedPolicies(subscription_expiration_s=9), NO_RETENTION, None),
    ],
)
def test_each_reason_keeps_a_topic_and_nothing_else_does(
    changes: dict[str, Any], applied: AppliedPolicies, unread: Retention, reason: TopicStays | None
) -> None:
    assert why_topic_stays(IDLE._replace(**changes), applied, unread, IDLE_S) is reason
    assert why_topic_stays(IDLE._replace(**changes), applied, unread, 0) is TopicStays.NOT_UNLOADED


# ---------------------------------------------------------------------------------------- on a broker
async def test_an_idle_topic_is_unloaded_and_its_next_user_finds_all_that_it_had(at: Deployment) -> None:
    await _used_and_left(at)
    await at.later(IDLE_S - 60)
    assert TOPIC in at.broker.topics
    await at.later(120)
    assert TOPIC not in at.broker.topics, (_stays(at), at.topic.list_reasons_ledgers_kept(), at.topic.log.shape.spans)
    assert at.broker.topic_manager.idle_unloads == 1
    consumer = await at.consumer("s")
    producer = await at.producer()
    await producer.send(b"2")
    assert await consumer.receive_payloads(1) == [b"2"], "and not the acknowledged one"


async def test_a_topic_with_clients_stays_and_counts_as_used_until_they_leave(at: Deployment) -> None:
    producer = await at.producer()
    for _ in range(3):
        await at.later(IDLE_S)
        assert _stays(at) is TopicStays.CLIENTS
    await _leave(at, producer)
    await at.later(IDLE_S - 1)
    assert _stays(at) is TopicStays.USED
    consumer = await TestConsumer(at.running.world, at.broker, TOPIC, durable=False).ready()
    await at.later(IDLE_S)
    assert _stays(at) is TopicStays.CLIENTS, "a reader is a client"
    await _leave(at, consumer)
    await at.later(IDLE_S + 1)
    assert TOPIC not in at.broker.topics


async def test_a_call_of_an_operator_counts_as_use(at: Deployment) -> None:
    await _leave(at, await at.producer())
    await at.later(IDLE_S - 1)
    await at.broker.topic_manager.load_topic(NAME)
    await at.later(IDLE_S - 1)
    assert _stays(at) is TopicStays.USED


@pytest.mark.parametrize("delayed", [False, True])
async def test_what_is_not_acknowledged_keeps_a_topic_until_it_is_or_expires(at: Deployment, delayed: bool) -> None:
    if delayed:
        producer = await at.producer()
        await (await at.consumer("s", type=wire.Subscribe.SHARED)).close()
        await producer.send(b"1", deliver_at_ms=at.clock.wall_ms() + 100 * IDLE_S * 1000)
        await _leave(at, producer)
    else:
        await _used_and_left(at, acknowledge=False)
    await at.later(2 * IDLE_S)
    assert _stays(at) is TopicStays.BACKLOG
    await at.lay_down(message_ttl_s=60)
    await at.later(0)
    await at.topic.find_subscription("s").wait_durable()
    await at.later(2)
    await at.later(2)
    assert TOPIC not in at.broker.topics, "expired, rolled and trimmed"


@pytest.mark.parametrize(
    ("applied", "unread", "delay_s"),
    [
        (AppliedPolicies(), NO_RETENTION, 0),
        (AppliedPolicies(retention_minutes=5, retention_mib=-1), NO_RETENTION, 300),
        (AppliedPolicies(retention_minutes=5, retention_mib=7), A_WEEK, 7 * 86_400),
        (FOR_EVER, A_WEEK, float("inf")),
        (BY_SIZE, NO_RETENTION, float("inf")),
        (AppliedPolicies(), Retention(-1, -1), float("inf")),
    ],
)
def test_messages_are_released_when_the_longest_retention_has_ended(
    applied: AppliedPolicies, unread: Retention, delay_s: float
) -> None:
    assert compute_release_delay_s(applied, unread) == delay_s


async def test_an_unloaded_topic_comes_back_when_its_retention_has_ended_and_its_messages_go(at: Deployment) -> None:
    await at.lay_down(retention_minutes=2 * IDLE_S // 60, retention_mib=-1)
    await _used_and_left(at)
    await at.later(IDLE_S + 1)
    assert TOPIC not in at.broker.topics
    await at.later(2 * IDLE_S - 60)
    assert TOPIC not in at.broker.topics, "not yet"
    await at.later(60)
    assert at.topic.log.shape.size > 0
    await at.later(2)
    await at.later(2)
    assert at.topic.log.shape.size == 0
    await at.later(IDLE_S + 1)
    assert TOPIC not in at.broker.topics
    assert not at.broker.topic_manager._releases, "nothing is left to be released"


async def test_a_topic_that_is_gone_or_another_brokers_does_not_come_back_for_its_retention(at: Deployment) -> None:
    await at.lay_down(retention_minutes=2 * IDLE_S // 60, retention_mib=-1)
    await _used_and_left(at)
    await at.later(IDLE_S + 1)
    manager = at.broker.topic_manager
    await manager.unload_namespace(NAME.namespace_name)
    assert manager.owned_object_count == 0
    await at.later(3 * IDLE_S)
    assert TOPIC not in at.broker.topics
    assert manager.owned_object_count == 0, "and its bundle is not claimed for that"


async def test_messages_that_are_about_to_be_deleted_keep_a_topic_until_they_are(at: Deployment) -> None:
    await _used_and_left(at)
    await at.later(IDLE_S + 1)
    assert _stays(at) is TopicStays.RETENTION, "its ledger ends when it was quiet for `roll_idle_s`, and then goes"
    await at.later(2)
    assert TOPIC not in at.broker.topics


async def test_what_stays_for_ever_keeps_no_topic_loaded(at: Deployment) -> None:
    await at.lay_down(retention_minutes=-1, retention_mib=-1)
    await _used_and_left(at)
    await at.later(IDLE_S + 1)
    assert TOPIC not in at.broker.topics
    reader = await at.consumer("new")
    assert await reader.receive_payloads(1) == [b"1"]


@pytest.mark.parametrize("policy", [{"inactive_s": 3 * IDLE_S}, {"subscription_expiration_s": 3 * IDLE_S}])
async def test_a_policy_that_deletes_what_is_unused_finds_it_loaded(at: Deployment, policy: dict[str, int]) -> None:
    await at.lay_down(**policy)
    await _used_and_left(at)
    await at.later(0)
    await at.later(2)
    await at.later(IDLE_S + 1)
    assert _stays(at) is TopicStays.DELETED_UNUSED


async def _idle(at: Deployment) -> None:
    """The topic is unloaded because it is idle."""
    await at.later(0)
    await at.later(2)
    await at.later(IDLE_S + 1)
    assert TOPIC not in at.broker.topics


async def test_sequence_ids_and_the_epoch_of_an_exclusive_producer_are_known_after_an_unloading(at: Deployment) -> None:
    await at.lay_down(deduplication=True, retention_minutes=-1, retention_mib=-1)
    exclusive = wire.OpenProducer.EXCLUSIVE
    producer = await TestProducer(at.running.world, at.broker, TOPIC, access_mode=exclusive).opened()
    await producer.send(b"1")
    epoch = producer.answer.topic_epoch
    await _leave(at, producer)
    await _idle(at)
    again = await TestProducer(at.running.world, at.broker, TOPIC, access_mode=exclusive).opened()
    assert again.answer.last_sequence_id == 0
    assert (await again.send(b"1")).duplicate
    await _leave(at, again)
    newer = await TestProducer(at.running.world, at.broker, TOPIC, "q", access_mode=exclusive).opened()
    assert newer.answer.topic_epoch > epoch
    await _leave(at, newer)
    await _idle(at)
    with pytest.raises(ProducerFenced):
        await TestProducer(at.running.world, at.broker, TOPIC, access_mode=exclusive, topic_epoch=epoch).opened()


async def test_an_open_transaction_keeps_a_topic_and_what_it_committed_is_shown_after_an_unloading(
    at: Deployment, coordinator: FakeCoordinator
) -> None:
    await at.lay_down(retention_minutes=-1, retention_mib=-1)
    producer = await TxnProducer(at.running.world, at.broker, TOPIC).opened()
    txn = coordinator.begin()
    await producer.send_in(txn, b"1")
    await _leave(at, producer)
    await at.later(2 * IDLE_S)
    assert _stays(at) is TopicStays.TRANSACTION
    await coordinator.end(at.topic, txn, True)
    await at.later(0)
    await _idle(at)
    assert await (await at.consumer("s")).receive_payloads(1) == [b"1"]


async def test_acknowledgements_out_of_order_and_properties_are_known_after_an_unloading(at: Deployment) -> None:
    """Holes are backlog, so they keep it; when they are filled the subscription comes back as it was."""
    producer = await at.producer()
    consumer = await at.consumer("s", type=wire.Subscribe.SHARED, subscription_properties={"of": "somebody"})
    for payload in (b"1", b"2", b"3"):
        await producer.send(payload)
    first, second, third = [await consumer.receive() for _ in range(3)]
    await consumer.ack(first, third)
    await _leave(at, producer, consumer)
    await at.later(2 * IDLE_S)
    assert _stays(at) is TopicStays.BACKLOG
    consumer = await at.consumer("s", type=wire.Subscribe.SHARED)
    await consumer.ack(await consumer.receive())
    await _leave(at, consumer)
    await _idle(at)
    consumer = await at.consumer("s", type=wire.Subscribe.FAILOVER)
    await (await at.producer()).send(b"4")
    assert await consumer.receive_payloads(1) == [b"4"]
    store = at.topic.find_subscription("s").store
    assert store is not None
    assert store.properties == {"of": "somebody"}
    assert second


async def test_an_unloading_that_meets_a_client_makes_it_wait_and_loses_nothing(at: Deployment) -> None:
    await _used_and_left(at)
    closing, go_on = asyncio.Event(), asyncio.Event()
    topic = at.topic
    honest = topic.close

    async def slow(error: Any = None) -> None:
        closing.set()
        await go_on.wait()
        await honest(error)

    # the class has slots
    at.broker.topic_manager._close_topic = lambda topic, error=None: slow(error)  # type: ignore[method-assign, assignment]
    await at.later(0)
    await at.later(2)
    at.clock.ahead_s += IDLE_S
    unloading = asyncio.create_task(at.broker.topic_manager.maintain_topics())
    await closing.wait()
    opening = asyncio.create_task(at.producer("later"))
    done, _ = await asyncio.wait([opening], timeout=0.05)
    assert not done, "it waits: the one that closes must not meet its successor"
    go_on.set()
    await unloading
    await (await opening).send(b"2")
    assert at.topic is not topic
    assert at.topic.log.state.value == "serving"


async def test_a_topic_that_is_asked_for_between_the_look_and_its_turn_stays(at: Deployment) -> None:
    await _leave(at, await at.producer())
    at.clock.ahead_s += IDLE_S + 1
    topic = at.topic
    assert _stays(at) is None
    await at.broker.topic_manager.load_topic(NAME)
    await at.broker.topic_manager._unload_idle(topic)
    assert at.topic is topic
    assert not topic.is_ended


async def test_nothing_is_unloaded_without_a_session_or_with_the_setting_off(tmp_path: Path) -> None:
    async with deployment(tmp_path, unload_idle_s=0) as at:
        await _leave(at, await at.producer())
        await at.later(10 * IDLE_S)
        assert _stays(at) is TopicStays.NOT_UNLOADED
        topic = at.topic
        manager = at.broker.topic_manager
        manager.config = replace(manager.config, unload_idle_s=IDLE_S)
        assert _stays(at) is None
        at.broker.topic_manager.suspend_ownership()
        await at.broker.topic_manager.maintain_topics()
        assert at.topic is topic


# ---------------------------------------------------------------------------------------- rounds
async def test_a_round_looks_at_each_topic_once_in_buckets_and_makes_tasks_for_those_with_work_alone(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_manager, "TOPICS_PER_BUCKET", 3)
    manager = at.broker.topic_manager
    for number in range(7):
        topic = await manager.load_topic(TopicName.parse(f"{TOPIC}-{number}"))
        await topic.registry.subscribe("s")
    producer = await TestProducer(at.running.world, at.broker, f"{TOPIC}-5", "p").opened()
    await producer.send(b"1")
    looked, buckets, worked = list[str](), list[int](), list[str]()
    honest, work = manager._maintain, type(topic.maintenance).run_due_work

    async def maintained(topics: Any) -> None:
        buckets.append(len(topics))
        looked.extend(each.name.full for each in topics)
        await honest(topics)

    async def worked_on(maintenance: Any) -> None:
        worked.append(maintenance._topic.name.full)
        await work(maintenance)

    monkeypatch.setattr(manager, "_maintain", maintained)
    monkeypatch.setattr(type(topic.maintenance), "run_due_work", worked_on)
    await manager.policies.change_policies(NAME.namespace_name, None, _ttl(1))
    at.clock.ahead_s += 100
    monkeypatch.setattr(topic_manager, "TOPICS_WALKED_ON_REQUEST", 6)
    await manager.maintain_topics_in_buckets(0.03)
    assert buckets == [3, 3, 1]
    assert sorted(looked) == sorted(manager.loaded)
    assert worked == [f"{TOPIC}-5"], "the only one with a message"
    monkeypatch.setattr(manager.survey, "_topics", list)  # what a walk on request would find
    assert (await manager.survey.run_survey()).total.topics == 7


async def test_a_pause_of_which_a_rounding_is_left_comes_to_its_end(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's time and the clock have other origins: the loop may wake a moment before the clock is there, and of a
    wait that is shorter than its time can say no time passes."""
    now, waits = 1e9, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        assert len(waits) < 10, "it waits for ever"
        now += 0.0 if seconds < 1e-6 else seconds - 1e-7

    monkeypatch.setattr(at.clock, "monotonic", lambda: now)
    monkeypatch.setattr(topic_manager.asyncio, "sleep", sleep)
    await at.broker.topic_manager._pause_maintenance(10.0)
    assert waits == [10.0, 0.001]


async def test_after_an_error_the_next_round_of_upkeep_waits(at: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0

    async def fail(interval_s: float) -> None:
        nonlocal rounds
        rounds += 1
        raise RuntimeError("before its first pause")

    monkeypatch.setattr(at.broker.topic_manager, "maintain_topics_in_buckets", fail)
    upkeep = asyncio.create_task(at.broker._maintain_topics())
    for _ in range(50):
        await asyncio.sleep(0)
    upkeep.cancel()
    assert rounds == 1


def _ttl(seconds: int) -> Any:
    from magnetar.proto.policies import Policies

    return Policies(message_ttl_s=seconds)


# ----------------------------------------------------------------------------- its ledgers, while clients are connected
def _open_ledgers(at: Deployment) -> int:
    stores = [each.store for each in at.topic.subscriptions.values()]
    return at.topic.log.has_idle_ledger + sum(each is not None and each.has_idle_ledger(0.0) for each in stores)


async def _close_ledgers(at: Deployment) -> None:
    """The topic is loaded, with its clients, and no ledger of it is open."""
    topic = at.topic
    await at.later(0)
    await at.later(IDLE_S + 1)
    assert _open_ledgers(at) == 0
    assert at.topic is topic
    assert not topic.is_ended


async def test_an_idle_topic_with_clients_closes_its_ledgers_and_its_clients_go_on(at: Deployment) -> None:
    producer, consumer = await at.producer(), await at.consumer("s")
    for payload in (b"1", b"2"):
        await producer.send(payload)
        delivery = await consumer.receive()
        await consumer.ack(delivery)
        await at.topic.find_subscription("s").wait_durable()
        await at.later(IDLE_S - 1)
        assert _open_ledgers(at) == 2
        await _close_ledgers(at)
    assert at.topic.connected_client_count == 2
    assert await at.backlog("s") == 0


async def test_a_cursor_that_is_written_keeps_its_ledger_although_nothing_is_published(at: Deployment) -> None:
    producer, consumer = await at.producer(), await at.consumer("s")
    await producer.send(b"1")
    await producer.send(b"2")
    first, second = await consumer.receive(), await consumer.receive()
    await at.later(0)
    at.clock.ahead_s += IDLE_S + 1
    await consumer.ack(first)
    await at.topic.find_subscription("s").wait_durable()
    await at.later(0)
    assert not at.topic.log.has_idle_ledger
    assert _open_ledgers(at) == 1
    await consumer.ack(second)
    await at.topic.find_subscription("s").wait_durable()
    await _close_ledgers(at)


async def test_sequence_ids_and_access_of_producers_outlive_the_end_of_idle_ledgers(at: Deployment) -> None:
    await at.lay_down(deduplication=True)
    exclusive = wire.OpenProducer.EXCLUSIVE
    producer = await TestProducer(at.running.world, at.broker, TOPIC, access_mode=exclusive).opened()
    consumer = await at.consumer("s")
    await producer.send(b"1")
    await consumer.ack(await consumer.receive())
    await _close_ledgers(at)
    producer.sequence_id = 0
    assert (await producer.send(b"1")).duplicate
    assert not (await producer.send(b"2")).duplicate
    assert await consumer.receive_payloads(1) == [b"2"]
    with pytest.raises(ProducerBusy):
        await at.producer("q")


async def test_what_is_delayed_unacknowledged_or_of_a_transaction_outlives_the_end_of_idle_ledgers(
    at: Deployment, coordinator: FakeCoordinator
) -> None:
    key_shared = wire.Subscribe.KEY_SHARED
    producer = await TxnProducer(at.running.world, at.broker, TOPIC).opened()
    consumer = await at.consumer("s", type=key_shared)
    txn = coordinator.begin()
    await producer.send(b"held", key="a")
    held = await consumer.receive()
    await producer.send(b"later", key="b", deliver_at_ms=at.clock.wall_ms() + 2 * IDLE_S * 1000)
    await producer.send_in(txn, b"of the transaction")
    await _close_ledgers(at)
    await producer.send(b"now", key="a")
    assert await shown(at.broker) == [b"held", b"later"], "what follows the transaction waits for it"
    await coordinator.end(at.topic, txn, True)
    await at.later(IDLE_S)
    assert sorted(await consumer.receive_payloads(3)) == [b"later", b"now", b"of the transaction"]
    assert await at.backlog("s") == 4
    await consumer.ack(held)
    assert await at.backlog("s") == 3


async def test_ledgers_of_a_connected_topic_stay_open_with_the_setting_off(tmp_path: Path) -> None:
    async with deployment(tmp_path, unload_idle_s=0) as at:
        await (await at.producer()).send(b"1")
        await at.later(0)
        await at.later(100 * IDLE_S)
        assert at.topic.log.has_idle_ledger
