"""The error families: what failed, whether it certainly did not happen, whether to try again.

There are three sorts (docs/errors.md). A fault of the caller is raised at once, before anything is sent. An outside
failure has a type of its own, with `definite` and `retryable`. A fault of Magnetar itself is an `assert`. After a
time-out the outcome is *unknown* (`definite = False`): the operation may have happened. Between processes an error is a
`wire.Error` (code, text, fields), translated only by `to_wire` and `from_wire`. Codes are a contract: they are never
changed or used again.
"""

from __future__ import annotations

from typing import ClassVar

from . import wire_pb2 as wire

_BY_CODE: dict[int, type[MagnetarError]] = {}


class MagnetarError(Exception):
    """Base of every error that Magnetar raises on purpose. `code` identifies the class on the wire. `definite`: the
    operation certainly did not happen. `retryable`: the same request may succeed later, at the same or another server.
    `fields` are the facts of the case, as text, and are sent with it."""

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


AWAITS_LAST_ACKS = "says_last"
"""The name of a field. A broker sets it in the error with which it closes a consumer, if it still waits for that
consumer's last acknowledgements."""
MESSAGE_CHARACTERS_MAX, FIELD_CHARACTERS_MAX, ERROR_FIELDS_MAX = 1500, 300, 10
"""The longest message, the longest field, in characters, and the largest number of fields of an error that is sent. An
error may quote the request, and gRPC allows 8 KB for it."""


def to_wire(error: BaseException) -> wire.Error:
    """Returns the wire form of an exception. An exception that is not a MagnetarError becomes an InternalError with its
    type and text. Long texts are cut, and at most ERROR_FIELDS_MAX fields are sent."""
    if not isinstance(error, MagnetarError):
        error = InternalError(f"{type(error).__name__}: {error}")
    fields = {
        name: _short(value, FIELD_CHARACTERS_MAX) for name, value in list(error.fields.items())[:ERROR_FIELDS_MAX]
    }
    return wire.Error(code=error.code, message=_short(error.message, MESSAGE_CHARACTERS_MAX), fields=fields)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]} … ({len(text)} characters)"


def from_wire(message: wire.Error) -> MagnetarError:
    """Returns the exception of an error from the wire. If this version does not know the code, returns a plain
    MagnetarError."""
    error = _BY_CODE.get(message.code, MagnetarError)(message.message)
    error.fields = dict(message.fields)
    return error


class InternalError(MagnetarError):
    """The server failed for a reason that it does not tell; the outcome is unknown."""

    code = 2


# ---------------------------------------------------------------------------------- the caller's fault
class InvalidRequest(MagnetarError):
    """The request itself is wrong: it fails in the same way whenever it is repeated."""

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
    """The other end of a connection does not speak this protocol, or has violated it."""

    code = 15


def is_unknown_operation(error: BaseException) -> bool:
    """Returns whether the error says that the server, of an older release, does not have the operation."""
    return isinstance(error, WrongProtocol) and "no method" in str(error)


class InvalidSchema(InvalidRequest):
    """The definition of a schema is not valid for its type; the message names the place in the definition."""

    code = 17


class NewerFormat(InvalidConfiguration):
    """A later Magnetar wrote the data, so this one must be upgraded; fields `version`, `known`."""

    code = 16


# ---------------------------------------------------------------------------------- not there, or taken
class NotFound(MagnetarError):
    """The named object does not exist."""

    code = 20
    definite = True


class TenantNotFound(NotFound):
    """The tenant does not exist: create it first."""

    code = 21


class NamespaceNotFound(NotFound):
    """The namespace does not exist: create it first."""

    code = 22


class TopicNotFound(NotFound):
    """The topic does not exist, and is not created automatically here."""

    code = 23


class SubscriptionNotFound(NotFound):
    """The topic has no such subscription."""

    code = 24


class LedgerNotFound(NotFound):
    """The ledger was never created, or was deleted."""

    code = 25


class SchemaNotFound(NotFound):
    """The topic has no schema, or not that version."""

    code = 26


class AlreadyExists(MagnetarError):
    """An object of that name exists already."""

    code = 30
    definite = True


class Busy(MagnetarError):
    """An object is in use: a namespace with topics, a topic with producers, a data directory, a port."""

    code = 31
    definite = True


class TransactionsOpen(Busy):
    """The topic has messages or acknowledgements in transactions that have not ended; fields `txn` (one of them),
    `state` (UNKNOWN: its coordinator does not answer), `count`."""

    code = 39


class ConsumerBusy(Busy):
    """An exclusive subscription has a consumer already, or the subscription has another type."""

    code = 32


class ProducerBusy(Busy):
    """A producer of that name is connected, or the topic has an exclusive producer."""

    code = 33


class ProducerFenced(MagnetarError):
    """A later exclusive producer has taken over the topic; this producer has ended."""

    code = 34
    definite = True


