"""The times at which a subscription or a consumer was last active: for statistics alone, noted once for each batch and
frame."""

from __future__ import annotations


class Activity:
    """Milliseconds since the epoch, by the wall clock of this broker; 0: not since the topic was loaded here."""

    __slots__ = ("acked_ms", "consumed_ms", "expired_ms", "flow_ms", "marked_ms")

    def __init__(self) -> None:
        self.flow_ms = 0  # a consumer asked for messages
        self.consumed_ms = 0  # messages were handed to a consumer
        self.acked_ms = 0
        self.marked_ms = 0  # everything up to a later message was acknowledged
        self.expired_ms = 0  # messages were given up for their age
