"""The connections of a client (`Connections`): one channel per broker, requests that any broker can answer, and
look-ups of the broker that owns a topic. Also the attempts until a first broker is reached (`FirstConnectAttempts`),
and a cache of a topic's schemas (`TopicSchemaCache`).

Every operation has one deadline (`operation_timeout_s`) for all its attempts, with a growing pause between them. If
another broker may answer better, the next attempt goes to the next endpoint of the service URL, and to a silent broker
last (client/connect/discovery.py). At the deadline the operation raises its last error; an error that is permanent
(`retryable` is False) is raised at once. Until a broker was reached, an operation gives up sooner
(`FirstConnectAttempts`).

`make_client_world` makes a client's `World` without the parts that only servers need (ZeroMQ)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import wait
from typing import Any, NoReturn, TypeVar, cast

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import (
    ConnectionLost,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    TimedOut,
    Unavailable,
)
from ...proto.names import TopicName
from ...proto.schema import BYTES_VERSION, SchemaInfo, SchemaType, decode_version
from ...runtime.access import NO_CREDENTIALS, OPEN_ACCESS, CallerAccess, ListenerAccess, TlsFiles
from ...runtime.clock import SystemClock
from ...runtime.files import Files
from ...runtime.grpc import client
from ...runtime.network import (
    NO_PEER_KEYS,
    ByteService,
    ByteStream,
    Channel,
    Endpoint,
    KeyPair,
    Peer,
    PeerClientKeys,
    PeerServerKeys,
    PeerService,
    RunningByteServer,
    RunningPeerServer,
    RunningServer,
    World,
    find_rpc,
)
from ...runtime.tasks import SystemWorkers
from ..common.closing import EventLoopCaller, register_connection_holder
from ..common.errors import AlreadyClosed, InvalidMessage
from ..common.rate_limits import DEFAULT_RECEIVE_BYTES, ReceiveMemoryLimit, SendMemoryLimit
from ..core.failover import Backoff
from ..model.settings import ClientSettings
from .broker_stream import BrokerStream
from .discovery import PING_TIMEOUT_S, PULSAR_PORTS, BrokerDiscovery, ServiceUrl, SilentBrokerTracker


class _ClientNetwork:
    """The network of a client: it makes connections, and serves nothing."""

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        return client.connect(endpoint, access)

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningServer:
        raise NotAllowed("a client serves nothing")

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS
    ) -> RunningByteServer:
        raise NotAllowed("a client serves nothing")

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> ByteStream:
        from ...runtime.tcp import listening as streams  # which few clients need

        return await streams.connect(endpoint, tls)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        raise NotAllowed("a client serves nothing")

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        raise NotAllowed("a client has no peers; bookies are spoken to by brokers")

    def generate_keys(self) -> KeyPair:
        raise NotAllowed("a client has no peers; bookies are spoken to by brokers")


class _NoFiles:
    """The files of a client: none, because the files of a server need POSIX, and a client also runs on Windows."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotAllowed("a client has no files of a server")


def make_client_world() -> World:
    """Makes the `World` (clock, network, …) of one client. This world has no files, and its network only connects. Each
    client needs its own, because connections belong to a world, and to one event loop."""
    return World(SystemClock(), random.SystemRandom(), cast(Files, _NoFiles()), SystemWorkers(), _ClientNetwork())


# ------------------------------------------------------------------------------------------------- first_contact
# The first contact with a broker: how long it is tried, and what is said when nothing is there.
#
# A client that never reached a broker has probably been given a wrong address, or no server runs: it says so soon, with
# what to do. One that reached a broker before knows that the address is right, and is patient: its operations have
# their whole time-out (client/connect/connections.py).
#
# | what is at every address of the service URL | given up after |
# |---|---|
# | nothing listens, or the host name is not known | REFUSED_RETRY_S |
# | no answer, or a connection and not a word on it | connection_timeout_s |
# | something that does not speak gRPC | at once (WrongProtocol) |
#
# Guard: tests/client/connect/test_first_contact.py.


REFUSED_RETRY_S = 1.0
"""Seconds for which a refused connection is tried again: a server that is starting listens within half a second."""
STANDALONE_PORT = 7650
"""The port at which `magnetar standalone` listens by default."""


