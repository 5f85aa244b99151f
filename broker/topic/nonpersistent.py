"""Non-persistent topics (Pulsar T2): nothing is stored. The same doors as `Topic`, behind them a log in memory.

- A publish is confirmed at once, in the next turn of the event loop. It means "taken", not "kept".
- Entries go to the consumers that are connected, of all subscription types, through the same dispatcher. What was
  handed out counts as acknowledged: nothing is redelivered, acks are taken and mean nothing.
- In flight are at most `IN_FLIGHT_ENTRIES` and `IN_FLIGHT_BYTES` of a topic. A subscription whose consumers do not keep
  up loses the oldest ones, counted in its `dropped`; one without consumers loses everything, and is gone.
- There is no record in the metadata: a topic is made when it is first used, and is gone when its broker ends, unloads
  it or nobody has used it for `UNUSED_S`. One with partitions has a record of their number, made by an operator, and
  each of them lives as a topic does. Lists show those with partitions and those that some broker has in memory.
- Seeking and trimming are not for it. Policies are those of the persistent topic of that name.

Guarding tests: tests/broker/topic/test_nonpersistent.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ...proto.entry import broker_part
from ...proto.errors import AlreadyExists, Busy, InvalidRequest, MagnetarError, NotOwner, SubscriptionNotFound
from ...proto.model import SubscriptionType
from ...proto.names import Position, check_subscription_name
from ..common.applied import Applied
from ..log.cache import StoredEntry
from ..log.core.log_shape import Span
from ..log.publish import Publish
from ..log.reader import Place
from ..log.topic_log import State, TopicLog
from ..subscription.consumer import Consumer
from ..subscription.core.cursor import Cursor, CursorState
from ..subscription.subscription import Subscription
from .topic import Topic

IN_FLIGHT_ENTRIES = 1000
"""What Pulsar has in flight for each connection; here of a topic."""
IN_FLIGHT_BYTES = 4 << 20
UNUSED_S = 60


class Recent:
    """The entries in flight, and what a LogReader answers from them."""

    def __init__(self, log: VolatileLog) -> None:
        self._log = log
        self._entries: deque[StoredEntry] = deque()
        self._bytes = 0

    def add(self, entry: StoredEntry) -> None:
        self._entries.append(entry)
        self._bytes += entry.size
        while len(self._entries) > IN_FLIGHT_ENTRIES or (self._bytes > IN_FLIGHT_BYTES and len(self._entries) > 1):
            self._bytes -= self._entries.popleft().size

    @property
    def start(self) -> Place:
        """The oldest in flight, or where the next will be."""
        if self._entries:
            return Place(self._entries[0].position, self._entries[0].first_index)
        shape = self._log.shape
        return Place(shape.after(shape.last), shape.end_index)

    def cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        first = self.start.position
        if position[0] != first[0] or position[1] < first[1]:
            return []
        begin = position[1] - first[1]
        return list(itertools.islice(self._entries, begin, begin + entries_max))

    async def read(self, position: Position, bytes_max: int) -> list[StoredEntry]:
        found = self.cached(position, 1, bytes_max)
        if not found:
            raise InvalidRequest(f"entry {position} of a non-persistent topic is gone", position=position)
        return found

    async def entry(self, position: Position) -> StoredEntry:
        return (await self.read(position, 1))[0]

    async def index_after(self, mark: Position) -> int:
        return self.index_at(self._log.shape.after(mark))

    def index_now(self, mark: Position) -> int | None:
        return self.index_at(self._log.shape.after(mark))

    def index_at(self, position: Position) -> int:
        """Of the first message there; of the oldest in flight when it is gone."""
        found = self.cached(position, 1, 1)
        if found:
            return found[0].first_index
        return self.start.first_index if position < self.start.position else self._log.shape.end_index

    async def locate(self, index: int) -> Place:
        return self._first(lambda entry: entry.index >= index)

    async def locate_time(self, time_ms: int) -> Place:
        return self._first(lambda entry: entry.timestamp_ms >= time_ms)

    def _first(self, reached: Callable[[StoredEntry], bool]) -> Place:
        for entry in self._entries:
            if reached(entry):
                return Place(entry.position, entry.first_index)
        return Place(self._log.shape.after(self._log.shape.last), self._log.shape.end_index)


class VolatileLog(TopicLog):
    """A log of one ledger that is nowhere. Its id is the time at which it was made, so that ids are not used again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recent = Recent(self)
        self.hand_out: Callable[[], None] = lambda: None
        self._taken: list[tuple[Publish, Position, int]] = []

    async def open(self) -> None:
        self.shape.add(Span(self._world.clock.wall_ms(), 0, open=True))
        self.state = State.SERVING

    def publish(self, publish: Publish) -> None:
        if self.state is not State.SERVING:
            raise self._refused()
        span, now_ms = self.shape.tail, max(self._world.clock.wall_ms(), self._timestamp_ms)
        publish.timestamp_ms = self._timestamp_ms = now_ms
        index = span.end_index + publish.count - 1
        publish.frames = (broker_part(index, now_ms), publish.client_part)
        span.last_entry, span.end_index = span.last_entry + 1, index + 1
        position, size = Position(span.ledger_id, span.last_entry), len(publish.frames[0]) + publish.size
        self.recent.add(
            StoredEntry(position, publish.frames, count=publish.count, index=index, size=size, timestamp_ms=now_ms)
        )
        if not self._taken:
            self._loop.call_soon(self._confirm_taken)
        self._taken.append((publish, position, index))
        if len(self._taken) % (IN_FLIGHT_ENTRIES // 2) == 0:
            self.hand_out()  # many came at once: consumers that keep up must not lose any for that

    def _confirm_taken(self) -> None:
        taken, self._taken = self._taken, []
        for publish, position, index in taken:
            publish.publisher.confirmed(publish, position, index)
        self._on_confirmed()

    @property
    def queued_index(self) -> int:
        return self.shape.end_index

    @property
    def age_s(self) -> float:
        return 0.0

    async def roll(self) -> None:
        """Nothing is stored."""

    async def trim(self, choose: Callable[[], list[int]]) -> list[int]:
        return []

    async def terminate(self) -> Position:
        self.state = State.TERMINATED
        self._on_confirmed()
        return self.shape.last

    async def close(self) -> None:
        if self.state is not State.LOST:
            self.state = State.CLOSED


class VolatileSubscription(Subscription):
    """Of the consumers that are there; what they do not take in time is dropped."""

    def __init__(self, name: str, log: VolatileLog, topic: VolatileTopic) -> None:
        super().__init__(name, log, Cursor(log.shape, CursorState(log.shape.last)), None, topic.config, topic.applied)
        self.dropped = 0  # messages
        self._recent = log.recent
        self._next_index = log.shape.end_index

    def join(
        self, consumer: Consumer, type_: SubscriptionType, *, sticky: bool = False, out_of_order: bool = False
    ) -> None:
        if not self.consumers:
            self._go_on_behind(self._log.shape.last, self._log.shape.end_index)
        super().join(consumer, type_, sticky=sticky, out_of_order=out_of_order)

    def _go_on_behind(self, mark: Position, next_index: int) -> None:
        self.cursor.seek(mark)
        self.dispatcher.seek()
        self._next_index = next_index

    def hand_out(self) -> None:
        self._pump()

    def _pump(self) -> None:
        shape, start = self._log.shape, self._recent.start
        if shape.seat(self.dispatcher.read_position) < start.position:
            self.dropped += start.first_index - self._next_index
            self._go_on_behind(shape.before(start.position), start.first_index)
        super()._pump()
        here = shape.seat(self.dispatcher.read_position)
        self._next_index = self._recent.index_at(here)
        if not self.dispatcher.replay_entries and self.cursor.ack_cumulative(shape.before(here)):
            self.dispatcher.acked_up_to(self.cursor.mark)


class VolatileTopic(Topic):
    log: VolatileLog

    def apply(self, applied: Applied) -> None:
        super().apply(replace(applied, inactive_s=applied.inactive_s or UNUSED_S, inactive_mode=MODE))

    def _make_log(self, *args: Any, **options: Any) -> VolatileLog:
        log = VolatileLog(*args, **options)
        log.hand_out = self._hand_out
        log.reader = log.recent  # type: ignore[assignment]  # answers what a LogReader does
        return log

    @property
    def dropped(self) -> int:
        return sum(each.dropped for each in self.subscriptions.values() if isinstance(each, VolatileSubscription))

    def _hand_out(self) -> None:
        for subscription in self.subscriptions.values():
            if isinstance(subscription, VolatileSubscription) and subscription.consumers:
                subscription.hand_out()

    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        if create is not None:
            await create()
        await self.log.open()

    async def subscribe(
        self, name: str, mark: Position | None = None, properties: dict[str, str] | None = None, *,
        exclusive: bool = False, compacted: bool = False, by_consumer: bool = False,
    ) -> Subscription:  # fmt: skip
        """From now on; where it should begin does not matter."""
        check_subscription_name(name)
        self.check_open()
        found = self.subscriptions.get(name)
        if found is not None and exclusive:
            raise AlreadyExists(f"subscription {name!r} of topic {self.name} exists already")
        if found is None:
            self.check_subscription(name, by_consumer=by_consumer)
            found = self.subscriptions[name] = VolatileSubscription(name, self.log, self)
            self._apply_to(found)
        return found

    def read_only(self, name: str, mark: Position, *, compacted: bool = False) -> Subscription:
        return VolatileSubscription(name, self.log, self)

    async def detach(self, subscription: Subscription) -> None:
        if not subscription.consumers:
            await super().detach(subscription)

    def subscription(self, name: str) -> Subscription:
        found = self.subscriptions.get(name)
        if found is None:
            raise SubscriptionNotFound(f"topic {self.name} has no subscription {name!r}", subscription=name)
        return found

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        subscription = self.subscription(name)
        if subscription.consumers and not force:
            raise Busy(f"subscription {name!r} of {self.name} has {len(subscription.consumers)} consumers")
        error: MagnetarError = SubscriptionNotFound(f"subscription {name!r} was removed")
        subscription.disconnect_all(error)
        self.subscriptions.pop(name, None)
        await subscription.close()

    async def delete(self, *, force: bool) -> list[int]:
        if self.users and not force:
            raise Busy(f"topic {self.name} has {self.users} producers and consumers; or delete by force")
        await self.close(NotOwner(f"topic {self.name} was deleted", topic=self.name))
        return []


MODE: Any = "delete_when_no_subscriptions"
