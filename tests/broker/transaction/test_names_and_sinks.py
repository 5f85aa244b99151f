"""Names that fence, batches of sinks that are committed once, bounds, and ids that come to their end."""

from magnetar.broker.transaction.begins_core import IDS_PER_BLOCK_MAX
from magnetar.broker.transaction.intents_core import (
    BeginAnswer,
    BeginTransactions,
    CommitSinkBatch,
    CoordinatorLimits,
    EndTransaction,
    GetTransactionStatus,
    JoinTransaction,
    TransactionEndVerb,
)
from magnetar.broker.transaction.records_core import SinkBatchTag
from magnetar.broker.transaction.state_core import COUNTER_MAX, EPOCH_MAX
from magnetar.proto.errors import (
    BackPressure,
    InvalidRequest,
    NotOwner,
    SinkFenced,
    TransactionAborted,
    TransactionEnded,
    TransactionFenced,
    Unavailable,
)
from magnetar.proto.states import COUNTER_BITS, TxnState
from tests.broker.transaction.judge import World


def named(world: World, request: int, **options: object) -> int:
    world.begin(request, name="app", **options)
    world.flush()
    found = world.answers[request]
    assert isinstance(found, BeginAnswer)
    return found.first


def test_a_later_holder_fences_the_one_before_whatever_it_has_open() -> None:
    world = World()
    old, prepared = named(world, 0, count=3), 0
    prepared = old + 1
    for request, txn in ((1, old), (2, prepared)):
        world.ask(JoinTransaction(request, txn, "a"))
    world.ask(EndTransaction(3, prepared, TransactionEndVerb.PREPARE, "me"))
    world.flush()
    named(world, 4)
    for request, txn in ((5, old), (6, prepared), (7, old + 2)):
        world.ask(EndTransaction(request, txn, TransactionEndVerb.COMMIT, "me"))
        assert isinstance(world.answers[request], TransactionFenced)
    world.ask(BeginTransactions(8, "me", name="app", holder=1))
    assert isinstance(world.answers[8], TransactionFenced), "an older holder begins nothing"
    world.heal()
    assert set(world.judge.stored.values()) == {False}


def test_a_holder_begins_more_and_retries_its_begin_over_a_take_over() -> None:
    world = World()
    named(world, 0)
    world.begin(1, name="app", holder=1)
    assert isinstance(world.answers[1], BeginAnswer), "the same holder goes on"
    world.begin(2, name="app")
    world.take()
    world.crash(lands=1)
    txn = named(world, 3)
    world.ask(JoinTransaction(4, txn, "a"))
    world.ask(EndTransaction(5, txn, TransactionEndVerb.COMMIT, "me"))
    world.flush()
    assert world.answers[5] is TxnState.COMMITTED, "its own begin of unknown outcome does not fence it"


def batch(world: World, request: int, number: int, *txns: int, query: str = "q", adopt: bool = False) -> object:
    world.ask(CommitSinkBatch(request, "me", dict.fromkeys(txns, ()), "sink", query, number, adopt))
    world.flush()
    return world.answers[request]


def test_each_batch_of_a_sink_is_committed_once_and_its_other_attempts_are_aborted() -> None:
    world = World()
    first, twin = (
        world.begin(0, tag=SinkBatchTag("sink", "q", 0, "run 1")),
        world.begin(1, tag=SinkBatchTag("sink", "q", 0, "run 2")),
    )
    for request, txn in ((2, first), (3, twin)):
        world.ask(JoinTransaction(request, txn, "a"))
    world.ask(EndTransaction(4, first, TransactionEndVerb.COMMIT, "me"))
    assert isinstance(world.answers[4], InvalidRequest), "it commits with its batch alone"
    assert batch(world, 5, 0, first) is False
    assert batch(world, 6, 0, twin) is True, "the sink has it already"
    world.ask(GetTransactionStatus(7, twin))
    assert world.answers[7] is TxnState.ABORTED
    world.ask(BeginTransactions(8, "me", tag=SinkBatchTag("sink", "q", 0, "run 3")))
    assert world.answers[8] == BeginAnswer(0, 0, 0.0, already=True)
    world.crash()
    assert batch(world, 9, 0, twin) is True, "a take-over forgets no batch"
    assert batch(world, 10, 1) is False, "a batch may be empty"
    world.ask(BeginTransactions(11, "me", tag=SinkBatchTag("sink", "other", 0)))
    assert isinstance(world.answers[11], SinkFenced)
    assert isinstance(batch(world, 12, 0, query="other"), SinkFenced)
    assert batch(world, 13, 0, query="other", adopt=True) is False


