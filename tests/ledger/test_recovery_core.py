"""The recovery core as a table: facts in, effects out. Bookies a, b, c; spares d, e."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from magnetar.ledger import metadata_core as m
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.recovery_core import (
    CloseRecoveredLedger,
    EntryFound,
    EntryMissing,
    FenceFailed,
    FinishRecovery,
    LedgerFencedAtBookie,
    LedgerRecordClosed,
    LedgerRecovery,
    ReadFailed,
    RecoveredCloseRefused,
    RecoveryEffect,
    RecoveryFact,
    RecoveryFailure,
    RecoveryState,
    ReportRecoveryFailure,
    SendFence,
    SendRead,
)
from magnetar.ledger.writer_core import AddAcked, AddFailed, SendAdd, Striping
from magnetar.metadata.records import IN_RECOVERY, Fragment, LedgerRecord


def record(shape: tuple[int, int, int] = (3, 3, 2), *fragments: Fragment) -> LedgerRecord:
    fresh = m.make_ledger_record(
        7, Striping(*shape), tuple("abc"[: shape[0]]), key=b"k" * 20, token="t", created_ms=0, properties={}
    )
    return msgspec.structs.replace(fresh, state=IN_RECOVERY, fragments=fragments or fresh.fragments)


def stored(entry: int) -> StoredCopy:
    return StoredCopy(entry, entry - 1, 10 * (entry + 1), b"0123456789")


class Script:
    def __init__(self, snapshot: LedgerRecord | None = None, spares: str = "de", batch: int = 2) -> None:
        def choose(exclude: Sequence[str]) -> str | None:
            return next((spare for spare in spares if spare not in exclude), None)

        chosen: Callable[[Sequence[str]], str | None] = choose
        self.core = LedgerRecovery(snapshot or record(), chosen, batch=batch)
        self.said = list(self.core.start())

    def tell(self, *facts: RecoveryFact) -> list[RecoveryEffect]:
        said: list[RecoveryEffect] = []
        for fact in facts:
            said += self.core.receive(fact)
            self.core.check()
        return said

    def fenced(self, lac: int = -1) -> list[RecoveryEffect]:
        return self.tell(LedgerFencedAtBookie(0, lac), LedgerFencedAtBookie(1, lac))

    def absent(self, entry: int) -> list[RecoveryEffect]:
        return self.tell(EntryMissing(entry, 0), EntryMissing(entry, 1))


def reads(effects: Sequence[RecoveryEffect]) -> list[tuple[int, str]]:
    return [(effect.entry, effect.bookie) for effect in effects if isinstance(effect, SendRead)]


def writes(effects: Sequence[RecoveryEffect]) -> list[tuple[int, str]]:
    return [(effect.add.entry, effect.bookie) for effect in effects if isinstance(effect, SendAdd)]


def test_what_is_written_back_carries_the_lac_that_the_attempt_began_with() -> None:
    """Its own progress is nobody's business before it has closed the ledger: another attempt may end it earlier."""
    script = Script(batch=1)
    script.fenced(lac=3)
    sent = script.tell(EntryFound(3, 0, stored(3)), EntryFound(4, 0, stored(4)))
    sent += script.tell(AddAcked(4, 0, "a"), AddAcked(4, 1, "b"), EntryFound(5, 0, stored(5)))
    sent += script.tell(AddFailed(5, 2, "c"))
    assert (5, "d") in writes(sent)
    assert {(effect.add.entry, effect.lac) for effect in sent if isinstance(effect, SendAdd)} == {(4, 3), (5, 3)}


def test_it_begins_with_fencing_every_bookie_of_the_last_fragment() -> None:
    last = Fragment(5, ("a", "b", "d"))
    assert Script(record((3, 3, 2), Fragment(0, ("a", "b", "c")), last)).said == [
        SendFence(0, "a"), SendFence(1, "b"), SendFence(2, "d"),
    ]  # fmt: skip


