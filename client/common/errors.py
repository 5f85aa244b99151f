"""Results and exceptions of the SDK: one class per `Result`, with the names of `pulsar-client`.

    try:
        producer.send(b"…")
    except magnetar.Timeout:          # unknown: it may be stored
        …
    except magnetar.PulsarException as error:
        print(error.error(), error.definite, error.retryable, error.__cause__)

Every one is a `MagnetarError` too; `Timeout` is Python's TimeoutError as well, and what says that an argument is wrong
is a ValueError and a TypeError, as programs that were written for Pulsar's client expect it. What came from a server or
from `runtime/` is translated here (`translate`) and nowhere else; the original stays as `__cause__`, and `definite` and
`retryable` are the original's.
"""

from __future__ import annotations

from enum import IntEnum

from ...proto import errors as wire_errors
from ...proto.errors import MagnetarError

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
    "Disconnected",
    "ErrorGettingAuthenticationData",
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
    "SubscriptionNotFound",
    "Timeout",
    "TooManyLookupRequestException",
    "TopicNotFound",
    "TopicTerminated",
    "TransactionConflict",
    "TransactionCoordinatorNotFoundError",
    "TransactionNotFound",
    "UnknownError",
    "UnsupportedVersionError",
]


class Result(IntEnum):
    """Outcomes as callbacks get them; the numbers are Pulsar's."""

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
    """Base of what the SDK raises. `error()` is its Result."""

    result = Result.UnknownError

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message or self.result.name, **fields)

    def error(self) -> Result:
        return self.result


MagnetarException = PulsarException


class UnknownError(PulsarException):
    result = Result.UnknownError


class InvalidConfiguration(PulsarException, ValueError, TypeError):
    """An argument is wrong. Pulsar's client raises ValueError or TypeError then, and `except` finds both."""

    result = Result.InvalidConfiguration


class Timeout(PulsarException, TimeoutError):
    result = Result.Timeout


class LookupError(PulsarException):
    result = Result.LookupError


class ConnectError(PulsarException):
    result = Result.ConnectError


class ReadError(PulsarException):
    result = Result.ReadError


class AuthenticationError(PulsarException):
    result = Result.AuthenticationError


class AuthorizationError(PulsarException):
    result = Result.AuthorizationError


class ErrorGettingAuthenticationData(PulsarException):
    result = Result.ErrorGettingAuthenticationData


class BrokerMetadataError(PulsarException):
    result = Result.BrokerMetadataError


class BrokerPersistenceError(PulsarException):
    result = Result.BrokerPersistenceError


class ChecksumError(PulsarException):
    result = Result.ChecksumError


class ConsumerBusy(PulsarException):
    result = Result.ConsumerBusy


class NotConnected(PulsarException):
    result = Result.NotConnected


class AlreadyClosed(PulsarException):
    result = Result.AlreadyClosed


class InvalidMessage(PulsarException, ValueError, TypeError):
    """A message, or a value for it, cannot be sent or read. ValueError and TypeError as Pulsar's schemas raise them."""

    result = Result.InvalidMessage


class ConsumerNotInitialized(PulsarException):
    result = Result.ConsumerNotInitialized


class ProducerNotInitialized(PulsarException):
    result = Result.ProducerNotInitialized


class ProducerBusy(PulsarException):
    result = Result.ProducerBusy


class TooManyLookupRequestException(PulsarException):
    result = Result.TooManyLookupRequestException


class InvalidTopicName(PulsarException, ValueError):
    result = Result.InvalidTopicName


class InvalidUrl(PulsarException, ValueError):
    result = Result.InvalidUrl


class ServiceUnitNotReady(PulsarException):
    result = Result.ServiceUnitNotReady


class OperationNotSupported(PulsarException):
    result = Result.OperationNotSupported


class ProducerBlockedQuotaExceededError(PulsarException):
    result = Result.ProducerBlockedQuotaExceededError


class ProducerBlockedQuotaExceededException(PulsarException):
    result = Result.ProducerBlockedQuotaExceededException


class ProducerQueueIsFull(PulsarException):
    result = Result.ProducerQueueIsFull


