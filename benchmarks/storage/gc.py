"""store-gc: does the disk come back when 10,000 ledgers keep one small entry each beside data that was deleted?"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Any

from ..harness import Options, Run
from .reads import Stalls, _add, _apart, _open

if TYPE_CHECKING:
    from magnetar.bookie.store.store import Store

LEDGERS = 10_000
MIB = 4096
DELETED_ENTRY_BYTES = 64 << 10
DELETED_LEDGERS = 1000
WINDOW_BYTES = 8 << 20
"""Of adds that wait for their sync: less than half a memtable."""


def store_gc(options: Options) -> Run:
    """Bytes of all closed logs, with their index files, per live byte in them, after the deletion of --mib MiB.

    --ledgers ledgers with one entry of --size bytes each lie evenly among 1,000 ledgers of 64 KiB entries, which are
    then deleted; then `gc --now` as an operator would: open logs with little that lives are closed and moved too.
    """
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        found = _apart(lambda: _collect(directory, options))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Run(found.pop("value"), detail=found)


async def _collect(directory: str, options: Options) -> dict[str, Any]:
    from magnetar.bookie.store.entrylog.mover import CompactionPolicy, EntryLogState

    ledgers = options.extra.get("ledgers", LEDGERS)
    mib = options.extra.get("mib", MIB)
    _, store = await _open(directory)
    fill_s = await _fill(store, ledgers, mib, options.size)
    before = _disk_bytes(directory)
    assert await store.delete_ledgers(list(range(ledgers, ledgers + DELETED_LEDGERS)))
    stalls = Stalls()
    began = time.perf_counter()
    done = await store.compactor.run_compaction(CompactionPolicy(), major=True, roll=True)
    seconds = time.perf_counter() - began
    longest = stalls.end()
    logs = [log for log in await store.compactor.list_log_usage() if log.state is not EntryLogState.HOT]
    for ledger in range(0, ledgers, 97):
        assert len((await store.read_entries(ledger, 0)).entries) == 1
    statistics = store.statistics()
    await store.close()
    size, live = sum(log.bytes for log in logs), sum(log.live_bytes for log in logs)
    return {
        "value": size / live, "per_payload_byte": size / (ledgers * options.size), "log_bytes": size,
        "live_bytes": live, "logs_deleted": len(done.deleted), "logs_compacted": len(done.compacted),
        "disk_before": before, "disk_after": _disk_bytes(directory),
        "entries_after": _disk_bytes(os.path.join(directory, "entries")), "seconds": seconds,
        "moved_mb_per_s": done.bytes_moved / seconds / 1e6, "records_moved": statistics["records_moved"],
        "freed_mb_per_s": done.bytes_freed / seconds / 1e6, "longest_stall_ms": longest, "fill_s": fill_s,
    }  # fmt: skip


async def _fill(store: Store, ledgers: int, mib: int, size: int) -> float:
    began = time.perf_counter()
    deleted = max((mib << 20) // DELETED_ENTRY_BYTES, DELETED_LEDGERS)
    kept, small, large = 0, bytes(size), bytes(DELETED_ENTRY_BYTES)
    waiting: list[asyncio.Future[bool]] = []
    per_turn = WINDOW_BYTES // DELETED_ENTRY_BYTES // 8
    for at in range(deleted):
        await _add(store, ledgers + at % DELETED_LEDGERS, at // DELETED_LEDGERS, large)
        while kept * deleted < at * ledgers:
            await _add(store, kept, 0, small)
            kept += 1
        if at % per_turn == 0:
            waiting.append(asyncio.ensure_future(store.seal_group_and_wait()))
            if len(waiting) > 4:
                assert await waiting.pop(0)
            await asyncio.sleep(0)
    for ledger in range(kept, ledgers):
        await _add(store, ledger, 0, small)
    assert await store.seal_group_and_wait()
    assert all(await asyncio.gather(*waiting))
    await store.checkpoint()
    return time.perf_counter() - began


def _disk_bytes(directory: str) -> int:
    """Blocks that files take, as du says."""
    total = 0
    for where, _, names in os.walk(directory):
        total += sum(os.stat(os.path.join(where, name)).st_blocks * 512 for name in names)
    return total
