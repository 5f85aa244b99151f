"""The ledger index on disk: keys, fence bits, LACs and facts (format/ledger_index.py), appended per checkpoint.

`write` appends what changed and syncs. A large file of mostly outdated records (`_OUTDATED_MAX`) is instead rewritten
as the next generation, when there is room. Neither counts before the mark names generation and end; `committed` then
removes the old generation. `load` reads exactly what the mark names: it returns the whole records and reports what is
missing, and the next `write` rewrites the file, with or without room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from ....runtime.files import Files, join
from ...format import ledger_index
from ...format.framing import (
    FILE_HEADER_BYTES,
    Damaged,
    FileHeader,
    ForeignFile,
    decode_file_header,
    encode_file_header,
)
from ...format.ledger_index import State
from .. import disk
from ..data_losses import readable
from .descriptors import Settled, Unwritten
from .table import Loaded, Loading

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


def name(generation: int) -> str:
    return f"{generation:016d}{SUFFIX}"


class LedgerIndexFile:
    """The file of the ledger index: appended per checkpoint, rewritten now and then."""

    def __init__(self, files: Files, directory: str, uuid: bytes, generation: int, end: int) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.generation = generation
        self.end = end
        self._faulty = False

    def load(self, missing: Callable[[str], None]) -> Loaded:
        """The whole records; calls `missing` for what is not whole. ForeignFile, NewerFormat."""
        path = join(self._directory, name(self.generation))
        loading = Loading()
        faults: list[str] = []
        try:
            readable(path, lambda: self._feed(path, loading, faults))
        except ForeignFile:
            raise
        except FileNotFoundError:
            faults.append(f"{path} is gone, and the mark names it")
        except Damaged as error:
            faults.append(str(error))
        for fault in faults:
            missing(fault)
        self._faulty = bool(faults)
        return loading.loaded()

    def _feed(self, path: str, loading: Loading, faults: list[str]) -> None:
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
            except Damaged as error:
                faults.append(str(error))
            for offset in range(FILE_HEADER_BYTES, end, _READ_BYTES):
                bad = loading.feed(file.pread(min(_READ_BYTES, end - offset), offset))
                faults += [str(Damaged(path, offset + at, _BAD)) for at in bad]
        finally:
            file.close()

    def outdated(self, alive: int) -> bool:
        """Whether the next `write` rewrites the file."""
        large = self.end > _REWRITE_BYTES_MIN and self.end > _OUTDATED_MAX * alive * ledger_index.RECORD_BYTES
        return self._faulty or large

    def write(self, unwritten: Unwritten) -> tuple[Settled, int, int]:
        """Writes what changed, or everything; returns it with (generation, end) for the mark."""
        if self.outdated(unwritten.alive):
            settled = unwritten.settle(everything=True)
            try:
                return settled, *self.rewrite([*settled.statements, *settled.table.leaves])
            except disk.NoSpace:
                if self._faulty:
                    raise
                _LOG.warning("no room to rewrite the ledger index: it grows further")
        settled = unwritten.settle(everything=False)
        return settled, *self._append(settled.changes)

    def append(self, facts: Sequence[State]) -> tuple[int, int]:
        """Appends facts alone; returns (generation, end) for the mark."""
        return self._append(list(map(ledger_index.encode, facts)))

    def _append(self, records: Sequence[bytes]) -> tuple[int, int]:
        file = disk.opened(self._files, join(self._directory, name(self.generation)))
        try:
            size = disk.write(self._files, file, [b"".join(records)], self.end)
            disk.sync(self._files, file)
        finally:
            file.close()
        return self.generation, self.end + size

    def rewrite(self, records: Sequence[bytes]) -> tuple[int, int]:
        """Writes the next generation with these records, a few in each buffer; (generation, end) for the mark."""
        generation = self.generation + 1
        header = encode_file_header(FileHeader(ledger_index.MAGIC, self._uuid, generation))
        size = disk.replace_with(self._files, self._directory, name(generation), _slices([header, *records]))
        return generation, size

    def committed(self, generation: int, end: int) -> None:
        """Notes that the mark names them; other generations are removed."""
        old, self.generation, self.end = self.generation, generation, end
        if old != generation:
            self._faulty = False
            self.tidy()

    def tidy(self) -> None:
        """Removes other generations, not synced: a name that comes back after a crash is removed by the next start."""
        for other in disk.needless_in(self._files, self._directory):
            if other != name(self.generation):
                self._files.remove(join(self._directory, other))


def _slices(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the buffers joined to about `_WRITE_BYTES` each."""
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
    """Creates generation 1, empty."""
    new = LedgerIndexFile(files, directory, uuid, 0, FILE_HEADER_BYTES)
    generation, end = new.rewrite([])
    return LedgerIndexFile(files, directory, uuid, generation, end)


def newest(files: Files, directory: str) -> tuple[int, int]:
    """Returns (generation, end) of the newest file that is here, whatever it holds; for a start without a mark."""
    found = [each for each in files.list_directory(directory) if each.endswith(SUFFIX)]
    if not found:
        return 0, FILE_HEADER_BYTES
    file = files.open(join(directory, found[-1]), write=False)
    try:
        records = max(0, file.size() - FILE_HEADER_BYTES) // ledger_index.RECORD_BYTES
    finally:
        file.close()
    return int(found[-1].removesuffix(SUFFIX)), FILE_HEADER_BYTES + records * ledger_index.RECORD_BYTES
