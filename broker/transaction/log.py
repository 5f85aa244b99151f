"""The ledger of a coordinator of transactions, and the record that names it.

    log = CoordinatorLog(…)
    state, epoch = await log.take_over()      in the order of TAKE_OVER_STEPS
    appended = log.append_nowait(records)     returns a future, done when they are durable; None: call `append`
    await log.append(records, state)          returns when they are durable; after an error the epoch must end
    await log.close(records, state, idle=…)   hands over to the next epoch

**Take-over** has the steps of `TAKE_OVER_STEPS`:

    read_coordinator_claim       reads the claim, the epoch and the id of the ledger
    recover_ledger               fences the former writer of the ledger for good, and reads all that was confirmed
    store_coordinator_claim      stores the next epoch, and a claim that no other owner has, if the record has not
                                 changed since it was read. Then stores that this coordinator has begun: if its record
                                 is missing later, it is not taken over any more
    finish_take_over             ends the take-over; no request is answered before

All records that the former owner confirmed are in the recovered ledger, because the claim succeeds only if the metadata
record still names that ledger. The former owner can confirm no record after the fence, and name no other ledger after
the claim.

**Writing.** A recovered ledger is never written again: the first write of an owner rolls. A roll creates a ledger,
appends the whole state, names the ledger in the metadata record by compare-and-set, and deletes the old ledger
(`ROLL_STEPS`). The records of a failed append are appended again to the next ledger, whose snapshot does not have them.
That is safe, because the former ledger is not read any more once the record names another one. If another owner has
fenced the ledger, this owner ends at once.

The caller makes one call at a time. Guards: tests/broker/transaction/test_log.py (a crash and a failure at each write).

The format of the entries of a coordinator's ledger.

    entry = magic "MX" | version u8 | kind u8 | number u32 | crc32c u32 | body

    kind 1  a piece of the snapshot that the ledger begins with
    kind 2  its last piece
    kind 3  records that were decided after it

The body is JSON: a list of records (broker/transaction/records_core.py), each a list that begins with its number.
Numbers are big-endian; `number` is the entry's id in the ledger; the checksum covers the 8 bytes before it and the
body. The version is that of proto/versions.py. A ledger that the metadata names has a whole snapshot, because it is
named after the snapshot is stored. If an entry does not parse (DamagedCoordinatorLedger), the coordinator is not
loaded: it could answer ABORTED for a committed transaction.

Example: entry 3 of a ledger, with the record that the outcomes of the transactions below 7 are discarded:

    4d58 01 03 00000003 <crc32c>  [[8,7]]

Guarding test: tests/broker/transaction/test_entries.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ...ledger import LedgerWriter
from ...metadata import paths
from ...metadata.records import CoordinatorRecord, DamagedRecord, TransactionsRecord, decode_record, encode_record
from ...metadata.store import MetadataStore, VersionedValue, get_record, update_node, update_record
from ...proto.checksum import crc32c
from ...proto.errors import DataLost, LedgerFenced, LedgerNotFound, MagnetarError, NotOwner, Unavailable
from ...proto.states import EPOCH_BITS
from ...proto.versions import COORDINATOR, check_format
from ...runtime.network import World
from ..common.retry import LogThrottle
from ..log.snapshot_ledger import TopicStateLedgers, append_and_wait
from .records_core import AnyCoordinatorRecord
from .state_core import CoordinatorState

COORDINATOR_MAGIC = b"MX"
SNAPSHOT_KIND, SNAPSHOT_END_KIND, RECORDS_KIND = 1, 2, 3
ENTRY_BYTES_TARGET = 1 << 20
"""Bytes of an entry, which ends after the record that reaches them; a record has at most about COMMIT_RECORD_BYTES_MAX
(broker/transaction/begins_core.py)."""

_HEAD = struct.Struct(">2sBBI")
_CRC = struct.Struct(">I")
ENTRY_HEAD_BYTES = _HEAD.size + _CRC.size
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(list[AnyCoordinatorRecord])


class DamagedCoordinatorLedger(ValueError):
    """Raised if an entry of a coordinator's ledger is damaged, or if a ledger does not belong to a coordinator."""


