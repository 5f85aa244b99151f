"""A topic as it is now, for operators: producers, subscriptions, ledgers and compaction, as in proto/statistics.py.

Guarding tests: tests/broker/grpc/test_stats.py.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import cast

from ...proto import states
from ...proto import statistics as values
from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.states import TxnId
from ..subscription.consumer import Consumer
from ..subscription.core.cursor_state import NOWHERE
from ..subscription.core.policy import SlotDistribution
from ..subscription.core.subscription_types import SubscriptionType as Registered
from ..subscription.subscription import Subscription
from ..topic.admission_core import backlog_bytes
from ..topic.statistics import analyze_backlog, count_unacknowledged, estimate_backlog
from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker")

OLDEST_S = 1.0
"""Seconds that reading a subscription's oldest message may take."""


async def topic_stats(topic: Topic, owner: str, *, precise: bool = False, ages: bool = True) -> values.TopicStats:
    """Returns the statistics of a topic. `precise`: the backlog is counted message by message, also in batches that are
    acknowledged wholly or in part. `ages` False: reads no entry from bookies: leaves out `oldest_ms`, and estimates a
    backlog for which one would have to be read."""
    shape, traffic, rates, life = topic.log.shape, topic.traffic, topic.traffic.rates(), topic.maintenance
    return values.TopicStats(
        name=topic.name.full, owner=owner, partitions=0, messages_in=traffic.messages_in, bytes_in=traffic.bytes_in,
        messages_out=traffic.messages_out, bytes_out=traffic.bytes_out, rate_in=rates.messages_in,
        rate_out=rates.messages_out, throughput_in=rates.bytes_in, throughput_out=rates.bytes_out,
        storage_bytes=shape.size, earliest_index=shape.first_index, end_index=shape.end_index,
        producers=tuple(
            values.ProducerStats(each.name, each.address, each.messages, each.bytes, each.last_sequence_id)
            for each in topic.producers
        ),
        subscriptions=tuple(
            [await subscription_stats(topic, each, precise, ages) for each in [*topic.subscriptions.values()]]
        ),
        dropped=topic.dropped_messages, quota=life.quota or states.BacklogQuotaState.NOT_REACHED,
        expired_entries=life.expired, evicted_entries=life.evicted, publish_throttled=topic.gate.rate_limited_count,
        terminated=topic.log.state is states.TopicState.TERMINATED, created_ms=topic.incarnation,
        published_ms=topic.log.last_published_ms, unsubscribed=topic.unsubscribed_retention().describe(),
        transactions=_transactions(topic),
    )  # fmt: skip


def _transactions(topic: Topic) -> values.TopicTransactions | None:
    found = topic.transactions.statistics()
    if found is None:
        return None
    return values.TopicTransactions(
        found.last_stable, found.stable_index, found.open, found.oldest, found.oldest_ms, found.aborted_entries,
        found.aborted_bytes, found.commits, found.aborts,
    )  # fmt: skip


def transaction_stats(topic: Topic, txn: TxnId) -> values.TransactionHere:
    subscriptions = tuple(
        values.PendingOfTransaction(each.name, acks.entry_count, acks.up_to if acks.up_to != NOWHERE else None)
        for each in topic.subscriptions.values()
        if each.cursor.pending is not None and (acks := each.cursor.pending.of.get(txn)) is not None
    )
    found = topic.transactions.find_open(txn)
    if found is None:
        return values.TransactionHere(bool(subscriptions), None, 0, 0, False, 0, subscriptions)
    entries = found.entries, found.size, found.holds, found.waiting
    return values.TransactionHere(True, found.first, *entries, subscriptions)


