"""A consumer that returns names the topic that it read: one of the same name that was made later begins at its first
message, whatever place the consumer asks for."""

from pathlib import Path
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from tests.support.cluster import TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
LATEST = wire.MessageId(ledger_id=2**63 - 1, entry_id=2**63 - 1, partition=-1, batch_index=-1)
FOREIGN = wire.MessageId(ledger_id=1 << 40, entry_id=3, partition=-1, batch_index=-1)


@pytest.mark.parametrize(
    "place",
    [
        {"durable": True}, {"durable": False, "start": LATEST}, {"durable": False, "start": FOREIGN},
        {"durable": False, "start": FOREIGN, "start_inclusive": True},
    ],
    ids=["durable", "latest", "foreign", "inclusive"],
)  # fmt: skip
async def test_a_consumer_of_another_incarnation_begins_at_the_first_message(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"one")
        await producer.send(b"two")
        made = broker.topics[TOPIC].incarnation
        assert made > 0

        async def consumer(name: str, incarnation: int) -> TestConsumer:
            return TestConsumer(
                running.world, broker, TOPIC, name, initial_position=wire.Subscribe.LATEST, incarnation=incarnation,
                **place,
            )  # fmt: skip

        other = await consumer("other", made - 1)
        told = await other.next("subscribed")
        assert told.incarnation == made
        assert await other.receive_payloads(2) == [b"one", b"two"]
        for incarnation in (0, made):
            same = await (await consumer(f"same-{incarnation}", incarnation)).ready()
            await producer.send(b"three")
            assert await same.receive_payloads(1) == [b"three"]
