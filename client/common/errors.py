"""Results and exceptions of the SDK: one class per `Result`, with the names of `pulsar-client`.

    try:
        producer.send(b"…")
    except magnetar.Timeout:          # unknown: it may be stored
        …
    except magnetar.PulsarException as error:
        print(error.error(), error.definite, error.retryable, error.__cause__)

Every one is a `MagnetarError` too; `Timeout` is Python's TimeoutError as well, and what says that an argument is wrong
is a ValueError and a TypeError, as programs that were written for Pulsar's client expect it. What came from a server or
from `runtime/` is translated here (`translate_error`) and nowhere else; the original stays as `__cause__`, and
`definite` and `retryable` are the original's.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from ...proto import errors as wire_errors
from ...proto.errors import MagnetarError

# --------------------------------------------------------------------------------------------------------- enums
# Enums of the SDK: numbers, as on the wire, which print as Pulsar's do.


class ClientEnum(IntEnum):
    """Base of the SDK's enums: a member prints as `CompressionType.LZ4`, not as its number."""

    __str__ = Enum.__str__
    __format__ = Enum.__format__


# -------------------------------------------------------------------------------------------------------- errors


__all__ = [
    "AlreadyClosed",
    "AuthenticationError",
    "AuthorizationError",
    "BrokerMetadataError",
    "BrokerPersistenceError",
    "ChecksumError",
    "ConnectError",
    "ConsumerAssignError",
    "ConsumerBusy",
    "ConsumerNotFound",
    "ConsumerNotInitialized",
    "CryptoError",
    "CumulativeAcknowledgementNotAllowedError",
    "DataLost",
    "Disconnected",
    "ErrorGettingAuthenticationData",
    "HalfParked",
    "IncompatibleSchema",
    "Interrupted",
    "InvalidConfiguration",
    "InvalidMessage",
    "InvalidTopicName",
    "InvalidTxnStatusError",
    "InvalidUrl",
    "LookupError",
    "MagnetarError",
    "MagnetarException",
    "MemoryBufferIsFull",
    "MessageTooBig",
    "NotAllowedError",
    "NotConnected",
    "OperationNotSupported",
    "OutcomeUnknown",
    "ProducerBlockedQuotaExceededError",
    "ProducerBlockedQuotaExceededException",
    "ProducerBusy",
    "ProducerFenced",
    "ProducerNotInitialized",
    "ProducerQueueIsFull",
    "PulsarException",
    "ReadError",
    "Result",
    "ServiceUnitNotReady",
    "SinkFenced",
    "SubscriptionNotFound",
    "Timeout",
    "TooManyLookupRequestException",
    "TopicNotFound",
    "TopicTerminated",
    "TransactionAborted",
    "TransactionConflict",
    "TransactionCoordinatorNotFoundError",
    "TransactionEnded",
    "TransactionFenced",
    "TransactionForgotten",
    "TransactionNotFound",
    "UnknownError",
    "UnsupportedVersionError",
]


class Result(ClientEnum):
    """The outcome that a callback gets; the numbers are Pulsar's."""

    Ok = 0
    UnknownError = 1
    InvalidConfiguration = 2
    Timeout = 3
    LookupError = 4
    ConnectError = 5
    ReadError = 6
    AuthenticationError = 7
    AuthorizationError = 8
    ErrorGettingAuthenticationData = 9
    BrokerMetadataError = 10
    BrokerPersistenceError = 11
    ChecksumError = 12
    ConsumerBusy = 13
    NotConnected = 14
    AlreadyClosed = 15
    InvalidMessage = 16
    ConsumerNotInitialized = 17
    ProducerNotInitialized = 18
    ProducerBusy = 19
    TooManyLookupRequestException = 20
    InvalidTopicName = 21
    InvalidUrl = 22
    ServiceUnitNotReady = 23
    OperationNotSupported = 24
    ProducerBlockedQuotaExceededError = 25
    ProducerBlockedQuotaExceededException = 26
    ProducerQueueIsFull = 27
    MessageTooBig = 28
    TopicNotFound = 29
    SubscriptionNotFound = 30
    ConsumerNotFound = 31
    UnsupportedVersionError = 32
    TopicTerminated = 33
    CryptoError = 34
    IncompatibleSchema = 35
    ConsumerAssignError = 36
    CumulativeAcknowledgementNotAllowedError = 37
    TransactionCoordinatorNotFoundError = 38
    InvalidTxnStatusError = 39
    NotAllowedError = 40
    TransactionConflict = 41
    TransactionNotFound = 42
    ProducerFenced = 43
    MemoryBufferIsFull = 44
    Interrupted = 45
    Disconnected = 46


