"""Bundles: ranges of a hash over a namespace's topics, so that brokers own some hundreds of bundles and not 100,000
topics.

The hash is CRC32 of the topic's full name (of the partition, where there are partitions). With n bundles, bundle i has
the hashes i·2³²/n … (i+1)·2³²/n - 1. Its name has its bounds, as in "0x40000000_0x80000000". The upper bound is
exclusive, except the last one, "0xffffffff" (Pulsar's names). The number of bundles is chosen when the namespace is
created, and only ever doubled: each bundle is then two, with half of its hashes each. So the name of a bundle says how
many there are (`parse_bundle_name`), and no name is used again for other hashes.

Placement (`BundlePlacement`): which broker of a group gets a bundle that no broker owns, or that its owner gives away.

    chosen = placement.choose_broker(path, brokers, now_s)

Two candidates are drawn at random, and the better one is chosen: the less busy one if the two differ by
BUSY_DIFFERENCE_MIN or more, else the one with fewer bundles. So brokers that choose at the same time, by the same old
reports, do not all choose the same broker. A draining broker is no candidate. A broker reports its load in its
registration (`BrokerRecord.busy_percent`, `bundles`), some seconds late. So bundles that were assigned to it after its
last report count, too, for at most ASSIGNED_BUNDLE_COUNTS_S: as one bundle each, with the average load of a bundle of
the group. A broker of an older Magnetar reports no load: it counts as idle, apart from the bundles that were assigned
to it. Guard: tests/broker/cluster/test_placement.py.

Balance (`plan_balance`): which bundles move when an operator asks for it, by the loads that their owners measured now.

    moves = plan_balance(["one", "two"], {"one": [BundleLoad(path, load), …], "two": []})

A move goes from a broker with a high load to one with a low load, and makes the two more equal. Each bundle moves at
most once. A move that would gain little is not planned, because it costs the bundle's clients a pause.
Guard: tests/broker/cluster/test_balance.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol
from zlib import crc32

from ...metadata.records import BrokerRecord
from ...proto.names import TopicName

ASSIGNED_BUNDLE_COUNTS_S = 30.0
"""Seconds for which an assigned bundle counts if its broker does not report meanwhile: three reports could have come.
"""
BUSY_DIFFERENCE_MIN = 20.0
"""Points of a hundred by which two brokers must differ in how busy they are, so that this decides: what two brokers
with the same work report differs by half as much."""
ASSIGNED_BUNDLES_MAX = 10_000
"""Bundles that are remembered as assigned; the oldest are forgotten first. About 150 bytes each."""


class RandomSource(Protocol):
    """A source of random numbers, with which brokers are chosen: one method of `random.Random`, which implements it.
    With a source from a fixed seed, a test can repeat a choice. `randrange(stop)` returns a random number from 0 to
    `stop` - 1."""

    def randrange(self, stop: int, /) -> int: ...


class RecentlyAssignedBundle(NamedTuple):
    """A bundle that was assigned to a broker a moment ago, so that the load that the broker has reported does not
    include the bundle yet. `report`: the number of the broker's last report at that time; `at_s`: the time (monotonic
    seconds)."""

    broker: str
    report: int  # the number of the last report of that broker then
    at_s: float


class BundlePlacement:
    """Chooses the broker that gets a bundle, from the loads that the brokers have reported. Also counts the bundles
    that were assigned after these reports."""

    def __init__(self, rng: RandomSource) -> None:
        self._rng = rng
        self._assigned: dict[str, RecentlyAssignedBundle] = {}  # by path of the owner record, oldest first

    def choose_broker(self, path: str, brokers: Sequence[BrokerRecord], now_s: float) -> BrokerRecord | None:
        """Returns the broker that should own the bundle whose owner record is at `path`; None if none of the `brokers`
        may get bundles. From then on, counts the bundle as assigned to this broker. `now_s`: monotonic seconds."""
        candidates = [each for each in brokers if not each.draining]
        if not candidates:
            return None
        self._forget(now_s)
        self._assigned.pop(path, None)
        chosen = candidates[self._rng.randrange(len(candidates))]
        others = [each for each in candidates if each is not chosen]
        if others:
            chosen = self._better(chosen, others[self._rng.randrange(len(others))], candidates)
        self._assigned[path] = RecentlyAssignedBundle(chosen.name, chosen.report, now_s)
        return chosen

    def _better(self, one: BrokerRecord, other: BrokerRecord, candidates: Sequence[BrokerRecord]) -> BrokerRecord:
        bundles = sum(each.bundles for each in candidates)
        each_busy = sum(each.busy_percent for each in candidates) / bundles if bundles else 0.0
        added, added_other = self._count_assigned(one), self._count_assigned(other)
        apart = (one.busy_percent + added * each_busy) - (other.busy_percent + added_other * each_busy)
        if abs(apart) >= BUSY_DIFFERENCE_MIN:
            return one if apart < 0 else other
        return one if one.bundles + added <= other.bundles + added_other else other

    def _count_assigned(self, broker: BrokerRecord) -> int:
        return sum(each.broker == broker.name and each.report == broker.report for each in self._assigned.values())

    def _forget(self, now_s: float) -> None:
        while self._assigned:
            oldest = next(iter(self._assigned))
            if (
                len(self._assigned) < ASSIGNED_BUNDLES_MAX
                and now_s - self._assigned[oldest].at_s < ASSIGNED_BUNDLE_COUNTS_S
            ):
                return
            del self._assigned[oldest]


class BrokerLoadReport(NamedTuple):
    """The load of a broker, as the broker reports it to the others."""

    busy_percent: int  # of one core, by its process
    bundles: int  # owned, and coordinators

    def differs_enough_to_report(self, told: BrokerRecord) -> bool:
        """Returns True if this load differs so much from `told`, the load that was reported last, that it must be
        reported: by at least half of BUSY_DIFFERENCE_MIN in `busy_percent`, or by more than a tenth of the bundles. So
        an idle broker writes no reports to the metadata."""
        busy, bundles = abs(self.busy_percent - told.busy_percent), abs(self.bundles - told.bundles)
        return busy >= BUSY_DIFFERENCE_MIN / 2 or bundles > told.bundles // 10


BALANCED_LOAD_SHARE = 0.1
"""Of the mean load of the brokers: two brokers that differ by less are left alone, and so is a bundle whose move brings
them together by less."""
MOVES_PER_PLAN_MAX = 64
"""Moves of one plan. With BUNDLES_MOVED_AT_ONCE at a time they end within the time-out of the request."""


class BundleLoad(NamedTuple):
    """A bundle that a broker owns, its load in any unit, and the names of the brokers that may get it (None: any)."""

    path: str  # of the owner record
    load: float
    allowed: frozenset[str] | None = None

    def may_move_to(self, broker: str) -> bool:
        """Returns True if the broker may get the bundle."""
        return self.allowed is None or broker in self.allowed


class PlannedMove(NamedTuple):
    """A bundle that is to move from one broker to another. `path`: of its owner record; `source`, `target`: the names
    of the two brokers; `load`: that of the bundle."""

    path: str
    source: str
    target: str
    load: float


def plan_balance(brokers: Sequence[str], bundles: Mapping[str, Sequence[BundleLoad]]) -> list[PlannedMove]:
    """Returns the moves after which the loads of the `brokers` are nearly equal, the most useful one first; at most
    MOVES_PER_PLAN_MAX, [] if no move is useful. `bundles`: what each of the brokers owns, by its name."""
    loads = {name: sum(each.load for each in bundles.get(name, ())) for name in brokers}
    left = {name: sorted(bundles.get(name, ()), key=lambda each: each.path) for name in brokers}
    least = BALANCED_LOAD_SHARE * sum(loads.values()) / max(1, len(loads))
    moves = list[PlannedMove]()
    while len(moves) < MOVES_PER_PLAN_MAX and (move := _find_best_move(loads, left, least)) is not None:
        moves.append(move)
        loads[move.source] -= move.load
        loads[move.target] += move.load
        left[move.source] = [each for each in left[move.source] if each.path != move.path]  # it is not moved twice
    return moves


def _find_best_move(
    loads: Mapping[str, float], left: Mapping[str, Sequence[BundleLoad]], least: float
) -> PlannedMove | None:
    """Returns the move that brings two brokers closest together: the two that differ most, if a bundle fits; None if no
    move is worth its pause."""
    order = sorted(loads, key=lambda name: (loads[name], name))
    for source in reversed(order):
        for target in order:
            apart = loads[source] - loads[target]
            if apart <= least:
                break
            worth = [
                each for each in left[source]
                if each.load > 0 and apart - abs(apart - 2 * each.load) >= least and each.may_move_to(target)
            ]  # fmt: skip
            if worth:
                best = min(worth, key=lambda each: (abs(apart - 2 * each.load), each.path))
                return PlannedMove(best.path, source, target, best.load)
    return None


class BundleTraffic(NamedTuple):
    """What a bundle or a topic carries: loaded topics, producers and consumers, and messages and bytes per second in
    and out. Also the limits of a bundle: 0 is none."""

    topics: float
    sessions: float
    messages_s: float
    bytes_s: float


HOT_TOPIC_SHARE = 0.5
"""Of what a bundle carries: a topic with so much of it leaves one half nearly as crowded, so that no split helps."""
CROWDED_CHECKS_MIN = 3
"""Checks in a row in which a bundle must be crowded before its namespace is split: a peak splits nothing for good."""
SPLIT_REST_S = 600.0
"""Seconds between two splits of a namespace: the parts move, and are measured anew."""
_MEASURES = ("topics", "producers and consumers", "messages a second", "bytes a second")


class CrowdedBundle(NamedTuple):
    """A bundle that carries more than it may. `hot_topic`: the topic to which most of that is due; "" if there is none,
    so that a split helps."""

    path: str  # of the owner record
    why: str
    hot_topic: str = ""


def find_crowded_bundle(
    path: str, carried: BundleTraffic, topics: Mapping[str, BundleTraffic], limits: BundleTraffic
) -> CrowdedBundle | None:
    """Returns what is crowded about the bundle at `path`; None: nothing. `topics`: what each of its topics carries."""
    found: CrowdedBundle | None = None
    for at, (value, limit) in enumerate(zip(carried, limits, strict=True)):
        if not 0 < limit < value:
            continue
        why = f"{value:,.0f} {_MEASURES[at]}, {limit:,.0f} are the most"
        hottest = max(topics, key=lambda name: (topics[name][at], name), default="")
        if not hottest or topics[hottest][at] < HOT_TOPIC_SHARE * value:
            return CrowdedBundle(path, why)
        found = CrowdedBundle(path, why, hottest)
    return found


class SplitPlanner:
    """Decides which namespaces are split, from the bundles that their owners find crowded. `now_s`: monotonic
    seconds."""

    def __init__(self) -> None:
        self._checks: dict[str, int] = {}  # in a row in which a namespace had a crowded bundle
        self._split_s: dict[str, float] = {}

    def plan_splits(self, crowded: Mapping[str, Sequence[CrowdedBundle]], now_s: float) -> list[str]:
        """Takes the crowded bundles of each namespace, as found by all brokers in this check. Returns the namespaces to
        split now, and counts them as split. Bundles with a hot topic do not count."""
        able = {name for name, bundles in crowded.items() if any(not each.hot_topic for each in bundles)}
        self._checks = {name: self._checks.get(name, 0) + 1 for name in able}
        self._split_s = {name: at_s for name, at_s in self._split_s.items() if now_s - at_s < SPLIT_REST_S}
        due = sorted(name for name in able - set(self._split_s) if self._checks[name] >= CROWDED_CHECKS_MIN)
        self._split_s.update(dict.fromkeys(due, now_s))
        return due


HASH_RANGE = 1 << 32
BUNDLES_PER_NAMESPACE_MAX = 1 << 12


def find_topic_bundle_name(topic: TopicName, bundles: int) -> str:
    """Returns the name of the bundle to which the topic belongs, in a namespace with `bundles` bundles."""
    return make_bundle_name(find_topic_bundle_number(topic, bundles), bundles)


def find_topic_bundle_number(topic: TopicName, bundles: int) -> int:
    """Returns the number (from 0) of the bundle to which the topic belongs, in a namespace with `bundles` bundles."""
    return compute_bundle_number(topic.full, bundles)


def compute_bundle_number(full: str, bundles: int) -> int:
    """Returns the number (from 0) of the bundle to which the topic with the full name `full` belongs, in a namespace
    with `bundles` bundles."""
    return crc32(full.encode()) * bundles // HASH_RANGE


def parse_bundle_name(name: str) -> tuple[int, int]:
    """Returns (the number of the bundle from 0, how many bundles the namespace has) of a name that `make_bundle_name`
    has made. Raises ValueError for another text."""
    low, separator, high = name.partition("_")
    first, end = int(low, 16), int(high or "x", 16)
    size = end + (end == HASH_RANGE - 1) - first
    bundles = round(HASH_RANGE / size) if size > 0 and separator else 0
    number = first * bundles // HASH_RANGE
    if not 0 <= number < bundles <= BUNDLES_PER_NAMESPACE_MAX or make_bundle_name(number, bundles) != name:
        raise ValueError(f"{name!r} is no name of a bundle")
    return number, bundles


def list_bundle_parts(name: str, bundles: int) -> list[str]:
    """Returns the names of the bundles that a bundle is divided into, in a namespace with `bundles` bundles by now;
    [name] if it is one of them, [] if it is no bundle from which these came."""
    number, before = parse_bundle_name(name)
    parts, rest = divmod(bundles, before)
    if rest or parts.bit_count() != 1:
        return []
    return [make_bundle_name(number * parts + part, bundles) for part in range(parts)]


@lru_cache(maxsize=BUNDLES_PER_NAMESPACE_MAX)
def make_bundle_name(number: int, bundles: int) -> str:
    """Returns the name of the bundle with this number (from 0), in a namespace with `bundles` bundles."""
    assert 0 <= number < bundles <= BUNDLES_PER_NAMESPACE_MAX, "a bundle number is within the namespace's bundles"
    low = -(-number * HASH_RANGE // bundles)
    high = -(-(number + 1) * HASH_RANGE // bundles)
    return f"0x{low:08x}_0x{min(high, HASH_RANGE - 1):08x}"
