"""shared, key-shared, fan-out, stuck-key, fair: subscriptions with several consumers, against a server process.

A backlog is stored first; then the consumers are connected and acknowledge each message that they receive. They are
in one process beside the server, a thread each, or as many processes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterable
from typing import Any

from .harness import Options, Run, Usage, measured, percentiles, progress, server
from .messaging import TOPIC, Sending, payloads

CONSUMERS = 4
KEYS = 10_000
STUCK_OTHERS = 50_000
"""Of other keys, each time."""
STUCK_ROUNDS = 3
SUBSCRIPTIONS = 100
NOISY_WAITING = 100_000
"""Messages of the noisy key that wait when the quiet one begins."""
QUIET_PER_S, WORK_S = 200, 0.002
"""Messages of the quiet key per second; what a consumer needs for a message."""
FAIR_TURNS = 5
"""Of the quiet key alone, and beside the noisy one, in turns."""
BUSY_MS = 20.0
"""Median of the quiet key alone, above which it waits for its own two in flight, and the ratio says nothing."""


def shared(options: Options) -> Run:
    """Messages per second that CONSUMERS consumers of one Shared subscription acknowledge, one by one."""
    import magnetar

    with server(options.bookies, processes=options.processes) as running, magnetar.Client(running.url) as client:
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

    with server(options.bookies, processes=options.processes) as running, magnetar.Client(running.url) as client:
        kind = magnetar.ConsumerType.KeyShared
        client.subscribe(TOPIC, "bench", kind, initial_position=magnetar.InitialPosition.Earliest).close()
        rng = random.Random(options.seed)
        _send_keyed(client, options, [f"key-{rng.randrange(KEYS)}" for _ in range(options.messages)])
        return _drained(client, running.pid, kind, options.messages)


def _send_keyed(client: Any, options: Options, keys: Iterable[str], topic: str = TOPIC) -> None:
    """One message per entry: what a producer of many keys makes, whether it batches by key or not."""
    contents = payloads(options.size, options.seed)
    producer = client.create_producer(
        topic, batching_enabled=False, block_if_queue_full=True, max_pending_messages=20_000
    )
    for number, key in enumerate(keys):
        producer.send_async(contents[number % len(contents)], None, partition_key=key)
    producer.flush()
    producer.close()


class Draining(threading.Thread):
    """One consumer: receives and acknowledges until all have received as many as there are."""

    def __init__(self, consumer: Any, drained: Drained) -> None:
        super().__init__(daemon=True)
        self.consumer, self.drained, self.count = consumer, drained, 0
        self.disordered = 0
        self.last_s = 0.0
        self._last: dict[str, Any] = {}

    def run(self) -> None:
        import magnetar

        receive, acknowledge, now = self.consumer.receive, self.consumer.acknowledge, time.perf_counter
        drained, last = self.drained, self._last
        while not drained.done.is_set():
            try:
                message = receive(200)
            except magnetar.Timeout:
                drained.look()
                continue
            acknowledge(message)
            self.count += 1
            self.last_s = now()
            key = message.partition_key()
            if key:
                index = message.index()
                self.disordered += index < last.get(key, -1)
                last[key] = index
            if self.count % 64 == 0:
                drained.look()


class Drained:
    def __init__(self, consumers: Iterable[Any], messages: int) -> None:
        self.done = threading.Event()
        self.messages = messages
        self.workers = [Draining(consumer, self) for consumer in consumers]

    @property
    def count(self) -> int:
        return sum(worker.count for worker in self.workers)

    def look(self) -> None:
        if self.count >= self.messages:
            self.done.set()

    def run(self) -> float:
        """Messages per second, from now to the last one."""
        begin = time.perf_counter()
        for worker in self.workers:
            worker.start()
        self.done.wait(120)
        self.done.set()
        for worker in self.workers:
            worker.join()
        return self.count / (max(worker.last_s for worker in self.workers) - begin)


def _drained(client: Any, pid: int, kind: Any, messages: int) -> Run:
    run = Run(0.0)
    with measured(run, server=pid):
        names = [f"c{number}" for number in range(CONSUMERS)]
        drained = Drained([client.subscribe(TOPIC, "bench", kind, consumer_name=name) for name in names], messages)
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
    """How fast other keys go on behind --messages messages of one that waits for its old consumer, over how fast they
    go without those.

    Each message is an entry, of the stuck key and of the others. The consumers are there while the stuck ones come, and
    have got all that they can get, before the others come. Both topics are on one server, and take turns; the figure is
    that of the medians.
    """
    import magnetar

    run = Run(0.0)
    rates: dict[int, list[float]] = {0: [], options.messages: []}
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        there = {stuck: _stuck(client, f"{TOPIC}-{stuck}", stuck, options, run) for stuck in rates}
        run.detail["server MB with them"] = Usage(running.pid).read()["rss_mb"]
        keys = [f"other-{number % KEYS}" for number in range(min(options.messages, STUCK_OTHERS))]
        for _ in range(STUCK_ROUNDS):
            for stuck, consumers in there.items():
                _send_keyed(client, options, keys, f"{TOPIC}-{stuck}")
                drained = Drained(consumers, len(keys))
                rates[stuck].append(drained.run())
                assert drained.count == len(keys), "the other keys are stuck too"
                assert not any(worker.disordered for worker in drained.workers), "a key is out of order"
    for stuck, each in rates.items():
        run.detail[f"{stuck} stuck: msg/s"] = [round(rate) for rate in each]
    run.value = statistics.median(rates[options.messages]) / statistics.median(rates[0])
    return run


def _stuck(client: Any, topic: str, messages: int, options: Options, run: Run) -> list[Any]:
    """Two consumers of which the second one owns a key that the first one holds a message of, and so many behind it."""
    first = _keyed_consumer(client, topic, "first")
    key = _key_that_moves("first", "second")
    _send_keyed(client, options, [key], topic)
    held = first.receive(30_000)  # and never acknowledged: the key stays here
    assert held.partition_key() == key
    second = _keyed_consumer(client, topic, "second")
    begin = time.perf_counter()
    _send_keyed(client, options, itertools.repeat(key, messages), topic)
    _send_keyed(client, options, ["behind"], topic)
    reached = Drained([first, second], 1)
    reached.run()
    assert reached.count == 1, "what comes after the stuck key is stuck too"
    if messages:
        run.detail["sent and stepped over: msg/s"] = round(messages / (time.perf_counter() - begin))
    return [first, second]


def _keyed_consumer(client: Any, topic: str, name: str) -> Any:
    import magnetar

    return client.subscribe(
        topic, "bench", magnetar.ConsumerType.KeyShared, consumer_name=name, receiver_queue_size=2000,
        initial_position=magnetar.InitialPosition.Earliest,
    )  # fmt: skip


def _key_that_moves(first: str, second: str) -> str:
    """A key that is the first consumer's until the second one comes."""
    from magnetar.broker.subscription.core.in_log_order import HashRingSlotOwners
    from magnetar.broker.subscription.core.policy import Member
    from magnetar.proto.names import compute_key_slot

    ring, newcomer = HashRingSlotOwners(), Member(2, second)
    ring.add_member(Member(1, first))
    ring.add_member(newcomer)
    return next(
        key for number in range(1000) if ring.find_owner(compute_key_slot(key := f"stuck-{number}")) is newcomer
    )


