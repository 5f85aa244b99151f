"""Loads by `pulsar-perf`, of Pulsar 4.0.8: in each turn a process of its own, whose lines of statistics are read.

It prints what was acknowledged or received in each ten seconds. The first ten are its warm-up, as Java compiles what
runs; the next ones are the figures, and then the process is killed. The total that it prints at its end is not used:
that covers its warm-up and the closing of its client, which takes up to ten seconds after a load.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..harness import ROOT
from .maven import jars, tool
from .receives import QUEUE
from .sends import in_flight
from .servers import PulsarServer
from .turns import Figures

INTERVAL_S = 10.0
"""Of its lines; it cannot be set."""
UNLIMITED = 10_000_000
"""Messages a second. Its 0 is refused by its own rate limiter."""
CATCH_UP_WARM_UP_S = 3
"""Of a backlog; there is a line for each second."""
DEADLINE_S = 600.0
TENANT = "persistent://public/default"
_INTERVAL = re.compile(
    r"Throughput (?:produced|received): +\d+ msg --- +([\d.]+) +msg/s .*?med: +([\d.]+)(?: ms)? - .*?99pct: +([\d.]+)"
)
_SECOND = re.compile(r"Consume throughput received: ([\d.]+) msgs/s")


class Interval(NamedTuple):
    msg_s: float
    p50_ms: float
    p99_ms: float


def interval(line: str) -> Interval | None:
    """What a line says of ten seconds; None: it says something else."""
    found = _INTERVAL.search(line)
    return Interval(*map(float, found.groups())) if found else None


def second(line: str) -> float | None:
    """Messages that a line of the statistics of a consumer says of one second."""
    found = _SECOND.search(line)
    return float(found[1]) if found else None


def intervals(url: str, seconds: float, *arguments: object) -> list[Interval]:
    """Those after the warm-up, as many as make so many seconds, at least one. RuntimeError: it ended before."""
    wanted, found = 1 + max(1, round(seconds / INTERVAL_S)), list[Interval]()
    with lines(url, *arguments) as said:
        for line in said:
            if (each := interval(line)) is not None:
                found.append(each)
                if len(found) == wanted:
                    return found[1:]
    raise RuntimeError("pulsar-perf ended early")


def figures(found: list[Interval]) -> Figures:
    return {
        "msg_s": statistics.mean(each.msg_s for each in found),
        "p50_ms": statistics.median(each.p50_ms for each in found),
        "p99_ms": statistics.median(each.p99_ms for each in found),
    }


def fetch() -> Path:
    """The folder of its jars; Missing."""
    return jars("pulsar-perf-4.0.8", ROOT / "benchmarks" / "pulsar_perf" / "pom.xml")


@contextmanager
def lines(url: str, verb: str, *arguments: object) -> Iterator[Iterator[str]]:
    """What it prints, line by line; it is killed with the block, or after DEADLINE_S."""
    java = [tool("java"), "-cp", f"{fetch()}/*", "org.apache.pulsar.testclient.PulsarPerfTestTool"]
    with tempfile.TemporaryDirectory(prefix="pulsar-perf-") as folder:  # it leaves its histograms there
        configuration = Path(folder) / "client.conf"
        configuration.touch()
        command = [*java, str(configuration), verb, "-u", url, *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        late = threading.Timer(DEADLINE_S, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            yield iter(process.stdout)
        finally:
            late.cancel()
            process.kill()
            process.communicate()


class Produce:
    """As many as are acknowledged, or so many a second; into a topic of each turn's own, which is deleted then."""

    def __init__(self, server: PulsarServer, size: int, *, rate: float = UNLIMITED, batches: bool = True) -> None:
        fetch()
        self._server, self._size, self._rate = server, size, rate
        self._more = () if batches else ("-db",)
        self._topic = "perf-half" if rate != UNLIMITED and batches else "perf"

    def turn(self, number: int, seconds: float) -> Figures:
        topic = f"{self._topic}-{number}"
        wanted = ("-r", round(self._rate), "-s", self._size, "-o", in_flight(self._size), *self._more)
        try:
            return figures(intervals(self._server.url, seconds, "produce", *wanted, f"{TENANT}/{topic}"))
        finally:
            self._server.admin("DELETE", f"{topic}?force=true")


def half(server: PulsarServer, size: int, seconds: float) -> Produce:
    """At half of what it reaches, which is measured now."""
    full = Produce(server, size).turn(1000, seconds)["msg_s"]
    return Produce(server, size, rate=full / 2)


class RoundTrip:
    """One process of it produces, another one consumes; what the second one receives."""

    def __init__(self, server: PulsarServer, size: int) -> None:
        fetch()
        self._server, self._size = server, size

    def turn(self, number: int, seconds: float) -> Figures:
        topic = f"roundtrip-{number}"
        produced = ("-r", UNLIMITED, "-s", self._size, "-o", in_flight(self._size), f"{TENANT}/{topic}")
        consumed = ("-q", QUEUE, "-ss", "bench", "-sp", "Earliest", f"{TENANT}/{topic}")
        rates: list[float] = []
        try:
            with lines(self._server.url, "produce", *produced) as said:
                reading = threading.Thread(target=_rates, args=(said, rates), daemon=True)
                reading.start()
                found = intervals(self._server.url, seconds, "consume", *consumed)
            reading.join(10)
            return {"msg_s": statistics.mean(each.msg_s for each in found), "produced_msg_s": rates[-1]}
        finally:
            self._server.admin("DELETE", f"{topic}?force=true")


def _rates(said: Iterator[str], rates: list[float]) -> None:
    rates.extend(each.msg_s for line in said if (each := interval(line)) is not None)


class CatchUp:
    """A backlog is read to its end, in each turn by a new subscription; its first three seconds are the warm-up."""

    def __init__(self, server: PulsarServer, size: int, messages: int) -> None:
        self._server, self._messages = server, messages
        wanted = ("-r", UNLIMITED, "-s", size, "-o", in_flight(size), "-m", messages, f"{TENANT}/catchup")
        with lines(server.url, "produce", *wanted) as said:
            stored = any("Aggregated throughput" in line for line in said)
        if not stored:
            raise RuntimeError("pulsar-perf did not store the backlog")
        server.admin("PUT", "catchup/subscription/keep")

    def turn(self, number: int, seconds: float) -> Figures:
        name = f"bench-{number}"
        wanted = ("-i", 1, "-m", self._messages, "-q", QUEUE, "-ss", name, "-sp", "Earliest", f"{TENANT}/catchup")
        with lines(self._server.url, "consume", *wanted) as said:
            rates = [rate for line in said if (rate := second(line)) is not None]
        self._server.admin("DELETE", f"catchup/subscription/{name}?force=true")
        return {"msg_s": warm(rates)}


def warm(rates: list[float]) -> float:
    """The mean of what is after the warm-up. RuntimeError: the backlog was read before its end."""
    if len(rates) <= CATCH_UP_WARM_UP_S:
        raise RuntimeError(f"the backlog was read in {len(rates)} s, its warm-up: more --messages are needed")
    return statistics.mean(rates[CATCH_UP_WARM_UP_S:])
