"""A file system in memory that forgets, at a power loss, what was not made durable; one per simulated node.

What is durable is exactly what runtime/files.py promises:
- *content*: `fdatasync` of a file makes its writes, truncations and allocations so far durable, and nothing else does;
- *names*: `sync_directory` of a folder makes the creations, renames and removals in it so far durable, and nothing else
  does, not even `fdatasync` of the new file. A rename is one step: after it either both names changed or none.

`Disk` is the hardware: it outlives processes. `SimFiles` is one process' view of it, and is dead with the process.
A process kill (`Disk.process_died`) loses nothing but locks and open files: the system's cache survives.
A power loss (`Disk.power_lost(rng)`) keeps what is durable; each later write is kept, dropped, or torn (each of its
512-byte sectors kept or dropped), each later operation on a name is kept or dropped: in any combination, which is more than real file
systems do, and all that a correct store may rely on.

Faults on purpose: `faults` (errors by operation and path), `capacity_bytes` (ENOSPC), `flip_bit`, `cut` (damage at rest),
`arm` (run something, for example a crash, at the n-th operation from now, *before* it happens). Every operation is given to
`record` as an `Operation`: crash-point enumeration (reference §6.5) builds its states from that log.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..files import Buffer
from .pages import Pages

SECTOR_BYTES = 512
ENTRY_BYTES = 4096
"""What a file or directory costs on the disk even when empty."""


class SimulatedDeath(BaseException):
    """The process ended here (`Files.die`, or a crash inside an operation). Nothing catches it but the simulation."""


class DeadProcess(BaseException):
    """Code of a dead process used its world: it must not be running any more."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a disk. `number` counts from 1 over the life of the disk."""

    number: int
    kind: str  # open create pread pwrite fdatasync allocate truncate rename remove sync_directory mkdir lock close
    path: str
    offset: int = 0
    data: bytes = b""
    size: int = 0
    target: str = ""  # of a rename


@dataclass(slots=True)
class FileFault:
    """Fails matching operations with an OSError; `skip` of them pass first, `times` of them fail (-1: all)."""

    kind: str
    contains: str = ""
    number: int = errno.EIO
    skip: int = 0
    times: int = 1

    def strikes(self, kind: str, path: str) -> bool:
        if self.kind != kind or self.contains not in path or self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1 if self.times > 0 else 0
        return True


@dataclass(frozen=True, slots=True)
class _Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Resize:
    size: int


class Inode:
    """A file's content: as seen (`now`), as it would be after a power loss (`durable`), and the changes between them."""

    __slots__ = ("durable", "now", "volatile")

    def __init__(self) -> None:
        self.now = Pages()
        self.durable = Pages()
        self.volatile: list[_Write | _Resize] = []

    def change(self, change: _Write | _Resize) -> None:
        _apply(self.now, change)
        self.volatile.append(change)

    def sync(self) -> None:
        for change in self.volatile:
            _apply(self.durable, change)
        self.volatile.clear()

    def power_lost(self, rng: random.Random) -> None:
        for change in self.volatile:
            match change:
                case _Resize():
                    if rng.random() < 0.5:
                        _apply(self.durable, change)
                case _Write():
                    for piece in _survivors(change, rng):
                        _apply(self.durable, piece)
        self.volatile.clear()
        self.now = self.durable.copy()


def _apply(pages: Pages, change: _Write | _Resize) -> None:
    match change:
        case _Write(offset, data):
            pages.write(data, offset)
        case _Resize(size):
            pages.resize(size)


