"""Reading by index, for programs that store their own offsets, such as the Spark connector (`Client.read_range`). Also
the reader of a topic from a given message on (`Reader`).

A read needs no subscription and no permits: the client asks the broker that owns the partition for a range of message
indexes. If that broker is down or no longer owns the partition, the client looks up the owner again, with back-off,
until the operation's deadline. The read then continues after the last entry that arrived.

The deadline begins anew each time the program asks for more entries. A broker ends a stream that is not read for
`unread_s` (earlier while its memory is short), and a program that paused longer can continue all the same. Errors:
TopicNotFound and other permanent errors at once, Unavailable or TimedOut at the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_batch, decode_properties, parse_header, split_broker_part
from ...proto.errors import ConnectionLost, CorruptEntry, MagnetarError, TimedOut, from_wire
from ...proto.names import TopicName
from ...runtime.network import EndOfStream, Stream, find_rpc
from ..common.checks import check_parameter
from ..common.closing import ClosedAfterAsyncWith
from ..common.errors import AlreadyClosed, CryptoError, run_translating_errors
from ..connect.connections import Connections
from ..core.effects import SeekIndex
from ..model.encryption import Decryptor, KeyReader
from ..model.message import Message
from ..model.message_id import MessageId, UncheckedMessageId
from ..model.options import ReaderStart
from ..model.settings import ConsumerSettings
from .consumer import INDEX_CHECK, PARTITION_CHECK, PartitionConsumers, timeout_to_seconds
from .partition_consumer import PartitionConsumer
from .receiver_queue import ReceiverQueue, fetch_writer_schemas

RANGE_REQUEST_BYTES = 32 << 20
"""Bytes that are requested at a time; the flow control of the stream bounds the bytes in memory."""


@dataclass(frozen=True, slots=True)
class IndexedMessage:
    """A message that `StoredEntry.messages` returns, with its index in the partition. `key`: empty if it has none.
    Times are in ms since the epoch: `publish_time_ms` is by the producer's clock, `event_time_ms` is what the program
    set."""

    index: int  # dense in its partition, from 0
    message_id: MessageId
    key: str
    properties: dict[str, str]
    publish_time_ms: int
    event_time_ms: int  # 0: not set
    payload: bytes | None  # None: a message without a value


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A stored entry, which a producer sent as one unit: one message, a batch, or a chunk of a large message.
    `ledger_id` and `entry_id` are its position.

    `data` has the layout of proto/entry.py, for programs that parse entries column by column. It is decrypted if
    `read_range` was given a `crypto_key_reader` that has the private key."""

    partition: int  # -1: the topic is not partitioned
    ledger_id: int
    entry_id: int
    data: bytes

    @property
    def end_index(self) -> int:
        """Returns the index that follows the index of the last message of the entry. Raises CorruptEntry if the entry
        is damaged."""
        return split_broker_part(self.data)[0] + 1

    def messages(self) -> list[IndexedMessage]:
        """Returns all messages of the entry, also those outside the range that was read. Raises CorruptEntry if the
        entry is damaged, CryptoError if it is still encrypted."""
        last, _, client_part = split_broker_part(self.data)
        header = parse_header(client_part)
        if header.metadata.encryption_param:
            raise CryptoError(f"entry {self.ledger_id}:{self.entry_id} is encrypted, and no private key decrypts it")
        found = decode_batch(header, client_part)
        first = last + 1 - len(found)
        return [
            IndexedMessage(
                first + at, UncheckedMessageId(self.partition, self.ledger_id, self.entry_id,
                at if header.batched else -1),
                about.partition_key, decode_properties(about), header.publish_time,
                about.event_time, None if about.null_value else payload,
            )
            for at, (about, payload) in enumerate(found)
        ]  # fmt: skip


