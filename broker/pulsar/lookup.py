"""Answers the requests of a Pulsar client that are not about a producer: owners, partitions, topics of a namespace,
schemas, and transactions (with the functions of producer.py); and those of a consumer that are answered later.

Each request is answered by its own kind of response, also with an error: in Pulsar's C++ client the ids of look-ups and
of other requests overlap, so an ERROR could end another request.

Also in this file: watchers of the topics of a namespace that match a pattern (`TopicListWatches`), for the pattern
subscriptions of Pulsar's Java client.

    WATCH_TOPIC_LIST → WATCH_TOPIC_LIST_SUCCESS: all that match (none when the client's hash is that of them),
                       WATCH_TOPIC_UPDATE for each change, until WATCH_TOPIC_LIST_CLOSE or the end of the connection

Names are those of GET_TOPICS_OF_NAMESPACE: persistent topics that the caller may look up, of a partitioned topic each
partition. The pattern is matched by RE2 against `tenant/namespace/topic` without the number of a partition, in time
linear in the name, whatever the pattern is. Without that library the flag `supports_topic_watchers` is not set, and the
client asks for all names each minute. If the metadata does not answer, the watcher starts again and sends the
difference. Bounds: `WATCHERS_PER_CONNECTION_MAX` of a connection, `PATTERN_CHARACTERS_MAX` characters,
`RE2_MEMORY_BYTES_MAX` of memory for each. Guarding tests: tests/broker/pulsar/test_topic_lists.py. """

from __future__ import annotations

import asyncio
import importlib.util
import logging
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...proto import pulsar_pb2 as pulsar
from ...proto import states as subscription_types
from ...proto.checksum import crc32c
from ...proto.errors import (
    IncompatibleSchema,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    SchemaNotFound,
    Unavailable,
)
from ...proto.names import NamespaceName, TopicName
from ...proto.operations import Permission
from ...proto.schema import BYTES_VERSION, SchemaInfo, SchemaType, decode_version, encode_version
from ...runtime.alarm import EventLoopSlices
from ...runtime.tasks import Tasks
from ..cluster.policy_cache import TopicListChange, TopicRemoved, TopicsListed
from ..session import summaries
from ..session.topics import SchemaQueries, TopicQueries
from ..transaction.coordinators import ASSIGN_TOPIC
from . import producer
from .consumer import PulsarConsumerHandler
from .frames import encode_frame
from .translate import (
    encode_message_id,
    ensure_magnetar_error,
    find_pulsar_error_number,
    make_wire_schema,
    parse_schema,
)

if TYPE_CHECKING:
    from .connection import PulsarConnection

PulsarCommand = pulsar.BaseCommand


async def answer_command(connection: PulsarConnection, command: PulsarCommand) -> None:
    """Carries out a command of the client and sends the answer, also if the command fails. A kind of command that the
    broker does not support is answered with an error; a kind that no client may send ends the connection."""
    kind = PulsarCommand.Type.Name(command.type).lower()
    asked: Any = getattr(command, kind, None)
    answers = _ANSWERS.get(kind)
    if answers is None or asked is None:
        if hasattr(asked, "request_id"):
            connection.send_error(asked.request_id, NotAllowed(f"there is no {kind} here"))
        else:
            connection.abort(InvalidRequest(f"a client does not send {kind}"))
        return
    work, failed = answers
    try:
        found = await work(connection, asked)
    except Exception as error:
        found = failed(asked, ensure_magnetar_error(error))
    connection.send(found)


# ------------------------------------------------------------------ look-ups
async def _lookup(connection: PulsarConnection, asked: pulsar.CommandLookupTopic) -> bytes:
    topic, broker = TopicName.parse(asked.topic), connection.broker
    coordinator = producer.get_coordinator_number(topic)
    if coordinator is not None:
        owner = await broker.transactions.find_owner(coordinator)
    else:
        await broker.access.check_permission(connection.caller.principal, Permission.LOOKUP, topic=topic)
        owner = await broker.find_owner(topic)
    listener = connection.listener = asked.advertised_listener_name
    urls = [url for url in owner.pulsar.get(listener, ()) if url.startswith("pulsar")]
    if not urls:
        # This text is a contract: the C++ client ends its look-up at it, and repeats it after any other.
        raise Unavailable(f"the broker do not have {listener or 'a'} listener")
    return encode_frame(lookup_response=pulsar.CommandLookupTopicResponse(
        request_id=asked.request_id, response=pulsar.CommandLookupTopicResponse.Connect, authoritative=True,
        brokerServiceUrl=_first(urls, "pulsar://"), brokerServiceUrlTls=_first(urls, "pulsar+ssl://"),
    ))  # fmt: skip


