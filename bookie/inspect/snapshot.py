"""A look into a bookie's directory: what all readers of this folder share. No code here writes, locks or makes files.

    found = snapshot_directory(files, directory)   cookie, mark and the ends that they name, as they are now
    found.damages                             what of these could not be read

The readers in journals.py and logs.py are generators. They yield what they find, in the order of the bytes, yield a
`FileDamage` in the place of what is not whole, and continue after it. Memory is bounded by a window of the file and one
record, whatever the store's size.

**Beside a running bookie.** The mark is replaced by a rename, so one read of it is whole. What it names does not change
any more: logs and indexes up to their ends, the ledger index up to its end. A bookie may be writing after those ends;
such bytes are shown as not committed and are never damage. A file that does not exist any more when it is read
(recycled, compacted) is `RemovedFile`. A journal's block is read again before it counts as damaged
(inspect/journals.py).

**Sectors that the disk cannot read** (EIO) are taken for zeros, page by page. So the data in them is damaged by its
checksum, and the data after them is found.

**A stopped bookie**: the same. What the next start would cut is shown as not committed or torn.
Guarded by tests/bookie/inspect/test_inspect.py.
"""

from __future__ import annotations

import errno
import uuid as uuids
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

from ...proto.errors import InvalidRequest, NewerFormat, NotFound
from ...proto.names import parse_number
from ...runtime.files import File, Files, join_path
from ..format import mark as mark_format
from ..format import mark as note
from ..format.journal import FILE_HEADER_BYTES, DamagedFile, FileHeader, decode_file_header
from ..format.mark import CheckpointMark, Cookie
from ..store import boot, disk
from ..store import state_log as losses
from ..store.checkpoint import MARK_FILE
from ..store.identity import COOKIE_FILE
from ..store.replay import FileDamage

__all__ = [
    "FileDamage",
    "ReadableFile",
    "RemovedFile",
    "StoreSnapshot",
    "committed_ends_of_open_logs",
    "list_file_numbers",
    "list_ledgers_directories",
    "open_file",
    "read_file_in_parts",
    "read_header_or_damage",
    "snapshot_directory",
]  # fmt: skip

READ_WINDOW_BYTES = 1 << 20
READ_PAGE_BYTES = 4096


class ReadableFile(Protocol):
    """The interface of a file that is open for reading during an inspection. `open_file` returns one, and the caller
    must close it. `pread` returns fewer bytes at the end of the file, and zeros for pages that the disk cannot read."""

    @property
    def path(self) -> str: ...
    def pread(self, size: int, offset: int) -> bytes: ...
    def size(self) -> int: ...
    def close(self) -> None: ...


class RemovedFile(NamedTuple):
    """Says that the running bookie removed or reused a file while it was being inspected. This is no damage."""

    path: str


class StoreSnapshot(NamedTuple):
    """A bookie's data directory as it was at one moment: its cookie, its checkpoint mark, and the damage that was found
    in these two."""

    files: Files
    directory: str
    uuid: bytes  # of the cookie, else of the mark; zeros: neither can be read
    cookie: Cookie | None
    mark: CheckpointMark | None
    marks_written: int
    damages: list[FileDamage]
    reasons: tuple[str, ...] = ()  # why it is in limbo, as its starts found (store/state_log.py)

    def path(self, *names: str) -> str:
        """Returns the path of a file in the data directory. `names` are the names of its folders and of the file. The
        journal may be in another directory."""
        if names[0] == boot.JOURNAL_FOLDER and self.cookie is not None and self.cookie.journal:
            return join_path(self.cookie.journal, *names[1:])
        return join_path(self.directory, *names)

    def committed_ends_of_log(self, log: int) -> tuple[int, int] | None:
        """Returns (end of the log file, end of its index file), the committed lengths in bytes of a log that is being
        written. Returns None for any other log: its files are committed up to their ends."""
        return None if self.mark is None else committed_ends_of_open_logs(self.mark).get(log)

    def is_committed(self, log: int) -> bool:
        """Returns whether a finished checkpoint includes the log. If not, an unfinished checkpoint created the log, and
        the log does not count."""
        return self.mark is None or log <= self.mark.last_log


