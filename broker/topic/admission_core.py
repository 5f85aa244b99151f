"""Admission to a topic: the limits on the numbers of its producers, consumers and subscriptions (Pulsar T10, S13), and
the rate of subscribing (L1). The second half of the module has the decisions of a topic's maintenance, with their
rules: rolling an idle ledger (`must_roll_ledger`), the backlog quota (`judge_backlog_quota`), inactive topics
(`is_topic_inactive`), idle subscriptions (only their rule; the deletion is in maintenance.py), idle topics
(`why_topic_stays`).

The topic calls the checks before a producer or consumer joins, in the order below. The first limit that is reached
refuses the client, and the error names the limit. A lowered limit disconnects no connected client. A client that
connects again (same `instance`) counts as connected, so its own old connection never locks it out.

| asked | limits | refused with |
|---|---|---|
| `check_producer` | max_producers; max_same_address_producers | ProducerBusy |
| `check_subscription` | max_subscriptions; auto_subscription_creation | NotAllowed; SubscriptionNotFound |
| `check_consumer` | subscription_types | NotAllowed |
| | max_consumers, max_consumers_per_subscription; max_same_address_consumers | ConsumerBusy |
| `check_subscribe_rate` | subscribe_rate: so many times in subscribe_rate_period_s | BackPressure |

An address is a host, without its port: all clients of one gateway have the same address. Each pair of host and consumer
name (without a name: its instance) has a token bucket of `subscribe_rate` tokens, which fills in one period. So a
consumer that connects again and again is slowed down to this rate. Pulsar refuses such a consumer for good
(NotAllowed); here the client may retry after BackPressure, and its back-off slows it down. Full buckets are removed; at
most TOKEN_BUCKETS_MAX are kept. Guarding tests: tests/broker/topic/test_admission.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from ...proto.applied import AppliedPolicies
from ...proto.errors import MagnetarError, ProducerBusy
from ...proto.names import Position, TopicName
from ...proto.states import BacklogQuotaState, TopicStays
from ..common.refusals import SubscribeRefusal
from ..log.log_shape_core import (
    NO_RETENTION,
    LogShape,
    Retention,
    TrimLimit,
    find_ledger_age_share,
    may_trim_last_ledger,
)
from ..subscription.core.subscription_types import SubscriptionTypeRow

TOKEN_BUCKETS_MAX = 10_000


class ConnectedClientIdentity(Protocol):
    """The address and the instance of a producer or a consumer that is connected or about to join. `TopicProducer` and
    `Consumer` implement it. `address`: host and port; `instance`: the same for all connections of one client object, ""
    if the client names none."""

    @property
    def address(self) -> str: ...
    @property
    def instance(self) -> str: ...


def host_of_address(address: str) -> str:
    """Returns the part of `address` before its last colon, which is the host; the whole `address` if it has no port."""
    return address.rpartition(":")[0] or address


def _returns(who: ConnectedClientIdentity, there: Collection[ConnectedClientIdentity]) -> bool:
    """Returns True if the client `who` connects again: a client in `there` has the same instance."""
    return bool(who.instance) and any(each.instance == who.instance for each in there)


class TopicAdmission:
    """Decides which producers, consumers and subscriptions one topic admits, by the limits in its policies."""

    __slots__ = ("_buckets", "_same_address_consumers", "_same_address_producers", "_topic")

    def __init__(self, topic: TopicName, same_address_producers: int, same_address_consumers: int) -> None:
        self._topic = topic
        self._same_address_producers = same_address_producers
        self._same_address_consumers = same_address_consumers
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}  # whose → tokens, and when they were counted

    def check_producer(
        self, applied: AppliedPolicies, who: ConnectedClientIdentity, there: Collection[ConnectedClientIdentity]
    ) -> None:
        """Raises ProducerBusy if the topic has its maximum of producers, in total or from the address of `who`. Always
        admits a client that connects again (same instance as a client in `there`). `there`: the connected producers."""
        limited = applied.max_producers or self._same_address_producers
        if not limited or _returns(who, there):
            return
        if 0 < applied.max_producers <= len(there):
            limit = applied.max_producers
            raise ProducerBusy(f"topic {self._topic} has {limit} producers, as many as it may have", topic=self._topic)
        self._check_address(self._same_address_producers, who, there, "producers", ProducerBusy)

    def check_subscription(self, applied: AppliedPolicies, name: str, there: int, *, by_consumer: bool) -> None:
        """Raises NotAllowed if the topic has its maximum of subscriptions; SubscriptionNotFound if a consumer
        (`by_consumer`) asks for a new subscription, and the policy forbids that consumers create subscriptions.
        `there`: the present number of subscriptions."""
        if by_consumer and not applied.auto_subscription_creation:
            raise SubscribeRefusal.NOT_MADE.error(
                f"topic {self._topic} has no subscription {name!r}, and it is not made automatically", subscription=name
            )
        if 0 < applied.max_subscriptions <= there:
            limit = applied.max_subscriptions
            raise SubscribeRefusal.TOO_MANY_SUBSCRIPTIONS.error(
                f"topic {self._topic} has {limit} subscriptions, as many as it may have"
            )

    def check_consumer(
        self, applied: AppliedPolicies, type_: SubscriptionTypeRow, who: ConnectedClientIdentity, subscription: str,
        everybody: Collection[ConnectedClientIdentity], mine: Collection[ConnectedClientIdentity],
    ) -> None:  # fmt: skip
        """Raises NotAllowed if the topic does not allow the subscription type; ConsumerBusy if the topic, the
        subscription, or the address of `who` has its maximum of consumers. The maximum does not apply to a client that
        connects again (same instance as a client in `everybody`). `everybody`: the consumers of the topic; `mine`: the
        consumers of the subscription."""
        if not type_.installed and type_.title not in applied.subscription_types:
            allowed = ", ".join(applied.subscription_types)
            raise SubscribeRefusal.TYPE_NOT_ALLOWED.error(
                f"topic {self._topic} allows the subscription types {allowed}, not {type_.title}"
            )
        limited = applied.max_consumers or applied.max_consumers_per_subscription or self._same_address_consumers
        if not limited or _returns(who, everybody):
            return
        for limit, count, where in (
            (applied.max_consumers, len(everybody), f"topic {self._topic}"),
            (applied.max_consumers_per_subscription, len(mine), f"subscription {subscription!r}"),
        ):
            if 0 < limit <= count:
                raise SubscribeRefusal.TOO_MANY_CONSUMERS.error(
                    f"{where} has {limit} consumers, as many as it may have", topic=self._topic
                )
        self._check_address(
            self._same_address_consumers, who, everybody, "consumers", SubscribeRefusal.TOO_MANY_OF_ADDRESS.error
        )

    def _check_address(
        self, limit: int, who: ConnectedClientIdentity, there: Collection[ConnectedClientIdentity], what: str,
        error: Callable[..., MagnetarError],
    ) -> None:  # fmt: skip
        host = host_of_address(who.address)
        if limit and sum(host_of_address(each.address) == host for each in there) >= limit:
            raise error(
                f"topic {self._topic} has {limit} {what} from {host}, as many as may come from one address",
                topic=self._topic,
            )

    # ------------------------------------------------------------------ the rate of subscribing
    def check_subscribe_rate(
        self, applied: AppliedPolicies, who: ConnectedClientIdentity, name: str, now: float
    ) -> None:
        """Raises BackPressure if a consumer subscribes too often. Each pair of host and consumer `name` has a token
        bucket; without a name, the consumer's instance replaces it. Each permitted call takes one token from the
        bucket; a call fails if the bucket has less than one token. `now`: monotonic seconds. If the policy sets no
        rate, permits every call."""
        rate, period_s = applied.subscribe_rate, applied.subscribe_rate_period_s
        if not rate:
            self._buckets.clear()
            return
        key = host_of_address(who.address), name or who.instance
        tokens, at = self._buckets.pop(key, (float(rate), now))
        tokens = min(float(rate), tokens + (now - at) * rate / period_s)
        self._buckets[key] = (tokens - 1 if tokens >= 1 else tokens), now
        if len(self._buckets) > TOKEN_BUCKETS_MAX:
            self._expire_buckets(rate, period_s, now)
        if tokens < 1:
            raise SubscribeRefusal.RATE.error(
                f"topic {self._topic}: consumer {name!r} has subscribed {rate} times within {period_s} s, as often as "
                f"it may (subscribe-rate); in {(1 - tokens) * period_s / rate:.1f} s again",
                topic=self._topic,
            )

    def _expire_buckets(self, rate: int, period_s: int, now: float) -> None:
        """Removes the token buckets that are full. If too many buckets remain, also removes those that were used least
        recently."""
        self._buckets = {
            key: (tokens, at)
            for key, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * rate / period_s < rate
        }
        while len(self._buckets) > TOKEN_BUCKETS_MAX:
            del self._buckets[next(iter(self._buckets))]

    def statistics(self) -> dict[str, int]:
        """Returns the number of token buckets that are in memory, under the key "subscribe_rate_buckets"."""
        return {"subscribe_rate_buckets": len(self._buckets)}


# --------------------------------------------------------------------------------------------------- upkeep_core
# The upkeep of a topic: which work is due, decided from facts, without a clock of its own.
#
# - **Rolling an idle ledger** (`must_roll_ledger`; complaints 26, 28). Retention frees whole closed ledgers, and the
#   last one of the list is never freed. So the one that is written ends, although it is not full, when nothing was
#   published for `idle_s`, everything in it is durably acknowledged by every durable subscription, and retention will
#   release it some day; or when it is older than the retention time (a topic with few publishes keeps at most twice
#   that). In a topic without a durable subscription, whose messages stay for a while, only that age ends it: a ledger
#   for each message would be no help. A last one that is closed (none was needed since a take-over) gets a next one
#   when it would be deleted if it were not the last.
# - **Backlog quota** (Pulsar A17). The backlog of a topic is that of its slowest durable subscription: bytes after its
#   mark, and the age of its oldest message that is not acknowledged. Past one of the limits: `HOLD` (producers' streams
#   are not read until there is room), `REFUSE` (each publish is refused), `EVICT` (the oldest messages count as
#   acknowledged until the quota is met again).
# - **Inactive topics** (T6): no producer, no consumer, for `inactive_s`; and no durable subscription, or, in the other
#   mode, none that has anything left to read.
# - **Idle subscriptions** (S16): durable, without a consumer and without acknowledgements of an open transaction for
#   `subscription_expiration_s`, as far as the broker that serves the topic has seen it: after a restart the time begins
#   again, so one is never deleted too early (maintenance.py `TopicMaintenance.delete_idle_subscriptions`).
#
# - **Idle topics** (`why_topic_stays`): a topic that has no client, no backlog and no work is unloaded when it was not
#   used for `unload_idle_s`. Its next use loads it again; so does its broker when the retention of its messages has
#   ended (`compute_release_delay_s`), to delete them. What else a clock would do to a topic (expiry, the deletion of
#   unused topics and subscriptions) keeps it loaded.
#
# Bytes after a mark inside a ledger are estimated by its entries' average size. Guarding test: test_upkeep.py.


_POLICIES = {
    "producer_request_hold": BacklogQuotaState.HOLD,
    "producer_exception": BacklogQuotaState.REFUSE,
    "consumer_backlog_eviction": BacklogQuotaState.EVICT,
}


def must_roll_ledger(
    topic: TopicName, shape: LogShape, applied: AppliedPolicies, holders: Sequence[TrimLimit], *, quiet_s: float,
    age_s: float, idle_s: float, now_ms: int, unread: Retention = NO_RETENTION,
) -> bool:  # fmt: skip
    """Returns True if the topic must begin a new ledger, so that its last ledger can be deleted later. That is so if
    the last ledger is at least as old as its share of the retention time (broker/log/log_shape_core.py
    `find_ledger_age_share`); or if nothing was written to it for `idle_s` seconds, and no holder needs it. A last
    ledger that is closed is replaced only if it is idle and retention would delete it. Without durable subscriptions
    only the age counts, against `unread`. Returns False if the last ledger has no entry, or is open and its retention
    is unlimited.

    `holders`: which part of the log each holder no longer needs; `quiet_s`: for how many seconds nothing was written to
    the last ledger; `age_s`: its age in seconds; `now_ms`: the wall clock (ms since the epoch). `unread`: the retention
    for a topic without durable subscriptions, NO_RETENTION if it has one.
    """
    if shape.last_position.entry_id < 0 or shape.tail_span.last_entry < 0:
        return False
    tail = shape.tail_span
    if not tail.open:
        retention = Retention(applied.retention_minutes, applied.retention_mib)
        return quiet_s >= idle_s and may_trim_last_ledger(tail, holders, retention, now_ms, unread)
    if applied.retention_minutes < 0 and applied.retention_mib < 0:
        return False
    minute_s = 60 * find_ledger_age_share(topic, tail.ledger_id)
    if unread != NO_RETENTION:
        return unread.minutes > 0 and age_s >= unread.minutes * minute_s
    if applied.retention_minutes > 0 and age_s >= applied.retention_minutes * minute_s:
        return True
    return quiet_s >= idle_s and all(holder.has_released_ledger(tail) for holder in holders)


def compute_backlog_bytes(shape: LogShape, mark: Position) -> int:
    """Returns the number of bytes in the log after the position `mark`. The part of a ledger after `mark` is estimated
    by the average size of the ledger's entries."""
    total = 0
    for span in shape.spans:
        if span.ledger_id > mark[0]:
            total += span.size
        elif span.ledger_id == mark[0] and span.last_entry >= 0:
            total += span.size * max(0, span.last_entry - mark[1]) // (span.last_entry + 1)
    return total