def _first(urls: list[str], scheme: str) -> str:
    return next((url for url in urls if url.startswith(scheme)), "")


def _lookup_failed(asked: Any, error: MagnetarError) -> bytes:
    return encode_frame(lookup_response=pulsar.CommandLookupTopicResponse(
        request_id=asked.request_id, response=pulsar.CommandLookupTopicResponse.Failed,
        error=find_pulsar_error_number(error), message=error.message,
    ))  # fmt: skip


async def _partitions(connection: PulsarConnection, asked: pulsar.CommandPartitionedTopicMetadata) -> bytes:
    topic, broker = TopicName.parse(asked.topic), connection.broker
    if topic == ASSIGN_TOPIC:
        count = await broker.transactions.ensure_coordinator_count()
    else:
        await broker.access.check_permission(connection.caller.principal, Permission.LOOKUP, topic=topic)
        create = asked.metadata_auto_creation_enabled
        count = (await TopicQueries(broker).count_partitions(topic, create=create, by_use=True)).count
    return encode_frame(partitioned_metadata_response=pulsar.CommandPartitionedTopicMetadataResponse(
        request_id=asked.request_id, response=pulsar.CommandPartitionedTopicMetadataResponse.Success,
        partitions=count,
    ))  # fmt: skip


def _partitions_failed(asked: Any, error: MagnetarError) -> bytes:
    return encode_frame(partitioned_metadata_response=pulsar.CommandPartitionedTopicMetadataResponse(
        request_id=asked.request_id, response=pulsar.CommandPartitionedTopicMetadataResponse.Failed,
        error=find_pulsar_error_number(error),
        message=error.message,
    ))  # fmt: skip


async def _topics(connection: PulsarConnection, asked: pulsar.CommandGetTopicsOfNamespace) -> bytes:
    """Answers with the topics of a namespace. Answers with no topics if the namespace does not exist: after an error
    Pulsar's clients would retry for ever."""
    try:
        found = await _topics_of(connection, asked)
    except NotFound:
        found = []
    hash_ = hash_topic_names(found)
    changed = not asked.topics_hash or asked.topics_hash != hash_
    return encode_frame(get_topics_of_namespace_response=pulsar.CommandGetTopicsOfNamespaceResponse(
        request_id=asked.request_id, topics=found if changed else (), topics_hash=hash_, changed=changed,
    ))  # fmt: skip


async def _topics_of(connection: PulsarConnection, asked: pulsar.CommandGetTopicsOfNamespace) -> list[str]:
    """Returns the topics of a namespace. Raises NamespaceNotFound."""
    broker, namespace = connection.broker, NamespaceName.parse(asked.namespace)
    shown = await broker.access.make_topic_filter(connection.caller.principal, namespace)
    names = set[str]()
    if asked.mode != pulsar.CommandGetTopicsOfNamespace.NON_PERSISTENT:
        names.update(await broker.catalog.list_topics(namespace, partitions=True))
    if asked.mode != pulsar.CommandGetTopicsOfNamespace.PERSISTENT:
        names.update(await broker.catalog.list_non_persistent_topics(namespace, partitions=True))
        here = (topic.name for topic in broker.loaded.values() if topic.name.namespace_name == namespace)
        names.update(name.full for name in here if not name.persistent)
    return sorted(name for name in names if shown(name))


def hash_topic_names(names: list[str]) -> str:
    """Returns the hash of a list of topic names, computed as Pulsar's clients compute it. The list must be sorted."""
    return struct.pack("<I", crc32c(",".join(names).encode())).hex()


def _failed(asked: Any, error: MagnetarError) -> bytes:
    return encode_frame(
        error=pulsar.CommandError(
            request_id=asked.request_id, error=find_pulsar_error_number(error), message=error.message
        )
    )


