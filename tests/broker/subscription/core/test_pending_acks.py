"""Pending acknowledgements against sets of messages: every message is free, acknowledged or pending in one transaction.

The model is a dictionary from (entry, index) to its state, and the table of broker/subscription/core/pending_acks.py,
message by message. The exhaustive walk takes every sequence of operations of two transactions over three entries, one
of them a batch, and after each of them a crash with the state that was stored last, or the one that is now.
"""

from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.broker.log.log_shape_core import LogShape
from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription.core import pending_acks
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import NO_POSITION, CursorState, PartlyAckedBatch, TxnAcks
from magnetar.broker.subscription.core.pending_acks import TransactionalAckConflict, TransactionalAckRefused
from magnetar.broker.subscription.core.positions import CursorWritePlanner
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId
from tests.broker.subscription.core.shapes import positions_of, shape_of

X, Y = TxnId(0, 1), TxnId(3, 1 << 40)
FREE, ACKED = "free", "acknowledged"
BATCH = 3
State = str | TxnId


class Model:
    """Each message of the entries: free, acknowledged, or the transaction in which it is pending."""

    def __init__(self, shape: LogShape, sizes: list[int] | None = None) -> None:
        self.positions = positions_of(shape)
        self.sizes = sizes or [BATCH] * len(self.positions)
        self.of: dict[tuple[int, int], State] = {
            (entry, index): FREE for entry, size in enumerate(self.sizes) for index in range(size)
        }
        self.cumulative: dict[TxnId, int] = {}  # transaction → entries before it are covered, wholly

    def whole(self, entry: int) -> list[tuple[int, int]]:
        return [(entry, index) for index in range(self.sizes[entry])]

    def up_to(self, entry: int, index: int) -> list[tuple[int, int]]:
        return [each for each in self.of if each <= (entry, index)]

    def ack(self, messages: list[tuple[int, int]]) -> None:
        for each in messages:
            self.of[each] = ACKED

    def takes(self, txn: TxnId, messages: list[tuple[int, int]]) -> bool:
        """Whether an individual acknowledgement in the transaction is taken; then it is."""
        if any(self.of[each] not in (FREE, txn) for each in messages):
            covered = {self.of[each] for each in self.whole(messages[0][0])}
            repeated = len(messages) == self.sizes[messages[0][0]]
            return txn in covered and FREE not in covered and repeated
        for each in messages:
            self.of[each] = txn
        return True

    def takes_up_to(self, txn: TxnId, entry: int, index: int) -> bool:
        messages = self.up_to(entry, index)
        named = [self.of[each] for each in self.whole(entry)]
        here = [self.of[entry, each] for each in range(index + 1)]
        if all(each == ACKED for each in named) or any(self.of[each] not in (FREE, ACKED, txn) for each in messages):
            return False
        if all(each == ACKED for each in here) or any(other != txn for other in self.cumulative):
            return False
        for each in messages:
            if self.of[each] == FREE:
                self.of[each] = txn
        self.cumulative[txn] = max(entry, self.cumulative.get(txn, 0))
        return True

    def settle(self, txn: TxnId, committed: bool) -> None:
        for each, state in self.of.items():
            if state == txn:
                self.of[each] = ACKED if committed else FREE
        self.cumulative.pop(txn, None)


def wanted_of(position: Position, indexes: list[int], size: int) -> TxnAcks:
    wanted = TxnAcks()
    if len(indexes) == size:
        wanted.add(position)
    else:
        wanted.add(position, sum(1 << each for each in indexes), size)
    return wanted


def ack_in(
    cursor: Cursor, txn: TxnId, wanted: TxnAcks, named: Position = NO_POSITION
) -> TransactionalAckRefused | None:
    before, version = cursor.copy_cursor_state(), cursor.version
    new = pending_acks.judge_transactional_acks(cursor, txn, wanted, named)
    assert (cursor.copy_cursor_state(), cursor.version) == (before, version), "judging changed something"
    if isinstance(new, TransactionalAckRefused):
        return new
    pending_acks.add_pending_acks(cursor, txn, new)
    return None


def up_to(
    cursor: Cursor, shape: LogShape, txn: TxnId, position: Position, index: int, size: int
) -> TransactionalAckRefused | None:
    wanted = TxnAcks(up_to=position)
    if index + 1 < size:
        wanted = TxnAcks(
            parts={position: PartlyAckedBatch((1 << index + 1) - 1, size)}, up_to=shape.position_before(position)
        )
    return ack_in(cursor, txn, wanted, position)


