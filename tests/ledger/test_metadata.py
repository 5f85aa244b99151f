"""Transitions of the ledger's record: a table of what is stored now and what each transition makes of it."""

import msgspec
import pytest

from magnetar.ledger import metadata_core as m
from magnetar.ledger.writer_core import Striping
from magnetar.metadata.records import CLOSED, IN_RECOVERY, Fragment, LedgerRecord


def record(**changes: object) -> LedgerRecord:
    fresh = m.make_ledger_record(
        7, Striping(3, 3, 2), ("a", "b", "c"), key=b"k" * 20, token="mine", created_ms=0, properties={}
    )
    return msgspec.structs.replace(fresh, **changes)


CLOSED_AT_4 = record(state=CLOSED, last_entry=4, length=50)


def test_create_recognises_its_own_record_by_the_token() -> None:
    mine = record()
    assert m.decide_ledger_creation(None, mine) == m.RecordToStore(mine)
    assert m.decide_ledger_creation(mine, mine) == m.RecordAlreadyStored(mine)
    assert m.decide_ledger_creation(record(token="other"), mine) is None


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (record(), m.RecordToStore(record(state=CLOSED, last_entry=4, length=50))),
        (CLOSED_AT_4, m.RecordAlreadyStored(CLOSED_AT_4)),
        (record(state=CLOSED, last_entry=9), m.RecordAlreadyStored(record(state=CLOSED, last_entry=9))),
        (record(state=IN_RECOVERY), m.LedgerTransitionRefused(m.LedgerTransitionRefusal.FENCED)),
        (None, m.LedgerTransitionRefused(m.LedgerTransitionRefusal.DELETED)),
    ],
)
def test_a_writer_closes_only_an_open_ledger(current: LedgerRecord | None, expected: m.LedgerTransition) -> None:
    assert m.decide_close_by_writer(current, 4, 50) == expected


FIRST, D_FOR_A = Fragment(0, ("a", "b", "c")), Fragment(5, ("d", "b", "c"))
A_FAILED = ((0, "a"),)


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (record(), m.RecordToStore(record(fragments=(FIRST, D_FOR_A)))),
        (record(fragments=(FIRST, D_FOR_A)), m.RecordAlreadyStored(record(fragments=(FIRST, D_FOR_A)))),
        (
            record(fragments=(FIRST, Fragment(5, ("a", "b", "e")))),
            m.RecordToStore(record(fragments=(FIRST, Fragment(5, ("d", "b", "e"))))),
        ),
        (
            record(fragments=(FIRST, Fragment(3, ("a", "b", "e")))),
            m.RecordToStore(record(fragments=(FIRST, Fragment(3, ("a", "b", "e")), Fragment(5, ("d", "b", "e"))))),
        ),
        (record(state=IN_RECOVERY), m.LedgerTransitionRefused(m.LedgerTransitionRefusal.FENCED)),
        (CLOSED_AT_4, m.LedgerTransitionRefused(m.LedgerTransitionRefusal.ENDED)),
        (None, m.LedgerTransitionRefused(m.LedgerTransitionRefusal.DELETED)),
    ],
)
def test_the_writer_replaces_who_failed_from_an_entry_on_and_recognises_its_own_write(
    current: LedgerRecord | None, expected: m.LedgerTransition
) -> None:
    assert m.decide_ensemble_change(current, 5, A_FAILED, {0: "d"}) == expected


def test_as_many_are_replaced_as_there_are_others() -> None:
    answer = m.decide_ensemble_change(record(), 0, ((0, "a"), (1, "b")), {1: "d"})
    assert answer == m.RecordToStore(record(fragments=(Fragment(0, ("a", "d", "c")),)))


def test_an_ensemble_changes_neither_below_its_fragment_nor_to_a_bookie_that_is_in_it() -> None:
    with pytest.raises(AssertionError, match="never changes below"):
        m.decide_ensemble_change(record(fragments=(FIRST, Fragment(6, ("a", "b", "e")))), 5, A_FAILED, {0: "d"})
    with pytest.raises(AssertionError, match="distinct"):
        m.decide_ensemble_change(record(), 5, A_FAILED, {0: "c"})


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (record(), m.RecordToStore(record(state=IN_RECOVERY))),
        (record(state=IN_RECOVERY), m.RecordAlreadyStored(record(state=IN_RECOVERY))),
        (CLOSED_AT_4, m.RecordAlreadyStored(CLOSED_AT_4)),
        (None, m.LedgerTransitionRefused(m.LedgerTransitionRefusal.DELETED)),
    ],
)
def test_recovery_starts_once_and_is_joined(current: LedgerRecord | None, expected: m.LedgerTransition) -> None:
    assert m.decide_recovery_start(current) == expected


def test_a_recoverer_adopts_the_end_of_another() -> None:
    snapshot = record(state=IN_RECOVERY).fragments
    assert m.decide_close_by_recovery(CLOSED_AT_4, snapshot, snapshot, 3, 40) == m.RecordAlreadyStored(CLOSED_AT_4)


