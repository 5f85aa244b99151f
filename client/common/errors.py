"""Results and exceptions of the SDK: one class per `Result`, with the names of `pulsar-client`.

    try:
        producer.send(b"…")
    except magnetar.Timeout:          # unknown: it may be stored
        …
    except magnetar.PulsarException as error:
        print(error.error(), error.definite, error.retryable, error.__cause__)

Each of these exceptions is a `MagnetarError` too. As programs for Pulsar's client expect it, `Timeout` is also Python's
TimeoutError, and an exception for a wrong argument is also a ValueError and a TypeError. Errors of a server and of
`runtime/` are translated here (`translate_error`) and nowhere else; the original error is `__cause__`, and `definite`
and `retryable` are copied from it.

Also in this file: `ClientEnum`, the base class of the SDK's enums."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from enum import Enum, IntEnum
from typing import TypeVar

from ...proto import errors as wire_errors
from ...proto.errors import MagnetarError

# --------------------------------------------------------------------------------------------------------- enums
# Enums of the SDK: numbers, as on the wire, which print as Pulsar's do.


class ClientEnum(IntEnum):
    """Base class of the SDK's enums: a member prints as `CompressionType.LZ4`, not as its number."""

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
    "NoMessageAvailable",
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
    """The outcome of an operation, as callbacks get it: Ok or a kind of error. The numbers are those of Pulsar's
    client."""

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
    """Base class of the exceptions that the SDK raises. `error()` returns the Result that has the name of the
    exception's class, or of its nearest base class with such a Result."""

    result = Result.UnknownError

    def __init_subclass__(cls) -> None:
        cls.result = Result.__members__.get(cls.__name__, cls.result)

    def __init__(self, message: str | Result = "", msg: str | None = None, **fields: object) -> None:
        """Makes an error from its text, or, like pulsar.asyncio, from a Result (`message`) and its text (`msg`).
        `fields`: details of the error, by name, which are in `fields`."""
        if isinstance(message, Result):
            self.result, message = message, msg or message.name
        super().__init__(message or self.result.name, **fields)

    def error(self) -> Result:
        """Returns the Result of this exception, which a callback gets for the same failure."""
        return self.result


MagnetarException = PulsarException


class UnknownError(PulsarException):
    """Raised for an error for which the SDK has no class; `__cause__` is the original error."""


class InvalidConfiguration(PulsarException, ValueError, TypeError):
    """Raised when an argument is wrong. It is a ValueError and a TypeError, too, because Pulsar's client raises these,
    so an `except` clause of either kind catches it."""


class Timeout(PulsarException, TimeoutError):
    """Raised when no answer arrived in time. The outcome is unknown: a message may be stored."""


