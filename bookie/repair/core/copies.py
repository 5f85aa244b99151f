"""The next step of a worker with one ledger: which copies are missing where, and what is done about it. Pure.

A fragment is *final* when the ledger is CLOSED or it is not the last one: then its entries never change, and only
then is it repaired (M21). The copy at slot i of a final fragment consists of the entries whose write set has i. It is

    whole      its bookie answers and has all of them
    a gap      its bookie is gone (lost or departing): all of them go to another bookie, which then takes the slot;
               or its bookie answers and lacks some: those go to it again, the record stays
    undecided  its bookie is not gone, and does not answer

`decide` gives the next step, the first that fits:

| step | when |
|---|---|
| Unmark | the ledger was deleted |
| Fill | a final fragment has a gap, tried or not; the worker tries each gap once and then waits |
| Recover | the last fragment is not final and misses a bookie, is damaged, or was left in recovery, for the grace |
| Wait | the same, within the grace: its writer may change the ensemble itself, or close |
| Wait | a bookie that is marked is undecided |
| Unmark | every copy that was marked is whole; the auditor's check finds what unmarked bookies lack |

Recovering fences the writer and gives the ledger its end; then all fragments are final.
A gap is closed in the order `FILL`: the record names a new bookie only when that one has everything, synced. A crash in
between leaves copies that nothing names; they go with the ledger.
Guards: tests/bookie/repair/test_copies.py, tests/bookie/repair/test_repair.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....ledger.core.metadata import striping_of
from ....ledger.core.striping import Striping
from ....metadata.records import (
    CLOSED,
    IN_RECOVERY,
    DamagedEntriesRecord,
    Fragment,
    LedgerRecord,
    UnderReplicatedRecord,
)
from ...store.intervals import Intervals
from .marks import GONE, Stuck

FILL = ("choose", "compare", "copy", "verify", "replace")
"""The steps of closing a gap. `compare`: what the target holds already; `replace`: only where the bookie is gone."""


class Final(NamedTuple):
    """A final fragment; empty when `last` is below `first`."""

    first: int
    last: int
    bookies: tuple[str, ...]


class Gap(NamedTuple):
    """A copy that is missing, or a part of one: entries of `first … last` whose write set has `slot`."""

    first: int  # of the fragment
    last: int
    slot: int
    bookie: str  # that the record names there
    gone: bool  # another one is to take its place
    missing: tuple[tuple[int, int], ...]  # runs of entries, ascending


class Unmark(NamedTuple):
    """Removes the mark of the ledger."""

    why: str


class Fill(NamedTuple):
    """Copies the missing entries of these gaps."""

    gaps: tuple[Gap, ...]


class Recover(NamedTuple):
    """Recovers the ledger: fences its writer and gives it its end."""


class Wait(NamedTuple):
    """Leaves the ledger marked, and tries again after `seconds`."""

    why: Stuck
    text: str
    seconds: float = 0.0  # 0: as after any failed try


Step = Unmark | Fill | Recover | Wait

Held = Mapping[tuple[int, str], Intervals | None]
"""(first entry of a final fragment, bookie) → the entries of it that the bookie holds; None: it did not answer."""


def final_fragments(record: LedgerRecord) -> list[Final]:
    ends = [fragment.first_entry - 1 for fragment in record.fragments[1:]]
    fragments: Sequence[Fragment] = record.fragments
    if record.state == CLOSED:
        ends.append(record.last_entry)
    else:
        fragments = fragments[:-1]
    return [Final(fragment.first_entry, end, fragment.bookies) for fragment, end in zip(fragments, ends, strict=True)]


def runs(striping: Striping, slot: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields first and last of each run of entries of `first … last` whose write set has `slot`, ascending."""
    entry = first
    while entry <= last:
        length = striping.run_length(entry, slot)
        if length:
            yield entry, min(last, entry + length - 1)
        entry += max(length, 1)


def lacking(wanted: Iterator[tuple[int, int]], held: Intervals) -> tuple[tuple[int, int], ...]:
    """Returns the runs of `wanted` that are not in `held`."""
    found: list[tuple[int, int]] = []
    for first, last in wanted:
        at = first
        for low, high in held.within(first, last):
            if at < low:
                found.append((at, low - 1))
            at = high + 1
        if at <= last:
            found.append((at, last))
    return tuple(found)


