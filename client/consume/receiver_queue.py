"""The queue of received messages that wait for the application: the event loop fills it, and a task or a thread takes
messages from it. Also the batches of `batch_receive` (`ConsumerBatchReceivePolicy`, `receive_batch`), and the requests
of a consumer to its broker (`ConsumerRequests`).

The queue is a deque: `put` and `take_nowait` need no lock. A receiver that waits registers a function that wakes it;
`put` calls as many of these functions as there are messages. A wake-up is only a hint: the receiver checks the queue
again, and waits again if another receiver was faster. With levels of priority `messages` has a deque for each level,
and the first message is that of the level whose turn it is (client/core/levels.py).

**No wake-up is lost.** A receiver that stops waiting for another reason (a time-out, a cancelled task, Ctrl-C) removes
its function; if the function was called already, the function of the next receiver is called in its place
(`remove_fill_callback`). A task removes a message and returns it in one step, so a task that is cancelled has removed
none. If Ctrl-C interrupts `take_nowait` at any point, the message and its permits stay in the queue. Guards:
tests/client/blocking/test_waking.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat, starmap
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, SubscriptionNotFound
from ..common import errors
from ..common.checks import BATCH_RECEIVE_CHECKS, WrongValue, check_parameters
from ..common.errors import (
    ConnectError,
    OperationNotSupported,
    PulsarException,
    Timeout,
    run_translating_errors,
    translate_error,
)
from ..connect.connections import Connections
from ..core.consumer import ConsumerCore
from ..core.effects import ConsumerEffect, PartitionClientState
from ..core.levels import LevelQueues, make_empty_queue
from ..core.listening import KeyQueues
from ..model.message import Message
from .acknowledgements import AckCollector, MessageOrId, get_ack_coordinates
from .deliveries import SeekTarget, make_ack_requests


class ReceiverQueue:
    """The queue of received messages of one consumer, which wait in the client until the application receives them.
    `messages`: the waiting messages. `sorted`: messages that a listener has drawn from it for its handlers; None: there
    is no listener."""

    def __init__(self, messages: deque[Message] | LevelQueues[Message] | None = None) -> None:
        """Makes an empty queue. `messages`: an empty container for the messages, which decides their order; None: they
        leave in the order of their arrival."""
        self._fill(deque() if messages is None else messages)
        self._waiting: deque[Callable[[], object]] = deque()
        self._error: PulsarException | None = None
        self._at_end: list[Callable[[], object]] = []
        self.sorted: KeyQueues[Message] | None = None  # by a listener; what waits there is part of this queue

    def _fill(self, messages: deque[Message] | LevelQueues[Message]) -> None:
        self.messages = messages
        self._first = starmap(messages.popleft, repeat(()))  # never ends: an empty deque raises

    def __len__(self) -> int:
        return len(self.messages)

    def put(self, messages: Iterable[Message]) -> None:
        """Adds messages at the end of the queue and wakes receivers that wait. Must be called in the event loop."""
        self.messages.extend(messages)
        waiting = self._waiting
        if waiting:
            try:
                for _ in range(min(len(waiting), len(self.messages))):
                    waiting.popleft()()
            except IndexError:
                return  # they left meanwhile

    def take_nowait(self) -> Message | None:
        """Removes the first message that has not expired, and returns it; returns None if the queue has none. Frees the
        permits of the removed messages. Raises the error of a damaged message. May be called from any thread."""
        while True:
            try:
                for message in self._first:  # no call of `popleft`: Ctrl-C would fall between it and its result
                    if not message.permits:
                        return message
                    break
                else:
                    return None
            except IndexError:
                return None
            entry = message.entry
            try:
                entry.consumer.on_taken(message)
            except PulsarException:  # a damaged one
                raise
            except BaseException:
                entry.consumer.on_dequeue_interrupted()
                message.permits = max(0, message.permits)  # what was given is not given again
                self.messages.appendleft(message)
                self.put(())
                raise
            if (
                not message.permits
                or entry.broker_clock_ms is None
                or not entry.consumer.acknowledge_if_expired(message)
            ):
                return message

    def pop_nowait(self) -> Message | None:
        """Removes the message at the front and returns it; None if the queue is empty. The message stays part of the
        receiver queue, with its permits, until `free_popped_permits` is called. Must be called in the event loop, by
        the listener that has set `sorted`."""
        try:
            return self.messages.popleft()
        except IndexError:
            return None

    def free_popped_permits(self, message: Message) -> None:
        """Fact: the application gets a message that `pop_nowait` returned; its permits are free. Raises the error of a
        damaged message. Does nothing at a second call for the message."""
        if message.permits > 0:
            message.entry.consumer.on_taken(message)

    def restore_popped(self, messages: Sequence[Message]) -> None:
        """Puts messages that `pop_nowait` returned back to the front of the queue. They keep the permits that
        `free_popped_permits` has not freed."""
        for message in messages:
            message.permits = max(0, message.permits)
        self.messages.extendleft(reversed(messages))
        self.put(())

    def waiting_messages(self) -> list[Message]:
        """Returns the messages that the application has not received: those that a listener has drawn, then the others,
        in the order of their arrival; with levels of priority those of the most urgent level first."""
        return [*(self.sorted.waiting() if self.sorted is not None else ()), *self.messages.copy()]

    def peek(self) -> Message | None:
        """Returns the message at the front of the queue without removing it; None if the queue is empty. Another
        receiver may remove this message before the caller does."""
        try:
            return self.messages[0]
        except IndexError:
            return None

    def put_back(self, messages: Sequence[Message]) -> None:
        """Puts messages back to the front of the queue, because they were removed but did not reach the application.
        Their permits are not freed a second time."""
        for message in reversed(messages):
            message.permits = 0
            self.messages.appendleft(message)
            message.entry.consumer.on_message_put_back(message)
        self.put(())

    def close(self, error: PulsarException) -> None:
        """Ends the queue: all receivers that wait now, and later ones once no message is left, get the exception
        `error`. Calls the functions of `call_when_queue_ends`."""
        self._error = error
        for _ in range(len(self._waiting)):
            self._wake_one()
        at_end, self._at_end = self._at_end, []
        for call in at_end:
            call()

    @property
    def is_closed(self) -> bool:
        return self._error is not None

    def call_when_queue_ends(self, call: Callable[[], object]) -> None:
        """Registers the function `call`, which is called once when the queue ends; calls it at once if the queue has
        ended already."""
        if self._error is not None:
            call()
        else:
            self._at_end.append(call)

    def _wake_one(self) -> None:
        try:
            wake = self._waiting.popleft()
        except IndexError:
            return
        wake()

    def raise_if_ended(self) -> None:
        """Raises the error with which the queue ended; does nothing if it has not ended."""
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error

    async def take_message(self, timeout_s: float | None) -> Message:
        """Waits for a message, removes it from the queue and returns it. Must be called in the event loop. Raises
        Timeout if none arrives within `timeout_s` seconds (None: no limit), and the error with which the queue ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.raise_if_ended()
                    if (message := self.take_nowait()) is not None:
                        return message
                    await self._woken()
        except Timeout:  # the inbox ended with one
            raise
        except TimeoutError:
            raise Timeout(f"no message within {timeout_s:g} s") from None

    async def wait_message(self, timeout_s: float | None) -> None:
        """Waits until the queue contains a message, and does not remove it. Must be called in the event loop. Raises
        Timeout if none arrives within `timeout_s` seconds (None: no limit), and the error with which the queue ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.messages:
                    self.raise_if_ended()
                    await self._woken()
        except Timeout:  # the inbox ended with one
            raise
        except TimeoutError:
            raise Timeout(f"no message within {timeout_s:g} s") from None

    async def _woken(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wake = _future_waker(ready)
        self._waiting.append(wake)
        try:
            await ready
        except BaseException:
            self.remove_fill_callback(wake)
            raise

    def call_when_message_waits(self, wake: Callable[[], object]) -> None:
        """Registers the function `wake`, which is called once when the queue may contain a message, or ends. The caller
        must check the queue again after this call. Raises the error with which the queue ended; `remove_fill_callback`
        must be called even then. May be called from any thread."""
        self._waiting.append(wake)
        if self._error is not None:
            self.raise_if_ended()

    def discard_matching_messages(self, unwanted: Callable[[Message], bool]) -> int:
        """Removes the messages for which `unwanted` returns True; returns the number of their permits. Must be called
        in the event loop. Each other message is still received exactly once."""
        old = self.messages
        self._fill(make_empty_queue(old))
        dropped = 0 if self.sorted is None else sum(max(0, each.permits) for each in self.sorted.discard(unwanted))
        while old:
            try:
                message = old.popleft()
            except IndexError:
                break
            if unwanted(message):
                dropped += message.permits
            else:
                self.messages.append(message)
        self.put(())
        return dropped

    def remove_fill_callback(self, wake: Callable[[], object]) -> None:
        """Removes the function `wake` that `call_when_message_waits` registered. If `wake` was called already and a
        message waits, the next registered function is called in its place, so that the message is noticed."""
        if not self._remove_waiting(wake) and self.messages:
            self._wake_one()

    def _remove_waiting(self, wake: Callable[[], object]) -> bool:
        try:
            self._waiting.remove(wake)
        except ValueError:
            return False
        return True


def _future_waker(ready: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    return wake


# ------------------------------------------------------------------------------------------------- batch_receive
# How many messages `batch_receive` gives at once, and when (Pulsar S18).
#
# It returns as soon as the first of three is reached: `max_num_message`, `max_num_bytes` (of payload), `timeout_ms`
# since it was called; what came by then, in order, perhaps nothing. A number that is not above 0 is no limit; without
# messages and bytes the bytes are DEFAULT_BATCH_BYTES, so that no batch is without bound. Neither number is exceeded:
# the message that would is the first of the next batch, and only a message that is larger by itself comes alone. A
# batch may be larger than `receiver_queue_size` (Pulsar cuts it there): what is taken makes room, so without a time-out
# it never waits for what cannot come.
#
# Nothing is lost between two batches: when it is cancelled, or a message raises (a damaged one, a consumer that was
# closed), what was taken goes back to the front of the inbox. Guards: tests/client/consume/test_batch_receive.py.


DEFAULT_BATCH_BYTES = 10 << 20
"""Limit of the bytes in a batch by default, as in Pulsar."""


@dataclass(frozen=True, slots=True)
class ConsumerBatchReceivePolicy:
    """The limits of `batch_receive`, which returns when one of them is reached: messages, bytes of payload, and ms
    since the call. A limit that is not above 0 means that there is no such limit; without limits of messages and bytes,
    10 MiB is the limit. Raises InvalidConfiguration if no value is above 0, or a value is no whole number."""

    max_num_message: int = -1
    max_num_bytes: int = DEFAULT_BATCH_BYTES
    timeout_ms: int = 100

    def __post_init__(self) -> None:
        check_parameters(BATCH_RECEIVE_CHECKS, {name: getattr(self, name) for name in BATCH_RECEIVE_CHECKS})
        if self.max_num_message <= 0 and self.max_num_bytes <= 0 and self.timeout_ms <= 0:
            raise WrongValue(
                "a batch receive policy needs at least one of max_num_message, max_num_bytes and timeout_ms above 0"
            )

    def policy(self) -> ConsumerBatchReceivePolicy:
        """Returns this object; exists because Pulsar's client has two such classes and converts between them."""
        return self

    def getMaxNumMessages(self) -> int:
        """Returns the limit of messages in a batch: `max_num_message` under its name in Pulsar's C++ client."""
        return self.max_num_message

    def getMaxNumBytes(self) -> int:
        """Returns the limit of bytes in a batch: `max_num_bytes` under its name in Pulsar's C++ client."""
        return self.max_num_bytes

    def getTimeoutMs(self) -> int:
        """Returns the time-out of a batch in ms: `timeout_ms` under its name in Pulsar's C++ client."""
        return self.timeout_ms

    @property
    def bytes_max(self) -> int:
        """Returns the limit of a batch in bytes that is in force; 0: there is no such limit."""
        if self.max_num_bytes > 0:
            return self.max_num_bytes
        return 0 if self.max_num_message > 0 else DEFAULT_BATCH_BYTES


