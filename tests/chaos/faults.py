"""What may befall a cluster of real processes: each fault is drawn, happens, lasts, and is healed, in one call.

| kind | what |
|---|---|
| kill | kill -9 of any process, started again after 0 to 4 s |
| freeze | SIGSTOP of a broker or bookie beyond its session's time-out, then SIGCONT: it believes in itself |
| cut, hold, one_way, half_open, slow, delay | of one pair of processes that have talked, for some seconds |
| reset | all connections to one process, once, in the middle of messages |
| isolate | nothing passes to or from one process for longer than its session |
| full_disk | the disk of one bookie takes nothing more for some seconds (a small disk; only where one may be mounted) |
| replace | an empty bookie takes the port of one, which goes on elsewhere with its data; twice in a run at most |
| wipe | a bookie's directory is removed: refused, forgotten, started as a new one; once: nothing copies again |
| power_cut | kill -9 of all, and bookies lose what they had not synced |
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.chaos.cluster import SESSION_S, ChaosCluster, Node, fill
from tests.chaos.proxy import ANY, Link, Mode

WEIGHTS = {
    "kill": 6, "freeze": 3, "cut": 2, "hold": 2, "one_way": 2, "half_open": 2, "slow": 1, "delay": 1, "reset": 2,
    "isolate": 2, "full_disk": 1, "replace": 1, "wipe": 1, "power_cut": 2,
}  # fmt: skip
AT_MOST = {"replace": 2, "wipe": 1}


class Faults:
    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.by_kind: dict[str, int] = {}
        self.dropped = 0
        self._kinds: dict[str, Callable[[], str]] = {
            "kill": self._kill, "freeze": self._freeze, "slow": self._slow, "delay": self._delay,
            "cut": lambda: self._link(Mode.CUT), "hold": lambda: self._link(Mode.HOLD),
            "one_way": lambda: self._link(self.rng.choice([Mode.HOLD_REQUESTS, Mode.HOLD_ANSWERS])),
            "half_open": lambda: self._link(Mode.HALF_OPEN), "reset": self._reset, "isolate": self._isolate,
            "full_disk": self._full_disk, "replace": self._replace, "wipe": self._wipe, "power_cut": self._power_cut,
        }  # fmt: skip

    @property
    def count(self) -> int:
        return sum(self.by_kind.values())

    def one(self, kind: str | None = None) -> str:
        """Happens and is healed when this returns; what it was."""
        kind = kind or self._draw()
        said = self._kinds[kind]()
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        return f"{kind} {said}"

    def _draw(self) -> str:
        kinds = [kind for kind in WEIGHTS if self.by_kind.get(kind, 0) < AT_MOST.get(kind, 1 << 30)]
        if self.cluster.small is None:
            kinds.remove("full_disk")
        return self.rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]

    def _last(self, low: float, high: float) -> float:
        seconds = self.rng.uniform(low, high)
        time.sleep(seconds)
        return round(seconds, 1)

    def _victim(self, *, metadata: bool = True) -> Node:
        cluster = self.cluster
        kind = self.rng.choice([cluster.bookies, cluster.brokers, *([[cluster.metadata]] if metadata else [])])
        return self.rng.choice(kind)

    # ---------------------------------------------------------------------------------------- processes
    def _kill(self) -> str:
        victim = self._victim()
        victim.kill()
        away = self._last(0.0, self.rng.choice([0.1, 1.0, 4.0]))
        victim.start()
        victim.wait_ready()
        return f"{victim.name}, back after {away} s"

    def _freeze(self) -> str:
        victim = self._victim(metadata=False)
        victim.freeze()
        lasted = self._last(SESSION_S + 1, SESSION_S + 5)
        victim.thaw()
        return f"{victim.name} for {lasted} s"

    def _replace(self) -> str:
        victim = self.rng.choice(self.cluster.bookies)
        return f"{victim.name}, now {self.cluster.replace(victim).name}"

    def _wipe(self) -> str:
        victim = self.rng.choice(self.cluster.bookies)
        return f"{victim.name}, now {self.cluster.wipe(victim)}"

    def _power_cut(self) -> str:
        dropped = self.cluster.power_cut(self.rng)
        self.dropped += dropped
        self.cluster.start_all()
        return f"of everything; {dropped} writes that were not synced are gone"

    def _full_disk(self) -> str:
        assert self.cluster.small is not None
        filler = fill(self.cluster.small)
        lasted = self._last(3.0, 8.0)
        filler.unlink()
        for bookie in self.cluster.bookies:
            if not bookie.running:  # one that ends when a sync fails is started again
                bookie.start()
                bookie.wait_ready()
        return f"for {lasted} s"

    # ---------------------------------------------------------------------------------------- connections
    def _pair(self) -> tuple[str, str]:
        return self.rng.choice([pair for pair in self.cluster.proxy.pairs() if pair[0] != "unknown"])

    def _link(self, mode: Mode) -> str:
        return self._bad(Link(mode))

    def _slow(self) -> str:
        return self._bad(Link(bytes_per_s=self.rng.choice([300, 3_000, 30_000])))

    def _delay(self) -> str:
        return self._bad(Link(delay_s=self.rng.uniform(0.05, 0.5)))

    def _bad(self, link: Link) -> str:
        source, target = self._pair()
        self.cluster.proxy.set(source, target, link)
        lasted = self._last(1.0, SESSION_S + 4)
        self.cluster.proxy.heal()
        return f"{source} -> {target} for {lasted} s {link if link.mode is Mode.PASS else link.mode.value}"

    def _reset(self) -> str:
        victim = self._victim()
        self.cluster.proxy.reset(ANY, victim.name)
        return f"of all connections to {victim.name}"

    def _isolate(self) -> str:
        victim = self._victim(metadata=False)
        for source, target in self.cluster.proxy.pairs():
            if victim.name in (source, target):
                self.cluster.proxy.set(source, target, Link(Mode.HOLD))
        lasted = self._last(SESSION_S + 1, SESSION_S + 5)
        self.cluster.proxy.heal()
        return f"{victim.name} for {lasted} s"
