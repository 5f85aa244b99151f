"""Decides which bundles move between brokers, from the loads that the brokers report: loads in, moves out.

    balancer.add_report(report, now_s)           each broker's load, every BALANCE_CHECK_INTERVAL_S
    for move in balancer.plan_moves(now_s): …    in the same interval; the driver lets the owners move the bundles
    balancer.end_move(move.path, moved, now_s)   moved or failed

A score is how busy a broker is, in points: 100 is all that it can do. Two averages of a score are kept. The slow one
decides, so that noise moves nothing. When the fast one has differed from it by LOAD_CHANGED_SHARE in
LOAD_CHANGED_CHECKS reports in a row, the load has changed, and the slow one begins anew from there. Brokers of one
group are compared with their mean:

    hot     its slow average is HOT_BROKER_SHARE above the mean
    cold    its slow average is COLD_BROKER_SHARE below the mean

The hottest broker is paired with the coldest, the next with the next, while one of the two is hot or cold. No broker is
in two pairs, so no target gets the bundles of all others at once. From each pair at most MOVES_PER_BROKER_MAX bundles
move, so many that neither ends on the other side of the mean, and none that is small beside the first
(MOVED_BUNDLE_SHARE_MIN). If none fits, the one that makes the pair most equal moves, provided that it closes
GAP_CLOSED_SHARE_MIN of the gap. So one large bundle does not go to and fro. It also moves if only crumbs fit, and
afterwards the target is not above the mean by more than TOLERATED_HOT_SHARE: that is one pause, not four. A broker that
is above the mean by no more than that gives bundles that are worth a pause (MOVED_POINTS_SHARE_MIN), and no others,
unless the target is cold; one that is above it by more gives as many small ones as bring it there.

What is expected after a move is a guess. So the slow average has a weight, the reports that it counts as. It grows by
one with each report, and falls when the true average may have changed by a share of it (`_Averages.doubt`): by the
share of the load that brokers had that are gone, or by as much as a move has shifted it, if its source was fully busy
(FULL_POINTS) and may have had more to do than it showed; by MOVE_ERROR_SHARE of that otherwise. While the weight is
small, the average follows the reports quickly, a broker is hot or cold only if it is so by more (`_Averages.error`),
and a pair whose gap needs crumbs, or a bundle that crosses the mean, waits (SETTLED_WEIGHT_MIN). What fits without
doubt moves at once. Among a thousand brokers some seem least busy by chance alone: as a target a broker counts as the
most that its average probably is (`_Averages.most`), and a bundle with the mean of its last reports (`_average`).

A score cannot tell what one bundle costs. It is shared among the bundles of a broker by their loads; a bundle counts at
its target as it does at the source, in proportion to what the two brokers do a point (`_points_at`): a slow broker gets
fewer bundles. After a move both averages and the load of both brokers are set to what is expected, and reports whose
measurement began before are ignored. So what is on its way counts at once, and counts once.

A bundle rests for MOVED_BUNDLE_REST_S after it has moved, twice as long after each further move, and never moves when
the move costs more than it brings (`costs_more_than_it_brings`). A broker is judged after BELIEVED_REPORTS_MIN reports,
again after a silence of SILENT_BROKER_FORGOTTEN_S. One that drains takes no part: its bundles leave without the
balancer, and an empty broker must not make the others seem busy. Whatever the reports say, at most MOVES_PER_BROKER_MAX
bundles of a broker are on their way, a bundle goes to no broker that its namespace does not allow, and a broker that
carries CARRIED_LOAD_RATIO_MAX times as much a point as the others gets nothing, so one that never says that it is busy
does not get everything. Guard: tests/balance/.

Namespaces may ask for brokers (isolation_core.py). A bundle that its owner may not own is *misplaced*: it moves first,
without averages, costs and rests, to one of the brokers that may get it. Then all brokers of a group are balanced; then
each set of brokers that some namespace asks for, by the bundles of such namespaces alone: the mean of the whole group
would leave such a set unequal while all of it is busier than the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .bundles_core import CrowdedBundle

BALANCE_CHECK_INTERVAL_S = 10.0
"""Seconds between two reports of a broker, and between two plans."""
FAST_HALF_LIFE_S = 30.0
SLOW_HALF_LIFE_S = 240.0
"""With a noise of 20 % in each report, the standard deviation of the slow average is 2.4 %, of the fast one 7 %."""
LOAD_CHANGED_SHARE = 0.25
LOAD_CHANGED_CHECKS = 3
REPORTED_BUNDLES_MAX = 32
"""Bundles of a report, the heaviest ones: so many that some of them may move, while those that have moved rest."""
SILENT_CHECKS_MAX = 3
"""A broker that has not reported for so many checks takes no part, and is no target, until it reports again."""
SILENT_BROKER_FORGOTTEN_S = 240.0
"""A broker that has not reported for so long is judged by new averages."""
BELIEVED_REPORTS_MIN = 6
"""Reports after which the averages of a broker are believed: a minute after it has joined, or after another broker has
become the leader."""
SLOW_WEIGHT_MAX = 1 / (1 - 0.5 ** (BALANCE_CHECK_INTERVAL_S / SLOW_HALF_LIFE_S))
"""Reports that the slow average counts as in the long run: 35."""
FAST_WEIGHT = SETTLED_WEIGHT_MIN = 6.0
"""The weight of a slow average that has begun anew from the fast one, and the one from which on it may be refined."""
BUNDLE_REPORTS = 4
"""Reports that the average of a bundle's load is of. With one report, a bundle is chosen whose load is low by chance.
"""
BUNDLE_GROWN_RATIO = 2.0
"""A load that is so much above its average is no noise, but a burst, and begins a new average."""
FULL_POINTS = 90.0
"""A broker with so many may have more to do than it shows: what its bundles cost elsewhere may be twice as much."""
MOVE_ERROR_SHARE = 0.4
"""Of the points of a move: by so much its effect may differ from what is expected, if its source is not full."""
REPORT_NOISE_SHARE = 0.2
"""The standard deviation of a report, as a share of the score: twice as much below an average counts as chance."""
TOLERATED_HOT_SHARE = 0.21
"""Above HOT_BROKER_SHARE: nearer to the mean, small bundles are not worth their pauses."""
MOVED_POINTS_SHARE_MIN = 0.075
"""Of the mean score: what a bundle that moves must relieve its broker of, unless that is hotter than tolerated."""
HOT_BROKER_SHARE = 0.15
COLD_BROKER_SHARE = 0.25
IDLE_POINTS = 5.0
"""A group whose hottest broker is below it has nothing to balance, and differences below it are nothing."""
MOVES_PER_BROKER_MAX = 4
"""Bundles of one broker, as source and as target, that are on their way at once."""
MOVED_BUNDLE_SHARE_MIN = 0.15
"""A bundle moves with others only if it has at least this share of the points of the heaviest of them. What is left of
the gap is closed by the next plan, if it is still worth it."""
GAP_CLOSED_SHARE_MIN = 0.2
"""Share of the gap of a pair that a bundle must close if it takes one of the two to the other side of the mean."""
COMPARABLE_SCORE_SHARE_MIN = 0.5
"""Of the score of its source: what a target must have, so that its score tells what a bundle costs there."""
CARRIED_LOAD_RATIO_MAX = 4.0
"""Of the load that the others of its group carry a point: brokers may be so much faster than each other."""
BUNDLE_OWNED_S_MIN = 60.0
"""A bundle stays at its owner for so long, whichever broker gave it: a leader does not know of moves before it."""
MOVED_BUNDLE_REST_S = 600.0
REST_DOUBLED_MAX = 4
MOVES_FORGOTTEN_S = 24 * 3600.0
SESSION_COST_S = 0.001
TOPIC_COST_S = 0.010
"""Processor seconds that a move costs: each client connects again, each topic is closed there and recovered here."""
TRIED_TARGETS_MAX = 8


class MovableBundle(NamedTuple):
    """A bundle as its owner reports it. `load` is in any unit that is the same for all brokers; `owned_s`: seconds
    since its owner took it; `allowed`: the names of the brokers that may get it, None for any; `misplaced`: its owner
    may not own it. `topics`: its loaded topics; `sessions`: their producers and consumers."""

    path: str  # of the owner record
    load: float
    topics: int = 1
    sessions: int = 0
    owned_s: float = math.inf
    allowed: frozenset[str] | None = None
    misplaced: bool = False


class BrokerLoad(NamedTuple):
    """A broker's report. `window_s`: the seconds over which it was measured; `load`: of all its bundles; `bundles`: the
    misplaced and the heaviest ones, at least so many that the heaviest MOVES_PER_BROKER_MAX that may move are among
    them. Only brokers with the same `group` give each other bundles."""

    name: str
    score: float  # in points
    load: float
    bundles: Sequence[MovableBundle]
    group: str = ""
    window_s: float = BALANCE_CHECK_INTERVAL_S
    takes_bundles: bool = True  # False while it drains


def find_report_fault(report: BrokerLoad) -> str:
    """Returns why the report cannot be true: a number that is negative, infinite or not a number, or a bundle twice.
    "" if it can be."""
    values = {"score": report.score, "load": report.load, "window_s": report.window_s}
    values |= {f"load of {each.path}": each.load for each in report.bundles}
    wrong = [f"its {name} is {each}" for name, each in values.items() if not (math.isfinite(each) and each >= 0)]
    if len({each.path for each in report.bundles}) != len(report.bundles):
        wrong.append("it names a bundle twice")
    return wrong[0] if wrong else ""


class Move(NamedTuple):
    """A bundle that should move; `path`: of its owner record; `source`, `target`: the names of the brokers; `points`:
    how much of the source's score is due to the bundle."""

    path: str
    source: str
    target: str
    points: float
    why: str = ""  # for the log


