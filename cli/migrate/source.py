"""The cluster that is copied from, by Pulsar's binary protocol: topics, schemas, and the entries of a partition.

    source = MigrationSource(url, access, timeout_s, world)
    await source.list_topics(namespace); source.count_partitions(topic); source.read_schema(topic, version)
    reader = await source.open_reader(topic, after)    a non-durable subscription, with a connection of its own
    reader.grant_permits(…)                      permits the source to send entries
    event = await reader.next_event(wait_s)      an entry, an answer, or None if nothing has arrived
    reader.acknowledge(position)                 so that the source counts only the entries after `position` as backlog

Entries come as they are stored: pulsar-client would take them apart, decrypt and decompress them, and does not tell
when a message is due, whether its key is bytes, or its sequence id. At most one entry is in memory, because a
connection is not read while an entry waits for the destination. The migration creates nothing durable at the source. A
request ends within `timeout_s`. Guard: tests/cli/migrate/test_source.py.

Also in this file, each below its heading: the origin of a copied entry (origin); the topics that are copied (plan).
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...broker.pulsar.frames import PulsarFrameSplitter, encode_frame, parse_frame, parse_sent_entry
from ...broker.pulsar.translate import parse_schema
from ...client.common.errors import InvalidUrl
from ...client.connect.discovery import DiscoveryProtocol, parse_authorization, parse_service_url
from ...proto import errors
from ...proto import pulsar_pb2 as pulsar
from ...proto.checksum import encode_varint
from ...proto.entry import (
    ENTRY_HEAD_BYTES,
    EntryHeader,
    count_declared_messages,
    join_client_part,
    parse_header,
    split_broker_part,
)
from ...proto.entry_pb2 import MessageIdData
from ...proto.errors import InvalidRequest, TopicNotFound
from ...proto.names import Position, TopicName
from ...proto.schema import SchemaInfo
from ...proto.versions import PRODUCT
from ...runtime.access import CallerAccess
from ...runtime.network import ByteStream, Endpoint, World

FRAME_BYTES_MAX = 128 << 20
"""Most bytes of a frame. An entry of a source may be larger than ours: the destination refuses it then, by name."""
PERMITS_AHEAD = 2000
"""Messages that the source may send ahead; TCP holds them back when the destination is slower."""
PULSAR_PROTOCOL_VERSION = 19
REDIRECTS_MAX = 20
_EARLIEST = (1 << 64) - 1
"""Value -1 as uint64: a reader begins at the oldest entry."""
_CONSUMER = 1

_ERRORS: dict[int, type[errors.MagnetarError]] = {
    pulsar.AuthenticationError: errors.Unauthenticated,
    pulsar.AuthorizationError: errors.Unauthorized,
    pulsar.TopicNotFound: errors.TopicNotFound,
    pulsar.SubscriptionNotFound: errors.SubscriptionNotFound,
    pulsar.InvalidTopicName: errors.InvalidName,
    pulsar.NotAllowedError: errors.NotAllowed,
    pulsar.TopicTerminatedError: errors.TopicTerminated,
    pulsar.IncompatibleSchema: errors.IncompatibleSchema,
    pulsar.UnsupportedVersionError: errors.WrongProtocol,
}
"""Errors that do not pass; all others may."""


class SourceEntry(NamedTuple):
    """An entry that was read from the source, with its position there. `data`: the entry's client-part, which consists
    of metadata and payload (proto/entry.py)."""

    position: Position
    data: bytes


class SourceBacklog(NamedTuple):
    """The source's answer to a request for the backlog: the number of unacknowledged entries (if the source is Pulsar)
    or messages (if it is Magnetar)."""

    left: int


class EndOfTopic(NamedTuple):
    """Event: the source's topic is terminated, and no further entry follows."""


SourceEvent = SourceEntry | SourceBacklog | EndOfTopic


def _error(number: int, text: str, of: str) -> errors.MagnetarError:
    kind = _ERRORS.get(number, errors.Unavailable)
    return kind(f"the source says of {of}: {text or pulsar.ServerError.Name(number)}")


