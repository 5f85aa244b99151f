"""Entries that cannot be decrypted: their permits are conserved, and no cumulative ack covers them."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.core.consumer import WithheldEntries
from magnetar.proto.names import Position

PLACES = st.builds(Position, st.integers(0, 2), st.integers(0, 5))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "again", "release", "clear"]), PLACES, st.integers(1, 9)))


@given(STEPS, PLACES)
def test_permits_are_given_back_once_and_an_ack_stops_before_the_first(
    steps: list[tuple[str, Position, int]], at: Position
) -> None:
    entries = WithheldEntries()
    held: dict[Position, int] = {}
    for what, place, permits in steps:
        if what == "add":
            entries.add(place, permits)
            held[place] = held.get(place, 0) + permits
        elif what == "again":
            assert entries.on_redelivery_requested([place, place]) == held.get(place, 0)
            if place in held:
                held[place] = 0
        elif what == "release":
            assert entries.release(place) == held.pop(place, 0)
        else:
            assert entries.clear() == sum(held.values())
            held.clear()
        assert bool(entries) == bool(held)
        floor = entries.find_cumulative_ack_limit(at)
        assert floor <= at
        assert not any(each <= floor for each in held)
        assert floor == at or Position(floor.ledger_id, floor.entry_id + 1) in held
