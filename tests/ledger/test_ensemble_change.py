"""Ensemble changes of the writer's core, step by step.

Every interleaving: tests/exhaustive and tests/simulation/protocol; rules that are broken: test_sabotage.py.
"""

from __future__ import annotations

from magnetar.ledger import writer_core as w
from magnetar.ledger.writer_core import (
    AddRefused,
    EnsembleChanged,
    EnsembleChangeRefused,
    EnsembleChangeUnknown,
    EntryOutcome,
    LedgerCloseRefused,
    LedgerEnded,
    NoReplacementFound,
    QuorumTimedOut,
    WriterState,
)
from tests.ledger.test_writer_core import Script

CHANGE_0 = ("change", 0, ((0, "a"),))


def test_a_failed_bookie_freezes_confirms_until_the_new_ensemble_is_committed_then_sends_to_it() -> None:
    script = Script(b"x", b"y", changes_max=9)
    assert script.failed(0, "a") == [CHANGE_0]
    assert script.core.state is WriterState.CHANGING
    assert script.acked(0, "bc") == [], "frozen (M10)"
    assert script.append_for_listener(b"z") == [("send", 2, "c"), ("send", 2, "b")], (
        "appends go on, to those that are well"
    )
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == [
        ("send", 0, "d"), ("send", 1, "d"), ("send", 2, "d"), ("confirm", 0),
    ]  # fmt: skip
    assert script.core.state is WriterState.OPEN
    assert script.acked(1, "bc") == [("confirm", 1)]


def test_the_ack_of_a_replaced_bookie_counts_no_more_before_or_after() -> None:
    script = Script(b"x", b"y", changes_max=9)
    script.acked(1, "ab")
    script.failed(0, "a")
    script.acked(0, "bc")
    assert script.tell(EnsembleChanged(("d", "b", "c")))[-1:] == [("confirm", 0)], "entry 1 has only b"
    assert script.acked(1, "a") == [], "late, and of no use"
    assert script.acked(1, "c") == [("confirm", 1)]


def test_a_failure_of_an_entry_that_is_confirmed_changes_the_ensemble_at_once() -> None:
    script = Script(b"x", changes_max=9)
    assert script.acked(0, "bc") == [("confirm", 0)]
    assert script.failed(0, "a") == [("change", 1, ((0, "a"),))]
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == []
    assert script.append_for_listener(b"y") == [("send", 1, "b"), ("send", 1, "c"), ("send", 1, "d")]


def test_a_second_failure_is_handled_in_the_same_freeze() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    assert script.failed(0, "b") == [], "one change at a time"
    script.acked(0, "c")
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == [("change", 0, ((1, "b"),))]
    assert script.core.adds.frozen
    assert script.tell(EnsembleChanged(("d", "e", "c"))) == [("send", 0, "d"), ("send", 0, "e")]
    assert script.core.changes == 2
    assert script.tell(w.AddAcked(0, 0, "d")) == [("confirm", 0)], "the ack of c, in the freeze, counts"


def test_many_failed_adds_of_one_bookie_are_one_change() -> None:
    script = Script(b"x", b"y", changes_max=9)
    assert script.failed(0, "a") == [CHANGE_0]
    assert script.failed(1, "a") == []
    script.tell(EnsembleChanged(("d", "b", "c")))
    assert script.failed(1, "a") == [], "it does not stand there any more"


def test_when_nobody_can_replace_the_others_confirm_and_the_ledger_ends() -> None:
    script = Script(b"x", b"y", changes_max=9)
    script.failed(0, "a")
    script.acked(0, "bc")
    assert script.tell(NoReplacementFound()) == [("confirm", 0)]
    assert script.core.state is WriterState.DRAINING
    assert script.acked(1, "bc") == [("confirm", 1), ("close", 1, 2)]


