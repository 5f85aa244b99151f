"""Compaction moves what lives, loses nothing at any crash, and gives the disk back (BookKeeper protocol §2.6)."""

from __future__ import annotations

from magnetar.bookie.store.compaction_plan import Action, Holder, LogFacts, Policy, Reason, State, batches, decide


def facts(log: int, data: int, live: int, *, state: State = State.CLOSED, readable: bool = True) -> LogFacts:
    holders = (Holder(7, live),) if live else ()
    return LogFacts(log, state, data + 5000, data, live, 1 if live else 0, len(holders), holders, readable)


POLICY = Policy(0.2, 0.5, 1000)


def test_each_log_gets_one_action_and_its_reason() -> None:
    logs = [
        facts(1, 100_000, 0),
        facts(2, 100_000, 19_999),
        facts(3, 100_000, 49_999),
        facts(4, 100_000, 50_000),
        facts(5, 100_000, 10, state=State.HOT),
        facts(6, 100_000, 0, state=State.COLD),
        facts(7, 100_000, 0, readable=False),
        facts(8, 0, 0),
    ]
    minor = [(plan.action, plan.reason) for plan in decide(logs, POLICY, major=False)]
    assert minor == [
        (Action.DELETE, Reason.DEAD),
        (Action.COMPACT, Reason.SPARSE),
        (Action.KEEP, Reason.WAITS),
        (Action.KEEP, Reason.LIVE),
        (Action.KEEP, Reason.OPEN),
        (Action.KEEP, Reason.OPEN),
        (Action.KEEP, Reason.UNREADABLE),
        (Action.DELETE, Reason.DEAD),
    ]
    major = [(plan.action, plan.reason) for plan in decide(logs, POLICY, major=True)]
    assert major[2] == (Action.COMPACT, Reason.SPARSE)
    assert major[:2] + major[3:] == minor[:2] + minor[3:]


def test_small_logs_are_merged_by_major_compaction_and_one_alone_is_not() -> None:
    policy = Policy(0.2, 0.5, 10_000)
    small = [facts(1, 1000, 1000), facts(2, 1000, 1000)]
    assert [plan.reason for plan in decide(small, policy, major=True)] == [Reason.SMALL, Reason.SMALL]
    assert [plan.reason for plan in decide(small, policy, major=False)] == [Reason.WAITS, Reason.WAITS]
    assert [plan.reason for plan in decide(small[:1], policy, major=True)] == [Reason.LIVE]


def test_batches_fit_into_one_log_and_the_sparse_ones_come_first() -> None:
    logs = [facts(1, 100, 40), facts(2, 100, 10), facts(3, 100, 30), facts(4, 1000, 90)]
    numbers = [[log.log for log in batch] for batch in batches(logs, 50, 100, 100)]
    assert numbers == [[4], [2, 3], [1]]
    assert [len(batch) for batch in batches(logs, 1000, 2, 100)] == [2, 2]
    assert [len(batch) for batch in batches(logs, 1000, 100, 3)] == [3, 1]
