"""Profiles of the command line: where values come from, in which order, and which files are refused."""

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from magnetar.cli.common.profiles import load_profile
from magnetar.cli.common.session import CommandSession, with_session
from magnetar.proto.errors import InvalidConfiguration
from tests.security.test_settings import private

TEXT = """
[default]
url = "magnetar+ssl://one"
token = "one.token"
tls_ca = "ca.pem"
[other]
url = "magnetar+ssl://two"
tls_cert = "c.pem"
tls_key = "/elsewhere/k.pem"
"""
Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("URL", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY", "PROFILE"):
        monkeypatch.delenv(f"MAGNETAR_{name}", raising=False)
    (tmp_path / "magnetar").mkdir()
    return lambda text: private(tmp_path / "magnetar" / "client.toml", text.encode())


def run(*arguments: str) -> CommandSession:
    """The session of a command with these options."""
    found: list[CommandSession] = []
    command = click.command()(with_session(lambda session: found.append(session)))
    command.main(arguments, standalone_mode=False)
    return found[0]


def test_paths_are_relative_to_the_file_and_the_default_profile_is_used(written: Written) -> None:
    folder = written(TEXT).parent
    assert load_profile("") == {
        "url": "magnetar+ssl://one", "token": str(folder / "one.token"), "tls_ca": str(folder / "ca.pem")
    }  # fmt: skip
    assert load_profile("other")["tls_key"] == "/elsewhere/k.pem"


def test_without_a_file_there_is_no_profile_and_one_that_is_asked_for_is_missed(written: Written) -> None:
    assert load_profile("") == {}
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        load_profile("other")
    written("[other]\n")
    assert load_profile("") == {}
    with pytest.raises(InvalidConfiguration, match=r"no profile \[third\]; it has other"):
        load_profile("third")


def test_an_option_beats_the_environment_and_both_beat_the_profile(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run().url == "magnetar://127.0.0.1:7650"
    written('[default]\nurl = "magnetar://[::1]:1"\n[other]\nurl = "magnetar://[::1]:2"\n')
    assert run().url == "magnetar://[::1]:1"
    monkeypatch.setenv("MAGNETAR_PROFILE", "other")
    assert run().url == "magnetar://[::1]:2"
    assert run("--profile", "default").url == "magnetar://[::1]:1"
    monkeypatch.setenv("MAGNETAR_URL", "magnetar://[::1]:3")
    assert run().url == "magnetar://[::1]:3"
    assert run("--url", "magnetar://[::1]:4").url == "magnetar://[::1]:4"


def test_who_says_who_they_are_is_not_whom_the_profile_says(written: Written, tmp_path: Path) -> None:
    written(TEXT)
    key = private(tmp_path / "k.pem", b"k")
    assert repr(run()._authentication) == "AuthenticationToken()"
    assert repr(run("--tls-cert", "c.pem", "--tls-key", str(key))._authentication) == "AuthenticationTLS()"
    key.chmod(0o644)
    with pytest.raises(InvalidConfiguration, match=f"chmod 600 {key}"):
        run("--tls-cert", "c.pem", "--tls-key", str(key))


def test_a_token_itself_is_no_argument(written: Written) -> None:
    session = run("--token", "data:;base64,YS5iLmM=")
    assert session._authentication is not None
    with pytest.raises(InvalidConfiguration, match="never the token itself") as found:
        session._authentication.authorization()
    assert "YS5iLmM" not in str(found.value)


@pytest.mark.parametrize(
    "text",
    ["[", "default = 3\n", "[default]\npassword = 'x'\n", "[default]\nurl = 3\n", "\0", "[default.url]\n",
     "a = " + "[" * 5000],
)  # fmt: skip
def test_what_is_no_profile_is_refused(written: Written, text: str) -> None:
    written(text)
    with pytest.raises(InvalidConfiguration):
        load_profile("")
