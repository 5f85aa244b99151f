"""Which ledgers of a topic may go, and why each of the others stays.

Rules (ledger protocol §3.6, invariant 34; Pulsar A16): from the oldest on, a ledger goes when it is closed, is not the
last of the list, every durable cursor's *safe* mark is at or behind its end (not the position in memory alone: after a
crash the cursor falls back; nor the persisted one alone: after a seek it is ahead), and retention has let go of it.
With the first that stays, all behind it stay. A topic without durable subscriptions keeps only what retention keeps.
The open ledger never goes.

Retention: `minutes` and `mib`, 0 = none, -1 = without limit. Acknowledged data stays while it is younger than `minutes`
(since its ledger closed) and while the acknowledged ledgers behind it hold less than `mib`. Both 0: it goes at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.names import Position
from .log_shape import LogShape, Span


class Stays(enum.Enum):
    """Why a ledger stays."""

    OPEN = "it is the ledger that is written"
    NOT_ACKNOWLEDGED = "a subscription has not durably acknowledged all of it"
    RETAINED_BY_TIME = "the retention time has not passed"
    RETAINED_BY_SIZE = "the retention size is not reached"
    BEHIND_ONE_THAT_STAYS = "an older ledger stays"


@dataclass(frozen=True, slots=True)
class Retention:
    minutes: int = 0
    mib: int = 0


def verdicts(
    shape: LogShape, safe_marks: Sequence[Position], retention: Retention, now_ms: int
) -> list[tuple[int, Stays | None]]:
    """(ledger, why it stays; None: it goes), oldest first."""
    result: list[tuple[int, Stays | None]] = []
    acknowledged = _acknowledged_bytes(shape, safe_marks)
    stays: Stays | None = None
    for span in shape.spans:
        if stays is None:
            stays = _why(shape, span, safe_marks, retention, now_ms, acknowledged)
            result.append((span.ledger_id, stays))
        else:
            result.append((span.ledger_id, Stays.BEHIND_ONE_THAT_STAYS))
        acknowledged -= span.size
    return result


def trimmable(
    shape: LogShape, safe_marks: Sequence[Position], retention: Retention, now_ms: int
) -> list[int]:
    return [ledger for ledger, stays in verdicts(shape, safe_marks, retention, now_ms) if stays is None]


def would_go(last: Span, safe_marks: Sequence[Position], retention: Retention, now_ms: int) -> bool:
    """Whether the last ledger, which is closed, would go if there were another one behind it (and none before)."""
    return _why_closed(last, safe_marks, retention, now_ms, last.size) is None


def _why(
    shape: LogShape, span: Span, marks: Sequence[Position], retention: Retention, now_ms: int, acknowledged: int
) -> Stays | None:
    if span.open or span is shape.tail:
        return Stays.OPEN
    return _why_closed(span, marks, retention, now_ms, acknowledged)


def _why_closed(
    span: Span, marks: Sequence[Position], retention: Retention, now_ms: int, acknowledged: int
) -> Stays | None:
    if not _passed(span, marks):
        return Stays.NOT_ACKNOWLEDGED
    by_time = retention.minutes < 0 or now_ms - span.closed_ms < retention.minutes * 60_000
    by_size = retention.mib < 0 or acknowledged - span.size < retention.mib << 20
    if retention.minutes == 0 and retention.mib == 0:
        return None
    if not by_time and retention.minutes > 0:
        return None
    if not by_size and retention.mib > 0:
        return None
    return Stays.RETAINED_BY_TIME if by_time and retention.minutes else Stays.RETAINED_BY_SIZE


def _passed(span: Span, marks: Sequence[Position]) -> bool:
    return span.last_entry < 0 or all(mark >= (span.ledger_id, span.last_entry) for mark in marks)


def _acknowledged_bytes(shape: LogShape, marks: Sequence[Position]) -> int:
    return sum(span.size for span in shape.spans if not span.open and _passed(span, marks))
