"""The body of ADD_MANY: many stored entries of one ledger in one peer request (head: peer_format.py), and its answer.

All integers are big-endian. `count` of the head is the number of entries, 1 to ADDS_MAX; `entry` is the first one's id.

    frame 0    = table: row × count
    row        = size u32 (of the payload) | ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32
                 what follows `size` is the entry's header as it is stored (`ENTRY_HEADER`)
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
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..proto.checksum import crc32c
from ..runtime.files import Buffer
from .peer_format import CHECKED_BYTES, ENTRY_HEADER, AnswerHead, Op, RequestHead, Status

ADDS_MAX = 4096
"""Most entries of one request: a table of 160 KiB."""

RUN_BYTES_MAX = 1 << 20
"""A frame with several payloads ends when it reaches about this size in bytes."""

JOINED_BYTES_MAX = 32 << 10
"""Largest payload, in bytes, that shares a frame with others: copying it costs less than another part of a message."""

_ROW = struct.Struct(">IqqqqI")
_SIZE = struct.Struct(">I")
assert _ROW.size == _SIZE.size + ENTRY_HEADER.size

Stored = tuple[bytes, ...]
"""A stored entry as its 36-byte header and the payload in one piece; an empty payload is left out."""

Entry = tuple[int, Stored, int]
"""(entry id, stored, size of header and payload)."""


class VerifiedAdds(NamedTuple):
    """The result of `verify_adds`: `statuses[i]` is OK or BAD_REQUEST for entry i of the request; `entries` are those
    with OK, in order."""

    statuses: bytearray
    entries: list[Entry]
    size: int  # of all of `entries`
    lac: int  # largest of `entries`


def encode_adds(sealed: Iterable[tuple[bytes, Sequence[Buffer], int]]) -> list[Buffer]:
    """Returns the frames of an ADD_MANY. `sealed` has for each entry its header, the frames of its payload, and their
    size in bytes."""
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


def verify_adds(head: RequestHead, frames: Sequence[Buffer], entry_bytes_max: int) -> VerifiedAdds:
    """Decodes an ADD_MANY and verifies every entry. Raises ValueError if frames and head do not match. A payload is
    copied at most once."""
    count = head.count
    if not 1 <= count <= ADDS_MAX:
        raise ValueError(f"{count} entries in one request; 1 to {ADDS_MAX} are allowed")
    if not frames or len(frames[0]) != count * _ROW.size:
        raise ValueError(f"{count} entries need a table of {count * _ROW.size} bytes in the first frame")
    table = bytes(frames[0])
    if _ROW.unpack_from(table)[2] != head.entry:
        raise ValueError(f"the first entry is not {head.entry}, as the head says")
    statuses, entries, total, largest = bytearray(count), list[Entry](), 0, -1
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
            or crc32c(payload, crc32c(header[:CHECKED_BYTES])) != crc
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


def verify_add(ledger: int, entry: int, frames: Sequence[Buffer], entry_bytes_max: int) -> tuple[Entry, int] | None:
    """Returns the entry of an ADD and the LAC in its header; None if anything is invalid. The joined frames are the
    stored entry."""
    size = 0
    for frame in frames:
        size += len(frame)
    if not ENTRY_HEADER.size <= size <= entry_bytes_max or ledger < 0:
        return None
    if len(frames[0]) == ENTRY_HEADER.size:  # as the ledger library sends it
        header, rest = bytes(frames[0]), frames[1:]
        payload = bytes(rest[0]) if len(rest) == 1 else b"".join(rest)
    else:
        whole = b"".join(frames)
        header, payload = whole[: ENTRY_HEADER.size], whole[ENTRY_HEADER.size :]
    of_ledger, id_, lac, _, crc = ENTRY_HEADER.unpack(header)
    if of_ledger != ledger or id_ != entry or not -1 <= lac < entry:
        return None
    if crc32c(payload, crc32c(header[:CHECKED_BYTES])) != crc:
        return None
    return (entry, (header, payload) if payload else (header,), size), lac


def encode_statuses(ledger: int, entry: int, statuses: bytes | bytearray) -> tuple[bytes, tuple[bytes]]:
    """Returns the head and the frames of the answer to a request with this `ledger` and `entry` in its head."""
    return AnswerHead(Op.ADD_MANY, Status.OK, ledger, entry, -1, len(statuses)).encode(), (bytes(statuses),)


def decode_statuses(answer: AnswerHead, frames: Sequence[Buffer], count: int) -> list[Status]:
    """Returns the status of each of the `count` entries of an ADD_MANY. Raises ValueError if `answer` does not belong
    to it."""
    if answer.op is not Op.ADD_MANY:
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
