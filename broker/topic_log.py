"""The log of a topic: a list of ledgers, one of which this broker writes. The driver of core/log_queue.py.

**Take-over** happens in the order of `TAKE_OVER` and nowhere else (ledger protocol §3.1; invariants 27, 28, 29):

    read_list        the ledgers and the version of the list, together
    recover_ledgers  every ledger that is not known to be closed, from the last on: its writer is fenced for good
    create_ledger    a new one, with an id above all in the list
    append_to_list   compare-and-set against what was read; from here on nobody else can append
    serve            nothing is confirmed, delivered or trimmed before

A write acknowledged by the old owner is in a listed ledger, and recovery keeps it; the old owner can confirm nothing
after its ledger was fenced and cannot append another one after the list changed. A crash between two steps leaves a
ledger that nobody refers to, or a listed empty one: the next take-over starts over.

**Switching** to the next ledger is one function, `_switch`, whether the old one is full, old or ended (§3.3; a bookie
that fails is replaced in the ledger, which ends only when none is there to replace it, or when it is poisoned):
stop sending → close the ledger and learn its true end → create → append to the list → confirm what the end covers →
send the rest again in order → go on. TopicFenced from the list, at any time: all work stops, `on_lost` is told.

**Back-pressure** is the producers' (broker/producer.py); what a ledger has no room for waits here, in its order.

Guarding tests: tests/broker/test_topic_log.py.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from ..bookie.ledger import LedgerClient, LedgerWriter
from ..metadata.records import TopicLedger, TopicRecord
from ..metadata.store import MetadataStore
from ..proto.entry import broker_part
from ..proto.errors import (
    DataLost,
    InternalError,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    NotOwner,
    OutcomeUnknown,
    TopicTerminated,
    Unavailable,
)
from ..proto.names import Position, TopicName
from ..runtime.metrics import SECONDS, Histogram
from ..runtime.world import World
from .cache import StoredEntry, TailCache
from .config import BrokerConfig, Policy, Replication
from .core.log_queue import LogQueue, Queued
from .core.log_shape import LogShape, Span
from .core.persistence import allowed
from .ledger_list import LedgerList, TopicFenced
from .log_reader import LogReader
from .patience import Patience
from .publish import Publish

_LOG = logging.getLogger("magnetar.broker.log")

TAKE_OVER = ("read_list", "recover_ledgers", "create_ledger", "append_to_list", "serve")
"""The order of a take-over, as names of methods of TopicLog."""

REROUTE_RETRY_S = 0.2
"""Between two tries to find a new ledger: bookies and metadata need a moment to come back."""
LEDGERS_MAX = 5_000
"""A list so long (0.8 MB of the 1 MiB that a node holds) gets new ledgers only when one fails: a list that cannot be
written ends the topic. The ledger that is written grows meanwhile, and trimming makes room."""


_UNLIMITED = 1 << 62


class State(enum.Enum):
    OPENING = "opening"
    SERVING = "serving"
    SWITCHING = "switching to the next ledger"
    TERMINATED = "terminated"
    CLOSING = "closing"
    CLOSED = "closed"
    LOST = "lost to another broker"


class TopicLog:
    """Call from one event loop. `on_confirmed` after entries were confirmed, once per turn; `on_lost` once, at most."""

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, cache: TailCache, config: BrokerConfig,
        topic: TopicName, *, replication: Policy, on_confirmed: Callable[[], None],
        on_lost: Callable[[MagnetarError], None], owned: Callable[[], bool], publish_seconds: Histogram | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.shape = LogShape()
        self.reader = LogReader(ledgers, self.shape, cache)
        self.state = State.OPENING
        self.recovered_ledgers = 0
        self._world = world
        self._ledgers = ledgers
        self._cache = cache
        self._config = config
        self._replication = replication
        self._wanted = Replication(1, 1, 1)  # by the policy, when the ledger that is written was made
        self._on_confirmed = on_confirmed
        self._on_lost = on_lost
        self._owned = owned
        self._publish_seconds = publish_seconds or Histogram(SECONDS)
        self._list = LedgerList(metadata, topic)
        self._changing = asyncio.Lock()  # one change of the list at a time
        self._queue: LogQueue[Publish] = LogQueue(0)
        self._writer: LedgerWriter | None = None
        self._known: list[TopicLedger] = []
        self._flush_due = False
        self._room: asyncio.Task[None] | None = None  # until the ledger has room for more
        self._switching: asyncio.Task[None] | None = None
        self._abandoning: asyncio.Task[None] | None = None
        self._timestamp_ms = 0
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------ take-over
    async def open(self) -> None:
        """Takes the topic over. TopicNotFound; TopicFenced when another broker is faster; Unavailable and others."""
        async with self._changing:
            for step in TAKE_OVER:
                await getattr(self, step)()

    async def read_list(self) -> None:
        self._known = list((await self._list.read()).ledgers)

    async def recover_ledgers(self) -> None:
        for number in reversed(range(len(self._known))):
            if self._known[number].entries < 0:
                self._known[number] = await self._recover(self._known[number])
        for known in self._known:
            self.shape.add(Span(
                known.ledger_id, known.first_index, known.entries - 1, known.end_index, known.size,
                closed_ms=known.closed_ms,
            ))  # fmt: skip
        self.shape.check()

    async def _recover(self, known: TopicLedger) -> TopicLedger:
        try:
            reader = await self._ledgers.recover(known.ledger_id)
        except LedgerNotFound as error:
            text = f"ledger {known.ledger_id} of topic {self.topic} is in its list and does not exist"
            if not await self._list.is_current():
                raise TopicFenced(f"topic {self.topic} has another owner, or just had", topic=self.topic) from error
            raise DataLost(text, topic=self.topic, ledger=known.ledger_id) from error
        self.recovered_ledgers += 1
        end_index = known.first_index
        if reader.last_entry >= 0:
            (last,) = await reader.read(reader.last_entry, reader.last_entry)
            end_index = StoredEntry.parse(Position(known.ledger_id, last.entry_id), last.payload).index + 1
        return _closed(known, reader.last_entry, reader.record.length, end_index, self._world.clock.wall_ms())

    async def create_ledger(self) -> None:
        if self._list.record.terminated:
            return
        self._writer = await self._create(self._known[-1].ledger_id if self._known else -1)

    async def append_to_list(self) -> None:
        if self._writer is None:
            return
        end_index = self._known[-1].end_index if self._known else 0
        empty = await self._commit(self._known, self._writer, end_index)
        await self._install(self._writer, end_index, empty)

    async def serve(self) -> None:
        end_index = self.shape.end_index
        self._queue = LogQueue(end_index)
        if self._writer is None:
            self.state = State.TERMINATED
        else:
            self._queue.opened(self._writer.ledger_id)
            self.state = State.SERVING

    async def _create(self, above: int) -> LedgerWriter:
        """A ledger whose id is above all in the list: ids come in blocks, and another broker may hold a later block."""
        wanted = self._wanted = await self._replication()
        while True:
            writer = await self._ledgers.create(
                ensemble_size=wanted.ensemble_size, write_quorum=wanted.write_quorum,
                ack_quorum=wanted.ack_quorum, properties={"topic": self.topic.full},
                shrink=allowed(degraded_writes=self._config.degraded_writes),
            )  # fmt: skip
            if writer.ledger_id > above:
                return writer
            await writer.abandon()
            await self._ledgers.delete(writer.ledger_id)

    async def _commit(self, closed: list[TopicLedger], writer: LedgerWriter, end_index: int) -> list[int]:
        """Commits the list with the new ledger at its end, without ledgers that closed empty; those are returned."""
        kept = [ledger for ledger in closed if ledger.entries != 0]
        created_ms = max(self._world.clock.wall_ms(), self._timestamp_ms)  # ages compare with `_timestamp_ms`
        new = TopicLedger(ledger_id=writer.ledger_id, first_index=end_index, created_ms=created_ms)
        try:
            await self._list.change([*kept, new])
        except TopicFenced:
            await writer.abandon()
            await self._delete([writer.ledger_id])  # certainly in no list
            raise
        return [ledger.ledger_id for ledger in closed if ledger.entries == 0]

    async def _install(self, writer: LedgerWriter, end_index: int, empty: list[int]) -> None:
        """The list was committed: the shape follows, and ledgers that are not in it any more are deleted."""
        self._forget(empty)
        self.shape.add(Span(writer.ledger_id, end_index, open=True))
        self.reader.writing(writer)
        await self._delete(empty)

    def _forget(self, ledger_ids: list[int]) -> None:
        for ledger_id in ledger_ids:
            self.shape.remove(ledger_id)
            self.reader.forget(ledger_id)
            self._cache.forget(ledger_id)

    async def _delete(self, ledger_ids: list[int]) -> None:
        """Of ledgers that the committed list does not hold. One that stays behind costs space and nothing else."""
        for ledger_id in ledger_ids:
            try:
                await self._ledgers.delete(ledger_id)
            except MagnetarError as error:
                _LOG.warning("%s: ledger %d is not deleted, nobody refers to it: %s", self.topic, ledger_id, error)

    # ------------------------------------------------------------------ publishing
    def publish(self, publish: Publish) -> None:
        """Queues an entry; its publisher is told the outcome. Raises at once when the log takes nothing."""
        state = self.state
        if state is not State.SERVING and state is not State.SWITCHING:
            raise self._refused()
        publish.timestamp_ms = self._timestamp_ms = max(self._world.clock.wall_ms(), self._timestamp_ms)
        publish.arrived_s = self._world.clock.monotonic()
        queued = self._queue.add(publish, publish.count)
        publish.frames = (broker_part(queued.index, publish.timestamp_ms), publish.client_part)
        if state is State.SERVING:
            self._send()

    def _refused(self) -> MagnetarError:
        if self.state is State.TERMINATED:
            return TopicTerminated(f"topic {self.topic} is terminated", topic=self.topic)
        return NotOwner(f"topic {self.topic} is {self.state.value}; look it up again", topic=self.topic)

    def _send(self) -> None:
        writer = self._writer
        assert writer is not None, "a log that serves has a writer"
        if not writer.writable:  # no bookie was there to replace one that failed, or it is poisoned
            self._start_switch()
            return
        entries_max = self._config.roll_entries if len(self._list.record.ledgers) < LEDGERS_MAX else _UNLIMITED
        if not writer.has_room:
            self._wait_room(writer)
        else:
            for queued in self._queue.send(entries_max):
                future = queued.item.future = writer.append(*queued.item.frames)
                future.add_done_callback(self._wake)
                if not writer.has_room:
                    self._wait_room(writer)
                    break
        if self._queue.next_entry >= entries_max or self._is_full(writer):
            self._start_switch()

    def _wait_room(self, writer: LedgerWriter) -> None:
        """Goes on sending when the ledger has room again, or has ended."""
        if self._room is None:
            self._room = self._loop.create_task(writer.ready())
            self._room.add_done_callback(self._has_room)

    def _has_room(self, room: asyncio.Task[None]) -> None:
        self._room = None
        if self.state is State.SERVING and not room.cancelled():
            self._send()

    @property
    def replication(self) -> Replication | None:
        """Of the ledger that is written, or was last."""
        if self._writer is None:
            return None
        record = self._writer.record
        return Replication(record.ensemble_size, record.write_quorum, record.ack_quorum)

    @property
    def wanted(self) -> Replication:
        """By the policy, when that ledger was made."""
        return self._wanted

    @property
    def degraded(self) -> bool:
        """Whether the ledger that is written is on fewer bookies, or has fewer copies, than the policy asked for."""
        writer = self._writer
        if writer is None or self.state not in (State.SERVING, State.SWITCHING):
            return False
        return writer.record.ensemble_size < self._wanted.ensemble_size or writer.short_of_bookies

    def _is_full(self, writer: LedgerWriter) -> bool:
        if len(self._list.record.ledgers) >= LEDGERS_MAX:
            return False
        if writer.length + writer.pending_bytes >= self._config.roll_bytes:
            return True
        age_max_s = self._config.degraded_roll_s if self.degraded else self._config.roll_minutes * 60
        age_ms = self._timestamp_ms - self._list.record.ledgers[-1].created_ms
        return age_ms >= age_max_s * 1000 and self.shape.tail.last_entry >= 0

    def _wake(self, future: asyncio.Future[int]) -> None:
        if not future.cancelled():
            future.exception()  # looked at; `_flush` decides
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Confirms all that is done, in order: receipts of one turn leave together."""
        self._flush_due = False
        queue, confirmed = self._queue, False
        while (head := queue.head) is not None:
            future = head.item.future
            if future is None or not future.done():
                break
            if future.cancelled() or future.exception() is not None:
                self._start_switch()
                break
            self._confirm(queue.confirmed(future.result()))
            confirmed = True
        if confirmed:
            self._on_confirmed()

    def _confirm(self, queued: Queued[Publish]) -> None:
        publish, span = queued.item, self.shape.tail
        position = Position(span.ledger_id, queued.entry_id)
        size = len(publish.frames[0]) + publish.size
        span.last_entry, span.end_index = queued.entry_id, queued.index + 1
        span.size += size
        self._cache.put(
            StoredEntry(
                position, publish.frames, count=publish.count, index=queued.index, size=size,
                timestamp_ms=publish.timestamp_ms,
            )
        )  # fmt: skip
        self._publish_seconds.observe(self._world.clock.monotonic() - publish.arrived_s)
        publish.publisher.confirmed(publish, position, queued.index)

    # ------------------------------------------------------------------ the next ledger
    def _start_switch(self) -> None:
        if self.state is State.SERVING:
            self.state = State.SWITCHING
            self._queue.stopped()
            self._switching = self._loop.create_task(self._switch())

    async def _switch(self) -> None:
        try:
            async with asyncio.timeout(self._config.reroute_timeout_s), self._changing:
                last_entry = await self._end_ledger()
                await self._next_ledger(last_entry)
        except TimeoutError:
            self.lose(Unavailable(f"topic {self.topic}: no new ledger within {self._config.reroute_timeout_s} s"))
        except MagnetarError as error:
            self.lose(error)
        except Exception as error:  # a fault of ours must not leave the topic between two ledgers for ever
            _LOG.exception("%s: the switch to the next ledger failed", self.topic)
            self.lose(InternalError(f"topic {self.topic}: the switch to the next ledger failed: {error!r}"))

    async def _end_ledger(self) -> int:
        """Closes the ledger, or learns how somebody else closed it; its true last entry."""
        writer, span = self._writer, self.shape.tail
        assert writer is not None, "a log that switches has a writer"
        patience = Patience()
        while True:
            try:
                last_entry, length = await writer.close()
                break
            except (LedgerFenced, OutcomeUnknown) as error:
                if not self._owned():
                    raise TopicFenced(f"topic {self.topic} is fenced by another broker") from error
                if patience.news(error):
                    _LOG.warning("%s: ledger %d did not end: %s; recovering it", self.topic, writer.ledger_id, error)
            try:
                reader = await self._ledgers.recover(writer.ledger_id)
                last_entry, length = reader.last_entry, reader.record.length
                break
            except LedgerNotFound as error:
                raise TopicFenced(f"topic {self.topic}: its ledger {writer.ledger_id} was removed") from error
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if patience.news(error):
                    _LOG.warning("%s: ledger %d is not recovered yet: %s", self.topic, writer.ledger_id, error)
            await asyncio.sleep(REROUTE_RETRY_S)
        self._flush()
        if last_entry < span.last_entry:
            raise DataLost(f"ledger {writer.ledger_id} was closed at {last_entry}, before {span.last_entry}")
        span.size = max(span.size, length)
        return last_entry

    async def _next_ledger(self, last_entry: int) -> None:
        """New ledger in the list; then, and only then, the old one's tail is confirmed and the rest sent again."""
        old = self.shape.tail
        stored = self._queue.ended(last_entry)
        end_index = stored[-1].index + 1 if stored else old.end_index
        ended = _closed(self._list.record.ledgers[-1], last_entry, old.size, end_index, self._world.clock.wall_ms())
        try:
            writer = await self._create_anyhow(old.ledger_id)
            empty = await self._commit([*self._list.record.ledgers[:-1], ended], writer, end_index)
        except BaseException:
            for queued in stored:
                queued.item.publisher.failed(queued.item, self._unknown())
            raise
        for queued in stored:
            self._confirm(queued)
        self.shape.close_span(old.ledger_id, last_entry, end_index, old.size, ended.closed_ms)
        self.reader.forget(old.ledger_id)
        await self._install(writer, end_index, empty)
        self._writer = writer
        self._queue.opened(writer.ledger_id)
        if self.state is State.SWITCHING:
            self.state = State.SERVING
        self._send()
        self._on_confirmed()

    async def _create_anyhow(self, above: int) -> LedgerWriter:
        patience = Patience()
        while True:
            try:
                return await self._create(above)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if patience.news(error):
                    _LOG.warning("%s: no new ledger yet: %s", self.topic, error)
            await asyncio.sleep(REROUTE_RETRY_S)

    def _unknown(self) -> MagnetarError:
        return OutcomeUnknown(f"topic {self.topic} was lost while the entry was on its way", topic=self.topic)

    def lose(self, error: MagnetarError) -> None:
        """Everything stops; what is on its way has an unknown outcome."""
        if self.state in (State.LOST, State.CLOSED):
            return
        _LOG.warning("%s: given up: %s", self.topic, error)
        self.state = State.LOST
        for queued in self._queue.give_up():
            queued.item.publisher.failed(queued.item, self._unknown())
        if self._switching is not None and self._switching is not asyncio.current_task():
            self._switching.cancel()  # or it makes a ledger, and puts it into the list, for nobody
        if self._writer is not None:
            self._abandoning = self._loop.create_task(self._writer.abandon())
        self._on_lost(error)

    # ------------------------------------------------------------------ trimming, sealing, closing
    async def trim(self, choose: Callable[[], list[int]]) -> list[int]:
        """Removes the ledgers that `choose` names from the list, then deletes them. Nothing is deleted when the list
        could not be changed for certain. `choose` is asked when nothing else changes the list; what was removed."""
        async with self._changing:
            gone = [ledger_id for ledger_id in choose() if ledger_id != self.shape.tail.ledger_id]
            if not gone or self.state is not State.SERVING:
                return []
            try:
                await self._list.change([each for each in self._list.record.ledgers if each.ledger_id not in gone])
            except TopicFenced as error:
                self.lose(error)
                return []
            self._forget(gone)
            await self._delete(gone)
            return gone

    async def terminate(self) -> Position:
        """Seals the topic after what is on its way; its last entry. Idempotent."""
        if self.state is not State.TERMINATED:
            await self._finish(State.TERMINATED)
        return self.shape.last

    async def close(self) -> None:
        """Stops in order: what is on its way is confirmed, the ledger closed and noted in the list. Idempotent."""
        if self.state in (State.SERVING, State.SWITCHING):
            await self._finish(State.CLOSED)
        if self._abandoning is not None:
            await self._abandoning
        if self._switching is not None:
            await asyncio.gather(self._switching, return_exceptions=True)
        if self.state is State.OPENING and self._writer is not None:
            await self._writer.abandon()
        if self.state is not State.LOST:
            self.state = State.CLOSED

    async def _finish(self, final: State) -> None:
        """No more publishes; the rest is confirmed; the list says where the ledger ends."""
        if self._switching is not None:
            await asyncio.wait([self._switching])
        if self.state is State.LOST:
            raise self._refused()
        self.state = State.CLOSING
        try:
            async with asyncio.timeout(self._config.close_timeout_s), self._changing:
                await self._end_list(terminated=True if final is State.TERMINATED else None)
        except TimeoutError:
            error = Unavailable(f"topic {self.topic} did not end within {self._config.close_timeout_s} s")
            self.lose(error)
            raise error from None
        except MagnetarError as error:
            self.lose(error)
            raise
        for queued in self._queue.give_up():  # certainly not in the ledger, which is closed
            queued.item.publisher.failed(queued.item, self._refused())
        self.state = final
        self._on_confirmed()

    async def _end_list(self, *, terminated: bool | None) -> None:
        last_entry = await self._end_ledger()
        old = self.shape.tail
        self._queue.stopped()
        for queued in self._queue.ended(last_entry):
            self._confirm(queued)
        now_ms = self._world.clock.wall_ms()
        end = _closed(self._list.record.ledgers[-1], last_entry, old.size, old.end_index, now_ms)
        self.shape.close_span(old.ledger_id, last_entry, old.end_index, old.size, now_ms)
        self.reader.forget(old.ledger_id)
        await self._list.change([*self._list.record.ledgers[:-1], end], terminated=terminated)

    # ------------------------------------------------------------------ questions
    @property
    def pending_entries(self) -> int:
        return len(self._queue)

    @property
    def record(self) -> TopicRecord:
        return self._list.record

    @property
    def ensemble(self) -> dict[int, tuple[str, ...]]:
        """Bookies of the ledger that is written."""
        if self._writer is None:
            return {}
        return {self._writer.ledger_id: self._writer.record.fragments[-1].bookies}


def _closed(ledger: TopicLedger, last_entry: int, size: int, end_index: int, now_ms: int) -> TopicLedger:
    return TopicLedger(
        ledger_id=ledger.ledger_id, first_index=ledger.first_index, entries=last_entry + 1, size=size,
        end_index=end_index, created_ms=ledger.created_ms, closed_ms=now_ms,
    )  # fmt: skip
