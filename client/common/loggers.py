"""The log of a client: the logger `magnetar.client` of Python's logging, and the logger that a program passes as
`Client(logger=…)`. Also the handling of unforeseen errors (`run_logging_errors`, `report_failure`) and of errors of the
application's code (`log_foreign_error`, `reraise_interrupt`, `is_cancelled`), and the log of statistics
(`StatisticsReporter`).

A logger that a program passes gets the log messages of all clients of the process, until the client to which it was
passed is closed or garbage-collected."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Protocol
from weakref import ref

from .checks import WrongType, WrongValue, shorten_value
from .errors import ClientEnum

_OURS = logging.getLogger("magnetar.client")
_FORM = "%(asctime)s %(levelname)-5s [%(threadName)s] %(name)s | %(message)s"


class LoggerLevel(ClientEnum):
    """The levels of a ConsoleLogger or FileLogger: messages below the level are not logged."""

    Debug = 0
    Info = 1
    Warn = 2
    Error = 3

    @property
    def number(self) -> int:
        """Returns the number that Python's `logging` uses for this level."""
        return (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)[self]


class ConsoleLogger:
    """A logger that writes log lines of the level `log_level` or above to standard output. Raises InvalidConfiguration
    for another type of `log_level`."""

    def __init__(self, log_level: LoggerLevel = LoggerLevel.Info) -> None:
        self.log_level = _level(log_level)


class FileLogger:
    """A logger that appends log lines of the level `log_level` or above to the file `log_file`, which is opened when a
    client is made with the logger. Raises InvalidConfiguration for an argument of a wrong type."""

    def __init__(self, log_level: LoggerLevel, log_file: str) -> None:
        self.log_level = _level(log_level)
        if not isinstance(log_file, str):
            raise WrongType(f"log_file is the path of a file, not {shorten_value(log_file)}")
        self.log_file = log_file


def _level(level: LoggerLevel) -> LoggerLevel:
    if not isinstance(level, LoggerLevel):
        raise WrongType(f"log_level is a LoggerLevel, not {shorten_value(level)}")
    return level


class _Forward(logging.Handler):
    def __init__(self, to: logging.Logger) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        if self._to.isEnabledFor(record.levelno):
            self._to.handle(record)


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to `sys.stdout` as it is when a message is logged, because a program may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def check_logger(logger: object) -> None:
    """Raises WrongValue if `logger` is not one of the kinds of loggers that `Client(logger=…)` accepts: a
    logging.Logger, a ConsoleLogger, a FileLogger, or None."""
    if logger is not None and not isinstance(logger, logging.Logger | ConsoleLogger | FileLogger):
        raise WrongValue(f"logger is a logging.Logger, a ConsoleLogger or a FileLogger, not {shorten_value(logger)}")


def attach_logger(logger: object) -> Callable[[], None] | None:
    """Sends the log messages of all clients to `logger` from now on; lowers the level of the logger `magnetar.client`
    if that is above the level of `logger`. Returns a function that ends this; None if `logger` is None, or Python's
    logging passes the messages to it anyway. Raises OSError if the file of a FileLogger cannot be opened."""
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


# --------------------------------------------------------------------------------------------------------- guard
# No callback of the client fails in silence: the event loop calls each of them by `run_logging_errors`.
#
#     loop.call_soon(run_logging_errors, self._pump, self._broke)
#
# An unforeseen error is logged and given to `broke`, which gives every waiter an error: so no future stays without an
# outcome. Tasks do the same: they belong to a `Tasks(self._broke)` (runtime/tasks.py).
#
# **Foreign code** (callbacks, listeners, checks, key readers, schemas) may raise anything, also CancelledError,
# SystemExit and other BaseExceptions. What it raises is about itself: it is logged or told as that code's failure, and
# what comes after the call is done as if it had returned. Two are not the code's own: the cancellation of the task that
# awaits it (`is_cancelled`), and Ctrl-C, which ends the program once nothing is left half done (`log_foreign_error`).
# tests/client/blocking/test_guard.py breaks each callback and each task of the client in turn and looks at who waits;
# tests/client/common/test_foreign_code.py has each kind of foreign code raise each kind of exception.


_LOG = logging.getLogger("magnetar.client")

OnBroken = Callable[[Exception], object]


def run_logging_errors(work: Callable[[], object], broke: OnBroken) -> None:
    """Calls `work()`. If it raises, logs the error and calls `broke(error)`, as `report_failure` does."""
    try:
        work()
    except BaseException as error:
        report_failure(work, broke, error)


