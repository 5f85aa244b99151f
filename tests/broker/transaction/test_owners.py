"""Whose a transaction, a name, a sink and a half is: another role changes nothing of it, and learns nothing of it.

A role that asks about what another role has gets, word for word, the answer for an id that was never given. So each
test compares with such an id. Names and sinks are of a role: two roles use one word for two things.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from magnetar.broker.transaction.halves_core import CHECKING_MEMBERS_MAX
from magnetar.broker.transaction.intents_core import (
    BeginAnswer,
    BeginTransactions,
    CommitSinkBatch,
    CoordinatorIntent,
    CoordinatorLimits,
    EndHalf,
    EndTransaction,
    GetTransactionStatus,
    HalfMessageEndVerb,
    JoinTransaction,
    PrepareHalf,
    TransactionEndVerb,
    WatchHalves,
)
from magnetar.broker.transaction.records_core import (
    AnyCoordinatorRecord,
    HalfMessage,
    NameHolderChanged,
    SettledOutcomesInSnapshot,
    SinkBatch,
    SinkBatchRecorded,
    SinkBatchTag,
    TransactionOwner,
    TransactionPrepared,
    TransactionsCommitted,
    make_commit_record,
)
from magnetar.broker.transaction.state_core import CoordinatorState
from magnetar.proto.errors import BackPressure, InvalidRequest, MagnetarError, SinkFenced, TransactionFenced
from magnetar.proto.states import COUNTER_BITS, TxnState
from tests.broker.transaction.half_world import HALF_LIMITS, HalfWorld
from tests.broker.transaction.judge import World


def answer(world: World, make: Callable[[int], CoordinatorIntent]) -> object:
    request = 10_000 + len(world.asked)
    world.ask(make(request))
    world.flush()
    return world.answers.get(request)


def said(error: object, txn: int) -> tuple[object, str]:
    """What an answer tells, without the id that was asked for."""
    assert isinstance(error, MagnetarError), f"{error} is no refusal"
    return type(error), str(error).replace(str(txn), "ID")


def status(world: World, txn: int, owner: str | None = "me") -> object:
    return answer(world, lambda to: GetTransactionStatus(to, txn, owner))


def is_missing(world: World, txn: int, owner: str = "you") -> None:
    """The role is told of it, by every question, what it is told of an id that was never given."""
    questions: list[Callable[..., CoordinatorIntent]] = [
        lambda to, txn: GetTransactionStatus(to, txn, owner),
        *(lambda to, txn, verb=verb: EndTransaction(to, txn, verb, owner) for verb in TransactionEndVerb),
        lambda to, txn: CommitSinkBatch(to, owner, {txn: ()}),
        lambda to, txn: CommitSinkBatch(to, owner, {txn: ()}, "sink", "q", 3),
        lambda to, txn: JoinTransaction(to, txn, "stranger's", owner),
        *(lambda to, txn, verb=verb: EndHalf(to, txn, verb, owner) for verb in HalfMessageEndVerb),
        lambda to, txn: PrepareHalf(to, txn, owner, "g", "", [HalfMessage("a", b"x")]),
    ]
    for make in questions:
        never = world.core.table.next_id + 999
        found, missing = (answer(world, partial(make, txn=each)) for each in (txn, never))
        assert said(found, txn) == said(missing, never)


def test_what_another_role_has_is_missing_in_every_state() -> None:
    world = World()
    unused, opened, prepared, done, ending, aborted = (world.begin(number) for number in range(6))
    for number, txn in enumerate((opened, prepared, done, ending, aborted), 10):
        world.ask(JoinTransaction(number, txn, "a"))
    for number, (txn, verb) in enumerate(
        ((prepared, TransactionEndVerb.PREPARE), (ending, TransactionEndVerb.COMMIT)), 20
    ):
        world.ask(EndTransaction(number, txn, verb, "me"))
    world.flush()
    world.ask(EndTransaction(30, done, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    while any(each.txn == done for each in world.settling):
        world.settle(next(number for number, each in enumerate(world.settling) if each.txn == done))
    world.core.decisions.append_deferred_records_next()
    world.flush()
    world.ask(EndTransaction(31, aborted, TransactionEndVerb.ABORT, "me"))
    for txn in (unused, opened, prepared, done, ending, aborted):
        is_missing(world, txn)
    assert not any(each.participant.topic == "stranger's" for each in world.settling)
    found = {txn: status(world, txn) for txn in (unused, opened, prepared, done, ending, aborted)}
    assert list(found.values()) == [
        TxnState.OPEN, TxnState.OPEN, TxnState.PREPARED, TxnState.COMMITTED, TxnState.COMMITTED, TxnState.ABORTED,
    ], "its owner is told"  # fmt: skip
    assert status(world, done, None) is TxnState.COMMITTED, "a broker and an operator are told"
    world.hand_over()
    for txn in (opened, prepared, done, ending):
        is_missing(world, txn)
    world.crash()
    world.flush()
    for txn in (prepared, done, ending):
        is_missing(world, txn)
    assert status(world, done) is TxnState.COMMITTED, "its owner, whatever was taken over"
    assert status(world, ending) is TxnState.COMMITTED


def test_a_question_of_another_role_begins_the_time_of_no_id() -> None:
    world = World()
    txn = world.begin(0)
    is_missing(world, txn)
    assert not world.core.statistics()["open"]


def test_what_was_aborted_while_it_was_prepared_is_missing_until_its_topics_have_stored_it() -> None:
    world = World()
    txn = world.begin(0)
    world.ask(JoinTransaction(1, txn, "a"))
    for request, verb in ((2, TransactionEndVerb.PREPARE), (3, TransactionEndVerb.ABORT)):
        world.ask(EndTransaction(request, txn, verb, "me"))
        world.flush()
    is_missing(world, txn)
    world.crash()
    is_missing(world, txn)
    assert status(world, txn) is TxnState.ABORTED


def test_two_roles_use_one_name_and_neither_fences_the_other() -> None:
    world = World()
    mine = world.begin(0, name="app")
    world.flush()
    found = world.answers[0]
    assert isinstance(found, BeginAnswer)
    mine = found.first
    world.ask(JoinTransaction(1, mine, "a"))
    assert isinstance(answer(world, lambda to: BeginTransactions(to, "you", name="app")), BeginAnswer)
    assert status(world, mine) is TxnState.OPEN, "a begin of another role fences nothing"
    assert isinstance(
        answer(world, lambda to: BeginTransactions(to, "you", name="app", holder=found.holder)), TransactionFenced
    ), "a number of a holder is of its role"
    world.crash()
    assert isinstance(
        answer(world, lambda to: BeginTransactions(to, "me", name="app", holder=found.holder)), BeginAnswer
    )


def test_two_roles_use_one_sink_and_the_batches_of_one_count_for_it_alone() -> None:
    world = World()
    mine = world.begin(0, tag=SinkBatchTag("sink", "q", 7))
    world.ask(JoinTransaction(1, mine, "a"))
    assert answer(world, lambda to: CommitSinkBatch(to, "you", {}, "sink", "q", 1 << 40)) is False
    assert status(world, mine) is TxnState.OPEN, "and what the other role has open is not ended"
    assert answer(world, lambda to: CommitSinkBatch(to, "me", {mine: ()}, "sink", "q", 7)) is False, "it is no repeat"
    assert world.core.table.find_sink_batch("sink", "me") == SinkBatch("sink", "q", 7, "me")
    assert world.core.table.find_sink_batch("sink", "third") is None
    world.crash()
    assert answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "q", 7)) is True
    assert answer(world, lambda to: CommitSinkBatch(to, "third", {}, "sink", "other", 0)) is False


def test_a_batch_has_a_number() -> None:
    world = World()
    assert isinstance(answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "q", -1)), InvalidRequest)
    assert isinstance(
        answer(world, lambda to: BeginTransactions(to, "me", tag=SinkBatchTag("sink", "q", -1))), InvalidRequest
    )


def test_a_role_has_a_share_of_the_names_and_the_sinks() -> None:
    world = World(CoordinatorLimits(names_max=10, names_per_role_max=3, sinks_max=10, sinks_per_role_max=3))

    def begin(owner: str, name: str) -> object:
        return answer(world, lambda to: BeginTransactions(to, owner, name=name))

    def batch(owner: str, sink: str) -> object:
        return answer(world, lambda to: CommitSinkBatch(to, owner, {}, sink, "q", 0))

    for number in range(3):
        assert isinstance(begin("you", f"n{number}"), BeginAnswer)
        assert batch("you", f"s{number}") is False
    assert isinstance(begin("you", "n3"), BackPressure)
    assert isinstance(batch("you", "s3"), BackPressure)
    assert isinstance(begin("you", "n0"), BeginAnswer), "what it has goes on"
    assert isinstance(begin("me", "n0"), BeginAnswer)
    assert batch("me", "s0") is False
    for number in range(5):
        assert batch("", f"s{number}") is False, "of callers without roles there is one bound for all"


def test_a_role_has_a_share_of_the_halves_and_of_those_who_are_asked() -> None:
    world = HalfWorld(msgspec.structs.replace(HALF_LIMITS, bytes_max=4_000))
    entry = b"x" * 400

    def prepare(owner: str) -> object:
        half = world.begin(world.number(), owner=owner)
        messages = [HalfMessage("a", entry)]
        return answer(world, lambda to: PrepareHalf(to, half, owner, f"g{half}", "", messages))

    assert [prepare("you") for _ in range(2)] == [TxnState.PREPARED] * 2
    assert isinstance(prepare("you"), BackPressure), "a quarter of the bytes, by however many groups"
    assert prepare("me") is TxnState.PREPARED
    for number in range(CHECKING_MEMBERS_MAX // 4):
        world.core.halves.receive(WatchHalves(object(), number, "you", f"g{number}"), world.now)
    with pytest.raises(BackPressure):
        world.core.halves.receive(WatchHalves(object(), "more", "you", "g"), world.now)
    world.core.halves.receive(WatchHalves(object(), "mine", "me", "g"), world.now)
    world.core.halves.remove_member(0, world.now)
    world.core.halves.receive(WatchHalves(object(), "more", "you", "g"), world.now)
    world.core.decisions.take_effects()


def test_a_half_of_another_role_is_missing_also_when_it_has_ended_and_after_a_take_over() -> None:
    world = HalfWorld()
    halves = [world.prepare() for _ in range(3)]
    world.flush()
    for half, verb in zip(halves[1:], (HalfMessageEndVerb.COMMIT, HalfMessageEndVerb.ROLLBACK), strict=True):
        world.end_half(half, verb)
        world.publish()
        world.flush()
    for _ in range(2):
        for half in halves:
            is_missing(world, half)
        found = [status(world, half) for half in halves]
        assert found == [TxnState.PREPARED, TxnState.COMMITTED, TxnState.ABORTED]
        world.crash()


def test_a_sink_that_was_idle_for_long_is_forgotten_also_over_take_overs() -> None:
    world = World(CoordinatorLimits(sink_idle_s=1000.0, name_idle_s=1000.0, lease_s=100.0))
    for owner in ("me", "you"):
        assert answer(world, lambda to, owner=owner: CommitSinkBatch(to, owner, {}, "sink", "q", 3)) is False  # type: ignore[misc]
        assert isinstance(answer(world, lambda to, owner=owner: BeginTransactions(to, owner, name="app")), BeginAnswer)  # type: ignore[misc]
    for _ in range(6):
        world.tick(300.0)
        world.flush()
        assert answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "q", 3)) is True, "what is used stays"
        world.hand_over()
    assert world.core.table.find_sink_batch("sink", "you") is None
    assert world.core.state.names.find("you", "app") is None
    assert answer(world, lambda to: CommitSinkBatch(to, "you", {}, "sink", "other", 0)) is False
    world.crash()
    assert world.core.table.find_sink_batch("sink", "me") is not None


def test_ids_have_gaps_by_chance_and_a_block_has_none() -> None:
    gaps = iter([3, 0, 70_000])
    world = World(gap=lambda: next(gaps))
    start = 1 << COUNTER_BITS
    assert [world.begin(number, count=10) for number in range(3)] == [start + 3, start + 13, start + 70_023]


class OldSinkBatch(msgspec.Struct, frozen=True, array_like=True):
    sink_id: str
    query_id: str
    batch: int


class OldKept(msgspec.Struct, frozen=True, array_like=True, tag=10):
    high: int
    committed: bytes


class OldSinkKept(msgspec.Struct, frozen=True, array_like=True, tag=12):
    sink: OldSinkBatch


class OldNamed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    name: str
    holder: int
    idle_s: float = 0.0


class OldUnnamed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    names: list[str]


def test_the_version_before_reads_what_is_written_now() -> None:
    """What it knows nothing of comes after what it reads."""
    state = CoordinatorState()
    for txn, owner in ((1, "me"), (2, "you"), (3, "")):
        state.apply(make_commit_record({txn: []}, SinkBatch("sink", "q", txn, owner), owner=owner))
    state.apply(NameHolderChanged("app", 4, 0.0, "me"))
    old = msgspec.json.Decoder(OldKept | OldSinkKept | OldNamed)
    read = [
        old.decode(msgspec.json.encode(each)) for each in state.snapshot() if isinstance(each,
        SettledOutcomesInSnapshot | SinkBatchRecorded | NameHolderChanged)
    ]
    kept = [each for each in read if isinstance(each, OldKept)]
    again = CoordinatorState()
    again.apply(SettledOutcomesInSnapshot(kept[0].high, kept[0].committed))
    assert len(kept) == 1
    assert [again.is_committed(txn) for txn in (1, 2, 3)] == [True, True, True], "of all roles"
    assert OldNamed("app", 4) in read


def test_what_the_version_before_wrote_is_of_no_role_and_each_role_goes_on_with_it() -> None:
    world = World()
    before: list[AnyCoordinatorRecord] = [
        TransactionsCommitted([(5, [])], [], SinkBatch("sink", "q", 3)), NameHolderChanged("app", 1),
        TransactionPrepared(6, TransactionOwner("me", 60.0), [], 100.0),
    ]  # fmt: skip
    world.log = before
    world.judge.committed.add(5)
    world._next_epoch()
    assert status(world, 5) is TxnState.COMMITTED, "whose it is was not written: nobody is told a falsehood"
    assert answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "q", 3)) is True, "a batch is not done again"
    assert isinstance(answer(world, lambda to: BeginTransactions(to, "me", name="app", holder=1)), BeginAnswer)
    assert isinstance(answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "other", 0)), SinkFenced)
    assert answer(world, lambda to: CommitSinkBatch(to, "you", {}, "sink", "q", 1 << 40)) is False
    assert answer(world, lambda to: CommitSinkBatch(to, "me", {}, "sink", "q", 4)) is False, "the other has its own"
    assert status(world, 6) is TxnState.PREPARED
    assert isinstance(status(world, 6, "you"), InvalidRequest)
