"""The peer protocol of brokers and bookies: the `head` of a request and of its answer.

All integers are big-endian. The payload of ADD, and of READ answers, travels in the frames beside the head, as stored:

    stored entry = ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32 | payload
                   the checksum covers the four integers and the payload; `length` is the ledger's bytes up to and
                   including this entry. 36 bytes in front of the payload (`ENTRY_HEADER_STRUCT`).

    request head = version u8 (1) | op u8 | flags u16 | ledger i64 | entry i64 | count u32 | bytes_max u32
                   | key 20 bytes
    answer head  = version u8 (1) | op u8 | status u16 | ledger i64 | entry i64 | lac i64 | count u32

| op | frames of the request | answer |
|---|---|---|
| ADD | one stored entry, in one or more frames (joined they are it) | OK after the journal's sync |
| ADD_MANY | `count` stored entries (see below) | OK and a status for each, after the journal's sync |
| … with UNSYNCED | as without | the same, as soon as the entries are in memory |
| READ | – | OK: frames are stored entries `entry`, `entry+1`, … (at most `count`, about `bytes_max`), at least one; |
|      |   | else NO_SUCH_ENTRY, NO_SUCH_LEDGER, UNKNOWN |
| READ_LAC | – | OK: `lac` = the largest LAC known for the ledger, `entry` = the largest entry stored (-1: none); |
| WRITE_LAC | – | OK: `entry` of the request is the new explicit LAC |
| HELD | – | OK and one frame: which of the entries `entry … entry + count - 1` are held (see below) |
| PING | – | OK |
| ADMIN | one frame: a JSON object of at most ADMIN_BYTES_MAX | OK and one frame: a JSON object; BAD_REQUEST for all |
|       |   | else; BUSY: too many at once; UNKNOWN: the verb failed, the bookie's log says why |

A verified entry says the checksum of its payload, so `extend_checksum_by_entry` knows that of any record around it.

Flags: FENCE (with READ, READ_LAC): no add without RECOVERY is accepted for the ledger after this, ever; the fence is
synced before *any* answer, also NO_SUCH_ENTRY. RECOVERY (with ADD, ADD_MANY): accepted although fenced. UNSYNCED (with
ADD, ADD_MANY, not with RECOVERY): answered before the sync, so a bookie that is killed or loses power may lack what it
answered. A bookie that does not know a flag answers BAD_REQUEST and does nothing (`Feature.UNSYNCED_ADDS`).
Every answer to READ carries the ledger's LAC as well (-1 when unknown). `key` is the ledger's master key: 20 bytes,
compared in constant time by every operation except PING and ADMIN (whose key is zeros), never logged. UNAUTHORIZED:
another key, or an id that the metadata does not know (bookie/service.py).
A decoder raises ValueError unless the size is exact.

The body of ADD_MANY: many stored entries of one ledger in one peer request, and its answer.

All integers are big-endian. `count` of the head is the number of entries, 1 to ADDS_PER_REQUEST_MAX; `entry` is the
first one's id.

    frame 0    = table: row × count
    row        = size u32 (of the payload) | ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32
                 what follows `size` is the entry's header as it is stored (`ENTRY_HEADER_STRUCT`)
    frame 1 …  = the payloads in the order of the table, none empty. Each payload is in one frame; a frame contains one
                 or more whole payloads. Small ones share a frame, because each part of a message costs microseconds;
                 large ones have their own, because joining copies them

    answer     = head with status OK, the `ledger`, `entry` and `count` of the request, and one frame: a status u8 for
                 each entry, in the order of the table. Any other status in the head applies to every entry

The entries may be in any order and have gaps (a striped ledger). Each is verified, refused and answered as if it were
in an ADD of its own. A table or frames that do not add up exactly are a ValueError, and nothing of the request is
done. Guards: tests/bookie/test_adds.py.

Example: entries 3 ("ab") and 4 (empty) of ledger 1, LAC 2: a table of 80 bytes
`00000002 0000000000000001 0000000000000003 0000000000000002 <length> <crc32c>
00000000 0000000000000001 0000000000000004 0000000000000002 <length> <crc32c>` and one frame `6162`; the answer's frame,
when both are stored, is `0000`.

Also in this file, below its heading: the body of the answer to HELD (held_format).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..proto.checksum import combine_checksums, crc32c
from ..proto.versions import PEER, describe_newer_format
from ..runtime.files import Buffer

PEER_PROTOCOL_VERSION = PEER.version
ENTRY_HEADER_STRUCT = struct.Struct(">qqqqI")
ENTRY_LAC_STRUCT = struct.Struct(">16xq")
"""Unpacks only the last-add-confirmed (LAC) from the header of a stored entry."""
CHECKSUMMED_HEADER_BYTES = ENTRY_HEADER_STRUCT.size - 4
"""The number of header bytes that the header's checksum covers, besides the payload."""
_REQUEST = struct.Struct(">BBHqqII20s")
_ANSWER = struct.Struct(">BBHqqqI")
ANSWER_HEAD_BYTES = _ANSWER.size
LEDGER_KEY_BYTES = 20
NO_LEDGER_KEY = bytes(LEDGER_KEY_BYTES)
ADMIN_BYTES_MAX = 64 << 10
"""The largest JSON of an ADMIN request, in bytes. A verb with its options has some hundred bytes."""


