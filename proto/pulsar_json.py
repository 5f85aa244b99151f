"""Statistics as JSON, under the names that Pulsar's tools read (pulsar-client-go `data.go`). Each name is defined here,
once.

    pick_fields(CONSUMER_FIELDS, found, "consumerName availablePermits")
    # {"consumerName": "c", "availablePermits": 1000}

REST (broker/rest/stats.py) and the command line (cli/admin/stats.py) choose the fields that they show, and their order.
Transactions and half messages have forms of our own, which REST answers; the command line shows their times in seconds.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .statistics import (
        CoordinatorTransactions,
        HalfStats,
        ScheduleStats,
        SubscriptionStats,
        TopicStats,
        TransactionHere,
        TransactionStats,
    )

FieldTable = Mapping[str, Callable[[Any], Any]]


def _table(names: Mapping[str, str | Callable[[Any], Any]]) -> FieldTable:
    return {name: attrgetter(of) if isinstance(of, str) else of for name, of in names.items()}


def pick_fields(table: FieldTable, found: object, names: str) -> dict[str, Any]:
    """Returns a dictionary of some fields of a statistics object. `names` are the fields' names in JSON, separated by
    spaces; the dictionary has them in this order. `table` has the function that gets each of them from the object.
    Raises KeyError if the table has no field of a name."""
    return {name: table[name](found) for name in names.split()}


def time_to_json(milliseconds: int) -> str:
    """Returns a time, in ms since the epoch, as ISO 8601 in UTC: "2025-10-09T08:53:20.000Z"; a time that is not in the
    years 1 to 9999 as its number of ms, because a client may write any time into a message."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


