"""Each secret is replaced while servers run: what is open stays, and new connections work at each step."""

import asyncio
import datetime
import logging
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.store import NODE_ABSENT
from magnetar.proto.errors import (
    InvalidConfiguration,
    MagnetarError,
    Unauthenticated,
    Unavailable,
    UntrustedServer,
)
from magnetar.runtime.access import Caller, ListenerAccess, TlsFiles
from magnetar.security.authenticator import Authenticator, BrokerChannel, BrokerOwnToken
from magnetar.security.authority import (
    add_authority,
    create_authority_files,
    issue_broker_certificate,
    issue_member_certificate,
)
from magnetar.security.settings import SecuritySettings
from magnetar.security.token import PUBLIC_KEYS_MAX
from tests.runtime.grpc.test_access import Ends, Gatekeeper, bearer, dial, listen, role
from tests.runtime.grpc.test_access import ends as ends
from tests.security.test_members import ANYWHERE, world_of
from tests.security.test_token import Clock
from tests.support.processes import run_here

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority_files(tmp_path / "security", ["127.0.0.1"], NOW, "one")
    return tmp_path / "security"


def command(folder: Path, *words: str) -> str:
    done = run_here("security", *words, "--folder", str(folder))
    assert done.code == 0, done.err
    return done.out


# ---------------------------------------------------------------------------------- the key of tokens
async def test_tokens_of_the_key_before_hold_until_it_is_dropped(folder: Path) -> None:
    clock = Clock()
    guard = Authenticator(SecuritySettings.load(str(folder / "security.toml")), clock)

    def token() -> Caller:
        return Caller("", "Bearer " + command(folder, "token", "create", "--role", "ada").strip())

    old = token()
    command(folder, "token", "key")
    new = token()
    clock.now_ms += 11_000
    for each in (old, new):
        assert (await guard.authenticate(each)).name == "ada"
    for name in ("broker", "admin"):  # those of the old key would end the brokers' own calls
        refused = run_here("security", "token", "key", "--drop-old", "--folder", str(folder))
        assert (refused.code, f"{name}.token is not of the newest key" in refused.err) == (2, True), refused.err
        told = refused.err.partition("magnetar security ")[2].split()
        assert run_here("security", *told).code == 0
        assert stat.S_IMODE((folder / f"{name}.token").stat().st_mode) == 0o600
    command(folder, "token", "key", "--drop-old")
    clock.now_ms += 11_000
    assert (await guard.authenticate(new)).name == "ada"
    with pytest.raises(Unauthenticated, match="not signed"):
        await guard.authenticate(old)


