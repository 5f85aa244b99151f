"""The same client for asyncio: one program sends and receives at the same time.

    python examples/asyncio_client.py magnetar://localhost:7650
"""

import asyncio
import sys
from uuid import uuid4

import magnetar
from magnetar.asyncio import Client, Consumer, Producer

MESSAGES = 100


async def send(producer: Producer) -> None:
    async with asyncio.TaskGroup() as tasks:  # all at once: they travel in a few batches
        for number in range(MESSAGES):
            tasks.create_task(producer.send(f"order {number}".encode()))


async def receive(consumer: Consumer) -> set[str]:
    orders: set[str] = set()
    while len(orders) < MESSAGES:
        message = await consumer.receive(timeout_millis=5000)
        orders.add(message.data().decode())
        await consumer.acknowledge(message)
    return orders


async def main(service_url: str) -> None:
    topic = f"asyncio-client-{uuid4().hex[:8]}"
    async with Client(service_url) as client:
        consumer = await client.subscribe(topic, "billing", consumer_type=magnetar.ConsumerType.Shared)
        producer = await client.create_producer(topic)
        _, orders = await asyncio.gather(send(producer), receive(consumer))
    print("received", len(orders), "orders")
    assert orders == {f"order {number}" for number in range(MESSAGES)}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
