"""The interfaces of a log for a topic, its producers and its subscriptions, independent of its storage.

    LogEntryReader  reads entries by position, index and time
    ReadableLog     the log that a subscription reads: all of it, its committed entries, or its compacted form
                    (broker/log/compaction.py)
    Log             the log to which a topic publishes: on bookies (broker/log/topic_log.py), or only in memory
                    (broker/topic/nonpersistent.py)

Also in this file: the log for readers of committed entries (`CommittedReader`, `CommittedLogView`).

Rule: no entry after the last confirmed one (`LogShape.last_confirmed`) is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pyroaring import BitMap

from ...metadata.records import TopicRecord
from ...metadata.store import NodeUpdate
from ...proto.errors import InvalidRequest, MagnetarError
from ...proto.names import Position, TopicName
from ...proto.states import TopicState
from ...runtime.network import World
from ..common.config import LedgerReplication
from .appender import Publish
from .cache import StoredEntry
from .log_shape_core import CommittedShape, LogShape, TxnOutcomes
from .reader import PositionAndIndex


class LogEntryReader(Protocol):
    """Reads the entries of a log. Each kind of log has its own reader, which reads from caches, bookies, a compacted
    ledger, or memory. A method that reads an entry raises InvalidRequest if there is no entry at the position, DataLost
    if the entry is lost, and Unavailable if bookies do not answer. Docstrings call these *the errors of reading the
    log*."""

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Returns consecutive confirmed entries of one ledger that are in memory, beginning at `position`: at most
        `entries_max` entries, and about `bytes_max` bytes. Returns no entries if the one at `position` is not in
        memory."""

    def get(self, position: Position) -> StoredEntry | None:
        """Returns the entry at `position` if it is in memory, else None."""

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Reads entries of one ledger and returns them: from `position` up to the entry id `last_entry`, about
        `bytes_max` bytes, at least one entry. Raises InvalidRequest if there is no entry at `position`, or if it was
        trimmed."""

    async def read_entry(self, position: Position) -> StoredEntry:
        """Returns the entry at `position`, from memory if it is there. Raises InvalidRequest if there is no entry at
        `position`, or if it was trimmed."""
        ...

    async def find_position_by_index(self, index: int) -> PositionAndIndex:
        """Returns the position of the entry that contains the message with the index `index`; if there is no such
        entry, of the first entry after it. If that is missing too, returns the position after the last entry."""

    async def find_position_by_time(self, time_ms: int) -> PositionAndIndex:
        """Returns the position of the first entry that arrived at or after `time_ms` (ms since the epoch); the position
        after the last entry if there is none."""

    def find_cached_message_index_after(self, mark: Position) -> int | None:
        """Returns the index of the first message after the entry `mark`, without reading an entry; None if an entry
        would have to be read."""

    async def find_message_index_after(self, mark: Position) -> int:
        """Returns the index of the first message after the entry `mark`. Reads an entry if the index is not in memory.
        Returns the index that the next message will get if there is none."""

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        """Returns the last message that readers see: the position of its entry, its batch index (-1: the entry is not a
        batch) and its index; None if there is no such message."""


class ReadableLog(Protocol):
    """The log that a subscription reads. There are three kinds: all entries of the topic, only the committed entries,
    or the compacted form."""

    @property
    def topic(self) -> TopicName: ...
    @property
    def shape(self) -> LogShape: ...
    @property
    def reader(self) -> LogEntryReader:
        """Returns the reader of the log's entries."""
        ...

    @property
    def state(self) -> TopicState: ...
    @property
    def world(self) -> World: ...
    @property
    def is_compacted(self) -> bool:
        """Returns True if this is the compacted form of the topic, which lacks the messages that a compaction
        removed."""

    def removed_entries(self) -> Iterable[tuple[int, BitMap]]:
        """Returns, for each ledger, its id and the ids of the entries that a compaction removed from it. Subscriptions
        acknowledge these entries, because no consumer gets them."""


