"""Who calls: TLS, certificates and credentials of gRPC, on sockets and simulated."""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    ConnectionLost,
    CredentialsExpired,
    InvalidConfiguration,
    MagnetarError,
    Unauthenticated,
    Unauthorized,
    Unavailable,
    UntrustedServer,
    WrongProtocol,
)
from magnetar.runtime.access import Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind, TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import limits as callers
from magnetar.runtime.grpc.client import connect
from magnetar.runtime.grpc.server import RunningGrpcServer, serve
from magnetar.runtime.network import CallContext, Channel, EndOfStream, Endpoint, Network, find_rpc
from magnetar.runtime.process import make_system_world
from magnetar.runtime.sim.world import Simulation
from tests.support.certificates import Authority

HERE = Endpoint("127.0.0.1", 0)
LOOKUP = find_rpc("Broker", "Lookup")
CONNECT = find_rpc("Broker", "Connect")
CLOCK = SystemClock()


class Gatekeeper:
    """Knows "Bearer good"; `lives_s` is how long such a credential holds."""

    def __init__(self, lives_s: float = 0.0, clock: Any = CLOCK) -> None:
        self.callers: list[Caller] = []
        self.lives_s, self.clock = lives_s, clock
        self.slow_s = 0.0
        self.forbidden = self.revoked = ""

    async def authenticate(self, caller: Caller) -> Principal:
        self.callers.append(caller)
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if caller.authorization == "Bearer good":
            end = self.clock.wall_ms() + int(1000 * self.lives_s) if self.lives_s else 0
            return Principal("ada", PrincipalKind.CLIENT, "token", end)
        if caller.certificate:
            return Principal("by certificate", PrincipalKind.CLIENT, "tls")
        raise Unauthenticated("the token is not known here")

    def authorize(self, principal: Principal, path: str) -> None:
        if path == self.forbidden:
            raise Unauthorized(f"{principal} may not call {path}")

    def why_lapsed(self, principal: Principal) -> str:
        return self.revoked


class Broker:
    """Answers with the caller's role; its stream echoes, and counts what began."""

    def __init__(self) -> None:
        self.begun = 0

    async def lookup(self, request: Any, context: CallContext) -> wire.LookupReply:
        self.begun += 1
        return wire.LookupReply(owner=str(context.principal))

    async def connect(self, stream: Any, context: CallContext) -> None:
        self.begun += 1
        try:
            while True:
                for _ in await stream.receive():
                    stream.send_nowait(wire.ServerFrame(credit=1))
        except EndOfStream:
            pass


Ends = list[Any]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends: Ends = []
    yield ends
    for end in reversed(ends):
        await end.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


async def listen(ends: Ends, access: ListenerAccess, broker: Broker | None = None) -> RunningGrpcServer:
    ends.append(await serve(HERE, [("Broker", broker or Broker())], access, CLOCK))
    return ends[-1]  # type: ignore[no-any-return]


def dial(ends: Ends, serving: RunningGrpcServer, access: CallerAccess) -> Channel:
    ends.append(connect(serving.endpoint, access))
    return ends[-1]  # type: ignore[no-any-return]


async def role(channel: Channel) -> str:
    reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=30)
    return str(reply.owner)


def bearer(value: str) -> CallerAccess:
    return CallerAccess(authorization=lambda: f"Bearer {value}")


# ---------------------------------------------------------------------------------- credentials
async def test_a_handler_knows_the_principal_and_without_a_guard_the_caller_is_local(ends: Ends) -> None:
    guarded = await listen(ends, ListenerAccess(Gatekeeper()))
    assert await role(dial(ends, guarded, bearer("good"))) == "client:ada"
    assert await role(dial(ends, await listen(ends, ListenerAccess()), bearer("good"))) == "local"


