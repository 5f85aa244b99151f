"""Statistics of topics and subscriptions, under the names that Pulsar's tools parse (pulsar-client-go `data.go`).

A partitioned topic's record is the sum over its partitions, each asked from its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...proto.alarms import format_age, format_count
from ...proto.pulsar_json import (
    OF_SUBSCRIPTION,
    PRODUCER_FIELDS,
    PRODUCER_NAMES,
    SUBSCRIPTION_FIELDS,
    TOPIC_FIELDS,
    merge_records,
    pick_fields,
    time_to_json,
    waited_transaction_to_json,
)

if TYPE_CHECKING:
    from ...client import admin as values
    from ...proto.states import TxnId
    from ..common.session import CommandSession

RATE_FIELDS = ("msgRateIn", "msgRateOut", "msgThroughputIn", "msgThroughputOut")
_OF_ROW = ("msgInCounter", "msgOutCounter", "storageSize", *RATE_FIELDS)
COUNT_FIELDS = (*_OF_ROW, "msgBacklog")
TOPIC_STATS_COLUMNS = (
    "topic",
    "partitions",
    "msgInCounter",
    "msgOutCounter",
    "storageSize",
    "msgBacklog",
    *RATE_FIELDS,
)
SUBSCRIPTION_COLUMNS = ("subscription", "type", "msgBacklog", "unackedMessages", "consumers", "markDelete", "blocked")
TRANSACTION_COLUMNS = (
    "topic", "open", "oldest", "oldestOwner", "oldestAddress", "oldestMs", "lastStable", "waiting", "committed",
    "aborted", "abortedEntries", "abortedBytes",
)  # fmt: skip
PRODUCER_COLUMNS = ("producer", "topic", "role", "connectedSince", "msgInCounter", "address")
CONSUMER_COLUMNS = (
    "consumer", "subscription", "role", "connectedSince", "lastAcked", "unackedMessages", "availablePermits", "address",
)  # fmt: skip
LEDGER_COLUMNS = ("ledgerId", "state", "entries", "size", "firstIndex", "bookies", "stays", "keyIndex")

_SUMMED = (
    "msgRateIn msgRateOut msgThroughputIn msgThroughputOut msgInCounter bytesInCounter msgOutCounter bytesOutCounter "
    "storageSize msgDropCounter publishRateLimitedTimes expiredEntries evictedEntries"
)
SUMMED_FIELDS = (*_SUMMED.split(), "msgBacklog", "backlogSize")
_WAITED = "waitsForTransaction"


def ask_partition_stats(session: CommandSession, topic: str, *, precise: bool = False) -> list[values.TopicStats]:
    """Asks the owner of each partition for its statistics, and returns them; of a topic without partitions, its own.
    `precise`: backlogs are counted exactly, message by message. Raises the errors of the admin client."""
    return [session.admin.topic_stats(part, precise=precise) for part in session.admin.parts(topic)]


def get_topic_stats(session: CommandSession, topic: str, *, precise: bool = False) -> dict[str, Any]:
    """Returns the statistics of a topic as one record; numbers are summed over its partitions. `precise`: backlogs are
    counted exactly, message by message. Raises the errors of the admin client."""
    return make_topic_record(session, topic, ask_partition_stats(session, topic, precise=precise))


def make_topic_record(session: CommandSession, topic: str, found: list[values.TopicStats]) -> dict[str, Any]:
    """Returns the statistics of a topic as one record, made from `found`, those of its partitions. Numbers are summed;
    `msgBacklog` and `backlogSize` are those of the subscription with the largest ones. Asks the coordinator of the
    oldest open transaction who began it; what it does not answer is ""."""
    record: dict[str, Any] = {"topic": topic, "partitions": len(found) if len(found) > 1 else found[0].partitions}
    for name in _SUMMED.split():
        record[name] = sum(map(TOPIC_FIELDS[name], found))
    record["publishers"] = [
        pick_fields(PRODUCER_FIELDS, each, PRODUCER_NAMES) for reply in found for each in reply.producers
    ]
    record["subscriptions"] = merge_subscriptions(found)
    record["msgBacklog"] = max((s["msgBacklog"] for s in record["subscriptions"].values()), default=0)
    record["backlogSize"] = max((s["backlogSize"] for s in record["subscriptions"].values()), default=0)
    record["terminated"] = any(reply.terminated for reply in found)
    record["backlogQuota"] = next((reply.quota for reply in found if reply.quota), "")
    record["transactions"] = _transactions(session, found)
    record["withoutSubscription"] = next((reply.unsubscribed for reply in found if reply.unsubscribed), "")
    record["keyIndex"] = next((reply.key_index for reply in found if reply.key_index), "off")
    record["durability"] = next((reply.durability for reply in found if reply.durability), "disk")
    record["unindexedLedgers"] = sum(reply.unindexed_ledgers for reply in found)
    messages, size = record["msgInCounter"], record["bytesInCounter"]
    record["averageMsgSize"] = size / messages if messages else 0.0
    record["owners"] = sorted({reply.owner for reply in found if reply.owner})
    return record


def make_topic_row(topic: str, found: list[values.BriefTopicStats]) -> dict[str, Any]:
    """Returns those fields of a topic's record (`make_topic_record`) that TOPIC_STATS_COLUMNS names, made from the
    brief statistics of its partitions."""
    row: dict[str, Any] = {"topic": topic, "partitions": len(found) if len(found) > 1 else 0}
    for name in _OF_ROW:
        row[name] = sum(map(TOPIC_FIELDS[name], found))
    backlogs = found[0].backlogs
    if len(found) > 1:
        backlogs = {each: sum(part.backlogs.get(each, 0) for part in found) for part in found for each in part.backlogs}
    row["msgBacklog"] = max(backlogs.values(), default=0)
    return row


def sum_topic_records(whose: str, records: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Returns one record with the sums of the fields `names` over the records of several topics. `whose`: its text in
    the field `topic`."""
    found: dict[str, Any] = {"topic": whose, "partitions": None, "topics": len(records)}
    for name in names:
        found[name] = sum(each[name] for each in records)
    return found


