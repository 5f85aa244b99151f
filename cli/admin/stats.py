"""Statistics of topics and subscriptions, under the names that Pulsar's tools parse (pulsar-client-go `data.go`).

A partitioned topic's record is the sum over its partitions, each asked from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...client import admin as values
    from ...proto.transactions import TxnId
    from ..common.session import Session

COLUMNS = ("topic", "partitions", "msgInCounter", "msgOutCounter", "storageSize", "msgBacklog", "msgRateIn")
SUBSCRIPTION_COLUMNS = ("subscription", "type", "msgBacklog", "unackedMessages", "consumers", "markDelete", "blocked")
TRANSACTION_COLUMNS = (
    "topic", "open", "oldest", "oldestOwner", "oldestAddress", "oldestMs", "lastStable", "waiting", "committed",
    "aborted", "abortedEntries", "abortedBytes",
)  # fmt: skip
LEDGER_COLUMNS = ("ledgerId", "state", "entries", "size", "firstIndex", "bookies", "stays")

_SUMMED = {
    "msgRateIn": "rate_in",
    "msgRateOut": "rate_out",
    "msgThroughputIn": "throughput_in",
    "msgThroughputOut": "throughput_out",
    "msgInCounter": "messages_in",
    "bytesInCounter": "bytes_in",
    "msgOutCounter": "messages_out",
    "bytesOutCounter": "bytes_out",
    "storageSize": "storage_bytes",
    "msgDropCounter": "dropped",
    "publishRateLimitedTimes": "publish_throttled",
    "expiredEntries": "expired_entries",
    "evictedEntries": "evicted_entries",
}
"""Pulsar's name → field of TopicStats (proto/statistics.py)."""


_CAUGHT_UP = "everything was delivered"


def replies(session: Session, topic: str, *, precise: bool = False) -> list[values.TopicStats]:
    """The statistics of each partition, from its owner (of the topic, where it has no partitions)."""
    return [session.admin.topic_stats(part, precise=precise) for part in session.admin.parts(topic)]


def topic_stats(session: Session, topic: str, *, precise: bool = False) -> dict[str, Any]:
    """Returns one record for the topic, whatever its number of partitions."""
    return record_of(session, topic, replies(session, topic, precise=precise))


def record_of(session: Session, topic: str, found: list[values.TopicStats]) -> dict[str, Any]:
    record: dict[str, Any] = {"topic": topic, "partitions": len(found) if len(found) > 1 else found[0].partitions}
    for name, field in _SUMMED.items():
        record[name] = sum(getattr(reply, field) for reply in found)
    record["publishers"] = [_publisher(producer) for reply in found for producer in reply.producers]
    record["subscriptions"] = subscriptions(found)
    record["msgBacklog"] = max((s["msgBacklog"] for s in record["subscriptions"].values()), default=0)
    record["backlogSize"] = max((s["backlogSize"] for s in record["subscriptions"].values()), default=0)
    record["terminated"] = any(reply.terminated for reply in found)
    record["backlogQuota"] = next((reply.quota for reply in found if reply.quota), "")
    record["transactions"] = _transactions(session, found)
    record["withoutSubscription"] = next((reply.unsubscribed for reply in found if reply.unsubscribed), "")
    messages, size = record["msgInCounter"], record["bytesInCounter"]
    record["averageMsgSize"] = size / messages if messages else 0.0
    record["owners"] = sorted({reply.owner for reply in found if reply.owner})
    return record


def _transactions(session: Session, found: Iterable[values.TopicStats]) -> dict[str, Any]:
    """Returns the transactions of all partitions together; empty: none of them has seen a transaction. `waiting`:
    messages that readers do not get before an open transaction ends."""
    known = [(reply, reply.transactions) for reply in found if reply.transactions is not None]
    if not known:
        return {}
    opened = [each for _, each in known if each.oldest is not None]
    oldest = max(opened, key=lambda each: each.oldest_ms, default=None)
    txn = oldest.oldest if oldest is not None else None
    owner, address = _owner(session, txn) if txn is not None else ("", "")
    return {
        "open": sum(each.open for _, each in known),
        "oldest": str(txn) if txn is not None else "",
        "oldestMs": oldest.oldest_ms if oldest is not None else 0,
        "oldestOwner": owner,
        "oldestAddress": address,
        "lastStablePositions": [str(each.last_stable) for _, each in known],
        "waiting": sum(reply.end_index - each.stable_index for reply, each in known),
        "committed": sum(each.committed for _, each in known),
        "aborted": sum(each.aborted for _, each in known),
        "abortedEntries": sum(each.aborted_entries for _, each in known),
        "abortedBytes": sum(each.aborted_bytes for _, each in known),
    }


def _owner(session: Session, txn: TxnId) -> tuple[str, str]:
    """The role and the address of who began it; empty: its coordinator does not say, or not to this caller."""
    from ...proto.errors import MagnetarError

    try:
        found = session.admin.transaction(txn)
    except MagnetarError:
        return "", ""
    return found.owner, found.address


