"""Workers: threads that wait for the disk so that the event loop does not.

A worker runs one call at a time, in the order given. In a simulation there is no thread: the call runs on the event
loop after a virtual delay, so that other work may run in between.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Worker(Protocol):
    """One worker."""

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues the call; the future belongs to the calling event loop. Calls run in order."""
        ...

    async def close(self) -> None:
        """Returns after the queued calls."""
        ...


class Workers(Protocol):
    """The workers of a process."""

    def start(self, name: str) -> Worker: ...
