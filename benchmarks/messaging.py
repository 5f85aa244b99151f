"""produce, roundtrip, catchup, catchup-disturb, latency: through the SDK, against a server process, fsync before every
ack."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Options, Run, Usage, measured, percentiles, read_waited_s, server

if TYPE_CHECKING:
    from magnetar.cli.common.processes import Process

TOPIC = "bench"
OLD = "bench-old"
MEMORY_FOLDER = "/dev/shm"
ROUNDS = 3
"""Stretches with and without the catch-up, in turns (catchup-disturb)."""
WARM_UP_S = 1.0
PENDING = 20_000
"""Messages under way at most: 20 MB of 1 KB, the order of what the peers' clients keep (confluent-kafka: 100,000)."""
SAMPLE = 64
"""One message in so many has its latency taken."""


def payloads(size: int, seed: int, count: int = 256) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def _producer(client: Any, **settings: Any) -> Any:
    return client.create_producer(
        TOPIC, batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING, **settings
    )


class Sending:
    """Sends as fast as acks allow and counts them; `acked` is what counts, not what was handed over."""

    def __init__(self, producer: Any, contents: list[bytes]) -> None:
        import magnetar

        self._ok = magnetar.Result.Ok
        self.producer, self.contents = producer, contents
        self.sent = self.acked = self.failed = 0
        self.samples: list[float] = []

    def done(self, result: Any, _id: Any) -> None:
        if result == self._ok:
            self.acked += 1
        else:
            self.failed += 1

    def run(self, seconds: float | None = None, messages: int | None = None) -> float:
        """Until the time is over or so many are sent; then until all are acknowledged. The seconds it took."""
        send, done, contents, count = self.producer.send_async, self.done, self.contents, len(self.contents)
        begin = time.perf_counter()
        deadline = begin + seconds if seconds is not None else float("inf")
        goal = self.sent + messages if messages is not None else None
        while time.perf_counter() < deadline and (goal is None or self.sent < goal):
            block = SAMPLE if goal is None else min(SAMPLE, goal - self.sent)
            for i in range(block - 1):
                send(contents[i % count], done)
            send(contents[-1], self.timed(time.perf_counter()))
            self.sent += block
        self.producer.flush()
        return time.perf_counter() - begin

    def timed(self, at: float) -> Any:
        def timed(result: Any, message_id: Any) -> None:
            self.samples.append(time.perf_counter() - at)
            self.done(result, message_id)

        return timed


def produce(options: Options) -> Run:
    import magnetar

    with server(options.bookies, processes=options.processes) as running, magnetar.Client(running.url) as client:
        sending = Sending(_producer(client), payloads(options.size, options.seed))
        sending.run(seconds=options.at_most(WARM_UP_S))
        sending.samples.clear()
        before, run = sending.acked, Run(0.0)
        with measured(run, server=running.pid):
            seconds = sending.run(seconds=options.seconds)
        run.value = (sending.acked - before) / seconds
        run.latencies_ms = percentiles(sending.samples)
        run.detail = {
            "acked": sending.acked - before,
            "failed": sending.failed,
            "seconds": seconds,
            "mb_s": run.value * options.size / 1e6,
        }
        return run


def _produce_process(url: str, size: int, seed: int, seconds: float, report: Any) -> None:
    import magnetar

    with magnetar.Client(url) as client:
        sending = Sending(_producer(client), payloads(size, seed))
        taken = sending.run(seconds=seconds)
        report.put((sending.acked, taken, Usage(os.getpid()).read()["peak_rss_mb"]))


