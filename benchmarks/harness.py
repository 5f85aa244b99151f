"""What all benchmarks share: a real server process, its CPU and memory, and one JSON object as the result.

The server is `magnetar standalone` in its own process on a fresh directory; the load runs in the process of the
benchmark. CPU seconds and peak RSS of each process are read from /proc around the measured stretch.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READY_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Options:
    """What the command line says; each benchmark uses what has a meaning for it."""

    size: int = 1024
    bookies: int = 1
    seconds: float = 5.0
    rate: float = 1000.0
    messages: int = 1_000_000
    runs: int = 3
    seed: int = 1
    url: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One repetition: the figure, latencies in ms where there are any, and what it cost."""

    value: float
    latencies_ms: dict[str, float] = field(default_factory=dict)
    processes: dict[str, dict[str, float]] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)


def percentiles(samples_s: Sequence[float]) -> dict[str, float]:
    """p50 … max, in milliseconds."""
    if not samples_s:
        return {}
    ordered = sorted(samples_s)
    at = lambda q: ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000
    return {"p50": at(0.50), "p90": at(0.90), "p99": at(0.99), "p999": at(0.999), "max": ordered[-1] * 1000}


class Usage:
    """CPU seconds since its making, and peak RSS, of one process; `cpu_s`, `peak_rss_mb`, `rss_mb`."""

    def __init__(self, pid: int) -> None:
        self.pid, self._cpu0 = pid, self._cpu_s(pid)

    @staticmethod
    def _cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read(self) -> dict[str, float]:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        mb = lambda name: int(status[name].split()[0]) / 1024
        return {
            "cpu_s": round(self._cpu_s(self.pid) - self._cpu0, 3),
            "peak_rss_mb": round(mb("VmHWM"), 1),
            "rss_mb": round(mb("VmRSS"), 1),
        }


class Server:
    """A `magnetar standalone` process of ours; killed by pid, never by name."""

    def __init__(self, directory: str, bookies: int) -> None:
        self.directory, self.bookies = directory, bookies
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> float:
        """Starts it and waits for its `ready` line; the seconds that took."""
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "magnetar.cli.main", "standalone",
             "--data", self.directory, "--port", "0", "--bookies", str(self.bookies)],
            stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("ready "):
                self.url = line.split()[1]
                return time.perf_counter() - begin
            if time.perf_counter() - begin > READY_DEADLINE_S:
                break
        raise RuntimeError(f"the server did not become ready (exit code {self.process.poll()})")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9, as a power cut would be for the process."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def server(bookies: int = 1, *, start: bool = True) -> Iterator[Server]:
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    running = Server(directory, bookies)
    try:
        if start:
            running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def measured(run: Run, **pids: int) -> Iterator[None]:
    """Notes what the named processes cost during the block."""
    usages = {name: Usage(pid) for name, pid in {"client": os.getpid(), **pids}.items()}
    yield
    run.processes = {name: usage.read() for name, usage in usages.items()}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return (found.stdout.strip() or "unknown") + ("+changes" if dirty else "")


def machine() -> dict[str, Any]:
    total_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(total_kb / (1 << 20), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def report(name: str, unit: str, runs: Sequence[Run], options: Options, *, pick: str = "median") -> dict[str, Any]:
    """The JSON object of a benchmark; `value` is the median of the runs."""
    values = [run.value for run in runs]
    middle = min(runs, key=lambda run: abs(run.value - statistics.median(values)))
    return {
        "benchmark": name,
        "value": statistics.median(values),
        "unit": unit,
        "runs": values,
        "min": min(values),
        "max": max(values),
        "latencies_ms": {key: round(value, 3) for key, value in middle.latencies_ms.items()},
        "processes": middle.processes,
        "detail": middle.detail,
        "options": {k: v for k, v in vars(options).items() if k not in ("extra", "url")} | options.extra,
        "machine": machine(),
        "commit": commit(),
        "seed": options.seed,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def load(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(path).read_text())
    return loaded