def compare(cursor: Cursor, model: Model) -> None:
    """The cursor says of every message what the model says."""
    cursor.check()
    pending = cursor.pending
    for entry, position in enumerate(model.positions):
        states = [model.of[each] for each in model.whole(entry)]
        assert cursor.is_acked(position) == all(each == ACKED for each in states), position
        assert cursor.is_acked_or_pending(position) == (FREE not in states), position
        if cursor.is_acked(position) or (pending is not None and pending.is_entry_pending(position)):
            continue
        hidden = [bool(cursor.acked_or_pending_bits(position) >> index & 1) for index in range(model.sizes[entry])]
        assert hidden == [each != FREE for each in states], position
    for txn in (X, Y):
        acks = pending.of.get(txn, TxnAcks()) if pending is not None else TxnAcks()
        for entry, position in enumerate(model.positions):
            if not cursor.is_acked(position):
                mine = (1 << model.sizes[entry]) - 1 if acks.has_entry(position) else acks.message_bits_at(position)
                partial = cursor.partial[position].bits if position in cursor.partial else 0
                expected = sum(1 << index for _, index in model.whole(entry) if model.of[entry, index] == txn)
                assert mine & ~partial == expected, (txn, position)
    first_free = [at for at, each in enumerate(model.positions) if not cursor.is_acked_or_pending(each)]
    if first_free:
        assert cursor.next_deliverable_position(cursor.mark) <= model.positions[first_free[0]]
        assert next(iter(cursor.deliverable_entries_up_to(model.positions[-1]))) == model.positions[first_free[0]]
    assert list(cursor.deliverable_entries_up_to(model.positions[-1])) == [model.positions[at] for at in first_free]
    assert list(
        cursor.deliverable_entries_before(model.positions[-1])
    ) == [model.positions[at] for at in reversed(first_free)]


def again(cursor: Cursor, shape: LogShape) -> Cursor:
    """As the next broker has it, from the bytes."""
    plan = CursorWritePlanner().plan_write(cursor, 1)
    cursor.changed_chunks.update(plan.chunks)
    found = Cursor(shape, stored.decode_snapshot(stored.encode_snapshot(plan.entries)))
    found.adapt_to_log_after_restart()
    return found


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ack", "bits", "upto", "upto_bits", "set", "in", "in", "bits_in", "bits_in", "set_in", "upto_in",
             "upto_bits_in", "commit", "abort", "give_up", "crash", "seek", "count"]
        ),
        st.sampled_from([X, Y]), st.integers(0, 9), st.integers(0, BATCH - 1),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(OPERATIONS)
