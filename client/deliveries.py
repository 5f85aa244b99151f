"""A delivered entry, taken apart: its messages without those that were acknowledged or lie before the start."""

from __future__ import annotations

from ..proto import wire_pb2 as wire
from ..proto.entry import decode_batch, parse_header, split_broker_part
from ..proto.entry_pb2 import SingleMessageMetadata
from .message import Message, Origin, ReceivedEntry
from .start import Start


def messages_of(
    lane: Origin, delivery: wire.Delivery, start: Start | None
) -> tuple[ReceivedEntry, list[Message] | None]:
    """The entry and those of its messages that the application wants; None: a chunk. Raises CorruptEntry."""
    entry = delivery.entry
    index = split_broker_part(entry)[0]
    header = parse_header(entry)
    received = ReceivedEntry(lane, header, delivery.ledger_id, delivery.entry_id, index, delivery.redelivery_count)
    if header.metadata.num_chunks_from_msg > 1:
        return received, None
    items = decode_batch(header, entry)
    if header.batched:
        messages = [Message(received, item[0], item[1], at) for at, item in enumerate(items)]
    else:
        messages = [Message(received, items[0][0], items[0][1], -1)]
    if delivery.acked_batch_indexes:
        gone = frozenset(delivery.acked_batch_indexes)
        messages = [message for message in messages if message.batch_index not in gone]
    if start is not None and received.position <= start.id.position():
        position = received.position
        messages = [message for message in messages if not start.before(position, max(0, message.batch_index))]
    if messages:
        received.first_index = messages[0].batch_index
    return received, messages


def is_removed(message: Message) -> bool:
    """By compaction, out of a batch of which other messages are kept."""
    kept = message.entry.header.metadata.compacted_batch_indexes
    out = isinstance(message.fields, SingleMessageMetadata) and message.fields.compacted_out
    return out or (len(kept) > 0 and message.batch_index not in kept)


def share_permits(received: ReceivedEntry, wanted: list[Message], *, of_each: bool) -> None:
    """Those of the whole entry are free when its last message is taken; `of_each`: each message tells of itself."""
    wanted[-1].permits = received.size
    if of_each:
        for message in wanted[:-1]:
            message.permits = 1
        wanted[-1].permits = 1 + received.size - len(wanted)
