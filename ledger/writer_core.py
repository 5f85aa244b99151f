"""The writer of one ledger: what it sends, what it confirms, when its ensemble changes, when and where it ends. Pure.

| state | appends | acks confirm | leaves when |
|---|---|---|---|
| OPEN | yes | yes | a bookie failed → CHANGING; `close()` → DRAINING |
| CHANGING | yes | **no: frozen** | the metadata holds another ensemble → OPEN; `close()` → SETTLING |
| SETTLING | no | **no: frozen** | the metadata holds another ensemble → DRAINING |
| DRAINING | no | yes | nothing is pending, or the first pending entry cannot reach Qa acks any more → CLOSING |
| CLOSING | no | **no: frozen** | the metadata reports its end → CLOSED; that it is being recovered → POISONED |
| POISONED | no | no | `close()` → CLOSING, to learn the end |
| CLOSED | no | no | – |

FENCED, UNAUTHORIZED and the quorum time-out lead from the first four to POISONED. CHANGING and SETTLING lead to
DRAINING when there is no replacement, and to CLOSING when the record is not OPEN any more. They lead to POISONED when
it stays unknown whether the change was written.

**The guarantee** (ledger protocol §1.3, §1.4, §1.6). An entry is confirmed once Qa bookies of the *committed*
ensemble have synced it and every entry before it is confirmed; so confirmed ⊆ [0 … last_entry] of the closed ledger:
- LAC is chosen as the end and frozen in the same step (`CloseLedger`), so that nothing is confirmed beyond it while
  the compare-and-set is in flight (M10); the end is LAC, never LAP (M18).
- **Ensemble change.** A bookie that fails, also on an entry confirmed already (Qa < Qw), freezes the acks in the
  same step. `ChangeEnsemble` asks for a new fragment from LAC+1 on; LAC does not move until the outcome is *known*
  (M10: an entry confirmed meanwhile would be on the old bookies, while the metadata names the new ones). Failures in
  between wait, and are handled in the same freeze by a further `ChangeEnsemble`. Only an ensemble that is in the
  metadata is used (M12). Then, in one synchronous step: every pending entry loses, per slot, the ack of a bookie that
  was replaced and is sent to the new one (`PendingAdds.replace_ensemble`, M13); the acks thaw; every entry with its
  quorum is confirmed (M11).
- As many bookies are replaced as possible. None → the ledger ends at what the old ensemble can still confirm. Some → it
  continues without the others as long as every write set has Qa slots left. After `changes_max` changes it ends.
- FENCED never changes an ensemble. DRAINING does not either: what the others cannot confirm ends NOT_STORED.

**How a pending entry ends**, besides confirmed:
- `NOT_STORED`, definite: the ledger was closed at this writer's own LAC, below the entry. It will never be read, so
  writing it again to a new ledger makes no duplicate.
- `FENCED`, unknown: another client recovers or has closed the ledger, and may have kept the entry. When its end is
  known and reaches the entry, the entry is confirmed instead.
- `UNAUTHORIZED`: a bookie refuses the key. The others may have the entry: unknown.
- `UNKNOWN`: it was not known in time how it ended (`QuorumTimedOut`, `EnsembleChangeUnknown`, `LedgerCloseUnknown`).

When a writer is poisoned or abandoned during a change, the change may be written or not. No entry was confirmed since
it began, so either record is right. Its answer is ignored.
Guards: tests/ledger/test_ensemble_change.py, tests/ledger/test_writer_core.py, tests/ledger/test_sabotage.py.

**Pending adds** (`PendingAdds`): the entries in flight to an ensemble, and the only code that decides that an entry is
stored. The writer uses it with the ensemble in the metadata, recovery with the ensemble that it has in memory.

The rule (ledger protocol §1.3): entry e is confirmed when Qa slots of its write set have synced it *and* every
entry before it is confirmed. So entries are confirmed in order, each once, and LAC is the last of them.
- `take_confirmed` is the only way to confirm an entry. While `frozen` it returns nothing: a close or an ensemble change
  is being written to the metadata, and an entry confirmed now could be beyond the end (M10, #4651). Acks are still
  recorded.
- `replace_ensemble` installs another ensemble in one step. For *every* pending entry and slot it compares the bookie to
  which the entry was sent with the bookie of the new ensemble (not the old with the new ensemble, #4459). If they
  differ, it drops the ack and returns what to send again. Nothing is confirmed before the last entry was compared (M11,
  #3005, #4097).
- An ack or failure from a bookie that is not (or no longer) in that slot is ignored.
- `find_first_copies` says which entries have a first copy, for receipts of producers with acks=one. It changes nothing:
  such an entry is not confirmed, readers do not see it, and it may end in each of the ways above.

Pending entries are dense: `lac + 1 … lap`. Guards: tests/ledger/test_pending.py.

Also in this file, each below its heading: which slots of an ensemble store an entry (striping_core); the pending adds
(pending_core); the memory of the appends of all ledgers (memory).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar, assert_never

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
    """How the entries of a ledger are spread over bookies: its ensemble size E, write quorum Qw and ack quorum Qa.
    Immutable. Raises InvalidConfiguration unless E >= Qw >= Qa >= 1."""

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

    def slots_of_entry(self, entry: int) -> tuple[int, ...]:
        """Returns the slots of the ensemble whose bookies store this entry: its write set."""
        return self.write_sets[entry % self.ensemble_size]

    def is_fence_complete(self, unknown: Collection[int]) -> bool:
        """Returns whether the ledger is fenced, even if the bookies in the slots `unknown` did not get the fence: no
        set of Qa bookies that could acknowledge an add is left (§1.7)."""
        return all(
            sum(slot in unknown for slot in write_set) < self.ack_quorum for write_set in self.write_sets
        )

    def is_writable(self, failed: Collection[int]) -> bool:
        """Returns whether entries can still be confirmed when the slots `failed` do not answer: every write set has at
        least Qa other slots."""
        return all(
            sum(slot not in failed for slot in write_set) >= self.ack_quorum for write_set in self.write_sets
        )

    @property
    def misses_proving_absence(self) -> int:
        """Returns how many bookies of a write set must certainly lack an entry to prove that it was never confirmed (Qw
        - Qa + 1): fewer than Qa could have it then (§1.8)."""
        return self.write_quorum - self.ack_quorum + 1

    def count_consecutive_entries(self, entry: int, slot: int) -> int:
        """Returns how many consecutive entries, from `entry` on, are stored at `slot`; 0 if `entry` itself is not.
        Returns 1 << 62 if every slot stores all entries (E = Qw)."""
        offset = (slot - entry) % self.ensemble_size
        if offset >= self.write_quorum:
            return 0
        return 1 << 62 if self.write_quorum == self.ensemble_size else offset + 1


# -------------------------------------------------------------------------------------------------- pending_core


P = TypeVar("P")


class PendingAdd:
    """An entry that is being added to a ledger and is not confirmed. The driver makes it; `PendingAdds.add` sets its
    fields. It may be added to another ledger after the first one has ended.

    `length` is the ledger's payload bytes up to and including this entry. `acks` are the slots whose bookies have
    synced the entry; `sent` has the bookie to which it was sent, by slot."""

    __slots__ = ("acks", "entry", "length", "sent")
    entry: int
    length: int
    acks: set[int]
    sent: dict[int, str]


A = TypeVar("A", bound=PendingAdd)


class PendingAddWithPayload(PendingAdd, Generic[P]):
    """A pending entry that carries a payload of type P."""

    __slots__ = ("payload",)

    def __init__(self, payload: P) -> None:
        self.payload = payload


class SendAdd(NamedTuple, Generic[A]):
    """Effect: send the entry to `bookie`, which is in `slot` of the ensemble, with the last-add-confirmed `lac` in its
    header."""

    add: A
    slot: int
    bookie: str
    lac: int


class AddAcked(NamedTuple):
    """Fact: the bookie in this slot has synced the entry."""

    entry: int
    slot: int
    bookie: str


class AddsAcked(NamedTuple):
    """Fact: the bookie in this slot has synced these entries. The same as an `AddAcked` for each of them."""

    entries: Sequence[int]
    slot: int
    bookie: str


class AddFailed(NamedTuple):
    """Fact: the entry was not stored at a bookie: the bookie did not answer in time, answered with an error, or is
    another one than expected, or the connection broke."""

    entry: int
    slot: int
    bookie: str


class PendingAdds(Generic[A]):
    """The entries of one ledger that were sent to bookies and are not confirmed, in order. Counts the acks of bookies
    and decides which entries are confirmed.

    `lac` (last add confirmed) and `lap` (last add pushed) are entry ids, -1: none. `length` is the ledger's payload
    bytes up to LAP, `length_confirmed` those up to LAC. `failed` has the slots whose bookie failed and was not
    replaced; new entries are not sent to these slots. While `frozen`, no entry is confirmed."""

    def __init__(self, striping: Striping, ensemble: Sequence[str]) -> None:
        self.striping = striping
        self.ensemble = tuple(ensemble)
        self.lac = self.lap = -1
        self.length = self.length_confirmed = 0
        self.frozen = False
        self.failed: set[int] = set()  # slots whose bookie failed and was not replaced
        self._adds: dict[int, A] = {}
        self._ack_quorum, self._write_sets = striping.ack_quorum, striping.write_sets

    def __len__(self) -> int:
        return len(self._adds)

    def add(self, add: A, size: int) -> None:
        """Adds the next entry, of `size` payload bytes, and sets its fields. `add.sent` gets the bookies of its write
        set, without failed ones."""
        entry = add.entry = self.lap = self.lap + 1
        add.length = self.length = self.length + size
        self._adds[entry] = add
        ensemble, failed = self.ensemble, self.failed
        add.acks, add.sent = set(), {}
        for slot in self._write_sets[entry % len(ensemble)]:
            if slot not in failed:
                add.sent[slot] = ensemble[slot]

    def add_and_make_sends(self, add: A, size: int) -> list[SendAdd[A]]:
        """Adds the next entry, like `add`. Returns the effects that send it, one for each bookie."""
        self.add(add, size)
        return [SendAdd(add, slot, bookie, self.lac) for slot, bookie in add.sent.items()]

    def record_ack(self, fact: AddAcked) -> list[A]:
        """Counts an ack of one entry, like `record_entry_acks`. Returns the entries that are confirmed now, in
        order."""
        return self.record_entry_acks(AddsAcked((fact.entry,), fact.slot, fact.bookie))

    def record_entry_acks(self, fact: AddsAcked) -> list[A]:
        """Counts an ack of each of several entries. Returns the entries that are confirmed now, in order. An ack of a
        bookie that is not in this slot, or of an entry that is not pending, is ignored."""
        entries, slot, bookie = fact
        if self.ensemble[slot] != bookie:
            return []
        pending = self._adds.get
        for entry in entries:
            add = pending(entry)
            if add is not None:
                add.acks.add(slot)
        return self.take_confirmed()

    def record_acks(self, adds: Sequence[A], slot: int, bookie: str) -> list[A]:
        """Counts an ack by `bookie` in `slot` for each of `adds`, like `record_entry_acks`; ignores the ack if the
        bookie is not in this slot. All of them must have been added to this object; it does no harm if some are
        confirmed already. Returns the entries that are confirmed now, in order."""
        if self.ensemble[slot] != bookie:
            return []
        for add in adds:
            add.acks.add(slot)
        return self.take_confirmed()

    def take_confirmed(self) -> list[A]:
        """Removes and returns the entries that are confirmed now: from the oldest pending one on, as long as each has
        the ack quorum Qa. Returns none while `frozen`."""
        confirmed: list[A] = []
        if self.frozen:
            return confirmed
        while (add := self._adds.get(self.lac + 1)) is not None and len(add.acks) >= self._ack_quorum:
            del self._adds[add.entry]
            self.lac = add.entry
            self.length_confirmed = add.length
            confirmed.append(add)
        return confirmed

    def find_first_copies(self, after: int) -> int:
        """Returns the last entry up to which each entry is confirmed, or has an ack of a bookie at least; `after` if
        that is larger. `after`: the last result for this ledger, so that no entry is looked at twice; -1: none."""
        last = max(after, self.lac)
        while (add := self._adds.get(last + 1)) is not None and add.acks:
            last += 1
        return last

    def replace_ensemble(self, ensemble: Sequence[str]) -> list[SendAdd[A]]:
        """Makes `ensemble` the ensemble of all pending entries: drops the acks of bookies that were replaced, and
        returns the effects that send these entries to the new bookies. The caller must call `take_confirmed`
        afterwards."""
        assert len(ensemble) == len(self.ensemble), "an ensemble keeps its size"
        self.failed = {slot for slot in self.failed if ensemble[slot] == self.ensemble[slot]}
        self.ensemble = tuple(ensemble)
        sends = []
        for add in self._adds.values():
            for slot in self.striping.slots_of_entry(add.entry):
                bookie = self.ensemble[slot]
                if add.sent.get(slot) != bookie and slot not in self.failed:
                    add.acks.discard(slot)
                    add.sent[slot] = bookie
                    sends.append(SendAdd(add, slot, bookie, self.lac))
        return sends

    def mark_slot_failed(self, slot: int, bookie: str) -> bool:
        """Marks the slot as failed if `bookie` is in it. Returns whether the bookie is in it; False: another one has
        replaced it, and nothing changes."""
        if self.ensemble[slot] != bookie:
            return False
        self.failed.add(slot)
        return True

    def is_unconfirmable(self, entry: int) -> bool:
        """Returns whether the pending entry can never be confirmed with this ensemble: fewer than Qa slots of its write
        set have acknowledged it or have not failed."""
        add = self._adds[entry]
        possible = sum(slot in add.acks or slot not in self.failed for slot in self.striping.slots_of_entry(entry))
        return possible < self._ack_quorum

    @property
    def is_head_unconfirmable(self) -> bool:
        """True if the oldest pending entry can no longer reach its ack quorum."""
        return bool(self._adds) and self.is_unconfirmable(self.lac + 1)

    @property
    def is_any_unconfirmable(self) -> bool:
        """True if some pending entry can no longer reach its ack quorum."""
        return bool(self.failed) and any(self.is_unconfirmable(entry) for entry in self._adds)

    @property
    def can_confirm_new_entries(self) -> bool:
        """Returns whether new entries can be confirmed: every write set has at least Qa slots that have not failed."""
        return not self.failed or self.striping.is_writable(self.failed)

    def take_all(self) -> list[A]:
        """Removes and returns all pending entries, in order. The caller must decide the outcome of each."""
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
            write_set = self.striping.slots_of_entry(add.entry)
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


class WriterState(enum.Enum):
    """The states of a ledger's writer, by the table in the module's docstring."""

    OPEN = enum.auto()
    CHANGING = enum.auto()
    SETTLING = enum.auto()
    DRAINING = enum.auto()
    CLOSING = enum.auto()
    POISONED = enum.auto()
    CLOSED = enum.auto()


_CHANGE_UNDER_WAY = (WriterState.CHANGING, WriterState.SETTLING)
_CONFIRMING = (WriterState.OPEN, WriterState.DRAINING)
_ENDING = (WriterState.CLOSING, WriterState.POISONED, WriterState.CLOSED)


class EntryOutcome(enum.Enum):
    """The outcome of an entry that was not confirmed. Also the reason why a writer accepts no appends any more."""

    NOT_STORED = "the ledger was closed before this entry"
    FENCED = "another client is recovering or has closed the ledger"
    UNAUTHORIZED = "a bookie refuses the ledger's key"
    UNKNOWN = "it was not known in time whether it is stored"


class AddRefused(NamedTuple):
    """Fact: a bookie answered an add with FENCED or UNAUTHORIZED. This never changes the ensemble."""

    why: EntryOutcome


class QuorumTimedOut(NamedTuple):
    """Fact: `entry` has been the oldest pending entry for too long, without an ack quorum. Ignored if the entry was
    confirmed meanwhile."""

    entry: int


class EnsembleChanged(NamedTuple):
    """Fact: the change of the ensemble is stored. The last fragment in the record begins at the requested entry and has
    these bookies."""

    ensemble: tuple[str, ...]


class NoReplacementFound(NamedTuple):
    """Fact: there is no bookie to replace a failed one. Nothing was stored."""


class EnsembleChangeRefused(NamedTuple):
    """Fact: the ensemble cannot be changed, because the record is not OPEN any more: it is IN_RECOVERY, CLOSED or
    deleted."""


class EnsembleChangeUnknown(NamedTuple):
    """Fact: the metadata did not answer in time, so it is unknown whether the new ensemble is stored."""


class LedgerEnded(NamedTuple):
    """Fact: the ledger's record is CLOSED, with this end: the id of its last entry (-1: it is empty), and its length in
    payload bytes. This writer or another client has closed it."""

    last_entry: int
    length: int


class LedgerCloseRefused(NamedTuple):
    """Fact: the writer cannot close the ledger, because its record is IN_RECOVERY or was deleted."""


class LedgerCloseUnknown(NamedTuple):
    """Fact: the metadata did not answer, so it is unknown whether the ledger is closed."""


ChangeFact = EnsembleChanged | NoReplacementFound | EnsembleChangeRefused | EnsembleChangeUnknown
WriterFact = (
    AddAcked | AddsAcked | AddFailed | AddRefused | QuorumTimedOut | ChangeFact | LedgerEnded | LedgerCloseRefused
    | LedgerCloseUnknown
)


class ConfirmEntry(NamedTuple, Generic[A]):
    """Effect: tell the ledger's owner that an entry is confirmed. Each entry is reported once, in order."""

    add: A


