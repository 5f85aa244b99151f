"""The rules of trimming: which ledgers of a topic may be deleted, and why each of the others stays.

Rules (ledger protocol §3.6, invariant 34; Pulsar A16): a ledger is deleted when it is closed, is not the last of the
list, every holder needs it no more, and retention releases it. Holders are the durable cursors, deduplication (up to
its last snapshot), transactions (up to the first entry of an open one, and the last stored outcomes) and compaction (up
to its horizon): `Topic` collects them. A cursor needs a ledger no more when it
has *safely* acknowledged all of it: its mark is at or after the end (not the position in memory alone: after a crash
the cursor falls back; nor the persisted one alone: after a seek it is ahead), or each entry is acknowledged out of
order and that is stored (`Safe.done`). The open ledger is
never deleted. All conditions up to the bytes on the disk: docs/design/data-deletion.md.

So one message that is not acknowledged, or that is delayed for a month, keeps its own ledger and none of those after
it: the list has gaps then (core/log_shape.py), which every reader skips. (Pulsar keeps all after the first that stays.)

**A topic without a durable subscription** may get one tomorrow, or is read by index (Spark, a reader): its messages
stay for a time and up to a size of their own, the policies `unsubscribed_minutes` and `unsubscribed_mib`; what is
reached first. `unread` is that retention, and none as soon as the topic has a durable subscription or is compacted.

Retention: `minutes` and `mib`, 0 = none, -1 = without limit. Acknowledged data stays while it is younger than `minutes`
(since its ledger closed) and while the acknowledged ledgers after it contain less than `mib`. Both 0: it is deleted at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....proto.names import Position
from ....proto.states import LedgerStays
from .log_shape import LogShape, Span


class Safe(NamedTuple):
    """The data that a holder does not need, neither now nor after a crash."""

    mark: Position
    done: frozenset[int] = frozenset()  # ledgers after the mark
    why: LedgerStays = LedgerStays.NOT_ACKNOWLEDGED  # a ledger that is not passed stays

    def passed(self, span: Span) -> bool:
        return self.mark >= (span.ledger_id, span.last_entry) or span.ledger_id in self.done


class Retention(msgspec.Struct, frozen=True):
    """The retention of a topic's ledgers: a time and a size."""

    minutes: int = 0
    mib: int = 0

    def told(self) -> str:
        """Returns the retention in words; empty: nothing is kept."""
        if not self.minutes:
            return ""
        time = "for ever" if self.minutes < 0 else f"for {self.minutes} minutes"
        return f"kept {time}" + (f" and up to {self.mib} MiB" if self.mib > 0 else "")


NOTHING = Retention()


def verdicts(
    shape: LogShape, holders: Sequence[Safe], retention: Retention, now_ms: int, unread: Retention = NOTHING
) -> list[tuple[int, LedgerStays | None]]:
    """Returns (ledger, why it stays; None: it is to be deleted), oldest first."""
    result: list[tuple[int, LedgerStays | None]] = []
    acknowledged = sum(span.size for span in shape.spans if not span.open and _passed(span, holders))
    for span in shape.spans:
        if span.open or span is shape.tail:
            stays: LedgerStays | None = LedgerStays.OPEN
        elif (holder := _holder(span, holders)) is not None:
            stays = holder.why
        else:
            acknowledged -= span.size
            stays = _kept(span, retention, now_ms, acknowledged, unread)
        result.append((span.ledger_id, stays))
    return result


def trimmable(
    shape: LogShape, holders: Sequence[Safe], retention: Retention, now_ms: int, unread: Retention = NOTHING
) -> list[int]:
    return [ledger for ledger, stays in verdicts(shape, holders, retention, now_ms, unread) if stays is None]


def would_go(
    last: Span, holders: Sequence[Safe], retention: Retention, now_ms: int, unread: Retention = NOTHING
) -> bool:
    """Whether the last ledger, which is closed, would be deleted if there were another one after it."""
    return _passed(last, holders) and _kept(last, retention, now_ms, 0, unread) is None


def _kept(span: Span, retention: Retention, now_ms: int, younger: int, unread: Retention) -> LedgerStays | None:
    if _retained(span, unread, now_ms, younger) is not None:
        return LedgerStays.NOT_SUBSCRIBED
    return _retained(span, retention, now_ms, younger)


def _retained(span: Span, retention: Retention, now_ms: int, younger: int) -> LedgerStays | None:
    """Returns why retention keeps a ledger; None: it does not. `younger`: bytes of younger ledgers that all have
    acknowledged."""
    by_time = retention.minutes < 0 or now_ms - span.closed_ms < retention.minutes * 60_000
    by_size = retention.mib < 0 or younger < retention.mib << 20
    if retention.minutes == 0 and retention.mib == 0:
        return None
    if not by_time and retention.minutes > 0:
        return None
    if not by_size and retention.mib > 0:
        return None
    return LedgerStays.RETAINED_BY_TIME if by_time and retention.minutes else LedgerStays.RETAINED_BY_SIZE


def _passed(span: Span, holders: Sequence[Safe]) -> bool:
    return _holder(span, holders) is None


def _holder(span: Span, holders: Sequence[Safe]) -> Safe | None:
    """The first holder that still needs the ledger."""
    if span.last_entry < 0:
        return None
    return next((holder for holder in holders if not holder.passed(span)), None)
