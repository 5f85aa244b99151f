"""Objects that are closed at the end of an `async with` or `with` block, unless the program closed them before.

`close_all_parts` closes several objects at once. `timeout_after_silence` ends a wait for a server that sends nothing.
`register_connection_holder` refuses connections in a forked process, where gRPC cannot work. `Deadlines` ends many
waits at their deadlines by one timer, a `DueTimer`. `EventLoopCaller` runs functions in an event loop for other
threads.

    deadlines = Deadlines(now)
    await deadlines.wait(future, at)      returns its result; raises TimeoutError at the deadline

A time-out of asyncio starts a timer for each wait, and cancels it; for thousands of waits in a second that costs more
than the requests themselves. Here one timer is set to the earliest deadline of all waits. Guard:
tests/client/common/test_deadlines.py."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakSet

from .errors import AlreadyClosed, OperationNotSupported
from .loggers import OnBroken, ignore_error, report_failure, run_logging_errors

# ----------------------------------------------------------------------------------------------------- due_timer
# The timer of a driver: it calls when the time has come that the driver's core waits for.
#
#     timer.move_to_earlier(due)  an earlier time replaces a later one; a timer that fires too early finds nothing to do
#     timer.stop()
#
# The event loop rounds its timers and has a clock of its own: `reached` gets a time that is never before the one that
# it was armed for, so that it is not armed for the same time again. Guard: tests/client/common/test_due_timer.py.


class DueTimer:
    """A timer of the event loop. Calls the function `reached(now)` once when the time in its field `at` has come, and
    is then not set any more."""

    __slots__ = ("_broke", "_handle", "_loop", "_now", "_reached", "at")

    def __init__(self, now: Callable[[], float], reached: Callable[[float], None], broke: OnBroken) -> None:
        """Makes a timer that is not set. Must be called in the event loop. `now`: a monotonic clock, in seconds;
        `move_to_earlier` and `reached` use its times. `broke(error)` is called if `reached` raises."""
        self.at = inf  # when it fires; inf: never
        self._now = now
        self._reached = reached
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def move_to_earlier(self, due: float | None) -> None:
        """Moves the timer to the time `due` if that is earlier than its present time. `due` None: changes nothing."""
        if due is None or due >= self.at:
            return
        self.stop()
        self.at = due
        self._handle = self._loop.call_later(max(0.0, due - self._now()), run_logging_errors, self._fire, self._broke)

    def _fire(self) -> None:
        at, self.at = self.at, inf
        self._reached(max(self._now(), at))

    def stop(self) -> None:
        """Cancels the timer. `move_to_earlier` may set it again."""
        self.at = inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


# ----------------------------------------------------------------------------------------------------- deadlines


T = TypeVar("T")


class Deadlines:
    """Waits for futures with deadlines in one event loop, with one timer for all waits. `now`: a monotonic clock, in
    seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._at: dict[asyncio.Future[object], float] = {}
        self._timer = DueTimer(now, self._reached, self._broke)

    async def wait(self, future: asyncio.Future[T], at: float) -> T:
        """Waits for `future` and returns its result, or raises its error. Raises TimeoutError if there is no result at
        the time `at`, in seconds of the clock `now`. No other code may await the future: it ends at the deadline, and
        is cancelled if this wait is."""
        if future.done():
            return future.result()
        waiting: asyncio.Future[object] = future  # type: ignore[assignment]
        self._at[waiting] = at
        self._timer.move_to_earlier(at)
        try:
            return await future
        finally:
            del self._at[waiting]

    def _reached(self, now: float) -> None:
        left: list[float] = []
        for future, at in self._at.items():
            if future.done():
                continue
            if at <= now:
                future.set_exception(TimeoutError())
            else:
                left.append(at)
        if left:
            self._timer.move_to_earlier(min(left))

    def _broke(self, error: Exception) -> None:
        for future in self._at:
            if not future.done():
                future.set_exception(error)

    def stop(self) -> None:
        """Stops the timer: the present waits do not end at their deadlines any more."""
        self._timer.stop()


# --------------------------------------------------------------------------------------------------------- wakes
# Calls from any thread into the event loop: one wake-up of the loop for all that wait.
#
# To wake a loop that sleeps costs a system call and a change of threads. Fifty threads that each send one message need
# one, when they come together.


