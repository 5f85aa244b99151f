"""Pending adds: the entries in flight to an ensemble, and the only code that decides that one is stored.

Used by the writer (against the committed ensemble) and by recovery's write-back (against its in-memory one).

The rule (ledger protocol §1.3): entry e is confirmed when Qa slots of its write set have synced it *and* every
entry before it is confirmed. So entries are confirmed in order, each once, and LAC is the last of them.
- `take_confirmed` is the only way to confirm an entry. While `frozen` it returns nothing: the end of the ledger is
  being decided elsewhere (a close or an ensemble change is being written to the metadata), and an entry confirmed now
  could be beyond it (M10, #4651). Acks are still recorded.
- `replace_ensemble` installs another ensemble in one step: for *every* pending entry and slot it compares the bookie to
  which the entry was sent with the bookie of the new ensemble (not the old with the new ensemble, #4459), drops the ack
  if they differ, and returns what to send again. Nothing is drained before the last entry was compared (M11, #3005,
  #4097).
- An ack or failure from a bookie that is not (or no longer) in that slot is ignored.

Pending entries are dense: `lac + 1 … lap`. Guards: tests/ledger/test_pending.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..proto.errors import InvalidConfiguration

# ------------------------------------------------------------------------------------------------- striping_core
# Striping: which slots of an ensemble store an entry, and when enough bookies have answered a fence.
#
# A fragment's ensemble has E slots. Entry e is on its *write set*, the Qw slots e, e+1, …, e+Qw-1 (mod E), and counts
# as stored when Qa of them have synced it: E >= Qw >= Qa >= 1 (ledger protocol §1.1).
#
# **Coverage** (§1.7): no add can be acknowledged any more once in *every* write set (all E rotations) fewer than Qa
# slots are unknown. Known is a bookie that answered the fence (OK, no such entry, no such ledger); unknown is every
# other one, silence included. Then every set of Qa slots that could acknowledge an entry contains a fenced one. The
# simpler formula "E-Qa+1 answers" is stricter when E > Qw. Guards: tests/ledger/test_striping.py (brute force over
# every shape up to E = 6).


class Striping:
    """The ensemble size and the quorums of a ledger. Immutable. Raises InvalidConfiguration unless E >= Qw >= Qa >=
    1."""

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

    def is_fence_complete(self, unknown: Collection[int]) -> bool:
        """Whether the fence is complete: no add can be acknowledged any more, although the bookies of the slots in
        `unknown` have not answered the fence (§1.7)."""
        return all(
            sum(slot in unknown for slot in write_set) < self.ack_quorum for write_set in self.write_sets
        )

    def is_writable(self, failed: Collection[int]) -> bool:
        """Whether every write set has at least Qa slots that are not in `failed`."""
        return all(
            sum(slot not in failed for slot in write_set) >= self.ack_quorum for write_set in self.write_sets
        )

    @property
    def misses_proving_absence(self) -> int:
        """The number of definite misses that prove that an entry was never acknowledged: fewer than Qa slots are left
        (§1.8)."""
        return self.write_quorum - self.ack_quorum + 1

    def run_length(self, entry: int, slot: int) -> int:
        """Returns how many consecutive entries from `entry` on are stored at `slot`; 0 if the first is not; 1 << 62 if
        E = Qw."""
        offset = (slot - entry) % self.ensemble_size
        if offset >= self.write_quorum:
            return 0
        return 1 << 62 if self.write_quorum == self.ensemble_size else offset + 1


# -------------------------------------------------------------------------------------------------- pending_core


P = TypeVar("P")


class PendingAdd:
    """An entry in flight, made by the driver. Its fields are set when it is added to a ledger; it may be added to
    another ledger after the first has ended. `length` is the ledger's payload bytes up to and including this entry.

    `acks` are the slots whose bookies have synced the entry; `sent` is slot → bookie to which the entry was sent.
    """

    __slots__ = ("acks", "entry", "length", "sent")
    entry: int
    length: int
    acks: set[int]
    sent: dict[int, str]


A = TypeVar("A", bound=PendingAdd)


class PayloadAdd(PendingAdd, Generic[P]):
    """A pending entry with a payload of any type."""

    __slots__ = ("payload",)

    def __init__(self, payload: P) -> None:
        self.payload = payload


class SendAdd(NamedTuple, Generic[A]):
    """Effect: send the entry to `bookie`, which is in `slot`, with `lac` in its header."""

    add: A
    slot: int
    bookie: str
    lac: int


class AddAcked(NamedTuple):
    """Fact: the bookie has synced the entry."""

    entry: int
    slot: int
    bookie: str


class AddsAcked(NamedTuple):
    """Fact: the bookie has synced these entries; equivalent to an `AddAcked` for each of them."""

    entries: Sequence[int]
    slot: int
    bookie: str


class AddFailed(NamedTuple):
    """Fact: the bookie did not answer the add in time or answered with an error, the connection broke, or the bookie
    has another uuid."""

    entry: int
    slot: int
    bookie: str


class PendingAdds(Generic[A]):
    """The entries of one ledger that are sent and not confirmed, in order.

    `lac` and `lap` are entry ids, -1: none. `length` is in payload bytes up to LAP, `length_confirmed` up to LAC.
    `failed` has the slots whose bookie failed and was not replaced; new entries are not sent to them.
    """

    def __init__(self, striping: Striping, ensemble: Sequence[str], *, lac: int = -1, length: int = 0) -> None:
        self.striping = striping
        self.ensemble = tuple(ensemble)
        self.lac = self.lap = lac
        self.length = self.length_confirmed = length
        self.frozen = False
        self.failed: set[int] = set()  # slots whose bookie failed and was not replaced
        self._adds: dict[int, A] = {}
        self._ack_quorum, self._write_sets = striping.ack_quorum, striping.write_sets

    def __len__(self) -> int:
        return len(self._adds)

    def add(self, add: A, size: int) -> None:
        """Adds the next entry, of `size` payload bytes, and sets its fields; `sent` gets the slots of the write set
        whose bookie has not failed."""
        entry = add.entry = self.lap = self.lap + 1
        add.length = self.length = self.length + size
        self._adds[entry] = add
        ensemble, failed = self.ensemble, self.failed
        add.acks, add.sent = set(), {}
        for slot in self._write_sets[entry % len(ensemble)]:
            if slot not in failed:
                add.sent[slot] = ensemble[slot]

    def add_with_sends(self, add: A, size: int) -> list[SendAdd[A]]:
        """Adds the next entry like `add`; returns the effects that send it, one for each slot."""
        self.add(add, size)
        return [SendAdd(add, slot, bookie, self.lac) for slot, bookie in add.sent.items()]

    def ack(self, fact: AddAcked) -> list[A]:
        """Counts the ack; returns the entries that it confirms, in order."""
        return self.count_acks(AddsAcked((fact.entry,), fact.slot, fact.bookie))

    def count_acks(self, fact: AddsAcked) -> list[A]:
        """Counts all the acks, then returns the entries that they confirm together, in order."""
        entries, slot, bookie = fact
        if self.ensemble[slot] != bookie:
            return []
        pending = self._adds.get
        for entry in entries:
            add = pending(entry)
            if add is not None:
                add.acks.add(slot)
        return self.take_confirmed()

    def count_acks_of_adds(self, adds: Sequence[A], slot: int, bookie: str) -> list[A]:
        """Counts an ack of `adds`, which must have been added here, like `count_acks`; adds that are confirmed already
        do not matter. Returns those that are confirmed now, in order."""
        if self.ensemble[slot] != bookie:
            return []
        for add in adds:
            add.acks.add(slot)
        return self.take_confirmed()

    def take_confirmed(self) -> list[A]:
        """Removes and returns, in order, the entries at the head that have Qa acks; none while `frozen`."""
        confirmed: list[A] = []
        if self.frozen:
            return confirmed
        while (add := self._adds.get(self.lac + 1)) is not None and len(add.acks) >= self._ack_quorum:
            del self._adds[add.entry]
            self.lac = add.entry
            self.length_confirmed = add.length
            confirmed.append(add)
        return confirmed

    def replace_ensemble(self, ensemble: Sequence[str]) -> list[SendAdd[A]]:
        """Installs another ensemble: drops acks of replaced bookies and returns what to send to the new ones. The
        caller must call `take_confirmed` afterwards."""
        assert len(ensemble) == len(self.ensemble), "an ensemble keeps its size"
        self.failed = {slot for slot in self.failed if ensemble[slot] == self.ensemble[slot]}
        self.ensemble = tuple(ensemble)
        sends = []
        for add in self._adds.values():
            for slot in self.striping.write_set(add.entry):
                bookie = self.ensemble[slot]
                if add.sent.get(slot) != bookie and slot not in self.failed:
                    add.acks.discard(slot)
                    add.sent[slot] = bookie
                    sends.append(SendAdd(add, slot, bookie, self.lac))
        return sends

    def mark_failed(self, slot: int, bookie: str) -> bool:
        """Marks the bookie of `slot` as failed; returns False if another bookie is in that slot."""
        if self.ensemble[slot] != bookie:
            return False
        self.failed.add(slot)
        return True

    def is_unconfirmable(self, entry: int) -> bool:
        """Whether a pending entry cannot reach Qa acks: too many slots of its write set failed without an ack."""
        add = self._adds[entry]
        possible = sum(slot in add.acks or slot not in self.failed for slot in self.striping.write_set(entry))
        return possible < self._ack_quorum

    @property
    def is_head_unconfirmable(self) -> bool:
        return bool(self._adds) and self.is_unconfirmable(self.lac + 1)

    @property
    def is_any_unconfirmable(self) -> bool:
        return bool(self.failed) and any(self.is_unconfirmable(entry) for entry in self._adds)

    @property
    def can_confirm(self) -> bool:
        """Whether any entry can still get Qa acks: no write set has lost too many slots."""
        return not self.failed or self.striping.is_writable(self.failed)

    def take_all(self) -> list[A]:
        """Removes and returns every pending entry, in order. The caller must decide their outcome."""
        adds = list(self._adds.values())
        self._adds.clear()
        return adds

    def check(self) -> None:
        assert -1 <= self.lac <= self.lap, "LAC never passes LAP"
        assert self.length_confirmed <= self.length, "the confirmed length is part of the length"
        entries = list(self._adds)
        assert entries == sorted(entries), "pending entries are in entry order"
        assert all(self.lac < entry <= self.lap for entry in entries), "pending entries are in LAC+1 … LAP"
        for add in self._adds.values():
            write_set = self.striping.write_set(add.entry)
            assert add.acks <= set(write_set), "only slots of the write set acknowledge an entry"
            assert all(add.sent.get(slot) == self.ensemble[slot] for slot in add.acks), (
                "an ack counts only from the bookie of its slot"
            )
            assert self.frozen or all(
                add.sent.get(slot) == self.ensemble[slot] for slot in write_set if slot not in self.failed
            ), "the bookie of a slot that did not fail was sent the entry"
        if entries and not self.frozen:
            assert entries[0] == self.lac + 1, "no entry is missing between LAC and the pending ones"
            assert len(self._adds[entries[0]].acks) < self._ack_quorum, "a stored head entry is confirmed at once"
