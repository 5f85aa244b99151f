"""The deduplication of a topic: loads and stores the state of broker/topic/dedup_core.py, so that it survives crashes
and changes of the topic's owner. After it, the interface of a topic's parts (`StatefulTopicPart`), and the replay of
the log when a topic is loaded (`replay_log_for_dedup_and_transactions`).

Snapshots are stored in a ledger of their own, which the topic's record names (field `dedup`). Rules (ledger protocol
§3.4, Pulsar PR9; invariants 32, 33, 34)
- A snapshot is one write: its position and the sequence ids are stored together or not at all.
- `Deduplication.open`, after the log was taken over, fences and recovers the snapshot ledger, and reads its last whole
  snapshot. The replay then adds the headers of all later entries of the log. A former owner can neither write to the
  fenced snapshot ledger nor put another ledger into the record: the record changes by compare-and-set.
- The entries after the last *stored* snapshot are not trimmed (`trim_limit`), because the next load replays them.
- A snapshot contains no sequence id of an open or aborted transaction (transactions_core.py). Its position is before
  the first entry of an open transaction, so a replay finds these entries again, and a commit adds their ids.
- If a snapshot ledger cannot be read, the broker logs an error and replays the whole log.
- The record says that deduplication is on before the first entry is judged, so that the next owner continues it.
- A producer is opened when none of its entries is in flight (`wait_idle`), so that its last stored id is known.

A snapshot is made after every `dedup_snapshot_entries` entries, or `dedup_snapshot_s` seconds after the first entry
that is in no snapshot (a policy; 0: never by time); one at a time. A snapshot that cannot be stored is retried with the
next entry or timer; until then the next load of the topic replays more entries.
Guarding tests: tests/broker/topic/test_dedup.py.

The stored snapshot of a topic's deduplication, as entries of its snapshot ledger.

    entry = magic "MD" | version u8 | 0 u8 | sequence u64 | piece u32 | pieces u32 | crc32c u32 | body

The bodies of a snapshot's pieces, concatenated, are JSON: the position, and for each producer its name and its highest
sequence id; if its last message is chunked and incomplete, also the message's uuid and last chunk (else "" and -1):

    {"ledger":7,"entry":41,"producers":[["p",120,"",-1],["q",3,"5f0c",1]],"gaps":{"p":"..."}}

`gaps` has, for a producer, the sequence ids of aborted transactions that no stored entry has, as a portable 64-bit
roaring bitmap in base64. A reader that does not know the field counts all ids up to the highest id as stored.
The version is that of proto/versions.py. Numbers are big-endian; `sequence` grows by one with each snapshot; the
checksum covers the 20 bytes before it and the body. A reader goes back from the end to the last whole snapshot: a crash
may leave incomplete ones after it. Decoding raises DamagedDedupSnapshot for damage.
Guarding test: tests/broker/topic/test_dedup_format.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from pyroaring import BitMap64

from ...ledger import LedgerClient, LedgerReader
from ...metadata.records import DeduplicationStateLocation
from ...proto.applied import AppliedPolicies
from ...proto.checksum import crc32c
from ...proto.entry import parse_header, split_broker_part
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.states import LedgerStays, TopicState
from ...proto.versions import DEDUPLICATION, check_format
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, GetReplicationPolicy
from ..log.log import Log
from ..log.log_queue_core import SequenceRange
from ..log.log_shape_core import TrimLimit
from ..log.snapshot_ledger import SnapshotLedger, TopicStateLedgers
from .dedup_core import DedupCore, DedupSnapshot, ProducerSequenceProgress
from .transactions import TopicTransactions, transaction_id_of

DEDUP_MAGIC = b"MD"
SNAPSHOT_PIECE_BYTES_MAX = 1 << 20
"""Largest body of an entry: 10,000 producers fit one."""

_HEAD = struct.Struct(">2sBBQII")
_CRC = struct.Struct(">I")


class DamagedDedupSnapshot(ValueError):
    """Raised if a deduplication snapshot in the snapshot ledger is damaged or incomplete."""


class DedupSnapshotPiece(NamedTuple):
    """One decoded entry of a snapshot ledger. A snapshot is stored as one or more pieces. `sequence`: the number of the
    snapshot; `piece`: the number of this piece, from 0; `pieces`: how many pieces the snapshot has; `body`: this
    piece's part of the JSON text."""

    sequence: int
    piece: int
    pieces: int
    body: bytes

    @property
    def is_last_piece(self) -> bool:
        """Returns True if this is the last piece of a snapshot."""
        return self.piece == self.pieces - 1


