"""What one seed does: which faults, how often, what load. All of it is drawn here and printed when the seed fails.

Swarm testing: each seed has a random subset of the kinds of faults (faults.py), at random rates; one in ten has none.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from tests.simulation.strikes.faults import LOSSES, PENDING, RATES, TIMES, USUAL

QUORUMS = ((3, 3, 2), (3, 3, 2), (2, 2, 2), (3, 2, 2), (2, 2, 1))
"""E, Qw, Qa."""

LOADS = {
    0: "take-over",  # two brokers and a topic
    1: "bookies",  # one broker and a topic
    2: "bookies",
    3: "ledgers",  # no broker: writers and rivals that recover their ledgers
}
"""By seed % 4."""

SECURED_RATE = 0.25
"""Of the seeds."""
INSIDE_RATE = 0.3
"""Of the seeds with topics that are not secured: each broker shares a process with a bookie (inside.py)."""
FILTERED_RATE = 0.3
"""Of the seeds with topics that are not secured and run no transactions: a third subscription has a filter, and sealed
ledgers get key indexes (load/topics.py)."""
SCHEDULED_RATE = 0.2
"""Of the same seeds: a schedule publishes to a topic of its own (load/schedules.py)."""
TRANSACTIONS_RATE = 0.15
"""Of the seeds with topics that are not secured: their clients run transactions (load/transactions.py)."""


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    kind: str  # LOADS
    quorum: tuple[int, int, int]
    bookies: int
    racks: int
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
    down_s: float  # mean of what is down, cut off or slow
    latency_s: float
    loser: int  # the bookie that may lose what it stored; -1: none
    rates: Mapping[str, float]
    times: Mapping[str, int]
    # sizes that make things happen often
    journal_segment_bytes: int
    memtable_bytes: int
    ledger_entries_max: int
    cache_bytes: int
    deduplication: bool
    patience_s: float  # of a ledger's writer, until a change or an end that the metadata does not answer is unknown
    tight: bool  # bounds of what waits are so small that bookies are BUSY and writers have no room
    direct: bool  # disks take direct I/O, as those of production: two blocks of a journal are written at once
    delayed_rate: float  # of the messages; they may not come before their time on the shared subscription
    pulsar: float  # of the producers and consumers, so many speak Pulsar's binary protocol
    secured: bool  # tokens, grants, and keys among the processes (security.py)
    transactions: bool  # what clients do is done in transactions (load/transactions.py)
    inside: bool  # each broker shares a process with a bookie, which it asks without a socket (inside.py)
    filtered: bool  # one more subscription, with a filter (load/topics.py)
    scheduled: bool  # a schedule fires each second (load/schedules.py)

    @property
    def brokers(self) -> int:
        return {"take-over": 2, "bookies": 1, "ledgers": 0}[self.kind]

    @property
    def faultless(self) -> bool:
        return not self.rates and not self.times

    def describe(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["rates"], shown["times"] = dict(self.rates), dict(self.times)
        return " ".join(f"{name}={value}" for name, value in shown.items())


def draw(
    seed: int, *, secured: bool | None = None, transactions: bool | None = None, inside: bool | None = None,
    filtered: bool = False,
) -> Options:  # fmt: skip
    """The options of a seed: a function of the number alone. `secured`, `transactions`, `inside`: whatever the number
    says. `filtered`: it is filtered and scheduled."""
    rng = random.Random(f"options {seed}")
    kind = LOADS[seed % 4]
    if filtered:
        transactions = secured = False
    if transactions or inside or filtered:
        kind, secured = "take-over" if kind == "ledgers" else kind, False
    quorum = rng.choice(QUORUMS)
    bookies = rng.choice((3, 3, 4, 5))
    calm = rng.random() < 0.1
    seconds = rng.choice((3.0, 8.0, 16.0))
    messages = rng.choice((10, 25, 60, 150))
    loser = rng.randrange(bookies) if quorum[2] > 1 else -1
    if secured is None:
        secured = random.Random(f"options {seed} secured").random() < SECURED_RATE
    if transactions is None:
        drawn = random.Random(f"options {seed} transactions").random() < TRANSACTIONS_RATE
        transactions = drawn and not secured and kind != "ledgers"
    if inside is None:
        drawn = random.Random(f"options {seed} inside").random() < INSIDE_RATE
        inside = drawn and not secured and kind != "ledgers"
    plain = kind != "ledgers" and not secured and not transactions
    rates, times = _faults(seed, kind, loser, secured=secured, inside=inside)
    return Options(
        seed=seed,
        kind=kind,
        quorum=quorum,
        bookies=bookies,
        racks=rng.randint(1, 3),
        producers=rng.choice((1, 1, 2)),
        messages=messages,
        batching=rng.random() < 0.7,
        message_bytes_max=rng.choice((20, 200, 3000)),
        pause_s=round(rng.uniform(0.8, 1.6) * seconds / messages, 6),
        subscriptions=rng.randint(1, 2),
        nack_rate=rng.choice((0.0, 0.0, 0.05)),
        seconds=seconds,
        down_s=rng.choice((0.2, 2.0, 8.0)),
        latency_s=rng.choice((0.0001, 0.0005, 0.003)),
        loser=loser,
        rates=MappingProxyType({} if calm else rates),
        times=MappingProxyType({} if calm else times),
        journal_segment_bytes=rng.choice((128 << 10, 1 << 20)),
        memtable_bytes=rng.choice((32 << 10, 512 << 10)),
        ledger_entries_max=rng.choice((10, 50, 1000)),
        cache_bytes=rng.choice((0, 20_000, 1 << 20)),
        deduplication=random.Random(f"options {seed} deduplication").random() < 0.5,
        patience_s=random.Random(f"options {seed} patience").choice((1.0, 30.0)),
        tight=random.Random(f"options {seed} tight").random() < 0.3,
        direct=random.Random(f"options {seed} direct").random() < 0.8,
        delayed_rate=random.Random(f"options {seed} delayed").choice((0.0, 0.0, 0.0, 0.2, 0.9)),
        pulsar=random.Random(f"options {seed} pulsar").choice((0.0, 0.0, 0.5, 1.0)),
        secured=secured,
        transactions=transactions,
        inside=inside,
        filtered=plain and (filtered or random.Random(f"options {seed} filtered").random() < FILTERED_RATE),
        scheduled=plain and (filtered or random.Random(f"options {seed} scheduled").random() < SCHEDULED_RATE),
    )


def _faults(
    seed: int, kind: str, loser: int, *, secured: bool, inside: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """Each kind has its own stream: one more kind leaves the others as they are."""
    appetite = random.Random(f"options {seed} appetite").choice((0.05, 0.1, 0.2))
    load = "ledgers" if kind == "ledgers" else "topics"
    rates: dict[str, float] = {}
    times: dict[str, int] = {}
    for name, rate in RATES.items():
        rng = random.Random(f"options {seed} {name}")
        if rng.random() < appetite:
            rates[name] = rng.choice(rate.values)
    for name, each in TIMES.items():
        rng = random.Random(f"options {seed} {name}")
        drawn = rng.random() < appetite + (0.3 if name in USUAL else 0.0)
        met = ("", load, *["grants"] * (secured and load == "topics"), *["inside"] * inside)
        possible = each.needs in met and (name not in LOSSES or loser >= 0) and name not in PENDING
        if drawn and possible:
            times[name] = rng.randint(1, each.most)
    return rates, times
