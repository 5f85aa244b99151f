"""A compaction dies at any of its writes, or does not learn how one ended: nothing is lost, doubled or left behind."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.log.compaction import COMPACTION_STEPS, CompactedLedger, Compaction, CompactionRun
from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.log.managed_ledger import ManagedLedgerRecord, TopicFenced, topic_path
from magnetar.metadata.records import TopicLedger, TopicRecord, decode_record, encode_record
from magnetar.metadata.store import ANY_VERSION, CommitOperation, PutNode, VersionedValue
from magnetar.proto.entry import encode_broker_part, encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import Busy, ConnectionLost, MagnetarError, Unavailable
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import CompactionState
from magnetar.runtime.process import make_system_world
from tests.broker.storage import Session, Storage
from tests.support.cluster import SMALL

NAME = TopicName.parse("compacted")
LEDGER = 1_000_000


def entry_of(index: int, key: str, value: bytes) -> bytes:
    metadata = MessageMetadata(producer_name="p", sequence_id=index, publish_time=1, partition_key=key)
    return encode_broker_part(index, 1) + encode_entry(metadata, value)


class Reader:
    def __init__(self, entries: list[bytes]) -> None:
        self.entries = entries

    async def read(self, position: Position, bytes_max: int) -> list[StoredEntry]:
        some = range(position[1], min(position[1] + 3, len(self.entries)))
        return [StoredEntry.parse(Position(position[0], at), self.entries[at]) for at in some]


class FakeLog:
    """A topic's log in memory whose record is in the storage."""

    def __init__(self, session: Session, entries: list[bytes]) -> None:
        self.topic = NAME
        self.state = None
        self.reader = Reader(entries)
        self.shape = LogShape()
        self.shape.add(LedgerSpan(LEDGER, 0, len(entries) - 1, len(entries), open=True))
        self.list = ManagedLedgerRecord(session, NAME)  # type: ignore[arg-type]

    @property
    def record(self) -> TopicRecord:
        return self.list.record

    async def commit_fields(self, **fields: object) -> None:
        await self.list.change_record(self.record.ledgers, **fields)