class Log(ReadableLog, Protocol):
    """The log to which a topic publishes its entries. Reports the outcome of each publish to its publisher
    (broker/log/appender.py)."""

    @property
    def record(self) -> TopicRecord:
        """Returns the topic's record as it was stored last. A topic that stores nothing has an empty record."""

    @property
    def next_index(self) -> int:
        """Returns the index that the next message gets."""

    @property
    def pending_entries(self) -> int:
        """Returns the number of entries that were published and are not confirmed yet."""
        ...

    @property
    def last_published_ms(self) -> int:
        """Returns the time at which the last message was published (ms since the epoch). 0: no message was published
        since the log was opened."""

    @property
    def ledger_age_s(self) -> float:
        """Returns the age, in seconds, of the ledger that is being written, or of the last one if none is being
        written."""

    @property
    def replication(self) -> LedgerReplication | None:
        """Returns the replication (the quorums) of the ledger that this owner of the topic is writing or wrote last;
        None if it has created no ledger."""

    @property
    def wanted_replication(self) -> LedgerReplication:
        """Returns the replication that the policy demanded when the present ledger was created. (The ledger may have
        less, if bookies were missing.)"""

    @property
    def is_degraded(self) -> bool:
        """Returns True if the ledger that is being written has fewer bookies, or fewer copies, than the policy asks
        for."""
        ...
    @property
    def ensemble(self) -> Mapping[int, tuple[str, ...]]:
        """Returns a mapping with one item: the id of the ledger that is being written, and the names of its bookies.
        Empty if no ledger is being written."""

    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes the topic over, so that only this broker writes to it. If the topic does not exist, awaits `create()`
        first, which creates it; raises TopicNotFound if `create` is None. Must be called once, before any other
        method."""

    async def is_still_owned(self) -> bool:
        """Returns True if no other broker has taken the topic over. Raises the error of the metadata store if the
        topic's record cannot be read."""

    def publish(self, publish: Publish) -> None:
        """Queues an entry to be stored. Its publisher gets the outcome later. Raises at once if the log accepts no
        entries: TopicTerminated if the topic is terminated, else NotOwner."""

    def await_first_copy(self, publish: Publish) -> None:
        """Lets the publisher of the entry that was published last be told (`LogOutcomePort.on_first_copy`) when a
        bookie has stored the entry, if that is before its outcome. The entries of the topic are told in order."""

    def create_first_ledger_early(self) -> None:
        """Starts to create the first ledger of this owner without waiting for a publish, if the log was written until
        just now. Does not wait for it."""

    async def roll_ledger(self) -> None:
        """Begins a new ledger, even if the present one is not full, and waits for that. Does nothing if the present
        ledger is empty. Raises NotEnoughBookies if no ledger can be created now."""

    @property
    def has_idle_ledger(self) -> bool:
        """Returns True if a ledger is open that `close_idle_ledger` may close now."""

    async def close_idle_ledger(self) -> None:
        """Closes the ledger that is being written, and begins no other before the next publish. Does nothing unless
        `has_idle_ledger`."""

    async def trim_ledgers(self, choose: Callable[[], list[int]]) -> list[int]:
        """Calls the function `choose`, and deletes the ledgers whose ids it returns. Returns the ids of the deleted
        ledgers."""

    async def commit_fields(
        self, *, together: Sequence[NodeUpdate] = (), within: bool = False,
        decide: Callable[[TopicRecord], Mapping[str, object]] | None = None, **fields: object,
    ) -> None:  # fmt: skip
        """Stores new values of the given `fields` of the topic's record, and makes the changes `together` in the same
        commit. `decide`: returns further fields, from the record as it is when its turn comes. `within`: True if the
        caller runs in a task that is never cancelled; else a new task makes the commit. Raises TopicFenced if another
        broker owns the topic, and any error that a change of `together` raises."""

    async def terminate(self) -> Position:
        """Terminates the log: it accepts no entries any more. Returns the position of its last entry. Idempotent.
        Raises TopicFenced if another broker owns the topic, Unavailable if it takes too long."""

    def abandon(self, error: MagnetarError) -> None:
        """Stops all work at once, because another broker owns the topic, or because this broker cannot serve it. The
        publishes in flight fail, and it is not known whether their entries are stored."""

    async def close(self) -> None:
        """Closes the log in order: first waits until all publishes in flight have their outcomes. Idempotent.
        Afterwards `publish` raises NotOwner."""


