"""The blocking face: `pulsar-client`'s classes over the asyncio ones, which run in one loop thread per process.

Under load no message costs a future, a lock that is fought for, or a wake-up: `send_async` appends to the batcher from
the calling thread, `receive` takes from a deque that the loop fills by entries, `acknowledge` appends to a list.
Callbacks of `send_async` are called in the loop thread: they must be short and must not wait (a blocking call there
raises Interrupted).

After a fork everything is made anew where that can work, see client/fork.py; a producer then gets a new name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar

from . import client as aio
from .consumer import Consumer as AsyncConsumer
from .consumer import ConsumerBatchReceivePolicy, check_timeout, receive_batch
from .core.batcher import Callback
from .errors import (
    AlreadyClosed,
    InvalidConfiguration,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    Timeout,
    exception_of,
)
from .fork import EPOCH
from .inbox import Inbox
from .loop_thread import LoopThread, loop_thread
from .message import Message
from .message_id import MessageId
from .options import given
from .partition_producer import PartitionProducer
from .producer import Extras
from .producer import Producer as AsyncProducer
from .reader import Reader as AsyncReader
from .schema import Schema
from .settings import (
    BatchingType,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerType,
    InitialPosition,
    PartitionsRoutingMode,
    ProducerAccessMode,
    RegexSubscriptionMode,
)

_LOG = logging.getLogger("magnetar.client")
Inner = TypeVar("Inner", AsyncProducer, AsyncConsumer, AsyncReader)


class Client:
    """Parameters and defaults of `pulsar.Client`. Connects when first used."""

    def __init__(
        self,
        service_url: str,
        authentication: object = None,
        operation_timeout_seconds: float = 30,
        io_threads: int = 1,
        message_listener_threads: int = 1,
        concurrent_lookup_requests: int = 50000,
        log_conf_file_path: str | None = None,
        stats_interval_in_seconds: int = 600,
        use_tls: bool = False,
        tls_trust_certs_file_path: str | None = None,
        tls_allow_insecure_connection: bool = False,
        tls_validate_hostname: bool = False,
        logger: object = None,
        connection_timeout_ms: int = 10000,
        listener_name: str | None = None,
        tls_private_key_file_path: str | None = None,
        tls_certificate_file_path: str | None = None,
    ) -> None:
        self._arguments = given(locals())
        self._inner = aio.Client(**self._arguments)
        self._epoch = EPOCH[0]
        self._closed = False
        self._lock = threading.Lock()

    def inner(self) -> aio.Client:
        """The asyncio client of this process; a new one after a fork."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._epoch != EPOCH[0]:
            self._inner = aio.Client(**self._arguments)
            self._epoch = EPOCH[0]
            self._lock = threading.Lock()
        return self._inner

    def create_producer(
        self,
        topic: str,
        producer_name: str | None = None,
        schema: Schema | None = None,
        initial_sequence_id: int | None = None,
        send_timeout_millis: int = 30000,
        compression_type: CompressionType = CompressionType.NONE,
        max_pending_messages: int = 1000,
        max_pending_messages_across_partitions: int = 50000,
        block_if_queue_full: bool = False,
        batching_enabled: bool = False,
        batching_max_messages: int = 1000,
        batching_max_allowed_size_in_bytes: int = 131072,
        batching_max_publish_delay_ms: int = 10,
        chunking_enabled: bool = False,
        message_routing_mode: PartitionsRoutingMode = PartitionsRoutingMode.RoundRobinDistribution,
        lazy_start_partitioned_producers: bool = False,
        properties: dict[str, str] | None = None,
        batching_type: BatchingType = BatchingType.Default,
        encryption_key: str | None = None,
        crypto_key_reader: object = None,
        access_mode: ProducerAccessMode = ProducerAccessMode.Shared,
        message_router: Callable[[Any, int], int] | None = None,
    ) -> Producer:
        """What each costs: ProducerSettings. Batching is off unless asked for, as in `pulsar-client`."""
        options = given(locals())
        epoch = EPOCH[0]

        def open_(client: aio.Client) -> Any:
            if EPOCH[0] != epoch:
                options["producer_name"] = None  # a forked child must not take its parent's
            return client.create_producer(**options)

        return Producer(self, open_)

    def subscribe(
        self,
        topic: aio.Topics,
        subscription_name: str,
        consumer_type: ConsumerType = ConsumerType.Exclusive,
        schema: Schema | None = None,
        message_listener: Callable[[Consumer, Message], object] | None = None,
        receiver_queue_size: int = 1000,
        max_total_receiver_queue_size_across_partitions: int = 50000,
        consumer_name: str | None = None,
        unacked_messages_timeout_ms: int | None = None,
        broker_consumer_stats_cache_time_ms: int = 30000,
        negative_ack_redelivery_delay_ms: int = 60000,
        is_read_compacted: bool = False,
        properties: dict[str, str] | None = None,
        pattern_auto_discovery_period: int = 60,
        initial_position: InitialPosition = InitialPosition.Latest,
        crypto_key_reader: object = None,
        replicate_subscription_state_enabled: bool = False,
        max_pending_chunked_message: int = 10,
        auto_ack_oldest_chunked_message_on_queue_full: bool = False,
        start_message_id_inclusive: bool = False,
        batch_receive_policy: ConsumerBatchReceivePolicy | None = None,
        key_shared_policy: object = None,
        batch_index_ack_enabled: bool = False,
        regex_subscription_mode: RegexSubscriptionMode = RegexSubscriptionMode.PersistentOnly,
        dead_letter_policy: object = None,
        crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL,
    ) -> Consumer:
        """What each costs: ConsumerSettings. `message_listener(consumer, message)` is called in a thread of its own."""
        options = given(locals(), "message_listener", "pattern_auto_discovery_period")
        return Consumer(self, lambda client: client.subscribe(**options), message_listener)

    def create_reader(
        self,
        topic: str,
        start_message_id: MessageId,
        schema: Schema | None = None,
        reader_listener: Callable[[Reader, Message], object] | None = None,
        receiver_queue_size: int = 1000,
        reader_name: str | None = None,
        subscription_role_prefix: str | None = None,
        is_read_compacted: bool = False,
        crypto_key_reader: object = None,
        start_message_id_inclusive: bool = False,
        crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL,
    ) -> Reader:
        """From behind `start_message_id` on; `reader_listener(reader, message)` is called in a thread of its own."""
        options = given(locals(), "reader_listener")

        def open_(client: aio.Client, start: MessageId, inclusive: bool) -> Any:
            return client.create_reader(
                **{**options, "start_message_id": start, "start_message_id_inclusive": inclusive}
            )

        return Reader(self, open_, start_message_id, start_message_id_inclusive, reader_listener)

    def get_topic_partitions(self, topic: str) -> list[str]:
        return loop_thread().run(self.inner().get_topic_partitions(topic))

    def shutdown(self) -> None:
        """Ends everything at once; what is under way has an unknown outcome."""
        if not self._closed and self._epoch == EPOCH[0]:
            loop_thread().run(self._shutdown())
        self._closed = True

    async def _shutdown(self) -> None:
        self._inner.shutdown()
        await self._inner.close()

    def close(self) -> None:
        """Closes all that this client made, flushing producers and sending acks."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        self._closed = True
        if self._epoch == EPOCH[0]:
            loop_thread().run(self._inner.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self._closed:
            self.close()


class _Handle(Generic[Inner]):
    """A blocking object over an asyncio one, which is made again after a fork."""

    def __init__(self, client: Client, open_: Callable[[aio.Client], Any]) -> None:
        self._client = client
        self._open = open_
        self._epoch = EPOCH[0]
        self._thread: LoopThread = loop_thread()
        self._inner: Inner = self._thread.run(open_(client.inner()))

    def _current(self) -> Inner:
        if self._epoch != EPOCH[0]:
            self._reopen()
        return self._inner

    def _reopen(self) -> None:
        self._thread = loop_thread()
        self._inner = self._thread.run(self._open(self._client.inner()))
        self._epoch = EPOCH[0]

    def is_connected(self) -> bool:
        return self._epoch == EPOCH[0] and self._inner.is_connected()

    def topic(self) -> str:
        return self._inner.topic()

    def close(self) -> None:
        if self._epoch == EPOCH[0]:
            self._thread.run(self._inner.close())


class Producer(_Handle[AsyncProducer]):
    def __init__(self, client: Client, open_: Callable[[aio.Client], Any]) -> None:
        super().__init__(client, open_)
        self._ready()

    def _ready(self) -> None:
        self._blocks = self._inner.settings.block_if_queue_full
        self._only: PartitionProducer | None = self._inner.plain_lane()

    def _reopen(self) -> None:
        super()._reopen()
        self._ready()

    def producer_name(self) -> str:
        return self._current().producer_name()

    def last_sequence_id(self) -> int:
        return self._current().last_sequence_id()

    def send_async(
        self,
        content: Any,
        callback: Callback,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> None:
        """`callback(Result, MessageId)` is called in the loop thread."""
        if self._epoch != EPOCH[0]:
            self._reopen()
        only = self._only
        if only is not None and type(content) is bytes and not (
            properties or partition_key or ordering_key or sequence_id is not None or replication_clusters
            or disable_replication or event_timestamp or deliver_at is not None or deliver_after is not None
        ):  # fmt: skip
            try:
                only.add(content, callback)
                return
            except ProducerQueueIsFull:
                if not self._blocks:
                    raise
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after,
        )  # fmt: skip
        self._enqueue(content, callback, extras)

    def _enqueue(self, content: Any, callback: Callback, extras: Extras) -> PartitionProducer:
        while True:
            try:
                return self._inner.enqueue(content, callback, extras)
            except ProducerQueueIsFull:
                if not self._blocks or self._thread.inside():
                    raise
            for lane in self._inner.lanes:
                _wait_for_room(lane)

    def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> MessageId:
        """Waits for the acknowledgement and gives the id; raises the exception of the message's Result."""
        self._current()
        outcome: Future[tuple[Result, MessageId]] = Future()
        if self._thread.inside():
            raise exception_of(Result.Interrupted, "send() inside a callback would wait for itself; use send_async")
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after,
        )  # fmt: skip
        lane = self._enqueue(content, lambda *outcome_: outcome.set_result(outcome_), extras)
        lane.flush_soon()
        result, message_id = outcome.result()
        if result is not Result.Ok:
            raise lane.exception(result)
        return message_id

    def send_many(
        self,
        contents: Iterable[Any],
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> list[MessageId]:
        """Ids in the order of `contents`; raises the first failure's exception when all have an outcome."""
        options = given(locals())
        return self._thread.run(self._current().send_many(**options))

    def flush(self) -> None:
        """Returns when every message sent before has its outcome and its callback was called."""
        inner = self._current()
        self._thread.run(inner.flush())

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def _wait_for_room(lane: PartitionProducer) -> None:
    gate = threading.Lock()
    gate.acquire()
    lane.room.append(gate.release)
    if lane.full and lane.error is None:
        gate.acquire()


class _Receiving(_Handle[Inner]):
    """What a consumer and a reader share: an inbox, and a thread for the listener."""

    def __init__(
        self, client: Client, open_: Callable[[aio.Client], Any], listener: Callable[[Any, Message], object] | None
    ) -> None:
        super().__init__(client, open_)
        self._listener = listener
        self._running = threading.Event()
        if listener is not None:
            self._running.set()
            threading.Thread(target=self._listen, name="magnetar-listener", daemon=True).start()

    def _next(self, timeout_s: float | None) -> Message:
        raise NotImplementedError

    def _take(self, inbox: Inbox, timeout_millis: int | None) -> Message:
        message = inbox.take_nowait()
        if message is None:
            if self._thread.inside():
                raise exception_of(Result.Interrupted, "receiving inside a callback would wait for itself")
            message = take_blocking(inbox, check_timeout(timeout_millis))
        return message

    def _listen(self) -> None:
        while True:
            self._running.wait()
            try:
                message = self._next(None)
            except AlreadyClosed:
                return
            except PulsarException:
                _LOG.exception("%s: a message was not given to its listener", self.topic())
                continue
            try:
                assert self._listener is not None
                self._listener(self, message)
            except Exception:
                _LOG.exception("%s: a message listener failed", self.topic())


class Consumer(_Receiving[AsyncConsumer]):
    def subscription_name(self) -> str:
        return self._inner.subscription_name()

    def consumer_name(self) -> str:
        return self._inner.consumer_name()

    def receive(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none came in time."""
        if self._listener is not None:
            raise InvalidConfiguration("this consumer has a message_listener: it gets the messages")
        if self._epoch != EPOCH[0]:
            self._reopen()
        message = self._inner.inbox.take_nowait()
        return self._take(self._inner.inbox, timeout_millis) if message is None else message

    def _next(self, timeout_s: float | None) -> Message:
        return take_blocking(self._current().inbox, timeout_s)

    def batch_receive(self) -> list[Message]:
        """As many as the batch_receive_policy allows; empty when its time is over and nothing came."""
        inner = self._current()
        return self._thread.run(receive_batch(inner.inbox, inner.policy))

    def acknowledge(self, message: Message | MessageId | Iterable[Message | MessageId]) -> None:
        """Returns at once; acks are grouped and sent within 100 ms."""
        if self._epoch != EPOCH[0]:
            self._reopen()
        self._inner.acknowledge_soon(message)

    def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """This message and all before it of its partition."""
        inner = self._current()
        self._thread.run(inner.acknowledge_cumulative(message))

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        """To be delivered again after negative_ack_redelivery_delay_ms."""
        self._current().negative_acknowledge_soon(message)

    def redeliver_unacknowledged_messages(self) -> None:
        inner = self._current()
        self._thread.run(inner.redeliver_unacknowledged_messages())

    def pause_message_listener(self) -> None:
        self._running.clear()

    def resume_message_listener(self) -> None:
        self._running.set()

    def seek(self, messageid: MessageId | int) -> None:
        """To a message id, MessageId.earliest, .latest, or a publish time in ms since the epoch."""
        inner = self._current()
        self._thread.run(aio.translated(inner.seek(messageid)))

    def get_last_message_id(self) -> MessageId:
        inner = self._current()
        return self._thread.run(aio.translated(inner.get_last_message_id()))

    def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer."""
        inner = self._current()
        self._thread.run(aio.translated(inner.unsubscribe()))

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.receive()
            except AlreadyClosed:
                return

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


class Reader(_Receiving[AsyncReader]):
    def __init__(
        self, client: Client, open_: Callable[[aio.Client, MessageId, bool], Any], start: MessageId, inclusive: bool,
        listener: Callable[[Any, Message], object] | None,
    ) -> None:  # fmt: skip
        self._last: MessageId | None = None

        def open_from(inner: aio.Client) -> Any:
            return open_(inner, start, inclusive) if self._last is None else open_(inner, self._last, False)

        super().__init__(client, open_from, listener)

    def read_next(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none came in time."""
        inner = self._current()
        message = inner.note(self._take(inner.inbox, timeout_millis))
        self._last = message.message_id()
        return message

    def _next(self, timeout_s: float | None) -> Message:
        inner = self._current()
        return inner.note(take_blocking(inner.inbox, timeout_s))

    def has_message_available(self) -> bool:
        inner = self._current()
        return len(inner.inbox) > 0 or self._thread.run(aio.translated(inner.has_message_available()))

    def seek(self, messageid: MessageId | int) -> None:
        inner = self._current()
        self._thread.run(aio.translated(inner.seek(messageid)))

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.read_next()
            except AlreadyClosed:
                return

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def take_blocking(inbox: Inbox, timeout_s: float | None) -> Message:
    """Waits in the calling thread. Raises Timeout when nothing came in time."""
    gate = threading.Lock()
    gate.acquire()
    wake = gate.release
    deadline = None if timeout_s is None else monotonic() + timeout_s
    while True:
        inbox.raise_if_ended()
        inbox.wait(wake)
        if (message := inbox.take_nowait()) is not None:
            inbox.leave(wake)
            return message
        inbox.raise_if_ended()
        left = -1.0 if deadline is None else deadline - monotonic()
        if (deadline is None or left > 0) and gate.acquire(timeout=left):
            continue
        inbox.leave(wake)
        inbox.raise_if_ended()
        if (message := inbox.take_nowait()) is not None:
            return message
        raise Timeout(f"no message within {timeout_s:g} s")