class CoordinatorEntry(NamedTuple):
    """One decoded entry of a coordinator's ledger. `kind`: SNAPSHOT_KIND, SNAPSHOT_END_KIND or RECORDS_KIND."""

    kind: int
    records: list[AnyCoordinatorRecord]


def encode_records(records: Iterable[AnyCoordinatorRecord], first: int) -> list[bytes]:
    """Returns the ledger entries that store these records, in the order in which the caller must append them. `first`:
    the entry id that the first of them will get."""
    bodies = _bodies(records)
    return [_entry(RECORDS_KIND, first + number, body) for number, body in enumerate(bodies)]


def encode_snapshot(records: Iterable[AnyCoordinatorRecord]) -> list[bytes]:
    """Returns the ledger entries that store these records as a snapshot, with which a coordinator's ledger begins.
    There is at least one entry."""
    bodies = _bodies(records) or [b"[]"]
    last = len(bodies) - 1
    return [
        _entry(SNAPSHOT_END_KIND if number == last else SNAPSHOT_KIND, number, body)
        for number, body in enumerate(bodies)
    ]


def _bodies(records: Iterable[AnyCoordinatorRecord]) -> list[bytes]:
    bodies, piece, size = list[bytes](), list[bytes](), 0
    for record in records:
        piece.append(_ENCODER.encode(record))
        size += len(piece[-1])
        if size >= ENTRY_BYTES_TARGET:
            bodies.append(b"[" + b",".join(piece) + b"]")
            piece, size = [], 0
    if piece:
        bodies.append(b"[" + b",".join(piece) + b"]")
    return bodies


def _entry(kind: int, number: int, body: bytes) -> bytes:
    head = _HEAD.pack(COORDINATOR_MAGIC, COORDINATOR.version, kind, number)
    return head + _CRC.pack(crc32c(body, crc32c(head))) + body


