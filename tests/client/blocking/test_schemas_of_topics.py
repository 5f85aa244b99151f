"""Schemas from end to end: registered, refused, evolved, and decoded with that of the writer, by both clients."""

from __future__ import annotations

import time
from datetime import timedelta
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


def test_copies_in_dead_letter_and_retry_topics_are_read_with_the_schema_of_their_writer(client: Any, url: str) -> None:
    topic, shared = "returned", magnetar.ConsumerType.Shared
    policy = magnetar.ConsumerDeadLetterPolicy(1, "returned-dead", "keep", retry_letter_topic="returned-later")
    consumer = client.subscribe(
        topic, "s", shared, dead_letter_policy=policy, enable_retry=True, initial_position=EARLIEST
    )  # of bytes: it decodes nothing
    for kind, sent in ((First, First(number=1)), (Second, Second(number=2, note="two"))):
        with client.create_producer(topic, schema=AvroSchema(kind)) as producer:
            producer.send(sent)
    for _ in range(2):  # to the retry-letter topic and back, then to the dead-letter topic
        for _ in range(2):
            consumer.reconsume_later(consumer.receive(10_000), timedelta(milliseconds=1))
    for name, reads in (("returned-dead", AutoConsumeSchema()), ("returned-later", AutoConsumeSchema())):
        with client.create_reader(name, magnetar.MessageId.earliest, schema=reads) as reader:
            found = [reader.read_next(10_000).value() for _ in range(2)]
            assert sorted(found, key=str) == [{"number": 1}, {"number": 2, "note": "two"}], name
    with client.subscribe("returned-dead", "other", schema=AvroSchema(Second), initial_position=EARLIEST) as dead:
        values = {value.number: value.note for value in (dead.receive(10_000).value() for _ in range(2))}
        assert values == {1: "none", 2: "two"}
    with Admin(url) as admin:
        assert len(admin.schemas("returned-dead")) == 2


def test_a_dead_letter_topic_that_refuses_the_schema_gets_the_copy_without(client: Any) -> None:
    client.create_producer("strict-dead", schema=schema.StringSchema()).close()
    policy = magnetar.ConsumerDeadLetterPolicy(1, "strict-dead")
    consumer = client.subscribe(
        "strict", "s", magnetar.ConsumerType.Shared, dead_letter_policy=policy, negative_ack_redelivery_delay_ms=10
    )
    client.create_producer("strict", schema=AvroSchema(First)).send(First(number=1))
    for _ in range(2):
        consumer.negative_acknowledge(consumer.receive(10_000))
    with client.create_reader("strict-dead", magnetar.MessageId.earliest) as reader:
        message = reader.read_next(10_000)
        assert (message.data(), message.schema_version()) == (AvroSchema(First).encode(First(number=1)), "")


def test_a_key_of_bytes_and_its_pair_are_the_same_in_a_copy(client: Any) -> None:
    pairs = KeyValueSchema(schema.StringSchema(), AvroSchema(First), KeyValueEncodingType.SEPARATED)
    policy = magnetar.ConsumerDeadLetterPolicy(1, "pairs-dead")
    consumer = client.subscribe(
        "pairs-source", "s", magnetar.ConsumerType.Shared, dead_letter_policy=policy,
        negative_ack_redelivery_delay_ms=10,
    )  # fmt: skip
    client.create_producer("pairs-source", schema=pairs).send(("key", First(number=1)))
    for _ in range(2):
        consumer.negative_acknowledge(consumer.receive(10_000))
    with client.create_reader("pairs-dead", magnetar.MessageId.earliest, schema=pairs) as reader:
        assert reader.read_next(10_000).value() == ("key", First(number=1))


def test_messages_in_chunks_and_of_compacted_topics_are_read_with_the_schema_of_their_writer(
    client: Any, url: str
) -> None:
    Large = type("Large", (schema.Record,), {"text": schema.String()})
    more = {"n": schema.Integer(default=7, required_default=True)}
    Larger = type("Large", (schema.Record,), {"text": schema.String(), **more})
    client.create_producer("chunks", schema=AvroSchema(Large)).close()
    text = "x" * (6 << 20)
    with client.create_reader("chunks", magnetar.MessageId.earliest, schema=AvroSchema(Large)) as reader:
        with client.create_producer("chunks", schema=AvroSchema(Larger), chunking_enabled=True) as producer:
            producer.send(Larger(text=text, n=1))
        message = reader.read_next(10_000)
        assert (message.value().text == text, message.int_schema_version()) == (True, 1)
    for kind, batched in ((First, True), (Second, True), (First, False)):
        with client.create_producer("keys", schema=AvroSchema(kind), batching_enabled=batched) as producer:
            for number in range(6):
                producer.send_async(kind(number=number), None, partition_key=f"{kind is First}{number % 3}{batched}")
            producer.flush()
    with Admin(url) as admin:
        admin.compact("keys")
        while admin.compaction_status("keys").state.name == "RUNNING":
            time.sleep(0.05)
    options = {"schema": AutoConsumeSchema(), "is_read_compacted": True}
    with client.create_reader("keys", magnetar.MessageId.earliest, **options) as reader:
        found = [reader.read_next(10_000) for _ in range(9)]
        assert not reader.has_message_available()
    kept = [{"number": number} for number in (3, 4, 5)]
    expected = [*kept, *({**each, "note": "none"} for each in kept), *kept]
    assert [message.value() for message in found] == expected
    assert [message.int_schema_version() for message in found] == [0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_a_producer_of_bytes_is_checked_by_the_schema_of_its_topic(client: Any, url: str) -> None:
    auto, first = schema.AutoPublishSchema(), AvroSchema(First)
    reader = client.create_reader("auto-publish", magnetar.MessageId.latest, schema=first)
    with client.create_producer("auto-publish", schema=auto) as producer:
        producer.send(first.encode(First(number=5)))
        assert reader.read_next(10_000).value() == First(number=5)
        for wrong in (b"", b"\xff", first.encode(First(number=5)) + b"x"):
            with pytest.raises(magnetar.InvalidMessage):
                producer.send(wrong)
        with pytest.raises(TypeError):
            producer.send("text")
    with client.create_producer("auto-publish-plain", schema=auto) as producer:
        producer.send(b"\xff")
    with Admin(url) as admin:
        assert len(admin.schemas("auto-publish")) == 1
