"""Consume, transform, produce: every order is billed once, though the program fails and starts again.

    python examples/exactly_once.py magnetar://localhost:7650
"""

import sys
from collections import Counter
from uuid import uuid4

import magnetar

ORDERS = 500


class PowerCut(Exception):
    """What happens to programs."""


class Billing:
    """Makes a bill of an order, and fails twice on its way."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, message: magnetar.Message) -> magnetar.Output:
        self.calls += 1
        if self.calls in (120, 333):
            raise PowerCut
        return magnetar.Output(b"bill for " + message.data(), partition_key=message.partition_key())


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    orders, bills = f"orders-{run}", f"bills-{run}"
    with magnetar.Client(service_url) as client:
        consumer = client.subscribe(orders, "billing")
        reader = client.create_reader(bills, magnetar.MessageId.earliest)
        with client.create_producer(orders, batching_enabled=True) as shop:
            for number in range(ORDERS):
                shop.send_async(b"order %d" % number, None, partition_key="Ada")

        billing, statistics, starts = Billing(), magnetar.ProcessStatistics(), 0
        producer = client.create_producer(bills, batching_enabled=True)
        while True:
            starts += 1
            try:
                magnetar.process(
                    consumer, producer, billing, messages_max=50, idle_timeout_ms=1000, statistics=statistics
                )
            except PowerCut:
                continue  # what its last transaction did counts nowhere; start again
            break

        found = Counter(reader.read_next(timeout_millis=5000).data() for _ in range(ORDERS))
        print(f"{starts} starts, {billing.calls} calls, {statistics.committed} transactions, {len(found)} bills")
        assert set(found.values()) == {1}
        assert not reader.has_message_available()
        assert billing.calls > ORDERS


if __name__ == "__main__":
    main(sys.argv[1])
