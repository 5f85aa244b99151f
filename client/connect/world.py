"""The default world of a client: that of the system, without the parts that only servers need (ZeroMQ)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NoReturn, cast

from ...proto.errors import NotAllowed
from ...runtime.access import NOTHING, OPEN, CallerAccess, ListenerAccess, TlsFiles
from ...runtime.clock import SystemClock
from ...runtime.files import Files
from ...runtime.grpc import client
from ...runtime.network import (
    ByteService,
    ByteServing,
    ByteStream,
    Channel,
    Endpoint,
    Peer,
    PeerService,
    PeerServing,
    Serving,
    World,
)
from ...runtime.peer.keys import CLEAR, KeyPair, PeerClientKeys, PeerServerKeys
from ...runtime.threads import SystemWorkers


class _ClientNetwork:
    """The network of a client: it makes connections, and serves nothing."""

    def connect(self, endpoint: Endpoint, access: CallerAccess = NOTHING) -> Channel:
        return client.connect(endpoint, access)

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN
    ) -> Serving:
        raise NotAllowed("a client serves nothing")

    async def serve_bytes(self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN) -> ByteServing:
        raise NotAllowed("a client serves nothing")

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> ByteStream:
        from ...runtime.tcp import streams  # which few clients need

        return await streams.connect(endpoint, tls)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> PeerServing:
        raise NotAllowed("a client serves nothing")

    def peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = CLEAR) -> Peer:
        raise NotAllowed("a client has no peers; bookies are spoken to by brokers")

    def new_keys(self) -> KeyPair:
        raise NotAllowed("a client has no peers; bookies are spoken to by brokers")


class _NoFiles:
    """The files of a client: none, because the files of a server need POSIX, and a client also runs on Windows."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotAllowed("a client has no files of a server")


def client_world() -> World:
    """Makes the world of one client. Each client needs its own: connections belong to it, and to one event loop."""
    return World(SystemClock(), random.SystemRandom(), cast(Files, _NoFiles()), SystemWorkers(), _ClientNetwork())
