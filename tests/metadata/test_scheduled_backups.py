"""Copies of the metadata on a schedule: when they are made, what a crash or a full disk leaves, and what is deleted."""

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import backups, paths
from magnetar.metadata.backups import BackupSchedule, BackupSettings, ScheduledBackups
from magnetar.metadata.records import ClusterRecord
from magnetar.metadata.sqlite import SqliteStore, remove_store_files
from magnetar.metadata.store import PutNode, make_put_operation
from magnetar.metadata.tree import MetadataTree
from magnetar.metadata.tree_core import CommitJob
from magnetar.proto.errors import Unavailable
from magnetar.runtime.network import World
from magnetar.runtime.process import make_system_world
from magnetar.runtime.sim.world import Simulation

CLUSTER = "0123456789ab"
HOUR_S = 3600.0


# -------------------------------------------------------------------------------------------------------- the schedule
def test_the_first_copy_is_made_soon_unless_the_newest_is_younger_than_the_interval() -> None:
    assert BackupSchedule(HOUR_S, None, 100.0).left_s(100.0) == backups.FIRST_BACKUP_DELAY_S
    assert BackupSchedule(HOUR_S, HOUR_S + 1, 100.0).left_s(100.0) == backups.FIRST_BACKUP_DELAY_S
    assert BackupSchedule(HOUR_S, 600.0, 100.0).left_s(100.0) == 3000.0
    shorter = BackupSchedule(HOUR_S / 12, 600.0, 0.0)
    assert shorter.left_s(0.0) == backups.FIRST_BACKUP_DELAY_S, "the interval was made shorter"
    assert BackupSchedule(24 * HOUR_S, 600.0, 0.0).left_s(0.0) == 24 * HOUR_S - 600, "or longer"
    assert BackupSchedule(0.5, None, 0.0).left_s(0.0) == 0.5


def test_a_copy_from_the_future_says_nothing_of_its_age() -> None:
    assert BackupSchedule(HOUR_S, -7200.0, 0.0).left_s(0.0) == backups.FIRST_BACKUP_DELAY_S


def test_a_failure_is_tried_again_and_is_news_once_as_is_its_end() -> None:
    schedule = BackupSchedule(HOUR_S, None, 0.0)
    assert not schedule.on_made(1.0)
    assert schedule.left_s(1.0) == HOUR_S
    assert schedule.on_failed("no room", 10.0)
    assert schedule.left_s(10.0) == backups.BACKUP_RETRY_PAUSE_S
    assert not schedule.on_failed("no room at all", 70.0)
    assert schedule.failure == "no room at all"
    assert not schedule.on_made(130.0, "old copies are not deleted")
    assert schedule.left_s(130.0) == HOUR_S, "the copy is made: a further one each minute would fill the disk"
    assert schedule.on_made(140.0)
    assert schedule.failure == ""
    schedule.check()


# ------------------------------------------------------------------------------------------------- files, and crashes
class Killed(BaseException):
    """The process ends here."""


STEPS = ("open", "rename", "remove", "fsync", "makedirs")


