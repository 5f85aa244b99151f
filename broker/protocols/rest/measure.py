"""What `GET /metrics` is made by: a function of the process that serves (cli/metrics/samples.py `Measured`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ....runtime.monitoring.metrics import Page

Measure = Callable[[Page], Awaitable[None]]


async def no_metrics(page: Page) -> None:
    """Of a broker that nothing measures."""
