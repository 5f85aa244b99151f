"""The blocking client, with the names of `pulsar-client`. Its classes call the asyncio classes, which run in one event
loop thread per process.

This module contains the client; the objects that it opens are in client/blocking/producer.py,
client/blocking/consumer.py and client/blocking/table_view.py. After a fork, objects that can work in the child process
are opened again there (client/blocking/loop_thread.py).

Also in this file, each below its heading: the function `process` (process); the translation of a blocking program's
`Output` for the asyncio client (outputs)."""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from threading import Semaphore
from typing import Any, TypeVar
from weakref import finalize

from .. import client as aio
from ..common.checks import FUNCTION_CHECK, TRANSACTION_CHECKS, check_parameter, check_parameters, make_instance_check
from ..common.closing import FORK_COUNT
from ..common.errors import AlreadyClosed, CtrlC, InvalidConfiguration
from ..common.loggers import ignore_error, run_logging_errors
from ..common.rate_limits import CircuitBreaker, SharedRateLimiter
from ..consume.listening import is_coroutine_function
from ..consume.ranges import StoredEntry
from ..model.encryption import KeyReader
from ..model.message import Message
from ..model.message_id import MessageId
from ..model.options import CONSUMER_CHECKS, READER_CHECKS, copy_parameters
from ..model.tracing import Tracing
from ..produce.producer import Producer as AsyncProducer
from ..transactions.process import (
    ApplyFunction,
    FunctionResult,
    Output,
    ProcessLoop,
    ProcessOptions,
    ProcessStatistics,
    convert_to_outputs,
)
from . import faces
from .consumer import Consumer, ConsumerEventThread, Listening, PullConsumer, Reader
from .loop_thread import INTERRUPT_POLL_S, close_soon, shared_loop_thread, wait_result
from .producer import Half, Producer, ThreadLocalTransaction, Transaction
from .table_view import TableView

CheckFunction = TypeVar("CheckFunction", bound=Callable[..., Any])

__all__ = ["Client", "Consumer", "Half", "Producer", "PullConsumer", "Reader", "TableView", "Transaction"]

for _kind in (Consumer, Half, Producer, PullConsumer, Reader, TableView, Transaction):
    setattr(faces, _kind.__name__, _kind)  # its annotations name them; `typing.get_type_hints` looks there


