"""The kinds of output: every one has the same records; what a program reads has one document and no other text."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import pytest

from magnetar.cli.common.output import (
    OUTPUT_KINDS,
    CommandOutput,
    PrintedMessage,
    list_names_in_document,
    print_consumed_message,
    print_repeatedly,
)
from magnetar.cli.common.units import Interval
from magnetar.proto.errors import TopicNotFound, Unavailable
from tests.cli.test_conventions import LEAVES
from tests.support.processes import Result, heed_sigint

Cli = Callable[..., Result]
ROWS = [
    {"topic": "yes", "size": 12_345, "more": "x", "deep": {"a": 1}},
    {"topic": "b", "size": 1, "more": None, "deep": {}},
]
COLUMNS = ("topic", "size")


def _printed(capsys: pytest.CaptureFixture[str], kind: str, method: str, *values: Any, **options: Any) -> str:
    getattr(CommandOutput(kind), method)(*values, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("method", ["print_rows", "print_row_stream"])
def test_rows_are_the_same_records_in_every_kind(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    assert json.loads(_printed(capsys, "json", method, ROWS, COLUMNS)) == ROWS
    assert [json.loads(line) for line in _printed(capsys, "jsonl", method, ROWS, COLUMNS).splitlines()] == ROWS
    assert yaml.safe_load(_printed(capsys, "yaml", method, ROWS, COLUMNS)) == ROWS
    assert _printed(capsys, "name", method, ROWS, COLUMNS) == "yes\nb\n"
    assert "12,345" in _printed(capsys, "table", method, ROWS, COLUMNS)
    assert "more" not in _printed(capsys, "table", method, ROWS, COLUMNS)


@pytest.mark.parametrize("kind", ["table", "json"])
@pytest.mark.parametrize("method", ["print_rows", "print_row_stream", "print_record"])
def test_a_table_shows_a_time_that_is_a_number_elsewhere(
    method: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"expires_ms": 1_798_574_323_000, "createdMs": 0}
    given = (row,) if method == "print_record" else ([row], tuple(row))
    printed = _printed(capsys, kind, method, *given)
    if kind == "json":
        assert json.loads(printed) in (row, [row])
    else:
        assert "2026-12-29T19:58:43.000Z" in printed
        assert printed.split()[-1] == "-"


@pytest.mark.parametrize("method", ["print_rows", "print_row_stream"])
def test_no_rows_are_an_empty_document(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {kind: _printed(capsys, kind, method, [], COLUMNS, empty="no topics") for kind in OUTPUT_KINDS}
    assert found == {
        "table": "(no topics)\n", "wide": "(no topics)\n", "json": "[]\n", "jsonl": "", "yaml": "[]\n", "name": ""
    }  # fmt: skip


def test_a_wide_table_has_the_other_fields_that_fit_into_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    head = _printed(capsys, "wide", "print_rows", ROWS, COLUMNS).splitlines()[0].split()
    assert head == ["topic", "size", "more"]


def test_the_names_of_a_document() -> None:
    assert list(list_names_in_document(["a", "b"])) == ["a", "b"]
    assert list(list_names_in_document(ROWS)) == ["yes", "b"]
    assert list(list_names_in_document({"topic": "a", "n": 1})) == ["a"]
    assert list(list_names_in_document({"billing": {"n": 1}, "audit": {"n": 2}})) == ["billing", "audit"]
    assert list(list_names_in_document({})) == list(list_names_in_document([])) == []


def test_what_is_done_is_a_document_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    done = {
        kind: _printed(capsys, kind, "print_result_text", "topic a made", topic="a", partitions=2)
        for kind in OUTPUT_KINDS
    }
    assert done["table"] == done["wide"] == "topic a made\n"
    assert (
        json.loads(done["json"]) == json.loads(done["jsonl"]) == {"done": "topic a made", "topic": "a", "partitions": 2}
    )
    assert done["yaml"] == "done: topic a made\ntopic: a\npartitions: 2\n"
    assert done["name"] == "a\n"


# ---------------------------------------------------------------------------------- of commands
@pytest.mark.processes
def test_a_command_answers_in_each_kind(cli: Cli) -> None:
    yaml = pytest.importorskip("yaml")
    cli("topics", "create", "kinds", "-p", "2")
    name = "persistent://public/default/kinds"
    for command, first in (
        (("topics", "list"), name), (("topics", "stats", "kinds"), name),
        (("topics", "offsets", "kinds"), f"{name}-partition-0"),
        (("topics", "stats-internal", "kinds"), f"{name}-partition-0"), (("namespaces", "list"), "public/default"),
        (("topics", "get-partitioned-topic-metadata", "kinds"), name), (("tenants", "list"), "public"),
    ):  # fmt: skip
        document = json.loads(cli(*command, "-o", "json").out)
        assert yaml.safe_load(cli(*command, "-o", "yaml").out) == document
        lines = [json.loads(line) for line in cli(*command, "-o", "jsonl").out.splitlines()]
        assert lines == (document if isinstance(document, list) else [document])
        assert first in cli(*command, "-o", "name").out.splitlines(), command
    cli("produce", "kinds", "-m", "x: yes", "-k", "k")
    for kind in ("json", "jsonl"):
        assert json.loads(cli("consume", "kinds", "-n", "1", "-o", kind).out)["payload"] == "x: yes"
    assert yaml.safe_load(cli("consume", "kinds", "-n", "1", "-o", "yaml").out)[0]["payload"] == "x: yes"
    assert cli("consume", "kinds", "-n", "1", "-o", "name").out.count(":") == 3
    assert json.loads(cli("topics", "stats", "ghost", "-o", "jsonl", code=4).err)["error"] == "TopicNotFound"


# ---------------------------------------------------------------------------------- watch
def test_what_changes_something_has_no_watch() -> None:
    watching = {
        " ".join(path) for path, each in LEAVES.items() if any("--watch" in option.opts for option in each.params)
    }
    asking = {" ".join(path) for path, each in LEAVES.items() if any("--yes" in option.opts for option in each.params)}
    acts = ("create", "delete", "update", "set", "remove", "skip", "reset", "unload", "abort", "revive", "grant")
    assert {"topics list", "topics stats", "brokers list", "bookies list", "ledgers list", "repair status"} <= watching
    assert {"status", "doctor"} <= watching
    assert not watching & asking
    assert not [each for each in watching if set(each.replace("-", " ").split()) & set(acts)]


class _Enough(Exception):
    pass


def test_an_answer_is_printed_again_and_a_server_that_is_away_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    turns = iter([None, Unavailable("away"), None, TopicNotFound("gone")])

    def answer() -> None:
        print("half")
        if (error := next(turns)) is not None:
            raise error

    with pytest.raises(TopicNotFound):
        print_repeatedly(CommandOutput("table"), 2.0, answer)
    said = capsys.readouterr()
    assert said.out == "half\n\nhalf\n", "and half an answer is never shown"
    assert said.err == "magnetar: away\n"
    assert slept == [2.0] * 3


def test_an_answer_with_an_exit_code_is_printed_whole_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter(range(2))

    def answer() -> None:
        if next(turns, None) is None:
            raise _Enough
        print("an alarm")
        sys.exit(1)

    with pytest.raises(_Enough):
        print_repeatedly(CommandOutput("table"), 0.0, answer)
    assert capsys.readouterr().out == "an alarm\n\nan alarm\n"


@pytest.mark.parametrize(
    ("kind", "between"), [("table", "\n"), ("json", ""), ("jsonl", ""), ("yaml", "---\n"), ("name", "")]
)
def test_answers_follow_each_other_in_a_pipe(kind: str, between: str, capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter(range(2))

    def answer() -> None:
        if next(turns, None) is None:
            raise _Enough
        print("x")

    with pytest.raises(_Enough):
        print_repeatedly(CommandOutput(kind), 0.0, answer)
    assert capsys.readouterr().out == f"x\n{between}x\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2.0), ("500ms", 0.5), ("1m", 60.0), ("1h", 3600.0), ("3", 3.0), ("0.5", 0.5), ("1.5s", 1.5)],
)
def test_a_time_between_answers(text: str, seconds: float) -> None:
    assert Interval().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1y", "s", "nan", "1e3", "50ms", "2 s s"])
def test_what_is_no_time_between_answers(text: str) -> None:
    with pytest.raises(click.UsageError):
        Interval().convert(text, None, None)


@pytest.mark.processes
def test_a_table_is_drawn_again_on_a_terminal_until_ctrl_c(url: str) -> None:
    heed_sigint()
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "magnetar", "brokers", "list", "-w", "200ms"],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=subprocess.PIPE,
        env={**os.environ, "MAGNETAR_URL": url, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(follower)
    try:
        seen, until = b"", time.monotonic() + 60
        while seen.count(b"\x1b[2J") < 3 and time.monotonic() < until:
            seen += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                if not (more := os.read(leader, 65536)):
                    break
            except OSError:
                break
            seen += more
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert (process.returncode, said) == (130, b"")
    assert seen.count(b"\x1b[H\x1b[2J") >= 3
    assert b"endpoint" in seen
    assert b"\x1b[3" not in seen, "NO_COLOR"


# ---------------------------------------------------------------------------------- messages
def test_a_wide_message_has_its_id_time_key_and_properties_before_its_payload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = PrintedMessage("t", "17:3:-1:0", "customer-7", {"REDRIVEN": "1"}, 1_700_000_000_123, 0, b"paid")
    print_consumed_message(message, CommandOutput("wide"))
    print_consumed_message(replace(message, key="", properties={}, publish_time_ms=1 << 63), CommandOutput("wide"))
    print_consumed_message(message, CommandOutput("table"))
    assert capsys.readouterr().out.splitlines() == [
        "17:3:-1:0  2023-11-14T22:13:20.123Z  key=customer-7  REDRIVEN=1  paid",
        f"17:3:-1:0  {1 << 63}  paid",
        "paid",
    ]


@pytest.mark.processes
def test_a_message_that_is_looked_up_is_wide_too(cli: Cli) -> None:
    cli("produce", "looked-up", "-m", "paid", "-k", "customer-7")
    wide = cli("topics", "examine-messages", "looked-up", "-o", "wide").out
    id_, time_, key, payload = wide.split()
    assert (key, payload, time_[:2]) == ("key=customer-7", "paid", "20")
    ledger, entry = id_.split(":")[:2]
    assert cli("topics", "get-message-by-id", "looked-up", "-l", ledger, "-e", entry, "-o", "wide").out == wide