def _survivors(write: _Write, rng: random.Random) -> list[_Write]:
    """What a power loss leaves of an unsynced write: all, nothing, the front, or any sectors of it."""
    fate = rng.randrange(4)
    if fate == 0:
        return [write]
    if fate == 1:
        return []
    pieces = []
    position = 0
    while position < len(write.data):
        end = min(len(write.data), (write.offset + position) // SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES - write.offset)
        pieces.append(_Write(write.offset + position, write.data[position:end]))
        position = end
    if fate == 2:
        return pieces[: rng.randrange(len(pieces) + 1)]
    return [piece for piece in pieces if rng.random() < 0.5]


class Directory:
    __slots__ = ("durable", "now", "volatile")

    def __init__(self) -> None:
        self.now: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.volatile: list[_NameChange] = []


Node = Inode | Directory


@dataclass(eq=False, slots=True)
class _NameChange:
    """`removed` names leave, `added` names arrive, at once; a rename is one change in one or two directories."""

    removed: list[tuple[Directory, str, Node]]
    added: list[tuple[Directory, str, Node]]
    done: bool = False

    def directories(self) -> list[Directory]:
        found: list[Directory] = []
        for directory, _, _ in self.removed + self.added:
            if not any(directory is other for other in found):
                found.append(directory)
        return found

    def apply_now(self) -> None:
        for directory, name, _ in self.removed:
            del directory.now[name]
        for directory, name, node in self.added:
            directory.now[name] = node
        for directory in self.directories():
            directory.volatile.append(self)

    def make_durable(self) -> None:
        """When an earlier change of the same name was lost, this one finds nothing to remove and is lost with it."""
        if self.done:
            return
        self.done = True
        if any(directory.durable.get(name) is not node for directory, name, node in self.removed):
            return
        for directory, name, _ in self.removed:
            del directory.durable[name]
        for directory, name, node in self.added:
            directory.durable[name] = node


class Disk:
    """The disk of one node. Paths are absolute or relative; both start at the one root."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.root = Directory()
        self.capacity_bytes = capacity_bytes
        self.faults: list[FileFault] = []
        self.record: Callable[[Operation], None] | None = None
        self.operations = 0
        self._locks: dict[int, Inode] = {}
        self._armed: tuple[int, Callable[[], None]] | None = None

    # ------------------------------------------------------------------ faults
    def arm(self, operations: int, strike: Callable[[], None]) -> None:
        """Calls `strike` before the `operations`-th operation from now (1: the next); it may raise SimulatedDeath."""
        assert operations >= 1
        self._armed = (self.operations + operations, strike)

    def disarm(self) -> None:
        self._armed = None

    def process_died(self) -> None:
        """Locks are gone; content and names stay as they were seen."""
        self._locks.clear()
        self.disarm()

    def power_lost(self, rng: random.Random) -> None:
        self.process_died()
        changes: list[_NameChange] = []
        inodes: list[Inode] = []
        for directory, _ in self._walk(self.root, "/"):
            changes += [change for change in directory.volatile if not change.done]
            seen = list(directory.now.values()) + list(directory.durable.values())
            inodes += [node for node in seen if isinstance(node, Inode)]
        for change in changes:
            if not change.done and rng.random() < 0.5:
                change.make_durable()
            change.done = True
        for inode in inodes:
            inode.power_lost(rng)
        for directory, _ in self._walk(self.root, "/"):
            directory.volatile.clear()
            directory.now = dict(directory.durable)

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Damage at rest: one bit of what is stored, seen and durable alike."""
        inode = self.inode(path)
        for pages in (inode.now, inode.durable):
            byte = pages.read(1, offset)
            if byte:
                pages.write(bytes([byte[0] ^ (1 << bit)]), offset)

    def cut(self, path: str, size: int) -> None:
        """Damage at rest: the file ends at `size`."""
        inode = self.inode(path)
        for pages in (inode.now, inode.durable):
            if pages.size > size:
                pages.resize(size)

    def wipe(self) -> None:
        """A new, empty disk."""
        self.root = Directory()
        self.process_died()

    # ------------------------------------------------------------------ looking (not operations of a process)
    def paths(self) -> list[str]:
        """Every file, sorted."""
        found = [
            os.path.join(where, name)
            for directory, where in self._walk(self.root, "/")
            for name, node in directory.now.items()
            if isinstance(node, Inode)
        ]
        return sorted(found)

    def inode(self, path: str) -> Inode:
        node = self.find(path)
        if not isinstance(node, Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def find(self, path: str) -> Node | None:
        node: Node = self.root
        for part in _parts(path):
            if not isinstance(node, Directory) or part not in node.now:
                return None
            node = node.now[part]
        return node

    def used_bytes(self) -> int:
        total = 0
        for directory, _ in self._walk(self.root, "/"):
            for node in directory.now.values():
                total += ENTRY_BYTES + (node.now.size if isinstance(node, Inode) else 0)
        return total

    def _walk(self, directory: Directory, where: str) -> list[tuple[Directory, str]]:
        found = [(directory, where)]
        for name in {**directory.durable, **directory.now}:
            for node in (directory.now.get(name), directory.durable.get(name)):
                if isinstance(node, Directory) and not any(node is other for other, _ in found):
                    found += self._walk(node, os.path.join(where, name))
        return found

    # ------------------------------------------------------------------ operations
    def operate(
        self, kind: str, path: str, *, offset: int = 0, data: bytes = b"", size: int = 0, target: str = ""
    ) -> None:
        """Counts, strikes, records: called by every operation before it takes effect."""
        self.operations += 1
        if self._armed is not None and self.operations >= self._armed[0]:
            strike = self._armed[1]
            self._armed = None
            strike()
        for fault in self.faults:
            if fault.strikes(kind, path):
                raise OSError(fault.number, os.strerror(fault.number), path)
        if self.record is not None:
            self.record(Operation(self.operations, kind, path, offset, data, size, target))

    def need(self, more_bytes: int, path: str) -> None:
        if more_bytes > 0 and self.used_bytes() + more_bytes > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def lock(self, inode: Inode, path: str) -> None:
        if id(inode) in self._locks:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
        self._locks[id(inode)] = inode

    def unlock(self, inode: Inode) -> None:
        self._locks.pop(id(inode), None)


class SimFile:
    """An open file (`runtime.files.File`)."""

    def __init__(self, files: SimFiles, path: str, inode: Inode, *, write: bool, locked: bool = False) -> None:
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
        self._operate("pread", offset=offset, size=size)
        if offset < 0 or size < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        return self._inode.now.read(size, offset)

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        self._operate("pwrite", writes=True, offset=offset, data=data)
        if offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._files.disk.need(offset + len(data) - self._inode.now.size, self._path)
        if data:
            self._inode.change(_Write(offset, data))
        return len(data)

    def fdatasync(self) -> None:
        self._operate("fdatasync")
        self._inode.sync()

    def allocate(self, size: int) -> None:
        self._operate("allocate", writes=True, size=size)
        if size > self._inode.now.size:
            self._files.disk.need(size - self._inode.now.size, self._path)
            self._inode.change(_Resize(size))

    def truncate(self, size: int) -> None:
        self._operate("truncate", writes=True, size=size)
        if size < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._inode.change(_Resize(size))

    def size(self) -> int:
        self._check()
        return self._inode.now.size

    def advise_dontneed(self) -> None:
        self._check()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._files.alive and self._locked:
            self._files.disk.unlock(self._inode)

    def _check(self, *, writes: bool = False) -> None:
        self._files.check()
        if self._closed or (writes and not self._write):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)

    def _operate(self, kind: str, *, writes: bool = False, offset: int = 0, data: bytes = b"", size: int = 0) -> None:
        self._check(writes=writes)
        self._files.disk.operate(kind, self._path, offset=offset, data=data, size=size)


class SimFiles:
    """One process' files (`runtime.files.Files`) on a `Disk`. `on_death(reason)` is told of `die`; `is_alive` ends it."""

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
    def alive(self) -> bool:
        return self._is_alive()

    def check(self) -> None:
        if not self._is_alive():
            raise DeadProcess("files of a dead process")

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> SimFile:
        self.check()
        node = self.disk.find(path)
        if isinstance(node, Directory):
            _fail(errno.EISDIR, path)
        if node is None and not create:
            _fail(errno.ENOENT, path)
        if node is not None and create and exclusive:
            _fail(errno.EEXIST, path)
        self.disk.operate("create" if node is None else "open", path)
        if node is None:
            node = self._create(path)
        return SimFile(self, path, node, write=write)

    def exists(self, path: str) -> bool:
        self.check()
        return self.disk.find(path) is not None

    def list_directory(self, path: str) -> list[str]:
        return sorted(self._directory(path).now)

    def make_directories(self, path: str) -> None:
        self.check()
        directory = self.disk.root
        for part in _parts(path):
            child = directory.now.get(part)
            if isinstance(child, Inode):
                _fail(errno.ENOTDIR, path)
            if child is None:
                self.disk.operate("mkdir", path)
                self.disk.need(ENTRY_BYTES, path)
                child = Directory()
                directory.now[part] = directory.durable[part] = child
            directory = child

    def rename(self, old: str, new: str) -> None:
        self.check()
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        node = source.now.get(old_name)
        if node is None:
            _fail(errno.ENOENT, old)
        self.disk.operate("rename", old, target=new)
        if source is target and old_name == new_name:
            return
        _NameChange([(source, old_name, node)], [(target, new_name, node)]).apply_now()

    def remove(self, path: str) -> None:
        self.check()
        parent, name = self._parent(path)
        node = parent.now.get(name)
        if node is None:
            _fail(errno.ENOENT, path)
        if isinstance(node, Directory):
            _fail(errno.EISDIR, path)
        self.disk.operate("remove", path)
        _NameChange([(parent, name, node)], []).apply_now()

    def sync_directory(self, path: str) -> None:
        directory = self._directory(path)
        self.disk.operate("sync_directory", path)
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
            node = self._create(path)
        self.disk.lock(node, path)
        self.disk.operate("lock", path)
        return SimFile(self, path, node, write=True, locked=True)

    def die(self, reason: str) -> NoReturn:
        self.check()
        self._on_death(reason)
        raise SimulatedDeath(reason)

    # ------------------------------------------------------------------ inside
    def _create(self, path: str) -> Inode:
        parent, name = self._parent(path)
        self.disk.need(ENTRY_BYTES, path)
        node = Inode()
        _NameChange([], [(parent, name, node)]).apply_now()
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
        parts = _parts(path)
        if not parts:
            _fail(errno.EISDIR, path)
        node = self.disk.find("/".join(parts[:-1]))
        if not isinstance(node, Directory):
            _fail(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node, parts[-1]


def _parts(path: str) -> list[str]:
    return [part for part in os.path.normpath(path).split("/") if part not in ("", ".")]


def _fail(number: int, path: str) -> NoReturn:
    """As the system does: FileNotFoundError, FileExistsError, …, by number."""
    raise OSError(number, os.strerror(number), path)
