"""The cores of a ledger keep every promise in schedules of the protocol's simulation, and a defect of
docs/design/defects.md that is planted into them makes one fail. Where two entries are enough to show it, they do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from magnetar.ledger.writer_core import PendingAdds, PendingAddWithPayload, SendAdd, Striping
from tests.compiled import replaces_code
from tests.mutants.hunt import hunt
from tests.simulation.protocol.bookie import Rules
from tests.simulation.protocol.options import draw
from tests.simulation.protocol.run import run_protocol

SEEDS = 600


def test_sound_schedules_keep_every_promise() -> None:
    """Some of those of tests/simulation/protocol: they are run on the compiled twin here."""
    assert [each.failures for each in map(run_protocol, range(1, 101)) if each.failures] == []


@replaces_code
def test_m01_recovery_reads_that_do_not_fence_lose_entries() -> None:
    assert hunt("M01", SEEDS).killed


@replaces_code
def test_m02_a_lower_bound_before_the_last_fragment_breaks_recovery() -> None:
    assert hunt("M02", SEEDS).killed


@replaces_code
def test_m03_ensembles_persisted_during_recovery_lose_entries() -> None:
    assert hunt("M03", SEEDS).killed


@replaces_code
def test_m04_recovery_reads_from_the_changed_ensemble_lose_entries() -> None:
    assert hunt("M04", SEEDS).killed


@replaces_code
def test_m05_a_negative_on_one_miss_too_few_loses_entries() -> None:
    assert hunt("M05", SEEDS).killed


@replaces_code
def test_m05b_silence_counted_as_a_vote_loses_entries() -> None:
    assert hunt("M05b", SEEDS).killed


def test_m06_errors_told_as_missing_lose_entries() -> None:
    damaged = (replace(drawn, times={**drawn.times, "damage": 3}) for drawn in map(draw, range(1, SEEDS)))
    rules = replace(Rules(), damage_is_unknown=False)
    assert any(run_protocol(each.seed, options=each, rules=rules).failures for each in damaged)


@replaces_code
def test_m10_acks_that_confirm_while_the_end_is_on_its_way_lie_beyond_it() -> None:
    assert hunt("M10", SEEDS).killed


@replaces_code
def test_m12_an_ensemble_that_the_metadata_never_got_loses_entries() -> None:
    assert hunt("M12", SEEDS).killed


@replaces_code
def test_m18_closing_at_lap_makes_phantoms() -> None:
    assert hunt("M18", SEEDS).killed


@replaces_code
def test_m18b_confirming_out_of_order_is_seen() -> None:
    assert hunt("M18b", SEEDS).killed


@replaces_code
def test_m22_a_lac_taken_as_the_end_fails_the_test_of_the_bound() -> None:
    assert hunt("M22", SEEDS).killed


def _stored_ahead() -> tuple[PendingAdds[PendingAddWithPayload[str]], list[PendingAddWithPayload[str]]]:
    """A change under way: entry 0 has its quorum without slot 0, entry 1 has it only with slot 0, which is replaced."""
    adds: PendingAdds[PendingAddWithPayload[str]] = PendingAdds(Striping(3, 3, 2), ("a", "b", "c"))
    adds.add_and_make_sends(PendingAddWithPayload("0"), 1)
    adds.add_and_make_sends(PendingAddWithPayload("1"), 1)
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


def test_m11_every_pending_entry_is_unacked_before_any_is_confirmed() -> None:
    assert _replaced_then_drained() == [0], "entry 1 is not confirmed by the bookie that was replaced"


@replaces_code
def test_m11_draining_inside_the_loop_confirms_by_the_replaced_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(
        self: PendingAdds[PendingAddWithPayload[str]], ensemble: tuple[str, ...]
    ) -> list[SendAdd[PendingAddWithPayload[str]]]:
        self.ensemble, self.frozen = ensemble, False
        for add in list(self._adds.values()):
            for slot in self.striping.slots_of_entry(add.entry):
                if add.sent.get(slot) != ensemble[slot]:
                    add.acks.discard(slot)
            self.take_confirmed()
        return []

    monkeypatch.setattr(PendingAdds, "replace_ensemble", careless)
    assert _replaced_then_drained() != [0]
