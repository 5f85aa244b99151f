"""What a listener says to each wrong credential: one typed error, one line in the audit log, and nothing leaked."""

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, MagnetarError, Unauthenticated, Unavailable
from magnetar.runtime.access import CallerAccess, ListenerAccess, TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.client import connect
from magnetar.runtime.grpc.server import RunningGrpcServer, serve
from magnetar.runtime.network import Endpoint
from magnetar.security.authenticator import Authenticator
from magnetar.security.settings import Secret
from magnetar.security.token import create_token
from tests.runtime.grpc.test_access import HERE, LOOKUP, Broker, role
from tests.security.test_basic import BCRYPT, credentials
from tests.security.test_settings import load, private
from tests.security.test_token import SECRET
from tests.support.certificates import Authority
from tests.support.issuer import AUDIENCE, issuing
from tests.support.steps import stopwatch

SETTINGS = """
[token]
secret_key = "secret.key"
audience = "magnetar"
revoked = "revoked.txt"
[basic]
file = "users.htpasswd"
[broker]
token = "broker.token"
[authentication]
anonymous_role = "guest"
"""
Listening = tuple[RunningGrpcServer, Broker]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private(tmp_path / "secret.key", SECRET)
    private(tmp_path / "broker.token", b"x.y.z\n")
    private(tmp_path / "users.htpasswd", f"ada:{BCRYPT}\n".encode())
    (tmp_path / "revoked.txt").write_text("leaked-one\n")
    return tmp_path


@pytest.fixture
async def listening(folder: Path) -> AsyncIterator[Listening]:
    broker = Broker()
    guard = Authenticator(load(folder, SETTINGS), SystemClock())
    serving = await serve(HERE, [("Broker", broker)], ListenerAccess(guard), SystemClock())
    yield serving, broker
    await serving.close()


def claims(**more: Any) -> dict[str, Any]:
    return {"sub": "ada", "aud": "magnetar", "exp": int(time.time()) + 60, **more}


def signed(key: bytes = SECRET, **more: Any) -> str:
    return "Bearer " + jwt.encode(claims(**more), key, "HS256")


def unsigned() -> str:
    parts = [json.dumps(each).encode() for each in ({"alg": "none"}, claims(sub="admin"))]
    return "Bearer " + ".".join(base64.urlsafe_b64encode(each).rstrip(b"=").decode() for each in parts) + "."