def test_the_commit_of_a_batch_ends_what_was_begun_for_it_and_nothing_of_a_later_one() -> None:
    """A newer run may be at work on the batch after it."""
    world = World()
    first, twin = (
        world.begin(0, tag=SinkBatchTag("sink", "q", 0, "run 1")),
        world.begin(1, tag=SinkBatchTag("sink", "q", 0, "run 2")),
    )
    later = world.begin(2, tag=SinkBatchTag("sink", "q", 1, "run 3"))
    other = world.begin(3, tag=SinkBatchTag("other sink", "q", 0, "run 4"))
    for request, txn in enumerate((first, twin, later, other), 4):
        world.ask(JoinTransaction(request, txn, "a"))
    assert batch(world, 8, 0, first) is False
    for request, (txn, state) in enumerate(
        ((first, TxnState.COMMITTED), (twin, TxnState.ABORTED), (later, TxnState.OPEN), (other, TxnState.OPEN)), 9
    ):
        world.ask(GetTransactionStatus(request, txn))
        assert world.answers[request] is state
    assert batch(world, 13, 1, later) is False


def test_who_adopts_a_sink_ends_what_the_query_before_has_left() -> None:
    world = World()
    left = world.begin(0, tag=SinkBatchTag("sink", "q", 5, "run 1"))
    world.ask(JoinTransaction(1, left, "a"))
    assert batch(world, 2, 4) is False
    world.ask(EndTransaction(3, left, TransactionEndVerb.PREPARE, "me"))
    world.flush()
    assert world.answers[3] is TxnState.PREPARED
    assert batch(world, 4, 0, query="other", adopt=True) is False
    world.flush()
    world.ask(GetTransactionStatus(5, left))
    assert world.answers[5] is TxnState.ABORTED, "readers do not wait for it"


def test_a_batch_commits_whole_or_not_at_all() -> None:
    world = World()
    one, two = world.begin(0), world.begin(1)
    for request, txn in ((2, one), (3, two)):
        world.ask(JoinTransaction(request, txn, "a"))
    world.ask(EndTransaction(4, two, TransactionEndVerb.ABORT, "me"))
    world.ask(CommitSinkBatch(5, "me", {one: (), two: ()}))
    assert isinstance(world.answers[5], TransactionAborted)
    world.ask(GetTransactionStatus(6, one))
    assert world.answers[6] is TxnState.OPEN
    world.ask(CommitSinkBatch(7, "me", {one: ()}))
    world.flush()
    world.ask(CommitSinkBatch(8, "me", {one: ()}))
    assert (world.answers[7], world.answers[8]) == (False, False), "what is repeated gets the same answer"
    world.ask(CommitSinkBatch(9, "me", {one: (), world.begin(10): ()}))
    assert isinstance(world.answers[9], TransactionEnded)


def test_two_requests_for_one_batch_at_once_make_one_record() -> None:
    world = World()
    first, second = (world.begin(request, tag=SinkBatchTag("sink", "q", 0)) for request in (0, 1))
    for request, txn in ((2, first), (3, second)):
        world.ask(JoinTransaction(request, txn, "a"))
    for request, txn in ((4, first), (5, second)):
        world.ask(CommitSinkBatch(request, "me", {txn: ()}, "sink", "q", 0))
    world.flush()
    assert (world.answers[4], world.answers[5]) == (False, True)