class MigrationSource:
    """The cluster from which topics are copied: lists its topics, and opens readers of them. Belongs to one event loop.
    Each request waits at most `timeout_s` seconds. It raises Unavailable if no server can be reached, TimedOut if a
    server does not answer, WrongProtocol if it does not speak Pulsar's protocol, Unauthenticated if it refuses the
    credentials, or the error that the source answers."""

    def __init__(self, url: str, access: CallerAccess, timeout_s: float, world: World) -> None:
        """Makes a source; connects at the first request. Raises InvalidUrl if `url` does not begin with pulsar:// or
        pulsar+ssl://."""
        parsed = parse_service_url(url)
        if parsed.protocol is not DiscoveryProtocol.PULSAR:
            raise InvalidUrl(f"{url!r}: the source is named by pulsar://HOST[:PORT] or pulsar+ssl://HOST[:PORT]")
        self.endpoints = parsed.ask_at
        self.timeout_s = timeout_s
        self.version = ""  # of its broker; known after the first answer
        self._encrypted = parsed.encrypted
        self._access = access
        self._world = world
        self._asking: SourceConnection | None = None
        self._turn = asyncio.Lock()

    @property
    def is_backlog_in_entries(self) -> bool:
        """Returns whether the source counts a backlog in entries, as Pulsar does, and not in messages, as Magnetar
        does. Valid after the first answer of the source."""
        return not self.version.startswith("Magnetar")

    # ------------------------------------------------------------------------------ connections
    async def _connect(self, endpoint: Endpoint, proxied: str = "") -> SourceConnection:
        """Returns a new connection. Raises Unavailable, WrongProtocol or Unauthenticated."""
        try:
            async with asyncio.timeout(self.timeout_s):
                stream = await self._world.network.connect_bytes(endpoint, self._access.tls)
                connection = SourceConnection(stream, self._credentials, endpoint)
                try:
                    self.version = await connection.do_handshake(proxied)
                except BaseException:
                    await connection.close()
                    raise
                return connection
        except TimeoutError as error:
            text = f"the source at {endpoint} does not answer within {self.timeout_s:g} s"
            raise errors.Unavailable(f"{text}; --from names another") from error
        except errors.Unavailable as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            why = f"cannot connect to {endpoint}: Connection refused" if refused else error.message
            text = f"the source cannot be reached: {why}; --from names another"
            raise errors.Unavailable(text, **error.fields) from None  # the command shows the innermost error

    def _credentials(self) -> tuple[str, bytes]:
        return parse_authorization(self._access.authorization() if self._access.authorization is not None else "")

    async def _any(self) -> SourceConnection:
        failure: errors.MagnetarError | None = None
        for endpoint in self.endpoints:
            try:
                return await self._connect(endpoint)
            except errors.Unavailable as error:
                failure = error
        assert failure is not None, "a URL has an address"
        raise failure

    async def _ask(self, answer: str, of: str, **command: Any) -> Any:
        """Sends one request at a time over a connection that stays open; returns the answer."""
        async with self._turn:
            if self._asking is None or self._asking.over:
                self._asking = await self._any()
            try:
                return await self._asking.ask(answer, of, self.timeout_s, **command)
            except errors.ConnectionLost:
                self._asking = await self._any()
                return await self._asking.ask(answer, of, self.timeout_s, **command)

    # ------------------------------------------------------------------------------ what it has
    async def list_topics(self, namespace: str) -> list[str]:
        """Returns the full names of the persistent topics and partitions of a namespace, sorted."""
        asked = pulsar.CommandGetTopicsOfNamespace(
            request_id=1, namespace=namespace, mode=pulsar.CommandGetTopicsOfNamespace.PERSISTENT
        )
        found = await self._ask("get_topics_of_namespace_response", namespace, get_topics_of_namespace=asked)
        return sorted(found.topics)

    async def count_partitions(self, topic: TopicName) -> int:
        """Returns the number of partitions of a topic; 0 if the topic is not partitioned. For a topic that does not
        exist, Pulsar answers 0, and Magnetar raises TopicNotFound."""
        asked = pulsar.CommandPartitionedTopicMetadata(
            topic=topic.full, request_id=1, metadata_auto_creation_enabled=False
        )
        found = await self._ask("partitioned_metadata_response", topic.full, partitioned_metadata=asked)
        return int(found.partitions)

    async def read_schema(self, topic: TopicName, version: bytes | None = None) -> tuple[SchemaInfo, bytes] | None:
        """Returns (schema, version) of the topic; the newest version if `version` is None. Returns None if there is no
        such schema."""
        asked = pulsar.CommandGetSchema(request_id=1, topic=topic.full)
        if version is not None:
            asked.schema_version = version
        try:
            found = await self._ask("get_schema_response", f"the schema of {topic}", get_schema=asked)
        except errors.NotFound:
            return None
        info = parse_schema(found.schema)
        return None if info is None else (info, bytes(found.schema_version))

    async def _owner(self, topic: TopicName) -> tuple[Endpoint, str]:
        """Returns where to connect for a topic, and the broker to which a proxy there must connect."""
        asking, authoritative = await self._any(), False
        service = asking.endpoint
        try:
            for _ in range(REDIRECTS_MAX):
                asked = pulsar.CommandLookupTopic(topic=topic.full, request_id=1, authoritative=authoritative)
                found = await asking.ask("lookup_response", topic.full, self.timeout_s, lookup=asked)
                url = found.brokerServiceUrlTls if self._encrypted else found.brokerServiceUrl
                try:
                    owner = parse_service_url(url).ask_at[0]
                except (InvalidUrl, IndexError) as error:
                    text = f"the source names {url!r} as the broker of {topic}"
                    raise errors.Unavailable(text) from error
                if found.response == pulsar.CommandLookupTopicResponse.Connect:
                    return (service, str(owner)) if found.proxy_through_service_url else (owner, "")
                await asking.close()
                asking, authoritative = await self._connect(owner), found.authoritative
        finally:
            await asking.close()
        raise errors.Unavailable(f"the source sends a look-up of {topic} round and round")

    async def open_reader(self, topic: TopicName, after: Position | None) -> PartitionReader:
        """Opens and returns a reader that begins after the position `after`, or at the oldest entry if `after` is None.
        The reader has a connection of its own; the caller must close it. The source sends no entry before
        `grant_permits` is called."""
        endpoint, proxied = await self._owner(topic)
        connection = await self._connect(endpoint, proxied)
        try:
            name = f"magnetar-migrate-{self._world.rng.randbytes(5).hex()}"
            reader = PartitionReader(connection, topic, self.timeout_s)
            await reader.open(name, after)
        except BaseException:
            await connection.close()
            raise
        return reader

    async def close(self) -> None:
        """Closes the connection for requests. Readers are closed by their users."""
        if self._asking is not None:
            await self._asking.close()


