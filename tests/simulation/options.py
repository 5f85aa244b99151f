"""What one seed does: which faults, how often, what load. All of it is drawn here and printed when the seed fails.

Swarm testing: each seed has a random subset of the kinds of faults, at random rates; one in ten has none at all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

QUORUMS = ((3, 3, 2), (3, 3, 2), (2, 2, 2), (3, 2, 2), (2, 2, 1))
"""E, Qw, Qa on three bookies. With E = 3 a topic waits while a bookie is down; with E = 2 it goes on without it."""


KINDS = {
    0: "take-over",  # two brokers; the owner of the topic is killed
    1: "bookies",  # one broker; bookies are killed
    2: "bookies",
    3: "ledgers",  # no broker: writers and rivals that recover their ledgers
}
"""By seed % 4."""


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    kind: str  # KINDS
    quorum: tuple[int, int, int]
    # load
    producers: int
    messages: int  # of each producer
    batching: bool
    message_bytes_max: int
    pause_s: float  # mean, between two messages of a producer
    subscriptions: int  # the first is exclusive, the second shared
    nack_rate: float
    # faults; the durations are virtual seconds
    seconds: float  # of the phase with faults
    bookie_kills: int
    power_loss_rate: float  # of the kills: the plug instead
    blackouts: int  # every bookie and broker loses power at the same moment
    down_s: float  # mean until a killed process is started again
    broker_kills: int
    client_cuts: int  # connections cut on purpose
    partitions: int  # between two nodes, healed after a while
    crash_at_operation: bool  # bookies die at a random disk operation instead of a random time
    crash_in_start: bool  # … and now and then a bookie that has just been started, inside its replay
    sync_errors: int  # a failed fdatasync (no later one writes those bytes): the bookie must end itself
    drop_rate: float
    slow_rate: float
    cut_rate: float
    stall_rate: float
    latency_s: float
    # sizes that make things happen often
    journal_segment_bytes: int
    memtable_bytes: int
    ledger_entries_max: int
    cache_bytes: int

    @property
    def faultless(self) -> bool:
        counts = self.bookie_kills + self.broker_kills + self.blackouts + self.sync_errors
        counts += self.client_cuts + self.partitions
        return not (counts or self.drop_rate or self.slow_rate or self.cut_rate or self.stall_rate)

    def describe(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def draw(seed: int) -> Options:
    """The options of a seed: a function of the number alone."""
    rng = random.Random(f"options {seed}")
    kind = KINDS[seed % 4]
    calm = rng.random() < 0.1

    def sometimes(value: float, chance: float = 0.5) -> float:
        drawn, on = rng.random() * value, rng.random() < chance
        return round(drawn, 6) if on and not calm else 0.0

    def times(most: int, chance: float = 0.5) -> int:
        drawn, on = rng.randint(1, most), rng.random() < chance
        return drawn if on and not calm else 0

    seconds = rng.choice((5.0, 20.0, 40.0))
    messages = rng.choice((30, 100, 300, 600))
    return Options(
        seed=seed,
        kind=kind,
        quorum=rng.choice(QUORUMS),
        producers=rng.randint(1, 3),
        messages=messages,
        batching=rng.random() < 0.7,
        message_bytes_max=rng.choice((20, 200, 3000)),
        pause_s=round(rng.uniform(0.8, 1.6) * seconds / messages, 6),
        subscriptions=rng.randint(1, 2),
        nack_rate=rng.choice((0.0, 0.0, 0.05)),
        seconds=seconds,
        bookie_kills=times(4, 0.8),
        power_loss_rate=rng.choice((0.0, 0.3, 1.0)),
        blackouts=times(2, 0.3),
        down_s=rng.choice((0.2, 2.0, 10.0)),
        broker_kills=times(2, 0.8) if kind == "take-over" else times(1, 0.2),
        client_cuts=times(5, 0.4),
        partitions=times(3, 0.3),
        crash_at_operation=rng.random() < 0.4,
        crash_in_start=rng.random() < 0.3 and not calm,
        sync_errors=times(3, 0.3),
        drop_rate=sometimes(0.02),
        slow_rate=sometimes(0.05),
        cut_rate=sometimes(0.002, 0.3),
        stall_rate=sometimes(0.01, 0.3),
        latency_s=rng.choice((0.0001, 0.0005, 0.003)),
        journal_segment_bytes=rng.choice((128 << 10, 1 << 20)),
        memtable_bytes=rng.choice((32 << 10, 512 << 10)),
        ledger_entries_max=rng.choice((10, 50, 1000)),
        cache_bytes=rng.choice((0, 20_000, 1 << 20)),
    )
