"""Examining a topic's log for an operator: single messages, and exactly what a subscription has left.

`analyze` reads the backlog as far as it must: where nothing after the mark is acknowledged, the index gives the number
of
messages there and nothing is read; ledgers with holes or partly acknowledged batches are read, `entries_max` at most.
"""

from __future__ import annotations

from typing import NamedTuple

from ...proto.errors import NotFound
from ...proto.names import Position
from ..log.cache import StoredEntry
from ..log.core.log_shape import Span
from ..log.log import ReadableLog
from ..subscription.subscription import Subscription
from .core.upkeep import backlog_bytes

ANALYZE_ENTRIES_MAX = 1_000_000
"""Entries that one request reads: some seconds. Beyond, an acknowledged entry counts as one message."""
CHUNK_BYTES = 1 << 20


class Backlog(NamedTuple):
    """The rest of a topic that a subscription has not acknowledged."""

    entries: int
    messages: int
    acknowledged: int  # messages after the mark that are acknowledged
    bytes: int  # about
    complete: bool  # False: `ANALYZE_ENTRIES_MAX` was reached


async def analyze(log: ReadableLog, subscription: Subscription, entries_max: int = ANALYZE_ENTRIES_MAX) -> Backlog:
    shape, cursor = log.shape, subscription.cursor
    mark, acknowledged, entries, left = cursor.mark, 0, 0, entries_max
    for span in shape.spans:
        first = mark[1] + 1 if span.ledger_id == mark[0] else 0
        if span.ledger_id < mark[0] or first > span.last_entry:
            continue
        entries += shape.shown_in(span.ledger_id, first)
        holes = len(cursor.acked.get(span.ledger_id, ()))
        entries -= holes
        partial = any(position[0] == span.ledger_id for position in cursor.partial)
        if (holes or partial) and left > 0:
            acknowledged += await _acknowledged(log, subscription, span, first)
            left -= span.last_entry - first + 1
        else:
            acknowledged += holes
    messages = shape.messages_from(await log.reader.index_after(mark)) - acknowledged
    return Backlog(entries, max(0, messages), acknowledged, backlog_bytes(shape, mark), left >= 0)


async def _acknowledged(log: ReadableLog, subscription: Subscription, span: Span, first: int) -> int:
    """Messages of the ledger, from entry `first` on, that the subscription has acknowledged."""
    cursor, found = subscription.cursor, 0
    position = log.shape.there(Position(span.ledger_id, first))
    while position[0] == span.ledger_id and log.shape.readable(position):
        for entry in await log.reader.read(position, CHUNK_BYTES):
            if cursor.is_acked(entry.position):
                found += entry.count
            else:
                found += len(cursor.acked_indexes(entry.position))
            position = log.shape.there(log.shape.after(entry.position))
    return found


async def nth(log: ReadableLog, number: int, *, from_latest: bool) -> tuple[StoredEntry, int]:
    """The entry with the n-th message (from 1) from the oldest or from the newest, and the message's place in it."""
    shape = log.shape
    count = shape.messages_from(shape.first_index)
    if not 1 <= number <= count:
        raise NotFound(f"topic {log.topic} has {count} messages; there is no message number {number}")
    index = shape.ahead(shape.first_index, count - number if from_latest else number - 1)
    place = await log.reader.locate(index)
    return await log.reader.entry(place.position), max(0, index - place.first_index)


async def message(log: ReadableLog, position: Position) -> StoredEntry:
    if not log.shape.readable(position) or log.shape.hole(position) is not None:
        raise NotFound(f"topic {log.topic} has no message {position} (any more)", position=position)
    return await log.reader.entry(position)
