"""Moves living entries of closed logs to the cold log, in a worker, a slice at a time: a part of
store/entrylog/compaction.py.

    mover = EntryMover(…) ; while mover.list_more_extents() ; begin the cold log for mover.live_bytes
    while mover.run_step() ; mover.finish()      → WrittenEntries, and mover.bad: entries whose copies are all damaged

The extents of all sources are taken in the order of their ledgers, so that each ledger's entries are adjacent
afterwards. Records are copied unchanged, after a check of length, checksum, ledger and entry of each. They are found
one after the other, without the table of the extent; after a damaged record the table says where the next one begins.
An entry that is in several of the sources is copied once, from a good copy.

`LogUsageCounter` counts the living bytes of each log before, and `plan_entry_logs` chooses what is done with it.
Memory: about 110 bytes for each living extent of the sources, and one slice. Guarded by
tests/bookie/store/test_compaction.py.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from heapq import nlargest
from typing import NamedTuple

from pyroaring import BitMap64

from ....runtime.files import Buffer, File, Files, join_path
from ...format import entry_log, index
from ...format.index import Extent, ExtentTable
from ...format.journal import DamagedFile
from ...format.ledger_index import QuarantinedEntries
from ...format.mark import OpenLogEnds
from .. import disk
from ..index import EntryLogIndex, MissingIndexPages
from ..memtable import IntegerIntervals
from .files import EntryLogReader, entry_log_file_name, entry_log_index_file_name, read_extents, read_index_groups
from .writer import EntryLogWriter, WrittenEntries

# ---------------------------------------------------------------------------------------------------------- plan
# The decision of garbage collection, from facts on each log: which entry logs are deleted, which are moved, and why.
#
# A log's *live bytes* are the records of its ledgers without a tombstone, summed over its extents; they are never
# stored, always counted again (BookKeeper #4607). `plan_entry_logs` gives each log one action and its reason, the first
# row
# that fits:
#
# | reason | action | |
# |---|---|---|
# | DEAD | delete | closed, nothing in it lives |
# | OPEN | keep | it still grows; `is_compactable_once_closed` says when it should be closed first |
# | UNREADABLE | keep | its index is damaged; the next start rebuilds it from the log |
# | SPARSE | compact | live share below `minor_share` (minor) or `major_share` (major) |
# | SMALL | compact | major, and below `small_bytes`: several small logs become one, if there are at least two |
# | LIVE | keep | |
# | WAITS | keep | compact in the next major compaction, but this is a minor one |
#
# `group_logs_to_move` puts the logs to move into groups, each of which fits into one cold log: a move is atomic.
# Guarded by tests/bookie/store/test_compaction.py.


COUNTED_HOLDERS_MAX = 10


class CompactionAction(enum.Enum):
    """The action that a compaction takes for an entry log."""

    KEEP = "keep"
    DELETE = "delete"
    COMPACT = "compact"


class CompactionReason(enum.Enum):
    """The reason why a compaction keeps, compacts or deletes an entry log. `plan_entry_logs` applies the rules."""

    DEAD = "nothing in it lives"
    OPEN = "it still grows"
    UNREADABLE = "its index is damaged: a restart rebuilds it"
    SPARSE = "little of it lives"
    SMALL = "it is small"
    LIVE = "enough of it lives"
    WAITS = "major compaction will move it"


class EntryLogState(enum.Enum):
    """Whether an entry log is open, and who writes to it: checkpoints write to the hot log, compactions to the cold
    log."""

    HOT = "hot"  # open for checkpoints
    COLD = "cold"  # open for compaction
    CLOSED = "closed"


class LiveLedger(NamedTuple):
    """A ledger that is not deleted and has entries in an entry log, which must therefore be kept. `live_bytes`: the
    bytes of its records in that log."""

    ledger: int
    live_bytes: int


class EntryLogUsage(NamedTuple):
    """How much of an entry log is live: the size of its two files, of all its records, and of the records of living
    ledgers, in bytes. `plan_entry_logs` decides by these values. `readable`: False if its index is damaged, so that the
    live bytes are not known."""

    log: int
    state: EntryLogState
    bytes: int
    data_bytes: int
    live_bytes: int
    live_extents: int
    ledgers: int  # how many hold it
    holders: tuple[LiveLedger, ...]  # the largest, at most `COUNTED_HOLDERS_MAX`
    readable: bool = True

    @property
    def live_share(self) -> float:
        """Returns the bytes of living records divided by the bytes of all records. Unused space of the files does not
        count: a log that was just compacted has 1.0, even if it is small."""
        return self.live_bytes / self.data_bytes if self.data_bytes else 0.0


class EntryLogPlan(NamedTuple):
    """The action that `plan_entry_logs` chose for an entry log, and the reason."""

    facts: EntryLogUsage
    action: CompactionAction
    reason: CompactionReason


class CompactionPolicy(NamedTuple):
    """The limits of compaction. A log is compacted if its share of live bytes is below `minor_share` (in a minor
    compaction) or `major_share` (in a major one). A major compaction also merges logs that are smaller than
    `small_bytes`. `bytes_per_s` limits the bytes that are read and written. `full_share` replaces `minor_share` on a
    full disk."""

    minor_share: float = 0.2
    major_share: float = 0.5
    small_bytes: int = 64 << 20
    bytes_per_s: int = 32 << 20
    full_share: float = 0.9

    def full_disk_policy(self) -> CompactionPolicy:
        """Returns the policy for a full disk: a minor compaction then also compacts each log whose live share is below
        `full_share`."""
        return self._replace(minor_share=max(self.minor_share, self.full_share))


def plan_entry_logs(logs: Sequence[EntryLogUsage], policy: CompactionPolicy, *, major: bool) -> list[EntryLogPlan]:
    """Chooses the action for each entry log in a minor or (`major` True) a major compaction, by the limits of `policy`.
    Returns one plan for each log, in the order of `logs`."""
    closed = [log for log in logs if log.state is EntryLogState.CLOSED and log.live_bytes]
    small = [log for log in closed if log.bytes < policy.small_bytes]
    return [_decide(log, policy, major, len(small) > 1 and log in small) for log in logs]


def _decide(log: EntryLogUsage, policy: CompactionPolicy, major: bool, small: bool) -> EntryLogPlan:
    if log.state is not EntryLogState.CLOSED:
        return EntryLogPlan(log, CompactionAction.KEEP, CompactionReason.OPEN)
    if not log.readable:
        return EntryLogPlan(log, CompactionAction.KEEP, CompactionReason.UNREADABLE)
    if not log.live_bytes:
        return EntryLogPlan(log, CompactionAction.DELETE, CompactionReason.DEAD)
    if log.live_share < (policy.major_share if major else policy.minor_share):
        return EntryLogPlan(log, CompactionAction.COMPACT, CompactionReason.SPARSE)
    if small and major:
        return EntryLogPlan(log, CompactionAction.COMPACT, CompactionReason.SMALL)
    waits = small or log.live_share < policy.major_share
    return EntryLogPlan(log, CompactionAction.KEEP, CompactionReason.WAITS if waits else CompactionReason.LIVE)


def is_compactable_once_closed(log: EntryLogUsage, share: float) -> bool:
    """Returns whether the log is open now, and its live share is below `share`, so that it could be compacted after it
    is closed."""
    return log.state is not EntryLogState.CLOSED and log.data_bytes > 0 and log.readable and log.live_share < share


def group_logs_to_move(
    moves: Sequence[EntryLogUsage], bytes_max: int, extents_max: int, logs_max: int
) -> list[list[EntryLogUsage]]:
    """Divides the logs to be compacted into groups. Within a group the living bytes, the living extents and the number
    of logs are at most `bytes_max`, `extents_max` and `logs_max`. A log that exceeds the limits alone is a group of its
    own. Logs with a small live share come first."""
    groups: list[list[EntryLogUsage]] = []
    size = extents = 0
    for log in sorted(moves, key=lambda log: (log.live_share, log.log)):
        full = size + log.live_bytes > bytes_max or extents + log.live_extents > extents_max
        if not groups or full or len(groups[-1]) >= logs_max:
            groups.append([])
            size = extents = 0
        groups[-1].append(log)
        size += log.live_bytes
        extents += log.live_extents
    return groups


# -------------------------------------------------------------------------------------------------------- survey
# The live bytes of an entry log: counted from its extents and the tombstones, a part at a time, in a worker.
#
# `LogUsageCounter` takes the heads of one log's index in parts, so that a log of a million ledgers needs little memory
# and does not block the interpreter. The plan decides from its `usage_so_far`. The number of living
# ledgers is exact. The largest are chosen among `_CANDIDATES_MAX` candidates, so with more ledgers than that one in
# many small pieces may be missed. Guarded by tests/bookie/store/test_compaction.py.


_CANDIDATES_MAX = 1 << 14

class DeletedLedgers:
    """A copy of the set of ledger ids whose entries may go, for use in another thread: the deleted ones (tombstones),
    and those whose copies are being dropped."""

    def __init__(self, tombstones: IntegerIntervals, dropping: Set[int] = frozenset()) -> None:
        pairs = list(tombstones)
        self._dropping = frozenset(dropping)
        self._firsts = [first for first, _ in pairs]
        self._lasts = [last for _, last in pairs]

    def __contains__(self, ledger: int) -> bool:
        at = bisect_right(self._firsts, ledger) - 1
        return (at >= 0 and ledger <= self._lasts[at]) or ledger in self._dropping


class LogUsageCounter:
    """Counts the living bytes of one entry log, one part of its index per call of `run_step`; then `usage_so_far` has
    the result. `opened`: the committed ends of the log's files; None: the log is closed. `deleted`: the ledgers whose
    bytes do not count as living. Must be used in a worker."""

    def __init__(
        self, files: Files, directory: str, uuid: bytes, number: int, state: EntryLogState, opened: OpenLogEnds | None,
        deleted: DeletedLedgers,
    ) -> None:  # fmt: skip
        self._number = number
        self._state = state
        self._deleted = deleted
        self._sizes = [
            file_size(files, join_path(directory, name(number)))
            for name in (entry_log_file_name, entry_log_index_file_name)
        ]
        log_end = self._sizes[0] if opened is None else opened.log_end
        self._data_bytes = max(0, log_end - entry_log.FIRST_RECORD_OFFSET)
        self._parts = read_extents(files, directory, number, uuid, None if opened is None else opened.index_end)
        self._ledgers = BitMap64()
        self._largest: dict[int, int] = {}
        self._live_bytes = 0
        self._live_extents = 0
        self._readable = True

    def run_step(self) -> bool:
        """Counts the living bytes in one more part of the log's index. Returns False if no part was left, or if the
        index is damaged."""
        try:
            extents = next(self._parts, None)
        except (DamagedFile, OSError):
            self._readable = False
            return False
        if extents is None:
            return False
        largest, ledgers = self._largest, self._ledgers
        for extent in extents:
            ledger = extent.ledger
            if ledger in self._deleted:
                continue
            self._live_bytes += extent.length
            self._live_extents += 1
            ledgers.add(ledger)
            largest[ledger] = largest.get(ledger, 0) + extent.length
        if len(largest) > _CANDIDATES_MAX:
            kept = nlargest(_CANDIDATES_MAX // 4, largest.items(), key=lambda item: item[1])
            self._largest = dict(kept)
        return True

    @property
    def usage_so_far(self) -> EntryLogUsage:
        """Returns what was counted so far, with the COUNTED_HOLDERS_MAX largest ledgers. It is complete when `run_step`
        has returned False."""
        largest = sorted(self._largest.items(), key=lambda item: (-item[1], item[0]))[:COUNTED_HOLDERS_MAX]
        return EntryLogUsage(
            self._number, self._state, sum(self._sizes), self._data_bytes, self._live_bytes, self._live_extents,
            len(self._ledgers), tuple(LiveLedger(*item) for item in largest), self._readable,
        )  # fmt: skip


def file_size(files: Files, path: str) -> int:
    """Returns the size of a file in bytes; 0 if the file does not exist. Raises OSError if it cannot be opened."""
    return disk.read_file_size(files, path) if files.exists(path) else 0


# --------------------------------------------------------------------------------------------------------- mover


_PACKED = struct.Struct(">qqqIIQIQ")
"""An extent and the number of its log, as bytes. The bytes sort by ledger, then by first entry, because no id is
negative."""
READ_STEP_BYTES = 256 << 10
"""The number of bytes that one step reads and verifies: with small records the interpreter needs about 1 ms for them,
and adds wait for it."""
_PAGE_BYTES = 4096
"""A read of fewer bytes counts with this size, because a disk reads no less than a page."""
WRITE_BUFFER_BYTES = 1 << 20
EXTENT_ENTRIES_MAX = 1 << 14
"""The largest number of entries in an extent. To read one entry, the whole table of its extent is loaded: 128 KiB at
most."""
_EXTENT_BYTES_MAX = 1 << 30
_RECORD_BYTES_MAX = 16 << 20
"""A record with a greater length is damaged: no entry is that large."""


class EntryMover:
    """Copies the records of living ledgers from closed entry logs to the cold log (the log that gets the entries that
    compaction moves), one slice per call of `run_step`. Must be used in a worker. `live_bytes` are the bytes to move,
    after all extents are listed; `moved_bytes` and `records` count what was moved. `bad` are entries of which no good
    copy was found. `sources`: the numbers of the closed logs; `deleted`: the ledgers that are not copied."""

    def __init__(
        self, files: Files, directory: str, uuid: bytes, sources: Sequence[int], deleted: DeletedLedgers,
        cold: EntryLogWriter,
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._sources = list(sources)
        self._deleted = deleted
        self._cold = cold
        self._packed: list[bytes] = []
        self._listing = self._list()
        self._open: dict[int, File] = {}
        self._reader = EntryLogReader(files, directory, 4)
        self._indexes: dict[int, EntryLogIndex] = {}
        self._read = 0
        self._buffers: list[Buffer] = []
        self._buffered = 0
        self._out = _Extents()
        self._moving = self._move()
        self.live_bytes = 0
        self.moved_bytes = 0
        self.records = 0
        self.bad: list[QuarantinedEntries] = []

    # ------------------------------------------------------------------------------------ listing
    def list_more_extents(self) -> bool:
        """Lists more of the extents that must be moved, one part per call. Returns False when all of them are listed.
        Raises DamagedFile if an index is damaged, OSError if it cannot be read."""
        if next(self._listing, None) is not None:
            return True
        self._packed.sort()
        return False

    def _list(self) -> Iterator[bool]:
        for log in self._sources:
            for extents in read_extents(self._files, self._directory, log, self._uuid, None):
                living = [extent for extent in extents if extent.ledger not in self._deleted]
                self._packed += [_PACKED.pack(*extent, log) for extent in living]
                self.live_bytes += sum(extent.length for extent in living)
                yield True

    # ------------------------------------------------------------------------------------ moving
    def run_step(self) -> int:
        """Reads and verifies more records; when enough records were read, writes and syncs them. Returns the number of
        bytes read and written; 0: everything is moved. Raises NoSpace if the disk is full; DamagedFile or OSError if
        the index of a damaged extent cannot be read."""
        before = self._read
        while self._read - before < READ_STEP_BYTES and next(self._moving, False):
            pass
        work = self._read - before
        if self._buffered >= WRITE_BUFFER_BYTES or (work == 0 and self._buffered):
            work += self._buffered
            self._cold.append(self._buffers)
            self._buffers, self._buffered = [], 0
        return work

    def finish(self) -> WrittenEntries | None:
        """Writes and syncs the index of the moved entries. Must be called once, after `run_step` has returned 0.
        Returns the result, which the caller must commit; None if nothing was moved. Raises NoSpace if the disk is
        full."""
        assert not self._buffers, "what is buffered was not written"
        extents, tables = self._out.finish()
        return self._cold.write_index(extents, tables) if extents else None

    def close(self) -> None:
        """Closes the files of the logs that were read. The cold log stays open."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._reader.close()

    def _move(self) -> Iterator[bool]:
        at = 0
        while at < len(self._packed):
            end = at + 1
            ledger = self._packed[at][:8]
            while end < len(self._packed) and self._packed[end][:8] == ledger:
                end += 1
            yield from self._move_ledger([_PACKED.unpack(packed) for packed in self._packed[at:end]])
            at = end

    def _move_ledger(self, packed: list[tuple[int, ...]]) -> Iterator[bool]:
        extents = [(Extent(*fields[:-1]), fields[-1]) for fields in packed]
        seen = BitMap64() if _overlap([extent for extent, _ in extents]) else None
        bad: list[tuple[int, int]] = []
        for extent, log in extents:
            for start, end, data, entry in self._records(extent, log, bad):
                if seen is not None:
                    if entry in seen:
                        continue
                    seen.add(entry)
                self._put(extent.ledger, entry, data, start, end)
                yield True
            yield True
        self._note_bad(extents[0][0].ledger, bad, seen)

    def _put(self, ledger: int, entry: int, data: bytes, start: int, end: int) -> None:
        self._out.add(ledger, entry, end - start, self._cold.end_offset + self._buffered)
        self._buffers.append(data[start:end])
        self._buffered += end - start
        self.moved_bytes += end - start
        self.records += 1

    def _note_bad(self, ledger: int, bad: list[tuple[int, int]], seen: BitMap64 | None) -> None:
        """Records the entries of which none of the logs has a good copy. The ranges may contain good entries too: the
        quarantine of an entry matters only if a read does not find the entry."""
        for first, last in bad:
            if seen is None or first != last or first not in seen:
                self.bad.append(QuarantinedEntries(ledger, first, last))

    # ------------------------------------------------------------------------------------ records
    def _records(
        self, extent: Extent, log: int, bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int, bytes, int]]:
        """Yields (start, end, data, entry id) for each good record of the extent; the record is data[start:end].
        Appends the ranges of damaged entries to `bad`."""
        position, last, limit = 0, extent.first - 1, extent.length
        want = READ_STEP_BYTES
        while position < limit:
            asked = min(want, limit - position)
            data = self._pread(log, extent.start + position, asked)
            start = 0
            while (found := entry_log.verify_record_at(data, start)) is not None:
                end, ledger, entry = found
                if ledger != extent.ledger or not last < entry <= extent.last:
                    break
                yield start, end, data, entry
                start, last = end, entry
            position += start
            if position < limit:
                rest = len(data) - start
                want = max(entry_log.RECORD_HEADER_BYTES, entry_log.decode_record_size(data, start))
                if len(data) < asked or not rest < want <= min(limit - position, _RECORD_BYTES_MAX):
                    yield from self._records_by_table(extent, log, position, last, bad)
                    return
                want = max(want, READ_STEP_BYTES)  # the slice ended within a record

    def _records_by_table(
        self, extent: Extent, log: int, position: int, last: int, bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int, bytes, int]]:
        """Yields the good records of a damaged extent that come after the offset `position` and the entry `last`. Finds
        them by the extent's table."""
        table = self._table(extent, log)
        if table is None:
            bad.append((last + 1, extent.last))
            return
        for delta, start, end in zip(table.deltas, table.offsets, table.offsets[1:], strict=False):
            if start < position:
                continue
            entry = extent.first + delta
            data = self._pread(log, extent.start + start, end - start)
            found = entry_log.verify_record_at(data, 0)
            if found == (end - start, extent.ledger, entry):
                yield 0, end - start, data, entry
            else:
                bad.append((entry, entry))

    def _table(self, extent: Extent, log: int) -> ExtentTable | None:
        """Reads the extent's table, which is needed only after damage, from the log's index. Returns None if the table
        is damaged too."""
        index_ = self._indexes.get(log)
        if index_ is None:
            index_ = self._indexes[log] = EntryLogIndex(0)
            for group in read_index_groups(self._files, self._directory, log, self._uuid, None):
                index_.add(group)
        run = index_.find_extents_of_ledger_in_log(log, extent.ledger)
        if isinstance(run, MissingIndexPages):
            run = run.make_ledger_extents(self._reader.read_pages(log, extent.ledger, run.pages)[0])
        place = next((place for place in run.find_extents(extent.first) if place.extent == extent), None)
        return None if place is None else self._reader.read_entries(place, None, extent.first, 1, 1).table

    def _pread(self, log: int, offset: int, size: int) -> bytes:
        """Reads `size` bytes of a log. Returns fewer bytes, or none, where the disk cannot read them."""
        self._read += max(size, _PAGE_BYTES)
        try:
            return self._file(log).pread(size, offset)
        except OSError:
            return b""

    def _file(self, log: int) -> File:
        file = self._open.get(log)
        if file is None:
            file = self._open[log] = self._files.open(join_path(self._directory, entry_log_file_name(log)), write=False)
        return file


