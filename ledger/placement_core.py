"""Placement: which bookies get the copies. Pure: candidates and a random source in, bookies in slot order out.

`choose_bookies` fills the open slots of an ensemble; a new ledger has only open slots, an ensemble change has the
others as `existing`. In this order (BookKeeper: RackawareEnsemblePlacementPolicy; ledger protocol §1.2):

    1. never the same bookie twice, never one that is already in the ensemble
    2. a bookie in quarantine only when there are too few others, or (with `enforce`) they are on too few racks
    3. **minimum of racks**: every write set, all E rotations, covers `racks_min` racks, or Qw where Qw is less
    4. a rack that the write sets of the slot do not have yet, then the one that the ensemble has least
    5. at random, weighted by free disk

The ledger of a namespace with groups of bookies (`BookieGroups`, Pulsar: bookie affinity groups) has bookies of these
groups alone (`choose_bookies_of_groups`): primary ones, and secondary ones only for the slots that primary ones cannot
fill. The groups are in the ledger's record, so that its next ensembles, its recovery and its repair keep to them.

When rule 3 cannot be kept: with `enforce` no bookie is chosen (`PlacementFailure.RACKS`); else rule 4 alone decides and
the result says so (`racks_short`). The search for rule 3 takes at most `SEARCH_STEPS_MAX` steps. It is exact for every
ensemble of up to six; with more slots it may miss an arrangement where racks are nearly too few, and then rule 3 counts
as not kept.

**Weight**: the free bytes, at most `BOOKIE_WEIGHT_RATIO_MAX` times the median of the candidates (BookKeeper's
maxMultiple), so that a new, empty bookie does not get every ledger. A bookie that does not report its free bytes gets
the least weight of those that do. Sampling is without replacement: the bookies are drawn in one weighted order, and the
rules above take the first that fits.

**Quarantine**: a bookie that failed is in quarantine for `base_s`. One that fails again later, within `max_s`, is in
quarantine for twice as long as before, at most `max_s`. Failures during a quarantine restart it and count once, because
one hanging bookie fails every pending append. A bookie without failure for `max_s` after its quarantine starts again at
`base_s`.

**Shape** (`reduce_striping`): missing bookies may shrink E, down to Qw: each entry keeps all its copies. They shrink Qw
only where that is allowed (`StripingReduction.COPIES`, the broker's `degraded_writes`), and never below Qa. Qa never
shrinks: a confirmed entry is always synced on Qa bookies.
Guards: tests/ledger/test_placement.py (brute force over small sets), test_bookies.py.

Also in this file, below its heading: the bookies that failed, were slow or sent damage lately (bookie_health_core).
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from .writer_core import Striping

BOOKIE_WEIGHT_RATIO_MAX = 3.0
"""The largest weight of a bookie, as a multiple of the median: BookKeeper's
bookieMaxWeightMultipleForWeightBasedPlacement."""
SEARCH_STEPS_MAX = 5_000
"""The largest number of steps of the search for racks, which takes a few milliseconds. Trying all arrangements of six
bookies takes 1,956 steps."""
UNKNOWN_RACK = ""
"""The rack of a bookie that was never registered. It counts as no rack."""


class RandomSource(Protocol):
    """The source of random numbers for `choose_bookies`, such as a `random.Random`."""

    def random(self) -> float:
        """Returns a number x with 0 ≤ x < 1."""
        ...


class BookieCandidate(msgspec.Struct, frozen=True):
    """A writable bookie that is not in the ensemble and may be chosen for it. `bookie`: its uuid; `rack`: UNKNOWN_RACK
    if it is not known; `quarantined`: it failed lately; `group`: "" for none."""

    bookie: str
    rack: str
    free_bytes: int = 0  # 0: not reported
    quarantined: bool = False
    group: str = ""


class BookieGroups(msgspec.Struct, frozen=True):
    """The groups of bookies that hold a ledger: those of `primary`; those of `secondary` only where the primary ones
    are too few. No primary group: any bookie. The ledger's record has them in its properties."""

    primary: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()

    def contains(self, group: str) -> bool:
        """Returns True if a bookie of this group may hold the ledger."""
        return not self.primary or group in self.primary or group in self.secondary

    def encode(self) -> dict[str, str]:
        """Returns the properties of a ledger with these groups; {} if any bookie may hold it."""
        return {GROUPS_PROPERTY: f"{','.join(self.primary)};{','.join(self.secondary)}"} if self.primary else {}

    def __str__(self) -> str:
        return ", ".join((*self.primary, *self.secondary))


GROUPS_PROPERTY = "bookie_groups"
"""The property of a ledger that has its groups: PRIMARY,…;SECONDARY,…"""
ANY_GROUP = BookieGroups()