def report_failure(work: object, broke: OnBroken, error: BaseException) -> None:
    """Logs `error`, which the function `work` raised, and calls `broke(error)`, with a RuntimeError in place of an
    error that is no Exception. Raises KeyboardInterrupt and SystemExit again. Must be called in the `except` block of
    the error."""
    _LOG.exception("%s failed", getattr(work, "__qualname__", work))
    broke(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def log_foreign_error(error: BaseException, what: str) -> None:
    """Logs an error that code of the application (`what`, such as "a callback") raised in the event loop or in a thread
    of the client. In an event loop, KeyboardInterrupt is raised again soon after, outside of the caller."""
    _LOG.error("%s failed", what, exc_info=error)
    if isinstance(error, KeyboardInterrupt):
        try:
            asyncio.get_running_loop().call_soon(_raise_error, error)
        except RuntimeError:  # a thread without one: Ctrl-C comes to the main thread by itself
            return


def _raise_error(error: KeyboardInterrupt) -> None:
    raise error


def reraise_interrupt(error: BaseException) -> BaseException:
    """Raises `error` again if it is KeyboardInterrupt (Ctrl-C); otherwise returns it. For errors of a plain function of
    the application; for coroutine functions see `is_cancelled`."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error


def is_cancelled(error: BaseException) -> bool:
    """Returns whether `error`, which ended an `await` of the application's code, must be raised again: the awaiting
    task is cancelled or closed, or Ctrl-C was pressed. Returns False for a CancelledError that the code raised
    itself. Must be called in the event loop."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def ignore_error(_error: Exception) -> None:
    """Does nothing with the error: it was logged before, and no caller waits for it."""


# ------------------------------------------------------------------------------------------------------- reports
# Statistics of a client in the log, at an interval (`stats_interval_in_seconds`), as Pulsar's client writes them.
#
# A timer of the event loop, and no task: nothing can end silently. It knows the client weakly: one that is dropped
# without a close ends it. A failed report is logged, and the next one follows. Each number that rises is followed by
# its rate since the line before. Nothing is counted for a line: it shows counters that are there.


STATISTICS = {
    "stored_messages": (True, "messages that are stored"),
    "stored_bytes": (True, "bytes of their entries, compressed"),
    "failed_messages": (True, "messages that were refused or have no outcome in time"),
    "pending_messages": (False, "messages without an outcome"),
    "send_p50_us": (False, "half of the entries of the last minute or two were stored within so many microseconds"),
    "send_p95_us": (False, "… 95 % of them"),
    "send_p99_us": (False, "… 99 % of them"),
    "delivered_messages": (True, "messages that the client gave to the program, or will"),
    "delivered_bytes": (True, "bytes of the entries that came"),
    "waiting_messages": (False, "messages that the client has and the program has not"),
    "acknowledgements": (True, "messages that were acknowledged; a cumulative acknowledgement counts as one"),
    "negative_acknowledgements": (True, "messages that were negatively acknowledged"),
    "discarded_entries": (True, "malformed entries: `receive` raised ChecksumError, and they were acknowledged"),
    "filtered_messages": (True, "messages that came and that the filter does not want; the broker sends few of those"),
    "superseded_messages": (True, "with debounce: older messages of a key, which were acknowledged and not received"),
    "expired_messages": (True, "messages that expired while they waited here, and were acknowledged"),
    "hook_failures": (True, "calls of hooks that raised"),
    "partitions": (False, "partitions"),
}
"""Names of the statistics of producers and consumers → whether the number only rises, and what it is."""


class StatisticsSource(Protocol):
    """The interface of a client whose statistics a `StatisticsReporter` logs. `statistics` returns, by title, the
    numbers of each producer and consumer; their names are those of `STATISTICS`."""

    def statistics(self) -> dict[str, dict[str, int]]: ...


class StatisticsReporter:
    """Logs the statistics of one client every `interval_s` seconds, until `stop` is called or the client is
    garbage-collected."""

    def __init__(self, client: StatisticsSource, interval_s: float) -> None:
        """Starts the timer of the log. Must be called in the client's event loop. `interval_s` 0: nothing is logged."""
        self._client = ref(client)
        self._interval_s = interval_s
        self._before: dict[str, dict[str, int]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = (
            self._loop.call_later(interval_s, run_logging_errors, self._report, ignore_error) if interval_s else None
        )

    def _report(self) -> None:
        client = self._client()
        if client is None:
            return
        self._timer = self._loop.call_later(self._interval_s, run_logging_errors, self._report, ignore_error)
        try:
            found = client.statistics()
            for title, numbers in found.items():
                before = self._before.get(title, {})
                _LOG.info("%s: %s", title, ", ".join(self._describe(name, numbers, before) for name in numbers))
            self._before = found
        except Exception:
            _LOG.exception("the statistics of a client could not be told")

    def _describe(self, name: str, numbers: dict[str, int], before: dict[str, int]) -> str:
        """Returns a number as text; if it only rises, with its rate since the report before."""
        number, rises = numbers[name], STATISTICS[name][0]
        more = number - before.get(name, 0)
        return f"{name} {number}" + (f" ({more / self._interval_s:.3g}/s)" if rises and more > 0 else "")

    def stop(self) -> None:
        """Stops the timer of the log: nothing more is logged."""
        if self._timer is not None:
            self._timer.cancel()
