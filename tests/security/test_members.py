"""Members' certificates: who is one, and what the metadata service takes from whom."""

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.store import NODE_ABSENT
from magnetar.proto.errors import CredentialsExpired, InvalidConfiguration, MagnetarError, Unauthenticated, Unauthorized
from magnetar.runtime.access import OPEN_ACCESS, Caller, CallerAccess, Principal, PrincipalKind, TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.network import Endpoint, World
from magnetar.runtime.peer.sockets import MemberNetwork
from magnetar.runtime.process import make_system_world
from magnetar.security.authority import create_authority_files, issue_member_certificate
from magnetar.security.members import ROLES, MemberGuard, make_member_network, make_member_uri, read_own_member_name
from magnetar.security.settings import SecuritySettings
from tests.support.certificates import Authority

ANYWHERE = Endpoint("127.0.0.1", 0)
PUT = "/magnetar.wire.Metadata/Commit"
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "security"
    create_authority_files(folder, ["127.0.0.1"], NOW, "one")
    return folder


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


def world_of(folder: Path, role: str) -> World:
    settings = SecuritySettings.load(str(folder / "security.toml")).members
    assert settings is not None
    world = make_system_world(1)
    return replace(world, network=make_member_network(world.network, settings, role, world.clock))


def pem(files: TlsFiles) -> bytes:
    return Path(files.certificate).read_bytes()


async def principal(authority: Authority, *names: str) -> Principal:
    files = authority.issue(f"c{abs(hash(names))}", hosts=names)
    return await MemberGuard("one", SystemClock()).authenticate(Caller("1.2.3.4:5", certificate=pem(files)))


async def test_a_member_is_whom_its_certificate_names(authority: Authority) -> None:
    found = await principal(authority, "node", "10.0.0.1", "https://elsewhere/", "magnetar://one/bookie/b-1.example:7")
    assert (found.name, found.kind) == ("bookie/b-1.example:7", PrincipalKind.MEMBER)
    assert found.expires_ms > SystemClock().wall_ms()
    assert found.credential_id


@pytest.mark.parametrize(
    "names",
    [
        (), ("node",), ("magnetar://two/broker/a",), ("magnetar://one/broker/",), ("magnetar://one/broker",),
        ("magnetar://one//a",), ("magnetar:///broker/a",), ("magnetar://one/admin/a",), ("magnetar://one/broker/a/b",),
        ("magnetar://one/broker/a", "magnetar://one/operator/a"), ("magnetar://one/Broker/a",),
        ("Magnetar://one/broker/a",), ("magnetar://one/broker/a%20b",), ("magnetar://one/broker/*",),
    ],
)  # fmt: skip
async def test_a_certificate_that_misses_a_part_or_has_two_names_is_of_no_member(
    authority: Authority, names: tuple[str, ...]
) -> None:
    with pytest.raises(Unauthenticated):
        await principal(authority, *names)


@pytest.mark.parametrize("certificate", [b"", b"no certificate", b"x" * (1 << 20)])
async def test_what_is_no_certificate_is_refused(certificate: bytes) -> None:
    with pytest.raises(Unauthenticated):
        await MemberGuard("one", SystemClock()).authenticate(Caller("1.2.3.4:5", certificate=certificate))


