"""The formats: the documented example byte for byte, every truncation and every flipped bit is noticed."""

import random
import struct
from collections.abc import Callable

import pytest

from magnetar.bookie.format import entry_log, index, journal, ledger_index, mark
from magnetar.bookie.format.journal import (
    FILE_HEADER_BYTES,
    DamagedFile,
    FileHeader,
    crc32c,
    decode_file_header,
    encode_file_header,
)
from magnetar.bookie.format.ledger_index import (
    DrainedEntryLog,
    LedgerState,
    LimboChange,
    QuarantinedEntries,
    QuarantineEnded,
    Tombstone,
)
from magnetar.bookie.format.mark import CheckpointMark
from magnetar.proto.checksum import JOINED_BYTES_MIN
from magnetar.proto.errors import NewerFormat
from magnetar.runtime.files import Buffer
from tests.bookie.entries import decode_extents, log_record, stored_entry

UUID = b"\x11" * 16
SALT = 0x0123456789ABCDEF


def flips(data: bytes) -> list[bytes]:
    """Every version of `data` with one bit changed."""
    return [data[:i] + bytes([data[i] ^ (1 << bit)]) + data[i + 1 :] for i in range(len(data)) for bit in range(8)]


def cuts(data: bytes) -> list[bytes]:
    return [data[:size] for size in range(len(data))]


def u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


# ---------------------------------------------------------------------------------------- file header
HEADER = encode_file_header(FileHeader(b"MGN-MARK", UUID, 7))


def test_file_header_is_the_documented_one() -> None:
    head = bytes.fromhex("4d474e2d4d41524b 0001 0000" + "11" * 16 + "0000000000000007" + "00" * 16)
    assert head + u32(crc32c(head)) + bytes(8) == HEADER
    assert len(HEADER) == FILE_HEADER_BYTES
    assert decode_file_header(HEADER, b"MGN-MARK", UUID, 7, "f") == FileHeader(b"MGN-MARK", UUID, 7)


def test_damaged_file_header_is_refused() -> None:
    for wrong in [*cuts(HEADER), *flips(HEADER)]:
        with pytest.raises(DamagedFile, match=r"^f: damaged at offset 0"):
            decode_file_header(wrong, b"MGN-MARK", UUID, 7, "f")


def test_file_of_another_bookie_number_or_version_is_refused() -> None:
    with pytest.raises(DamagedFile, match="belongs to bookie"):
        decode_file_header(HEADER, b"MGN-MARK", b"\x22" * 16, 7, "f")
    with pytest.raises(DamagedFile, match="number 7, its name says 8"):
        decode_file_header(HEADER, b"MGN-MARK", UUID, 8, "f")
    newer = HEADER[:8] + b"\x00\x02" + HEADER[10:52]
    with pytest.raises(NewerFormat, match=r"mark of format version 2; .* upgrade"):
        decode_file_header(newer + u32(crc32c(newer)) + bytes(8), b"MGN-MARK", UUID, 7, "f")


# ---------------------------------------------------------------------------------------- journal
def block(records: list[tuple[journal.RecordType, int, int, bytes]], number: int = 5) -> bytes:
    encoded = [(journal.encode_record(kind, ledger, entry, [data]), data) for kind, ledger, entry, data in records]
    headers = [header for (header, _), _ in encoded]
    body = b"".join(header + data for (header, _), data in encoded)
    head = journal.encode_block_header(SALT, number, 0, 8192, 4096, headers, len(body))
    return head + body


def read_block(data: bytes, number: int = 5) -> list[journal.JournalRecord] | None:
    header = journal.decode_block_header_if_intact(data, SALT, number, 8192)
    records = None if header is None else journal.decode_records_if_intact(header, data[journal.BLOCK_HEADER_BYTES :])
    return None if records is None else list(records.rows())


RECORDS = [
    (journal.RecordType.KEY, 5, -1, b"k" * 20),
    (journal.RecordType.ADD, 5, 0, stored_entry(5, 0, b"hello")),
    (journal.RecordType.FENCE, 5, -1, b""),
    (journal.RecordType.LAC, 5, 0, b""),
    (journal.RecordType.TOMBSTONE, 1, 3, b""),
]
BLOCK = block(RECORDS)


