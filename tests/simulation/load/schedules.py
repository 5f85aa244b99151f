"""A schedule beside the load of a cluster: each fire time is published once, whoever owns the topic (missed="all").

`begin` makes a topic and a schedule that fires each second. After healing, `finish` waits for some more fires, deletes
the schedule, and reads the topic from its beginning. The judge:

    twice     a fire time is in the log at most once
    odd       each is a whole number of seconds after the first one
    gap       none is left out between the first and the last one, unless clocks jumped or it was long late
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise

from magnetar.broker.session.schedules import FIRE_TIME_PROPERTY
from magnetar.broker.session.schedules_core import MISSED_MAX
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout
from magnetar.client.model.message_id import MessageId
from magnetar.proto.errors import AlreadyExists, MagnetarError, NotFound
from tests.simulation.cluster import ADMIN, CLIENT, Cluster, GaveUp

TOPIC, NAME = "persistent://public/default/scheduled", "each-second"
EVERY_S = 1
MORE_FIRES = 3
"""Fires that must follow after healing."""
CLOCKS = {"clock-jump", "clock-skew"}


class ScheduleLoad:
    """`begin` and `finish` frame the other load. `fires`: messages that were found in the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.fires = 0

    async def begin(self) -> None:
        async def create(admin: AdminClient) -> None:
            with contextlib.suppress(AlreadyExists):
                await admin.create_topic(TOPIC)
            with contextlib.suppress(AlreadyExists):
                await admin.create_schedule(TOPIC, NAME, every_s=EVERY_S, payload=b"now", missed="all")

        await self._operate("make a schedule", create)

    async def finish(self) -> list[str]:
        """After healing; what was violated."""
        exact = not CLOCKS & set(self._cluster.options.times)  # else it may wait until a clock has caught up
        before = len(await self._in_client(self._read_all))
        while exact and len(await self._in_client(self._read_all)) < before + MORE_FIRES:  # noqa: ASYNC110 - what brokers do
            await asyncio.sleep(EVERY_S)

        async def delete(admin: AdminClient) -> None:
            with contextlib.suppress(NotFound):
                await admin.delete_schedule(TOPIC, name=NAME)

        await self._operate("delete the schedule", delete)
        await asyncio.sleep(5)  # a fire that had begun
        found = await self._in_client(self._read_all)
        self.fires = len(found)
        return judge(found, complete=exact)

    async def _read_all(self) -> list[int]:
        """The fire times in the topic, in the order of the log."""
        found: dict[MessageId, int] = {}  # a reader that connects again may get some twice
        async with Client(self._cluster.service_url, world=self._cluster.simulation.world(CLIENT)) as client:
            reader = await client.create_reader(TOPIC, MessageId.earliest)
            while await reader.has_message_available():
                with contextlib.suppress(Timeout):
                    message = await reader.read_next(10_000)
                    found[message.message_id()] = int(message.properties()[FIRE_TIME_PROPERTY])
        return [found[each] for each in sorted(found)]

    async def _in_client(self, work: Callable[[], Awaitable[list[int]]]) -> list[int]:
        while True:
            try:
                return await self._cluster.simulation.spawn(CLIENT, self._cluster.call("read the fires", work()))
            except (MagnetarError, GaveUp) as error:
                self._cluster.simulation.add_line(f"fires: {error!r}")
                await asyncio.sleep(0.5)

    async def _operate(self, what: str, work: Callable[[AdminClient], Awaitable[None]]) -> None:
        """Until it has worked."""

        async def once() -> None:
            world = self._cluster.simulation.world(ADMIN)
            async with AdminClient(self._cluster.service_url, world=world) as admin:
                await work(admin)

        while True:
            try:
                await self._cluster.simulation.spawn(ADMIN, self._cluster.call(what, once()))
                return
            except (MagnetarError, GaveUp) as error:
                self._cluster.simulation.add_line(f"{what}: {error!r}")
                await asyncio.sleep(0.5)


def judge(found: list[int], *, complete: bool) -> list[str]:
    """What is wrong with the fire times of a topic, in ms. `complete`: no clock has jumped, so none is left out, except
    where more than MISSED_MAX were missed."""
    counts = Counter(found)
    wrong = [f"twice: the fire of {at} is in the log {count} times" for at, count in counts.items() if count > 1]
    step = 1000 * EVERY_S
    wrong += [f"odd: {at} is no fire after {found[0]}" for at in found if (at - found[0]) % step]
    times = sorted(set(found))
    for earlier, later in pairwise(times):
        if complete and earlier + step != later and later - earlier <= MISSED_MAX * step:
            wrong.append(f"gap: nothing was fired between {earlier} and {later}")
    return wrong
