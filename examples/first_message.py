"""Send a message, receive it, acknowledge it.

    python examples/first_message.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    topic = f"first-message-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client:
        consumer = client.subscribe(topic, "billing")  # from now on the topic keeps messages for `billing`
        producer = client.create_producer(topic)

        message_id = producer.send(b"hello", properties={"source": "example"})
        print("stored at", message_id)

        message = consumer.receive(timeout_millis=5000)
        print("received", message.data(), message.properties())
        assert message.data() == b"hello"
        assert message.message_id() == message_id
        consumer.acknowledge(message)

        try:
            consumer.receive(timeout_millis=100)
        except magnetar.Timeout:
            print("there are no more messages")
        else:
            raise AssertionError("one message was sent, and two were received")


if __name__ == "__main__":
    main(sys.argv[1])
