"""Passing over lost entries of a topic on purpose: an operator's act, which nothing does by itself.

Order: the list is read; every ledger that is not closed is recovered, or ended without the entries that are lost
(ledger/lost.py); each is asked which of its entries every replica is certain to lack; then one compare-and-set commits
the list, with a claim that no other owner has, and with the ranges (`TopicRecord.lost`). It is the change of a
take-over, so it works on a topic that does not open because of what it lost, and a broker that has it loaded finds out
as from another owner (TopicFenced). Nothing is deleted before that commit.

- A ledger of which nothing is left leaves the list. The last one stays, empty, and is not read.
- Of another one the lost entries are a *hole*: consumers and readers go on after it, and its place is not used again.
- Indexes of lost messages are not given to others. Where their number is not known, `LOST_INDEXES` are left.
- A ledger whose own record is missing is lost when its deletion was noted (ledger/client.py). A record that is
  merely absent says nothing of the entries on the bookies: that needs `force`.
- Unknown is not lost: entries that a replica may have which does not answer stay (`force`: they count as lost).
Bounds: `LOST_MAX` ranges in a record. Guarding tests: tests/broker/log/test_skip_lost.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...ledger import LedgerClient, LedgerReader
from ...ledger import client as deletions
from ...ledger.lost import Run
from ...metadata.records import CLOSED, LedgerRecord, LostRange, TopicLedger
from ...proto.errors import (
    DataLost,
    InvalidRequest,
    LedgerNotFound,
    MagnetarError,
    NotAllowed,
    NotEnoughBookies,
    OutcomeUnknown,
    Unavailable,
)
from ...proto.names import Position
from ...runtime.network import World
from .cache import StoredEntry
from .managed_ledger import ManagedLedgerRecord

_LOG = logging.getLogger("magnetar.broker.log")

LOST_INDEXES = 1 << 32
"""Indexes left free after a ledger whose number of messages is not known: more than a ledger has."""
LOST_MAX = 1000
"""Ranges in a topic's record, about 100 KB; those of ledgers that are gone are dropped first, the oldest first."""


class _InspectedLedger(NamedTuple):
    """An inspected ledger of the list: its new row, the lost entries that were found, and whether all entries are lost
    (`gone`)."""

    row: TopicLedger
    holes: list[LostRange]
    gone: bool = False  # nothing of it is left


