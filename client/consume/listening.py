"""Calls a program's function for each message of a consumer, several at a time: `Consumer.listen`, and for batches
`Consumer.listen_batch`. The driver of client/core/listening.py, for asyncio and for blocking programs.

    receiver queue → sorted by key → handler (a task, or a thread) → acknowledged, or negatively acknowledged

**Flow.** A message stays part of the receiver queue until its handler begins: only then is its permit freed, and its
ack time-out begins. So a listener whose handlers are slow, whose rate is used up, or whose breaker is open requests no
more messages from the broker. The waiting messages are at most those of the receiver queue, and are dropped with it
when the connection is lost. **Outcome.** When a handler returns, its message is acknowledged, alone. When it raises
anything, the error is logged and counted, and its message is negatively acknowledged, so that the consumer's delays and
dead-letter policy apply. A handler never ends the listener; the end of the consumer does. **End.** `stop` begins no
more handlers, puts the waiting messages back into the receiver queue, and gives running handlers some time. Then it
cancels tasks, whose messages are negatively acknowledged. A thread cannot be cancelled: it goes on, and its outcome
still counts while the consumer is open. `Consumer.close` stops its listener first. **A handler that runs for
SLOW_HANDLER_S** is reported once by a warning in the log, with the number of messages that wait for its key. Guards:
tests/client/consume/test_listening.py, tests/client/blocking/test_blocking_listening.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from ...proto.entry import get_routing_key
from ...runtime.tasks import Tasks, Worker
from ..common.checks import (
    BOOLEAN_CHECK,
    FUNCTION_CHECK,
    ParameterCheck,
    WrongType,
    WrongValue,
    check_parameter,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
)
from ..common.errors import AlreadyClosed, InvalidConfiguration, PulsarException
from ..common.loggers import ignore_error, is_cancelled, log_foreign_error, run_logging_errors
from ..common.rate_limits import (
    RATE_CHECK,
    RATE_POLL_S,
    SECONDS_CHECK,
    AsyncRateLimiter,
    CircuitBreaker,
    SharedRateLimiter,
)
from ..core.levels import LevelQueues
from ..core.listening import KeyQueues
from ..model.message import DamagedMessage, Message

if TYPE_CHECKING:
    from .consumer import Consumer

_LOG = logging.getLogger("magnetar.client")

SLOW_HANDLER_S = 60.0
"""Seconds after which a running handler is a warning of the log: KEY_STUCK_AFTER_S of broker/session/summaries.py."""
LISTENER_STOP_S = 30.0
"""Seconds that handlers have to end when their listener is stopped, by default."""
UNBOUNDED_BATCH = 1 << 30
LISTENER_ORDERS = ("key", "partition", "none")
ORDER_CHECK = ParameterCheck("key, partition or none", (str,), lambda text: text in LISTENER_ORDERS)

Handler = Callable[[Message], Any]


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """The options of one call of `Consumer.listen` or `Consumer.listen_batch`; those methods describe them. `batch`:
    the most messages of a batch; 0: the handler gets single messages. `wait_s`: the seconds for which a batch waits for
    more messages after its first."""

    concurrency: int = 32
    order: str = "key"
    threads: int | None = None
    rate: float | SharedRateLimiter | None = None
    breaker: CircuitBreaker | None = None
    acknowledge: bool = True
    stop_timeout: float = LISTENER_STOP_S
    batch: int = 0  # messages of a batch; 0: one message each
    wait_s: float = 0.0  # for more messages of a batch, after its first

    def check(self, function: object) -> None:
        """Raises InvalidConfiguration if an option is wrong, or does not fit `function`, the handler."""
        check_parameter("function", FUNCTION_CHECK, function)
        check_parameter("concurrency", make_whole_number_check(1, 10_000), self.concurrency)
        check_parameter("order", ORDER_CHECK, self.order)
        check_parameter("threads", make_whole_number_check(1, 1000, optional=True), self.threads)
        if not isinstance(self.rate, SharedRateLimiter):
            check_parameter("rate", RATE_CHECK._replace(optional=True), self.rate)
        check_parameter("breaker", make_instance_check(CircuitBreaker), self.breaker)
        check_parameter("acknowledge", BOOLEAN_CHECK, self.acknowledge)
        check_parameter("stop_timeout", SECONDS_CHECK._replace(optional=False), self.stop_timeout)
        if is_coroutine_function(function) and self.threads is not None:
            raise WrongValue("a coroutine function runs in the event loop: threads are for plain functions")


def is_coroutine_function(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@dataclass(slots=True)
class ListenerStatistics:
    """The counters of a listener since it began; `running` and `waiting` are those of now."""

    handled: int = 0  # messages whose handler returned
    failed: int = 0  # … or raised, or was cancelled
    slow: int = 0  # handlers that ran for a minute
    repeated: int = 0  # copies of messages that were here already
    running: int = 0  # handlers, now
    waiting: int = 0  # messages that wait for theirs, now


class _Call:
    """A handler that runs: its messages, and since when."""

    __slots__ = ("began", "is_slow", "key", "messages", "task", "ticket")

    def __init__(self, messages: list[Message], key: Hashable | None, began: float, ticket: int) -> None:
        self.messages, self.key, self.began, self.ticket = messages, key, began, ticket
        self.task: asyncio.Task[None] | None = None
        self.is_slow = False


class Listening:
    """A running listener, which `Consumer.listen` returns. `stop`, or the end of an `async with` block, ends it; so
    does the end of its consumer.

        async with consumer.listen(handle, concurrency=8) as listening:
            await listening.wait()"""

    def __init__(self, consumer: Consumer, function: Callable[[Any], Any], options: ListenOptions) -> None:
        options.check(function)
        self._consumer, self._function, self._options = consumer, function, options
        self._world = consumer.connections.world
        self._now = self._world.clock.monotonic
        self._inbox = consumer.inbox
        self._in_loop = is_coroutine_function(function)
        self._concurrency = options.concurrency
        if not self._in_loop and options.threads is not None:
            self._concurrency = min(options.threads, options.concurrency)
        self._queues = self._make_queues(UNBOUNDED_BATCH if options.batch else self._concurrency)
        rate = options.rate
        self._limiter = AsyncRateLimiter(rate, clock=self._now) if isinstance(rate, int | float) else rate
        self._counted = ListenerStatistics()
        self._calls: dict[_Call, None] = {}  # in the order of their beginning
        self._batch_due = 0.0  # what waits then is a batch, though it is not full
        self._idle: list[Worker] = []  # threads
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._gate: asyncio.TimerHandle | None = None  # begins the next message when the rate or the breaker allows
        self._gate_due = 0.0
        self._look: asyncio.TimerHandle | None = None  # for slow handlers
        self._is_stopping = False
        self.owner: object = None  # is kept while the listener runs
        self._error: PulsarException | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._inbox.sorted = self._queues
        self._feeding = self._tasks.spawn(self._feed(), f"listener of {consumer.topic()}")
        self._feeding.add_done_callback(self._on_fed)

    def _make_queues(self, concurrency: int) -> KeyQueues[Message]:
        waiting = self._inbox.messages
        if isinstance(waiting, LevelQueues):  # what is sorted by key is drawn by level: the inbox is drained at once
            return KeyQueues(concurrency, waiting.make_queues_for(lambda item: item.value))
        return KeyQueues(concurrency)

    # ------------------------------------------------------------------------------ from the receiver queue
    async def _feed(self) -> None:
        """Takes messages from the receiver queue until that ends."""
        while True:
            try:
                await self._inbox.wait_message(None)
                self._sort_all()
                self._begin_ready()
            except PulsarException as error:
                if self._inbox.is_closed:
                    self._error = error
                    return
                _LOG.exception("%s: a message was not given to its listener", self._consumer.title())
                self._begin_ready()  # what was sorted before it

    def _on_fed(self, feeding: asyncio.Task[None]) -> None:
        """The consumer has ended, or `stop` ended the task. What runs ends by itself."""
        self._is_stopping = True
        if not feeding.cancelled() and (error := feeding.exception()) is not None:
            self._error = PulsarException(f"the listener of {self._consumer.topic()} failed: {error!r}")
        self._end_if_idle()

    def _sort_all(self) -> None:
        queues, batch = self._queues, self._options.batch
        if not queues:
            self._batch_due = self._now() + self._options.wait_s
        while (message := self._inbox.pop_nowait()) is not None:
            if isinstance(message, DamagedMessage):
                self._inbox.free_popped_permits(message)  # raises its error
            elif message.entry.broker_clock_ms is not None and message.entry.consumer.acknowledge_if_expired(message):
                self._inbox.free_popped_permits(message)  # what expires later is with the listener
            elif not queues.add(identify_message(message), self._key_of(message), message):
                self._counted.repeated += 1  # its permits are free; the one that it repeats settles both
                self._inbox.free_popped_permits(message)
            elif len(queues) <= batch:  # a batch may be larger than the receiver queue
                self._inbox.free_popped_permits(message)

    def _key_of(self, message: Message) -> Hashable | None:
        order, consumer = self._options.order, message.entry.consumer
        if order == "none":
            return None
        if order == "partition":
            return (consumer,)
        key = get_routing_key(message.fields)
        return None if key is None else (consumer, key)

    # ------------------------------------------------------------------------------ what may begin
    def _begin_ready(self) -> None:
        """Begins all messages, or batches, that may begin now."""
        if self._options.batch:
            self._begin_batches()
            return
        while self._queues.may_begin and not self._is_stopping:
            ticket = self._pass_gate(1)
            if ticket is None:
                return
            item = self._queues.begin_next()
            assert item is not None, "one may begin"
            self._begin([item.value], item.key, ticket)

    def _pass_gate(self, count: int) -> int | None:
        """Returns the breaker's ticket for a call with `count` messages that may begin now; 0 without a breaker. If
        none may begin, returns None, and begins what is ready when one may."""
        breaker, limiter = self._options.breaker, self._limiter
        ticket = 0
        if breaker is not None and not (ticket := breaker.begin_call()):
            self._begin_later(breaker.delay_s())
            return None
        if limiter is not None and not limiter.allow(count):
            if breaker is not None:
                breaker.abandon_call(ticket)
            self._begin_later(limiter.delay_s(count))
            return None
        return ticket

    def _begin_later(self, delay_s: float) -> None:
        delay_s = min(delay_s, RATE_POLL_S)
        due = self._now() + delay_s
        if self._gate is not None:
            if self._gate_due <= due:
                return
            self._gate.cancel()
        self._gate_due = due
        self._gate = self._loop.call_later(delay_s, run_logging_errors, self._on_gate_due, ignore_error)

    def _on_gate_due(self) -> None:
        self._gate = None
        self._begin_ready()

    def _begin(self, messages: list[Message], key: Hashable | None, ticket: int) -> None:
        call = _Call(messages, key, self._now(), ticket)
        self._calls[call] = None
        call.task = self._tasks.spawn(self._handle(call), "handler of a message")
        if self._look is None:
            self._look_later(SLOW_HANDLER_S)

    def _begin_batches(self) -> None:
        """Begins all batches that are full, or whose time has come."""
        options, queues = self._options, self._queues
        while queues and len(self._calls) < self._concurrency and not self._is_stopping:
            count = min(len(queues), options.batch)
            if count < options.batch and self._now() < self._batch_due:
                self._begin_later(self._batch_due - self._now())
                return
            ticket = self._pass_gate(count)
            if ticket is None:
                return
            items = [queues.begin_next() for _ in range(count)]
            self._batch_due = self._now() + options.wait_s
            self._begin([item.value for item in items if item is not None], None, ticket)

    # ------------------------------------------------------------------------------ a handler
    async def _handle(self, call: _Call) -> None:
        error: BaseException | None = None
        cancelled = False
        try:
            results = await self._run(call.messages)
            error = find_failure(results)
            await self._settle(call.messages, results)
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as raised:
            error, cancelled = raised, is_cancelled(raised)
            self._fail(call.messages, error, is_cancelled=cancelled)
            if cancelled:
                raise
        finally:
            self._finish(call, error, is_cancelled=cancelled)

    async def _run(self, messages: list[Message]) -> Sequence[object]:
        """Calls the program's function. Returns an outcome for each message: an exception or False if it failed. Raises
        what the function raises."""
        tracing = self._consumer.tracing
        for message in messages:
            self._inbox.free_popped_permits(message)
        if self._consumer.settings.schema.by_writer:
            for message in messages:
                await message.fetch_writer_schema()
        if (hooks := self._consumer.hooks) is not None:
            for message in messages:
                hooks.before_deliver(message)
        argument: Any = messages if self._options.batch else messages[0]
        span = nullcontext() if tracing is None or self._options.batch else tracing.processing(messages[0])
        found = await self._call(argument, span)
        return check_batch_results(found, messages) if self._options.batch else (None,)

    async def _call(self, argument: Any, span: Any) -> Any:
        if self._in_loop:
            with span:
                return await self._function(argument)
        return await self._run_in_thread(argument, span)

    async def _run_in_thread(self, argument: Any, span: Any) -> Any:
        function, failed = self._function, list[BaseException]()

        def work() -> Any:
            try:
                with span:
                    return function(argument)
            except BaseException as error:  # a future passes some on to the event loop, which they would end
                failed.append(error)

        worker = self._idle.pop() if self._idle else self._world.workers.start("magnetar-listener")
        running = worker.run(work)
        try:
            found = await asyncio.shield(running)
        except BaseException:  # cancelled: the thread goes on alone, and ends after it
            running.add_done_callback(lambda _: self._close_worker(worker))
            raise
        self._idle.append(worker)
        if failed:
            raise failed[0]
        return found

    def _close_worker(self, worker: Worker) -> None:
        _CLOSING.spawn(worker.close(), "end of a listener's thread")

    async def _settle(self, messages: list[Message], results: Sequence[object]) -> None:
        good = messages
        if results and any(map(is_failure, results)):
            good = [each for each, result in zip(messages, results, strict=True) if not is_failure(result)]
            for each, result in zip(messages, results, strict=True):
                if is_failure(result):
                    error = result if isinstance(result, BaseException) else None
                    _LOG.warning("%s: the handler failed on %r", self._consumer.title(), each, exc_info=error)
                    self._give_back(each, error)
        self._counted.handled += len(good)
        if self._options.acknowledge and good:
            try:
                await self._consumer.acknowledge(good if self._options.batch else good[0])
            except PulsarException as error:
                text = "%s: %d messages were handled and may come again: %s"
                _LOG.warning(text, self._consumer.title(), len(good), error)

    def _fail(self, messages: list[Message], error: BaseException, *, is_cancelled: bool) -> None:
        if not is_cancelled:
            log_foreign_error(error, f"{self._consumer.title()}: the handler of {messages[0]!r}")
        for each in messages:
            self._give_back(each, None if is_cancelled else error)

    def _give_back(self, message: Message, error: BaseException | None) -> None:
        self._counted.failed += 1
        try:
            self._consumer.negative_acknowledge_now(message, error)
        except PulsarException as refused:
            _LOG.info("%s: a message comes again by itself: %s", self._consumer.title(), refused)

    def _finish(self, call: _Call, error: BaseException | None, *, is_cancelled: bool) -> None:
        del self._calls[call]
        if (breaker := self._options.breaker) is not None:
            if is_cancelled:
                breaker.abandon_call(call.ticket)
            else:
                breaker.end_call(call.ticket, error)
        for message in call.messages:
            self._queues.finish(identify_message(message))
        self._begin_ready()
        self._end_if_idle()

    # ------------------------------------------------------------------------------ slow handlers
    def _look_later(self, delay_s: float) -> None:
        self._look = self._loop.call_later(delay_s, run_logging_errors, self._look_for_slow, ignore_error)

    def _look_for_slow(self) -> None:
        """Warns of each handler that has run for SLOW_HANDLER_S, and looks again when the next one has."""
        self._look, now, following = None, self._now(), inf
        for call in self._calls:
            left_s = call.began + SLOW_HANDLER_S - now
            if left_s > 0:
                following = min(following, left_s)
            elif not call.is_slow:
                call.is_slow = True
                self._counted.slow += 1
                _LOG.warning(
                    "%s: the handler of %r has run for %d s; %d messages wait for it, those of its key",
                    self._consumer.title(), call.messages[0], now - call.began, self._queues.count_following(call.key),
                )  # fmt: skip
        if following < inf:
            self._look_later(following)

    # ------------------------------------------------------------------------------ facts, and the end
    def statistics(self) -> ListenerStatistics:
        """Returns the counters since the listener began, with the numbers of running handlers and waiting messages now.
        Each call returns the same object."""
        self._counted.running, self._counted.waiting = len(self._calls), len(self._queues)
        return self._counted

    @property
    def is_over(self) -> bool:
        """Returns whether the listener has ended, with all its handlers."""
        return self._ended.done()

    async def wait(self) -> None:
        """Waits until the listener has ended: by `stop`, or with its consumer. Raises the error that ended the
        consumer, unless the program closed it; PulsarException if the listener itself failed. To cancel the call does
        not end the listener."""
        await asyncio.shield(self._ended)
        if self._error is not None and not isinstance(self._error, AlreadyClosed):
            raise type(self._error)(self._error.message) from self._error

    async def stop(self, timeout: float | None = None) -> None:
        """Stops the listener: no further handler is called, and messages that wait for a handler go back to the
        receiver queue. Running handlers have `timeout` seconds (None: `stop_timeout`) to end. Then coroutines are
        cancelled, and their messages are delivered again; handlers in threads go on. May be called again. If the call
        is cancelled, ends the listener at once. Raises InvalidConfiguration for a wrong `timeout`."""
        check_parameter("timeout", SECONDS_CHECK, timeout)
        self._stop_feeding()
        try:
            limit_s = self._options.stop_timeout if timeout is None else timeout
            await asyncio.wait([self._ended], timeout=limit_s)
            if not self._ended.done():
                await self._cancel_all()
        except BaseException:
            self.abort()
            raise
        workers, self._idle = self._idle, []
        for worker in workers:
            await worker.close()

    def _stop_feeding(self) -> None:
        self._is_stopping = True
        for timer in (self._gate, self._look if not self._calls else None):
            if timer is not None:
                timer.cancel()
        self._gate = None
        self._feeding.cancel()
        if self._inbox.sorted is self._queues:
            self._inbox.sorted = None
            self._inbox.restore_popped(self._queues.discard(lambda _: True))

    async def _cancel_all(self) -> None:
        running = [call.task for call in self._calls if call.task is not None]
        _LOG.warning("%s: %d handlers did not end in time", self._consumer.title(), len(running))
        if self._in_loop:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def abort(self) -> None:
        """Ends the listener at once: its coroutines are cancelled, and messages whose handlers have not returned are
        not acknowledged."""
        self._stop_feeding()
        self._tasks.cancel()
        self._end()

    def _end_if_idle(self) -> None:
        if self._is_stopping and not self._calls:
            self._end()

    def _end(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._inbox.sorted is self._queues:
            self._inbox.sorted = None
        if not self._ended.done():
            self._ended.set_result(None)
        self.owner = None
        workers, self._idle = self._idle, []
        for worker in workers:
            self._close_worker(worker)

    async def __aenter__(self) -> Listening:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


_CLOSING = Tasks()
"""Ends of threads, which may come after that of their listener."""


def identify_message(message: Message) -> Hashable:
    """Returns what identifies a message among all that a consumer receives: all deliveries of one message have the
    same."""
    return message.entry.consumer, message.entry.position, message.batch_index


def is_failure(result: object) -> bool:
    """Returns whether a result that the handler of a batch returned for a message means failure: an exception, or
    False."""
    return result is False or isinstance(result, BaseException)


def find_failure(results: Sequence[object]) -> BaseException | None:
    """Returns the first exception among the results of a batch; None if there is none, also if a result is False."""
    return next((each for each in results if isinstance(each, BaseException)), None)


def check_batch_results(found: object, messages: list[Message]) -> Sequence[object]:
    """Returns what the handler of a batch returned as a list with an outcome for each message; empty if it returned
    None: all succeeded. Raises WrongType if `found` is something else, WrongValue if it has another number of outcomes.
    """
    if found is None:
        return ()
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise WrongType(f"the handler of a batch returns None or a result for each message, not {shorten_value(found)}")
    results = list(found)
    if len(results) != len(messages):
        raise WrongValue(f"the handler of a batch returned {len(results)} results for {len(messages)} messages")
    return results


def check_batch_parameters(max: int, wait: float) -> None:
    check_parameter("max", make_whole_number_check(1, 1_000_000), max)
    check_parameter("wait", SECONDS_CHECK._replace(optional=False), wait)


def begin_listening(consumer: Consumer, function: Callable[[Any], Any], options: ListenOptions) -> Listening:
    """Begins a listener of the consumer and returns it; it is `consumer.listening` from then on. Raises
    InvalidConfiguration if the consumer has a listener that has not ended, or an option is wrong. Must be called in the
    event loop."""
    if consumer.listening is not None and not consumer.listening.is_over:
        raise InvalidConfiguration("this consumer has a listener: it gets the messages")
    consumer.listening = Listening(consumer, function, options)
    return consumer.listening
