"""Recovery: how a ledger whose writer is gone, or must stop, gets its end. Pure (ledger protocol §1.7, §1.8).

The caller has made the record IN_RECOVERY (metadata_core.py `decide_recovery_start`) and read it *after* that; its last
fragment is the snapshot. Several recoverers may run at once: all write back, one close wins, the others adopt its end.

| state | action | next |
|---|---|---|
| FENCING | fences every bookie of the last fragment, asks its LAC | all write sets covered → READING; not → ABORTED |
| READING | reads entries from LAC0+1, writes back what it finds | one absent, rest stored → CLOSING; unsure → ABORTED |
| CLOSING | IN_RECOVERY → CLOSED with end and changed ensembles | stored → DONE; refused → ABORTED |

An entry is read with FENCE from its *whole* write set in the snapshot, `batch` entries at a time. Entries are read up
to one beyond the last entry that a fenced bookie knows of: that one is the first that can be absent. It is read and
voted on like every other. If it is found, at a bookie that did not answer to the fence, the next one is read.

**The guarantee**: every entry that a writer ever confirmed is in the closed ledger. It rests on
1. *LAC0 is a lower bound*: the largest LAC reported, at least the entry before the last fragment (M02, #2615):
   entries up to it are stored.
2. *Generous on positive*: one undamaged copy is enough; it is written back until Qa bookies have synced it.
3. *Strict on negative*: only Qw-Qa+1 bookies that are *certain* not to have it prove that it was never confirmed, and
   never will be: each of them was fenced before it answered (M01, M05). Errors, damage and silence are no votes (M06).
   When neither is proven, recovery gives up, the ledger stays IN_RECOVERY, and any client may try again.
4. *Reads go to the snapshot*, never to a bookie that recovery itself added: that one lacks the old entries, and its
   negative vote would count (M04).
5. *A bookie that fails during write-back is replaced in memory only*. The change reaches the metadata with the CLOSED
   record and not before, or another recoverer would read from bookies that never got the entries (M03). Without a
   replacement the write-back continues with the other slots while Qa copies are possible.
6. *The LAC never shows an attempt*: every entry that is written back carries LAC0. Otherwise, if another attempt ended
   the ledger before that entry, a reader would have read an entry that is not in the ledger; or a third attempt would
   begin after entries that are only on bookies which no record names.

A bookie of a ledger that is answered from memory (ledger/handle.py) may have lost what it answered, so a miss proves
less: the entry is absent only when every other bookie has answered too, or cannot, and none of them has it.

Entries are decided in order: after the first absent one nothing counts, even when a later one is found.

The length of the ledger comes from its last entry; when nothing is found beyond LAC0, entry LAC0 is read for it. LAC0
may be in an earlier fragment, on bookies that are gone, and does not affect the end: when no bookie gives it, recovery
continues, and gives up only if it needs the length of LAC0 in the end. When its whole write set is *certain* not to
have LAC0, no retry can find it. The ledger still ends with LAC0, because it was confirmed, and readers get DataLost.
The length is then that of an entry 1, 2, 4, … before LAC0, and 0 if none is found: only statistics use it.
Guards: tests/ledger/test_recovery_core.py, tests/ledger/test_sabotage.py.

Also in this file, below its heading: the votes of a write set on one entry, and what they prove (votes_core).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, assert_never

from ..metadata.records import IN_RECOVERY, Fragment, LedgerRecord
from .metadata_core import find_fragment_of_entry, get_striping_of_record, is_answered_from_memory
from .reader_core import StoredCopy
from .writer_core import AddAcked, AddFailed, PendingAdds, PendingAddWithPayload, SendAdd

# ---------------------------------------------------------------------------------------------------- votes_core
# The votes of a write set on one entry, and what they prove (recovery_core.py, rules 2 and 3). Pure.
#
# One undamaged copy is positive. Only misses of bookies that are *certain* not to have the entry are negative; an
# error, damage or silence answers and is no vote (M05, M06). Guards: tests/ledger/test_recovery_core.py,
# tests/ledger/test_sabotage.py.


class EntryVerdict(enum.Enum):
    """The verdict whether an entry exists, by the votes of bookies. WAITING: more votes may come. POSITIVE: it exists.
    NEGATIVE: it was never confirmed. UNKNOWN: all bookies have answered, and the votes prove nothing."""

    WAITING = enum.auto()
    POSITIVE = enum.auto()
    NEGATIVE = enum.auto()
    UNKNOWN = enum.auto()


class EntryVotes:
    """The votes of the bookies of one write set on whether an entry exists. `of`: the slots of the write set.
    `answered` and `missing` are the slots that have answered, and that certainly lack the entry; `found` is a copy."""

    __slots__ = ("answered", "found", "missing", "of")

    def __init__(self, of: Sequence[int]) -> None:
        self.of = of
        self.answered: set[int] = set()
        self.missing: set[int] = set()
        self.found: StoredCopy | None = None

    def judge_unconfirmed_entry(self, misses_for_negative: int, *, waits_for_all: bool = False) -> EntryVerdict:
        """Returns the verdict on an entry after LAC0 (the largest last-add-confirmed that the fenced bookies reported).
        `misses_for_negative`: how many certain misses prove that the entry was never confirmed. `waits_for_all`: True
        if a bookie that misses it may have had it, so that the others are asked too."""
        waits = waits_for_all and len(self.answered) < len(self.of)
        if self.found is None and len(self.missing) >= misses_for_negative and not waits:
            return EntryVerdict.NEGATIVE
        return self.judge_confirmed_entry()

    def judge_confirmed_entry(self) -> EntryVerdict:
        """Returns the verdict on an entry up to LAC0 (the largest last-add-confirmed that the fenced bookies reported).
        Such an entry was confirmed, so misses prove nothing, and the verdict is never NEGATIVE."""
        if self.found is not None:
            return EntryVerdict.POSITIVE
        return EntryVerdict.UNKNOWN if len(self.answered) == len(self.of) else EntryVerdict.WAITING


# ------------------------------------------------------------------------------------------------- recovery_core


ChooseReplacement = Callable[[Sequence[str]], str | None]
"""A function that gets bookies and returns a writable bookie that is not among them; None if there is none."""


class RecoveryState(enum.Enum):
    """The states of a recovery, by the table in the module's docstring. NEW: before `start`."""

    NEW = enum.auto()
    FENCING = enum.auto()
    READING = enum.auto()
    CLOSING = enum.auto()
    DONE = enum.auto()
    ABORTED = enum.auto()


