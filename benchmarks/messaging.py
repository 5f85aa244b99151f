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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from .harness import Options, Run, Usage, measured, percentiles, server

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

    def __init__(self, client: Any, contents: list[bytes], rate: float, api: str = "magnetar") -> None:
        self._ok = importlib.import_module(api).Result.Ok
        self._producer = client.create_producer(TOPIC, batching_enabled=False, block_if_queue_full=True)
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
    The two have a broker each, and the bookie in common. Its journal is in a directory of its own: in memory (tmpfs),
    as a second device is seldom there. In `detail`, the same with the journal in the data directory."""
    run = Run(0.0)
    apart, inside = (_disturbed(options, own_journal) for own_journal in (True, False))
    run.latencies_ms = apart["beside"]
    run.value = apart["beside"]["p99"] / apart["alone"]["p99"]
    run.detail = {
        "rate": options.rate, "messages": options.messages, "read_per_s": apart["read_per_s"],
        "journal": f"tmpfs ({MEMORY_FOLDER})" if os.path.isdir(MEMORY_FOLDER) else "the device of the ledgers",
        "p99_alone_ms": apart["alone"]["p99"], "p99_beside_ms": apart["beside"]["p99"],
        "inside_p99_alone_ms": inside["alone"]["p99"], "inside_p99_beside_ms": inside["beside"]["p99"],
        "inside_ratio": inside["beside"]["p99"] / inside["alone"]["p99"],
    }  # fmt: skip
    return run


def _disturbed(options: Options, own_journal: bool) -> dict[str, Any]:
    import magnetar
    from magnetar.cli.common.processes import Processes

    memory = MEMORY_FOLDER if os.path.isdir(MEMORY_FOLDER) else None
    with tempfile.TemporaryDirectory(prefix="magnetar-bench-") as folder, tempfile.TemporaryDirectory(
        prefix="magnetar-bench-", dir=memory
    ) as journal, Processes(Path(folder)) as processes:
        listen = ("--listen", "127.0.0.1:0")
        where = ("--metadata", processes.start("metadata", "metadata", *listen, "--data", f"{folder}/tree").address)
        more = ("--journal", f"{journal}/journal", "--ledgers", f"{folder}/ledgers") if own_journal else ()
        processes.start("bookie", "bookie", *listen, *where, "--data", f"{folder}/bookie", *more).wait_ready()
        one_copy = {f"MAGNETAR_BROKER_{name}": "1" for name in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
        url, other = (
            processes.start(f"broker-{number}", "broker", *listen, *where, environment=one_copy).wait_ready()
            for number in range(2)
        )
        contents = payloads(options.size, options.seed)
        with magnetar.Client(url) as client, magnetar.Client(other) as publishing:
            client.subscribe(OLD, "bench", initial_position=magnetar.InitialPosition.Earliest).close()
            Sending(client.create_producer(OLD, batching_enabled=True, block_if_queue_full=True), contents).run(
                messages=options.messages
            )
            paced = Paced(publishing, contents, options.rate)
            paced.stretch(options.at_most(WARM_UP_S))
            alone, beside, rates = list[float](), list[float](), list[float]()
            for _ in range(1 if options.rehearses else ROUNDS):  # in turns: what drifts is in both
                paced.stretch(options.seconds)
                alone += paced.samples
                with _reading(url, options.messages) as read:
                    paced.stretch(options.seconds)
                    beside += paced.samples
                    rates.append(read())
    return {"alone": percentiles(alone), "beside": percentiles(beside), "read_per_s": statistics.median(rates)}


@contextmanager
def _reading(url: str, messages: int) -> Iterator[Callable[[], float]]:
    """Meanwhile another process reads the old messages again and again; gives messages per second so far."""
    counted = multiprocessing.get_context("spawn").Value("q", 0)
    reading = multiprocessing.get_context("spawn").Process(target=_read_old, args=(url, messages, counted))
    reading.start()
    try:
        while counted.value == 0:
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