class BatchReceivePolicy(ConsumerBatchReceivePolicy):
    """Another name of ConsumerBatchReceivePolicy, from Pulsar's C++ client."""

    __slots__ = ()


async def receive_batch(
    inbox: ReceiverQueue, policy: ConsumerBatchReceivePolicy, now: Callable[[], float]
) -> list[Message]:
    """Waits for messages and returns a batch within the limits of `policy`; the batch is empty if no message arrives in
    time. If the call is cancelled or a message is damaged, puts the messages back into `inbox` and raises the error; so
    it does with the error with which the queue ended. Must be called in the event loop. `now`: a monotonic clock, in
    seconds."""
    deadline = now() + policy.timeout_ms / 1000 if policy.timeout_ms > 0 else None
    most, bytes_max = policy.max_num_message, policy.bytes_max
    messages: list[Message] = []
    size = 0
    try:
        while not (0 < most <= len(messages)) and not (0 < bytes_max <= size):
            following = inbox.peek()
            if following is None:
                left = None if deadline is None else deadline - now()
                if left is not None and left <= 0:
                    break
                try:
                    await inbox.wait_message(left)
                except Timeout:
                    break
                continue
            if messages and 0 < bytes_max < size + len(following.payload):
                break
            message = inbox.take_nowait()
            if message is not None:  # a thread that receives beside us may have been faster
                messages.append(message)
                size += len(message.payload)
    except BaseException:
        inbox.put_back(messages)
        raise
    return messages


