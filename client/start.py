"""Where delivery begins: at a message or behind it, inside an entry too."""

from __future__ import annotations

from ..proto.names import Position
from .message_id import MessageId


class Start:
    """Where delivery begins, inside an entry too. A reader's survives reconnects; a consumer's seek does once."""

    __slots__ = ("begun", "id", "inclusive")

    def __init__(self, id: MessageId, inclusive: bool, begun: Position | None = None) -> None:
        """At a message in chunks it is its first one; behind it, its last. `begun`: where the first message in chunks
        begins that a reader has not read, if that is in front of `id`: of what lies there chunks are wanted."""
        self.id = (id.first_chunk_message_id() or id) if inclusive else id
        self.inclusive = inclusive
        self.begun = begun if begun is not None and begun < id.position() else None

    def wants_chunk(self, position: Position) -> bool:
        return not self.before(position, 0) or (self.begun is not None and position >= self.begun)

    def before(self, position: Position, index: int) -> bool:
        """Whether that message lies before the start. A start without a batch index means its whole entry."""
        start = self.id
        here = (position.ledger_id, position.entry_id)
        there = (start.ledger_id(), start.entry_id())
        if here != there:
            return here < there and start != MessageId.latest
        if start.batch_index() < 0:
            return not self.inclusive
        return index < start.batch_index() or (index == start.batch_index() and not self.inclusive)
