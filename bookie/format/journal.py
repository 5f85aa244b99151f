"""The journal's bytes: every add, fence, key, explicit LAC and tombstone, in the order in which they were admitted.

    file    = file header (format/journal.py: magic "MGN-JRNL", number = journal id, a = end of the previous journal,
              b = salt), zeros up to 2048, the same header again, zeros up to 4096 | block*
    block   = block header | record* | zeros up to a multiple of 4096
    block header (44 bytes, big-endian)
            = magic u32 0x4D4A424B "MJBK" | journal id u64 | block seq u64 | synced_upto u64 | records u32 | length u32
              (bytes of the records) | records_crc u32 | crc32c u32 (of salt u64, the block's offset u64, these 40)
    record  = crc32c u32 (type .. payload) | type u8 | ledger i64 | entry i64 | length u32 | payload

| type | entry | payload |
|---|---|---|
| 1 ADD | entry id | stored entry (ledger/peer_format.py) |
| 2 FENCE | -1 | – |
| 3 KEY | -1 | master key, 20 bytes |
| 4 LAC | the explicit LAC | – |
| 5 TOMBSTONE | last ledger of the interval that begins at `ledger` | – |

One block is one group commit: written at once, then synced. `synced_upto`: that many bytes of the file were synced when
the block was made. The block before it may still have been on its way, so it is the block's own offset or less. A block
at another offset than the one in its checksum does not parse. `block seq` counts from 0 in each file. A
recycled file keeps stale blocks: they carry another journal id and another salt (random per use of the file, so that no
payload can pose as a block), and do not parse.
`records_crc` is the CRC32C of the records' own CRCs, in order: a block is whole or it does not count. Without the salt
no block can be distinguished from stale bytes, so the file has two headers, in different sectors: one is enough.

Damage (ledger protocol §2.2): a bad block is a *torn tail* (never acknowledged, ignored) when nothing says that its
own bytes were synced: no mark beyond its offset, no later valid block of this journal whose `synced_upto` is beyond its
offset, no later journal whose header gives an end beyond it. Otherwise it is damage in durable data: the reader reports
it and goes on after it. The decision is `bookie/store/replay.py: JournalReader`; this module
knows single blocks only.

Example: FENCE of ledger 5 is the record
`<crc32c> 02 0000000000000005 ffffffffffffffff 00000000`, 25 bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...ledger.peer_format import ENTRY_HEADER_STRUCT, extend_checksum_by_entry
from ...proto import checksum, versions
from ...proto.checksum import JOINED_BYTES_MIN

# ------------------------------------------------------------------------------------------------------- framing
# Shared by all file formats of the bookie: the checksum, the file header, and how damage is reported.
#
# Every file begins with one header of 64 bytes, all integers big-endian:
#
#     file header = magic 8 bytes | version u16 | reserved u16 (0) | bookie uuid 16 bytes | number u64 | a u64 | b u64
#                   | crc32c u32 (of the 52 bytes before) | 8 zero bytes
#
# `number` is the one in the file's name (journal id, log id, generation); `a` and `b` belong to the format (else 0). A
# file under a wrong name or with a broken checksum is `DamagedFile`, a whole one of another bookie `ForeignFile`, a
# newer version `NewerFormat`.
#
# The versions are those of proto/versions.py. Example: magic "MGN-MARK", uuid 16 × 0x11, number 7:
# `4d474e2d4d41524b 0001 0000 11…11 0000000000000007 0…0 0…0 <crc32c> 0000000000000000`.


_FORMATS = {form.magic: form for form in versions.BOOKIE_FILES}
_HEADER = struct.Struct(">8sHH16sQQQ")
_CRC = struct.Struct(">I")
FILE_HEADER_BYTES = 64
assert _HEADER.size + _CRC.size + 8 == FILE_HEADER_BYTES

Buffer = bytes | bytearray | memoryview


class DamagedFile(Exception):
    """Raised when bytes of a file are damaged: the bytes at `offset` of the file `path` are not those that were written
    there. `reason` says what is wrong."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: damaged at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class ForeignFile(DamagedFile):
    """Raised when a file is undamaged but belongs to another bookie, for example because an operator mixed up two
    directories."""


class FileHeader(NamedTuple):
    """The 64-byte header of a file: the magic of the file's format, the bookie's uuid (16 bytes), and the file's
    number.

    `a` and `b` are two more numbers; the file's format defines their meaning."""

    magic: bytes
    uuid: bytes
    number: int
    a: int = 0
    b: int = 0


def crc32c(*buffers: Buffer) -> int:
    """Returns one CRC32C, of the bytes of all given buffers as if they were joined."""
    crc = 0
    for buffer in buffers:
        crc = checksum.crc32c(buffer, crc)
    return crc


def continue_crc32c(crc: int, data: bytes) -> int:
    """Returns the CRC32C of some earlier bytes followed by `data`. `crc` is the CRC32C of the earlier bytes."""
    return checksum.crc32c(data, crc)


