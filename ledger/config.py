"""Settings of the ledger library. Behaviour first, performance second; each with what it bounds and what it costs."""

from __future__ import annotations

import msgspec

from ..proto.errors import InvalidConfiguration
from .writer_core import Striping


class LedgerConfig(msgspec.Struct, frozen=True):
    """The settings of one `LedgerClient`. Raises InvalidConfiguration for values that cannot work together."""
    # ---- behaviour
    ensemble_size: int = 3  # bookies over which a ledger is striped, unless `create` gives another
    write_quorum: int = 3  # copies of each entry; each costs its bytes on disk and network
    ack_quorum: int = 2  # synced copies before an append is confirmed; one slow bookie of three then costs nothing

    min_racks_per_write_quorum: int = 1  # racks on which the copies of an entry are, at most write_quorum; 1: any
    enforce_min_racks: bool = False  # with too few racks no new ledger is made; or made anyway, with a warning

    ensemble_changes_max: int = 100  # of one ledger; then it ends with the next failure: bookies flap. Each ~150 bytes
    pending_entries_max: int = 50_000  # appends of one ledger on their way; above, `append` fails with BackPressure
    pending_bytes_max: int = 64 << 20  # … and their bytes, in memory until they are confirmed
    unanswered_bytes_max: int = 256 << 20  # of one ledger at bookies that have not answered, each copy; as above

    memory_bytes_max: int = 512 << 20  # … of all ledgers of a client, copies of an entry once; as above

    # ---- performance
    add_timeout_s: float = 5.0  # one add at one bookie; longer: the bookie failed, and another takes its place
    quorum_timeout_s: float = 20.0  # an append, whatever happens, metadata included; longer: OutcomeUnknown
    close_timeout_s: float = 30.0  # of tries to write an ensemble or the end; of a recovery whose bookies are busy
    retry_s: float = 0.2  # before a busy bookie, or a metadata store that gave up a watch, is asked again
    late_s: float = 0.0  # later answers to adds are noted, the last 64 of a ledger; 0: none. A clock read each
    read_timeout_s: float = 5.0  # one replica; then the next one is asked
    speculative_read_s: float = 0.25  # no answer: the next replica is asked as well; costs a read, not a time-out
    fence_timeout_s: float = 5.0  # one bookie during recovery: what a dead one costs when the others do not suffice
    recovery_batch: int = 32  # entries read at once during recovery; each is up to 5 MiB in memory
    read_bytes_max: int = 1 << 20  # of one range read, unless it gives another bound
    quarantine_s: float = 10.0  # a bookie that failed gets no new ledger for so long; readers' trouble halves in it
    quarantine_max_s: float = 300.0  # … twice as long each time it fails again soon after, up to this; then forgiven
    ids_block: int = 16  # ledger ids taken at once: one metadata write per block; the rest of a block is lost at a stop

    def __post_init__(self) -> None:
        Striping(self.ensemble_size, self.write_quorum, self.ack_quorum)
        for name in ("add_timeout_s", "quorum_timeout_s", "close_timeout_s", "retry_s", "read_timeout_s",
                     "fence_timeout_s", "speculative_read_s", "recovery_batch", "read_bytes_max", "ids_block",
                     "pending_entries_max", "pending_bytes_max", "unanswered_bytes_max",
                     "memory_bytes_max"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        if self.min_racks_per_write_quorum < 1:
            raise InvalidConfiguration(
                f"min_racks_per_write_quorum must be at least 1, not {self.min_racks_per_write_quorum}",
                setting="min_racks_per_write_quorum",
            )
        if self.quarantine_max_s < self.quarantine_s:
            raise InvalidConfiguration(
                f"quarantine_max_s ({self.quarantine_max_s}) must not be below quarantine_s ({self.quarantine_s})",
                setting="quarantine_max_s",
            )
        if self.ensemble_changes_max < 0:
            raise InvalidConfiguration("ensemble_changes_max must not be negative", setting="ensemble_changes_max")
        if self.quorum_timeout_s <= self.add_timeout_s:
            raise InvalidConfiguration(
                f"quorum_timeout_s ({self.quorum_timeout_s}) must be above add_timeout_s ({self.add_timeout_s}): "
                "a bookie has to be able to fail first"
            )
