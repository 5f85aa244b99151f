"""How the store writes: what a failed write and a failed sync mean, in one place.

- A failed sync ends the process at once, without a flush (ledger protocol §2.5): the kernel marks the pages clean
  although they never reached the disk, so neither a second try nor a read shows the failure.
- A write that finds no room is `NoSpace`: nothing was acknowledged, the caller fails its waiters and goes read-only.
- An open that finds no descriptor free is `NoFileDescriptor`: nothing was written either, but the disk has room and is
  whole. So the reserve stays, the bookie stays writable, and the work is done again later.
- Any other failed write is treated as a failed sync. A write of a `direct` file (runtime/files.py) is both: it leaves
  nothing in the page cache, so when it finds no room, that is `NoSpace`.

Guarded by tests/bookie/store/journal/test_journal.py `test_failed_sync_ends_the_process_and_nobody_is_answered`.

**One of several disks** (`IsolatedFiles`): what would end the process ends the use of one directory instead. The first
failed write or sync sets `failure`. From then on no byte and no name of the directory changes in this process, because
it is unknown what the disk kept. Files that are open can be read as long as the disk reads them.
Guarded by tests/bookie/test_several_disks.py.
"""

from __future__ import annotations

import errno
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NoReturn

from ...runtime.descriptors import NO_DESCRIPTOR_ERRORS
from ...runtime.files import DIRECT_ALIGNMENT, Buffer, File, Files, join_path

_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))
NO_DIRECT_IO_ERRORS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))
"""Error numbers by which a file system says that it does not support direct writes."""
BUFFERS_PER_WRITE_MAX = 512
"""The largest number of buffers in one system call (IOV_MAX is 1024). More buffers are joined first: one copy costs
less than several system calls."""


def raise_if_out_of_descriptors(error: OSError) -> None:
    """Raises `error` again if it says that no file descriptor was free, which says nothing about the file. Otherwise
    does nothing."""
    if error.errno in NO_DESCRIPTOR_ERRORS:
        raise error


def raise_unless_out_of_descriptors(error: OSError) -> None:
    """Raises `error` again, unless it says that no file descriptor was free."""
    if error.errno not in NO_DESCRIPTOR_ERRORS:
        raise error


class NoSpace(Exception):
    """Raised when the disk has no room for a write. Any part of the data may be on the disk, and none of it counts."""


class NoFileDescriptor(NoSpace):
    """Raised when a file cannot be opened because no file descriptor is free. Says nothing about the disk."""


def raise_no_space_or_exit(files: Files, doing: str, error: OSError) -> NoReturn:
    """Raises the error that follows from an error of the disk: NoFileDescriptor if no file descriptor is free, NoSpace
    if the disk is full. Any other error ends the process. `doing` says what failed, as text."""
    if error.errno in NO_DESCRIPTOR_ERRORS:
        raise NoFileDescriptor(f"{doing}: {error}") from error
    if error.errno in _NO_ROOM:
        raise NoSpace(f"{doing}: {error}") from error
    files.end_process(f"{doing}: {error}")
    raise error


class DirectoryFailed(OSError):
    """Raised by each change of a directory whose disk has failed before (`IsolatedFiles`)."""


