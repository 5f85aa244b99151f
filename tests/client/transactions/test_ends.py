"""Ends on their way to a coordinator, when the client is closed."""

import asyncio
from typing import Any

from magnetar.client.transactions.coordinators import TransactionEndQueue
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.tasks import Tasks


class Silent:
    """Coordinators that never answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def send_end_requests(self, coordinator: int, request: wire.EndRequest) -> wire.EndReply:
        self.asked.set()
        return await asyncio.get_running_loop().create_future()


async def test_who_waits_for_an_end_is_told_that_nothing_is_known_when_the_client_is_closed() -> None:
    silent, tasks = Silent(), Tasks()
    coordinators: Any = silent
    answer = TransactionEndQueue(coordinators, 0, tasks).add(wire.EndItem(verb="ABORT"))
    await silent.asked.wait()
    await tasks.close()
    async with asyncio.timeout(30):
        assert isinstance((await answer).error, ConnectionLost)
