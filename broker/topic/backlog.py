"""The backlog of a subscription: its size, a peek at its beginning, and skipping it. For operators; nothing here is in
the path of a message. `examine.py` counts exactly, and reads for it; `size` reads nothing but the place of the mark."""

from __future__ import annotations

from ..common.turns import Turns
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..subscription.subscription import Subscription
from ..subscription.whole_messages import rest_of


async def size(log: ReadableLog, subscription: Subscription) -> int:
    """Messages. Exact at the mark, and inside batches of which some are acknowledged; a batch after it that is
    acknowledged as a whole counts as one message less.
    """
    return _size(log, subscription, await log.reader.index_after(subscription.cursor.mark))


def size_now(log: ReadableLog, subscription: Subscription) -> int | None:
    """Returns what `size` does; None when something would have to be read."""
    after = log.reader.index_now(subscription.cursor.mark)
    return None if after is None else _size(log, subscription, after)


def _size(log: ReadableLog, subscription: Subscription, after: int) -> int:
    shape, acked = log.shape, subscription.cursor.acked
    holes = sum(len(entries) for ledger_id, entries in acked.items() if shape.span(ledger_id) is not None)
    return max(0, shape.messages_from(after) - holes - subscription.cursor.partial_messages)


PEEK_BYTES_MAX = 8 << 20
"""Bytes of one peek: an answer has to fit into a gRPC message."""


async def peek(log: ReadableLog, subscription: Subscription, messages: int) -> list[StoredEntry]:
    """The next entries that are not acknowledged, with so many messages if there are, but the first at any size."""
    shape, found, size, turns = log.shape, list[StoredEntry](), 0, Turns(log.world.clock)
    position = shape.after(subscription.cursor.mark)
    while messages > 0 and shape.readable(position := subscription.cursor.next_unacked(shape.there(position))):
        entry = await log.reader.entry(position)
        size += entry.size
        if found and size > PEEK_BYTES_MAX:
            break
        found.append(entry)
        messages -= entry.count
        position = shape.after(position)
        if turns.over:
            await turns.next()
    return found


async def skip(log: ReadableLog, subscription: Subscription, messages: int) -> None:
    """Acknowledges the next so many messages (-1: all), durably, but those that are pending in a transaction. Each
    chunk of a message counts as one, as in the size of the backlog; of the last one all chunks are skipped."""
    shape = log.shape
    mark, acked = shape.last, 0
    if messages >= 0:
        index = shape.ahead(await log.reader.index_after(subscription.cursor.mark), messages)
        place = await log.reader.locate(index)
        mark, acked = shape.before(place.position), max(0, index - place.first_index)
    subscription.give_up(mark, acked if shape.readable(shape.after(mark)) else 0)
    subscription.discard(await rest_of(log, mark))
    await subscription.durable_now()
    subscription.pump.wake()
