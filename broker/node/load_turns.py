"""Limits how many topics a broker loads at a time, and decides which come first.

After a broker died, another one is asked for hundreds of its topics in the same second. Loading a topic fences, reads
and closes ledgers. Loading all at once is slower than one after the other, and every client waits for the last.

    async with turns.make_load_turn(name):    waits until it is the topic's turn
    turns.prioritize_topic_load(name)         a producer waits: the topic comes before those without a producer

At most `at_once` topics have a turn, in the order of their arrival. A turn lasts until the load has ended, and at most
`load_turn_timeout_s`. After that, a topic whose bookies do not answer continues to load without a turn, and delays no
other topic. No load is refused. `load_turn_timeout_s` is TURN_INTERVAL_S, or twice the usual time of a successful load
if that is more. (With slow disks, shorter turns would end before their loads and admit ever more topics, until none is
loaded in time.) Guards: tests/broker/node/test_load_turns.py.

Also in this file, below its heading: the memory of the broker's state, which cannot be dropped while the state exists
(state_memory).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...runtime.alarm import EventLoopSlices
from ...runtime.budget import CallerMemory
from ...runtime.clock import Clock
from ..common.config import BrokerConfig
from ..log.cache import TailCache
from ..topic.topic import Topic

TURN_INTERVAL_S, TURN_INTERVAL_S_MAX = 1.0, 10.0
"""Bounds of `load_turn_timeout_s`: a load takes some milliseconds when its bookies answer, and clients wait for 30
s."""
LOAD_TIME_SMOOTHING_DIVISOR = 8
"""The usual load time moves towards that of a quicker load by this fraction (1 / LOAD_TIME_SMOOTHING_DIVISOR) of the
difference; that of a slower load becomes the usual time at once."""


class TopicLoadQueue:
    """Limits how many topics are loaded at the same time: other loads wait in a queue for their turn. Topics for which
    a producer waits come first. `at_once`: the number of turns."""

    def __init__(self, at_once: int, clock: Clock) -> None:
        self._clock = clock
        self._left = at_once
        self._first: dict[str, asyncio.Future[None]] = {}  # waiting topics for which a producer waits
        self._others: dict[str, asyncio.Future[None]] = {}
        self._hurried: set[str] = set()  # topics for which a producer waits, and that do not wait for a turn yet
        self._usual_s = 0.0  # usual time of a load that succeeds

    def __len__(self) -> int:
        """Returns the number of topics that wait for their turn."""
        return len(self._first) + len(self._others)

    @property
    def load_turn_timeout_s(self) -> float:
        """Returns the seconds after which the turn of a load ends even if the load has not ended, so that the next
        topic can be loaded: from TURN_INTERVAL_S to TURN_INTERVAL_S_MAX."""
        return min(max(TURN_INTERVAL_S, 2 * self._usual_s), TURN_INTERVAL_S_MAX)

    def prioritize_topic_load(self, name: str) -> None:
        """Moves the load of a topic before the loads for which no producer waits, whether the load waits already or
        will wait later. `withdraw_load_priority` must be called afterwards."""
        waiting = self._others.pop(name, None)
        if waiting is not None:
            self._first[name] = waiting
        elif name not in self._first:
            self._hurried.add(name)

    def withdraw_load_priority(self, name: str) -> None:
        """Undoes `prioritize_topic_load` for a topic. Called when the topic is loaded, or will not be loaded."""
        self._hurried.discard(name)

    def make_load_turn(self, name: str) -> _Turn:
        """Returns an async context manager: on entry it waits for the turn of the topic; on exit, or after
        `load_turn_timeout_s`, the turn ends."""
        return _Turn(self, name)

    async def wait_turn(self, name: str) -> float:
        """Waits until the topic may be loaded. Returns the monotonic time (in seconds) at which its turn began. The
        caller must end the turn by `end_load_turn`."""
        if self._left and not self._first and not self._others:
            self._hurried.discard(name)
            self._left -= 1
        else:
            await self._wait(name)
        return self._clock.monotonic()

    def record_load_time(self, began: float) -> None:
        """Updates the usual time of a load by the load that began at `began` (monotonic, in seconds) and succeeds
        now."""
        took = self._clock.monotonic() - began
        self._usual_s = max(took, self._usual_s + (took - self._usual_s) / LOAD_TIME_SMOOTHING_DIVISOR)

    def end_load_turn(self) -> None:
        """Called once for each turn, when it has ended: gives the turn to the next topic that waits."""
        self._left += 1
        if self._first or self._others:
            self._start_turns()

    async def _wait(self, name: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._first if name in self._hurried else self._others
        self._hurried.discard(name)
        line[name] = waiting
        self._start_turns()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # it had its turn already: the next one takes it
                self._left += 1
            self._first.pop(name, None)
            self._others.pop(name, None)
            self._start_turns()
            raise

    def _start_turns(self) -> None:
        while self._left and (self._first or self._others):
            line = self._first or self._others
            name = next(iter(line))
            waiting = line.pop(name)
            if not waiting.done():
                self._left -= 1
                waiting.set_result(None)


class _Turn:
    """The context manager of one turn. It is a class because a generator would cost more time than the rest of a
    turn."""

    __slots__ = ("_began", "_held", "_name", "_timer", "_turns")

    def __init__(self, turns: TopicLoadQueue, name: str) -> None:
        self._turns, self._name = turns, name
        self._held = False
        self._began = 0.0
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> None:
        self._began = await self._turns.wait_turn(self._name)
        self._held = True
        self._timer = asyncio.get_running_loop().call_later(self._turns.load_turn_timeout_s, self._end_turn)

    async def __aexit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self._turns.record_load_time(self._began)
        self._timer.cancel()
        self._end_turn()

    def _end_turn(self) -> None:
        if self._held:
            self._held = False
            self._turns.end_load_turn()


# -------------------------------------------------------------------------------------------------- state_memory
# The memory of state that cannot be dropped while it exists: topics, subscriptions with their acknowledged ranges and
# delayed messages, connections.
#
# It is no queue: back-pressure cannot bound it. So `state_memory_bytes` is its share of the broker's memory; if it
# needs more, the caches shrink, as they can be read again from bookies: first that of catch-up reads, then the tail.
# The acknowledged ranges ("holes") of all subscriptions together have that share too: above it the subscriptions with
# most get nothing new until consumers acknowledge, like one above `cursor_memory_bytes`
# (subscription/core/dispatch.py). If the caches are empty and the state is still too large, the log says how much
# memory the process needs.
#
# It is measured every MEMORY_MEASURE_INTERVAL_S, with many topics less often, in slices of the loop; what cannot be
# measured counts as constants. With a `state_memory_bytes` of 0 nothing is measured.
# Guards: tests/broker/node/test_state_memory.py.


_LOG = logging.getLogger("magnetar.broker")

MEMORY_MEASURE_INTERVAL_S = 2.0
MEMORY_MEASURE_INTERVAL_S_PER_TOPIC = 1e-4
"""A measurement takes 2 us a topic, so it costs at most 2 % of a processor's time: 100,000 topics are measured every 10
s."""
TOPIC_MEMORY_BYTES = 7 << 10
SUBSCRIPTION_MEMORY_BYTES = 4 << 10
CLIENT_MEMORY_BYTES = 1 << 10
"""Memory of a producer or consumer. With the two above: 12 KB for a topic with one of each (`python -m benchmarks
topics`)."""
CONNECTION_MEMORY_BYTES = 20 << 10
"""Memory of a connection (docs/performance.md)."""
HOLES_BYTES_MIN = 64 << 10
"""Memory for holes that every subscription may have in any case: enough for acknowledging every second of 400,000
entries."""
CACHE_SHRINK_STEP_BYTES = 16 << 20
"""Most bytes by which each cache shrinks per measurement: dropping these entries holds the loop a millisecond or
two."""


class CacheLimits(NamedTuple):
    """The sizes of the two caches of entries, in bytes. `tail`: the maximum of the tail cache; `recent`: the maximum of
    the cache of catch-up reads. `lacking`: how many bytes of memory are lacking although both caches are empty; 0 if
    none."""

    tail: int
    recent: int
    lacking: int  # bytes that the state needs in addition to its share and all of the caches


def compute_cache_limits(state_bytes: int, config: BrokerConfig) -> CacheLimits:
    """Returns the sizes of the caches that leave enough memory for a state of `state_bytes` bytes. The cache of
    catch-up reads shrinks first, then the tail cache."""
    over = max(0, state_bytes - config.state_memory_bytes)
    recent = max(0, config.catch_up_cache_bytes - over)
    over -= config.catch_up_cache_bytes - recent
    tail = max(0, config.cache_bytes - over)
    return CacheLimits(tail, recent, over - (config.cache_bytes - tail))


def compute_hole_memory_limit(sizes: Sequence[int], limit: int, own_max: int) -> int:
    """Returns the limit, in bytes, for the memory of the acknowledged ranges ("holes") of each subscription. `sizes`:
    the present sizes of the holes of all subscriptions. If their sum is at most `limit`, the result is `own_max`. Else
    it is the size to which the larger ones must be reduced so that the sum is `limit`: at most `own_max`, but at least
    HOLES_BYTES_MIN."""
    left, several = limit, sorted(sizes)
    for at, size in enumerate(several):
        fair = left // (len(several) - at)
        if size > fair:
            return max(HOLES_BYTES_MIN, min(own_max, fair))
        left -= size
    return own_max


class BrokerStateMemory:
    """Measures how much memory the state of the broker takes (topics, subscriptions, connections), and reduces the
    caches so that state and caches together fit into the memory. `bytes`: the result of the last measurement."""

    def __init__(self, config: BrokerConfig, clock: Clock, cache: TailCache, memory: CallerMemory) -> None:
        self._config = config
        self._clock = clock
        self._cache = cache
        self._memory = memory
        self._lacked = False
        self.bytes = 0  # at the last measurement

    async def measure_topics(self, loaded: Iterable[Topic]) -> None:
        """Measures the state, with the topics `loaded`; then sets the sizes of the caches, and the limit of each
        subscription for its acknowledged ranges. Wakes the subscriptions whose limit has grown. Does nothing if
        `state_memory_bytes` is 0. Logs a warning when memory begins to be lacking. The broker calls this every
        MEMORY_MEASURE_INTERVAL_S seconds."""
        if not self._config.state_memory_bytes:
            return
        topics = list(loaded)
        total = self._memory.connections * CONNECTION_MEMORY_BYTES
        holes: list[int] = []
        subscriptions = [each for topic in topics for each in topic.subscriptions.values()]
        turns = EventLoopSlices(self._clock)
        for topic in topics:
            total += TOPIC_MEMORY_BYTES + CLIENT_MEMORY_BYTES * len(topic.producers)
            for subscription in list(topic.subscriptions.values()):
                total += SUBSCRIPTION_MEMORY_BYTES + CLIENT_MEMORY_BYTES * len(subscription.consumers)
                if subscription.delayed is not None:
                    total += subscription.delayed.core.memory_bytes
                if size := subscription.cursor.memory_bytes:
                    holes.append(size)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        self.bytes = total + sum(holes)
        most = compute_hole_memory_limit(holes, self._config.state_memory_bytes, self._config.cursor_memory_bytes)
        for subscription in subscriptions:
            before, subscription.dispatcher.memory_bytes_max = subscription.dispatcher.memory_bytes_max, most
            if most > before and subscription.consumers:
                subscription.pump.wake()
            if turns.is_slice_used_up:
                await turns.begin_slice()
        self._resize(compute_cache_limits(self.bytes, self._config))

    def _resize(self, room: CacheLimits) -> None:
        tail, recent = self._cache, self._cache.recent
        tail.resize(max(room.tail, min(tail.bytes_max, tail.bytes) - CACHE_SHRINK_STEP_BYTES))
        if recent is not None:
            recent.resize(max(room.recent, min(recent.bytes_max, recent.bytes) - CACHE_SHRINK_STEP_BYTES))
        if bool(room.lacking) != self._lacked:
            self._lacked = bool(room.lacking)
            if self._lacked:
                _LOG.warning(
                    "topics, subscriptions and connections take %d bytes, %d more than state_memory_bytes and the "
                    "caches together: give the process that much more memory_bytes", self.bytes, room.lacking,
                )  # fmt: skip
