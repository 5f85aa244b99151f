"""Schemas over gRPC: at the opening of producers and consumers, and as operators ask for them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    IncompatibleSchema,
    InvalidRequest,
    InvalidSchema,
    NamespaceNotFound,
    SchemaNotFound,
    TopicNotFound,
)
from magnetar.proto.policies import Policies
from magnetar.proto.policies import encode_policies as as_text
from magnetar.proto.schema import Compatibility
from magnetar.runtime.network import find_rpc
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/typed"


def avro(*names: str, required: bool = False) -> wire.SchemaInfo:
    fields = [{"name": name, "type": "int", **({} if required else {"default": 0})} for name in names]
    text = json.dumps({"type": "record", "name": "R", "fields": fields})
    return wire.SchemaInfo(type=4, data=text.encode(), name="AVRO")


class Asked:
    """One broker, one bookie, and what a client asks of it."""

    def __init__(self, running: Cluster) -> None:
        self.world, self.broker = running.world, running.brokers[0]
        self.channel = self.world.network.connect(self.broker.endpoint)

    async def producer(self, name: str = "p", **options: Any) -> bytes:
        """The version of its schema."""
        opened = await TestProducer(self.world, self.broker, TOPIC, name, **options).opened()
        await opened.send(b"x")
        version: bytes = opened.answer.schema_version
        return version

    async def consumer(self, subscription: str = "s", **options: Any) -> None:
        await TestConsumer(self.world, self.broker, TOPIC, subscription, **options).ready()

    async def ask(self, method: str, request: Any) -> Any:
        service = "Broker" if method in ("GetSchema", "Offsets") else "Admin"
        return await self.channel.call(find_rpc(service, method), request, timeout_s=20.0)


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    async with cluster(tmp_path) as running:
        yield Asked(running)


async def test_a_producer_and_a_consumer_bring_their_schemas(asked: Asked) -> None:
    schemas = [avro("a"), avro("a"), avro("a", "b"), None]
    versions = [await asked.producer(f"p{number}", schema=each) for number, each in enumerate(schemas)]
    assert versions == [bytes(8), bytes(8), bytes(7) + b"\1", b""]
    for kind, given in (
        (IncompatibleSchema, avro("c", required=True)), (InvalidSchema, wire.SchemaInfo(type=4, data=b"{")),
        (InvalidRequest, wire.SchemaInfo(type=99)),
    ):  # fmt: skip
        with pytest.raises(kind):
            await asked.producer("q", schema=given)
        with pytest.raises(kind):
            await asked.consumer("q", schema=given)
    assert "q" not in (await asked.ask("ListSubscriptions", wire.Name(name=TOPIC))).names, "nothing is left of it"
    await asked.consumer(schema=avro("b"))
    await asked.consumer("auto", schema=wire.SchemaInfo(type=21))


async def test_a_number_is_that_of_the_incarnation_which_is_meant(asked: Asked) -> None:
    ask = asked.ask
    await ask("PutSchema", wire.SchemaRequest(topic=TOPIC, schema=avro("a")))
    await asked.producer("p", schema=avro("a"))
    made = (await ask("Offsets", wire.OffsetsRequest(topic=TOPIC))).incarnation
    for meant in (0, made):
        request = wire.GetSchemaRequest(topic=TOPIC, version=bytes(8), incarnation=meant)
        assert (await ask("GetSchema", request)).schema == avro("a")
    for topic, meant in ((TOPIC, made - 1), (TOPIC, made + 1), (f"{TOPIC}-partition-0", made), (f"{TOPIC}2", made)):
        with pytest.raises(TopicNotFound, match=r"was deleted (and made anew )?since"):
            await ask("GetSchema", wire.GetSchemaRequest(topic=topic, version=bytes(8), incarnation=meant))
    lasting = TOPIC.replace("persistent:", "non-persistent:")
    await ask("PutSchema", wire.SchemaRequest(topic=lasting, schema=avro("b")))
    found = await ask("GetSchema", wire.GetSchemaRequest(topic=lasting, version=bytes(8), incarnation=1))
    assert found.schema == avro("b"), "it outlasts its topics"


async def test_operators_put_find_test_and_delete_schemas(asked: Asked) -> None:
    ask, put = asked.ask, wire.SchemaRequest(topic=TOPIC, schema=avro("a"))
    with pytest.raises(SchemaNotFound):
        await ask("GetSchema", wire.GetSchemaRequest(topic=TOPIC))
    assert (await ask("PutSchema", put)).version == bytes(8)
    assert (await ask("FindSchema", put)).version == bytes(8)
    found = await ask("GetSchema", wire.GetSchemaRequest(topic=f"{TOPIC}-partition-7", version=bytes(8)))
    assert (found.schema, found.deleted) == (avro("a"), False)
    with pytest.raises(InvalidRequest, match="it has 8"):
        await ask("GetSchema", wire.GetSchemaRequest(topic=TOPIC, version=b"1"))
    tested = await ask("TestSchema", wire.SchemaRequest(topic=TOPIC, schema=avro("c", required=True)))
    assert "field `c`" in tested.refused
    assert tested.compatibility == "full"
    with pytest.raises(NamespaceNotFound):
        await ask("PutSchema", wire.SchemaRequest(topic="persistent://public/none/t", schema=avro("a")))

    policies = Policies(schema_compatibility=Compatibility.ALWAYS_COMPATIBLE, schema_auto_update=False)
    await ask("ChangePolicies", wire.ChangePoliciesRequest(namespace="public/default", set=as_text(policies)))
    with pytest.raises(IncompatibleSchema, match="schema_auto_update is off"):
        await asked.producer(schema=avro("c"))
    assert (await ask("PutSchema", wire.SchemaRequest(topic=TOPIC, schema=avro("c")))).version[-1] == 1
    listed = await ask("ListSchemas", wire.Name(name=TOPIC))
    assert [each.version[-1] for each in listed.schemas] == [0, 1]
    assert (await ask("DeleteSchema", wire.DeleteRequest(name=TOPIC))).version[-1] == 1
    assert (await ask("DeleteSchema", wire.DeleteRequest(name=f"{TOPIC}2"))).version == b""
    assert (await ask("GetSchema", wire.GetSchemaRequest(topic=TOPIC, version=bytes(8)))).deleted


@pytest.mark.parametrize("partitions", [0, 2])
async def test_schemas_go_with_their_topic(asked: Asked, partitions: int) -> None:
    await asked.ask("CreateTopic", wire.TopicSpec(name=TOPIC, partitions=partitions))
    await asked.ask("PutSchema", wire.SchemaRequest(topic=TOPIC, schema=avro("a")))
    await asked.ask("DeleteTopic", wire.DeleteRequest(name=TOPIC))
    with pytest.raises(SchemaNotFound):
        await asked.ask("GetSchema", wire.GetSchemaRequest(topic=TOPIC))


async def test_a_schema_whose_topic_never_was_goes_with_its_namespace(asked: Asked) -> None:
    await asked.ask("PutSchema", wire.SchemaRequest(topic=TOPIC, schema=avro("a")))
    await asked.ask("DeleteNamespace", wire.DeleteRequest(name="public/default"))
    with pytest.raises(SchemaNotFound):
        await asked.ask("GetSchema", wire.GetSchemaRequest(topic=TOPIC))
