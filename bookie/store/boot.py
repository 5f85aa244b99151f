"""How a store starts: from what a crash left to a state in which it may answer requests (ledger protocol §2.2, §2.7).

The start takes these steps:

    1  the mark (none: a new store; then nothing but an unused first journal may be there)
    2  the ledger index, to the end that the mark names
    3  logs above the last committed number and drained logs are removed, and the two open logs are truncated to their
       marked ends: a checkpoint or a move did not end. No log is open after that: the next mark names none
    4  the index files of all logs, heads only
    5  the journal from the mark on (store/replay.py), into the memtable and descriptors; flushed when
       it gets too big
    6  a new journal file, whose header says where the old one ended
    7  a checkpoint into new files; its mark names the new journal. Only then may the store answer requests

Every step may be repeated: a crash during the start is harmless, and replaying twice equals replaying once.

**Damage never stops a start.** Only a file of another bookie and a newer format stop it. The start takes what is whole.
What may be missing is a *loss* (store/state_log.py): it is durable before any file is changed, and becomes limbo
before the store answers requests:

| found | then | |
|---|---|---|
| mark damaged or gone | made anew: all logs, all journals, the newest ledger index to its end | loss |
| ledger index gone, short, or with bad records | the good records; written anew by the next checkpoint | loss |
| index of a log gone, damaged, or not up to the log's end | rebuilt from the log | loss: only what is not in it |
| a log gone, its index here | the entries that it held are quarantined | no loss: they are known |
| the same, and all its ledgers have tombstones | drained: it made room on a full disk | no damage |
| a log shorter than its index says | the entries after its end are quarantined | no loss: they are known |
| a log gone, and its index | | loss |
| journal gone, short, with bad blocks in durable data | everything else of it | loss |
| the journal ends before a position that was synced once | | loss: the directory was rolled back |

The store knows which logs must exist: each number up to the last one exists or is drained. The fact
`INVENTORY_DONE_MARK`, written at the first start, says that this holds (older stores removed logs without a fact).
Guarded by tests/bookie/test_boot.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyroaring import BitMap64

from ...ledger.peer_format import ENTRY_LAC_STRUCT
from ...runtime.files import Files, join_path
from ...runtime.tasks import Worker
from ..format import mark as mark_format
from ..format.journal import BLOCK_ALIGNMENT_BYTES, BlockRecords, DamagedFile, ForeignFile, RecordType
from ..format.ledger_index import DrainedEntryLog, QuarantinedEntries
from ..format.mark import CheckpointMark
from . import disk
from . import index_files as ledger_index
from .checkpoint import MARK_FILE, Checkpoint, CheckpointJournalPort
from .entrylog import files as log_files
from .entrylog import repair_at_start as logs_at_boot
from .index import LoadedIndexGroup
from .index_files import LedgerDescriptor, LedgerDescriptors, LedgerIndexFile, LoadedLedgerIndex
from .memtable import EntryPieces, EntryTable, Memtable
from .replay import JournalPosition, JournalReader, list_journal_file_numbers
from .state_log import DataLossLog, RecordedDirectoryState, read_or_raise_damaged

_LOG = logging.getLogger("magnetar.bookie.store")

JOURNAL_FOLDER = "journal"
ENTRIES_FOLDER = "entries"
LEDGERS_FOLDER = "ledgers"
REPLAY_READ_BYTES = 8 << 20
_ADD = int(RecordType.ADD)


class LoadedStoreFiles(NamedTuple):
    """What steps 1 to 4 of the start of a store found in its files: the mark, the ledger index and its content, and the
    groups of all index files. `marks_written`: how many marks the store has written; 0: its mark was lost. `last_log`:
    the highest number of a committed entry log."""

    mark: CheckpointMark
    marks_written: int
    ledgers: LedgerIndexFile
    loaded: LoadedLedgerIndex
    groups: list[LoadedIndexGroup]
    facts: Sequence[QuarantinedEntries | DrainedEntryLog]  # that follow from what was found
    gone: Mapping[str, BitMap64]  # logs of which only the index is here: for `report_missing_logs`
    last_log: int


class JournalPlace(NamedTuple):
    """Where a store has its journal: a directory, maybe on a device of its own, and the files through which it is used.
    A failed write or sync of these files ends the process; those of the store's own directory may not (directories.py).
    """

    directory: str
    files: Files

    @classmethod
    def inside(cls, directory: str, files: Files) -> JournalPlace:
        """Returns the usual place: a folder of the store's directory."""
        return cls(join_path(directory, JOURNAL_FOLDER), files)


