"""Placement: which bookies get the copies. Pure: who is there comes in, chance comes in, bookies in order come out.

`choose` fills the open slots of an ensemble; a new ledger has only open slots, an ensemble change has the others as
`existing`. In this order (BookKeeper: RackawareEnsemblePlacementPolicy; ledger protocol §1.2):

    1. never the same bookie twice, never one that stands in the ensemble
    2. a bookie in quarantine only when the others are too few, or (with `enforce`) their racks are
    3. **minimum of racks**: every write set, all E rotations, covers `racks_min` racks, or Qw where Qw is less
    4. a rack that the write sets of the slot do not have yet, then one that the ensemble has least
    5. chance, weighted by free disk

When rule 3 cannot be kept: `enforce` and nobody is chosen (`NotPlaced.RACKS`), else rule 4 alone decides and the
choice says so (`racks_short`). Rule 3 is searched for with a bound of `STEPS_MAX` tries, exact for every ensemble of
up to six; above, an arrangement may be missed where racks are nearly too few, and is then treated as missing.

**Weight**: the free bytes, at most `WEIGHT_RATIO_MAX` times the median of those there (BookKeeper's maxMultiple), so
that a new, empty bookie is not hammered; a bookie that does not say how much counts as the least of those that do.
Sampling is without replacement: one weighted order of all bookies, of which the rules above take the first that fits.

**Quarantine**: a bookie that failed is in quarantine for `base_s`; one that fails again after that, within `max_s`,
for twice as long as before, at most `max_s`. Failures during a quarantine begin it anew and count once, for one hanging
bookie fails every append on its way. Who does not fail for `max_s` after the quarantine begins again at `base_s`.

**Shape** (`fit`): bookies that are missing may shrink E, down to Qw: each entry has all its copies. They shrink Qw only
where that is allowed (`Shrink.COPIES`, the broker's `degraded_writes`), and never below Qa, and Qa never: what is
confirmed lies synced on Qa bookies, always.
Guards: tests/ledger/core/test_placement.py (brute force over small sets), test_bookies.py.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from .striping import Striping

WEIGHT_RATIO_MAX = 3.0
"""BookKeeper's bookieMaxWeightMultipleForWeightBasedPlacement."""
STEPS_MAX = 5_000
"""Of the search for racks: a few milliseconds at worst. All arrangements of six bookies are 1,956 steps."""
UNKNOWN_RACK = ""
"""Of a bookie of the ensemble that nobody knows any more: it counts as no rack."""


class Chance(Protocol):
    def random(self) -> float:
        """0 ≤ x < 1"""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A writable bookie that is not in the ensemble."""

    bookie: str
    rack: str
    free_bytes: int = 0  # 0: it does not say
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class RackRule:
    """How many racks every write set has to cover, and whether nobody is chosen where they are too few."""

    racks_min: int = 1
    enforce: bool = False


class NotPlaced(enum.Enum):
    BOOKIES = "too few writable bookies are there"
    RACKS = "the bookies that are there stand on too few racks"


@dataclass(frozen=True, slots=True)
class Chosen:
    """By open slot, in its order, who gets it; `racks_short`: some write set covers fewer racks than wanted."""

    bookies: tuple[str, ...]
    racks_short: bool = False


def choose(
    candidates: Sequence[Candidate], count: int, *, rng: Chance, existing: Mapping[int, str] | None = None,
    write_quorum: int | None = None, rule: RackRule | None = None,
) -> Chosen | NotPlaced:  # fmt: skip
    """`count` bookies for the slots of an ensemble that are not in `existing` (slot → rack), lowest slot first.

    The ensemble has `count` + `existing` slots; without `write_quorum` every entry goes to all of them.
    """
    existing = existing or {}
    rule = rule or RackRule()
    size = count + len(existing)
    quorum = size if write_quorum is None else write_quorum
    order = weighted_order(candidates, rng)
    if len(order) < count:
        return NotPlaced.BOOKIES
    well = [each for each in order if not each.quarantined]
    rest = [each for each in order if each.quarantined]
    pool = well + rest[: max(count - len(well), 0)]
    puzzle = _Puzzle(Striping(size, quorum, 1), existing, min(rule.racks_min, quorum))
    found = puzzle.solve(pool)
    if found is None and rule.enforce and len(pool) < len(order):
        found = puzzle.solve(order)
    if found is not None:
        return Chosen(found)
    return NotPlaced.RACKS if rule.enforce else Chosen(puzzle.spread(pool), racks_short=True)


def weighted_order(candidates: Sequence[Candidate], rng: Chance) -> list[Candidate]:
    """All of them, as drawn one after the other with chances by weight (Efraimidis and Spirakis)."""
    weights = weights_of(candidates)
    drawn = [(-math.log(1.0 - rng.random()) / weights[each.bookie], each.bookie, each) for each in candidates]
    drawn.sort(key=lambda each: each[:2])
    return [each for _, _, each in drawn]


def weights_of(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Above 0; the largest at most WEIGHT_RATIO_MAX times the median."""
    known = [each.free_bytes for each in candidates if each.free_bytes > 0]
    if not known:
        return {each.bookie: 1.0 for each in candidates}
    middle = median(known)
    return {
        each.bookie: min((each.free_bytes or min(known)) / middle, WEIGHT_RATIO_MAX) for each in candidates
    }


