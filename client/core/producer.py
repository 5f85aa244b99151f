"""The core of one partition's producer: decides what is published and what is published again after a reconnect, and
reports the outcome of each message.

Facts in (a message was added, opened, a receipt, failed, credit, lost, time passed), effects out, in order. The driver
does each effect at once. Times are seconds of a monotonic clock; `wall_ms` is the publish time in ms since the epoch.

**Order.** Sequence ids are assigned when a message is added. Entries are published in that order; receipts arrive in
the order of the publishes, and each is for the oldest entry. After a reconnect all entries without an outcome are
published again before any new entry, in order, under the same ids.

**Credit.** An entry is published while the credit is above zero, and costs its length and ENTRY_COST_BYTES. A new
connection begins with a new credit.

With `reports_when_sent` (acks=none) a message is reported when its entry is sent first. All else is the same: it counts
as pending, and is sent again, until it has its outcome, and of a failure a line of the log is written.

With `reports_first_copy` (acks=one) a message is reported when the broker says that one bookie has its entry
(`on_first_copy`), if that is before its outcome; in order, and once, however often it is sent. All else is the same.

**Outcome.** Each message gets exactly one outcome: stored; or TimedOut (it is unknown whether the message is stored),
when `send_timeout_s` passed since its batch was closed; or the broker's error if that is definite; or the error with
which the producer was finished. When the oldest entry times out, all entries in flight time out with it, and the
connection is given up: a later entry must not be stored in the place of the oldest.

**Reconnect.** After a lost connection or an error that may pass the producer is opened again, with back-off; an error
of PRODUCER_FINAL_ERRORS finishes it. If a publish is refused and sent again, the error of the refusal is remembered, as
the reason of a later time-out (client/core/effects.py).

**Late opening.** A producer that is opened with its first message (`open_at_first_message`) keeps messages without
sequence ids until the broker has said which ids it knows; then the messages get their ids (`_admit`).

**Threads.** `add`, `add_message` and `flush_soon` may be called from any thread; `lock` guards the fields that they
use. All else belongs to one thread. Guard: tests/client/core/test_producer_walk.py."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Any

from ...proto.compression import UNCOMPRESSED_BYTES_MAX
from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.errors import ConnectionLost, MagnetarError, MessageTooLarge, TimedOut
from ...proto.names import Position
from ..common.rate_limits import SendMemoryLimit
from .batcher import Batcher, OutgoingBatch, OutgoingMessage, SendCallback, encode_batch_entry
from .chunking import (
    CHUNKED_BYTES_MAX,
    OutgoingEntryQueue,
    encode_entries,
    make_indefinite_error,
    make_invalid_content_error,
    make_single_message_batch,
)
from .effects import (
    PRODUCER_FINAL_ERRORS,
    SEALED_ERRORS,
    AttachedProducerOptions,
    AttachToBroker,
    DetachFromBroker,
    EndFlushes,
    EndWithError,
    ErrorLogThrottle,
    LogWarning,
    MessageAddResult,
    PartitionClientState,
    ProducerEffect,
    ReportOutcome,
    ReportSent,
    SendEntry,
)
from .failover import Backoff
from .transaction import SendAllowance


class ProducerCore:
    """The core of one partition's producer: decides which entries are published, and when, and reports the outcome of
    each message. `error`: the error with which the producer was finished; None: it is not finished. `now`: seconds of a
    monotonic clock; `wall_ms`: the time in ms since the epoch. Methods that return effects return those that the driver
    must carry out, in order. See the head of the module."""

    def __init__(
        self, name: str, options: AttachedProducerOptions, *, max_pending: int, lock: AbstractContextManager[Any],
        backoff: Backoff, uuid: str = "", memory: SendMemoryLimit | None = None,
    ) -> None:  # fmt: skip
        """Makes the core. `name`: the producer's name; empty: the broker chooses one. `max_pending`: the most messages
        without an outcome. `uuid`: identifies this instance of the producer in chunked messages. `memory`: the memory
        that all producers of the client share; None: no limit."""
        self.memory = memory
        self.name = name
        self.state = PartitionClientState.OPENING
        self.pending = 0  # messages without an outcome, those that wait for their batch included
        self.max_pending = max_pending
        self.stored = self.failed = 0  # messages
        self.stored_bytes = 0  # of entries
        self.connections = 0  # openings that were begun
        self.epoch = 0  # of the topic, while this producer has it for itself
        self.encoding = options.encoding  # with the schema's version once the producer is open
        self.error: MagnetarError | None = None  # it is finished
        self.closing: MagnetarError | None = None  # no further message is taken
        self.publish_wanted = False  # the driver was told to call `publish_closed_batches`
        self._options = options
        self.lock = lock  # also of our shares of transactions
        self._backoff = backoff
        self._uuid = uuid
        first = options.initial_sequence_id
        self.last_sequence_id = -1 if first is None else first  # the highest that was acknowledged
        self._batcher = Batcher(
            self.last_sequence_id + 1, messages_max=options.batch_messages_max, bytes_max=options.batch_bytes_max,
            batching=options.batching, key_based=options.key_based, batch_by=options.batch_by,
            summarized=options.summarized,
        )  # fmt: skip
        whole = CHUNKED_BYTES_MAX if options.chunking else ENTRY_BYTES_MAX
        self.payload_max = min(UNCOMPRESSED_BYTES_MAX, whole) if options.encoding.compression else whole
        self._entry_max = ENTRY_BYTES_MAX
        self._entries = OutgoingEntryQueue()
        self.delay_due: float | None = None  # of the open batches
        self.urgent = False  # what is open goes out without its delay, once nothing is under way; any thread sets it
        self._reasons = ErrorLogThrottle()
        self.lost = 0  # messages that were reported when they were sent, or had one copy, and then failed
        self._reports_early = options.reports_when_sent or options.reports_first_copy
        self._unreported: deque[OutgoingBatch] | None = None  # with acks=one: those sent whose copy was not reported
        self._early: deque[tuple[OutgoingMessage | None, Any]] | None = None  # and its callback; None: a flush's waiter

    # ------------------------------------------------------------------------------ from any thread
    def add(
        self, payload: bytes, callback: SendCallback, share: SendAllowance | None = None
    ) -> MessageAddResult | None:
        """Adds a message that has a payload and no other field. `share`: the allowance of its transaction, made with
        this core's `lock`; None: no transaction. May be called from any thread.

        Returns None if the message was added and waits with others, MessageAddResult.WAKE if it was added and the
        driver must call `publish_closed_batches` soon, else the reason why it is refused."""
        if len(payload) > self.payload_max:
            return MessageAddResult.TOO_LARGE
        with self.lock:
            if self.pending >= self.max_pending or self.error is not None:
                return self._refusal_reason()
            txn = None
            if share is not None and not share.left:
                return MessageAddResult.NOT_IN_TRANSACTION
            if self.memory is not None and not self.memory.reserve(len(payload)):
                return MessageAddResult.NO_MEMORY
            if share is not None:
                share.left -= 1
                txn = share.txn
            try:
                if self._early is None:
                    self._batcher.add(payload, callback, txn)
                else:
                    self._early.append((OutgoingMessage(payload, txn=txn), callback))
            except BaseException:  # a Ctrl-C
                self._free(len(payload))
                raise
            self.pending += 1  # last: a Ctrl-C before it leaves no place of the queue taken for ever
        waits = self.publish_wanted or (self.delay_due is not None and not self._batcher.ready)
        return None if waits else MessageAddResult.WAKE

    def add_message(self, message: OutgoingMessage, callback: SendCallback) -> MessageAddResult | None:
        """Adds a message with any fields; returns a MessageAddResult or None, as `add` does. May be called from any
        thread. If the message cannot be encoded, raises the error of the encoder, and the message is not added."""
        if len(message.payload) > self.payload_max:
            return MessageAddResult.TOO_LARGE
        with self.lock:
            if self.pending >= self.max_pending or self.error is not None:
                return self._refusal_reason()
            if self.memory is not None and not self.memory.reserve(len(message.payload)):
                return MessageAddResult.NO_MEMORY
            if self._early is None:
                try:
                    self._batcher.add_message(message, callback)
                except BaseException:
                    self._free(len(message.payload))
                    raise
            else:
                self._early.append((message, callback))
            self.pending += 1
        waits = self.publish_wanted or (self.delay_due is not None and not self._batcher.ready)
        return None if waits else MessageAddResult.WAKE

    def add_entry(self, entry: bytes, sequence_id: int, callback: SendCallback) -> None:
        """Adds an entry that is already encoded, with its sequence id; `callback` gets its outcome. Must be called
        before the producer is opened, or between two calls of `publish_closed_batches`, in the thread of the driver."""
        batch = OutgoingBatch(sequence_id)
        batch.entry, batch.highest = entry, sequence_id
        batch.callbacks.append(callback)
        self._batcher.ready.append(batch)
        self.pending += 1

    def encode_message(self, message: OutgoingMessage, wall_ms: int, schema_version: bytes) -> bytes:
        """Returns the encoded entry of a message that a broker will publish later. `wall_ms`: its publish time in ms
        since the epoch. Raises MessageTooLarge if the entry is above the topic's limit, and the error of the encoder if
        the message cannot be encoded."""
        batch = OutgoingBatch(0)
        batch.message = message
        encrypt = message.encrypt or self.encoding.encrypt
        encoding = self.encoding._replace(encrypt=encrypt, schema_version=schema_version)
        entry = encode_batch_entry(batch, self.name, wall_ms, encoding)
        if len(entry) > self._entry_max:
            size, limit = len(entry), self._entry_max
            raise MessageTooLarge(f"an entry of {size} bytes; the limit is {limit}", size=size, limit=limit)
        return entry

    def _free(self, size: int) -> None:
        if self.memory is not None and size:
            self.memory.release(size)

    def _refusal_reason(self) -> MessageAddResult:
        return MessageAddResult.FULL if self.error is None and self.closing is None else MessageAddResult.CLOSED

    # ------------------------------------------------------------------------------ what is to be sent
    def open_at_first_message(self) -> None:
        """Delays the opening of the producer at its broker until there is a message: the first `publish_closed_batches`
        after a message was added returns AttachToBroker."""
        self._early = deque()

    @property
    def is_opening_delayed(self) -> bool:
        """Returns whether `open_at_first_message` was called, and no attempt to open the producer has begun since."""
        return self._early is not None and not self.connections

    def publish_closed_batches(self, now: float, wall_ms: int) -> list[ProducerEffect]:
        """Encodes the closed batches, and returns the effects that publish them, as far as the broker's credit allows.
        `now`: seconds of a monotonic clock; `wall_ms`: the publish time in ms since the epoch."""
        self.publish_wanted = False
        effects: list[ProducerEffect] = []
        if self._early and not self.connections:
            self.connections = 1
            effects.append(AttachToBroker(0.0))
        self._take_ready(now, wall_ms, effects)
        if self.delay_due is None and self._batcher.is_open:
            self.delay_due = now + self._options.batch_delay_s
        return effects

    def run_timers(self, now: float, wall_ms: int) -> list[ProducerEffect]:
        """Closes the batches whose delay is over. If the oldest entry waited for the send time-out, gives all entries
        the error TimedOut. Returns the effects. The driver must call it when the time `next_timer_at` is reached, or
        later."""
        effects: list[ProducerEffect] = []
        if self.delay_due is not None and now >= self.delay_due:
            self._close_batches()
            effects += self.publish_closed_batches(now, wall_ms)
        oldest = self._entries.oldest
        if oldest is not None and self._options.send_timeout_s and now >= oldest.born + self._options.send_timeout_s:
            self._expire(effects)
        return effects

    @property
    def next_timer_at(self) -> float | None:
        """Returns the time at which the driver must call `run_timers`; None if no timer runs."""
        oldest = self._entries.oldest if self._options.send_timeout_s else None
        if oldest is None:
            return self.delay_due
        expires = oldest.born + self._options.send_timeout_s
        return expires if self.delay_due is None or expires < self.delay_due else self.delay_due

    def flush(self, waiter: Any, now: float, wall_ms: int) -> list[ProducerEffect]:
        """Begins a flush: closes all open batches. When all messages that were added before this call have outcomes,
        the driver gets `waiter` back, in EndFlushes or in the batch of a ReportOutcome. Returns the effects that
        publish the messages."""
        effects = self.publish_open_batches(now, wall_ms)
        with self.lock:
            if self._early:
                self._early.append((None, waiter))
            else:
                self._wait_for_last(waiter, effects)
        return effects

    def publish_open_batches(self, now: float, wall_ms: int) -> list[ProducerEffect]:
        """Closes all open batches, even while other entries are in flight. Returns the effects that publish them."""
        self._close_batches()
        return self.publish_closed_batches(now, wall_ms)

    def _wait_for_last(self, waiter: Any, effects: list[ProducerEffect]) -> None:
        last = self._batcher.ready[-1] if self._batcher.ready else self._entries.youngest
        if last is None:
            effects.append(EndFlushes([waiter]))
        else:
            last.waiters = [*(last.waiters or ()), waiter]

    def _close_batches(self) -> None:
        self.delay_due = None
        with self.lock:
            self._batcher.close_batches()

    def _take_ready(self, now: float, wall_ms: int, effects: list[ProducerEffect]) -> None:
        ready, entries = self._batcher.ready, self._entries
        while True:
            while ready:
                self._encode(ready.popleft(), now, wall_ms, effects)
            if not self.urgent:
                break
            with self.lock:  # a thread adds first, then sets `urgent`: of what is not open yet the haste is to come
                is_open = self._batcher.is_open
                waits = is_open and bool(entries.sent or entries.unsent)  # it goes out after them (`must_publish`)
                self.urgent = waits
                if is_open and not waits:
                    self._batcher.close_batches()
            if waits or not ready:
                break
        self._publish(effects)

    def _encode(self, batch: OutgoingBatch, now: float, wall_ms: int, effects: list[ProducerEffect]) -> None:
        entries = self.error or encode_entries(
            batch, self.name, wall_ms, self.encoding, self._entry_max,
            chunks_of=f"{self.name}-{self._uuid}-{batch.sequence_id}" if self._options.chunking else None,
        )  # fmt: skip
        if isinstance(entries, MagnetarError):
            self._settle(batch, entries, effects)
        else:
            self._entries.add(batch, entries, now)

    def _publish(self, effects: list[ProducerEffect]) -> None:
        entries = self._entries
        if self.state is PartitionClientState.CONNECTED:
            while entries.unsent and entries.credit > 0:
                batch = entries.mark_next_sent()
                effects.append(SendEntry(batch.entry))
                if self._reports_early and batch.connections == 1:
                    if self._options.reports_when_sent:
                        effects.append(ReportSent(batch))
                    else:
                        if self._unreported is None:
                            self._unreported = deque()
                        self._unreported.append(batch)

    # ------------------------------------------------------------------------------ the connection
    def count_open_attempt(self) -> int:
        """Counts an attempt to open the producer at its broker; returns the number of this attempt."""
        self.connections += 1
        return self.connections

    def on_opened(
        self, name: str, last_sequence_id: int, entry_max: int, credit: int, epoch: int, now: float, wall_ms: int,
        schema_version: bytes = b"",
    ) -> list[ProducerEffect]:  # fmt: skip
        """Fact: the producer is open at its broker. `name`: its name there. `last_sequence_id`: the highest sequence id
        that the broker knows of a producer of this name; -1: none. `entry_max`: the most bytes of an entry; 0: not
        told. `credit`: the bytes that may be sent. `epoch`: that of the topic's exclusive producer. Returns the effects
        that publish waiting entries; none if the producer is finished."""
        effects: list[ProducerEffect] = []
        if self.state is PartitionClientState.CLOSED:
            return effects
        if self.state is PartitionClientState.OPENING:
            self.name = name
            initial = self._options.initial_sequence_id
            self._batcher.set_first_sequence_id(
                last_sequence_id, (last_sequence_id if initial is None else initial) + 1
            )
            if initial is None:
                self.last_sequence_id = last_sequence_id
            if entry_max:
                self._entry_max = min(ENTRY_BYTES_MAX, entry_max)
        elif entry_max:  # a smaller one counts from now on: the broker refuses what is larger
            self._entry_max = min(self._entry_max, entry_max)
        self.epoch = epoch
        before = self.encoding.schema_version
        if schema_version and before and schema_version != before:
            self._entries.replace_schema_version(before, schema_version)
        self.encoding = self.encoding._replace(schema_version=schema_version)
        self.state = PartitionClientState.CONNECTED
        self._entries.credit = credit
        self._backoff.reset()
        self._admit(effects)
        self._publish(effects)
        return effects + self.publish_closed_batches(now, wall_ms)

    def _admit(self, effects: list[ProducerEffect]) -> None:
        """Batches the messages that were added before the producer was open, and gives them their sequence ids."""
        if self._early is None:
            return
        with self.lock:  # at once: nothing that comes now may get in front of it
            early, self._early = self._early, None
            for message, called in early:
                if message is None:
                    self._batcher.close_batches()
                    self._wait_for_last(called, effects)
                    continue
                try:
                    self._batcher.add_message(message, called)
                except Exception as cause:
                    effects.append(
                        ReportOutcome(make_single_message_batch(called, message.txn), make_invalid_content_error(cause))
                    )
                    self.pending -= 1
                    self._free(len(message.payload))

    def on_credit_granted(self, size_bytes: int) -> list[ProducerEffect]:
        """Fact: the broker granted credit: the producer may send `size_bytes` more bytes. Returns the effects that
        publish waiting entries."""
        effects: list[ProducerEffect] = []
        self._entries.credit += size_bytes
        self._publish(effects)
        return effects

    def on_lost(self, error: MagnetarError, now: float) -> list[ProducerEffect]:
        """Fact: the connection broke, the broker closed the producer, or an attempt to open the producer again failed;
        `error` says why. Returns the effects: AttachToBroker after a pause, or EndWithError if the error is permanent;
        none while the producer closes."""
        effects: list[ProducerEffect] = []
        if self.state in (PartitionClientState.CLOSED, PartitionClientState.CLOSING):
            return effects
        if (text := self._reasons.admit(error, now)) is not None:
            effects.append(LogWarning(f"messages are not acknowledged and are sent again: {text}"))
        if isinstance(error, PRODUCER_FINAL_ERRORS):
            return effects + self.finish(error)
        self._reconnect(effects)
        return effects

    def _reconnect(self, effects: list[ProducerEffect]) -> None:
        if self.state is not PartitionClientState.CLOSING:
            self.state = PartitionClientState.RECONNECTING
            self._entries.on_disconnected()
            effects.append(AttachToBroker(self._backoff.next_delay_s()))

    # ------------------------------------------------------------------------------ outcomes
    def take_confirmed(self, sequence_id: int, ledger_id: int, entry_id: int) -> OutgoingBatch | None:
        """Removes and returns the oldest sent entry if the receipt with these ids is for that entry. Otherwise returns
        None; the caller must then pass the receipt to `on_entry_receipt`."""
        sent = self._entries.sent
        if not sent or sequence_id != sent[0].sequence_id:
            return None
        batch = sent.popleft()
        if self._unreported and self._unreported[0] is batch:
            self._unreported.popleft()
        self._reasons.last = ""  # what was wrong before says nothing about later messages
        if batch.highest > self.last_sequence_id:
            self.last_sequence_id = batch.highest
        count = len(batch.callbacks)
        self.stored += count
        self.stored_bytes += len(batch.entry)
        if batch.chunks is not None:
            batch.chunks.append(Position(ledger_id, entry_id))
        with self.lock:
            self.pending -= count
        if self.memory is not None and batch.payload_bytes:
            self.memory.release(batch.payload_bytes)
        return batch

    def on_first_copy(self, sequence_id: int) -> list[ProducerEffect]:
        """Fact: one bookie has the entry with this sequence id, and all entries before it. Returns the effect that
        reports it; none if the entry was reported, or if an earlier one has to be reported first (it was refused, and
        the broker tells that after the outcomes of the entries before it)."""
        if not self._unreported or self._unreported[0].sequence_id != sequence_id:
            return []
        return [ReportSent(self._unreported.popleft())]

    def on_entry_receipt(self, sequence_id: int, ledger_id: int, entry_id: int, now: float) -> list[ProducerEffect]:
        """Fact: the broker sent a receipt: the entry with this sequence id is stored at the position (`ledger_id`,
        `entry_id`; -1: the position is not known, because the broker had stored the entry before). Returns the effects;
        none if the entry has its outcome already. A receipt of another entry than the oldest ends the attachment, and
        the producer is opened again."""
        batch = self.take_confirmed(sequence_id, ledger_id, entry_id)
        if batch is not None:
            return [ReportOutcome(batch, None, ledger_id, entry_id)]
        sent = self._entries.sent
        if not sent or sequence_id < sent[0].sequence_id:
            return []  # of an entry that has its outcome
        error = ConnectionLost(f"a receipt for {sequence_id} while {sent[0].sequence_id} is the oldest")
        return [DetachFromBroker(), *self.on_lost(error, now)]

    def on_refused(self, sequence_id: int, error: MagnetarError, now: float) -> list[ProducerEffect]:
        """Fact: the broker refused the oldest entry, which has this sequence id, with `error`. If the error is
        permanent, the entry's messages get it; else the producer reconnects and publishes the entry again. Returns the
        effects."""
        if not error.definite or error.retryable or isinstance(error, SEALED_ERRORS):
            return [DetachFromBroker(), *self.on_lost(error, now)]
        effects: list[ProducerEffect] = []
        sent = self._entries.sent
        if sent and sent[0].sequence_id == sequence_id:
            why = type(error)(f"the broker said: {type(error).__name__}: {error.message}")
            why.fields = dict(error.fields)
            for batch in self._entries.take_oldest_message():
                self._settle(batch, why if batch.connections <= 1 else make_indefinite_error(why), effects)
        return effects

    def on_publish_delayed(self, error: MagnetarError, now: float) -> list[ProducerEffect]:
        """Fact: the broker reported the reason, `error`, why an entry is not stored yet. The entry is not refused and
        may still be stored. Returns the effects: a LogWarning, or none."""
        if self._entries.sent and (text := self._reasons.admit(error, now)) is not None:
            return [LogWarning(f"messages are not acknowledged yet: {text}")]
        return []

    @property
    def is_full(self) -> bool:
        return self.pending >= self.max_pending

    @property
    def has_room(self) -> bool:
        """Returns whether senders that wait for room in the queue may continue: whether a quarter of the queue is free,
        so that they are not woken for each message."""
        return self.pending <= min(self.max_pending - 1, self.max_pending - (self.max_pending >> 2))

    @property
    def must_publish(self) -> bool:
        """Returns whether the driver must call `publish_closed_batches` now: open batches had to wait until all earlier
        entries have outcomes (`urgent`), and these have them now."""
        return self.urgent and not self._entries and not self.publish_wanted

    def _expire(self, effects: list[ProducerEffect]) -> None:
        error = TimedOut(f"no acknowledgement within {self._options.send_timeout_s:g} s{self.why_unacknowledged}")
        was_sent, expired = bool(self._entries.sent), self._entries.take_all()
        with self.lock:
            self._batcher.allow_sequence_id_reuse(expired[0].sequence_id)
        for batch in expired:
            self._settle(batch, error, effects)
        if was_sent:
            effects.append(DetachFromBroker())
            self._reconnect(effects)

    def _settle(self, batch: OutgoingBatch, error: MagnetarError, effects: list[ProducerEffect]) -> None:
        self.failed += batch.message_count
        with self.lock:
            self.pending -= batch.message_count
        self._free(batch.payload_bytes)
        effects.append(ReportOutcome(batch, error))
        if self._unreported and self._unreported[0] is batch:
            self._unreported.popleft()
        elif batch.connections and self._reports_early:
            self.lost += batch.message_count

    @property
    def why_unacknowledged(self) -> str:
        """Returns the reason why the broker does not acknowledge messages, as text to append to an error message; an
        empty text if the reason is not known."""
        return self._reasons.last and f"; {self._reasons.last}"

    # ------------------------------------------------------------------------------ the end
    def refuse_new_messages(self, error: MagnetarError) -> None:
        """Makes the producer refuse every message that is added from now on, with `error`. Messages that were added
        before are still sent."""
        with self.lock:
            self.closing = error
            self.max_pending = 0  # so that `add` looks

    def begin_closing(self) -> None:
        """Enters the state CLOSING, in which the producer is not opened again after a lost connection. All messages
        must have outcomes before this is called."""
        self.state = PartitionClientState.CLOSING

    def finish(self, error: MagnetarError) -> list[ProducerEffect]:
        """Ends the producer for good; every message without an outcome gets `error`. Returns the effects that report
        this, then EndWithError. A second call keeps the first error."""
        effects: list[ProducerEffect] = []
        self.state = PartitionClientState.CLOSED
        with self.lock:
            if self.error is None:
                self.error = error
            self._batcher.close_batches()
            early, self._early = self._early, None
        self.delay_due = None
        waiting = [*self._entries.take_all(), *self._batcher.ready]
        self._batcher.ready.clear()
        waiting += (
            make_single_message_batch(called, message.txn, len(message.payload))
            for message, called in early or ()
            if message is not None
        )
        for batch in waiting:
            self._settle(batch, make_indefinite_error(error) if batch.connections else error, effects)
        flushes = [waiter for message, waiter in early or () if message is None]
        return [*effects, EndFlushes(flushes), EndWithError(error)]

    def check(self) -> None:
        """Raises AssertionError if an invariant of this core, or of one of its parts, is broken."""
        self._batcher.check()
        self._backoff.check()
        self._entries.check()
        sent, unsent = self._entries.sent, self._entries.unsent
        assert not sent or self.state in (PartitionClientState.CONNECTED, PartitionClientState.CLOSING), (
            "what is sent has a connection"
        )
        unreported, entries = list(self._unreported or ()), [*sent, *unsent]
        assert unreported == [each for each in entries if each in unreported], "what is to be reported waits, in order"
        counted = self._batcher.open_message_count + sum(message is not None for message, _ in self._early or ())
        counted += sum(batch.message_count for batch in (*sent, *unsent, *self._batcher.ready))
        assert self.pending == counted, "each message without an outcome is in one place"
        if self.state is PartitionClientState.CLOSED:
            assert not counted, "a finished producer has told every outcome"