async def fetch_writer_schemas(inbox: ReceiverQueue, *messages: Message) -> None:
    """Fetches the schemas with which the messages were written, so that `Message.value` need not ask the broker. If
    this fails or is cancelled, puts the messages back into `inbox`, and raises the error, translated for the program.
    """
    try:
        for message in messages:
            await run_translating_errors(message.fetch_writer_schema())
    except BaseException:
        inbox.put_back(messages)
        raise


class BatchReceiver:
    """Receives one batch of messages for a caller in another thread. If that caller is interrupted, it calls
    `put_back`, which returns the batch to the queue."""

    def __init__(self, inbox: ReceiverQueue, now: Callable[[], float]) -> None:
        self._now = now
        self._inbox = inbox
        self._messages: list[Message] = []
        self._unwanted = False

    async def receive(self, policy: ConsumerBatchReceivePolicy) -> list[Message]:
        """Waits for a batch within the limits of `policy` and returns it, as `receive_batch` does. The batch is empty
        if `put_back` was called before. Raises the errors of `receive_batch`. Must be called in the event loop."""
        self._messages = await receive_batch(self._inbox, policy, self._now)
        if self._unwanted:
            self.put_back()
        return self._messages

    def put_back(self) -> None:
        """Puts the received batch back into the queue, now or as soon as it is received, so that other receivers get
        its messages. Must be called in the event loop."""
        self._unwanted = True
        messages, self._messages = self._messages, []
        if messages:
            self._inbox.put_back(messages)


