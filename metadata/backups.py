"""Copies of the metadata that its own process makes on a schedule, and the deletion of old ones.

    backups = await ScheduledBackups.start(world, store, BackupSettings(3600.0, 24, folder))    until `backups.close()`

A copy is made in this order, of which each step but the second is in a thread of its own:

 1. Both disks must have room: a copy must not fill the disk on which commits are written.
 2. The store writes a copy beside the metadata file, as `magnetar metadata backup` does. Commits wait meanwhile, and
    only for the metadata's own disk: the folder of the copies may be on a slow one.
 3. The copy is synced, and renamed into the folder, whose entry is synced. If the folder is on another disk, the copy
    is written there as `NAME.partial`, synced and renamed.
 4. The time of the copy is noted.
 5. Only then old copies are deleted, so that `keep` are left.

A crash at any step leaves all old copies, or the new one and all old ones that `keep` allows. What an unfinished copy
left is replaced by the next one.

A copy is named `metadata-CLUSTER-NUMBER.backup`. CLUSTER is the beginning of the cluster's instance id, so that the
clusters that share a folder do not delete each other's copies. NUMBER is above that of all copies in the folder: copies
are ordered by it, and not by times, which a clock may set back, or by revisions, which a restore sets back. A file is
deleted only if it has such a name, and is a regular file with the magic of a metadata file.

A copy that fails is logged at ERROR when it is the first that fails, and tried again; the first one that succeeds
again is logged too. The store shows the state (`SqliteStore.backup_failure`) to the service, its metrics and alarms.
Guarded by tests/metadata/test_scheduled_backups.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import stat
from functools import partial
from pathlib import PurePath
from typing import NamedTuple, Self, TypeVar

from ..proto.errors import MagnetarError, Unavailable
from ..runtime.network import World
from ..runtime.tasks import Supervisor
from . import paths
from .records import ClusterRecord, decode_record
from .sqlite import SqliteStore
from .tree import SQLITE_APPLICATION_ID, create_private_file, mark_backed_up, remove_copy, sync_file

BACKUP_FOLDER = "metadata-backups"
"""The name of the folder of copies, in the data folder, if no other folder is set."""
FIRST_BACKUP_DELAY_S = 1.0
"""Seconds from the start to the first copy, if it is due."""
BACKUP_RETRY_PAUSE_S = 60.0
"""Seconds to the next attempt after a copy failed; less if copies are made more often."""
BACKUP_LATE_AFTER_S = 600.0
"""Seconds after which a copy that has not ended counts as failed. It goes on, because its thread cannot be ended."""
UNFINISHED_BACKUP_SUFFIX = "-copying"
_MAGIC = b"SQLite format 3\0"
_APPLICATION_ID_AT = 68
"""The offset of `application_id` in the header of an SQLite file."""
_CLUSTER = 12
"""Digits of the instance id in the name of a copy."""

_LOG = logging.getLogger("magnetar.metadata.backups")

R = TypeVar("R")


class BackupSettings(NamedTuple):
    """How often a copy is made, in seconds; how many are kept; and the folder in which they are."""

    every_s: float
    keep: int
    folder: str


class BackupSchedule:
    """Decides when a copy is due, and what is logged of failures. Times are in seconds, of the monotonic clock, except
    for `age_s` at the start: the age of the newest copy by the wall clock (None: there is none)."""

    def __init__(self, every_s: float, age_s: float | None, now_s: float) -> None:
        self._every_s = every_s
        unknown = age_s is None or age_s < 0  # a clock was wrong: the copy may be of any age
        left_s = 0.0 if unknown or age_s is None else every_s - age_s
        self._due_s = now_s + max(min(FIRST_BACKUP_DELAY_S, every_s), left_s)
        self.failure = ""

    def left_s(self, now_s: float) -> float:
        """Returns how long to wait for the next copy, in seconds."""
        return max(0.0, self._due_s - now_s)

    def on_made(self, now_s: float, failure: str = "") -> bool:
        """Called when a copy was made. `failure`: what failed after that, such as the deletion of old copies. Returns
        whether that is news: the first failure, or the first success after failures."""
        self._due_s = now_s + self._every_s
        return self._note(failure)

    def on_failed(self, failure: str, now_s: float) -> bool:
        """Called when a copy failed. Returns whether that is news: the first failure after a success."""
        self._due_s = now_s + min(BACKUP_RETRY_PAUSE_S, self._every_s)
        return self._note(failure)

    def _note(self, failure: str) -> bool:
        changed = bool(failure) != bool(self.failure)
        self.failure = failure
        return changed

    def check(self) -> None:
        assert self._every_s > 0, self._every_s


class ScheduledBackups:
    """Makes copies of the metadata on a schedule, until it is closed. Made by `start`."""

    def __init__(self, world: World, store: SqliteStore, settings: BackupSettings) -> None:
        self._world = world
        self._store = store
        self._settings = settings
        self._scratch = store.path + UNFINISHED_BACKUP_SUFFIX
        self._worker = world.workers.start("metadata-backups")
        self._background = Supervisor()
        self._schedule: BackupSchedule | None = None  # made from the copies that there are

    @classmethod
    async def start(cls, world: World, store: SqliteStore, settings: BackupSettings) -> Self:
        """Begins to make copies in the background. Does not fail if the folder cannot be used: that is the failure of
        each copy, and the metadata is served all the same."""
        store.backup_every_ms = int(1000 * settings.every_s)
        backups = cls(world, store, settings)
        backups._background.start_supervised("metadata-backups", backups._run)
        return backups

    async def close(self) -> None:
        """Ends the schedule. A copy under way is finished or left unfinished; it is never half in place."""
        try:
            await self._background.close()
        finally:
            await self._worker.close()

    async def _run(self) -> None:
        clock = self._world.clock
        if self._schedule is None:
            await self._wait_in_time(self._worker.run(warn_of_same_disk, self._store.path, self._settings.folder))
        while True:
            cluster = await self._read_cluster()
            if self._schedule is None:
                self._schedule = BackupSchedule(
                    self._settings.every_s, await self._measure_age_s(cluster), clock.monotonic()
                )
            await asyncio.sleep(max(self._schedule.left_s(clock.monotonic()), 0.0 if cluster else FIRST_BACKUP_DELAY_S))
            if cluster:
                await self._make_copy(self._schedule, cluster)

    async def _read_cluster(self) -> str:
        """Returns what the names of this cluster's copies have of its instance id; "" while the metadata is new, and no
        process of the cluster has written anything."""
        node = await self._store.get(paths.CLUSTER)
        if node is None:
            return ""
        return decode_record(node.value, ClusterRecord, paths.CLUSTER).instance[:_CLUSTER]

    async def _measure_age_s(self, cluster: str) -> float | None:
        """Returns the age of the newest copy in the folder, in seconds; None if there is none, or the folder cannot be
        read."""
        try:
            copies = await self._wait_in_time(self._worker.run(list_copies, self._settings.folder, cluster))
        except (OSError, Unavailable):
            return None
        return (self._world.clock.wall_ms() - copies[-1].made_ms) / 1000 if copies else None

    async def _make_copy(self, schedule: BackupSchedule, cluster: str) -> None:
        """Makes a copy and deletes old ones. Logs a failure if it is news; raises none."""
        clock = self._world.clock
        try:
            path = await self._write_copy(cluster)
        except (OSError, MagnetarError) as error:
            self._tell(schedule.on_failed(f"{error}", clock.monotonic()), schedule)
            return
        failure = ""
        self._store.last_backup_ms = clock.wall_ms()
        try:
            await self._wait_in_time(self._worker.run(mark_backed_up, self._store.path))
            keep = partial(delete_old_copies, self._settings.folder, cluster, self._settings.keep)
            await self._wait_in_time(self._worker.run(keep))
        except (OSError, MagnetarError) as error:
            failure = f"{path} is made, and old copies are not deleted: {error}"
        self._tell(schedule.on_made(clock.monotonic(), failure), schedule)

    async def _write_copy(self, cluster: str) -> str:
        folder, worker = self._settings.folder, self._worker
        measure = self._world.files.disk_usage
        await self._wait_in_time(worker.run(remove_copy, self._scratch))
        await self._wait_in_time(worker.run(os.makedirs, folder, 0o700, exist_ok=True))
        size = await self._wait_in_time(worker.run(os.path.getsize, self._store.path))
        for place, copies in ((str(PurePath(self._store.path).parent), 2), (folder, 1)):
            _, free = await self._wait_in_time(worker.run(measure, place))
            check_room(place, free, copies * size)
        await self._store.write_copy(self._scratch)
        return await self._wait_in_time(worker.run(place_copy, self._scratch, folder, cluster))

    async def _wait_in_time(self, work: asyncio.Future[R]) -> R:
        """Returns the result of `work`, which runs in the worker. While `work` takes longer than BACKUP_LATE_AFTER_S,
        says so as the failure of the copy, and waits on: an operation of a disk that is away cannot be ended."""
        await asyncio.wait([work], timeout=BACKUP_LATE_AFTER_S)
        if not work.done():
            failure = f"{self._settings.folder} has not answered for {BACKUP_LATE_AFTER_S:g} s"
            schedule = self._schedule
            if schedule is None:
                self._store.backup_failure = failure
                _LOG.error("copies of the metadata fail, and are tried again: %s", failure)
            else:
                self._tell(schedule.on_failed(failure, self._world.clock.monotonic()), schedule)
        return await work

    def _tell(self, news: bool, schedule: BackupSchedule) -> None:
        self._store.backup_failure = schedule.failure
        if news and schedule.failure:
            _LOG.error("copies of the metadata fail, and are tried again: %s", schedule.failure)
        elif news:
            _LOG.warning("copies of the metadata are made again, in %s", self._settings.folder)


# -------------------------------------------------------------------------------------------------- files of copies
class ScheduledCopy(NamedTuple):
    """A copy in the folder. `made_ms`: when its file was written, in ms since the epoch."""

    number: int
    path: str
    made_ms: int


def check_room(place: str, free_bytes: int, wanted_bytes: int) -> None:
    """Raises Unavailable if a disk has no room for a copy. `wanted_bytes`: what must be free."""
    if free_bytes < wanted_bytes:
        raise Unavailable(
            f"{place}: a copy needs {wanted_bytes >> 10:,} KiB of free space, and {free_bytes >> 10:,} KiB are free",
            path=place,
        )


def list_copies(folder: str, cluster: str) -> list[ScheduledCopy]:
    """Returns the scheduled copies of the cluster in a folder, the oldest first; [] if there is no folder. A file that
    has such a name and is not a metadata file is left out. Raises OSError."""
    found = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        match = re.fullmatch(r"metadata-(.*)-([0-9]{8,18})\.backup", name)
        path = os.path.join(folder, name)
        if match is not None and match[1] == cluster and _is_metadata_file(path):
            found.append(ScheduledCopy(int(match[2]), path, os.stat(path).st_mtime_ns // 1_000_000))
    return sorted(found)


def _is_metadata_file(path: str) -> bool:
    """Returns whether a path is that of a regular file with the magic of a metadata file."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    with open(path, "rb") as file:
        head = file.read(_APPLICATION_ID_AT + 4)
    return head.startswith(_MAGIC) and head[_APPLICATION_ID_AT:] == SQLITE_APPLICATION_ID.to_bytes(4)