def test_journal_record_is_the_documented_one() -> None:
    header, size = journal.encode_record(journal.RecordType.FENCE, 5, -1)
    body = bytes.fromhex("02 0000000000000005 ffffffffffffffff 00000000")
    assert header == u32(crc32c(body)) + body
    assert size == len(header) == 25


def test_journal_block_comes_back_whole() -> None:
    assert read_block(BLOCK) == [journal.JournalRecord(*fields) for fields in RECORDS]
    assert read_block(block([])) == []


def test_journal_block_of_another_journal_or_use_does_not_parse() -> None:
    assert read_block(BLOCK, number=6) is None
    assert journal.decode_block_header_if_intact(BLOCK, SALT + 1, 5, 8192) is None
    assert journal.decode_block_header_if_intact(BLOCK, SALT, 5, 4096) is None, "it stands elsewhere"


def test_a_journal_block_with_bytes_behind_its_last_record_is_no_block() -> None:
    (header, size), data = journal.encode_record(journal.RecordType.FENCE, 5, -1), b""
    head = journal.encode_block_header(SALT, 5, 0, 8192, 4096, [header], size + 5)
    assert read_block(head + header + data + bytes(5)) is None


@pytest.mark.parametrize("change", [cuts, flips])
def test_damaged_journal_block_is_no_block(change: Callable[[bytes], list[bytes]]) -> None:
    assert [wrong for wrong in change(BLOCK) if read_block(wrong) is not None] == []


# ---------------------------------------------------------------------------------------- entry log
def test_entry_log_record_is_the_documented_one() -> None:
    record = log_record(b"a", b"bc")
    assert record == u32(3) + u32(crc32c(u32(3) + b"abc")) + b"abc"
    assert entry_log.decode_record_if_intact(b"x" + record, 1, 1 + len(record)) == b"abc"


@pytest.mark.parametrize("size", [0, 1, JOINED_BYTES_MIN - 37, JOINED_BYTES_MIN, 200_001])
def test_records_of_long_entries_have_the_checksums_of_their_bytes_which_are_not_read_for_it(size: int) -> None:
    whole = stored_entry(3, 4, random.Random(size).randbytes(size))
    pieces = tuple(piece for piece in (whole[:36], whole[36:]) if piece)
    for stored in ((whole,), pieces):
        _, records = entry_log.encode_records([stored, (stored_entry(3, 5, b"short"),)])
        record = b"".join(next(records))
        assert entry_log.decode_record_if_intact(record, 0, len(record)) == whole
        assert entry_log.decode_record_if_intact(b"".join(next(records)), 0, 8 + 41) == stored_entry(3, 5, b"short")
        headers, buffers = list[bytes](), list[Buffer]()
        length = journal.encode_adds(3, [(4, stored, len(whole))], headers, buffers)
        head = journal.encode_block_header(SALT, 5, 0, 8192, 4096, headers, length)
        assert read_block(head + b"".join(buffers)) == [journal.JournalRecord(journal.RecordType.ADD, 3, 4, whole)]


@pytest.mark.parametrize("change", [cuts, flips])
def test_damaged_entry_log_record_is_noticed(change: Callable[[bytes], list[bytes]]) -> None:
    stored = stored_entry(3, 4, b"hello")
    record = log_record(stored)
    assert entry_log.decode_entry_ids(stored) == (3, 4)
    assert entry_log.decode_entry_ids(stored[:35]) is None
    assert [
        wrong for wrong in change(record) if entry_log.decode_record_if_intact(wrong, 0, len(record)) is not None
    ] == []


def test_records_are_decoded_up_to_the_first_that_is_damaged_or_another() -> None:
    stored = [stored_entry(3, entry, payload) for entry, payload in ((4, b"hello"), (5, b""), (6, b"world"))]
    records = [log_record(each) for each in stored]
    data, offsets = b"".join(records), [100, 100 + len(records[0]), 100 + len(records[0] + records[1]), 0]
    offsets[3] = 100 + len(data)
    assert entry_log.decode_entries_if_intact(data, offsets, 3, 4) == stored
    assert entry_log.decode_entries_if_intact(data, offsets, 3, 5) == entry_log.decode_entries_if_intact(
        data, offsets, 2, 4
    ) == []
    for at in range(len(data)):
        for bit in range(8):
            wrong = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            whole = sum(end - 100 <= at for end in offsets[1:])
            assert entry_log.decode_entries_if_intact(wrong, offsets, 3, 4) == stored[:whole]
        whole = sum(end - 100 <= at for end in offsets[1:])
        assert entry_log.decode_entries_if_intact(data[:at], offsets, 3, 4) == stored[:whole]


