"""What a seed of the fast tier does, drawn from its number: shape, load, and a random subset of faults at random rates.

One seed in ten has no faults at all. The fault atlas: at most Qa-1 bookies of a seed ever lose data (`losing`), so that
of every entry at least one of Qa synced copies stays; one seed in twenty-five is *beyond promise*: any bookie may
lose what it has, and then only what must hold even so is checked (judge.py).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

SHAPES = (
    (3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 2, 2), (1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 3, 3),
    (4, 3, 2), (4, 2, 2), (5, 3, 2), (5, 5, 3), (4, 4, 3),
)  # fmt: skip

RATES: Mapping[str, tuple[float, ...]] = MappingProxyType({
    # of messages between clients and bookies
    "drop": (0.005, 0.02, 0.1),
    "delay": (0.01, 0.05, 0.2),  # ten to a few hundred times the latency: also reorders
    "duplicate": (0.01, 0.1),
    "reset": (0.002, 0.01),  # the connection: everything on its way there and back is lost, its sender hears of it
    "busy": (0.01, 0.1),
    "read-error": (0.02, 0.2),
    # of requests to the metadata
    "cas-reply-lost": (0.05, 0.3),  # applied, nobody hears of it
    "cas-lost": (0.05, 0.3),  # not applied, nobody hears of it
    "metadata-slow": (0.1, 0.4),
    "stale-read": (0.1, 0.5),  # of a version that was current a moment ago
})  # fmt: skip

TIMES: Mapping[str, int] = MappingProxyType({
    # how often at most, at random times
    "kill": 4,  # a bookie's process: what was handed to the disk may be there afterwards, in order
    "power": 3,  # a bookie's plug: unsynced bytes are gone
    "blackout": 1,  # every bookie's plug
    "stall": 3,  # a bookie's disk takes no sync for a while
    "slow": 3,  # … or syncs many times slower than the others
    "cut": 4,  # the connection of a client to a bookie
    "partition": 3,  # one way, between a client and a bookie
    "cut-off": 2,  # a client hears of no bookie, or a bookie of no client
    "metadata-down": 1,
    "read-only": 2,
    "pause": 2,  # a client stands still, longer than anybody waits for it; then it goes on where it was
    "expire": 2,  # a recoverer's session: its process ends itself
    "die": 1,  # a writer's process
    "recover": 3,  # one more recoverer, of a ledger in use
    "unadmitted": 3,  # bookies refuse the key of a client, whose record of a live member they do not have, or no more
    "repair": 3,  # a slot of any fragment is copied to another bookie
    "delete": 2,  # a ledger, once it is closed; bookies delete it later
    # only bookies of the atlas
    "replace": 1,  # an empty bookie at the same address, under its own new name
    "wipe": 1,  # the same bookie with an empty disk: limbo
    "damage": 3,  # some entries of a bookie: checksums fail
})  # fmt: skip

ALONE = ("repair", "unadmitted")
"""Kinds that came later: each is drawn by itself, so that the seeds before it stay what they were."""

LOSSES = ("replace", "wipe", "damage")


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    shape: tuple[int, int, int]  # E, Qw, Qa
    bookies: int
    writers: int
    entries: int  # of each writer
    recoverers: int
    readers: int
    burst: int  # entries in a turn, at most
    pause_s: float  # between turns
    latency_s: float
    sync_s: float
    batch: int  # of a recovery
    faulty_s: float  # the time with faults; then everything is healed
    down_s: float  # mean, of what is down
    rates: Mapping[str, float]
    times: Mapping[str, int]
    losing: int  # bookies that may lose data
    beyond: bool = False
    jitter: bool = True  # of latencies, syncs and pauses; off: a shrunk schedule

    def describe(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["rates"], shown["times"] = dict(self.rates), dict(self.times)
        return " ".join(f"{name}={value}" for name, value in shown.items())


def draw(seed: int) -> Options:
    rng = random.Random(f"protocol {seed}")
    shape = rng.choice(SHAPES)
    calm = rng.random() < 0.1
    beyond = not calm and rng.random() < 0.04
    appetite = rng.choice((0.15, 0.3, 0.5))  # how many kinds of faults
    rates = {kind: rng.choice(some) for kind, some in RATES.items() if rng.random() < appetite}
    together = {kind: most for kind, most in TIMES.items() if kind not in ALONE}
    times = {kind: rng.randint(1, most) for kind, most in together.items() if rng.random() < appetite}
    for kind in ALONE:
        own = random.Random(f"protocol {seed} {kind}")
        if own.random() < appetite:
            times[kind] = own.randint(1, TIMES[kind])
    if rng.random() < 0.5:  # half of the seeds are short and dense: recoveries meet writes
        times.setdefault("recover", rng.randint(1, 3))
    entries = rng.choice((5, 5, 10, 20, 30, 60))
    pause_s = rng.choice((0.0005, 0.002, 0.01))
    load_s = entries * pause_s
    return Options(
        seed=seed, shape=shape, bookies=rng.randint(max(3, shape[0]), 7), writers=rng.choice((1, 1, 1, 2)),
        entries=entries, recoverers=rng.choice((0, 0, 1, 1, 2, 3)), readers=rng.choice((0, 0, 1, 2)),
        burst=rng.choice((1, 1, 3, 8)), pause_s=pause_s,
        latency_s=rng.choice((0.0001, 0.0005, 0.002)), sync_s=rng.choice((0.0005, 0.002, 0.01)),
        batch=rng.choice((1, 2, 8, 32)), faulty_s=round(load_s * rng.choice((0.5, 1.0, 1.5)) + 0.05, 6),
        down_s=rng.choice((0.01, 0.1, 0.6)),
        rates=MappingProxyType({} if calm else rates), times=MappingProxyType({} if calm else times),
        losing=7 if beyond else shape[2] - 1, beyond=beyond,
    )  # fmt: skip
