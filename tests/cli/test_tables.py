"""A table on a pipe: lines as long as they are, whatever is in them, and soon also with very many rows."""

from __future__ import annotations

import pytest

from magnetar.cli.common.output import CommandOutput


def test_a_table_on_a_pipe_shows_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a:-1:0:-1", "size": 5}, {"name": "two\nlines [red]x[/red]", "size": 12_345}]
    CommandOutput("table").print_rows(rows, ("name", "size", "note"), empty="nothing")
    assert capsys.readouterr().out.splitlines() == [
        "name                       size   note",
        "─" * 38,
        "a:-1:0:-1                     5   -   ",
        "two lines [red]x[/red]   12,345   -   ",
    ]
    CommandOutput("table").print_rows([], ("name",), empty="nothing")
    assert capsys.readouterr().out == "(nothing)\n"


@pytest.mark.parametrize("method", ["print_rows", "print_row_stream"])
def test_what_a_terminal_would_obey_is_escaped(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients choose names and properties."""
    row = {"consumer": "\x1b[2J\x1b]0;title\x07", "properties": {"k\r": "\u202egnp.exe"}}
    getattr(CommandOutput("table"), method)([row], ("consumer", "properties"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split(maxsplit=1) == [r"\x1b[2J\x1b]0;title\x07", r"k\r \u202egnp.exe"]
