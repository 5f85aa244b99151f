"""Subscriptions that do not last, broadcasts, and subscriptions that begin at a time."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from magnetar.admin import AdminClient
from magnetar.client import aio
from magnetar.client.common.errors import InvalidConfiguration, NoMessageAvailable, NotAllowedError
from tests.client.consume.test_now import take_all
from tests.client.consume.test_ranges import fill, url_of
from tests.client.consume.test_table_view import until
from tests.support.cluster import Cluster, cluster

T = "persistent://public/default/t"
EARLIEST = aio.InitialPosition.Earliest
TYPES = list(aio.ConsumerType)


async def take(consumer: aio.Consumer, count: int) -> list[int]:
    return [int((await consumer.receive(10000)).data()) for _ in range(count)]


async def names_of(running: Cluster) -> list[str]:
    async with AdminClient(url_of(running)) as admin:
        return sorted(each.name for each in (await admin.topic_stats("t")).subscriptions)


@pytest.mark.parametrize("type_", TYPES)
async def test_it_begins_where_it_is_told_is_shown_and_ends_with_its_last_consumer(
    tmp_path: Path, type_: aio.ConsumerType
) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        ids = await fill(client)
        for start, inclusive, first in ((ids[4], False, 5), (ids[4], True, 4), (ids[11], False, 12)):
            consumer = await client.subscribe(
                "t", "s", type_, durable=False, start_message_id=start, start_message_id_inclusive=inclusive
            )
            assert await names_of(running) == ["s"]
            assert await take(consumer, 12 - first) == list(range(first, 12)), (start, inclusive)
            with pytest.raises(NoMessageAvailable):
                await consumer.receive(now=True)
            await consumer.close()
            assert await names_of(running) == []
        latest = await client.subscribe("t", "s", type_, durable=False)
        async with await client.create_producer("t") as producer:
            await producer.send(b"12")
        assert await take(latest, 1) == [12]


@pytest.mark.parametrize("type_", TYPES)
async def test_it_goes_on_after_what_the_program_received_when_its_broker_is_another(
    tmp_path: Path, type_: aio.ConsumerType
) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await fill(client)
        consumer = await client.subscribe("t", "s", type_, durable=False, initial_position=EARLIEST)
        taken: list[int] = []
        for count in (1, 1, 3, 4, 2, 1):  # in front of, inside and at the end of batches
            taken += await take(consumer, count)
            await admin.unload_topic("t")
        assert taken == list(range(12)), "each once and in order"
        with pytest.raises(NoMessageAvailable):
            await consumer.receive(now=True)


async def test_what_was_put_back_comes_again_after_a_reconnect(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await fill(client)
        consumer = await client.subscribe(
            "t", "s", durable=False, initial_position=EARLIEST,
            batch_receive_policy=aio.ConsumerBatchReceivePolicy(max_num_message=100, timeout_ms=60_000),
        )  # fmt: skip
        assert await take(consumer, 2) == [0, 1]
        call = asyncio.ensure_future(consumer.batch_receive())
        await until(lambda: consumer.partitions[0].core.delivered == 12 and not len(consumer.inbox))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await admin.unload_topic("t")
        assert await take(consumer, 10) == list(range(2, 12))


async def test_what_failed_comes_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        for type_ in (aio.ConsumerType.Exclusive, aio.ConsumerType.Shared):
            consumer = await client.subscribe(
                "t", "s", type_, durable=False, initial_position=EARLIEST, negative_ack_redelivery_delay_ms=1
            )
            first = await consumer.receive(10000)
            await consumer.negative_acknowledge(first)
            rest = await take(consumer, 11)
            assert rest == list(range(1, 12))
            assert await take(consumer, 1) == [0], type_
            await consumer.close()


async def test_nothing_is_kept_for_it(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await fill(client)
        consumer = await client.subscribe("t", "s", durable=False, initial_position=EARLIEST, receiver_queue_size=1)
        assert await take(consumer, 1) == [0]
        await (await client.subscribe("t", "other")).close()
        await admin.trim_topic("t")
        assert (await admin.offsets("t")).earliest_index > 0, "a subscription that lasts would hold this"
        with pytest.raises(NotAllowedError):
            async with client.transaction() as txn:
                await consumer.acknowledge(await consumer.receive(10000), txn=txn)


async def test_a_broadcast_gives_every_consumer_every_message(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        several = [
            await client.subscribe("t", "config", broadcast=True, initial_position=EARLIEST) for _ in range(3)
        ]
        named = await client.subscribe(
            "t", "config", broadcast=True, durable=True, consumer_name="host-1", initial_position=EARLIEST
        )
        await fill(client)
        for consumer in (*several, named):
            assert await take_all(consumer) == [b"%d" % number for number in range(12)]
        assert len({each.subscription_name() for each in several}) == 3
        for each in (*several, named):
            await each.close()
        assert await names_of(running) == ["config-host-1"], "the durable one is left, under its name"
        async with await client.create_producer("t") as producer:
            await producer.send(b"12")
        again = await client.subscribe("t", "config", broadcast=True, durable=True, consumer_name="host-1")
        assert await take_all(again) == [b"12"], "what came while it was away"


@pytest.mark.parametrize("durable", [True, False])
async def test_a_subscription_begins_at_a_time_in_each_partition_and_stays_there(
    tmp_path: Path, durable: bool
) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin
    ):  # fmt: skip
        await admin.create_topic("p", partitions=2)
        producers = [await client.create_producer(f"p-partition-{n}") for n in range(2)]
        for producer in producers:
            await producer.send_many([b"old"] * 3)
        await asyncio.sleep(0.02)
        at = datetime.now(UTC)
        await asyncio.sleep(0.02)
        for n, producer in enumerate(producers):
            await producer.send(b"%d" % n)
        consumer = await client.subscribe("p", "s", aio.ConsumerType.Failover, start_at=at, durable=durable)
        await admin.unload_namespace("public/default")
        assert sorted(await take_all(consumer)) == [b"0", b"1"]
        await admin.unload_namespace("public/default")
        assert await take_all(consumer) == [], "what was taken does not come again"
        if durable:
            await consumer.close()
            early = datetime.fromtimestamp(1, UTC)
            again = await client.subscribe("p", "s", aio.ConsumerType.Failover, start_at=early)
            assert await take_all(again) == [], "a subscription that exists is not moved"
            fresh = await client.subscribe("p", "fresh", start_at=early)
            assert len(await take_all(fresh)) == 8


async def test_wrong_starts_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        now = datetime.now(UTC)
        for options, why in (
            ({"start_at": datetime(2026, 1, 1)}, "a datetime with a time zone"),
            ({"start_at": 5}, "a datetime with a time zone"),
            ({"start_message_id": aio.MessageId.earliest}, "of a subscription that is not durable"),
            ({"durable": False, "start_message_id": aio.MessageId.earliest, "start_at": now}, "exclude each other"),
            ({"broadcast": True, "durable": True}, "needs a consumer_name"),
            ({"durable": "no"}, "True, False, or None"),
            ({"durable": False, "redelivery_order": "key"}, "keeps nothing"),
            ({"durable": False, "enable_retry": True, "consumer_type": aio.ConsumerType.Shared}, "keeps nothing"),
            ({"partitions": "01"}, "a list of numbers"),
        ):
            with pytest.raises(InvalidConfiguration, match=why):
                await client.subscribe("t", "s", **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfiguration, match="of one topic"):
            await client.subscribe(["t", "u"], "s", partitions=[0])


async def test_what_waits_for_its_key_is_handled_after_a_reconnect_though_later_messages_were_taken(
    tmp_path: Path,
) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        consumer = await client.subscribe("t", "s", durable=False, initial_position=EARLIEST)
        begun, may_end = list[bytes](), asyncio.Event()

        async def handle(message: aio.Message) -> None:
            begun.append(message.data())
            await may_end.wait()

        async with consumer.listen(handle), await client.create_producer("t") as producer:
            for text, key in ((b"0", "a"), (b"1", "a"), (b"2", "b")):
                await producer.send(text, partition_key=key)
            await until(lambda: begun == [b"0", b"2"])
            await admin.unload_topic("t")
            await producer.send(b"3", partition_key="b")
            may_end.set()
            await until(lambda: {b"1", b"3"} <= {*begun})


async def test_what_debounce_holds_comes_after_a_reconnect_though_later_messages_were_taken(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running, aio.Client(url_of(running)) as client, AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        consumer = await client.subscribe("t", "s", durable=False, initial_position=EARLIEST, debounce=3.0)
        async with await client.create_producer("t") as producer:
            await producer.send(b"0", partition_key="a")
            await producer.send(b"1")
            assert await take(consumer, 1) == [1]
            await admin.unload_topic("t")
            found = set[int]()
            while 0 not in found:
                found |= {*await take(consumer, 1)}
