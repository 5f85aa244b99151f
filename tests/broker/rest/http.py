"""A client of HTTP on asyncio, request by request, and a broker that serves it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from magnetar.broker.server import Broker
from magnetar.runtime.network import Endpoint
from tests.support.cluster import Cluster, cluster

ANY = Endpoint("127.0.0.1", 0)
TIMEOUT_S = 20.0
V2 = "/admin/v2"
T = f"{V2}/persistent/public/default/t"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        found: str = self.json["reason"]
        return found


class Http:
    """One connection; it is opened again when the server closed it."""

    def __init__(self, url: str) -> None:
        self.endpoint = Endpoint.parse(url.partition("://")[2])
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, **headers: str
    ) -> Answer:
        """`body` is sent as JSON, `raw` as it is."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        lines = {"Host": str(self.endpoint), "Content-Length": str(len(data)), "Content-Type": "application/json"}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return await self.send(head.encode() + b"\r\n" + data, bodyless=method == "HEAD")

    async def send(self, data: bytes, *, bodyless: bool = False) -> Answer:
        async with asyncio.timeout(TIMEOUT_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
            reader, writer = self._streams
            writer.write(data)
            return await self._answer(reader, bodyless)

    async def _answer(self, reader: asyncio.StreamReader, bodyless: bool) -> Answer:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        pairs = (each.partition(":") for each in lines[1:] if each)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if bodyless or status == 204:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int((await reader.readline()).strip(), 16):
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            await self.close()
        return Answer(status, headers, body)

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """The JSON of the answer; None: it is empty."""
        found = await self.ask("GET", path, **headers)
        assert found.status == status, (found.status, found.body)
        return found.json if found.body else None

    async def done(self, method: str, path: str, body: object = None, status: int = 204) -> Answer:
        found = await self.ask(method, path, body)
        assert found.status == status, (found.status, found.body)
        return found

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@asynccontextmanager
async def serving(folder: Path, **config: object) -> AsyncIterator[tuple[Http, Broker, Cluster]]:
    async with cluster(folder, http_listen=ANY, pulsar_listen=ANY, **config) as running:
        broker = running.brokers[0]
        http = Http(broker.http_url)
        try:
            yield http, broker, running
        finally:
            await http.close()
