"""The files of the journal: how one begins, is zero-filled ahead, is recycled or removed.

    NNNNNNNNNNNNNNNN.jnl    a journal, by its id; a file is used once under each id, ids grow by one
    spare-…                 zero-filled, or used before: becomes the next journal
    filling-…               not all zeros yet; removed at the next start

A journal *begins* in this order: its header is written into a spare and synced, the spare gets the journal's name, the
directory is synced. The header says where the journal before it ended, so it may only be written when all of that is
synced. A recycled file keeps its stale blocks: they carry another id and salt and never parse (format/journal.py).

Spares are filled with zeros that are really written, so that a sync of a block changes no extents (213 µs instead of
626–778 µs for 128 KiB). This happens in slices in the background, while the current journal fills; until a spare is
ready, the current journal grows. A journal before the mark is recycled, or removed when there are enough spares.

Blocks are written *direct* (O_DIRECT | O_DSYNC: one system call, no page cache) where the file system allows it, else
with a write and an `fdatasync`. The write of the first file's header shows which. See journal/journal.py for the
figures.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from typing import NamedTuple

import msgspec

from ....runtime.files import File, Files, join_path
from ....runtime.threads import Worker
from ...format.journal import MAGIC, FileHeader, encode_file_header, encode_first_block
from .. import disk

_LOG = logging.getLogger("magnetar.bookie.store.journal")

SUFFIX = ".jnl"
SPARE = "spare-"
FILLING = "filling-"
FILL_SLICE_BYTES = 256 << 10
FILL_PAUSE_S = 0.002
"""Seconds between slices of zeros, each of about 0.5 ms, so that they delay the blocks' syncs little."""

_REFUSALS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))
"""Errors of a file system that does not write direct."""


class JournalPosition(NamedTuple):
    """A position in the journals: byte `offset` of journal `journal`; journals with smaller ids are before it."""

    journal: int
    offset: int


def journal_name(number: int) -> str:
    return f"{number:016d}{SUFFIX}"


def journal_numbers(files: Files, directory: str) -> list[int]:
    return _numbers(files.list_directory(directory))


def _numbers(names: list[str]) -> list[int]:
    return [int(name[: -len(SUFFIX)]) for name in names if name.endswith(SUFFIX)]


class Segment(msgspec.Struct):
    """The journal file to which blocks are written."""

    file: File
    number: int
    salt: int
    size: int


