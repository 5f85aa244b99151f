"""Levels of priority: urgent orders do not wait for a backlog of others, and others still get their share.

    python examples/levels.py magnetar://localhost:7650
"""

import sys
import time
from collections import Counter
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    topic = f"levels-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        consumer = client.subscribe(topic, "workers", magnetar.ConsumerType.Shared, levels=3, weights=(8, 4, 1))
        producer = client.create_producer(topic, levels=3)
        for number in range(300):
            producer.send_async(b"bulk %d" % number, lambda *_: None)  # without a priority: the least urgent level
        producer.flush()
        for number in range(20):
            producer.send(b"urgent %d" % number, priority=0)

        received = []
        for _ in range(320):
            message = consumer.receive(timeout_millis=10_000)
            received.append(message.data().split()[0])
            time.sleep(0.002)  # the work
            consumer.acknowledge(message)
    last = max(place for place, kind in enumerate(received) if kind == b"urgent")
    print(Counter(received), "the last urgent one came as number", last)
    assert Counter(received) == {b"bulk": 300, b"urgent": 20}
    assert last < 200, "it did not wait for the backlog"


if __name__ == "__main__":
    main(sys.argv[1])
