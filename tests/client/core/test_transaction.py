"""The core of a transaction against a model, over random walks: what is committed had every receipt, and ends once."""

import random
from contextlib import suppress
from threading import Lock, Thread

import pytest

from magnetar.client.common import errors
from magnetar.client.core import transaction
from magnetar.client.core.transaction import (
    AskToEndTransaction,
    ReportOperationsDone,
    ReportTransactionEnd,
    SendAllowance,
    TransactionCore,
    TransactionEndKind,
    TransactionPort,
    TransactionState,
)
from magnetar.proto import errors as wire_errors
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId, TxnState

TOPICS = ("a", "b", "c")


class Txn(TransactionPort):
    pass


def add(core: TransactionCore, topic: str, share: SendAllowance) -> bool:
    """As a producer does. False: the transaction is not open any more."""
    if not share.left and core.state is TransactionState.OPEN:
        core.allow_sends(topic, share)
    with share.lock:
        fits = share.left > 0
        share.left -= fits
    return fits


@pytest.mark.parametrize("seed", range(200))
def test_a_walk_ends_once_and_tells_all_receipts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(transaction, "ALLOWANCE_MESSAGES", rng.choice((1, 3, 10)))
    core = TransactionCore(TxnId(1, seed), Lock())
    shares = {topic: SendAllowance(Txn(), Lock()) for topic in TOPICS}
    receipts: dict[str, list[Position]] = {}
    waiting: list[tuple[str, bool]] = []
    failed, idle, ended, entry, asked = False, False, 0, 0, False
    wants_commit = rng.random() < 0.8
    for _ in range(60):
        effects = []
        draw = rng.random()
        if draw < 0.4 and core.state is TransactionState.OPEN:
            topic, message = rng.choice(TOPICS), rng.random() < 0.7
            if not message or rng.random() < 0.4:
                core.begin_operation(topic, message=message)
            else:
                assert add(core, topic, shares[topic])
            receipts.setdefault(topic, [])
            waiting.append((topic, message))
        elif draw < 0.85 and waiting:
            topic, message = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.03:
                failed = True
                refused = wire_errors.InvalidRequest("no")
                effects = core.on_refused(1, refused) if message else core.on_acknowledged(refused)
            elif rng.random() < 0.05:
                effects = core.cancel_operation(message=message)
            elif message:
                entry += 1
                receipts[topic].append(Position(1, entry))
                effects = core.on_stored(topic, 1, Position(1, entry))
            else:
                effects = core.on_acknowledged(None)
        elif draw > 0.97 and core.state is TransactionState.OPEN and wants_commit:
            asked, effects = True, core.commit()
        core.check()
        assert core.pending_operations == len(waiting)
        if core.state is not TransactionState.OPEN:
            assert not add(core, "a", shares["a"]), "what comes after the end was asked for is not in it"
        idle = idle or any(isinstance(each, ReportOperationsDone) for each in effects)
        assert not idle or not core.pending_operations
    if not asked and not wants_commit:
        effects = core.abort()
    else:
        effects = [] if asked else core.commit()
        while waiting:
            assert not idle or asked
            _, message = waiting.pop()
            effects += core.on_refused(1, wire_errors.TimedOut("late")) if message else core.on_acknowledged(None)
            failed = failed or message
        assert core.pending_operations == 0
        effects = core.decide_transaction_end()
    for effect in effects:
        if isinstance(effect, AskToEndTransaction):
            assert (effect.verb is TransactionEndKind.COMMIT) == (wants_commit and not failed)
            if effect.verb is TransactionEndKind.COMMIT:
                told = {each.topic: (each.entries, each.last) for each in effect.participants}
                wanted = {topic: (len(of), max(of, default=Position(-1, -1))) for topic, of in receipts.items()}
                assert told == wanted
            answer = TxnState.COMMITTED if effect.verb is TransactionEndKind.COMMIT else TxnState.ABORTED
            ended += sum(isinstance(each, ReportTransactionEnd) for each in core.on_answered(answer, None))
        ended += isinstance(effect, ReportTransactionEnd)
    assert ended == 1
    committed = core.state is TransactionState.COMMITTED
    assert committed == (wants_commit and not failed)
    if wants_commit and failed:
        assert isinstance(core.error, errors.TransactionAborted)
    core.check()
    with pytest.raises(errors.TransactionEnded):
        core.begin_operation("a", message=True)


