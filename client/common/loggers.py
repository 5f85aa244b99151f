"""The log of a client: Python's logging, under `magnetar.client`, and the logger that `Client(logger=…)` names.

A logger is of the process, not of a client: it gets what all clients log, until the one that named it is closed, or
collected.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from .checks import WrongType, WrongValue, shown
from .enums import ClientEnum

_OURS = logging.getLogger("magnetar.client")
_FORM = "%(asctime)s %(levelname)-5s [%(threadName)s] %(name)s | %(message)s"


class LoggerLevel(ClientEnum):
    """The level from which on a ConsoleLogger or FileLogger takes messages."""

    Debug = 0
    Info = 1
    Warn = 2
    Error = 3

    @property
    def number(self) -> int:
        """Returns the level of Python's logging."""
        return (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)[self]


class ConsoleLogger:
    """Logs to standard output."""

    def __init__(self, log_level: LoggerLevel = LoggerLevel.Info) -> None:
        self.log_level = _level(log_level)


class FileLogger:
    """Logs to a file, to which is appended."""

    def __init__(self, log_level: LoggerLevel, log_file: str) -> None:
        self.log_level = _level(log_level)
        if not isinstance(log_file, str):
            raise WrongType(f"log_file is the path of a file, not {shown(log_file)}")
        self.log_file = log_file


def _level(level: LoggerLevel) -> LoggerLevel:
    if not isinstance(level, LoggerLevel):
        raise WrongType(f"log_level is a LoggerLevel, not {shown(level)}")
    return level


class _Forward(logging.Handler):
    def __init__(self, to: logging.Logger) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        if self._to.isEnabledFor(record.levelno):
            self._to.handle(record)


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler for standard output, as it is when a message comes: a program may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def check_logger(logger: object) -> None:
    """Raises ValueError and InvalidConfiguration if it is no logger that a client takes."""
    if logger is not None and not isinstance(logger, logging.Logger | ConsoleLogger | FileLogger):
        raise WrongValue(f"logger is a logging.Logger, a ConsoleLogger or a FileLogger, not {shown(logger)}")


def attach(logger: object) -> Callable[[], None] | None:
    """Sends messages to the logger from now on; returns what ends that. OSError: the file cannot be opened."""
    if isinstance(logger, logging.Logger):
        if f"{_OURS.name}.".startswith(f"{logger.name}.") or logger is logging.getLogger():
            return None  # it gets them anyhow
        handler: logging.Handler = _Forward(logger)
        level = logger.getEffectiveLevel()
    elif isinstance(logger, ConsoleLogger | FileLogger):
        handler = _Console() if isinstance(logger, ConsoleLogger) else logging.FileHandler(logger.log_file)
        handler.setFormatter(logging.Formatter(_FORM))
        level = logger.log_level.number
        handler.setLevel(level)
    else:
        return None
    if _OURS.getEffectiveLevel() > level:
        _OURS.setLevel(level)
    _OURS.addHandler(handler)
    return lambda: _detach(handler)


def _detach(handler: logging.Handler) -> None:
    _OURS.removeHandler(handler)
    handler.close()