class _BundleAverage(NamedTuple):
    """The mean of the last loads of a bundle that its owner has reported, and how many it is of."""

    load: float
    reports: int


def _average(last: _BundleAverage | None, load: float) -> _BundleAverage:
    """Returns the average of a bundle after one more report of its load."""
    if last is None or load > BUNDLE_GROWN_RATIO * last.load:
        return _BundleAverage(load, 1)
    reports = min(last.reports + 1, BUNDLE_REPORTS)
    return _BundleAverage(last.load + (load - last.load) / reports, reports)


class _Averages:
    """The averages of a broker's score, and of the loads of its bundles."""

    def __init__(self, report: BrokerLoad, now_s: float) -> None:
        self.report = report
        self.at_s = self.heard_s = now_s
        self.changed_s = -math.inf  # when a move of its bundles ended
        self.reports = 0
        self.weight = 0.0  # so many reports the slow average counts as
        self.fast = self.slow = 0.0
        self.load = report.load  # as expected after the moves that have begun
        self._bundles: dict[str, _BundleAverage] = {}
        self.differing = 0  # reports in a row after which the fast average was far above the slow one; < 0: below

    def add(self, report: BrokerLoad, now_s: float) -> None:
        if now_s - self.heard_s > SILENT_BROKER_FORGOTTEN_S:
            self.reports = self.differing = 0
            self.weight = 0.0
            self._bundles = {}
        self._bundles = {each.path: _average(self._bundles.get(each.path), each.load) for each in report.bundles}
        averaged = [each._replace(load=self._bundles[each.path].load) for each in report.bundles]
        self.report, self.heard_s = report._replace(bundles=averaged), now_s
        if now_s - report.window_s < self.changed_s:
            return  # measured before a move ended, at least in part
        self.load = report.load
        # one report tells no more, however long none came
        passed_s = min(max(0.0, now_s - self.at_s), 2 * BALANCE_CHECK_INTERVAL_S)
        self.at_s, self.reports = now_s, self.reports + 1
        least = 1 - 0.5 ** (passed_s / SLOW_HALF_LIFE_S)  # 0: at the same time as the last one
        self.weight = min(self.weight + 1, 1 / least) if least else self.weight + 1
        self.slow += (report.score - self.slow) / self.weight
        quick = max(1 / self.weight, 1 - 0.5 ** (passed_s / FAST_HALF_LIFE_S))  # never slower than the slow one
        self.fast += quick * (report.score - self.fast)
        self._notice_change()

    def _notice_change(self) -> None:
        apart = self.fast - self.slow
        if abs(apart) < max(IDLE_POINTS, LOAD_CHANGED_SHARE * self.slow):
            self.differing = 0
            return
        self.differing = max(self.differing, 0) + 1 if apart > 0 else min(self.differing, 0) - 1
        if abs(self.differing) >= LOAD_CHANGED_CHECKS:
            self.slow, self.differing = self.fast, 0
            self.weight = min(self.weight, FAST_WEIGHT)

    def shift(self, points: float, load: float, wrong: float) -> None:
        """Adds `points` to both averages and `load` to the load: what is expected of a move. `wrong`: the share of
        the points by which that may be wrong."""
        self.doubt(wrong * abs(points) / max(self.slow, self.slow + points, IDLE_POINTS))
        self.fast, self.slow = max(0.0, self.fast + points), max(0.0, self.slow + points)
        self.load = max(0.0, self.load + load)

    def doubt(self, share: float) -> None:
        """Lets the slow average count as fewer reports, because the true one may have changed by this share of it."""
        if self.weight:
            self.weight = 1 / (1 / self.weight + (share / REPORT_NOISE_SHARE) ** 2)

    @property
    def error(self) -> float:
        """Returns by which share of it the slow average may be wrong, beyond what it always may be."""
        return self._error_beyond(SLOW_WEIGHT_MAX)

    def _error_beyond(self, weight: float) -> float:
        """Returns by which share of it the slow average may be wrong, beyond what one of that weight may be."""
        return max(0.0, 2 * REPORT_NOISE_SHARE * (1 / math.sqrt(max(self.weight, 1e-6)) - 1 / math.sqrt(weight)))

    @property
    def most(self) -> float:
        """Returns the most that the slow average probably is, as long as it is not settled. A broker counts as that
        busy as a target: of many brokers with a few reports each, those are the least busy that were so by chance."""
        return self.slow * (1 + self._error_beyond(SETTLED_WEIGHT_MIN))

    @property
    def is_settled(self) -> bool:
        return self.weight >= SETTLED_WEIGHT_MIN