TOPIC_FIELDS = _table({
    "msgRateIn": "rate_in", "msgRateOut": "rate_out", "msgThroughputIn": "throughput_in",
    "msgThroughputOut": "throughput_out", "msgInCounter": "messages_in", "bytesInCounter": "bytes_in",
    "msgOutCounter": "messages_out", "bytesOutCounter": "bytes_out", "storageSize": "storage_bytes",
    "msgDropCounter": "dropped", "publishRateLimitedTimes": "publish_throttled", "expiredEntries": "expired_entries",
    "evictedEntries": "evicted_entries", "topicCreationTimeStamp": "created_ms", "ownerBroker": "owner",
    "lastPublishTimeStamp": "published_ms", "lastPublishTimestamp": "published_ms",
    "averageMsgSize": lambda found: found.bytes_in / found.messages_in if found.messages_in else 0.0,
})  # fmt: skip
PRODUCER_FIELDS = _table({
    "producerName": "name", "address": "address", "msgInCounter": "messages", "bytesInCounter": "bytes",
    "lastSequenceId": "last_sequence_id",
    "averageMsgSize": lambda found: found.bytes / found.messages if found.messages else 0.0,
    "role": "role", "connectedSince": lambda found: time_to_json(found.connected_ms) if found.connected_ms else "",
    "acks": lambda found: found.acks or "quorum",
})  # fmt: skip
CONSUMER_FIELDS = _table({
    "consumerName": "name", "address": "address", "availablePermits": "permits", "unackedMessages": "unacked",
    "msgOutCounter": "delivered_messages", "bytesOutCounter": "delivered_bytes",
    "messagesRedelivered": "redelivered_messages", "blockedConsumerOnUnackedMsgs": "blocked",
    "priorityLevel": "priority_level",
    "keyHashRanges": lambda found: [f"[{each.first}, {each.last}]" for each in found.slots],
    "keyHashRangeArrays": lambda found: [[each.first, each.last] for each in found.slots],
    "role": "role", "connectedSince": lambda found: time_to_json(found.connected_ms) if found.connected_ms else "",
    "lastAckedTimestamp": "acked_ms",
})  # fmt: skip
PRODUCER_NAMES = "producerName address msgInCounter bytesInCounter lastSequenceId role connectedSince acks"
DRAINING_SLOT_FIELDS = _table({"hash": "slot", "unackMsgs": "unacked_entries", "blockedAttempts": "blocked_attempts"})
HELD_KEY_FIELDS = _table({
    "hash": "slot", "key": "key", "consumerName": "consumer", "address": "address",
    "heldSince": lambda found: time_to_json(found.since_ms), "followingEntries": "following_entries",
})  # fmt: skip
SUBSCRIPTION_FIELDS = _table({
    "backlogSize": "backlog_bytes", "earliestMsgPublishTimeInBacklog": "oldest_ms",
    "dispatchRateLimitedTimes": "dispatch_throttled", "type": "type", "durable": "durable", "isDurable": "durable",
    "msgBacklog": "backlog", "msgBacklogNoDelayed": lambda found: max(0, found.backlog - found.delayed),
    "msgDelayed": "delayed", "delayedMessageIndexBuckets": "delayed_buckets",
    "delayedMessageIndexSizeInBytes": "delayed_memory_bytes", "pendingTransactions": "pending_transactions",
    "pendingEntries": "pending_entries", "totalMsgExpired": "expired", "unackedMessages": "unacked",
    "nonContiguousDeletedMessagesRanges": "acked_ranges",
    "consumers": lambda found: [pick_fields(CONSUMER_FIELDS, each, SHOWN_CONSUMER_FIELDS) for each in found.consumers],
    "markDeletePositions": lambda found: [str(found.mark_delete)], "blocked": "blocked",
    "activeConsumerName": "active_consumer", "blockedSubscriptionOnUnackedMsgs": "blocked_on_unacked",
    "msgInReplay": "replay_entries", "keySharedMode": "key_shared_mode",
    "allowOutOfOrderDelivery": "allow_out_of_order_delivery",
    "drainingHashesCount": lambda found: len(found.draining), "drainingHashesClearedTotal": "drained_total",
    "drainingHashesUnackedMessages": lambda found: sum(each.unacked_entries for each in found.draining),
    "drainingHashes": lambda found: [pick_fields(DRAINING_SLOT_FIELDS, each,
    " ".join(DRAINING_SLOT_FIELDS)) for each in found.draining],
    "heldKeys": lambda found: [pick_fields(HELD_KEY_FIELDS, each,
    " ".join(HELD_KEY_FIELDS)) for each in found.held_keys], "filter": "filter", "filterProcessedMsgCount": "judged",
    "filterAcceptedMsgCount": lambda found: found.judged - found.filtered, "filterRejectedMsgCount": "filtered",
    "filterRescheduledMsgCount": lambda found: 0,
    "filteredEntries": "filtered_entries", "filteredUnread": "filtered_unread", "shownUnwanted": "shown_unwanted",
})  # fmt: skip
OWN_OF_SUBSCRIPTION = (
    "pendingTransactions pendingEntries heldKeys filter filteredEntries filteredUnread shownUnwanted"
)
"""Fields that Pulsar does not have. REST shows them last, in this order."""
OF_SUBSCRIPTION: str = " ".join(
    name for name in SUBSCRIPTION_FIELDS if name not in ("isDurable", "filterRescheduledMsgCount")
)
"""What the command line shows, in this order."""
SHOWN_CONSUMER_FIELDS: str = " ".join(name for name in CONSUMER_FIELDS if name != "keyHashRanges")
LEDGER_FIELDS = _table({
    "ledgerId": "ledger_id", "state": "state", "entries": "entries", "size": "bytes", "firstIndex": "first_index",
    "bookies": lambda found: list(found.bookies), "stays": "stays", "keyIndex": "key_index",
})  # fmt: skip
TOPIC_LOG_FIELDS = _table({
    "state": "state", "lastConfirmedEntry": lambda found: str(found.last_confirmed),
    "pendingAddEntriesCount": "pending_adds", "cacheBytes": "cache_bytes", "replication": "replication",
    "wantedReplication": "wanted_replication", "degraded": "degraded",
    "ledgers": lambda found: [pick_fields(LEDGER_FIELDS, each, " ".join(LEDGER_FIELDS)) for each in found.ledgers],
})  # fmt: skip


# ------------------------------------------------------------------------------------ a topic of several partitions
def merge_records(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the statistics of several partitions, as JSON, to those of one topic, and returns them; {} if `parts` is
    empty. A field of MERGE_BY_FIELD is merged by its function. Of the others, lists are concatenated and maps merged; a
    text comes from the first partition that has one; a boolean is True if it is True for any partition. A number is
    added, but by its name: one that begins with `average` or `avg` is averaged; of one that begins with `earliest` the
    earliest that is not 0 is taken; of one that begins with `last` or `oldest`, or contains `time` or `limit`, the
    largest. A count of events is named `…Times` or contains `Events`, and is added."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merge_values(name, [part[name] for part in parts if name in part]) for name in names}


def _merge_values(name: str, values: list[Any]) -> Any:
    if name in MERGE_BY_FIELD:
        return reduce(MERGE_BY_FIELD[name], values)
    first = next((each for each in values if each not in (None, "")), values[0])
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, dict):
        return merge_records([each for each in values if each is not None])
    if isinstance(first, list):
        return [each for value in values for each in value or ()]
    if isinstance(first, int | float):
        return _merge_numbers(name, [each for each in values if each is not None])
    return first


def _merge_numbers(name: str, numbers: list[float]) -> float:
    if name.startswith(("average", "avg")):
        return sum(numbers) / len(numbers)
    if name.startswith("earliest"):
        return min((each for each in numbers if each), default=0)
    if name.endswith("Times") or "Events" in name:
        return sum(numbers)
    takes_largest = "time" in name.lower() or "limit" in name.lower() or name.startswith(("last", "oldest"))
    return max(numbers) if takes_largest else sum(numbers)


