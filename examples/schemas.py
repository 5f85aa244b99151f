"""Schemas: values of a class instead of bytes, as JSON and as Avro, and a class that grows.

    pip install 'magnetar[avro]'
    python examples/schemas.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar
from magnetar.schema import Array, AutoConsumeSchema, AvroSchema, Integer, JsonSchema, Record, Schema, String


class First:
    """The classes of an older program, in a namespace of their own: a schema is known by the name of its class."""

    class Order(Record):
        customer = String(required=True)
        items = Array(String(), required=True)


class Order(Record):
    """What is new has a default in the schema, so that each program reads what the other one wrote."""

    customer = String(required=True)
    items = Array(String(), required=True)
    discount = Integer(default=0, required_default=True)


class Changed:
    class Order(Record):
        customer = Integer(required=True)


def run_with(client: magnetar.Client, topic: str, old: Schema, new: Schema, wrong: Schema) -> None:
    consumer = client.subscribe(topic, "billing", schema=new)
    anything = client.subscribe(topic, "audit", schema=AutoConsumeSchema())
    client.create_producer(topic, schema=old).send(First.Order(customer="Ada", items=["tea"]))
    client.create_producer(topic, schema=new).send(Order(customer="Grace", items=["pot"], discount=5))

    orders = [consumer.receive(timeout_millis=5000).value() for _ in range(2)]
    print(orders)
    assert orders == [Order(customer="Ada", items=["tea"]), Order(customer="Grace", items=["pot"], discount=5)]
    dicts = [anything.receive(timeout_millis=5000).value() for _ in range(2)]
    print(dicts)
    assert dicts[0] == {"customer": "Ada", "items": ["tea"]}

    try:
        client.create_producer(topic, schema=wrong)
    except magnetar.IncompatibleSchema as error:
        print("refused:", error)
    else:
        raise AssertionError("a customer became a number")


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    with magnetar.Client(service_url) as client:
        json = JsonSchema(First.Order), JsonSchema(Order), JsonSchema(Changed.Order)
        avro = AvroSchema(First.Order), AvroSchema(Order), AvroSchema(Changed.Order)
        run_with(client, f"schemas-json-{run}", *json)
        run_with(client, f"schemas-avro-{run}", *avro)

        try:
            client.create_producer(f"schemas-json-{run}", schema=json[1]).send(Order(items=["tea"]))
        except magnetar.InvalidMessage as error:
            print("refused:", error)
        else:
            raise AssertionError("an order without a customer was sent")


if __name__ == "__main__":
    main(sys.argv[1])
