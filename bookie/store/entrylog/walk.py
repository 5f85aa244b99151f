"""A walk over the records of one extent, one after the other, without its table: for the scrubber. In a worker.

`step` reads about SLICE_BYTES and checks every record in it: checksum, ledger, entry (ascending), and the entry's own
checksum. It returns the bytes read, 0 at the end. Then `whole` says whether the extent agrees with its head in the
index, and `entries` and `offsets` are the right content of its table.
"""

from __future__ import annotations

from ....ledger.format.peer import ENTRY_HEADER
from ....runtime.files import Files
from ...format import entry_log
from ...format.framing import crc32c
from ...format.index import Extent, encode_extent
from ...format.journal import RECORD_BYTES_MAX
from .. import disk

SLICE_BYTES = 256 << 10
_CHECKED = ENTRY_HEADER.size - 4


class Walk:
    """A walk over the records of one extent, made in a worker."""

    def __init__(self, files: Files, path: str, extent: Extent) -> None:
        self._file = files.open(path, write=False)
        self._extent = extent
        self._offset = extent.start
        self._end = extent.start + extent.length
        self._bad = False
        self.entries: list[int] = []
        self.offsets = [0]

    @property
    def records(self) -> int:
        return len(self.entries)

    @property
    def whole(self) -> bool:
        extent = self._extent
        return (
            not self._bad
            and self._offset == self._end
            and len(self.entries) == extent.entries
            and (self.entries[0], self.entries[-1]) == (extent.first, extent.last)
        )

    def step(self) -> int:
        if self._bad or self._offset >= self._end:
            return 0
        try:
            data = self._file.pread(min(SLICE_BYTES, self._end - self._offset), self._offset)
            size = entry_log.record_size(data, 0)
            if len(data) < size <= min(self._end - self._offset, RECORD_BYTES_MAX):
                data = self._file.pread(size, self._offset)
        except OSError:
            self._bad = True
            return 0
        at = 0
        while (end := self._take(data, at)) is not None:
            at = end
        self._bad = at == 0
        self._offset += at
        return len(data) if at else 0

    def _take(self, data: bytes, at: int) -> int | None:
        """Keeps the record at `at` and returns where it ends; None if it is not whole, or not of this extent."""
        found = entry_log.record_at(data, at)
        if found is None:
            return None
        end, ledger, entry = found
        stored = data[at + entry_log.RECORD_HEADER_BYTES : end]
        last = self.entries[-1] if self.entries else self._extent.first - 1
        if ledger != self._extent.ledger or entry <= last:
            return None
        if crc32c(stored[:_CHECKED], stored[ENTRY_HEADER.size :]) != ENTRY_HEADER.unpack_from(stored)[4]:
            return None
        self.entries.append(entry)
        self.offsets.append(self._offset + end - self._extent.start)
        return end

    def close(self) -> None:
        self._file.close()


def mend_table(files: Files, path: str, offset: int, extent: Extent, walk: Walk) -> bool:
    """Writes the table of a whole extent again, if it matches the head's checksum."""
    again, table = encode_extent(extent.ledger, walk.entries, walk.offsets, extent.start)
    if again != extent:
        return False
    file = files.open(path)
    try:
        disk.write(files, file, [table], offset)
        disk.sync(files, file)
    finally:
        file.close()
    return True
