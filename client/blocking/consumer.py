"""The blocking consumer and reader: receiving without an event loop, and listeners in a thread of their own.

`receive` takes from a deque that the loop thread fills by entries, `acknowledge` appends to a list: under load neither
wakes the loop for a message.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar
from weakref import ref

from .. import client as aio
from ..common.errors import AlreadyClosed, InvalidConfiguration, PulsarException, Result, Timeout, exception_of
from ..common.fork import EPOCH
from ..common.guard import ignored, run
from ..consume.batch_receive import ReceivedBatch
from ..consume.consumer import Consumer as AsyncConsumer
from ..consume.partition_consumers import check_timeout
from ..consume.reader import Reader as AsyncReader
from ..consume.receiver_queue import ReceiverQueue
from ..model.events import ConsumerEventListener, call
from ..model.message import Message
from ..model.message_id import MessageId
from ..model.settings import ConsumerDeadLetterPolicy
from .handle import Handle
from .waits import acquire

_LOG = logging.getLogger("magnetar.client")
Listener = Callable[[Any, Message], object]
Receiving = TypeVar("Receiving", AsyncConsumer, AsyncReader)


class _Receiving(Handle[Receiving]):
    """What a consumer and a reader share: an inbox, and a thread for the listener."""

    def __init__(
        self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any], listener: Listener | None,
        turns: threading.Semaphore,
    ) -> None:  # fmt: skip
        """`turns`: so many listeners of the client are called at the same time."""
        super().__init__(client, open_)
        self._listener, self._turns = listener, turns
        self._running = threading.Event()
        if listener is not None:
            self._running.set()
            self._inner.inbox.at_end(self._running.set)  # a paused one learns it too
            threading.Thread(target=self._listen, name="magnetar-listener", daemon=True).start()

    def _next(self, timeout_s: float | None) -> Message:
        raise NotImplementedError

    def _take(self, inbox: ReceiverQueue, timeout_millis: int | None) -> Message:
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
                if self._inner.inbox.ended:
                    return
                continue
            try:
                assert self._listener is not None
                with self._turns:
                    self._listener(self, message)
            except (Exception, SystemExit):  # a thread that ends is not the end of the program, and nobody would know
                _LOG.exception("%s: a message listener failed", self.topic())


class ConsumerEvents:
    """Carries what the event loop is told to the application's listener, in a thread of its own, until `end`.

    The thread does not keep the consumer: one that is dropped is collected, and ends it.
    """

    def __init__(self, listener: ConsumerEventListener) -> None:
        self._listener = listener
        self._told: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()

    def became_active(self, _consumer: object, partition_id: int) -> None:
        self._told.put((partition_id, True))

    def became_inactive(self, _consumer: object, partition_id: int) -> None:
        self._told.put((partition_id, False))

    def start(self, consumer: Consumer) -> None:
        arguments = (self._listener, ref(consumer, lambda _: self.end()), self._told)
        threading.Thread(target=_tell, args=arguments, name="magnetar-consumer-events", daemon=True).start()

    def end(self) -> None:
        self._told.put(None)


def _tell(
    listener: ConsumerEventListener, whose: ref[Consumer], told: queue.SimpleQueue[tuple[int, bool] | None]
) -> None:
    while (event := told.get()) is not None and (consumer := whose()) is not None:
        call(listener, consumer, *event)
        del consumer


class Consumer(_Receiving[AsyncConsumer]):
    def __init__(
        self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any], listener: Listener | None,
        turns: threading.Semaphore, events: ConsumerEvents | None = None,
    ) -> None:  # fmt: skip
        super().__init__(client, open_, listener, turns)
        if events is not None:
            self._inner.inbox.at_end(events.end)
            events.start(self)

    def subscription_name(self) -> str:
        return self._inner.subscription_name()

    def consumer_name(self) -> str:
        return self._inner.consumer_name()

    def receive(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none came in time."""
        if self._listener is not None:
            self._check_no_listener()
        if self._epoch != EPOCH[0]:
            self._reopen()
        if timeout_millis is not None and (type(timeout_millis) is not int or timeout_millis < 0):
            check_timeout(timeout_millis)
        message = self._inner.inbox.take_nowait()
        return self._take(self._inner.inbox, timeout_millis) if message is None else message

    def _check_no_listener(self) -> None:
        if self._listener is not None:
            raise InvalidConfiguration("this consumer has a message_listener: it gets the messages")

    def _next(self, timeout_s: float | None) -> Message:
        return take_blocking(self._current().inbox, timeout_s)

    def batch_receive(self) -> list[Message]:
        """As many as the batch_receive_policy allows; empty when its time is over and nothing came."""
        self._check_no_listener()
        inner = self._current()
        batch = ReceivedBatch(inner.inbox)
        try:
            return self._thread.run(batch.receive(inner.policy))
        except BaseException:
            if not self._thread.inside():
                self._thread.loop.call_soon_threadsafe(run, batch.give_back, ignored)  # nobody gets what it took
            raise

    def acknowledge(self, message: Message | MessageId | Iterable[Message | MessageId]) -> None:
        """Returns at once; acks are grouped and sent within 100 ms. With receipts: when it survives any crash."""
        if self._epoch != EPOCH[0]:
            self._reopen()
        inner = self._inner
        if inner.settings.ack_receipt_enabled:
            self._thread.run(aio.translated(inner.acknowledge(message)))
        else:
            inner.acknowledge_soon(message)

    def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """This message and all before it of its partition."""
        inner = self._current()
        self._thread.run(aio.translated(inner.acknowledge_cumulative(message)))

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        """To be delivered again after negative_ack_redelivery_delay_ms."""
        self._current().negative_acknowledge_soon(message)

    def reconsume_later(self, message: Message, delay: timedelta, properties: dict[str, str] | None = None) -> None:
        """Acknowledges it, when a copy that is delivered after the delay is stored. Needs `enable_retry`."""
        self._thread.run(aio.translated(self._current().reconsume_later(message, delay, properties)))

    @property
    def dead_letter_policy(self) -> ConsumerDeadLetterPolicy | None:
        """What applies, a default too; None: messages come until they are acknowledged."""
        return self._inner.dead_letter_policy

    def redeliver_unacknowledged_messages(self) -> None:
        """Asks for all of them again; what was received before this and not acknowledged."""
        inner = self._current()

        async def redeliver() -> None:
            inner.redeliver_unacknowledged_messages()

        self._thread.run(redeliver())

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
        self,
        client: Callable[[], aio.Client],
        open_: Callable[[aio.Client, MessageId, bool], Any],
        start: MessageId,
        inclusive: bool,
        listener: Listener | None,
        turns: threading.Semaphore,
    ) -> None:
        self._last: MessageId | None = None

        def open_from(inner: aio.Client) -> Any:
            return open_(inner, start, inclusive) if self._last is None else open_(inner, self._last, False)

        super().__init__(client, open_from, listener, turns)

    def read_next(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none came in time."""
        if timeout_millis is not None and (type(timeout_millis) is not int or timeout_millis < 0):
            check_timeout(timeout_millis)
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


def take_blocking(inbox: ReceiverQueue, timeout_s: float | None) -> Message:
    """Waits in the calling thread. Raises Timeout when nothing came in time.

    Ctrl-C ends it within LOOK_S (waits.py): the handler's exception comes out of the lock. What it was woken for,
    or had taken, goes to the next who receives.
    """
    gate = threading.Lock()
    gate.acquire()
    wake = gate.release
    deadline = None if timeout_s is None else monotonic() + timeout_s
    message = None
    try:
        while True:
            inbox.raise_if_ended()
            inbox.wait(wake)
            message = inbox.take_nowait()
            if message is None:
                inbox.raise_if_ended()
                if acquire(gate, deadline):
                    continue
            inbox.leave(wake)
            if message is None:
                inbox.raise_if_ended()
                message = inbox.take_nowait()
            if message is None:
                raise Timeout(f"no message within {timeout_s:g} s")
            return message
    except BaseException:
        inbox.leave(wake)
        if message is not None:
            inbox.put_back([message])
        raise
