"""Parses times, sizes and places in a topic, as people type them: `10m`, `3d`, `10G`, `97:9`, `earliest`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from ...proto.names import parse_number

if TYPE_CHECKING:
    from ...client.model.message_id import MessageId


class FiniteNumber(click.FloatRange):
    """The type of an option whose value is a finite number in a range (inclusive). click would accept `nan` in each
    range, because every comparison with it is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value} is no number", param, ctx)
        return found


class Interval(click.FloatRange):
    """The type of an option whose value is a time in seconds, of at least INTERVAL_S_MIN: `2s`, `500ms`, `1m`, `6h`,
    `1d`; a bare number means seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m|h|d)?", str(value).strip().lower())
        found = float(match[1]) * _FACTORS.get(match[2], 1.0) if match else 0.0
        if found < INTERVAL_S_MIN:
            self.fail(f"{str(value)[:40]!r} is not a time such as 2s, of {INTERVAL_S_MIN} s at least", param, ctx)
        return found


INTERVAL_S_MIN = 0.1
_FACTORS = {"ms": 0.001, "m": 60.0, "h": 3600.0, "d": 86400.0}
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
NUMBER_PATTERN = r"([0-9]{1,15})"
MEBIBYTES_PER_UNIT = {"m": 1, "g": 1 << 10, "t": 1 << 20}


def parse_duration(text: str | None, unit_s: int) -> int | None:
    """Returns a duration, such as `10m` (with the unit s, m, h, d or w), as a number of units of `unit_s` seconds,
    rounded up. A number without a unit is already a number of these units. Returns -1 for "-1", None for None. Raises
    BadParameter if the text is not a duration."""
    if text is None or text == "-1":
        return None if text is None else -1
    if (number := parse_number(text)) is not None:
        return number
    match = re.fullmatch(rf"{NUMBER_PATTERN}([smhdw])", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text[:40]!r} is not a time such as 30s, 10m, 2h, 3d")
    return -(-int(match[1]) * SECONDS_PER_UNIT[match[2]] // unit_s)


def parse_mebibytes(text: str | None) -> int | None:
    """Returns a size, such as `10G` (10 GiB; the units are M, G and T), in MiB. A number without a unit is already in
    MiB. Returns -1 for "-1", None for None. Raises BadParameter if the text is not a size."""
    if text is None or text == "-1":
        return None if text is None else -1
    if (number := parse_number(text)) is not None:
        return number
    match = re.fullmatch(rf"{NUMBER_PATTERN}([mgt])i?b?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text[:40]!r} is not a size such as 100M, 10G")
    return int(match[1]) * MEBIBYTES_PER_UNIT[match[2]]


def parse_properties(pairs: Iterable[str]) -> dict[str, str]:
    """Parses texts `key=value` and returns the values by key. One text may contain several pairs, separated by commas.
    A part without `=` belongs to the value before it. Raises BadParameter if a text does not begin with a pair, or a
    key is empty."""
    found: dict[str, str] = {}
    for text in pairs:
        last = ""
        for part in text.split(","):
            key, mark, content = part.partition("=")
            if last and not mark:
                found[last] += f",{part}"
                continue
            if not mark or not key:
                raise click.BadParameter(f"{part!r} is not KEY=VALUE")
            found[key], last = content, key
    return found


def parse_message_id(text: str) -> MessageId:
    """Parses a message id: `LEDGER:ENTRY[:PARTITION[:BATCH]]`, as `magnetar consume` prints it;
    (LEDGER,ENTRY,PARTITION,BATCH), as the SDK prints it; `earliest` or `latest`. Returns the id. Raises UsageError
    for any other text, InvalidMessage if a number is out of range."""
    from ...client.model.message_id import MessageId

    text = re.sub(r"\A\((.*)\)\Z", r"\1", text).replace(",", ":")  # as the SDK prints it
    if text not in ("earliest", "latest") and not re.fullmatch(r"\d+:\d+(:-?\d+){0,2}", text, re.ASCII):
        raise click.UsageError(f"{text!r} is not a place in a topic: earliest, latest, or LEDGER:ENTRY")
    return MessageId.parse(text)


def parse_moment_ms(text: str, now_ms: int) -> int:
    """Returns a time in ms since the epoch. `text`: a number with the unit s, m, h, d or w (`10m`: 10 minutes before
    `now_ms`, which is in ms since the epoch); an ISO time, which is local time if it names no time zone; or a number of
    ms since the epoch. Raises UsageError for any other text."""
    from datetime import datetime

    text = text.strip()
    if match := re.fullmatch(rf"{NUMBER_PATTERN}([smhdw])", text.lower()):
        return now_ms - int(match[1]) * SECONDS_PER_UNIT[match[2]] * 1000
    if (number := parse_number(text)) is not None:
        return number
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise click.UsageError(f"{text[:40]!r} is not a time: 10m (ago), 2026-11-21T09:30, or milliseconds") from error