HOUR = 3600
WRONG: dict[str, tuple[Callable[[], str], str]] = {
    "of another key": (lambda: signed(b"x" * 32), "not signed with a key of this server"),
    "expired": (lambda: signed(exp=int(time.time()) - 600), "has expired at"),
    "a clock an hour off": (lambda: signed(exp=int(time.time()) - HOUR), "Compare the clocks: 1 h apart"),
    "not valid yet": (lambda: signed(nbf=int(time.time()) + 600), "is valid from"),
    "made by a clock an hour off": (lambda: signed(nbf=int(time.time()) + HOUR), "Compare the clocks: 1 h apart"),
    "unsigned": (unsigned, "algorithm"),
    "for others": (lambda: signed(aud="another"), "audience|for others|not for"),
    "revoked": (lambda: signed(jti="leaked-one"), "the token is revoked"),
    "of 20 KB": (lambda: signed(x="y" * 20_000), "too long"),
    "a role with a line break": (lambda: signed(sub="ada\nadmin"), "is no role"),
    "a role that turns the text": (lambda: signed(sub="ada\u202enimda"), "is no role"),
    "no role": (lambda: signed(sub=""), "is no role"),
    "no token": (lambda: "Bearer x.y", "that is no token"),
    "an unknown scheme": (lambda: "Digest x", "does not fit"),
    "a wrong password": (lambda: "Basic " + credentials("ada", "canary"), "the user or the password is wrong"),
    "an unknown user": (lambda: "Basic " + credentials("eve", "canary"), "the user or the password is wrong"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_credential_is_one_typed_error_and_one_line_and_never_the_anonymous_role(
    listening: Listening, wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    serving, broker = listening
    make, says = WRONG[wrong]
    header = make()
    channel = connect(serving.endpoint, CallerAccess(authorization=lambda: header))
    with caplog.at_level(logging.DEBUG), pytest.raises(Unauthenticated, match=says) as refused:
        await role(channel)
    await channel.close()
    assert broker.begun == 0
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == "magnetar.audit"]
    assert [(line["act"], line["result"]) for line in lines] == [("Broker.Lookup", "denied")]
    assert lines[0]["why"] in str(refused.value)
    secret = header.partition(" ")[2]
    assert not [each for each in (secret, secret[-20:]) if len(each) > 8 and each in caplog.text + str(refused.value)]


async def test_a_token_of_a_megabyte_is_refused_below_the_guard_and_others_go_on(listening: Listening) -> None:
    serving, broker = listening
    header = "Bearer " + "x" * (1 << 20)
    channel = connect(serving.endpoint, CallerAccess(authorization=lambda: header))
    with pytest.raises(MagnetarError) as refused:
        await role(channel)
    await channel.close()
    assert broker.begun == 0
    assert "xxxx" not in str(refused.value)
    good = signed()
    channel = connect(serving.endpoint, CallerAccess(authorization=lambda: good))
    assert await role(channel) == "client:ada"
    await channel.close()


async def test_an_issuer_that_hangs_holds_up_its_own_callers_alone_and_known_keys_go_on(folder: Path) -> None:
    with issuing() as issuer, issuing() as dead:
        section = f'[oidc]\nissuers = ["{issuer.url}", "{dead.url}"]\naudiences = ["{AUDIENCE}"]\nrequire_https = false'
        guard = Authenticator(load(folder, SETTINGS + section), SystemClock())
        serving = await serve(HERE, [("Broker", Broker())], ListenerAccess(guard), SystemClock())
        assert await _as(serving, issuer.token("ada")) == "client:ada"
        for each in (issuer, dead):
            each.go.clear()
        hanging = asyncio.ensure_future(_as(serving, dead.token("eve")))
        await asyncio.sleep(0.1)
        assert await _as(serving, issuer.token("bob")) == "client:bob", "its keys are known"
        assert await _as(serving, signed().removeprefix("Bearer ")) == "client:ada"
        assert not hanging.done(), "nobody waited for it"
        dead.answers["/keys"] = 500
        dead.go.set()
        with pytest.raises(Unavailable):
            await hanging
        asked = len(dead.asked)
        with pytest.raises(Unavailable):
            await _as(serving, dead.token("eve"))
        assert len(dead.asked) == asked, "it is not asked again at once"
        await serving.close()


async def _as(serving: RunningGrpcServer, token: str) -> str:
    channel = connect(serving.endpoint, CallerAccess(authorization=lambda: f"Bearer {token}"))
    try:
        return await role(channel)
    finally:
        await channel.close()


# ------------------------------------------------------------------------------------------------- below the guard
async def test_nothing_of_a_strangers_request_is_parsed_or_unfolded(listening: Listening) -> None:
    """It is told that it is unknown, whatever it sends; what is compressed is not taken at all."""
    serving, broker = listening
    bomb = wire.LookupRequest(topic="t" * (8 << 20)).SerializeToString()
    async with grpc.aio.insecure_channel(str(serving.endpoint)) as channel:
        call = channel.unary_unary(LOOKUP.path)
        for data, compression in ((b"\xff" * 1000, None), (bomb, grpc.Compression.Gzip)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(data, compression=compression, metadata=(("authorization", "Bearer x"),))
            said = (refused.value.details() or "") + str(refused.value.code())
            assert ("UNIMPLEMENTED" if compression else "that is no token") in said
    assert broker.begun == 0


async def test_a_certificate_is_refused_once_its_authority_is_taken_out_of_the_file(tmp_path: Path) -> None:
    ours, theirs = Authority.make(tmp_path / "ours"), Authority.make(tmp_path / "theirs", "theirs")
    alone, both = (tmp_path / "ours" / "ca.pem").read_bytes(), tmp_path / "both.pem"
    both.write_bytes(alone + (tmp_path / "theirs" / "ca.pem").read_bytes())
    private(tmp_path / "broker.token", b"x.y.z\n")
    guard = Authenticator(load(tmp_path, CERTIFICATES), SystemClock())
    access = ListenerAccess(guard, replace(ours.issue("broker"), ca=str(both)))
    serving = await serve(HERE, [("Broker", Broker())], access, SystemClock())
    mine, other = ours.issue("ada"), replace(theirs.issue("eve"), ca=ours.ca)
    assert [await _with(serving.endpoint, each) for each in (mine, other)] == ["client:ada", "client:eve"]
    private(tmp_path / "new.pem", alone).replace(both)
    assert await _with(serving.endpoint, mine) == "client:ada"
    with pytest.raises((Unavailable, ConnectionLost)):
        await _with(serving.endpoint, other)
    await serving.close()


CERTIFICATES = """
[tls]
certificate = "c.pem"
key = "k.pem"
ca = "ca.pem"
[certificate]
[broker]
token = "broker.token"
"""


async def _with(endpoint: Endpoint, tls: TlsFiles) -> str:
    channel = connect(endpoint, CallerAccess(tls))
    try:
        return await role(channel)
    finally:
        await channel.close()


async def test_streams_that_are_opened_and_cut_by_the_thousand_hold_up_no_other_caller(listening: Listening) -> None:
    """HTTP/2's rapid reset."""
    serving = listening[0]
    good = f"Bearer {create_token(Secret(SECRET), 'HS256', 'ada', SystemClock().wall_ms(), 60)}"
    async with grpc.aio.insecure_channel(str(serving.endpoint)) as channel:
        open_one = channel.stream_stream("/magnetar.wire.Broker/Connect")
        for _ in range(10):
            calls = [open_one(metadata=(("authorization", good),)) for _ in range(100)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
        with stopwatch() as seconds:
            assert await _as(serving, signed().removeprefix("Bearer ")) == "client:ada"
        assert seconds() < 5
