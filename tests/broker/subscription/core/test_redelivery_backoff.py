"""What is held back: the ladder, the verdicts, and that nothing is let go early, twice or never."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from magnetar.broker.subscription.core.cursor_state import RedeliveryCount
from magnetar.broker.subscription.core.redelivery_backoff import (
    BACKOFF_STEPS_PROPERTY,
    MAX_COUNT_PROPERTY,
    TOPIC_PROPERTY,
    BackoffQueue,
    DeadLetterPolicy,
    merge_dead_letter_policy,
)
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.names import Position, TopicName

HERE = TopicName.parse("persistent://public/default/t-partition-3")


def test_a_message_is_delivered_once_more_than_it_may_come_back() -> None:
    policy = DeadLetterPolicy(2, "", ())
    assert [policy.is_dead_letter(times) for times in range(5)] == [False, False, False, True, True]


def test_the_ladder_is_climbed_and_its_last_step_stays() -> None:
    policy = DeadLetterPolicy(16, "", (10.0, 30.0, 60.0))
    assert [policy.backoff_ms(times) for times in (1, 2, 3, 4, 99)] == [10_000, 30_000, 60_000, 60_000, 60_000]
    assert DeadLetterPolicy(16, "", ()).backoff_ms(3) == 0


def test_a_subscription_lays_down_its_own_policy_over_the_topics() -> None:
    applied = replace(AppliedPolicies(), dead_letter_max_redeliver_count=5, dead_letter_backoff_s=(1.0,))
    assert merge_dead_letter_policy(applied, {}) == DeadLetterPolicy(5, "", (1.0,))
    own = {MAX_COUNT_PROPERTY: "2", TOPIC_PROPERTY: "grave", BACKOFF_STEPS_PROPERTY: "0.5, 2"}
    assert merge_dead_letter_policy(applied, own) == DeadLetterPolicy(2, "grave", (0.5, 2.0))
    assert merge_dead_letter_policy(
        applied, {MAX_COUNT_PROPERTY: "many", BACKOFF_STEPS_PROPERTY: "slow"}
    ) == DeadLetterPolicy(5, "", (1.0,))
    assert not merge_dead_letter_policy(AppliedPolicies(), {})


def test_the_dead_letter_topic_is_that_of_all_partitions() -> None:
    assert DeadLetterPolicy(1, "", ()).dead_letter_topic(HERE, "s").full == "persistent://public/default/t-s-DLQ"
    assert DeadLetterPolicy(1, "grave", ()).dead_letter_topic(HERE, "s").full == "persistent://public/default/grave"


ACTIONS = st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), st.integers(0, 50)), st.booleans()), max_size=40)


@given(ACTIONS)
def test_an_entry_is_let_go_once_and_not_before_its_time(actions: list[tuple[int, int | None, bool]]) -> None:
    held, model = BackoffQueue(), dict[Position, int | None]()
    for entry, until_ms, dropped in actions:
        position = Position(1, entry)
        held.add(position, until_ms)
        model[position] = until_ms
        if dropped:
            held.discard(position)
            del model[position]
        held.check()
    assert set(held) == set(model)
    for now in range(51):
        for position in held.take_due(now):
            assert model.pop(position) == now
        assert held.next_due_ms is None or held.next_due_ms > now
        held.check()
    assert set(held) == set(model), "what becomes a dead letter has no time"


def test_a_restart_goes_on_with_what_was_held_and_with_the_dead_letters() -> None:
    counts = {
        Position(1, 0): RedeliveryCount(1, 500), Position(1, 1): RedeliveryCount(1, 1500), Position(1,
        2): RedeliveryCount(3),
        Position(1, 3): RedeliveryCount(2),
    }  # fmt: skip
    held = BackoffQueue()
    assert held.restore_backoffs(counts, DeadLetterPolicy(2, "", (1.0,)), 1000) == [Position(1, 2)]
    assert set(held) == {Position(1, 1), Position(1, 2)}
    assert held.take_due(1500) == [Position(1, 1)]


def test_a_clock_that_was_a_day_ahead_makes_nothing_wait_longer_than_the_policy() -> None:
    held = BackoffQueue()
    day_ms = 86_400_000
    assert (
        held.restore_backoffs({Position(1, 0): RedeliveryCount(2, day_ms)}, DeadLetterPolicy(5, "", (1.0, 4.0)), 1000)
        == []
    )
    assert held.next_due_ms == 5000
