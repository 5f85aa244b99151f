"""Requests that are not about a producer: owners, partitions, topics of a namespace, schemas, transactions
(transactions.py); and the requests of a consumer that are answered later.

Each request is answered by its own kind of response, also with an error: in Pulsar's C++ client the ids of look-ups and
of other requests overlap, so an ERROR could end another request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
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
from ..session import statistics
from ..session.topics import SchemaQueries, TopicQueries
from ..transaction.coordinators import ASSIGN_TOPIC
from . import transactions
from .consumer import ConsumerHandler
from .errors import ensure_magnetar_error, pulsar_error_number
from .frames import encode_frame
from .translate import encode_message_id, parse_schema, wire_schema

if TYPE_CHECKING:
    from .connection import PulsarConnection

Command = pulsar.BaseCommand


async def answer_request(connection: PulsarConnection, command: Command) -> None:
    """Answers a command; ends the connection if clients may not send that command."""
    kind = Command.Type.Name(command.type).lower()
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
        found = failed(asked.request_id, ensure_magnetar_error(error))
    connection.send(found)


# ------------------------------------------------------------------ look-ups
async def _lookup(connection: PulsarConnection, asked: pulsar.CommandLookupTopic) -> bytes:
    topic, broker = TopicName.parse(asked.topic), connection.broker
    coordinator = transactions.coordinator_of(topic)
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


def _lookup_failed(request_id: int, error: MagnetarError) -> bytes:
    return encode_frame(lookup_response=pulsar.CommandLookupTopicResponse(
        request_id=request_id, response=pulsar.CommandLookupTopicResponse.Failed, error=pulsar_error_number(error),
        message=error.message,
    ))  # fmt: skip


async def _partitions(connection: PulsarConnection, asked: pulsar.CommandPartitionedTopicMetadata) -> bytes:
    topic, broker = TopicName.parse(asked.topic), connection.broker
    if topic == ASSIGN_TOPIC:
        count = await broker.transactions.ensure_count()
    else:
        await broker.access.check_permission(connection.caller.principal, Permission.LOOKUP, topic=topic)
        create = asked.metadata_auto_creation_enabled
        count = (await TopicQueries(broker).partitions(topic, create=create, by_use=True)).count
    return encode_frame(partitioned_metadata_response=pulsar.CommandPartitionedTopicMetadataResponse(
        request_id=asked.request_id, response=pulsar.CommandPartitionedTopicMetadataResponse.Success,
        partitions=count,
    ))  # fmt: skip


def _partitions_failed(request_id: int, error: MagnetarError) -> bytes:
    return encode_frame(partitioned_metadata_response=pulsar.CommandPartitionedTopicMetadataResponse(
        request_id=request_id, response=pulsar.CommandPartitionedTopicMetadataResponse.Failed,
        error=pulsar_error_number(error),
        message=error.message,
    ))  # fmt: skip


async def _topics(connection: PulsarConnection, asked: pulsar.CommandGetTopicsOfNamespace) -> bytes:
    """Answers with the topics of a namespace. Answers with no topics if the namespace does not exist: after an error
    Pulsar's clients would retry for ever."""
    try:
        found = await _topics_of(connection, asked)
    except NotFound:
        found = []
    hash_ = topics_hash(found)
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


def topics_hash(names: list[str]) -> str:
    """Returns the hash of sorted names as Pulsar's clients compute it."""
    return struct.pack("<I", crc32c(",".join(names).encode())).hex()


def _failed(request_id: int, error: MagnetarError) -> bytes:
    return encode_frame(
        error=pulsar.CommandError(request_id=request_id, error=pulsar_error_number(error), message=error.message)
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
    found = await SchemaQueries(connection.broker).get(topic, version)
    if found.deleted:
        raise SchemaNotFound(f"version {found.version} of the schema of topic {topic} is deleted", topic=topic)
    return _schema_is(asked.request_id, found.info, encode_version(found.version))


def _schema_is(request_id: int, info: SchemaInfo, version: bytes) -> bytes:
    return encode_frame(get_schema_response=pulsar.CommandGetSchemaResponse(
        request_id=request_id, schema=wire_schema(info), schema_version=version
    ))  # fmt: skip


def _schema_failed(request_id: int, error: MagnetarError) -> bytes:
    return encode_frame(get_schema_response=pulsar.CommandGetSchemaResponse(
        request_id=request_id, error_code=pulsar_error_number(error), error_message=error.message
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


def _new_schema_failed(request_id: int, error: MagnetarError) -> bytes:
    return encode_frame(get_or_create_schema_response=pulsar.CommandGetOrCreateSchemaResponse(
        request_id=request_id, error_code=pulsar_error_number(error), error_message=error.message
    ))  # fmt: skip


_ANSWERS: dict[str, tuple[Callable[[PulsarConnection, Any], Any], Callable[[int, MagnetarError], bytes]]] = {
    "lookup": (_lookup, _lookup_failed),
    "partitioned_metadata": (_partitions, _partitions_failed),
    "get_topics_of_namespace": (_topics, _failed),
    "get_schema": (_schema, _schema_failed),
    "get_or_create_schema": (_new_schema, _new_schema_failed),
    **transactions.ANSWERS,
}


# ------------------------------------------------------------------ of a consumer
async def answer_consumer_request(
    connection: PulsarConnection, kind: int, asked: Any, handler: ConsumerHandler | None
) -> None:
    """Answers SEEK, UNSUBSCRIBE, GET_LAST_MESSAGE_ID and CONSUMER_STATS."""
    try:
        if handler is None or handler.session is None:
            raise Unavailable("there is no consumer of this id")
        if kind == Command.SEEK:
            await handler.seek(asked)
        elif kind == Command.UNSUBSCRIBE:
            await handler.unsubscribe(force=asked.force)
        elif kind == Command.GET_LAST_MESSAGE_ID:
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
    if kind == Command.CONSUMER_STATS:
        number = pulsar_error_number(error) if known else pulsar.ConsumerNotFound
        return encode_frame(consumer_stats_response=pulsar.CommandConsumerStatsResponse(
            request_id=request_id, error_code=number, error_message=error.message
        ))  # fmt: skip
    busy = kind == Command.UNSUBSCRIBE and pulsar_error_number(error) == pulsar.ServiceNotReady
    number = pulsar.MetadataError if busy or not known else pulsar_error_number(error)
    return encode_frame(error=pulsar.CommandError(request_id=request_id, error=number, message=error.message))


async def _last(handler: ConsumerHandler, request_id: int) -> bytes:
    assert handler.session is not None, "it is open"
    found = await handler.session.find_last_message()
    return encode_frame(get_last_message_id_response=pulsar.CommandGetLastMessageIdResponse(
        request_id=request_id, last_message_id=encode_message_id(found.position, found.partition, found.batch_index),
        consumer_mark_delete_position=encode_message_id(found.mark_delete, found.partition),
    ))  # fmt: skip


async def _stats(handler: ConsumerHandler, request_id: int) -> bytes:
    session = handler.session
    assert session is not None, "it is open"
    found = await statistics.subscription_stats(session.topic, session.subscription)
    member = session.member
    return encode_frame(consumer_stats_response=pulsar.CommandConsumerStatsResponse(
        request_id=request_id, consumerName=session.name, type=subscription_types.title(found.type),
        msgBacklog=found.backlog, availablePermits=max(0, member.permits), unackedMessages=member.unacked,
        blockedConsumerOnUnackedMsgs=member.blocked, address=handler.address,
    ))  # fmt: skip