def roundtrip(options: Options) -> Run:
    """A producer process and a consumer (here) at once; counted is what was consumed and acknowledged, and beside it
    what was stored meanwhile."""
    import magnetar
    from magnetar.admin import Admin

    context = multiprocessing.get_context("spawn")
    with (
        server(options.bookies, processes=options.processes) as running,
        magnetar.Client(running.url) as client,
        closing(Admin(running.url)) as admin,
    ):
        consumer = client.subscribe(
            TOPIC, "bench", initial_position=magnetar.InitialPosition.Earliest, receiver_queue_size=5000
        )
        report = context.Queue()
        warm_up_s = options.at_most(WARM_UP_S)
        arguments = (running.url, options.size, options.seed, options.seconds + warm_up_s + WARM_UP_S, report)
        child = context.Process(target=_produce_process, args=arguments, daemon=True)
        child.start()
        try:
            consumer.acknowledge(consumer.receive(30_000))
            consume(consumer, seconds=warm_up_s)
            run = Run(0.0)
            with measured(run, server=running.pid, producer=child.pid or 0):
                begin, before = time.perf_counter(), published(admin, TOPIC)
                count, latencies = consume(consumer, seconds=options.seconds)
                produced, taken = published(admin, TOPIC) - before, time.perf_counter() - begin
                run.value = count / taken
            run.latencies_ms = percentiles(latencies)
            report.get(timeout=60)
            run.detail = {
                "consumed": count, "produced_msg_s": produced / taken,
                "consumed_of_produced": count / max(1, produced),
            }  # fmt: skip
        finally:
            child.join(30)
            child.kill()
    return run


def published(admin: Any, topic: str) -> int:
    """Returns how many messages the topic has stored since the server began."""
    return int(admin.topic_stats(topic).messages_in)


def consume(
    consumer: Any, *, seconds: float = float("inf"), messages: float = float("inf")
) -> tuple[int, list[float]]:
    """Receives and acknowledges one by one; end-to-end latency of one message in SAMPLE, from its publish time."""
    receive, acknowledge, count, latencies = consumer.receive, consumer.acknowledge, 0, []
    deadline = time.perf_counter() + seconds
    while count < messages:
        message = receive(30_000)
        acknowledge(message)
        count += 1
        if count % SAMPLE == 0:
            latencies.append(time.time() - message.publish_timestamp() / 1000)
            if time.perf_counter() > deadline:
                break
    return count, latencies


def catchup(options: Options) -> Run:
    import magnetar

    with server(options.bookies, processes=options.processes) as running, magnetar.Client(running.url) as client:
        client.subscribe(TOPIC, "bench", initial_position=magnetar.InitialPosition.Earliest).close()
        Sending(_producer(client), payloads(options.size, options.seed)).run(messages=options.messages)
        consumer = client.subscribe(TOPIC, "bench", receiver_queue_size=5000)
        run = Run(0.0)
        with measured(run, server=running.pid):
            begin = time.perf_counter()
            count, _ = consume(consumer, messages=options.messages)
            run.value = count / (time.perf_counter() - begin)
        run.detail = {"messages": count}
        return run


class Paced:
    """Single sends at a fixed rate, not batched; one that starts late counts from when it should have started.

    `api`: the module of the client, ours or Pulsar's.
    """

    def __init__(
        self, client: Any, contents: list[bytes], rate: float, api: str = "magnetar", topic: str = TOPIC
    ) -> None:
        self._ok = importlib.import_module(api).Result.Ok
        self._producer = client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
        self._contents, self._rate = contents, rate
        self._pending = threading.Semaphore(0)
        self._failed: Any = None
        self.samples: list[float] = []  # seconds, of the last stretch

    def _one(self, due: float) -> Any:
        def done(result: Any, _id: Any) -> None:
            self.samples.append(time.perf_counter() - due)
            if result != self._ok:
                self._failed = result
            self._pending.release()

        return done

    def stretch(self, seconds: float) -> int:
        """How many were sent; all are acknowledged."""
        self.samples.clear()
        begin, count = time.perf_counter(), 0
        while (due := begin + count / self._rate) < begin + seconds:
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            self._producer.send_async(self._contents[count % len(self._contents)], self._one(due))
            count += 1
        for _ in range(count):
            self._pending.acquire()
        if self._failed is not None:
            raise AssertionError(f"a send failed: {self._failed}")
        return count


def latency(options: Options) -> Run:
    """p99 of single sends at --rate."""
    import magnetar

    with server(options.bookies, processes=options.processes) as running, magnetar.Client(running.url) as client:
        paced = Paced(client, payloads(options.size, options.seed), options.rate)
        paced.stretch(options.at_most(WARM_UP_S))
        run = Run(0.0)
        with measured(run, server=running.pid):
            sends = paced.stretch(options.seconds)
        run.latencies_ms = percentiles(paced.samples)
        run.value = run.latencies_ms["p99"]
        run.detail = {"sends": sends, "rate": options.rate}
        return run


