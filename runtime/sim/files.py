"""A simulated process' files (`runtime.files.Files`): its view of a `Disk` (disk.py), dead with the process.

Behaves as runtime/disk.py: the same errors for the same mistakes. The disk decides what survives a crash.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..files import DIRECT_ALIGNMENT, Buffer
from .disk import ENTRY_BYTES, Directory, Disk, FileFault, NameChange, Operation, Resize, SimInode, Write, parts_of

__all__ = ["DeadProcess", "Disk", "FileFault", "Operation", "SimFile", "SimFiles", "SimulatedDeath"]


class SimulatedDeath(BaseException):
    """Raised where the simulated process ends: by `Files.die`, or by a crash within an operation. Only the simulation
    catches it.
    """


class DeadProcess(BaseException):
    """Raised when code of a dead process uses its world, although it must not run any more."""


class SimFile:
    """An open file (`runtime.files.File`)."""

    def __init__(
        self, files: SimFiles, path: str, inode: SimInode, *, write: bool, locked: bool = False, direct: bool = False
    ) -> None:
        self.direct = direct
        self._files = files
        self._path = path
        self._inode = inode
        self._write = write
        self._locked = locked
        self._closed = False

    @property
    def path(self) -> str:
        return self._path

    def pread(self, size: int, offset: int) -> bytes:
        self._check()
        self._files.disk.record_operation("pread", self._path, offset=offset, size=size, inode=self._inode.number)
        if offset < 0 or size < 0 or (self.direct and (offset % DIRECT_ALIGNMENT or size % DIRECT_ALIGNMENT)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        return self._inode.now.read(size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        found = self.pread(len(buffer), offset)
        buffer[: len(found)] = found
        return len(found)

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        more = offset + len(data) - self._inode.now.size
        self._operate("pwrite", writes=True, offset=offset, data=data, more_bytes=more)
        if offset < 0 or (self.direct and (offset % DIRECT_ALIGNMENT or len(data) % DIRECT_ALIGNMENT)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        if data:
            self._inode.apply(Write(offset, data))
        if self.direct:
            self._sync(len(data))  # a second operation: a crash between the two leaves any part of the write
        return len(data)

    def fdatasync(self) -> None:
        self._sync(0)

    def _sync(self, size: int) -> None:
        """Makes the content durable. `size`: the bytes of a direct write, which syncs itself; 0 for `fdatasync`."""
        try:
            self._operate("fdatasync", size=size)
        except OSError:
            self._inode.volatile.clear()  # as Linux: the pages count as clean, and no later sync writes them
            raise
        self._inode.sync()

    def allocate(self, size: int) -> None:
        self._operate("allocate", writes=True, size=size, more_bytes=size - self._inode.now.size)
        if size > self._inode.now.size:
            self._inode.apply(Resize(size))

    def truncate(self, size: int) -> None:
        self._operate("truncate", writes=True, size=size)
        if size < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._inode.apply(Resize(size))

    def size(self) -> int:
        self._check()
        return self._inode.now.size

    def advise_dontneed(self) -> None:
        self._check()

    def advise_random(self) -> None:
        self._check()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._files.is_alive and self._locked:
            self._files.disk.unlock(self._inode)

    def _check(self, *, writes: bool = False) -> None:
        self._files.check()
        if self._closed or (writes and not self._write):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)

    def _operate(
        self, kind: str, *, writes: bool = False, offset: int = 0, data: bytes = b"", size: int = 0, more_bytes: int = 0
    ) -> None:
        self._check(writes=writes)
        self._files.disk.record_operation(
            kind, self._path, offset=offset, data=data, size=size, inode=self._inode.number, more_bytes=more_bytes
        )


class SimFiles:
    """The files of one process on a `Disk`. `die` calls `on_death(reason)`. When `is_alive()` is False, every use
    raises DeadProcess.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        on_death: Callable[[str], None] = lambda reason: None,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.disk = disk
        self._on_death = on_death
        self._is_alive = is_alive

    @property
    def is_alive(self) -> bool:
        return self._is_alive()

    def check(self) -> None:
        if not self._is_alive():
            raise DeadProcess("files of a dead process")

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> SimFile:
        self.check()
        if direct and not self.disk.takes_direct:
            _fail(errno.EINVAL, path)
        node = self.disk.find(path)
        if isinstance(node, Directory):
            _fail(errno.EISDIR, path)
        if node is None and not create:
            _fail(errno.ENOENT, path)
        if node is not None and create and exclusive:
            _fail(errno.EEXIST, path)
        if node is None:
            node = self._create("create", path)
        else:
            self.disk.record_operation("open", path, inode=node.number)
        return SimFile(self, path, node, write=write, direct=direct)

    def arena(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def exists(self, path: str) -> bool:
        self.check()
        return self.disk.find(path) is not None

    def list_directory(self, path: str) -> list[str]:
        self.disk.raise_fault("list", path)
        return sorted(self._directory(path).now)

    def make_directories(self, path: str) -> None:
        self.check()
        directory, where = self.disk.root, "/"
        for part in parts_of(path):
            child = directory.now.get(part)
            if isinstance(child, SimInode):
                _fail(errno.ENOTDIR, path)
            if child is None:
                self.disk.record_operation("mkdir", os.path.join(where, part), more_bytes=ENTRY_BYTES)
                child = Directory()
                NameChange([], [(directory, part, child)]).apply_now()
                self.sync_directory(where)
            directory, where = child, os.path.join(where, part)

    def rename(self, old: str, new: str) -> None:
        self.check()
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        node = source.now.get(old_name)
        if node is None:
            _fail(errno.ENOENT, old)
        self.disk.record_operation("rename", old, target=new, inode=node.number if isinstance(node, SimInode) else 0)
        if source is target and old_name == new_name:
            return
        NameChange([(source, old_name, node)], [(target, new_name, node)]).apply_now()

    def remove(self, path: str) -> None:
        self.check()
        parent, name = self._parent(path)
        node = parent.now.get(name)
        if node is None:
            _fail(errno.ENOENT, path)
        if isinstance(node, Directory):
            _fail(errno.EISDIR, path)
        self.disk.record_operation("remove", path, inode=node.number)
        NameChange([(parent, name, node)], []).apply_now()

    def sync_directory(self, path: str) -> None:
        directory = self._directory(path)
        self.disk.record_operation("sync_directory", path)
        for change in directory.volatile:
            change.make_durable()
        directory.volatile.clear()

    def disk_usage(self, path: str) -> tuple[int, int]:
        self.check()
        return self.disk.capacity_bytes, max(0, self.disk.capacity_bytes - self.disk.used_bytes())

    def lock(self, path: str) -> SimFile:
        self.check()
        node = self.disk.find(path)
        if isinstance(node, Directory):
            _fail(errno.EISDIR, path)
        if node is None:
            node = self._create("create", path)
        self.disk.lock(node, path)
        self.disk.record_operation("lock", path, inode=node.number)
        return SimFile(self, path, node, write=True, locked=True)

    def die(self, reason: str) -> NoReturn:
        self.check()
        self._on_death(reason)
        raise SimulatedDeath(reason)

    # ------------------------------------------------------------------ inside
    def _create(self, kind: str, path: str) -> SimInode:
        parent, name = self._parent(path)
        number = self.disk.operations + 1
        self.disk.record_operation(kind, path, inode=number, more_bytes=ENTRY_BYTES)
        node = SimInode(number)
        NameChange([], [(parent, name, node)]).apply_now()
        return node

    def _directory(self, path: str) -> Directory:
        self.check()
        node = self.disk.find(path)
        if node is None:
            _fail(errno.ENOENT, path)
        if not isinstance(node, Directory):
            _fail(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        parts = parts_of(path)
        if not parts:
            _fail(errno.EISDIR, path)
        node = self.disk.find("/".join(parts[:-1]))
        if not isinstance(node, Directory):
            _fail(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node, parts[-1]


def _fail(number: int, path: str) -> NoReturn:
    """Raises the OSError of this number: FileNotFoundError, FileExistsError, …"""
    raise OSError(number, os.strerror(number), path)
