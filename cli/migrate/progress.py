"""Progress on standard error: a bar for each topic on a terminal, else a line for each topic now and then.

    orders: 120,400 copied, 9,800/s, lag 31,000, 4 s left
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...runtime.tasks import Tasks
from ..common.output import progress_bar
from .copying import Copying
from .tally import Totals

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_EVERY_S = 0.25
LINE_EVERY_S = 5.0
LINES_MAX = 20
"""Topics with a line of their own; more have one line together."""

Titled = list[tuple[str, Totals]]


@asynccontextmanager
async def shown(copying: Copying, now: Callable[[], float], *, quiet: bool) -> AsyncIterator[None]:
    if quiet:
        yield
        return
    bars = sys.stderr.isatty()
    tasks = Tasks()
    tasks.spawn(_bars(_titled(copying), now) if bars else _lines(_titled(copying), now), "progress")
    try:
        yield
    finally:
        await tasks.close()


def _titled(copying: Copying) -> Titled:
    by_topic = {
        topic.name.full: Totals(each for each in copying.tallies if each.topic.base == topic.name)
        for topic in copying.topics
    }
    return list(by_topic.items()) if len(by_topic) <= LINES_MAX else [(f"{len(by_topic)} topics", total(copying))]


def total(copying: Copying) -> Totals:
    return Totals(copying.tallies)


def line(title: str, totals: Totals, now: float) -> str:
    rate = totals.rate(now)
    return f"{title}: {totals.messages:,} copied, {_rest(totals, rate)}"


def _rest(totals: Totals, rate: float) -> str:
    if totals.complete:
        return "complete"
    lag, left = totals.lag, totals.eta_s(rate)
    parts = [f"{rate:,.0f}/s", "lag unknown" if lag is None else f"lag {lag:,}"]
    if lag and left is not None:
        parts.append(f"{_duration(left)} left")
    if totals.note:
        parts.append(f"waits: {totals.note}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


async def _lines(titled: Titled, now: Callable[[], float]) -> None:
    """Prints a line for each topic now and then; a complete one is told once."""
    while titled:
        await asyncio.sleep(LINE_EVERY_S)
        for title, totals in titled:
            print(line(title, totals, now()), file=sys.stderr, flush=True)
        titled = [(title, totals) for title, totals in titled if not totals.complete]


async def _bars(titled: Titled, now: Callable[[], float]) -> None:
    with progress_bar() as bar:
        tasks = [(bar.add_task(title, total=None), title, totals) for title, totals in titled]
        try:
            while True:
                _update(bar, tasks, now())
                await asyncio.sleep(BAR_EVERY_S)
        finally:
            _update(bar, tasks, now())


def _update(bar: Progress, tasks: list[tuple[TaskID, str, Totals]], at: float) -> None:
    for id_, title, totals in tasks:
        lag = totals.lag
        whole = None if lag is None else totals.messages + lag
        text = f"{title}  {_rest(totals, totals.rate(at))}"
        bar.update(id_, description=text, completed=totals.messages, total=whole)
