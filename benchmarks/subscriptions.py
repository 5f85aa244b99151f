"""shared, key-shared, fan-out, stuck-key: subscriptions with several consumers, against a server process.

A backlog is stored first; then the consumers are connected and acknowledge each message that they receive. They are
in one process beside the server, a thread each, or as many processes.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

from .harness import Options, Run, measured, server
from .messaging import TOPIC, Sending, payloads

CONSUMERS = 4
KEYS = 10_000
STUCK_MESSAGES = 1_000_000
SUBSCRIPTIONS = 100


def shared(options: Options) -> Run:
    """Messages per second that CONSUMERS consumers of one Shared subscription acknowledge, one by one."""
    import magnetar

    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        kind = magnetar.ConsumerType.Shared
        client.subscribe(TOPIC, "bench", kind, initial_position=magnetar.InitialPosition.Earliest).close()
        producer = client.create_producer(
            TOPIC, batching_enabled=True, block_if_queue_full=True, max_pending_messages=20_000
        )
        Sending(producer, payloads(options.size, options.seed)).run(messages=options.messages)
        return _drained(client, running.pid, kind, options.messages)


def key_shared(options: Options) -> Run:
    """The same of a Key_Shared subscription with KEYS keys; every key's messages have to come in order."""
    import magnetar

    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        kind = magnetar.ConsumerType.KeyShared
        client.subscribe(TOPIC, "bench", kind, initial_position=magnetar.InitialPosition.Earliest).close()
        rng = random.Random(options.seed)
        _send_keyed(client, options, [f"key-{rng.randrange(KEYS)}" for _ in range(options.messages)])
        return _drained(client, running.pid, kind, options.messages)


def _send_keyed(client: Any, options: Options, keys: list[str]) -> None:
    """One message per entry: what a producer of many keys makes, whether it batches by key or not."""
    contents = payloads(options.size, options.seed)
    producer = client.create_producer(
        TOPIC, batching_enabled=False, block_if_queue_full=True, max_pending_messages=20_000
    )
    for number, key in enumerate(keys):
        producer.send_async(contents[number % len(contents)], None, partition_key=key)
    producer.flush()
    producer.close()


class Draining(threading.Thread):
    """One consumer: receives and acknowledges until the shared count is reached."""

    def __init__(self, consumer: Any, drained: Drained) -> None:
        super().__init__(daemon=True)
        self.consumer, self.drained, self.count = consumer, drained, 0
        self.disordered = 0
        self._last: dict[str, Any] = {}

    def run(self) -> None:
        import magnetar

        receive, acknowledge, drained = self.consumer.receive, self.consumer.acknowledge, self.drained
        last = self._last
        while not drained.done.is_set():
            try:
                message = receive(200)
            except magnetar.Timeout:
                continue
            acknowledge(message)
            self.count += 1
            key = message.partition_key()
            if key:
                index = message.index()
                self.disordered += index < last.get(key, -1)
                last[key] = index
            if self.count % 64 == 0:
                drained.look()


class Drained:
    def __init__(self, client: Any, kind: Any, messages: int, subscription: str = "bench", **options: Any) -> None:
        self.done = threading.Event()
        self.messages = messages
        self.workers = [
            Draining(client.subscribe(TOPIC, subscription, kind, consumer_name=f"c{number}", **options), self)
            for number in range(CONSUMERS)
        ]

    @property
    def count(self) -> int:
        return sum(worker.count for worker in self.workers)

    def look(self) -> None:
        if self.count >= self.messages - 64 * CONSUMERS:
            self.done.set()

    def run(self) -> float:
        """Messages per second."""
        begin = time.perf_counter()
        for worker in self.workers:
            worker.start()
        self.done.wait(120)
        for worker in self.workers:
            worker.join()
        return self.count / (time.perf_counter() - begin)


def _drained(client: Any, pid: int, kind: Any, messages: int) -> Run:
    run = Run(0.0)
    with measured(run, server=pid):
        drained = Drained(client, kind, messages)
        run.value = drained.run()
    run.detail = {
        "messages": drained.count,
        "each": [worker.count for worker in drained.workers],
        "out_of_order": sum(worker.disordered for worker in drained.workers),
    }
    return run


