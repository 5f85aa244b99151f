"""Statistics as Pulsar's JSON, with every key that Pulsar's admin client, pulsarctl and dashboards read.

`make_topic_stats_json` gets the values of proto/statistics.py, from this broker or from another one. Some facts about
producers and consumers are known only at the owner (client version, connection time, rates); they come from the loaded
topic.

Rates are averages since the last request, at least RATE_PERIOD_S_MIN seconds ago; in the first request, since the
client connected. Times that Magnetar does not record are 0; numbers about offload and replication, which do not exist,
are 0 or -1.

Also in this file, below its heading: transactions in the forms of Pulsar's admin REST v3: the classes
`Transaction…Stats` and `TransactionMetadata` (transactions).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from ...proto import statistics as values
from ...proto.pulsar_json import (
    CONSUMER_FIELDS,
    OWN_OF_SUBSCRIPTION,
    PRODUCER_FIELDS,
    SUBSCRIPTION_FIELDS,
    TOPIC_FIELDS,
    pick_fields,
    time_to_json,
    to_optional_text,
    waited_transaction_to_json,
)
from ...proto.states import AccessMode, Blocked, TxnState, pulsar_type_name
from ...runtime.clock import Clock
from ..subscription.consumer import ActivityTimes, Consumer
from ..subscription.core.policy import CAUGHT_UP_REASONS
from ..topic.producer import TopicProducer
from ..topic.topic import Topic

RATE_PERIOD_S_MIN = 1.0
RATE_METERS_MAX = 20_000
_WAITING = frozenset((*CAUGHT_UP_REASONS, Blocked.OPEN_TRANSACTION))

CounterValues = tuple[float, ...]
_MODES = {
    AccessMode.SHARED: "Shared", AccessMode.EXCLUSIVE: "Exclusive", AccessMode.WAIT_FOR_EXCLUSIVE: "WaitForExclusive",
    AccessMode.EXCLUSIVE_WITH_FENCING: "ExclusiveWithFencing",
}  # fmt: skip


class RateMeters:
    """Measures the rates of producers and consumers for REST. Stores the last counters of each, by its id; for at most
    RATE_METERS_MAX of them: beyond that, drops the one that was measured longest ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # when, counters, rates
        self._known: OrderedDict[int, tuple[float, CounterValues, CounterValues]] = OrderedDict()

    def now_ms(self) -> int:
        """Returns the wall-clock time in ms since the epoch."""
        return self._clock.wall_ms()

    def measure_rates(self, number: int, since_ms: int, counters: CounterValues) -> CounterValues:
        """Returns the rate per second of each of the `counters` since the last call for the producer or consumer with
        the id `number`; in the first call, since `since_ms` (ms since the epoch). A call within RATE_PERIOD_S_MIN
        seconds of the last one returns the same rates. A counter that has become smaller has the rate 0."""
        now, known = self._clock.monotonic(), self._known.get(number)
        if known is None:
            passed_s = max(RATE_PERIOD_S_MIN, (self._clock.wall_ms() - since_ms) / 1000)
            before: CounterValues = (0.0,) * len(counters)
        else:
            passed_s, before = now - known[0], known[1]
            if passed_s < RATE_PERIOD_S_MIN:
                return known[2]
        found = tuple(max(0.0, (new - old) / passed_s) for new, old in zip(counters, before, strict=True))
        self._known[number] = now, counters, found
        self._known.move_to_end(number)
        if len(self._known) > RATE_METERS_MAX:
            self._known.popitem(last=False)
        return found


