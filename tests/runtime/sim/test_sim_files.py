"""Files: what both disks do alike, and what the simulated one forgets at a power loss."""

import errno
import os
import random
from pathlib import Path

import pytest

from magnetar.runtime.disk import SystemFiles
from magnetar.runtime.files import Files
from magnetar.runtime.sim.disk import DeadProcess, FileFault, SimDisk, SimFiles, SimulatedDeath
from magnetar.runtime.sim.world import Simulation


@pytest.fixture(params=["real", "simulated"])
def files(request: pytest.FixtureRequest) -> Files:
    return SystemFiles() if request.param == "real" else SimFiles(SimDisk())


@pytest.fixture
def root(files: Files, tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    files.make_directories(path)
    return path


def test_reads_see_writes_at_any_offset(files: Files, root: str) -> None:
    file = files.open(f"{root}/a", create=True)
    assert file.size() == 0
    assert file.pread(10, 0) == b""
    assert file.pwrite([b"one", memoryview(b"two")], 5000) == 6
    assert file.size() == 5006
    assert file.pread(8, 4998) == b"\0\0onetwo"
    assert file.pread(100, 5003) == b"two"
    file.pwrite([b"XX"], 4999)
    assert file.pread(7, 4999) == b"XXnetwo"
    file.truncate(5001)
    assert file.pread(100, 4999) == b"XX"
    file.allocate(9000)
    assert file.size() == 9000
    assert file.pread(9000, 5001) == bytes(3999)
    file.allocate(100)
    assert file.size() == 9000
    file.truncate(0)
    file.truncate(10)
    assert file.pread(10, 0) == bytes(10)
    file.fdatasync()
    file.advise_dontneed()
    file.advise_random()
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        file.pread(1, 0)


def test_names_are_made_moved_and_removed_as_the_system_does(files: Files, root: str) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/a")
    files.open(f"{root}/a", create=True, exclusive=True).pwrite([b"A"], 0)
    with pytest.raises(FileExistsError):
        files.open(f"{root}/a", create=True, exclusive=True)
    files.open(f"{root}/b", create=True).pwrite([b"B"], 0)
    files.make_directories(f"{root}/x/y")
    files.make_directories(f"{root}/x/y")
    assert files.list_directory(root) == ["a", "b", "x"]
    files.rename(f"{root}/a", f"{root}/b")
    assert files.open(f"{root}/b").pread(1, 0) == b"A"
    assert not files.exists(f"{root}/a")
    files.rename(f"{root}/b", f"{root}/x/y/c")
    files.sync_directory(root)
    assert files.exists(f"{root}/x/y/c")
    assert files.exists(f"{root}/x")
    opened = files.open(f"{root}/x/y/c")
    files.remove(f"{root}/x/y/c")
    assert opened.pread(1, 0) == b"A"  # an open file outlives its name
    for call in (files.remove, files.list_directory, files.sync_directory):
        with pytest.raises(FileNotFoundError):
            call(f"{root}/nothing")
    with pytest.raises(FileNotFoundError):
        files.rename(f"{root}/nothing", f"{root}/b")
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/no/folder", create=True)
    with pytest.raises(IsADirectoryError):
        files.open(f"{root}/x")
    total, free = files.disk_usage(root)
    assert 0 < free <= total


def test_a_file_opened_to_read_cannot_be_written(files: Files, root: str) -> None:
    files.open(f"{root}/a", create=True).close()
    with pytest.raises(OSError, match="Bad file"):
        files.open(f"{root}/a", write=False).pwrite([b"x"], 0)


def test_a_lock_is_exclusive_until_closed(files: Files, root: str) -> None:
    lock = files.lock(f"{root}/lock")
    with pytest.raises(BlockingIOError):
        files.lock(f"{root}/lock")
    lock.close()
    files.lock(f"{root}/lock").close()


# ---------------------------------------------------------------------------------- the simulated disk alone
def test_power_loss_keeps_what_was_synced_and_only_pieces_of_the_rest() -> None:
    outcomes = set()
    for seed in range(200):
        disk = SimDisk()
        files = SimFiles(disk)
        file = files.open("/a", create=True)
        file.pwrite([b"s" * 1024], 0)
        file.fdatasync()
        files.sync_directory("/")
        file.pwrite([b"v" * 2048], 512)
        disk.on_power_lost(random.Random(seed))
        content = SimFiles(disk).open("/a").pread(4096, 0)
        assert content[:512] == b"s" * 512
        sectors = [content[at : at + 512] for at in range(512, len(content), 512)]
        assert all(sector in (b"s" * 512, b"v" * 512, bytes(512)) for sector in sectors), "torn inside a sector"
        assert sectors[0] != bytes(512), "a synced byte was lost"
        outcomes.add(content)
    assert len(outcomes) > 10  # all, nothing, the front, holes


def test_a_direct_write_is_durable_when_it_returns_and_aligned() -> None:
    disk = SimDisk()
    files = SimFiles(disk)
    files.open("/a", create=True).close()
    with pytest.raises(OSError, match="Invalid argument"):
        files.open("/a", direct=True)
    disk.takes_direct = True
    files.sync_directory("/")
    file = files.open("/a", direct=True)
    arena = files.allocate_buffer(4096)
    arena[:3] = b"abc"
    assert file.pwrite([arena], 0) == 4096
    for buffers, offset in (([b"abc"], 0), ([bytes(4096)], 3)):
        with pytest.raises(OSError, match="Invalid argument"):
            file.pwrite(buffers, offset)
    disk.on_power_lost(random.Random(1))
    assert SimFiles(disk).open("/a").pread(3, 0) == b"abc"


def test_power_loss_may_take_any_name_that_was_not_synced() -> None:
    seen = set()
    for seed in range(200):
        disk = SimDisk()
        files = SimFiles(disk)
        for name in ("old", "kept"):
            file = files.open(f"/{name}", create=True)
            file.pwrite([name.encode()], 0)
            file.fdatasync()
        files.sync_directory("/")
        file = files.open("/new.tmp", create=True)
        file.pwrite([b"new"], 0)
        file.fdatasync()
        files.rename("/new.tmp", "/old")
        files.remove("/kept")
        disk.on_power_lost(random.Random(seed))
        after = SimFiles(disk)
        assert after.open("/old").pread(9, 0) in (b"old", b"new"), "a rename is all or nothing"
        seen.add(tuple(after.list_directory("/")))
    assert ("old",) in seen
    assert ("kept", "new.tmp", "old") in seen


def test_a_kill_loses_only_locks_and_open_files() -> None:
    simulation = Simulation(1)

    async def main() -> None:
        files = simulation.world("a").files
        file = files.open("/a", create=True)
        file.pwrite([b"unsynced"], 0)
        files.lock("/lock")
        simulation.crash("a")
        with pytest.raises(DeadProcess):
            file.pread(1, 0)
        with pytest.raises(DeadProcess):
            files.exists("/a")
        again = simulation.world("a").files
        assert again.open("/a").pread(8, 0) == b"unsynced"
        again.lock("/lock")

    simulation.run(main())


def test_errors_on_purpose_and_a_full_disk() -> None:
    disk = SimDisk(capacity_bytes=64 << 10)
    files = SimFiles(disk)
    file = files.open("/a", create=True)
    disk.faults.append(FileFault("fdatasync", "/a", errno.EIO, skip=1))
    file.fdatasync()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.fdatasync()
    file.fdatasync()
    file.allocate(40 << 10)
    file.pwrite([bytes(40 << 10)], 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.pwrite([b"x"], 63 << 10)
    assert files.disk_usage("/")[1] < 24 << 10
    file.pwrite([b"abc"], 0)
    disk.flip_bit("/a", 1, 0)
    assert file.pread(3, 0) == b"acc"
    disk.truncate_file("/a", 2)
    assert file.pread(3, 0) == b"ac"


def test_a_lock_that_failed_locks_nothing() -> None:
    disk = SimDisk()
    files = SimFiles(disk)
    disk.faults.append(FileFault("lock"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        files.lock("/lock")
    files.lock("/lock")


def test_what_a_failed_sync_dropped_is_not_synced_by_a_later_one() -> None:
    disk = SimDisk()
    files = SimFiles(disk)
    file = files.open("/a", create=True)
    files.sync_directory("/")
    file.pwrite([b"lost"], 0)
    disk.faults.append(FileFault("fdatasync"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.fdatasync()
    file.pwrite([b"kept"], 4)
    file.fdatasync()
    assert file.pread(8, 0) == b"lostkept"  # the cache still shows it
    disk.on_power_lost(random.Random(1))
    assert SimFiles(disk).open("/a").pread(8, 0) == b"\0\0\0\0kept"


def test_a_crash_can_strike_between_a_write_and_its_sync() -> None:
    simulation = Simulation(3)

    def write_and_sync() -> None:
        file = simulation.world("a").files.open("/a", create=True)
        file.pwrite([b"x" * 5000], 0)
        file.fdatasync()

    async def write() -> None:
        await simulation.world("a").workers.start("disk").run(write_and_sync)

    async def main() -> None:
        simulation.world("a")
        simulation.crash_at("a", 3, power_loss=True)
        running = simulation.spawn("a", write())
        await_crash = await _outcome(running)
        assert await_crash == "NodeCrashed"
        assert not simulation.is_node_running("a")

    simulation.run(main())
    assert simulation.node("a").disk.operations == 3
    assert simulation.complaints == []


async def _outcome(future: object) -> str:
    try:
        await future  # type: ignore[misc]
    except Exception as error:
        return type(error).__name__
    return "done"


def test_die_ends_the_process() -> None:
    simulation = Simulation(4)

    async def dies() -> None:
        simulation.world("a").files.end_process("fsync failed")

    async def main() -> None:
        assert await _outcome(simulation.spawn("a", dies())) == "NodeCrashed"
        assert not simulation.is_node_running("a")

    simulation.run(main())
    assert simulation.complaints == []
    with pytest.raises(SimulatedDeath):
        SimFiles(SimDisk()).end_process("x")


def test_every_operation_is_recorded_before_it_takes_effect() -> None:
    disk = SimDisk()
    log: list[tuple[str, str]] = []
    disk.record = lambda operation: log.append((operation.kind, operation.path))
    files = SimFiles(disk)
    files.make_directories("/d")
    file = files.open("/d/a", create=True)
    file.pwrite([b"x"], 0)
    file.fdatasync()
    files.rename("/d/a", "/d/b")
    files.sync_directory("/d")
    files.remove("/d/b")
    assert log == [
        ("mkdir", "/d"), ("sync_directory", "/"), ("create", "/d/a"), ("pwrite", "/d/a"), ("fdatasync", "/d/a"),
        ("rename", "/d/a"), ("sync_directory", "/d"), ("remove", "/d/b"),
    ]  # fmt: skip
