"""One transaction over two topics on the real cores: coordinator, what topics show, what a subscription has pending.

Every place of a crash of any of them, of a time-out or an abort, and of a send that nobody was answered, in the life of
a transaction that sends to both topics and acknowledges at one. Whatever happens it counts everywhere or nowhere
(invariant 90), as everybody is told; what had no receipt is never shown (invariant 75).
"""

from collections.abc import Iterator

import pytest

from magnetar.broker.common.transactions import Settlement
from magnetar.broker.log.log_queue_core import SequenceRange
from magnetar.broker.log.log_shape_core import CommittedShape, LedgerSpan, LogShape
from magnetar.broker.subscription.core import pending_acks
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState, TxnAcks
from magnetar.broker.subscription.core.pending_acks import TransactionalAckRefused
from magnetar.broker.topic.dedup_core import DedupVerdict
from magnetar.broker.topic.transactions_core import TopicTransactionsCore, TxnSnapshot
from magnetar.broker.transaction.intents_core import (
    CoordinatorLimits,
    EndTransaction,
    GetTransactionStatus,
    JoinTransaction,
    SendOutcomeToParticipant,
    TransactionEndVerb,
)
from magnetar.broker.transaction.records_core import Participant
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId, TxnState
from tests.broker.subscription.core.shapes import shape_of
from tests.broker.subscription.core.test_pending_acks import again
from tests.broker.transaction.judge import World

LIFE = (
    "send a", "send b", "ack a", "land b", "land a", "commit", "take", "appended", "settle", "settle",
)  # fmt: skip
CRASHES = ("nothing", "coordinator, nothing lands", "coordinator, all lands", "topic a", "topic b", "hand over")
ENDS = ("", "expire", "abort")
WORK = Position(10, 1)
"""What is acknowledged."""


