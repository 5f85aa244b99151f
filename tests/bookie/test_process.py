"""A real bookie process under load, killed with SIGKILL again and again: no acknowledged add is lost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from uuid import UUID

import pytest

from magnetar.ledger.peer_format import Status
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.bookie.entries import PeerCaller, payload_of
from tests.bookie.stores import payload

KILLS = 3
ADDS_BEFORE_THE_KILL = 700
SIZE = 4000


class BookieProcess:
    def __init__(self, process: asyncio.subprocess.Process, ready: list[str]) -> None:
        self.process = process
        self.uuid = UUID(ready[1])
        self.endpoint = Endpoint.parse(ready[2])
        self.replayed = int(ready[3])

    @classmethod
    async def start(cls, directory: Path) -> BookieProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bookie.process", str(directory), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = await process.stdout.readline()
        assert line.startswith(b"ready "), f"the bookie did not start: {line!r}"
        return cls(process, line.decode().split())

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


async def add_until_killed(caller: PeerCaller, bookie: BookieProcess, first: int, acked: list[int]) -> int:
    """Keeps 64 adds on their way until the process dies; the next entry id."""
    entry = first
    killed = asyncio.Event()

    async def producer() -> None:
        nonlocal entry
        while not killed.is_set():
            mine, entry = entry, entry + 1
            try:
                if (await caller.add(1, mine, payload(1, mine, SIZE))).status is Status.OK:
                    acked.append(mine)
            except MagnetarError:
                return
            if len(acked) >= ADDS_BEFORE_THE_KILL * (1 + first // ADDS_BEFORE_THE_KILL) and not killed.is_set():
                killed.set()
                await bookie.kill()

    await asyncio.gather(*[producer() for _ in range(64)])
    return entry


@pytest.mark.processes
async def test_kill_9_under_load_loses_no_acknowledged_add(tmp_path: Path) -> None:
    world = make_system_world()
    acked: list[int] = []
    entry = 0
    for life in range(KILLS + 1):
        bookie = await BookieProcess.start(tmp_path)
        caller = PeerCaller(world.network.connect_peer(bookie.endpoint, bookie.uuid.bytes))
        try:
            assert (bookie.replayed > 0) is (life > 0)
            for mine in acked:
                head, entries = await caller.read(1, mine)
                assert head.status is Status.OK, f"acknowledged entry {mine} is {head.status!r} after kill {life}"
                assert payload_of(entries[0]) == payload(1, mine, SIZE)
            if life < KILLS:
                entry = await add_until_killed(caller, bookie, entry, acked)
        finally:
            if bookie.process.returncode is None:
                await bookie.kill()
            await caller.peer.close()
    assert len(acked) >= KILLS * ADDS_BEFORE_THE_KILL
