"""Sends published entries (`Publish`) to the ledger that is being written, and confirms them in order. The driver of
log_queue_core.py.

    log: `queue.add` → `send_queued_publishes` → ledger → `on_appended` → cache, publisher, `on_confirmed`

The appender calls `on_stopped` when the ledger accepts no more entries, because it is full or has failed. Then the log
stops the queue, and opens the next ledger (broker/log/topic_log.py). Entries for which the ledger has no room wait in
the queue, in order.
Guarding tests: tests/broker/log/test_topic_log.py.

Also in this file, below its heading: log lines about slow publishes (slow_publishes).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from typing import Protocol

from ...ledger import LedgerWriter
from ...ledger.metadata_core import is_answered_from_memory
from ...ledger.placement_core import decode_bookie_groups
from ...ledger.reader_core import PayloadTailChecksum
from ...metadata.records import TopicLedger
from ...proto.checksum import JOINED_BYTES_MIN
from ...proto.entry import CHECKSUM_START, decode_message_columns, decode_properties, parse_header
from ...proto.errors import BackPressure, CorruptEntry, LedgerClosed, MagnetarError
from ...proto.expiry import EntryExpiry
from ...proto.names import Position, TopicName
from ...proto.states import TxnId
from ...runtime.clock import Clock
from ...runtime.files import Buffer
from ...runtime.metrics import WAITING_VALUES_MAX, Histogram
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, LedgerReplication
from .cache import StoredEntry, TailCache
from .log_queue_core import LogQueue, QueuedPublish, SequenceRange
from .log_shape_core import LedgerSpan, find_ledger_age_share
from .managed_ledger import ManagedLedger
from .unfolding import is_entry_slow_to_parse

# ------------------------------------------------------------------------------------------------------- publish
# An entry in flight to a topic's log, and its publisher, which gets the outcome.


class LogOutcomePort(Protocol):
    """The port through which a log reports the outcome of a publish to the producer that published the entry.
    `TopicProducer` implements it; the log calls exactly one of the two outcome methods for each publish. No method may
    wait or raise."""

    def on_confirmed(self, publish: Publish, position: Position, index: int) -> None:
        """Called when the entry of `publish` is stored at `position`. `index`: the index of its last message."""
        ...
    def on_first_copy(self, publish: Publish) -> None:
        """Called when a bookie has stored the entry of `publish`, for which `LogAppender.await_first_copy` was called,
        and the quorum has not. The outcome is reported later."""
        ...
    def on_failed(self, publish: Publish, error: MagnetarError) -> None:
        """Called when the entry of `publish` is not stored, or when it is not known whether it is stored
        (`error.definite` says which)."""
        ...


class Publish(QueuedPublish):
    """An entry on its way from the frame in which it arrived to its receipt. The producer, the queue of the log and the
    writer of the ledger share this object. `count`: the number of its messages; `client_bytes`: the size of its
    client-part; `numbers`: its sequence ids; `deliver_at_ms`: when consumers may get it (ms since the epoch; 0: at
    once); `publisher`: gets the outcome; `name`: the producer's name; `txn`: its transaction, None if it is in none;
    `timestamp_ms`: when it was queued (ms since the epoch); `arrived_s`: the same in monotonic seconds; `frames`: the
    stored bytes, () until the log has queued it."""

    __slots__ = ("arrived_s", "client_bytes", "client_part", "count", "deliver_at_ms", "expiry", "name", "numbers",
                 "publisher", "redriven_to", "timestamp_ms", "txn")  # fmt: skip

    def __init__(
        self, publisher: LogOutcomePort, client_part: Buffer, numbers: SequenceRange, *, count: int,
        deliver_at_ms: int = 0, txn: TxnId | None = None, name: str = "", checksum: int | None = None,
        expiry: EntryExpiry | None = None, redriven_to: str = "",
    ) -> None:  # fmt: skip
        self.frames: tuple[Buffer, ...] = ()  # here, and not by its bases: three calls a message less
        self.size, self.header, self.tail = 0, b"", None
        self.entry = self.index = -1
        self.txn = txn  # that it is in; None: it counts when it is stored
        self.name = name  # of its producer, as the entry says
        self.publisher = publisher
        self.client_part = client_part  # empty once it is in `frames`: its buffer may change then
        self.client_bytes = len(client_part)
        self.count = count
        self.numbers = numbers
        if checksum is not None and self.client_bytes >= JOINED_BYTES_MIN:  # a shorter one is read again
            self.tail = PayloadTailChecksum(
                checksum, self.client_bytes - CHECKSUM_START
            )  # what it covers, once it was compared
        self.deliver_at_ms = deliver_at_ms
        self.expiry = expiry
        self.redriven_to = redriven_to
        self.timestamp_ms = 0
        self.arrived_s = 0.0  # on the monotonic clock


# ------------------------------------------------------------------------------------------------------ appender


_UNLIMITED = 1 << 62
AGE_CHECK_INTERVAL_MS = 1000
"""Milliseconds between two checks of the age of a ledger, while it is written."""


class LogAppender:
    """Appends the publishes of one log to the ledger that is being written. `queue`: the publishes without an outcome;
    `writer`: the writer of this ledger, None before the first ledger; `timestamp_ms`: the time of the last publish (ms
    since the epoch; 0: none)."""

    __slots__ = (
        "_age_due_ms",
        "_cache",
        "_clock",
        "_config",
        "_first_copies",
        "_ledger_s",
        "_managed_ledger",
        "_on_confirmed",
        "_on_delayed",
        "_on_stopped",
        "_publish_seconds",
        "_room",
        "_room_s",
        "_shape",
        "_slow",
        "_slow_s",
        "_span",
        "_tasks",
        "queue",
        "timestamp_ms",
        "writer",
    )  # fmt: skip

    def __init__(
        self, clock: Clock, chain: ManagedLedger, cache: TailCache, config: BrokerConfig, tasks: Tasks, *,
        on_confirmed: Callable[[], None], on_delayed: Callable[[Position, int], None],
        on_stopped: Callable[[], None], publish_seconds: Histogram, slow_publishes: SlowPublishLog,
    ) -> None:  # fmt: skip
        self.queue: LogQueue[Publish] = LogQueue(0)
        self.writer: LedgerWriter | None = None
        self.timestamp_ms = 0
        self._clock = clock
        self._managed_ledger = chain
        self._shape = chain.shape
        self._span = LedgerSpan(-1, 0)  # of the ledger that is written
        self._cache = cache
        self._config = config
        self._tasks = tasks
        self._on_confirmed = on_confirmed
        self._on_delayed = on_delayed
        self._on_stopped = on_stopped
        self._publish_seconds = publish_seconds
        self._slow, self._slow_s = slow_publishes, slow_publishes.slow_s or inf
        self._ledger_s = self._room_s = 0.0  # the ledger took its first entry, and had room again last
        self._age_due_ms = 0  # the age of the ledger is looked at again
        self._first_copies: deque[Publish] | None = None  # in the order of the queue: whose first copy is to be told
        self._room: asyncio.Task[None] | None = None  # until the ledger has room for more

    # ------------------------------------------------------------------ sending
    def send_queued_publishes(self) -> None:
        """Sends queued publishes to the ledger, as long as it has room; continues by itself when it has room again.
        Calls `on_stopped` if no ledger is open, or if the ledger is full or has failed."""
        writer, queue, entries_max = self.writer, self.queue, self._config.roll_entries
        if writer is None:
            self._on_stopped()
            return
        if queue.next_entry + len(queue.pending) >= entries_max and not self._managed_ledger.has_room:
            entries_max = _UNLIMITED
        try:
            while queue.pending and queue.ledger_id >= 0 and queue.next_entry < entries_max:
                writer.append_for_listener(queue.pending[0])
                queue.on_entry_sent()
        except BackPressure:
            self._wait_room(writer)
        except LedgerClosed:  # no bookie was there to replace one that failed, or it is poisoned
            self._on_stopped()
            return
        looks = self.timestamp_ms >= self._age_due_ms or writer.adds.length >= self._config.roll_bytes
        if queue.next_entry >= entries_max or (looks and self._is_full(writer)):
            self._on_stopped()

    def _wait_room(self, writer: LedgerWriter) -> None:
        """Starts a task that continues to send publishes when the ledger has room again or has ended."""
        if self._room is None:
            self._room = self._tasks.spawn(writer.wait_room(), "topic-log-room")
            self._room.add_done_callback(self._has_room)

    def _has_room(self, room: asyncio.Task[None]) -> None:
        self._room = None
        if self.queue.ledger_id >= 0 and not room.cancelled():
            self._room_s = self._clock.monotonic()
            self.send_queued_publishes()

    def _is_full(self, writer: LedgerWriter) -> bool:
        if writer.adds.length >= self._config.roll_bytes:
            return self._managed_ledger.has_room
        if self.timestamp_ms < self._age_due_ms:
            return False
        self._age_due_ms = self.timestamp_ms + AGE_CHECK_INTERVAL_MS
        age_max_s = self._config.degraded_roll_s if self.is_degraded else self._config.roll_minutes * 60
        listed, ledger_id = self._managed_ledger.listed, self._span.ledger_id
        age_ms = self.timestamp_ms - listed.record.ledgers[-1].created_ms
        return (
            age_ms >= age_max_s * 1000 * find_ledger_age_share(listed.topic, ledger_id)
            and self._span.last_entry >= 0
            and self._managed_ledger.has_room
        )

    # ------------------------------------------------------------------ confirming
    def remove_ledger(self) -> None:
        """Forgets the writer of a ledger that has ended and that no other follows yet: the next publish needs one."""
        self.writer, self._span = None, LedgerSpan(-1, 0)
        self.queue.release_memory()

    def start_ledger(self, writer: LedgerWriter) -> None:
        """Starts to append to the ledger of `writer`. The topic's record must name this ledger already."""
        self.writer, self._age_due_ms, self._span = writer, 0, self._shape.tail_span
        writer.listener = self
        if self._first_copies is not None:
            writer.tell_first_copies = self._tell_first_copies
        self._ledger_s = self._clock.monotonic()
        self.queue.start_ledger(writer.ledger_id)

    def await_first_copy(self, publish: Publish) -> None:
        """Lets the publisher of the entry that was queued last be told when a bookie has stored the entry, if that is
        before its outcome. The entries of the topic are told in order."""
        if self._first_copies is None:
            self._first_copies = deque()
            if self.writer is not None:
                self.writer.tell_first_copies = self._tell_first_copies
        self._first_copies.append(publish)

    def _tell_first_copies(self, last_entry: int) -> None:
        waiting = self._first_copies
        while waiting and 0 <= waiting[0].entry <= last_entry:
            publish = waiting.popleft()
            publish.publisher.on_first_copy(publish)

    def _forget_first_copies(self, last_index: int) -> None:
        """Called before the outcomes of the publishes up to the message index `last_index` are reported."""
        waiting = self._first_copies
        while waiting and waiting[0].index <= last_index:
            waiting.popleft()

    def take_all_publishes(self) -> list[Publish]:
        """Removes and returns all publishes without an outcome, in order. After this call no ledger accepts entries of
        this log."""
        self._first_copies = None
        return self.queue.take_all()

    def on_appended(self, writer: LedgerWriter, last_entry: int) -> None:
        """Called when the ledger has stored the entries up to `last_entry`: confirms their publishes, in order. Does
        nothing if `writer` is not that of the present ledger."""
        if writer is not self.writer:
            return  # its end is known, and so is what of it was confirmed
        if confirmed := self.queue.take_confirmed(last_entry):
            self.confirm_publishes(confirmed)
            self._on_confirmed()

    def on_append_failed(self, writer: LedgerWriter) -> None:
        """Called when the writer of the ledger has failed. The log then continues in another ledger. Does nothing if
        `writer` is not that of the present ledger."""
        if writer is self.writer:
            self._on_stopped()

    def confirm_publishes(self, confirmed: Sequence[Publish]) -> None:
        """Confirms the publishes `confirmed`, in order: adds each entry to the log's shape and to the cache, and
        reports to its publisher that it is stored. The entries must be stored in the ledger that is being written, or
        in the last one."""
        span, cache, now_s, seconds = self._span, self._cache, self._clock.monotonic(), self._publish_seconds
        waits = seconds.waiting
        if self._first_copies and confirmed:
            self._forget_first_copies(confirmed[-1].index)
        if confirmed and now_s - confirmed[0].arrived_s > self._slow_s:
            topic = self._managed_ledger.listed.topic
            self._slow.log_slow_publishes(
                topic, self.writer, confirmed, now_s, ledger_s=self._ledger_s, room_s=self._room_s
            )
        for publish in confirmed:
            waits.append(now_s - publish.arrived_s)
            size, index = publish.size, publish.index
            position = Position(span.ledger_id, publish.entry)
            span.last_entry, span.end_index = publish.entry, index + 1
            span.size += size
            cache.add(
                StoredEntry(
                    position, publish.frames, publish.count, index, size, publish.timestamp_ms, publish.numbers.uuid,
                    publish.deliver_at_ms, None, publish.expiry, publish.redriven_to,
                )
            )  # fmt: skip
            if publish.deliver_at_ms and publish.txn is None:  # else that is found when it is read, after a commit
                self._on_delayed(position, publish.deliver_at_ms)
            publish.publisher.on_confirmed(publish, position, index)
        if len(waits) >= WAITING_VALUES_MAX:
            seconds.count_waiting_values()

    def end_ledger(self, last_entry: int) -> tuple[list[Publish], TopicLedger | None]:
        """Ends the ledger that is being written. `last_entry`: its last entry. Returns the publishes that it has stored
        and that are not confirmed yet, and the row that describes the closed ledger in the topic's list of ledgers.
        Returns ([], None) if no ledger was written."""
        if self.writer is None:
            return [], None
        stored = self.queue.end_ledger(last_entry)
        end_index = stored[-1].index + 1 if stored else self._shape.end_index
        return stored, self._managed_ledger.make_closed_ledger_row(self.writer.ledger_id, last_entry, end_index)

    # ------------------------------------------------------------------ questions
    @property
    def replication(self) -> LedgerReplication | None:
        """Returns the replication (the quorums) of the ledger that this owner is writing or wrote last; None if this
        owner has created no ledger."""
        if self.writer is None:
            return None
        record = self.writer.record
        groups, unsynced = decode_bookie_groups(record.properties), is_answered_from_memory(record)
        return LedgerReplication(record.ensemble_size, record.write_quorum, record.ack_quorum, groups, unsynced)

    @property
    def is_degraded(self) -> bool:
        """Returns True if the ledger that is being written has fewer bookies, or fewer copies, than the policy asks
        for."""
        writer = self.writer
        return writer is not None and (
            writer.record.ensemble_size < self._managed_ledger.wanted_replication.ensemble_size
            or writer.is_short_of_bookies
        )


