"""What is due in a topic's life: rolling, quotas, inactivity."""

from functools import partial

import pytest

from magnetar.broker.log.log_shape_core import (
    LedgerSpan,
    LogShape,
    Retention,
    TrimLimit,
    find_ledger_age_share,
    find_trimmable_ledgers,
    list_reasons_to_keep_ledgers,
)
from magnetar.broker.topic.admission_core import (
    compute_backlog_bytes,
    find_mark_for_backlog_bytes,
    is_topic_inactive,
    judge_backlog_quota,
    must_roll_ledger,
)
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import BacklogQuotaState
from magnetar.proto.states import LedgerStays as Stays

MIB = 1 << 20
TOPIC = TopicName.parse("persistent://t/n/x")


def shape(*sizes: int, entries: int = 10) -> LogShape:
    """Ledgers 1, 2, … of so many bytes; the last one is open."""
    made = LogShape()
    for number, size in enumerate(sizes, 1):
        last = number == len(sizes)
        made.add(
            LedgerSpan(
                number, (number - 1) * entries, entries - 1 if size else -1,
                (number - 1) * entries + (entries if size else 0), size, open=last, closed_ms=0 if last else 1000,
            )
        )  # fmt: skip
    return made


def test_complaint_26_the_open_ledger_of_a_quiet_topic_ends_so_that_retention_can_free_it() -> None:
    log, everything = shape(5, 5), [TrimLimit(Position(2, 9))]
    applied = AppliedPolicies(retention_minutes=10, retention_mib=-1)
    due = partial(must_roll_ledger, TOPIC, idle_s=60, now_ms=1000)
    assert due(log, applied, everything, quiet_s=60, age_s=60)
    assert not due(log, applied, everything, quiet_s=59, age_s=60), "it may go on"
    assert not due(log, applied, [TrimLimit(Position(2, 8))], quiet_s=99, age_s=99), "somebody still needs it"
    lagging = [TrimLimit(Position(2, 8))]
    assert due(log, applied, lagging, quiet_s=0, age_s=600), "a trickle must not keep it for ever"
    own_s = 600 * find_ledger_age_share(TOPIC, 2)
    assert due(log, applied, lagging, quiet_s=0, age_s=own_s), "of many such topics each ends at an age of its own"
    assert not due(log, applied, lagging, quiet_s=0, age_s=own_s - 0.01)
    assert not due(log, AppliedPolicies(retention_minutes=-1, retention_mib=-1), everything, quiet_s=99, age_s=99)
    assert not due(shape(5, 0), applied, everything, quiet_s=99, age_s=9999), "empty: nothing to free"
    assert not due(LogShape(), applied, [], quiet_s=99, age_s=9999), "nothing was ever published"


def test_complaint_26_a_last_ledger_that_is_closed_gets_a_next_one_when_retention_would_free_it() -> None:
    log, everything = shape(5, 5), [TrimLimit(Position(2, 9))]
    log.close_last_ledger_span(2, 9, 20, 5, 1000)
    applied, past = AppliedPolicies(retention_minutes=10, retention_mib=-1), 1000 + 10 * 60_000
    due = partial(must_roll_ledger, TOPIC, quiet_s=60, age_s=9999, idle_s=60)
    assert due(log, applied, everything, now_ms=past)
    assert not due(log, applied, everything, now_ms=past - 1), "it is retained, and another one would free nothing"
    assert not due(log, applied, [TrimLimit(Position(2, 8))], now_ms=past), "somebody still needs it"
    assert due(log, AppliedPolicies(), everything, now_ms=1000), "nothing is retained"
    assert not due(log, AppliedPolicies(retention_minutes=-1, retention_mib=-1), everything, now_ms=past)


def test_complaint_27_size_retention_deletes_no_more_than_it_must() -> None:
    log, marks = shape(3 * MIB, 3 * MIB, 3 * MIB, MIB), [TrimLimit(Position(4, 9))]
    retained = Retention(minutes=-1, mib=5)
    assert find_trimmable_ledgers(log, marks, retained, now_ms=10**9) == [1], (
        "3 and 3 MiB stay: one of them alone is less than 5"
    )
    assert find_trimmable_ledgers(log, marks, Retention(minutes=-1, mib=7), now_ms=10**9) == []
    assert find_trimmable_ledgers(log, marks, Retention(minutes=-1, mib=3), now_ms=10**9) == [1, 2]


def test_complaint_28_what_is_consumed_goes_at_once_without_retention() -> None:
    log = shape(3 * MIB, 3 * MIB, 0)
    assert find_trimmable_ledgers(log, [TrimLimit(Position(2, 9))], Retention(), now_ms=1001) == [1, 2]
    assert list_reasons_to_keep_ledgers(
        log, [TrimLimit(Position(1, 9))], Retention(), now_ms=1001
    )[1] == (2, Stays.NOT_ACKNOWLEDGED)


