"""Sends what is published to the ledger that is written, and confirms it in order. The driver of core/log_queue.py.

    log → `queue.add` → `send` → ledger → `flush` → cache, publisher, `on_confirmed`

`on_stopped` is called when the ledger takes no more: it is full, or it has failed. Then the log stops the queue, and
opens the next ledger (broker/log/topic_log.py). What a ledger has no room for waits here, in its order.
Guarding tests: tests/broker/log/test_topic_log.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...ledger import LedgerWriter
from ...metadata.records import TopicLedger
from ...proto.names import Position
from ...runtime.clock import Clock
from ...runtime.monitoring.metrics import Histogram
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, Replication
from .cache import StoredEntry, TailCache
from .core.log_queue import LogQueue, Queued
from .managed_ledger import ManagedLedger
from .publish import Publish

_UNLIMITED = 1 << 62


class Appender:
    """Of one log. `writer` None: no ledger is written yet. `timestamp_ms`: of the last publish."""

    __slots__ = (
        "_cache", "_chain", "_clock", "_config", "_flush_due", "_loop", "_on_confirmed", "_on_delayed", "_on_stopped",
        "_publish_seconds", "_room", "_shape", "_tasks", "queue", "timestamp_ms", "writer",
    )  # fmt: skip

    def __init__(
        self, clock: Clock, chain: ManagedLedger, cache: TailCache, config: BrokerConfig, tasks: Tasks, *,
        on_confirmed: Callable[[], None], on_delayed: Callable[[Position, int], None],
        on_stopped: Callable[[], None], publish_seconds: Histogram,
    ) -> None:  # fmt: skip
        self.queue: LogQueue[Publish] = LogQueue(0)
        self.writer: LedgerWriter | None = None
        self.timestamp_ms = 0
        self._clock = clock
        self._chain = chain
        self._shape = chain.shape
        self._cache = cache
        self._config = config
        self._tasks = tasks
        self._on_confirmed = on_confirmed
        self._on_delayed = on_delayed
        self._on_stopped = on_stopped
        self._publish_seconds = publish_seconds
        self._flush_due = False
        self._room: asyncio.Task[None] | None = None  # until the ledger has room for more
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------ sending
    def send(self) -> None:
        """What the ledger has room for."""
        writer = self.writer
        if writer is None or not writer.writable:  # no bookie was there to replace one that failed, or it is poisoned
            self._on_stopped()
            return
        entries_max = self._config.roll_entries if self._chain.has_room else _UNLIMITED
        if not writer.has_room:
            self._wait_room(writer)
        else:
            for queued in self.queue.send(entries_max):
                future = queued.item.future = writer.append(queued.item.stored, tail=queued.item.tail)
                future.add_done_callback(self._wake)
                if not writer.has_room:
                    self._wait_room(writer)
                    break
        if self.queue.next_entry >= entries_max or self._is_full(writer):
            self._on_stopped()

    def _wait_room(self, writer: LedgerWriter) -> None:
        """Goes on sending when the ledger has room again, or has ended."""
        if self._room is None:
            self._room = self._tasks.spawn(writer.ready(), "topic-log-room")
            self._room.add_done_callback(self._has_room)

    def _has_room(self, room: asyncio.Task[None]) -> None:
        self._room = None
        if self.queue.ledger_id >= 0 and not room.cancelled():
            self.send()

    def _is_full(self, writer: LedgerWriter) -> bool:
        if not self._chain.has_room:
            return False
        if writer.length + writer.pending_bytes >= self._config.roll_bytes:
            return True
        age_max_s = self._config.degraded_roll_s if self.degraded else self._config.roll_minutes * 60
        age_ms = self.timestamp_ms - self._chain.record.ledgers[-1].created_ms
        return age_ms >= age_max_s * 1000 and self._shape.tail.last_entry >= 0

    # ------------------------------------------------------------------ confirming
    def _wake(self, future: asyncio.Future[int]) -> None:
        if not future.cancelled():
            future.exception()  # looked at; `flush` decides
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Confirms all that is done, in order: receipts of one turn leave together."""
        self._flush_due = False
        queue, confirmed = self.queue, False
        while (head := queue.head) is not None:
            future = head.item.future
            if future is None or not future.done():
                break
            if future.cancelled() or future.exception() is not None:
                self._on_stopped()
                break
            self.confirm(queue.confirmed(future.result()))
            confirmed = True
        if confirmed:
            self._on_confirmed()

    def confirm(self, queued: Queued[Publish]) -> None:
        publish, span = queued.item, self._shape.tail
        position = Position(span.ledger_id, queued.entry_id)
        size = len(publish.stored)
        span.last_entry, span.end_index = queued.entry_id, queued.index + 1
        span.size += size
        self._cache.put(
            StoredEntry(
                position, (publish.stored,), count=publish.count, index=queued.index, size=size,
                timestamp_ms=publish.timestamp_ms, chunk_of=publish.numbers.uuid, deliver_at_ms=publish.deliver_at_ms,
            )
        )  # fmt: skip
        if publish.deliver_at_ms and publish.txn is None:  # else it is found delayed when it is read, after a commit
            self._on_delayed(position, publish.deliver_at_ms)
        self._publish_seconds.observe(self._clock.monotonic() - publish.arrived_s)
        publish.publisher.confirmed(publish, position, queued.index)

    def ended(self, last_entry: int) -> tuple[list[Queued[Publish]], TopicLedger | None]:
        """The ledger ended there: what in it is not confirmed yet, and its row in the list (None: no ledger)."""
        if self.writer is None:
            return [], None
        stored = self.queue.ended(last_entry)
        return stored, self._chain.closed(last_entry, stored[-1].index + 1 if stored else self._shape.end_index)

    # ------------------------------------------------------------------ questions
    @property
    def replication(self) -> Replication | None:
        """Of the ledger that is written, or was last."""
        if self.writer is None:
            return None
        record = self.writer.record
        return Replication(record.ensemble_size, record.write_quorum, record.ack_quorum)

    @property
    def degraded(self) -> bool:
        """Whether that ledger is on fewer bookies, or has fewer copies, than the policy asked for."""
        writer = self.writer
        return writer is not None and (
            writer.record.ensemble_size < self._chain.wanted.ensemble_size or writer.short_of_bookies
        )
