"""Producers and consumers over real gRPC, through a broker, into a real bookie and back."""

from pathlib import Path

from tests.support.cluster import TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/flights"


async def test_what_is_produced_is_consumed_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        world, broker = running.world, running.brokers[0]
        consumer = await TestConsumer(world, broker, TOPIC).ready()
        producer = await TestProducer(world, broker, TOPIC).opened()
        for number in range(100):
            producer.publish(b"%d" % number, b"x")
        receipts = [await producer.next("receipt") for _ in range(100)]
        assert [receipt.index for receipt in receipts] == list(range(1, 201, 2))
        payloads = await consumer.receive_payloads(200)
        assert payloads[::2] == [b"%d" % number for number in range(100)]
        await producer.close()
        await consumer.close()