class FirstConnectAttempts:
    """Counts the failed attempts of one operation of a client that has not reached any broker yet, and decides when the
    operation gives up."""

    def __init__(self, endpoints: Callable[[], Sequence[Endpoint]], connection_timeout_s: float) -> None:
        """Begins to count. `endpoints()` returns the endpoints that are tried now. `connection_timeout_s`: the seconds
        after which the operation gives up if no server answers."""
        self._endpoints = endpoints
        self._timeout_s = connection_timeout_s
        self._refused: set[str] = set()

    def record_failure(self, error: MagnetarError, next_s: float) -> MagnetarError | None:
        """Records that an attempt failed with `error`. `next_s`: how many seconds after the first attempt the next
        attempt would begin. Returns the error to raise if the operation must give up, or None if it must try again."""
        how, endpoint = why_unreachable(error), error.fields.get("endpoint", "")
        if how == "refused":
            self._refused.add(endpoint)
            if next_s >= REFUSED_RETRY_S and self._refused.issuperset(map(str, self._endpoints())):
                return make_unreachable_error(error, self._endpoints())
        if how is not None and next_s >= self._timeout_s:
            return make_unreachable_error(error, self._endpoints(), f" within {self._timeout_s:g} s")
        return None


def why_unreachable(error: MagnetarError) -> str | None:
    """Returns the reason why no connection was made, taken from `error`: "refused" or "silent"
    (runtime/grpc/stream.py). Returns None if a server answered, or `error` does not say."""
    return error.fields.get("unreached") if isinstance(error, Unavailable) else None


def make_unreachable_error(error: MagnetarError, endpoints: Sequence[Endpoint], when: str = "") -> MagnetarError:
    """Returns the error to raise when no broker could be reached: its text names the endpoints that were tried, and
    says what to do. `error`: the error of the last attempt. `when`: text about the time, such as " within 10 s"."""
    others = "" if len(endpoints) == 1 else f" (asked: {', '.join(map(str, endpoints))})"
    told = Unavailable(f"{error.message}{when}{others}. {_what_to_do(endpoints[0].port)}", **error.fields)
    told.__cause__ = error.__cause__
    return told


def _what_to_do(port: int) -> str:
    if port in PULSAR_PORTS:
        return f"{port} is the port of Pulsar's clients; this one connects to {STANDALONE_PORT}"
    how = "" if port == STANDALONE_PORT else f" --port {port}"
    return f"Is a server running there? 'magnetar standalone{how}' starts one"


# --------------------------------------------------------------------------------------------------- connections


T = TypeVar("T")

KNOWN_OWNERS_MAX = 1000
"""Most owners of topics that the client remembers until they are first used."""


