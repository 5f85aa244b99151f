"""Placement alone: against brute force ; weights, quarantine, and the shape that missing bookies leave."""

import random
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.ledger.placement_core import (
    BOOKIE_WEIGHT_RATIO_MAX,
    UNKNOWN_RACK,
    BookieCandidate,
    BookieQuarantine,
    ChosenBookies,
    PlacementFailure,
    RackRule,
    StripingReduction,
    choose_bookies,
    compute_candidate_weights,
    reduce_striping,
)
from magnetar.ledger.writer_core import Striping

RACKS = ("/a", "/b", "/c", "/d")


@st.composite
def puzzles(draw: st.DrawFn) -> tuple[list[BookieCandidate], int, dict[int, str], int, RackRule]:
    count = draw(st.integers(1, 4))
    closed = draw(st.integers(0, 5 - count))
    slots = draw(st.permutations(range(count + closed)))[:closed]
    existing = {slot: draw(st.sampled_from((*RACKS, UNKNOWN_RACK))) for slot in sorted(slots)}
    quorum = draw(st.integers(1, count + closed))
    candidates = [
        BookieCandidate(f"b{n}", draw(st.sampled_from(RACKS)), draw(st.integers(0, 9)), draw(st.booleans()))
        for n in range(draw(st.integers(0, 6)))
    ]
    return candidates, count, existing, quorum, RackRule(draw(st.integers(1, 4)), draw(st.booleans()))


def covers(racks: dict[int, str], quorum: int, racks_min: int) -> bool:
    """Whether every write set has so many racks; said once more, without the code under test."""
    size, needed = len(racks), min(racks_min, quorum)
    if needed <= 1:
        return True
    for first in range(size):
        seen = {racks[(first + i) % size] for i in range(quorum)} - {UNKNOWN_RACK}
        if len(seen) < needed:
            return False
    return True


def filled(existing: dict[int, str], count: int, racks: list[str]) -> dict[int, str]:
    slots = [slot for slot in range(count + len(existing)) if slot not in existing]
    return {**existing, **dict(zip(slots, racks, strict=True))}


@given(puzzles(), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None)
def test_the_choice_keeps_the_minimum_of_racks_whenever_any_choice_does(
    puzzle: tuple[list[BookieCandidate], int, dict[int, str], int, RackRule], seed: int
) -> None:
    candidates, count, existing, quorum, rule = puzzle
    found = choose_bookies(
        candidates, count, rng=random.Random(seed), existing=existing, write_quorum=quorum, rule=rule
    )  # fmt: skip
    rack = {each.bookie: each.rack for each in candidates}

    def possible(pool: list[BookieCandidate]) -> bool:
        return any(
            covers(filled(existing, count, [each.rack for each in picked]), quorum, rule.racks_min)
            for picked in permutations(pool, count)
        )

    if len(candidates) < count:
        assert found is PlacementFailure.BOOKIES
        return
    well = [each for each in candidates if not each.quarantined]
    if found is PlacementFailure.RACKS:
        assert rule.enforce
        assert not possible(candidates)
        return
    assert isinstance(found, ChosenBookies)
    assert len(set(found.bookies)) == count
    kept = covers(filled(existing, count, [rack[bookie] for bookie in found.bookies]), quorum, rule.racks_min)
    assert kept is not found.racks_short
    assert kept or not rule.enforce
    flapping = sum(each.quarantined for each in candidates if each.bookie in found.bookies)
    if not (rule.enforce and not possible(well)):
        assert flapping == max(0, count - len(well)), "one in quarantine is the last resort"
    if len(well) >= count and possible(well):
        assert kept


@given(st.lists(st.sampled_from(RACKS), min_size=1, max_size=7), st.integers(1, 5), st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None)
def test_without_a_minimum_there_are_as_many_racks_as_there_can_be(racks: list[str], count: int, seed: int) -> None:
    candidates = [BookieCandidate(f"b{n}", rack) for n, rack in enumerate(racks)]
    found = choose_bookies(candidates, count, rng=random.Random(seed))
    if len(racks) < count:
        assert found is PlacementFailure.BOOKIES
        return
    assert isinstance(found, ChosenBookies)
    chosen = Counter(racks[int(bookie[1:])] for bookie in found.bookies)
    assert len(chosen) == min(count, len(set(racks)))
    spare = Counter(racks) - chosen
    assert all(chosen[many] - chosen[few] <= 1 for many in chosen for few in spare), "no rack has more than it must"


