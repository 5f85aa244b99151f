"""Dead letters of the server name the schema that their message was written with, in the numbers of their own topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType, InitialPosition, MultiplierRedeliveryBackoff
from magnetar.proto.schema import SchemaInfo
from magnetar.schema import AvroSchema, BytesSchema, Integer, Record, StringSchema
from tests.support.cluster import Cluster, cluster

EARLIEST, SHARED = InitialPosition.Earliest, ConsumerType.Shared
NOW = MultiplierRedeliveryBackoff(1, 1)
LETTERS = "letters"


class Point(Record):
    x = Integer(required=True)
    y = Integer(required=True)


def turned() -> type[Record]:
    class Turned(Record):
        y = Integer(required=True)
        x = Integer(required=True)

    Turned.__name__ = "Point"
    return Turned


Turned = turned()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    policy: dict[str, Any] = {"dead_letter_max_redeliver_count": 1, "dead_letter_topic": LETTERS}
    async with cluster(tmp_path, dead_letter_backoff_s=(0.01,), **policy) as found:
        yield found


async def given_up(client: Client, topic: str, count: int) -> None:
    """Every message of the topic is given back as often as it may be."""
    consumer = await client.subscribe(
        topic, "s", SHARED, initial_position=EARLIEST, negative_ack_redelivery_backoff=NOW
    )
    for _ in range(2 * count):
        await consumer.negative_acknowledge(await consumer.receive(20_000))


async def sent(client: Client, topic: str, schema: Any, *values: Any) -> None:
    await (await client.subscribe(topic, "s", SHARED, initial_position=EARLIEST)).close()
    producer = await client.create_producer(topic, schema=schema)
    await producer.send_many(values, partition_key="k")
    await producer.close()


async def test_a_letter_is_read_as_its_message_was_written_whatever_its_topic_has(running: Cluster) -> None:
    """Two versions, and one that the dead-letter topic had before: versions are numbers of a topic."""
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await (await client.create_producer(LETTERS, schema=AvroSchema(Turned))).send(Turned(x=7, y=8))
        await sent(client, "points", AvroSchema(Point), Point(x=100, y=1), Point(x=200, y=2))
        await sent(client, "points", AvroSchema(Turned), Turned(x=300, y=3))
        await given_up(client, "points", 3)
        reader = await client.subscribe(LETTERS, "l", schema=AvroSchema(Point), initial_position=EARLIEST)
        found = [await reader.receive(20_000) for _ in range(4)]
        assert sorted((each.value().x, each.value().y) for each in found) == [(7, 8), (100, 1), (200, 2), (300, 3)]


async def test_a_letter_whose_schema_its_topic_refuses_goes_without_one(running: Cluster) -> None:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await (await client.create_producer(LETTERS, schema=StringSchema())).send("a text")
        await sent(client, "points", AvroSchema(Point), Point(x=100, y=1))
        await sent(client, "plain", BytesSchema(), b"bytes")
        await given_up(client, "points", 1)
        await given_up(client, "plain", 1)
        reader = await client.subscribe(LETTERS, "l", initial_position=EARLIEST)
        found = {(await reader.receive(20_000)).data() for _ in range(3)}
        assert found == {b"a text", AvroSchema(Point).encode(Point(x=100, y=1)), b"bytes"}


def test_the_two_schemas_have_their_fields_in_another_order() -> None:
    infos: list[SchemaInfo] = [AvroSchema(Point).info(), AvroSchema(Turned).info()]
    assert infos[0] != infos[1]
    assert AvroSchema(Point).encode(Point(x=1, y=2)) == AvroSchema(Turned).encode(Turned(x=2, y=1))
