"""Statistics of a topic over HTTP, as a dashboard asks for them: connections that stay open, one request at a time.

The topic has a producer and four consumers, so that an answer has what a real one has. The measured stretch does not
have the first request, which loads the HTTP server.
"""

from __future__ import annotations

import http.client
import threading
import time
from urllib.parse import urlsplit

from .harness import Options, Run, Server, measured, percentiles, server

CONNECTIONS = 4
PATH = "/admin/v2/persistent/public/default/bench/stats"


def rest(options: Options) -> Run:
    """GETs per second; latencies are those of single requests."""
    import magnetar

    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        producer = client.create_producer("bench")
        consumers = [
            client.subscribe("bench", "s", consumer_type=magnetar.ConsumerType.Shared) for _ in range(CONNECTIONS)
        ]
        producer.send(b"x" * options.size)
        begin = time.perf_counter()
        size = _get(_connection(running))
        first_s, samples, run = time.perf_counter() - begin, list[float](), Run(0.0)
        with measured(run, server=running.pid):
            threads = [
                threading.Thread(target=_ask, args=(running, options.seconds, samples)) for _ in range(CONNECTIONS)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        run.value, run.latencies_ms = len(samples) / options.seconds, percentiles(samples)
        run.detail = {"first_ms": round(first_s * 1000, 1), "answer_bytes": size, "consumers": len(consumers)}
        return run


def _connection(running: Server) -> http.client.HTTPConnection:
    found = urlsplit(running.http_url)
    return http.client.HTTPConnection(found.hostname or "", found.port, timeout=10)


def _get(connection: http.client.HTTPConnection) -> int:
    """Bytes of the answer."""
    connection.request("GET", PATH)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return len(body)


def _ask(running: Server, seconds: float, samples: list[float]) -> None:
    connection, end = _connection(running), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        _get(connection)
        samples.append(time.perf_counter() - begin)
    connection.close()
