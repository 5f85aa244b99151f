"""A disk in memory, one per simulated node. At a power loss it loses what was not made durable.

Durable is exactly what runtime/files.py guarantees:
- *content*: `fdatasync` of a file makes its writes, truncations and allocations so far durable, and nothing else does;
- *names*: `sync_directory` of a folder makes the creations, renames and removals in it so far durable, and nothing else
  does, not even `fdatasync` of the new file. A rename is one step: both names change or none.

`SimDisk` is the hardware: it outlives processes. `SimFiles` is the view that one process has of it. When a process dies
(`SimDisk.on_process_died`), only its locks and open files are lost: the system's cache survives. A power loss
(`SimDisk.on_power_lost`) keeps what is durable. Each later write is kept, dropped, or torn (each of its 512-byte
sectors kept or dropped), each later operation on a name is kept or dropped, in any combination. Real file systems lose
less, and a correct store may rely on no more.

Injected faults: `faults` (errors by operation and path), `capacity_bytes` (ENOSPC), `flip_bit`, `truncate_file` (damage
of stored bytes), `crash_at_operation` (a function that is called at the n-th operation from now, *before* it happens,
for example to crash). Every operation that takes effect is passed to `record` as a `DiskOperation`: crash-point
enumeration (tests/crashes) builds its states from that log.

`SimFiles` implements `runtime.files.Files` for one simulated process, and can no longer be used when the process has
died. It behaves like runtime/disk.py: the same mistakes raise the same errors.

Also in this file, below its heading: the content of a simulated file (pages).
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

from ..files import DIRECT_ALIGNMENT, Buffer

# --------------------------------------------------------------------------------------------------------- pages
# The content of a simulated file: sparse pages, so that a zero-filled gigabyte costs nothing.


FILE_PAGE_BYTES = 4096
_ZEROS = bytes(FILE_PAGE_BYTES)


class SimPages:
    """The content of a simulated file, in pages of FILE_PAGE_BYTES. `size`: of the file, in bytes. Pages that contain
    only zeros are not stored."""

    __slots__ = ("_pages", "size")

    def __init__(self, size: int = 0, pages: dict[int, bytes] | None = None) -> None:
        self.size = size
        self._pages: dict[int, bytes] = {} if pages is None else pages

    def copy(self) -> SimPages:
        """Returns an independent copy of the content."""
        return SimPages(self.size, dict(self._pages))

    def numbered_pages(self) -> ItemsView[int, bytes]:
        """Returns (page number from 0, content) of each stored page. A page of zeros is not stored."""
        return self._pages.items()

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes from `offset`; fewer at the end of the file, b"" after it."""
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        first, last = offset // FILE_PAGE_BYTES, (end - 1) // FILE_PAGE_BYTES
        if first == last:
            start = offset - first * FILE_PAGE_BYTES
            return self._pages.get(first, _ZEROS)[start : start + end - offset]
        joined = b"".join([self._pages.get(number, _ZEROS) for number in range(first, last + 1)])
        start = offset - first * FILE_PAGE_BYTES
        return joined[start : start + end - offset]

    def write(self, data: bytes, offset: int) -> None:
        """Writes `data` at `offset`, and extends the file if needed, with zeros before `offset`."""
        position = 0
        while position < len(data):
            number, start = divmod(offset + position, FILE_PAGE_BYTES)
            chunk = data[position : position + FILE_PAGE_BYTES - start]
            position += len(chunk)
            if len(chunk) < FILE_PAGE_BYTES:
                page = self._pages.get(number, _ZEROS)
                chunk = page[:start] + chunk + page[start + len(chunk) :]
            if chunk == _ZEROS:
                self._pages.pop(number, None)
            else:
                self._pages[number] = chunk
        self.size = max(self.size, offset + len(data))

    def resize(self, size: int) -> None:
        """Truncates the file, or extends it with zeros."""
        if size < self.size:
            number, start = divmod(size, FILE_PAGE_BYTES)
            for page in [page for page in self._pages if page > number or (page == number and start == 0)]:
                del self._pages[page]
            if start and number in self._pages:
                kept = self._pages[number][:start] + bytes(FILE_PAGE_BYTES - start)
                self._pages[number] = kept
        self.size = size


# ---------------------------------------------------------------------------------------------------------- disk


SECTOR_BYTES = 512
EMPTY_INODE_BYTES = 4096
"""The size on the disk of an empty file or directory."""


