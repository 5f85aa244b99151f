"""The bytes of a coordinator's ledger: what is written is read, and damage is told."""

import pytest

from magnetar.broker.transaction import log as entries
from magnetar.broker.transaction.records_core import (
    AnyCoordinatorRecord,
    EpochHandedOver,
    HalfMessage,
    HalfMessageAgeRecorded,
    HalfMessageOutcomesDiscarded,
    HalfMessageOutcomesInSnapshot,
    HalfMessageRolledBack,
    HalfMessageStored,
    HandedOverIdLease,
    HandedOverTransaction,
    IdleNamesRemoved,
    LargestHolderNumber,
    NameHolderChanged,
    OutcomesDiscarded,
    Participant,
    ParticipantDetached,
    PreparedTransactionAborted,
    SettledOutcomesInSnapshot,
    SinkBatch,
    SinkBatchRecorded,
    SinkBatchTag,
    TransactionOwner,
    TransactionPrepared,
    TransactionsSettled,
    make_commit_record,
)
from magnetar.proto.errors import NewerFormat

OWNED = TransactionOwner("role", 60.0, "app", 3, SinkBatchTag("sink", "query", 7, "run"))
RECORDS: list[AnyCoordinatorRecord] = [
    make_commit_record({1: [Participant("a", 3, 7, 9), Participant("b")], 2: [Participant("b", 0)]}, SinkBatch("s",
    "q", 4)),
    TransactionPrepared(3, OWNED, [Participant("a")], 10.0), PreparedTransactionAborted(3, ["a"]),
    TransactionsSettled([1, 2]), ParticipantDetached(1, "b"),
    NameHolderChanged("n", 4),
    IdleNamesRemoved(["n"]), OutcomesDiscarded(7),
    EpochHandedOver(2, [HandedOverTransaction(4, OWNED, ["a"])], [HandedOverIdLease([5, 6], OWNED)]),
    SettledOutcomesInSnapshot(512, b"\x00\xff"), LargestHolderNumber(4), SinkBatchRecorded(SinkBatch("s", "q", -1)),
    HalfMessageStored(9, "role", "g", "key", 10.0, [HalfMessage("a", b"\x00\xff")], 2, 3.5, "why"),
    HalfMessageAgeRecorded(9, 3, 4.5, ""),
    make_commit_record({10: [Participant("a", 1, 7, 10)]}, half=9), HalfMessageRolledBack(11),
    HalfMessageOutcomesInSnapshot(b"\x00", b"\xff"),
    HalfMessageOutcomesDiscarded(b"\x01"),
]  # fmt: skip


def test_what_is_written_is_read() -> None:
    (entry,) = entries.encode_records(RECORDS, 5)
    assert entries.decode_coordinator_entry(entry, 5, "?") == (entries.RECORDS_KIND, RECORDS)


def test_the_example_of_the_docstring() -> None:
    (entry,) = entries.encode_records([OutcomesDiscarded(7)], 3)
    assert entry[:8].hex() == "4d58010300000003"
    assert entry[12:] == b"[[8,7]]"


def test_a_snapshot_ends_once_however_large_it_is() -> None:
    many: list[AnyCoordinatorRecord] = [NameHolderChanged("n" * 500, number) for number in range(5_000)]
    pieces = [
        entries.decode_coordinator_entry(entry, number, "?")
        for number, entry in enumerate(entries.encode_snapshot(many))]
    assert [piece.kind for piece in pieces] == [entries.SNAPSHOT_KIND] * (len(pieces) - 1) + [entries.SNAPSHOT_END_KIND]
    assert [record for piece in pieces for record in piece.records] == many
    assert entries.decode_coordinator_entry(entries.encode_snapshot([])[0], 0, "?") == (entries.SNAPSHOT_END_KIND, [])


@pytest.mark.parametrize("at", range(0, 30, 3))
def test_a_changed_byte_is_damage(at: int) -> None:
    (entry,) = entries.encode_records(RECORDS, 5)
    with pytest.raises((entries.DamagedCoordinatorLedger, NewerFormat)):
        entries.decode_coordinator_entry(entry[:at] + bytes([entry[at] ^ 0x40]) + entry[at + 1 :], 5, "?")


def test_an_entry_in_another_place_is_damage() -> None:
    (entry,) = entries.encode_records(RECORDS, 5)
    with pytest.raises(entries.DamagedCoordinatorLedger):
        entries.decode_coordinator_entry(entry, 6, "?")
    with pytest.raises(entries.DamagedCoordinatorLedger):
        entries.decode_coordinator_entry(entry[:11], 5, "?")