class SkipLostRequest:
    """A request of an operator to skip lost entries of a topic. `only`: the ledger of which they are; -1: of all
    ledgers. `force`: entries that a bookie may still have count as lost, too."""

    def __init__(self, ledgers: LedgerClient, listed: ManagedLedgerRecord, world: World, *, only: int, force: bool):
        self._list, self._ledgers, self._world = listed, ledgers, world
        self._only, self._force = only, force
        self._topic = listed.topic
        self._silent: set[str] = set()
        self._doubts = 0  # entries that no bookie gave, and that are not certainly lost

    async def run(self) -> list[LostRange]:
        """Skips lost entries. Returns their ranges, which are durable then; empty if no entry is lost. Raises
        InvalidRequest if the topic has no ledger `only`; NotAllowed if it is not certain that unreadable entries are
        lost; TopicFenced if the topic has changed meanwhile, and the caller should try again."""
        before = await self._list.read()
        if self._only >= 0 and all(each.ledger_id != self._only for each in before.ledgers):
            raise InvalidRequest(f"topic {self._topic} has no ledger {self._only}", topic=self._topic)
        looked = [
            await self._inspect(each) if self._only in (-1, each.ledger_id) else _InspectedLedger(each, [])
            for each in before.ledgers
        ]
        found = [hole for each in looked for hole in each.holes]
        if not found:
            if self._doubts:
                silent = ", ".join(sorted(self._silent))
                raise NotAllowed(
                    f"topic {self._topic}: {self._doubts} entries cannot be read, and {silent} may have them: nothing "
                    "was passed over. What is gone for good has to be forgotten first (`magnetar bookies forget`)",
                    topic=self._topic,
                )
            return []
        rows = [each.row for each in looked if not each.gone] or [looked[-1].row]
        await self._list.change(
            rows, claim=self._world.rng.randbytes(16).hex(), lost=_bounded([*before.lost, *found], rows)
        )
        for each in found:
            _LOG.error("%s: passed over on purpose, for all: %s", self._topic, describe_range(each))
        kept = {each.ledger_id for each in rows}
        await self._delete([each.row.ledger_id for each in looked if each.gone and each.row.ledger_id not in kept])
        return found

    async def _delete(self, ledgers: Sequence[int]) -> None:
        try:
            await self._ledgers.delete(*ledgers)
        except MagnetarError as error:
            _LOG.warning("%s: ledgers %s are not deleted, no list names them: %s", self._topic, ledgers, error)

    # ------------------------------------------------------------------ one ledger
    async def _inspect(self, row: TopicLedger) -> _InspectedLedger:
        if row.entries == 0:
            return _InspectedLedger(row, [])
        try:
            record, cut = await self._closed(row)
        except LedgerNotFound:
            return await self._without_record(row)
        lost = self._ledgers.make_loss_survey(record, force=self._force)
        found = await lost.find_lost_entries()
        if found.unknown:
            self._doubts += sum(last - first + 1 for first, last in found.unknown)
            self._silent.update(found.silent)
        forced = bool(lost.forced)
        reader = self._ledgers.make_reader(record)
        before = set(self._list.record.lost)
        known = {(each.first_entry, each.last_entry) for each in before if each.ledger_id == row.ledger_id}
        runs = [run for run in found.lost if run not in known]
        last = record.last_entry
        if row.entries < 0:
            end = await self._end_index(reader, row, found.lost)
            row = msgspec.structs.replace(
                row, entries=last + 1, size=record.length, end_index=end, closed_ms=self._world.clock.wall_ms()
            )
            cut = cut or (bool(found.lost) and found.lost[-1][1] == last)
        tail: list[LostRange] = []
        if cut:  # to an end that is not known
            begins = last + 1
            if found.lost and found.lost[-1][1] == last:
                begins = found.lost[-1][0]
                runs = runs[:-1]
            tail = [self._range(row, (begins, -1), row.end_index, row.end_index + LOST_INDEXES, forced)]
        whole = found.lost == [(0, last)] or last < 0
        if whole and (runs or tail):
            hole = tail[0] if tail else self._range(row, (0, last), row.first_index, row.end_index, forced)
            return _InspectedLedger(_emptied(row, hole.end_index), [hole], gone=True)
        holes = [
            self._range(row, run, await self._index_of(reader, row, run[0], -1),
                        await self._index_of(reader, row, run[1], 1), forced)
            for run in runs
        ]  # fmt: skip
        return _InspectedLedger(row, [*holes, *tail])

    async def _closed(self, row: TopicLedger) -> tuple[LedgerRecord, bool]:
        """Returns the closed record of the ledger, and whether it had to be closed without entries that no bookie has.
        Raises LedgerNotFound if the record is missing."""
        record = await self._ledgers.read_record(row.ledger_id)
        if record.state == CLOSED:
            return record, False
        try:
            return (await self._ledgers.recover(row.ledger_id)).record, False
        except OutcomeUnknown:
            raise
        except (Unavailable, NotEnoughBookies) as error:
            _LOG.warning("%s: ledger %d cannot be recovered: %s", self._topic, row.ledger_id, error)
        lost = self._ledgers.make_loss_survey(await self._ledgers.read_record(row.ledger_id), force=self._force)
        try:
            return await lost.close_ledger(), True
        except Unavailable as error:
            raise NotAllowed(error.message, topic=self._topic, ledger=row.ledger_id) from error

    async def _without_record(self, row: TopicLedger) -> _InspectedLedger:
        forced = row.ledger_id not in await deletions.find_deleted(self._list.store, [row.ledger_id])
        if forced and not self._force:
            self._doubts += max(1, row.entries)
            self._silent.add(f"the bookies of ledger {row.ledger_id}, whose record is missing,")
            return _InspectedLedger(row, [])
        if row.entries < 0:
            hole = self._range(row, (0, -1), row.first_index, row.first_index + LOST_INDEXES, forced)
        else:
            hole = self._range(row, (0, row.entries - 1), row.first_index, row.end_index, forced)
        return _InspectedLedger(_emptied(row, hole.end_index), [hole], gone=True)

    def _range(self, row: TopicLedger, run: Run, first_index: int, end_index: int, forced: bool) -> LostRange:
        return LostRange(
            ledger_id=row.ledger_id, first_entry=run[0], last_entry=run[1], first_index=first_index,
            end_index=end_index, skipped_ms=self._world.clock.wall_ms(), forced=forced,
        )  # fmt: skip

    # ------------------------------------------------------------------ indexes
    async def _entry(self, reader: LedgerReader, row: TopicLedger, entry: int) -> StoredEntry:
        (found,) = await reader.read(entry, entry)
        return StoredEntry.parse(Position(row.ledger_id, entry), found.payload)

    async def _end_index(self, reader: LedgerReader, row: TopicLedger, lost: Sequence[Run]) -> int:
        """Returns the index after the last message of the ledger's last existing entry."""
        last = reader.record.last_entry
        if lost and lost[-1][1] == last:
            last = lost[-1][0] - 1
        return (await self._entry(reader, row, last)).index + 1 if last >= 0 else row.first_index

    async def _index_of(self, reader: LedgerReader, row: TopicLedger, entry: int, step: int) -> int:
        """Returns the message index at an end of lost entries. `step` -1: the index after the last message of the entry
        before them; 1: the index of the first message of the entry after them."""
        beside = entry + step
        if beside < 0:
            return row.first_index
        if beside >= row.entries:
            return row.end_index
        try:
            found = await self._entry(reader, row, beside)
        except (DataLost, Unavailable):  # no bookie knows of that one: the edge of the ledger is certain
            return row.first_index if step < 0 else row.end_index
        return found.index + 1 if step < 0 else found.first_index


