"""A set of positions against a plain one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.core.positions import PositionSet
from magnetar.proto.names import Position

POSITIONS = st.builds(Position, st.sampled_from([3, 5, 9]), st.integers(0, 12))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "up to", "take"]), POSITIONS, st.integers(1, 9)))


@given(STEPS)
def test_it_holds_what_a_set_holds_in_log_order(steps: list[tuple[str, Position, int]]) -> None:
    found, model = PositionSet(), set[Position]()
    for action, position, count in steps:
        if action == "add":
            assert found.add(position) == (position not in model)
            model.add(position)
        elif action == "discard":
            assert found.discard(position) == (position in model)
            model.discard(position)
        elif action == "up to":
            gone = sorted(each for each in model if each <= position)
            assert found.discard_up_to(position) == gone
            model -= set(gone)
        else:
            assert found.take(count) == sorted(model)[:count]
        found.check()
        assert list(found) == sorted(model)
        assert len(found) == len(model)
        assert not model or found.first() == min(model)
        assert (position in found) == (position in model)
