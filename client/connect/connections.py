"""Connections: one channel per broker, questions that any broker answers, and who owns a topic.

Every operation has one deadline (`operation_timeout_s`) that bounds all its attempts; between them it backs off.
An attempt that may succeed elsewhere goes to the next endpoint of the service URL, and to a silent one last
(silence.py). Raises the last error at the deadline, and at once an error that will stay (`retryable` is False). Until a
broker was reached it gives up sooner (client/connect/first_contact.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import (
    ConnectionLost,
    MagnetarError,
    NotOwner,
    TimedOut,
)
from ...proto.names import TopicName
from ...runtime.access import NOTHING, CallerAccess
from ...runtime.network import Channel, Endpoint, rpc
from ...runtime.world import World
from ..common.fork import connected
from ..common.receive_memory import RECEIVE_BYTES, ReceiveMemory
from ..common.send_memory import SendMemory
from ..common.wakes import Wakes
from ..core.backoff import Backoff
from ..model.settings import ClientSettings
from .broker_stream import BrokerStream
from .discovery import Discovery
from .first_contact import FirstContact, how_unreached
from .service_url import ServiceUrl
from .silence import UNANSWERED_S, Silence

T = TypeVar("T")

TOLD_MAX = 1000
"""Owners that wait for their first use: of topics that are being opened, and of some that were only asked about."""


class Connections:
    """The connections of one client."""

    def __init__(
        self, world: World, url: ServiceUrl, settings: ClientSettings, access: CallerAccess = NOTHING
    ) -> None:
        assert url.endpoints, "a service URL names at least one broker"
        self.world = world
        self._access = access
        self.settings = settings
        limit = settings.memory_limit_bytes
        self.memory = ReceiveMemory(RECEIVE_BYTES if limit is None else limit)
        self.send_memory: SendMemory | None = None  # it has no bound
        if limit:
            self.send_memory = self.memory.producers = SendMemory(limit)
            self.send_memory.claimed = lambda: self.memory.claimed_bytes
        self._discovery = Discovery(url, world.network, access, settings.connection_timeout_s)
        self._endpoints: Sequence[Endpoint] = url.endpoints
        self._next = world.rng.randrange(len(self._endpoints))
        self._channels: dict[Endpoint, Channel] = {}
        self._streams: dict[Endpoint, BrokerStream] = {}
        self._silence = Silence(world.clock.monotonic, self._known, self._asked_owner)
        self._told: dict[TopicName, Channel] = {}  # owners that were told with the partitions, for the first use
        self._wakes: Wakes | None = None
        self.transactions: object | None = None  # of the client (client/transactions/), when there are some
        self.halves: object | None = None  # … the same of half messages
        self.make_halves: Callable[[Connections], Any] | None = None  # when they are first used
        self._closed = False
        self.why_closed = "the client was shut down"
        self.with_the_loop: Callable[[], Callable[[], object] | None] = lambda: None  # what to do when the loop ends
        self._reached = False  # a broker has answered
        self._answered = world.clock.monotonic()  # when an operation was answered last
        self._with_loop: AsyncGenerator[None, None] | None = None

    def channel(self, endpoint: Endpoint) -> Channel:
        if self._closed:
            raise ConnectionLost("the client is closed")
        channel = self._channels.get(endpoint)
        if channel is None:
            connected(self)
            channel = self._channels[endpoint] = self.world.network.connect(endpoint, self._access)
        return channel

    async def broker_stream(self, topic: TopicName) -> BrokerStream:
        """The stream to the topic's owner, after a look-up."""
        channel = await self.owner(topic)
        if self._closed:
            raise ConnectionLost("the client is closed")
        found = self._streams.get(channel.endpoint)
        if found is None:
            streams, now = self._streams, self.world.clock.monotonic
            found = BrokerStream(channel, now, lambda: streams.pop(channel.endpoint, None), self._silence)
            streams[channel.endpoint] = found
        return found

    @property
    def received_at(self) -> float:
        """Returns when a broker answered last, or sent something on a stream: in monotonic seconds."""
        return max((self._answered, *(each.received_at for each in self._streams.values())))

    @property
    def wakes(self) -> Wakes:
        """Returns the way for other threads to call into the event loop. To be called in that loop."""
        if self._wakes is None:
            self._wakes = Wakes(asyncio.get_running_loop())
        return self._wakes

    def backoff(self) -> Backoff:
        return Backoff(self.world.rng, self.settings.backoff_first_s, self.settings.backoff_last_s)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Calls `attempt()` until it succeeds, fails for good, or the operation's deadline is over."""
        now = self.world.clock.monotonic
        begun = now()
        deadline = begun + self.settings.operation_timeout_s
        backoff = self.backoff()
        first = None if self._reached else FirstContact(lambda: self._endpoints, self.settings.connection_timeout_s)
        while True:
            try:
                async with asyncio.timeout(deadline - now()):
                    done = await attempt()
                self._reached = True
                self._answered = now()
                return done
            except TimeoutError as error:
                raise TimedOut(f"no answer within {self.settings.operation_timeout_s:g} s") from error
            except MagnetarError as error:
                delay = backoff.next_s()
                if not error.retryable or self._closed or now() + delay > deadline:
                    raise
                if how_unreached(error) is not None:
                    self._discovery.forget()
                elif not isinstance(error, TimedOut):
                    self._reached = True
                if first is not None and not self._reached:
                    told = first.failed(error, now() + delay - begun)
                    if told is not None:
                        raise told from told.__cause__
            await asyncio.sleep(delay)

    async def any(self) -> Channel:
        """Returns a channel to a broker of the service URL, the next one each time that is not silent, as long as there
        is one. Raises what its discovery raises."""
        self._endpoints = await self._discovery.endpoints()
        for _ in self._endpoints:
            self._next = (self._next + 1) % len(self._endpoints)
            if not self._silence.is_silent(self._endpoints[self._next]):
                break
        return self.channel(self._endpoints[self._next])

    def _known(self) -> list[Endpoint]:
        return list(dict.fromkeys((*self._endpoints, *self._channels)))

    async def _asked_owner(self, endpoint: Endpoint, topic: TopicName) -> Endpoint:
        return (await self._owner_by(self.channel(endpoint), topic, UNANSWERED_S)).endpoint

    async def ask(self, method: str, request: Message, *, service: str = "Broker") -> Any:
        """Asks any broker; returns its answer."""

        async def attempt() -> Any:
            asked = await self.any()
            return await asked.call(rpc(service, method), request, timeout_s=self.settings.connection_timeout_s)

        return await self.retry(attempt)

    async def ask_owner(self, topic: TopicName, method: str, request: Message, *, service: str = "Broker") -> Any:
        """Asks the owner of the topic; returns its answer. At first any broker is asked: it answers, or names the
        owner, as a look-up does; if it does neither, the owner is looked up."""
        guess = True

        async def call(channel: Channel) -> Any:
            return await channel.call(rpc(service, method), request, timeout_s=self.settings.operation_timeout_s)

        async def attempt() -> Any:
            nonlocal guess
            if guess:
                guess = False
                try:
                    return await call(await self.any())
                except NotOwner as error:
                    if (owner := error.fields.get("owner")) and not self.settings.listener_name:
                        return await call(self._named(owner, topic))
                except MagnetarError as error:
                    if not error.retryable or self._closed:
                        raise
            return await call(await self.owner(topic))

        return await self.retry(attempt)

    async def owner(self, topic: TopicName) -> Channel:
        """Makes one look-up; returns the channel to the broker that serves the topic now. A broker that does not know,
        or does not answer, costs no pause: the others are asked at once, because the one that fails may be the owner.
        An owner that was named with the partitions is used once, instead."""
        told = self._told.pop(topic, None)
        if told is not None and not self._closed:
            return told
        self._endpoints = await self._discovery.endpoints()
        for left in reversed(range(len(self._endpoints))):
            asked = await self.any()
            try:
                return await self._owner_by(asked, topic, self.settings.connection_timeout_s)
            except MagnetarError as error:
                if how_unreached(error) is not None:
                    self._discovery.forget()  # the broker may have come back at another port
                if not error.retryable or not left or self._closed:
                    raise
        raise AssertionError("a service URL names at least one broker")

    async def _owner_by(self, asked: Channel, topic: TopicName, timeout_s: float) -> Channel:
        request = wire.LookupRequest(topic=topic.full, listener=self.settings.listener_name)
        reply: wire.LookupReply = await asked.call(rpc("Broker", "Lookup"), request, timeout_s=timeout_s)
        return self._told_by(asked, reply, topic)

    def _told_by(self, asked: Channel, reply: wire.LookupReply, topic: TopicName) -> Channel:
        if not reply.here:
            return self._named(reply.owner, topic)
        with contextlib.suppress(ValueError):  # it does not tell its own address
            self._silence.named(asked.endpoint, Endpoint.parse(reply.owner))
        return asked

    def _named(self, owner: str, topic: TopicName) -> Channel:
        try:
            return self.channel(Endpoint.parse(owner))
        except ValueError as error:
            raise ConnectionLost(f"{owner!r} was named as the owner of {topic}") from error

    async def partitions(self, topic: TopicName, *, create: bool = True) -> int:
        """Returns the number of partitions; 0: not partitioned."""
        if topic.is_partition:
            return 0
        request = wire.PartitionsRequest(topic=topic.full, create=create)

        async def attempt() -> int:
            asked = await self.any()
            reply: wire.PartitionsReply = await asked.call(
                rpc("Broker", "Partitions"), request, timeout_s=self.settings.connection_timeout_s
            )
            named = reply.HasField("owner") and not self.settings.listener_name  # by the address of all
            if named and len(self._told) < TOLD_MAX:
                self._told[topic] = self._told_by(asked, reply.owner, topic)
            return reply.partitions

        return await self.retry(attempt)

    async def move(self, url: ServiceUrl, access: CallerAccess) -> None:
        """Moves to the brokers of another service URL. What is open reconnects there; a request that is under way may
        still be answered by a broker of the one before."""
        self._access = access
        self._discovery = Discovery(url, self.world.network, access, self.settings.connection_timeout_s)
        self._endpoints = url.endpoints
        await self._close_connections()

    async def _close_connections(self) -> None:
        self._told.clear()
        streams, self._streams = list(self._streams.values()), {}
        channels, self._channels = list(self._channels.values()), {}
        for stream in streams:
            await stream.close()
        for channel in channels:
            await channel.close()

    def leave_with_the_loop(self) -> None:
        """Closes the connections with the event loop, or when they are collected. To be called in that loop."""
        self._with_loop = self._until_the_loop_ends()
        with contextlib.suppress(StopIteration):  # to its first `yield`: the loop knows it from there on
            self._with_loop.__anext__().__await__().send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Closes the connections with the loop: `asyncio.run` ends generators before it closes its loop, and a client
        that was not closed is cut off here."""
        try:
            yield
        finally:
            if self._with_loop is not None:  # it was not closed before
                self.why_closed = "the event loop of the client has ended: open a client in the one that runs now"
                if (end := self.with_the_loop()) is not None:
                    end()
            self._with_loop = None
            await self.close()

    async def close(self) -> None:
        with_loop, self._with_loop = self._with_loop, None
        if with_loop is not None:
            await with_loop.aclose()
            return
        self._closed = True
        await self._close_connections()
