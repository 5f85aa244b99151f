"""A ledger of snapshots with a crash, and with a failure, at each step of a roll; what a reader makes of what is left.

The snapshots here are those of deduplication, the record is one node that holds a ledger id and its owner's claim.
"""

import asyncio
from typing import Any

import pytest

from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.cache import TailCache
from magnetar.broker.log.managed_ledger import ManagedLedger, ManagedLedgerRecord, TopicFenced, topic_path
from magnetar.broker.log.snapshot_ledger import ROLL_STEPS, SnapshotLedger, TopicStateLedgers
from magnetar.broker.topic import dedup as stored
from magnetar.broker.topic.dedup_core import DedupSnapshot, ProducerSequenceProgress
from magnetar.ledger import LedgerReader
from magnetar.ledger.placement_core import StripingReduction
from magnetar.metadata.records import TopicLedger, TopicRecord, decode_record, encode_record
from magnetar.metadata.store import PutNode, VersionedValue, update_node
from magnetar.proto.errors import ConnectionLost, LedgerFenced, MagnetarError, NotEnoughBookies, OutcomeUnknown
from magnetar.proto.names import Position, TopicName
from magnetar.runtime.process import make_system_world
from tests.broker.storage import Session, Storage, Writer
from tests.support.cluster import SMALL

RECORD = "/record"
CRASHES = 12
"""More than a roll has writes: a ledger, two entries, the record, a deletion."""


async def one_copy() -> LedgerReplication:
    return LedgerReplication(1, 1, 1)


async def whole(_reader: LedgerReader, pieces: list[stored.DedupSnapshotPiece]) -> int:
    return stored.decode_snapshot(pieces).position.entry_id


class Owner:
    """Of the record, in a process of its own."""

    def __init__(self, storage: Storage, claim: str) -> None:
        self.session = storage.session()
        self.claim = claim
        self.alarms: list[str] = []
        session: Any = self.session
        ledgers = TopicStateLedgers(session, SMALL, one_copy, TopicName.parse("t"), test="snapshots")
        self.ledger = SnapshotLedger(
            ledgers, stored.decode_piece, stored.DamagedDedupSnapshot, lambda what, error: self.alarms.append(what)
        )

    async def open(self) -> int | None:
        """Claims the record and reads the last snapshot."""
        session: Any = self.session
        found = await update_node(session, RECORD, lambda node: b"%s %s" % (self.claim.encode(), _named(node)))
        assert found is not None
        ledger_id = int(_named(found))
        return await self.ledger.recover_state(ledger_id, whole) if ledger_id >= 0 else None

    async def name(self, ledger_id: int) -> None:
        session: Any = self.session
        attempts = 0

        def transform(node: VersionedValue | None) -> bytes:
            nonlocal attempts
            attempts += 1
            assert node is not None
            if not node.value.startswith(self.claim.encode()):
                fenced = TopicFenced("another owner")
                fenced.unwritten = attempts == 1
                raise fenced
            return b"%s %d" % (self.claim.encode(), ledger_id)

        await update_node(session, RECORD, transform)

    def entries(self, number: int) -> list[bytes]:
        """A snapshot of two pieces."""
        self.ledger.sequence += 1
        long = {"p" * (stored.SNAPSHOT_PIECE_BYTES_MAX + 1): ProducerSequenceProgress(number)}
        return stored.encode_snapshot(DedupSnapshot(Position(1, number), long), self.ledger.sequence)

    async def store(self, number: int, *, roll: bool = False) -> None:
        entries = self.entries(number)
        if roll or not await self.ledger.append_pieces(entries):
            await self.ledger.roll_ledger(entries, self.name)

    async def until_dead(self, work: Any) -> bool:
        """Whether the work was done; False: the process died on the way."""
        task, dead = asyncio.ensure_future(work), asyncio.ensure_future(self.session.dead.wait())
        await asyncio.wait([task, dead], return_when=asyncio.FIRST_COMPLETED)
        done = task.done()
        task.cancel()
        dead.cancel()
        await asyncio.gather(task, dead, return_exceptions=True)
        return done


def _named(node: VersionedValue | None) -> bytes:
    return b"-1" if node is None else node.value.split()[1]


def named(storage: Storage) -> int:
    return int(_named(storage.nodes[RECORD]))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SNAPSHOT_PIECE_BYTES_MAX", 64)


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("writes", range(CRASHES))
async def test_after_a_crash_at_any_write_the_last_stored_snapshot_is_there(
    writes: int, lands: bool, roll: bool
) -> None:
    storage = Storage()
    first = Owner(storage, "a")
    assert await first.open() is None
    await first.store(1)
    await first.store(2)
    first.session.crash_at(writes, lands=lands)
    done = await first.until_dead(first.store(3, roll=roll))
    second = Owner(storage, "b")
    found = await second.open()
    assert found == 3 if done else found in (2, 3)
    assert not second.alarms, "a crash is no damage"
    await second.store(4)
    third = Owner(storage, "c")
    assert await third.open() == 4
    assert second.ledger.ledger_id == named(storage), "a recovered ledger is never written again"
    assert len(storage.ledgers) <= 2, "the current ledger, and one that a crash left"


