"""The producer of one partition: the driver of the core in client/core/producer.py, which makes the decisions.

`add`, `add_payload_in_transaction`, `add_message` and `flush_soon` may be called from any thread; all else belongs to
the event loop. The driver passes each fact to the core, and carries out the core's effects at once, in order. Callbacks
run in the event loop, those of one entry one after the other; `make_exception` returns the reason why a message failed.
An unforeseen exception finishes the producer, and is the outcome of every message (client/common/loggers.py). Guards:
tests/client/produce/test_partition_producer.py.

Also in this file, below its heading: the report of an entry's outcome to the callbacks of its messages (outcomes)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any

from ...proto import wire_pb2 as wire
from ...proto.entry import EncryptFunction
from ...proto.errors import MagnetarError, from_wire
from ...proto.names import Position, TopicName
from ..common.closing import DueTimer
from ..common.errors import (
    AlreadyClosed,
    InvalidMessage,
    MemoryBufferIsFull,
    MessageTooBig,
    OperationNotSupported,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    Timeout,
    make_exception_for_result,
    translate_error,
)
from ..common.loggers import log_foreign_error, run_logging_errors
from ..connect.attachment import Attachment, make_open_frame, make_producer_options
from ..connect.connections import Connections
from ..core.batcher import OutgoingBatch, OutgoingMessage, SendCallback
from ..core.effects import (
    PRODUCER_FINAL_ERRORS,
    AttachToBroker,
    DetachFromBroker,
    EndFlushes,
    EndWithError,
    LogWarning,
    MessageAddResult,
    MessageNotEncodable,
    PartitionClientState,
    ProducerEffect,
    ReportOutcome,
    ReportSent,
    SendEntry,
)
from ..core.producer import ProducerCore
from ..core.transaction import PartitionClientPort, SendAllowance, TransactionPort
from ..model.message_id import MessageId, UncheckedMessageId
from ..model.settings import ProducerAccessMode, ProducerSettings

# ------------------------------------------------------------------------------------------------------ outcomes
# The outcome of an entry, told to the callbacks of its messages: in the event loop, all of one entry in a loop.


if TYPE_CHECKING:
    from ...runtime.metrics import Histogram

_LOG = logging.getLogger("magnetar.client")

LOSS_LOG_INTERVAL_S = 10.0
"""Least seconds between two lines of the log about messages that failed after their sending was reported."""


def report_to_callbacks(outcome: ReportOutcome, topic: TopicName) -> None:
    """Calls the callback of each message of a batch with its outcome: Result.Ok and the message's id, or the Result of
    the error and an empty id. An exception of a callback is logged."""
    batch, error, ledger_id, entry_id = outcome
    if error is None:
        confirm_messages(batch, topic.partition, ledger_id, entry_id)
        return
    if isinstance(error, MessageNotEncodable):
        _LOG.error("%s: %s", topic, error.message, exc_info=error.__cause__)
    result, missing = translate_to_result(error), MessageId()
    for callback in batch.callbacks:
        _call(callback, result, missing)


def notify_transaction(txn: TransactionPort, where: PartitionClientPort, outcome: ReportOutcome) -> None:
    """Reports the outcome of an entry to the transaction `txn` in which it was sent. `where`: the producer that sent
    it. Must be called after the callbacks of the entry's messages."""
    batch, error, ledger_id, entry_id = outcome
    if error is None:
        txn.on_stored(where, batch.message_count, Position(ledger_id, entry_id))
    else:
        txn.on_refused(batch.message_count, error)


def translate_to_result(error: MagnetarError) -> Result:
    """Returns the Result with which callbacks are called for a message that failed with `error`."""
    return Result.InvalidMessage if isinstance(error, MessageNotEncodable) else translate_error(error).result


def confirm_messages(batch: OutgoingBatch, partition: int, ledger_id: int, entry_id: int) -> None:
    """Calls the callback of each message of a stored batch, with Result.Ok and the message's id. An exception of a
    callback is logged."""
    ok, size = Result.Ok, len(batch.callbacks)
    indexes = count(0) if batch.message is None and entry_id >= 0 else repeat(-1)
    chunks = () if batch.chunks is None or entry_id < 0 or batch.chunks[0][1] < 0 else tuple(batch.chunks)
    for callback, index in zip(batch.callbacks, indexes, strict=False):
        if callback is not None:
            try:
                callback(ok, UncheckedMessageId(partition, ledger_id, entry_id, index, size, _chunks=chunks))
            except BaseException as error:  # of the application: the other callbacks, and flushes, go on
                log_foreign_error(error, "a send callback")


