"""What waits at a bookie for something, counted in bytes of memory: in all, and of each connection.

A request costs what it carries and REQUEST_BYTES for what Python keeps of it until it is answered, so that a flood of
empty requests is bounded too. One connection has at most SHARE of the whole: a stranger leaves room for others.
"""

from __future__ import annotations

from collections.abc import Hashable

from ...runtime.network import Request

REQUEST_BYTES = 1024
"""Of a request that waits: itself, its head, what is called when it is done, its journal record: about so much."""

SHARE = 0.5


class Waiting:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._by_connection: dict[Hashable, int] = {}
        self.bytes = 0

    def add(self, connection: Hashable, size: int) -> bool:
        """False: it is too much, and was not added."""
        own = self._by_connection.get(connection, 0) + size
        if self.bytes + size > self._bytes_max or own > SHARE * self._bytes_max:
            return False
        self.bytes += size
        self._by_connection[connection] = own
        return True

    def done(self, connection: Hashable, size: int) -> None:
        self.bytes -= size
        own = self._by_connection[connection] - size
        if own:
            self._by_connection[connection] = own
        else:
            del self._by_connection[connection]

    def check(self) -> None:
        assert self.bytes == sum(self._by_connection.values()) <= self._bytes_max
        assert all(self._by_connection.values())


def cost_of(request: Request) -> int:
    return REQUEST_BYTES + len(request.head) + sum(map(len, request.frames))