# ------------------------------------------------------------------ schemas
async def _schema(connection: PulsarConnection, asked: pulsar.CommandGetSchema) -> bytes:
    topic = TopicName.parse(asked.topic)
    await connection.broker.access.check_permission(connection.caller.principal, Permission.LOOKUP, topic=topic)
    if asked.schema_version == BYTES_VERSION:
        return _schema_is(asked.request_id, SchemaInfo(type=SchemaType.NONE), BYTES_VERSION)
    version = decode_version(asked.schema_version)
    if version is None and asked.HasField("schema_version"):
        raise IncompatibleSchema("the version of a schema has 8 bytes")
    found = await SchemaQueries(connection.broker).get_schema(topic, version)
    if found.deleted:
        raise SchemaNotFound(f"version {found.version} of the schema of topic {topic} is deleted", topic=topic)
    return _schema_is(asked.request_id, found.info, encode_version(found.version))


def _schema_is(request_id: int, info: SchemaInfo, version: bytes) -> bytes:
    return encode_frame(get_schema_response=pulsar.CommandGetSchemaResponse(
        request_id=request_id, schema=make_wire_schema(info), schema_version=version
    ))  # fmt: skip


def _schema_failed(asked: Any, error: MagnetarError) -> bytes:
    return encode_frame(get_schema_response=pulsar.CommandGetSchemaResponse(
        request_id=asked.request_id, error_code=find_pulsar_error_number(error), error_message=error.message
    ))  # fmt: skip


async def _new_schema(connection: PulsarConnection, asked: pulsar.CommandGetOrCreateSchema) -> bytes:
    """Registers the schema of a topic, which must exist. A missing topic is not created: if the creation were refused,
    Java's client would retry for ever."""
    topic = TopicName.parse(asked.topic)
    await connection.broker.access.check_permission(connection.caller.principal, Permission.PRODUCE, topic=topic)
    await connection.broker.catalog.count_existing_partitions(topic)
    given = parse_schema(asked.schema)
    version = BYTES_VERSION
    if given is not None:
        user = connection.caller.principal.name
        version = encode_version(
            await SchemaQueries(connection.broker).register_schema(topic, given, user, by_hand=False)
        )
    return encode_frame(get_or_create_schema_response=pulsar.CommandGetOrCreateSchemaResponse(
        request_id=asked.request_id, schema_version=version
    ))  # fmt: skip


def _new_schema_failed(asked: Any, error: MagnetarError) -> bytes:
    return encode_frame(get_or_create_schema_response=pulsar.CommandGetOrCreateSchemaResponse(
        request_id=asked.request_id, error_code=find_pulsar_error_number(error), error_message=error.message
    ))  # fmt: skip


_ANSWERS: dict[str, tuple[Callable[[PulsarConnection, Any], Any], Callable[[Any, MagnetarError], bytes]]] = {
    "lookup": (_lookup, _lookup_failed),
    "partitioned_metadata": (_partitions, _partitions_failed),
    "get_topics_of_namespace": (_topics, _failed),
    "get_schema": (_schema, _schema_failed),
    "get_or_create_schema": (_new_schema, _new_schema_failed),
    **producer.TRANSACTION_COMMAND_ANSWERS,
}


# ------------------------------------------------------------------ of a consumer
async def answer_consumer_request(
    connection: PulsarConnection, kind: int, asked: Any, handler: PulsarConsumerHandler | None
) -> None:
    """Carries out a SEEK, UNSUBSCRIBE, GET_LAST_MESSAGE_ID or CONSUMER_STATS command of a consumer, and sends the
    answer, also if the command fails. `kind`: the type of the command; `handler`: None if there is no consumer of the
    id."""
    try:
        if handler is None or handler.session is None:
            raise Unavailable("there is no consumer of this id")
        if kind == PulsarCommand.SEEK:
            await handler.seek(asked)
        elif kind == PulsarCommand.UNSUBSCRIBE:
            await handler.unsubscribe(force=asked.force)
        elif kind == PulsarCommand.GET_LAST_MESSAGE_ID:
            connection.send(await _last(handler, asked.request_id))
            return
        else:
            connection.send(await _stats(handler, asked.request_id))
            return
    except Exception as error:
        connection.send(
            _of_consumer_failed(kind, asked.request_id, ensure_magnetar_error(error), known=handler is not None)
        )
    else:
        connection.send_success(asked.request_id)


