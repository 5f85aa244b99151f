"""Dead letters and retries of a consumer (Pulsar A10, A11): the consumer moves messages to another topic.

**Dead letters.** With a `dead_letter_policy` a message is delivered 1 + max_redeliver_count times: each time the
application receives it and does not acknowledge it (a negative ack, a time-out). At the next delivery the application
does not receive the message: the consumer publishes it to the dead-letter topic, and acknowledges it when the copy is
stored. The broker counts the redeliveries. Its count survives restarts and moves of the topic, and grows only when an
entry is redelivered *of which the application received a message*: the redelivery of entries that only waited in the
receiver queue is not counted.

**Retries.** With `enable_retry` the consumer also receives from `<topic>-<subscription>-RETRY`. (A default name that is
too long is shortened: proto/names.py `make_letter_topic_name`.) `reconsume_later`
publishes a copy of the message there, to be delivered after a delay, and acknowledges the message. The copy has the
number of such calls in its property RECONSUMETIMES, so that the number is as durable as the message. When that number
exceeds max_redeliver_count the copy is published to the dead-letter topic instead. Without a policy the limit is 16, as
in Pulsar; `Consumer.dead_letter_policy` returns it, and nothing else has a limit.

**No copy of a copy.** A message that was moved to a dead-letter topic stays there, whatever policies apply to that
topic (a pattern may match it, too). The message is not moved again and cannot be reconsumed later; it is delivered
until it is acknowledged. (Pulsar's Java client moves it on, to the same topic or to `…-DLQ-…-DLQ`.) In the same way a
retry-letter topic that a pattern matches shares the dead-letter topic of its original topic. There is no
`…-RETRY-…-RETRY`.

**Chunked messages** are moved as a whole, in chunks again if they are larger than an entry. The redelivery count of
such a message is that of its last chunk. When a chunk is redelivered only because its message is incomplete
(client/core/chunking.py), the application received nothing, and the redelivery does not count.

**Encrypted messages** are never copied in clear. The copy is encrypted with the data key of the message and an IV of
its own: the readers of the message can read the copy, and the program need not configure anything. A message that
cannot be decrypted is not moved. (Pulsar's Java client publishes the decrypted payload in clear, unless a customizer
sets keys for the producer.)

**Schemas.** The schema with which the message was written is registered for the dead-letter or retry-letter topic, and
the copy names that schema: consumers with a schema read the copy as they read the message. If the topic refuses the
schema, the copy names none; consumers then read the copy with their own schema.

**Levels of priority.** Each level has a dead-letter topic and a retry-letter topic of its own: `<topic of the
level>-<subscription>-DLQ`, or that of the level of the topic that the policy names. So a retried message keeps its
level, and a consumer with levels reads the dead letters by level.

Order: publish → its receipt → acknowledge. A crash between these steps duplicates a message and loses none. A message
that cannot be published is tried again. Names: topic `<topic>-<subscription>-DLQ`, producer
`<topic>-<subscription>-<consumer>-<random>-DLQ`; properties of the copy: those of the message, REAL_TOPIC,
REAL_SUBSCRIPTION and ORIGIN_MESSAGE_ID of the first original, RECONSUMETIMES, DELAY_TIME (ms). Guarding tests:
tests/broker/subscription/test_letters.py."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from traceback import format_exception

from ...proto import wire_pb2 as wire
from ...proto.entry import EncryptFunction
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import AlreadyExists, MagnetarError
from ...proto.expiry import make_dead_letter_properties
from ...proto.names import (
    DEAD_LETTERS,
    DELAY_TIME,
    EARLIEST,
    NAME_BYTES_MAX,
    ORIGIN_MESSAGE_ID,
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    RECONSUME_TIMES,
    RETRIES,
    TopicName,
    find_retried_topic,
    is_default_letter_topic,
    make_letter_topic_name,
    parse_number,
    shorten_name,
)
from ...proto.schema import SchemaInfo
from ...proto.states import Failure
from ...runtime.tasks import Tasks
from ..common.checks import WrongValue
from ..common.errors import CryptoError, IncompatibleSchema, OperationNotSupported
from ..connect.connections import Connections
from ..core.batcher import OutgoingMessage
from ..core.levels import make_level_topic
from ..model.composite_schemas import PreEncodedSchema
from ..model.hooks import HookChain
from ..model.message import CiphertextMessage, Message
from ..model.schema import BytesSchema
from ..model.settings import ORDERED_CONSUMER_TYPES, ConsumerDeadLetterPolicy, ConsumerSettings, ProducerSettings
from ..produce.producer import Producer

_LOG = logging.getLogger("magnetar.client")

DEFAULT_MAX_RECONSUME_TIMES = 16
RECONSUME_DIGITS_MAX = 9
DEAD_LETTER_RETRY_S = 1.0
"""Seconds between two attempts to publish a dead letter."""

_MOVED_BY = re.compile(r"-DLQ(-\d+-\d+)?$")
"""Matches the names of producers of dead letters: of a consumer, or of a broker
(broker/subscription/core/redelivery_backoff.py)."""



def find_dead_letter_policy(settings: ConsumerSettings) -> ConsumerDeadLetterPolicy | None:
    """Returns the dead-letter policy of a consumer's settings: the one that the program set, or the default of
    `enable_retry`. None: messages are never moved. Raises InvalidConfiguration if there is a policy and the
    subscription's type does not count redeliveries (Exclusive, Failover)."""
    policy = settings.dead_letter_policy
    if policy is None and settings.enable_retry:
        policy = ConsumerDeadLetterPolicy(DEFAULT_MAX_RECONSUME_TIMES)
    if policy is not None and settings.consumer_type in ORDERED_CONSUMER_TYPES:
        raise WrongValue(
            f"dead letters and retries are for Shared and KeyShared subscriptions, not {settings.consumer_type!s}"
        )
    return policy