def load_store_files(
    files: Files, directory: str, journal: JournalPlace, uuid: bytes, losses: DataLossLog
) -> LoadedStoreFiles:
    """Does steps 1 to 4 of the start of a store: reads and repairs its files, except the journal. Records data losses
    in `losses`. Returns what they contain. Must run in a worker thread. Raises ForeignFile, NewerFormat, NoSpace, or
    OSError if a folder cannot be made or listed."""
    for whose, path in ((journal.files, journal.directory), *(
        (files, join_path(directory, name)) for name in (ENTRIES_FOLDER, LEDGERS_FOLDER)
    )):  # fmt: skip
        disk.make_directories(whose, path)
    losses.load()
    mark, count = _read_mark(files, directory, journal, uuid, losses)
    ledgers = LedgerIndexFile(
        files, join_path(directory, LEDGERS_FOLDER), uuid, mark.ledgers_generation, mark.ledgers_end
    )
    loaded = ledgers.load(losses.add_data_loss)
    drained = frozenset(fact.log for fact in loaded.facts if isinstance(fact, DrainedEntryLog))
    losses.write()
    ledgers.remove_old_generations()
    logs = logs_at_boot.EntryLogRepairAtStart(files, join_path(directory, ENTRIES_FOLDER), uuid, mark, drained, losses)
    groups = logs.open()
    return LoadedStoreFiles(mark, count, ledgers, loaded, groups, logs.facts, logs.gone, mark.last_log)


def _read_mark(
    files: Files, directory: str, journal: JournalPlace, uuid: bytes, losses: DataLossLog
) -> tuple[CheckpointMark, int]:
    """Returns (checkpoint mark, number of marks that this store has written). Creates a new store if there are no
    files. If the mark is damaged or missing, records a data loss and returns a mark that fits the files."""
    path = join_path(directory, MARK_FILE)
    numbers = log_files.list_entry_log_numbers(files, join_path(directory, ENTRIES_FOLDER))
    journals = list_journal_file_numbers(journal.files, journal.directory)
    if files.exists(path):
        try:
            return mark_format.decode_checkpoint_mark(
                read_or_raise_damaged(path, lambda: disk.read_file(files, path)), uuid, path
            )
        except ForeignFile:
            raise
        except DamagedFile as error:
            losses.add_data_loss(str(error))
    elif not numbers and not journals:
        return _create(files, directory, uuid), 1
    else:
        losses.add_data_loss(f"{path} is gone, and there are journals or entry logs")
    position = JournalPosition(min(journals, default=0), BLOCK_ALIGNMENT_BYTES)
    generation, end = ledger_index.find_newest_ledger_index(files, join_path(directory, LEDGERS_FOLDER))
    return CheckpointMark(*position, 0, 0, 0, generation, end, last_log=max(numbers, default=0)), 0


def _create(files: Files, directory: str, uuid: bytes) -> CheckpointMark:
    """Creates the files of a new store and returns its first mark. A first start that crashed has left at most a ledger
    index."""
    ledgers = ledger_index.create_ledger_index(files, join_path(directory, LEDGERS_FOLDER), uuid)
    mark = CheckpointMark(0, BLOCK_ALIGNMENT_BYTES, 0, 0, 0, ledgers.generation, ledgers.end)
    disk.replace_file(files, directory, MARK_FILE, mark_format.encode_checkpoint_mark(mark, uuid, 1))
    return mark


async def enter_limbo(
    worker: Worker,
    losses: DataLossLog,
    known: RecordedDirectoryState,
    end: JournalPosition,
    descriptors: LedgerDescriptors,
) -> None:
    """Puts the bookie into limbo (the state of a bookie that may have lost data) if this start found that data was
    lost. The losses are durable when this returns; the limbo is durable with the next checkpoint. Must be called after
    the replay of the journal, which ended at the position `end`.

    If no ledger id was given out so far, nothing can be lost, and the bookie does not enter limbo: its first start
    crashed. Raises NoSpace if the losses cannot be recorded, and the errors of `known.upto`, which asks the metadata
    what ids were given out."""
    for reason in known.losses:
        losses.add_data_loss(reason)
    if end < known.journal:
        losses.add_data_loss(f"the journal ends at {tuple(end)}, and it was synced up to {tuple(known.journal)} once")
    if not losses.open:
        return
    await worker.run(losses.write)
    upto = await known.upto()
    if upto >= 0:
        _LOG.error("limbo: entries of ledgers up to %d may be lost: %s", upto, "; ".join(losses.reasons))
        descriptors.enter_limbo(upto)


