"""One session after another: calls wait for the next one, reads are repeated, a commit under way is unknown."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.metadata.session import MetadataResponsiveness, ReconnectingStore
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto.errors import BadVersion, ConnectionLost, SessionExpired, Unavailable
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.sim.world import Simulation
from tests.bookie.stores import simulate


def in_a_backend(test: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def main(simulation: Simulation) -> None:
        async def run() -> None:
            await test(await SqliteStore.open(simulation.world("a"), ":memory:"))

        await simulation.spawn("a", run())

    simulate(main)


pytestmark = pytest.mark.run_by.with_args(in_a_backend)


async def test_calls_wait_for_the_next_session_and_go_to_it(store: SqliteStore, /) -> None:
    first = store.new_session()
    held = ReconnectingStore(first, MetadataResponsiveness(SystemClock()))
    await held.put("/a", b"1")
    await first.close()
    held.suspend()
    waiting = [asyncio.create_task(held.put("/b", b"2")), asyncio.create_task(held.put("/c", b"3"))]
    reading = asyncio.create_task(held.get("/a"))
    await asyncio.sleep(5.0)
    assert not any(task.done() for task in (*waiting, reading))
    held.set_session(store.new_session())
    await asyncio.gather(*waiting)
    found = await reading
    assert found is not None
    assert (found.value, await held.children("/")) == (b"1", ["a", "b", "c"])


async def test_who_hears_of_the_loss_first_waits_too_and_a_commit_under_way_is_unknown(store: SqliteStore, /) -> None:
    first, second = store.new_session(), store.new_session()
    held = ReconnectingStore(first, MetadataResponsiveness(SystemClock()))
    await held.put("/a", b"1")
    await first.close()
    with pytest.raises(ConnectionLost):
        await held.put("/a", b"2")
    reading = asyncio.create_task(held.get("/a"))
    await asyncio.sleep(1.0)
    assert not reading.done()
    held.set_session(second)
    assert await reading is not None
    following = asyncio.create_task(anext(held.watch("/", await held.revision())))
    await asyncio.sleep(1.0)
    await second.close()
    with pytest.raises(ConnectionLost):
        await following


async def test_without_a_next_session_a_call_is_unavailable_and_after_the_end_expired(store: SqliteStore, /) -> None:
    held = ReconnectingStore(store.new_session(), MetadataResponsiveness(SystemClock()))
    held.suspend()
    with pytest.raises(Unavailable):
        await held.put("/a", b"1")
    waiting = asyncio.create_task(held.get("/a"))
    await asyncio.sleep(1.0)
    held.stop_reconnecting()
    with pytest.raises(SessionExpired):
        await waiting
    with pytest.raises(SessionExpired):
        await held.commit([])


async def test_what_is_answered_and_what_is_not_is_counted(store: SqliteStore, /) -> None:
    first, use = store.new_session(), MetadataResponsiveness(SystemClock())
    held = ReconnectingStore(first, use)
    await held.put("/a", b"1")
    with pytest.raises(BadVersion):
        await held.put("/a", b"2", 7)
    assert (use.commit_seconds.count, use.failures, use.sessions_ended) == (1, 0, 0), "a refusal is an answer"
    await first.close()
    with pytest.raises(ConnectionLost):
        await held.put("/a", b"2")
    held.suspend()  # the owner hears of it later
    with pytest.raises(Unavailable):
        await held.get("/a")
    assert (use.commit_seconds.count, use.failures, use.sessions_ended) == (1, 2, 1)
    held.set_session(store.new_session())
    await held.put("/a", b"2")
    assert (use.commit_seconds.count, use.failures, use.sessions_ended) == (2, 2, 1)