class Client(faces.ClientFacade):
    """A connection to a Magnetar cluster; opens producers, consumers, readers and table views. Blocking.

        with magnetar.Client("magnetar://localhost:7650") as client:
            producer = client.create_producer("flights")
            consumer = client.subscribe("flights", "board")

    Parameters and defaults are those of `pulsar.Client`; the unit of a time is in its name (`_seconds`, `_ms`). The
    client connects when it is first used. `memory_limit_bytes` bounds two things together: the messages of all
    producers that have no outcome yet, and those in all receiver queues (0: no bound). Without this parameter receiver
    queues have 64 MiB, and each producer `max_pending_messages`. `tracing` records OpenTelemetry spans
    (docs/tracing.md). `hooks` are called for each message (docs/sdk.md).

    Threads: any thread may use a client and what it opens. The work is done in one event loop thread per process; a
    blocking call in a callback of that thread raises Interrupted. Errors are subclasses of `magnetar.PulsarException`:
    InvalidUrl, InvalidConfiguration and OperationNotSupported for a wrong parameter; AlreadyClosed after `close`;
    ConnectError and Timeout when no broker answers within `operation_timeout_seconds`; and that of a broker that
    refuses a request, such as TopicNotFound or AuthorizationError."""

    def _init(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._inner = aio.Client(**self._arguments)
        self._epoch = FORK_COUNT[0]
        self._closed = False
        self._turns = Semaphore(self._inner.settings.message_listener_threads)
        self._dropped: finalize[..., Any] | None = None
        self._bodies = ThreadLocalTransaction()

    def inner(self) -> aio.Client:
        """Returns the asyncio Client that does the work in this process. In a forked child process the first call makes
        a new one. Raises AlreadyClosed if the client is closed."""
        return self._current()

    def _current(self) -> aio.Client:
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._epoch != FORK_COUNT[0]:
            self._inner = aio.Client(**self._arguments)
            self._epoch = FORK_COUNT[0]
            self._keep()
        if self._dropped is None:
            thread = shared_loop_thread()
            thread.count_at_end(self._inner, aio.count_unsettled_messages)
            self._dropped = finalize(self, close_soon, thread, self._inner, self._epoch)
            self._dropped.atexit = False
        return self._inner

    def _keep(self) -> None:
        """Prevents the garbage collector from closing the asyncio client, because this client is closed in order or
        opened again."""
        if self._dropped is not None:
            self._dropped.detach()
            self._dropped = None

    def _create_producer(self, options: dict[str, Any]) -> Producer:
        epoch = FORK_COUNT[0]

        def open_(client: aio.Client) -> Any:
            if FORK_COUNT[0] != epoch:
                options["producer_name"] = None  # a forked child must not take its parent's
            return client.create_producer(**options)

        return Producer(self.inner, open_)

    def _subscribe(self, options: dict[str, Any]) -> Consumer:
        check_parameters(CONSUMER_CHECKS, copy_parameters(options, "topic"))
        message_listener, event_listener = options.pop("message_listener"), options.pop("consumer_event_listener")
        events = ConsumerEventThread(event_listener) if event_listener is not None else None
        return Consumer(
            self.inner, lambda client: client.subscribe(**options, consumer_event_listener=events), message_listener,
            self._turns, events,
        )  # fmt: skip

    def _create_reader(self, options: dict[str, Any]) -> Reader:
        check_parameters(READER_CHECKS, copy_parameters(options, "topic"))
        reader_listener, start = options.pop("reader_listener"), options.pop("start_message_id")
        inclusive = options.pop("start_message_id_inclusive")

        def open_(client: aio.Client, start: MessageId, inclusive: bool) -> Any:
            return client.create_reader(**options, start_message_id=start, start_message_id_inclusive=inclusive)

        return Reader(self.inner, open_, start, inclusive, reader_listener, self._turns)

    def _pull_consumer(self, options: dict[str, Any]) -> PullConsumer:
        return PullConsumer(self.inner, lambda client: client.pull_consumer(**options))

    def _create_table_view(self, options: dict[str, Any]) -> TableView:
        return TableView(self.inner, lambda client: client.create_table_view(**options))

    def transaction(self, timeout: float = 60, *, name: str | None = None, id: str | None = None) -> Transaction:
        """Begins a transaction: its messages and acknowledgements count all together, or not at all.

            with client.transaction() as txn:
                producer.send(b"…", txn=txn)
                consumer.acknowledge(message, txn=txn)

        docs/transactions.md has the rules. The transaction is aborted `timeout` seconds after its first operation.
        `name`: once a later client begins a transaction with the same name, commits of this transaction raise
        TransactionFenced. `id` is another word for `name`. Raises InvalidConfiguration for a wrong parameter;
        AlreadyClosed if the client is closed; Timeout or ConnectError if no coordinator answers; TransactionFenced if
        another program has taken the name over."""
        return Transaction(self.inner(), timeout, name, id, self._bodies)

    def half(
        self, outputs: Sequence[Output], *, group: str, check_key: str = "", check_after: float = 0
    ) -> Half:
        """Prepares a half message, as `Producer.prepare` does, of up to 100 messages to any topics. They are published
        all together or not at all. `outputs`: one `Output` for each message, with a producer of this client. The other
        parameters and the errors are those of `Producer.prepare`. Returns the half message when it is stored. Raises
        InvalidMessage if one of `outputs` is no Output with a producer, InvalidConfiguration if its producer is another
        client's."""
        inner = [to_asyncio_output(each) for each in outputs]
        work = self.inner().half(inner, group=group, check_key=check_key, check_after=check_after)
        return Half(self._run(work))

    def on_check(self, group: str) -> Callable[[CheckFunction], CheckFunction]:
        """Returns a decorator that registers a function for the half messages of a group. The function decides those
        that their own program left undecided. The cluster may call it while this client is open.

            @client.on_check(group="orders")
            def check(half: magnetar.HalfCheck) -> magnetar.Decision:
                return magnetar.Decision.COMMIT if order_exists(half.check_key) else magnetar.Decision.UNKNOWN

        The function runs in threads of its own, several calls at a time. It must decide by data that the program stored
        elsewhere, such as a row of its database, because any program of the group may be asked. The decorator raises
        InvalidConfiguration for a wrong `group`, for a coroutine function or no function, and if the client has a
        function of the group; AlreadyClosed if the client is closed. See docs/transactions.md."""

        def register(function: CheckFunction) -> CheckFunction:
            if inspect.iscoroutinefunction(function):
                raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.Client")

            async def work() -> None:
                self.inner().on_check(group)(function)

            shared_loop_thread().run(work())
            return function

        return register

    def serve(
        self, topic: str, handler: Callable[[Message], Any], *, subscription_name: str = "serve", concurrency: int = 32,
        order: str = "none", threads: int | None = None, rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None, stop_timeout: float = 30,
    ) -> Listening:  # fmt: skip
        """Answers the requests of a topic (`request`): calls `handler(message)` in threads. The handler returns the
        payload of the reply: bytes, or None for an empty one. Returns the running server; it runs until `stop`, or
        until the client is closed.

            with client.serve("prices", quote) as server:
                server.wait()

        The parameters and errors are those of asyncio's `Client.serve`. Raises InvalidConfiguration for a coroutine
        function."""
        if is_coroutine_function(handler):
            raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.Client")
        work = self.inner().serve(
            topic, handler, subscription_name=subscription_name, concurrency=concurrency, order=order, threads=threads,
            rate=rate, breaker=breaker, stop_timeout=stop_timeout,
        )  # fmt: skip
        return Listening(self._run(work))

    def read_range(
        self, topic: str, first_index: int, end_index: int, *, crypto_key_reader: KeyReader | None = None,
        incarnation: int = 0,
    ) -> Iterator[list[StoredEntry]]:
        """Yields lists of stored entries of one partition, in order, as they arrive: those that contain the messages
        with the indexes `first_index` … `end_index - 1`.

            for entries in client.read_range("flights-partition-0", 1000, 2000):
                for message in (each for entry in entries for each in entry.messages()):
                    ...

        The parameters and errors are those of asyncio's `Client.read_range`; each step waits, and raises Interrupted in
        the loop thread and CtrlC after Ctrl-C. Close the iterator to end the read early."""
        entries = self.inner().read_range(
            topic, first_index, end_index, crypto_key_reader=crypto_key_reader, incarnation=incarnation
        )

        async def following() -> list[StoredEntry] | None:
            return await anext(entries, None)

        try:
            while (found := shared_loop_thread().run(following())) is not None:
                yield found
        finally:
            shared_loop_thread().run(entries.aclose())

    def shutdown(self) -> None:
        """Ends the client and everything that it opened at once, without flushing. The outcome of messages that are not
        acknowledged is unknown. May be called again."""
        self._keep()
        if not self._closed and self._epoch == FORK_COUNT[0]:
            shared_loop_thread().run(self._shutdown())
        self._closed = True

    async def _shutdown(self) -> None:
        self._inner.shutdown()
        await self._inner.close()

    def close(self, timeout: float | None = None) -> None:
        """Flushes and closes all producers, sends the acknowledgements that wait, and closes consumers, readers and
        table views.

        Objects that are not closed after `timeout` seconds are ended at once. With `timeout` None that is
        5 seconds after the last answer of a broker, and at the latest after the operation time-out.
        Raises Timeout if messages have no outcome by then: they may be stored. Raises AlreadyClosed if the client is
        closed, InvalidConfiguration for a wrong `timeout`."""
        if timeout is not None:
            check_parameters(TRANSACTION_CHECKS, {"timeout": timeout})
        if self._closed:
            raise AlreadyClosed("the client is closed")
        self._closed = True
        self._keep()
        if self._epoch == FORK_COUNT[0]:
            shared_loop_thread().run(self._inner.close(timeout))


# -------------------------------------------------------------------------------------------------------------- process
# `magnetar.process`: consume, transform, produce, exactly once, in the calling thread.
#
# The loop of `process` runs in the client's loop thread (client/transactions/process.py); the function is called in the
# thread that called `process`, for one batch at a time. Ctrl-C stops it in order: commits that have begun are finished,
# and all other messages are delivered again; a second Ctrl-C does not wait for that. Guards:
# tests/client/blocking/test_blocking_transactions.py.

# ------------------------------------------------------------------------------------------------------- outputs
# `Output`s of blocking programs, for the asyncio client below.


def to_asyncio_output(output: Any) -> Any:
    """Returns a copy of the Output `output` with the asyncio producer in place of its blocking producer. Returns a
    value that is no such Output unchanged."""
    if type(output) is not Output or not isinstance(output.producer, Producer):
        return output
    inner: AsyncProducer = output.producer.inner()
    return Output(
        output.value, output.partition_key, output.ordering_key, output.properties, output.event_timestamp,
        output.deliver_at, output.deliver_after, inner, output.priority,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- process


ProcessWork = tuple[list[Message], "asyncio.Future[list[FunctionResult]]"]


def process(
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
    """Calls `function(message)` for each message of the consumer, and sends what it returns, exactly once. Returns the
    counters.

        magnetar.process(consumer, producer, lambda message: message.data().upper())

    The function returns a value for the producer's schema, an `Output` (with a key, properties, or another producer), a
    list, tuple or generator of either, or None. One transaction of `timeout` seconds processes up to `messages_max`
    messages, or those that arrive within `linger_ms`. Up to `transactions_max` transactions are open at once.

    `process` returns when no message arrives for `idle_timeout_ms`. Without that parameter it runs until Ctrl-C, and
    then ends the transactions that it has begun. `statistics`: an object that counts while `process` runs.

    `on_error`: "raise" raises what the function raises. "nack" negatively acknowledges the message: it is delivered
    again, and becomes a dead letter by the consumer's `dead_letter_policy`. Raises OutcomeUnknown if a commit got no
    answer, TransactionFenced, and the error that ends the consumer or a producer; InvalidConfiguration for a wrong
    parameter, or if the consumer has a listener; Interrupted in the loop thread; CtrlC after Ctrl-C."""
    check_parameter("consumer", make_instance_check(Consumer, optional=False), consumer)
    check_parameter("producer", make_instance_check(Producer, optional=False), producer)
    check_parameter("function", FUNCTION_CHECK, function)
    if inspect.iscoroutinefunction(function):
        raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.process")
    counted = statistics if statistics is not None else ProcessStatistics()
    options = ProcessOptions(messages_max, linger_ms, transactions_max, timeout, on_error, idle_timeout_ms, counted)
    work: queue.SimpleQueue[ProcessWork | None] = queue.SimpleQueue()
    loop = shared_loop_thread()
    inner_consumer, inner_producer = consumer.inner(), producer.inner()

    async def run_all() -> ProcessStatistics:
        try:
            return await ProcessLoop(inner_consumer, inner_producer, make_thread_processor(work), options).run()
        finally:
            work.put(None)

    future = loop.submit(run_all())
    try:
        while not future.done():
            try:
                found = work.get(timeout=INTERRUPT_POLL_S)
            except queue.Empty:
                continue
            if found is None:
                break
            _apply(function, inner_consumer.tracing, *found)
        return wait_result(future)
    except BaseException:
        if not future.done():
            future.cancel()
            _wait_for_end(work)
        raise


def make_thread_processor(work: queue.SimpleQueue[ProcessWork | None]) -> ApplyFunction:
    """Returns a coroutine function that passes a batch of messages through the queue `work` to the thread that called
    `process`. That thread calls the program's function for each message; the coroutine function waits for all results
    and returns them."""

    async def apply(messages: list[Message]) -> list[FunctionResult]:
        outcome: asyncio.Future[list[FunctionResult]] = asyncio.get_running_loop().create_future()
        work.put((messages, outcome))
        return await outcome

    return apply


def _apply(
    function: Callable[[Message], Any], tracing: Tracing | None, messages: list[Message],
    outcome: asyncio.Future[list[FunctionResult]],
) -> None:  # fmt: skip
    results, plain = [], nullcontext()
    for message in messages:
        try:
            with plain if tracing is None else tracing.processing(message):
                outputs = [to_asyncio_output(each) for each in convert_to_outputs(function(message))]
            results.append(FunctionResult(message, outputs, None))
        except CtrlC:  # a blocking call of the function's; it is no fault of the message
            raise
        except Exception as error:
            results.append(FunctionResult(message, (), error))

    def tell() -> None:
        if not outcome.done():
            outcome.set_result(results)

    outcome.get_loop().call_soon_threadsafe(run_logging_errors, tell, ignore_error)


def _wait_for_end(work: queue.SimpleQueue[ProcessWork | None]) -> None:
    while True:
        try:
            if work.get(timeout=INTERRUPT_POLL_S) is None:
                return
        except queue.Empty:
            continue
