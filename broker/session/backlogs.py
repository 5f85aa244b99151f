"""The operations on one topic's subscriptions and messages, in plain values. The topic's owner answers.

Guarding tests: tests/broker/protocols/grpc/test_services.py, tests/broker/protocols/grpc/test_examine.py.
"""

from __future__ import annotations

import msgspec

from ...proto.errors import InvalidRequest, NotAllowed
from ...proto.names import MessageId, Position
from ..log.cache import StoredEntry
from ..subscription.subscription import Subscription
from ..subscription.whole_messages import before_whole
from ..topic import backlog, examine
from ..topic.core.upkeep import backlog_bytes
from ..topic.topic import Topic
from .start import mark_of, place_of

PEEK_MESSAGES_MAX = 1000
AGE_S_MAX = 10_000_000_000
"""Longest age in seconds: 300 years."""


class Shown(msgspec.Struct, frozen=True):
    """An entry, and the messages of it that are not to be shown."""

    entry: StoredEntry
    hidden: list[int]


class Backlogs:
    """The backlogs of one loaded topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def _named(self, name: str) -> list[Subscription]:
        """Returns that durable subscription, or all of them if `name` is empty."""
        every = self._topic.subscriptions
        names = [name] if name else [name for name, each in every.items() if each.durable]
        return [self._topic.subscription(each) for each in names]

    # ------------------------------------------------------------------ subscriptions
    async def create(self, name: str, start: MessageId | None, properties: dict[str, str]) -> None:
        """Creates a subscription. AlreadyExists. `start` None: at the end."""
        mark = mark_of(self._topic.shown.shape, start, inclusive=True)[0] if start is not None else None
        await self._topic.registry.subscribe(name, mark, properties, exclusive=True)

    def properties(self, name: str) -> dict[str, str]:
        store = self._topic.subscription(name).store
        return store.properties if store is not None else {}

    async def set_properties(self, name: str, properties: dict[str, str]) -> None:
        """Sets the properties of a subscription: these and no others."""
        topic = self._topic
        if not topic.name.persistent:
            raise NotAllowed(f"topic {topic.name} keeps nothing, and no properties of subscriptions")
        await topic.registry.set_properties(topic.subscription(name), properties)

    async def reset(
        self, name: str, to: MessageId | None, publish_time_ms: int | None, *, inclusive: bool = True
    ) -> None:
        """Resets a subscription to a message, or to the first one that arrived at that time or later; durable when this
        returns."""
        log, subscription = self._topic.shown, self._topic.subscription(name)
        if to is None and publish_time_ms is None:
            raise InvalidRequest("a subscription is reset to a message id or to a time")
        async with subscription.moving:
            acked = 0
            if to is not None:
                mark, acked = await place_of(log, to, inclusive=inclusive)
            else:
                place = await log.reader.locate_time(publish_time_ms or 0)
                mark = await before_whole(log, log.shape.before(place.position))
            await subscription.seek(mark, acked)

    async def skip(self, name: str, messages: int) -> None:
        """Skips messages of that subscription or of all; -1: all messages."""
        if messages < -1:
            raise InvalidRequest(f"{messages} messages cannot be skipped; -1 are all of them")
        for subscription in self._named(name):
            await backlog.skip(self._topic.shown, subscription, messages)

    async def expire(self, name: str, older_than_s: float, up_to: Position | None) -> int:
        """Acknowledges what is older, or everything up to a message; of that subscription or of all. Entries."""
        if up_to is None and not 0 < older_than_s <= AGE_S_MAX:
            raise InvalidRequest(
                f"messages expire when they are older than some seconds (0 to {AGE_S_MAX}), or up to a message id"
            )
        life, entries = self._topic.life, 0
        for subscription in self._named(name):
            if up_to is not None:
                entries += await life.give_up_whole(subscription, self._topic.shown.shape.clamp(up_to))
            else:
                entries += await life.expire_older(subscription, older_than_s)
            await subscription.durable_now()
        return entries

    async def peek(self, name: str, messages: int) -> list[Shown]:
        """Returns the next messages of the subscription, up to `messages`, as entries."""
        if messages > PEEK_MESSAGES_MAX:
            raise InvalidRequest(f"{messages} messages at once are more than {PEEK_MESSAGES_MAX}")
        subscription = self._topic.subscription(name)
        entries = await backlog.peek(self._topic.shown, subscription, messages)
        return [Shown(entry, subscription.cursor.acked_indexes(entry.position)) for entry in entries]

    async def analyze(self, name: str) -> examine.Backlog:
        return await examine.analyze(self._topic.shown, self._topic.subscription(name))

    # ------------------------------------------------------------------ messages
    async def nth(self, number: int, *, from_latest: bool) -> Shown:
        """Returns the n-th message from one end, from 1 on; the others of its batch are hidden."""
        entry, at = await examine.nth(self._topic.shown, number, from_latest=from_latest)
        return Shown(entry, [index for index in range(entry.count) if index != at])

    async def message(self, position: Position) -> Shown:
        return Shown(await examine.message(self._topic.shown, position), [])

    async def at_time(self, publish_time_ms: int) -> MessageId:
        """Returns the id of the first message that arrived then or later; where the next will be, if there is none."""
        position = (await self._topic.shown.reader.locate_time(publish_time_ms)).position
        return MessageId(*position, partition=self._topic.name.partition)

    async def last(self) -> MessageId:
        last = await self._topic.shown.reader.last_shown()
        position, batch_index, _ = last or (self._topic.shown.shape.last, -1, -1)
        return MessageId(*position, self._topic.name.partition, batch_index)

    def size_after(self, position: Position) -> int:
        """Bytes that are stored after it."""
        shape = self._topic.shown.shape
        return backlog_bytes(shape, shape.clamp(position))