def decode_coordinator_entry(entry: bytes, number: int, where: str) -> CoordinatorEntry:
    """Decodes an entry of a coordinator's ledger and returns it. `number`: its entry id; `where`: the name of the
    ledger, for error texts. Raises DamagedCoordinatorLedger if the entry is damaged; NewerFormat if a later version
    wrote it."""
    if len(entry) < ENTRY_HEAD_BYTES:
        raise DamagedCoordinatorLedger(f"{where}: entry {number} of {len(entry)} bytes is too short")
    magic, version, kind, found = _HEAD.unpack_from(entry)
    body = entry[ENTRY_HEAD_BYTES:]
    if magic != COORDINATOR_MAGIC:
        raise DamagedCoordinatorLedger(f"{where}: entry {number} is none of a coordinator")
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedCoordinatorLedger(f"{where}: the checksum of entry {number} does not match")
    check_format(COORDINATOR, version, where)
    if found != number or kind not in (SNAPSHOT_KIND, SNAPSHOT_END_KIND, RECORDS_KIND):
        raise DamagedCoordinatorLedger(f"{where}: entry {found} of kind {kind} where entry {number} belongs")
    try:
        return CoordinatorEntry(kind, _DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCoordinatorLedger(f"{where}: entry {number}: {error}") from error


_LOG = logging.getLogger("magnetar.broker.transactions")

ROLL_STEPS = ("create", "append", "name", "delete")
"""The steps of a roll (a switch to a new ledger), in their order."""

ROLL_AFTER_BYTES = 16 << 20
"""Size in bytes after which a ledger is rolled, if that is more than twice its snapshot: a take-over reads it all."""
_LOST_COORDINATOR_ADVICE = (
    ": the outcomes of its transactions are not known, so what is open stays open, and it begins none. Restore the "
    "metadata from a copy that has it"
)
APPEND_RETRY_S = 0.5
ENTRIES_PER_READ = 64
APPENDS_AT_ONCE = 8
"""Entries of a snapshot that are in flight at a time."""


class CoordinatorFenced(NotOwner):
    """Raised if another broker has taken the coordinator over. (On the wire: NotOwner.)"""


class CoordinatorLog:
    """The ledger in which the owner of a coordinator stores its records. If a ledger fails, it is replaced by a new
    one. `give_up_s`: for how many seconds that is tried before the epoch ends; `epoch`: the epoch of this owner, 0
    before the take-over."""

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: TopicStateLedgers, number: int, give_up_s: float
    ) -> None:
        self.number = number
        self.epoch = 0
        self._world = world
        self._metadata = metadata
        self._ledgers = ledgers
        self._give_up_s = give_up_s
        self._path = paths.coordinator(number)
        self._found: VersionedValue | None = None
        self._stored = b""
        self._record = CoordinatorRecord()
        self._state = CoordinatorState()
        self._writer: LedgerWriter | None = None
        self._snapshot_bytes = 0
        self._bytes = 0
        self._next_entry = 0
        self._unknown = False  # the outcome of a change: the record may name a ledger that this owner does not write
        self._throttle = LogThrottle(world.clock)

    # ------------------------------------------------------------------ take-over
    async def take_over(self) -> tuple[CoordinatorState, int]:
        """Takes the coordinator over. Must be called once, before any append. Returns its state, and the epoch of this
        owner. Raises CoordinatorFenced if another broker took it over first; DataLost if its metadata record or its
        ledger is lost or damaged (then this owner has claimed nothing); Unavailable if bookies or the metadata do not
        answer; and the other errors of its steps."""
        for step in TAKE_OVER_STEPS:
            await step(self)
        return self._state, self.epoch

    async def read_coordinator_claim(self) -> None:
        """Step of a take-over: reads the record of the coordinator, with the claim of its former owner, from the
        metadata. Raises DataLost if the record is damaged, or missing although the coordinator had one; and the errors
        of the metadata."""
        self._found = await self._metadata.get(self._path)
        if self._found is None:
            fixed = await get_record(self._metadata, paths.TRANSACTION_SETTINGS, TransactionsRecord)
            if fixed is not None and self.number in fixed[0].begun:
                raise DataLost(f"the record of coordinator {self.number} is missing{_LOST_COORDINATOR_ADVICE}")
            return
        try:
            self._record = decode_record(self._found.value, CoordinatorRecord, self._path)
        except DamagedRecord as error:
            raise DataLost(
                f"the record of coordinator {self.number} is damaged: {error}{_LOST_COORDINATOR_ADVICE}"
            ) from error

    async def recover_ledger(self) -> None:
        """Step of a take-over: fences and recovers the ledger of the former owner, and reads the state from its
        records. Raises DataLost if the ledger is lost or damaged, Unavailable if bookies do not answer or another
        broker is taking over, NewerFormat if an entry has a newer format, and the errors of the metadata."""
        ledger_id = self._record.ledger_id
        if ledger_id < 0:
            return
        where = f"coordinator {self.number}, ledger {ledger_id}"
        try:
            reader = await self._ledgers.recover_ledger(ledger_id)
        except LedgerNotFound as error:
            if await self._is_unchanged():
                raise DataLost(f"{where} does not exist: the outcomes of its transactions are lost") from error
            raise Unavailable(f"coordinator {self.number} is taken over elsewhere; look it up again") from error
        whole = False
        try:
            read = 0
            while read <= reader.last_entry:
                some = await reader.read(read, min(read + ENTRIES_PER_READ - 1, reader.last_entry))
                read += len(some)
                for each in some:
                    entry = decode_coordinator_entry(bytes(each.payload), each.entry_id, where)
                    if whole is not (entry.kind == RECORDS_KIND):
                        raise DamagedCoordinatorLedger(f"{where}: entry {each.entry_id} is out of its order")
                    whole = whole or entry.kind == SNAPSHOT_END_KIND
                    for record in entry.records:
                        self._state.apply(record)
                await asyncio.sleep(0)
            if not whole:
                raise DamagedCoordinatorLedger(f"{where} has no whole snapshot")
            self._state.check()
        except (DamagedCoordinatorLedger, KeyError, ValueError) as error:
            raise DataLost(f"{where} is damaged: {error}") from error

    async def _is_unchanged(self) -> bool:
        node = await self._metadata.get(self._path)
        return node is not None and self._found is not None and node.value == self._found.value

    async def store_coordinator_claim(self) -> None:
        """Step of a take-over: stores the claim of this owner, and the next epoch, in the metadata. Raises
        CoordinatorFenced if another broker was faster, DataLost if all epochs are used up, and the errors of the
        metadata."""
        if self._record.epoch >= (1 << EPOCH_BITS) - 1:
            raise DataLost(f"coordinator {self.number} has no epochs any more; its ids are used up")
        claim = self._world.rng.randbytes(8).hex()
        before = self._found.value if self._found is not None else None
        after = msgspec.structs.replace(self._record, epoch=self._record.epoch + 1, claim=claim, idle=False)
        self._stored = b"" if before is None else before
        await self._change(after, made=before is None)
        await self._record_begun()
        self.epoch = after.epoch

    async def _record_begun(self) -> None:
        """Stores in the metadata that the coordinator has begun. If its own record is missing later, it is known to be
        lost. (A coordinator that began anew would answer "aborted" for committed transactions, and give ids a second
        time.) After a crash before this step, the next owner does it."""

        def noted(fixed: TransactionsRecord | None) -> TransactionsRecord | None:
            if fixed is None or self.number in fixed.begun:
                return None
            return msgspec.structs.replace(fixed, begun=tuple(sorted({*fixed.begun, self.number})))

        await update_record(self._metadata, paths.TRANSACTION_SETTINGS, TransactionsRecord, noted)

    async def finish_take_over(self) -> None:
        """Last step of a take-over: drops the data that were read for it. Requests may be answered from now on, and not
        before."""
        self._found = None

    async def is_owner(self) -> bool:
        """Returns True if the record in the metadata is still the one that this owner wrote last. Raises the errors of
        the metadata."""
        node = await self._metadata.get(self._path)
        return node is not None and node.value == self._stored

    async def _change(self, record: CoordinatorRecord, *, made: bool = False) -> None:
        """Replaces the record in the metadata. Raises CoordinatorFenced if another owner has changed it. After another
        error it is unknown which record is stored."""
        value = encode_record(record, self._path)
        ours = {self._stored, value}

        def transform(node: VersionedValue | None) -> bytes | None:
            if (node is None and not made) or (node is not None and node.value not in ours):
                raise CoordinatorFenced(f"coordinator {self.number} was taken over by another broker")
            return value

        await update_node(self._metadata, self._path, transform)
        self._record, self._stored = record, value

    @property
    def current_ledger_usage(self) -> tuple[int, int, int]:
        """Returns the id of the ledger that is being written (-1: none), and how many entries and bytes this owner has
        written to it."""
        return self._record.ledger_id, self._next_entry, self._bytes

    # ------------------------------------------------------------------ writing
    def append_nowait(self, records: Sequence[AnyCoordinatorRecord]) -> asyncio.Future[int] | None:
        """Appends the records without waiting, if a ledger is open and the records fit into one entry. Returns a future
        that is done when they are durable; if it fails, the caller must call `append` with its error. Returns None if
        nothing was appended; then the caller must call `append`, too."""
        if self._writer is None or not self._writer.is_writable or self._is_full:
            return None
        found = encode_records(records, self._next_entry)
        if len(found) != 1:
            return None
        self._next_entry += 1
        self._bytes += len(found[0])
        return self._writer.append(found[0])

    async def append(
        self, records: Sequence[AnyCoordinatorRecord], state: CoordinatorState, failed: MagnetarError | None = None
    ) -> None:
        """Appends the records, and returns when they are durable. Retries in a new ledger for `give_up_s` seconds.
        `state`: the state before these records; `failed`: the error of an earlier append of the same records (None:
        there was none). If this call raises, it is not known whether the records are durable. Raises LedgerFenced or
        CoordinatorFenced if another broker owns the coordinator, and the last other error when `give_up_s` has
        passed."""
        clock = self._world.clock
        until = clock.monotonic() + self._give_up_s
        while True:
            try:
                if failed is not None:
                    error, failed = failed, None
                    raise error
                if self._writer is None or not self._writer.is_writable or self._is_full:
                    await self._roll(state)
                await self._append(records)
                return
            except (LedgerFenced, CoordinatorFenced):
                raise
            except MagnetarError as error:
                await self._abandon()
                if clock.monotonic() >= until or self._unknown:
                    raise
                if self._throttle.should_log(error):
                    _LOG.warning("coordinator %d goes on in another ledger: %s", self.number, error)
            await asyncio.sleep(APPEND_RETRY_S)

    @property
    def _is_full(self) -> bool:
        return self._bytes > max(ROLL_AFTER_BYTES, 2 * self._snapshot_bytes)

    async def _append(self, records: Sequence[AnyCoordinatorRecord]) -> None:
        assert self._writer is not None, "a roll came before"
        found = encode_records(records, self._next_entry)
        await append_and_wait(self._writer, found)
        self._next_entry += len(found)
        self._bytes += sum(map(len, found))

    async def _roll(self, state: CoordinatorState) -> None:
        """Begins a new ledger with a snapshot of `state`, in the order of `ROLL_STEPS`."""
        await self._abandon()
        writer, unnamed = await self._ledgers.create_ledger(), True
        try:
            snapshot = encode_snapshot(state.snapshot())
            for start in range(0, len(snapshot), APPENDS_AT_ONCE):
                await append_and_wait(writer, snapshot[start : start + APPENDS_AT_ONCE])
            unnamed, self._unknown = False, True
            old = self._record.ledger_id
            await self._change(msgspec.structs.replace(self._record, ledger_id=writer.ledger_id))
            self._unknown = False
        except BaseException as error:
            await self._ledgers.abandon_ledger(writer, unnamed=unnamed and isinstance(error, MagnetarError))
            raise
        self._writer, self._next_entry = writer, len(snapshot)
        self._snapshot_bytes = self._bytes = sum(map(len, snapshot))
        await self._ledgers.delete_ledgers(old)

    async def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.abandon()

    # ------------------------------------------------------------------ ending
    async def close(self, records: Sequence[AnyCoordinatorRecord], state: CoordinatorState, *, idle: bool) -> None:
        """Appends the last records, which hand over to the next epoch, and closes the ledger. `idle`: True if no broker
        needs to load the coordinator; this is stored in the metadata record. Raises the errors of `append`, of closing
        the ledger (LedgerFenced, OutcomeUnknown), and of the metadata. Whatever fails, nothing is written any more."""
        try:
            if records:
                await self.append(records, state)
            if self._writer is not None:
                await self._writer.close()
        finally:
            await self._abandon()  # does nothing to a writer that is closed
        if idle:
            await self._change(msgspec.structs.replace(self._record, idle=True))

    async def abandon(self) -> None:
        """Stops writing, and hands nothing over: the next owner recovers the ledger."""
        await self._abandon()


TAKE_OVER_STEPS = (
    CoordinatorLog.read_coordinator_claim, CoordinatorLog.recover_ledger, CoordinatorLog.store_coordinator_claim,
    CoordinatorLog.finish_take_over,
)  # fmt: skip
"""The order of a take-over."""
