"""A topic as it is now, for operators, in plain values: its producers, subscriptions, ledgers and compaction.

Fields have the names of the messages of proto/wire.proto, and their units: messages where a name gives none. Counters
run since the topic was loaded. What a text may say is the `value` of the enum it comes from: `Blocked`, `Quota`,
`TopicLogState`, `Stays`, `CompactionRunState`. Guarding tests: tests/broker/protocols/grpc/test_stats.py.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.transactions import TxnId
from ..log.topic_log import TopicLogState
from ..subscription.consumer import Consumer
from ..subscription.core.cursor_state import NOWHERE
from ..subscription.core.policies.policy import Keys
from ..subscription.subscription import Subscription
from ..topic.backlog import size
from ..topic.core.upkeep import backlog_bytes
from ..topic.examine import analyze
from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker")

OLDEST_S = 1.0
"""Seconds for the read of a subscription's oldest message."""


class ProducerStats(msgspec.Struct, frozen=True):
    """The statistics of a producer."""

    name: str
    address: str
    messages: int
    bytes: int
    last_sequence_id: int  # -1: nothing was published


class SlotRange(msgspec.Struct, frozen=True):
    """A range of the slots of keys; both ends belong to it."""

    first: int
    last: int


class ConsumerStats(msgspec.Struct, frozen=True):
    """The statistics of a consumer."""

    name: str
    address: str
    permits: int
    unacked: int
    delivered_messages: int
    delivered_bytes: int
    redelivered_messages: int
    blocked: bool  # it holds as many unacknowledged messages as it may
    priority_level: int
    slots: list[SlotRange]  # Key_Shared: what it owns


class DrainingSlot(msgspec.Struct, frozen=True):
    """A slot of keys that waits to change hands."""

    slot: int
    unacked_entries: int
    blocked_attempts: int


class SubscriptionStats(msgspec.Struct, frozen=True):
    """The statistics of a subscription."""

    name: str
    type: str  # EXCLUSIVE, …; empty: no consumer has connected yet
    durable: bool
    backlog: int
    backlog_bytes: int
    oldest_ms: int  # since the epoch; 0: none, or not known within OLDEST_S
    unacked: int
    mark_delete: Position
    read_position: Position
    acked_ranges: int  # after mark_delete
    consumers: list[ConsumerStats]
    active_consumer: str  # Exclusive, Failover
    blocked: str  # why no consumer gets the next message; empty: one does
    blocked_on_unacked: bool
    dispatch_throttled: int  # times
    replay_entries: int
    key_shared_mode: str  # empty: of another type, or without consumers; so are the next three
    allow_out_of_order_delivery: bool
    draining: list[DrainingSlot]
    drained_total: int  # slots
    delayed: int
    delayed_buckets: int
    delayed_memory_bytes: int
    pending_transactions: int
    pending_entries: int  # acknowledged in them


class TransactionId(msgspec.Struct, frozen=True):
    """The id of a transaction, in two halves."""

    most: int
    least: int


class TopicTransactions(msgspec.Struct, frozen=True):
    """The transactions of a topic that has seen some."""

    last_stable: Position  # nothing after it is shown: it is undecided, or follows what is
    stable_index: int  # one past its last message
    open: int
    oldest: TransactionId | None  # of the open ones, by its first entry
    oldest_ms: int  # its age
    aborted_entries: int  # that the log has
    aborted_bytes: int
    committed: int  # transactions that ended here since the topic was loaded
    aborted: int


class PendingOfTransaction(msgspec.Struct, frozen=True):
    """The acknowledgements of a transaction in a subscription."""

    name: str
    entries: int  # a cumulative acknowledgement counts as one
    up_to: Position | None  # acknowledged cumulatively


class TransactionHere(msgspec.Struct, frozen=True):
    """The part of a transaction that a topic has, and what waits there for its end."""

    known: bool  # it has not ended here
    first: Position | None  # its first entry
    entries: int
    bytes: int
    holds: bool  # the last stable position is before that entry, so that readers wait for it …
    waiting: int  # … and do not get so many messages: its own, and all that follow
    subscriptions: list[PendingOfTransaction]