@pytest.mark.parametrize("access", [CallerAccess(), bearer("bad"), CallerAccess(authorization=str)])
async def test_who_is_refused_reaches_no_handler(ends: Ends, access: CallerAccess) -> None:
    broker = Broker()
    channel = dial(ends, await listen(ends, ListenerAccess(Gatekeeper()), broker), access)
    with pytest.raises(Unauthenticated, match="not known here"):
        await role(channel)
    stream = channel.stream(CONNECT)
    with pytest.raises(MagnetarError):
        await stream.receive()
    assert broker.begun == 0


async def test_an_rpc_that_a_principal_may_not_call_reaches_no_handler(ends: Ends) -> None:
    guard, broker = Gatekeeper(), Broker()
    channel = dial(ends, await listen(ends, ListenerAccess(guard), broker), bearer("good"))
    guard.forbidden = LOOKUP.path
    with pytest.raises(Unauthorized, match="client:ada may not call"):
        await role(channel)
    guard.forbidden = CONNECT.path
    with pytest.raises(MagnetarError):
        await channel.stream(CONNECT).receive()
    assert broker.begun == 0


async def test_a_header_that_is_too_long_is_refused_before_a_provider_sees_it(ends: Ends) -> None:
    guard = Gatekeeper()
    channel = dial(ends, await listen(ends, ListenerAccess(guard)), bearer("x" * 20_000))
    with pytest.raises(MagnetarError):
        await role(channel)
    assert guard.callers == []


async def test_a_stream_ends_with_the_credentials_of_its_caller(ends: Ends) -> None:
    serving = await listen(ends, ListenerAccess(Gatekeeper(lives_s=4.0)))
    stream = dial(ends, serving, bearer("good")).stream(CONNECT)
    stream.send_nowait(wire.ClientFrame())
    assert await stream.receive()
    with pytest.raises(CredentialsExpired):
        await asyncio.wait_for(stream.receive(), 30)


async def test_a_stream_ends_soon_after_the_credentials_of_its_caller_lapse_and_others_go_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "STREAM_CHECK_S", 0.1)
    guards = Gatekeeper(), Gatekeeper()
    listeners = [await listen(ends, ListenerAccess(guard)) for guard in guards]
    streams = [dial(ends, each, bearer("good")).stream(CONNECT) for each in listeners]
    for stream in streams:
        stream.send_nowait(wire.ClientFrame())
        assert await stream.receive()
    guards[0].revoked = "its token is revoked"
    with pytest.raises(CredentialsExpired, match="its token is revoked"):
        await asyncio.wait_for(streams[0].receive(), 30)
    await asyncio.sleep(0.3)
    streams[1].send_nowait(wire.ClientFrame())
    assert await streams[1].receive()


async def test_a_caller_that_is_refused_has_a_line_in_the_audit_log(
    ends: Ends, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    guard = Gatekeeper()
    serving = await listen(ends, ListenerAccess(guard))
    with caplog.at_level(logging.INFO, "magnetar.audit"):
        for value in ("s3cret", "x" * 17_000):
            channel = dial(ends, serving, bearer(value))
            with pytest.raises(Unauthenticated):
                await role(channel)
        guard.forbidden = LOOKUP.path
        channel = dial(ends, serving, bearer("good"))
        with pytest.raises(Unauthorized):
            await role(channel)
        lines = [json.loads(record.getMessage()) for record in caplog.records]
        assert [(line["act"], line["result"]) for line in lines] == [("Broker.Lookup", "denied")] * 3
        assert [line["principal"] for line in lines] == ["anonymous", "anonymous", "client:ada"]
        assert [line["why"].split(":")[0] for line in lines][:2] == [
            "the token is not known here", "the header `authorization` is too long",
        ]  # fmt: skip
        assert all(line["from"].startswith(("127.0.0.1:", "[::1]:")) for line in lines)
        assert "s3cret" not in caplog.text


async def test_a_caller_that_gives_up_while_it_is_authenticated_leaves_nothing(ends: Ends) -> None:
    guard, broker = Gatekeeper(), Broker()
    guard.slow_s = 0.5
    channel = dial(ends, await listen(ends, ListenerAccess(guard), broker), bearer("good"))
    with pytest.raises(MagnetarError):
        await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=0.1)
    channel.stream(CONNECT).cancel()
    await asyncio.sleep(0.7)
    assert broker.begun == 0


