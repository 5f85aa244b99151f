"""The transactions of a topic against plain lists: a walk with sends, ends, trims, and a crash at any point."""

import random
from dataclasses import dataclass, field

import pytest
from pyroaring import BitMap, BitMap64

from magnetar.broker.common.transactions import Settlement
from magnetar.broker.log.log_queue_core import SequenceRange
from magnetar.broker.log.log_shape_core import CommittedShape, LedgerSpan, LogShape
from magnetar.broker.topic import outcomes as stored
from magnetar.broker.topic.dedup_core import DedupVerdict
from magnetar.broker.topic.transactions_core import OpenTxnInSnapshot, TopicTransactionsCore, TxnSnapshot
from magnetar.proto.names import Position
from magnetar.proto.states import ForgottenOutcome, TxnId

OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"


@dataclass
class Entry:
    """One entry of the model's log."""

    position: Position
    first_index: int
    count: int
    txn: TxnId | None
    sequence: int
    state: str = COMMITTED


@dataclass
class Model:
    """What a topic shows, from lists alone."""

    log: list[Entry] = field(default_factory=list)

    def stable_entries(self) -> list[Entry]:
        first = next((at for at, each in enumerate(self.log) if each.state == OPEN), len(self.log))
        return self.log[:first]

    def shown(self) -> list[Position]:
        return [each.position for each in self.stable_entries() if each.state == COMMITTED]

    @property
    def stable_index(self) -> int:
        stable = self.stable_entries()
        if len(stable) < len(self.log):
            return self.log[len(stable)].first_index
        return self.log[-1].first_index + self.log[-1].count if self.log else 0


