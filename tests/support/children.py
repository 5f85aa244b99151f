"""The processes of a server with `--processes N`, as tests see them: their names are those on the lines of the log."""

import time
from contextlib import suppress
from pathlib import Path

from magnetar.cli.common.processes import Process

WAIT_S = 30.0


def pids(parent: int) -> list[int]:
    """Of the children of a process, the oldest first; none of one that has just ended."""
    try:
        return sorted(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
    except OSError:
        return []


def children(server: Process) -> dict[str, int]:
    """Name → pid: a process is called in /proc by its name."""
    found = {}
    for pid in pids(server.pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended since
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
    return found


def wait_another(server: Process, name: str, pid: int) -> dict[str, int]:
    """Until a process of that name runs that is another one; all of them then."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = children(server)
        if found.get(name, pid) != pid:
            return found
        time.sleep(0.02)
    raise AssertionError(f"process {name} was not started again within {WAIT_S:g} s\n{server.output()}")


def is_gone(pid: int) -> bool:
    """It has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.02)