def _call(callback: SendCallback, *outcome: Any) -> None:
    if callback is not None:
        try:
            callback(*outcome)
        except BaseException as error:
            log_foreign_error(error, "a send callback")


def end_waiting_flushes(waiters: Sequence[asyncio.Future[None]]) -> None:
    """Ends the waiting futures `waiters` of `flush` calls, because all messages before these calls have outcomes."""
    for each in waiters:
        if not each.done():
            each.set_result(None)


# -------------------------------------------------------------------------------------------- partition_producer


class PartitionProducer:
    """The producer of one partition: exchanges frames with the broker, passes them as facts to a ProducerCore, and
    carries out the core's effects. It is the owner of an Attachment. See the head of the module."""

    def __init__(
        self, connections: Connections, topic: TopicName, settings: ProducerSettings, max_pending: int,
        encrypt: EncryptFunction | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.is_producer = True
        self.waits = settings.access_mode == ProducerAccessMode.WaitForExclusive
        self.redrives_to_one = False  # its broker delivers what is REDRIVEN_TO a subscription to that one alone
        self.why = ""  # the reason that was given for the last message that failed; empty: none
        self._failure: MagnetarError | None = None  # of that one
        self.room: deque[Callable[[], None]] = deque()  # called, once, when there is room again
        self._connections = connections
        self._settings = settings
        world = connections.world
        self._now, self._wall_ms = world.clock.monotonic, world.clock.wall_ms
        self._instance = world.rng.randbytes(8).hex()  # our next connection replaces our last one
        options = make_producer_options(settings, encrypt, persistent=topic.persistent)
        self.core = ProducerCore(
            settings.producer_name or "", options, max_pending=max_pending, lock=Lock(),
            backoff=connections.backoff(), uuid=world.rng.randbytes(8).hex() if options.chunking else "",
            memory=connections.send_memory,
        )  # fmt: skip
        self.latencies: Histogram | None = None  # seconds from encoding an entry to its receipt
        if connections.settings.latency_statistics:
            from ...runtime.metrics import DURATION_BOUNDS, Histogram  # who does not ask for it need not load it

            self.latencies = Histogram(DURATION_BOUNDS)
        self._attachment = Attachment(connections, self)
        self._loop = asyncio.get_running_loop()
        self._wakes = connections.event_loop_caller
        self._timer = DueTimer(self._now, self._time_passed, self.on_failure)
        self._opened: asyncio.Future[None] | None = None
        self._lost = 0  # messages of which the log was told
        self._loss_due = 0.0  # when the next line about lost messages may be logged
        self._share: SendAllowance | None = None  # of the transaction in which a message was sent last

    # ------------------------------------------------------------------------------ from any thread
    def add(self, payload: bytes, callback: SendCallback) -> None:
        """Adds a message that has a payload and no other field; `callback` gets its outcome. May be called from any
        thread. If the message is refused, raises the reason: ProducerQueueIsFull, MemoryBufferIsFull, MessageTooBig,
        AlreadyClosed, or the error that ended the producer."""
        added = self.core.add(payload, callback)
        if added is not None:
            if added is not MessageAddResult.WAKE:
                raise self._refusal(added, len(payload))
            self._wake()

    def add_payload_in_transaction(self, txn: TransactionPort, payload: bytes, callback: SendCallback) -> None:
        """Adds a message that has a payload and no other field, in the transaction `txn`, as `add` does. Also raises
        the errors of `TransactionPort.begin_operation`, such as TransactionEnded."""
        share = self._share
        if share is None or share.txn is not txn:
            share = self._share_of(txn)
        while (added := self.core.add(payload, callback, share)) is MessageAddResult.NOT_IN_TRANSACTION:
            share = self._share_of(txn)
        if added is not None:
            if added is not MessageAddResult.WAKE:
                raise self._refusal(added, len(payload))
            self._wake()

    def _check_transaction(self) -> None:
        if (acks := self._settings.acks) != "quorum":
            raise OperationNotSupported(
                f"a commit has to know that its messages are stored: no producer with acks={acks} sends in a "
                "transaction"
            )

    def _share_of(self, txn: TransactionPort) -> SendAllowance:
        self._check_transaction()
        self._share = None  # of an earlier one, which is kept no longer
        share = self._share = txn.allow_sends(self, self._connections, self.core.lock)
        return share

    def add_message(self, message: OutgoingMessage, callback: SendCallback) -> None:
        """Adds a message with any fields, as `add` does. Raises InvalidMessage if the message cannot be encoded, and,
        for a message in a transaction, the errors of `TransactionPort.begin_operation`."""
        if message.txn is None:
            self._add_message(message, callback)
            return
        self._check_transaction()
        message.txn.begin_operation(self, self._connections)
        try:
            self._add_message(message, callback)
        except PulsarException:
            message.txn.cancel_operation(message=True)
            raise

    def _add_message(self, message: OutgoingMessage, callback: SendCallback) -> None:
        try:
            added = self.core.add_message(message, callback)
        except MagnetarError as error:
            raise translate_error(error) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidMessage(f"the message cannot be encoded: {error}") from error
        if added is not None:
            if added is not MessageAddResult.WAKE:
                raise self._refusal(added, len(message.payload))
            self._wake()

    def encode_message(self, message: OutgoingMessage, schema_version: bytes) -> bytes:
        """Returns the encoded entry of a message that is not sent now, but published by a broker later.
        `schema_version`: that of its schema; empty: none. Raises AlreadyClosed if the producer is closed,
        MessageTooBig, or InvalidMessage if the message cannot be encoded."""
        if (ended := self.core.error or self.core.closing) is not None:
            raise AlreadyClosed("the producer is closed") from ended
        try:
            return self.core.encode_message(message, self._wall_ms(), schema_version)
        except PulsarException:
            raise
        except MagnetarError as error:
            raise translate_error(error) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidMessage(f"the message cannot be encoded: {error}") from error

    def _refusal(self, added: MessageAddResult, size: int) -> PulsarException:
        core = self.core
        if added is MessageAddResult.TOO_LARGE:
            return MessageTooBig(f"a message of {size} bytes; the limit is {core.payload_max}", size=size)
        if added is MessageAddResult.NO_MEMORY:
            assert core.memory is not None, "it has a bound"
            return MemoryBufferIsFull(
                f"{core.memory.reserved_bytes} bytes of all producers wait for their acknowledgement; wait, or set "
                "block_if_queue_full", limit=core.memory.limit_bytes,
            )  # fmt: skip
        if (ended := core.error or core.closing) is not None:
            over = translate_error(ended)
            refusal = type(over)(over.message)
            refusal.__cause__ = over
            return refusal
        return ProducerQueueIsFull(
            f"{core.max_pending} messages wait for their acknowledgement; wait, or set block_if_queue_full",
            limit=core.max_pending,
        )

    def send_waiting_now(self) -> None:
        """Closes the open batches and sends them, also while other batches are in flight. Must be called in the event
        loop."""
        self._do(self.core.publish_open_batches(self._now(), self._wall_ms()))

    def flush_soon(self) -> None:
        """Sends the open batches without waiting for their delay: at once if nothing is in flight, else when all
        entries in flight have outcomes. Does not wait. May be called from any thread."""
        self.core.urgent = True
        if not self.core.publish_wanted:
            self._wake()

    def _wake(self) -> None:
        self.core.publish_wanted = True
        self._wakes.call(self._turn, self.on_failure)

    def make_exception(self, result: Result) -> PulsarException:
        """Returns the exception to raise for a message that has just failed with `result`: the last failure of this
        producer if it has that Result, else a general exception of that Result."""
        if self._failure is not None and (known := translate_error(self._failure)).result is result:
            told = type(known)(f"a message to {self.topic}: {known.message}", **known.fields)
            told.__cause__, told.definite, told.retryable = known, known.definite, known.retryable  # type: ignore[misc]
            return told
        return make_exception_for_result(result, f"a message to {self.topic}: {self.why or result.name}")

    # ------------------------------------------------------------------------------ facts in
    def _turn(self) -> None:
        self._do(self.core.publish_closed_batches(self._now(), self._wall_ms()))

    def _time_passed(self, now: float) -> None:
        self._do(self.core.run_timers(now, self._wall_ms()))

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        left, now = iter(frames), self._now()
        while self._attachment.is_attached and (rare := self._take_outcomes(left, now)) is not None:
            self._do(self._rare(rare.WhichOneof("kind"), rare, now))

    def _take_outcomes(self, left: Iterator[wire.ServerFrame], now: float) -> wire.ServerFrame | None:
        """Processes receipts and credit up to the first frame of another kind, which is returned; None if there is
        none."""
        effects: list[ProducerEffect] = []
        core, partition = self.core, self.topic.partition
        try:
            for frame in left:
                kind = frame.WhichOneof("kind")
                if kind == "receipt":
                    receipt = frame.receipt
                    ledger_id, entry_id = receipt.ledger_id, receipt.entry_id
                    batch = core.take_confirmed(receipt.sequence_id, ledger_id, entry_id)
                    if batch is None:
                        effects += core.on_entry_receipt(receipt.sequence_id, ledger_id, entry_id, now)
                        continue
                    if self.latencies is not None:
                        self.latencies.observe_value(now - batch.born)
                    confirm_messages(batch, partition, ledger_id, entry_id)
                    if batch.txn is not None:
                        notify_transaction(batch.txn, self, ReportOutcome(batch, None, ledger_id, entry_id))
                    if batch.waiters is not None:
                        end_waiting_flushes(batch.waiters)
                elif kind == "credit":
                    effects += core.on_credit_granted(frame.credit)
                else:
                    return frame
        finally:
            if effects:
                self._do(effects)
            else:
                self._after_outcomes()
        return None

    def _rare(self, kind: str | None, frame: wire.ServerFrame, now: float) -> list[ProducerEffect]:
        match kind:
            case "failed":
                return self.core.on_refused(frame.failed.sequence_id, from_wire(frame.failed.error), now)
            case "producer_opened":
                opened = frame.producer_opened
                self.redrives_to_one = opened.redrives_to_one
                self._attachment.on_opened()
                return self.core.on_opened(
                    opened.producer_name, opened.last_sequence_id, opened.max_message_size, opened.credit,
                    opened.topic_epoch, now, self._wall_ms(), opened.schema_version,
                )  # fmt: skip
            case "first_copy":
                return self.core.on_first_copy(frame.first_copy)
            case "waits":
                return self.core.on_publish_delayed(from_wire(frame.waits), now)
            case "done":
                self._attachment.on_closed()
            case "closed":
                self._attachment.on_closed_by_broker(from_wire(frame.closed))
            case _:
                self._attachment.on_unexpected_frame(kind)
        return []

    def on_lost(self, error: MagnetarError) -> None:
        if isinstance(error, PRODUCER_FINAL_ERRORS):
            _LOG.warning("%s: the producer is finished: %s", self.topic, error)
        elif self.core.state is not PartitionClientState.CLOSED:
            _LOG.info("%s: the producer reconnects: %s", self.topic, error)
        self._do(self.core.on_lost(error, self._now()))

    # ------------------------------------------------------------------------------ effects
    def _do(self, effects: list[ProducerEffect]) -> None:
        left = iter(effects)
        try:
            for effect in left:
                if type(effect) is SendEntry:
                    self._attachment.publish(effect.entry)
                elif type(effect) is ReportOutcome:
                    self._settle(effect)
                elif type(effect) is ReportSent:
                    self._report_sent(effect.batch)
                else:
                    self._do_rare(effect)
        finally:  # no message loses its outcome by what failed before it
            for effect in left:
                if type(effect) is ReportOutcome:
                    self._settle(effect)
        self._after_outcomes()

    def _report_sent(self, batch: OutgoingBatch) -> None:
        """Calls the callbacks of a batch whose entry was written to the connection, or has one copy, once and for all:
        its position is not known, and its outcome is reported to none of them."""
        callbacks, batch.callbacks = batch.callbacks, [None] * len(batch.callbacks)
        missing = UncheckedMessageId(self.topic.partition, -1, -1, -1, len(callbacks), _chunks=())
        for callback in callbacks:
            _call(callback, Result.Ok, missing)

    def _do_rare(self, effect: ProducerEffect) -> None:
        match effect:
            case EndFlushes(waiters):
                end_waiting_flushes(waiters)
            case AttachToBroker(after_s) if self.core.state is PartitionClientState.OPENING:
                self._attachment.open()
            case AttachToBroker(after_s):
                self._attachment.reopen(after_s)
            case DetachFromBroker():
                self._attachment.close_at_broker()
            case LogWarning(text):
                _LOG.warning("%s: %s", self.topic, text)
            case EndWithError(error):
                self._close_with(error)

    def _after_outcomes(self) -> None:
        core = self.core
        if self.room and core.has_room:
            self._make_room()
        if core.urgent and core.must_publish:
            core.publish_wanted = True
            self._loop.call_soon(run_logging_errors, self._turn, self.on_failure)
        if core.delay_due is not None or self._timer.at == inf:  # else it is set for the oldest entry, or an older one
            self._timer.move_to_earlier(core.next_timer_at)

    def _make_room(self) -> None:
        room, self.room = self.room, deque()
        for call in room:
            call()

    def _settle(self, outcome: ReportOutcome) -> None:
        if outcome.error is not None:
            self.why, self._failure = outcome.error.message, outcome.error
        report_to_callbacks(outcome, self.topic)
        batch = outcome.batch
        if outcome.error is not None and self.core.lost != self._lost:
            self._log_loss(outcome.error)
        if batch.txn is not None:
            notify_transaction(batch.txn, self, outcome)
        if batch.waiters is not None:
            end_waiting_flushes(batch.waiters)

    def _log_loss(self, error: MagnetarError) -> None:
        """Writes a warning that messages may be lost whose sending was reported; at most one in LOSS_LOG_INTERVAL_S."""
        self._lost = self.core.lost
        if (now := self._now()) >= self._loss_due:
            self._loss_due = now + LOSS_LOG_INTERVAL_S
            acks = self._settings.acks
            _LOG.warning(
                "%s: %d messages that were sent with acks=%s may be lost: %s", self.topic, self._lost, acks, error
            )

    # ------------------------------------------------------------------------------ the beginning
    def make_opening_frame(self) -> dict[str, Any]:
        core = self.core
        request = make_open_frame(
            self.topic,
            core.name,
            self._instance,
            self._settings,
            connection=core.count_open_attempt(),
            epoch=core.epoch,
        )
        return {"open_producer": request}

    async def open(self) -> None:
        """Opens the producer at the broker of the partition, and returns when it is open. Raises a permanent error at
        once (such as ProducerBusy, ProducerFenced, TopicNotFound or IncompatibleSchema); any other error when the
        operation's deadline passes, or earlier if the client has never reached a broker; AlreadyClosed after `abort`.
        The wait for exclusive access has no limit."""
        self._opened = self._loop.create_future()
        self._attachment.open()
        try:
            await asyncio.shield(self._opened)
        finally:
            self._opened = None

    def on_opening_done(self, error: MagnetarError | None) -> None:
        if error is not None:
            self._finish(translate_error(error))
        elif self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    # ------------------------------------------------------------------------------ the end
    async def flush(self) -> None:
        """Waits until all messages that were added before have outcomes; does not wait for messages that are added
        later. Returns at once if the producer has ended. Does not raise for messages that fail. An unforeseen error is
        logged and ends the producer."""
        if self.core.error is not None:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        try:
            self._do(self.core.flush(reached, self._now(), self._wall_ms()))
        except Exception as error:
            _LOG.exception("%s: the flush failed", self.topic)
            self.on_failure(error)
            return
        await reached

    def abort(self) -> None:
        """Ends the producer at once: the callbacks of messages without an outcome get AlreadyClosed. It is unknown
        whether messages in flight are stored."""
        self._finish(AlreadyClosed(self._connections.why_closed))

    def on_failure(self, error: Exception) -> None:
        """Fact: an unforeseen exception, `error`, was raised in the producer. Ends the producer: the exception is the
        outcome of every message that has none, and of every call that waits."""
        self._finish(translate_error(error))

    def _finish(self, error: PulsarException) -> None:
        self._do(self.core.finish(error))

    def _close_with(self, error: MagnetarError) -> None:
        self._timer.stop()
        self._attachment.stop()
        self._attachment.close_at_broker()
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(translate_error(error))
        self._make_room()

    async def close(self) -> None:
        """Refuses new messages, waits for the outcomes of those that were added, and closes the producer at its broker.
        Raises Timeout if messages have no outcome within the operation's time-out. Does nothing if the producer has
        ended."""
        if self.core.state is PartitionClientState.CLOSED:
            return
        closed = AlreadyClosed("the producer is closed")
        self.core.refuse_new_messages(closed)
        try:
            async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                await self.flush()
                self.core.begin_closing()
                await self._attachment.close()
        except TimeoutError as error:
            if self.core.state is not PartitionClientState.CLOSING:
                raise Timeout(
                    f"the producer was closed with messages under way{self.core.why_unacknowledged}"
                ) from error
            _LOG.info("%s: the broker did not answer to the producer's close", self.topic)
        finally:
            self._finish(closed)
