"""Ensemble changes over real sockets: who replaces, what is stored where, and what the metadata's silence means."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from msgspec.structs import replace

from magnetar.ledger import LedgerConfig, LedgerEnd, LedgerWriter
from magnetar.ledger.peer_format import BookieOperation, Status
from magnetar.ledger.writer_core import WriterState
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, LedgerRecord, decode_record
from magnetar.metadata.store import CommitOperation, VersionedValue
from magnetar.proto.errors import BackPressure, ConnectionLost, LedgerClosed, LedgerFenced, OutcomeUnknown
from tests.ledger.conftest import QUICK, Cluster
from tests.ledger.fake_bookie import FakeBookie


@pytest_asyncio.fixture
async def five(cluster: Cluster) -> AsyncIterator[Cluster]:
    """The cluster with two bookies more."""
    for number in (3, 4):
        cluster.bookies.append(await FakeBookie(number).start(cluster.world, cluster.metadata))
    return cluster


def standing(cluster: Cluster, writer: LedgerWriter, slot: int = 0) -> FakeBookie:
    return cluster.bookie(writer.record.fragments[-1].bookies[slot])


async def changed(writer: LedgerWriter, fragments: int) -> LedgerRecord:
    """Waits until the ledger has so many fragments."""
    news = asyncio.Event()
    writer.add_ensemble_change_listener(lambda _: news.set())
    async with asyncio.timeout(60):
        while len(writer.record.fragments) < fragments:
            news.clear()
            await news.wait()
    return writer.record


async def changed_from(writer: LedgerWriter, changes: int) -> None:
    """Appends until the ensemble has changed once more."""
    async with asyncio.timeout(60):
        while writer._core.changes == changes:
            await writer.append(b"x")


async def read_all(cluster: Cluster, writer: LedgerWriter) -> list[bytes]:
    reader = await cluster.client().open(writer.ledger_id)
    assert reader.is_closed
    found: list[bytes] = []
    while len(found) <= reader.last_entry:
        found += [bytes(entry.payload) for entry in await reader.read(len(found), reader.last_entry)]
    return found


async def test_a_bookie_that_hangs_is_replaced_though_every_entry_was_confirmed_without_it(five: Cluster) -> None:
    writer = await five.client(replace(QUICK, add_timeout_s=5.0)).create()
    await writer.append(b"before")
    hanging = standing(five, writer)
    hanging.silent.add(BookieOperation.ADD)
    assert await writer.append(b"two copies are enough") == 1
    record = await changed(writer, 2)
    assert [fragment.first_entry for fragment in record.fragments] == [0, 2]
    assert hanging.id not in record.fragments[1].bookies
    assert writer.is_writable
    assert not writer.is_short_of_bookies
    assert hanging.id in five.clients[0]._bookies.quarantined_bookies()


async def test_a_read_only_bookie_is_replaced_before_anything_was_confirmed(five: Cluster) -> None:
    writer = await five.client().create()
    full = standing(five, writer)
    full.status[BookieOperation.ADD] = Status.READ_ONLY
    await changed_from(writer, 0)
    assert full.id not in writer.record.fragments[-1].bookies
    assert await writer.append(b"y") == writer.last_confirmed


async def test_a_bookie_that_failed_lately_replaces_nobody(five: Cluster) -> None:
    client = five.client()
    writer = await client.create()
    for bookie in five.bookies:
        if bookie.id not in writer.record.fragments[0].bookies:
            client._bookies.record_failure(bookie.id)
    await standing(five, writer).stop()
    await asyncio.gather(*(writer.append(b"x") for _ in range(5)))
    await writer.wait_finished()
    assert (await writer.close()).last_entry == 4
    assert len((await client.read_record(writer.ledger_id)).fragments) == 1


async def test_a_bounded_number_of_changes_then_the_ledger_ends(five: Cluster) -> None:
    config = replace(QUICK, ensemble_changes_max=1)
    writer = await five.client(config).create()
    await standing(five, writer).stop()
    await changed_from(writer, 0)
    await standing(five, writer, 1).stop()
    while writer.is_writable:
        await asyncio.wait([writer.append(b"x")])
    assert (await writer.close()).last_entry == writer.last_confirmed
    assert len(writer.record.fragments) <= 2


# ------------------------------------------------------------------------------ the metadata
class Metadata:
    """The ledger's metadata, with puts that are stored and not answered, not stored and not answered, or never end."""

    def __init__(self, cluster: Cluster, writer: LedgerWriter) -> None:
        self._store = cluster.metadata
        self.lose_reply = self.lose_put = 0
        self.hang = False
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        writer._metadata = self  # type: ignore[assignment]

    async def get(self, path: str) -> VersionedValue | None:
        return await self._store.get(path)

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        self.reached.set()
        if self.hang:
            await self.go.wait()
        if self.lose_put:
            self.lose_put -= 1
            raise ConnectionLost("not stored, and nobody knows")
        versions = await self._store.commit(operations)
        if self.lose_reply:
            self.lose_reply -= 1
            raise ConnectionLost("stored, and nobody knows")
        return versions


