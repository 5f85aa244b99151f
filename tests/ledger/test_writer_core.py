"""The writer's core as a table: events in, effects out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from magnetar.ledger.writer_core import (
    AddAcked,
    AddFailed,
    AddRefused,
    ChangeEnsemble,
    CloseLedger,
    ConfirmEntry,
    EntryOutcome,
    FailEntry,
    LedgerCloseRefused,
    LedgerCloseUnknown,
    LedgerEnded,
    PendingAddWithPayload,
    QuorumTimedOut,
    SendAdd,
    Striping,
    WriterCore,
    WriterEffect,
    WriterFact,
    WriterState,
)

NAMES = ("a", "b", "c")


class Script:
    """A 3/3/2 writer and what it said, shortened: ("confirm", entry), ("fail", entry, why), ("close", end, length),
    ("change", first entry, failed), and ("send", entry, bookie). No ensemble changes unless it says how many."""

    def __init__(self, *payloads: bytes, shape: tuple[int, int, int] = (3, 3, 2), changes_max: int = 0) -> None:
        self.core: WriterCore[PendingAddWithPayload[bytes]] = WriterCore(
            Striping(*shape), NAMES[: shape[0]], changes_max=changes_max
        )
        for payload in payloads:
            self.core.append(PendingAddWithPayload(payload), len(payload))

    def append_for_listener(self, payload: bytes) -> list[tuple[object, ...]]:
        return self._short(self.core.append(PendingAddWithPayload(payload), len(payload)))

    def tell(self, fact: WriterFact) -> list[tuple[object, ...]]:
        return self._short(self.core.receive(fact))

    def acked(self, entry: int, slots: str) -> list[tuple[object, ...]]:
        return [said for name in slots for said in self.tell(AddAcked(entry, NAMES.index(name), name))]

    def failed(self, entry: int, name: str) -> list[tuple[object, ...]]:
        return self.tell(AddFailed(entry, NAMES.index(name), name))

    def close(self) -> list[tuple[object, ...]]:
        return self._short(self.core.close())

    def _short(self, effects: Sequence[WriterEffect[PendingAddWithPayload[bytes]]]) -> list[tuple[object, ...]]:
        self.core.check()
        said: list[tuple[object, ...]] = []
        for effect in effects:
            if isinstance(effect, ConfirmEntry):
                said.append(("confirm", effect.add.entry))
            elif isinstance(effect, FailEntry):
                said.append(("fail", effect.add.entry, effect.why))
            elif isinstance(effect, SendAdd):
                said.append(("send", effect.add.entry, effect.bookie))
            elif isinstance(effect, ChangeEnsemble):
                said.append(("change", *effect))
            elif isinstance(effect, CloseLedger):
                said.append(("close", effect.last_entry, effect.length))
        return said


def test_closing_waits_for_what_is_pending_and_ends_at_lac() -> None:
    script = Script(b"one", b"three")
    assert script.close() == []
    assert script.core.state is WriterState.DRAINING
    assert script.acked(0, "ab") == [("confirm", 0)]
    assert script.acked(1, "bc") == [("confirm", 1), ("close", 1, 8)]
    assert script.tell(LedgerEnded(1, 8)) == []
    assert script.core.state is WriterState.CLOSED


def test_closing_an_idle_writer_closes_at_once() -> None:
    assert Script().close() == [("close", -1, 0)]


def test_after_a_bookie_failed_the_others_still_confirm_in_order_and_then_the_ledger_ends() -> None:
    script = Script(b"x", b"y", b"z")
    assert script.failed(0, "a") == []
    assert script.acked(1, "bc") == []
    assert script.acked(0, "bc") == [("confirm", 0), ("confirm", 1)]
    assert script.acked(2, "bc") == [("confirm", 2), ("close", 2, 3)]


def test_when_the_first_pending_entry_cannot_be_stored_the_ledger_ends_before_it() -> None:
    script = Script(b"x", b"y", b"z")
    script.acked(0, "ab")
    script.acked(2, "abc")
    assert script.failed(1, "a") == []
    assert script.failed(1, "b") == [("close", 0, 1)]
    assert script.acked(1, "c") == []
    assert script.acked(1, "ab") == [], "frozen: the end is on its way (M10)"
    assert script.tell(LedgerEnded(0, 1)) == [
        ("fail", 1, EntryOutcome.NOT_STORED),
        ("fail", 2, EntryOutcome.NOT_STORED),
    ]


def test_an_ensemble_of_one_ends_with_its_bookie() -> None:
    script = Script(b"x", shape=(1, 1, 1))
    assert script.failed(0, "a") == [("close", -1, 0)]
    assert script.tell(LedgerEnded(-1, 0)) == [("fail", 0, EntryOutcome.NOT_STORED)]


def test_a_ledger_that_another_closed_further_on_confirms_what_it_kept_and_fails_the_rest_as_unknown() -> None:
    script = Script(b"x", b"y", b"z")
    script.acked(0, "ab")
    script.failed(1, "a")
    assert script.failed(1, "b") == [("close", 0, 1)]
    assert script.tell(LedgerEnded(1, 2)) == [("confirm", 1), ("fail", 2, EntryOutcome.FENCED)]


@pytest.mark.parametrize("why", [EntryOutcome.FENCED, EntryOutcome.UNAUTHORIZED])
def test_a_refusal_poisons_at_once_and_closing_asks_for_the_end(why: EntryOutcome) -> None:
    script = Script(b"x", b"y")
    assert script.tell(AddRefused(why)) == [("fail", 0, why), ("fail", 1, why)]
    assert script.acked(0, "abc") == []
    assert script.failed(0, "a") == []
    assert script.core.state is WriterState.POISONED
    assert script.close() == [("close", -1, 0)]
    assert script.tell(LedgerEnded(5, 99)) == []
    assert script.core.end == LedgerEnded(5, 99)


def test_a_ledger_in_recovery_cannot_be_closed_yet_and_pending_entries_are_unknown() -> None:
    script = Script(b"x")
    script.failed(0, "a")
    assert script.failed(0, "b") == [("close", -1, 0)]
    assert script.tell(LedgerCloseRefused()) == [("fail", 0, EntryOutcome.FENCED)]
    assert script.close() == [("close", -1, 0)], "asked again"
    assert script.tell(LedgerCloseUnknown()) == []
    assert script.core.why is EntryOutcome.UNKNOWN


def test_a_time_out_while_the_end_is_on_its_way_leaves_the_end_to_come() -> None:
    script = Script(b"x", shape=(1, 1, 1))
    script.failed(0, "a")
    assert script.tell(QuorumTimedOut(0)) == [("fail", 0, EntryOutcome.UNKNOWN)]
    assert script.core.state is WriterState.CLOSING
    assert script.tell(LedgerEnded(-1, 0)) == []


def test_a_quorum_time_out_poisons_unless_the_entry_was_confirmed_meanwhile() -> None:
    script = Script(b"x", b"y")
    script.acked(0, "ab")
    assert script.tell(QuorumTimedOut(0)) == []
    assert script.tell(QuorumTimedOut(1)) == [("fail", 1, EntryOutcome.UNKNOWN)]
    assert script.core.state is WriterState.POISONED


def test_a_ledger_that_ends_before_a_confirmed_entry_is_our_bug_and_stops() -> None:
    script = Script(b"x")
    script.acked(0, "ab")
    script.close()
    with pytest.raises(AssertionError, match="never ends before a confirmed entry"):
        script.tell(LedgerEnded(-1, 0))


def test_abandoning_fails_what_is_pending_as_unknown_and_closes_nothing() -> None:
    script = Script(b"x")
    assert script._short(script.core.abandon()) == [("fail", 0, EntryOutcome.UNKNOWN)]
    assert script._short(script.core.abandon()) == []


def test_only_an_open_writer_appends() -> None:
    script = Script()
    script.close()
    with pytest.raises(AssertionError, match="only an open writer"):
        script.core.append(PendingAddWithPayload(b"x"), 1)
