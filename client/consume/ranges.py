"""Reading by index: for those who keep their own offsets, such as the Spark connector (`Client.read_range`).

No subscription and no permits: the owner of a partition is asked for a range of message indexes. A broker that is down
or gave the topic away is looked up again, with back-off, until the deadline of the operation; a read goes on after the
last entry that came. The deadline begins when the program asks for more: a broker cuts a stream that is not read for
`unread_s` (earlier while its memory is short), and a program that paused longer goes on all the same. Errors:
TopicNotFound and the like at once, Unavailable or TimedOut at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_batch, parse_header, properties_of, split_broker_part
from ...proto.errors import ConnectionLost, CorruptEntry, MagnetarError, TimedOut, from_wire
from ...proto.names import TopicName
from ...runtime.network import EndOfStream, Stream, rpc
from ..common.errors import CryptoError
from ..connect.connections import Connections
from ..crypto.decryptor import Decryptor
from ..crypto.key_reader import KeyReader
from ..model.message_id import KnownId, MessageId

CHUNK_BYTES = 32 << 20
"""Bytes that are asked for at a time; the stream's own flow control bounds what is in memory."""


@dataclass(frozen=True, slots=True)
class IndexedMessage:
    """A message that was read by its index."""

    index: int  # dense in its partition, from 0
    message_id: MessageId
    key: str
    properties: dict[str, str]
    publish_time_ms: int
    event_time_ms: int  # 0: not set
    payload: bytes | None  # None: a message without a value


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as it is stored, which a producer sent as one unit: one message, or a batch, or a chunk of a large
    message.

    `data` has the layout of proto/entry.py, for readers that take entries apart by columns. It is in clear where the
    read was given a `crypto_key_reader` that decrypts it.
    """

    partition: int  # -1: the topic is not partitioned
    ledger_id: int
    entry_id: int
    data: bytes

    @property
    def end_index(self) -> int:
        """Returns the index after its last message. Raises CorruptEntry."""
        return split_broker_part(self.data)[0] + 1

    def messages(self) -> list[IndexedMessage]:
        """Returns all its messages, also those outside the range that was read. Raises CorruptEntry; CryptoError: it is
        encrypted, and was not decrypted."""
        last, _, client_part = split_broker_part(self.data)
        header = parse_header(client_part)
        if header.metadata.encryption_param:
            raise CryptoError(f"entry {self.ledger_id}:{self.entry_id} is encrypted, and no private key decrypts it")
        found = decode_batch(header, client_part)
        first = last + 1 - len(found)
        return [
            IndexedMessage(
                first + at, KnownId(self.partition, self.ledger_id, self.entry_id, at if header.batched else -1),
                about.partition_key, properties_of(about), header.publish_time,
                about.event_time, None if about.null_value else payload,
            )
            for at, (about, payload) in enumerate(found)
        ]  # fmt: skip


class RangeReader:
    """Reads ranges of indexes. Belongs to one event loop, as its `connections` do."""

    def __init__(self, connections: Connections, keys: KeyReader | None = None) -> None:
        self._connections = connections
        self._decryptor = Decryptor(keys, connections.world.clock.monotonic) if keys is not None else None

    async def read(
        self, topic: TopicName, first: int, end: int, incarnation: int = 0
    ) -> AsyncGenerator[list[StoredEntry], None]:
        """The entries that hold any of the messages `first` … `end - 1`, in order; ends early where the topic does.
        `incarnation`: of the topic, which a resumed read would else not tell from one that was made anew."""
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
                delay = backoff.next_s()
                if not error.retryable or now() + delay > deadline:
                    raise
                await asyncio.sleep(delay)

    async def _once(
        self, topic: TopicName, first: int, end: int, incarnation: int
    ) -> AsyncGenerator[tuple[list[StoredEntry], int], None]:
        """Reads one stream: yields (entries, first index not read yet) as they come, until the range or the topic ends.
        """
        channel = await self._connections.owner(topic)
        stream: Stream[wire.ReadRequest, wire.ReadReply] = channel.stream(rpc("Broker", "Read"))
        at, request_id = first, 0
        try:
            while at < end:
                request_id += 1
                stream.send_nowait(
                    wire.ReadRequest(
                        request_id=request_id, topic=str(topic), first_index=at, end_index=end, bytes_max=CHUNK_BYTES,
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
        """Returns the entry decrypted, as far as that is possible: what stays encrypted, or is damaged, is told where
        its messages are taken."""
        if self._decryptor is None:
            return entry
        try:
            return self._decryptor.entry_in_clear(entry)
        except (CryptoError, CorruptEntry):
            return entry
