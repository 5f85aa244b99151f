"""Consume, transform, produce, exactly once: `magnetar.process`.

    await process(consumer, producer, function)          function(message) -> value, values, Output or None

`process` receives messages in batches and calls the function for each message. It sends the values that the function
returns and acknowledges the messages of the batch in one transaction, which it then commits. So each message counts
once in the output, whatever crashes. `process` runs until it is cancelled, or until no message arrived for
`idle_timeout_ms`.

**Pipelining.** Up to `transactions_max` transactions are in flight at once: a batch is sent while earlier batches
commit. On an Exclusive, Failover or KeyShared subscription a transaction commits only after the one before it has
committed, and is aborted if that one was aborted: the output keeps the order of the input. On a Shared subscription
each transaction commits as soon as it can.
**An abort** makes the broker deliver the batch's messages again. If the order is kept, all later transactions in flight
are aborted, too; messages that wait in the client are dropped, and the broker delivers them again. A transaction whose
outcome is unknown ends `process` with OutcomeUnknown: no message was delivered twice and none is lost; start `process`
again.
**A message for which the function fails** (`on_error`). "raise": its batch is aborted, the batches before it commit,
and `process` raises the error. "nack": the message is delivered again after `negative_ack_redelivery_delay_ms`, and the
rest of its batch continues; with a `dead_letter_policy` the message becomes a dead letter when it has failed that
often. The message loses its place in the order.
Guards: tests/client/transactions/test_process.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import GeneratorType
from typing import Any, NamedTuple

from ...proto.names import Position
from ...runtime.tasks import Tasks
from ..common.checks import (
    FUNCTION_CHECK,
    MS_CHECK,
    TIMEOUT_MS,
    TRANSACTION_CHECKS,
    ParameterCheck,
    WrongValue,
    check_parameter,
    check_parameters,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
)
from ..common.errors import (
    AlreadyClosed,
    InvalidConfiguration,
    InvalidMessage,
    MemoryBufferIsFull,
    OutcomeUnknown,
    ProducerQueueIsFull,
    PulsarException,
    Timeout,
    TransactionFenced,
)
from ..common.loggers import is_cancelled
from ..consume.consumer import Consumer
from ..core.batcher import SendCallback
from ..model.message import Message
from ..model.settings import ConsumerType
from ..model.tracing import Tracing
from ..produce.entry_writer import Extras
from ..produce.producer import Producer
from .transaction import Transaction, Transactions

# -------------------------------------------------------------------------------------------------------- output
# A message with what `send` may say of it, as a value: of `process`, and of half messages.


@dataclass(frozen=True, slots=True)
class Output:
    """A message with more fields than its value: a result of the function of `process`, or a message of a half message
    (`Client.half`). `producer`: the producer that sends the message, which must be of the same client; None: the
    producer of `process`. The other fields are the parameters of `Producer.send` with the same names:
    `event_timestamp` and `deliver_at` are ms since the epoch, `deliver_after` a timedelta."""

    value: Any
    partition_key: str | None = None
    ordering_key: str | None = None
    properties: dict[str, str] | None = None
    event_timestamp: int | None = None
    deliver_at: int | None = None
    deliver_after: timedelta | None = None
    producer: Any = None
    priority: int | None = None


# ------------------------------------------------------------------------------------------------------- process


_LOG = logging.getLogger("magnetar.client")
ON_ERROR_CHECK = ParameterCheck("raise or nack", (str,), lambda text: text in ("raise", "nack"))
MESSAGES_PER_TURN = 64
"""Messages that are processed before other work of the event loop runs."""


@dataclass(slots=True)
class ProcessStatistics:
    """The counters of one call of `process`, which updates them while it runs. A message of an aborted transaction is
    counted as received again when it is redelivered. `sent` and `acknowledged` count only committed transactions."""

    received: int = 0
    sent: int = 0  # of committed transactions
    acknowledged: int = 0  # … and what they acknowledged
    committed: int = 0  # transactions
    aborted: int = 0
    failed: int = 0  # calls of the function that raised


class FunctionResult(NamedTuple):
    """The result of calling the program's function for one message: its outputs, or the error that it raised (`error`;
    None: it returned)."""

    message: Message
    outputs: Sequence[Any]  # values, and `Output`s
    error: Exception | None


class FunctionFailed(Exception):
    """Raised inside `process` when the program's function raised an error (`__cause__`), which `process` must then
    raise."""


ApplyFunction = Callable[[list[Message]], Awaitable[list[FunctionResult]]]


class ProcessOptions(NamedTuple):
    """The options of one call of `process`: its parameters of the same names, which it describes. `linger_ms` and
    `idle_timeout_ms` are in ms, `timeout` in seconds."""

    messages_max: int
    linger_ms: int
    transactions_max: int
    timeout: float
    on_error: str
    idle_timeout_ms: int | None
    statistics: ProcessStatistics

    def check(self) -> None:
        """Raises InvalidConfiguration if an option is wrong."""
        check_parameters(TRANSACTION_CHECKS, {"timeout": self.timeout})
        check_parameter("messages_max", make_whole_number_check(1, 1_000_000), self.messages_max)
        check_parameter("linger_ms", MS_CHECK, self.linger_ms)
        check_parameter("transactions_max", make_whole_number_check(1, 1000), self.transactions_max)
        check_parameter("on_error", ON_ERROR_CHECK, self.on_error)
        check_parameter("idle_timeout_ms", TIMEOUT_MS, self.idle_timeout_ms)
        check_parameter("statistics", make_instance_check(ProcessStatistics, optional=False), self.statistics)


async def process(
    consumer: Consumer,
    producer: Producer,
    function: Callable[[Message], Any],
    *,
    messages_max: int = 1000,
    linger_ms: int = 5,
    transactions_max: int = 4,
    timeout: float = 60,
    on_error: str = "raise",
    idle_timeout_ms: int | None = None,
    statistics: ProcessStatistics | None = None,
) -> ProcessStatistics:
    """Calls `function(message)` for each message of the consumer, and sends what it returns, exactly once.

        await process(consumer, producer, lambda message: message.data().upper())

    The function may be a coroutine function. It returns a value for the producer's schema, an `Output` (with a key,
    properties, or another producer), a list, tuple or generator of either, or None. Up to `messages_max` messages, or
    those that arrive within `linger_ms`, are processed in one transaction of `timeout` seconds; `transactions_max`
    transactions are in flight at once. `process` returns when no message arrives for `idle_timeout_ms`; without it, it
    runs until it is cancelled, and then ends the transactions that it has begun. Messages of a transaction whose abort
    no broker answered are delivered again when its `timeout` has passed: with a shorter `idle_timeout_ms`, `process`
    may return before that, and the next consumer gets them.

    `on_error`: "raise" raises what the function raises; "nack" negatively acknowledges the message, which is delivered
    again, and becomes a dead letter by the consumer's `dead_letter_policy`. `statistics`: the counters to update, which
    `process` returns; None: new ones. Raises OutcomeUnknown if a commit got no answer, and the error that ends the
    consumer or a producer; InvalidConfiguration for a wrong parameter, or if the consumer has a listener or is another
    client's than the producer.
    """
    check_parameter("consumer", make_instance_check(Consumer, optional=False), consumer)
    check_parameter("producer", make_instance_check(Producer, optional=False), producer)
    check_parameter("function", FUNCTION_CHECK, function)
    counted = statistics if statistics is not None else ProcessStatistics()
    options = ProcessOptions(messages_max, linger_ms, transactions_max, timeout, on_error, idle_timeout_ms, counted)
    return await ProcessLoop(consumer, producer, make_loop_processor(function, consumer.tracing), options).run()


NON_AWAITABLE_TYPES = frozenset((type(None), bytes, str, int, float, bool, dict, list, tuple))
"""Types of results that are never awaitable, so that `process` need not test each result of the function."""


def make_loop_processor(function: Callable[[Message], Any], tracing: Tracing | None = None) -> ApplyFunction:
    """Returns a coroutine function that calls the program's `function` in the event loop for each message of a batch,
    one after the other. That coroutine function returns one FunctionResult for each message, and raises nothing that
    `function` raises. `tracing`: makes the process span of a message the current span during its call."""
    plain = nullcontext()

    async def apply(messages: list[Message]) -> list[FunctionResult]:
        results = []
        for number, message in enumerate(messages):
            try:
                with plain if tracing is None else tracing.processing(message):
                    found = function(message)
                    if type(found) not in NON_AWAITABLE_TYPES and inspect.isawaitable(found):
                        found = await found
                    elif number % MESSAGES_PER_TURN == MESSAGES_PER_TURN - 1:
                        await asyncio.sleep(0)
                    results.append(FunctionResult(message, convert_to_outputs(found), None))
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled(error):
                    raise
                own = error if isinstance(error, Exception) else RuntimeError("the function raised CancelledError")
                results.append(FunctionResult(message, (), own))
        return results

    return apply


def convert_to_outputs(found: Any) -> Sequence[Any]:
    """Converts the return value of the program's function to a sequence of outputs: a list, tuple or generator gives
    its elements, None gives no output, any other value is one output."""
    if found is None:
        return ()
    if isinstance(found, list):
        return found
    if isinstance(found, (tuple, GeneratorType)):
        return list(found)
    return (found,)


class TransactionBatch:
    """A batch of received messages that are processed and acknowledged in one transaction. `sent`: the number of its
    outputs. `ending`: the task that ends the transaction; None until it begins."""

    __slots__ = ("ending", "messages", "sent", "txn")

    def __init__(self, txn: Transaction, messages: list[Message]) -> None:
        self.txn = txn
        self.messages = messages
        self.sent = 0
        self.ending: asyncio.Task[bool | PulsarException] | None = None

    async def wait_transaction_ended(self) -> bool | PulsarException:
        """Waits until the transaction has ended. Returns True if it was committed, False if it was aborted, or the
        error that `process` must raise."""
        assert self.ending is not None, "it is under way"
        return await asyncio.shield(self.ending)


class ProcessLoop:
    """The loop that one call of `process` runs: it receives messages, calls the function, and commits the transactions.
    Raises InvalidConfiguration if an option is wrong, the consumer has a listener, or the consumer and the producer are
    of different clients."""

    def __init__(self, consumer: Consumer, producer: Producer, apply: ApplyFunction, options: ProcessOptions) -> None:
        options.check()
        if consumer.connections is not producer.connections:
            raise WrongValue("the consumer and the producer are of one client")
        if consumer.has_listener:
            raise InvalidConfiguration("this consumer has a listener: it gets the messages")
        self._consumer = consumer
        self._producer = producer
        self._apply = apply
        self._options = options
        self._statistics = options.statistics
        self._in_order = consumer.settings.consumer_type != ConsumerType.Shared
        self._home = Transactions.for_client(consumer.connections)
        self._backoff = consumer.connections.backoff()
        self._under_way: deque[TransactionBatch] = deque()
        self._tasks = Tasks()

    async def run(self) -> ProcessStatistics:
        """Processes messages until none arrives for `idle_timeout_ms`, and returns the statistics. Raises the errors of
        `process`. If the call is cancelled or fails, waits for the commits that have begun, and has the other messages
        delivered again."""
        try:
            while True:
                messages = await self._next_batch()
                if messages:
                    await self._do(messages)
                elif messages is None and await self._end_all():
                    return self._statistics
        except BaseException:
            await self._stop()
            raise
        finally:
            await self._tasks.close()

    # ------------------------------------------------------------------------------ what comes
    async def _next_batch(self) -> list[Message] | None:
        """Returns the messages of the next batch; None if none arrived for `idle_timeout_ms`; an empty list after an
        abort, whose messages will be delivered again."""
        if len(self._consumer.inbox) >= self._options.messages_max:
            return self._take_batch() if await self._count_ended() else []
        filled = self._tasks.spawn(self._filled(), "wait for messages")
        try:
            while not filled.done():
                endings = [batch.ending for batch in self._under_way if batch.ending is not None]
                await asyncio.wait([filled, *endings[:1]], return_when=asyncio.FIRST_COMPLETED)
                if not await self._count_ended():
                    return []
            outcome = filled.result()
            if isinstance(outcome, PulsarException):
                raise outcome
            return self._take_batch() if outcome else None
        finally:
            filled.cancel()

    async def _filled(self) -> bool | PulsarException:
        """Waits for a message, then for more as long as the batch is not full."""
        inbox, idle_ms, linger_ms = self._consumer.inbox, self._options.idle_timeout_ms, self._options.linger_ms
        try:
            await inbox.wait_message(None if idle_ms is None else idle_ms / 1000)
        except Timeout as late:
            return late if inbox.is_closed else False
        except PulsarException as ended:
            return ended
        if linger_ms and len(inbox) < self._options.messages_max:
            await asyncio.sleep(linger_ms / 1000)
        return True

    def _take_batch(self) -> list[Message]:
        """Returns waiting messages, each once: a message that was delivered again while its former copy still waited
        would count twice in one transaction."""
        taken: list[Message] = []
        places: set[tuple[object, Position, int]] = set()
        take = self._consumer.inbox.take_nowait
        try:
            while len(taken) < self._options.messages_max and (message := take()) is not None:
                places.add((message.entry.consumer, message.entry.position, message.batch_index))
                if len(places) > len(taken):
                    taken.append(message)
        except BaseException:  # a damaged message
            self._consumer.inbox.put_back(taken)
            raise
        return taken

    # ------------------------------------------------------------------------------ one batch
    async def _do(self, messages: list[Message]) -> None:
        """Applies the function to the messages, sends its outputs, acknowledges the messages, and begins the commit."""
        self._statistics.received += len(messages)
        if self._consumer.hooks is not None:
            for message in messages:
                self._consumer.hooks.before_deliver(message)
        results = await self._apply(messages)
        batch = TransactionBatch(await Transaction(self._home, self._options.timeout, None), [])
        try:
            for message, outputs, error in results:
                if error is not None:
                    await self._on_failure(message, error)
                    continue
                for output in outputs:
                    await self._send(message, output, batch.txn)
                batch.sent += len(outputs)
                batch.messages.append(message)
            if batch.messages:
                self._consumer.acknowledge_in(batch.txn, batch.messages)
        except PulsarException as error:
            if self._is_hopeless(error):
                raise
            _LOG.info("a batch of %d messages is done again: %s", len(messages), error)
            await batch.txn.abort()
            self._under_way.append(batch)
            batch.ending = self._tasks.spawn(self._aborted(), "an aborted batch")
            return
        except BaseException as error:
            self._statistics.aborted += 1
            await batch.txn.abort()
            if isinstance(error, FunctionFailed) and error.__cause__ is not None:
                raise error.__cause__  # noqa: B904 - the application's own
            raise
        before = self._under_way[-1] if self._in_order and self._under_way else None
        self._under_way.append(batch)
        batch.ending = self._tasks.spawn(self._commit(batch, before), "commit of a batch")
        while len(self._under_way) >= self._options.transactions_max:
            await self._under_way[0].wait_transaction_ended()
            if not await self._count_ended():
                return

    async def _on_failure(self, message: Message, error: Exception) -> None:
        """Handles a failure of the function on a message."""
        self._statistics.failed += 1
        if self._options.on_error == "raise":
            raise FunctionFailed from error
        _LOG.warning("a message is given back: the function failed on %r", message, exc_info=error)
        await self._consumer.negative_acknowledge(message)

    async def _send(self, message: Message, output: Any, txn: Transaction) -> None:
        producer, value, extras = self._producer, output, Extras(txn=txn)
        if type(output) is Output:
            value = output.value
            extras = Extras(
                output.properties, output.partition_key, output.ordering_key, event_timestamp=output.event_timestamp,
                deliver_at=output.deliver_at, deliver_after=output.deliver_after, priority=output.priority, txn=txn,
            )  # fmt: skip
            if output.producer is not None:
                producer = output.producer
            if not isinstance(producer, Producer):
                raise InvalidMessage(f"the producer of an Output is one of the client's, not {shorten_value(producer)}")
        if (hooks := producer.hooks) is None:
            await self._add(producer, value, None, extras)
            return
        with nullcontext() if producer.tracing is None else producer.tracing.processing(message):
            if not hooks.is_interested():
                await self._add(producer, value, None, extras)
                return
            with hooks.run_send_hooks(producer.topic(), value, extras.properties, None) as (value, added, sent):
                await self._add(producer, value, sent, extras._replace(properties=added))

    async def _add(self, producer: Producer, value: Any, sent: SendCallback, extras: Extras) -> None:
        while True:
            try:
                producer.enqueue(value, sent, extras)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                await producer.wait_for_room()
            else:
                return

    async def _commit(self, batch: TransactionBatch, before: TransactionBatch | None) -> bool | PulsarException:
        """Commits a batch after the batch `before`. Returns whether it is committed; an error if it must end
        `process`."""
        try:
            if before is not None and await before.wait_transaction_ended() is not True:
                await batch.txn.abort()
                return False
            await batch.txn.commit()
        except PulsarException as error:
            if self._is_hopeless(error):
                return error
            _LOG.info("a batch of %d messages is done again: %s", len(batch.messages), error)
            return False
        return True

    async def _aborted(self) -> bool | PulsarException:
        return False

    def _is_hopeless(self, error: PulsarException) -> bool:
        """Whether doing the batch again is of no use after `error`."""
        if isinstance(error, OutcomeUnknown | TransactionFenced | AlreadyClosed | ValueError | TypeError):
            return True
        return isinstance(error.__cause__, AlreadyClosed)

    # ------------------------------------------------------------------------------ outcomes
    def _count(self, batch: TransactionBatch) -> None:
        self._statistics.committed += 1
        self._statistics.sent += batch.sent
        self._statistics.acknowledged += len(batch.messages)

    async def _count_ended(self) -> bool:
        """Counts the batches that have ended. Returns False if a transaction aborted, and delivered messages come
        again."""
        while self._under_way and (ending := self._under_way[0].ending) is not None and ending.done():
            outcome = ending.result()
            if isinstance(outcome, PulsarException):
                raise outcome
            if not outcome:
                await self._start_again()
                return False
            self._count(self._under_way.popleft())
            self._backoff.reset()
        return True

    async def _start_again(self) -> None:
        """Starts again after an abort: ends the transactions in flight, and has all messages without an outcome
        delivered again."""
        failed: PulsarException | None = None
        while self._under_way:
            batch = self._under_way[0]
            outcome = await batch.wait_transaction_ended()
            if outcome is True:
                self._count(batch)
            else:
                self._statistics.aborted += 1
                failed = outcome if isinstance(outcome, PulsarException) else failed
                await batch.txn.wait_redeliverable()
            self._under_way.popleft()
        if failed is not None:
            raise failed
        self._consumer.start_again()
        await asyncio.sleep(self._backoff.next_delay_s())

    async def _end_all(self) -> bool:
        while self._under_way:
            await self._under_way[0].wait_transaction_ended()
            if not await self._count_ended():
                return False
        return True

    async def _stop(self) -> None:
        """Stops a call that was cancelled or failed: transactions whose commit has begun are committed, the messages
        of the others are delivered again."""
        try:
            while self._under_way:
                if await self._under_way[0].wait_transaction_ended() is True:
                    self._count(self._under_way[0])
                self._under_way.popleft()
        except asyncio.CancelledError:
            _LOG.info("process was cancelled twice: its transactions go on with their client")
        self._consumer.redeliver_unacknowledged_messages()