def test_reading_begins_when_the_fence_covers_every_write_set_and_not_before() -> None:
    script = Script()
    assert script.tell(LedgerFencedAtBookie(0, -1)) == []
    assert sorted(reads(script.tell(LedgerFencedAtBookie(1, -1)))) == [(e, b) for e in (0, 1) for b in "abc"]
    assert script.tell(LedgerFencedAtBookie(2, 9)) == [], "late answers change nothing"


def test_too_few_answers_to_the_fence_abort() -> None:
    script = Script()
    assert script.tell(FenceFailed(0), LedgerFencedAtBookie(1, -1), FenceFailed(2)) == [
        ReportRecoveryFailure(RecoveryFailure.NOT_FENCED, -1)
    ]
    assert script.tell(LedgerFencedAtBookie(0, -1)) == []


def test_the_largest_lac_reported_is_where_reading_begins() -> None:
    script = Script()
    assert min(reads(script.tell(LedgerFencedAtBookie(0, 4), LedgerFencedAtBookie(1, 6)))) == (6, "a"), (
        "LAC0 itself, for the ledger's length"
    )
    assert script.core.lac0 == 6


def test_m02_reading_never_begins_before_the_last_fragment() -> None:
    script = Script(record((3, 3, 2), Fragment(0, ("a", "b", "c")), Fragment(5, ("a", "b", "d"))))
    asked = sorted(reads(script.fenced(-1)))
    assert asked[:3] == [(4, "a"), (4, "b"), (4, "c")], "entry 4 lies in the first fragment"
    assert asked[3:6] == [(5, "a"), (5, "b"), (5, "d")]


def test_an_absent_first_entry_closes_the_ledger_empty() -> None:
    script = Script()
    script.fenced()
    assert script.absent(0) == [CloseRecoveredLedger(-1, 0, (Fragment(0, ("a", "b", "c")),))]
    assert script.tell(EntryFound(1, 2, stored(1))) == [], "nothing counts after the first absent entry"


def test_one_copy_is_enough_and_is_written_back_to_all_before_the_close() -> None:
    script = Script()
    script.fenced()
    assert script.tell(EntryMissing(0, 0)) == []
    said = script.tell(EntryFound(0, 1, stored(0)))
    assert sorted(writes(said)) == [(0, "a"), (0, "b"), (0, "c")]
    script.absent(1)
    assert script.tell(AddAcked(0, 0, "a")) == [], "one synced copy is not a quorum"
    assert script.tell(AddAcked(0, 2, "c")) == [CloseRecoveredLedger(0, 10, (Fragment(0, ("a", "b", "c")),))]


def test_entries_are_decided_in_order() -> None:
    script = Script()
    script.fenced()
    assert script.absent(1) == []
    assert writes(script.tell(EntryFound(0, 0, stored(0)))) == [(0, "a"), (0, "b"), (0, "c")]
    assert script.core.end == 0


def test_one_miss_fewer_than_needed_is_not_a_proof() -> None:
    script = Script()
    script.fenced()
    assert script.tell(EntryMissing(0, 0), ReadFailed(0, 1)) == []
    assert script.tell(ReadFailed(0, 2)) == [ReportRecoveryFailure(RecoveryFailure.UNDECIDED, 0)]
    assert script.core.state is RecoveryState.ABORTED


def test_a_miss_of_an_entry_known_to_be_stored_proves_nothing() -> None:
    script = Script()
    script.fenced(lac=3)
    assert script.tell(EntryMissing(3, 0), EntryMissing(3, 1)) == []
    assert script.tell(ReadFailed(3, 2)) == []
    assert script.absent(4) == [
        ReportRecoveryFailure(RecoveryFailure.UNDECIDED, 3)
    ], "the length of the ledger is that entry's"


def missed(entry: int) -> list[RecoveryFact]:
    return [EntryMissing(entry, slot) for slot in range(3)]


