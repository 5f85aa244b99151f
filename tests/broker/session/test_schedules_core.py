"""When schedules fire: tables of what is taken and refused, clock changes, missed fires, and another implementation."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.session.schedules_core import (
    MISSED_AFTER_MS,
    MISSED_MAX,
    DueFires,
    check_schedule,
    decide_fires,
    find_time_zone,
    next_cron_ms,
    next_fire_ms,
    parse_cron,
)
from magnetar.metadata.records import Schedule
from magnetar.proto.errors import InvalidRequest

HOUR = 3_600_000
NOW = int(datetime(2026, 11, 29, 18, 30, tzinfo=UTC).timestamp()) * 1000


def schedule(**fields: Any) -> Schedule:
    return Schedule(name="s", id="i", topic_ms=1, **fields)


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 1000


def fires(cron: str, zone: str, after: str, count: int) -> list[str]:
    """The next fires after a local time, in UTC."""
    found, at = [], ms(after, zone)
    for _ in range(count):
        next_ms = next_cron_ms(parse_cron(cron), find_time_zone(zone), at)
        assert next_ms is not None
        assert next_ms > at
        at = next_ms
        found.append(datetime.fromtimestamp(at // 1000, UTC).strftime("%m-%d %H:%M"))
    return found


@pytest.mark.parametrize(("cron", "after", "then"), [
    ("* * * * *", "2026-01-01T00:00", "2026-01-01T00:01"),
    ("*/15 * * * *", "2026-01-01T00:46", "2026-01-01T01:00"),
    ("7/20 3 * * *", "2026-01-01T03:27", "2026-01-01T03:47"),
    ("0 9-17/4 * * mon-fri", "2026-01-02T17:00", "2026-01-05T09:00"),
    ("30 4 1,15 * 5", "2026-01-02T05:00", "2026-01-09T04:30"),  # either day is enough
    ("30 4 1,15 * *", "2026-01-02T05:00", "2026-01-15T04:30"),
    ("0 0 * * 7", "2026-01-01T00:00", "2026-01-04T00:00"),
    ("0 0 * * SUN", "2026-01-01T00:00", "2026-01-04T00:00"),
    ("0 0 29 2 *", "2096-03-01T00:00", "2104-02-29T00:00"),
    ("0 0 31 * *", "2026-04-01T00:00", "2026-05-31T00:00"),
    ("59 23 31 dec *", "2026-12-31T23:59", "2027-12-31T23:59"),
    ("0 0 1 1 */2", "2026-01-01T00:00", "2028-01-01T00:00"),  # 1 January and an even day of the week: a Saturday
])  # fmt: skip
def test_the_next_fire_of_a_cron_expression(cron: str, after: str, then: str) -> None:
    assert next_cron_ms(parse_cron(cron), UTC, ms(after)) == ms(then)


@pytest.mark.parametrize("cron", [
    "", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *",
    "* * * * 8", "5-1 * * * *", "*/0 * * * *", "1/ * * * *", "- * * * *", ", * * * *", "a * * * *", "* * * mon *",
    "* * * * jan", "-1 * * * *", "1.5 * * * *", "@daily", "² * * * *", "1-2-3 * * * *", "* * * * mon#1", "0 0 L * *",
    "0 " * 150,
])  # fmt: skip
def test_what_is_no_cron_expression_is_refused(cron: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_cron(cron)


@pytest.mark.parametrize("wrong", [
    {}, {"cron": "* * * * *", "every_ms": 5000}, {"every_ms": 999}, {"every_ms": -5}, {"at_ms": NOW}, {"at_ms": -1},
    {"at_ms": 1 << 62}, {"every_ms": 1 << 62}, {"cron": "0 0 30 2 *"}, {"cron": "0 0 31 4,6,9,11 *"},
    {"cron": "* * * * *", "zone": "Mars/Olympus"}, {"cron": "* * * * *", "zone": "../etc/passwd"},
    {"cron": "* * * * *", "zone": ""}, {"cron": "* * * * *", "zone": "Europe"}, {"every_ms": 5000, "missed": "some"},
])  # fmt: skip
def test_a_schedule_that_would_never_fire_or_has_no_form_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_schedule(schedule(**wrong), NOW)


def test_what_is_right_is_taken() -> None:
    for right in ({"cron": "0 0 29 2 *"}, {"every_ms": 1000}, {"at_ms": NOW + 1}, {"cron": "0 9 * * *", "zone":
                  "Europe/Berlin", "missed": "all"}):  # fmt: skip
        check_schedule(schedule(**right), NOW)


# ------------------------------------------------------------------------------------------------- clock changes
def test_a_time_that_the_zone_skips_fires_at_the_next_valid_instant_and_once() -> None:
    """2026-03-29 in Berlin: 02:00 is 03:00, which is 01:00 UTC."""
    zone, eve = "Europe/Berlin", "2026-03-28T12:00"
    assert fires("30 2 * * *", zone, eve, 2) == ["03-29 01:00", "03-30 00:30"]
    assert fires("0,30 2,3 * * *", zone, eve, 4) == ["03-29 01:00", "03-29 01:30", "03-30 00:00", "03-30 00:30"]
    assert fires("30 2 29 3 *", zone, eve, 1) == ["03-29 01:00"]


def test_a_time_that_comes_twice_fires_once_at_the_first() -> None:
    """2026-10-25 in Berlin: 03:00 is 02:00 again, so 02:30 is 00:30 and 01:30 UTC."""
    zone, eve = "Europe/Berlin", "2026-10-24T12:00"
    assert fires("30 2 * * *", zone, eve, 2) == ["10-25 00:30", "10-26 01:30"]
    assert fires("*/30 2 * * *", zone, eve, 3) == ["10-25 00:00", "10-25 00:30", "10-26 01:00"]


def test_a_schedule_for_every_hour_goes_by_elapsed_time() -> None:
    assert fires("30 * * * *", "Europe/Berlin", "2026-03-29T01:00", 3) == ["03-29 00:30", "03-29 01:30", "03-29 02:30"]
    assert fires("30 * * * *", "Europe/Berlin", "2026-10-25T01:00", 4) == [
        "10-24 23:30", "10-25 00:30", "10-25 01:30", "10-25 02:30",
    ]  # fmt: skip
    assert fires("15 */1 * * *", "Australia/Lord_Howe", "2026-10-04T01:00", 3) == [  # half an hour is skipped
        "10-03 14:45", "10-03 16:15", "10-03 17:15",
    ]  # fmt: skip


def test_a_day_that_the_zone_skips_fires_at_the_begin_of_the_next() -> None:
    assert fires("0 12 * * *", "Pacific/Apia", "2011-12-29T13:00", 2) == ["12-30 10:00", "12-30 22:00"]


ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns")


def _values(low: int, high: int) -> st.SearchStrategy[str]:
    pair = st.tuples(st.integers(low, high - 1), st.integers(1, high)).map(
        lambda two: (two[0], max(two[0] + 1, two[1]))
    )
    part = st.one_of(
        st.integers(low, high).map(str), pair.map(lambda two: f"{two[0]}-{two[1]}"),
        st.tuples(pair, st.integers(1, 7)).map(lambda t: f"{t[0][0]}-{t[0][1]}/{t[1]}"),
    )  # fmt: skip
    return st.lists(part, min_size=1, max_size=3).map(",".join)


def _starred(low: int, high: int) -> st.SearchStrategy[str]:
    return st.one_of(st.just("*"), st.integers(1, 9).map(lambda step: f"*/{step}"), _values(low, high))


CRONS = st.tuples(_starred(0, 59), _starred(0, 23), _starred(1, 31), _starred(1, 12), _starred(0, 7)).map(" ".join)
FIXED = st.tuples(_values(0, 59), _values(0, 23), _starred(1, 31), _starred(1, 12), _starred(0, 7)).map(" ".join)
MOMENTS = st.integers(ms("2020-01-01T00:00") // 60_000, ms("2035-01-01T00:00") // 60_000).map(lambda at: at * 60_000)


@given(CRONS, MOMENTS)
@settings(deadline=None)
def test_next_fires_are_those_of_cronsim(cron: str, after_ms: int) -> None:
    cronsim = pytest.importorskip("cronsim")
    at = after_ms
    theirs = cronsim.CronSim(cron, datetime.fromtimestamp(at // 1000, UTC).replace(tzinfo=None))
    for _ in range(3):
        wanted = next(theirs, None)
        found = next_cron_ms(parse_cron(cron), UTC, at)
        if wanted is None or wanted - datetime(2035, 1, 1) > timedelta(days=366 * 5):
            return  # they look further ahead
        assert found == int(wanted.replace(tzinfo=UTC).timestamp()) * 1000
        at = found


@given(FIXED, st.sampled_from(ZONES), MOMENTS)
@settings(deadline=None)
def test_times_of_a_zone_are_those_of_cronsim(cron: str, zone: str, after_ms: int) -> None:
    cronsim = pytest.importorskip("cronsim")
    at, place = after_ms, ZoneInfo(zone)
    theirs = cronsim.CronSim(cron, datetime.fromtimestamp(at // 1000, place))
    wanted = next(theirs, None)
    if wanted is None or wanted.astimezone(UTC).year > 2040:
        return
    assert next_cron_ms(parse_cron(cron), place, at) == int(wanted.timestamp()) * 1000


@given(CRONS, st.sampled_from(ZONES), MOMENTS)
@settings(deadline=None)
def test_each_fire_fits_its_fields_or_is_where_a_skipped_time_ends(cron: str, zone: str, after_ms: int) -> None:
    parsed, place, at = parse_cron(cron), ZoneInfo(zone), after_ms
    for _ in range(5):
        found = next_cron_ms(parsed, place, at)
        if found is None:
            return
        assert found > at
        local, before = (datetime.fromtimestamp(each // 1000, place) for each in (found, found - 1000))
        if local.utcoffset() == before.utcoffset():
            assert local.minute in parsed.minutes
            assert local.hour in parsed.hours
            assert parsed.matches_day(local.date())
            assert local.month in parsed.months
        at = found


# ------------------------------------------------------------------------------------------------- missed fires
def test_what_is_due_fires_and_is_decided_once() -> None:
    every = schedule(every_ms=10_000, created_ms=NOW)
    assert decide_fires(every, NOW, NOW + 9_999) == DueFires((), 0, NOW, NOW + 10_000)
    assert decide_fires(every, NOW, NOW + 25_000) == DueFires(
        (NOW + 10_000, NOW + 20_000), 0, NOW + 20_000, NOW + 30_000
    )
    assert decide_fires(every, NOW + 20_000, NOW + 25_000).fires == ()
    once = schedule(at_ms=NOW + 5)
    assert decide_fires(once, NOW, NOW + 5) == DueFires((NOW + 5,), 0, NOW + 5, None)
    assert decide_fires(once, NOW + 5, NOW + 9) == DueFires((), 0, NOW + 5, None)


@pytest.mark.parametrize(("missed", "count", "dropped"), [("skip", 0, 5), ("last", 1, 4), ("all", 5, 0)])
def test_missed_fires_are_dropped_or_made_up_for(missed: str, count: int, dropped: int) -> None:
    hourly = schedule(cron="0 * * * *", missed=missed)
    found = decide_fires(hourly, ms("2026-01-01T00:00"), ms("2026-01-01T05:30"))
    late = [ms(f"2026-01-01T0{hour}:00") for hour in range(1, 6)]
    assert found == DueFires(tuple(late[5 - count :]), dropped, late[-1], ms("2026-01-01T06:00"))


def test_what_is_a_little_late_is_not_missed() -> None:
    hourly, on = schedule(cron="0 * * * *"), ms("2026-01-01T01:00")
    assert decide_fires(hourly, on - HOUR, on + MISSED_AFTER_MS).fires == (on,)
    assert decide_fires(hourly, on - HOUR, on + MISSED_AFTER_MS + 1).fires == ()


def test_with_all_the_latest_fires_count_and_years_without_a_look_cost_little() -> None:
    last, now = ms("2016-01-01T00:00"), ms("2026-01-01T00:00")
    every = decide_fires(schedule(every_ms=1000, created_ms=last, missed="all"), last, now)
    assert every.fires == tuple(now - 1000 * back for back in reversed(range(MISSED_MAX)))
    march = decide_fires(schedule(cron="* 0-23 * 3 *", missed="all"), last, ms("2026-06-01T00:00"))
    assert (len(march.fires), march.fires[-1]) == (MISSED_MAX, ms("2026-03-31T23:59"))
    leap = decide_fires(schedule(cron="0 0 29 2 *", missed="all"), last, now)
    assert leap.fires == tuple(ms(f"{year}-02-29T00:00") for year in (2020, 2024)), "nine years are looked at"


def test_a_clock_that_runs_back_fires_nothing_again() -> None:
    every = schedule(every_ms=10_000, created_ms=NOW)
    found = decide_fires(every, NOW + 50_000, NOW + 20_000)
    assert found == DueFires((), 0, NOW + 50_000, NOW + 60_000)


@given(st.integers(0, 400), st.integers(0, 400), st.sampled_from(["skip", "last", "all"]), st.integers(1, 90))
def test_looks_of_any_length_decide_each_fire_once(first: int, second: int, missed: str, every_s: int) -> None:
    """Each time up to the second look was fired or dropped, none twice, and in order."""
    it = schedule(every_ms=1000 * every_s, created_ms=NOW, missed=missed)
    last, seen, dropped = NOW, list[int](), 0
    for now in (NOW + 1000 * first, NOW + 1000 * (first + second)):
        found = decide_fires(it, last, now)
        seen += found.fires
        dropped += found.missed
        last = found.decided_ms
        assert next_fire_ms(it, last) == found.next_ms
    assert seen == sorted(set(seen))
    total = (first + second) // every_s
    assert len(seen) + dropped == total if total <= MISSED_MAX else len(seen) + dropped <= total
