"""rolling: what producers and consumers notice while each process of a cluster is restarted, drained or killed.

The cluster is metadata, three bookies and two brokers as single processes on this machine. TOPICS topics have a
producer and a consumer each: a message leaves every INTERVAL_S, whatever became of those before it. One after the
other, and back each time: SIGTERM of each broker, SIGTERM of each bookie, `brokers drain` of the broker that has
topics, `kill -9` of such a broker.

The pause of a topic is the longest time from a send to its ack meanwhile, so a pause that begins between two sends is
seen up to INTERVAL_S shorter. Of brokers the topics count that the broker served; of bookies all.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from .harness import Options, Run, percentiles

TOPICS = 8
INTERVAL_S = 0.03
ROUNDS = 3
"""Of the restarts and drains; of the kill one, as each waits for a session to end."""
SETTLE_S = 1.0
"""Before and after each event."""
SESSION_TIMEOUT_S = 2.0
PATIENCE_S = 30.0
"""For an event, and for messages that wait after it: then they count as lost."""
STEADY = "steady"


class Topic:
    """The messages of one topic: when each was sent, what became of it, and the longest waits since `begin`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kinds: list[str] = []  # of each message, by number: during which event it was sent
        self.waiting: dict[int, float] = {}  # without an ack: when it was sent
        self.acked: set[int] = set()
        self.received: dict[int, float] = {}
        self.pause_s = self.late_s = 0.0
        self._sent: list[float] = []

    def begin(self) -> None:
        self.pause_s = self.late_s = 0.0

    def send(self, kind: str) -> int:
        number, now = len(self.kinds), time.perf_counter()
        self.kinds.append(kind)
        self._sent.append(now)
        self.waiting[number] = now
        return number

    def on_acked(self, number: int) -> None:
        self.acked.add(number)
        self.pause_s = max(self.pause_s, time.perf_counter() - self.waiting.pop(number))

    def on_received(self, number: int) -> str:
        """Returns what is wrong with it: "duplicated", "reordered" or ""."""
        if number in self.received:
            return "duplicated"
        newest = next(reversed(self.received), -1)
        self.received[number] = time.perf_counter()
        self.late_s = max(self.late_s, self.received[number] - self._sent[number])
        return "reordered" if number < newest else ""

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.acked <= self.received.keys()


class Traffic:
    """Producers and consumers at a steady rate, and what they noticed by kind of event."""

    def __init__(self, client: Any, size: int, settle_s: float) -> None:
        self._client, self._size, self._settle_s = client, size, settle_s
        self.topics = [Topic(f"persistent://public/default/rolling-{number}") for number in range(TOPICS)]
        self.kind = STEADY
        self.faults: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.pauses: defaultdict[str, list[float]] = defaultdict(list)
        self.lateness: defaultdict[str, list[float]] = defaultdict(list)
        self.messages: Counter[str] = Counter()
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publishes and consumes during the block; at its end, waits for what is under way, and counts what is lost."""
        ends = [await self._open(topic) for topic in self.topics]
        async with asyncio.TaskGroup() as group:
            consuming = [group.create_task(self._consume(topic, consumer)) for topic, _, consumer in ends]
            producing = [
                group.create_task(self._produce(topic, producer, INTERVAL_S * number / TOPICS))
                for number, (topic, producer, _) in enumerate(ends)
            ]
            try:
                yield
            finally:
                self._over.set()
                await asyncio.gather(*producing)
                await self.wait_idle()
                for each in consuming:
                    each.cancel()
        for topic in self.topics:
            for number in topic.acked - topic.received.keys():
                self.faults[topic.kinds[number]]["lost"] += 1

    async def _open(self, topic: Topic) -> tuple[Topic, Any, Any]:
        consumer = await self._client.subscribe(topic.name, "rolling")
        return topic, await self._client.create_producer(topic.name, batching_enabled=False), consumer

    async def _produce(self, topic: Topic, producer: Any, first_s: float) -> None:
        import magnetar

        body = bytes(max(self._size - 10, 0))
        at = time.perf_counter() + first_s
        while not self._over.is_set():
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            at += INTERVAL_S
            number = topic.send(self.kind)
            self.messages[self.kind] += 1

            def done(result: Any, _id: Any, number: int = number) -> None:
                if result == magnetar.Result.Ok:
                    topic.on_acked(number)
                else:
                    topic.waiting.pop(number)
                    self.faults[self.kind]["errors"] += 1

            producer.send_nowait(b"%-10d" % number + body, done)

    async def _consume(self, topic: Topic, consumer: Any) -> None:
        import magnetar

        while True:
            try:
                message = await consumer.receive()
                if fault := topic.on_received(int(message.data()[:10])):
                    self.faults[self.kind][fault] += 1
                await consumer.acknowledge(message)
            except magnetar.PulsarException:
                self.faults[self.kind]["errors"] += 1

    async def wait_idle(self) -> None:
        """Until what was sent until now is acked and received, or PATIENCE_S is over."""
        with suppress(TimeoutError):
            await _until(lambda: all(topic.is_idle for topic in self.topics))

    @asynccontextmanager
    async def event(self, kind: str, names: set[str] | None = None) -> AsyncIterator[None]:
        """The block is an event of the kind that concerns the topics of these names (None: all)."""
        await asyncio.sleep(self._settle_s)
        self.kind = kind
        for topic in self.topics:
            topic.begin()
        try:
            yield
            await asyncio.sleep(self._settle_s)
            await self._wait_old()
        finally:
            self.kind = STEADY
        for topic in self.topics:
            if names is None or topic.name in names:
                self.pauses[kind].append(topic.pause_s)
                self.lateness[kind].append(topic.late_s)

    async def _wait_old(self) -> None:
        """Until what was sent before is acked and received: what comes later waits for nothing of the event."""
        before = [(topic, len(topic.kinds)) for topic in self.topics]
        with suppress(TimeoutError):
            await _until(lambda: all(
                min(topic.waiting, default=number) >= number and topic.acked <= topic.received.keys()
                for topic, number in before
            ))  # fmt: skip

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, pauses in self.pauses.items():
            found[kind] = {"topics": len(pauses), "messages": self.messages[kind]}
            for name, samples in (("pause", pauses), ("late", self.lateness[kind])):
                of = percentiles(samples)
                found[kind] |= {f"{name}_{each}_ms": round(of[each], 1) for each in ("p50", "p99", "max") if of}
            found[kind] |= {each: self.faults[kind][each] for each in ("errors", "lost", "duplicated", "reordered")}
        return found


async def _until(done: Callable[[], bool]) -> None:
    """Raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not done():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.01)


