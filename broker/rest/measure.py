"""The maker of `GET /metrics`: a function of the process that serves (cli/run/metrics.py `Measured`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...runtime.metrics import Page

Measure = Callable[[Page], Awaitable[None]]


async def no_metrics(page: Page) -> None:
    """Adds nothing: for a broker that is not measured."""