@contextlib.contextmanager
def killed_at(step: int, *, done: bool) -> Iterator[list[str]]:
    """Ends the process at the call of the file system with this number (from 0), before it or after it (`done`)."""
    calls: list[str] = []

    def wrap(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == step + 1:
                if done:
                    change(*args, **options)
                raise Killed
            return change(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def make_tree(folder: Path) -> MetadataTree:
    tree = MetadataTree(str(folder / "metadata.sqlite"), "first")
    tree.apply([CommitJob([make_put_operation(paths.CLUSTER, ClusterRecord(instance=CLUSTER * 3))], "")])
    return tree


def copy_once(tree: MetadataTree, folder: Path, keep: int) -> None:
    """The steps of one scheduled copy, in their order."""
    scratch = tree.path + backups.UNFINISHED_BACKUP_SUFFIX
    os.makedirs(folder, exist_ok=True)
    tree.write_copy(scratch)
    backups.place_copy(scratch, str(folder), CLUSTER)
    backups.delete_old_copies(str(folder), CLUSTER, keep)


def numbers_of(folder: Path) -> list[int]:
    return [each.number for each in backups.list_copies(str(folder), CLUSTER)]


def revisions_of(folder: Path) -> list[int]:
    """Reads each copy: one that is not whole fails here."""
    found = []
    for each in backups.list_copies(str(folder), CLUSTER):
        with contextlib.closing(sqlite3.connect(f"file:{each.path}?immutable=1", uri=True)) as sql:
            assert sql.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            found += [revision for (revision,) in sql.execute("SELECT revision FROM state")]
    return found


@pytest.mark.parametrize("other_disk", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_step_leaves_the_old_copies_or_the_new_one(
    tmp_path: Path, keep: int, other_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other_disk:
        rename = os.rename

        def refuse(old: str, new: str) -> None:
            if old.endswith(backups.UNFINISHED_BACKUP_SUFFIX):
                raise OSError(errno.EXDEV, "another disk")
            rename(old, new)

        monkeypatch.setattr(os, "rename", refuse)
    crashes, steps = 0, list[str]()
    with contextlib.closing(make_tree(tmp_path)) as tree:
        before = tmp_path / "before"
        for _ in range(keep):
            copy_once(tree, before, keep)
            tree.apply([CommitJob([PutNode("/a", b"")], "")])
        old = revisions_of(before)
        for step, done in itertools.product(range(40), (False, True)):
            folder = tmp_path / f"{step}-{done}"
            shutil.copytree(before, folder)
            try:
                with killed_at(step, done=done) as steps:
                    copy_once(tree, folder, keep)
            except Killed:
                crashes += 1
                found = revisions_of(folder)
                whole = [*old, tree.revision]
                assert any(found == whole[skip:end] for skip in range(2) for end in (keep, keep + 1) if skip < end)
                assert len(found) >= keep, "nothing was deleted before the new one was whole"
                copy_once(tree, folder, keep)
            assert revisions_of(folder)[-1] == tree.revision
            assert len(numbers_of(folder)) == keep
            assert not list(folder.glob("*.partial*"))
            assert not os.path.exists(tree.path + backups.UNFINISHED_BACKUP_SUFFIX)
            if len(steps) <= step:
                break  # this one ran to its end
    assert 12 <= crashes < 78
    renamed, deleted = steps.index("rename"), len(steps) - 1 - steps[::-1].index("remove")
    assert "fsync" in steps[:renamed], "the copy is synced before it has its name"
    assert "fsync" in steps[renamed:deleted], "its name is synced before an old copy is deleted"
    assert "fsync" in steps[deleted:]


def test_another_disk_that_is_full_keeps_the_old_copies_and_nothing_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise OSError(errno.EXDEV, "another disk")

    def write_half(source: str, to: str) -> None:
        Path(to).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(errno.ENOSPC, "no space left")

    with contextlib.closing(make_tree(tmp_path)) as tree:
        folder = tmp_path / "copies"
        copy_once(tree, folder, 1)
        monkeypatch.setattr(os, "rename", refuse)
        monkeypatch.setattr(shutil, "copyfile", write_half)
        with pytest.raises(OSError, match="no space left"):
            copy_once(tree, folder, 1)
        assert [each.name for each in folder.iterdir()] == [f"metadata-{CLUSTER}-00000001.backup"]
        assert not os.path.exists(tree.path + backups.UNFINISHED_BACKUP_SUFFIX), "it takes room on the metadata's disk"


def test_what_is_no_copy_of_this_cluster_is_never_deleted(tmp_path: Path) -> None:
    with contextlib.closing(make_tree(tmp_path)) as tree:
        folder = tmp_path / "copies"
        copy_once(tree, folder, 1)
        (first,) = backups.list_copies(str(folder), CLUSTER)
        others = [
            folder / "metadata-7.backup", folder / "monday.backup", folder / f"metadata-{CLUSTER}-1.backup",
            folder / f"metadata-{'f' * 12}-00000001.backup", folder / f"metadata-{CLUSTER}-00000001.backup.partial",
        ]  # fmt: skip
        for each in others:
            shutil.copy(first.path, each)
        notes = folder / f"metadata-{CLUSTER}-00000002.backup"
        notes.write_text("not a copy, only named so")
        link, made = folder / f"metadata-{CLUSTER}-00000003.backup", folder / f"metadata-{CLUSTER}-00000004.backup"
        link.symlink_to(first.path)
        made.mkdir()
        copy_once(tree, folder, 1)
        assert numbers_of(folder) == [5], "no file is overwritten"
        assert not os.path.exists(first.path)
        assert all(each.exists() for each in (*others, notes, made))
        assert link.is_symlink()


def test_copies_are_ordered_by_their_number_if_clock_and_revision_went_back(tmp_path: Path) -> None:
    with contextlib.closing(make_tree(tmp_path)) as tree:
        folder = tmp_path / "copies"
        for _ in range(3):
            tree.apply([CommitJob([PutNode("/a", b"")], "")])
            copy_once(tree, folder, 3)
        for each in backups.list_copies(str(folder), CLUSTER):
            os.utime(each.path, (2e9 - each.number * 1000,) * 2)
    (tmp_path / "restored").mkdir()
    with contextlib.closing(make_tree(tmp_path / "restored")) as restored:
        copy_once(restored, folder, 1)
    assert numbers_of(folder) == [4]
    assert revisions_of(folder) == [1]


# --------------------------------------------------------------------------------------------------------- the process
class Node:
    """A metadata file on the real disk, in a process on virtual time."""

    def __init__(self, simulation: Simulation, world: World, path: Path) -> None:
        self.simulation = simulation
        self.world = world
        self.folder = path / "copies"
        self.file = path / "metadata.sqlite"
        self.store: SqliteStore

    async def open(self) -> None:
        self.store = await SqliteStore.open(self.world, str(self.file))
        if await self.store.get(paths.CLUSTER) is None:
            await self.store.commit([make_put_operation(paths.CLUSTER, ClusterRecord(instance=CLUSTER * 3))], "")

    async def run_for(self, seconds: float, every_s: float = HOUR_S, keep: int = 2) -> list[int]:
        """Makes copies for this time; returns the numbers of those that are there at the end."""
        running = await ScheduledBackups.start(self.world, self.store, BackupSettings(every_s, keep, str(self.folder)))
        try:
            await asyncio.sleep(seconds)
        finally:
            await running.close()
        return numbers_of(self.folder)


def on_virtual_time(path: Path, test: Callable[[Node], Awaitable[None]]) -> None:
    simulation = Simulation(1)

    async def run() -> None:
        node = Node(simulation, simulation.world("node"), path)
        await node.open()
        place = backups.place_copy

        def place_at_virtual_time(*where: str) -> str:
            copy = place(*where)
            os.utime(copy, (node.world.clock.wall_ms() / 1000,) * 2)
            return copy

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backups, "place_copy", place_at_virtual_time)
                await test(node)
        finally:
            await node.store.close()

    async def main() -> None:
        await simulation.spawn("node", run())

    simulation.run(main())
    assert simulation.complaints == []


def test_copies_are_made_at_once_and_then_each_interval_and_a_restart_makes_none_early(tmp_path: Path) -> None:
    async def main(node: Node) -> None:
        assert await node.run_for(0.5) == [], "the process has only begun"
        assert await node.run_for(5.0) == [1]
        made = (await node.store.measure_disk()) or pytest.fail("the disk is known")
        assert made.backup_every_ms == HOUR_S * 1000
        assert abs(made.backup_ms - node.world.clock.wall_ms()) < 10_000
        assert made.backup_failure == ""
        assert await node.run_for(600.0) == [1], "the newest is younger than the interval"
        assert await node.run_for(3.5 * HOUR_S) == [3, 4]
        assert await node.run_for(5.0, every_s=60.0, keep=1) == [5], "the interval was made shorter"
        assert await node.run_for(1800.0, every_s=600.0, keep=1) == [8]

    on_virtual_time(tmp_path, main)


def test_a_clock_that_goes_back_costs_one_copy_and_delays_none(tmp_path: Path) -> None:
    async def main(node: Node) -> None:
        assert await node.run_for(5.0) == [1]
        node.simulation.node("node").skew_ms -= 5 * 24 * 3_600_000
        assert await node.run_for(5.0) == [1, 2], "at the start: its age is not known"
        settings = BackupSettings(HOUR_S, 9, str(node.folder))
        running = await ScheduledBackups.start(node.world, node.store, settings)
        await asyncio.sleep(5.0)
        node.simulation.node("node").skew_ms -= 5 * 24 * 3_600_000
        await asyncio.sleep(2 * HOUR_S)
        await running.close()
        assert numbers_of(node.folder) == [1, 2, 3, 4], "while it runs: the interval is not of that clock"

    on_virtual_time(tmp_path, main)


def test_a_new_tree_is_not_copied_before_the_cluster_has_a_name(tmp_path: Path) -> None:
    async def main(node: Node) -> None:
        await node.store.close()
        remove_store_files(str(node.file))
        node.store = await SqliteStore.open(node.world, str(node.file))
        running = await ScheduledBackups.start(node.world, node.store, BackupSettings(HOUR_S, 2, str(node.folder)))
        await asyncio.sleep(30.0)
        assert not node.folder.exists()
        await node.store.commit([make_put_operation(paths.CLUSTER, ClusterRecord(instance=CLUSTER * 3))], "")
        await asyncio.sleep(5.0)
        assert numbers_of(node.folder) == [1]
        await running.close()

    on_virtual_time(tmp_path, main)


def test_a_full_disk_is_told_once_and_deletes_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(node: Node) -> None:
        assert await node.run_for(5.0, keep=1) == [1]
        running = await ScheduledBackups.start(node.world, node.store, BackupSettings(60.0, 1, str(node.folder)))
        with monkeypatch.context() as patch:
            patch.setattr(node.world.files, "disk_usage", lambda _: (1 << 30, 4096), raising=False)
            await asyncio.sleep(600.0)
            assert numbers_of(node.folder) == [1]
            found = await node.store.measure_disk()
            assert found is not None
            assert "a copy needs" in found.backup_failure
            await node.store.commit([PutNode("/a", b"")], "")
        told = [each for each in caplog.messages if "are tried again" in each]
        assert len(told) == 1
        await asyncio.sleep(120.0)
        assert numbers_of(node.folder)[0] > 1
        assert any("are made again" in each for each in caplog.messages)
        assert node.store.backup_failure == ""
        await running.close()

    on_virtual_time(tmp_path, main)


@pytest.mark.parametrize("where", ["write", "sync", "folder", "delete"])
def test_a_failure_of_any_part_is_told_and_the_next_copy_is_whole(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    async def main(node: Node) -> None:
        assert await node.run_for(5.0, keep=1) == [1]
        running = await ScheduledBackups.start(node.world, node.store, BackupSettings(60.0, 1, str(node.folder)))
        if where == "write":  # what is in the way is no database, and no copy: a folder
            os.mkdir(str(node.file) + backups.UNFINISHED_BACKUP_SUFFIX)
        with monkeypatch.context() as patch:
            if where == "sync":
                patch.setattr(backups, "sync_file", refuse)
            elif where == "folder":
                patch.setattr(os, "makedirs", refuse)
            elif where == "delete":
                patch.setattr(backups, "delete_old_copies", refuse)
            await asyncio.sleep(200.0)
            assert node.store.backup_failure
            assert 1 in numbers_of(node.folder)
            await node.store.commit([PutNode("/a", b"")], "")
        if where == "write":
            os.rmdir(str(node.file) + backups.UNFINISHED_BACKUP_SUFFIX)
        await asyncio.sleep(120.0)
        assert node.store.backup_failure == ""
        assert revisions_of(node.folder)[-1] == node.store.history.revision
        assert len(numbers_of(node.folder)) == 1
        assert sum(each.levelname == "ERROR" for each in caplog.records) == 1
        await running.close()

    on_virtual_time(tmp_path, main)


class FailingDisk:
    """The connection of a tree, whose copies fail half-way, as on a disk that breaks."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sql, name)

    def backup(self, copy: sqlite3.Connection) -> None:
        copy.execute("CREATE TABLE half(way)")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise error


async def test_a_disk_that_breaks_under_the_copy_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    monkeypatch.setattr(store, "_die", ended.append)
    monkeypatch.setattr(store._tree, "_sql", FailingDisk(store._tree._sql))
    with pytest.raises(Unavailable, match="disk I/O error"):
        await store.write_copy(str(tmp_path / "copy"))
    with pytest.raises(Unavailable, match="disk I/O error"):
        await store.back_up("monday.backup")
    left = [each for each in os.listdir(tmp_path) if not each.startswith("metadata.sqlite")]
    assert left == [], "what was written of it takes no room"
    await store.commit([PutNode("/a", b"")], "")
    assert ended == []
    await store.close()


def test_a_folder_in_the_way_of_a_copy_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    with contextlib.closing(make_tree(tmp_path)) as tree:
        with pytest.raises((Unavailable, OSError)):
            tree.write_copy(str(tmp_path / "no" / "folder"))
        (tmp_path / "way").mkdir()
        with pytest.raises((Unavailable, OSError)):
            tree.write_copy(str(tmp_path / "way"))
        tree.apply([CommitJob([PutNode("/a", b"")], "")])
        assert tree.get("/a") is not None


def test_the_loss_of_the_disk_that_has_both_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metadata.sqlite").write_bytes(b"")
    backups.warn_of_same_disk(str(tmp_path / "metadata.sqlite"), str(tmp_path / "a" / "b"))
    assert "they do not survive the loss of that disk" in caplog.text
