"""Tells topics how their transactions ended, until each has stored it.

    settler.add(topic, settlement)      from then on, for as long as this part runs
    await settler.close()

One worker per topic takes all that waits for that topic, sends it together, and repeats what failed after a pause that
grows to PAUSE_S_MAX. What is new does not wait for that pause: one transaction that a topic cannot store holds up no
other. A topic that is certainly gone has nothing to settle any more (`Topics.settle` says so). Bound: an outcome is in
the coordinator's table until it is settled, so nothing here is more than what that holds; AT_ONCE workers send at a
time. Guards: tests/broker/transaction/test_settling.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...proto.errors import MagnetarError
from ...proto.names import TopicName
from ...runtime.tasks import Tasks
from ...runtime.world import World
from ..common.log_throttle import LogThrottle
from ..common.transactions import Settlement

_LOG = logging.getLogger("magnetar.broker.transactions")

PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 10.0
REST_S_MIN = 0.001
"""Shortest rest of a pause: added to the time of the loop a shorter one may be nothing."""
AT_ONCE = 256
"""Topics that are told at a time."""
TOGETHER = 1_000
"""Settlements of one topic in one request."""


class Topics(Protocol):
    """The topics of the cluster, wherever they are served."""

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Settles; returns for each None (the topic has stored it, or is certainly gone) or its error. An error of the
        call: all of them failed."""


class _Waiting(NamedTuple):
    """The settlements of a topic that are not being sent."""

    new: list[Settlement]
    failed: list[Settlement]
    wake: asyncio.Event


class Settler:
    """Settles transactions at topics. `settled(txn, topic)` is called once for each that is added."""

    def __init__(self, world: World, topics: Topics, settled: Callable[[Settlement, str], None]) -> None:
        self._world = world
        self._topics = topics
        self._settled = settled
        self._waiting: dict[str, _Waiting] = {}  # by topic
        self._sending = asyncio.Semaphore(AT_ONCE)
        self._tasks = Tasks()
        self._throttle = LogThrottle(world.clock)
        self.failures = 0

    def add(self, topic: str, settlement: Settlement) -> None:
        waiting = self._waiting.get(topic)
        if waiting is None:
            self._waiting[topic] = _Waiting([settlement], [], asyncio.Event())
            self._tasks.spawn(self._work(topic), f"settle {topic}")
        else:
            waiting.new.append(settlement)
            waiting.wake.set()

    async def _work(self, topic: str) -> None:
        """Ends when nothing waits; the topic's key is there as long as it runs."""
        waiting, pause_s, name = self._waiting[topic], PAUSE_S_MIN, TopicName.parse(topic)
        clock, again_at = self._world.clock, 0.0
        while waiting.new or waiting.failed:
            if not waiting.new and (rest_s := again_at - clock.monotonic()) > REST_S_MIN:
                waiting.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await waiting.wake.wait()
                continue
            is_new = bool(waiting.new)
            source = waiting.new if is_new else waiting.failed
            batch = source[:TOGETHER]
            del source[:TOGETHER]
            failed = await self._send(name, batch)
            self.failures += bool(failed)
            if failed and (not is_new or not waiting.failed):
                again_at = clock.monotonic() + pause_s * (0.5 + self._world.rng.random())
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)
            elif not failed and not waiting.failed:
                pause_s = PAUSE_S_MIN
            waiting.failed.extend(failed)
        del self._waiting[topic]

    async def _send(self, topic: TopicName, batch: list[Settlement]) -> list[Settlement]:
        """Sends settlements to a topic; returns those that failed."""
        try:
            async with self._sending:
                errors = await self._topics.settle(topic, batch)
        except MagnetarError as error:
            errors = [error] * len(batch)
        except Exception as error:  # a fault of one topic must not leave its transactions unsettled for ever
            _LOG.exception("%s: transactions are not settled", topic)
            errors = [MagnetarError(str(error))] * len(batch)
        failed = []
        for settlement, each in zip(batch, errors, strict=True):
            if each is None:
                self._settled(settlement, topic.full)
            else:
                failed.append(settlement)
                if self._throttle.news(each):
                    _LOG.warning("%s has not settled %s, it is told again: %s", topic, settlement.txn, each)
        return failed

    @property
    def topics_waiting(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        await self._tasks.close()
