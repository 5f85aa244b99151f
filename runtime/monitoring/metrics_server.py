"""Metrics over HTTP: `GET /metrics`, served by prometheus-client in a thread of its own.

    server = await MetricsServer.start(endpoint, measure)      `measure(page)` writes all metrics
    server.endpoint                                            with the port that it listens on
    await server.close()

The text is always Prometheus' plain format (0.0.4). Metrics of which there are few go through prometheus-client; those
of each topic are written line by line while the event loop reads the topics (metrics.py `Series`), in slices that delay
neither the loop nor the interpreter, and are sent in pieces.

Rule: only the event loop of the parts reads them. The thread that answers a request waits for the loop, at most
`MEASURE_TIMEOUT_S`; then the request fails (500), and the numbers of that moment are missing. At most CONNECTIONS_MAX
are open at a time.
prometheus-client and `http.server` are imported when a server starts: switched off, metrics cost nothing.
Guarding tests: tests/runtime/monitoring/test_metrics_server.py, tests/cli/metrics/test_metrics.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...proto.errors import Busy
from ..network import Endpoint
from .metrics import Page
from .together import together

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry

MEASURE_TIMEOUT_S = 5.0
"""Half of Prometheus' default scrape timeout: the scraper gets the error before it gives up."""
REQUEST_S = 5.0
"""Seconds without a byte of a request after which a connection is closed."""
CONNECTIONS_MAX = 16
"""Most connections: each has a thread. Above it the oldest is closed: those that send slowly, or nothing, keep no
scraper out."""

Measure = Callable[[Page], Awaitable[None]]


class _Parts:
    """The collector: calls the event loop from the thread of a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, measure: Measure) -> None:
        self._loop = loop
        self._measure = measure

    def page(self) -> Page:
        asking = asyncio.run_coroutine_threadsafe(self._page(), self._loop)
        try:
            return asking.result(MEASURE_TIMEOUT_S)
        finally:
            asking.cancel()

    async def _page(self) -> Page:
        page = Page()
        await self._measure(page)
        return page


@functools.cache
def _process() -> CollectorRegistry:
    """The numbers of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    found = CollectorRegistry()
    ProcessCollector(namespace="magnetar", registry=found)
    return found


def as_text(page: Page) -> Iterator[bytes]:
    """The page in Prometheus' plain format, with the numbers of this process first; then those of the others."""
    if page.process:
        yield from together({page.process: b"".join(_own(page)), **page.others})
    else:
        yield from _own(page)


def _own(page: Page) -> Iterator[bytes]:
    from prometheus_client import CollectorRegistry, generate_latest

    once = CollectorRegistry(auto_describe=False)
    once.register(page)
    yield generate_latest(_process())
    yield generate_latest(once)
    yield from page.series_chunks()


def _application(parts: _Parts) -> WSGIApplication:
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return (b"only GET\n",)
        if environ["PATH_INFO"] == "/favicon.ico":
            start_response("200 OK", [])
            return (b"",)
        pieces = as_text(parts.page())
        first = next(pieces)
        second = next(pieces)  # an error has been raised by now
        headers = [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)]
        every: Iterable[bytes] = chain((first, second), pieces)
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            headers.append(("Content-Encoding", "gzip"))
            every = _zipped(every)
        start_response("200 OK", headers)
        return every

    return serve


def _zipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)  # 31: with the header of gzip
    for piece in pieces:
        if packed := packer.compress(piece):
            yield packed
    yield packer.flush()


def _listen(endpoint: Endpoint, application: WSGIApplication) -> tuple[WSGIServer, Thread]:
    """Listens as prometheus-client does it, for our application."""
    from threading import Thread
    from wsgiref.simple_server import make_server

    from prometheus_client.exposition import ThreadingWSGIServer, _get_best_family, _SilentHandler

    class Server(ThreadingWSGIServer):
        """A server of the endpoint's address family."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.connections: dict[socket.socket, None] = {}  # the oldest first

        def process_request(self, request: Any, client_address: Any) -> None:
            if len(self.connections) >= CONNECTIONS_MAX:
                oldest = next(iter(self.connections))
                self.connections.pop(oldest, None)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
            self.connections[request] = None
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            self.connections.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignores the error of a client that sends no request, or does not wait for the answer: socketserver would
            print it."""

    class Handler(_SilentHandler):
        """A handler of requests that ends after REQUEST_S."""

        timeout = REQUEST_S

    Server.address_family, host = _get_best_family(endpoint.host, endpoint.port)  # type: ignore[no-untyped-call]
    server = make_server(host, endpoint.port, application, Server, handler_class=Handler)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class MetricsServer:
    """A listener, its thread, and the loop that it asks for pages."""

    def __init__(self, server: WSGIServer, thread: Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.endpoint = Endpoint(host, server.server_port)

    @classmethod
    async def start(cls, endpoint: Endpoint, measure: Measure) -> MetricsServer:
        """Starts the server. Busy: the port is taken, or the address is not of this machine."""
        application = _application(_Parts(asyncio.get_running_loop(), measure))
        try:
            serving = await asyncio.to_thread(_listen, endpoint, application)
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        return cls(*serving, endpoint.host)

    async def close(self) -> None:
        """Closes the server: the port is free when this returns. Requests in progress end by themselves."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
