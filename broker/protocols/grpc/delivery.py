"""Entries as the bytes of a stream's items, without a copy that can be spared.

ConsumeReply.delivery and ReadReply.entry are both field 2 with a Delivery in it, whose last field (5) is the entry;
ConsumeReply.deliveries is field 20, with ledger (20), entry ids (21) and entries (22): what is delivered for the first
time and whole goes that way, so many at once, for an item costs both ends more than a small entry. Protobuf would copy
an entry three times on the way (into its message, into the reply, into the item); here the reply is written around the
entries' frames in one join. tests/broker/protocols/grpc/test_delivery.py holds it against protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....proto import wire_pb2 as wire
from ....runtime.files import Buffer
from ...log.cache import StoredEntry
from ...subscription.core.dispatch import Delivery

ITEM_BYTES_MAX = 256 << 10
"""An item with several entries ends behind the one that reaches this."""

_FIELD_2 = b"\x12"  # tag of a length-delimited field 2
_FIELD_5 = b"\x2a"
_FIELD_1_INT, _FIELD_2_INT = b"\x08", b"\x10"
_FIELD_20_INT, _FIELD_20, _FIELD_21, _FIELD_22 = b"\xa0\x01", b"\xa2\x01", b"\xaa\x01", b"\xb2\x01"


def delivery_items(deliveries: Sequence[Delivery]) -> Iterator[bytes]:
    """ConsumeReplies with all of them, in order."""
    run: list[StoredEntry] = []
    ledger_id, size = -1, 0
    for _, entry, count, acked in deliveries:
        assert isinstance(entry, StoredEntry)
        whole = not (count or acked)
        if run and (not whole or entry.position[0] != ledger_id or size >= ITEM_BYTES_MAX):
            yield _together(ledger_id, run)
            run, size = [], 0
        if whole:
            run.append(entry)
            ledger_id = entry.position[0]
            size += entry.size
        else:
            yield delivery_item(entry, count, acked)
    if run:
        yield _together(ledger_id, run)


def _together(ledger_id: int, entries: list[StoredEntry]) -> bytes:
    """A ConsumeReply with these entries of one ledger."""
    if len(entries) == 1:
        return delivery_item(entries[0])
    parts: list[Buffer] = []
    ids, bodies = bytearray(), 0
    for entry in entries:
        prefix = _entry_prefix(entry.size)
        ids += _varint(entry.position[1])
        parts.append(prefix)
        parts += entry.frames
        bodies += len(prefix) + entry.size
    ledger = _FIELD_20_INT + _varint(ledger_id) if ledger_id else b""
    head = b"".join((ledger, _FIELD_21, _varint(len(ids)), ids))
    return b"".join((_FIELD_20, _varint(len(head) + bodies), head, *parts))


def _entry_prefix(size: int) -> bytes:
    return _PREFIXES[size] if size < len(_PREFIXES) else _FIELD_22 + _varint(size)


def delivery_item(entry: StoredEntry, redelivery_count: int = 0, acked_indexes: list[int] | None = None) -> bytes:
    """A ConsumeReply with this delivery."""
    return b"".join(_parts(entry, redelivery_count, acked_indexes))


def read_item(request_id: int, entry: StoredEntry) -> bytes:
    """A ReadReply with this entry."""
    return b"".join((wire.ReadReply(request_id=request_id).SerializeToString(), *_parts(entry, 0, None)))


def _parts(entry: StoredEntry, redelivery_count: int, acked_indexes: list[int] | None) -> tuple[Buffer, ...]:
    ledger_id, entry_id = entry.position
    if redelivery_count or acked_indexes or not entry_id:
        head = wire.Delivery(
            ledger_id=ledger_id, entry_id=entry_id, redelivery_count=redelivery_count, acked_batch_indexes=acked_indexes
        ).SerializeToString()
    else:
        head = _FIELD_1_INT + _varint(ledger_id) + _FIELD_2_INT + _varint(entry_id)
    size = _varint(entry.size)
    return (_FIELD_2, _varint(len(head) + 1 + len(size) + entry.size), head, _FIELD_5, size, *entry.frames)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_PREFIXES = [_FIELD_22 + _varint(size) for size in range(4096)]
"""Tag and length of an entry in `deliveries`: most are short."""
