"""Durable cursors: a subscription's state on bookies, in a cursor ledger.

Rules (ledger protocol §3.5; invariants 29, 36, 37, 44)
- A write is what has changed and a marker that names everything valid (broker/subscription/core/positions.py). All
  waiting acks are one write; at most one write is in flight. An ack receipt is answered after a write that contains the
  ack is confirmed. Without a receipt the ack is fire and forget: durable after `cursor_flush_s` at most, and maybe
  redelivered after a crash until then. Never skipped.
- Opening claims the record first (a token that only one broker has; usually in the commit that claims the topic), then
  fences and recovers the cursor ledger, then reads its last complete state. So a former owner can neither write its
  ledger nor switch to another. A ledger that was opened is never written again.
- When there is no cursor ledger, or it ends or is broken, the next one begins with the full state
  (broker/log/snapshot_ledger.py). A record with another claim: TopicFenced, nothing more is written.
- Closing in order puts a state of at most `cursor_snapshot_bytes` into the record as well: the next owner starts from
  it. It is at least as new as the ledger, and is removed with the record's next change of ledger.
- **While bookies take no cursor ledger** (a write to the ledger and the next ledger both failed), such a state goes to
  the record at most every RECORD_STATE_INTERVAL_S, and the next ledger is tried again at each write. Before it is
  stored, the ledger is given up: nothing newer than the record is in any ledger, until the commit that names the next
  one removes the state from the record. So which of the two is newer never has to be compared. A state that is stored
  as a whole is durable: receipts are answered. If it is too large, its last holes are left out (`snapshot_lacks`): what
  it has helps after a crash, and receipts and trimming wait for a ledger. What was durable before stays so: an opener
  adds the holes of the ledger, and such a state replaces one in the record only if it has each of its holes. After a
  seek neither is true of older states: the commit then names no ledger.
- A state that is damaged or lost raises an alarm in the log, and the cursor goes back to the last complete state
  before it, or to the position in the record: messages are delivered again, none is skipped. Bookies that do not
  answer are Unavailable.
Guarding tests: tests/broker/subscription/test_cursors.py, tests/broker/subscription/test_cursor_model.py (a crash at
every write).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from ...ledger import LedgerClient, LedgerReader
from ...ledger import client as deletions
from ...metadata import paths
from ...metadata.records import CursorRecord, DamagedRecord, DelayBucket, TopicRecord, decode_record, encode_record
from ...metadata.store import DeleteNode, MetadataStore, NodeUpdate, VersionedValue, update_nodes
from ...proto.errors import AlreadyExists, DataLost, InternalError, MagnetarError, SubscriptionNotFound
from ...proto.names import Position, TopicName
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, GetReplicationPolicy
from ..common.retry import retry_until_done
from ..log.log_shape_core import LogShape
from ..log.managed_ledger import TopicFenced, make_claim_check
from ..log.snapshot_ledger import SnapshotLedger, TopicStateLedgers
from . import cursor_format as stored
from .core.cursor import Cursor
from .core.cursor_state import CursorChunkKey, CursorState
from .core.positions import (
    CursorLedgerBounds,
    CursorRecordState,
    CursorWrite,
    CursorWritePlanner,
    add_older_holes,
    contains_holes_of,
    plan_record_state,
)

_LOG = logging.getLogger("magnetar.broker.cursor")

STORE_RETRY_S = 0.5
"""Seconds between two tries to write a state when bookies or metadata do not answer."""
RECORD_STATE_INTERVAL_S = 5.0
"""Least seconds between two states of one cursor in the metadata, while bookies take no ledger: what 10,000 topics may
cost it. An ack with a receipt waits for so long then."""
CURSOR_CLAIMS_MAX = 16
"""Subscriptions that are claimed in one commit with their topic: most topics have fewer."""
CURSOR_READS_AT_ONCE = 16
"""Chunks that are read at once when a cursor is opened."""


OnCursorStored = Callable[[MagnetarError | None], None]
"""Called once: with None when the state is durable, else with the error for which that is not known."""


def cursor_path(topic: TopicName, subscription: str) -> str:
    """Returns the path of a subscription's record in the metadata. `subscription`: the name of the subscription."""
    return paths.cursor(topic.tenant, topic.namespace, topic.stored_local, subscription)


