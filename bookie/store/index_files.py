"""What a bookie knows of its ledgers besides their entries, in memory (`LedgerDescriptors`) and in the ledger index on
the disk (`LedgerIndexFile`): keys, fence bits, LACs and facts (format/ledger_index.py), appended per checkpoint.

`write` appends what changed and syncs. A large file of mostly outdated records (`_OUTDATED_MAX`) is instead rewritten
as the next generation, when there is room. Neither counts before the mark names generation and end; `on_committed` then
removes the old generation. `load` reads exactly what the mark names: it returns the whole records and reports what is
missing, and the next `write` rewrites the file, with or without room.

**The keys of ledgers** (`LedgerKeys`): which request may read or change a ledger, and with which key a ledger may begin
here. A ledger has one key for ever: that of the first add, fence or LAC that was admitted. Its KEY record is in the
same group of the journal. So a start never finds an entry, a fence or an LAC of a ledger without its key.

    record_key_of_metadata(ledger, key)   the metadata has a record of the ledger with this key
    judge_add_key(ledger, key)            whether an add or a fence with this key is admitted
    ensure_descriptor(ledger, key)        the descriptor, after OK; enqueues the KEY record if it is not durable
    take_enqueued_keys()                  the KEY records of the group that is sealed now

`TombstoneWriter` writes the tombstones of deleted ledgers. Bound: the keys of `KEYS_OF_UNKNOWN_LEDGERS_MAX` ledgers
that have not begun here. Guarded by tests/bookie/test_newcomers.py, tests/bookie/store/test_crashes.py.

**The table of ledgers** (`LedgerTable`) has the ledgers that have not changed lately, as in the ledger index: about 50
bytes each, sorted, in leaves. A table is never changed. A checkpoint makes a new table in the flush worker: it merges
what changed into new leaves, and shares the others with the table before. So the event loop never walks over all
ledgers, and readers keep a whole table. A leaf is up to `2 * RECORDS_PER_LEAF` records of format/ledger_index.py, byte
for byte: loading is slicing, and a rewrite of the ledger index writes the leaves one after the other.

`LedgerTableLoader` makes a table from a ledger index file: each checkpoint appended its ledgers in ascending order,
later records replace earlier ones. Guarded by tests/bookie/store/test_ledger_table.py.
"""

from __future__ import annotations

import heapq
import hmac
import logging
import struct
from array import array
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, cast

from pyroaring import BitMap64

from ...ledger.peer_format import Status
from ...runtime.files import Files, join_path
from ..format import ledger_index
from ..format.journal import (
    FILE_HEADER_BYTES,
    DamagedFile,
    FileHeader,
    ForeignFile,
    RecordType,
    crc32c,
    decode_file_header,
    encode_file_header,
)
from ..format.ledger_index import LEDGER_RECORD_BYTES, LedgerIndexRecord, LedgerIndexRecordKind, LedgerState, Tombstone
from . import disk
from .index import LruCache
from .journal import Journal
from .memtable import IntegerIntervals, Memtable
from .state_log import StateLog, StateLogFact, read_or_raise_damaged

RECORDS_PER_LEAF = 256
LEAF_BYTES = RECORDS_PER_LEAF * LEDGER_RECORD_BYTES
_HEAD = struct.Struct(">IBq")
_LEDGER = struct.Struct(">q")
_LEDGER_AT = 5
_CHANGES_MAX = 1 << 17
"""While a file is read, at most this number of records that are out of order wait to be merged. They need about 30
MB."""
_SORT_SLICE = 4096
"""The number of values that are sorted at once. A sort keeps the interpreter: 1 ms for this number, 50 ms for
100,000."""


def sort_in_slices(values: Collection[int]) -> Iterator[int]:
    """Yields the values in ascending order. Sorts them in slices, so that the event loop gets the interpreter in
    between. Must run in a worker."""
    if len(values) <= _SORT_SLICE:
        return iter(sorted(values))
    rest = iter(values)
    slices = list(iter(lambda: sorted(islice(rest, _SORT_SLICE)), []))
    return heapq.merge(*slices)


