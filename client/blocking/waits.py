"""Waits of an application's thread that Ctrl-C always ends, as `CtrlC`: Pulsar's Interrupted and KeyboardInterrupt.

A signal that arrives after the interpreter has checked signals and before the thread sleeps on its lock does not end
the sleep: its handler runs when the thread wakes for another reason. So no wait of ours lasts longer than LOOK_S at a
time. Guarded by tests/client/blocking/test_waking.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ...runtime.clock import SystemClock
from ..common.errors import CtrlC

T = TypeVar("T")

LOOK_S = 0.5
monotonic = SystemClock.monotonic
"""A thread of a program waits in the real world only."""


def acquire(gate: threading.Lock, deadline: float | None = None) -> bool:
    """Waits for the lock until `deadline` (monotonic seconds; None: no limit). False: it was not acquired in time."""
    while True:
        left = LOOK_S if deadline is None else min(LOOK_S, deadline - monotonic())
        if left <= 0:
            return False
        try:
            if gate.acquire(timeout=left):
                return True
        except KeyboardInterrupt as pressed:
            raise CtrlC("Ctrl-C while a call waited") from pressed


def result_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Returns the result like `future.result`. concurrent.futures.TimeoutError: there is none in time, or the work
    raised one."""
    deadline = None if timeout_s is None else monotonic() + timeout_s
    while True:
        left = LOOK_S if deadline is None else min(LOOK_S, deadline - monotonic())
        try:
            return future.result(max(0.0, left))
        except FutureTimeout:
            if future.done():
                return future.result()
            if deadline is not None and monotonic() >= deadline:
                raise
        except CtrlC:
            raise
        except KeyboardInterrupt as pressed:
            raise CtrlC("Ctrl-C while a call waited") from pressed
