"""The settings file, secrets, and the guard that they make."""

import os
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidConfiguration, MagnetarError, Unauthenticated
from magnetar.runtime.access import Caller, Principal, PrincipalKind
from magnetar.runtime.process import make_system_world
from magnetar.security.authenticator import Authenticator, SecuredNetwork, read_token
from magnetar.security.settings import Secret, SecuritySettings, read_secret
from magnetar.security.token import create_token
from tests.security.test_token import NOW_S, SECRET, Clock

GOOD = """
[token]
secret_key = "secret.key"
[authorization]
super_users = ["admin"]
[broker]
token = "broker.token"
"""
ADMIN, LOOKUP = "/magnetar.wire.Admin/DeleteTopic", "/magnetar.wire.Broker/Lookup"


def private(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private(tmp_path / "secret.key", SECRET)
    private(tmp_path / "broker.token", b"x.y.z\n")
    return tmp_path


def load(folder: Path, text: str) -> SecuritySettings:
    (folder / "security.toml").write_text(text)
    return SecuritySettings.load(str(folder / "security.toml"))


def authenticator(folder: Path, text: str = GOOD, clock: Clock | None = None) -> Authenticator:
    return Authenticator(load(folder, text), clock or Clock())


def bearer(role: str, key: bytes = SECRET, lifetime_s: float | None = None) -> Caller:
    return Caller("1.2.3.4:5", "Bearer " + create_token(Secret(key), "HS256", role, NOW_S * 1000, lifetime_s))


# ---------------------------------------------------------------------------------- settings
def test_paths_are_relative_to_the_file(folder: Path) -> None:
    settings = load(folder, GOOD)
    assert settings.token is not None
    assert settings.token.secret_key == str(folder / "secret.key")
    assert settings.tls_files is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"needs a section \[token\]"),
        ("[nonsense]\n", "nonsense"),
        ("token = 3\n", "no section"),
        ("[token]\nsecret = 'x'\n", "secret_key"),
        ("[token]\nsecret_key = 3\n", "is str"),
        ("[token]\nclock_skew_s = true\nsecret_key = 'x'\n", "is int"),
        ("[token]\nsecret_key = 'x'\npublic_key = 'y'\n", "one of"),
        ("[token]\n", "one of"),
        ("[token]\nsecret_key = 'x'\nalgorithm = 'none'\n", "HS256"),
        ("[token]\nsecret_key = 'x'\nalgorithm = 'RS256'\n", "public_key"),
        ("[token]\nsecret_key = 'x'\nclock_skew_s = 86400\n", "3600"),
        ("[token]\nsecret_key = 'x'\nrole_claim = ''\n", "names"),
        ("[token]\nsecret_key = 'x'\n", "broker"),
        (GOOD + "[tls]\ncertificate = 'c'\n", "certificate and key"),
        (GOOD + "[tls]\ncertificate = 'c'\nkey = 'k'\nrequire_client_certificate = false\n", "callers who have"),
        ("[tls]\ncertificate='c'\nkey='k'\nca='a'\nrequire_client_certificate=false\n[certificate]\n", "others"),
        (GOOD + "[authentication]\nanonymous_role = 'admin'\n", "anonymous"),
        (GOOD.replace('["admin"]', '["admin", 3]'), "list of texts"),
        (GOOD.replace('["admin"]', '[""]'), "list of texts"),
        ("[token\n", "TOML"),
        ("\0", "TOML"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(folder: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        load(folder, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="nowhere"):
        SecuritySettings.load(str(tmp_path / "nowhere.toml"))


# ---------------------------------------------------------------------------------- secrets
def test_a_secret_is_shown_nowhere() -> None:
    secret = Secret(b"s3cret")
    assert "s3cret" not in f"{secret!r} {secret} {[secret]}"
    assert secret == Secret(b"s3cret")
    assert secret != Secret(b"other")
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_a_secret_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = private(tmp_path / "key", b"x")
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(InvalidConfiguration, match=f"chmod 600 {path}"):
            read_secret(str(path))
    path.chmod(0o400)
    assert read_secret(f"file:{path}").reveal_bytes() == read_secret(f"file://{path}").reveal_bytes() == b"x"


SOURCES = """
[tls]
certificate = "broker.pem"
key = "broker-key.pem"
[token]
secret_key = "secret.key"
[basic]
file = "users.htpasswd"
[broker]
token = "broker.token"
ca = "ca.pem"
"""


@pytest.mark.parametrize("name", ["secret.key", "users.htpasswd", "broker.token", "broker-key.pem"])
def test_each_file_with_a_secret_is_refused_at_the_start_while_others_may_read_it(folder: Path, name: str) -> None:
    for other in ("users.htpasswd", "broker-key.pem"):
        private(folder / other, b"# none\n")
    settings, world = load(folder, SOURCES), make_system_world(1)
    SecuredNetwork(world.network, settings, world.clock, world.workers)
    (folder / name).chmod(0o644)
    with pytest.raises(InvalidConfiguration, match=f"chmod 600 {folder / name}"):
        SecuredNetwork(world.network, settings, world.clock, world.workers)


VALUES = st.one_of(
    st.text(max_size=8).map(repr), st.integers().map(str), st.booleans().map(lambda each: str(each).lower()),
    st.sampled_from(["[]", "['a']", "{}", "['a', 1]", "1.5", "nan", "1979-05-27", "'data:;base64,x'", "'HS256'"]),
)  # fmt: skip
NAMES = st.sampled_from([
    "secret_key", "public_key", "algorithm", "certificate", "key", "ca", "file", "issuers", "audiences", "token",
    "clock_skew_s", "cluster", "common_name", "super_users", "anonymous_role", "require_https", "x",
])  # fmt: skip
SECTION_NAMES = st.sampled_from(
    ["token", "tls", "oidc", "basic", "certificate", "broker", "authentication", "authorization", "x", "token.x"]
)
SECTIONS = st.builds(
    lambda name, values: f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()),
    SECTION_NAMES, st.dictionaries(NAMES, VALUES, max_size=4),
)  # fmt: skip


@hypothesis.settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.one_of(st.lists(SECTIONS, max_size=4).map("".join), st.text(max_size=60)))
def test_any_file_gives_settings_that_fit_or_is_refused(folder: Path, text: str) -> None:
    (folder / "security.toml").write_bytes(text.encode(errors="surrogatepass"))
    try:
        settings = SecuritySettings.load(str(folder / "security.toml"))
    except InvalidConfiguration:
        return
    assert settings.token or settings.oidc or settings.basic or settings.certificate
    assert settings.broker.token or settings.certificate


