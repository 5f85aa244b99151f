"""Partitions that are added to a topic later: found within DISCOVER_EVERY_S, Pulsar's figure.

A topic grows and never shrinks. Without an answer, or when a new partition cannot be opened yet, the next round looks
again: nothing that is open suffers from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...proto.errors import MagnetarError
from ...proto.names import TopicName
from ...runtime.tasks import Tasks
from .connections import Connections

_LOG = logging.getLogger("magnetar.client")
DISCOVER_EVERY_S = 60.0


class PartitionsWatcher:
    """Watches topics for more partitions: `grow(topic, partitions)` is awaited when a topic of `counts` has more than
    were known."""

    def __init__(
        self, connections: Connections, counts: dict[TopicName, int], grow: Callable[[TopicName, int], Awaitable[None]]
    ) -> None:
        self._connections = connections
        self._counts = {topic: count for topic, count in counts.items() if count}
        self._grow = grow
        self._tasks = Tasks()
        self._start()

    def _start(self) -> None:
        if self._counts and not len(self._tasks):
            self._tasks.spawn(self._run(), "partitions")

    def follow(self, topic: TopicName, partitions: int) -> None:
        """Watches the partitions of this topic too."""
        if partitions:
            self._counts[topic] = partitions
            self._start()

    def forget(self, topic: TopicName) -> None:
        self._counts.pop(topic, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY_S)
            for topic, known in list(self._counts.items()):
                try:
                    found = await self._connections.partitions(topic, create=False)
                    if found > known:
                        await self._grow(topic, found)
                        self._counts[topic] = found
                        _LOG.info("%s: %d partitions, %d of them new", topic, found, found - known)
                except MagnetarError as error:
                    _LOG.info("%s: its partitions are looked at again later: %s", topic, error)
                except Exception:
                    _LOG.exception("%s: its partitions are looked at again later", topic)

    def stop(self) -> None:
        self._tasks.cancel()

    async def close(self) -> None:
        self.stop()
        await self._tasks.close()
