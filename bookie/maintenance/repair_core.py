"""The next step of a worker with one ledger: which copies are missing where, and what is done about it. Pure.

A fragment is *final* when the ledger is CLOSED or it is not the last one: then its entries never change, and only
then is it repaired (M21). The copy at slot i of a final fragment consists of the entries whose write set has i. It is

    whole      its bookie answers and has all of them
    a gap      its bookie is gone (lost or departing): all of them go to another bookie, which then takes the slot;
               or its bookie answers and lacks some: those go to it again, the record stays
    undecided  its bookie is not gone, and does not answer

`decide_next_repair_step` gives the next step, the first that fits:

| step | when |
|---|---|
| `RemoveRepairMark` | the ledger was deleted |
| `CopyMissingEntries` | a final fragment has a gap, tried or not; the worker tries each gap once and then waits |
| `RecoverLedger` | the last fragment, not final, misses a bookie, is damaged, or was left in recovery, for the grace |
| `WaitForNextAttempt` | the same, within the grace: its writer may change the ensemble itself, or close |
| `WaitForNextAttempt` | a bookie that is marked is undecided |
| `MoveCopies` | a copy is to move to an emptier bookie, and nothing is missing |
| `RemoveRepairMark` | every copy that was marked is whole; the auditor's check finds what unmarked bookies lack |

Recovering fences the writer and gives the ledger its end; then all fragments are final.
A gap is closed in the order `FILL_STEPS`: the record names a new bookie only when that one has everything, synced. A
crash in between leaves copies that nothing names; they go with the ledger. Guards:
tests/bookie/maintenance/test_copies.py, tests/bookie/maintenance/test_repair.py.

Also in this file, each below its heading: the decisions of the auditor (marks_core); how fast a worker may copy
(pace_core).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ...ledger.metadata_core import get_striping_of_record
from ...ledger.writer_core import Striping
from ...metadata.records import (
    CLOSED,
    IN_RECOVERY,
    BookieRecord,
    DamagedEntriesRecord,
    Fragment,
    LedgerRecord,
    UnderReplicatedRecord,
)
from ...runtime.token_bucket import TokenBucket
from ..store.memtable import IntegerIntervals

# ---------------------------------------------------------------------------------------------------- marks_core
# The decisions of the auditor: which bookies are lost, and which mark a ledger gets. Pure.
#
# A ledger is marked when a bookie that one of its fragments names
#
#     LOST        was not registered for longer than the grace (`BookieAbsences`)
#     DEPARTING   is to be emptied: an operator said so
#     INCOMPLETE  is registered, and lacks entries that it should have
#     DAMAGED     is registered, and reports damaged entries
#     DISK_FAILED is registered, and says that the one of its disks failed that has the ledger (BookieRecord.failed).
#                 Without a grace: only a restart ends it (bookie/directory.py), after an error, never after a hang
#     MOVING      is full, and an operator ordered a rebalancing: its copy moves to the bookie that `moves` of the mark
#                 names (rebalance_core.py). It lacks nothing, and its copy counts until then
#     RETURNED    was LOST, DEPARTING or DISK_FAILED when the ledger was marked, and is not any more: to be compared
#
# or when a recovery of it was begun and did not end. `decide_repair_mark` gives the mark that the ledger should have,
# from its record, the facts and its present mark: the same facts give the same mark, whichever auditor judges and
# however often. A mark's `since_ms` is that of its first appearance; when its bookies change it is new to the workers:
# no attempts, no waiting.
#
# The auditor takes marks away only when the ledger was deleted, or names none of the marked bookies any more. That a
# ledger is whole again is found by a worker, which compares (bookie/maintenance/repair_core.py).
# Guards: tests/bookie/maintenance/test_marks.py.


class RepairReason(enum.Enum):
    """The reason why a ledger's copies on a bookie must be repaired. LOST: the bookie was not registered for longer
    than the grace period. DEPARTING: an operator empties it. INCOMPLETE: it lacks entries that it should have. DAMAGED:
    it reports damaged entries. RETURNED: it was lost or departing when the ledger was marked, and is not any more.
    DISK_FAILED: it is registered, and says that the disk with the ledger has failed. MOVING: nothing is missing, and
    the copy moves to an emptier bookie."""

    LOST = "lost"
    DEPARTING = "departing"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    RETURNED = "returned"
    DISK_FAILED = "disk failed"
    MOVING = "moving"


REASONS_BOOKIE_GONE = (RepairReason.LOST.value, RepairReason.DEPARTING.value, RepairReason.DISK_FAILED.value)


class StuckReason(enum.Enum):
    """The reason why a repair worker could not repair a ledger. The ledger keeps its repair mark, and the repair is
    tried again later."""

    NO_TARGET = "no other bookie can take the copy"
    LOST = "no bookie has the entry any more"
    UNDECIDED = "no bookie can tell where the ledger ends"
    UNREACHABLE = "a bookie does not answer"
    OPEN = "its writer may still be there"
    FAILED = "the copy failed"


class BookieAbsences:
    """Records for each absent bookie since when it is not registered. A new auditor begins without records, so that
    each absent bookie gets the whole grace period."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: dict[str, float] = {}

    def update_absent_and_gone(self, now: float, names: Iterable[str], present: Collection[str]) -> frozenset[str]:
        """Records at the time `now` (monotonic, in seconds) which of the bookies `names` are missing from `present`,
        the registered bookies. Returns all bookies that have been absent for at least the grace period."""
        for name in names:
            self._since.setdefault(name, now)
        for name in [name for name in self._since if name in present]:
            del self._since[name]
        return frozenset(name for name, since in self._since.items() if now - since >= self._grace_s)

    def check(self, now: float) -> None:
        assert all(since <= now for since in self._since.values()), "no bookie is absent since a time in the future"