class EventLoopCaller:
    """Runs functions in one event loop for other threads. The loop is woken once for all functions that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[], object], OnBroken]] = deque()
        self._woken = False

    def call(self, work: Callable[[], object], broke: OnBroken) -> None:
        """Runs `work()` in the event loop later, after the functions of earlier calls. May be called from any thread.
        If `work` raises an error, the loop calls `broke(error)`. After the loop was closed, each call raises
        RuntimeError, and `work` is not run."""
        self._calls.append((work, broke))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(run_logging_errors, self._run, ignore_error)
            except RuntimeError:
                self._woken = False
                raise

    def _run(self) -> None:
        self._woken = False  # first: a later caller wakes the loop again
        calls = self._calls
        for _ in range(len(calls)):
            work, broke = calls.popleft()
            try:
                work()
            except BaseException as error:
                report_failure(work, broke, error)


class ClosedAfterAsyncWith:
    """Base class of objects that are closed at the end of their `async with` block. If `close` raises AlreadyClosed
    there, the error is ignored."""

    async def close(self) -> None:
        """Closes the object; a subclass must override this: the base class raises NotImplementedError."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            await self.close()


class AsyncClosable(Protocol):
    """The interface of an object with an asynchronous method `close`."""

    async def close(self) -> None: ...


async def close_all_parts(parts: Iterable[AsyncClosable]) -> None:
    """Closes all objects of `parts` at the same time and waits until each is closed or has failed. Then raises the
    first error other than AlreadyClosed, if there is one."""
    for outcome in await asyncio.gather(*(each.close() for each in parts), return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
            raise outcome


DEADLINE_TOLERANCE_S = 0.001
"""A deadline that is at most this many seconds away counts as reached. A timer may fire too early, by the resolution of
its clock; without this tolerance it would be set again for the same moment."""


@asynccontextmanager
async def timeout_after_silence(
    quiet_s: float, received_at: Callable[[], float], now: Callable[[], float], longest_s: float
) -> AsyncIterator[None]:
    """Returns a context manager that cancels its `async with` block and raises TimeoutError, like `asyncio.timeout`,
    when nothing was received for `quiet_s` seconds, or after `longest_s` seconds. `received_at` returns the time of the
    last receipt and `now` the present time, in seconds of one monotonic clock. Even if no time is left, tasks that the
    block begins before its first wait begin before the block is cancelled, so that they can clean up."""
    loop, begun = asyncio.get_running_loop(), now()
    async with asyncio.timeout(None) as limit:
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            left = min(max(received_at(), begun) + quiet_s, begun + longest_s) - now()
            if left > DEADLINE_TOLERANCE_S:
                timer = loop.call_later(left, run_logging_errors, look, ignore_error)
            else:
                limit.reschedule(-inf)

        timer = loop.call_later(0.0, run_logging_errors, look, ignore_error)  # after tasks that the block begins
        try:
            yield
        finally:
            timer.cancel()


class ClosedAfterWith:
    """Base class of objects that are closed at the end of their `with` block. If `close` raises AlreadyClosed there,
    the error is ignored."""

    def close(self) -> None:
        """Closes the object; a subclass must override this: the base class raises NotImplementedError."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            self.close()


# ---------------------------------------------------------------------------------------------------------- fork
# The effects of a fork on a client, and what is done about them.
#
# A child has none of its parent's threads, and gRPC, once it was used, does not come up again in a child: its poller
# thread is gone and its locks are as they were (measured: with its fork support on, calls hang; with it off, the
# process aborts). So:
#
# - A process that forks *before* the first connection is safe, and so are its children, also with the same Client
#   object:
#   connections are made when first needed. (Prefork servers, Celery, multiprocessing, Spark's daemon.)
# - A child of a process that *had* connections gets OperationNotSupported at once from everything that would connect,
#   instead of a hang. Start such children with multiprocessing's `spawn` or `forkserver`, or connect after the fork.
# - The parent is not touched: what the child inherited is kept and never closed there, because closing would act on
#   shared sockets and dead locks.
#
# `FORK_COUNT[0]` counts the forks above this process; an object that keeps something of an event loop keeps the epoch
# with it. Guard: tests/client/blocking/test_fork.py.


FORK_COUNT = [0]
"""How often this process and its ancestors were forked. The number is in a list, so that reading it needs no function
call."""

_inherited: list[object] = []
_live: WeakSet[object] = WeakSet()
_used_by_parent = [False]


def register_connection_holder(holder: object) -> None:
    """Registers an object, `holder`, that is about to make its first connection, until it is garbage-collected. Raises
    OperationNotSupported in a forked child process whose parent had connections, because gRPC cannot work there."""
    if _used_by_parent[0]:
        raise OperationNotSupported(
            "this process was forked from one that had connections, and gRPC does not survive that: "
            "connect after the fork, or start processes with multiprocessing's 'spawn' or 'forkserver'"
        )
    _live.add(holder)


def _after_fork() -> None:
    FORK_COUNT[0] += 1
    inherited = list(_live)
    if inherited:
        _inherited.extend(inherited)
        _used_by_parent[0] = True
    _live.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
