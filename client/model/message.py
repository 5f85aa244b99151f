"""Received messages. A `Message` is a view of its part of an entry; the entry is parsed once for all its messages.

A `ReceivedEntry` has the fields that all messages of one entry share; a `Message` has its batch index, its own
metadata and its payload, and computes everything else when a program asks for it. Also the parser of a batch that a
program has as bytes (`MessageBatch`), and the events of Failover consumers (`ConsumerEventListener`,
`ActiveConsumerEvents`)."""

from __future__ import annotations

from base64 import b64decode
from collections import deque
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from ...proto.entry import (
    EncryptFunction,
    EntryHeader,
    EqualLengthPayloads,
    MessageFields,
    decode_message_columns,
    decode_properties,
)
from ...proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from ...proto.errors import CorruptEntry
from ...proto.names import Position, TopicName
from ...proto.schema import SchemaInfo
from ...proto.states import Failure
from ..common.checks import (
    WrongMessageType,
    WrongMessageValue,
    check_parameter,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
)
from ..common.errors import ChecksumError, PulsarException
from ..common.loggers import log_foreign_error
from .encryption import EncryptionContext
from .message_id import MessageId, UncheckedMessageId
from .schema import BytesSchema, Schema


class SchemaCachePort(Protocol):
    """The interface of the cache of a topic's schemas, by version, that a Message uses. An object of
    client/connect/connections.py implements it. A version is 8 bytes; an empty one means the newest."""

    def get_schema(self, version: bytes) -> SchemaInfo:
        """Returns the schema with a version; asks the broker if the schema is not cached. Raises InvalidMessage if the
        topic has no such schema, or the broker's error."""
        ...

    def find_cached_schema(self, version: bytes) -> SchemaInfo | None:
        """Returns a schema that was fetched before; None if it was not fetched, or if the topic lacks this version."""
        ...

    async def fetch_schema(self, version: bytes) -> None:
        """Asks the broker for a schema, unless it is cached, and caches the answer, also that the topic lacks the
        version. Raises the broker's error."""
        ...


class ReceivingConsumer(Protocol):
    """The interface of one partition's consumer that its received entries and messages use.
    client/consume/partition_consumer.py implements it."""

    @property
    def topic(self) -> TopicName: ...
    @property
    def subscription(self) -> str: ...
    @property
    def schema(self) -> Schema: ...
    @property
    def writer_schemas(self) -> SchemaCachePort | None:
        """Returns the schemas with which the topic's messages were written; None: there are none, because no consumer
        received the messages. If a topic of this name was deleted and created again, these are the schemas of the topic
        that the consumer reads now."""
        ...
    @property
    def must_keep_order(self) -> bool:
        """Returns whether a failed message blocks the messages after it. If so, the redelivery count of a batch applies
        only to its first message that is not acknowledged."""
        ...

    def on_taken(self, message: Message) -> None:
        """Fact: the application, or a filter in the client, received the last message of an entry. The consumer may now
        grant the broker the permits of the entry again. Raises the error of a damaged message."""
        ...

    def on_message_put_back(self, message: Message) -> None:
        """Fact: the message was taken out of the receiver queue and put back, because it did not reach the application.
        May be called from any thread."""
        ...

    def on_dequeue_interrupted(self) -> None:
        """Fact: Ctrl-C interrupted a call of `on_taken` at an unknown place, so it is unknown whether the call took
        effect."""
        ...

    def acknowledge_if_expired(self, message: Message) -> bool:
        """Returns whether the message has expired since it was delivered. If so, acknowledges the message, and the
        caller must not give it to the application. Called for messages of entries that have a `broker_clock_ms`."""
        ...

    def acknowledge(self, which: Message) -> None: ...
    def remember_failure(self, position: Position, failure: Failure) -> None:
        """Fact: a message of the entry at `position` was negatively acknowledged, for the reason `failure`."""
        ...

    def find_failure(self, message: Message) -> Failure | None:
        """Returns the reason of the last negative acknowledgement of the message; None if it is not known."""
        ...

    def make_copy_encryptor(self, message: Message) -> EncryptFunction | None:
        """Returns a function that encrypts a copy of `message` for the readers of `message`; None if `message` was not
        encrypted. Raises CryptoError if it cannot be decrypted."""
        ...



