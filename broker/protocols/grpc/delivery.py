"""Entries as the bytes of a stream's items, in pieces: an entry itself is not copied.

ServerFrame.delivery (field 7) and ReadReply.entry (field 2) are a Delivery, whose last field (5) is the entry;
ServerFrame.deliveries is field 8, with ledger (20), entry ids (21) and entries (22): what is delivered for the first
time and whole goes that way, so many at once, because an item costs both ends more than a small entry. Protobuf would
copy an entry three times on the way (into its message, into the reply, into the item); here the reply is written around
the entries' frames, and the stream joins what is short. tests/broker/protocols/grpc/test_delivery.py compares it with
protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....proto import wire_pb2 as wire
from ....proto.varint import varint
from ....runtime.files import Buffer
from ....runtime.network import Pieces
from ...log.cache import StoredEntry
from ...subscription.core.deliveries import Delivery

ITEM_BYTES_MAX = 256 << 10
"""Bytes: an item with several entries ends after the one that reaches this."""

_READ_ENTRY = b"\x12"  # tag of a length-delimited field 2

_FRAME_DELIVERY, _FRAME_DELIVERIES = b"\x3a", b"\x42"  # … 7 and 8
_FIELD_5 = b"\x2a"
_FIELD_1_INT, _FIELD_2_INT = b"\x08", b"\x10"
_FIELD_2, _FIELD_3 = b"\x12", b"\x1a"


def delivery_items(deliveries: Sequence[Delivery], head: bytes) -> list[Pieces]:
    """Returns ServerFrames with all deliveries, in order; `head` are the bytes of their id."""
    items: list[Pieces] = []
    run: list[StoredEntry] = []
    ledger_id, size = -1, 0
    for _, entry, count, acked in deliveries:
        assert isinstance(entry, StoredEntry)
        whole = not (count or acked)
        if run and (not whole or entry.position[0] != ledger_id or size >= ITEM_BYTES_MAX):
            items.append(_together(ledger_id, run, head))
            run, size = [], 0
        if whole:
            run.append(entry)
            ledger_id = entry.position[0]
            size += entry.size
        else:
            items.append((head, *_parts(entry, count, acked, _FRAME_DELIVERY)))
    if len(run) == 1:
        items.append((head, *_parts(run[0], 0, None, _FRAME_DELIVERY)))
    elif run:
        items.append(_together(ledger_id, run, head))
    return items


def _together(ledger_id: int, entries: list[StoredEntry], head: bytes) -> Pieces:
    """A ServerFrame with these entries of one ledger."""
    if len(entries) == 1:
        return (head, *_parts(entries[0], 0, None, _FRAME_DELIVERY))
    parts: list[Buffer] = []
    ids, bodies = bytearray(), 0
    for entry in entries:
        prefix = _entry_prefix(entry.size)
        ids += varint(entry.position[1])
        parts.append(prefix)
        parts += entry.frames
        bodies += len(prefix) + entry.size
    ledger = _FIELD_1_INT + varint(ledger_id) if ledger_id else b""
    numbers = b"".join((ledger, _FIELD_2, varint(len(ids)), ids))
    return (head, _FRAME_DELIVERIES, varint(len(numbers) + bodies), numbers, *parts)


def _entry_prefix(size: int) -> bytes:
    return _PREFIXES[size] if size < SHORT else _FIELD_3 + varint(size)


def read_item(request_id: int, entry: StoredEntry) -> Pieces:
    """A ReadReply with this entry."""
    return (wire.ReadReply(request_id=request_id).SerializeToString(), *_parts(entry, 0, None, _READ_ENTRY))


def _parts(
    entry: StoredEntry, redelivery_count: int, acked_indexes: list[int] | None, tag: bytes
) -> tuple[Buffer, ...]:
    ledger_id, entry_id = entry.position
    if redelivery_count or acked_indexes or not entry_id:
        head = wire.Delivery(
            ledger_id=ledger_id, entry_id=entry_id, redelivery_count=redelivery_count, acked_batch_indexes=acked_indexes
        ).SerializeToString()
    else:
        ledger = _VARINTS[ledger_id] if ledger_id < SHORT else varint(ledger_id)
        head = _FIELD_1_INT + ledger + _FIELD_2_INT + (_VARINTS[entry_id] if entry_id < SHORT else varint(entry_id))
    size = _VARINTS[entry.size] if entry.size < SHORT else varint(entry.size)
    whole = len(head) + 1 + len(size) + entry.size
    return (tag, _VARINTS[whole] if whole < SHORT else varint(whole), head, _FIELD_5, size, *entry.frames)


SHORT = 4096
"""Number below which the prefixes are made ahead: most entries are shorter."""
_VARINTS = [varint(size) for size in range(SHORT)]
_PREFIXES = [_FIELD_3 + size for size in _VARINTS]
"""Tag and length of an entry in `deliveries`."""
