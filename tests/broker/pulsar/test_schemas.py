"""Schemas over Pulsar's protocol: what a producer and a consumer bring, and what clients ask for."""

import json
from typing import Any

import pytest

from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry_pb2 import KeyValue
from magnetar.proto.schema import BYTES_VERSION, SchemaType
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, T, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

BYTES = pulsar.Schema(name="", schema_data=b"", type=0)
FIRST, SECOND = bytes(8), bytes(7) + b"\1"


def avro(*names: str, **more: Any) -> pulsar.Schema:
    fields = [{"name": name, "type": "int", **more} for name in names]
    text = json.dumps({"type": "record", "name": "R", "fields": fields})
    properties = [KeyValue(key="k", value="v")]
    return pulsar.Schema(name="AVRO", schema_data=text.encode(), type=SchemaType.AVRO, properties=properties)


async def ask(raw: Raw, version: bytes | None = None, topic: str = T) -> Any:
    raw.send(get_schema=pulsar.CommandGetSchema(request_id=1, topic=topic, schema_version=version))
    return await raw.next("get_schema_response")


async def test_a_producers_schema_is_registered_told_and_checked(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    assert (await ask(raw)).error_code == pulsar.TopicNotFound
    assert (await raw.open_producer(1, schema=avro("a"))).schema_version == FIRST
    assert (await raw.open_producer(2, schema=avro("a", "b", default=0))).schema_version == SECOND
    assert (await raw.open_producer(3)).schema_version == b""
    assert (await raw.open_producer(4, schema=BYTES)).schema_version == b""
    for wrong in (avro("c"), pulsar.Schema(name="", schema_data=b"{", type=SchemaType.AVRO)):
        assert (await raw.open_producer(5, schema=wrong)).error == pulsar.IncompatibleSchema
    unknown = pulsar.Schema(name="", schema_data=b"", type=99)
    assert (await raw.open_producer(5, schema=unknown)).error == pulsar.NotAllowedError
    newest, first = await ask(raw), await ask(raw, FIRST, f"{T}-partition-3")
    assert (newest.schema_version, newest.schema) == (SECOND, avro("a", "b", default=0))
    assert (first.schema_version, first.schema) == (FIRST, avro("a"))
    assert (await ask(raw, b"")).error_code == pulsar.IncompatibleSchema
    assert (await ask(raw, bytes(7) + b"\x09")).error_code == pulsar.TopicNotFound


async def test_a_consumers_schema_has_to_read_what_is_there(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    assert not hasattr(await raw.subscribe(1, schema=avro("a")), "error")
    assert (await ask(raw)).schema_version == FIRST, "the topic was idle"
    await raw.open_producer(1, schema=avro("a"))
    raw.publish(0)
    await raw.next("send_receipt")
    assert (await raw.subscribe(2, schema=avro("b"))).error == pulsar.IncompatibleSchema
    automatic = pulsar.Schema(name="", schema_data=b"", type=SchemaType.AUTO_CONSUME)
    for number, schema in ((3, avro("b", default=1)), (4, automatic), (5, None)):
        assert not hasattr(await raw.subscribe(number, schema=schema), "error")


async def test_a_schema_is_made_by_request_where_the_topic_is(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)

    async def make(schema: pulsar.Schema) -> Any:
        asked = pulsar.CommandGetOrCreateSchema(request_id=1, topic=T, schema=schema)
        raw.send(get_or_create_schema=asked)
        return await raw.next("get_or_create_schema_response")

    assert (await make(avro("a"))).error_code == pulsar.TopicNotFound
    await raw.open_producer(1)
    assert (await make(avro("a"))).schema_version == FIRST
    assert (await make(avro("a"))).schema_version == FIRST
    assert (await make(avro("x"))).error_code == pulsar.IncompatibleSchema
    assert (await make(BYTES)).schema_version == BYTES_VERSION
