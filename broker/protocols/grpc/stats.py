"""What `topics stats` shows: a topic, its producers, subscriptions and ledgers, as they are now."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.names import Position
from ...log.topic_log import TopicLogState
from ...subscription.consumer import Consumer
from ...subscription.core.policies.policy import Keys
from ...subscription.subscription import Subscription
from ...topic.backlog import size
from ...topic.core.upkeep import backlog_bytes
from ...topic.examine import analyze
from ...topic.topic import Topic


async def of_topic(topic: Topic, owner: str, *, precise: bool = False) -> wire.TopicStatsReply:
    """`precise`: the backlog counts batches that are acknowledged, wholly or in part, message by message."""
    shape, traffic, rates = topic.log.shape, topic.traffic, topic.traffic.rates()
    return wire.TopicStatsReply(
        name=topic.name.full, owner=owner, messages_in=traffic.messages_in, bytes_in=traffic.bytes_in,
        messages_out=traffic.messages_out, bytes_out=traffic.bytes_out, storage_bytes=shape.size,
        earliest_index=shape.first_index, end_index=shape.end_index,
        producers=[
            wire.ProducerStats(
                name=each.name, address=each.address, messages=each.messages, bytes=each.bytes,
                last_sequence_id=each.last_sequence_id,
            )
            for each in topic.producers
        ],
        subscriptions=[await of_subscription(topic, each, precise) for each in list(topic.subscriptions.values())],
        rate_in=rates.messages_in, rate_out=rates.messages_out,
        throughput_in=rates.bytes_in, throughput_out=rates.bytes_out,
        dropped=topic.dropped, quota=topic.life.quota.value if topic.life.quota is not None else "",
        expired_entries=topic.life.expired, evicted_entries=topic.life.evicted,
        publish_throttled=topic.gate.throttled, terminated=topic.log.state is TopicLogState.TERMINATED,
    )  # fmt: skip


async def of_subscription(topic: Topic, subscription: Subscription, precise: bool = False) -> wire.SubscriptionStats:
    backlog = (await analyze(topic.log, subscription)).messages if precise else await size(topic.log, subscription)
    oldest_ms = await topic.life.oldest_ms(subscription) if precise else None
    dispatcher = subscription.dispatcher
    type_, blocked = subscription.type, subscription.blocked
    stats = wire.SubscriptionStats(
        name=subscription.name, type=type_.name if type_ is not None else "",
        backlog=backlog, backlog_bytes=backlog_bytes(topic.log.shape, subscription.cursor.mark),
        oldest_ms=oldest_ms or 0, dispatch_throttled=subscription.rates[0].throttled, unacked=dispatcher.unacked,
        durable=subscription.durable, mark_delete=_position(subscription.cursor.mark),
        read_position=_position(dispatcher.read_position),
        acked_ranges=subscription.cursor.hole_ranges, blocked=blocked.value if blocked is not None else "",
        blocked_on_unacked=dispatcher.full, replay_entries=dispatcher.replay_entries,
        consumers=[_consumer(each) for each in subscription.consumers.values()],
    )  # fmt: skip
    if subscription.delayed is not None:
        delays = subscription.delayed.core
        stats.delayed, stats.delayed_buckets = delays.count, delays.buckets
        stats.delayed_memory_bytes = delays.memory_bytes
    active, keys = dispatcher.policy.statistics()
    if active is not None:
        stats.active_consumer = active.name
    if keys is not None and subscription.consumers:
        _add_slots(stats, subscription, keys)
    return stats


def _consumer(consumer: Consumer) -> wire.ConsumerStats:
    member = consumer.member
    return wire.ConsumerStats(
        name=member.name, address=consumer.address, permits=member.permits, unacked=member.unacked,
        delivered_messages=member.delivered_messages, delivered_bytes=member.delivered_bytes,
        redelivered_messages=member.redelivered_messages, blocked=member.blocked, priority_level=member.priority,
    )  # fmt: skip


def _add_slots(stats: wire.SubscriptionStats, subscription: Subscription, keys: Keys) -> None:
    """Who owns which slots of keys, and which wait to change hands."""
    stats.key_shared_mode = keys.mode
    stats.allow_out_of_order_delivery = keys.out_of_order
    stats.drained_total = keys.drained_total
    for slot, unacked, attempts in keys.draining:
        stats.draining.add(slot=slot, unacked_entries=unacked, blocked_attempts=attempts)
    shown = dict(zip(subscription.consumers, stats.consumers, strict=True))
    for first, last, owner in keys.ranges:
        shown[owner.id].slots.add(first=first, last=last)


def internals(topic: Topic, cache_bytes: int) -> wire.TopicInternalStatsReply:
    log = topic.log
    return wire.TopicInternalStatsReply(
        state=log.state.value, last_confirmed=_position(log.shape.last), cache_bytes=cache_bytes,
        pending_adds=log.pending_entries, replication=str(log.replication or ""), wanted_replication=str(log.wanted),
        degraded=log.degraded,
        ledgers=[
            wire.LedgerStats(
                ledger_id=span.ledger_id, entries=span.last_entry + 1, bytes=span.size, first_index=span.first_index,
                state="open" if span.open else "closed", bookies=log.ensemble.get(span.ledger_id, ()),
            )
            for span in log.shape.spans
        ],
    )  # fmt: skip


def of_compaction(topic: Topic) -> wire.CompactionStatusReply:
    progress, record = topic.compaction.progress, topic.compaction.record
    reply = wire.CompactionStatusReply(
        state=progress.state.value, step=progress.step, error=progress.error, looked_at=progress.looked_at,
        to_look_at=progress.to_look_at, rounds=progress.rounds, due_bytes=topic.compaction.due_bytes(), ledger_id=-1,
    )  # fmt: skip
    if record is not None:
        reply.ledger_id, reply.end_index, reply.compacted_ms = record.ledger_id, record.end_index, record.compacted_ms
        reply.messages, reply.entries, reply.bytes = record.messages, record.entries, record.size
        reply.horizon.CopyFrom(_position(Position(record.horizon_ledger, record.horizon_entry)))
    return reply


def _position(position: Position) -> wire.Position:
    return wire.Position(ledger_id=position[0], entry_id=position[1])