class PulsarException(MagnetarError):
    """Base of the exceptions that the SDK raises. `error()` returns the Result with the name of the class, or of its
    base."""

    result = Result.UnknownError

    def __init_subclass__(cls) -> None:
        cls.result = Result.__members__.get(cls.__name__, cls.result)

    def __init__(self, message: str | Result = "", msg: str | None = None, **fields: object) -> None:
        """Makes an error from a text, or, like pulsar.asyncio, from a Result and its text."""
        if isinstance(message, Result):
            self.result, message = message, msg or message.name
        super().__init__(message or self.result.name, **fields)

    def error(self) -> Result:
        """Returns the Result that a callback would get."""
        return self.result


MagnetarException = PulsarException


class UnknownError(PulsarException):
    """An error for which the SDK has no class; `__cause__` is the original error."""


class InvalidConfiguration(PulsarException, ValueError, TypeError):
    """An argument is wrong. Pulsar's client raises ValueError or TypeError then, and `except` finds both."""


class Timeout(PulsarException, TimeoutError):
    """Raised when no answer arrived in time. The outcome is unknown: a message may be stored."""


class LookupError(PulsarException):
    """Pulsar's error: the owner of a topic was not found. Not raised here."""


class ConnectError(PulsarException):
    """No broker answers, or none can serve the topic now. A retry may succeed."""


class ReadError(PulsarException):
    """Pulsar's error: a socket failed. Not raised here."""


class AuthenticationError(PulsarException):
    """Pulsar's error: the caller is not known. Not raised here."""


class AuthorizationError(PulsarException):
    """The client has no permission for this at the broker."""


class LoginRefused(AuthenticationError, ConnectError):
    """A server refuses the client's credentials, or the client has none for it. Pulsar's client raises one of the two
    base classes, depending on the protocol of its URL; a program may catch either."""


class ErrorGettingAuthenticationData(PulsarException):
    """Pulsar's error. Not raised here."""


class BrokerMetadataError(PulsarException):
    """Pulsar's error. Not raised here."""


class BrokerPersistenceError(PulsarException):
    """Too few bookies are up to store a message. A retry may succeed."""


class ChecksumError(PulsarException):
    """A stored message is damaged: its bytes are not those that were sent."""


class ConsumerBusy(PulsarException):
    """The subscription has an exclusive consumer, or consumers of another type."""


class NotConnected(PulsarException):
    """Pulsar's error. Not raised here."""


class AlreadyClosed(PulsarException):
    """The client, producer, consumer or reader is closed."""


class InvalidMessage(PulsarException, ValueError, TypeError):
    """A message, or a value for it, cannot be sent or read. ValueError and TypeError as Pulsar's schemas raise them."""


class ConsumerNotInitialized(PulsarException):
    """Pulsar's error. Not raised here."""


class ProducerNotInitialized(PulsarException):
    """Pulsar's error. Not raised here."""


class ProducerBusy(PulsarException):
    """Another producer has exclusive access to the topic, or has this name."""


class TooManyLookupRequestException(PulsarException):
    """Pulsar's error. Not raised here."""


class InvalidTopicName(PulsarException, ValueError):
    """The text is not the name of a topic."""


class InvalidUrl(PulsarException, ValueError):
    """The service URL names no broker."""


class ServiceUnitNotReady(PulsarException):
    """The topic moves to another broker. A retry may succeed."""


class OperationNotSupported(PulsarException):
    """Magnetar does not support this operation, or not in this configuration; the text says what to do."""


class ProducerBlockedQuotaExceededError(PulsarException):
    """The broker accepts no more messages now. A retry may succeed."""


class ProducerBlockedQuotaExceededException(PulsarException):
    """The backlog quota of the topic is reached, and its policy refuses messages."""


class ProducerQueueIsFull(PulsarException):
    """`max_pending_messages` messages of the producer wait for their acknowledgement: retry later, or set
    `block_if_queue_full`."""


class MessageTooBig(PulsarException):
    """The message is larger than an entry may be: set `chunking_enabled`, or send a smaller one."""