class FailEntry(NamedTuple, Generic[A]):
    """Effect: tell the ledger's owner that an entry was not confirmed, and why. Each entry is reported once, in
    order."""

    add: A
    why: EntryOutcome


class ChangeEnsemble(NamedTuple):
    """Effect: from `first_entry` on, replace the bookies in `failed`, (slot, bookie) pairs, or as many of them as
    possible. The next fact is a ChangeFact.

    The writer requests one change at a time. The driver chooses the replacements before it stores anything, and keeps
    them in every attempt."""

    first_entry: int
    failed: tuple[tuple[int, str], ...]


class CloseLedger(NamedTuple):
    """Effect: close the ledger with this end (the id of its last entry, -1: it is empty; its length in payload bytes),
    by changing its record from OPEN to CLOSED. The next fact is LedgerEnded, LedgerCloseRefused or
    LedgerCloseUnknown."""

    last_entry: int
    length: int


WriterEffect = SendAdd[A] | ConfirmEntry[A] | FailEntry[A] | ChangeEnsemble | CloseLedger


class WriterCore(Generic[A]):
    """The core of the writer of one ledger. The intents (`append`, `close`, `abandon`) and the facts (`receive`) return
    the effects to carry out.

    `adds` are the pending entries. `why` is the reason why the writer is poisoned (accepts no appends after a failure).
    `end` is the stored end of the ledger, once it is CLOSED. The writer changes the ensemble at most `changes_max`
    times."""

    def __init__(self, striping: Striping, ensemble: Sequence[str], *, changes_max: int = 1) -> None:
        self.state = WriterState.OPEN
        self.adds: PendingAdds[A] = PendingAdds(striping, ensemble)
        self.why: EntryOutcome | None = None  # the cause of being poisoned
        self.end: LedgerEnded | None = None
        self.fragment_first = 0  # key of the last fragment that is known to be committed
        self.changes = 0  # ensembles that were committed after the first
        self._changes_max = changes_max
        self._tried: set[int] = set()  # slots that this ensemble change asked to replace
        self._committed: tuple[str, ...] | None = None  # the newest ensemble that this ensemble change committed

    # ------------------------------------------------------------------------------ intents
    def append(self, add: A, size: int) -> list[SendAdd[A]]:
        """Adds the next entry, of `size` payload bytes. Returns the effects that send it to bookies. May be called only
        while `accepts_appends`."""
        assert self.state is WriterState.OPEN or self.accepts_appends, "only an open writer appends"
        return self.adds.add_and_make_sends(add, size)

    @property
    def accepts_appends(self) -> bool:
        """True if the writer accepts new entries: it is OPEN, or CHANGING its ensemble."""
        return self.state is WriterState.OPEN or self.state is WriterState.CHANGING

    def close(self) -> Sequence[WriterEffect[A]]:
        """Begins to close the ledger, after all entries that can still be confirmed. If the writer is POISONED, asks
        the metadata for the ledger's end again. Returns the effects to carry out; none while the writer waits for a
        fact or is CLOSED."""
        if self.state is WriterState.OPEN:
            return self._drain_out()
        if self.state is WriterState.CHANGING:
            self.state = WriterState.SETTLING
        return self._closing() if self.state is WriterState.POISONED else ()

    def abandon(self) -> Sequence[WriterEffect[A]]:
        """Stops the writer at once: the outcome of the pending entries is UNKNOWN. The ledger stays as the metadata has
        it, mostly OPEN, until another client recovers it. Returns the effects; none if the writer is CLOSED or POISONED
        already."""
        return () if self.state in (WriterState.CLOSED, WriterState.POISONED) else self._poison(EntryOutcome.UNKNOWN)

    # ------------------------------------------------------------------------------ facts
    def receive(self, fact: WriterFact) -> Sequence[WriterEffect[A]]:
        """Applies a fact. Returns the effects to carry out, in order; none if the fact changes nothing for the
        driver."""
        if isinstance(fact, AddsAcked):
            return self._acked(self.adds.record_entry_acks(fact))
        if isinstance(fact, AddAcked):
            return self._acked(self.adds.record_ack(fact))
        if isinstance(fact, AddFailed):
            return self._bookie_failed(fact)
        if isinstance(fact, AddRefused):
            return () if self.state in _ENDING else self._poison(fact.why)
        if isinstance(fact, QuorumTimedOut):
            return self._timed_out(fact)
        if isinstance(fact, LedgerEnded):
            return self._on_end_fact(fact)
        if isinstance(fact, LedgerCloseRefused):
            return self._end_failed(EntryOutcome.FENCED)
        if isinstance(fact, LedgerCloseUnknown):
            return self._end_failed(EntryOutcome.UNKNOWN)
        return self._change_ended(fact) if self.state in _CHANGE_UNDER_WAY else ()

    def _acked(self, confirmed: Sequence[A]) -> Sequence[WriterEffect[A]]:
        if not confirmed:
            return () if self.state is WriterState.OPEN else self._drained()
        effects: list[WriterEffect[A]] = [ConfirmEntry(add) for add in confirmed]
        if self.state is not WriterState.OPEN:
            effects += self._drained()
        return effects

    def _bookie_failed(self, fact: AddFailed) -> Sequence[WriterEffect[A]]:
        known = fact.slot in self.adds.failed  # one failure fails many adds
        if self.state in _ENDING or not self.adds.mark_slot_failed(fact.slot, fact.bookie):
            return ()
        if self.state is WriterState.OPEN:
            return () if known else self._start_change()
        return self._drained()

    # ------------------------------------------------------------------------------ the ensemble
    def _start_change(self) -> Sequence[WriterEffect[A]]:
        if self.changes >= self._changes_max:
            return self._drain_out()
        self.state = WriterState.CHANGING
        self.adds.frozen = True
        self._tried.clear()
        self._committed = None
        return self._ask_change()

    def _ask_change(self) -> Sequence[WriterEffect[A]]:
        slots = sorted(self.adds.failed - self._tried)
        self._tried.update(slots)
        return [ChangeEnsemble(self.adds.lac + 1, tuple((slot, self.adds.ensemble[slot]) for slot in slots))]

    def _change_ended(self, fact: ChangeFact) -> Sequence[WriterEffect[A]]:
        if isinstance(fact, EnsembleChangeRefused):
            return self._closing()  # cannot close it any more: this reads its end, or that there is none
        if isinstance(fact, EnsembleChangeUnknown):
            return self._poison(EntryOutcome.UNKNOWN)
        if isinstance(fact, EnsembleChanged):
            self.changes += 1
            self.fragment_first = self.adds.lac + 1
            self._committed = fact.ensemble
            changing = self.state is WriterState.CHANGING
            if changing and self.adds.failed > self._tried and self.changes < self._changes_max:
                return self._ask_change()
        elif not isinstance(fact, NoReplacementFound):
            assert_never(fact)
        return self._thaw()

    def _thaw(self) -> Sequence[WriterEffect[A]]:
        """Ends the freeze after a change of the ensemble, in the one step of §1.4: first drops the acks of replaced
        bookies, then sends entries to the new ones, and only then confirms entries."""
        effects: list[WriterEffect[A]] = []
        if self._committed is not None:
            effects += self.adds.replace_ensemble(self._committed)
        self.adds.frozen = False
        effects += [ConfirmEntry(add) for add in self.adds.take_confirmed()]
        if self.state is WriterState.CHANGING and self._committed is not None and self.adds.can_confirm_new_entries:
            self.state = WriterState.OPEN
            return effects
        return [*effects, *self._drain_out()]

    # ------------------------------------------------------------------------------ the end
    def _drain_out(self) -> Sequence[WriterEffect[A]]:
        self.state = WriterState.DRAINING
        return self._drained()

    def _drained(self) -> Sequence[WriterEffect[A]]:
        """Goes from DRAINING to CLOSING when no further entry can be confirmed."""
        if self.state is WriterState.DRAINING and (not len(self.adds) or self.adds.is_head_unconfirmable):
            return self._closing()
        return ()

    def _closing(self) -> Sequence[WriterEffect[A]]:
        self.state = WriterState.CLOSING
        self.adds.frozen = True
        return [CloseLedger(self.adds.lac, self.adds.length_confirmed)]

    def _timed_out(self, fact: QuorumTimedOut) -> Sequence[WriterEffect[A]]:
        if not len(self.adds) or fact.entry != self.adds.lac + 1:
            return ()  # it was confirmed in the meantime
        if self.state is WriterState.CLOSING:
            return self._fail_all(EntryOutcome.UNKNOWN)
        return self._poison(EntryOutcome.UNKNOWN)

    def _poison(self, why: EntryOutcome) -> Sequence[WriterEffect[A]]:
        self.state = WriterState.POISONED
        self.why = why
        self.adds.frozen = True
        return self._fail_all(why)

    def _end_failed(self, why: EntryOutcome) -> Sequence[WriterEffect[A]]:
        assert self.state is WriterState.CLOSING, "only a closing writer gets facts about its end"
        return self._poison(why)

    def _on_end_fact(self, fact: LedgerEnded) -> Sequence[WriterEffect[A]]:
        assert self.state is WriterState.CLOSING, "only a closing writer gets facts about its end"
        assert fact.last_entry >= self.adds.lac, "a ledger never ends before a confirmed entry"
        self.state = WriterState.CLOSED
        self.end = fact
        why = EntryOutcome.NOT_STORED if fact.last_entry == self.adds.lac else EntryOutcome.FENCED
        effects: list[WriterEffect[A]] = []
        for add in self.adds.take_all():
            if add.entry <= fact.last_entry:
                self.adds.lac, self.adds.length_confirmed = add.entry, add.length
                effects.append(ConfirmEntry(add))
            else:
                effects.append(FailEntry(add, why))
        return effects

    def _fail_all(self, why: EntryOutcome) -> Sequence[WriterEffect[A]]:
        return [FailEntry(add, why) for add in self.adds.take_all()]

    def check(self) -> None:
        self.adds.check()
        assert self.adds.frozen == (self.state not in _CONFIRMING), (
            "nothing is confirmed by acks while the ensemble or the end is being decided"
        )
        assert self.fragment_first <= self.adds.lac + 1, "the last fragment begins at most one past LAC"
        assert self.changes <= self._changes_max, "an ensemble changes a bounded number of times"
        if self.state is WriterState.OPEN:
            assert self.adds.can_confirm_new_entries, "an open writer has Qa live slots in every write set"
        if self.state in _CHANGE_UNDER_WAY and self._committed is not None:
            assert self.fragment_first == self.adds.lac + 1, "LAC does not move while an ensemble change is on its way"
        assert (self.why is not None) or self.state is not WriterState.POISONED, "a poisoned writer says why"
        closed = self.state is WriterState.CLOSED
        assert (self.end is not None) == closed, "a closed writer knows its end, no other does"
        if self.state in (WriterState.POISONED, WriterState.CLOSED):
            assert not len(self.adds), "nothing is pending once the handle is finished"
        if self.end is not None:
            assert self.adds.lac <= self.end.last_entry, "every confirmed entry is in the closed ledger"


