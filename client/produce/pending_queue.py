"""Messages of one partition on their way: gathered into batches, kept until each has its outcome.

**Order.** Sequence ids are given when a message is added; entries are handed to the stream in that order. Receipts come
in the order of the publishes; each settles the oldest entry.

**Outcome.** Each message's callback is called exactly once: with Ok and its id; with Timeout when `send_timeout_millis`
passed since its batch was closed (it may be stored: unknown); with the broker's error when that is definite; with
AlreadyClosed when the producer is closed before an answer. Callbacks run in the event loop, all of one entry in a loop.
`exception` tells why: when the broker refused and the entry was sent again until its time was over, that is the
broker's last reason. A message that cannot be encoded fails alone with InvalidMessage; anything else that fails here
finishes the producer, and every message gets that outcome (client/common/guard.py).

**Flush** closes what is open and waits for the youngest entry of that moment: entries get their outcomes in order, so
what was added before it has its own then. What others add meanwhile is not waited for.

**Threads.** `add` and `add_message` may be called from any thread: they append to the batcher under `lock`, and wake
the event loop only when a batch is ready or the first message of one waits. Everything else belongs to the event loop.

**Lazily** (Pulsar PR10): a producer of a partition that is not opened yet keeps its messages as they are, in `_early`;
they get their sequence ids when it is open and knows what the broker has (`_admit`).

Past `max_pending` messages `add` refuses with ProducerQueueIsFull. What sends is client/produce/partition_producer.py.
Guards: tests/client/produce/test_partition_producer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, repeat
from threading import Lock

from ...proto import wire_pb2 as wire
from ...proto.compression import UNCOMPRESSED_BYTES_MAX
from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.errors import ConnectionLost, MagnetarError
from ...proto.names import Position, TopicName
from ...runtime.world import World
from ..common.errors import (
    InvalidMessage,
    MessageTooBig,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    exception_of,
    translate,
)
from ..common.guard import run
from ..common.state import State
from ..core.batcher import Batch, Batcher, Callback, OutgoingMessage, encode, metadata_of
from ..core.chunking import CHUNKED_BYTES_MAX, split
from ..core.reasons import Reasons
from ..model.message_id import KnownId, MessageId
from ..model.settings import BatchingType, ProducerSettings

_LOG = logging.getLogger("magnetar.client")


class Sending:
    """The half of a partition's producer that needs no stream; the other half publishes and resets."""

    def __init__(self, world: World, topic: TopicName, settings: ProducerSettings, max_pending: int) -> None:
        self.topic = topic
        self.name = settings.producer_name or ""
        self.state = State.OPENING
        self.lock = Lock()
        self.pending = 0  # messages without an outcome, those that wait for their batch included
        self.max_pending = max_pending
        self.last_sequence_id = -1  # the highest that was acknowledged
        self.stored = 0  # messages that were acknowledged
        self.room: deque[Callable[[], None]] = deque()  # called, once, when there is room again
        self._clock = world.clock
        self._compression = int(settings.compression_type)
        self._chunking = settings.chunking_enabled
        self._uuid = world.rng.randbytes(8).hex() if self._chunking else ""  # of this producer's life
        whole = CHUNKED_BYTES_MAX if self._chunking else ENTRY_BYTES_MAX
        self._payload_max = UNCOMPRESSED_BYTES_MAX if self._compression else whole
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
        self._early: deque[tuple[OutgoingMessage, Callback]] | None = None  # None: it is not opened lazily, or is open
        self._early_flushes: list[tuple[int, asyncio.Future[None]]] = []  # so many of `_early` are waited for
        self._no_more: PulsarException | None = None  # it is being closed: what is added gets this

    # ------------------------------------------------------------------------------ the other half
    def _publish(self, batch: Batch) -> None:
        """Hands an entry to the stream; called only while CONNECTED."""
        raise NotImplementedError

    def _open_soon(self) -> None:
        """Messages wait for the producer to be opened."""
        raise NotImplementedError

    def _reset(self) -> None:
        """Ends the stream: what comes over it would be about entries that nobody waits for."""
        raise NotImplementedError

    def _broke(self, error: Exception) -> None:
        """Something failed that cannot fail: everybody who waits gets that."""
        self._finish(translate(error))

    # ------------------------------------------------------------------------------ from any thread
    def add(self, payload: bytes, callback: Callback) -> None:
        """A message with a payload and nothing else."""
        if len(payload) > self._payload_max:
            self._refuse_size(len(payload))
        with self.lock:
            if self.pending >= self.max_pending or self._error is not None:
                self._refuse()
            if self._early is None:
                self._batcher.add(payload, callback)
            else:
                self._early.append((OutgoingMessage(payload), callback))
            self.pending += 1  # last: a Ctrl-C before it leaves no place of the queue taken for ever
        if not self._wake_scheduled and (self._batcher.ready or self._timer is None):
            self._wake()

    def add_message(self, message: OutgoingMessage, callback: Callback) -> None:
        if len(message.payload) > self._payload_max:
            self._refuse_size(len(message.payload))
        with self.lock:
            if self.pending >= self.max_pending or self._error is not None:
                self._refuse()
            if self._early is not None:
                self._early.append((message, callback))
            else:
                try:
                    self._batcher.add_message(message, callback)
                except MagnetarError as error:
                    raise translate(error) from error
                except (TypeError, ValueError, OverflowError) as error:
                    raise InvalidMessage(f"the message cannot be encoded: {error}") from error
            self.pending += 1
        if not self._wake_scheduled and (self._batcher.ready or self._timer is None):
            self._wake()

    def _admit(self) -> None:
        """In the loop: it is open; what came before gets its place."""
        refused: list[tuple[Callback, PulsarException]] = []
        with self.lock:  # at once: nothing that comes now may get in front of it
            early, self._early = self._early, None
            flushes, self._early_flushes = deque(self._early_flushes), []
            for number, (message, callback) in enumerate(early or (), 1):
                try:
                    self._batcher.add_message(message, callback)
                except MagnetarError as error:
                    refused.append((callback, translate(error)))
                except Exception as error:
                    refused.append((callback, InvalidMessage(f"the message cannot be encoded: {error}")))
                while flushes and flushes[0][0] <= number:
                    self._batcher.close()
                    self._after_the_last(flushes.popleft()[1])
        for callback, why in refused:
            self._why = why.message
            self._fail(_lone(callback), why.result)

    def flush_soon(self) -> None:
        """What is open goes out without waiting for its delay: at once when nothing is under way, else behind it."""
        self._urgent = True
        if not self._wake_scheduled:
            self._wake()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

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
        self._loop.call_soon_threadsafe(run, self._pump, self._broke)

    def _refuse(self) -> None:
        over = self._error or self._no_more
        if over is not None:
            raise type(over)(over.message) from over
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
        if self._early:
            self._open_soon()
        ready = self._batcher.ready
        while True:
            while ready:
                self._send_or_fail(ready.popleft())
            if not (self._urgent and not self._in_flight):
                break
            with self.lock:
                self._urgent = False
                if not self._batcher.close():
                    break
        if self._timer is None and self._batcher.open_messages:
            self._timer = self._loop.call_later(self._delay_s, run, self._delay_over, self._broke)

    def _delay_over(self) -> None:
        self._timer = None
        with self.lock:
            self._batcher.close()
        self._pump()

    def _close_batches(self) -> None:
        with self.lock:
            self._batcher.close()
        self._pump()

    def _send_or_fail(self, batch: Batch) -> None:
        try:
            self._send(batch)
        except Exception as error:
            if self._in_flight and self._in_flight[-1] is batch:
                raise  # it has its place: it is not the message that is wrong
            _LOG.exception("%s: a message cannot be encoded", self.topic)
            self._why = f"the message cannot be encoded: {error}"
            self._fail(batch, Result.InvalidMessage)

    def _send(self, batch: Batch) -> None:
        if self._error is not None:
            self._why = self._error.message
            self._fail(batch, self._error.result)
            return
        wall_ms = self._clock.wall_ms()
        if self._chunking and batch.message is not None:
            self._send_chunks(batch, batch.message.payload, wall_ms)
            return
        batch.entry = encode(batch, self.name, wall_ms, self._compression)
        if len(batch.entry) > self._entry_max:
            self._why = f"an entry of {len(batch.entry)} bytes; the limit is {self._entry_max}"
            self._fail(batch, Result.MessageTooBig)
            return
        self._start(batch)

    def _send_chunks(self, batch: Batch, payload: bytes, wall_ms: int) -> None:
        metadata = metadata_of(batch, self.name, wall_ms, self._compression)
        try:
            entries = split(metadata, payload, self._entry_max, f"{self.name}-{self._uuid}-{batch.sequence_id}")
        except MagnetarError as error:
            self._why = error.message
            self._fail(batch, Result.MessageTooBig)
            return
        places: list[Position] = []
        for entry in entries[:-1]:
            chunk = Batch(batch.sequence_id)
            chunk.message, chunk.entry, chunk.chunks = batch.message, entry, places
            self._start(chunk)
        batch.entry = entries[-1]
        batch.chunks = places if len(entries) > 1 else None
        self._start(batch)

    def _start(self, batch: Batch) -> None:
        batch.items = []
        batch.born = self._loop.time()
        self._in_flight.append(batch)
        if self._timeout is None and self._send_timeout_s:
            self._timeout = self._loop.call_at(
                batch.born + self._send_timeout_s, run, self._check_timeout, self._broke
            )
        if self.state is State.CONNECTED:
            self._publish(batch)

    # ------------------------------------------------------------------------------ outcomes
    def _receipt(self, receipt: wire.Receipt) -> None:
        if not self._in_flight or receipt.sequence_id < self._in_flight[0].sequence_id:
            return  # of an entry that timed out, or was sent twice
        batch = self._in_flight[0]
        if receipt.sequence_id != batch.sequence_id:
            raise ConnectionLost(f"a receipt for {receipt.sequence_id} while {batch.sequence_id} is the oldest")
        self._in_flight.popleft()
        self._reasons.over()
        self.last_sequence_id = max(self.last_sequence_id, batch.highest)
        self.stored += batch.count
        if batch.chunks is not None:
            batch.chunks.append(Position(receipt.ledger_id, receipt.entry_id))
        self._confirm(batch, receipt.ledger_id, receipt.entry_id)
        self._settled(batch)

    def _confirm(self, batch: Batch, ledger_id: int, entry_id: int) -> None:
        ok, partition, size = Result.Ok, self.topic.partition, batch.count
        indexes = count(0) if batch.message is None and entry_id >= 0 else repeat(-1)
        chunks = () if batch.chunks is None or entry_id < 0 or batch.chunks[0][1] < 0 else tuple(batch.chunks)
        for callback, index in zip(batch.callbacks, indexes, strict=False):
            if callback is not None:
                try:
                    callback(ok, KnownId(partition, ledger_id, entry_id, index, size, _chunks=chunks))
                except (Exception, SystemExit):  # of the application: it must not end the loop
                    _LOG.exception("a send callback failed")

    def _fail(self, batch: Batch, result: Result) -> None:
        missing = MessageId()
        for callback in batch.callbacks:
            if callback is not None:
                try:
                    callback(result, missing)
                except (Exception, SystemExit):  # of the application: it must not end the loop
                    _LOG.exception("a send callback failed")
        self._settled(batch)

    def _settled(self, batch: Batch) -> None:
        with self.lock:
            self.pending -= batch.count
        if self.room and self.pending <= self.max_pending - (self.max_pending >> 2):
            room, self.room = self.room, deque()
            for call in room:
                call()
        if batch.waiters is not None:
            _wake(batch.waiters)
        if self._urgent and not self._in_flight and not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(run, self._pump, self._broke)

    def _check_timeout(self) -> None:
        self._timeout = None
        now = self._loop.time()
        if self._in_flight and now >= self._in_flight[0].born + self._send_timeout_s:
            # All that are under way: what follows the oldest must not be stored in its place.
            self._why = f"no acknowledgement within {self._send_timeout_s:g} s{self._reason()}"
            expired, self._in_flight = self._in_flight, deque()
            with self.lock:
                self._batcher.rewind(expired[0].sequence_id)
            for batch in expired:
                self._fail(batch, Result.Timeout)
            self._reset()
        elif self._in_flight:
            due = self._in_flight[0].born + self._send_timeout_s
            self._timeout = self._loop.call_at(due, run, self._check_timeout, self._broke)

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
            early, self._early = self._early, None
        waiting = [*self._in_flight, *self._batcher.ready]
        waiting += [_lone(callback) for _, callback in early or ()]
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
        flushes, self._early_flushes = self._early_flushes, []
        _wake([each for _, each in flushes])

    # ------------------------------------------------------------------------------ waiting for the end
    async def flush(self) -> None:
        """Returns when every message added before has its outcome; for later ones it does not wait."""
        run(self._close_batches, self._broke)
        if self._error is not None:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        with self.lock:
            if self._early:
                self._early_flushes.append((len(self._early), reached))
            else:
                self._after_the_last(reached)
        await reached

    def _after_the_last(self, reached: asyncio.Future[None]) -> None:
        """`reached` gets its result when what is sent, or ready to be, has its outcome."""
        waiting = self._batcher.ready or self._in_flight
        if not waiting:
            reached.set_result(None)
            return
        last = waiting[-1]
        last.waiters = [*(last.waiters or ()), reached]

    def _take_no_more(self, why: PulsarException) -> None:
        """Whoever adds a message from now on gets this; what was added goes its way."""
        with self.lock:
            self._no_more = why
            self.max_pending = 0  # so that `add` looks

    def check(self) -> None:
        self._batcher.check()
        sequence = [batch.sequence_id for batch in self._in_flight if batch.callbacks and not batch.goes_back]
        assert sequence == sorted(set(sequence)), "entries under way stand in the order of their sequence ids"


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for each in waiters:
        if not each.done():
            each.set_result(None)


def _lone(callback: Callback) -> Batch:
    """Stands for a message that never got into a batch."""
    batch = Batch(-1)
    batch.callbacks.append(callback)
    return batch
