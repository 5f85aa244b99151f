"""Hooks: objects whose methods the client calls for each message that it sends or receives. A program derives its hooks
from `Hook`; the OpenTelemetry tracing of client/model/tracing.py is one, too.

| hook | is called | by |
|---|---|---|
| `before_send` | before a message is added to a producer; may change its content and properties | the sender |
| `sent` | once after `before_send`, when the outcome is known | the loop thread; the sender if it was refused at once |
| `before_deliver` | before the program gets a message | the receiver |
| `settled` | when received messages are acknowledged, given back, or can no longer be settled | any thread |

An exception of a hook does not stop a send or a delivery. It is logged (the 1st, 10th, 100th … time) and counted
(`hook_failures` of the statistics), and the client goes on as if the hook had returned. There is one exception to this:
SendVetoed, raised by `before_send`, refuses the message, and the sender gets it.

Hooks are also called for copies to a retry-letter or dead-letter topic, with `Sending.original`; SendVetoed does not
refuse these. Hooks are not called for half messages, for the rows of an outbox, nor for messages of a reader.
Guards: tests/client/model/test_hooks.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...proto.names import Position
from ..common.checks import ParameterCheck
from ..common.errors import NotAllowedError, Result
from ..common.loggers import log_foreign_error
from ..core.batcher import SendCallback
from ..core.redelivery import EntrySets
from .message import Message, ReceivingConsumer
from .message_id import MessageId

ACKNOWLEDGE, CUMULATIVE = "acknowledge", "cumulative_acknowledge"
NEGATIVE, TIMEOUT = "negative_acknowledge", "ack_timeout"
REDELIVERED, MOVED, CLOSED = "redelivered", "moved", "closed"


class SendVetoed(NotAllowedError):
    """Raised by `Hook.before_send` to refuse a message. The sender gets this exception; nothing is sent."""


class Sending:
    """A message that is being sent: the argument of `Hook.before_send` and `Hook.sent`.

    `topic`: full name, without the partition. `content`: the value as the program gave it, before the schema encodes
    it; None if a copy of a received message is sent. That message is then `original`, which is None otherwise.
    `before_send` may change `content` and `properties`. `callback`: the program's callback for the outcome, or None.
    `result`, `message_id` and `error` are set only in `sent`; `error` is set instead of `result` if the message was
    refused before it was sent. A hook may store values in `notes`, under itself as key."""

    __slots__ = (
        "_hooks", "callback", "content", "error", "message_id", "notes", "original", "properties", "result", "topic",
    )  # fmt: skip

    def __init__(
        self, topic: str, content: Any, properties: dict[str, str] | None, original: Message | None = None
    ) -> None:  # fmt: skip
        self.topic = topic  # full name, without the partition
        self.content = content  # as the program gave it, before the schema encodes it; of a copy None
        self.properties: dict[str, str] = dict(properties or {})  # a copy: hooks may change it
        self.original = original  # of a copy: the received message
        self.notes: dict[Any, Any] = {}  # for hooks, from `before_send` to `sent`
        self.callback: SendCallback = None
        self._hooks: list[Hook] = []  # whose `before_send` was called: they are told the outcome
        self.result: Result | None = None  # in `sent`: the outcome, Result.Ok if it is stored …
        self.message_id: MessageId | None = None  # … its id then …
        self.error: BaseException | None = None  # … and what refused it before it was sent


class Settlement(NamedTuple):
    """The event that received messages were settled, or can no longer be: the argument of `Hook.settled`.

    `how`: "acknowledge", "cumulative_acknowledge" (`which` and all messages before it), "negative_acknowledge" or
    "ack_timeout". With the other values the messages can no longer be settled: "redelivered" (the program asked for all
    messages again), "moved" (the subscription's cursor was moved) and "closed" (the consumer was closed). `which`: the
    message, or None if several entries are concerned; `covers` says for each message whether it is. `consumer`: the
    consumer of the partition. `entries`: the entries that are concerned if `which` is None; None: all that were
    delivered."""

    consumer: ReceivingConsumer  # of the partition
    how: str
    which: Message | MessageId | None = None
    entries: EntrySets | None = None  # None, without `which`: all that was delivered

    def covers(self, message: Message) -> bool:
        """Returns whether this event concerns `message`, if the message was not settled before."""
        if message.entry.consumer is not self.consumer:
            return False
        position: Position = message.entry.position
        if self.which is None:
            return self.entries is None or position[1] in self.entries.get(position[0], ())
        if isinstance(self.which, Message):
            place, index = self.which.entry.position, self.which.batch_index
        else:
            place, index = self.which.position(), self.which.batch_index()
        if self.how == CUMULATIVE and position != place:
            return position < place
        return position == place and (index < 0 or message.batch_index == index or (
            self.how == CUMULATIVE and message.batch_index < index
        ))  # fmt: skip


class Hook:
    """Base class of hooks, whose methods are called for each message of a client. A program derives a class and
    overrides the methods that it needs.

        class Sizes(magnetar.Hook):
            def before_send(self, sending):
                sending.properties["sent-by"] = "shop"

        client = magnetar.Client("magnetar://localhost:7650", hooks=[Sizes()])

    Hooks of a client are called for all its producers and consumers, and then those of the producer or consumer
    (`create_producer(…, hooks=[…])`, `subscribe(…, hooks=[…])`), in order. They must be short and must not wait:
    `sent` and often `settled` run in the client's loop thread. What they raise is logged and counted."""

    def is_interested(self) -> bool:
        """Returns whether `before_send` must be called for the message that is sent now. The sender calls this before
        each message."""
        return True

    def before_send(self, sending: Sending) -> None:
        """Called before a message is added to a producer. May change `content` and `properties`, and raise SendVetoed
        to refuse the message."""

    def sent(self, sending: Sending) -> None:
        """Called once when the message has an outcome: `result` and `message_id`, or `error`. Called only if this
        hook's `before_send` was called for the message."""

    def before_deliver(self, message: Message) -> None:
        """Called before the program gets a message from a consumer."""

    def settled(self, settlement: Settlement) -> None:
        """Called when received messages are settled, or can no longer be settled."""


HOOKS_CHECK = ParameterCheck(
    "a list of magnetar.Hook objects, or None", (list, tuple),
    lambda hooks: all(isinstance(each, Hook) for each in hooks), True,
)  # fmt: skip


def chain_hooks(*groups: Iterable[Hook]) -> HookChain | None:
    """Returns one chain of all hooks of `groups`, in this order; None if there are none."""
    hooks = [hook for group in groups for hook in group]
    return HookChain(hooks) if hooks else None


def _overriding(hooks: list[Hook], *names: str) -> tuple[Hook, ...]:
    """Returns the hooks whose class overrides one of the methods: nothing is called for the others."""
    return tuple(each for each in hooks if any(getattr(type(each), name) is not getattr(Hook, name) for name in names))


class HookChain:
    """The hooks of one producer or consumer. Each method calls the method of the same purpose of all hooks, in order,
    and logs and counts (`failures`) the exceptions. The methods may be called from any thread."""

    def __init__(self, hooks: list[Hook]) -> None:
        self.failures = 0
        self._senders = _overriding(hooks, "before_send", "sent")
        self._receivers = _overriding(hooks, "before_deliver")
        self._settlers = _overriding(hooks, "settled")
        self._consumers: set[ReceivingConsumer] = set()  # of partitions that are not closed

    def _fail(self, hook: Hook, name: str, error: BaseException) -> None:
        """Counts what a hook raised, and logs it the 1st, 10th, 100th … time."""
        self.failures += 1
        if str(self.failures).strip("0") == "1":
            log_foreign_error(error, f"{name} of the hook {type(hook).__qualname__} ({self.failures} failed)")

    # ------------------------------------------------------------------------------ sending
    def is_interested(self) -> bool:
        """Returns whether any hook is interested in the message that is sent now: the sender must then send it within
        `run_send_hooks`. An error of a hook is logged, and the hook counts as not interested."""
        for hook in self._senders:
            try:
                if hook.is_interested():
                    return True
            except Exception as error:
                self._fail(hook, "is_interested", error)
        return False

    @contextmanager
    def run_send_hooks(
        self, topic: str, content: Any, properties: dict[str, str] | None, callback: SendCallback
    ) -> Iterator[tuple[Any, dict[str, str] | None, SendCallback]]:
        """Calls `before_send` of the hooks, and `sent` when the message has an outcome. Yields the content, the
        properties and the callback with which the `with` block must add the message to a producer. If the block raises,
        the message was refused, and `sent` is called at once. Raises SendVetoed if a hook refuses the message."""
        if not isinstance(properties, dict | None):  # it is refused
            yield content, properties, callback
            return
        passed = Sending(topic, content, properties)
        passed.callback = callback
        try:
            self._before_send(passed)
            yield passed.content, passed.properties or None, _Sent(self, passed)
        except BaseException as error:
            passed.error = error
            self._tell_sent(passed)
            raise

    @contextmanager
    def run_copy_hooks(self, message: Message, topic: str, properties: dict[str, str]) -> Iterator[None]:
        """Calls `before_send` before the `with` block, and `sent` after it. The block sends a copy of the received
        message `message` to `topic` and waits for the outcome. Replaces the content of `properties` by that which the
        hooks leave in `Sending.properties`. Raises the error of the block; no hook can refuse the copy."""
        passed = Sending(topic, None, properties, message)
        self._before_send(passed, may_veto=False)
        properties.clear()
        properties.update(passed.properties)
        try:
            yield
        except BaseException as error:
            passed.error = error
            raise
        else:
            passed.result = Result.Ok
        finally:
            self._tell_sent(passed)

    def _before_send(self, passed: Sending, *, may_veto: bool = True) -> None:
        for hook in self._senders:
            try:
                if passed.original is not None or hook.is_interested():
                    passed._hooks.append(hook)
                    hook.before_send(passed)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if may_veto and isinstance(error, SendVetoed):
                    raise
                self._fail(hook, "before_send", error)

    def _tell_sent(self, passed: Sending) -> None:
        for hook in passed._hooks:
            try:
                hook.sent(passed)
            except BaseException as error:
                self._fail(hook, "sent", error)

    # ------------------------------------------------------------------------------ receiving
    def add_partition(self, consumer: ReceivingConsumer, *, times_out: bool) -> PartitionHooks | None:
        """Registers the consumer of a partition. Returns the object to which this consumer must report the messages
        that are settled; never None. `times_out`: whether the consumer redelivers messages that are not acknowledged in
        time."""
        self._consumers.add(consumer)
        return PartitionHooks(self, consumer, times_out)

    def before_deliver(self, message: Message) -> None:
        """Calls the hooks for a message that the program gets now. An error of a hook is logged. Does nothing if the
        consumer of the message is closed."""
        if message.entry.consumer not in self._consumers:
            return  # it is closed: nothing would settle the message
        for hook in self._receivers:
            try:
                hook.before_deliver(message)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(hook, "before_deliver", error)

    def report_settled(self, settlement: Settlement) -> None:
        """Calls `settled` of the hooks. After the event CLOSED, hooks are not called for the consumer's messages any
        more."""
        if settlement.how == CLOSED:
            self._consumers.discard(settlement.consumer)
        for hook in self._settlers:
            try:
                hook.settled(settlement)
            except BaseException as error:
                self._fail(hook, "settled", error)


class _Sent:
    """The callback of a message that passed the hooks: tells them its outcome, then calls the program's callback."""

    __slots__ = ("_chain", "_passed")

    def __init__(self, chain: HookChain, passed: Sending) -> None:
        self._chain = chain
        self._passed = passed

    def __call__(self, result: Result, message_id: MessageId) -> None:
        passed = self._passed
        passed.result = result
        if result is Result.Ok:
            passed.message_id = message_id
        try:
            self._chain._tell_sent(passed)
        finally:
            if passed.callback is not None:
                passed.callback(result, message_id)


class PartitionHooks:
    """The hooks of one partition's consumer. The consumer reports here the messages that are settled."""

    __slots__ = ("_chain", "_consumer", "_times_out")

    def __init__(self, chain: HookChain, consumer: ReceivingConsumer, times_out: bool) -> None:
        self._chain, self._consumer, self._times_out = chain, consumer, times_out

    def report_settled(self, which: Message | MessageId, how: str) -> None:
        """Reports that a message, or with `how` CUMULATIVE all messages up to it, are settled."""
        self._chain.report_settled(Settlement(self._consumer, how, which))

    def report_redelivered(self, entries: EntrySets | None) -> None:
        """Reports that the messages of `entries` are delivered again, because they were not acknowledged in time, or
        because another message of their entry was negatively acknowledged. `entries` None: all delivered messages,
        because the program asked for them."""
        how = REDELIVERED if entries is None else TIMEOUT if self._times_out else NEGATIVE
        self._chain.report_settled(Settlement(self._consumer, how, None, entries))

    def report_settling_ended(self, how: str) -> None:
        """Reports that no delivered message can be settled any more. `how`: MOVED or CLOSED."""
        self._chain.report_settled(Settlement(self._consumer, how))


