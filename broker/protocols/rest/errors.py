"""Errors as statuses of HTTP with `{"reason": …}`, as Pulsar's clients rely on them.

The first class that fits counts, so a class comes before those that it is derived from. What is in use is 409 or 412,
as its route says (table.py).
"""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ....proto import errors

_LOG = logging.getLogger("magnetar.broker.rest")

_TABLE: tuple[tuple[type[errors.MagnetarError], int], ...] = (
    (errors.MessageTooLarge, 413),
    (errors.CorruptEntry, 500),
    (errors.InvalidRequest, 412),
    (errors.NotFound, 404),
    (errors.AlreadyExists, 409),
    (errors.Busy, 409),
    (errors.ProducerFenced, 409),
    (errors.TopicTerminated, 409),
    (errors.TransactionEnded, 409),
    (errors.TransactionForgotten, 404),
    (errors.IncompatibleSchema, 409),
    (errors.NotAllowed, 405),
    (errors.BacklogQuotaExceeded, 412),
    (errors.Unauthenticated, 401),
    (errors.CredentialsExpired, 401),
    (errors.Unauthorized, 403),
    (errors.BackPressure, 429),
    (errors.BadVersion, 409),
    (errors.TimedOut, 504),
    (errors.Unavailable, 503),
    (errors.SessionExpired, 503),
)

_REASONS: tuple[tuple[type[errors.MagnetarError], str], ...] = (
    (errors.TenantNotFound, "Tenant does not exist"),
    (errors.NamespaceNotFound, "Namespace does not exist"),
)
"""Reasons that programs compare with: the path says which."""

NEGOTIATE = "Bearer, Basic"


class Json(Response):
    """A value of plain types, or a struct, as JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


class BadRequest(HTTPException):
    """The answer 400 (unless `status` is another), with a reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(status, reason)


def status_of(error: errors.MagnetarError, busy: int = 409) -> int:
    """Returns the HTTP status of an error. `busy`: of what is in use."""
    if isinstance(error, errors.Busy):
        return busy
    return next((status for kind, status in _TABLE if isinstance(error, kind)), 500)


def reply(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = NEGOTIATE
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the request is not read
    return Json({"reason": reason}, status, headers)


def reply_to(error: Exception, busy: int = 409) -> Response:
    """Returns the response for an error. A fault of the broker is logged, and its text stays here."""
    if isinstance(error, HTTPException):
        return reply(error.status_code, error.detail, dict(error.headers or {}))
    if isinstance(error, errors.MagnetarError):
        reason = next((text for kind, text in _REASONS if isinstance(error, kind)), error.message)
        return reply(status_of(error, busy), reason)
    _LOG.error("a request of a client failed", exc_info=error)
    return reply(500, f"the request failed: {type(error).__name__}")
