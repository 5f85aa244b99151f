"""Which copies of sealed ledgers move from full bookies to emptier ones: `magnetar bookies rebalance`. Pure.

    plan = Rebalancing(share, loads)
    for record in …:  moves = plan.plan_ledger(record)     the moves count in `loads` from then on
    plan.undo(move)                                        one that was not made

A *load* is what a bookie uses of its disk, counted forward: as it was registered when an operator gave the order, less
what moves off it, and what moves to it. So a plan follows from the order and the ledgers alone, not from when a disk
becomes free. A bookie is *full* above `share`. A copy of a CLOSED ledger moves from a full bookie, the fullest first,
to the emptiest one that fits:

    1. no fragment of the ledger names it: never two copies of an entry on one bookie
    2. it takes adds of the ledger, is not departing and not in limbo
    3. it is of a group of the ledger, and a primary one if the source is; of the order's group, as the source
    4. no write set of which the source is a part covers fewer racks than before
    5. with the copy it uses no more than `share`, and the *spread* falls: the sum of used² / size over all bookies

By 5 no two moves undo each other, whatever the order of ledgers and however often an order is given: the spread has a
lowest value and falls with each move. A move keeps the number of copies: the new one is stored and named before the old
one is left to garbage collection (bookie/maintenance/repair_core.py `FILL_STEPS`).

Ledgers are planned by id: those of one time are in the same entry logs, and a log without living entries is deleted,
where one with half of them waits for a compaction. Linear in the ledgers; in the bookies for each ledger of a full one.
Guarded by tests/bookie/maintenance/test_rebalance.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from ...ledger.metadata_core import get_striping_of_record
from ...ledger.placement_core import UNKNOWN_RACK, BookieGroups, decode_bookie_groups
from ...metadata.records import CLOSED, BookieRecord, Fragment, LedgerRecord


class RebalanceEnd(enum.Enum):
    """The reason why a rebalancing has ended."""

    REACHED = "no bookie uses more than that"
    EXHAUSTED = "no further copy can be moved"
    STOPPED = "an operator stopped it"


class CopyMove(NamedTuple):
    """A copy of a sealed ledger that moves: all that bookie `source` stores of it, about `bytes`, to `target`."""

    source: str
    target: str
    bytes: int


class BookieLoad(NamedTuple):
    """What is known of a bookie. `total` and `used`: bytes of its disk; `record`: its registration; `is_leaving`: it
    departs."""

    total: int
    used: int
    rack: str
    record: BookieRecord
    is_leaving: bool = False

    @property
    def share(self) -> float:
        """The share of the disk that is used, from 0.0 to 1.0, or above while it is planned."""
        return self.used / self.total if self.total else 1.0


class Rebalancing:
    """Plans moves until no bookie is full. `share`: above it a bookie is full; `loads`: the registered bookies that
    take part; `group`: only bookies of it are full or take copies, "": of any."""

    def __init__(self, share: float, loads: Mapping[str, BookieLoad], group: str = "") -> None:
        self._share = share
        self.loads = dict(loads)
        self._group = group
        self._emptiest = sorted(self.loads, key=self._order)

    @property
    def full_bookies(self) -> list[str]:
        """The bookies from which copies are to move, the fullest first. One that departs is emptied anyway, and what
        one in limbo has is not known."""
        return [
            bookie for bookie in reversed(self._emptiest)
            if self.loads[bookie].share > self._share and self._takes_part(bookie)
        ]  # fmt: skip

    def plan_ledger(self, record: LedgerRecord) -> list[CopyMove]:
        """Returns the moves of copies of this ledger, and counts them in `loads`; none if it is not sealed, or no copy
        of it is on a full bookie that another one could take."""
        moves: list[CopyMove] = []
        if record.state != CLOSED or record.length <= 0:
            return moves
        named = list_named_bookies(record)
        for source in self.full_bookies:
            if source in named and (move := self._find_move(record, source)) is not None:
                self._count(move, 1)
                moves.append(move)
                record = move_in_record(record, move)
        return moves

    def undo(self, move: CopyMove) -> None:
        """Takes a move that was not made out of `loads`."""
        self._count(move, -1)

    def _find_move(self, record: LedgerRecord, source: str) -> CopyMove | None:
        size = estimate_copy_bytes(record, {source})
        groups, named = decode_bookie_groups(record.properties), list_named_bookies(record)
        for target in self._emptiest:
            if self.loads[target].share >= self._share:
                break
            move = CopyMove(source, target, size)
            if (
                target not in named
                and self._takes(record, groups, source, target)
                and self._improves(move)
                and self._keeps_racks(record, source, target)
            ):
                return move
        return None

    def _takes_part(self, bookie: str) -> bool:
        load = self.loads[bookie]
        return not load.is_leaving and not load.record.limbo and self._group in ("", load.record.group)

    def _takes(self, record: LedgerRecord, groups: BookieGroups, source: str, target: str) -> bool:
        there, here = self.loads[target].record, self.loads[source].record
        fits = groups.contains(there.group) and (here.group not in groups.primary or there.group in groups.primary)
        return fits and self._takes_part(target) and there.takes_adds_of(record.ledger_id)

    def _improves(self, move: CopyMove) -> bool:
        source, target = self.loads[move.source], self.loads[move.target]
        if move.bytes <= 0 or target.used + move.bytes > self._share * target.total:
            return False
        return (2 * target.used + move.bytes) / target.total < (2 * source.used - move.bytes) / source.total

    def _keeps_racks(self, record: LedgerRecord, source: str, target: str) -> bool:
        write_sets = get_striping_of_record(record).write_sets
        for fragment in record.fragments:
            if source not in fragment.bookies:
                continue
            slot = fragment.bookies.index(source)
            after = replace_bookie(fragment.bookies, source, target)
            for each in write_sets:
                if slot in each and self._count_racks(after, each) < self._count_racks(fragment.bookies, each):
                    return False
        return True

    def _count_racks(self, bookies: tuple[str, ...], slots: Iterable[int]) -> int:
        racks = {self.loads[bookies[slot]].rack for slot in slots if bookies[slot] in self.loads}
        return len(racks - {UNKNOWN_RACK})

    def _count(self, move: CopyMove, sign: int) -> None:
        for bookie, size in ((move.source, -sign * move.bytes), (move.target, sign * move.bytes)):
            if bookie in self.loads:  # one that is gone has no load any more
                load = self.loads[bookie]
                self.loads[bookie] = load._replace(used=max(0, load.used + size))
        self._emptiest.sort(key=self._order)

    def _order(self, bookie: str) -> tuple[float, str]:
        return self.loads[bookie].share, bookie

    def spread(self) -> float:
        """Returns the sum of used² / size over all bookies: each move lowers it."""
        return sum(load.used**2 / load.total for load in self.loads.values() if load.total)

    def check(self) -> None:
        assert self._emptiest == sorted(self.loads, key=self._order), "the bookies are in the order of their shares"
        assert all(load.used >= 0 for load in self.loads.values()), "no bookie uses less than nothing"


def list_named_bookies(record: LedgerRecord) -> set[str]:
    """Returns all bookies that a fragment of the ledger names."""
    return {bookie for fragment in record.fragments for bookie in fragment.bookies}


def replace_bookie(bookies: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    """Returns the ensemble with `new` in the place of `old`."""
    return tuple(new if each == old else each for each in bookies)


def move_in_record(record: LedgerRecord, move: CopyMove) -> LedgerRecord:
    """Returns the record of the ledger as it is after the move."""
    fragments = tuple(
        Fragment(each.first_entry, replace_bookie(each.bookies, move.source, move.target)) for each in record.fragments
    )
    return msgspec.structs.replace(record, fragments=fragments)


def estimate_copy_bytes(record: LedgerRecord, bookies: Collection[str]) -> int:
    """Returns about how many bytes of a closed ledger are on these bookies. Assumes that all fragments have the same
    size."""
    slots = sum(bookie in bookies for fragment in record.fragments for bookie in fragment.bookies)
    copies = record.ensemble_size * len(record.fragments)
    return record.length * record.write_quorum * slots // copies


def count_uncollected(moved_off: int, used_before: int, used_now: int) -> int:
    """Returns how much of what an earlier order moved off a bookie is still on its disk: all of it, less what the disk
    uses less now than before that order. A bookie that got new data meanwhile has collected more than it seems."""
    return max(0, moved_off - max(0, used_before - used_now))