# ------------------------------------------------------------------------------------------------------- slow_publishes
# Log lines about slow publishes, which took longer than `slow_publish_s` from their arrival to their confirmation. A
# line says how long each step took.
#
#     WARNING magnetar.broker.slow: slow publish topic=… producer=… trace=… ledger=7 entry=12 entries=3 arrived=…Z
#         ledger_ms=None room_ms=None bookies={"…": {"sent_ms": 2, "stored_ms": 812}, "…": {}} confirmed_ms=813
#
# With `--log-format json` these are members of the line. Milliseconds count from the arrival: the entry was queued in
# the log, after the gate of its topic (`arrived` is the time of day).
#
# | name | when |
# |---|---|
# | `ledger_ms` | a new ledger took entries: until then there was none, or the end of the last was being found |
# | `room_ms` | the ledger had room again: too much was at bookies that had not answered |
# | `bookies` | each was sent the entry, and had stored it (below) |
# | `confirmed_ms` | the ack quorum had stored it, and everything before it |
#
# A bookie with `{}` has stored it in less than `slow_publish_s`, one with `"stored": false` not before the
# confirmation.
#
# `trace` is the trace id of the first message in the entry that carries a context (`traceparent`), and is left out
# where none does, or the payload is encrypted. **Cost.** Publishes that are confirmed together are in the order of
# their arrival: only the first one is compared, and nothing more is done if it is in time. One line describes the first
# slow entry, and `entries` is the number of slow ones. A broker writes SLOW_ENTRY_LINES_MAX lines in SLOW_ENTRY_LINES_S
# seconds; `left_out` says how many were not written. Guards: tests/broker/log/test_slow_publishes.py.