def catchup_disturb(options: Options) -> Run:
    """p99 of single sends at --rate beside a reader of --messages older messages at full speed, over that without it.
    The two have a broker each, and the --bookies in common. Their journals are in a directory of their own: in memory
    (tmpfs), as a second device is seldom there. In `detail`, the same with the journals in the data directories
    (inside_).

    The processes of both and of the load share the processors of the machine. How much of the ratio that is: `waits_`,
    the milliseconds for each send that threads of the publisher, its broker and the bookies were ready and had no
    processor; and `first_`, the same figures while these threads get a processor at once (SCHED_FIFO, which needs root;
    else null). `waiting_share` is the part of what the reader adds to the p99 that is gone then."""
    run = Run(0.0)
    apart, inside = (_disturbed(options, own_journal) for own_journal in (True, False))
    alone, beside = apart["alone"], apart["beside"]
    run.latencies_ms = percentiles(beside.samples)
    run.value = beside.p99_ms / alone.p99_ms
    run.detail = {
        "rate": options.rate, "messages": options.messages, "read_per_s": statistics.median(beside.read_per_s),
        "journal": f"tmpfs ({MEMORY_FOLDER})" if os.path.isdir(MEMORY_FOLDER) else "the device of the ledgers",
        "p99_alone_ms": alone.p99_ms, "p99_beside_ms": beside.p99_ms,
        "waits_alone_ms": alone.waits_ms, "waits_beside_ms": beside.waits_ms,
        **_without_waiting(beside.p99_ms - alone.p99_ms, apart["first_alone"], apart["first_beside"]),
        "inside_p99_alone_ms": inside["alone"].p99_ms, "inside_p99_beside_ms": inside["beside"].p99_ms,
        "inside_ratio": inside["beside"].p99_ms / inside["alone"].p99_ms,
    }  # fmt: skip
    return run


def _without_waiting(added_ms: float, alone: _Stretches, beside: _Stretches) -> dict[str, float | None]:
    """`added_ms`: what the reader adds to the p99 where all wait for a processor."""
    names = ("first_p99_alone_ms", "first_p99_beside_ms", "first_ratio", "waiting_share")
    if not beside.samples:
        return dict.fromkeys(names)
    share = 1 - (beside.p99_ms - alone.p99_ms) / added_ms if added_ms > 0 else None
    return dict(zip(names, (alone.p99_ms, beside.p99_ms, beside.p99_ms / alone.p99_ms, share), strict=True))


