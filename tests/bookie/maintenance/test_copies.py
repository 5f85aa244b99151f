"""Which copies are missing where, against a slow and obvious count; and what comes next."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.bookie.maintenance.repair_core import (
    CopyMissingEntries,
    RecoverLedger,
    RemoveRepairMark,
    RepairFindings,
    StuckReason,
    WaitForNextAttempt,
    decide_next_repair_step,
    find_bookies_damaged_in_last_fragment,
    find_copy_gaps,
    find_lost_or_departing_bookies,
    find_runs_of_slot,
    find_runs_without_copies,
    list_copies_to_check,
    list_final_fragments,
    why_unreadable,
)
from magnetar.bookie.store.memtable import IntegerIntervals
from magnetar.ledger.metadata_core import get_striping_of_record
from magnetar.ledger.writer_core import Striping
from magnetar.metadata.records import (
    CLOSED,
    IN_RECOVERY,
    OPEN,
    DamagedEntriesRecord,
    Fragment,
    LedgerRecord,
    UnderReplicatedRecord,
)

BOOKIES = tuple("abcdefg")


def intervals(entries: set[int]) -> IntegerIntervals:
    found = IntegerIntervals()
    for entry in sorted(entries):
        found.add(entry, entry)
    return found


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerRecord:
    size = draw(st.integers(1, 5))
    write = draw(st.integers(1, size))
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 20), max_size=3)))]
    order = st.permutations(BOOKIES).map(lambda found: tuple(found[:size]))
    return LedgerRecord(
        ledger_id=1, state=draw(st.sampled_from((OPEN, IN_RECOVERY, CLOSED))), ensemble_size=size, write_quorum=write,
        ack_quorum=draw(st.integers(1, write)), key=b"k" * 20, token="t",
        fragments=tuple(Fragment(first, draw(order)) for first in firsts),
        last_entry=draw(st.integers(firsts[-1] - 1, firsts[-1] + 12)), length=1000,
    )  # fmt: skip


@st.composite
def looks(draw: st.DrawFn) -> tuple[RepairFindings, dict[tuple[int, str], set[int]]]:
    record = draw(ledgers())
    gone = frozenset(draw(st.sets(st.sampled_from(BOOKIES), max_size=3)))
    holdings = {
        (final.first, bookie): draw(st.none() | st.sets(st.integers(final.first, max(final.first, final.last))))
        for final, bookie in list_copies_to_check(record, gone)
    }
    held = {key: None if entries is None else intervals(entries) for key, entries in holdings.items()}
    known = {key: entries for key, entries in holdings.items() if entries is not None}
    marked = gone | frozenset(draw(st.sets(st.sampled_from(BOOKIES))))
    return RepairFindings(record, marked, gone, gone, held, draw(st.sampled_from((0.0, 29.0, 30.0, 99.0)))), known


@given(looks())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_a_gap_is_every_settled_entry_of_a_slot_that_its_bookie_lacks(
    drawn: tuple[RepairFindings, dict[tuple[int, str], set[int]]]
) -> None:
    look, known = drawn
    record = look.record
    assert record is not None
    found = {(gap.first, gap.slot): gap for gap in find_copy_gaps(record, look.gone, look.held)}
    for final in list_final_fragments(record):
        for slot, bookie in enumerate(final.bookies):
            striping = get_striping_of_record(record)
            mine = {e for e in range(final.first, final.last + 1) if slot in striping.slots_of_entry(e)}
            gap = found.pop((final.first, slot), None)
            if bookie in look.gone:
                assert gap is not None, "a bookie that is gone leaves a gap, even where nothing lies on it"
                assert gap.gone
                lacks = mine
            else:
                lacks = mine - known[final.first, bookie] if (final.first, bookie) in known else set()
            missing = {e for low, high in (gap.missing if gap else ()) for e in range(low, high + 1)}
            assert missing == lacks
    assert not found, "no gap is outside the final fragments"


@given(looks(), st.booleans())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_the_last_fragment_of_a_ledger_that_is_not_closed_is_never_filled(
    drawn: tuple[RepairFindings, dict[tuple[int, str], set[int]]], tried: bool
) -> None:
    look, _ = drawn
    record = look.record
    assert record is not None
    step = decide_next_repair_step(look, tried, 30.0)
    if isinstance(step, CopyMissingEntries) and record.state != CLOSED:
        assert all(gap.last < record.fragments[-1].first_entry for gap in step.gaps)
    if isinstance(step, RecoverLedger):
        assert record.state != CLOSED
        assert look.unsettled_s >= 30.0
        missing = set(record.fragments[-1].bookies) & look.gone
        assert missing or record.state == IN_RECOVERY
    if isinstance(step, RemoveRepairMark):
        assert not find_copy_gaps(record, look.gone, look.held)
        silent = {bookie for (_, bookie), answer in look.held.items() if answer is None}
        assert not silent & look.marked, "nobody's silence is taken for wholeness"
        assert record.state == CLOSED or not set(record.fragments[-1].bookies) & look.gone


@given(st.integers(1, 6), st.data())
def test_runs_are_the_entries_of_a_slot(size: int, data: st.DataObject) -> None:
    striping = Striping(size, data.draw(st.integers(1, size)), 1)
    slot, first = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 30))
    last = data.draw(st.integers(first - 1, first + 30))
    found = [entry for low, high in find_runs_of_slot(striping, slot, first, last) for entry in range(low, high + 1)]
    assert found == [entry for entry in range(first, last + 1) if slot in striping.slots_of_entry(entry)]


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_lacking_is_a_difference(wanted: set[int], held: set[int]) -> None:
    found = find_runs_without_copies(iter(list(intervals(wanted))), intervals(held))
    assert {entry for low, high in found for entry in range(low, high + 1)} == wanted - held


def a_ledger(state: str = CLOSED) -> LedgerRecord:
    return LedgerRecord(
        ledger_id=1, state=state, ensemble_size=3, write_quorum=3, ack_quorum=2, key=b"k" * 20, token="t",
        fragments=(Fragment(0, ("a", "b", "c")), Fragment(10, ("a", "d", "c"))), last_entry=14,
    )  # fmt: skip


def everything(
    record: LedgerRecord, gone: frozenset[str] = frozenset()
) -> dict[tuple[int, str], IntegerIntervals | None]:
    return {(f.first, b): intervals(set(range(f.first, f.last + 1))) for f, b in list_copies_to_check(record, gone)}


def test_an_open_ledger_waits_for_its_writer_and_is_recovered_only_after_the_grace() -> None:
    record, gone = a_ledger(OPEN), frozenset("d")
    held = everything(record, gone)
    within = decide_next_repair_step(RepairFindings(record, gone, gone, gone, held, 29.0), False, 30.0)
    assert isinstance(within, WaitForNextAttempt)
    assert within.why is StuckReason.OPEN
    assert decide_next_repair_step(RepairFindings(record, gone, gone, gone, held, 30.0), False, 30.0) == RecoverLedger()
    earlier = frozenset("b")
    assert isinstance(
        decide_next_repair_step(
            RepairFindings(record, earlier, earlier, gone, everything(record, earlier), 0.0), False, 30.0
        ),
        CopyMissingEntries,
    )


def test_damage_in_the_last_fragment_of_an_open_ledger_is_mended_by_recovering_it_after_the_grace() -> None:
    """Seeds 36450, 90250: an idle ledger was never filled there, and the report stood for ever."""
    record = a_ledger(OPEN)
    last, nobody = record.fragments[-1], frozenset[str]()
    bookie = last.bookies[0]

    def after(entry: int, seconds: float) -> object:
        report = DamagedEntriesRecord(ledger_id=1, bookie=bookie, ranges=((entry, entry),))
        damaged = find_bookies_damaged_in_last_fragment(record, {bookie: report})
        return decide_next_repair_step(
            RepairFindings(record, damaged, nobody, nobody, everything(record), seconds, damaged), False, 30.0
        )

    within = after(last.first_entry, 29.0)
    assert isinstance(within, WaitForNextAttempt)
    assert within.why is StuckReason.OPEN
    assert after(last.first_entry, 30.0) == RecoverLedger()
    assert isinstance(after(last.first_entry - 1, 99.0), RemoveRepairMark), "it is settled: filled as any other"


def test_a_ledger_is_whole_only_when_everybody_said_so() -> None:
    record = a_ledger()
    held, none, marked = everything(record), frozenset[str](), frozenset("d")
    assert isinstance(
        decide_next_repair_step(RepairFindings(record, marked, none, none, held, 0.0), False, 30.0), RemoveRepairMark
    )
    step = decide_next_repair_step(
        RepairFindings(record, marked, none, none, {**held, (10, "d"): None}, 0.0), False, 30.0
    )
    assert isinstance(step, WaitForNextAttempt)
    assert step.why is StuckReason.UNREACHABLE
    assert isinstance(
        decide_next_repair_step(RepairFindings(None, marked, none, none, {}, 0.0), False, 30.0), RemoveRepairMark
    )


def test_an_entry_is_lost_only_when_nobody_who_should_have_it_may_still_have_it() -> None:
    record, gone = a_ledger(), frozenset("b")
    nobody = {key: intervals(set()) for key in everything(record, gone)}
    assert why_unreadable(RepairFindings(record, gone, gone, gone, nobody, 0.0), 3) is StuckReason.LOST
    assert why_unreadable(RepairFindings(record, gone, gone, frozenset(), nobody, 0.0), 3) is StuckReason.UNREACHABLE
    assert (
        why_unreadable(RepairFindings(record, gone, gone, gone, {**nobody, (0, "c"): None}, 0.0), 3)
        is StuckReason.UNREACHABLE
    )
    somebody = {**nobody, (0, "c"): intervals({3})}
    assert why_unreadable(RepairFindings(record, gone, gone, gone, somebody, 0.0), 3) is StuckReason.UNREACHABLE


def test_a_bookie_is_gone_when_the_auditor_said_so_and_it_is_not_back() -> None:
    mark = UnderReplicatedRecord(ledger_id=1, bookies={"a": "lost", "b": "lost", "c": "incomplete", "d": "departing"})
    assert find_lost_or_departing_bookies(mark, {"b", "c"}, {"e"}) == {"a", "d", "e"}
