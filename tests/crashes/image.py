"""What a power loss may leave of a disk: built from a log of operations, at every prefix of it.

An `Image` follows a log. It holds what is durable after the operations so far (contents by inode, names, folders) and,
in order, what is not: `volatile`, a list of `Change`s to contents and names. A *state* is the durable part and any
choice among the volatile one, in their order; a write may also be torn. That is more than real file systems do, and all
that a correct store may rely on (runtime/files.py). Which choices are tried: `cuts`.

`removed`: sync sites (tests/crashes/sites.py) whose syncs make nothing durable: the negative control.

A state becomes a disk by `Image.disk`: pages are shared with the image until somebody writes (copy on write), and
the disk only keeps what is seen, not what is durable: that is followed by another Image, from the log of the start.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple

from magnetar.runtime.sim.disk import (
    SECTOR_BYTES,
    DiskOperation,
    SimDirectory,
    SimDisk,
    SimInode,
    SimPages,
    UnsyncedResize,
    UnsyncedWrite,
    split_path,
)
from tests.bookie.stores import JOURNAL
from tests.crashes.sites import WRITE_BACK

ALL_SUBSETS_MAX = 5
"""Of so many volatile changes every choice is tried; of more each alone, each missing, and"""
RANDOM_SUBSETS = 32
"""of them at random."""
RANDOM_BYTE_CUTS = 8
RANDOM_DISK_CUTS = 8
MUTATING = frozenset(
    ("create", "pwrite", "allocate", "truncate", "rename", "remove", "mkdir", "fdatasync", "sync_directory")
)


class Step(NamedTuple):
    """An operation, and for a sync the site that asked for it."""

    operation: DiskOperation
    site: str = ""


class Content(NamedTuple):
    """A change to what a file holds."""

    number: int  # of the operation
    inode: int
    change: UnsyncedWrite | UnsyncedResize


class Names(NamedTuple):
    """A change to names: `removed` leave, `added` arrive, at once. Folders have the inode of their mkdir."""

    number: int
    removed: tuple[tuple[str, int], ...]
    added: tuple[tuple[str, int], ...]


Change = Content | Names


class Cut(NamedTuple):
    """Which volatile changes survive: their places in `Image.volatile`; the last of them only in pieces."""

    name: str
    kept: tuple[int, ...]
    torn: tuple[tuple[int, int], ...] = ()  # (from, to) of the last kept write's bytes


class State(NamedTuple):
    """What is on the disk after a power loss. Pages are shared: nobody may change them."""

    names: dict[str, int]
    folders: frozenset[str]
    pages: dict[int, SimPages]
    operations: int

    def key(self) -> int:
        """Equal states have equal keys (within one process)."""
        files = [
            (path, self.pages[inode].size, frozenset(self.pages[inode].numbered_pages()))
            for path, inode in self.names.items()
        ]
        return hash((frozenset(files), self.folders))

    def disk(self) -> SimDisk:
        disk = SimDisk()
        disk.operations = self.operations
        folders = {"/": disk.root}
        for path in sorted(self.folders):
            folders[path] = folder = PlainDirectory()
            parent, name = os.path.split(path)
            folders[parent].now[name] = folder
        for path, inode in self.names.items():
            parent, name = os.path.split(path)
            folders[parent].now[name] = SharedInode(inode, self.pages[inode])
        return disk


class PlainDirectory(SimDirectory):
    """Only what is seen."""

    __slots__ = ()


class SharedInode(SimInode):
    """A file whose pages belong to somebody else until it is changed. Only what is seen."""

    __slots__ = ("_shared",)

    def __init__(self, number: int, pages: SimPages) -> None:
        super().__init__(number)
        self.now = pages
        self._shared = True

    def apply(self, change: UnsyncedWrite | UnsyncedResize) -> None:
        if self._shared:
            self.now = self.now.copy()
            self._shared = False
        apply(self.now, change)

    def sync(self) -> None:
        return


def apply(pages: SimPages, change: UnsyncedWrite | UnsyncedResize) -> None:
    match change:
        case UnsyncedWrite(offset, data):
            pages.write(data, offset)
        case UnsyncedResize(size):
            pages.resize(size)


class Image:
    """Follows a log of operations; see the module."""

    def __init__(self, state: State | None = None, removed: Collection[str] = ()) -> None:
        self._removed = {WRITE_BACK, *removed}
        self._now: dict[str, int] = dict(state.names) if state else {}
        self._durable: dict[str, int] = dict(state.names) if state else {}
        self._folders: dict[str, None] = dict.fromkeys(sorted(state.folders)) if state else {}
        self._pages: dict[int, SimPages] = dict(state.pages) if state else {}
        self._sizes = {inode: pages.size for inode, pages in self._pages.items()}
        self._owned: set[int] = set()
        self._apart = {inode for path, inode in self._now.items() if path.startswith(JOURNAL)}  # on the second disk
        self._alone: dict[int, None] = {}  # direct writes whose own sync was removed: that of the next does not help
        self.volatile: list[Change] = []
        self.operations = state.operations if state else 0

    # ------------------------------------------------------------------------------------ following
    def follow(self, step: Step) -> None:
        operation = step.operation
        self.operations = operation.number
        inode = operation.inode
        match operation.kind:
            case "pwrite":
                if operation.data:
                    self._change(Content(operation.number, inode, UnsyncedWrite(operation.offset, operation.data)))
            case "allocate":
                if operation.size > self._sizes[inode]:
                    self._change(Content(operation.number, inode, UnsyncedResize(operation.size)))
            case "truncate":
                self._change(Content(operation.number, inode, UnsyncedResize(operation.size)))
            case "fdatasync":
                if step.site not in self._removed:
                    self._sync(inode, () if operation.size == 0 else self._alone)
                elif operation.size:
                    self._alone[operation.number - 1] = None
            case "create":
                self._pages[inode] = SimPages()
                self._sizes[inode] = 0
                if _absolute(operation.path).startswith(JOURNAL):
                    self._apart.add(inode)
                self._rename(operation.number, (), ((_absolute(operation.path), inode),))
            case "mkdir":
                self._rename(operation.number, (), ((_absolute(operation.path), operation.number),))
            case "rename":
                old, new = _absolute(operation.path), _absolute(operation.target)
                self._rename(operation.number, ((old, inode),), ((new, inode),))
            case "remove":
                self._rename(operation.number, ((_absolute(operation.path), inode),), ())
            case "sync_directory":
                if step.site not in self._removed:
                    self._sync_folder(_absolute(operation.path))

    def _change(self, content: Content) -> None:
        size = self._sizes[content.inode]
        match content.change:
            case UnsyncedWrite(offset, data):
                self._sizes[content.inode] = max(size, offset + len(data))
            case UnsyncedResize(new):
                self._sizes[content.inode] = new
        self.volatile.append(content)

    def _rename(self, number: int, removed: tuple[tuple[str, int], ...], added: tuple[tuple[str, int], ...]) -> None:
        for path, _ in removed:
            del self._now[path]
        for path, inode in added:
            self._now[path] = inode
        self.volatile.append(Names(number, removed, added))

    def _sync(self, inode: int, but: Container[int]) -> None:
        kept: list[Change] = []
        for change in self.volatile:
            if isinstance(change, Content) and change.inode == inode and change.number not in but:
                if inode not in self._owned:
                    self._pages[inode] = self._pages[inode].copy()
                    self._owned.add(inode)
                apply(self._pages[inode], change.change)
            else:
                kept.append(change)
        self.volatile = kept

    def _sync_folder(self, folder: str) -> None:
        kept: list[Change] = []
        for change in self.volatile:
            if isinstance(change, Names) and any(
                os.path.dirname(path) == folder for path, _ in change.removed + change.added
            ):
                _apply_names(self._durable, change)
            else:
                kept.append(change)
        self.volatile = kept

    # ------------------------------------------------------------------------------------ states
    def state(self, cut: Cut) -> State:
        """The durable part, and of the volatile one what the cut keeps. The state's pages are not changed any more."""
        names = dict(self._durable)
        pages = self._pages
        changed: dict[int, SimPages] = {}
        for at in cut.kept:
            change = self.volatile[at]
            if isinstance(change, Names):
                _apply_names(names, change)
                continue
            found = changed.get(change.inode)
            if found is None:
                found = changed[change.inode] = pages[change.inode].copy()
            if cut.torn and at == cut.kept[-1]:
                assert isinstance(change.change, UnsyncedWrite)
                for first, last in cut.torn:
                    found.write(change.change.data[first:last], change.change.offset + first)
            else:
                apply(found, change.change)
        self._owned.clear()  # what is synced from now on goes into a copy
        folders = {path for path, inode in names.items() if inode not in pages} | set(self._folders)
        folders = {path for path in folders if _reachable(path, folders)}
        files = {path: inode for path, inode in names.items() if inode in pages and os.path.dirname(path) in folders}
        used = {inode: changed.get(inode) or pages[inode] for inode in files.values()}
        return State(files, frozenset(folders), used, self.operations)

    def cuts(self, rng: random.Random) -> Iterator[Cut]:
        """The choices that are tried here, the most telling ones first. The same for the same `rng`."""
        count = len(self.volatile)
        everything = tuple(range(count))
        yield Cut("none", ())
        if not count:
            return
        yield Cut("all", everything)
        if count > 1:
            for at in everything:
                yield Cut(f"without{at}", everything[:at] + everything[at + 1 :])
        if 2 < count <= ALL_SUBSETS_MAX:
            for mask in range(1, (1 << count) - 1):
                if mask.bit_count() != count - 1:
                    yield Cut(f"subset{mask}", tuple(at for at in everything if mask >> at & 1))
        elif count > ALL_SUBSETS_MAX:
            for at in everything:
                yield Cut(f"only{at}", (at,))
            for i in range(RANDOM_SUBSETS):
                yield Cut(f"subset{i}", tuple(at for at in everything if rng.random() < 0.5))
        yield from self._by_disk(rng)
        yield from self._torn(rng)

    def _by_disk(self, rng: random.Random) -> Iterator[Cut]:
        """With two disks: all of the one and nothing of the other, and so much of each in its order."""
        disks: tuple[list[int], list[int]] = [], []
        for at, change in enumerate(self.volatile):
            disks[self._is_apart(change)].append(at)
        if not all(disks):
            return
        for number, disk in enumerate(disks):
            yield Cut(f"disk{number}", tuple(disk))
        for i in range(RANDOM_DISK_CUTS):
            kept = [at for disk in disks for at in disk[: rng.randrange(len(disk) + 1)]]
            yield Cut(f"disks{i}", tuple(sorted(kept)))

    def _is_apart(self, change: Change) -> bool:
        if isinstance(change, Content):
            return change.inode in self._apart
        return any(path.startswith(JOURNAL) for path, _ in change.removed + change.added)

    def _torn(self, rng: random.Random) -> Iterator[Cut]:
        """The last write (of those not synced) in pieces: cut at sectors and anywhere, and any of its sectors."""
        writes = [
            at
            for at, change in enumerate(self.volatile)
            if isinstance(change, Content) and isinstance(change.change, UnsyncedWrite)
        ]
        if not writes:
            return
        last = writes[-1]
        change = self.volatile[last]
        assert isinstance(change, Content)
        assert isinstance(change.change, UnsyncedWrite)
        length = len(change.change.data)
        before = tuple(at for at in range(last))
        sectors = list(_sectors(change.change.offset, length))
        for _, end in sectors[:-1]:
            yield Cut(f"torn{end}", (*before, last), ((0, end),))
        for i in range(RANDOM_BYTE_CUTS if length > 1 else 0):
            yield Cut(f"torn-bytes{i}", (*before, last), ((0, rng.randrange(1, length)),))
        for i in range(RANDOM_BYTE_CUTS if len(sectors) > 2 else 0):
            pieces = tuple(sector for sector in sectors if rng.random() < 0.5)
            yield Cut(f"torn-sectors{i}", (*before, last) if pieces else before, pieces)


