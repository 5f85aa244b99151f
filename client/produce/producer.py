"""The producer of a topic, for asyncio (`Producer`):

    async with await client.create_producer("flights") as producer:
        await producer.send(b"…")                       # one message, its MessageId
        producer.send_nowait(b"…", callback)            # callback(Result, MessageId)
        await producer.send_many([b"…", b"…"])          # ids in order, one await
        await producer.flush()

Also in this file, each below its heading: the half message that `Producer.prepare` returns (half); the partitions to
which one producer publishes (partition_producers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError
from ...proto.names import TopicName
from ...proto.states import TxnId
from ..common.checks import (
    ParameterCheck,
    WrongMessageValue,
    WrongValue,
    check_message_parameters,
    check_parameter,
    shorten_value,
)
from ..common.closing import ClosedAfterAsyncWith, close_all_parts
from ..common.errors import (
    AlreadyClosed,
    MemoryBufferIsFull,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    make_exception_for_result,
    translate_error,
)
from ..connect.connections import NEWEST_VERSION, Connections, TopicSchemaCache
from ..connect.topic_watch import PartitionsWatcher
from ..core.batcher import OutgoingMessage, SendCallback
from ..core.effects import PartitionClientState
from ..core.failover import PartitionRouter, PartitionsRoutingMode
from ..core.levels import split_by_level
from ..core.transaction import TransactionPort, TransactionState
from ..model.encryption import Encryptor
from ..model.hooks import chain_hooks
from ..model.message_id import MessageId
from ..model.schema import BytesSchema
from ..model.settings import ProducerAccessMode, ProducerSettings
from .entry_writer import NO_EXTRAS, Extras, MessageDraft, has_only_transaction, make_outgoing_message
from .partition_producer import PartitionProducer

if TYPE_CHECKING:
    from ...runtime.metrics import RecentQuantiles

# ---------------------------------------------------------------------------------------------------------- half
# A half message, as its program has it: stored and not published. client/transactions/halves.py stores and ends it.


class HalfMessageEnder(Protocol):
    """The interface of an object that commits and rolls back half messages; `Half` calls it. If the caller of a method
    is cancelled, the cancellation takes effect only when the outcome is known."""

    async def commit(self, id_: TxnId) -> TransactionState: ...
    async def rollback(self, id_: TxnId) -> TransactionState: ...


class HalfMessagePreparer(Protocol):
    """The interface of an object that stores half messages at a coordinator; `Producer.prepare` calls it."""

    async def prepare(
        self, messages: Sequence[tuple[TopicName, bytes]], group: str, check_key: str, check_after: float
    ) -> Half:
        """Stores `messages` at a coordinator as one half message, which no consumer sees before its commit, and returns
        the Half. `messages`: for each message its topic or partition, and its encoded entry. If the half message has no
        outcome after `check_after` seconds (0: the cluster's default), a program of `group` is asked about `check_key`.
        Raises the errors of `Producer.prepare`."""
        ...


class Half:
    """A half message: one or several messages that are stored at a coordinator, and not published yet.
    `Producer.prepare` and `Client.half` make it.

        half = await producer.prepare(b"…", group="orders", check_key="17")
        await half.commit()

    `commit` publishes the half message, once; `rollback` drops it. If the program does neither, the programs of the
    group are asked for the decision (`Client.on_check`). Both methods raise AlreadyClosed after the close of the
    client. `id`: the id, for `Client.commit_half` and `rollback_half`; `group` and `check_key`: as given to `prepare`.
    `state`: the last state that this program knows: PREPARED, COMMITTED or ABORTED."""

    def __init__(self, halves: HalfMessageEnder, id_: TxnId, group: str, check_key: str) -> None:
        self.id = id_
        self.group = group
        self.check_key = check_key
        self.state = TransactionState.PREPARED  # as this program knows it
        self._halves = halves

    async def commit(self) -> None:
        """Publishes the half message; returns when this is final. May be called again.

        Raises TransactionAborted if the half message was rolled back, and HalfParked if an operator must decide. If a
        topic refuses one of its messages (TopicTerminated, …), raises that error: none of them is published, and the
        half message is parked. Raises OutcomeUnknown if no coordinator answers in time: call `commit` again; if the
        program does not, a program of the group is asked. Raises AlreadyClosed after the close of the client."""
        self.state = await self._halves.commit(self.id)

    async def rollback(self) -> None:
        """Drops the half message without publishing it; returns when this is final. May be called again. Raises
        TransactionEnded if the half message was committed, HalfParked if an operator must decide. Raises OutcomeUnknown
        if no coordinator answers in time: call `rollback` again; if the program does not, a program of the group is
        asked. Raises AlreadyClosed after the close of the client."""
        self.state = await self._halves.rollback(self.id)

    def __repr__(self) -> str:
        return f"<Half {self.id} of group {self.group!r}, {self.state.name}>"


# ------------------------------------------------------------------------------------------- partition_producers
# The partitions that one producer publishes to: one PartitionProducer each, and which of them a message goes to.
#
#     partitions = await PartitionProducers.open(connections, topic, settings)    all of them, or none when one refuses
#     partitions.choose_producer(message)         from any thread
#     await partitions.close()
#
# Partitions that are added to the topic are found by a PartitionsWatcher; keys are routed by the new number when all of
# them are open. `all` stays the same list. Guards: tests/client/connect/test_partitions_watcher.py.


PENDING_UNBOUNDED = 1 << 40
"""Limit of pending messages if the program sets the limit to 0."""


class PartitionProducers:
    """The PartitionProducers of one producer: one for each partition of its topic (`all`). Finds partitions that are
    added to the topic later."""

    def __init__(self, connections: Connections, topic: TopicName, settings: ProducerSettings, count: int) -> None:
        """Makes the object without producers. `count`: the number of partitions; 0: the topic is not partitioned.
        Raises CryptoError if messages cannot be encrypted by the keys of the settings."""
        self.all: list[PartitionProducer] = []
        self.connections = connections
        self._settings = settings
        self._now = connections.world.clock.monotonic
        across = (settings.max_pending_messages_across_partitions or PENDING_UNBOUNDED) // max(1, count)
        self._pending_max = min(settings.max_pending_messages or PENDING_UNBOUNDED, max(1, across))
        self._topic = topic
        self._router = self._new_router(count) if count else None
        self._watcher: PartitionsWatcher | None = None
        reader = settings.crypto_key_reader
        self._encrypt = Encryptor(reader, settings.encryption_keys, self._now) if reader is not None else None

    def _new_router(self, count: int) -> PartitionRouter:
        settings = self._settings
        return PartitionRouter(
            count, PartitionsRoutingMode(settings.message_routing_mode), self.connections.world.rng,
            window_s=settings.batching_max_publish_delay_ms / 1000 if settings.batching_enabled else 0.0,
            messages_max=settings.batching_max_messages, bytes_max=settings.batching_max_allowed_size_in_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ the beginning
    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, settings: ProducerSettings, epoch: int = 0
    ) -> PartitionProducers:
        """Returns the producers of all partitions of the topic, open, or opened with their first message if the
        settings say so. If one cannot be opened, closes the others and raises its error, such as ProducerBusy. `epoch`:
        that of the exclusive producer that this one replaces; 0: none. Raises CryptoError if messages cannot be
        encrypted, and the errors of `Connections.fetch_partition_count`, such as TopicNotFound."""
        count = await connections.fetch_partition_count(topic, create=not settings.existing_only)
        partitions = cls(connections, topic, settings, count)
        await partitions._add([topic.with_partition(i) for i in range(count)] or [topic], epoch)
        partitions._watcher = PartitionsWatcher(connections, {topic: count}, partitions._grow)
        return partitions

    async def _grow(self, topic: TopicName, count: int) -> None:
        assert self._router is not None, "only a partitioned topic grows"
        await self._add([topic.with_partition(i) for i in range(len(self.all), count)])
        self._router.set_partition_count(len(self.all))  # last: other threads ask it

    async def _add(self, names: list[TopicName], epoch: int = 0) -> None:
        """Adds partitions. The broker gives the first one a name, which all of them use. Adds none if one cannot be
        opened."""
        new = [
            PartitionProducer(self.connections, name, self._settings, self._pending_max, self._encrypt)
            for name in names
        ]
        for each in new:
            each.core.epoch = epoch
        try:
            if not self.all:
                await new[0].open()
            first = (self.all or new)[0]
            later = [each for each in new if each is not first]
            for each in later:
                each.core.name = first.core.name
            if self._opens_late:
                for each in later:
                    each.core.open_at_first_message()
            else:
                await asyncio.gather(*(each.open() for each in later))
        except BaseException:
            await asyncio.gather(*(each.close() for each in new), return_exceptions=True)
            raise
        self.all.extend(new)

    @property
    def _opens_late(self) -> bool:
        """Whether each partition is opened with its first message: with lazy_start_partitioned_producers, unless
        opening has an effect that must not be delayed (exclusive access, or an initial subscription)."""
        settings = self._settings
        shared = settings.access_mode == ProducerAccessMode.Shared
        return settings.lazy_start_partitioned_producers and shared and not settings.initial_subscription_name

    # ------------------------------------------------------------------------------ which one
    @property
    def unpartitioned_producer(self) -> PartitionProducer | None:
        """Returns the PartitionProducer of a topic that is not partitioned; None if the topic is partitioned."""
        return self.all[0] if self._router is None else None

    def find_topic(self, priority: int | None = None) -> TopicName:
        """Returns the topic. Raises WrongMessageValue if a `priority` is given, because the topic has no levels."""
        if priority is not None:
            raise WrongMessageValue("priority is for a producer that was opened with levels")
        return self._topic

    def choose_producer(self, message: OutgoingMessage, priority: int | None = None) -> PartitionProducer:
        """Returns the PartitionProducer of the partition to which the message is sent. Raises WrongValue if
        `message_router` returns no valid partition, or the exception that `message_router` raises. Raises
        WrongMessageValue if a `priority` is given, because the topic has no levels."""
        if priority is not None:
            self.find_topic(priority)
        if self._router is None:
            return self.all[0]
        choose = self._settings.message_router
        if choose is None:
            key = message.partition_key if message.partition_key is not None else message.ordering_key
            return self.all[self._router.choose_partition(key, len(message.payload), self._now())]
        number = choose(MessageDraft(message, self._settings.schema), self._router.partitions)
        if not isinstance(number, int) or not 0 <= number < len(self.all):
            raise WrongValue(f"message_router chose partition {shorten_value(number)} of {len(self.all)}")
        return self.all[number]

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        """Ends the producers of all partitions at once."""
        if self._watcher is not None:
            self._watcher.stop()
        for each in self.all:
            each.abort()

    async def close(self) -> None:
        """Flushes and closes the producers of all partitions; then raises the first of their errors. If the call is
        interrupted, ends them at once."""
        try:
            if self._watcher is not None:
                await self._watcher.close()
            await close_all_parts(self.all)
        except BaseException:  # the close was interrupted: they end at once
            self.abort()
            raise


class LevelProducers:
    """The producers of a topic with levels of priority: the PartitionProducers of the topic of each level
    (client/core/levels.py)."""

    unpartitioned_producer = None

    def __init__(self, levels: list[PartitionProducers]) -> None:
        self._levels = levels
        self.connections = levels[0].connections

    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, settings: ProducerSettings, epoch: int = 0
    ) -> LevelProducers:
        """Returns the producers of all levels. If one cannot be opened, closes the others and raises its error, one of
        those of `PartitionProducers.open`. All have the name of the first one. `epoch`: that of the exclusive producer
        that this one replaces; 0: none."""
        levels: list[PartitionProducers] = []
        try:
            for name, _ in split_by_level([topic], settings.levels):
                levels.append(await PartitionProducers.open(connections, name, settings, epoch))
                settings = replace(settings, producer_name=levels[0].all[0].core.name)
        except BaseException:
            await asyncio.gather(*(each.close() for each in levels), return_exceptions=True)
            raise
        return cls(levels)

    @property
    def all(self) -> list[PartitionProducer]:
        """Returns the PartitionProducers of all levels, those of the most urgent level first."""
        return [producer for level in self._levels for producer in level.all]

    def _find_level(self, priority: int | None) -> PartitionProducers:
        last = len(self._levels) - 1
        if priority is not None and priority > last:
            raise WrongMessageValue(f"priority is a level from 0 (the most urgent) to {last}, not {priority}")
        return self._levels[last if priority is None else priority]

    def find_topic(self, priority: int | None = None) -> TopicName:
        """Returns the topic of the level `priority`; None: of the least urgent level. Raises WrongMessageValue for a
        level that the topic does not have."""
        return self._find_level(priority).find_topic()

    def choose_producer(self, message: OutgoingMessage, priority: int | None = None) -> PartitionProducer:
        """Returns the PartitionProducer of the partition to which the message is sent, in the level `priority` (None:
        the least urgent level). Raises WrongMessageValue for a level that the topic does not have, and the errors of
        `message_router`."""
        return self._find_level(priority).choose_producer(message)

    def abort(self) -> None:
        for each in self._levels:
            each.abort()

    async def close(self) -> None:
        await close_all_parts(self._levels)


# ------------------------------------------------------------------------------------------------------ producer


DEFAULT_BATCH_DELAY_MS = ProducerSettings().batching_max_publish_delay_ms
"""Default batch delay in ms. Only if the program sets a longer delay does `send` wait for other messages to batch with,
as in pulsar.asyncio."""


class Producer(ClosedAfterAsyncWith):
    """Publishes messages to one topic, for asyncio. `Client.create_producer` opens it; `close` ends it.

        async with await client.create_producer("flights") as producer:
            message_id = await producer.send(b"UA 1545", partition_key="UA")
            ids = await producer.send_many([b"DL 202", b"AA 7"])

    The content is `bytes`, or a value of the producer's schema; None publishes a message without a value, which deletes
    its key in a compacted topic. Times are in ms since the epoch; `deliver_after` is a timedelta. The order of messages
    is kept per partition; all messages of a key go to the same partition.

    A producer belongs to the event loop that opened it; `enqueue` may be called from any thread. Errors:
    ProducerQueueIsFull at `max_pending_messages` and MemoryBufferIsFull at the client's `memory_limit_bytes` (with
    `block_if_queue_full` the call waits), MessageTooBig, InvalidMessage for a wrong value, SendVetoed if a hook refuses
    the message, Timeout after `send_timeout_millis` (the outcome is unknown), ProducerFenced, TopicTerminated,
    AlreadyClosed."""

    def __init__(
        self, topic: TopicName, settings: ProducerSettings, partitions: PartitionProducers | LevelProducers,
        wall_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self.settings = settings
        self._partitions = partitions
        self._topic = topic
        self._wall_ms = wall_ms
        self.tracing = partitions.connections.settings.tracing
        self.hooks = chain_hooks(partitions.connections.settings.hooks, settings.hooks)
        plain = type(settings.schema).encode is BytesSchema.encode  # a derived class may encode otherwise
        self.only_plain: PartitionProducer | None = partitions.unpartitioned_producer if plain else None
        self._gathers = settings.batching_enabled and settings.batching_max_publish_delay_ms > DEFAULT_BATCH_DELAY_MS
        self._closed = False
        self._recent: RecentQuantiles | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, settings: ProducerSettings, epoch: int = 0
    ) -> Producer:
        """Returns a producer that is open at all partitions of the topic. If a partition cannot be opened, closes the
        others and raises its error. `epoch`: that of the exclusive producer that this producer replaces; 0: none.
        Raises ProducerFenced if another exclusive producer was opened since that epoch, and the errors of
        `PartitionProducers.open`. With a schema that is the topic's own raises the errors of
        `TopicSchemaCache.fetch_schema`, too."""
        if settings.schema.of_topic:
            [(first, _), *_] = split_by_level([topic], settings.levels)
            schemas = TopicSchemaCache(connections, first)
            await schemas.fetch_schema(NEWEST_VERSION)
            settings = replace(settings, schema=settings.schema.known(schemas.find_cached_schema(NEWEST_VERSION)))
        kind = PartitionProducers if settings.levels is None else LevelProducers
        partitions = await kind.open(connections, topic, settings, epoch)
        return cls(topic, settings, partitions, connections.world.clock.wall_ms)

    @property
    def partitions(self) -> list[PartitionProducer]:
        """Returns the producers of all partitions, of all levels of priority."""
        return self._partitions.all

    @property
    def connections(self) -> Connections:
        """Returns the connections of the client that opened the producer."""
        return self._partitions.connections

    # ------------------------------------------------------------------------------ facts
    def topic(self) -> str:
        """Returns the full name of the topic."""
        return self._topic.full

    def producer_name(self) -> str:
        """Returns the name of the producer, chosen by the program or by the broker."""
        return self.partitions[0].core.name

    def last_sequence_id(self) -> int:
        """Returns the highest sequence id of the messages that the broker acknowledged, over all partitions; -1 if it
        acknowledged none."""
        return max(each.core.last_sequence_id for each in self.partitions)

    def is_connected(self) -> bool:
        """Returns whether all partitions that have been opened are connected to their brokers."""
        return all(
            each.core.state is PartitionClientState.CONNECTED
            for each in self.partitions
            if not each.core.is_opening_delayed
        )

    @property
    def is_over(self) -> bool:
        """Returns whether the producer is closed or has failed, that is, all its partitions are closed."""
        return all(each.core.state is PartitionClientState.CLOSED for each in self.partitions)

    def title(self) -> str:
        """Returns the names of the producer and the topic as one text, for log lines."""
        return f"producer {self.producer_name()} of {self.topic()}"

    def statistics(self) -> dict[str, int]:
        """Returns counters since the producer was opened; client/common/loggers.py `STATISTICS` says what they are."""
        cores = [each.core for each in self.partitions]
        return {
            "stored_messages": sum(each.stored for each in cores),
            "stored_bytes": sum(each.stored_bytes for each in cores),
            "failed_messages": sum(each.failed for each in cores),
            "pending_messages": sum(each.pending for each in cores),
            "partitions": len(self.partitions),
            "hook_failures": self.hooks.failures if self.hooks is not None else 0,
            **self._latencies(),
        }

    def _latencies(self) -> dict[str, int]:
        found = [each.latencies for each in self.partitions if each.latencies is not None]
        if not found:
            return {}
        from ...runtime.metrics import Histogram, RecentQuantiles

        if self._recent is None:
            self._recent = RecentQuantiles()
        counts = [sum(column) for column in zip(*(each.counts for each in found), strict=True)]
        merged, now = Histogram(found[0].bounds, counts), self.connections.world.clock.monotonic()
        shares = self._recent.compute_quantiles(self, merged, now, (0.5, 0.95, 0.99))
        names = ("send_p50_us", "send_p95_us", "send_p99_us")
        return {name: round(share * 1e6) for name, share in zip(names, shares, strict=True) if share == share}

    # ------------------------------------------------------------------------------ sending
    def enqueue(self, content: Any, callback: SendCallback, extras: Extras = NO_EXTRAS) -> PartitionProducer:
        """Adds a message to send, as `send_nowait` does, with all options in `extras`. Returns the PartitionProducer
        that sends it. May be called from any thread; calls no hooks.

        `callback(Result, MessageId)` is called in the event loop. Raises ProducerQueueIsFull, MemoryBufferIsFull,
        MessageTooBig, InvalidMessage, CryptoError or AlreadyClosed (or the error that ended the producer) if the
        message is refused; with a transaction TransactionEnded if it is not open, InvalidConfiguration if it is another
        client's; and the exception of a `message_router`. `callback` is not called then."""
        only = self.only_plain
        if only is not None and type(content) is bytes and extras == NO_EXTRAS:
            only.add(content, callback)
            return only
        if only is not None and type(content) is bytes and has_only_transaction(extras):
            assert extras.txn is not None, "it is only that"
            only.add_payload_in_transaction(extras.txn, content, callback)
            return only
        message = make_outgoing_message(content, extras, self.settings.schema, self._wall_ms)
        partition = self._partitions.choose_producer(message, extras.priority)
        partition.add_message(message, callback)
        return partition

    def send_nowait(
        self,
        content: Any,
        callback: SendCallback | None = None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        key_bytes: bytes | None = None,
        txn: TransactionPort | None = None,
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> None:
        """Sends a message without waiting for its outcome; `callback(Result, MessageId)` is called in the event loop.
        Raises ProducerQueueIsFull at `max_pending_messages`, the other errors of `enqueue`, SendVetoed if a hook
        refuses the message, and with `txn` TransactionEnded if it is not open, InvalidConfiguration if it is another
        client's; `callback` is not called then.

        `key_bytes` replaces `partition_key` if the key is not text; the key is stored as base64 and marked as such.
        `expires_at`, `expires_in` and `priority`: see `send`."""
        if callback is not None and not callable(callback):
            check_message_parameters({"callback": callback})
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after, key_bytes, txn=txn, expires_at=expires_at,
            expires_in=expires_in, priority=priority,
        )  # fmt: skip
        if self.hooks is None or not self.hooks.is_interested():
            self.enqueue(content, callback, extras)
            return
        with self.hooks.run_send_hooks(self._topic.full, content, properties, callback) as (changed, properties, sent):
            self.enqueue(changed, sent, extras._replace(properties=properties))

    async def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        txn: TransactionPort | None = None,
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> MessageId:
        """Sends a message, waits until it is durable and returns its id. Raises the errors of `send_nowait` if the
        message is refused before it is sent; if it fails later, the exception of its Result, such as Timeout
        (`send_timeout_millis` have passed: it may be stored), TopicTerminated or ProducerFenced.

        The message is sent at once. Only if batching_max_publish_delay_ms is longer than its default does it wait for a
        full batch, or for that delay. `txn`: the message counts when that transaction commits (docs/transactions.md).
        `expires_at` (a datetime with a time zone, or ms since the epoch) or `expires_in` (a timedelta, or seconds from
        now): from then on, by the broker's clock, consumers do not get the message (docs/sdk.md). `priority`: for a
        producer with `levels`, the level of the message, from 0 for the most urgent one; None: the least urgent one."""
        outcome: asyncio.Future[tuple[Result, MessageId]] = self._loop.create_future()

        def done(result: Result, message_id: MessageId) -> None:
            if not outcome.done():
                outcome.set_result((result, message_id))

        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication or False,
            event_timestamp, deliver_at, deliver_after, txn=txn, expires_at=expires_at, expires_in=expires_in,
            priority=priority,
        )  # fmt: skip
        partition = await self._enqueue_waiting(content, done, extras)
        if not self._gathers:
            partition.flush_soon()
        result, message_id = await outcome
        if result is not Result.Ok:
            raise partition.make_exception(result)
        return message_id

    def encode_for_later(self, content: Any, extras: Extras = NO_EXTRAS) -> tuple[TopicName, bytes]:
        """Encodes a message that is not sent now, but published by a broker later (`prepare`). Returns the message's
        topic or partition, and its encoded entry. Raises InvalidMessage, MessageTooBig, CryptoError, AlreadyClosed, or
        the exception of a `message_router`."""
        if self.tracing is not None:
            extras = extras._replace(properties=self.tracing.inject(extras.properties))
        message = make_outgoing_message(content, extras, self.settings.schema, self._wall_ms)
        partition = self._partitions.choose_producer(message, extras.priority)
        return partition.topic, partition.encode_message(message, self.partitions[0].core.encoding.schema_version)

    async def prepare(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        group: str,
        check_key: str = "",
        check_after: float = 0,
        priority: int | None = None,
    ) -> Half:
        """Stores a message as a half message: durably, without publishing it. Returns when it is stored. `Half.commit`
        publishes it, once; `Half.rollback` drops it. If neither was called within `check_after` seconds (0: the
        cluster's default), a program that answers for `group` (`Client.on_check`) is asked about `check_key`.
        docs/transactions.md has the rules.

        Raises ProducerBlockedQuotaExceededError if the group has too many undecided half messages; MessageTooBig;
        InvalidMessage or InvalidConfiguration for a wrong parameter; AlreadyClosed; ConnectError; or Timeout, after
        which the half message may be stored, and is then rolled back."""
        extras = Extras(
            properties, partition_key, ordering_key, event_timestamp=event_timestamp, deliver_at=deliver_at,
            deliver_after=deliver_after, priority=priority,
        )  # fmt: skip
        make = self.connections.make_halves
        assert make is not None, "its client has half messages"
        halves: HalfMessagePreparer = make(self.connections)
        return await halves.prepare([self.encode_for_later(content, extras)], group, check_key, check_after)

    async def send_copy(self, message: OutgoingMessage) -> MessageId:
        """Sends `message`, a copy of a received message, waits until the copy is durable and returns its id. Does not
        check the fields of the message, and calls no hooks. If the queue is full, waits for room. If the message fails,
        raises the exception of its Result; AlreadyClosed, or the error that ended the producer, if it has ended."""
        outcome: asyncio.Future[tuple[Result, MessageId]] = self._loop.create_future()
        while True:
            try:
                partition = self._partitions.choose_producer(message)
                partition.add_message(message, lambda *found: None if outcome.done() else outcome.set_result(found))
                break
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                await self.wait_for_room()
        partition.flush_soon()
        result, message_id = await outcome
        if result is not Result.Ok:
            raise partition.make_exception(result)
        return message_id

    async def send_many(
        self,
        contents: Iterable[Any],
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        txn: TransactionPort | None = None,
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> list[MessageId]:
        """Sends all messages and returns their ids in the order of `contents`, when all are durable. The other
        parameters apply to each message.

        If messages failed, raises the exception of the first failure, when all messages have outcomes. If a message is
        refused before it is sent, raises one of the errors of `send_nowait` at once: the messages before it are sent,
        those after it are not. Returns an empty list if `contents` is empty; raises InvalidConfiguration if it is not
        iterable."""
        extras = Extras(
            properties, partition_key, ordering_key,
            event_timestamp=event_timestamp, deliver_at=deliver_at, deliver_after=deliver_after, txn=txn,
            expires_at=expires_at, expires_in=expires_in, priority=priority,
        )  # fmt: skip
        check_parameter("contents", ParameterCheck("an iterable of contents", (Iterable,)), contents)
        ids: list[MessageId | None] = []
        failures: list[Result] = []
        finished: asyncio.Future[None] = self._loop.create_future()
        left, complete = 0, False

        def make_message_callback(index: int) -> Callable[[Result, MessageId], None]:
            def done(result: Result, message_id: MessageId) -> None:
                nonlocal left
                ids[index] = message_id
                if result is not Result.Ok:
                    failures.append(result)
                left -= 1
                if complete and left == 0 and not finished.done():
                    finished.set_result(None)

            return done

        for content in contents:
            ids.append(None)
            left += 1
            try:
                await self._enqueue_waiting(content, make_message_callback(len(ids) - 1), extras)
            except PulsarException:
                left -= 1
                raise
        complete = True
        if left:
            for each in self.partitions:
                each.flush_soon()
            await finished
        if failures:
            why = next((each.why for each in self.partitions if each.why), failures[0].name)
            raise make_exception_for_result(failures[0], f"{len(failures)} of {len(ids)} messages: {why}")
        return [each for each in ids if each is not None]

    async def _enqueue_waiting(
        self, content: Any, callback: SendCallback, extras: Extras, *, hooked: bool = False
    ) -> PartitionProducer:
        """Adds a message; with block_if_queue_full, waits for room instead of raising ProducerQueueIsFull. `hooked`:
        its hooks were called."""
        if self.hooks is not None and not hooked and self.hooks.is_interested():
            passed = self.hooks.run_send_hooks(self._topic.full, content, extras.properties, callback)
            with passed as (changed, properties, sent):
                return await self._enqueue_waiting(changed, sent, extras._replace(properties=properties), hooked=True)
        while True:
            try:
                return self.enqueue(content, callback, extras)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                if not self.settings.block_if_queue_full:
                    raise
            await self.wait_for_room()

    async def wait_for_room(self) -> None:
        """Waits until a message may be added again, after an attempt raised ProducerQueueIsFull or MemoryBufferIsFull.
        Sends the open batches, so that room is made. Another sender may use the room first."""
        memory = self.connections.send_memory
        if memory is not None and not memory.has_room:
            free = asyncio.Event()
            memory.call_when_memory_is_free(
                lambda: self.connections.event_loop_caller.call(free.set, lambda _: free.set())
            )
            for each in self.partitions:
                each.flush_soon()
            if not memory.has_room:
                await free.wait()
        for each in self.partitions:
            if each.core.is_full and each.core.error is None:
                room: asyncio.Future[None] = self._loop.create_future()
                each.room.append(lambda room=room: room.done() or room.set_result(None))  # type: ignore[misc]
                each.flush_soon()
                await room

    # ------------------------------------------------------------------------------ the end
    async def cancel(self, message_id: MessageId, *, priority: int | None = None) -> list[str]:
        """Cancels a delayed message of this topic: no subscription gets it. Returns when that is durable, with the
        names of the subscriptions for which the message was still delayed. `priority`: that with which the message was
        sent, for a producer with `levels`. May be called again after an error.

        Raises NotAllowedError if the time of the message has come, or a subscription has got it; TopicNotFound if the
        topic has no such message, or its transaction has not committed; InvalidConfiguration if `message_id` is no
        MessageId; InvalidMessage for a `priority` that the topic does not have; Timeout or ConnectError if the broker
        does not answer. A subscription that is created later from an earlier position gets the message."""
        check_parameter("message_id", ParameterCheck("a MessageId", (MessageId,)), message_id)
        check_message_parameters({"priority": priority})
        partition, topic = message_id.partition(), self._partitions.find_topic(priority)
        topic = topic.with_partition(partition) if partition >= 0 and topic.partition < 0 else topic
        request = wire.CancelDelayedRequest(
            topic=topic.full, ledger_id=message_id.ledger_id(), entry_id=message_id.entry_id(),
            batch_index=message_id.batch_index(),
        )  # fmt: skip
        try:
            found: wire.CancelDelayedReply = await self.connections.ask_owner(
                topic, "CancelDelayed", request, service="Admin"
            )
        except MagnetarError as error:
            raise translate_error(error) from error
        return list(found.cancelled)

    async def flush(self) -> None:
        """Waits until all messages that were sent before have outcomes and their callbacks were called. Does not raise
        for messages that failed. Raises AlreadyClosed if the producer is closed."""
        if self._closed:
            raise AlreadyClosed("the producer is closed")
        await asyncio.gather(*(each.flush() for each in self.partitions))

    def abort(self) -> None:
        """Ends the producer at once, without waiting. The callbacks of messages without an outcome get AlreadyClosed;
        it is unknown whether these messages are stored."""
        self._closed = True
        self._partitions.abort()

    async def close(self) -> None:
        """Flushes and closes the producer, and waits until it is closed. Raises Timeout if messages have no outcome
        within the operation time-out: they may be stored. Raises AlreadyClosed if the producer is closed."""
        if self._closed:
            raise AlreadyClosed("the producer is closed")
        self._closed = True
        await self._partitions.close()

    def check(self) -> None:
        """Raises AssertionError if an invariant of a partition's core is broken."""
        for each in self.partitions:
            each.core.check()