class MessageTooBig(PulsarException):
    result = Result.MessageTooBig


class TopicNotFound(PulsarException):
    result = Result.TopicNotFound


class SubscriptionNotFound(PulsarException):
    result = Result.SubscriptionNotFound


class ConsumerNotFound(PulsarException):
    result = Result.ConsumerNotFound


class UnsupportedVersionError(PulsarException):
    result = Result.UnsupportedVersionError


class TopicTerminated(PulsarException):
    result = Result.TopicTerminated


class CryptoError(PulsarException):
    result = Result.CryptoError


class IncompatibleSchema(PulsarException):
    result = Result.IncompatibleSchema


class ConsumerAssignError(PulsarException):
    result = Result.ConsumerAssignError


class CumulativeAcknowledgementNotAllowedError(PulsarException):
    result = Result.CumulativeAcknowledgementNotAllowedError


class TransactionCoordinatorNotFoundError(PulsarException):
    result = Result.TransactionCoordinatorNotFoundError


class InvalidTxnStatusError(PulsarException):
    result = Result.InvalidTxnStatusError


class NotAllowedError(PulsarException):
    result = Result.NotAllowedError


class TransactionConflict(PulsarException):
    result = Result.TransactionConflict


class TransactionNotFound(PulsarException):
    result = Result.TransactionNotFound


class ProducerFenced(PulsarException):
    result = Result.ProducerFenced


class MemoryBufferIsFull(PulsarException):
    result = Result.MemoryBufferIsFull


class Interrupted(PulsarException):
    result = Result.Interrupted


class Disconnected(PulsarException):
    result = Result.Disconnected


_CLASSES: dict[Result, type[PulsarException]] = {each.result: each for each in PulsarException.__subclasses__()}

_TRANSLATIONS: list[tuple[type[MagnetarError], type[PulsarException]]] = [
    # The first that fits; so the special ones stand before their families.
    (wire_errors.InvalidName, InvalidTopicName),
    (wire_errors.MessageTooLarge, MessageTooBig),
    (wire_errors.CorruptEntry, ChecksumError),
    (wire_errors.WrongProtocol, ConnectError),
    (wire_errors.InvalidRequest, InvalidConfiguration),
    (wire_errors.SubscriptionNotFound, SubscriptionNotFound),
    (wire_errors.NotFound, TopicNotFound),
    (wire_errors.ConsumerBusy, ConsumerBusy),
    (wire_errors.ProducerBusy, ProducerBusy),
    (wire_errors.ProducerFenced, ProducerFenced),
    (wire_errors.TopicTerminated, TopicTerminated),
    (wire_errors.NotAllowed, NotAllowedError),
    (wire_errors.AlreadyExists, NotAllowedError),
    (wire_errors.Busy, NotAllowedError),
    (wire_errors.Unauthorized, AuthorizationError),
    (wire_errors.TimedOut, Timeout),
    (wire_errors.ConnectionLost, Disconnected),
    (wire_errors.NotEnoughBookies, BrokerPersistenceError),
    (wire_errors.NotOwner, ServiceUnitNotReady),
    (wire_errors.BacklogQuotaExceeded, ProducerBlockedQuotaExceededException),
    (wire_errors.BackPressure, ProducerBlockedQuotaExceededError),
    (wire_errors.Unavailable, ConnectError),
    (wire_errors.OutcomeUnknown, Timeout),
]


def exception_of(result: Result, message: str = "") -> PulsarException:
    """The exception of a result."""
    return _CLASSES.get(result, UnknownError)(message)


def translate(error: BaseException) -> PulsarException:
    """The SDK's exception for any error, with the error as its cause."""
    if isinstance(error, PulsarException):
        return error
    target: type[PulsarException] = UnknownError
    for family, candidate in _TRANSLATIONS:
        if isinstance(error, family):
            target = candidate
            break
    text = error.message if isinstance(error, MagnetarError) else f"{type(error).__name__}: {error}"
    translated = target(text)
    if isinstance(error, MagnetarError):
        translated.fields = dict(error.fields)
        translated.definite, translated.retryable = error.definite, error.retryable  # type: ignore[misc]
    translated.__cause__ = error
    return translated