async def test_a_roll_goes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(Storage(), "a")
    await owner.open()
    await owner.store(1)
    steps: list[str] = []
    for of, method, step in (
        (Session, "create", "create"), (Writer, "append", "append"), (Session, "commit", "name"),
        (Session, "delete", "delete"),
    ):  # fmt: skip
        _record(monkeypatch, of, method, step, steps)
    await owner.store(2, roll=True)
    assert tuple(dict.fromkeys(steps)) == ROLL_STEPS


def _record(monkeypatch: pytest.MonkeyPatch, of: Any, method: str, step: str, steps: list[str]) -> None:
    honest = getattr(of, method)

    def recorded(*args: Any, **options: Any) -> Any:
        steps.append(step)
        return honest(*args, **options)

    monkeypatch.setattr(of, method, recorded)


FAILURES = [
    ("create", NotEnoughBookies("none"), False),
    ("append", LedgerFenced("ended"), False),
    ("commit", TopicFenced("refused"), False),
    ("commit", OutcomeUnknown("not written"), False),
    ("commit", OutcomeUnknown("written"), True),
]


@pytest.mark.parametrize(("step", "error", "lands"), FAILURES)
async def test_after_a_failed_step_the_next_write_counts_and_an_unnamed_ledger_is_deleted(
    step: str, error: MagnetarError, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage()
    owner = Owner(storage, "a")
    await owner.open()
    await owner.store(1)
    old = owner.ledger.ledger_id
    with monkeypatch.context() as patched:
        of: Any = Writer if step == "append" else Session
        _fail(patched, of, step, error, lands=lands)
        with pytest.raises(type(error)):
            await owner.ledger.roll_ledger(owner.entries(2), _once(owner))
    unknown = isinstance(error, OutcomeUnknown)
    assert named(storage) in storage.ledgers
    assert (len(storage.ledgers) == 2) is unknown, "it stays only when the record may name it"
    assert owner.ledger.ledger_id == old
    if step == "commit":
        assert not owner.ledger.is_writable, "the record may name another ledger: the old one takes nothing more"
    await owner.store(3)
    assert await Owner(storage, "b").open() == 3


def _once(owner: Owner) -> Any:
    async def name(ledger_id: int) -> None:
        await owner.session.put(RECORD, b"%s %d" % (owner.claim.encode(), ledger_id))

    return name


def _fail(patched: pytest.MonkeyPatch, of: Any, step: str, error: MagnetarError, *, lands: bool) -> None:
    honest = getattr(of, step)

    async def failing(*args: Any, **options: Any) -> Any:
        if lands:
            await honest(*args, **options)
        raise error

    def failing_append(*args: Any) -> asyncio.Future[int]:
        return asyncio.ensure_future(failing())

    patched.setattr(of, step, failing_append if step == "append" else failing)


async def test_a_ledger_that_the_next_owner_found_in_the_record_is_not_deleted(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written, its answer is lost, another owner claims it; then the first one is refused."""
    storage = Storage()
    first, second = Owner(storage, "a"), Owner(storage, "b")
    await first.open()
    await first.store(1)
    honest = first.session.commit

    async def commit(*args: Any, **options: Any) -> int:
        await honest(*args, **options)
        assert await second.open() == 2
        raise ConnectionLost("the answer is lost")

    monkeypatch.setattr(first.session, "commit", commit)
    with pytest.raises(TopicFenced):
        await first.store(2, roll=True)
    assert await Owner(storage, "c").open() == 2


async def test_a_refused_change_of_the_list_says_whether_it_may_have_been_written_before(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage()
    session: Any = storage.session()
    topic = TopicName.parse("t")
    await session.put(topic_path(topic), encode_record(TopicRecord(), topic_path(topic)))
    ours = ManagedLedgerRecord(session, topic)
    await ours.read_record()
    honest, listed = session.commit, TopicLedger(ledger_id=7, first_index=0)

    async def commit(operations: Any) -> int:
        await honest(operations)
        other = encode_record(TopicRecord(claim="other", ledgers=(listed,)), topic_path(topic))
        await honest([PutNode(topic_path(topic), other)])
        raise ConnectionLost("the answer is lost")

    monkeypatch.setattr(session, "commit", commit)
    with pytest.raises(TopicFenced) as fenced:
        await ours.change_record([listed])
    assert not fenced.value.unwritten
    with pytest.raises(TopicFenced) as fenced:
        await ours.change_record([TopicLedger(ledger_id=8, first_index=0)])
    assert fenced.value.unwritten


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("claimed", [True, False])
async def test_a_ledger_exists_when_a_list_names_it_and_only_then_whatever_becomes_of_the_commit(
    monkeypatch: pytest.MonkeyPatch, *, lands: bool, claimed: bool
) -> None:
    """The commit of a new ledger lands or not, and its answer is lost; another owner claims the list, or none does."""
    storage = Storage()
    session: Any = storage.session()
    topic, world = TopicName.parse("t"), make_system_world(1)
    await session.put(topic_path(topic), encode_record(TopicRecord(), topic_path(topic)))
    first, second = [
        ManagedLedger(world, session, session, TailCache(1), topic, replication=one_copy,
        shrink=StripingReduction.NOTHING)
        for _ in range(2)
    ]
    await first.read_ledger_list()
    draft = await first.make_next_ledger_record()
    assert not storage.ledgers, "a draft is not stored"
    honest = session.commit

    async def commit(operations: Any) -> list[int]:
        if lands:
            await honest(operations)
        monkeypatch.setattr(session, "commit", honest)
        if claimed:
            await second.read_ledger_list()
            await second.claim_ledger_list(await second.recover_ledgers())
        raise ConnectionLost("the answer is lost")

    monkeypatch.setattr(session, "commit", commit)
    if claimed:
        with pytest.raises(TopicFenced):
            await first.add_ledger_with_retries(draft, end_index=0, created_ms=0, ended=None)
    else:
        writer, _ = await first.add_ledger_with_retries(draft, end_index=0, created_ms=0, ended=None)
        assert writer.ledger_id == draft.ledger_id
    listed = decode_record(storage.nodes[topic_path(topic)].value, TopicRecord, topic_path(topic)).ledgers
    assert [each.ledger_id for each in listed] == list(storage.ledgers) == [draft.ledger_id] * (lands or not claimed)


async def test_a_ledger_whose_commit_stays_unknown_is_the_one_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another draft would leave the first ledger without a list, if its commit landed after all."""
    storage = Storage()
    session: Any = storage.session()
    topic = TopicName.parse("t")
    await session.put(topic_path(topic), encode_record(TopicRecord(), topic_path(topic)))
    ledger = ManagedLedger(
        make_system_world(1),
        session,
        session,
        TailCache(1),
        topic,
        replication=one_copy,
        shrink=StripingReduction.NOTHING,
    )
    await ledger.read_ledger_list()
    honest, tried = ManagedLedgerRecord.change_record, list[int]()

    async def change(self: Any, ledgers: Any, **given: Any) -> None:
        tried.append(ledgers[-1].ledger_id)
        await honest(self, ledgers, **given)
        if len(tried) < 3:
            raise OutcomeUnknown("it landed, and no answer came for so long")

    monkeypatch.setattr(ManagedLedgerRecord, "change_record", change)
    writer, _ = await ledger.add_ledger_with_retries(None, end_index=0, created_ms=0, ended=None)
    assert tried == [writer.ledger_id] * 3
    assert list(storage.ledgers) == [writer.ledger_id]


async def test_a_former_owner_can_neither_write_nor_roll() -> None:
    storage = Storage()
    first, second = Owner(storage, "a"), Owner(storage, "b")
    await first.open()
    await first.store(1)
    assert await second.open() == 1
    with pytest.raises(TopicFenced):
        await first.store(2)
    assert len(storage.ledgers) == 1, "what it began is deleted"
    assert await Owner(storage, "c").open() == 1


async def test_a_torn_snapshot_is_skipped_and_damage_is_an_alarm() -> None:
    storage = Storage()
    owner = Owner(storage, "a")
    await owner.open()
    await owner.store(1)
    entries = storage.ledgers[owner.ledger.ledger_id].entries
    whole_entries = len(entries)
    entries += owner.entries(2)[:-1]
    second = Owner(storage, "b")
    assert await second.open() == 1
    assert not second.alarms, "a torn snapshot is no damage"
    assert not second.ledger.is_lost
    assert second.ledger.sequence == owner.ledger.sequence, "sequence numbers of torn snapshots are not used again"
    entries.append(owner.entries(3)[-1])
    assert await Owner(storage, "b").open() == 1, "pieces of two snapshots are none"
    entries.append(b"no snapshot")
    third = Owner(storage, "c")
    assert await third.open() == 1
    assert len(third.alarms) == 1
    assert third.ledger.is_lost, "a later snapshot may have been there"
    del entries[whole_entries - 1 :]
    fourth = Owner(storage, "d")
    assert await fourth.open() is None, "no piece is taken for a snapshot"
    nothing = f"snapshot ledger {owner.ledger.ledger_id} has no snapshot"
    assert fourth.alarms == [nothing], "a record names a ledger that begins with one"
    entries.clear()
    assert await fourth.open() is None
    storage.ledgers.clear()
    assert await fourth.open() is None
    assert fourth.alarms == [nothing, nothing, f"snapshot ledger {owner.ledger.ledger_id} is lost"]
    assert fourth.ledger.is_lost


async def test_a_dropped_ledger_is_deleted_and_a_closed_one_stays() -> None:
    storage = Storage()
    owner = Owner(storage, "a")
    await owner.open()
    await owner.store(1)
    await owner.ledger.close()
    assert await Owner(storage, "b").open() == 1
    await owner.ledger.delete_ledger()
    assert not storage.ledgers