def test_the_log_says_when_a_brokers_own_token_ends_and_warns_daily_before(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, file, day_ms = Clock(), folder / "broker.token", 86_400_000
    caplog.set_level(logging.INFO, "magnetar.security")
    clock.now_ms = int(NOW.timestamp() * 1000)
    own = BrokerOwnToken(str(file), clock)
    assert abs(own.ends_ms() - clock.now_ms - 90 * day_ms) < 2000
    assert [each.levelname for each in caplog.records] == ["INFO"]
    clock.now_ms += 77 * day_ms
    for _ in range(3):
        own.read()
    clock.now_ms += day_ms
    own.read()
    assert [each.levelname for each in caplog.records[1:]] == ["WARNING"] * 2
    assert all("broker.token, the broker's own token, ends at 20" in each.getMessage() for each in caplog.records)
    command(folder, "token", "create", "--role", "broker", "--out", str(file), "--replace")
    assert own.ends_ms() == 0, "the new one has no end"
    file.unlink()
    assert own.ends_ms() == 0


def test_a_broker_whose_own_token_is_refused_does_not_blame_the_caller(folder: Path) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise Unauthenticated("the token has expired")

    stream = mock.Mock(receive=refused)
    channel = BrokerChannel(mock.Mock(endpoint="b2:7650", call=refused, stream=lambda rpc: stream))
    rpc_: Any = None
    for asked in (channel.call(rpc_, None, timeout_s=1), channel.stream(rpc_).receive()):
        with pytest.raises(Unavailable, match=r"b2:7650 refuses the own token .* not yours: the token has expired"):
            asyncio.run(asked)  # type: ignore[arg-type]


def test_a_file_of_many_public_keys_is_refused(folder: Path) -> None:
    for _ in range(PUBLIC_KEYS_MAX):
        command(folder, "token", "key")
    with pytest.raises(InvalidConfiguration, match=f"at most {PUBLIC_KEYS_MAX}"):
        Authenticator(SecuritySettings.load(str(folder / "security.toml")), Clock())


# ---------------------------------------------------------------------------------- the authority
async def test_the_authority_of_a_listener_is_replaced_and_clients_connect_at_each_step(
    folder: Path, ends: Ends, tmp_path: Path
) -> None:
    files = TlsFiles(str(folder / "broker.pem"), str(folder / "broker-key.pem"))
    serving = await listen(ends, ListenerAccess(Gatekeeper(), files))

    async def connects(ca: Path) -> str:
        return await role(dial(ends, serving, replace(bearer("good"), tls=TlsFiles(ca=str(ca)))))

    before = tmp_path / "before.pem"
    before.write_bytes((folder / "ca.pem").read_bytes())
    lasting = dial(ends, serving, replace(bearer("good"), tls=TlsFiles(ca=str(before))))
    assert await role(lasting) == "client:ada"
    command(folder, "authority")
    for ca in (before, folder / "ca.pem"):
        assert await connects(ca) == "client:ada"
    issue_broker_certificate(folder, ["127.0.0.1"], NOW)
    assert await connects(folder / "ca.pem") == "client:ada"
    with pytest.raises(UntrustedServer):
        await connects(before)
    command(folder, "authority", "--drop-old")
    assert await connects(folder / "ca.pem") == "client:ada"
    assert await role(lasting) == "client:ada"


async def test_the_authority_of_the_members_is_replaced_and_each_connects_at_each_step(
    folder: Path, tmp_path: Path
) -> None:
    server = await MetadataServer.start(world_of(folder, "metadata"), ANYWHERE, str(tmp_path / "m.sqlite"))
    worlds = {each: world_of(folder, each) for each in ("broker", "bookie", "operator")}  # processes that run
    lasting = await connect_metadata(worlds["broker"], server.endpoint)
    steps = 0

    async def all_connect() -> None:
        nonlocal steps
        steps += 1
        await lasting.put(f"/tenants/t{steps}", b"x", NODE_ABSENT)
        for member in (*worlds.values(), world_of(folder, "broker")):
            store = await connect_metadata(member, server.endpoint)
            assert await store.get(f"/tenants/t{steps}") is not None
            await store.close()

    try:
        command(folder, "authority")
        await all_connect()
        kept = {name: (folder / "members" / name).read_bytes() for name in ("bookie.pem", "bookie-key.pem")}
        for each in ("bookie", "metadata", "operator", "broker"):
            issue_member_certificate(folder, each, each, ["127.0.0.1"] if each == "metadata" else [], NOW)
            await all_connect()
        command(folder, "authority", "--drop-old")
        await all_connect()
        for name, data in kept.items():
            (folder / "members" / name).write_bytes(data)
        with pytest.raises(MagnetarError):
            await connect_metadata(world_of(folder, "bookie"), server.endpoint, 0.5)
    finally:
        await lasting.close()
        await server.close()


def test_a_key_that_is_not_the_authoritys_issues_nothing(folder: Path) -> None:
    before = (folder / "ca-key.pem").read_bytes()
    add_authority(folder, NOW)
    (folder / "ca-key.pem").write_bytes(before)
    with pytest.raises(InvalidConfiguration, match="not the key"):
        issue_broker_certificate(folder, ["127.0.0.1"], NOW)
