"""Seeking and resetting: where a subscription begins again, and that nothing comes from there before it is told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InternalError, NotOwner, Unavailable
from magnetar.proto.states import Blocked
from tests.broker.grpc.test_services import EARLIEST, TOPIC, Deployment
from tests.support.cluster import TestConsumer, cluster, one_by_one

LONG_MAX = (1 << 63) - 1
LATEST = wire.MessageId(ledger_id=LONG_MAX, entry_id=LONG_MAX, partition=-1, batch_index=-1)
FIRST = wire.MessageId(ledger_id=-1, entry_id=-1, partition=-1, batch_index=-1)
TYPES = {"exclusive": wire.Subscribe.EXCLUSIVE, "shared": wire.Subscribe.SHARED}


# ------------------------------------------------------------------------------------------------ latest
async def _next(deployment: Deployment, consumer: TestConsumer, producer: Any) -> bytes:
    await producer.send(b"next")
    return (await consumer.receive_payloads(1))[0]


async def test_after_a_seek_to_latest_the_next_message_comes_first(deployment: Deployment) -> None:
    producer, consumer = await deployment.filled(3), await deployment.consumer(initial_position=EARLIEST)
    await consumer.receive_payloads(3)
    consumer.requests = 1
    await consumer.ask(seek=wire.Seek(request_id=1, message_id=LATEST))
    assert await _next(deployment, consumer, producer) == b"next"


async def test_after_a_readers_seek_to_latest_the_next_message_comes_first(deployment: Deployment) -> None:
    producer, reader = await deployment.filled(3), await deployment.consumer(durable=False, start=FIRST)
    await reader.receive_payloads(3)
    reader.requests = 1
    await reader.ask(seek=wire.Seek(request_id=1, message_id=LATEST))
    assert await _next(deployment, reader, producer) == b"next"


async def test_a_subscription_that_is_reset_to_latest_or_made_there_begins_with_the_next_message(
    deployment: Deployment
) -> None:
    producer = await deployment.filled(3)
    await (await deployment.consumer(initial_position=EARLIEST)).close()
    reset = wire.ResetSubscriptionRequest(topic=TOPIC, name="s", message_id=LATEST)
    await deployment.admin("ResetSubscription", reset)
    await deployment.admin("CreateSubscription", wire.SubscriptionSpec(topic=TOPIC, name="made", position=LATEST))
    of_both = [await deployment.consumer(subscription=name) for name in ("s", "made")]
    await producer.send(b"next")
    assert [await each.receive_payloads(1) for each in of_both] == [[b"next"], [b"next"]]


async def test_a_reader_opened_at_latest_inclusive_begins_with_the_last_message(deployment: Deployment) -> None:
    await deployment.filled(3)
    reader = await deployment.consumer(durable=False, start=LATEST, start_inclusive=True)
    assert await reader.receive_payloads(1) == [b"2"]


# ------------------------------------------------------------------------------------------------ under way
async def until(reached: Callable[[], bool], deadline_s: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + deadline_s
    while not reached():
        assert asyncio.get_running_loop().time() < end, "it did not come to that"
        await asyncio.sleep(0.001)


class Store:
    """Stands in for the write of a subscription's cursor: it ends when the test says so."""

    def __init__(self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, name: str = "s") -> None:
        self.subscription = deployment.broker.topics[TOPIC].find_subscription(name)
        assert self.subscription.store is not None
        self.asked: list[asyncio.Future[None]] = []
        monkeypatch.setattr(type(self.subscription.store), "make_acks_durable_future", lambda _: self._durable())

    def _durable(self) -> asyncio.Future[None]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]

    async def wait_asked(self, times: int = 1) -> None:
        await until(lambda: len(self.asked) >= times)

    async def pump(self) -> None:
        """The subscription hands out whatever it may."""
        for _ in range(20):
            self.subscription.pump.wake()
            await asyncio.sleep(0)


