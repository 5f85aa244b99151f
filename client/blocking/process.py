"""`magnetar.process`: consume, transform, produce, exactly once, in the calling thread.

The loop of `process` runs in the client's loop thread (client/transactions/process.py); the function is called in the
thread that called `process`, for one batch at a time. Ctrl-C stops it in order: commits that have begun are finished,
and all other messages are delivered again; a second Ctrl-C does not wait for that. Guards:
tests/client/blocking/test_blocking_transactions.py.

Also in this file, below its heading: `Output`s of blocking programs, for the asyncio client below (outputs)."""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..common.checks import FUNCTION, check_parameter, make_instance_check
from ..common.errors import CtrlC, InvalidConfiguration
from ..common.loggers import ignore_error, run_logging_errors
from ..model.message import Message
from ..model.tracing import Tracing
from ..produce.producer import Producer as AsyncProducer
from ..transactions.process import (
    Apply,
    FunctionResult,
    Output,
    ProcessLoop,
    ProcessOptions,
    ProcessStatistics,
    convert_to_outputs,
)
from .consumer import Consumer
from .loop_thread import LOOK_S, shared_loop_thread, wait_result
from .producer import Producer

# ------------------------------------------------------------------------------------------------------- outputs
# `Output`s of blocking programs, for the asyncio client below.


def to_asyncio_output(output: Any) -> Any:
    """Returns a copy of the Output `output` with the asyncio producer in place of its blocking producer. Returns any
    other value unchanged."""
    if type(output) is not Output or not isinstance(output.producer, Producer):
        return output
    inner: AsyncProducer = output.producer.inner()
    return Output(
        output.value, output.partition_key, output.ordering_key, output.properties, output.event_timestamp,
        output.deliver_at, output.deliver_after, inner, output.priority,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- process


Work = tuple[list[Message], "asyncio.Future[list[FunctionResult]]"]


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
    """Calls `function(message)` for each message of the consumer, and sends what it returns, exactly once.

        magnetar.process(consumer, producer, lambda message: message.data().upper())

    The function returns a value for the producer's schema, an `Output` (with a key, properties, or another producer),
    a list, tuple or generator of either, or None. Up to `messages_max` messages, or those that arrive within
    `linger_ms`, are processed in one transaction of `timeout` seconds; `transactions_max` transactions are in flight
    at once. `process` returns when no message arrives for `idle_timeout_ms`; without it, it runs until Ctrl-C, and
    then ends the transactions that it has begun.

    `on_error`: "raise" raises what the function raises; "nack" negatively acknowledges the message, which is delivered
    again, and becomes a dead letter by the consumer's `dead_letter_policy`. Raises OutcomeUnknown, TransactionFenced,
    and the error that ends the consumer.
    """
    check_parameter("consumer", make_instance_check(Consumer, optional=False), consumer)
    check_parameter("producer", make_instance_check(Producer, optional=False), producer)
    check_parameter("function", FUNCTION, function)
    if inspect.iscoroutinefunction(function):
        raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.process")
    counted = statistics if statistics is not None else ProcessStatistics()
    options = ProcessOptions(messages_max, linger_ms, transactions_max, timeout, on_error, idle_timeout_ms, counted)
    work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
    loop = shared_loop_thread()
    inner_consumer, inner_producer = consumer.inner(), producer.inner()

    async def run_all() -> ProcessStatistics:
        try:
            return await ProcessLoop(inner_consumer, inner_producer, make_thread_processor(work), options).run()
        finally:
            work.put(None)

    future = asyncio.run_coroutine_threadsafe(run_all(), loop.loop)
    try:
        while not future.done():
            try:
                found = work.get(timeout=LOOK_S)
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


def make_thread_processor(work: queue.SimpleQueue[Work | None]) -> Apply:
    """Returns a coroutine function that passes a batch through the queue `work` to the thread that called `process`;
    that thread calls the program's function for each message."""

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


def _wait_for_end(work: queue.SimpleQueue[Work | None]) -> None:
    while True:
        try:
            if work.get(timeout=LOOK_S) is None:
                return
        except queue.Empty:
            continue