class Connections:
    """The connections of one client to the brokers of its cluster. `memory` and `send_memory`: the limits for received
    messages and for messages to send. Belongs to one event loop. See the head of the module."""

    def __init__(
        self, world: World, url: ServiceUrl, settings: ClientSettings, access: CallerAccess = NO_CREDENTIALS
    ) -> None:
        assert url.endpoints, "a service URL names at least one broker"
        self.world = world
        self._access = access
        self.settings = settings
        limit = settings.memory_limit_bytes
        self.memory = ReceiveMemoryLimit(DEFAULT_RECEIVE_BYTES if limit is None else limit)
        self.send_memory: SendMemoryLimit | None = None  # it has no bound
        if limit:
            self.send_memory = self.memory.producers = SendMemoryLimit(limit)
            self.send_memory.claimed = lambda: self.memory.claimed_bytes
        self._discovery = BrokerDiscovery(url, world.network, access, settings.connection_timeout_s)
        self._endpoints: Sequence[Endpoint] = url.endpoints
        self._next = world.rng.randrange(len(self._endpoints))
        self._channels: dict[Endpoint, Channel] = {}
        self._streams: dict[Endpoint, BrokerStream] = {}
        self._silence = SilentBrokerTracker(world.clock.monotonic, self._known, self._asked_owner)
        self._told: dict[TopicName, Channel] = {}  # owners that were told with the partitions, for the first use
        self._wakes: EventLoopCaller | None = None
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
        """Returns the channel to a broker, and makes it if there is none. Raises ConnectionLost if the client is
        closed, OperationNotSupported in a process that was forked with gRPC in use."""
        if self._closed:
            raise ConnectionLost("the client is closed")
        channel = self._channels.get(endpoint)
        if channel is None:
            register_connection_holder(self)
            channel = self._channels[endpoint] = self.world.network.connect(endpoint, self._access)
        return channel

    async def connect_owner_stream(self, topic: TopicName, named: str = "") -> BrokerStream:
        """Returns the stream to the broker that owns the topic, and opens it if there is none. `named`: the endpoint of
        that broker if it is known; empty: the broker is looked up. Raises the errors of `find_owner_channel`;
        ConnectionLost if the client is closed, or `named` is not an endpoint."""
        channel = self._named(named, topic) if named else await self.find_owner_channel(topic)
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
        """Returns the time at which any broker last answered an operation or sent something on a stream, in seconds of
        the monotonic clock."""
        return max((self._answered, *(each.received_at for each in self._streams.values())))

    @property
    def event_loop_caller(self) -> EventLoopCaller:
        """Returns the object through which other threads run functions in this event loop. Must be called in that
        loop."""
        if self._wakes is None:
            self._wakes = EventLoopCaller(asyncio.get_running_loop())
        return self._wakes

    def backoff(self) -> Backoff:
        """Returns a new Backoff with the client's first and last pause."""
        return Backoff(self.world.rng, self.settings.backoff_first_s, self.settings.backoff_last_s)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Calls `attempt()` until it succeeds, and returns its result. Raises the last error if it is permanent, the
        client is closed, or the operation's deadline comes before the next attempt. Raises TimedOut if the deadline
        comes during an attempt."""
        now = self.world.clock.monotonic
        begun = now()
        deadline = begun + self.settings.operation_timeout_s
        backoff = self.backoff()
        first = (
            None if self._reached else FirstConnectAttempts(lambda: self._endpoints, self.settings.connection_timeout_s)
        )
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
                delay = backoff.next_delay_s()
                if not error.retryable or self._closed or now() + delay > deadline:
                    raise
                if why_unreachable(error) is not None:
                    self._discovery.clear()
                elif not isinstance(error, TimedOut):
                    self._reached = True
                if first is not None and not self._reached:
                    told = first.record_failure(error, now() + delay - begun)
                    if told is not None:
                        raise told from told.__cause__
            await asyncio.sleep(delay)

    async def next_broker_channel(self) -> Channel:
        """Returns a channel to one of the brokers of the service URL, each in turn; to a broker that does not answer
        only if there is no other. Raises the errors of `BrokerDiscovery.endpoints`, and of `channel`."""
        self._endpoints = await self._discovery.endpoints()
        for _ in self._endpoints:
            self._next = (self._next + 1) % len(self._endpoints)
            if not self._silence.is_silent(self._endpoints[self._next]):
                break
        return self.channel(self._endpoints[self._next])

    def _known(self) -> list[Endpoint]:
        return list(dict.fromkeys((*self._endpoints, *self._channels)))

    async def _asked_owner(self, endpoint: Endpoint, topic: TopicName) -> Endpoint:
        return (await self._owner_by(self.channel(endpoint), topic, PING_TIMEOUT_S)).endpoint

    async def ask(self, method: str, request: Message, *, service: str = "Broker") -> Any:
        """Sends a request to any broker and returns its answer, with the attempts and errors of `retry`. `service` and
        `method`: the gRPC method."""

        async def attempt() -> Any:
            asked = await self.next_broker_channel()
            return await asked.call(find_rpc(service, method), request, timeout_s=self.settings.connection_timeout_s)

        return await self.retry(attempt)

    async def ask_owner(self, topic: TopicName, method: str, request: Message, *, service: str = "Broker") -> Any:
        """Sends a request to the broker that owns the topic and returns its answer, with the attempts and errors of
        `retry`. `service` and `method`: the gRPC method. The first attempt asks any broker, which answers itself or
        names the owner. If it does neither, the owner is looked up."""
        guess = True

        async def call(channel: Channel) -> Any:
            return await channel.call(find_rpc(service, method), request, timeout_s=self.settings.operation_timeout_s)

        async def attempt() -> Any:
            nonlocal guess
            if guess:
                guess = False
                try:
                    return await call(await self.next_broker_channel())
                except NotOwner as error:
                    if (owner := error.fields.get("owner")) and not self.settings.listener_name:
                        return await call(self._named(owner, topic))
                except MagnetarError as error:
                    if not error.retryable or self._closed:
                        raise
            return await call(await self.find_owner_channel(topic))

        return await self.retry(attempt)

    async def find_owner_channel(self, topic: TopicName) -> Channel:
        """Looks up the owner of a topic once, and returns the channel to this broker. If the asked broker does not know
        the owner or does not answer, the other brokers are asked at once, because the failing broker may be the owner.
        Raises the error of the last one, and the errors of `next_broker_channel`. If `fetch_partition_count` has
        learned the owner, it is used once without a look-up."""
        told = self._told.pop(topic, None)
        if told is not None and not self._closed:
            return told
        self._endpoints = await self._discovery.endpoints()
        for left in reversed(range(len(self._endpoints))):
            asked = await self.next_broker_channel()
            try:
                return await self._owner_by(asked, topic, self.settings.connection_timeout_s)
            except MagnetarError as error:
                if why_unreachable(error) is not None:
                    self._discovery.clear()  # the broker may have come back at another port
                if not error.retryable or not left or self._closed:
                    raise
        raise AssertionError("a service URL names at least one broker")

    async def _owner_by(self, asked: Channel, topic: TopicName, timeout_s: float) -> Channel:
        request = wire.LookupRequest(topic=topic.full, listener=self.settings.listener_name)
        reply: wire.LookupReply = await asked.call(find_rpc("Broker", "Lookup"), request, timeout_s=timeout_s)
        return self._told_by(asked, reply, topic)

    def _told_by(self, asked: Channel, reply: wire.LookupReply, topic: TopicName) -> Channel:
        if not reply.here:
            return self._named(reply.owner, topic)
        with contextlib.suppress(ValueError):  # it does not tell its own address
            self._silence.set_advertised_endpoint(asked.endpoint, Endpoint.parse(reply.owner))
        return asked

    def _named(self, owner: str, topic: TopicName) -> Channel:
        try:
            return self.channel(Endpoint.parse(owner))
        except ValueError as error:
            raise ConnectionLost(f"{owner!r} was named as the owner of {topic}") from error

    async def fetch_partition_count(self, topic: TopicName, *, create: bool = True) -> int:
        """Asks a broker, and returns the number of partitions of the topic; 0: the topic is not partitioned, or is a
        partition. `create`: whether the request may create the topic. Raises TopicNotFound if it does not exist and is
        not created, and the errors of `retry`."""
        if topic.is_partition:
            return 0
        request = wire.PartitionsRequest(topic=topic.full, create=create)

        async def attempt() -> int:
            asked = await self.next_broker_channel()
            reply: wire.PartitionsReply = await asked.call(
                find_rpc("Broker", "Partitions"), request, timeout_s=self.settings.connection_timeout_s
            )
            named = reply.HasField("owner") and not self.settings.listener_name  # by the address of all
            if named and len(self._told) < KNOWN_OWNERS_MAX:
                self._told[topic] = self._told_by(asked, reply.owner, topic)
            return reply.partitions

        return await self.retry(attempt)

    async def switch_cluster(self, url: ServiceUrl, access: CallerAccess) -> None:
        """Closes all connections, waits for that, and uses the brokers of another service URL from now on. Open
        producers and consumers reconnect there. A request in flight may still be answered by an earlier broker."""
        self._access = access
        self._discovery = BrokerDiscovery(url, self.world.network, access, self.settings.connection_timeout_s)
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

    def close_when_loop_ends(self) -> None:
        """Arranges that the connections are closed when the event loop ends, or when this object is garbage-collected.
        Must be called in that loop."""
        self._with_loop = self._until_the_loop_ends()
        with contextlib.suppress(StopIteration):  # to its first `yield`: the loop knows it from there on
            self._with_loop.__anext__().__await__().send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Closes the connections of a client that was not closed, at the end of the loop: `asyncio.run` ends
        generators before it closes its loop."""
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
        """Closes all connections, and waits until they are closed. Later operations raise ConnectionLost. May be called
        again."""
        with_loop, self._with_loop = self._with_loop, None
        if with_loop is not None:
            await with_loop.aclose()
            return
        self._closed = True
        await self._close_connections()


