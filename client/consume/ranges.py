"""Reading by index: for those who keep their own offsets, such as the Spark connector.

No subscription, no permits: a partition is asked what it has (`offsets`) and for ranges of it (`read`). A broker that
is gone or gave the topic away is looked up again, with back-off, until the deadline of the operation; a read goes on
behind the last entry that came. Errors: TopicNotFound and the like at once, Unavailable or TimedOut at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ...proto import wire_pb2 as wire
from ...proto.entry import split_broker_part
from ...proto.errors import ConnectionLost, MagnetarError, TimedOut, from_wire
from ...proto.names import NamespaceName, TopicName
from ...runtime.network import EndOfStream, Stream, rpc
from ..connect.connections import Connections

CHUNK_BYTES = 32 << 20
"""Asked for at a time; the stream's own flow control bounds what is in memory."""


class RangeReader:
    """Belongs to one event loop, as its `connections` do."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def partitions(self, topic: TopicName) -> list[TopicName]:
        """The partitions of a topic that exists; the topic itself when it has none."""
        reply: wire.PartitionsReply = await self._connections.ask(
            "Partitions", wire.PartitionsRequest(topic=str(topic), create=False)
        )
        return [topic.with_partition(i) for i in range(reply.partitions)] or [topic]

    async def topics(self, namespace: NamespaceName) -> list[TopicName]:
        """Those that can be read again: persistent ones."""
        request = wire.ListTopicsRequest(namespace=str(namespace))
        reply: wire.Names = await self._connections.ask("ListTopics", request, service="Admin")
        return [topic for name in reply.names if (topic := TopicName.parse(name)).persistent]

    async def offsets(
        self, topic: TopicName, times_ms: Sequence[int] = (), subscription: str = ""
    ) -> wire.OffsetsReply:
        """What one partition holds; `subscription` is created at the earliest message when it does not exist."""
        request = wire.OffsetsRequest(topic=str(topic), publish_times_ms=times_ms, subscription=subscription)
        reply: wire.OffsetsReply = await self._connections.ask_owner(topic, "Offsets", request)
        return reply

    async def advance(self, topic: TopicName, subscription: str, index: int) -> None:
        """Acknowledges everything before `index`, durably."""
        request = wire.AdvanceSubscriptionRequest(topic=str(topic), subscription=subscription, index=index)
        await self._connections.ask_owner(topic, "AdvanceSubscription", request)

    async def read(self, topic: TopicName, first: int, end: int) -> AsyncGenerator[list[wire.Delivery], None]:
        """The entries that hold any of the messages `first` … `end - 1`, in order; ends early where the topic does."""
        timeout_s = self._connections.settings.operation_timeout_s
        loop, backoff = asyncio.get_running_loop(), self._connections.backoff()
        at, deadline = first, loop.time() + timeout_s
        while True:
            try:
                async for entries, next_index in self._read_once(topic, at, end):
                    at, deadline = max(at, next_index), loop.time() + timeout_s
                    backoff.reset()
                    if entries:
                        yield entries
                return
            except MagnetarError as error:
                delay = backoff.next_s()
                if not error.retryable or loop.time() + delay > deadline:
                    raise
                await asyncio.sleep(delay)

    async def _read_once(
        self, topic: TopicName, first: int, end: int
    ) -> AsyncGenerator[tuple[list[wire.Delivery], int], None]:
        """One stream: (entries, first index not read yet) as they come, until the range or the topic ends."""
        channel = await self._connections.owner(topic)
        stream: Stream[wire.ReadRequest, wire.ReadReply] = channel.stream(rpc("Broker", "Read"))
        at, request_id = first, 0
        try:
            while at < end:
                request_id += 1
                stream.send_nowait(
                    wire.ReadRequest(
                        request_id=request_id, topic=str(topic), first_index=at, end_index=end, bytes_max=CHUNK_BYTES
                    )
                )
                done: wire.ReadDone | None = None
                while done is None:
                    entries, done = await self._receive(stream, topic)
                    if entries or done is not None:
                        yield entries, done.next_index if done else split_broker_part(entries[-1].entry)[0] + 1
                if done.next_index <= at:
                    return
                at = done.next_index
        finally:
            stream.cancel()

    async def _receive(
        self, stream: Stream[wire.ReadRequest, wire.ReadReply], topic: TopicName
    ) -> tuple[list[wire.Delivery], wire.ReadDone | None]:
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
        return [reply.entry for reply in replies if reply.HasField("entry")], done
