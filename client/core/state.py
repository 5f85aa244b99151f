"""The states of one partition's producer or consumer."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """The state of one partition's producer or consumer."""

    OPENING = auto()
    CONNECTED = auto()
    RECONNECTING = auto()
    CLOSING = auto()  # a producer that waits until the broker has forgotten it
    CLOSED = auto()
