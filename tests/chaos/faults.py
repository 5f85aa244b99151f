"""What may befall a cluster of real processes: faults are drawn, begin, last, and are healed; some overlap.

| kind | what |
|---|---|
| kill | kill -9 of any process, the metadata's too, started again after 0 to 4 s |
| kill_one | kill -9 of one process of a broker that has several: its parent starts it again (only with `--processes`) |
| restart | ended in order, and started again |
| freeze | SIGSTOP of any process beyond its session's time-out, then SIGCONT: it believes in itself |
| cut, hold, one_way, make_half_open, slow, delay | of one pair of processes that have talked, for some seconds |
| reset | all connections to one process, once, in the middle of messages |
| isolate | nothing passes to or from one process for longer than its session |
| full_disk | the disk of one bookie takes nothing more for some seconds (a small disk; only where one may be mounted) |
| power_cut | kill -9 of all, and bookies lose what they had not synced; sometimes again while they start |
| replace | an empty bookie takes the port of one, which goes on elsewhere with its data |
| wipe | a bookie's directory is removed: refused, forgotten, started as a new one |
| drain | a broker is drained for some seconds, and gets bundles again |
| revoke | a role that publishes and consumes loses its rights for some seconds (only in a secured cluster) |
| disk | a ledgers directory of a bookie vanishes for some seconds; when it is back the bookie is killed and started |
| split | a namespace gets twice as many bundles |
| move | an operator moves a bundle to another broker |
| kill_leader, freeze_leader | kill and freeze of the server that leads the metadata's |
| part_leader | nothing passes between that one and the other servers, and all passes to and from its clients |
| no_space | etcd has the alarm NOSPACE for some seconds: it takes no writes and no sessions |
| lose | a bookie is killed for good, and nobody is told (one more than at the start, after a `replace`) |

`disk`, `split` and `move` are only in a wide cluster, those of the leader and `no_space` with etcd.

`wipe` and `lose` cost one copy of each entry. They wait until auto-recovery has made all copies again that were lost
before (processes/copies.py): no more than ack quorum - 1 may be lost at once. Copies that are still missing when a
cluster has been healed for the bound of waiting.py are *stuck*.

A *round* is one fault or up to three: the sudden ones (power_cut, replace, wipe, lose) first and alone, the others
begin within some seconds of each other. It returns when all are healed and every process is ready. A process that ended
by itself is wrong, and said. But a bookie whose sync fails on a full disk ends, and a process gives up whose metadata
session is lost while it starts: it says so, and whoever watches over it (here we) has to start it again. And a bookie
ends that starts while one of its disks is away.
"""

import contextlib
import heapq
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from magnetar.admin import Admin
from magnetar.cli.common.processes import ProcessNotReady
from magnetar.proto.errors import MagnetarError
from tests.chaos.processes.cluster import DISKS, ChaosCluster, fill
from tests.chaos.processes.nodes import EtcdNode, Node, Target
from tests.chaos.processes.proxy import ANY, WHOLE, Link, Mode
from tests.chaos.processes.security import VISITOR
from tests.chaos.waiting import wait_until

WEIGHTS = {
    "kill": 6, "kill_one": 4, "restart": 1, "freeze": 3, "cut": 2, "hold": 2, "one_way": 2, "half_open": 2, "slow": 1,
    "delay": 1, "reset": 2, "isolate": 2, "full_disk": 1, "power_cut": 2, "replace": 3, "wipe": 3, "lose": 4,
    "revoke": 3, "drain": 4, "disk": 4, "split": 3, "move": 5, "kill_leader": 3, "freeze_leader": 3, "part_leader": 3,
    "no_space": 3,
}  # fmt: skip
WIDE = ("disk", "split", "move")
OF_ETCD = ("kill_leader", "freeze_leader", "part_leader", "no_space")
BUNDLES_MAX = 64
"""Of a namespace."""
SUDDEN = ("power_cut", "replace", "wipe", "lose")
LOSING = ("wipe", "lose")
TOGETHER = (0.5, 0.3, 0.2)
"""How often a round has one fault, two, three."""
APART_S = 3.0
"""Within so long the faults of a round begin."""
LOOK_S = 2.0
STARTS_MAX = 5
"""Of a process that gives up, in a cluster that is healed."""


