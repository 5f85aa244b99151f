
import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.checks import WrongTopic
from magnetar.client.common.errors import (
    AlreadyClosed,
    ChecksumError,
    ConsumerBusy,
    CumulativeAcknowledgementNotAllowedError,
    InvalidConfiguration,
    InvalidMessage,
    InvalidTopicName,
    NotAllowedError,
    OperationNotSupported,
    Timeout,
)
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto import errors as wire_errors
from magnetar.proto.errors import ConnectionLost, MagnetarError
from tests.chaos.workload import history
from tests.chaos.workload.libraries import Reconnects
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

FULL = "persistent://public/default/t"
EARLIEST = InitialPosition.Earliest


async def filled(client: Client, count: int, topic: str = "t", **options: Any) -> None:
    producer = await client.create_producer(topic, **options)
    await producer.send_many([b"%d" % i for i in range(count)])
    await producer.close()


async def take(consumer: Any, count: int) -> list[bytes]:
    return [(await consumer.receive(60_000)).data() for _ in range(count)]


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + count)]


async def test_messages_come_in_order_with_what_is_known_of_them(client: Client, broker: FakeBroker, /) -> None:
    consumer = await client.subscribe("t", "s")
    producer = await client.create_producer("t")
    await producer.send(b"one", properties={"a": "b"}, partition_key="k", event_timestamp=7)
    await producer.send(None)
    message = await consumer.receive(1000)
    assert (message.data(), message.value(), message.partition_key()) == (b"one", b"one", "k")
    assert (message.properties(), message.event_timestamp()) == ({"a": "b"}, 7)
    assert (message.topic_name(), message.redelivery_count()) == (FULL, 0)
    assert message.producer_name() == "named-by-broker"
    assert (message.message_id(), message.index()) == (MessageId(-1, 7, 0, 0), 0)
    assert not message.has_null_value()
    empty = await consumer.receive(1000)
    assert (empty.value(), empty.has_null_value(), empty.index()) == (None, True, 1)


async def test_receive_raises_timeout_and_the_next_message_still_comes(client: Client, broker: FakeBroker, /) -> None:
    consumer = await client.subscribe("t", "s")
    with pytest.raises(Timeout):
        await consumer.receive(100)
    waiting = asyncio.ensure_future(consumer.receive())
    await asyncio.sleep(0.1)
    await filled(client, 1)
    assert (await waiting).data() == b"0"


@pytest.mark.parametrize("queue", [0, 1, 2, 10, 1000])
async def test_permits_are_granted_again_and_never_dry_up(client: Client, broker: FakeBroker, /, queue: int) -> None:
    await filled(client, 300, batching_max_messages=7)
    consumer = await client.subscribe("t", "s", receiver_queue_size=queue, initial_position=EARLIEST)
    await asyncio.sleep(1)
    assert len(consumer.inbox) <= max(queue, 1) + 7
    assert await take(consumer, 300) == numbers(300)
    consumer.check()


async def test_a_cumulative_ack_on_a_shared_subscription_is_refused_at_once(
    client: Client, broker: FakeBroker, /
) -> None:
    await filled(client, 1)
    consumer = await client.subscribe("t", "s", consumer_type=ConsumerType.Shared, initial_position=EARLIEST)
    message = await consumer.receive(1000)
    with pytest.raises(CumulativeAcknowledgementNotAllowedError):
        await consumer.acknowledge_cumulative(message)


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_stream_loses_nothing_and_what_was_acknowledged_stays_so(seed: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await filled(client, 200, batching_max_messages=10)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, receiver_queue_size=40)
        seen: list[bytes] = []
        while len(set(seen)) < 200:
            message = await consumer.receive(60_000)
            seen.append(message.data())
            await consumer.acknowledge(message)
            if len(seen) in (15, 16, 77, 140):
                broker.cut()
        await consumer.close()
        assert sorted(set(seen), key=int) == numbers(200)
        assert len(seen) < 400
        again = await client.subscribe("t", "s")
        with pytest.raises(Timeout):
            await again.receive(1000)

    simulate(body, seed=seed)


