"""A bookie that lost data ends no ledger early, takes no add that a lost fence forbade, and gets back what it lost.

Three bookies, metadata and clients in one simulation. `amnesia` switches limbo off: then the same schedules lose
entries (the defects M07, M09 and M27 of BookKeeper's history).
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from msgspec.structs import replace

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store import boot
from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.ledger.bookies import LedgerConfig
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.records import CLOSED, IN_RECOVERY, LedgerRecord
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataService
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, get_record
from magnetar.proto.errors import InvalidRequest, LedgerClosed, LedgerFenced, Unavailable
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.disk import FileFault, SimDirectory
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import PeerCaller
from tests.bookie.stores import SMALL, simulate

NAMES = ("b1", "b2", "b3")
QUICK = LedgerConfig(add_timeout_s=1.0, read_timeout_s=1.0, fence_timeout_s=1.0, close_timeout_s=5.0)
PAUSE_S = 5.0


@dataclass
class Deployment:
    simulation: Simulation
    service: Endpoint  # of the metadata
    metadata: MetadataStore
    bookies: dict[str, Bookie] = field(default_factory=dict)

    async def start(self, name: str) -> Bookie:
        config = BookieConfig(
            data=f"/{name}", host=name, store=replace(SMALL, journal_bytes=1 << 20), free_bytes_min=0,
            limbo_pause_s=PAUSE_S, upkeep_interval_s=1.0,
        )  # fmt: skip
        world = self.simulation.world(name)

        async def session() -> MetadataStore:
            return await connect_metadata(world, self.service, 30.0)

        async def started() -> Bookie:
            return await Bookie.start(world, config, await session(), session)

        self.bookies[name] = await self.simulation.spawn(name, started())
        return self.bookies[name]

    async def stop(self, name: str) -> None:
        self.simulation.crash(name, power_loss=True)
        await self.metadata.delete(paths.bookie(self.bookies[name].id))

    def client(self) -> LedgerClient:
        return LedgerClient(self.simulation.world("client"), self.metadata, QUICK)

    def caller(self, name: str) -> PeerCaller:
        bookie = self.bookies[name]
        return PeerCaller(self.simulation.world("client").network.connect_peer(bookie.endpoint, UUID(bookie.id).bytes))

    def forget_journal(self, name: str) -> None:
        """The newest journal is gone: everything since the last checkpoint."""
        folder = self.simulation.node(name).disk.find_node(f"/{name}/journal")
        assert isinstance(folder, SimDirectory)
        last = max(each for each in folder.now if each.endswith(".jnl"))
        for names in (folder.now, folder.durable):
            names.pop(last, None)

    def forget_everything(self, name: str) -> None:
        """Nothing is left but the folders and the cookie."""
        root = self.simulation.node(name).disk.find_node(f"/{name}")
        assert isinstance(root, SimDirectory)
        for folder in ("journal", "entries", "ledgers"):
            found = root.now[folder]
            assert isinstance(found, SimDirectory)
            found.now.clear()
            found.durable.clear()
        for names in (root.now, root.durable):
            names.pop("mark", None)

    async def record(self, ledger: int) -> LedgerRecord:
        found = await get_record(self.metadata, paths.ledger(ledger), LedgerRecord)
        assert found is not None
        return found[0]

    async def registration(self, name: str) -> records.BookieRecord:
        found = await get_record(self.metadata, paths.bookie(self.bookies[name].id), records.BookieRecord)
        assert found is not None
        return found[0]


def with_deployment(test: Callable[[Deployment], Awaitable[None]]) -> None:
    async def main(simulation: Simulation) -> None:
        store = await simulation.spawn("meta", SqliteStore.open(simulation.world("meta"), ":memory:"))
        world = simulation.world("meta")
        serving = world.network.serve(Endpoint("127.0.0.1", 0), [("Metadata", MetadataService(store))])
        deployment = Deployment(simulation, (await simulation.spawn("meta", serving)).endpoint, store.new_session())
        for name in NAMES:
            await deployment.start(name)

        async def run() -> None:
            await test(deployment)

        await simulation.spawn("client", run())

    simulate(main)


pytestmark = pytest.mark.run_by.with_args(with_deployment)


@pytest.fixture
def amnesia(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that forgets what it found."""

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(boot, "enter_limbo", nothing)