@pytest.mark.parametrize("lost", ["reply", "put"])
async def test_a_change_of_unknown_outcome_is_read_again_and_recognised(five: Cluster, lost: str) -> None:
    writer = await five.client().create()
    metadata = Metadata(five, writer)
    setattr(metadata, f"lose_{lost}", 2)
    await writer.append(b"a")
    await standing(five, writer).stop()
    await asyncio.gather(*(writer.append(b"x") for _ in range(5)))
    assert len((await changed(writer, 2)).fragments) == 2
    assert await writer.close() == LedgerEnd(5, 6)
    assert len((await five.client().read_record(writer.ledger_id)).fragments) == 2
    assert len(await read_all(five, writer)) == 6


async def test_nothing_is_confirmed_while_a_change_is_on_its_way(five: Cluster) -> None:
    writer = await five.client().create()
    metadata = Metadata(five, writer)
    metadata.hang = True
    await standing(five, writer).stop()
    pending = [writer.append(b"x") for _ in range(3)]
    await metadata.reached.wait()
    later = writer.append(b"y")
    for slot in (1, 2):
        await standing(five, writer, slot).wait_requests(BookieOperation.ADD, 4)
    assert writer.state is WriterState.CHANGING
    assert not any(future.done() for future in [*pending, later])
    metadata.go.set()
    assert await asyncio.gather(*pending, later) == [0, 1, 2, 3]


async def test_a_change_that_the_metadata_never_answers_is_unknown_for_what_is_pending(five: Cluster) -> None:
    config = LedgerConfig(add_timeout_s=0.2, quorum_timeout_s=0.4, retry_s=0.02)
    writer = await five.client(config).create()
    metadata = Metadata(five, writer)
    metadata.hang = True
    await standing(five, writer).stop()
    pending = writer.append(b"x")
    with pytest.raises(OutcomeUnknown):
        await pending
    assert writer.state is WriterState.POISONED
    metadata.hang = False
    assert (await writer.close()).last_entry == -1


async def test_an_idle_handle_whose_change_stays_unknown_is_poisoned_after_the_bound(five: Cluster) -> None:
    config = LedgerConfig(add_timeout_s=5.0, quorum_timeout_s=10.0, close_timeout_s=0.3, retry_s=0.02)
    writer = await five.client(config).create()
    metadata = Metadata(five, writer)
    metadata.hang = True
    standing(five, writer).silent.add(BookieOperation.ADD)
    assert await writer.append(b"x") == 0
    await writer.wait_finished()
    assert writer.state is WriterState.POISONED
    with pytest.raises(LedgerClosed, match="not known in time"):
        await writer.append(b"y")
    metadata.hang = False
    assert await writer.close() == LedgerEnd(0, 1)


async def test_a_fence_that_only_the_slowest_replica_tells_of_finishes_an_idle_handle(five: Cluster) -> None:
    writer = await five.client().create()
    standing(five, writer).status[BookieOperation.ADD] = Status.FENCED
    outcome = await asyncio.gather(writer.append(b"x"), return_exceptions=True)
    async with asyncio.timeout(60):
        await writer.wait_finished()
    assert outcome == [0] or isinstance(outcome[0], LedgerFenced), "two have it, or the third was faster"
    assert writer.state is WriterState.POISONED
    assert len(writer.record.fragments) == 1, "a fence never changes an ensemble"


