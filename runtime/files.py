"""Files: the interface between the store and a disk.

Every implementation guarantees: `fdatasync` makes durable all bytes that were written to that file before; a `pwrite`
of a file that was opened `direct` is durable when it returns; a new, renamed or removed name is durable after
`sync_directory` of its folder. Nothing else is durable. The simulated disk (`runtime/sim/disk.py`) loses everything
else at a crash.
All calls are synchronous; a call that may wait for the disk is made from a `Worker` (runtime/tasks.py).
Errors are `OSError`, as the system reports them.

Also in this file, each below its heading: the kernel's files (disk); the file descriptors of this process
(descriptors).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn, Protocol, TypeVar

# ---------------------------------------------------------------------------------------------------------- descriptors
# The file descriptors of this process: the limit is raised at the start, files have a reserve, ports share the rest.
#
#     PROCESS.prepare()                           once, when a server starts
#     PROCESS.open_file(path, flags)              does not fail because connections use all descriptors
#     if PROCESS.reserve_connection(): …          for a connection of a port, until `release_connection`
#
# **Limit.** The soft limit of RLIMIT_NOFILE, often 1,024, is raised to the hard one (FILES_MAX at most). **Reserve.**
# SPARES descriptors are open without a file. If a file cannot be opened because no descriptor is free (EMFILE, ENFILE),
# a spare descriptor is closed and the file is opened again; missing spare descriptors are opened again later. So a
# process can use its files even if its connections (also those of ZeroMQ, which are not counted here) use all other
# descriptors. **Ports.** All ports of a process together may have `connections_max` connections: the limit less
# RESERVE. Each port has a lower limit of its own (runtime/access.py `CallerLimits`). Guarding tests:
# tests/runtime/test_descriptors.py.

T = TypeVar("T")

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows, where only clients run
    resource = None

FILES_MAX = 1 << 20
"""Limit of descriptors above which more are worth nothing: a connection has 80 KiB."""
SPARES = 64
RESERVE = 256
"""Descriptors for what is no connection of a port: a bookie has about 110 files open, a process 20 sockets and pipes of
its own."""
NONE_FREE = frozenset((errno.EMFILE, errno.ENFILE))


class DescriptorLimits(NamedTuple):
    """The limits on open files of this process, as `FileDescriptors.prepare` found or set them."""

    limit: int
    connections_max: int


class FileDescriptors:
    """Manages the file descriptors of one process: reserves a few spare descriptors for files, and limits the number of
    connections. Files may be opened from any thread."""

    def __init__(self) -> None:
        self.connections = 0  # that ports accepted and that are open
        self.refused = 0  # … and that were refused for want of descriptors
        self.lent = 0  # spares that a file took
        self._spares: list[int] = []
        self._lock = threading.Lock()
        self._pid = 0
        self.limit = get_soft_files_limit()

    @property
    def connections_max(self) -> int:
        return max(self.limit - min(RESERVE, self.limit // 2), 1)

    def prepare(self) -> DescriptorLimits:
        """Raises the process's limit of open files, and opens the spare descriptors. In a forked process, first drops
        the state that it inherited from its parent."""
        self.limit = raise_files_limit()
        if self._pid != os.getpid():  # those of a parent are open here, too
            for each in self._spares:
                os.close(each)
            self._pid, self._spares, self.connections = os.getpid(), [], 0
        self.open_missing_spares()
        return DescriptorLimits(self.limit, self.connections_max)

    def open_missing_spares(self) -> None:
        """Opens spare descriptors again, as many as are missing and as the limit allows."""
        with self._lock, contextlib.suppress(OSError):
            while self._pid == os.getpid() and len(self._spares) < min(SPARES, self.limit // 8):
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def open_file(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Opens a file like `os.open`. If no file descriptor is free, closes a spare one first. Raises OSError if there
        is no spare descriptor either."""
        return self._opened(lambda: os.open(path, flags, mode))

    def list_directory(self, path: str) -> list[str]:
        """Lists a directory like `os.listdir`. If no file descriptor is free, closes a spare one first."""
        return self._opened(lambda: os.listdir(path))

    def _opened(self, opening: Callable[[], T]) -> T:
        while True:
            try:
                found = opening()
                break
            except OSError as error:
                if error.errno not in NONE_FREE or not self._lend():
                    raise
        if self.lent:
            self._recover()
        return found

    def _lend(self) -> bool:
        """Closes a spare file, so that its descriptor can be used. Returns False if there is no spare."""
        with self._lock:
            if self._pid != os.getpid() or not self._spares:
                return False
            os.close(self._spares.pop())
            self.lent += 1
            return True

    def _recover(self) -> None:
        """Opens the lent spares again; they count as lent until all of them are open."""
        self.open_missing_spares()
        with self._lock:
            if len(self._spares) >= min(SPARES, self.limit // 8):
                self.lent = 0

    def reserve_connection(self) -> bool:
        """Counts a new connection. Returns False, and does not count it, if there are as many connections as there may
        be. The caller must call `release_connection` when a counted connection ends."""
        if self.connections >= self.connections_max:
            self.refused += 1
            return False
        self.connections += 1
        return True

    def release_connection(self) -> None:
        self.connections -= 1


def get_soft_files_limit() -> int:
    if resource is None:
        return FILES_MAX
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_files_limit() -> int:
    """Raises the soft limit of open files to the hard limit, but at most to FILES_MAX. Returns the new soft limit."""
    if resource is None:
        return FILES_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _bounded(hard)
    if _bounded(soft) < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below its hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return get_soft_files_limit()


def _bounded(limit: int) -> int:
    return FILES_MAX if limit < 0 else min(limit, FILES_MAX)  # RLIM_INFINITY


PROCESS = FileDescriptors()
"""The descriptors of this process."""


# ---------------------------------------------------------------------------------------------------------------- files

Buffer = bytes | bytearray | memoryview

DIRECT_ALIGNMENT = 4096
"""Unit of offsets and sizes of reads and writes of a file that was opened `direct`."""


class File(Protocol):
    """An open file. Every read and write names its absolute position, because there is no file cursor."""

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool:
        """Returns whether the file is opened for direct writes: each write is durable when it returns."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes from `offset`: fewer at the end of the file, `b""` after the end."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer with bytes from `offset`, and returns how many there were (fewer at the end of the file).
        For a `direct` file the buffer must be the start of an `arena`."""
        ...

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes all buffers, one after the other, at `offset`. Returns the number of bytes, which are always all of
        them. A `direct` file writes a single buffer that is the start of an `arena` without a copy, and copies other
        buffers into one."""
        ...

    def fdatasync(self) -> None: ...
    def allocate(self, size: int) -> None:
        """Extends the file to `size` bytes (with zeros) and reserves the blocks for them, so that a full disk (ENOSPC)
        is noticed here and not by a later write."""
        ...

    def truncate(self, size: int) -> None: ...
    def size(self) -> int: ...
    def advise_dontneed(self) -> None:
        """Tells the kernel that the page cache need not keep the content of this file."""
        ...

    def advise_random(self) -> None:
        """Tells the kernel not to read ahead in this file."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """The file system as a process sees it: opens, lists, renames, removes and locks files."""

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> File:
        """Opens a file. With `create`, creates the file if it does not exist; with `exclusive` too, raises
        FileExistsError if it exists. `direct`: without the page cache, and each write is synced. If the file system
        does not support that, this call or the first read or write of the file raises OSError with EINVAL or
        EOPNOTSUPP."""
        ...

    def arena(self, size: int) -> memoryview:
        """Returns a buffer of `size` zero bytes, aligned so that a `direct` file reads and writes it without a copy."""
        ...

    def exists(self, path: str) -> bool: ...
    def list_directory(self, path: str) -> list[str]:
        """Returns the sorted names of the files and folders in a folder."""
        ...

    def make_directories(self, path: str) -> None:
        """Creates a folder and its missing parents with mode 0700, and syncs each new one into its parent. It is no
        error if the folder exists."""
        ...

    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def disk_usage(self, path: str) -> tuple[int, int]:
        """Returns (total bytes, free bytes) of the file system that contains `path`."""
        ...

    def lock(self, path: str) -> File:
        """Locks the file `path` exclusively, and returns it open. The lock ends when the returned file is closed or the
        process ends. Raises BlockingIOError if another process has locked the file."""
        ...

    def die(self, reason: str) -> None:
        """Ends the process at once (exit code 70) without flushing anything. Called after a failed fsync, when the
        content of files is not known any more."""
        ...


def join_path(*parts: str) -> str:
    return os.path.join(*parts)


# ----------------------------------------------------------------------------------------------------------------- disk
# The real disk of `runtime/files.py`: the kernel's files, unbuffered by this program.
#
# Only `fdatasync` and each write of a `DirectFile` make bytes durable. Only `sync_directory` makes names durable, and
# `make_directories`, which syncs each folder that it makes into its parent.
# A write is never short (the rest is written again); a read is short only at the end of the file.

EXIT_DISK_FAILED = 70
"""Exit code after a failed fsync (EX_SOFTWARE): a supervisor may restart the process, which replays its journal."""

_IOV_MAX = 1024
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class SystemFile:
    """An open file of the operating system: a descriptor and a path. `close` may be called twice."""

    __slots__ = ("_fd", "_path")
    direct = False

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    def pread(self, size: int, offset: int) -> bytes:
        found = os.pread(self._fd, size, offset)
        if len(found) == size or not found:
            return found
        parts = [found]
        got = len(found)
        while got < size:
            more = os.pread(self._fd, size - got, offset + got)
            if not more:
                break
            parts.append(more)
            got += len(more)
        return b"".join(parts)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        got = 0
        while got < len(buffer):
            more = os.preadv(self._fd, [buffer[got:]], offset + got)
            got += more
            if not more or (self.direct and got % DIRECT_ALIGNMENT):
                break
        return got

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        start = offset
        for first in range(0, len(buffers), _IOV_MAX):
            offset = self._pwrite_all(buffers[first : first + _IOV_MAX], offset)
        return offset - start

    def _pwrite_all(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes at most _IOV_MAX buffers; returns the offset after them."""
        total = sum(map(len, buffers))
        written = os.pwritev(self._fd, buffers, offset)
        if written < total:
            rest = memoryview(b"".join(buffers))[written:]
            while rest:
                done = os.pwrite(self._fd, rest, offset + total - len(rest))
                rest = rest[done:]
        return offset + total

    def fdatasync(self) -> None:
        os.fdatasync(self._fd)

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def advise_dontneed(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def advise_random(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DirectFile(SystemFile):
    """A file that was opened with O_DIRECT | O_DSYNC: one system call writes and syncs page-aligned memory without
    using the page cache."""

    __slots__ = ("_arena",)
    direct = True

    def __init__(self, fd: int, path: str) -> None:
        super().__init__(fd, path)
        self._arena = memoryview(b"")

    def pread(self, size: int, offset: int) -> bytes:
        """Reads like `File.pread`. The end of the file need not be at a page boundary."""
        arena = self._scratch(size)[:size]
        return bytes(arena[: self.pread_into(arena, offset)])

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        total = sum(map(len, buffers))
        first = buffers[0] if len(buffers) == 1 else b""
        if isinstance(first, memoryview) and isinstance(first.obj, mmap.mmap):
            view = first
        else:
            view = self._scratch(total)[:total]
            view[:] = b"".join(buffers)
        written = os.pwritev(self._fd, [view], offset)
        while written < total:
            written += os.pwritev(self._fd, [view[written:]], offset + written)
        return total

    def _scratch(self, size: int) -> memoryview:
        if len(self._arena) < size:
            self._arena = _arena(size)
        return self._arena


_LARGE_PAGE_BYTES = 2 << 20


def _arena(size: int) -> memoryview:
    """Returns page-aligned memory, in huge pages if the system has them and the memory fills at least half of one.

    A huge page is one piece of memory for the disk, not 512. Measured with direct reads of 2 MiB: 2.2 GB/s at 38 ms of
    processor time per GB; with small pages 0.96 GB/s at 93 ms.
    """
    if size < _LARGE_PAGE_BYTES // 2:
        return memoryview(_private(max(size, 1)))
    memory = _private(-(-size // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES + _LARGE_PAGE_BYTES)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _LARGE_PAGE_BYTES
    return memoryview(memory)[start : start + size]


def _private(size: int) -> mmap.mmap:
    """Maps private memory, because the pages of shared memory, Python's default, are always small."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class SystemFiles:
    """The implementation of `runtime.files.Files` with the operating system. Errors are `OSError`."""

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> SystemFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        if direct:
            flags |= os.O_DIRECT | os.O_DSYNC
        if create:
            flags |= os.O_CREAT
        if exclusive:
            flags |= os.O_EXCL
        return (DirectFile if direct else SystemFile)(PROCESS.open_file(path, flags, _FILE_MODE), path)

    def arena(self, size: int) -> memoryview:
        return _arena(size)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list_directory(self, path: str) -> list[str]:
        return sorted(PROCESS.list_directory(path))

    def make_directories(self, path: str) -> None:
        path = os.path.abspath(path)
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            try:
                os.mkdir(directory, _DIRECTORY_MODE)
            except FileExistsError:
                if not os.path.isdir(directory):
                    raise
            self.sync_directory(os.path.dirname(directory))

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        os.remove(path)

    def sync_directory(self, path: str) -> None:
        fd = PROCESS.open_file(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def disk_usage(self, path: str) -> tuple[int, int]:
        """Returns (total, free) bytes of the file system, as `df` shows them: blocks reserved for the superuser are not
        counted."""
        stat = os.statvfs(path)
        return (stat.f_blocks - stat.f_bfree + stat.f_bavail) * stat.f_frsize, stat.f_bavail * stat.f_frsize

    def lock(self, path: str) -> SystemFile:
        file = self.open(path, create=True)
        try:
            fcntl.flock(file._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        return file

    def die(self, reason: str) -> NoReturn:
        line = " ".join(reason.split())
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"magnetar: {line}; exiting at once\n".encode())
        os._exit(EXIT_DISK_FAILED)
