"""A table on a pipe: lines as long as they are, whatever is in them, and soon also with very many rows."""

from __future__ import annotations

import pytest

from magnetar.cli.common.output import CommandOutput, PrintedMessage, print_consumed_message
from magnetar.cli.produce import format_message
from magnetar.client.model.message_id import MessageId


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

class FakeMessage:
    """A message of the SDK, with the payload of `printed`."""

    def __init__(self, printed: PrintedMessage) -> None:
        self._printed = printed

    def topic_name(self) -> str:
        return self._printed.topic

    def message_id(self) -> MessageId:
        return MessageId(-1, 1, 2, -1)

    def partition_key(self) -> str:
        return ""

    def properties(self) -> dict[str, str]:
        return {}

    def publish_timestamp(self) -> int:
        return self._printed.publish_time_ms

    def redelivery_count(self) -> int:
        return 0

    def data(self) -> bytes:
        return self._printed.payload


@pytest.mark.parametrize(("is_terminal", "raw"), [(True, False), (True, True), (False, False)])
def test_a_payload_does_not_reach_a_terminal_with_what_it_would_obey(
    is_terminal: bool, raw: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a pipe and with --raw it goes as it is; tabs and line ends are kept anywhere."""
    hostile = "\x1b[2J\ta\r\u202e\n"
    message = PrintedMessage("t", "1:2", "", {}, 0, 0, hostile.encode())
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    shown = "\\x1b[2J\ta\\r\\u202e\n" if is_terminal and not raw else hostile
    print_consumed_message(message, CommandOutput("table"), raw=raw)
    assert capsys.readouterr().out == f"{shown}\n"
    found = FakeMessage(message)
    assert format_message("{data}\\r", found, raw=raw) == f"{shown}\r"  # type: ignore[arg-type]


@pytest.mark.parametrize(("time_ms", "shown"), [
    (1_760_000_000_123, "2025-10-09T08:53:20.123+00:00"), (1 << 62, str(1 << 62)),
])  # fmt: skip
def test_a_time_of_a_client_that_no_calendar_has_is_shown_as_its_number(time_ms: int, shown: str) -> None:
    found = FakeMessage(PrintedMessage("t", "1:2", "", {}, time_ms, 0, b""))
    assert format_message("{time}", found) == shown  # type: ignore[arg-type]
