"""Limits of a gRPC listener: what callers can hold of it, and for how long they hold it without moving on.

Connections are bounded by the listener, and what each of them holds by its windows (runtime/http2/connection.py).
`OpenStreams` bounds the streams of an address, and looks at all of them now and then: nothing is done per message. It
counts its looks and not seconds, so that a process that was stopped cuts no stream for the time that it did not see.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from ...proto.errors import BackPressure, ConnectionLost, MagnetarError
from ..access import Limits
from ..memory.budget import MemoryBudget
from ..network import network_of
from .stream import CROWDED_BYTES

IDLE_S = 120
"""Seconds without a call after which a connection is closed; the caller's next call makes a new one."""
CALLS_MAX = 1_000
"""Most calls of one connection at a time, with those whose caller is gone and whose handler runs on; further ones are
refused."""
LOOKS = 4
"""Number of looks at the streams within the shorter of the two times."""
TIGHT_LOOKS = 2
"""Looks after which, while memory is tight, a caller that took nothing is cut, if more than CROWDED_BYTES wait for it.
While there is none, after one."""

_LOG = logging.getLogger("magnetar.rpc")


class Watched(Protocol):
    """A stream, as the limits look at it."""

    has_read: bool  # something came

    @property
    def queued_bytes(self) -> int: ...
    @property
    def left_bytes(self) -> int: ...
    def break_off(self, error: MagnetarError) -> None: ...


class _Seen:
    """The result of the looks at one stream."""

    __slots__ = ("left", "peer", "silent", "unread")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.silent = self.unread = 0
        self.left = -1


class OpenStreams:
    """The streams of one listener."""

    def __init__(self, limits: Limits, answers: MemoryBudget) -> None:
        self._limits = limits
        self._answers = answers
        self._pause = min(limits.first_frame_s, limits.unread_s) / LOOKS
        self._silent_max = math.ceil(limits.first_frame_s / self._pause)
        self._unread_max = math.ceil(limits.unread_s / self._pause)
        self._seen: dict[Watched, _Seen] = {}
        self._hosts: Counter[str] = Counter()
        self._next: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Holds a place for one stream of this caller, HOST:PORT. BackPressure: its address has as many as it may have.
        """
        host, limit = network_of(peer), self._limits.streams_per_address
        if self._hosts[host] >= limit:
            raise BackPressure(f"{host} has {limit} streams open, which is what one address may have")
        self._hosts[host] += 1
        try:
            yield
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    def add(self, stream: Watched, peer: str) -> None:
        self._seen[stream] = _Seen(peer)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._pause, self._look)

    def remove(self, stream: Watched) -> None:
        self._seen.pop(stream, None)
        if not self._seen and self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._pause, self._look)
        for stream, seen in list(self._seen.items()):
            if why := self._why_cut(stream, seen):
                self._seen.pop(stream, None)
                _LOG.warning("a stream of %s is cut: %s", seen.peer, why)
                stream.break_off(ConnectionLost(f"the server cut the stream: {why}"))

    def _why_cut(self, stream: Watched, seen: _Seen) -> str:
        """Returns why the stream is cut; empty: it stays."""
        if not stream.has_read:
            seen.silent += 1
            return f"it sent nothing for {self._limits.first_frame_s:g} s" if seen.silent > self._silent_max else ""
        left = stream.left_bytes
        seen.unread = seen.unread + 1 if stream.queued_bytes and left == seen.left else 0
        seen.left = left
        if seen.unread > self._unread_max:
            return f"it took nothing for {self._limits.unread_s:g} s"
        looks = TIGHT_LOOKS if self._answers.held <= self._answers.limit else 0
        if seen.unread > looks and stream.queued_bytes > CROWDED_BYTES and self._answers.held > self._answers.tight:
            return f"it took nothing for {max(looks, 1) * self._pause:g} s, and memory is short"
        return ""
