"""What a stopped bookie holds, read from its directory: `magnetar metadata rebuild` makes the lost metadata again of it
(metadata/rebuild_core.py).

    lock_directory(files, directory)            store/identity.py: the bookie is stopped, and stays so
    holdings = read_holdings(files, directory)  changes nothing
    encode_holdings | decode_holdings           to carry it from the bookie's machine to the one that rebuilds

The bookie need not run, and cannot: it starts with metadata alone. What a stopped bookie has does not change any more:
no writer adds to it. An entry counts if the index of an entry log names it, or the journal after the mark has it.
Entries in quarantine, and those of ledgers with a tombstone, do not count. What cannot be read is in `damages`, and is
not there for the rebuild: other bookies have it, or it is told as missing. The bookie finds the damage again when it
starts, and restores it as always (store/boot.py).

    file = magic "MGN-HOLD" | version u16 | crc32c u32 (of the body) | body: BookieHoldings in MessagePack

The file has the keys of ledgers, as the metadata has: it is for its owner alone (mode 0600). Guarded by
tests/bookie/test_holdings.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from ..ledger.peer_format import ENTRY_HEADER_STRUCT
from ..metadata.rebuild_core import BookieHoldings, HeldLedger, HeldRun
from ..metadata.records import LedgerLabel
from ..proto import versions
from ..proto.checksum import crc32c
from ..proto.entry import parse_stored_head
from ..proto.errors import CorruptEntry, InvalidRequest, NewerFormat
from ..runtime.files import Files
from .format import mark as note
from .format.entry_log import decode_record_if_intact
from .format.journal import DamagedFile, RecordType
from .format.ledger_index import LedgerState
from .format.mark import DirectoryRole
from .inspect import logs
from .inspect.snapshot import (
    FileDamage,
    RemovedFile,
    StoreSnapshot,
    list_ledgers_directories,
    open_file,
    snapshot_directory,
)
from .maintenance.labels import walk_labels
from .maintenance.seen import METADATA_STATE_FILE, SEEN_MAGIC, RecordedMetadataState
from .store import boot, disk, index_files
from .store.identity import read_cookie
from .store.index import ExtentLocation
from .store.memtable import IntegerIntervals
from .store.state_log import StateLog

HOLDINGS_MAGIC = b"MGN-HOLD"
_HEAD = struct.Struct(">8sHI")


# ----------------------------------------------------------------------------------------------------------- files
def encode_holdings(holdings: BookieHoldings) -> bytes:
    """Encodes what a bookie holds as the bytes of a file."""
    body = msgspec.msgpack.encode(holdings)
    return _HEAD.pack(HOLDINGS_MAGIC, versions.HOLDINGS.version, crc32c(body)) + body


def decode_holdings(data: bytes, where: str) -> BookieHoldings:
    """Decodes the bytes of a file of `encode_holdings`. Raises InvalidRequest if they are damaged or something else,
    NewerFormat if a later Magnetar wrote them. `where`: the name of the file, for errors."""
    if len(data) < _HEAD.size or not data.startswith(HOLDINGS_MAGIC):
        raise InvalidRequest(f"{where} is neither a bookie's directory nor a file that `--save` wrote")
    _, version, crc = _HEAD.unpack_from(data)
    versions.check_format(versions.HOLDINGS, version, where)
    if crc32c(memoryview(data)[_HEAD.size :]) != crc:
        raise InvalidRequest(f"{where} is damaged: its checksum does not match; write it again with `--save`")
    try:
        return msgspec.msgpack.decode(memoryview(data)[_HEAD.size :], type=BookieHoldings)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where} is no list of what a bookie holds: {error}") from error


# ------------------------------------------------------------------------------------------------------- directory
def read_holdings(files: Files, directory: str) -> BookieHoldings:
    """Reads what the bookie of this data directory holds, which must be stopped, in all of its ledgers directories.
    Raises NotFound if it is not a bookie's directory; InvalidRequest if its cookie cannot be read, it is a ledgers
    directory alone, or a file has a newer format; OSError if a folder or file cannot be opened."""
    homes = list_ledgers_directories(files, directory)
    readers = [_Reader(snapshot_directory(files, each)) for each in homes]
    first = readers[0].snapshot
    if homes == (directory,):
        if first.cookie is not None and first.cookie.role is not DirectoryRole.DATA:
            raise InvalidRequest(f"{directory} has a part of a bookie's ledgers: name its data directory")
        return readers[0].read()
    home, parts = read_cookie(files, directory), [each.read() for each in readers]
    assert home is not None, "it names the ledgers directories"
    seen = _Reader(first._replace(directory=directory))._read_seen()
    return msgspec.structs.replace(
        parts[0], place=home.directories[0], starts=home.starts, seen_ledger=max(seen, *(e.seen_ledger for e in parts)),
        ledgers=tuple(sorted((ledger for each in parts for ledger in each.ledgers), key=lambda held: held.ledger_id)),
        tombstones=tuple(sorted(run for each in parts for run in each.tombstones)),
        damages=tuple(damage for each in parts for damage in each.damages),
    )  # fmt: skip


class _HeldEntries:
    """The entries of a ledger that were found so far. `stride`: runs have each entry, or every `stride`-th."""

    __slots__ = ("_runs", "lowest", "stride")

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self._runs: list[HeldRun] = []
        self.lowest: tuple[int, ExtentLocation | bytes] | None = None
        """The lowest entry, and where it is, or its bytes."""

    def add(self, entries: Iterable[int]) -> None:
        """Adds entries that ascend."""
        open_: dict[int, tuple[int, int]] = {}  # residue → first and last of the run that may go on
        for entry in entries:
            residue = entry % self.stride
            first, last = open_.get(residue, (entry, -1))
            if last >= 0 and entry != last + self.stride:
                self._runs.append(HeldRun(first, last, self.stride))
                first = entry
            open_[residue] = first, entry
        self._runs += [HeldRun(first, last, self.stride) for first, last in open_.values()]

    def add_run(self, first: int, last: int) -> None:
        """Adds the entries `first … last`."""
        if self.stride == 1:
            self._runs.append(HeldRun(first, last))
        else:
            self.add(range(first, last + 1))

    def note_lowest(self, entry: int, where: ExtentLocation | bytes) -> None:
        if self.lowest is None or entry < self.lowest[0]:
            self.lowest = entry, where

    def finish(self, bad: Iterable[tuple[int, int]]) -> tuple[HeldRun, ...]:
        """Returns the runs, joined and in ascending order, without the entries of the intervals `bad`."""
        found: list[HeldRun] = []
        for residue in range(self.stride):
            held = IntegerIntervals()
            for first, last, _ in self._runs:
                if first % self.stride == residue:
                    held.add(first // self.stride, last // self.stride)
            for first, last in bad:
                low = (first - residue + self.stride - 1) // self.stride
                if low <= (last - residue) // self.stride:
                    held.remove(low, (last - residue) // self.stride)
            found += [
                HeldRun(low * self.stride + residue, high * self.stride + residue, self.stride) for low, high in held
            ]
        return tuple(sorted(found))


class _Reader:
    def __init__(self, snapshot: StoreSnapshot) -> None:
        self.snapshot = snapshot
        self.damages = [_text(damage) for damage in snapshot.damages]
        self.keys: dict[int, bytes] = {}
        self.facts = StateLog()
        self.labels: dict[int, LedgerLabel] = {}
        self.held: dict[int, _HeldEntries] = {}

    def read(self) -> BookieHoldings:
        snapshot = self.snapshot
        if snapshot.cookie is None:
            raise InvalidRequest(f"{snapshot.directory}: {snapshot.damages[0].reason}: which bookie is it?")
        self._read_labels()
        self._read_ledger_index()
        blocks = list(self._journal_facts())  # first: tombstones of what the logs still have
        self._read_logs()
        for ledger, entry, payload in blocks:
            own = self._entries_of(ledger)
            if own is not None:
                own.add_run(entry, entry)
                own.note_lowest(entry, payload if self._is_index_wanted(ledger) else b"")
        found = sorted({*self.keys, *self.held, *self.labels})
        mark = (0, 0) if snapshot.mark is None else snapshot.mark.position
        return BookieHoldings(
            bookie=snapshot.cookie.bookie, instance=snapshot.cookie.instance, place=snapshot.cookie.directories[0],
            starts=snapshot.cookie.starts, journal=mark[0], offset=mark[1], seen_ledger=self._read_seen(),
            ledgers=tuple(self._ledger(ledger) for ledger in found if ledger not in self.facts.tombstones),
            tombstones=tuple(self.facts.tombstones), damages=tuple(self.damages),
        )  # fmt: skip

    def _ledger(self, ledger: int) -> HeldLedger:
        own, key, label = self.held.get(ledger), self.keys.get(ledger, b""), self.labels.get(ledger)
        if own is None:
            return HeldLedger(ledger_id=ledger, key=key, label=label)
        runs = own.finish(self.facts.quarantined_runs_of_ledger(ledger))
        return HeldLedger(
            ledger_id=ledger, key=key, label=label, runs=runs, first_index=self._first_index(ledger, own)
        )

    def _entries_of(self, ledger: int) -> _HeldEntries | None:
        """Returns what was found of the ledger; None if it was deleted."""
        own = self.held.get(ledger)
        if own is None and ledger not in self.facts.tombstones:
            label = self.labels.get(ledger)
            striped = label is not None and label.ensemble_size > label.write_quorum
            own = self.held[ledger] = _HeldEntries(label.ensemble_size if label is not None and striped else 1)
        return own

    def _note(self, found: FileDamage | RemovedFile) -> None:
        if isinstance(found, FileDamage):
            self.damages.append(_text(found))

    # ------------------------------------------------------------------------------------ small files
    def _read_labels(self) -> None:
        try:
            for label in walk_labels(self.snapshot.files, self.snapshot.directory, self.snapshot.uuid):
                self.labels[label.ledger_id] = label
        except (DamagedFile, OSError) as error:
            self.damages.append(str(error))
        except NewerFormat as error:
            raise InvalidRequest(str(error)) from error

    def _read_seen(self) -> int:
        path = self.snapshot.path(METADATA_STATE_FILE)
        if not self.snapshot.files.exists(path):
            return -1
        try:
            data = disk.read_file(self.snapshot.files, path)
            return note.decode_checksummed_json(data, SEEN_MAGIC, RecordedMetadataState, path).ledger
        except (DamagedFile, OSError) as error:
            self.damages.append(str(error))
        except NewerFormat as error:
            raise InvalidRequest(str(error)) from error
        return -1

    def _read_ledger_index(self) -> None:
        files, folder, mark = self.snapshot.files, self.snapshot.path(boot.LEDGERS_FOLDER), self.snapshot.mark
        if not files.exists(folder):
            return
        named = (
            index_files.find_newest_ledger_index(files, folder)
            if mark is None
            else (mark.ledgers_generation, mark.ledgers_end)
        )
        index = index_files.LedgerIndexFile(files, folder, self.snapshot.uuid, *named)
        try:
            loaded = index.load(self.damages.append)
        except (DamagedFile, NewerFormat) as error:
            raise InvalidRequest(str(error)) from error
        for fact in loaded.facts:
            assert not isinstance(fact, LedgerState), "the table has those"
            self.facts.apply(fact)
        for ledger in loaded.ledgers:
            state = loaded.table.get(ledger)
            if state is not None:
                self.keys[ledger] = state.key

    # ------------------------------------------------------------------------------------ entries
    def _journal_facts(self) -> Iterator[tuple[int, int, bytes]]:
        """Applies keys and tombstones of the journal after the mark, and yields (ledger, entry, stored entry) of its
        adds. A payload is kept only where the index of a first message may be read from it."""
        for found in logs.walk_blocks_after_mark(self.snapshot):
            if isinstance(found, FileDamage | RemovedFile):
                self._note(found)
                continue
            for kind, ledger, entry, payload in found.records:
                if kind is RecordType.ADD:
                    yield ledger, entry, bytes(payload) if self._is_index_wanted(ledger) else b""
                elif kind is RecordType.KEY:
                    self.keys.setdefault(ledger, bytes(payload))
                elif kind is RecordType.TOMBSTONE:
                    self.facts.tombstones.add(ledger, entry)

    def _read_logs(self) -> None:
        for log in logs.list_entry_log_numbers(self.snapshot):
            if log in self.facts.drained:
                continue
            if not self.snapshot.files.exists(logs.log_path(self.snapshot, log)):
                self._note(logs.classify_missing_log(self.snapshot, log))
                continue
            opened = logs.open_index_file(self.snapshot, log)
            if not isinstance(opened, logs.IndexFile):
                self._note(opened)
                continue
            try:
                self._read_log(opened)
            finally:
                opened.file.close()

    def _read_log(self, opened: logs.IndexFile) -> None:
        for group in opened.walk_groups():
            if isinstance(group, FileDamage):
                self._note(group)
                continue
            for place in opened.walk_extents(group):
                extent = place.extent
                own = self._entries_of(extent.ledger)
                if own is None:
                    continue
                if extent.entries == extent.last - extent.first + 1:
                    own.add_run(extent.first, extent.last)
                else:
                    table = opened.read_table(place)
                    if isinstance(table, FileDamage):
                        self._note(table)
                        continue
                    own.add(extent.first + delta for delta in table.deltas)
                own.note_lowest(extent.first, place)

    # ------------------------------------------------------------------------------------ indexes
    def _is_index_wanted(self, ledger: int) -> bool:
        """Returns whether the index of the ledger's first message is not in its label: an earlier version made it."""
        label = self.labels.get(ledger)
        return label is not None and label.properties.keys() == {"topic"}

    def _first_index(self, ledger: int, own: _HeldEntries) -> int:
        if own.lowest is None or not self._is_index_wanted(ledger):
            return -1
        entry, where = own.lowest
        stored = self._read_entry(entry, where) if isinstance(where, ExtentLocation) else where
        try:
            head = parse_stored_head(stored[ENTRY_HEADER_STRUCT.size :])
        except CorruptEntry as error:
            self.damages.append(f"entry {entry} of ledger {ledger}: {error}")
            return -1
        count = head.metadata.num_messages_in_batch if head.metadata.HasField("num_messages_in_batch") else 1
        return head.last_index - count + 1 if head.last_index >= 0 else -1

    def _read_entry(self, entry: int, place: ExtentLocation) -> bytes:
        """Returns the stored entry; b"" if it is damaged."""
        for copy in logs.find_log_copies(self.snapshot, [place], entry):
            if isinstance(copy, FileDamage | RemovedFile):
                self._note(copy)
                continue
            file = open_file(self.snapshot, copy.path) if copy.damage is None else None
            if file is None:
                continue
            try:
                return bytes(decode_record_if_intact(file.pread(copy.bytes, copy.offset), 0, copy.bytes) or b"")
            finally:
                file.close()
        return b""


def _text(damage: FileDamage) -> str:
    return str(DamagedFile(*damage))

