from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.core.failover import ClusterFailoverCore


def used(core: ClusterFailoverCore, *rounds: str) -> list[int]:
    """`rounds`: a letter for each cluster, x where it does not answer."""
    found = []
    for each in rounds:
        found.append(core.on_clusters_probed([letter != "x" for letter in each]))
        core.check()
    return found


def test_a_cluster_is_left_after_failures_in_a_row_for_the_first_that_answers() -> None:
    core = ClusterFailoverCore(3, failover_after=2, back_after=1)
    assert used(core, "xoo", "ooo", "xoo", "xxo") == [0, 0, 0, 2]


def test_the_preferred_one_is_taken_again_after_answers_in_a_row() -> None:
    core = ClusterFailoverCore(2, failover_after=1, back_after=2)
    assert used(core, "xo", "oo", "xo", "oo", "oo", "oo") == [1, 1, 1, 1, 0, 0]


def test_where_none_answers_it_stays() -> None:
    core = ClusterFailoverCore(2, failover_after=1, back_after=1)
    assert used(core, "xx", "xx", "xo", "xx", "ox") == [0, 0, 1, 1, 0]


def rounds_of(count: int) -> st.SearchStrategy[tuple[int, list[list[bool]]]]:
    return st.tuples(st.just(count), st.lists(st.lists(st.booleans(), min_size=count, max_size=count)))


@given(st.integers(1, 4).flatmap(rounds_of), st.integers(1, 3), st.integers(1, 3))
def test_whatever_answers_it_goes_only_to_what_answered(
    given_: tuple[int, list[list[bool]]], failover_after: int, back_after: int
) -> None:
    core = ClusterFailoverCore(given_[0], failover_after=failover_after, back_after=back_after)
    for answered in given_[1]:
        before = core.current
        after = core.on_clusters_probed(answered)
        core.check()
        assert after == before or answered[after]