def _emptied(row: TopicLedger, end_index: int) -> TopicLedger:
    """Returns the row of a ledger, changed because all of its entries are lost: it has no entries, and begins and ends
    at `end_index`."""
    return msgspec.structs.replace(row, entries=0, size=0, first_index=end_index, end_index=end_index)


def _bounded(lost: Sequence[LostRange], rows: Sequence[TopicLedger]) -> tuple[LostRange, ...]:
    """Returns the ranges to store, LOST_MAX at most: ranges in removed ledgers are left out if necessary. Raises
    InvalidRequest if too many are in ledgers that still exist."""
    listed, least = {each.ledger_id for each in rows}, max(each.end_index for each in lost)
    gone = [each for each in lost if each.ledger_id not in listed and each.end_index != least]
    drop = set(gone[: max(0, len(lost) - LOST_MAX)])
    kept = tuple(each for each in lost if each not in drop)
    if len(kept) > LOST_MAX:
        raise InvalidRequest(f"{len(kept)} ranges are lost, and a topic notes up to {LOST_MAX}: pass over one ledger")
    return kept


def describe_range(lost: LostRange) -> str:
    """Returns a text for users that names the range."""
    if lost.last_entry < 0:
        return f"ledger {lost.ledger_id} from entry {lost.first_entry} on, from index {lost.first_index} on"
    return (
        f"entries {lost.first_entry} to {lost.last_entry} of ledger {lost.ledger_id}, "
        f"indexes {lost.first_index} to {lost.end_index - 1}"
    )
