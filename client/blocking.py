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
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar

from . import client as aio
from .consumer import Consumer as AsyncConsumer
from .consumer import check_timeout, receive_batch
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
from .partition_producer import PartitionProducer
from .producer import Producer as AsyncProducer
from .reader import Reader as AsyncReader

_LOG = logging.getLogger("magnetar.client")
Inner = TypeVar("Inner", AsyncProducer, AsyncConsumer, AsyncReader)


class Client:
    """Parameters and defaults of `pulsar.Client`. Connects when first used."""

    def __init__(self, service_url: str, authentication: object = None, **options: Any) -> None:
        self._arguments = (service_url, authentication, options)
        self._inner = aio.Client(service_url, authentication, **options)
        self._epoch = EPOCH[0]
        self._closed = False
        self._lock = threading.Lock()

    def inner(self) -> aio.Client:
        """The asyncio client of this process; a new one after a fork."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._epoch != EPOCH[0]:
            service_url, authentication, options = self._arguments
            self._inner = aio.Client(service_url, authentication, **options)
            self._epoch = EPOCH[0]
            self._lock = threading.Lock()
        return self._inner

    def create_producer(self, topic: str, **options: Any) -> Producer:
        """Parameters: ProducerSettings. Batching is off unless asked for, as in `pulsar-client`."""
        options.setdefault("batching_enabled", False)
        return Producer(self, lambda client: client.create_producer(topic, **_for_this_process(options)))

    def subscribe(self, topic: aio.Topics, subscription_name: str, **options: Any) -> Consumer:
        """Parameters: ConsumerSettings, and `message_listener(consumer, message)`, called in a thread of its own."""
        listener = options.pop("message_listener", None)
        return Consumer(self, lambda client: client.subscribe(topic, subscription_name, **options), listener)

    def create_reader(self, topic: str, start_message_id: MessageId, **options: Any) -> Reader:
        """From behind `start_message_id` on; `reader_listener(reader, message)` is called in a thread of its own."""
        listener = options.pop("reader_listener", None)

        def open_(client: aio.Client, start: MessageId, inclusive: bool) -> Any:
            return client.create_reader(topic, start, **{**options, "start_message_id_inclusive": inclusive})

        return Reader(self, open_, start_message_id, options.get("start_message_id_inclusive", False), listener)

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


def _for_this_process(options: dict[str, Any]) -> dict[str, Any]:
    """A forked child must not take its parent's producer name."""
    if EPOCH[0] == options.setdefault("_epoch", EPOCH[0]):
        return {name: value for name, value in options.items() if name != "_epoch"}
    return {name: value for name, value in options.items() if name not in ("_epoch", "producer_name")}


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
        **options: Any,
    ) -> None:
        """`callback(Result, MessageId)` is called in the loop thread. Further parameters: those of `send`."""
        if self._epoch != EPOCH[0]:
            self._reopen()
        only = self._only
        if only is not None and type(content) is bytes and not (properties or partition_key or ordering_key or options):
            try:
                only.add(content, callback)
                return
            except ProducerQueueIsFull:
                if not self._blocks:
                    raise
        if properties is not None:
            options["properties"] = properties
        if partition_key is not None:
            options["partition_key"] = partition_key
        if ordering_key is not None:
            options["ordering_key"] = ordering_key
        self._enqueue(content, callback, options)

    def _enqueue(self, content: Any, callback: Callback, options: dict[str, Any]) -> PartitionProducer:
        while True:
            try:
                return self._inner.enqueue(content, callback, options)
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
        **options: Any,
    ) -> MessageId:
        """Waits for the acknowledgement and gives the id; raises the exception of the message's Result."""
        inner = self._current()
        outcome: Future[MessageId] = Future()

        def done(result: Result, message_id: MessageId) -> None:
            if result is Result.Ok:
                outcome.set_result(message_id)
            else:
                outcome.set_exception(exception_of(result, f"a message to {inner.topic()}: {result.name}"))

        if self._thread.inside():
            raise exception_of(Result.Interrupted, "send() inside a callback would wait for itself; use send_async")
        if properties is not None:
            options["properties"] = properties
        if partition_key is not None:
            options["partition_key"] = partition_key
        if ordering_key is not None:
            options["ordering_key"] = ordering_key
        self._enqueue(content, done, options).flush_soon()
        return outcome.result()

    def send_many(self, contents: Iterable[Any], **options: Any) -> list[MessageId]:
        """Ids in the order of `contents`; raises the first failure's exception when all have an outcome."""
        inner = self._current()
        return self._thread.run(inner.send_many(contents, **options))

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