class ReceivedEntry:
    """An entry that a consumer received, with the fields that all messages of the entry share. `header`: its parsed
    metadata. `position`: its ledger id and entry id. `index`: that of its last message in the partition; -1: not known.
    `redelivery_count`: how often the broker delivered the entry before."""

    __slots__ = (
        "broker_clock_ms",
        "charged",
        "chunks",
        "consumer",
        "delivery",
        "entry_id",
        "first_index",
        "header",
        "index",
        "ledger_id",
        "position",
        "published_ms",
        "redelivery_count",
        "size",
        "stream",
        "unfolded",
        "writers",
    )  # fmt: skip

    def __init__(
        self, consumer: ReceivingConsumer, header: EntryHeader, position: Position, index: int, redelivered: int
    ) -> None:
        self.consumer = consumer
        self.writers = consumer.writer_schemas
        self.header = header
        self.ledger_id, self.entry_id = position
        self.position = position
        self.index = index  # of the last message; -1: not known
        self.redelivery_count = redelivered
        self.size = header.num_messages
        self.charged = self.size  # permits that the broker took for it (client/core/redelivery.py)
        self.unfolded = 0  # bytes of memory that are counted until the application takes it; 0 of nearly all
        self.broker_clock_ms: float | None = None  # what to add to this process's clock; None: no message expires
        self.stream = 0  # over which it came: its permits are those of that stream
        self.published_ms = 0  # by the broker's clock, ms since the epoch; 0: not known
        self.chunks: tuple[Position, ...] = ()  # all entries of a message in chunks; this is the last of them
        self.first_index = -1  # batch index of the first message that the application gets
        self.delivery: object = None  # tells it from another delivery of the entry, once a transaction needs that