def make_topic_stats_json(
    found: values.TopicStats,
    topic: Topic | None,
    meters: RateMeters,
    *,
    publishers: bool = True,
    consumers: bool = True,
) -> dict[str, Any]:
    """Returns the statistics of a topic as Pulsar's JSON. `found`: the statistics; `meters`: measures the rates of
    producers and consumers; `topic`: the topic if it is loaded at this broker, else None; then rates, client versions
    and properties are 0 or empty. `publishers`, `consumers`: whether to list the producers and the consumers."""
    subscriptions = {
        each.name: {
            **_subscription(each, topic, meters, consumers),
            "waitsForTransaction": waited_transaction_to_json(each, found),
        } for each in found.subscriptions
    }  # fmt: skip
    backlog_size = max((each.backlog_bytes for each in found.subscriptions), default=0)
    oldest = min((each.oldest_ms for each in found.subscriptions if each.oldest_ms), default=0)
    slowest = next((each.name for each in found.subscriptions if oldest and each.oldest_ms == oldest), None)
    age_s = max(0, round((meters.now_ms() - oldest) / 1000)) if oldest else -1
    applied = topic.applied if topic is not None else None
    return {
        **pick_fields(
            TOPIC_FIELDS, found, "msgRateIn msgThroughputIn msgRateOut msgThroughputOut bytesInCounter msgInCounter"
        ),
        "systemTopicBytesInCounter": 0, "bytesOutInternalCounter": 0,
        **pick_fields(TOPIC_FIELDS, found, "bytesOutCounter msgOutCounter averageMsgSize"),
        "msgChunkPublished": False, **pick_fields(TOPIC_FIELDS, found, "storageSize"), "backlogSize": backlog_size,
        "backlogQuotaLimitSize": (applied.backlog_quota_bytes if applied is not None else 0) or -1,
        "backlogQuotaLimitTime": (applied.backlog_quota_s if applied is not None else 0) or -1,
        "oldestBacklogMessageAgeSeconds": age_s, "oldestBacklogMessageSubscriptionName": slowest,
        **pick_fields(TOPIC_FIELDS, found, "publishRateLimitedTimes"), "earliestMsgPublishTimeInBacklogs": oldest,
        "offloadedStorageSize": 0, "lastOffloadLedgerId": 0, "lastOffloadSuccessTimeStamp": 0,
        "lastOffloadFailureTimeStamp": 0,
        **_transactions(found),
        "waitingPublishers": 0,
        **pick_fields(TOPIC_FIELDS, found, "topicCreationTimeStamp lastPublishTimeStamp lastPublishTimestamp"),
        "publishers": [_publisher(each, topic, meters) for each in found.producers] if publishers else [],
        "subscriptions": subscriptions, "replication": {},
        "deduplicationStatus": "Enabled" if applied is not None and applied.deduplication else "Disabled",
        "topicEpoch": None,
        "nonContiguousDeletedMessagesRanges": sum(each.acked_ranges for each in found.subscriptions),
        "nonContiguousDeletedMessagesRangesSerializedSize": 0,
        "delayedMessageIndexSizeInBytes": sum(each.delayed_memory_bytes for each in found.subscriptions),
        "compaction": _compaction(topic), **pick_fields(TOPIC_FIELDS, found, "ownerBroker"),
        "replicatedSubscriptionsTrackedMessagesCount": 0,
        **({} if found.name.startswith("persistent:") else {"msgDropRate": 0.0, "msgDropCount": found.dropped}),
    }  # fmt: skip


def _transactions(found: values.TopicStats) -> dict[str, Any]:
    """Returns the statistics of the topic's transactions as Pulsar's JSON; the key `transactions` is None if the topic
    never had a transaction. `waiting`: the messages that consumers do not get before an open transaction ends."""
    seen = found.transactions
    if seen is None:
        return {"ongoingTxnCount": 0, "abortedTxnCount": 0, "committedTxnCount": 0, "transactions": None}
    oldest = [{"txn": str(seen.oldest), "ageMs": seen.oldest_ms}] if seen.open else []
    shown = {
        "open": seen.open, "oldest": oldest, "lastStablePositions": [str(seen.last_stable)],
        "waiting": found.end_index - seen.stable_index, "abortedEntries": seen.aborted_entries,
        "abortedBytes": seen.aborted_bytes,
    }  # fmt: skip
    counts = {"ongoingTxnCount": seen.open, "abortedTxnCount": seen.aborted, "committedTxnCount": seen.committed}
    return {**counts, "transactions": shown}


