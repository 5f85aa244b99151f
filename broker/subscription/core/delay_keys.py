"""The parts of a bucket of delayed entries: keys, in order of time, in segments.
    key      time in ms (8 bytes) | ledger (8) | entry (4), big-endian: they sort as bytes, as numbers and by time
    segment  SEGMENT_ENTRIES keys at most, one entry of the bucket's ledger; its *places* are the same without times
    draft    a bucket that is to be written (broker/subscription/format/delays.py)
Guarding tests: tests/broker/subscription/core/test_delays_core.py,
tests/broker/subscription/format/test_delays_format.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.names import Position

KEY_BYTES = 20
SEGMENT_ENTRIES = 2000
"""Keys of one read: 40 KB, a fifth of a second at 10,000 a second."""
TIME = 96
"""Bits of a key after its time."""
NEVER = 1 << 200
"""Greater than every key."""

_ENTRY_MASK = (1 << 32) - 1
_LEDGER_MASK = (1 << 64) - 1
_NOTHING = BitMap()


class DelaySegment(NamedTuple):
    """A stretch of time of a bucket."""

    first_ms: int
    last_ms: int
    keys: int
    places: bytes  # which positions: `pack_places`


class Draft(NamedTuple):
    """A bucket to be written: the keys of each segment, and their rows in the bucket's directory."""

    bodies: list[bytes]
    segments: list[DelaySegment]


class Keys(msgspec.Struct, eq=False):
    """Keys in order, as bytes; those before `offset` are given up."""

    body: bytes
    offset: int = 0

    @property
    def head(self) -> int:
        """The current key; NEVER at the end."""
        if self.offset >= len(self.body):
            return NEVER
        return int.from_bytes(self.body[self.offset : self.offset + KEY_BYTES])

    def advance(self) -> int:
        """Moves to the next key, and returns it."""
        self.offset += KEY_BYTES
        return self.head

    @property
    def left(self) -> int:
        """Returns how many keys are left."""
        return (len(self.body) - self.offset) // KEY_BYTES

    def rest(self) -> list[int]:
        """Returns all keys that are left."""
        body = self.body
        return [int.from_bytes(body[at : at + KEY_BYTES]) for at in range(self.offset, len(body), KEY_BYTES)]


def key_of(position: Position, at_ms: int) -> int:
    return max(at_ms, 0) << TIME | position[0] << 32 | position[1]


def position_of(key: int) -> Position:
    return Position(key >> 32 & _LEDGER_MASK, key & _ENTRY_MASK)


def drafted(keys: Sequence[int], held: Mapping[int, BitMap]) -> Draft:
    """Makes a draft of ascending keys, each once, those alone whose entries are held."""
    bodies, segments, last = [], [], NEVER
    for start in range(0, len(keys), SEGMENT_ENTRIES):
        part = keys[start : start + SEGMENT_ENTRIES]
        entries = _entries_of(part)
        whole = sum(map(len, entries.values())) == len(part) and part[0] != last
        if not whole or any(not each <= held.get(ledger_id, _NOTHING) for ledger_id, each in entries.items()):
            return drafted([key for key in dict.fromkeys(keys) if _is_held(position_of(key), held)], held)
        last = part[-1]
        bodies.append(b"".join([key.to_bytes(KEY_BYTES) for key in part]))
        segments.append(DelaySegment(part[0] >> TIME, last >> TIME, len(part), pack_places(entries)))
    return Draft(bodies, segments)


def _is_held(position: Position, held: Mapping[int, BitMap]) -> bool:
    return position[1] in held.get(position[0], _NOTHING)


def _entries_of(keys: Sequence[int]) -> dict[int, BitMap]:
    entries: dict[int, list[int]] = {}
    for key in keys:
        entries.setdefault(key >> 32 & _LEDGER_MASK, []).append(key & _ENTRY_MASK)
    return {ledger_id: BitMap(each) for ledger_id, each in entries.items()}


def pack_places(entries: Mapping[int, BitMap]) -> bytes:
    """Encodes ( ledger i64 | size u32 | the entries as a portable roaring bitmap )*."""
    parts: list[bytes] = []
    for ledger_id in sorted(entries):
        bitmap = entries[ledger_id]
        bitmap.run_optimize()
        bits = bitmap.serialize()
        parts += (ledger_id.to_bytes(8), len(bits).to_bytes(4), bits)
    return b"".join(parts)


def unpack_places(places: bytes) -> list[tuple[int, BitMap]]:
    """The inverse of `pack_places`. ValueError."""
    result, offset = [], 0
    while offset < len(places):
        ledger_id, size = int.from_bytes(places[offset : offset + 8]), int.from_bytes(places[offset + 8 : offset + 12])
        offset += 12
        if not 0 < size <= len(places) - offset:
            raise ValueError(f"{size} bytes of a bitmap at {offset} of {len(places)}")
        result.append((ledger_id, BitMap.deserialize(places[offset : offset + size])))
        offset += size
    return result