UNLIMITED_BYTES = 1 << 40
"""The capacity of a disk that is never full."""


class DiskOperation(NamedTuple):
    """One operation on a simulated disk, as it is recorded. `number` counts the operations since the disk was created,
    from 1; failed operations are counted too.

    `inode` identifies the file, whatever its name is now: it is the number of the operation that created the file.
    """

    number: int
    kind: str  # open create pread pwrite fdatasync allocate truncate rename remove sync_directory mkdir lock close
    path: str
    offset: int = 0
    data: bytes = b""
    size: int = 0
    target: str = ""  # of a rename
    inode: int = 0


@dataclass(slots=True)
class FileFault:
    """A fault that a test injects into a simulated disk: operations of this `kind` on a path that contains `contains`
    fail with OSError `number`. The first `skip` matching operations succeed, then `times` of them fail (-1: all)."""

    kind: str
    contains: str = ""
    number: int = errno.EIO
    skip: int = 0
    times: int = 1

    def matches(self, kind: str, path: str) -> bool:
        """Returns whether this operation must fail. Counts it, so it must be called once for each operation."""
        if self.kind != kind or self.contains not in path or self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1 if self.times > 0 else 0
        return True


@dataclass(frozen=True, slots=True)
class UnsyncedWrite:
    """A write to a simulated file that was not synced yet: `data` at `offset`."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class UnsyncedResize:
    """A change of a simulated file's size that was not synced yet."""

    size: int


class SimInode:
    """The content of a simulated file. `now`: the content that a read returns. `durable`: the content that certainly
    survives a power loss. `number`: of the operation that created the file. `volatile`: the unsynced changes between
    the two, in order."""

    __slots__ = ("durable", "now", "number", "volatile")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.now = SimPages()
        self.durable = SimPages()
        self.volatile: list[UnsyncedWrite | UnsyncedResize] = []

    def apply(self, change: UnsyncedWrite | UnsyncedResize) -> None:
        """Applies a change to the content that a read returns. It is not durable yet."""
        _apply(self.now, change)
        self.volatile.append(change)

    def sync(self) -> None:
        """Makes all changes of the file's content so far durable."""
        for change in self.volatile:
            _apply(self.durable, change)
        self.volatile.clear()

    def apply_power_loss(self, rng: random.Random) -> None:
        """Applies a power loss to this file: the durable content stays, and each unsynced change is kept, dropped or
        torn at random."""
        for change in self.volatile:
            match change:
                case UnsyncedResize():
                    if rng.random() < 0.5:
                        _apply(self.durable, change)
                case UnsyncedWrite():
                    for piece in _survivors(change, rng):
                        _apply(self.durable, piece)
        self.volatile.clear()
        self.now = self.durable.copy()


def _apply(pages: SimPages, change: UnsyncedWrite | UnsyncedResize) -> None:
    match change:
        case UnsyncedWrite(offset, data):
            pages.write(data, offset)
        case UnsyncedResize(size):
            pages.resize(size)