def test_producers_share_the_messages_that_a_transaction_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "TRANSACTION_MESSAGES_MAX", 20)
    monkeypatch.setattr(transaction, "ALLOWANCE_MESSAGES", 8)
    core = TransactionCore(TxnId(0, 1), Lock())
    some = {topic: SendAllowance(Txn(), Lock()) for topic in TOPICS}
    for topic in TOPICS:  # each is allowed more than it sends
        for _ in range(2):
            assert add(core, topic, some[topic])
    core.begin_operation("d", message=True)
    for _ in range(12):
        assert add(core, "b", some["b"])
    assert core.message_count == 19
    assert add(core, "c", some["c"])
    for topic in TOPICS:
        with pytest.raises(errors.MessageTooBig, match="20 messages"):
            add(core, topic, some[topic])
    with pytest.raises(errors.MessageTooBig):
        core.begin_operation("d", message=True)
    assert not core.try_begin_operation(message=True)
    assert core.try_begin_operation(message=False)
    assert (core.message_count, core.pending_operations) == (20, 21)


def test_threads_that_send_while_it_ends_are_in_it_or_are_refused() -> None:
    for _ in range(50):
        core = TransactionCore(TxnId(0, 1), Lock())
        shares = [SendAllowance(Txn(), Lock()) for _ in range(3)]
        sent = [0] * len(shares)

        def send(number: int, core: TransactionCore, share: SendAllowance, sent: list[int]) -> None:
            with suppress(errors.TransactionEnded):
                while add(core, str(number), share):
                    sent[number] += 1

        threads = [Thread(target=send, args=(number, core, share, sent)) for number, share in enumerate(shares)]
        for each in threads:
            each.start()
        core.commit()
        counted = core.pending_operations
        for each in threads:
            each.join()
        assert core.pending_operations == counted == sum(sent)


def test_a_receipt_without_a_place_makes_every_entry_of_the_topic_count() -> None:
    core = TransactionCore(TxnId(0, 1), Lock())
    for position in (Position(1, 5), Position(-1, -1), Position(1, 7)):
        core.begin_operation("a", message=True)
        core.on_stored("a", 1, position)
    core.commit()
    [end] = core.decide_transaction_end()
    assert isinstance(end, AskToEndTransaction)
    assert [(each.topic, each.entries, each.last.entry_id) for each in end.participants] == [("a", -1, -1)]


@pytest.mark.parametrize(
    ("answer", "error", "state", "family"),
    [
        (TxnState.ABORTED, None, TransactionState.ABORTED, errors.TransactionAborted),
        (TxnState.OPEN, None, TransactionState.ERROR, errors.OutcomeUnknown),
        (TxnState.OPEN, wire_errors.TransactionAborted("x"), TransactionState.ABORTED, errors.TransactionAborted),
        (TxnState.OPEN, wire_errors.TransactionFenced("x"), TransactionState.ABORTED, errors.TransactionFenced),
        (TxnState.OPEN, wire_errors.TransactionForgotten("x"), TransactionState.ERROR, errors.TransactionForgotten),
        (TxnState.OPEN, wire_errors.Unavailable("x"), TransactionState.ERROR, errors.OutcomeUnknown),
    ],
)  # fmt: skip
def test_what_a_commit_is_answered(
    answer: TxnState, error: wire_errors.MagnetarError | None, state: TransactionState, family: type
) -> None:
    core = TransactionCore(TxnId(0, 1), Lock())
    core.begin_operation("a", message=True)
    core.on_stored("a", 1, Position(1, 1))
    assert core.commit() == [ReportOperationsDone()]
    core.decide_transaction_end()
    core.on_answered(answer, error)
    assert core.state is state
    assert type(core.error) is family
