"""Buckets of delayed entries with a crash at every write: what is named is whole, and everything comes when it is due.

One life holds entries, seals them and dies at its n-th write (a segment, the directory, the record, a deletion), which
still lands or does not; the next one finds what is there, reads the rest from the log, and dies at a write of its own.
"""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.subscription.core import delay_buckets
from magnetar.broker.subscription.core import delay_buckets as delay_keys
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.broker.subscription.cursors import DurableCursor, cursor_path
from magnetar.broker.subscription.delays import DelayedDelivery
from magnetar.metadata.records import CursorRecord, decode_record
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.names import Position, TopicName
from tests.broker.storage import Storage, alone
from tests.broker.subscription.core.shapes import positions_of, shape_of
from tests.broker.subscription.test_cursor_model import one_copy
from tests.support.cluster import SMALL

TOPIC = TopicName.parse("model")
PATH = cursor_path(TOPIC, "s")
SHAPE = shape_of(40, 40)
POSITIONS = positions_of(SHAPE)
TIMES = {position: 100_000 + 997 * number % 7919 for number, position in enumerate(POSITIONS)}
CONFIG = replace(SMALL, delayed_seal_entries=25, cursor_flush_s=3600.0)


class Life:
    """A broker's hold on the subscription, from opening to death."""

    def __init__(self, storage: Storage, number: int, now_ms: int) -> None:
        self.storage, self.session, self.now_ms = storage, storage.session(), now_ms
        self.number = number
        self.delivered: set[Position] = set()

    async def open(self) -> None:
        clock = SimpleNamespace(wall_ms=lambda: self.now_ms, monotonic=asyncio.get_running_loop().time)
        world: Any = SimpleNamespace(rng=random.Random(self.number), clock=clock)
        session: Any = self.session
        self.store = DurableCursor(
            world, session, session, CONFIG, TOPIC, "s", replication=one_copy, on_fenced=_never
        )
        if PATH in self.storage.nodes:
            await self.store.open(SHAPE)
        else:
            await self.store.create(SHAPE, SHAPE.start_position, {}, alone(session))
        self.delays = DelayIndex(SHAPE, self.store.cursor, CONFIG.delayed_seal_entries)
        self.driver = DelayedDelivery(
            world, session, CONFIG, self.store, self.delays, applied=AppliedPolicies(),
            replication=one_copy, on_fenced=_never,
        )
        self.driver.start(lambda: None)
        await self.settled()
        assert self.driver.is_ready

    async def settled(self) -> None:
        """Nothing of it is on its way, or it is dead."""
        for _ in range(2000):
            await asyncio.sleep(0)
            if self.session.dead.is_set() or not (self.driver._stored.tasks or self.driver._stored.drops):
                return

    async def read_the_log(self) -> None:
        """As the dispatcher does: what is not held is held now, or delivered."""
        for position in POSITIONS:
            if not self.delays.is_delayed(position) and position not in self.delivered:
                if TIMES[position] > self.now_ms:
                    self.driver.delay_until(position, TIMES[position])
                    await self.settled()
                else:
                    self.deliver(position)

    async def pass_time(self, until_ms: int) -> None:
        while self.now_ms < until_ms and not self.session.dead.is_set():
            self.now_ms += 500
            for load in self.delays.take_segment_reads(self.now_ms):
                self.driver._spawn(self.driver._load(load))
            await self.settled()
            for position in self.delays.take_due(self.now_ms, 100):
                self.deliver(position)
            self.driver._drop(self.delays.take_unused_ledgers())
            await self.settled()
            self.delays.check()

    def deliver(self, position: Position) -> None:
        assert TIMES[position] <= self.now_ms, "delivered early"
        assert position not in self.delivered, "delivered twice in one life"
        self.delivered.add(position)

    async def end(self) -> None:
        self.session.dead.set()
        self.store.abandon()
        self.driver.stop()
        for tasks in (self.driver._stored.tasks, self.driver._stored.drops):
            tasks.cancel()
            await tasks.drain()


