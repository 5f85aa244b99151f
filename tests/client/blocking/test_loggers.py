"""What `Client(logger=…)` names gets what clients log, until it is closed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import magnetar
from magnetar import ConsoleLogger, FileLogger, LoggerLevel

URL = "magnetar://localhost:1"
OURS = logging.getLogger("magnetar.client")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def test_a_python_logger_gets_what_its_level_takes_until_the_client_is_closed() -> None:
    mine, kept = logging.Logger("mine", logging.INFO), Kept()
    mine.addHandler(kept)
    client = magnetar.Client(URL, logger=mine)
    OURS.debug("too fine")
    OURS.getChild("more").info("told")
    client.close()
    OURS.info("after")
    assert kept.lines == ["INFO told"]


def test_a_logger_that_gets_them_anyhow_gets_them_once() -> None:
    kept, parent = Kept(), logging.getLogger("magnetar")
    parent.addHandler(kept)
    try:
        with magnetar.Client(URL, logger=parent), magnetar.Client(URL, logger=OURS):
            OURS.warning("once")
    finally:
        parent.removeHandler(kept)
    assert kept.lines == ["WARNING once"]


def test_console_and_file_have_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    console, file = ConsoleLogger(LoggerLevel.Warn), FileLogger(LoggerLevel.Error, str(path))
    with magnetar.Client(URL, logger=console), magnetar.Client(URL, logger=file):
        OURS.info("fine")
        OURS.warning("warned")
        OURS.error("failed")
    told = capsys.readouterr().out
    assert [word in told for word in ("fine", "warned", "failed")] == [False, True, True]
    assert [word in path.read_text() for word in ("warned", "failed")] == [False, True]


@pytest.mark.parametrize("wrong", ["stdout", 1, logging.INFO, ConsoleLogger])
def test_what_is_no_logger_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="ConsoleLogger"):
        magnetar.Client(URL, logger=wrong)
    with pytest.raises(TypeError):
        ConsoleLogger("Info")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        FileLogger(LoggerLevel.Info, 3)  # type: ignore[arg-type]