def decode_bookie_groups(properties: Mapping[str, str]) -> BookieGroups:
    """Returns the groups of a ledger with these properties."""
    primary, _, secondary = properties.get(GROUPS_PROPERTY, "").partition(";")
    return BookieGroups(*(tuple(each for each in text.split(",") if each) for text in (primary, secondary)))


class RackRule(msgspec.Struct, frozen=True):
    """The rule about racks: every write set must cover `racks_min` racks. `enforce`: whether no bookies are chosen if
    that is impossible; otherwise the rule is a preference."""

    racks_min: int = 1
    enforce: bool = False


class PlacementFailure(enum.Enum):
    """The reason why `choose_bookies` chose no bookie."""

    BOOKIES = "there are too few writable bookies"
    RACKS = "the writable bookies are on too few racks"


class ChosenBookies(msgspec.Struct, frozen=True):
    """The result of `choose_bookies`: one bookie for each open slot, in the order of the slots. `racks_short`: whether
    some write set covers fewer racks than the rule wants."""

    bookies: tuple[str, ...]
    racks_short: bool = False


def choose_bookies(
    candidates: Sequence[BookieCandidate], count: int, *, rng: RandomSource, existing: Mapping[int, str] | None = None,
    write_quorum: int | None = None, rule: RackRule | None = None,
) -> ChosenBookies | PlacementFailure:  # fmt: skip
    """Chooses bookies among `candidates` for the `count` open slots of an ensemble, randomly, weighted by free space.
    `existing` has the racks of the other slots (slot → rack); the open slots are those that it does not name. Returns
    one bookie for each open slot, the lowest slot first, or the reason why none could be chosen.

    The ensemble has `count` + `existing` slots. Without `write_quorum`, every slot stores every entry. `rule`: how many
    racks a write set must cover; None: one. Raises InvalidConfiguration if `write_quorum` is larger than the ensemble,
    or below 1."""
    if count == len(candidates) == 1 and not existing:
        return ChosenBookies((candidates[0].bookie,))
    existing = existing or {}
    rule = rule or RackRule()
    size = count + len(existing)
    quorum = size if write_quorum is None else write_quorum
    order = shuffle_by_weight(candidates, rng)
    if len(order) < count:
        return PlacementFailure.BOOKIES
    well = [each for each in order if not each.quarantined]
    rest = [each for each in order if each.quarantined]
    pool = well + rest[: max(count - len(well), 0)]
    puzzle = _Puzzle(Striping(size, quorum, 1), existing, min(rule.racks_min, quorum))
    found = puzzle.solve(pool)
    if found is None and rule.enforce and len(pool) < len(order):
        found = puzzle.solve(order)
    if found is not None:
        return ChosenBookies(found)
    return PlacementFailure.RACKS if rule.enforce else ChosenBookies(puzzle.spread(pool), racks_short=True)


def choose_bookies_of_groups(
    candidates: Sequence[BookieCandidate], groups: BookieGroups, count: int, *, rng: RandomSource,
    existing: Mapping[int, str] | None = None, write_quorum: int | None = None, rule: RackRule | None = None,
) -> ChosenBookies | PlacementFailure:  # fmt: skip
    """Chooses bookies like `choose_bookies`, of these groups alone. If fewer than `count` primary bookies are well,
    chooses as many secondary ones as are missing. Where that leaves too few bookies, or with an enforced rule too few
    racks, chooses among all bookies of both groups."""
    primary = [each for each in candidates if not groups.primary or each.group in groups.primary]
    others = [each for each in candidates if each not in primary and each.group in groups.secondary]
    well = [each for each in primary if not each.quarantined]
    pools = [primary]
    if len(well) < count and others:
        drawn = shuffle_by_weight([each for each in others if not each.quarantined], rng)
        pools = [[*well, *drawn[: count - len(well)]]]
    if others:
        pools.append([*primary, *others])
    for pool in pools:
        found = choose_bookies(
            pool, count, rng=rng, existing=existing, write_quorum=write_quorum, rule=rule
        )  # fmt: skip
        if isinstance(found, ChosenBookies):
            break
    return found


def shuffle_by_weight(candidates: Sequence[BookieCandidate], rng: RandomSource) -> list[BookieCandidate]:
    """Returns all candidates in a random order. A candidate with a larger weight is more likely to come early
    (Efraimidis and Spirakis)."""
    weights = compute_candidate_weights(candidates)
    drawn = [(-math.log(1.0 - rng.random()) / weights[each.bookie], each.bookie, each) for each in candidates]
    drawn.sort(key=lambda each: each[:2])
    return [each for _, _, each in drawn]


