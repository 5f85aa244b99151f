"""What loses messages of a subscription asks first, and says how many; a reset tells before what it would do."""

from collections.abc import Callable
from typing import Any

import click
import pytest

from magnetar.cli.common import session as sessions
from tests.support.processes import Result, run_here

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]
Json = Callable[..., Any]
NO_TERMINAL = "There is no terminal to ask at: give --yes"


class Refused(click.Abort):
    """The user answers no."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A terminal at which the user answers no; the questions."""
    found: list[str] = []

    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    class System:
        stdin = Terminal

    def confirm(text: str, **_: object) -> None:
        found.append(text.partition(", at magnetar://")[0])
        raise Refused

    monkeypatch.setattr(sessions, "sys", System)
    monkeypatch.setattr(click, "confirm", confirm)
    return found


def _make(cli: Cli, name: str) -> None:
    """A topic with 4 messages, of which subscription s has acknowledged 1."""
    cli("topics", "create", name)
    cli("topics", "create-subscription", name, "-s", "s", "-m", "earliest")
    cli("produce", name, "-m", "a", "-m", "b", "-m", "c", "-m", "d")
    cli("topics", "skip", name, "-s", "s", "-n", "1", "-y")


def _backlog(cli_json: Json, name: str) -> int:
    return int(cli_json("topics", "stats", name)["subscriptions"]["s"]["msgBacklog"])


LOSSY = (
    (("topics", "skip", "{}", "-s", "s", "-n", "2"), "Acknowledge the next 2 messages of subscription s"),
    (("subscriptions", "skip", "{}", "-s", "s", "-a"), "Acknowledge all messages of subscription s"),
    (("topics", "clear-backlog", "{}", "-s", "s"), "Acknowledge all messages of subscription s"),
    (("topics", "expire-messages", "{}", "-s", "s", "-m", "latest"),
     "Acknowledge the messages up to latest of subscription s"),
    (("topics", "expire-messages-all-subscriptions", "{}", "-t", "1s"),
     "Acknowledge the messages older than 1s of every subscription"),
)  # fmt: skip


@pytest.mark.parametrize(("words", "question"), LOSSY, ids=lambda each: each[1] if isinstance(each, tuple) else "")
def test_the_question_says_how_long_the_backlog_is(
    words: tuple[str, ...], question: str, cli: Cli, cli_json: Json, url: str, asked: list[str]
) -> None:
    name = f"lossy-{'-'.join(words[:2])}"
    _make(cli, name)
    done = run_here(*(word.format(name) for word in words), MAGNETAR_URL=url)
    assert done.code == 130, done
    assert asked == [f"{question} of persistent://public/default/{name} (the backlog has 3 messages)"]
    assert _backlog(cli_json, name) == 3


def test_a_reset_asks_when_it_passes_over_messages(cli: Cli, cli_json: Json, url: str, asked: list[str]) -> None:
    _make(cli, "moved")
    assert run_here("topics", "reset-cursor", "moved", "-s", "s", "-m", "latest", MAGNETAR_URL=url).code == 130
    topic = "persistent://public/default/moved"
    assert asked == [f"Move subscription s of {topic} to latest, past 3 messages not acknowledged"]
    for later in ("9999999999999", "2100-01-01T00:00"):
        assert run_here("subscriptions", "reset", "moved", "-s", "s", "-t", later, MAGNETAR_URL=url).code == 130
        assert asked.pop().endswith("past 3 messages not acknowledged")
    assert _backlog(cli_json, "moved") == 3


def test_a_reset_without_a_terminal_is_refused_only_when_it_passes_over_messages(cli: Cli, cli_json: Json) -> None:
    _make(cli, "unasked")
    reset = ("topics", "reset-cursor", "unasked", "-s", "s")
    refused = cli(*reset, "-m", "latest", code=2).err
    assert NO_TERMINAL in refused
    assert "3 messages" in refused
    place = cli_json("topics", "last-message-id", "unasked")[0]["lastMessageId"]
    assert NO_TERMINAL in cli(*reset, "-m", ":".join(place.split(":")[:2]), "-e", code=2).err, "the number is not known"
    assert _backlog(cli_json, "unasked") == 3
    cli(*reset, "-t", "1h")
    assert _backlog(cli_json, "unasked") == 4, "it moved back, and nothing was asked"
    cli(*reset, "-m", "latest", "-y")
    assert _backlog(cli_json, "unasked") == 0
    cli(*reset, "-m", ":".join(place.split(":")[:2]))
    assert _backlog(cli_json, "unasked") > 0
    cli("topics", "reset-cursor", "unasked", "-s", "none", "-m", "latest", code=4)
    assert cli_json("subscriptions", "list", "unasked") == ["s"], "and the question makes no subscription"


def test_a_dry_run_of_a_reset_says_what_it_would_do_and_does_nothing(cli: Cli, cli_json: Json) -> None:
    _make(cli, "previewed")
    reset = ("subscriptions", "reset", "previewed", "-s", "s", "--dry-run")
    topic = "persistent://public/default/previewed"
    row = {"topic": topic, "message_id": "earliest", "again": 1, "passed_over": 0, "exact": True}
    assert cli_json(*reset, "-m", "earliest") == [row]
    assert cli_json(*reset, "-m", "latest") == [{**row, "message_id": "latest", "again": 0, "passed_over": 3}]
    (found,) = cli_json(*reset, "-t", "1h")
    first = cli_json("topics", "get-message-id", "previewed", "-d", "1h")[0]["messageId"]
    assert found == {**row, "message_id": found["message_id"]}
    assert found["message_id"].startswith(first.rpartition(":")[0])
    (found,) = cli_json(*reset, "-m", "99:1")
    assert (found["message_id"], found["again"], found["passed_over"]) == ("99:1:-1:-1", None, None)
    cli("subscriptions", "reset", "previewed", "-s", "none", "-m", "latest", "--dry-run", code=4)
    assert _backlog(cli_json, "previewed") == 3