def _of_consumer_failed(kind: int, request_id: int, error: MagnetarError, *, known: bool) -> bytes:
    if kind == PulsarCommand.CONSUMER_STATS:
        number = find_pulsar_error_number(error) if known else pulsar.ConsumerNotFound
        return encode_frame(consumer_stats_response=pulsar.CommandConsumerStatsResponse(
            request_id=request_id, error_code=number, error_message=error.message
        ))  # fmt: skip
    busy = kind == PulsarCommand.UNSUBSCRIBE and find_pulsar_error_number(error) == pulsar.ServiceNotReady
    number = pulsar.MetadataError if busy or not known else find_pulsar_error_number(error)
    return encode_frame(error=pulsar.CommandError(request_id=request_id, error=number, message=error.message))


async def _last(handler: PulsarConsumerHandler, request_id: int) -> bytes:
    assert handler.session is not None, "it is open"
    found = await handler.session.find_last_message()
    return encode_frame(get_last_message_id_response=pulsar.CommandGetLastMessageIdResponse(
        request_id=request_id, last_message_id=encode_message_id(found.position, found.partition, found.batch_index),
        consumer_mark_delete_position=encode_message_id(found.mark_delete, found.partition),
    ))  # fmt: skip


async def _stats(handler: PulsarConsumerHandler, request_id: int) -> bytes:
    session = handler.session
    assert session is not None, "it is open"
    found = await summaries.collect_subscription_stats(session.topic, session.subscription)
    member = session.member
    return encode_frame(consumer_stats_response=pulsar.CommandConsumerStatsResponse(
        request_id=request_id, consumerName=session.name, type=subscription_types.pulsar_type_name(found.type),
        msgBacklog=found.backlog, availablePermits=max(0, member.permits), unackedMessages=member.unacked,
        blockedConsumerOnUnackedMsgs=member.blocked, address=handler.address,
    ))  # fmt: skip


WATCHERS_PER_CONNECTION_MAX = 100
PATTERN_CHARACTERS_MAX = 1_000
RE2_MEMORY_BYTES_MAX = 1 << 20
WATCH_RETRY_S = 1.0
"""Seconds until a watcher starts again after the metadata did not answer."""

_LOG = logging.getLogger("magnetar.broker.pulsar")


def supports_topic_patterns() -> bool:
    """Returns True if clients may subscribe by a pattern of topic names, because RE2 is installed."""
    return importlib.util.find_spec("re2") is not None


class TopicListWatches:
    """The topic watches of one connection, by the ids that the client has chosen. Each watch tells the client which
    topics of a namespace match a pattern, and each change."""

    def __init__(self, connection: PulsarConnection) -> None:
        self._connection = connection
        self._tasks = Tasks()
        self._watchers: dict[int, asyncio.Task[None]] = {}

    def start_topic_watch(self, asked: pulsar.CommandWatchTopicList) -> None:
        """Starts to watch the topics of a namespace that match the client's pattern. Answers the request with an error
        if its watcher id is in use, the connection has WATCHERS_PER_CONNECTION_MAX watchers, or the namespace or the
        pattern is invalid."""
        if asked.watcher_id in self._watchers:
            self._connection.send_error(asked.request_id, Unavailable("there is a watcher of this id"))
            return
        try:
            if len(self._watchers) >= WATCHERS_PER_CONNECTION_MAX:
                raise NotAllowed(f"a connection carries {WATCHERS_PER_CONNECTION_MAX} watchers, and no more")
            watcher = _Watcher(self._connection, asked)
        except MagnetarError as error:
            self._connection.send_error(asked.request_id, error)
            return
        task = self._watchers[asked.watcher_id] = self._tasks.spawn(self._run(watcher, asked), "pulsar-topic-watcher")
        task.add_done_callback(lambda _: self._remove_watcher(asked.watcher_id, task))

    async def _run(self, watcher: _Watcher, asked: pulsar.CommandWatchTopicList) -> None:
        try:
            await watcher.run()
        except Exception as error:
            why = ensure_magnetar_error(error)
            if not watcher.answered:
                self._connection.send_error(asked.request_id, why)
            else:
                _LOG.warning("the topics of %s are watched no more for a client: %s", asked.namespace, why)

    def _remove_watcher(self, watcher_id: int, task: asyncio.Task[None]) -> None:
        if self._watchers.get(watcher_id) is task:
            del self._watchers[watcher_id]

    def stop_topic_watch(self, asked: pulsar.CommandWatchTopicListClose) -> None:
        """Stops the watch with the id that the client names. Answers with success even if there is no such watch."""
        task = self._watchers.pop(asked.watcher_id, None)
        if task is not None:
            task.cancel()
        self._connection.send_success(asked.request_id)

    async def close(self) -> None:
        """Stops all watches, without an answer."""
        await self._tasks.close()


