"""Schedules: when each fires next, and which fires are due. A core without I/O: broker/session/schedules.py drives it.

    next_fire_ms(schedule, after_ms)                the first fire after that time; None: there is none
    decide_fires(schedule, last_ms, now_ms)         what is due, what was missed, and up to where all is decided

A schedule has one of three forms:

| form | fires |
|---|---|
| `at_ms` | once |
| `every_ms` | at its creation plus each multiple of the interval |
| `cron` | as five fields say: minute, hour, day of the month, month, day of the week |

    field = part {, part}      part = ( * | value | value - value ) [ / step ]       value = number | name

Names are JAN … DEC and SUN … SAT, in any case; 0 and 7 are Sunday. `value/step` goes on to the end of the range. If
day of the month and day of the week are both restricted (neither begins with *), one of them is enough, as in Vixie's
cron. A schedule that would not fire within SEARCHED_YEARS_MAX years, such as 30 February, is refused.

**Clock changes.** Times are those of the schedule's zone. A time that the zone skips fires at the first valid instant
after it, and times that fall on one instant fire once. A time that comes twice fires at the first. A schedule for every
hour (the hour begins with *) goes by elapsed time instead: nothing at skipped times, both of a doubled hour.

**Missed fires.** A fire that is more than MISSED_AFTER_MS late was missed: no broker ran the schedule, or its clock
jumped. `skip` drops all of them, `last` fires the latest alone, `all` fires up to MISSED_MAX, the latest ones, oldest
first.

The next fire is found by whole months, days and hours, never minute by minute.
Guarding tests: tests/broker/session/test_schedules_core.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple

from ...metadata.records import Schedule
from ...proto.errors import InvalidRequest
from ...proto.names import parse_number

MISSED_FIRE_MODES = ("skip", "last", "all")
MISSED_MAX = 100
"""Most missed fires that `all` makes up for."""
MISSED_AFTER_MS = 60_000
"""A fire that is later than this was missed: a take-over, or a slow bookie, takes less."""
INTERVAL_MS_MIN = 1000
SEARCHED_YEARS_MAX = 9
"""Years in which a schedule must fire once: 29 February is at most eight years away."""
CRON_CHARACTERS_MAX = 200
DAY_MS = 86_400_000
TIME_MS_MAX = 253_370_764_800_000
"""The begin of the year 9999: later times have no date."""

# ---------------------------------------------------------------------------------------------------- the fields

_MONTHS = {name: number for number, name in enumerate(
    ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
)}  # fmt: skip
_WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_NO_NAMES: dict[str, int] = {}


class _Field(NamedTuple):
    title: str
    first: int
    last: int
    names: dict[str, int]


_FIELDS = (
    _Field("minute", 0, 59, _NO_NAMES), _Field("hour", 0, 23, _NO_NAMES), _Field("day of the month", 1, 31, _NO_NAMES),
    _Field("month", 1, 12, _MONTHS), _Field("day of the week", 0, 7, _WEEKDAYS),
)  # fmt: skip


class Cron(NamedTuple):
    """A parsed cron expression: the values of each field, in ascending order; days of the week are 0 (Sunday) to 6."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool  # one of the two kinds of day is enough
    is_hourly: bool  # it goes by elapsed time

    def matches_day(self, day: date) -> bool:
        """Returns True if the day fits the fields of days (of the month, of the week). The month is not checked."""
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return of_month or of_week if self.either_day else of_month and of_week


