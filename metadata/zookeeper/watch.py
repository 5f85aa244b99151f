"""Watches on a ZooKeeper, which keeps no history: a watch gets all changes from a proved beginning, or Reset.

A watch *attaches*: it sets persistent recursive watches (on the folder of its prefix and on the prefix' own value),
then reads all versions below. The youngest change that this read finds (mzxid of values, pzxid of folders, of the
nearest folder above when a part of the prefix is missing) is the youngest of all. If it is not above the revision that
the reader has seen, and no event arrived meanwhile, no change was missed, and the watch continues. Otherwise the reader
gets one Reset. A broken connection ends ZooKeeper's watches; each watch attaches again.
While attached, every change is one event, and its version is counted from the version before. Answers and events have
one order (metadata/zookeeper/connection.py), so the read and an event never contradict each other.
A watch keeps at most WATCH_QUEUE_MAX changes that its reader has not taken; more become one Reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from ...proto.errors import ConnectionLost
from ..core import znodes
from ..core.rules import below
from ..session import WATCH_QUEUE_MAX
from ..store import ABSENT, Changed, Reset
from .connection import Answer, Event, EventKind, Missing, ZooKeeperConnection

LOOKED_AT_ONCE = 200
"""Znodes that are read together; a prefix has a few hundred at most (bookies, damaged or missing ledgers)."""


class TreeWatch:
    """The changes that one watch has received and its reader has not taken yet."""

    def __init__(self, prefix: str, seen: int) -> None:
        self.prefix = prefix
        self.seen = seen  # the reader has received all changes up to this revision, or they are in the queue
        self.attached = False  # to the current connection
        self.calm = True  # no event arrived since it began to attach
        self.versions: dict[str, int] = {}
        self.queue: deque[Changed | Reset] = deque()
        self.news = asyncio.Event()

    def begin(self) -> None:
        self.attached, self.calm = False, True
        self.versions.clear()

    def take(self, path: str, kind: int, revision: int) -> None:
        self.calm = False
        if kind == EventKind.DELETED:
            self.versions.pop(path, None)
        elif kind == EventKind.CREATED:
            self.versions[path] = 0
        elif path in self.versions:  # otherwise the read sets it
            self.versions[path] += 1
        if self.attached:
            version = ABSENT if kind == EventKind.DELETED else self.versions.get(path, 0)
            self._tell(Changed(path, version, revision))

    def looked(self, youngest: int, now: int) -> None:
        """Ends `begin`: from here on the watch receives every change above `now`."""
        self.attached = True
        if not (self.calm and youngest <= self.seen <= now):
            self._tell(Reset(now))

    def broken(self, heard: int) -> None:
        if self.attached:
            self.attached, self.seen = False, heard
        self.news.set()

    def _tell(self, change: Changed | Reset) -> None:
        self.queue.append(change)
        if len(self.queue) > WATCH_QUEUE_MAX:
            self.queue.clear()
            self.queue.append(Reset(change.revision))
        self.news.set()


class Watches:
    """The watches of one session."""

    def __init__(self, line: Callable[[], ZooKeeperConnection], root: str) -> None:
        self._line = line
        self._root = root
        self._watches: dict[int, TreeWatch] = {}
        self._number = 0
        self._connection = 0

    def on_event(self, event: Event) -> None:
        """Called in order with all answers of the connection."""
        if event.kind == EventKind.CHILD or not event.path.startswith(self._root + "/"):
            return
        path = znodes.key(event.path[len(self._root) :])
        if path is None:
            return
        revision = event.zxid if event.zxid > 0 else self._line().zxid
        for watch in self._watches.values():
            if below(watch.prefix, path):
                watch.take(path, event.kind, revision)

    def on_broken(self) -> None:
        self._connection += 1
        self.wake(self._line().zxid)

    def wake(self, heard: int) -> None:
        for watch in self._watches.values():
            watch.broken(heard)

    async def follow(
        self, prefix: str, after: int, ready: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[Changed | Reset]:
        """Yields changes for ever. `ready` is awaited before each attempt to attach, and may raise SessionExpired."""
        self._number += 1
        number, watch = self._number, TreeWatch(prefix, after)
        self._watches[number] = watch
        try:
            while True:
                while watch.queue:
                    yield watch.queue.popleft()
                watch.news.clear()
                if not watch.attached:
                    await ready()
                    await self._attach(watch)
                elif not watch.queue:
                    await watch.news.wait()
        finally:
            del self._watches[number]
            if watch.attached and all(other.prefix != prefix for other in self._watches.values()):
                for znode in self._watched(prefix):
                    self._line().unwatch(znode)

    def _watched(self, prefix: str) -> list[str]:
        folder = self._root + znodes.folder(prefix)
        return [folder] if prefix == "/" else [folder, self._root + znodes.value(prefix)]

    async def _attach(self, watch: TreeWatch) -> None:
        """Attaches a watch; `watch.attached` tells whether that succeeded. After a broken connection the next one
        attaches."""
        connection = self._connection
        watch.begin()
        try:
            line = self._line()
            line.sync(self._root)
            await asyncio.gather(*[line.watch(znode) for znode in self._watched(watch.prefix)])
            youngest = await _Look(line, self._root, watch).youngest()
        except ConnectionLost:
            return
        if connection == self._connection:
            watch.looked(youngest, line.zxid)


class _Look:
    """Reads all versions below a prefix into its watch, and finds the revision of the youngest change."""

    def __init__(self, line: ZooKeeperConnection, root: str, watch: TreeWatch) -> None:
        self._line = line
        self._root = root
        self._watch = watch
        self._youngest = 0
        self._several = asyncio.Semaphore(LOOKED_AT_ONCE)

    async def youngest(self) -> int:
        prefix = self._watch.prefix
        there = prefix == "/" or await self._value(prefix)
        there &= await self._folder(prefix)
        if not there:
            await self._above(prefix)
        return self._youngest

    async def _value(self, path: str) -> bool:
        def note(answer: Answer) -> None:
            if answer.value is None:
                self._watch.versions.pop(path, None)
            else:
                self._watch.versions[path] = answer.value.version
                self._youngest = max(self._youngest, answer.value.mzxid)

        async with self._several:
            return (await self._line.exists(self._root + znodes.value(path), note)).value is not None

    async def _folder(self, prefix: str) -> bool:
        try:
            async with self._several:
                names, stat = (await self._line.children(self._root + znodes.folder(prefix))).value
        except Missing:
            return False
        self._youngest = max(self._youngest, stat.pzxid)
        listed = znodes.Listed.of(names)
        above = "" if prefix == "/" else prefix
        await asyncio.gather(
            *[self._value(f"{above}/{segment}") for segment in listed.values],
            *[self._folder(f"{above}/{segment}") for segment in listed.below],
        )
        return True

    async def _above(self, prefix: str) -> None:
        """Learns from the pzxid of the nearest existing folder when a missing node may have been deleted."""
        for folder in reversed(["", *znodes.folders(prefix)]):
            stat = (await self._line.exists(self._root + folder)).value
            if stat is not None:
                self._youngest = max(self._youngest, stat.pzxid)
                return