async def test_credentials_do_not_leave_this_machine_in_clear() -> None:
    with pytest.raises(InvalidConfiguration, match=r"magnetar\+ssl"):
        connect(Endpoint("192.0.2.1", 7650), bearer("good"))


# ---------------------------------------------------------------------------------- TLS
async def test_tls_encrypts_and_a_certificate_of_another_authority_or_host_is_refused(
    ends: Ends, authority: Authority, tmp_path: Path
) -> None:
    guard = Gatekeeper()
    serving = await listen(ends, ListenerAccess(guard, replace(authority.issue("broker"), ca="")))
    tls = TlsFiles(ca=authority.ca)
    assert await role(dial(ends, serving, replace(bearer("good"), tls=tls))) == "client:ada"
    assert guard.callers[0].is_encrypted
    foreign = TlsFiles(ca=Authority.make(tmp_path / "other").ca)
    for trusted in (foreign, TlsFiles()):
        with pytest.raises(UntrustedServer, match="authority"):
            await role(dial(ends, serving, replace(bearer("good"), tls=trusted)))
    with pytest.raises((Unavailable, ConnectionLost), match=r"magnetar\+ssl"):
        await role(dial(ends, serving, bearer("good")))
    elsewhere = authority.issue("elsewhere", hosts=("broker.example",))
    named_otherwise = await listen(ends, ListenerAccess(guard, replace(elsewhere, ca="")))
    with pytest.raises(UntrustedServer, match="host name"):
        await role(dial(ends, named_otherwise, replace(bearer("good"), tls=tls)))
    late = await listen(ends, ListenerAccess(guard, replace(authority.issue("late", days=-1), ca="")))
    with pytest.raises(UntrustedServer, match="expired"):
        await role(dial(ends, late, replace(bearer("good"), tls=tls)))
    in_clear = await listen(ends, ListenerAccess(guard))
    with pytest.raises(WrongProtocol, match="magnetar://"):
        await role(dial(ends, in_clear, replace(bearer("good"), tls=tls)))
    assert len(guard.callers) == 1


async def test_a_listener_with_an_authority_takes_callers_with_its_certificates_only(
    ends: Ends, authority: Authority, tmp_path: Path
) -> None:
    guard = Gatekeeper()
    serving = await listen(ends, ListenerAccess(guard, authority.issue("broker")))
    assert await role(dial(ends, serving, CallerAccess(tls=authority.issue("ada")))) == "client:by certificate"
    assert b"BEGIN CERTIFICATE" in guard.callers[0].certificate
    expired = authority.issue("late", days=-1)
    stranger = replace(Authority.make(tmp_path / "other").issue("ada"), ca=authority.ca)
    for tls in (TlsFiles(ca=authority.ca), expired, stranger):
        with pytest.raises((Unavailable, ConnectionLost)):
            await role(dial(ends, serving, CallerAccess(tls=tls)))
    assert len(guard.callers) == 1


async def test_new_files_are_used_from_the_next_handshake_and_bad_ones_never(
    ends: Ends, authority: Authority, tmp_path: Path
) -> None:
    files = replace(authority.issue("changing"), ca="")
    serving = await listen(ends, ListenerAccess(Gatekeeper(), files))
    old = replace(bearer("good"), tls=TlsFiles(ca=authority.ca))
    lasting = dial(ends, serving, old)
    assert await role(lasting) == "client:ada"
    _write(files.certificate, b"no certificate")
    assert await role(dial(ends, serving, old)) == "client:ada"
    another = Authority.make(tmp_path / "another")
    renewed = another.issue("changing")
    _copy(renewed.certificate, files.certificate)
    assert await role(dial(ends, serving, old)) == "client:ada", "a certificate without its key is not used"
    _copy(renewed.key, files.key)
    assert await role(dial(ends, serving, replace(old, tls=TlsFiles(ca=another.ca)))) == "client:ada"
    with pytest.raises(UntrustedServer):
        await role(dial(ends, serving, old))
    assert await role(lasting) == "client:ada"


