"""The lists of ledgers say when they were cut, whatever the format of the output is."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from magnetar.cli.storage import ledgers

LEDGER = {
    "ledger": 7, "state": "open", "quorum": "3/2/2", "entries": None, "bytes": None, "fragments": 1, "bookies": ["b"],
    "owner": "",
}  # fmt: skip
MARK = {
    "ledger": 7, "missing": {"b": "lost"}, "sinceSeconds": 60, "reason": "lost", "attempts": 0, "retrySeconds": 0,
}  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, command: Any, answer: dict[str, Any], kind: str) -> Any:
    monkeypatch.setattr(ledgers, "ask_any_bookie", lambda *_, **__: answer)
    done = CliRunner().invoke(command, ["-o", kind], catch_exceptions=False)
    assert done.exit_code == 0
    return done


@pytest.mark.parametrize("kind", ["table", "json", "jsonl", "yaml", "name"])
@pytest.mark.parametrize("more", [True, False])
def test_a_list_of_ledgers_that_was_cut_says_where_it_goes_on(
    kind: str, more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(monkeypatch, ledgers.list_ledgers, {"ledgers": [LEDGER], "more": more}, kind)
    assert done.stderr == ("There are more: --after 7\n" if more else "")
    if kind == "json":
        assert json.loads(done.stdout) == [LEDGER]


@pytest.mark.parametrize("kind", ["table", "json", "jsonl", "yaml", "name"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_list_of_missing_copies_that_was_cut_says_how_many_there_are(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(monkeypatch, ledgers.under_replicated, {"ledgers": [MARK], "count": count}, kind)
    assert done.stderr == ("2 in all: --limit shows more\n" if count > 1 else "")
    if kind == "json":
        assert json.loads(done.stdout) == [MARK]