# ---------------------------------------------------------------------------------------------- fair
def fair(options: Options) -> Run:
    """The p99 from a send of a quiet key to its consumer, beside a flood of another key, over the same alone.

    CONSUMERS consumers of one Shared subscription take WORK_S for a message. NOISY_WAITING messages of the noisy key
    wait, and --rate a second are added. The keys take turns, and two messages of each are in flight. Both are measured
    in turns of a FAIR_TURNS-th of --seconds, so that what else the machine does meets both, with QUIET_PER_S messages a
    second each: 1,000 samples in five seconds.
    """
    import magnetar

    run = Run(0.0)
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        both = {
            "alone": QuietKey(client, f"{TOPIC}-alone", 0, options),
            "flood": QuietKey(client, f"{TOPIC}-flood", min(NOISY_WAITING, options.messages), options),
        }
        with measured(run, server=running.pid):
            for _ in range(FAIR_TURNS):
                for each in both.values():
                    each.measure(max(1, int(QUIET_PER_S * options.seconds / FAIR_TURNS)))
        for each in both.values():
            each.close()
        run.detail["server MB"] = Usage(running.pid).read()["rss_mb"]
    found = {name: percentiles(each.samples) for name, each in both.items()}
    for name, each in found.items():
        run.detail[name] = {key: round(ms, 1) for key, ms in each.items()}
    run.detail["samples"] = len(both["flood"].samples)
    run.detail["p50 flood / alone"] = round(found["flood"]["p50"] / found["alone"]["p50"], 2)
    if found["alone"]["p50"] > BUSY_MS:
        progress(f"fair: alone a message takes {found['alone']['p50']:.0f} ms: the machine is too busy for a figure")
    run.latencies_ms = found["flood"]
    run.value = found["flood"]["p99"] / found["alone"]["p99"]
    return run


