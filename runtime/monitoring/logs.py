"""Logs: the standard library's `logging`, on stderr, as text or as JSON lines.

`configure` is called at the start of a process. Loggers are named `magnetar.<part>`. Facts are given in `extra`,
as names and values: `_LOG.info("ledger closed", extra={"ledger": 7})`; text shows `ledger=7`, JSON has members.
A JSON line has `time` (UTC, ISO 8601), `level`, `logger`, `message`, the facts, and `error` with the traceback.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Literal, TextIO

from ...proto.errors import InvalidConfiguration

Format = Literal["text", "json"]
AUDIT = "magnetar.audit"
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(
    format: Format = "text", level: str = "info", stream: TextIO | None = None, *, process: str = ""
) -> None:
    """Sends all logs of the process to `stream` (default stderr) and replaces the configuration before. `process`: its
    name, on each line, where several processes of one server write to the same stream (runtime/children/)."""
    if format not in ("text", "json"):
        raise InvalidConfiguration(f"log format {format!r} is unknown", setting="log_format", allowed="text, json")
    if level.lower() not in LEVELS:
        allowed = ", ".join(LEVELS)
        raise InvalidConfiguration(f"log level {level!r} is unknown; allowed: {allowed}", setting="log_level")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process) if format == "json" else TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    _audit_to(logging.StreamHandler(stream or sys.stderr))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc").setLevel(logging.ERROR)


def audit_to(path: str) -> None:
    """Writes the audit log to this file, with mode 0600; a file that is moved away is made anew. InvalidConfiguration.
    """
    from logging.handlers import WatchedFileHandler

    class PrivateFile(WatchedFileHandler):
        """A file that is its owner's alone, also when it is made anew after a rotation."""

        def _open(self) -> TextIOWrapper:
            descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            return TextIOWrapper(BufferedWriter(FileIO(descriptor, "a")), encoding=self.encoding)

    try:
        _audit_to(PrivateFile(path, encoding="utf-8"))
    except OSError as error:
        raise InvalidConfiguration(f"the audit log {path} cannot be written: {error.strerror}") from error


def _audit_to(handler: logging.Handler) -> None:
    """Sends the audit log to `handler`: its records are lines of JSON already, and no level of the log leaves them out.
    """
    handler.setFormatter(logging.Formatter("%(message)s"))
    audit = logging.getLogger(AUDIT)
    audit.handlers[:] = [handler]
    audit.setLevel(logging.INFO)
    audit.propagate = False


def facts(record: logging.LogRecord) -> dict[str, object]:
    """Returns the values of `extra`."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class TextLines(logging.Formatter):
    """Formats one line per record, with its facts at the end."""

    def __init__(self, process: str = "") -> None:
        whose = f"[{process}] " if process else ""
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {whose}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={value}" for name, value in facts(record).items())])


class JsonLines(logging.Formatter):
    """Formats one JSON object per record."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._whose = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._whose,
            "message": record.getMessage(),
            **facts(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