def test_some_replaced_is_enough_while_every_write_set_keeps_its_quorum() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    script.failed(0, "b")
    script.tell(EnsembleChanged(("d", "b", "c")))
    assert script.tell(NoReplacementFound()) == [("send", 0, "d")], "b stays, and is sent nothing"
    assert script.core.state is WriterState.OPEN
    assert script.append_for_listener(b"y") == [("send", 1, "c"), ("send", 1, "d")]
    assert script.failed(0, "b") == [], "it is known to have failed"
    assert script.failed(1, "c") == [("change", 0, ((1, "b"), (2, "c")))], "asked about again with the next"
    assert script.tell(NoReplacementFound()) == [("close", -1, 0)]


def test_some_replaced_is_not_enough_where_a_write_set_loses_its_quorum() -> None:
    script = Script(b"x", changes_max=9, shape=(3, 3, 3))
    script.failed(0, "a")
    script.failed(0, "b")
    script.tell(EnsembleChanged(("d", "b", "c")))
    assert script.tell(NoReplacementFound()) == [("send", 0, "d"), ("close", -1, 0)]


# ------------------------------------------------------------------------------ what else may happen meanwhile
def test_closing_while_the_ensemble_changes_waits_for_it_and_then_drains() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    assert script.close() == []
    assert script.core.state is WriterState.SETTLING
    assert not script.core.accepts_appends
    assert script.failed(0, "b") == [], "no further change for a ledger that ends"
    assert script.acked(0, "c") == []
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == [("send", 0, "d")]
    assert script.core.state is WriterState.DRAINING
    assert script.tell(w.AddAcked(0, 0, "d")) == [("confirm", 0), ("close", 0, 1)]


def test_closing_an_idle_writer_while_its_ensemble_changes_ends_it_when_the_change_is_known() -> None:
    script = Script(b"x", changes_max=9)
    script.acked(0, "bc")
    script.failed(0, "a")
    assert script.close() == []
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == [("close", 0, 1)]


def test_abandoning_while_the_ensemble_changes_leaves_the_entries_unknown_and_ignores_the_outcome() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    assert script._short(script.core.abandon()) == [("fail", 0, EntryOutcome.UNKNOWN)]
    assert script.tell(EnsembleChanged(("d", "b", "c"))) == []
    assert script.core.state is WriterState.POISONED


def test_a_fence_while_the_ensemble_changes_poisons_and_its_outcome_is_ignored() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    assert script.tell(AddRefused(EntryOutcome.FENCED)) == [("fail", 0, EntryOutcome.FENCED)]
    assert script.tell(EnsembleChangeRefused()) == []
    assert script.close() == [("close", -1, 0)]
    assert script.tell(LedgerEnded(0, 1)) == []


def test_a_quorum_time_out_while_the_ensemble_changes_poisons_as_unknown() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    assert script.tell(QuorumTimedOut(0)) == [("fail", 0, EntryOutcome.UNKNOWN)]
    assert script.tell(EnsembleChangeUnknown()) == []
    assert script.core.why is EntryOutcome.UNKNOWN


def test_a_change_whose_outcome_stays_unknown_poisons() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    script.acked(0, "bc")
    assert script.tell(EnsembleChangeUnknown()) == [("fail", 0, EntryOutcome.UNKNOWN)], (
        "never confirmed: it may lie elsewhere"
    )
    assert script.core.state is WriterState.POISONED


def test_a_change_that_finds_the_ledger_closed_adopts_its_end() -> None:
    script = Script(b"x", b"y", changes_max=9)
    script.failed(0, "a")
    assert script.tell(EnsembleChangeRefused()) == [("close", -1, 0)]
    assert script.tell(LedgerEnded(0, 1)) == [("confirm", 0), ("fail", 1, EntryOutcome.FENCED)]


def test_a_change_that_finds_the_ledger_in_recovery_ends_fenced() -> None:
    script = Script(b"x", changes_max=9)
    script.failed(0, "a")
    script.tell(EnsembleChangeRefused())
    assert script.tell(LedgerCloseRefused()) == [("fail", 0, EntryOutcome.FENCED)]
