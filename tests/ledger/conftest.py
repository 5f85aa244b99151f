
import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest_asyncio

from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore
from magnetar.runtime.network import World
from magnetar.runtime.process import make_system_world
from tests.ledger.fake_bookie import FakeBookie

QUICK = LedgerConfig(
    add_timeout_s=10.0, quorum_timeout_s=30.0, close_timeout_s=30.0, read_timeout_s=10.0, fence_timeout_s=10.0,
    retry_s=0.02,
)  # fmt: skip
"""Asks a busy bookie again at once. It gives no bookie up because the machine stalls for seconds: a test that waits for
a time-out makes that one shorter."""


@dataclass
class Cluster:
    """Three fake bookies on loopback, one metadata store, and ledger clients of it."""

    world: World
    metadata: MetadataStore
    bookies: list[FakeBookie]
    clients: list[LedgerClient]

    def client(self, config: LedgerConfig = QUICK) -> LedgerClient:
        self.clients.append(LedgerClient(self.world, self.metadata, config))
        return self.clients[-1]

    def bookie(self, id_: str) -> FakeBookie:
        return next(bookie for bookie in self.bookies if bookie.id == id_)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    world = make_system_world(seed=1)
    store = await SqliteStore.open(world, ":memory:")
    session = store.new_session()
    bookies = [await FakeBookie(number).start(world, session) for number in range(3)]
    made = Cluster(world, session, bookies, [])
    yield made
    for client in made.clients:
        await client.close()
    for bookie in made.bookies:
        await bookie.stop()
    await session.close()
    await store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