def transaction_row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, from the record of a topic."""
    found = record["transactions"]
    return {**found, "topic": record["topic"], "lastStable": found["lastStablePositions"]}


def _publisher(producer: values.ProducerStats) -> dict[str, Any]:
    return {
        "producerName": producer.name,
        "address": producer.address,
        "msgInCounter": producer.messages,
        "bytesInCounter": producer.bytes,
        "lastSequenceId": producer.last_sequence_id,
    }


def _first(known: Any, _: Any) -> Any:
    return known


def _either(known: Any, other: Any) -> Any:
    return known or other


def _earlier(known: int, other: int) -> int:
    """0: not known."""
    return min(known, other) if known and other else known or other


def _telling(known: str, other: str) -> str:
    """Of partitions, what one waits for says more."""
    return known if known not in ("", _CAUGHT_UP) else other or known


Part = Callable[[Any], Any]
_OF_SUBSCRIPTION: tuple[tuple[str, Part, Callable[[Any, Any], Any]], ...] = (
    ("backlogSize", attrgetter("backlog_bytes"), add),
    ("earliestMsgPublishTimeInBacklog", attrgetter("oldest_ms"), _earlier),
    ("dispatchRateLimitedTimes", attrgetter("dispatch_throttled"), add), ("type", attrgetter("type"), _first),
    ("durable", attrgetter("durable"), _first), ("msgBacklog", attrgetter("backlog"), add),
    ("msgBacklogNoDelayed", lambda each: max(0, each.backlog - each.delayed), add),
    ("msgDelayed", attrgetter("delayed"), add), ("delayedMessageIndexBuckets", attrgetter("delayed_buckets"), add),
    ("delayedMessageIndexSizeInBytes", attrgetter("delayed_memory_bytes"), add),
    ("pendingTransactions", attrgetter("pending_transactions"), add),
    ("pendingEntries", attrgetter("pending_entries"), add), ("unackedMessages", attrgetter("unacked"), add),
    ("nonContiguousDeletedMessagesRanges", attrgetter("acked_ranges"), add),
    ("consumers", lambda each: [_consumer(consumer) for consumer in each.consumers], add),
    ("markDeletePositions", lambda each: [str(each.mark_delete)], add), ("blocked", attrgetter("blocked"), _telling),
    ("activeConsumerName", attrgetter("active_consumer"), _either),
    ("blockedSubscriptionOnUnackedMsgs", attrgetter("blocked_on_unacked"), _either),
    ("msgInReplay", attrgetter("replay_entries"), add), ("keySharedMode", attrgetter("key_shared_mode"), _first),
    ("allowOutOfOrderDelivery", attrgetter("allow_out_of_order_delivery"), _first),
    ("drainingHashesCount", lambda each: len(each.draining), add),
    ("drainingHashesClearedTotal", attrgetter("drained_total"), add),
    ("drainingHashesUnackedMessages", lambda each: sum(slot.unacked_entries for slot in each.draining), add),
    ("drainingHashes", lambda each: [_draining(slot) for slot in each.draining], add),
)  # fmt: skip
"""Pulsar's name, what it is of a partition's subscription, how partitions come together; in the order of the JSON."""


def subscriptions(found: Iterable[values.TopicStats]) -> dict[str, dict[str, Any]]:
    """Returns the subscriptions by name; counts are summed over partitions."""
    parts: dict[str, list[values.SubscriptionStats]] = {}
    for reply in found:
        for each in reply.subscriptions:
            parts.setdefault(each.name, []).append(each)
    return {
        name: {key: reduce(join, map(part, of)) for key, part, join in _OF_SUBSCRIPTION} for name, of in parts.items()
    }


def _draining(slot: values.DrainingSlot) -> dict[str, int]:
    """A subscription's record; its messages are counted by entries."""
    return {"hash": slot.slot, "unackMsgs": slot.unacked_entries, "blockedAttempts": slot.blocked_attempts}


def _consumer(consumer: values.ConsumerStats) -> dict[str, Any]:
    return {
        "consumerName": consumer.name,
        "address": consumer.address,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked,
        "msgOutCounter": consumer.delivered_messages,
        "bytesOutCounter": consumer.delivered_bytes,
        "messagesRedelivered": consumer.redelivered_messages,
        "blockedConsumerOnUnackedMsgs": consumer.blocked,
        "priorityLevel": consumer.priority_level,
        "keyHashRangeArrays": [[slots.first, slots.last] for slots in consumer.slots],
    }


def subscription_rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns of the table, from `subscriptions`."""
    return [
        {
            **record,
            "subscription": name,
            "consumers": len(record["consumers"]),
            "markDelete": record["markDeletePositions"],
            "blocked": record["blocked"] or None,
        }
        for name, record in found.items()
    ]


def internal_stats(reply: values.TopicInternalStats) -> dict[str, Any]:
    return {
        "state": reply.state,
        "lastConfirmedEntry": str(reply.last_confirmed),
        "pendingAddEntriesCount": reply.pending_adds,
        "cacheBytes": reply.cache_bytes,
        "replication": reply.replication,
        "wantedReplication": reply.wanted_replication,
        "degraded": reply.degraded,
        "ledgers": [
            {
                "ledgerId": ledger.ledger_id,
                "state": ledger.state,
                "entries": ledger.entries,
                "size": ledger.bytes,
                "firstIndex": ledger.first_index,
                "bookies": list(ledger.bookies),
                "stays": ledger.stays,
            }
            for ledger in reply.ledgers
        ],
    }