def test_lac0_that_certainly_nobody_has_stays_the_end_and_the_length_is_that_of_an_entry_before_it() -> None:
    """It was confirmed: it is shown as lost, and a ledger that is never closed would lose all others too."""
    script = Script()
    script.fenced(lac=9)
    assert script.tell(*missed(9)) == []
    assert set(reads(script.absent(10))) == {(8, "a"), (8, "b"), (8, "c")}
    assert set(reads(script.tell(*missed(8)))) == {(7, "a"), (7, "b"), (7, "c")}
    assert set(reads(script.tell(*(ReadFailed(7, slot) for slot in range(3))))) == {(5, "a"), (5, "b"), (5, "c")}
    assert script.tell(ReadFailed(5, 1)) == []
    assert script.tell(EntryFound(5, 0, stored(5))) == [CloseRecoveredLedger(9, 60, (Fragment(0, ("a", "b", "c")),))]


def test_a_ledger_of_which_nothing_is_given_keeps_its_end_and_tells_no_length() -> None:
    script = Script()
    script.fenced(lac=2)
    script.tell(*missed(2))
    script.absent(3)
    assert set(reads(script.tell(*missed(1)))) == {(0, "a"), (0, "b"), (0, "c")}
    assert script.tell(*missed(0)) == [CloseRecoveredLedger(2, 0, (Fragment(0, ("a", "b", "c")),))]


@pytest.mark.parametrize("order", [(3, 4), (4, 3)])
def test_lac0_that_nobody_gives_does_not_hold_up_what_is_found_behind_it(order: tuple[int, int]) -> None:
    """It is in an earlier fragment, all of whose bookies are gone."""
    script = Script(record((3, 3, 2), Fragment(0, ("x", "y", "z")), Fragment(4, ("a", "b", "c"))))
    assert reads(script.fenced())[:3] == [(3, "x"), (3, "y"), (3, "z")]
    votes = {3: [ReadFailed(3, slot) for slot in range(3)], 4: [EntryFound(4, 0, stored(4))]}
    said = [effect for entry in order for effect in script.tell(*votes[entry])]
    assert sorted(writes(said)) == [(4, "a"), (4, "b"), (4, "c")]
    script.absent(5)
    assert script.tell(AddAcked(4, 1, "b"), AddAcked(4, 2, "c")) == [
        CloseRecoveredLedger(4, 50, (Fragment(0, ("x", "y", "z")), Fragment(4, ("a", "b", "c"))))
    ]


def test_a_ledger_that_ends_at_lac0_has_the_length_of_that_entry() -> None:
    script = Script()
    script.fenced(lac=3)
    assert writes(script.tell(EntryFound(3, 0, stored(3)))) == [], "it is stored; nothing to write back"
    assert script.absent(4) == [CloseRecoveredLedger(3, 40, (Fragment(0, ("a", "b", "c")),))]


def test_a_bookie_that_fails_is_replaced_in_memory_from_the_first_entry_not_stored() -> None:
    script = Script()
    script.fenced()
    script.tell(EntryFound(0, 0, stored(0)), AddAcked(0, 0, "a"), AddAcked(0, 1, "b"))
    script.tell(EntryFound(1, 0, stored(1)))
    said = script.tell(AddFailed(1, 2, "c"))
    assert writes(said) == [(1, "d")]
    more = script.tell(AddAcked(1, 0, "a"), AddAcked(1, 2, "d"))
    assert all(bookie in "abc" for _, bookie in reads([*said, *more])), "reads stay with the snapshot (M04)"
    assert script.absent(2) == [
        CloseRecoveredLedger(1, 20, (Fragment(0, ("a", "b", "c")), Fragment(1, ("a", "b", "d"))))
    ]


def test_a_change_before_anything_is_stored_replaces_the_last_fragment() -> None:
    script = Script()
    script.fenced()
    script.tell(EntryFound(0, 0, stored(0)))
    script.tell(AddFailed(0, 0, "a"), AddFailed(0, 1, "b"))
    script.absent(1)
    said = script.tell(AddAcked(0, 0, "d"), AddAcked(0, 1, "e"))
    assert said == [CloseRecoveredLedger(0, 10, (Fragment(0, ("d", "e", "c")),))]


