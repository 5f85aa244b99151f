"""Translation between gRPC's errors and Magnetar's, in this module only.

A handler's MagnetarError is sent as a status and the trailer `magnetar-error-bin`, and the caller raises the same
class. Another exception of a handler becomes InternalError. Errors of gRPC itself:

| gRPC says | raised | definite |
|---|---|---|
| UNAVAILABLE, no connection, or no bytes on it | Unavailable, field `unreached` | yes: nothing was sent |
| UNAVAILABLE otherwise, CANCELLED, ABORTED | ConnectionLost | no |
| DEADLINE_EXCEEDED | TimedOut | no |
| UNIMPLEMENTED, or an answer that is not HTTP/2 | WrongProtocol | yes |
| RESOURCE_EXHAUSTED (message above MESSAGE_BYTES_MAX) | MessageTooLarge | yes |
| INTERNAL, of the caller's own gRPC: the call ended while a part of it was being sent | ConnectionLost | no |
| anything else | InternalError | no |

Only the text of gRPC's details tells a connection that was never made from one that broke. The phrases are in
`_NEVER_CONNECTED`, and the tests fail when they change (the error is then ConnectionLost: less certain, never wrong).
"""

from __future__ import annotations

import asyncio
import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ...proto import wire_pb2 as wire
from ...proto.errors import (
    ConnectionLost,
    CredentialsExpired,
    InternalError,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    NotFound,
    TimedOut,
    Unauthenticated,
    Unauthorized,
    Unavailable,
    UntrustedServer,
    WrongProtocol,
    from_wire,
    to_wire,
)
from ..network import MESSAGE_BYTES_MAX, Endpoint

if TYPE_CHECKING:
    import grpc.aio

ERROR_TRAILER = "magnetar-error-bin"

_DETAILS_MAX = 1024
"""The status' text is for other tools, and headers are bounded; the trailer has the whole error."""

_NEVER_CONNECTED = ("failed to connect to all addresses", "errors resolving", "name resolution", "dns resolution")
_SILENT = "timed out before receiving settings frame"
"""Connected, and no byte arrived: the process is stopped, or the link passes nothing. It may answer later."""
_NO_ANSWER = ("handshaker shutdown", "timed out", "timeout", "deadline")
"""gRPC ended an attempt to connect."""
_ENDED_MEANWHILE = "Internal error from Core"
"""grpc.aio's message at the caller when the server ends a call during its first operations."""
_NOT_HTTP2 = ("http1.x", "http2", "settings frame", "first byte", "preface")

_LOG = logging.getLogger("magnetar.rpc")


