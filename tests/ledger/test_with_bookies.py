"""The ledger library over real bookies: journal, fsync, ZeroMQ on loopback."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from magnetar.bookie.registration import DiskState
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store.store import StoreConfig
from magnetar.ledger import LedgerClient, LedgerConfig, LedgerReader
from magnetar.metadata.records import CLOSED
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, ensure_cluster_record
from magnetar.runtime.network import World
from magnetar.runtime.process import make_system_world
from tests.ledger.conftest import QUICK


@dataclass
class Deployment:
    world: World
    metadata: MetadataStore
    bookies: list[Bookie]
    directory: Path
    clients: list[LedgerClient]

    def client(self, config: LedgerConfig = QUICK) -> LedgerClient:
        self.clients.append(LedgerClient(self.world, self.metadata, config))
        return self.clients[-1]

    async def start_bookie(self, name: str, store: StoreConfig | None = None) -> Bookie:
        config = BookieConfig(data=str(self.directory / name), free_bytes_min=0, store=store or StoreConfig())
        self.bookies.append(await Bookie.start(self.world, config, self.metadata))
        return self.bookies[-1]

    async def stop_bookie(self, id_: str) -> None:
        bookie = next(bookie for bookie in self.bookies if bookie.id == id_)
        self.bookies.remove(bookie)
        await bookie.close()


@pytest_asyncio.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    world = make_system_world(seed=1)
    store = await SqliteStore.open(world, ":memory:")
    session = store.new_session()
    await ensure_cluster_record(session, world.rng)
    made = Deployment(world, session, [], tmp_path, [])
    for number in range(3):
        await made.start_bookie(f"b{number}")
    yield made
    for client in made.clients:
        await client.close()
    for bookie in made.bookies:
        await bookie.close()
    await session.close()
    await store.close()


async def read_all(reader: LedgerReader) -> list[bytes]:
    entries: list[bytes] = []
    while len(entries) <= reader.last_entry:
        entries += [bytes(entry.payload) for entry in await reader.read(len(entries), reader.last_entry)]
    return entries


async def test_two_recoverers_at_once_report_the_same_end(deployment: Deployment) -> None:
    writer = await deployment.client().create()
    await asyncio.gather(*(writer.append(b"%d" % i) for i in range(150)))
    one, two = deployment.client(), deployment.client()
    readers = await asyncio.gather(one.recover(writer.ledger_id), two.recover(writer.ledger_id))
    assert [reader.last_entry for reader in readers] == [149, 149]
    assert (await one.read_record(writer.ledger_id)).state == CLOSED


async def test_a_bookie_that_comes_back_elsewhere_is_reached_there(deployment: Deployment) -> None:
    client = deployment.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    await writer.append(b"kept")
    await writer.close()
    for name in ("b0", "b1", "b2"):
        await deployment.stop_bookie(deployment.bookies[0].id)
        await deployment.start_bookie(name)
    await client._bookies.refresh_bookie_list()  # changes that come together are read together, a moment later
    again = await client.create()
    assert await again.append(b"new") == 0
    assert await read_all(await client.open(writer.ledger_id)) == [b"kept"]


async def test_bookies_without_a_free_descriptor_are_asked_again_and_none_is_replaced(deployment: Deployment) -> None:
    """By the real limit of the process: their memory is full, no checkpoint can open a file. The fourth could replace
    one of them."""
    for bookie in list(deployment.bookies):
        await deployment.stop_bookie(bookie.id)
    small = StoreConfig(memtable_bytes=256 << 10, journal_bytes=512 << 10, log_allocate_bytes=1 << 20)
    for number in range(4):
        await deployment.start_bookie(f"small{number}", small)
    client = deployment.client(LedgerConfig(add_timeout_s=20.0, quorum_timeout_s=120.0))
    writer = await client.create()
    bookies = [each for each in deployment.bookies if each.id in writer.record.fragments[0].bookies]
    await writer.append(bytes(600_000))  # what ZeroMQ imports for long messages is here
    sent = [writer.append(b"%d" % each + bytes(10_000)) for each in range(10)]
    await asyncio.gather(*sent)
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            held.extend(iter(lambda: os.open(os.devnull, os.O_RDONLY), -1))
        sent += [writer.append(b"%d" % each + bytes(10_000)) for each in range(10, 600)]
        async with asyncio.timeout(60):
            while not all(each.first.service.statistics()["busy"] for each in bookies):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not all(each.done() for each in sent)
        assert {each.disk_monitor.state for each in bookies} == {DiskState.WRITABLE}
        assert not any(each.first.service.statistics()["refused_read_only"] for each in bookies)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert await asyncio.gather(*sent) == list(range(1, 601))
    assert len(writer.record.fragments) == 1
    assert not any(each.first.service.statistics()["refused_read_only"] for each in bookies)
    await writer.close()
    entries = await read_all(await deployment.client().open(writer.ledger_id))
    assert entries[1:] == [b"%d" % each + bytes(10_000) for each in range(600)]