def encode_file_header(header: FileHeader) -> bytes:
    """Encodes a file header with the present version of the file's format, and returns its 64 bytes."""
    head = _HEADER.pack(header.magic, _FORMATS[header.magic].version, 0, header.uuid, header.number, header.a, header.b)
    return head + _CRC.pack(crc32c(head)) + bytes(8)


def decode_file_header(data: bytes, magic: bytes, uuid: bytes, number: int, path: str) -> FileHeader:
    """Decodes a file header and returns it. Raises DamagedFile, ForeignFile or NewerFormat if `data` is not the header
    of file `number` of the bookie `uuid` with this `magic`. `path` is named in the error text."""
    if len(data) < FILE_HEADER_BYTES:
        raise DamagedFile(path, 0, f"{len(data)} bytes are too few for a file header")
    head = data[: _HEADER.size]
    found_magic, version, _, found_uuid, found_number, a, b = _HEADER.unpack(head)
    if found_magic != magic:
        raise DamagedFile(path, 0, f"begins with {found_magic!r}, not {magic!r}")
    if crc32c(head) != _CRC.unpack_from(data, _HEADER.size)[0] or any(data[_HEADER.size + 4 : FILE_HEADER_BYTES]):
        raise DamagedFile(path, 0, "checksum of the file header does not match")
    versions.check_format(_FORMATS[magic], version, path)
    if found_uuid != uuid:
        raise ForeignFile(path, 0, f"belongs to bookie {found_uuid.hex()}, not to {uuid.hex()}")
    if found_number != number:
        raise DamagedFile(path, 0, f"says that it is number {found_number}, its name says {number}")
    return FileHeader(found_magic, found_uuid, found_number, a, b)


# ------------------------------------------------------------------------------------------------------- journal


JOURNAL_MAGIC = versions.JOURNAL.magic
BLOCK_MAGIC = 0x4D4A424B
BLOCK_ALIGNMENT_BYTES = 4096
_BLOCK = struct.Struct(">IQQQIII")
_SEED = struct.Struct(">QQ")
_BODY = struct.Struct(">BqqI")
_LENGTH = struct.Struct(">I")
BLOCK_HEADER_BYTES = _BLOCK.size + 4
_RECORD = struct.Struct(">IBqqI")
RECORD_HEADER_BYTES = 4 + _BODY.size
HEADER_COPY_OFFSET = 2048
RECORD_BYTES_MAX = 8 << 20
"""The longest payload of a record, in bytes: an entry of 5 MiB, and the bytes that brokers put before it."""


class RecordType(enum.IntEnum):
    """The type of a journal record. The table in the module's docstring lists the fields of each type."""

    ADD = 1
    FENCE = 2
    KEY = 3
    LAC = 4
    TOMBSTONE = 5


class JournalRecord(NamedTuple):
    """A record of the journal. `entry` is the entry id of an ADD, the explicit LAC of a LAC, the last ledger of a
    TOMBSTONE, and -1 for a FENCE or a KEY. The `payload` of an ADD record is the stored entry."""

    type: RecordType
    ledger: int
    entry: int
    payload: bytes


class BlockRecords(NamedTuple):
    """The records of a journal block, as one array for each field of JournalRecord; `types` has the numbers of the
    RecordTypes. A replay reads millions of records, and an object for each record would cost more time than the
    record's checksum."""

    types: tuple[int, ...]
    ledgers: tuple[int, ...]
    entries: tuple[int, ...]
    payloads: list[bytes]

    def rows(self) -> Iterator[JournalRecord]:
        """Yields the records one after the other, each as an object."""
        return map(JournalRecord, map(_TYPES.__getitem__, self.types), self.ledgers, self.entries, self.payloads)


class BlockHeader(NamedTuple):
    """The header of a journal block: the id of the journal, the number of the block in its file, and how many bytes of
    the file were synced when the block was made.

    `records` and `length` are the number of records in the block and their total bytes; `records_crc` is the CRC32C of
    the CRCs of these records."""

    journal: int
    sequence: int
    synced_upto: int
    records: int
    length: int
    records_crc: int

    @property
    def padded_bytes(self) -> int:
        """The size of the block in the file, in bytes: its header, its records and the padding."""
        return round_up_to_alignment(BLOCK_HEADER_BYTES + self.length)


_TYPES = {int(kind): kind for kind in RecordType}
_ADD = int(RecordType.ADD)
_sum = checksum.crc32c


def round_up_to_alignment(size: int) -> int:
    """Returns `size`, in bytes, rounded up to a multiple of BLOCK_ALIGNMENT_BYTES, at which journal blocks begin."""
    return (size + BLOCK_ALIGNMENT_BYTES - 1) & -BLOCK_ALIGNMENT_BYTES