@example([("bits_in", X, 0, 0), ("give_up", X, 0, 0), ("upto_bits_in", X, 0, 1)])
def test_every_message_is_free_acknowledged_or_pending_in_one_transaction(
    operations: list[tuple[str, TxnId, int, int]]
) -> None:
    shape = shape_of(4, 0, 3, 3)
    cursor, model = Cursor(shape, CursorState(shape.start_position)), Model(shape)
    for name, txn, entry, index in operations:
        position, whole = model.positions[entry], model.whole(entry)
        if name == "ack" and all(model.of[each] in (FREE, ACKED) for each in whole):
            cursor.ack(position)
            model.ack(whole)
        elif name == "ack":
            assert not cursor.ack(position)
        elif name == "bits":
            cursor.ack_messages_of_batch(position, 1 << index, BATCH)
            if model.of[entry, index] == FREE:
                model.ack([(entry, index)])
        elif name in ("upto", "give_up"):
            cursor.ack_cumulative(position)
            free = [each for each in model.up_to(entry, BATCH - 1) if model.of[each] == FREE]
            model.ack(free)
        elif name == "upto_bits" and all(model.of[each] in (FREE, ACKED) for each in model.up_to(entry, index)):
            cursor.ack_cumulative_into_batch(position, index, BATCH)
            model.ack(model.up_to(entry, index))
        elif name == "set":
            ids = [each for each in model.positions[entry : entry + 3] if each[0] == position[0]]
            cursor.ack_entries_of_ledger(position[0], BitMap([each[1] for each in ids]))
            for each in (model.whole(model.positions.index(one)) for one in ids):
                if all(model.of[one] in (FREE, ACKED) for one in each):
                    model.ack(each)
        elif name in ("in", "bits_in"):
            indexes = list(range(BATCH)) if name == "in" else [index]
            clash = ack_in(cursor, txn, wanted_of(position, indexes, BATCH))
            assert (clash is None) == model.takes(txn, [(entry, each) for each in indexes]), clash
        elif name == "set_in":
            ids = [each for each in model.positions[entry : entry + 3] if each[0] == position[0]]
            messages = [each for one in ids for each in model.whole(model.positions.index(one))]
            if all(model.of[each] in (FREE, txn) for each in messages):
                for each in messages:
                    model.of[each] = txn
                assert ack_in(cursor, txn, TxnAcks({position[0]: BitMap([one[1] for one in ids])})) is None
        elif name in ("upto_in", "upto_bits_in"):
            last = BATCH - 1 if name == "upto_in" else index
            before = dict(model.of)
            clash = up_to(cursor, shape, txn, position, last, BATCH)
            assert (clash is None) == model.takes_up_to(txn, entry, last), (clash, before)
        elif name in ("commit", "abort"):
            settled = pending_acks.settle_transactional_acks(cursor, txn, committed=name == "commit")
            held = {each for each, state in model.of.items() if state == txn}
            if name == "abort" and settled is not None:
                came = {*pending_acks.entries_of_aborted_acks(cursor, settled, tail=False), *settled.shown}
                model.settle(txn, committed=False)
                assert {model.positions[each] for each, _ in held} == {
                    each for each in came if not cursor.is_acked_or_pending(each)
                }, "an abort gives back exactly its own"
            model.settle(txn, committed=name == "commit")
        elif name == "crash":
            cursor = again(cursor, shape)
        elif name == "seek":
            cursor.seek(shape.position_before(position))
            model.of = {each: ACKED if each[0] < entry else FREE for each in model.of}
            model.cumulative.clear()
        elif name == "count" and not cursor.is_acked_or_pending(position):
            cursor.count_redelivery(position)
        compare(cursor, model)


# ------------------------------------------------------------------------------------------ exhaustive
SIZES = [1, 2, 1]
SMALL = shape_of(2, 1)


def copy_of(cursor: Cursor, model: Model) -> tuple[Cursor, Model]:
    other, twin = Cursor(SMALL, cursor.copy_cursor_state()), Model(SMALL, SIZES)
    twin.of, twin.cumulative = dict(model.of), dict(model.cumulative)
    return other, twin


def steps() -> list[tuple[str, TxnId | None, int, list[int]]]:
    """Everything that a consumer, an operator or a coordinator does next."""
    messages = [(0, [0]), (1, [0]), (1, [1]), (1, [0, 1]), (2, [0])]
    some: list[tuple[str, TxnId | None, int, list[int]]] = []
    for txn in (X, Y):
        some += [("in", txn, entry, indexes) for entry, indexes in messages]
        some += [("up to in", txn, entry, [index]) for entry, index in ((0, 0), (1, 0), (1, 1), (2, 0))]
        some += [("commit", txn, 0, []), ("abort", txn, 0, [])]
    some += [("plain", None, entry, indexes) for entry, indexes in messages]
    return [*some, ("give up", None, 1, []), ("give up", None, 2, [])]


def take(cursor: Cursor, model: Model, step: tuple[str, TxnId | None, int, list[int]]) -> None:
    name, txn, entry, indexes = step
    position, size = model.positions[entry], model.sizes[entry]
    if name == "plain":
        free = [index for index in indexes if model.of[entry, index] == FREE]
        if len(free) == size:
            cursor.ack(position)
        elif free:
            cursor.ack_messages_of_batch(position, sum(1 << index for index in free), size)
        model.ack([(entry, index) for index in free])
    elif name == "give up":
        cursor.ack_cumulative(position)
        model.ack([each for each in model.up_to(entry, size - 1) if model.of[each] == FREE])
    elif name == "in":
        assert txn is not None
        clash = ack_in(cursor, txn, wanted_of(position, indexes, size))
        assert (clash is None) == model.takes(txn, [(entry, index) for index in indexes]), clash
    elif name == "up to in":
        assert txn is not None
        clash = up_to(cursor, SMALL, txn, position, indexes[0], size)
        assert (clash is None) == model.takes_up_to(txn, entry, indexes[0]), clash
    else:
        assert txn is not None
        settled = pending_acks.settle_transactional_acks(cursor, txn, committed=name == "commit")
        held = {at for (at, _), state in model.of.items() if state == txn}
        model.settle(txn, name == "commit")
        if name == "abort" and settled is not None:
            came = {*pending_acks.entries_of_aborted_acks(cursor, settled, tail=False), *settled.shown}
            assert {model.positions[at] for at in held} == {
                each for each in came if not cursor.is_acked_or_pending(each)
            }


