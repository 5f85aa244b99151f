"""Durable cursors on real bookies: what is acknowledged stays so, whoever owns the topic next."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from pyroaring import BitMap

from magnetar.broker.common.config import BrokerConfig, LedgerReplication
from magnetar.broker.log.log_shape_core import LogShape
from magnetar.broker.log.managed_ledger import TopicFenced
from magnetar.broker.log.snapshot_ledger import TopicStateLedgers
from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription import cursors
from magnetar.broker.subscription.cursors import DurableCursor, cursor_path
from magnetar.ledger import LedgerClient, LedgerConfig, LedgerWriter
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, CursorRecord, LedgerRecord, decode_record
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import InternalError, MagnetarError, NotEnoughBookies, OutcomeUnknown
from magnetar.proto.names import Position, TopicName
from tests.broker.storage import alone
from tests.broker.subscription.core.shapes import shape_of
from tests.support.cluster import SMALL, Cluster, cluster

TOPIC = TopicName.parse("cursors")


async def one_copy() -> LedgerReplication:
    return LedgerReplication(1, 1, 1)


class Bench:
    def __init__(self, running: Cluster, store: MetadataStore) -> None:
        self.running = running
        self.store = store
        self.shape: LogShape = shape_of(1000)
        self.fenced: list[MagnetarError] = []
        self.ledgers = LedgerClient(running.world, store, LedgerConfig(1, 1, 1))
        self.all: list[DurableCursor] = []

    def cursor(self, name: str = "s", **changes: object) -> DurableCursor:
        config: BrokerConfig = replace(SMALL, **changes)  # type: ignore[arg-type]

        cursor = DurableCursor(
            self.running.world, self.store, self.ledgers, config, TOPIC, name, replication=one_copy,
            on_fenced=self.fenced.append,
        )  # fmt: skip
        self.all.append(cursor)
        return cursor

    async def created(self, **changes: object) -> DurableCursor:
        cursor = self.cursor(**changes)
        await cursor.create(self.shape, self.shape.start_position, {"a": "b"}, alone(self.store))
        return cursor

    async def opened(self, **changes: object) -> DurableCursor:
        cursor = self.cursor(**changes)
        await cursor.open(self.shape)
        return cursor

    async def record(self) -> CursorRecord:
        node = await self.store.get(cursor_path(TOPIC, "s"))
        assert node is not None
        return decode_record(node.value, CursorRecord, cursor_path(TOPIC, "s"))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with cluster(tmp_path, brokers=0) as running:
        store = running.store.new_session()
        bench = Bench(running, store)
        yield bench
        for cursor in bench.all:
            cursor.abandon()
        await bench.ledgers.close()
        await store.close()


def ack(cursor: DurableCursor, *entries: int) -> None:
    for entry in entries:
        cursor.cursor.ack(Position(10, entry))


async def test_all_acks_that_wait_are_one_write(bench: Bench) -> None:
    cursor = await bench.created()
    receipts = []
    for entry in range(300):
        ack(cursor, entry)
        receipts.append(cursor.make_acks_durable_future())
    await asyncio.gather(*receipts)
    assert cursor.writes <= 2
    assert cursor.cursor.persisted_mark == (10, 299)


async def test_an_ack_without_receipt_is_durable_after_a_while_and_at_close(bench: Bench) -> None:
    cursor = await bench.created(cursor_flush_s=0.05)
    ack(cursor, 0)
    cursor.schedule_write()
    async with asyncio.timeout(10):
        while cursor.cursor.has_unstored_changes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ack(cursor, 1)
    cursor.schedule_write()
    await cursor.close()
    assert (await bench.opened()).cursor.mark == (10, 1)


async def test_the_receipt_comes_after_the_write_and_not_before(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = await bench.created()
    held: list[asyncio.Future[int]] = []
    append = LedgerWriter.append

    def late(self: LedgerWriter, *frames: bytes) -> asyncio.Future[int]:
        held.append(append(self, *frames))
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gate.append(answer)
        begun.set()
        return answer

    begun = asyncio.Event()
    gate: list[asyncio.Future[int]] = []
    monkeypatch.setattr(LedgerWriter, "append", late)
    ack(cursor, 0)
    receipt = cursor.make_acks_durable_future()
    async with asyncio.timeout(10):
        await begun.wait()
    ack(cursor, 1)  # after the write began: not in it
    await asyncio.sleep(0.05)
    assert not receipt.done()
    assert cursor.cursor.persisted_mark == (10, -1), "trimming sees what is stored, not what is acknowledged"
    gate[0].set_result(await held[0])
    await receipt
    assert cursor.cursor.persisted_mark == (10, 0)
    assert cursor.cursor.has_unstored_changes


async def test_a_fault_while_storing_is_told_to_those_who_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = await bench.created()

    async def broken(_: DurableCursor) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(DurableCursor, "_write", broken)
    ack(cursor, 0)
    with pytest.raises(InternalError, match="a bug"):
        await cursor.make_acks_durable_future()
    assert isinstance(bench.fenced[0], InternalError)


async def test_closing_waits_for_bookies_that_do_not_answer_no_longer_than_it_says(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = await bench.created(close_timeout_s=0.1, cursor_snapshot_bytes=0)

    async def no_bookies(_: DurableCursor) -> None:
        raise NotEnoughBookies("none")

    monkeypatch.setattr(DurableCursor, "_write", no_bookies)
    ack(cursor, 0)
    async with asyncio.timeout(10):
        await cursor.close()
    assert (await bench.opened()).cursor.mark == (10, -1)


async def test_a_cursor_whose_last_write_fails_is_closed_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = await bench.created(cursor_snapshot_bytes=0)
    ack(cursor, 0)
    await cursor.make_acks_durable_future()
    writer = cursor._ledger._writer
    assert writer is not None

    async def fenced(_: DurableCursor) -> None:
        raise TopicFenced("another broker has it")

    monkeypatch.setattr(DurableCursor, "_write", fenced)
    ack(cursor, 1)
    with pytest.raises(TopicFenced, match="another broker"):
        await cursor.close()
    async with asyncio.timeout(10):
        await writer.wait_finished()
    assert cursor._ledger._writer is None
    assert (await bench.opened()).cursor.mark == (10, 0)


async def test_a_former_owner_can_neither_write_nor_switch_its_cursor_ledger(bench: Bench) -> None:
    first = await bench.created()
    ack(first, 0)
    await first.make_acks_durable_future()
    second = await bench.opened()
    ack(first, 1)
    with pytest.raises(TopicFenced):
        await first.make_acks_durable_future()
    assert isinstance(bench.fenced[0], TopicFenced)
    ack(second, 1, 2)
    await second.make_acks_durable_future()
    assert (await bench.opened()).cursor.mark == (10, 2)


async def test_a_former_owner_that_never_wrote_cannot_begin(bench: Bench) -> None:
    first = await bench.created()
    second = await bench.opened()
    ack(first, 0, 1, 2)
    with pytest.raises(TopicFenced):
        await first.make_acks_durable_future()
    assert second.cursor.mark == (10, -1)
    assert (await bench.opened()).cursor.mark == (10, -1)


async def test_a_full_cursor_ledger_gives_way_to_the_next_and_is_deleted(bench: Bench) -> None:
    cursor = await bench.created(cursor_roll_entries=3)
    ledgers = set()
    for entry in range(10):
        ack(cursor, entry)
        await cursor.make_acks_durable_future()
        ledgers.add((await bench.record()).ledger_id)
    assert len(ledgers) == 4
    assert await bench.store.children(paths.LEDGERS) == [f"{max(ledgers):020d}"]
    assert (await bench.opened()).cursor.mark == (10, 9)


async def test_a_state_of_which_the_last_chunk_is_missing_falls_back_to_the_one_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cursor = await bench.created()
    ack(cursor, 0)
    await cursor.make_acks_durable_future()
    monkeypatch.setattr(stored, "CHUNK_BYTES_MAX", 20)
    ack(cursor, 1, 3)
    torn = cursor._log.plan_write(cursor.cursor, 2).entries
    assert len(torn) > 2
    writer = cursor._ledger._writer
    assert writer is not None
    for chunk in torn[:-1]:
        await writer.append(chunk)
    again = await bench.opened()
    assert again.cursor.mark == (10, 0)
    assert "goes back" not in caplog.text, "a torn state is what a crash leaves, and no damage"
    ack(again, 1, 3)
    await again.make_acks_durable_future()
    last = await bench.opened()
    assert (last.cursor.mark, last.cursor.hole_entry_count) == (Position(10, 1), 1)


async def test_a_damaged_state_is_an_alarm_and_goes_back_never_forward(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    cursor = await bench.created()
    ack(cursor, 0, 2)
    await cursor.make_acks_durable_future()
    writer = cursor._ledger._writer
    assert writer is not None
    await writer.append(b"MC is not a state of a cursor")
    again = await bench.opened()
    assert (again.cursor.mark, again.cursor.hole_entry_count) == (Position(10, 0), 1)
    assert "the cursor goes back" in caplog.text
    await bench.ledgers.delete((await bench.record()).ledger_id)
    assert (await bench.opened()).cursor.mark == (10, 0), "the position in the record"


# ----------------------------------------------------------------------------------- no bookies take a ledger
@pytest.fixture
def bookies_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A switch: while it is on, no cursor ledger is made, and none is written."""
    away = False
    append, create = LedgerWriter.append, TopicStateLedgers.create_ledger

    def append_or_not(self: LedgerWriter, *frames: bytes) -> asyncio.Future[int]:
        if away:
            raise OutcomeUnknown("no bookie answers")
        return append(self, *frames)

    async def create_or_not(self: TopicStateLedgers) -> LedgerWriter:
        if away:
            raise NotEnoughBookies("none is there")
        return await create(self)

    def switch(to: bool) -> None:
        nonlocal away
        away = to

    monkeypatch.setattr(LedgerWriter, "append", append_or_not)
    monkeypatch.setattr(TopicStateLedgers, "create_ledger", create_or_not)
    monkeypatch.setattr(cursors, "RECORD_STATE_INTERVAL_S", 0.0)
    monkeypatch.setattr(cursors, "STORE_RETRY_S", 0.01)
    return switch