# ------------------------------------------------------------------------------------------------ writer_schemas
# The schemas with which messages were written, by the version that each message names.
#
#     writers = TopicSchemaCache(connections, partition, incarnation)        of a topic and all its partitions
#     await writers.fetch_schema(version)                asked of a broker once
#     info = writers.get_schema(version)                 in any thread but that of the event loop it may ask as well
#
# What a version means never changes while its topic lasts: one that is deleted and made anew numbers its own, and has
# writers of its own. These go on with what they know, and the broker tells them nothing more (`incarnation`). A version
# that the broker does not have is asked for again after MISSING_SCHEMA_CACHE_S.


NEWEST_VERSION = b""
MISSING_SCHEMA_CACHE_S = 10.0
LOOP_CHECK_S = 1.0
"""How often a thread that waits for a schema looks whether the event loop still runs, in seconds."""
MISSING_SCHEMAS_MAX = 1000
"""Most schema versions that are cached as missing; a limit, because a producer may write any version into its
messages."""


class TopicSchemaCache:
    """A cache of the schemas of one topic, by their versions (8 bytes; empty: the newest). Asks the broker for schemas
    that it does not have. A version that the topic lacks is asked for again after MISSING_SCHEMA_CACHE_S seconds. Must
    be made in the event loop."""

    def __init__(self, connections: Connections, topic: TopicName, incarnation: int = 0) -> None:
        """Makes an empty cache. `topic` may be a partition. `incarnation`: that of the topic whose schemas are meant;
        0: the present one."""
        self._connections = connections
        self._topic = topic
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._now = connections.world.clock.monotonic
        self._known: dict[bytes, SchemaInfo] = {}
        self._missing: dict[bytes, float] = {}  # until when

    def is_version_cached(self, version: bytes) -> bool:
        """Returns whether the cache has the schema of a version, or knows that the topic lacks it."""
        return version in self._known or self._missing.get(version, 0.0) > self._now()

    async def fetch_schema(self, version: bytes) -> None:
        """Asks the broker for a schema of the topic and caches it, unless it is cached; an empty `version` means the
        newest. A version that the topic lacks is cached as missing, and `get_schema` then raises. Raises other errors
        of the broker, and those of `Connections.retry`."""
        if self.is_version_cached(version):
            return
        if version == BYTES_VERSION:
            self._known[version] = SchemaInfo(type=SchemaType.NONE)
            return
        request = wire.GetSchemaRequest(topic=self._topic.full, version=version, incarnation=self._incarnation)
        try:
            found: wire.SchemaReply = await self._connections.ask("GetSchema", request)
        except NotFound:
            if len(self._missing) >= MISSING_SCHEMAS_MAX:
                self._missing.clear()
            self._missing[version] = self._now() + MISSING_SCHEMA_CACHE_S
            return
        info = found.schema
        self._known[version] = SchemaInfo(
            type=SchemaType(info.type), data=info.data, name=info.name, properties=dict(info.properties)
        )

    def find_cached_schema(self, version: bytes) -> SchemaInfo | None:
        """Returns a schema that was fetched before. Returns None if it was not fetched, or if the topic lacks this
        version."""
        return self._known.get(version)

    def get_schema(self, version: bytes) -> SchemaInfo:
        """Returns the schema of a version. If it is not cached, asks the broker and blocks until the answer comes.
        Raises InvalidMessage if the topic has no such schema, or if the schema is not cached and the caller is in the
        event loop; AlreadyClosed if the loop has ended; the broker's error if it does not answer."""
        if not self.is_version_cached(version):
            self._ask(version)
        found = self._known.get(version)
        if found is None:
            number = decode_version(version)
            what = "no schema" if number is None else f"no schema version {number}, which the message names"
            raise InvalidMessage(f"topic {self._topic.base} has {what}")
        return found

    def _ask(self, version: bytes) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise InvalidMessage("the schema of the message is not known yet: await its fetch_writer_schema() first")
        ended = AlreadyClosed("the event loop of the client has ended: the schema of the message cannot be asked for")
        if not self._loop.is_running():
            raise ended
        asking = asyncio.run_coroutine_threadsafe(self.fetch_schema(version), self._loop)
        while not wait((asking,), LOOP_CHECK_S).done:
            if not self._loop.is_running():
                asking.cancel()
                raise ended
        asking.result()
