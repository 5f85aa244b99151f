"""Pulling by index: each message once and in order, and a typed answer where there is none."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from magnetar.admin import AdminClient
from magnetar.client import aio
from magnetar.client.aio import MemoryOffsetStore, OffsetKey, PullStatus, SubscriptionOffsetStore
from magnetar.client.blocking.client import Client as BlockingClient
from magnetar.client.common.errors import (
    AlreadyClosed,
    CryptoError,
    InvalidConfiguration,
    OperationNotSupported,
    PulsarException,
    TopicNotFound,
)
from magnetar.client.model.schemas import StringSchema
from tests.client.consume.test_compaction import TOPIC, bench
from tests.client.consume.test_made_anew import anew
from tests.client.consume.test_ranges import fill, url_of
from tests.client.model.keys import Keys
from tests.support.cluster import cluster

FOUND, NO_NEW, NO_MATCH, OUT_OF_RANGE = PullStatus
T = "persistent://public/default/t"


def numbers(found: aio.PullResult) -> list[int]:
    return [int(message.data()) for message in found.messages]


async def pull_all(pull: aio.PullConsumer, index: int, at_once: int, filter: str | None = None) -> list[int]:
    """All numbers from an index on, over pulls of at most `at_once`."""
    taken: list[int] = []
    while (found := await pull.pull(index, at_once, filter=filter)).status is not NO_NEW:
        taken += numbers(found)
        assert found.next_index > index, "each pull gets further"
        index = found.next_index
    return taken


async def test_every_range_comes_once_and_in_order_also_inside_batches(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        async with await client.pull_consumer("t") as pull:
            for at_once in (1, 2, 5, 100):
                for index in (0, 7, 3, 12, 11, 2):
                    assert await pull_all(pull, index, at_once) == list(range(index, 12)), (index, at_once)
            found = await pull.pull(2, 4)
            assert (found.status, numbers(found), found.next_index) == (FOUND, [2, 3, 4, 5], 6)
            assert [message.index() for message in found.messages] == [2, 3, 4, 5]
            assert found.messages[0].properties() == {"entry": "1"}
            empty = await pull.pull(12)
            assert (empty.status, empty.messages, empty.next_index, empty.end_index) == (NO_NEW, (), 12, 12)


async def test_a_broker_that_is_away_is_an_error_of_the_sdk(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running), operation_timeout_seconds=1) as client:
        await fill(client)
        async with await client.pull_consumer("t") as pull:
            await running.brokers[0].close()
            with pytest.raises(PulsarException):
                await pull.list_partitions()


async def test_limits_of_bytes_and_time_hold_and_one_message_always_comes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        await producer.send_many([b"%03d" % number for number in range(10)])
        async with await client.pull_consumer("t") as pull:
            assert numbers(await pull.pull(0, max_bytes=10)) == [0, 1, 2]
            assert numbers(await pull.pull(3, max_bytes=1)) == [3]
            waiting = asyncio.ensure_future(pull.pull(10, timeout=30))
            await asyncio.sleep(0)
            await producer.send(b"010")
            assert numbers(await waiting) == [10]
            assert (await pull.pull(11, timeout=0.05)).status is NO_NEW


async def test_a_filter_leaves_out_and_the_next_index_goes_over_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        async with await client.pull_consumer("t") as pull:
            for filter, wanted in (
                ("entry IN ('1', '3')", [1, 2, 3, 6]), ("message.key = 'k5'", [10, 11]),
                ("message.size > 1", [10, 11]), ("entry = '0'", [0]),
            ):  # fmt: skip
                for at_once in (1, 3, 100):
                    assert await pull_all(pull, 0, at_once, filter) == wanted
            nothing = await pull.pull(4, filter="entry = '9'")
            assert (nothing.status, nothing.messages, nothing.next_index) == (NO_MATCH, (), 12)
            with pytest.raises(InvalidConfiguration, match=r"entry|expected|="):
                await pull.pull(0, filter="entry = ")


async def test_what_retention_removed_and_what_is_not_there_yet_is_out_of_range(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await fill(client)
        store = SubscriptionOffsetStore(client, "kept")
        async with await client.pull_consumer("t", offsets=store) as pull, await client.pull_consumer("t") as slow:
            assert numbers(await slow.pull(0, 1)) == [0]
            after = await pull.pull(13)
            assert (after.status, after.next_index, after.earliest_index, after.end_index) == (OUT_OF_RANGE, 12, 0, 12)
            await pull.store_offset(await pull.load_offset() + 8)
            await admin.trim_topic("t")
            earliest = (await admin.offsets("t")).earliest_index
            assert 0 < earliest <= 8
            before = await pull.pull(0)
            assert (before.status, before.next_index, before.earliest_index) == (OUT_OF_RANGE, earliest, earliest)
            assert await pull_all(pull, before.next_index, 3) == list(range(earliest, 12))
            # it has read ahead what was trimmed, and says so as soon as it has not
            assert (await slow.pull(1, 100)).status in (FOUND, OUT_OF_RANGE)


async def test_a_pull_ahead_of_which_retention_removed_messages_says_so(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await fill(client)
        async with await client.pull_consumer("t", receiver_queue_size=1) as pull:
            assert numbers(await pull.pull(0, 1)) == [0]
            consumer = await client.subscribe("t", "s")
            await consumer.close()  # it holds nothing: it began at the end
            await admin.unload_topic("t")
            await admin.trim_topic("t")
            earliest = (await admin.offsets("t")).earliest_index
            assert earliest > 1
            index, seen = 1, list[PullStatus]()
            for _ in range(20):
                found = await pull.pull(index)
                seen.append(found.status)
                index = found.next_index
                if found.status is OUT_OF_RANGE:
                    break
            assert OUT_OF_RANGE in seen, "no message is left out without a word"
            assert index == earliest
            assert await pull_all(pull, index, 100) == list(range(earliest, 12))


async def test_transactions_come_when_they_are_committed_and_aborted_ones_never(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        producer = await client.create_producer("t")
        await producer.send(b"0")
        with contextlib.suppress(InterruptedError):
            async with client.transaction() as lost:
                await producer.send(b"1", txn=lost)
                raise InterruptedError
        async with await client.pull_consumer("t") as pull:
            async with client.transaction() as txn:
                await producer.send(b"2", txn=txn)
                await producer.send(b"3")
                assert await pull_all(pull, 0, 10) == [0]
            await asyncio.sleep(0)
            found = await pull.pull(1, timeout=20)
            index, taken = found.next_index, numbers(found)
            while len(taken) < 2:
                found = await pull.pull(index, timeout=20)
                index, taken = found.next_index, taken + numbers(found)
            assert taken == [2, 3]
            assert await pull_all(pull, 0, 1) == [0, 2, 3]


async def test_chunks_schemas_and_partitions_are_those_of_a_reader(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, max_message_bytes=2000) as running, aio.Client(url_of(running)) as client,
        AdminClient(url_of(running)) as admin,
    ):  # fmt: skip
        await admin.create_topic("p", partitions=2)
        large = "x" * 9000
        producer = await client.create_producer(
            "p-partition-1", schema=StringSchema(), chunking_enabled=True, batching_enabled=False
        )
        for text in ("a", large, "b"):
            await producer.send(text)
        async with await client.pull_consumer("p", schema=StringSchema()) as pull:
            assert await pull.list_partitions() == [0, 1]
            assert (await pull.pull(0, partition=0)).status is NO_NEW
            found = await pull.pull(0, 2, partition=1)
            assert [message.value() for message in found.messages] == ["a", large]
            inside = await pull.pull(found.messages[1].index() - 1, 1, partition=1)
            assert [message.value() for message in inside.messages] == [large], "a chunked message is pulled whole"
            rest = await pull.pull(found.next_index, partition=1)
            assert [message.value() for message in rest.messages] == ["b"]
            for wrong in (None, 2):
                with pytest.raises(InvalidConfiguration, match="partition"):
                    await pull.pull(0, partition=wrong)
            await admin.update_topic("p", partitions=3)
            async with await client.create_producer("p-partition-2", schema=StringSchema()) as later:
                await later.send("new")
            added = await pull.pull(0, partition=2)
            assert [message.value() for message in added.messages] == ["new"], "a partition that was added meanwhile"


async def test_of_a_compacted_topic_the_latest_of_each_key_is_pulled(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("b", b"5"))
        await on.compact()
        await on.send(("a", b"6"))
        async with await on.client.pull_consumer(TOPIC, is_read_compacted=True) as pull:
            assert await pull_all(pull, 0, 2) == [3, 4, 5, 6]
            assert await pull_all(pull, 3, 1) == [4, 5, 6]


async def test_an_offset_is_not_used_for_a_topic_that_was_made_anew(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(*((key, b"1") for key in "abcde"))
        memory = MemoryOffsetStore()
        pull = await on.client.pull_consumer(TOPIC, offsets=memory)
        await pull.store_offset(4)
        assert await pull.load_offset() == 4
        await anew(on)
        await on.send(("x", b"7"), ("y", b"8"))

        async def pull_on() -> None:
            while True:
                await pull.pull(4, timeout=1)

        with pytest.raises(TopicNotFound, match="made anew"):
            await pull_on()
        for call in (pull.load_offset(), pull.store_offset(5), pull.pull(0)):
            with pytest.raises(TopicNotFound, match="made anew"):
                await call
        await pull.close()
        again = await on.client.pull_consumer(TOPIC, offsets=memory)
        assert await again.load_offset() == 0, "the offset is the other topic's"
        assert await pull_all(again, 0, 10) == [7, 8]
        assert [each.topic for each in memory.offsets] == [f"persistent://public/default/{TOPIC}"]


async def test_a_store_of_the_broker_keeps_messages_and_never_goes_back(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2, roll_entries=4) as running,
        aio.Client(f"{url_of(running)},{running.brokers[1].endpoint}") as client,
        AdminClient(url_of(running)) as admin,
    ):
        await fill(client)
        store = SubscriptionOffsetStore(client, "s")
        async with await client.pull_consumer("t", offsets=store) as pull:
            for index in (0, 3, 7):
                await pull.store_offset(index)
                await admin.unload_topic("t")
                assert await pull.load_offset() == index
            await pull.store_offset(2)
            assert await pull.load_offset() == 7
        stale = OffsetKey(T, 12345)
        with pytest.raises(TopicNotFound):
            await store.load(stale)
        with pytest.raises(TopicNotFound):
            await store.store(stale, 9)


async def test_a_pull_that_is_cancelled_is_repeated_without_a_loss(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        await fill(client)
        async with await client.pull_consumer("t") as pull:
            for steps in range(0, 60, 3):
                call = asyncio.ensure_future(pull.pull(5, 3, timeout=10))
                for _ in range(steps):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                assert numbers(await pull.pull(5, 3)) == [5, 6, 7]


async def test_wrong_arguments_and_what_is_closed_are_typed_errors(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        pull = await client.pull_consumer("t")
        for arguments in (
            {"from_index": -1}, {"from_index": "0"}, {"from_index": 0, "max_messages": 0},
            {"from_index": 0, "max_bytes": 0}, {"from_index": 0, "timeout": -1}, {"from_index": 0, "partition": -1},
        ):  # fmt: skip
            with pytest.raises(InvalidConfiguration):
                await pull.pull(**arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfiguration, match="without a store"):
            await pull.load_offset()
        with pytest.raises(InvalidConfiguration, match=r"offsets is an object with load\(\) and store\(\)"):
            await client.pull_consumer("t", offsets=7)  # type: ignore[arg-type]
        with pytest.raises(OperationNotSupported, match="keeps nothing"):
            await client.pull_consumer("non-persistent://public/default/n")
        await pull.close()
        assert pull.is_over
        with pytest.raises(AlreadyClosed):
            await pull.pull(0)


async def test_what_is_not_decrypted_is_not_pulled_past(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        keys = Keys("a")
        async with await client.create_producer("t", encryption_key="a", crypto_key_reader=keys) as producer:
            await producer.send(b"1")
        async with await client.pull_consumer("t") as pull:
            for _ in range(2):
                with pytest.raises(CryptoError):
                    await pull.pull(0)
        async with await client.pull_consumer("t", crypto_key_reader=keys) as pull:
            assert numbers(await pull.pull(0)) == [1]


async def test_the_blocking_one_does_the_same(tmp_path: Path) -> None:
    def run(url: str) -> None:
        with BlockingClient(url) as client:
            producer = client.create_producer("t")
            for number in range(5):
                producer.send(b"%d" % number)
            with client.pull_consumer("t", offsets=SubscriptionOffsetStore(client.inner(), "s")) as pull:
                assert pull.load_offset() == 0
                assert numbers(pull.pull(1, 3)) == [1, 2, 3]
                pull.store_offset(4)
                assert pull.load_offset() == 4
                assert pull.progress().end == 5
                assert pull.list_partitions() == []
                assert pull.topic() == T

    async with cluster(tmp_path) as running:
        await asyncio.to_thread(run, url_of(running))
