"""A durable cursor against a set of integers, with a crash at every persisted write.

Message n is index n % BATCH of the entry n // BATCH; the model is the set of those that are acknowledged, and what was
in it when the last receipt came. After a crash the cursor is the state of the last receipt or the one that was being
written: nothing between, nothing older, nothing newer, and every write (a chunk, the marker, the new ledger, the
record, the deletion of the old ledger) is a place to die at, whether or not it lands.

While bookies are away the state goes to the record. One that has room there is as good as one in a ledger. Of a larger
one its last holes are missing, so what comes back is between the last receipt and one of the states that were written.
"""

import asyncio
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace
from pyroaring import BitMap

from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.managed_ledger import TopicFenced
from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription import cursors
from magnetar.broker.subscription.core import pending_acks
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorChunkKind, TxnAcks, bits_of_indexes
from magnetar.broker.subscription.core.positions import plan_record_state
from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.proto.errors import MagnetarError, Unavailable
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import TxnId
from tests.broker.storage import Session, Storage, alone
from tests.broker.subscription.core.shapes import positions_of, shape_of
from tests.support.cluster import SMALL

BATCH = 3
SHAPE = shape_of(7, 0, 20, 9, 30)
POSITIONS = positions_of(SHAPE)
EXAMPLES = int(os.environ.get("CURSOR_EXAMPLES", "60"))
MESSAGES = len(POSITIONS) * BATCH
CONFIG = replace(SMALL, cursor_flush_s=3600.0, cursor_roll_entries=12, close_timeout_s=0.05)
Entries = st.integers(0, len(POSITIONS) - 1)
Indexes = st.sets(st.integers(0, BATCH - 1), min_size=1)


async def one_copy() -> LedgerReplication:
    return LedgerReplication(1, 1, 1)


State = tuple[frozenset[int], frozenset[tuple[int, int]], frozenset[tuple[int, TxnId]]]
"""Messages that are acknowledged; entries and how often they were given back; messages that are pending, and where."""
TXNS = [TxnId(0, 7), TxnId(15, (3 << 40) | 1)]
Txns = st.sampled_from(TXNS)


def acknowledged(cursor: Cursor) -> frozenset[int]:
    done = set()
    for number, position in enumerate(POSITIONS):
        indexes = range(BATCH) if cursor.is_acked(position) else cursor.acked_indexes(position)
        done |= {number * BATCH + index for index in indexes}
    return frozenset(done)


def pending_in(cursor: Cursor) -> frozenset[tuple[int, TxnId]]:
    found = set()
    for txn, acks in cursor.pending.of.items() if cursor.pending is not None else ():
        for number, position in enumerate(POSITIONS):
            if not cursor.is_acked(position):
                done = set(cursor.acked_indexes(position))
                bits = (1 << BATCH) - 1 if acks.has_entry(position) else acks.message_bits_at(position)
                mine = {each for each in range(BATCH) if bits >> each & 1}
                found |= {(number * BATCH + each, txn) for each in mine - done}
    return frozenset(found)


class CursorModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.storage = Storage()
        self.model: set[int] = set()
        self.crashes = 0
        self.snapshot_bytes = 0
        self.counts: dict[int, int] = {}  # entry → how often it was given back
        self.pending: dict[int, TxnId] = {}
        self.away = False
        self.tried: list[State] = []  # since the last receipt, with bookies away
        self.sought = False  # since the last receipt
        self.stored: State = (frozenset(), frozenset(), frozenset())

    # ------------------------------------------------------------------ processes
    def process(self) -> tuple[Session, DurableCursor]:
        session = self.storage.session()
        config = replace(CONFIG, cursor_snapshot_bytes=self.snapshot_bytes)
        clock = SimpleNamespace(wall_ms=lambda: 1, monotonic=lambda: 1.0)
        world: Any = SimpleNamespace(rng=random.Random(self.crashes), clock=clock)
        fenced: list[MagnetarError] = []
        metadata: Any = session
        cursor = DurableCursor(
            world, metadata, metadata, config, TopicName.parse("model"), "s", replication=one_copy,
            on_fenced=fenced.append,
        )  # fmt: skip
        return session, cursor

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @initialize(small=st.sampled_from([1, 2, 20]), snapshot_bytes=st.sampled_from([0, 150, 400, 16 << 10]))
    def begin(self, small: int, snapshot_bytes: int) -> None:
        """Blocks of 2, 4 or all entries, so that a state has many chunks; snapshots never, sometimes and always."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(CursorChunkKind, "block_bits", property(lambda kind: small))
        self.patch.setattr(stored, "CHUNK_BYTES_MAX", 64)
        self.patch.setattr(cursors, "RECORD_STATE_INTERVAL_S", 0.0)
        self.patch.setattr(cursors, "STORE_RETRY_S", 0.0)
        self.snapshot_bytes = snapshot_bytes

        async def work() -> None:
            self.session, self.store = self.process()
            await self.store.create(SHAPE, SHAPE.start_position, {}, alone(self.session))

        self.run(work())

    async def _dies_or_ends(self, work: Any) -> bool:
        """Whether it came to its end before the process died."""
        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self.session.dead.wait())
        patience = 0.02 if self.away else None  # a state without room waits for bookies
        await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED, timeout=patience)
        for _ in range(20):
            await asyncio.sleep(0)  # what was under way comes to its stop
        ended = task.done() and not task.cancelled()
        for each in (task, death):
            each.cancel()
        await asyncio.gather(task, death, return_exceptions=True)
        return ended

    async def _open_again(self) -> None:
        old, (self.session, self.store) = self.store, self.process()
        old.abandon()
        self.session.bookies_away = self.away
        try:
            await self.store.open(SHAPE)
        except Unavailable:
            assert self.away, "it needs the ledger, and waits for it"
            self._bookies_come()
            self.session, self.store = self.process()
            await self.store.open(SHAPE)

    def _bookies_come(self) -> None:
        self.away = self.session.bookies_away = False

    @rule(late=st.booleans())
    def bookies_go(self, late: bool) -> None:
        """`late`: what is sent to them is stored, and not answered."""
        self.away = self.session.bookies_away = True
        self.session.late_adds_land = late

    @rule()
    def bookies_come(self) -> None:
        self._bookies_come()

    # ------------------------------------------------------------------ acknowledging
    @property
    def cursor(self) -> Cursor:
        return self.store.cursor

    def _messages(self, entry: int, indexes: Any = range(BATCH)) -> set[int]:
        return {entry * BATCH + index for index in indexes}

    def _free(self, messages: set[int]) -> set[int]:
        return messages - self.pending.keys()

    @rule(entry=Entries)
    def ack(self, entry: int) -> None:
        self.cursor.ack(POSITIONS[entry])
        if not self.pending.keys() & self._messages(entry):
            self.model |= self._messages(entry)

    @rule(entries=st.sets(Entries, min_size=2, max_size=20))
    def ack_many(self, entries: set[int]) -> None:
        for entry in sorted(entries):
            self.ack(entry)

    @rule(entry=Entries, indexes=Indexes, known=st.booleans())
    def ack_part(self, entry: int, indexes: set[int], known: bool) -> None:
        self.cursor.ack_messages_of_batch(POSITIONS[entry], bits_of_indexes(indexes), BATCH if known else 0)
        self.model |= self._free(self._messages(entry, indexes))

    @rule(txn=Txns, entry=Entries, indexes=st.one_of(st.just(set(range(BATCH))), Indexes))
    def ack_in(self, txn: TxnId, entry: int, indexes: set[int]) -> None:
        wanted, messages = TxnAcks(), self._messages(entry, indexes)
        wanted.add(POSITIONS[entry], bits_of_indexes(indexes) if len(indexes) < BATCH else 0, BATCH)
        new = pending_acks.judge_transactional_acks(self.cursor, txn, wanted)
        if isinstance(new, pending_acks.TransactionalAckRefused):
            assert messages & self.model or any(self.pending.get(each, txn) != txn for each in messages)
        else:
            pending_acks.add_pending_acks(self.cursor, txn, new)
            self.pending |= dict.fromkeys(messages - self.model, txn)

    @rule(txn=Txns, entry=Entries)
    def ack_up_to_in(self, txn: TxnId, entry: int) -> None:
        new = pending_acks.judge_transactional_acks(self.cursor, txn, TxnAcks(up_to=POSITIONS[entry]), POSITIONS[entry])
        if not isinstance(new, pending_acks.TransactionalAckRefused):
            pending_acks.add_pending_acks(self.cursor, txn, new)
            self.pending |= dict.fromkeys(set(range((entry + 1) * BATCH)) - self.model, txn)

    @rule(txn=Txns, committed=st.booleans())
    def settle(self, txn: TxnId, committed: bool) -> None:
        pending_acks.settle_transactional_acks(self.cursor, txn, committed=committed)
        if committed:
            self.model |= {each for each, holder in self.pending.items() if holder == txn}
        self.pending = {each: holder for each, holder in self.pending.items() if holder != txn}

    @rule(entry=Entries)
    def its_size_becomes_known(self, entry: int) -> None:
        self.cursor.set_batch_size(POSITIONS[entry], BATCH)

    @rule(entry=Entries)
    def ack_up_to(self, entry: int) -> None:
        self.cursor.ack_cumulative(POSITIONS[entry])
        if any(each < (entry + 1) * BATCH for each in self.pending):
            self.model |= self._passed_over(entry)
        else:
            self.model |= set(range((entry + 1) * BATCH))

    def _passed_over(self, entry: int) -> set[int]:
        """What is acknowledged up to an entry when some of it is pending: no batch of unknown size."""
        done = set[int]()
        for each in range(entry + 1):
            if not self.pending.keys() & self._messages(each) or self.cursor.find_batch_size(POSITIONS[each], 0):
                done |= self._free(self._messages(each))
        return done

    @rule(entry=Entries, index=st.integers(0, BATCH - 1))
    def ack_up_to_part(self, entry: int, index: int) -> None:
        if any(each <= entry * BATCH + index for each in self.pending):
            return  # refused, before it comes to the cursor
        self.cursor.ack_cumulative_into_batch(POSITIONS[entry], index, BATCH)
        self.model |= set(range(entry * BATCH + index + 1))

    @rule(entry=Entries)
    def seek(self, entry: int) -> None:
        self.cursor.seek(SHAPE.position_before(POSITIONS[entry]))
        self.sought = True
        self.model = set(range(entry * BATCH))
        self.counts.clear()
        self.pending.clear()

    @rule(entry=Entries)
    def give_back(self, entry: int) -> None:
        if not self.cursor.is_acked(POSITIONS[entry]):
            self.counts[entry] = self.counts.get(entry, 0) + 1
            assert self.cursor.count_redelivery(POSITIONS[entry]) == self.counts[entry]

    @rule(first=Entries, step=st.integers(1, 3), count=st.integers(1, 40))
    def ack_set(self, first: int, step: int, count: int) -> None:
        for ledger_id in {position.ledger_id for position in POSITIONS}:
            chosen = POSITIONS[first : first + step * count : step]
            entries = {position.entry_id for position in chosen if position.ledger_id == ledger_id}
            before = {each.entry_id for each in chosen if each.ledger_id == ledger_id and self.cursor.is_acked(each)}
            before |= {each.entry_id for each in chosen if each.ledger_id == ledger_id and self._is_pending(each)}
            assert set(self.cursor.ack_entries_of_ledger(ledger_id, BitMap(entries))) == entries - before
        for entry in range(first, min(len(POSITIONS), first + step * count), step):
            if not self.pending.keys() & self._messages(entry):
                self.model |= self._messages(entry)

    def _is_pending(self, position: Position) -> bool:
        """In part, or below a cumulative acknowledgement, although each of its messages is acknowledged."""
        entry = POSITIONS.index(position)
        return entry <= self._up_to() or bool(self.pending.keys() & self._messages(entry))

    def _up_to(self) -> int:
        of = self.cursor.pending.of.values() if self.cursor.pending is not None else ()
        return max((POSITIONS.index(acks.up_to) for acks in of if acks.up_to in POSITIONS), default=-1)

    @rule(entry=Entries)
    def the_next_one_that_is_not_acknowledged(self, entry: int) -> None:
        found = self.cursor.next_unacked_position(POSITIONS[entry])
        later = [each for each in POSITIONS[entry:] if not self.cursor.is_acked(each)]
        assert found == (later[0] if later else SHAPE.position_after(POSITIONS[-1]))

    # ------------------------------------------------------------------ storing and dying
    @rule()
    def receipt(self) -> None:
        async def work() -> None:
            durable = self.store.make_acks_durable_future()
            if self.away:
                await asyncio.wait([durable], timeout=0.02)
                if not durable.done():
                    self.tried.append(self.state())
                    return
            await durable
            self._is_stored()
            assert not self.cursor.has_unstored_changes

        self.run(work())

    def _is_stored(self) -> None:
        self.stored = self.state()
        self.tried.clear()
        self.sought = False

    @rule(writes=st.integers(0, 12), lands=st.booleans())
    def die_while_storing(self, writes: int, lands: bool) -> None:
        async def work() -> bool:
            self.session.crash_at(writes, lands=lands)
            ended = await self._dies_or_ends(self._durable())
            self.session.crash_at(0, lands=False)
            await self._open_again()
            return ended

        wanted = self.state()
        self.tried += [wanted] if self.away else []
        ended = self.run(work())
        self._found({wanted} if ended else {wanted, self.stored})

    async def _durable(self) -> None:
        await self.store.make_acks_durable_future()

    @rule(writes=st.integers(0, 4), lands=st.booleans())
    def die_while_opening(self, writes: int, lands: bool) -> None:
        async def work() -> None:
            old = self.store
            self.session, self.store = self.process()
            self.session.bookies_away = self.away
            self.session.crash_at(writes, lands=lands)
            await self._dies_or_ends(self.store.open(SHAPE))
            old.abandon()
            await self._open_again()

        self.run(work())
        self._found({self.stored})

    @rule(claim_lands=st.booleans(), entries=st.lists(Entries, min_size=1, max_size=4))
    def die_between_the_claim_and_the_fence(self, claim_lands: bool, entries: list[int]) -> None:
        """The next owner claims the record and dies before it fences the ledger. The former one knows of nothing, and
        acknowledges on: then, and before each step of a third owner that opens. What it answers is there."""
        self._bookies_come()
        former, left = self.store, list(entries)
        refused = False

        async def acknowledge() -> None:
            nonlocal refused
            if left and not refused:
                before, known = self.store, (set(self.model), dict(self.counts))
                self.store = former
                try:
                    self.ack(left.pop())
                    self.state()
                    await asyncio.wait_for(former.make_acks_durable_future(), 10)
                    self._is_stored()
                except TopicFenced:
                    refused, (self.model, self.counts) = True, known
                finally:
                    self.store = before

        def watched(step: Any) -> Any:
            async def call(*given: Any, **options: Any) -> Any:
                await acknowledge()
                found = await step(*given, **options)
                await acknowledge()
                return found

            return call

        async def work() -> None:
            self.crashes += 1  # each process draws another claim
            self.session, self.store = self.process()
            self.session.crash_at(0, lands=claim_lands)
            await self._dies_or_ends(self.store.open(SHAPE))
            await acknowledge()
            self.crashes += 1  # each process draws another claim
            self.session, self.store = self.process()
            session: Any = self.session
            session.commit, session.recover = watched(session.commit), watched(session.recover)
            await self.store.open(SHAPE)
            del session.commit, session.recover
            former.abandon()

        self.run(work())
        self._found({self.stored, self.state()})

    @rule(writes=st.integers(0, 12), lands=st.booleans())
    def die_while_closing(self, writes: int, lands: bool) -> None:
        async def work() -> bool:
            self.session.crash_at(writes, lands=lands)
            ended = await self._dies_or_ends(self.store.close())
            self.session.crash_at(0, lands=False)
            await self._open_again()
            return ended

        wanted, has_room = self.state(), self._has_room()
        self.tried += [wanted] if self.away else []
        ended = self.run(work())
        self._found({wanted} if ended and has_room else {wanted, self.stored})

    @rule()
    def close(self) -> None:
        """A clean end loses nothing, receipt or not, unless no bookie is there and the metadata has no room."""

        async def work() -> None:
            await self.store.close()
            await self._open_again()

        wanted, has_room = self.state(), self._has_room()
        self.tried += [wanted] if self.away else []
        self.run(work())
        self._found({wanted} if has_room else {wanted, self.stored})

    def _has_room(self) -> bool:
        """Whether bookies are there, or the metadata has room for all of the state that is not a hole."""
        return not self.away or plan_record_state(self.cursor, 1, self.snapshot_bytes) is not None

    def state(self) -> State:
        """Of the model. An entry that is done is not counted any more."""
        done = {entry for entry in self.counts if self.cursor.is_acked(POSITIONS[entry])}
        self.counts = {entry: times for entry, times in self.counts.items() if entry not in done}
        return frozenset(self.model), frozenset(self.counts.items()), frozenset(self.pending.items())

    def _found(self, allowed: set[State]) -> None:
        self.crashes += 1
        numbers = {position: entry for entry, position in enumerate(POSITIONS)}
        counts = frozenset((numbers[each], count.redeliveries) for each, count in self.cursor.counts.items())
        found = acknowledged(self.cursor), counts, pending_in(self.cursor)
        assert found in allowed or self._is_between(found), "neither the last receipt's state nor one that was written"
        self.tried.clear()
        self.sought = False
        self.model, self.counts, self.pending, self.stored = set(found[0]), dict(found[1]), dict(found[2]), found
        assert len(self.storage.ledgers) <= self.crashes + 1, "ledgers stay behind without a crash"

    def _is_between(self, found: State) -> bool:
        """It is a state that was written while bookies were away, but for its last holes: none of these was durable."""
        least = frozenset[int]() if self.sought else self.stored[0]
        return any(least <= found[0] <= tried[0] and found[1:] == tried[1:] for tried in self.tried)

    # ------------------------------------------------------------------ always
    @invariant()
    def the_cursor_is_the_set(self) -> None:
        if not hasattr(self, "store"):
            return
        self.cursor.check()
        found = acknowledged(self.cursor)
        assert found == self.model
        assert pending_in(self.cursor) == frozenset(self.pending.items())
        self.state()
        assert {each: count.redeliveries for each, count in self.cursor.counts.items()} == {
            POSITIONS[entry]: times for entry, times in self.counts.items()
        }
        assert sum(map(self.cursor.is_acked, POSITIONS)) == sum(
            all(entry * BATCH + index in self.model for index in range(BATCH))
            and (not self._unsettled(entry)) for entry in range(len(POSITIONS))
        )  # fmt: skip

    def _unsettled(self, entry: int) -> bool:
        """All of its messages are acknowledged, but nobody said yet how many it has."""
        partial = self.cursor.partial.get(POSITIONS[entry])
        return partial is not None and not partial.size

    def teardown(self) -> None:
        self.patch.undo()
        if hasattr(self, "store"):
            self.store.abandon()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def test_a_cursor_is_its_set_whatever_write_it_dies_at() -> None:
    how = settings(
        max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(CursorModel, settings=how)