async def lacks(bench: Bench) -> CursorRecord:
    """The record, when a state that has no room is in it."""
    async with asyncio.timeout(10):
        while not (record := await bench.record()).snapshot_lacks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return record


async def test_while_bookies_take_no_ledger_the_state_is_in_the_record_and_receipts_come(
    bench: Bench, bookies_away: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    cursor = await bench.created()
    ack(cursor, 0, 5)
    await cursor.make_acks_durable_future()
    bookies_away(True)
    for entry in (1, 7):
        ack(cursor, entry)
        async with asyncio.timeout(10):
            await cursor.make_acks_durable_future()
    record = await bench.record()
    assert (record.snapshot_lacks, record.mark_entry, record.ledger_id >= 0) == (0, 1, True)
    assert caplog.text.count("the state is stored in the metadata, as no ledger takes it") == 1
    again = await bench.opened()
    assert (again.cursor.mark, again.cursor.acked[10]) == (Position(10, 1), BitMap([5, 7]))


async def test_when_bookies_are_back_the_commit_that_names_the_ledger_removes_the_state_of_the_record(
    bench: Bench, bookies_away: Callable[[bool], None]
) -> None:
    cursor = await bench.created()
    ack(cursor, 5)
    await cursor.make_acks_durable_future()
    bookies_away(True)
    ack(cursor, 7)
    await cursor.make_acks_durable_future()
    before = await bench.record()
    bookies_away(False)
    ack(cursor, 0)
    await cursor.make_acks_durable_future()
    after = await bench.record()
    assert before.snapshot
    assert (after.snapshot, after.ledger_id != before.ledger_id) == (b"", True)
    assert await bench.store.children(paths.LEDGERS) == [f"{after.ledger_id:020d}"], "the one before is deleted"
    again = await bench.opened()
    assert (again.cursor.mark, again.cursor.acked[10]) == (Position(10, 0), BitMap([5, 7]))


async def test_of_a_state_without_room_the_last_holes_wait_for_a_ledger_and_none_that_was_durable_is_lost(
    bench: Bench, bookies_away: Callable[[bool], None]
) -> None:
    cursor = await bench.created(cursor_snapshot_bytes=190)
    durable = set(range(501, 900, 2))
    ack(cursor, *durable)
    await cursor.make_acks_durable_future()
    bookies_away(True)
    ack(cursor, 0, 1, *range(4, 300, 2))
    receipt = cursor.make_acks_durable_future()
    record = await lacks(bench)
    assert (record.mark_entry, len(record.snapshot) <= 190) == (1, True)
    assert not receipt.done(), "some of what it waits for is not stored"
    assert cursor.cursor.persisted_mark == (10, -1), "and nothing is trimmed for it"
    bookies_away(False)
    await receipt
    assert (await bench.record()).snapshot_lacks == 0


async def test_a_crash_while_a_state_lacks_holes_keeps_what_was_durable_and_redelivers_the_rest(
    bench: Bench, bookies_away: Callable[[bool], None]
) -> None:
    cursor = await bench.created(cursor_snapshot_bytes=190)
    durable = set(range(501, 900, 2))
    ack(cursor, *durable)
    await cursor.make_acks_durable_future()
    bookies_away(True)
    ack(cursor, 0, 1, *range(4, 300, 2))
    receipt = cursor.make_acks_durable_future()
    record = await lacks(bench)
    cursor.abandon()
    assert isinstance(await asyncio.wait_for(asyncio.gather(receipt, return_exceptions=True), 10), list)
    again = await bench.opened()
    found = set(again.cursor.acked[10])
    assert again.cursor.mark == (10, 1), "the position"
    assert durable <= found, "of the ledger"
    assert found - durable == set(list(range(4, 300, 2))[: 148 + 200 - record.snapshot_lacks]), "the first holes"


async def test_after_a_seek_the_holes_of_an_older_ledger_do_not_count(
    bench: Bench, bookies_away: Callable[[bool], None]
) -> None:
    """They are of entries that the seek wants again: an opener that added them would skip these."""
    cursor = await bench.created(cursor_snapshot_bytes=190)
    ack(cursor, *range(501, 900, 2))
    await cursor.make_acks_durable_future()
    bookies_away(True)
    cursor.cursor.seek(Position(10, 1))
    ack(cursor, *range(4, 300, 2))
    receipt = cursor.make_acks_durable_future()
    assert (await lacks(bench)).ledger_id == -1
    cursor.abandon()
    await asyncio.wait_for(asyncio.gather(receipt, return_exceptions=True), 10)
    again = await bench.opened()
    assert again.cursor.mark == (10, 1)
    assert set(again.cursor.acked[10]) < set(range(4, 300, 2))


async def test_a_metadata_that_is_asked_often_is_asked_once_in_a_while(
    bench: Bench, bookies_away: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "RECORD_STATE_INTERVAL_S", 3600.0)
    cursor = await bench.created()
    bookies_away(True)
    ack(cursor, 0)
    await cursor.make_acks_durable_future()
    ack(cursor, 1)
    receipt = cursor.make_acks_durable_future()
    await asyncio.sleep(0.1)
    assert not receipt.done()
    assert (await bench.record()).mark_entry == 0
    bookies_away(False)
    await receipt
    assert (await bench.opened()).cursor.mark == (10, 1)


async def test_a_removed_subscription_leaves_nothing(bench: Bench) -> None:
    cursor = await bench.created()
    ack(cursor, 0)
    await cursor.make_acks_durable_future()
    await cursor.delete()
    assert await bench.store.get(cursor_path(TOPIC, "s")) is None
    assert not await bench.store.children(paths.LEDGERS)


# -------------------------------------------------------------------------------------- a ledger that is not written
async def written(bench: Bench, *entries: int, **changes: object) -> DurableCursor:
    cursor = await bench.created(**changes)
    ack(cursor, *entries)
    await cursor.make_acks_durable_future()
    return cursor


async def ledger(bench: Bench) -> LedgerRecord:
    path = paths.ledger((await bench.record()).ledger_id)
    node = await bench.store.get(path)
    assert node is not None
    return decode_record(node.value, LedgerRecord, path)


@pytest.mark.parametrize("room", [True, False])
async def test_an_idle_cursor_ledger_ends_and_the_next_owner_finds_its_state(bench: Bench, room: bool) -> None:
    cursor = await written(bench, 0, 1, 5, cursor_snapshot_bytes=4096 if room else 1)
    assert not cursor.has_idle_ledger(1e9), "it was written just now"
    assert cursor.has_idle_ledger(0.0)
    await cursor.close_idle_ledger()
    assert not cursor.has_idle_ledger(0.0)
    assert (await ledger(bench)).state == CLOSED
    assert bool((await bench.record()).snapshot) is room
    later = await bench.opened()
    assert (later.cursor.mark, later.cursor.is_acked(Position(10, 5))) == ((10, 1), True)


async def test_after_an_idle_cursor_ledger_the_next_write_begins_another_with_the_whole_state(bench: Bench) -> None:
    cursor = await written(bench, 0, 1, 5)
    before = await bench.record()
    await cursor.close_idle_ledger()
    ack(cursor, 7)
    await cursor.make_acks_durable_future()
    after = await bench.record()
    assert after.ledger_id > before.ledger_id
    assert after.snapshot == b"", "the ledger is newer"
    later = await bench.opened()
    assert [entry for entry in range(10) if later.cursor.is_acked(Position(10, entry))] == [0, 1, 5, 7]


async def test_an_acknowledgement_while_an_idle_cursor_ledger_ends_is_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = await written(bench, 0)
    change = DurableCursor._change
    receipts: list[asyncio.Future[None]] = []

    async def changing(self: DurableCursor, change_to: Callable[[CursorRecord], CursorRecord]) -> None:
        await change(self, change_to)
        if not receipts:
            ack(cursor, 1)
            receipts.append(cursor.make_acks_durable_future())

    monkeypatch.setattr(DurableCursor, "_change", changing)
    await cursor.close_idle_ledger()
    await receipts[0]
    monkeypatch.undo()
    assert (await bench.opened()).cursor.mark == (10, 1)


async def test_a_cursor_that_closes_while_its_idle_ledger_ends_leaves_it_closed(bench: Bench) -> None:
    cursor = await written(bench, 0)
    ending = asyncio.ensure_future(cursor.close_idle_ledger())
    await asyncio.sleep(0)
    await cursor.close()
    await ending
    assert (await ledger(bench)).state == CLOSED
    assert (await bench.opened()).cursor.mark == (10, 0)


async def test_a_former_owner_learns_it_when_its_idle_cursor_ledger_ends(bench: Bench) -> None:
    first = await written(bench, 0)
    second = await bench.opened()
    await first.close_idle_ledger()
    assert isinstance(bench.fenced[0], TopicFenced)
    ack(second, 1)
    await second.make_acks_durable_future()
    assert (await bench.opened()).cursor.mark == (10, 1)
