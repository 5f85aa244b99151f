"""A delayed message is cancelled for every subscription, or for none, and who asks is told why."""

from typing import Any

import pytest

from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.subscription.core.cursor_state import TxnAcks
from magnetar.client import aio
from magnetar.client.common.errors import NotAllowedError
from magnetar.client.model.settings import ConsumerType
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InvalidRequest, NotAllowed, NotFound
from magnetar.proto.names import LATEST, MessageId, Position, TopicName
from magnetar.proto.policies import Policies
from magnetar.proto.states import TxnId
from tests.broker.subscription.test_delays import restarted, sealed
from tests.broker.topic.test_maintenance import TOPIC, Deployment
from tests.broker.topic.test_maintenance import at as at

SHARED, KEY_SHARED = wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED
MINUTE = 60_000


async def delayed(at: Deployment, *payloads: bytes) -> Position:
    producer = await at.producer("delaying")
    receipt = await producer.send(*payloads, deliver_at_ms=at.clock.wall_ms() + MINUTE)
    await producer.close()
    return Position(receipt.ledger_id, receipt.entry_id)


async def cancel(at: Deployment, position: Position, batch_index: int = -1) -> Any:
    return await SubscriptionAdministration(at.topic).cancel_delayed(position, batch_index)


async def moved_on(at: Deployment, seconds: float) -> None:
    at.clock.ahead_s += seconds
    for each in at.topic.subscriptions.values():
        each.pump.wake()


@pytest.mark.parametrize("where", ["held", "sealed", "no consumer", "restarted"])
async def test_no_subscription_gets_what_was_cancelled(where: str, at: Deployment) -> None:
    consumers = [await at.consumer(name, type=type_) for name, type_ in (("a", SHARED), ("b", KEY_SHARED))]
    position, other = await delayed(at, b"cancelled"), await delayed(at, b"kept")
    if where == "sealed":
        await sealed(at, "a")
    if where == "no consumer":
        for each in consumers:
            await each.leave()
    if where == "restarted":
        await restarted(at)
        consumers = [await at.consumer(name, type=type_) for name, type_ in (("a", SHARED), ("b", KEY_SHARED))]
    found = await cancel(at, position)
    assert (found.cancelled, found.acknowledged) == (("a", "b"), ())
    again = await cancel(at, position)
    assert (again.cancelled, again.acknowledged) == ((), ("a", "b")), "a lost answer is asked for again"
    if where == "no consumer":
        consumers = [await at.consumer(name, type=type_) for name, type_ in (("a", SHARED), ("b", KEY_SHARED))]
    await restarted(at)
    consumers = [await at.consumer(name, type=type_) for name, type_ in (("a", SHARED), ("b", KEY_SHARED))]
    await moved_on(at, 61)
    for each in consumers:
        assert await each.receive_payloads(1) == [b"kept"]
        assert await each.quiet()
    assert other > position


async def test_it_is_refused_when_one_subscription_has_got_it_and_the_others_still_get_it(at: Deployment) -> None:
    exclusive, shared = await at.consumer("exclusive"), await at.consumer("s", type=SHARED)
    position = await delayed(at, b"x")
    found = await exclusive.receive()
    with pytest.raises(NotAllowed, match=r"'exclusive' has delivered it to consumer"):
        await cancel(at, position)
    await exclusive.ack(found)
    with pytest.raises(NotAllowed, match="'exclusive' has acknowledged it"):
        await cancel(at, position)
    await moved_on(at, 61)
    assert await shared.receive_payloads(1) == [b"x"]
    with pytest.raises(NotAllowed, match="its delivery time has come"):
        await cancel(at, position)


async def test_without_a_durable_subscription_there_is_nothing_to_cancel_it_for(at: Deployment) -> None:
    position = await delayed(at, b"x")
    with pytest.raises(NotAllowed, match="no durable subscription"):
        await cancel(at, position)
    await at.consumer("reader", durable=False)
    with pytest.raises(NotAllowed, match="no durable subscription"):
        await cancel(at, position)


