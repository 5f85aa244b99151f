"""The miniature finds what it should: one defect of docs/design/defects.md at a time, and schedules that break on it.

`test_sound_schedules_keep_every_promise` is the guard; each mutant below must make some schedule of `SEEDS` fail.
"""

from __future__ import annotations

import msgspec
import pytest

from magnetar.ledger.pending_core import PayloadAdd, PendingAdds, SendAdd, Striping
from magnetar.ledger.reader_core import ReadableEntryBound
from magnetar.ledger.recovery_core import EntryVotes, Recovery
from magnetar.ledger.writer_core import ChangeEnsemble, CloseLedger, EnsembleChanged, Writer, WriterState
from tests.compiled import replaces_code
from tests.ledger.miniature import Miniature, Sabotage
from tests.ledger.test_reader_core import test_m22_the_lac_of_an_open_ledger_is_a_lower_bound_and_never_its_end

SEEDS = 3000


def first_failure(sabotage: Sabotage | None = None, shape: tuple[int, int, int] | None = None) -> str | None:
    for seed in range(2 * SEEDS):
        try:
            Miniature(seed, sabotage, shape).run()
        except AssertionError as error:
            return str(error)
    return None


def test_sound_schedules_keep_every_promise() -> None:
    acked = changed = recovered = stopped = 0
    for seed in range(SEEDS):
        mini = Miniature(seed)
        mini.run()
        acked += len(mini.acked)
        changed += mini.writer_changes
        recovered += len(mini.record.fragments) - len(mini.first_record.fragments) > mini.writer_changes
        stopped += bool(mini.failed)
    assert acked > 2 * SEEDS, "schedules confirm entries"
    assert changed > SEEDS // 10, "writers replace bookies"
    assert recovered > SEEDS // 200, "recoveries replace bookies"
    assert stopped > SEEDS // 10, "writers are stopped with entries under way"


def test_the_same_seed_plays_the_same_schedule() -> None:
    def play(seed: int) -> tuple[object, ...]:
        mini = Miniature(seed)
        mini.run()
        return mini.events, mini.acked, mini.failed, msgspec.json.encode(mini.record)

    assert [play(seed) for seed in range(50)] == [play(seed) for seed in range(50)]


def test_m01_recovery_reads_that_do_not_fence_lose_entries() -> None:
    assert first_failure(Sabotage(reads_without_fence=True), shape=(2, 2, 2))


def test_m02_a_lower_bound_before_the_last_fragment_breaks_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "_lower_bound", lambda self: max([*self._lacs, -1]))
    assert first_failure()


def test_m03_ensembles_persisted_during_recovery_lose_entries() -> None:
    assert first_failure(Sabotage(ensembles_persisted_early=True))


def test_m04_recovery_reads_from_the_changed_ensemble_lose_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Recovery._replica

    def changed(self: Recovery, entry: int, slot: int) -> str:
        return self._adds.ensemble[slot] if entry >= self._last.first_entry else honest(self, entry, slot)

    monkeypatch.setattr(Recovery, "_replica", changed)
    assert first_failure()


def test_m05_a_negative_on_one_miss_too_few_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Striping, "misses_proving_absence", property(lambda self: max(1, self.write_quorum - self.ack_quorum))
    )
    assert first_failure()


def test_m05b_silence_counted_as_a_vote_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EntryVotes.verdict

    def careless(self: EntryVotes, misses_for_negative: int) -> object:
        if self.found is None and len(self.answered) >= misses_for_negative:
            self.missing |= self.answered
        return honest(self, misses_for_negative)

    monkeypatch.setattr(EntryVotes, "verdict", careless)
    assert first_failure()


def test_m06_errors_told_as_missing_lose_entries() -> None:
    assert first_failure(Sabotage(errors_told_as_missing=True))


