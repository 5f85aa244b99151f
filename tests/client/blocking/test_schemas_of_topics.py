"""Schemas from end to end: registered, refused, evolved, and decoded with that of the writer, by both clients."""

from __future__ import annotations

from typing import Any

import pytest

import magnetar
from magnetar import InitialPosition, schema
from magnetar.admin import Admin
from magnetar.proto.errors import SchemaNotFound
from magnetar.proto.schema import SchemaType
from magnetar.schema import AutoConsumeSchema, AvroSchema, JsonSchema, KeyValueEncodingType, KeyValueSchema

EARLIEST = InitialPosition.Earliest


def order(**more: schema.Field[Any]) -> Any:
    return type("Order", (schema.Record,), {"number": schema.Integer(), **more})


First, Second = order(), order(note=schema.String(default="none", required_default=True))
Wrong = order(must=schema.Integer(required=True))


@pytest.fixture
def client(url: str) -> Any:
    with magnetar.Client(url) as made:
        yield made


@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_versions_are_registered_and_each_message_is_decoded_by_its_own(client: Any, url: str, kind: Any) -> None:
    topic = f"orders-{kind.__name__}"
    old = client.subscribe(topic, "old", schema=kind(First), initial_position=EARLIEST)
    new = client.subscribe(topic, "new", schema=kind(Second), initial_position=EARLIEST)
    auto = client.subscribe(topic, "auto", schema=AutoConsumeSchema(), initial_position=EARLIEST)
    client.create_producer(topic, schema=kind(First)).send(First(number=1))
    with client.create_producer(topic, schema=kind(Second)) as producer:
        producer.send(Second(number=2, note="two"))
    versions, values = [], []
    for number in (1, 2):
        for consumer in (old, new):
            message = consumer.receive(10_000)
            assert message.value().number == number
        versions.append(message.schema_version())
        values.append(message.value().note)
    assert versions == ["\0" * 8, "\0" * 7 + "\1"]
    assert values[1] == "two"
    assert [auto.receive(10_000).value() for _ in range(2)] == [{"number": 1}, {"number": 2, "note": "two"}]
    for refused in (
        lambda: client.create_producer(topic, schema=kind(Wrong)),
        lambda: client.subscribe(topic, "wrong", schema=schema.StringSchema()),
    ):
        with pytest.raises(magnetar.IncompatibleSchema):
            refused()
    with Admin(url) as admin:
        assert [each.version for each in admin.schemas(topic)] == [0, 1]
        assert admin.schema(topic).schema.type is SchemaType[kind.__name__.removesuffix("Schema").upper()]


def test_bytes_have_no_schema_and_a_schema_has_no_bytes(client: Any, url: str) -> None:
    client.create_producer("plain").send(b"x")
    with Admin(url) as admin, pytest.raises(SchemaNotFound):
        admin.schema("plain")
    with pytest.raises(magnetar.IncompatibleSchema, match="in use without a schema"):
        client.subscribe("plain", "s", schema=AvroSchema(First))
    auto = client.subscribe("plain", "s", schema=AutoConsumeSchema(), initial_position=EARLIEST)
    with pytest.raises(magnetar.InvalidMessage, match="has no schema"):
        auto.receive(10_000).value()


@pytest.mark.parametrize("encoding", list(KeyValueEncodingType))
def test_pairs_travel_in_the_payload_or_with_their_key_in_the_messages(client: Any, encoding: Any) -> None:
    topic, pairs = f"pairs-{encoding.name}", KeyValueSchema(schema.StringSchema(), AvroSchema(First), encoding)
    consumer = client.subscribe(topic, "s", schema=pairs)
    client.create_producer(topic, schema=pairs).send(("key", First(number=1)))
    message = consumer.receive(10_000)
    key, value = message.value()
    assert (key, value.number) == ("key", 1)
    assert (message.partition_key() == "") == (encoding is KeyValueEncodingType.INLINE)
    other = KeyValueEncodingType.INLINE if pairs.separated else KeyValueEncodingType.SEPARATED
    with pytest.raises(magnetar.IncompatibleSchema, match="encoded"):
        client.create_producer(topic, schema=KeyValueSchema(schema.StringSchema(), AvroSchema(First), other))


async def test_asyncio_finds_the_writers_schema_before_a_message_is_given(url: str) -> None:
    async with magnetar.asyncio.Client(url) as client:
        topic = "async-orders"
        consumer = await client.subscribe(topic, "s", schema=AvroSchema(First), initial_position=EARLIEST)
        producer = await client.create_producer(topic, schema=AvroSchema(Second))
        for number in range(3):
            await producer.send(Second(number=number, note="n"))
        assert (await consumer.receive()).value().number == 0
        assert (await consumer.batch_receive())[0].value().number == 1
        reader = await client.create_reader(topic, magnetar.MessageId.earliest, schema=AutoConsumeSchema())
        assert (await reader.read_next()).value() == {"number": 0, "note": "n"}