def test_two_transactions_over_three_entries_and_every_step_from_every_state_with_a_crash_after_it() -> None:
    start = Cursor(SMALL, CursorState(SMALL.start_position)), Model(SMALL, SIZES)
    waiting, seen, taken = [start], {repr(start[0].copy_cursor_state())}, 0
    while waiting:
        cursor, model = waiting.pop()
        for step in steps():
            other, twin = copy_of(cursor, model)
            try:
                take(other, twin, step)
                compare(other, twin)
                key = repr((list(twin.of.items()), other.copy_cursor_state()))
                if key not in seen:
                    seen.add(key)
                    compare(again(other, SMALL), twin)  # of equal states a crash leaves the same
                    waiting.append((other, twin))
            except AssertionError as error:
                raise AssertionError(f"{step} in {model.of}, {cursor.copy_cursor_state()}: {error}") from error
            taken += 1
    assert len(seen) > 300, "hardly anything was reached"
    assert taken == len(seen) * len(steps()) or taken >= (len(seen) - 1) * len(steps())


# ------------------------------------------------------------------------------------------ by name
def test_commit_applies_each_ack_whatever_else_is_pending() -> None:
    """Pulsar: success, and nothing was acknowledged, while another transaction had a cumulative one pending."""
    shape = shape_of(10)
    cursor = Cursor(shape, CursorState(shape.start_position))
    assert up_to(cursor, shape, Y, Position(10, 3), 0, 1) is None
    for entry in (5, 7, 8):
        assert ack_in(cursor, X, wanted_of(Position(10, entry), [0], 1)) is None
    pending_acks.settle_transactional_acks(cursor, X, committed=True)
    assert [entry for entry in range(10) if cursor.is_acked(Position(10, entry))] == [5, 7, 8]
    assert cursor.mark == (10, -1), "the mark passed what is pending in the other one"
    pending_acks.settle_transactional_acks(cursor, Y, committed=True)
    assert cursor.mark == (10, 3)
    assert cursor.pending is None


def test_two_transactions_share_a_batch() -> None:
    """Pulsar P#16032: the commit of one acknowledged the messages of both."""
    shape = shape_of(2)
    cursor, batch = Cursor(shape, CursorState(shape.start_position)), Position(10, 0)
    assert ack_in(cursor, X, wanted_of(batch, [0, 2], 4)) is None
    assert ack_in(cursor, Y, wanted_of(batch, [1], 4)) is None
    assert ack_in(cursor, Y, wanted_of(batch, [1, 2], 4)) == TransactionalAckRefused(
        TransactionalAckConflict.PENDING, batch
    )
    pending_acks.settle_transactional_acks(cursor, X, committed=True)
    assert cursor.acked_indexes(batch) == [0, 2]
    assert not cursor.is_acked_or_pending(batch)
    cursor.ack_messages_of_batch(batch, 0b1000, 4)
    assert cursor.is_acked_or_pending(batch)
    assert not cursor.is_acked(batch)
    pending_acks.settle_transactional_acks(cursor, Y, committed=False)
    assert not cursor.is_acked_or_pending(batch)
    assert cursor.acked_indexes(batch) == [0, 2, 3]


@pytest.mark.parametrize("committed", [True, False])
def test_a_batch_whose_messages_are_all_acknowledged_is_whole_when_the_cumulative_one_above_it_ends(
    committed: bool,
) -> None:
    """Its size is read while the transaction has it as a whole."""
    shape = shape_of(4)
    cursor, batch = Cursor(shape, CursorState(shape.start_position)), Position(10, 1)
    cursor.ack_messages_of_batch(batch, 0b111)
    assert up_to(cursor, shape, X, Position(10, 2), 0, 1) is None
    assert not cursor.set_batch_size(batch, BATCH)
    cursor.check()
    pending_acks.settle_transactional_acks(cursor, X, committed=committed)
    assert cursor.set_batch_size(batch, BATCH) is not committed
    assert cursor.is_acked(batch)
    assert cursor.mark == (Position(10, 2) if committed else shape.start_position)
    cursor.check()


