"""The processes of a cluster under faults: one interface for Magnetar's own and for a ZooKeeper."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from magnetar.cli.common.processes import Process
from tests.chaos.processes.unsynced import UNDO
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

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def at(self, host: str) -> str:
        """What --metadata says of it, when it is the metadata service and is reached by that host."""
        return f"{host}:{self.port}"


class ZookeeperNode(ZookeeperServer):
    """A real ZooKeeper in the place of the metadata service."""

    name = "metadata"

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


Target = Node | ZookeeperNode
