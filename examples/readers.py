"""Readers: read a topic from any place, without a subscription.

    python examples/readers.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    topic = f"readers-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        client.subscribe(topic, "billing").close()  # a topic keeps what a subscription has not acknowledged
        with client.create_producer(topic) as producer:
            ids = [producer.send(f"order {number}".encode()) for number in range(5)]

        with client.create_reader(topic, magnetar.MessageId.earliest) as reader:
            orders = []
            while reader.has_message_available():
                orders.append(reader.read_next(timeout_millis=5000).data().decode())
            print("all:", orders)
            assert orders == [f"order {number}" for number in range(5)]

            reader.seek(magnetar.MessageId.earliest)
            assert reader.read_next(timeout_millis=5000).data() == b"order 0"

        saved = ids[2].serialize()  # a program keeps these bytes wherever it keeps its results
        place = magnetar.MessageId.deserialize(saved)
        with client.create_reader(topic, place) as reader:  # begins after that message
            message = reader.read_next(timeout_millis=5000)
            print("after the third:", message.data(), "with index", message.index())
            assert (message.data(), message.index()) == (b"order 3", 3)


if __name__ == "__main__":
    main(sys.argv[1])