class _Puzzle:
    """The racks of an ensemble with open slots, filled slot by slot."""

    def __init__(self, striping: Striping, existing: Mapping[int, str], racks_min: int) -> None:
        self._size = striping.ensemble_size
        self._racks_min = racks_min
        self._sets = [tuple(each) for each in striping.write_sets]
        self._near = [
            sorted({other for each in self._sets if slot in each for other in each} - {slot})
            for slot in range(self._size)
        ]
        self._racks: dict[int, str] = {slot: rack for slot, rack in existing.items() if rack != UNKNOWN_RACK}
        self._open = [slot for slot in range(self._size) if slot not in existing]
        self._unknown = {slot for slot in existing if slot not in self._racks}
        self._steps = 0

    def solve(self, pool: Sequence[Candidate]) -> tuple[str, ...] | None:
        """With the minimum of racks in every write set; None: there is no such choice (within STEPS_MAX)."""
        self._steps = STEPS_MAX
        chosen: list[Candidate] = []
        return tuple(each.bookie for each in chosen) if self._possible() and self._fill(pool, chosen) else None

    def spread(self, pool: Sequence[Candidate]) -> tuple[str, ...]:
        """As many racks as come by taking the best for each slot."""
        racks, left, chosen = self._racks, list(pool), []
        self._racks = dict(racks)
        for slot in self._open:
            best = self._ranked(slot, left)[0]
            left.remove(best)
            self._racks[slot] = best.rack
            chosen.append(best.bookie)
        self._racks = racks
        return tuple(chosen)

    def _fill(self, pool: Sequence[Candidate], chosen: list[Candidate]) -> bool:
        if len(chosen) == len(self._open):
            return True
        slot = self._open[len(chosen)]
        tried: dict[str, None] = {}  # two bookies of one rack make no difference to the racks
        for each in self._ranked(slot, [each for each in pool if each not in chosen]):
            if each.rack in tried:
                continue
            if self._steps == 0:
                return False
            self._steps -= 1
            tried[each.rack] = None
            self._racks[slot] = each.rack
            chosen.append(each)
            if self._possible() and self._fill(pool, chosen):
                del self._racks[slot]
                return True
            chosen.pop()
            del self._racks[slot]
        return False

    def _possible(self) -> bool:
        """Whether each write set has its racks, if every open slot brought a new one."""
        if self._racks_min <= 1:
            return True
        for each in self._sets:
            racks = {self._racks[slot] for slot in each if slot in self._racks}
            still_open = sum(slot not in self._racks and slot not in self._unknown for slot in each)
            if len(racks) + still_open < self._racks_min:
                return False
        return True

    def _ranked(self, slot: int, left: Sequence[Candidate]) -> list[Candidate]:
        near = Counter(self._racks[other] for other in self._near[slot] if other in self._racks)
        everywhere = Counter(self._racks.values())
        return sorted(left, key=lambda each: (near[each.rack], everywhere[each.rack]))  # stable: keeps chance's order


# ------------------------------------------------------------------------------------------ quarantine
@dataclass(slots=True)
class _Trouble:
    failed_at: float
    length_s: float


class Quarantine:
    """Who failed lately, and how often. `now` is any clock that does not go back."""

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._troubles: dict[str, _Trouble] = {}

    def failed(self, bookie: str, now: float) -> None:
        trouble = self._troubles.get(bookie)
        if trouble is None or now >= trouble.failed_at + trouble.length_s + self._max_s:
            self._troubles[bookie] = _Trouble(now, self._base_s)
            return
        if now >= trouble.failed_at + trouble.length_s:
            trouble.length_s = max(min(2 * trouble.length_s, self._max_s), self._base_s)
        trouble.failed_at = now

    def started(self, bookie: str, now: float) -> None:
        """The bookie has started anew: its quarantine ends, what it did before is not forgotten."""
        trouble = self._troubles.get(bookie)
        if trouble is not None:
            trouble.failed_at = min(trouble.failed_at, now - trouble.length_s)

    def holds(self, bookie: str, now: float) -> bool:
        trouble = self._troubles.get(bookie)
        return trouble is not None and now < trouble.failed_at + trouble.length_s

    def failed_lately(self, bookie: str, now: float) -> bool:
        """Within `base_s`, however long its quarantine is: it is taken for away, and copies may be given up for it."""
        trouble = self._troubles.get(bookie)
        return trouble is not None and now < trouble.failed_at + self._base_s

    def held(self, now: float) -> list[str]:
        return sorted(bookie for bookie in self._troubles if self.holds(bookie, now))


# ------------------------------------------------------------------------------------------ shape
class Shrink(enum.Enum):
    """What a new ledger may have less of while bookies are missing."""

    NOTHING = "nothing: it waits"
    BOOKIES = "bookies: E down to Qw, every entry has all its copies"
    COPIES = "copies too: E and Qw down to Qa"


def fit(wanted: Striping, well: int, shrink: Shrink) -> Striping:
    """The shape that `well` bookies allow; the one wanted when they are too few for any that is allowed."""
    least = {
        Shrink.NOTHING: wanted.ensemble_size, Shrink.BOOKIES: wanted.write_quorum, Shrink.COPIES: wanted.ack_quorum
    }[shrink]  # fmt: skip
    if not least <= well < wanted.ensemble_size:
        return wanted
    return Striping(well, min(wanted.write_quorum, well), wanted.ack_quorum)
