"""The place of a cursor that starts at, or is moved to, a message."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.errors import Unavailable
from ...proto.names import LATEST, MessageId, Position
from ..log.core.log_shape import LogShape
from ..log.log import ReadableLog
from ..subscription.whole_messages import message_of


def mark_of(shape: LogShape, start: MessageId, inclusive: bool, *, last_again: bool = False) -> tuple[Position, int]:
    """Returns (mark, messages of the entry after it that are done) of a cursor that starts at, or just after, a
    message.

    `latest` is the end of the topic: the next message that is published is delivered first. Only a reader that is
    opened at `latest`, inclusive, begins with the last entry (`last_again`, Pulsar R1); a seek or a reset never does.
    """
    position = start.position
    if position >= LATEST:
        return (shape.before(shape.last) if last_again and shape.last.entry_id >= 0 else shape.last), 0
    if position.entry_id < 0:
        return shape.clamp(position), 0
    if start.batch_index >= 0:
        done = start.batch_index + (0 if inclusive else 1)
        return shape.clamp(shape.before(position)), done if shape.readable(position) else 0
    return shape.clamp(shape.before(position) if inclusive else position), 0


async def last_message(log: ReadableLog) -> tuple[Position, int, Sequence[Position]]:
    """Returns (mark, messages of the entry after it that are done, entries after it that are done) of a reader that is
    opened at `latest`, inclusive: the last message of a batch, all chunks of a message, and nothing else is delivered
    again."""
    shape = log.shape
    last = shape.last_there
    if last.entry_id < 0:
        return last, 0, ()
    entry = await log.reader.entry(last)
    mark = shape.before(last)
    if not entry.chunk_of:
        return mark, entry.count - 1, ()
    try:
        message = await message_of(log, entry, shape.before(shape.start), log.world.clock.wall_ms())
    except Unavailable:
        message = None  # its last chunk is not here yet
    if message is None:
        return mark, 0, ()
    mark, others = shape.before(message.places[0]), list[Position]()
    position = shape.after(mark)
    while position < last:
        others += [] if position in message.places else [position]
        position = shape.after(position)
    return mark, 0, others


async def place_of(log: ReadableLog, start: MessageId, inclusive: bool) -> tuple[Position, int]:
    """Returns the mark of a cursor that starts there, and how many messages of the next entry are done: never more than
    it has, for it is read when some of them are done."""
    shape = log.shape
    mark, done = mark_of(shape, start, inclusive)
    if not done or shape.hole(start.position) is not None:
        return mark, 0
    position = start.position
    found = log.reader.cached(position, 1, 1) or await log.reader.read(position, 1)
    if not found or found[0].position != position:
        return mark, 0  # compaction removed it
    return (mark, done) if done < found[0].count else (shape.clamp(position), 0)
