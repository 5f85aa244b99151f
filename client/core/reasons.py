"""Errors of a broker: which of them finish a producer or a consumer, and why messages are not acknowledged.

A broker that cannot store sends an error and the producer tries again, until the message's time is over; then the user
wants the reason and not only "timeout". Each kind of reason is said at once, and again when SAY_EVERY_S have passed.
An acknowledgement ends it: what was wrong before says nothing about later messages.
Guard: tests/client/core/test_cores.py.
"""

from __future__ import annotations

from math import inf

from ...proto.errors import (
    ConnectionLost,
    DataLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    ProducerFenced,
    TimedOut,
    TopicTerminated,
    Unauthorized,
)

FINAL = (NotAllowed, NotFound, Unauthorized, InvalidRequest, DataLost)
"""Errors after which opening it again is pointless."""
SEALED = (ProducerFenced, TopicTerminated)
PRODUCER_FINAL = (*SEALED, *FINAL)
_ROUTINE = (ConnectionLost, TimedOut, NotOwner, *PRODUCER_FINAL)
"""Errors of a topic's move or a broker's restart, or that finish the producer: no warning is due."""

SAY_EVERY_S = 60.0


class ErrorLogThrottle:
    """Limits the log lines of one producer. `last`: why messages are not acknowledged; empty: not known. An
    acknowledgement clears it."""

    def __init__(self) -> None:
        self.last = ""
        self._said: dict[str, float] = {}  # by kind, which is the name of an error class: bounded

    def note(self, error: MagnetarError, now: float) -> str | None:
        """Notes an error that the broker gave; returns what to log now, if anything. A lost connection says nothing."""
        if isinstance(error, ConnectionLost | TimedOut):
            return None
        kind = type(error).__name__
        self.last = f"the broker said: {kind}: {error.message}"
        if now - self._said.get(kind, -inf) < SAY_EVERY_S:
            return None
        self._said[kind] = now
        return None if isinstance(error, _ROUTINE) else self.last
