"""The bound of a peer server's connections: strangers fill what is free and push out none that is connected."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from magnetar.runtime.descriptors import PROCESS_DESCRIPTORS
from tests.runtime.peer.test_peers import SOON_S, Bench, echo

FREE = 8


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - ZeroMQ tells it in a thread of its own
            await asyncio.sleep(0.01)


async def test_connections_above_the_bound_are_cut_and_those_that_are_open_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = PROCESS_DESCRIPTORS.connections
    monkeypatch.setattr(type(PROCESS_DESCRIPTORS), "connections_max", before + FREE)
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    async with asyncio.timeout(SOON_S):
        await peer.request(b"1", timeout_s=SOON_S)
    where = ("127.0.0.1", server.endpoint.port)
    strangers = [socket.create_connection(where) for _ in range(4 * FREE)]
    await until(lambda: server.statistics()["connections_cut"] == 3 * FREE + 1)
    assert server.statistics()["connections"] == FREE
    async with asyncio.timeout(SOON_S):
        assert (await peer.request(b"2", timeout_s=SOON_S)).head == b"2"
    for each in strangers:
        each.close()
    await until(lambda: PROCESS_DESCRIPTORS.connections == before + 1)
    later = bench.peer(server.endpoint)
    async with asyncio.timeout(SOON_S):
        assert (await later.request(b"3", timeout_s=SOON_S)).head == b"3"
    await bench.close()
    bench.ends.clear()
    assert PROCESS_DESCRIPTORS.connections == before, "each place is given back"


async def test_a_stranger_that_says_nothing_gives_its_place_back(bench: Bench) -> None:
    before = PROCESS_DESCRIPTORS.connections
    server = await bench.serve(echo)
    with socket.create_connection(("127.0.0.1", server.endpoint.port)):
        await until(lambda: PROCESS_DESCRIPTORS.connections == before + 1)
        await until(lambda: PROCESS_DESCRIPTORS.connections == before)