async def _order(consumer: TestConsumer, deliveries: int, dones: int = 1) -> list[str]:
    """What came, in order: `done`, or the entry ids."""
    async with asyncio.timeout(10):
        while True:
            found = [
                "done" if item.WhichOneof("kind") == "done" else str(item.delivery.entry_id)
                for item in consumer.items if item.WhichOneof("kind") in ("done", "delivery")
            ]  # fmt: skip
            if len(found) - found.count("done") >= deliveries and found.count("done") >= dones:
                return found
            consumer.items.extend(one_by_one(await consumer.stream.receive()))


def _seek(consumer: TestConsumer, request_id: int, to: wire.MessageId) -> None:
    consumer.frame(seek=wire.Seek(request_id=request_id, message_id=to))


@pytest.mark.parametrize("type_", TYPES.values(), ids=TYPES)
async def test_nothing_from_the_new_place_comes_before_the_seek_is_answered(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, type_: int
) -> None:
    producer, consumer = await deployment.filled(3), await deployment.consumer(initial_position=EARLIEST, type=type_)
    await consumer.receive_payloads(3)
    store = Store(deployment, monkeypatch)
    _seek(consumer, 1, FIRST)
    await store.wait_asked()
    await producer.send(b"3")
    await store.pump()
    assert store.subscription.pump.blocked is Blocked.MOVING
    store.asked[0].set_result(None)
    assert await _order(consumer, 4) == ["done", "0", "1", "2", "3"]