_LOG = logging.getLogger("magnetar.broker.slow")

SLOW_ENTRY_LINES_MAX, SLOW_ENTRY_LINES_S = 10, 10.0
TRACE_KEYS = ("traceparent", "messaging.trace_parent")


class SlowPublishLog:
    """Writes log lines about slow publishes, for all topics of a broker. `slow_s`: a publish that takes longer than so
    many seconds is slow; 0: none is reported."""

    def __init__(self, clock: Clock, slow_s: float) -> None:
        self.slow_s = slow_s
        self._clock = clock
        self._since, self._lines, self._left_out = clock.monotonic(), 0, 0

    def log_slow_publishes(
        self, topic: TopicName, writer: LedgerWriter | None, confirmed: Sequence[Publish], now_s: float, *,
        ledger_s: float, room_s: float,
    ) -> None:  # fmt: skip
        """Writes a log line about publishes that are confirmed together, of which the first is slow. Writes at most
        SLOW_ENTRY_LINES_MAX lines in SLOW_ENTRY_LINES_S seconds; the next line has the number of those left out.
        `writer`: the writer of their ledger; `now_s`: the present time; `ledger_s`: when a new ledger began to accept
        entries; `room_s`: when the ledger had room again (all in monotonic seconds; 0: that did not happen)."""
        if now_s - self._since >= SLOW_ENTRY_LINES_S:
            self._since, self._lines = now_s, 0
        if self._lines >= SLOW_ENTRY_LINES_MAX:
            self._left_out += 1
            return
        self._lines += 1
        first = confirmed[0]
        began_s = first.arrived_s

        def after_ms(at_s: float) -> int | None:
            return round((at_s - began_s) * 1000) if at_s > began_s else None

        bookies: dict[str, dict[str, int | bool]] = {}
        for slot, bookie in first.sent.items():
            bookies[bookie] = {} if slot in first.acks else {"stored": False}
        for late in () if writer is None else writer.late_bookie_answers():
            if late.bookie in bookies and late.first_entry <= first.entry <= late.last_entry:
                bookies[late.bookie] = {
                    "sent_ms": round((late.sent_s - began_s) * 1000),
                    "stored_ms": round((late.answered_s - began_s) * 1000),
                }
        facts: dict[str, object] = {"topic": str(topic), "producer": first.name}
        if trace := find_trace_id(b"".join(first.frames)):
            facts["trace"] = trace
        facts |= {
            "ledger": -1 if writer is None else writer.ledger_id, "entry": first.entry,
            "entries": sum(now_s - each.arrived_s > self.slow_s for each in confirmed),
            "arrived": datetime.fromtimestamp(first.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "ledger_ms": after_ms(ledger_s), "room_ms": after_ms(room_s), "bookies": bookies,
            "confirmed_ms": after_ms(now_s),
        }  # fmt: skip
        if self._left_out:
            facts["left_out"], self._left_out = self._left_out, 0
        _LOG.warning("slow publish", extra=facts)


def find_trace_id(entry: bytes) -> str:
    """Returns the trace id (32 hexadecimal digits) of the first message in a stored entry that has a trace context.
    Returns "" if none has, or if the entry does not parse. Looks only at the head of an encrypted batch, and of one
    that takes long to parse."""
    with suppress(CorruptEntry):
        header = parse_header(entry, verify=False)
        contexts = [decode_properties(header.metadata)]
        if header.batched and not header.metadata.encryption_keys and not is_entry_slow_to_parse(header.metadata):
            contexts += map(decode_properties, decode_message_columns(header, entry)[0])
        for properties in contexts:
            for key in TRACE_KEYS:
                parts = properties.get(key, "").split("-")
                if len(parts) >= 4 and len(parts[1]) == 32:
                    return parts[1]
    return ""
