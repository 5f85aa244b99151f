"""BookKeeper's names for a bookie's metrics, so that dashboards made for it work (`--metrics-compat bookkeeper`).

The numbers are those of our own page under second names; `SECOND` is the table, docs/operations.md shows it. Latencies
are summaries in milliseconds with the label `success`, as BookKeeper's, with the quantiles of the last minute or two
(runtime/monitoring/metrics.py `Recent`); our own histograms are more exact. A metric of BookKeeper without a true
counterpart (queues of threads that do not exist here) is left out. Guard: tests/cli/metrics/test_metrics_bookkeeper.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...runtime.monitoring.metrics import Histogram, Recent

if TYPE_CHECKING:
    from ...runtime.clock import Clock
    from ...runtime.monitoring.metrics import Page

QUANTILES = ("0.5", "0.75", "0.95", "0.99", "0.999", "0.9999", "1.0")
"""Quantiles of BookKeeper's Prometheus provider."""


class Second(NamedTuple):
    """A metric under BookKeeper's name. `ours`: names on our page; of two, the first counts successes and the second
    failures. `note`: what differs."""

    name: str
    ours: tuple[str, ...]
    note: str = ""
    writable: bool = False  # 1 for a bookie that is not read-only


_ADDS = ("magnetar_bookie_add_seconds", "magnetar_bookie_add_failed_seconds")
_READS = ("magnetar_bookie_read_seconds", "magnetar_bookie_read_failed_seconds")

SECOND = (
    Second("bookie_SERVER_STATUS", ("magnetar_bookie_read_only",), "1: writable, 0: read-only", writable=True),
    Second("bookie_ledger_writable_dirs", ("magnetar_bookie_read_only",), "a bookie has one directory", writable=True),
    Second("bookie_WRITE_BYTES", ("magnetar_bookie_add_bytes_total",)),
    Second("bookie_READ_BYTES", ("magnetar_bookie_read_bytes_total",)),
    Second("bookie_ledgers_count", ("magnetar_bookie_ledgers",)),
    Second("bookie_write_cache_size", ("magnetar_bookie_memtable_bytes",)),
    Second("bookie_read_cache_size", ("magnetar_bookie_read_cache_bytes",)),
    Second("bookie_DELETED_LEDGER_COUNT", ("magnetar_bookie_ledgers_deleted_total",)),
    Second("bookie_throttled_write_requests", ("magnetar_bookie_slowed_down_total",), "a connection was not read"),
    Second("bookie_journal_JOURNAL_QUEUE_SIZE", ("magnetar_bookie_journal_queued_records",)),
    Second("bookkeeper_server_ADD_ENTRY_REQUEST", _ADDS, "from arrival to answer; many entries may be one request"),
    Second("bookkeeper_server_ADD_ENTRY", _ADDS, "the same: a request is not queued before it is served"),
    Second("bookkeeper_server_READ_ENTRY_REQUEST", _READS, "from arrival to answer"),
    Second("bookkeeper_server_READ_ENTRY", _READS, "the same"),
    Second("bookie_journal_JOURNAL_ADD_ENTRY", _ADDS, "the same: an add's answer waits for the journal alone"),
    Second("bookie_journal_JOURNAL_SYNC", ("magnetar_bookie_journal_sync_seconds",), "write and sync of a block"),
    Second("bookie_journal_JOURNAL_QUEUE_LATENCY", ("magnetar_bookie_journal_queue_seconds",), "per turn, not per add"),
    Second(
        "auditor_NUM_UNDER_REPLICATED_LEDGERS", ("magnetar_bookie_repair_under_replicated",),
        "at the bookie that is the auditor; 0 at the others",
    ),
    Second("bookie_flush", ("magnetar_bookie_checkpoint_seconds",)),
)


class BookKeeperNames:
    """Writes a bookie's metrics under BookKeeper's names, for the life of a process: it remembers earlier counts for
    the quantiles."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent = Recent()

    def add(self, page: Page, bookie: str) -> None:
        """Adds this bookie's metrics of the page a second time. A missing number gets no second name."""
        labels = (("bookie", bookie),)
        for second in SECOND:
            help = f"BookKeeper's name of {' and '.join(second.ours)}."
            for i, ours in enumerate(second.ours):
                found = page.shown.get((ours, labels))
                if isinstance(found, Histogram):
                    self._summary(page, second.name, help, found, bookie=bookie, success="false" if i else "true")
                elif found is not None:
                    page.foreign(second.name, help, 1 - found if second.writable else found, bookie=bookie)

    def _summary(self, page: Page, name: str, help: str, histogram: Histogram, **labels: str) -> None:
        key = (name, *labels.values())
        found = self._recent.quantiles(key, histogram, self._clock.monotonic(), [float(share) for share in QUANTILES])
        millis = {share: 1000 * value for share, value in zip(QUANTILES, found, strict=True)}
        page.foreign_summary(name, help, histogram.count, 1000 * histogram.total, millis, **labels)
