"""The event loop of the blocking face: one daemon thread per process, shared by all clients, started when first needed.

A forked child has none of its parent's threads: it makes itself a new one (client/common/fork.py).

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
from typing import Any, TypeVar

from ...runtime.tasks import Tasks
from ..common.errors import AlreadyClosed, Interrupted, Timeout
from .waits import result_of

T = TypeVar("T")
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
        atexit.register(self.end)

    def end(self) -> None:
        """Stops the loop and waits for the thread. Registered with the first client, so that a user's `atexit` calls
        that came later still find the loop running."""
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

    def inside(self) -> bool:
        """Whether the calling thread is the loop's own: there nothing may wait."""
        return threading.get_ident() == self.ident

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs it in the loop and waits. Raises Interrupted when called from a callback: that would never end.

        AlreadyClosed: the interpreter is ending.
        """
        if self.inside():
            coroutine.close()
            raise Interrupted("a blocking call inside a callback would wait for itself; use send_async there")
        if self._ended:
            coroutine.close()
            raise AlreadyClosed("the interpreter is ending; close clients before")
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return result_of(future, timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise Timeout(f"no answer within {timeout_s:g} s") from None
        except BaseException:
            future.cancel()
            raise


    def start_soon(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it in the loop, from any thread, without waiting; not at all when the interpreter is ending."""
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


def loop_thread() -> LoopThread:
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
