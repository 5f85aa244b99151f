"""The reader: a topic from a given message on, without a durable subscription (asyncio).

    async with await client.create_reader("flights", MessageId.earliest) as reader:
        while await reader.has_message_available():
            message = await reader.read_next()

It starts after `start_message_id` (at it, when `start_message_id_inclusive`). After a reconnect it continues after the
last message that was read. A partitioned topic is read as one, without an order between its partitions; those that are
added are found and read from their beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.names import TopicName
from ..common.closing import ClosedAfterAsyncWith
from ..common.errors import AlreadyClosed
from ..connect.connections import Connections
from ..model.message import Message
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings
from ..model.start import Start
from .batch_receive import decodable
from .partition_consumer import PartitionConsumer
from .partition_consumers import PartitionConsumers, check_timeout
from .receiver_queue import ReceiverQueue


class Reader(ClosedAfterAsyncWith):
    """Reads a topic from a given message on, without a durable subscription, for asyncio; see `Client.create_reader`.

    It belongs to the event loop that opened it. Errors: Timeout (no message within `timeout_millis`), AlreadyClosed,
    ChecksumError (a damaged message).
    """

    def __init__(
        self, connections: Connections, topic: TopicName, settings: ConsumerSettings, name: str
    ) -> None:
        self.on_connected: Callable[[PartitionConsumer], None] | None = None
        self.on_anew: Callable[[PartitionConsumer], None] | None = None  # its topic was deleted and made anew
        self._partitions = PartitionConsumers(settings)
        self.partitions, self.inbox = self._partitions.all, self._partitions.inbox
        self._connections = connections
        self._topic = topic
        self._settings = settings
        self._name = name
        self._closed = False

    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, start: MessageId, settings: ConsumerSettings,
        *, name: str, inclusive: bool,
    ) -> Reader:  # fmt: skip
        """Opens all partitions, or the one of `start`."""
        reader = cls(connections, topic, settings, name)
        partitions = await connections.partitions(topic)
        names = [topic.with_partition(i) for i in range(partitions)] or [topic]
        if partitions and start.partition() >= 0:
            names = [each for each in names if each.partition == start.partition()]
        begin = Start(start, inclusive)
        await reader._partitions.open([reader._consumer(each, begin, reader.inbox, len(names)) for each in names])
        whole = partitions if len(names) == partitions else 0
        reader._partitions.watch(connections, {topic: whole}, reader._grow)
        return reader

    def _consumer(self, topic: TopicName, start: Start, inbox: ReceiverQueue, more: int) -> PartitionConsumer:
        consumer = PartitionConsumer(
            self._connections, topic, self._name, self._settings, inbox, queue_size=self._partitions.share(more),
            start=start,
        )  # fmt: skip
        consumer.on_connected = self._connected
        consumer.on_anew = self._anew
        return consumer

    async def _grow(self, topic: TopicName, found: int) -> None:
        """Adds partitions, which are read from their beginning."""
        missing = self._partitions.missing([topic.with_partition(i) for i in range(found)])
        begin = Start(MessageId.earliest, False)
        await self._partitions.grow([self._consumer(each, begin, ReceiverQueue(), len(missing)) for each in missing])

    def _connected(self, consumer: PartitionConsumer) -> None:
        if self.on_connected is not None:
            self.on_connected(consumer)

    def _anew(self, consumer: PartitionConsumer) -> None:
        if self.on_anew is not None:
            self.on_anew(consumer)

    def topic(self) -> str:
        """Returns the full name of the topic."""
        return self._topic.full

    def is_connected(self) -> bool:
        """Whether all partitions are connected."""
        return self._partitions.are_connected()

    @property
    def is_over(self) -> bool:
        """Whether all its partitions are closed."""
        return self._partitions.are_closed()

    def note(self, message: Message) -> Message:
        """Notes that the application takes the message: a reconnect starts after it; the broker may forget it."""
        consumer: Any = message.entry.consumer
        consumer.core.last_taken = message.message_id()
        if message.permits:
            entry = message.entry  # the cursor may go on; that is grouped like any ack
            consumer.acknowledge(MessageId(-1, entry.ledger_id, entry.entry_id, _chunks=entry.chunks))
        return message

    async def read_next(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none arrived within `timeout_millis`; None: waits without a limit."""
        if timeout_millis is not None and (type(timeout_millis) is not int or timeout_millis < 0):
            check_timeout(timeout_millis)
        message = self.inbox.take_nowait()
        if message is None:
            message = await self.inbox.take(check_timeout(timeout_millis))
        if self._settings.schema.by_writer:
            await decodable(self.inbox, message)
        return self.note(message)

    async def has_message_available(self) -> bool:
        """Whether a message follows the last one read; asks the broker when no message waits in the client."""
        if len(self.inbox):
            return True
        found = await asyncio.gather(*(self.has_more(each) for each in self.partitions))
        return any(found) or len(self.inbox) > 0

    async def has_more(self, consumer: PartitionConsumer) -> bool:
        """Whether a message of that partition follows the last one read; asks its broker."""
        reply = await consumer.requests.last_message_id()
        if reply.index < 0 or reply.id.entry_id < 0:
            return False
        last = _order(reply.id)
        if consumer.core.last_taken is not None:
            return last > _order_taken(consumer.core.last_taken)
        start = consumer.deliveries.start
        if start is None or start.id == MessageId.latest:
            inclusive = start is not None and start.inclusive
            mark = (reply.mark_delete.ledger_id, reply.mark_delete.entry_id)
            return mark < last[:2] or inclusive
        first = _order(start.id.to_wire())
        return last >= first if start.inclusive else last > first

    async def seek(self, messageid: MessageId | int) -> None:
        """Moves to a message id, MessageId.earliest, .latest, or a publish time in ms since the epoch.

        The id of a message moves its own partition; the others keep their positions.
        """
        await self._partitions.seek(messageid)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.read_next()
            except AlreadyClosed:
                if self._closed:
                    return
                raise

    def abort(self) -> None:
        """Ends at once."""
        self._partitions.abort()

    async def close(self) -> None:
        """Closes it; what waits is thrown away."""
        self._closed = True
        await self._partitions.close()


def _order_taken(id_: MessageId) -> tuple[int, int, int]:
    whole = id_.batch_index() < 0 or id_.batch_index() + 1 == id_.batch_size()
    return id_.ledger_id(), id_.entry_id(), 1 << 31 if whole else id_.batch_index()


def _order(id_: wire.MessageId) -> tuple[int, int, int]:
    """Ids of one partition; a whole entry counts as its last message."""
    return id_.ledger_id, id_.entry_id, id_.batch_index if id_.batch_index >= 0 else 1 << 31