def test_a_consumer_says_that_it_reconnects_and_the_chaos_run_takes_it_as_a_disturbance() -> None:
    """Without it a connection that a busy machine loses would be a redelivery for no reason (tests/chaos)."""
    noted = history.Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        await filled(client, 1)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await consumer.receive(60_000)
        assert not noted.records
        broker.cut()
        await consumer.receive(60_000)
        assert noted.records == [history.Disturbed()]

    log = logging.getLogger("magnetar")
    handler = Reconnects("the consumer reconnects", lambda: noted(history.Disturbed()))
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        simulate(body)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def test_one_partition_that_cannot_be_closed_does_not_end_the_closes_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await filled(client, 6, "parts", batching_enabled=False)
        consumer = await client.subscribe("parts", "s", initial_position=EARLIEST)
        for _ in range(6):
            await consumer.acknowledge(await consumer.receive(1000))

        async def fail() -> None:
            raise RuntimeError("a defect")

        async def slow(send: Callable[[], Awaitable[None]]) -> None:
            await asyncio.sleep(0.1)
            await send()

        for each in consumer.partitions:
            send = fail if each is consumer.partitions[0] else partial(slow, each.requests.send_last_acks)
            monkeypatch.setattr(each.requests, "send_last_acks", send)
        with pytest.raises(RuntimeError, match="a defect"):
            await consumer.close()
        again = await client.subscribe("parts", "s", initial_position=EARLIEST)
        assert {(await again.receive(1000)).message_id().partition() for _ in range(2)} == {0}
        with pytest.raises(Timeout):
            await again.receive(1000)

    simulate(body, FakeBroker({"parts": 3}))


async def test_an_id_that_names_no_topic_cannot_be_acknowledged_on_several(
    client: Client, broker: FakeBroker, /
) -> None:
    consumer = await client.subscribe(["a", "b"], "s")
    with pytest.raises(OperationNotSupported, match="topic"):
        await consumer.acknowledge(MessageId(-1, 7, 0))
    with pytest.raises(InvalidMessage):
        await consumer.acknowledge(b"id")  # type: ignore[arg-type]


async def test_a_damaged_entry_is_told_once_and_what_follows_still_comes(client: Client, broker: FakeBroker, /) -> None:
    await filled(client, 3, batching_enabled=False)
    entries = broker.topics[FULL].entries
    entries[1] = entries[1][:-1] + bytes([entries[1][-1] ^ 1])
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, receiver_queue_size=1)
    assert (await consumer.receive(1000)).data() == b"0"
    with pytest.raises(ChecksumError, match="7:1"):
        await consumer.receive(1000)
    assert (await consumer.receive(1000)).data() == b"2"
    await consumer.close()
    assert 1 not in broker.topics[FULL].subscriptions["s"].done


UNANSWERED: dict[str, tuple[str, Callable[[Any, Any], Awaitable[Any]]]] = {
    "seek to an id": ("seek", lambda consumer, _: consumer.seek(MessageId.earliest)),
    "seek to a time": ("seek", lambda consumer, _: consumer.seek(1)),
    "unsubscribe": ("unsubscribe", lambda consumer, _: consumer.unsubscribe()),
    "last": ("last_message_id", lambda consumer, _: consumer.get_last_message_id()),
    "acknowledge": ("ack", lambda consumer, message: consumer.acknowledge(message)),
    "cumulative": ("ack", lambda consumer, message: consumer.acknowledge_cumulative(message)),
}
"""The frame that the broker does not answer, and the call that sends it."""


