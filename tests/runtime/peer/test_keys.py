"""Peers with keys (CURVE and ZAP), over loopback: who is admitted, and what the others are told."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from magnetar.proto.errors import ConnectionLost, Unauthorized, Unavailable
from magnetar.runtime.access import Principal, PrincipalKind
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.network import Endpoint, KeyPair, PeerClientKeys, PeerRequest, PeerServerKeys
from magnetar.runtime.peer.client import ZmqPeer
from magnetar.runtime.peer.server import serve
from magnetar.runtime.peer.sockets import ZmqContext, new_keys

from .test_peers import IDENTITY, LOCAL, SOON_S, Ends, outcome


class Gate:
    """Admits the keys of a table."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.unknown: Exception | None = None

    async def admit(self, key: str) -> bool:
        if key not in self.names and self.unknown is not None:
            raise self.unknown
        return key in self.names

    def find_principal(self, key: str) -> Principal | None:
        name = self.names.get(key)
        return None if name is None else Principal(name, PrincipalKind.MEMBER)


class Keyed(Ends):
    """With keys."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.gate, self.own = ZmqContext(), Gate(), new_keys()

    async def serve(self, *, keys: bool = True, own: KeyPair | None = None, where: Endpoint = LOCAL) -> Endpoint:
        access = PeerServerKeys(own or self.own, self.gate) if keys else None
        server = await serve(self.context, where, IDENTITY, self.service, access)
        self.ends.append(server)
        return server.endpoint

    def service(self, requests: list[PeerRequest]) -> None:  # type: ignore[override]
        for request in requests:
            request.reply(request.principal.name.encode() if request.principal else b"?")

    def member(self, name: str) -> KeyPair:
        keys = new_keys()
        self.gate.names[keys.public] = name
        return keys

    def peer(self, endpoint: Endpoint, own: KeyPair | None, server: str = "") -> ZmqPeer:
        access = PeerClientKeys(server or self.own.public, own)
        peer = ZmqPeer(self.context, SystemClock(), endpoint, IDENTITY, access)
        self.ends.append(peer)
        return peer


@pytest.fixture
async def keyed() -> AsyncIterator[Keyed]:
    keyed = Keyed()
    yield keyed
    await keyed.close()
    assert keyed.context._context is None, "the context ends with its last socket"


async def test_a_member_is_served_and_each_message_says_who_sent_it(keyed: Keyed) -> None:
    where = await keyed.serve()
    for name in ("broker/a", "bookie/b"):
        peer = keyed.peer(where, keyed.member(name))
        assert (await peer.request(b"", timeout_s=SOON_S)).head == name.encode()


async def test_a_key_of_no_member_is_unauthorized_at_once(keyed: Keyed) -> None:
    peer = keyed.peer(await keyed.serve(), new_keys())
    for _ in range(2):
        error = await outcome(peer.request(b"", timeout_s=60))
        assert isinstance(error, Unauthorized), error
        assert "no member" in error.message


async def test_a_client_without_keys_is_told_that_the_server_wants_them(keyed: Keyed) -> None:
    error = await outcome(keyed.peer(await keyed.serve(), None).request(b"", timeout_s=60))
    assert isinstance(error, Unauthorized), error
    assert "--security" in error.message


async def test_it_is_told_so_also_when_the_server_closes_each_connection_first(keyed: Keyed) -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came = await reader.read(12)
        if len(came) == 11:  # a question for the greeting; ZeroMQ sends its signature, then the rest
            writer.write(came[:10] + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        writer.close()

    server = await asyncio.start_server(hasty, "127.0.0.1", 0)
    where = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    for own, wanted in ((None, Unauthorized), (new_keys(), ConnectionLost)):
        error = await outcome(keyed.peer(where, own).request(b"", timeout_s=60))
        assert isinstance(error, wanted), error
    server.close()


async def test_a_client_with_keys_does_not_speak_to_a_server_without(keyed: Keyed) -> None:
    where = await keyed.serve(keys=False)
    for server in ("", "00" * 32):
        error = await outcome(keyed.peer(where, keyed.member("broker/a"), server).request(b"", timeout_s=60))
        assert isinstance(error, Unauthorized), error
        assert "in clear" in error.message


async def test_a_server_with_another_key_than_it_registered_is_no_server(keyed: Keyed) -> None:
    peer = keyed.peer(await keyed.serve(), keyed.member("broker/a"), new_keys().public)
    error = await outcome(peer.request(b"", timeout_s=60))
    assert isinstance(error, ConnectionLost), error
    assert "key" in error.message


async def test_a_member_that_left_is_refused_on_the_connection_that_it_has(keyed: Keyed) -> None:
    where, keys = await keyed.serve(), keyed.member("broker/a")
    peer = keyed.peer(where, keys)
    await peer.request(b"", timeout_s=SOON_S)
    del keyed.gate.names[keys.public]
    error = await outcome(peer.request(b"", timeout_s=60))
    assert isinstance(error, Unauthorized), error


async def test_without_the_handler_of_admission_no_new_peer_is_admitted_and_the_old_ones_stay(keyed: Keyed) -> None:
    where = await keyed.serve()
    old = keyed.peer(where, keyed.member("broker/a"))
    await old.request(b"", timeout_s=SOON_S)
    handler = keyed.context._admission
    assert handler is not None
    handler.close()
    handler.socket.close(0)
    new = keyed.peer(where, keyed.member("broker/b"))
    assert not isinstance(await outcome(new.request(b"", timeout_s=1.0)), tuple)
    assert (await old.request(b"", timeout_s=SOON_S)).head == b"broker/a"


async def test_a_gate_that_cannot_decide_is_asked_again(keyed: Keyed) -> None:
    where, keys = await keyed.serve(), new_keys()
    keyed.gate.unknown = Unavailable("no metadata")
    asked = keyed.peer(where, keys).request(b"", timeout_s=SOON_S)
    error = await outcome(asked)
    assert isinstance(error, ConnectionLost), error
    keyed.gate.names[keys.public] = "broker/a"
    assert (await keyed.peer(where, keys).request(b"", timeout_s=SOON_S)).head == b"broker/a"


async def test_a_server_that_returns_with_another_key_is_used_by_who_knows_it(keyed: Keyed) -> None:
    where, keys = await keyed.serve(), keyed.member("broker/a")
    peer = keyed.peer(where, keys)
    await peer.request(b"", timeout_s=SOON_S)
    await keyed.ends[0].close()
    own = new_keys()
    await keyed.serve(own=own, where=where)
    assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), ConnectionLost)
    assert (await keyed.peer(where, keys, own.public).request(b"", timeout_s=SOON_S)).head == b"broker/a"


def test_a_secret_key_is_in_no_text() -> None:
    keys = new_keys()
    assert keys.secret.hex() not in repr(keys)
    assert repr(keys.secret) not in repr(PeerClientKeys("", keys))
