"""Contexts: they are the profiles of client.toml, and the file stays what a person wrote."""

import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from magnetar.cli.common import session as sessions
from magnetar.cli.common.profiles import load_context, load_profile
from magnetar.cli.common.session import confirm_deletion
from magnetar.cli.storage.admin_port import OperatorOptions, with_operator_options
from magnetar.cli.storage.metadata_copies import backup
from magnetar.proto.errors import InvalidConfiguration
from tests.cli.test_profile import Written, run, written
from tests.security.test_settings import private
from tests.support.processes import Result, run_here

__all__ = ["written"]
URL = "magnetar://[::1]:1"
OTHER = "magnetar+ssl://two:7650"
Context = Callable[..., Result]


@pytest.fixture
def context(tmp_path: Path, written: Written) -> Context:
    """Runs `magnetar context …` with a folder of its own; fails the test when its exit code is not the expected one."""

    def run_one(*arguments: str, code: int = 0, **options: Any) -> Result:
        done = run_here("context", *arguments, XDG_CONFIG_HOME=str(tmp_path), **options)
        assert done.code == code, done
        return done

    return run_one


def _file(tmp_path: Path) -> Path:
    return tmp_path / "magnetar" / "client.toml"


def test_a_context_says_who_an_operator_is_for_bookies_and_where_the_metadata_is(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONTEXT", "SECURITY", "METADATA"):
        monkeypatch.delenv(f"MAGNETAR_{name}", raising=False)
    own = str(tmp_path / "own.toml")
    context("add", "one", "--url", URL, "--security", own, "--metadata", "m:7640")
    context("add", "two", "--url", URL)
    shown = json.loads(context("show", "one", "-o", "json").out)
    assert (shown["security"], shown["metadata"]) == (own, "m:7640")
    assert load_profile("one") == {"url": URL}, "programs get what they know"

    def operator(*arguments: str) -> tuple[str | None, str]:
        found = list[OperatorOptions]()
        command = click.command()(with_operator_options(lambda session: found.append(session.operator)))
        command.main(arguments, standalone_mode=False)
        return found[0].security, found[0].metadata

    assert operator() == (None, "127.0.0.1:7640")
    assert operator("--context", "one") == (own, "m:7640")
    assert operator("--context", "one", "--metadata", "n:1") == (own, "n:1")
    monkeypatch.setenv("MAGNETAR_METADATA", "of-the-shell:1")
    assert operator() == (None, "of-the-shell:1")
    assert operator("--context", "one") == (own, "m:7640")
    assert operator("--context", "two") == (None, "127.0.0.1:7640"), "who names a context goes nowhere else"
    context("use", "one")
    assert operator() == (own, "of-the-shell:1")
    monkeypatch.delenv("MAGNETAR_METADATA")
    asked = list[str]()
    monkeypatch.setattr("magnetar.cli.run.servers.parse_metadata_address", lambda text: asked.append(text))
    CliRunner().invoke(backup, [])
    assert asked == ["m:7640"], "a backup is made where the context says"


def test_contexts_are_added_used_shown_and_deleted(context: Context, tmp_path: Path) -> None:
    assert "no contexts" in context("list").out
    context("add", "one", "--url", URL)
    assert stat.S_IMODE(_file(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(_file(tmp_path).parent.stat().st_mode) & 0o077 in (0, 0o055)
    context("add", "two", "--url", OTHER, "--tls-ca", "ca.pem", "--token", "env:TOKEN", "--use")
    assert load_profile("two") == {"url": OTHER, "tls_ca": str(Path("ca.pem").absolute()), "token": "env:TOKEN"}
    assert [row["context"] for row in json.loads(context("ls", "-o", "json").out) if row["current"]] == ["two"]
    assert context("ls", "-o", "name").out == "one\ntwo\n"
    assert json.loads(context("show", "-o", "json").out)["token"] == "env:TOKEN"
    context("use", "one")
    assert load_context("") == ("one", {"url": URL})
    context("use", "-")
    assert load_context("")[0] == "two"
    context("use", "-")
    assert load_context("")[0] == "one"
    assert "commands go to [default]" in context("rm", "one").out
    assert load_context("") == ("", {})
    assert "did you mean 'two'" in context("use", "tow", code=2).err
    context("use", "-", code=0)
    assert stat.S_IMODE(_file(tmp_path).stat().st_mode) == 0o600


def test_what_is_no_context_is_refused(context: Context) -> None:
    context("add", "one", "--url", URL)
    context("add", "one", "--url", URL, code=5)
    for wrong in ("current", "previous", "a.b", "-a", "a b", "", "x" * 65, "ä"):
        context("add", "--url", URL, "--", wrong, code=2)
    context("add", "two", code=2)
    context("add", "two", "--url", "nonsense://x", code=2)
    context("use", "-", code=2)
    for verb in ("use", "show", "delete"):
        context(verb, "ghost", code=2)


def test_a_secret_is_neither_taken_nor_shown(context: Context, written: Written) -> None:
    secret = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"
    for given in (secret, f"data:;base64,{secret}"):
        refused = context("add", "one", "--url", URL, "--token", given, code=2)
        assert secret not in refused.out + refused.err
    written(f'[one]\nurl = "{URL}"\ntoken = "{secret}"\n')
    for verb in (("show", "one"), ("show", "one", "-o", "json"), ("list", "-o", "json")):
        assert secret not in context(*verb).out


def test_the_file_keeps_its_comments_and_its_order(context: Context, written: Written) -> None:
    text = f"""# mine
[one]  # at home
url = "{URL}"

# of the firm
[two]
url = "{OTHER}"
# a token that lasts a day
token = "t"
"""
    path = written(text)
    context("use", "two")
    context("use", "one")
    context("add", "three", "--url", URL)
    found = path.read_text()
    assert found.startswith('current = "one"\nprevious = "two"\n')
    assert text.rstrip() in found
    context("delete", "three")
    context("delete", "two")
    left = path.read_text()
    assert "# mine\n[one]  # at home" in left
    assert "# of the firm" in left
    assert tomllib.loads(left) == {"current": "one", "one": {"url": URL}}
    context("delete", "one")
    assert tomllib.loads(path.read_text()) == {}


def test_what_cannot_be_changed_without_a_doubt_is_left_to_an_editor(context: Context, written: Written) -> None:
    text = f'one.url = "{URL}"\n[two]\nurl = """\n[one]\n"""\n'
    path = written(text)
    assert "context edit" in context("delete", "one", code=1).err
    assert path.read_text() == text


def test_a_link_to_the_file_stays_one(context: Context, tmp_path: Path) -> None:
    real = private(tmp_path / "mine.toml", b'[one]\nurl = "magnetar://[::1]:1"\n')
    _file(tmp_path).symlink_to(real)
    context("use", "one")
    assert _file(tmp_path).is_symlink()
    assert 'current = "one"' in real.read_text()


def test_an_option_beats_the_environment_that_beats_the_context_that_beats_the_default(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (run().url, run().context) == ("magnetar://127.0.0.1:7650", "")
    written('current = "two"\n[one]\nurl = "magnetar://[::1]:1"\n[two]\nurl = "magnetar://[::1]:2"\n')
    assert (run().url, run().context) == ("magnetar://[::1]:2", "two")
    monkeypatch.setenv("MAGNETAR_CONTEXT", "one")
    assert (run().url, run().context) == ("magnetar://[::1]:1", "one")
    monkeypatch.setenv("MAGNETAR_URL", "magnetar://[::1]:3")
    assert (run().url, run().context) == ("magnetar://[::1]:3", "")
    assert run("--context", "two").url == "magnetar://[::1]:2", "not where the variable says"
    assert run("--profile", "two").url == "magnetar://[::1]:2"
    assert run("--context", "two", "--url", "magnetar://[::1]:4").url == "magnetar://[::1]:4"


def test_programs_take_the_default_whatever_the_current_context_is(written: Written) -> None:
    """A query that starts again reads from the cluster that it read from, whatever somebody typed meanwhile."""
    written(
        'current = "two"\nprevious = "one"\n[default]\nurl = "magnetar://[::1]:1"\n[two]\nurl = "magnetar://[::1]:2"\n'
    )
    assert load_profile("") == {"url": "magnetar://[::1]:1"}
    for key in ("current", "previous"):
        with pytest.raises(InvalidConfiguration, match="no profile"):
            load_profile(key)


def test_what_deletes_asks_with_the_place_where_it_does(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    written('current = "prod"\n[prod]\nurl = "magnetar://[::1]:2"\n')
    asked: list[str] = []
    monkeypatch.setattr(sessions.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text))
    command = click.command()(sessions.with_session(lambda session: confirm_deletion("Delete it", False)))
    command.main([], standalone_mode=False)
    assert asked == ["Delete it, at magnetar://[::1]:2 (context prod)?"]


def test_an_editor_changes_the_file_and_what_it_wrote_is_checked(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf \'[one]\\nurl = "magnetar://h:1"\\n\' > "$1"\n')
    editor.chmod(0o755)
    context("edit", VISUAL=str(editor))
    assert load_profile("one") == {"url": "magnetar://h:1"}
    editor.write_text('#!/bin/sh\nprintf \'[one]\\npassword = "x"\\n\' > "$1"\n')
    assert "password" in context("edit", code=2, VISUAL=str(editor)).err
