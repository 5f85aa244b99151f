"""store-journal and store-replay: the bookie's journal against the disk, and how fast a start reads it back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from .harness import Options, Run, measured
from .storage import _run

if TYPE_CHECKING:
    from magnetar.bookie.store.journal import Journal
    from magnetar.runtime.world import World

LEDGERS = 100
GROUP_BYTES = 512 << 10
REPLAY_MIB = 1024


def store_replay(options: Options) -> Run:
    """A start of a store after a crash that left --mib of journal, records of --size bytes in 100 ledgers, cold cache.

    MB/s of journal until the store serves: reading, checking, and everything flushed to the entry log and synced.
    """

    async def main(directory: str) -> Run:
        from magnetar.bookie.store.store import Store
        from magnetar.runtime.process import real_world, tune_memory

        tune_memory()  # as servers do
        world, uuid = real_world(), os.urandom(16)
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

    return _run(main)


async def _write_journal(world: World, directory: str, uuid: bytes, options: Options) -> int:
    """Journals behind the mark of a store that is closed, as a crash would leave them; their bytes."""
    from magnetar.bookie.format import mark
    from magnetar.bookie.format.journal import RecordType
    from magnetar.bookie.store import disk
    from magnetar.bookie.store.journal import Journal, Position

    path = os.path.join(directory, "mark")
    found, _ = mark.decode_mark(disk.read_file(world.files, path), uuid, path)
    worker, filler = world.workers.start("journal"), world.workers.start("filler")
    journal = Journal(
        world, os.path.join(directory, "journal"), uuid, worker, filler, segment_bytes=64 << 20,
        first_segment_bytes=4 << 20, block_bytes_max=1 << 20, queue_bytes_max=32 << 20, spares_max=3,
    )  # fmt: skip
    await journal.start(Position(*found.position))
    for ledger in range(LEDGERS):
        journal.enqueue(RecordType.KEY, ledger, -1, (bytes(20),))
    entries = _entries(options)
    target = options.extra.get("mib", REPLAY_MIB) << 20
    while journal.counters["bytes"] + journal.queued_bytes < target:
        group = 0
        while group < GROUP_BYTES:
            ledger, entry, stored = next(entries)
            journal.enqueue(RecordType.ADD, ledger, entry, (stored,))
            group += len(stored)
        await _two_groups(journal)
    await journal.synced()
    await journal.close()
    await worker.close()
    await filler.close()
    return journal.counters["synced_bytes"]


async def _two_groups(journal: Journal) -> None:
    synced = journal.synced()
    if journal.queued_bytes > 2 * GROUP_BYTES:
        await synced


def _entries(options: Options) -> Iterator[tuple[int, int, bytes]]:
    """(ledger, entry, stored entry), ledger after ledger."""
    from magnetar.bookie.format.framing import crc32c
    from magnetar.bookie.format.peer import ENTRY_HEADER

    from .messaging import payloads

    contents = payloads(options.size, options.seed, 64)
    for number in count():
        entry, ledger = divmod(number, LEDGERS)
        content = contents[number % len(contents)]
        head = ENTRY_HEADER.pack(ledger, entry, entry - 1, len(content), 0)[:-4]
        yield ledger, entry, head + crc32c(head, content).to_bytes(4, "big") + content


def _forget_cache(world: World, directory: str) -> None:
    for name in world.files.list_directory(directory):
        file = world.files.open(os.path.join(directory, name), write=False)
        file.advise_dontneed()
        file.close()
