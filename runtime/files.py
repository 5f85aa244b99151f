"""Files: the interface between the store and a disk.

Every implementation guarantees these rules; nothing else is durable:
- `fdatasync` makes all bytes durable that were written to that file before.
- A `pwrite` of a file that was opened `direct` is durable when it returns.
- A new, renamed or removed name is durable after `sync_directory` of its folder.

The simulated disk (`runtime/sim/disk.py`) loses everything else at a crash of its machine. All calls are synchronous; a
call that may wait for the disk is made from a `Worker` (runtime/tasks.py). Errors are `OSError`, as the system reports
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview

DIRECT_ALIGNMENT = 4096
"""Unit of offsets and sizes of reads and writes of a file that was opened `direct`."""


class File(Protocol):
    """An open file. Every read and write names its absolute position, because there is no file cursor. Every method
    except `close` raises OSError if the system refuses, or if the file is closed."""

    @property
    def path(self) -> str:
        """The path of the file."""
        ...

    @property
    def direct(self) -> bool:
        """Returns whether the file is opened for direct writes: each write is durable when it returns."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes from `offset`: fewer at the end of the file, `b""` after the end."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer with bytes from `offset`, and returns how many there were (fewer at the end of the file).
        For a `direct` file the buffer must be the start of one that `allocate_buffer` made."""
        ...

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes all buffers, one after the other, at `offset`. Returns the number of bytes, which are always all of
        them. A `direct` file writes a single buffer that is the start of one from `allocate_buffer` without a copy, and
        copies other buffers into one."""
        ...

    def fdatasync(self) -> None:
        """Makes all bytes that were written to the file durable. Raises OSError if the disk fails."""
        ...

    def allocate(self, size: int) -> None:
        """Extends the file to `size` bytes (with zeros) and reserves the blocks for them, so that a full disk (ENOSPC)
        is noticed here and not by a later write."""
        ...

    def truncate(self, size: int) -> None:
        """Sets the size of the file to `size` bytes; a larger size adds zeros."""
        ...

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        ...

    def advise_dontneed(self) -> None:
        """Tells the kernel that the page cache need not keep the content of this file."""
        ...

    def advise_random(self) -> None:
        """Tells the kernel not to read ahead in this file."""
        ...

    def close(self) -> None:
        """Closes the file, without a sync. May be called twice."""
        ...


class Files(Protocol):
    """The file system as a process sees it: opens, lists, renames, removes and locks files. Every method except
    `exists` and `allocate_buffer` raises OSError if the system refuses."""

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> File:
        """Opens a file, for reading alone if not `write`. If it does not exist, raises FileNotFoundError, or with
        `create` creates it; with `create` and `exclusive`, raises FileExistsError if it exists. `direct`:
        without the page cache, and each write is synced. If the file system does not support that, this call or the
        first read or write of the file raises OSError with EINVAL or EOPNOTSUPP."""
        ...

    def allocate_buffer(self, size: int) -> memoryview:
        """Returns a buffer of `size` zero bytes, aligned so that a `direct` file reads and writes it without a copy."""
        ...

    def exists(self, path: str) -> bool:
        """Returns whether a file or a folder has this path."""
        ...

    def list_directory(self, path: str) -> list[str]:
        """Returns the sorted names of the files and folders in a folder. Raises OSError if there is no such folder."""
        ...

    def make_directories(self, path: str) -> None:
        """Creates a folder and its missing parents with mode 0700, and syncs each new one into its parent. Does nothing
        if the folder exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Renames a file, and replaces a file that has the name `new`. Durable after `sync_directory` of the folders.
        """
        ...

    def remove(self, path: str) -> None:
        """Removes a file. Durable after `sync_directory`. Raises FileNotFoundError if there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """Makes all earlier creations, renames and removals of names in this directory durable."""
        ...

    def disk_usage(self, path: str) -> tuple[int, int]:
        """Returns (total bytes, free bytes) of the file system that contains `path`."""
        ...

    def lock(self, path: str) -> File:
        """Locks the file `path` exclusively, and returns it open. The lock ends when the returned file is closed or the
        process ends. Raises BlockingIOError if another process has locked the file."""
        ...

    def end_process(self, reason: str) -> None:
        """Ends the process at once (exit code 70) without flushing anything; never returns. Called after a failed
        fsync, when the content of files is not known any more."""
        ...


def join_path(*parts: str) -> str:
    """Returns the parts joined to one path, as `os.path.join` does."""
    return os.path.join(*parts)
