"""Entries of an index range, for readers that keep their own offsets.

The entries that hold any message of the range are given in order, until about `bytes_max` (READ_BYTES_MAX if that is
0), the end of the range or the end of the topic, whichever is first; this never waits for messages. The right to
consume is asked for before each HAND_OUT_BYTES: a read that a client takes slowly ends with it.
Guarding tests: tests/broker/subscription/test_gaps.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from ...proto.errors import InvalidRequest
from ...proto.names import TopicName
from ...proto.operation import Permission
from ...runtime.network import CallContext
from ..common.config import HAND_OUT_BYTES
from ..common.incarnations import check_incarnation
from ..common.turns import Turns
from ..log.cache import StoredEntry
from ..node.topic_manager import TopicManager

READ_BYTES_MAX = 16 << 20


class Range(msgspec.Struct, frozen=True):
    """A range of message indexes of a topic: `first` inclusive, `end` exclusive."""

    topic: str
    first: int
    end: int
    bytes_max: int = 0
    incarnation: int = 0  # of the topic; 0: whichever is there


class RangeReader:
    """Reads an index range. `next_index` is the first index that is not covered by what `entries` has given so far."""

    def __init__(self, broker: TopicManager, wanted: Range, caller: CallContext) -> None:
        self._caller = caller
        self.next_index = wanted.first
        self._broker = broker
        self._wanted = wanted

    async def entries(self, turns: Turns) -> AsyncGenerator[StoredEntry, None]:
        """Yields the entries of the range. Raises Unauthorized, TopicNotFound, NotOwner, InvalidRequest, Unavailable,
        DataLost: after some entries, perhaps."""
        wanted = self._wanted
        name = TopicName.parse(wanted.topic)
        await self._require(name)
        topic = await self._broker.topic(name, create=False)
        check_incarnation(topic.name, topic.incarnation, wanted.incarnation)
        if wanted.end < wanted.first or wanted.first < 0:
            raise InvalidRequest(f"{wanted.first} to {wanted.end} is no range of indexes")
        log, chunk_bytes = topic.shown, min(HAND_OUT_BYTES, self._broker.config.read_bytes)
        end = min(wanted.end, log.shape.end_index)
        if wanted.first >= end:
            return
        place = await log.reader.locate(wanted.first)
        position, self.next_index = log.shape.there(place.position), max(wanted.first, place.first_index)
        left = wanted.bytes_max or READ_BYTES_MAX
        while self.next_index < end and left > 0 and log.shape.readable(position):
            await self._require(name)
            size = min(left, chunk_bytes)
            for entry in log.reader.cached(position, 1000, size) or await log.reader.read(position, size):
                if entry.first_index >= end or left <= 0:
                    self.next_index = max(self.next_index, min(end, entry.first_index))  # none before it is kept
                    break
                yield entry
                topic.traffic.record_out(entry.count, entry.size)
                left -= entry.size
                self.next_index = entry.index + 1
                position = log.shape.after(entry.position)
                if turns.over:
                    await turns.next()
            position = log.shape.there(position)
        if left > 0:
            self.next_index = max(self.next_index, end)  # none of the rest is kept
        self.next_index = min(self.next_index, wanted.end)

    async def _require(self, name: TopicName) -> None:
        await self._broker.access.require(self._caller.principal, Permission.CONSUME, topic=name)