def _survivors(write: UnsyncedWrite, rng: random.Random) -> list[UnsyncedWrite]:
    """Returns what may remain of an unsynced write after a power loss: all, nothing, its beginning, or any of its
    sectors.
    """
    fate = rng.randrange(4)
    if fate == 0:
        return [write]
    if fate == 1:
        return []
    pieces = []
    position = 0
    while position < len(write.data):
        sector_end = ((write.offset + position) // SECTOR_BYTES + 1) * SECTOR_BYTES
        end = min(len(write.data), sector_end - write.offset)
        pieces.append(UnsyncedWrite(write.offset + position, write.data[position:end]))
        position = end
    if fate == 2:
        return pieces[: rng.randrange(len(pieces) + 1)]
    return [piece for piece in pieces if rng.random() < 0.5]


class SimDirectory:
    """A simulated directory: its names as a process sees them now (`now`), its names that survive a power loss
    (`durable`), and the changes of names between the two (`volatile`)."""

    __slots__ = ("durable", "now", "volatile")

    def __init__(self) -> None:
        self.now: dict[str, SimNode] = {}
        self.durable: dict[str, SimNode] = {}
        self.volatile: list[NameChange] = []


SimNode = SimInode | SimDirectory


@dataclass(eq=False, slots=True)
class NameChange:
    """One atomic change of names in directories: deletes the names in `removed`, and creates the names in `added`. A
    rename removes one name and adds one. `done`: it is durable, or it was lost at a power loss."""

    removed: list[tuple[SimDirectory, str, SimNode]]
    added: list[tuple[SimDirectory, str, SimNode]]
    done: bool = False

    def directories(self) -> list[SimDirectory]:
        """Returns the directories whose names change, each once."""
        found: list[SimDirectory] = []
        for directory, _, _ in self.removed + self.added:
            if not any(directory is other for other in found):
                found.append(directory)
        return found

    def apply_now(self) -> None:
        """Applies the change to the names that running processes see. It is not durable yet."""
        for directory, name, _ in self.removed:
            del directory.now[name]
        for directory, name, node in self.added:
            directory.now[name] = node
        for directory in self.directories():
            directory.volatile.append(self)

    def make_durable(self) -> None:
        """Makes this change durable. If an earlier change of the same name was lost, the name to remove does not exist,
        and this change is lost too."""
        if self.done:
            return
        self.done = True
        if any(directory.durable.get(name) is not node for directory, name, node in self.removed):
            return
        for directory, name, _ in self.removed:
            del directory.durable[name]
        for directory, name, node in self.added:
            directory.durable[name] = node


class SimDisk:
    """The simulated disk of one node. It has one root directory; absolute and relative paths both begin there.
    `operations`: the number of operations so far. `faults`: the faults that a test injects; `record` is called with
    each operation that takes effect. Methods that name a file raise FileNotFoundError if there is none."""

    def __init__(self, capacity_bytes: int = UNLIMITED_BYTES) -> None:
        self.root = SimDirectory()
        self.capacity_bytes = capacity_bytes
        self.takes_direct = False  # as on some file systems; a sync is then an operation of its own
        self.faults: list[FileFault] = []
        self.record: Callable[[DiskOperation], None] | None = None
        self.failed: Callable[[str, str], None] | None = None
        """Gets kind and path of each operation that `faults` made fail."""
        self.operations = 0
        self._locks: dict[int, SimInode] = {}
        self._armed: tuple[int, Callable[[], None]] | None = None

    # ------------------------------------------------------------------ faults
    def crash_at_operation(self, operations: int, strike: Callable[[], None]) -> None:
        """Sets a crash: the disk will call `strike` just before the `operations`-th operation from now (1: the next
        one). `strike` may raise SimulatedDeath. Replaces an earlier plan."""
        assert operations >= 1
        self._armed = (self.operations + operations, strike)

    def cancel_crash(self) -> None:
        """Cancels the crash that `crash_at_operation` planned."""
        self._armed = None

    def on_process_died(self) -> None:
        """Called when the process that used the disk has died. Releases the locks of the process, and cancels a planned
        crash. The files keep their names and their content, synced or not."""
        self._locks.clear()
        self.cancel_crash()

    def on_power_lost(self, rng: random.Random) -> None:
        """Called when the machine has lost power. Loses what was not synced: each unsynced write and change of a name
        survives or not, as `rng` decides. Releases all locks, and cancels a planned crash."""
        self.on_process_died()
        changes: list[NameChange] = []
        inodes: list[SimInode] = []
        for directory, _ in self._walk(self.root, "/"):
            changes += [change for change in directory.volatile if not change.done]
            seen = list(directory.now.values()) + list(directory.durable.values())
            inodes += [node for node in seen if isinstance(node, SimInode)]
        for change in changes:
            if not change.done and rng.random() < 0.5:
                change.make_durable()
            change.done = True
        for inode in inodes:
            inode.apply_power_loss(rng)
        for directory, _ in self._walk(self.root, "/"):
            directory.volatile.clear()
            directory.now = dict(directory.durable)

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Damages a file for a test: flips one bit (0: the lowest) of the byte at `offset`, in the content that is read
        and in the durable content. Does nothing after the end of the file."""
        inode = self.find_inode(path)
        for pages in (inode.now, inode.durable):
            byte = pages.read(1, offset)
            if byte:
                pages.write(bytes([byte[0] ^ (1 << bit)]), offset)

    def truncate_file(self, path: str, size: int) -> None:
        """Damages a file for a test: truncates it to `size` bytes, durably. A shorter file stays as it is."""
        inode = self.find_inode(path)
        for pages in (inode.now, inode.durable):
            if pages.size > size:
                pages.resize(size)

    def delete_everything(self) -> None:
        """Deletes all files and directories, as if the disk were replaced by a new one. Releases all locks, and cancels
        a planned crash."""
        self.root = SimDirectory()
        self.on_process_died()

    def take_snapshot(self) -> SimDirectory:
        """Returns a copy of the durable files and directories. `restore_snapshot` can put it back."""
        copied: dict[int, SimNode] = {}

        def copy(node: SimNode) -> SimNode:
            if id(node) in copied:
                return copied[id(node)]
            if isinstance(node, SimInode):
                inode = copied[id(node)] = SimInode(node.number)
                inode.now, inode.durable = node.durable.copy(), node.durable.copy()
                return inode
            directory = copied[id(node)] = SimDirectory()
            directory.durable = {name: copy(child) for name, child in node.durable.items()}
            directory.now = dict(directory.durable)
            return directory

        root = copy(self.root)
        assert isinstance(root, SimDirectory)
        return root

    def restore_snapshot(self, root: SimDirectory) -> None:
        """Replaces the content of the disk by `root`, a result of `take_snapshot`. No process may be using the disk.
        Cancels a planned crash."""
        self.root = root
        self.on_process_died()

    # ------------------------------------------------------------------ looking (not operations of a process)
    def list_paths(self) -> list[str]:
        """Returns the paths of all files, sorted."""
        found = [
            os.path.join(where, name)
            for directory, where in self._walk(self.root, "/")
            for name, node in directory.now.items()
            if isinstance(node, SimInode)
        ]
        return sorted(found)

    def find_inode(self, path: str) -> SimInode:
        """Returns the file at this path. Raises FileNotFoundError if there is none, or if it is a directory."""
        node = self.find_node(path)
        if not isinstance(node, SimInode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def find_node(self, path: str) -> SimNode | None:
        """Returns the file or directory at this path; None if there is none."""
        node: SimNode = self.root
        for part in split_path(path):
            found = node.now.get(part) if isinstance(node, SimDirectory) else None
            if found is None:
                return None
            node = found
        return node

    def used_bytes(self) -> int:
        """Returns how many bytes are used: the sizes of all files, and EMPTY_INODE_BYTES for each file and directory.
        """
        total = 0
        for directory, _ in self._walk(self.root, "/"):
            for node in directory.now.values():
                total += EMPTY_INODE_BYTES + (node.now.size if isinstance(node, SimInode) else 0)
        return total

    def _walk(self, directory: SimDirectory, where: str) -> list[tuple[SimDirectory, str]]:
        found = [(directory, where)]
        for name in {**directory.durable, **directory.now}:
            for node in (directory.now.get(name), directory.durable.get(name)):
                if isinstance(node, SimDirectory) and not any(node is other for other, _ in found):
                    found += self._walk(node, os.path.join(where, name))
        return found

    # ------------------------------------------------------------------ operations
    def record_operation(
        self, kind: str, path: str, *, offset: int = 0, data: bytes = b"", size: int = 0, target: str = "",
        inode: int = 0, more_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Counts and records an operation. Must be called before the operation takes effect. Calls `strike` if a crash
        is set for this operation (`crash_at_operation`). Raises an injected fault that matches the operation, or
        OSError (ENOSPC) if it needs `more_bytes` that the disk does not have."""
        self.operations += 1
        if self._armed is not None and self.operations >= self._armed[0]:
            strike = self._armed[1]
            self._armed = None
            strike()
        self.raise_injected_fault(kind, path)
        if more_bytes > 0:
            self._need(more_bytes, path)
        if self.record is not None:
            self.record(DiskOperation(self.operations, kind, path, offset, data, size, target, inode))

    def raise_injected_fault(self, kind: str, path: str) -> None:
        """Raises an OSError if an injected fault matches this operation. Operations that change nothing are not
        recorded, and call only this method."""
        for fault in self.faults:
            if fault.matches(kind, path):
                if self.failed is not None:
                    self.failed(kind, path)
                raise OSError(fault.number, os.strerror(fault.number), path)

    def _need(self, more_bytes: int, path: str) -> None:
        if self.capacity_bytes >= UNLIMITED_BYTES:
            return
        if self.used_bytes() + more_bytes > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def lock(self, inode: SimInode, path: str) -> None:
        """Locks the file. Raises BlockingIOError if it is locked."""
        if id(inode) in self._locks:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
        self._locks[id(inode)] = inode

    def unlock(self, inode: SimInode) -> None:
        """Releases the lock of the file, if it is locked."""
        self._locks.pop(id(inode), None)


@lru_cache(4096)
def split_path(path: str) -> tuple[str, ...]:
    """Returns the names of which a path consists, without empty ones and `.`."""
    return tuple(part for part in os.path.normpath(path).split("/") if part not in ("", "."))


__all__ = ["DeadProcess", "DiskOperation", "FileFault", "SimDisk", "SimFile", "SimFiles", "SimulatedDeath"]


class SimulatedDeath(BaseException):
    """Raised at the point where a simulated process ends: by `Files.end_process`, or by a crash during an operation.
    Only the simulation catches it."""


class DeadProcess(BaseException):
    """Raised when code of a simulated process that has died uses its world. Such code must not run any more."""


class SimFile:
    """An open file of a simulated disk; implements `runtime.files.File`."""

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
            self._inode.apply(UnsyncedWrite(offset, data))
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
            self._inode.apply(UnsyncedResize(size))

    def truncate(self, size: int) -> None:
        self._operate("truncate", writes=True, size=size)
        if size < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._inode.apply(UnsyncedResize(size))

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
    """The files of a simulated process, on its node's `SimDisk`. `end_process` calls `on_death(reason)`. When
    `is_alive()` is False, every method raises DeadProcess."""

    def __init__(
        self,
        disk: SimDisk,
        *,
        on_death: Callable[[str], None] = lambda reason: None,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.disk = disk
        self._on_death = on_death
        self._is_alive = is_alive

    @property
    def is_alive(self) -> bool:
        """Returns whether the process is alive."""
        return self._is_alive()

    def check(self) -> None:
        """Raises DeadProcess if the process is dead."""
        if not self._is_alive():
            raise DeadProcess("files of a dead process")

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> SimFile:
        self.check()
        if direct and not self.disk.takes_direct:
            _fail(errno.EINVAL, path)
        node = self.disk.find_node(path)
        if isinstance(node, SimDirectory):
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

    def allocate_buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def exists(self, path: str) -> bool:
        self.check()
        return self.disk.find_node(path) is not None

    def list_directory(self, path: str) -> list[str]:
        self.disk.raise_injected_fault("list", path)
        return sorted(self._directory(path).now)

    def make_directories(self, path: str) -> None:
        self.check()
        directory, where = self.disk.root, "/"
        for part in split_path(path):
            child = directory.now.get(part)
            if isinstance(child, SimInode):
                _fail(errno.ENOTDIR, path)
            if child is None:
                self.disk.record_operation("mkdir", os.path.join(where, part), more_bytes=EMPTY_INODE_BYTES)
                child = SimDirectory()
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
        if isinstance(node, SimDirectory):
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
        node = self.disk.find_node(path)
        if isinstance(node, SimDirectory):
            _fail(errno.EISDIR, path)
        if node is None:
            node = self._create("create", path)
        self.disk.record_operation("lock", path, inode=node.number)
        self.disk.lock(node, path)
        return SimFile(self, path, node, write=True, locked=True)

    def end_process(self, reason: str) -> NoReturn:
        self.check()
        self._on_death(reason)
        raise SimulatedDeath(reason)

    # ------------------------------------------------------------------ inside
    def _create(self, kind: str, path: str) -> SimInode:
        parent, name = self._parent(path)
        number = self.disk.operations + 1
        self.disk.record_operation(kind, path, inode=number, more_bytes=EMPTY_INODE_BYTES)
        node = SimInode(number)
        NameChange([], [(parent, name, node)]).apply_now()
        return node

    def _directory(self, path: str) -> SimDirectory:
        self.check()
        node = self.disk.find_node(path)
        if node is None:
            _fail(errno.ENOENT, path)
        if not isinstance(node, SimDirectory):
            _fail(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[SimDirectory, str]:
        parts = split_path(path)
        if not parts:
            _fail(errno.EISDIR, path)
        node = self.disk.find_node("/".join(parts[:-1]))
        if not isinstance(node, SimDirectory):
            _fail(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node, parts[-1]


def _fail(number: int, path: str) -> NoReturn:
    """Raises the OSError of this number: FileNotFoundError, FileExistsError, …"""
    raise OSError(number, os.strerror(number), path)
