"""A producer writes each message by its schema, also by one that a program derives from a schema of ours."""

import pytest

from magnetar.client.client import Client
from magnetar.client.model.schema import BytesSchema
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


class Enveloped(BytesSchema):
    """Bytes with one in front, as a registry of schemas asks for."""

    def encode(self, data: bytes) -> bytes:
        return b"<" + super().encode(data)

    def decode(self, data: bytes) -> bytes:
        return data.removeprefix(b"<")


class Named(BytesSchema):
    """Another name, the same bytes."""


@pytest.mark.parametrize("batching", [False, True])
async def test_what_a_class_of_bytes_encodes_is_what_is_sent(
    client: Client, broker: FakeBroker, /, batching: bool
) -> None:
    consumer = await client.subscribe("t", "s", schema=Enveloped())
    producer = await client.create_producer("t", schema=Enveloped(), batching_enabled=batching)
    assert producer.only_plain is None, "the short way does not ask the schema"
    await producer.send(b"x")
    message = await consumer.receive(60_000)
    assert (message.data(), message.value()) == (b"<x", b"x")


async def test_the_short_way_is_that_of_every_schema_that_leaves_bytes_as_they_are(
    client: Client, broker: FakeBroker, /
) -> None:
    for schema in (BytesSchema(), Named()):
        assert (await client.create_producer("t", schema=schema)).only_plain is not None
