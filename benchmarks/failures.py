"""bookie-killed, broker-killed: how long nothing is acknowledged when a process of a real cluster fails under full load.

The cluster is metadata, bookies and brokers as single processes on this machine; one producer keeps as much under way
as `produce` does, with three copies of which two are synced.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .harness import Options, Run
from .messaging import TOPIC, _producer, payloads

WARM_UP_S = 2.0
BEFORE_S = 1.5
"""Of load before the failure, for the gaps of an undisturbed cluster."""
AFTER_KILL_S = 4.0
AFTER_HANG_S = 9.0
"""Longer than the time-out of an add (5 s)."""
SESSION_TIMEOUT_S = 2.0

T = TypeVar("T")


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
    from magnetar.cli.processes import Cluster

    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), **shape) as cluster, magnetar.Client(cluster.url) as client:
            load = Load(_producer(client), payloads(options.size, options.seed))
            time.sleep(WARM_UP_S)
            yield cluster, load
            load.stop()
            assert load.failed == 0, f"{load.failed} messages were given up"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def ask(cluster: Any, question: Callable[[Any], Awaitable[T]]) -> T:
    """An answer out of the cluster's metadata."""
    from magnetar.metadata.remote import connect_metadata
    from magnetar.runtime.network import Endpoint
    from magnetar.runtime.process import real_world

    async def inside() -> T:
        store = await connect_metadata(real_world(), Endpoint.parse(cluster.metadata.address))
        try:
            return await question(store)
        finally:
            await store.close()

    return asyncio.run(inside())


async def _ensemble(store: Any) -> tuple[str, ...]:
    """The bookies of the ledger that the topic is written to."""
    from magnetar.metadata import paths
    from magnetar.metadata.records import LedgerRecord, TopicRecord, decode

    topic = await store.get(paths.topic("public", "default", TOPIC))
    ledger = await store.get(paths.ledger(decode(topic.value, TopicRecord).ledgers[-1].ledger_id))
    return tuple(decode(ledger.value, LedgerRecord).fragments[-1].bookies)


async def _owner(store: Any) -> str:
    """The address of the broker that owns the namespace's only bundle that is owned."""
    from magnetar.metadata import paths
    from magnetar.metadata.records import OwnerRecord, decode

    folder = f"{paths.OWNERS}/public/default"
    (bundle,) = await store.children(folder)
    return decode((await store.get(f"{folder}/{bundle}")).value, OwnerRecord).endpoint


def _bookie_of(cluster: Any, uuid: str) -> Any:
    for bookie in cluster.bookies:
        if any(f"id={uuid}" in line.split() for line in bookie.lines):
            return bookie
    raise RuntimeError(f"no process is bookie {uuid}")


def _gaps(options: Options, bookies: int, sign: signal.Signals) -> tuple[float, float]:
    """The longest gaps in ms, before and after a bookie of the ensemble got the signal."""
    with loaded(options, bookies=bookies, brokers=1) as (cluster, load):
        load.begin()
        time.sleep(BEFORE_S)
        before = load.longest_gap_s()
        bookie = _bookie_of(cluster, ask(cluster, _ensemble)[0])
        load.begin()
        os.kill(bookie.pid, sign)
        try:
            time.sleep(AFTER_KILL_S if sign is signal.SIGKILL else AFTER_HANG_S)
            after = load.longest_gap_s()
        finally:
            if sign is signal.SIGSTOP:
                os.kill(bookie.pid, signal.SIGCONT)
    return round(before * 1000, 1), round(after * 1000, 1)


def bookie_killed(options: Options) -> Run:
    """Longest time without an ack after kill -9 of one of three bookies, with a fourth there or not; the worse of them.

    In `detail` also with a bookie that hangs (SIGSTOP): there an add has to time out first.
    """
    run = Run(0.0)
    for what, sign in (("killed", signal.SIGKILL), ("hanging", signal.SIGSTOP)):
        for bookies in (4, 3):
            before, after = _gaps(options, bookies, sign)
            run.detail[f"{what}_of_{bookies}_ms"] = after
            run.detail[f"{what}_of_{bookies}_before_ms"] = before
    run.value = max(run.detail["killed_of_4_ms"], run.detail["killed_of_3_ms"])
    return run


def broker_killed(options: Options) -> Run:
    """Time from kill -9 of the broker that owns the topic to the first ack by the other one; session time-out 2 s."""
    with loaded(options, bookies=3, brokers=2, session_timeout_s=SESSION_TIMEOUT_S) as (cluster, load):
        address = ask(cluster, _owner)
        owner = next(broker for broker in cluster.brokers if broker.address == address)
        load.begin()
        killed = time.perf_counter()
        owner.kill()
        deadline = killed + 30
        while load.gap_s < 0.5 and time.perf_counter() < deadline:
            time.sleep(0.05)
        assert load.gap_s >= 0.5, "no other broker took the topic over within 30 s"
        time.sleep(1.0)
        return Run(round((load.gap_ended - killed) * 1000, 1), detail={"gap_ms": round(load.gap_s * 1000, 1)})