def test_another_role_ends_nothing() -> None:
    world = World()
    txn = world.begin(0)
    for request, verb in enumerate(TransactionEndVerb, 1):
        world.ask(EndTransaction(request, txn, verb, "other"))
        assert isinstance(world.answers[request], InvalidRequest)


def test_past_a_bound_a_begin_is_refused_and_nothing_is_dropped() -> None:
    world = World(CoordinatorLimits(open_max=5, open_per_role_max=3))
    for request in range(3):
        world.ask(BeginTransactions(request, "me", 10))
        assert world.answers[request] == BeginAnswer((1 << COUNTER_BITS) + request, 1, 600.0), "fewer than asked"
    world.ask(BeginTransactions(3, "me"))
    assert isinstance(world.answers[3], BackPressure)
    for request in (4, 5):
        world.ask(BeginTransactions(request, "other", 10))
    world.ask(BeginTransactions(6, "third"))
    assert isinstance(world.answers[6], BackPressure)
    world.ask(GetTransactionStatus(7, 1 << COUNTER_BITS))
    assert world.answers[7] is TxnState.OPEN
    world.tick(601.0)
    assert world.begin(8) > 0, "ids that were not used are void"
    world.ask(BeginTransactions(9, "me", timeout_s=901.0))
    assert isinstance(world.answers[9], InvalidRequest)


def test_who_takes_ids_and_uses_none_leaves_room_for_the_others() -> None:
    world, sizes = World(CoordinatorLimits()), list[int]()
    for request in range(300):
        world.ask(BeginTransactions(request, "greedy", 1024))
        begun = world.answers[request]
        assert isinstance(begun, BeginAnswer)
        sizes.append(begun.ids)
    assert IDS_PER_BLOCK_MAX >= sizes[0] > 500
    assert sizes == sorted(sizes, reverse=True)
    world.ask(BeginTransactions(300, "other", 8))
    begun = world.answers[300]
    assert isinstance(begun, BeginAnswer)
    assert begun.ids == 8


def test_a_stray_is_ended_under_its_own_id() -> None:
    world = World()
    stray, other = world.begin(0), world.begin(1)
    for request, txn in ((2, stray), (3, other)):
        world.ask(JoinTransaction(request, txn, "a"))
    world.ask(EndTransaction(4, stray, TransactionEndVerb.ABORT, "me"))
    world.ask(JoinTransaction(5, stray, "b"))
    assert world.answers[5] is TxnState.ABORTED, "a late send is refused"
    world.ask(JoinTransaction(6, other, "b"))
    assert world.answers[6] is TxnState.OPEN
    assert {each.txn for each in world.settling} == {stray}


def test_a_coordinator_whose_ids_are_used_up_takes_a_new_epoch_and_loses_nothing() -> None:
    world = World()
    txn = world.begin(0)
    world.core.table.next_id = (1 << COUNTER_BITS) + COUNTER_MAX
    assert world.begin(1) == (1 << COUNTER_BITS) + COUNTER_MAX, "the last id"
    world.ask(BeginTransactions(2, "me"))
    assert isinstance(world.answers[2], NotOwner)
    assert world.gave_up
    world.hand_over()
    assert world.begin(3) == 2 << COUNTER_BITS
    world.ask(GetTransactionStatus(4, txn))
    assert world.answers[4] is TxnState.OPEN
    world.epoch = EPOCH_MAX - 1
    world.hand_over()
    world.core.table.next_id = (EPOCH_MAX << COUNTER_BITS) + COUNTER_MAX + 1
    world.ask(BeginTransactions(5, "me"))
    assert isinstance(world.answers[5], Unavailable)
    assert not world.gave_up, "there is no epoch after it"


def test_names_that_were_idle_for_long_are_forgotten_and_no_holder_number_comes_back() -> None:
    world = World(CoordinatorLimits(name_idle_s=1000.0))
    named(world, 0)
    for _ in range(3):
        world.tick(700.0)
        world.flush()
    assert not len(world.core.state.names)
    world.begin(1, name="app")
    world.flush()
    found = world.answers[1]
    assert isinstance(found, BeginAnswer)
    assert found.holder == 2
