"""A cluster of brokers and bundles on virtual time, to judge what moves bundles: the real core, or a rule to compare
with.

    cluster = BalanceSimulation(seed, brokers=1_000, bundles=100_000)
    cluster.run(600.0)
    cluster.max_to_mean(), cluster.moves

Loads follow Zipf's law (exponent 1.1; none above a quarter of what a broker has on average: such a bundle is split, not
moved). One broker of five does half as much as the others. Each namespace has its daily wave. Reports are up to one
check old and have noise. A move takes 0.2 s to 2 s, in which nobody has the bundle. Times in virtual seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from magnetar.broker.cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    REPORTED_BUNDLES_MAX,
    Balancer,
    BrokerLoad,
    MovableBundle,
    Move,
)
from magnetar.broker.cluster.bundles_core import BundlePlacement
from magnetar.metadata.records import BrokerRecord

ZIPF = 1.1
PHASES = 8
"""Namespaces have one of so many phases of the daily wave."""
REPORTED_S = 60.0
"""Seconds for which a broker reports the same heaviest bundles while nothing changes there."""
MEAN_POINTS = 45.0
"""The mean score at the start."""
DAY_S = 86_400.0


class MovesBundles(Protocol):
    """What is judged: `Balancer`, or a rule to compare with."""

    def add_report(self, report: BrokerLoad, now_s: float) -> None: ...
    def forget_broker(self, name: str) -> None: ...
    def end_move(self, path: str, moved: bool, now_s: float) -> None: ...
    def plan_moves(self, now_s: float) -> list[Move]: ...


class FirstAsked:
    """Moves nothing: a bundle stays at the broker that was asked for it first."""

    def add_report(self, report: BrokerLoad, now_s: float) -> None:
        pass

    def forget_broker(self, name: str) -> None:
        pass

    def end_move(self, path: str, moved: bool, now_s: float) -> None:
        pass

    def plan_moves(self, now_s: float) -> list[Move]:
        return []


class ThresholdShedder(FirstAsked):
    """Pulsar's rule: each minute, a broker that is 10 points above the mean gives what it has above it, each bundle to
    the broker with the least load then. Of a score, 0.9 is remembered."""

    MEMORY = 0.9
    POINTS = 10.0
    EVERY_S = 60.0

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.reports: dict[str, BrokerLoad] = {}
        self.next_s = self.EVERY_S

    def add_report(self, report: BrokerLoad, now_s: float) -> None:
        known = self.scores.get(report.name, report.score)
        self.scores[report.name] = self.MEMORY * known + (1 - self.MEMORY) * report.score
        self.reports[report.name] = report

    def forget_broker(self, name: str) -> None:
        self.scores.pop(name, None)
        self.reports.pop(name, None)

    def plan_moves(self, now_s: float) -> list[Move]:
        if now_s < self.next_s or not self.scores:
            return []
        self.next_s += self.EVERY_S
        mean, moves = sum(self.scores.values()) / len(self.scores), list[Move]()
        least = [(score, name) for name, score in self.scores.items() if self.reports[name].takes_bundles]
        heapq.heapify(least)
        for name, score in sorted(self.scores.items()):
            shed, report = score - mean, self.reports[name]
            if shed <= self.POINTS or report.load <= 0:
                continue
            for bundle in report.bundles:
                points = score * bundle.load / report.load
                if shed <= 0:
                    break
                if points <= 0 or not least or least[0][1] == name:
                    continue
                there, target = heapq.heappop(least)
                heapq.heappush(least, (there + points, target))
                moves.append(Move(bundle.path, name, target, points))
                shed -= points
        return moves


class SimulatedBundle:
    """A bundle: its load at the mean of the day, and who has it."""

    __slots__ = ("base", "burst", "moved", "number", "owned_s", "owner", "path", "phase")

    def __init__(self, number: int, base: float, phase: int) -> None:
        self.number, self.base, self.phase = number, base, phase
        self.path = f"/{number}"
        self.burst = 1.0
        self.owner: SimulatedBroker | None = None
        self.owned_s = -math.inf
        self.moved = 0

    @property
    def load(self) -> float:
        return self.base * self.burst


class SimulatedBroker:
    """A broker, that knows its load for each phase of the wave."""

    def __init__(self, name: str, speed: float) -> None:
        self.name, self.speed = name, speed
        self.bundles: dict[int, SimulatedBundle] = {}
        self.by_phase = [0.0] * PHASES
        self.draining = False
        self.told: tuple[float, float] | None = None  # score and load at the last check
        self.heaviest: list[SimulatedBundle] = []
        self.listed_s = -math.inf

    def add(self, bundle: SimulatedBundle, now_s: float) -> None:
        bundle.owner, bundle.owned_s = self, now_s
        self.bundles[bundle.number] = bundle
        self.by_phase[bundle.phase] += bundle.load
        self.listed_s = -math.inf

    def remove(self, bundle: SimulatedBundle) -> None:
        del self.bundles[bundle.number]
        self.by_phase[bundle.phase] -= bundle.load
        self.listed_s = -math.inf
        bundle.owner = None


class Ended(NamedTuple):
    """The end of a move."""

    at_s: float
    number: int
    target: str
    by_balancer: bool


class BalanceSimulation:
    """The cluster. `noise`: standard deviation of each reported number, as a share of it; `weights`: the shares of the
    load, in the order of the bundles, instead of Zipf's law over brokers of two speeds; `own_points`: what each broker
    needs without any load."""

    def __init__(
        self, seed: int, *, brokers: int, bundles: int, rule: MovesBundles | None = None, noise: float = 0.0,
        wave: float = 0.0, weights: Sequence[float] = (), own_points: float = 0.0,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.rule: MovesBundles = Balancer() if rule is None else rule
        self.noise, self.wave, self.own_points = noise, wave, own_points
        self.now_s = 0.0
        self.moves = 0  # by the rule
        self.drained = 0  # by drains and deaths
        self.brokers: dict[str, SimulatedBroker] = {}
        self.ends: list[Ended] = []
        self.bursts: list[tuple[float, int]] = []
        self.placement = BundlePlacement(self.rng)
        for at in range(brokers):
            self.add_broker(f"b{at}", 1.0 if at % 5 or weights else 0.5)
        if not weights:
            weights = self._zipf(bundles)
        unit = MEAN_POINTS / 100 * sum(each.speed for each in self.brokers.values()) / sum(weights)
        self.heaviest = 2 * max(weights) * unit
        self.bundles = [SimulatedBundle(at, each * unit, self.rng.randrange(PHASES)) for at, each in enumerate(weights)]
        names = list(self.brokers.values())
        for each in self.bundles:
            self.rng.choice(names).add(each, self.now_s)

    def _zipf(self, bundles: int) -> list[float]:
        weights = [(at + 1) ** -ZIPF for at in range(bundles)]
        for _ in range(20):  # a cap lowers the mean, which lowers the cap
            most = 0.25 * sum(weights) / len(self.brokers)
            weights = [min(each, most) for each in weights]
        self.rng.shuffle(weights)
        return weights

    # ---------------------------------------------------------------------------------------------- what happens

    def add_broker(self, name: str, speed: float = 1.0) -> SimulatedBroker:
        self.brokers[name] = SimulatedBroker(name, speed)
        return self.brokers[name]

    def burst(self, bundle: SimulatedBundle, factor: float) -> None:
        """Multiplies what a bundle has to do, but not to more than half of what a broker has on average; 1: as usual
        again."""
        factor = max(1.0, min(factor, self.heaviest / bundle.base))
        owner = bundle.owner
        if owner is not None:
            owner.by_phase[bundle.phase] += bundle.base * (factor - bundle.burst)
            owner.listed_s = -math.inf
        bundle.burst = factor

    def kill(self, name: str) -> None:
        """A broker ends; who is asked for its bundles places them."""
        broker = self.brokers.pop(name)
        self.rule.forget_broker(name)
        self._place(list(broker.bundles.values()), broker)

    def drain(self, name: str) -> None:
        """A broker gives its bundles to the others."""
        broker = self.brokers[name]
        broker.draining = True
        self._place(list(broker.bundles.values()), broker)

    def _place(self, bundles: Sequence[SimulatedBundle], source: SimulatedBroker) -> None:
        reports = [each for each in self._describe_brokers() if each.name != source.name]
        for each in bundles:
            chosen = self.placement.choose_broker(each.path, self.select_allowed(each, reports), self.now_s)
            source.remove(each)
            each.moved += 1
            self.drained += 1
            if chosen is not None:
                self._begin(each, chosen.name, by_balancer=False)

    def _describe_brokers(self) -> list[BrokerRecord]:
        return [
            BrokerRecord(
                name=each.name, endpoint="h:1", busy_percent=round(100 * self.utilisation(each)),
                draining=each.draining, bundles=len(each.bundles), report=int(self.now_s / BALANCE_CHECK_INTERVAL_S),
            )
            for each in self.brokers.values() if not each.draining
        ]  # fmt: skip

    def select_allowed(self, bundle: SimulatedBundle, brokers: Sequence[BrokerRecord]) -> Sequence[BrokerRecord]:
        """Returns the brokers that may get the bundle."""
        return brokers

    def _begin(self, bundle: SimulatedBundle, target: str, *, by_balancer: bool) -> None:
        heapq.heappush(self.ends, Ended(self.now_s + self.rng.uniform(0.2, 2.0), bundle.number, target, by_balancer))

    # ------------------------------------------------------------------------------------------------- the clock

    def run(self, seconds: float) -> None:
        """Lets virtual time pass, in steps of a check."""
        for _ in range(round(seconds / BALANCE_CHECK_INTERVAL_S)):
            self.now_s += BALANCE_CHECK_INTERVAL_S
            self._end_moves()
            for each in self.brokers.values():
                self.rule.add_report(self._report(each), self.now_s)
            for move in self.rule.plan_moves(self.now_s):
                bundle = self.bundles[int(move.path[1:])]
                if bundle.owner is None or bundle.owner.name != move.source or move.target not in self.brokers:
                    self.rule.end_move(move.path, False, self.now_s)
                    continue
                bundle.owner.remove(bundle)
                bundle.moved += 1
                self.moves += 1
                self._begin(bundle, move.target, by_balancer=True)

    def _end_moves(self) -> None:
        while self.ends and self.ends[0].at_s <= self.now_s:
            end = heapq.heappop(self.ends)
            bundle, target = self.bundles[end.number], self.brokers.get(end.target)
            moved = target is not None
            if target is None:
                names = [each.name for each in self.select_allowed(bundle, self._describe_brokers())]
                target = self.brokers[self.rng.choice(names)]
            target.add(bundle, end.at_s)
            if end.by_balancer:
                self.rule.end_move(bundle.path, moved, self.now_s)

    def _wave(self, phase: int) -> float:
        return 1 + self.wave * math.sin(2 * math.pi * (self.now_s / DAY_S + phase / PHASES))

    def utilisation(self, broker: SimulatedBroker) -> float:
        """Returns what the broker has to do, as a share of what it can do; above 1 is possible."""
        return self._load(broker) / broker.speed

    def _load(self, broker: SimulatedBroker) -> float:
        return max(0.0, sum(load * self._wave(phase) for phase, load in enumerate(broker.by_phase)))

    def _report(self, broker: SimulatedBroker) -> BrokerLoad:
        noise = lambda: max(0.0, 1 + self.rng.gauss(0, self.noise)) if self.noise else 1.0
        current = min(100.0, (self.own_points + 100 * self.utilisation(broker)) * noise()), self._load(broker)
        late = broker.told is not None and self.rng.random() < 0.5
        (score, load), broker.told = broker.told if late and broker.told else current, current
        if self.now_s - broker.listed_s >= REPORTED_S:
            broker.heaviest = heapq.nlargest(REPORTED_BUNDLES_MAX, broker.bundles.values(), key=lambda each: each.load)
            broker.listed_s = self.now_s
        movable = [
            MovableBundle(
                each.path, each.load * self._wave(each.phase) * noise(), owned_s=self.now_s - each.owned_s
            )
            for each in broker.heaviest
        ]
        return BrokerLoad(
            broker.name,
            score,
            load,
            movable,
            window_s=BALANCE_CHECK_INTERVAL_S * (2 if late else 1),
            takes_bundles=not broker.draining,
        )

    # ------------------------------------------------------------------------------------------------ the judge

    def max_to_mean(self) -> float:
        """Returns the score of the busiest broker as a multiple of the mean."""
        mean = sum(map(self._load, self.brokers.values())) / sum(each.speed for each in self.brokers.values())
        return max(map(self.utilisation, self.brokers.values())) / mean if mean else 1.0