class BookieOperation(enum.IntEnum):
    """The operation of a request to a bookie. The table in the module's docstring describes the requests and their
    answers."""

    ADD = 1
    READ = 2
    READ_LAC = 3
    WRITE_LAC = 4
    PING = 5
    ADMIN = 6
    ADD_MANY = 7
    HELD = 8


class BookieRequestFlags(enum.IntFlag):
    """The flags of a request to a bookie. FENCE is for READ and READ_LAC, RECOVERY and UNSYNCED are for ADD and
    ADD_MANY."""

    NONE = 0
    FENCE = 1
    RECOVERY = 2
    UNSYNCED = 4


_FLAGS = int(BookieRequestFlags.FENCE | BookieRequestFlags.RECOVERY | BookieRequestFlags.UNSYNCED)
_FLAGS_OF = tuple(BookieRequestFlags(value) for value in range(_FLAGS + 1))
FLAGS_WITH_FENCE = tuple(each for each in _FLAGS_OF if BookieRequestFlags.FENCE in each)
FLAGS_WITH_RECOVERY = tuple(each for each in _FLAGS_OF if BookieRequestFlags.RECOVERY in each)
"""All flags that contain RECOVERY; FLAGS_WITH_FENCE has all that contain FENCE. To look flags up in them costs a
comparison or two, an operator of a Flag several calls."""
FLAGS_WITH_UNSYNCED = tuple(each for each in _FLAGS_OF if BookieRequestFlags.UNSYNCED in each)
_OP_OF = {int(op): op for op in BookieOperation}
_ADD = int(BookieOperation.ADD)
_ADD_HEAD = struct.pack(">BBH", PEER_PROTOCOL_VERSION, _ADD, 0)
ADD_OK_ANSWER_PREFIX = _ADD_HEAD
"""The first bytes in the head of most answers: status OK to an ADD."""
_UNSYNCED_ADD_HEAD = struct.pack(">BBH", PEER_PROTOCOL_VERSION, _ADD, int(BookieRequestFlags.UNSYNCED))
_ADD_MANY = int(BookieOperation.ADD_MANY)


class Status(enum.IntEnum):
    """The status in a bookie's answer. Only NO_SUCH_LEDGER and NO_SUCH_ENTRY count as proof that the bookie does not
    have an entry."""

    OK = 0
    NO_SUCH_LEDGER = 1
    NO_SUCH_ENTRY = 2
    UNKNOWN = 3  # limbo, damage, I/O error: not a vote
    FENCED = 4
    UNAUTHORIZED = 5
    READ_ONLY = 6
    BAD_REQUEST = 7
    BUSY = 8  # a bounded queue is full; nothing was done


STATUS_BY_NUMBER = {int(status): status for status in Status}
"""The statuses by their number. A dictionary is several times as fast as calling the Enum, which matters for every
add."""


