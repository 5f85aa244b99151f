"""Users and passwords: files of htpasswd, what is refused, and what guessing costs."""

import asyncio
import base64
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidConfiguration, Unauthenticated, Unavailable
from magnetar.proto.names import is_valid_role
from magnetar.runtime.access import Caller, Principal, PrincipalKind
from magnetar.runtime.tasks import SystemWorker, SystemWorkers
from magnetar.security import basic
from magnetar.security.basic import BasicProvider
from magnetar.security.settings import BasicSection
from tests.security.test_settings import authenticator, private
from tests.security.test_token import Clock

BCRYPT = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
APR1 = "$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/"  # of Apache's manual: myPassword
SHA = "{SHA}VBPuJHI7uixaa6LQGWx4s+5GKNE="  # of Apache's manual: myPassword
FILE = f"# users\n\nada:{BCRYPT}\nbob:{APR1}\r\neve:{SHA}\n".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return private(tmp_path / "users.htpasswd", FILE)


def provider(path: Path, clock: Clock | None = None) -> BasicProvider:
    return BasicProvider(BasicSection(str(path)), clock or Clock(), SystemWorkers())


def credentials(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def caller(address: str = "10.0.0.1", *, encrypted: bool = True) -> Caller:
    return Caller(f"{address}:5", is_encrypted=encrypted)


async def login(of: BasicProvider, user: str, password: str, address: str = "10.0.0.1") -> Principal:
    return await of.authenticate(credentials(user, password), caller(address))


# ---------------------------------------------------------------------------------- files
def test_the_three_hashes_of_htpasswd_match_their_password_and_no_other() -> None:
    users = basic.parse_htpasswd(FILE)
    assert list(users) == ["ada", "bob", "eve"]
    for user, password in (("ada", b"secret"), ("bob", b"myPassword"), ("eve", b"myPassword")):
        assert basic.matches_password(password, users[user])
        for wrong in (b"", password + b"x", password[:-1], password.upper()):
            assert not basic.matches_password(wrong, users[user])


@pytest.mark.parametrize(
    ("password", "salt", "hashed"),
    [
        (b"", b"abcdefgh", "$apr1$abcdefgh$L.PT565ESX4Tp2bqNs7Ie."),
        (b"x" * 100, b"ab", "$apr1$ab$fJbkU2xnhI6N1bBb8S9kI1"),
    ],
)
def test_apr1_is_that_of_openssl(password: bytes, salt: bytes, hashed: str) -> None:
    assert basic.hash_apr1(password, salt) == hashed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ada:rqXexS6ZhobKA", "DES"),
        ("ada:$6$abc$def", "htpasswd -B"),
        ("ada:plain", "htpasswd -B"),
        ("ada:", "htpasswd -B"),
        ("ada", "USER:HASH"),
        (f":{SHA}", "USER:HASH"),
        (f" ada:{SHA}", "USER:HASH"),
        (f"a\0:{SHA}", "USER:HASH"),
        (f"ada:{SHA}:x", "htpasswd -B"),
        (f"ada:{SHA}\nada:{SHA}", "line 2 .* earlier"),
        ("ada:$2y$31$" + "a" * 53, "cost"),
        ("ada:$2y$03$" + "a" * 53, "cost"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_not_quoted(line: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words) as found:
        basic.parse_htpasswd(line.encode())
    assert "rqXexS6ZhobKA" not in str(found.value)


def test_a_file_that_others_may_read_is_refused_with_the_command_that_mends_it(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(InvalidConfiguration, match=f"chmod 600 {path}"):
        provider(path)


LINES = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.builds("{}:{}".format, st.text(max_size=5), st.sampled_from([BCRYPT, APR1, SHA, "$apr1$$", "{SHA}", "$2"])),
    ),
    max_size=5,
).map("\n".join)


@settings(max_examples=1000)
@given(st.one_of(LINES.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=60)))
def test_any_file_gives_roles_with_hashes_that_can_be_compared_or_is_refused(text: bytes) -> None:
    try:
        users = basic.parse_htpasswd(text)
    except InvalidConfiguration:
        return
    for user, hashed in users.items():
        assert is_valid_role(user)
        assert not basic.matches_password(b"no password of these", hashed)


# ---------------------------------------------------------------------------------- logins
async def test_a_right_password_names_the_user_and_a_wrong_one_is_refused_like_an_unknown_user(path: Path) -> None:
    ours = provider(path)
    assert await login(ours, "ada", "secret") == Principal("ada", PrincipalKind.CLIENT, "basic")
    texts = set()
    for user, password in (("ada", "Secret"), ("nobody", "secret"), ("", "secret"), ("ada", "")):
        with pytest.raises(Unauthenticated) as found:
            await login(ours, user, password)
        texts.add(str(found.value))
    assert texts == {"the user or the password is wrong"}


async def test_an_unknown_user_costs_the_same_work_as_a_known_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(path, f"ada:{BCRYPT}\nbob:{BCRYPT}\n".encode())
    ours, compared = provider(path), []
    monkeypatch.setattr(bcrypt, "checkpw", lambda password, hashed: compared.append(hashed) or False)
    for user in ("ada", "unknown", "unknown", "another"):
        with pytest.raises(Unauthenticated):
            await login(ours, user, "wrong", f"10.0.0.{len(compared)}")
    assert compared == [BCRYPT.encode()] * 4