def make_level_policy(policy: ConsumerDeadLetterPolicy, level: int) -> ConsumerDeadLetterPolicy:
    """Returns the policy for one level of priority: where `policy` names a topic, the level has a topic of its own.
    `level`: from 0, the most urgent one. Raises InvalidName if `policy` has a malformed name of a topic."""
    dead, retry = (
        make_level_topic(TopicName.parse(name), level).full if name else name
        for name in (policy.dead_letter_topic, policy.retry_letter_topic)
    )
    return replace(policy, dead_letter_topic=dead, retry_letter_topic=retry)


def parse_reconsume_count(told: str) -> int:
    """Returns the number in `told`, the value of the message property RECONSUMETIMES: how often the message was passed
    to `reconsume_later`. Returns 0 for a text that is not a plain number, because another program may use that property
    for anything else."""
    return (parse_number(told) or 0) if len(told) <= RECONSUME_DIGITS_MAX else 0


def is_dead_letter(message: Message) -> bool:
    """Returns whether a consumer or a broker's policy moved the message to the dead-letter topic from which it was
    received. Such a message is not moved again."""
    return _MOVED_BY.search(message.producer_name()) is not None and ORIGIN_MESSAGE_ID in message.properties()


def is_dead_letter_topic(topic: TopicName, subscription: str, policy: ConsumerDeadLetterPolicy) -> bool:
    """Returns whether `topic` is the dead-letter topic of this subscription, by its name or by `policy`. Messages of
    such a topic are never moved. Raises InvalidName if `policy` has a malformed name of a topic."""
    chosen = policy.dead_letter_topic
    return is_default_letter_topic(topic, subscription, DEAD_LETTERS) or (
        bool(chosen) and topic.base == TopicName.parse(chosen).base
    )


def find_original_topic(topic: TopicName, subscription: str, policy: ConsumerDeadLetterPolicy) -> TopicName:
    """Returns the topic whose messages are retried through `topic`, if `topic` is the retry-letter topic of this
    subscription (`find_retried_topic`); otherwise returns `topic` itself."""
    return topic if policy.retry_letter_topic else find_retried_topic(topic, subscription)


def copy_message(message: Message, properties: dict[str, str]) -> OutgoingMessage:
    """Returns a message for another topic, with the content and keys of the received `message`, and with the properties
    `properties`. If the message was encrypted, the copy is encrypted for the same readers. Raises CryptoError if the
    message was not decrypted."""
    if isinstance(message, CiphertextMessage):
        raise CryptoError("a message that is not decrypted is not copied to another topic")
    return _copy(message, properties, message.entry.consumer.make_copy_encryptor(message))


