"""Pulsar's own clients against a standalone server: `pulsar-perf` (Java) and `pulsar-client` (Python).

`pulsar-perf` is that of Pulsar 4.0.8. Maven brings it once, into the folder of the virtual environment; it runs in its
own process with its defaults, and its own figures are told: what was acknowledged, over its whole time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from .harness import ROOT, Options, Run, measured, percentiles, progress, server
from .messaging import payloads

ROUNDS = 4
TURNS = 12
"""With a Pulsar: short ones, as the machine's other load changes; the ratio is the median of those of each turn."""
TOPIC = "persistent://public/default/bench"
JARS = ROOT / ".venv" / "pulsar-perf-4.0.8"
RATE = "10000000"
"""Messages a second: no limit. Its 0 is refused by its own rate limiter."""
TXN_IN, TXN_OUT = f"{TOPIC}-in", f"{TOPIC}-out"
TXN_ROUNDS, TXN_WARM_UP_S = 4, 5.0
TXN_THREADS = 8
"""Each has its own transaction: its default of one waits for one after the other."""
TXN_RATE_MAX = 6_000
"""Transactions a second, for the size of the backlog."""
_TRANSACTIONS = re.compile(r"transaction executed --- ([\d.]+) transaction/s")
_LATENCY = re.compile(r"mean: +([\d.]+) ms - med: +([\d.]+) - 95pct: +([\d.]+) - 99pct: +([\d.]+)")


def pulsar_java_produce(options: Options) -> Run:
    """Messages per second that pulsar-perf gets acknowledged, from its start to the end of its flush."""
    with server(options.bookies) as running:
        run = Run(0.0)
        with measured(run, tree=True, server=running.pid):
            wanted = ("-r", RATE, "-s", str(options.size), "-time", str(round(options.seconds)), TOPIC)
            said = _perf(running.pulsar_url, "produce", *wanted)
        run.value, run.detail = _rate(said, "sent"), {"copies": options.bookies}
        if found := _LATENCY.search(said):
            run.latencies_ms = {"p50": float(found[2]), "p95": float(found[3]), "p99": float(found[4])}
        return run


def pulsar_java_consume(options: Options) -> Run:
    """Messages per second that pulsar-perf receives and acknowledges of a backlog of --messages."""
    import magnetar

    with server(options.bookies) as running:
        with magnetar.Client(running.url) as client:
            client.subscribe(TOPIC, "perf").close()
            _fill(client, options)
        run = Run(0.0)
        with measured(run, tree=True, server=running.pid):
            wanted = ("-m", str(options.messages), "-time", "120", "-ss", "perf", TOPIC)
            said = _perf(running.pulsar_url, "consume", *wanted)
        run.value, run.detail = _rate(said, "received"), {"messages": options.messages}
        return run


def _fill(client: Any, options: Options) -> None:
    producer = client.create_producer(TOPIC, batching_enabled=True, block_if_queue_full=True)
    content = payloads(options.size, options.seed)[0]
    for _ in range(options.messages):
        producer.send_async(content, None)
    producer.flush()


def pulsar_java_transaction(options: Options) -> Run:
    """Transactions per second that pulsar-perf executes, of one message sent and one acknowledged each; with --peer in
    turns with a Pulsar, whose transactions are on."""
    with server(options.bookies) as running, _peer(options) as peer:
        url, pid = peer
        run, told = Run(0.0), {each: list[str]() for each in (running.pulsar_url, url) if each}
        seconds = options.seconds / TXN_ROUNDS
        backlog = str(round((seconds * TXN_ROUNDS + TXN_WARM_UP_S) * TXN_RATE_MAX))
        for each in told:
            _perf(each, "produce", "-r", RATE, "-s", str(options.size), "-m", backlog, TXN_IN)
            _transactions(each, options, TXN_WARM_UP_S)
        with measured(run, tree=True, server=running.pid, **({"pulsar": pid} if pid else {})):
            for number in range(TXN_ROUNDS):
                for each in told if number % 2 == 0 else reversed(told):
                    told[each].append(_transactions(each, options, seconds))
        rates = [[float(_TRANSACTIONS.findall(said)[0]) for said in every] for every in told.values()]
        run.value = median(rates[0])
        run.detail = {"rounds": TXN_ROUNDS, "threads": TXN_THREADS, "copies": options.bookies}
        if found := _LATENCY.search(told[running.pulsar_url][-1].partition("Messages send aggregated")[2]):
            run.latencies_ms = {"p50": float(found[2]), "p95": float(found[3]), "p99": float(found[4])}
        for theirs in rates[1:]:
            run.detail |= {
                "ratio": median(one / other for one, other in zip(rates[0], theirs, strict=True)),
                "pulsar_txn_s": median(theirs),
            }  # fmt: skip
        return run


def _transactions(url: str, options: Options, seconds: float) -> str:
    wanted = ("--topics-c", TXN_IN, "--topics-p", TXN_OUT, "-threads", str(TXN_THREADS), "-time", str(round(seconds)))
    return _perf(url, "transaction", *wanted)


