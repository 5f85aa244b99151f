"""Patterns: one consumer for all topics whose names match, also for those that are created later.

    python examples/patterns.py magnetar://localhost:7650
"""

import re
import sys
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    with magnetar.Client(service_url) as client:
        client.create_producer(f"orders-{run}-eu").send(b"is sent before the subscription exists")

        pattern = re.compile(f"persistent://public/default/orders-{run}-.*")
        consumer = client.subscribe(pattern, "billing")
        client.create_producer(f"orders-{run}-eu").send(b"order in Europe")
        client.create_producer(f"orders-{run}-us").send(b"order in America")  # this topic is new
        client.create_producer(f"invoices-{run}").send(b"an invoice")  # its name does not match

        received = {}
        for _ in range(2):
            message = consumer.receive(timeout_millis=10000)
            print(message.topic_name(), message.data())
            received[message.topic_name().rpartition("-")[2]] = message.data()
            consumer.acknowledge(message)
        assert received == {"eu": b"order in Europe", "us": b"order in America"}


if __name__ == "__main__":
    main(sys.argv[1])
