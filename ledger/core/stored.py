"""The stored entry: sealed by its writer, opened and verified by its reader (ledger/format/peer.py).

    stored entry = ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32 | payload

The checksum covers the four integers and the payload. A reader checks it *and* that ledger and entry are the ones it
asked for (ledger protocol §1.10): a bookie may answer with another entry. The bytes of one
entry may differ between replicas (recovery writes it again with another LAC); the payload may not.
Guards: tests/ledger/core/test_reader_core.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ...proto.checksum import JOINED_BYTES_MIN, crc32c, joined
from ...runtime.files import Buffer
from ..format.peer import ENTRY_HEADER
from .pending import PendingAdd

_FACTS = struct.Struct(">qqqq")
_CRC = struct.Struct(">I")


class StoredCopy(NamedTuple):
    """A verified entry: id, the LAC in its header, `length` (the ledger's payload bytes up to and with it), payload."""

    entry: int
    lac: int
    length: int
    payload: bytes


class Tail(NamedTuple):
    """The last `size` bytes of a payload in one piece, whose CRC32C is known: they were verified."""

    checksum: int
    size: int


class Payload(PendingAdd):
    """An entry from the append to its outcome: its `frames`, which never change, and their `size` in bytes.
    `tail`: what is known of a payload in one frame. `header`: of the stored entry, empty until it is sealed."""

    __slots__ = ("frames", "header", "size", "tail")

    def __init__(self, frames: tuple[Buffer, ...], size: int, tail: Tail | None = None) -> None:
        self.frames = frames
        self.size = size
        self.tail = tail
        self.header = b""


def seal(
    ledger: int, entry: int, lac: int, length: int, frames: Sequence[Buffer], tail: Tail | None = None
) -> bytes:
    """The 36-byte header of the payload `frames`, which are not copied. A long `tail` is not read."""
    facts = _FACTS.pack(ledger, entry, lac, length)
    if tail is not None and tail.size >= JOINED_BYTES_MIN:
        [payload] = frames
        return facts + _CRC.pack(joined(crc32c(facts + payload[: -tail.size]), *tail))
    crc = crc32c(facts)
    for frame in frames:
        crc = crc32c(frame, crc)
    return facts + _CRC.pack(crc)


def unseal(stored: Buffer, ledger: int, entry: int) -> StoredCopy | None:
    """The entry, or None when the bytes are damaged or another entry's: then they are no answer at all."""
    if len(stored) < ENTRY_HEADER.size:
        return None
    found_ledger, found_entry, lac, length, crc = ENTRY_HEADER.unpack_from(stored)
    if found_ledger != ledger or found_entry != entry:
        return None
    payload = bytes(stored[ENTRY_HEADER.size :])
    if crc32c(payload, crc32c(_FACTS.pack(ledger, entry, lac, length))) != crc:
        return None
    return StoredCopy(entry, lac, length, payload)
