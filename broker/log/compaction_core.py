"""Compaction by key: decides which messages survive, and which bytes of an entry are kept. This module reads and writes
no ledger.

    survey = SurvivingMessageSearch(keys_max, retain_null_key=False, salt=…)
    while not survey.is_done:                    # one round reads everything once
        for entry in …: survey.add_entry(entry.first_index, entry.count, parse_entry(entry.bytes))
        survey.finish_reading_round()
    compact_entry(entry.bytes, entry.first_index, entry.count, survey.survivors)   # the bytes to keep; None: nothing

Rules (Pulsar CP1, its complaints 24 and 49)
- Of each key the latest message survives, inside batches too, and keeps its message id and index.
- A message without a value (`null_value`, or an empty payload, from any producer) is a tombstone: it deletes its key
  and is removed itself. A later message with the key begins it anew.
- Messages without a key are removed; with `retain_null_key` all of them stay.
- A chunked message is one message: its chunks stay or are removed together; chunks whose last one has not arrived yet
  stay.
- An entry that cannot be parsed (damaged, or an encrypted batch) is kept unchanged.
- A message that an earlier compaction removed from its batch does not count as a message.

Bounds. The search identifies a key by a 16-byte BLAKE2b hash with a salt of this run, so that no producer can make two
keys collide. At most `keys_max` keys are in memory (about 200 bytes each). When there are more, the search keeps half
of the hash space and leaves the other half to another round: it reads the log again, and writes nothing to disk.
Survivors are a bitmap of message indexes: two bytes for each at most, a bit for each where they are dense.

A message that is removed from a batch leaves an empty item with `compacted_out`, so that the batch indexes of the
others do not change; every client of Pulsar hides such items.

Guarding tests: tests/broker/log/test_compaction_core.py.

The format of a compacted ledger: survivors under their original ids, then a table of their places.

    survivor = head | ledger u64 | entry u64 | the entry as it is stored in the topic (proto/entry.py)
    table    = head | piece u32 | pieces u32 | a part of the rows; pieces follow each other at the ledger's end
    row      = ledger u64 | entries u64 | first index i64 | end index i64 | first survivor u64 | size u32 | bitmap
    head     = magic "MC" | version u8 | kind u8 (1 survivor, 2 table) | crc32c u32 of all that follows it

Numbers are big-endian. There is a row for each ledger of the topic, up to the horizon, with at least one surviving
entry. The row has the number of its entries that compaction read, their message indexes, the number of its first
survivor (its entry id in the compacted ledger), and the entry ids of its survivors as a portable roaring bitmap. So the
place of a survivor is `first survivor` + its rank in the bitmap, and an entry that is not in the bitmap was removed. A
crash may leave a ledger without a table; no record names such a ledger.

Example: entry `6869` of position 5:7 is

    4d43 01 01 7847c27a  0000000000000005 0000000000000007 6869
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from pyroaring import BitMap, BitMap64

from ...proto.checksum import crc32c
from ...proto.compression import UNCOMPRESSED_BYTES_MAX
from ...proto.entry import (
    Buffer,
    EntryHeader,
    MessageFields,
    decode_message_columns,
    encode_entry,
    encode_item_prefix,
    parse_header,
    split_broker_part,
)
from ...proto.entry_pb2 import SingleMessageMetadata
from ...proto.errors import CorruptEntry
from ...proto.names import Position
from ...proto.versions import COMPACTED, check_format

COMPACTED_LEDGER_MAGIC = b"MC"
SURVIVOR_KIND, TABLE_KIND = 1, 2
COMPACTED_PIECE_BYTES_MAX = 1 << 20
"""Bytes of a piece of a table: far below what a ledger takes as one entry."""
_HEAD = struct.Struct(">2sBBI")
_POSITION = struct.Struct(">QQ")
_PIECE = struct.Struct(">II")
_ROW = struct.Struct(">QQqqQI")


class DamagedCompactedLedger(ValueError):
    """Raised if an entry of a compacted ledger is damaged."""


class SurvivingEntriesRow(msgspec.Struct):
    """A row of the table in a compacted ledger. It names the entries of one ledger of the topic that survived the
    compaction. `entries`: how many entries of that ledger compaction read; `first_index`: the index of their first
    message; `end_index`: the index after their last message; `first`: the number of the first survivor in the compacted
    ledger; `survivors`: the entry ids that survive."""

    ledger_id: int
    entries: int
    first_index: int
    end_index: int
    first: int  # number of its first survivor
    survivors: BitMap

    @property
    def removed(self) -> BitMap:
        """Returns the ids of the entries of this ledger that compaction removed."""
        return BitMap(range(self.entries)) - self.survivors


def _record(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(COMPACTED_LEDGER_MAGIC, COMPACTED.version, kind, crc32c(body)) + body


def _body(data: Buffer, kind: int) -> bytes:
    if len(data) < _HEAD.size:
        raise DamagedCompactedLedger(f"{len(data)} bytes are too few for a record")
    magic, version, found, crc = _HEAD.unpack_from(data)
    if magic != COMPACTED_LEDGER_MAGIC or found != kind or version < 1:
        raise DamagedCompactedLedger(f"begins with {bytes(data[:4]).hex()}, not with a record of kind {kind}")
    body = bytes(data[_HEAD.size :])
    if crc32c(body) != crc:
        raise DamagedCompactedLedger("the checksum does not match")
    check_format(COMPACTED, version, "a compacted ledger")
    return body


def encode_survivor(position: Position, entry: bytes) -> bytes:
    """Returns the entry of the compacted ledger that stores a surviving entry of the topic, with its position in the
    topic."""
    return _record(SURVIVOR_KIND, _POSITION.pack(*position) + entry)


def decode_survivor(data: Buffer) -> tuple[Position, bytes]:
    """Decodes an entry of the compacted ledger. Returns the position in the topic and the bytes of the surviving entry.
    Raises DamagedCompactedLedger if `data` is damaged, NewerFormat if a later version of Magnetar wrote it."""
    body = _body(data, SURVIVOR_KIND)
    if len(body) < _POSITION.size:
        raise DamagedCompactedLedger("a survivor ends inside its position")
    return Position(*_POSITION.unpack_from(body)), body[_POSITION.size :]


def encode_survivor_table(rows: list[SurvivingEntriesRow]) -> list[bytes]:
    """Returns the last entries of a compacted ledger, which store the table of surviving entries. Each entry contains
    one piece of the table. `rows`: one row for each ledger of the log that has survivors."""
    parts: list[bytes] = []
    for row in rows:
        bitmap = row.survivors.serialize()
        parts += (
            _ROW.pack(row.ledger_id, row.entries, row.first_index, row.end_index, row.first, len(bitmap)), bitmap,
        )  # fmt: skip
    body = b"".join(parts)
    pieces = [body[at : at + COMPACTED_PIECE_BYTES_MAX] for at in range(0, len(body), COMPACTED_PIECE_BYTES_MAX)] or [
        b""
    ]
    return [_record(TABLE_KIND, _PIECE.pack(number, len(pieces)) + each) for number, each in enumerate(pieces)]


def decode_survivor_table_piece(data: Buffer) -> tuple[int, int, bytes]:
    """Decodes one piece of the table of surviving entries. Returns its number, the number of all pieces, and the
    encoded rows in it. Raises DamagedCompactedLedger if `data` is damaged, NewerFormat if a later version of Magnetar
    wrote it."""
    body = _body(data, TABLE_KIND)
    if len(body) < _PIECE.size:
        raise DamagedCompactedLedger("a piece of a table ends inside its head")
    number, pieces = _PIECE.unpack_from(body)
    if not 0 <= number < pieces:
        raise DamagedCompactedLedger(f"piece {number} of {pieces}")
    return number, pieces, body[_PIECE.size :]


def decode_survivor_table_rows(body: bytes) -> list[SurvivingEntriesRow]:
    """Decodes the rows of the table of surviving entries, and returns them. `body`: the encoded rows of all pieces,
    concatenated. Raises DamagedCompactedLedger if `body` is damaged."""
    rows: list[SurvivingEntriesRow] = []
    offset = 0
    while offset < len(body):
        if len(body) - offset < _ROW.size:
            raise DamagedCompactedLedger("the table ends inside a row")
        ledger_id, entries, first_index, end_index, first, size = _ROW.unpack_from(body, offset)
        offset += _ROW.size
        if size > len(body) - offset:
            raise DamagedCompactedLedger("the table ends inside a bitmap")
        try:
            survivors = BitMap.deserialize(body[offset : offset + size])
        except (ValueError, IndexError, MemoryError) as error:
            raise DamagedCompactedLedger(f"a bitmap of the table cannot be read: {error}") from error
        offset += size
        rows.append(SurvivingEntriesRow(ledger_id, entries, first_index, end_index, first, survivors))
    return rows


KEY_OVERHEAD_BYTES = 200
"""Memory that a key takes in the table: its hash (16 bytes, 49 as an object), an index, and their place in a
dictionary."""
_SPACE = 1 << 32
"""Number of values of the first four bytes of a hash. Each round handles the keys in a part of these values."""
_TAKEN_OUT = encode_item_prefix(SingleMessageMetadata(compacted_out=True, payload_size=0))

DecodedEntry = tuple[EntryHeader, Sequence[MessageFields], Sequence[bytes]]


def parse_entry(entry: Buffer) -> DecodedEntry | None:
    """Parses a stored entry. Returns its header, and the metadata and the payload of each of its messages; None if the
    entry does not parse or is an encrypted batch. For a chunk, and for an encrypted message, the payload is a
    placeholder that is not empty."""
    try:
        part = split_broker_part(entry)[2]
        header = parse_header(part, verify=False)
        if header.metadata.num_chunks_from_msg > 1:
            return header, [header.metadata], [b"a part of a payload"]  # which is compressed as a whole
        if header.metadata.encryption_keys:
            return None if header.batched else (header, [header.metadata], [b"encrypted"])
        return (header, *decode_message_columns(header, part))
    except CorruptEntry:
        return None


class SurvivingMessageSearch:
    """The search for the messages that survive a compaction. Collects their indexes in `survivors`. The caller reads
    the whole log once per round. If the log has more than `keys_max` keys, there are several rounds, each for a part of
    the keys. `unreadable`: how many entries survive because they do not parse."""

    def __init__(self, keys_max: int, *, retain_null_key: bool = False, salt: bytes = b"") -> None:
        assert keys_max >= 1
        self.survivors = BitMap64()
        self.rounds = 0
        self.unreadable = 0  # entries that stay because they cannot be parsed
        self._keys_max = keys_max
        self._retain_null_key = retain_null_key
        self._salt = salt[:64]
        self._low, self._high = 0, _SPACE  # the part of the hash space that this round is about
        self._latest: dict[bytes, int | tuple[int, ...]] = {}  # key → index; of a chunked message: of its chunks
        self._chunks: dict[tuple[str, str], tuple[bytes, list[int]]] = {}  # key and chunks of what is not complete yet

    @property
    def is_done(self) -> bool:
        """Returns True if no further round is needed, because the surviving messages of all keys are known."""
        return self._low >= _SPACE

    def add_entry(self, first_index: int, count: int, entry: DecodedEntry | None) -> None:
        """Adds the next entry of the log, in log order. `first_index`: the index of its first message; `count`: the
        number of its messages; `entry`: the parsed entry, None if it does not parse (then all of its messages
        survive)."""
        if entry is None:
            if not self._low:
                self.survivors.add_range(first_index, first_index + count)
                self.unreadable += 1
            return
        header, fields, payloads = entry
        only = frozenset(header.metadata.compacted_batch_indexes)
        if header.metadata.num_chunks_from_msg > 1:
            self._chunk(first_index, header)
            return
        latest = self._latest
        for at, (of, payload) in enumerate(zip(fields, payloads, strict=True)):
            if _is_out(of) or (only and at not in only):
                continue
            if not of.HasField("partition_key"):
                if self._retain_null_key and not self._low:
                    self.survivors.add(first_index + at)
                continue
            key = self._hashed(of.partition_key)
            if key is None:
                continue
            if of.null_value or not payload:
                latest.pop(key, None)
            else:
                latest[key] = first_index + at
        if len(latest) > self._keys_max:
            self._narrow()

    def _hashed(self, key: str) -> bytes | None:
        """Returns the hash of the key; None if the key belongs to another round."""
        digest = blake2b(key.encode(), digest_size=16, key=self._salt).digest()
        return digest if self._low <= int.from_bytes(digest[:4]) < self._high else None

    def _chunk(self, index: int, header: EntryHeader) -> None:
        metadata = header.metadata
        if not metadata.HasField("partition_key"):
            if self._retain_null_key and not self._low:
                self.survivors.add(index)
            return
        key = self._hashed(metadata.partition_key)
        if key is None:
            return
        name = (metadata.producer_name, metadata.uuid)
        self._chunks.setdefault(name, (key, []))[1].append(index)
        if metadata.chunk_id == metadata.num_chunks_from_msg - 1:
            self._latest[key] = tuple(self._chunks.pop(name)[1])

    def _narrow(self) -> None:
        """Moves half of this round's keys to a later round, and repeats that until the rest fits in memory."""
        while len(self._latest) > self._keys_max and self._high - self._low > 1:
            self._high = (self._low + self._high) // 2
            high = self._high
            self._latest = {key: at for key, at in self._latest.items() if int.from_bytes(key[:4]) < high}
            self._chunks = {name: each for name, each in self._chunks.items() if int.from_bytes(each[0][:4]) < high}

    def finish_reading_round(self) -> None:
        """Ends a round, after the whole log was read once. Adds the latest message of each key of this round to
        `survivors`."""
        for value in self._latest.values():
            if isinstance(value, tuple):
                self.survivors.update(value)
        self.survivors.update([value for value in self._latest.values() if isinstance(value, int)])
        for _, chunks in self._chunks.values():
            self.survivors.update(chunks)
        width = self._high - self._low
        self._low, self._high = self._high, min(_SPACE, self._high + width)
        self._latest, self._chunks = {}, {}
        self.rounds += 1


