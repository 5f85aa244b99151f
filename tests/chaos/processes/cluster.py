"""A cluster of real processes that reach each other through a proxy, on disks that can lose what was not synced.

Every process listens on 127.0.0.1 and is advertised as 127.0.0.2, where the proxy (proxy.py) listens at the
same port (Linux has all of 127/8); for the metadata each has an address of its own. So each pair has its link: client
to broker, broker to broker, broker to bookie, bookie to bookie, and all to the metadata, which is `magnetar metadata`
(SQLite), a real ZooKeeper or a real etcd of three servers, which reach each other through it, too. Who a connection
comes from is asked of /proc; "client" is this process.

With `secured` everything asks who calls: TLS and tokens at the brokers, certificates at the metadata, keys at bookies.
With `processes` each broker is so many processes, at ports after each other, and one name.
With `wide` there are more of them, each bookie has a journal and two ledgers directories in its folder, and the balance
is in haste (moves.py).
Auto-recovery runs in the bookies, with shorter times than by default: copies are made again many times in a run.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from magnetar.admin import Admin
from magnetar.cli.common.processes import Processes, find_free_port
from magnetar.runtime.network import Endpoint
from tests.chaos.processes.copies import missing_copies
from tests.chaos.processes.moves import HASTE
from tests.chaos.processes.nodes import ETCD_SERVERS, READY_S, EtcdNode, EtcdServers, Node, Target, ZookeeperNode
from tests.chaos.processes.proxy import Proxy, owner_of
from tests.chaos.processes.security import Security
from tests.chaos.processes.unsynced import LIES, STALLED, UNDO, drop
from tests.layout import ROOT
from tests.support.processes import Result, run_cli

HERE, ADVERTISED = "127.0.0.1", "127.0.0.2"
SESSION_S, WIDE_SESSION_S = 2.0, 5.0
"""In a wide cluster the machine is so busy that two seconds are over without a fault."""
SMALL_MIB = 256
DISKS = 2
"""Ledgers directories of a bookie in a wide cluster."""
ADMIN_S = 10.0
STALL_MAX_S = 0.5
"""How long disks stand still before the power goes: less than an add may take."""
SETTINGS = """
[bookie]
gc_interval_s = 0.5
gc_grace_s = 0.2
upkeep_interval_s = 0.2

[bookie.store]
memtable_bytes = 4194304
journal_bytes = 4194304
journal_segment_bytes = 4194304
journal_first_segment_bytes = 1048576
journal_spares_max = 1
log_bytes_max = 16777216
log_allocate_bytes = 1048576

[bookie.repair]
lost_bookie_grace_s = 6.0
open_ledger_grace_s = 4.0
check_pass_s = 60.0
retry_min_s = 1.0
retry_max_s = 10.0
audit_interval_s = 1.0
poll_interval_s = 2.0

