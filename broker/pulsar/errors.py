"""Pulsar's error numbers of our errors, as its clients rely on them.

A client tries again, gives up, or opens its connection anew by the number. The first class that fits counts, so a class
comes before those that it is derived from.
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


def number_of(error: errors.MagnetarError) -> pulsar.ServerError:
    for kind, number in _TABLE:
        if isinstance(error, kind):
            return number
    return pulsar.UnknownError


def typed(error: Exception) -> errors.MagnetarError:
    """The error for the client. A fault of the broker is logged: the caller must not wait for ever."""
    if isinstance(error, errors.MagnetarError):
        return error
    _LOG.error("a request of a client failed", exc_info=error)
    return errors.InternalError(f"the request failed: {type(error).__name__}")
