"""Numbers and names as the page shows them: the filters of its templates, such as `size` and `topic_path`."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from ....proto.statistics import CursorBucket
from ..call import BadRequest

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """Returns a number of bytes with its unit."""
    for unit in _SIZES:
        if abs(count) < 1000 or unit == _SIZES[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def number(count: float) -> str:
    """Returns a number with thin spaces between thousands."""
    return f"{count:,.0f}".replace(",", "\u202f")


def rate(count: float) -> str:
    """Returns a rate a second: with one digit after the point below ten."""
    return f"{count:.1f}" if 0 < count < 10 else number(count)


def percent(share: float) -> str:
    """Returns a share as percent; a share below 0 is not known."""
    return "–" if share < 0 else f"{100 * share:.0f} %"


def age(since_ms: int, now_ms: int) -> str:
    """Returns how long ago something was. 0: there is none."""
    if not since_ms:
        return "–"
    seconds = max(0, now_ms - since_ms) // 1000
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def moment(at_ms: int) -> str:
    """Returns a time in UTC. 0: there is none."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at_ms else "–"


def topic_path(name: str) -> str:
    """Returns the path of a topic below /ui/topics: each part is one segment, so a slash in a name is encoded."""
    domain, _, rest = name.partition("://")
    return "/".join(quote(part, safe="") for part in (domain, *rest.split("/", 2)))


def segment(name: str) -> str:
    """Returns a name as one segment of a path."""
    return quote(name, safe="")


def parse_moment(text: str) -> int:
    """Returns a time of a form, in UTC, as milliseconds since the epoch. Raises BadRequest."""
    try:
        return max(0, int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise BadRequest("the time is like 2026-11-28T12:00, in UTC") from None


def stretches(sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Returns where each part of a strip begins, and its width, of 1,000 in all."""
    whole, found, at = sum(sizes) or 1, list[tuple[float, float]](), 0.0
    for each in sizes:
        found.append((round(1000 * at / whole, 2), round(1000 * each / whole, 2)))
        at += each
    return found


def json_text(text: str) -> str:
    """Returns a JSON document, indented over several lines. Raises ValueError if the text is not JSON."""
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


def payload_text(payload: bytes, way: str, most: int) -> tuple[str, str]:
    """Returns how the first `most` bytes of a payload are shown (json, text or hex), and their text: as `way` says; if
    that is empty, or json and it is none, by the first of the three that fits."""
    part, is_whole = payload[:most], len(payload) <= most
    try:
        text = getincrementaldecoder("utf-8")("replace" if way == "text" else "strict").decode(part, is_whole)
    except UnicodeDecodeError:
        return "hex", _hex_text(part)
    if way == "hex" or (way != "text" and "\0" in text):
        return "hex", _hex_text(part)
    try:
        return ("text", text) if way == "text" or not is_whole else ("json", json_text(text)[: 2 * most])
    except ValueError:
        return "text", text


def _hex_text(payload: bytes) -> str:
    lines = list[str]()
    for at in range(0, len(payload), 16):
        part = payload[at : at + 16]
        plain = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{at:08x}  {part.hex(' '):<47}  {plain}")
    return "\n".join(lines)


def shade(bucket: CursorBucket) -> float:
    """Returns the share of a bucket that is acknowledged."""
    return round((bucket.acknowledged + bucket.pending) / max(1, bucket.entries), 3)


def steps(path: str) -> list[tuple[str, str]]:
    """Splits a path of the metadata. Returns each name in it with the path up to that name."""
    names = path.strip("/").split("/") if path.strip("/") else []
    return [(name, "/" + "/".join(names[: at + 1])) for at, name in enumerate(names)]


FILTERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (size, number, rate, percent, age, moment, topic_path, segment, shade, steps, stretches, json_text)
}
