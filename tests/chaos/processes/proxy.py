"""A TCP proxy between processes that can be told to be a bad network. Needs no root.

    with Proxy(source_of) as proxy:
        proxy.listen(Endpoint("127.0.0.2", port), Endpoint("127.0.0.1", port), "bookie-1")
        proxy.set("broker-0", "bookie-1", Link(Mode.HOLD))     # one pair of processes; "*" as source: all of them
        proxy.heal()

A process listens on 127.0.0.1 and is advertised as 127.0.0.2, where the proxy listens at the same port; `source_of`
says which process a connection comes from (`owner_of` asks /proc). A connection's link is looked up for every chunk,
so a change takes effect in the middle of streams.

| mode | existing connections | new connections |
|---|---|---|
| PASS | with `delay_s` before and `bytes_per_s` of each chunk | the same |
| HOLD | nothing passes, nothing is lost: it passes after `heal` (a cut cable whose TCP sends again) | accepted, held |
| HOLD_REQUESTS, HOLD_ANSWERS | HOLD in one direction: a one-way network | the same |
| HALF_OPEN | the server's end is reset, the client's stays silent until `heal` resets it | accepted, silent |
| CUT | reset at once, both ends, in the middle of a message | reset |

`reset` cuts what is there, once. Runs its event loop in a thread; the methods may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from magnetar.runtime.network import Endpoint

CHUNK = 64 << 10
SLICE_S = 0.02
"""A slow link passes what it may in pieces of so long."""
ANY = "*"
QUIET = (OSError, ExceptionGroup)
"""How a connection ends that somebody reset."""


class Mode(Enum):
    PASS = "pass"
    HOLD = "hold"
    HOLD_REQUESTS = "hold requests"
    HOLD_ANSWERS = "hold answers"
    HALF_OPEN = "half open"
    CUT = "cut"


class Link(NamedTuple):
    mode: Mode = Mode.PASS
    delay_s: float = 0.0
    bytes_per_s: int = 0


WHOLE = Link()


def owner_of(client: Endpoint, server: Endpoint, pids: Iterable[int]) -> int | None:
    """Which of these processes has the connection from `client` to `server` open; None: none of them any more."""
    mine, its = (f"{each.port:04X}" for each in (client, server))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC speaks IPv4 through sockets of IPv6
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, remote, *rest = line.split()
            if local.endswith(f":{mine}") and remote.endswith(f":{its}"):
                wanted = f"socket:[{rest[6]}]"
                return next((pid for pid in pids if wanted in _sockets(pid)), None)
    return None


def _sockets(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


class _Connection:
    """Two streams and what flows between them."""

    def __init__(self, proxy: Proxy, source: str, target: str, client: tuple[Any, Any]) -> None:
        self.proxy, self.source, self.target = proxy, source, target
        self.client_reader, self.client = client
        self.server: asyncio.StreamWriter | None = None

    @property
    def link(self) -> Link:
        return self.proxy.link(self.source, self.target)

    async def run(self, to: Endpoint) -> None:
        if self.link.mode is Mode.CUT:
            return
        await self._passing(Mode.HOLD)
        reader, self.server = await asyncio.open_connection(to.host, to.port)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pump(self.client_reader, self.server, Mode.HOLD_REQUESTS))
            both.create_task(self._pump(reader, self.client, Mode.HOLD_ANSWERS))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held_by: Mode) -> None:
        while chunk := await reader.read(CHUNK):
            await self._passing(held_by)
            if self.link.delay_s:
                await asyncio.sleep(self.link.delay_s)
            while chunk:
                await self._passing(held_by)
                rate = self.link.bytes_per_s
                size = max(1, int(rate * SLICE_S)) if rate else len(chunk)
                writer.write(chunk[:size])
                chunk = chunk[size:]
                await writer.drain()
                if rate:
                    await asyncio.sleep(SLICE_S)
        await self._passing(held_by)
        writer.write_eof()

    async def _passing(self, held_by: Mode) -> None:
        while self.link.mode in (Mode.HOLD, Mode.HALF_OPEN, held_by):
            await self.proxy.changed.wait()

    def reset(self, *, server: bool = True, client: bool = True) -> None:
        """With RST instead of FIN: the other end sees an error, not an end."""
        for wanted, writer in ((server, self.server), (client, self.client)):
            if wanted and writer is not None:
                _abort(writer)


async def _anybody(at: Endpoint) -> bool:
    """Whether somebody listens there; a stopped process does."""
    try:
        _, writer = await asyncio.open_connection(at.host, at.port)
    except OSError:
        return False
    writer.close()
    return True


def _abort(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Proxy:
    """`source_of(client, server)` names the process behind a new connection; it runs in the proxy's thread."""

    def __init__(self, source_of: Callable[[Endpoint, Endpoint], str]) -> None:
        self.changed = asyncio.Event()
        self.passed: dict[tuple[str, str], int] = {}
        self._source_of = source_of
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---------------------------------------------------------------------------------------- from any thread
    def listen(self, at: Endpoint, to: Endpoint, target: str, source: str | None = None) -> Endpoint:
        """Connections to `at` go on to `to`, which is the process `target`. The endpoint, with its port.

        `source` when only one process knows this address: then nobody need be asked, which takes milliseconds.
        """
        return self._call(self._listen(at, to, target, source))

    def set(self, source: str, target: str, link: Link) -> None:
        """Returns when it holds: nothing that is read after this passes as before."""
        self._call(self._set({(source, target): link}))

    def heal(self) -> None:
        self._call(self._set(None))

    def reset(self, source: str, target: str) -> None:
        """Cuts the connections there are, once; new ones pass."""
        self._call(self._reset(source, target))

    def pairs(self) -> list[tuple[str, str]]:
        """Which pairs of processes have been connected so far, sorted."""
        return sorted(self.passed)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---------------------------------------------------------------------------------------- in the proxy's thread
    def link(self, source: str, target: str) -> Link:
        return self._links.get((source, target)) or self._links.get((ANY, target), WHOLE)

    async def _listen(self, at: Endpoint, to: Endpoint, target: str, source: str | None) -> Endpoint:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not await _anybody(to):  # who is away is asked for again and again: no need to know by whom
                _abort(writer)
                return
            await self._accepted(reader, writer, to, target, source)

        server = await asyncio.start_server(accepted, at.host, at.port)
        self._servers.append(server)
        return Endpoint(at.host, server.sockets[0].getsockname()[1])

    async def _accepted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Endpoint, target: str, source: str | None
    ) -> None:
        if source is None:
            ends = [Endpoint(*writer.get_extra_info(name)[:2]) for name in ("peername", "sockname")]
            source = self._source_of(ends[0], ends[1])
            if not source:  # whoever it was has closed it, or connects again
                _abort(writer)
                return
        connection = _Connection(self, source, target, (reader, writer))
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = connection
        self.passed[source, target] = self.passed.get((source, target), 0) + 1
        try:
            with contextlib.suppress(*QUIET, asyncio.CancelledError):
                await connection.run(to)
        finally:
            del self._connections[task]
            connection.reset()

    async def _set(self, links: dict[tuple[str, str], Link] | None) -> None:
        was = {each: each.link.mode for each in self._connections.values()}
        self._links = {} if links is None else self._links | links
        for connection, mode in was.items():
            now = connection.link.mode
            if now is Mode.CUT or (mode is Mode.HALF_OPEN and now is not mode):
                connection.reset()
            elif now is Mode.HALF_OPEN and now is not mode:
                connection.reset(client=False)
        self.changed.set()
        self.changed = asyncio.Event()

    async def _reset(self, source: str, target: str) -> None:
        for connection in list(self._connections.values()):
            if source in (ANY, connection.source) and connection.target == target:
                connection.reset()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