# --------------------------------------------------------------------------------------------------------------- memory
# Memory for appends: the entries of all ledgers of a client until every bookie that was sent a copy has answered.
#
# An entry that is confirmed by its quorum stays in memory as long as another bookie has not answered: a bookie that
# hangs holds what all ledgers sent it for `add_timeout_s`. So there is one bound for all ledgers together. A request is
# counted once, however many copies of it are sent. Above the bound no ledger has room (`LedgerWriter.has_room`), and
# `LedgerWriter.wait_room` returns when there is room again, first for the ledger that has waited longest. The wait
# always ends: a bookie answers, or fails after `add_timeout_s`. Topics and compactions, which append much, wait.
# Cursors and transactions are bounded by their callers, and refused only for the bounds of their own ledger: work that
# frees memory must never wait for memory. Guards: tests/ledger/test_memory.py.


EXPECTED_APPEND_BYTES = 64 << 10
"""The number of bytes that a waiting ledger is expected to append. When memory is released, one waiting ledger is
called for each EXPECTED_APPEND_BYTES that are free."""


class AppendMemoryBudget:
    """Counts the memory of the entries that a `LedgerClient` is appending to all its ledgers. `held` is their size and
    `limit` the bound, in bytes. This object refuses nothing: the caller must check `has_room` before it appends. Within
    one turn of the event loop `held` may exceed `limit`."""

    __slots__ = ("held", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit
        self.waiting: dict[Callable[[], None], None] = {}

    @property
    def has_room(self) -> bool:
        """True while `held` is below `limit`."""
        return self.held < self.limit

    def add_waiter(self, look: Callable[[], None]) -> None:
        """Registers the function `look`, which must not raise. It is called once, when there is room for an append
        again. Does nothing if `look` is registered already."""
        self.waiting.setdefault(look)

    def remove_waiter(self, look: Callable[[], None]) -> None:
        """Removes a function that `add_waiter` registered. Does nothing if it is not registered."""
        self.waiting.pop(look, None)

    def release(self, size: int) -> None:
        """Subtracts `size` bytes from `held`, and calls waiting functions if there is room now."""
        self.held -= size
        if self.waiting:
            self.notify_waiters()

    def notify_waiters(self) -> None:
        """Calls the functions that `add_waiter` registered, the oldest first, as long as there is room for more
        appends. Must be called after `held` was reduced."""
        room = self.limit - self.held
        while self.waiting and (room > 0 or not self.held):  # if nothing is held, no later release tells the rest
            look = next(iter(self.waiting))
            del self.waiting[look]
            look()
            room -= EXPECTED_APPEND_BYTES