[broker]
roll_entries = 1000
cursor_roll_entries = 500
degraded_roll_s = 10.0
"""
"""Checkpoints, rolls, collection and compaction run all the time, ledgers end often; a bookie that is away for a little
longer than its session is lost."""
LINK = "link_bytes_s = 40000\n"
"""In a wide cluster a loud topic is a fifth of what a broker can do, however busy this machine is."""


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of `mib` MiB. PermissionError: this user may not mount one."""
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise PermissionError(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


class ChaosCluster(Processes):
    def __init__(
        self, directory: Path, *, store: str = "sqlite", lies: bool = False, secured: bool = False,
        processes: int = 1, wide: bool = False,
    ) -> None:  # fmt: skip
        """`store`: of the metadata: sqlite, zookeeper or etcd. `processes`: of each broker (`--processes`)."""
        super().__init__(directory)
        self.wide, self.session_s = wide, WIDE_SESSION_S if wide else SESSION_S
        bookies, brokers = (5, 4) if wide else (4, 2)
        self.security = Security(directory / "security") if secured else None
        self.environment = {} if self.security is None else self.security.environment
        self.lies = lies
        self.processes = processes
        self.proxy = Proxy(self._source_of)
        self.proxy.__enter__()
        self.data: dict[str, Path] = {}
        self.pulsar_ports: dict[str, int] = {}  # by broker, of Pulsar's protocol
        self.client_pids = {os.getpid()}
        self.namespaces: Sequence[str] = ()
        self._disks = contextlib.ExitStack()
        self._next_address, self._replaced = 3, 0
        self._foreign: list[Target] = []
        self.small: Path | None = None  # the disk of bookie-0, where this user may mount one
        with contextlib.suppress(PermissionError):
            self.small = self._disks.enter_context(small_disk(directory, SMALL_MIB))
        self.config = directory / "magnetar.toml"
        self.config.write_text(SETTINGS + LINK * wide)
        self.metadata: list[Target] = []
        """Its servers."""
        try:
            if store == "sqlite":
                self.metadata = [self.node("metadata", "metadata", "--data", str(directory / "metadata"))]
            else:
                self.metadata = self._foreign = self._start_foreign(store, directory / store)
            self.metadata[0].wait_ready()
            places = [self.small or directory] + [directory] * (bookies - 1)
            self.bookies = [self.bookie(f"bookie-{i}", place / f"bookie-{i}") for i, place in enumerate(places)]
            for bookie in self.bookies:
                bookie.wait_ready()
            self.brokers = [self.node(f"broker-{i}", "broker", *self._where()) for i in range(brokers)]
            for broker in self.brokers:
                broker.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.proxy.heal()
        for process in self.nodes:
            if process.is_running:
                process.thaw()
                process.kill()  # what is left is thrown away
        self.started.clear()
        self.proxy.__exit__(None, None, None)
        self._disks.close()

    def _start_foreign(self, store: str, folder: Path) -> list[Target]:
        if store == "zookeeper":
            return [ZookeeperNode(folder)]

        def listen(number: int, port: int) -> None:
            self.proxy.listen(Endpoint(ADVERTISED, port), Endpoint(HERE, port), f"metadata-{number}")

        servers = EtcdServers(folder, ADVERTISED, listen)
        return [EtcdNode(servers, number) for number in range(ETCD_SERVERS)]

    @property
    def nodes(self) -> list[Target]:
        """All of the cluster, the metadata first; not those that were taken away."""
        return [*self._foreign, *(process for process in self.started if isinstance(process, Node))]

    @property
    def at(self) -> str:
        """The metadata, past the proxy."""
        return self.metadata[0].at(HERE)

    @property
    def url(self) -> str:
        scheme = "magnetar://" if self.security is None else "magnetar+ssl://"
        return scheme + ",".join(f"{ADVERTISED}:{broker.port}" for broker in self.brokers)

    @property
    def pulsar_url(self) -> str:
        return "pulsar://" + ",".join(f"{ADVERTISED}:{self.pulsar_ports[broker.name]}" for broker in self.brokers)

    def _where(self) -> tuple[str, ...]:
        return "--session-timeout", str(self.session_s), "--config", str(self.config)

    def bookie(self, name: str, data: Path, port: int | None = None) -> Node:
        self.data[name] = data
        where = ["--data", str(data)]
        if self.wide:
            where += ["--journal", str(data / "journal")]
            where += [each for number in range(DISKS) for each in ("--ledgers", str(data / f"disk-{number}"))]
        return self.node(name, "bookie", *self._where(), *where, port=port)

    def node(self, name: str, role: str, *arguments: str, port: int | None = None) -> Node:
        """Starts it behind the proxy; at `port` when the proxy listens there already."""
        if port is None:
            port = self._ports(name, self.processes if role == "broker" else 1)
        where = ["--listen", f"{HERE}:{port}"]
        if role != "metadata":
            own = f"127.0.0.{self._next_address}"
            self._next_address += 1
            for server in self.metadata:
                self.proxy.listen(Endpoint(own, server.port), Endpoint(HERE, server.port), server.name, name)
            where += ["--metadata", self.metadata[0].at(own)]
            where += ["--advertise", ADVERTISED if role == "bookie" else f"{ADVERTISED}:{port}"]
        if role == "broker":
            self.pulsar_ports[name] = self._ports(name, self.processes)
            where += ["--pulsar-listen", f"{HERE}:{self.pulsar_ports[name]}", "--processes", str(self.processes)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, **self.environment}
        if role == "bookie":
            environment[UNDO] = str(self.directory / f"{name}.undo")
            if self.lies:
                environment[LIES] = "1"
        if self.wide:
            environment[HASTE] = "1"
        node = Node(name, [role, *where, *arguments], self.directory, environment)
        node.port = port
        self.started.append(node)
        return node

    def _ports(self, name: str, count: int) -> int:
        """The first one; those after it are for the other processes."""
        first = find_free_port(ADVERTISED, HERE, count=count)
        for port in range(first, first + count):
            self.proxy.listen(Endpoint(ADVERTISED, port), Endpoint(HERE, port), name)
        return first

    def _source_of(self, client: Endpoint, server: Endpoint) -> str:
        names = dict.fromkeys(self.client_pids, "client")
        names |= {pid: node.name for node in self.nodes if node.is_running for pid in node.pids}
        return names.get(owner_of(client, server, names) or 0, "unknown")

    # ---------------------------------------------------------------------------------------- what may befall it
    def power_cut(self, rng: random.Random) -> int:
        """All at once; what bookies had not synced is gone. How many writes that were.

        For a moment before, their disks take writes and end none; in one of four cuts they do not.
        """
        running = [node for node in self.nodes if node.is_running]
        stalled = self.directory / STALLED
        if rng.random() < 0.75:
            stalled.touch()
            time.sleep(rng.uniform(0.0, STALL_MAX_S))
        for node in running:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, as one does whose disk lied
                os.kill(node.pid, signal.SIGKILL)
        for node in running:
            node.kill()
        stalled.unlink(missing_ok=True)
        return sum(drop(bookie.notes, rng) for bookie in self.bookies)

    def start_all(self) -> None:
        """Without waiting for them; the metadata answers when this returns."""
        for nodes in (self.metadata, self.bookies, self.brokers):
            for node in nodes:
                if not node.is_running:
                    node.start()
            if nodes is self.metadata:
                nodes[0].wait_ready()

    def wipe(self, bookie: Node) -> str:
        """Its directory is gone: it refuses to start, is forgotten, and comes back as another. The new id."""
        was = bookie.id
        bookie.kill()
        shutil.rmtree(self.data[bookie.name])
        bookie.start()
        bookie.wait()
        assert "magnetar bookies forget" in bookie.output(), bookie.output()[-2000:]
        deadline = time.monotonic() + READY_S
        forget = "bookies", "forget", was, "--metadata", self.at, "--yes"
        while (done := run_cli(*forget, **self.environment)).code:
            assert "is registered" in done.err, done.err  # until its session has ended
            assert time.monotonic() < deadline, done.err
            time.sleep(0.2)
        bookie.start()
        assert bookie.id != was
        return bookie.id

    def replace(self, bookie: Node) -> Node:
        """An empty bookie takes its port; it itself goes on elsewhere, with its data. The one that is elsewhere."""
        bookie.kill()
        self._replaced += 1
        data = self.data[bookie.name]
        self.data[bookie.name] = self.directory / f"{bookie.name}-empty-{self._replaced}"
        empty = str(self.data[bookie.name])
        bookie.arguments = [empty + each[len(str(data)) :] if f"{each}/".startswith(f"{data}/") else each
                            for each in bookie.arguments]  # fmt: skip
        moved = self.bookie(f"bookie-moved-{self._replaced}", data)
        self.bookies.append(moved)
        bookie.start()
        for each in (bookie, moved):
            each.wait_ready()
        return moved

    def lose(self, bookie: Node) -> None:
        """Killed and never seen again, and nobody is told."""
        bookie.kill()
        self.bookies.remove(bookie)
        self.started.remove(bookie)
        shutil.rmtree(self.data.pop(bookie.name))

    def drain(self, broker: Target) -> list[str]:
        """An operator orders its processes to give away what they own. The names of those that a broker answered for:
        none may be reached now."""
        port, found = broker.port, self._brokers("list", "-o", "json")
        if found.code:
            return []
        ours = range(port, port + self.processes)
        names = [each["name"] for each in json.loads(found.out) if Endpoint.parse(each["endpoint"]).port in ours]
        return [name for name in names if self._brokers("drain", name).code == 0]

    def undrain(self, name: str) -> bool:
        """False: no broker did it, or said so."""
        return self._brokers("undrain", name).code in (0, 4)  # 4: an earlier try did it

    def _brokers(self, *arguments: str) -> Result:
        run = run_cli if self.security is None else self.security.cli
        return run("brokers", *arguments, "--url", self.url)

    def make_namespaces(self, names: Sequence[str], bundles: int) -> None:
        self.namespaces = names
        with self.admin() as admin:
            for name in names:
                admin.create_namespace(name, bundles=bundles)

    def admin(self) -> Admin:
        return Admin(self.url, timeout_s=ADMIN_S)

    def missing_copies(self) -> list[str]:
        """What tests/chaos/processes/copies.py says; empty: one bookie may lose its data."""
        return missing_copies(self.at, [bookie.id for bookie in self.bookies], self.environment)


def fill(disk: Path) -> Path:
    """Until nothing more goes on it; the file to remove."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return filler