def estimate_delayed_bytes(shape: LogShape, delayed_in: Callable[[int], int]) -> int:
    """Returns an estimate of the bytes of those entries that a subscription holds back until their delivery time. The
    function `delayed_in` returns the number of such entries in a ledger."""
    return sum(span.size * delayed_in(span.ledger_id) // (span.last_entry + 1) for span in shape.spans if span.size)


def judge_backlog_quota(applied: AppliedPolicies, backlog: int, oldest_s: float) -> BacklogQuotaState | None:
    """Returns how the topic reacts to a backlog that has reached the quota, as the policy says; None if the backlog is
    below the quota, or if there is none. `backlog`: its size in bytes; `oldest_s`: the age in seconds of the oldest
    unacknowledged message, 0 if there is none."""
    limit = applied.backlog_quota_bytes
    if (limit and backlog >= limit) or (applied.backlog_quota_s and oldest_s >= applied.backlog_quota_s):
        return _POLICIES[applied.backlog_quota_policy]
    return None


def find_mark_for_backlog_bytes(shape: LogShape, limit: int) -> Position:
    """Returns the earliest position that has at most about `limit` bytes of the log after it; the position before the
    first entry if the whole log has no more bytes."""
    left = limit
    for span in reversed(shape.spans):
        if span.size > left:
            entries = span.last_entry + 1
            keep = left * entries // span.size
            return Position(span.ledger_id, entries - keep - 1)
        left -= span.size
    return shape.start_position


def is_topic_inactive(
    applied: AppliedPolicies, *, users: int, subscriptions: int, backlog: bool, unused_s: float
) -> bool:
    """Returns True if the policy counts the topic as inactive; never if `inactive_s` of the policy is 0. `users`: the
    number of its producers and consumers; `subscriptions`: the number of its durable subscriptions; `backlog`: True if
    one of these has unacknowledged messages; `unused_s`: for how many seconds the topic had no user. In the mode
    `delete_when_no_subscriptions` a topic with a durable subscription is not inactive; in the other mode one with
    unacknowledged messages is not."""
    if not applied.inactive_s or users or unused_s < applied.inactive_s:
        return False
    if applied.inactive_mode == "delete_when_no_subscriptions":
        return not subscriptions
    return not backlog


class TopicUse(NamedTuple):
    """The facts from which `why_topic_stays` decides. `clients`: the connected producers and consumers; `unused_s`: for
    how many seconds no client was connected and no call asked for the topic; `transactions`: whether one is open;
    `backlog`: whether a durable subscription has anything left; `work`: whether anything is being done to it;
    `subscriptions`: the number of its durable subscriptions; `bytes`: what its log stores."""

    persistent: bool
    clients: int
    unused_s: float
    transactions: bool
    backlog: bool
    work: bool
    subscriptions: int
    bytes: int


def why_topic_stays(
    use: TopicUse, applied: AppliedPolicies, unread: Retention, unload_idle_s: float
) -> TopicStays | None:
    """Returns the reason why a topic stays loaded; None if the broker may unload it. `unread`: the retention for a
    topic without durable subscriptions, NO_RETENTION if it has one; `unload_idle_s`: the setting, 0: never."""
    reasons = (
        (not unload_idle_s, TopicStays.NOT_UNLOADED),
        (not use.persistent, TopicStays.IN_MEMORY),
        (use.clients > 0, TopicStays.CLIENTS),
        (use.unused_s < unload_idle_s, TopicStays.USED),
        (use.transactions, TopicStays.TRANSACTION),
        (use.backlog, TopicStays.BACKLOG),
        (use.work, TopicStays.WORK),
        (use.bytes > 0 and compute_release_delay_s(applied, unread) == 0, TopicStays.RETENTION),
        (
            applied.inactive_s > 0 or (use.subscriptions > 0 and applied.subscription_expiration_s > 0),
            TopicStays.DELETED_UNUSED,
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def compute_release_delay_s(applied: AppliedPolicies, unread: Retention) -> float:
    """Returns the seconds after which retention keeps no message that is acknowledged now, and no message of a topic
    without durable subscriptions (`unread`: its retention). Returns 0 if none of these is kept now, infinity if the
    passing of time releases none."""
    kinds = (unread, Retention(applied.retention_minutes, applied.retention_mib))
    if any(each.minutes < 0 or (each.minutes == 0 and each.mib != 0) for each in kinds):
        return math.inf
    return 60.0 * max(each.minutes for each in kinds)