class TopicStats(msgspec.Struct, frozen=True):
    """The statistics of a topic."""

    name: str
    owner: str  # HOST:PORT of its broker
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int
    rate_in: float  # a second
    rate_out: float
    throughput_in: float  # bytes a second
    throughput_out: float
    storage_bytes: int
    earliest_index: int
    end_index: int  # one past the newest
    producers: list[ProducerStats]
    subscriptions: list[SubscriptionStats]
    dropped: int
    quota: str  # what is done about a backlog above its quota; empty: it is not
    expired_entries: int
    evicted_entries: int
    publish_throttled: int  # times
    terminated: bool
    created_ms: int  # 0: not known
    published_ms: int  # the last publish since the topic was loaded; 0: none
    unsubscribed: str  # how long messages are kept without a durable subscription; empty: there is one, or none are
    transactions: TopicTransactions | None = None  # None: it has seen none


class LedgerStats(msgspec.Struct, frozen=True):
    """The statistics of a ledger, and why it is not deleted."""

    ledger_id: int
    state: str  # open, closed
    entries: int
    bytes: int
    first_index: int
    bookies: tuple[str, ...]
    stays: str  # why it is not deleted; empty: the next trim deletes it


class TopicInternalStats(msgspec.Struct, frozen=True):
    """The statistics of a topic's log."""

    state: str
    ledgers: list[LedgerStats]
    last_confirmed: Position
    cache_bytes: int  # of the whole broker
    pending_adds: int  # entries
    replication: str  # "E/Qw/Qa" of the ledger that is written; empty: there is none
    wanted_replication: str
    degraded: bool


class CompactionStatus(msgspec.Struct, frozen=True):
    """The last compaction; from `ledger_id` on the compacted ledger that is read now (-1: there is none)."""

    state: str
    step: str
    error: str
    looked_at: int
    to_look_at: int
    rounds: int
    due_bytes: int
    ledger_id: int = -1
    horizon: Position | None = None
    messages: int = 0
    entries: int = 0
    bytes: int = 0
    end_index: int = 0
    compacted_ms: int = 0


async def of_topic(topic: Topic, owner: str, *, precise: bool = False, ages: bool = True) -> TopicStats:
    """Returns the statistics of a topic. `precise`: the backlog counts batches that are acknowledged, wholly or in
    part, message by message. `ages` False: no `oldest_ms`, which may be a read from a bookie for each subscription."""
    shape, traffic, rates, life = topic.log.shape, topic.traffic, topic.traffic.rates(), topic.life
    return TopicStats(
        name=topic.name.full, owner=owner, messages_in=traffic.messages_in, bytes_in=traffic.bytes_in,
        messages_out=traffic.messages_out, bytes_out=traffic.bytes_out, rate_in=rates.messages_in,
        rate_out=rates.messages_out, throughput_in=rates.bytes_in, throughput_out=rates.bytes_out,
        storage_bytes=shape.size, earliest_index=shape.first_index, end_index=shape.end_index,
        producers=[
            ProducerStats(each.name, each.address, each.messages, each.bytes, each.last_sequence_id)
            for each in topic.producers
        ],
        subscriptions=[await of_subscription(topic, each, precise, ages) for each in [*topic.subscriptions.values()]],
        dropped=topic.dropped, quota=life.quota.value if life.quota is not None else "",
        expired_entries=life.expired, evicted_entries=life.evicted, publish_throttled=topic.gate.throttled,
        terminated=topic.log.state is TopicLogState.TERMINATED, created_ms=topic.incarnation,
        published_ms=topic.log.published_ms, unsubscribed=topic.unread().told(), transactions=_transactions(topic),
    )  # fmt: skip


def _transactions(topic: Topic) -> TopicTransactions | None:
    found = topic.transactions.statistics()
    if found is None:
        return None
    oldest = TransactionId(*found.oldest) if found.oldest is not None else None
    return TopicTransactions(
        found.last_stable, found.stable_index, found.open, oldest, found.oldest_ms, found.aborted_entries,
        found.aborted_bytes, found.commits, found.aborts,
    )  # fmt: skip


def of_transaction(topic: Topic, txn: TxnId) -> TransactionHere:
    subscriptions = [
        PendingOfTransaction(each.name, acks.count, acks.up_to if acks.up_to != NOWHERE else None)
        for each in topic.subscriptions.values()
        if each.cursor.pending is not None and (acks := each.cursor.pending.of.get(txn)) is not None
    ]
    found = topic.transactions.open_here(txn)
    if found is None:
        return TransactionHere(bool(subscriptions), None, 0, 0, False, 0, subscriptions)
    return TransactionHere(True, found.first, found.entries, found.size, found.holds, found.waiting, subscriptions)