# ------------------------------------------------------------------------------------------------ committed_view
# A topic's log as a consumer of committed entries sees it: up to the last stable position, without what is aborted.
#
# It takes the place of the log for everything that shows entries (`shape`, `reader`): subscriptions, readers, reads by
# index, the last message, peeks, compaction. It is made with the first transaction of a topic; a topic that never saw
# one shows its log. Positions and indexes are those of the log: what is left out keeps its indexes. Who adds a path on
# which entries leave the broker reads from `Topic.shown` or from a subscription's `log`, never from `Topic.log`
# (tests/broker/topic/test_shown.py lists who may).


class CommittedReader:
    """The LogEntryReader of consumers that read only committed entries. Leaves out the entries of open and aborted
    transactions."""

    def __init__(self, shape: CommittedShape, log: LogEntryReader) -> None:
        self._shape = shape
        self._log = log

    def _shown(self, entries: list[StoredEntry]) -> list[StoredEntry]:
        if not entries or self._shape.is_every_entry_visible(entries[0].position, entries[-1].position):
            return entries
        readable = self._shape.has_visible_entry
        return [entry for entry in entries if readable(entry.position)]

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return self._shown(self._log.read_cached(position, entries_max, bytes_max))

    def get(self, position: Position) -> StoredEntry | None:
        return self._log.get(position) if self._shape.has_visible_entry(position) else None

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Returns committed entries of one ledger from `position` on, at least one: up to the entry id `last_entry`,
        about `bytes_max` bytes. Raises InvalidRequest if no committed entry is at `position`."""
        self._check(position)
        stable = self._shape.stable_position
        if position[0] == stable[0]:
            last_entry = min(last_entry, stable[1])
        return self._shown(await self._log.read(position, bytes_max, last_entry))

    async def read_entry(self, position: Position) -> StoredEntry:
        self._check(position)
        return await self._log.read_entry(position)

    def _check(self, position: Position) -> None:
        if not self._shape.has_visible_entry(position):
            raise InvalidRequest(f"there is no entry {position} (any more)", position=position)

    async def find_position_by_index(self, index: int) -> PositionAndIndex:
        return await self._next_shown(await self._log.find_position_by_index(index))

    async def find_position_by_time(self, time_ms: int) -> PositionAndIndex:
        return await self._next_shown(await self._log.find_position_by_time(time_ms))

    async def _next_shown(self, place: PositionAndIndex) -> PositionAndIndex:
        position = self._shape.next_unskipped_position(place.position)
        if not self._shape.has_visible_entry(position):
            return PositionAndIndex(self._shape.position_after(self._shape.stable_position), self._shape.end_index)
        if position == place.position:
            return place
        return PositionAndIndex(position, (await self._log.read_entry(position)).first_index)

    async def find_message_index_after(self, mark: Position) -> int:
        return await self._log.find_message_index_after(mark)

    def find_cached_message_index_after(self, mark: Position) -> int | None:
        return self._log.find_cached_message_index_after(mark)

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        last = self._shape.last_unskipped_position
        if last.entry_id < 0:
            return None
        entry = await self._log.read_entry(last)
        return last, entry.count - 1 if entry.count > 1 else -1, entry.index


class CommittedLogView:
    """The log of a topic, without the entries of open and aborted transactions. A ReadableLog."""

    is_compacted = False

    def __init__(self, log: ReadableLog, decided: TxnOutcomes) -> None:
        self.topic = log.topic
        self.shape = CommittedShape(log.shape)
        self.shape.set_transaction_outcomes(decided)
        self.reader = CommittedReader(self.shape, log.reader)
        self._log = log

    @property
    def world(self) -> World:
        return self._log.world

    @property
    def state(self) -> TopicState:
        return self._log.state

    def removed_entries(self) -> Iterable[tuple[int, BitMap]]:
        """Returns (), because no compaction has removed entries from this log."""
        return ()