class TopicNotFound(PulsarException):
    """The topic, or its namespace or tenant, does not exist."""


class SubscriptionNotFound(PulsarException):
    """The subscription does not exist."""


class ConsumerNotFound(PulsarException):
    """Pulsar's error. Not raised here."""


class UnsupportedVersionError(PulsarException):
    """Pulsar's error. Not raised here."""


class TopicTerminated(PulsarException):
    """The topic is terminated: it accepts no message any more. Stored messages can be received."""


class CryptoError(PulsarException):
    """A message cannot be encrypted, and is not sent; or it cannot be decrypted. The text says why."""

    definite = True


class IncompatibleSchema(PulsarException):
    """The schema of a producer or consumer is not compatible with those of the topic; the text names the field."""


class ConsumerAssignError(PulsarException):
    """Pulsar's error. Not raised here."""


class CumulativeAcknowledgementNotAllowedError(PulsarException):
    """A Shared or KeyShared subscription has no order: acknowledge single messages."""


class TransactionCoordinatorNotFoundError(PulsarException):
    """Pulsar's error. Not raised here."""


class InvalidTxnStatusError(PulsarException):
    """Pulsar's error; here raised as TransactionAborted, TransactionEnded and TransactionFenced."""


class NotAllowedError(PulsarException):
    """The broker refuses the request: what it would create exists already, or the state does not allow it."""


class TransactionConflict(PulsarException):
    """The message is acknowledged already, or in another transaction: this transaction can only abort."""


class TransactionNotFound(PulsarException):
    """Pulsar's error; here raised as TransactionForgotten."""


class ProducerFenced(PulsarException):
    """Another producer took exclusive access to the topic. This one is finished."""


class MemoryBufferIsFull(PulsarException):
    """The messages without an outcome of all producers of the client use `memory_limit_bytes`."""


class Interrupted(PulsarException):
    """A blocking call was made inside a callback, where it would wait for itself; or Ctrl-C interrupted a blocking
    call (`CtrlC`)."""


class CtrlC(Interrupted, KeyboardInterrupt):
    """Ctrl-C during a blocking call. Programs for Pulsar catch `Interrupted`, others KeyboardInterrupt; a program that
    catches neither ends as with any Ctrl-C."""


class Disconnected(PulsarException):
    """The connection broke. The outcome of operations in flight is unknown."""


# ------------------------------------------------------------------------------ transactions (docs/transactions.md)
class TransactionAborted(InvalidTxnStatusError):
    """Nothing of the transaction counts: run all of it again. `reason` says why."""

    definite = True

    @property
    def reason(self) -> str:
        """Returns why it was aborted: timeout, coordinator lost, operation failed, conflict, fenced or admin; empty:
        not known."""
        return self.fields.get("reason", "")


class TransactionEnded(InvalidTxnStatusError):
    """A send, an acknowledgement or a commit was refused, because the transaction has ended or is ending."""

    definite = True


class TransactionFenced(InvalidTxnStatusError):
    """A later holder of the transaction's name took over, and nothing of this transaction counts: stop, do
    not retry."""

    definite = True


class SinkFenced(TransactionFenced):
    """Another query writes the batches of this sink: choose another sink, or adopt it; nothing was written."""


class HalfParked(InvalidTxnStatusError):
    """The half message waits for an operator (`magnetar transactions halves`); programs can neither commit it nor roll
    it back."""

    definite = True

    @property
    def reason(self) -> str:
        """Returns why the half message was parked."""
        return self.fields.get("reason", "")


class TransactionForgotten(TransactionNotFound):
    """The transaction ended so long ago that its coordinator no longer has its outcome."""

    definite = True


class DataLost(BrokerPersistenceError):
    """All replicas of an entry that is read or looked for are lost. Reading does not skip the lost entries by itself;
    an operator may order this with `magnetar topics skip-lost`. `first` and `last` are -1 if the topic cannot be
    opened."""

    @property
    def ledger(self) -> int:
        """Returns the ledger of the lost entries, as in message ids."""
        return int(self.fields.get("ledger", -1))

    @property
    def first(self) -> int:
        """Returns the first of the lost entries."""
        return int(self.fields.get("first", -1))

    @property
    def last(self) -> int:
        """Returns the last of the lost entries that is known."""
        return int(self.fields.get("last", -1))