class LedgerTable:
    """An immutable table of ledger records in ascending order of ledger ids. The records are packed into leaves of
    bytes, to save memory."""

    __slots__ = ("_firsts", "leaves")

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self.leaves = [leaf for leaf in leaves if leaf]
        self._firsts = array("q", [_LEDGER.unpack_from(leaf, _LEDGER_AT)[0] for leaf in self.leaves])

    def get(self, ledger: int) -> LedgerState | None:
        """Returns the record of the ledger; None if the table has none."""
        at = bisect_right(self._firsts, ledger) - 1
        if at < 0:
            return None
        leaf = self.leaves[at]
        where = _find(leaf, ledger, 0)
        if where * LEDGER_RECORD_BYTES == len(leaf) or _ledger(leaf, where) != ledger:
            return None
        state = ledger_index.decode_record_if_intact(leaf, where * LEDGER_RECORD_BYTES)
        assert isinstance(state, LedgerState), f"the record of ledger {ledger} changed in memory"
        return state

    def __iter__(self) -> Iterator[int]:
        """Yields the ledger ids in ascending order."""
        for leaf in self.leaves:
            for (ledger,) in struct.iter_unpack(f">{_LEDGER_AT}xq{LEDGER_RECORD_BYTES - _LEDGER_AT - 8}x", leaf):
                yield ledger

    def with_ledger_records(self, changes: Mapping[int, bytes]) -> LedgerTable:
        """Returns a copy of the table with the records `changes` (encoded, by ledger id). They replace older records of
        the same ledgers."""
        by_leaf: dict[int, list[int]] = {}
        for ledger in changes:
            by_leaf.setdefault(max(bisect_right(self._firsts, ledger) - 1, 0), []).append(ledger)
        leaves: list[bytes] = []
        done = 0
        for at in sorted(by_leaf):
            leaves += self.leaves[done:at]
            leaves += _merge(self.leaves[at] if self.leaves else b"", sort_in_slices(by_leaf[at]), changes)
            done = at + 1
        return LedgerTable(leaves + self.leaves[done:])

    def without_ledgers(self, dead: IntegerIntervals) -> LedgerTable:
        """Returns a copy of the table without the ledgers in the intervals `dead`."""
        leaves: list[bytes] = []
        for leaf in self.leaves:
            last = len(leaf) // LEDGER_RECORD_BYTES - 1
            if dead.intersect(_ledger(leaf, 0), _ledger(leaf, last)):
                kept = [at * LEDGER_RECORD_BYTES for at in range(last + 1) if _ledger(leaf, at) not in dead]
                leaf = b"".join([leaf[at : at + LEDGER_RECORD_BYTES] for at in kept])
            leaves.append(leaf)
        return LedgerTable(leaves)


def _ledger(leaf: bytes, at: int) -> int:
    found: int = _LEDGER.unpack_from(leaf, at * LEDGER_RECORD_BYTES + _LEDGER_AT)[0]
    return found


def _find(leaf: bytes, ledger: int, low: int) -> int:
    """Returns the number of the first record, from number `low` on, whose ledger id is at least `ledger`; the number of
    all records if there is none."""
    high = count = len(leaf) // LEDGER_RECORD_BYTES
    if low == count or _ledger(leaf, count - 1) < ledger:
        return count
    while low < high:  # as `bisect_left` with a key, which is a call or two a step
        at = (low + high) // 2
        if _LEDGER.unpack_from(leaf, at * LEDGER_RECORD_BYTES + _LEDGER_AT)[0] < ledger:
            low = at + 1
        else:
            high = at
    return low


def _merge(leaf: bytes, ledgers: Iterable[int], changes: Mapping[int, bytes]) -> Iterator[bytes]:
    """Yields the leaves that replace `leaf` when the records of `ledgers` in `changes` are put into it."""
    parts: list[bytes] = []
    size = done = 0
    for ledger in ledgers:
        at = _find(leaf, ledger, done)
        for part in (leaf[done * LEDGER_RECORD_BYTES : at * LEDGER_RECORD_BYTES], changes[ledger]):
            parts.append(part)
            size += len(part)
        done = at + (at * LEDGER_RECORD_BYTES < len(leaf) and _ledger(leaf, at) == ledger)
        if size >= LEAF_BYTES:
            yield from _cut(parts)
            parts, size = [], 0
    yield from _cut([*parts, leaf[done * LEDGER_RECORD_BYTES :]])


def _cut(parts: list[bytes]) -> list[bytes]:
    """Joins the parts and splits the result into leaves."""
    data = b"".join(parts)
    if len(data) <= 2 * LEAF_BYTES:
        return [data]
    return [data[at : at + LEAF_BYTES] for at in range(0, len(data), LEAF_BYTES)]


class LoadedLedgerIndex(NamedTuple):
    """The content of a ledger index file: the table of its ledger records, the ids of the ledgers that are not deleted,
    and its facts."""

    table: LedgerTable
    ledgers: BitMap64  # those of the table without a tombstone
    facts: list[LedgerIndexRecord]  # in the order in which they were stated


