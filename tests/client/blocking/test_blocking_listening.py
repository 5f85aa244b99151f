"""Listeners of blocking programs and of asyncio against a real broker: threads, Key_Shared, partitions, chunks,
transactions, and the end of a program's consumer."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

import magnetar
from magnetar import ConsumerType, InitialPosition
from magnetar.client import client as aio
from magnetar.client.blocking.client import Client

EARLIEST = InitialPosition.Earliest
LIMIT_S = 60


class Seen:
    """What handlers were given, from any thread; `wait` until so many."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.by_key: dict[str, list[int]] = defaultdict(list)
        self.threads: set[int] = set()

    def add(self, message: Any) -> None:
        with self._changed:
            self.threads.add(threading.get_ident())
            self.by_key[message.partition_key()].append(int(message.data()[:9]))
            self._changed.notify_all()

    @property
    def numbers(self) -> list[int]:
        return list(chain.from_iterable(self.by_key.values()))

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(set(self.numbers)) >= count, LIMIT_S), sorted(self.numbers)


def send(client: Client, topic: str, count: int, keys: int, **options: Any) -> None:
    producer = client.create_producer(topic, block_if_queue_full=True, **options)
    for number in range(count):
        producer.send_async(b"%09d" % number, None, partition_key=f"k{number % keys}")
    producer.flush()


def nothing_is_left(client: Client, topic: str, kind: ConsumerType) -> None:
    with client.subscribe(topic, "s", kind) as again, pytest.raises(magnetar.Timeout):
        again.receive(500)


@pytest.mark.parametrize("kind", list(ConsumerType), ids=lambda kind: kind.name)
def test_threads_handle_each_message_once_and_each_key_in_order_on_every_type(url: str, kind: ConsumerType) -> None:
    topic, seen = f"threads-{kind.name}", Seen()
    with Client(url) as client:
        consumer = client.subscribe(topic, "s", kind, initial_position=EARLIEST)
        with consumer.listen(seen.add, threads=4) as listening:
            send(client, topic, 500, keys=11)
            seen.wait(500)
        assert listening.is_over
        assert listening.statistics().handled == 500
        assert all(numbers == sorted(numbers) for numbers in seen.by_key.values())
        assert sorted(seen.numbers) == list(range(500))
        assert 1 <= len(seen.threads) <= 4
        assert threading.get_ident() not in seen.threads
        consumer.close()
        nothing_is_left(client, topic, kind)


def test_a_handler_may_send_and_acknowledge_in_a_transaction(url: str) -> None:
    with Client(url) as client:
        consumer = client.subscribe("txn-in", "s", ConsumerType.Shared, initial_position=EARLIEST)
        out = client.subscribe("txn-out", "s", initial_position=EARLIEST)
        producer = client.create_producer("txn-out")

        def handle(message: Any) -> None:
            with client.transaction() as txn:
                producer.send(message.data().upper(), txn=txn)
                consumer.acknowledge(message, txn=txn)

        with consumer.listen(handle, threads=3, acknowledge=False):
            source = client.create_producer("txn-in")
            for number in range(20):
                source.send(b"a%02d" % number)
            assert sorted(out.receive(30_000).data() for _ in range(20)) == [b"A%02d" % number for number in range(20)]
        consumer.close()
        nothing_is_left(client, "txn-in", ConsumerType.Shared)


def test_a_batch_listener_gives_lists_and_what_fails_comes_again(url: str) -> None:
    seen, failed, done = Counter[int](), set[int](), threading.Event()

    def handle(messages: list[Any]) -> list[bool]:
        numbers = [int(each.data()) for each in messages]
        seen.update(numbers)
        results = [number % 10 != 3 or number in failed for number in numbers]
        failed.update(number for number in numbers if number % 10 == 3)
        if len(seen) == 100 and all(seen[number] == 2 for number in failed):
            done.set()
        return results

    with Client(url) as client:
        consumer = client.subscribe(
            "batches", "s", ConsumerType.Shared, initial_position=EARLIEST, negative_ack_redelivery_delay_ms=100
        )
        send(client, "batches", 100, keys=5, batching_enabled=True)
        with consumer.listen_batch(handle, max=30, wait=0.05):
            assert done.wait(LIMIT_S)
        consumer.close()
        nothing_is_left(client, "batches", ConsumerType.Shared)
    assert {number for number, count in seen.items() if count == 2} == failed == set(range(3, 100, 10))


def test_a_thread_that_does_not_end_in_time_delays_the_stop_so_long_and_its_outcome_counts(url: str) -> None:
    began, go = threading.Event(), threading.Event()

    def handle(_: Any) -> None:
        began.set()
        assert go.wait(LIMIT_S)

    with Client(url) as client:
        consumer = client.subscribe("hangs", "s", ConsumerType.Shared, initial_position=EARLIEST)
        listening = consumer.listen(handle)
        client.create_producer("hangs").send(b"1")
        assert began.wait(LIMIT_S)
        listening.stop(timeout=0.05)
        assert not listening.is_over
        with pytest.raises(magnetar.InvalidConfiguration, match="has a listener"):
            consumer.listen(handle)
        go.set()
        listening.wait()
        assert listening.statistics().handled == 1
        consumer.close()
        nothing_is_left(client, "hangs", ConsumerType.Shared)


