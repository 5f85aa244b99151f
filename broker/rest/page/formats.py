"""Numbers and names as the page shows them: the filters of its templates, such as `size` and `topic_path`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

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


FILTERS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (size, number, rate, percent, age, moment, topic_path, segment)
}