class LedgerTableLoader:
    """Makes the content of a ledger index from the bytes of its file. The caller calls `add_rows` with the file's
    records, slice by slice in order, then `finish`, which returns the content."""

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._tail: list[bytes] = []  # ascending, above all leaves
        self._tail_bytes = 0
        self._highest = -1
        self._changes: dict[int, bytes] = {}
        self._facts: list[LedgerIndexRecord] = []

    def add_rows(self, data: bytes) -> list[int]:
        """Adds the records in `data`. Skips records that are damaged or cut off, and returns their offsets in
        `data`."""
        bad: list[int] = []
        begin = 0  # of the records that were not taken yet: ascending, above all before
        for at in range(0, len(data), LEDGER_RECORD_BYTES):
            record = data[at : at + LEDGER_RECORD_BYTES]
            if len(record) < LEDGER_RECORD_BYTES:
                bad.append(at)
            else:
                crc, kind, ledger = _HEAD.unpack_from(record)
                if crc32c(record[4:]) != crc:
                    bad.append(at)
                elif kind == LedgerIndexRecordKind.LEDGER and ledger > self._highest:
                    self._highest = ledger
                    continue
                elif kind == LedgerIndexRecordKind.LEDGER:
                    self._changes[ledger] = record
                else:
                    self._fact(record, at, bad)
            self._append(data[begin:at])
            begin = at + LEDGER_RECORD_BYTES
        self._append(data[begin:])
        if len(self._changes) > _CHANGES_MAX:
            self._settle()
        return bad

    def _fact(self, record: bytes, at: int, bad: list[int]) -> None:
        fact = ledger_index.decode_record_if_intact(record)
        if fact is None:
            bad.append(at)
        else:
            self._facts.append(fact)

    def _append(self, records: bytes) -> None:
        self._tail.append(records)
        self._tail_bytes += len(records)
        if self._tail_bytes >= LEAF_BYTES:
            self._cut()

    def _cut(self) -> None:
        tail = b"".join(self._tail)
        self._leaves += [tail[at : at + LEAF_BYTES] for at in range(0, len(tail), LEAF_BYTES)]
        self._tail, self._tail_bytes = [], 0

    def _settle(self) -> LedgerTable:
        self._cut()
        table = LedgerTable(self._leaves).with_ledger_records(self._changes)
        self._leaves, self._changes = table.leaves, {}
        return table

    def finish(self) -> LoadedLedgerIndex:
        """Returns the content of all records that were added. Must be called once, after the last `add_rows`."""
        table = self._settle()
        ledgers = BitMap64()
        for leaf in table.leaves:
            ledgers.update(array("Q", list(LedgerTable([leaf]))))
        for fact in self._facts:
            if isinstance(fact, Tombstone):
                ledgers.remove_range(fact.first, fact.last + 1)
        return LoadedLedgerIndex(table, ledgers, self._facts)


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
# table (`LedgerTable`). A bitmap says which ledgers exist. A caller that changes a descriptor gets it with `get` or
# `create` in the same step, without an await in between, and calls `mark_changed`: so there is never a second one with
# older values. A descriptor whose key or fence is not durable yet stays dirty.
#
# A checkpoint calls `begin_checkpoint` when it swaps the memtable, `pending_changes` for the worker, which encodes and
# merges (`PendingIndexChanges.encode_changes`, so that the event loop never walks over ledgers), and
# `on_changes_durable` after
# the mark. `has_unwritten_changes`: there is something to write, also when there were no entries (#4843).


_CLEAN_MAX = 4096
"""The largest number of unchanged descriptors that are kept in memory: about 1 MB."""


class LedgerDescriptor:
    """What a bookie knows of a ledger besides its entries: the key, whether it is fenced, its last-add-confirmed (LAC;
    -1: unknown), and the id of its last entry (-1: none). `key_synced` and `fence_synced`: whether key and fence are
    durable. `dropped`: copies of entries up to `last` were dropped here, as its record names other bookies: a miss of
    them is UNKNOWN."""

    __slots__ = ("dropped", "fence_synced", "fenced", "key", "key_synced", "lac", "last", "ledger")

    def __init__(self, ledger: int, key: bytes) -> None:
        self.ledger = ledger
        self.key = key
        self.key_synced = False
        self.fenced = False
        self.fence_synced = False
        self.lac = -1
        self.last = -1
        self.dropped = False

    @classmethod
    def from_state(cls, state: LedgerState) -> LedgerDescriptor:
        """Returns the descriptor with the values of `state`, a durable record of the ledger index."""
        found = cls(state.ledger, state.key)
        found.key_synced = True
        found.fenced = found.fence_synced = state.fenced
        found.lac, found.last, found.dropped = state.lac, state.last, state.dropped
        return found

    def has_key(self, key: bytes) -> bool:
        """Returns whether `key` is the ledger's key."""
        return hmac.compare_digest(self.key, key)


