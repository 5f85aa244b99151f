"""Whoever waits at the end of a ledger hears of the next entry and of a fence, and no more wait than fit."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.bookie.requests import tails
from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.ledger.format.peer import Op, Status
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller
from tests.bookie.maintenance.test_limbo import House, with_house


def wait(caller: PeerCaller, ledger: int, after: int, ms: int) -> asyncio.Task[int]:
    """The LAC answered; -2 - status when it is refused."""

    async def ask() -> int:
        head, _ = await caller.send(Op.READ_LAC, ledger, after, count=ms)
        return head.lac if head.status is Status.OK else -2 - head.status

    return asyncio.get_running_loop().create_task(ask())


def test_a_wait_is_answered_when_the_lac_passes_and_not_before() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        caller = cluster.caller(bookie)
        early, late = wait(caller, 7, -1, 50_000), wait(caller, 7, 1, 50_000)
        await caller.add(7, 0, b"zero", lac=-1)
        await asyncio.sleep(1)
        assert not early.done(), "the first entry of a ledger says that nothing is confirmed yet"
        assert bookie.statistics()["tails"] == 2
        await caller.add(7, 1, b"one", lac=0)
        assert await early == 0
        assert await wait(caller, 7, -1, 50_000) == 0, "known already: at once"
        await caller.send(Op.WRITE_LAC, 7, 1)
        await asyncio.sleep(1)
        assert not late.done()
        await caller.send(Op.WRITE_LAC, 7, 2)
        assert await late == 2
        assert bookie.statistics()["tails"] == 0

    with_cluster(main)


def test_a_wait_ends_with_its_time_and_with_a_fence() -> None:
    async def main(cluster: Cluster) -> None:
        caller = cluster.caller(await cluster.start())
        loop = asyncio.get_running_loop()
        await caller.add(7, 0, b"zero", lac=-1)
        began = loop.time()
        assert await wait(caller, 7, 5, 2_000) == -1
        assert 2.0 <= loop.time() - began < 3.0
        waiting = wait(caller, 7, 5, 50_000)
        await asyncio.sleep(1)
        assert not waiting.done()
        await caller.read(7, 0, fence=True)
        assert await waiting == -1
        assert await wait(caller, 7, 5, 50_000) == -1, "a fenced ledger is waited for no more"
        assert loop.time() - began < 5.0

    with_cluster(main)


def test_no_more_wait_than_fit_and_a_close_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "WAITING_MAX", 3)

    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        caller = cluster.caller(bookie)
        waiting = [wait(caller, ledger, -1, 3_000) for ledger in (1, 1, 2)]
        await asyncio.sleep(0.5)
        assert await wait(caller, 1, -1, 3_000) == -2 - Status.BUSY
        assert {-2 - Status.NO_SUCH_LEDGER} == {await each for each in waiting}
        assert bookie.statistics()["tails"] == 0
        assert await wait(caller, 1, -1, tails.WAIT_MS_MAX + 1) == -2 - Status.BAD_REQUEST
        left = wait(caller, 1, -1, 30_000)
        await asyncio.sleep(0.5)
        await cluster.restart()
        assert isinstance((await asyncio.gather(left, return_exceptions=True))[0], Exception)

    with_cluster(main)


async def a_writer(house: House, entries: int) -> tuple[LedgerClient, LedgerWriter]:
    client = house.client()
    writer = await client.create()
    for i in range(entries):
        await writer.append(b"%d" % i)
    return client, writer


def test_a_reader_elsewhere_hears_of_the_last_entry_of_an_idle_writer_and_of_each_next_one() -> None:
    async def main(house: House) -> None:
        client, writer = await a_writer(house, 3)
        other = house.client()
        reader = await other.open(writer.ledger_id)
        assert reader.last_entry == 1, "the last entry's own LAC is that of the one before"
        assert await reader.wait_confirmed(1, 30.0) == 2, "the writer is idle and tells it"
        assert [bytes(e.payload) for e in await reader.read(2, 2)] == [b"2"]
        waiting = asyncio.create_task(reader.wait_confirmed(2, 30.0))
        await asyncio.sleep(12.0)  # longer than it waits at one bookie
        assert not waiting.done()
        began = asyncio.get_running_loop().time()
        await writer.append(b"3")
        await writer.append(b"4")
        assert await waiting == 3
        assert asyncio.get_running_loop().time() - began < 1.0, "told, not polled"
        assert not reader.closed
        await other.close()
        await client.close()

    with_house(main)


def test_a_tail_goes_on_when_its_bookie_dies() -> None:
    """The ledger ends then, for there is no other bookie, and the tail says so."""

    async def main(house: House) -> None:
        client, writer = await a_writer(house, 3)
        other = house.client()
        reader = await other.open(writer.ledger_id)
        assert await reader.wait_confirmed(1, 30.0) == 2
        waiting = asyncio.create_task(reader.wait_confirmed(2, 120.0))
        await asyncio.sleep(1.0)
        (tailed,) = [name for name, bookie in house.bookies.items() if bookie.statistics()["tails"]]
        await house.stop(tailed)
        for i in (3, 4):
            await writer.append(b"%d" % i)
        assert await waiting >= 3
        assert await reader.wait_confirmed(4, 120.0) == 4
        assert reader.closed
        await other.close()
        await client.close()

    with_house(main)


def test_a_tail_learns_from_a_fence_that_the_ledger_has_ended() -> None:
    async def main(house: House) -> None:
        client, writer = await a_writer(house, 3)
        other = house.client()
        reader = await other.open(writer.ledger_id)
        assert await reader.wait_confirmed(1, 30.0) == 2
        waiting = asyncio.create_task(reader.wait_confirmed(2, 120.0))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        began = asyncio.get_running_loop().time()
        await client.recover(writer.ledger_id)
        assert await waiting == 2
        assert reader.closed
        assert asyncio.get_running_loop().time() - began < 2.0, "told, not found out after the wait"
        await other.close()
        await client.close()

    with_house(main)


def test_a_wait_without_news_ends_with_its_time() -> None:
    async def main(house: House) -> None:
        client, writer = await a_writer(house, 1)
        other = house.client()
        reader = await other.open(writer.ledger_id)
        assert await reader.wait_confirmed(-1, 30.0) == 0
        began = asyncio.get_running_loop().time()
        assert await reader.wait_confirmed(0, 25.0) == 0
        assert 25.0 <= asyncio.get_running_loop().time() - began < 26.0
        await other.close()
        await client.close()

    with_house(main)
