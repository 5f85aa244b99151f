"""Settings of auto-recovery. Behaviour first, performance second; each with what it bounds and what it costs."""

from __future__ import annotations

import msgspec

from ...proto.errors import InvalidConfiguration

BATCH_MEMORY_BYTES = 8 << 20
"""Memory that one of `batches_at_once` takes with the defaults: of each of four ledgers a batch of a mebibyte, twice.
"""


class RepairConfig(msgspec.Struct, frozen=True):
    """Settings of auto-recovery."""

    # ---- behaviour
    enabled: bool = True  # takes part: as auditor when elected, and as worker
    lost_bookie_grace_s: float = 30.0  # not registered for longer: lost; shorter copies ledgers for every restart
    open_ledger_grace_s: float = 30.0  # an open ledger that misses a bookie, or is damaged, longer: recovered
    check_pass_s: float = 86400.0  # every closed ledger's copies are compared once in this; 0: only once, when closed
    checks_per_s: float = 50.0  # at most; a check is one small request for each fragment and bookie
    retry_min_s: float = 5.0  # before a ledger that could not be made whole is tried again; doubles each time …
    retry_max_s: float = 300.0  # … up to this; a change meanwhile (a new bookie) ends the wait

    # ---- performance
    bytes_per_s: int = 8 << 20  # a worker copies at most this, so that producers are hardly slowed; 0: no limit
    ledgers_at_once: int = 4  # of a worker; small ledgers wait for the metadata most of the time
    batches_at_once: int = 6  # of a ledger, each about `batch_bytes` in memory, twice
    batch_bytes: int = 1 << 20  # read and added at once; with a limit less: a 64th of a second
    audit_interval_s: float = 5.0  # between checks of the registered bookies; one listing each
    scan_interval_s: float = 3600.0  # between reads of all ledgers' records when nothing happened
    poll_interval_s: float = 10.0  # between listings of all marks, besides the watch on them

    def __post_init__(self) -> None:
        for name in ("lost_bookie_grace_s", "checks_per_s", "retry_min_s", "ledgers_at_once", "batches_at_once",
                     "batch_bytes", "audit_interval_s", "scan_interval_s", "poll_interval_s"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        for name in ("open_ledger_grace_s", "check_pass_s", "bytes_per_s"):
            if getattr(self, name) < 0:
                raise InvalidConfiguration(f"{name} must not be negative", setting=name)
        if self.retry_max_s < self.retry_min_s:
            raise InvalidConfiguration("retry_max_s must not be below retry_min_s", setting="retry_max_s")
