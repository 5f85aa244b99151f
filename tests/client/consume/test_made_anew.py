"""A topic that is deleted and made anew under what reads it: nothing that was kept of the old one is of the new one."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

import magnetar as pulsar
from magnetar.admin import AdminClient
from magnetar.client.connect.connections import TopicSchemaCache
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import InitialPosition
from magnetar.proto.errors import AlreadyExists
from magnetar.proto.names import TopicName
from magnetar.proto.schema import encode_version
from tests.client.consume.test_compaction import TOPIC, Bench, bench
from tests.client.consume.test_table_view import until


def flight(*fields: str) -> Any:
    """The class of a record with these fields, in their order; always of one name."""
    return type("Flight", (pulsar.schema.Record,), {name: pulsar.schema.Integer(required=True) for name in fields})


XY, YX = flight("x", "y"), flight("y", "x")


def place(value: Any) -> tuple[int, int]:
    return (value["x"], value["y"]) if isinstance(value, dict) else (value.x, value.y)


async def anew(on: Bench, topic: str = TOPIC) -> None:
    async with AdminClient(f"magnetar://{on.running.brokers[0].endpoint}") as admin:
        before = (await admin.offsets(topic)).incarnation
        await admin.delete_topic(topic, force=True)
        with contextlib.suppress(AlreadyExists):  # what reads it was faster: it makes the topic
            await admin.create_topic(topic)
        assert (await admin.offsets(topic)).incarnation > before > 0


async def test_no_key_of_a_table_outlives_its_topic(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(("a", b"1"), ("b", b"1"), ("c", b"1"))
        view = await on.client.create_table_view(TOPIC)
        heard: list[tuple[str, bytes]] = []
        await view.for_each_and_listen(lambda key, value: heard.append((key, value)))
        heard.clear()
        await anew(on)
        await on.send(("b", b"2"), ("d", b"2"))
        await until(lambda: dict(view.items()) == {"b": b"2", "d": b"2"})
        assert {("a", b""), ("c", b""), ("b", b"2"), ("d", b"2")} <= set(heard)
        assert [value for key, value in heard if key == "b"][-1] == b"2"


async def test_a_reader_at_the_end_sees_all_of_the_new_topic(tmp_path: Path) -> None:
    """Nothing was read of the old topic, so the end of the new one is not its place: it was open before that began."""
    async with bench(tmp_path) as on:
        await on.send(("a", b"old"))
        reader = await on.client.create_reader(TOPIC, MessageId.latest)
        await anew(on)
        await on.send(("a", b"1"), ("a", b"2"), batch=False)
        assert [(await reader.read_next(20_000)).data() for _ in range(2)] == [b"1", b"2"]
        assert not await reader.has_message_available()


async def test_a_reader_in_the_middle_goes_on_at_the_beginning_of_the_new_topic(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(*[("a", b"old")] * 5, batch=False)
        reader = await on.client.create_reader(TOPIC, MessageId.earliest, receiver_queue_size=1)
        old = [await reader.read_next(20_000) for _ in range(3)]
        await anew(on)
        await on.send(*[("a", b"%d" % number) for number in range(7)], batch=False)
        found = b"old"
        while found == b"old":  # what was received waits here
            found = (await reader.read_next(20_000)).data()
        assert found == b"0"
        assert [(await reader.read_next(20_000)).data() for _ in range(6)] == [b"%d" % n for n in range(1, 7)]
        for inclusive in (False, True):
            from_old = await on.client.create_reader(
                TOPIC, old[2].message_id(), start_message_id_inclusive=inclusive
            )
            assert (await from_old.read_next(20_000)).data() == b"0"
        consumer = await on.client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest)
        await consumer.acknowledge_cumulative(old[2].message_id())
        await consumer.seek(old[2].message_id())
        assert (await consumer.receive(20_000)).data() == b"0"


async def test_messages_of_a_new_topic_are_decoded_by_its_own_schemas(tmp_path: Path) -> None:
    """Version 0 of the one is not version 0 of the other."""
    async with bench(tmp_path) as on:
        old = await on.client.create_producer(TOPIC, schema=pulsar.schema.AvroSchema(XY))
        await old.send(XY(x=1, y=100))
        await old.close()
        readers = [
            await on.client.create_reader(TOPIC, MessageId.earliest, schema=schema)
            for schema in (pulsar.schema.AutoConsumeSchema(), pulsar.schema.AvroSchema(XY))
        ]
        for reader in readers:
            assert place((await reader.read_next(20_000)).value()) == (1, 100)
        await anew(on)
        new = await on.client.create_producer(TOPIC, schema=pulsar.schema.AvroSchema(YX))
        await new.send(YX(x=1, y=100))
        for reader in readers:
            assert place((await reader.read_next(20_000)).value()) == (1, 100)


async def test_messages_of_a_topic_that_is_gone_are_not_decoded_by_the_schemas_of_the_next(tmp_path: Path) -> None:
    """What the program still has of it is decoded by what was asked for while it was there, or not at all."""
    async with bench(tmp_path) as on, AdminClient(f"magnetar://{on.running.brokers[0].endpoint}") as admin:
        asked = []
        reader = await on.client.create_reader(
            TOPIC, MessageId.earliest, schema=pulsar.schema.AutoConsumeSchema(), receiver_queue_size=1
        )
        messages = []
        for kind in (XY, YX):
            async with await on.client.create_producer(TOPIC, schema=pulsar.schema.AvroSchema(kind)) as producer:
                await producer.send(kind(x=1, y=100))
            messages.append(await reader.read_next(20_000))
            made = (await admin.offsets(TOPIC)).incarnation
            asked.append(TopicSchemaCache(on.client.connections, TopicName.parse(TOPIC), made))
            if kind is XY:
                await anew(on)
        assert [place(each.value()) for each in messages] == [(1, 100)] * 2
        for writers in asked:
            await writers.fetch_schema(encode_version(0))
        former, present = asked
        assert b'"x"' in present.get_schema(encode_version(0)).data
        with pytest.raises(pulsar.InvalidMessage, match="no schema version 0"):
            former.get_schema(encode_version(0))
        with pytest.raises(pulsar.InvalidMessage, match="is not known yet: await its fetch_writer_schema"):
            present.get_schema(encode_version(9))


async def test_a_range_is_of_one_incarnation(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(*[("a", b"1")] * 5, batch=False)
        async with AdminClient(f"magnetar://{on.running.brokers[0].endpoint}") as admin:
            made = (await admin.offsets(TOPIC)).incarnation
        await anew(on)
        await on.send(*[("a", b"1")] * 9, batch=False)
        with pytest.raises(pulsar.TopicNotFound, match="made anew"):
            async for _ in on.client.read_range(TOPIC, 0, 5, incarnation=made):
                pass
        count = 0
        async for entries in on.client.read_range(TOPIC, 0, 9):
            count += len(entries)
        assert count == 9


async def test_an_id_of_a_deleted_topic_acknowledges_nothing_of_its_successor(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(("a", b"old"))
        options: dict[str, Any] = {"initial_position": InitialPosition.Earliest, "ack_receipt_enabled": True}
        consumer = await on.client.subscribe(TOPIC, "s", **options)
        old = await consumer.receive(20_000)
        await consumer.close()
        await anew(on)
        await on.send(("a", b"new"))
        consumer = await on.client.subscribe(TOPIC, "s", **options)
        new = await consumer.receive(20_000)
        await consumer.acknowledge(old.message_id())
        await consumer.acknowledge_cumulative(old.message_id())
        await consumer.close()
        consumer = await on.client.subscribe(TOPIC, "s", **options)
        assert (await consumer.receive(20_000)).message_id() == new.message_id()
