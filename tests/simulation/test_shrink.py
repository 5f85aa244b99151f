"""A topic over a bookie's absence: its ledgers shrink, nothing confirmed is lost, and they grow when it is back."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.topic_log import TopicLog
from magnetar.client.client import Client
from magnetar.runtime.sim.world import Simulation
from tests.simulation.cluster import CLIENT, SESSION_TIMEOUT_S, Cluster
from tests.simulation.load.topics import TOPIC
from tests.simulation.options import draw
from tests.simulation.verdict.observer import Observer

FULL, SHRUNK = LedgerReplication(3, 3, 2), LedgerReplication(2, 2, 2)
CALM = replace(
    draw(1, inside=False), kind="bookies", quorum=(3, 3, 2), bookies=3, ledger_entries_max=1000, rates={}, times={}
)


def log_of(cluster: Cluster) -> TopicLog:
    return cluster.brokers["broker-1"].topics[TOPIC].log


def test_a_ledger_shrinks_to_the_bookies_that_are_there_and_grows_when_they_are_back() -> None:
    simulation = Simulation(7, steps_max=5_000_000, seconds_max=1000.0)
    observer = Observer(simulation)
    cluster = Cluster(simulation, CALM, observer)
    seen: list[tuple[LedgerReplication | None, bool]] = []

    async def publish_and_read() -> None:
        client = Client(cluster.service_url, world=simulation.world(CLIENT))
        consumer = await client.subscribe(TOPIC, "s")
        producer = await client.create_producer(TOPIC)
        sent = 0

        async def publish_until(done: Callable[[TopicLog], bool]) -> None:
            nonlocal sent
            async with asyncio.timeout(300):
                while True:
                    await producer.send(b"%d" % sent)
                    sent += 1
                    if done(log_of(cluster)):
                        break
                    await asyncio.sleep(1.0)
            seen.append((log_of(cluster).replication, log_of(cluster).is_degraded))

        await publish_until(lambda log: True)
        starter = cluster._starters.pop("bookie-1")  # it stays down
        simulation.crash("bookie-1")
        await asyncio.sleep(2 * SESSION_TIMEOUT_S)
        await publish_until(lambda log: log.replication != FULL)
        cluster.add("bookie-1", starter)
        await cluster.up("bookie-1")
        await publish_until(lambda log: log.replication == FULL)
        got = [(await consumer.receive()).data() for _ in range(sent)]
        assert got == [b"%d" % number for number in range(sent)]
        await client.close()

    async def scenario() -> None:
        await cluster.start()
        await cluster.start_brokers(1)
        await simulation.spawn(CLIENT, publish_and_read())

    simulation.run(scenario())
    assert seen == [(FULL, False), (SHRUNK, True), (FULL, False)]
    assert observer.violations == []
