"""The outcomes ledger of a topic: what transactions_core.py knows, kept across crashes and moves.

A write is the parts that have changed and a marker with the position, the open transactions and a row for each valid
part (broker/topic/transactions_format.py). It counts when the marker is stored. Rules
- **Lazily**: `OUTCOME_DELAY_S` after an outcome, or at `OUTCOMES_MAX` of them; one write at a time, with all that
  waits. `wait_durable` returns after a write that has all outcomes of before the call.
- What a crash leaves out is in the log after the position of the last write: its headers are replayed, and the
  coordinators are asked. So a write is never ahead of its position, and the log may go on past it by any distance.
- The log after the position of the last *stored* write is not trimmed (`position`).
- Ledgers change in the order of broker/log/snapshot_ledger.py; the topic's record names the current one.
- A ledger that cannot be read raises an alarm in the log: the whole log that is left is replayed, and all is asked.
Guarding tests: tests/broker/topic/test_transactions.py.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ...ledger import LedgerClient, LedgerReader
from ...metadata.records import OutcomesPlace
from ...proto.errors import InternalError, MagnetarError, NotOwner
from ...proto.names import Position
from ...proto.states import TopicState
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, Policy
from ..common.retry import retry_until_done
from ..log.log import Log
from ..log.managed_ledger import TopicFenced
from ..log.snapshot_ledger import SnapshotLedger, StateLedgers
from . import transactions_format as stored
from .transactions_core import AbortedEntriesOfLedger, Transactions, TxnSnapshot

_LOG = logging.getLogger("magnetar.broker.topic.transactions")

OUTCOME_DELAY_S = 0.05
OUTCOMES_MAX = 1_000
RETRY_S = 0.5
"""Seconds between two tries to write when bookies or metadata do not answer."""
READS_MAX = 16
STALE_ENTRIES = 10_000
"""Messages after the position of the last write, of any kind: a load replays them, so it is written anew."""


class OutcomesLedger:
    """The ledger with the stored outcomes of transactions, of a loaded topic that has seen a transaction. `core` must
    be set before the first call of `schedule_write`."""

    __slots__ = (
        "_bytes", "_closed", "_config", "_entries", "_ledger", "_log", "_loop", "_outcomes", "_rows", "_tasks",
        "_timer", "_waiting", "_world", "_writing", "core", "position", "stored_index", "version", "writes",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, log: Log, replication: Policy
    ) -> None:
        self.core: Transactions
        self.position = Position(-1, -1)  # of the last stored write
        self.stored_index = 0  # one past the last message up to it
        self.version = 0  # of the last stored write
        self.writes = 0
        self._world, self._config, self._log = world, config, log
        self._loop = asyncio.get_running_loop()
        self._ledger = SnapshotLedger(
            StateLedgers(ledgers, config, replication, log.topic, transactions="outcomes"), stored.decode_piece,
            stored.DamagedOutcomes, self._alarm,
        )  # fmt: skip
        self._rows: dict[int, stored.OutcomesPartRow] = {}  # of the ledger that is written
        self._entries = self._bytes = 0
        self._outcomes = 0  # since the last write began
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._closed = False

    # ------------------------------------------------------------------ opening
    async def recover(self, place: OutcomesPlace) -> TxnSnapshot:
        """Returns the last stored snapshot. The log must be taken over before. Raises Unavailable if bookies do not
        answer."""
        self._ledger.ledger_id = place.ledger_id
        found = TxnSnapshot(Position(place.mark_ledger, place.mark_entry))
        if place.ledger_id >= 0:
            found = await self._ledger.recover(place.ledger_id, self._whole) or TxnSnapshot(self._log.shape.start)
        self.position, self.stored_index = found.position, self._log.shape.end_index
        return found

    async def _whole(self, reader: LedgerReader, pieces: list[stored.Piece]) -> TxnSnapshot:
        marker, reads = stored.decode_marker(pieces), asyncio.Semaphore(READS_MAX)

        async def part(ledger_id: int, row: stored.OutcomesPartRow) -> AbortedEntriesOfLedger:
            async with reads:
                found = [await self._ledger.read_piece(reader, row.first_entry + at) for at in range(row.pieces)]
            return stored.decode_part(ledger_id, row, found)

        wanted = [(each, row) for each, row in marker.parts.items() if self._log.shape.find_span(each) is not None]
        parts = await asyncio.gather(*(part(*each) for each in wanted), return_exceptions=True)
        aborted: dict[int, AbortedEntriesOfLedger] = {}
        for (ledger_id, _), found in zip(wanted, parts, strict=True):
            if isinstance(found, BaseException):
                raise found
            aborted[ledger_id] = found
        return TxnSnapshot(marker.position, marker.open, aborted, marker.ended)

    def _alarm(self, what: str, error: Exception) -> None:
        _LOG.error("%s: %s, outcomes of transactions are asked for again: %s", self._log.topic, what, error)

    # ------------------------------------------------------------------ writing
    def schedule_write(self) -> None:
        """Schedules a write, because an outcome is not stored yet."""
        self._outcomes += 1
        if self._outcomes >= OUTCOMES_MAX:
            self._start()
        elif self._timer is None and self._writing is None and not self._closed:
            self._timer = self._loop.call_later(OUTCOME_DELAY_S, self._start)

    async def wait_durable(self) -> None:
        """Waits until every outcome before the call is stored. Raises NotOwner if the topic has ended at this
        broker."""
        version = self.core.version
        if self.version >= version:
            return
        if self._closed:
            raise self._ended_error()
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((version, future))
        if self._timer is None and self._writing is None:
            self._start()
        await future

    def write_outcomes_if_lagging(self) -> None:
        """Starts a write if a large part of the log is after the position of the last one: that part cannot be trimmed,
        and the next load replays it."""
        shape = self._log.shape
        if self.position[0] != shape.last_confirmed[0] or shape.end_index - self.stored_index >= STALE_ENTRIES:
            self._start()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and not self._closed:
            self._writing = self._tasks.spawn(self._write_all(), "outcomes of transactions")

    async def _write_all(self) -> None:
        try:
            while True:
                await retry_until_done(
                    self._write, self._world.clock, _LOG, f"{self._log.topic}: outcomes are not stored yet",
                    pause_s=RETRY_S, ends=lambda error: isinstance(error, TopicFenced) or not error.retryable,
                )  # fmt: skip
                left = []
                for version, future in self._waiting:
                    if version > self.version:
                        left.append((version, future))
                    elif not future.done():
                        future.set_result(None)
                self._waiting = left
                if not left:
                    break
        except MagnetarError as error:
            self._log.abandon(error)
        except Exception as error:  # a fault of the broker resolves those that wait too
            _LOG.exception("%s: outcomes of transactions cannot be stored", self._log.topic)
            self._log.abandon(
                InternalError(f"outcomes of transactions of {self._log.topic} cannot be stored: {error!r}")
            )
        finally:
            self._writing = None
        if self.core.version > self.version:
            self.schedule_write()

    async def _write(self) -> None:
        core, ledger = self.core, self._ledger
        ledger.sequence += 1
        changed, core.changed, self._outcomes = core.changed, set(), 0
        version, position, end_index = core.version, self._log.shape.last_confirmed, self._log.shape.end_index
        done = False
        try:
            if ledger.is_writable and not self._full:
                entries, rows = self._plan(position, self._rows, changed, self._entries)
                done = await ledger.append(entries)
            if not done:
                entries, rows = self._plan(position, {}, changed, 0)
                await ledger.roll(entries, partial(self._name, position))
                self._entries = self._bytes = 0
                done = True
        finally:
            if not done:
                core.changed |= changed
        self._rows = rows
        self._entries += len(entries)
        self._bytes += sum(map(len, entries))
        self.version, self.position, self.stored_index = version, position, end_index
        self.writes += 1

    @property
    def _full(self) -> bool:
        return self._entries >= self._config.cursor_roll_entries or self._bytes >= self._config.cursor_roll_bytes

    def _plan(
        self, position: Position, known: dict[int, stored.OutcomesPartRow], changed: set[int], first: int
    ) -> tuple[list[bytes], dict[int, stored.OutcomesPartRow]]:
        """Returns the entries of the next write, and the places of all valid parts after it."""
        core, sequence, entries = self.core, self._ledger.sequence, list[bytes]()
        rows: dict[int, stored.OutcomesPartRow] = {}
        for ledger_id in core.aborted:
            row = known.get(ledger_id)
            if row is None or ledger_id in changed:
                pieces = stored.encode_part(ledger_id, core.get_aborted_entries_of_ledger(ledger_id), sequence)
                row = stored.OutcomesPartRow(sequence, first + len(entries), len(pieces))
                entries += pieces
            rows[ledger_id] = row
        entries += stored.encode_marker(
            stored.Marker(position, core.open_transactions(), rows, core.ended_with_entries_in_flight()), sequence
        )
        return entries, rows

    async def _name(self, position: Position, ledger_id: int) -> None:
        place = OutcomesPlace(ledger_id=ledger_id, mark_ledger=position[0], mark_entry=position[1])
        await self._log.commit_fields(transactions=place)

    # ------------------------------------------------------------------ ending
    def _ended_error(self) -> MagnetarError:
        return NotOwner(f"topic {self._log.topic} is not served here any more; look it up again")

    def stop(self) -> None:
        """Stops writing. Callers that wait for a write get NotOwner."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            self._writing.cancel()
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(self._ended_error())
                future.exception()

    async def close(self) -> None:
        """Writes once more, if a ledger is open, so that the next load replays little. Must be called after the log was
        closed."""
        self.stop()
        await self._tasks.drain()
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                lags = self.core.version > self.version or self.position != self._log.shape.last_confirmed
                if lags and self._log.state is TopicState.CLOSED and self._ledger.is_writable:
                    self._ledger.sequence += 1
                    plan = self._plan(self._log.shape.last_confirmed, self._rows, self.core.changed, self._entries)
                    await self._ledger.append(plan[0])
                await self._ledger.close()
        except TimeoutError:
            _LOG.warning("%s: outcomes ledger %d stays open", self._log.topic, self._ledger.ledger_id)
