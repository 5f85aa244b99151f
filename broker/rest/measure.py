"""The function that writes the page of `GET /metrics`; the serving process sets it (cli/run/metrics.py `Measured`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...runtime.metrics import MetricsPage

Measure = Callable[[MetricsPage], Awaitable[None]]


async def write_empty_metrics(page: MetricsPage) -> None:
    """Writes nothing. This is the function that writes the metrics page of a broker without metrics."""
