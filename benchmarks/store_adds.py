"""store-add and store-latency: adds into one bookie *process* over its socket, through the ledger library.

The bookie is a process of its own (`python -m benchmarks.store_adds DIRECTORY SETTINGS`), on a real disk with real
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
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .harness import ROOT, Options, Run, Usage, percentiles
from .messaging import payloads

if TYPE_CHECKING:
    from magnetar.bookie.ledger import LedgerWriter

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
            [sys.executable, "-m", "benchmarks.store_adds", directory, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        word, self.id, self.endpoint = self.process.stdout.readline().split()
        assert word == "ready", word

    def stop(self) -> dict[str, int]:
        """Its statistics."""
        out, _ = self.process.communicate()
        found: dict[str, int] = json.loads(out)
        return found


async def serve(directory: str, settings: dict[str, Any]) -> int:
    """The process's own main: serves until standard input ends."""
    from magnetar.bookie.server import Bookie, BookieConfig
    from magnetar.bookie.store.store import StoreConfig
    from magnetar.metadata.sqlite import SqliteStore
    from magnetar.runtime.process import real_world

    world = real_world()
    metadata = await SqliteStore.open(world, ":memory:")
    store = StoreConfig(**settings)
    bookie = await Bookie.start(world, BookieConfig(data=directory, store=store), metadata.session())
    print("ready", bookie.id, bookie.endpoint, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: None if os.read(0, 4096) else ended.set())
    await ended.wait()
    asyncio.get_running_loop().remove_reader(0)
    statistics = bookie.statistics()
    await bookie.close()
    await metadata.close()
    print(json.dumps(statistics), flush=True)
    return 0


@asynccontextmanager
async def ledger_on(bookie: BookieProcess) -> AsyncIterator[LedgerWriter]:
    """A new ledger with one copy, on that bookie."""
    from magnetar.bookie.ledger import LedgerClient
    from magnetar.metadata import paths
    from magnetar.metadata.records import BookieRecord, encode
    from magnetar.metadata.sqlite import SqliteStore
    from magnetar.runtime.process import real_world

    world = real_world()
    tree = await SqliteStore.open(world, ":memory:")
    session = tree.session()
    await session.put(paths.bookie(bookie.id), encode(BookieRecord(bookie=bookie.id, endpoint=bookie.endpoint)))
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

    return _run(main)


def _run(main: Callable[[str], Awaitable[Run]]) -> Run:
    from magnetar.runtime.process import run

    result: list[Run] = []

    async def inside() -> None:
        directory = tempfile.mkdtemp(prefix="magnetar-bench-")
        try:
            result.append(await main(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    if (code := run(inside)) != 0:
        raise RuntimeError(f"the benchmark ended with code {code}")
    return result[0]


if __name__ == "__main__":
    from magnetar.runtime.process import run as run_process

    sys.exit(run_process(lambda: serve(sys.argv[1], json.loads(sys.argv[2]))))
