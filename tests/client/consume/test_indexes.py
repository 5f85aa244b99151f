"""A subscription by indexes: where it is, commits with a note, seeks, and consumers of chosen partitions."""

import asyncio
from pathlib import Path

import pytest

from magnetar.admin import AdminClient
from magnetar.client import aio
from magnetar.client.common.errors import (
    ConsumerBusy,
    CumulativeAcknowledgementNotAllowedError,
    InvalidConfiguration,
    InvalidTopicName,
    NoMessageAvailable,
    NotAllowedError,
    OperationNotSupported,
    PulsarException,
)
from magnetar.client.consume.consumer import PartitionProgress
from tests.client.consume.test_now import take_all
from tests.client.consume.test_ranges import fill, url_of
from tests.support.cluster import cluster

T = "persistent://public/default/t"
EARLIEST = aio.InitialPosition.Earliest


async def take(consumer: aio.Consumer, count: int) -> list[int]:
    return [int((await consumer.receive(10000)).data()) for _ in range(count)]


async def test_a_commit_acknowledges_what_is_before_an_index_also_inside_a_batch(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        for index in range(13):
            consumer = await client.subscribe("t", f"s{index}", initial_position=EARLIEST)
            assert (await consumer.progress())[T][:4] == (0, 0, 12, b"")
            await consumer.commit(index, b"note %d" % index)
            assert (await consumer.progress())[T][:4] == (0, index, 12, b"note %d" % index)
            assert (await consumer.position(), await consumer.end()) == ({T: index}, {T: 12})
            assert await consumer.lag() == {T: 12 - index}
            await consumer.close()
            again = await client.subscribe("t", f"s{index}", initial_position=EARLIEST)
            assert await take(again, 12 - index) == list(range(index, 12)), "none is lost, and none comes again"
            with pytest.raises(NoMessageAvailable):
                await again.receive(now=True)


async def test_position_and_note_are_those_of_the_last_commit_after_the_topic_moved(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2, roll_entries=4) as running,
        aio.Client(f"{url_of(running)},{running.brokers[1].endpoint}") as client,
        AdminClient(url_of(running)) as admin,
    ):
        await fill(client)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for index, note in ((3, b"a" * 1024), (5, b"b"), (8, None), (9, b"last")):
            await consumer.commit(index, note)
            await admin.unload_namespace("public/default")
            assert (await consumer.progress())[T][1:4] == (index, 12, note or b"")
        await consumer.commit(2, b"back")
        assert (await consumer.progress())[T][1:4] == (9, 12, b"back"), "a commit never goes back"
        await consumer.seek(aio.MessageId.earliest)
        assert (await consumer.progress())[T][:4] == (0, 0, 12, b""), "a seek removes the note"


async def test_a_commit_that_may_not_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for index in (-1, True, "3", 1 << 63):
            with pytest.raises(InvalidConfiguration, match="index is a whole number"):
                await consumer.commit(index)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfiguration, match="note is bytes, at most 1024"):
            await consumer.commit(1, b"x" * 1025)
        with pytest.raises(PulsarException, match=r"index 13 is not within 0 … 12"):
            await consumer.commit(13)
        with pytest.raises(InvalidConfiguration, match="is no partition, or several"):
            await consumer.commit(1, partition=4)
        shared = await client.subscribe("t", "shared", aio.ConsumerType.Shared, initial_position=EARLIEST)
        with pytest.raises(CumulativeAcknowledgementNotAllowedError):
            await shared.commit(3)
        brief = await client.subscribe("t", "brief", durable=False, initial_position=EARLIEST)
        with pytest.raises(NotAllowedError, match="keeps no note"):
            await brief.commit(3, b"note")
        await brief.commit(3)
        assert (await brief.position(), await consumer.position()) == ({T: 3}, {T: 0})


async def test_only_the_active_consumer_of_a_failover_subscription_commits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        active, other = [
            await client.subscribe("t", "s", aio.ConsumerType.Failover, consumer_name=name, initial_position=EARLIEST)
            for name in "ab"
        ]
        with pytest.raises(NotAllowedError, match="only that one commits"):
            await other.commit(7)
        await active.commit(3)
        await active.close()
        await other.commit(7)
        assert await other.position() == {T: 7}


