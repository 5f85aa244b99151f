"""What a bookie knows of its ledgers besides their entries, in memory (`LedgerDescriptors`) and in the ledger index on
the disk (`LedgerIndexFile`): keys, fence bits, LACs and facts (format/ledger_index.py), appended per checkpoint.

`write` appends what changed and syncs. A large file of mostly outdated records (`_OUTDATED_MAX`) is instead rewritten
as the next generation, when there is room. Neither counts before the mark names generation and end; `on_committed` then
removes the old generation. `load` reads exactly what the mark names: it returns the whole records and reports what is
missing, and the next `write` rewrites the file, with or without room.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from pyroaring import BitMap64

from ...runtime.files import Files, join_path
from ..format import ledger_index
from ..format.journal import (
    FILE_HEADER_BYTES,
    DamagedFile,
    FileHeader,
    ForeignFile,
    decode_file_header,
    encode_file_header,
)
from ..format.ledger_index import LedgerState, State, Tombstone
from . import disk
from .index import LruCache
from .state_log import Fact, StateLog, read_or_damaged
from .table import LedgerTable, LoadedIndex, TableLoader, sorted_in_slices

# --------------------------------------------------------------------------------------------------- descriptors
# The descriptors: exactly one per ledger has all that the bookie knows of it besides its entries (BookKeeper #4701).
#
#     fenced        no add without RECOVERY is admitted, ever; set before the fence record is enqueued
#     fence_synced  that record is durable; only then is a fence request answered
#     key           master key, 20 bytes, compared in constant time and never logged
#     key_synced    its record is durable; until then every turn that adds to the ledger journals it again, so that no
#                   record of a ledger is ever durable without its key, whichever block the disk had no room for
#     lac, last     largest LAC known (from entries and explicit), largest entry stored
#
# Deleted ledgers remain as tombstones; these and the other facts that must never be forgotten are in
# state_log.py.
#
# A descriptor is in one of these places, looked up in this order: *dirty* (changed since the last checkpoint began),
# *settling* (being written by the running one), *clean* (a cache of those used lately), else a record in the packed
# table (table.py). A bitmap says which ledgers exist. A caller that changes a descriptor gets it with `get` or `create`
# in the same step, without an await in between, and calls `mark_changed`: so there is never a second one with older
# values. A
# descriptor whose key or fence is not durable yet stays dirty.
#
# A checkpoint calls `begin_checkpoint` when it swaps the memtable, `pending_changes` for the worker, which encodes and
# merges (`PendingChanges.encode_changes`, so that the event loop never walks over ledgers), and `on_written` after the
# mark. `has_unwritten`: there is
# something to write, also when there were no entries (#4843).


_CLEAN_MAX = 4096
"""Descriptors that were asked for and not changed: about 1 MB."""


class LedgerDescriptor:
    """The metadata that a bookie has of a ledger: its key, its fence, its LAC, and the id of its last entry."""

    __slots__ = ("fence_synced", "fenced", "key", "key_synced", "lac", "last", "ledger")

    def __init__(self, ledger: int, key: bytes) -> None:
        self.ledger = ledger
        self.key = key
        self.key_synced = False
        self.fenced = False
        self.fence_synced = False
        self.lac = -1
        self.last = -1

    @classmethod
    def from_state(cls, state: LedgerState) -> LedgerDescriptor:
        """Returns the descriptor for `state`, a durable record of the ledger index."""
        found = cls(state.ledger, state.key)
        found.key_synced = True
        found.fenced = found.fence_synced = state.fenced
        found.lac, found.last = state.lac, state.last
        return found

    def has_key(self, key: bytes) -> bool:
        """Returns whether `key` is the ledger's key."""
        return hmac.compare_digest(self.key, key)


class IndexContent(NamedTuple):
    """The content that the ledger index must have: all records (`table`, `statements`), and the new ones (`changes`).
    `unsynced` are descriptors whose key or fence the journal does not have durably yet.
    """

    table: LedgerTable
    changes: list[bytes]  # encoded facts and ledgers
    statements: list[bytes]  # encoded facts: with the table's leaves they say everything
    unsynced: list[LedgerDescriptor]  # whose key or fence was not durable when they were encoded


