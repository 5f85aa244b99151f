"""Stores of offsets: each keeps what was stored, by topic and incarnation; the file survives any crash."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.common.errors import InvalidConfiguration
from magnetar.client.consume.pull import (
    FileOffsetStore,
    MemoryOffsetStore,
    OffsetKey,
    OffsetStore,
    decode_offsets,
    encode_offsets,
)
from magnetar.runtime.sim.disk import SimDisk, SimFiles, SimulatedDeath

A, B = OffsetKey("persistent://public/default/a", 111), OffsetKey("persistent://public/default/b-partition-0", 222)
ANEW = A._replace(incarnation=333)
PATH = "/data/offsets"


class Inline:
    """Workers whose calls run in the caller's thread."""

    def start(self, name: str) -> Any:
        return self

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def close(self) -> None:
        """There is nothing to wait for."""


def opened(disk: SimDisk) -> FileOffsetStore:
    return FileOffsetStore(PATH, files=SimFiles(disk), workers=Inline())  # type: ignore[arg-type]


def made_disk() -> SimDisk:
    disk = SimDisk()
    SimFiles(disk).make_directories("/data")
    return disk


async def check_store(store: OffsetStore) -> None:
    """What every store promises; for stores of others too."""
    assert await store.load(A) is None
    await store.store(A, 7)
    await store.store(B, 9)
    assert (await store.load(A), await store.load(B), await store.load(ANEW)) == (7, 9, None)
    await store.store(A, 3)
    assert await store.load(A) == 3
    await store.store(ANEW, 0)
    assert await store.load(ANEW) == 0


async def test_memory_and_file_keep_what_was_stored_for_exactly_this_topic(tmp_path: Path) -> None:
    await check_store(MemoryOffsetStore())
    store = FileOffsetStore(str(tmp_path / "offsets"))
    await check_store(store)
    store.close()
    again = FileOffsetStore(str(tmp_path / "offsets"))
    assert (await again.load(ANEW), await again.load(A), await again.load(B)) == (0, None, 9)
    again.close()


@pytest.mark.parametrize("seed", range(8))
async def test_a_crash_at_any_operation_leaves_the_offset_before_or_the_one_after(seed: int) -> None:
    reached = False
    for at in range(1, 40):
        disk = made_disk()
        store = opened(disk)
        await store.store(A, 1)
        done = 1

        def strike() -> None:
            raise SimulatedDeath

        disk.crash_at_operation(at, strike)
        try:
            await store.store(A, 2)
            done = 2
            await store.store(B, 5)
            done = 3
        except SimulatedDeath:
            reached = True
        disk.cancel_crash()
        disk.on_power_lost(random.Random(seed))
        after = opened(disk)
        found = (await after.load(A), await after.load(B))
        states = [(1, None), (2, None), (2, 5)]
        assert found in states, f"crash at operation {at}: {found}"
        assert states.index(found) >= done - 1, "what was stored survives"
    assert reached


def test_a_blocking_program_makes_and_uses_one_without_a_loop_of_its_own(tmp_path: Path) -> None:
    store = FileOffsetStore(str(tmp_path / "offsets"))
    for index in (1, 2):
        asyncio.run(store.store(A, index))
    assert asyncio.run(store.load(A)) == 2
    store.close()


def test_a_file_has_one_process_and_is_free_when_it_ends() -> None:
    disk = made_disk()
    store = opened(disk)
    with pytest.raises(InvalidConfiguration, match="another process's"):
        opened(disk)
    store.close()
    opened(disk).close()


async def test_a_store_that_fails_keeps_the_offset_before() -> None:
    disk = made_disk()
    store = opened(disk)
    await store.store(A, 1)

    class Full(SimFiles):
        def open(self, path: str, **how: Any) -> Any:
            raise OSError(28, "No space left on device")

    store._files = Full(disk)
    with pytest.raises(OSError, match="No space"):
        await store.store(A, 2)
    assert await store.load(A) == 1
    store._files = SimFiles(disk)
    await store.store(A, 3)
    assert await store.load(A) == 3


def test_every_flipped_bit_and_every_cut_of_the_file_is_noticed() -> None:
    whole = encode_offsets({A: 12345, B: 0})
    assert decode_offsets(whole, "f") == {A: 12345, B: 0}
    assert decode_offsets(b"", "f") == {}
    for at in range(len(whole)):
        for damaged in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at] if at else b"x"):
            try:
                found = decode_offsets(damaged, "f")
            except InvalidConfiguration:
                continue
            assert found == {A: 12345, B: 0}, "a blank of the file, at most"
    with pytest.raises(InvalidConfiguration, match="has format 2"):
        decode_offsets(whole.replace(b'"format": 1', b'"format": 2'), "f")