def copy_ciphertext(message: CiphertextMessage, properties: dict[str, str]) -> OutgoingMessage:
    """Returns a message for another topic, with the bytes of a message that was not decrypted, and with the properties
    `properties`. The bytes stay encrypted, and the readers of the message can read the copy. The message must be alone
    in its entry, which is no batch and no chunk."""
    original = message.entry.header.metadata

    def keep_encrypted(copy: MessageMetadata, payload: bytes) -> bytes:
        copy.encryption_keys.extend(original.encryption_keys)
        for name in ("encryption_algo", "encryption_param", "compression", "uncompressed_size"):
            if original.HasField(name):
                setattr(copy, name, getattr(original, name))
            else:
                copy.ClearField(name)
        return payload

    return _copy(message, properties, keep_encrypted)


def _copy(message: Message, properties: dict[str, str], encrypt: EncryptFunction | None) -> OutgoingMessage:
    fields = message.fields
    return OutgoingMessage(
        message.data(),
        properties,
        fields.partition_key if fields.HasField("partition_key") else None,
        fields.ordering_key if fields.HasField("ordering_key") else None,
        fields.event_time,
        null_value=fields.null_value,
        key_is_base64=fields.partition_key_b64_encoded,
        null_key=fields.null_partition_key,
        encrypt=encrypt,
    )


async def fetch_schema_of_message(message: Message) -> SchemaInfo | None:
    """Returns the schema with which the message was written, and asks the broker for it if the client does not have it.
    Returns None if the message names no schema, or one that its topic lacks. Raises the broker's error, and TimedOut if
    it does not answer in time."""
    version, writers = message.writer_version, message.entry.writers
    if not version or writers is None:
        return None
    await writers.fetch_schema(version)
    return writers.find_cached_schema(version)


