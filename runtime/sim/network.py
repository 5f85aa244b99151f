"""A simulated process' network (`runtime.network.Network`): gRPC, peers and bytes over the simulation's cables.

There is no TLS: every connection counts as encrypted, and no caller has a certificate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..access import NOTHING, OPEN, CallerAccess, ListenerAccess, TlsFiles
from ..clock import Clock
from ..network import ByteService, Endpoint, PeerService
from ..peer.keys import CLEAR, KeyPair, PeerCalling, PeerListening
from . import keys
from .byte_streams import SimByteServing, SimByteStream
from .files import DeadProcess
from .peer_server import SimPeerServer
from .peers import SimPeer
from .rpc import SimChannel, SimServing
from .wires import Wires

if TYPE_CHECKING:
    from .world import SimProcess


class SimNetwork:
    """The network of a simulated process. When the process is dead, any use raises DeadProcess."""

    def __init__(
        self, wires: Wires, owner: SimProcess, clock: Clock, is_alive: Callable[[], bool], rng: random.Random
    ) -> None:
        self._wires = wires
        self._owner = owner
        self._clock = clock
        self._is_alive = is_alive
        self._rng = rng

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN
    ) -> SimServing:
        self._check()
        return SimServing(self._wires, self._owner, endpoint, services, access.guard, self._clock)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NOTHING) -> SimChannel:
        self._check()
        return SimChannel(self._wires, self._owner, endpoint, access.authorization)

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN
    ) -> SimByteServing:
        self._check()
        return SimByteServing(self._wires, self._owner, endpoint, service, access.guard)

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> SimByteStream:
        self._check()
        return SimByteStream(await self._wires.dial(self._owner, endpoint))

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerListening | None = None
    ) -> SimPeerServer:
        self._check()
        return SimPeerServer(self._wires, self._owner, endpoint, identity, service, access)

    def peer(self, endpoint: Endpoint, identity: bytes, access: PeerCalling = CLEAR) -> SimPeer:
        self._check()
        return SimPeer(self._wires, self._owner, endpoint, identity, access)

    def new_keys(self) -> KeyPair:
        self._check()
        return keys.new_keys(self._rng)

    def _check(self) -> None:
        if not self._is_alive():
            raise DeadProcess("network of a dead process")
