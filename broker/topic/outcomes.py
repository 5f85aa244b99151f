"""The outcomes ledger of a topic: stores the state of transactions_core.py, so that it survives crashes and changes of
the topic's owner.

A write stores the parts that have changed, and then a marker with the position, the open transactions and a row for
each valid part. The write counts when the marker is stored. Rules
- A write begins `OUTCOME_STORE_DELAY_S` after an outcome, or when `OUTCOMES_PER_WRITE_MAX` outcomes wait; one write at
  a time, with all outcomes that wait. `wait_durable` returns after a write that has all outcomes from before the call.
- A load replays the headers of the log after the position of the last write, and asks the coordinators for outcomes
  that the write does not have. So the log may be longer than the position of the write by any number of entries.
- The log after the position of the last *stored* write is not trimmed (`position`).
- The ledger is replaced in the order of broker/log/snapshot_ledger.py; the topic's record names the current one.
- If a ledger cannot be read, or has nothing, the broker logs an error, replays the log from the last snapshot that it
  can read, or all of it, and asks for all outcomes again. It stores up to where outcomes may be lost
  (`TxnSnapshot.lost_to`), because coordinators do not have those of long ago any more.
Guarding tests: tests/broker/topic/test_transactions.py
(`test_what_a_topic_and_its_coordinator_forgot_is_decided_by_an_operator_alone`).

The format of the stored outcomes: a snapshot is a *marker* and the parts that it names, which earlier snapshots may
have stored. A marker or a part is one entry, or several consecutive entries if it is larger than
OUTCOMES_PIECE_BYTES_MAX:

    entry = magic "MX" | version u8 | kind u8 | sequence u64 | piece u32 | pieces u32 | crc32c u32 | body

    kind 0  marker    MessagePack: {position, open, parts, ended, lost_to}
                      position [ledger, entry]    what is known is known of all entries up to it
                      open     of each open transaction [most, least, first, entries, indexes, starts, bytes, numbers]
                      ended    [most, least] of each that has ended with entries on their way, which are aborted
                      lost_to  [ledger, entry]    outcomes of transactions with entries up to it may be lost; [-1, -1]
                      parts    of each ledger with aborted entries [ledger, sequence, first entry, pieces]
    kind 1  part      MessagePack: [ledger, entries, indexes, bytes]: what is aborted in one ledger of the log

Numbers before the body are big-endian; the version is that of proto/versions.py. `entries` are entry ids as a portable
roaring bitmap (of an open transaction {ledger: bitmap}); `indexes` and `starts` are indexes of messages, as 64-bit
ones. `sequence` is the number of the write, and grows by one with each; a row of `parts` has the number of the write
that stored the part, so that an entry in the wrong place is detected. The checksum covers the 20 bytes before it and
the body. A reader goes back from the end to the last marker all of whose parts can be read. Decoding raises
DamagedTransactionOutcomes for damage. Guarding test: tests/broker/topic/test_transactions_format.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from pyroaring import BitMap, BitMap64

from ...ledger import LedgerClient, LedgerReader
from ...metadata.records import TransactionOutcomesLocation
from ...proto.checksum import crc32c
from ...proto.errors import InternalError, MagnetarError, NotOwner
from ...proto.names import Position
from ...proto.states import TopicState, TxnId
from ...proto.versions import OUTCOMES, check_format
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, GetReplicationPolicy
from ..common.retry import retry_until_done
from ..log.log import Log
from ..log.managed_ledger import TopicFenced
from ..log.snapshot_ledger import SnapshotLedger, TopicStateLedgers
from .dedup_core import ProducerSequenceProgress
from .transactions_core import (
    NO_POSITION,
    AbortedEntriesOfLedger,
    OpenTxnInSnapshot,
    TopicTransactionsCore,
    TxnSnapshot,
)

OUTCOMES_MAGIC = b"MX"
OUTCOMES_PIECE_BYTES_MAX = 1 << 20
"""Largest body of an entry."""
MARKER_KIND, PART_KIND = 0, 1

_HEAD = struct.Struct(">2sBBQII")
_CRC = struct.Struct(">I")
ENTRY_HEAD_BYTES = _HEAD.size + _CRC.size


class DamagedTransactionOutcomes(ValueError):
    """Raised if an entry of an outcomes ledger, or the snapshot that its entries contain, is damaged."""


class OutcomesPartPlace(NamedTuple):
    """Where a part of a snapshot is stored in the outcomes ledger. A part contains the aborted entries of one ledger of
    the topic. The marker at the end of a snapshot lists the places of all parts. `sequence`: the number of the write
    that stored the part; `first_entry`: the entry id of its first piece; `pieces`: the number of its pieces."""

    sequence: int
    first_entry: int
    pieces: int


class OutcomesPiece(NamedTuple):
    """One decoded entry of an outcomes ledger. A part, and a marker, is stored as one or more pieces. `kind`:
    MARKER_KIND or PART_KIND; `sequence`: the number of the write; `piece`: the number of this piece, from 0, of
    `pieces` pieces."""

    kind: int
    sequence: int
    piece: int
    pieces: int
    body: bytes

    @property
    def is_last_piece(self) -> bool:
        """Returns True if this is the last piece of a marker, which completes a snapshot."""
        return self.kind == MARKER_KIND and self.piece == self.pieces - 1


class OutcomesSnapshotMarker(NamedTuple):
    """The marker at the end of a snapshot of a topic's transactions. `position`: the snapshot has all that is known of
    the entries up to it; `open`: the open transactions; `parts`: the places of the snapshot's parts, by the ledger of
    the log. `ended`: the transactions that ended while entries of them were in flight; these entries are aborted.
    `lost_to`: as of TxnSnapshot."""

    position: Position
    open: tuple[OpenTxnInSnapshot, ...]
    parts: Mapping[int, OutcomesPartPlace]
    ended: tuple[TxnId, ...] = ()
    lost_to: Position = NO_POSITION


class _Open(msgspec.Struct, frozen=True, array_like=True):
    most: int
    least: int
    first: tuple[int, int]
    entries: dict[int, bytes]
    indexes: bytes
    starts: bytes
    size: int
    numbers: list[tuple[str, int, str, int, int, int]]


class _Marker(msgspec.Struct, frozen=True):
    position: tuple[int, int]
    open: list[_Open]
    parts: list[tuple[int, int, int, int]]
    ended: list[tuple[int, int]] = []
    lost_to: tuple[int, int] = (-1, -1)


class _Part(msgspec.Struct, frozen=True, array_like=True):
    ledger: int
    entries: bytes
    indexes: bytes
    size: int


# ------------------------------------------------------------------------------------------ encoding
def encode_outcomes_part(ledger_id: int, part: AbortedEntriesOfLedger, sequence: int) -> list[bytes]:
    """Returns the ledger entries that store the part, in the order in which the caller must append them. `ledger_id`:
    the ledger of the topic whose aborted entries the part contains; `sequence`: the number of the write."""
    part.entries.run_optimize()
    stored = _Part(ledger_id, part.entries.serialize(), part.indexes.serialize(), part.size)
    return _pieces(PART_KIND, sequence, msgspec.msgpack.encode(stored))


def encode_marker(marker: OutcomesSnapshotMarker, sequence: int) -> list[bytes]:
    """Returns the ledger entries that store the marker, in the order in which the caller must append them. `sequence`:
    the number of the write."""
    rows = [(ledger_id, *row) for ledger_id, row in sorted(marker.parts.items())]
    opened = [_open(each) for each in marker.open]
    lost_to = marker.lost_to[0], marker.lost_to[1]
    stored = _Marker((marker.position[0], marker.position[1]), opened, rows, list(marker.ended), lost_to)
    return _pieces(MARKER_KIND, sequence, msgspec.msgpack.encode(stored))


def _open(each: OpenTxnInSnapshot) -> _Open:
    numbers = [(name, *progress[:3], *last) for name, (progress, last) in each.numbers.items()]
    entries = {ledger_id: entries.serialize() for ledger_id, entries in each.entries.items()}
    return _Open(
        *each.txn, (each.first[0], each.first[1]), entries, each.indexes.serialize(), each.starts.serialize(),
        each.size, numbers,
    )  # fmt: skip


def _pieces(kind: int, sequence: int, body: bytes) -> list[bytes]:
    bodies = [body[at : at + OUTCOMES_PIECE_BYTES_MAX] for at in range(0, len(body), OUTCOMES_PIECE_BYTES_MAX)]
    entries = []
    for number, each in enumerate(bodies):
        head = _HEAD.pack(OUTCOMES_MAGIC, OUTCOMES.version, kind, sequence, number, len(bodies))
        entries.append(head + _CRC.pack(crc32c(each, crc32c(head))) + each)
    return entries


# ------------------------------------------------------------------------------------------ decoding
def decode_piece(entry: bytes) -> OutcomesPiece:
    """Decodes one entry of an outcomes ledger and returns it. Raises DamagedTransactionOutcomes if the entry is
    damaged; NewerFormat if a later version of Magnetar wrote it."""
    if len(entry) < ENTRY_HEAD_BYTES:
        raise DamagedTransactionOutcomes(f"{len(entry)} bytes are no piece of outcomes")
    magic, version, kind, sequence, piece, pieces = _HEAD.unpack_from(entry)
    if magic != OUTCOMES_MAGIC:
        raise DamagedTransactionOutcomes(f"{entry[:2].hex()} does not begin outcomes")
    body = entry[ENTRY_HEAD_BYTES:]
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedTransactionOutcomes("the checksum does not match")
    check_format(OUTCOMES, version, "an outcomes ledger")
    if not piece < pieces or kind > PART_KIND:
        raise DamagedTransactionOutcomes(f"piece {piece} of {pieces} of kind {kind}")
    return OutcomesPiece(kind, sequence, piece, pieces, body)


def decode_marker(pieces: Sequence[OutcomesPiece]) -> OutcomesSnapshotMarker:
    """Returns the marker that is stored in these pieces, which the caller passes in order. Raises
    DamagedTransactionOutcomes if the marker is damaged."""
    try:
        found = msgspec.msgpack.decode(b"".join(each.body for each in pieces), type=_Marker)
        opened = tuple(
            OpenTxnInSnapshot(
                TxnId(each.most, each.least), Position(*each.first),
                {ledger_id: BitMap.deserialize(entries) for ledger_id, entries in each.entries.items()},
                BitMap64.deserialize(each.indexes), BitMap64.deserialize(each.starts), each.size,
                {
                    name: (ProducerSequenceProgress(number, uuid, chunk), Position(ledger_id, entry_id))
                    for name, number, uuid, chunk, ledger_id, entry_id in each.numbers
                },
            )
            for each in found.open
        )  # fmt: skip
    except (msgspec.DecodeError, ValueError, IndexError, MemoryError, RecursionError) as error:
        raise DamagedTransactionOutcomes(f"it is no marker: {error}") from error
    rows = {row[0]: OutcomesPartPlace(*row[1:]) for row in found.parts}
    ended = tuple(TxnId(*each) for each in found.ended)
    return OutcomesSnapshotMarker(Position(*found.position), opened, rows, ended, Position(*found.lost_to))


def decode_outcomes_part(
    ledger_id: int, row: OutcomesPartPlace, pieces: Sequence[OutcomesPiece]
) -> AbortedEntriesOfLedger:
    """Returns the part that is stored in these pieces, which were read at the place `row`. Raises
    DamagedTransactionOutcomes if the pieces are damaged, or belong to another part."""
    for number, each in enumerate(pieces):
        if each[:4] != (PART_KIND, row.sequence, number, row.pieces):
            raise DamagedTransactionOutcomes(f"the part of ledger {ledger_id} is not at entry {row.first_entry}")
    try:
        found = msgspec.msgpack.decode(b"".join(each.body for each in pieces), type=_Part)
        if found.ledger != ledger_id:
            raise DamagedTransactionOutcomes(f"the part of ledger {ledger_id} is of ledger {found.ledger}")
        return AbortedEntriesOfLedger(
            BitMap.deserialize(found.entries), BitMap64.deserialize(found.indexes), found.size
        )
    except (msgspec.DecodeError, ValueError, IndexError, MemoryError, RecursionError) as error:
        raise DamagedTransactionOutcomes(f"it is no part: {error}") from error


_LOG = logging.getLogger("magnetar.broker.topic.transactions")

OUTCOME_STORE_DELAY_S = 0.05
OUTCOMES_PER_WRITE_MAX = 1_000
OUTCOME_RETRY_S = 0.5
"""Seconds between two tries to write when bookies or metadata do not answer."""
OUTCOME_READS_AT_ONCE = 16
STALE_ENTRIES_MAX = 10_000
"""After so many messages the outcomes are written again, because a load replays the entries after the last write."""


class TransactionOutcomesLedger:
    """Stores the outcomes of a loaded topic's transactions in a ledger of their own. Created for a topic with its first
    transaction. `core` must be set before any method except `recover` is called."""

    __slots__ = (
        "_bytes", "_closed", "_config", "_entries", "_ledger", "_log", "_loop", "_outcomes", "_rows", "_tasks",
        "_timer", "_waiting", "_world", "_writing", "core", "position", "stored_index", "version", "writes",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, log: Log, replication: GetReplicationPolicy
    ) -> None:
        self.core: TopicTransactionsCore
        self.position = Position(-1, -1)  # of the last stored write
        self.stored_index = 0  # one past the last message up to it
        self.version = 0  # of the last stored write
        self.writes = 0
        self._world, self._config, self._log = world, config, log
        self._loop = asyncio.get_running_loop()
        self._ledger = SnapshotLedger(
            TopicStateLedgers(ledgers, config, replication, log.topic, transactions="outcomes"), decode_piece,
            DamagedTransactionOutcomes, self._alarm,
        )  # fmt: skip
        self._rows: dict[int, OutcomesPartPlace] = {}  # of the ledger that is written
        self._entries = self._bytes = 0
        self._outcomes = 0  # since the last write began
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._closed = False

    # ------------------------------------------------------------------ opening
    async def recover(self, place: TransactionOutcomesLocation) -> TxnSnapshot:
        """Returns the last stored snapshot of the topic's transactions. `place`: the outcomes ledger that the topic's
        record names. If the ledger has no readable snapshot, returns an empty one at the start of the log. If any part
        of the ledger cannot be read, `lost_to` of the snapshot is the end of the log. The log must be taken over
        before. Raises the errors of `SnapshotLedger.recover_state`. Raises NewerFormat if a later version of Magnetar
        wrote the ledger."""
        self._ledger.ledger_id = place.ledger_id
        found = TxnSnapshot(Position(place.mark_ledger, place.mark_entry))
        if place.ledger_id >= 0:
            found = await self._ledger.recover_state(place.ledger_id, self._whole) or TxnSnapshot(
                self._log.shape.start_position
            )
            if self._ledger.is_lost:
                found = found._replace(lost_to=self._log.shape.last_confirmed)
        self.position, self.stored_index = found.position, self._log.shape.end_index
        return found

    async def _whole(self, reader: LedgerReader, pieces: list[OutcomesPiece]) -> TxnSnapshot:
        marker, reads = decode_marker(pieces), asyncio.Semaphore(OUTCOME_READS_AT_ONCE)

        async def part(ledger_id: int, row: OutcomesPartPlace) -> AbortedEntriesOfLedger:
            async with reads:
                found = [
                    await self._ledger.read_snapshot_piece(reader, row.first_entry + at) for at in range(row.pieces)
                ]
            return decode_outcomes_part(ledger_id, row, found)

        wanted = [
            (each, row) for each, row in marker.parts.items() if self._log.shape.find_span_of_ledger(each) is not None
        ]
        parts = await asyncio.gather(*(part(*each) for each in wanted), return_exceptions=True)
        aborted: dict[int, AbortedEntriesOfLedger] = {}
        for (ledger_id, _), found in zip(wanted, parts, strict=True):
            if isinstance(found, BaseException):
                raise found
            aborted[ledger_id] = found
        return TxnSnapshot(marker.position, marker.open, aborted, marker.ended, marker.lost_to)

    def _alarm(self, what: str, error: Exception) -> None:
        _LOG.error("%s: %s, outcomes of transactions are asked for again: %s", self._log.topic, what, error)

    # ------------------------------------------------------------------ writing
    def schedule_write(self) -> None:
        """Schedules a write of the outcomes, because there is an outcome that is not stored yet. The write begins after
        OUTCOME_STORE_DELAY_S seconds; at once if OUTCOMES_PER_WRITE_MAX outcomes wait. If a write cannot be stored for
        good, the topic is abandoned at this broker."""
        self._outcomes += 1
        if self._outcomes >= OUTCOMES_PER_WRITE_MAX:
            self._start()
        elif self._timer is None and self._writing is None and not self._closed:
            self._timer = self._loop.call_later(OUTCOME_STORE_DELAY_S, self._start)

    async def wait_durable(self) -> None:
        """Waits until each outcome that was known before the call is stored. Raises NotOwner if the topic has ended at
        this broker."""
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
        """Starts a write of the outcomes if STALE_ENTRIES_MAX or more messages were stored since the last write, or if
        the log has begun another ledger. Entries after the position of the last write cannot be trimmed, and the next
        load of the topic replays them."""
        shape = self._log.shape
        if self.position[0] != shape.last_confirmed[0] or shape.end_index - self.stored_index >= STALE_ENTRIES_MAX:
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
                    pause_s=OUTCOME_RETRY_S, ends=lambda error: isinstance(error, TopicFenced) or not error.retryable,
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
                done = await ledger.append_pieces(entries)
            if not done:
                entries, rows = self._plan(position, {}, changed, 0)
                await ledger.roll_ledger(entries, partial(self._name, position))
                self._entries = self._bytes = 0
                done = True
        finally:
            if not done:  # cancelled: which entries are in the ledger is not known
                core.changed |= changed
                self._entries = -1
        self._rows = rows
        self._entries += len(entries)
        self._bytes += sum(map(len, entries))
        self.version, self.position, self.stored_index = version, position, end_index
        self.writes += 1

    @property
    def _full(self) -> bool:
        config = self._config
        return not 0 <= self._entries < config.cursor_roll_entries or self._bytes >= config.cursor_roll_bytes

    def _plan(
        self, position: Position, known: dict[int, OutcomesPartPlace], changed: set[int], first: int
    ) -> tuple[list[bytes], dict[int, OutcomesPartPlace]]:
        """Returns the entries of the next write, and the places of all valid parts after this write."""
        core, sequence, entries = self.core, self._ledger.sequence, list[bytes]()
        rows: dict[int, OutcomesPartPlace] = {}
        for ledger_id in core.aborted:
            row = known.get(ledger_id)
            if row is None or ledger_id in changed:
                pieces = encode_outcomes_part(ledger_id, core.get_aborted_entries_of_ledger(ledger_id), sequence)
                row = OutcomesPartPlace(sequence, first + len(entries), len(pieces))
                entries += pieces
            rows[ledger_id] = row
        entries += encode_marker(
            OutcomesSnapshotMarker(
                position, core.open_transactions(), rows, core.ended_txns_with_entries_in_flight(), core.lost_to
            ),
            sequence,
        )
        return entries, rows

    async def _name(self, position: Position, ledger_id: int) -> None:
        place = TransactionOutcomesLocation(ledger_id=ledger_id, mark_ledger=position[0], mark_entry=position[1])
        await self._log.commit_fields(transactions=place)

    # ------------------------------------------------------------------ ending
    def _ended_error(self) -> MagnetarError:
        return NotOwner(f"topic {self._log.topic} is not served here any more; look it up again")

    def stop(self) -> None:
        """Stops the writes of outcomes. Callers of `wait_durable` get NotOwner. Idempotent."""
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
        """Writes the outcomes a last time, if a ledger is open and the log was closed in order, so that the next load
        of the topic replays few entries. Must be called after the log was closed. Gives up after `close_timeout_s`
        seconds."""
        self.stop()
        await self._tasks.drain()
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                lags = self.core.version > self.version or self.position != self._log.shape.last_confirmed
                is_writable = self._ledger.is_writable and self._entries >= 0
                if lags and self._log.state is TopicState.CLOSED and is_writable:
                    self._ledger.sequence += 1
                    plan = self._plan(self._log.shape.last_confirmed, self._rows, self.core.changed, self._entries)
                    await self._ledger.append_pieces(plan[0])
                await self._ledger.close()
        except TimeoutError:
            _LOG.warning("%s: outcomes ledger %d stays open", self._log.topic, self._ledger.ledger_id)