def _perf(url: str, verb: str, *arguments: str) -> str:
    """What it prints. RuntimeError: it failed."""
    tool = ["java", "-cp", f"{_jars()}/*", "org.apache.pulsar.testclient.PulsarPerfTestTool"]
    with tempfile.TemporaryDirectory(prefix="pulsar-perf-") as folder:  # it leaves its histograms there
        settings = Path(folder) / "client.conf"
        settings.touch()
        command = [*tool, str(settings), verb, "-u", url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    if "Aggregated throughput" not in done.stdout + done.stderr:
        raise RuntimeError(f"pulsar-perf {verb} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def _rate(said: str, kind: str) -> float:
    [found] = re.findall(rf"\d+ records {kind} --- ([\d.]+) msg/s", said)
    return float(found)


def _jars() -> Path:
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise click.ClickException(f"{tool} is missing: pulsar-perf needs Java 17 or later, and Maven brings it")
    if not (JARS / ".complete").exists():
        progress("Maven brings pulsar-perf")
        pom = Path(__file__).parent / "pulsar_perf" / "pom.xml"
        brought = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        subprocess.run(brought, check=True, stdout=sys.stderr)
        (JARS / ".complete").touch()
    return JARS


def pulsar_python(options: Options) -> Run:
    """Messages per second that `pulsar-client` gets acknowledged; with --url or --peer, in turns with a Pulsar.

    The client's two threads hand the interpreter to each other at each message, which costs twice as much between cores
    as within one. The busier the server, the more often they find themselves on one: with --one-core they always are.
    """
    with server(options.bookies) as running, _peer(options) as peer, _one_core(options):
        url, pid = peer
        run, sending = Run(0.0), [_Sending(each, options) for each in (running.pulsar_url, url) if each]
        try:
            with measured(run, server=running.pid, **({"pulsar": pid} if pid else {})):
                rounds = ROUNDS if len(sending) == 1 else TURNS
                for number in range(rounds):
                    for each in sending if number % 2 == 0 else reversed(sending):
                        each.round(options.seconds / rounds)
            ours = sending[0]
            run.value, run.latencies_ms = median(ours.rates), percentiles(ours.samples)
            for theirs in sending[1:]:
                run.detail = {
                    "ratio": median(one / other for one, other in zip(ours.rates, theirs.rates, strict=True)),
                    "pulsar_msg_s": median(theirs.rates), "pulsar_ms": percentiles(theirs.samples),
                    "messages": len(ours.samples), "pulsar_messages": len(theirs.samples),
                    "client_us": ours.cpu_s / len(ours.samples) * 1e6,
                    "pulsar_client_us": theirs.cpu_s / len(theirs.samples) * 1e6,
                }  # fmt: skip
            return run
        finally:
            for each in sending:
                each.close()


@contextmanager
def _one_core(options: Options) -> Iterator[None]:
    """With --one-core this thread, and those that it starts, on the first core that it may use; servers on any."""
    before = os.sched_getaffinity(0)
    if options.extra.get("one_core"):
        os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _peer(options: Options) -> Iterator[tuple[str, int]]:
    """The URL of a Pulsar to compare with, and its process; empty and 0: none."""
    if options.extra.get("peer") is None:
        yield options.url or "", 0
        return
    from tests.interop.pulsar_process import Pulsar, Unavailable, build

    try:
        command = build(ROOT / ".venv" / "pulsar-broker-4.0.8")
    except Unavailable as error:
        raise click.ClickException(f"no Pulsar to compare with: {error}") from error
    with tempfile.TemporaryDirectory(prefix="pulsar-bench-") as folder, Pulsar(command, Path(folder)) as pulsar:
        yield pulsar.url, pulsar.pid


class _Sending:
    """One producer of the official client, with batches as by its defaults, and 1,000 messages that wait at most."""

    def __init__(self, url: str, options: Options) -> None:
        import pulsar

        self._ok = pulsar.Result.Ok
        self._client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        self._producer = self._client.create_producer(TOPIC, batching_enabled=True, block_if_queue_full=True)
        self._content = payloads(options.size, options.seed)[0]
        self.rates: list[float] = []
        self.samples: list[float] = []
        self.cpu_s = 0.0  # of this process
        self.round(0.5)
        self.rates.clear()
        self.samples.clear()
        self.cpu_s = 0.0

    def round(self, seconds: float) -> None:
        acked, samples, now = 0, self.samples, time.perf_counter
        ok, send, content = self._ok, self._producer.send_async, self._content
        begin, cpu_s = now(), time.process_time()
        while (sent := now()) < begin + seconds:

            def done(result: Any, message_id: Any, sent: float = sent) -> None:
                nonlocal acked
                assert result == ok, result
                acked += 1
                samples.append(now() - sent)

            send(content, done)
        self._producer.flush()
        self.rates.append(acked / (now() - begin))
        self.cpu_s += time.process_time() - cpu_s

    def close(self) -> None:
        self._client.close()
