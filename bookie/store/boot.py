"""How a store starts: from what a crash left to a state that may serve (BookKeeper protocol §2.2, §2.7).

    1  the mark (none: a new store; then nothing but an unused first journal may be there)
    2  the ledger index, to the end that the mark names
    3  logs above the last committed number and drained ones are removed, the two open ones are cut: checkpoints and
       moves that did not end. No log is open after that: the next mark names none
    4  the index files of all logs, heads only
    5  the journal from the mark on (store/replay.py), into the memtable and descriptors; flushed when it gets too big
    6  a new journal file, whose header says where the old one ended
    7  a checkpoint into new files; its mark names the new journal. Only then may the store serve

Every step may be repeated: a crash during the start is harmless, and replaying twice equals replaying once. Damage in
durable data stops the start with file and offset (`Damaged`); nothing is repaired by guessing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import NamedTuple

from ...runtime.files import Files, join
from ...runtime.workers import Worker
from ..format import mark as mark_format
from ..format.framing import Damaged
from ..format.journal import ALIGNMENT, Record, RecordType
from ..format.ledger_index import Drained
from ..format.mark import Mark
from ..format.peer import ENTRY_HEADER
from . import disk, ledger_index, log_files
from .checkpoint import MARK, Checkpoint
from .descriptors import Descriptor, Descriptors
from .index import Group
from .journal import Position, journal_numbers
from .ledger_index import LedgerIndexFile
from .ledger_table import Loaded
from .memtable import Memtable
from .replay import JournalReader

log = logging.getLogger(__name__)

JOURNAL = "journal"
ENTRIES = "entries"
LEDGERS = "ledgers"
READ_BYTES = 8 << 20


class Found(NamedTuple):
    """What steps 1 to 4 found."""

    mark: Mark
    marks_written: int
    ledgers: LedgerIndexFile
    loaded: Loaded
    groups: list[Group]
    last_log: int


def inspect(files: Files, directory: str, uuid: bytes) -> Found:
    """Steps 1 to 4; in a worker."""
    for name in (JOURNAL, ENTRIES, LEDGERS):
        files.make_directories(join(directory, name))
    path = join(directory, MARK)
    if not files.exists(path):
        return _create(files, directory, uuid)
    mark, count = mark_format.decode_mark(disk.read_file(files, path), uuid, path)
    ledgers = LedgerIndexFile(files, join(directory, LEDGERS), uuid, mark.ledgers_generation, mark.ledgers_end)
    loaded = ledgers.load()
    ledgers.tidy()
    drained = {fact.log for fact in loaded.facts if isinstance(fact, Drained)}
    groups = _open_logs(files, join(directory, ENTRIES), uuid, mark, drained)
    return Found(mark, count, ledgers, loaded, groups, mark.last_log)


def _create(files: Files, directory: str, uuid: bytes) -> Found:
    """A new store. A first start that was cut short left at most an unused journal and a ledger index."""
    if log_files.numbers(files, join(directory, ENTRIES)):
        raise Damaged(join(directory, MARK), 0, "the mark is missing, but there are entry logs")
    journals = join(directory, JOURNAL)
    if journal_numbers(files, journals):
        raise Damaged(join(directory, MARK), 0, "the mark is missing, but there are journals")
    ledgers = ledger_index.create(files, join(directory, LEDGERS), uuid)
    mark = Mark(0, ALIGNMENT, 0, 0, 0, ledgers.generation, ledgers.end)
    disk.replace(files, directory, MARK, mark_format.encode_mark(mark, uuid, 1))
    return Found(mark, 1, ledgers, ledgers.load(), [], 0)


def _open_logs(files: Files, directory: str, uuid: bytes, mark: Mark, drained: Collection[int]) -> list[Group]:
    """Steps 3 and 4. Open logs are never deleted, so the marked ones must be there."""
    groups: list[Group] = []
    opened = {log.number: log for log in (mark.hot, mark.cold) if log.number}
    for number in sorted(opened):
        if not files.exists(join(directory, log_files.log_name(number))):
            raise Damaged(join(directory, log_files.log_name(number)), 0, "the newest entry log is missing")
    for number in log_files.numbers(files, directory):
        unfinished = number > mark.last_log or not files.exists(join(directory, log_files.log_name(number)))
        if unfinished or number in drained:
            log_files.remove(files, directory, number)
            continue
        open_log = opened.get(number)
        if open_log is not None:
            _cut(files, join(directory, log_files.log_name(number)), open_log.log_end, durably=False)
            _cut(files, join(directory, log_files.index_name(number)), open_log.index_end, durably=True)
        groups += log_files.read_groups(files, directory, number, uuid, None)
    return groups


def _cut(files: Files, path: str, end: int, *, durably: bool) -> None:
    """What lies behind `end` belongs to a checkpoint that did not end.

    The index is synced also when nothing was cut: a process that was killed may have cut it in the page cache alone,
    and the next mark will not say any more where it ends. Nothing names what is behind the end of a log.
    """
    file = files.open(path)
    try:
        if file.size() < end:
            raise Damaged(path, file.size(), f"the file ends here and should be {end} bytes long")
        file.truncate(end)
        if durably:
            disk.sync(files, file)
    finally:
        file.close()


class Replay:
    """Step 5."""

    def __init__(self, memtable: Memtable, descriptors: Descriptors, checkpoint: Checkpoint) -> None:
        self._memtable = memtable
        self._descriptors = descriptors
        self._checkpoint = checkpoint
        self._flushing: asyncio.Task[None] | None = None
        self.records = 0
        self.torn_bytes = 0

    async def run(self, files: Files, directory: str, uuid: bytes, worker: Worker) -> Position:
        """Replays everything from the mark on; where the journal ends.

        Blocks are read in the worker, applied here, and flushed in the checkpoint's worker, all at once.
        """
        start = Position(*self._checkpoint.mark.position)
        if start.journal == 0 and not journal_numbers(files, directory):
            return start
        if start.journal == 0:
            start = Position(1, ALIGNMENT)
        reader = await worker.run(JournalReader, files, directory, uuid, start)
        blocks = await worker.run(reader.read_some, READ_BYTES)
        while blocks:
            if reader.damages:
                break
            following = worker.run(reader.read_some, READ_BYTES)
            for block in blocks:
                self._apply(block.records)
                self.records += len(block.records)
                if self._memtable.due:
                    await self._flush(block.end)
            blocks = await following
        await self._flushed()
        for damage in reader.damages:
            raise Damaged(*damage)  # no flush may move the mark past a damage before what follows from it is durable
        self.torn_bytes = reader.torn_bytes
        if self.records:
            log.info("replayed %d records, cut %d bytes of torn tail", self.records, self.torn_bytes)
        return reader.end

    async def _flush(self, end: Position) -> None:
        """Begins to flush what was applied so far, after the last flush; the next blocks fill the other table."""
        await self._flushed()
        self._checkpoint.position = lambda: end
        self._flushing = asyncio.create_task(self._checkpoint.run(), name="replay-flush")
        await asyncio.sleep(0)  # the tables are swapped
        log.info("replayed up to offset %d of journal %d", end.offset, end.journal)

    async def _flushed(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            await flushing

    def _apply(self, records: list[Record]) -> None:
        """The records of one block, in order. Looks a ledger up once per run of its records."""
        insert, lac_of = self._memtable.active.insert, ENTRY_HEADER.unpack_from
        ledger = -1
        descriptor: Descriptor | None = None
        for kind, of, entry, payload in records:
            if of != ledger:
                ledger, descriptor = of, self._changing(of)
            if descriptor is not None and kind is RecordType.ADD:
                insert(ledger, entry, (payload,), len(payload))
                if entry > descriptor.last:
                    descriptor.last = entry
                lac = lac_of(payload)[2]
                if lac > descriptor.lac:
                    descriptor.lac = lac
            else:
                self._apply_other(kind, ledger, entry, payload)
                ledger = -1

    def _changing(self, ledger: int) -> Descriptor | None:
        descriptor = self._descriptors.get(ledger)
        if descriptor is not None:
            self._descriptors.touch(descriptor)
        return descriptor

    def _apply_other(self, kind: RecordType, ledger: int, entry: int, payload: bytes) -> None:
        descriptors = self._descriptors
        if kind is RecordType.TOMBSTONE:
            descriptors.bury(ledger, entry)
            self._memtable.forget(ledger)
            return
        if ledger in descriptors.tombstones:
            return  # written before its ledger was deleted
        descriptor = descriptors.get(ledger)
        if kind is RecordType.KEY:
            if descriptor is None:
                descriptors.create(ledger, payload).key_synced = True
            return
        assert descriptor is not None, f"the journal has a {kind.name} of ledger {ledger} before its key"
        if kind is RecordType.FENCE:
            descriptor.fenced = descriptor.fence_synced = True
        elif kind is RecordType.LAC:
            descriptor.lac = max(descriptor.lac, entry)
        descriptors.touch(descriptor)
