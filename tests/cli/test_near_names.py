"""Errors and shells know the names of a server: what was meant, what may come; as the caller, soon, or not at all."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.cli.common import session
from tests.support.processes import Result, run_here
from tests.support.steps import stopwatch

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]


@pytest.fixture
def shop(cli: Cli) -> None:
    if "shop" in cli("tenants", "list").out:
        return
    cli("tenants", "create", "shop")
    cli("namespaces", "create", "shop/sales")
    cli("topics", "create", "shop/sales/orders")
    cli("topics", "create", "shop/sales/returns", "-p", "2")
    cli("topics", "create", "basket")
    for topic in ("orders", "returns"):
        cli("subscriptions", "create", f"shop/sales/{topic}", "-s", "billing")


# ---------------------------------------------------------------------------------------------------- near names
@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (("topics", "stats", "baskt"), "basket"),
        (("topics", "stats", "shop/sales/ordrs"), "shop/sales/orders"),
        (("topics", "stats", "persistent://shop/sales/ordrs"), "persistent://shop/sales/orders"),
        (("topics", "delete", "shop/sales/return", "-y"), "shop/sales/returns"),
        (("topics", "list", "shop/sale"), "shop/sales"),
        (("namespaces", "policies", "shop/slaes"), "shop/sales"),
        (("topics", "create", "shop/slaes/new"), "shop/sales"),
        (("tenants", "get", "shpo"), "shop"),
        (("namespaces", "list", "shpo"), "shop"),
        (("subscriptions", "stats", "shop/sales/orders", "-s", "biling"), "billing"),
        (("subscriptions", "delete", "shop/sales/returns", "-s", "biling", "-y"), "billing"),
        (("topics", "skip", "shop/sales/orders", "-s", "biling", "-n", "1", "-y"), "billing"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else each,
)
def test_what_is_not_found_is_told_with_the_nearest_name(
    command: tuple[str, ...], meant: str, cli: Cli, shop: None
) -> None:
    assert cli(*command, code=4).err.endswith(f"; did you mean '{meant}'?\n"), "a question ends the sentence"


def test_a_name_that_is_far_from_all_is_told_alone(cli: Cli, shop: None) -> None:
    assert "did you mean" not in cli("topics", "stats", "zzz", code=4).err
    assert "did you mean" not in cli("topics", "stats", "shop/sales/zzzzz", code=4).err, "what is before it is no name"


def test_a_list_that_fails_leaves_the_error_as_it_is(
    url: str, monkeypatch: pytest.MonkeyPatch, cli: Cli, shop: None
) -> None:
    from magnetar.client.admin import Admin
    from magnetar.proto.errors import Unauthorized

    def refuse(*_: object, **__: object) -> None:
        raise Unauthorized("not for you")

    monkeypatch.setattr(Admin, "topics", refuse)
    done = run_here("topics", "stats", "baskt", MAGNETAR_URL=url)
    assert done.code == 4
    assert "did you mean" not in done.err
    assert "not for you" not in done.err


@pytest.mark.parametrize(
    ("command", "meant"),
    [(("topic", "list"), "'topics'"), (("topics", "stast", "x"), "'stats'"),
     (("topics", "stats", "x", "--per-part"), "--per-partition"),
     (("consume", "x", "--subscriptoin", "s"), "--subscription")],
)  # fmt: skip
def test_unknown_verbs_and_options_are_told_with_the_nearest(command: tuple[str, ...], meant: str) -> None:
    done = run_here(*command)
    assert done.code == 2
    assert meant in done.err


# ---------------------------------------------------------------------------------------------------- completion
def _complete(*words: str, **environment: str) -> list[str]:
    """What a bash is told for a line whose last word is not ended."""
    line = {"COMP_WORDS": " ".join(("magnetar", *words)), "COMP_CWORD": str(len(words)), **environment}
    done = run_here(_MAGNETAR_COMPLETE="bash_complete", **line)
    assert (done.code, done.err) == (0, "")
    return [line.partition(",")[2] for line in done.out.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("topics", "sta"), ["stats", "stats-internal"]),
        (("topics", "stats", "--per"), ["--per-partition"]),
        (("topics", "stats", "bask"), ["basket"]),
        (("topics", "stats", "shop"), ["shop/"]),
        (("topics", "stats", "shop/s"), ["shop/sales/"]),
        (("topics", "stats", "shop/sales/o"), ["shop/sales/orders"]),
        (("topics", "stats", "persistent://shop/sales/o"), ["persistent://shop/sales/orders"]),
        (("topics", "unload", "shop/sales/r"), ["shop/sales/returns"]),
        (("namespaces", "stats", "shop/"), ["shop/sales"]),
        (("namespaces", "list", "shop"), ["shop"]),
        (("consume", "shop/sales/o"), ["shop/sales/orders"]),
        (("consume", "shop/sales/orders", "-s", "b"), ["billing"]),
        (("subscriptions", "stats", "shop/sales/returns", "-s", "b"), ["billing"]),
        (("topics", "trim", "ghost/x/y"), []),
    ],
    ids=lambda each: " ".join(each),
)
def test_a_shell_is_told_what_may_come(words: tuple[str, ...], found: list[str], url: str, shop: None) -> None:
    assert _complete(*words, MAGNETAR_URL=url) == found


def test_contexts_are_completed(tmp_path: Path) -> None:
    from tests.security.test_settings import private

    (tmp_path / "magnetar").mkdir()
    private(
        tmp_path / "magnetar" / "client.toml",
        b'current = "prod"\n[prod]\nurl = "magnetar://h:1"\n[other]\nurl = "magnetar://h:2"\n',
    )
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert _complete("context", "use", "p", **home) == ["prod"]
    assert _complete("topics", "list", "--context", "", **home) == ["prod", "other"]
    assert _complete("--context", "o", **home) == ["other"]


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"magnetar://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_does_not_answer_is_soon_given_up_without_a_word(silent: str) -> None:
    with stopwatch() as without:
        assert _complete("topics", "--help", MAGNETAR_URL=silent) is not None
    with stopwatch() as seconds:
        assert _complete("topics", "stats", "o", MAGNETAR_URL=silent) == []
    assert seconds() < without() + 4 * session.NAMES_TIMEOUT_S, "and not the 30 s of a command"


@pytest.mark.parametrize("words", [("no", "such", ""), ("topics", "stats", "x", "y", "")])
def test_a_line_that_is_wrong_is_completed_by_nothing(words: tuple[str, ...], url: str) -> None:
    assert _complete(*words, MAGNETAR_URL=url) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_its_completion(shell: str, tmp_path: Path) -> None:
    done = run_here("completion", shell)
    assert done.code == 0
    assert "_MAGNETAR_COMPLETE" in done.out
    if (program := shutil.which(shell)) is not None:
        script = tmp_path / "script"
        script.write_text(done.out)
        subprocess.run([program, "-n", str(script)], check=True, timeout=30)