_WITHOUT_LAC0 = (RecoveryState.NEW, RecoveryState.FENCING, RecoveryState.ABORTED)


class RecoveryFailure(enum.Enum):
    """The reason why an attempt to recover a ledger failed. The ledger stays IN_RECOVERY, and another attempt may be
    made later."""

    NOT_FENCED = "too few bookies of the last fragment answered to the fence"
    UNDECIDED = "an entry is neither found nor proven absent: too few bookies could answer"
    NOT_STORED = "too few writable bookies to store a recovered entry again"
    CLOSE_REFUSED = "the ledger's record changed in a way that recovery does not allow, or was deleted"


class SendFence(NamedTuple):
    """Effect: fence the ledger at the bookie in `slot`, by a READ_LAC with the flag FENCE."""

    slot: int
    bookie: str


class SendRead(NamedTuple):
    """Effect: read `entry` from the bookie in `slot`, by a READ with the flag FENCE."""

    entry: int
    slot: int
    bookie: str


class CloseRecoveredLedger(NamedTuple):
    """Effect: close the ledger, by changing its record from IN_RECOVERY to CLOSED. The next fact is LedgerRecordClosed
    or RecoveredCloseRefused. `last_entry`: the id of its last entry, -1: it is empty; `length`: its payload bytes;
    `fragments`: its fragments with the ensembles that this recovery changed."""

    last_entry: int
    length: int
    fragments: tuple[Fragment, ...]


class ReportRecoveryFailure(NamedTuple):
    """Effect: tell the caller that the recovery failed, and why. `entry` is the entry that could not be decided; -1:
    none."""

    why: RecoveryFailure
    entry: int


class FinishRecovery(NamedTuple):
    """Effect: tell the caller that the ledger is CLOSED with this `record`. Another recoverer may have written it."""

    record: LedgerRecord


class LedgerFencedAtBookie(NamedTuple):
    """Fact: the bookie in `slot` has fenced the ledger durably. `lac`: the last-add-confirmed that it knows; -1: none.
    `last`: the largest entry that it has; -1: none; None: its answer does not say. `last` is a hint and no vote."""

    slot: int
    lac: int
    last: int | None = None


class FenceFailed(NamedTuple):
    """Fact: the bookie in `slot` did not answer the fence, or answered with an error. Whether the ledger is fenced
    there is unknown."""

    slot: int


