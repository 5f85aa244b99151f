"""Which ranges a trigger reads: never back, never twice, never past the limits."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidRequest
from magnetar.spark_connector.offsets import (
    RECREATED_REASON,
    AvailableRange,
    MessageRange,
    find_batch_end,
    find_recreated_partitions,
    make_progress_report,
    offset_to_json,
    parse_incarnations,
    parse_offset,
    plan_readable_ranges,
    reset_recreated_partitions,
    split_into_task_ranges,
)

A, B, C = (
    ("persistent://public/default/t", 0),
    ("persistent://public/default/t", 1),
    ("persistent://public/default/u", 0),
)


def test_json_is_canonical_and_comes_back() -> None:
    index = {C: 3, B: 2, A: 1}
    assert list(offset_to_json(index)) == [A[0], C[0]]
    assert offset_to_json(index) == {A[0]: {"0": 1, "1": 2}, C[0]: {"0": 3}}
    assert parse_offset(offset_to_json(index)) == index


def test_without_limits_everything_is_read() -> None:
    available = {A: AvailableRange(0, 10, 100), B: AvailableRange(5, 7, 20)}
    assert find_batch_end({A: 4}, available, None, None) == {A: 10, B: 7}


def test_a_limit_is_split_in_proportion_to_what_waits() -> None:
    available = {A: AvailableRange(0, 300, 300), B: AvailableRange(0, 100, 100)}
    assert find_batch_end({A: 0, B: 0}, available, 40, None) == {A: 30, B: 10}


def test_a_byte_limit_takes_at_least_one_message() -> None:
    available = {A: AvailableRange(0, 10, 10_000_000)}
    assert find_batch_end({A: 0}, available, None, 1) == {A: 1}


def test_a_byte_limit_holds_where_everything_that_waits_was_trimmed() -> None:
    """Retention may pass an offset, and Trigger.AvailableNow's target: then nothing is held of what the range wants."""
    gone = AvailableRange(300, 300, 0)
    assert find_batch_end({A: 100}, {A: gone}, None, 1_000) == {A: 300}
    assert find_batch_end({A: 100}, {A: gone._replace(end=200)}, None, 1_000) == {A: 200}
    half = find_batch_end({A: 0, B: 0}, {A: gone, B: AvailableRange(0, 100, 10_000)}, None, 1_000)
    assert 0 < half[B] <= 40


def test_a_small_limit_still_reaches_every_partition_in_turn() -> None:
    available = {A: AvailableRange(0, 1_000, 1_000), B: AvailableRange(0, 1, 1)}
    at = {A: 0, B: 0}
    for _ in range(200):
        at = find_batch_end(at, available, 10, None)
    assert at == {A: 1_000, B: 1}


@given(
    starts=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 10_000), st.integers(0, 120)),
        min_size=1, max_size=5,
    ),
    most=st.integers(1, 200) | st.none(),
    most_bytes=st.integers(1, 20_000) | st.none(),
)  # fmt: skip
def test_limits_hold_and_nothing_goes_back(
    starts: list[tuple[int, int, int, int]], most: int | None, most_bytes: int | None
) -> None:
    available = {
        ("t", i): AvailableRange(trimmed, first + more, size) for i, (first, more, size, trimmed) in enumerate(starts)
    }
    begin = {("t", i): first for i, (first, *_) in enumerate(starts)}
    end = find_batch_end(begin, available, most, most_bytes)
    taken = sum(end[p] - begin[p] for p in begin)
    assert all(begin[p] <= end[p] <= available[p].end for p in begin)
    assert most is None or taken <= most
    assert taken > 0 or all(more == 0 for _, more, *_ in starts)


def test_what_retention_removed_is_named() -> None:
    found, lost = plan_readable_ranges({A: 2}, {A: 9}, {A: AvailableRange(5, 20, 0)})
    assert found == [MessageRange(A, 5, 9)]
    assert [(x.partition, x.wanted, x.there) for x in lost] == [(A, 2, 5)]


def test_a_topic_made_anew_is_named() -> None:
    _, lost = plan_readable_ranges({A: 100}, {A: 120}, {A: AvailableRange(0, 7, 0)})
    assert "made anew" in lost[0].reason


def test_a_topic_made_anew_is_read_from_its_beginning() -> None:
    available = {A: AvailableRange(0, 7, 70), B: AvailableRange(0, 50, 500)}
    begin = reset_recreated_partitions({A: 100, B: 40}, available)
    assert begin == {A: 0, B: 40}
    end = find_batch_end(begin, available, None, None)
    found, lost = plan_readable_ranges({A: 100, B: 40}, end, available)
    assert found == [MessageRange(A, 0, 7), MessageRange(B, 40, 50)]
    assert [(x.partition, x.wanted) for x in lost] == [(A, 100)]


NEW = AvailableRange(0, 50, 500, incarnation=9)


