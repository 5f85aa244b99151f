"""The partition that is copied into: where a copy continues, and where a position of the source is.

**Nothing is lost and nothing is doubled.** The position in the source is stored in each copied entry (origin.py). It
is read after the producer was opened, when no other one can publish (client/produce/entry_writer.py), and after what a
killed run left on its way is settled. What had no answer when a connection was lost is never sent again by the same
producer; the next one reads the newest origin anew. Guard: tests/cli/migrate/test_migrate.py.
"""

from __future__ import annotations

from ...client.client import Client
from ...proto.entry import declared_messages
from ...proto.names import Position, TopicName
from .origin import Origin, origin_of

PRODUCER = "magnetar-migrate"
"""The name of the producer, and of the subscription that keeps the copies."""


async def newest_origin(client: Client, topic: TopicName, first: int, end: int) -> Origin | None:
    """Returns the origin of the newest entry of the indexes `first` … `end - 1`; None: it is not a copy, or there is
    none."""
    if end <= first:
        return None
    found: Origin | None = None
    async for entries in client.read_range(topic.full, end - 1, end):
        found = origin_of(entries[-1].data)
    return found


async def newest_of_all(client: Client, topic: TopicName, first: int, end: int, number: int) -> Origin | None:
    """Returns the origin of the newest copy among all entries: for a topic that others wrote to. Reads all of it."""
    found: Origin | None = None
    async for entries in client.read_range(topic.full, first, end):
        for entry in entries:
            origin = origin_of(entry.data)
            if origin is not None and origin.topic == number:
                found = origin
    return found


async def index_after(client: Client, topic: TopicName, first: int, end: int, mark: Position) -> int:
    """The index of the first message that was copied from after `mark`; `end`: there is none. By bisection."""
    while first < end:
        middle = (first + end) // 2
        entry = None
        async for entries in client.read_range(topic.full, middle, middle + 1):
            entry = entries[0]
        if entry is None:
            return end
        origin = origin_of(entry.data)
        if origin is not None and origin.position > mark:
            end = min(middle, entry.end_index - declared_messages(entry.data))
        else:
            first = entry.end_index
    return end