def committed_ends_of_open_logs(mark: CheckpointMark) -> dict[int, tuple[int, int]]:
    """Returns the committed ends of each entry log that is being written according to `mark`, by the number of the log:
    (end of the log file, end of the index file), in bytes."""
    return {
        each.number: (each.log_end, each.index_end) for each in (mark.hot_open_log, mark.cold_open_log) if each.number
    }


def snapshot_directory(files: Files, directory: str) -> StoreSnapshot:
    """Reads the cookie and the checkpoint mark of a bookie's data directory and returns a snapshot of the directory.
    Damage is in the snapshot's `damages`. Raises NotFound if the directory does not belong to a bookie, InvalidRequest
    if a file has a newer format than this Magnetar knows, and OSError if a file cannot be opened or the directory
    cannot be listed."""
    if not files.exists(directory):
        raise NotFound(f"there is no directory {directory}")
    names = files.list_directory(directory)
    if not {COOKIE_FILE, MARK_FILE, boot.JOURNAL_FOLDER, boot.ENTRIES_FOLDER, boot.LEDGERS_FOLDER} & set(names):
        inner = [name for name in names if files.exists(join_path(directory, name, COOKIE_FILE))]
        hint = f"; did you mean {join_path(directory, inner[0])}?" if inner else ": it has neither cookie nor mark"
        raise NotFound(f"{directory} is not the data directory of a bookie{hint}")
    damages: list[FileDamage] = []
    cookie = _cookie(files, join_path(directory, COOKIE_FILE), damages)
    if cookie is not None and cookie.paths and directory not in cookie.paths:
        raise NotFound(f"{directory} has the identity of a bookie; its ledgers are in {', '.join(cookie.paths)}")
    uuid = uuids.UUID(cookie.bookie).bytes if cookie is not None else b""
    mark, count, uuid = _mark(files, join_path(directory, MARK_FILE), uuid, damages)
    reasons = _reasons(files, join_path(directory, losses.LIMBO_FILE), damages)
    return StoreSnapshot(files, directory, uuid or bytes(16), cookie, mark, count, damages, reasons)


def list_ledgers_directories(files: Files, directory: str) -> tuple[str, ...]:
    """Returns the ledgers directories of the bookie whose data directory this is: usually that directory itself. Raises
    OSError if its cookie cannot be read."""
    path = join_path(directory, COOKIE_FILE)
    cookie = _cookie(files, path, []) if files.exists(path) else None
    return (directory,) if cookie is None or not cookie.paths else cookie.paths


def _cookie(files: Files, path: str, damages: list[FileDamage]) -> Cookie | None:
    if not files.exists(path):
        damages.append(FileDamage(path, 0, "the cookie is missing"))
        return None
    try:
        cookie = mark_format.decode_cookie(_whole(files, path), path)
        uuids.UUID(cookie.bookie)
    except DamagedFile as error:
        damages.append(FileDamage(error.path, error.offset, error.reason))
    except ValueError:
        damages.append(FileDamage(path, 0, f"{cookie.bookie!r} is no uuid"))
    except NewerFormat as error:
        raise InvalidRequest(str(error)) from error
    else:
        return cookie
    return None


def _mark(
    files: Files, path: str, uuid: bytes, damages: list[FileDamage]
) -> tuple[CheckpointMark | None, int, bytes]:
    """Reads the checkpoint mark. Returns (mark, number of marks written so far, the bookie's uuid). The uuid is that of
    the mark if `uuid`, that of the cookie, is empty."""
    if not files.exists(path):
        damages.append(FileDamage(path, 0, "the mark is missing"))
        return None, 0, uuid
    try:
        data = _whole(files, path)
        mark, count = mark_format.decode_checkpoint_mark(data, uuid or data[12:28], path)
    except DamagedFile as error:
        damages.append(FileDamage(error.path, error.offset, error.reason))
    except NewerFormat as error:
        raise InvalidRequest(str(error)) from error
    else:
        return mark, count, uuid or data[12:28]
    return None, 0, uuid


