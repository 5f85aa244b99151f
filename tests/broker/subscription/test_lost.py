"""A consumer learns that what is next is lost, with the range; it does not wait for what never comes."""

import asyncio
import logging
from pathlib import Path

import pytest

from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.log.reader import TopicLogReader
from magnetar.client.common.errors import PulsarException as ClientError
from magnetar.client.model.settings import InitialPosition
from magnetar.ledger.reader import LedgerReader
from magnetar.ledger.reader_core import StoredCopy
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import DataLost
from magnetar.proto.names import Position, TopicName
from tests.support.cluster import TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"


async def _all(consumer: TestConsumer) -> None:
    while True:
        await consumer.receive()


async def test_consumers_of_lost_entries_are_told_the_range_and_those_after_it_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as running:
        broker, world = running.brokers[0], running.world
        producer = await TestProducer(world, broker, TOPIC).opened()
        for number in range(8):
            await producer.send(b"%d" % number)
        topic = await broker.topic_manager.load_topic(TopicName.parse(TOPIC))
        (span,) = topic.log.shape.spans
        topic.log.reader._cache.discard(span.ledger_id)
        original = LedgerReader.read_stored

        async def read(self: LedgerReader, first: int, last: int, bytes_max: int | None = None) -> list[StoredCopy]:
            if 2 <= first <= 4:
                raise DataLost("no replica has it", ledger=self.ledger_id, entry=first)
            return await original(self, first, min(last, 1) if first < 2 else last, bytes_max)

        monkeypatch.setattr(LedgerReader, "read_stored", read)
        earliest = wire.Subscribe.EARLIEST
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                consumer = await TestConsumer(world, broker, TOPIC, initial_position=earliest).ready()
                with pytest.raises(DataLost, match="entries 2 to 4") as raised:
                    await _all(consumer)
                assert (raised.value.fields["first"], raised.value.fields["last"]) == ("2", "4")
        assert sum("told" in record.message for record in caplog.records) <= 2, "not once for each try"
        subscription = topic.subscriptions["s"]
        subscription.skip_up_to(topic.log.shape.position_before(Position(span.ledger_id, 5)))
        consumer = await TestConsumer(world, broker, TOPIC).ready()
        assert (await consumer.receive()).entry_id == 5


async def test_the_client_raises_it_from_receive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from magnetar.asyncio import Client

    async with cluster(tmp_path) as running, Client(f"pulsar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer("t")
        await producer.send(b"x")
        topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
        topic.log.reader._cache.discard(topic.log.shape.spans[0].ledger_id)

        async def read(*_: object) -> list[StoredEntry]:
            raise DataLost("no replica has it", ledger=topic.log.shape.spans[0].ledger_id, entry=0)

        monkeypatch.setattr(TopicLogReader, "read", read)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        with pytest.raises(ClientError, match=r"entries 0 to 0 .* are lost"):
            async with asyncio.timeout(20):
                await consumer.receive()