class BookieRequestHead(NamedTuple):
    """The head of a request to a bookie. `count` is the number of entries, `bytes_max` bounds the payload bytes of the
    answer to a READ, `key` is the ledger's key (20 bytes).

    Fields that an operation does not use are 0; unused `ledger` and `entry` are -1."""

    op: BookieOperation
    flags: BookieRequestFlags
    ledger: int
    entry: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    bytes_max: int
    key: bytes

    def encode(self) -> bytes:
        return _REQUEST.pack(PEER_PROTOCOL_VERSION, self.op, self.flags, *self[2:])

    def __repr__(self) -> str:
        """Returns a text without the key, because a repr may be logged."""
        ids = f"ledger={self.ledger}, entry={self.entry}, count={self.count}"
        return f"BookieRequestHead({self.op!r}, {self.flags!r}, {ids})"


class BookieAnswerHead(NamedTuple):
    """The head of a bookie's answer. `lac` is the ledger's last-add-confirmed, -1: unknown. `count` is the number of
    entries; in the answer to HELD the number of runs."""

    op: BookieOperation
    status: Status
    ledger: int
    entry: int
    lac: int
    count: int  # type: ignore[assignment]  # tuple.count is not used

    def encode(self) -> bytes:
        return _ANSWER.pack(PEER_PROTOCOL_VERSION, *self)


def encode_add_request(
    ledger: int, entry: int, key: bytes, flags: BookieRequestFlags = BookieRequestFlags.NONE
) -> bytes:
    """Encodes the head of an ADD request and returns its bytes. Does the same as `BookieRequestHead.encode` in a fifth
    of the time."""
    return _REQUEST.pack(PEER_PROTOCOL_VERSION, _ADD, flags, ledger, entry, 0, 0, key)


pack_add_request = partial(_REQUEST.pack, PEER_PROTOCOL_VERSION, _ADD, int(BookieRequestFlags.NONE))
"""Called with (ledger, entry, 0, 0, key): returns the same as `encode_add_request` without flags, with one call
less."""
pack_unsynced_add_request = partial(_REQUEST.pack, PEER_PROTOCOL_VERSION, _ADD, int(BookieRequestFlags.UNSYNCED))
"""As `pack_add_request`, with the flag UNSYNCED."""
pack_add_ok_answer = partial(_ANSWER.pack, PEER_PROTOCOL_VERSION, _ADD, int(Status.OK))
"""Called with (ledger, entry, -1, 0): returns the encoded head of the answer OK to an ADD, with fewer calls than
`BookieAnswerHead.encode`."""


def encode_add_many_request(
    ledger: int, entry: int, count: int, key: bytes, flags: BookieRequestFlags = BookieRequestFlags.NONE
) -> bytes:
    """Encodes the head of an ADD_MANY request with `count` entries and returns its bytes. `entry` is the id of the
    first entry."""
    return _REQUEST.pack(PEER_PROTOCOL_VERSION, _ADD_MANY, flags, ledger, entry, count, 0, key)


def encode_admin_request() -> bytes:
    """Encodes the head of an ADMIN request and returns its bytes. The request's only frame is JSON."""
    return BookieRequestHead(BookieOperation.ADMIN, BookieRequestFlags.NONE, -1, -1, 0, 0, NO_LEDGER_KEY).encode()


def encode_ping_request() -> bytes:
    """Encodes the head of a PING request, which does nothing at the bookie but is answered, and returns its bytes."""
    return BookieRequestHead(BookieOperation.PING, BookieRequestFlags.NONE, -1, -1, 0, 0, NO_LEDGER_KEY).encode()


def parse_client_add_request(head: bytes) -> tuple[int, int, bytes, int] | None:
    """Returns (ledger, entry, key, flags) if `head` is the head of an ADD request without flags, as most requests are,
    or with the flag UNSYNCED alone. Returns None for any other request."""
    if len(head) != _REQUEST.size or not head.startswith((_ADD_HEAD, _UNSYNCED_ADD_HEAD)):
        return None
    _, _, flags, ledger, entry, _, _, key = _REQUEST.unpack(head)
    return ledger, entry, key, flags


