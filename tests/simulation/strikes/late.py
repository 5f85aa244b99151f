"""Deletions that are late: their broker stands still where it has ended what it deletes, for longer than its session.

Meanwhile another broker takes the topic over, an operator's next call deletes it, and it is made anew. Then the first
one goes on, and may take what it ended, and nothing of the new one. A strike (`anew`, load/names.py) says of which next
deletion that is so: of a topic that has ended, or of a subscription, of its own or with its topic.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.broker.topic.topic import Topic
from magnetar.proto.names import TopicName
from magnetar.runtime.sim.loop import CURRENT_PROCESS
from tests.simulation.cluster import SESSION_TIMEOUT_S, Cluster

LATE_S = 4 * SESSION_TIMEOUT_S
"""After the end of its session there is time for calls that are made again, and for the load of the new topic."""


@contextlib.contextmanager
def late_deletions(cluster: Cluster) -> Iterator[None]:
    """As long as it lasts."""
    delete_topic, delete_cursor = Topic.delete, DurableCursor.delete

    async def stand_still(what: str, name: TopicName) -> None:
        node = getattr(CURRENT_PROCESS.get(), "node", "")
        others = [cluster.simulation.node(each).process for each in cluster.broker_names if each != node]
        serves = any(each is not None and each.held is None for each in others)
        if cluster.late == (what, name.full) and serves and not cluster.healed and cluster.simulation.pause(node):
            cluster.late = "", ""
            cluster.late_deletions += 1
            cluster.later(LATE_S, cluster.simulation.resume, node)
            await asyncio.sleep(0)

    async def topic(self: Topic, **options: Any) -> list[int]:
        ledgers = await delete_topic(self, **options)
        await stand_still("topic", self.name)
        return ledgers

    async def cursor(self: DurableCursor) -> None:
        await stand_still("subscription", self.topic)
        await delete_cursor(self)

    with mock.patch.object(Topic, "delete", topic), mock.patch.object(DurableCursor, "delete", cursor):
        yield
