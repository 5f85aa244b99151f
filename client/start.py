"""Where delivery begins: at a message or behind it, inside an entry too."""

from __future__ import annotations

from ..proto.names import Position
from .message_id import MessageId


class Start:
    """Where delivery begins, inside an entry too. A reader's survives reconnects; a consumer's seek does once."""

    __slots__ = ("id", "inclusive")

    def __init__(self, id: MessageId, inclusive: bool) -> None:
        self.id = id
        self.inclusive = inclusive

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
