"""Positional calls mean what they mean to pulsar-client (tests/client/test_names_of_pulsar.py: its parameters)."""


import pytest

import magnetar
from magnetar.client import aio
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate


def test_positional_calls_work_in_both_faces(fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0], None, 20) as client:
        producer = client.create_producer("t", "name", magnetar.schema.StringSchema(), 41)
        consumer = client.subscribe("t", "s", magnetar.ConsumerType.Shared, magnetar.schema.StringSchema(), None, 10)
        producer.send("x", {"a": "b"}, "key", None, 77)
        message = consumer.receive(5000)
        assert (producer.producer_name(), message.value(), message.properties()) == ("name", "x", {"a": "b"})
        assert (message.partition_key(), message.sequence_id()) == ("key", 77)
        reader = client.create_reader("t", magnetar.MessageId.earliest, magnetar.schema.StringSchema())
        assert reader.read_next(5000).value() == "x"

    async def body(client: aio.Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", "name", None, 41)
        consumer = await client.subscribe("t", "s", magnetar.ConsumerType.Shared, None, 10)
        await producer.send(b"x", {"a": "b"}, "key")
        message = await consumer.receive(5000)
        assert (message.sequence_id(), message.partition_key(), producer.producer_name()) == (42, "key", "name")

    simulate(body)


def test_a_sequence_id_of_0_is_one(fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0]) as client:
        producer = client.create_producer("zero", None, None, 5)
        producer.send_async(b"x", None, None, None, None, 0)
        producer.flush()
    assert fake[1].received == [(0, 1)]


def test_an_unknown_parameter_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="batch_size"):
        magnetar.Client("magnetar://localhost").create_producer("t", batch_size=5)  # type: ignore[call-arg]