class Message:
    """A received message; it stays readable after its consumer is closed.

        message = consumer.receive()
        print(message.data(), message.properties(), message.message_id())

    Times are ms since the epoch. `value` raises InvalidMessage if the payload does not fit the schema. A message may
    retain the bytes of its whole batch in memory: to store one for long, store `data()`.
    """

    __slots__ = ("_payload", "batch_index", "entry", "fields", "permits")

    def __reduce__(self) -> NoReturn:
        raise WrongMessageType(
            "a message belongs to its consumer, and is neither pickled nor copied: take what you need of it (`data()`, "
            "`properties()`, …); `message_id().serialize()` names it elsewhere"
        )

    def __init__(
        self, entry: ReceivedEntry, fields: MessageFields, payload: bytes | EqualLengthPayloads, batch_index: int
    ) -> None:
        self.entry = entry
        self.fields = fields
        self._payload = payload  # or those of all messages of the entry, as long as none is asked for
        self.batch_index = batch_index
        self.permits = 0  # of the last message of an entry: granted to the broker when it is taken; below 0: granted

    @property
    def payload(self) -> bytes:
        """Returns the bytes of the message as the producer sent them, as `data` does."""
        payload = self._payload
        return payload if isinstance(payload, bytes) else payload[self.batch_index]

    def data(self) -> bytes:
        """Returns the bytes of the message as the producer sent them; empty for a message without a value."""
        payload = self._payload
        return payload if isinstance(payload, bytes) else payload[self.batch_index]

    def value(self) -> Any:
        """Returns the value of the message: the payload, decoded by the consumer's schema; None for a message without a
        value. With a KeyValueSchema of SEPARATED keys returns a (key, value) pair, or None if the producer sent None in
        place of the pair. Raises InvalidMessage if the payload does not fit the schema, and the errors of `writer`."""
        schema = self.entry.consumer.schema
        if self.fields.null_value and not (schema.separated and self._has_key):
            return None
        return schema.decode_message(self)

    @property
    def _has_key(self) -> bool:
        """Whether the message says anything about its key: the key itself, or that its key is None."""
        return self.fields.HasField("partition_key") or self.fields.null_partition_key

    def key_bytes(self) -> bytes:
        """Returns the key of the message as bytes, a text key as UTF-8; empty if the message has no key. A key that is
        marked as base64 but is no valid base64 counts as text."""
        key = self.fields.partition_key
        if self.fields.partition_key_b64_encoded:
            with suppress(ValueError):
                return b64decode(key, validate=True)
        return key.encode()

    def writer(self) -> SchemaInfo | None:
        """Returns the schema with which the producer wrote the message; if it is not cached, asks the broker and blocks
        until the answer comes. Returns None if the consumer's own schema decodes the message, for example because the
        message names no schema. Raises InvalidMessage if the topic lacks the schema, or if it is not cached and the
        caller is in the event loop; AlreadyClosed if that loop has ended; or the broker's error."""
        writers = self._decoded_by()
        return None if writers is None else writers.get_schema(self.writer_version)

    async def fetch_writer_schema(self) -> None:
        """Waits until the client has the schema with which the message was written; asks the broker if it is not
        cached. Does nothing if decoding does not need that schema. Raises the broker's error."""
        if (writers := self._decoded_by()) is not None:
            await writers.fetch_schema(self.writer_version)

    def _decoded_by(self) -> SchemaCachePort | None:
        schema = self.entry.consumer.schema
        return self.entry.writers if schema.by_writer and (self.writer_version or schema.needs_writer) else None

    @property
    def writer_version(self) -> bytes:
        """Returns the version of the schema with which the message was written, as 8 bytes; empty if the message names
        no schema."""
        return self.entry.header.metadata.schema_version

    def properties(self) -> dict[str, str]:
        """Returns a copy of the message's properties. Bytes in them that are not UTF-8 become U+FFFD."""
        return decode_properties(self.fields)

    def partition_key(self) -> str:
        """Returns the key of the message; an empty text if it has no key. If the key is bytes (`key_bytes`), or not
        UTF-8, returns its base64."""
        return self.fields.partition_key

    def ordering_key(self) -> str:
        """Returns the ordering key of the message; an empty text if it has none."""
        return self.fields.ordering_key.decode("utf-8", "replace")

    def has_null_value(self) -> bool:
        """Returns whether the message was sent without a value. In a compacted topic such a message deletes its key."""
        return self.fields.null_value

    def has_null_key(self) -> bool:
        """Returns whether the message has no key. Returns False if its key is the empty string."""
        return self.fields.null_partition_key or not self.fields.HasField("partition_key")

    def event_timestamp(self) -> int:
        """Returns the event time that the producer set, in ms since the epoch; 0 if it set none."""
        return self.fields.event_time

    def publish_timestamp(self) -> int:
        """Returns the time at which the producer sent the message: ms since the epoch, by the producer's clock."""
        return self.entry.header.publish_time

    def producer_name(self) -> str:
        """Returns the name of the producer that sent the message."""
        return self.entry.header.producer_name

    def schema_version(self) -> str:
        """Returns the version of the schema with which the message was written, as Pulsar's client does: one character
        for each of its eight bytes; empty if the message names none."""
        return self.entry.header.metadata.schema_version.decode("latin-1")

    def int_schema_version(self) -> int:
        """Returns the version of the schema with which the message was written as a number; -1 if the message names
        none."""
        return int.from_bytes(self.writer_version) if self.writer_version else -1

    def redelivery_count(self) -> int:
        """Returns how often the broker has delivered the message before this time; 0: this is the first delivery. With
        redelivery_order "key" only the first message of a batch that is not acknowledged has that count; the others
        have 0."""
        entry = self.entry
        if entry.redelivery_count and entry.consumer.must_keep_order and self.batch_index > entry.first_index:
            return 0
        return entry.redelivery_count

    def topic_name(self) -> str:
        """Returns the full name of the topic from which the message came; for a partitioned topic, of the partition."""
        return self.entry.consumer.topic.full

    def encryption_context(self) -> EncryptionContext | None:
        """Returns the description of how the message's entry was encrypted; None if it was not encrypted."""
        metadata = self.entry.header.metadata
        return EncryptionContext(metadata, failed=False) if metadata.encryption_param else None

    def index(self) -> int:
        """Returns the index of the message: its number in the partition, without gaps; -1 if the index is not known."""
        entry = self.entry
        return entry.index if entry.index < 0 else entry.index - entry.size + 1 + max(0, self.batch_index)

    def sequence_id(self) -> int:
        """Returns the sequence id with which the producer sent the message: its number among the messages of that
        producer."""
        own = getattr(self.fields, "sequence_id", 0)
        return own or self.entry.header.sequence_id + max(0, self.batch_index)

    def message_id(self) -> MessageId:
        """Returns the id of the message, which can be passed to `acknowledge` and `seek`, or used as the start of a
        reader."""
        entry = self.entry
        topic = entry.consumer.topic
        return UncheckedMessageId(topic.partition, entry.ledger_id, entry.entry_id, self.batch_index, entry.size,
            topic.full,
                       entry.chunks)  # fmt: skip

    def __repr__(self) -> str:
        return f"<Message {self.message_id()!r}, {len(self.payload)} bytes>"