class ClientRangeReader:
    """Reads the entries of a partition that contain a range of message indexes. `keys`: decrypts the entries; None:
    they stay encrypted. Belongs to one event loop, as its `connections` do."""

    def __init__(self, connections: Connections, keys: KeyReader | None = None) -> None:
        self._connections = connections
        self._decryptor = Decryptor(keys, connections.world.clock.monotonic) if keys is not None else None

    async def read(
        self, topic: TopicName, first: int, end: int, incarnation: int = 0
    ) -> AsyncGenerator[list[StoredEntry], None]:
        """Yields, in order, lists of the entries that contain any of the messages with the indexes `first` … `end - 1`.
        Ends early if the topic ends before `end`. `incarnation`: the topic's incarnation to read; 0: any. Raises
        TopicNotFound if the topic was deleted and created again since that incarnation. Other permanent errors are
        raised at once, too; Unavailable or TimedOut when no entry has arrived for the operation time-out."""
        timeout_s = self._connections.settings.operation_timeout_s
        now, backoff = self._connections.world.clock.monotonic, self._connections.backoff()
        at, deadline = first, now() + timeout_s
        while True:
            try:
                async for entries, next_index in self._once(topic, at, end, incarnation):
                    at = max(at, next_index)
                    if entries:
                        yield entries
                    backoff.reset()
                    deadline = now() + timeout_s  # here: its program may take hours over them
                return
            except MagnetarError as error:
                delay = backoff.next_delay_s()
                if not error.retryable or now() + delay > deadline:
                    raise
                await asyncio.sleep(delay)

    async def _once(
        self, topic: TopicName, first: int, end: int, incarnation: int
    ) -> AsyncGenerator[tuple[list[StoredEntry], int], None]:
        """Reads over one stream. Yields (entries, first index not read yet) as they arrive, until the range or the
        topic ends."""
        channel = await self._connections.find_owner_channel(topic)
        stream: Stream[wire.ReadRequest, wire.ReadReply] = channel.stream(find_rpc("Broker", "Read"))
        at, request_id = first, 0
        try:
            while at < end:
                request_id += 1
                stream.send_nowait(
                    wire.ReadRequest(
                        request_id=request_id,
                        topic=str(topic),
                        first_index=at,
                        end_index=end,
                        bytes_max=RANGE_REQUEST_BYTES,
                        incarnation=incarnation,
                    )
                )
                done: wire.ReadDone | None = None
                while done is None:
                    entries, done = await self._receive(stream, topic)
                    if entries or done is not None:
                        yield entries, done.next_index if done else entries[-1].end_index
                if done.next_index <= at:
                    return
                at = done.next_index
        finally:
            stream.cancel()

    async def _receive(
        self, stream: Stream[wire.ReadRequest, wire.ReadReply], topic: TopicName
    ) -> tuple[list[StoredEntry], wire.ReadDone | None]:
        try:
            async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                replies = await stream.receive()
        except EndOfStream as error:
            raise ConnectionLost(f"the broker ended the read of {topic}") from error
        except TimeoutError as error:
            raise TimedOut(f"the read of {topic} got nothing more in time") from error
        done = next((reply.done for reply in replies if reply.HasField("done")), None)
        if done is not None and done.HasField("error"):
            raise from_wire(done.error)
        deliveries = [reply.entry for reply in replies if reply.HasField("entry")]
        clear = self._in_clear
        return [StoredEntry(topic.partition, d.ledger_id, d.entry_id, clear(d.entry)) for d in deliveries], done

    def _in_clear(self, entry: bytes) -> bytes:
        """Returns the entry decrypted if possible. An entry that stays encrypted or is damaged is returned as it is;
        `StoredEntry.messages` then raises."""
        if self._decryptor is None:
            return entry
        try:
            return self._decryptor.decrypt_entry(entry)
        except (CryptoError, CorruptEntry):
            return entry


# -------------------------------------------------------------------------------------------------------- reader
# The reader: a topic from a given message on, without a durable subscription (asyncio).
#
#     async with await client.create_reader("flights", MessageId.earliest) as reader:
#         while await reader.has_message_available():
#             message = await reader.read_next()
#
# It starts after `start_message_id` (at it, when `start_message_id_inclusive`). After a reconnect it continues after
# the last message that was read. A partitioned topic is read as one, without an order between its partitions; those
# that are added are found and read from their beginning.


