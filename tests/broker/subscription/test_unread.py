"""What a key index excludes is not read, and what a summary excludes is not unfolded: a wanted message always comes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log import key_index_core
from magnetar.broker.log.key_indexes import KeyIndexes, KeyIndexSearch
from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.subscription import filtering
from magnetar.broker.topic.topic import Topic
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import CompressionType, ConsumerType, InitialPosition
from magnetar.ledger.reader import LedgerReader
from magnetar.proto.entry_filter import EntryFilter
from magnetar.proto.errors import DataLost
from magnetar.proto.filters import parse_filter
from magnetar.proto.policies import Policies
from tests.client.model.keys import Keys
from tests.support.cluster import Cluster, cluster

NAME = "persistent://public/default/t"
WANTED = "region = 'eu'"
EVERY = list(ConsumerType)
ROLL = 20


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.005)


class At:
    """A cluster with a topic of small ledgers and no cache. `read`: entries that were read from bookies, by ledger."""

    def __init__(self, running: Cluster, client: aio.Client, admin: AdminClient) -> None:
        self.running, self.client, self.admin = running, client, admin
        self.read = Counter[int]()

    @property
    def topic(self) -> Topic:
        return self.running.brokers[0].topics[NAME]

    @property
    def subscription(self) -> Any:
        return self.topic.subscriptions["s"]

    @property
    def filtering(self) -> Any:
        return self.subscription.filtering

    @property
    def is_caught_up(self) -> bool:
        return bool(self.subscription.cursor.mark == self.subscription.log.shape.last_position)

    async def send(self, *regions: str, **options: Any) -> list[MessageId]:
        """One message an entry. Their text is their region and their number."""
        given = {name: options.pop(name) for name in ("crypto_key_reader", "encryption_key") if name in options}
        async with await self.client.create_producer(NAME, batching_enabled=False, **given) as producer:
            return list(await asyncio.gather(*(
                producer.send(f"{region} {number}".encode(), properties={"region": region}, **options)
                for number, region in enumerate(regions)
            )))  # fmt: skip

    async def index(self) -> None:
        """Seals the ledger that is written, and builds what is missing."""
        if self.topic.applied.key_index == "off":
            await self.admin.set_topic_policies(NAME, Policies(key_index="keys+properties"))
            await until(lambda: self.topic.applied.key_index != "off")
        await self.topic.log.roll_ledger()
        self.topic.key_indexes.run_due_work(self.topic.applied)
        await self.topic.key_indexes.wait_built()
        assert not self.topic.key_indexes.count_unindexed_ledgers()
        self.read.clear()

    async def consumer(self, type_: ConsumerType = ConsumerType.Shared, **options: Any) -> Any:
        given = {"filter": WANTED, "initial_position": InitialPosition.Earliest, **options}
        return await self.client.subscribe(NAME, "s", type_, **given)

    async def take(self, consumer: Any, count: int, *, acknowledge: bool = True) -> list[str]:
        found = []
        for _ in range(count):
            message = await consumer.receive(20_000)
            found.append(message.data().decode())
            if acknowledge:
                await consumer.acknowledge(message)
        return found

    def read_of_log(self) -> int:
        return sum(self.read[span.ledger_id] for span in self.topic.log.shape.spans)


@pytest.fixture
async def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[At]:
    monkeypatch.setattr(key_index_core, "BLOCK_BYTES_MIN", 300)
    small = {"roll_entries": ROLL, "cache_bytes": 0, "catch_up_cache_bytes": 0, "max_message_bytes": 3000}
    async with cluster(tmp_path, **small) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with aio.Client(url) as client, AdminClient(url) as admin:
            await admin.create_topic("t")
            at, read = At(running, client, admin), LedgerReader.read_stored

            async def count(reader: Any, first: int, last: int, bytes_max: int) -> Any:
                found = await read(reader, first, last, bytes_max)
                at.read[reader.ledger_id] += len(found)
                return found

            monkeypatch.setattr(LedgerReader, "read_stored", count)
            yield at


# --------------------------------------------------------------------------------------------------- by a key index
@pytest.mark.parametrize("type_", EVERY, ids=[each.name for each in EVERY])
async def test_blocks_and_ledgers_with_nothing_wanted_are_not_read(at: At, type_: ConsumerType) -> None:
    regions = ["us"] * 200
    regions[0] = regions[90] = regions[91] = regions[199] = "eu"
    await at.send(*regions, partition_key="k")
    await at.index()
    consumer = await at.consumer(type_)
    assert await at.take(consumer, 4) == ["eu 0", "eu 90", "eu 91", "eu 199"]
    await until(lambda: at.is_caught_up)
    assert at.read_of_log() < 30, "three blocks of 200 entries"
    filtering = at.filtering
    assert (filtering.judged, filtering.filtered, filtering.filtered_entries) == (200, 196, 196)
    assert filtering.filtered_unread >= 170
    at.subscription.dispatcher.check()
    (told,) = (await at.admin.topic_stats("t")).subscriptions
    assert told.filtered_unread == filtering.filtered_unread
    assert (await at.admin.subscription_filter("t", "s")).filtered_unread == filtering.filtered_unread
    (member,) = [each.member for each in at.subscription.consumers.values()]
    assert member.delivered_messages == 4, "what is passed over costs no permits"


async def test_what_is_wanted_comes_whatever_is_in_a_topic(at: At) -> None:
    """A walk: single messages and batches, with and without a summary, encrypted, compressed, in chunks, delayed, in
    transactions that end either way."""
    for seed in range(3):
        await _walk(at, random.Random(seed), seed)


async def _walk(at: At, rng: random.Random, seed: int) -> None:
    keys, due, wanted = Keys("a"), at.running.world.clock.wall_ms() + 300, []
    for step in range(14):
        secret, summary = {"crypto_key_reader": keys, "encryption_key": "a"}, {"filter_properties": ("region",)}
        how: dict[str, Any] = rng.choice((
            {"batching_enabled": False}, {"batching_enabled": True},
            {"batching_enabled": True, "batch_by": ("region",)},
            {"batching_enabled": True, "compression_type": CompressionType.LZ4, **summary},
            {"batching_enabled": True, **secret}, {"batching_enabled": True, **secret, **summary},
            {"batching_enabled": False, "chunking_enabled": True},
        ))  # fmt: skip
        txn = await at.client.transaction() if rng.random() < 0.3 else None
        commits, share = rng.random() < 0.7, rng.choice((0.0, 0.0, 0.1, 0.6))
        options = {"txn": txn} if txn is not None else {"deliver_at": due} if rng.random() < 0.2 else {}
        async with await at.client.create_producer(NAME, batching_max_publish_delay_ms=20, **how) as producer:
            sending = []
            for number in range(rng.randint(1, 12)):
                text = f"{seed} {step} {number} " + "x" * (5000 if "chunking_enabled" in how else 1)
                region = {"region": "eu"} if rng.random() < share else rng.choice(({"region": "us"}, {}))
                key = str(number % 3)
                sending.append(producer.send(text.encode(), properties=region, partition_key=key, **options))
                if region.get("region") == "eu" and (txn is None or commits):
                    wanted.append(text)
            await asyncio.gather(*sending)
        if txn is not None:
            await (txn.commit() if commits else txn.abort())
        if rng.random() < 0.2:
            await at.topic.log.roll_ledger()
    await at.index()
    consumer = await at.consumer(rng.choice(EVERY), crypto_key_reader=keys)
    assert Counter(await at.take(consumer, len(wanted))) == Counter(wanted)
    await until(lambda: at.is_caught_up)
    assert at.filtering.filtered_unread > 0, "some of it was excluded"
    at.subscription.dispatcher.check()
    await consumer.close()
    await at.admin.reset_subscription("t", "s", MessageId.latest)


async def test_while_a_transaction_is_open_nothing_of_it_or_after_it_is_passed_over(at: At) -> None:
    txn = await at.client.transaction()
    await at.send(*["us"] * 5)
    await at.send(*["us"] * 5, txn=txn)
    await at.send(*["us"] * 5, "eu")
    await at.index()
    consumer = await at.consumer()
    await until(lambda: at.subscription.cursor.mark.entry_id == 4)
    assert at.filtering.judged_up_to.entry_id == 4
    await txn.abort()
    assert await at.take(consumer, 1) == ["eu 5"]
    await until(lambda: at.is_caught_up)
    assert at.filtering.judged_up_to <= at.topic.log.shape.last_position


async def test_who_reads_compacted_gets_tombstones_that_the_index_and_the_summary_exclude(at: At) -> None:
    await (await at.consumer(ConsumerType.Exclusive, filter=None)).close()
    async with await at.client.create_producer(
        NAME, batching_enabled=True, filter_properties=("region",), batching_max_publish_delay_ms=20
    ) as producer:
        for key, text, region in (("a", "1", "eu"), ("b", "2", "us")):
            await producer.send(text.encode(), partition_key=key, properties={"region": region})
        await asyncio.gather(*(
            producer.send(text.encode(), partition_key=key, properties={"region": "us"})
            for key, text in (("a", ""), ("c", "3"))
        ))  # fmt: skip
    await at.index()
    await SubscriptionAdministration(at.topic).set_properties("s", {"filter": WANTED})
    consumer = await at.consumer(ConsumerType.Exclusive, is_read_compacted=True)
    assert await at.take(consumer, 2) == ["1", ""]
    assert at.filtering.filtered_unread == 0


async def test_after_a_seek_a_filter_that_was_set_and_in_a_topic_made_anew_it_is_judged_anew(at: At) -> None:
    await at.send(*["us"] * 30, "eu")
    await at.index()
    consumer = await at.consumer(ConsumerType.Exclusive)
    for _ in range(2):
        assert await at.take(consumer, 1) == ["eu 30"]
        await consumer.seek(MessageId.earliest)
    assert await at.take(consumer, 1) == ["eu 30"]
    await until(lambda: at.is_caught_up)
    await consumer.close()
    await SubscriptionAdministration(at.topic).set_properties("s", {"filter": "region = 'us'"})
    await at.admin.reset_subscription("t", "s", MessageId.earliest)
    consumer = await at.consumer(filter="region = 'us'")
    assert len(await at.take(consumer, 30)) == 30
    await consumer.close()
    await at.admin.delete_topic("t", force=True)
    await at.admin.create_topic("t")
    await at.send(*["eu"] * 30, "us")
    await at.index()
    consumer = await at.consumer(filter="region = 'us'")
    assert await at.take(consumer, 1) == ["us 30"]
    await until(lambda: at.is_caught_up)
    assert at.filtering.filtered == 30


async def test_a_filter_that_changes_gets_what_the_former_one_had_not_come_to(at: At) -> None:
    await at.send(*["us"] * 25, "eu", *["us"] * 25)
    await at.index()
    consumer = await at.consumer(receiver_queue_size=1)
    await until(lambda: at.subscription.dispatcher.unacked == 1)
    assert at.filtering.judged_up_to < at.topic.log.shape.last_position, "it has no permits for what follows"
    await consumer.close()
    await SubscriptionAdministration(at.topic).set_properties("s", {"filter": "region = 'us'"})
    consumer = await at.consumer(filter="region = 'us'")
    found = await at.take(consumer, 11)
    while found[-1] != "us 50":
        found += await at.take(consumer, 1)
    assert found[-11:] == [f"us {number}" for number in range(40, 51)]


async def test_a_cumulative_acknowledgement_covers_what_was_passed_over(at: At) -> None:
    await at.send("eu", *["us"] * 50, "eu", *["us"] * 5)
    await at.index()
    consumer = await at.consumer(ConsumerType.Exclusive)
    found = [await consumer.receive(20_000) for _ in range(2)]
    assert at.subscription.cursor.mark.entry_id == -1
    await consumer.acknowledge_cumulative(found[1])
    await until(lambda: at.is_caught_up)
    assert at.subscription.cursor.hole_entry_count == 0


async def test_keys_and_consumers_that_share_them_are_held_up_by_nothing_that_is_passed_over(at: At) -> None:
    await at.send(*["us"] * 50, partition_key="busy")
    await at.send("eu", "us", "eu", partition_key="busy")
    await at.send("eu", partition_key="other", expires_in=3600)
    await at.send(*["us"] * 50, "eu", partition_key="third", deliver_at=at.running.world.clock.wall_ms() + 200)
    await at.index()
    consumers = [await at.consumer(ConsumerType.KeyShared) for _ in range(2)]
    await until(lambda: at.filtering.judged == 105)
    await until(lambda: at.subscription.dispatcher.unacked == 4)
    await until(lambda: sum(len(consumer.inbox) for consumer in consumers) == 4)
    assert at.subscription.delayed.core.count == 0, "the delayed one was due"
    found = [each for consumer in consumers for each in iter(consumer.inbox.take_nowait, None)]
    assert sorted(each.data() for each in found) == [b"eu 0", b"eu 0", b"eu 2", b"eu 50"]
    for each in at.subscription.consumers.values():
        assert each.member.permits == each.member.granted - each.member.delivered_messages
    at.subscription.dispatcher.check()


def test_a_chunk_is_not_excluded_by_a_publish_time_that_only_the_first_one_has() -> None:
    blocks = [key_index_core.EntryRun(n, n, n + 1, 1000 * n, 1000 * n, 1 << 62, -1, 10, 0) for n in range(3)]
    index = key_index_core.KeyIndex(key_index_core._Directory(7, True, [], blocks))
    wanted = parse_filter("message.publish_time < 500").root
    assert list(index.find_candidates(wanted, {})) == [0]
    assert list(index.find_candidates(wanted, {}, hidden=True)) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["lost", "slow", "off", "odd"])
async def test_without_an_answer_of_the_index_the_ledger_is_read(
    at: At, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        if fault == "slow":
            await asyncio.Event().wait()
        raise DataLost("it is gone") if fault == "lost" else ValueError("odd")

    await at.send(*["us"] * 30, "eu")
    await at.index()
    monkeypatch.setattr(filtering, "INDEX_LOOK_UP_TIMEOUT_S", 0.05)
    if fault == "off":
        monkeypatch.setattr(KeyIndexes, "is_on", False)
    else:
        monkeypatch.setattr(KeyIndexSearch, "find_candidates", fail)
    consumer = await at.consumer()
    assert await at.take(consumer, 1) == ["eu 30"]
    await until(lambda: at.is_caught_up)
    assert (at.filtering.filtered, at.filtering.filtered_unread) == (30, 0)


async def test_what_was_to_be_passed_over_is_judged_if_the_index_is_gone_by_then(at: At) -> None:
    """What follows it had been judged, and so it counted as judged, too: consumers got all of it."""
    await at.send(*["eu"] * 12, *["us"] * 48, "eu")
    await at.index()
    consumer = await at.consumer(receiver_queue_size=1)
    buffer = at.subscription.pump._at_hand
    found = await at.take(consumer, 1)
    while buffer._ahead[-1].position != at.topic.log.shape.last_position:
        found += await at.take(consumer, 1)
        await until(lambda: not buffer._reading and not at.filtering._unread._looks_up)
    found += await at.take(consumer, 2)
    await at.admin.set_topic_policies(NAME, Policies(key_index="off"))
    await until(lambda: at.topic.applied.key_index == "off")
    at.filtering._unread._kept.clear()
    found += await at.take(consumer, 13 - len(found))
    assert found[-2:] == ["eu 11", "eu 60"]
    await until(lambda: at.is_caught_up)
    (member,) = [each.member for each in at.subscription.consumers.values()]
    assert (member.delivered_messages, at.filtering.judged, at.filtering.filtered) == (13, 61, 48)


async def test_a_look_up_ends_with_its_subscription(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def wait(*_: Any, **__: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    await at.send(*["us"] * 30)
    await at.index()
    monkeypatch.setattr(KeyIndexSearch, "find_candidates", wait)
    consumer = await at.consumer()
    await begun.wait()
    found = at.filtering._unread
    assert found._looks_up
    await consumer.unsubscribe()
    await until(lambda: not found._looks_up)


# ------------------------------------------------------------------------------------------------------- by a summary
@pytest.mark.parametrize("how", ["plain", "compressed", "encrypted", "long"])
async def test_a_batch_that_its_summary_excludes_is_not_unfolded(
    at: At, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    options: dict[str, Any] = {
        "compressed": {"compression_type": CompressionType.ZSTD},
        "encrypted": {"crypto_key_reader": Keys("a"), "encryption_key": "a"},
    }.get(how, {})
    if how == "long":
        monkeypatch.setattr("magnetar.broker.log.unfolding.THREAD_UNFOLD_MESSAGES", 5)
    unfolded, find = list[int](), EntryFilter._find_unwanted_of_batch

    def note(judge: Any, metadata: Any, entry: Any, offset: int) -> int:
        unfolded.append(metadata.num_messages_in_batch)
        return find(judge, metadata, entry, offset)

    monkeypatch.setattr(EntryFilter, "_find_unwanted_of_batch", note)
    consumer = await at.consumer(crypto_key_reader=Keys("a"))
    async with await at.client.create_producer(
        NAME, batching_enabled=True, batching_max_publish_delay_ms=60_000, filter_properties=("region",), **options
    ) as producer:
        for regions in (["us"] * 9, ["us", "eu", "us"], [""] * 4):
            sending = [
                asyncio.create_task(producer.send(each.encode(), properties={"region": each} if each else {}))
                for each in regions
            ]
            await asyncio.sleep(0)
            await producer.flush()
            await asyncio.gather(*sending)
    assert await at.take(consumer, 1) == ["eu"]
    await until(lambda: at.is_caught_up)
    assert unfolded == ([] if how == "encrypted" else [3])
    filtering = at.filtering
    assert (filtering.judged, filtering.filtered_entries, filtering.filtered_unread) == (16, 2, 13)
