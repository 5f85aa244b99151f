"""Strangers of a port, and connections that flood it, have a share of the loop together, however many they are.

Counted in what is charged, on a clock that the test moves: however fast the machine is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.access import ListenerAccess
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import server
from magnetar.runtime.tcp import http2 as http2
from magnetar.runtime.tcp import http2_frames as frames
from magnetar.runtime.tcp.share import (
    PRUNE_TURNS_MIN,
    SAVED_FRAMES_MAX,
    SHARE_RATE,
    SHARE_WAIT_MIN_S,
    UnauthenticatedLoopShare,
)
from tests.runtime.tcp.test_patience import OPENED, Served, Strict, begun, data, message
from tests.support.wire import Wire

CROWD = 1000
A_LOOK = SHARE_RATE * SHARE_WAIT_MIN_S
ONE_MORE = 250
"""What one slice may be charged beyond its end: of the shortest frames in SLICE_BYTES."""
PINGS = b"".join(frames.encode_ping(each.to_bytes(8, "big")) for each in range(400))
"""Fewer than PATIENCE: no connection ends for them alone."""


class Ticks:
    """The loop of a `UnauthenticatedLoopShare`: its time and its timers."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[Callable[[], None]]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        self.timers.append(call)
        return asyncio.get_running_loop().call_later(1e6, lambda: None)

    async def tick(self) -> None:
        self.now += SHARE_WAIT_MIN_S
        timers, self.timers = self.timers, []
        for each in timers:
            each()
        for _ in range(6):
            await asyncio.sleep(0)


class Port(Served):
    """Many connections of one listener."""

    def __init__(self) -> None:
        self.ticks = Ticks()
        self.listener = server._Listener([("Broker", self)], ListenerAccess(Strict()), SystemClock())
        self.share = self.listener.share = UnauthenticatedLoopShare(self.ticks)  # type: ignore[arg-type]
        self.release = asyncio.Event()
        self.ends: list[server._ServerConnection] = []

    def connect_one(self) -> tuple[server._ServerConnection, Wire]:
        end, wire = server._ServerConnection(self.listener), Wire()
        end.connection_made(wire)
        self.ends.append(end)
        return end, wire

    async def crowd(self, sends: bytes, count: int = CROWD) -> list[tuple[server._ServerConnection, Wire]]:
        found = [self.connect_one() for _ in range(count)]
        for end, _ in found:
            arrives(end, OPENED + sends)
        return found

    async def known(self) -> tuple[server._ServerConnection, Wire]:
        end, wire = self.connect_one()
        arrives(end, OPENED + call(1))
        await self.turns()
        assert end.allowance.is_known
        return end, wire

    async def close(self) -> None:
        self.release.set()
        for end in self.ends:
            end.close(ConnectionLost("the test is over"))
        if self.listener.handlers:
            await asyncio.wait(list(self.listener.handlers))


def arrives(end: server._ServerConnection, sent: bytes) -> None:
    """At once; what it does not take waits for its turn."""
    end.get_buffer(-1)[: len(sent)] = sent
    end.buffer_updated(len(sent))


def call(id_: int) -> bytes:
    return begun(id_, "Lookup", authorization=b"right") + data(id_, message(b"\n\1t"), frames.END_STREAM)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    monkeypatch.setattr(http2, "perf_counter", lambda: 0.0)
    found = Port()
    yield found
    await found.close()


async def test_a_crowd_of_strangers_each_within_its_own_patience_is_bounded_together(port: Port) -> None:
    await port.crowd(PINGS)
    assert port.share.spent <= SAVED_FRAMES_MAX + ONE_MORE
    for looks in range(1, 200):
        await port.ticks.tick()
        assert port.share.spent <= SAVED_FRAMES_MAX + looks * A_LOOK + ONE_MORE
    assert port.share.spent >= 199 * A_LOOK, "they go on all the same"


async def test_a_caller_that_comes_while_a_crowd_waits_is_admitted_at_the_next_look(port: Port) -> None:
    await port.crowd(PINGS)
    for _ in range(20):
        await port.ticks.tick()
    for number in range(20):
        end, wire = port.connect_one()
        arrives(end, OPENED + call(1))
        await port.ticks.tick()
        await port.ticks.tick()
        assert end.allowance.is_known, number
        assert b"\n\1t" in bytes(wire.written), "it has its answer"


async def test_a_caller_that_is_known_waits_for_no_share(port: Port) -> None:
    end, wire = await port.known()
    await port.crowd(PINGS)
    assert port.share.is_share_used_up
    before = port.share.spent
    for number in range(50):
        del wire.written[:]
        arrives(end, call(3 + 2 * number))
        await port.turns()
        assert b"\n\1t" in bytes(wire.written), number
    assert port.share.spent == before, "and spends nothing of it"


async def test_known_connections_that_flood_have_the_same_share_together(port: Port) -> None:
    several = [await port.known() for _ in range(50)]
    for end, _ in several:
        end.allowance.set_allowance(1e9, 0)
    spent = [port.share.spent]
    for end, _ in several:
        arrives(end, PINGS * 20)
    for _ in range(100):
        await port.ticks.tick()
        spent.append(port.share.spent)
    assert spent[-1] - spent[0] <= SAVED_FRAMES_MAX + 100 * A_LOOK + 50 * http2.CHARGE_PER_TURN_MAX + ONE_MORE
    assert spent[-1] - spent[0] >= 50 * A_LOOK


async def test_one_that_is_lost_while_it_waits_is_not_called_again(port: Port) -> None:
    crowd = await port.crowd(PINGS, 100)
    for end, _ in crowd:
        end.abort(ConnectionLost("it is gone"))
    before = port.share.spent
    for _ in range(50):
        await port.ticks.tick()
    assert port.share.spent == before
    assert not port.ticks.timers, "nothing is looked at for nobody"


async def test_turns_that_are_over_are_forgotten_while_others_come(port: Port) -> None:
    port.share.spend_frames(10 * int(SAVED_FRAMES_MAX))
    for _ in range(5000):
        port.share.queue_connection_turn(lambda: None, is_light=True).cancel()
        port.share.queue_connection_turn(lambda: None, is_light=False).cancel()
    await port.ticks.tick()
    assert len(port.share._light) + len(port.share._heavy) <= PRUNE_TURNS_MIN


async def test_who_asks_for_another_turn_within_its_own_has_it_at_the_next_look() -> None:
    ticks, had = Ticks(), list[int]()
    share = UnauthenticatedLoopShare(ticks)  # type: ignore[arg-type]

    def again() -> None:
        had.append(len(had))
        share.queue_connection_turn(again, is_light=True)

    share.queue_connection_turn(again, is_light=True)
    for looks in range(1, 4):
        await ticks.tick()
        assert len(had) == looks
        assert len(ticks.timers) == 1, "one look follows"
    share.close()


async def test_of_those_that_wait_for_their_turn_few_have_it_at_a_look(port: Port) -> None:
    port.share.spend_frames(int(SAVED_FRAMES_MAX))
    waiting = [asyncio.ensure_future(port.share.wait_turn(20, is_light=each % 2 == 0)) for each in range(200)]
    await port.turns()
    assert not any(each.done() for each in waiting)
    waiting[0].cancel()
    for looks in range(1, 60):
        await port.ticks.tick()
        done = sum(each.done() for each in waiting[1:])
        assert done <= looks * A_LOOK / 20 + 1
    assert all(each.done() for each in waiting)