def _transactions(session: CommandSession, found: Iterable[values.TopicStats]) -> dict[str, Any]:
    """Returns the joint figures of transactions of all partitions; empty if none has seen a transaction. `waiting`:
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


def _owner(session: CommandSession, txn: TxnId) -> tuple[str, str]:
    """Returns the role and the address of the client that began the transaction; empty if its coordinator does not
    say, or not to this caller."""
    from ...proto.errors import MagnetarError

    try:
        found = session.admin.transaction(txn)
    except MagnetarError:
        return "", ""
    return found.owner, found.address


def transaction_row(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the row about a topic's transactions for a table. `record`: the topic's statistics (`make_topic_record`),
    which must have seen a transaction."""
    found = record["transactions"]
    return {**found, "topic": record["topic"], "lastStable": found["lastStablePositions"]}


def merge_subscriptions(found: Iterable[values.TopicStats]) -> dict[str, dict[str, Any]]:
    """Returns the statistics of a topic's subscriptions, by the name of the subscription. `found`: the statistics of
    the topic, or of each of its partitions; counts are summed over the partitions."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for reply in found:
        for each in reply.subscriptions:
            record = {
                **pick_fields(SUBSCRIPTION_FIELDS, each, OF_SUBSCRIPTION),
                _WAITED: waited_transaction_to_json(each, reply),
            }
            parts.setdefault(each.name, []).append(record)
    return {name: merge_records(of) for name, of in parts.items()}


def make_subscription_rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the table of subscriptions. `found`: the result of `merge_subscriptions`."""
    return [
        {
            **record,
            "subscription": name,
            "consumers": len(record["consumers"]),
            "markDelete": record["markDeletePositions"],
            "blocked": _describe_blocked(record),
        }
        for name, record in found.items()
    ]


def _describe_blocked(record: dict[str, Any]) -> str | None:
    """Returns why no consumer of a subscription gets the next message, for a table; None if one gets it."""
    from ...proto.states import Blocked

    waited = record[_WAITED]
    if waited and record["blocked"] == Blocked.OPEN_TRANSACTION:
        age = f"{format_age(waited['ageMs'] / 1000)}, {format_count(waited['waiting'], 'message')} after its begin"
        return f"{record['blocked']}: {waited['txn']}, open for {age}"
    return record["blocked"] or None


def make_producer_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the table of producers. `record`: the statistics of a topic."""
    return [
        {"producer": each["producerName"], "topic": record["topic"], **_named(each)} for each in record["publishers"]
    ]


def make_consumer_rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the table of consumers. `found`: the result of `merge_subscriptions`. `lastAcked` is None for
    a consumer that has acknowledged nothing since it connected."""
    return [
        {
            "consumer": each["consumerName"],
            "subscription": name,
            **_named(each),
            "lastAcked": time_to_json(each["lastAckedTimestamp"]) if each["lastAckedTimestamp"] else None,
        }
        for name, record in found.items()
        for each in record["consumers"]
    ]


def _named(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of a producer or consumer without its name and without what the row says otherwise; None for
    what is not known."""
    left = ("producerName", "consumerName", "lastAckedTimestamp")
    found = {name: value for name, value in record.items() if name not in left}
    return {**found, "role": record["role"] or None, "connectedSince": record["connectedSince"] or None}
