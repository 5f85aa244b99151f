"""In a simulated cluster with faults: `receive(now=True)` finds what was confirmed, pulls leave nothing out, and a
commit is whole."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import NoMessageAvailable, PulsarException
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.pull import PullStatus
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.sim.world import Simulation
from tests.simulation.cluster import CLIENT, Cluster, GaveUp
from tests.simulation.options import draw
from tests.simulation.strikes.nemesis import Nemesis
from tests.simulation.verdict.observer import Observer

T = TypeVar("T")
TOPIC = "persistent://public/default/pulled"
MESSAGES = 25
AFTER_S = 600.0
"""Virtual seconds in which all is over, after the cluster was healed."""


@dataclass
class Programs:
    """What the programs saw."""

    cluster: Cluster
    client: Client
    stored: set[str] = field(default_factory=set)  # whose send was acknowledged
    got: set[str] = field(default_factory=set)
    pulled: list[tuple[int, str]] = field(default_factory=list)
    empty: int = 0  # times that a broker said that there is nothing
    commits: int = 0

    async def until_done(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await self.cluster.call(what, work())
            except (NoMessageAvailable, AssertionError):
                raise
            except MagnetarError:
                await asyncio.sleep(0.2)

    async def subscribe(self, name: str, type_: ConsumerType, who: str) -> Consumer:
        return await self.until_done("subscribe", lambda: self.client.subscribe(
            TOPIC, name, type_, initial_position=InitialPosition.Earliest, consumer_name=who,
        ))  # fmt: skip

    # ------------------------------------------------------------------ get right after put
    async def put_and_get(self) -> None:
        consumer = await self.subscribe("now", ConsumerType.Shared, "getter")
        for number in range(MESSAGES):
            value = f"{number}"
            producer = await self.until_done("producer", lambda: self.client.create_producer(TOPIC))
            try:
                await self.cluster.call("send", producer.send(value.encode()))
                self.stored.add(value)
            except MagnetarError:
                await asyncio.sleep(0.1)
            with contextlib.suppress(MagnetarError):
                await self.cluster.call("close", producer.close())
            while True:
                try:
                    message = await self.cluster.call("receive now", consumer.receive(now=True))
                except NoMessageAvailable:
                    self.empty += 1
                    assert value in self.got or value not in self.stored, f"{value} is stored, and was not there"
                    break
                except MagnetarError:
                    await asyncio.sleep(0.2)
                    if consumer.is_over:
                        consumer = await self.subscribe("now", ConsumerType.Shared, "getter")
                    continue
                self.got.add(message.data().decode())
                with contextlib.suppress(MagnetarError):
                    await consumer.acknowledge(message)

    # ------------------------------------------------------------------ pull
    async def pull_all(self, is_over: Callable[[], bool]) -> None:
        pull = await self.until_done("pull consumer", lambda: self.client.pull_consumer(TOPIC))
        index = 0
        while True:
            over, stored = is_over(), set(self.stored)
            try:
                found = await self.cluster.call("pull", pull.pull(index, 7, timeout=0 if over else 1.0))
            except MagnetarError:
                await asyncio.sleep(0.2)
                continue
            assert found.status is not PullStatus.OUT_OF_RANGE, found
            self.pulled += [(each.index(), each.data().decode()) for each in found.messages]
            index = found.next_index
            if found.status is PullStatus.NO_NEW:
                missing = stored - {value for _, value in self.pulled}
                assert not missing, f"{missing} were stored before the pull that found nothing"
                if over:
                    return

    # ------------------------------------------------------------------ commit
    async def commit_all(self, who: str, is_over: Callable[[], bool]) -> None:
        """Of two, the active one commits, with the index as a note; what the broker keeps is never a half of it."""
        consumer = await self.subscribe("committed", ConsumerType.Failover, who)
        done = 0
        while not is_over():
            try:
                at = (await self.cluster.call("progress", consumer.progress()))[TOPIC]
                note = int(at.note or b"0")
                assert note <= at.position, f"the note of {note} is stored, and the position is {at.position}"
                assert done <= at.position, f"the commit of {done} was answered, and the position is {at.position}"
                wanted = min(at.position + 1, at.end)
                await self.cluster.call("commit", consumer.commit(wanted, b"%d" % wanted))
                done, self.commits = wanted, self.commits + 1
            except (GaveUp, PulsarException):
                await asyncio.sleep(0.1)
            if consumer.is_over:
                consumer = await self.subscribe("committed", ConsumerType.Failover, who)
            await asyncio.sleep(0.05)


async def scenario(cluster: Cluster, simulation: Simulation) -> Programs:
    await cluster.start()
    await cluster.start_brokers(cluster.options.brokers)
    client = Client(cluster.service_url, world=simulation.world(CLIENT), operation_timeout_seconds=15)
    programs = Programs(cluster, client)
    over = asyncio.Event()
    puts = simulation.spawn(CLIENT, programs.put_and_get())
    others: list[asyncio.Future[Any]] = [
        simulation.spawn(CLIENT, each)
        for each in (programs.pull_all(over.is_set), *(programs.commit_all(who, over.is_set) for who in "ab"))
    ]
    await Nemesis(cluster).run()
    await cluster.heal()
    async with asyncio.timeout(AFTER_S):
        await puts
        over.set()
        await asyncio.gather(*others)
    await client.close()
    return programs


@pytest.mark.parametrize("seed", [4, 12, 21])
def test_what_is_confirmed_is_found_at_once_pulled_once_and_committed_whole(seed: int) -> None:
    options = draw(seed, secured=False, transactions=False, inside=False)
    simulation = Simulation(seed, steps_max=5_000_000, seconds_max=7200.0)
    cluster = Cluster(simulation, options, Observer(simulation), None)
    programs = simulation.run(scenario(cluster, simulation))
    assert programs.empty >= MESSAGES
    indexes = [index for index, _ in programs.pulled]
    assert indexes == list(range(len(indexes))), "each index once, and none left out"
    assert programs.stored <= {value for _, value in programs.pulled}
    assert programs.stored <= programs.got
    assert programs.commits > 3