@replaces_code
def test_m10_acks_that_confirm_while_the_end_is_on_its_way_lie_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PendingAdds.take_confirmed

    def thawed(self: PendingAdds[PayloadAdd[bytes]]) -> list[PayloadAdd[bytes]]:
        self.frozen, frozen = False, self.frozen
        try:
            return honest(self)
        finally:
            self.frozen = frozen

    monkeypatch.setattr(PendingAdds, "take_confirmed", thawed)
    assert first_failure()


def _stored_ahead() -> tuple[PendingAdds[PayloadAdd[str]], list[PayloadAdd[str]]]:
    """A change under way: entry 0 has its quorum without slot 0, entry 1 has it only with slot 0, which is replaced."""
    adds: PendingAdds[PayloadAdd[str]] = PendingAdds(Striping(3, 3, 2), ("a", "b", "c"))
    adds.add_with_sends(PayloadAdd("0"), 1)
    adds.add_with_sends(PayloadAdd("1"), 1)
    adds.frozen = True
    pending = list(adds._adds.values())
    pending[0].acks |= {1, 2}
    pending[1].acks |= {0, 1}
    return adds, pending


def _replaced_then_drained() -> list[int]:
    adds, _ = _stored_ahead()
    adds.replace_ensemble(("d", "b", "c"))
    adds.frozen = False
    return [add.entry for add in adds.take_confirmed()] if adds.lac < 0 else list(range(adds.lac + 1))


def test_m12_an_ensemble_that_the_metadata_never_got_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_only(self: Miniature, effect: ChangeEnsemble) -> None:
        free = [name for name in self.bookies if name not in self.record.fragments[-1].bookies]
        ensemble = list(self.record.fragments[-1].bookies)
        for (slot, _), other in zip(effect.failed, free, strict=False):
            ensemble[slot] = other
        self.messages.append(lambda: self._tell_writer(EnsembleChanged(tuple(ensemble))))

    monkeypatch.setattr(Miniature, "_change_by_writer", local_only)
    assert first_failure()


def test_m11_every_pending_entry_is_unacked_before_any_is_confirmed() -> None:
    assert _replaced_then_drained() == [0], "entry 1 is not confirmed by the bookie that was replaced"


@replaces_code
def test_m11_draining_inside_the_loop_confirms_by_the_replaced_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: PendingAdds[PayloadAdd[str]], ensemble: tuple[str, ...]) -> list[SendAdd[PayloadAdd[str]]]:
        self.ensemble, self.frozen = ensemble, False
        for add in list(self._adds.values()):
            for slot in self.striping.write_set(add.entry):
                if add.sent.get(slot) != ensemble[slot]:
                    add.acks.discard(slot)
            self.take_confirmed()
        return []

    monkeypatch.setattr(PendingAdds, "replace_ensemble", careless)
    assert _replaced_then_drained() != [0]


@replaces_code
def test_m18_closing_at_lap_makes_phantoms(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_lap(self: Writer[PayloadAdd[bytes]]) -> list[CloseLedger]:
        self.state = WriterState.CLOSING
        self.adds.frozen = True
        return [CloseLedger(self.adds.lap, self.adds.length)]

    monkeypatch.setattr(Writer, "_closing", at_lap)
    assert first_failure()


@replaces_code
def test_m18b_confirming_out_of_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(self: PendingAdds[PayloadAdd[bytes]]) -> list[PayloadAdd[bytes]]:
        done = [] if self.frozen else [a for a in self._adds.values() if len(a.acks) >= self.striping.ack_quorum]
        for add in done:
            del self._adds[add.entry]
            self.lac, self.length_confirmed = max(self.lac, add.entry), add.length
        return done

    monkeypatch.setattr(PendingAdds, "take_confirmed", eager)
    assert first_failure()


def test_m22_a_lac_taken_as_the_end_fails_the_test_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ReadableEntryBound.advance_lac

    def final(self: ReadableEntryBound, lac: int) -> None:
        honest(self, lac)
        self.closed = True

    monkeypatch.setattr(ReadableEntryBound, "advance_lac", final)
    with pytest.raises(AssertionError):
        test_m22_the_lac_of_an_open_ledger_is_a_lower_bound_and_never_its_end()
