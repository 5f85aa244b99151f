"""Durable cursors: a subscription's state on bookies, in a cursor ledger.

Rules (ledger protocol §3.5; invariants 29, 36, 37, 44)
- A write is what has changed and a marker that names everything valid (broker/subscription/core/cursor_log.py). All
  acks that wait
  are one write; one write is on its way at most. An ack receipt is answered after a write that holds the ack is
  confirmed; without receipt it is fire and forget, durable after `cursor_flush_s` at most, and may be redelivered after
  a crash until then. Never skipped.
- Opening claims the record first (a token that only one broker holds), then fences and recovers the cursor ledger, then
  reads its last complete state. So a former owner can neither write its ledger nor switch to another. A ledger that was
  opened is never written again.
- The next cursor ledger, when there is none, or it ends or is broken: new ledger → full state → the record by
  compare-and-set → delete the old. A record with another claim: TopicFenced, nothing more is written.
- Closing in order puts a state of at most `cursor_snapshot_bytes` into the record as well: the next owner starts from
  there. It is at least as new as the ledger, and goes with the record's next change of ledger.
- A state that is damaged or gone is said loudly, and the cursor goes back to the last complete state before it, or to
  the position in the record: messages come again, none is skipped. Bookies that do not answer are Unavailable.

Guarding tests: tests/broker/subscription/test_cursors.py, tests/broker/subscription/test_cursor_model.py (a crash at
every write).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...metadata import paths
from ...metadata.records import CursorRecord, DelayBucket, decode, encode
from ...metadata.store import MetadataStore, Versioned
from ...metadata.update import update
from ...proto.errors import AlreadyExists, DataLost, InternalError, LedgerNotFound, MagnetarError, SubscriptionNotFound
from ...proto.names import Position, TopicName
from ...runtime.world import World
from ..common.config import BrokerConfig, Policy
from ..common.log_throttle import Patience
from ..log.core.log_shape import LogShape
from ..log.core.quorums import allowed
from ..log.ledger_list import TopicFenced
from .core.cursor import ChunkKey, Cursor, CursorState
from .core.cursor_log import Bounds, CursorLog, Write
from .format import cursor as stored

_LOG = logging.getLogger("magnetar.broker.cursor")

RETRY_S = 0.5
"""Between two tries to write a state when bookies or metadata do not answer."""
READS_MAX = 16
"""Chunks that are read at once when a cursor is opened."""


def path_of(topic: TopicName, subscription: str) -> str:
    return paths.cursor(topic.tenant, topic.namespace, topic.stored_local, subscription)


class DurableCursor:
    """One subscription's cursor and its storage. `on_fenced` is called once when the claim is lost."""

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, config: BrokerConfig, topic: TopicName,
        subscription: str, *, replication: Policy, on_fenced: Callable[[MagnetarError], None],
        on_stored: Callable[[], None],
    ) -> None:  # fmt: skip
        self.topic = topic
        self.subscription = subscription
        self.properties: dict[str, str] = {}
        self.writes = 0
        self._metadata = metadata
        self._ledgers = ledgers
        self._config = config
        self._replication = replication
        self._on_fenced = on_fenced
        self._on_stored = on_stored
        self._world = world
        self._path = path_of(topic, subscription)
        self._claim = world.rng.randbytes(16).hex()
        self._cursor: Cursor | None = None
        self._record = CursorRecord()
        self._version = -1  # of the record
        self._writer: LedgerWriter | None = None
        self._log = CursorLog()  # of what the writer writes
        self._bounds = Bounds(config.cursor_roll_entries, config.cursor_roll_bytes, config.cursor_live_share)
        self._sequence = 0
        self._waiting: list[asyncio.Future[None]] = []  # for the next write
        self._served: list[asyncio.Future[None]] = []  # by the write on its way
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def cursor(self) -> Cursor:
        assert self._cursor is not None, "the cursor is open"
        return self._cursor

    # ------------------------------------------------------------------ opening
    async def create(self, shape: LogShape, mark: Position, properties: dict[str, str]) -> None:
        """A new subscription that has acknowledged everything up to `mark`. AlreadyExists."""
        record = CursorRecord(
            mark_ledger=mark[0], mark_entry=mark[1], properties=dict(properties),
            created_ms=self._world.clock.wall_ms(), claim=self._claim,
        )  # fmt: skip

        def transform(node: Versioned | None) -> bytes | None:
            if node is not None and decode(node.value, CursorRecord, self._path).claim != self._claim:
                raise AlreadyExists(f"subscription {self.subscription!r} of topic {self.topic} exists already")
            return encode(record)

        await update(self._metadata, self._path, transform, absent=True)
        self._record, self.properties = record, dict(properties)
        self._cursor = Cursor(shape, CursorState(mark))

    async def set_properties(self, properties: dict[str, str]) -> None:
        """These and no others, durably. TopicFenced; SubscriptionNotFound."""
        await self._change(lambda record: _changed(record, properties=dict(properties)))
        self.properties = dict(properties)

    async def open(self, shape: LogShape) -> None:
        """Claims, fences, recovers, reads. SubscriptionNotFound, Unavailable."""

        def claim(record: CursorRecord) -> CursorRecord:
            return _changed(record, claim=self._claim)

        await self._change(claim, claiming=True)
        self.properties = dict(self._record.properties)
        state = self._snapshot()
        if state is None and self._record.ledger_id >= 0:
            state = await self._recover(self._record.ledger_id)
        if state is None:
            state = CursorState(Position(self._record.mark_ledger, self._record.mark_entry))
        if state.mark.entry_id >= 0 and state.mark > shape.last and state.mark > shape.start:
            _LOG.error("%s/%s: mark %s is behind the end %s of the topic: acknowledged data is gone",
                       self.topic, self.subscription, state.mark, shape.last)  # fmt: skip
        self._cursor = Cursor(shape, state)
        self._cursor.fit()

    def _snapshot(self) -> CursorState | None:
        """What the last owner left in the record, if it closed in order."""
        if not self._record.snapshot:
            return None
        try:
            return stored.decode_snapshot(self._record.snapshot)
        except stored.DamagedState as error:
            self._alarm("the snapshot in the record cannot be used", error)
            return None

    async def _recover(self, ledger_id: int) -> CursorState | None:
        try:
            reader = await self._ledgers.recover(ledger_id)
        except LedgerNotFound as error:
            self._alarm(f"cursor ledger {ledger_id} is gone", error)
            return None
        return await self._last_state(reader)

    async def _last_state(self, reader: LedgerReader) -> CursorState | None:
        """The last complete state; None when the ledger holds none."""
        for last in range(reader.last_entry, -1, -1):
            try:
                state = await self._state_at(reader, last)
            except (stored.DamagedState, DataLost) as error:
                self._alarm(f"cursor ledger {reader.ledger_id}, entry {last} cannot be used", error)
                continue
            if state is not None:
                return state
        return None

    async def _state_at(self, reader: LedgerReader, last: int) -> CursorState | None:
        """The state whose marker ends there; None when that entry is none, or torn."""
        end = await self._piece(reader, last)
        self._sequence = max(self._sequence, end.sequence)
        if end.kind > stored.MARKER or end.piece != end.pieces - 1 or last < end.piece:
            return None
        front = [await self._piece(reader, last - back) for back in range(end.piece, 0, -1)]
        if any(each.sequence != end.sequence for each in front):
            return None
        body = b"".join(each.body for each in [*front, end])
        if end.kind != stored.MARKER:
            return stored.decode_state_1(body)
        mark, rows = stored.decode_marker(body)
        state, reads = CursorState(mark), asyncio.Semaphore(READS_MAX)

        async def chunk(key: ChunkKey, row: stored.Row) -> None:
            async with reads:
                found = [await self._piece(reader, row.first_entry + at) for at in range(row.pieces)]
            if not all(each.belongs_to(key, row, at) for at, each in enumerate(found)):
                raise stored.DamagedState(f"{key} is not at entry {row.first_entry}")
            stored.add_chunk(state, key, b"".join(each.body for each in found))

        outcomes = await asyncio.gather(*(chunk(*each) for each in rows.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return state

    def _alarm(self, what: str, error: Exception) -> None:
        _LOG.error("%s/%s: %s, the cursor goes back: %s", self.topic, self.subscription, what, error)

    @staticmethod
    async def _piece(reader: LedgerReader, entry_id: int) -> stored.Piece:
        (entry,) = await reader.read(entry_id, entry_id)
        return stored.decode_piece(bytes(entry.payload))

    async def _change(self, change: Callable[[CursorRecord], CursorRecord], *, claiming: bool = False) -> None:
        """The record, by compare-and-set on the claim."""

        def transform(node: Versioned | None) -> bytes | None:
            if node is None:
                raise SubscriptionNotFound(f"subscription {self.subscription!r} of {self.topic} does not exist")
            record = decode(node.value, CursorRecord, self._path)
            if not claiming and record.claim != self._claim:
                raise TopicFenced(f"subscription {self.subscription!r} of {self.topic} belongs to another broker")
            return encode(change(record))

        node = await update(self._metadata, self._path, transform)
        assert node is not None, "a changed record is there"
        if node.version >= self._version:  # two changes may be on their way, of the state and of the buckets
            self._version, self._record = node.version, decode(node.value, CursorRecord, self._path)

    # ------------------------------------------------------------------ buckets of delayed entries
    # (broker/subscription/delays.py)
    @property
    def buckets(self) -> tuple[DelayBucket, ...]:
        """As the record names them."""
        return self._record.delays

    async def change_buckets(self, add: tuple[DelayBucket, ...], remove: frozenset[int]) -> None:
        """Names some and forgets others. TopicFenced; when the outcome is unknown, doing it again decides."""

        def change(record: CursorRecord) -> CursorRecord:
            kept = [each for each in record.delays if each.ledger_id not in remove and each not in add]
            return _changed(record, delays=(*kept, *add))

        await self._change(change)

    # ------------------------------------------------------------------ writing
    def touched(self) -> None:
        """The cursor has changed: it is durable after `cursor_flush_s` at most."""
        if self._timer is None and self._writing is None and not self._closed:
            self._timer = self._loop.call_later(self._config.cursor_flush_s, self._start)

    def durable(self) -> asyncio.Future[None]:
        """Done when all that was acknowledged up to now is durable. Fails with TopicFenced when it cannot be."""
        future: asyncio.Future[None] = self._loop.create_future()
        if not self.cursor.dirty:
            future.set_result(None)
        elif self._closed:
            future.set_exception(TopicFenced(f"topic {self.topic} is closed here; look it up again"))
        else:
            self._waiting.append(future)
            self._start()
        return future

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and not self._closed and self.cursor.dirty:
            self._writing = self._loop.create_task(self._write_all())

    async def _write_all(self) -> None:
        """One write after the other while somebody waits; then the timer takes over."""
        try:
            while True:
                self._served, self._waiting = self._waiting, []
                await self._write_until_stored()
                served, self._served = self._served, []
                for future in served:
                    if not future.done():
                        future.set_result(None)
                self._on_stored()
                if not self._waiting:
                    break
        except MagnetarError as error:
            self._fail(error)
            self._on_fenced(error)
        except Exception as error:  # a fault of ours must not leave those waiting who asked for a receipt
            _LOG.exception("%s/%s: the state cannot be stored", self.topic, self.subscription)
            fault = InternalError(f"subscription {self.subscription!r} of {self.topic} cannot be stored: {error!r}")
            self._fail(fault)
            self._on_fenced(fault)
        finally:
            self._writing = None
        if self.cursor.dirty:
            self.touched()

    async def _write_until_stored(self) -> None:
        patience = Patience()
        while True:
            try:
                await self._write()
                return
            except TopicFenced:
                raise
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if patience.news(error):
                    _LOG.warning("%s/%s: state not stored yet: %s", self.topic, self.subscription, error)
            await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        cursor = self.cursor
        self._sequence += 1
        writer = self._writer
        if writer is not None and writer.writable and self._log.ends(self._bounds) is None:
            write = self._log.plan(cursor, self._sequence)
            try:
                await self._append(writer, self._log, write)
            except MagnetarError:
                writer = None
        else:
            writer = None
        if writer is None:
            write = await self._next_ledger()
        self.writes += 1
        cursor.stored(write.version, write.mark)

    async def _append(self, writer: LedgerWriter, log: CursorLog, write: Write) -> None:
        try:
            await asyncio.gather(*[writer.append(entry) for entry in write.entries])
        except BaseException:
            log.failed(write, self.cursor)
            raise
        log.confirmed(write)

    async def _next_ledger(self) -> Write:
        old, old_writer = self._record.ledger_id, self._writer
        replication = await self._replication()
        writer = await self._ledgers.create(
            ensemble_size=replication.ensemble_size, write_quorum=replication.write_quorum,
            ack_quorum=replication.ack_quorum,
            properties={"topic": self.topic.full, "cursor": self.subscription},
            shrink=allowed(degraded_writes=self._config.degraded_writes),
        )  # fmt: skip
        log = CursorLog()
        write = log.plan(self.cursor, self._sequence)
        try:
            await self._append(writer, log, write)
            await self._change(
                lambda record: _changed(
                    record, ledger_id=writer.ledger_id, mark_ledger=write.mark[0], mark_entry=write.mark[1],
                    snapshot=b"",
                )
            )  # fmt: skip
        except TopicFenced:
            await writer.abandon()
            await self._delete_ledger(writer.ledger_id)  # certainly in no record
            raise
        except BaseException:
            log.failed(write, self.cursor)
            await writer.abandon()
            raise
        self._writer, self._log = writer, log
        if old_writer is not None:
            await old_writer.abandon()
        if old >= 0:
            await self._delete_ledger(old)
        return write

    async def _delete_ledger(self, ledger_id: int) -> None:
        """Of a ledger that the record does not name. One that stays behind costs space and nothing else."""
        try:
            await self._ledgers.delete(ledger_id)
        except MagnetarError as error:
            _LOG.warning("cursor ledger %d is not deleted, nobody refers to it: %s", ledger_id, error)

    # ------------------------------------------------------------------ ending
    def _fail(self, error: MagnetarError) -> None:
        self._closed = True
        waiting, self._waiting, self._served = [*self._served, *self._waiting], [], []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def abandon(self) -> None:
        """The topic is lost: nothing more is written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail(TopicFenced(f"topic {self.topic} is lost to this broker; look it up again"))
        if self._writing is not None:
            self._writing.cancel()

    async def close(self) -> None:
        """Writes what is not stored yet, and closes the ledger, so that the next owner finds it closed.

        What cannot be stored within `close_timeout_s` is not: its messages come again.
        """
        if not self._closed and (self.cursor.dirty or self._writer is not None):
            try:
                async with asyncio.timeout(self._config.close_timeout_s):
                    if not await self._put_snapshot() and self.cursor.dirty:
                        await self.durable()
            except TimeoutError:
                _LOG.warning("%s/%s: the last acknowledgements are not stored", self.topic, self.subscription)
        self.abandon()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                await writer.close()
            except MagnetarError as error:
                _LOG.warning("cursor ledger %d stays open: %s", writer.ledger_id, error)

    async def _put_snapshot(self) -> bool:
        """The state into the record, if it is small: then it is durable."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # it may change the record's ledger
        cursor = self.cursor
        if self._closed or cursor.memory_bytes > 64 * self._config.cursor_snapshot_bytes:
            return False
        self._sequence += 1
        write = CursorLog().plan(cursor, self._sequence)
        CursorLog.failed(write, cursor)  # it is not in the ledger
        snapshot = stored.encode_snapshot(write.entries)
        if len(snapshot) > self._config.cursor_snapshot_bytes:
            return False
        self._closed = True  # no write may overtake it
        try:
            await self._change(
                lambda record: _changed(record, mark_ledger=write.mark[0], mark_entry=write.mark[1], snapshot=snapshot)
            )
        except MagnetarError as error:
            _LOG.warning("%s/%s: no snapshot: %s", self.topic, self.subscription, error)
            self._closed = False
            return False
        cursor.stored(write.version, write.mark)
        return True

    async def delete(self) -> None:
        """The subscription is no more: its record, then its ledger."""
        self.abandon()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._metadata.delete(self._path)
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.abandon()
        if self._record.ledger_id >= 0:
            await self._delete_ledger(self._record.ledger_id)
        for bucket in self._record.delays:
            await self._delete_ledger(bucket.ledger_id)


def _changed(record: CursorRecord, **changes: object) -> CursorRecord:
    return msgspec.structs.replace(record, **changes)

