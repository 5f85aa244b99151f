"""A broker that says nothing: its producers and consumers leave it when another one owns their topics, not before."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.connect.discovery import PING_AFTER_SILENCE_S, PING_TIMEOUT_S
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import TopicName
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.client.fake_broker import FakeBroker

BOTH = "magnetar://one:7651,two:7652"
TOPIC = TopicName.parse("t")
NOTICED_S = PING_AFTER_SILENCE_S + PING_TIMEOUT_S
SOON_S = 0.5
Body = Callable[["Two"], Awaitable[None]]


class Broker(FakeBroker):
    """`moved`: the names of topics that it owns, whoever owns the others."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: set[str] = set()

    async def lookup(self, request: Any, context: Any) -> wire.LookupReply:
        if TopicName.parse(request.topic).local in self.moved:
            return wire.LookupReply(here=True)
        return await super().lookup(request, context)


class Two:
    """Brokers `one`, which owns the topics, and `two`, which knows it; they have the same topics."""

    def __init__(self, simulation: Simulation, client: Client) -> None:
        self.simulation, self.client = simulation, client
        self.one, self.two = Broker(), Broker()
        self.two.topics = self.one.topics
        self.two.owner = "one:7651"

    def take_over(self) -> None:
        """The session of `one` ended."""
        self.one.owner, self.two.owner = "two:7652", ""
        for topic in self.one.topics.values():
            for subscription in topic.subscriptions.values():
                subscription.consumers.clear()

    def stop(self) -> None:
        assert self.simulation.pause("one")


def simulate(body: Body, url: str = BOTH) -> None:
    simulation = Simulation(seed=3)

    async def client_side() -> None:
        client = Client(url, world=simulation.world("client"))
        two = Two(simulation, client)
        for number, (name, broker) in enumerate((("one", two.one), ("two", two.two)), 7651):
            network = simulation.world(name).network
            await simulation.spawn(name, network.serve(Endpoint(name, number), broker.services))
        try:
            await body(two)
        finally:
            simulation.resume("one")
            await client.close()

    async def main() -> None:
        await simulation.spawn("client", client_side())

    simulation.run(main())


pytestmark = pytest.mark.run_by.with_args(simulate)


async def test_a_producer_and_an_idle_consumer_leave_a_stopped_owner_when_another_broker_owns_the_topic(
    two: Two, /
) -> None:
    producer = await two.client.create_producer("t")
    consumer = await two.client.subscribe("t", "s")
    two.stop()
    two.take_over()
    async with asyncio.timeout(NOTICED_S + SOON_S):
        await producer.send(b"after")
        assert (await consumer.receive()).data() == b"after"
    assert two.two.lookups > 0


async def test_they_wait_for_a_stopped_owner_as_long_as_it_owns_the_topic(two: Two, /) -> None:
    producer = await two.client.create_producer("t")
    two.stop()
    sending = asyncio.ensure_future(producer.send(b"x"))
    await asyncio.sleep(3 * NOTICED_S)
    asked = two.two.lookups
    assert asked > 1, "it asks again"
    assert len(two.one.opened) == 1
    assert not sending.done()
    two.take_over()
    async with asyncio.timeout(PING_TIMEOUT_S + SOON_S):
        await sending


async def test_owners_go_on_where_they_are_when_the_broker_goes_on(two: Two, /) -> None:
    producer = await two.client.create_producer("t")
    two.stop()
    await asyncio.sleep(2 * NOTICED_S)
    two.simulation.resume("one")
    async with asyncio.timeout(SOON_S):
        await producer.send(b"x")
    asked = two.two.lookups
    await asyncio.sleep(60)
    assert (len(two.one.opened), len(two.two.opened), two.two.lookups) == (1, 0, asked)


async def test_of_many_owners_those_leave_whose_topics_moved(two: Two, /) -> None:
    moved = await two.client.create_producer("moved")
    stays = await two.client.create_producer("stays")
    two.stop()
    two.two.moved = {"moved"}
    waiting = asyncio.ensure_future(stays.send(b"x"))
    async with asyncio.timeout(NOTICED_S + SOON_S):
        await moved.send(b"x")
    assert not waiting.done()
    two.simulation.resume("one")
    async with asyncio.timeout(SOON_S):
        await waiting
    assert [len(each.opened) for each in (two.one, two.two)] == [2, 1]


@pytest.mark.run_by(simulate, "magnetar://one:7651")
async def test_with_a_single_broker_nothing_is_lost_and_it_is_not_asked(two: Two, /) -> None:
    producer = await two.client.create_producer("t")
    asked = two.one.lookups
    two.stop()
    sending = asyncio.ensure_future(producer.send(b"x"))
    await asyncio.sleep(4 * NOTICED_S)
    assert not sending.done()
    two.simulation.resume("one")
    async with asyncio.timeout(SOON_S):
        await sending
    assert (two.one.lookups, len(two.one.opened)) == (asked, 1)


async def test_look_ups_pass_over_a_broker_that_is_silent_and_come_back_to_it(two: Two, /) -> None:
    await two.client.create_producer("t")
    two.stop()
    await asyncio.sleep(NOTICED_S + SOON_S)
    for _ in range(6):
        async with asyncio.timeout(SOON_S):
            await two.client.connections.fetch_partition_count(TOPIC)
            await two.client.connections.find_owner_channel(TOPIC)
    two.simulation.resume("one")
    await asyncio.sleep(NOTICED_S)
    asked = two.one.lookups
    for _ in range(4):
        await two.client.connections.find_owner_channel(TOPIC)
    assert two.one.lookups == asked + 2, "in turn"


async def test_a_broker_that_neither_answers_nor_says_who_owns_is_no_reason_to_leave(two: Two, /) -> None:
    producer = await two.client.create_producer("t")
    two.stop()
    two.simulation.pause("two")
    sending = asyncio.ensure_future(producer.send(b"x"))
    await asyncio.sleep(2 * NOTICED_S)
    assert not sending.done()
    two.simulation.resume("one")
    async with asyncio.timeout(SOON_S):
        await sending
    assert len(two.one.opened) == 1
    two.simulation.resume("two")


async def test_one_that_has_two_addresses_is_one(two: Two, /) -> None:
    """The one of the service URL, and the one that brokers tell."""
    two.one.owner_here = "1.example:7651"
    two.two.owner = "1.example:7651"
    producer = await two.client.create_producer("t")
    two.stop()
    sending = asyncio.ensure_future(producer.send(b"x"))
    await asyncio.sleep(2 * NOTICED_S)
    assert not sending.done()
    assert two.two.lookups
    two.simulation.resume("one")
    async with asyncio.timeout(SOON_S):
        await sending
    assert len(two.one.opened) == 1


async def test_a_client_of_a_closed_stream_asks_nothing_more(two: Two, /) -> None:
    producer = await two.client.create_producer("t")
    two.stop()
    await asyncio.sleep(NOTICED_S + SOON_S)
    await two.client.close(1)
    with pytest.raises(MagnetarError):
        await producer.send(b"x")
    asked = two.two.lookups
    await asyncio.sleep(30)
    assert two.two.lookups == asked
