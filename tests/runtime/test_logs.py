"""Logs as text and as JSON lines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime import logs


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """pytest has handlers of its own at a logger that tells its parents nothing: other tests would get lines twice."""
    loggers = [logging.getLogger(name) for name in (None, logs.AUDIT_LOGGER, "asyncio", "grpc")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def test_text_has_time_level_logger_message_and_facts() -> None:
    stream = io.StringIO()
    logs.configure_logging("text", "info", stream)
    logging.getLogger("magnetar.ledger").info("closed %s", "well", extra={"ledger": 7})
    logging.getLogger("magnetar.ledger").debug("not shown")
    time, rest = stream.getvalue().split(" ", 1)
    assert time.startswith("20")
    assert rest == "INFO    magnetar.ledger: closed well ledger=7\n"


def test_json_lines_parse_and_carry_facts_and_errors() -> None:
    stream = io.StringIO()
    logs.configure_logging("json", "warning", stream)
    try:
        raise OSError("disk full")
    except OSError:
        logging.getLogger("magnetar.journal").exception("cannot\nwrite", extra={"offset": 512, "path": b"x"})
    [line] = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["level"] == "error"
    assert record["logger"] == "magnetar.journal"
    assert record["message"] == "cannot\nwrite"
    assert (record["offset"], record["path"]) == (512, "b'x'")
    assert record["error"].endswith("OSError: disk full")
    assert record["time"].endswith("+00:00")


def test_unknown_formats_and_levels_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="xml"):
        logs.configure_logging("xml")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfiguration, match="loud"):
        logs.configure_logging("text", "loud")
