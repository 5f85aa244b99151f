"""A set of positions against a plain one."""

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.broker.subscription.core.positions import PositionSet
from magnetar.proto.names import Position

POSITIONS = st.builds(Position, st.sampled_from([3, 5, 9]), st.integers(0, 12))
ACTIONS = st.sampled_from(["add", "add", "discard", "up to", "take", "some"])
STEPS = st.lists(st.tuples(ACTIONS, POSITIONS, st.integers(1, 9)))


@given(st.sets(POSITIONS), STEPS)
def test_it_holds_what_a_set_holds_in_log_order(begin: set[Position], steps: list[tuple[str, Position, int]]) -> None:
    """As a short list, as bitmaps, and from the one to the other."""
    found, model = PositionSet(), set(begin)
    for position in begin:
        found.add(position)
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
        elif action == "some":
            some = BitMap(range(position.entry_id, position.entry_id + count))
            done = {each for each in model if each.ledger_id == position.ledger_id and each.entry_id in some}
            assert found.discard_entries_of_ledger(position.ledger_id, some) == BitMap([each.entry_id for each in done])
            model -= done
        else:
            assert found.first_positions(count) == sorted(model)[:count]
        found.check()
        assert list(found) == sorted(model)
        assert len(found) == len(model)
        assert not model or found.first_position() == min(model)
        assert (position in found) == (position in model)
