"""Table views: a topic as a dictionary of the latest value of each key.

    python examples/table_views.py magnetar://localhost:7650
"""

import sys
from queue import SimpleQueue
from uuid import uuid4

import magnetar
from magnetar.schema import StringSchema


def main(service_url: str) -> None:
    topic = f"table-views-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        client.subscribe(topic, "keeper").close()  # a topic keeps what a subscription has not acknowledged
        producer = client.create_producer(topic, schema=StringSchema())
        producer.send("3.10", partition_key="tea")
        producer.send("8.00", partition_key="cup")
        producer.send("3.20", partition_key="tea")

        with client.create_table_view(topic, schema=StringSchema()) as prices:
            print(dict(prices.items()))
            assert dict(prices.items()) == {"tea": "3.20", "cup": "8.00"}

            changes: SimpleQueue[tuple[str, str]] = SimpleQueue()
            prices.for_each_and_listen(lambda key, value: changes.put((key, value)))
            assert {changes.get(timeout=5), changes.get(timeout=5)} == {("tea", "3.20"), ("cup", "8.00")}

            producer.send("3.30", partition_key="tea")
            print("changed:", change := changes.get(timeout=5))
            assert change == ("tea", "3.30")
            assert prices["tea"] == "3.30"

            producer.send(None, partition_key="cup")  # a message without a value deletes its key
            print("deleted:", changes.get(timeout=5)[0])
            assert "cup" not in prices


if __name__ == "__main__":
    main(sys.argv[1])