def _never(error: Exception) -> None:
    raise AssertionError(f"nobody else is there: {error}")


def named(storage: Storage) -> list[int]:
    node = storage.nodes.get(PATH)
    return [each.ledger_id for each in decode_record(node.value, CursorRecord, PATH).delays] if node is not None else []


def check(storage: Storage) -> None:
    for ledger_id in named(storage):
        assert ledger_id in storage.ledgers, "a bucket is named that does not exist"
        assert storage.ledgers[ledger_id].entries[-1][3] == 2, "a bucket is named that is not whole"


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("dies_at", range(24))
async def test_a_crash_at_any_write_loses_nothing_and_names_nothing_that_is_not_there(
    dies_at: int, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_keys, "ENTRIES_PER_SEGMENT_MAX", 7)
    storage, rng = Storage(), random.Random(dies_at)
    first = Life(storage, 1, 0)
    await first.open()
    first.session.crash_at(dies_at, lands=lands)
    await first.read_the_log()
    await first.end()
    check(storage)
    second = Life(storage, 2, 50_000)
    await second.open()
    second.session.crash_at(rng.randrange(30), lands=lands)
    await second.read_the_log()
    await second.pass_time(104_000)
    await second.end()
    check(storage)
    third = Life(storage, 3, second.now_ms)
    await third.open()
    await third.read_the_log()
    await third.pass_time(110_000)
    assert third.delivered == set(POSITIONS), "nothing was acknowledged: all of it comes"
    assert named(storage) == [], "drained buckets are not named any more"
    await third.end()


async def merged(life: Life) -> None:
    """Nine small buckets, then one that makes it merge all of them."""
    life.delays.seal_entries = 8
    for position in POSITIONS[:-1]:
        life.driver.delay_until(position, TIMES[position])
        await life.settled()
    life.delays.seal_entries = 1000
    life.driver.delay_until(POSITIONS[-1], TIMES[POSITIONS[-1]])
    draft = life.delays.seal_bucket(life.now_ms, least=1)
    assert draft is not None
    await life.driver._spawn(life.driver._store(draft))


async def merges(life: Life) -> None:
    for load in life.delays.take_segment_reads(life.now_ms):
        life.driver._spawn(life.driver._load(load))
    await life.settled()
    if life.delays.must_make_bucket:
        life.driver._seal()
    await life.settled()
    life.driver._drop(life.delays.take_unused_ledgers())
    await life.settled()


@pytest.mark.parametrize("lands", [True, False])
async def test_a_crash_at_any_write_of_a_merge_loses_nothing_and_reads_nothing_again(
    lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_keys, "ENTRIES_PER_SEGMENT_MAX", 7)
    monkeypatch.setattr(delay_buckets, "MERGED_BUCKETS_MIN", 5)
    died = 0
    for dies_at in range(100):
        storage = Storage()
        first = Life(storage, 1, 0)
        await first.open()
        await merged(first)
        assert len(named(storage)) == 10
        first.session.crash_at(dies_at, lands=lands)
        await merges(first)
        died += first.session.dead.is_set()
        whole = not first.session.dead.is_set()
        await first.end()
        check(storage)
        if whole:
            assert len(named(storage)) == 1
        second = Life(storage, 2, 50_000)
        await second.open()
        assert second.delays.count == len(POSITIONS), "one of the buckets that hold it is named, whenever it died"
        await second.pass_time(110_000)
        assert second.delivered == set(POSITIONS)
        assert named(storage) == []
        await second.end()
        if whole:
            break
    assert 20 <= died < 99


def test_the_walk_meets_crashes_between_all_steps() -> None:
    """Each of the writes that the first life makes is one that it dies at above."""

    async def whole() -> int:
        storage = Storage()
        life = Life(storage, 1, 0)
        await life.open()
        before = storage.writes
        await life.read_the_log()
        await life.end()
        return storage.writes - before

    assert 10 <= asyncio.run(whole()) <= 24
