"""The parts of a bookie that may take memory, and how much of `memory_bytes` each gets (runtime/memory/shares.py)."""

from __future__ import annotations

from ..runtime.memory.shares import MIB, Share
from .repair.config import BATCH_MEMORY_BYTES
from .requests.service import HELD_PARTS
from .store.memtable import TABLES

SHARES = (
    Share("memtables", "bookie.store.memtable_bytes", TABLES, 46, 4 * MIB, 64 * MIB,
          "entries that are synced and not yet in an entry log"),
    Share("journal-queue", "bookie.store.journal_queue_bytes_max", 1, 12, 6 * MIB, 32 * MIB,
          "journal records on their way to the disk"),
    Share("held-adds", "bookie.held_bytes_max", HELD_PARTS, 24, 2 * MIB, 32 * MIB,
          "requests that wait: adds for room, of clients and of recoverers, fences, and first requests of a ledger"),
    Share("index-cache", "bookie.store.index_cache_bytes", 1, 4, MIB, 16 * MIB, "extents and entry tables"),
    Share("read-cache", "bookie.store.read_cache_bytes", 1, 18, 2 * MIB, 32 * MIB, "entries that were read ahead"),
    Share("reads", "bookie.reads_bytes_max", 1, 8, 8 * MIB, 1 << 30, "answers that are read from the disk now"),
    Share("repair", "bookie.repair.batches_at_once", BATCH_MEMORY_BYTES, 8, 1, 6, "batches of copies that are made"),
)  # fmt: skip
"""A weight is in about the mebibytes of a bookie that has 128."""
