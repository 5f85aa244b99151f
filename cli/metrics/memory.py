"""The memory of a process in `--metrics`: what each share may take, and what it takes where that is known.

    magnetar_process_memory_bytes                            memory_bytes
    magnetar_process_memory_share_limit_bytes{share="…"}     of each share
    magnetar_process_memory_share_bytes{share="…"}           but for keys of a compaction and batches of repair
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...bookie.server import Bookie
    from ...broker.server import Broker
    from ...metadata.server import MetadataServer
    from ...metadata.sqlite import SqliteStore
    from ...runtime.memory.budget import CallerMemory
    from ...runtime.memory.shares import Plan
    from ...runtime.monitoring.metrics import Page


def add_shares(page: Page, plan: Plan, used: dict[str, int]) -> None:
    page.gauge("magnetar_process_memory_bytes", "Process: memory_bytes, which is shared out.", plan.budget)
    for name, limit in plan.limits.items():
        text = "Process: bytes that a share of memory_bytes may take."
        page.gauge("magnetar_process_memory_share_limit_bytes", text, limit, share=name)
        if name in used:
            text = "Process: bytes that a share of memory_bytes takes."
            page.gauge("magnetar_process_memory_share_bytes", text, used[name], share=name)


def of_broker(broker: Broker) -> dict[str, int]:
    owned = broker.owned
    assert owned.cache.recent is not None, "a broker has both caches"
    return {
        "clients": _held(owned.memory),
        "appends": owned.append_bytes,
        "tail-cache": owned.cache.bytes,
        "catch-up-cache": owned.cache.recent.bytes,
        "catch-up-reads": owned.reads.used,
        "state": owned.state.bytes,
    }


def of_bookies(bookies: Sequence[Bookie]) -> dict[str, int]:
    several = [each.statistics() for each in bookies]
    names = {
        "memtables": ("memtable_bytes",),
        "journal-queue": ("journal_queued_bytes",),
        "held-adds": ("held_bytes", "fences_waiting_bytes", "lacs_waiting_bytes", "newcomers_waiting_bytes"),
        "index-cache": ("index_cache_bytes",),
        "read-cache": ("read_cache_bytes",),
        "reads": ("disk_reads_bytes",),
    }
    return {share: sum(int(each[name]) for each in several for name in those) for share, those in names.items()}


def of_metadata(metadata: SqliteStore | MetadataServer) -> dict[str, int]:
    """Returns the memory that clients of the metadata take; none if it is not served."""
    memory = getattr(metadata, "memory", None)
    return {} if memory is None else {"metadata-clients": _held(memory)}


def _held(memory: CallerMemory) -> int:
    return memory.requests.held + memory.answers.held
