"""The values that a dispatcher returns: what it wants to read, and what it hands out."""

from __future__ import annotations

from typing import NamedTuple

from ....proto.names import Position
from .policies.policy import Entry, Member


class DispatchLimits(NamedTuple):
    """The limits of unacknowledged messages; 0: none."""

    unacked_consumer: int
    unacked_subscription: int


NO_LIMITS = DispatchLimits(0, 0)
ALL_TIME = 1 << 63
"""A time of day at which every entry is due."""


class Read(NamedTuple):
    """Reads from this position on."""

    position: Position


class ReplayRange(NamedTuple):
    """Reads these entries again, in this order."""

    positions: tuple[Position, ...]


class Delivery(NamedTuple):
    """An entry for a consumer, with the batch indexes that are acknowledged."""

    member: Member
    entry: Entry
    redelivery_count: int
    acked_indexes: list[int]