async def _owned(admin: Any, traffic: Traffic, broker: Any) -> set[str]:
    owners = {topic.name: await admin.owner(topic.name) for topic in traffic.topics}
    return {name for name, owner in owners.items() if owner.endswith(broker.address)}


async def _restart(process: Any) -> None:
    await asyncio.to_thread(process.stop)
    process.start()  # by this thread: it would end with another one
    await asyncio.to_thread(process.wait_ready)


async def _drain(admin: Any, broker: Any) -> None:
    record = next(each for each in await admin.brokers() if each.endpoint == broker.address)
    for order, is_obeyed in (
        (admin.drain_broker, lambda told: told.draining and not told.bundles),
        (admin.undrain_broker, lambda told: not told.draining),
    ):
        await order(record.name)
        async with asyncio.timeout(PATIENCE_S):
            while not any(  # noqa: ASYNC110 - nobody tells
                each.name == record.name and is_obeyed(each) for each in await admin.brokers()
            ):
                await asyncio.sleep(0.05)


async def _kill(process: Any) -> None:
    await asyncio.to_thread(process.kill)
    await asyncio.sleep(SESSION_TIMEOUT_S + SETTLE_S)
    process.start()
    await asyncio.to_thread(process.wait_ready)


async def _measure(cluster: Any, options: Options, run: Run) -> None:
    from magnetar.admin import AdminClient
    from magnetar.asyncio import Client

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(cluster.url))
        admin = await stack.enter_async_context(AdminClient(cluster.url))
        traffic = Traffic(client, options.size, options.at_most(SETTLE_S))

        async def loaded() -> tuple[Any, set[str]]:
            owned = [(broker, await _owned(admin, traffic, broker)) for broker in cluster.brokers]
            return max(owned, key=lambda each: len(each[1]))

        async with traffic.running():
            async with traffic.event(STEADY):
                await asyncio.sleep(options.seconds)
            for _ in range(1 if options.rehearses else ROUNDS):
                for broker in cluster.brokers:
                    async with traffic.event("broker", await _owned(admin, traffic, broker)):
                        await _restart(broker)
                for bookie in cluster.bookies:
                    async with traffic.event("bookie"):
                        await _restart(bookie)
                broker, names = await loaded()
                async with traffic.event("drain", names):
                    await _drain(admin, broker)
            broker, names = await loaded()
            async with traffic.event("killed", names):
                await _kill(broker)
        run.detail = traffic.report()


def rolling(options: Options) -> Run:
    """p99 of the pauses of producers when their broker is restarted, in ms; `detail` has each kind of event."""
    from magnetar.cli.common.processes import Cluster

    run = Run(0.0)
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), bookies=3, brokers=2, session_timeout_s=SESSION_TIMEOUT_S) as cluster:
            asyncio.run(_measure(cluster, options, run))
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    killed = run.detail["killed"]
    killed["beyond_session_ms"] = round(killed["pause_max_ms"] - SESSION_TIMEOUT_S * 1000, 1)
    run.value = run.detail["broker"]["pause_p99_ms"]
    return run
