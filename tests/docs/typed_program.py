"""A user's program, for `mypy --strict` against an installed wheel (tests/docs/test_typing.py). It is never run.

`assert_type` says what a type checker has to see; a line that ends with an ignore is one that it has to refuse.
"""

import asyncio
from enum import Enum
from typing import assert_type

import magnetar
import magnetar.admin
import magnetar.asyncio
import magnetar.exceptions
import magnetar.schema
from magnetar.asyncio import Client as AsyncClient
from magnetar.exceptions import PulsarException, Timeout
from magnetar.schema import (
    Array,
    AvroSchema,
    Boolean,
    Bytes,
    CustomEnum,
    Double,
    Float,
    Integer,
    JsonSchema,
    Long,
    Map,
    Record,
    String,
)


class Colour(Enum):
    RED = 1


class Place(Record):
    name = String(required=True)


class Flight(Record):
    carrier = String(required=True)
    delay = Integer(default=0)
    miles = Long()
    height = Double(required=True)
    speed = Float()
    cancelled = Boolean()
    raw = Bytes(b"")
    colour = CustomEnum(Colour)
    tint = CustomEnum(Colour, Colour.RED)
    tags = Array(String(), required=True)
    legs = Array(Place(), default=[])
    counts = Map(Integer())
    places = Map(Place(), required=True)
    origin = Place()


def fields(flight: Flight) -> None:
    assert_type(flight.carrier, str)
    assert_type(flight.delay, int)
    assert_type(flight.miles, int | None)
    assert_type(flight.height, float)
    assert_type(flight.speed, float | None)
    assert_type(flight.cancelled, bool)
    assert_type(flight.raw, bytes)
    assert_type(flight.colour, Colour | None)
    assert_type(flight.tint, Colour)
    assert_type(flight.tags, list[str])
    assert_type(flight.legs, list[Place])
    assert_type(flight.counts, dict[str, int] | None)
    assert_type(flight.places, dict[str, Place])
    assert_type(flight.origin, Place)
    flight.delay = 3
    flight.delay = "3"  # type: ignore[assignment]
    flight.carrier = None  # type: ignore[assignment]
    assert_type(Flight.carrier, String[str])


def blocking(url: str) -> None:
    with magnetar.Client(url, operation_timeout_seconds=5) as client:
        mode = magnetar.ProducerAccessMode.Shared
        producer = client.create_producer("t", schema=AvroSchema(Flight), access_mode=mode)
        assert_type(producer, magnetar.Producer)
        assert_type(producer.send(Flight(carrier="UA"), partition_key="a"), magnetar.MessageId)
        producer.send(b"x", partition_key=5)  # type: ignore[arg-type]
        with client.subscribe("t", "s", consumer_type=magnetar.ConsumerType.Shared, schema=JsonSchema(Flight)) as sub:
            try:
                message = sub.receive(timeout_millis=100)
            except Timeout as error:
                slow: TimeoutError = error
                assert_type(error.error(), magnetar.Result)
                raise slow from None
            assert_type(message, magnetar.Message)
            assert_type(message.data(), bytes)
            sub.acknowledge(message)
        view = client.create_table_view("t")
        view.for_each(lambda key, value: None)
    client.no_such_method()  # type: ignore[attr-defined]


async def asynchronous(url: str) -> None:
    async with AsyncClient(url) as client:
        assert_type(client, magnetar.asyncio.Client)
        producer = await client.create_producer("t")
        assert_type(await producer.send(b"x"), magnetar.MessageId)
        consumer = await client.subscribe("t", "s")
        message = await consumer.receive()
        assert_type(message.message_id(), magnetar.MessageId)
        await consumer.acknowledge(message)
        consumer.redeliver_unacknowledged_messages()
        async for each in consumer:
            assert_type(each, magnetar.Message)


def administration(url: str) -> None:
    with magnetar.admin.Admin(url) as admin:
        assert_type(admin.topics("public/default", partitions=True), list[str])
        admin.create_topic("t", partitions=4)
        assert_type(admin.partitions("t"), int)
        assert_type(admin.topic_stats("t").end_index, int)
        assert_type(admin.last_message_id("t"), magnetar.MessageId)
        admin.create_topic("t", partitions="4")  # type: ignore[arg-type]
        admin.no_such_verb()  # type: ignore[attr-defined]


def errors() -> type[PulsarException]:
    assert_type(magnetar.exceptions.Timeout("x"), magnetar.Timeout)
    assert issubclass(magnetar.schema.Record, object)
    return magnetar.ProducerFenced


if __name__ == "__main__":
    asyncio.run(asynchronous("magnetar://localhost:7650"))