def compute_candidate_weights(candidates: Sequence[BookieCandidate]) -> dict[str, float]:
    """Returns the weight of each candidate, by bookie. The weights are proportional to the free bytes; the median is 1,
    the largest possible is BOOKIE_WEIGHT_RATIO_MAX. A candidate that does not report its free bytes gets the smallest
    weight; if none reports them, all weights are 1."""
    known = [each.free_bytes for each in candidates if each.free_bytes > 0]
    if not known:
        return {each.bookie: 1.0 for each in candidates}
    ordered = sorted(known)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2  # `statistics` takes 2 ms to load
    return {
        each.bookie: min((each.free_bytes or min(known)) / middle, BOOKIE_WEIGHT_RATIO_MAX) for each in candidates
    }


class _Puzzle:
    """The search for bookies for the open slots of an ensemble such that every write set covers enough racks. Fills
    slot by slot."""

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

    def solve(self, pool: Sequence[BookieCandidate]) -> tuple[str, ...] | None:
        """Returns bookies for the open slots such that every write set covers the smallest number of racks. Returns
        None if no such choice was found in SEARCH_STEPS_MAX steps."""
        self._steps = SEARCH_STEPS_MAX
        chosen: list[BookieCandidate] = []
        return tuple(each.bookie for each in chosen) if self._possible() and self._fill(pool, chosen) else None

    def spread(self, pool: Sequence[BookieCandidate]) -> tuple[str, ...]:
        """Returns the best bookie for each open slot, slot by slot, without a smallest number of racks."""
        racks, left, chosen = self._racks, list(pool), []
        self._racks = dict(racks)
        for slot in self._open:
            best = self._ranked(slot, left)[0]
            left.remove(best)
            self._racks[slot] = best.rack
            chosen.append(best.bookie)
        self._racks = racks
        return tuple(chosen)

    def _fill(self, pool: Sequence[BookieCandidate], chosen: list[BookieCandidate]) -> bool:
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
        """Returns whether each write set could still cover enough racks if every open slot got a bookie on a new
        rack."""
        if self._racks_min <= 1:
            return True
        for each in self._sets:
            racks = {self._racks[slot] for slot in each if slot in self._racks}
            still_open = sum(slot not in self._racks and slot not in self._unknown for slot in each)
            if len(racks) + still_open < self._racks_min:
                return False
        return True

    def _ranked(self, slot: int, left: Sequence[BookieCandidate]) -> list[BookieCandidate]:
        near = Counter(self._racks[other] for other in self._near[slot] if other in self._racks)
        everywhere = Counter(self._racks.values())
        return sorted(left, key=lambda each: (near[each.rack], everywhere[each.rack]))  # stable: keeps the random order


# ------------------------------------------------------------------------------------------ quarantine
class _Trouble(msgspec.Struct):
    failed_at: float
    length_s: float


class BookieQuarantine:
    """Records which bookies failed lately, and for how long new ensembles should avoid each of them. A quarantine takes
    `base_s` to `max_s` seconds. `now` is in seconds of a clock that does not go back."""

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._troubles: dict[str, _Trouble] = {}

    def record_failure(self, bookie: str, now: float) -> None:
        """Records a failure of the bookie at the time `now`. The failure begins a quarantine, or restarts the running
        one. A quarantine that begins soon after the last one is twice as long (see the module's docstring)."""
        trouble = self._troubles.get(bookie)
        if trouble is None or now >= trouble.failed_at + trouble.length_s + self._max_s:
            self._troubles[bookie] = _Trouble(now, self._base_s)
            return
        if now >= trouble.failed_at + trouble.length_s:
            trouble.length_s = max(min(2 * trouble.length_s, self._max_s), self._base_s)
        trouble.failed_at = now

    def on_bookie_restarted(self, bookie: str, now: float) -> None:
        """Called when a bookie has restarted: ends its quarantine. Its next failure still counts as a repeated one."""
        trouble = self._troubles.get(bookie)
        if trouble is not None:
            trouble.failed_at = min(trouble.failed_at, now - trouble.length_s)

    def is_quarantined(self, bookie: str, now: float) -> bool:
        """Returns whether the bookie is in quarantine at the time `now`."""
        trouble = self._troubles.get(bookie)
        return trouble is not None and now < trouble.failed_at + trouble.length_s

    def has_failed_lately(self, bookie: str, now: float) -> bool:
        """Returns whether the bookie failed within the last `base_s` seconds, even if its quarantine lasts longer. Such
        a bookie counts as down and may be replaced."""
        trouble = self._troubles.get(bookie)
        return trouble is not None and now < trouble.failed_at + self._base_s

    def quarantined_bookies(self, now: float) -> list[str]:
        """Returns the bookies that are in quarantine at the time `now`, sorted."""
        return sorted(bookie for bookie in self._troubles if self.is_quarantined(bookie, now))


