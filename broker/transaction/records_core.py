"""The records that a coordinator writes into its ledger. A record is atomic: all of it counts, or nothing.

    TransactionsCommitted       the transactions in it are committed, together; and the sink has committed that batch
    TransactionPrepared         the transaction is prepared: it survives a crash of its coordinator, until its deadline
    PreparedTransactionAborted  a prepared transaction is aborted (any other is aborted if it has no commit record)
    TransactionsSettled         every participant has stored the outcome
    ParticipantDetached         an administrator removed a participant
    NameHolderChanged           the name has this holder; earlier ones are fenced
    IdleNamesRemoved            the names are removed
    OutcomesDiscarded           outcomes of lower ids are discarded
    EpochHandedOver             the owner of `epoch` ended in order: these transactions stay open in the next epoch
    SettledOutcomesInSnapshot   only in a snapshot: the outcomes of settled transactions
    LargestHolderNumber         only in a snapshot: the largest number of a holder
    SinkBatchRecorded           the last batch of a sink, and how long the sink was idle; with the batch number
                                DISCARDED_BATCH_NUMBER the sink is removed
    HalfMessage…                records of half messages (state_core.py)

Ids are the lower halves of `TxnId` (`least`); the ledger belongs to one coordinator. A deadline begins anew in a new
epoch, so records store durations. Names and sinks belong to the role `owner` (state_core.py); an earlier version wrote
records without an owner. broker/transaction/log.py has the encoding.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Participant(NamedTuple):
    """A topic that takes part in a transaction, with the number of the transaction's entries in this topic, and the
    position of the last one (`ledger`, `entry`). The client reports both; -1: not known (broker/common/transactions.py
    `Settlement`)."""

    topic: str
    entries: int = -1
    ledger: int = -1
    entry: int = -1


class ParticipantWithTopicIndex(NamedTuple):
    """A Participant as a record stores it: with an index into the record's list of topics, in place of the topic."""

    topic: int
    entries: int
    ledger: int
    entry: int


class SinkBatchTag(msgspec.Struct, frozen=True, array_like=True):
    """Says to which batch of a sink a transaction belongs: the sink, the query, the number of the batch, and the
    attempt to write it (`run`)."""

    sink_id: str
    query_id: str
    batch: int
    run: str = ""


class TransactionOwner(msgspec.Struct, frozen=True, array_like=True):
    """The role that began a transaction, and the name, the holder and the sink under which it was begun. `timeout_s`:
    for how long it may stay open. Ids that are leased together share one object."""

    owner: str  # role that began it
    timeout_s: float
    name: str = ""
    holder: int = 0  # of the name
    tag: SinkBatchTag | None = None
    address: str = ""  # of the client that began it


DISCARDED_BATCH_NUMBER = -1
"""The batch number in a record which says that the sink is removed. (An older version reads it as a sink without a
batch.)"""


class SinkBatch(msgspec.Struct, frozen=True, array_like=True):
    """The batch that a sink has committed last."""

    sink_id: str
    query_id: str
    batch: int
    owner: str = ""
    idle_s: float = 0.0  # when the record was written


class CoordinatorLogRecord(msgspec.Struct, frozen=True, array_like=True):
    """The base class of the records in a coordinator's ledger. A docstring that begins with "Record:" says what is true
    from this record on."""


class TransactionsCommitted(CoordinatorLogRecord, frozen=True, array_like=True, tag=1):
    """Record: these transactions are committed, all of them together. `txns`: each id with its participants, which are
    indexes into `topics`; `sink`: the batch of a sink that they are, None if they belong to no sink."""

    txns: list[tuple[int, list[ParticipantWithTopicIndex]]]
    topics: list[str]
    sink: SinkBatch | None = None
    half: int = 0  # that the transaction publishes: it is committed with it; 0: none
    owner: str = ""  # of the transactions


class TransactionPrepared(CoordinatorLogRecord, frozen=True, array_like=True, tag=2):
    """Record: a transaction is prepared. It stays open for `left_s` seconds, even if the coordinator moves to another
    broker."""

    txn: int
    owned: TransactionOwner
    participants: list[Participant]
    left_s: float


class PreparedTransactionAborted(CoordinatorLogRecord, frozen=True, array_like=True, tag=3):
    """Record: a prepared transaction is aborted."""

    txn: int
    topics: list[str]
    owner: str = ""


class TransactionsSettled(CoordinatorLogRecord, frozen=True, array_like=True, tag=4):
    """Record: all participants of these transactions have stored the outcome."""

    txns: list[int]


class ParticipantDetached(CoordinatorLogRecord, frozen=True, array_like=True, tag=5):
    """Record: an administrator removed a topic from an ended transaction, which no longer waits for it."""

    txn: int
    topic: str


class NameHolderChanged(CoordinatorLogRecord, frozen=True, array_like=True, tag=6):
    """Record: a name has the new holder number `holder`. Clients with a lower number may not use the name any more.
    `idle_s`: for how long the name was idle when the record was written."""

    name: str
    holder: int
    idle_s: float = 0.0
    owner: str = ""


class IdleNamesRemoved(CoordinatorLogRecord, frozen=True, array_like=True, tag=7):
    """Record: names that were idle for too long are removed."""

    names: list[str]
    owners: list[str] = []  # of each of them; fewer: of no role