def test_json_names_incarnations_beside_the_indexes() -> None:
    index, made = {A: 1, B: 2, C: 3}, {A: 5, B: 6, C: 7}
    found = offset_to_json(index, made)
    assert found == {
        A[0]: {"0": 1, "1": 2}, C[0]: {"0": 3},
        "incarnations": {A[0]: 5, f"{A[0]}-partition-1": 6, C[0]: 7},
    }  # fmt: skip
    assert (parse_offset(found), parse_incarnations(found)) == (index, made)
    assert offset_to_json(index, {A: 5, B: 5})["incarnations"] == {A[0]: 5}
    assert parse_incarnations(offset_to_json(index)) == {A: 0, B: 0, C: 0}


@given(st.dictionaries(st.tuples(st.sampled_from([A[0], C[0]]), st.integers(0, 12)), st.integers(0, 9)))
def test_incarnations_come_back_whatever_is_known(made: dict[tuple[str, int], int]) -> None:
    index = dict.fromkeys(made, 1)
    found = offset_to_json(index, made)
    assert parse_offset(found) == index
    known = {p: at for p, at in made.items() if at}
    assert {p: at for p, at in parse_incarnations(found).items() if p in known} == known


@pytest.mark.parametrize("wrong", [[], 7, {"t": "x"}, {"t": None}])
def test_what_names_no_incarnations_is_no_offset(wrong: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_incarnations({A[0]: {"0": 1}, "incarnations": wrong})


@pytest.mark.parametrize("end", [3, 40, 50, 90])
def test_another_incarnation_is_lost_and_read_from_its_beginning_however_long_it_is(end: int) -> None:
    there, old = NEW._replace(end=end), {A: 5}
    assert [each.partition for each in find_recreated_partitions({A: 40}, {A: there}, old)] == [A]
    begin = reset_recreated_partitions({A: 40}, {A: there}, old)
    assert begin == {A: 0}
    found, lost = plan_readable_ranges({A: 40}, find_batch_end(begin, {A: there}, None, None), {A: there}, old, {A: 9})
    assert found == [MessageRange(A, 0, end, 9)]
    assert [(each.partition, each.wanted) for each in lost] == [(A, 40)]


def test_a_batch_that_was_planned_for_the_old_topic_reads_nothing_of_the_new_one() -> None:
    found, lost = plan_readable_ranges({A: 10}, {A: 20}, {A: NEW}, {A: 5}, {A: 5})
    assert found == []
    assert [(each.wanted, each.there, each.reason) for each in lost] == [(10, 20, RECREATED_REASON)]
    assert plan_readable_ranges({A: 20}, {A: 20}, {A: NEW}, {A: 5}, {A: 5}) == ([], []), "nothing of it was to be read"


def test_an_incarnation_that_is_not_known_is_no_other_one() -> None:
    for begun, planned in (({}, {}), ({}, {A: 9}), ({A: 9}, {A: 9})):
        assert plan_readable_ranges({A: 10}, {A: 20}, {A: NEW}, begun, planned) == ([MessageRange(A, 10, 20, 9)], [])
    assert reset_recreated_partitions({A: 10}, {A: NEW._replace(incarnation=0)}, {A: 5}) == {A: 10}


def test_a_report_has_the_lag_of_each_topic() -> None:
    found = make_progress_report({A: 40}, {A: NEW, B: AvailableRange(5, 10, 100), C: AvailableRange(0, 7, 70)})
    assert found["source"]["lagByTopic"] == {A[0]: 15, C[0]: 7}
    assert (found["source"]["lag"], found["source"]["lagBytes"]) == (22, 270)
    assert found[A[0]] == {"0": 50, "1": 10}
    assert parse_offset(found) == {A: 50, B: 10, C: 7}


def test_a_partition_that_is_gone_is_named_only_if_something_was_to_be_read() -> None:
    assert plan_readable_ranges({A: 5}, {A: 5}, {}) == ([], [])
    assert plan_readable_ranges({A: 5}, {A: 6}, {})[1][0].partition == A


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    least=st.integers(1, 20) | st.none(),
    most=st.integers(1, 50) | st.none(),
)
def test_tasks_cover_the_ranges_exactly_once(sizes: list[int], least: int | None, most: int | None) -> None:
    whole = [MessageRange(("t", i), 10, 10 + size) for i, size in enumerate(sizes)]
    tasks = split_into_task_ranges(whole, least, most)
    for r in whole:
        mine = [t for t in tasks if t.partition == r.partition]
        assert [mine[0].first, mine[-1].end] == [r.first, r.end]
        assert all(a.end == b.first for a, b in pairwise(mine))
        assert all(t.messages > 0 for t in mine)
    assert most is None or all(t.messages <= most for t in tasks)
    assert split_into_task_ranges(whole, least, most) == tasks