class Walk:
    """A topic that is driven at random; `crash` loses what is in memory, and goes on from the last snapshot."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = Model()
        self.shape = LogShape()
        self.shape.add(LedgerSpan(1, 0, open=True))
        self.view = CommittedShape(self.shape)
        self.start(TxnSnapshot(Position(1, -1)))
        self.flying: list[Entry] = []
        self.outcomes: dict[TxnId, Settlement] = {}
        self.number = self.next_txn = 0
        self.saved = self.core.snapshot()
        self.saved_flying = False

    def start(self, snapshot: TxnSnapshot) -> None:
        self.core = TopicTransactionsCore(self.shape, snapshot)
        self.view.set_transaction_outcomes(self.core)

    def step(self) -> None:
        action = self.rng.choice(
            ["plain", "begin", "send", "send", "send", "land", "land", "end", "end", "roll", "trim", "save", "crash"]
        )
        getattr(self, action)()

    # ---------------------------------------------------------------- what happens
    def plain(self) -> None:
        self.push(None)

    def begin(self) -> None:
        txn = TxnId.from_parts(0, 1, self.next_txn)
        self.next_txn += 1
        self.core.register_unresolved_transaction(txn)
        assert self.core.on_transaction_joined(txn)

    def send(self) -> None:
        if opened := [each for each in self.core.open_transaction_ids if self.core.is_open(each)]:
            self.push(self.rng.choice(opened))

    def push(self, txn: TxnId | None) -> None:
        if txn is not None:
            numbers = SequenceRange(self.number, self.number)
            assert self.core.judge_duplicate(txn, "p", numbers) is DedupVerdict.NEW
            assert self.core.judge_duplicate(txn, "p", numbers) is DedupVerdict.UNKNOWN
        self.flying.append(Entry(Position(0, 0), 0, self.rng.randint(1, 4), txn, self.number))
        self.number += 1

    def land(self) -> None:
        if not self.flying:
            return
        entry, tail = self.flying.pop(0), self.shape.tail_span
        tail.last_entry += 1
        entry.position, entry.first_index = Position(tail.ledger_id, tail.last_entry), tail.end_index
        tail.end_index += entry.count
        self.model.log.append(entry)
        if entry.txn is not None:
            entry.state = ABORTED if entry.txn in self.outcomes else OPEN
            numbers = SequenceRange(entry.sequence, entry.sequence)
            self.core.on_publish_confirmed(entry.txn, "p", numbers, entry.position, entry.first_index, entry.count, 10)
            if entry.state == OPEN:
                assert self.core.judge_duplicate(entry.txn, "p", numbers) is DedupVerdict.DUPLICATE

    def end(self) -> None:
        if not self.core.open_transaction_ids:
            return
        txn = self.rng.choice(self.core.open_transaction_ids)
        own = [each for each in self.model.log if each.txn == txn and each.state == OPEN]
        receipts = own[: self.rng.choice([len(own), len(own), self.rng.randint(0, len(own))])]
        last = receipts[-1].position if receipts else Position(-1, -1)
        settlement = Settlement(txn, self.rng.random() < 0.6, len(receipts), last)
        self.report_settled(settlement)

    def report_settled(self, settlement: Settlement) -> None:
        self.outcomes[settlement.txn] = settlement
        end = self.core.settle(settlement)
        assert not end.missing
        for each in self.model.log:
            if each.txn == settlement.txn and each.state == OPEN:
                receipt = each.position <= settlement.last
                each.state = COMMITTED if settlement.committed and receipt else ABORTED
        assert not self.core.settle(settlement).shown, "twice is once"

    def roll(self) -> None:
        tail = self.shape.tail_span
        if tail.last_entry >= 0 and self.rng.random() < 0.5:
            self.shape.close_last_ledger_span(tail.ledger_id, tail.last_entry, tail.end_index, 100, 0)
            self.shape.add(LedgerSpan(tail.ledger_id + self.rng.randint(1, 3), tail.end_index, open=True))

    def trim(self) -> None:
        """What is open, or not in the snapshot, holds the log."""
        spans, first = self.shape.spans, self.core.first_open_transaction_position
        held = min(self.saved.position, first or self.saved.position)
        gone = spans[0]
        if len(spans) > 1 and (gone.ledger_id, gone.last_entry) < held and self.rng.random() < 0.3:
            self.shape.remove(gone.ledger_id)
            self.core.on_ledger_trimmed(gone.ledger_id, gone.first_index, gone.end_index)
            self.model.log = [each for each in self.model.log if each.position[0] != gone.ledger_id]

    def save(self) -> None:
        """Through its stored form."""
        snapshot = self.core.snapshot()
        rows = {each: stored.OutcomesPartPlace(1, 0, 1) for each in sorted(snapshot.aborted)}
        marker = stored.encode_marker(
            stored.OutcomesSnapshotMarker(snapshot.position, snapshot.open, rows, snapshot.ended), 1
        )
        found = stored.decode_marker([stored.decode_piece(each) for each in marker])
        parts = {
            each: stored.decode_outcomes_part(each, row,
            [stored.decode_piece(*stored.encode_outcomes_part(each, part, 1))])
            for each, row, part in ((id_, row, snapshot.aborted[id_]) for id_, row in found.parts.items())
        }
        self.saved = TxnSnapshot(found.position, found.open, parts, found.ended)

    def crash(self) -> None:
        """Those that ended are settled again: nothing was answered that the snapshot does not have."""
        if self.rng.random() < 0.7:
            return
        self.flying.clear()
        again = TopicTransactionsCore(self.shape, _copied(self.saved))
        for each in self.model.log:
            if each.txn is not None and each.position > self.saved.position:
                numbers = SequenceRange(each.sequence, each.sequence)
                again.add_replayed_entry(each.txn, "p", numbers, each.position, each.first_index, each.count, 10)
        again.finish_replay()
        self.core = again
        self.view.set_transaction_outcomes(again)
        before, hidden = set(self.model.shown()), set(self.positions())
        assert hidden <= before, "something is shown before its outcome is known"
        for txn in list(again.open_transaction_ids):
            if txn in self.outcomes:
                again.settle(self.outcomes[txn])
            else:
                assert again.on_transaction_joined(txn)
        self.check()

    # ---------------------------------------------------------------- what is shown
    def positions(self) -> list[Position]:
        found, position = [], self.view.position_at_or_after(self.view.start_position)
        while self.view.has_visible_entry(position):
            found.append(position)
            position = self.view.position_after(position)
        return found

    def check(self) -> None:
        self.core.check()
        model, view = self.model, self.view
        shown = model.shown()
        assert self.positions() == shown
        assert (view.last_position if shown else view.last_position[1]) == (shown[-1] if shown else -1)
        assert view.end_index == model.stable_index or not model.log
        assert view.stable_position <= self.shape.last_confirmed
        stable = {each.position: each for each in model.stable_entries() if each.state == COMMITTED}
        indexes = [each.first_index + at for each in stable.values() for at in range(each.count)]
        for index in self.rng.sample(range(model.stable_index + 2), min(5, model.stable_index + 2)):
            assert view.count_messages_from(index) == sum(each >= index for each in indexes), index
            messages = self.rng.randint(0, 6)
            kept = [each for each in indexes if each >= index]
            if len(kept) > messages:
                assert view.index_after_next_messages(index, messages) == kept[messages]
        back, found = list[Position](), view.position_before(Position(1 << 40, 0))
        while found[1] >= 0:
            back.append(found)
            found = view.position_before(found)
        decided = [each.position for each in model.log if each.state != ABORTED]
        assert back == decided[::-1]
        for span in self.shape.spans:
            assert view.count_visible_entries(span.ledger_id, 0) == sum(each[0] == span.ledger_id for each in shown)
        aborted = [each for each in model.log if each.state == ABORTED]
        assert self.core.aborted_entries == len(aborted)
        assert len(self.core.aborted_indexes) == sum(each.count for each in aborted)
        for mark in shown[-1:]:
            following = [each for each in model.log if each.position > mark]
            run = next((at for at, each in enumerate(following) if each.state != ABORTED), len(following))
            assert view.last_hidden_position_after(mark) == (following[run - 1].position if run else mark)


def _copied(snapshot: TxnSnapshot) -> TxnSnapshot:
    opened = tuple(
        OpenTxnInSnapshot(
            each.txn, each.first, {id_: entries.copy() for id_, entries in each.entries.items()}, each.indexes.copy(),
            each.starts.copy(), each.size, dict(each.numbers),
        )
        for each in snapshot.open
    )  # fmt: skip
    parts = {id_: part._replace(entries=part.entries.copy()) for id_, part in snapshot.aborted.items()}
    return snapshot._replace(open=opened, aborted=parts)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_shown_is_what_the_lists_say_with_a_crash_at_any_point(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(250):
        walk.step()
        walk.check()


def opened(*txns: int) -> TopicTransactionsCore:
    shape = LogShape()
    shape.add(LedgerSpan(1, 0, open=True))
    core = TopicTransactionsCore(shape, TxnSnapshot(Position(1, -1)))
    for each in txns:
        core.register_unresolved_transaction(TxnId(0, each))
        core.on_transaction_joined(TxnId(0, each))
    return core


def store(core: TopicTransactionsCore, txn: TxnId, sequence: int, entry_id: int, *, name: str = "p") -> None:
    tail = core._shape.tail_span
    core.judge_duplicate(txn, name, SequenceRange(sequence, sequence))
    tail.last_entry, tail.end_index = entry_id, entry_id + 1
    core.on_publish_confirmed(txn, name, SequenceRange(sequence, sequence), Position(1, entry_id), entry_id, 1, 10)


def test_after_an_abort_the_same_sequence_ids_are_new_and_a_commit_returns_them() -> None:
    core, first, second = opened(1, 2), TxnId(0, 1), TxnId(0, 2)
    store(core, first, 7, 0)
    assert core.last_sequence_id("p") == 7
    assert core.settle(Settlement(first, False)).numbers == {}
    assert core.last_sequence_id("p") == -1
    assert core.judge_duplicate(second, "p", SequenceRange(7, 7)) is DedupVerdict.NEW
    core.on_publish_failed(second, "p")
    store(core, second, 7, 1)
    assert core.settle(Settlement(second, True, 1, Position(1, 1))).numbers["p"].number == 7


def test_what_has_entries_here_stays_when_its_coordinator_gives_no_answer() -> None:
    """After a take-over it is asked for; readers wait for its outcome, which still counts when it comes."""
    core, txn = opened(1), TxnId(0, 1)
    store(core, txn, 0, 0)
    again = TopicTransactionsCore(core._shape, TxnSnapshot(Position(1, -1)))
    again.add_replayed_entry(txn, "p", SequenceRange(0, 0), Position(1, 0), 0, 1, 10)
    again.finish_replay()
    again.on_join_refused(txn)
    again.check()
    assert again.is_known(txn)
    assert again.stable_position == Position(1, -1)
    end = again.settle(Settlement(txn, True, 1, Position(1, 0)))
    assert (end.shown, end.numbers["p"].number, again.stable_position) == (True, 0, Position(1, 0))


def test_a_late_send_never_hides_committed_entries() -> None:
    """Aborted are positions and not ids: what was shown stays, whatever comes under the same id."""
    core, txn = opened(1), TxnId(0, 1)
    store(core, txn, 0, 0)
    core.judge_duplicate(txn, "p", SequenceRange(1, 1))
    core.settle(Settlement(txn, True, 1, Position(1, 0)))
    core._shape.tail_span.last_entry, core._shape.tail_span.end_index = 1, 2
    core.on_publish_confirmed(txn, "p", SequenceRange(1, 1), Position(1, 1), 1, 1, 10)
    assert core.aborted == {1: BitMap([1])}
    assert core.stable_position == Position(1, 1)
    core.settle(Settlement(txn, False))
    assert core.aborted == {1: BitMap([1])}


def test_a_receipt_without_a_position_counts_too() -> None:
    """What was sent again over a new connection is called a duplicate, and its position is not known to the client."""
    core, txn = opened(1), TxnId(0, 1)
    for number in range(4):
        store(core, txn, number, number)
    end = core.settle(Settlement(txn, True, 3, Position(1, 0)))
    assert core.aborted == {1: BitMap([3])}
    assert list(core.aborted_indexes) == [3]
    assert end.numbers == {}, "its last number had no receipt"
    core, txn = opened(2), TxnId(0, 2)
    store(core, txn, 0, 0)
    assert core.settle(Settlement(txn, True, 1)).numbers["p"].number == 0
    assert not core.aborted


def test_a_forgotten_outcome_is_an_abort_only_of_what_began_after_all_that_may_be_lost() -> None:
    core, before, after, read = opened(1), TxnId(0, 1), TxnId(0, 2), TxnId(0, 3)
    store(core, before, 0, 0)
    core.lost_to = Position(1, 0)
    for txn in (after, read):
        core.register_unresolved_transaction(txn)
        core.on_transaction_joined(txn)
    store(core, before, 1, 1)
    store(core, after, 2, 2)
    assert core.perhaps_forgotten_transaction_ids == [before]
    found = [core.on_outcome_forgotten(txn, ForgottenOutcome.DISCARDED) for txn in (before, after, read)]
    assert found == [True, False, False], "of `read` there is no entry to lose"
    assert core.on_outcome_forgotten(after, ForgottenOutcome.UNKNOWN)
    assert core.forgotten_transaction_ids == [before, after]
    assert not core.is_open(before)
    again = TopicTransactionsCore(core._shape, core.snapshot())
    assert again.perhaps_forgotten_transaction_ids == [before], "it is stored what may be lost"
    core.settle(Settlement(before, True))
    core.settle(Settlement(after, False))
    assert core.stable_position == Position(1, 2)
    assert core.aborted == {1: BitMap([2])}
    core.check()


def test_entries_with_receipts_that_the_log_lacks_are_reported() -> None:
    core, txn = opened(1), TxnId(0, 1)
    store(core, txn, 0, 0)
    assert core.settle(Settlement(txn, True, 3, Position(1, 5))).missing == 2


def test_what_was_decided_before_a_late_acknowledgement_is_not_called_lost() -> None:
    """The coordinator sends a settlement again, and a subscription has made the transaction known again."""
    core, txn = opened(1), TxnId(0, 1)
    store(core, txn, 0, 0)
    ended = Settlement(txn, True, 1, Position(1, 0))
    assert not core.settle(ended).missing
    core.register_unresolved_transaction(txn)
    assert not core.settle(ended).missing
    again = TopicTransactionsCore(core._shape, core.snapshot())
    again.register_unresolved_transaction(txn)
    assert not again.settle(ended).missing
    again.register_unresolved_transaction(txn)
    assert again.settle(Settlement(txn, True, 1, Position(1, 5))).missing == 1, "the log ends before its receipt"


def test_a_million_aborts_are_stored_whole_and_take_little_memory() -> None:
    shape = LogShape()
    shape.add(LedgerSpan(1, 0, 1_999_999, 2_000_000, open=True))
    entries, indexes = BitMap(range(0, 2_000_000, 2)), BitMap64(range(0, 2_000_000, 2))
    core = TopicTransactionsCore(shape, TxnSnapshot(Position(1, 1_999_999)))
    core.aborted[1], core.sizes[1], core.aborted_indexes = entries, 1, indexes
    pieces = stored.encode_outcomes_part(1, core.get_aborted_entries_of_ledger(1), 1)
    assert sum(map(len, pieces)) < 600_000
    part = stored.decode_outcomes_part(
        1, stored.OutcomesPartPlace(1, 0, len(pieces)), [stored.decode_piece(each) for each in pieces]
    )
    assert part.entries == entries
    assert part.indexes == indexes
    again = TopicTransactionsCore(shape, TxnSnapshot(Position(1, 1_999_999), (), {1: part}))
    assert again.count_aborted_messages(0, 2_000_000) == again.aborted_entries == 1_000_000