async def of_subscription(
    topic: Topic, subscription: Subscription, precise: bool = False, ages: bool = True
) -> SubscriptionStats:  # fmt: skip
    log = topic.readable(uncommitted=subscription.uncommitted)
    backlog = (await analyze(log, subscription)).messages if precise else await size(log, subscription)
    oldest_ms = await _oldest_ms(topic, subscription) if ages else 0
    cursor, dispatcher = subscription.cursor, subscription.dispatcher
    type_, blocked = subscription.type, subscription.pump.blocked
    active, keys = dispatcher.policy.statistics()
    keys = keys if keys is not None and subscription.consumers else Keys("", False, 0, [], [])
    slots: dict[int, list[SlotRange]] = {id_: [] for id_ in subscription.consumers}
    for first, last, owner in keys.ranges:
        slots[owner.id].append(SlotRange(first, last))
    delays = subscription.delayed.core if subscription.delayed is not None else None
    return SubscriptionStats(
        name=subscription.name, type=type_.name if type_ is not None else "", durable=subscription.durable,
        backlog=backlog, backlog_bytes=backlog_bytes(topic.log.shape, cursor.mark), oldest_ms=oldest_ms,
        unacked=dispatcher.unacked, mark_delete=cursor.mark, read_position=dispatcher.read_position,
        acked_ranges=cursor.holes.ranges if cursor.acked else 0,
        consumers=[_consumer(each, slots[id_]) for id_, each in subscription.consumers.items()],
        active_consumer=active.name if active is not None else "",
        blocked=blocked.value if blocked is not None else "", blocked_on_unacked=dispatcher.full,
        dispatch_throttled=subscription.pump.rates[0].throttled, replay_entries=dispatcher.replay_entries,
        key_shared_mode=keys.mode, allow_out_of_order_delivery=keys.out_of_order,
        draining=[DrainingSlot(*each) for each in keys.draining], drained_total=keys.drained_total,
        delayed=delays.count if delays is not None else 0,
        delayed_buckets=delays.buckets if delays is not None else 0,
        delayed_memory_bytes=delays.memory_bytes if delays is not None else 0,
        pending_transactions=len(subscription.pending_transactions),
        pending_entries=cursor.pending.entries if cursor.pending is not None else 0,
    )  # fmt: skip


async def _oldest_ms(topic: Topic, subscription: Subscription) -> int:
    """Returns when the oldest message came, in ms; 0: none, or not known: it is lost, or no bookie gives it in time."""
    try:
        async with asyncio.timeout(OLDEST_S):
            return await topic.life.oldest_ms(subscription) or 0
    except (MagnetarError, TimeoutError) as error:
        _LOG.debug("%s/%s: when its oldest message came is not known: %r", topic.name, subscription.name, error)
        return 0


def _consumer(consumer: Consumer, slots: list[SlotRange]) -> ConsumerStats:
    member = consumer.member
    return ConsumerStats(
        name=member.name, address=consumer.address, permits=member.permits, unacked=member.unacked,
        delivered_messages=member.delivered_messages, delivered_bytes=member.delivered_bytes,
        redelivered_messages=member.redelivered_messages, blocked=member.blocked, priority_level=member.priority,
        slots=slots,
    )  # fmt: skip


def internals(topic: Topic, cache_bytes: int) -> TopicInternalStats:
    """Returns the internal statistics of a topic's log. `cache_bytes`: of the broker."""
    log = topic.log
    return TopicInternalStats(
        state=log.state.value,
        ledgers=[
            LedgerStats(
                span.ledger_id, "open" if span.open else "closed", span.last_entry + 1, span.size, span.first_index,
                log.ensemble.get(span.ledger_id, ()), stays.value if stays is not None else "",
            )
            for span, (_, stays) in zip(log.shape.spans, topic.why_ledgers_stay(), strict=True)
        ],
        last_confirmed=log.shape.last, cache_bytes=cache_bytes, pending_adds=log.pending_entries,
        replication=str(log.replication or ""), wanted_replication=str(log.wanted), degraded=log.degraded,
    )  # fmt: skip


def of_compaction(topic: Topic) -> CompactionStatus:
    progress, record = topic.compaction.progress, topic.compaction.record
    status = (
        progress.state.value, progress.step, progress.error, progress.looked_at, progress.to_look_at, progress.rounds,
        topic.compaction.due_bytes(),
    )  # fmt: skip
    if record is None:
        return CompactionStatus(*status)
    return CompactionStatus(
        *status, record.ledger_id, Position(record.horizon_ledger, record.horizon_entry), record.messages,
        record.entries, record.size, record.end_index, record.compacted_ms,
    )  # fmt: skip
