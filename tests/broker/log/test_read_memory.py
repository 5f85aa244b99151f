"""What subscriptions have read and not delivered: one bound, given back by the least used; no wait for a consumer."""

from __future__ import annotations

import asyncio
import random

import pytest

from magnetar.broker.log.reader import CHUNK_BYTES_MIN, ReadMemoryBudget

KIB = 1 << 10


class Buffer:
    def __init__(self, memory: ReadMemoryBudget) -> None:
        self.memory = memory

    def holds(self, size: int) -> Buffer:
        self.memory.set_used_bytes_of_holder(self, size)
        return self

    def release_memory(self) -> None:
        self.memory.set_used_bytes_of_holder(self, 0)


@pytest.mark.asyncio
async def test_a_read_makes_the_least_used_give_back_as_many_as_it_needs() -> None:
    memory = ReadMemoryBudget(10 * KIB)
    first, second, third = (Buffer(memory).holds(3 * KIB) for _ in range(3))
    first.holds(2 * KIB)
    async with memory.reserve(5 * KIB):
        assert memory.used_bytes == 10 * KIB
        assert memory.given_back == 1
        assert list(memory._holders) == [third, first], "the second one had not been used for longest"
    first.holds(0)
    third.holds(0)
    assert (memory.used_bytes, memory.settling) == (0, 5 * KIB)
    async with memory.reserve(6 * KIB):
        assert memory.settling == 0, "what was read is handed out before another read may begin"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (memory.used_bytes, memory.given_back, second in memory._holders) == (0, 1, False)
    memory.check()


@pytest.mark.asyncio
async def test_what_reads_brought_is_counted_once_and_stays_when_the_next_one_begins_at_once() -> None:
    """Subscriptions that share a read go on in one turn of the loop, and each counts what it got."""
    memory, read = ReadMemoryBudget(40 * KIB), asyncio.Event()
    buffers = [Buffer(memory) for _ in range(4)]

    async def reads(buffer: Buffer) -> None:
        async with memory.reserve(8 * KIB):
            await read.wait()
        buffer.holds(8 * KIB)
        assert memory.used_bytes == 32 * KIB

    tasks = [asyncio.create_task(reads(each)) for each in buffers]
    await asyncio.sleep(0)
    assert (memory.held, memory.under_way) == (0, 32 * KIB)
    read.set()
    await asyncio.sleep(0)
    assert (memory.held, memory.under_way) == (32 * KIB, 0)
    async with memory.reserve(8 * KIB):
        assert (memory.used_bytes, memory.given_back) == (40 * KIB, 0), "they had no turn to deliver anything"
    await asyncio.gather(*tasks)
    memory.check()


@pytest.mark.asyncio
async def test_reads_wait_for_reads_alone_each_in_turn_and_a_lone_one_is_done_whatever_its_size() -> None:
    memory, order = ReadMemoryBudget(10 * KIB), list[int]()
    gates = [asyncio.Event() for _ in range(4)]

    async def read(number: int, size: int) -> None:
        async with memory.reserve(size):
            order.append(number)
            await gates[number].wait()

    tasks = [asyncio.create_task(read(number, size)) for number, size in enumerate((90 * KIB, KIB, 9 * KIB, KIB))]
    await asyncio.sleep(0)
    assert order == [0]
    tasks[1].cancel()
    gates[0].set()
    await tasks[0]
    gates[2].set()
    gates[3].set()
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks[2:])
    assert order == [0, 2, 3]
    await asyncio.sleep(0)
    assert memory.used_bytes == 0
    memory.check()


def test_chunks_are_halves_of_what_is_wanted_when_many_have_something() -> None:
    memory = ReadMemoryBudget(8 << 20)
    assert memory.choose_read_size(1 << 20) == 1 << 20
    buffers = [Buffer(memory).holds(1) for _ in range(5)]
    assert memory.choose_read_size(1 << 20) == 1 << 19
    buffers += [Buffer(memory).holds(1) for _ in range(1000)]
    assert memory.choose_read_size(1 << 20) == CHUNK_BYTES_MIN
    assert memory.choose_read_size(1000) == 1000


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(20))
async def test_under_any_order_the_bound_holds_and_every_read_is_done(seed: int) -> None:
    rng, memory, done = random.Random(seed), ReadMemoryBudget(100 * KIB), [0]
    buffers = [Buffer(memory) for _ in range(20)]

    async def reads(buffer: Buffer) -> None:
        for _ in range(20):
            size = rng.randrange(1, 40 * KIB)
            async with memory.reserve(size):
                assert memory.used_bytes <= 100 * KIB
                await asyncio.sleep(0)
                if rng.random() < 0.1:
                    continue
            buffer.holds(size)
            assert memory.used_bytes <= 100 * KIB
            memory.check()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
                buffer.holds(0)
            done[0] += 1

    tasks = [asyncio.create_task(reads(each)) for each in buffers]
    for task in rng.sample(tasks, 3):
        await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert done[0] > 200
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert memory.under_way == memory.settling == 0
    memory.check()