def read_ledger_of_request(head: bytes) -> int:
    """Returns the ledger id in the head of a request, which need not be valid otherwise; -1 if the head is too
    short."""
    return -1 if len(head) < _REQUEST.size else int.from_bytes(head[4:12], "big", signed=True)


def decode_request(head: bytes) -> BookieRequestHead:
    """Decodes the head of a request and returns it. Raises ValueError if its length, version, operation or flags are
    wrong."""
    if len(head) != _REQUEST.size:
        raise ValueError(f"request head of {len(head)} bytes, not {_REQUEST.size}")
    version, op, flags, *rest = _REQUEST.unpack(head)
    if version != PEER_PROTOCOL_VERSION:
        raise ValueError(
            describe_newer_format(PEER, version, "a peer")
            if version > PEER_PROTOCOL_VERSION
            else f"peer protocol version {version}"
        )
    if flags & ~_FLAGS:
        raise ValueError(f"flags {flags:#06x}, of which this process knows {_FLAGS:#06x}")
    return BookieRequestHead(_OP_OF.get(op) or BookieOperation(op), _FLAGS_OF[flags], *rest)


def decode_answer(head: bytes) -> BookieAnswerHead:
    """Decodes the head of an answer and returns it. Raises ValueError if its length, version, operation or status is
    wrong."""
    if len(head) != _ANSWER.size:
        raise ValueError(f"answer head of {len(head)} bytes, not {_ANSWER.size}")
    version, op, status, *rest = _ANSWER.unpack(head)
    if version != PEER_PROTOCOL_VERSION:
        raise ValueError(
            describe_newer_format(PEER, version, "a peer")
            if version > PEER_PROTOCOL_VERSION
            else f"peer protocol version {version}"
        )
    known = STATUS_BY_NUMBER.get(status)
    return BookieAnswerHead(_OP_OF.get(op) or BookieOperation(op), Status(status) if known is None else known, *rest)


def extend_checksum_by_entry(before: bytes, header: bytes, payload_bytes: int) -> int:
    """Returns the CRC32C of some bytes followed by a stored entry, without reading the entry's payload. `before` is the
    CRC32C of these bytes. `header` is the header of the entry, which must be verified; its checksum is used instead of
    the payload. `payload_bytes`: the size of its payload."""
    # what the header's own checksum began with goes
    known = crc32c(before + header) ^ crc32c(header[:CHECKSUMMED_HEADER_BYTES])
    return combine_checksums(known, int.from_bytes(header[CHECKSUMMED_HEADER_BYTES:]), payload_bytes)


# --------------------------------------------------------------------------------------------------- held_format
# The body of the answer to HELD: which entries of a ledger a bookie holds.
#
# All integers are big-endian. The request asks about the entries `entry … entry + count - 1` of its head, at most
# ENTRIES_PER_ANSWER_MAX of them. The answer has status OK and one frame:
#
#     frame = run × count of the answer's head
#     run   = first i64 | last i64           ascending, neither empty nor touching, all within what was asked
#
# A bookie holds an entry that it could return now, by memory and index alone: quarantined entries are left out, and the
# bytes on the disk are not read. An entry that is not named is *not* certainly missing (limbo, damage), so HELD is no
# vote to end a ledger. A run that breaks these rules is a ValueError. Guards: tests/bookie/store/test_held.py.
#
# Example: entries 0 to 4 and 7 of eight: `0000000000000000 0000000000000004 0000000000000007 0000000000000007`.


ENTRIES_PER_ANSWER_MAX = 1 << 16
"""The largest number of entries that one HELD request asks about. Its answer then has half a megabyte at most."""

_RUN = struct.Struct(">qq")


def encode_stored_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    """Encodes the runs of entries (first, last) of an answer to a HELD request; both ends are included. Returns the
    bytes of the only frame."""
    return b"".join([_RUN.pack(first, last) for first, last in runs])


