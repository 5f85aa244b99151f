"""The event loop of the blocking clients: one daemon thread per process, shared by all clients, started when first
needed (`LoopThread`). It imports nothing of the SDK but its errors, so that a command that administers starts soon.

A forked child has none of its parent's threads: it makes itself a new one (client/common/closing.py).

The thread ends before the interpreter does. CPython kills a daemon thread where it next asks for the interpreter lock,
which for this one is inside compiled code of the event loop or of gRPC: the process then dies of a segmentation fault,
after its work, with a wrong exit code. Guarded by tests/client/blocking/test_loop_thread.py.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, TypeVar

from ...runtime.clock import SystemClock
from ...runtime.tasks import Tasks
from ..common.errors import AlreadyClosed, CtrlC, Interrupted, PulsarException, Timeout

# --------------------------------------------------------------------------------------------------------- waits
# Waits of an application's thread that Ctrl-C always ends, as `CtrlC`: Pulsar's Interrupted and KeyboardInterrupt.
#
# A signal that arrives after the interpreter has checked signals and before the thread sleeps on its lock does not end
# the sleep: its handler runs when the thread wakes for another reason. So no wait of ours lasts longer than LOOK_S at a
# time. Guarded by tests/client/blocking/test_waking.py.


T = TypeVar("T")

LOOK_S = 0.5
monotonic = SystemClock.monotonic
"""A thread of a program waits in the real world only."""


def acquire_lock(gate: threading.Lock, deadline: float | None = None) -> bool:
    """Waits for the lock until `deadline` (monotonic seconds; None: no limit). Returns whether it was acquired. Raises
    CtrlC."""
    while True:
        left = LOOK_S if deadline is None else min(LOOK_S, deadline - monotonic())
        if left <= 0:
            return False
        try:
            if gate.acquire(timeout=left):
                return True
        except KeyboardInterrupt as pressed:
            raise CtrlC("Ctrl-C while a call waited") from pressed


def wait_result(future: Future[T], timeout_s: float | None = None) -> T:
    """Waits for `future` and returns its result, as `future.result` does. Raises concurrent.futures.TimeoutError if
    there is no result within `timeout_s`, or if the work raised that."""
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


# --------------------------------------------------------------------------------------------------- loop_thread


_LOG = logging.getLogger("magnetar.client")

END_S = 5.0
"""Seconds that the end of the interpreter waits for the thread; a callback of the user's may be running in it."""


class LoopThread:
    """The thread of the event loop that all blocking clients of a process share."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="magnetar-client", daemon=True)
        self._thread.start()
        self.ident = self._thread.ident  # of the loop's own thread: there nothing may wait
        self._ended = False
        self._tasks = Tasks()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stops the loop and waits for the thread. Registered with `atexit` by the first client, so that functions
        that a program registers later still find the loop running."""
        if self._ended or _thread is not self:  # `is not self`: in a forked child, which has no such thread
            return
        self._ended = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):  # of a callback: it ends a program from the main thread alone
                _LOG.exception("a callback raised what would end a program; the client goes on")

    def is_current(self) -> bool:
        """Whether the calling thread is the loop's own, where no call may block."""
        return threading.get_ident() == self.ident

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs the coroutine in the loop, waits and returns its result. Raises Interrupted if called from a callback
        in the loop's thread, where the wait would never end.

        Raises AlreadyClosed if the interpreter is ending.
        """
        if self.is_current():
            coroutine.close()
            raise Interrupted("a blocking call inside a callback would wait for itself; use send_async there")
        if self._ended:
            coroutine.close()
            raise AlreadyClosed("the interpreter is ending; close clients before")
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return wait_result(future, timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise Timeout(f"no answer within {timeout_s:g} s") from None
        except BaseException:
            future.cancel()
            raise

    def run_uninterrupted(self, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        """Runs `work` in the loop and waits for its outcome, also if the calling thread is interrupted in the
        meantime."""
        if self.is_current():
            work.close()
            raise Interrupted("a transaction ended inside a callback would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            wait_result(future, limit_s)
        except BaseException as error:
            if isinstance(error, PulsarException) and not isinstance(error, CtrlC):
                raise
            if not future.done():
                with suppress(PulsarException):
                    wait_result(future, limit_s)
            raise

    def start_soon(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts the coroutine in the loop, from any thread, without waiting. Does nothing if the interpreter is
        ending."""
        if self._ended:
            coroutine.close()
        else:
            self.loop.call_soon_threadsafe(self._tasks.spawn, coroutine, "client in the background")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_lock = threading.Lock()
_thread: LoopThread | None = None


def shared_loop_thread() -> LoopThread:
    global _thread
    with _lock:
        if _thread is None:
            _thread = LoopThread()
        return _thread


def _after_fork() -> None:
    global _thread, _lock
    _lock = threading.Lock()
    _thread = None


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
