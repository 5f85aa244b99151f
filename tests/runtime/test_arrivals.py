"""What arrives and is not read: windows and long messages have one bound, each waits in turn, and none for good."""

import asyncio
import random

import pytest

from magnetar.runtime import budget as module
from magnetar.runtime.budget import WINDOW_BYTES_MIN, ArrivingMessagesMemory

MIB = 1 << 20


class Message:
    def __init__(self, name: object = "") -> None:
        self.name = name
        self.placed = asyncio.Event()
        self.cut = False

    def on_memory_reserved(self) -> None:
        self.placed.set()

    def on_arrival_too_slow(self) -> None:
        self.cut = True


def test_windows_are_shared_out_and_the_first_ones_are_whole() -> None:
    arrivals = ArrivingMessagesMemory(64 * MIB)
    granted = [arrivals.reserve_window(2 * MIB) for _ in range(1000)]
    assert granted[:8] == [2 * MIB] * 8
    assert granted == sorted(granted, reverse=True)
    assert granted[-1] == WINDOW_BYTES_MIN
    assert arrivals.windows == sum(granted) <= 32 * MIB + 1000 * WINDOW_BYTES_MIN
    for each in granted:
        arrivals.release_window(each)
    assert (arrivals.windows, arrivals.reserve_window(2 * MIB), arrivals.reserve_window(1000)) == (0, 2 * MIB, 1000)
    assert ArrivingMessagesMemory().reserve_window(2 * MIB) == 2 * MIB


@pytest.mark.asyncio
async def test_long_messages_wait_in_turn_until_those_before_are_read() -> None:
    arrivals = ArrivingMessagesMemory(20)
    a, b, c, d = (Message(name) for name in "abcd")
    assert arrivals.admit(a, 100), "a lone one fits"
    assert not arrivals.admit(b, 6)
    assert not arrivals.admit(c, 6)
    assert not arrivals.admit(d, 4)
    arrivals.on_messages_read(a)
    assert not b.placed.is_set(), "it is not whole: what was read came before it"
    arrivals.on_message_complete(a)
    arrivals.on_messages_read(a)
    assert [each.placed.is_set() for each in (b, c, d)] == [True, False, False], "d would fit, and it is not its turn"
    arrivals.discard(c)
    assert d.placed.is_set()
    arrivals.on_message_complete(b)
    b.placed.clear()
    assert not arrivals.admit(b, 1), "there is no room"
    arrivals.on_messages_read(b)
    assert b.placed.is_set()
    arrivals.on_message_complete(d)
    assert arrivals.admit(d, 5), "the one before it is not read, and there is room"
    assert arrivals.long == 1 + 4 + 5
    arrivals.on_messages_read(d)
    assert arrivals.long == 1 + 5, "it is not whole: what was read came before it"
    arrivals.check()
    for each in (b, d):
        arrivals.discard(each)
    assert arrivals.long == 0
    arrivals.check()


@pytest.mark.asyncio
async def test_while_others_wait_one_that_does_not_come_is_cut_and_one_that_is_not_read_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOW_ARRIVAL_S", 0.05)
    arrivals = ArrivingMessagesMemory(20)
    slow, unread, waits = Message(), Message(), Message()
    assert arrivals.admit(slow, 5)
    assert arrivals.admit(unread, 5)
    arrivals.on_message_complete(unread)
    await asyncio.sleep(0.15)
    assert not slow.cut, "none waits"
    assert not arrivals.admit(waits, 5)
    async with asyncio.timeout(30):
        await waits.placed.wait()
    assert (slow.cut, unread.cut) == (True, False)
    arrivals.discard(slow)
    for each in (unread, waits):
        arrivals.discard(each)
    assert arrivals.long == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(30))
async def test_under_any_order_the_bound_holds_and_every_message_gets_its_place(seed: int) -> None:
    rng, arrivals = random.Random(seed), ArrivingMessagesMemory(200)
    streams, placed = [Message(number) for number in range(12)], 0

    async def send(stream: Message) -> None:
        nonlocal placed
        for _ in range(30):
            size = rng.randrange(1, 90)
            if not arrivals.admit(stream, size):
                await stream.placed.wait()
                stream.placed.clear()
            assert arrivals.long <= 100
            placed += 1
            await asyncio.sleep(0)
            if rng.random() < 0.2:
                arrivals.discard(stream)
                continue
            arrivals.on_message_complete(stream)
            await asyncio.sleep(0)
            arrivals.on_messages_read(stream)
            arrivals.check()

    async with asyncio.timeout(20):
        await asyncio.gather(*(send(each) for each in streams))
    assert placed == 360
    assert arrivals.long == 0
