"""Real processes of a parent: they are started again, and end with it, also when it is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import is_gone, pids, wait_gone

PROGRAM = """
import asyncio, os, signal, sys, time
from magnetar.runtime import parent as parents
from magnetar.runtime import schedule_core as schedule
from magnetar.runtime.parent import ParentProcess, ProcessSpec
from magnetar.runtime.parent import LinkFrame, LinkFrameKind, encode_frame
from magnetar.runtime.process import run_process

async def text(query):
    return query.encode() + b"page" * int(os.environ.get("TIMES", "1"))

async def serve(child):
    await child.attach(text)
    child.report_ready(url=child.name)
    if child.name == "asker":
        await asyncio.sleep(0.2)
        others = await child.ask_metrics_of_others()
        pages = sorted((name, page.decode()) for name, page in others.pages.items())
        print("pages", pages, others.restarts, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("stopped", child.name, flush=True)
        await child.detach()

def sound(child):
    return run_process(lambda: serve(child), (signal.SIGTERM,))

def broken(child):
    return 5

def deaf(child):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run_process(lambda: serve(child), ())

def stuck(child):
    child._link.sendall(encode_frame(LinkFrame(LinkFrameKind.READY, 0, b"{}")))
    time.sleep(1000)

def raises(child):
    raise RuntimeError("a bug")

schedule.CHILD_STOP_TIMEOUT_S = 0.5
kinds = {"sound": sound, "asker": sound, "broken": broken, "deaf": deaf, "stuck": stuck, "raises": raises}
tiers = [[ProcessSpec(name, kinds[name.partition("-")[0]]) for name in tier.split(",")] for tier in sys.argv[1:]]
sys.exit(ParentProcess(tiers, lambda facts: print("ready", *sorted(facts), flush=True)).run())
"""

pytestmark = pytest.mark.processes
WAIT_S = 30.0


@contextmanager
def parent(*tiers: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, *tiers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _wait_pids(process: subprocess.Popen[str], count: int, without: int) -> list[int]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = [pid for pid in pids(process.pid) if not is_gone(pid)]
        if len(found) == count and without not in found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"there are not {count} processes")


def test_a_killed_process_is_started_again_and_the_others_go_on() -> None:
    with parent("sound-1", "sound-2,sound-3") as process:
        assert _line(process) == "ready sound-1 sound-2 sound-3"
        first, second, third = pids(process.pid)
        os.kill(second, signal.SIGKILL)
        after = _wait_pids(process, 3, second)
        assert {first, third} < set(after)
        process.terminate()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "stopped sound-3" in out
    assert out.splitlines()[-1] == "stopped sound-1", "the last tier ends first"
    assert f"process sound-2 ({second}) ended with signal 9: it begins again in 0 s" in err


def test_one_that_is_told_to_end_alone_ends_in_order_and_is_started_again() -> None:
    with parent("sound-1,sound-2") as process:
        assert _line(process) == "ready sound-1 sound-2"
        first, second = pids(process.pid)
        os.kill(first, signal.SIGTERM)
        assert _line(process) == "stopped sound-1"
        assert second in _wait_pids(process, 2, first)


@pytest.mark.parametrize(("kind", "code", "text"), [("broken", 5, ""), ("raises", 1, "RuntimeError: a bug")])
def test_one_that_cannot_start_ends_all_with_its_code(kind: str, code: int, text: str) -> None:
    with parent("sound-1", f"sound-2,{kind}") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert "ready" not in out
    assert "stopped sound-1" in out
    assert text in err


def test_where_the_system_has_no_room_for_a_process_it_is_started_later_and_at_the_beginning_all_ends() -> None:
    full = """
class Full:
    left, fork = int(os.environ["ROOM"]), staticmethod(os.fork)
    def __call__(self):
        self.left -= 1
        if self.left in (-1, -2):
            raise BlockingIOError(11, "no room")
        return self.fork()
os.fork = Full()
schedule.RESTART_PAUSE_MIN_S = 0.1
schedule.CHILD_STOP_TIMEOUT_S"""
    command = [sys.executable, "-c", PROGRAM.replace("schedule.CHILD_STOP_TIMEOUT_S", full, 1), "sound-1,sound-2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, "ROOM": "2"}) as process:
        assert _line(process) == "ready sound-1 sound-2"
        first, second = pids(process.pid)
        os.kill(second, signal.SIGKILL)
        assert first in _wait_pids(process, 2, second)
        process.terminate()
        _, err = process.communicate(timeout=WAIT_S)
    assert err.count("process sound-2 could not be started: [Errno 11] no room") == 2
    for room in ("0", "1"):
        with subprocess.Popen(command, **pipes, env={**os.environ, "ROOM": room}) as process:
            out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, "ready" in out, "Traceback" in err) == (1, False, False)


def test_a_killed_parent_takes_its_processes_with_it_also_one_that_is_stuck() -> None:
    with parent("sound-1,stuck-2") as process:
        assert _line(process) == "ready sound-1 stuck-2"
        theirs = pids(process.pid)
        process.kill()
        wait_gone(*theirs)


def test_a_process_that_its_parent_left_ends_when_it_sees_the_end_of_its_link() -> None:
    """Where the system does not kill it: without PR_SET_PDEATHSIG."""
    program = PROGRAM.replace(
        "schedule.CHILD_STOP_TIMEOUT_S", "parents._die_with = lambda parent: None\nschedule.CHILD_STOP_TIMEOUT_S"
    )
    command = [sys.executable, "-c", program, "sound-1,sound-2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert _line(process) == "ready sound-1 sound-2"
        theirs = pids(process.pid)
        process.kill()
        wait_gone(*theirs)


def _wait_silent(systemd: socket.socket) -> None:
    """Returns when nothing was said for a while, thirty times the usual pause."""
    systemd.settimeout(1.5)
    try:
        for _ in range(600):
            assert systemd.recv(100) == b"WATCHDOG=1"
    except TimeoutError:
        systemd.settimeout(WAIT_S)
        return
    raise AssertionError("it is told all the time")


@contextmanager
def watched_parent(socket_path: Path, *tiers: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A parent with quick beats under a systemd that waits for them, and the socket that hears them."""
    quick = """
parents.BEAT_INTERVAL_S = 0.05
parents.HUNG_AFTER_S = 0.5
schedule.CHILD_STOP_TIMEOUT_S"""
    command = [sys.executable, "-c", PROGRAM.replace("schedule.CHILD_STOP_TIMEOUT_S", quick, 1), *tiers]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = {"NOTIFY_SOCKET": str(socket_path), "WATCHDOG_USEC": "1000000"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, ExitStack() as stack:
        systemd.bind(given["NOTIFY_SOCKET"])
        systemd.settimeout(WAIT_S)
        process = stack.enter_context(subprocess.Popen(command, **pipes, env={**os.environ, **given}))
        stack.callback(process.kill)  # what fails here leaves nothing to wait for
        yield process, systemd


def test_systemds_watchdog_is_not_told_while_the_loop_of_one_process_hangs(tmp_path: Path) -> None:
    with watched_parent(tmp_path / "notify", "sound-1,sound-2") as (process, systemd):
        assert _line(process) == "ready sound-1 sound-2"
        second = pids(process.pid)[1]
        os.kill(second, signal.SIGSTOP)
        try:
            _wait_silent(systemd)
        finally:
            os.kill(second, signal.SIGCONT)
        assert systemd.recv(100) == b"WATCHDOG=1"
        process.terminate()
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert err.count("the event loop of process sound-2 has not run for 0.5 s") == 1


def test_systemds_watchdog_hears_of_a_process_that_hangs_before_its_first_beat(tmp_path: Path) -> None:
    with watched_parent(tmp_path / "notify", "sound-1,stuck-2") as (process, systemd):
        assert _line(process) == "ready sound-1 stuck-2"
        _wait_silent(systemd)


def test_one_that_does_not_end_in_time_is_killed() -> None:
    with parent("sound-1,deaf-2") as process:
        assert _line(process) == "ready deaf-2 sound-1"
        process.terminate()
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "process deaf-2 did not end in time: it is killed" in err


def test_ctrl_c_of_a_terminal_reaches_all_and_ends_them_in_their_order() -> None:
    command = [sys.executable, "-c", PROGRAM, "sound-1", "sound-2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert _line(process) == "ready sound-1 sound-2"
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert out.splitlines() == ["stopped sound-2", "stopped sound-1"]


def test_one_process_has_the_pages_of_the_others_and_how_often_each_was_started_again() -> None:
    with parent("sound-1", "asker,sound-2") as process:
        assert _line(process) == "ready asker sound-1 sound-2"
        pages = [("sound-1", "page"), ("sound-2", "page")]
        assert _line(process) == f"pages {pages} {dict.fromkeys(('sound-1', 'asker', 'sound-2'), 0)}"


def test_a_page_of_megabytes_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMES", str(2 << 20))
    with parent("sound-1,asker") as process:
        assert _line(process) == "ready asker sound-1"
        assert len(_line(process)) > 8 << 20