def test_secrets_come_from_the_environment_and_inline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "x")
    assert read_secret("env:OURS").reveal_bytes() == read_secret("data:;base64,eA==").reveal_bytes() == b"x"
    for wrong in ("env:NOT_SET", "data:;base64,!", "data:x", "/nowhere", os.devnull):
        with pytest.raises(InvalidConfiguration):
            read_secret(wrong)


# ---------------------------------------------------------------------------------- the guard
async def test_a_token_says_who_calls_and_wrong_credentials_never_become_anonymous(folder: Path) -> None:
    anonymous = GOOD + '[authentication]\nanonymous_role = "guest"\n'
    for text in (GOOD, anonymous):
        guard = authenticator(folder, text)
        assert (await guard.authenticate(bearer("ada"))).name == "ada"
        others = [Caller("p", header) for header in ("Bearer ", "Bearer x", "Basic eDp5", "x")]
        for wrong in (bearer("ada", b"x" * 32), *others):
            with pytest.raises(Unauthenticated):
                await guard.authenticate(wrong)
    assert await guard.authenticate(Caller("p")) == Principal("guest", PrincipalKind.ANONYMOUS)
    with pytest.raises(Unauthenticated, match="bring a token"):
        await authenticator(folder).authenticate(Caller("p"))


async def test_a_remembered_token_expires_and_a_new_key_forgets_it(folder: Path) -> None:
    clock = Clock()
    guard = authenticator(folder, clock=clock)
    short, long = bearer("ada", lifetime_s=5), bearer("ada")
    await guard.authenticate(short)
    await guard.authenticate(long)
    clock.now_ms += 5000
    with pytest.raises(Unauthenticated, match="expired"):
        await guard.authenticate(short)
    private(folder / "new.key", b"n" * 32)
    os.replace(folder / "new.key", folder / "secret.key")
    clock.now_ms += 11_000
    with pytest.raises(Unauthenticated):
        await guard.authenticate(long)
    assert (await guard.authenticate(bearer("eve", b"n" * 32))).name == "eve"
    private(folder / "bad.key", b"short")
    os.replace(folder / "bad.key", folder / "secret.key")
    clock.now_ms += 11_000
    assert (await guard.authenticate(bearer("eve", b"n" * 32))).name == "eve", "a key that cannot be used is not"


async def test_super_users_are_those_of_the_settings_and_never_the_anonymous_role(folder: Path) -> None:
    """What a role may do is the broker's decision (tests/broker/access/)."""
    guard = authenticator(folder, GOOD + '[authentication]\nanonymous_role = "guest"\n')
    found = await guard.authenticate(Caller("127.0.0.1:1"))
    assert (found.name, found.kind, found.is_super) == ("guest", PrincipalKind.ANONYMOUS, False)
    for role, is_super in (("admin", True), ("ada", False), ("Admin", False), ("admin ", False)):
        assert guard._is_super(Principal(role, PrincipalKind.CLIENT)) == is_super
    assert not guard._is_super(Principal("admin", PrincipalKind.ANONYMOUS))


def test_a_brokers_own_token_is_read_when_it_starts(folder: Path) -> None:
    assert read_token(str(folder / "broker.token")) == "x.y.z"
    private(folder / "broker.token", "tök".encode())
    wrong: list[Any] = [str(folder / "broker.token"), str(folder / "none")]
    for each in wrong:
        with pytest.raises(MagnetarError):
            read_token(each)