# ---------------------------------------------------------------------------------------------- fan-out
def fan_out(options: Options) -> Run:
    """The server's CPU per byte that SUBSCRIPTIONS subscriptions get, over that of one subscription; all catch up."""
    messages = min(options.messages, 20_000)
    run = Run(0.0)
    with server(options.bookies) as running:
        each = {}
        for count in (1, SUBSCRIPTIONS):
            cpu_s, taken_s = asyncio.run(_fan_out(running, count, messages * SUBSCRIPTIONS // count, options, run))
            each[count] = cpu_s / (messages * SUBSCRIPTIONS * options.size) * 1e9
            run.detail[f"{count}: s"] = taken_s
            run.detail[f"{count}: CPU ns per byte"] = each[count]
    run.value = each[SUBSCRIPTIONS] / each[1]
    return run


async def _fan_out(running: Any, count: int, messages: int, options: Options, run: Run) -> tuple[float, float]:
    import magnetar
    from magnetar.asyncio import Client

    topic = f"{TOPIC}-{count}"
    contents = payloads(options.size, options.seed)
    async with Client(running.url) as client:
        for number in range(count):
            earliest = magnetar.InitialPosition.Earliest
            await (await client.subscribe(topic, f"s{number}", initial_position=earliest)).close()
        producer = await client.create_producer(topic, block_if_queue_full=True, max_pending_messages=20_000)
        for first in range(0, messages, 1000):
            await asyncio.gather(*(producer.send(contents[at % 256]) for at in range(first, first + 1000)))
        await producer.close()
        with measured(run, server=running.pid):
            begin = time.perf_counter()
            await asyncio.gather(*(_read_all(client, topic, f"s{number}", messages) for number in range(count)))
            taken_s = time.perf_counter() - begin
    return run.processes["server"]["cpu_s"], taken_s


async def _read_all(client: Any, topic: str, subscription: str, messages: int) -> None:
    consumer = await client.subscribe(topic, subscription)
    for number in range(messages):
        message = await consumer.receive(60_000)
        if number % 1000 == 999:
            await consumer.acknowledge_cumulative(message)
            await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------- stuck-key
def stuck_key(options: Options) -> Run:
    """How fast other keys go on behind --messages messages of a key that waits for its old consumer, over how fast
    they go without those."""
    import magnetar

    per_batch, others = 100, min(options.messages, 200_000)
    run = Run(0.0)
    rates = {}
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        for stuck in (0, options.messages):
            topic = f"{TOPIC}-{stuck}"
            first = _keyed_consumer(client, topic, "first")
            key = _key_that_moves("first", "second")
            _send_batches(client, topic, [key], 1, options)
            held = first.receive(30_000)  # and never acknowledged: the key stays here
            second = _keyed_consumer(client, topic, "second")
            _send_batches(client, topic, [key] * (stuck // per_batch), per_batch, options)
            keys = [f"other-{number % 1000}" for number in range(others // per_batch)]
            _send_batches(client, topic, keys, per_batch, options)
            rates[stuck], count = _take_others([first, second], len(keys) * per_batch)
            run.detail[f"{stuck} stuck: msg/s"] = rates[stuck]
            assert count == len(keys) * per_batch, "the other keys are stuck too"
            assert held.partition_key() == key
    run.value = rates[options.messages] / rates[0]
    return run


def _keyed_consumer(client: Any, topic: str, name: str) -> Any:
    import magnetar

    return client.subscribe(
        topic, "bench", magnetar.ConsumerType.KeyShared, consumer_name=name, receiver_queue_size=2000,
        initial_position=magnetar.InitialPosition.Earliest,
    )  # fmt: skip


def _key_that_moves(first: str, second: str) -> str:
    """A key that is the first consumer's until the second one comes."""
    from magnetar.broker.core.dispatch import Member
    from magnetar.broker.core.policies.slot_owners import Ring
    from magnetar.proto.routing import sticky_slot

    ring, newcomer = Ring(), Member(2, second)
    ring.join(Member(1, first))
    ring.join(newcomer)
    return next(key for number in range(1000) if ring.owner(sticky_slot(key := f"stuck-{number}")) is newcomer)


def _send_batches(client: Any, topic: str, keys: list[str], per_batch: int, options: Options) -> None:
    import magnetar

    contents = payloads(options.size, options.seed)
    producer = client.create_producer(
        topic, batching_enabled=True, batching_type=magnetar.BatchingType.KeyBased, batching_max_messages=per_batch,
        block_if_queue_full=True, max_pending_messages=20_000, batching_max_publish_delay_ms=100,
    )  # fmt: skip
    for key in keys:
        for number in range(per_batch):
            producer.send_async(contents[number], None, partition_key=key)
    producer.flush()
    producer.close()


def _take_others(consumers: list[Any], messages: int) -> tuple[float, int]:
    """From the first message to the last: messages per second; all were acknowledged."""
    import magnetar

    count, begin, at = 0, 0.0, 0
    silent = 0
    while count < messages and silent < 100:
        at = 1 - at
        try:
            for _ in range(200):
                message = consumers[at].receive(30)
                begin = begin or time.perf_counter()
                consumers[at].acknowledge(message)
                count += 1
            silent = 0
        except magnetar.Timeout:
            silent += 1
    return count / (time.perf_counter() - begin), count
