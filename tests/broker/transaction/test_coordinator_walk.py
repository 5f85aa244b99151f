"""Every order of the events of one transaction over two topics, with one crash or hand-over; then long random walks.

The rules are tests/broker/transaction/judge.py's.
"""

import random
from collections.abc import Iterator

import pytest

from magnetar.broker.transaction.intents_core import (
    AbortByAdmin,
    AbortIfOpen,
    CommitSinkBatch,
    CoordinatorLimits,
    EndTransaction,
    GetTransactionStatus,
    JoinTransaction,
    RemoveParticipant,
    TransactionEndVerb,
    TransactionRow,
)
from magnetar.broker.transaction.records_core import Participant, SinkBatchTag
from magnetar.proto.errors import NotOwner, OutcomeUnknown, TransactionAborted, TransactionForgotten
from magnetar.proto.states import ForgottenOutcome, TxnState
from tests.broker.transaction.judge import World

FIRST = {
    "join b": "join a", "appended": "take", "settle": "take", "take": "join a", "commit again": "commit",
}  # fmt: skip


def orders(ends: tuple[str, ...], breaks: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every order in which each of `FIRST` comes after its first: the topics are alike, and so are two commits."""

    def after(done: tuple[str, ...], left: frozenset[str]) -> Iterator[tuple[str, ...]]:
        if not left:
            yield done
        for event in sorted(left):
            if FIRST.get(event, "") not in left:
                yield from after((*done, event), left - {event})

    yield from after((), frozenset(("join a", "join b", "take", "appended", "settle", *ends, *breaks)))


def worlds(ends: tuple[str, ...], broken: str) -> Iterator[World]:
    """The end of each order. What an order begins with as the one before it did was checked there."""
    before: tuple[str, ...] = ()
    for events in orders(ends, (broken,)):
        same = [one == other for one, other in zip(before, events, strict=bool(before))]
        yield run(events, same.index(False) if same else 0)
        before = events


def run(events: tuple[str, ...], checked: int = 0) -> World:
    world = World(CoordinatorLimits(retention_s=1e9))
    txn = world.begin(0)
    for number, event in enumerate(events, 1):
        world.checks = number > checked
        match event:
            case "join a" | "join b":
                world.ask(JoinTransaction(number, txn, event[-1]))
            case "commit" | "commit again":
                world.ask(EndTransaction(number, txn, TransactionEndVerb.COMMIT, "me"))
            case "abort":
                world.ask(EndTransaction(number, txn, TransactionEndVerb.ABORT, "me"))
            case "prepare":
                world.ask(EndTransaction(number, txn, TransactionEndVerb.PREPARE, "me"))
            case "take":
                world.take()
            case "appended":
                if world.append_now is not None:
                    world.appended()
            case "settle" | "settle again":
                world.settle()
            case "expire":
                world.tick(world.limits.timeout_s + 1)
            case "crash, nothing lands":
                world.crash(lands=0)
            case "crash, all lands":
                world.crash(lands=100)
            case "hand over":
                world.hand_over()
        world.ask(GetTransactionStatus(100 + number, txn))
    world.heal(rounds=3)
    world.ask(GetTransactionStatus(1000, txn))
    world.flush()
    final = world.answers[1000]
    assert final in (TxnState.COMMITTED, TxnState.ABORTED), "every transaction ends after the network heals"
    assert world.core.is_idle, "nothing is left over"
    stored = {topic: committed for (_, topic), committed in world.judge.stored.items()}
    assert set(stored.values()) <= {final is TxnState.COMMITTED}, "the topics stored what was answered"
    for topic in world.judge.participants.get(txn, ()):
        assert stored.get(topic) is True, "every participant of a commit applies it"
    return world


@pytest.mark.parametrize("broken", ["crash, nothing lands", "crash, all lands", "hand over"])
@pytest.mark.parametrize("ends", [("commit", "expire"), ("commit", "abort"), ("commit", "commit again")], ids=str)
def test_every_order_of_one_transaction_has_one_outcome(ends: tuple[str, ...], broken: str) -> None:
    assert sum(bool(world.judge.committed) for world in worlds(ends, broken)) > 10, "the walk commits"


@pytest.mark.parametrize("broken", ["crash, nothing lands", "crash, all lands", "hand over"])
def test_every_order_of_a_prepared_transaction_has_one_outcome(broken: str) -> None:
    assert all(world.core.is_idle for world in worlds(("prepare", "commit"), broken))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_history_keeps_the_rules(seed: int) -> None:
    history = History(seed)
    for _ in range(400):
        history.step()
    history.end()


class History:
    """Many transactions, names and a sink, with crashes at random; `seed` replays it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(CoordinatorLimits(open_max=40, retention_s=900.0, name_idle_s=50_000.0))
        self.ids: list[int] = []
        self.requests = 0
        self.batch = 0

    def _request(self) -> int:
        self.requests += 1
        return self.requests

    def _txn(self) -> int:
        recent = self.ids[-12:] if self.rng.random() < 0.9 else self.ids
        return self.rng.choice(recent)

    def step(self) -> None:
        world, rng = self.world, self.rng
        if not self.ids or rng.random() < 0.15:
            self._begin()
            return
        if world.gave_up:
            world.hand_over()
        match rng.choices(
            ("join", "end", "status", "take", "appended", "settle", "tick", "crash", "hand over", "batch", "admin",
             "delete"),
            (20, 14, 8, 16, 16, 16, 4, 1.5, 1, 3, 1, 1),
        )[0]:
            case "join":
                world.ask(JoinTransaction(self._request(), self._txn(), rng.choice("abc")))
            case "end":
                self._end()
            case "status":
                world.ask(GetTransactionStatus(self._request(), self._txn()))
            case "take":
                if rng.random() < 0.3:
                    world.core.decisions.append_deferred_records_next()
                world.take()
            case "appended":
                if world.append_now is not None:
                    world.appended()
            case "settle":
                if world.settling and rng.random() < 0.2:
                    world.store(rng.choice(world.settling))  # its answer is lost
                else:
                    world.settle(rng.randrange(100))
            case "tick":
                world.tick(rng.choice((1, 20, 61, 400)))
            case "crash":
                world.crash(lands=rng.randrange(6), told=rng.random() < 0.5)
            case "hand over":
                self._hand_over()
            case "batch":
                self._batch()
            case "admin":
                world.ask(AbortByAdmin(self._request(), self._txn()))
            case "delete":
                world.ask(AbortIfOpen(self._request(), self._txn()))
        self._collect()

    def _begin(self) -> None:
        rng = self.rng
        options: dict[str, object] = {"count": rng.choice((1, 1, 3))}
        if rng.random() < 0.3:
            options["name"] = rng.choice(("x", "y"))
        elif rng.random() < 0.3:
            options["tag"] = SinkBatchTag("sink", "query", self.batch + rng.randrange(2))
        self.world.begin(self._request(), **options)
        self._collect()

    def _collect(self) -> None:
        self.ids = sorted(self.world.judge.given)

    def _end(self) -> None:
        verb = self.rng.choices(list(TransactionEndVerb), (6, 2, 2))[0]
        self.world.ask(EndTransaction(self._request(), self._txn(), verb, "me", visible=self.rng.random() < 0.3))

    def _batch(self) -> None:
        txns: dict[int, tuple[Participant, ...]] = {self._txn(): () for _ in range(self.rng.randrange(1, 3))}
        request = self._request()
        self.world.ask(CommitSinkBatch(request, "me", txns, "sink", "query", self.batch))
        stored = self.world.core.table.find_sink_batch("sink")
        self.batch = stored.batch + 1 if stored is not None else 0

    def _hand_over(self) -> None:
        old = self.world.core
        before = {*old.table.live, *old.table.unused}
        self.world.hand_over()
        new = self.world.core
        lost = before - {*new.table.live, *new.table.unused} - old.table._gone.keys()
        assert all(new.state.is_committed(txn) for txn in lost), "a hand-over loses no open transaction"

    def end(self) -> None:
        world = self.world
        if world.append_now is not None:
            world.appended()
        world.flush()
        world.heal()
        assert world.core.is_idle, "every transaction ends"
        for txn in world.judge.committed - world.judge.empty:
            for topic in world.judge.participants[txn]:
                assert world.judge.stored.get((txn, topic)) is True, "every participant of a commit applies it"
        for (txn, _), committed in world.judge.stored.items():
            assert committed is (txn in world.judge.committed), "all or nothing"


def test_of_a_deleted_topic_what_is_open_is_aborted_and_what_is_prepared_or_committed_is_left() -> None:
    world = World()
    opened, prepared, committing = world.begin(0), world.begin(1), world.begin(2)
    for request, txn in ((3, opened), (4, prepared), (5, committing)):
        world.ask(JoinTransaction(request, txn, "a"))
    world.ask(EndTransaction(6, prepared, TransactionEndVerb.PREPARE, "me"))
    world.ask(AbortIfOpen(7, prepared))
    assert 7 not in world.answers, "it may be prepared, or not"
    world.flush()
    world.ask(EndTransaction(8, committing, TransactionEndVerb.COMMIT, "me"))
    world.ask(AbortIfOpen(9, committing))
    assert 9 not in world.answers, "it may be committed, or not"
    world.ask(AbortIfOpen(10, opened))
    world.flush()
    found = {request: world.answers[request] for request in (7, 9, 10)}
    assert [(each.state, each.owner) for each in found.values() if isinstance(each, TransactionRow)] == [
        (TxnState.PREPARED, "me"), (TxnState.COMMITTED, "me"), (TxnState.ABORTED, "me"),
    ]  # fmt: skip
    world.ask(EndTransaction(11, opened, TransactionEndVerb.COMMIT, "me"))
    refused = world.answers[11]
    assert isinstance(refused, TransactionAborted)
    assert refused.fields["reason"] == "a topic of it was deleted by force"
    world.ask(EndTransaction(12, prepared, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    assert world.answers[12] is TxnState.COMMITTED, "force ends nothing that may commit elsewhere"


def test_a_question_about_a_commit_in_doubt_is_not_answered_when_the_epoch_ends() -> None:
    world = World()
    txn = world.begin(0)
    world.ask(JoinTransaction(1, txn, "a"))
    world.ask(EndTransaction(2, txn, TransactionEndVerb.COMMIT, "me"))
    world.take()
    world.ask(AbortIfOpen(3, txn))
    world.crash(lands=1)
    assert isinstance(world.answers[3], NotOwner), "it is asked again, of the next epoch"
    world.ask(AbortIfOpen(4, txn))
    found = world.answers[4]
    assert isinstance(found, TransactionRow)
    assert found.state is TxnState.COMMITTED


def test_a_repeated_commit_gets_the_same_answer() -> None:
    world = World()
    txn = world.begin(0)
    world.ask(JoinTransaction(1, txn, "a"))
    for request in (2, 3):
        world.ask(EndTransaction(request, txn, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    world.crash()
    world.ask(EndTransaction(4, txn, TransactionEndVerb.COMMIT, "me"))
    while world.settling:
        world.settle()
    world.core.decisions.append_deferred_records_next()
    world.flush()
    world.crash()
    world.ask(EndTransaction(5, txn, TransactionEndVerb.COMMIT, "me"))
    assert [world.answers[request] for request in (2, 3, 4, 5)] == [TxnState.COMMITTED] * 4


def test_a_commit_in_doubt_is_not_answered_and_the_next_epoch_knows() -> None:
    for lands in (0, 1):
        world = World()
        txn = world.begin(0)
        world.ask(JoinTransaction(1, txn, "a"))
        world.ask(EndTransaction(2, txn, TransactionEndVerb.COMMIT, "me"))
        world.take()
        world.ask(GetTransactionStatus(3, txn))
        assert 3 not in world.answers, "no answer while it is in doubt"
        world.crash(lands=lands)
        assert isinstance(world.answers[2], OutcomeUnknown)
        world.ask(GetTransactionStatus(4, txn))
        assert world.answers[4] is (TxnState.COMMITTED if lands else TxnState.ABORTED)


def test_take_over_drives_each_decided_transaction_once() -> None:
    world = World()
    txn = world.begin(0)
    world.ask(JoinTransaction(1, txn, "a"))
    world.ask(EndTransaction(2, txn, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    world.crash()
    world.ask(EndTransaction(3, txn, TransactionEndVerb.COMMIT, "me"))
    world.tick(1000.0)
    assert [(each.txn, each.participant.topic) for each in world.settling] == [(txn, "a")]
    world.settle()
    world.core.decisions.append_deferred_records_next()
    world.flush()
    world.crash()
    assert world.settling == [], "it is done"


def test_a_participant_that_is_given_up_no_longer_holds_the_transaction() -> None:
    world = World()
    txn = world.begin(0)
    for request, topic in ((1, "a"), (2, "b")):
        world.ask(JoinTransaction(request, txn, topic))
    world.ask(EndTransaction(3, txn, TransactionEndVerb.COMMIT, "me", visible=True))
    world.flush()
    world.settle(0)
    world.judge.stored[txn, "b"] = True  # an administrator says that it does not matter
    world.ask(RemoveParticipant(4, txn, "b"))
    world.flush()
    assert world.answers[3] is TxnState.COMMITTED
    world.crash()
    assert [each.participant.topic for each in world.settling] in ([], ["a"]), "the detachment survives a crash"


def test_of_what_is_forgotten_a_participant_is_told_why_and_never_that_it_is_aborted() -> None:
    world = World(CoordinatorLimits(retention_s=900.0))
    txn = world.begin(0)
    world.ask(JoinTransaction(1, txn, "a"))
    world.ask(EndTransaction(2, txn, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    world.settle()
    for _ in range(3):
        world.tick(901.0)
        world.core.decisions.append_deferred_records_next()
        world.flush()
    world.ask(GetTransactionStatus(3, txn))
    assert isinstance(world.answers[3], TransactionForgotten)
    world.ask(JoinTransaction(4, txn, "a"))
    assert world.answers[4] is ForgottenOutcome.DISCARDED, "it is committed, and a topic may have lost that"
    late = world.begin(5)
    world.ask(JoinTransaction(6, late, "a"))
    world.ask(EndTransaction(7, late, TransactionEndVerb.ABORT, "me"))
    world.flush()
    world.ask(JoinTransaction(8, late, "a"))
    assert world.answers[8] is TxnState.ABORTED, "of what is not discarded the outcome is certain"


def test_all_that_is_decided_while_an_append_is_on_its_way_is_the_next_append() -> None:
    world = World(CoordinatorLimits(retention_s=1e9))
    txns = [world.begin(number) for number in range(3)]
    for number, txn in enumerate(txns):
        world.ask(JoinTransaction(10 + number, txn, "a"))
    for number, txn in enumerate(txns):
        world.ask(EndTransaction(20 + number, txn, TransactionEndVerb.COMMIT, "me"))
        if not number:
            world.take()
    assert world.core.decisions.take_next_append() is None, "one append at a time"
    world.appended()
    append = world.core.decisions.take_next_append()
    assert append is not None
    assert len(append.records) == 2
    assert world.answers[20] is TxnState.COMMITTED
    assert 21 not in world.answers


def test_of_a_topic_whose_receipts_the_client_lost_nothing_is_committed() -> None:
    """It joined, and stored something of which the client was told nothing, or that it failed: the client did not count
    it, and a reader must not see it."""
    world = World()
    txn = world.begin(0)
    for request, topic in ((1, "a"), (2, "b")):
        world.ask(JoinTransaction(request, txn, topic))
    world.ask(EndTransaction(3, txn, TransactionEndVerb.COMMIT, "me", participants=(Participant("a", 2, 7, 1),)))
    world.flush()
    assert world.answers[3] is TxnState.COMMITTED
    assert sorted(each.participant for each in world.settling) == [Participant("a", 2, 7, 1), Participant("b", 0)]
    world.crash()
    assert sorted(each.participant for each in world.settling) == [Participant("a", 2, 7, 1), Participant("b", 0)]
