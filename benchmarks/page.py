"""page: how long the views of the operator's page take with very many topics, and what the page costs in memory.

The value is the slowest view, in ms: the median of its requests on one connection that stays open. The topic that is
opened has a backlog and a subscription with holes. In the detail: each view; resident memory of an idle server whose
page was never opened, and of the same after its overview was opened once, before the topics are made.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import time
from urllib.parse import urlsplit

from .harness import Options, Run, Server, Usage, server
from .topics import TOPICS, run_each

SETTLE_S = 3.0
REQUESTS = 9
HOLES = 2_000
TOPIC = "/topics/persistent/public/default/t0"
VIEWS = (
    "/", "/topics", "/topics?sort=backlog", "/topics?q=t99", "/brokers", "/bookies", "/repair",
    "/metadata?path=/topics", "/metadata?path=/topics/public/default", "/security", "/settings", TOPIC,
    f"{TOPIC}/ledgers", f"{TOPIC}/messages", f"{TOPIC}/messages?subscription=s", f"{TOPIC}/subscription/s",
)  # fmt: skip


def page(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    with server(options.bookies) as running:
        never_mb = _settled_mb(running, options)
        _get(_connection(running), "/")
        opened_mb = _settled_mb(running, options)
        asyncio.run(_make(running.url, count))
        connection = _connection(running)
        views = {path: _median_ms(connection, path) for path in VIEWS}
    detail = {"topics": count, "never_opened_mb": never_mb, "opened_once_mb": opened_mb, "views_ms": views}
    return Run(max(views.values()), detail=detail)


def _settled_mb(running: Server, options: Options) -> float:
    time.sleep(options.at_most(SETTLE_S))
    return Usage(running.pid, tree=True).read()["rss_mb"]


async def _make(url: str, count: int) -> None:
    from magnetar.admin import AdminClient
    from magnetar.asyncio import Client

    async with Client(url) as client, AdminClient(url) as admin:

        async def make(number: int) -> None:
            await admin.create_topic(f"t{number}")
            await admin.create_subscription(f"t{number}", "s")

        await run_each(count, make)
        consumer = await client.subscribe("t0", "s", receiver_queue_size=2 * HOLES)
        producer = await client.create_producer("t0", batching_enabled=False, block_if_queue_full=True)
        await asyncio.gather(*[producer.send(b'{"number": %d}' % number) for number in range(HOLES)])
        for number in range(HOLES):
            message = await consumer.receive()
            if number % 2:
                await consumer.acknowledge(message)


def _connection(running: Server) -> http.client.HTTPConnection:
    found = urlsplit(running.http_url)
    return http.client.HTTPConnection(found.hostname or "", found.port, timeout=60)


def _get(connection: http.client.HTTPConnection, path: str) -> None:
    connection.request("GET", f"/ui{path}")
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, (path, body[:1000])


def _median_ms(connection: http.client.HTTPConnection, path: str) -> float:
    samples = list[float]()
    for _ in range(REQUESTS):
        begin = time.perf_counter()
        _get(connection, path)
        samples.append(time.perf_counter() - begin)
    return round(1000 * statistics.median(samples), 1)
