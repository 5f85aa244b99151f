"""Every decoder of the bookie against anything: cut at every byte, changed at random, lying lengths.

A decoder answers with a value, with None or with its typed error, and never takes more memory than `BYTES_MAX` for
these inputs of a few hundred bytes, whatever they say. Lies are also *sealed*: with the checksum that fits them, as
somebody would write who knows the format.
"""

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from magnetar.bookie.format import entry_log, index, journal, ledger_index, mark
from magnetar.bookie.format import mark as note
from magnetar.bookie.format.journal import DamagedFile, FileHeader, crc32c, decode_file_header, encode_file_header
from magnetar.bookie.format.ledger_index import (
    DrainedEntryLog,
    LedgerState,
    LimboChange,
    QuarantinedEntries,
    QuarantineEnded,
    Tombstone,
)
from magnetar.bookie.format.mark import CheckpointMark
from magnetar.ledger import peer_format as adds
from magnetar.ledger import peer_format as peer
from magnetar.ledger.peer_format import BookieAnswerHead, BookieOperation, BookieRequestFlags, BookieRequestHead, Status
from magnetar.proto.errors import NewerFormat
from tests.bookie.entries import KEY, decode_extents, log_record, stored_entry

UUID = b"\x11" * 16
SALT = 7
ROUNDS = 400
BYTES_MAX = 1 << 20
LIES = tuple(
    struct.pack(">Q", value) for value in (0, 1, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
)

Errors = tuple[type[Exception], ...]


class Format(NamedTuple):
    """`seal` puts the right checksum on a changed input."""

    data: bytes
    decode: Callable[[bytes], object]
    errors: Errors
    seal: Callable[[bytes], bytes] = lambda data: data


def sealed_at(end: int) -> Callable[[bytes], bytes]:
    """The checksum of everything before `end` stands there; a negative end counts from the back."""

    def seal(data: bytes) -> bytes:
        at = end if end >= 0 else len(data) + end
        if at < 0 or at + 4 > len(data):
            return data
        return data[:at] + crc32c(data[:at]).to_bytes(4, "big") + data[at + 4 :]

    return seal


# ---------------------------------------------------------------------------------------- inputs
def journal_block() -> bytes:
    records = [
        (journal.RecordType.KEY, 5, -1, KEY),
        (journal.RecordType.ADD, 5, 0, stored_entry(5, 0, b"hello")),
        (journal.RecordType.TOMBSTONE, 1, 3, b""),
    ]
    encoded = [(journal.encode_record(kind, ledger, entry, [data]), data) for kind, ledger, entry, data in records]
    body = b"".join(header + data for (header, _), data in encoded)
    head = journal.encode_block_header(SALT, 5, 0, 4096, 4096, [header for (header, _), _ in encoded], len(body))
    return head + body


def seal_block(data: bytes) -> bytes:
    at = journal.BLOCK_HEADER_BYTES - 4
    if len(data) < journal.BLOCK_HEADER_BYTES:
        return data
    return data[:at] + crc32c(SALT.to_bytes(8, "big"), data[:at]).to_bytes(4, "big") + data[at + 4 :]


def read_block(data: bytes) -> object:
    header = journal.decode_block_header_if_intact(data, SALT, 5, 4096)
    records = None if header is None else journal.decode_records_if_intact(header, data, journal.BLOCK_HEADER_BYTES)
    return None if records is None else list(records.rows())


EXTENT, TABLE = index.encode_extent(3, [0, 1], [0, 44, 88], 4096)
GROUP = index.encode_index_group([EXTENT], [TABLE])


def seal_group(data: bytes) -> bytes:
    heads = data[index.GROUP_HEADER_BYTES : index.GROUP_HEADER_BYTES + index.EXTENT_HEAD_BYTES]
    return data[:16] + crc32c(data[:16], heads).to_bytes(4, "big") + data[20:]


def read_ledger_index(data: bytes) -> object:
    offsets = range(journal.FILE_HEADER_BYTES, len(data), ledger_index.LEDGER_RECORD_BYTES)
    return [ledger_index.decode_record_if_intact(data, offset) for offset in offsets]


def read_group(data: bytes) -> object:
    header = index.decode_group_header_if_intact(data)
    heads = data[index.GROUP_HEADER_BYTES :]
    index.decode_head_columns(heads[: len(heads) // index.EXTENT_HEAD_BYTES * index.EXTENT_HEAD_BYTES])
    return None if header is None else decode_extents(header, data)


def read_record(data: bytes) -> object:
    offsets = (0, entry_log.decode_record_size(data, 0), len(data))
    return (
        entry_log.decode_record_if_intact(data, 0, len(data)),
        entry_log.verify_record_at(data, 0),
        entry_log.decode_entry_ids(data),
        entry_log.decode_entries_if_intact(data, sorted(offsets), 3, 4),
    )


def read_adds(data: bytes) -> object:
    """The head, then the frame of the rows, then that of the payloads, as one input."""
    head = peer.decode_request(data[:HEAD_BYTES])
    return adds.verify_adds(head, [data[HEAD_BYTES : HEAD_BYTES + 80], data[HEAD_BYTES + 80 :]], 1 << 20)


def read_one_add(data: bytes) -> object:
    head = peer.decode_request(data[:HEAD_BYTES])
    frames = [data[HEAD_BYTES : HEAD_BYTES + 36], data[HEAD_BYTES + 36 :]]
    return adds.verify_add(head.ledger, head.entry, frames, 1 << 20)


def read_statuses(data: bytes) -> object:
    return adds.decode_add_statuses(peer.decode_answer(data[:-2]), [data[-2:]], 2)


STORED = stored_entry(3, 4, b"hello")
RECORD = log_record(STORED)
STATES = (
    LedgerState(5, True, KEY, -1, 9), Tombstone(6, 8), QuarantinedEntries(5, 1, 2), QuarantineEnded(5, 1, 1),
    LimboChange(9,
    True),
    DrainedEntryLog(3)
)  # fmt: skip
LEDGERS = bytes(64) + b"".join(map(ledger_index.encode_ledger_index_record, STATES))
REQUEST = BookieRequestHead(BookieOperation.ADD_MANY, BookieRequestFlags.NONE, 1, 3, 2, 0, KEY).encode()
HEAD_BYTES = len(REQUEST)
ROWS = adds.encode_adds(
    [(stored_entry(1, 3, b"ab", 2)[:36], [b"ab"], 2), (stored_entry(1, 4, b"", 2)[:36], [], 0)],
)
FILE = (DamagedFile, NewerFormat)

FORMATS = {
    "file header": Format(
        encode_file_header(FileHeader(b"MGN-MARK", UUID, 7)),
        lambda data: decode_file_header(data, b"MGN-MARK", UUID, 7, "f"), FILE, sealed_at(52),
    ),
    "journal block": Format(journal_block(), read_block, (), seal_block),
    "entry log record": Format(RECORD, read_record, ()),
    "index group": Format(GROUP, read_group, (), seal_group),
    "index table": Format(TABLE, lambda data: index.decode_table_if_intact(EXTENT, data), ()),
    "mark": Format(
        mark.encode_checkpoint_mark(CheckpointMark(1, 4096, 0, 0, 0, 1, 64), UUID, 9),
        lambda data: mark.decode_checkpoint_mark(data, UUID, "mark"), FILE,
        lambda data: data[:64] + sealed_at(-4)(data[64:]),
    ),
    "ledger index": Format(LEDGERS, read_ledger_index, FILE),
    "cookie": Format(
        mark.encode_cookie(mark.Cookie("b", "i", ("h:/d",), 2)), lambda data: mark.decode_cookie(data, "c"), FILE,
        sealed_at(-4),
    ),
    "note": Format(
        note.encode_checksummed_json(b"MGN-MARK", {"a": 1}),
        lambda data: note.decode_checksummed_json(data, b"MGN-MARK", dict, "n"), FILE,
        sealed_at(-4)
    ),
    "request head": Format(REQUEST, peer.decode_request, (ValueError,)),
    "answer head": Format(
        BookieAnswerHead(BookieOperation.READ, Status.OK, 1, 2, 3, 4).encode(), peer.decode_answer, (ValueError,)
    ),
    "ADD_MANY": Format(REQUEST + b"".join(bytes(frame) for frame in ROWS), read_adds, (ValueError,)),
    "ADD": Format(
        BookieRequestHead(BookieOperation.ADD, BookieRequestFlags.NONE, 3, 4, 0, 0, KEY).encode() + STORED,
        read_one_add, (ValueError,)
    ),
    "statuses": Format(
        BookieAnswerHead(BookieOperation.ADD_MANY, Status.OK, 1, 3, -1, 2).encode() + b"\x00\x04", read_statuses,
        (ValueError,)
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- changes
def truncated(data: bytes, rng: random.Random) -> Iterator[bytes]:
    yield from (data[:size] for size in range(len(data)))


def changed(data: bytes, rng: random.Random) -> Iterator[bytes]:
    for _ in range(ROUNDS):
        wrong = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(wrong) + 1)
            match rng.randrange(4):
                case 0 if at < len(wrong):
                    wrong[at] ^= 1 << rng.randrange(8)
                case 1:
                    wrong[at:at] = rng.randbytes(rng.randint(1, 9))
                case 2:
                    del wrong[at : at + rng.randint(1, 9)]
                case _:
                    wrong[at : at + 8] = rng.randbytes(8)
            if not wrong:
                break
        yield bytes(wrong)


def lying(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Each place where a number of 2, 4 or 8 bytes may stand says something extreme."""
    for at in range(min(len(data), 200)):
        for size in (2, 4, 8):
            for lie in LIES:
                yield data[:at] + lie[-size:] + data[at + size :]


@pytest.mark.parametrize("change", [truncated, changed, lying])
@pytest.mark.parametrize("name", FORMATS)
def test_a_decoder_answers_anything_with_a_value_or_its_typed_error(
    name: str, change: Callable[[bytes, random.Random], Iterator[bytes]]
) -> None:
    data, decode, errors, seal = FORMATS[name]
    assert decode(data) is not None
    rng = random.Random(f"{name}/{change.__name__}")
    tracemalloc.start()
    try:
        for wrong in change(data, rng):
            for input_ in (wrong, seal(wrong)):
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                with contextlib.suppress(*errors):
                    decode(input_)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < BYTES_MAX, f"{peak - before} bytes for {input_.hex()}"
    finally:
        tracemalloc.stop()