class Topic:
    """The cores of a loaded topic, and what a crash leaves of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shape = LogShape()
        self.shape.add(LedgerSpan(1, 0, open=True))
        self.view = CommittedShape(self.shape)
        self.log: list[tuple[TxnId, int, Position]] = []
        self.flying: list[int] = []
        self.receipts: list[Position] = []
        self.saved = TxnSnapshot(Position(1, -1))
        self.asked = shape_of(3)
        self.cursor = self.stored_cursor = Cursor(self.asked, CursorState(Position(10, -1)))
        self.acked = False
        self.load()

    def load(self) -> None:
        """From what is stored, and the log."""
        self.core = TopicTransactionsCore(self.shape, self.saved)
        self.view.set_transaction_outcomes(self.core)
        for txn, number, position in self.log:
            if position > self.saved.position:
                self.core.add_replayed_entry(txn, "p", SequenceRange(number, number), position, position[1], 1, 10)
        self.core.finish_replay()
        self.cursor = again(self.stored_cursor, self.asked)
        for txn in self.cursor.pending.of if self.cursor.pending is not None else ():
            self.core.register_unresolved_transaction(txn)

    def crash(self) -> None:
        self.flying.clear()
        self.load()

    def send(self, txn: TxnId, number: int) -> None:
        assert self.core.judge_duplicate(txn, "p", SequenceRange(number, number)) is DedupVerdict.NEW
        self.flying.append(number)

    def land(self, txn: TxnId, *, receipt: bool = True) -> None:
        number, tail = self.flying.pop(0), self.shape.tail_span
        tail.last_entry += 1
        tail.end_index += 1
        position = Position(tail.ledger_id, tail.last_entry)
        self.log.append((txn, number, position))
        self.core.on_publish_confirmed(txn, "p", SequenceRange(number, number), position, position[1], 1, 10)
        if receipt:
            self.receipts.append(position)

    def ack(self, txn: TxnId) -> None:
        """Answered when it is stored."""
        wanted = TxnAcks()
        wanted.add(WORK)
        new = pending_acks.judge_transactional_acks(self.cursor, txn, wanted)
        assert not isinstance(new, TransactionalAckRefused)
        pending_acks.add_pending_acks(self.cursor, txn, new)
        self.stored_cursor = again(self.cursor, self.asked)
        self.acked = True

    def report_settled(self, settlement: Settlement) -> None:
        """Answered when it is stored."""
        end = self.core.settle(settlement)
        assert not end.missing, "every entry with a receipt is there"
        pending_acks.settle_transactional_acks(self.cursor, settlement.txn, committed=settlement.committed)
        self.stored_cursor = again(self.cursor, self.asked)
        if not self.core.count_entries_in_flight(settlement.txn):
            self.saved = self.core.snapshot()

    def shown(self) -> list[Position]:
        found, position = list[Position](), self.view.position_at_or_after(self.view.start_position)
        while self.view.has_visible_entry(position):
            found.append(position)
            position = self.view.position_after(position)
        return found


class Life:
    """`at`: before which event of LIFE each of them comes."""

    def __init__(self, crash: str, crash_at: int, end: str, end_at: int, doubled_at: int) -> None:
        self.world = World(CoordinatorLimits(retention_s=1e9))
        self.txn = self.world.begin(0)
        self.id = TxnId(0, self.txn)
        self.topics = {name: Topic(name) for name in "ab"}
        self.requests = 1
        self.failed = False
        for at, event in enumerate((*LIFE, "")):
            if at == crash_at:
                self.do(crash)
            if at == end_at:
                self.do(end)
            if at == doubled_at:
                self.do("doubled")
            self.do(event)
        self.heal()

    def ask(self, make: type, *given: object) -> object:
        self.requests += 1
        self.world.ask(make(self.requests, self.txn, *given))
        return self.world.answers.get(self.requests)

    def join(self, topic: Topic, *, asks: bool = False) -> bool:
        """As TopicTransactions: before the first entry or acknowledgement. `asks`: what a load found, and from time to
        time what is open."""
        if topic.core.is_open(self.id) and not asks:
            return True
        topic.core.register_unresolved_transaction(self.id)
        state = self.ask(JoinTransaction, topic.name)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            return topic.core.on_transaction_joined(self.id)
        topic.core.on_join_refused(self.id)
        if self.id in topic.core.known:
            if state is TxnState.ABORTED:
                topic.report_settled(Settlement(self.id, False))
            elif (owed := self.world.core.outcomes.find_unsettled_participant(self.txn, topic.name)) is not None:
                topic.report_settled(self.settlement(True, owed))
        return False

    def settlement(self, committed: bool, told: Participant) -> Settlement:
        return Settlement(self.id, committed, told.entries, Position(told.ledger, told.entry))

    def do(self, event: str) -> None:
        what, _, name = event.partition(" ")
        world, topic = self.world, self.topics.get(name)
        match what:
            case "send" if topic is not None:
                if self.join(topic):
                    topic.send(self.id, 0)
                else:
                    self.failed = True
            case "ack" if topic is not None:
                if self.join(topic):
                    topic.ack(self.id)
                else:
                    self.failed = True
            case "land" if topic is not None:
                if topic.flying:
                    topic.land(self.id)
            case "doubled":
                if self.topics["a"].receipts and self.join(self.topics["a"]):
                    self.topics["a"].send(self.id, 7)
                    self.topics["a"].land(self.id, receipt=False)
            case "commit":
                self.commit()
            case "abort":
                self.ask(EndTransaction, TransactionEndVerb.ABORT, "me")
            case "expire":
                world.tick(world.limits.timeout_s + 1)
            case "take":
                world.take()
            case "appended" if world.append_now is not None:
                world.appended()
            case "settle" if world.settling:
                self.settle(world.settling.pop(0))
            case "coordinator,":
                world.crash(lands=0 if name.startswith("nothing") else 100)
            case "topic" if topic is not None:
                topic.crash()
                for each in topic.core.open_transaction_ids:
                    assert each == self.id
                    self.join(topic, asks=True)
            case "hand":
                world.hand_over()
        if what:
            self.ask(GetTransactionStatus)

    def commit(self) -> None:
        """The client's: when every operation has its receipt; else it aborts."""
        if self.failed or not (all(each.receipts for each in self.topics.values()) and self.topics["a"].acked):
            self.ask(EndTransaction, TransactionEndVerb.ABORT, "me")
            return
        said = [Participant(each.name, len(each.receipts), *each.receipts[-1]) for each in self.topics.values()]
        self.ask(EndTransaction, TransactionEndVerb.COMMIT, "me", said)

    def settle(self, each: SendOutcomeToParticipant) -> None:
        topic = self.topics[each.participant.topic]
        topic.report_settled(self.settlement(each.committed, each.participant))
        self.world.store(each)
        self.world._do(self.world.core.on_outcome_stored(each.txn, each.participant.topic))

    def heal(self) -> None:
        for _ in range(3):
            self.world.tick(self.world.limits.timeout_s_max + 1)
            self.world.core.decisions.append_deferred_records_next()
            self.world.flush()
            while self.world.settling:
                self.settle(self.world.settling.pop(0))
            for topic in self.topics.values():
                while topic.flying:
                    topic.land(self.id)
                if topic.core.open_transaction_ids:
                    self.join(topic, asks=True)

    def check(self) -> bool:
        """Whether it committed."""
        self.world.flush()
        state = self.ask(GetTransactionStatus)
        assert state in (TxnState.COMMITTED, TxnState.ABORTED), "it ends"
        committed = state is TxnState.COMMITTED
        for topic in self.topics.values():
            assert not topic.core.open_transaction_ids, "every topic knows the outcome"
            assert topic.view.stable_position == topic.shape.last_confirmed, "nothing is held back"
            assert topic.shown() == (topic.receipts if committed else []), (topic.name, topic.log)
            topic.core.check()
            topic.crash()
            assert topic.shown() == (topic.receipts if committed else []), "a crash changes nothing"
        assert self.topics["a"].cursor.pending is None
        assert self.topics["a"].cursor.is_acked(WORK) is committed
        return committed


def lives(crash: str) -> Iterator[Life]:
    places = range(len(LIFE) + 1)
    for crash_at in places if crash != "nothing" else (0,):
        for end in ENDS:
            for end_at in places if end else (0,):
                for doubled_at in (*places[5:], -1):
                    yield Life(crash, crash_at, end, end_at, doubled_at)


@pytest.mark.parametrize("crash", CRASHES)
def test_one_transaction_over_two_topics_counts_everywhere_or_nowhere_whatever_dies(crash: str) -> None:
    outcomes = [life.check() for life in lives(crash)]
    assert 10 < sum(outcomes) < len(outcomes), "some of them commit"