def list_bookies_of_ledger(record: LedgerRecord) -> dict[str, None]:
    """Returns all bookies that the fragments of the ledger name, each bookie once, in order. The dictionary's values
    mean nothing."""
    return {bookie: None for fragment in record.fragments for bookie in fragment.bookies}


def decide_repair_mark(
    record: LedgerRecord | None, gone: Mapping[str, RepairReason], found: Mapping[str, RepairReason],
    mark: UnderReplicatedRecord | None, now_ms: int,
) -> UnderReplicatedRecord | None:  # fmt: skip
    """Returns the repair mark that the ledger should have; None if it needs no mark. `record` None: the ledger was
    deleted. `gone` has the LOST and DEPARTING bookies. `found` has the other bookies at which a check found missing
    copies, each with the reason. `mark` is the present mark.

    A reason that a check found stays in the mark until a worker has repaired the ledger, even if a later check does not
    find it again. `now_ms`: the time of day, in ms since the epoch."""
    if record is None:
        return None
    bookies: dict[str, str] = {}
    before = {} if mark is None else mark.bookies
    for bookie in sorted(list_bookies_of_ledger(record)):
        if bookie in gone:
            bookies[bookie] = gone[bookie].value
        elif bookie in found:
            bookies[bookie] = found[bookie].value
        elif bookie in before:
            bookies[bookie] = RepairReason.RETURNED.value if before[bookie] in REASONS_BOOKIE_GONE else before[bookie]
    in_recovery = record.state == IN_RECOVERY
    if not bookies and not in_recovery:
        return None
    if mark is None:
        return UnderReplicatedRecord(
            ledger_id=record.ledger_id, bookies=bookies, in_recovery=in_recovery, since_ms=now_ms
        )
    return mark if (mark.bookies, mark.in_recovery) == (bookies, in_recovery) else _changed(mark, bookies, in_recovery)


def _changed(mark: UnderReplicatedRecord, bookies: dict[str, str], in_recovery: bool) -> UnderReplicatedRecord:
    return msgspec.structs.replace(
        mark, bookies=bookies, in_recovery=in_recovery, attempts=0, stuck="", last_error="", retry_ms=0
    )