# ---------------------------------------------------------------------------------------- index
EXTENT, TABLE = index.encode_extent(3, [0, 1], [0, 44, 88], 4096)
OTHER, OTHER_TABLE = index.encode_extent(4, [7, 9, 1000], [0, 10, 30, 60], 5000)
GROUP = index.encode_index_group([EXTENT, OTHER], [TABLE, OTHER_TABLE])


def read_heads(data: bytes) -> list[index.Extent] | None:
    header = index.decode_group_header_if_intact(data)
    return None if header is None else decode_extents(header, data)


def test_index_extent_is_the_documented_one() -> None:
    assert bytes.fromhex("00000000 00000001 00000000 0000002c 00000058") == TABLE
    assert (3, 0, 1, 2, 88, 4096, crc32c(TABLE)) == EXTENT
    assert GROUP.startswith(b"MIGR" + struct.pack(">IQ", 2, len(TABLE) + len(OTHER_TABLE)))
    assert GROUP.endswith(struct.pack(">qqqIIQI", *OTHER) + TABLE + OTHER_TABLE)


def test_index_group_comes_back_with_gaps_in_entries() -> None:
    assert read_heads(GROUP) == [EXTENT, OTHER]
    table = index.decode_table_if_intact(OTHER, OTHER_TABLE)
    assert table is not None
    assert (list(table.deltas), list(table.offsets)) == ([0, 2, 993], [0, 10, 30, 60])


@pytest.mark.parametrize("change", [cuts, flips])
def test_damaged_index_is_noticed(change: Callable[[bytes], list[bytes]]) -> None:
    heads = GROUP[: -len(TABLE) - len(OTHER_TABLE)]
    assert [wrong for wrong in change(heads) if read_heads(wrong) is not None] == []
    assert [wrong for wrong in change(OTHER_TABLE) if index.decode_table_if_intact(OTHER, wrong) is not None] == []


# ---------------------------------------------------------------------------------------- mark
MARK = mark.encode_checkpoint_mark(CheckpointMark(1, 4096, 0, 0, 0, 1, 64), UUID, 9)


def test_mark_is_the_documented_one() -> None:
    body = struct.pack(">11Q", 1, 4096, 0, 0, 0, 1, 64, 0, 0, 0, 0)
    assert encode_file_header(FileHeader(b"MGN-MARK", UUID, 9)) + body + u32(crc32c(body)) == MARK
    assert len(MARK) == mark.MARK_FILE_BYTES == 156
    assert mark.decode_checkpoint_mark(MARK, UUID, "mark") == (CheckpointMark(1, 4096, 0, 0, 0, 1, 64), 9)
    two = CheckpointMark(3, 8192, 5, 4200, 100, 2, 114, 6, 4300, 200, 6)
    assert mark.decode_checkpoint_mark(mark.encode_checkpoint_mark(two, UUID, 1), UUID, "mark") == (two, 1)


def test_mark_of_the_former_length_has_no_cold_log() -> None:
    body = struct.pack(">7Q", 1, 4096, 5, 4200, 100, 1, 64)
    former = encode_file_header(FileHeader(b"MGN-MARK", UUID, 9)) + body + u32(crc32c(body))
    assert len(former) == 124
    assert mark.decode_checkpoint_mark(former, UUID, "mark") == (
        CheckpointMark(1, 4096, 5, 4200, 100, 1, 64, 0, 0, 0, 5),
        9,
    )
    for wrong in [*cuts(former), *flips(former)]:
        with pytest.raises(DamagedFile):
            mark.decode_checkpoint_mark(wrong, UUID, "mark")


def test_damaged_mark_is_refused() -> None:
    for wrong in [*cuts(MARK), MARK + b"x", *flips(MARK)]:
        with pytest.raises(DamagedFile):
            mark.decode_checkpoint_mark(wrong, UUID, "mark")