class Begun(NamedTuple):
    said: str
    lasts_s: float
    heal: Callable[[], object]


class Faults:
    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.by_kind: dict[str, int] = {}
        self.dropped = 0
        self.copied = self.gave_up = self.told_moves = self.splits = 0
        self._bookies, self._session_s = len(cluster.bookies), cluster.session_s
        self._pulled: dict[str, Path] = {}  # by bookie, a directory that is away
        self._frozen: list[Target] = []
        self._disk_was_full = self._revoked = self._etcd_is_full = False
        self._drained: dict[str, None] = {}  # names of brokers that are ordered to drain
        self._sudden: dict[str, Callable[[], str]] = {
            "power_cut": self._power_cut, "replace": self._replace, "wipe": self._wipe, "lose": self._lose,
        }  # fmt: skip
        self._kinds: dict[str, Callable[[], Begun]] = {
            "kill": self._kill, "kill_one": self._kill_one, "restart": self._restart, "freeze": self._freeze,
            "slow": self._slow, "delay": self._delay, "cut": lambda: self._link(Mode.CUT),
            "hold": lambda: self._link(Mode.HOLD),
            "one_way": lambda: self._link(self.rng.choice([Mode.HOLD_REQUESTS, Mode.HOLD_ANSWERS])),
            "half_open": lambda: self._link(Mode.HALF_OPEN), "reset": self._reset, "isolate": self._isolate,
            "full_disk": self._full_disk, "revoke": self._revoke, "drain": self._drain, "disk": self._pull,
            "split": self._split, "move": self._move, "kill_leader": lambda: self._kill(self._leader()),
            "freeze_leader": lambda: self._freeze(self._leader()), "part_leader": self._part_leader,
            "no_space": self._no_space,
        }  # fmt: skip

    @property
    def count(self) -> int:
        return sum(self.by_kind.values())

    # ---------------------------------------------------------------------------------------- rounds
    def draw(self) -> list[str]:
        """The kinds of one round."""
        kinds: list[str] = []
        for _ in range(self.rng.choices((1, 2, 3), TOGETHER)[0]):
            possible = [kind for kind in WEIGHTS if self._is_possible(kind) and not (kinds and kind in SUDDEN)]
            kinds += self.rng.choices(possible, [WEIGHTS[kind] for kind in possible])
        return kinds

    def _is_possible(self, kind: str) -> bool:
        """A bookie that was moved is one more; the next that goes, goes for good."""
        bookies = len(self.cluster.bookies)
        impossible = (
            (kind == "full_disk" and self.cluster.small is None)
            or (kind == "revoke" and self.cluster.security is None)
            or (kind == "kill_one" and self.cluster.processes == 1)
            or (kind == "replace" and bookies > self._bookies)
            or (kind == "lose" and bookies <= self._bookies)
            or (kind in WIDE and not self.cluster.wide)
            or (kind in OF_ETCD and len(self.cluster.metadata) == 1)
        )
        return not impossible

    def wait_copies(self) -> list[str]:
        """Until every ledger has its copies; what it lacks when that takes too long."""
        return wait_until(self.cluster.missing_copies, look_s=LOOK_S)

    def round(self, kinds: list[str], say: Callable[[str], None]) -> list[str]:
        """What is wrong afterwards. ProcessNotReady: a process did not start again."""
        if any(kind in LOSING for kind in kinds):
            if missing := self.wait_copies():
                return missing
            self.copied += 1
        events: list[tuple[float, int, str, Callable[[], object] | None]] = []
        for kind in kinds:
            if kind in SUDDEN:
                say(f"{kind} {self._sudden[kind]()}")
                self._counted(kind)
        now = time.monotonic()
        for number, kind in enumerate(each for each in kinds if each not in SUDDEN):
            heapq.heappush(events, (now + (self.rng.uniform(0.0, APART_S) if number else 0.0), number, kind, None))
        while events:
            at, number, kind, heal = heapq.heappop(events)
            time.sleep(max(0.0, at - time.monotonic()))
            if heal is not None:
                heal()
                continue
            begun = self._kinds[kind]()
            say(f"{kind} {begun.said}")
            self._counted(kind)
            heapq.heappush(events, (time.monotonic() + begun.lasts_s, number, kind, begun.heal))
        return self._healed()

    def _counted(self, kind: str) -> None:
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1

    def _healed(self) -> list[str]:
        """Who ended by itself; it is started again."""
        self.cluster.proxy.heal()
        wrong: list[str] = []
        for node in self.cluster.nodes:
            if not node.is_running:
                if not self._may_end(node) and not self._gave_up(node):
                    wrong.append(f"{node.name} ended by itself: {node.output()[-1000:]}")
                node.start()
        for node in self.cluster.nodes:
            self._wait_ready(node)
        self._disk_was_full = False
        self._pulled.clear()
        wrong += wait_until(self._undrain) + wait_until(self._make_room)
        if self._revoked:
            assert self.cluster.security is not None
            self.cluster.security.grant(self.cluster.url, VISITOR)
            self._revoked = False
        return wrong

    def _wait_ready(self, node: Target) -> None:
        for _ in range(STARTS_MAX - 1):
            try:
                node.wait_ready()
                return
            except ProcessNotReady:
                if node.is_running or not self._gave_up(node):
                    raise
            node.start()
        node.wait_ready()

    def _gave_up(self, node: Target) -> bool:
        if not isinstance(node, Node) or any(line.startswith("ready ") for line in node.lines):
            return False
        last = node.output().rstrip().splitlines()[-3 * self.cluster.processes :]  # each process ends with a line
        found = any(line.startswith("magnetar: metadata session") for line in last)
        self.gave_up += found
        return found

    def _may_end(self, node: Target) -> bool:
        return node.name in self._pulled or (self._disk_was_full and node is self.cluster.bookies[0])

    # ---------------------------------------------------------------------------------------- whom
    def _running(self, *groups: list[Target]) -> Target:
        """One that runs, each group being as likely as another; any at all when none does."""
        able = [[node for node in group if node.is_running and node not in self._frozen] for group in groups]
        return self.rng.choice(self.rng.choice([group for group in able if group] or list(groups)))

    def _victim(self) -> Target:
        cluster = self.cluster
        return self._running([*cluster.bookies], [*cluster.brokers], cluster.metadata)

    def _leader(self) -> Target:
        """Of the metadata's servers; any if none leads now."""
        running = [each for each in self.cluster.metadata if isinstance(each, EtcdNode) and each not in self._frozen]
        return next((each for each in running if each.leads), self._running(self.cluster.metadata))

    def _bookie(self) -> Node:
        """Any but the first, which has the small disk."""
        return self.rng.choice(self.cluster.bookies[1:])

    def _pair(self) -> tuple[str, str]:
        there = {"client", *(node.name for node in self.cluster.nodes)}
        return self.rng.choice([pair for pair in self.cluster.proxy.pairs() if there.issuperset(pair)])

    def _lasting(self, low: float, high: float) -> float:
        return round(self.rng.uniform(low, high), 1)

    # ---------------------------------------------------------------------------------------- processes
    def _kill(self, victim: Target | None = None) -> Begun:
        victim = victim or self._victim()
        victim.kill()
        away = self._lasting(0.0, self.rng.choice([0.1, 1.0, 4.0]))
        return Begun(f"{victim.name}, back after {away} s", away, lambda: _revive(victim))

    def _kill_one(self) -> Begun:
        """Of a broker that runs; none may: then nothing is killed."""
        victim = self._running([*self.cluster.brokers])
        one = self.rng.random()
        theirs = victim.pids[1:] if victim.is_running else []
        if theirs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(theirs[int(one * len(theirs))], signal.SIGKILL)
        return Begun(f"of {victim.name}", 0.0, lambda: None)

    def _restart(self) -> Begun:
        victim = self._victim()
        victim.stop()
        return Begun(victim.name, 0.0, lambda: _revive(victim))

    def _freeze(self, victim: Target | None = None) -> Begun:
        victim = victim or self._victim()
        self._frozen.append(victim)
        if victim.is_running:
            victim.freeze()
        lasts = self._lasting(self._session_s + 1, self._session_s + 5)

        def thaw() -> None:
            self._frozen.remove(victim)
            if victim.is_running:
                victim.thaw()

        return Begun(f"{victim.name} for {lasts} s", lasts, thaw)

    def _full_disk(self) -> Begun:
        assert self.cluster.small is not None
        filler = fill(self.cluster.small)
        self._disk_was_full = True
        lasts = self._lasting(3.0, 8.0)
        return Begun(f"for {lasts} s", lasts, lambda: filler.unlink(missing_ok=True))

    def _pull(self) -> Begun:
        """Its files stay open, and no other is found."""
        victim = self.rng.choice(self.cluster.bookies)
        disk = self.cluster.data[victim.name] / f"disk-{self.rng.randrange(DISKS)}"
        away = disk.with_name("pulled")
        lasts = self._lasting(2.0, 10.0)
        if victim.name in self._pulled or not disk.exists():
            return Begun(f"of {victim.name}, which has one away", 0.0, lambda: None)
        disk.rename(away)
        self._pulled[victim.name] = disk

        def put_back() -> None:
            away.rename(disk)
            victim.kill()
            victim.start()

        return Begun(f"{disk.name} of {victim.name} for {lasts} s", lasts, put_back)

    def _split(self) -> Begun:
        """One that it would be too much for is left alone."""
        return self._told(self._split_namespace)

    def _split_namespace(self, admin: Admin, namespace: str) -> str:
        if (bundles := admin.namespace(namespace).bundles) >= BUNDLES_MAX:
            return f"no more: {namespace} has {bundles} bundles"
        bundles = admin.split_bundles(namespace).bundles
        self.splits += 1
        return f"{namespace} into {bundles} bundles"

    def _move(self) -> Begun:
        return self._told(self._move_bundle)

    def _move_bundle(self, admin: Admin, namespace: str) -> str:
        owned = [each for each in admin.list_bundles(namespace=namespace).bundles if each.topics]
        if not owned:
            return f"nothing: {namespace} has no loaded bundle"
        bundle, target = self.rng.choice(owned), self.rng.choice(admin.brokers())
        done = admin.unload_namespace(namespace, bundle.bundle, destination=target.name)
        self.told_moves += bool(done.bundles)
        return f"{namespace}/{bundle.bundle} from {bundle.broker} to {target.name}"

    def _told(self, tell: Callable[[Admin, str], str]) -> Begun:
        """An operator tells a broker, which may be away."""
        namespace = self.rng.choice(self.cluster.namespaces)
        try:
            with self.cluster.admin() as admin:
                said = tell(admin, namespace)
        except MagnetarError as error:
            said = f"of {namespace}, perhaps: {error!s:.200}"
        return Begun(said, 0.0, lambda: None)

    def _revoke(self) -> Begun:
        """Given back when all is healed: until then a broker may not be reached."""
        security = self.cluster.security
        assert security is not None
        self._revoked = True
        done = security.revoke(self.cluster.url, VISITOR)
        lasts = self._lasting(1.0, self._session_s + 4)
        return Begun(f"the rights of {VISITOR} for {lasts} s{'' if done else ', perhaps'}", lasts, lambda: None)

    def _drain(self) -> Begun:
        """Taken back when its time is over, and certainly when all is healed: until then a broker may not be
        reached."""
        victim = self._running([*self.cluster.brokers])
        names = self.cluster.drain(victim)
        self._drained.update(dict.fromkeys(names))
        lasts = self._lasting(0.5, self._session_s + 4)
        what = f"{victim.name} for {lasts} s{'' if names else ', perhaps'}"
        return Begun(what, lasts, self._undrain)

    def _undrain(self) -> list[str]:
        """What is left to be taken back."""
        for name in list(self._drained):
            if self.cluster.undrain(name):
                del self._drained[name]
        return [f"{name} drains" for name in self._drained]

    def _no_space(self) -> Begun:
        """Ended when its time is over, and certainly when all is healed: until then etcd may have no leader."""
        self._etcd_is_full = True
        done = self._set_full(True)
        lasts = self._lasting(1.0, self._session_s + 4)
        return Begun(f"for {lasts} s{'' if done else ', perhaps'}", lasts, self._make_room)

    def _make_room(self) -> list[str]:
        if self._etcd_is_full and self._set_full(False):
            self._etcd_is_full = False
        return ["etcd has the alarm NOSPACE"] * self._etcd_is_full

    def _set_full(self, full: bool) -> bool:
        """False: etcd did not do it, or say so."""
        server = self.cluster.metadata[0]
        assert isinstance(server, EtcdNode)
        try:
            server.servers.set_full(full)
        except OSError:
            return False
        return True

    # ---------------------------------------------------------------------------------------- sudden ones
    def _power_cut(self) -> str:
        dropped = self.cluster.power_cut(self.rng)
        self.cluster.start_all()
        again = self.rng.random() < 0.3
        if again:
            time.sleep(self.rng.uniform(0.0, 3.0))
            dropped += self.cluster.power_cut(self.rng)
            self.cluster.start_all()
        self.dropped += dropped
        return f"of everything{', twice' if again else ''}; {dropped} writes that were not synced are gone"

    def _replace(self) -> str:
        victim = self._bookie()
        return f"{victim.name}, now {self.cluster.replace(victim).name}"

    def _wipe(self) -> str:
        victim = self.rng.choice(self.cluster.bookies)
        return f"{victim.name}, now {self.cluster.wipe(victim)}"

    def _lose(self) -> str:
        victim = self._bookie()
        self.cluster.lose(victim)
        return victim.name

    # ---------------------------------------------------------------------------------------- connections
    def _link(self, mode: Mode) -> Begun:
        return self._bad(Link(mode))

    def _slow(self) -> Begun:
        return self._bad(Link(bytes_per_s=self.rng.choice([300, 3_000, 30_000])))

    def _delay(self) -> Begun:
        return self._bad(Link(delay_s=round(self.rng.uniform(0.05, 0.5), 2)))

    def _bad(self, link: Link) -> Begun:
        pair = self._pair()
        self.cluster.proxy.set(*pair, link)
        lasts = self._lasting(1.0, self._session_s + 4)
        what = f" ({link.bytes_per_s} bytes/s)" if link.bytes_per_s else f" ({link.delay_s} s)" if link.delay_s else ""
        return Begun(f"{' -> '.join(pair)}{what} for {lasts} s", lasts, lambda: self.cluster.proxy.set(*pair, WHOLE))

    def _reset(self) -> Begun:
        victim = self._victim()
        self.cluster.proxy.reset(ANY, victim.name)
        return Begun(f"of all connections to {victim.name}", 0.0, lambda: None)

    def _isolate(self) -> Begun:
        cluster = self.cluster
        servers = cluster.metadata if len(cluster.metadata) > 1 else []
        victim = self._running([*cluster.bookies], [*cluster.brokers], *[servers] * bool(servers))
        others = ["client", *(node.name for node in cluster.nodes if node is not victim)]

        return self._part(victim, others, Mode.HOLD)

    def _part_leader(self) -> Begun:
        victim = self._leader()
        others = [each.name for each in self.cluster.metadata if each is not victim]
        return self._part(victim, others, self.rng.choice([Mode.HOLD, Mode.CUT]))

    def _part(self, victim: Target, others: list[str], mode: Mode) -> Begun:
        def link(how: Link) -> None:
            for other in others:
                self.cluster.proxy.set(victim.name, other, how)
                self.cluster.proxy.set(other, victim.name, how)

        link(Link(mode))
        lasts = self._lasting(self._session_s + 1, self._session_s + 5)
        return Begun(f"{victim.name} for {lasts} s", lasts, lambda: link(WHOLE))


def _revive(node: Target) -> None:
    """Another fault may have started it before."""
    if not node.is_running:
        node.start()