def make_repair_mark_after_failure(
    mark: UnderReplicatedRecord, stuck: StuckReason, error: str, now_ms: int, retry_min_s: float, retry_max_s: float
) -> UnderReplicatedRecord:
    """Returns the repair mark after one more failed attempt: with the reason `stuck`, the error text, and the time of
    the next attempt, counted from `now_ms` (ms since the epoch). Each wait is twice as long as the previous one, up to
    `retry_max_s`."""
    wait_s = compute_back_off_s(mark.attempts + 1, retry_min_s, retry_max_s)
    return msgspec.structs.replace(
        mark, attempts=mark.attempts + 1, stuck=stuck.value, last_error=error, retry_ms=now_ms + int(1000 * wait_s)
    )


def compute_back_off_s(attempts: int, retry_min_s: float, retry_max_s: float) -> float:
    """Returns how many seconds a ledger waits for its next repair attempt after `attempts` failed attempts: 0 after
    none, then `retry_min_s`, and twice as long after each further failure, up to `retry_max_s`."""
    return min(retry_max_s, retry_min_s * 2.0 ** min(attempts - 1, 30)) if attempts else 0.0


def compute_seconds_until_attempt(
    mark: UnderReplicatedRecord, now_ms: int, seen_s: float, retry_min_s: float, retry_max_s: float
) -> float:  # fmt: skip
    """Returns how many seconds the ledger must still wait before its next repair attempt. `seen_s`: for how many
    seconds the caller has known this version of the mark. `now_ms`: the time of day, in ms since the epoch.

    The clock of the worker that failed has set `retry_ms`, and that clock may be a day off. So the wait ends at the
    latest when the back-off after `attempts` failures has passed since the caller first saw the mark."""
    bound_s = compute_back_off_s(mark.attempts, retry_min_s, retry_max_s) - seen_s
    return max(0.0, min((mark.retry_ms - now_ms) / 1000, bound_s))


def schedule_next_attempt_now(mark: UnderReplicatedRecord) -> UnderReplicatedRecord:
    """Returns a copy of the repair mark whose next attempt is due at once, for example because a bookie has come back.
    The number of attempts stays, so that a repair that still fails is not retried in a tight loop."""
    return msgspec.structs.replace(mark, retry_ms=0)


# --------------------------------------------------------------------------------------------------- repair_core


FILL_STEPS = ("choose", "compare", "copy", "verify", "replace")
"""The steps of filling a gap, in order. `compare`: asks the target which entries it has already. `replace`: changes the
ledger's record; only if the bookie of the gap is gone."""


class FinalFragment(NamedTuple):
    """A fragment of a ledger that cannot get entries any more: the entries `first … last` and the bookies that should
    store them. The fragment is empty if `last` is below `first`."""

    first: int
    last: int
    bookies: tuple[str, ...]


class CopyGap(NamedTuple):
    """A missing or incomplete copy of the fragment with the entries `first … last`. `missing` are the entries of the
    fragment that must still be stored at `slot` of the ensemble."""

    first: int  # of the fragment
    last: int
    slot: int
    bookie: str  # that the record names there
    gone: bool  # another one is to take its place
    missing: tuple[tuple[int, int], ...]  # runs of entries, ascending
    target: str = ""  # that gets the copy; "": one is chosen, if the bookie is gone


class RemoveRepairMark(NamedTuple):
    """Step of a repair: remove the repair mark of the ledger, because the ledger was deleted or no copy is missing any
    more. `why` says which, as text."""

    why: str


class CopyMissingEntries(NamedTuple):
    """Step of a repair: copy the missing entries of these gaps to the bookies that should have them."""

    gaps: tuple[CopyGap, ...]


class MoveCopies(NamedTuple):
    """Step of a repair: move these copies of the ledger, which misses nothing, to the bookies that `target` names. A
    move that fails is given up: the copy stays where it is."""

    gaps: tuple[CopyGap, ...]