async def an_abandoned_ledger(deployment: Deployment, entries: int = 0) -> LedgerRecord:
    """Open, and nobody writes it; `entries` are on all three bookies."""
    client = deployment.client()
    writer = await client.create()
    for i in range(entries):
        await writer.append(b"%d" % i)
    await writer.abandon()
    await client.close()
    return writer.record


async def add_by_hand(deployment: Deployment, record: LedgerRecord, entry: int, *names: str) -> list[Status]:
    """As its writer would; how each bookie answers."""
    return [(await deployment.caller(name).add(record.ledger_id, entry, b"acked",
        key=record.key)).status for name in names]


async def recovered_end(deployment: Deployment, ledger: int) -> int | None:
    """Where recovery ends the ledger; None: it cannot tell."""
    client = deployment.client()
    try:
        return (await client.recover(ledger)).last_entry
    except Unavailable:
        return None
    finally:
        await client.close()


async def an_entry_is_forgotten(deployment: Deployment, forget: Callable[[str], None]) -> int:
    """Entry 0 is acknowledged by b1 and b2 and never reached b3. b1 forgets it while b2 is away: the ledger."""
    record = await an_abandoned_ledger(deployment)
    assert await add_by_hand(deployment, record, 0, "b1", "b2") == [Status.OK, Status.OK]
    await asyncio.sleep(2.0)  # the journals' positions are in the metadata
    for name in ("b1", "b2"):
        await deployment.stop(name)
    forget("b1")
    await deployment.start("b1")
    return record.ledger_id


@pytest.mark.parametrize("how", ["forget_journal", "forget_everything"])
async def test_m09_m27_an_acknowledged_entry_is_not_truncated_when_a_bookie_forgot_it(
    deployment: Deployment, /, how: str
) -> None:
    ledger = await an_entry_is_forgotten(deployment, getattr(deployment, how))
    answer, _ = await deployment.caller("b1").read(ledger, 0, key=(await deployment.record(ledger)).key)
    assert answer.status is Status.UNKNOWN
    assert await recovered_end(deployment, ledger) is None, "one bookie is sure, one is in limbo, one is away"
    assert (await deployment.record(ledger)).state == IN_RECOVERY
    await deployment.start("b2")
    assert await recovered_end(deployment, ledger) == 0


@pytest.mark.parametrize("how", ["forget_journal", "forget_everything"])
@pytest.mark.usefixtures("amnesia")
async def test_without_limbo_the_acknowledged_entry_is_lost(deployment: Deployment, /, how: str) -> None:
    ledger = await an_entry_is_forgotten(deployment, getattr(deployment, how))
    assert await recovered_end(deployment, ledger) == -1


async def a_fence_is_forgotten(deployment: Deployment) -> tuple[LedgerRecord, Status]:
    """b1 and b2 were fenced and the ledger was closed at -1, b3 heard nothing. How b1 answers its writer afterwards."""
    record = await an_abandoned_ledger(deployment)
    for name in ("b1", "b2"):
        answer, _ = await deployment.caller(name).read(record.ledger_id, 0, fence=True, key=record.key)
        assert answer.status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
    await asyncio.sleep(2.0)
    await deployment.stop("b1")
    deployment.forget_journal("b1")
    await deployment.start("b1")
    refused, taken = await add_by_hand(deployment, record, 0, "b1", "b3")
    assert taken is Status.OK
    return record, refused


async def test_m07d_a_forgotten_fence_still_refuses_the_writer_also_after_limbo(deployment: Deployment, /) -> None:
    record, status = await a_fence_is_forgotten(deployment)
    assert status is Status.FENCED
    await asyncio.sleep(3 * PAUSE_S)
    assert deployment.bookies["b1"].limbo_restorer.limbo_upto == -1
    for _ in range(2):
        assert await add_by_hand(deployment, record, 1, "b1") == [Status.FENCED]
        await deployment.stop("b1")
        await deployment.start("b1")


