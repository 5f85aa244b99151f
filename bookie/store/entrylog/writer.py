"""The writing side of entry logs and their index files. Reading is entrylog/files.py.

Two writers share one sequence of numbers (`LogNumberSequence`): the hot one takes the flushes of checkpoints, the cold
one what compaction moves; no log is ever written by both. All calls come from workers, in this order:

    ensure_room(size) ; append(buffers) … ; write_index(extents, tables)    → WrittenEntries(open, group)
    on_committed()                                                          after the mark is durable

`ensure_room` may end a log and make another: only under the checkpoint's lock, because a mark names both open logs and
the last number. A flush or a move goes whole into one log; a new one is begun when it would pass `log_bytes_max`, and
at every start (a log that replay found is never appended to). A log that is closed is cut to what is committed.

Disk space for the files is allocated in advance. They are appended to in slices of about `APPEND_SLICE_BYTES`, each of
which is synced, so that a big flush does not delay the journal's syncs (p99 10 ms instead of 83 ms). The log is written
*direct* where the file system allows it (as the journal, replay.py): through the page cache a write takes twenty times
the processor time and gets less than half of the disk's rate (128 KiB entries: 318 us against 15 us, 129 against 312
MB/s, 1 MiB slices into allocated room). A direct write begins at the block that has the end. It writes the committed
bytes of that block again unchanged, so that they survive whatever part of the write a crash leaves. A flush that found
a full disk is repeated from the end of the last committed one, or `release_unused_space` gives its room back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import NamedTuple

from ....runtime.files import DIRECT_ALIGNMENT, Buffer, File, Files, join_path
from ...format import entry_log, index
from ...format.journal import FILE_HEADER_BYTES, FileHeader, encode_file_header
from ...format.mark import OpenLogEnds
from .. import disk
from ..index import LoadedIndexGroup
from ..memtable import ENTRY_MEMORY_BYTES, EntryPieces, EntryTable
from .files import entry_log_file_name, entry_log_index_file_name

APPEND_SLICE_BYTES = 1 << 20
ENCODE_PIECE_BYTES = 256 << 10
ENTRIES_ENCODED_AT_ONCE = 256
"""The number of entries that are encoded at once. This takes about 0.1 ms, during which the event loop waits."""
NO_OPEN_LOG = OpenLogEnds(0, 0, 0)


class WrittenEntries(NamedTuple):
    """The result of writing entries to a log and its index: the new ends of the open log, and its new index group. The
    caller must commit this result with a checkpoint mark."""

    open: OpenLogEnds  # for the mark
    group: LoadedIndexGroup  # for the index


class LogNumberSequence:
    """The source of numbers for new entry logs; `last` is the highest number in use."""

    def __init__(self, last: int) -> None:
        self.last = last


class _Open:
    """The entry log that is being written: its committed ends, and the offset for the next bytes."""

    __slots__ = ("allocated", "end", "index", "index_end", "log", "log_end", "log_tail", "number", "tail")

    def __init__(self, number: int, log: File, index_: File) -> None:
        self.number = number
        self.log = log
        self.index = index_
        self.log_end = self.end = entry_log.FIRST_RECORD_OFFSET
        self.index_end = FILE_HEADER_BYTES
        self.allocated = 0
        self.tail = self.log_tail = b""  # of a log that is written direct: what its last block holds before the end

    def rewind(self) -> None:
        """Makes the next append overwrite all bytes that are not committed."""
        self.end, self.tail = self.log_end, self.log_tail


class EntryLogWriter:
    """Appends records to an entry log and to its index file. Begins the next log, with a number of `numbers`, before
    one would have more than `log_bytes_max` bytes. Allocates disk space in steps of `allocate_bytes` bytes. Its methods
    wait for the disk and must run in a worker, in the order of the module's docstring."""

    def __init__(
        self, files: Files, directory: str, uuid: bytes, numbers: LogNumberSequence, *, log_bytes_max: int,
        allocate_bytes: int
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._numbers = numbers
        self._log_bytes_max = log_bytes_max
        self._allocate_bytes = allocate_bytes
        self._open: _Open | None = None
        self._written: WrittenEntries | None = None
        self._direct = True  # until the file system says no
        self._arena = memoryview(b"")

    @property
    def committed_ends_of_open_log(self) -> OpenLogEnds:
        """Returns the number and the committed ends of the open log; `NO_OPEN_LOG` if no log is open."""
        current = self._open
        return NO_OPEN_LOG if current is None else OpenLogEnds(current.number, current.log_end, current.index_end)

    @property
    def end_offset(self) -> int:
        """Returns the offset of the open log at which the next append writes."""
        assert self._open is not None
        return self._open.end

    def ensure_room(self, size: int) -> None:
        """Makes sure that the open log has room for `size` more bytes on the disk. Begins another log if this one would
        become too large. Raises NoSpace if the disk is full, or its subclass NoFileDescriptor if no file descriptor is
        free."""
        current = self._open
        if (
            current is not None
            and current.log_end > entry_log.FIRST_RECORD_OFFSET
            and current.log_end + size > self._log_bytes_max
        ):
            self.close()
            current = None
        if current is None:
            current = self._open = self._create(self._numbers.last + 1)
        current.rewind()
        self._allocate(current, current.log_end + size)

    def _allocate(self, current: _Open, end: int) -> None:
        """Allocates disk space for the log, in large steps. If the disk has no room for a whole step, allocates exactly
        up to `end`."""
        if end <= current.allocated:
            return
        step = -(-end // self._allocate_bytes) * self._allocate_bytes
        try:
            disk.allocate_space(self._files, current.log, step)
            current.allocated = step
        except disk.NoSpace:
            disk.allocate_space(self._files, current.log, end)
            current.allocated = end

    def _create(self, number: int) -> _Open:
        """Creates an entry log and its index, with durable headers, because a mark may name the log before anything is
        committed to it.

        Such marks are that of a checkpoint that ends during a move, and that of a commit after a flush that found no
        room. Overwrites files that a failed attempt left."""
        paths = (
            join_path(self._directory, entry_log_file_name(number)),
            join_path(self._directory, entry_log_index_file_name(number)),
        )
        opened: list[File] = []
        try:
            for path, magic in zip(paths, (entry_log.ENTRY_LOG_MAGIC, index.INDEX_MAGIC), strict=True):
                try:
                    file = self._files.open(path, create=True)
                except OSError as error:
                    disk.raise_no_space_or_exit(self._files, f"create {path}", error)
                opened.append(file)
                file.truncate(0)
                header = encode_file_header(FileHeader(magic, self._uuid, number))
                direct = self._begin_direct(path, header) if magic == entry_log.ENTRY_LOG_MAGIC else None
                if direct is None:
                    disk.write_buffers(self._files, file, [header], 0)
                    disk.sync_file(self._files, file)
                else:
                    opened[-1] = direct
                    file.close()
        except disk.NoSpace:
            for file in opened:
                file.close()
            raise
        disk.sync_directory(self._files, self._directory)
        self._numbers.last = number
        return _Open(number, opened[0], opened[1])

    def _begin_direct(self, path: str, header: bytes) -> File | None:
        """Opens the log at `path` for direct writes and writes its header into its first block. Returns None if the
        file system does not support direct writes."""
        if not self._direct:
            return None
        file = disk.open_for_direct_writes(self._files, path, header.ljust(entry_log.FIRST_RECORD_OFFSET, b"\0"))
        self._direct = file is not None
        return file

    def append_slices(self, slices: Sequence[Sequence[Buffer]]) -> None:
        """Writes each of `slices` like `append`, one after the other. Raises NoSpace if the disk is full; then some of
        them may be written."""
        for buffers in slices:
            self.append(buffers)

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Writes `buffers` after the last record of the open log, and syncs the log. `ensure_room` must have been
        called before. Raises NoSpace if the disk is full. The bytes count only when `write_index` is committed."""
        current = self._open
        assert current is not None
        if current.log.direct:
            self._append_direct(current, buffers)
        else:
            current.end += disk.write_buffers(self._files, current.log, buffers, current.end)
            disk.sync_file(self._files, current.log)

    def _append_direct(self, current: _Open, buffers: Sequence[Buffer]) -> None:
        """Appends like `append` with direct writes, which need whole, aligned blocks: writes the last block of the log
        again, followed by the new bytes."""
        if len(buffers) > disk.BUFFERS_PER_WRITE_MAX:
            buffers = [b"".join(buffers)]
        size = len(current.tail) + sum(map(len, buffers))
        padding = -size % DIRECT_ALIGNMENT
        if len(self._arena) < size + padding:
            self._arena = self._files.allocate_buffer(size + padding)
        block = self._arena[: size + padding]
        at = 0
        for buffer in (current.tail, *buffers, bytes(padding)):
            block[at : at + len(buffer)] = buffer
            at += len(buffer)
        disk.write_buffers(self._files, current.log, [block], current.end - len(current.tail))
        current.end += size - len(current.tail)
        current.tail = bytes(block[size - size % DIRECT_ALIGNMENT : size])

    def write_index(self, extents: list[index.Extent], tables: Sequence[bytes]) -> WrittenEntries:
        """Writes and syncs the index group of all records that were appended since `ensure_room`: `extents`, in
        ascending order of ledgers, and their encoded `tables`. Returns the result, which the caller must commit with a
        checkpoint mark. Raises NoSpace if the disk is full."""
        current = self._open
        assert current is not None
        group = index.encode_index_group(extents, tables)
        disk.write_buffers(self._files, current.index, [group], current.index_end)
        disk.sync_file(self._files, current.index)
        end = OpenLogEnds(current.number, current.end, current.index_end + len(group))
        self._written = WrittenEntries(end, LoadedIndexGroup(current.number, current.index_end, extents))
        return self._written

    def on_committed(self) -> None:
        """Called when the durable checkpoint mark names the result of `write_index`. The next append writes after these
        records."""
        assert self._open is not None
        assert self._written is not None
        _, self._open.log_end, self._open.index_end = self._written.open
        self._open.log_tail = self._open.tail
        self._written = None

    def release_unused_space(self) -> None:
        """Frees the disk space of the open log that was allocated in advance, and the space of written bytes that will
        not be committed."""
        current = self._open
        if current is not None and (current.allocated > current.log_end or current.end > current.log_end):
            current.rewind()
            self._written = None
            self._cut(current)

    def close_unless_empty(self) -> None:
        """Closes the open log. If nothing was ever committed to the log, leaves it open for the next use."""
        if self._open is not None and self._open.log_end > entry_log.FIRST_RECORD_OFFSET:
            self.close()
        else:
            self.release_unused_space()

    def close(self) -> None:
        """Closes the open log for good: truncates its files to their committed ends. Does nothing if no log is open."""
        if self._open is not None:
            self._cut(self._open)
            self._open.log.close()
            self._open.index.close()
            self._open = None

    def _cut(self, current: _Open) -> None:
        """Truncates the files of the log to their committed ends. Later marks do not name these ends, so bytes after
        them would count (entrylog/repair_at_start.py)."""
        for file, end in ((current.log, current.log_end), (current.index, current.index_end)):
            file.truncate(end)
            disk.sync_file(self._files, file)
        current.allocated = current.log_end


class MemtableFlush:
    """Writes one table of the memtable to the hot log, one slice at a time. A checkpoint calls `start`, then
    `take_next_slices` until it returns nothing, then `write_index`, all in a worker."""

    def __init__(self, writer: EntryLogWriter, table: EntryTable) -> None:
        self._writer = writer
        self._table = table
        self._extents: list[index.Extent] = []
        self._tables: list[bytes] = []
        self._bytes = 1
        self._taken = 0

    def start(self) -> None:
        """Makes sure that the hot log has room for the table, and begins another log if necessary. Raises NoSpace if
        the disk is full, or its subclass NoFileDescriptor if no file descriptor is free."""
        table = self._table
        overhead = ENTRY_MEMORY_BYTES - entry_log.RECORD_HEADER_BYTES
        self._bytes = table.size_bytes - table.entries * overhead
        self._writer.ensure_room(self._bytes)
        self._pieces = self._walk(self._writer.end_offset)

    def take_next_slices(self, count: int) -> list[list[bytes]]:
        """Returns up to `count` more slices of encoded records, of about 1 MiB each. The caller must append them to the
        log. Returns an empty list at the end of the table."""
        slices: list[list[bytes]] = []
        while len(slices) < count and (buffers := self._next_slice()):
            slices.append(buffers)
        return slices

    def _next_slice(self) -> list[bytes]:
        buffers: list[bytes] = []
        size = 0
        for piece, piece_bytes in self._pieces:
            buffers += piece
            size += piece_bytes
            if size >= APPEND_SLICE_BYTES:
                break
        self._taken += size
        return buffers

    @property
    def flushed_share(self) -> float:
        """Returns the share of the table, from 0.0 to 1.0, that `take_next_slices` has returned so far."""
        return self._taken / self._bytes

    def write_index(self) -> WrittenEntries:
        """Writes and syncs the index group of the table, after all its slices were appended. Returns the result, which
        the caller must commit. Raises NoSpace if the disk is full."""
        return self._writer.write_index(self._extents, self._tables)

    def _walk(self, position: int) -> Iterator[tuple[list[bytes], int]]:
        """Yields (buffers, size in bytes) of a few encoded records at a time, by ledger and then by entry. `position`
        is the offset in the log of the first record."""
        batch: list[EntryPieces] = []
        runs: list[tuple[int, list[int]]] = []
        for ledger in sorted(self._table.ledgers):
            entries = self._table.ledgers[ledger]
            numbers = sorted(entries)
            batch += [entries[number] for number in numbers]
            while numbers[-1] - numbers[0] > index.ENTRY_DELTA_MAX:
                count = bisect_right(numbers, numbers[0] + index.ENTRY_DELTA_MAX)
                runs.append((ledger, numbers[:count]))
                numbers = numbers[count:]
            runs.append((ledger, numbers))
            if len(batch) >= ENTRIES_ENCODED_AT_ONCE:
                position = yield from self._encode(batch, runs, position)
                batch, runs = [], []
        if batch:
            yield from self._encode(batch, runs, position)

    def _encode(
        self, entries: list[EntryPieces], runs: list[tuple[int, list[int]]], position: int
    ) -> Generator[tuple[list[bytes], int], None, int]:
        """Yields (buffers, size in bytes) of the encoded records of these runs; each run becomes one extent. Returns
        the offset after them."""
        sizes: list[int] = []
        for at in range(0, len(entries), ENTRIES_ENCODED_AT_ONCE):
            some, records = entry_log.encode_records(entries[at : at + ENTRIES_ENCODED_AT_ONCE])
            together = max(1, ENCODE_PIECE_BYTES // max(some))
            for first in range(0, len(some), together):
                yield list(chain.from_iterable(islice(records, together))), sum(some[first : first + together])
            sizes += some
        at = 0
        for ledger, numbers in runs:
            offsets = list(accumulate(sizes[at : at + len(numbers)], initial=0))
            extent, table = index.encode_extent(ledger, numbers, offsets, position)
            self._extents.append(extent)
            self._tables.append(table)
            position += offsets[-1]
            at += len(numbers)
        return position