def place_copy(scratch: str, folder: str, cluster: str) -> str:
    """Moves the copy `scratch` durably into the folder, under the next number, and returns its path. Overwrites no
    file but an unfinished copy. Raises OSError; deletes `scratch` then, which takes room on the metadata's disk."""
    try:
        return _place_copy(scratch, folder, cluster)
    except Exception:
        with contextlib.suppress(OSError):
            remove_copy(scratch)
        raise


def _place_copy(scratch: str, folder: str, cluster: str) -> str:
    numbers = [each.number for each in list_copies(folder, cluster)]
    number = max(numbers, default=0) + 1
    while os.path.lexists(path := os.path.join(folder, f"metadata-{cluster}-{number:08}.backup")):
        number += 1  # of a file that is no copy
    sync_file(scratch)
    sync_file(os.path.dirname(folder) or ".")  # the folder may be new
    try:
        os.rename(scratch, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_to_other_disk(scratch, path)
    sync_file(folder)
    return path


def _copy_to_other_disk(scratch: str, path: str) -> None:
    """Writes the copy `scratch` to the path on another disk, and deletes `scratch`. Deletes what was written if that
    fails."""
    import shutil  # here: it loads compressors

    unfinished = f"{path}.partial"
    try:
        remove_copy(unfinished)
        create_private_file(unfinished)
        shutil.copyfile(scratch, unfinished)
        sync_file(unfinished)
        os.rename(unfinished, path)
    except Exception:
        with contextlib.suppress(OSError):
            remove_copy(unfinished)
        raise
    remove_copy(scratch)


def delete_old_copies(folder: str, cluster: str, keep: int) -> list[str]:
    """Deletes the oldest scheduled copies of the cluster in a folder, so that `keep` of them are left, and returns the
    paths of the deleted ones. Raises OSError."""
    old = [each.path for each in list_copies(folder, cluster)[:-keep]]
    for path in old:
        os.remove(path)
    if old:
        sync_file(folder)
    return old


def warn_of_same_disk(path: str, folder: str) -> None:
    """Logs a warning if the folder of the copies is on the disk of the metadata file `path`. Does nothing if the folder
    cannot be looked at: then the copy says why."""
    place = os.path.abspath(folder)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        is_same = os.stat(place).st_dev == os.stat(path).st_dev
    except OSError:
        return
    if is_same:
        _LOG.warning(
            "copies of the metadata are made in %s, on the disk of the metadata itself: they do not survive the loss of"
            " that disk. Name a folder on another disk with --backup-dir, or move them", folder,
        )  # fmt: skip