class Bench:
    def __init__(self) -> None:
        self.storage = Storage()
        record = TopicRecord(ledgers=(TopicLedger(ledger_id=LEDGER, first_index=0),))
        self.storage.nodes[topic_path(NAME)] = VersionedValue(encode_record(record, topic_path(NAME)), 0)
        self.entries: list[bytes] = []
        self.latest: dict[str, tuple[int, bytes]] = {}

    def publish(self, *messages: tuple[str, bytes]) -> None:
        for key, value in messages:
            index = len(self.entries)
            self.entries.append(entry_of(index, key, value))
            self.latest[key] = (index, value)

    async def owner(self) -> tuple[Session, Compaction]:
        """Takes the topic over, as ManagedLedger does: pending_deletion ledgers go after the record was written."""
        session = self.storage.session()
        log = FakeLog(session, self.entries)
        await log.list.read_record()
        pending_deletion = log.record.pending_deletion
        await log.list.change_record(log.record.ledgers, pending_deletion=())
        for ledger_id in pending_deletion:
            await session.delete(ledger_id)

        async def one_copy() -> LedgerReplication:
            return LedgerReplication(1, 1, 1)

        compaction = Compaction(
            make_system_world(1), session, replace(SMALL, compaction_memory_bytes=400), NAME, log,  # type: ignore[arg-type]
            replication=one_copy, changed=lambda: None,
        )  # fmt: skip
        await compaction.open(SMALL)
        return session, compaction

    async def compact(self, session: Session, compaction: Compaction) -> None:
        compaction.start()
        dead = asyncio.create_task(session.dead.wait())
        done = asyncio.create_task(compaction.wait_finished())
        await asyncio.wait([dead, done], return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        compaction.stop()
        await asyncio.gather(done, dead, return_exceptions=True)

    def record(self) -> TopicRecord:
        return decode_record(self.storage.nodes[topic_path(NAME)].value, TopicRecord, topic_path(NAME))

    async def shown(self) -> list[tuple[int, bytes]]:
        """What a reader of the compacted topic sees, from the record alone."""
        compacted = self.record().compacted
        found: list[StoredEntry] = []
        start = 0
        if compacted is not None:
            session: Any = self.storage.session()
            log = await CompactedLedger.open(session, compacted)
            while len(found) < log.entries:
                found += await log.read(len(found), 100)
            start = compacted.horizon_entry + 1
        found += [StoredEntry.parse(Position(LEDGER, at), self.entries[at]) for at in range(start, len(self.entries))]
        return [(each.index, each.payload) for each in found]

    def expected(self, horizon: int) -> list[tuple[int, bytes]]:
        """Of each key the latest up to the horizon, then everything."""
        latest: dict[bytes, int] = {}
        for at in range(horizon):
            latest[_key_of(self.entries[at])] = at
        kept = [*sorted(latest.values()), *range(horizon, len(self.entries))]
        return [(at, self.entries[at]) for at in kept]


def _key_of(entry: bytes) -> bytes:
    return entry.split(b"key-")[1][:1]


def some(first: int, count: int) -> Sequence[tuple[str, bytes]]:
    return [(f"key-{number % 4}", b"%d" % number) for number in range(first, first + count)]


@pytest.mark.parametrize("lands", [True, False])
async def test_a_crash_at_any_write_of_a_compaction_loses_nothing_doubles_nothing_and_leaves_nothing(
    lands: bool,
) -> None:
    writes, died = 0, 0
    while True:
        bench = Bench()
        bench.publish(*some(0, 11))
        session, compaction = await bench.owner()
        await bench.compact(session, compaction)
        bench.publish(*some(3, 7))
        session, compaction = await bench.owner()
        session.crash_at(writes, lands=lands)
        await bench.compact(session, compaction)
        finished = not session.dead.is_set()
        horizon = bench.record().compacted.horizon_entry + 1  # type: ignore[union-attr]
        assert horizon in (11, 18)
        assert await bench.shown() == bench.expected(horizon)
        session, compaction = await bench.owner()
        assert await bench.shown() == bench.expected(horizon)
        await bench.compact(session, compaction)
        assert compaction.progress.state is CompactionState.SUCCESS
        assert await bench.shown() == bench.expected(18)
        await bench.owner()
        left = {ledger for ledger, stored in bench.storage.ledgers.items() if stored.entries}
        assert left == {bench.record().compacted.ledger_id}  # type: ignore[union-attr]
        unnamed = (writes, lands) in ((0, True), (1, False))  # an empty one
        assert len(bench.storage.ledgers) == 1 + unnamed
        if finished:
            break
        died += 1
        writes += 1
    assert died >= 7, "create, name, survivors, table, publish, delete"


@pytest.mark.parametrize("landed", [True, False])
async def test_when_it_is_unknown_whether_the_record_was_written_nothing_is_deleted(landed: bool) -> None:
    bench = Bench()
    bench.publish(*some(0, 11))
    session, compaction = await bench.owner()
    await bench.compact(session, compaction)
    bench.publish(*some(3, 7))
    session, compaction = await bench.owner()
    real_commit, deleted = session.commit, list[int]()
    real_delete = session.delete

    async def commit(operations: Sequence[CommitOperation]) -> list[int]:
        (put,) = operations
        assert isinstance(put, PutNode)
        publishes = decode_record(put.value, TopicRecord, topic_path(NAME)).compacted != bench.record().compacted
        if not publishes:
            return await real_commit(operations)
        if landed:
            await real_commit(operations)
        session.get = lost  # type: ignore[method-assign, assignment]
        raise Unknown("no answer")

    async def lost(path: str) -> VersionedValue | None:
        raise Unknown("no answer")

    async def delete(what: str | int, expected: int = ANY_VERSION) -> None:
        assert isinstance(what, int)
        deleted.append(what)
        await real_delete(what)

    session.commit, session.delete = commit, delete  # type: ignore[method-assign]
    before = set(bench.storage.ledgers)
    await bench.compact(session, compaction)
    assert compaction.progress.state is CompactionState.ERROR
    assert compaction.progress.step == "publish"
    assert deleted == []
    assert before < set(bench.storage.ledgers)
    horizon = bench.record().compacted.horizon_entry + 1  # type: ignore[union-attr]
    assert horizon == (18 if landed else 11)
    assert await bench.shown() == bench.expected(horizon)
    del session.get, session.commit, session.delete  # the metadata is back
    bench.publish(*some(0, 3))
    compaction.log.shape.tail_span.last_entry = 20
    compaction.log.shape.tail_span.end_index = 21
    await bench.compact(session, compaction)
    assert compaction.progress.error == ""
    assert await bench.shown() == bench.expected(21)
    await bench.owner()
    assert sorted(bench.storage.ledgers) == [bench.record().compacted.ledger_id]  # type: ignore[union-attr]


class Unknown(ConnectionLost):
    """Not to be tried again, so that the test is short."""

    retryable = False


async def test_a_former_owner_cannot_publish_and_deletes_only_its_own(tmp_path: object) -> None:
    bench = Bench()
    bench.publish(*some(0, 11))
    session, compaction = await bench.owner()
    other, new_owner = await bench.owner()
    await bench.compact(other, new_owner)
    kept = set(bench.storage.ledgers)
    await bench.compact(session, compaction)
    assert compaction.progress.state is CompactionState.ERROR
    assert set(bench.storage.ledgers) == kept
    assert await bench.shown() == bench.expected(11)


async def test_from_the_start_of_the_first_compaction_on_the_log_is_held_until_its_survivors_are_copied() -> None:
    """What it read first and copies last must be there in between, whoever has acknowledged it."""
    bench = Bench()
    bench.publish(*some(0, 20))
    _, compaction = await bench.owner()
    assert compaction.trim_limit(SMALL) is None, "a topic that was never compacted keeps nothing for it"
    assert compaction.start()
    held = compaction.trim_limit(SMALL)
    assert held is not None
    assert held.mark == compaction.log.shape.start_position
    await compaction.wait_finished()
    held = compaction.trim_limit(SMALL)
    assert held is not None
    assert held.mark == Position(LEDGER, 19)


async def test_what_waits_for_a_compaction_that_is_stopped_goes_on_and_is_not_cancelled_with_it() -> None:
    bench = Bench()
    bench.publish(*some(0, 20))
    _, compaction = await bench.owner()
    assert compaction.start()
    waiting = asyncio.create_task(compaction.wait_finished())
    await asyncio.sleep(0)
    compaction.stop()
    await asyncio.wait([waiting])
    assert not waiting.cancelled()
    assert waiting.exception() is None
    assert not compaction.is_running
    assert compaction.start()
    waiting = asyncio.create_task(compaction.wait_finished())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert compaction.is_running, "what gives up waiting cancels nothing"
    await compaction.wait_finished()
    assert compaction.progress.state is CompactionState.SUCCESS


@pytest.mark.parametrize("published", [20, 30])
async def test_a_truncated_topic_has_an_empty_compacted_form_and_goes_on_from_there(published: int) -> None:
    bench = Bench()
    bench.publish(*some(0, 20))
    session, compaction = await bench.owner()
    await compaction.truncate(SMALL)
    assert bench.record().compacted is None, "it was never compacted, and no policy asks for it"
    await bench.compact(session, compaction)
    former = bench.record().compacted
    assert former is not None
    assert former.messages == 4
    bench.publish(*some(20, published - 20))
    session, compaction = await bench.owner()
    await compaction.truncate(SMALL)
    assert await bench.shown() == []
    found = bench.record().compacted
    assert found is not None
    assert (found.horizon_entry, found.end_index, found.entries) == (published - 1, published, 0)
    assert former.ledger_id not in bench.storage.ledgers
    await compaction.truncate(SMALL)
    assert bench.record().compacted == found, "there is nothing to empty"
    bench.publish(*some(published, 10))
    session, compaction = await bench.owner()
    await bench.compact(session, compaction)
    assert [index for index, _ in await bench.shown()] == list(range(published + 6, published + 10))


async def test_a_topic_is_not_truncated_while_it_is_compacted_and_an_error_is_told(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.publish(*some(0, 20))
    _, compaction = await bench.owner()
    assert compaction.start()
    with pytest.raises(Busy, match="being compacted"):
        await compaction.truncate(SMALL)
    await compaction.wait_finished()
    before = bench.record()

    async def fail() -> None:
        raise ConnectionLost("no bookie")

    monkeypatch.setattr(compaction.ledgers.__class__, "create_ledger", lambda _: fail())
    with pytest.raises(ConnectionLost):
        await compaction.truncate(SMALL)
    assert bench.record() == before
    truncating = asyncio.create_task(compaction.truncate(SMALL))
    await asyncio.sleep(0)
    compaction.stop()
    with pytest.raises(Unavailable, match="ended"):
        await truncating


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_compaction_that_is_stopped_does_not_count_as_running(turns: int) -> None:
    bench = Bench()
    bench.publish(*some(0, 20))
    _, compaction = await bench.owner()
    assert compaction.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    compaction.stop()
    await compaction.wait_finished()
    await asyncio.sleep(0)
    assert not compaction.is_running
    assert compaction.progress.state is CompactionState.ERROR
    assert "stopped" in compaction.progress.error
    assert compaction.start()
    await compaction.wait_finished()
    assert compaction.progress.state is CompactionState.SUCCESS


async def test_complaint_24_compactions_leave_neither_memory_nor_ledgers_behind() -> None:
    """Whatever number of them: one ledger, one table of rows, no task, no key."""
    bench = Bench()
    bench.publish(*some(0, 4))
    session, compaction = await bench.owner()
    for turn in range(20):
        bench.publish(*some(turn, 5))
        compaction.log.shape.tail_span.last_entry = len(bench.entries) - 1
        compaction.log.shape.tail_span.end_index = len(bench.entries)
        await bench.compact(session, compaction)
        assert compaction.progress.state is CompactionState.SUCCESS
        assert len(bench.storage.ledgers) == 1
        assert not compaction.is_running
        assert compaction.view.compacted is not None
        assert [len(row.survivors) for row in compaction.view.compacted.rows] == [4]
        assert len(bench.record().pending_deletion) <= 1
    assert await bench.shown() == bench.expected(len(bench.entries))


def test_the_steps_have_the_order_that_is_promised() -> None:
    run = CompactionRun
    assert (
        COMPACTION_STEPS.index(run.name)
        < COMPACTION_STEPS.index(run.copy)
        < COMPACTION_STEPS.index(run.close)
        < COMPACTION_STEPS.index(run.publish)
    )
    assert COMPACTION_STEPS[-1] is run.delete
    assert issubclass(TopicFenced, MagnetarError)
