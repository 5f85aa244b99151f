"""The partition to which a message goes.

A key decides by Murmur3, whatever the mode. Without a key: RoundRobin stays on one partition for a batching window and
then goes to the next (so that batches fill), or changes with each message when batching is off; UseSinglePartition
keeps the one it began with. CustomPartition asks the user's function. The first partition is chosen by chance.
"""

from __future__ import annotations

from ...proto.routing import partition_of
from ..common.enums import ClientEnum
from .backoff import Chance


class PartitionsRoutingMode(ClientEnum):
    """The partition to which a message without a key goes: always one, each in turn, or what `message_router` says."""
    UseSinglePartition = 0
    RoundRobinDistribution = 1
    CustomPartition = 2


class Router:
    """The router of one producer. `window_s`, `messages_max` and `bytes_max` are those of batching; a window of 0
    changes with each message."""

    def __init__(
        self, partitions: int, mode: PartitionsRoutingMode, rng: Chance, *,
        window_s: float, messages_max: int, bytes_max: int,
    ) -> None:  # fmt: skip
        assert partitions > 0, "a topic has at least one partition"
        self._partitions = partitions
        self._mode = mode
        self._window_s = window_s
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._current = rng.randrange(partitions)
        self._since = -float("inf")
        self._messages = 0
        self._bytes = 0

    @property
    def partitions(self) -> int:
        return self._partitions

    def grow(self, partitions: int) -> None:
        """Adds partitions; none is ever taken away."""
        assert partitions >= self._partitions, "partitions are never taken away"
        self._partitions = partitions

    def route(self, key: str | bytes | None, size: int, now: float) -> int:
        if key is not None:
            return partition_of(key, self._partitions)
        if self._mode is PartitionsRoutingMode.UseSinglePartition:
            return self._current
        full = self._messages >= self._messages_max or self._bytes + size > self._bytes_max
        if full or now - self._since >= self._window_s:
            self._current = (self._current + 1) % self._partitions
            self._since, self._messages, self._bytes = now, 0, 0
        self._messages += 1
        self._bytes += size
        return self._current

    def check(self) -> None:
        assert 0 <= self._current < self._partitions