class CiphertextMessage(Message):
    """A message for an entry that could not be decrypted: one message, even if the entry is a batch. `data` is the
    ciphertext; the properties and the key are those of the entry."""

    __slots__ = ()

    def encryption_context(self) -> EncryptionContext:
        return EncryptionContext(self.entry.header.metadata, failed=True)


class DamagedMessage(Message):
    """A placeholder for an entry that cannot be read, in the receiver queue. `receive` raises the placeholder's `error`
    instead of returning the placeholder."""

    __slots__ = ("_cause", "_id")

    def __init__(self, consumer: ReceivingConsumer, position: Position, cause: CorruptEntry, charged: int = 1) -> None:
        received = ReceivedEntry(consumer, EntryHeader(MessageMetadata(), 0), position, -1, 0)
        received.charged = charged
        super().__init__(received, SingleMessageMetadata(payload_size=0), b"", -1)
        self.permits = charged
        self._cause = cause
        self._id = position

    def error(self) -> PulsarException:
        """Returns a new ChecksumError that names the entry; its cause is the error of the parser."""
        error = ChecksumError(f"entry {self._id} is damaged: {self._cause.message}", entry=self._id)
        error.__cause__ = self._cause
        return error


def read_filter_field(message: Message, name: str) -> str | int | None:
    """Returns the value of a field of the message for a filter expression, such as "message.key"; None if the message
    does not have the field. `name`: one of `proto.filters.SYSTEM_NAMES`."""
    if name == "message.key":
        return message.partition_key() if message.fields.HasField("partition_key") else None
    if name == "message.ordering_key":
        return message.ordering_key() if message.fields.HasField("ordering_key") else None
    if name == "message.event_time":
        return message.event_timestamp() or None
    if name == "message.producer":
        return message.producer_name()
    if name == "message.publish_time":
        return message.publish_timestamp()
    if name == "message.size":
        return len(message.data())
    return message.int_schema_version() if message.writer_version else None


# ------------------------------------------------------------------------------------------------- message_batch
# `MessageBatch`: takes the payload of a batch apart, which a program got by other ways than a consumer.


BATCH_MESSAGES_MAX = 1 << 20
_NOWHERE = TopicName.parse("persistent://public/default/batch")


class MessageBatch:
    """Parses the messages of a batch that a program did not get from a consumer:
    `MessageBatch().with_message_id(id).parse_from(payload, count)`. The payload must be neither compressed nor
    encrypted."""

    def __init__(self) -> None:
        self._id = MessageId()

    def with_message_id(self, msg_id: MessageId) -> MessageBatch:
        """Sets the ledger, the entry and the partition that the ids of the parsed messages get. Returns this object.
        Raises InvalidConfiguration if `msg_id` is not a MessageId."""
        check_parameter("msg_id", make_instance_check(MessageId, optional=False), msg_id)
        self._id = msg_id
        return self

    def parse_from(self, data: bytes, size: int) -> list[Message]:
        """Parses the payload `data` of a batch and returns its messages. `size`: the number of messages in the batch,
        from 1 to 1,048,576. Raises InvalidMessage if `data` is not a batch of `size` messages, InvalidConfiguration for
        a wrong `size`."""
        check_parameter("size", make_whole_number_check(1, BATCH_MESSAGES_MAX), size)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise WrongMessageType(f"a batch is bytes, not {shorten_value(data)}")
        header = EntryHeader(MessageMetadata(num_messages_in_batch=size), 0)
        try:
            fields, payloads = decode_message_columns(header, bytes(data))
        except CorruptEntry as error:
            raise WrongMessageValue(f"the bytes are no batch of {size} messages: {error.message}") from error
        position = Position(self._id.ledger_id(), self._id.entry_id())
        entry = ReceivedEntry(_Unconnected(self._id.partition()), header, position, -1, 0)
        return [
            Message(entry, each, payload, index)
            for index, (each, payload) in enumerate(zip(fields, payloads, strict=True))
        ]


