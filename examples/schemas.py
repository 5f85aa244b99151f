"""Schemas: values of a class instead of bytes, as JSON and as Avro.

    pip install 'magnetar[avro]'
    python examples/schemas.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar
from magnetar.schema import Array, AvroSchema, Integer, JsonSchema, Record, Schema, String


class Order(Record):
    customer = String(required=True)
    items = Array(String(), required=True)
    discount = Integer(default=0)


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    order = Order(customer="Ada", items=["tea", "cups"])
    schemas: list[Schema] = [JsonSchema(Order), AvroSchema(Order)]
    with magnetar.Client(service_url) as client:
        for schema in schemas:
            topic = f"schemas-{schema}-{run}"
            consumer = client.subscribe(topic, "billing", schema=schema)
            producer = client.create_producer(topic, schema=schema)
            producer.send(order)

            message = consumer.receive(timeout_millis=5000)
            received = message.value()
            print(schema, message.data(), received)
            assert isinstance(received, Order)
            assert received == order
            assert received.discount == 0
            consumer.acknowledge(message)

            try:
                producer.send(Order(items=["tea"]))
            except magnetar.InvalidMessage as error:
                print("refused:", error)
            else:
                raise AssertionError("an order without a customer was sent")


if __name__ == "__main__":
    main(sys.argv[1])