class LedgerIndexContent(NamedTuple):
    """What a checkpoint writes to the ledger index: the new records alone (`changes`), or all records (`statements` and
    the `table`). `unsynced` are the descriptors whose key or fence was not durable yet when they were encoded."""

    table: LedgerTable
    changes: list[bytes]  # encoded facts and ledgers
    statements: list[bytes]  # encoded facts: with the table's leaves they say everything
    unsynced: list[LedgerDescriptor]  # whose key or fence was not durable when they were encoded


class PendingIndexChanges(NamedTuple):
    """The descriptors and facts that a checkpoint's worker must write to the ledger index. `table`: all ledgers as the
    last checkpoint left them; `settling`: the changed descriptors, by ledger; `changes`: the new facts; `facts`: all
    facts; `alive`: the number of ledgers and tombstones. While the worker writes, a descriptor may still change: it may
    be fenced, and its LAC and last entry may grow."""

    table: LedgerTable
    settling: dict[int, LedgerDescriptor]
    changes: list[LedgerIndexRecord]
    facts: StateLog
    alive: int

    def encode_changes(self, everything: bool) -> LedgerIndexContent:
        """Encodes the changes and merges them into a new table of all ledgers. Returns the content to write.
        `everything`: also encodes all facts, and leaves deleted ledgers out of the table."""
        records: dict[int, bytes] = {}
        unsynced: list[LedgerDescriptor] = []
        for ledger in sort_in_slices(self.settling):
            found = self.settling[ledger]
            if not found.key_synced or (found.fenced and not found.fence_synced):
                unsynced.append(found)
            records[ledger] = ledger_index.encode_ledger_record(
                ledger, found.fenced, found.key, found.lac, found.last, found.dropped
            )  # fmt: skip
        table = self.table.with_ledger_records(records) if records else self.table
        if everything:
            statements = list(map(ledger_index.encode_ledger_index_record, self.facts.list_facts()))
            return LedgerIndexContent(table.without_ledgers(self.facts.tombstones), [], statements, unsynced)
        return LedgerIndexContent(
            table, [*map(ledger_index.encode_ledger_index_record, self.changes), *records.values()], [], unsynced
        )


