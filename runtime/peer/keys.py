"""The keys of peer connections (CURVE), and the gate of a peer server, which says whose key it takes.

Without keys a connection is in clear (`CLEAR`). Security of this design: docs/security.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..access import Principal

NO_KEY = "00" * 32
"""Key that no server has."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process' keys among the peers (CURVE). It makes them at its start, and writes the secret one nowhere."""

    public: str  # 64 hexadecimal digits
    secret: bytes = field(repr=False)  # 32 bytes


class PeerGate(Protocol):
    """The gate that decides which processes may be clients of a peer server. A key is the public one, 64 hexadecimal
    digits."""

    async def admit(self, key: str) -> bool:
        """Whether a new connection with this key is admitted. A MagnetarError: it cannot be decided now, and the client
        may try again."""
        ...

    def principal(self, key: str) -> Principal | None:
        """Returns the principal of a key; asked for each message. None: the process is a member no more."""
        ...


@dataclass(frozen=True, slots=True)
class PeerListening:
    """The keys and gate of a peer server: only clients that know its key, and that the gate takes, are served."""

    own: KeyPair
    gate: PeerGate


@dataclass(frozen=True, slots=True)
class PeerCalling:
    """The keys of the client end of a peer connection, and the public key that the server has to have."""

    server: str = ""  # empty: it registered none
    own: KeyPair | None = None  # None: in clear. A network with keys puts its own here (runtime/peer/sockets.py)


CLEAR = PeerCalling()
"""A peer connection without keys."""