class RecoverLedger(NamedTuple):
    """Step of a repair: recover the ledger. This fences its writer and closes the ledger."""


class WaitForNextAttempt(NamedTuple):
    """Step of a repair: leave the repair mark, and try again later. `why` is the reason, and `text` says what is wrong.
    `seconds`: the time to the next attempt; 0: as after any failed attempt."""

    why: StuckReason
    text: str
    seconds: float = 0.0  # 0: as after any failed try


RepairStep = RemoveRepairMark | CopyMissingEntries | MoveCopies | RecoverLedger | WaitForNextAttempt

EntriesHeldByCopy = Mapping[tuple[int, str], IntegerIntervals | None]
"""The answers of bookies, by (first entry of a final fragment, bookie): the entries of the fragment that the bookie
has; None: the bookie did not answer."""


def list_final_fragments(record: LedgerRecord) -> list[FinalFragment]:
    """Returns the final fragments of the ledger, in order: all fragments of a CLOSED ledger, otherwise all but the last
    one."""
    ends = [fragment.first_entry - 1 for fragment in record.fragments[1:]]
    fragments: Sequence[Fragment] = record.fragments
    if record.state == CLOSED:
        ends.append(record.last_entry)
    else:
        fragments = fragments[:-1]
    return [
        FinalFragment(fragment.first_entry, end, fragment.bookies)
        for fragment, end in zip(fragments, ends, strict=True)
    ]