async def test_what_failed_or_is_pending_in_a_transaction_has_been_delivered(at: Deployment) -> None:
    exclusive = await at.consumer("s")
    position = await delayed(at, b"x")
    found, subscription = await exclusive.receive(), at.topic.find_subscription("s")
    member, wanted = next(iter(subscription.dispatcher.members.values())), TxnAcks()
    wanted.add(position)
    subscription.acks.add_pending_acks(member, TxnId(1, 1), wanted, None, 1 << 20)
    with pytest.raises(NotAllowed, match="in an open transaction"):
        await cancel(at, position)
    subscription.settle(TxnId(1, 1), committed=False)
    assert (await exclusive.receive()).entry_id == found.entry_id
    await exclusive.leave()
    await at.everybody_left()
    with pytest.raises(NotAllowed, match="has delivered it, and it failed"):
        await cancel(at, position)


async def test_a_message_of_a_batch_is_cancelled_by_its_index_and_the_others_come(at: Deployment) -> None:
    consumer = await at.consumer("s", type=SHARED)
    position = await delayed(at, b"0", b"1", b"2")
    assert (await cancel(at, position, 1)).cancelled == ("s",)
    assert (await cancel(at, position, 1)).acknowledged == ("s",)
    with pytest.raises(InvalidRequest, match="none with index 3"):
        await cancel(at, position, 3)
    await moved_on(at, 61)
    found = await consumer.receive()
    assert list(found.acked_batch_indexes) == [1]
    await consumer.ack(found)
    assert await at.backlog("s") == 0


async def test_a_wrong_id_and_a_message_without_a_time_are_refused(at: Deployment) -> None:
    await at.consumer("s", type=SHARED)
    producer = await at.producer()
    receipt = await producer.send(b"at once")
    ledger_id = receipt.ledger_id
    for position in (Position(ledger_id, 7), Position(99, 0), Position(-1, -1), Position(ledger_id, -1)):
        with pytest.raises(NotFound):
            await cancel(at, position)
    with pytest.raises(NotAllowed, match="it has no delivery time"):
        await cancel(at, Position(receipt.ledger_id, receipt.entry_id))


async def test_through_the_sdk_a_message_in_chunks_and_one_of_a_partition_are_cancelled(at: Deployment) -> None:
    parted = f"{TOPIC}-parted"
    await at.broker.topic_manager.catalog.create_topic(TopicName.parse(parted), 3)
    await at.broker.topic_manager.policies.change_policies(
        TopicName.parse(TOPIC).namespace_name, None, Policies(max_message_bytes=1000)
    )
    async with aio.Client(f"magnetar://{at.broker.endpoint}") as client:
        for topic, payload in ((TOPIC, b"x" * 5000), (parted, b"y")):
            await client.subscribe(topic, "s", ConsumerType.Shared)
            producer = await client.create_producer(topic, chunking_enabled=True, batching_enabled=False)
            id_ = await producer.send(payload, deliver_at=at.clock.wall_ms() + MINUTE)
            assert await producer.cancel(id_) == ["s"]
            assert await producer.cancel(id_) == []
            due = await producer.send(b"at once")
            with pytest.raises(NotAllowedError, match="no delivery time"):
                await producer.cancel(due)
    assert await at.backlog("s") == 1


async def test_a_reset_gives_what_was_cancelled_back_at_its_time_and_passes_over_what_is_delayed(
    at: Deployment,
) -> None:
    await at.consumer("a", type=SHARED)
    subscriptions = SubscriptionAdministration(at.topic)
    position = await delayed(at, b"x")
    await cancel(at, position)
    await subscriptions.reset_subscription("a", MessageId(*position), None)
    consumer = await at.consumer("a", type=SHARED)
    assert await consumer.quiet(), "what is not due is held again"
    await moved_on(at, 61)
    assert await consumer.receive_payloads(1) == [b"x"]
    await delayed(at, b"y")
    await subscriptions.reset_subscription("a", MessageId(*LATEST), None)
    consumer = await at.consumer("a", type=SHARED)
    await moved_on(at, 61)
    assert await consumer.quiet()