async def test_an_abandon_that_is_cancelled_itself_answers_all_who_wait(five: Cluster) -> None:
    writer = await five.client().create()
    metadata = Metadata(five, writer)
    metadata.hang = True
    closing = asyncio.ensure_future(writer.close())
    await metadata.reached.wait()
    abandoning = asyncio.ensure_future(writer.abandon())
    await asyncio.sleep(0)
    abandoning.cancel()
    outcomes = await asyncio.gather(abandoning, closing, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert isinstance(outcomes[1], OutcomeUnknown)


async def test_a_change_of_a_ledger_that_was_recovered_adopts_the_end_and_confirms_what_is_in_it(five: Cluster) -> None:
    writer = await five.client().create()
    metadata = Metadata(five, writer)
    metadata.hang = True
    await standing(five, writer).stop()
    pending = writer.append(b"x")
    await metadata.reached.wait()
    for slot in (1, 2):
        await standing(five, writer, slot).wait_requests(BookieOperation.ADD, 1)
    recovered = await five.client().recover(writer.ledger_id)
    assert recovered.last_entry == 0
    lost = writer.append(b"fenced")
    metadata.go.set()
    outcomes = await asyncio.gather(pending, lost, return_exceptions=True)
    assert outcomes[0] == 0 or isinstance(outcomes[0], LedgerFenced)
    assert isinstance(outcomes[1], LedgerFenced)
    assert await writer.close() == LedgerEnd(0, 1)
    path = paths.ledger(writer.ledger_id)
    assert decode_ledger_record(await five.metadata.get(path), path).state == CLOSED


def decode_ledger_record(node: VersionedValue | None, path: str) -> LedgerRecord:
    assert node is not None
    return decode_record(node.value, LedgerRecord, path)


# ------------------------------------------------------------------------------ back-pressure
async def test_an_append_beyond_the_bounds_fails_definitely_and_ready_waits_for_room(five: Cluster) -> None:
    config = replace(QUICK, pending_entries_max=3)
    writer = await five.client(config).create()
    for bookie in five.bookies:
        bookie.status[BookieOperation.ADD] = Status.BUSY
    pending = [writer.append(b"x") for _ in range(3)]
    with pytest.raises(BackPressure) as caught:
        await writer.append(b"one too many")
    assert caught.value.definite
    assert writer.is_writable
    waiting = asyncio.ensure_future(writer.wait_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    for bookie in five.bookies:
        bookie.status.clear()
    await waiting
    assert await asyncio.gather(*pending) == [0, 1, 2]
    assert await writer.append(b"x") == 3


async def test_what_a_hanging_bookie_has_not_answered_is_bounded_though_it_is_confirmed(five: Cluster) -> None:
    config = LedgerConfig(add_timeout_s=5.0, unanswered_bytes_max=3000)
    writer = await five.client(config).create()
    hanging = standing(five, writer)
    hanging.status[BookieOperation.ADD] = Status.BUSY
    while writer.has_room:
        await writer.append(bytes(500))
    assert writer.pending_entries == 0, "the other two have confirmed all of it"
    with pytest.raises(BackPressure, match="not answered"):
        await writer.append(b"x")
    hanging.status.clear()
    await writer.wait_room()
    assert await writer.append(b"x") == writer.last_confirmed


async def test_bytes_are_bounded_too_and_ready_returns_when_the_handle_ends(five: Cluster) -> None:
    config = replace(QUICK, pending_bytes_max=1000)
    writer = await five.client(config).create()
    for bookie in five.bookies:
        bookie.silent.add(BookieOperation.ADD)
    pending = writer.append(bytes(2000))
    assert not writer.has_room
    with pytest.raises(BackPressure):
        await writer.append(b"")
    waiting = asyncio.ensure_future(writer.wait_room())
    await writer.abandon()
    await waiting
    with pytest.raises(OutcomeUnknown):
        await pending
    with pytest.raises(LedgerClosed):
        await writer.append(b"")
