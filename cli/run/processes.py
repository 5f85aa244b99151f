"""`--processes N` of `magnetar standalone`, `broker` and `bookie`: several processes as one server, on one machine.

    N is checked → the folder is locked → ports are reserved → everything is imported → the parent forks

A *reserved* port is bound here, not listened at, for as long as the server lives: the process that serves there may be
started again, and meanwhile the system gives the port to no other one, not even to a connection that a client opens.
runtime/ has the parent, and what happens when a process ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..common.exits import NOT_AVAILABLE, Failure, run_reporting_errors
from .metrics import ProcessOutput, print_ready
from .servers import run_server

if TYPE_CHECKING:
    from ...runtime.child import Child
    from ...runtime.files import File
    from ...runtime.network import Endpoint, World
    from ...runtime.parent import ProcessSpec

PROCESSES_MAX = 64
"""Most processes, more than a machine has cores for; each has its own memory and connections."""
WAIT_S = 1.0
"""Seconds for the processes of a server whose parent was killed to end with it: milliseconds, on a busy machine more.
"""
T = TypeVar("T")

Main = Callable[["World", ProcessOutput], Any]


def processes_option(help: str, default: int | None = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--processes", "processes_", type=click.IntRange(1, PROCESSES_MAX), default=default, metavar="N", help=help,
        show_default=default is not None,
    )  # fmt: skip


def check_fork() -> None:
    if not hasattr(os, "fork"):
        raise Failure("--processes needs a system that forks processes: Linux or macOS", NOT_AVAILABLE)


class Ports:
    """The ports that the server reserves until it ends."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, where: Endpoint) -> Endpoint:
        """Reserves the port of an address, a free one if it is 0; returns the address with that port. Raises Busy."""
        from ...proto.errors import Busy

        def bound() -> socket.socket:
            found = socket.socket(socket.AF_INET6 if ":" in where.host else socket.AF_INET)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind((where.host, where.port))
            except OSError as error:
                found.close()
                raise Busy(f"cannot listen on {where}: the port is taken or not ours", endpoint=where) from error
            return found

        self._held.append(_after_the_last_one(bound))
        return where._replace(port=self._held[-1].getsockname()[1])


def address_of_process(where: Endpoint, number: int, *, forwarded: bool = False) -> Endpoint:
    """Returns where process `number`, from 0, listens. On loopback, and for port 0, at a free port; elsewhere at the
    ports after that of the first process. So it does also if an advertised address is `forwarded` to it, because the
    port must be known in advance. Raises InvalidConfiguration."""
    from ...proto.errors import InvalidConfiguration

    if not number or not where.port:
        return where
    if where.is_loopback and not forwarded:
        return where._replace(port=0)
    if where.port + number > 65535:
        raise InvalidConfiguration(f"process {number + 1} would listen at port {where.port + number}: there is none")
    return where._replace(port=where.port + number)


def lock_folder(folder: str) -> File:
    """Locks the folder for the parent and all its processes; returns the lock file. Raises Busy."""
    from ...bookie.store.identity import lock_directory
    from ...runtime.disk import SystemFiles

    return _after_the_last_one(lambda: lock_directory(SystemFiles(), folder))


def _after_the_last_one(take: Callable[[], T]) -> T:
    """Returns what `take` returns, as soon as the processes of an earlier server whose parent was killed have ended.
    Raises Busy."""
    from ...proto.errors import Busy
    from ...runtime.clock import SystemClock

    now = SystemClock().monotonic
    deadline = now() + WAIT_S
    while True:
        try:
            return take()
        except Busy:
            if now() >= deadline:
                raise
        time.sleep(0.05)


def preload_modules(*modules: str) -> None:
    """Imports modules that the processes will use, so that they share the memory. `modules`: of this package;
    LIBRARIES are imported as well."""
    for name in (*LIBRARIES, *(f"{__package__.partition('.')[0]}.{each}" for each in modules)):
        import_module(name)


LIBRARIES = ("uvloop", "zmq", "ssl", "asyncio.runners")


def make_spec(
    name: str, main: Main, log_level: str, log_format: Any, *, shows: bool = False, health: Endpoint | None = None
) -> ProcessSpec:
    """Returns the description of a process in which `main(world, voice)` serves until it is cancelled. `shows`: its
    page contains the metrics of all processes. `health`: where it answers probes."""
    from ...runtime.parent import ProcessSpec

    def work(child: Child) -> int:
        voice = ProcessOutput(child, shows=shows)
        return run_reporting_errors(
            lambda: run_server(lambda world: main(world, voice), log_level, log_format, voice, health)
        )

    return ProcessSpec(name, work)


def run_process_tiers(
    tiers: Sequence[Sequence[ProcessSpec]], said: Callable[[dict[str, dict[str, str]]], tuple[str, Mapping[str,
    object]]],
    log_level: str, log_format: Any,
) -> int:  # fmt: skip
    """Runs the processes until the server ends; returns its exit code. `said`: makes the ready line of the facts that
    each process reports."""
    from ...runtime import logs
    from ...runtime.parent import Parent

    def on_serve(facts: dict[str, dict[str, str]]) -> None:
        url, shown = said(facts)
        print_ready(url, **shown)

    logs.configure_logging(log_format, log_level, process="parent")
    return Parent(tiers, on_serve).run()