async def test_a_client_brings_a_renewed_certificate_over_a_new_connection_and_its_streams_keep_the_old_one(
    ends: Ends, authority: Authority
) -> None:
    guard = Gatekeeper()
    serving = await listen(ends, ListenerAccess(guard, authority.issue("server")))
    files = authority.issue("renewed")
    channel = dial(ends, serving, CallerAccess(tls=files))
    stream = channel.stream(CONNECT)
    stream.send_nowait(wire.ClientFrame())
    assert await stream.receive()
    await role(channel)
    _write(files.certificate, b"half written")
    assert await role(channel) == "client:by certificate", "a file that cannot be used is not"
    authority.issue("renewed")
    for _ in range(2):
        assert await role(channel) == "client:by certificate"
    gc.collect()
    seen = [caller.certificate for caller in guard.callers]
    assert (len(seen), len(set(seen)), len({caller.peer for caller in guard.callers})) == (5, 2, 2)
    assert seen[2] == seen[0] != seen[3] == seen[4]
    stream.send_nowait(wire.ClientFrame())
    assert await stream.receive(), "an open stream goes on"


def _write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def _copy(source: str, target: str) -> None:
    _write(target, Path(source).read_bytes())


@pytest.mark.parametrize("missing", ["certificate", "key", "ca"])
async def test_files_that_cannot_be_used_are_named_at_the_start(authority: Authority, missing: str) -> None:
    tls = authority.issue("broker")
    for path in ("/nowhere/x.pem", __file__):
        with pytest.raises(InvalidConfiguration, match=path):
            await serve(HERE, [("Broker", Broker())], ListenerAccess(tls=replace(tls, **{missing: path})), CLOCK)
    with pytest.raises(InvalidConfiguration, match="/nowhere"):
        connect(HERE, CallerAccess(tls=TlsFiles(ca="/nowhere/ca.pem")))


# ---------------------------------------------------------------------------------- simulated
def _simulate(scenario: Callable[[Simulation], Awaitable[None]]) -> None:
    simulation = Simulation(3)
    simulation.run(scenario(simulation))  # type: ignore[arg-type]
    assert not simulation.complaints


@pytest.mark.run_by.with_args(_simulate)
async def test_simulated_callers_are_authenticated_too_and_their_streams_expire(simulation: Simulation, /) -> None:
    world = simulation.world("broker")
    broker, guard = Broker(), Gatekeeper(60.0, world.clock)
    serving = await simulation.spawn(
        "broker", world.network.serve(Endpoint("broker", 1), [("Broker", broker)], ListenerAccess(guard))
    )

    async def client(network: Network) -> None:
        assert await role(network.connect(serving.endpoint, bearer("good"))) == "client:ada"
        bad = network.connect(serving.endpoint, bearer("bad"))
        with pytest.raises(Unauthenticated):
            await role(bad)
        with pytest.raises(Unauthenticated):
            await bad.stream(CONNECT).receive()
        assert broker.begun == 1
        stream = network.connect(serving.endpoint, bearer("good")).stream(CONNECT)
        with pytest.raises(CredentialsExpired):
            async with asyncio.timeout(61):
                await stream.receive()

    await simulation.spawn("client", client(simulation.world("client").network))


async def test_the_network_of_the_system_hands_both_on(ends: Ends) -> None:
    network = make_system_world(1).network
    serving = await network.serve(HERE, [("Broker", Broker())], ListenerAccess(Gatekeeper()))
    ends.append(serving)
    ends.append(network.connect(serving.endpoint, bearer("good")))
    assert await role(ends[-1]) == "client:ada"