def describe_error(error: BaseException, consumer: str, *, traceback: bool) -> Failure:
    """Returns a Failure that describes the exception for which a message is given back: its class, its text and
    `consumer`, the consumer's name. If `traceback` is true, it also has the traceback as Python prints it (no values of
    variables). Each text is cut to its limit."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    try:
        text = str(error)
    except Exception:  # of a class of the program
        text = f"a {name} that cannot be printed"
    where = "".join(format_exception(error)) if traceback else ""
    plain = [part.encode(errors="backslashreplace").decode() for part in (name, text, where, consumer)]
    return Failure(*plain).cut_long_texts()


class DeadLetterProducer:
    """Moves messages of one topic to the dead-letter topic or the retry-letter topic of that topic. Opens the producers
    for these topics when they are first needed. `moved`: how many messages were moved to the dead-letter topic. Raises
    InvalidName if the policy has a malformed name of a topic."""

    def __init__(
        self, connections: Connections, topic: TopicName, subscription: str, policy: ConsumerDeadLetterPolicy,
        consumer_name: Callable[[], str], hooks: HookChain | None = None,
    ) -> None:  # fmt: skip
        self.policy = policy
        chosen = ((policy.dead_letter_topic, DEAD_LETTERS), (policy.retry_letter_topic, RETRIES))
        self.dead_letter_topic, self.retry_letter_topic = (
            TopicName.parse(name) if name else make_letter_topic_name(topic, subscription, suffix)
            for name, suffix in chosen
        )
        self.moved = 0  # messages that went to the dead-letter topic
        _LOG.info(
            "%s/%s: a message that comes back more than %d times goes to %s", topic, subscription,
            policy.max_redeliver_count, self.dead_letter_topic,
        )  # fmt: skip
        self._connections = connections
        self._subscription = subscription
        self._base = f"{topic.base.local}-{subscription}"
        self._consumer_name = consumer_name
        self._hooks = hooks
        self._producers: dict[tuple[TopicName, Hashable], Producer] = {}
        self._opening = asyncio.Lock()
        self._tasks = Tasks()
        self._closed = False

    # ------------------------------------------------------------------ dead letters
    def start_moving_messages(self, messages: list[Message]) -> None:
        """Starts a task that moves the messages to the dead-letter topic, one after the other. The task retries until a
        message is stored there, and then acknowledges the message in its own topic. Failures are logged."""
        self._tasks.spawn(self._move_all(messages), f"dead letters of {self._base}")

    async def _move_all(self, messages: list[Message]) -> None:
        for message in messages:
            while not self._closed:
                try:
                    await self.move_message(message)
                    break
                except MagnetarError as error:
                    _LOG.warning("%s: %r is not a dead letter yet: %s", self.dead_letter_topic, message, error)
                except Exception:
                    _LOG.exception("%s: %r is not a dead letter yet", self.dead_letter_topic, message)
                await asyncio.sleep(DEAD_LETTER_RETRY_S)
            if message.permits:
                message.entry.consumer.on_taken(message)

    async def move_message(self, message: Message) -> None:
        """Publishes a copy of the message to the dead-letter topic, and acknowledges the message when the copy is
        stored. Raises the error with which publishing failed, or CryptoError if the message was not decrypted; the
        message is not acknowledged then."""
        found, failure = _origin(message, self._subscription), message.entry.consumer.find_failure(message)
        if failure is not None:
            found |= failure.to_properties(message.redelivery_count())
        await self._publish_copy(message, self.dead_letter_topic, make_dead_letter_properties(found), None)
        self.moved += 1

    # ------------------------------------------------------------------ retries
    async def reconsume_later(
        self, message: Message, delay: timedelta, properties: dict[str, str] | None = None,
        failure: Failure | None = None,
    ) -> None:  # fmt: skip
        """Publishes a copy of the message to the retry-letter topic, to be delivered after `delay`. If the limit of
        retries is reached, publishes the copy to the dead-letter topic instead. Returns when the copy is stored and the
        message is acknowledged. `properties`: added to those of the copy. `failure`: why the message is given back, for
        the properties of the copy; None: not known. Raises the error with which publishing failed, or CryptoError if
        the message was not decrypted; the message is not acknowledged then."""
        times = parse_reconsume_count(message.properties().get(RECONSUME_TIMES, "")) + 1
        told = failure.to_properties(times) if failure is not None else {}
        found = {**_origin(message, self._subscription), **told, **(properties or {})}
        if times > self.policy.max_redeliver_count:
            found[RECONSUME_TIMES] = str(times - 1)
            await self._publish_copy(message, self.dead_letter_topic, make_dead_letter_properties(found), None)
            self.moved += 1
            return
        found |= {RECONSUME_TIMES: str(times), DELAY_TIME: str(round(delay.total_seconds() * 1000))}
        await self._publish_copy(message, self.retry_letter_topic, found, delay)

    # ------------------------------------------------------------------ both
    async def _publish_copy(
        self, message: Message, topic: TopicName, properties: dict[str, str], delay: timedelta | None
    ) -> None:
        copy = copy_message(message, properties)
        if delay:
            copy.deliver_at = self._connections.world.clock.wall_ms() + round(delay.total_seconds() * 1000)
        producer = await self._producer(topic, await fetch_schema_of_message(message))
        if self._hooks is None:
            await producer.send_copy(copy)
        else:
            with self._hooks.run_copy_hooks(message, topic.full, copy.properties):
                await producer.send_copy(copy)
        message.entry.consumer.acknowledge(message)

    async def _producer(self, topic: TopicName, schema: SchemaInfo | None) -> Producer:
        key = None if schema is None else (schema.type, schema.data, *sorted(schema.properties.items()))
        async with self._opening:
            found = self._producers.get((topic, key))
            if found is None:
                try:
                    found = await self._open(topic, schema)
                except IncompatibleSchema as error:
                    _LOG.warning("%s: the copies of messages with another schema name none: %s", topic, error)
                    found = self._producers.get((topic, None)) or await self._open(topic, None)
                    self._producers[topic, None] = found
                self._producers[topic, key] = found
            return found

    async def _open(self, topic: TopicName, schema: SchemaInfo | None) -> Producer:
        if topic == self.dead_letter_topic and self.policy.initial_subscription_name:
            await self._subscribe(topic, self.policy.initial_subscription_name)
        suffix = DEAD_LETTERS if topic == self.dead_letter_topic else RETRIES
        ending = f"-{self._connections.world.rng.randbytes(3).hex()}{suffix}"  # consumers may have one name
        name = shorten_name(f"{self._base}-{self._consumer_name()}", NAME_BYTES_MAX - len(ending)) + ending
        known = BytesSchema() if schema is None else PreEncodedSchema(schema)
        settings = ProducerSettings(producer_name=name, schema=known, chunking_enabled=True)
        return await Producer.open(self._connections, topic, settings)

    async def _subscribe(self, topic: TopicName, subscription: str) -> None:
        partitions = await self._connections.fetch_partition_count(topic)
        start = wire.MessageId(ledger_id=EARLIEST[0], entry_id=EARLIEST[1], partition=-1, batch_index=-1)
        for name in [topic.with_partition(i) for i in range(partitions)] or [topic]:
            spec = wire.SubscriptionSpec(topic=name.full, name=subscription, position=start)
            try:
                await self._connections.ask_owner(name, "CreateSubscription", spec, service="Admin")
            except AlreadyExists:
                continue

    async def close(self) -> None:
        """Waits for the moves of messages in flight, up to the operation time-out, and closes the producers, whose
        errors are ignored. Messages whose move does not end in time are delivered again."""
        self._closed = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self._tasks.drain()
            self._tasks.cancel()
            await asyncio.gather(*(producer.close() for producer in self._all), return_exceptions=True)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Ends the moves of messages and the producers at once. Messages that are not moved are delivered again."""
        self._closed = True
        self._tasks.cancel()
        for producer in self._all:
            producer.abort()

    @property
    def _all(self) -> set[Producer]:
        return set(self._producers.values())