class Segments:
    """The directory of the journal files. Methods that wait for the disk must run in a worker, where their docstrings
    say so.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        uuid: bytes,
        rng: random.Random,
        filler: Worker,
        *,
        segment_bytes: int,
        first_segment_bytes: int,
        spares_max: int,
        direct: bool,
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._rng = rng
        self._filler = filler
        self._segment_bytes = segment_bytes
        self._first_segment_bytes = first_segment_bytes
        self._spares_max = spares_max
        self.direct = direct
        self.spares: list[str] = []
        self._filling: asyncio.Task[None] | None = None
        self._closing = False
        self.full = False
        """The last fill or probe found no room."""
        self.counters = {"recycled": 0, "filled": 0}

    def adopt_spare_files(self) -> None:
        """At a start: removes half-filled files of the last process and adopts its spares. Must run in a worker."""
        for name in self._files.list_directory(self._directory):
            path = join_path(self._directory, name)
            if name.startswith(FILLING):
                self._files.remove(path)
            elif name.startswith(SPARE):
                self.spares.append(path)

    async def close(self) -> None:
        self._closing = True
        if self._filling is not None:
            await self._filling

    # ------------------------------------------------------------------------------------ a journal begins
    def make_segment(self, spare: str, previous: JournalPosition) -> Segment:
        """Makes the file `spare` ("": a new small file) the journal after `previous`. Must run in a worker. Raises
        NoSpace.
        """
        number = previous.journal + 1
        salt = self._rng.getrandbits(64)
        path = spare or self._small(number)
        header = encode_file_header(FileHeader(MAGIC, self._uuid, number, previous.offset, salt))
        size = self._write_header(path, encode_first_block(header))
        final = join_path(self._directory, journal_name(number))
        self._files.rename(path, final)
        try:
            disk.sync_directory(self._files, self._directory)
            file = disk.open_file(self._files, final, direct=self.direct)
        except disk.NoSpace:
            self._files.rename(final, path)  # the same spare is tried again
            raise
        return Segment(file, number, salt, size)

    def _small(self, number: int) -> str:
        path = join_path(self._directory, f"{FILLING}{number:016d}")
        file = self._create(path)
        self._zero(file, 0, self._first_segment_bytes)
        file.advise_dontneed()
        file.close()
        return path

    def _write_header(self, path: str, block: bytes) -> int:
        """Writes a header, which is durable when this returns; returns the size of the file. Finds out whether direct
        writes are possible.
        """
        if self.direct:
            try:
                file = self._files.open(path, direct=True)
                file.pwrite([block], 0)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    disk.raise_or_die(self._files, f"write {path}", error)
                _LOG.info("%s cannot be written direct (%s): each block is written, then synced", path, error)
                self.direct = False
        if not self.direct:
            file = disk.open_file(self._files, path)
            disk.write(self._files, file, [block], 0)
            disk.sync(self._files, file)
        size = file.size()
        file.close()
        return size

    # ------------------------------------------------------------------------------------ spares
    def start_making_spare(self) -> None:
        """Starts to make a spare journal file in the background. Does nothing if there is a spare, or one is being
        made."""
        if not self.spares and self._filling is None:
            filling = disk.run_or_die(self._files, "journal segment", self._fill())
            self._filling = asyncio.create_task(filling, name="journal-fill")

    async def _fill(self) -> None:
        path = join_path(self._directory, f"{FILLING}{self._rng.getrandbits(64):016x}")
        try:
            file = await self._filler.run(self._create, path)
            try:
                for offset in range(0, self._segment_bytes, FILL_SLICE_BYTES):
                    if self._closing:
                        return
                    size = min(FILL_SLICE_BYTES, self._segment_bytes - offset)
                    await self._filler.run(self._zero, file, offset, size)
                    await asyncio.sleep(FILL_PAUSE_S)
                file.advise_dontneed()
            finally:
                self._filler.run(file.close)  # after a write that may be under way there
            spare = path.replace(FILLING, SPARE)
            await self._filler.run(self._files.rename, path, spare)
            self.spares.append(spare)
            self.counters["filled"] += 1
        except disk.NoSpace as error:
            self.full = self.full or not isinstance(error, disk.NoDescriptor)
            await self._filler.run(self._discard, path)
        finally:
            self._filling = None

    def _create(self, path: str) -> File:
        try:
            return self._files.open(path, create=True)
        except OSError as error:
            disk.raise_or_die(self._files, f"create {path}", error)

    def _zero(self, file: File, offset: int, size: int) -> None:
        disk.write(self._files, file, [bytes(size)], offset)
        disk.write_back(self._files, file)

    def _discard(self, path: str) -> None:
        if self._files.exists(path):  # there may have been no room for its name either
            self._files.remove(path)

    def check_room(self, size: int) -> None:
        """Raises NoSpace if there is no room for `size` bytes. Must run in a worker."""
        path = join_path(self._directory, f"{FILLING}probe")
        try:
            file = self._create(path)
            try:
                disk.allocate(self._files, file, size)
            finally:
                file.close()
        finally:
            self._discard(path)

    # ------------------------------------------------------------------------------------ release
    def release(self, position: JournalPosition) -> None:
        """Recycles or removes the journals before `position`. The mark with this position must be durable. Must run in
        a worker.

        After a crash here, or if no descriptor was free, the next release or start handles the files that are left.
        """
        for number in _numbers(disk.list_removable(self._files, self._directory)):
            if number >= position.journal:
                continue
            path = join_path(self._directory, journal_name(number))
            if len(self.spares) < self._spares_max and self._recyclable(path):
                spare = join_path(self._directory, f"{SPARE}{number:016d}")
                self._files.rename(path, spare)
                self.spares.append(spare)
                self.counters["recycled"] += 1
            else:
                self._files.remove(path)

    def _recyclable(self, path: str) -> bool:
        try:
            file = self._files.open(path, write=False)
        except OSError as error:
            disk.raise_unless_no_descriptor(error)
            return False
        try:
            return self._segment_bytes <= file.size() <= 4 * self._segment_bytes
        finally:
            file.close()
