"""Reading by index: for those who keep their own offsets, such as the Spark connector.

No subscription, no permits: a partition is asked what it has (`offsets`) and for ranges of it (`read`). A broker that
is gone or gave the topic away is looked up again, with back-off, until the deadline of the call; a read goes on behind
the last entry that came. Errors: TopicNotFound, Unavailable or TimedOut at the deadline, InvalidName.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ..proto import wire_pb2 as wire
from ..proto.entry import split_broker_part
from ..proto.errors import MagnetarError, TimedOut, from_wire
from ..proto.names import NamespaceName, TopicName
from ..runtime.network import Channel, EndOfStream, Endpoint, Stream, rpc
from ..runtime.world import World

T = TypeVar("T")
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
CALL_S = 10.0
CHUNK_BYTES = 32 << 20
"""Asked for at a time; the stream's own flow control bounds what is in memory."""


class RangeReader:
    """One connection to each broker that is needed. Not safe to share between event loops."""

    def __init__(self, world: World, endpoints: Sequence[Endpoint], timeout_s: float) -> None:
        self._world, self._endpoints, self._timeout_s = world, list(endpoints), timeout_s
        self._channels: dict[Endpoint, Channel] = {}
        self._owners: dict[TopicName, Endpoint] = {}

    def _channel(self, endpoint: Endpoint) -> Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = self._world.network.connect(endpoint)
        return self._channels[endpoint]

    async def _retry(self, attempt: Callable[[int], Awaitable[T]], what: str) -> T:
        """`attempt(n)` until it succeeds, fails for good, or the deadline is over."""
        loop = asyncio.get_running_loop()
        deadline, delay, number = loop.time() + self._timeout_s, RETRY_FIRST_S, 0
        while True:
            try:
                return await attempt(number)
            except MagnetarError as error:
                if not error.retryable or loop.time() + delay > deadline:
                    raise
                if loop.time() > deadline:
                    raise TimedOut(f"{what}: no answer in {self._timeout_s:g} s") from error
            await asyncio.sleep(delay)
            delay, number = min(delay * 2, RETRY_MAX_S), number + 1

    async def _any(self, service: str, method: str, request: object) -> object:
        """A call that every broker answers."""

        async def attempt(number: int) -> object:
            channel = self._channel(self._endpoints[number % len(self._endpoints)])
            return await channel.call(rpc(service, method), request, timeout_s=CALL_S)

        return await self._retry(attempt, method)

    async def _owner(self, topic: TopicName) -> Channel:
        if topic not in self._owners:
            reply = await self._any("Broker", "Lookup", wire.LookupRequest(topic=str(topic)))
            assert isinstance(reply, wire.LookupReply)
            self._owners[topic] = Endpoint.parse(reply.owner)
        return self._channel(self._owners[topic])

    async def _at_owner(self, topic: TopicName, method: str, request: object) -> object:
        async def attempt(_number: int) -> object:
            try:
                return await (await self._owner(topic)).call(rpc("Broker", method), request, timeout_s=CALL_S)
            except MagnetarError:
                self._owners.pop(topic, None)
                raise

        return await self._retry(attempt, f"{method} {topic}")

    async def partitions(self, topic: TopicName, *, create: bool = False) -> list[TopicName]:
        """The partitions of a topic; the topic itself when it has none."""
        reply = await self._any("Broker", "Partitions", wire.PartitionsRequest(topic=str(topic), create=create))
        assert isinstance(reply, wire.PartitionsReply)
        return [topic.with_partition(i) for i in range(reply.partitions)] or [topic]

    async def topics(self, namespace: NamespaceName) -> list[TopicName]:
        reply = await self._any("Admin", "ListTopics", wire.ListTopicsRequest(namespace=str(namespace)))
        assert isinstance(reply, wire.Names)
        return [TopicName.parse(name) for name in reply.names]

    async def offsets(
        self, topic: TopicName, times_ms: Sequence[int] = (), subscription: str = ""
    ) -> wire.OffsetsReply:
        """What one partition holds; `subscription` is created at the earliest message when it does not exist."""
        request = wire.OffsetsRequest(topic=str(topic), publish_times_ms=times_ms, subscription=subscription)
        reply = await self._at_owner(topic, "Offsets", request)
        assert isinstance(reply, wire.OffsetsReply)
        return reply

    async def advance(self, topic: TopicName, subscription: str, index: int) -> None:
        """Acknowledges everything before `index`, durably."""
        request = wire.AdvanceSubscriptionRequest(topic=str(topic), subscription=subscription, index=index)
        await self._at_owner(topic, "AdvanceSubscription", request)

    async def read(self, topic: TopicName, first: int, end: int) -> AsyncIterator[list[wire.Delivery]]:
        """The entries that hold any of the messages `first` … `end - 1`, in order; ends early where the topic does."""
        at, failures = first, 0
        while at < end:
            try:
                async for entries, next_index in self._read_once(topic, at, end):
                    at, failures = max(at, next_index), 0
                    if entries:
                        yield entries
                return
            except MagnetarError as error:
                self._owners.pop(topic, None)
                failures += 1
                if not error.retryable or failures * RETRY_MAX_S > self._timeout_s:
                    raise
                await asyncio.sleep(min(RETRY_FIRST_S * 2**failures, RETRY_MAX_S))

    async def _read_once(
        self, topic: TopicName, first: int, end: int
    ) -> AsyncIterator[tuple[list[wire.Delivery], int]]:
        """One stream: (entries, first index not read yet) as they come, until the end of the range or of the topic."""
        stream: Stream[wire.ReadRequest, wire.ReadReply] = (await self._owner(topic)).stream(rpc("Broker", "Read"))
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
                    async with asyncio.timeout(self._timeout_s):
                        replies = await stream.receive()
                    entries = [reply.entry for reply in replies if reply.HasField("entry")]
                    done = next((reply.done for reply in replies if reply.HasField("done")), None)
                    if done is not None and done.HasField("error"):
                        raise from_wire(done.error)
                    reached = done.next_index if done is not None else split_broker_part(entries[-1].entry)[0] + 1
                    yield entries, reached
                if done.next_index <= at:
                    return
                at = done.next_index
        except EndOfStream as error:
            raise TimedOut(f"the broker ended the read of {topic} at {at}") from error
        except TimeoutError as error:
            raise TimedOut(f"read of {topic} at {at}: nothing came in {self._timeout_s:g} s") from error
        finally:
            stream.cancel()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            with suppress(MagnetarError):
                await channel.close()