@lru_cache(1000)
def parse_cron(text: str) -> Cron:
    """Parses a cron expression of five fields (minute, hour, day of the month, month, day of the week). Raises
    InvalidRequest if a field is invalid, there are not five of them, or the text is longer than CRON_CHARACTERS_MAX
    characters."""
    if len(text) > CRON_CHARACTERS_MAX:
        raise InvalidRequest(f"a cron expression has {CRON_CHARACTERS_MAX} characters at most, not {len(text)}")
    words = text.split()
    if len(words) != len(_FIELDS):
        raise InvalidRequest(f"a cron expression has five fields (minute hour day month weekday), not {text!r}")
    found = [_parse_field(word, field) for word, field in zip(words, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = found
    return Cron(
        tuple(sorted(minutes)), tuple(sorted(hours)), frozenset(days), frozenset(months),
        frozenset(each % 7 for each in weekdays), not (words[2][0] == "*" or words[4][0] == "*"), words[1][0] == "*",
    )  # fmt: skip


def _parse_field(word: str, field: _Field) -> set[int]:
    found = set[int]()
    for part in word.split(","):
        values, slash, step_text = part.partition("/")
        step = _number(step_text, field, word) if slash else 1
        if step < 1:
            raise _wrong(field, word, "a step is 1 or more")
        first_text, dash, last_text = values.partition("-")
        if values == "*":
            first, last = field.first, field.last - (field is _FIELDS[4])  # 7 is Sunday again
        else:
            first = _value(first_text, field, word)
            last = _value(last_text, field, word) if dash else field.last if slash else first
        if first > last:
            raise _wrong(field, word, "a range goes from low to high")
        found.update(range(first, last + 1, step))
    return found


def _value(text: str, field: _Field, word: str) -> int:
    found = field.names.get(text.lower())
    if found is None:
        found = _number(text, field, word)
    if not field.first <= found <= field.last:
        raise _wrong(field, word, f"it is {field.first} to {field.last}")
    return found


def _number(text: str, field: _Field, word: str) -> int:
    found = parse_number(text)
    if found is None or found > 9999:
        raise _wrong(field, word, f"{text!r} is no number")
    return found


def _wrong(field: _Field, word: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the {field.title} {word!r} of a cron expression is wrong: {why}")


# ------------------------------------------------------------------------------------------------- the next fire


def find_time_zone(name: str) -> tzinfo:
    """Returns the time zone of that name. Raises InvalidRequest if the database of time zones of this machine does not
    have it. UTC needs no database."""
    from zoneinfo import ZoneInfo  # here: few brokers have schedules, and all would load it as they start

    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (OSError, ValueError, KeyError) as error:  # that of zoneinfo is a KeyError
        raise InvalidRequest(f"this broker has no time zone {name[:80]!r}") from error


def next_fire_ms(schedule: Schedule, after_ms: int) -> int | None:
    """Returns the first time after `after_ms` at which the schedule fires (ms since the epoch); None if there is none
    (for a cron expression: none within SEARCHED_YEARS_MAX years). Raises InvalidRequest if the cron expression is
    invalid, or this broker does not have the time zone."""
    if schedule.cron:
        return next_cron_ms(parse_cron(schedule.cron), find_time_zone(schedule.zone), after_ms)
    if schedule.every_ms:
        since = max(0, after_ms - schedule.created_ms)
        found = schedule.created_ms + (since // schedule.every_ms + 1) * schedule.every_ms
        return found if found < TIME_MS_MAX else None
    return schedule.at_ms if schedule.at_ms > after_ms else None


def next_cron_ms(cron: Cron, zone: tzinfo, after_ms: int) -> int | None:
    """Returns the first time after `after_ms` that matches the expression (ms since the epoch); None if there is none
    within SEARCHED_YEARS_MAX years."""
    if not -TIME_MS_MAX < after_ms < TIME_MS_MAX - SEARCHED_YEARS_MAX * 366 * 86_400_000:
        return None
    after = datetime.fromtimestamp(after_ms // 1000, UTC) if after_ms >= 0 else datetime.fromtimestamp(0, UTC)
    found = _next_elapsed(cron, zone, after) if cron.is_hourly else _next_local(cron, zone, after)
    return None if found is None else int(found.timestamp()) * 1000


def _next_elapsed(cron: Cron, zone: tzinfo, after: datetime) -> datetime | None:
    """Goes hour by hour through real time, on days that fit. Returns a time in UTC."""
    at = after.replace(second=0, microsecond=0) + timedelta(minutes=1)
    last_day = _last_day(at.astimezone(zone).date())
    while (local := at.astimezone(zone)).date() <= last_day:
        day = _next_day(cron, local.date(), last_day)
        if day is None:
            return None
        if day != local.date():
            at = _to_utc(datetime(day.year, day.month, day.day), zone)
            continue
        if local.hour in cron.hours:
            place = bisect_left(cron.minutes, local.minute)
            if place < len(cron.minutes):
                found = at + timedelta(minutes=cron.minutes[place] - local.minute)
                if found.astimezone(zone).replace(tzinfo=None) == local.replace(
                    tzinfo=None, minute=cron.minutes[place]
                ):
                    return found
        at = _next_hour(at, local, zone)
    return None


def _next_hour(at: datetime, local: datetime, zone: tzinfo) -> datetime:
    """Returns the first instant after `at` at which the local time is in another hour, or was put back or forward."""
    then = at + timedelta(minutes=60 - local.minute)
    if then.astimezone(zone).utcoffset() == local.utcoffset():
        return then
    changed = _find_change(zone, at, then)
    return changed if changed < then else then


def _next_local(cron: Cron, zone: tzinfo, after: datetime) -> datetime | None:
    """Goes through the local times that fit, and returns the first whose instant is after `after`, in UTC."""
    begin = after.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    last_day = _last_day(begin.date())
    day: date | None = begin.date()
    while day is not None and (day := _next_day(cron, day, last_day)) is not None:
        for local in _times_of_day(cron, day, begin):
            found = _to_utc(local, zone)
            if found > after:
                return found
        day += timedelta(days=1)
    return None


def _times_of_day(cron: Cron, day: date, begin: datetime) -> Iterator[datetime]:
    """Yields the times of the day that fit, from `begin` on."""
    today = day == begin.date()
    for hour in cron.hours[bisect_left(cron.hours, begin.hour) if today else 0 :]:
        first = bisect_left(cron.minutes, begin.minute) if today and hour == begin.hour else 0
        for minute in cron.minutes[first:]:
            yield datetime(day.year, day.month, day.day, hour, minute)


def _last_day(day: date) -> date:
    return day + timedelta(days=366 * SEARCHED_YEARS_MAX)


def _next_day(cron: Cron, day: date, last_day: date) -> date | None:
    """Returns the first day from `day` on that fits; None if there is none up to `last_day`."""
    while day <= last_day:
        if day.month not in cron.months:
            day = date(day.year + day.month // 12, day.month % 12 + 1, 1)
        elif cron.matches_day(day):
            return day
        else:
            day += timedelta(days=1)
    return None


def _to_utc(local: datetime, zone: tzinfo) -> datetime:
    """Returns the instant of a local time: the first one, if the time comes twice; the first valid instant after it,
    if the zone skips it."""
    found = local.replace(tzinfo=zone).astimezone(UTC)
    if found.astimezone(zone).replace(tzinfo=None) == local:
        return found
    return _find_change(zone, local.replace(tzinfo=zone, fold=1).astimezone(UTC), found)


def _find_change(zone: tzinfo, before: datetime, after: datetime) -> datetime:
    """Returns the first instant at which the offset of the zone is not that of `before`, up to `after`, in UTC."""
    offset, low, high = before.astimezone(zone).utcoffset(), int(before.timestamp()), int(after.timestamp())
    while high - low > 1:
        middle = (low + high) // 2
        same = datetime.fromtimestamp(middle, UTC).astimezone(zone).utcoffset() == offset
        low, high = (middle, high) if same else (low, middle)
    return datetime.fromtimestamp(high, UTC)


# -------------------------------------------------------------------------------------------------- what is due


class DueFires(NamedTuple):
    """What is due of a schedule; all times are in ms since the epoch. `fires`: the times to fire for, in ascending
    order. `missed`: how many other fires were found and are dropped. `decided_ms`: the time up to which everything is
    decided once `fires` are made. `next_ms`: the next fire after that; None if there is none."""

    fires: tuple[int, ...]
    missed: int
    decided_ms: int
    next_ms: int | None


def decide_fires(schedule: Schedule, last_ms: int, now_ms: int) -> DueFires:
    """Returns what is due at `now_ms`. `last_ms`: the time up to which everything was decided before (exclusive). A
    fire that is more than MISSED_AFTER_MS late is missed; `schedule.missed` says whether missed ones are dropped. The
    work is bounded: of a schedule that was not checked for long, only about the latest MISSED_MAX fires are found, and
    all earlier ones are dropped. Raises the errors of `next_fire_ms`."""
    found = _find_latest_fires(schedule, last_ms, now_ms)
    late = [each for each in found if now_ms - each > MISSED_AFTER_MS]
    due = found[len(late) :]
    kept = late if schedule.missed == "all" else late[-1:] if schedule.missed == "last" and not due else []
    fires = tuple((kept + due)[-MISSED_MAX:])
    decided_ms = found[-1] if found else last_ms
    return DueFires(fires, len(found) - len(fires), decided_ms, next_fire_ms(schedule, max(decided_ms, last_ms)))


def _find_latest_fires(schedule: Schedule, last_ms: int, now_ms: int) -> list[int]:
    """Returns the fires after `last_ms` and up to `now_ms`, in order: the latest ones, at least MISSED_MAX of them if
    there are so many. Looks at one day after the other, from the latest on."""
    parts: list[list[int]] = []
    least_ms = span_ms = min(DAY_MS, MISSED_MAX * schedule.every_ms or DAY_MS)
    end_ms, first_ms = now_ms, max(last_ms, now_ms - 366 * SEARCHED_YEARS_MAX * DAY_MS)
    while end_ms > first_ms and sum(map(len, parts)) < MISSED_MAX:
        begin_ms = max(first_ms, end_ms - span_ms)
        at = next_fire_ms(schedule, begin_ms)
        if at is None or at > end_ms:
            end_ms, span_ms = begin_ms, 2 * span_ms  # a schedule that seldom fires
        elif span_ms > least_ms:
            span_ms = max(least_ms, span_ms // 2)
        else:
            parts.append(list(_fires_between(schedule, begin_ms, end_ms)))
            end_ms = begin_ms
    return [each for part in reversed(parts) for each in part]


def _fires_between(schedule: Schedule, after_ms: int, until_ms: int) -> Iterator[int]:
    at = next_fire_ms(schedule, after_ms)
    while at is not None and at <= until_ms:
        yield at
        at = next_fire_ms(schedule, at)


def check_schedule(schedule: Schedule, now_ms: int) -> None:
    """Raises InvalidRequest if the schedule does not have exactly one of the three forms, has a value out of its range,
    names a time zone that this broker does not have, or would not fire after `now_ms` (by a cron expression: within
    SEARCHED_YEARS_MAX years)."""
    if sum((bool(schedule.cron), bool(schedule.every_ms), bool(schedule.at_ms))) != 1:
        raise InvalidRequest("a schedule has a cron expression, an interval or a time: one of the three")
    if schedule.every_ms and not INTERVAL_MS_MIN <= schedule.every_ms <= TIME_MS_MAX:
        raise InvalidRequest(f"the interval of a schedule is a second or more, not {schedule.every_ms} ms")
    if schedule.at_ms and not now_ms < schedule.at_ms < TIME_MS_MAX:
        raise InvalidRequest(f"the time of a schedule is in the future, and {schedule.at_ms} ms is not")
    if schedule.missed not in MISSED_FIRE_MODES:
        raise InvalidRequest(
            f"what happens to missed fires is {', '.join(MISSED_FIRE_MODES)}, not {schedule.missed[:80]!r}"
        )
    find_time_zone(schedule.zone)
    if next_fire_ms(schedule, now_ms) is None:
        raise InvalidRequest(f"the schedule {schedule.cron!r} would not fire within {SEARCHED_YEARS_MAX} years")
