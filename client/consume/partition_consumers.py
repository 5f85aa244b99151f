"""The partitions that one consumer or reader receives from: one PartitionConsumer each, and one inbox for all.

    partitions = PartitionConsumers(settings)
    await partitions.open(new)          the first ones: all of them, or none when one refuses
    await partitions.grow(new)          later ones, each with an inbox of its own until all are open
    partitions.remove(consumer)         its topic was deleted
    await partitions.close()

What may wait in the client, of all partitions together, is shared out evenly and again with each change. A message id
that chooses a partition names its topic, or a partition number that only one topic has. `all` stays the same list.
Guards: tests/client/connect/test_partitions_watcher.py, tests/client/connect/test_patterns.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from ...proto.names import TopicName
from ..common.checks import (
    PUBLISH_TIME,
    SOUGHT,
    TIMEOUT_MS,
    WrongType,
    check_parameter,
    check_parameters,
    shorten_value,
)
from ..common.closing import close_all
from ..common.errors import InvalidMessage, OperationNotSupported
from ..connect.connections import Connections
from ..connect.topic_watch import PartitionsWatcher
from ..core.effects import PartitionClientState
from ..model.message import Message
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings
from .partition_consumer import PartitionConsumer
from .receiver_queue import ReceiverQueue


class PartitionConsumers:
    """The PartitionConsumers of one consumer or reader, and the receiver queue that they share."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.all: list[PartitionConsumer] = []
        self.inbox = ReceiverQueue()
        self._watcher: PartitionsWatcher | None = None
        self._settings = settings
        self._by_topic: dict[str, PartitionConsumer] = {}

    # ------------------------------------------------------------------------------ who belongs to it
    def queue_size_each(self, more: int = 0) -> int:
        """Returns how many messages of one partition may wait: `receiver_queue_size`, or its share of the limit for
        all partitions. `more`: partitions that will be added."""
        total = self._settings.max_total_receiver_queue_size_across_partitions
        return max(1, min(self._settings.receiver_queue_size, total // max(1, len(self.all) + more)))

    async def open(self, new: Sequence[PartitionConsumer]) -> None:
        self._add(new)
        await _open(new)

    async def add_partitions(self, new: Sequence[PartitionConsumer]) -> None:
        """Opens partitions and adds them. Until all are open each has a receiver queue of its own, so that no caller
        receives a message of a partition that is not added yet, and a partition that cannot be opened closes only its
        own queue."""
        await _open(new)
        self._add(new)
        self._share_out()
        for each in new:
            each.set_receiver_queue(self.inbox)

    def _add(self, new: Sequence[PartitionConsumer]) -> None:
        self.all.extend(new)
        self._by_topic.update({each.topic.full: each for each in new})

    def remove(self, consumer: PartitionConsumer) -> bool:
        """Removes a partition. Returns False if it was removed already."""
        if self._by_topic.pop(consumer.topic.full, None) is None:
            return False
        self.all.remove(consumer)
        self._share_out()
        if self._watcher is not None:
            self._watcher.remove(consumer.topic.base)
        return True

    def _share_out(self) -> None:
        share = self.queue_size_each()
        for each in self.all:
            each.resize_queue(share)

    # ------------------------------------------------------------------------------ which one
    def missing_topics(self, topics: Sequence[TopicName]) -> list[TopicName]:
        return [topic for topic in topics if topic.full not in self._by_topic]

    def find_by_message(self, message: Message) -> PartitionConsumer | None:
        """Returns the PartitionConsumer that received the message, or None if it was removed."""
        consumer = message.entry.consumer
        found = self._by_topic.get(consumer.topic.full)
        return found if found is consumer else None

    def find_by_id(self, which: MessageId) -> PartitionConsumer:
        """Returns the PartitionConsumer of the partition of a message id. Raises OperationNotSupported, as Pulsar's
        client does, if the id does not say which partition; InvalidMessage if that partition is not one of these."""
        if which.partition() >= 0 and all(each.topic.partition != which.partition() for each in self.all):
            raise InvalidMessage(f"{which!r} is of partition {which.partition()}, which this consumer does not have")
        if len(self.all) == 1:
            return self.all[0]
        found = self._by_topic.get(which.topic_name())
        if found is None:
            of_partition = [each for each in self.all if each.topic.partition == which.partition()]
            if len(of_partition) != 1:
                raise OperationNotSupported(f"{which!r} does not say of which topic it is: deserialize it with topic=…")
            found = of_partition[0]
        return found

    # ------------------------------------------------------------------------------ later partitions
    def watch_counts(
        self, connections: Connections, counts: dict[TopicName, int],
        grow: Callable[[TopicName, int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Starts to watch the partition counts of topics, which are `counts` now: `grow(topic, count)` is awaited when
        a topic has more."""
        self._watcher = PartitionsWatcher(connections, counts, grow)

    def watch_partitions(self, topic: TopicName, count: int) -> None:
        if self._watcher is not None:
            self._watcher.watch(topic, count)

    # ------------------------------------------------------------------------------ all of them
    def are_connected(self) -> bool:
        return all(each.core.state is PartitionClientState.CONNECTED for each in self.all)

    def are_closed(self) -> bool:
        return all(each.core.state is PartitionClientState.CLOSED for each in self.all)

    async def seek(self, to: MessageId | int) -> None:
        """Moves all partitions to MessageId.earliest, MessageId.latest or a publish time in ms; the id of a message
        moves only the partition of that message."""
        if isinstance(to, MessageId):
            everywhere = to in (MessageId.earliest, MessageId.latest)
            if not everywhere:
                check_parameters(SOUGHT, {"ledger_id": to.ledger_id(), "entry_id": to.entry_id()})
            await _seek(self.all if everywhere else [self.find_by_id(to)], to)
        elif isinstance(to, int) and not isinstance(to, bool):
            check_parameter("a publish time", PUBLISH_TIME, to)
            await _seek(self.all, to)
        else:
            raise WrongType(f"seek takes a MessageId or ms since the epoch, not {shorten_value(to)}")

    def abort(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        for each in self.all:
            each.abort()

    async def close(self) -> None:
        try:
            if self._watcher is not None:
                await self._watcher.close()
            await close_all(self.all)
        except BaseException:  # the close was interrupted: they end at once
            self.abort()
            raise


async def _seek(partitions: Sequence[PartitionConsumer], to: MessageId | int) -> None:
    await asyncio.gather(*(each.requests.seek(to) for each in partitions))


async def _open(new: Sequence[PartitionConsumer]) -> None:
    try:
        outcomes = await asyncio.gather(*(each.open() for each in new), return_exceptions=True)
    except BaseException:  # they have no waiter any more
        for each in new:
            each.abort()
        raise
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        with suppress(Exception):  # why it was not opened is what the caller learns
            await close_all(new)
        raise errors[0]


def timeout_to_seconds(timeout_millis: int | None) -> float | None:
    """Checks `timeout_millis` and returns it in seconds; None for None. Raises if it is no valid number of
    milliseconds."""
    if timeout_millis is None:
        return None
    check_parameter("timeout_millis", TIMEOUT_MS, timeout_millis)
    return timeout_millis / 1000
