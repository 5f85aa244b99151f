"""store-journal and store-replay: the bookie's journal against the disk, and how fast a start reads it back."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from ..harness import Options, Run, measured
from .bookies import in_directory

if TYPE_CHECKING:
    from magnetar.bookie.store.journal import Journal
    from magnetar.runtime.network import World

LEDGERS = 100
GROUP_BYTES = 512 << 10
REPLAY_MIB = 1024

BLOCKS = {4096: 300, 128 << 10: 100, 1 << 20: 40}
"""Per stretch, at the default --seconds: 10 to 40 ms on a fast disk, so that a noisy one meets all alike."""
ROUNDS = 9
OUTSTANDING = 8
"""Blocks that wait or are on their way, as under load."""


def store_journal(options: Options) -> Run:
    """The journal against the disk: lowest ratio over blocks of 4 KiB, 128 KiB and 1 MiB.

    Each ratio is the journal's throughput over the better of two raw ones, write + fdatasync and O_DIRECT | O_DSYNC, of
    the same sizes one after the other on a zero-filled file: medians of short stretches that take turns in one run.
    The fastest stretches are in the detail: on a disk that others use they say more.
    """
    scale = options.seconds / 5.0

    async def main(directory: str) -> Run:
        run = Run(0.0)
        ratios: dict[int, float] = {}
        with measured(run):
            for size, blocks in BLOCKS.items():
                speeds = await _stretches(directory, size, max(2, int(blocks * scale)))
                found = {name: statistics.median(each) for name, each in speeds.items()}
                ratios[size] = found["journal"] / max(found["sync"], found["direct"])
                mb_s = {name: round(value / 1e6, 1) for name, value in found.items()}
                fastest = {name: round(max(each) / 1e6, 1) for name, each in speeds.items()}
                run.detail[str(size)] = {"ratio": round(ratios[size], 3), "mb_s": mb_s, "fastest_mb_s": fastest}
        run.value = min(ratios.values())
        return run

    return in_directory(main)


async def _stretches(directory: str, size: int, blocks: int) -> dict[str, list[float]]:
    """Bytes per second of each stretch of each way of writing."""
    ways: dict[str, Callable[[], Awaitable[float]]] = {}
    for name, flags in (("sync", 0), ("direct", os.O_DIRECT | os.O_DSYNC)):
        path = os.path.join(directory, f"raw-{name}-{size}")
        _zero_filled(path, size * blocks)
        ways[name] = lambda path=path, flags=flags: _raw(path, flags, size, blocks)  # type: ignore[misc]
    for name, direct in (("journal", True), ("journal, not direct", False)):
        ways[name] = lambda direct=direct: _journal(directory, size, blocks, direct)  # type: ignore[misc]
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        order = list(ways)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            speeds[name].append(size * blocks / await ways[name]())
    return speeds


def _zero_filled(path: str, size: int) -> None:
    with open(path, "wb") as file:
        file.write(bytes(size))
        os.fsync(file.fileno())


async def _raw(path: str, flags: int, size: int, blocks: int) -> float:
    """Seconds for blocks one after the other, each synced; on the calling thread, as fast as it goes."""
    memory = mmap.mmap(-1, size)
    memory.write(os.urandom(size))
    try:
        fd = os.open(path, os.O_RDWR | flags)
        os.pwrite(fd, memory, 0)
    except OSError:  # this file system does not write direct
        return float("inf")
    try:
        began = time.perf_counter()
        for number in range(blocks):
            os.pwrite(fd, memory, number * size)
            if not flags:
                os.fdatasync(fd)
        return time.perf_counter() - began
    finally:
        os.close(fd)


async def _journal(directory: str, size: int, blocks: int, direct: bool) -> float:
    """The same through a journal of its own, whose segment is zero-filled and large enough: one record per block."""
    from magnetar.bookie.format.journal import BLOCK_HEADER_BYTES, RECORD_HEADER_BYTES, RecordType
    from magnetar.bookie.store.group_commit_core import JOURNAL_WORKERS
    from magnetar.bookie.store.journal import Journal
    from magnetar.bookie.store.replay import JournalPosition
    from magnetar.runtime.process import make_system_world

    world = make_system_world()
    folder = os.path.join(directory, "journal")
    world.files.make_directories(folder)
    workers, filler = [world.workers.start("journal") for _ in range(JOURNAL_WORKERS)], world.workers.start("filler")
    journal = Journal(
        world, folder, bytes(16), workers, filler, segment_bytes=4096, block_bytes_max=size, spares_max=0,
        first_segment_bytes=4096 + 2 * size * (blocks + 2), queue_bytes_max=64 << 20, direct=direct,
    )  # fmt: skip
    await journal.start(JournalPosition(0, 0))
    payload = (os.urandom(size - BLOCK_HEADER_BYTES - RECORD_HEADER_BYTES),)

    async def write(number: int) -> None:
        outstanding = asyncio.Semaphore(OUTSTANDING)
        for entry in range(number):
            await outstanding.acquire()
            journal.enqueue_record(RecordType.ADD, 1, entry, payload)
            journal.seal_group(lambda ok: outstanding.release())
        await journal.seal_with_future()

    await write(2)
    before = journal.counters["synced_bytes"]
    began = time.perf_counter()
    await write(blocks)
    elapsed = time.perf_counter() - began
    assert journal.counters["synced_bytes"] - before == size * blocks
    await journal.close()
    for worker in (*workers, filler):
        await worker.close()
    shutil.rmtree(folder)
    return elapsed


def store_replay(options: Options) -> Run:
    """A start of a store after a crash that left --mib of journal, records of --size bytes in 100 ledgers, cold cache.

    MB/s of journal until the store serves: reading, checking, and everything flushed to the entry log and synced.
    """

    async def main(directory: str) -> Run:
        from magnetar.bookie.store.store import Store
        from magnetar.runtime.process import make_system_world, tune_glibc_heap

        tune_glibc_heap()  # as servers do
        world, uuid = make_system_world(), os.urandom(16)
        await (await Store.open(world, directory, uuid)).close()
        size = await _write_journal(world, directory, uuid, options)
        _forget_cache(world, os.path.join(directory, "journal"))
        run = Run(0.0)
        with measured(run):
            began = time.perf_counter()
            store = await Store.open(world, directory, uuid)
            elapsed = time.perf_counter() - began
        run.value = size / elapsed / 1e6
        run.detail = {"journal_bytes": size, "seconds": elapsed, "records": store.counters["replayed_records"]}
        await store.close()
        return run

    return in_directory(main)


async def _write_journal(world: World, directory: str, uuid: bytes, options: Options) -> int:
    """Journals behind the mark of a store that is closed, as a crash would leave them; their bytes."""
    from magnetar.bookie.format import mark
    from magnetar.bookie.format.journal import RecordType
    from magnetar.bookie.store import disk
    from magnetar.bookie.store.group_commit_core import JOURNAL_WORKERS
    from magnetar.bookie.store.journal import Journal
    from magnetar.bookie.store.replay import JournalPosition

    path = os.path.join(directory, "mark")
    found, _ = mark.decode_checkpoint_mark(disk.read_file(world.files, path), uuid, path)
    workers, filler = [world.workers.start("journal") for _ in range(JOURNAL_WORKERS)], world.workers.start("filler")
    journal = Journal(
        world, os.path.join(directory, "journal"), uuid, workers, filler, segment_bytes=64 << 20,
        first_segment_bytes=4 << 20, block_bytes_max=1 << 20, queue_bytes_max=32 << 20, spares_max=3,
    )  # fmt: skip
    await journal.start(JournalPosition(*found.position))
    for ledger in range(LEDGERS):
        journal.enqueue_record(RecordType.KEY, ledger, -1, (bytes(20),))
    entries = _entries(options)
    target = options.extra.get("mib", REPLAY_MIB) << 20
    while journal.counters["bytes"] + journal.queued_bytes < target:
        group = 0
        while group < GROUP_BYTES:
            ledger, entry, stored = next(entries)
            journal.enqueue_record(RecordType.ADD, ledger, entry, (stored,))
            group += len(stored)
        await _two_groups(journal)
    await journal.seal_with_future()
    await journal.close()
    for worker in (*workers, filler):
        await worker.close()
    return journal.counters["synced_bytes"]


async def _two_groups(journal: Journal) -> None:
    synced = journal.seal_with_future()
    if journal.queued_bytes > 2 * GROUP_BYTES:
        await synced


def _entries(options: Options) -> Iterator[tuple[int, int, bytes]]:
    """(ledger, entry, stored entry), ledger after ledger."""
    from magnetar.bookie.format.journal import crc32c
    from magnetar.ledger.peer_format import ENTRY_HEADER_STRUCT

    from ..messaging import payloads

    contents = payloads(options.size, options.seed, 64)
    for number in count():
        entry, ledger = divmod(number, LEDGERS)
        content = contents[number % len(contents)]
        head = ENTRY_HEADER_STRUCT.pack(ledger, entry, entry - 1, len(content), 0)[:-4]
        yield ledger, entry, head + crc32c(head, content).to_bytes(4, "big") + content


def _forget_cache(world: World, directory: str) -> None:
    for name in world.files.list_directory(directory):
        file = world.files.open(os.path.join(directory, name), write=False)
        file.advise_dontneed()
        file.close()