def encode_record(kind: RecordType, ledger: int, entry: int, payload: Sequence[Buffer] = ()) -> tuple[bytes, int]:
    """Encodes the header of a journal record of type `kind`. Returns the header, and the size in bytes of the whole
    record. `entry`: as in JournalRecord. The payload is not copied: the caller must write its buffers after the
    header."""
    length = 0
    for buffer in payload:
        length += len(buffer)
    assert length <= RECORD_BYTES_MAX, f"journal record of {length} bytes"
    body = _BODY.pack(kind, ledger, entry, length)
    return _CRC.pack(crc32c(body, *payload)) + body, RECORD_HEADER_BYTES + length


def encode_adds(
    ledger: int, entries: Sequence[tuple[int, Sequence[Buffer], int]], headers: list[bytes], buffers: list[Buffer]
) -> int:
    """Encodes an ADD record for each entry, given as (entry id, stored entry, size in bytes). The caller must have
    verified the entries. Appends the record headers to `headers`, and all buffers to be written to `buffers`. Returns
    the total size of the records in bytes.

    The first buffer of an entry, which has the entry's header, is joined to the record header. This halves the number
    of buffers."""
    total = 0
    for entry, stored, size in entries:
        assert size <= RECORD_BYTES_MAX, f"journal record of {size} bytes"
        body = _BODY.pack(_ADD, ledger, entry, size) + stored[0]
        if size < JOINED_BYTES_MIN or len(stored[0]) != ENTRY_HEADER_STRUCT.size:
            crc = _sum(body, 0)
            for part in stored[1:]:
                crc = _sum(part, crc)
        else:
            crc = extend_checksum_by_entry(body[: _BODY.size], body[_BODY.size :], size - ENTRY_HEADER_STRUCT.size)
        header = _CRC.pack(crc) + body
        headers.append(header)
        buffers.append(header)
        buffers += stored[1:]
        total += size
    return total + RECORD_HEADER_BYTES * len(entries)


def encode_block_header(
    salt: int, journal: int, sequence: int, offset: int, synced_upto: int, record_headers: Sequence[bytes], length: int
) -> bytes:
    """Encodes the header of a block that begins at `offset` of the journal file and returns its bytes. `record_headers`
    are the headers of the block's records, `length` is the total size of these records in bytes. `salt` is the random
    number of the file, which its checksums cover; `sequence` is the number of the block in the file; `synced_upto`: the
    offset up to which the file is synced now."""
    records_crc = crc32c(b"".join([header[:4] for header in record_headers]))
    head = _BLOCK.pack(BLOCK_MAGIC, journal, sequence, synced_upto, len(record_headers), length, records_crc)
    return head + _CRC.pack(crc32c(_SEED.pack(salt, offset), head))


def encode_block_prefix(journal: int) -> bytes:
    """Returns the first 12 bytes of every block of the journal with the id `journal`."""
    return struct.pack(">IQ", BLOCK_MAGIC, journal)


def encode_first_block(header: bytes) -> bytes:
    """Returns the first 4096 bytes of a journal file: the encoded file `header`, twice, so that one damaged copy does
    no harm."""
    half = header + bytes(HEADER_COPY_OFFSET - len(header))
    return half + half


def decode_block_header_if_intact(data: bytes, salt: int, journal: int, offset: int) -> BlockHeader | None:
    """Decodes a block header from `data`, bytes that were read at `offset` of the file of journal `journal`, whose
    checksums cover `salt`. Returns None if they are not a valid block header, or if the header is left from an earlier
    use of the file."""
    if len(data) < BLOCK_HEADER_BYTES:
        return None
    magic, *rest = _BLOCK.unpack_from(data)
    if magic != BLOCK_MAGIC or rest[0] != journal:
        return None
    if crc32c(_SEED.pack(salt, offset), data[: _BLOCK.size]) != _CRC.unpack_from(data, _BLOCK.size)[0]:
        return None
    return BlockHeader(*rest)


def decode_records_if_intact(header: BlockHeader, data: bytes, offset: int = 0) -> BlockRecords | None:
    """Decodes the records of the block with the given header. The records begin at `offset` of `data`. Returns None if
    any record is damaged."""
    limit = offset + header.length
    if len(data) < limit:
        return None
    heads: list[bytes] = []
    payloads: list[bytes] = []
    for _ in range(header.records):
        start = offset + RECORD_HEADER_BYTES
        if start > limit:
            return None
        end = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
        if end > limit:
            return None
        heads.append(data[offset:start])
        payloads.append(data[start:end])
        offset = end
    if offset != limit:
        return None
    crcs = b"".join([head[:4] for head in heads])
    found = map(_sum, payloads, map(crc32c, [head[4:] for head in heads]))
    if crc32c(crcs) != header.records_crc or struct.pack(f">{len(heads)}I", *found) != crcs:
        return None
    _, types, ledgers, entries, _ = zip(*_RECORD.iter_unpack(b"".join(heads)), strict=True) if heads else [()] * 5
    return BlockRecords(types, ledgers, entries, payloads) if _TYPES.keys() >= set(types) else None
