"""Messages that went back for one subscription (REDRIVEN_TO), on a real broker: every other one drops them."""

from typing import Any

import pytest

from magnetar.broker.session import summaries
from magnetar.broker.topic.statistics import analyze_backlog
from magnetar.client import aio
from magnetar.client.common.errors import Timeout
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry_filter import FILTER
from magnetar.proto.names import REDRIVEN_TO, Position, TopicName, make_redriven_to
from tests.broker.topic.test_maintenance import TOPIC, Deployment
from tests.broker.topic.test_maintenance import at as at

SHARED, KEY_SHARED = wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED
TYPES = [wire.Subscribe.EXCLUSIVE, wire.Subscribe.FAILOVER, SHARED, KEY_SHARED]
NAME = TopicName.parse(TOPIC)


async def send(at: Deployment, *to: str, key: str = "k", **options: Any) -> list[Any]:
    """Sends a message for each subscription of `to` ("": all), with its number as payload. Returns their ids."""
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        options = {"batching_enabled": False} | options
        producer, ids = await client.create_producer(TOPIC, **options), []
        for number, name in enumerate(to):
            properties = {REDRIVEN_TO: make_redriven_to(NAME, name)} if name else {}
            ids.append(await producer.send(b"%d" % number, properties, partition_key=key))
    return ids


async def stats_of(at: Deployment, name: str = "s") -> Any:
    return await summaries.collect_subscription_stats(at.topic, at.topic.find_subscription(name))


@pytest.mark.parametrize("type_", TYPES)
async def test_what_went_back_for_another_subscription_is_acknowledged_and_takes_no_permit(
    type_: int, at: Deployment
) -> None:
    await (await at.consumer(type=type_)).leave()
    await send(at, "t", "", "s", "t", "t", "")
    consumer = await at.consumer(type=type_, permits=3)
    if type_ == wire.Subscribe.FAILOVER:
        await consumer.next("active")
    assert await consumer.receive_payloads(3) == [b"1", b"2", b"5"]
    assert await consumer.quiet()
    found = await stats_of(at)
    assert (found.backlog, found.filtered, found.filtered_entries, found.expired) == (3, 3, 3, 0)
    assert at.topic.find_subscription("s").activity.expired_ms == 0


async def test_a_key_that_is_held_is_not_held_by_what_went_back_for_others(at: Deployment) -> None:
    consumer = await at.consumer(type=KEY_SHARED, permits=10)
    await send(at, "", "t", "t", "")
    assert await consumer.receive_payloads(2) == [b"0", b"3"], "they have one key"
    assert (await stats_of(at)).unacked == 2


async def test_only_in_the_topic_that_it_names_it_is_for_one_subscription(at: Deployment) -> None:
    await (await at.consumer(type=SHARED)).leave()
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC, batching_enabled=False)
        for value in (f"{TOPIC}-DLQ/t", "t", "/", "x" * 5000):
            await producer.send(b"x", {REDRIVEN_TO: value})
    consumer = await at.consumer(type=SHARED)
    assert await consumer.receive_payloads(4) == [b"x"] * 4, "copies in other topics have the property of the first"


async def test_readers_and_subscriptions_of_the_compacted_form_get_all(at: Deployment) -> None:
    await send(at, "t", key="a")
    await send(at, "t", key="b")
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        reader = await client.create_reader(TOPIC, aio.MessageId.earliest)
        assert [(await reader.read_next(30_000)).data() for _ in range(2)] == [b"0", b"0"]
        table = await client.create_table_view(TOPIC)
        assert set(table.keys()) == {"a", "b"}
        compacted = await client.subscribe(
            TOPIC, "c", is_read_compacted=True, initial_position=InitialPosition.Earliest
        )
        assert [(await compacted.receive(30_000)).partition_key() for _ in range(2)] == ["a", "b"]


