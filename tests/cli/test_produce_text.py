"""`magnetar produce` with bytes on its command line that are no text."""

import pytest
from click.testing import CliRunner

from magnetar.cli.main import root


@pytest.mark.parametrize("option", ["-k", "-m", "-p"])
def test_bytes_of_the_command_line_that_are_not_utf8_are_a_wrong_use_and_reach_no_server(option: str) -> None:
    given = "a=\udcff" if option == "-p" else "\udcff"
    messages = [] if option == "-m" else ["-m", "x"]
    result = CliRunner().invoke(root, ["--url", "pulsar://127.0.0.1:1", "produce", "t", *messages, option, given])
    assert result.exit_code == 2, result.output
    assert "is not UTF-8" in result.output


def test_a_message_that_is_an_argument_is_answered_with_the_option() -> None:
    result = CliRunner().invoke(root, ["produce", "orders", "hi"])
    assert result.exit_code == 2, result.output
    assert "(hi): a message is given by -m MESSAGE" in result.output