def _reasons(files: Files, path: str, damages: list[FileDamage]) -> tuple[str, ...]:
    if not files.exists(path):
        return ()
    try:
        return note.decode_checksummed_json(
            _whole(files, path), losses.LIMBO_MAGIC, losses.DataLossRecord, path
        ).reasons
    except DamagedFile as error:
        damages.append(FileDamage(error.path, error.offset, error.reason))
    except FileNotFoundError:  # limbo was left meanwhile
        pass
    except NewerFormat as error:
        raise InvalidRequest(str(error)) from error
    return ()


def _whole(files: Files, path: str) -> bytes:
    return losses.read_or_raise_damaged(path, lambda: disk.read_file(files, path))


class _Tolerant:
    """A file in which pages that the disk cannot read are replaced by zeros."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.path = file.path
        self.size = file.size
        self.close = file.close

    def pread(self, size: int, offset: int) -> bytes:
        try:
            return self._file.pread(size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        end = min(offset + size, self._file.size())
        cuts = [offset, *range(offset - offset % READ_PAGE_BYTES + READ_PAGE_BYTES, end, READ_PAGE_BYTES), end]
        return b"".join(self._page(start, stop - start) for start, stop in pairwise(cuts) if start < stop)

    def _page(self, offset: int, size: int) -> bytes:
        try:
            return self._file.pread(size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return bytes(size)


def open_file(snapshot: StoreSnapshot, path: str) -> ReadableFile | None:
    """Opens a file of the snapshot for reading and returns it. Returns None if the file does not exist any more. Raises
    OSError if it cannot be opened for another reason."""
    try:
        return _Tolerant(snapshot.files.open(path, write=False))
    except FileNotFoundError:
        return None


def read_header_or_damage(
    snapshot: StoreSnapshot, file: ReadableFile, magic: bytes, number: int, offset: int = 0
) -> FileHeader | FileDamage:
    """Reads and verifies the header at `offset` of a file, which must have this `magic` and `number`. Returns the
    header, or a FileDamage that says what is wrong with it. Accepts any bookie's header if the snapshot has no uuid.
    Raises InvalidRequest if the file has a newer format than this Magnetar knows."""
    data = file.pread(FILE_HEADER_BYTES, offset)
    uuid = snapshot.uuid if any(snapshot.uuid) else data[12:28]
    try:
        return decode_file_header(data, magic, uuid, number, file.path)
    except DamagedFile as error:
        return FileDamage(error.path, offset + error.offset, error.reason)
    except NewerFormat as error:
        raise InvalidRequest(str(error)) from error


def list_file_numbers(snapshot: StoreSnapshot, folder: str, suffixes: tuple[str, ...]) -> list[int]:
    """Returns the numbers in the names of the files in `folder` that have one of these suffixes, in ascending order.
    Ignores files whose names are not numbers. Returns [] if there is no such folder. Raises OSError if the folder
    cannot be listed."""
    path = snapshot.path(folder)
    if not snapshot.files.exists(path):
        return []
    stems = [name.rpartition(".")[0] for name in snapshot.files.list_directory(path) if name.endswith(suffixes)]
    return sorted({number for stem in stems if (number := parse_number(stem)) is not None})


def read_file_in_parts(
    file: ReadableFile, start: int, end: int, size: int = READ_WINDOW_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of consecutive parts of the file, from `start` to `end` or to the end of the file. Each
    part has `size` bytes, the last one may have fewer."""
    while start < end:
        data = file.pread(min(size, end - start), start)
        if not data:
            return
        yield start, data
        start += len(data)
