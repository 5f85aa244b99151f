"""Half messages of one coordinator, rule by rule, in the world of tests/broker/transaction/half_world.py."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from magnetar.broker.transaction.halves_core import PUBLISH_RETRY_S
from magnetar.broker.transaction.intents_core import (
    ChangeHalf,
    GetTransactionStatus,
    HalfMessageChangeVerb,
    HalfMessageEndVerb,
    HalfMessagePhase,
    PrepareHalf,
)
from magnetar.broker.transaction.records_core import HalfMessage
from magnetar.broker.transaction.state_core import COUNTER_MAX, EPOCH_MAX
from magnetar.proto.errors import (
    BackPressure,
    HalfParked,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    TopicTerminated,
    TransactionAborted,
    TransactionEnded,
    TransactionForgotten,
    Unavailable,
)
from magnetar.proto.states import COUNTER_BITS, HALF_BYTES_MAX, HALF_MESSAGES_MAX, TxnState
from tests.broker.transaction.half_world import HALF_LIMITS, HalfWorld

COMMIT, ROLLBACK, UNKNOWN, FAILED = HalfMessageEndVerb
DAY = 86_400.0


def stored(world: HalfWorld, *topics: str, **options: object) -> int:
    half = world.prepare(*topics, **options)  # type: ignore[arg-type]
    world.flush()
    return half


def commit(world: HalfWorld, half: int) -> int:
    request = world.end_half(half, COMMIT)
    world.publish()
    world.flush()
    return request


def change(world: HalfWorld, half: int, verb: HalfMessageChangeVerb) -> int:
    request = world.number()
    world.ask(ChangeHalf(request, half, verb))
    return request


def status(world: HalfWorld, half: int) -> object:
    request = world.number()
    world.ask(GetTransactionStatus(request, half))
    return world.answers.get(request)


def phase(world: HalfWorld, half: int) -> HalfMessagePhase:
    return world.core.halves.list_half_message_rows(world.now, half, "", 1)[0].phase


# ---------------------------------------------------------------------------------- prepare, commit, roll back
def test_a_commit_shows_the_half_once_in_every_topic_and_is_answered_when_it_is_durable() -> None:
    world = HalfWorld()
    half = stored(world, "a", "b", "c")
    request = world.end_half(half, COMMIT)
    world.publish()
    assert request not in world.answers
    assert not world.visible(half)
    world.flush()
    assert world.answers[request] is TxnState.COMMITTED
    assert world.visible(half) == ["a", "b", "c"]
    assert status(world, half) is TxnState.COMMITTED


def test_a_rollback_of_what_was_never_stored_keeps_it_from_being_stored_later() -> None:
    world = HalfWorld()
    half = world.begin(world.number())
    assert world.answers[world.end_half(half, ROLLBACK)] is TxnState.ABORTED
    late = world.number()
    world.prepare(half=half, request=late)
    assert isinstance(world.answers[late], TransactionAborted)


def test_another_role_neither_ends_a_half_nor_is_asked_about_it() -> None:
    world = HalfWorld()
    half = stored(world)
    for verb in HalfMessageEndVerb:
        assert isinstance(world.answers[world.end_half(half, verb, owner="you")], InvalidRequest)
    world.watch("spy", owner="you")
    world.tick(1_000)
    assert not world.asks
    ids, stolen = world.begin(world.number(), owner="you"), world.number()
    world.ask(PrepareHalf(stolen, ids, "me", "g", "", [HalfMessage("a", b"x")]))
    assert isinstance(world.answers[stolen], InvalidRequest), "an id that another role was given"


# ---------------------------------------------------------------------------------- crashes
Step = Callable[[HalfWorld, int], object]
COMMIT_STEPS: tuple[Step, ...] = (
    lambda world, half: world.take(),
    lambda world, half: world.appended(),
    lambda world, half: world.end_half(half, COMMIT),
    lambda world, half: world.publish(upto=1),
    lambda world, half: world.tick(1.0),
    lambda world, half: world.publish(),
    lambda world, half: world.take(),
    lambda world, half: world.appended(),
    lambda world, half: world.settle(),
)


@pytest.mark.parametrize("lands", [0, 1])
@pytest.mark.parametrize("at", range(len(COMMIT_STEPS) + 1))
def test_a_crash_at_each_step_of_a_commit_leaves_it_visible_once_or_undecided(at: int, lands: int) -> None:
    world = HalfWorld()
    half = world.prepare("a", "b", "c")
    for number, step in enumerate(COMMIT_STEPS):
        if number == at:
            break
        step(world, half)
    world.crash(lands=lands)
    world.judge_halves()
    if half not in world.stored:
        assert not world.visible(half)
        return
    commit(world, half)
    assert sorted(world.visible(half)) == ["a", "b", "c"]
    world.crash()
    assert status(world, half) is TxnState.COMMITTED
    world.judge_halves()


def test_a_commit_in_doubt_is_not_answered() -> None:
    world = HalfWorld()
    half = stored(world)
    request = world.end_half(half, COMMIT)
    world.publish()
    world.take()
    asked = world.number()
    world.ask(GetTransactionStatus(asked, half))
    world.crash(lands=1)
    assert isinstance(world.answers[request], OutcomeUnknown)
    assert not isinstance(world.answers[asked], TxnState), "nor is its state"
    assert world.answers[world.end_half(half, COMMIT)] is TxnState.COMMITTED


def test_outcomes_survive_take_overs_until_their_retention_is_over() -> None:
    world = HalfWorld()
    yes, no = stored(world), stored(world)
    commit(world, yes)
    world.end_half(no, ROLLBACK)
    world.flush()
    world.crash()
    world.hand_over()
    world.tick(HALF_LIMITS.retention_s - 1)
    assert world.answers[world.end_half(yes, COMMIT)] is TxnState.COMMITTED
    assert world.answers[world.end_half(no, ROLLBACK)] is TxnState.ABORTED
    world.tick(HALF_LIMITS.retention_s)
    world.core.decisions.append_deferred_records_next()
    world.flush()
    for half in (yes, no):
        for verb in (COMMIT, ROLLBACK):
            assert isinstance(world.answers[world.end_half(half, verb)], TransactionForgotten), "no outcome is guessed"
        late = world.number()
        world.prepare(half=half, request=late)
        assert isinstance(world.answers[late], TransactionAborted), "and it is not stored again"


# ---------------------------------------------------------------------------------- checks
def test_a_silent_half_is_asked_about_after_its_time_and_then_with_pauses_that_double() -> None:
    world = HalfWorld()
    half = stored(world)
    world.watch("one")
    world.tick(HALF_LIMITS.check_after_s - 1)
    assert not world.asks
    pauses, last = [], world.now
    world.tick(1)
    for _ in range(8):
        asked = world.asks[-1]
        pauses.append(world.now - last)
        world.answer(asked, FAILED)
        last, count = world.now, len(world.asks)
        while len(world.asks) == count:
            world.tick(1)
            assert world.now - last < 1000, "it is asked about again"
    assert pauses == [1, 30, 60, 120, 240, 480, 600, 600]
    assert world.asks[0].check_key == f"key-{half}"
    assert world.asks[0].messages == world.stored[half].messages


def test_a_half_names_the_time_of_silence_itself() -> None:
    world = HalfWorld()
    stored(world, check_after_s=300)
    world.watch("one")
    world.tick(299)
    assert not world.asks
    world.tick(1)
    assert len(world.asks) == 1


def test_members_are_asked_in_turns_one_at_a_time() -> None:
    world = HalfWorld()
    stored(world)
    for member in ("one", "two", "three"):
        world.watch(member)
    world.tick(10)
    for _ in range(5):
        world.answer(world.asks[-1], UNKNOWN if len(world.asks) < 3 else FAILED)
        world.tick(600)
        world.flush()
    asked = [each.member for each in world.asks]
    assert len(asked) == 6
    assert all(before != after for before, after in pairwise(asked))
    assert set(asked) == {"one", "two", "three"}


def test_each_half_goes_to_another_member_than_the_last_time() -> None:
    world = HalfWorld()
    halves = [stored(world), stored(world)]
    world.watch("one")
    world.watch("two")
    world.tick(10)
    for asked in list(world.asks):
        world.answer(asked, FAILED)
    world.tick(600)
    for half in halves:
        assert {each.member for each in world.asks if each.half == half} == {"one", "two"}


def test_a_check_that_is_not_answered_goes_to_the_next_member_and_is_not_counted() -> None:
    world = HalfWorld()
    half = stored(world)
    world.watch("hangs")
    world.watch("answers")
    world.tick(10)
    world.tick(30)
    world.tick(30)
    assert [each.member for each in world.asks] == ["hangs", "answers"]
    assert world.asks[-1].unknown == 0
    request = world.answer(world.asks[-1], COMMIT)
    world.publish()
    world.flush()
    assert world.answers[request] is TxnState.COMMITTED
    assert world.visible(half) == ["a"]


def test_a_member_that_leaves_is_replaced_at_once_and_the_second_time_after_a_pause() -> None:
    world = HalfWorld()
    stored(world)
    for member in ("one", "two", "three"):
        world.watch(member)
    world.tick(10)
    world.remove_member(world.asks[-1].member)
    assert len(world.asks) == 2, "another one is asked"
    world.remove_member(world.asks[-1].member)
    assert len(world.asks) == 2, "a question that kills who is asked does not kill all of them at once"
    world.tick(60)
    assert len(world.asks) == 3


def test_while_no_member_is_connected_nothing_is_counted_and_the_first_one_is_asked() -> None:
    world = HalfWorld()
    half = stored(world)
    for _ in range(100):
        world.tick(600)
    assert not world.asks
    assert phase(world, half) is HalfMessagePhase.WAITING
    world.watch("back")
    assert [each.half for each in world.asks] == [half]
    assert world.asks[0].unknown == 0


def test_an_unknown_counts_once_however_often_and_late_it_comes() -> None:
    world = HalfWorld()
    half = stored(world)
    world.watch("one")
    world.tick(10)
    first = world.asks[-1]
    for _ in range(9):
        world.end_half(half, UNKNOWN, check=first.check)
    world.flush()
    world.tick(600)
    second = world.asks[-1]
    assert second.unknown == 1
    world.end_half(half, UNKNOWN, check=first.check)
    assert phase(world, half) is HalfMessagePhase.ASKED, "a late answer to another question changes nothing"
    world.crash()
    world.watch("one")
    world.tick(10)
    world.end_half(half, UNKNOWN, check=second.check)
    assert phase(world, half) is HalfMessagePhase.ASKED, "nor one to a question of an earlier epoch"
    assert world.asks[-1].unknown == 1


def test_many_halves_are_asked_about_as_fast_as_they_are_answered() -> None:
    world = HalfWorld(replace(HALF_LIMITS, group_max=10_000, bytes_max=1 << 30))
    for _ in range(200):
        world.prepare()
    world.flush()
    world.watch("one")
    world.watch("two")
    world.tick(10)
    assert len(world.open_asks) == 32, "so many at a time"
    while world.open_asks:
        world.answer(next(iter(world.open_asks.values())), ROLLBACK)
        if len(world.open_asks) < 8:
            world.flush()
    world.flush()
    assert len(world.outcome) == 200


# ---------------------------------------------------------------------------------- parked
def parked(world: HalfWorld) -> int:
    """By as many answers of UNKNOWN as park it, with a take-over after each."""
    half = stored(world)
    for number in range(HALF_LIMITS.unknown_max):
        world.watch(f"member {number}")
        world.tick(10)
        assert world.asks[-1].unknown == number, "the count survives a take-over"
        world.answer(world.asks[-1], UNKNOWN)
        world.flush()
        world.crash()
    return half


def test_so_many_unknowns_park_a_half_also_over_take_overs_and_no_clock_drops_it() -> None:
    world = HalfWorld()
    half = parked(world)
    world.watch("one")
    for _ in range(30):
        world.tick(DAY)
    assert not world.asks, "it is not asked about any more"
    assert world.alarms == [half], "an operator is told, once"
    row = world.core.halves.list_half_message_rows(world.now, half, "", 1)[0]
    assert row.phase is HalfMessagePhase.PARKED
    assert "UNKNOWN" in row.reason
    assert half not in world.outcome, "parked, and neither committed nor rolled back"
    world.hand_over()
    assert phase(world, half) is HalfMessagePhase.PARKED


def test_a_parked_half_takes_the_decision_of_an_operator_alone() -> None:
    world = HalfWorld()
    half = parked(world)
    for verb in (COMMIT, ROLLBACK):
        refused = world.answers[world.end_half(half, verb)]
        assert isinstance(refused, HalfParked)
        assert "UNKNOWN" in refused.fields["reason"]
    request = change(world, half, HalfMessageChangeVerb.COMMIT)
    world.publish()
    world.flush()
    assert world.answers[request] is None
    assert world.visible(half) == ["a"]
    other = parked(world)
    request = change(world, other, HalfMessageChangeVerb.ROLLBACK)
    world.flush()
    assert world.answers[request] is None
    assert status(world, other) is TxnState.ABORTED
    assert isinstance(world.answers[change(world, other, HalfMessageChangeVerb.COMMIT)], TransactionEnded)
    assert isinstance(world.answers[change(world, world.begin(world.number()), HalfMessageChangeVerb.PARK)], NotFound)


def test_a_revived_half_is_asked_about_at_once_and_counts_anew() -> None:
    world = HalfWorld()
    half = parked(world)
    world.watch("one")
    request = change(world, half, HalfMessageChangeVerb.REVIVE)
    assert request not in world.answers
    world.flush()
    assert world.answers[request] is None
    assert [(each.half, each.unknown) for each in world.asks] == [(half, 0)]
    world.crash()
    assert phase(world, half) is HalfMessagePhase.WAITING


def test_an_operator_parks_revives_and_asks_now() -> None:
    world = HalfWorld()
    half = stored(world)
    world.watch("one")
    request = change(world, half, HalfMessageChangeVerb.REVIVE)
    assert world.answers[request] is None
    assert len(world.asks) == 1, "it is asked about now"
    world.open_asks.clear()
    request = change(world, half, HalfMessageChangeVerb.PARK)
    world.flush()
    assert world.answers[request] is None
    world.end_half(half, UNKNOWN, check=world.asks[-1].check)
    world.tick(DAY)
    assert len(world.asks) == 1
    assert phase(world, half) is HalfMessagePhase.PARKED


def test_what_is_not_decided_for_a_day_is_parked_whatever_is_taken_over_in_between() -> None:
    world = HalfWorld()
    half = stored(world)
    for hour in range(23):
        world.tick(3600.0)
        world.flush()
        assert phase(world, half) is HalfMessagePhase.WAITING, f"after {hour + 1} hours"
        (world.hand_over if hour % 2 else world.crash)()
    for _ in range(3):
        world.tick(3600.0)
        world.flush()
    assert phase(world, half) is HalfMessagePhase.PARKED
    assert "not decided within" in world.core.halves.list_half_message_rows(world.now, half, "", 1)[0].reason


# ---------------------------------------------------------------------------------- what cannot be published
def test_an_error_that_passes_is_tried_again_and_nothing_of_the_first_try_counts() -> None:
    world = HalfWorld()
    half = stored(world, "a", "b", "c")
    request = world.end_half(half, COMMIT)
    for upto in (0, 1, 2):
        world.publish(upto=upto)
        world.tick(5)
    world.publish()
    world.flush()
    assert world.answers[request] is TxnState.COMMITTED
    assert sorted(world.visible(half)) == ["a", "b", "c"]
    assert len(world.log_of) == 6, "three entries are hidden for good"
    told = {(each.txn, each.committed) for each in world.settling}
    assert [committed for _, committed in sorted(told)] == [False, False, True], "and no reader waits for them"


def test_a_commit_that_cannot_be_published_in_time_is_answered_and_asked_about_later() -> None:
    world = HalfWorld()
    half = stored(world)
    world.watch("one")
    request = world.end_half(half, COMMIT)
    for _ in range(int(PUBLISH_RETRY_S)):
        if world.publishing:
            world.not_published(world.publishing[0], Unavailable("no bookies"))
        world.tick(2)
        if request in world.answers:
            break
    assert isinstance(world.answers[request], Unavailable)
    assert phase(world, half) is HalfMessagePhase.WAITING
    world.tick(600)
    request = world.answer(world.asks[-1], COMMIT)
    world.publish()
    world.flush()
    assert world.answers[request] is TxnState.COMMITTED


def without_ids() -> tuple[HalfWorld, int]:
    """A half in the last epoch that a coordinator can have, of which a member is asked."""
    world = HalfWorld()
    half = stored(world)
    world.epoch = EPOCH_MAX - 1
    world.hand_over()
    world.watch("one")
    world.tick(HALF_LIMITS.check_after_s)
    assert phase(world, half) is HalfMessagePhase.ASKED
    return world, half


def use_up_ids(world: HalfWorld) -> None:
    world.core.table.next_id = (EPOCH_MAX << COUNTER_BITS) + COUNTER_MAX + 1


def test_a_commit_without_an_id_to_publish_under_changes_nothing_of_the_half() -> None:
    world, half = without_ids()
    use_up_ids(world)
    request = world.answer(world.asks[-1], COMMIT)
    assert isinstance(world.answers[request], Unavailable)
    assert not world.gave_up
    assert phase(world, half) is HalfMessagePhase.ASKED
    world.core.halves.check()
    request = world.answer(world.asks[-1], ROLLBACK)
    world.flush()
    assert world.answers[request] is TxnState.ABORTED


def test_a_commit_that_has_no_id_for_its_next_try_is_answered_in_the_end() -> None:
    world, half = without_ids()
    request = world.answer(world.asks[-1], COMMIT)
    world.not_published(world.publishing[0], Unavailable("no bookies"))
    use_up_ids(world)
    for _ in range(int(PUBLISH_RETRY_S)):
        world.tick(2)
        world.core.halves.check()
    assert isinstance(world.answers[request], Unavailable)
    assert phase(world, half) in (HalfMessagePhase.WAITING, HalfMessagePhase.ASKED)


def test_an_error_that_stays_parks_the_half_and_is_told() -> None:
    world = HalfWorld()
    half = stored(world)
    request = world.end_half(half, COMMIT)
    world.not_published(world.publishing[0], TopicTerminated("topic a is terminated"))
    assert isinstance(world.answers[request], TopicTerminated)
    world.flush()
    assert phase(world, half) is HalfMessagePhase.PARKED
    request = change(world, half, HalfMessageChangeVerb.COMMIT)
    world.not_published(world.publishing[0], TopicTerminated("topic a is terminated"))
    world.flush()
    assert isinstance(world.answers[request], TopicTerminated)
    assert phase(world, half) is HalfMessagePhase.PARKED, "and it stays so until it can be"
    assert half not in world.outcome


def test_a_try_that_comes_too_late_is_aborted_at_once() -> None:
    world = HalfWorld()
    half = stored(world)
    world.end_half(half, COMMIT)
    first = world.publishing[0]
    world.not_published(first, Unavailable("no answer"))
    world.tick(5)
    world.core.halves.on_published(half, first.txn, [], world.now)
    world._do(world.core.decisions.take_effects())
    assert status(world, half) is None, "the second try goes on"
    world.publish()
    world.flush()
    assert world.visible(half) == ["a"]


def test_a_try_that_takes_too_long_is_aborted_and_counts_no_more() -> None:
    world = HalfWorld()
    half = stored(world)
    world.end_half(half, COMMIT)
    slow = world.publishing[0]
    world.tick(31)
    world.publish()
    assert slow not in world.publishing
    world.tick(5)
    world.publish()
    world.flush()
    assert world.visible(half) == ["a"]


# ---------------------------------------------------------------------------------- bounds
@pytest.mark.parametrize(
    ("messages", "group", "check_key"),
    [
        ([], "g", ""),
        ([HalfMessage("a", b"x")] * (HALF_MESSAGES_MAX + 1), "g", ""),
        ([HalfMessage("a", b"x" * HALF_BYTES_MAX)], "g", ""),
        ([HalfMessage("a", b"x")], "", ""),
        ([HalfMessage("a", b"x")], "g" * 513, ""),
        ([HalfMessage("a", b"x")], "g", "k" * 513),
    ],
    ids=["none", "too many", "too large", "no group", "long group", "long key"],
)
def test_a_half_that_cannot_be_is_refused_and_leaves_no_trace(
    messages: list[HalfMessage], group: str, check_key: str
) -> None:
    world = HalfWorld(replace(HALF_LIMITS, bytes_max=1 << 30))
    half, request = world.begin(world.number()), world.number()
    world.ask(PrepareHalf(request, half, "me", group, check_key, messages))
    assert isinstance(world.answers[request], InvalidRequest)
    assert not world.take()
    world.prepare(half=half)
    world.flush()
    assert half in world.stored, "its id may be used for another one"


def test_past_a_bound_a_prepare_is_refused_and_nothing_is_dropped() -> None:
    world = HalfWorld(replace(HALF_LIMITS, group_max=5, bytes_max=600))
    halves = [stored(world) for _ in range(5)]
    request = world.number()
    world.prepare(request=request)
    assert isinstance(world.answers[request], BackPressure), "of a group"
    assert world.prepare(group="other")
    large = world.number()
    world.ask(PrepareHalf(large, world.begin(world.number()), "me", "third", "", [HalfMessage("a", b"x" * 600)]))
    assert isinstance(world.answers[large], BackPressure), "of the coordinator"
    world.end_half(halves[0], ROLLBACK)
    world.flush()
    request = world.number()
    world.prepare(request=request)
    world.flush()
    assert world.answers[request] is TxnState.PREPARED


def test_a_coordinator_with_halves_to_ask_about_is_not_left_alone() -> None:
    world = HalfWorld()
    half = stored(world)
    world.crash()
    assert not world.core.is_idle
    change(world, half, HalfMessageChangeVerb.PARK)
    world.flush()
    assert world.core.is_idle, "a parked one is asked about by an operator"
