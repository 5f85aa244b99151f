"""store-many, store-read and store-read-small: what a bookie's store costs to start and how fast it reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..harness import Options, Run, Usage, percentiles

if TYPE_CHECKING:
    from magnetar.bookie.store.store import Store
    from magnetar.runtime.network import World

UUID = bytes(range(16))
KEY = bytes(20)
LEDGERS = 1_000_000
LOOKS = 5_000
LARGE_BYTES = 128 << 10
OTHERS = 1_000
READ_MIB = 256
RANGE_BYTES = 1 << 20
SETTLE_S = 0.02
TURN = 64
"""Adds between two turns of the event loop, as a busy bookie takes them."""


def store_many(options: Options) -> Run:
    """A start with --ledgers ledgers of one entry of --size bytes each: seconds until it serves, cold page cache.

    Also what it adds to the memory of its process, look-ups (cold: every file read from the disk), and how long the
    event loop stood still at most while the ledgers were written.
    """
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        ledgers = options.extra.get("ledgers", LEDGERS)
        built = _apart(lambda: _build_many(directory, ledgers, options.size))
        found = _apart(lambda: _start_many(directory, ledgers, options.seed))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    run = Run(found["seconds"], found["cached_ms"])
    run.detail = {"ledgers": ledgers, **built, **{name: found[name] for name in found if name != "cached_ms"}}
    return run


async def _build_many(directory: str, ledgers: int, size: int) -> dict[str, Any]:
    world, store = await _open(directory)
    del world
    stalls = Stalls()
    began = time.perf_counter()
    waiting: list[asyncio.Future[bool]] = []
    payload = bytes(size)
    for first in range(0, ledgers, TURN):
        for ledger in range(first, min(first + TURN, ledgers)):
            await _add(store, ledger, 0, payload)
        waiting.append(asyncio.ensure_future(store.seal_group_and_wait()))
        if len(waiting) > 8:
            assert await waiting.pop(0)
        await asyncio.sleep(0)
    assert all(await asyncio.gather(*waiting))
    await store.checkpoint()
    seconds = time.perf_counter() - began
    longest = stalls.end()
    await store.close()
    return {"adds_per_s": ledgers / seconds, "longest_stall_ms": longest}


async def _start_many(directory: str, ledgers: int, seed: int) -> dict[str, Any]:
    forget_cache(directory)
    await asyncio.sleep(0)
    usage = Usage(os.getpid())
    before = usage.read()
    began = time.perf_counter()
    world, store = await _open(directory)
    seconds = time.perf_counter() - began
    after = usage.read()
    some = random.Random(seed).sample(range(ledgers), min(LOOKS, ledgers))
    forget_cache(directory)
    del world
    cold = await _look(store, some)
    warm = await _look(store, some[::-1])
    assert len(store.descriptors) == ledgers
    statistics = store.statistics()
    await store.close()
    return {
        "seconds": seconds, "rss_growth_mb": after["rss_mb"] - before["rss_mb"],
        "peak_growth_mb": after["peak_rss_mb"] - before["rss_mb"], "cached_ms": percentiles(warm),
        "cold_ms": percentiles(cold), "index_cache_bytes": statistics["index_cache_bytes"],
    }  # fmt: skip


async def _look(store: Store, ledgers: list[int]) -> list[float]:
    samples: list[float] = []
    for ledger in ledgers:
        began = time.perf_counter()
        found = await store.read_entries(ledger, 0)
        samples.append(time.perf_counter() - began)
        assert len(found.entries) == 1
    return samples


# ---------------------------------------------------------------------------------------- catch-up
def store_read(options: Options) -> Run:
    """Catch-up of a ledger of 128 KiB entries (--mib of them) against the raw rate of the file that holds it.

    It was written among 1,000 others, which took two thirds of the bytes with entries of 1 KiB. A quarter of the file
    is read raw, then a quarter of the ledger, each with a cold page cache, first the one and then the other first; so
    that both meet the same disk. Raw is 1 MiB after the other through the page cache, with all the read-ahead that the
    kernel does for that (8 MiB in requests of 3 MiB where this was measured); what that read beyond its quarter has
    come, and is forgotten, before the next begins. The value is the ratio of the rates in bytes read per second, median
    of three passes.
    """
    return _catch_up(options, entry_bytes=LARGE_BYTES, among=OTHERS, ratio=True)


def store_read_small(options: Options) -> Run:
    """Catch-up of a ledger of 1 KB entries (--mib of them), alone in its store, cold page cache: entries per second."""
    return _catch_up(options, entry_bytes=options.size, among=0, ratio=False)


def _catch_up(options: Options, entry_bytes: int, among: int, ratio: bool) -> Run:
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        entries = (options.extra.get("mib", READ_MIB) << 20) // entry_bytes
        _apart(lambda: _build_catch_up(directory, entries, entry_bytes, among))
        found = _apart(lambda: _read_catch_up(directory, entries, entry_bytes))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    run = Run(found["ratio"] if ratio else found["entries_per_s"])
    run.detail = found
    return run


async def _build_catch_up(directory: str, entries: int, entry_bytes: int, among: int) -> dict[str, Any]:
    _, store = await _open(directory)
    rng, large, small = random.Random(1), random.Random(2).randbytes(entry_bytes), bytes(1024)
    lasts = [-1] * (among + 1)
    for entry in range(entries):
        await _add(store, 0, entry, large)
        for ledger in (rng.randint(1, among) for _ in range(2 * entry_bytes // len(small) if among else 0)):
            lasts[ledger] += 1
            await _add(store, ledger, lasts[ledger], small)
        if entry % 64 == 0 or among:
            await store.seal_group_and_wait()
    await store.seal_group_and_wait()
    await store.close()
    return {}


async def _read_catch_up(directory: str, entries: int, entry_bytes: int) -> dict[str, Any]:
    _, store = await _open(directory)
    logs, quarter = os.path.join(directory, "entries"), entries // 4
    raw_rates: list[float] = []
    rates: list[float] = []
    for number in range(3):
        raw = [0.0, 0.0]  # bytes, seconds
        ours = [0.0, 0.0]
        for part in range(4):
            for which in ("raw", "ours") if (number + part) % 2 else ("ours", "raw"):
                forget_cache(directory)
                await asyncio.sleep(SETTLE_S)
                forget_cache(directory)  # also what was on its way from the disk
                began = time.perf_counter()
                if which == "raw":
                    raw[0] += _read_raw(logs, part)
                    raw[1] += time.perf_counter() - began
                else:
                    first = part * quarter + 1  # not where a reader before left off: nothing is there already
                    ours[0] += await _read_ledger(store, first, (part + 1) * quarter) * entry_bytes
                    ours[1] += time.perf_counter() - began
        raw_rates.append(raw[0] / raw[1] / 1e6)
        rates.append(ours[0] / ours[1] / 1e6)
    await store.close()
    ratios = [ours / raw for ours, raw in zip(rates, raw_rates, strict=True)]
    return {
        "entries_per_s": sorted(rates)[1] * 1e6 / entry_bytes, "mb_per_s": sorted(rates)[1],
        "raw_mb_per_s": sorted(raw_rates)[1], "ratio": sorted(ratios)[1], "ratios": ratios,
        "all_mb_per_s": rates, "all_raw_mb_per_s": raw_rates,
    }  # fmt: skip


async def _read_ledger(store: Store, entry: int, end: int) -> int:
    """As the ledger library reads: all that is left is asked for, about 1 MiB comes. The entries that were read."""
    count = end - entry
    while entry < end:
        found = await store.read_entries(0, entry, end - entry, RANGE_BYTES)
        assert found.entries, found.status
        entry += len(found.entries)
    return count


def _read_raw(directory: str, part: int) -> int:
    """That quarter of each log, in reads of 1 MiB, one after the other; the bytes that were read."""
    size = 0
    for name in sorted(os.listdir(directory)):
        if name.endswith(".log"):
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            quarter = os.fstat(fd).st_size // 4
            for offset in range(part * quarter, (part + 1) * quarter, RANGE_BYTES):
                size += len(os.pread(fd, RANGE_BYTES, offset))
            os.close(fd)
    return size


# ---------------------------------------------------------------------------------------- shared
class Stalls:
    """The longest time in which the event loop did not turn."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self._longest_s = max(self._longest_s, now - last)
            last = now

    def end(self) -> float:
        self._task.cancel()
        return self._longest_s * 1000


