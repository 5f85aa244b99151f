"""Non-persistent topics (Pulsar T2): nothing is stored. `NonPersistentStorage` is the storage of such a topic: memory.

- A publish is confirmed in the next turn of the event loop. The receipt does not mean that the entry is stored.
- Entries are delivered to the connected consumers, of all subscription types, through the same dispatcher as those of
  persistent topics. A delivered entry counts as acknowledged: no entry is redelivered, and acknowledgements have no
  effect.
- A topic has at most `IN_FLIGHT_ENTRIES` entries and `IN_FLIGHT_BYTES` bytes in memory. A subscription whose consumers
  are too slow loses the oldest entries, and counts their messages in its `dropped`; one without consumers ends.
- The metadata have no record of such a topic: it is created when it is first used. It ends when its broker ends or
  unloads it, or when it is unused for `VOLATILE_UNUSED_S` (broker/common/config.py). A partitioned one has a record
  with the number of its partitions, which an operator creates; each partition begins and ends as a topic does. Lists
  show the partitioned topics, and those that a broker has in memory.
- Such a topic does not support seeking and trimming. Its policies are those of the persistent topic of that name.

Guarding tests: tests/broker/topic/test_nonpersistent.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec import structs
from pyroaring import BitMap

from ...metadata.records import TopicRecord
from ...metadata.store import NodeUpdate
from ...proto.applied import AppliedPolicies
from ...proto.entry import encode_broker_part
from ...proto.errors import (
    InvalidRequest,
    MagnetarError,
    NotOwner,
    TopicTerminated,
)
from ...proto.names import Position
from ...proto.states import TopicState
from ...runtime.clock import Clock
from ...runtime.network import World
from ..common.config import BrokerConfig, LedgerReplication
from ..log.appender import Publish
from ..log.cache import StoredEntry
from ..log.log_shape_core import LedgerSpan, LogShape
from ..log.reader import PositionAndIndex
from ..subscription.consumer import Consumer
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import CursorState
from ..subscription.core.subscription_types import SubscriptionTypeRow
from ..subscription.pump import SubscriptionDeliveryPump
from ..subscription.subscription import Subscription

if TYPE_CHECKING:
    from .topic import Topic

IN_FLIGHT_ENTRIES = 1000
"""Most entries in flight for a topic, as Pulsar has it for each connection."""
IN_FLIGHT_BYTES = 4 << 20


class NonPersistentEntries:
    """The newest entries of a non-persistent topic, which are in memory only. The LogEntryReader of such a topic's log.
    Drops the oldest entries above `IN_FLIGHT_ENTRIES` entries or `IN_FLIGHT_BYTES` bytes; always keeps the newest
    one."""

    def __init__(self, shape: LogShape) -> None:
        self._shape = shape
        self._entries: deque[StoredEntry] = deque()
        self._bytes = 0

    def add(self, entry: StoredEntry) -> None:
        """Adds an entry, which must be the one directly after the last added entry. May drop the oldest entries."""
        self._entries.append(entry)
        self._bytes += entry.size
        while len(self._entries) > IN_FLIGHT_ENTRIES or (self._bytes > IN_FLIGHT_BYTES and len(self._entries) > 1):
            self._bytes -= self._entries.popleft().size

    @property
    def oldest_position(self) -> PositionAndIndex:
        """Returns the position of the oldest entry in memory, and the index of its first message. If no entry is in
        memory, returns the position and the index that the next entry will get."""
        if self._entries:
            return PositionAndIndex(self._entries[0].position, self._entries[0].first_index)
        return self._end_position

    @property
    def _end_position(self) -> PositionAndIndex:
        return PositionAndIndex(self._shape.position_after(self._shape.last_position), self._shape.end_index)

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        first = self.oldest_position.position
        if position[0] != first[0] or position[1] < first[1]:
            return []
        begin = position[1] - first[1]
        return list(itertools.islice(self._entries, begin, begin + entries_max))

    def get(self, position: Position) -> StoredEntry | None:
        found = self.read_cached(position, 1, 1)
        return found[0] if found else None

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        found = self.read_cached(position, 1, bytes_max)
        if not found:
            raise InvalidRequest(f"entry {position} of a non-persistent topic was dropped", position=position)
        return found

    async def read_entry(self, position: Position) -> StoredEntry:
        return (await self.read(position, 1))[0]

    async def find_message_index_after(self, mark: Position) -> int:
        return self.message_index_at(self._shape.position_after(mark))

    def find_cached_message_index_after(self, mark: Position) -> int | None:
        return self.message_index_at(self._shape.position_after(mark))

    def message_index_at(self, position: Position) -> int:
        """Returns the index of the first message of the entry at `position`. If that entry was dropped, returns the
        index of the first message of the oldest entry in memory; if `position` is after the last entry, the index of
        the next message."""
        found = self.read_cached(position, 1, 1)
        if found:
            return found[0].first_index
        return self.oldest_position.first_index if position < self.oldest_position.position else self._shape.end_index

    async def find_position_by_index(self, index: int) -> PositionAndIndex:
        return self._first(lambda entry: entry.index >= index)

    async def find_position_by_time(self, time_ms: int) -> PositionAndIndex:
        return self._first(lambda entry: entry.timestamp_ms >= time_ms)

    def _first(self, reached: Callable[[StoredEntry], bool]) -> PositionAndIndex:
        for entry in self._entries:
            if reached(entry):
                return PositionAndIndex(entry.position, entry.first_index)
        return self._end_position

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        if not self._entries:
            return None
        last = self._entries[-1]
        return last.position, last.count - 1 if last.count > 1 else -1, last.index


class NonPersistentLog:
    """The Log of a non-persistent topic: one ledger that is only in memory. The ledger's id is the time of its
    creation, so that no id is used twice."""

    is_compacted = False
    record = TopicRecord()
    replication = None
    wanted_replication = LedgerReplication(0, 0, 0)
    is_degraded = False
    ledger_age_s = 0.0
    ensemble: ClassVar[dict[int, tuple[str, ...]]] = {}

    def __init__(self, world: World, topic: Topic) -> None:
        self.topic = topic.name
        self.state = TopicState.OPENING
        self.shape = LogShape()
        self.reader = NonPersistentEntries(self.shape)
        self.world = world
        self._of = topic
        self._timestamp_ms = 0
        self._taken: list[tuple[Publish, Position, int]] = []

    @property
    def next_index(self) -> int:
        return self.shape.end_index

    @property
    def pending_entries(self) -> int:
        return len(self._taken)

    @property
    def last_published_ms(self) -> int:
        return self._timestamp_ms

    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        if create is not None:
            await create()
        self.shape.add(LedgerSpan(self.world.clock.wall_ms(), 0, open=True))
        self.state = TopicState.SERVING

    def publish(self, publish: Publish) -> None:
        if self.state is not TopicState.SERVING:
            raise self._refusal()
        span, now_ms = self.shape.tail_span, max(self.world.clock.wall_ms(), self._timestamp_ms)
        self._timestamp_ms = now_ms
        index = span.end_index + publish.count - 1
        stored = b"".join((encode_broker_part(index, now_ms), publish.client_part))
        publish.client_part = b""
        span.last_entry, span.end_index = span.last_entry + 1, index + 1
        position, size = Position(span.ledger_id, span.last_entry), len(stored)
        self.reader.add(
            StoredEntry(
                position, (stored,), count=publish.count, index=index, size=size, timestamp_ms=now_ms,
                expiry=publish.expiry,
            )
        )
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._confirm_taken)
        self._taken.append((publish, position, index))
        if len(self._taken) % (IN_FLIGHT_ENTRIES // 2) == 0:
            # many arrived at once: consumers that keep up must not lose any for that
            self._of.deliver_before_cache_eviction()

    def await_first_copy(self, publish: Publish) -> None:
        """Does nothing: the outcome is reported in the next turn of the event loop."""

    def _refusal(self) -> MagnetarError:
        if self.state is TopicState.TERMINATED:
            return TopicTerminated(f"topic {self.topic} is terminated", topic=self.topic)
        return NotOwner(f"topic {self.topic} is {self.state.value}; look it up again", topic=self.topic)

    def _confirm_taken(self) -> None:
        taken, self._taken = self._taken, []
        for publish, position, index in taken:
            publish.publisher.on_confirmed(publish, position, index)
        self._of.on_entries_confirmed()

    def removed_entries(self) -> Iterable[tuple[int, BitMap]]:
        """Returns (), because a non-persistent topic is not compacted."""
        return ()

    async def is_still_owned(self) -> bool:
        return True

    def create_first_ledger_early(self) -> None:
        """Does nothing, because the log always has its one ledger."""

    async def roll_ledger(self) -> None:
        """Does nothing, because the log has only one ledger."""

    @property
    def has_idle_ledger(self) -> bool:
        return False

    async def close_idle_ledger(self) -> None:
        """Does nothing, because the log always has its one ledger."""

    async def trim_ledgers(self, choose: Callable[[], list[int]]) -> list[int]:
        return []

    async def commit_fields(
        self, *, together: Sequence[NodeUpdate] = (), within: bool = False,
        decide: Callable[[TopicRecord], Mapping[str, object]] | None = None, **fields: object,
    ) -> None:  # fmt: skip
        """Sets fields of the topic's record in memory. Stores nothing: the values are lost when the topic is unloaded.
        `decide`: returns further fields, from the present record. Ignores `together`."""
        further = {} if decide is None else decide(self.record)
        self.record = structs.replace(self.record, **fields, **further)

    async def terminate(self) -> Position:
        self.state = TopicState.TERMINATED
        self._of.on_entries_confirmed()
        return self.shape.last_position

    def abandon(self, error: MagnetarError) -> None:
        if self.state not in (TopicState.LOST, TopicState.CLOSED):
            self.state = TopicState.LOST
            self._of.abandon(error)

    async def close(self) -> None:
        if self.state is not TopicState.LOST:
            self.state = TopicState.CLOSED


class NonPersistentSubscription(Subscription):
    """A subscription to a non-persistent topic. If its consumers cannot receive an entry before it leaves memory, the
    subscription never delivers it, and counts its messages in `dropped`."""

    pump: NonPersistentPump

    def __init__(
        self, name: str, log: NonPersistentLog, clock: Clock, config: BrokerConfig, applied: AppliedPolicies
    ) -> None:
        cursor = Cursor(log.shape, CursorState(log.shape.last_position))
        super().__init__(name, log, cursor, None, clock, config, applied, tracks=False)
        self.pump = NonPersistentPump(self, log, clock, config)

    def join(self, consumer: Consumer, type_: SubscriptionTypeRow) -> None:
        if not self.consumers:
            self.pump.continue_after_mark(self.log.shape.last_position, self.log.shape.end_index)
        super().join(consumer, type_)


class NonPersistentPump(SubscriptionDeliveryPump):
    """Delivers the entries in memory to the consumers of one subscription, and counts the messages that were dropped
    before they could be delivered."""

    __slots__ = ("_next_index", "_of", "_recent")

    def __init__(
        self, subscription: NonPersistentSubscription, log: NonPersistentLog, clock: Clock, config: BrokerConfig
    ) -> None:
        super().__init__(subscription, clock, config)
        self._of = subscription
        self._recent = log.reader
        self._next_index = log.shape.end_index

    def continue_after_mark(self, mark: Position, next_index: int) -> None:
        """Continues the delivery with the entry after the position `mark`. Everything up to `mark` counts as
        acknowledged. `next_index`: the index of the first message after `mark`."""
        self._of.cursor.seek(mark)
        self._of.dispatcher.restart_delivery_after_mark()
        self._next_index = next_index

    def deliver_available_entries(self) -> None:
        of, shape, start = self._of, self._of.log.shape, self._recent.oldest_position
        if shape.position_at_or_after(of.dispatcher.read_position) < start.position:
            of.dropped += start.first_index - self._next_index
            self.continue_after_mark(shape.position_before(start.position), start.first_index)
        super().deliver_available_entries()
        here = shape.position_at_or_after(of.dispatcher.read_position)
        self._next_index = self._recent.message_index_at(here)
        if not of.dispatcher.redelivery_entry_count and of.cursor.ack_cumulative(shape.position_before(here)):
            of.dispatcher.on_acked_up_to(of.cursor.mark)


class NonPersistentStorage(msgspec.Struct, frozen=True):
    """Creates the log and the subscriptions of a non-persistent topic. Each subscription exists in memory only, and
    begins at the end of the topic."""

    world: World
    config: BrokerConfig

    def create_log(self, topic: Topic) -> NonPersistentLog:
        return NonPersistentLog(self.world, topic)

    async def open_subscriptions(self, topic: Topic, shape: LogShape) -> list[Subscription]:
        return []

    async def create_subscription(
        self, topic: Topic, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        return self.make_nondurable_subscription(topic, name, shape.last_position, shape, tracks=False)

    def make_nondurable_subscription(
        self, topic: Topic, name: str, mark: Position, shape: LogShape, *, tracks: bool
    ) -> Subscription:
        assert isinstance(topic.log, NonPersistentLog), "made by this storage"
        return NonPersistentSubscription(name, topic.log, self.world.clock, self.config, topic.applied)
