"""A topic's own state on bookies: snapshots in ledgers; a record in the metadata names the current ledger.

    ledger = SnapshotLedger(TopicStateLedgers(…), decode_piece, DamagedX, alarm)
    state = await ledger.recover_state(record.ledger_id, whole)    at the take-over, after the record was claimed
    stored = await ledger.append_pieces(entries)                   False: there is no ledger that takes them; roll
    await ledger.roll_ledger(entries, name)                        entries hold all of the state
    await ledger.close()  |  await ledger.delete_ledger()

Rules (docs of the callers say what a snapshot is)
- **One writer.** `recover_state` fences the former owner's ledger. A ledger that was recovered is never written again:
  the first write of an owner rolls. The record changes by compare-and-set on the claim of an owner (`name`), so a
  former owner cannot switch to a ledger of its own either.
- **Rolling** happens in the order of `ROLL_STEPS`. The old ledger is not written again from `name` on, even when the
outcome
  of `name` is unknown: the record may name the new one. A crash between two steps leaves a ledger that no record names:
  it costs space and nothing else.
- **A new ledger that fails** is deleted only when it is certain that no record names it: before `name` began, or when
  `name` was refused and wrote nothing before (`TopicFenced.unwritten`).
- **Reading** goes back from the end to the last whole snapshot. A crash may leave an incomplete snapshot (not all
  pieces of one sequence number), which is skipped. For damage and loss `alarm` is called, and the snapshot before
  counts. It is called, too, if the ledger has no snapshot: a record names a ledger after the first one is stored. After
  an alarm `is_lost` is True: a later state may have been stored than the one that was found.
- **Quorums** of a new ledger are those of the policy at that time; smaller ones if bookies are missing and
  `degraded_writes` allows it (broker/log/log_shape_core.py).

The caller makes one call at a time. Guarding tests: tests/broker/log/test_snapshot_ledger.py (a crash and a failure at
each step).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...proto.errors import DataLost, LedgerNotFound, MagnetarError
from ...proto.names import TopicName
from ..common.config import BrokerConfig, GetReplicationPolicy
from .log_shape_core import get_allowed_striping_reduction
from .managed_ledger import TopicFenced

_LOG = logging.getLogger("magnetar.broker.log")

ROLL_STEPS = ("create", "append", "name", "delete")
"""The steps of `SnapshotLedger.roll_ledger`: create a ledger, append the whole state to it, name it in the record,
delete the old ledger."""


class SnapshotPiece(Protocol):
    """One entry of a snapshot ledger. A snapshot is stored as one or more such pieces. The modules that store a state
    implement it (such as broker/topic/dedup.py); SnapshotLedger reads it."""

    @property
    def sequence(self) -> int:
        """Returns the number of the write to which this piece belongs. Each later write of a snapshot has the next
        number."""

    @property
    def piece(self) -> int:
        """Returns the number of this piece in its snapshot, from 0."""

    @property
    def is_last_piece(self) -> bool:
        """Returns True if this piece completes a snapshot."""


P = TypeVar("P", bound=SnapshotPiece)
S = TypeVar("S")


class TopicStateLedgers:
    """Creates, opens and deletes the ledgers in which a topic stores one kind of its own state, such as deduplication.
    `properties`: the properties that each of these ledgers gets."""

    __slots__ = ("_ledgers", "_properties", "_replication", "_shrink", "_topic")

    def __init__(
        self,
        ledgers: LedgerClient,
        config: BrokerConfig,
        replication: GetReplicationPolicy,
        topic: TopicName,
        **properties: str,
    ) -> None:
        self._ledgers = ledgers
        self._shrink = get_allowed_striping_reduction(degraded_writes=config.degraded_writes)
        self._replication = replication
        self._properties = tuple(properties.items())
        self._topic = topic

    async def create_ledger(self) -> LedgerWriter:
        """Creates a ledger with the replication that the policy demands now. Returns the writer of the ledger. Raises
        NotEnoughBookies or Unavailable if that is not possible now, and the errors of the metadata."""
        replication = await self._replication()
        return await self._ledgers.create(
            ensemble_size=replication.ensemble_size, write_quorum=replication.write_quorum,
            ack_quorum=replication.ack_quorum, properties={"topic": self._topic.full, **dict(self._properties)},
            shrink=self._shrink, groups=replication.groups,
        )  # fmt: skip

    async def create_closed_ledger(self, entries: Sequence[bytes]) -> int:
        """Creates a ledger with these entries, closes it, and returns its id. If that fails, deletes the ledger and
        raises the error (those of `create_ledger`, LedgerFenced or OutcomeUnknown); if the caller is cancelled, the
        ledger may be left, and no record names it."""
        writer = await self.create_ledger()
        try:
            await append_and_wait(writer, entries)
            await writer.close()
        except BaseException as error:
            # a cancelled owner begins nothing
            await self.abandon_ledger(writer, unnamed=isinstance(error, MagnetarError))
            raise
        return writer.ledger_id

    async def open(self, ledger_id: int) -> LedgerReader:
        """Opens a closed ledger to read it. Raises LedgerNotFound if it does not exist, Unavailable if its bookies
        cannot be found, and the errors of the metadata."""
        return await self._ledgers.open(ledger_id)

    async def recover_ledger(self, ledger_id: int) -> LedgerReader:
        """Fences the writer of the ledger, closes the ledger at its last stored entry, and returns its reader. Raises
        LedgerNotFound if it does not exist; Unavailable if bookies do not answer; OutcomeUnknown if the result cannot
        be stored; and the errors of the metadata."""
        return await self._ledgers.recover(ledger_id)

    async def abandon_ledger(self, writer: LedgerWriter, *, unnamed: bool) -> None:
        """Stops writing a new ledger. `unnamed`: True if certainly no record names the ledger; then also deletes it."""
        await writer.abandon()
        if unnamed:
            await self.delete_ledgers(writer.ledger_id)

    async def delete_ledgers(self, *ledger_ids: int) -> None:
        """Deletes ledgers that no record names; ignores the id -1. If that fails, only logs the error: the ledger takes
        disk space, and has no other effect."""
        for ledger_id in ledger_ids:
            try:
                if ledger_id >= 0:
                    await self._ledgers.delete(ledger_id)
            except MagnetarError as error:
                _LOG.warning("%s: ledger %d is not deleted, no record names it: %s", self._topic, ledger_id, error)


class SnapshotLedger(Generic[P]):
    """The ledger to which the owner of a topic writes snapshots of a state. When a ledger is full or fails, it switches
    to a new one (`roll_ledger`). The function `alarm(what, error)` is called for each ledger or snapshot that cannot be
    used."""

    __slots__ = ("_alarm", "_damage", "_decode", "_ledgers", "_writer", "is_lost", "ledger_id", "sequence")

    def __init__(
        self, ledgers: TopicStateLedgers, decode: Callable[[bytes], P], damage: type[Exception],
        alarm: Callable[[str, Exception], None],
    ) -> None:  # fmt: skip
        self.ledger_id = -1
        """The ledger that the record names; -1: none."""
        self.sequence = 0
        """Sequence number of the last write; the owner counts it up before each."""
        self.is_lost = False
        """True if `recover_state` did not find, or could not read, what the former owner stored last."""
        self._ledgers = ledgers
        self._decode = decode
        self._damage = damage
        self._alarm = alarm
        self._writer: LedgerWriter | None = None

    # ------------------------------------------------------------------ reading
    async def recover_state(
        self, ledger_id: int, whole: Callable[[LedgerReader, list[P]], Awaitable[S]]
    ) -> S | None:
        """Recovers the ledger of the former owner, and finds its last complete snapshot. Passes the pieces of that
        snapshot to the function `whole`, and returns its result; None if there is no complete snapshot. Raises
        Unavailable if bookies do not answer; OutcomeUnknown if the ledger cannot be closed; the other errors of
        `whole`; and the errors of the metadata."""
        self.ledger_id = ledger_id
        try:
            reader = await self._ledgers.recover_ledger(ledger_id)
        except LedgerNotFound as error:
            self._report_lost(f"snapshot ledger {ledger_id} is lost", error)
            return None
        for last in range(reader.last_entry, -1, -1):
            try:
                pieces = await self._pieces(reader, last)
                if pieces:
                    return await whole(reader, pieces)
            except (self._damage, DataLost) as error:
                self._report_lost(f"snapshot ledger {ledger_id}, entry {last} cannot be used", error)
        nothing = DataLost(f"ledger {ledger_id} of {reader.last_entry + 1} entries begins with no snapshot")
        self._report_lost(f"snapshot ledger {ledger_id} has no snapshot", nothing)
        return None

    def _report_lost(self, what: str, error: Exception) -> None:
        self.is_lost = True
        self._alarm(what, error)

    async def _pieces(self, reader: LedgerReader, last: int) -> list[P]:
        """Returns all pieces of the snapshot that ends at the entry `last`; none if no snapshot ends there, or it is
        incomplete."""
        end = await self.read_snapshot_piece(reader, last)
        self.sequence = max(self.sequence, end.sequence)
        if not end.is_last_piece or last < end.piece:
            return []
        pieces = [*[await self.read_snapshot_piece(reader, last - back) for back in range(end.piece, 0, -1)], end]
        return pieces if all(each.sequence == end.sequence for each in pieces) else []

    async def read_snapshot_piece(self, reader: LedgerReader, entry_id: int) -> P:
        """Reads the entry `entry_id` of the ledger, decodes it, and returns it. Raises DataLost if the entry is lost,
        Unavailable if bookies do not answer, and the error of the decoder if it is damaged."""
        (entry,) = await reader.read(entry_id, entry_id)
        return self._decode(bytes(entry.payload))

    # ------------------------------------------------------------------ writing
    @property
    def is_writable(self) -> bool:
        """Returns True if a ledger is open to which this owner can append."""
        return self._writer is not None and self._writer.is_writable

    async def append_pieces(self, entries: Sequence[bytes]) -> bool:
        """Appends entries to the ledger, and waits until they are stored. Returns True if all of them are stored; False
        if no ledger is open, or some entries may be missing. Then nothing more is written to the ledger, and the caller
        must call `roll_ledger`."""
        if self._writer is None or not self._writer.is_writable:
            return False
        try:
            await append_and_wait(self._writer, entries)
        except MagnetarError:
            await self.stop_writing()
            return False
        return True

    async def roll_ledger(self, entries: Sequence[bytes], name: Callable[[int], Awaitable[None]]) -> None:
        """Switches to a new ledger that begins with these entries, in the order of `ROLL_STEPS`. `name`: a function
        that stores the id of the new ledger in the topic's or subscription's record. Raises any error of `name` or of
        the new ledger; if the error comes after `append`, no ledger is open for writing."""
        writer, unnamed = await self._ledgers.create_ledger(), True
        try:
            await append_and_wait(writer, entries)
            unnamed = False
            await self.stop_writing()
            await name(writer.ledger_id)
        except BaseException as error:
            unnamed = unnamed and isinstance(error, MagnetarError)
            unnamed |= isinstance(error, TopicFenced) and error.unwritten
            await self._ledgers.abandon_ledger(writer, unnamed=unnamed)
            raise
        old, self.ledger_id, self._writer = self.ledger_id, writer.ledger_id, writer
        await self._ledgers.delete_ledgers(old)

    async def stop_writing(self) -> None:
        """Ends writing to the present ledger, for ever: the next state goes to a new ledger, or elsewhere."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.abandon()

    # ------------------------------------------------------------------ ending
    async def close(self) -> None:
        """Closes the ledger, so that the next owner need not recover it. If that fails, only logs the error.
        Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                await writer.close()
            except MagnetarError as error:
                _LOG.warning("snapshot ledger %d stays open: %s", writer.ledger_id, error)

    async def delete_ledger(self) -> None:
        """Deletes the ledger, because the record no longer names it. If that fails, only logs the error."""
        await self.stop_writing()
        old, self.ledger_id = self.ledger_id, -1
        await self._ledgers.delete_ledgers(old)


async def append_and_wait(writer: LedgerWriter, entries: Sequence[bytes]) -> None:
    """Appends entries to the ledger of `writer`, and waits until all are stored. Raises the error of an entry that is
    not stored; the other entries may be stored then."""
    appended = [writer.append(entry) for entry in entries]
    if not appended:
        return
    try:
        await appended[-1]
    except BaseException:
        for each in appended:
            each.add_done_callback(_looked_at)
        raise
    for error in [each.exception() for each in appended]:
        if error is not None:
            raise error


def _looked_at(appended: asyncio.Future[int]) -> None:
    if not appended.cancelled():
        appended.exception()  # the caller has one of them