class PendingChanges(NamedTuple):
    """The changes that a checkpoint's worker must write. Descriptors may change meanwhile, but a fence is only set, and
    LAC and last entry only grow.
    """

    table: LedgerTable
    settling: dict[int, LedgerDescriptor]
    changes: list[State]
    facts: StateLog
    alive: int

    def encode_changes(self, everything: bool) -> IndexContent:
        """Encodes the changes and merges them into the table; with `everything`, also removes deleted ledgers from the
        table.
        """
        records: dict[int, bytes] = {}
        unsynced: list[LedgerDescriptor] = []
        for ledger in sorted_in_slices(self.settling):
            found = self.settling[ledger]
            if not found.key_synced or (found.fenced and not found.fence_synced):
                unsynced.append(found)
            records[ledger] = ledger_index.encode_ledger(ledger, found.fenced, found.key, found.lac, found.last)
        table = self.table.with_ledger_records(records) if records else self.table
        if everything:
            statements = list(map(ledger_index.encode, self.facts.all_facts()))
            return IndexContent(table.without(self.facts.tombstones), [], statements, unsynced)
        return IndexContent(table, [*map(ledger_index.encode, self.changes), *records.values()], [], unsynced)


class LedgerDescriptors(StateLog):
    """The descriptors and facts of a bookie. Descriptors that did not change lately are made when needed, from the
    table of the ledger index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dirty_ledgers: dict[int, LedgerDescriptor] = {}
        self._settling: dict[int, LedgerDescriptor] = {}
        self._clean: LruCache[int, LedgerDescriptor] = LruCache(_CLEAN_MAX)
        self._table = LedgerTable()
        self._ids = BitMap64()
        self._unwritten: list[State] = []

    # ------------------------------------------------------------------------------------ ledgers
    def get(self, ledger: int) -> LedgerDescriptor | None:
        found = self.dirty_ledgers.get(ledger)
        return self._resting(ledger) if found is None else found

    def _resting(self, ledger: int) -> LedgerDescriptor | None:
        """Returns the descriptor of a ledger that has no unwritten changes; None if there is no such ledger."""
        if ledger < 0 or ledger not in self._ids:
            return None
        found = self._settling.get(ledger) or self._clean.get(ledger)
        if found is None:
            state = self._table.get(ledger)
            assert state is not None, f"ledger {ledger} is nowhere"
            found = LedgerDescriptor.from_state(state)
            self._clean.put(ledger, found, 1)
        return found

    def __contains__(self, ledger: int) -> bool:
        return ledger >= 0 and ledger in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def highest(self) -> int:
        """Returns the largest ledger id; -1 if there is none."""
        return int(self._ids.max()) if len(self._ids) else -1

    def ledger_ids(self) -> BitMap64:
        """Returns a copy of the set of ledgers, without deleted ones."""
        return self._ids.copy()

    def create(self, ledger: int, key: bytes) -> LedgerDescriptor:
        assert ledger not in self._ids, f"ledger {ledger} has a descriptor"
        assert ledger not in self.tombstones, f"ledger {ledger} is deleted"
        descriptor = self.dirty_ledgers[ledger] = LedgerDescriptor(ledger, key)
        self._ids.add(ledger)
        return descriptor

    def mark_changed(self, descriptor: LedgerDescriptor) -> None:
        """Marks the descriptor as changed: the next checkpoint writes it."""
        self.dirty_ledgers[descriptor.ledger] = descriptor

    def delete(self, first: int, last: int) -> None:
        """Deletes the ledgers `first … last` for ever."""
        self.add_fact(Tombstone(first, last))

    def apply(self, fact: Fact) -> None:
        super().apply(fact)
        if isinstance(fact, Tombstone):
            self._drop(fact.first, fact.last)

    def _drop(self, first: int, last: int) -> None:
        """Removes the ledgers from the bitmap, so that their other places are not read any more."""
        self._ids.remove_range(first, last + 1)
        span = range(first, last + 1)
        dirty = self.dirty_ledgers
        dead = span if len(span) <= len(dirty) else [ledger for ledger in dirty if ledger in span]
        for ledger in list(dead):
            self.dirty_ledgers.pop(ledger, None)

    # ------------------------------------------------------------------------------------ for the ledger index
    def load(self, loaded: LoadedIndex) -> None:
        """Sets the descriptors to those that were read from the ledger index. Must be called once, when the store
        starts."""
        assert not len(self)
        self._table, self._ids = loaded.table, loaded.ledgers
        for fact in loaded.facts:
            self.apply(cast("Fact", fact))

    @property
    def has_unwritten(self) -> bool:
        return bool(self.dirty_ledgers or self._settling or self._unwritten or self.has_changes)

    def begin_checkpoint(self) -> None:
        """Hands all changes until now to the checkpoint that begins, with those of a checkpoint that failed."""
        if self._settling:
            self._settling.update(self.dirty_ledgers)
        else:
            self._settling = self.dirty_ledgers
        self.dirty_ledgers = {}
        self._unwritten += self.take_changes()

    def pending_changes(self) -> PendingChanges:
        alive = len(self._ids) + len(self.tombstones)
        return PendingChanges(self._table, self._settling, self._unwritten, self.copy(), alive)

    def on_written(self, settled: IndexContent) -> dict[int, LedgerDescriptor]:
        """Called when the changes are durable. Returns the descriptors that are not needed any more; the caller must
        free them, because they may be many.
        """
        self._table, old, self._settling, self._unwritten = settled.table, self._settling, {}, []
        for descriptor in settled.unsynced:
            if descriptor.ledger in self._ids:
                self.dirty_ledgers.setdefault(descriptor.ledger, descriptor)
        return old

    def check(self) -> None:
        """Checks the facts, that every ledger has a descriptor, that a synced fence is set, and that no deleted ledger
        has unwritten changes.
        """
        self.check_facts(self._ids)
        known = {*self.dirty_ledgers, *self._settling, *self._table}
        assert all(ledger in known for ledger in self._ids)
        assert all(ledger in self._ids for ledger in self.dirty_ledgers)
        assert list(self._table) == sorted(set(self._table))
        found = [self.get(ledger) for ledger in self._ids]
        assert all(d is not None and (d.fenced or not d.fence_synced) for d in found)


# --------------------------------------------------------------------------------------------------- index_files


_LOG = logging.getLogger("magnetar.bookie.store.ledgers")

SUFFIX = ".lidx"
_OUTDATED_MAX = 4
"""Multiple of the records that are alive above which a file is rewritten, if it is larger than _REWRITE_BYTES_MIN."""
_REWRITE_BYTES_MIN = 1 << 20
"""Least bytes of a file that is rewritten for that."""
_READ_BYTES = 4096 * ledger_index.RECORD_BYTES
_WRITE_BYTES = 1 << 20
"""Bytes written and synced at once, so that a large rewrite does not delay the journal's syncs."""