class EntryFound(NamedTuple):
    """Fact: the bookie in `slot` sent `stored`, an undamaged copy of `entry`. This is a vote that the entry exists."""

    entry: int
    slot: int
    stored: StoredCopy


class EntryMissing(NamedTuple):
    """Fact: the bookie in `slot` has fenced the ledger and is certain that it does not have the entry (NO_SUCH_ENTRY,
    NO_SUCH_LEDGER). This is a vote that the entry does not exist."""

    entry: int
    slot: int


class ReadFailed(NamedTuple):
    """Fact: the bookie in `slot` did not answer the read, sent damaged bytes, or answered UNKNOWN or an error. This is
    no vote."""

    entry: int
    slot: int


class LedgerRecordClosed(NamedTuple):
    """Fact: the ledger's record is CLOSED. This attempt or another recoverer has closed it."""

    record: LedgerRecord


class RecoveredCloseRefused(NamedTuple):
    """Fact: the ledger's record does not allow the close: its last fragment has changed, or it was deleted."""


RecoveryFact = (
    LedgerFencedAtBookie
    | FenceFailed
    | EntryFound
    | EntryMissing
    | ReadFailed
    | AddAcked
    | AddFailed
    | LedgerRecordClosed
    | RecoveredCloseRefused
)
RecoveryEffect = SendFence | SendRead | SendAdd[
    PendingAddWithPayload[StoredCopy]
] | CloseRecoveredLedger | ReportRecoveryFailure | FinishRecovery