def _compaction(topic: Topic | None) -> dict[str, Any]:
    record = topic.compaction.record if topic is not None else None
    return {
        "lastCompactionRemovedEventCount": 0,
        "lastCompactionSucceedTimestamp": record.compacted_ms if record is not None else 0,
        "lastCompactionFailedTimestamp": 0, "lastCompactionDurationTimeInMills": 0,
    }  # fmt: skip


def _publisher(found: values.ProducerStats, topic: Topic | None, meters: RateMeters) -> dict[str, Any]:
    live = _live(topic.producers, found) if topic is not None else None
    rates = (
        meters.measure_rates(live.id, live.since_ms, (found.messages, found.bytes)) if live is not None else (0.0, 0.0)
    )
    return {
        "accessMode": _MODES[live.mode] if live is not None else "Shared", "msgRateIn": rates[0],
        "msgThroughputIn": rates[1], **pick_fields(PRODUCER_FIELDS, found, "averageMsgSize"),
        "chunkedMessageRate": 0.0, "producerId": live.id if live is not None else 0, "supportsPartialProducer": False,
        **pick_fields(PRODUCER_FIELDS, found, "producerName"), "metadata": live.properties if live is not None else {},
        **_connected(found, live),
    }  # fmt: skip


def _live(every: Iterable[TopicProducer], found: values.ProducerStats) -> TopicProducer | None:
    return next((each for each in every if (each.name, each.address) == (found.name, found.address)), None)


def _connected(
    found: values.ProducerStats | values.ConsumerStats, live: TopicProducer | Consumer | None
) -> dict[str, Any]:
    return {
        "address": f"/{found.address}",
        "clientVersion": live.client if live is not None else "",
        "connectedSince": time_to_json(live.since_ms) if live is not None else "",
    }


def _subscription(
    found: values.SubscriptionStats, topic: Topic | None, meters: RateMeters, listed: bool
) -> dict[str, Any]:
    loaded = topic.subscriptions.get(found.name) if topic is not None else None
    lives = {(each.member.name, each.address): each for each in loaded.consumers.values()} if loaded is not None else {}
    consumers = [_consumer(each, lives.get((each.name, each.address)), meters) for each in found.consumers]
    sums = {name: sum(each[name] for each in consumers) for name in (
        "msgRateOut", "msgThroughputOut", "msgRateRedeliver", "messageAckRate", "bytesOutCounter", "msgOutCounter",
    )}  # fmt: skip
    store = loaded.store if loaded is not None else None
    activity = loaded.activity if loaded is not None else ActivityTimes()
    return {
        **sums, "chunkedMessageRate": 0.0, "msgRateExpired": 0.0,
        **pick_fields(
            SUBSCRIPTION_FIELDS, found,
            "totalMsgExpired msgBacklog backlogSize msgBacklogNoDelayed msgDelayed msgInReplay "
               "unackedMessages earliestMsgPublishTimeInBacklog blockedSubscriptionOnUnackedMsgs"),
        "type": pulsar_type_name(found.type) or "None",
        "activeConsumerName": found.active_consumer or None, "lastExpireTimestamp": activity.expired_ms,
        "lastConsumedFlowTimestamp": activity.flow_ms, "lastConsumedTimestamp": activity.consumed_ms,
        "lastAckedTimestamp": activity.acked_ms, "lastMarkDeleteAdvancedTimestamp": activity.marked_ms,
        "consumers": consumers if listed else [], **pick_fields(SUBSCRIPTION_FIELDS, found, "isDurable durable"),
        "isReplicated": False, "replicated": False,
        **pick_fields(SUBSCRIPTION_FIELDS, found, "allowOutOfOrderDelivery"),
        "keySharedMode": found.key_shared_mode or None, "consumersAfterMarkDeletePosition": {},
        **pick_fields(
            SUBSCRIPTION_FIELDS, found, "drainingHashesCount drainingHashesClearedTotal drainingHashesUnackedMessages "
               "nonContiguousDeletedMessagesRanges"), "nonContiguousDeletedMessagesRangesSerializedSize": 0,
        **pick_fields(SUBSCRIPTION_FIELDS, found, "delayedMessageIndexSizeInBytes"),
        "subscriptionProperties": store.properties if store is not None else {},
        **pick_fields(SUBSCRIPTION_FIELDS, found,
        "filterProcessedMsgCount filterAcceptedMsgCount filterRejectedMsgCount "
               "filterRescheduledMsgCount"), "dispatchThrottledMsgEventsBySubscriptionLimit": found.dispatch_throttled,
        "bucketDelayedIndexStats": {}, "replicatedSubscriptionSnapshotCount": 0,
        "whyBlocked": found.blocked, **pick_fields(SUBSCRIPTION_FIELDS, found, OWN_OF_SUBSCRIPTION),
    }  # fmt: skip


