"""The errors of an outbox and its relay beyond the SDK's. Each text says what is wrong and what to do.

`retryable`: the relay tries again by itself, and raises nothing. The others end it: a person, or the program that
started it, has to act. Guard: tests/client/outbox/test_databases.py.
"""

from __future__ import annotations

from ...proto.errors import MagnetarError


class OutboxError(MagnetarError):
    """The base of the errors of an outbox."""

    definite = True


class OutboxTableMissing(OutboxError):
    """The database does not have the tables of the outbox, or another schema is looked at."""


class OutboxColumnsMissing(OutboxError):
    """A table of that name exists, and columns of the outbox are not in it."""


class OutboxReadOnly(OutboxError):
    """The database, or the role in it, may not write: a relay claims and deletes rows."""


class OutboxUnreachable(OutboxError):
    """The database does not answer, or broke a connection. The relay tries again; whether a transaction took place is
    found out by the next one."""

    definite = False
    retryable = True


class DeduplicationOff(OutboxError):
    """The policy `deduplication` does not apply to a topic: what is sent again would be stored twice."""


class RelayFenced(OutboxError):
    """A newer relay has this shard. This one sends nothing more and must not be started again while that one runs."""


class ShardsDiffer(OutboxError):
    """The outbox is divided into another number of shards than this relay was started with."""


class OutboxBehind(OutboxError):
    """A topic has sequence ids of this outbox that the database does not know: it was restored from a backup, or made
    anew, or another database uses the same name."""


class SequencesForgotten(OutboxError):
    """A topic does not know sequence ids that it confirmed, and rows are claimed that it may have stored: sent again
    they might be there twice."""
