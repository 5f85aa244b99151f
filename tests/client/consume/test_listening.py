"""Listeners over a broker in memory: each message is handled and settled, whatever its handler, the connection or the
program does."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed, InvalidConfiguration, Timeout
from magnetar.client.common.rate_limits import AsyncRateLimiter, BreakerState, CircuitBreaker
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.listening import SLOW_HANDLER_S
from magnetar.client.model.message import Message
from magnetar.client.model.settings import ConsumerDeadLetterPolicy, ConsumerType, InitialPosition
from magnetar.client.transactions.process import process
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

SHARED, EXCLUSIVE = ConsumerType.Shared, ConsumerType.Exclusive
TYPES = pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])


async def fill(client: Client, count: int, keys: int = 0, **options: Any) -> None:
    producer = await client.create_producer("t", batching_max_messages=7, **options)
    for number in range(count):
        await producer.send(b"%d" % number, partition_key=f"k{number % keys}" if keys else None)
    await producer.close()


async def subscribe(client: Client, kind: ConsumerType = SHARED, **options: Any) -> Consumer:
    options = {"negative_ack_redelivery_delay_ms": 1000, **options}
    return await client.subscribe("t", "s", kind, initial_position=InitialPosition.Earliest, **options)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - it is virtual time
        await asyncio.sleep(0.01)


def subscription_done(broker: FakeBroker) -> set[int]:
    return broker.topic("persistent://public/default/t").subscriptions["s"].done


async def nothing_is_left(consumer: Consumer, client: Client) -> None:
    """Every message is acknowledged at the broker."""
    await consumer.close()
    async with await subscribe(client, consumer.settings.consumer_type) as again:
        with pytest.raises(Timeout):
            await again.receive(5000)


@TYPES
async def test_every_message_is_handled_once_in_order_of_its_key_several_at_a_time(
    client: Client, broker: FakeBroker, /, kind: ConsumerType
) -> None:
    await fill(client, 200, keys=9)
    consumer = await subscribe(client, kind)
    seen: dict[str, list[int]] = defaultdict(list)
    running: Counter[str] = Counter()
    most = 0

    async def handle(message: Message) -> None:
        nonlocal most
        key = message.partition_key()
        running[key] += 1
        assert running[key] == 1, "one of a key at a time"
        most = max(most, running.total())
        await asyncio.sleep(0.05 * (1 + int(message.data()) % 3))
        seen[key].append(int(message.data()))
        running[key] -= 1

    listening = consumer.listen(handle, concurrency=5)
    await until(lambda: listening.statistics().handled == 200)
    assert most == 5
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert sorted(chain.from_iterable(seen.values())) == list(range(200))
    await nothing_is_left(consumer, client)
    assert listening.is_over


async def test_a_handler_that_hangs_delays_its_own_key_alone_and_is_a_warning_after_a_minute(
    client: Client, broker: FakeBroker, /, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(client, 90, keys=3)
    consumer, hangs = await subscribe(client), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.data() == b"0":
            await hangs.wait()

    listening = consumer.listen(handle)
    await until(lambda: listening.statistics().handled == 60)
    await asyncio.sleep(SLOW_HANDLER_S - 1)
    assert listening.statistics().slow == 0
    await asyncio.sleep(2)
    assert (listening.statistics().slow, listening.statistics().waiting) == (1, 29)
    await asyncio.sleep(10 * SLOW_HANDLER_S)
    (warning,) = [each.getMessage() for each in caplog.records if "has run for" in each.getMessage()]
    assert "29 messages wait" in warning
    hangs.set()
    await until(lambda: listening.statistics().handled == 90)
    await nothing_is_left(consumer, client)


async def test_order_none_and_partition_are_kept_as_they_say(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 20, keys=1)
    for order, expected in (("none", 8), ("partition", 1)):
        consumer = await client.subscribe("t", order, initial_position=InitialPosition.Earliest)
        running = most = 0

        async def handle(_: Message) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1

        listening = consumer.listen(handle, concurrency=8, order=order)
        await until(lambda listening=listening: listening.statistics().handled == 20)  # type: ignore[misc]
        assert most == expected
        await consumer.close()


@pytest.mark.parametrize(
    "raised", [ValueError("no"), asyncio.CancelledError(), SystemExit(3), BaseException("own")], ids=repr
)
async def test_whatever_a_handler_raises_its_message_comes_again_and_the_others_are_handled(
    client: Client, broker: FakeBroker, /, raised: BaseException
) -> None:
    await fill(client, 30)
    consumer = await subscribe(client)
    seen: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        seen[message.data()] += 1
        if message.data() == b"3" and seen[b"3"] < 3:
            raise raised

    listening = consumer.listen(handle)
    await until(lambda: seen[b"3"] == 3 and listening.statistics().handled == 30)
    assert listening.statistics().failed == 2
    assert {number: count for number, count in seen.items() if count > 1} == {b"3": 3}
    await nothing_is_left(consumer, client)


async def test_what_fails_too_often_becomes_a_dead_letter(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 10)
    consumer = await subscribe(client, dead_letter_policy=ConsumerDeadLetterPolicy(2, "letters"))

    async def handle(message: Message) -> None:
        if message.data() == b"4":
            raise ValueError

    listening = consumer.listen(handle)
    letters = await client.subscribe("letters", "look", initial_position=InitialPosition.Earliest)
    assert (await letters.receive(60_000)).data() == b"4"
    await until(lambda: listening.statistics().handled == 9)
    assert listening.statistics().failed == 3
    await nothing_is_left(consumer, client)


@TYPES
@pytest.mark.parametrize("seed", range(8))
def test_a_message_that_comes_again_while_its_handler_runs_is_not_handled_a_second_time(
    seed: int, kind: ConsumerType
) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await fill(client, 60, keys=4)
        consumer = await subscribe(client, kind, receiver_queue_size=20)
        running: set[bytes] = set()
        seen: dict[str, list[int]] = defaultdict(list)

        async def handle(message: Message) -> None:
            assert message.data() not in running, "its handler runs"
            running.add(message.data())
            await asyncio.sleep(3)
            running.discard(message.data())
            seen[message.partition_key()].append(int(message.data()))

        listening = consumer.listen(handle, concurrency=3)
        for _ in range(6):
            await asyncio.sleep(2.5)
            broker.cut()
        await until(lambda: len(subscription_done(broker)) == 60)
        assert listening.statistics().repeated >= 3
        assert set(chain.from_iterable(seen.values())) == set(range(60))
        for numbers in seen.values():
            first = list(dict.fromkeys(numbers))
            assert first == sorted(first), "each key in order, but for what comes again"
        await nothing_is_left(consumer, client)

    simulate(body, seed=seed)


async def test_a_slow_handler_asks_for_no_more_than_the_receiver_queue(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 200)
    consumer, go = await subscribe(client, receiver_queue_size=10), asyncio.Event()

    async def handle(_: Message) -> None:
        await go.wait()

    listening = consumer.listen(handle, concurrency=4, order="none")
    await asyncio.sleep(60)
    held = broker.topic("persistent://public/default/t").subscriptions["s"].consumers[0]
    assert listening.statistics().running == 4
    assert len(held.unacked) <= 4 + 10
    go.set()
    await until(lambda: listening.statistics().handled == 200)
    consumer.check()
    await nothing_is_left(consumer, client)


async def test_a_stop_waits_for_what_runs_and_leaves_the_rest_in_order_to_who_receives(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 50, keys=5)
    consumer = await subscribe(client)
    done: list[bytes] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(5)
        done.append(message.data())

    async with consumer.listen(handle, concurrency=2) as listening:
        await asyncio.sleep(1)
    assert done == [b"0", b"1"]
    assert not consumer.has_listener
    assert listening.is_over
    rest = [(await consumer.receive(1000)).data() for _ in range(48)]
    assert rest == [b"%d" % number for number in range(2, 50)]
    consumer.check()


async def test_a_handler_that_does_not_end_in_time_is_cancelled_and_its_message_comes_again(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 1)
    consumer = await subscribe(client)
    ended: list[str] = []

    async def handle(_: Message) -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    listening = consumer.listen(handle)
    await until(lambda: listening.statistics().running == 1)
    began = asyncio.get_running_loop().time()
    await listening.stop(timeout=3)
    assert 3 <= asyncio.get_running_loop().time() - began < 4
    assert ended == ["cancelled"]
    await listening.wait()
    assert (await consumer.receive(60_000)).data() == b"0"


async def test_a_consumer_that_is_closed_lets_its_handlers_end_and_acknowledge(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 20)
    consumer = await subscribe(client)

    async def handle(_: Message) -> None:
        await asyncio.sleep(2)

    listening = consumer.listen(handle, concurrency=4)
    await asyncio.sleep(1)
    await consumer.close()
    await listening.wait()
    assert listening.statistics().handled == 4
    async with await subscribe(client) as again:
        assert [(await again.receive(1000)).data() for _ in range(16)] == [b"%d" % number for number in range(4, 20)]


async def test_a_close_that_is_cancelled_ends_the_handlers(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 3)
    consumer = await subscribe(client)
    cancelled = 0

    async def handle(_: Message) -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(1e6)
        finally:
            cancelled += 1

    listening = consumer.listen(handle)
    await until(lambda: listening.statistics().running == 3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await consumer.close()
    await listening.wait()
    await until(lambda: cancelled == 3)


async def test_the_end_of_the_consumer_ends_its_listener_with_the_reason(client: Client, broker: FakeBroker, /) -> None:
    from magnetar.proto.errors import NotAllowed

    await fill(client, 3)
    consumer = await subscribe(client)
    listening = consumer.listen(lambda _: None)
    await until(lambda: listening.statistics().handled == 3)
    broker.refuse = [NotAllowed("no more")]
    broker.cut()
    with pytest.raises(Exception, match="no more"):
        await listening.wait()
    with pytest.raises(AlreadyClosed):
        await (await closed(client)).wait()


async def closed(client: Client) -> Any:
    """A consumer that was closed: its listener ends at once."""
    consumer = await client.subscribe("t", "other")
    await consumer.close()
    listening = consumer.listen(lambda _: None)
    await listening.wait()
    raise AlreadyClosed("it ended without an error")


async def test_one_consumer_has_one_listener_and_no_process_beside_it(client: Client, broker: FakeBroker, /) -> None:
    consumer, producer = await subscribe(client), await client.create_producer("out")
    listening = consumer.listen(lambda _: None)
    with pytest.raises(InvalidConfiguration, match="has a listener"):
        consumer.listen(lambda _: None)
    with pytest.raises(InvalidConfiguration, match="has a listener"):
        await process(consumer, producer, lambda message: message.data())
    await listening.stop()
    await consumer.listen(lambda _: None).stop()


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0}, {"order": "keys"}, {"threads": 0}, {"rate": 0}, {"rate": "many"}, {"breaker": 3},
        {"stop_timeout": -1}, {"acknowledge": 1}, {"threads": 3},
    ],
    ids=str,
)  # fmt: skip
async def test_a_wrong_option_is_refused_before_anything_begins(
    client: Client, broker: FakeBroker, /, options: dict[str, Any]
) -> None:
    consumer = await subscribe(client)

    async def handle(_: Message) -> None: ...

    with pytest.raises(InvalidConfiguration):
        consumer.listen(handle, **options)
    assert not consumer.has_listener


async def test_a_plain_function_runs_in_so_many_threads_and_what_it_raises_is_a_failure(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 40)
    consumer = await subscribe(client)
    seen: Counter[bytes] = Counter()

    def handle(message: Message) -> None:
        seen[message.data()] += 1
        if message.data() == b"7" and seen[b"7"] == 1:
            raise SystemExit(1)

    listening = consumer.listen(handle, threads=3)
    await until(lambda: listening.statistics().handled == 40)
    assert seen.total() == 41
    assert len(listening._idle) <= 3
    await nothing_is_left(consumer, client)


async def test_a_function_that_acknowledges_by_itself_is_left_to_it(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 4)
    consumer = await subscribe(client)

    async def handle(message: Message) -> None:
        if message.data() != b"2":
            await consumer.acknowledge(message)

    listening = consumer.listen(handle, acknowledge=False)
    await until(lambda: listening.statistics().handled == 4)
    await consumer.close()
    async with await subscribe(client) as again:
        assert (await again.receive(1000)).data() == b"2"
        with pytest.raises(Timeout):
            await again.receive(1000)


async def test_a_rate_holds_and_may_be_changed_while_the_listener_runs(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 100)
    consumer, loop = await subscribe(client), asyncio.get_running_loop()
    limiter = AsyncRateLimiter(5, leaky=True, clock=loop.time)
    at: list[float] = []

    async def handle(_: Message) -> None:
        at.append(loop.time())

    began = loop.time()
    consumer.listen(handle, rate=limiter)
    await asyncio.sleep(10.05)
    assert 50 <= len(at) <= 51
    limiter.rate = 50
    await until(lambda: len(at) == 100)
    assert loop.time() - began < 10.05 + 0.6 + 1.1
    await nothing_is_left(consumer, client)


async def test_an_open_breaker_begins_no_message_gives_none_back_and_asks_for_no_more(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 100)
    consumer, loop = await subscribe(client, receiver_queue_size=10), asyncio.get_running_loop()
    breaker = CircuitBreaker(failures=3, pause=60, counts=ConnectionError, clock=loop.time)
    calls, is_down = list[float](), True

    async def handle(_: Message) -> None:
        calls.append(loop.time())
        if is_down:
            raise ConnectionError("the vendor is away")

    listening = consumer.listen(handle, concurrency=1, breaker=breaker)
    await until(lambda: breaker.current_state is BreakerState.OPEN)
    await asyncio.sleep(55)
    held = broker.topic("persistent://public/default/t").subscriptions["s"].consumers[0]
    assert len(calls) == 3
    assert len(held.unacked) <= 10 + 3
    await until(lambda: len(calls) == 4)
    assert breaker.current_state is BreakerState.OPEN, "the trial failed"
    is_down = False
    await until(lambda: listening.statistics().handled == 100)
    assert (listening.statistics().failed, breaker.opened) == (4, 2)
    await nothing_is_left(consumer, client)


# ------------------------------------------------------------------------------------------------------- batches
@TYPES
async def test_batches_end_by_number_and_by_time_and_keep_the_order(
    client: Client, broker: FakeBroker, /, kind: ConsumerType
) -> None:
    await fill(client, 25)
    consumer = await subscribe(client, kind)
    batches: list[list[int]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append([int(each.data()) for each in messages])

    listening = consumer.listen_batch(handle, max=10, wait=2.0)
    await until(lambda: listening.statistics().handled == 25)
    assert [len(each) for each in batches] == [10, 10, 5]
    assert list(chain.from_iterable(batches)) == list(range(25))
    await nothing_is_left(consumer, client)


async def test_of_a_batch_those_with_a_failed_result_come_again_and_all_if_the_handler_raises(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 10)
    consumer = await subscribe(client)
    batches: list[list[int]] = []

    async def handle(messages: list[Message]) -> Any:
        batches.append([int(each.data()) for each in messages])
        if len(batches) == 1:
            raise ValueError("all of them")
        if len(batches) == 2:
            return [ValueError() if number == 3 else number != 5 for number in batches[-1]]
        return None

    listening = consumer.listen_batch(handle, max=100, wait=0.5)
    await until(lambda: listening.statistics().handled == 10)
    assert [sorted(each) for each in batches] == [list(range(10)), list(range(10)), [3, 5]]
    assert listening.statistics().failed == 12
    await nothing_is_left(consumer, client)


@pytest.mark.parametrize("found", [[True], 7, "ok"], ids=repr)
async def test_results_that_fit_no_batch_are_a_failure_of_all(
    client: Client, broker: FakeBroker, /, found: object
) -> None:
    await fill(client, 3)
    consumer, calls = await subscribe(client), 0

    async def handle(_: list[Message]) -> object:
        nonlocal calls
        calls += 1
        return found if calls == 1 else None

    listening = consumer.listen_batch(handle, wait=0.1)
    await until(lambda: listening.statistics().handled == 3)
    assert listening.statistics().failed == 3
    await nothing_is_left(consumer, client)


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_whose_messages_come_again_while_its_handler_runs_is_not_handled_twice(seed: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await fill(client, 40)
        consumer = await subscribe(client, receiver_queue_size=10)
        running: Counter[bytes] = Counter()

        async def handle(messages: list[Message]) -> None:
            running.update(each.data() for each in messages)
            assert max(running.values()) == 1
            await asyncio.sleep(3)
            running.subtract(each.data() for each in messages)

        listening = consumer.listen_batch(handle, max=8, wait=0.1, concurrency=2)
        for _ in range(4):
            await asyncio.sleep(2.5)
            broker.cut()
        await until(lambda: len(subscription_done(broker)) == 40)
        assert listening.statistics().repeated > 0
        await nothing_is_left(consumer, client)

    simulate(body, seed=seed)


async def test_a_damaged_message_is_said_and_the_listener_goes_on(
    client: Client, broker: FakeBroker, /, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = await subscribe(client)
    producer = await client.create_producer("t")
    seen: list[bytes] = []
    consumer.listen(lambda message: seen.append(message.data()))
    await producer.send(b"a")
    topic = broker.topic("persistent://public/default/t")
    broken = bytearray(topic.entries[0])
    broken[-1] ^= 1
    topic.entries.append(bytes(broken))
    topic.headers.append(topic.headers[0])
    await producer.send(b"b")
    await until(lambda: seen == [b"a", b"b"])
    assert "was not given to its listener" in caplog.text


async def test_what_came_with_a_damaged_message_and_before_it_is_handled(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 3)
    entries = broker.topic("persistent://public/default/t").entries
    entries[2] = entries[2][:-1] + bytes([entries[2][-1] ^ 1])
    consumer = await subscribe(client)
    await until(lambda: len(consumer.inbox) == 3)
    listening = consumer.listen(lambda _: None)
    await until(lambda: listening.statistics().handled == 2)


async def test_an_ack_timeout_that_is_shorter_than_the_work_does_it_once(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 4)
    consumer = await subscribe(client, unacked_messages_timeout_ms=10_000)
    calls: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        calls[message.data()] += 1
        await asyncio.sleep(35)

    listening = consumer.listen(handle)
    await until(lambda: listening.statistics().handled == 4)
    assert calls == dict.fromkeys((b"0", b"1", b"2", b"3"), 1)
    assert listening.statistics().repeated >= 4
    await nothing_is_left(consumer, client)


async def test_a_receipt_that_does_not_come_gives_no_handled_message_back(
    client: Client, broker: FakeBroker, /, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(client, 1)
    consumer, seen = await subscribe(client, ack_receipt_enabled=True), list[bytes]()

    async def handle(message: Message) -> None:
        seen.append(message.data())
        broker.ignores = {"ack"}

    listening = consumer.listen(handle)
    await asyncio.sleep(60)  # longer than an operation, and than the delay of a negative acknowledgement
    broker.ignores = set()
    assert "1 messages were handled and may come again: no answer within" in caplog.text
    assert seen == [b"0"]
    assert (listening.statistics().handled, listening.statistics().failed) == (1, 0)
    assert consumer.statistics()["negative_acknowledgements"] == 0
