"""Batches of which a part is acknowledged, at consumers that acknowledge whole ones; and permits of hidden messages.

Java's, C++'s, Python's and Go's clients do not acknowledge an entry of which they hide messages, unless they were told
to acknowledge by index; C++'s and Go's also give back permits for what they hide.
"""

from typing import Any

import pytest

from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_batch, encode_plain_items
from magnetar.proto.entry_pb2 import KeyValue, MessageIdData, MessageMetadata
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, T, simulate
from tests.broker.pulsar.test_transactions import begun, ended

pytestmark = pytest.mark.run_by.with_args(simulate)

BY_INDEX = [KeyValue(key="magnetar.index_acks", value="true")]
FIRST_LEFT = 0b001
"""An ack set: of three messages the first one is not acknowledged."""


async def publish_batch(raw: Raw, messages: int = 3, sequence_id: int = 1) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1)
    entry = encode_batch(metadata, encode_plain_items([b"%d" % number for number in range(messages)]), messages)
    raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=sequence_id, num_messages=messages))
    await raw.next("send_receipt")


async def ack(raw: Raw, id_: MessageIdData, left: int = 0, number: int = 1, **more: Any) -> Any:
    named = MessageIdData(ledgerId=id_.ledgerId, entryId=id_.entryId, ack_set=[left] if left else [])
    raw.send(ack=pulsar.CommandAck(consumer_id=number, ack_type=0, message_id=[named], request_id=77, **more))
    return await raw.next("ack_response")


async def close(raw: Raw, number: int) -> None:
    raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=number, request_id=50 + number))
    await raw.next("success")


async def acknowledged_in_part(raw: Raw) -> MessageIdData:
    """A batch of three whose last two messages are acknowledged by an application that has told so."""
    await raw.open_producer()
    await publish_batch(raw)
    await raw.subscribe(1, metadata=BY_INDEX)
    id_: MessageIdData = (await raw.next("message")).message_id
    await ack(raw, id_, FIRST_LEFT)
    return id_


async def left_of_backlog(raw: Raw) -> int:
    """How many messages a consumer of another kind would still get: 0 when everything is acknowledged."""
    raw.send(subscribe=pulsar.CommandSubscribe(
        topic=T, subscription="s", consumer_id=9, request_id=209, subType=pulsar.CommandSubscribe.Shared
    ))  # fmt: skip
    await raw.next("success")
    raw.send(flow=pulsar.CommandFlow(consumer_id=9, messagePermits=1000))
    await publish_batch(raw, 1, sequence_id=99)
    first = await raw.next("message")
    await close(raw, 9)
    return int(first.message_id.entryId)


async def test_a_consumer_that_acknowledges_whole_entries_is_shown_them_whole_and_ends_the_backlog(
    world: World, endpoint: Endpoint, /
) -> None:
    one, other = [await Raw.connected(world, endpoint, client_version=name) for name in ("one", "other")]
    await acknowledged_in_part(one)
    await close(one, 1)
    await other.subscribe(2)
    message = await other.next("message")
    assert list(message.ack_set) == [], "it would never acknowledge what it does not see"
    await ack(other, message.message_id, number=2)
    await close(other, 2)
    assert await left_of_backlog(one) == 1, "the first entry is done"


async def test_a_consumer_that_asked_to_acknowledge_by_index_gets_what_is_left(
    world: World, endpoint: Endpoint, /
) -> None:
    one, other = [await Raw.connected(world, endpoint, client_version=name) for name in ("one", "other")]
    id_ = await acknowledged_in_part(one)
    await close(one, 1)
    await other.subscribe(2, metadata=BY_INDEX)
    assert list((await other.next("message")).ack_set) == [FIRST_LEFT]
    await ack(other, id_, 0b1000, number=2)
    await close(other, 2)
    assert await left_of_backlog(one) == 1


async def test_a_client_that_acknowledged_by_index_once_gets_what_is_left_after_it_connects_again(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint, client_version="Pulsar Go 1")
    await raw.open_producer()
    await publish_batch(raw)
    await raw.subscribe(1)
    await ack(raw, (await raw.next("message")).message_id, FIRST_LEFT)
    await close(raw, 1)
    await raw.subscribe(2)
    assert list((await raw.next("message")).ack_set) == [FIRST_LEFT]


async def test_what_a_transaction_has_pending_comes_whole_when_it_has_committed(
    world: World, endpoint: Endpoint, /
) -> None:
    """Who acknowledges whole entries would keep the rest of such a batch for ever."""
    one, other = [await Raw.connected(world, endpoint, client_version=name) for name in ("one", "other")]
    await one.open_producer()
    await publish_batch(one)
    await one.subscribe(1, metadata=BY_INDEX)
    id_ = (await one.next("message")).message_id
    txn = await begun(one)
    await ack(one, id_, FIRST_LEFT, **txn)
    await other.subscribe(2)
    await close(one, 1)
    assert list((await other.next("message")).ack_set) == [FIRST_LEFT], "not what another one may have done"
    assert await ended(one, txn, pulsar.COMMIT) is None
    again = await other.next("message")
    assert (list(again.ack_set), again.redelivery_count) == ([], 0)
    await ack(other, again.message_id, number=2)
    await close(other, 2)
    assert await left_of_backlog(one) == 1


async def test_what_a_transaction_acknowledges_whole_is_what_was_left(world: World, endpoint: Endpoint, /) -> None:
    one, other = [await Raw.connected(world, endpoint, client_version=name) for name in ("one", "other")]
    await acknowledged_in_part(one)
    await close(one, 1)
    await other.subscribe(2)
    message = await other.next("message")
    txn = await begun(other)
    assert not (await ack(other, message.message_id, number=2, **txn)).HasField("error")
    assert await ended(other, txn, pulsar.COMMIT) is None
    await close(other, 2)
    assert await left_of_backlog(one) == 1


@pytest.mark.parametrize("queue", [2, 10])
async def test_permits_given_back_for_hidden_messages_do_not_raise_what_a_consumer_holds_above_its_queue(
    world: World, endpoint: Endpoint, /, queue: int
) -> None:
    raw, publisher = [await Raw.connected(world, endpoint) for _ in range(2)]
    await publisher.open_producer()
    await raw.subscribe(1, permits=queue)
    for _ in range(20):
        raw.send(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=max(1, queue // 2)))
    for number in range(queue + 5):
        publisher.publish(number)
        await publisher.next("send_receipt")
    for _ in range(queue):
        await raw.next("message")
    await raw.subscribe(2)
    others = [(await raw.next("message")).consumer_id for _ in range(5)]
    assert others == [2] * 5, "the first one holds as many as its queue takes"


async def test_a_consumer_without_a_queue_may_ask_for_several_messages_one_by_one(
    world: World, endpoint: Endpoint, /
) -> None:
    """As Java's and C++'s clients do for each receive that waits, with a queue of 0."""
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    await raw.subscribe(1, permits=0)
    for _ in range(3):
        raw.send(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=1))
    for number in range(3):
        raw.publish(number)
    assert [(await raw.next("message")).message_id.entryId for _ in range(3)] == [0, 1, 2]