async def test_each_chunk_of_a_large_message_is_dropped_and_its_own_subscription_gets_it_whole(at: Deployment) -> None:
    await (await at.consumer(type=SHARED)).leave()
    large = bytes(range(250)) * 22_000
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        mine = await client.subscribe(TOPIC, "t", consumer_type=ConsumerType.Shared)
        producer = await client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
        await producer.send(large, {REDRIVEN_TO: make_redriven_to(NAME, "t")})
        assert (await mine.receive(10_000)).data() == large
        other = await client.subscribe(TOPIC, "s", consumer_type=ConsumerType.Shared)
        with pytest.raises(Timeout):
            await other.receive(100)
    found = await stats_of(at)
    assert found.backlog == 0
    assert found.filtered_entries > 1, "its chunks"


async def test_in_a_transaction_it_is_dropped_when_that_commits(at: Deployment) -> None:
    consumer = await at.consumer(type=SHARED)
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        producer = await client.create_producer(TOPIC, batching_enabled=False)
        async with client.transaction() as txn:
            await producer.send(b"1", {REDRIVEN_TO: make_redriven_to(NAME, "t")}, txn=txn)
            await producer.send(b"2", txn=txn)
            assert (await stats_of(at)).filtered == 0
    assert await consumer.receive_payloads(1) == [b"2"]
    assert (await stats_of(at)).filtered == 1


async def test_a_filter_does_not_judge_what_went_back_for_its_own_subscription(at: Deployment) -> None:
    consumer = await at.consumer(
        type=SHARED, subscription_properties={FILTER: "message.producer = 'old'"}
    )
    ids = await send(at, "s", "t", "", producer_name="new")
    assert await consumer.receive_payloads(1) == [b"0"], "it was wanted when its first producer sent it"
    assert await consumer.quiet()
    assert (await stats_of(at)).filtered == 2
    position = Position(ids[0].ledger_id(), ids[0].entry_id())
    (state,) = (await summaries.trace_message(at.topic, position, -1)).subscriptions
    assert state.state == "delivered"


async def test_the_sdk_does_not_drop_by_a_filter_what_went_back_for_its_subscription(at: Deployment) -> None:
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        consumer = await client.subscribe(TOPIC, "s", filter="message.producer = 'old'")
        await send(at, "", "s", producer_name="new")
        message = await consumer.receive(30_000)
        assert message.data() == b"1"
        await consumer.acknowledge(message)


async def test_a_trace_says_for_which_subscription_it_went_back(at: Deployment) -> None:
    consumer = await at.consumer(type=SHARED)
    ids = await send(at, "t", "")
    assert await consumer.receive_payloads(1) == [b"1"]
    position = Position(ids[0].ledger_id(), ids[0].entry_id())
    (state,) = (await summaries.trace_message(at.topic, position, -1)).subscriptions
    assert (state.state, state.detail) == ("filtered", "It went back for the subscription 't' alone.")


async def test_the_analysis_of_a_backlog_with_a_filter_says_that_others_messages_are_not_wanted(at: Deployment) -> None:
    await (await at.consumer(type=SHARED, subscription_properties={FILTER: "message.key = 'k'"})).leave()
    await send(at, "t", "s", "")
    found = await analyze_backlog(at.topic.log, at.topic.find_subscription("s"))
    assert (found.messages, found.unwanted_messages) == (3, 1)


async def test_what_comes_again_after_a_seek_is_dropped_again(at: Deployment) -> None:
    consumer = await at.consumer(type=SHARED)
    await send(at, "t", "", "t")
    assert await consumer.receive_payloads(1) == [b"1"]
    await consumer.leave()
    subscription = at.topic.find_subscription("s")
    async with subscription.seek_lock:
        await subscription.seek(Position(-1, -1))
    assert await at.backlog("s") == 3
    consumer = await at.consumer(type=SHARED)
    assert await consumer.receive_payloads(1) == [b"1"]
    assert await consumer.quiet()
    assert (await stats_of(at)).filtered == 4