async def test_the_end_of_a_certificate_is_looked_at_at_each_call(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    guard = MemberGuard("one", clock)
    caller = Caller("1.2.3.4:5", certificate=pem(authority.issue("short", hosts=("magnetar://one/broker/a",))))
    found = await guard.authenticate(caller)
    monkeypatch.setattr(clock, "wall_ms", lambda: found.expires_ms)
    with pytest.raises(CredentialsExpired):
        await guard.authenticate(caller)


def test_the_metadata_are_for_brokers_bookies_and_operators_and_a_backup_for_operators() -> None:
    guard = MemberGuard("one", SystemClock())
    member = {role: Principal(f"{role}/a", PrincipalKind.MEMBER) for role in ROLES}
    for role in ("broker", "bookie", "operator"):
        guard.authorize(member[role], PUT)
    others = [member["metadata"], Principal("operator/a", PrincipalKind.CLIENT), Principal("", PrincipalKind.ANONYMOUS)]
    for each in others:
        with pytest.raises(Unauthorized):
            guard.authorize(each, PUT)
    with pytest.raises(Unauthorized):
        guard.authorize(member["operator"], "/magnetar.wire.Admin/DeleteTopic")
    guard.authorize(member["operator"], "/magnetar.wire.Metadata/Backup")
    with pytest.raises(Unauthorized):
        guard.authorize(member["broker"], "/magnetar.wire.Metadata/Backup")


def test_names_of_members_have_no_characters_that_a_path_reads(folder: Path) -> None:
    for name in ("a/b", "", "../x", "a b", "a\n", "*"):
        with pytest.raises(InvalidConfiguration):
            make_member_uri("one", "broker", name)
    settings = SecuritySettings.load(str(folder / "security.toml")).members
    assert settings is not None
    assert read_own_member_name(settings, "operator") == "admin"
    assert read_own_member_name(settings, "bookie") == "127.0.0.1"


def test_a_certificate_of_another_role_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "s"
    create_authority_files(other, ["127.0.0.1"], NOW, "one")
    for end in (".pem", "-key.pem"):
        (other / "members" / f"bookie{end}").write_bytes((other / "members" / f"broker{end}").read_bytes())
    settings = SecuritySettings.load(str(other / "security.toml")).members
    assert settings is not None
    with pytest.raises(InvalidConfiguration, match="this is a bookie"):
        read_own_member_name(settings, "bookie")
    (other / "members" / "broker.pem").unlink()
    with pytest.raises(InvalidConfiguration, match="copy it"):
        read_own_member_name(settings, "broker")


# ---------------------------------------------------------------------------------- over real TLS
async def test_members_use_the_metadata_and_others_do_not(folder: Path, authority: Authority, tmp_path: Path) -> None:
    server = await MetadataServer.start(world_of(folder, "metadata"), ANYWHERE, str(tmp_path / "m.sqlite"))
    try:
        member = await connect_metadata(world_of(folder, "broker"), server.endpoint)
        await member.put("/tenants/t", b"x", NODE_ABSENT)
        await member.close()
        other = tmp_path / "other"
        create_authority_files(other, ["127.0.0.1"], NOW, "one")  # of the same name, and another authority
        stranger = authority.issue("nobody", hosts=("magnetar://one/broker/a",))
        broker = str(folder / "broker.pem"), str(folder / "broker-key.pem"), str(folder / "ca.pem")
        ways = {
            "another authority": world_of(other, "broker"),
            "self-made": with_tls(TlsFiles(stranger.certificate, stranger.key, str(folder / "ca.pem"))),
            "no certificate": with_tls(TlsFiles(ca=str(folder / "ca.pem"))),
            "in clear": make_system_world(1),
            "a listener's certificate": with_tls(TlsFiles(*broker)),
        }
        for way, world in ways.items():
            with pytest.raises(MagnetarError) as refused:
                await connect_metadata(world, server.endpoint, 0.5)
            if way == "a listener's certificate":
                assert isinstance(refused.value, Unauthenticated), way
    finally:
        await server.close()


def with_tls(files: TlsFiles) -> World:
    world = make_system_world(1)
    return replace(world, network=MemberNetwork(world.network, OPEN_ACCESS, CallerAccess(files)))


async def test_a_renewed_certificate_is_used_at_the_next_connection(folder: Path, tmp_path: Path) -> None:
    server = await MetadataServer.start(world_of(folder, "metadata"), ANYWHERE, str(tmp_path / "m.sqlite"))
    try:
        world = world_of(folder, "bookie")
        before = await connect_metadata(world, server.endpoint)
        issue_member_certificate(folder, "bookie", "other", [], NOW)
        after = await connect_metadata(world, server.endpoint)
        await after.put("/bookies/cookies/x", b"x", NODE_ABSENT)
        assert await before.get("/bookies/cookies/x") is not None
        await before.close()
        await after.close()
    finally:
        await server.close()
