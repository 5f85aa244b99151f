"""Stream processing with keyed state, exactly once: `magnetar.streams`. It adds state to `process`.

    app = streams.App("billing")

    @app.step("orders", "bills", state="customer-totals")
    def bill(message, context):
        total = context.state[message.partition_key()] = context.state.get(message.partition_key(), 0) + 1
        return b"order %d" % total

    app.start("magnetar://localhost:7650")          or: await app.run(client, admin)

A step receives the messages of its source, partition by partition, on the Failover subscription with the app's name.
The outputs of the function, its changes of `context.state` and the acknowledgement of the messages are one transaction:
each message counts once, whatever crashes. The state is stored only in the log, so it cannot differ from the log.

**State.** The changes are messages of the topic `state`, which has as many partitions as the source and is compacted.
Partition n of it has the state that messages of partition n of the source made; so a program should use the key of the
message as the key of the state. The state of a partition is a dictionary in memory, which is rebuilt from the topic.
Its values must be representable in JSON; deleting a key writes a tombstone. A function never sees a change by a message
whose transaction was aborted. **Take-over.** A worker takes a partition over before it processes the first message of
the partition, and again after each abort:
    TAKEOVER_STEPS   fence    its producer of the state is ExclusiveWithFencing: the former worker writes nothing any
    more
            mark     it writes a message of its own, under OWNER_KEY
            restore  it reads the compacted state up to that message; the log gives it out only when every transaction
                     that began before it has ended
A batch that has read or changed state writes at least one message of state. So a worker that was replaced, and has not
noticed it, cannot commit results that it computed from an old state. After a kill -9 the take-over waits until the dead
worker's transaction has ended, for `timeout` seconds at most.
There are no windows, joins or watermarks: use Spark or Flink for these. The number of partitions of source and state
must not change while the state exists. A worker has the state of all its partitions in memory.
Guarding tests: tests/client/test_streams.py, tests/client/test_streams_kills.py."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..proto.errors import AlreadyExists, TopicNotFound, Unauthorized
from ..proto.names import Position
from ..proto.policies import Policies
from ..runtime.tasks import Tasks
from .admin.client import AdminClient
from .client import Client, parse_topic
from .common.checks import (
    FUNCTION_CHECK,
    NAME_CHECK,
    ParameterCheck,
    WrongValue,
    check_parameter,
    check_parameters,
    make_instance_check,
    shorten_value,
)
from .common.errors import (
    AlreadyClosed,
    AuthenticationError,
    AuthorizationError,
    InvalidConfiguration,
    InvalidMessage,
    PulsarException,
)
from .common.loggers import is_cancelled
from .consume.consumer import Consumer
from .model.message import Message
from .model.message_id import MessageId
from .model.settings import ConsumerType, InitialPosition, ProducerAccessMode
from .produce.producer import Producer
from .transactions.process import (
    FunctionResult,
    Output,
    ProcessLoop,
    ProcessOptions,
    ProcessStatistics,
    convert_to_outputs,
)

_LOG = logging.getLogger("magnetar.client")

TAKEOVER_STEPS = ("fence", "mark", "restore")
OWNER_KEY = "magnetar.streams.owner"
"""The key under which a worker marks that it has taken a partition of state over. Programs cannot use it."""
COMPACTION_BYTES = 64 << 20
"""Number of bytes that are not compacted, at which a topic of state is compacted, if neither its policies nor those of
its namespace have another."""
TRANSACTION_TIMEOUT_S = 10.0
"""Time-out of a transaction in seconds; a take-over waits at most that long for the transaction of a dead worker."""
_PERMANENT = (AlreadyClosed, AuthenticationError, AuthorizationError, InvalidConfiguration, InvalidMessage)
"""Errors that trying again does not change."""
_GONE = b""
"""The value of a key that is deleted: a tombstone."""
STATE_KEY_CHECK = ParameterCheck(f"a text, and not {OWNER_KEY}", (str,), lambda key: key != OWNER_KEY)


# --------------------------------------------------------------------------------------------------------- state


class State(MutableMapping[str, Any]):
    """The state of one partition, a mutable mapping from text keys to values of JSON. It has the committed values
    (`committed`, as JSON) and the changes since. A program must assign a changed value to its key: changing a value in
    place has no effect. Raises InvalidConfiguration for a key that is not text or is OWNER_KEY, and TypeError for a
    value that JSON cannot represent."""

    def __init__(self) -> None:
        self.committed: dict[str, bytes] = {}
        self.is_used = False  # since `commit_batch_changes`, for reading too
        self._batch: dict[str, bytes] = {}  # changes of messages that are processed, not committed
        self._message: dict[str, bytes] = {}  # changes of the message that is processed now

    def __getitem__(self, key: str) -> Any:
        check_parameter("key", STATE_KEY_CHECK, key)
        self.is_used = True
        for known in (self._message, self._batch, self.committed):
            if (value := known.get(key)) is not None:
                if value == _GONE:
                    break
                return json.loads(value)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        check_parameter("key", STATE_KEY_CHECK, key)
        self.is_used = True
        self._message[key] = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._message[key] = _GONE

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]  # the check says what is wrong
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        self.is_used = True
        now = self.committed | self._batch | self._message
        return iter([key for key, value in now.items() if value != _GONE])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add_message_changes(self) -> None:
        """Adds the changes of the present message to those of the batch, because the function has succeeded."""
        self._batch |= self._message
        self._message = {}

    def discard_message_changes(self) -> None:
        """Drops the changes of the present message, because the function has failed."""
        self._message = {}

    def commit_batch_changes(self) -> None:
        """Applies the changes of the batch to the committed values, because its transaction has committed."""
        for key, value in self._batch.items():
            self.apply_change(key, value)
        self._batch, self.is_used = {}, False

    def apply_change(self, key: str, value: bytes) -> None:
        """Sets a committed value. `value`: the value as JSON; empty: the key is deleted."""
        if value == _GONE:
            self.committed.pop(key, None)
        else:
            self.committed[key] = value

    @property
    def batch_changes(self) -> dict[str, bytes]:
        """Returns the changes of the batch that are not committed yet: key → value as JSON; empty: the key is
        deleted."""
        return self._batch


@dataclass(frozen=True, slots=True)
class Context:
    """The second argument of a step's function: the state of the partition from which the message came, and the number
    of that partition (-1: the source is not partitioned)."""

    state: State
    partition: int


Step = Callable[[Message, Context], Any]


class StepOptions(NamedTuple):
    """A step as `App.step` declares it: its function, its topics (`source`, `sink`, `state`), and the parameters
    `messages_max`, `timeout` (seconds) and `on_error` of `process`."""

    function: Step
    source: str
    sink: str
    state: str
    messages_max: int
    timeout: float
    on_error: str


class App:
    """An app of one or several steps, for asyncio. All processes that run an app with the same name share its work:
    each partition is processed by one of them at a time. Raises InvalidConfiguration for an empty name."""

    def __init__(self, name: str) -> None:
        check_parameter("name", NAME_CHECK, name)
        self.name = name
        self._steps: list[StepOptions] = []

    def step(
        self, source: str, sink: str, *, state: str, messages_max: int = 1000, timeout: float = TRANSACTION_TIMEOUT_S,
        on_error: str = "raise",
    ) -> Callable[[Step], Step]:  # fmt: skip
        """Declares a step. Returns a decorator for a function, or coroutine function, `(message, context)`. The
        function returns what a function of `process` returns; a value that is no `Output` is sent with the key of its
        message. `source`, `sink`, `state`: names of topics. `messages_max`, `timeout` (seconds) and `on_error` are
        those of `process`; a message that is negatively acknowledged changes nothing in the state. Raises
        InvalidConfiguration for a wrong value, and if another step has the same `state`."""
        topics = {"source": source, "sink": sink, "state": state}
        check_parameters(dict.fromkeys(topics, NAME_CHECK), topics)
        limits = ProcessOptions(messages_max, 0, 1, timeout, on_error, None, ProcessStatistics())
        limits.check()

        def declare(function: Step) -> Step:
            check_parameter("function", FUNCTION_CHECK, function)
            if any((each.source, each.state) == (source, state) or each.state == state for each in self._steps):
                raise WrongValue(f"another step has the state {shorten_value(state)}")
            self._steps.append(StepOptions(function, source, sink, state, messages_max, timeout, on_error))
            return function

        return declare

    async def run(
        self, client: Client, admin: AdminClient, *, idle_timeout_ms: int | None = None
    ) -> ProcessStatistics:
        """Runs all steps until this is cancelled, or until no partition had a message for `idle_timeout_ms`; then
        returns the counters of all steps together. Creates the topics of states that do not exist. Repeats a step after
        an error that may pass. Raises the exception of a function (with `on_error` "raise"); permanent errors such as
        AuthorizationError; InvalidConfiguration if a state has another number of partitions than its source, or for a
        wrong parameter; and the errors of `admin`, such as TopicNotFound if a source does not exist. `idle_timeout_ms`
        None: runs until it is cancelled."""
        check_parameter("client", make_instance_check(Client, optional=False), client)
        check_parameter("admin", make_instance_check(AdminClient, optional=False), admin)
        workers: list[_Worker] = []
        for step in self._steps:
            count = await _prepare_state(admin, step)
            workers += [_Worker(self.name, step, client, at, idle_timeout_ms) for at in (range(count) or (-1,))]
        tasks = Tasks()
        running = [tasks.spawn(worker.run(), "step of a stream") for worker in workers]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        total = ProcessStatistics()
        for worker in workers:
            for name in ("received", "sent", "acknowledged", "committed", "aborted", "failed"):
                setattr(total, name, getattr(total, name) + getattr(worker.statistics, name))
        return total

    def start(self, service_url: str, *, idle_timeout_ms: int | None = None, **options: Any) -> ProcessStatistics:
        """Runs the app as `run` does, with its errors, in an event loop of its own, for a program without asyncio;
        Ctrl-C ends the app. `options`: parameters of `Client`; `authentication` and `tls_trust_certs_file_path` are
        also used for the admin client. Returns the counters of all steps together."""

        async def run() -> ProcessStatistics:
            login = {name: options[name] for name in ("authentication", "tls_trust_certs_file_path") if name in options}
            async with Client(service_url, **options) as client, AdminClient(service_url, **login) as admin:
                return await self.run(client, admin, idle_timeout_ms=idle_timeout_ms)

        return asyncio.run(run())


async def _prepare_state(admin: AdminClient, step: StepOptions) -> int:
    """Makes the topic of the state, if it does not exist, and sets when it is compacted. Returns the number of
    partitions of the source. Raises InvalidConfiguration if the state has another number."""
    count = await admin.partitions(step.source)
    try:
        there = await admin.partitions(step.state)
    except TopicNotFound:
        with suppress(AlreadyExists):  # made by another app meanwhile
            await admin.create_topic(step.state, partitions=count)
        there = await admin.partitions(step.state)
    if there != count:
        raise InvalidConfiguration(
            f"the state {step.state!r} has {there} partitions and its source {step.source!r} has {count}: "
            "they have as many, for the life of the state"
        )
    await _set_compaction(admin, step.state)
    return count


async def _set_compaction(admin: AdminClient, state: str) -> None:
    """Sets the topic's compaction threshold if none is set for the topic or its namespace, also if an earlier run that
    made the topic ended before it could. An app that may not manage the topic leaves this to an operator."""
    try:
        own, applied = await admin.topic_policies(state), await admin.topic_policies(state, applied=True)
        if own.compaction_threshold_bytes is None and not applied.compaction_threshold_bytes:
            await admin.set_topic_policies(state, Policies(compaction_threshold_bytes=COMPACTION_BYTES))
    except Unauthorized as error:
        _LOG.info("when the state %s is compacted is left as it is: %s", state, error.message)


# -------------------------------------------------------------------------------------------------------- worker


class _Worker:
    """The worker of one partition of a step."""

    def __init__(
        self, app: str, step: StepOptions, client: Client, partition: int, idle_timeout_ms: int | None
    ) -> None:
        self.statistics = ProcessStatistics()
        self._app, self._step, self._client, self._partition = app, step, client, partition
        self._options = ProcessOptions(
            step.messages_max, 5, 1, step.timeout, step.on_error, idle_timeout_ms, self.statistics
        )
        self._own_errors: list[Exception] = []  # of the function, in the last batch
        self._state: State | None = None
        self._producer: Producer | None = None  # of the state
        self._aborted = 0

    def _name(self, topic: str) -> str:
        name = parse_topic(topic)
        return (name if self._partition < 0 else name.with_partition(self._partition)).full

    async def run(self) -> None:
        """Processes the partition until nothing comes for the idle time. Begins anew after an error that may pass."""
        backoff = self._client.connections.backoff()
        while True:
            committed = self.statistics.committed
            try:
                await self._run_once()
                return
            except PulsarException as error:
                if isinstance(error, _PERMANENT) or any(error is own for own in self._own_errors):
                    raise
                _LOG.warning("%s: the step begins anew: %s", self._name(self._step.source), error)
            if self.statistics.committed != committed:
                backoff.reset()
            await asyncio.sleep(backoff.next_delay_s())

    async def _run_once(self) -> None:
        async with AsyncExitStack() as opened:
            consumer = await opened.enter_async_context(
                await self._client.subscribe(
                    self._name(self._step.source), self._app, ConsumerType.Failover,
                    initial_position=InitialPosition.Earliest,
                )
            )
            sink = await opened.enter_async_context(await self._client.create_producer(self._step.sink))
            opened.push_async_callback(self._give_up)
            loop = ProcessLoop(consumer, sink, lambda messages: self._apply(consumer, messages), self._options)
            await loop.run()

    async def _give_up(self) -> None:
        """Forgets the state: it is restored before the next message."""
        producer, self._producer, self._state = self._producer, None, None
        if producer is not None:
            with suppress(PulsarException):  # a fenced one
                await producer.close()

    # ------------------------------------------------------------------ taking over
    async def _take_over(self) -> State:
        """Fences the former worker of the partition, and restores the state from the log."""
        await self._give_up()
        topic = self._name(self._step.state)
        self._producer = await self._client.create_producer(
            topic, access_mode=ProducerAccessMode.ExclusiveWithFencing, block_if_queue_full=True
        )
        mark = await self._producer.send(self._app.encode(), partition_key=OWNER_KEY)
        end, state = Position(mark.ledger_id(), mark.entry_id()), State()
        reader = await self._client.create_reader(topic, MessageId.earliest, is_read_compacted=True)
        async with reader:
            while True:
                message = await reader.read_next()
                if message.partition_key() != OWNER_KEY:
                    state.apply_change(message.partition_key(), message.data())
                if message.entry.position >= end:
                    break
        self._state = state
        return state

    # ------------------------------------------------------------------ a batch
    async def _apply(self, consumer: Consumer, messages: list[Message]) -> list[FunctionResult]:
        """Calls the function for each message. The changes of the state are outputs of the last message."""
        state = self._state
        if state is None or self.statistics.aborted != self._aborted:
            self._aborted = self.statistics.aborted
            state = await self._take_over()
        else:
            state.commit_batch_changes()  # one transaction at a time, and the one before has ended: it is committed
        context, self._own_errors = Context(state, self._partition), []
        results = [await self._call(message, context, number) for number, message in enumerate(messages)]
        written = self._make_state_outputs(state)
        for at in range(len(results) - 1, -1, -1):
            if results[at].error is None:
                results[at] = results[at]._replace(outputs=[*results[at].outputs, *written])
                break
        return results

    async def _call(self, message: Message, context: Context, number: int) -> FunctionResult:
        try:
            found = self._step.function(message, context)
            if inspect.isawaitable(found):
                found = await found
            elif number % 64 == 63:
                await asyncio.sleep(0)
            outputs = [_keyed_output(each, message) for each in convert_to_outputs(found)]
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            context.state.discard_message_changes()
            own = error if isinstance(error, Exception) else RuntimeError("the function raised CancelledError")
            self._own_errors.append(own)
            return FunctionResult(message, (), own)
        context.state.add_message_changes()
        return FunctionResult(message, outputs, None)

    def _make_state_outputs(self, state: State) -> list[Output]:
        """Returns the messages of the state that the batch writes. One that has only read state writes its mark again:
        a worker that was replaced cannot commit."""
        changes = state.batch_changes or ({OWNER_KEY: self._app.encode()} if state.is_used else {})
        return [Output(value, partition_key=key, producer=self._producer) for key, value in changes.items()]


def _keyed_output(output: Any, message: Message) -> Any:
    """Returns an Output with the key of the message; an Output of the program stays as it is."""
    if type(output) is Output or not message.fields.HasField("partition_key"):
        return output
    return Output(output, partition_key=message.partition_key())


__all__ = ["App", "Context", "State"]
