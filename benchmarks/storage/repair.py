"""repair, repair-disturb: copies of a dead bookie are made again, as fast as it goes, and beside producers.

Metadata, bookies and broker are single processes on this machine. Ledgers of 128 KiB entries are written on three
bookies, so that each has a copy of everything; then a fourth is started and one of the three is killed and given up.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..harness import Options, Run, measured, percentiles, progress
from ..messaging import Paced, payloads

ENTRY_BYTES = 128 << 10
LEDGER_BYTES = 256 << 20
SETTINGS = """
[bookie]
upkeep_interval_s = 1.0
[bookie.repair]
audit_interval_s = 0.5
poll_interval_s = 0.5
retry_min_s = 0.5
lost_bookie_grace_s = 3600.0
check_pass_s = 0.0
{limit}
"""
T = TypeVar("T")

POLL_S = 0.05
GIVE_UP_S = 900.0
ROUNDS = 3
RATE_MAX = 250.0
SWITCH_S = 2.0
"""Until every worker has heard that it may copy, or may not (`poll_interval_s`), and has done so."""


@dataclass
class Deployment:
    """The processes, and a session of their metadata."""

    processes: Any
    tree: Any
    settings: Path
    metadata: str
    bookies: list[Any]
    runner: asyncio.Runner  # one loop for all: gRPC wants no second one

    def start_bookie(self) -> Any:
        name = f"bookie-{len(self.bookies)}"
        where = ("--metadata", self.metadata, "--session-timeout", "2", "--config", str(self.settings))
        folder = str(self.settings.parent / name)
        bookie = self.processes.start(name, "bookie", "--listen", "127.0.0.1:0", *where, "--data", folder)
        self.bookies.append(bookie)
        return bookie

    def id_of(self, bookie: Any) -> str:
        bookie.wait_ready()
        words = next(line for line in bookie.lines if line.startswith("ready ")).split()
        return next(word for word in words if word.startswith("id=")).partition("=")[2]

    def run(self, work: Callable[[Any, Any], Awaitable[T]]) -> T:
        """`work(world, metadata)` in an event loop of its own."""
        from magnetar.metadata.remote import connect_metadata
        from magnetar.runtime.network import Endpoint
        from magnetar.runtime.process import make_system_world

        async def main() -> T:
            world = make_system_world()
            metadata = await connect_metadata(world, Endpoint.parse(self.metadata), 30.0)
            try:
                return await work(world, metadata)
            finally:
                await metadata.close()

        return self.runner.run(main())


@contextmanager
def deployment(limit: str) -> Iterator[Deployment]:
    from magnetar.cli.common.processes import Processes

    directory = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    settings = directory / "settings.toml"
    settings.write_text(SETTINGS.format(limit=limit))
    try:
        with Processes(directory) as processes, asyncio.Runner() as runner:
            tree = processes.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", str(directory / "tree"))
            made = Deployment(processes, tree, settings, tree.address, [], runner)
            for _ in range(3):
                made.start_bookie()
            for bookie in made.bookies:
                bookie.wait_ready()
            yield made
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _fill(world: Any, metadata: Any, size: int, seed: int) -> int:
    """Closed ledgers of `size` bytes together; how many."""
    from magnetar.ledger import LedgerClient, LedgerConfig

    client = LedgerClient(world, metadata, LedgerConfig(add_timeout_s=30.0, quorum_timeout_s=60.0))
    contents = payloads(ENTRY_BYTES, seed, 16)
    ledgers = 0
    try:
        while size > 0:
            writer = await client.create()
            ledgers += 1
            for number in range(min(size, LEDGER_BYTES) // ENTRY_BYTES):
                future = writer.append(contents[number % len(contents)])
                if writer.pending_entries > 64:
                    await future
            await writer.close()
            size -= LEDGER_BYTES
    finally:
        await client.close()
    return ledgers


async def _give_up(metadata: Any, bookie: str) -> None:
    from magnetar.metadata import paths
    from magnetar.metadata.records import DepartingRecord, encode_record

    async def unregistered() -> bool:
        return await metadata.get(paths.bookie(bookie)) is None

    await _until(unregistered)
    await metadata.put(
        paths.departing_bookie(bookie), encode_record(DepartingRecord(bookie=bookie), paths.departing_bookie(bookie))
    )


async def _left(metadata: Any) -> int:
    from magnetar.metadata import paths

    return len(await metadata.children(paths.UNDER_REPLICATED_LEDGERS))


async def _until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while not await what():  # noqa: ASYNC110 - the processes do not tell
            await asyncio.sleep(POLL_S)


def repair(options: Options) -> Run:
    """MB/s of copies: --gib of 128 KiB entries that lay on a dead bookie, onto an empty one, without a limit."""
    size = int(options.extra.get("gib", 2)) << 30
    if options.rehearses:
        size //= 32
    with deployment("bytes_per_s = 0") as made:
        ledgers = made.run(lambda world, metadata: _fill(world, metadata, size, options.seed))
        progress(f"{ledgers} ledgers are written")
        dead = made.id_of(made.bookies[0])
        new = made.start_bookie()
        new.wait_ready()
        made.bookies[0].kill()

        async def measure(world: Any, metadata: Any) -> float:
            await _give_up(metadata, dead)

            async def over() -> bool:
                return await _left(metadata) == 0

            begin = time.perf_counter()
            async with asyncio.timeout(GIVE_UP_S):
                while not await _left(metadata):
                    await asyncio.sleep(POLL_S)
                    begin = time.perf_counter()
            await _until(over)
            return time.perf_counter() - begin

        run = Run(0.0)
        alive = {each.name: each.pid for each in made.bookies[1:]}
        with measured(run, metadata=made.tree.pid, **alive):
            seconds = made.run(measure)
        moved = made.run(lambda world, metadata: _named(metadata, dead))
        assert moved == 0, f"{moved} ledgers still name the dead bookie"
        run.value = size / seconds / 1e6
        run.detail = {"seconds": round(seconds, 3), "bytes": size, "ledgers": ledgers}
        return run


async def _named(metadata: Any, bookie: str) -> int:
    from magnetar.bookie.maintenance import marks
    from magnetar.bookie.maintenance.repair_core import list_bookies_of_ledger
    from magnetar.metadata import paths

    records = [
        await marks.read_ledger_record(metadata, each) for each in await marks.list_ledger_ids(metadata, paths.LEDGERS)
    ]
    return sum(record is not None and bookie in list_bookies_of_ledger(record) for record in records)


def repair_disturb(options: Options) -> Run:
    """p99 of single sends while a dead bookie's copies are made with the default limit, by that without any.

    ROUNDS times, one after the other: --seconds without, --seconds with. So what drifts (a disk that writes back, other
    work on the machine) is in both; the samples of all rounds count together. The copies must not be through before.
    At most RATE_MAX sends per second: near what the machine can do, the time in queues is measured and not the copies.
    """
    import magnetar

    size = max(1, int(options.extra.get("gib", 2))) << 30
    if options.rehearses:
        size //= 32
    with deployment("") as made:
        made.run(lambda world, metadata: _switch(metadata, False))
        made.run(lambda world, metadata: _fill(world, metadata, size, options.seed))
        dead = made.id_of(made.bookies[0])
        made.start_bookie().wait_ready()
        made.bookies[0].kill()
        made.run(lambda world, metadata: _give_up(metadata, dead))
        os.sync()
        broker = made.processes.start("broker", "broker", "--listen", "127.0.0.1:0", "--metadata", made.metadata)
        samples: dict[bool, list[float]] = {False: [], True: []}
        with magnetar.Client(broker.wait_ready()) as client:
            paced = Paced(client, payloads(options.size, options.seed), min(options.rate, RATE_MAX))
            paced.stretch(min(5.0, options.seconds))
            for on in (False, True) * (1 if options.rehearses else ROUNDS):
                made.run(lambda world, metadata, on=on: _switch(metadata, on))
                time.sleep(min(SWITCH_S, options.seconds))
                paced.stretch(options.seconds)
                samples[on] += paced.samples
                progress(f"repair {'on' if on else 'off'}: p99 {percentiles(paced.samples)['p99']:.1f} ms")
            left = made.run(lambda world, metadata: _left(metadata))
        assert left or options.rehearses, "the copies were through before the last stretch was: more --gib"
        quiet, busy = percentiles(samples[False]), percentiles(samples[True])
        return Run(
            busy["p99"] / quiet["p99"], latencies_ms=busy,
            detail={"quiet_p50_ms": quiet["p50"], "quiet_p99_ms": quiet["p99"], "busy_p99_ms": busy["p99"],
                    "ledgers_left": left},
        )  # fmt: skip


async def _switch(metadata: Any, on: bool) -> None:
    """Auto-recovery on or off, and heard of by the auditor when on."""
    from magnetar.bookie.maintenance import marks

    await marks.set_repair_enabled(metadata, on)

    async def marked() -> bool:
        return not on or await _left(metadata) > 0

    await _until(marked)
