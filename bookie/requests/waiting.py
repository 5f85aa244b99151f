"""Requests that wait at a bookie, counted in bytes of memory: in all, and of each connection.

A request costs its frames and REQUEST_BYTES for the memory that Python needs until it is answered, so that a flood of
empty requests is bounded too. One connection has at most SHARE of the bound, so that there is room for others. A lone
request is always taken: it may be larger than a small bound.
"""

from __future__ import annotations

from collections.abc import Hashable

from ...runtime.network import Request

REQUEST_BYTES = 1024
"""Memory of a waiting request, about: the object, its head, its callback, its journal record."""

SHARE = 0.5


class Waiting:
    """A bound for requests that wait, in bytes: for all of them, and for each connection."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._by_connection: dict[Hashable, int] = {}
        self.bytes = 0

    def add(self, connection: Hashable, size: int) -> bool:
        """Adds a request. False: it is beyond the bound, and was not added."""
        own = self._by_connection.get(connection, 0) + size
        if self.bytes and (self.bytes + size > self._bytes_max or own > SHARE * self._bytes_max):
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
        assert self.bytes == sum(self._by_connection.values())
        assert self.bytes <= self._bytes_max or len(self._by_connection) == 1, "only a lone request exceeds the bound"
        assert all(self._by_connection.values())


def cost_of(request: Request) -> int:
    return REQUEST_BYTES + len(request.head) + sum(map(len, request.frames))
