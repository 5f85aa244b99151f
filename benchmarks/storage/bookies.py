"""journal and ledger: the storage below the broker, in this process, on a real disk with real syncs."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ..harness import Options, Run, measured, percentiles
from ..messaging import payloads

OUTSTANDING_BYTES = 4 << 20
"""Under way at most, as a broker under load keeps it."""


def in_directory(main: Callable[[str], Awaitable[Run]]) -> Run:
    """Runs it in a loop of its own, with a folder that goes with it."""
    from magnetar.runtime.process import run_process

    result: list[Run] = []

    async def inside() -> None:
        directory = tempfile.mkdtemp(prefix="magnetar-bench-")
        try:
            result.append(await main(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    if (code := run_process(inside)) != 0:
        raise RuntimeError(f"the benchmark ended with code {code}")
    return result[0]


class Outstanding:
    """Keeps so many operations under way and takes their latencies."""

    def __init__(self, count_max: int) -> None:
        self.count_max, self.waiting, self.samples = (
            count_max,
            deque[tuple[float, asyncio.Future[Any]]](),
            list[float](),
        )

    async def add(self, future: asyncio.Future[Any]) -> None:
        self.waiting.append((time.perf_counter(), future))
        if len(self.waiting) >= self.count_max:
            await self.first()

    async def first(self) -> None:
        began, future = self.waiting.popleft()
        await future
        self.samples.append(time.perf_counter() - began)

    async def all(self) -> None:
        while self.waiting:
            await self.first()


def journal(options: Options) -> Run:
    """Records of --size bytes into one bookie's store: MB/s, each acknowledged after its sync."""

    async def main(directory: str) -> Run:
        from magnetar.bookie.store.store import Store
        from magnetar.ledger.peer_format import LEDGER_KEY_BYTES, Status
        from magnetar.runtime.process import make_system_world

        store = await Store.open(make_system_world(), directory, os.urandom(16))
        contents, key = payloads(options.size, options.seed, 64), bytes(LEDGER_KEY_BYTES)
        outstanding = Outstanding(max(2, OUTSTANDING_BYTES // options.size))
        run, entry = Run(0.0), 0

        async def stretch(seconds: float) -> float:
            nonlocal entry
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                content = contents[entry % len(contents)]
                status = store.add_entry(1, entry, key, (content,), len(content), entry - 1, False)
                if status is Status.BUSY:
                    await asyncio.sleep(0.001)
                    continue
                assert status is Status.OK, status
                entry += 1
                await outstanding.add(asyncio.ensure_future(store.seal_group_and_wait()))
            await outstanding.all()
            return time.perf_counter() - begin

        try:
            await stretch(options.at_most(1.0))
            outstanding.samples.clear()
            before = entry
            with measured(run):
                elapsed = await stretch(options.seconds)
            run.value = (entry - before) * options.size / elapsed / 1e6
            run.latencies_ms = percentiles(outstanding.samples)
            run.detail = {"records": entry - before}
        finally:
            await store.close()
        return run

    return in_directory(main)


def ledger(options: Options) -> Run:
    """Entries of --size bytes through the ledger library to --bookies bookies over loopback: entries/s."""

    async def main(directory: str) -> Run:
        from magnetar.bookie.server import Bookie, BookieConfig
        from magnetar.ledger.client import LedgerClient
        from magnetar.metadata.sqlite import SqliteStore
        from magnetar.runtime.process import make_system_world

        world, copies = make_system_world(), options.bookies
        tree = await SqliteStore.open(world, os.path.join(directory, "metadata"))
        bookies, client = [], LedgerClient(world, tree.new_session())
        try:
            for number in range(copies):
                config = BookieConfig(data=os.path.join(directory, f"bookie-{number}"))
                bookies.append(await Bookie.start(world, config, tree.new_session()))
            writer = await client.create(ensemble_size=copies, write_quorum=copies, ack_quorum=copies // 2 + 1)
            contents = payloads(options.size, options.seed)
            outstanding = Outstanding(max(2, min(5_000, OUTSTANDING_BYTES // options.size)))
            run, count = Run(0.0), 0

            async def stretch(seconds: float) -> float:
                nonlocal count
                begin = time.perf_counter()
                while time.perf_counter() - begin < seconds:
                    for _ in range(16):
                        await outstanding.add(writer.append(contents[count % len(contents)]))
                        count += 1
                await outstanding.all()
                return time.perf_counter() - begin

            await stretch(options.at_most(1.0))
            outstanding.samples.clear()
            before = count
            with measured(run):
                elapsed = await stretch(options.seconds)
            run.value = (count - before) / elapsed
            run.latencies_ms = percentiles(outstanding.samples)
            run.detail = {"entries": count - before, "mb_s": run.value * options.size / 1e6}
            await writer.close()
        finally:
            await client.close()
            for bookie in bookies:
                await bookie.close()
            await tree.close()
        return run

    return in_directory(main)