def test_coroutine_functions_and_a_second_listener_are_refused(url: str) -> None:
    async def handle(_: Any) -> None: ...

    with Client(url) as client:
        consumer = client.subscribe("refused", "s")
        with pytest.raises(magnetar.InvalidConfiguration, match=r"magnetar\.asyncio"):
            consumer.listen(handle)
        other = client.subscribe("refused", "other", message_listener=lambda _consumer, _message: None)
        with pytest.raises(magnetar.InvalidConfiguration, match="message_listener"):
            other.listen(lambda _: None)


def test_the_end_of_the_client_ends_its_listeners(url: str) -> None:
    seen = Seen()
    with Client(url) as client:
        listening = client.subscribe("ends", "s", initial_position=EARLIEST).listen(seen.add)
        send(client, "ends", 10, keys=2)
        seen.wait(10)
    listening.wait()
    assert listening.is_over


# ------------------------------------------------------------------------------------------------------- asyncio
async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the broker is on real sockets
            await asyncio.sleep(0.01)


async def asend(client: aio.Client, topic: str, numbers: range, keys: int, **options: Any) -> None:
    async with await client.create_producer(topic, **options) as producer:
        for number in numbers:
            await producer.send(b"%09d" % number, partition_key=f"k{number % keys}")


async def test_consumers_of_key_shared_that_come_and_go_keep_each_key_in_order_while_handlers_run(url: str) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    running: Counter[str] = Counter()

    async def handle(message: Any) -> None:
        key = message.partition_key()
        running[key] += 1
        assert running[key] == 1, "a key is at one consumer, and there at one handler"
        await asyncio.sleep(0.002)
        seen[key].append(int(message.data()))
        running[key] -= 1

    async with aio.Client(url) as client:
        consumers = []
        for place in range(4):
            consumer = await client.subscribe(
                "moving", "s", ConsumerType.KeyShared, initial_position=EARLIEST, receiver_queue_size=10
            )
            consumer.listen(handle, concurrency=6)
            consumers.append(consumer)
            await asend(client, "moving", range(place * 60, place * 60 + 60), keys=13, batching_enabled=False)
        for consumer in consumers[:3]:
            await consumer.close()
        await until(lambda: len(set(chain.from_iterable(seen.values()))) == 240)
        for numbers in seen.values():
            first = list(dict.fromkeys(numbers))
            assert first == sorted(first)
        await consumers[3].close()


async def test_partitions_chunks_and_dead_letters_go_through_a_listener(url: str) -> None:
    async with magnetar.asyncio.Client(url) as client, magnetar.admin.AdminClient(url) as admin:
        await admin.create_topic("parts", partitions=3)
        policy = magnetar.ConsumerDeadLetterPolicy(1, "parts-letters", "look")
        consumer = await client.subscribe(
            "parts", "s", ConsumerType.Shared, initial_position=EARLIEST, dead_letter_policy=policy,
            negative_ack_redelivery_delay_ms=50,
        )  # fmt: skip
        sizes: list[int] = []

        async def handle(message: Any) -> None:
            if message.data() == b"bad":
                raise ValueError("a letter")
            sizes.append(len(message.data()))

        listening = consumer.listen(handle, order="partition")
        producer = await client.create_producer("parts", chunking_enabled=True, batching_enabled=False)
        for size in (10, 9_000_000, 20, 6_000_000, 30):
            await producer.send(b"x" * size)
        await producer.send(b"bad")
        letters = await client.subscribe("parts-letters", "look", initial_position=EARLIEST)
        assert (await letters.receive(30_000)).data() == b"bad"
        await until(lambda: listening.statistics().handled == 5)
        assert sorted(sizes) == [10, 20, 30, 6_000_000, 9_000_000]
        assert listening.statistics().failed == 2


async def test_redelivery_in_order_of_the_key_holds_what_waits_for_a_handler_too(url: str) -> None:
    """Messages that the listener has sorted are dropped with the receiver queue, and come after the failed one."""
    seen: dict[str, list[int]] = defaultdict(list)
    failed = 0

    async def handle(message: Any) -> None:
        nonlocal failed
        if message.data() == b"%09d" % 2 and failed < 2:
            failed += 1
            raise ValueError("again")
        seen[message.partition_key()].append(int(message.data()))

    async with aio.Client(url) as client:
        consumer = await client.subscribe(
            "ordered", "s", ConsumerType.KeyShared, initial_position=EARLIEST, redelivery_order="key"
        )
        await asend(client, "ordered", range(40), keys=2, batching_enabled=False)
        consumer.listen(handle)
        await until(lambda: sum(map(len, seen.values())) >= 40)
        assert seen == {"k0": list(range(0, 40, 2)), "k1": list(range(1, 40, 2))}
