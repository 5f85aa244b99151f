"""Keys: two consumers divide a topic, and the messages of one key go to one of them, in order.

    python examples/keys.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar

CUSTOMERS = [f"customer-{number}" for number in range(20)]
STEPS = ["ordered", "paid", "sent"]


def receive(consumer: magnetar.Consumer) -> dict[str, list[str]]:
    """Customer -> steps, in the order in which they were received."""
    received: dict[str, list[str]] = {}
    try:
        while True:
            message = consumer.receive(timeout_millis=300)
            received.setdefault(message.partition_key(), []).append(message.data().decode())
            consumer.acknowledge(message)
    except magnetar.Timeout:
        return received


def main(service_url: str) -> None:
    topic = f"keys-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        first, second = (
            client.subscribe(topic, "shipping", magnetar.ConsumerType.KeyShared, consumer_name=name)
            for name in ("first", "second")
        )
        # KeyBased: an entry has messages of one key only, because an entry goes to one consumer.
        producer = client.create_producer(
            topic, batching_enabled=True, batching_type=magnetar.BatchingType.KeyBased
        )
        for step in STEPS:
            for customer in CUSTOMERS:
                producer.send_async(step.encode(), None, partition_key=customer)
        producer.flush()

        one, other = receive(first), receive(second)
    print("first has", len(one), "customers, second has", len(other))
    assert not one.keys() & other.keys(), "a customer is with one consumer"
    assert one | other == dict.fromkeys(CUSTOMERS, STEPS), "each customer's steps are in order"


if __name__ == "__main__":
    main(sys.argv[1])
