"""Those that abuse a server, each kind in a process of its own: python -m benchmarks.abusers KIND, its orders as JSON
on stdin. It prints a line when its abuse is in place, abuses until stdin ends, and prints what it counted.

    flood     `count` connections on which nothing is sent; what the server closes is opened again
    slow      `count` connections: half send a TLS handshake a byte a second, half an HTTP/2 preface inside TLS
    garbage   on each of `ports`, as fast as one loop can: random bytes, HTTP, half a TLS hello, a ZeroMQ greeting
    http2     one connection that sends `flood` (floods.py) without end; what the server closes is opened again
    sink      no abuse: a server with TLS that reads all and answers nothing; prints its port. The floods' control
    unread    `count` clients with `token` that subscribe to `topic`, ask for all, and never read
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from .floods import FLOODS, OPENED, RATE_BYTES

AT_ONCE = 100
"""Connections that one abuser makes at the same time."""
FLOOD_BYTES = 16 << 10
"""Of a flood, in one write."""
FILES = 20_000
"""What a process may have open: a flood of 10,000 and its server need more than 10,000 each."""

Orders = dict[str, Any]


def many_files() -> int:
    """Raises RLIMIT_NOFILE of this process and those it starts to FILES, as far as it may; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Abuse:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.host, self.port = orders["ports"][0]
        self.counted: Counter[str] = Counter()
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.in_place = asyncio.Event()
        self.rng = random.Random(1)

    async def keep(self, one: Callable[[], Awaitable[None]], count: int, pause_s: float = 1.0) -> None:
        """`count` times `one`, again and again."""

        async def again() -> None:
            while True:
                try:
                    await one()
                except (OSError, asyncio.IncompleteReadError):
                    self.counted["refused"] += 1
                await asyncio.sleep(pause_s)

        await asyncio.gather(*[again() for _ in range(count)])

    def opened(self) -> None:
        self.counted["opened"] += 1
        if self.counted["opened"] >= self.orders.get("count", 1) * 0.9:
            self.in_place.set()

    async def flood(self) -> None:
        async def one() -> None:
            async with self.gate:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            self.opened()
            try:
                while await reader.read(1 << 16):
                    pass
                self.counted["closed"] += 1
            finally:
                writer.close()

        await self.keep(one, self.orders["count"])

    async def slow(self) -> None:
        hello = _client_hello()
        context = _unverified()

        async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
            self.opened()
            try:
                for byte in data:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1.0)
            except OSError:
                self.counted["closed"] += 1
            finally:
                writer.close()

        async def handshake() -> None:
            async with self.gate:
                _, writer = await asyncio.open_connection(self.host, self.port)
            await drip(writer, hello)

        async def preface() -> None:
            async with self.gate:
                _, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
            await drip(writer, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000))

        half = self.orders["count"] // 2
        await asyncio.gather(self.keep(handshake, half), self.keep(preface, half))

    async def garbage(self) -> None:
        hello = _client_hello()
        makes: list[Callable[[], bytes]] = [
            lambda: self.rng.randbytes(self.rng.randrange(1, 5000)), lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: hello[: self.rng.randrange(1, len(hello))], lambda: b"\xff\0\0\0\0\0\0\0\x01\x7f" + bytes(500),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.rng.randbytes(500), lambda: b"A" * 100_000,
        ]  # fmt: skip

        async def one() -> None:
            host, port = self.rng.choice(self.orders["ports"])
            async with self.gate:
                _, writer = await asyncio.open_connection(host, port)
                self.opened()
                with contextlib.suppress(OSError):
                    writer.write(self.rng.choice(makes)())
                    await writer.drain()
                    await asyncio.sleep(0.1)
                writer.close()

        await self.keep(one, AT_ONCE, pause_s=0.0)

    async def http2(self) -> None:
        make, context = FLOODS[self.orders["flood"]], _unverified()

        async def one() -> None:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
            self.opened()
            over = asyncio.create_task(_read_all(reader))
            number, begin = 0, asyncio.get_running_loop().time()
            sent = OPENED
            try:
                while not over.done():
                    writer.write(sent)
                    self.counted["bytes"] += len(sent)
                    await writer.drain()
                    begin += len(sent) / RATE_BYTES
                    await asyncio.sleep(max(0.0, begin - asyncio.get_running_loop().time()))
                    sent = b""
                    while len(sent) < FLOOD_BYTES:
                        sent += make(number)
                        number += 1
            finally:
                self.counted["closed"] += 1
                over.cancel()
                writer.close()

        await self.keep(one, 1, pause_s=0.1)

    async def sink(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.orders["certificate"], self.orders["key"])

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _read_all(reader)
            writer.close()

        server = await asyncio.start_server(one, self.host, 0, ssl=context)
        print(server.sockets[0].getsockname()[1], flush=True)
        self.in_place.set()
        await server.serve_forever()

    async def unread(self) -> None:
        from magnetar.proto import wire_pb2 as wire
        from magnetar.runtime.access import CallerAccess, TlsFiles
        from magnetar.runtime.network import Endpoint, find_rpc
        from magnetar.runtime.process import make_system_world

        access = CallerAccess(TlsFiles(ca=self.orders["ca"]), lambda: f"Bearer {self.orders['token']}")
        network, held = make_system_world().network, list[Any]()
        for number in range(self.orders["count"]):
            channel = network.connect(Endpoint(self.host, self.port), access)
            stream = channel.stream(find_rpc("Broker", "Connect"))
            subscribe = wire.Subscribe(
                topic=self.orders["topic"], subscription=f"never-{number}", initial_position=wire.Subscribe.EARLIEST
            )
            stream.send_nowait(wire.ClientFrame(id=1, subscribe=subscribe))
            stream.send_nowait(wire.ClientFrame(id=1, permits=100_000))
            held.append((channel, stream))
            self.opened()
            await asyncio.sleep(0.002)
        self.in_place.set()
        while True:
            await asyncio.sleep(0.5)
            self.counted["cut"] = sum(stream.is_broken for _, stream in held)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _unverified().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def main(kind: str) -> None:
    orders = json.loads(sys.stdin.readline())
    abuse = Abuse(orders)
    loop = asyncio.get_running_loop()
    over = loop.run_in_executor(None, sys.stdin.read)
    abusing = asyncio.create_task(getattr(abuse, kind)())
    placed = asyncio.create_task(abuse.in_place.wait())
    await asyncio.wait((over, abusing, placed), return_when=asyncio.FIRST_COMPLETED)
    if abusing.done():
        abusing.result()
    print("in place", flush=True)
    await asyncio.wait((over, abusing), return_when=asyncio.FIRST_COMPLETED)
    if abusing.done():
        abusing.result()
    print(json.dumps(abuse.counted), flush=True)
    os._exit(0)  # thousands of connections are not worth an orderly end


if __name__ == "__main__":
    many_files()
    os.nice(19)  # it stands for other machines: what it costs itself is not the server's
    asyncio.run(main(sys.argv[1]))