@pytest.mark.parametrize(
    "text", ["", "!", "ada", base64.b64encode(b"ada").decode(), base64.b64encode(b"a:\0").decode(), "x" * 3000,
             base64.b64encode(b"\xff:x").decode(), "ä"],
)  # fmt: skip
async def test_what_is_no_user_and_password_is_refused_and_not_quoted(path: Path, text: str) -> None:
    with pytest.raises(Unauthenticated) as found:
        await provider(path).authenticate(text, caller())
    assert len(text) < 3 or text not in str(found.value)


def test_a_password_may_have_colons() -> None:
    assert basic.parse_basic_credentials(credentials("ada", "p:w:")) == ("ada", b"p:w:")


async def test_passwords_in_clear_are_taken_of_this_machine_only(path: Path) -> None:
    ours, good = provider(path), credentials("ada", "secret")
    for address in ("127.0.0.1", "[::1]"):
        assert (await ours.authenticate(good, caller(address, encrypted=False))).name == "ada"
    for address in ("10.0.0.1", "[2001:db8::1]", "localhost", ""):
        with pytest.raises(Unauthenticated, match=r"magnetar\+ssl"):
            await ours.authenticate(good, caller(address, encrypted=False))


async def test_a_success_is_remembered_five_minutes_and_until_the_file_changes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, compared = Clock(), []
    ours, right = provider(path, clock), basic.matches_password

    def counted(password: bytes, hashed: str) -> bool:
        compared.append(hashed)
        return right(password, hashed)

    monkeypatch.setattr(basic, "matches_password", counted)
    for _ in range(3):
        await login(ours, "ada", "secret")
    assert len(compared) == 1
    with pytest.raises(Unauthenticated):
        await login(ours, "ada", "secreT")
    clock.now_ms += 301_000
    await login(ours, "ada", "secret")
    assert len(compared) == 3
    private(path.parent / "new", f"ada:{SHA}\n".encode())
    os.replace(path.parent / "new", path)
    clock.now_ms += 11_000
    with pytest.raises(Unauthenticated):
        await login(ours, "ada", "secret")
    assert (await login(ours, "ada", "myPassword")).name == "ada"
    private(path, b"no line of a user")
    clock.now_ms += 11_000
    assert (await login(ours, "ada", "myPassword")).name == "ada", "a file that cannot be used is not"


async def test_after_five_failures_an_address_and_a_user_wait(path: Path) -> None:
    clock = Clock()
    ours = provider(path, clock)
    for number in range(5):
        with pytest.raises(Unauthenticated, match="is wrong"):
            await login(ours, f"user{number}", "guess", "10.0.0.9")
        with pytest.raises(Unauthenticated, match="is wrong"):
            await login(ours, "eve", "guess", f"10.0.1.{number}")
    for user, address in (("ada", "10.0.0.9"), ("eve", "10.0.2.1")):
        with pytest.raises(Unauthenticated, match="wait 1 s"):
            await login(ours, user, "secret", address)
    assert (await login(ours, "ada", "secret", "10.0.2.1")).name == "ada"
    clock.now_ms += 1000
    assert (await login(ours, "eve", "myPassword", "10.0.2.1")).name == "eve"


async def test_two_passwords_are_compared_at_once_a_hundred_wait_and_a_caller_that_leaves_frees_no_worker(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, running, most = threading.Event(), set[int](), []

    def slow(users: Mapping[str, str], key: bytes, user: str, password: bytes) -> bool:
        running.add(threading.get_ident())
        most.append(len(running))
        gate.wait(20)
        running.discard(threading.get_ident())
        return True

    given: list[Any] = []
    run = SystemWorker.run
    monkeypatch.setattr(SystemWorker, "run", lambda self, *call: given.append(call) or run(self, *call))
    monkeypatch.setattr(basic, "_verify", slow)
    ours = provider(path)
    for _ in range(5):
        ours._guessing.record_failure("user guessed", ours._clock.monotonic())
    tasks = [asyncio.ensure_future(login(ours, f"u{number}", "x")) for number in range(102)]
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match="wait for their turn"):
        await login(ours, "late", "x")
    with pytest.raises(Unauthenticated, match="wait 1 s"):
        await login(ours, "guessed", "x")
    for task in tasks[:2]:
        task.cancel()
    await asyncio.sleep(0.1)
    assert len(given) == 2
    gate.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(each, Principal) for each in done) == 100
    assert max(most) == 2


async def test_the_guard_takes_the_header_and_the_password_is_in_no_repr_of_it(path: Path) -> None:
    private(path.parent / "broker.token", b"x.y.z")
    text = '[basic]\nfile = "users.htpasswd"\n[broker]\ntoken = "broker.token"\n'
    guard = authenticator(path.parent, text)
    header = "Basic " + credentials("ada", "secret")
    asked = Caller("1.2.3.4:5", header, is_encrypted=True)
    assert (await guard.authenticate(asked)).name == "ada"
    assert credentials("ada", "secret") not in repr(asked)
    with pytest.raises(Unauthenticated, match="bring a user and password"):
        await guard.authenticate(Caller("1.2.3.4:5", "Bearer a.b.c", is_encrypted=True))
