"""What recover-topics says of bookies that were busy is what they counted."""

import asyncio

import pytest
from msgspec.structs import replace

from benchmarks.recover_topics import busy
from magnetar.bookie.adds import RequestBudget
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.ledger.peer_format import Status
from magnetar.runtime.metrics import MetricsPage
from magnetar.runtime.metrics_server import MetricsServer
from magnetar.runtime.network import Endpoint
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import NODE, SMALL


def test_each_request_that_a_bookie_answers_with_busy_is_counted() -> None:
    refused, pages = list[int](), list[MetricsPage]()

    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(reads_max=1, store=replace(SMALL, read_cache_bytes=0))
        caller = cluster.caller(bookie)
        for entry in range(30):
            await caller.add(1, entry, bytes(300))
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        cluster.simulation.node(NODE).disk_delays.mean_s = 0.02
        bookie.first.service._waiting_reads = RequestBudget(8_000)
        for fence in (False, True):
            reads = [caller.read(1, entry, fence=fence) for entry in range(30)]
            refused.append(sum(head.status is Status.BUSY for head, _ in await asyncio.gather(*reads)))
            pages.append(MetricsPage())
            await MeasuredParts(bookies=[bookie])(pages[-1])

    with_cluster(main)
    assert all(refused), "bookies were busy, also for a recovery"
    assert [asyncio.run(_shown(page)) for page in pages] == [refused[0], sum(refused)]


def test_a_page_without_the_number_is_no_zero() -> None:
    with pytest.raises(RuntimeError, match="magnetar_bookie_busy_total"):
        asyncio.run(_shown(MetricsPage()))


async def _shown(page: MetricsPage) -> int:
    """As the benchmark reads it."""

    async def measure(into: MetricsPage) -> None:
        into.__dict__.update(page.__dict__)

    server = await MetricsServer.start(Endpoint("127.0.0.1", 0), measure)
    try:
        return await asyncio.to_thread(busy, f"http://{server.endpoint}/metrics")
    finally:
        await server.close()