class QuietKey:
    """A topic with a quiet key, its consumers, and if `noisy` messages of another key wait there, a flood of it. All of
    them rest but during `measure`. `samples`: seconds from each send of the quiet key to its consumer."""

    def __init__(self, client: Any, topic: str, noisy: int, options: Options) -> None:
        import magnetar

        self.samples = list[float]()
        self._client, self._topic, self._options = client, topic, options
        self._sent, self._over, self._running = 0, threading.Event(), threading.Event()
        self._consumers = [
            client.subscribe(
                topic, "bench", magnetar.ConsumerType.Shared, initial_position=magnetar.InitialPosition.Earliest,
                receiver_queue_size=10, fair_by_key=True, max_in_flight_per_key=2,
            )
            for _ in range(CONSUMERS)
        ]  # fmt: skip
        _send_keyed(client, options, itertools.repeat("noisy", noisy), topic)
        self._producer = client.create_producer(topic, batching_enabled=False)
        self._workers = [threading.Thread(target=self._work, args=(each,), daemon=True) for each in self._consumers]
        if noisy:
            self._workers.append(threading.Thread(target=self._flood, daemon=True))
        for worker in self._workers:
            worker.start()

    def measure(self, count: int) -> None:
        """Sends `count` messages of the quiet key, and waits until all are received."""
        self._running.set()
        self._sent += count
        begin = time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, begin + number / QUIET_PER_S - time.perf_counter()))
            self._producer.send_async(str(time.perf_counter()).encode(), None, partition_key="quiet")
        deadline = time.perf_counter() + 60
        while len(self.samples) < self._sent and time.perf_counter() < deadline:
            time.sleep(0.01)
        self._running.clear()
        assert len(self.samples) >= self._sent, "the quiet key starves"

    def close(self) -> None:
        self._over.set()
        self._running.set()
        for worker in self._workers:
            worker.join()
        for each in self._consumers:
            each.close()

    def _work(self, consumer: Any) -> None:
        import magnetar

        while not self._over.is_set():
            self._running.wait()
            try:
                message = consumer.receive(100)
            except magnetar.Timeout:
                continue
            if message.partition_key() == "quiet":
                self.samples.append(time.perf_counter() - float(message.data()))
            time.sleep(WORK_S)
            consumer.acknowledge(message)

    def _flood(self) -> None:
        contents = payloads(self._options.size, self._options.seed)
        producer = self._client.create_producer(self._topic, batching_enabled=False, block_if_queue_full=True)
        due = time.perf_counter()
        for number in itertools.count():
            self._running.wait()
            due = max(due + 1 / self._options.rate, time.perf_counter() - 0.1)
            if self._over.wait(max(0.0, due - time.perf_counter())):
                break
            producer.send_async(contents[number % len(contents)], None, partition_key="noisy")