class NoMessageAvailable(Timeout):
    """Raised by `receive(now=True)` when the brokers have no message for the consumer. `end_indexes`: topic → an index,
    below which the topic had no message left for this consumer. `reasons`: topic → why it had none, as text."""

    definite = True
    retryable = True

    def __init__(
        self, message: str = "", end_indexes: Mapping[str, int] | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.end_indexes = dict(end_indexes or {})
        self.reasons = dict(reasons or {})


class LookupError(PulsarException):
    """An error class of Pulsar's client, for a topic whose owner was not found. Magnetar's client never raises it."""


class ConnectError(PulsarException):
    """Raised when no broker answers, or no broker can serve the topic now. A retry may succeed."""


class ReadError(PulsarException):
    """An error class of Pulsar's client, for a socket that failed. Magnetar's client never raises it."""


class AuthenticationError(PulsarException):
    """Raised when the client could not get a token from its OAuth 2.0 issuer; and, as its subclass LoginRefused, when a
    server refuses the credentials."""


class AuthorizationError(PulsarException):
    """Raised when the broker does not permit this operation to the client."""


class LoginRefused(AuthenticationError, ConnectError):
    """Raised when a server refuses the client's credentials, or the client has no credentials for it. Pulsar's client
    raises one of the two base classes, depending on the protocol of its URL; a program may catch either."""


class ErrorGettingAuthenticationData(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class BrokerMetadataError(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class BrokerPersistenceError(PulsarException):
    """Raised when a topic cannot be opened because too few bookies take writes. A retry may succeed."""


class ChecksumError(PulsarException):
    """Raised when a stored message is damaged: its bytes differ from those that were sent."""


class ConsumerBusy(PulsarException):
    """Raised when a consumer cannot join a subscription: the subscription has an exclusive consumer, consumers of
    another type or with other settings (such as `filter` or `isolation`), or the maximum of consumers."""


class NotConnected(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class AlreadyClosed(PulsarException):
    """Raised by an operation of a client, producer, consumer or reader that is closed."""


class InvalidMessage(PulsarException, ValueError, TypeError):
    """Raised when a message, or a value for a message, cannot be sent or read. It is a ValueError and a TypeError, too,
    because the schemas of Pulsar's client raise these."""


class ConsumerNotInitialized(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class ProducerNotInitialized(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class ProducerBusy(PulsarException):
    """Raised when a producer cannot be opened: another producer has exclusive access to the topic or has the same name,
    or the topic has its maximum of producers."""


class TooManyLookupRequestException(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class InvalidTopicName(PulsarException, ValueError):
    """Raised when a text is not a valid name of a topic."""


class InvalidUrl(PulsarException, ValueError):
    """Raised when a text is not a valid service URL: it does not say where a broker is."""


class ServiceUnitNotReady(PulsarException):
    """Raised while a topic moves to another broker, or cannot be used yet. A retry may succeed."""


class OperationNotSupported(PulsarException):
    """Raised when Magnetar does not support an operation, or not in this configuration; the text says what to do
    instead."""


class ProducerBlockedQuotaExceededError(PulsarException):
    """Raised when the broker accepts no more messages for a topic now. A retry may succeed."""


class ProducerBlockedQuotaExceededException(PulsarException):
    """Raised when the backlog quota of the topic is reached and the policy of the quota is to refuse messages."""


class ProducerQueueIsFull(PulsarException):
    """Raised when `max_pending_messages` messages of the producer wait for their acknowledgement: retry later, or set
    `block_if_queue_full`."""


class MessageTooBig(PulsarException):
    """Raised when a message is larger than an entry may be: set `chunking_enabled`, or send a smaller message."""


class TopicNotFound(PulsarException):
    """Raised when the topic, or its namespace or tenant, does not exist."""


class SubscriptionNotFound(PulsarException):
    """Raised when the subscription does not exist."""


class ConsumerNotFound(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class UnsupportedVersionError(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class TopicTerminated(PulsarException):
    """Raised when a message is sent to a terminated topic, which accepts no message any more. Stored messages can be
    received."""


class CryptoError(PulsarException):
    """Raised when a message cannot be encrypted, and is not sent; or when a message cannot be decrypted. The text says
    why."""

    definite = True


class IncompatibleSchema(PulsarException):
    """Raised when the schema of a producer or consumer is not compatible with the schemas of the topic; the text names
    the field that differs."""


class ConsumerAssignError(PulsarException):
    """Raised when a Key_Shared consumer is refused, because its policy differs from that of the subscription's other
    consumers."""


class CumulativeAcknowledgementNotAllowedError(PulsarException):
    """Raised by a cumulative acknowledgement, or by `Consumer.commit`, on a Shared or KeyShared subscription, which has
    no order of messages, or of a consumer with `debounce`: acknowledge single messages there."""


class TransactionCoordinatorNotFoundError(PulsarException):
    """An error class of Pulsar's client. Magnetar's client never raises it."""


class InvalidTxnStatusError(PulsarException):
    """Raised when the state of a transaction does not allow the operation; mostly as its subclass TransactionAborted,
    TransactionEnded or TransactionFenced."""


class NotAllowedError(PulsarException):
    """Raised when the broker refuses a request, because the thing to create exists already, or the present state does
    not allow the request."""


class TransactionConflict(PulsarException):
    """Raised when a message is acknowledged in a transaction, but is acknowledged already, or in another transaction:
    this transaction can only be aborted."""


class TransactionNotFound(PulsarException):
    """An error class of Pulsar's client, for a transaction that the coordinator does not know. Magnetar's client raises
    its subclass TransactionForgotten."""


class ProducerFenced(PulsarException):
    """Raised by a producer when another producer took exclusive access to its topic. The fenced producer cannot be used
    any more."""


class MemoryBufferIsFull(PulsarException):
    """Raised when a message would exceed `memory_limit_bytes`, the memory for the messages without an outcome of all
    producers of the client."""


class Interrupted(PulsarException):
    """Raised when a blocking call is made inside a callback, where the call would wait for itself; and, as its subclass
    `CtrlC`, when Ctrl-C interrupts a blocking call."""


class CtrlC(Interrupted, KeyboardInterrupt):
    """Raised when Ctrl-C is pressed during a blocking call. Programs for Pulsar catch `Interrupted`, other programs
    KeyboardInterrupt; a program that catches neither ends as with any Ctrl-C."""


class Disconnected(PulsarException):
    """Raised when the connection broke. The outcome of operations in flight is unknown."""


# ------------------------------------------------------------------------------ transactions (docs/transactions.md)
class TransactionAborted(InvalidTxnStatusError):
    """Raised when a transaction was aborted: none of its messages and acknowledgements counts, and the program may run
    all of it again. `reason` says why."""

    definite = True

    @property
    def reason(self) -> str:
        """Returns the reason of the abort: timeout, coordinator lost, operation failed, conflict, fenced or admin; an
        empty text if the reason is not known."""
        return self.fields.get("reason", "")


class TransactionEnded(InvalidTxnStatusError):
    """Raised when a send, an acknowledgement or a commit is refused, because its transaction has ended or is ending."""

    definite = True


class TransactionFenced(InvalidTxnStatusError):
    """Raised when a later program took over the transaction's name: none of this transaction's messages and
    acknowledgements counts. Stop the program, and do not retry."""

    definite = True


class SinkFenced(TransactionFenced):
    """Raised when another query writes the batches of this sink: nothing was written. Choose another sink, or take the
    sink over with `adopt`."""


class HalfParked(InvalidTxnStatusError):
    """Raised when a half message is parked: an operator must decide about it (`magnetar transactions halves`), and
    programs can neither commit it nor roll it back."""

    definite = True

    @property
    def reason(self) -> str:
        """Returns the reason why the half message was parked, as text."""
        return self.fields.get("reason", "")


class TransactionForgotten(TransactionNotFound):
    """Raised when a transaction ended so long ago that its coordinator no longer knows whether it was committed."""

    definite = True


class DataLost(BrokerPersistenceError):
    """Raised when all replicas of an entry that is read or searched for are lost. Reading does not skip the lost
    entries by itself; an operator may order this with `magnetar topics skip-lost`. `first` and `last` are -1 if the
    topic cannot be opened."""

    @property
    def ledger(self) -> int:
        """Returns the id of the ledger that contained the lost entries, as in message ids; -1 if it is not known."""
        return int(self.fields.get("ledger", -1))

    @property
    def first(self) -> int:
        """Returns the id of the first lost entry; -1 if the topic cannot be opened."""
        return int(self.fields.get("first", -1))

    @property
    def last(self) -> int:
        """Returns the id of the last entry that is known to be lost; -1 if the topic cannot be opened."""
        return int(self.fields.get("last", -1))


class OutcomeUnknown(Timeout):
    """Raised when a commit got no answer, and the coordinator did not report the outcome in time either. `txn` is the
    id of the transaction."""

    @property
    def txn(self) -> str:
        """Returns the id of the transaction, which can be passed to `transaction_status`; empty if it is not known."""
        return self.fields.get("txn", "")


_CLASSES: dict[Result, type[PulsarException]] = {each.result: each for each in PulsarException.__subclasses__()}

KEY_RANGE_REFUSALS = ("POLICY", "OTHER_MODE")
"""Codes with which a broker refuses a Key_Shared consumer because of its key ranges (broker/common/refusals.py)."""

NO_TOKEN_FIELD = "no_token"
"""Name of a field of the error `Unavailable`: set if the issuer of tokens is unavailable, and not a broker."""

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


def make_exception_for_result(result: Result, message: str = "") -> PulsarException:
    """Returns a new exception of the class that belongs to `result`, with the text `message`; an UnknownError if no
    class does."""
    return _CLASSES.get(result, UnknownError)(message)


def translate_error(error: BaseException, *, by_slots: bool = False) -> PulsarException:
    """Returns the SDK's exception for any error, with that error as its `__cause__`; UnknownError if there is no class
    for it. Returns an exception of the SDK unchanged. `by_slots`: whether the error occurred in a Key_Shared consumer,
    so that a refusal because of its key ranges becomes ConsumerAssignError."""
    if isinstance(error, PulsarException):
        return error
    target: type[PulsarException] = UnknownError
    for family, candidate in _TRANSLATIONS:
        if isinstance(error, family):
            target = candidate
            break
    if isinstance(error, wire_errors.Unavailable) and NO_TOKEN_FIELD in error.fields:
        target = AuthenticationError
    if by_slots and isinstance(error, MagnetarError) and error.fields.get("refusal") in KEY_RANGE_REFUSALS:
        target = ConsumerAssignError
    text = error.message if isinstance(error, MagnetarError) else f"{type(error).__name__}: {error}"
    translated = target(text)
    if isinstance(error, MagnetarError):
        translated.fields = dict(error.fields)
        translated.definite, translated.retryable = error.definite, error.retryable  # type: ignore[misc]
    translated.__cause__ = error
    return translated


T = TypeVar("T")


async def run_translating_errors(awaitable: Awaitable[T]) -> T:
    """Awaits `awaitable` and returns its result. Raises the errors of servers and of the runtime as exceptions of the
    SDK (`translate_error`), and any other exception unchanged."""
    try:
        return await awaitable
    except PulsarException:
        raise
    except MagnetarError as error:
        raise translate_error(error) from error
