"""The real disk: round trips, and what is refused."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.runtime.disk import EXIT_DISK_FAILED, SystemFiles
from magnetar.runtime.files import DIRECT_ALIGNMENT

FILES = SystemFiles()


def test_what_is_written_is_read_back_at_its_place(tmp_path: Path) -> None:
    file = FILES.open(str(tmp_path / "a"), create=True)
    assert file.pwrite([b"abc", bytearray(b"de"), memoryview(b"f")], 10) == 6
    assert file.pwrite([], 3) == 0
    assert file.pread(100, 10) == b"abcdef"
    assert file.pread(3, 11) == b"bcd"
    buffer = bytearray(8)
    assert file.pread_into(memoryview(buffer), 12) == 4
    assert buffer == b"cdef" + bytes(4)
    assert file.pread(10, 0) == bytes(10)
    assert file.pread(10, 16) == b""
    assert file.size() == 16
    file.fdatasync()
    file.truncate(12)
    assert file.pread(100, 10) == b"ab"
    file.advise_dontneed()
    file.advise_random()
    file.close()
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        file.size()


def test_more_buffers_than_the_kernel_takes_at_once_are_written(tmp_path: Path) -> None:
    file = FILES.open(str(tmp_path / "a"), create=True)
    buffers = [b"%05d" % n for n in range(3000)]
    assert file.pwrite(buffers, 7) == 15_000
    assert file.pread(15_000, 7) == b"".join(buffers)
    file.close()


def test_a_short_write_of_the_kernel_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = FILES.open(str(tmp_path / "a"), create=True)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: os.pwrite(fd, b"".join(buffers)[:5], offset))
    assert file.pwrite([b"abc", b"defg", b"hij"], 2) == 10
    assert file.pread(20, 2) == b"abcdefghij"
    file.close()


def test_a_direct_file_takes_any_buffers_and_gives_back_unaligned_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    FILES.open(path, create=True).close()
    try:
        file = FILES.open(path, direct=True)
        file.pwrite([bytes(4096)], 0)
    except OSError:
        pytest.skip("this file system does not write direct")
    assert file.direct
    assert file.pwrite([b"a" * 4000, bytearray(b"b" * 96), memoryview(b"c" * 4096)], 4096) == 8192
    arena = FILES.allocate_buffer(12288)
    arena[:4] = b"head"
    assert file.pwrite([arena[:4096]], 12288) == 4096
    assert file.pread_into(arena[:8192], 8192) == 8192
    assert bytes(arena[:4100]) == b"c" * 4096 + b"head"
    assert file.pread(16384, 0) == bytes(4096) + b"a" * 4000 + b"b" * 96 + b"c" * 4096 + b"head" + bytes(4092)
    file.truncate(5000)
    assert file.pread(8192, 4096) == b"a" * 904
    assert file.pread_into(arena[:8192], 4096) == 904
    assert file.pread(4096, 8192) == b""
    with pytest.raises(OSError, match="Invalid argument"):
        file.pwrite([b"abc"], 0)
    file.close()


@pytest.mark.parametrize("size", [1, 4096, (1 << 20) + 4096, 5 << 20])
def test_an_arena_is_as_long_as_asked_zeros_and_aligned_as_the_disk_wants_it(size: int) -> None:
    arena = FILES.allocate_buffer(size)
    assert len(arena) == size
    assert ctypes.addressof(ctypes.c_char.from_buffer(arena)) % (2 << 20 if size >= 1 << 20 else DIRECT_ALIGNMENT) == 0
    assert not any(bytes(arena))
    arena[-1:] = b"x"
    assert arena[size - 1] == ord("x")


def test_allocate_reserves_zeros_and_keeps_what_is_there(tmp_path: Path) -> None:
    file = FILES.open(str(tmp_path / "a"), create=True)
    file.pwrite([b"abc"], 0)
    file.allocate(10_000)
    assert file.size() == 10_000
    assert file.pread(5, 0) == b"abc\0\0"
    assert os.stat(file.path).st_blocks * 512 >= 10_000
    file.close()


def test_open_says_what_is_not_there_and_what_is(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        FILES.open(path)
    FILES.open(path, create=True, exclusive=True).close()
    with pytest.raises(FileExistsError):
        FILES.open(path, create=True, exclusive=True)
    reader = FILES.open(path, write=False)
    with pytest.raises(OSError, match="descriptor"):
        reader.pwrite([b"x"], 0)
    reader.close()


def test_folders_are_private_and_names_sorted(tmp_path: Path) -> None:
    path = str(tmp_path / "x" / "y")
    FILES.make_directories(path)
    FILES.make_directories(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    for name in ("b", "a", "c"):
        FILES.open(f"{path}/{name}", create=True).close()
    FILES.rename(f"{path}/c", f"{path}/0")
    FILES.remove(f"{path}/b")
    FILES.sync_directory(path)
    assert FILES.list_directory(path) == ["0", "a"]
    assert FILES.exists(f"{path}/0")
    assert not FILES.exists(f"{path}/c")
    total, free = FILES.disk_usage(path)
    assert total >= free > 0


def test_a_lock_is_held_once_and_free_after_close(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    held = FILES.lock(path)
    with pytest.raises(BlockingIOError):
        FILES.lock(path)
    held.close()
    FILES.lock(path).close()


@pytest.mark.processes
def test_a_lock_dies_with_its_process_and_die_flushes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from magnetar.runtime.disk import SystemFiles; files = SystemFiles()\n"
        "lock = files.lock(sys.argv[1]); buffered = open(sys.argv[2], 'w'); buffered.write('never flushed')\n"
        "files.end_process('fsync of x\\nfailed')"
    )
    path, buffered = str(tmp_path / "lock"), tmp_path / "buffered"
    command = [sys.executable, "-c", program, path, str(buffered)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (done.returncode, buffered.read_bytes()) == (EXIT_DISK_FAILED, b"")
    assert done.stderr == b"magnetar: fsync of x failed; exiting at once\n"
    FILES.lock(path).close()