@pytest.mark.parametrize("call", UNANSWERED)
async def test_a_request_without_an_answer_raises_the_timeout_of_the_sdk(
    client: Client, broker: FakeBroker, /, call: str
) -> None:
    await filled(client, 1)
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, ack_receipt_enabled=True)
    message = await consumer.receive(1000)
    kind, ask = UNANSWERED[call]
    broker.ignores = {kind}
    with pytest.raises(Timeout, match="no answer within") as raised:
        await ask(consumer, message)
    assert isinstance(raised.value.__cause__, wire_errors.TimedOut)
    assert (raised.value.definite, raised.value.retryable) == (False, True)
    broker.ignores = set()


@pytest.mark.parametrize(("kind", "ask"), [
    ("seek", lambda reader: reader.seek(MessageId.latest)),
    ("last_message_id", lambda reader: reader.has_message_available()),
])  # fmt: skip
async def test_a_request_of_a_reader_without_an_answer_raises_the_timeout_of_the_sdk(
    client: Client, broker: FakeBroker, /, kind: str, ask: Callable[[Any], Awaitable[Any]]
) -> None:
    reader = await client.create_reader("t", MessageId.earliest)
    broker.ignores = {kind}
    with pytest.raises(Timeout, match="no answer within"):
        await ask(reader)
    broker.ignores = set()


async def test_refusals_reach_the_caller_as_exceptions(client: Client, broker: FakeBroker, /) -> None:
    held = await client.subscribe("t", "s")
    with pytest.raises(ConsumerBusy):
        await client.subscribe("t", "s")
    for kind in (ConsumerType.Failover, ConsumerType.KeyShared):
        with pytest.raises(NotAllowedError):
            await client.subscribe("t", kind.name, consumer_type=kind)
    with pytest.raises(InvalidTopicName):
        await client.subscribe("a/b", "s")
    with pytest.raises(InvalidTopicName):
        await client.subscribe("t", "s/s")
    with pytest.raises(InvalidConfiguration):
        await client.subscribe("t", "s", unacked_messages_timeout_ms=10)
    await held.close()
    await client.subscribe("t", "s")


async def test_a_closed_consumer_ends_its_iteration_and_refuses(client: Client, broker: FakeBroker, /) -> None:
    await filled(client, 3)
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
    seen = []

    async def iterate(consumer: Consumer) -> None:
        async for message in consumer:
            seen.append(message.data())
            await consumer.acknowledge(message)

    task = asyncio.ensure_future(iterate(consumer))
    await asyncio.sleep(1)
    await consumer.close()
    await task
    assert seen == numbers(3)
    with pytest.raises(AlreadyClosed):
        await consumer.receive()
    assert broker.topics[FULL].subscriptions["s"].done == {0}