def _carries_too_much(broker: _Averages, carried: float, points: float) -> bool:
    """Returns True if the broker says that it carries CARRIED_LOAD_RATIO_MAX times as much a point as the others of
    its group do together. `carried`, `points`: the load and the score of all."""
    others_load, others_points = carried - broker.load, points - broker.slow
    most = CARRIED_LOAD_RATIO_MAX * max(broker.slow, IDLE_POINTS)
    return others_points > 0 and broker.load * others_points > most * others_load


def _is_cold(broker: _Averages, mean: float) -> bool:
    return broker.slow < mean * (1 - COLD_BROKER_SHARE - broker.error)


class _Candidate(NamedTuple):
    """A bundle that may move: the points that the source loses, and those that the target gains."""

    points: float
    gained: float
    bundle: MovableBundle


class _Limits(NamedTuple):
    """What may move from a source to a target. Points."""

    left: float  # by which the source may fall
    room: float  # by which the target may rise
    turns: int  # bundles
    small: float  # a bundle with less
    wanted: float  # small bundles move until the source has fallen by it


def _choose_together(candidates: Sequence[_Candidate], limits: _Limits) -> list[_Candidate]:
    """Returns what moves of the candidates, the heaviest first, within the limits and without crumbs."""
    chosen, left, room = list[_Candidate](), limits.left, limits.room
    for each in candidates:
        is_crumb = bool(chosen) and each.points < MOVED_BUNDLE_SHARE_MIN * chosen[0].points
        is_needless = each.points < limits.small and limits.left - left >= limits.wanted
        if len(chosen) >= limits.turns or is_crumb or is_needless:
            break
        if each.points <= left and each.gained <= room:
            chosen.append(each)
            left, room = left - each.points, room - each.gained
    return chosen


