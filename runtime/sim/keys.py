"""Keys of simulated peers: what CURVE and ZAP decide on real ones (runtime/peer/sockets.py), in two messages.

    hello = HELLO | public key of the client | its secret | public key that the server has to have
    answer = WELCOME, or REFUSED and why; anything but WELCOME ends the connection

A public key is the hash of its secret, so that only who has the secret can show the key. The simulation has no
listeners on its cables, so the secret itself is the proof.
"""

from __future__ import annotations

import hashlib
import random

from ...proto.errors import MagnetarError
from ..peer.keys import KeyPair, PeerClientKeys, PeerServerKeys

HELLO, WELCOME, REFUSED = b"HELLO", b"WELCOME", b"REFUSED"

WANTED = b"asks for keys: give --security, as the other processes of its cluster"
CLEAR = b"speaks in clear, without keys, as the other processes of its cluster"
UNKNOWN = b"does not know this process' key: it is no member of that cluster, or is no more"


def new_keys(rng: random.Random) -> KeyPair:
    secret = rng.randbytes(32)
    return KeyPair(_public(secret), secret)


def _public(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def hello(access: PeerClientKeys) -> list[bytes]:
    assert access.own is not None, "a caller in clear says no hello"
    return [HELLO, access.own.public.encode(), access.own.secret, access.server.encode()]


async def answer(parts: list[bytes], access: PeerServerKeys | None) -> tuple[list[bytes], str]:
    """Returns the answer to a hello, and the client's key if the answer is WELCOME. An empty answer means that the
    connection breaks.
    """
    if access is None:
        return [REFUSED, CLEAR], ""
    public, secret, server = parts[1].decode(), parts[2], parts[3].decode()
    if server != access.own.public:
        return [], ""
    try:
        admitted = public == _public(secret) and await access.gate.admit(public)
    except MagnetarError:
        return [], ""
    return ([WELCOME], public) if admitted else ([REFUSED, UNKNOWN], "")