class _Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    ledger: int
    entry: int
    producers: list[tuple[str, int, str, int]]
    gaps: dict[str, bytes] = {}


def encode_snapshot(snapshot: DedupSnapshot, sequence: int) -> list[bytes]:
    """Returns the ledger entries that store the snapshot, in the order in which the caller must append them.
    `sequence`: the number of the snapshot."""
    rows = [(name, *progress[:3]) for name, progress in snapshot.persisted.items()]
    gaps = {name: each.serialize() for name, each in snapshot.gaps.items()}
    body = msgspec.json.encode(_Stored(*snapshot.position, rows, gaps))
    bodies = [body[at : at + SNAPSHOT_PIECE_BYTES_MAX] for at in range(0, len(body), SNAPSHOT_PIECE_BYTES_MAX)]
    return [_piece(sequence, number, len(bodies), each) for number, each in enumerate(bodies)]


def _piece(sequence: int, piece: int, pieces: int, body: bytes) -> bytes:
    head = _HEAD.pack(DEDUP_MAGIC, DEDUPLICATION.version, 0, sequence, piece, pieces)
    return head + _CRC.pack(crc32c(body, crc32c(head))) + body


def decode_piece(entry: bytes) -> DedupSnapshotPiece:
    """Decodes one entry of a snapshot ledger and returns it. Raises DamagedDedupSnapshot if the entry is damaged;
    NewerFormat if a later version of Magnetar wrote it."""
    if len(entry) < _HEAD.size + _CRC.size:
        raise DamagedDedupSnapshot(f"{len(entry)} bytes are no piece of a snapshot")
    magic, version, _, sequence, piece, pieces = _HEAD.unpack_from(entry)
    if magic != DEDUP_MAGIC:
        raise DamagedDedupSnapshot(f"{entry[:2].hex()} does not begin a snapshot")
    body = entry[_HEAD.size + _CRC.size :]
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedDedupSnapshot("the checksum does not match")
    check_format(DEDUPLICATION, version, "a snapshot ledger")
    return DedupSnapshotPiece(sequence, piece, pieces, body)