def _origin(message: Message, subscription: str) -> dict[str, str]:
    found = message.properties()
    found.setdefault(REAL_TOPIC, message.topic_name())
    found.setdefault(REAL_SUBSCRIPTION, subscription)
    found.setdefault(ORIGIN_MESSAGE_ID, str(message.message_id()))
    return found


class DeadLetterProducers:
    """The DeadLetterProducers of one consumer: one for each topic. A topic and its retry-letter topic share one."""

    def __init__(
        self, connections: Connections, subscription: str, settings: ConsumerSettings,
        consumer_name: Callable[[], str], hooks: HookChain | None = None,
    ) -> None:  # fmt: skip
        """Makes an empty collection and opens nothing yet. Raises InvalidConfiguration if the subscription's type does
        not count redeliveries (Exclusive, Failover)."""
        self.policy = find_dead_letter_policy(settings)
        self._connections = connections
        self._subscription = subscription
        self._settings = settings
        self._consumer_name = consumer_name
        self._hooks = hooks
        self._by_topic: dict[TopicName, DeadLetterProducer] = {}
        self._no_retries: set[TopicName] = set()  # retry and dead-letter topics of others, found by a pattern

    def add(self, topic: TopicName, level: int = 0) -> list[TopicName]:
        """Makes the DeadLetterProducer of a topic. `level`: the topic's level of priority. Returns the topics to
        subscribe to: `topic`, and with `enable_retry` also its retry-letter topic. A retry-letter or dead-letter topic
        that a pattern found has no retry-letter topic. Raises InvalidName if the policy has a malformed name of a
        topic."""
        policy, subscription = self.policy, self._subscription
        if policy is not None and self._settings.levels is not None:
            policy = make_level_policy(policy, level)
        if policy is None or is_dead_letter_topic(topic, subscription, policy):
            return [topic]
        home = find_original_topic(topic, subscription, policy)
        dead_letters = self._by_topic.get(home.base)
        if dead_letters is None:
            dead_letters = DeadLetterProducer(
                self._connections, home, subscription, policy, self._consumer_name, self._hooks
            )
        self._by_topic[home.base] = self._by_topic[dead_letters.retry_letter_topic.base] = dead_letters
        if not self._settings.enable_retry or home != topic:
            return [topic]
        if self._settings.existing_only and topic.local.endswith((RETRIES, DEAD_LETTERS)):
            self._no_retries.add(topic.base)
            return [topic]
        return [topic, dead_letters.retry_letter_topic]

    def producer_of(self, topic: TopicName) -> DeadLetterProducer | None:
        """Returns the DeadLetterProducer of a topic or partition, or of a retry-letter topic; None if its messages are
        never moved."""
        return self._by_topic.get(topic.base)

    def find_retry_producer(self, topic: TopicName) -> DeadLetterProducer:
        """Returns the DeadLetterProducer for `reconsume_later` of messages of `topic`. Raises OperationNotSupported if
        the consumer was opened without `enable_retry`, or does not receive from the retry-letter topic of `topic`."""
        dead_letters = self.producer_of(topic)
        if dead_letters is not None and topic.base in self._no_retries:
            raise OperationNotSupported(f"no consumer receives from {dead_letters.retry_letter_topic}")
        if dead_letters is None or not self._settings.enable_retry:
            raise OperationNotSupported("reconsume_later needs a consumer with enable_retry=True")
        return dead_letters

    def abort(self) -> None:
        for dead_letters in self._by_topic.values():
            dead_letters.abort()

    async def close(self) -> None:
        await asyncio.gather(*(dead_letters.close() for dead_letters in dict.fromkeys(self._by_topic.values())))