@pytest.mark.usefixtures("amnesia")
async def test_without_limbo_a_forgotten_fence_lets_the_writer_go_on(deployment: Deployment, /) -> None:
    _, status = await a_fence_is_forgotten(deployment)
    assert status is Status.OK


async def append_for_ever(writer: LedgerWriter) -> None:
    """The other two bookies may confirm some before the third one's answer is there."""
    while True:
        await writer.append(b"late")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["forget_journal", "forget_everything"])
async def test_limbo_is_left_when_ledgers_are_closed_and_missing_entries_copied(
    deployment: Deployment, /, how: str
) -> None:
    client = deployment.client()
    closed = await client.create()
    for i in range(40):
        await closed.append(b"%d" % i)
    await closed.close()
    open_ = await client.create()
    for i in range(20):
        await open_.append(b"%d" % i)
    await asyncio.sleep(2.0)
    await deployment.stop("b1")
    getattr(deployment, how)("b1")
    bookie = await deployment.start("b1")
    registered = await deployment.registration("b1")
    assert registered.limbo
    (why,) = deployment.bookies["b1"].why_not_ready()
    assert "it is in limbo" in why
    assert registered.fenced_upto >= open_.ledger_id
    with pytest.raises((LedgerFenced, LedgerClosed)):  # by the bookie's answer, or by the recovery that it began
        await append_for_ever(open_)
    await asyncio.sleep(2 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto == -1, bookie.limbo_restorer.blocked
    assert bookie.why_not_ready() == []
    assert not (await deployment.registration("b1")).limbo
    assert bookie.store.limbo_losses == []
    for writer, entries in ((closed, 40), (open_, 20)):
        record = await deployment.record(writer.ledger_id)
        assert record.state == CLOSED
        for entry in range(entries):
            answer, _ = await deployment.caller("b1").read(writer.ledger_id, entry, key=record.key)
            assert answer.status is Status.OK
    answer, _ = await deployment.caller("b1").read(closed.ledger_id, 40, key=closed.record.key)
    assert answer.status is Status.NO_SUCH_ENTRY
    assert bookie.statistics()["limbo_restored_entries"] > 0
    await deployment.stop("b1")
    bookie = await deployment.start("b1")
    assert bookie.limbo_restorer.limbo_upto == -1
    answer, _ = await deployment.caller("b1").read(open_.ledger_id, 19, key=open_.record.key)
    assert answer.status is Status.OK
    await client.close()


async def test_new_ledgers_are_written_on_a_bookie_in_limbo_with_ids_that_it_does_not_fence(
    deployment: Deployment, /
) -> None:
    client = deployment.client()
    first = await client.create()
    await first.append(b"x")
    await asyncio.sleep(2.0)
    for name in ("b1", "b2"):  # two: nobody else has what they lack, limbo stays
        await deployment.stop(name)
        deployment.forget_everything(name)
    await first.abandon()
    for name in ("b1", "b2"):
        await deployment.start(name)
    await asyncio.sleep(1.0)
    new = await client.create()
    assert new.ledger_id > deployment.bookies["b1"].limbo_restorer.limbo_upto >= first.ledger_id
    for i in range(10):
        await new.append(b"%d" % i)
    await new.close()
    assert deployment.bookies["b1"].limbo_restorer.limbo_upto >= 0
    await client.close()


async def a_single_copy(deployment: Deployment, *, closed: bool = False) -> tuple[str, int]:
    """A ledger on one bookie alone, which forgot its last entries: the bookie, the ledger."""
    client = deployment.client()
    writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
    holder = next(name for name in NAMES if deployment.bookies[name].id in writer.record.fragments[0].bookies)
    for i in range(5):
        await writer.append(b"%d" % i)
    await deployment.simulation.spawn(holder, deployment.bookies[holder].store.checkpoint())
    for i in range(5, 9):
        await writer.append(b"%d" % i)
    await (writer.close() if closed else writer.abandon())
    await client.close()
    await asyncio.sleep(2.0)
    await deployment.stop(holder)
    deployment.forget_journal(holder)
    await deployment.start(holder)
    return holder, writer.ledger_id


async def test_only_copy_keeps_the_bookie_in_limbo_until_the_loss_is_accepted(
    deployment: Deployment, /, caplog: pytest.LogCaptureFixture
) -> None:
    holder, ledger = await a_single_copy(deployment)
    bookie = deployment.bookies[holder]
    await asyncio.sleep(10 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto >= ledger
    assert list(bookie.limbo_restorer.blocked) == [ledger]
    passes = bookie.statistics()["limbo_passes"]
    assert passes >= 3
    told = [each for each in caplog.messages if f"accept-loss {bookie.id}" in each]
    assert len(told) == passes
    assert bookie.store.limbo_losses
    assert list(await deployment.simulation.spawn(holder, bookie.limbo_restorer.accept_data_loss())) == [ledger]
    assert bookie.limbo_restorer.limbo_upto == -1
    assert any(f"what ledger {ledger} lacks here is given up" in each for each in caplog.messages)
    assert await recovered_end(deployment, ledger) == 4
    with pytest.raises(InvalidRequest, match="not in limbo"):
        await bookie.limbo_restorer.accept_data_loss()


async def test_limbo_lasts_while_an_entry_of_a_closed_ledger_is_found_nowhere(deployment: Deployment, /) -> None:
    holder, ledger = await a_single_copy(deployment, closed=True)
    bookie = deployment.bookies[holder]
    await asyncio.sleep(3 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto >= ledger
    assert list(bookie.limbo_restorer.blocked) == [ledger]
    key = (await deployment.record(ledger)).key
    for entry, status in ((4, Status.OK), (5, Status.UNKNOWN), (8, Status.UNKNOWN)):
        assert (await deployment.caller(holder).read(ledger, entry, key=key))[0].status is status


async def test_limbo_lasts_until_the_end_of_it_is_durable(deployment: Deployment, /) -> None:
    client = deployment.client()
    writer = await client.create()
    await writer.append(b"x")
    await writer.close()
    await client.close()
    await asyncio.sleep(2.0)
    await deployment.stop("b1")
    deployment.forget_everything("b1")
    bookie = await deployment.start("b1")
    disk = deployment.simulation.node("b1").disk
    disk.faults.append(FileFault("pwrite", "/entries/", errno.ENOSPC, times=-1))
    await asyncio.sleep(5 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto >= writer.ledger_id
    assert (await deployment.registration("b1")).limbo
    disk.faults.clear()
    await asyncio.sleep(5 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto == -1
    assert not (await deployment.registration("b1")).limbo


async def test_pass_goes_on_after_a_crash_and_after_the_metadata_was_away(deployment: Deployment, /) -> None:
    client = deployment.client()
    writers = [await client.create() for _ in range(12)]
    for writer in writers:
        for i in range(30):
            await writer.append(b"%d" % i)
        await writer.close()
    await client.close()
    await asyncio.sleep(2.0)
    await deployment.stop("b1")
    deployment.forget_everything("b1")
    for operation in range(40, 400, 60):
        deployment.simulation.world("b1")
        deployment.simulation.crash_at("b1", operation, power_loss=True)
        try:
            await deployment.start("b1")
            await asyncio.sleep(PAUSE_S)
        except Exception as error:
            deployment.simulation.add_line(f"cut short: {error}")
        deployment.simulation.crash("b1", power_loss=True)
    deployment.simulation.node("b1").disk.cancel_crash()
    bookie = await deployment.start("b1")
    await asyncio.sleep(3 * PAUSE_S)
    assert bookie.limbo_restorer.limbo_upto == -1, bookie.limbo_restorer.blocked
    for writer in writers:
        for entry in range(30):
            answer, _ = await deployment.caller("b1").read(writer.ledger_id, entry, key=writer.record.key)
            assert answer.status is Status.OK