def _closes(high: float, low: float, moved: Sequence[_Candidate]) -> float:
    """Returns by how much the busier one of a pair is less busy after the moves; `high`, `low`: the scores before."""
    return high - max(high - sum(each.points for each in moved), low + sum(each.gained for each in moved))


def _choose_moves(
    candidates: Sequence[_Candidate], high: float, low: float, mean: float, limits: _Limits, *, settled: bool
) -> list[_Candidate] | None:
    """Returns what moves from a source whose score is `high` to a target whose score is `low`: what fits, or the one
    bundle that closes most of the gap; None if that must wait until both are `settled`."""
    fitting = _choose_together(candidates, limits)
    single = max(candidates, key=lambda each: _closes(high, low, [each]))
    if fitting and fitting[0].points >= MOVED_BUNDLE_SHARE_MIN * single.points:
        return fitting
    if not settled:
        return None
    if fitting and low + single.gained > mean * (1 + TOLERATED_HOT_SHARE):
        return fitting
    return [single] if _closes(high, low, [single]) >= GAP_CLOSED_SHARE_MIN * (high - low) else fitting


class _Begun(NamedTuple):
    """A move that has begun. A broker that is forgotten and comes back meanwhile has other averages. `wrong`: see
    `_Averages.shift`."""

    move: Move
    source: _Averages
    target: _Averages
    gained: float  # points at the target
    load: float
    wrong: float