# ------------------------------------------------------------------------------------------ shape
class StripingReduction(enum.Enum):
    """What a new ledger may have less of while too few bookies are healthy: nothing, bookies in its ensemble, or also
    copies of an entry."""

    NOTHING = "nothing: it waits"
    BOOKIES = "bookies: E down to Qw, every entry has all its copies"
    COPIES = "copies too: E and Qw down to Qa"


def reduce_striping(wanted: Striping, well: int, shrink: StripingReduction) -> Striping:
    """Returns the striping for a new ledger when `well` bookies are healthy: `wanted`, reduced as far as necessary and
    as far as `shrink` allows. Returns `wanted` itself if there are enough bookies, or too few even for the smallest
    striping allowed."""
    least = wanted.ensemble_size
    if shrink is not StripingReduction.NOTHING:
        least = wanted.write_quorum if shrink is StripingReduction.BOOKIES else wanted.ack_quorum
    if not least <= well < wanted.ensemble_size:
        return wanted
    return Striping(well, min(wanted.write_quorum, well), wanted.ack_quorum)


# -------------------------------------------------------------------------------------------- bookie_health_core
# The bookies that failed, were slow or sent damage lately: reads ask them last. Pure; one for all readers of a client.
#
# Each event adds to the bookie's weight: `FAILED` (no answer, a broken connection) 1, `DAMAGED` (bytes that are not the
# entry) 1, `SLOW` (another replica had to be asked meanwhile) ½. The weight is at most FAULT_WEIGHT_MAX and halves
# every `half_life_s`; below FAULT_FORGET_RATE it is dropped. So one time-out is remembered for two half-lives, a bookie
# that always hangs for four. The weight decides only the order: a bookie in trouble is asked last and never left out,
# because it may be the only one that has the entry. New ensembles follow other rules (bookies.py: failures count,
# slowness does not). `counts` never fall: bookie → kind → events. Guards: tests/ledger/test_bookie_health.py.


FAULT_WEIGHT_MAX = 4.0
FAULT_FORGET_RATE = 0.25


class BookieFaultKind(enum.Enum):
    """The kind of a bookie's fault in answering a read. FAULT_WEIGHTS has the weight of each kind."""

    FAILED = "failed"
    SLOW = "slow"
    DAMAGED = "damaged"


FAULT_WEIGHTS = {BookieFaultKind.FAILED: 1.0, BookieFaultKind.SLOW: 0.5, BookieFaultKind.DAMAGED: 1.0}


class BookieHealth:
    """Records the recent faults of bookies as one weight for each bookie, which halves every `half_life_s` seconds.
    `counts` has the number of all faults, by bookie and kind. `now` is in seconds of a clock that does not go back."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._weights: dict[str, tuple[float, float]] = {}  # bookie: weight, at which moment
        self.counts: dict[str, dict[BookieFaultKind, int]] = {}

    def record_read_fault(self, bookie: str, kind: BookieFaultKind, now: float) -> None:
        """Counts a fault of the bookie at the time `now`, and adds the weight of its kind to the bookie's weight, which
        is at most FAULT_WEIGHT_MAX."""
        self._weights[bookie] = min(self._weight(bookie, now) + FAULT_WEIGHTS[kind], FAULT_WEIGHT_MAX), now
        counts = self.counts.setdefault(bookie, dict.fromkeys(BookieFaultKind, 0))
        counts[kind] += 1

    def reset_weight(self, bookie: str) -> None:
        """Sets the weight of a bookie to 0, because it has restarted. The `counts` of its faults stay."""
        self._weights.pop(bookie, None)

    def fault_weights(self, now: float) -> dict[str, float]:
        """Returns the fault weight of each bookie whose weight is at least FAULT_FORGET_RATE, and deletes the weights
        of the others. A read asks a bookie with a larger weight later."""
        found = {bookie: self._weight(bookie, now) for bookie in self._weights}
        self._weights = {
            bookie: self._weights[bookie] for bookie, weight in found.items() if weight >= FAULT_FORGET_RATE
        }
        return {bookie: weight for bookie, weight in found.items() if weight >= FAULT_FORGET_RATE}

    def _weight(self, bookie: str, now: float) -> float:
        weight, at = self._weights.get(bookie, (0.0, now))
        return weight * 0.5 ** (max(now - at, 0.0) / self._half_life_s) if self._half_life_s > 0 else 0.0