class LedgerDescriptors(StateLog):
    """The descriptors of all ledgers of a bookie, and its facts (such as tombstones). The descriptor of a ledger that
    has not changed lately is made from the ledger index when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.dirty_ledgers: dict[int, LedgerDescriptor] = {}
        self._settling: dict[int, LedgerDescriptor] = {}
        self._clean: LruCache[int, LedgerDescriptor] = LruCache(_CLEAN_MAX)
        self._table = LedgerTable()
        self._ids = BitMap64()
        self._unwritten: list[LedgerIndexRecord] = []

    # ------------------------------------------------------------------------------------ ledgers
    def get(self, ledger: int) -> LedgerDescriptor | None:
        """Returns the descriptor of a ledger; None if the ledger is unknown or deleted. A caller that changes the
        descriptor must do so without an await in between, and then call `mark_changed`."""
        found = self.dirty_ledgers.get(ledger)
        return self._resting(ledger) if found is None else found

    def _resting(self, ledger: int) -> LedgerDescriptor | None:
        """Returns the descriptor of a ledger that has not changed since the last checkpoint began; None if there is no
        such ledger."""
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
        """Returns the largest id of a ledger that has a descriptor; -1 if there is none."""
        return int(self._ids.max()) if len(self._ids) else -1

    def ledger_ids(self) -> BitMap64:
        """Returns a copy of the set of the ids of all ledgers that are not deleted."""
        return self._ids.copy()

    def create(self, ledger: int, key: bytes) -> LedgerDescriptor:
        """Makes the descriptor of a ledger that has none and is not deleted, and returns it. It is not durable, and not
        fenced."""
        assert ledger not in self._ids, f"ledger {ledger} has a descriptor"
        assert ledger not in self.tombstones, f"ledger {ledger} is deleted"
        descriptor = self.dirty_ledgers[ledger] = LedgerDescriptor(ledger, key)
        self._ids.add(ledger)
        return descriptor

    def may_be_elsewhere(self, ledger: int, entry: int) -> bool:
        """Returns whether an entry that is not found here may exist all the same: its copy is quarantined, or was
        dropped."""
        descriptor = self.get(ledger)
        was_dropped = descriptor is not None and descriptor.dropped and entry <= descriptor.last
        return was_dropped or self.is_quarantined(ledger, entry)

    def mark_changed(self, descriptor: LedgerDescriptor) -> None:
        """Marks the descriptor as changed, so that the next checkpoint writes it."""
        self.dirty_ledgers[descriptor.ledger] = descriptor

    def delete(self, first: int, last: int) -> None:
        """Records that the ledgers `first … last` are deleted for ever. The record is durable with the next
        checkpoint."""
        self.add_fact(Tombstone(first, last))

    def apply(self, fact: StateLogFact) -> None:
        """Puts a fact into force, as `StateLog.apply` does. A tombstone also removes the descriptors of its ledgers."""
        super().apply(fact)
        if isinstance(fact, Tombstone):
            self._drop(fact.first, fact.last)

    def _drop(self, first: int, last: int) -> None:
        """Removes the ledgers `first … last` from the set of ledgers that exist."""
        self._ids.remove_range(first, last + 1)
        span = range(first, last + 1)
        dirty = self.dirty_ledgers
        dead = span if len(span) <= len(dirty) else [ledger for ledger in dirty if ledger in span]
        for ledger in list(dead):
            self.dirty_ledgers.pop(ledger, None)

    # ------------------------------------------------------------------------------------ for the ledger index
    def load(self, loaded: LoadedLedgerIndex) -> None:
        """Sets the descriptors and facts to those of `loaded`, which was read from the ledger index. Must be called
        once, when the store starts."""
        assert not len(self)
        self._table, self._ids = loaded.table, loaded.ledgers
        for fact in loaded.facts:
            self.apply(cast("StateLogFact", fact))

    @property
    def has_unwritten_changes(self) -> bool:
        """Returns whether a checkpoint has any descriptor or fact to write to the ledger index."""
        return bool(self.dirty_ledgers or self._settling or self._unwritten or self.has_changes)

    def begin_checkpoint(self) -> None:
        """Makes all changes so far a part of the checkpoint that begins, together with those of an earlier checkpoint
        that failed."""
        if self._settling:
            self._settling.update(self.dirty_ledgers)
        else:
            self._settling = self.dirty_ledgers
        self.dirty_ledgers = {}
        self._unwritten += self.take_changes()

    def pending_changes(self) -> PendingIndexChanges:
        """Returns what the running checkpoint must write to the ledger index. `begin_checkpoint` must have been
        called."""
        alive = len(self._ids) + len(self.tombstones)
        return PendingIndexChanges(self._table, self._settling, self._unwritten, self.copy(), alive)

    def on_changes_durable(self, settled: LedgerIndexContent) -> dict[int, LedgerDescriptor]:
        """Called when the changes of a checkpoint are durable: `settled`, which was written. Returns descriptors that
        are not needed any more; the caller must free them in small steps, because they may be many."""
        self._table, old, self._settling, self._unwritten = settled.table, self._settling, {}, []
        for descriptor in settled.unsynced:
            if descriptor.ledger in self._ids:
                self.dirty_ledgers.setdefault(descriptor.ledger, descriptor)
        return old

    def check(self) -> None:
        """Checks the invariants: those of the facts; every ledger has a descriptor; a fence that is synced is set; no
        deleted ledger has unwritten changes."""
        self.check_facts(self._ids)
        known = {*self.dirty_ledgers, *self._settling, *self._table}
        assert all(ledger in known for ledger in self._ids)
        assert all(ledger in self._ids for ledger in self.dirty_ledgers)
        assert list(self._table) == sorted(set(self._table))
        found = [self.get(ledger) for ledger in self._ids]
        assert all(d is not None and (d.fenced or not d.fence_synced) for d in found)


# --------------------------------------------------------------------------------------------------- index_files


_LOG = logging.getLogger("magnetar.bookie.store.ledgers")

LEDGER_INDEX_SUFFIX = ".lidx"
_OUTDATED_MAX = 4
"""The file is rewritten when its size is above this multiple of the size of the records that still count, and above
_REWRITE_BYTES_MIN."""
_REWRITE_BYTES_MIN = 1 << 20
"""A smaller file, in bytes, is not rewritten because of outdated records."""
_READ_BYTES = 4096 * ledger_index.LEDGER_RECORD_BYTES
_WRITE_BYTES = 1 << 20
"""The number of bytes that are written and synced at once, so that a large rewrite does not delay the journal's
syncs."""

_BAD = "record of the ledger index is not what was written"


def ledger_index_file_name(generation: int) -> str:
    return f"{generation:016d}{LEDGER_INDEX_SUFFIX}"


class LedgerIndexFile:
    """The file of the ledger index. Checkpoints append records to the file, or write a new one (the next generation)
    when too many of its records are outdated. `generation` and `end` are what the mark names. The methods wait for the
    disk and must run in a worker."""

    def __init__(self, files: Files, directory: str, uuid: bytes, generation: int, end: int) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.generation = generation
        self.end = end
        self._faulty = False

    def load(self, missing: Callable[[str], None]) -> LoadedLedgerIndex:
        """Reads the file and returns the content of all its undamaged records. Calls `missing` with a text for each
        damage. Raises ForeignFile or NewerFormat."""
        path = join_path(self._directory, ledger_index_file_name(self.generation))
        loading = LedgerTableLoader()
        faults: list[str] = []
        try:
            read_or_raise_damaged(path, lambda: self._feed(path, loading, faults))
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

    def _feed(self, path: str, loading: LedgerTableLoader, faults: list[str]) -> None:
        file = self._files.open(path, write=False)
        try:
            end = min(self.end, file.size())
            if end < self.end:
                faults.append(f"{path} ends at {end} and should be {self.end} bytes long")
            try:
                header = file.pread(FILE_HEADER_BYTES, 0)
                decode_file_header(header, ledger_index.LEDGER_INDEX_MAGIC, self._uuid, self.generation, path)
            except ForeignFile:
                raise
            except DamagedFile as error:
                faults.append(str(error))
            for offset in range(FILE_HEADER_BYTES, end, _READ_BYTES):
                bad = loading.add_rows(file.pread(min(_READ_BYTES, end - offset), offset))
                faults += [str(DamagedFile(path, offset + at, _BAD)) for at in bad]
        finally:
            file.close()

    def must_rewrite(self, alive: int) -> bool:
        """Returns whether the next `write` must write a new file, because this one is damaged or has too many outdated
        records. `alive` is the number of records that still count."""
        large = self.end > _REWRITE_BYTES_MIN and self.end > _OUTDATED_MAX * alive * ledger_index.LEDGER_RECORD_BYTES
        return self._faulty or large

    def write(self, unwritten: PendingIndexChanges) -> tuple[LedgerIndexContent, int, int]:
        """Appends the changes `unwritten` to the file, or writes a new file with all records. Returns (content that was
        written, generation of the file, its end). The mark must name generation and end. Raises NoSpace if the disk is
        full, or its subclass NoFileDescriptor if no file descriptor is free; then nothing counts."""
        if self.must_rewrite(unwritten.alive):
            settled = unwritten.encode_changes(everything=True)
            try:
                return settled, *self.rewrite([*settled.statements, *settled.table.leaves])
            except disk.NoSpace:
                if self._faulty:
                    raise
                _LOG.warning("no room to rewrite the ledger index: it grows further")
        settled = unwritten.encode_changes(everything=False)
        return settled, *self._append(settled.changes)

    def append(self, facts: Sequence[LedgerIndexRecord]) -> tuple[int, int]:
        """Appends these facts alone to the file. Returns (generation, end) of the file, which the mark must name.
        Raises NoSpace if the disk is full, or its subclass NoFileDescriptor if no file descriptor is free."""
        return self._append(list(map(ledger_index.encode_ledger_index_record, facts)))

    def _append(self, records: Sequence[bytes]) -> tuple[int, int]:
        file = disk.open_file(self._files, join_path(self._directory, ledger_index_file_name(self.generation)))
        try:
            size = disk.write_buffers(self._files, file, [b"".join(records)], self.end)
            disk.sync_file(self._files, file)
        finally:
            file.close()
        return self.generation, self.end + size

    def rewrite(self, records: Sequence[bytes]) -> tuple[int, int]:
        """Writes the next generation of the file; `records` are its encoded records, one or more in each buffer.
        Returns (generation, end) of the new file, which the mark must name. Raises NoSpace if the disk is full, or its
        subclass NoFileDescriptor if no file descriptor is free."""
        generation = self.generation + 1
        header = encode_file_header(FileHeader(ledger_index.LEDGER_INDEX_MAGIC, self._uuid, generation))
        size = disk.replace_file_in_slices(
            self._files, self._directory, ledger_index_file_name(generation), _slices([header, *records])
        )
        return generation, size

    def on_committed(self, generation: int, end: int) -> None:
        """Called when the durable mark names this generation and this end of the file. Removes the files of older
        generations."""
        old, self.generation, self.end = self.generation, generation, end
        if old != generation:
            self._faulty = False
            self.remove_old_generations()

    def remove_old_generations(self) -> None:
        """Removes the files of other generations, without a sync. If a crash brings one of them back, the next start
        removes it."""
        for other in disk.list_removable_files(self._files, self._directory):
            if other != ledger_index_file_name(self.generation):
                self._files.remove(join_path(self._directory, other))


def _slices(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """Joins the buffers and yields them in slices of about `_WRITE_BYTES` bytes."""
    waiting: list[bytes] = []
    size = 0
    for buffer in buffers:
        waiting.append(buffer)
        size += len(buffer)
        if size >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def create_ledger_index(files: Files, directory: str, uuid: bytes) -> LedgerIndexFile:
    """Creates the file of the ledger index without records and returns it. Raises NoSpace if the disk is full, or its
    subclass NoFileDescriptor if no file descriptor is free."""
    new = LedgerIndexFile(files, directory, uuid, 0, FILE_HEADER_BYTES)
    generation, end = new.rewrite([])
    return LedgerIndexFile(files, directory, uuid, generation, end)


def find_newest_ledger_index(files: Files, directory: str) -> tuple[int, int]:
    """Returns (generation, end of the last complete record) of the newest ledger index file, by its name and its size;
    (0, end of a file without records) if there is no such file. A start that found no mark calls this. Raises OSError
    if the directory or the file cannot be read."""
    found = [each for each in files.list_directory(directory) if each.endswith(LEDGER_INDEX_SUFFIX)]
    if not found:
        return 0, FILE_HEADER_BYTES
    file = files.open(join_path(directory, found[-1]), write=False)
    try:
        records = max(0, file.size() - FILE_HEADER_BYTES) // ledger_index.LEDGER_RECORD_BYTES
    finally:
        file.close()
    return int(
        found[-1].removesuffix(LEDGER_INDEX_SUFFIX)
    ), FILE_HEADER_BYTES + records * ledger_index.LEDGER_RECORD_BYTES


KEYS_OF_UNKNOWN_LEDGERS_MAX = 4096
"""The largest number of keys that are kept of ledgers which have not begun here: those of a burst."""


class LedgerKeys:
    """Checks and stores the keys of the ledgers of one store. A key authorizes adds, fences and reads of its ledger.
    Creates missing `descriptors`, and enqueues KEY records to `journal`."""

    def __init__(self, descriptors: LedgerDescriptors, journal: Journal) -> None:
        self._descriptors = descriptors
        self._journal = journal
        # keys of ledgers that are not here; None: any ledger may begin
        self._introduced: LruCache[int, bytes] | None = None
        self._keying: dict[int, LedgerDescriptor] = {}  # whose key goes out with the next seal

    def require_keys_from_metadata(self) -> None:
        """From now on a ledger that is unknown here may begin only if its key was read from the metadata
        (`record_key_of_metadata`); at most KEYS_OF_UNKNOWN_LEDGERS_MAX such keys are kept."""
        self._introduced = LruCache(KEYS_OF_UNKNOWN_LEDGERS_MAX)

    def record_key_of_metadata(self, ledger: int, key: bytes) -> None:
        """Records, in memory, that the metadata has a record of the ledger with this key."""
        if self._introduced is not None:
            self._introduced.put(ledger, key, 1)

    def may_begin_unknown_ledger(self, ledger: int, key: bytes) -> bool:
        """Returns whether a ledger that this store does not know may begin here with this key."""
        if self._introduced is None:
            return True
        known = self._introduced.get(ledger)
        return known is not None and hmac.compare_digest(known, key)

    def judge_add_key(self, ledger: int, key: bytes) -> Status:
        """Returns the status for an add or a fence with this key. OK: the key is right, or the ledger may begin here.
        FENCED: the ledger is deleted. NO_SUCH_LEDGER: the ledger is unknown here, and its key must be read from the
        metadata first. UNAUTHORIZED: the ledger has another key."""
        descriptor = self._descriptors.get(ledger)
        if descriptor is not None:
            return Status.OK if descriptor.has_key(key) else Status.UNAUTHORIZED
        if ledger in self._descriptors.tombstones:
            return Status.FENCED
        return Status.OK if self.may_begin_unknown_ledger(ledger, key) else Status.NO_SUCH_LEDGER

    def judge_read_key(self, ledger: int, key: bytes) -> Status:
        """Returns the status for a read with this key. OK: the sender may read the ledger. NO_SUCH_LEDGER: this store
        may have lost the ledger's key, which must be read from the metadata first. UNAUTHORIZED: the ledger has another
        key."""
        descriptor = self._descriptors.get(ledger)
        if descriptor is not None:
            return Status.OK if descriptor.has_key(key) else Status.UNAUTHORIZED
        lost = 0 <= ledger <= self._descriptors.limbo_upto and ledger not in self._descriptors.tombstones
        return Status.NO_SUCH_LEDGER if lost and not self.may_begin_unknown_ledger(ledger, key) else Status.OK

    def bind_key(self, ledger: int, key: bytes) -> Status:
        """Makes `key` the key of the ledger if this store does not know the ledger. Returns OK (the key is durable when
        the next seal is done), or UNAUTHORIZED if the ledger is deleted or has another key."""
        descriptor = self._descriptors.get(ledger)
        if ledger in self._descriptors.tombstones or (descriptor is not None and not descriptor.has_key(key)):
            return Status.UNAUTHORIZED
        self.ensure_descriptor(ledger, key)
        return Status.OK

    def ensure_descriptor(self, ledger: int, key: bytes) -> LedgerDescriptor:
        """Returns the ledger's descriptor; creates it, with this key, if there is none. Enqueues a KEY record to the
        journal if the key is not durable yet and no record of it waits. The caller must have checked the key."""
        descriptor = self._descriptors.get(ledger) or self._descriptors.create(ledger, key)
        if not descriptor.key_synced and ledger not in self._keying:
            self._journal.enqueue_record(RecordType.KEY, ledger, -1, (key,))
            self._keying[ledger] = descriptor
        return descriptor

    def take_enqueued_keys(self) -> dict[int, LedgerDescriptor]:
        """Removes and returns the descriptors whose KEY records were enqueued since the last call, by ledger id."""
        keying, self._keying = self._keying, {}
        return keying


# ---------------------------------------------------------------------------------------------------- tombstones
# Tombstones of deleted ledgers: only when a ledger's tombstone is durable may its data be removed.
#
# Rule (ledger protocol §2.6): no entry of a ledger is removed from a log before its tombstone is durable, in the
# journal or in the ledger index. Else a start would find the ledger without its entries, and answer NO_SUCH_ENTRY for
# them.
#
#     write(ledgers)               tombstones into the journal, and out of memory with the rest; True: they are durable
#     write_pending_tombstones()   before a log is removed: every tombstone is durable when this returns, also if the
#                                  journal was full
#
# bookie/maintenance/garbage.py decides which ledgers are deleted. Bound: `TOMBSTONES_PER_GROUP_MAX` intervals in one
# group. Guarded by tests/bookie/store/test_compaction.py, tests/bookie/test_full_disk.py and the crash states
# (tests/crashes).


TOMBSTONES_PER_GROUP_MAX = 4096
"""The largest number of tombstone records (intervals of deleted ledgers) in one group of the journal. A group must fit
into a block."""


class TombstoneWriter:
    """Writes tombstones, the durable records that ledgers are deleted, to the journal of one store. Calling `sealed`
    writes what was enqueued, and returns whether the disk had room for it. Calling `checkpoint` makes a checkpoint."""

    def __init__(
        self, journal: Journal, descriptors: LedgerDescriptors, memtable: Memtable, sealed: Callable[[],
        Awaitable[bool]],
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._journal = journal
        self._descriptors = descriptors
        self._memtable = memtable
        self._sealed = sealed
        self._checkpoint = checkpoint
        self._batches = 0
        self._loose: set[int] = set()  # batches whose tombstones may be in memory alone
        self.counters = {"ledgers_deleted": 0}

    async def write(self, ledgers: list[int]) -> bool:
        """Writes tombstones of these ledgers. Returns True if they are durable. Returns False if the journal had no
        room. Then some tombstones are in memory alone, and `write_pending_tombstones` makes them durable. Others may
        not be written at all: the caller must call this again."""
        spans = IntegerIntervals()
        for ledger in ledgers:
            spans.add(ledger, ledger)
        waiting = list(spans)
        while waiting:
            batch, waiting = waiting[:TOMBSTONES_PER_GROUP_MAX], waiting[TOMBSTONES_PER_GROUP_MAX:]
            self._batches += 1
            number = self._batches
            self._loose.add(number)
            for first, last in batch:
                self._journal.enqueue_record(RecordType.TOMBSTONE, first, last)
                self._descriptors.delete(first, last)
                for ledger in range(first, last + 1):
                    self._memtable.discard(ledger)
            if not await self._sealed():
                return False
            self._loose.discard(number)
        self.counters["ledgers_deleted"] += len(ledgers)
        return True

    async def write_pending_tombstones(self) -> None:
        """Makes a checkpoint if the journal had no room for some tombstones, so that they become durable. Raises
        NoSpace if the disk has no room for the checkpoint either."""
        loose = set(self._loose)
        if loose:
            await self._checkpoint()  # the journal had no room for a tombstone: the ledger index must have it first
            self._loose -= loose
