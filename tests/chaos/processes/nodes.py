"""The processes of a cluster under faults: one interface for Magnetar's own, for a ZooKeeper and for an etcd."""

import contextlib
import os
import re
import signal
from pathlib import Path

from magnetar.cli.common.processes import Process
from tests.chaos.processes.unsynced import UNDO
from tests.support.children import pids
from tests.support.etcd import EtcdCluster
from tests.support.zookeeper import JUTE_MAXBUFFER, ZookeeperServer

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


class EtcdNode(EtcdCluster):
    """A real etcd of one server in the place of the metadata service."""

    name = "metadata"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync=True)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    @property
    def pid(self) -> int:
        return self.pid_of(0)

    @property
    def is_running(self) -> bool:
        process = self._processes[0]
        return process is not None and process.poll() is None

    def start(self, number: int = 0, *, wait: bool = False) -> None:
        super().start(number, wait=wait)

    def freeze(self) -> None:
        self.pause(0)

    def thaw(self) -> None:
        self.resume(0)

    def stop(self) -> None:
        """In order."""
        self.thaw()
        self.terminate(0)

    def at(self, host: str) -> str:
        return f"etcd://{host}:{self.port}/magnetar"

    @property
    def stderr_path(self) -> Path:
        return self.directory / "log0"

    def output(self, number: int = 0) -> str:
        return super().output(number)


Target = Node | ZookeeperNode | EtcdNode