def grpc_module() -> ModuleType:
    """grpc, imported at its first use, quiet, and without its fork handlers (channels are made again after a fork)."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    import grpc.aio

    return grpc


def copy_of(error: MagnetarError) -> MagnetarError:
    """The same error, to be raised again: an exception object collects the traceback of each place that raises it."""
    copy = type(error)(error.message)
    copy.fields = dict(error.fields)
    return copy


def from_grpc(error: grpc.aio.AioRpcError, endpoint: Endpoint) -> MagnetarError:
    """The MagnetarError for a failed call, by the table of this module."""
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == ERROR_TRAILER and isinstance(value, bytes):
            try:
                return from_wire(wire.Error.FromString(value))
            except DecodeError:
                return WrongProtocol(f"{endpoint} answered with an error that does not parse", endpoint=endpoint)
    code = grpc_module().StatusCode
    details = error.details() or ""
    text = f"{endpoint}: {details}"
    match error.code():
        case code.UNAVAILABLE:
            return _unavailable(details, endpoint)
        case code.CANCELLED | code.ABORTED:
            return ConnectionLost(text, endpoint=endpoint)
        case code.DEADLINE_EXCEEDED:
            return TimedOut(f"no answer from {endpoint} in time", endpoint=endpoint)
        case code.UNIMPLEMENTED:
            return WrongProtocol(f"{endpoint} does not offer this: {details}", endpoint=endpoint)
        case code.RESOURCE_EXHAUSTED:
            return MessageTooLarge(text, endpoint=endpoint, limit=MESSAGE_BYTES_MAX)
        case code.INTERNAL if details == _ENDED_MEANWHILE:
            return ConnectionLost(text, endpoint=endpoint)
        case _:
            return InternalError(text, endpoint=endpoint)


def _unavailable(details: str, endpoint: Endpoint) -> MagnetarError:
    words = details.lower()
    if not any(each in words for each in _NEVER_CONNECTED):
        return ConnectionLost(f"{endpoint}: {details}", endpoint=endpoint)
    if _SILENT not in words and any(each in words for each in _NOT_HTTP2):
        return WrongProtocol(f"{endpoint} does not speak gRPC: {details}", endpoint=endpoint)
    if (tls := _of_tls(details, words, endpoint)) is not None:
        return tls
    how, why = _how_it_failed(details, words)
    return Unavailable(f"cannot connect to {endpoint}: {why}", endpoint=endpoint, unreached=how)


_UNTRUSTED = {
    "certificate has expired": "has expired",
    "certificate is not yet valid": "is not valid yet, or this machine's clock is wrong",
    "hostname verification": "is of another host name",
    "certificate_verify_failed": "is not signed by an authority that this client trusts: give its file (--tls-ca)",
    "certificate signature failure": "is not signed by an authority that this client trusts: give its file (--tls-ca)",
}
"""In gRPC's text, in lower case → what is wrong with the server's certificate. The first that fits."""


def _of_tls(details: str, words: str, endpoint: Endpoint) -> MagnetarError | None:
    for part, why in _UNTRUSTED.items():
        if part in words:
            return UntrustedServer(f"the certificate of {endpoint} {why}", endpoint=endpoint)
    if "wrong_version_number" in words:
        return WrongProtocol(f"{endpoint} does not speak TLS: its URL begins with magnetar://", endpoint=endpoint)
    if "tls handshake failed" in words:
        return UntrustedServer(f"no TLS with {endpoint}: {details.rpartition('SSL_ERROR_SSL: ')[2]}", endpoint=endpoint)
    return None


def _how_it_failed(details: str, words: str) -> tuple[str, str]:
    """"refused" (the host, or a router, refused at once) or "silent" (no answer in time); and the same in words."""
    if _SILENT in words:
        return "silent", "it accepts connections and sends nothing"
    if any(each in words for each in _NEVER_CONNECTED[1:]):
        if any(each in words for each in _NO_ANSWER):
            return "silent", "the name service did not answer"
        return "refused", "the host name is not known"
    if any(each in words for each in _NO_ANSWER):
        return "silent", "no answer to connecting"
    if "socket closed" in words:
        return "refused", "it closed the connection: perhaps it asks for TLS (magnetar+ssl://) or for a certificate"
    return "refused", details.rpartition(": ")[2]


async def abort(context: Any, error: BaseException) -> None:
    """Ends a call at the server with an error; raises gRPC's own exception, as gRPC requires."""
    if not isinstance(error, MagnetarError):
        _LOG.error("a handler failed", exc_info=error)
    message = to_wire(error)
    trailer = ((ERROR_TRAILER, message.SerializeToString()),)
    await context.abort(_status_of(from_wire(message)), message.message[:_DETAILS_MAX], trailer)


def _status_of(error: MagnetarError) -> Any:
    code = grpc_module().StatusCode
    match error:
        case InvalidRequest():
            return code.INVALID_ARGUMENT
        case NotFound():
            return code.NOT_FOUND
        case Unauthorized():
            return code.PERMISSION_DENIED
        case Unauthenticated() | CredentialsExpired():
            return code.UNAUTHENTICATED
        case Unavailable():
            return code.UNAVAILABLE
        case InternalError():
            return code.INTERNAL
        case _:
            return code.FAILED_PRECONDITION


def is_cancelled() -> bool:
    """Whether we cancelled this task (gRPC raises CancelledError for its own reasons too)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
