"""Workers: threads that wait for the disk so that the event loop does not.

A worker runs one call at a time, in the order in which they were given. Under simulation there is no thread: the call
runs on the event loop after a virtual delay, so that everything else may happen in between.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Worker(Protocol):
    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues the call; the future belongs to the calling event loop. Order is kept."""
        ...

    async def close(self) -> None:
        """After the calls that are queued."""
        ...


class Workers(Protocol):
    def start(self, name: str) -> Worker: ...
