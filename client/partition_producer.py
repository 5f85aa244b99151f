"""One partition's producer: a batcher, a stream, and the entries that are under way.

**Order.** Sequence ids are given when a message is added; entries go out in that order, and after a reconnect all that
are not acknowledged go out again, in order, under the same ids, before anything new. Receipts come in the order of the
publishes; each settles the oldest entry.

**Outcome.** Each message's callback is called exactly once: with Ok and its id; with Timeout when `send_timeout_millis`
passed since its batch was closed (it may be stored: unknown); with the broker's error when that is definite; with
AlreadyClosed when the producer is closed before an answer. Callbacks run in the event loop, all of one entry in a loop.
`exception` tells why: when the broker refused and the entry was sent again until its time was over, that is the
broker's last reason.

**Threads.** `add` and `add_message` may be called from any thread: they append to the batcher under `lock`, and wake
the event loop only when a batch is ready or the first message of one waits. Everything else belongs to the event loop.

Past `max_pending` messages `add` refuses with ProducerQueueIsFull. Guards: tests/client/test_partition_producer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from itertools import count
from threading import Lock
from typing import Any

from ..proto import wire_pb2 as wire
from ..proto.compression import UNCOMPRESSED_BYTES_MAX
from ..proto.entry import ENTRY_BYTES_MAX
from ..proto.errors import (
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    Unauthorized,
    from_wire,
)
from ..proto.errors import ProducerFenced as WireProducerFenced
from ..proto.errors import TopicTerminated as WireTopicTerminated
from ..proto.names import TopicName
from ..runtime.network import EndOfStream, Stream, rpc
from .connections import Connections
from .core.batcher import Batch, Batcher, Callback, OutgoingMessage, encode
from .core.reasons import Reasons
from .errors import (
    AlreadyClosed,
    MessageTooBig,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    Timeout,
    exception_of,
    translate,
)
from .message_id import MessageId
from .settings import BatchingType, ProducerSettings

_LOG = logging.getLogger("magnetar.client")
_SEALED = (WireProducerFenced, WireTopicTerminated)
_FINAL = (*_SEALED, NotAllowed, NotFound, Unauthorized, InvalidRequest)
"""Errors after which opening the producer again is pointless."""
_ROUTINE = (ConnectionLost, NotOwner)
"""Errors that a topic's move or a broker's restart brings: no reason to warn."""


class State(Enum):
    OPENING = auto()
    CONNECTED = auto()
    RECONNECTING = auto()
    CLOSING = auto()
    CLOSED = auto()


class PartitionProducer:
    def __init__(
        self, connections: Connections, topic: TopicName, settings: ProducerSettings, max_pending: int
    ) -> None:
        self.topic = topic
        self.name = settings.producer_name or ""
        self.state = State.OPENING
        self.lock = Lock()
        self.pending = 0  # messages without an outcome, those that wait for their batch included
        self.max_pending = max_pending
        self.last_sequence_id = -1  # the highest that was acknowledged
        self.room: deque[Callable[[], None]] = deque()  # called, once, when there is room again
        self._connections = connections
        self._settings = settings
        self._compression = int(settings.compression_type)
        self._payload_max = UNCOMPRESSED_BYTES_MAX if self._compression else ENTRY_BYTES_MAX
        self._entry_max = ENTRY_BYTES_MAX
        first = 0 if settings.initial_sequence_id is None else settings.initial_sequence_id + 1
        if settings.initial_sequence_id is not None:
            self.last_sequence_id = settings.initial_sequence_id
        self._batcher = Batcher(
            first,
            messages_max=settings.batching_max_messages,
            bytes_max=settings.batching_max_allowed_size_in_bytes,
            batching=settings.batching_enabled,
            key_based=settings.batching_type is BatchingType.KeyBased,
        )
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._delay_s = settings.batching_max_publish_delay_ms / 1000
        self._send_timeout_s = settings.send_timeout_millis / 1000
        self._in_flight: deque[Batch] = deque()
        self._loop = asyncio.get_running_loop()
        self._wake_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._urgent = False
        self._reasons = Reasons()
        self._why = ""
        self._error: PulsarException | None = None
        self._stream: Stream[Any, Any] | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._drained: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------------------ from any thread
    def add(self, payload: bytes, callback: Callback) -> None:
        """A message with a payload and nothing else."""
        if len(payload) > self._payload_max:
            self._refuse_size(len(payload))
        with self.lock:
            if self.pending >= self.max_pending or self._error is not None:
                self._refuse()
            self.pending += 1
            self._batcher.add(payload, callback)
        if not self._wake_scheduled and (self._batcher.ready or self._timer is None):
            self._wake()

    def add_message(self, message: OutgoingMessage, callback: Callback) -> None:
        if len(message.payload) > self._payload_max:
            self._refuse_size(len(message.payload))
        with self.lock:
            if self.pending >= self.max_pending or self._error is not None:
                self._refuse()
            try:
                self._batcher.add_message(message, callback)
            except MagnetarError as error:
                raise translate(error) from error
            self.pending += 1
        if not self._wake_scheduled and (self._batcher.ready or self._timer is None):
            self._wake()

    def flush_soon(self) -> None:
        """What is open goes out without waiting for its delay: at once when nothing is under way, else behind it."""
        self._urgent = True
        if not self._wake_scheduled:
            self._wake()

    def wall_ms(self) -> int:
        return self._connections.world.clock.wall_ms()

    @property
    def full(self) -> bool:
        return self.pending >= self.max_pending

    @property
    def error(self) -> PulsarException | None:
        """Why this producer is finished; None while it is not."""
        return self._error

    @property
    def why(self) -> str:
        """The reason that was given for the last message that failed; empty: none."""
        return self._why

    def exception(self, result: Result) -> PulsarException:
        """What stands for the outcome of a message that failed just now."""
        return exception_of(result, f"a message to {self.topic}: {self._why or result.name}")

    def _wake(self) -> None:
        self._wake_scheduled = True
        self._loop.call_soon_threadsafe(self._pump)

    def _refuse(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error
        raise ProducerQueueIsFull(
            f"{self.max_pending} messages wait for their acknowledgement; wait, or set block_if_queue_full",
            limit=self.max_pending,
        )

    def _refuse_size(self, size: int) -> None:
        raise MessageTooBig(f"a message of {size} bytes; the limit is {self._payload_max}", size=size)

    # ------------------------------------------------------------------------------ out
    def _pump(self) -> None:
        """Sends what is ready; sees to it that what is open goes out in time."""
        self._wake_scheduled = False
        ready = self._batcher.ready
        while True:
            while ready:
                self._send(ready.popleft())
            if not (self._urgent and not self._in_flight):
                break
            with self.lock:
                self._urgent = False
                if not self._batcher.close():
                    break
        if self._timer is None and self._batcher.open_messages:
            self._timer = self._loop.call_later(self._delay_s, self._delay_over)

    def _delay_over(self) -> None:
        self._timer = None
        with self.lock:
            self._batcher.close()
        self._pump()

    def _close_batches(self) -> None:
        with self.lock:
            self._batcher.close()
        self._pump()

    def _send(self, batch: Batch) -> None:
        if self._error is not None:
            self._why = self._error.message
            self._fail(batch, self._error.result)
            return
        wall_ms = self._connections.world.clock.wall_ms()
        batch.entry = encode(batch, self.name, wall_ms, self._compression)
        if len(batch.entry) > self._entry_max:
            self._why = f"an entry of {len(batch.entry)} bytes; the limit is {self._entry_max}"
            self._fail(batch, Result.MessageTooBig)
            return
        batch.items = []
        batch.born = self._loop.time()
        self._in_flight.append(batch)
        if self._timeout is None and self._send_timeout_s:
            self._timeout = self._loop.call_at(batch.born + self._send_timeout_s, self._check_timeout)
        if self.state is State.CONNECTED:
            self._publish(batch)

    def _publish(self, batch: Batch) -> None:
        assert self._stream is not None, "a connected producer has a stream"
        try:
            self._stream.send_nowait(wire.ProduceRequest(publish=batch.entry))
        except MagnetarError:
            self.state = State.RECONNECTING  # the reader of the stream finds the same and opens it again

    # ------------------------------------------------------------------------------ outcomes
    def _receive(self, reply: wire.ProduceReply) -> None:
        match reply.WhichOneof("kind"):
            case "receipt":
                self._receipt(reply.receipt)
            case "failed":
                self._publish_failed(reply.failed)
            case "closed":
                raise self._told(from_wire(reply.closed))
            case _:
                raise ConnectionLost("the broker said something out of turn")

    def _told(self, error: MagnetarError) -> MagnetarError:
        """The broker gave this as its reason; the error, to be raised."""
        kind = type(error).__name__
        text = f"the broker said: {kind}: {error.message}"
        if self._reasons.note(kind, text, self._loop.time()) and not isinstance(error, (*_ROUTINE, *_FINAL)):
            _LOG.warning("%s: messages are not acknowledged and are sent again: %s", self.topic, text)
        return error

    def _receipt(self, receipt: wire.Receipt) -> None:
        if not self._in_flight or receipt.sequence_id < self._in_flight[0].sequence_id:
            return  # of an entry that timed out, or was sent twice
        batch = self._in_flight[0]
        if receipt.sequence_id != batch.sequence_id:
            raise ConnectionLost(f"a receipt for {receipt.sequence_id} while {batch.sequence_id} is the oldest")
        self._in_flight.popleft()
        self._reasons.over()
        self.last_sequence_id = max(self.last_sequence_id, batch.highest)
        self._confirm(batch, receipt.ledger_id, receipt.entry_id)
        self._settled(batch)

    def _confirm(self, batch: Batch, ledger_id: int, entry_id: int) -> None:
        ok, partition, size = Result.Ok, self.topic.partition, batch.count
        indexes = count(-1 if batch.message is not None else 0)
        for callback, index in zip(batch.callbacks, indexes, strict=False):
            if callback is not None:
                try:
                    callback(ok, MessageId(partition, ledger_id, entry_id, index, size))
                except Exception:
                    _LOG.exception("a send callback failed")

    def _fail(self, batch: Batch, result: Result) -> None:
        missing = MessageId()
        for callback in batch.callbacks:
            if callback is not None:
                try:
                    callback(result, missing)
                except Exception:
                    _LOG.exception("a send callback failed")
        self._settled(batch)

    def _settled(self, batch: Batch) -> None:
        with self.lock:
            self.pending -= batch.count
        if self.room and self.pending <= self.max_pending - (self.max_pending >> 2):
            room, self.room = self.room, deque()
            for call in room:
                call()
        if self._drained and self.pending == 0:
            self._wake_drained()
        if self._urgent and not self._in_flight and not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._pump)

    def _publish_failed(self, failed: wire.PublishFailed) -> None:
        error = from_wire(failed.error)
        head = self._in_flight[0] if self._in_flight else None
        if not error.definite or error.retryable or isinstance(error, _SEALED):
            raise self._told(error)  # open the stream again and resend, or finish
        if head is not None and head.sequence_id == failed.sequence_id:
            self._in_flight.popleft()
            self._why = f"the broker said: {type(error).__name__}: {error.message}"
            self._fail(head, translate(error).result)

    def _check_timeout(self) -> None:
        self._timeout = None
        now = self._loop.time()
        if self._in_flight and now >= self._in_flight[0].born + self._send_timeout_s:
            # All that are under way: what follows the oldest must not be stored in its place.
            self._why = f"no acknowledgement within {self._send_timeout_s:g} s{self._reason()}"
            expired, self._in_flight = self._in_flight, deque()
            for batch in expired:
                self._fail(batch, Result.Timeout)
            if self._stream is not None:
                self._stream.cancel()
        elif self._in_flight:
            self._timeout = self._loop.call_at(self._in_flight[0].born + self._send_timeout_s, self._check_timeout)

    def _reason(self) -> str:
        return f"; {self._reasons.last}" if self._reasons.last else ""

    def _finish(self, error: PulsarException) -> None:
        """No more messages; those without an outcome get this one."""
        self.state = State.CLOSED
        self._why = error.message
        with self.lock:
            if self._error is None:
                self._error = error
            self._batcher.close()
        waiting = [*self._in_flight, *self._batcher.ready]
        self._in_flight.clear()
        self._batcher.ready.clear()
        for batch in waiting:
            self._fail(batch, error.result)
        for timer in (self._timer, self._timeout):
            if timer is not None:
                timer.cancel()
        self._timer = self._timeout = None
        room, self.room = self.room, deque()
        for call in room:
            call()
        self._wake_drained()

    # ------------------------------------------------------------------------------ the connection
    async def open(self) -> None:
        """Raises when the producer cannot be opened: at once for good reasons, else at the operation's deadline."""
        self._task = self._loop.create_task(self._run(), name=f"producer {self.topic}")
        await asyncio.shield(self._opened)

    async def _run(self) -> None:
        backoff = self._connections.backoff()
        try:
            await self._connections.retry(self._connect)
        except MagnetarError as error:
            self._finish(translate(error))
            self._opened.set_exception(translate(error))
            self._opened.exception()
            return
        self._opened.set_result(None)
        while True:
            try:
                if self.state is not State.CONNECTED:
                    async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                        await self._connect()
                    backoff.reset()
                await self._serve()
            except TimeoutError:
                _LOG.info("%s: no answer to the opening of the producer", self.topic)
            except MagnetarError as error:
                self.state = State.RECONNECTING
                if isinstance(error, _FINAL):
                    _LOG.warning("%s: the producer is finished: %s", self.topic, error)
                    self._finish(translate(error))
                    return
                _LOG.info("%s: the producer reconnects: %s", self.topic, error)
            except Exception as error:
                _LOG.exception("%s: the producer failed", self.topic)
                self._finish(translate(error))
                return
            finally:
                if self._stream is not None and self.state is not State.CLOSING:
                    self._stream.cancel()
                    self._stream = None
            await asyncio.sleep(backoff.next_s())

    async def _connect(self) -> None:
        channel = await self._connections.owner(self.topic)
        stream = channel.stream(rpc("Broker", "Produce"))
        settings = self._settings
        try:
            stream.send_nowait(
                wire.ProduceRequest(
                    open=wire.OpenProducer(
                        topic=self.topic.full,
                        producer_name=self.name,
                        instance=self._instance,
                        access_mode=int(settings.access_mode),  # type: ignore[arg-type]
                        properties=settings.properties,
                    )
                )
            )
            try:
                replies = await stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream before the producer was open") from error
            first = replies[0]
            if first.WhichOneof("kind") == "closed":
                raise self._told(from_wire(first.closed))
            if first.WhichOneof("kind") != "opened":
                raise ConnectionLost("the broker said something before the producer was open")
        except BaseException:
            stream.cancel()
            raise
        self._connected(stream, first.opened)
        for reply in replies[1:]:
            self._receive(reply)

    def _connected(self, stream: Stream[Any, Any], opened: wire.ProducerOpened) -> None:
        if self.state is State.OPENING:
            self.name = opened.producer_name
            if self._settings.initial_sequence_id is None and opened.last_sequence_id >= 0:
                self._batcher.next_sequence_id = opened.last_sequence_id + 1
                self.last_sequence_id = opened.last_sequence_id
            if opened.max_message_size:
                self._entry_max = min(ENTRY_BYTES_MAX, opened.max_message_size)
        self._stream = stream
        self.state = State.CONNECTED
        for batch in list(self._in_flight):
            self._publish(batch)
        self._pump()

    async def _serve(self) -> None:
        assert self._stream is not None, "a connected producer has a stream"
        while True:
            try:
                replies = await self._stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream") from error
            for reply in replies:
                self._receive(reply)

    # ------------------------------------------------------------------------------ the end
    async def flush(self) -> None:
        """Returns when every message added before has its outcome."""
        self._close_batches()
        while self.pending and self._error is None:
            drained = self._loop.create_future()
            self._drained.append(drained)
            await drained

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for each in drained:
            if not each.done():
                each.set_result(None)

    def abort(self) -> None:
        """Ends at once: what is under way gets AlreadyClosed and has an unknown outcome."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()
        self._finish(AlreadyClosed("the client was shut down"))

    async def close(self) -> None:
        """Waits for what is under way, as long as an operation may take; then nothing more is accepted."""
        if self.state is not State.CLOSED:
            try:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self.flush()
                    await self._close_stream()
            except TimeoutError as error:
                raise Timeout(f"the producer was closed with messages under way{self._reason()}") from error
            finally:
                await self._stop_task()
                self._finish(AlreadyClosed("the producer is closed"))

    async def _close_stream(self) -> None:
        """In order, so that the broker has forgotten the producer's name when we return."""
        self.state = State.CLOSING
        await self._stop_task()
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                await stream.close()
            except (MagnetarError, EndOfStream) as error:
                _LOG.debug("%s: the stream ended with the producer: %s", self.topic, error)

    async def _stop_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        self._batcher.check()
        sequence = [batch.sequence_id for batch in self._in_flight]
        assert sequence == sorted(set(sequence)), "entries under way stand in the order of their sequence ids"
