"""`async with` and `with`: the object is closed at the end of the block, unless the program closed it before.

`close_all` closes several at once; `until_quiet` bounds what waits for a server that may be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, Protocol, Self

from .errors import AlreadyClosed
from .guard import ignored, run


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
    """An object with a blocking `close`."""

    async def close(self) -> None: ...


async def close_all(parts: Iterable[Closable]) -> None:
    """Returns when all are closed; then raises the first error other than AlreadyClosed."""
    for outcome in await asyncio.gather(*(each.close() for each in parts), return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
            raise outcome


@asynccontextmanager
async def until_quiet(
    quiet_s: float, received_at: Callable[[], float], now: Callable[[], float], longest_s: float
) -> AsyncIterator[None]:
    """Ends the block, like `asyncio.timeout`, when nothing came for `quiet_s`, or after `longest_s`. `received_at`,
    `now`: of one monotonic clock, in seconds."""
    loop, begun = asyncio.get_running_loop(), now()
    async with asyncio.timeout(None) as limit:
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            left = min(max(received_at(), begun) + quiet_s, begun + longest_s) - now()
            if left > 0:
                timer = loop.call_later(left, run, look, ignored)
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
