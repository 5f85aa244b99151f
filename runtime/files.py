"""Files: the interface between the store and a disk.

Every implementation guarantees: `fdatasync` makes durable all bytes that were written to that file before; a `pwrite`
of a file that was opened `direct` is durable when it returns; a new, renamed or removed name is durable after
`sync_directory` of its folder. Nothing else is durable. The simulated disk (`runtime/sim/files.py`) loses everything
else at a crash.
All calls are synchronous; a call that may wait for the disk is made from a `Worker` (runtime/threads.py).
Errors are `OSError`, as the system reports them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview

DIRECT_ALIGNMENT = 4096
"""Unit of offsets and sizes of reads and writes of a file that was opened `direct`."""


class File(Protocol):
    """An open file. Positions are absolute: there is no file cursor."""

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool:
        """Returns whether each write is durable when it returns."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Reads up to `size` bytes; fewer at the end of the file, `b""` after it."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer like `pread`; returns the number of bytes. For a `direct` file the buffer must be the start
        of an `arena`.
        """
        ...

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes all buffers one after the other at `offset`; returns the number of bytes, which is never short.

        A `direct` file writes a single buffer that is the start of an `arena` without a copy, and copies others into
        one.
        """
        ...

    def fdatasync(self) -> None: ...
    def allocate(self, size: int) -> None:
        """Reserves blocks and extends the file to `size` bytes (zeros), so that ENOSPC appears here."""
        ...

    def truncate(self, size: int) -> None: ...
    def size(self) -> int: ...
    def advise_dontneed(self) -> None:
        """Hints that the page cache need not keep this file."""
        ...

    def advise_random(self) -> None:
        """Hints that the kernel need not read ahead."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """The disk of a process."""

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> File:
        """Opens a file. `create` creates it if it does not exist; with `exclusive` an existing one raises
        FileExistsError.

        `direct`: without the page cache, and each write is synced. If the file system does not support that, this call
        or the first read or write of the file raises OSError with EINVAL or EOPNOTSUPP.
        """
        ...

    def arena(self, size: int) -> memoryview:
        """Returns zeroed memory that a `direct` file reads and writes without a copy."""
        ...

    def exists(self, path: str) -> bool: ...
    def list_directory(self, path: str) -> list[str]:
        """Returns the names in a folder, sorted."""
        ...

    def make_directories(self, path: str) -> None:
        """Creates the folder and its parents with mode 0700, and syncs each into its parent. An existing folder is no
        error.
        """
        ...

    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def disk_usage(self, path: str) -> tuple[int, int]:
        """Returns (total bytes, free bytes)."""
        ...

    def lock(self, path: str) -> File:
        """Locks a lock file exclusively. The lock ends when the returned file is closed or the process ends. Raises
        BlockingIOError if another process has locked the file."""
        ...

    def die(self, reason: str) -> None:
        """Ends the process at once (exit code 70) without flushing anything; for a failed fsync."""
        ...


def join_path(*parts: str) -> str:
    return os.path.join(*parts)