def _merge_reasons(known: str, other: str) -> str:
    """Returns the more informative of two reasons why partitions send nothing: one that is no "everything was
    delivered"."""
    return known if known not in ("", "everything was delivered") else other or known


def _merge_waits(known: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns the older of two transactions for which partitions of a subscription wait, and what waits for both."""
    oldest = max(known, other, key=lambda each: each.get("ageMs", -1))
    return {**oldest, "waiting": sum(each["waiting"] for each in (known, other) if each)} if oldest else {}


MERGE_BY_FIELD: Mapping[str, Callable[[Any, Any], Any]] = {
    "blocked": _merge_reasons, "whyBlocked": _merge_reasons, "waitsForTransaction": _merge_waits,
}  # fmt: skip
"""How `merge_records` merges the values of two partitions in fields that have a rule of their own."""


# ------------------------------------------------------------------------------------ transactions, half messages
def to_optional_text(place: object, none: str | None = None) -> str | None:
    """Returns a place, such as a position, as text; `none` if it is None."""
    return str(place) if place is not None else none


def waited_transaction_to_json(subscription: SubscriptionStats, topic: TopicStats) -> dict[str, Any]:
    """Returns the open transaction for which messages of the subscription wait, for how many ms the topic has known it,
    and how many messages wait; {} if they wait for none. `topic`: the statistics of the subscription's topic or
    partition."""
    from .states import Blocked  # here: the command line starts without it

    found = topic.transactions
    if subscription.blocked is not Blocked.OPEN_TRANSACTION or found is None or found.oldest is None:
        return {}
    waiting = topic.end_index - found.stable_index
    return {"txn": str(found.oldest), "ageMs": found.oldest_ms, "waiting": waiting}


def transaction_to_json(found: TransactionStats) -> dict[str, Any]:
    """Returns the JSON form of a transaction's statistics."""
    return {
        "txn": str(found.txn), "state": found.state.name, "owner": found.owner, "address": found.address,
        "name": found.name, "sink": found.sink.sink_id, "ageMs": found.age_ms, "remainingMs": found.remaining_ms,
        "topics": list(found.topics), "reason": found.reason,
    }  # fmt: skip


def topic_transaction_to_json(found: TransactionHere, none: str | None = None) -> dict[str, Any]:
    """Returns the JSON form of a transaction's part at one topic: its entries, and the acknowledgements that wait for
    its end. `none`: the text for a position that is None."""
    subscriptions = found.subscriptions
    pending = {
        each.name: {"entries": each.entries, "upTo": to_optional_text(each.up_to, none)} for each in subscriptions
    }
    return {
        "entries": found.entries, "bytes": found.bytes, "first": to_optional_text(found.first, none),
        "holds": found.holds, "waiting": found.waiting, "pending": pending,
    }


def half_message_to_json(found: HalfStats) -> dict[str, Any]:
    """Returns the JSON form of a half message's statistics."""
    return {
        "half": str(found.half), "state": found.state.name, "owner": found.owner, "group": found.group,
        "checkKey": found.check_key, "ageMs": found.age_ms, "unknown": found.unknown, "members": found.members,
        "bytes": found.bytes, "topics": list(found.topics), "reason": found.reason,
    }  # fmt: skip


def schedule_to_json(found: ScheduleStats) -> dict[str, Any]:
    """Returns the JSON form of a schedule. A payload that is not UTF-8 is shown as base64."""
    try:
        payload = {"payload": found.payload.decode()}
    except UnicodeDecodeError:
        payload = {"payloadBase64": b64encode(found.payload).decode()}
    return {
        "name": found.name, "cron": found.cron, "everyMs": found.every_ms, "atMs": found.at_ms, "zone": found.zone,
        **payload, "key": found.key, "properties": found.properties, "missed": found.missed, "status": found.status,
        "paused": found.paused, "createdMs": found.created_ms, "nextMs": found.next_ms, "lastMs": found.last_ms,
        "fired": found.fired, "dropped": found.dropped,
    }  # fmt: skip


def coordinator_to_json(number: int, found: CoordinatorTransactions) -> dict[str, Any]:
    """Returns the JSON form of the statistics of transaction coordinator number `number`."""
    return {
        "coordinator": number, "epoch": found.epoch, "open": found.open, "prepared": found.prepared,
        "unsettled": found.unsettled, "committed": found.committed, "aborted": found.aborted,
    }


def make_table_row(form: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object `form` as a row of a table that the command line prints: names in snake case, times
    (those in ms) in seconds with one decimal, lists as text."""
    return {
        re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name).replace("_ms", "_s"): round(value / 1000, 1)
        if name.endswith("Ms") else ", ".join(value) if isinstance(value, list) else value
        for name, value in form.items()
    }  # fmt: skip
