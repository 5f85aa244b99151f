"""Ends on their way to a coordinator, when the client is closed."""

import asyncio
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.transactions.coordinators import END_REQUEST_ITEMS_MAX, END_REQUESTS_IN_FLIGHT, TransactionEndQueue
from magnetar.client.transactions.transaction import Transactions
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.tasks import Tasks
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.simulated import simulate


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


async def test_an_end_that_comes_when_the_client_is_closed_is_told_so_at_once() -> None:
    coordinators: Any = Silent()
    tasks = Tasks()
    queue = TransactionEndQueue(coordinators, 0, tasks)
    await tasks.close()
    for _ in range(2):  # the first one leaves nothing that the second waits for
        async with asyncio.timeout(30):
            assert isinstance((await queue.add(wire.EndItem(verb="ABORT"))).error, ConnectionLost)


@pytest.mark.parametrize("turns", [1, 2], ids=["before the request's task begins", "in its request"])
async def test_ends_in_flight_and_ends_that_wait_are_all_told_when_the_client_is_closed(turns: int) -> None:
    coordinators: Any = Silent()
    tasks = Tasks()
    queue = TransactionEndQueue(coordinators, 0, tasks)
    answers = [queue.add(wire.EndItem(verb="ABORT")) for _ in range(END_REQUEST_ITEMS_MAX * END_REQUESTS_IN_FLIGHT + 1)]
    for _ in range(turns):
        await asyncio.sleep(0)
    assert len(tasks) == END_REQUESTS_IN_FLIGHT
    await tasks.close()
    async with asyncio.timeout(30):
        assert all(isinstance(each.error, ConnectionLost) for each in await asyncio.gather(*answers))


def test_a_client_that_is_closed_does_not_repeat_an_end_until_its_deadline() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        coordinators = Transactions.for_client(client.connections).coordinators
        begun = client.connections.world.clock.monotonic()
        await coordinators.close()
        with pytest.raises(ConnectionLost):
            await coordinators.end_transaction(wire.EndItem(verb="ABORT", txn=wire.TransactionId(most=1, least=1)))
        assert client.connections.world.clock.monotonic() == begun

    simulate(body, TransactionalBroker())
