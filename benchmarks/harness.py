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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from magnetar.proto.versions import build_kind

ROOT = Path(__file__).resolve().parent.parent
READY_DEADLINE_S = 60.0
REHEARSAL_S = 1.0


@dataclass(frozen=True)
class Options:
    """What the command line says; each benchmark uses what has a meaning for it."""

    size: int = 1024
    bookies: int = 1
    processes: int = 1
    seconds: float = 5.0
    rate: float = 1000.0
    messages: int = 1_000_000
    runs: int = 3
    seed: int = 1
    url: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rehearses(self) -> bool:
        """Less than REHEARSAL_S is measured: the figure says nothing, and the run shows that the benchmark works. What
        is measured then is small, and so is what comes before."""
        return self.seconds < REHEARSAL_S

    def at_most(self, usual_s: float) -> float:
        """Of a warm-up, of a settling: no longer than what is measured, in a rehearsal."""
        return min(usual_s, self.seconds) if self.rehearses else usual_s


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
    """What a process costs: `cpu_s` from its making on (or from the start of the process), `peak_rss_mb`, `rss_mb`.

    `tree`: with all its descendants that live, added up (Spark's JVM and its Python workers), but for those in `apart`.
    """

    def __init__(self, pid: int, *, from_start: bool = False, tree: bool = False, apart: Collection[int] = ()) -> None:
        self.pid, self._tree, self._apart = pid, tree, apart
        self._cpu0 = {} if from_start else {each: used["cpu_s"] for each, used in self._each()}

    def _each(self) -> Iterator[tuple[int, dict[str, float]]]:
        """What each process used since its start; one that ended just now is left out."""
        for pid in _with_descendants(self.pid, self._apart) if self._tree else [self.pid]:
            try:
                status = dict(line.split(":", 1) for line in _proc(pid, "status").splitlines() if ":" in line)
                used = {"cpu_s": read_cpu_s(pid)}
            except OSError:
                continue
            for name, field_ in (("peak_rss_mb", "VmHWM"), ("rss_mb", "VmRSS")):
                used[name] = int(status.get(field_, "0").split()[0]) / 1024
            yield pid, used

    def read(self) -> dict[str, float]:
        total = {"cpu_s": 0.0, "peak_rss_mb": 0.0, "rss_mb": 0.0}
        for pid, used in self._each():
            used["cpu_s"] -= self._cpu0.get(pid, 0.0)
            total = {name: total[name] + used[name] for name in total}
        return {name: round(value, 3 if name == "cpu_s" else 1) for name, value in total.items()}


def shared_mb(pid: int) -> float:
    """Memory of a process and its descendants, where what several of them share is counted once (Pss)."""
    rollups = [_proc(each, "smaps_rollup") for each in _with_descendants(pid, ())]
    return sum(int(text.partition("\nPss:")[2].split()[0]) for text in rollups) / 1024


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def read_cpu_s(pid: int) -> float:
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_waited_s(pid: int) -> float:
    """Seconds that the threads of a process were ready to run and had no processor, added up."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def _with_descendants(pid: int, apart: Collection[int]) -> list[int]:
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split() if int(child) not in apart]
            except OSError:
                continue
    return found


class Server:
    """A `magnetar standalone` process of ours; killed by pid, never by name."""

    command: tuple[str, ...] = ("-m", "magnetar.cli.main")
    has_input = False

    def __init__(self, directory: str, bookies: int, *more: str, processes: int = 1) -> None:
        self.directory, self.bookies = directory, bookies
        self.more = (*more, *(["--processes", str(processes)] if processes > 1 else []))
        self.process: subprocess.Popen[str] | None = None
        self.url = self.pulsar_url = self.http_url = self.metrics_url = ""

    def start(self) -> float:
        """Starts it and waits for its `ready` line; the seconds that took."""
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *self.command, "standalone",
             "--data", self.directory, "--port", "0", "--bookies", str(self.bookies), *self.more],
            stdin=subprocess.PIPE if self.has_input else None, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("ready "):
                self.url = line.split()[1]
                self.pulsar_url = line.partition("pulsar=")[2].split(" ")[0].strip()
                self.http_url = line.partition("http=")[2].split(" ")[0].strip()
                self.metrics_url = f"http://{line.partition(' metrics=')[2].split(' ')[0].strip()}/metrics"
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


S = TypeVar("S", bound="Server")


@contextmanager
def server(
    bookies: int = 1, *more: str, start: bool = True, processes: int = 1, made: type[S] = Server  # type: ignore[assignment]
) -> Iterator[S]:
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    running = made(directory, bookies, *more, processes=processes)
    try:
        if start:
            running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def measured(run: Run, *, tree: bool = False, **pids: int) -> Iterator[None]:
    """Notes what this process and the named ones, with their descendants, cost during the block; `tree`: with ours."""
    usages = {"client": Usage(os.getpid(), tree=tree, apart=pids.values())} | {
        name: Usage(pid, tree=True) for name, pid in pids.items()
    }
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
        "build": build_kind(),
        "seed": options.seed,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def load(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(path).read_text())
    return loaded
