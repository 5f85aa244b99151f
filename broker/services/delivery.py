"""An entry as the bytes of a stream's item, without a copy that can be spared.

ConsumeReply.delivery and ReadReply.entry are both field 2 with a Delivery in it, whose last field (5) is the entry.
Protobuf would copy an entry three times on the way (into Delivery, into the reply, into the item); here the reply is
written around the entry's frames in one join. tests/broker/test_delivery.py holds it against protobuf.
"""

from __future__ import annotations

from ...proto import wire_pb2 as wire
from ...runtime.files import Buffer
from ..cache import StoredEntry

_FIELD_2 = b"\x12"  # tag of a length-delimited field 2
_FIELD_5 = b"\x2a"
_FIELD_1_INT, _FIELD_2_INT = b"\x08", b"\x10"


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
