"""The place where delivery begins: at a message or after it, inside an entry too.

A reader keeps its `Start` itself and leaves out what is before it. The cursor of a subscription that lasts belongs to
the broker, and others may move it: a seek names the first message that is wanted (`at_message`), and what the broker
then delivers is all shown.
"""

from __future__ import annotations

from ...proto.names import Position
from .message_id import MessageId

BATCH_INDEX_MAX = 2**31 - 1
"""Largest batch index: Pulsar's is an int32."""


class Start:
    """The start of a reader; it survives reconnects."""

    __slots__ = ("begun", "id", "inclusive")

    def __init__(self, id: MessageId, inclusive: bool, begun: Position | None = None) -> None:
        """Makes a start. At a message in chunks it is its first one; after it, its last. `begun`: where the first
        message in chunks begins that a reader has not read, if that is in front of `id`: of that part, chunks are
        wanted."""
        self.id = (id.first_chunk_message_id() or id) if inclusive else id
        self.inclusive = inclusive
        self.begun = begun if begun is not None and begun < id.position() else None

    def wants_chunk(self, position: Position) -> bool:
        return not self.before(position, 0) or (self.begun is not None and position >= self.begun)

    def before(self, position: Position, index: int) -> bool:
        """Whether that message is before the start. A start without a batch index means its whole entry."""
        start = self.id
        here = (position.ledger_id, position.entry_id)
        there = (start.ledger_id(), start.entry_id())
        if here != there:
            return here < there and start != MessageId.latest
        if start.batch_index() < 0:
            return not self.inclusive
        return index < start.batch_index() or (index == start.batch_index() and not self.inclusive)


def at_message(place: MessageId, *, inclusive: bool) -> MessageId:
    """The first message that is wanted, to begin with it: `place` itself, of one in chunks its first chunk; or, not
    inclusive, what follows. Without a batch index the whole entry is meant.
    """
    if place in (MessageId.earliest, MessageId.latest):
        return place
    if inclusive:
        return place.first_chunk_message_id() or place
    following = place.batch_index() + 1
    if place.batch_index() < 0 or following == place.batch_size() or following > BATCH_INDEX_MAX:
        return MessageId(place.partition(), place.ledger_id(), place.entry_id() + 1)
    return MessageId(place.partition(), place.ledger_id(), place.entry_id(), following)