class _Rest(NamedTuple):
    until_s: float
    moves: int


class Balancer:
    """Plans the moves of bundles between brokers. Only the leader of the brokers has one."""

    def __init__(self) -> None:
        self._brokers: dict[str, _Averages] = {}
        self._moving: dict[str, _Begun] = {}  # by path
        self._on_its_way: Counter[str] = Counter()  # bundles by broker, as source or target
        self._rests: dict[tuple[str, str], _Rest] = {}  # by path, and the source of a move that failed
        self._gone: dict[str, float] = {}  # load of forgotten brokers since the last plan, by group

    def add_report(self, report: BrokerLoad, now_s: float) -> None:
        """Takes the report of a broker, that it has just measured. One that cannot be true (`find_report_fault`) counts
        as none. A score above 100 counts as 100, and
        a load as at least that of the bundles. `now_s`: monotonic seconds, as in the other methods."""
        if find_report_fault(report):
            return
        load = max(report.load, sum(each.load for each in report.bundles))
        report = report._replace(score=min(report.score, 100.0), load=load)
        found = self._brokers.get(report.name)
        if found is None:
            found = self._brokers[report.name] = _Averages(report, now_s)
        found.add(report, now_s)

    def forget_broker(self, name: str) -> None:
        """Forgets a broker that is not registered any more."""
        gone = self._brokers.pop(name, None)
        if gone is not None:
            self._gone[gone.report.group] = self._gone.get(gone.report.group, 0.0) + gone.report.load

    def end_move(self, path: str, moved: bool, now_s: float) -> None:
        """Takes the outcome of a move that `plan_moves` has returned, of the bundle with the owner record at `path`. A
        bundle whose move failed rests, too, but not at another broker, which may be its owner. `moved`: False if the
        move failed."""
        begun = self._moving.pop(path)
        self._rest((path, "" if moved else begun.move.source), now_s)
        for broker, name, points, load in (
            (begun.source, begun.move.source, begun.move.points, begun.load),
            (begun.target, begun.move.target, -begun.gained, -begun.load),
        ):
            self._on_its_way[name] -= 1
            broker.changed_s = now_s
            if not moved:
                broker.shift(points, load, begun.wrong)
        self._on_its_way = +self._on_its_way

    def list_scores(self) -> list[tuple[str, float, int]]:
        """Returns of each broker (name, slow average of its score, bundles on their way from or to it), by name."""
        return [(name, each.slow, self._on_its_way[name]) for name, each in sorted(self._brokers.items())]

    def list_moves(self) -> list[Move]:
        """Returns the moves that have begun and have not ended."""
        return [each.move for each in self._moving.values()]

    def plan_moves(self, now_s: float) -> list[Move]:
        """Returns the moves to begin now, and counts them as begun. [] if nothing is to be done."""
        self._forget_rests(now_s)
        groups: dict[str, list[_Averages]] = {}
        for each in self._brokers.values():
            silent = now_s - each.heard_s >= SILENT_CHECKS_MAX * BALANCE_CHECK_INTERVAL_S
            if not silent and each.report.takes_bundles:
                groups.setdefault(each.report.group, []).append(each)
        moves = [move for group in groups.values() for move in self._plan_evictions(group)]
        for group in groups.values():
            believed = [each for each in group if each.reports >= BELIEVED_REPORTS_MIN]
            moves += self._plan_group(believed, now_s, None)
            for pool in sorted({each.allowed for broker in believed for each in broker.report.bundles
                                if each.allowed is not None}, key=sorted):  # fmt: skip
                moves += self._plan_group([each for each in believed if each.report.name in pool], now_s, pool)
        return moves

    def _plan_evictions(self, brokers: Sequence[_Averages]) -> list[Move]:
        """Plans the moves of misplaced bundles, whatever they cost. A broker whose report may be from before the end of
        a move waits for its next one."""
        moves = list[Move]()
        for source in sorted(brokers, key=lambda each: each.report.name):
            misplaced = [each for each in source.report.bundles if each.misplaced and each.path not in self._moving]
            for bundle in misplaced if source.heard_s >= source.changed_s else []:
                targets = [each for each in brokers if each is not source and self._has_turn(each)
                           and (bundle.allowed is None or each.report.name in bundle.allowed)]  # fmt: skip
                if targets and self._has_turn(source):
                    moves.append(self._evict(source, bundle, targets))
        return moves

    def _has_turn(self, broker: _Averages) -> bool:
        return self._on_its_way[broker.report.name] < MOVES_PER_BROKER_MAX

    def _evict(self, source: _Averages, bundle: MovableBundle, targets: Sequence[_Averages]) -> Move:
        """Begins the move of a misplaced bundle to the target with the fewest bundles on their way, then the least
        busy one: what is light says nothing of how busy a broker gets."""
        target = min(targets, key=lambda each: (self._on_its_way[each.report.name], each.slow, each.report.name))
        points, gained = self._points_at(source, bundle.load), self._points_of(source, target, bundle.load)
        why = f"its namespace does not let {source.report.name} own it"
        move = Move(bundle.path, source.report.name, target.report.name, points, why)
        return self._begin(move, gained, bundle.load)

    def _plan_group(self, brokers: Sequence[_Averages], now_s: float, pool: frozenset[str] | None) -> list[Move]:
        """Plans moves between these brokers. `pool`: only bundles move that exactly these brokers may get; None:
        any."""
        if not brokers:
            return []
        order = sorted(brokers, key=lambda each: (each.most, each.report.name))
        points = sum(each.slow for each in order)
        mean = points / len(order)
        sources = sorted(order, key=lambda each: (-each.slow, each.report.name))
        carried = sum(each.load for each in order)
        self._doubt_after_deaths(order, carried)
        targets = [each for each in order if each.most < mean and not _carries_too_much(each, carried, points)]
        moves, given = list[Move](), set[str]()
        for source in sources:
            if not targets or source.slow < max(IDLE_POINTS, mean):
                break
            hot = source.slow > mean * (1 + HOT_BROKER_SHARE + source.error)
            if source.report.name in given or not (hot or _is_cold(targets[0], mean)):
                continue
            for at, target in enumerate(targets[:TRIED_TARGETS_MAX]):
                found = self._plan_pair(source, target, mean, now_s, pool)
                if found is None:
                    break  # until more is known of this pair
                if found:
                    moves += found
                    given.add(target.report.name)
                    del targets[at]
                    break
        return moves

    def _doubt_after_deaths(self, brokers: Sequence[_Averages], carried: float) -> None:
        """Lets the averages count less, if brokers are gone: the others have got what these had."""
        gone = self._gone.pop(brokers[0].report.group, 0.0)
        for each in brokers if gone else ():
            each.doubt(gone / (carried + gone))

    def _plan_pair(
        self, source: _Averages, target: _Averages, mean: float, now_s: float, pool: frozenset[str] | None
    ) -> list[Move] | None:
        """Returns the moves from the source to the target; None if they must wait until more is known of the two."""
        high, gap = source.slow, source.slow - target.most
        if source is target or gap < IDLE_POINTS / 2 or high <= mean:
            return []
        turns = MOVES_PER_BROKER_MAX - max(self._on_its_way[each.report.name] for each in (source, target))
        candidates = [
            _Candidate(self._points_at(source, each.load), self._points_of(source, target, each.load), each)
            for each in source.report.bundles
            if pool in (None, each.allowed) and self._may_move(each, source, target, now_s)
        ]  # fmt: skip
        wanted = math.inf if _is_cold(target, mean) else high - mean * (1 + TOLERATED_HOT_SHARE + source.error)
        small = MOVED_POINTS_SHARE_MIN * mean
        least = 0.0 if wanted > 0 else small
        candidates = [
            each for each in candidates
            if each.points >= least and not costs_more_than_it_brings(each.bundle, each.points)
        ]  # fmt: skip
        candidates.sort(key=lambda each: (-each.points, each.bundle.path))
        if not candidates or turns <= 0:
            return []
        settled = source.is_settled and target.is_settled
        limits = _Limits(high - mean, mean - target.most, turns, small, wanted)
        chosen = _choose_moves(candidates, high, target.most, mean, limits, settled=settled)
        if chosen is None:
            return None
        ends = source.report.name, target.report.name
        why = f"{ends[0]} is {high:.0f} % busy, {ends[1]} {target.slow:.0f} %, all {mean:.0f} % in the mean"
        return [
            self._begin(Move(each.bundle.path, *ends, each.points, why), each.gained, each.bundle.load)
            for each in chosen
        ]

    def _may_move(self, bundle: MovableBundle, source: _Averages, target: _Averages, now_s: float) -> bool:
        rests = (self._rests.get((bundle.path, of)) for of in ("", source.report.name))
        return (
            bundle.path not in self._moving and bundle.load > 0 and bundle.owned_s >= BUNDLE_OWNED_S_MIN
            and all(each is None or now_s >= each.until_s for each in rests)
            and (bundle.allowed is None or target.report.name in bundle.allowed)
        )  # fmt: skip

    @staticmethod
    def _points_at(broker: _Averages, load: float) -> float:
        """Returns the part of the broker's score that is due to a bundle with this load."""
        return broker.slow * min(1.0, load / broker.load) if broker.load > 0 else 0.0

    def _points_of(self, source: _Averages, target: _Averages, load: float) -> float:
        """Returns by how much a bundle of the source will raise the target's score. A target that does too little to
        tell counts as being as fast as the source: most of its score may be what a broker needs without any load."""
        if target.load > load and target.slow >= max(IDLE_POINTS, COMPARABLE_SCORE_SHARE_MIN * source.slow):
            return target.slow * load / target.load
        return self._points_at(source, load)

    def _begin(self, move: Move, gained: float, load: float) -> Move:
        source, target = self._brokers[move.source], self._brokers[move.target]
        wrong = 1.0 if source.slow >= FULL_POINTS else MOVE_ERROR_SHARE
        self._moving[move.path] = _Begun(move, source, target, gained, load, wrong)
        self._on_its_way.update((move.source, move.target))
        source.shift(-move.points, -load, wrong)
        target.shift(gained, load, wrong)
        return move

    def _rest(self, bundle: tuple[str, str], now_s: float) -> None:
        moves = self._rests[bundle].moves + 1 if bundle in self._rests else 0
        self._rests.pop(bundle, None)
        self._rests[bundle] = _Rest(now_s + MOVED_BUNDLE_REST_S * 2 ** min(moves, REST_DOUBLED_MAX), moves)

    def _forget_rests(self, now_s: float) -> None:
        while self._rests:
            oldest = next(iter(self._rests))
            if now_s - self._rests[oldest].until_s < MOVES_FORGOTTEN_S:
                return
            del self._rests[oldest]


