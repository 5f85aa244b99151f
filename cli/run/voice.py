"""How a server says that it serves, and what its page of metrics shows: alone, or as one of several processes.

Alone it prints the ready line, and its page is its own. One of several tells its parent (runtime/children/), which
prints one line once all serve; the page of one of them, `shows`, is that of all: each series has the label `process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...runtime.children.child import Child
    from ...runtime.monitoring.metrics import Page

Measure = Callable[["Page"], Awaitable[None]]


_said: list[str] = []
"""The ready lines that this process printed: one at most, for it is one server."""


def is_ready() -> bool:
    return bool(_said)


def ready(url: str, **facts: object) -> None:
    """Prints the line that scripts wait for; nothing else is printed on stdout."""
    _said.append(url)
    print_ready(url, **facts)


def print_ready(url: str, **facts: object) -> None:
    print("ready", url, *(f"{name}={value}" for name, value in facts.items()), flush=True)


class Voice(Protocol):
    """Reports that a server serves, and has its page of metrics."""

    def ready(self, url: str, **facts: object) -> None: ...

    def measure(self, own: Measure) -> Measure:
        """Serves metrics. `own` writes those of this process; what is returned writes the page that it serves."""
        ...


class Alone:
    """A server of one process."""

    def ready(self, url: str, **facts: object) -> None:
        ready(url, **facts)

    def measure(self, own: Measure) -> Measure:
        return own


class OneOf:
    """A process of several."""

    def __init__(self, child: Child, *, shows: bool) -> None:
        self.child = child
        self._shows = shows
        self._own: Measure | None = None
        self.said = False

    async def attach(self) -> None:
        await self.child.attach(self._text)

    def ready(self, url: str, **facts: object) -> None:
        self.said = True
        self.child.ready(url=url, **facts)

    def measure(self, own: Measure) -> Measure:
        self._own = own
        return self._all if self._shows else own

    async def _all(self, page: Page) -> None:
        others, _ = await asyncio.gather(self.child.others(), self._page(page))
        page.process, page.others = self.child.name, dict(others.pages)
        for name, count in others.restarts.items():
            text = "How often a process of this server ended and was started again."
            page.counter("magnetar_processes_restarts_total", text, count, child=name)
            shown = int(name == self.child.name or name in others.pages)
            text = "Whether a process of this server serves and said its metrics: 1, or 0."
            page.gauge("magnetar_processes_shown", text, shown, child=name)

    async def _page(self, page: Page) -> None:
        assert self._own is not None, "it was told what to measure"
        await self._own(page)

    async def _text(self) -> bytes:
        from ...runtime.monitoring.metrics import Page
        from ...runtime.monitoring.metrics_server import as_text

        if self._own is None:
            return b""  # it does not serve yet
        page = Page()
        await self._own(page)
        return await asyncio.to_thread(lambda: b"".join(as_text(page)))
