"""The patience of an end of HTTP/2 with the other: how much it takes of what carries nothing, and of what is refused.

    patience.allow(most, rate)     from now on
    patience.charge(frames)        BrokenRules: it was too much
    patience.charged               of the slice of now, less CHARGED_A_TURN for each one before

A server has PATIENCE for a stranger and PATIENCE_KNOWN for a connection with a call that was admitted. A client has
chosen its server, and is patient without end. What strangers are charged is their port's `Share` as well.
Guarding tests: tests/runtime/http2/test_patience.py.
"""

from __future__ import annotations

import asyncio
import math

from ..tcp.share import Share
from . import frames
from .frames import BrokenRules, Code

CHARGED_A_TURN = 100
"""Frames that carry nothing: 0.15 ms. No honest connection sends so many at once."""
STRANGERS_TURN = 25
LIGHT = 64
"""Charge below which a stranger goes before the others: an honest one is charged about ten."""

PATIENCE, PATIENCE_KNOWN = 500.0, 20_000.0
"""Frames that carry nothing; handling one takes 1.5 µs. A client sends about ten before its first call is admitted."""
PATIENCE_RATE = 2_000.0
"""Growth of the patience a second, for a connection that is known: 0.3 % of the loop. A stranger's grows a hundred
times slower: it has seconds at most."""
REFUSED = 20
"""Cost of a call that is refused, or reset before its end, in frames that carry nothing."""
SMALL_UPDATE = 8
"""Bytes of a window update below which it costs more than it carries."""


class FrameAllowance:
    """The patience with one connection."""

    __slots__ = (
        "_granted", "_granted_most", "_granted_streams", "_granted_streams_most", "_left", "_loop", "_most", "_rate",
        "_since", "charged", "drawn", "is_known", "share",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = self._most = math.inf
        self._rate = 0.0
        self._since = loop.time()
        self.is_known = True  # a call of it was admitted; or it is a server that this end has chosen
        self.charged = 0.0  # less CHARGED_A_TURN for each slice
        self.share: Share | None = None  # of the port, whose connections are bounded together
        self.drawn = 0  # charged to it
        self._granted = 0  # by the other end: of the connection's window …
        self._granted_streams = 0  # … and of all streams'
        self._granted_most = 0  # more than was sent, of the connection's window …
        self._granted_streams_most = 0  # … and of all streams'

    def allow(self, most: float, rate: float) -> None:
        """Sets the patience: from now on `most` frames that carry nothing are taken at once, and `rate` more a second.
        """
        self._left = self._most = most
        self._rate, self._since = rate, self._loop.time()
        self.is_known = most > PATIENCE

    @property
    def must_wait(self) -> bool:
        """Whether it is a stranger's, and all strangers of the port have used up what they have together."""
        return not self.is_known and self.share is not None and self.share.is_spent

    def charge(self, frames_: int = 1) -> None:
        """Charges for what costs as much as so many frames that carry nothing. BrokenRules: it was too much."""
        if self._most == math.inf:
            return
        self.charged += frames_
        self._left -= frames_
        if not self.is_known and self.share is not None:
            self.drawn += frames_
            self.share.spend(frames_)
        if self._left < 0:
            now = self._loop.time()
            more = (now - self._since) * self._rate
            self._since = now
            self._left = min(self._left + more, self._most)
            if self._left < 0:
                raise BrokenRules(Code.ENHANCE_YOUR_CALM, "too many refused calls, or frames that carry nothing")

    def charge_update(self, id_: int, size: int, send_left: int) -> None:
        """Charges for window updates: an update gives back what was sent. One that grants more than any before, or
        little, is charged. `send_left`: of the connection's window, before it."""
        sent = frames.WINDOW_DEFAULT + self._granted - send_left
        if id_:
            self._granted_streams += size
            more, most = self._granted_streams - sent, self._granted_streams_most
            self._granted_streams_most = max(most, more)
        else:
            self._granted += size
            more, most = self._granted - sent, self._granted_most
            self._granted_most = max(most, more)
        if size < SMALL_UPDATE or more > most:
            self.charge()