def to_ask(record: LedgerRecord, gone: Collection[str]) -> list[tuple[Final, str]]:
    """Returns the pairs (final fragment, bookie) to ask for the entries that they hold: all but the bookies of `gone`.
    """
    return [(final, bookie) for final in final_fragments(record) for bookie in final.bookies if bookie not in gone]


def gaps(record: LedgerRecord, gone: Collection[str], held: Held) -> tuple[Gap, ...]:
    """Returns every gap of the final fragments, those of fragments with the fewest whole copies first."""
    striping = striping_of(record)
    found: list[tuple[int, int, Gap]] = []
    for number, final in enumerate(final_fragments(record)):
        here: list[Gap] = []
        for slot, bookie in enumerate(final.bookies):
            wanted = runs(striping, slot, final.first, final.last)
            if bookie in gone:
                here.append(Gap(final.first, final.last, slot, bookie, True, tuple(wanted)))
                continue
            answer = held[final.first, bookie]
            missing = () if answer is None else lacking(wanted, answer)
            if missing:
                here.append(Gap(final.first, final.last, slot, bookie, False, missing))
        found += [(-len(here), number, gap) for gap in here]
    return tuple(gap for _, _, gap in sorted(found, key=lambda each: each[:2]))


def gone_now(mark: UnderReplicatedRecord, available: Collection[str], departing: Collection[str]) -> frozenset[str]:
    """Returns the bookies that a worker may treat as gone: those that the auditor called gone and that are not back,
    and the departing."""
    lost = {bookie for bookie, reason in mark.bookies.items() if reason in GONE and bookie not in available}
    return frozenset(lost | set(departing))


class Look(msgspec.Struct, frozen=True):
    """The state of a ledger that `decide` goes by. `unsettled_s`: for how long its last fragment has been in this
    state."""

    record: LedgerRecord | None
    marked: frozenset[str]  # whose copies are to be seen to
    gone: frozenset[str]  # their copies do not count
    dead: frozenset[str]  # those of them that are not registered
    held: Held
    unsettled_s: float
    damaged: frozenset[str] = frozenset()  # bookies of the last fragment that report damage in it


def why_unreadable(look: Look, entry: int) -> Stuck:
    """Returns why an entry cannot be read. LOST: every bookie that should have it is gone, or answers that it lacks it.
    Else it may come back."""
    record = look.record
    assert record is not None
    final = next(each for each in final_fragments(record) if each.first <= entry <= each.last)
    for slot in striping_of(record).write_set(entry):
        bookie = final.bookies[slot]
        if bookie in look.dead:
            continue
        held = look.held.get((final.first, bookie))
        if held is None or entry in held:
            return Stuck.UNREACHABLE
    return Stuck.LOST


def unsettled(record: LedgerRecord, gone: Collection[str]) -> bool:
    """Whether the last fragment is not final, and only a recovery can make it final. A recovery may wait for the writer
    first.

    `gone`: also bookies that report damage in it. While the ledger is written only its writer knows which entries are
    confirmed, so its last fragment is not filled; and an idle ledger may be open for months.
    """
    if record.state == CLOSED:
        return False
    return record.state == IN_RECOVERY or any(bookie in gone for bookie in record.fragments[-1].bookies)


def in_last_fragment(record: LedgerRecord, reports: Mapping[str, DamagedEntriesRecord]) -> frozenset[str]:
    """The bookies of the last fragment that report damage in it."""
    last = record.fragments[-1]
    return frozenset(
        bookie for bookie, report in reports.items()
        if bookie in last.bookies and any(to >= last.first_entry for _, to in report.ranges)
    )  # fmt: skip


def decide(look: Look, tried: bool, open_grace_s: float) -> Step:
    """Returns the next step, by the table in the module's docstring. `tried`: each gap was tried in this turn."""
    record = look.record
    if record is None:
        return Unmark("the ledger was deleted")
    found = gaps(record, look.gone, look.held)
    if found and not tried:
        return Fill(found)
    if unsettled(record, look.gone | look.damaged):
        left = open_grace_s - look.unsettled_s
        if left <= 0:
            return Recover()
        return Wait(Stuck.OPEN, f"its last fragment is not settled; it is recovered in {left:.0f} s", left)
    if found:
        return Fill(found)
    silent = sorted({bookie for (_, bookie), answer in look.held.items() if answer is None and bookie in look.marked})
    if silent:
        return Wait(Stuck.UNREACHABLE, f"no answer from {', '.join(silent)}")
    return Unmark("every copy is there")
