"""The stored outcomes of transactions: there and back, and damage is told."""

import pytest
from pyroaring import BitMap, BitMap64

from magnetar.broker.topic import outcomes as stored
from magnetar.broker.topic.dedup_core import ProducerSequenceProgress
from magnetar.broker.topic.transactions_core import AbortedEntriesOfLedger, OpenTxnInSnapshot
from magnetar.proto.errors import NewerFormat
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId

OPEN = OpenTxnInSnapshot(
    TxnId(3, 1 << 40), Position(7, 2), {7: BitMap([2, 5]), 9: BitMap([0])}, BitMap64([2, 3, 8]), BitMap64([2, 8]), 77,
    {"p": (ProducerSequenceProgress(4, "u", 1), Position(9, 0))},
)  # fmt: skip
ROWS = {7: stored.OutcomesPartPlace(3, 0, 1), 9: stored.OutcomesPartPlace(5, 12, 2)}
MARKER = stored.OutcomesSnapshotMarker(Position(9, 4), (OPEN,), ROWS, (TxnId(1, 2),), Position(8, 3))
PART = AbortedEntriesOfLedger(BitMap([1, 3]), BitMap64([1 << 40, (1 << 40) + 1]), 12)


def test_a_marker_is_read_as_it_was_written() -> None:
    pieces = [stored.decode_piece(each) for each in stored.encode_marker(MARKER, 6)]
    assert [(each.kind, each.sequence, each.is_last_piece) for each in pieces] == [(stored.MARKER_KIND, 6, True)]
    assert stored.decode_marker(pieces) == MARKER


def test_a_large_marker_has_several_pieces_and_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "OUTCOMES_PIECE_BYTES_MAX", 50)
    pieces = [stored.decode_piece(each) for each in stored.encode_marker(MARKER, 6)]
    assert [each.is_last_piece for each in pieces] == [False] * (len(pieces) - 1) + [True]
    assert stored.decode_marker(pieces) == MARKER


def test_a_part_is_read_where_its_row_says_and_nowhere_else() -> None:
    pieces = [stored.decode_piece(each) for each in stored.encode_outcomes_part(7, PART, 3)]
    assert stored.decode_outcomes_part(7, stored.OutcomesPartPlace(3, 0, 1), pieces) == PART
    for ledger_id, row in (
        (8, stored.OutcomesPartPlace(3, 0, 1)), (7, stored.OutcomesPartPlace(4, 0, 1)),
        (7, stored.OutcomesPartPlace(3, 0, 2))
    ):
        with pytest.raises(stored.DamagedTransactionOutcomes):
            stored.decode_outcomes_part(ledger_id, row, pieces)


def test_every_damaged_byte_is_told() -> None:
    (entry,) = stored.encode_outcomes_part(7, PART, 3)
    for at in range(len(entry)):
        damaged = bytearray(entry)
        damaged[at] ^= 1
        with pytest.raises((stored.DamagedTransactionOutcomes, NewerFormat)):
            stored.decode_piece(bytes(damaged))
    with pytest.raises(stored.DamagedTransactionOutcomes):
        stored.decode_piece(entry[:10])
    with pytest.raises(stored.DamagedTransactionOutcomes):
        stored.decode_marker([stored.decode_piece(entry)])
