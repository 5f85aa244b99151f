"""Transactions in the forms of Pulsar's admin REST v3: the classes `Transaction…Stats` and `TransactionMetadata`.

Half messages have a form of our own.

A field of Pulsar that has nothing to tell here is null, 0 or empty: low water marks (an outcome is kept until every
participant has stored it), segments of snapshots, times of a topic's recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....proto import statistics as values
from ....proto.pulsar_json import optional
from ....proto.transactions import TxnState

ENDING = {"COMMITTED": "COMMITTING", "ABORTED": "ABORTING"}
"""While some topic has not stored the outcome, as Pulsar's TxnStatus names it."""


# ------------------------------------------------------------------ of a transaction
def metadata(
    found: values.TransactionStats, at: Mapping[str, values.TransactionHere | None], now_ms: int
) -> dict[str, Any]:
    """Returns a TransactionMetadata. `at`: what each topic has of it; None: the topic does not say."""
    status = found.state.name
    is_known = bool(found.timeout_ms)  # it is open, or not settled yet
    return {
        "txnId": str(found.txn), "status": ENDING.get(status, status) if found.topics else status,
        "openTimestamp": now_ms - found.age_ms if is_known else 0, "timeoutAt": found.timeout_ms,
        "producedPartitions": {
            topic: in_buffer(here, found) for topic, here in at.items() if here is None or here.first is not None
        },
        "ackedPartitions": {
            topic: {each.name: in_pending_acks(each) for each in here.subscriptions}
            for topic, here in at.items() if here is not None and here.subscriptions
        },
        "owner": found.owner, "address": found.address, "name": found.name, "reason": found.reason,
    }  # fmt: skip


def in_buffer(here: values.TransactionHere | None, found: values.TransactionStats | None) -> dict[str, Any]:
    """Returns a TransactionInBufferStats."""
    first = optional(here.first) if here is not None else None
    return {"startPosition": first, "aborted": found is not None and found.state is TxnState.ABORTED}


def in_pending_acks(pending: values.PendingOfTransaction | None) -> dict[str, Any]:
    """Returns a TransactionInPendingAckStats."""
    return {
        "cumulativeAckPosition": optional(pending.up_to) if pending is not None else None,
        "pendingEntries": pending.entries if pending is not None else 0,
    }


# ------------------------------------------------------------------ of a coordinator
def coordinator_stats(found: values.CoordinatorTransactions) -> dict[str, Any]:
    """Returns a TransactionCoordinatorStats."""
    return {
        "state": "Ready" if found.epoch else "None", "leastSigBits": found.next_least - 1 if found.epoch else -1,
        "lowWaterMark": found.done_below - 1 if found.epoch else -1, "ongoingTxnSize": found.open + found.prepared,
        "recoverStartTime": found.loading_ms, "recoverEndTime": found.loaded_ms,
    }


def coordinator_internals(number: int, found: values.CoordinatorTransactions) -> dict[str, Any]:
    """Returns a TransactionCoordinatorInternalStats. A coordinator has one ledger; it begins with a snapshot."""
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
def buffer_stats(stats: values.TopicStats, internals: values.TopicInternalStats) -> dict[str, Any]:
    """Returns a TransactionBufferStats. A topic that has seen no transaction has stored nothing of them."""
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


def pending_ack_stats(found: values.SubscriptionStats) -> dict[str, Any]:
    """Returns a TransactionPendingAckStats."""
    return {
        "state": "Ready" if found.durable else "None", "lowWaterMarks": None,
        "ongoingTxnSize": found.pending_transactions, "recoverStartTime": 0, "recoverEndTime": 0,
        "pendingEntries": found.pending_entries,
    }
