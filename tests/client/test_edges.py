"""What docs/concepts.md says of two features that meet, through a client."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.client import aio
from magnetar.client.common.errors import ProducerFenced
from magnetar.client.model.settings import InitialPosition, ProducerAccessMode
from magnetar.proto.states import TxnState
from tests.support.cluster import cluster

FENCING = ProducerAccessMode.ExclusiveWithFencing


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[aio.Client]:
    async with cluster(tmp_path) as running, aio.Client(f"magnetar://{running.brokers[-1].endpoint}") as client:
        yield client


async def test_what_a_fenced_producer_has_stored_in_a_transaction_may_still_be_committed(client: aio.Client) -> None:
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    first = await client.create_producer("t", access_mode=FENCING)
    txn = await client.transaction()
    await first.send(b"stored", txn=txn)
    second = await client.create_producer("t", access_mode=FENCING)
    with pytest.raises(ProducerFenced):
        await first.send(b"refused")
    await txn.commit()
    assert (await client.transaction_status(txn.id)).name == TxnState.COMMITTED.name
    await second.send(b"next")
    assert [(await consumer.receive(30_000)).data() for _ in range(2)] == [b"stored", b"next"]