_BAD = "record of the ledger index is not what was written"


def index_file_name(generation: int) -> str:
    return f"{generation:016d}{SUFFIX}"


class LedgerIndexFile:
    """The file of the ledger index: checkpoints append to it, and now and then rewrite it."""

    def __init__(self, files: Files, directory: str, uuid: bytes, generation: int, end: int) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.generation = generation
        self.end = end
        self._faulty = False

    def load(self, missing: Callable[[str], None]) -> LoadedIndex:
        """Returns the content of all whole records. Calls `missing` with a description of each damage. Raises
        ForeignFile or NewerFormat.
        """
        path = join_path(self._directory, index_file_name(self.generation))
        loading = TableLoader()
        faults: list[str] = []
        try:
            read_or_damaged(path, lambda: self._feed(path, loading, faults))
        except ForeignFile:
            raise
        except FileNotFoundError:
            faults.append(f"{path} is gone, and the mark names it")
        except DamagedFile as error:
            faults.append(str(error))
        for fault in faults:
            missing(fault)
        self._faulty = bool(faults)
        return loading.finish()

    def _feed(self, path: str, loading: TableLoader, faults: list[str]) -> None:
        file = self._files.open(path, write=False)
        try:
            end = min(self.end, file.size())
            if end < self.end:
                faults.append(f"{path} ends at {end} and should be {self.end} bytes long")
            try:
                header = file.pread(FILE_HEADER_BYTES, 0)
                decode_file_header(header, ledger_index.MAGIC, self._uuid, self.generation, path)
            except ForeignFile:
                raise
            except DamagedFile as error:
                faults.append(str(error))
            for offset in range(FILE_HEADER_BYTES, end, _READ_BYTES):
                bad = loading.feed(file.pread(min(_READ_BYTES, end - offset), offset))
                faults += [str(DamagedFile(path, offset + at, _BAD)) for at in bad]
        finally:
            file.close()

    def is_outdated(self, alive: int) -> bool:
        """Returns whether the next `write` rewrites the file; `alive` is the number of ledgers."""
        large = self.end > _REWRITE_BYTES_MIN and self.end > _OUTDATED_MAX * alive * ledger_index.RECORD_BYTES
        return self._faulty or large

    def write(self, unwritten: PendingChanges) -> tuple[IndexContent, int, int]:
        """Writes the changes, or everything if the file is outdated. Returns the content that was written, and
        (generation, end) of the file for the mark.
        """
        if self.is_outdated(unwritten.alive):
            settled = unwritten.encode_changes(everything=True)
            try:
                return settled, *self.rewrite([*settled.statements, *settled.table.leaves])
            except disk.NoSpace:
                if self._faulty:
                    raise
                _LOG.warning("no room to rewrite the ledger index: it grows further")
        settled = unwritten.encode_changes(everything=False)
        return settled, *self._append(settled.changes)

    def append(self, facts: Sequence[State]) -> tuple[int, int]:
        """Appends only facts; returns (generation, end) for the mark."""
        return self._append(list(map(ledger_index.encode, facts)))

    def _append(self, records: Sequence[bytes]) -> tuple[int, int]:
        file = disk.open_file(self._files, join_path(self._directory, index_file_name(self.generation)))
        try:
            size = disk.write(self._files, file, [b"".join(records)], self.end)
            disk.sync(self._files, file)
        finally:
            file.close()
        return self.generation, self.end + size

    def rewrite(self, records: Sequence[bytes]) -> tuple[int, int]:
        """Writes the next generation with these records, each a buffer of one or more; returns (generation, end) for
        the mark.
        """
        generation = self.generation + 1
        header = encode_file_header(FileHeader(ledger_index.MAGIC, self._uuid, generation))
        size = disk.replace_file_in_slices(
            self._files, self._directory, index_file_name(generation), _slices([header, *records])
        )
        return generation, size

    def on_committed(self, generation: int, end: int) -> None:
        """The mark now names this generation and end: removes other generations."""
        old, self.generation, self.end = self.generation, generation, end
        if old != generation:
            self._faulty = False
            self.remove_old_generations()

    def remove_old_generations(self) -> None:
        """Removes other generations, without a sync: a name that returns after a crash is removed by the next start."""
        for other in disk.list_removable(self._files, self._directory):
            if other != index_file_name(self.generation):
                self._files.remove(join_path(self._directory, other))


def _slices(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the buffers, joined to slices of about `_WRITE_BYTES`."""
    waiting: list[bytes] = []
    size = 0
    for buffer in buffers:
        waiting.append(buffer)
        size += len(buffer)
        if size >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def create(files: Files, directory: str, uuid: bytes) -> LedgerIndexFile:
    """Creates the first generation of the ledger index file, without records."""
    new = LedgerIndexFile(files, directory, uuid, 0, FILE_HEADER_BYTES)
    generation, end = new.rewrite([])
    return LedgerIndexFile(files, directory, uuid, generation, end)


def newest(files: Files, directory: str) -> tuple[int, int]:
    """Returns (generation, end) of the newest file that exists, without reading it; for a start without a mark."""
    found = [each for each in files.list_directory(directory) if each.endswith(SUFFIX)]
    if not found:
        return 0, FILE_HEADER_BYTES
    file = files.open(join_path(directory, found[-1]), write=False)
    try:
        records = max(0, file.size() - FILE_HEADER_BYTES) // ledger_index.RECORD_BYTES
    finally:
        file.close()
    return int(found[-1].removesuffix(SUFFIX)), FILE_HEADER_BYTES + records * ledger_index.RECORD_BYTES