class SourceConnection:
    """One TCP connection to the source, with Pulsar's protocol. `receive` also answers PINGs and authentication
    challenges of the source. `over`: the connection has ended."""

    def __init__(self, stream: ByteStream, credentials: Callable[[], tuple[str, bytes]], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.over = False
        self._stream = stream
        self._credentials = credentials
        self._frames = PulsarFrameSplitter(FRAME_BYTES_MAX)
        self._came: list[tuple[str, Any, bytes]] = []

    def send(self, **command: Any) -> None:
        """Sends one command, without waiting for an answer. `command`: the field of Pulsar's BaseCommand, by its
        name."""
        self._stream.write_nowait(encode_frame(**command))

    async def do_handshake(self, proxied: str) -> str:
        """Sends the first command of a connection (CONNECT), with the credentials of the client. `proxied`: the broker
        to which a proxy must connect; "": there is no proxy. Returns the broker's name and version as it reports them.
        Raises WrongProtocol if the server does not speak Pulsar's protocol, or the error that it answers."""
        method, data = self._credentials()
        connect = pulsar.CommandConnect(
            client_version=f"Magnetar-migrate-v{PRODUCT}", protocol_version=PULSAR_PROTOCOL_VERSION,
            auth_method_name=method, auth_data=data,
        )  # fmt: skip
        if proxied:
            connect.proxy_to_broker_url = proxied
        self.send(connect=connect)
        try:
            kind, answer, _ = await self.receive()
        except (errors.InvalidRequest, errors.ConnectionLost):
            raise errors.WrongProtocol(f"{self.endpoint} does not speak Pulsar's protocol") from None
        if kind == "error":
            raise _error(answer.error, answer.message, str(self.endpoint))
        if kind != "connected":
            raise errors.WrongProtocol(f"{self.endpoint} does not answer a connection of Pulsar's protocol")
        return str(answer.server_version)

    async def ask(self, wanted: str, of: str, timeout_s: float, **command: Any) -> Any:
        """Sends a command, and returns the answer, which must be of the kind `wanted`; drops other commands that arrive
        before it. `of`: what is asked about, for error texts. Raises TimedOut after `timeout_s` seconds (then the
        connection is closed), ConnectionLost, InvalidRequest if a frame is invalid, or the error that the source
        answers."""
        self.send(**command)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    kind, answer, _ = await self.receive()
                    if kind == wanted:
                        break
                    if kind == "error":
                        raise _error(answer.error, answer.message, of)
        except TimeoutError as error:
            await self.close()
            raise errors.TimedOut(f"the source does not answer about {of} within {timeout_s:g} s") from error
        fields = answer.DESCRIPTOR.fields_by_name
        for number, text in (("error", "message"), ("error_code", "error_message")):
            if number in fields and answer.HasField(number):
                raise _error(getattr(answer, number), getattr(answer, text), of)
        return answer

    async def receive(self) -> tuple[str, Any, bytes]:
        """Returns the next command from the source: its kind, the command, and the rest of its frame. If the call is
        cancelled, no data is lost. Raises ConnectionLost, or InvalidRequest if a frame is invalid."""
        while not self._came:
            try:
                size = await self._stream.read_into(self._frames.get_free_buffer)
            except errors.MagnetarError:
                self.over = True
                raise
            if not size:
                self.over = True
                raise errors.ConnectionLost(f"the source at {self.endpoint} closed the connection")
            for each in self._frames.receive_frames(size):
                command, rest = parse_frame(each)
                kind = pulsar.BaseCommand.Type.Name(command.type).lower()
                if kind == "ping":
                    self.send(pong=pulsar.CommandPong())
                elif kind == "auth_challenge":
                    self._answer_challenge()
                else:
                    self._came.append((kind, getattr(command, kind), bytes(rest)))
            self._came.reverse()
        return self._came.pop()

    def _answer_challenge(self) -> None:
        method, data = self._credentials()
        answer = pulsar.CommandAuthResponse(
            client_version=f"Magnetar-migrate-v{PRODUCT}", protocol_version=PULSAR_PROTOCOL_VERSION,
            response=pulsar.AuthData(auth_method_name=method, auth_data=data),
        )  # fmt: skip
        self.send(auth_response=answer)

    async def close(self) -> None:
        self.over = True
        await self._stream.close()


class PartitionReader:
    """Reads the entries of one partition from the source cluster, through a non-durable subscription. Made by
    `MigrationSource.open_reader`."""

    def __init__(self, connection: SourceConnection, topic: TopicName, timeout_s: float) -> None:
        self._connection = connection
        self._topic = topic
        self._timeout_s = timeout_s
        self._owed = 0  # permits
        self._after: Position | None = None

    async def open(self, name: str, after: Position | None) -> None:
        """Subscribes under the name `name`, to the entries after the position `after` (None: from the oldest on).
        Called once, by `MigrationSource.open_reader`. Raises the errors of `SourceConnection.ask`."""
        self._after = after
        start = MessageIdData(ledgerId=_EARLIEST, entryId=_EARLIEST)
        if after is not None:
            start = MessageIdData(ledgerId=after.ledger_id, entryId=after.entry_id)
        asked = pulsar.CommandSubscribe(
            topic=self._topic.full, subscription=name, subType=pulsar.CommandSubscribe.Exclusive,
            consumer_id=_CONSUMER, request_id=1, consumer_name=name, durable=False, start_message_id=start,
            force_topic_creation=False, initialPosition=pulsar.CommandSubscribe.Earliest,
        )  # fmt: skip
        await self._connection.ask("success", self._topic.full, self._timeout_s, subscribe=asked)

    async def newest_position(self) -> Position:
        """Returns the position of the newest entry of the partition; its entry id is negative if the partition has no
        entry. Must be called before any entry is read. Raises the errors of `SourceConnection.ask`."""
        asked = pulsar.CommandGetLastMessageId(consumer_id=_CONSUMER, request_id=2)
        told = await self._ask("get_last_message_id_response", get_last_message_id=asked)
        ledger_id, entry_id = told.last_message_id.ledgerId, told.last_message_id.entryId
        return Position(_signed(ledger_id), _signed(entry_id))

    async def measure_backlog(self) -> int:
        """Returns the backlog of the partition, as the source counts it: entries if it is Pulsar, messages if it is
        Magnetar. Must be called before any entry is read. Raises the errors of `SourceConnection.ask`."""
        asked = pulsar.CommandConsumerStats(consumer_id=_CONSUMER, request_id=3)
        told = await self._ask("consumer_stats_response", consumer_stats=asked)
        return int(told.msgBacklog)

    async def _ask(self, wanted: str, **command: Any) -> Any:
        return await self._connection.ask(wanted, self._topic.full, self._timeout_s, **command)

    def grant_permits(self, permits: int = PERMITS_AHEAD) -> None:
        """Permits the source to send `permits` more messages."""
        self._connection.send(flow=pulsar.CommandFlow(consumer_id=_CONSUMER, messagePermits=permits))

    def request_backlog(self) -> None:
        """Sends a request for the backlog. `next_event` returns the answer later, as a SourceBacklog."""
        self._connection.send(
            consumer_stats=pulsar.CommandConsumerStats(consumer_id=_CONSUMER, request_id=3)
        )

    async def next_event(self, wait_s: float) -> SourceEvent | None:
        """Returns the next event: an entry, an answer about the backlog, or the end of the topic. Returns None if
        nothing arrives within `wait_s` seconds. Raises ConnectionLost if the source has closed the reader or the
        connection: the copy may continue with a new reader. Raises CorruptEntry if an entry is damaged, InvalidRequest
        if a frame is invalid, or the error that the source reports."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    event = self._event(*await self._connection.receive())
                    if event is not None:
                        return event
        except TimeoutError:
            return None

    def _event(self, kind: str, command: Any, rest: bytes) -> SourceEvent | None:
        match kind:
            case "message":
                id_ = command.message_id
                entry = SourceEntry(
                    Position(id_.ledgerId, id_.entryId), bytes(parse_sent_entry(split_broker_part(rest)[2]))
                )
                if self._after is None or entry.position > self._after:
                    return entry
                self.renew_permits(count_declared_messages(entry.data))  # Magnetar begins with the entry that is named
                return None
            case "consumer_stats_response":
                return SourceBacklog(command.msgBacklog)
            case "reached_end_of_topic":
                return EndOfTopic()
            case "error":
                raise _error(command.error, command.message, self._topic.full)
            case "close_consumer":
                raise errors.ConnectionLost(f"the source moves {self._topic}")
            case _:
                return None

    def renew_permits(self, messages: int) -> None:
        """Counts `messages` messages as copied, and permits the source to send as many more. Permits are collected, and
        sent when they are a quarter of PERMITS_AHEAD."""
        self._owed += messages
        if self._owed * 4 >= PERMITS_AHEAD:
            self.grant_permits(self._owed)
            self._owed = 0

    def acknowledge(self, position: Position) -> None:
        """Acknowledges at the source all entries up to `position`, because they are copied."""
        self._connection.send(ack=pulsar.CommandAck(
            consumer_id=_CONSUMER, ack_type=pulsar.CommandAck.Cumulative,
            message_id=[MessageIdData(ledgerId=position.ledger_id, entryId=position.entry_id)],
        ))  # fmt: skip

    async def close(self) -> None:
        await self._connection.close()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


# -------------------------------------------------------------------------------------------------------- origin
# The origin of a copied entry: a field at the end of its metadata, which clients pass over.
#
#     metadata = the source's metadata | schema? | origin
#     schema   = field 16 (schema_version) again: the version at the destination, or empty; the last one counts
#     origin   = field 50001, bytes: 'mgr1' | topic u64 | ledger i64 | entry i64
#
# Big-endian. `topic` is the first half of the SHA-256 of the topic's full name, with the number of its partition. The
# rest of the entry is the source's, byte for byte: payload, compression, encryption, batches, chunks, keys, properties,
# times, the producer's name and its sequence ids. Origins of one partition rise, so the newest copied entry has the
# position after which a later run continues.
#
# Example: entry 5:7 of a topic whose number is 1 ends in 8ab518 1c 6d677231 0000000000000001 0000000000000005
# 0000000000000007. Guard: tests/cli/migrate/test_origin.py.


_BODY = struct.Struct(">4sQqq")
_MAGIC = b"mgr1"
_TAG = encode_varint(50001 << 3 | 2) + bytes([_BODY.size])
_SCHEMA_VERSION = encode_varint(16 << 3 | 2)
ORIGIN_BYTES = len(_TAG) + _BODY.size


class Origin(NamedTuple):
    """The origin of a copied entry: the topic at the source (as a number, see `hash_topic`) and the position of the
    entry there."""

    topic: int  # `hash_topic` of the topic's full name
    position: Position


def hash_topic(topic: str) -> int:
    """Returns a 64-bit hash of a topic's full name (for a partition with the suffix). `Origin` names the source's topic
    by this number."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest()[:8])


def encode_copied_entry(client_part: bytes, header: EntryHeader, origin: Origin, schema_version: bytes | None) -> bytes:
    """Returns the bytes of a copied entry as it is published at the destination; they contain `origin`. `header`: the
    parsed header of `client_part`. `schema_version`: the version of the schema at the destination, b"" for no schema;
    None: the entry keeps the version that it has."""
    added = b"" if schema_version is None else _SCHEMA_VERSION + encode_varint(len(schema_version)) + schema_version
    added += _TAG + _BODY.pack(_MAGIC, origin.topic, *origin.position)
    metadata = client_part[ENTRY_HEAD_BYTES : header.payload_offset] + added
    return join_client_part(metadata, client_part[header.payload_offset :])


def decode_origin(entry: bytes) -> Origin | None:
    """Returns the origin (topic and position at the source) that a stored entry contains; None if the entry is not a
    copy. `entry`: the stored bytes, with the broker-part. Raises CorruptEntry if the entry is damaged."""
    client_part = split_broker_part(entry)[2]
    end = parse_header(client_part).payload_offset
    begin = end - ORIGIN_BYTES
    if begin < ENTRY_HEAD_BYTES or client_part[begin : begin + len(_TAG)] != _TAG:
        return None
    magic, topic, ledger_id, entry_id = _BODY.unpack(client_part[begin + len(_TAG) : end])
    return Origin(topic, Position(ledger_id, entry_id)) if magic == _MAGIC else None


# ---------------------------------------------------------------------------------------------------------- plan
# The topics that are copied: those that are named, and those of a pattern, as they are at the source.
#
# `orders`, `tenant/namespace/orders` and `persistent://…` name one; `*`, `?` and `[…]` in its last part make a pattern
# of the topics of its namespace. A partitioned topic is one topic. Topics of Pulsar's own (`__…`) match no pattern.


_plan_MAGIC = frozenset("*?[")


class TopicToCopy(NamedTuple):
    """A topic that the migration copies, with the number of its partitions."""

    name: TopicName
    partitions: int  # 0: it is not partitioned

    @property
    def parts(self) -> list[TopicName]:
        """Returns the names of the topic's partitions; the topic's own name if it is not partitioned."""
        return [self.name.with_partition(i) for i in range(self.partitions)] or [self.name]


async def find_matching_topics(source: MigrationSource, asked: Sequence[str]) -> list[TopicToCopy]:
    """Returns the topics of the source that match the names and patterns in `asked`, sorted by name, without
    duplicates. Raises InvalidName if a name is invalid, InvalidRequest if a topic cannot be copied (a partition, or not
    persistent), TopicNotFound if no topic matches a name or pattern. Raises also the errors of `source`."""
    names: dict[TopicName, None] = {}
    listed: dict[str, list[TopicName]] = {}
    for text in asked:
        topic = _parse(text)
        namespace = f"{topic.tenant}/{topic.namespace}"
        if namespace not in listed:
            listed[namespace] = [TopicName.parse(each) for each in await source.list_topics(namespace)]
        found = _matching(topic, listed[namespace])
        if not found and (_is_pattern(topic) or not await _partitions(source, topic)):
            what = "no topic matches" if _is_pattern(topic) else "there is no topic"
            raise TopicNotFound(f"at the source {what} {topic}, and none is created there", topic=topic.full)
        names.update(dict.fromkeys(found or [topic]))
    return [TopicToCopy(name, await source.count_partitions(name)) for name in sorted(names, key=str)]


async def _partitions(source: MigrationSource, topic: TopicName) -> int:
    """Returns the number of partitions; 0 also if the topic does not exist: Pulsar then answers 0, Magnetar
    TopicNotFound."""
    try:
        return await source.count_partitions(topic)
    except TopicNotFound:
        return 0


def _parse(text: str) -> TopicName:
    topic = TopicName.parse(text)
    if not topic.persistent:
        raise InvalidRequest(f"{topic} is not stored: there is nothing to copy")
    if topic.is_partition:
        raise InvalidRequest(f"{topic} is a partition: name {topic.base}, whose partitions are copied together")
    return topic


def _is_pattern(topic: TopicName) -> bool:
    return not _plan_MAGIC.isdisjoint(topic.local)


def _matching(asked: TopicName, listed: Iterable[TopicName]) -> list[TopicName]:
    bases = dict.fromkeys(each.base for each in listed)
    if not _is_pattern(asked):
        return [asked] if asked in bases else []
    return [each for each in bases if not each.local.startswith("__") and fnmatchcase(each.local, asked.local)]
