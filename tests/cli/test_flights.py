"""The demo's data: nothing is lost on the way to JSON, and both computations agree."""

import pytest

pandas = pytest.importorskip("pandas")

from magnetar.cli import demo as flights  # noqa: E402


@pytest.fixture(scope="module")
def frame() -> object:
    return flights.load_flights()


def test_the_file_has_all_flights_and_python_agrees_with_pandas(frame: object) -> None:
    messages = list(flights.make_flight_messages(frame))
    assert len(messages) == flights.FLIGHTS
    truth = flights.compute_delays_with_pandas(frame)
    assert flights.compute_delays_from_messages(payload for _, payload in messages) == truth
    assert sum(row.flights for row in truth.values()) == flights.FLIGHTS


def test_cancelled_flights_have_null_delays_and_count_as_flights_only(frame: object) -> None:
    cancelled = [payload for _, payload in flights.make_flight_messages(frame) if b'"dep_delay":null' in payload]
    assert len(cancelled) == 8255
    assert b"NaN" not in b"".join(cancelled)
    found = flights.compute_delays_from_messages(cancelled)
    assert sum(row.departed for row in found.values()) == 0
    assert sum(row.flights for row in found.values()) == 8255