async def test_one_that_was_removed_when_its_connection_broke_is_removed(
    client: Client, broker: FakeBroker, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again over the next connection is told that there is none."""
    consumer = await client.subscribe("t", "s")
    requests = consumer.partitions[0].requests
    answers: list[MagnetarError | None] = [ConnectionLost("it broke"), wire_errors.SubscriptionNotFound("none")]
    told = requests.answer
    monkeypatch.setattr(requests, "answer", lambda id_, error, result: told(id_, answers.pop(0), result))
    await consumer.unsubscribe()
    assert answers == []


# ---------------------------------------------------------------------------------- readers
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_goes_on_behind_the_last_message_after_a_break(seed: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await filled(client, 100, batching_max_messages=10)
        reader = await client.create_reader("t", MessageId.earliest, receiver_queue_size=20)
        seen = []
        while len(seen) < 100:
            seen.append((await reader.read_next(60_000)).data())
            if len(seen) in (5, 33, 34, 90):
                broker.cut()
                await asyncio.sleep(0.01)
        assert seen == numbers(100)
        await reader.seek(MessageId.earliest)
        assert (await reader.read_next(1000)).data() == b"0"

    simulate(body, seed=seed)


async def test_the_causes_of_an_error_end_at_the_original(client: Client, broker: FakeBroker, /) -> None:
    """A chain that leads back to where it began would hang whoever follows it."""
    await client.subscribe("t", "s")
    with pytest.raises(ConsumerBusy) as caught:
        await client.subscribe("t", "s")
    assert [type(each) for each in causes(caught.value)] == [ConsumerBusy, wire_errors.ConsumerBusy]
    with pytest.raises(InvalidTopicName) as wrong:
        await client.subscribe("a/b", "s")
    assert [type(each) for each in causes(wrong.value)] == [WrongTopic, wire_errors.InvalidName]


def causes(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None:
        assert error not in chain, "the chain of causes leads back to itself"
        chain.append(error)
        error = error.__cause__
    return chain


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("batch", [1, 7])
async def test_what_a_seek_passed_over_comes_when_another_moves_the_cursor_back(
    client: Client, broker: FakeBroker, /, batch: int, inclusive: bool
) -> None:
    await filled(client, 100, batching_max_messages=batch)
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, start_message_id_inclusive=inclusive, receiver_queue_size=20
    )
    ids = [(await consumer.receive(1000)).message_id() for _ in range(100)]
    for place in (48, 55):  # the last of its batch of 7, and one inside
        await consumer.seek(ids[place])
        first = place + (0 if inclusive else 1)
        assert await take(consumer, 100 - first) == numbers(100 - first, first)
        broker.cut()
        assert await take(consumer, 100 - first) == numbers(100 - first, first), "and after a broken stream"
        broker.reset_cursor(FULL, "s")
        assert await take(consumer, 100) == numbers(100)
    with pytest.raises(Timeout):
        await consumer.receive(1000)
    consumer.check()


async def test_a_reader_that_went_to_a_time_is_there_after_a_broken_stream_too(
    client: Client, broker: FakeBroker, /
) -> None:
    await filled(client, 10)
    await asyncio.sleep(10)
    await filled(client, 10, batching_max_messages=1)
    publish_times = [header.publish_time for header in broker.topics[FULL].headers]
    reader = await client.create_reader("t", MessageId.latest)
    await reader.seek(publish_times[-1] - 5000)
    broker.cut()
    await asyncio.sleep(5)
    assert [(await reader.read_next(10_000)).data() for _ in range(10)] == numbers(10)
    broker.cut()
    await filled(client, 1)
    assert (await reader.read_next(60_000)).data() == b"0"
    with pytest.raises(Timeout):
        await reader.read_next(1000)


@pytest.mark.parametrize("group_ms", [0, 100, 5000])
async def test_acknowledgements_are_sent_when_their_group_is_due_and_at_the_close(
    client: Client, broker: FakeBroker, /, group_ms: int
) -> None:
    await filled(client, 3, batching_enabled=False)
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, ack_group_ms=group_ms)
    done = broker.topic(FULL).subscriptions["s"].done
    await consumer.acknowledge(await consumer.receive(1000))
    await asyncio.sleep(group_ms / 1000 * 0.9 + 0.05 * (group_ms == 0))
    assert done == ({0} if group_ms == 0 else set())
    await asyncio.sleep(group_ms / 1000 * 0.1 + 0.05)
    assert done == {0}
    for _ in range(2):
        await consumer.acknowledge(await consumer.receive(1000))
    await consumer.close()
    assert done == {0, 1, 2}


@pytest.mark.parametrize("tick_ms", [100, 1000, 8000])
async def test_an_ack_timeout_ends_at_most_one_tick_late(client: Client, broker: FakeBroker, /, tick_ms: int) -> None:
    await filled(client, 1)
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, unacked_messages_timeout_ms=20_000, unacked_messages_tick_ms=tick_ms
    )
    await consumer.receive(1000)
    began = asyncio.get_running_loop().time()
    again = await consumer.receive(60_000)
    passed_s = asyncio.get_running_loop().time() - began
    assert again.redelivery_count() == 1
    assert 20 <= passed_s <= 20 + 2 * tick_ms / 1000 + 0.1