class Reader(ClosedAfterAsyncWith):
    """Reads a topic from a given message on, without a durable subscription, for asyncio; see `Client.create_reader`.

    A reader belongs to the event loop that opened it. Errors: Timeout (no message within `timeout_millis`),
    AlreadyClosed, InvalidConfiguration (a wrong parameter), ChecksumError (a damaged message). A method that asks
    brokers also raises Timeout or ConnectError if they do not answer within `operation_timeout_seconds`, and the error
    with which a broker refuses the request.
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
        """Returns a reader that is open at all partitions of the topic. If the message id `start` names a partition,
        the reader reads only that partition. `inclusive`: whether it reads the message `start` itself. If a partition
        cannot be opened, closes the others and raises its error. Raises TopicNotFound if the topic does not exist and
        is not created by its first use, and the errors of `Connections.fetch_partition_count`."""
        reader = cls(connections, topic, settings, name)
        partitions = await connections.fetch_partition_count(topic)
        names = [topic.with_partition(i) for i in range(partitions)] or [topic]
        if partitions and start.partition() >= 0:
            names = [each for each in names if each.partition == start.partition()]
        begin = ReaderStart(start, inclusive)
        await reader._partitions.open([reader._consumer(each, begin, reader.inbox, len(names)) for each in names])
        whole = partitions if len(names) == partitions else 0
        reader._partitions.watch_partition_counts(connections, {topic: whole}, reader._grow)
        return reader

    def _consumer(self, topic: TopicName, start: ReaderStart, inbox: ReceiverQueue, more: int) -> PartitionConsumer:
        consumer = PartitionConsumer(
            self._connections, topic, self._name, self._settings, inbox,
            queue_size=self._partitions.queue_size_per_partition(more),
            start=start,
        )  # fmt: skip
        consumer.on_connected = self._connected
        consumer.on_anew = self._anew
        return consumer

    async def _grow(self, topic: TopicName, found: int) -> None:
        """Adds partitions, which are read from their beginning."""
        missing = self._partitions.find_missing_topics([topic.with_partition(i) for i in range(found)])
        begin = ReaderStart(MessageId.earliest, False)
        await self._partitions.add_partitions(
            [self._consumer(each, begin, ReceiverQueue(), len(missing)) for each in missing]
        )

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
        """Returns whether the readers of all partitions are connected to their brokers."""
        return self._partitions.are_all_connected()

    @property
    def is_over(self) -> bool:
        """Returns whether the reader is closed or has failed, that is, all its partitions are closed."""
        return self._partitions.are_all_closed()

    def on_taken(self, message: Message) -> Message:
        """Records that the application receives `message`, and returns the message. After a reconnect the reader
        continues after this message. Acknowledges the message in the background, so that the broker need no longer keep
        it for this reader."""
        consumer: Any = message.entry.consumer
        consumer.core.last_taken = message.message_id()
        if message.permits:
            entry = message.entry  # the cursor may go on; that is grouped like any ack
            consumer.acknowledge(MessageId(-1, entry.ledger_id, entry.entry_id, _chunks=entry.chunks))
        return message

    async def read_next(self, timeout_millis: int | None = None) -> Message:
        """Waits for the next message and returns it; after a reconnect the reader continues after this message. Raises
        Timeout if no message arrives within `timeout_millis` milliseconds; None: waits without a limit. Raises
        AlreadyClosed, or the error that ended the reader, if the reader has ended; ChecksumError for a damaged message;
        InvalidConfiguration for a wrong `timeout_millis`; a broker's error if the message's schema must be fetched."""
        if timeout_millis is not None and (type(timeout_millis) is not int or timeout_millis < 0):
            timeout_to_seconds(timeout_millis)
        message = self.inbox.take_nowait()
        if message is None:
            message = await self.inbox.take_message(timeout_to_seconds(timeout_millis))
        if self._settings.schema.by_writer:
            await fetch_writer_schemas(self.inbox, message)
        return self.on_taken(message)

    async def wait_available(self) -> None:
        """Waits until a message waits in the client, and does not remove it. Raises NoMessageAvailable if the brokers
        have none now; Timeout or ConnectError if a broker does not answer; AlreadyClosed, or the error that ended the
        reader, if the reader has ended; OperationNotSupported if a broker is too old."""
        await run_translating_errors(self._partitions.wait_available())

    async def has_message_available(self) -> bool:
        """Returns whether the topic has a message after the last one that was read. Asks the brokers if no message
        waits in the client. Raises Timeout or ConnectError if a broker does not answer, AlreadyClosed if the reader is
        closed."""
        if len(self.inbox):
            return True
        found = await run_translating_errors(asyncio.gather(*(self.has_more(each) for each in self.partitions)))
        return any(found) or len(self.inbox) > 0

    async def has_more(self, consumer: PartitionConsumer) -> bool:
        """Asks the broker, and returns whether the partition of `consumer` has a message after the last one that was
        read, or after the reader's start. Raises the errors of `ConsumerRequests`, untranslated."""
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
        """Moves the reader to a message id, MessageId.earliest, MessageId.latest, or a time in ms since the epoch. The
        time is that at which a broker stored the message, not `publish_timestamp()`, which is the producer's clock.
        Returns when the brokers have moved the reader.

        The id of a message moves only the partition of that message; the other partitions keep their positions. Raises
        InvalidMessage if the reader does not read that partition; OperationNotSupported if the id does not name its
        partition; InvalidConfiguration for another argument; Timeout or ConnectError if a broker does not answer;
        AlreadyClosed if the reader is closed."""
        await self._partitions.seek(messageid)

    async def seek_index(self, index: int, *, partition: int | str | None = None) -> None:
        """Moves the reader in one partition to the message with this index, or to the first message after it that is
        kept. `partition`: its number, or the full name of its topic; needed if the reader has several. Raises
        InvalidConfiguration if the reader has no such partition, or `index` is negative; InvalidTopicName if
        `partition` is no name of a topic; Timeout or ConnectError if the broker does not answer; AlreadyClosed if the
        reader is closed. Returns when the broker has moved the reader."""
        check_parameter("index", INDEX_CHECK, index)
        check_parameter("partition", PARTITION_CHECK, partition)
        await run_translating_errors(self._partitions.find_partition(partition).requests.seek(SeekIndex(index)))

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.read_next()
            except AlreadyClosed:
                if self._closed:
                    return
                raise

    def abort(self) -> None:
        """Ends the reader at once, without informing the brokers."""
        self._partitions.abort()

    async def close(self) -> None:
        """Closes the reader at its brokers, and waits until they have answered; their errors are logged, not raised.
        Messages that wait in the client are dropped."""
        self._closed = True
        await self._partitions.close()


def _order_taken(id_: MessageId) -> tuple[int, int, int]:
    whole = id_.batch_index() < 0 or id_.batch_index() + 1 == id_.batch_size()
    return id_.ledger_id(), id_.entry_id(), 1 << 31 if whole else id_.batch_index()


def _order(id_: wire.MessageId) -> tuple[int, int, int]:
    """Returns a key that orders message ids of one partition; the id of a whole entry counts as that of its last
    message."""
    return id_.ledger_id, id_.entry_id, id_.batch_index if id_.batch_index >= 0 else 1 << 31
