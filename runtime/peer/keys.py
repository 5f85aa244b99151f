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
    """The two keys of a process for its peer connections (CURVE). They are created when the process starts; the secret
    key is never stored."""

    public: str  # 64 hexadecimal digits
    secret: bytes = field(repr=False)  # 32 bytes


class PeerGate(Protocol):
    """Decides which processes may connect to a peer server. A process is identified by its public key, as 64
    hexadecimal digits."""

    async def admit(self, key: str) -> bool:
        """Returns whether a client with this public key may connect. Raises a MagnetarError if that cannot be decided
        now; the client may try again."""
        ...

    def principal(self, key: str) -> Principal | None:
        """Returns the principal of the member that has this public key; None if no member has it any more. Called for
        each message."""
        ...


@dataclass(frozen=True, slots=True)
class PeerServerKeys:
    """The keys of a peer server, and its gate. The server serves only clients that know its public key and that the
    gate admits."""

    own: KeyPair
    gate: PeerGate


@dataclass(frozen=True, slots=True)
class PeerClientKeys:
    """The keys of the client of a peer connection, and the public key that its server must have."""

    server: str = ""  # empty: it registered none
    own: KeyPair | None = None  # None: in clear. A network with keys puts its own here (runtime/peer/sockets.py)


CLEAR = PeerClientKeys()
"""A peer connection without keys."""
