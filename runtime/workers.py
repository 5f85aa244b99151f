"""Workers: threads that wait for the disk so that the event loop does not.

A worker runs one call at a time, in the order given. In a simulation there is no thread: the call runs on the event
loop after a virtual delay, so that other work may run in between.

Code that an idle server does not need is loaded when it is first needed, in a thread too: the server starts faster and
is smaller without it.

    await world.workers.load(f"{__package__}.coordinator")
    from .coordinator import RunningCoordinator             # is there, so it costs nothing
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Worker(Protocol):
    """A worker that runs calls in order."""

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues the call; the future belongs to the calling event loop. Calls run in order."""
        ...

    async def close(self) -> None:
        """Returns after the queued calls."""
        ...


class Workers(Protocol):
    """The workers of a process."""

    def start(self, name: str) -> Worker: ...

    async def load(self, *modules: str) -> None:
        """Imports modules, in their order. Returns in the same turn of the loop when they have been loaded before."""
        ...