def make_subscription_claim_changes(topic: TopicName, record: TopicRecord, claim: str) -> list[NodeUpdate]:
    """Returns the changes of the metadata by which this broker claims the subscriptions that the topic's record names,
    at most CURSOR_CLAIMS_MAX of them. The caller commits them together with the claim of the topic, so that opening a
    topic takes one commit instead of two. `DurableCursor.open` claims the other subscriptions. `claim`: the token of
    this owner. A record that is missing or damaged stays as it is."""
    changes: list[NodeUpdate] = []
    for name in (record.subscriptions or ())[:CURSOR_CLAIMS_MAX]:
        path = cursor_path(topic, name)
        changes.append(NodeUpdate(path, partial(_claimed, path, claim)))
    return changes


def _claimed(path: str, claim: str, node: VersionedValue | None) -> bytes | None:
    try:
        record = None if node is None else decode_record(node.value, CursorRecord, path)
    except DamagedRecord:  # `open` raises for it
        return None
    return None if record is None else encode_record(_changed(record, claim=claim), path)


class DurableCursor:
    """The cursor of one subscription with its storage: a record in the metadata, and a cursor ledger. `on_fenced`: a
    function that is called once, when another broker has claimed the subscription.

    `claim`: the claim of the topic's owner, if the subscription exists (`make_subscription_claim_changes`). A new
    subscription gets a claim of its own, so that the remains of a deleted subscription of the same name are not
    mistaken for the new one.
    """

    __slots__ = (
        "_claim", "_closed", "_config", "_cursor", "_is_of_owner",
        "_ledger_client", "_ledger_seeks", "_ledger_used", "_log", "_loop", "_metadata",
        "_on_fenced", "_path", "_record", "_record_due_s", "_record_seeks", "_record_version", "_replication",
        "_served", "_tasks", "_timer", "_version",
        "_waiting", "_world", "_writing", "_written_s", "subscription", "topic", "writes",
    )  # fmt: skip

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, config: BrokerConfig, topic: TopicName,
        subscription: str, *, replication: GetReplicationPolicy, on_fenced: Callable[[MagnetarError], None],
        claim: str = "",
    ) -> None:  # fmt: skip
        self.topic = topic
        self.subscription = subscription
        self.writes = 0
        self._metadata = metadata
        self._config = config
        self._on_fenced = on_fenced
        self._world = world
        self._path = cursor_path(topic, subscription)
        self._claim, self._is_of_owner = claim or world.rng.randbytes(16).hex(), bool(claim)
        self._cursor: Cursor | None = None
        self._record = CursorRecord()
        self._version = -1  # of the record
        self._ledger_client, self._replication = ledgers, replication
        self._ledger_used: SnapshotLedger[stored.CursorPiece] | None = None
        self._ledger_seeks = self._record_seeks = 0  # `Cursor.seeks` of the states in the ledger, and in the record
        self._written_s = 0.0  # when the ledger was written last, by the monotonic clock
        self._record_version, self._record_due_s = -1, 0.0  # of the state in the record; when the next one may follow
        self._log: CursorWritePlanner | None = None  # the valid chunks of the ledger; None: nothing was written
        self._waiting: list[OnCursorStored] | None = None  # for the next write
        self._served: Sequence[OnCursorStored] = ()  # by the write in flight
        self._tasks: Tasks | None = None  # most topics have none
        self._writing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def _ledger(self) -> SnapshotLedger[stored.CursorPiece]:
        """Returns the cursor ledger. Creates the object on the first use, because most subscriptions have written
        none."""
        if self._ledger_used is None:
            self._ledger_used = SnapshotLedger(
                self._state_ledgers(), stored.decode_piece, stored.DamagedCursorState, self._alarm
            )
        return self._ledger_used

    def _state_ledgers(self) -> TopicStateLedgers:
        return TopicStateLedgers(
            self._ledger_client, self._config, self._replication, self.topic, cursor=self.subscription
        )  # fmt: skip

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the subscription, as they are stored."""
        return self._record.properties

    @property
    def cursor(self) -> Cursor:
        """The cursor in memory. It may have acknowledgements that are not stored yet. Only after `create` or `open`."""
        assert self._cursor is not None, "the cursor is open"
        return self._cursor

    # ------------------------------------------------------------------ opening
    async def create(
        self,
        shape: LogShape,
        mark: Position,
        properties: dict[str, str],
        commit: Callable[[NodeUpdate], Awaitable[object]],
    ) -> None:
        """Creates a subscription that has acknowledged everything up to `mark`. `commit`: the function that stores its
        record. Raises AlreadyExists if the topic has a subscription of that name; DataLost if the record of such a
        subscription is damaged; and the errors of `commit`."""
        record = CursorRecord(
            mark_ledger=mark[0], mark_entry=mark[1], properties=dict(properties),
            created_ms=self._world.clock.wall_ms(), claim=self._claim,
        )  # fmt: skip

        def transform(node: VersionedValue | None) -> bytes | None:
            if node is not None and self._decoded(node.value).claim != self._claim:
                raise AlreadyExists(f"subscription {self.subscription!r} of topic {self.topic} exists already")
            return encode_record(record, self._path)

        await commit(NodeUpdate(self._path, transform, absent=True))
        self._record = record
        self._cursor = Cursor(shape, CursorState(mark))

    async def set_properties(self, properties: dict[str, str]) -> None:
        """Replaces all properties of the subscription, durably. Raises TopicFenced if another broker has claimed the
        subscription; SubscriptionNotFound if the subscription is deleted; DataLost if its record is damaged; and the
        errors of the metadata."""
        await self._change(lambda record: _changed(record, properties=dict(properties)))

    async def open(self, shape: LogShape) -> None:
        """Claims the record of the subscription, fences and recovers the cursor ledger, and reads the last complete
        state. If that state is damaged or lost, an earlier one is used, and the damage is logged. Raises
        SubscriptionNotFound if there is no record; DataLost if the record is damaged; NewerFormat if a later version of
        Magnetar wrote the state; Unavailable if the bookies do not answer; OutcomeUnknown if the cursor ledger cannot
        be closed; TopicFenced if another broker has claimed the topic; and the errors of the metadata.

        TopicFenced protects the next owner from a former owner that was suspended for a while. If the former owner
        claimed the subscription, it would adapt the state to its own older log, and drop later acknowledgements.
        """

        def claim(record: CursorRecord) -> CursorRecord:
            return _changed(record, claim=self._claim)

        together = (make_claim_check(self.topic, self._claim),) if self._is_of_owner else ()
        await self._change(claim, claiming=True, together=together)
        state = self._snapshot()
        self._ledger.ledger_id = self._record.ledger_id
        if self._record.ledger_id >= 0 and (state is None or self._record.snapshot_lacks):
            older = await self._ledger.recover_state(self._record.ledger_id, self._state_of)
            if state is None:
                state = older
            elif older is not None:
                add_older_holes(state, older)
        if state is None:
            state = CursorState(Position(self._record.mark_ledger, self._record.mark_entry))
        if state.mark.entry_id >= 0 and state.mark > shape.last_position and state.mark > shape.start_position:
            _LOG.error("%s/%s: mark %s is after the end %s of the topic: acknowledged data is lost",
                       self.topic, self.subscription, state.mark, shape.last_position)  # fmt: skip
        self._cursor = Cursor(shape, state)
        self._cursor.adapt_to_log_after_restart()

    def _snapshot(self) -> CursorState | None:
        """Returns the state in the record, which the owner stored there when it closed in order, or while bookies took
        no ledger; None if there is no such state, or it is damaged."""
        if not self._record.snapshot:
            return None
        try:
            return stored.decode_snapshot(self._record.snapshot)
        except stored.DamagedCursorState as error:
            self._alarm("the snapshot in the record cannot be used", error)
            return None

    async def _state_of(self, reader: LedgerReader, pieces: list[stored.CursorPiece]) -> CursorState:
        """Reads the chunks that the marker lists, and returns the complete state. `pieces`: the pieces of the marker.
        Raises DamagedCursorState or DataLost if a chunk cannot be read."""
        body = b"".join(each.body for each in pieces)
        mark, rows = stored.decode_marker(body)
        state, reads = CursorState(mark), asyncio.Semaphore(CURSOR_READS_AT_ONCE)

        async def chunk(key: CursorChunkKey, row: stored.CursorChunkPlace) -> None:
            async with reads:
                found = [
                    await self._ledger.read_snapshot_piece(reader, row.first_entry + at) for at in range(row.pieces)
                ]
            if not all(each.is_piece_of_chunk(key, row, at) for at, each in enumerate(found)):
                raise stored.DamagedCursorState(f"{key} is not at entry {row.first_entry}")
            stored.decode_chunk_into_state(state, key, b"".join(each.body for each in found))

        outcomes = await asyncio.gather(*(chunk(*each) for each in rows.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return state

    def _decoded(self, value: bytes) -> CursorRecord:
        """Returns the decoded record. Raises DataLost if it is damaged. Then the position of the subscription is not
        known; the topic does not open, so that no unacknowledged ledger is trimmed and the record is not
        overwritten."""
        try:
            return decode_record(value, CursorRecord, self._path)
        except DamagedRecord as error:
            raise DataLost(
                f"the record of subscription {self.subscription!r} of {self.topic} is damaged: {error}; its messages "
                "stay, and the topic opens again when the metadata is restored from a copy that has it whole",
                topic=self.topic, subscription=self.subscription,
            ) from error  # fmt: skip

    def _alarm(self, what: str, error: Exception) -> None:
        _LOG.error("%s/%s: %s, the cursor goes back: %s", self.topic, self.subscription, what, error)

    async def _change(
        self,
        change: Callable[[CursorRecord], CursorRecord],
        *,
        claiming: bool = False,
        together: Sequence[NodeUpdate] = (),
    ) -> None:
        """Changes the record if it still has the claim of this object, and makes the changes `together` in the same
        commit. `claiming`: sets the claim and does not check it. Raises TopicFenced if another broker has the claim;
        SubscriptionNotFound if there is no record."""

        attempts = itertools.count()

        def transform(node: VersionedValue | None) -> bytes | None:
            first = next(attempts) == 0
            if node is None:
                raise SubscriptionNotFound(f"subscription {self.subscription!r} of {self.topic} does not exist")
            record = self._decoded(node.value)
            if not claiming and record.claim != self._claim:
                fenced = TopicFenced(f"subscription {self.subscription!r} of {self.topic} belongs to another broker")
                fenced.unwritten = first
                raise fenced
            return encode_record(change(record), self._path)

        *_, node = await update_nodes(self._metadata, (*together, NodeUpdate(self._path, transform)))
        assert node is not None, "a changed record exists"
        if node.version >= self._version:  # two changes may be in flight, of the state and of the buckets
            self._version, self._record = node.version, self._decoded(node.value)

    # ------------------------------------------------------------------ buckets of delayed entries
    # (broker/subscription/delays.py)
    @property
    def delay_buckets(self) -> tuple[DelayBucket, ...]:
        """The buckets with delayed entries that the subscription's record names."""
        return self._record.delays

    async def store_delay_bucket_changes(self, add: tuple[DelayBucket, ...], remove: frozenset[int]) -> None:
        """Adds the buckets `add` of delayed entries to the subscription's record, and removes those in the ledgers
        `remove`, durably. Raises TopicFenced if another broker has claimed the subscription; SubscriptionNotFound if it
        is deleted; DataLost if the record is damaged; and the errors of the metadata. If the outcome is unknown, the
        caller may repeat the call."""

        def change(record: CursorRecord) -> CursorRecord:
            kept = [each for each in record.delays if each.ledger_id not in remove and each not in add]
            return _changed(record, delays=(*kept, *add))

        await self._change(change)

    # ------------------------------------------------------------------ writing
    def schedule_write(self) -> None:
        """Schedules a write of the changed cursor, at most `cursor_flush_s` seconds from now. Does nothing if a write
        is scheduled or in progress, or after `close`."""
        if self._timer is None and self._writing is None and not self._closed:
            self._timer = self._loop.call_later(self._config.cursor_flush_s, self._start)

    def make_acks_durable_future(self) -> asyncio.Future[None]:
        """Returns a future that completes when everything that was acknowledged before this call is durable. It fails
        with TopicFenced if another broker has claimed the subscription or this object is closed, and with the error of
        a write that fails for good."""
        future: asyncio.Future[None] = self._loop.create_future()

        def tell(error: MagnetarError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.call_when_durable(tell)
        return future

    def call_when_durable(self, tell: OnCursorStored) -> None:
        """Calls the function `tell` once, possibly before this method returns: with None when everything that was
        acknowledged before this call is durable, or with an error as `make_acks_durable_future` does. `tell` must not
        raise. With very many callers this costs less than futures."""
        if not self.cursor.has_unstored_changes:
            tell(None)
        elif self._closed:
            tell(TopicFenced(f"topic {self.topic} is closed here; look it up again"))
        else:
            if self._waiting is None:
                self._waiting = []
            self._waiting.append(tell)
            self._start()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and not self._closed and self.cursor.has_unstored_changes:
            if self._tasks is None:
                self._tasks = Tasks()
            self._writing = self._tasks.spawn(self._write_all(), "cursor write")

    async def _write_all(self) -> None:
        """Writes the changes as long as a caller waits, one write at a time. Later changes are written when the timer
        ends."""
        try:
            while True:
                self._served, self._waiting = self._waiting or (), None
                await self._write_until_stored()
                served, self._served = self._served, ()
                for tell in served:
                    tell(None)
                if not self._waiting:
                    break
        except MagnetarError as error:
            self._fail(error)
            self._on_fenced(error)
        except Exception as error:  # a fault of the broker resolves the receipts too
            _LOG.exception("%s/%s: the state cannot be stored", self.topic, self.subscription)
            fault = InternalError(f"subscription {self.subscription!r} of {self.topic} cannot be stored: {error!r}")
            self._fail(fault)
            self._on_fenced(fault)
        finally:
            self._writing = None
        if self.cursor.has_unstored_changes:
            self.schedule_write()

    async def _write_until_stored(self) -> None:
        await retry_until_done(
            self._write, self._world.clock, _LOG, f"{self.topic}/{self.subscription}: state not stored yet",
            pause_s=STORE_RETRY_S, ends=lambda error: isinstance(error, TopicFenced) or not error.retryable,
        )  # fmt: skip

    async def _write(self) -> None:
        self._ledger.sequence += 1
        write = None
        if self._log is not None and self._ledger.is_writable and self._log.why_ledger_ends(self._bounds()) is None:
            write = await self._write_in(self._log, self._append)
        if write is None:
            log = CursorWritePlanner()
            try:
                write = await self._write_in(log, self._roll)
            except MagnetarError as error:
                if isinstance(error, TopicFenced) or not error.retryable or not await self._store_in_record(error):
                    raise
                return
            assert write is not None, "a roll stores or raises"
            self._log = log
            if self._record_version >= 0:
                self._record_version = -1
                _LOG.info("%s/%s: the state is in a ledger again", self.topic, self.subscription)
        self._ledger_seeks, self._written_s = write.seeks, self._world.clock.monotonic()
        self.writes += 1
        self.cursor.on_state_stored(write.version, write.mark)

    async def _store_in_record(self, error: MagnetarError) -> bool:
        """Stores the state in the subscription's record, as far as it has room there, because no ledger takes it
        (`error` says why). Returns True if the whole state is durable then. Does nothing if that was done less than
        RECORD_STATE_INTERVAL_S ago. Raises TopicFenced, SubscriptionNotFound and the errors of the metadata."""
        now_s = self._world.clock.monotonic()
        if now_s < self._record_due_s or self._closed:
            return False
        self._ledger.sequence += 1
        state = plan_record_state(self.cursor, self._ledger.sequence, self._config.cursor_snapshot_bytes)
        if state is None or state.version == self._record_version or not self._may_replace_snapshot(state):
            return False
        if self._record_version < 0:
            _LOG.warning("%s/%s: the state is stored in the metadata, as no ledger takes it (%d acknowledged entries "
                         "have no room there): %s", self.topic, self.subscription, state.lacks, error)  # fmt: skip
        await self._ledger.stop_writing()
        await self._change(partial(_with_state, state, is_ledger_older=state.seeks == self._ledger_seeks))
        self._record_due_s = now_s + RECORD_STATE_INTERVAL_S
        self._record_version, self._record_seeks = state.version, state.seeks
        if not state.lacks:
            self.writes += 1
            self.cursor.on_state_stored(state.version, state.mark)
        return not state.lacks

    def _may_replace_snapshot(self, state: CursorRecordState) -> bool:
        """Returns True if nothing durable is lost when the state replaces the one in the record."""
        if not state.lacks or not self._record.snapshot or state.seeks != self._record_seeks:
            return True
        older = self._snapshot()
        return older is None or contains_holes_of(stored.decode_snapshot(state.snapshot), older)

    def _bounds(self) -> CursorLedgerBounds:
        config = self._config
        return CursorLedgerBounds(config.cursor_roll_entries, config.cursor_roll_bytes, config.cursor_live_share)

    async def _write_in(
        self, log: CursorWritePlanner, store: Callable[[CursorWrite], Awaitable[bool]]
    ) -> CursorWrite | None:
        """Makes the next write with the function `store`, and returns the write. Returns None if it was not stored;
        then its changes are part of the next write."""
        write, done = log.plan_write(self.cursor, self._ledger.sequence), False
        try:
            done = await store(write)
        finally:
            if done:
                log.on_write_confirmed(write)
            else:
                log.on_write_failed(write, self.cursor)
        return write if done else None

    async def _append(self, write: CursorWrite) -> bool:
        return await self._ledger.append_pieces(write.entries)

    async def _roll(self, write: CursorWrite) -> bool:
        async def name(ledger_id: int) -> None:
            mark_ledger, mark_entry = write.mark
            await self._change(
                lambda record: _changed(
                    record, ledger_id=ledger_id, mark_ledger=mark_ledger, mark_entry=mark_entry, snapshot=b"",
                    snapshot_lacks=0,
                )
            )  # fmt: skip

        await self._ledger.roll_ledger(write.entries, name)
        return True

    # ------------------------------------------------------------------ a ledger that is not written
    def has_idle_ledger(self, limit_s: float) -> bool:
        """Returns True if a cursor ledger is open, has the whole state, and was not written for `limit_s` seconds."""
        return (
            self._ledger_used is not None and self._ledger_used.is_writable and self._writing is None
            and not self._closed and not self.cursor.has_unstored_changes
            and self._world.clock.monotonic() - self._written_s >= limit_s
        )  # fmt: skip

    async def close_idle_ledger(self) -> None:
        """Closes the cursor ledger, which must have the whole state (`has_idle_ledger`), and stores the state in the
        subscription's record, too, if it has room there. The next write begins another ledger. So a subscription that
        is not used takes less memory, and its next owner has no ledger to recover. Writes of acknowledgements that come
        meanwhile wait. Raises TopicFenced if another broker has claimed the subscription; only logs other errors."""
        if self._tasks is None:
            self._tasks = Tasks()
        self._writing = self._tasks.spawn(self._close_idle(), "cursor ledger close")
        await asyncio.wait([self._writing])

    async def _close_idle(self) -> None:
        try:
            await self._ledger.close()
            self._ledger.sequence += 1
            state = plan_record_state(self.cursor, self._ledger.sequence, self._config.cursor_snapshot_bytes)
            if state is not None and not state.lacks:
                await self._change(partial(_with_state, state, is_ledger_older=True))
                self._record_seeks = state.seeks
                self.cursor.on_state_stored(state.version, state.mark)
            self._log = None
        except TopicFenced as error:
            self._fail(error)
            self._on_fenced(error)
        except MagnetarError as error:
            _LOG.warning("%s/%s: no snapshot: %s", self.topic, self.subscription, error)
        finally:
            self._writing = None
            if self._waiting:
                self._start()
            elif self.cursor.has_unstored_changes:
                self.schedule_write()

    # ------------------------------------------------------------------ ending
    def _fail(self, error: MagnetarError) -> None:
        """Stops all writing, and passes the error to each waiting caller."""
        self._closed = True
        waiting, self._waiting, self._served = [*self._served, *(self._waiting or ())], None, ()
        for tell in waiting:
            tell(error)

    def abandon(self) -> None:
        """Stops all writing, because another broker owns the topic. Changes that are not stored yet are lost, and
        callers that wait for them get TopicFenced."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail(TopicFenced(f"topic {self.topic} is lost to this broker; look it up again"))
        if self._tasks is not None:
            self._tasks.cancel()

    async def close(self) -> None:
        """Stores the changes that are not durable yet, and closes the cursor ledger, so that the next owner of the
        topic need not recover it. Acknowledgements that cannot be stored within `close_timeout_s` seconds are lost; the
        next owner delivers their messages again. Raises TopicFenced if another broker has claimed the subscription, or
        the error of a write that failed for good; the ledger is closed then, too."""
        try:
            is_open = self._ledger.is_writable or self._writing is not None
            if not self._closed and (self.cursor.has_unstored_changes or is_open):
                async with asyncio.timeout(self._config.close_timeout_s):
                    if not await self._put_snapshot() and self.cursor.has_unstored_changes:
                        await self.make_acks_durable_future()
        except TimeoutError:
            _LOG.warning("%s/%s: the last acknowledgements are not stored", self.topic, self.subscription)
        finally:
            self.abandon()
            if self._tasks is not None:
                await self._tasks.drain()
            await self._ledger.close()

    async def _put_snapshot(self) -> bool:
        """Stores the state in the subscription's record, if the state is small. Returns True if the state is durable
        then."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # it may change the record's ledger
        cursor = self.cursor
        if self._closed or cursor.memory_bytes > 64 * self._config.cursor_snapshot_bytes:
            return False
        self._ledger.sequence += 1
        state = plan_record_state(cursor, self._ledger.sequence, self._config.cursor_snapshot_bytes)
        if state is None or state.lacks:
            return False
        self._closed = True  # no write may overtake it
        try:
            await self._change(partial(_with_state, state, is_ledger_older=True))
        except MagnetarError as error:
            _LOG.warning("%s/%s: no snapshot: %s", self.topic, self.subscription, error)
            self._closed = False
            return False
        cursor.on_state_stored(state.version, state.mark)
        return True

    async def delete(self) -> None:
        """Deletes the subscription: its record first, then its ledgers. May be repeated if the outcome is unknown.
        Raises TopicFenced if another owner has claimed the subscription, or if the record belongs to a new subscription
        of the same name; BadVersion if the record changes at the same moment; DataLost if the record is damaged; and
        the errors of the metadata."""
        self.abandon()
        if self._tasks is not None:
            await self._tasks.drain()
        node = await self._metadata.get(self._path)
        if node is not None and decode_record(node.value, CursorRecord, self._path).claim != self._claim:
            raise TopicFenced(f"subscription {self.subscription!r} of {self.topic} belongs to another broker")
        buckets = [bucket.ledger_id for bucket in self._record.delays]
        ledgers = [each for each in (self._record.ledger_id, self._ledger.ledger_id, *buckets) if each >= 0]
        if node is not None:  # else an earlier attempt of unknown outcome deleted it
            await deletions.commit_ledger_deletions(self._metadata, ledgers, [DeleteNode(self._path, node.version)])
        await self._ledger.delete_ledger()
        await self._state_ledgers().delete_ledgers(*buckets)


def _changed(record: CursorRecord, **changes: object) -> CursorRecord:
    return msgspec.structs.replace(record, **changes)


def _with_state(state: CursorRecordState, record: CursorRecord, *, is_ledger_older: bool) -> CursorRecord:
    """Returns the record with the state as its snapshot. `is_ledger_older`: False if a seek was between the state in
    the ledger and this one; if this one lacks holes, those in the ledger do not count then."""
    ledger_id = record.ledger_id if is_ledger_older or not state.lacks else -1
    return _changed(
        record, ledger_id=ledger_id, mark_ledger=state.mark[0], mark_entry=state.mark[1], snapshot=state.snapshot,
        snapshot_lacks=state.lacks,
    )  # fmt: skip