class IsolatedFiles:
    """The files of one directory of several: `end_process` ends the use of this directory, not the process. `failure`
    is then the reason as a text; before, it is None. Implements `Files`."""

    def __init__(self, files: Files) -> None:
        self.of_process = self._files = files
        self.failure: str | None = None

    def check_writable(self) -> None:
        """Raises DirectoryFailed if the directory has failed."""
        if self.failure is not None:
            raise DirectoryFailed(errno.EIO, f"its directory is not written any more: {self.failure}")

    def end_process(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> File:
        if not write:
            return self._files.open(path, write=False, direct=direct)
        self.check_writable()
        return IsolatedFile(
            self, self._files.open(path, create=create, exclusive=exclusive, direct=direct)
        )  # fmt: skip

    def make_directories(self, path: str) -> None:
        self.check_writable()
        self._files.make_directories(path)

    def rename(self, old: str, new: str) -> None:
        self.check_writable()
        self._files.rename(old, new)

    def remove(self, path: str) -> None:
        self.check_writable()
        self._files.remove(path)

    def sync_directory(self, path: str) -> None:
        self.check_writable()
        self._files.sync_directory(path)

    def lock(self, path: str) -> File:
        return self._files.lock(path)

    def allocate_buffer(self, size: int) -> memoryview:
        return self._files.allocate_buffer(size)

    def exists(self, path: str) -> bool:
        return self._files.exists(path)

    def list_directory(self, path: str) -> list[str]:
        return self._files.list_directory(path)

    def disk_usage(self, path: str) -> tuple[int, int]:
        return self._files.disk_usage(path)


class IsolatedFile:
    """A file that `IsolatedFiles` has opened for writing. Implements `File`."""

    def __init__(self, files: IsolatedFiles, file: File) -> None:
        self._files = files
        self._file = file
        self.pread = file.pread
        self.pread_into = file.pread_into
        self.size = file.size
        self.advise_dontneed = file.advise_dontneed
        self.advise_random = file.advise_random
        self.close = file.close

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def direct(self) -> bool:
        return self._file.direct

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._files.check_writable()
        return self._file.pwrite(buffers, offset)

    def fdatasync(self) -> None:
        self._files.check_writable()
        self._file.fdatasync()

    def allocate(self, size: int) -> None:
        self._files.check_writable()
        self._file.allocate(size)

    def truncate(self, size: int) -> None:
        self._files.check_writable()
        self._file.truncate(size)


def write_buffers(files: Files, file: File, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes the buffers one after the other, from `offset` of the file on. Returns their total size in bytes. Raises
    NoSpace if the disk is full; any other error ends the process."""
    if len(buffers) > BUFFERS_PER_WRITE_MAX:
        buffers = [b"".join(buffers)]
    try:
        return file.pwrite(buffers, offset)
    except OSError as error:
        raise_no_space_or_exit(files, f"write {file.path}", error)


def open_file(files: Files, path: str, *, direct: bool = False) -> File:
    """Opens an existing file for writing and returns it. `direct`: bypasses the page cache. Raises NoFileDescriptor or
    NoSpace; any other error ends the process."""
    try:
        return files.open(path, direct=direct)
    except OSError as error:
        raise_no_space_or_exit(files, f"open {path}", error)


def open_for_direct_writes(files: Files, path: str, block: bytes) -> File | None:
    """Opens a file for direct writes, which bypass the page cache, and writes `block` at its start. Returns the file;
    None if the file system does not support direct writes. Raises NoFileDescriptor or NoSpace; any other error ends the
    process."""
    try:
        file = files.open(path, direct=True)
        try:
            file.pwrite([block], 0)
        except OSError:
            file.close()
            raise
    except OSError as error:
        if error.errno not in NO_DIRECT_IO_ERRORS:
            raise_no_space_or_exit(files, f"write {path}", error)
        return None
    return file


def open_for_uncached_reads(files: Files, path: str) -> File:
    """Opens a file that will be read only once and returns it. Reads bypass the page cache if the file system supports
    that. Raises OSError."""
    try:
        file = files.open(path, write=False, direct=True)
        try:
            file.pread(DIRECT_ALIGNMENT, 0)
        except OSError:
            file.close()
            raise
    except OSError as error:
        if error.errno not in NO_DIRECT_IO_ERRORS:
            raise
        return files.open(path, write=False)
    return file


def allocate_space(files: Files, file: File, size: int) -> None:
    """Allocates disk space for the first `size` bytes of the file. Raises NoSpace if the disk is full; any other error
    ends the process."""
    try:
        file.allocate(size)
    except OSError as error:
        raise_no_space_or_exit(files, f"allocate {file.path}", error)


def sync_file(files: Files, file: File) -> None:
    """Syncs the data of the file to the disk. Any error ends the process."""
    try:
        file.fdatasync()
    except OSError as error:
        files.end_process(f"sync {file.path}: {error}")
        raise


def start_write_back(files: Files, file: File) -> None:
    """Syncs a file early, so that a later sync, for which a caller waits, takes less time. No guarantee needs this
    sync.

    The crash-point enumeration never counts this sync as durable (tests/crashes)."""
    sync_file(files, file)


def sync_directory(files: Files, path: str) -> None:
    """Syncs a directory, so that the names of its files are durable. Raises NoFileDescriptor if it cannot be opened;
    any other error ends the process."""
    try:
        files.sync_directory(path)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR_ERRORS:  # it was not opened
            raise_no_space_or_exit(files, f"sync directory {path}", error)
        files.end_process(f"sync directory {path}: {error}")
        raise


def make_directories(files: Files, path: str) -> None:
    """Makes a directory and its parents, and syncs each new one. Raises NoSpace or NoFileDescriptor; raises other
    errors as they are."""
    try:
        files.make_directories(path)
    except OSError as error:
        if error.errno in _NO_ROOM or error.errno in NO_DESCRIPTOR_ERRORS:
            raise_no_space_or_exit(files, f"make {path}", error)
        raise


def list_removable_files(files: Files, path: str) -> list[str]:
    """Returns the names of the files in a directory, for a caller that removes some of them. If no file descriptor is
    free, returns an empty list: the caller can remove the files later. Raises any other OSError."""
    try:
        return files.list_directory(path)
    except OSError as error:
        raise_unless_out_of_descriptors(error)
        return []


def replace_file(files: Files, directory: str, name: str, data: bytes) -> None:
    """Replaces the content of the file `name` by `data`, durably, all or nothing: writes and syncs a temporary file,
    renames it, and syncs the directory. Creates the file if it is missing. Raises NoSpace if the disk is full,
    NoFileDescriptor if no file descriptor is free; any other failed write or sync ends the process."""
    replace_file_in_slices(files, directory, name, [data])


def replace_file_in_slices(files: Files, directory: str, name: str, slices: Iterable[bytes]) -> int:
    """Replaces the content of a file like `replace_file`, with the same errors (NoSpace, NoFileDescriptor), but writes
    and syncs the data slice by slice. Returns the size of the file in bytes."""
    temporary = join_path(directory, name + ".tmp")
    try:
        file = files.open(temporary, create=True)
    except OSError as error:
        raise_no_space_or_exit(files, f"create {temporary}", error)
    try:
        file.truncate(0)
        size = 0
        for data in slices:
            size += write_buffers(files, file, [data], size)
            sync_file(files, file)
    finally:
        file.close()
    files.rename(temporary, join_path(directory, name))
    sync_directory(files, directory)
    return size


async def run_or_end_process(files: Files, what: str, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, a background task without which the store cannot go on. If `work` raises an error, ends the process.
    `what` names the work in the error text. An error of one disk of several ends the use of its directory."""
    try:
        await work
    except Exception as error:
        if isinstance(files, IsolatedFiles) and not isinstance(error, OSError):
            files = files.of_process  # a defect of ours
        files.end_process(f"{what}: {error!r}")
        raise


def read_file(files: Files, path: str, size_max: int | None = None) -> bytes:
    """Returns the content of the file; with `size_max`, only its first `size_max` bytes. Raises OSError."""
    file = files.open(path, write=False)
    try:
        return file.pread(file.size() if size_max is None else size_max, 0)
    finally:
        file.close()


def read_file_size(files: Files, path: str) -> int:
    """Returns the size of the file in bytes. Raises OSError."""
    file = files.open(path, write=False)
    try:
        return file.size()
    finally:
        file.close()
