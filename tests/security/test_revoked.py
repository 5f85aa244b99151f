"""Credentials that end before their time: a token on the list of revoked ones, a key or a password that is replaced."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest

from magnetar.proto.errors import CredentialsExpired, InvalidConfiguration, InvalidRequest, Unauthenticated
from magnetar.runtime.access import Caller, CallerAccess, ListenerAccess
from magnetar.runtime.grpc import limits as callers
from magnetar.runtime.network import Channel, Endpoint
from magnetar.runtime.sim.world import Simulation
from magnetar.security import settings as watched
from magnetar.security import token as revoked
from magnetar.security.authenticator import Authenticator
from magnetar.security.settings import Secret
from magnetar.security.token import create_token
from tests.runtime.grpc.test_access import CONNECT, Broker, role
from tests.security.test_basic import BCRYPT, SHA, credentials
from tests.security.test_settings import authenticator, load, private
from tests.security.test_token import NOW_S, SECRET, Clock
from tests.support.processes import run_here

SETTINGS = """
[token]
secret_key = "secret.key"
revoked = "revoked.txt"
[basic]
file = "users.htpasswd"
[broker]
token = "broker.token"
"""
SOON_S = callers.STREAM_CHECK_S + watched.FILE_CHECK_INTERVAL_S + 0.1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private(tmp_path / "secret.key", SECRET)
    private(tmp_path / "broker.token", b"x.y.z\n")
    private(tmp_path / "users.htpasswd", f"ada:{BCRYPT}\nbob:{SHA}\n".encode())
    (tmp_path / "revoked.txt").write_text(revoked.REVOCATION_FILE_HEADER)
    return tmp_path


def token(subject: str, now_ms: int = NOW_S * 1000) -> str:
    return create_token(Secret(SECRET), "HS256", subject, now_ms, 3600)


def replaced(path: Path, data: bytes) -> None:
    os.replace(private(path.with_suffix(".new"), data), path)


# ------------------------------------------------------------------------------------------------- the list
async def test_a_token_or_a_role_on_the_list_is_refused_and_no_other(folder: Path) -> None:
    clock = Clock()
    guard = authenticator(folder, SETTINGS, clock)
    leaked, next_one, other = token("ada"), token("ada"), token("bob")
    for each in (leaked, next_one, other):
        await guard.authenticate(Caller("p", f"Bearer {each}"))
    revoked.add_revocation(str(folder / "revoked.txt"), revoked.read_token_id(leaked))
    clock.now_ms += 2100
    with pytest.raises(Unauthenticated, match="the token is revoked"):
        await guard.authenticate(Caller("p", f"Bearer {leaked}"))
    assert (await guard.authenticate(Caller("p", f"Bearer {next_one}"))).name == "ada"
    revoked.add_revocation(str(folder / "revoked.txt"), "ada")
    clock.now_ms += 2100
    with pytest.raises(Unauthenticated, match="the token is revoked"):
        await guard.authenticate(Caller("p", f"Bearer {next_one}"))
    assert (await guard.authenticate(Caller("p", f"Bearer {other}"))).name == "bob"


def test_a_list_has_ids_and_roles_comments_and_empty_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    path.write_bytes(b"# once\r\n\n 17-ab \r\norders\nf\xc3\xb6o@x")
    assert revoked.read_revocations(str(path)) == {"17-ab", "orders", "föo@x"}
    revoked.add_revocation(str(path), "last")
    revoked.add_revocation(str(path), "last")
    assert path.read_bytes().endswith(b"o@x\nlast\n")
    for wrong in (b"a\0b", b"x" * 2000, b"\xff", b"a\n" * (1 << 19) + b"a"):
        path.write_bytes(wrong)
        with pytest.raises(InvalidConfiguration, match=str(path)):
            revoked.read_revocations(str(path))
    for no_line in ("", "a\nb", "#x", " x", "x" * 2000):
        with pytest.raises(InvalidRequest):
            revoked.add_revocation(str(path), no_line)


async def test_a_list_that_is_missing_is_an_error_at_the_start_and_later_keeps_the_one_before(folder: Path) -> None:
    clock, path = Clock(), folder / "revoked.txt"
    path.write_text("ada\n")
    guard = authenticator(folder, SETTINGS, clock)
    path.unlink()
    clock.now_ms += 2100
    with pytest.raises(Unauthenticated, match="revoked"):
        await guard.authenticate(Caller("p", f"Bearer {token('ada')}"))
    with pytest.raises(InvalidConfiguration, match="revoked"):
        authenticator(folder, SETTINGS)


# ------------------------------------------------------------------------------------------------- open streams
ADA, BOB = credentials("ada", "secret"), credentials("bob", "myPassword")


@pytest.mark.parametrize(
    ("header", "change"),
    [
        ("Bearer", lambda folder: revoked.add_revocation(str(folder / "revoked.txt"), "ada")),
        ("Bearer", lambda folder: replaced(folder / "secret.key", b"n" * 32)),
        ("Basic", lambda folder: replaced(folder / "users.htpasswd", f"bob:{SHA}\n".encode())),
        ("Basic", lambda folder: replaced(folder / "users.htpasswd", f"ada:{SHA}\nbob:{SHA}\n".encode())),
    ],
    ids=["revoked", "another key", "user removed", "another password"],
)
def test_a_stream_ends_within_seconds_of_a_revocation_and_its_caller_cannot_return(
    folder: Path, header: str, change: Callable[[Path], None]
) -> None:
    simulation = Simulation(1)

    async def scenario() -> None:
        world = simulation.world("broker")
        guard = Authenticator(load(folder, SETTINGS), world.clock, world.workers)
        serving = await simulation.spawn(
            "broker", world.network.serve(Endpoint("broker", 1), [("Broker", Broker())], ListenerAccess(guard))
        )

        async def client() -> None:
            network, now_ms = simulation.world("client").network, world.clock.wall_ms()
            mine = f"Bearer {token('ada', now_ms)}" if header == "Bearer" else f"Basic {ADA}"
            access = CallerAccess(authorization=lambda: mine)
            channel: Channel = network.connect(serving.endpoint, access)
            stream = channel.stream(CONNECT)
            other = network.connect(serving.endpoint, CallerAccess(authorization=lambda: f"Basic {BOB}"))
            untouched = other.stream(CONNECT)
            await role(channel)
            await asyncio.sleep(60)
            change(folder)
            with pytest.raises(CredentialsExpired, match="lapsed"):
                async with asyncio.timeout(SOON_S):
                    await stream.receive()
            with pytest.raises(Unauthenticated):
                await role(channel)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(30):
                    await untouched.receive()

        await simulation.spawn("client", client())

    simulation.run(scenario())
    assert not simulation.complaints


async def test_a_file_that_is_written_anew_with_the_same_content_ends_no_stream(folder: Path) -> None:
    clock = Clock()
    guard = authenticator(folder, SETTINGS, clock)
    ada = await guard.authenticate(Caller("127.0.0.1:1", f"Basic {ADA}"))
    bob = await guard.authenticate(Caller("p", f"Bearer {token('bob')}"))
    for name in ("secret.key", "users.htpasswd"):
        replaced(folder / name, (folder / name).read_bytes())
    clock.now_ms += 60_000
    assert guard.why_lapsed(ada) == guard.why_lapsed(bob) == ""
    assert repr(ada.proof) not in repr(ada)


# ------------------------------------------------------------------------------------------------- the command
def test_a_token_is_revoked_by_itself_its_id_or_its_role(folder: Path) -> None:
    (folder / "security.toml").write_text(SETTINGS)
    private(folder / "ada.token", token("ada").encode())
    verb = ("security", "token", "revoke", "--security", str(folder / "security.toml"))
    done = run_here(*verb, str(folder / "ada.token"))
    identity = jwt.decode((folder / "ada.token").read_text(), options={"verify_signature": False})["jti"]
    assert (done.code, identity in done.out) == (0, True), done.err
    assert (run_here(*verb, "--id", "17").code, run_here(*verb, "--role", "orders").code) == (0, 0)
    assert revoked.read_revocations(str(folder / "revoked.txt")) == {identity, "17", "orders"}
    assert json.loads(run_here("security", "token", "show", str(folder / "ada.token")).out)["claims"]["jti"] == identity
    private(folder / "ada.token", jwt.encode({"sub": "ada"}, SECRET, "HS256").encode())
    without = run_here(*verb, str(folder / "ada.token"))
    assert (without.code, "revoke its role" in without.err) == (2, True), without.err
    assert run_here(*verb).code == run_here(*verb, "--id", "1", "--role", "x").code == 2
    (folder / "security.toml").write_text(SETTINGS.replace("revoked", "# "))
    assert "has no `revoked`" in run_here(*verb, "--id", "17").err