async def test_a_seek_to_an_index_is_exact_also_inside_a_batch_for_consumers_and_after_a_reconnect(
    tmp_path: Path
) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running,
        aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):
        await fill(client)
        durable = await client.subscribe("t", "s", initial_position=EARLIEST)
        brief = await client.subscribe("t", "b", durable=False, initial_position=EARLIEST)
        for consumer in (durable, brief):
            for index in (7, 3, 11, 0, 5, 4):
                await consumer.seek_index(index)
                await admin.unload_namespace("public/default")
                assert await take(consumer, 12 - index) == list(range(index, 12))
            await consumer.seek_index(12)
            with pytest.raises(NoMessageAvailable):
                await consumer.receive(now=True)


async def test_neither_a_seek_nor_a_commit_splits_a_chunked_message(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_message_bytes=2000) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t", chunking_enabled=True, batching_enabled=False)
        large = bytes(range(256)) * 30
        await producer.send(b"first")
        await producer.send(large)
        await producer.send(b"last")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        indexes = [(await consumer.receive(10000)).index() for _ in range(3)]
        for index in range(1, indexes[1] + 1):
            await consumer.seek_index(index)
            assert [(await consumer.receive(10000)).data() for _ in range(2)] == [large, b"last"], index
        await consumer.seek_index(0)
        await consumer.commit(indexes[1])
        assert await consumer.position() == {T: 1}, "the message comes again whole"
        await consumer.commit(indexes[1] + 1)
        assert await consumer.position() == {T: indexes[1] + 1}


async def test_partitions_are_named_by_number_or_by_topic(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin
    ):  # fmt: skip
        await admin.create_topic("p", partitions=2)
        consumer = await client.subscribe("p", "s", initial_position=EARLIEST)
        for partition in range(2):
            async with await client.create_producer(f"p-partition-{partition}") as producer:
                await producer.send_many([b"x"] * 5)
        first, second = (f"persistent://public/default/p-partition-{n}" for n in range(2))
        with pytest.raises(InvalidConfiguration, match="is no partition, or several"):
            await consumer.commit(1)
        for request in (consumer.commit(1, partition="a/b"), consumer.seek_index(1, partition="a/b")):
            with pytest.raises(InvalidTopicName):
                await request
        await consumer.commit(2, partition=0)
        await consumer.commit(4, b"n", partition=second)
        found = await consumer.progress()
        assert (found[first].position, found[second].position, found[second].note) == (2, 4, b"n")
        assert sum(each.lag for each in found.values()) == 4


async def test_a_partition_has_one_exclusive_consumer_and_changes_hands_without_a_loss(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin
    ):  # fmt: skip
        await admin.create_topic("p", partitions=4)
        one = await client.subscribe("p", "s", partitions=[0, 1, 2, 3], initial_position=EARLIEST)
        two = await client.subscribe("p", "s", partitions=[], initial_position=EARLIEST)
        producer = await client.create_producer("p")
        sent = [b"%d" % number for number in range(40)]
        for each in sent:
            await producer.send(each)
        done: list[bytes] = []

        for _ in range(10):
            message = await one.receive(now=True)
            await one.acknowledge(message)
            done.append(message.data())
        with pytest.raises(ConsumerBusy):
            await two.assign([2, 3])
        assert not two.is_over
        await one.assign([0, 1])
        await two.assign([2, 3])
        assert sorted(each.topic.partition for each in one.partitions) == [0, 1]
        for consumer in (one, two):
            done += await take_all(consumer)
        assert sorted(done, key=int) == sent, "each once, though a partition changed hands"
        await two.assign(())
        await one.assign(range(4))
        assert sum((await one.lag()).values()) == 0
        with pytest.raises(InvalidConfiguration, match="partitions 0 … 3, and not 4"):
            await one.assign([4])
        with pytest.raises(InvalidConfiguration, match="a partition is a whole number"):
            await one.assign([-1])
        shared = await client.subscribe("p", "shared", aio.ConsumerType.Shared)
        with pytest.raises(OperationNotSupported):
            await shared.assign([0])


async def test_a_commit_that_meets_a_reset_does_not_undo_it(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin
    ):  # fmt: skip
        await fill(client)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await consumer.commit(9)
        (partition,) = consumer.partitions
        commit = asyncio.ensure_future(consumer.commit(12))
        partition._attachment.close_at_broker()  # its answer never comes
        await admin.reset_subscription("t", "s", aio.MessageId.earliest)
        partition.requests.moves += 1
        partition.on_lost(PulsarException("the test"))
        with pytest.raises(PulsarException, match="was moved during the commit"):
            await commit
        assert (await consumer.position())[T] in (0, 12)


def test_lag_is_never_below_nothing() -> None:
    assert PartitionProgress(0, 9, 5, b"", 0).lag == 0
    assert PartitionProgress(0, 3, 5, b"", 0).lag == 2
