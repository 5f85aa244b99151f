"""Metrics over HTTP: `GET /metrics`, served by prometheus-client in a thread of its own.

    server = await MetricsServer.start(endpoint, measure)      `measure(page)` writes everything that is known
    server.endpoint                                            with the port that was really taken
    await server.close()

Rule: the parts are looked at by their own event loop and by nobody else; the thread that answers a request waits for
that, at most `MEASURE_TIMEOUT_S`, then the request fails (500) and the numbers of that moment are missing.
prometheus-client and `http.server` are imported when a server starts, and not before: off costs nothing.
Guarding tests: tests/runtime/test_metrics_server.py, tests/cli/test_metrics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from ..proto.errors import Busy
from .metrics import Page
from .network import Endpoint

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

MEASURE_TIMEOUT_S = 5.0
"""Half of Prometheus' default scrape timeout: who asks hears of it before he gives up."""

Measure = Callable[[Page], Awaitable[None]]


class _Parts:
    """The collector: asks the event loop, from the thread of a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, measure: Measure) -> None:
        self._loop = loop
        self._measure = measure

    def collect(self) -> Iterable[Metric]:
        asking = asyncio.run_coroutine_threadsafe(self._page(), self._loop)
        try:
            return asking.result(MEASURE_TIMEOUT_S).collect()
        finally:
            asking.cancel()

    async def _page(self) -> Page:
        page = Page()
        await self._measure(page)
        return page


class MetricsServer:
    def __init__(self, server: WSGIServer, thread: Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.endpoint = Endpoint(host, server.server_port)

    @classmethod
    async def start(cls, endpoint: Endpoint, measure: Measure) -> MetricsServer:
        """Busy: the port is taken, or the address is none of this machine."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(_Parts(asyncio.get_running_loop(), measure))
        ProcessCollector(namespace="magnetar", registry=registry)
        try:
            serving = await asyncio.to_thread(start_http_server, endpoint.port, endpoint.host, registry)
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        return cls(*serving, endpoint.host)

    async def close(self) -> None:
        """The port is free when this returns. Requests on their way end by themselves."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