class OutcomeUnknown(Timeout):
    """A commit got no answer, and the coordinator did not tell the outcome in time. `txn` is the id of the
    transaction."""

    @property
    def txn(self) -> str:
        """Returns the id of the transaction, for `transaction_status`."""
        return self.fields.get("txn", "")


_CLASSES: dict[Result, type[PulsarException]] = {each.result: each for each in PulsarException.__subclasses__()}

SLOTS_REFUSED = ("POLICY", "OTHER_MODE")
"""Refusals of a Key_Shared consumer that are about its slots (broker/common/refusals.py)."""

NO_TOKEN = "no_token"
"""The field of an `Unavailable` of who gives tokens, and not of a broker."""

_TRANSLATIONS: list[tuple[type[MagnetarError], type[PulsarException]]] = [
    # The first that fits, so each class comes before its base class.
    (wire_errors.InvalidName, InvalidTopicName),
    (wire_errors.MessageTooLarge, MessageTooBig),
    (wire_errors.CorruptEntry, ChecksumError),
    (wire_errors.WrongProtocol, ConnectError),
    (wire_errors.InvalidSchema, IncompatibleSchema),
    (wire_errors.InvalidRequest, InvalidConfiguration),
    (wire_errors.SubscriptionNotFound, SubscriptionNotFound),
    (wire_errors.NotFound, TopicNotFound),
    (wire_errors.ConsumerBusy, ConsumerBusy),
    (wire_errors.ProducerBusy, ProducerBusy),
    (wire_errors.ProducerFenced, ProducerFenced),
    (wire_errors.TopicTerminated, TopicTerminated),
    (wire_errors.IncompatibleSchema, IncompatibleSchema),
    (wire_errors.NotAllowed, NotAllowedError),
    (wire_errors.AlreadyExists, NotAllowedError),
    (wire_errors.Busy, NotAllowedError),
    (wire_errors.Unauthorized, AuthorizationError),
    (wire_errors.Unauthenticated, LoginRefused),
    (wire_errors.CredentialsExpired, LoginRefused),
    (wire_errors.UntrustedServer, ConnectError),
    (wire_errors.TimedOut, Timeout),
    (wire_errors.ConnectionLost, Disconnected),
    (wire_errors.NotEnoughBookies, BrokerPersistenceError),
    (wire_errors.DataLost, DataLost),
    (wire_errors.NotOwner, ServiceUnitNotReady),
    (wire_errors.BacklogQuotaExceeded, ProducerBlockedQuotaExceededException),
    (wire_errors.BackPressure, ProducerBlockedQuotaExceededError),
    (wire_errors.Unavailable, ConnectError),
    (wire_errors.OutcomeUnknown, Timeout),
    (wire_errors.TransactionAborted, TransactionAborted),
    (wire_errors.TransactionConflict, TransactionConflict),
    (wire_errors.TransactionEnded, TransactionEnded),
    (wire_errors.TransactionFenced, TransactionFenced),
    (wire_errors.TransactionForgotten, TransactionForgotten),
    (wire_errors.SinkFenced, SinkFenced),
    (wire_errors.HalfParked, HalfParked),
]


def exception_of(result: Result, message: str = "") -> PulsarException:
    """Returns the exception for a result."""
    return _CLASSES.get(result, UnknownError)(message)


def translate_error(error: BaseException, *, by_slots: bool = False) -> PulsarException:
    """Returns the SDK's exception for any error, with the error as its cause. `by_slots`: the error is that of a
    Key_Shared consumer."""
    if isinstance(error, PulsarException):
        return error
    target: type[PulsarException] = UnknownError
    for family, candidate in _TRANSLATIONS:
        if isinstance(error, family):
            target = candidate
            break
    if isinstance(error, wire_errors.Unavailable) and NO_TOKEN in error.fields:
        target = AuthenticationError
    if by_slots and isinstance(error, MagnetarError) and error.fields.get("refusal") in SLOTS_REFUSED:
        target = ConsumerAssignError
    text = error.message if isinstance(error, MagnetarError) else f"{type(error).__name__}: {error}"
    translated = target(text)
    if isinstance(error, MagnetarError):
        translated.fields = dict(error.fields)
        translated.definite, translated.retryable = error.definite, error.retryable  # type: ignore[misc]
    translated.__cause__ = error
    return translated