def decode_stored_runs(
    answer: BookieAnswerHead, frames: Sequence[Buffer], first: int, last: int
) -> list[tuple[int, int]]:
    """Decodes the answer to a HELD request. Returns (first, last) of each run of entries that the bookie has, among
    those requested (`first … last`). Raises ValueError if this is no valid answer to that request."""
    if answer.op is not BookieOperation.HELD or answer.status is not Status.OK:
        raise ValueError(f"an answer to {answer.op.name}, {answer.status.name}")
    if len(frames) != 1 or len(frames[0]) != answer.count * _RUN.size:
        raise ValueError(f"{answer.count} runs take {answer.count * _RUN.size} bytes in one frame")
    found = list(_RUN.iter_unpack(bytes(frames[0])))
    before = first - 2
    for low, high in found:
        if not before + 1 < low <= high <= last:
            raise ValueError(f"a run from {low} to {high} of entries {first} to {last}")
        before = high
    return found


ADDS_PER_REQUEST_MAX = 4096
"""The largest number of entries in one ADD_MANY request. Its table then has 160 KiB."""

RUN_BYTES_MAX = 1 << 20
"""A frame with several payloads ends when it has reached this size in bytes."""

JOINED_BYTES_MAX = 32 << 10
"""The largest payload, in bytes, that shares a frame with others. Copying it costs less than one more part of a
message."""

_ROW = struct.Struct(">IqqqqI")
_SIZE = struct.Struct(">I")
assert _ROW.size == _SIZE.size + ENTRY_HEADER_STRUCT.size

EntryPieces = tuple[bytes, ...]
"""A stored entry: its 36-byte header, then its payload in one piece; an empty payload is left out."""

ReadEntryRow = tuple[int, EntryPieces, int]
"""(entry id, stored entry, size of its header and payload in bytes)."""


class VerifiedAdds(NamedTuple):
    """The result of `verify_adds`. `statuses[i]` is OK or BAD_REQUEST for entry i of the request. `entries` are the
    entries with status OK, in order; `size` is the sum of their bytes with headers, and `lac` the largest
    last-add-confirmed among them (-1: none)."""

    statuses: bytearray
    entries: list[ReadEntryRow]
    size: int  # of all of `entries`
    lac: int  # largest of `entries`


def encode_adds(sealed: Iterable[tuple[bytes, Sequence[Buffer], int]]) -> list[Buffer]:
    """Encodes the frames of an ADD_MANY request and returns them. `sealed` has for each entry its header, the frames of
    its payload, and the size of the payload in bytes."""
    rows: list[bytes] = []
    frames: list[Buffer] = [b""]
    run: list[Buffer] = []
    run_bytes = 0
    for header, parts, size in sealed:
        rows += _SIZE.pack(size), header
        if size <= JOINED_BYTES_MAX:
            run += parts
            run_bytes += size
            if run_bytes < RUN_BYTES_MAX:
                continue
        if run_bytes:
            frames.append(b"".join(run))
            run, run_bytes = [], 0
        if size > JOINED_BYTES_MAX:
            frames.append(parts[0] if len(parts) == 1 else b"".join(parts))
    if run_bytes:
        frames.append(b"".join(run))
    frames[0] = b"".join(rows)
    return frames


