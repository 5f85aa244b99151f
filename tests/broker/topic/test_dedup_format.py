
import pytest
from pyroaring import BitMap64

from magnetar.broker.topic import dedup as stored
from magnetar.broker.topic.dedup_core import DedupSnapshot, ProducerSequenceProgress
from magnetar.proto.names import Position

SNAPSHOT = DedupSnapshot(
    Position(7, 41), {"p": ProducerSequenceProgress(120), "q": ProducerSequenceProgress(3, "5f0c", 1)}
)


def read(entries: list[bytes]) -> DedupSnapshot:
    return stored.decode_snapshot([stored.decode_piece(entry) for entry in entries])


def test_a_snapshot_comes_back() -> None:
    (entry,) = stored.encode_snapshot(SNAPSHOT, 9)
    assert stored.decode_piece(entry).sequence == 9
    assert entry[24:] == b'{"ledger":7,"entry":41,"producers":[["p",120,"",-1],["q",3,"5f0c",1]]}'
    assert read([entry]) == SNAPSHOT


def test_gaps_come_back_and_a_snapshot_without_any_is_as_it_always_was() -> None:
    gaps = {"p": BitMap64([3, *range(50, 60), 1 << 40])}
    (entry,) = stored.encode_snapshot(SNAPSHOT._replace(gaps=gaps), 9)
    assert read([entry]) == SNAPSHOT._replace(gaps=gaps)
    (damaged,) = stored.encode_snapshot(SNAPSHOT, 9)
    body = damaged[24:-1] + b',"gaps":{"p":"AAAA"}}'
    with pytest.raises(stored.DamagedDedupSnapshot, match="gaps"):
        stored.decode_snapshot([stored.DedupSnapshotPiece(9, 0, 1, body)])


def test_a_large_snapshot_is_several_entries() -> None:
    large = DedupSnapshot(
        Position(1, 1), {f"producer-{number:0200}": ProducerSequenceProgress(number) for number in range(10_000)}
    )
    entries = stored.encode_snapshot(large, 1)
    assert len(entries) > 1
    assert max(map(len, entries)) <= stored.SNAPSHOT_PIECE_BYTES_MAX + 64
    assert read(entries) == large


def test_every_flipped_bit_is_noticed() -> None:
    (entry,) = stored.encode_snapshot(SNAPSHOT, 9)
    for place in range(len(entry)):
        for bit in range(8):
            damaged = bytearray(entry)
            damaged[place] ^= 1 << bit
            with pytest.raises(stored.DamagedDedupSnapshot):
                stored.decode_piece(bytes(damaged))
    with pytest.raises(stored.DamagedDedupSnapshot):
        stored.decode_piece(entry[:10])