# ------------------------------------------------------------------------------------------------------ requests
# The requests of a consumer that its broker answers: each has a number, and the answer names it.
#
# When the connection breaks before the answer comes, the request is sent again over the next one, until the deadline of
# the operation. Guards: tests/client/consume/test_partition_consumer.py.


class ConsumerRequests:
    """The requests of one consumer to its broker. Each method waits for the broker's answer. If the connection breaks
    before that, the request is sent again over the next connection, until the operation's deadline; the caller gets one
    answer. An error of the broker is raised untranslated, as its MagnetarError; so are TimedOut or the last error at
    the deadline. A method raises AlreadyClosed, or the error with which the consumer failed, if the consumer has
    ended."""

    def __init__(
        self, connections: Connections, core: ConsumerCore, acks: AckCollector, send: Callable[..., None],
        do: Callable[[list[ConsumerEffect]], None],
    ) -> None:  # fmt: skip
        """Makes the object. `send(kind=…)` sends a ClientFrame of that kind; `do` carries out effects of the core."""
        self.unsubscribed = False  # there is nothing left to leave
        self.level = 0  # what the broker takes beyond the first requests: `Subscribed.level`
        self.moves = 0  # how often another consumer or an operator moved the subscription
        self._connections = connections
        self._core = core
        self._acks = acks
        self._send = send
        self._do = do
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls: dict[int, Callable[[MagnetarError | None], None]] = {}
        self._changed: asyncio.Future[None] | None = None  # it is connected, or finished

    async def ask_for_message_now(self) -> wire.Probed:
        """Asks the broker whether this consumer gets a message now, and returns the answer. The messages that it gets
        arrive before the answer. Raises OperationNotSupported if the broker is too old, and the errors that the class
        names."""
        reply: wire.Probed = await self._ask(lambda id_: self._send(probe=id_), level=1)
        return reply

    async def progress(self) -> wire.Progress:
        """Asks the broker for the position of the subscription and the range of the partition, and returns the answer.
        Raises OperationNotSupported if the broker is too old, and the errors that the class names."""
        reply: wire.Progress = await self._ask(lambda id_: self._send(progress=id_), level=1)
        return reply

    async def commit(self, index: int, note: bytes) -> None:
        """Acknowledges every message with an index below `index`, and stores the note; returns when both are durable.
        Raises ConnectError if the subscription was moved in the meantime: to send the commit again would undo that
        move. Raises OperationNotSupported if the broker is too old, and the errors that the class names."""
        self._acks.flush()
        moves = self.moves

        def ask(id_: int) -> None:
            if self.moves != moves:
                raise ConnectError("the subscription was moved during the commit: ask for its position", definite=True)
            self._send(commit=wire.Commit(request_id=id_, index=index, note=note))

        await self._ask(ask, level=1)

    async def last_message_id(self) -> wire.LastMessageId:
        """Asks the broker for the last message of the partition, and returns the answer; its index is -1 if there is
        none. Raises the errors that the class names."""
        reply: wire.LastMessageId = await self._ask(lambda id_: self._send(last_message_id=id_))
        return reply

    async def seek(self, to: SeekTarget) -> None:
        """Moves the subscription to `to` and returns when the broker has done this. Messages that were delivered before
        are dropped; later messages come from the new position. Raises the errors that the class names."""
        self.discard_unsent_acks()
        await self._ask(lambda id_: self._do(self._core.seek(id_, to)))

    def discard_unsent_acks(self) -> None:
        """Drops the acknowledgements that are not sent yet, because the subscription is moved and their messages are
        delivered again."""
        self._acks.clear()
        self._core.discard_unsent_acks()

    async def unsubscribe(self) -> None:
        """Deletes the subscription, and returns when it is deleted. If a request that is sent again finds no
        subscription, the first request has deleted it, and no error is raised. Raises the errors that the class names,
        such as NotAllowed if the subscription has other consumers."""
        asked = False

        def ask(request_id: int) -> None:
            nonlocal asked
            asked = True
            self._send(unsubscribe=request_id)

        try:
            await self._ask(ask)
        except (SubscriptionNotFound, errors.SubscriptionNotFound):
            if not asked:
                raise
        self.unsubscribed = True

    async def acknowledge(self, which: Iterable[MessageOrId], *, cumulative: bool = False) -> None:
        """Acknowledges messages and returns when the acknowledgement survives a crash of all processes. Raises
        OperationNotSupported if a cumulative acknowledgement would cover a part of a chunked message, and the errors
        that the class names."""
        every = [each for one in which for each in self._acks.expand_to_all_chunks(one)]
        for each in every if cumulative else ():
            place = get_ack_coordinates(each)[0]
            if not self._core.cover_by_cumulative_ack(place):
                raise OperationNotSupported(
                    f"a message in chunks begins before {place} and is not acknowledged yet: acknowledge that first"
                )
        self._acks.notify_hooks(every, cumulative=cumulative)
        self._acks.flush()
        for ack in make_ack_requests(self._acks.make_ack_group(every, cumulative=cumulative)):

            def request(request_id: int, ack: wire.Ack = ack) -> None:
                ack.request_id = request_id
                self._send(ack=ack)

            await self._ask(request)

    async def send_last_acks(self) -> None:
        """Sends all acknowledgements that wait; returns when they are durable. Does nothing without a connection.
        Unlike the other requests, it is not sent again: raises the error with which the broker or the connection
        failed."""
        self._acks.flush()
        request_id, effects = self._core.take_last_acks()
        if request_id:
            answer = self._expect(request_id)
            self._do(effects)
            await answer

    async def _ask(self, send: Callable[[int], object], *, level: int = 0) -> Any:
        """Sends a request under a new number by `send(number)` and returns the answer. If the connection breaks, sends
        it again over the next one. Raises OperationNotSupported if the broker does not have the `level` at which it
        takes the request."""

        async def attempt() -> Any:
            while self._core.state is not PartitionClientState.CONNECTED:
                self.raise_if_closed()
                await self.wait_state_changed()
            if self.level < level:
                raise OperationNotSupported("the broker is older than this client, and does not know this request")
            request_id = self._core.register_request()
            answer = self._expect(request_id)
            try:
                send(request_id)
                return await answer
            finally:
                self._answers.pop(request_id, None)

        return await self._connections.retry(attempt)

    def _expect(self, request_id: int) -> asyncio.Future[Any]:
        answer = self._answers[request_id] = self._loop.create_future()
        return answer

    def register_request_callback(self, request_id: int, told: Callable[[MagnetarError | None], None]) -> None:
        """Registers the function `told`, which is called once with the outcome of the request `request_id`: None, or an
        error. The caller sends that request itself."""
        self._calls[request_id] = told

    def answer(self, request_id: int, error: MagnetarError | None, result: Any) -> None:
        """Gives the outcome of the request `request_id` to its waiting caller or its callback: `result`, or `error` if
        that is not None. Does nothing if no caller waits for it any more."""
        told = self._calls.pop(request_id, None)
        if told is not None:
            told(error)
            return
        answer = self._answers.pop(request_id, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    async def wait_state_changed(self) -> None:
        """Waits until the next call of `notify_state_changed`: the consumer is connected, closed or failed."""
        if self._changed is None:
            self._changed = self._loop.create_future()
        await asyncio.shield(self._changed)

    def notify_state_changed(self) -> None:
        """Ends all waits of `wait_state_changed`, because the consumer is connected, closed or failed."""
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def raise_if_closed(self) -> None:
        """Raises the error with which the consumer was finished, translated for the program; does nothing if it is not
        finished."""
        if self._core.error is not None:
            error = translate_error(self._core.error)
            raise type(error)(error.message) from error