def verify_adds(head: BookieRequestHead, frames: Sequence[Buffer], entry_bytes_max: int) -> VerifiedAdds:
    """Decodes an ADD_MANY request and verifies every entry. Returns the status of each entry, and the good entries. An
    entry of more than `entry_bytes_max` bytes, with its header, gets BAD_REQUEST. Raises ValueError if the head has not
    1 to ADDS_PER_REQUEST_MAX entries, or the frames do not match the head."""
    count = head.count
    if not 1 <= count <= ADDS_PER_REQUEST_MAX:
        raise ValueError(f"{count} entries in one request; 1 to {ADDS_PER_REQUEST_MAX} are allowed")
    if not frames or len(frames[0]) != count * _ROW.size:
        raise ValueError(f"{count} entries need a table of {count * _ROW.size} bytes in the first frame")
    table = bytes(frames[0])
    if _ROW.unpack_from(table)[2] != head.entry:
        raise ValueError(f"the first entry is not {head.entry}, as the head says")
    statuses, entries, total, largest = bytearray(count), list[ReadEntryRow](), 0, -1
    want, at, end, following = head.ledger, 0, 0, 1
    frame: Buffer = b""
    row_at = 4
    for index, (size, ledger, entry, lac, _, crc) in enumerate(_ROW.iter_unpack(table)):
        if size and at == end:
            if following == len(frames):
                raise ValueError("frames are missing")
            frame = frames[following]
            at, end, following = 0, len(frame), following + 1
        if at + size > end:
            raise ValueError(f"payload {index} reaches {at + size - end} bytes beyond its frame")
        header = table[row_at : row_at + 36]
        row_at += 40
        payload = frame[at : at + size]
        if type(payload) is not bytes:
            payload = bytes(payload)
        at += size
        if (
            ledger != want
            or not -1 <= lac < entry
            or ledger < 0
            or size + 36 > entry_bytes_max
            or crc32c(payload, crc32c(header[:CHECKSUMMED_HEADER_BYTES])) != crc
        ):
            statuses[index] = Status.BAD_REQUEST
            continue
        size += 36
        entries.append((entry, (header, payload) if payload else (header,), size))
        total += size
        if lac > largest:
            largest = lac
    if at != end or following != len(frames):
        raise ValueError("the frames are longer than the table")
    return VerifiedAdds(statuses, entries, total, largest)


def verify_add(
    ledger: int, entry: int, frames: Sequence[Buffer], entry_bytes_max: int
) -> tuple[ReadEntryRow, int] | None:
    """Decodes and verifies an ADD request, whose joined frames are the stored entry. Returns (entry, last-add-confirmed
    in its header). Returns None if the ids, the checksum or the size is wrong; the size with the header is at most
    `entry_bytes_max`."""
    size = 0
    for frame in frames:
        size += len(frame)
    if not ENTRY_HEADER_STRUCT.size <= size <= entry_bytes_max or ledger < 0:
        return None
    if len(frames[0]) == ENTRY_HEADER_STRUCT.size:  # as the ledger library sends it
        header, rest = bytes(frames[0]), frames[1:]
        payload = bytes(rest[0]) if len(rest) == 1 else b"".join(rest)
    else:
        whole = b"".join(frames)
        header, payload = whole[: ENTRY_HEADER_STRUCT.size], whole[ENTRY_HEADER_STRUCT.size :]
    of_ledger, id_, lac, _, crc = ENTRY_HEADER_STRUCT.unpack(header)
    if of_ledger != ledger or id_ != entry or not -1 <= lac < entry:
        return None
    if crc32c(payload, crc32c(header[:CHECKSUMMED_HEADER_BYTES])) != crc:
        return None
    return (entry, (header, payload) if payload else (header,), size), lac


def encode_add_statuses(ledger: int, entry: int, statuses: bytes | bytearray) -> tuple[bytes, tuple[bytes]]:
    """Encodes the answer to an ADD_MANY request, with one status for each entry. Returns (head, frames). `ledger` and
    `entry` are those of the request."""
    return BookieAnswerHead(BookieOperation.ADD_MANY, Status.OK, ledger, entry, -1, len(statuses)).encode(), (
        bytes(statuses),
    )


def decode_add_statuses(answer: BookieAnswerHead, frames: Sequence[Buffer], count: int) -> list[Status]:
    """Decodes the answer to an ADD_MANY request with `count` entries. Returns the status of each entry: the status in
    the head for all of them, unless that is OK. Raises ValueError if this is no valid answer to that request."""
    if answer.op is not BookieOperation.ADD_MANY:
        raise ValueError(f"an answer to {answer.op.name}")
    if answer.status is not Status.OK:
        return [answer.status] * count
    if answer.count != count or len(frames) != 1 or len(frames[0]) != count:
        raise ValueError(f"an answer for {answer.count} entries, not {count}")
    statuses = bytes(frames[0])
    return [_STATUSES[status] for status in statuses] if any(statuses) else [Status.OK] * count


class _Statuses(dict[int, Status]):
    def __missing__(self, value: int) -> Status:
        raise ValueError(f"{value} is no status")


_STATUSES = _Statuses({int(status): status for status in Status})
