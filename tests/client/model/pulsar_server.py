"""Enough of a Pulsar server for the official client to send to and to receive from: it keeps and gives entries.

    frame   = u32 size | u32 size of command | BaseCommand | entry        the entry in SEND and MESSAGE only
    command = its type as field 1, and its own message as the field of that number

Messages are encoded by hand: {field number: int, bytes or text}.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

CONNECT, CONNECTED, SUBSCRIBE, PRODUCER, SEND, SEND_RECEIPT, MESSAGE, ACK, FLOW = 2, 3, 4, 5, 6, 7, 9, 10, 11
SUCCESS, CLOSE_PRODUCER, CLOSE_CONSUMER, PRODUCER_SUCCESS, PING, PONG = 13, 15, 16, 17, 18, 19
PARTITIONS, PARTITIONS_REPLY, LOOKUP, LOOKUP_REPLY = 21, 22, 23, 24
LEDGER = 7


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def encoded(fields: dict[int, int | bytes | str]) -> bytes:
    out = b""
    for number, value in fields.items():
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            text = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(text)) + text
    return out


def decoded(data: bytes) -> dict[int, Any]:
    """The last value of each field."""
    found: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            found[tag >> 3] = varint()
        else:
            assert tag & 7 == 2, "no other kind is in these messages"
            size = varint()
            found[tag >> 3] = data[at : at + size]
            at += size
    return found


class PulsarServer:
    """One topic. `entries`: client-parts, as they were sent, or are to be received."""

    def __init__(self, entries: list[bytes] | None = None) -> None:
        self.entries = list(entries or [])
        self.acked: list[bytes] = []
        self.address = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"pulsar://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self.address
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                frame = await reader.readexactly(size)
                end = 4 + int.from_bytes(frame[:4])
                command = decoded(frame[4:end])
                kind = command[1]
                for answer, fields, entry in self._answers(kind, decoded(command.get(kind, b"")), frame[end:]):
                    body = encoded({1: answer, answer: encoded(fields)})
                    body = len(body).to_bytes(4) + body + entry
                    writer.write(len(body).to_bytes(4) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answers(self, kind: int, of: dict[int, Any], entry: bytes) -> list[tuple[int, dict[int, Any], bytes]]:
        match kind:
            case _ if kind == CONNECT:
                return [(CONNECTED, {1: "test", 2: 19, 3: 5 << 20}, b"")]
            case _ if kind == PING:
                return [(PONG, {}, b"")]
            case _ if kind == PARTITIONS:
                return [(PARTITIONS_REPLY, {1: 0, 2: of[2], 3: 0}, b"")]
            case _ if kind == LOOKUP:
                return [(LOOKUP_REPLY, {1: self.address, 3: 1, 4: of[2], 5: 1}, b"")]
            case _ if kind == PRODUCER:
                return [(PRODUCER_SUCCESS, {1: of[3], 2: "p", 3: (1 << 64) - 1}, b"")]
            case _ if kind == SEND:
                self.entries.append(entry)
                place = encoded({1: LEDGER, 2: len(self.entries) - 1})
                return [(SEND_RECEIPT, {1: of[1], 2: of[2], 3: place}, b"")]
            case _ if kind == SUBSCRIBE:
                self._given = 0
                return [(SUCCESS, {1: of[5]}, b"")]
            case _ if kind == FLOW:
                first, self._given = self._given, len(self.entries)
                return [
                    (MESSAGE, {1: of[1], 2: encoded({1: LEDGER, 2: at})}, self.entries[at])
                    for at in range(first, self._given)
                ]
            case _ if kind == ACK:
                self.acked.append(entry)
            case _ if kind in (CLOSE_PRODUCER, CLOSE_CONSUMER):
                return [(SUCCESS, {1: of[2]}, b"")]
        return []
