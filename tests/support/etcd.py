"""Real etcd servers on loopback, for tests: one, or a cluster of three.

    with EtcdCluster(tmp_path / "etcd", servers=3) as cluster:   # started, and has a leader, when this returns
        store = await connect_metadata_at(world, parse_address(cluster.url))
        cluster.kill(cluster.leader()); cluster.start(0)         # kill -9, and back on the same ports and data
        cluster.pause(1); cluster.resume(1)                      # SIGSTOP, SIGCONT

A server dies with the thread that started it, so start it from the main one.
"""

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from magnetar.cli.common.processes import add_parent_death_signal, find_free_port
from magnetar.runtime.access import TlsFiles
from tests.support.debian import can_install

WHAT_TO_INSTALL = "etcd is missing: apt-get install etcd-server (`python -m tests.etcd` does it as root)"
REQUIRED = "MAGNETAR_TEST_ETCD"
READY_TIMEOUT_S = 60.0


def why_no_etcd() -> str | None:
    """None when a server can be started here; else one line that says what is missing. Also None where it must be here:
    in CI (REQUIRED) where `python -m tests.etcd` can install it. The tests then fail, and are not skipped."""
    is_required = os.environ.get(REQUIRED) == "1" and can_install()
    return None if is_required or shutil.which("etcd") else WHAT_TO_INSTALL


class EtcdCluster:
    """Starts at once. Servers are named by their number."""

    def __init__(
        self, directory: Path, servers: int = 1, *, arguments: tuple[str, ...] = (), tls: TlsFiles | None = None,
        sync: bool = False, peer_host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        """`tls`: clients use it, and need no certificate. `sync`: writes are synced to the disk, which kill -9 does not
        ask for. `peer_host`: where the servers look for each other, such as a proxy at the same ports."""
        assert shutil.which("etcd"), WHAT_TO_INSTALL
        self.directory = directory
        self.ports = [find_free_port("127.0.0.1") for _ in range(servers)]
        self._peers = [find_free_port("127.0.0.1", peer_host) for _ in range(servers)]
        self._peer_host = peer_host
        self._arguments = arguments if sync else (*arguments, "--unsafe-no-fsync")
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * servers
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(servers):
            self.start(number, wait=False)
        self.wait_ready()

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def url(self) -> str:
        """For --metadata; each path below it is a tree of its own."""
        return f"etcd://{self.hosts}/magnetar"

    def start(self, number: int = 0, *, wait: bool = True) -> None:
        scheme = "http" if self._tls is None else "https"
        client, peer = (f"{scheme}://127.0.0.1:{self.ports[number]}", f"http://127.0.0.1:{self._peers[number]}")
        all_of_them = ",".join(f"m{at}=http://{self._peer_host}:{port}" for at, port in enumerate(self._peers))
        secured = () if self._tls is None else ("--cert-file", self._tls.certificate, "--key-file", self._tls.key)
        command = [
            "etcd", "--name", f"m{number}", "--data-dir", str(self.directory / f"m{number}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", f"http://{self._peer_host}:{self._peers[number]}",
            "--initial-cluster", all_of_them, "--initial-cluster-state", "new", "--log-level", "warn",
            *secured, *self._arguments,
        ]  # fmt: skip
        with (self.directory / f"log{number}").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                add_parent_death_signal(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Returns when each server that runs answers a linearizable read."""
        end = time.monotonic() + READY_TIMEOUT_S
        for number, process in enumerate(self._processes):
            while process is not None and process.poll() is None:
                try:
                    self.ask(number, "kv/range", {"key": "AA=="})
                    break
                except OSError:
                    assert time.monotonic() < end, f"etcd does not answer:\n{self.output(number)}"
                    time.sleep(0.05)
            assert process is None or process.poll() is None, f"etcd ended:\n{self.output(number)}"

    def output(self, number: int) -> str:
        return (self.directory / f"log{number}").read_text(errors="replace")

    def ask(
        self, number: int, path: str, question: dict[str, Any], timeout_s: float = 5.0, *, token: str = ""
    ) -> dict[str, Any]:
        """Asks by etcd's JSON over HTTP: bytes are base64, numbers are texts. `token`: of a user. Raises OSError if it
        does not answer."""
        scheme, context = "http", None
        if self._tls is not None:
            scheme, context = "https", ssl.create_default_context(cafile=self._tls.ca)
        request = urllib.request.Request(
            f"{scheme}://127.0.0.1:{self.ports[number]}/v3/{path}", json.dumps(question).encode(),
            {"Authorization": token} if token else {},
        )
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def make_room(self, revision: int) -> None:
        """Ends the alarm NOSPACE of the only server as docs/operations.md tells an operator: what was deleted before
        `revision` makes room."""
        self.ask(0, "kv/compaction", {"revision": str(revision), "physical": True})
        self.ask(0, "maintenance/defragment", {}, 30.0)
        (alarm,) = self.ask(0, "maintenance/alarm", {})["alarms"]
        self.ask(0, "maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def set_full(self, full: bool) -> None:
        """Raises or ends the alarm NOSPACE, as if the first server had no space. OSError if there is no answer."""
        number = next((number for number in range(len(self.ports)) if self.is_running(number)), 0)
        members = self.ask(number, "cluster/member/list", {})["members"]
        first = min(each["ID"] for each in members)
        action = "ACTIVATE" if full else "DEACTIVATE"
        self.ask(number, "maintenance/alarm", {"action": action, "memberID": first, "alarm": "NOSPACE"})

    def leader(self) -> int:
        """Returns the number of the leader. Waits until there is one."""
        end = time.monotonic() + READY_TIMEOUT_S
        while True:
            for number, process in enumerate(self._processes):
                if process is None or process.poll() is not None:
                    continue
                if self.leads(number):
                    return number
            assert time.monotonic() < end, "no leader"
            time.sleep(0.05)

    def leads(self, number: int, timeout_s: float = 5.0) -> bool:
        """Returns whether this server says that it is the leader. One that has been cut off says so for a while."""
        try:
            found = self.ask(number, "maintenance/status", {}, timeout_s)
        except OSError:
            return False
        return bool(found.get("leader") == found["header"]["member_id"])

    def is_running(self, number: int) -> bool:
        process = self._processes[number]
        return process is not None and process.poll() is None

    def pid_of(self, number: int) -> int:
        process = self._processes[number]
        assert process is not None, "it runs"
        return process.pid

    def pause(self, number: int) -> None:
        """Returns when each of its threads stands still: until then one may still answer."""
        os.kill(self.pid_of(number), signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid_of(number), os.WSTOPPED | os.WNOWAIT)

    def resume(self, number: int) -> None:
        os.kill(self.pid_of(number), signal.SIGCONT)

    def kill(self, number: int = 0) -> None:
        """kill -9, and wait until it is gone."""
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait()

    def terminate(self, number: int) -> None:
        """SIGTERM, and wait until it is gone; kill -9 after ten seconds."""
        process = self._processes[number]
        if process is not None:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.kill(number)

    def close(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