class _Stretches:
    """Sends of one kind: `samples` in seconds, and what else is measured while they are sent."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.read_per_s: list[float] = []
        self._waited_s = 0.0

    def send(self, paced: Paced, seconds: float, pids: Collection[int]) -> None:
        before = sum(map(read_waited_s, pids))
        paced.stretch(seconds)
        self._waited_s += sum(map(read_waited_s, pids)) - before
        self.samples += paced.samples

    @property
    def p99_ms(self) -> float:
        return percentiles(self.samples)["p99"]

    @property
    def waits_ms(self) -> float:
        return 1000 * self._waited_s / len(self.samples)


def _disturbed(options: Options, own_journal: bool) -> dict[str, _Stretches]:
    import magnetar
    from magnetar.admin import Admin

    memory = MEMORY_FOLDER if os.path.isdir(MEMORY_FOLDER) else None
    with (
        tempfile.TemporaryDirectory(prefix="magnetar-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="magnetar-bench-", dir=memory) as journal,
        _cluster(options, Path(folder), Path(journal) if own_journal else None) as (bookies, brokers),
    ):
        url, contents = brokers[0].wait_ready(), payloads(options.size, options.seed)
        with magnetar.Client(url) as client, closing(Admin(url)) as admin:
            client.subscribe(OLD, "bench", initial_position=magnetar.InitialPosition.Earliest).close()
            Sending(client.create_producer(OLD, batching_enabled=True, block_if_queue_full=True), contents).run(
                messages=options.messages
            )
            topic, owner = _topic_elsewhere(admin)
            path = [*bookies, *(each for each in brokers if each.address == owner)]
            pids = [os.getpid(), *(each.pid for each in path)]
            paced = Paced(client, contents, options.rate, topic=topic)
            paced.stretch(options.at_most(WARM_UP_S))
            found = {name: _Stretches() for name in ("alone", "beside", "first_alone", "first_beside")}
            for _ in range(1 if options.rehearses else ROUNDS):  # in turns: what drifts is in all
                for first in ("", "first_") if own_journal else ("",):
                    with _at_once(pids if first else ()) as permitted:
                        if permitted:
                            _send_both(found[f"{first}alone"], found[f"{first}beside"], paced, options, url, pids)
    return found


def _send_both(
    alone: _Stretches, beside: _Stretches, paced: Paced, options: Options, url: str, pids: Collection[int]
) -> None:
    alone.send(paced, options.seconds, pids)
    with _reading(url, options.messages) as read:
        beside.send(paced, options.seconds, pids)
        beside.read_per_s.append(read())


@contextmanager
def _cluster(options: Options, folder: Path, journals: Path | None) -> Iterator[tuple[list[Process], list[Process]]]:
    """--bookies and two brokers; with three bookies or more, three copies of which two are synced. `journals`: where
    the journals are; None: with the ledgers."""
    from magnetar.cli.common.processes import Processes

    copies = min(3, options.bookies)
    quorums = {"ENSEMBLE_SIZE": copies, "WRITE_QUORUM": copies, "ACK_QUORUM": copies // 2 + 1}
    environment = {f"MAGNETAR_BROKER_{name}": str(number) for name, number in quorums.items()}
    with Processes(folder) as processes:
        listen = ("--listen", "127.0.0.1:0")
        where = ("--metadata", processes.start("metadata", "metadata", *listen, "--data", f"{folder}/tree").address)
        bookies: list[Process] = []
        for name in (f"bookie-{number}" for number in range(options.bookies)):
            more = ("--journal", f"{journals}/{name}", "--ledgers", f"{folder}/{name}-ledgers") if journals else ()
            bookies.append(processes.start(name, "bookie", *listen, *where, "--data", f"{folder}/{name}", *more))
            bookies[-1].wait_ready()
        names = ("broker-0", "broker-1")
        brokers = [processes.start(name, "broker", *listen, *where, environment=environment) for name in names]
        for each in brokers:
            each.wait_ready()
        yield bookies, brokers


def _topic_elsewhere(admin: Any) -> tuple[str, str]:
    """Returns the name of a topic that another broker owns than OLD, and HOST:PORT of that broker."""
    old = admin.owner(OLD)
    for topic in (f"{TOPIC}-{number}" for number in range(100)):
        if (owner := admin.owner(topic)) != old:
            return topic, owner
    raise AssertionError(f"{old} owns all topics")


@contextmanager
def _at_once(pids: Collection[int]) -> Iterator[bool]:
    """Meanwhile threads of the processes get a processor as soon as they are ready: before those of all others, and of
    what they start meanwhile. Gives False, and changes nothing, if that is not permitted."""
    threads = [int(each.name) for pid in pids for each in Path(f"/proc/{pid}/task").iterdir()]
    try:
        for each in threads:
            os.sched_setscheduler(each, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        for each in threads:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(each, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def _reading(url: str, messages: int) -> Iterator[Callable[[], float]]:
    """Meanwhile another process reads the old messages again and again; gives messages per second so far."""
    counted = multiprocessing.get_context("spawn").Value("q", 0)
    reading = multiprocessing.get_context("spawn").Process(target=_read_old, args=(url, messages, counted))
    reading.start()
    try:
        while counted.value == 0:
            assert reading.is_alive(), "the reader failed"
            time.sleep(0.01)
        first, begin = counted.value, time.perf_counter()
        yield lambda: (counted.value - first) / (time.perf_counter() - begin)
    finally:
        reading.kill()
        reading.join()


def _read_old(url: str, messages: int, counted: Any) -> None:
    import magnetar

    with magnetar.Client(url) as client:
        while True:
            reader = client.create_reader(OLD, magnetar.MessageId.earliest, receiver_queue_size=5000)
            for _ in range(messages):
                reader.read_next(30_000)
                counted.value += 1
            reader.close()