def costs_more_than_it_brings(bundle: MovableBundle, points: float) -> bool:
    """Returns True if moving the bundle costs more processor time than its source saves while the bundle must rest.
    `points`: how much of the source's score is due to the bundle."""
    return points / 100 * MOVED_BUNDLE_REST_S < bundle.sessions * SESSION_COST_S + bundle.topics * TOPIC_COST_S


class BalancingState:
    """What a broker knows of the balance. `busy`: the share of a core that its process used in the last measurement, in
    points; `busy_since_s`: when that began; `leads`: whether it is the leader; `balancer`: None unless this broker is
    the leader and the balance is on; `moves`, `failed` and `splits` count the moves and the splits of namespaces that
    it has let begin as the leader; `crowded`: the bundles that were crowded at its last check."""

    __slots__ = ("balancer", "busy", "busy_since_s", "crowded", "failed", "leads", "moves", "splits")

    def __init__(self, now_s: float) -> None:
        self.busy = 0.0
        self.busy_since_s = now_s
        self.leads = False
        self.balancer: Balancer | None = None
        self.moves = self.failed = self.splits = 0
        self.crowded: Sequence[CrowdedBundle] = ()

    def statistics(self) -> dict[str, int]:
        """Returns, by the metric's name: `leader`, 1 if this broker is the leader, else 0; `moves` and `moves_failed`,
        the moves that it let begin as the leader, and those of them that failed."""
        return {"leader": int(self.leads), "moves": self.moves, "moves_failed": self.failed}
