"""`receive(now=True)`: a message that was confirmed before is found, and "there is none" is the brokers' word."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from magnetar.admin import AdminClient
from magnetar.client import aio
from magnetar.client.blocking.client import Client as BlockingClient
from magnetar.client.common.errors import InvalidConfiguration, NoMessageAvailable, OperationNotSupported, Timeout
from tests.client.consume.test_ranges import url_of
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate
from tests.support.cluster import cluster

TYPES = list(aio.ConsumerType)
EARLIEST = aio.InitialPosition.Earliest


async def take_all(consumer: aio.Consumer) -> list[bytes]:
    """Everything that there is now, acknowledged."""
    found = []
    while True:
        try:
            message = await consumer.receive(now=True)
        except NoMessageAvailable:
            return found
        await consumer.acknowledge(message)
        found.append(message.data())


@pytest.mark.parametrize("type_", TYPES)
async def test_what_was_confirmed_is_found_at_once_and_the_answer_says_up_to_where(
    tmp_path: Path, type_: aio.ConsumerType
) -> None:
    async with cluster(tmp_path, roll_entries=7) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type_, initial_position=EARLIEST)
        with pytest.raises(NoMessageAvailable) as nothing:
            await consumer.receive(now=True)
        assert nothing.value.end_indexes == {"persistent://public/default/t": 0}
        for number in range(40):
            await producer.send(b"%d" % number)
            message = await consumer.receive(now=True)
            assert message.data() == b"%d" % number
            await consumer.acknowledge(message)
        with pytest.raises(NoMessageAvailable) as nothing:
            await consumer.receive(now=True)
        assert nothing.value.end_indexes == {"persistent://public/default/t": 40}
        assert nothing.value.reasons == {"persistent://public/default/t": "everything was delivered"}
        assert isinstance(nothing.value, Timeout), "who waits for a time-out catches it"


async def test_a_backlog_far_larger_than_the_queue_is_taken_whole(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=20, cache_bytes=1) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        await producer.send_many([b"%d" % number for number in range(500)])
        for number in range(100):
            await producer.send(b"%d" % (500 + number))
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, receiver_queue_size=3)
        assert await take_all(consumer) == [b"%d" % number for number in range(600)]


async def test_all_partitions_are_asked_and_those_that_were_added(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2) as running,
        aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):
        await admin.create_topic("p", partitions=3)
        consumer = await client.subscribe("p", "s", aio.ConsumerType.Shared, initial_position=EARLIEST)
        producer = await client.create_producer("p")
        sent = [b"%d" % number for number in range(30)]
        for each in sent:
            await producer.send(each)
            assert (await consumer.receive(now=True)).data() == each
        with pytest.raises(NoMessageAvailable) as nothing:
            await consumer.receive(now=True)
        ends = nothing.value.end_indexes
        assert len(ends) == 3
        assert sum(ends.values()) == 30


async def test_a_pattern_finds_what_is_in_the_topics_that_it_knows(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        one, two = [await client.create_producer(f"q-{name}") for name in "ab"]
        consumer = await client.subscribe(
            re.compile("persistent://public/default/q-.*"), "s", aio.ConsumerType.Shared, initial_position=EARLIEST
        )
        for producer, payload in ((one, b"1"), (two, b"2"), (one, b"3")):
            await producer.send(payload)
            assert (await consumer.receive(now=True)).data() == payload
        with pytest.raises(NoMessageAvailable):
            await consumer.receive(now=True)


async def test_of_two_consumers_of_a_shared_subscription_each_message_goes_to_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        consumers = [
            await client.subscribe("t", "s", aio.ConsumerType.Shared, initial_position=EARLIEST, receiver_queue_size=1)
            for _ in range(2)
        ]
        await producer.send_many([b"%d" % number for number in range(50)])
        taken = [await take_all(each) for each in (*consumers, *consumers)]
        assert sorted(int(each) for some in taken for each in some) == list(range(50))


async def test_who_is_not_active_is_told_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        active, other = [
            await client.subscribe(
                "t", "s", aio.ConsumerType.Failover, consumer_name=name, initial_position=EARLIEST
            ) for name in "ab"
        ]  # fmt: skip
        await producer.send(b"x")
        with pytest.raises(NoMessageAvailable) as nothing:
            await other.receive(now=True)
        assert list(nothing.value.reasons.values()) == ["another consumer is the active one"]
        assert (await active.receive(now=True)).data() == b"x"


async def test_what_waits_for_a_transaction_or_its_time_is_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", aio.ConsumerType.Shared, initial_position=EARLIEST)
        async with client.transaction() as txn:
            await producer.send(b"in", txn=txn)
            await producer.send(b"after")
            with pytest.raises(NoMessageAvailable):
                await consumer.receive(now=True)
        assert [(await consumer.receive(10000)).data() for _ in range(2)] == [b"in", b"after"]
        await producer.send(b"later", deliver_after=timedelta(hours=1))
        with pytest.raises(NoMessageAvailable) as nothing:
            await consumer.receive(now=True)
        assert list(nothing.value.reasons.values()) == ["what is left is to be delivered later"]


async def test_a_chunked_message_is_whole_or_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_message_bytes=2000) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t", chunking_enabled=True, batching_enabled=False)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, receiver_queue_size=1)
        large = bytes(range(256)) * 60
        await producer.send(large)
        assert (await consumer.receive(now=True)).data() == large


async def test_it_finds_messages_after_the_topic_has_moved(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2) as running,
        aio.Client(f"{url_of(running)},{running.brokers[1].endpoint}") as client,
        AdminClient(url_of(running)) as admin,
    ):
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for number in range(6):
            await producer.send(b"%d" % number)
            await admin.unload_namespace("public/default")
            message = await consumer.receive(now=True)
            assert message.data() == b"%d" % number
            await consumer.acknowledge(message)


async def test_the_blocking_consumer_does_the_same(tmp_path: Path) -> None:
    def run(url: str) -> None:
        with BlockingClient(url) as client:
            producer = client.create_producer("t")
            consumer = client.subscribe("t", "s")
            for number in range(10):
                with pytest.raises(NoMessageAvailable):
                    consumer.receive(now=True)
                producer.send(b"%d" % number)
                assert consumer.receive(now=True).data() == b"%d" % number
            with pytest.raises(InvalidConfiguration, match="exclude each other"):
                consumer.receive(100, now=True)

    async with cluster(tmp_path) as running:
        await asyncio.to_thread(run, url_of(running))


async def test_a_call_that_is_cancelled_loses_no_message(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for number in range(20):
            call: asyncio.Task[Any] = asyncio.ensure_future(consumer.receive(now=True))
            for _ in range(number):
                await asyncio.sleep(0)
            sending = asyncio.ensure_future(producer.send(b"%d" % number))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await sending
            got = call.result() if call.done() and not call.cancelled() and call.exception() is None else None
            message = got or await consumer.receive(now=True)
            assert message.data() == b"%d" % number


def test_an_older_broker_is_not_asked_what_it_does_not_know() -> None:
    """It would close the consumer, or begin the subscription elsewhere, without a word."""

    async def body(client: aio.Client, _: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for call in (consumer.receive(now=True), consumer.commit(1), consumer.progress()):
            with pytest.raises(OperationNotSupported, match="the broker is older"):
                await call
        async with await client.create_producer("t") as producer:
            await producer.send(b"1")
        assert (await consumer.receive(1000)).data() == b"1", "the consumer goes on"
        with pytest.raises(OperationNotSupported, match="knows no start_at"):
            await client.subscribe("t", "late", start_at=datetime.fromtimestamp(1, UTC))

    simulate(body)  # type: ignore[arg-type]


async def test_what_a_filter_of_the_subscription_does_not_want_is_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, filter="wanted = 'yes'")
        for number in range(30):
            wanted = number % 10 == 9
            await producer.send(b"%d" % number, properties={"wanted": "yes" if wanted else "no"})
            if wanted:
                assert (await consumer.receive(now=True)).data() == b"%d" % number
            else:
                with pytest.raises(NoMessageAvailable):
                    await consumer.receive(now=True)


async def test_now_with_a_time_out_is_refused_before_a_message_is_taken(url: str) -> None:
    async with aio.Client(url) as client:
        await (await client.create_producer("both")).send(b"x")
        consumer = await client.subscribe("both", "asyncio", initial_position=EARLIEST)
        await consumer.wait_available()
        with pytest.raises(InvalidConfiguration, match="exclude each other"):
            await consumer.receive(100, now=True)
        assert (await consumer.receive(now=True)).data() == b"x"


def test_the_blocking_consumer_refuses_now_with_a_time_out_also_while_a_message_waits(url: str) -> None:
    with BlockingClient(url) as client:
        client.create_producer("both").send(b"x")
        consumer = client.subscribe("both", "blocking", initial_position=EARLIEST)
        consumer._run(consumer.inner().wait_available())
        with pytest.raises(InvalidConfiguration, match="exclude each other"):
            consumer.receive(100, now=True)
        assert consumer.receive(now=True).data() == b"x"
