"""The coverage rule, proven by brute force against what it is for."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from magnetar.ledger.writer_core import Striping
from magnetar.proto.errors import InvalidConfiguration

SHAPES = [(e, qw, qa) for e in range(1, 7) for qw in range(1, e + 1) for qa in range(1, qw + 1)]


def subsets(slots: range) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(slots, size) for size in range(len(slots) + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_covered_means_that_every_possible_ack_quorum_holds_a_fenced_bookie(shape: tuple[int, int, int]) -> None:
    striping = Striping(*shape)
    quorums = {quorum for ws in striping.write_sets for quorum in combinations(sorted(ws), striping.ack_quorum)}
    for unknown in subsets(range(striping.ensemble_size)):
        safe = all(not set(quorum) <= set(unknown) for quorum in quorums)
        assert striping.is_fence_complete(set(unknown)) == safe, f"unknown {unknown}"


def test_four_answers_of_six_can_cover_where_the_simple_formula_asks_for_five() -> None:
    striping = Striping(6, 3, 2)
    assert striping.is_fence_complete({0, 3})
    assert not striping.is_fence_complete({0, 1})


@pytest.mark.parametrize("shape", SHAPES)
def test_misses_for_negative_leave_fewer_bookies_than_an_ack_quorum(shape: tuple[int, int, int]) -> None:
    striping = Striping(*shape)
    rest = striping.write_quorum - striping.misses_proving_absence
    assert rest == striping.ack_quorum - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_run_length_counts_consecutive_entries_on_a_slot(shape: tuple[int, int, int]) -> None:
    striping = Striping(*shape)
    for entry in range(12):
        for slot in range(striping.ensemble_size):
            run = striping.count_consecutive_entries(entry, slot)
            counted = 0
            while counted < 20 and slot in striping.slots_of_entry(entry + counted):
                counted += 1
            assert min(run, 20) == counted


def test_entries_go_round_the_ensemble() -> None:
    assert [Striping(3, 2, 2).slots_of_entry(e) for e in range(4)] == [(0, 1), (1, 2), (2, 0), (0, 1)]


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2, 3), (3, 3, 0), (0, 0, 0), (1, 1, 2)])
def test_a_shape_that_breaks_e_qw_qa_is_refused_with_its_numbers(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidConfiguration, match="ensemble >= write >= ack") as caught:
        Striping(*shape)
    assert caught.value.fields["ensemble_size"] == str(shape[0])