class JournalReplay:
    """Step 5 of the start of a store: reads the journal and inserts the entries in it into the memtable. `records` is
    the number of records that were replayed; `torn_bytes` are the bytes of the torn tail, which were ignored."""

    def __init__(
        self, memtable: Memtable, descriptors: LedgerDescriptors, checkpoint: Checkpoint, losses: DataLossLog
    ) -> None:
        self._memtable = memtable
        self._descriptors = descriptors
        self._checkpoint = checkpoint
        self._flushing: asyncio.Task[None] | None = None
        self._losses = losses
        self.records = 0
        self.torn_bytes = 0

    async def run(self, files: Files, directory: str, uuid: bytes, worker: Worker, writer: Worker) -> JournalPosition:
        """Replays the journal after the checkpoint mark into the memtable. Returns the position at which the journal
        ends. Damage becomes a data loss and does not stop the replay. Raises ForeignFile, NewerFormat, NoSpace or
        OSError.

        Three things run at the same time: `worker` reads blocks, the event loop applies them, and `writer` flushes the
        entries that were applied before. Doing these one after the other would take twice as long."""
        before, self._checkpoint.writer = self._checkpoint.writer, writer
        try:
            return await self._run(files, directory, uuid, worker)
        finally:
            if self._flushing is not None:  # cut short between two flushes; the caller closes the workers
                await asyncio.gather(self._flushing, return_exceptions=True)
            self._checkpoint.writer = before

    async def _run(self, files: Files, directory: str, uuid: bytes, worker: Worker) -> JournalPosition:
        start = JournalPosition(*self._checkpoint.mark.position)
        if start.journal == 0 and not list_journal_file_numbers(files, directory):
            return start
        if start.journal == 0:
            start = JournalPosition(1, BLOCK_ALIGNMENT_BYTES)
        reader = await worker.run(JournalReader, files, directory, uuid, start)
        told = 0
        blocks = await worker.run(reader.read_blocks, REPLAY_READ_BYTES)
        while blocks or len(reader.damages) > told:
            if len(reader.damages) > told:  # no flush may move the mark past a damage that is not durable as a loss
                told = await self._record_damages(reader, told, worker)
            following = worker.run(reader.read_blocks, REPLAY_READ_BYTES)
            for block in blocks:
                self._apply(block.records)
                self.records += len(block.records.types)
                if self._memtable.is_flush_due:
                    await self._flush(block.end)
            blocks = await following
        await self._flushed()
        self.torn_bytes = reader.torn_bytes
        if self.records:
            _LOG.info("replayed %d records, ignored %d bytes of torn tail", self.records, self.torn_bytes)
        return reader.end

    async def _record_damages(self, reader: JournalReader, told: int, worker: Worker) -> int:
        """Records all damage in `reader` after the first `told` items as data losses, durably. Returns the number of
        items so far."""
        damages = list(reader.damages)
        for damage in damages[told:]:
            self._losses.add_data_loss(str(DamagedFile(*damage)))
        await worker.run(self._losses.write)
        return len(damages)

    async def _flush(self, end: JournalPosition) -> None:
        """Waits until the last flush has ended, then starts to flush the entries that were applied since. The next
        blocks are applied to the other table of the memtable."""
        await self._flushed()
        self._flushing = asyncio.create_task(
            self._checkpoint.run(CheckpointJournalPort(lambda: end)), name="replay-flush"
        )
        await asyncio.sleep(0)  # the tables are swapped
        _LOG.info("replayed up to offset %d of journal %d", end.offset, end.journal)

    async def _flushed(self) -> None:
        """Waits until the running flush has ended, if there is one."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            await flushing

    def _apply(self, records: BlockRecords) -> None:
        """Applies the records of one block, in order. Looks up each ledger only once between two records that are not
        ADDs."""
        table = self._memtable.active
        found: dict[int, tuple[dict[int, EntryPieces], LedgerDescriptor]] = {}
        lac_of = ENTRY_LAC_STRUCT.unpack_from
        count = size = 0
        for kind, ledger, entry, payload in zip(*records, strict=True):
            place = found.get(ledger) if kind == _ADD else None
            if place is None:
                place = self._place(table, ledger) if kind == _ADD else None
                if place is None:
                    self._apply_other(RecordType(kind), ledger, entry, payload)
                    found.clear()
                    continue
                found[ledger] = place
            entries, descriptor = place
            entries[entry] = (payload,)
            count += 1
            size += len(payload)
            if entry > descriptor.last:
                descriptor.last = entry
            (lac,) = lac_of(payload)
            if lac > descriptor.lac:
                descriptor.lac = lac
        table.count_added_entries(count, size)

    def _place(self, table: EntryTable, ledger: int) -> tuple[dict[int, EntryPieces], LedgerDescriptor] | None:
        """Returns (the ledger's entries in `table`, the ledger's descriptor), both of which the caller may change; None
        if the ledger is unknown."""
        descriptor = self._descriptors.get(ledger)
        if descriptor is None:
            return None
        self._descriptors.mark_changed(descriptor)
        return table.entries_of_ledger(ledger), descriptor

    def _apply_other(self, kind: RecordType, ledger: int, entry: int, payload: bytes) -> None:
        descriptors = self._descriptors
        if kind is RecordType.TOMBSTONE:
            descriptors.delete(ledger, entry)
            self._memtable.discard(ledger)
            return
        if ledger in descriptors.tombstones:
            return  # written before its ledger was deleted
        descriptor = descriptors.get(ledger)
        if kind is RecordType.KEY:
            if descriptor is None:
                descriptors.create(ledger, payload).key_synced = True
            return
        if descriptor is None:
            assert self._losses.open, f"the journal has a {kind.name} of ledger {ledger} before its key"
            if kind is RecordType.ADD:  # its key is lost; limbo fences the ledger, and leaving it gives the key back
                self._memtable.insert_entries(ledger, [(entry, (payload,), len(payload))], len(payload))
            return
        if kind is RecordType.FENCE:
            descriptor.fenced = descriptor.fence_synced = True
        elif kind is RecordType.LAC:
            descriptor.lac = max(descriptor.lac, entry)
        descriptors.mark_changed(descriptor)