def test_changed_ensembles_reach_the_record_with_the_end_and_keep_earlier_fragments() -> None:
    first, last = Fragment(0, ("a", "b", "c")), Fragment(5, ("a", "b", "d"))
    current = record(state=IN_RECOVERY, fragments=(Fragment(0, ("x", "b", "c")), last))  # re-replicated meanwhile
    changed = (first, last, Fragment(7, ("a", "e", "d")))
    answer = m.decide_close_by_recovery(current, (first, last), changed, 8, 90)
    assert isinstance(answer, m.RecordToStore)
    assert answer.record.fragments == (Fragment(0, ("x", "b", "c")), last, Fragment(7, ("a", "e", "d")))
    assert (answer.record.state, answer.record.last_entry, answer.record.length) == (CLOSED, 8, 90)


@pytest.mark.parametrize("current", [record(), record(state=IN_RECOVERY, fragments=(Fragment(0, ("a", "b", "z")),))])
def test_recovery_does_not_close_what_it_did_not_read(current: LedgerRecord) -> None:
    snapshot = record().fragments
    assert m.decide_close_by_recovery(current, snapshot, snapshot, 3, 40) == m.LedgerTransitionRefused(
        m.LedgerTransitionRefusal.FRAGMENTS_CHANGED
    )


def test_closed_is_final() -> None:
    fragments = CLOSED_AT_4.fragments
    for answer in (
        m.decide_close_by_writer(CLOSED_AT_4, 3, 1),
        m.decide_recovery_start(CLOSED_AT_4),
        m.decide_close_by_recovery(CLOSED_AT_4, fragments, fragments, 2, 1),
    ):
        assert answer == m.RecordAlreadyStored(CLOSED_AT_4)


def test_the_fragment_of_an_entry_is_the_last_that_begins_at_or_before_it() -> None:
    ledger = record(fragments=(Fragment(0, ("a", "b", "c")), Fragment(5, ("a", "b", "d"))))
    assert m.find_fragment_of_entry(ledger, 4) == (ledger.fragments[0], 4)
    assert m.find_fragment_of_entry(ledger, 5) == (ledger.fragments[1], -1)


@pytest.mark.parametrize(
    "broken",
    [
        record(fragments=(Fragment(1, ("a", "b", "c")),)),
        record(fragments=(Fragment(0, ("a", "b", "c")), Fragment(0, ("a", "b", "d")))),
        record(fragments=(Fragment(0, ("a", "b", "b")),)),
        record(state=CLOSED, last_entry=1, fragments=(Fragment(0, ("a", "b", "c")), Fragment(3, ("a", "b", "d")))),
    ],
)
def test_check_finds_broken_records(broken: LedgerRecord) -> None:
    with pytest.raises(AssertionError):
        m.check_ledger_record(broken)


TWO = (Fragment(0, ("a", "b", "c")), Fragment(3, ("a", "d", "c")))


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (record(fragments=TWO), m.RecordToStore(record(fragments=(Fragment(0, ("a", "x", "c")), TWO[1])))),
        (
            record(fragments=TWO, state=CLOSED, last_entry=4),
            m.RecordToStore(record(fragments=(Fragment(0, ("a", "x", "c")), TWO[1]), state=CLOSED, last_entry=4)),
        ),
        (record(), m.LedgerTransitionRefused(m.LedgerTransitionRefusal.NOT_FINAL)),
        (record(state=IN_RECOVERY), m.LedgerTransitionRefused(m.LedgerTransitionRefusal.NOT_FINAL)),
        (
            record(fragments=(Fragment(0, ("a", "x", "c")), TWO[1])),
            m.RecordAlreadyStored(record(fragments=(Fragment(0, ("a", "x", "c")), TWO[1]))),
        ),
        (
            record(fragments=(Fragment(0, ("a", "y", "c")), TWO[1])),
            m.LedgerTransitionRefused(m.LedgerTransitionRefusal.MOVED_ON),
        ),
        (
            record(fragments=(Fragment(0, ("x", "b", "c")), TWO[1])),
            m.LedgerTransitionRefused(m.LedgerTransitionRefusal.MOVED_ON),
        ),
        (None, m.LedgerTransitionRefused(m.LedgerTransitionRefusal.DELETED)),
    ],
)
def test_m21_a_bookie_is_replaced_in_a_final_fragment_only_and_only_where_it_still_stands(
    current: LedgerRecord | None, expected: m.LedgerTransition
) -> None:
    assert m.decide_bookie_replacement(current, 0, "b", "x") == expected


def test_a_fragment_that_is_not_there_any_more_is_left_alone() -> None:
    assert m.decide_bookie_replacement(record(fragments=TWO), 2, "b", "x") == m.LedgerTransitionRefused(
        m.LedgerTransitionRefusal.MOVED_ON
    )
