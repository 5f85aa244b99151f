"""A consumer's or producer's close that is cancelled, wherever it waits: all parts of it are closed all the same."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from datetime import timedelta
from typing import Any

import pytest

from magnetar.client.client import CLOSE_SILENCE_MAX_S, Client
from magnetar.client.common.errors import AlreadyClosed, InvalidConfiguration, Result, Timeout
from magnetar.client.consume.consumer import Consumer
from magnetar.client.core.effects import PartitionClientState
from magnetar.client.model.settings import ConsumerType
from magnetar.client.produce.producer import Producer
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import Unavailable
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

TOPICS = ["one", "two"]


@types.coroutine
def cancelled_at(wait: int, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, bool]:
    """Cancels itself where `work` waits for the so-manieth time; False: it did not wait so often."""
    waits, step = 0, lambda: work.send(None)
    while True:
        try:
            future = step()
        except StopIteration:
            return False
        waits += 1
        if waits == wait:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield future
        except BaseException as error:
            step = lambda error=error: work.throw(error)
        else:
            step = lambda: work.send(None)


async def busy_consumer(client: Client, name: str) -> Consumer:
    """Of two topics and their retries, with a producer of retries, and a dead letter that is never stored."""
    producer = await client.create_producer(f"{name}-one")
    consumer: Consumer = await client.subscribe(
        [f"{name}-{topic}" for topic in TOPICS], "s", ConsumerType.Shared, enable_retry=True,
    )  # fmt: skip
    await producer.send(b"x")
    await producer.send(b"y")
    await consumer.reconsume_later(await consumer.receive(), timedelta(hours=1))
    message = await consumer.receive()
    dead_letters = consumer._dead_letters.producer_of(message.entry.consumer.topic)
    assert dead_letters is not None

    async def never(_message: object) -> None:
        await asyncio.Event().wait()

    dead_letters.move_message = never  # type: ignore[method-assign]
    dead_letters.start_moving_messages([message])
    await consumer.acknowledge(message)
    await producer.close()
    return consumer


def assert_all_is_closed(consumer: Consumer, broker: FakeBroker, name: str) -> None:
    every = consumer._dead_letters._by_topic.values()
    producers = [each for one in every for each in one._producers.values()]
    assert len(consumer.partitions) == 4
    assert len(producers) > 0
    for each in [*consumer.partitions, *(each for producer in producers for each in producer.partitions)]:
        assert each.core.state is PartitionClientState.CLOSED
        assert each._attachment._stream is None
        assert not len(each._attachment._tasks)
    for topic, found in broker.topics.items():
        if name in topic:
            assert not any(each.consumers for each in found.subscriptions.values())
    assert not any(len(one._tasks) for one in every)


async def _tried(client: Client, broker: FakeBroker, wait: int) -> bool:
    name = f"w{wait}"
    consumer = await busy_consumer(client, name)
    closing = asyncio.ensure_future(_closed(consumer, wait))
    await asyncio.wait([closing])
    await asyncio.sleep(1.0)
    assert_all_is_closed(consumer, broker, name)
    return closing.cancelled()


async def _closed(consumer: Consumer, wait: int) -> None:
    await cancelled_at(wait, consumer.close())


@pytest.mark.run_by(simulate, operation_timeout_seconds=3)
async def test_a_consumers_close_that_is_cancelled_where_it_waits_closes_all_of_it(
    client: Client, broker: FakeBroker, /
) -> None:
    wait = 1
    while await _tried(client, broker, wait):
        wait += 1
    assert wait == 3, "dead letters, then the partitions"


@pytest.mark.run_by(simulate, operation_timeout_seconds=3)
async def test_a_consumers_close_that_is_cancelled_while_its_parts_leave_closes_all_of_it(
    client: Client, broker: FakeBroker, /
) -> None:
    for number in range(40):
        name = f"t{number}"
        consumer = await busy_consumer(client, name)
        closing = asyncio.ensure_future(consumer.close())
        await asyncio.sleep(0.0001 * (number % 20) + (3.0 if number >= 20 else 0.0))
        closing.cancel()
        await asyncio.wait([closing])
        await asyncio.sleep(1.0)
        assert_all_is_closed(consumer, broker, name)


@pytest.mark.run_by(simulate, operation_timeout_seconds=3)
async def test_a_dead_letter_that_hangs_holds_a_close_up_no_longer_than_an_operation_may_take(
    client: Client, broker: FakeBroker, /
) -> None:
    consumer = await busy_consumer(client, "t")
    begun = asyncio.get_running_loop().time()
    await consumer.close()
    assert 3.0 <= asyncio.get_running_loop().time() - begun < 4.0
    assert_all_is_closed(consumer, broker, "t")


async def test_a_producers_close_that_is_cancelled_closes_all_of_it(client: Client, broker: FakeBroker, /) -> None:
    for number in range(20):
        producer: Producer = await client.create_producer(f"t{number}")
        sending = asyncio.ensure_future(producer.send(b"x"))
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0.0001 * number)
        closing.cancel()
        await asyncio.wait([closing, sending])
        for each in producer.partitions:
            assert each.core.state is PartitionClientState.CLOSED
            assert each._attachment._stream is None
        assert sending.done()
        sending.exception()


async def test_two_closes_of_a_consumer_at_once_wait_for_one_answer(client: Client, broker: FakeBroker, /) -> None:
    """A dropped consumer is closed by the collector, while its client is closed."""
    consumer = await client.subscribe("t", "s")
    begin = asyncio.get_running_loop().time()
    await asyncio.gather(consumer.close(), consumer.close())
    assert asyncio.get_running_loop().time() - begin < client.settings.operation_timeout_s / 2


async def test_a_close_that_is_cancelled_ends_the_other_one(client: Client, broker: FakeBroker, /) -> None:
    consumer = await client.subscribe("t", "s")
    first, second = (asyncio.ensure_future(consumer.close()) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    begin = asyncio.get_running_loop().time()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.exception() is None
    assert asyncio.get_running_loop().time() - begin < client.settings.operation_timeout_s / 2


# ------------------------------------------------------------------------------------------ how long a close takes
def took_s(close: Callable[[Client, FakeBroker], Coroutine[Any, Any, None]], gone: str, **options: Any) -> float:
    """Virtual seconds of `close` of a client that has a producer with a message under way, whose send was cancelled."""
    took: list[float] = []

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("one")
        consumer = await client.subscribe("two", "s")
        await producer.send(b"x")
        broker.silent = True
        sending = asyncio.ensure_future(producer.send(b"y"))
        await asyncio.sleep(0.1)
        sending.cancel()
        if gone == "unreachable":
            broker.refuse = [Unavailable("not now")] * 1000
            broker.give_up(Unavailable("not now"))
        await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await close(client, broker)
        finally:
            took.append(loop.time() - begun)
            assert producer.is_over
            assert consumer.is_over
            with pytest.raises(AlreadyClosed):
                await producer.send(b"z")

    simulate(body, **options)
    return took[0]


@pytest.mark.parametrize("gone", ["silent", "unreachable"])
@pytest.mark.parametrize(("timeout", "at_most"), [(0.5, 0.6), (2, 2.1), (20, 20.1)])
def test_a_close_ends_at_its_time_out_and_says_what_has_no_outcome(gone: str, timeout: float, at_most: float) -> None:
    async def close(client: Client, broker: FakeBroker) -> None:
        with pytest.raises(Timeout, match=r"1 messages have no outcome|under way"):
            await client.close(timeout=timeout)

    assert took_s(close, gone) <= at_most


@pytest.mark.parametrize("gone", ["silent"])
def test_without_a_time_out_a_close_waits_some_seconds_for_a_word_of_its_brokers(gone: str) -> None:
    async def close(client: Client, broker: FakeBroker) -> None:
        with pytest.raises(Timeout):
            await client.close()

    assert CLOSE_SILENCE_MAX_S - 0.1 <= took_s(close, gone) <= CLOSE_SILENCE_MAX_S + 1.1


def test_a_close_waits_on_while_its_brokers_answer() -> None:
    """A flush that takes longer than CLOSE_SILENCE_MAX_S ends in order."""
    async def body(client: Client, broker: FakeBroker) -> None:
        told: list[Result] = []
        producer = await client.create_producer("one", batching_enabled=False)
        broker.silent = True
        for number in range(10):
            producer.send_nowait(b"%d" % number, lambda result, _: told.append(result))
        await asyncio.sleep(0.1)
        [say] = broker.says
        closing = asyncio.ensure_future(client.close())
        for number in range(10):
            await asyncio.sleep(2)
            say(receipt=wire.Receipt(sequence_id=number, ledger_id=7, entry_id=number, index=number))
        broker.silent = False
        await closing
        assert told == [Result.Ok] * 10

    simulate(body, Saying())


class Saying(FakeBroker):
    """`says`: how each producer is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.says: list[Callable[..., None]] = []

    def _open(self, stream: Any, frame: Any, owners: Any) -> None:
        super()._open(stream, frame, owners)
        self.says.append(owners[frame.id].say)


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan")])
async def test_a_time_out_that_is_none_is_refused_and_nothing_is_closed(
    client: Client, broker: FakeBroker, /, timeout: Any
) -> None:
    producer = await client.create_producer("one")
    with pytest.raises(InvalidConfiguration):
        await client.close(timeout=timeout)
    await producer.send(b"x")