def find_runs_of_slot(striping: Striping, slot: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of each run of consecutive entries within `first … last` that `slot` of the ensemble must
    store, in ascending order."""
    entry = first
    while entry <= last:
        length = striping.count_consecutive_entries(entry, slot)
        if length:
            yield entry, min(last, entry + length - 1)
        entry += max(length, 1)


def find_runs_without_copies(wanted: Iterator[tuple[int, int]], held: IntegerIntervals) -> tuple[tuple[int, int], ...]:
    """Returns the entries in the runs `wanted` that are not in the set `held`, as (first, last) pairs in ascending
    order."""
    found: list[tuple[int, int]] = []
    for first, last in wanted:
        at = first
        for low, high in held.intersect(first, last):
            if at < low:
                found.append((at, low - 1))
            at = high + 1
        if at <= last:
            found.append((at, last))
    return tuple(found)


def list_copies_to_check(record: LedgerRecord, gone: Collection[str]) -> list[tuple[FinalFragment, str]]:
    """Returns (final fragment, bookie) for each copy about which a bookie must be asked: all copies of the final
    fragments except those at the bookies `gone`."""
    return [(final, bookie) for final in list_final_fragments(record) for bookie in final.bookies if bookie not in gone]


def find_copy_gaps(record: LedgerRecord, gone: Collection[str], held: EntriesHeldByCopy) -> tuple[CopyGap, ...]:
    """Returns all missing or incomplete copies of the ledger's final fragments; those of the fragments with the fewest
    complete copies come first. `gone`: the bookies whose copies do not count. `held` must have the answer about each
    copy that `list_copies_to_check` returns. A bookie that did not answer makes no gap."""
    striping = get_striping_of_record(record)
    found: list[tuple[int, int, CopyGap]] = []
    for number, final in enumerate(list_final_fragments(record)):
        here: list[CopyGap] = []
        for slot, bookie in enumerate(final.bookies):
            wanted = find_runs_of_slot(striping, slot, final.first, final.last)
            if bookie in gone:
                here.append(CopyGap(final.first, final.last, slot, bookie, True, tuple(wanted)))
                continue
            answer = held[final.first, bookie]
            missing = () if answer is None else find_runs_without_copies(wanted, answer)
            if missing:
                here.append(CopyGap(final.first, final.last, slot, bookie, False, missing))
        found += [(-len(here), number, gap) for gap in here]
    return tuple(gap for _, _, gap in sorted(found, key=lambda each: each[:2]))


def find_moves(
    mark: UnderReplicatedRecord, available: Mapping[str, BookieRecord], gone: Collection[str]
) -> dict[str, str]:  # fmt: skip
    """Returns the moves of the mark that can be made now, source → target: the source is not gone, and the target is
    registered, not gone and not in limbo, and takes adds of the ledger."""
    return {
        source: target for source, target in mark.moves.items()
        if mark.bookies.get(source) == RepairReason.MOVING.value and source not in gone and target not in gone
        and target in available and not available[target].limbo and available[target].takes_adds_of(mark.ledger_id)
    }  # fmt: skip


def list_copies_to_move(record: LedgerRecord, moves: Mapping[str, str]) -> tuple[CopyGap, ...]:
    """Returns the copies that are to move, one for each fragment that names a source of `moves` and not its target.
    There are none while the ledger is not CLOSED."""
    striping = get_striping_of_record(record)
    return tuple(
        CopyGap(
            final.first, final.last, slot, source, True,
            tuple(find_runs_of_slot(striping, slot, final.first, final.last)), moves[source],
        )
        for final in list_final_fragments(record) if record.state == CLOSED
        for slot, source in enumerate(final.bookies) if source in moves and moves[source] not in final.bookies
    )  # fmt: skip


def make_move_mark(record: LedgerRecord, moves: Mapping[str, str], now_ms: int) -> UnderReplicatedRecord:
    """Returns the mark of a ledger that misses nothing, and of which copies are to move."""
    bookies = dict.fromkeys(sorted(moves), RepairReason.MOVING.value)
    return UnderReplicatedRecord(ledger_id=record.ledger_id, bookies=bookies, since_ms=now_ms, moves=dict(moves))


def remove_moves(mark: UnderReplicatedRecord | None) -> UnderReplicatedRecord | None:
    """Returns the mark without moves; None if nothing else is in it."""
    if mark is None:
        return None
    bookies = {bookie: why for bookie, why in mark.bookies.items() if why != RepairReason.MOVING.value}
    if not bookies and not mark.in_recovery:
        return None
    return msgspec.structs.replace(mark, bookies=bookies, moves={})


def find_bookies_with_failed_disk(ledger: int, available: Mapping[str, BookieRecord]) -> frozenset[str]:
    """Returns the registered bookies that say that the disk with this ledger has failed: their copies of it do not
    count."""
    return frozenset(bookie for bookie, record in available.items() if record.has_lost(ledger))


def find_lost_or_departing_bookies(
    mark: UnderReplicatedRecord, available: Collection[str], departing: Collection[str]
) -> frozenset[str]:
    """Returns the bookies whose copies a repair worker may treat as gone: the departing bookies, and the bookies that
    the mark calls lost or departing and that are not registered (not in `available`)."""
    lost = {
        bookie for bookie, reason in mark.bookies.items() if reason in REASONS_BOOKIE_GONE and bookie not in available
    }
    return frozenset(lost | set(departing))


class RepairFindings(msgspec.Struct, frozen=True):
    """The facts that a worker has about the copies of a ledger: the input of `decide_next_repair_step`. `record` None:
    the ledger was deleted. `unsettled_s`: for how many seconds the ledger's last fragment has been in its present
    state."""

    record: LedgerRecord | None
    marked: frozenset[str]  # whose copies are to be seen to
    gone: frozenset[str]  # their copies do not count
    dead: frozenset[str]  # those of them that are not registered
    held: EntriesHeldByCopy
    unsettled_s: float
    damaged: frozenset[str] = frozenset()  # bookies of the last fragment that report damage in it
    moves: Mapping[str, str] = {}  # bookie whose copy moves → bookie that gets it


def why_unreadable(look: RepairFindings, entry: int) -> StuckReason:
    """Returns the reason why an entry cannot be read, by the findings `look`. LOST: every bookie that should have the
    entry is lost, or has answered that it lacks the entry. UNREACHABLE: some bookie may still have the entry."""
    record = look.record
    assert record is not None
    final = next(each for each in list_final_fragments(record) if each.first <= entry <= each.last)
    for slot in get_striping_of_record(record).slots_of_entry(entry):
        bookie = final.bookies[slot]
        if bookie in look.dead:
            continue
        held = look.held.get((final.first, bookie))
        if held is None or entry in held:
            return StuckReason.UNREACHABLE
    return StuckReason.LOST


def is_recovery_needed(record: LedgerRecord, gone: Collection[str]) -> bool:
    """Returns whether only a recovery can end the ledger's last fragment, so that its missing copies can be made. The
    worker may wait for the ledger's writer first.

    `gone` must also have the bookies that report damage in this fragment. While the ledger is open, only its writer
    knows which entries are confirmed, so the worker does not copy entries of the last fragment."""
    if record.state == CLOSED:
        return False
    return record.state == IN_RECOVERY or any(bookie in gone for bookie in record.fragments[-1].bookies)


def find_bookies_damaged_in_last_fragment(
    record: LedgerRecord, reports: Mapping[str, DamagedEntriesRecord]
) -> frozenset[str]:
    """Returns the bookies of the ledger's last fragment that have reported damaged entries in it."""
    last = record.fragments[-1]
    return frozenset(
        bookie for bookie, report in reports.items()
        if bookie in last.bookies and any(to >= last.first_entry for _, to in report.ranges)
    )  # fmt: skip


def decide_next_repair_step(look: RepairFindings, tried: bool, open_grace_s: float) -> RepairStep:
    """Returns the next step of the repair of a ledger, by the findings `look` and the table in the module's docstring.
    `tried`: whether the worker has already tried to fill each gap since it locked the ledger. `open_grace_s`: for how
    many seconds the worker leaves a last fragment to its writer."""
    record = look.record
    if record is None:
        return RemoveRepairMark("the ledger was deleted")
    found = find_copy_gaps(record, look.gone, look.held)
    if found and not tried:
        return CopyMissingEntries(found)
    if is_recovery_needed(record, look.gone | look.damaged):
        left = open_grace_s - look.unsettled_s
        if left <= 0:
            return RecoverLedger()
        return WaitForNextAttempt(
            StuckReason.OPEN, f"its last fragment is not settled; it is recovered in {left:.0f} s", left
        )
    if found:
        return CopyMissingEntries(found)
    silent = sorted({bookie for (_, bookie), answer in look.held.items() if answer is None and bookie in look.marked})
    if silent:
        return WaitForNextAttempt(StuckReason.UNREACHABLE, f"no answer from {', '.join(silent)}")
    if moving := list_copies_to_move(record, look.moves):
        return MoveCopies(moving)
    return RemoveRepairMark("every copy is there")


# ----------------------------------------------------------------------------------------------------- pace_core
# How fast a worker may copy: a bucket of bytes that fills with the time. Pure.
#
# `reserve` charges what was read and says how long to wait before more is read. The bucket holds at most `RATE_BURST_S`
# of the rate and may go below zero, so a batch is never split and the mean is kept. Guards:
# tests/bookie/maintenance/test_pace.py.


RATE_BURST_S = 0.1


class CopyRateLimit:
    """Limits the bytes a second that a repair worker copies, with a token bucket."""

    def __init__(self, bytes_per_s: int) -> None:
        """Sets the limit in bytes per second; 0: no limit."""
        self.bytes_per_s = bytes_per_s
        self._bucket = TokenBucket(bytes_per_s, 0.0, burst=bytes_per_s * RATE_BURST_S)

    def reserve(self, now: float, size: int) -> float:
        """Takes `size` bytes from the token bucket at the time `now` (monotonic, in seconds). Returns how many seconds
        the caller must wait before it copies more; 0.0: it need not wait."""
        if not self.bytes_per_s:
            return 0.0
        self._bucket.spend_tokens(size, now)
        return max(0.0, -self._bucket.available_tokens(now) / self.bytes_per_s)