class LedgerRecovery:
    """The core of one attempt to recover a ledger. Calling `choose` returns a bookie in place of one that fails while
    entries are written back, or None if there is none. At most `batch` entries are read or written back at a time."""

    def __init__(self, record: LedgerRecord, choose: ChooseReplacement, *, batch: int = 32) -> None:
        assert record.state == IN_RECOVERY, "recovery begins after the record is IN_RECOVERY"
        self.state = RecoveryState.NEW
        self.snapshot = record
        self.striping = get_striping_of_record(record)
        self._waits_for_all = is_answered_from_memory(record)
        self.fragments = list(record.fragments)
        self.end: int | None = None  # last entry, once an absent one is proven
        self.lac0 = -1
        self.last_copy: StoredCopy | None = None  # of the last entry that was found
        self._choose = choose
        self._batch = batch
        self._last = record.fragments[-1]
        self._unknown = set(range(self.striping.ensemble_size))
        self._silent = set(self._unknown)  # slots that have not answered the fence at all
        self._lacs: list[int] = []
        self._lasts: list[int | None] = []  # largest entry of each fenced bookie
        self._votes: dict[int, EntryVotes] = {}  # votes on entries that are read and not decided, in order
        self._next_read = 0
        self._next_decided = 0
        self._adds: PendingAdds[PendingAddWithPayload[StoredCopy]] = PendingAdds(self.striping, self._last.bookies)
        self._failed: list[str] = []  # bookies that failed during write-back
        self._length: int | None = None
        self._is_lac0_lost = False  # whether the whole write set of LAC0 is certain not to have it
        self._before_lac0 = 1  # the next entry that is read for its length is this many before LAC0

    # ------------------------------------------------------------------------------ facts
    def start(self) -> Sequence[RecoveryEffect]:
        """Begins the attempt. Returns the effects that fence the ledger at each bookie of its last fragment."""
        assert self.state is RecoveryState.NEW, "an attempt starts once"
        self.state = RecoveryState.FENCING
        return [SendFence(slot, bookie) for slot, bookie in enumerate(self._last.bookies)]

    def receive(self, fact: RecoveryFact) -> Sequence[RecoveryEffect]:
        """Applies a fact. Returns the effects to carry out, in order. A fact that comes too late for the state of the
        attempt has no effects."""
        if self.state in (RecoveryState.DONE, RecoveryState.ABORTED):
            return ()
        if isinstance(fact, LedgerFencedAtBookie | FenceFailed):
            return self._fence_answered(fact) if self.state is RecoveryState.FENCING else ()
        if isinstance(fact, EntryFound | EntryMissing | ReadFailed):
            return self._voted(fact) if self.state is RecoveryState.READING else ()
        if isinstance(fact, AddAcked):
            return self._acked(fact) if self.state is RecoveryState.READING else ()
        if isinstance(fact, AddFailed):
            return self._bookie_failed(fact) if self.state is RecoveryState.READING else ()
        if isinstance(fact, LedgerRecordClosed):
            self.state = RecoveryState.DONE
            return [FinishRecovery(fact.record)]
        if isinstance(fact, RecoveredCloseRefused):
            return self._abort(RecoveryFailure.CLOSE_REFUSED)
        assert_never(fact)

    # ------------------------------------------------------------------------------ fencing
    def _fence_answered(self, fact: LedgerFencedAtBookie | FenceFailed) -> Sequence[RecoveryEffect]:
        self._silent.discard(fact.slot)
        if isinstance(fact, LedgerFencedAtBookie):
            self._unknown.discard(fact.slot)
            self._lacs.append(fact.lac)
            self._lasts.append(fact.last)
        if self.striping.is_fence_complete(self._unknown):
            return self._begin_reading()
        return () if self._silent else self._abort(RecoveryFailure.NOT_FENCED)

    def _begin_reading(self) -> Sequence[RecoveryEffect]:
        self.state = RecoveryState.READING
        self.lac0 = self._lower_bound()
        self._adds.lac = self._adds.lap = self.lac0
        # Entry LAC0 itself is read for the ledger's length; it is stored, so a negative vote proves nothing about it.
        self._next_read = self._next_decided = max(self.lac0, 0)
        if self.lac0 < 0:
            self._length = 0
        return self._read_more()

    def _lower_bound(self) -> int:
        """Returns the last entry that is certainly stored, with all before it: the largest LAC that a bookie reported,
        or the entry before the last fragment (M02, #2615)."""
        return max([*self._lacs, self._last.first_entry - 1])

    # ------------------------------------------------------------------------------ reading
    def _replica(self, entry: int, slot: int) -> str:
        """Returns the bookie to ask for the entry: the one in this slot when the recovery began, never one that the
        recovery added (M04)."""
        return find_fragment_of_entry(self.snapshot, entry)[0].bookies[slot]

    def _read_more(self) -> list[RecoveryEffect]:
        reads: list[RecoveryEffect] = []
        while self.end is None and self._next_read - self._adds.lac <= self._batch and self._can_be_there():
            entry = self._next_read
            votes = self._votes[entry] = EntryVotes(self.striping.slots_of_entry(entry))
            reads += [SendRead(entry, slot, self._replica(entry, slot)) for slot in votes.of]
            self._next_read += 1
        return reads

    def _can_be_there(self) -> bool:
        """Returns whether the next entry must be read: it may exist, or it is the first one that may be absent."""
        known = [-1 if last is None else last for last in self._lasts]
        return None in self._lasts or self._next_read <= max(*known, self._next_decided - 1) + 1

    def _voted(self, fact: EntryFound | EntryMissing | ReadFailed) -> Sequence[RecoveryEffect]:
        votes = self._votes.get(fact.entry)
        if votes is None:
            return ()
        votes.answered.add(fact.slot)
        if isinstance(fact, EntryFound):
            votes.found = fact.stored
        elif isinstance(fact, EntryMissing):
            votes.missing.add(fact.slot)
        return self._go_on()

    def _go_on(self) -> Sequence[RecoveryEffect]:
        """Decides entries in order, writes back those that exist, and reads more. Closes the ledger when its end is
        known and every entry is stored."""
        effects: list[RecoveryEffect] = []
        while self.end is None and (votes := self._votes.get(self._next_decided)) is not None:
            entry = self._next_decided
            verdict = self._verdict(entry, votes)
            if verdict is EntryVerdict.WAITING:
                break
            if verdict is EntryVerdict.UNKNOWN and entry > self.lac0:
                return self._abort(RecoveryFailure.UNDECIDED, entry)
            if verdict is EntryVerdict.NEGATIVE:
                self.end = entry - 1
                self._votes.clear()
                break
            if votes.found is not None:
                self._length, self.last_copy = votes.found.length, votes.found
            elif len(votes.missing) == len(votes.of):
                self._is_lac0_lost = True
            if entry > self.lac0:
                assert votes.found is not None, "a positive verdict has a copy"
                effects += self._write_back(votes.found)
            del self._votes[entry]
            self._next_decided += 1
        if self._adds.is_any_unconfirmable:
            return self._abort(RecoveryFailure.NOT_STORED)
        effects += self._read_more()
        if self.end is not None and not len(self._adds):
            effects += self._close()
        return effects

    def _verdict(self, entry: int, votes: EntryVotes) -> EntryVerdict:
        return (
            votes.judge_unconfirmed_entry(self.striping.misses_proving_absence, waits_for_all=self._waits_for_all)
            if entry > self.lac0
            else votes.judge_confirmed_entry()
        )

    # ------------------------------------------------------------------------------ writing back
    def _write_back(self, stored: StoredCopy) -> list[RecoveryEffect]:
        assert stored.entry == self._adds.lap + 1, "entries are written back in order"
        size = stored.length - self._adds.length
        return [
            *self._replace_failed(),
            *self._sends(self._adds.add_and_make_sends(PendingAddWithPayload(stored), size)),
        ]

    def _sends(self, sends: Sequence[SendAdd[PendingAddWithPayload[StoredCopy]]]) -> list[RecoveryEffect]:
        """Returns these sends with LAC0 as the last-add-confirmed: what this attempt writes back counts only if *this*
        attempt closes the ledger."""
        return [send._replace(lac=self.lac0) for send in sends]

    def _acked(self, fact: AddAcked) -> Sequence[RecoveryEffect]:
        return self._go_on() if self._adds.record_ack(fact) else ()

    def _bookie_failed(self, fact: AddFailed) -> Sequence[RecoveryEffect]:
        if not self._adds.mark_slot_failed(fact.slot, fact.bookie):
            return ()
        self._failed.append(fact.bookie)
        return [*(self._replace_failed() if len(self._adds) else ()), *self._go_on()]

    def _replace_failed(self) -> list[RecoveryEffect]:
        """Replaces failed bookies of the ensemble, as far as there are others. Returns the effects that send the
        entries that are not stored yet to the new bookies."""
        ensemble = list(self._adds.ensemble)
        for slot in sorted(self._adds.failed):
            ensemble[slot] = self._choose([*ensemble, *self._failed]) or ensemble[slot]
        if tuple(ensemble) == self._adds.ensemble:
            return []
        sends = self._adds.replace_ensemble(ensemble)
        self._remember(tuple(ensemble))
        return self._sends(sends)

    def _remember(self, ensemble: tuple[str, ...]) -> None:
        """Adds the ensemble to `fragments`, from the first entry on that is not stored yet."""
        start = self._adds.lac + 1
        assert start >= self.fragments[-1].first_entry, "a change never begins before the last fragment"
        if start == self.fragments[-1].first_entry:
            self.fragments.pop()
        self.fragments.append(Fragment(start, ensemble))

    # ------------------------------------------------------------------------------ the end
    def _close(self) -> Sequence[RecoveryEffect]:
        assert self.end is not None, "the end is known"
        if self._length is None:
            return self._find_length()
        self.state = RecoveryState.CLOSING
        return [CloseRecoveredLedger(self.end, self._length, tuple(self.fragments))]

    def _find_length(self) -> Sequence[RecoveryEffect]:
        """Finds the ledger's length in bytes when its last entry is LAC0 and no bookie has that entry: reads earlier
        entries, one at a time, until one is found."""
        assert self.end == self.lac0, "what was written back has a length"
        if not self._is_lac0_lost:
            return self._abort(RecoveryFailure.UNDECIDED, self.lac0)
        for entry, votes in self._votes.items():
            verdict = self._verdict(entry, votes)
            if verdict is EntryVerdict.WAITING:
                return ()
            self._length = votes.found.length if votes.found is not None else None
        self._votes.clear()
        entry, self._before_lac0 = self.lac0 - self._before_lac0, 2 * self._before_lac0
        if self._length is None and entry >= 0:
            votes = self._votes[entry] = EntryVotes(self.striping.slots_of_entry(entry))
            return [SendRead(entry, slot, self._replica(entry, slot)) for slot in votes.of]
        self._length = self._length or 0
        return self._close()

    def _abort(self, why: RecoveryFailure, entry: int = -1) -> Sequence[RecoveryEffect]:
        self.state = RecoveryState.ABORTED
        return [ReportRecoveryFailure(why, entry)]

    def check(self) -> None:
        self._adds.check()
        assert self.lac0 >= self._last.first_entry - 1 or self.state in _WITHOUT_LAC0, (
            "recovery never reads back before the last fragment"
        )
        assert self._next_decided <= self._next_read, "an entry is decided after it was read"
        if self.end is not None:
            assert self.end >= self.lac0, "the end is never below what bookies reported as stored"
            assert self.end == self._adds.lap, "the end is the last entry that was found"
        if self.state is RecoveryState.CLOSING:
            assert self._adds.lac == self.end, "a ledger is closed only where every entry is stored"
        assert len(self.fragments) >= len(self.snapshot.fragments), "recovery only adds ensembles"