class _Watcher:
    def __init__(self, connection: PulsarConnection, asked: pulsar.CommandWatchTopicList) -> None:
        """Makes a watcher. Raises InvalidName, InvalidRequest, NotAllowed."""
        self._connection = connection
        self._asked = asked
        self._namespace = NamespaceName.parse(asked.namespace)
        self._matches = compile_topic_pattern(asked.topics_pattern)
        self._known: set[str] = set()
        self.answered = False

    async def run(self) -> None:
        """Sends the list of topics, and then each change of the list, until it is cancelled. Raises NamespaceNotFound,
        Unauthorized or Unavailable if the first list cannot be read."""
        while True:
            try:
                await self._follow()
            except NotFound:
                if not self.answered:
                    raise
                self._send_changes(self._known)  # the namespace was deleted
            except MagnetarError as error:
                if not self.answered or not error.retryable:
                    raise
                _LOG.info("the topics of %s are not watched for a moment: %s", self._namespace, error)
            await asyncio.sleep(WATCH_RETRY_S)

    async def _follow(self) -> None:
        principal = self._connection.caller.principal
        async for told in TopicQueries(self._connection.broker).watch_topics(self._namespace, 0, principal):
            await self._on_change(told)

    async def _on_change(self, told: TopicListChange) -> None:
        if isinstance(told, TopicsListed):
            now = await self._names_of(told.names)
            gone = self._known - now
        else:
            gone = {name for name in self._known if TopicName.parse(name).base.full == told.name}
            now = set() if isinstance(told, TopicRemoved) else await self._names_of((told.name,))
            gone -= now
        if self.answered:
            self._send_changes(gone, now)
        else:
            self._known = now
            self._answer()

    async def _names_of(self, topics: Iterable[str]) -> set[str]:
        """Returns the full names of the topics that match; for a partitioned topic those of its partitions."""
        found, catalog = set[str](), self._connection.broker.catalog
        turns = EventLoopSlices(self._connection.broker.world.clock)
        for each in topics:
            if self._matches(each):
                topic = TopicName.parse(each)
                count = await catalog.count_partitions(topic)
                found.update([topic.with_partition(i).full for i in range(count)] if count else [topic.full])
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return found

    def _answer(self) -> None:
        self.answered = True
        names = sorted(self._known)
        hash_ = hash_topic_names(names)
        self._connection.send(encode_frame(watch_topic_list_success=pulsar.CommandWatchTopicListSuccess(
            request_id=self._asked.request_id, watcher_id=self._asked.watcher_id,
            topic=names if self._asked.topics_hash != hash_ else (), topics_hash=hash_,
        )))  # fmt: skip

    def _send_changes(self, gone: Iterable[str], now: Iterable[str] = ()) -> None:
        new, gone = sorted(set(now) - self._known), sorted(gone)
        if not new and not gone:
            return
        self._known = self._known.difference(gone).union(new)
        self._connection.send(encode_frame(watch_topic_update=pulsar.CommandWatchTopicUpdate(
            watcher_id=self._asked.watcher_id, new_topics=new, deleted_topics=gone,
            topics_hash=hash_topic_names(sorted(self._known)),
        )))  # fmt: skip


def compile_topic_pattern(text: str) -> Callable[[str], bool]:
    """Returns a function that takes the full name of a topic, and returns True if the whole name matches the pattern;
    the domain before `://` is ignored in both. Raises InvalidRequest if the pattern is invalid or longer than
    PATTERN_CHARACTERS_MAX characters; NotAllowed if RE2 is not installed."""
    if len(text) > PATTERN_CHARACTERS_MAX:
        raise InvalidRequest(f"a pattern of {len(text)} characters is longer than {PATTERN_CHARACTERS_MAX}")
    try:
        import re2
    except ImportError as error:
        raise NotAllowed("patterns are not matched here: google-re2 is not installed") from error
    options = re2.Options()
    options.max_mem, options.log_errors = RE2_MEMORY_BYTES_MAX, False
    try:
        compiled: Any = re2.compile(_without_domain(text), options)
    except re2.error as error:
        raise InvalidRequest(f"{text!r:.100} is no pattern: {error.args[0]!r:.100}") from error
    return lambda name: compiled.fullmatch(_without_domain(name)) is not None


def _without_domain(text: str) -> str:
    return text.partition("://")[2] or text