def _sectors(offset: int, length: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < length:
        end = min(length, ((offset + start) // SECTOR_BYTES + 1) * SECTOR_BYTES - offset)
        yield start, end
        start = end


def _apply_names(names: dict[str, int], change: Names) -> None:
    """When an earlier change of the same name was lost, this one finds nothing to remove and is lost with it."""
    if any(names.get(path) != inode for path, inode in change.removed):
        return
    for path, _ in change.removed:
        del names[path]
    names.update(change.added)


def _reachable(path: str, folders: Collection[str]) -> bool:
    parent = os.path.dirname(path)
    return parent == "/" or (parent in folders and _reachable(parent, folders))


def _absolute(path: str) -> str:
    return "/" + "/".join(split_path(path))


def points(steps: Sequence[Step]) -> Iterator[int]:
    """Where a crash may strike: before every step that changes anything, and after the last."""
    for at, step in enumerate(steps):
        if step.operation.kind in MUTATING:
            yield at
    yield len(steps)


def cuts_of(image: Image, name: str) -> Iterator[Cut]:
    """The cuts that are tried at the crash point of this name: the same each time. Each is made when it is asked for:
    the image must not follow another step before."""
    return image.cuts(random.Random(name))


def cut_named(image: Image, name: str, cut: str) -> Cut:
    for found in cuts_of(image, name):
        if found.name == cut:
            return found
    raise ValueError(f"{name} has no cut {cut}")