def _overlap(extents: list[Extent]) -> bool:
    reach = -1
    for extent in extents:
        if extent.first <= reach:
            return True
        reach = max(reach, extent.last)
    return False


class _Extents:
    """Collects the extents and the tables of the records that are written. An extent is a run of records of one ledger
    in ascending order."""

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._tables: list[bytes] = []
        self._ledger = -1
        self._entries: list[int] = []
        self._offsets: list[int] = [0]
        self._start = 0

    def add(self, ledger: int, entry: int, size: int, position: int) -> None:
        entries = self._entries
        if entries and (
            ledger != self._ledger
            or entry <= entries[-1]
            or entry - entries[0] > index.ENTRY_DELTA_MAX
            or len(entries) >= EXTENT_ENTRIES_MAX
            or self._offsets[-1] + size > _EXTENT_BYTES_MAX
        ):
            self._flush()
            entries = self._entries
        if not entries:
            self._ledger, self._start = ledger, position
        entries.append(entry)
        self._offsets.append(self._offsets[-1] + size)

    def _flush(self) -> None:
        extent, table = index.encode_extent(self._ledger, self._entries, self._offsets, self._start)
        self._extents.append(extent)
        self._tables.append(table)
        self._entries, self._offsets = [], [0]

    def finish(self) -> tuple[list[Extent], list[bytes]]:
        """Returns the extents and their tables in the order of a group: by ledger, then by first entry."""
        if self._entries:
            self._flush()
        ordered = sorted(zip(self._extents, self._tables, strict=True), key=lambda each: each[0][:2])
        return [extent for extent, _ in ordered], [table for _, table in ordered]