# ---------------------------------------------------------------------------------------- ledger index
STATES = [
    LedgerState(5, True, b"\x22" * 20, -1, 9),
    QuarantinedEntries(5, 4, 4),
    LimboChange(7, True),
    DrainedEntryLog(3),
    Tombstone(6, 8),
    LedgerState(9, False, b"k" * 20, 3, 4),
    QuarantineEnded(9, 2, 3),
    LimboChange(8, False),
]
LEDGERS = bytes(FILE_HEADER_BYTES) + b"".join(map(ledger_index.encode_ledger_index_record, STATES))


def test_ledger_index_record_is_the_documented_one() -> None:
    body = bytes.fromhex("01 0000000000000005 01" + "22" * 20 + "ffffffffffffffff 0000000000000009")
    assert ledger_index.encode_ledger_index_record(STATES[0]) == u32(crc32c(body)) + body
    assert len(ledger_index.encode_ledger_index_record(STATES[0])) == ledger_index.LEDGER_RECORD_BYTES == 50
    examples = [
        "03 0000000000000005 00" + "00" * 20 + "0000000000000004 0000000000000004",
        "05 0000000000000007 01" + "00" * 20 + "0000000000000000 0000000000000000",
        "06 0000000000000003 00" + "00" * 20 + "0000000000000000 0000000000000000",
    ]
    assert [ledger_index.encode_ledger_index_record(state)[4:] for state in STATES[1:4]] == list(
        map(bytes.fromhex, examples)
    )
    records = [ledger_index.decode_record_if_intact(LEDGERS, FILE_HEADER_BYTES + 50 * at) for at in range(len(STATES))]
    assert records == STATES


@pytest.mark.parametrize("at", range(len(STATES)))
def test_a_damaged_record_of_the_ledger_index_is_noticed(at: int) -> None:
    start = FILE_HEADER_BYTES + at * 50
    for wrong in flips(LEDGERS[start : start + 50]):
        broken = LEDGERS[:start] + wrong + LEDGERS[start + 50 :]
        assert ledger_index.decode_record_if_intact(broken, start) is None
    for size in range(1, 50):
        assert ledger_index.decode_record_if_intact(LEDGERS[: start + size], start) is None


def test_ledger_index_can_be_read_on_behind_a_damaged_record() -> None:
    broken = LEDGERS[: FILE_HEADER_BYTES + 70] + b"x" + LEDGERS[FILE_HEADER_BYTES + 71 :]
    found = [ledger_index.decode_record_if_intact(broken, FILE_HEADER_BYTES + 50 * at) for at in range(len(STATES))]
    assert found == [STATES[0], None, *STATES[2:]]
    assert ledger_index.decode_record_if_intact(LEDGERS, len(LEDGERS)) is None
    unknown = b"\x07" + LEDGERS[FILE_HEADER_BYTES + 5 : FILE_HEADER_BYTES + 50]
    of_no_type = LEDGERS[:FILE_HEADER_BYTES] + u32(crc32c(unknown)) + unknown
    assert ledger_index.decode_record_if_intact(of_no_type, FILE_HEADER_BYTES) is None


# ---------------------------------------------------------------------------------------- cookie
COOKIE = mark.Cookie("b", "i", ("h:/d",), 2)
COOKIE_BYTES = mark.encode_cookie(COOKIE)


def test_cookie_is_the_documented_one() -> None:
    body = b'{"bookie":"b","instance":"i","directories":["h:/d"],"starts":2}'
    head = b"MGN-COOK" + struct.pack(">HI", 1, len(body)) + body
    assert head + u32(crc32c(head)) == COOKIE_BYTES
    assert mark.decode_cookie(COOKIE_BYTES, "c") == COOKIE


def test_damaged_cookie_is_refused() -> None:
    for wrong in [*cuts(COOKIE_BYTES), COOKIE_BYTES + b"x", *flips(COOKIE_BYTES)]:
        with pytest.raises(DamagedFile):
            mark.decode_cookie(wrong, "c")


def test_newer_cookie_says_so() -> None:
    newer = COOKIE_BYTES[:8] + b"\x00\x03" + COOKIE_BYTES[10:-4]
    with pytest.raises(NewerFormat, match=r"cookie of format version 3; .* upgrade"):
        mark.decode_cookie(newer + u32(crc32c(newer)), "c")
