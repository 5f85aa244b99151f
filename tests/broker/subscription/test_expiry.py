"""Messages with a time of their own, on a real broker, on a clock that the test moves."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from magnetar.broker.session import summaries
from magnetar.broker.subscription.core.cursor_state import TxnAcks
from magnetar.broker.subscription.core.fair_shared import FairKeyQueues
from magnetar.broker.subscription.expiry import MessageExpirer
from magnetar.client import aio
from magnetar.client.common.errors import Timeout
from magnetar.client.model.settings import ConsumerDeadLetterPolicy, ConsumerType, InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.expiry import EXPIRED_AT_PROPERTY, EXPIRES_AT_PROPERTY
from magnetar.proto.names import FAIR_BY_KEY, Position
from magnetar.proto.states import TxnId
from tests.broker.topic.test_maintenance import TOPIC, Deployment
from tests.broker.topic.test_maintenance import at as at
from tests.support.cluster import payloads_of

SHARED, KEY_SHARED = wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED
MINUTE = 60_000
TYPES = [wire.Subscribe.EXCLUSIVE, wire.Subscribe.FAILOVER, SHARED, KEY_SHARED]


async def expiring(at: Deployment, lives_s: Sequence[float], **options: Any) -> list[Any]:
    """Sends a message for each life in seconds (0: for ever), in one batch unless `options` say otherwise."""
    now_ms = at.clock.wall_ms()
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        options.setdefault("batching_max_publish_delay_ms", 5000)
        producer, ids = await client.create_producer(TOPIC, **options), []
        for number, life_s in enumerate(lives_s):
            ends = {"expires_at": now_ms + round(1000 * life_s)} if life_s else {}
            producer.send_nowait(b"%d" % number, lambda _, id_: ids.append(id_), partition_key="k", **ends)
        await producer.flush()
        await producer.close()
    return ids


def expired(at: Deployment, name: str = "s") -> int:
    return at.topic.find_subscription(name).expired.count


def shown(delivery: wire.Delivery) -> list[bytes]:
    hidden = set(delivery.acked_batch_indexes)
    return [each for index, each in enumerate(payloads_of(delivery.entry)) if index not in hidden]


@pytest.mark.parametrize("type_", TYPES)
async def test_what_has_expired_is_acknowledged_counted_and_not_delivered(type_: int, at: Deployment) -> None:
    await (await at.consumer(type=type_)).leave()
    await expiring(at, (10, 0, 10, 100), batching_enabled=False)
    at.clock.ahead_s += 11
    consumer = await at.consumer(type=type_)
    if type_ == wire.Subscribe.FAILOVER:
        await consumer.next("active")
    assert await consumer.receive_payloads(2) == [b"1", b"3"]
    assert await consumer.quiet()
    assert expired(at) == 2
    assert await at.backlog("s") == 2
    stats = await summaries.collect_subscription_stats(at.topic, at.topic.find_subscription("s"))
    assert stats.expired == 2
    assert at.topic.find_subscription("s").activity.expired_ms > 0


async def test_what_expires_while_keys_take_turns_is_acknowledged_at_once_and_not_entry_by_entry(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairKeyQueues, "discard", lambda *_: pytest.fail("it looks at all keys for each entry"))
    mine = await at.consumer(type=SHARED, permits=1, subscription_properties={FAIR_BY_KEY: "true"})
    await expiring(at, (0, 10, 10, 10, 0), batching_enabled=False)
    assert await mine.receive_payloads(1) == [b"0"]
    at.clock.ahead_s += 11
    mine.permits(10)
    assert await mine.receive_payloads(1) == [b"4"]
    assert await mine.quiet()
    assert (expired(at), await at.backlog("s")) == (3, 2)


@pytest.mark.parametrize("type_", TYPES)
async def test_of_a_batch_the_expired_messages_are_hidden_and_the_permits_are_exact(
    type_: int, at: Deployment
) -> None:
    await (await at.consumer(type=type_)).leave()
    await expiring(at, (10, 10, 0, 100))
    at.clock.ahead_s += 11
    consumer = await at.consumer(type=type_, permits=2)
    if type_ == wire.Subscribe.FAILOVER:
        await consumer.next("active")
    found = await consumer.receive()
    assert shown(found) == [b"2", b"3"]
    member = next(iter(at.topic.find_subscription("s").dispatcher.members.values()))
    assert (member.permits, member.unacked) == (0, 2), "a delivery costs what it shows"
    await consumer.ack(found)
    assert await at.backlog("s") == 0
    assert expired(at) == 2


async def test_it_is_judged_again_at_each_redelivery_and_not_while_it_is_outstanding(at: Deployment) -> None:
    consumer = await at.consumer(type=SHARED)
    await expiring(at, (10, 100))
    found = await consumer.receive()
    assert shown(found) == [b"0", b"1"]
    at.clock.ahead_s += 11
    at.topic.find_subscription("s").pump.wake()
    assert await consumer.quiet()
    assert expired(at) == 0, "a consumer has it"
    place = wire.Position(ledger_id=found.ledger_id, entry_id=found.entry_id)
    consumer.frame(redeliver=wire.Redeliver(entries=[place]))
    again = await consumer.receive()
    assert (shown(again), again.redelivery_count) == ([b"1"], 1)
    at.clock.ahead_s += 100
    consumer.frame(redeliver=wire.Redeliver(entries=[place]))
    assert await consumer.quiet()
    assert await at.backlog("s") == 0
    assert expired(at) == 2


async def test_a_consumer_that_does_not_acknowledge_by_index_is_shown_a_batch_whole_or_not_at_all(
    at: Deployment,
) -> None:
    consumer = await at.consumer(type=SHARED)
    subscription = at.topic.find_subscription("s")
    next(iter(subscription.consumers.values())).member.acks_by_index = False
    subscription.pump.is_moving = True
    await expiring(at, (10, 100))
    await expiring(at, (10, 10))
    at.clock.ahead_s += 11
    at.topic.find_subscription("s").pump.is_moving = False
    at.topic.find_subscription("s").pump.wake()
    assert shown(await consumer.receive()) == [b"0", b"1"], "its SDK drops the first"
    assert await consumer.quiet()
    assert expired(at) == 2


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
async def test_a_batch_of_which_each_message_is_expired_or_unwanted_is_not_shown_whole(
    at: Deployment, again: bool
) -> None:
    consumer = await at.consumer(type=SHARED, subscription_properties={"filter": "region = 'eu'"})
    subscription = at.topic.find_subscription("s")
    next(iter(subscription.consumers.values())).member.acks_by_index = False
    subscription.pump.is_moving = not again
    regions, now_ms = ("us", "eu", "us", "eu"), at.clock.wall_ms()
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC, batching_max_publish_delay_ms=5000)
        for number, region in enumerate(regions):
            ends = {"expires_at": now_ms + 10_000} if region == "eu" else {}
            producer.send_nowait(b"%d" % number, lambda *_: None, properties={"region": region}, **ends)
        await producer.flush()
        await producer.close()
    filtering = subscription.filtering
    if again:
        found = await consumer.receive()
        assert (len(shown(found)), filtering.shown_unwanted) == (4, 2)
        at.clock.ahead_s += 11
        consumer.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=found.ledger_id)]))
    else:
        at.clock.ahead_s += 11
        subscription.pump.is_moving = False
        subscription.pump.wake()
    assert await consumer.quiet()
    assert await at.backlog("s") == 0
    assert (expired(at), filtering.judged, filtering.filtered, filtering.shown_unwanted) == (2, 4, 2, 0)


async def test_what_stays_in_a_batch_that_is_judged_again_and_again_is_counted_once(at: Deployment) -> None:
    """Of a batch with a tombstone, which does not expire out of the compacted form, the rest stays too."""
    reading = {"read_compacted": True, "subscription_properties": {"filter": "region = 'eu'"}}
    consumer = await at.consumer(**reading)
    subscription = at.topic.find_subscription("s")
    next(iter(subscription.consumers.values())).member.acks_by_index = False
    subscription.pump.is_moving = True
    expires = {"expires_at": at.clock.wall_ms() + 10_000}
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC, batching_max_publish_delay_ms=5000)
        for value, region, ends in ((b"", "eu", expires), (b"1", "us", {}), (b"2", "eu", expires)):
            given = {"properties": {"region": region}, "partition_key": region + str(value), **ends}
            producer.send_nowait(value, lambda *_: None, **given)
        await producer.flush()
        await producer.close()
    at.clock.ahead_s += 11
    subscription.pump.is_moving = False
    subscription.pump.wake()
    for _ in range(3):
        found = await consumer.receive()
        assert len(shown(found)) == 3
        assert (subscription.filtering.filtered, subscription.filtering.shown_unwanted) == (0, 1)
        consumer.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=found.ledger_id)]))


async def test_a_delayed_message_that_expires_before_it_is_due_is_never_delivered(at: Deployment) -> None:
    consumer, now_ms = await at.consumer(type=SHARED), at.clock.wall_ms()
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"never", deliver_at=now_ms + MINUTE, expires_at=now_ms + MINUTE // 2)
        await producer.send(b"due", deliver_at=now_ms + MINUTE, expires_at=now_ms + 2 * MINUTE)
    assert await consumer.quiet()
    at.clock.ahead_s += 61
    at.topic.find_subscription("s").pump.wake()
    assert await consumer.receive_payloads(1) == [b"due"]
    assert await consumer.quiet()
    assert expired(at) == 1


async def test_after_a_seek_a_restart_and_a_reset_it_stays_expired_and_a_reader_sees_what_is_stored(
    at: Deployment,
) -> None:
    consumer = await at.consumer(type=SHARED)
    ids = await expiring(at, (10, 0, 10), batching_enabled=False)
    at.clock.ahead_s += 11
    assert len(ids) == 3
    await consumer.leave()
    await at.broker.close()
    at.running.brokers.remove(at.broker)
    at.broker = await at.running.add_broker()
    consumer = await at.consumer(type=SHARED)
    assert await consumer.receive_payloads(1) == [b"1"]
    consumer.requests += 1
    earliest = wire.MessageId(ledger_id=-1, entry_id=-1, batch_index=-1)
    await consumer.ask(seek=wire.Seek(request_id=consumer.requests, message_id=earliest))
    assert await consumer.receive_payloads(1) == [b"1"]
    assert await consumer.quiet()
    reader = await at.consumer("r", durable=False)
    assert await reader.receive_payloads(3) == [b"0", b"1", b"2"]


async def test_what_has_expired_keeps_no_ledger(at: Deployment) -> None:
    await at.lay_down(unsubscribed_minutes=0, unsubscribed_mib=0)
    consumer = await at.consumer(type=SHARED)
    await expiring(at, (10, 10, 10))
    place = await consumer.receive()
    await at.topic.log.roll_ledger()
    at.clock.ahead_s += 11
    entry = wire.Position(ledger_id=place.ledger_id, entry_id=place.entry_id)
    consumer.frame(redeliver=wire.Redeliver(entries=[entry]))
    assert await consumer.quiet()
    assert expired(at) == 3
    await at.later(60)
    assert at.topic.log.shape.find_span_of_ledger(place.ledger_id) is None


async def test_the_latest_message_of_a_key_that_has_expired_is_not_shown_by_the_compacted_topic(
    at: Deployment,
) -> None:
    """Compaction keeps it, as it knows no time; the subscription acknowledges it."""
    await expiring(at, (0, 10), batching_enabled=False)
    assert at.topic.compaction.start()
    await at.topic.compaction.wait_finished()
    at.clock.ahead_s += 11
    consumer = await at.consumer("c", read_compacted=True)
    assert await consumer.quiet()
    assert expired(at, "c") == 1


async def test_what_is_pending_in_a_transaction_is_left_to_it(at: Deployment) -> None:
    consumer, txn = await at.consumer(type=SHARED), TxnId(1, 1)
    await expiring(at, (10, 10, 100))
    found, subscription = await consumer.receive(), at.topic.find_subscription("s")
    place, member = Position(found.ledger_id, found.entry_id), next(iter(subscription.dispatcher.members.values()))
    wanted = TxnAcks()
    wanted.add(place, 0b001)
    subscription.acks.add_pending_acks(member, txn, wanted, None, 1 << 20)
    at.clock.ahead_s += 11
    consumer.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=place[0], entry_id=place[1])]))
    assert shown(await consumer.receive()) == [b"2"]
    assert expired(at) == 1, "only the one that no transaction has"
    subscription.settle(txn, committed=False)
    assert shown(await consumer.receive()) == [b"2"], "the batch comes again, without the one that has expired since"
    assert expired(at) == 2


async def test_the_sdk_drops_what_expires_in_its_queue_by_the_brokers_clock_and_counts_it(at: Deployment) -> None:
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        consumer = await client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest)
        consumer.partitions[0]._now = at.clock.monotonic
        await expiring(at, (10, 100, 10, 0))
        assert (await consumer.receive(30_000)).data() == b"0"
        at.clock.ahead_s += 11
        kept = [await consumer.receive(30_000), await consumer.receive(30_000)]
        assert [each.data() for each in kept] == [b"1", b"3"]
        assert consumer.statistics()["expired_messages"] == 1
        for each in kept:
            await consumer.acknowledge(each)
        with pytest.raises(Timeout):
            await consumer.receive(50)
        await consumer.close()
    assert await at.backlog("s") == 1, "the first, which the program has not acknowledged"


async def test_a_large_message_in_chunks_is_dropped_whole_by_its_consumer(at: Deployment) -> None:
    await at.lay_down(max_message_bytes=1000)
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        consumer = await client.subscribe(TOPIC, "s", ConsumerType.Shared)
        producer = await client.create_producer(TOPIC, chunking_enabled=True, batching_enabled=False)
        consumer.partitions[0]._now = at.clock.monotonic
        at.topic.find_subscription("s").pump.is_moving = True
        await producer.send(b"x" * 5000, expires_at=at.clock.wall_ms() + 10_000)
        await producer.send(b"y" * 5000, expires_at=at.clock.wall_ms() + 100_000)
        at.clock.ahead_s += 11
        at.topic.find_subscription("s").pump.is_moving = False
        at.topic.find_subscription("s").pump.wake()
        found = await consumer.receive(30_000)
        assert found.data() == b"y" * 5000
        await consumer.acknowledge(found)
        await consumer.close()
        await producer.close()
    assert await at.backlog("s") == 0


async def test_a_listener_is_not_given_what_has_expired_in_chunks(at: Deployment) -> None:
    """The broker leaves a message in chunks to its consumer."""
    await at.lay_down(max_message_bytes=1000)
    heard: list[bytes] = []
    done = asyncio.Event()

    async def hear(message: Any) -> None:
        heard.append(message.data()[:1])
        done.set()

    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        consumer = await client.subscribe(TOPIC, "s", ConsumerType.Shared)
        consumer.partitions[0]._now = at.clock.monotonic
        listener = consumer.listen(hear)
        producer = await client.create_producer(TOPIC, chunking_enabled=True, batching_enabled=False)
        at.topic.find_subscription("s").pump.is_moving = True
        await producer.send(b"x" * 5000, expires_at=at.clock.wall_ms() + 10_000)
        await producer.send(b"y" * 5000, expires_at=at.clock.wall_ms() + 100_000)
        at.clock.ahead_s += 11
        at.topic.find_subscription("s").pump.is_moving = False
        at.topic.find_subscription("s").pump.wake()
        async with asyncio.timeout(10):
            await done.wait()
        assert heard == [b"y"]
        assert consumer.statistics()["expired_messages"] == 1
        del listener


async def test_a_dead_letter_does_not_expire_and_a_retry_does(at: Deployment) -> None:
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        policy = ConsumerDeadLetterPolicy(max_redeliver_count=1, initial_subscription_name="dead")
        consumer = await client.subscribe(
            TOPIC, "s", ConsumerType.Shared, dead_letter_policy=policy, enable_retry=True,
        )  # fmt: skip
        ends = at.clock.wall_ms() + MINUTE
        await (await client.create_producer(TOPIC)).send(b"x", expires_at=ends)
        await consumer.reconsume_later(await consumer.receive(30_000), timedelta(0))
        again = await consumer.receive(30_000)
        assert again.properties()[EXPIRES_AT_PROPERTY] == str(ends)
        await consumer.reconsume_later(again, timedelta(0))
        dead = await client.subscribe(f"{TOPIC}-s-DLQ", "dead", initial_position=InitialPosition.Earliest)
        at.clock.ahead_s += 120
        letter = await dead.receive(30_000)
        assert letter.properties()[EXPIRED_AT_PROPERTY] == str(ends)
        assert EXPIRES_AT_PROPERTY not in letter.properties()


async def test_no_entry_is_judged_where_no_message_expires(at: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    monkeypatch.setattr(
        MessageExpirer, "acknowledge_expired_messages", lambda self, entries, now_ms: judged.append(len(entries))
    )
    consumer = await at.consumer(type=SHARED)
    await expiring(at, (0, 0, 0))
    assert len(await consumer.receive_payloads(3)) == 3
    assert not judged
    await expiring(at, (0, 5, 0))
    assert len(await consumer.receive_payloads(3)) == 3
    assert judged == [1]


async def test_a_tombstone_does_not_expire_out_of_the_compacted_form(at: Deployment) -> None:
    """Neither at the broker nor in the SDK, neither in a batch nor alone: a table would keep the deleted key."""
    now_ms = at.clock.wall_ms()
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        reading = {"is_read_compacted": True, "initial_position": InitialPosition.Earliest}
        await (await client.subscribe(TOPIC, "s", **reading)).close()
        for batching in (False, True):
            options = {"batching_enabled": batching, "batching_max_publish_delay_ms": 5000}
            producer = await client.create_producer(TOPIC, **(options if batching else {"batching_enabled": False}))
            for payload, key in ((b"kept", "a"), (b"", "b"), (None, "c"), (b"expires", "d")):
                expires = {} if key == "a" else {"expires_at": now_ms + 10_000}
                producer.send_nowait(payload, None, partition_key=key, **expires)
            await producer.flush()
        at.clock.ahead_s += 11
        consumer = await client.subscribe(TOPIC, "s", **reading)
        found = [(await consumer.receive(30_000)).partition_key() for _ in range(6)]
        assert found == ["a", "b", "c"] * 2
        with pytest.raises(Timeout):
            await consumer.receive(200)
        assert expired(at) == 2, "those with a value"
