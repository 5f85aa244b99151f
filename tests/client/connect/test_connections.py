"""Who owns a topic: a broker that is gone costs no pause when another one is there to ask."""

import asyncio

import pytest

from magnetar.client.client import Client
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import TopicName
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

TOPIC = TopicName.parse("t")


@pytest.mark.run_by(simulate, url="magnetar://gone:7651,broker:7650,gone:7652")
async def test_a_look_up_passes_over_a_broker_that_is_gone(client: Client, broker: FakeBroker, /) -> None:
    for _ in range(6):  # in turn: each of them comes first twice
        async with asyncio.timeout(0.05):  # less than the shortest pause
            await client.connections.find_owner_channel(TOPIC)


@pytest.mark.run_by(simulate, url="magnetar://gone:7651,gone:7652")
async def test_a_look_up_fails_when_every_broker_does(client: Client, broker: FakeBroker, /) -> None:
    with pytest.raises(MagnetarError) as raised:
        await client.connections.find_owner_channel(TOPIC)
    assert raised.value.retryable