def test_without_a_spare_the_write_back_goes_on_while_a_quorum_is_possible() -> None:
    script = Script(spares="")
    script.fenced()
    script.tell(EntryFound(0, 0, stored(0)), EntryFound(1, 0, stored(1)))
    assert script.tell(AddFailed(0, 2, "c")) == []
    said = script.tell(AddAcked(0, 0, "a"), AddAcked(0, 1, "b"))
    assert {bookie for _, bookie in writes(said)} <= {"a", "b"}
    assert ReportRecoveryFailure(RecoveryFailure.NOT_STORED, -1) in script.tell(AddFailed(1, 1, "b"))


def test_the_end_that_is_stored_is_the_end_that_is_told() -> None:
    script = Script()
    script.fenced()
    script.absent(0)
    theirs = msgspec.structs.replace(record(), state="closed", last_entry=8, length=90)
    assert script.tell(LedgerRecordClosed(theirs)) == [FinishRecovery(theirs)]
    assert script.core.state is RecoveryState.DONE


def test_a_refused_close_aborts() -> None:
    script = Script()
    script.fenced()
    script.absent(0)
    assert script.tell(RecoveredCloseRefused()) == [ReportRecoveryFailure(RecoveryFailure.CLOSE_REFUSED, -1)]


def test_no_more_than_a_batch_is_read_ahead_of_what_is_stored() -> None:
    script = Script(batch=3)
    assert {entry for entry, _ in reads(script.fenced())} == {0, 1, 2}
    said = script.tell(EntryFound(0, 0, stored(0)), EntryFound(1, 0, stored(1)))
    assert reads(said) == []
    said = script.tell(AddAcked(0, 0, "a"), AddAcked(0, 1, "b"))
    assert {entry for entry, _ in reads(said)} == {3}


def test_recovery_begins_only_on_a_record_in_recovery() -> None:
    with pytest.raises(AssertionError, match="begins after the record is IN_RECOVERY"):
        LedgerRecovery(msgspec.structs.replace(record(), state="open"), lambda _: None)


def test_no_more_is_read_than_one_entry_beyond_the_last_that_a_fenced_bookie_knows_of() -> None:
    """300 topics with a ledger of one entry were 9,600 reads of each bookie, at 32 a ledger."""
    script = Script(batch=32)
    assert script.tell(LedgerFencedAtBookie(0, -1, 0)) == []
    assert sorted(reads(script.tell(LedgerFencedAtBookie(1, -1, -1)))) == [(e, b) for e in (0, 1) for b in "abc"]
    assert reads(script.tell(EntryFound(0, 0, stored(0)))) == [], "entry 1 is asked for already"
    assert not reads(script.absent(1)), "the end is known"
    assert script.core.end == 0


def test_an_entry_that_no_fenced_bookie_told_of_is_kept_and_the_next_one_is_read() -> None:
    """The bookie that did not answer to the fence has it: what the others know is a hint, and no vote."""
    script = Script(batch=32)
    script.tell(LedgerFencedAtBookie(0, -1, -1))
    assert sorted(reads(script.tell(LedgerFencedAtBookie(1, -1, -1)))) == [(0, b) for b in "abc"]
    said = script.tell(EntryMissing(0, 0), EntryFound(0, 2, stored(0)))
    assert sorted(reads(said)) == [(1, b) for b in "abc"]
    assert {entry for entry, _ in writes(said)} == {0}
    script.absent(1)
    assert script.core.end == 0


def test_the_entry_at_the_lac_is_read_also_when_bookies_know_of_none() -> None:
    script = Script(batch=32)
    script.tell(LedgerFencedAtBookie(0, 5, -1))
    assert {entry for entry, _ in reads(script.tell(LedgerFencedAtBookie(1, -1, 5)))} == {5, 6}
