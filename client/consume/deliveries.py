"""A delivered entry, taken apart: its messages without those that were acknowledged or lie before the start."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.entry import decode_columns, open_entry
from ...proto.entry_pb2 import SingleMessageMetadata
from ...proto.names import Position
from ..model.message import Message, Origin, ReceivedEntry
from ..model.start import Start


def messages_of(
    lane: Origin, entry: bytes, position: Position, start: Start | None, redelivered: int = 0, acked: Sequence[int] = ()
) -> tuple[ReceivedEntry, list[Message] | None]:
    """The entry and those of its messages that the application wants; None: a chunk. Raises CorruptEntry."""
    index, header = open_entry(entry)
    received = ReceivedEntry(lane, header, position, index, redelivered)
    if acked:
        received.charged -= len(acked)
    if header.metadata.num_chunks_from_msg > 1:
        return received, None
    fields, payloads = decode_columns(header, entry)
    if header.batched:
        messages = [Message(received, fields[at], payload, at) for at, payload in enumerate(payloads)]
    else:
        messages = [Message(received, fields[0], payloads[0], -1)]
    if acked:
        gone = frozenset(acked)
        messages = [message for message in messages if message.batch_index not in gone]
    if start is not None and position <= start.id.position():
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
    """All that was charged is free when the last message is taken; `of_each`: each message tells of itself."""
    wanted[-1].permits = received.charged
    if of_each:
        for message in wanted[:-1]:
            message.permits = 1
        wanted[-1].permits = 1 + received.charged - len(wanted)
