"""store-add and store-latency: adds into one bookie *process* over its socket, through the ledger library.

The bookie is a process of its own (`python -m benchmarks.storage.adds DIRECTORY SETTINGS`), on a real disk with real
syncs; it ends when its standard input does, then it prints statistics. The client is this process: a ledger with one
copy (E = Qw = Qa = 1), so that what is measured is one bookie.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..harness import ROOT, Options, Run, Usage, percentiles
from ..messaging import payloads
from .bookies import in_directory

if TYPE_CHECKING:
    from magnetar.bookie.store.store import Store
    from magnetar.ledger import LedgerWriter

OUTSTANDING_BYTES = 8 << 20
"""Under way at most: what a bookie needs to sync one block, write the next and receive a third, of 1 MiB each, and as
much again on both sides of the socket."""

RAW_BLOCK_BYTES = 1 << 20
RAW_FILE_BYTES = 128 << 20
WARM_UP_S = 1.0


class BookieProcess:
    """A bookie and its metadata in a process of its own."""

    def __init__(self, directory: str, **settings: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.storage.adds", directory, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        word, self.id, self.endpoint = self.process.stdout.readline().split()
        assert word == "ready", word

    def compact(self) -> None:
        """Begins; see `serve`."""
        assert self.process.stdin is not None
        self.process.stdin.write("compact\n")
        self.process.stdin.flush()

    def stop(self) -> dict[str, int]:
        """Its statistics."""
        out, _ = self.process.communicate()
        found: dict[str, int] = json.loads(out)
        return found


async def serve(directory: str, settings: dict[str, Any]) -> int:
    """The process's own main: serves until standard input ends. `sparse`: bytes of old data, of which 60 % is deleted,
    put there first; a line on standard input then starts a major compaction of it."""
    from magnetar.bookie.server import Bookie, BookieConfig
    from magnetar.bookie.store.store import StoreConfig
    from magnetar.metadata.sqlite import SqliteStore
    from magnetar.runtime.process import freeze_objects, make_system_world

    world = make_system_world()
    metadata = await SqliteStore.open(world, ":memory:")
    sparse = settings.pop("sparse", 0)
    bookie = await Bookie.start(
        world, BookieConfig(data=directory, store=StoreConfig(**settings)), metadata.new_session()
    )
    if sparse:
        await _fill(bookie.store, sparse)
    freeze_objects()  # as servers do
    print("ready", bookie.id, bookie.endpoint, flush=True)
    ended, compact = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: (compact if os.read(0, 4096) else ended).set())
    compacted = {"compacted_bytes": 0}
    compaction = asyncio.create_task(_compact(bookie.store, compact, compacted))
    await ended.wait()
    asyncio.get_running_loop().remove_reader(0)
    compaction.cancel()
    await asyncio.gather(compaction, return_exceptions=True)
    statistics = bookie.statistics() | compacted
    await bookie.close()
    await metadata.close()
    print(json.dumps(statistics), flush=True)
    return 0


async def _fill(store: Store, size: int) -> None:
    """Closed logs, of which 60 % are dead: ledgers of 1 MiB, written together."""
    from magnetar.ledger.peer_format import LEDGER_KEY_BYTES, Status
    from magnetar.ledger.reader_core import encode_header

    payload, key, ledgers = os.urandom(64 << 10), bytes(LEDGER_KEY_BYTES), range(1_000, 1_000 + (size >> 20))
    for ledger in ledgers:
        entries = []
        for entry in range(16):
            header = encode_header(ledger, entry, entry - 1, len(payload), (payload,))
            entries.append((entry, (header, payload), len(header) + len(payload)))
        total = sum(each for _, _, each in entries)
        if not store.has_room:
            await store.checkpoint()
        store.keys.record_key_of_metadata(ledger, key)
        assert store.add_entries(ledger, key, entries, total, 14, False) is Status.OK
        await store.seal_group_and_wait()
    await store.checkpoint()
    await store.delete_ledgers([ledger for ledger in ledgers if ledger % 5 < 3])
    await store.checkpoint()


async def _compact(store: Store, begin: asyncio.Event, compacted: dict[str, int]) -> None:
    """At the default rate; notes how far it came."""
    from magnetar.bookie.store.entrylog.mover import CompactionPolicy

    def progress(phase: str, logs_done: int, logs: int, bytes_done: int, bytes_: int) -> None:
        compacted["compacted_bytes"] = max(compacted["compacted_bytes"], bytes_done)

    await begin.wait()
    await store.compactor.run_compaction(CompactionPolicy(), major=True, on_progress=progress)


@asynccontextmanager
async def ledger_on(bookie: BookieProcess) -> AsyncIterator[LedgerWriter]:
    """A new ledger with one copy, on that bookie."""
    from magnetar.ledger import LedgerClient
    from magnetar.metadata import paths
    from magnetar.metadata.records import BookieRecord, encode_record
    from magnetar.metadata.sqlite import SqliteStore
    from magnetar.runtime.process import make_system_world

    world = make_system_world()
    tree = await SqliteStore.open(world, ":memory:")
    session = tree.new_session()
    path = paths.bookie(bookie.id)
    await session.put(path, encode_record(BookieRecord(bookie=bookie.id, endpoint=bookie.endpoint), path))
    client = LedgerClient(world, session)
    try:
        writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
        yield writer
        await writer.close()
    finally:
        await client.close()
        await tree.close()


def raw_synced_mb_s(directory: str, seconds: float) -> float:
    """What the disk takes in blocks of 1 MiB, one after the other, each synced, into a file that is there already."""
    path = os.path.join(directory, "raw")
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    block = os.urandom(RAW_BLOCK_BYTES)
    try:
        for offset in range(0, RAW_FILE_BYTES, RAW_BLOCK_BYTES):
            os.pwrite(file, block, offset)
        os.fdatasync(file)
        begin, written = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            os.pwrite(file, block, written % RAW_FILE_BYTES)
            os.fdatasync(file)
            written += RAW_BLOCK_BYTES
        return written / (time.perf_counter() - begin) / 1e6
    finally:
        os.close(file)
        os.unlink(path)


class Load:
    """Keeps OUTSTANDING_BYTES of adds under way, in turns of so many that about eight turns are under way."""

    def __init__(self, writer: LedgerWriter, contents: list[bytes]) -> None:
        self.writer = writer
        self.contents = contents
        self.per_turn = max(1, OUTSTANDING_BYTES // len(contents[0]) // 8)
        self.entries = 0
        self.samples: list[float] = []
        self._under_way: deque[tuple[float, asyncio.Future[int]]] = deque()

    async def run(self, seconds: float) -> float:
        begin = now = time.perf_counter()
        contents, append = self.contents, self.writer.append
        while now - begin < seconds:
            for at in range(self.per_turn):
                future = append(contents[at % len(contents)])
            self.entries += self.per_turn
            self._under_way.append((now, future))  # the last of the turn: adds are confirmed in order
            if len(self._under_way) >= 8:
                await self._first()
            else:
                await asyncio.sleep(0)
            now = time.perf_counter()
        while self._under_way:
            await self._first()
        return time.perf_counter() - begin

    async def _first(self) -> None:
        began, future = self._under_way.popleft()
        await future
        self.samples.append(time.perf_counter() - began)


def store_add(options: Options) -> Run:
    """Entries of --size bytes into one bookie process, as fast as it takes them: entries/s."""

    async def main(directory: str) -> Run:
        run = Run(0.0)
        raw = [raw_synced_mb_s(directory, 0.5)]
        bookie = BookieProcess(os.path.join(directory, "bookie"))
        try:
            async with ledger_on(bookie) as writer:
                load = Load(writer, payloads(options.size, options.seed, max(1, (4 << 20) // options.size)))
                await load.run(WARM_UP_S)
                load.samples.clear()
                before = load.entries
                used = {"client": Usage(os.getpid()), "bookie": Usage(bookie.process.pid)}
                elapsed = await load.run(options.seconds)
                run.processes = {name: usage.read() for name, usage in used.items()}
        finally:
            statistics = bookie.stop()
        raw.append(raw_synced_mb_s(directory, 0.5))
        entries = load.entries - before
        run.value = entries / elapsed
        run.latencies_ms = percentiles(load.samples)
        mb_s, raw_mb_s = run.value * options.size / 1e6, sum(raw) / len(raw)
        run.detail = {
            "mb_s": round(mb_s, 1), "raw_mb_s": round(raw_mb_s, 1), "ratio": round(mb_s / raw_mb_s, 3),
            **{f"{name}_us_per_entry": round(cost["cpu_s"] * 1e6 / entries, 2) for name, cost in run.processes.items()},
            "blocks": statistics["journal_blocks"], "checkpoints": statistics["checkpoints"],
            "requests": statistics["requests"], "busy": statistics["busy"],
        }  # fmt: skip
        return run

    return in_directory(main)


async def arrivals(writer: LedgerWriter, contents: list[bytes], rate: float, seconds: float) -> list[float]:
    """Adds that arrive `rate` times a second whatever becomes of those before; how long each took, in seconds.

    Counted from the moment when it was to arrive, not from when this process found the time to send it: who is late
    because the bookie was slow is late by the bookie's fault (no coordinated omission).
    """
    done: list[tuple[int, int, float]] = []  # entries first, behind the last, and when they were confirmed
    clock = time.perf_counter
    begin, sent, count = clock(), 0, int(rate * seconds)
    last: asyncio.Future[int] | None = None
    while sent < count:
        due = min(count, int((clock() - begin) * rate) + 1)
        first = sent
        while sent < due:
            last = writer.append(contents[sent % len(contents)])
            sent += 1
        if last is not None and sent > first:
            last.add_done_callback(lambda _, a=first, b=sent: done.append((a, b, clock() - begin)))  # type: ignore[misc]
        await asyncio.sleep(0.0005)
    if last is not None:
        await last
    return [at - entry / rate for first, end, at in done for entry in range(first, end)]


QUIET = {"memtable_bytes": 1 << 30, "journal_bytes": 1 << 30, "log_bytes_max": 2 << 30,
         "journal_segment_bytes": 512 << 20, "journal_first_segment_bytes": 512 << 20}  # fmt: skip
"""No checkpoint, and no journal to be filled ahead, within a stretch."""

BUSY = {"log_bytes_max": 256 << 20, "sparse": 512 << 20}
"""Checkpoints as by default, and two closed logs to compact, at the default rate: more than a stretch takes."""


def store_latency(options: Options) -> Run:
    """p99 of an add at half the highest rate, with checkpoints and compaction running, by p99 without: a ratio."""

    async def main(directory: str) -> Run:
        from magnetar.runtime.process import freeze_objects

        contents = payloads(options.size, options.seed, max(1, (4 << 20) // options.size))
        freeze_objects()  # the load too: its own pauses are no latency of the bookie
        rate = await _highest_rate(os.path.join(directory, "highest"), contents) / 2
        samples: dict[str, list[float]] = {"quiet": [], "busy": []}
        for name in ("quiet", "busy", "busy", "quiet"):  # what else the machine does meets both alike
            settings = QUIET if name == "quiet" else BUSY
            took, statistics = await _stretch(
                os.path.join(directory, name), settings, contents, rate, options.seconds / 2
            )
            samples[name] += took
            if name == "busy":
                work = statistics
        without, with_ = percentiles(samples["quiet"]), percentiles(samples["busy"])
        run = Run(with_["p99"] / without["p99"], latencies_ms=with_)
        run.detail = {
            "rate": round(rate), **{f"without_{name}_ms": round(value, 3) for name, value in without.items()},
            "checkpoints": work["checkpoints"], "compacted_bytes": work["compacted_bytes"],
        }  # fmt: skip
        return run

    return in_directory(main)


async def _highest_rate(directory: str, contents: list[bytes]) -> float:
    bookie = BookieProcess(directory)
    try:
        async with ledger_on(bookie) as writer:
            load = Load(writer, contents)
            await load.run(WARM_UP_S)
            before = load.entries
            elapsed = await load.run(2.0)
            return (load.entries - before) / elapsed
    finally:
        bookie.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def _stretch(
    directory: str, settings: dict[str, int], contents: list[bytes], rate: float, seconds: float
) -> tuple[list[float], dict[str, int]]:
    """(latencies, statistics of the bookie)"""
    bookie = BookieProcess(directory, **settings)
    try:
        async with ledger_on(bookie) as writer:
            await arrivals(writer, contents, rate, WARM_UP_S)
            if "sparse" in settings:
                bookie.compact()
            samples = await arrivals(writer, contents, rate, seconds)
    finally:
        statistics = bookie.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return samples, statistics


if __name__ == "__main__":
    from magnetar.runtime.process import run_process as run_process

    sys.exit(run_process(lambda: serve(sys.argv[1], json.loads(sys.argv[2]))))
