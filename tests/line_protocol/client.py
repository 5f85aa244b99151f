"""A client that speaks lines."""

import asyncio
from collections import deque

from magnetar.runtime.network import ByteStream
from tests.support.byte_streams import read

TIMEOUT_S = 20.0


class Lines:
    """One connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._received: deque[str] = deque()
        self._rest = b""

    def send(self, *words: object) -> None:
        self.stream.write_nowait((" ".join(map(str, words)) + "\n").encode())

    async def next(self, *verbs: str) -> list[str]:
        """The words of the next line that begins with one of the verbs; the other lines wait for a later call."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for line in self._received:
                    if line.split(" ")[0] in verbs:
                        self._received.remove(line)
                        return line.split(" ")
                data = await read(self.stream)
                assert data, "the broker has closed"
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._received.extend(line.decode() for line in lines)

    async def messages(self, count: int) -> list[tuple[str, str]]:
        """(position, text) of each."""
        return [(words[2], words[4]) for words in [await self.next("message") for _ in range(count)]]

    async def done(self, *words: object) -> None:
        """Sends the request and waits until the broker has done it."""
        self.send(*words)
        answer = await self.next("done", "error")
        assert answer[0] == "done", answer