@given(st.lists(st.sampled_from(RACKS), min_size=1, max_size=6), st.integers(0, 2), st.integers(0, 1 << 30))
def test_who_replaces_stands_on_a_rack_that_the_others_do_not_have(racks: list[str], slot: int, seed: int) -> None:
    rest = dict(zip([each for each in range(3) if each != slot], ("/a", "/b"), strict=True))
    found = choose_bookies(
        [BookieCandidate(f"b{n}", rack) for n, rack in enumerate(racks)], 1, rng=random.Random(seed), existing=rest
    )  # fmt: skip
    assert isinstance(found, ChosenBookies)
    assert (racks[int(found.bookies[0][1:])] in rest.values()) is ({*racks} <= {"/a", "/b"})


def test_an_enforced_minimum_takes_a_bookie_out_of_quarantine_rather_than_nobody() -> None:
    candidates = [BookieCandidate("x", "/a"), BookieCandidate("y", "/a"), BookieCandidate("z", "/b", quarantined=True)]
    rng = random.Random(1)
    relaxed = choose_bookies(candidates, 2, rng=rng, rule=RackRule(2))
    assert isinstance(relaxed, ChosenBookies)
    assert (set(relaxed.bookies), relaxed.racks_short) == ({"x", "y"}, True)
    strict = choose_bookies(candidates, 2, rng=rng, rule=RackRule(2, enforce=True))
    assert isinstance(strict, ChosenBookies)
    assert "z" in strict.bookies
    assert choose_bookies(candidates[:2], 2, rng=rng, rule=RackRule(2, enforce=True)) is PlacementFailure.RACKS


def test_bookies_are_drawn_by_their_free_disk_but_an_empty_one_is_not_hammered() -> None:
    candidates = [BookieCandidate(f"b{n}", "/a", 100) for n in range(4)] + [BookieCandidate("new", "/a", 100_000)]
    assert compute_candidate_weights(candidates)["new"] == BOOKIE_WEIGHT_RATIO_MAX
    rng = random.Random(7)
    draws: Counter[str] = Counter()
    for _ in range(2000):
        found = choose_bookies(candidates, 1, rng=rng)
        assert isinstance(found, ChosenBookies)
        draws.update(found.bookies)
    assert draws["new"] == pytest.approx(2000 * 3 / 7, rel=0.1)
    assert draws["b0"] == pytest.approx(2000 / 7, rel=0.2)
    assert compute_candidate_weights(
        [BookieCandidate("a", "/a", 50), BookieCandidate("b", "/a")]
    ) == {"a": 1.0, "b": 1.0}


# ------------------------------------------------------------------------------------------ quarantine
def test_repeated_failures_lengthen_a_quarantine_up_to_a_bound_and_time_heals() -> None:
    quarantine, now = BookieQuarantine(10, 35), 0.0
    for length in (10, 20, 35, 35):
        quarantine.record_failure("b", now)
        quarantine.record_failure("b", now)  # of the same trouble: every append on its way fails
        assert quarantine.is_quarantined("b", now + length - 1)
        assert not quarantine.is_quarantined("b", now + length)
        assert quarantine.has_failed_lately("b", now + 9)
        assert not quarantine.has_failed_lately("b", now + 10)
        now += length
    quarantine.record_failure("b", now + 35)  # well for so long
    assert quarantine.is_quarantined("b", now + 44)
    assert not quarantine.is_quarantined("b", now + 45)


def test_a_restart_ends_a_quarantine_but_not_the_memory_of_what_led_to_it() -> None:
    quarantine = BookieQuarantine(10, 100)
    quarantine.record_failure("b", 0)
    quarantine.on_bookie_restarted("b", 1)
    assert quarantine.quarantined_bookies(1) == []
    quarantine.record_failure("b", 2)
    assert quarantine.quarantined_bookies(21) == ["b"]
    assert quarantine.quarantined_bookies(22) == []


# ------------------------------------------------------------------------------------------ shape
@pytest.mark.parametrize("shape", [(3, 3, 2), (5, 3, 2), (5, 3, 3), (4, 2, 1), (1, 1, 1)])
def test_missing_bookies_shrink_the_ensemble_never_the_ack_quorum_and_copies_only_when_that_is_allowed(
    shape: tuple[int, int, int],
) -> None:
    wanted = Striping(*shape)
    for well in range(wanted.ensemble_size + 2):
        assert reduce_striping(wanted, well, StripingReduction.NOTHING) is wanted
        fewer, least = reduce_striping(
            wanted, well, StripingReduction.BOOKIES
        ), reduce_striping(wanted, well, StripingReduction.COPIES)
        assert (fewer.write_quorum, fewer.ack_quorum) == shape[1:]
        assert least.ack_quorum == wanted.ack_quorum
        if well >= wanted.ensemble_size:
            assert fewer is least is wanted
        elif well >= wanted.write_quorum:
            assert fewer.ensemble_size == least.ensemble_size == well
            assert least.write_quorum == wanted.write_quorum
        elif well >= wanted.ack_quorum:
            assert fewer is wanted
            assert (least.ensemble_size, least.write_quorum) == (well, well)
        else:
            assert fewer is least is wanted
