"""Delays: a message is stored now and delivered later, or never: it expires, or is cancelled.

    python examples/delays.py magnetar://localhost:7650
"""

import sys
import time
from datetime import timedelta
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    topic = f"delays-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        consumer = client.subscribe(topic, "reminders", magnetar.ConsumerType.Shared)  # Exclusive ignores delays
        producer = client.create_producer(topic)

        begin = time.time()
        producer.send(b"in two seconds", deliver_after=timedelta(seconds=2))
        producer.send(b"at a time", deliver_at=int((begin + 1) * 1000))  # ms since the epoch
        producer.send(b"now")
        producer.send(b"too late", expires_at=int(begin * 1000))  # it has expired: no consumer gets it
        taken_back = producer.send(b"taken back", deliver_after=timedelta(seconds=1))
        print("cancelled for", producer.cancel(taken_back))

        received = []
        for _ in range(3):
            message = consumer.receive(timeout_millis=5000)
            print(f"after {time.time() - begin:.1f} s:", message.data())
            received.append(message.data())
            consumer.acknowledge(message)
    assert received == [b"now", b"at a time", b"in two seconds"]
    assert time.time() - begin >= 2


if __name__ == "__main__":
    main(sys.argv[1])
