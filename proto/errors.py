"""The error families: what can go wrong, whether it is known to have failed, whether to try again.

Three sorts (docs/errors.md): the caller's fault is raised at once, before anything is sent; the world's fault is
typed, with `definite` and `retryable`; our own fault is an `assert`. A time-out is *unknown* (`definite = False`):
the operation may have happened. Errors cross a border as `wire.Error` (code, text, fields) and are translated only
there: `to_wire` and `from_wire`. Codes are a contract: never renumber, never reuse.
"""

from __future__ import annotations

from typing import ClassVar

from . import wire_pb2 as wire

_BY_CODE: dict[int, type[MagnetarError]] = {}


class MagnetarError(Exception):
    """Base of every error that Magnetar raises on purpose.

    `code` identifies the class on the wire; `definite`: the operation certainly did not happen;
    `retryable`: the same request may succeed later, at the same or another server.
    `fields` are the facts of the case, as text, and travel with it.
    """

    code: ClassVar[int] = 1
    definite: ClassVar[bool] = False
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, str] = {name: str(value) for name, value in fields.items()}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            assert cls.code not in _BY_CODE, f"error code {cls.code} is taken by {_BY_CODE[cls.code].__name__}"
            _BY_CODE[cls.code] = cls


_BY_CODE[1] = MagnetarError


MESSAGE_MAX, FIELD_MAX, FIELDS_MAX = 1500, 300, 10
"""Characters and number: an error travels in a trailer, of which gRPC takes 8 KB, and may quote what was asked."""


def to_wire(error: BaseException) -> wire.Error:
    """The wire form of any exception; what is not a MagnetarError is reported as InternalError, type and text."""
    if not isinstance(error, MagnetarError):
        error = InternalError(f"{type(error).__name__}: {error}")
    fields = {name: _short(value, FIELD_MAX) for name, value in list(error.fields.items())[:FIELDS_MAX]}
    return wire.Error(code=error.code, message=_short(error.message, MESSAGE_MAX), fields=fields)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]} … ({len(text)} characters)"


def from_wire(message: wire.Error) -> MagnetarError:
    """The exception a wire error stands for; an unknown code becomes a plain MagnetarError."""
    error = _BY_CODE.get(message.code, MagnetarError)(message.message)
    error.fields = dict(message.fields)
    return error


class InternalError(MagnetarError):
    """The server failed in a way it does not name; the outcome is unknown."""

    code = 2


# ---------------------------------------------------------------------------------- the caller's fault
class InvalidRequest(MagnetarError):
    """The request itself is wrong and will stay wrong."""

    code = 10
    definite = True


class InvalidName(InvalidRequest):
    """A tenant, namespace, topic or subscription name breaks the rules of names."""

    code = 11


class MessageTooLarge(InvalidRequest):
    """A message or entry is above the limit; fields `size`, `limit`."""

    code = 12


class InvalidConfiguration(InvalidRequest):
    """A setting or option is unknown, malformed or contradicts another."""

    code = 13


class CorruptEntry(InvalidRequest):
    """The bytes of an entry do not parse or do not match their checksum."""

    code = 14


class WrongProtocol(InvalidRequest):
    """What answers on that port (or what called ours) does not speak this protocol."""

    code = 15


class NewerFormat(InvalidConfiguration):
    """A later Magnetar wrote what should be read: upgrade; fields `version`, `known`."""

    code = 16


# ---------------------------------------------------------------------------------- not there, or taken
class NotFound(MagnetarError):
    """What was named does not exist."""

    code = 20
    definite = True


class TenantNotFound(NotFound):
    """The tenant does not exist: create it first."""

    code = 21


class NamespaceNotFound(NotFound):
    """The namespace does not exist: create it first."""

    code = 22


class TopicNotFound(NotFound):
    """The topic does not exist, and is not made by itself here."""

    code = 23


class SubscriptionNotFound(NotFound):
    """The topic has no such subscription."""

    code = 24


class LedgerNotFound(NotFound):
    """The ledger was never made, or is deleted."""

    code = 25


class AlreadyExists(MagnetarError):
    """What should be created is there already."""

    code = 30
    definite = True


class Busy(MagnetarError):
    """Something is in use: a namespace with topics, a topic with producers, a data directory, a port."""

    code = 31
    definite = True


class ConsumerBusy(Busy):
    """An exclusive subscription has a consumer already, or the subscription has another type."""

    code = 32


class ProducerBusy(Busy):
    """A producer of that name is connected, or the topic has an exclusive producer."""

    code = 33


class ProducerFenced(MagnetarError):
    """A later exclusive producer took the topic over; this one is finished."""

    code = 34
    definite = True


class TopicTerminated(MagnetarError):
    """The topic is sealed: it can be read and not written."""

    code = 35
    definite = True


class NotAllowed(MagnetarError):
    """The operation exists and is not allowed here (cumulative ack on a shared subscription, say)."""

    code = 36
    definite = True


class BacklogQuotaExceeded(MagnetarError):
    """The topic's subscriptions hold as much as they may, and its policy is to refuse what is published."""

    code = 37
    definite = True


# ---------------------------------------------------------------------------------- the world's fault
class Unavailable(MagnetarError):
    """Nobody can serve this now; it was not done; try again."""

    code = 40
    definite = True
    retryable = True


class NotOwner(Unavailable):
    """This broker does not own the topic (any more); look it up again."""

    code = 41


class NotEnoughBookies(Unavailable):
    """Fewer writable bookies than the ensemble needs; fields `wanted`, `available`."""

    code = 42


class ReadOnly(Unavailable):
    """The bookie's disk is full; it serves reads only."""

    code = 43


class ConnectionLost(MagnetarError):
    """The connection broke with the request on its way: unknown."""

    code = 44
    retryable = True


class TimedOut(MagnetarError):
    """No answer within the deadline: unknown."""

    code = 45
    retryable = True


class OutcomeUnknown(MagnetarError):
    """It may have happened or not; retry with the same sequence id, or read to find out."""

    code = 46
    retryable = True


class DataLost(MagnetarError):
    """Bytes that were acknowledged cannot be read from any replica. An alarm, never skipped silently."""

    code = 47


class DuplicateInDoubt(OutcomeUnknown):
    """The entry is on its way already, and nobody knows its outcome: keep it, connect again, send it again."""

    code = 48


class BackPressure(Unavailable):
    """A bounded queue is full."""

    code = 49


# ---------------------------------------------------------------------------------- ledgers and bookies
class LedgerFenced(MagnetarError):
    """Another client is recovering or has closed the ledger. The add may be stored: unknown."""

    code = 50


class LedgerClosed(MagnetarError):
    """The handle is closed or poisoned; nothing was sent."""

    code = 51
    definite = True


class Unauthorized(MagnetarError):
    """Wrong ledger master key or missing permission."""

    code = 52
    definite = True


class WrongIdentity(MagnetarError):
    """The process at that address is not the one asked for (another bookie uuid)."""

    code = 53
    definite = True


# ---------------------------------------------------------------------------------- metadata
class BadVersion(MagnetarError):
    """A compare-and-set found another version: definitely not written."""

    code = 60
    definite = True
    retryable = True


class NodeExists(BadVersion):
    """The node should be made and is there."""

    code = 61


class NoNode(BadVersion):
    """The node should be changed and is not there."""

    code = 62


class SessionExpired(MagnetarError):
    """The metadata session is gone, and its ephemerals with it."""

    code = 63
    definite = True