class OutcomesDiscarded(CoordinatorLogRecord, frozen=True, array_like=True, tag=8):
    """Record: the outcomes of all transactions with an id below `below` are discarded."""

    below: int


class HandedOverTransaction(NamedTuple):
    """An open transaction that an epoch hands over to the next epoch, with the topics that have joined it."""

    txn: int
    owned: TransactionOwner
    topics: list[str]


class HandedOverIdLease(NamedTuple):
    """Transaction ids that a client has leased and not used yet, which an epoch hands over to the next epoch."""

    txns: list[int]
    owned: TransactionOwner


class EpochHandedOver(CoordinatorLogRecord, frozen=True, array_like=True, tag=9):
    """Record: an epoch has ended in order. The next epoch continues its open transactions and its leases."""

    epoch: int
    opened: list[HandedOverTransaction]
    leases: list[HandedOverIdLease]


class SettledOutcomesInSnapshot(CoordinatorLogRecord, frozen=True, array_like=True, tag=10):
    """Record of a snapshot: the ids of committed transactions whose outcomes all participants have stored."""

    high: int  # the ids' upper 31 bits
    committed: bytes  # their lower 32 bits: a portable roaring bitmap
    owners: dict[str, bytes] = {}  # those of them that a role began


class LargestHolderNumber(CoordinatorLogRecord, frozen=True, array_like=True, tag=11):
    """Record of a snapshot: the largest holder number that was given for any name so far."""

    holders: int


class SinkBatchRecorded(CoordinatorLogRecord, frozen=True, array_like=True, tag=12):
    """Record: which batch a sink has committed last, and for how long the sink was idle. With the batch number
    DISCARDED_BATCH_NUMBER the sink is removed."""

    sink: SinkBatch


class HalfMessage(NamedTuple):
    """One message of a half message: its topic, and the client-part of the entry (proto/entry.py) that is published at
    the commit."""

    topic: str
    entry: bytes


class HalfMessageStored(CoordinatorLogRecord, frozen=True, array_like=True, tag=13):
    """Record: a half message is stored, with its present age and state. `check_key`: a text that the program gets with
    each check; `check_after_s`: seconds until the first check; `unknown`: how many checks were answered UNKNOWN;
    `parked`: why it is parked, "" if it is not."""

    half: int
    owner: str  # role that prepared it
    group: str
    check_key: str
    check_after_s: float
    messages: list[HalfMessage]
    unknown: int = 0
    age_s: float = 0.0
    parked: str = ""


class HalfMessageAgeRecorded(CoordinatorLogRecord, frozen=True, array_like=True, tag=14):
    """Record: the present age of a half message, how many checks were answered UNKNOWN, and whether it is parked."""

    half: int
    unknown: int  # number of answers of UNKNOWN
    age_s: float  # when this was written
    parked: str  # why; empty: it is not


class HalfMessageRolledBack(CoordinatorLogRecord, frozen=True, array_like=True, tag=15):
    """Record: a half message is rolled back."""

    half: int


class HalfMessageOutcomesInSnapshot(CoordinatorLogRecord, frozen=True, array_like=True, tag=16):
    """Record of a snapshot: the outcomes of half messages that have ended."""

    committed: bytes  # portable roaring bitmaps of 64 bits
    rolled_back: bytes
    owners: dict[str, bytes] = {}  # those of both that a role prepared


class HalfMessageOutcomesDiscarded(CoordinatorLogRecord, frozen=True, array_like=True, tag=17):
    """Record: the outcomes of these half messages are discarded. `halves`: their ids, as a portable roaring bitmap of
    64 bits."""

    halves: bytes


HalfMessageRecord = (
    HalfMessageStored | HalfMessageAgeRecorded | HalfMessageRolledBack | HalfMessageOutcomesInSnapshot
    | HalfMessageOutcomesDiscarded
)
AnyCoordinatorRecord = (
    TransactionsCommitted | TransactionPrepared | PreparedTransactionAborted | TransactionsSettled | ParticipantDetached
    | NameHolderChanged | IdleNamesRemoved
    | OutcomesDiscarded
    | EpochHandedOver | SettledOutcomesInSnapshot | LargestHolderNumber
    | SinkBatchRecorded | HalfMessageRecord
)  # fmt: skip


def make_commit_record(
    txns: dict[int, list[Participant]], sink: SinkBatch | None = None, half: int = 0, owner: str = ""
) -> TransactionsCommitted:
    """Returns the record that commits the transactions `txns`. `txns`: for each transaction id, its participants;
    `sink`: the batch that they are, None if they belong to no sink; `half`: the half message that they publish, 0 for
    none; `owner`: their role."""
    topics: dict[str, int] = {}
    rows = [
        (
            txn,
            [ParticipantWithTopicIndex(topics.setdefault(each.topic, len(topics)), *each[1:]) for each in participants],
        )
        for txn, participants in txns.items()
    ]
    return TransactionsCommitted(rows, list(topics), sink, half, owner)


def decode_participants(record: TransactionsCommitted, shares: list[ParticipantWithTopicIndex]) -> list[Participant]:
    """Returns the participants of one transaction in a commit record. `shares`: the transaction's row in
    `record.txns`."""
    return [Participant(record.topics[share.topic], *share[1:]) for share in shares]
