"""Translation between gRPC's statuses and Magnetar's errors, in this module only.

A handler's MagnetarError is sent as a status and the trailer `magnetar-error-bin`, and the caller raises the same
class. Another exception of a handler becomes InternalError. What has no such trailer:

| what happened | raised | definite |
|---|---|---|
| no connection, or nothing came on it | Unavailable, field `unreached`; UntrustedServer | yes: nothing was sent |
| the other end does not speak gRPC, or TLS, or status UNIMPLEMENTED | WrongProtocol | yes |
| the connection or the stream broke; status UNAVAILABLE, CANCELLED or ABORTED | ConnectionLost | no |
| no answer in time, status DEADLINE_EXCEEDED | TimedOut | no |
| status RESOURCE_EXHAUSTED | MessageTooLarge | yes |
| another status | InternalError | no |

Codes: https://grpc.github.io/grpc/core/md_doc_statuscodes.html, and doc/PROTOCOL-HTTP2.md of gRPC for the headers.
"""

from __future__ import annotations

import base64
import binascii
import logging
import urllib.parse
from enum import IntEnum

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
    WrongProtocol,
    from_wire,
    to_wire,
)
from ..network import MESSAGE_BYTES_MAX, Endpoint
from ..tcp.http2_frames import Header

ERROR_TRAILER = b"magnetar-error-bin"

_DETAILS_MAX = 1024
"""Most characters of a status' text: it is for other tools, and headers are bounded; the trailer has the whole error.
"""

_UNESCAPED = "".join(chr(each) for each in range(0x20, 0x7F) if each != ord("%"))

_LOG = logging.getLogger("magnetar.rpc")


class Status(IntEnum):
    """The status code with which a gRPC call ends."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


def copy_error(error: MagnetarError) -> MagnetarError:
    """Returns a copy of the error that can be raised again. (An exception object collects the traceback of each place
    that raises it.)"""
    copy = type(error)(error.message)
    copy.fields = dict(error.fields)
    return copy


def make_error_for_status(status: int, details: str, trailer: bytes, endpoint: Endpoint) -> MagnetarError:
    """Returns the MagnetarError for a call that ended with `status`, by the table at the head of this module. `trailer`
    is the value of the trailer `magnetar-error-bin`; empty if the answer has none."""
    if trailer:
        try:
            return from_wire(wire.Error.FromString(base64.b64decode(trailer + b"=" * (-len(trailer) % 4))))
        except (DecodeError, binascii.Error):
            return WrongProtocol(f"{endpoint} answered with an error that does not parse", endpoint=endpoint)
    text = f"{endpoint}: {details or get_grpc_status_name(status)}"
    match status:
        case Status.UNAVAILABLE | Status.CANCELLED | Status.ABORTED:
            return ConnectionLost(text, endpoint=endpoint)
        case Status.DEADLINE_EXCEEDED:
            return TimedOut(f"no answer from {endpoint} in time", endpoint=endpoint)
        case Status.UNIMPLEMENTED:
            return WrongProtocol(f"{endpoint} does not offer this: {details}", endpoint=endpoint)
        case Status.RESOURCE_EXHAUSTED:
            return MessageTooLarge(text, endpoint=endpoint, limit=MESSAGE_BYTES_MAX)
        case _:
            return InternalError(text, endpoint=endpoint)


def get_grpc_status_name(number: int) -> str:
    return Status(number).name if number in Status._value2member_map_ else f"status {number}"


def make_error_trailers(error: BaseException) -> list[Header]:
    """Returns the trailers with which the server ends a failed call. An error that is not a MagnetarError is logged,
    because it is a bug."""
    if not isinstance(error, MagnetarError):
        _LOG.error("a handler failed", exc_info=error)
    message = to_wire(error)
    packed = base64.b64encode(message.SerializeToString()).rstrip(b"=")
    return [*make_status_trailers(_status_of(from_wire(message)), message.message), (ERROR_TRAILER, packed)]


def make_status_trailers(status: Status, details: str = "") -> list[Header]:
    trailers = [(b"grpc-status", b"%d" % status)]
    if details:
        quoted = urllib.parse.quote(details[:_DETAILS_MAX], safe=_UNESCAPED)
        trailers.append((b"grpc-message", quoted.encode("ascii")))
    return trailers


def parse_grpc_message(value: bytes) -> str:
    """Returns the text of the header `grpc-message`, which is percent-encoded."""
    return urllib.parse.unquote(value.decode("latin-1"))


def _status_of(error: MagnetarError) -> Status:
    match error:
        case InvalidRequest():
            return Status.INVALID_ARGUMENT
        case NotFound():
            return Status.NOT_FOUND
        case Unauthorized():
            return Status.PERMISSION_DENIED
        case Unauthenticated() | CredentialsExpired():
            return Status.UNAUTHENTICATED
        case Unavailable():
            return Status.UNAVAILABLE
        case InternalError():
            return Status.INTERNAL
        case _:
            return Status.FAILED_PRECONDITION
