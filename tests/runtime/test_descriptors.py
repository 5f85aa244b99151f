"""What the limit of open files means for a process: strangers cannot take the descriptors that its files need."""

import asyncio
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.runtime import descriptors
from magnetar.runtime.descriptors import FileDescriptors
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world

HERE = Endpoint("127.0.0.1", 0)


@pytest.fixture
def few_files() -> Iterator[int]:
    """The soft limit is 300 above what is open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_all(held: list[int], open_: Callable[[], int]) -> None:
    """Opens until the system refuses."""
    with pytest.raises(OSError, match="Too many open files"):
        held.extend(iter(open_, -1))


def test_the_soft_limit_is_raised_to_the_hard_one_at_the_start() -> None:
    program = """
        import resource
        from magnetar.runtime.descriptors import PROCESS_DESCRIPTORS
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        hard = min(hard, 5000) if hard != resource.RLIM_INFINITY else 5000
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        shared = PROCESS_DESCRIPTORS.open_spares()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert shared.limit == hard, shared
        assert shared.connections_max == PROCESS_DESCRIPTORS.connections_max == hard - 256, shared
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_file_opens_while_others_hold_every_descriptor(tmp_path: Path, few_files: int) -> None:
    process = FileDescriptors()
    process._pid = os.getpid()
    process.limit = few_files
    process.open_missing_spares()
    held: list[int] = []
    try:
        take_all(held, lambda: os.open(os.devnull, os.O_RDONLY))
        opened = [process.open_file(str(tmp_path / str(each)), os.O_CREAT | os.O_RDWR) for each in range(20)]
        assert process.lent == 20
        held += opened
        taken = len(process._spares)
        for each in held[:200]:
            os.close(each)
        del held[:200]
        held.append(process.open_file(str(tmp_path / "0"), os.O_RDONLY))
        assert process.lent == 0
        assert len(process._spares) > taken, "they are taken again"
    finally:
        for each in (*held, *process._spares):
            os.close(each)


def test_without_a_spare_the_error_is_the_systems(tmp_path: Path, few_files: int) -> None:
    process, held = FileDescriptors(), list[int]()
    try:
        take_all(held, lambda: process.open_file(os.devnull, os.O_RDONLY))
    finally:
        for each in held:
            os.close(each)


async def test_the_ports_of_a_process_share_the_connections_and_refuse_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ports, of bytes and of gRPC; a place is free again when a connection ends."""
    monkeypatch.setattr(FileDescriptors, "connections_max", 5)
    world, process, over = make_system_world(), descriptors.PROCESS_DESCRIPTORS, asyncio.Event()
    monkeypatch.setattr(process, "connections", 0)

    async def service(stream: object) -> None:
        await over.wait()

    bytes_, calls = await world.network.serve_bytes(HERE, service), await world.network.serve(HERE, [])
    opened = [await asyncio.open_connection(*(bytes_, calls)[each % 2].endpoint) for each in range(8)]
    for reader, _ in opened[5:]:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(10):
                await reader.readexactly(10_000)
    assert process.connections == 5
    assert process.refused >= 3
    over.set()
    for _, writer in opened:
        writer.close()
    async with asyncio.timeout(10):
        while process.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await bytes_.close()
    await calls.close()
