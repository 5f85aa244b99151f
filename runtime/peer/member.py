"""The network of a member of a secured cluster: its certificate to the metadata service, its key to the peers.

    metadata service   gRPC over TLS, both ends with certificates of the cluster's authority
    broker ↔ bookie    CURVE: keys made at the process' start; `gate` says whose are members' (metadata/members.py)

Bytes (TCP) pass as they are. A broker's own listener for clients is not here (security/authenticator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..access import NOTHING, OPEN, CallerAccess, ListenerAccess
from ..network import Channel, Endpoint, Network, Peer, PeerService, PeerServing, Serving
from .keys import CLEAR, PeerCalling, PeerListening


class MemberNetwork:
    """A `runtime.network.Network` over another one. Without `peers` peers pass as they are, too."""

    def __init__(
        self, inner: Network, listener: ListenerAccess, caller: CallerAccess, peers: PeerListening | None = None
    ) -> None:
        self._inner = inner
        self._listener = listener
        self._caller = caller
        self._peers = peers
        self.serve_bytes, self.connect_bytes, self.new_keys = inner.serve_bytes, inner.connect_bytes, inner.new_keys

    def with_peers(self, peers: PeerListening) -> MemberNetwork:
        return MemberNetwork(self._inner, self._listener, self._caller, peers)

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN
    ) -> Serving:
        if access.guard is None and access.tls is None:
            access = replace(self._listener, limits=access.limits, memory=access.memory)
        return await self._inner.serve(endpoint, services, access)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NOTHING) -> Channel:
        return self._inner.connect(endpoint, self._caller if access is NOTHING else access)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerListening | None = None
    ) -> PeerServing:
        return await self._inner.serve_peers(endpoint, identity, service, access or self._peers)

    def peer(self, endpoint: Endpoint, identity: bytes, access: PeerCalling = CLEAR) -> Peer:
        own = access.own if self._peers is None else self._peers.own
        return self._inner.peer(endpoint, identity, replace(access, own=own))
