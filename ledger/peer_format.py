"""The peer protocol of brokers and bookies: the `head` of a request and of its answer.

All integers are big-endian. The payload of ADD, and of READ answers, travels in the frames beside the head, as stored:

    stored entry = ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32 | payload
                   the checksum covers the four integers and the payload; `length` is the ledger's bytes up to and
                   including this entry. 36 bytes in front of the payload (`ENTRY_HEADER`).

    request head = version u8 (1) | op u8 | flags u16 | ledger i64 | entry i64 | count u32 | bytes_max u32
                   | key 20 bytes
    answer head  = version u8 (1) | op u8 | status u16 | ledger i64 | entry i64 | lac i64 | count u32

| op | frames of the request | answer |
|---|---|---|
| ADD | one stored entry, in one or more frames (joined they are it) | OK after the journal's sync |
| ADD_MANY | `count` stored entries (adds_format.py) | OK and a status for each, after the journal's sync |
| READ | – | OK: frames are stored entries `entry`, `entry+1`, … (at most `count`, about `bytes_max`), at least one; |
|      |   | else NO_SUCH_ENTRY, NO_SUCH_LEDGER, UNKNOWN |
| READ_LAC | – | OK: `lac` = the largest LAC known for the ledger, `entry` = the largest entry stored (-1: none); |
| WRITE_LAC | – | OK: `entry` of the request is the new explicit LAC |
| HELD | – | OK and one frame: which of the entries `entry … entry + count - 1` are held (peer_format.py) |
| PING | – | OK |
| ADMIN | one frame: a JSON object of at most ADMIN_BYTES_MAX | OK and one frame: a JSON object; BAD_REQUEST for all |
|       |   | else; BUSY: too many at once; UNKNOWN: the verb failed, the bookie's log says why |

A verified entry says the checksum of its payload, so `extend_checksum` knows that of any record around it.

Flags: FENCE (with READ, READ_LAC): no add without RECOVERY is accepted for the ledger after this, ever; the fence is
synced before *any* answer, also NO_SUCH_ENTRY. RECOVERY (with ADD, ADD_MANY): accepted although fenced.
Every answer to READ carries the ledger's LAC as well (-1 when unknown). `key` is the ledger's master key: 20 bytes,
compared in constant time by every operation except PING and ADMIN (whose key is zeros), never logged. UNAUTHORIZED:
another key, or an id that the metadata does not know (bookie/newcomers.py).
A decoder raises ValueError unless the size is exact.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..proto.checksum import combine_checksums, crc32c
from ..proto.versions import PEER, newer_format_text
from ..runtime.files import Buffer

VERSION = PEER.version
ENTRY_HEADER = struct.Struct(">qqqqI")
ENTRY_LAC = struct.Struct(">16xq")
"""Reads only the LAC from an entry's header."""
CHECKED_BYTES = ENTRY_HEADER.size - 4
"""Bytes of the header that its checksum covers."""
_REQUEST = struct.Struct(">BBHqqII20s")
_ANSWER = struct.Struct(">BBHqqqI")
ANSWER_BYTES = _ANSWER.size
KEY_BYTES = 20
NO_KEY = bytes(KEY_BYTES)
ADMIN_BYTES_MAX = 64 << 10
"""Most bytes of the JSON of an ADMIN request; a verb and its options have some hundred bytes."""


class Op(enum.IntEnum):
    """Operations of a peer request; the table above has their frames and answers."""

    ADD = 1
    READ = 2
    READ_LAC = 3
    WRITE_LAC = 4
    PING = 5
    ADMIN = 6
    ADD_MANY = 7
    HELD = 8


class Flags(enum.IntFlag):
    """Flags of a request head. FENCE: with READ and READ_LAC. RECOVERY: with ADD and ADD_MANY."""

    NONE = 0
    FENCE = 1
    RECOVERY = 2


_FLAGS = int(Flags.FENCE | Flags.RECOVERY)
_FLAGS_OF = tuple(Flags(value) for value in range(_FLAGS + 1))
FENCING = tuple(each for each in _FLAGS_OF if Flags.FENCE in each)
RECOVERING = tuple(each for each in _FLAGS_OF if Flags.RECOVERY in each)
"""For `flags in FENCING`: that is a comparison or two, while an operator of a Flag is several calls."""
_OP_OF = {int(op): op for op in Op}
_ADD = int(Op.ADD)
_ADD_HEAD = struct.pack(">BBH", VERSION, _ADD, 0)
ADDED = _ADD_HEAD
"""The first bytes of the head of most answers: OK to an ADD."""
_ADD_MANY = int(Op.ADD_MANY)


class Status(enum.IntEnum):
    """Result of a request. Only NO_SUCH_LEDGER and NO_SUCH_ENTRY are votes that an entry does not exist."""

    OK = 0
    NO_SUCH_LEDGER = 1
    NO_SUCH_ENTRY = 2
    UNKNOWN = 3  # limbo, damage, I/O error: not a vote
    FENCED = 4
    UNAUTHORIZED = 5
    READ_ONLY = 6
    BAD_REQUEST = 7
    BUSY = 8  # a bounded queue is full; nothing was done


STATUS_OF = {int(status): status for status in Status}
"""Status by its number: for every add, a dictionary is several times as fast as calling the Enum."""


class RequestHead(NamedTuple):
    """Head of a request. `count` is entries, `bytes_max` the payload bytes of an answer to READ, `key` 20 bytes.

    Fields that an operation does not use are 0; `ledger` and `entry` are then -1.
    """

    op: Op
    flags: Flags
    ledger: int
    entry: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    bytes_max: int
    key: bytes

    def encode(self) -> bytes:
        return _REQUEST.pack(VERSION, self.op, self.flags, *self[2:])

    def __repr__(self) -> str:
        """Leaves the key out, because a repr may reach a log."""
        return f"RequestHead({self.op!r}, {self.flags!r}, ledger={self.ledger}, entry={self.entry}, count={self.count})"