async def _add(store: Store, ledger: int, entry: int, payload: bytes) -> None:
    """Admitted, after waiting for room."""
    from magnetar.ledger.peer_format import ENTRY_HEADER_STRUCT, Status
    from magnetar.ledger.reader_core import encode_header

    while not store.has_room:
        store.seal_group(lambda ok: None)
        await asyncio.sleep(0.001)
    # verified, as all that is added
    stored = (encode_header(ledger, entry, entry - 1, len(payload), (payload,)), payload)
    status = store.add_entry(ledger, entry, KEY, stored, ENTRY_HEADER_STRUCT.size + len(payload), entry - 1, False)
    assert status is Status.OK, status


async def _open(directory: str, **settings: Any) -> tuple[World, Store]:
    from magnetar.bookie.store.store import Store, StoreConfig
    from magnetar.runtime.process import freeze_objects, make_system_world

    world = make_system_world()
    store = await Store.open(world, directory, UUID, StoreConfig(**settings))
    freeze_objects()  # as servers do
    return world, store


def forget_cache(directory: str) -> None:
    """The page cache forgets what stands in the files below; what is not written back yet stays."""
    os.sync()
    for where, _, names in os.walk(directory):
        for name in names:
            fd = os.open(os.path.join(where, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _apart(main: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Runs it in a process of its own, so that memory of one part is not memory of another."""
    from magnetar.runtime.process import run_process, tune_glibc_heap

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            tune_glibc_heap()  # as servers do
            with os.fdopen(writing, "w") as answer:

                async def inside() -> None:
                    json.dump(await main(), answer)

                code = run_process(inside)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a part of the benchmark ended with status {status}")
    found: dict[str, Any] = json.loads(text)
    return found
