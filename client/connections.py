"""Connections: one channel per broker, questions that any broker answers, and who owns a topic.

Every operation has one deadline (`operation_timeout_s`) that bounds all its attempts; between them it backs off.
An attempt that may succeed elsewhere goes to the next endpoint of the service URL. Raises the last error at the
deadline, and at once an error that will stay (`retryable` is False).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from ..proto import wire_pb2 as wire
from ..proto.errors import ConnectionLost, MagnetarError, TimedOut
from ..proto.names import TopicName
from ..runtime.network import Channel, Endpoint, rpc
from ..runtime.world import World
from .core.backoff import Backoff
from .fork import connected
from .settings import ClientSettings

T = TypeVar("T")


class Connections:
    def __init__(self, world: World, endpoints: Sequence[Endpoint], settings: ClientSettings) -> None:
        assert endpoints, "a service URL names at least one broker"
        self.world = world
        self.settings = settings
        self._endpoints = list(endpoints)
        self._next = world.rng.randrange(len(self._endpoints))
        self._channels: dict[Endpoint, Channel] = {}
        self._closed = False

    def channel(self, endpoint: Endpoint) -> Channel:
        if self._closed:
            raise ConnectionLost("the client is closed")
        channel = self._channels.get(endpoint)
        if channel is None:
            connected(self)
            channel = self._channels[endpoint] = self.world.network.connect(endpoint)
        return channel

    def backoff(self) -> Backoff:
        return Backoff(self.world.rng, self.settings.backoff_first_s, self.settings.backoff_last_s)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`attempt()` until it succeeds, fails for good, or the operation's deadline is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.operation_timeout_s
        backoff = self.backoff()
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await attempt()
            except TimeoutError as error:
                raise TimedOut(f"no answer within {self.settings.operation_timeout_s:g} s") from error
            except MagnetarError as error:
                delay = backoff.next_s()
                if not error.retryable or self._closed or loop.time() + delay > deadline:
                    raise
            await asyncio.sleep(delay)

    def any(self) -> Channel:
        """To a broker of the service URL, the next one each time."""
        self._next = (self._next + 1) % len(self._endpoints)
        return self.channel(self._endpoints[self._next])

    async def ask(self, method: str, request: Message, *, service: str = "Broker") -> Any:
        """A question that every broker answers."""

        async def attempt() -> Any:
            self._next = (self._next + 1) % len(self._endpoints)
            channel = self.channel(self._endpoints[self._next])
            return await channel.call(
                rpc(service, method), request, timeout_s=self.settings.connection_timeout_s
            )

        return await self.retry(attempt)

    async def ask_owner(self, topic: TopicName, method: str, request: Message, *, service: str = "Broker") -> Any:
        """A question that the owner of the topic answers."""

        async def attempt() -> Any:
            channel = await self.owner(topic)
            return await channel.call(
                rpc(service, method), request, timeout_s=self.settings.operation_timeout_s
            )

        return await self.retry(attempt)

    async def owner(self, topic: TopicName) -> Channel:
        """One look-up; the channel to the broker that serves the topic now. A broker that does not know, or is not
        there, costs no pause: the others are asked at once, for the one that fails may be the one that is looked for.
        """
        for left in reversed(range(len(self._endpoints))):
            self._next = (self._next + 1) % len(self._endpoints)
            asked = self.channel(self._endpoints[self._next])
            try:
                return await self._owner_by(asked, topic)
            except MagnetarError as error:
                if not error.retryable or not left or self._closed:
                    raise
        raise AssertionError("a service URL names at least one broker")

    async def _owner_by(self, asked: Channel, topic: TopicName) -> Channel:
        request = wire.LookupRequest(topic=topic.full)
        reply: wire.LookupReply = await asked.call(
            rpc("Broker", "Lookup"), request, timeout_s=self.settings.connection_timeout_s
        )
        try:
            return asked if reply.here else self.channel(Endpoint.parse(reply.owner))
        except ValueError as error:
            raise ConnectionLost(f"{asked.endpoint} named {reply.owner!r} as the owner of {topic}") from error

    async def partitions(self, topic: TopicName, *, create: bool = True) -> int:
        """0: not partitioned."""
        if topic.is_partition:
            return 0
        request = wire.PartitionsRequest(topic=topic.full, create=create)
        reply: wire.PartitionsReply = await self.ask("Partitions", request)
        return reply.partitions

    async def close(self) -> None:
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
