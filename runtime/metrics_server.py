"""Metrics over HTTP: `GET /metrics`, served by prometheus-client in a thread of its own.

    server = await MetricsServer.start(endpoint, measure)      `measure(page)` writes all metrics that `page.query` asks
    server.endpoint                                            with the port that it listens on
    await server.close()

The text is always Prometheus' plain format (0.0.4). Metrics with few lines go through prometheus-client. Those of each
topic are written line by line while the event loop reads the topics (metrics.py `MetricSeries`), and are sent in
pieces, so that they delay neither the loop nor the interpreter.

Rule: only the event loop of the parts reads them. The thread that answers a request waits for the loop, at most
`MEASURE_TIMEOUT_S`; then the request fails (500), and the numbers of that moment are missing. At most CONNECTIONS_MAX
connections are open at a time. prometheus-client and `http.server` are imported when a server starts, so that metrics
that are switched off cost nothing. Guarding tests: tests/runtime/test_metrics_server.py, tests/cli/run/test_metrics.py.

Also in this file, below its heading: the metrics of several processes as one page (together).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..proto.errors import Busy, InvalidRequest
from .metrics import MetricsPage, MetricsQuery, escape_label
from .network import Endpoint

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry

# ------------------------------------------------------------------------------------------------------ together
# The metrics of several processes as one page: each series gets the label `process`.
#
#     pieces = join_metrics_pages({"storage": text, …})     Prometheus' text, metrics in the order of their first lines
#
# The format has the lines of one metric in one group, so groups of the same name are put together. Labels and not sums:
# a gauge of one process (its queue, its memory) says nothing once it is added up, and `sum without (process)` adds up
# what can be added. Guard: tests/runtime/test_together.py.


_HELP, _TYPE = "# HELP ", "# TYPE "


def join_metrics_pages(texts: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yields the joined metrics pages of several processes, in pieces: one for the head of each metric, and one for its
    lines of each process. `texts`: the pages in Prometheus' text format, by process. Each line gets the label
    `process`."""
    heads: dict[str, list[str]] = {}
    groups: dict[str, list[tuple[str, list[str]]]] = {}  # metric → process, its lines
    for process, text in texts.items():
        name = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                if line.startswith(_HELP):
                    name = line.split(" ", 3)[2]
                    groups.setdefault(name, []).append((process, []))
                    heads.setdefault(name, [])
                if len(groups[name]) == 1:
                    heads[name].append(line)
            elif line:
                groups[name][-1][1].append(line)
    for name, parts in groups.items():
        yield "".join(f"{line}\n" for line in heads[name]).encode()
        for process, lines in parts:
            label = f'process="{escape_label(process)}"'
            yield "".join(_labelled(line, label) for line in lines).encode()


def _labelled(line: str, label: str) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}\n"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}\n"


# ------------------------------------------------------------------------------------------------ metrics_server


MEASURE_TIMEOUT_S = 5.0
"""Half of Prometheus' default scrape timeout: the scraper gets the error before it gives up."""
REQUEST_TIMEOUT_S = 5.0
"""Seconds without a byte of a request after which a connection is closed."""
CONNECTIONS_MAX = 16
"""Most connections: each has a thread. Above it the oldest is closed: those that send slowly, or nothing, keep no
scraper out."""

FillMetricsPage = Callable[[MetricsPage], Awaitable[None]]


class _Parts:
    """The collector of a page: asks the event loop for it from the thread of a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, measure: FillMetricsPage) -> None:
        self._loop = loop
        self._measure = measure

    def page(self, query: MetricsQuery) -> MetricsPage:
        asking = asyncio.run_coroutine_threadsafe(self._page(query), self._loop)
        try:
            return asking.result(MEASURE_TIMEOUT_S)
        finally:
            asking.cancel()

    async def _page(self, query: MetricsQuery) -> MetricsPage:
        page = MetricsPage(query)
        await self._measure(page)
        return page


@functools.cache
def _process() -> CollectorRegistry:
    """Returns the registry of the process's own numbers (memory, processor time, descriptors)."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    found = CollectorRegistry()
    ProcessCollector(namespace="magnetar", registry=found)
    return found


def format_metrics_page(page: MetricsPage) -> Iterator[bytes]:
    """Yields the metrics page in Prometheus' text format: first the metrics of the process itself, then those of its
    parts. If the page has the name of its process, it is joined with the pages of the other processes
    (`join_metrics_pages`)."""
    if page.process:
        yield from join_metrics_pages({page.process: b"".join(_own(page)), **page.others})
    else:
        yield from _own(page)


def _own(page: MetricsPage) -> Iterator[bytes]:
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
        try:
            query = MetricsQuery.parse(environ.get("QUERY_STRING", ""))
        except (InvalidRequest, ValueError) as error:
            start_response("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
            return (f"{error}\n".encode(),)
        pieces = format_metrics_page(parts.page(query))
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
    """Starts a server like that of prometheus-client, for our application; returns it and its thread."""
    from threading import Thread
    from wsgiref.simple_server import make_server

    from prometheus_client.exposition import ThreadingWSGIServer, _get_best_family, _SilentHandler

    class Server(ThreadingWSGIServer):
        """A server that uses the address family of the endpoint."""

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
            """Ignores the error of a client that sends no request or does not wait for the answer, which socketserver
            would print.
            """

    class Handler(_SilentHandler):
        """A handler that ends a request after REQUEST_TIMEOUT_S."""

        timeout = REQUEST_TIMEOUT_S

    Server.address_family, host = _get_best_family(endpoint.host, endpoint.port)  # type: ignore[no-untyped-call]
    server = make_server(host, endpoint.port, application, Server, handler_class=Handler)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class MetricsServer:
    """Serves the metrics over HTTP, with a thread of its own; the event loop of the process makes each page. `start`
    creates it."""

    def __init__(self, server: WSGIServer, thread: Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.endpoint = Endpoint(host, server.server_port)

    @classmethod
    async def start(cls, endpoint: Endpoint, measure: FillMetricsPage) -> MetricsServer:
        """Starts to serve the metrics at `endpoint` (port 0: a free port), and returns the server. `measure`: the
        coroutine function that fills each page; it is called in the running event loop. Raises Busy if the port is
        taken, or the address does not belong to this machine."""
        application = _application(_Parts(asyncio.get_running_loop(), measure))
        try:
            serving = await asyncio.to_thread(_listen, endpoint, application)
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        return cls(*serving, endpoint.host)

    async def close(self) -> None:
        """Closes the server. The port is free when this method returns; requests in progress may still end."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