def test_a16_acknowledged_data_goes_when_time_or_size_is_past() -> None:
    log, marks = shape(MIB, MIB, 0), [TrimLimit(Position(2, 9))]
    minute = 60_000
    assert find_trimmable_ledgers(log, marks, Retention(minutes=1, mib=-1), now_ms=1000 + minute - 1) == []
    assert find_trimmable_ledgers(log, marks, Retention(minutes=1, mib=-1), now_ms=1000 + minute) == [1, 2]
    assert find_trimmable_ledgers(log, marks, Retention(minutes=1, mib=1), now_ms=1001) == [1], "the size is past"
    assert find_trimmable_ledgers(log, marks, Retention(minutes=-1, mib=-1), now_ms=10**12) == []


def test_messages_that_nobody_has_subscribed_to_stay_for_a_while_and_up_to_a_size() -> None:
    """What is reached first. The reason is their own, and retention counts after it."""
    log, minute = shape(MIB, MIB, MIB, 0), 60_000
    unread = Retention(minutes=10, mib=2)
    why = dict(list_reasons_to_keep_ledgers(log, [], Retention(), 1001, unread))
    assert why == {1: None, 2: Stays.NOT_SUBSCRIBED, 3: Stays.NOT_SUBSCRIBED, 4: Stays.OPEN}, "the size"
    assert find_trimmable_ledgers(log, [], Retention(), 1000 + 10 * minute, unread) == [1, 2, 3], "the time"
    assert find_trimmable_ledgers(log, [], Retention(), 1001, Retention(minutes=-1, mib=-1)) == []
    assert find_trimmable_ledgers(log, [], Retention(), 1001, Retention()) == [1, 2, 3], "the policy is 0"
    longer = Retention(minutes=20, mib=-1)
    assert list_reasons_to_keep_ledgers(log, [], longer, 1000 + 10 * minute, unread)[1] == (2, Stays.RETAINED_BY_TIME)


def test_the_open_ledger_of_a_topic_without_subscriptions_ends_by_its_age_alone() -> None:
    """Not because it is quiet: a message an hour would have a ledger each."""
    due = partial(must_roll_ledger, TOPIC, shape(5, 5), AppliedPolicies(), [], idle_s=60, now_ms=1000)
    assert not due(quiet_s=99, age_s=8 * 60, unread=Retention(minutes=10, mib=1))
    assert due(quiet_s=0, age_s=10 * 60, unread=Retention(minutes=10, mib=1))
    assert not due(quiet_s=99, age_s=10**9, unread=Retention(minutes=-1, mib=1))
    assert due(quiet_s=99, age_s=99), "nothing is kept for want of a subscription"


def test_the_backlog_lies_behind_the_mark() -> None:
    log = shape(100, 100, 100)
    assert compute_backlog_bytes(log, Position(3, 9)) == 0
    assert compute_backlog_bytes(log, Position(2, 9)) == 100
    assert compute_backlog_bytes(log, Position(2, 4)) == 150
    assert compute_backlog_bytes(log, log.start_position) == 300


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        ("producer_request_hold", BacklogQuotaState.HOLD), ("producer_exception", BacklogQuotaState.REFUSE),
        ("consumer_backlog_eviction", BacklogQuotaState.EVICT),
    ],
)  # fmt: skip
def test_a17_past_the_quota_by_size_or_by_age_the_policy_says_what_happens(
    policy: str, what: BacklogQuotaState
) -> None:
    applied = AppliedPolicies(backlog_quota_bytes=1 << 20, backlog_quota_s=60, backlog_quota_policy=policy)  # type: ignore[arg-type]
    assert judge_backlog_quota(applied, MIB - 1, 59) is None
    assert judge_backlog_quota(applied, MIB, 0) is what
    assert judge_backlog_quota(applied, 0, 60) is what
    assert judge_backlog_quota(AppliedPolicies(), 10**15, 10**9) is None, "there is no quota"


def test_a17_eviction_gives_up_no_more_than_it_must() -> None:
    log = shape(100, 100, 100)
    for limit in (0, 5, 50, 100, 101, 199, 250):
        mark = find_mark_for_backlog_bytes(log, limit)
        assert compute_backlog_bytes(log, mark) <= limit
        assert compute_backlog_bytes(log, mark) > limit - 11, "one entry more would be too much"
    assert find_mark_for_backlog_bytes(log, 300) == log.start_position


def test_t6_a_topic_is_inactive_when_nobody_uses_it_for_so_long() -> None:
    first = AppliedPolicies(inactive_s=60)
    assert is_topic_inactive(first, users=0, subscriptions=0, backlog=False, unused_s=60)
    assert not is_topic_inactive(first, users=0, subscriptions=0, backlog=False, unused_s=59)
    assert not is_topic_inactive(first, users=1, subscriptions=0, backlog=False, unused_s=99)
    assert not is_topic_inactive(first, users=0, subscriptions=1, backlog=False, unused_s=99)
    assert not is_topic_inactive(AppliedPolicies(), users=0, subscriptions=0, backlog=False, unused_s=10**9), "off"
    second = AppliedPolicies(inactive_s=60, inactive_mode="delete_when_subscriptions_caught_up")
    assert is_topic_inactive(second, users=0, subscriptions=3, backlog=False, unused_s=60)
    assert not is_topic_inactive(second, users=0, subscriptions=3, backlog=True, unused_s=99)
