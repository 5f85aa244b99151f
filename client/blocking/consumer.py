"""The blocking consumer and reader. The calling thread receives without an event loop. A message listener runs in a
thread of its own; the handlers of `Consumer.listen` run in threads of the listener in client/consume/listening.py.

The loop thread puts the messages of each entry into a deque, from which `receive` takes them; `acknowledge` appends to
a deque, too. So under load neither call wakes the event loop for each message."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from weakref import ref

from .. import client as aio
from ..common.checks import DURATION_MS_MAX, WrongValue
from ..common.closing import FORK_COUNT
from ..common.errors import (
    AlreadyClosed,
    InvalidConfiguration,
    PulsarException,
    Result,
    Timeout,
    make_exception_for_result,
)
from ..common.loggers import ignore_error, log_foreign_error, run_logging_errors
from ..common.rate_limits import CircuitBreaker, SharedRateLimiter
from ..consume.consumer import Consumer as AsyncConsumer
from ..consume.consumer import timeout_to_seconds
from ..consume.listening import (
    ListenerStatistics,
    ListenOptions,
    begin_listening,
    check_batch_parameters,
    is_coroutine_function,
)
from ..consume.listening import Listening as AsyncListening
from ..consume.ranges import Reader as AsyncReader
from ..consume.receiver_queue import BatchReceiver, ReceiverQueue
from ..model.message import ConsumerEventListener, Message, call_event_listener
from ..model.message_id import MessageId
from .faces import ConsumerFacade, PullConsumerFacade, ReaderFacade
from .loop_thread import ForkReopenedFacade, ProcessBoundFacade, acquire_lock, asyncio_transaction_of, monotonic
from .producer import Transaction

_LOG = logging.getLogger("magnetar.client")
MessageListener = Callable[[Any, Message], object]
Receiving = TypeVar("Receiving", AsyncConsumer, AsyncReader)


class _Receiving(ForkReopenedFacade[Receiving]):
    """The common base of a consumer and a reader: their receiver queue, and the thread of their listener."""

    def __init__(
        self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any], listener: MessageListener | None,
        turns: threading.Semaphore,
    ) -> None:  # fmt: skip
        """Opens the asyncio object. `turns`: limits how many listeners of the client are called at the same time."""
        super().__init__(client, open_)
        self._listener, self._turns = listener, turns
        self._tracing = self._inner.tracing if isinstance(self._inner, AsyncConsumer) else None
        self._hooks = self._inner.hooks if isinstance(self._inner, AsyncConsumer) else None
        self._running = threading.Event()
        if listener is not None:
            self._running.set()
            self._inner.inbox.call_when_queue_ends(self._running.set)  # wakes a paused listener too
            threading.Thread(target=self._listen, name="magnetar-listener", daemon=True).start()

    def _next(self, timeout_s: float | None) -> Message:
        raise NotImplementedError

    def _wait(self, inbox: ReceiverQueue, timeout_millis: int | None) -> Message:
        """Waits until a message arrives, and returns it."""
        if threading.get_ident() == self._thread.ident:
            raise make_exception_for_result(Result.Interrupted, "receiving inside a callback would wait for itself")
        return take_message_blocking(inbox, None if timeout_millis is None else timeout_millis / 1000)

    def _listen(self) -> None:
        while True:
            self._running.wait()
            try:
                wait_message_blocking(self._current().inbox)
                with self._turns:
                    if self._running.is_set():  # it may have been paused during the waits
                        self._call_listener(self._next(0))
            except AlreadyClosed:
                return
            except PulsarException as error:
                is_over = self._inner.inbox.is_closed
                if is_over or not isinstance(error, Timeout):  # the message that waited was dropped
                    _LOG.exception("%s: a message was not given to its listener", self.topic())
                if is_over:
                    return

    def _call_listener(self, message: Message) -> None:
        try:
            assert self._listener is not None
            if self._tracing is None:
                self._listener(self, message)
            else:
                with self._tracing.processing(message):
                    self._listener(self, message)
        except BaseException as error:  # the thread would end unnoticed, and the program would go on
            self._on_listener_error(message, error)
            log_foreign_error(error, f"{self.topic()}: a message listener")

    def _on_listener_error(self, message: Message, error: BaseException) -> None:
        """Called when the listener raised an error at the message."""


class ConsumerEventThread:
    """Passes the events "became active" and "became inactive" of a consumer from the event loop to the application's
    listener. The listener runs in a thread of its own, from `start` to `close`.

    The thread does not keep the consumer alive: a consumer without references is garbage-collected, and that ends the
    thread."""

    def __init__(self, listener: ConsumerEventListener) -> None:
        self._listener = listener
        self._told: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()

    def became_active(self, _consumer: object, partition_id: int) -> None:
        """Fact: the consumer is the active one of the partition `partition_id` now. Called in the event loop; only adds
        to a queue."""
        self._told.put((partition_id, True))

    def became_inactive(self, _consumer: object, partition_id: int) -> None:
        """Fact: another consumer is the active one of the partition `partition_id` now. Called in the event loop; only
        adds to a queue."""
        self._told.put((partition_id, False))

    def start(self, consumer: Consumer) -> None:
        """Starts the thread, which passes `consumer` to the listener with each event. Events from before this call are
        passed, too."""
        arguments = (self._listener, ref(consumer, lambda _: self.close()), self._told)
        threading.Thread(target=_run_listener, args=arguments, name="magnetar-consumer-events", daemon=True).start()

    def close(self) -> None:
        """Ends the thread after the events that were added before; does not wait for it."""
        self._told.put(None)


def _run_listener(
    listener: ConsumerEventListener, whose: ref[Consumer], told: queue.SimpleQueue[tuple[int, bool] | None]
) -> None:
    while (event := told.get()) is not None and (consumer := whose()) is not None:
        call_event_listener(listener, consumer, *event)
        del consumer


class Consumer(ConsumerFacade, _Receiving[AsyncConsumer]):
    """Receives and acknowledges messages of a subscription. `Client.subscribe` opens it; `close`, or a `with`
    statement, ends it.

        with client.subscribe("flights", "board", magnetar.ConsumerType.Shared) as consumer:
            for message in consumer:
                print(message.data(), message.message_id())
                consumer.acknowledge(message)

    A subscription keeps its position when its consumers are closed: unacknowledged messages are delivered again
    (at-least-once). `message.data()` is `bytes`, `message.value()` is decoded by the schema. Up to
    `receiver_queue_size` messages wait in the client. One consumer receives from all partitions of a topic; the order
    of messages is kept per partition.

    Threads: any thread may receive and acknowledge. With a `message_listener`, the listener's thread gets the messages,
    and `receive`, `batch_receive` and `listen` raise InvalidConfiguration, as every method does for a wrong parameter.
    Errors: Timeout (no message within `timeout_millis`), AlreadyClosed, InvalidMessage (not received by this consumer),
    ChecksumError (a damaged message), CumulativeAcknowledgementNotAllowedError (Shared and KeyShared),
    OperationNotSupported (a message id that does not name its partition, or a broker that is too old). A method that
    asks brokers also raises Timeout or ConnectError if they do not answer within `operation_timeout_seconds`, and the
    error with which a broker refuses the request. A wait raises Interrupted in the loop thread, and CtrlC after
    Ctrl-C."""

    def __init__(
        self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any], listener: MessageListener | None,
        turns: threading.Semaphore, events: ConsumerEventThread | None = None,
    ) -> None:  # fmt: skip
        super().__init__(client, open_, listener, turns)
        if events is not None:
            self._inner.inbox.call_when_queue_ends(events.close)
            events.start(self)

    def receive(self, timeout_millis: int | None = None, *, now: bool = False) -> Message:
        """Waits for the next message and returns it. Raises Timeout if no message arrives within `timeout_millis`
        milliseconds; None: waits without a limit. Raises AlreadyClosed, or the error that ended the consumer, if the
        consumer has ended; ChecksumError for a damaged message; InvalidConfiguration for a wrong parameter, or if there
        is a `message_listener`; Interrupted in the loop thread; CtrlC after Ctrl-C.

        `now`: asks the brokers instead of waiting, and raises NoMessageAvailable if they have no message for this
        consumer. A message whose `send` was acknowledged before this call is found, if this consumer may have it. `now`
        and `timeout_millis` exclude each other. With `now` raises Timeout or ConnectError if a broker does not answer,
        OperationNotSupported if a broker is too old."""
        if self._listener is not None:
            self._check_no_listener()
        if self._epoch != FORK_COUNT[0]:
            self._reopen()
        if timeout_millis is not None and (
            type(timeout_millis) is not int or not 0 <= timeout_millis <= DURATION_MS_MAX
        ):
            timeout_to_seconds(timeout_millis)
        if now and timeout_millis is not None:
            raise WrongValue("now and timeout_millis exclude each other")
        inbox = self._inner.inbox
        message = inbox.take_nowait() if inbox.messages else None
        if now and message is None:
            message = self._receive_now()
        if self._hooks is not None:
            return self._before_deliver(inbox, self._wait(inbox, timeout_millis) if message is None else message)
        return self._wait(inbox, timeout_millis) if message is None else message

    def _receive_now(self) -> Message:
        while True:
            self._run(self._inner.wait_available())
            message = self._inner.inbox.take_nowait()  # another thread may have been faster
            if message is not None:
                return message

    def _before_deliver(self, inbox: ReceiverQueue, message: Message) -> Message:
        """Calls the hooks for a message that the program receives, and returns the message. If Ctrl-C interrupts this,
        puts it back."""
        hooks = self._inner.hooks  # others after a fork
        assert hooks is not None, "there are hooks"
        try:
            hooks.before_deliver(message)
        except BaseException:
            inbox.put_back([message])
            raise
        return message

    def _check_no_listener(self) -> None:
        if self._listener is not None:
            raise InvalidConfiguration("this consumer has a message_listener: it gets the messages")

    def _next(self, timeout_s: float | None) -> Message:
        inbox = self._current().inbox
        message = take_message_blocking(inbox, timeout_s)
        return message if self._hooks is None else self._before_deliver(inbox, message)

    def batch_receive(self) -> list[Message]:
        """Waits for messages and returns a batch of them, within the limits of the consumer's batch_receive_policy.
        Returns an empty list if no message arrives within the time-out of that policy. Raises AlreadyClosed, or the
        error that ended the consumer, if the consumer has ended; ChecksumError for a damaged message;
        InvalidConfiguration if there is a `message_listener`. If the call is interrupted or raises, its messages go
        back to the receiver queue."""
        self._check_no_listener()
        inner = self._current()
        batch = BatchReceiver(inner.inbox, monotonic)
        try:
            messages = self._thread.run(batch.receive(inner.policy))
            if inner.hooks is not None:
                for message in messages:
                    inner.hooks.before_deliver(message)
            return messages
        except BaseException:
            if not self._thread.is_current():
                # what it took has no receiver
                self._thread.loop.call_soon_threadsafe(run_logging_errors, batch.put_back, ignore_error)
            raise

    def acknowledge(
        self, message: Message | MessageId | Iterable[Message | MessageId], *, txn: Transaction | None = None
    ) -> None:
        """Acknowledges messages: they are not delivered again. Returns at once; acknowledgements are sent in groups,
        within `ack_group_ms`.

        With `ack_receipt_enabled` or `txn` the call waits, and returns when the acknowledgement survives any crash.
        With `txn` the messages count as acknowledged when that transaction commits. The call then raises
        TransactionConflict if a message is acknowledged already, or in another transaction; TransactionEnded if the
        transaction is not open.

        Raises InvalidMessage if this consumer did not receive a message; OperationNotSupported or InvalidConfiguration
        for an id that names no partition or no message; AlreadyClosed if the consumer is closed. A call that waits also
        raises Timeout or ConnectError if a broker does not answer."""
        if self._epoch != FORK_COUNT[0]:
            self._reopen()
        inner = self._inner
        if txn is not None:
            self._run(inner.acknowledge(message, txn=asyncio_transaction_of(txn)))
        elif inner.settings.ack_receipt_enabled:
            self._run(inner.acknowledge(message))
        else:
            inner.acknowledge_soon(message)

    def negative_acknowledge(
        self, message: Message | MessageId, *, error: BaseException | None = None
    ) -> None:
        """Tells the broker that the message was not processed: the broker delivers it again after
        negative_ack_redelivery_delay_ms. With redelivery_order "key" the broker's back-off applies instead, and later
        messages of the same key come after this one. `error`: the exception with which the program failed; it is
        described in the dead letter, if the message becomes one. Raises InvalidMessage if this consumer did not receive
        the message; OperationNotSupported or InvalidConfiguration for an id that names no partition or no message;
        InvalidConfiguration if `error` is no exception. Does not wait for the broker."""
        inner = self._current()
        if inner.settings.redelivery_order == "key":
            self._run(inner.negative_acknowledge(message, error=error))
        else:
            inner.negative_acknowledge_soon(message, error)

    def _on_listener_error(self, message: Message, error: BaseException) -> None:
        self.record_error(message, error)

    def redeliver_unacknowledged_messages(self) -> None:
        """Asks the broker to deliver again all messages that were received before this call and are not acknowledged.
        Does not wait for the broker. Messages that wait in the client are dropped; the broker delivers them again, too.
        Raises Interrupted in the loop thread."""
        inner = self._current()

        async def redeliver() -> None:
            inner.redeliver_unacknowledged_messages()

        self._thread.run(redeliver())

    def pause_message_listener(self) -> None:
        """Pauses the message listener until `resume_message_listener` is called: it is called for no further message. A
        call that has begun goes on. Has no effect without a `message_listener`."""
        self._running.clear()

    def resume_message_listener(self) -> None:
        """Ends the pause of the message listener: the listener is called for messages again."""
        self._running.set()

    def listen(
        self,
        function: Callable[[Message], Any],
        *,
        concurrency: int = 32,
        order: str = "key",
        threads: int | None = None,
        rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None,
        acknowledge: bool = True,
        stop_timeout: float = 30,
    ) -> Listening:
        """Calls `function(message)` for each message in threads, up to `concurrency` at a time, and acknowledges the
        message when the function returns. If the function raises, the message is negatively acknowledged. Returns the
        running listener at once.

            with consumer.listen(handle, threads=8) as listening:
                listening.wait()

        `order`: with "key" the messages of one key are handled one after the other, those without a key in any order;
        with "partition" the messages of one partition are handled one after the other; with "none" there is no order.
        `threads`: how many at most (None: `concurrency`). `rate`: the most calls per second, or a RateLimiter.
        `breaker`: while it is open, no call begins, and the consumer requests no more messages. `acknowledge` False:
        the function acknowledges by itself, for example in a transaction. `stop_timeout`: the seconds that running
        handlers have at the end.

        A handler that runs for a minute is reported by a warning in the log. A message that is delivered again while
        its handler runs is not handled a second time. Raises InvalidConfiguration if the consumer has a listener,
        `function` is a coroutine function, or a parameter is wrong."""
        options = ListenOptions(concurrency, order, threads, rate, breaker, acknowledge, stop_timeout)
        return self._listen_by(function, options)

    def listen_batch(
        self,
        function: Callable[[list[Message]], Any],
        *,
        max: int = 500,
        wait: float = 1.0,
        concurrency: int = 1,
        threads: int | None = None,
        rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None,
        acknowledge: bool = True,
        stop_timeout: float = 30,
    ) -> Listening:
        """Calls `function(messages)` in a thread for batches of messages, and acknowledges the messages when the
        function returns. A batch has up to `max` messages, and ends `wait` seconds after its first message. Returns the
        running listener at once.

        The function may return a result for each message, in their order: for an exception or False, that message is
        negatively acknowledged. If the function raises, all messages of the batch are. `rate`: messages per second. The
        other parameters and the errors are those of `listen`; with a `concurrency` of 1 batches keep the order of the
        messages."""
        check_batch_parameters(max, wait)
        options = ListenOptions(
            concurrency, "none", threads, rate, breaker, acknowledge, stop_timeout, batch=max, wait_s=wait
        )
        return self._listen_by(function, options)

    def _listen_by(self, function: Callable[[Any], Any], options: ListenOptions) -> Listening:
        self._check_no_listener()
        if is_coroutine_function(function):
            raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.Client")
        inner = self._current()

        async def begin_listener() -> AsyncListening:
            begun = begin_listening(inner, function, options)
            begun.owner = self  # a consumer without references would be closed
            return begun

        return Listening(self._thread.run(begin_listener()))

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.receive()
            except AlreadyClosed:
                return


class Listening(ProcessBoundFacade[AsyncListening]):
    """A running listener, which `Consumer.listen` returns, or a running server, which `Client.serve` returns. `stop`,
    or the end of a `with` block, ends it; so does the end of its consumer.

        with consumer.listen(handle, threads=8) as listening:
            listening.wait()"""

    def statistics(self) -> ListenerStatistics:
        """Returns the counters since the listener began, with the numbers of running handlers and waiting messages now.
        Each call returns the same object."""
        return self._inner.statistics()

    @property
    def is_over(self) -> bool:
        """Returns whether the listener has ended, with all its handlers."""
        return self._inner.is_over

    def wait(self) -> None:
        """Waits until the listener has ended: by `stop`, or with its consumer. Raises the error that ended the
        consumer, unless the program closed it; PulsarException if the listener itself failed; TransactionEnded in a
        forked child process. Ctrl-C ends the wait, and not the listener."""
        self._run(self._current().wait())

    def stop(self, timeout: float | None = None) -> None:
        """Stops the listener: no further handler is called, and messages that wait for a handler go back to the
        receiver queue. Running handlers have `timeout` seconds (None: `stop_timeout`) to end. A handler that takes
        longer goes on in its thread, and its outcome counts while the consumer is open. May be called again. Raises
        InvalidConfiguration for a wrong `timeout`, TransactionEnded in a forked child process."""
        self._run(self._current().stop(timeout))

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Reader(ReaderFacade, _Receiving[AsyncReader]):
    """Reads a topic from a given message on. A reader has no durable subscription and acknowledges nothing.

        with client.create_reader("flights", magnetar.MessageId.earliest) as reader:
            while reader.has_message_available():
                print(reader.read_next().data())

    After a reconnect the reader continues after the last message that was read. It reads all partitions of a topic; the
    order of messages is kept per partition. Any thread may read. With a `reader_listener`, the listener's thread gets
    the messages, and `read_next` and iteration raise InvalidConfiguration. Errors: Timeout (no message within
    `timeout_millis`), AlreadyClosed, InvalidConfiguration (a wrong parameter), ChecksumError (a damaged message). A
    method that asks brokers also raises Timeout or ConnectError if they do not answer within
    `operation_timeout_seconds`. A wait raises Interrupted in the loop thread, and CtrlC after Ctrl-C."""

    def __init__(
        self,
        client: Callable[[], aio.Client],
        open_: Callable[[aio.Client, MessageId, bool], Any],
        start: MessageId,
        inclusive: bool,
        listener: MessageListener | None,
        turns: threading.Semaphore,
    ) -> None:
        self._last: MessageId | None = None

        def open_at_position(inner: aio.Client) -> Any:
            return open_(inner, start, inclusive) if self._last is None else open_(inner, self._last, False)

        super().__init__(client, open_at_position, listener, turns)

    def read_next(self, timeout_millis: int | None = None) -> Message:
        """Waits for the next message and returns it. Raises Timeout if no message arrives within `timeout_millis`
        milliseconds; None: waits without a limit. Raises InvalidConfiguration if the reader has a listener, or for a
        wrong `timeout_millis`; AlreadyClosed, or the error that ended the reader, if the reader has ended;
        ChecksumError for a damaged message; Interrupted in the loop thread; CtrlC after Ctrl-C."""
        if self._listener is not None:
            raise InvalidConfiguration("this reader has a reader_listener: it gets the messages")
        if timeout_millis is not None and (
            type(timeout_millis) is not int or not 0 <= timeout_millis <= DURATION_MS_MAX
        ):
            timeout_to_seconds(timeout_millis)
        inner = self._current()
        return self._on_taken(inner, inner.inbox.take_nowait() or self._wait(inner.inbox, timeout_millis))

    def _next(self, timeout_s: float | None) -> Message:
        inner = self._current()
        return self._on_taken(inner, take_message_blocking(inner.inbox, timeout_s))

    def _on_taken(self, inner: AsyncReader, message: Message) -> Message:
        """Records that the program gets the message: after a fork the reader begins after it."""
        self._last = message.message_id()
        return inner.on_taken(message)

    def has_message_available(self) -> bool:
        """Returns whether the topic has a message after the last one that was read. Asks the brokers if no message
        waits in the client. Raises Timeout or ConnectError if a broker does not answer, AlreadyClosed if the reader is
        closed."""
        inner = self._current()
        return len(inner.inbox) > 0 or self._run(inner.has_message_available())

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.read_next()
            except AlreadyClosed:
                return


class PullConsumer(PullConsumerFacade):
    """Pulls messages of a topic by index, without a subscription; see `Client.pull_consumer`. `partition`: the number
    of a partition, needed if the topic has partitions.

        with client.pull_consumer("flights", offsets=magnetar.FileOffsetStore("/var/lib/board/offsets")) as pull:
            index = pull.load_offset()
            while True:
                found = pull.pull(index, timeout=30)
                for message in found.messages:
                    ...
                index = found.next_index
                pull.store_offset(index)

    Any thread may pull. Errors: AlreadyClosed after `close`; InvalidConfiguration for a wrong parameter, or a
    `partition` that the topic does not have; TopicNotFound if the topic was deleted, or created again since this object
    was opened; CryptoError for a message that cannot be decrypted; ChecksumError for a damaged one; Timeout or
    ConnectError if brokers do not answer within `operation_timeout_seconds`. A pull does not skip such a message by
    itself: pull from the next index."""


def wait_message_blocking(inbox: ReceiverQueue) -> None:
    """Waits in the calling thread until a message waits in the queue, and does not remove it. Raises the error with
    which the queue ended, and CtrlC after Ctrl-C. If this thread was woken, the next receiver is woken, too: this one
    may take nothing."""
    gate = threading.Lock()
    gate.acquire()
    wake = gate.release
    try:
        while True:
            inbox.call_when_message_waits(wake)
            if inbox.messages:
                return
            acquire_lock(gate)
    finally:
        inbox.remove_fill_callback(wake)


def take_message_blocking(inbox: ReceiverQueue, timeout_s: float | None) -> Message:
    """Waits in the calling thread for a message, removes it from the queue and returns it. Raises Timeout if no message
    arrives within `timeout_s` seconds (None: no limit), and the error with which the queue ended.

    Ctrl-C ends the wait within INTERRUPT_POLL_S seconds (client/blocking/loop_thread.py), and raises CtrlC. If this
    thread was woken for a message, or had removed one, the next receiver gets that message. Raises ChecksumError for a
    damaged message."""
    gate = threading.Lock()
    gate.acquire()
    wake = gate.release
    deadline = None if timeout_s is None else monotonic() + timeout_s
    message = None
    try:
        while True:
            inbox.call_when_message_waits(wake)
            message = inbox.take_nowait() if inbox.messages else None
            if message is not None:
                inbox.remove_fill_callback(wake)
                return message
            woken = acquire_lock(gate, deadline)
            if not woken:
                inbox.remove_fill_callback(wake)
            message = inbox.take_nowait()
            if message is not None:
                return message
            inbox.raise_if_ended()
            if not woken:
                raise Timeout(f"no message within {timeout_s:g} s")
    except BaseException:
        inbox.remove_fill_callback(wake)
        if message is not None:
            inbox.put_back([message])
        raise