def test_abort_gives_back_exactly_its_own() -> None:
    """Also what was acknowledged before in what a cumulative acknowledgement covers stays so."""
    shape = shape_of(4, 4)
    cursor = Cursor(shape, CursorState(shape.start_position))
    cursor.ack(Position(10, 1))
    assert ack_in(cursor, Y, wanted_of(Position(20, 2), [0], 1)) is None
    assert up_to(cursor, shape, X, Position(20, 0), 0, 1) is None
    assert ack_in(cursor, X, wanted_of(Position(20, 3), [0], 1)) is None
    settled = pending_acks.settle_transactional_acks(cursor, X, committed=False)
    assert settled is not None
    assert pending_acks.find_first_redelivered_entry(cursor, settled.acks) == (10, 0)
    came = list(pending_acks.entries_of_aborted_acks(cursor, settled, tail=False))
    assert sorted(came) == [(10, 0), (10, 2), (10, 3), (20, 0), (20, 3)]
    assert pending_acks.settle_transactional_acks(cursor, X, committed=False) is None, "settled twice"


def test_a_cumulative_position_that_moves_to_another_chunk_leaves_nothing_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(stored.CursorChunkKind.PENDING), "block_bits", property(lambda kind: 1))
    shape = shape_of(10)
    cursor, log = Cursor(shape, CursorState(shape.start_position)), CursorWritePlanner()
    entries = list[bytes]()

    def store() -> CursorState:
        write = log.plan_write(cursor, len(entries) + 1)
        log.on_write_confirmed(write)
        entries.extend(write.entries)
        mark, rows = stored.decode_marker(stored.decode_piece(entries[-1]).body)
        state = CursorState(mark)
        for key, row in rows.items():
            stored.decode_chunk_into_state(state, key, stored.decode_piece(entries[row.first_entry]).body)
        return state

    assert up_to(cursor, shape, X, Position(10, 1), 0, 1) is None
    assert ack_in(cursor, Y, wanted_of(Position(10, 8), [0], 1)) is None
    store()
    assert ack_in(cursor, X, wanted_of(Position(10, 9), [0], 1)) is None
    assert up_to(cursor, shape, X, Position(10, 5), 0, 1) is None
    assert store() == cursor.copy_cursor_state()
    pending_acks.settle_transactional_acks(cursor, X, committed=False)
    assert store() == cursor.copy_cursor_state()
    assert list(cursor.copy_cursor_state().pending) == [Y]


def test_a_hundred_thousand_pending_entries_are_stored_whole_and_take_little_memory() -> None:
    shape = shape_of(300_000)
    cursor = Cursor(shape, CursorState(shape.start_position))
    for number in range(10):
        entries = BitMap(range(number * 2, 200_000, 20))
        assert ack_in(cursor, TxnId(0, number), TxnAcks({10: entries})) is None
    assert cursor.memory_bytes < 1_500_000
    assert cursor.next_deliverable_position(cursor.mark) == (10, 1)
    cursor = again(cursor, shape)
    assert cursor.pending is not None
    assert cursor.pending.entry_count == 100_000
    for number in range(10):
        pending_acks.settle_transactional_acks(cursor, TxnId(0, number), committed=True)
    assert (cursor.hole_entry_count, cursor.pending) == (99_999, None)


def test_an_aborted_cumulative_acknowledgement_ends_at_the_start_of_the_log_wherever_the_mark_is() -> None:
    shape = shape_of(2, 3)
    positions = positions_of(shape)
    for mark in (NO_POSITION, Position(0, 4), shape.start_position, positions[0]):
        cursor = Cursor(shape, CursorState(mark))
        named = positions[3]
        new = pending_acks.judge_transactional_acks(cursor, X, TxnAcks(up_to=named), named)
        assert isinstance(new, TxnAcks)
        pending_acks.add_pending_acks(cursor, X, new)
        settled = pending_acks.settle_transactional_acks(cursor, X, committed=False)
        assert settled is not None
        again = list(islice(pending_acks.entries_of_aborted_acks(cursor, settled, tail=True), 10))
        assert again == [each for each in reversed(positions[:4]) if each > mark]
