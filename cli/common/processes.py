"""Starts real `magnetar …` processes on this machine, waits for them, kills them by pid, and ends all of them in
`close`.

For the demo and the tests. Everything listens on loopback, at ports that no connection takes while a process is away.
A process dies with the thread that started it (so start from the main one), and `close` ends those that still run.
Output is collected: stdout line by line, stderr in a file beside the data.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PORT_RANGE = range(20_000, 32_000)  # below those that Linux gives to programs that ask for any, and to connections
PORT_ATTEMPTS = 1000


class ProcessNotReady(Exception):
    """Raised when a process ended, or did not print its ready line in time. The text of the error contains the output
    of the process."""


def find_free_port(*hosts: str, count: int = 1) -> int:
    """Returns a random port of PORT_RANGE that is free at all addresses in `hosts`. With `count`, the `count - 1` ports
    after it are free too. Ports that the system chooses are not used, because the system could give such a port to
    another program while its server is stopped. Raises OSError if no such port is found, for example because an address
    does not belong to this machine."""
    for port in random.SystemRandom().sample(PORT_RANGE, PORT_ATTEMPTS):
        if all(_is_free(host, port + number) for host in hosts for number in range(count)):
            return port
    raise OSError(f"no free port at {', '.join(hosts)}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


_FOLLOW = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL; it survives the exec
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def add_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Returns the command, changed so that its process gets SIGKILL when the thread that started it ends for any reason
    (Linux only). Runs no Python code between fork and exec, because a library with threads (gRPC) may crash there."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid()), *command]


def _with_ports(arguments: Sequence[str]) -> list[str]:
    """Replaces each port 0 of `--listen HOST:0` and `--port 0` by a free port."""
    found = list(arguments)
    for at, (before, argument) in enumerate(pairwise(arguments), start=1):
        host, _, port = argument.rpartition(":")
        if port == "0" and before == ("--listen" if host else "--port"):
            found[at] = argument[:-1] + str(find_free_port(host or "127.0.0.1"))
    return found


class Process:
    """A process that runs `magnetar ARGUMENTS…` in `directory`, where its stderr is stored. It starts when the object
    is made; `wait_ready` waits until it serves. A port 0 in `--listen` or `--port` is replaced by a free port, which
    stays the same when the process is started again. `module`: the Python module that the process runs."""

    module = "magnetar.cli.main"

    def __init__(
        self, name: str, arguments: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.arguments, self.directory = name, _with_ports(arguments), directory
        self.environment = dict(environment or {})
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Starts the process and returns at once. After the process has ended, it can be started again with the same
        arguments; the lines of its former stdout are dropped."""
        assert self._process is None or self._process.poll() is not None, f"{self.name} runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lines = []
        self._ready = threading.Event()
        with self.stderr_path.open("ab") as stderr:
            self._process = subprocess.Popen(
                add_parent_death_signal([sys.executable, "-m", self.module, *self.arguments]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=self.directory,
                env={**os.environ, **self.environment},
            )
        self._reader = threading.Thread(target=self._read, args=(self._process, self.lines, self._ready), daemon=True)
        self._reader.start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: list[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                ready.set()
        process.stdout.close()
        ready.set()

    @property
    def pid(self) -> int:
        """Returns the id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def stderr_path(self) -> Path:
        """Returns the path of the file to which the process's stderr is appended."""
        return self.directory / f"{self.name}.stderr"

    @property
    def is_running(self) -> bool:
        """Returns whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """Waits for the ready line and returns its URL. Raises ProcessNotReady if the process ends first, or after
        `timeout_s` seconds."""
        self._ready.wait(timeout_s)
        for line in self.lines:
            if line.startswith("ready "):
                return line.split()[1]
        raise ProcessNotReady(f"{self.name} did not become ready\n{self.output()}")

    @property
    def address(self) -> str:
        """Returns HOST:PORT from the URL of the ready line, for which it waits as `wait_ready` does, with its
        errors."""
        return self.wait_ready().partition("://")[2]

    def output(self) -> str:
        """Returns everything that the process has printed so far, on stdout and stderr."""
        errors = self.stderr_path.read_text(errors="replace") if self.stderr_path.exists() else ""
        return "\n".join([*self.lines, errors])

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until the process ends and returns its exit code; a negative number is the signal that killed the
        process. Raises subprocess.TimeoutExpired after `timeout_s` seconds."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """Kills the process at once, as `kill -9` does, and waits until it has ended. Does nothing if it has ended
        already."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def send_signal(self, number: int) -> None:
        """Sends the signal with this number to the process. Does nothing if the process has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> int:
        """Sends SIGTERM to the process and waits for its end; kills the process if it does not end within
        STOP_TIMEOUT_S seconds. Returns its exit code. May be called when the process has ended."""
        assert self._process is not None
        if self.is_running:
            self._process.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


class Processes:
    """A group of processes with one directory. At the end of the `with` block, all of them are stopped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Process] = []

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        """Starts a process and returns it without waiting until it is ready. `arguments`: those of `magnetar`."""
        process = Process(name, arguments, self.directory, environment)
        self.started.append(process)
        return process

    def close(self) -> None:
        """Stops the processes, the last started one first, so that clients end before their servers."""
        for process in reversed(self.started):
            if process.is_running:
                process.stop()
        self.started.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Cluster(Processes):
    """A cluster on the loopback address, with a metadata service, bookies and brokers as separate processes, like the
    one in docker-compose.yml."""

    def __init__(
        self, directory: Path, *, bookies: int = 3, brokers: int = 2, session_timeout_s: float | None = None,
        security: str = "",
    ) -> None:  # fmt: skip
        """Starts a cluster and returns when all its processes are ready. `security`: the settings file of all processes
        (`magnetar security init`); empty: everything is in clear. Raises ProcessNotReady, after stopping what was
        started, if a process does not become ready."""
        super().__init__(directory)
        self._environment = {"MAGNETAR_SECURITY": security} if security else {}
        try:
            self._start(bookies, brokers, session_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, bookies: int, brokers: int, session_timeout_s: float | None) -> None:
        listen = ("--listen", "127.0.0.1:0")
        self.metadata = self.start("metadata", "metadata", *listen, "--data", str(self.directory / "metadata"))
        where = ["--metadata", self.metadata.address]
        if session_timeout_s is not None:
            where += ["--session-timeout", str(session_timeout_s)]
        self.bookies = [
            self.start(f"bookie-{i}", "bookie", *listen, *where, "--data", str(self.directory / f"bookie-{i}"))
            for i in range(bookies)
        ]
        for bookie in self.bookies:
            bookie.wait_ready()
        self.brokers = [self.start(f"broker-{i}", "broker", *listen, *where) for i in range(brokers)]
        for broker in self.brokers:
            broker.wait_ready()

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        """Starts one more process and returns it, as `Processes.start` does. The process gets the security settings of
        the cluster."""
        return super().start(name, *arguments, environment={**self._environment, **(environment or {})})

    @property
    def url(self) -> str:
        """Returns the service URL for clients, which names all brokers. Raises the errors of `Process.wait_ready`."""
        scheme = "magnetar+ssl" if self._environment else "magnetar"
        return f"{scheme}://" + ",".join(broker.address for broker in self.brokers)