def decode_snapshot(pieces: Sequence[DedupSnapshotPiece]) -> DedupSnapshot:
    """Returns the snapshot that is stored in these pieces, which the caller passes in order. Raises
    DamagedDedupSnapshot if their bodies together are no valid snapshot."""
    try:
        found = msgspec.json.decode(b"".join(each.body for each in pieces), type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedDedupSnapshot(f"it is no snapshot: {error}") from error
    persisted = {name: ProducerSequenceProgress(number, uuid, chunk) for name, number, uuid, chunk in found.producers}
    try:
        gaps = {name: BitMap64.deserialize(each) for name, each in found.gaps.items()}
    except ValueError as error:
        raise DamagedDedupSnapshot(f"its gaps do not parse: {error}") from error
    return DedupSnapshot(Position(found.ledger, found.entry), persisted, gaps)


_LOG = logging.getLogger("magnetar.broker.topic.dedup")

SNAPSHOTS_PER_LEDGER = 1_000
"""Most snapshots in one ledger. All of them take disk space, but only the last one counts."""


def parse_sequence_range(metadata: MessageMetadata) -> SequenceRange:
    """Returns the first and the last sequence id in the metadata of an entry; for a chunk of a message, also the uuid
    of the message and the number of the chunk."""
    first, last = metadata.sequence_id, metadata.highest_sequence_id
    if last < first:
        last = first
    if metadata.num_chunks_from_msg > 1:
        return SequenceRange(first, last, metadata.uuid or "-", metadata.chunk_id, metadata.num_chunks_from_msg)
    return SequenceRange(first, last)


class Deduplication:
    """The deduplication of one loaded topic. Loads the state of `DedupCore` from the snapshot ledger, and stores
    snapshots of it from time to time. Must be called from one event loop."""

    __slots__ = (
        "_clock",
        "_config",
        "_ended",
        "_ledger_client",
        "_ledger_used",
        "_log",
        "_loop",
        "_replication",
        "_since",
        "_snapshot_s",
        "_stored",
        "_tasks",
        "_timer",
        "_undecided",
        "_working",
        "_written",
        "core",
        "replay_start_position",
        "replayed",
        "snapshots",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, clock: Clock, ledgers: LedgerClient, config: BrokerConfig, log: Log, replication: GetReplicationPolicy
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.core = DedupCore(now=self._clock.monotonic())
        self.snapshots = 0  # stored since the topic was loaded
        self.replayed = 0  # entries, when it was loaded
        self.replay_start_position: Position | None = None  # where the replay of a load begins; None: there is none
        self._undecided: Callable[[], Position | None] = lambda: None
        self._stored: Position | None = None
        self._config = config
        self._log = log
        self._ledger_client, self._replication = ledgers, replication
        self._written = 0  # snapshots in the ledger that is written
        self._since = 0  # entries that are in no snapshot
        self._snapshot_s = config.dedup_snapshot_s  # 0: no snapshot by time
        self._tasks: Tasks | None = None  # most topics have none
        self._ledger_used: SnapshotLedger[DedupSnapshotPiece] | None = None
        self._working: asyncio.Task[None] | None = None  # a snapshot, or turning on or off
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: dict[str, list[asyncio.Future[None]]] | None = None  # until nothing of the producer is in flight
        self._ended = False

    @property
    def _ledger(self) -> SnapshotLedger[DedupSnapshotPiece]:
        """Returns the snapshot ledger. Creates the object on the first use, because most topics have no snapshots."""
        if self._ledger_used is None:
            ledgers = TopicStateLedgers(
                self._ledger_client, self._config, self._replication, self._log.topic, dedup="snapshots"
            )  # fmt: skip
            self._ledger_used = SnapshotLedger(ledgers, decode_piece, DamagedDedupSnapshot, self._alarm)
        return self._ledger_used

    # ------------------------------------------------------------------ opening
    async def open(self, applied: AppliedPolicies) -> None:
        """Loads the stored state, and turns deduplication on or off as the policy says. Must be called after the log
        was taken over, and before anything is published. Waits for bookies and the metadata, and raises their errors
        (such as Unavailable); NewerFormat if a later version of Magnetar wrote the snapshot."""
        shape, place = self._log.shape, self._log.record.dedup
        self.core.position = shape.last_position
        self._snapshot_s = applied.dedup_snapshot_s
        if place is not None:
            self._ledger.ledger_id = place.ledger_id
        if not applied.deduplication:
            await self._turn_off()
            return
        if place is None:
            await self._turn_on()
            return
        snapshot = DedupSnapshot(Position(place.mark_ledger, place.mark_entry), {})
        if place.ledger_id >= 0:
            snapshot = await self._ledger.recover_state(place.ledger_id, self._whole) or DedupSnapshot(
                shape.start_position, {}
            )
        self.core = DedupCore(snapshot, now=self._clock.monotonic())
        self._stored = snapshot.position
        self._check_end()
        self.replay_start_position = snapshot.position

    @staticmethod
    async def _whole(_reader: LedgerReader, pieces: list[DedupSnapshotPiece]) -> DedupSnapshot:
        """Returns the snapshot that is stored in these pieces."""
        return decode_snapshot(pieces)

    def _alarm(self, what: str, error: Exception) -> None:
        _LOG.error("%s: %s, the log is replayed further back: %s", self._log.topic, what, error)

    def _check_end(self) -> None:
        shape, core = self._log.shape, self.core
        if core.position.entry_id >= 0 and core.position > shape.last_position > shape.start_position:
            _LOG.error("%s: sequence ids are known up to %s, after the end %s of the topic: acknowledged data is lost",
                       self._log.topic, core.position, shape.last_position)  # fmt: skip

    def replay_publish(
        self, name: str, numbers: SequenceRange, position: Position, *, counts: bool, aborted: bool = False
    ) -> None:
        """Adds an entry of the log to the state, while the topic is being loaded. Must be called in log order; ignores
        an entry that the loaded snapshot covers. `name`: the producer of the entry; `numbers`: its sequence ids;
        `counts`: False if the entry belongs to a transaction that is not committed; `aborted`: True if that transaction
        is aborted."""
        if self.replay_start_position is None or position <= self.core.position:
            return
        if counts:
            self.core.on_publish_confirmed(name, numbers, position)
        else:
            self.core.on_uncommitted_entry_stored(position)
        if aborted:
            back = BitMap64()
            numbers.add_sequence_ids_to(back)
            self.core.add_aborted_sequence_gaps({name: back})
        self.replayed += 1

    def finish_replay(self) -> None:
        """Called when all entries of the log were passed to `replay_publish`: counts them for the next snapshot."""
        self._since = self.replayed
        self._due()

    # ------------------------------------------------------------------ producers and their entries
    @property
    def is_enabled(self) -> bool:
        return self.core.enabled

    def trim_limit(self, applied: AppliedPolicies) -> TrimLimit | None:
        """Returns which part of the log deduplication no longer needs: everything up to the last stored snapshot.
        Returns None if deduplication is off, because then it needs no part of the log."""
        held = self._stored if self.core.enabled or self._working is not None else None
        return TrimLimit(held, why=LedgerStays.NOT_IN_SNAPSHOT) if held is not None else None

    def list_own_ledgers(self) -> list[int]:
        """Returns the ids of the ledgers that store snapshots, which must be deleted with the topic."""
        place = self._log.record.dedup
        return [place.ledger_id] if place is not None and place.ledger_id >= 0 else []

    def on_producer_joined(self, name: str) -> None:
        """Called when a connection of the producer `name` joins the topic. When this connection leaves, the caller must
        call `on_producer_left`."""
        self.core.on_producer_joined(name)

    def on_producer_left(self, name: str) -> None:
        """Called when a connection of the producer `name` leaves the topic, once for each call of `on_producer_joined`.
        May remove the state of producers that left long ago."""
        self.core.on_producer_left(name, self._clock.monotonic())
        self._expire_producers()

    def _expire_producers(self) -> None:
        self.core.expire_producers(
            self._clock.monotonic(), inactive_s=self._config.dedup_inactive_minutes * 60.0,
            producers_max=self._config.dedup_producers,
        )  # fmt: skip

    async def wait_idle(self, name: str) -> None:
        """Waits until no entry of the producer is in flight, or until `stop` is called; returns at once while
        deduplication is off."""
        if self.core.enabled and not self.core.is_idle(name):
            future: asyncio.Future[None] = self._loop.create_future()
            if self.waiting is None:
                self.waiting = {}
            self.waiting.setdefault(name, []).append(future)
            await future

    def on_publish_confirmed(self, name: str) -> None:
        """Called when an entry of the producer `name` is stored, directly after `DedupCore.on_publish_confirmed`:
        counts the entry for the next snapshot, and resumes callers of `wait_idle`. The call may be omitted while
        deduplication is off and no caller is in `waiting`."""
        if self.waiting:
            self._outcome(name)
        if self.core.enabled:
            self._since += 1
            self._due()

    def on_uncommitted_entry_stored(self, position: Position) -> None:
        """Called when an entry of an open transaction is stored. Its sequence ids count only when the transaction
        commits."""
        self.core.on_uncommitted_entry_stored(position)
        if self.core.enabled:
            self._since += 1
            self._due()

    def on_transaction_ended(
        self,
        numbers: Mapping[str, ProducerSequenceProgress],
        sent: Mapping[str, BitMap64],
        back: Mapping[str, BitMap64],
    ) -> None:
        """Called when a transaction has ended. `numbers`: the progress that each producer has made by the transaction,
        which counts from now on; `sent`: the sequence ids of the transaction that are in the log, by producer; `back`:
        those that are not in the log."""
        self.core.on_transaction_committed(numbers, sent)
        self.core.add_aborted_sequence_gaps(back)
        if self.core.enabled:
            self._since += 1
            self._due()

    def set_snapshot_limit_function(self, undecided: Callable[[], Position | None]) -> None:
        """Sets the function that limits up to which position a snapshot may go. `undecided` returns the position before
        the first entry of an open transaction; None if no transaction is open."""
        self._undecided = undecided

    def on_publish_failed(self, name: str) -> None:
        """Called when an entry of the producer `name` with the verdict NEW failed: reports it to the core, and resumes
        callers of `wait_idle` if no other entry of the producer is in flight."""
        self.core.on_publish_failed(name)
        self._outcome(name)

    def _outcome(self, name: str) -> None:
        """Resumes the callers that wait for the producer `name`, if no entry of it is in flight any more."""
        if self.waiting and self.core.is_idle(name):
            for future in self.waiting.pop(name, ()):
                if not future.done():
                    future.set_result(None)

    # ------------------------------------------------------------------ on and off
    def apply(self, applied: AppliedPolicies) -> None:
        """Applies a changed time between two snapshots, and restarts the snapshot timer then. Does not turn
        deduplication on or off: `run_due_work` does that."""
        if applied.dedup_snapshot_s != self._snapshot_s:
            self._snapshot_s = applied.dedup_snapshot_s
            self._cancel_timer()
            if self.core.enabled:
                self._due()

    def run_due_work(self, applied: AppliedPolicies) -> None:
        """Starts a task that turns deduplication on or off, if it differs from the policy."""
        self.set_enabled(applied.deduplication)

    def set_enabled(self, enabled: bool) -> None:
        """Starts a task that turns deduplication on or off, and returns without waiting for it. Does nothing if
        deduplication is in that state already, while a snapshot or another change is in progress, or after `stop`."""
        if enabled != self.core.enabled and self._working is None and not self._ended:
            self._start(self._turn_on if enabled else self._turn_off)

    async def _turn_on(self) -> None:
        position = self._snapshot_now().position
        self._stored = position
        await self._log.commit_fields(dedup=DeduplicationStateLocation(mark_ledger=position[0], mark_entry=position[1]))
        self.core.enable()
        self._since = 0
        _LOG.info("%s: publishes are deduplicated from %s on", self._log.topic, position)

    async def _turn_off(self) -> None:
        """Turns deduplication off, and removes its snapshot ledger from the topic's record. Then deletes this ledger;
        if that fails, the ledger only costs disk space."""
        self.core.disable()
        self._cancel_timer()
        if self._log.record.dedup is not None:
            await self._log.commit_fields(dedup=None)
            self._stored = None
            await self._ledger.delete_ledger()

    # ------------------------------------------------------------------ snapshots
    def _due(self) -> None:
        if self._since >= self._config.dedup_snapshot_entries:
            self._snapshot()
        elif self._since:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._snapshot_s and self._timer is None and not self._ended:
            self._timer = self._loop.call_later(self._snapshot_s, self._time)

    def _time(self) -> None:
        self._timer = None
        self._snapshot()

    def _snapshot(self) -> None:
        if self._working is None and self.core.enabled and not self._ended:
            self._start(self._store)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._tasks is None:
            self._tasks = Tasks()
        self._working = self._tasks.spawn(self._work(work), "deduplication")

    async def _work(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except MagnetarError as error:
            _LOG.warning("%s: the state of deduplication is not stored yet: %s", self._log.topic, error)
            if self._since and self.core.enabled:
                self._set_timer()
        finally:
            self._working = None

    async def _store(self) -> None:
        self._cancel_timer()
        self._expire_producers()
        snapshot, since = self._snapshot_now(), self._since
        self._ledger.sequence += 1
        entries = encode_snapshot(snapshot, self._ledger.sequence)
        if self._written >= SNAPSHOTS_PER_LEDGER or not await self._ledger.append_pieces(entries):
            await self._ledger.roll_ledger(entries, partial(self._name, snapshot.position))
            self._written = 0
        self._stored = snapshot.position
        self._since -= since
        self._written += 1
        self.snapshots += 1

    def _snapshot_now(self) -> DedupSnapshot:
        """Returns a snapshot of the present state. The snapshot may already contain sequence ids of entries after its
        position. That does no harm: a replay of these entries changes nothing."""
        snapshot, undecided = self.core.snapshot(), self._undecided()
        return snapshot if undecided is None or undecided > snapshot.position else snapshot._replace(position=undecided)

    async def _name(self, position: Position, ledger_id: int) -> None:
        mark_ledger, mark_entry = position
        await self._log.commit_fields(
            dedup=DeduplicationStateLocation(ledger_id=ledger_id, mark_ledger=mark_ledger, mark_entry=mark_entry)
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Stops deduplication, because the topic closes or another broker owns the topic. Nothing more is stored,
        except by `close`, and all callers of `wait_idle` are resumed. Idempotent."""
        self._ended = True
        self._cancel_timer()
        if self._working is not None:
            self._working.cancel()
        waiting, self.waiting = self.waiting or {}, None
        for future in [future for futures in waiting.values() for future in futures]:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Stores a last snapshot, if a snapshot ledger is open and the log was closed in order, so that the next load
        of the topic replays few entries. Must be called after the log was closed. Idempotent.

        If the snapshot cannot be stored within `close_timeout_s` seconds, the next load replays more entries of the log
        instead.
        """
        last = self._since and self.core.enabled and self._log.state is TopicState.CLOSED
        self.stop()
        if self._tasks is not None:
            await self._tasks.drain()
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                if last and self._ledger.is_writable:
                    self._ledger.sequence += 1
                    await self._ledger.append_pieces(encode_snapshot(self._snapshot_now(), self._ledger.sequence))
                await self._ledger.close()
        except TimeoutError:
            _LOG.warning("%s: snapshot ledger %d stays open", self._log.topic, self._ledger.ledger_id)


# ---------------------------------------------------------------------------------------------------------- part
# The parts of a topic beside its log and its subscriptions: each keeps some state across owners.
#
# A topic calls its parts in the order of its tuple `parts` (broker/topic/topic.py), and the methods of each part so:
#
#     open          after the take-over of the log, before the first publish and before the subscriptions are opened
#     run_due_work       from time to time, and after the policies changed: what is due begins, in a task of the part
#     trim_limit    before each trim: what of the log the part needs, and why
#     stop          the topic is lost, or closes: nothing more is written, every waiting caller is resumed. Idempotent
#     close         after the log was closed; what may be stored is stored. Idempotent
#     list_own_ledgers   the topic is deleted: they are deleted after the topic's record
#
# Guarding test: tests/broker/topic/test_parts.py.


class StatefulTopicPart(Protocol):
    """A part of a topic whose state must survive a change of the topic's owner. Deduplication, TopicTransactions,
    Compaction and KeyIndexes implement it; the topic and its maintenance call it. Order of the calls: `open` once,
    after the log was taken over; `run_due_work` and `trim_limit` repeatedly; `stop` when the topic ends here; `close`
    after the log was closed. After the deletion of the topic's record, the ledgers of `list_own_ledgers` are
    deleted."""

    async def open(self, applied: AppliedPolicies) -> None: ...
    def run_due_work(self, applied: AppliedPolicies) -> None: ...
    def trim_limit(self, applied: AppliedPolicies) -> TrimLimit | None: ...
    def stop(self) -> None: ...
    async def close(self) -> None: ...
    def list_own_ledgers(self) -> list[int]: ...


# -------------------------------------------------------------------------------------------------------- replay
# The replay of a load: one pass over the headers of the log, for deduplication and for transactions.
#
# It begins at the older of the positions up to which the two know the log, and reads nothing where neither needs it.
# Each entry is given to the transactions first: whether its numbers count for deduplication depends on what is known of
# its transaction. Guarding tests: tests/broker/topic/test_dedup.py, tests/broker/topic/test_transactions.py.


REPLAY_READ_BYTES = 4 << 20
"""Bytes of one read of a replay."""


async def replay_log_for_dedup_and_transactions(
    log: Log, dedup: Deduplication, transactions: TopicTransactions
) -> None:
    """Reads the entries of the log after the older of the two stored states, and passes each to transactions and to
    deduplication. Then calls `finish_replay` of both. Must be called after both were opened, and before anything is
    published. Raises the errors of reading the log; CorruptEntry if the header of an entry cannot be parsed."""
    starts = [each for each in (dedup.replay_start_position, transactions.replay_start_position) if each is not None]
    if starts:
        shape = log.shape
        position = shape.position_after(min(starts))
        while shape.has_visible_entry(position := shape.next_unskipped_position(position)):
            for entry in await log.reader.read(position, REPLAY_READ_BYTES):
                header = parse_header(split_broker_part(entry.payload)[2], verify=False)
                numbers, txn = parse_sequence_range(header.metadata), transaction_id_of(header.metadata)
                aborted = txn is not None and transactions.add_replayed_entry(txn, header, numbers, entry)
                hidden = txn is not None and transactions.is_hidden(txn, entry.position)
                dedup.replay_publish(header.producer_name, numbers, entry.position, counts=not hidden, aborted=aborted)
                position = shape.position_after(entry.position)
    dedup.finish_replay()
    transactions.finish_replay()
