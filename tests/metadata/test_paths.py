"""Paths of the tree: every name of the outside world becomes one segment and comes back."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.metadata import paths
from magnetar.metadata.tree_core import check_path, check_prefix, is_at_or_below
from magnetar.proto.errors import InvalidName

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@given(NAMES)
@example(".")
@example("..")
@example("a/b%2Fc")
@example("\x00\n")
def test_any_name_is_one_valid_segment_and_comes_back(name: str) -> None:
    segment = paths.encode_segment(name)
    assert "/" not in segment
    check_path(paths.tenant(name))
    assert paths.decode_segment(segment) == name


def test_ledgers_sort_as_numbers() -> None:
    ids = [0, 9, 10, 99, 1 << 40, (1 << 63) - 1]
    assert sorted(map(paths.ledger, ids)) == [paths.ledger(id_) for id_ in ids]
    assert [paths.ledger_id(paths.ledger(id_).rpartition("/")[2]) for id_ in ids] == ids


@given(st.text("/.a\n\x7f%é ", max_size=8))
def test_a_path_is_made_of_segments_that_are_not_empty_and_not_dots(path: str) -> None:
    first, *segments = path.split("/")
    valid = not first and segments and all(
        segment not in ("", ".", "..") and not re.search(r"[\x00-\x1f\x7f]", segment) for segment in segments
    )  # fmt: skip
    if valid:
        check_path(path)
    else:
        with pytest.raises(InvalidName):
            check_path(path)


def test_below_knows_where_a_segment_ends() -> None:
    check_prefix("/")
    assert is_at_or_below("/", "/a")
    assert is_at_or_below("/a", "/a")
    assert is_at_or_below("/a", "/a/b/c")
    assert not is_at_or_below("/a", "/ab")
    assert not is_at_or_below("/a/b", "/a")
