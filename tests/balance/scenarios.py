"""What happens to a simulated cluster, by name, and the figures that each scenario gives.

    SCENARIOS["noise"](seed, brokers, bundles, Balancer())  → {"moves_a_bundle_and_day": 0.03, …}

`max_to_mean` is the score of the busiest broker as a multiple of the mean, at the end if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from magnetar.broker.cluster.balance_core import BALANCE_CHECK_INTERVAL_S, Balancer

from .simulation import DAY_S, BalanceSimulation, FirstAsked, MovesBundles, ThresholdShedder

Figures = Mapping[str, float]
NOISE = 0.2
SETTLED_S = 1_800.0
"""Virtual seconds after which a cluster that began unequal is as equal as it gets."""


def run_start(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Bundles are where they were asked for first: ten minutes later?"""
    cluster = BalanceSimulation(seed, brokers=brokers, bundles=bundles, rule=rule, noise=NOISE)
    before = cluster.max_to_mean()
    seconds = _run_until_balanced(cluster, 600.0)
    cluster.run(600.0 - cluster.now_s)
    return {"before": before, "max_to_mean": cluster.max_to_mean(), "seconds_to_1.25": seconds} | _moves(cluster)


def run_noise(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Six hours of nothing but noise, in a cluster that was balanced."""
    return _run_day(BalanceSimulation(seed, brokers=brokers, bundles=bundles, rule=rule, noise=NOISE))


def run_wave(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Six hours of a daily wave of ±50 %, of which each namespace has its phase."""
    return _run_day(BalanceSimulation(seed, brokers=brokers, bundles=bundles, rule=rule, noise=NOISE, wave=0.5))


def run_bursts(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Each minute one bundle of a thousand has up to ten times its load, for ten minutes: six hours."""
    cluster = BalanceSimulation(seed, brokers=brokers, bundles=bundles, rule=rule, noise=NOISE)
    running = list[tuple[float, int]]()
    bursts = 0

    def burst() -> None:
        nonlocal bursts
        while running and running[0][0] <= cluster.now_s:
            bundle = cluster.bundles[running.pop(0)[1]]
            cluster.burst(bundle, 1.0)
        for _ in range(max(1, bundles // 1_000)):
            bundle = cluster.rng.choice(cluster.bundles)
            if bundle.burst == 1.0:
                cluster.burst(bundle, 10.0)
                bursts += 1
                running.append((cluster.now_s + 600.0, bundle.number))

    found = _run_day(cluster, burst)
    moved = found["moves_a_bundle_and_day"] * bundles / 4
    return {**found, "moves_a_burst": moved / bursts}


def run_deaths(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """One broker of ten dies, all at once: ten minutes later?"""
    cluster = _settled(seed, brokers, bundles, rule)
    for name in list(cluster.brokers)[:: 10]:
        cluster.kill(name)
    cluster.run(600.0)
    return {"max_to_mean": cluster.max_to_mean()}


def run_joins(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """A tenth more brokers join, empty: how busy is the least busy of them 15 minutes later, as a share of the mean?"""
    cluster = _settled(seed, brokers, bundles, rule)
    added = [cluster.add_broker(f"new{at}") for at in range(max(1, brokers // 10))]
    cluster.run(900.0)
    mean = sum(map(cluster.utilisation, cluster.brokers.values())) / len(cluster.brokers)
    return {"least_to_mean": min(map(cluster.utilisation, added)) / mean, "max_to_mean": cluster.max_to_mean()}


def run_restart(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Each broker in turn drains, ends, and is back half a minute later."""
    cluster = _settled(seed, brokers, bundles, rule)
    for each in cluster.bundles:
        each.moved = 0
    for name, broker in list(cluster.brokers.items()):
        cluster.drain(name)
        cluster.run(BALANCE_CHECK_INTERVAL_S)
        cluster.kill(name)
        cluster.run(30.0)
        cluster.add_broker(name, broker.speed)
        cluster.run(60.0)
    cluster.run(900.0)
    moved = [each.moved for each in cluster.bundles]
    return {"moves_a_bundle": sum(moved) / bundles, "most_moves": max(moved), "max_to_mean": cluster.max_to_mean()}


def run_skew(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> Figures:
    """Every fourth of eight bundles a broker has ten times the load of another, and one broker has all of these: 15
    minutes later? Each broker needs two points for itself."""
    weights = [1.0 if at % 4 else 10.0 for at in range(8 * brokers)]
    cluster = BalanceSimulation(
        seed, brokers=brokers, bundles=len(weights), rule=rule, noise=0.05, weights=weights, own_points=2.0
    )
    first = cluster.brokers["b0"]
    for each in cluster.bundles[::4]:
        assert each.owner is not None
        each.owner.remove(each)
        first.add(each, cluster.now_s)
    before = cluster.max_to_mean()
    cluster.run(900.0)
    return {"before": before, "max_to_mean": cluster.max_to_mean()} | _moves(cluster)


SCENARIOS: Mapping[str, Callable[[int, int, int, MovesBundles], Figures]] = {
    "start": run_start, "noise": run_noise, "wave": run_wave, "bursts": run_bursts, "deaths": run_deaths,
    "joins": run_joins, "restart": run_restart, "skew": run_skew,
}  # fmt: skip
RULES: Mapping[str, Callable[[], MovesBundles]] = {
    "balancer": Balancer, "threshold-shedder": ThresholdShedder, "first-asked": FirstAsked,
}  # fmt: skip


def _settled(seed: int, brokers: int, bundles: int, rule: MovesBundles) -> BalanceSimulation:
    cluster = BalanceSimulation(seed, brokers=brokers, bundles=bundles, rule=rule, noise=NOISE)
    cluster.run(SETTLED_S)
    return cluster


def _run_until_balanced(cluster: BalanceSimulation, seconds: float) -> float:
    while cluster.now_s < seconds and cluster.max_to_mean() > 1.25:
        cluster.run(BALANCE_CHECK_INTERVAL_S)
    return cluster.now_s


def _run_day(cluster: BalanceSimulation, happens: Callable[[], None] = lambda: None) -> Figures:
    cluster.run(SETTLED_S)
    before, above, checks = cluster.moves, 0, 0
    while cluster.now_s < SETTLED_S + DAY_S / 4:
        happens()
        cluster.run(60.0)
        checks += 1
        above += cluster.max_to_mean() > 1.25
    moves = (cluster.moves - before) / len(cluster.bundles) / (DAY_S / 4) * DAY_S
    return {"moves_a_bundle_and_day": moves, "minutes_above_1.25": above / checks, "max_to_mean": cluster.max_to_mean()}


def _moves(cluster: BalanceSimulation) -> Figures:
    return {"moves": cluster.moves, "moves_a_bundle": cluster.moves / len(cluster.bundles)}
