"""Striping: which slots of an ensemble store an entry, and when enough bookies have answered a fence.

A fragment's ensemble has E slots. Entry e is on its *write set*, the Qw slots e, e+1, …, e+Qw-1 (mod E), and counts
as stored when Qa of them have synced it: E >= Qw >= Qa >= 1 (ledger protocol §1.1).

**Coverage** (§1.7): no add can be acknowledged any more once in *every* write set (all E rotations) fewer than Qa slots
are unknown. Known is a bookie that answered the fence (OK, no such entry, no such ledger); unknown is every other one,
silence included. Then every set of Qa slots that could acknowledge an entry
contains a fenced one. The simpler formula "E-Qa+1 answers" is stricter when E > Qw.
Guards: tests/ledger/core/test_striping.py (brute force over every shape up to E = 6).
"""

from __future__ import annotations

from collections.abc import Collection

from ...proto.errors import InvalidConfiguration


class Striping:
    """The shape of a ledger. Immutable; raises InvalidConfiguration unless E >= Qw >= Qa >= 1."""

    __slots__ = ("ack_quorum", "ensemble_size", "write_quorum", "write_sets")

    def __init__(self, ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
        if not ensemble_size >= write_quorum >= ack_quorum >= 1:
            raise InvalidConfiguration(
                f"ensemble size {ensemble_size}, write quorum {write_quorum}, ack quorum {ack_quorum}: "
                "must be ensemble >= write >= ack >= 1",
                ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum,
            )  # fmt: skip
        self.ensemble_size = ensemble_size
        self.write_quorum = write_quorum
        self.ack_quorum = ack_quorum
        self.write_sets = tuple(
            tuple((first + i) % ensemble_size for i in range(write_quorum)) for first in range(ensemble_size)
        )

    def write_set(self, entry: int) -> tuple[int, ...]:
        return self.write_sets[entry % self.ensemble_size]

    def is_covered(self, unknown: Collection[int]) -> bool:
        """Whether the fence holds while the slots in `unknown` have not answered (§1.7)."""
        return all(
            sum(slot in unknown for slot in write_set) < self.ack_quorum for write_set in self.write_sets
        )

    def is_writable(self, failed: Collection[int]) -> bool:
        """Whether every write set keeps Qa slots without those in `failed`."""
        return all(
            sum(slot not in failed for slot in write_set) >= self.ack_quorum for write_set in self.write_sets
        )

    @property
    def misses_for_negative(self) -> int:
        """Returns the number of definite misses that prove an entry was never acknowledged: the other slots are fewer
        than Qa (§1.8)."""
        return self.write_quorum - self.ack_quorum + 1

    def run_length(self, entry: int, slot: int) -> int:
        """Returns how many entries in a row from `entry` are on `slot`: 0 if not even the first; 1 << 62 if E = Qw."""
        offset = (slot - entry) % self.ensemble_size
        if offset >= self.write_quorum:
            return 0
        return 1 << 62 if self.write_quorum == self.ensemble_size else offset + 1
