"""bookie-killed, broker-killed: how long nothing is acknowledged when a process fails under full load.

The cluster is metadata, bookies and brokers as single processes on this machine; one producer keeps as much under way
as `produce` does, with three copies of which two are synced.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .harness import Options, Run
from .messaging import TOPIC, _producer, payloads

WARM_UP_S = 2.0
HANG_S = 6.0
"""Longer than the time-out of an add (5 s)."""
SESSION_TIMEOUT_S = 2.0


class Load:
    """Sends as fast as acks allow, in a thread of its own, and keeps the longest time without an ack."""

    def __init__(self, producer: Any, contents: list[bytes]) -> None:
        self._producer, self._contents = producer, contents
        self._over = threading.Event()
        self._last = 0.0
        self.gap_s = self.gap_ended = 0.0
        self.acked = self.failed = 0
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        count, number = len(self._contents), 0
        while not self._over.is_set():
            self._producer.send_async(self._contents[number % count], self._done)
            number += 1

    def _done(self, result: Any, _id: Any) -> None:
        import magnetar

        if result != magnetar.Result.Ok:
            self.failed += 1
            return
        now = time.perf_counter()
        if now - self._last > self.gap_s:
            self.gap_s, self.gap_ended = now - self._last, now
        self._last = now
        self.acked += 1

    def begin(self) -> None:
        """Forgets what was."""
        self._last, self.gap_s = time.perf_counter(), 0.0

    def longest_gap_s(self) -> float:
        """Since `begin`, the one that has not ended included."""
        return max(self.gap_s, time.perf_counter() - self._last)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        self._producer.flush()


@contextmanager
def loaded(options: Options, **shape: Any) -> Iterator[tuple[Any, Load]]:
    """A cluster of the shape, under load and warm."""
    import magnetar
    from magnetar.cli.common.processes import Cluster

    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), **shape) as cluster, magnetar.Client(cluster.url) as client:
            load = Load(_producer(client), payloads(options.size, options.seed))
            time.sleep(min(WARM_UP_S, options.seconds))
            yield cluster, load
            load.stop()
            assert load.failed == 0, f"{load.failed} messages were given up"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def ask(cluster: Any, *arguments: str) -> Any:
    """What `magnetar ARGUMENTS… -o json` answers."""
    command = [sys.executable, "-m", "magnetar.cli.main", *arguments, "--url", cluster.url, "-o", "json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)


def _writing_to(cluster: Any) -> Any:
    """The process of the first bookie of the ledger that the topic is written to."""
    (uuid, *_) = ask(cluster, "topics", "stats-internal", TOPIC)["ledgers"][-1]["bookies"]
    for bookie in cluster.bookies:
        if any(f"id={uuid}" in line.split() for line in bookie.lines):
            return bookie
    raise RuntimeError(f"no process is bookie {uuid}")


def _gaps(options: Options, bookies: int, sign: signal.Signals) -> tuple[float, float]:
    """The longest gaps in ms, before and after a bookie of the ensemble got the signal."""
    with loaded(options, bookies=bookies, brokers=1) as (cluster, load):
        load.begin()
        time.sleep(options.seconds / 2)
        before = load.longest_gap_s()
        bookie = _writing_to(cluster)
        load.begin()
        os.kill(bookie.pid, sign)
        try:
            time.sleep(options.seconds if sign is signal.SIGKILL else HANG_S + options.seconds / 2)
            after = load.longest_gap_s()
        finally:
            if sign is signal.SIGSTOP:
                os.kill(bookie.pid, signal.SIGCONT)
    return round(before * 1000, 1), round(after * 1000, 1)


def bookie_killed(options: Options) -> Run:
    """Longest time without an ack after kill -9 of one of three bookies, with a fourth there or not; the worse of them.

    In `detail` also of the time before, and (from --seconds 1 on) of a bookie that hangs (SIGSTOP) until adds time out.
    """
    run = Run(0.0)
    cases = (("killed", signal.SIGKILL), ("hanging", signal.SIGSTOP))
    for what, sign in cases[:1] if options.rehearses else cases:
        for bookies in (4, 3):
            before, after = _gaps(options, bookies, sign)
            run.detail[f"{what}_of_{bookies}_ms"] = after
            run.detail[f"{what}_of_{bookies}_before_ms"] = before
    run.value = max(run.detail["killed_of_4_ms"], run.detail["killed_of_3_ms"])
    return run


def broker_killed(options: Options) -> Run:
    """Time from kill -9 of the broker that owns the topic to the first ack by the other one; session time-out 2 s."""
    with loaded(options, bookies=3, brokers=2, session_timeout_s=SESSION_TIMEOUT_S) as (cluster, load):
        (found,) = ask(cluster, "topics", "lookup", TOPIC)
        owner = next(broker for broker in cluster.brokers if found["broker"].endswith(broker.address))
        load.begin()
        killed = time.perf_counter()
        owner.kill()
        deadline = killed + 30
        while load.gap_s < 0.5 and time.perf_counter() < deadline:
            time.sleep(0.05)
        assert load.gap_s >= 0.5, "no other broker took the topic over within 30 s"
        time.sleep(1.0)
        return Run(round((load.gap_ended - killed) * 1000, 1), detail={"gap_ms": round(load.gap_s * 1000, 1)})
