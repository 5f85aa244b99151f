"""The times at which minor and major compaction are due, also for a bookie that is restarted more often than that.

    due()                 (minor, major): the interval since the last complete one is over
    ran(minor, major)     just now; durable in the note `gc` of the data directory (format/note.py, magic "MGN-GCOL")
    load()                reads the note, before the first pass of a process

    note body = {"minor_ms": time of day, "major_ms": time of day}

A running process measures with the monotonic clock; the times of the note count at a start only. A time in the future
means that the clock was wrong then or is wrong now. It is taken as long ago: that costs one early compaction, and the
other guess could delay compaction for ever. Without a note, or with a damaged one, the intervals begin with the start,
which writes the note; its loss costs no more than that. Guarded by tests/bookie/maintenance/test_schedule.py.
"""

from __future__ import annotations

import logging

import msgspec

from ...proto.errors import NewerFormat
from ...runtime.files import join
from ...runtime.world import World
from ..format import note
from ..format.framing import Damaged
from ..store import disk

_LOG = logging.getLogger("magnetar.bookie.maintenance")

NOTE = "gc"
MAGIC = b"MGN-GCOL"


class Times(msgspec.Struct, frozen=True):
    """The times of day of the last compactions, in ms."""

    minor_ms: int
    major_ms: int


class Schedule:
    """The times at which minor and major compaction are due, durable in a note of the data directory."""

    def __init__(self, world: World, directory: str, pass_s: float, minor_s: float, major_s: float) -> None:
        self._world = world
        self._directory = directory
        self._worker = world.workers.start("bookie-gc")
        self.pass_s = pass_s
        self._minor_s = minor_s
        self._major_s = major_s
        now = world.clock.monotonic()
        self._minor_due, self._major_due = now + minor_s, now + major_s
        self._times = Times(world.clock.wall_ms(), world.clock.wall_ms())

    async def load(self) -> None:
        found = await self._worker.run(self._read)
        if found is None:
            await self._save()
            return
        self._times = found
        self._minor_due = self._due_at(found.minor_ms, self._minor_s)
        self._major_due = self._due_at(found.major_ms, self._major_s)

    def _due_at(self, last_ms: int, interval_s: float) -> float:
        elapsed_s = (self._world.clock.wall_ms() - last_ms) / 1000
        left_s = interval_s - elapsed_s if elapsed_s >= 0 else 0.0
        return self._world.clock.monotonic() + max(0.0, left_s)

    def due(self) -> tuple[bool, bool]:
        now = self._world.clock.monotonic()
        return now >= self._minor_due, now >= self._major_due

    async def ran(self, *, minor: bool, major: bool) -> None:
        if not minor and not major:
            return
        now, wall_ms = self._world.clock.monotonic(), self._world.clock.wall_ms()
        if minor:
            self._minor_due = now + self._minor_s
            self._times = msgspec.structs.replace(self._times, minor_ms=wall_ms)
        if major:
            self._major_due = now + self._major_s
            self._times = msgspec.structs.replace(self._times, major_ms=wall_ms)
        await self._save()

    async def close(self) -> None:
        await self._worker.close()

    def _read(self) -> Times | None:
        path = join(self._directory, NOTE)
        if not self._world.files.exists(path):
            return None
        try:
            return note.decode(disk.read_file(self._world.files, path), MAGIC, Times, path)
        except (Damaged, NewerFormat, OSError) as error:
            _LOG.warning("the times of the last compactions cannot be read: %s", error)
            return None

    async def _save(self) -> None:
        data = note.encode(MAGIC, self._times)
        try:
            await self._worker.run(disk.replace, self._world.files, self._directory, NOTE, data)
        except (disk.NoSpace, OSError) as error:
            _LOG.warning("the times of the last compactions are not stored: %s", error)