def compact_entry(entry: Buffer, first_index: int, count: int, survivors: BitMap64) -> bytes | None:
    """Returns the bytes of a stored entry as compaction keeps them: the whole entry, or a batch in which the removed
    messages are empty. Returns None if no message of the entry survives. `first_index`: the index of its first message;
    `count`: the number of its messages; `survivors`: the indexes of all surviving messages."""
    kept = survivors.range_cardinality(first_index, first_index + count)
    if kept == 0:
        return None
    if kept == count:
        return bytes(entry)
    found = parse_entry(entry)
    assert found is not None, "all of an entry that cannot be parsed survives"
    header, fields, payloads = found
    items: list[bytes] = []
    for at, (of, payload) in enumerate(zip(fields, payloads, strict=True)):
        if first_index + at in survivors:
            assert isinstance(of, SingleMessageMetadata), "what is cut is a batch"
            items += (encode_item_prefix(of), payload)
        else:
            items.append(_TAKEN_OUT)
    payload = b"".join(items)
    assert len(payload) <= UNCOMPRESSED_BYTES_MAX, "what is cut does not grow"
    broker_part = bytes(entry[: len(entry) - len(split_broker_part(entry)[2])])
    return broker_part + encode_entry(header.metadata, payload)


def last_surviving_batch_index(entry: Buffer) -> int:
    """Returns the batch index of the last message of the entry that compaction has not removed; -1 if the entry is not
    a batch or does not parse."""
    found = parse_entry(entry)
    if found is None or not found[0].batched:
        return -1
    for at in reversed(range(len(found[1]))):
        if not _is_out(found[1][at]):
            return at
    return -1


def _is_out(fields: MessageFields) -> bool:
    """Returns True if an earlier compaction removed this message from its batch."""
    return isinstance(fields, SingleMessageMetadata) and fields.compacted_out
