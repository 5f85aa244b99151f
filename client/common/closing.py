"""`async with` and `with`: the object is closed at the end of the block, unless the program closed it before.

`close_all` closes several objects at once; `timeout_when_quiet` bounds a wait for a server that may be gone;
`register_connecting` refuses connections in a forked process where gRPC cannot work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, Protocol, Self
from weakref import WeakSet

from .errors import AlreadyClosed, OperationNotSupported
from .loggers import ignore_error, run_logging_errors


class ClosedAfterAsyncWith:
    """An object that `async with` closes at the end of its block."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            await self.close()


class Closable(Protocol):
    """An object with an asynchronous `close`."""

    async def close(self) -> None: ...


async def close_all(parts: Iterable[Closable]) -> None:
    """Closes all parts at the same time; then raises the first error other than AlreadyClosed."""
    for outcome in await asyncio.gather(*(each.close() for each in parts), return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
            raise outcome


@asynccontextmanager
async def timeout_when_quiet(
    quiet_s: float, received_at: Callable[[], float], now: Callable[[], float], longest_s: float
) -> AsyncIterator[None]:
    """Ends the block with a time-out, like `asyncio.timeout`, when nothing was received for `quiet_s`, or after
    `longest_s`. `received_at` and `now` return times of one monotonic clock, in seconds."""
    loop, begun = asyncio.get_running_loop(), now()
    async with asyncio.timeout(None) as limit:
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            left = min(max(received_at(), begun) + quiet_s, begun + longest_s) - now()
            if left > 0:
                timer = loop.call_later(left, run_logging_errors, look, ignore_error)
            else:
                limit.reschedule(-inf)

        look()
        try:
            yield
        finally:
            assert timer is not None, "it looked"
            timer.cancel()


class ClosedAfterWith:
    """An object that `with` closes at the end of its block."""

    def close(self) -> None:
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
# `EPOCH[0]` counts the forks above this process; an object that keeps something of an event loop keeps the epoch
# with it. Guard: tests/client/blocking/test_fork.py.


EPOCH = [0]
"""A list, so that looking at it costs no call."""

_inherited: list[object] = []
_live: WeakSet[object] = WeakSet()
_used_by_parent = [False]


def register_connecting(holder: object) -> None:
    """Registers `holder`, which is about to make its first connection. Raises OperationNotSupported in a forked child
    process whose parent had connections, because gRPC cannot work there."""
    if _used_by_parent[0]:
        raise OperationNotSupported(
            "this process was forked from one that had connections, and gRPC does not survive that: "
            "connect after the fork, or start processes with multiprocessing's 'spawn' or 'forkserver'"
        )
    _live.add(holder)


def _after_fork() -> None:
    EPOCH[0] += 1
    inherited = list(_live)
    if inherited:
        _inherited.extend(inherited)
        _used_by_parent[0] = True
    _live.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