async def test_who_joins_while_a_subscription_is_moved_gets_nothing_before_that_is_stored(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reset by an operator, who has no stream: its consumers are told, and come again."""
    await deployment.filled(3)
    here = await deployment.consumer(initial_position=EARLIEST, type=wire.Subscribe.SHARED)
    await here.receive_payloads(3)
    store = Store(deployment, monkeypatch)
    reset = asyncio.ensure_future(
        deployment.admin("ResetSubscription", wire.ResetSubscriptionRequest(topic=TOPIC, name="s", message_id=FIRST))
    )
    await store.wait_asked()
    with pytest.raises(Unavailable, match="moved"):
        await here.receive()
    again = await deployment.consumer(type=wire.Subscribe.SHARED)
    await store.pump()
    assert await again.quiet()
    store.asked[0].set_result(None)
    await reset
    assert await again.receive_payloads(3) == [b"0", b"1", b"2"]


async def test_of_two_seeks_at_once_the_later_one_holds_and_both_are_answered_before_anything_comes_from_there(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.filled(4)
    consumer = await deployment.consumer(initial_position=EARLIEST)
    last = [await consumer.receive() for _ in range(4)][3]
    store, reader = Store(deployment, monkeypatch), deployment.broker.topics[TOPIC].log.reader
    slow, honest = asyncio.Event(), reader.find_position_by_time

    async def find_position_by_time(time_ms: int) -> Any:
        await slow.wait()
        return await honest(time_ms)

    monkeypatch.setattr(reader, "find_position_by_time", find_position_by_time)
    consumer.frame(seek=wire.Seek(request_id=1, publish_time_ms=0))  # to the first
    _seek(consumer, 2, wire.MessageId(ledger_id=last.ledger_id, entry_id=last.entry_id, batch_index=-1))
    await store.pump()
    assert not store.asked, "the second waits for the first, which looks for its place"
    slow.set()
    await store.wait_asked()
    store.asked[0].set_result(None)
    await store.wait_asked(2)
    await store.pump()
    store.asked[1].set_result(None)
    came = await _order(consumer, 1, dones=2)
    after = came[len(came) - came[::-1].index("done") :]
    assert after == ["3"], "after the second answer comes what it asked for, and nothing of the first place"


async def test_a_seek_whose_caller_goes_leaves_the_subscription_at_the_new_place_and_handing_out(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.filled(3)
    consumer = await deployment.consumer(initial_position=EARLIEST)
    await consumer.receive_payloads(3)
    with monkeypatch.context() as patched:
        store = Store(deployment, patched)
        _seek(consumer, 1, FIRST)
        await store.wait_asked()
        await consumer.close()
        await until(lambda: not store.subscription.consumers)
    assert store.asked[0].cancelled()
    other = await deployment.consumer()
    assert await other.receive_payloads(3) == [b"0", b"1", b"2"]
    # durable, in order
    await other.ack(wire.Delivery(ledger_id=store.subscription.log.shape.start_position[0], entry_id=0))


async def test_a_seek_that_cannot_be_stored_says_so_and_the_next_owner_begins_at_the_old_place(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.filled(3)
    consumer = await deployment.consumer(initial_position=EARLIEST)
    deliveries = [await consumer.receive() for _ in range(3)]
    await consumer.ack(deliveries[1], cumulative=True)
    with monkeypatch.context() as patched:

        async def write(_: Any) -> None:
            raise InternalError("a fault of ours")

        patched.setattr(DurableCursor, "_write", write)
        _seek(consumer, 9, FIRST)
        with pytest.raises(NotOwner):  # the topic is given up, and what is handed out no longer counts
            await consumer.receive()
    again = await deployment.consumer()
    assert await again.receive_payloads(1) == [b"2"]


# ------------------------------------------------------------------------------------------------ under load
@pytest.mark.parametrize("type_", [ConsumerType.Exclusive, ConsumerType.Shared], ids=str)
async def test_after_seeks_under_load_everything_from_the_new_place_is_received(
    deployment: Deployment, type_: ConsumerType
) -> None:
    client = Client(f"magnetar://{deployment.broker.endpoint}")
    try:
        consumer = await client.subscribe(TOPIC, "load", consumer_type=type_, initial_position=InitialPosition.Earliest)
        producer = await client.create_producer(TOPIC, batching_max_messages=5)
        sent, over = 0, asyncio.Event()

        async def publish() -> None:
            nonlocal sent
            while not over.is_set():
                await asyncio.gather(*(producer.send(b"%d" % number) for number in range(sent, sent + 10)))
                sent += 10

        publishing = asyncio.ensure_future(publish())
        async with asyncio.timeout(60):
            for _ in range(10):
                for _ in range(40):
                    await consumer.acknowledge(await consumer.receive())
                await consumer.seek(MessageId.earliest)
            over.set()
            await publishing
            seen: set[bytes] = set()
            while len(seen) < sent:
                message = await consumer.receive(timeout_millis=10_000)
                seen.add(message.data())
                await consumer.acknowledge(message)
        assert seen == {b"%d" % number for number in range(sent)}
    finally:
        await client.close()


async def test_an_acknowledgement_after_a_seek_counts_also_of_what_was_received_before_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"0")
        await producer.send(b"1")
        begin, shared = InitialPosition.Earliest, ConsumerType.Shared
        consumer = await client.subscribe(TOPIC, "s", shared, ack_receipt_enabled=True, initial_position=begin)
        first = await consumer.receive()
        await consumer.seek(MessageId.earliest)
        await consumer.acknowledge(first)
        await consumer.close()
        consumer = await client.subscribe(TOPIC, "s", shared, initial_position=begin)
        assert (await consumer.receive()).data() == b"1"


@pytest.mark.parametrize("by", ["another consumer", "an operator"])
async def test_what_was_acknowledged_before_a_seek_comes_again_though_its_consumer_had_not_told_it_yet(
    tmp_path: Path, by: str
) -> None:
    async with cluster(tmp_path) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with aio.Client(url) as client, AdminClient(url) as admin:
            producer = await client.create_producer(TOPIC)
            for number in range(10):
                await producer.send(b"%d" % number)
            two = await client.subscribe(TOPIC, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
            one = await client.subscribe(TOPIC, "s", ConsumerType.Shared, receiver_queue_size=0)
            for _ in range(10):
                await two.acknowledge(await two.receive())  # it tells the broker within 100 ms
            if by == "an operator":
                await admin.reset_subscription(TOPIC, "s", MessageId.earliest)
            else:
                await one.seek(MessageId.earliest)
            again = asyncio.Queue[bytes]()

            async def take(consumer: aio.Consumer) -> None:
                while True:
                    again.put_nowait((await consumer.receive()).data())

            taking = [asyncio.create_task(take(each)) for each in (one, two)]
            async with asyncio.timeout(30):
                assert sorted([await again.get() for _ in range(10)]) == [b"%d" % number for number in range(10)]
            for task in taking:
                task.cancel()
