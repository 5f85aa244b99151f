"""A message that fails: received again, retried later, and moved to the dead-letter topic in the end.

    python examples/retries.py magnetar://localhost:7650
"""

import sys
from datetime import timedelta
from uuid import uuid4

import magnetar


def given_back(client: magnetar.Client, topic: str) -> None:
    """A negative acknowledgement: the message comes again after a pause; the third time it is a dead letter."""
    policy = magnetar.ConsumerDeadLetterPolicy(max_redeliver_count=2, initial_subscription_name="inspection")
    consumer = client.subscribe(
        topic, "billing", magnetar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=100, dead_letter_policy=policy,
    )  # fmt: skip
    dead_letters = client.subscribe(f"{topic}-billing-DLQ", "inspection", magnetar.ConsumerType.Shared)
    client.create_producer(topic).send(b"broken order")

    for delivery in range(3):  # the first one and max_redeliver_count more
        message = consumer.receive(timeout_millis=5000)
        print("delivery", message.redelivery_count() + 1)
        assert message.redelivery_count() == delivery
        consumer.negative_acknowledge(message)

    letter = dead_letters.receive(timeout_millis=5000)
    print("dead letter", letter.data(), "of", letter.properties()["REAL_TOPIC"])
    assert letter.data() == b"broken order"
    dead_letters.acknowledge(letter)


def retried_later(client: magnetar.Client, topic: str) -> None:
    """`reconsume_later` stores a copy with a delay and acknowledges the original: the delay survives a restart."""
    consumer = client.subscribe(topic, "billing", magnetar.ConsumerType.Shared, enable_retry=True)
    client.create_producer(topic).send(b"order for later")

    message = consumer.receive(timeout_millis=5000)
    consumer.reconsume_later(message, timedelta(milliseconds=300), {"why": "no stock"})

    message = consumer.receive(timeout_millis=5000)
    times = message.properties()["RECONSUMETIMES"]
    print("retry", times, "because of", message.properties()["why"])
    assert (message.data(), times) == (b"order for later", "1")
    consumer.acknowledge(message)


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    with magnetar.Client(service_url) as client:
        given_back(client, f"given-back-{run}")
        retried_later(client, f"retried-later-{run}")


if __name__ == "__main__":
    main(sys.argv[1])
