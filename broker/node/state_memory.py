"""The memory of what cannot be dropped while it exists: topics, subscriptions with their holes and delayed messages,
connections.

It is not a queue: nothing can push it back. So `state_memory_bytes` is its share of the broker's memory, and what it
takes beyond comes from the caches, which can be read again from bookies: first from that of catch-up reads, then from
the tail. Holes of all subscriptions together have that share too: past it those that have most get nothing new until
consumers acknowledge, as one past `cursor_memory_bytes` does (subscription/core/dispatch.py). When the caches are empty
and the state is still larger, the log says how much memory the process needs.

It is measured every LOOK_S, in slices of the loop; the costs of what cannot be measured are constants. 0: not at all.
Guards: tests/broker/node/test_state_memory.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...runtime.clock import Clock
from ...runtime.memory.budget import CallerMemory
from ..common.config import BrokerConfig
from ..common.turns import Turns
from ..log.cache import TailCache
from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker")

LOOK_S = 2.0
TOPIC_BYTES = 7 << 10
SUBSCRIPTION_BYTES = 4 << 10
CLIENT_BYTES = 1 << 10
"""Memory of a producer or consumer. With the two above: 12 KB for a topic with one of each (`python -m benchmarks
topics`)."""
CONNECTION_BYTES = 20 << 10
"""Memory of a connection (docs/performance.md)."""
HOLES_BYTES_MIN = 64 << 10
"""Memory for holes that a subscription may have in any case, however many there are: 400,000 acknowledgements in a row
of every second entry."""
STEP_BYTES = 16 << 20
"""Most bytes that the caches lose in one look: to drop the entries takes the loop a millisecond or two."""


class Room(NamedTuple):
    """Bytes of the caches."""

    tail: int
    recent: int
    lacking: int  # that the state takes beyond all shares


def room_for_caches(state_bytes: int, config: BrokerConfig) -> Room:
    over = max(0, state_bytes - config.state_memory_bytes)
    recent = max(0, config.catch_up_cache_bytes - over)
    over -= config.catch_up_cache_bytes - recent
    tail = max(0, config.cache_bytes - over)
    return Room(tail, recent, over - (config.cache_bytes - tail))


def holes_max(sizes: Sequence[int], limit: int, own_max: int) -> int:
    """Returns the most memory for the holes of one subscription: `own_max`; or, if those of `sizes` are past `limit`
    together, so much that with the smaller ones, and with all others cut to it, the limit is kept."""
    left, several = limit, sorted(sizes)
    for at, size in enumerate(several):
        fair = left // (len(several) - at)
        if size > fair:
            return max(HOLES_BYTES_MIN, min(own_max, fair))
        left -= size
    return own_max


class StateMemory:
    """Measures the state of a broker, and gives the caches what it leaves."""

    def __init__(self, config: BrokerConfig, clock: Clock, cache: TailCache, memory: CallerMemory) -> None:
        self._config = config
        self._clock = clock
        self._cache = cache
        self._memory = memory
        self._lacked = False
        self.bytes = 0  # at the last look

    async def look(self, loaded: Iterable[Topic]) -> None:
        if not self._config.state_memory_bytes:
            return
        topics = list(loaded)
        total = self._memory.connections * CONNECTION_BYTES
        holes: list[int] = []
        subscriptions = [each for topic in topics for each in topic.subscriptions.values()]
        turns = Turns(self._clock)
        for topic in topics:
            total += TOPIC_BYTES + CLIENT_BYTES * len(topic.producers)
            for subscription in list(topic.subscriptions.values()):
                total += SUBSCRIPTION_BYTES + CLIENT_BYTES * len(subscription.consumers)
                if subscription.delayed is not None:
                    total += subscription.delayed.core.memory_bytes
                if size := subscription.cursor.memory_bytes:
                    holes.append(size)
            if turns.over:
                await turns.next()
        self.bytes = total + sum(holes)
        most = holes_max(holes, self._config.state_memory_bytes, self._config.cursor_memory_bytes)
        for subscription in subscriptions:
            before, subscription.dispatcher.memory_bytes_max = subscription.dispatcher.memory_bytes_max, most
            if most > before and subscription.consumers:
                subscription.pump.wake()
            if turns.over:
                await turns.next()
        self._resize(room_for_caches(self.bytes, self._config))

    def _resize(self, room: Room) -> None:
        tail, recent = self._cache, self._cache.recent
        tail.resize(max(room.tail, min(tail.bytes_max, tail.bytes) - STEP_BYTES))
        if recent is not None:
            recent.resize(max(room.recent, min(recent.bytes_max, recent.bytes) - STEP_BYTES))
        if bool(room.lacking) != self._lacked:
            self._lacked = bool(room.lacking)
            if self._lacked:
                _LOG.warning(
                    "topics, subscriptions and connections take %d bytes, %d more than state_memory_bytes and the "
                    "caches together: give the process that much more memory_bytes", self.bytes, room.lacking,
                )  # fmt: skip
