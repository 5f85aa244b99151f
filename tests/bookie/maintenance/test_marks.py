"""Marks: the same facts give the same mark, a change makes it new, and nobody is lost before the grace is over."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.maintenance.repair_core import (
    BookieAbsences,
    RepairReason,
    StuckReason,
    compute_seconds_until_attempt,
    decide_repair_mark,
    list_bookies_of_ledger,
    make_repair_mark_after_failure,
    schedule_next_attempt_now,
)
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, Fragment, LedgerRecord, UnderReplicatedRecord

BOOKIES = tuple("abcdef")


def a_record(*ensembles: tuple[str, ...], state: str = CLOSED) -> LedgerRecord:
    fragments = tuple(Fragment(10 * at, bookies) for at, bookies in enumerate(ensembles))
    return LedgerRecord(
        ledger_id=1, state=state, ensemble_size=3, write_quorum=3, ack_quorum=2, key=b"k" * 20, token="t",
        fragments=fragments, last_entry=10 * len(ensembles),
    )  # fmt: skip


ensembles = st.permutations(BOOKIES).map(lambda order: tuple(order[:3]))
ledgers = st.builds(
    lambda found, state: a_record(*found, state=state),
    st.lists(ensembles, min_size=1, max_size=3),
    st.sampled_from((OPEN, CLOSED, IN_RECOVERY)),
)
reasons = st.dictionaries(st.sampled_from(BOOKIES), st.sampled_from((RepairReason.LOST, RepairReason.DEPARTING)))
findings = st.dictionaries(st.sampled_from(BOOKIES), st.sampled_from((RepairReason.INCOMPLETE, RepairReason.DAMAGED)))
marks = st.none() | st.builds(
    UnderReplicatedRecord,
    ledger_id=st.just(1),
    bookies=st.dictionaries(st.sampled_from(BOOKIES), st.sampled_from([each.value for each in RepairReason])),
    in_recovery=st.booleans(), attempts=st.integers(0, 5), retry_ms=st.integers(0, 99), since_ms=st.integers(1, 99),
)  # fmt: skip


@given(ledgers, reasons, findings, marks)
def test_the_same_facts_give_the_same_mark_however_often_somebody_looks(
    record: LedgerRecord, gone: dict[str, RepairReason], found: dict[str, RepairReason],
    mark: UnderReplicatedRecord | None
) -> None:
    once = decide_repair_mark(record, gone, found, mark, 100)
    assert decide_repair_mark(record, gone, found, once, 200) == once
    names = list_bookies_of_ledger(record)
    if once is None:
        assert record.state != IN_RECOVERY
        assert not names.keys() & gone.keys()
        assert not names.keys() & found.keys()
        return
    assert names.keys() & gone.keys() <= once.bookies.keys() <= names.keys(), "who is gone is in it, nobody else's is"
    assert all(once.bookies[bookie] == gone[bookie].value for bookie in names.keys() & gone.keys())
    if mark is not None and once != mark:
        assert (once.attempts, once.retry_ms, once.since_ms) == (0, 0, mark.since_ms), "a change is tried at once"


def test_a_bookie_that_comes_back_is_compared_before_the_mark_goes() -> None:
    record = a_record(("a", "b", "c"))
    lost = decide_repair_mark(record, {"b": RepairReason.LOST}, {}, None, 7)
    assert lost is not None
    assert lost.bookies == {"b": "lost"}
    back = decide_repair_mark(record, {}, {}, msgspec.structs.replace(lost, attempts=3, retry_ms=99), 8)
    assert back is not None
    assert (back.bookies, back.attempts, back.retry_ms, back.since_ms) == ({"b": "returned"}, 0, 0, 7)
    assert decide_repair_mark(record, {}, {}, back, 9) == back


def test_a_mark_goes_with_its_ledger_and_when_no_fragment_names_the_bookie_any_more() -> None:
    mark = decide_repair_mark(a_record(("a", "b", "c")), {"b": RepairReason.LOST}, {}, None, 7)
    assert decide_repair_mark(None, {"b": RepairReason.LOST}, {}, mark, 8) is None
    assert decide_repair_mark(a_record(("a", "d", "c")), {"b": RepairReason.LOST}, {}, mark, 8) is None


def test_a_recovery_that_did_not_end_is_marked_without_any_bookie() -> None:
    mark = decide_repair_mark(a_record(("a", "b", "c"), state=IN_RECOVERY), {}, {}, None, 7)
    assert mark is not None
    assert mark.in_recovery
    assert decide_repair_mark(a_record(("a", "b", "c")), {}, {}, mark, 8) is None


def test_a_failed_try_is_followed_by_a_longer_wait_up_to_a_bound() -> None:
    mark = decide_repair_mark(a_record(("a", "b", "c")), {"b": RepairReason.LOST}, {}, None, 0)
    assert mark is not None
    waits = []
    for _ in range(6):
        mark = make_repair_mark_after_failure(mark, StuckReason.NO_TARGET, "why", 1000, 5.0, 60.0)
        waits.append((mark.retry_ms - 1000) / 1000)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert (mark.attempts, mark.stuck, mark.last_error) == (6, StuckReason.NO_TARGET.value, "why")
    assert schedule_next_attempt_now(mark).retry_ms == 0
    assert schedule_next_attempt_now(mark).attempts == 6


def test_a_time_of_another_clock_counts_for_no_more_than_the_back_off() -> None:
    mark = make_repair_mark_after_failure(
        UnderReplicatedRecord(ledger_id=1, bookies={}), StuckReason.FAILED, "why", 1000, 5.0, 60.0
    )
    assert compute_seconds_until_attempt(mark, 1000, 0.0, 5.0, 60.0) == 5.0
    assert compute_seconds_until_attempt(mark, 4000, 0.0, 5.0, 60.0) == 2.0
    a_day_ahead = msgspec.structs.replace(mark, retry_ms=86_400_000)
    assert compute_seconds_until_attempt(a_day_ahead, 1000, 0.0, 5.0, 60.0) == 5.0
    assert compute_seconds_until_attempt(a_day_ahead, 1000, 4.0, 5.0, 60.0) == 1.0
    assert compute_seconds_until_attempt(a_day_ahead, 1000, 5.0, 5.0, 60.0) == 0.0
    assert compute_seconds_until_attempt(schedule_next_attempt_now(mark), 1000, 0.0, 5.0, 60.0) == 0.0
    never = msgspec.structs.replace(a_day_ahead, attempts=0)
    assert compute_seconds_until_attempt(never, 1000, 0.0, 5.0, 60.0) == 0.0, "nobody has tried it"


@given(st.lists(st.tuples(st.floats(0, 20), st.sets(st.sampled_from("abc"))), max_size=30))
def test_nobody_is_lost_before_the_whole_grace_and_everybody_after_it(looks: list[tuple[float, set[str]]]) -> None:
    absences, now, since = BookieAbsences(30.0), 0.0, dict[str, float]()
    for step, present in looks:
        now += step
        for name in "abc":
            if name in present:
                since.pop(name, None)
            else:
                since.setdefault(name, now)
        lost = absences.update_absent_and_gone(now, "abc", present)
        absences.check(now)
        assert lost == {name for name, at in since.items() if now - at >= 30.0}
