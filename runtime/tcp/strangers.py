"""Connections of a port whose callers are not known yet: they are bounded, and keep no other caller out.

    strangers.came(stranger, peer)    it is in its TLS handshake, or has made no call that was admitted
    strangers.left(stranger)          it is known now, or over

**Bound.** Half of the port's connections, at most an eighth of those that the process may have: so the strangers of all
ports leave room for callers that are known. When one more comes, the oldest of the address that has most of them
leaves. So a flood pushes out itself first, and a caller that does what it came for is in: it has the time in which the
flood fills the bound once. One that is being asked who it is (`is_busy`) stays.
**Time.** Its owner ends one that takes too long (HANDSHAKE_S, `first_frame_s`, `STRANGER_LOOKS`).
Guarding tests: tests/runtime/tcp/test_strangers.py, tests/runtime/grpc/test_limits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..access import Limits
from ..memory.descriptors import PROCESS
from ..network import network_of

STRANGERS_MIN = 16
"""Strangers that a port may have, however few connections it may have."""


class Stranger(Protocol):
    """A connection whose caller is not known."""

    @property
    def is_busy(self) -> bool: ...

    def leave(self) -> None:
        """Ends its connection at once: others wait."""
        ...


class Strangers:
    """The strangers of one port, in one stage: in the handshake, or after it."""

    def __init__(self, limits: Limits) -> None:
        self._half = max(limits.connections // 2, min(limits.connections, STRANGERS_MIN))
        self._of: dict[str, dict[Stranger, None]] = {}  # by address, the oldest first
        self._address: dict[Stranger, str] = {}
        self.pushed_out = 0

    def __len__(self) -> int:
        return len(self._address)

    def __contains__(self, stranger: Stranger) -> bool:
        return stranger in self._address

    def __iter__(self) -> Iterator[Stranger]:
        """Yields the strangers, the oldest first."""
        return iter(list(self._address))

    @property
    def most(self) -> int:
        return min(self._half, max(PROCESS.connections_max // 8, STRANGERS_MIN))

    def came(self, stranger: Stranger, peer: str) -> bool:
        """Adds a stranger. False: there is no room for it, and none leaves."""
        if len(self._address) >= self.most and not self._push_out():
            return False
        address = network_of(peer)
        self._address[stranger] = address
        self._of.setdefault(address, {})[stranger] = None
        return True

    def left(self, stranger: Stranger) -> None:
        address = self._address.pop(stranger, None)
        if address is not None:
            group = self._of[address]
            del group[stranger]
            if not group:
                del self._of[address]

    def _push_out(self) -> bool:
        for group in sorted(self._of.values(), key=len, reverse=True):
            for oldest in group:
                if not oldest.is_busy:
                    self.pushed_out += 1
                    self.left(oldest)
                    oldest.leave()
                    return True
        return False
