"""The loop thread of the blocking face ends before the interpreter: no daemon thread is killed inside compiled code."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from magnetar.client.blocking import loop_thread

ORDER = """
import asyncio, atexit, threading
from magnetar.client.blocking import loop_thread
from magnetar.client.common.errors import AlreadyClosed

def last():
    print([thread.name for thread in threading.enumerate() if thread.name == "magnetar-client"])
    for call in (thread.run, thread.run_uninterrupted, thread.submit):
        try:
            call(asyncio.sleep(0))
        except AlreadyClosed as error:
            print("AlreadyClosed:", error)

atexit.register(last)
thread = loop_thread.shared_loop_thread()
atexit.register(lambda: print("before the end:", thread.run(asyncio.sleep(0, "it runs"))))
"""

FORK = """
import asyncio, os, sys
from magnetar.client.blocking import loop_thread

loop_thread.shared_loop_thread().run(asyncio.sleep(0))
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def _run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_thread_has_ended_when_the_interpreter_does_and_later_calls_fail_at_once() -> None:
    assert _run(ORDER) == [
        "before the end: it runs",
        "[]",
        *["AlreadyClosed: the interpreter is ending; close clients before"] * 3,
    ]


def test_ctrl_c_while_the_event_loop_is_made_leaves_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pressed, make = list[asyncio.AbstractEventLoop](), threading.Event(), loop_thread._new_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        made.append(make())
        main = threading.main_thread().ident
        assert main is not None
        if not pressed.is_set():
            signal.pthread_kill(main, signal.SIGINT)
        pressed.wait(30)
        return made[-1]

    monkeypatch.setattr(loop_thread, "_thread", None)
    monkeypatch.setattr(loop_thread, "_new_loop", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop_thread.shared_loop_thread()
    finally:
        signal.signal(signal.SIGINT, before)
        pressed.set()
    thread = loop_thread.shared_loop_thread()
    assert thread.run(asyncio.sleep(0, "it runs")) == "it runs"
    assert made == [thread.loop]
    thread.stop()


def test_a_forked_child_does_not_wait_for_its_parents_thread() -> None:
    assert _run(FORK) == ["7"]


def test_the_administration_imports_no_part_of_the_sdk_that_sends_or_receives() -> None:
    program = """
import sys
import magnetar.client.admin
parts = ("client.client", "client.consume", "client.produce", "client.transactions", "client.blocking.faces")
print(*(name for name in sys.modules if name.removeprefix("magnetar.").startswith(parts)))
"""
    assert _run(program) == [""]
