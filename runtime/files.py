"""Files: the seam between the store and a disk.

The promise of every implementation: `fdatasync` makes the bytes written to that file so far durable; a `pwrite` of a
file that was opened `direct` is durable when it returns; a new, renamed or removed name is durable after
`sync_directory` of its folder; nothing else is. The simulated form
(`runtime/sim/files.py`) forgets at a crash whatever was not made durable.
All calls are synchronous: those that may wait for the disk are made from a `Worker` (runtime/workers.py).
Errors are `OSError`, as the system reports them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview

DIRECT_ALIGNMENT = 4096
"""Offsets and sizes of reads and writes of a file that was opened `direct` are multiples of this."""


class File(Protocol):
    """An open file. Positions are absolute: there is no cursor."""

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool:
        """Whether it was opened so: each write is durable when it returns."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file, `b""` after it."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer and returns how much it is, as `pread`. Of a `direct` file it begins with an `arena`."""
        ...

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes all buffers one after the other at `offset` and returns their total size; never short.

        A `direct` file takes one buffer that begins with an `arena` as it is, and copies anything else into one.
        """
        ...

    def fdatasync(self) -> None: ...
    def allocate(self, size: int) -> None:
        """Reserves blocks and extends the file to `size` bytes (zeros), so that ENOSPC appears here."""
        ...

    def truncate(self, size: int) -> None: ...
    def size(self) -> int: ...
    def advise_dontneed(self) -> None:
        """Hint: the page cache may forget this file."""
        ...

    def advise_random(self) -> None:
        """Hint: nothing is to be read beyond what is asked for."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> File:
        """`create`: make it when absent (`exclusive`: fail with FileExistsError when present).

        `direct`: past the page cache, each write synced. Where the file system does not do that, this or the first
        read or write of the file fails with EINVAL or EOPNOTSUPP.
        """
        ...

    def arena(self, size: int) -> memoryview:
        """Memory that a `direct` file reads and writes without a copy, zeros at first."""
        ...

    def exists(self, path: str) -> bool: ...
    def list_directory(self, path: str) -> list[str]:
        """Names, sorted."""
        ...

    def make_directories(self, path: str) -> None:
        """With parents, mode 0700, each new one synced into its parent; fine when it exists."""
        ...

    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def disk_usage(self, path: str) -> tuple[int, int]:
        """(total bytes, free bytes)."""
        ...

    def lock(self, path: str) -> File:
        """An exclusive lock on a lock file, held until closed or the process dies; raises BlockingIOError."""
        ...

    def die(self, reason: str) -> None:
        """Ends the process at once (exit code 70), flushing nothing: what to do after a failed fsync."""
        ...


def join(*parts: str) -> str:
    return os.path.join(*parts)
