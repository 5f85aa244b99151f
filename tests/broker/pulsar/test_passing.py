"""Subscriptions that do not last, as Pulsar's clients open them."""

from typing import Any

import pytest

from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.schema import BYTES_VERSION
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, T, simulate
from tests.broker.pulsar.test_schemas import BYTES, ask

pytestmark = pytest.mark.run_by.with_args(simulate)

PASSING: dict[str, Any] = {"durable": False, "subType": pulsar.CommandSubscribe.Shared, "initialPosition": 0}


async def close(raw: Raw, number: int) -> None:
    raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=number, request_id=9))
    await raw.next("success")


def test_its_consumers_share_it_and_it_ends_with_the_last_of_them() -> None:
    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        await raw.open_producer()
        await raw.subscribe(1, permits=2, **PASSING)
        await raw.subscribe(2, permits=2, **PASSING)
        for number in range(4):
            raw.publish(number)
        came = [await raw.next("message") for _ in range(4)]
        assert sorted(each.consumer_id for each in came) == [1, 1, 2, 2]
        await close(raw, 1)
        raw.send(flow=pulsar.CommandFlow(consumer_id=2, messagePermits=10))
        again = [await raw.next("message") for _ in range(2)]
        assert {each.message_id.entryId for each in again} == {
            each.message_id.entryId for each in came if each.consumer_id == 1
        }, "what the first consumer held goes to the second"
        await close(raw, 2)
        raw.publish(4)
        await raw.next("send_receipt")
        await raw.subscribe(3, **PASSING)
        raw.publish(5)
        message = await raw.next("message")
        assert (message.consumer_id, message.message_id.entryId) == (3, 5), "a new subscription, from the end"

    broker = simulate(scenario)
    assert [list(topic.subscriptions) for topic in broker.topics.values()] == [["s"]]


async def test_what_is_given_back_comes_again(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    await raw.subscribe(1, **PASSING)
    raw.publish(0)
    first = await raw.next("message")
    asked = pulsar.CommandRedeliverUnacknowledgedMessages(consumer_id=1, message_ids=[first.message_id])
    raw.send(redeliver_unacknowledged_messages=asked)
    assert (await raw.next("message")).message_id == first.message_id


async def test_it_takes_no_durable_ones_name_and_readers_have_their_own(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.subscribe(1)
    assert (await raw.subscribe(2, **PASSING)).error == pulsar.NotAllowedError
    for number in (3, 4):
        asked = {**PASSING, "subType": 0, "subscription": "reader"}
        assert isinstance(await raw.subscribe(number, **asked), pulsar.CommandSuccess)


async def test_bytes_by_a_schema_have_a_version_that_can_be_asked_for(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer(schema=BYTES)
    raw.send(get_or_create_schema=pulsar.CommandGetOrCreateSchema(request_id=1, topic=T, schema=BYTES))
    version = (await raw.next("get_or_create_schema_response")).schema_version
    assert version == BYTES_VERSION
    answer = await ask(raw, version)
    assert (answer.schema_version, answer.schema.type, answer.schema.schema_data) == (version, 0, b"")


async def test_a_namespace_that_does_not_exist_has_no_topics(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    raw.send(get_topics_of_namespace=pulsar.CommandGetTopicsOfNamespace(request_id=1, namespace="public/none"))
    assert not (await raw.next("get_topics_of_namespace_response")).topics