def _consumer(found: values.ConsumerStats, live: Consumer | None, meters: RateMeters) -> dict[str, Any]:
    activity = live.activity if live is not None else ActivityTimes()
    rates: CounterValues = (0.0, 0.0, 0.0, 0.0)
    if live is not None:
        delivered, again = found.delivered_messages, found.redelivered_messages
        acked = max(0, delivered - again - found.unacked)
        rates = meters.measure_rates(live.member.id, live.since_ms, (delivered, found.delivered_bytes, again, acked))
    return {
        "msgRateOut": rates[0], "msgThroughputOut": rates[1], "msgRateRedeliver": rates[2], "messageAckRate": rates[3],
        "chunkedMessageRate": 0.0, **pick_fields(CONSUMER_FIELDS, found, "bytesOutCounter msgOutCounter"),
        "lastAckedTimestamp": activity.acked_ms, "lastConsumedTimestamp": activity.consumed_ms,
        "lastConsumedFlowTimestamp": activity.flow_ms, "lastAckedTime": None, "lastConsumedTime": None,
        **pick_fields(CONSUMER_FIELDS, found, "consumerName"),
        "readPositionWhenJoining": None, "appId": None, "drainingHashes": [],
        "drainingHashesCount": 0, "drainingHashesClearedTotal": 0, "drainingHashesUnackedMessages": 0,
        **pick_fields(CONSUMER_FIELDS, found, "availablePermits unackedMessages"), "avgMessagesPerEntry": 0,
        **pick_fields(CONSUMER_FIELDS, found, "blockedConsumerOnUnackedMsgs keyHashRanges keyHashRangeArrays"),
        "metadata": live.properties if live is not None else {}, **_connected(found, live),
    }  # fmt: skip


# ------------------------------------------------------------------ internals
def make_internal_stats_json(found: values.TopicInternalStats, stats: values.TopicStats) -> dict[str, Any]:
    """Returns the internal statistics of a topic as Pulsar's JSON. `found`: the statistics of the topic's log; `stats`:
    the statistics of its subscriptions."""
    newest = found.ledgers[-1] if found.ledgers else None
    ledgers = [_ledger(each) for each in found.ledgers]
    return {
        "entriesAddedCounter": sum(each.entries for each in found.ledgers),
        "numberOfEntries": sum(each.entries for each in found.ledgers), "totalSize": stats.storage_bytes,
        "currentLedgerEntries": newest.entries if newest is not None and newest.state == "open" else 0,
        "currentLedgerSize": newest.bytes if newest is not None and newest.state == "open" else 0,
        "lastLedgerCreatedTimestamp": None, "lastLedgerCreationFailureTimestamp": None,
        "waitingCursorsCount": sum(each.blocked in _WAITING and bool(each.consumers) for each in stats.subscriptions),
        "pendingAddEntriesCount": found.pending_adds, "lastConfirmedEntry": str(found.last_confirmed),
        "state": "Terminated" if stats.terminated else "LedgerOpened", "ledgers": ledgers,
        "cursors": {each.name: _cursor(each) for each in stats.subscriptions}, "schemaLedgers": [],
        "compactedLedger": {
            "ledgerId": -1, "entries": -1, "size": -1, "timestamp": 0, "offloaded": False, "underReplicated": False,
            "metadata": None, "properties": {},
        },
        "properties": {},
    }  # fmt: skip


