"""Logs: the standard library's `logging`, on stderr, as text or as JSON lines.

`configure_logging` is called at the start of a process. Loggers are named `magnetar.<part>`. Facts are given in
`extra`, as names and values: `_LOG.info("ledger closed", extra={"ledger": 7})`; text shows `ledger=7`, JSON has
members. A JSON line has `time` (UTC, ISO 8601), `level`, `logger`, `message`, the facts, and `error` with the
traceback.

Also in this file, below its heading: the audit log (audit).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Literal, TextIO

from ..proto.errors import InvalidConfiguration
from .access import Caller, Principal, PrincipalKind
from .clock import Clock

LogFormat = Literal["text", "json"]
AUDIT_LOGGER = "magnetar.audit"
_CHANGES = logging.getLogger("magnetar.logs")
LOG_LEVELS = ("debug", "info", "warning", "error")

_configured = "info"
"""The level of `configure_logging`, which `set_level` goes back to."""

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(
    format: LogFormat = "text", level: str = "info", stream: TextIO | None = None, *, process: str = ""
) -> None:
    """Configures the logs of the process: all log records of `level` and above are written to `stream` (default:
    stderr), as text or JSON. The audit log is written there too. Replaces an earlier configuration. `process`: a name
    that each line contains, for a server of several processes that write to the same stream. Raises
    InvalidConfiguration if the format or the level is unknown."""
    if format not in ("text", "json"):
        raise InvalidConfiguration(f"log format {format!r} is unknown", setting="log_format", allowed="text, json")
    if level.lower() not in LOG_LEVELS:
        allowed = ", ".join(LOG_LEVELS)
        raise InvalidConfiguration(f"log level {level!r} is unknown; allowed: {allowed}", setting="log_level")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    global _configured
    _configured = level.lower()
    _audit_to(logging.StreamHandler(stream or sys.stderr))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc").setLevel(logging.ERROR)


def set_level(level: str | None, source: str) -> None:
    """Changes the log level of the running process; None sets the level that `configure_logging` got. The audit log has
    no level and does not change. Logs the change as a warning that names `source`, the person or program that requested
    it. Does nothing if the level is the same. `level` is one of LOG_LEVELS; another one raises KeyError."""
    root, before, after = logging.getLogger(), get_log_level(), level or _configured
    if after == before:
        return
    root.setLevel(min(root.level, logging.getLevelNamesMapping()[after.upper()]))
    _CHANGES.warning("the log level was %s and is %s now: %s", before, after, source)
    root.setLevel(after.upper())


def get_log_level() -> str:
    """Returns the level of the root logger, in lower case."""
    return logging.getLevelName(logging.getLogger().level).lower()


def open_audit_log(path: str) -> None:
    """Writes the audit log to the file `path` from now on, instead of the server's log. The file has mode 0600; lines
    are added at its end. If a log rotation moves the file away, a new one is created. Raises InvalidConfiguration if
    the file cannot be written."""
    from logging.handlers import WatchedFileHandler

    class PrivateFile(WatchedFileHandler):
        """A log file with mode 0600, also when it is created again after a rotation."""

        def _open(self) -> TextIOWrapper:
            descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            return TextIOWrapper(BufferedWriter(FileIO(descriptor, "a")), encoding=self.encoding)

    try:
        _audit_to(PrivateFile(path, encoding="utf-8"))
    except OSError as error:
        raise InvalidConfiguration(f"the audit log {path} cannot be written: {error.strerror}") from error


def _audit_to(handler: logging.Handler) -> None:
    """Sends the audit log to `handler`. Its records are lines of JSON, and are written whatever the log level is."""
    handler.setFormatter(logging.Formatter("%(message)s"))
    audit = logging.getLogger(AUDIT_LOGGER)
    audit.handlers[:] = [handler]
    audit.setLevel(logging.INFO)
    audit.propagate = False


def find_extra_values(record: logging.LogRecord) -> dict[str, object]:
    """Returns the values that a log record got in `extra`, by name; {} if there are none."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """Formats each log record as one line of text. Times are local times of the machine, to the millisecond; the values
    of `extra` are at the end of the line."""

    def __init__(self, process: str = "") -> None:
        whose = f"[{process}] " if process else ""
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {whose}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={value}" for name, value in find_extra_values(record).items())])


class JsonFormatter(logging.Formatter):
    """Formats each log record as one JSON object; `time` is in UTC."""

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
            **find_extra_values(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# --------------------------------------------------------------------------------------------------------- audit
# The audit log: who did what administrative act, from where, with what result; and what was denied. JSON lines.
#
#     {"time": "2026-11-23T10:00:00.000Z", "principal": "client:etl", "method": "token", "credential": "…",
#      "from": "10.0.0.7:51234", "act": "Admin.DeleteTopic", "on": "persistent://acme/orders/a", "result": "done"}
#
# `result` is "done", "denied" or the name of the error; `why` says more. It has names and no payloads, and of what is
# changed the names of the fields and not their values. Lines go to the logger `magnetar.audit`: to the server's stderr,
# whatever its log level, or to the file that the section [audit] of the settings names. Denials of one caller are
# written at most LOGGED_DENIALS_MAX in DENIAL_WINDOW_S seconds; how many were left out is said in the next line. A
# caller whose credentials are refused has no name: its lines are counted by its address.
#
# An act that needs a grant alone, as a program does it, is written at most OPERATION_REPEATS_MAX times in
# OPERATION_WINDOW_S seconds for its role, whatever it is done to. Of administration no act is left out; only the same
# one again, done to the same with the same result, has that bound. `left_out` says how many more there were: in the
# next such line, or in one of its own when the time is over and anything else is written. Guarding tests:
# tests/runtime/test_audit.py.


_LOG = logging.getLogger(AUDIT_LOGGER)

LOGGED_DENIALS_MAX = 10
DENIAL_WINDOW_S = 1.0
OPERATION_REPEATS_MAX = 10
OPERATION_WINDOW_S = 60.0
LOGGED_CALLERS_MAX = 1000
"""Callers whose denials are counted; the one that was denied longest ago is forgotten first."""
NAME_CHARACTERS_MAX = 256


class _Repeated:
    """An act that one caller repeats: since when, how often, and what its log line says."""

    __slots__ = ("act", "count", "on", "principal", "result", "since")

    def __init__(self, since: float, principal: Principal, act: str, on: str, result: str) -> None:
        self.since, self.count = since, 0
        self.principal, self.act, self.on, self.result = principal, act, on, result


class AuditLog:
    """Writes the audit log of a process. If a caller repeats an act or a denied act very often, some lines are left
    out; a later line says how many."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._acts: OrderedDict[tuple[str, ...], _Repeated] = OrderedDict()  # the one that began first is first
        self._denials: OrderedDict[str, tuple[float, int]] = OrderedDict()  # caller → since when, how many

    def log_operation(
        self, principal: Principal, peer: str, act: str, on: str, result: str, *, is_administration: bool = False,
        **more: object,
    ) -> None:  # fmt: skip
        """Writes an act of a caller to the audit log: the operation `act` on the object `on`, and its result. `peer`:
        the caller's address; `more`: further members of the line. Acts of a LOCAL caller are not written, because it
        has no name.

        At most OPERATION_REPEATS_MAX repetitions of an act in OPERATION_WINDOW_S seconds are written.
        `is_administration`: only acts with the same object and result count as repetitions of this act."""
        if principal.kind is PrincipalKind.LOCAL:
            return
        now, name = self._clock.monotonic(), str(principal)
        key = (name, act, on[:NAME_CHARACTERS_MAX], result) if is_administration else (name, act)
        found = self._acts.get(key)
        if found is not None and now - found.since >= OPERATION_WINDOW_S:
            del self._acts[key]
            if left_out := max(0, found.count - OPERATION_REPEATS_MAX):
                more["left_out"] = left_out
            found = None
        self._drop_old(now)
        if found is None:
            same = (on, result) if is_administration else ("", "")
            found = self._acts[key] = _Repeated(now, principal, act, *same)
        found.count += 1
        if found.count <= OPERATION_REPEATS_MAX:
            self._write(principal, act, on, result, **{"from": peer}, **more)

    def _drop_old(self, now: float) -> None:
        """Drops acts whose period is over, and the oldest ones if there are too many; writes how often each was left
        out.
        """
        while self._acts:
            key, oldest = next(iter(self._acts.items()))
            if now - oldest.since < OPERATION_WINDOW_S and len(self._acts) < LOGGED_CALLERS_MAX:
                return
            del self._acts[key]
            if oldest.count > OPERATION_REPEATS_MAX:
                left_out = oldest.count - OPERATION_REPEATS_MAX
                self._write(oldest.principal, oldest.act, oldest.on, oldest.result, left_out=left_out)

    @property
    def refusals(self) -> dict[str, int]:
        """Returns, by caller, how many of its requests were denied or had refused credentials in its last period of
        DENIAL_WINDOW_S seconds. Has at most LOGGED_CALLERS_MAX callers, those that were denied last."""
        return {caller: count for caller, (_, count) in self._denials.items()}

    def record_denial(self, principal: Principal, act: str, on: str, why: str, peer: str = "") -> None:
        """Writes to the audit log that an authenticated caller was not permitted to do the act `act` on the object
        `on`, and why. `peer`: the address of the caller; "": not known. Of one caller at most LOGGED_DENIALS_MAX
        denials in DENIAL_WINDOW_S seconds are written."""
        self._denied(str(principal), principal, act, on, why, peer)

    def record_refusal(self, caller: Caller, act: str, why: str) -> None:
        """Writes to the audit log that the credentials of a caller were refused. The reason `why` must not quote the
        credentials. Of one address at most LOGGED_DENIALS_MAX refusals in DENIAL_WINDOW_S seconds are written."""
        host = caller.peer.rpartition(":")[0]
        self._denied(f"from {host}", Principal("", PrincipalKind.ANONYMOUS), act, "", why, caller.peer)

    def _denied(self, caller: str, principal: Principal, act: str, on: str, why: str, peer: str) -> None:
        now = self._clock.monotonic()
        since, count = self._denials.pop(caller, (now, 0))
        left_out = 0
        if now - since >= DENIAL_WINDOW_S:
            left_out, since, count = max(0, count - LOGGED_DENIALS_MAX), now, 0
        self._denials[caller] = since, count + 1
        if len(self._denials) > LOGGED_CALLERS_MAX:
            self._denials.popitem(last=False)
        if count < LOGGED_DENIALS_MAX:
            more: dict[str, object] = {"from": peer} if peer else {}
            if left_out:
                more["left_out"] = left_out
            self._write(principal, act, on, "denied", why=why, **more)

    def _write(self, principal: Principal, act: str, on: str, result: str, **more: object) -> None:
        at = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "principal": str(principal),
            "method": principal.method, "credential": principal.credential_id, "act": act, "on": on, "result": result,
            **more,
        }  # fmt: skip
        shown = {name: value[:NAME_CHARACTERS_MAX] if isinstance(value, str) else value for name, value in line.items()}
        _LOG.info("%s", json.dumps({name: value for name, value in shown.items() if value != ""}))