class _Unconnected(ReceivingConsumer):
    """The origin of messages that no consumer received: it has nothing to acknowledge and no permits."""

    def __init__(self, partition: int) -> None:
        self._topic = _NOWHERE if partition < 0 else _NOWHERE.with_partition(partition)
        self._schema = BytesSchema()

    @property
    def topic(self) -> TopicName:
        return self._topic

    @property
    def subscription(self) -> str:
        return ""

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def writer_schemas(self) -> None:
        return None

    @property
    def must_keep_order(self) -> bool:
        return False

    def on_taken(self, message: Message) -> None: ...
    def on_message_put_back(self, message: Message) -> None: ...
    def on_dequeue_interrupted(self) -> None: ...
    def acknowledge_if_expired(self, message: Message) -> bool:
        return False

    def acknowledge(self, which: Message) -> None: ...
    def remember_failure(self, position: Position, failure: Failure) -> None:
        pass

    def find_failure(self, message: Message) -> None:
        return None

    def make_copy_encryptor(self, message: Message) -> None: ...


# -------------------------------------------------------------------------------------------------------- events
# The events of a consumer: it became the active one of a Failover subscription, or is not any more.
#
# Of each partition alone, when it connects and whenever that changes, in order. `became_active` and `became_inactive`
# are those of Pulsar's Java `ConsumerEventListener`; partition -1: the topic has none. The asyncio face calls in the
# event loop, the blocking one in a thread of its own (client/blocking/consumer.py). Guard:
# tests/client/consume/test_failover_and_key_shared.py.


class ConsumerEventListener(Protocol):
    """Base class of a program's listener for a Failover subscription. The client calls the listener, for each
    partition, when the consumer becomes the active one or stops being the active one: the asyncio client in the event
    loop, the blocking client in a thread of its own.

    `partition_id` -1: the topic is not partitioned. Exceptions that the listener raises are logged."""

    def became_active(self, consumer: Any, partition_id: int) -> object:
        """Called when `consumer` becomes the active one of the partition: it gets the messages from now on."""
        ...

    def became_inactive(self, consumer: Any, partition_id: int) -> object:
        """Called when another consumer becomes the active one of the partition: `consumer` gets no more messages."""
        ...


class ActiveConsumerEvents:
    """Calls a ConsumerEventListener for the events of one consumer. Events that come before the consumer exists are
    stored until `attach_consumer` is called."""

    def __init__(self, listener: ConsumerEventListener) -> None:
        self._listener = listener
        self._consumer: Any = None
        self._told: deque[tuple[int, bool]] = deque()

    def notify(self, partition: int, active: bool) -> None:
        """Calls the listener with an event: the consumer became the active one of a partition (`active`), or stopped
        being it. Stores the event if no consumer is attached yet."""
        self._told.append((partition, active))
        if self._consumer is not None:
            self._call()

    def attach_consumer(self, consumer: Any) -> None:
        """Sets the consumer that is passed to the listener, and calls the listener for the stored events."""
        self._consumer = consumer
        self._call()

    def _call(self) -> None:
        while self._told:
            call_event_listener(self._listener, self._consumer, *self._told.popleft())


def call_event_listener(listener: ConsumerEventListener, consumer: Any, partition: int, active: bool) -> None:
    """Calls the listener with one event: `consumer` became the active one of a partition (`active`), or stopped being
    it. Logs an exception that the listener raises."""
    try:
        if active:
            listener.became_active(consumer, partition)
        else:
            listener.became_inactive(consumer, partition)
    except BaseException as error:
        log_foreign_error(error, "a consumer event listener")
