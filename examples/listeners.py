"""Orders are handled per customer, at a rate, and pause while the vendor is away; a hook counts them.

    python examples/listeners.py magnetar://localhost:7650
"""

import sys
import threading
from collections import Counter, defaultdict
from typing import Any

import magnetar


class Counting(magnetar.Hook):
    """Counts what becomes of received messages."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def settled(self, settlement: magnetar.Settlement) -> None:
        self.outcomes[settlement.how] += 1


def main(url: str) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    done = threading.Event()
    vendor_is_away = threading.Event()
    vendor_is_away.set()
    counting = Counting()
    breaker = magnetar.CircuitBreaker(failures=3, pause=0.2, counts=ConnectionError)

    def handle(message: Any) -> None:
        if vendor_is_away.is_set():
            if breaker.opened:
                vendor_is_away.clear()  # it comes back while the breaker is open
            raise ConnectionError("the vendor is away")
        seen[message.partition_key()].append(int(message.data()))
        if sum(map(len, seen.values())) == 60:
            done.set()

    with magnetar.Client(url) as client:
        consumer = client.subscribe(
            "listened-orders", "vendor", magnetar.ConsumerType.KeyShared, redelivery_order="key", hooks=[counting]
        )
        producer = client.create_producer("listened-orders")
        with consumer.listen(handle, threads=4, rate=1000, breaker=breaker) as listening:
            for number in range(60):
                producer.send(b"%d" % number, partition_key=f"customer-{number % 5}")
            assert done.wait(60)
        statistics = listening.statistics()
        consumer.close()
    assert all(numbers == sorted(numbers) for numbers in seen.values()), "each customer's orders in order"
    assert statistics.failed >= 3
    assert counting.outcomes["acknowledge"] == 60
    print(f"60 orders of {len(seen)} customers; {statistics.failed} calls failed, the breaker opened {breaker.opened}x")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "magnetar://localhost:7650")