async def subscription_stats(
    topic: Topic, subscription: Subscription, precise: bool = False, ages: bool = True
) -> values.SubscriptionStats:  # fmt: skip
    log = topic.readable_log(uncommitted=subscription.reads_uncommitted)
    backlog = (
        (await analyze_backlog(log, subscription)).messages
        if precise
        else await count_unacknowledged(log, subscription) if ages
        else estimate_backlog(log, subscription)
    )
    oldest_ms = await _oldest_ms(topic, subscription) if ages else 0
    cursor, dispatcher = subscription.cursor, subscription.dispatcher
    type_, blocked = subscription.type, subscription.pump.blocked
    active, keys = dispatcher.policy.statistics()
    keys = keys if keys is not None and subscription.consumers else SlotDistribution("", False, 0, [], [])
    slots: dict[int, list[values.SlotRange]] = {id_: [] for id_ in subscription.consumers}
    for first, last, owner in keys.ranges:
        slots[owner.id].append(values.SlotRange(first, last))
    delays = subscription.delayed.core if subscription.delayed is not None else None
    return values.SubscriptionStats(
        name=subscription.name, type=_name(type_), durable=subscription.is_durable,
        backlog=backlog, backlog_bytes=backlog_bytes(topic.log.shape, cursor.mark), oldest_ms=oldest_ms,
        unacked=dispatcher.unacked, mark_delete=cursor.mark, read_position=dispatcher.read_position,
        acked_ranges=cursor.holes.range_count if cursor.acked else 0,
        consumers=tuple(_consumer(each, slots[id_]) for id_, each in subscription.consumers.items()),
        active_consumer=active.name if active is not None else "",
        blocked=blocked or states.Blocked.NO, blocked_on_unacked=dispatcher.full,
        dispatch_throttled=subscription.pump.rates[0].throttled, replay_entries=dispatcher.replay_entries,
        key_shared_mode=states.KeyDistribution(keys.mode), allow_out_of_order_delivery=keys.out_of_order,
        draining=tuple(values.DrainingSlot(*each) for each in keys.draining), drained_total=keys.drained_total,
        delayed=delays.count if delays is not None else 0,
        delayed_buckets=delays.bucket_count if delays is not None else 0,
        delayed_memory_bytes=delays.memory_bytes if delays is not None else 0,
        pending_transactions=len(subscription.pending_transactions),
        pending_entries=cursor.pending.entry_count if cursor.pending is not None else 0,
    )  # fmt: skip


def _name(type_: Registered | None) -> states.SubscriptionType:
    """Returns the subscription type; the name of the type if only this broker has registered it."""
    if type_ is None:
        return states.SubscriptionType.NONE
    return states.SubscriptionType.__members__.get(type_.name, cast(states.SubscriptionType, type_.name))


async def _oldest_ms(topic: Topic, subscription: Subscription) -> int:
    """Returns when the oldest unacknowledged message arrived (ms since the epoch); 0 if there is none, or it cannot be
    read within OLDEST_S."""
    try:
        async with asyncio.timeout(OLDEST_S):
            return await topic.maintenance.oldest_arrival_ms(subscription) or 0
    except (MagnetarError, TimeoutError) as error:
        _LOG.debug("%s/%s: when its oldest message came is not known: %r", topic.name, subscription.name, error)
        return 0


def _consumer(consumer: Consumer, slots: list[values.SlotRange]) -> values.ConsumerStats:
    member = consumer.member
    return values.ConsumerStats(
        name=member.name, address=consumer.address, permits=member.permits, unacked=member.unacked,
        delivered_messages=member.delivered_messages, delivered_bytes=member.delivered_bytes,
        redelivered_messages=member.redelivered_messages, blocked=member.blocked, priority_level=member.priority,
        slots=tuple(slots),
    )  # fmt: skip


def internal_stats(topic: Topic, cache_bytes: int) -> values.TopicInternalStats:
    """Returns the internal statistics of a topic's log. `cache_bytes`: the bytes in the broker's tail cache."""
    log = topic.log
    return values.TopicInternalStats(
        state=log.state,
        ledgers=tuple(
            values.LedgerStats(
                span.ledger_id, states.LedgerState.OPEN if span.open else states.LedgerState.CLOSED,
                span.last_entry + 1, span.size, span.first_index, log.ensemble.get(span.ledger_id, ()),
                stays or states.LedgerStays.NO,
            )
            for span, (_, stays) in zip(log.shape.spans, topic.why_ledgers_stay(), strict=True)
        ),
        last_confirmed=log.shape.last, cache_bytes=cache_bytes, pending_adds=log.pending_entries,
        replication=str(log.replication or ""), wanted_replication=str(log.wanted_replication),
        degraded=log.is_degraded,
    )  # fmt: skip


def compaction_stats(topic: Topic) -> values.CompactionStatus:
    progress, record = topic.compaction.progress, topic.compaction.record
    found = values.CompactionStatus(
        progress.state, progress.step, progress.error, progress.looked_at, progress.to_look_at, progress.rounds,
        ledger_id=-1, horizon=Position(0, 0), messages=0, entries=0, bytes=0, end_index=0, compacted_ms=0,
        due_bytes=topic.compaction.uncompacted_bytes(),
    )  # fmt: skip
    if record is None:
        return found
    return replace(
        found, ledger_id=record.ledger_id, horizon=Position(record.horizon_ledger, record.horizon_entry),
        messages=record.messages, entries=record.entries, bytes=record.size, end_index=record.end_index,
        compacted_ms=record.compacted_ms,
    )  # fmt: skip
