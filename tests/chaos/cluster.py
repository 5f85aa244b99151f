"""A cluster of real processes that reach each other through a proxy, on disks that can lose what was not synced.

Every process listens on 127.0.0.1 and is advertised as 127.0.0.2, where the proxy (tests/chaos/proxy.py) listens at the
same port (Linux has all of 127/8); for the metadata each has an address of its own. So each pair has its link: client
to broker, broker to broker, broker to bookie, bookie to bookie, and all to the metadata. Who a connection comes from is
asked of /proc; "client" is this process.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from types import TracebackType

from magnetar.cli.processes import Process, Processes
from magnetar.runtime.network import Endpoint
from tests.chaos.full_disk import SETTINGS, small_disk
from tests.chaos.proxy import Proxy, owner_of
from tests.chaos.unsynced import LIES, UNDO, drop
from tests.house import ROOT
from tests.support.processes import run_cli

HERE, ADVERTISED = "127.0.0.1", "127.0.0.2"
SESSION_S = 2.0
SMALL_MIB = 256
READY_S = 180.0
"""Six processes that start at once on a busy machine take their time, and it is not what is looked at here."""


class Node(Process):
    """A process behind the proxy."""

    module = "tests.chaos.unsynced"
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


class ChaosCluster(Processes):
    def __init__(self, directory: Path, *, bookies: int = 4, brokers: int = 2, lies: bool = False) -> None:
        super().__init__(directory)
        self.lies = lies
        self.proxy = Proxy(self._source_of)
        self.proxy.__enter__()
        self.data: dict[str, Path] = {}
        self._disks = contextlib.ExitStack()
        self.small: Path | None = None  # the disk of bookie-0, where this user may mount one
        with contextlib.suppress(PermissionError):
            self.small = self._disks.enter_context(small_disk(directory, SMALL_MIB))
        self.config = directory / "magnetar.toml"
        self.config.write_text(SETTINGS)
        try:
            self.metadata = self.node("metadata", "metadata", "--data", str(directory / "metadata"))
            self.metadata.wait_ready()
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
            if process.running:
                process.thaw()
                process.kill()  # what is left is thrown away
        self.started.clear()
        self.proxy.__exit__(None, None, None)
        self._disks.close()

    @property
    def nodes(self) -> list[Node]:
        return [process for process in self.started if isinstance(process, Node)]

    @property
    def url(self) -> str:
        return "magnetar://" + ",".join(f"{ADVERTISED}:{broker.port}" for broker in self.brokers)

    def _where(self) -> tuple[str, ...]:
        return "--session-timeout", str(SESSION_S)

    def bookie(self, name: str, data: Path, port: int | None = None) -> Node:
        self.data[name] = data
        return self.node(name, "bookie", *self._where(), "--config", str(self.config), "--data", str(data), port=port)

    def node(self, name: str, role: str, *arguments: str, port: int | None = None) -> Node:
        """Starts it behind the proxy; at `port` when the proxy listens there already."""
        if port is None:
            port = _free_port()
            self.proxy.listen(Endpoint(ADVERTISED, port), Endpoint(HERE, port), name)
        where = ["--listen", f"{HERE}:{port}"]
        if role != "metadata":
            own = Endpoint(f"127.0.0.{3 + len(self.started)}", self.metadata.port)
            self.proxy.listen(own, Endpoint(HERE, self.metadata.port), self.metadata.name, name)
            where += ["--metadata", str(own)]
            where += ["--advertise", ADVERTISED if role == "bookie" else f"{ADVERTISED}:{port}"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path}
        if role == "bookie":
            environment[UNDO] = str(self.directory / f"{name}.undo")
            if self.lies:
                environment[LIES] = "1"
        node = Node(name, [role, *where, *arguments], self.directory, environment)
        node.port = port
        self.started.append(node)
        return node

    def _source_of(self, client: Endpoint, server: Endpoint) -> str:
        names = {node.pid: node.name for node in self.nodes if node.running} | {os.getpid(): "client"}
        return names.get(owner_of(client, server, names) or 0, "unknown")

    # ---------------------------------------------------------------------------------------- what may befall it
    def power_cut(self, rng: random.Random) -> int:
        """All at once; what bookies had not synced is gone. How many writes that were."""
        for node in self.nodes:
            os.kill(node.pid, signal.SIGKILL)
        for node in self.nodes:
            node.kill()
        return sum(drop(bookie.notes, rng) for bookie in self.bookies)

    def start_all(self) -> None:
        for node in (self.metadata, *self.bookies, *self.brokers):
            if not node.running:
                node.start()
                if node is self.metadata:
                    node.wait_ready()
        for node in (*self.bookies, *self.brokers):
            node.wait_ready()

    def wipe(self, bookie: Node) -> str:
        """Its directory is gone: it refuses to start, is forgotten, and comes back as another. The new id."""
        was = bookie.id
        bookie.kill()
        _empty(self.data[bookie.name])
        bookie.start()
        bookie.wait()
        assert "magnetar bookies forget" in bookie.output(), bookie.output()[-2000:]
        at = f"{HERE}:{self.metadata.port}"
        deadline = time.monotonic() + READY_S
        done = run_cli("bookies", "forget", was, "--metadata", at, "--yes")
        while "is registered" in done.err and time.monotonic() < deadline:  # until its session has ended
            time.sleep(0.2)
            done = run_cli("bookies", "forget", was, "--metadata", at, "--yes")
        assert done.code == 0, done.err
        bookie.start()
        assert bookie.id != was
        return bookie.id

    def replace(self, bookie: Node) -> Node:
        """An empty bookie takes its port; it itself goes on elsewhere, with its data. The one that is elsewhere."""
        bookie.kill()
        number = sum(name.startswith(bookie.name) for name in self.data)
        data = self.data[bookie.name]
        self.data[bookie.name] = self.directory / f"{bookie.name}-empty-{number}"
        bookie.arguments = [str(self.data[bookie.name]) if each == str(data) else each for each in bookie.arguments]
        moved = self.bookie(f"{bookie.name}-moved-{number}", data)
        self.bookies.append(moved)
        bookie.start()
        for each in (bookie, moved):
            each.wait_ready()
        return moved


def fill(disk: Path) -> Path:
    """Until nothing more goes on it; the file to remove."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return filler


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADVERTISED, 0))
        return int(probe.getsockname()[1])