class TopicTerminated(MagnetarError):
    """The topic is terminated: it can be read and not written."""

    code = 35
    definite = True


class NotAllowed(MagnetarError):
    """The operation exists and is not allowed here (for example a cumulative ack on a shared subscription)."""

    code = 36
    definite = True


class IncompatibleSchema(NotAllowed):
    """A schema is not compatible with those of the topic; the message names the rule, the version and the field."""

    code = 38


class BacklogQuotaExceeded(MagnetarError):
    """The topic's backlog has reached its quota, and its policy is to refuse publishes."""

    code = 37
    definite = True


# ---------------------------------------------------------------------------------- transactions
class TransactionAborted(MagnetarError):
    """The transaction is aborted and nothing of it counts: run all of it again; field `reason`."""

    code = 70
    definite = True


class TransactionConflict(MagnetarError):
    """The message is acknowledged already, or in another open transaction, so this transaction can only abort. An
    acknowledgement without a transaction may be repeated when the other one has ended."""

    code = 71
    definite = True


class TransactionEnded(MagnetarError):
    """The transaction of a send, an acknowledgement or a commit has ended or is ending; the operation was not done."""

    code = 72
    definite = True


class TransactionFenced(MagnetarError):
    """A later holder of the transaction's name took over: stop, and do not retry."""

    code = 73
    definite = True


class TransactionForgotten(MagnetarError):
    """The transaction ended so long ago that its outcome is not kept any more."""

    code = 74
    definite = True


class SinkFenced(MagnetarError):
    """Another query writes under this `sinkId`: choose another one, or set `onNewCheckpoint=adopt`."""

    code = 75
    definite = True


class HalfParked(MagnetarError):
    """The half message waits for an operator's decision, and no program can decide it; field `reason`."""

    code = 76
    definite = True


# ---------------------------------------------------------------------------------- the world's fault
class Unavailable(MagnetarError):
    """No server can do this now, and nothing was done; the request may be repeated."""

    code = 40
    definite = True
    retryable = True


class NotOwner(Unavailable):
    """This broker does not own the topic, or not any more: look up its owner again."""

    code = 41


class NotEnoughBookies(Unavailable):
    """Fewer writable bookies than the ensemble needs; fields `wanted`, `available`."""

    code = 42


class ReadOnly(Unavailable):
    """The bookie's disk is full, so that it accepts only reads."""

    code = 43


class ConnectionLost(MagnetarError):
    """The connection broke while the request was in progress: the outcome is unknown."""

    code = 44
    retryable = True


class TimedOut(MagnetarError):
    """No answer arrived before the deadline: the outcome is unknown."""

    code = 45
    retryable = True


class OutcomeUnknown(MagnetarError):
    """The operation may have happened or not; retry with the same sequence id, or read to find out."""

    code = 46
    retryable = True


class DataLost(MagnetarError):
    """Bytes that were acknowledged cannot be read from any replica. This is an alarm: such bytes are never skipped
    silently."""

    code = 47


class DuplicateInDoubt(OutcomeUnknown):
    """The entry is being stored already, and its outcome is unknown: keep it, connect again, send it again."""

    code = 48


class BackPressure(Unavailable):
    """A queue or a limit of the server or client is full; nothing was done."""

    code = 49


# ---------------------------------------------------------------------------------- ledgers and bookies
class LedgerFenced(MagnetarError):
    """Another client is recovering the ledger or has closed it. Whether the entry of a failed add is stored is unknown.
    """

    code = 50


class LedgerClosed(MagnetarError):
    """The handle of the ledger is closed, or accepts no more entries after a failure; nothing was sent."""

    code = 51
    definite = True


class Unauthorized(MagnetarError):
    """The caller has no permission for the operation, or the master key of the ledger is wrong."""

    code = 52
    definite = True


class WrongIdentity(MagnetarError):
    """The process at that address is another one than the request names (another bookie uuid)."""

    code = 53
    definite = True


class Unauthenticated(MagnetarError):
    """The caller sent no credentials, or they are wrong, expired or of another cluster."""

    code = 54
    definite = True


class CredentialsExpired(MagnetarError):
    """The credentials of the connection have expired: connect again with new ones."""

    code = 55
    retryable = True


class UntrustedServer(MagnetarError):
    """The server's certificate cannot be verified: it has an unknown authority, another host, or has expired."""

    code = 56
    definite = True


# ---------------------------------------------------------------------------------- metadata
class BadVersion(MagnetarError):
    """A compare-and-set found another version of the record; it was definitely not written."""

    code = 60
    definite = True
    retryable = True


class NodeExists(BadVersion):
    """The node exists and was expected to be absent."""

    code = 61


class NoNode(BadVersion):
    """The node does not exist and was expected to exist."""

    code = 62


class SessionExpired(MagnetarError):
    """The metadata session has ended, and its ephemeral nodes are deleted."""

    code = 63
    definite = True