def _ledger(found: values.LedgerStats) -> dict[str, Any]:
    is_open = found.state == "open"
    return {
        "ledgerId": found.ledger_id, "entries": 0 if is_open else found.entries, "size": 0 if is_open else found.bytes,
        "timestamp": 0, "offloaded": False, "metadata": None, "underReplicated": False,
        "properties": {"keyIndex": found.key_index} if found.key_index else {},
    }  # fmt: skip


def _cursor(found: values.SubscriptionStats) -> dict[str, Any]:
    return {
        "markDeletePosition": str(found.mark_delete), "readPosition": str(found.read_position),
        "waitingReadOp": False, "pendingReadOps": 0, "messagesConsumedCounter": 0, "cursorLedger": -1,
        "cursorLedgerLastEntry": -1, "individuallyDeletedMessages": "[]", "lastLedgerSwitchTimestamp": None,
        "lastLedgerWitchTimestamp": None, "state": "Open", "active": bool(found.consumers),
        "numberOfEntriesSinceFirstNotAckedMessage": max(0, found.read_position.entry_id - found.mark_delete.entry_id)
        if found.read_position.ledger_id == found.mark_delete.ledger_id else 0,
        "totalNonContiguousDeletedMessagesRange": found.acked_ranges, "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": found.replay_entries > 0, "properties": {},
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- transactions
# Transactions in the forms of Pulsar's admin REST v3: the classes `Transaction…Stats` and `TransactionMetadata`.
#
# Half messages have a form of our own.
#
# Fields of Pulsar without a counterpart here are null, 0 or empty: low water marks (an outcome is kept until every
# participant has stored it), segments of snapshots, times of a topic's recovery.


ENDING_STATUS_NAMES = {"COMMITTED": "COMMITTING", "ABORTED": "ABORTING"}
"""Pulsar's TxnStatus of a transaction by its outcome, while some topic has not stored the outcome."""


# ------------------------------------------------------------------ of a transaction
def make_transaction_metadata_json(
    found: values.TransactionStats, at: Mapping[str, values.TransactionHere | None], now_ms: int
) -> dict[str, Any]:
    """Returns the state of a transaction as Pulsar's JSON object TransactionMetadata. `found`: the state at its
    coordinator; `now_ms`: the present time (ms since the epoch); `at`: the state of the transaction at each of its
    topics; None for a topic that was not asked, or did not answer."""
    status = found.state.name
    is_known = bool(found.timeout_ms)  # it is open, or not settled yet
    return {
        "txnId": str(found.txn), "status": ENDING_STATUS_NAMES.get(status, status) if found.topics else status,
        "openTimestamp": now_ms - found.age_ms if is_known else 0, "timeoutAt": found.timeout_ms,
        "producedPartitions": {
            topic: make_buffer_stats_json(here, found) for topic,
            here in at.items() if here is None or here.first is not None
        },
        "ackedPartitions": {
            topic: {each.name: make_pending_ack_json(each) for each in here.subscriptions}
            for topic, here in at.items() if here is not None and here.subscriptions
        },
        "owner": found.owner, "address": found.address, "name": found.name, "reason": found.reason,
    }  # fmt: skip


def make_buffer_stats_json(
    here: values.TransactionHere | None, found: values.TransactionStats | None
) -> dict[str, Any]:
    """Returns the state of a transaction at a topic as Pulsar's JSON object TransactionInBufferStats. `here`: its state
    at the topic, None if that is not known; `found`: its state at the coordinator, None if that is not known."""
    first = to_optional_text(here.first) if here is not None else None
    return {"startPosition": first, "aborted": found is not None and found.state is TxnState.ABORTED}


def make_pending_ack_json(pending: values.PendingOfTransaction | None) -> dict[str, Any]:
    """Returns the state of a transaction at a subscription as Pulsar's JSON object TransactionInPendingAckStats.
    `pending`: its acknowledgements there, None if there are none."""
    return {
        "cumulativeAckPosition": to_optional_text(pending.up_to) if pending is not None else None,
        "pendingEntries": pending.entries if pending is not None else 0,
    }


# ------------------------------------------------------------------ of a coordinator
def make_coordinator_stats_json(found: values.CoordinatorTransactions) -> dict[str, Any]:
    """Returns the statistics of a transaction coordinator as Pulsar's JSON object TransactionCoordinatorStats. For a
    coordinator that no broker has loaded yet, the state is None and the ids are -1."""
    return {
        "state": "Ready" if found.epoch else "None",
        "leastSigBits": found.next_least - 1 if found.epoch else -1,
        "lowWaterMark": found.done_below - 1 if found.epoch else -1,
        "ongoingTxnSize": found.open + found.prepared,
        "recoverStartTime": found.loading_ms,
        "recoverEndTime": found.loaded_ms,
    }


def make_coordinator_internals_json(number: int, found: values.CoordinatorTransactions) -> dict[str, Any]:
    """Returns the statistics of a transaction coordinator's log as Pulsar's JSON object
    TransactionCoordinatorInternalStats. `number`: that of the coordinator. The log consists of one ledger, which begins
    with a snapshot."""
    ledger: dict[str, Any] = {
        "ledgerId": found.ledger_id, "entries": found.ledger_entries, "size": found.ledger_bytes, "timestamp": 0,
        "offloaded": False, "metadata": None, "underReplicated": False, "properties": {},
    }  # fmt: skip
    return {"transactionLogStats": {
        "managedLedgerName": f"coordinator-{number}",
        "managedLedgerInternalStats": {
            "entriesAddedCounter": found.ledger_entries, "numberOfEntries": found.ledger_entries,
            "totalSize": found.ledger_bytes, "currentLedgerEntries": found.ledger_entries,
            "currentLedgerSize": found.ledger_bytes, "lastLedgerCreatedTimestamp": None,
            "lastLedgerCreationFailureTimestamp": None, "waitingCursorsCount": 0, "pendingAddEntriesCount": 0,
            "lastConfirmedEntry": f"{found.ledger_id}:{found.ledger_entries - 1}",
            "state": "LedgerOpened" if found.ledger_id >= 0 else "None",
            "ledgers": [ledger] if found.ledger_id >= 0 else [], "cursors": {},
        },
    }}  # fmt: skip


# ------------------------------------------------------------------ of a topic
def make_transaction_buffer_stats_json(
    stats: values.TopicStats, internals: values.TopicInternalStats
) -> dict[str, Any]:
    """Returns the statistics of the transactions at a topic as Pulsar's JSON object TransactionBufferStats. `stats`:
    the statistics of the topic; `internals`: those of its log. The state is NoSnapshot if the topic never had a
    transaction."""
    seen = stats.transactions
    return {
        "state": "Ready" if seen else "NoSnapshot",
        "maxReadPosition": str(seen.last_stable if seen else internals.last_confirmed),
        "lastSnapshotTimestamps": 0, "lowWaterMarks": None, "ongoingTxnSize": seen.open if seen else 0,
        "recoverStartTime": 0, "recoverEndTime": 0, "totalAbortedTransactions": seen.aborted if seen else 0,
        "snapshotType": "Single" if seen else None, "segmentsStats": None,
        "abortedEntries": seen.aborted_entries if seen else 0, "abortedBytes": seen.aborted_bytes if seen else 0,
        "waiting": stats.end_index - seen.stable_index if seen else 0,
    }  # fmt: skip


def make_pending_ack_stats_json(found: values.SubscriptionStats) -> dict[str, Any]:
    """Returns the statistics of the transactions at a subscription as Pulsar's JSON object
    TransactionPendingAckStats."""
    return {
        "state": "Ready" if found.durable else "None",
        "lowWaterMarks": None,
        "ongoingTxnSize": found.pending_transactions,
        "recoverStartTime": 0,
        "recoverEndTime": 0,
        "pendingEntries": found.pending_entries,
    }
