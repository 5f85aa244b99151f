"""The error numbers of Pulsar's protocol for our errors, chosen by how its clients react.

By the number a client retries, gives up, or reconnects. The first class in the table that fits counts, so a class comes
before its base classes.
"""

from __future__ import annotations

import logging

from ...proto import errors
from ...proto import pulsar_pb2 as pulsar

_LOG = logging.getLogger("magnetar.broker.pulsar")

_TABLE: tuple[tuple[type[errors.MagnetarError], pulsar.ServerError], ...] = (
    (errors.CorruptEntry, pulsar.ChecksumError),
    (errors.MessageTooLarge, pulsar.NotAllowedError),
    (errors.InvalidName, pulsar.InvalidTopicName),
    (errors.InvalidSchema, pulsar.IncompatibleSchema),
    (errors.InvalidRequest, pulsar.NotAllowedError),
    (errors.SubscriptionNotFound, pulsar.SubscriptionNotFound),
    (errors.NotFound, pulsar.TopicNotFound),
    (errors.ConsumerBusy, pulsar.ConsumerBusy),
    (errors.ProducerBusy, pulsar.ProducerBusy),
    (errors.Busy, pulsar.ServiceNotReady),
    (errors.ProducerFenced, pulsar.ProducerFenced),
    (errors.TopicTerminated, pulsar.TopicTerminatedError),
    (errors.IncompatibleSchema, pulsar.IncompatibleSchema),
    (errors.NotAllowed, pulsar.NotAllowedError),
    (errors.TransactionConflict, pulsar.TransactionConflict),
    (errors.TransactionForgotten, pulsar.TransactionNotFound),
    (errors.TransactionAborted, pulsar.InvalidTxnStatus),
    (errors.TransactionEnded, pulsar.InvalidTxnStatus),
    (errors.TransactionFenced, pulsar.InvalidTxnStatus),
    (errors.BacklogQuotaExceeded, pulsar.ProducerBlockedQuotaExceededException),
    (errors.Unauthenticated, pulsar.AuthenticationError),
    (errors.CredentialsExpired, pulsar.AuthenticationError),
    (errors.Unauthorized, pulsar.AuthorizationError),
    (errors.DataLost, pulsar.PersistenceError),
    (errors.Unavailable, pulsar.ServiceNotReady),
    (errors.BadVersion, pulsar.MetadataError),
    (errors.SessionExpired, pulsar.ServiceNotReady),
)


def pulsar_error_number(error: errors.MagnetarError) -> pulsar.ServerError:
    for kind, number in _TABLE:
        if isinstance(error, kind):
            return number
    return pulsar.UnknownError


def ensure_magnetar_error(error: Exception) -> errors.MagnetarError:
    """Returns the error for the client. An unexpected exception is logged and becomes InternalError, so that the client
    gets an answer."""
    if isinstance(error, errors.MagnetarError):
        return error
    _LOG.error("a request of a client failed", exc_info=error)
    return errors.InternalError(f"the request failed: {type(error).__name__}")