class AnswerHead(NamedTuple):
    """Head of an answer. `lac` is -1 when unknown; `count` is entries, or runs of HELD."""

    op: Op
    status: Status
    ledger: int
    entry: int
    lac: int
    count: int  # type: ignore[assignment]  # tuple.count is not used

    def encode(self) -> bytes:
        return _ANSWER.pack(VERSION, *self)


def encode_add(ledger: int, entry: int, key: bytes, flags: Flags = Flags.NONE) -> bytes:
    """Encodes `RequestHead(Op.ADD, …)` for the hot path: the same bytes as its `encode` at a fifth of the cost."""
    return _REQUEST.pack(VERSION, _ADD, flags, ledger, entry, 0, 0, key)


pack_add = partial(_REQUEST.pack, VERSION, _ADD, int(Flags.NONE))
"""Called with (ledger, entry, 0, 0, key): the same as `encode_add` without flags, with one call less per add."""
pack_added = partial(_ANSWER.pack, VERSION, _ADD, int(Status.OK))
"""Called with (ledger, entry, -1, 0): the same as `AnswerHead(Op.ADD, Status.OK, …).encode()`, with fewer calls."""


def encode_add_many(ledger: int, entry: int, count: int, key: bytes, flags: Flags = Flags.NONE) -> bytes:
    """Encodes the head of an ADD_MANY with `count` entries; `entry` is the id of the first one."""
    return _REQUEST.pack(VERSION, _ADD_MANY, flags, ledger, entry, count, 0, key)


def encode_admin() -> bytes:
    """Encodes the head of an ADMIN request, whose frame is the JSON."""
    return RequestHead(Op.ADMIN, Flags.NONE, -1, -1, 0, 0, NO_KEY).encode()


def encode_ping() -> bytes:
    return RequestHead(Op.PING, Flags.NONE, -1, -1, 0, 0, NO_KEY).encode()


def parse_plain_add(head: bytes) -> tuple[int, int, bytes] | None:
    """Returns (ledger, entry, key) if the head is that of an ADD without flags, as most requests are; else None."""
    if len(head) != _REQUEST.size or not head.startswith(_ADD_HEAD):
        return None
    _, _, _, ledger, entry, _, _, key = _REQUEST.unpack(head)
    return ledger, entry, key


def decode_request(head: bytes) -> RequestHead:
    if len(head) != _REQUEST.size:
        raise ValueError(f"request head of {len(head)} bytes, not {_REQUEST.size}")
    version, op, flags, *rest = _REQUEST.unpack(head)
    if version != VERSION:
        raise ValueError(
            newer_format_text(PEER, version, "a peer") if version > VERSION else f"peer protocol version {version}"
        )
    if flags & ~_FLAGS:
        raise ValueError(f"flags {flags:#06x}, of which this process knows {_FLAGS:#06x}")
    return RequestHead(_OP_OF.get(op) or Op(op), _FLAGS_OF[flags], *rest)


def decode_answer(head: bytes) -> AnswerHead:
    if len(head) != _ANSWER.size:
        raise ValueError(f"answer head of {len(head)} bytes, not {_ANSWER.size}")
    version, op, status, *rest = _ANSWER.unpack(head)
    if version != VERSION:
        raise ValueError(
            newer_format_text(PEER, version, "a peer") if version > VERSION else f"peer protocol version {version}"
        )
    known = STATUS_OF.get(status)
    return AnswerHead(_OP_OF.get(op) or Op(op), Status(status) if known is None else known, *rest)


def extend_checksum(before: bytes, header: bytes, payload_bytes: int) -> int:
    """Returns the CRC32C of `before` followed by a stored entry with this header, which must be verified; computed from
    the header's checksum, without reading the payload."""
    known = crc32c(before + header) ^ crc32c(header[:CHECKED_BYTES])  # what the header's own checksum began with goes
    return combine_checksums(known, int.from_bytes(header[CHECKED_BYTES:]), payload_bytes)


# --------------------------------------------------------------------------------------------------- held_format
# The body of the answer to HELD: which entries of a ledger a bookie holds (head: peer_format.py).
#
# All integers are big-endian. The request asks about the entries `entry … entry + count - 1` of its head, at most
# ENTRIES_MAX of them. The answer has status OK and one frame:
#
#     frame = run × count of the answer's head
#     run   = first i64 | last i64           ascending, neither empty nor touching, all within what was asked
#
# A bookie holds an entry that it could return now, by memory and index alone: quarantined entries are left out, and the
# bytes on the disk are not read. An entry that is not named is *not* certainly missing (limbo, damage), so HELD is no
# vote to end a ledger. A run that breaks these rules is a ValueError. Guards: tests/bookie/store/test_held.py.
#
# Example: entries 0 to 4 and 7 of eight: `0000000000000000 0000000000000004 0000000000000007 0000000000000007`.


ENTRIES_MAX = 1 << 16
"""Most entries that one HELD asks about: the answer has half a megabyte at most."""

_RUN = struct.Struct(">qq")


def encode_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    return b"".join([_RUN.pack(first, last) for first, last in runs])


def decode_held(answer: AnswerHead, frames: Sequence[Buffer], first: int, last: int) -> list[tuple[int, int]]:
    """Returns the runs of entries that the bookie has, (first, last), within `first … last`. Raises ValueError if this
    is not the answer to that request."""
    if answer.op is not Op.HELD or answer.status is not Status.OK:
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
