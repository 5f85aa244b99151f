"""The upkeep of a topic: which work is due, decided from facts, without a clock of its own.

- **Rolling an idle ledger** (`rolls`; complaints 26, 28). Retention frees whole closed ledgers, and the last one of the
  list is never freed. So the one that is written ends, although it is not full, when nothing was published for
  `idle_s`, everything in it is durably acknowledged by every durable subscription, and retention will release it some
  day; or when it is older than the retention time (a topic that trickles keeps at most twice
  that). In a topic without a durable subscription, whose messages stay for a while, only that age ends it: a ledger for
  each message would be no help. A last one that is
  closed (none was needed since a take-over) gets a next one when it would be deleted if it were not the last.
- **Backlog quota** (Pulsar A17). The backlog of a topic is that of its slowest durable subscription: bytes after its
  mark, and the age of its oldest message that is not acknowledged. Past one of the limits: `HOLD` (producers' streams
  are not read until there is room), `REFUSE` (each publish is refused), `EVICT` (the oldest messages count as
  acknowledged until the quota is met again).
- **Inactive topics** (T6): no producer, no consumer, for `inactive_s`; and no durable subscription, or, in the other
  mode, none that has anything left to read.
- **Idle subscriptions** (S16): durable, without a consumer for `subscription_expiration_s`, as far as the broker that
  serves the topic has seen it: after a restart the time begins again, so one is never deleted too early.

Bytes after a mark inside a ledger are estimated by its entries' average size. Guarding test: test_upkeep.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....proto.applied import Applied
from ....proto.names import Position
from ....proto.states import BacklogQuotaState
from ...log.core.log_shape import LogShape
from ...log.core.trimming import NOTHING, Retention, Safe, would_go

_POLICIES = {
    "producer_request_hold": BacklogQuotaState.HOLD,
    "producer_exception": BacklogQuotaState.REFUSE,
    "consumer_backlog_eviction": BacklogQuotaState.EVICT,
}


def rolls(
    shape: LogShape, applied: Applied, holders: Sequence[Safe], *, quiet_s: float, age_s: float, idle_s: float,
    now_ms: int, unread: Retention = NOTHING,
) -> bool:  # fmt: skip
    """Whether the last ledger, not written for `quiet_s` and `age_s` old, is to be followed by another one so that it
    can be freed."""
    if shape.last.entry_id < 0 or shape.tail.last_entry < 0:
        return False
    tail = shape.tail
    if not tail.open:
        retention = Retention(applied.retention_minutes, applied.retention_mib)
        return quiet_s >= idle_s and would_go(tail, holders, retention, now_ms, unread)
    if applied.retention_minutes < 0 and applied.retention_mib < 0:
        return False
    if unread != NOTHING:
        return unread.minutes > 0 and age_s >= unread.minutes * 60
    if applied.retention_minutes > 0 and age_s >= applied.retention_minutes * 60:
        return True
    return quiet_s >= idle_s and all(holder.passed(tail) for holder in holders)


def backlog_bytes(shape: LogShape, mark: Position) -> int:
    """Returns about how many bytes are after the mark."""
    total = 0
    for span in shape.spans:
        if span.ledger_id > mark[0]:
            total += span.size
        elif span.ledger_id == mark[0] and span.last_entry >= 0:
            total += span.size * max(0, span.last_entry - mark[1]) // (span.last_entry + 1)
    return total


def delayed_bytes(shape: LogShape, delayed_in: Callable[[int], int]) -> int:
    """Returns about how many bytes are not due yet; `delayed_in`: how many entries of a ledger are not."""
    return sum(span.size * delayed_in(span.ledger_id) // (span.last_entry + 1) for span in shape.spans if span.size)


def over_quota(applied: Applied, backlog: int, oldest_s: float) -> BacklogQuotaState | None:
    """Returns the reaction; None: the quota is met. `oldest_s`: age of the oldest message that is not acknowledged; 0:
    there is none."""
    limit = applied.backlog_quota_bytes
    if (limit and backlog >= limit) or (applied.backlog_quota_s and oldest_s >= applied.backlog_quota_s):
        return _POLICIES[applied.backlog_quota_policy]
    return None


def mark_within(shape: LogShape, limit: int) -> Position:
    """The first mark with at most about `limit` bytes after it."""
    left = limit
    for span in reversed(shape.spans):
        if span.size > left:
            entries = span.last_entry + 1
            keep = left * entries // span.size
            return Position(span.ledger_id, entries - keep - 1)
        left -= span.size
    return shape.start


def inactive(applied: Applied, *, users: int, subscriptions: int, backlog: bool, unused_s: float) -> bool:
    """Whether the topic is inactive. `users` are producers and consumers; `backlog`: whether any durable subscription
    has something left to read."""
    if not applied.inactive_s or users or unused_s < applied.inactive_s:
        return False
    if applied.inactive_mode == "delete_when_no_subscriptions":
        return not subscriptions
    return not backlog
