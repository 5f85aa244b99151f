"""The processes of a cluster under faults: one interface for Magnetar's own, for a ZooKeeper and for an etcd."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from magnetar.cli.common.processes import Process
from tests.chaos.processes.unsynced import UNDO
from tests.support.children import pids
from tests.support.etcd import EtcdCluster
from tests.support.zookeeper import JUTE_MAXBUFFER, ZookeeperServer

ETCD_SERVERS = 3
ELECTION = ("--heartbeat-interval", "200", "--election-timeout", "2000")
"""In ms: by default a follower calls for an election after one second, which this machine may be busy for."""
LEADER_ASKED_S = 1.0
READY_S = 180.0
"""Seven processes that start at once on a busy machine take their time, and it is not what is looked at here."""


class Node(Process):
    """A process behind the proxy."""

    module = "tests.chaos.processes.unsynced"
    port = 0

    @property
    def notes(self) -> Path:
        return Path(self.environment[UNDO])

    @property
    def id(self) -> str:
        """Of a bookie that is ready."""
        self.wait_ready()
        found = re.search(r"\bid=(\S+)", next(line for line in self.lines if line.startswith("ready ")))
        assert found is not None
        return found[1]

    def wait_ready(self, timeout_s: float = READY_S) -> str:
        return super().wait_ready(timeout_s)

    @property
    def pids(self) -> list[int]:
        """Its own, and those of its processes where it has several."""
        return [self.pid, *pids(self.pid)]

    def freeze(self) -> None:
        for pid in self.pids:
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in reversed(self.pids):
            _signal(pid, signal.SIGCONT)

    def at(self, host: str) -> str:
        """What --metadata says of it, when it is the metadata service and is reached by that host."""
        return f"{host}:{self.port}"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class ZookeeperNode(ZookeeperServer):
    """A real ZooKeeper in the place of the metadata service."""

    name = "metadata"

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    def start(self, *, wait: bool = False) -> None:
        super().start(wait=wait)

    def freeze(self) -> None:
        self.pause()

    def thaw(self) -> None:
        self.resume()

    def at(self, host: str) -> str:
        return f"zk://{host}:{self.port}/magnetar?jute_maxbuffer={JUTE_MAXBUFFER}"

    @property
    def stderr_path(self) -> Path:
        return self.directory / "log"

    def output(self) -> str:
        return self.stderr_path.read_text(errors="replace")


class EtcdServers(EtcdCluster):
    """Three servers that reach each other through the proxy. `listen`: called with the number and the port of each at
    which the others look for it, before they start."""

    def __init__(self, directory: Path, peer_host: str, listen: Callable[[int, int], object]) -> None:
        self._listen = listen
        self._listens = set[int]()
        super().__init__(directory, ETCD_SERVERS, arguments=ELECTION, peer_host=peer_host)

    def start(self, number: int = 0, *, wait: bool = False) -> None:
        if number not in self._listens:
            self._listens.add(number)
            self._listen(number, self._peers[number])
        super().start(number, wait=wait)


class EtcdNode:
    """One server of a real etcd that is in the place of the metadata service."""

    def __init__(self, servers: EtcdServers, number: int) -> None:
        self.name = f"metadata-{number}"
        self.servers, self.number = servers, number

    @property
    def port(self) -> int:
        return self.servers.ports[self.number]

    @property
    def pid(self) -> int:
        return self.servers.pid_of(self.number)

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    @property
    def is_running(self) -> bool:
        return self.servers.is_running(self.number)

    @property
    def leads(self) -> bool:
        return self.is_running and self.servers.leads(self.number, LEADER_ASKED_S)

    def start(self) -> None:
        self.servers.start(self.number)

    def wait_ready(self) -> None:
        """Until all that run answer."""
        self.servers.wait_ready()

    def kill(self) -> None:
        self.servers.kill(self.number)

    def freeze(self) -> None:
        _signal(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        _signal(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """In order."""
        self.thaw()
        self.servers.terminate(self.number)

    def at(self, host: str) -> str:
        """All of them."""
        return f"etcd://{','.join(f'{host}:{port}' for port in self.servers.ports)}/magnetar"

    @property
    def stderr_path(self) -> Path:
        return self.servers.directory / f"log{self.number}"

    def output(self) -> str:
        return self.servers.output(self.number)


Target = Node | ZookeeperNode | EtcdNode
