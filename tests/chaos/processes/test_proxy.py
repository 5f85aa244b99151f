"""Each mode of the proxy, on loopback, with a server that answers in capitals."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from magnetar.runtime.network import Endpoint
from tests.chaos.processes.proxy import ANY, Link, Mode, Proxy, owner_of

QUIET_S = 0.05
"""After so long without an answer, nothing is coming: what passes needs a millisecond."""
LONG_S = 10.0


class Wire:
    """A connection of `me` to the server, through the proxy."""

    def __init__(self, proxy: Proxy, at: Endpoint, got: list[bytes]) -> None:
        self.proxy, self.at, self.got = proxy, at, got

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.at.host, self.at.port)

    async def open_and_read(self) -> None:
        await self.open()
        await self.reader.readexactly(1)

    async def ask(self, text: bytes) -> bytes:
        self.writer.write(text)
        return await asyncio.wait_for(self.reader.readexactly(len(text)), LONG_S)

    async def silent(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), QUIET_S)
        except TimeoutError:
            return True
        return False

    async def server_was_reset(self) -> None:
        async with asyncio.timeout(LONG_S):
            while self.got != [b"reset"]:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def set(self, link: Link, source: str = "me") -> None:
        await asyncio.to_thread(self.proxy.set, source, "server", link)

    async def heal(self) -> None:
        await asyncio.to_thread(self.proxy.heal)


@asynccontextmanager
async def _wire() -> AsyncIterator[Wire]:
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                got.append(chunk)
                writer.write(chunk.upper())
        except ConnectionError:
            got.append(b"reset")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    to = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    with Proxy(lambda client, at: "me") as proxy:
        wire = Wire(proxy, proxy.listen(Endpoint("127.0.0.1", 0), to, "server"), got)
        await wire.open()
        assert await wire.ask(b"begin") == b"BEGIN"
        got.clear()
        yield wire
        wire.writer.close()
    server.close()


async def test_a_link_passes_and_says_which_pairs_it_has() -> None:
    async with _wire() as wire:
        big = b"x" * 1_000_000
        assert await wire.ask(big) == big.upper()
        assert wire.proxy.pairs() == [("me", "server")]


async def test_a_delayed_link_takes_its_time_each_way() -> None:
    async with _wire() as wire:
        await wire.set(Link(delay_s=0.05))
        began = time.monotonic()
        assert await wire.ask(b"slow") == b"SLOW"
        assert time.monotonic() - began >= 0.1


async def test_a_slow_link_passes_so_many_bytes_a_second() -> None:
    async with _wire() as wire:
        await wire.set(Link(bytes_per_s=100_000))
        began = time.monotonic()
        assert await wire.ask(b"y" * 20_000) == b"Y" * 20_000
        assert time.monotonic() - began >= 0.18


async def test_a_held_link_loses_nothing_and_goes_on_when_healed() -> None:
    async with _wire() as wire:
        await wire.set(Link(Mode.HOLD), ANY)
        wire.writer.write(b"later")
        assert await wire.silent()
        assert wire.got == []
        await wire.heal()
        assert await wire.reader.readexactly(5) == b"LATER"


async def test_a_link_of_one_way_takes_requests_and_holds_answers() -> None:
    async with _wire() as wire:
        await wire.set(Link(Mode.HOLD_ANSWERS))
        wire.writer.write(b"there")
        assert await wire.silent()
        assert wire.got == [b"there"]
        await wire.heal()
        assert await wire.reader.readexactly(5) == b"THERE"
        wire.got.clear()
        await wire.set(Link(Mode.HOLD_REQUESTS))
        wire.writer.write(b"not")
        assert await wire.silent()
        assert wire.got == []


async def test_a_half_open_link_is_gone_for_the_server_and_silent_for_the_client() -> None:
    async with _wire() as wire:
        await wire.set(Link(Mode.HALF_OPEN))
        wire.writer.write(b"lost")
        assert await wire.silent()
        await wire.server_was_reset()
        await wire.heal()
        with pytest.raises(ConnectionResetError):
            await wire.reader.read(1)
        await wire.open()
        assert await wire.ask(b"again") == b"AGAIN"


async def test_a_cut_link_resets_both_ends_and_whatever_comes() -> None:
    async with _wire() as wire:
        await wire.set(Link(Mode.CUT))
        with pytest.raises(ConnectionResetError):
            await wire.reader.read(1)
        with pytest.raises(ConnectionResetError):
            await wire.open_and_read()
        await wire.server_was_reset()
        await wire.heal()
        await wire.open()
        assert await wire.ask(b"again") == b"AGAIN"


async def test_a_reset_cuts_once() -> None:
    async with _wire() as wire:
        await asyncio.to_thread(wire.proxy.reset, ANY, "server")
        with pytest.raises(ConnectionResetError):
            await wire.reader.read(1)
        await wire.open()
        assert await wire.ask(b"again") == b"AGAIN"


async def test_a_link_of_another_source_is_left_alone() -> None:
    async with _wire() as wire:
        await wire.set(Link(Mode.CUT), "somebody else")
        assert await wire.ask(b"mine") == b"MINE"


async def test_the_owner_of_a_connection_is_found_by_its_process() -> None:
    async with _wire() as wire:
        ends = [Endpoint(*wire.writer.get_extra_info(name)[:2]) for name in ("sockname", "peername")]
        assert owner_of(ends[0], ends[1], [1, os.getpid()]) == os.getpid()
        assert owner_of(ends[0], Endpoint("127.0.0.1", 1), [os.getpid()]) is None
