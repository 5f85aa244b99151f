"""A subscription with a filter at the broker, beside everything else that a subscription does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from magnetar.broker.log import unfolding
from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.subscription import filtering
from magnetar.broker.subscription.core import fair_shared
from magnetar.broker.subscription.pump import SubscriptionDeliveryPump
from magnetar.broker.subscription.read_ahead import CHUNK_ENTRIES_MAX
from magnetar.broker.subscription.subscription import Subscription
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.common.checks import WrongValue
from magnetar.client.common.errors import ConsumerBusy, Timeout
from magnetar.client.model.encryption import CryptoKeyReader
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import (
    CompressionType,
    ConsumerDeadLetterPolicy,
    ConsumerType,
    InitialPosition,
    MultiplierRedeliveryBackoff,
)
from magnetar.proto.errors import Busy, InvalidRequest
from magnetar.proto.statistics import FilterTrial, SubscriptionFilterState
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/filtered"
WANTED = "region = 'eu'"
EVERY = list(ConsumerType)
INDIVIDUAL = [ConsumerType.Shared, ConsumerType.KeyShared]
EU, US = {"region": "eu"}, {"region": "us"}


class At:
    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.client = Client(f"magnetar://{running.brokers[0].endpoint}")

    async def consumer(self, type_: ConsumerType = ConsumerType.Shared, name: str = "s", **options: Any) -> Any:
        given = {"filter": WANTED, "initial_position": InitialPosition.Earliest, **options}
        backoff = MultiplierRedeliveryBackoff(1, 1)
        return await self.client.subscribe(TOPIC, name, type_, negative_ack_redelivery_backoff=backoff, **given)

    async def send(self, *several: tuple[str, dict[str, str]], batched: bool = False, **options: Any) -> list[Any]:
        """Messages with their properties, each alone or as one batch."""
        more = {"batching_max_publish_delay_ms": 60_000} if batched else {}
        producer = await self.client.create_producer(TOPIC, batching_enabled=batched, **more)
        sending = []
        for text, properties in several:
            sending.append(asyncio.create_task(producer.send(text.encode(), properties=properties, **options)))
            await asyncio.sleep(0)
        if batched:
            await producer.flush()
        ids = list(await asyncio.gather(*sending))
        await producer.close()
        return ids

    @property
    def subscription(self) -> Subscription:
        return self.running.brokers[0].topics[TOPIC].subscriptions["s"]

    @property
    def filtering(self) -> Any:
        return self.subscription.filtering

    @property
    def backlogs(self) -> SubscriptionAdministration:
        return SubscriptionAdministration(self.running.brokers[0].topics[TOPIC])

    async def left(self) -> int:
        return (await self.backlogs.analyze_backlog("s")).messages


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[At]:
    async with cluster(tmp_path, max_message_bytes=20_000) as running:
        at = At(running)
        yield at
        await at.client.close()


async def take(consumer: Any, count: int) -> list[Any]:
    return [await consumer.receive(20_000) for _ in range(count)]


def texts(messages: Sequence[Any]) -> list[str]:
    return [each.data().decode() for each in messages]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a condition of the broker alone
            await asyncio.sleep(0.01)


def some(*regions: str) -> list[tuple[str, dict[str, str]]]:
    return [(f"{number}", {"region": region}) for number, region in enumerate(regions)]


# ---------------------------------------------------------------------------------------------- what is delivered
async def test_with_keys_that_take_turns_what_is_wanted_does_not_wait_for_the_end_of_the_log(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_shared, "WAITING_ENTRIES_MAX", 40)
    await at.send(*some("us", "eu", *["us"] * 600), partition_key="k")
    judged, deliver = list[int](), SubscriptionDeliveryPump._deliver

    def record(pump: Any, deliveries: Any) -> None:
        judged.extend(at.filtering.judged for _ in deliveries)
        deliver(pump, deliveries)

    monkeypatch.setattr(SubscriptionDeliveryPump, "_deliver", record)
    consumer = await at.consumer(fair_by_key=True)
    assert texts(await take(consumer, 1)) == ["1"]
    assert len(judged) == 1
    assert judged[0] <= 40 + 2 * CHUNK_ENTRIES_MAX


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("type_", EVERY, ids=[each.name for each in EVERY])
async def test_consumers_get_what_is_wanted_and_the_rest_is_acknowledged(
    at: At, type_: ConsumerType, batched: bool
) -> None:
    consumer = await at.consumer(type_)
    await at.send(*some("us", "eu", "us", "us", "eu", "us"), batched=batched, partition_key="k")
    found = await take(consumer, 2)
    assert texts(found) == ["1", "4"]
    for message in found:
        await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)
    assert (at.filtering.judged, at.filtering.filtered, at.filtering.shown_unwanted) == (6, 4, 0)
    assert at.filtering.filtered_entries == (0 if batched else 4)
    assert await at.left() == 0
    assert consumer.statistics()["filtered_messages"] == 0, "it did not even come"
    assert consumer.statistics()["delivered_messages"] == 2


async def test_what_is_filtered_costs_no_permits_and_no_dispatch_rate(at: At) -> None:
    consumer = await at.consumer(receiver_queue_size=1)
    await at.send(*some(*["us"] * 500, "eu"))
    assert texts(await take(consumer, 1)) == ["500"]
    (one,) = at.subscription.consumers.values()
    assert one.member.delivered_messages == 1
    at.subscription.dispatcher.check()


async def test_the_mark_follows_at_once_when_nothing_wanted_is_before_it_and_else_there_are_holes(at: At) -> None:
    consumer = await at.consumer()
    ids = await at.send(*some("us", "us", "eu", "us", "us"))
    (wanted,) = await take(consumer, 1)
    cursor = at.subscription.cursor
    await until(lambda: cursor.hole_entry_count == 2)
    assert cursor.mark.entry_id == ids[1].entry_id()
    await consumer.acknowledge(wanted)
    await until(lambda: cursor.mark.entry_id == ids[4].entry_id())
    assert cursor.hole_entry_count == 0


async def test_acknowledgements_by_the_filter_are_stored_and_if_lost_are_made_again(at: At) -> None:
    consumer = await at.consumer(ack_receipt_enabled=True)
    await at.send(*some("us", "eu", "us"), batched=True)
    await at.send(*some("us", "us"))
    await take(consumer, 1)
    await until(lambda: at.filtering.judged == 5)
    await at.subscription.wait_durable()
    assert not at.subscription.cursor.has_unstored_changes
    broker = at.running.brokers[0]
    await broker.topic_manager.unload_topic(broker.topics[TOPIC].name)
    (again,) = await take(consumer, 1)
    assert texts([again]) == ["1"]
    await consumer.acknowledge(again)
    await until(lambda: TOPIC in broker.topics and at.filtering is not None)
    assert await at.left() == 0


async def test_a_cumulative_acknowledgement_covers_filtered_messages_before_it(at: At) -> None:
    consumer = await at.consumer(ConsumerType.Exclusive)
    await at.send(*some("eu", "us", "eu", "us"), batched=True)
    await at.send(*some("us", "eu", "us"))
    found = await take(consumer, 3)
    assert texts(found) == ["0", "2", "1"]
    await consumer.acknowledge_cumulative(found[1])
    await until(lambda: at.subscription.cursor.mark.entry_id == 1)
    await consumer.acknowledge_cumulative(found[2])
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)


# ---------------------------------------------------------------------------------------------- beside the rest
@pytest.mark.parametrize("type_", INDIVIDUAL, ids=[each.name for each in INDIVIDUAL])
async def test_what_is_delayed_is_filtered_first(at: At, type_: ConsumerType) -> None:
    consumer = await at.consumer(type_)
    await at.send(*some("us", "eu", "us"), deliver_at=at.running.world.clock.wall_ms() + 700)
    await until(lambda: at.filtering.judged == 3)
    assert at.subscription.delayed is not None
    assert at.subscription.delayed.core.count == 1
    assert texts(await take(consumer, 1)) == ["1"]
    assert (at.filtering.judged, at.filtering.filtered) == (3, 2)


async def test_what_was_delayed_before_the_filter_was_set_is_judged_when_it_is_due(at: At) -> None:
    consumer = await at.consumer(filter=None)
    await at.send(*some("us", "eu"), deliver_at=at.running.world.clock.wall_ms() + 700)
    assert at.subscription.delayed is not None
    await until(lambda: at.subscription.delayed.core.count == 2)
    await consumer.close()
    await at.backlogs.set_properties("s", {"filter": WANTED})
    consumer = await at.consumer()
    assert texts(await take(consumer, 1)) == ["1"]
    assert at.subscription.cursor.mark.entry_id == 0, "the first one is acknowledged"
    assert at.filtering.judged >= at.filtering.filtered == 1


async def test_what_is_given_back_comes_again_and_is_not_judged_again(at: At) -> None:
    consumer = await at.consumer()
    await at.send(*some("us", "eu", "us"), batched=True)
    for times in range(3):
        (message,) = await take(consumer, 1)
        assert (texts([message]), message.redelivery_count()) == (["1"], times)
        await consumer.negative_acknowledge(message)
    assert at.filtering.judged == 3


async def test_only_what_is_wanted_becomes_a_dead_letter(at: At) -> None:
    consumer = await at.consumer(dead_letter_policy=ConsumerDeadLetterPolicy(1, "dead"))
    letters = await at.client.subscribe("dead", "l", initial_position=InitialPosition.Earliest)
    await at.send(*some("us", "eu", "us"), batched=True)
    for _ in range(2):
        await consumer.negative_acknowledge((await take(consumer, 1))[0])
    assert texts(await take(letters, 1)) == ["1"]
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)


async def test_the_retry_letter_topic_is_not_filtered_again(at: At) -> None:
    consumer = await at.consumer(enable_retry=True)
    await at.send(*some("us", "eu"))
    (message,) = await take(consumer, 1)
    await consumer.reconsume_later(message, timedelta(milliseconds=10), properties={"region": "us"})
    (again,) = await take(consumer, 1)
    assert (texts([again]), again.properties()["region"]) == (["1"], "us")


async def test_a_transaction_acknowledges_what_was_shown_and_an_abort_brings_that_again(at: At) -> None:
    consumer = await at.consumer()
    await at.send(*some("us", "eu", "us", "eu"), batched=True)
    for commits in (False, True):
        found = await take(consumer, 2)
        assert texts(found) == ["1", "3"]
        txn = await at.client.transaction()
        for message in found:
            await consumer.acknowledge(message, txn=txn)
        await (txn.commit() if commits else txn.abort())
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)
    assert (at.filtering.judged, at.filtering.filtered) == (4, 2)


async def test_what_is_aborted_is_not_judged_and_what_is_open_is_judged_when_it_is_committed(at: At) -> None:
    consumer = await at.consumer()
    for commits in (False, True):
        txn = await at.client.transaction()
        producer = await at.client.create_producer(TOPIC)
        for region in ("us", "eu"):
            await producer.send(f"{commits}".encode(), properties={"region": region}, txn=txn)
        await producer.close()
        assert at.filtering.judged == 0
        await (txn.commit() if commits else txn.abort())
    assert texts(await take(consumer, 1)) == ["True"]
    assert at.filtering.judged == 2


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
async def test_trace_says_that_the_filter_does_not_want_a_message(at: At, batched: bool) -> None:
    consumer = await at.consumer()
    ids = await at.send(*some("us", "eu"), batched=batched)
    (message,) = await take(consumer, 1)
    await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)
    async with AdminClient(f"magnetar://{at.running.brokers[0].endpoint}") as admin:
        for id_, state in zip(ids, ("filtered", "acknowledged"), strict=True):
            place = {"ledger_id": id_.ledger_id(), "entry_id": id_.entry_id(), "batch_index": id_.batch_index()}
            (found,) = (await admin.trace_message(TOPIC, **place)).subscriptions
            assert found.state == state
            assert (WANTED in found.detail) == (state == "filtered")


async def test_after_a_reset_filtered_messages_are_judged_again(at: At) -> None:
    consumer = await at.consumer(ConsumerType.Exclusive)
    await at.send(*some("us", "eu", "us"))
    for judged in (3, 6):
        assert texts(await take(consumer, 1)) == ["1"]
        await until(lambda judged=judged: at.filtering.judged == judged)
        await consumer.seek(MessageId.earliest)
    assert texts(await take(consumer, 1)) == ["1"]


async def test_a_message_in_chunks_is_judged_as_a_whole(at: At) -> None:
    consumer = await at.consumer()
    producer = await at.client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
    for number, region in enumerate(("us", "eu", "us")):
        await producer.send(bytes([number]) * 50_000, properties={"region": region})
    (message,) = await take(consumer, 1)
    assert message.data() == b"\x01" * 50_000
    await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)
    assert at.filtering.filtered_entries == 6


async def test_who_reads_compacted_gets_tombstones_that_are_not_wanted(at: At) -> None:
    await (await at.consumer(ConsumerType.Exclusive, filter=None)).close()
    producer = await at.client.create_producer(TOPIC, batching_enabled=False)
    for key, text, region in (("a", "1", "eu"), ("b", "2", "us"), ("a", "", "us"), ("c", "3", "eu")):
        await producer.send(text.encode(), partition_key=key, properties={"region": region})
    await at.backlogs.set_properties("s", {"filter": WANTED})
    consumer = await at.consumer(ConsumerType.Exclusive, is_read_compacted=True)
    assert texts(await take(consumer, 3)) == ["1", "", "3"]


async def test_a_batch_that_takes_long_is_judged_in_a_thread_and_what_follows_waits(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfolding, "THREAD_UNFOLD_MESSAGES", 5)
    consumer = await at.consumer()
    await at.send(*some(*["us"] * 9, "eu"), batched=True)
    await at.send(("after", EU))
    await at.send(*some(*["us"] * 9), batched=True)
    await at.send(("last", EU))
    assert texts(await take(consumer, 3)) == ["9", "after", "last"]
    assert at.filtering.filtered_entries == 1


async def test_a_long_filter_judges_smaller_batches_in_a_thread(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def run(world: Any, work: Any, *given: Any) -> Any:
        asked.append(work.__name__)
        return work(*given)

    monkeypatch.setattr(filtering, "run_in_thread", run)
    monkeypatch.setattr(filtering, "THREAD_UNFOLD_BYTES", 64 << 10)
    long = " OR ".join(f"region = '{name}'" for name in ("eu", *["x" * 400 for _ in range(6)]))
    await at.send(*[("x" * 2000, EU), ("x" * 2000, US)] * 4, batched=True)
    for wanted, calls in ((WANTED, []), (long, ["find_unwanted_bits"])):
        consumer = await at.consumer(name=f"s-{len(calls)}", filter=wanted)
        assert len(await take(consumer, 4)) == 4
        assert asked == calls


async def test_an_encrypted_batch_comes_whole_and_the_sdk_drops_the_rest(at: At, tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    (tmp_path / "private").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "public").write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    reader = CryptoKeyReader(str(tmp_path / "public"), str(tmp_path / "private"))
    consumer = await at.consumer(crypto_key_reader=reader)
    for batched in (True, False):
        producer = await at.client.create_producer(
            TOPIC, batching_enabled=batched, encryption_key="k", crypto_key_reader=reader,
            **({"batching_max_publish_delay_ms": 60_000} if batched else {}),
        )  # fmt: skip
        sending = [asyncio.create_task(producer.send(text.encode(), properties=kind))
                   for text, kind in some("us", "eu", "us")]  # fmt: skip
        await asyncio.sleep(0)
        await producer.flush()
        await asyncio.gather(*sending)
    found = await take(consumer, 2)
    assert texts(found) == ["1", "1"]
    assert (at.filtering.judged, at.filtering.filtered) == (6, 2), "the properties of a message alone are not encrypted"
    assert consumer.statistics()["filtered_messages"] == 2
    for message in found:
        await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)


@pytest.mark.parametrize("kind", [CompressionType.LZ4, CompressionType.ZLib, CompressionType.ZSTD])
async def test_a_compressed_batch_is_unfolded(at: At, kind: CompressionType) -> None:
    consumer = await at.consumer()
    producer = await at.client.create_producer(
        TOPIC, batching_enabled=True, batching_max_publish_delay_ms=60_000, compression_type=kind
    )
    sending = [asyncio.create_task(producer.send(b"%d" % at, properties=EU if at % 2 else US)) for at in range(6)]
    await asyncio.sleep(0)
    await producer.flush()
    await asyncio.gather(*sending)
    assert texts(await take(consumer, 3)) == ["1", "3", "5"]
    assert consumer.statistics()["filtered_messages"] == 0


async def test_one_that_does_not_acknowledge_by_index_is_shown_mixed_batches_whole_and_the_sdk_drops_the_rest(
    at: At,
) -> None:
    consumer = await at.consumer()
    (one,) = at.subscription.consumers.values()
    one.member.acks_by_index = False
    await at.send(*some("us", "eu", "us"), batched=True)
    await at.send(*some("us", "us"), batched=True)
    (message,) = await take(consumer, 1)
    assert texts([message]) == ["1"]
    await until(lambda: at.filtering.judged == 5)
    assert (at.filtering.shown_unwanted, at.filtering.filtered, at.filtering.filtered_entries) == (2, 2, 1)
    assert consumer.statistics()["filtered_messages"] == 2
    await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)


async def test_what_expires_or_is_skipped_is_as_without_a_filter(at: At) -> None:
    await (await at.consumer()).close()
    await at.send(*some("us", "eu", "us", "eu"))
    assert await at.left() == 4, "nothing is judged without a consumer"
    await at.backlogs.skip_messages("s", 2)
    consumer = await at.consumer()
    assert texts(await take(consumer, 1)) == ["3"]
    await until(lambda: at.filtering.judged == 2)


async def test_a_key_with_filtered_messages_blocks_nothing(at: At) -> None:
    one, other = [await at.consumer(ConsumerType.KeyShared) for _ in range(2)]
    await at.send(*[(f"{number}", US) for number in range(50)], partition_key="busy")
    await at.send(("x", EU), partition_key="busy")
    await until(lambda: at.filtering.judged == 51)
    assert at.subscription.dispatcher.unacked == 1
    at.subscription.dispatcher.check()
    found = [each.inbox.take_nowait() for each in (one, other)]
    assert texts([each for each in found if each is not None]) == ["x"]


# ---------------------------------------------------------------------------------------------- one filter
async def test_all_consumers_of_a_subscription_have_one_filter(at: At) -> None:
    await at.consumer()
    for other in ("region = 'us'", "region='eu'"):
        with pytest.raises(ConsumerBusy, match="it has the filter"):
            await at.consumer(filter=other)
    await at.consumer(filter=None)
    await at.consumer(filter=f"  {WANTED} ")
    assert len(at.subscription.consumers) == 3
    await at.consumer(name="plain", filter=None)
    with pytest.raises(ConsumerBusy, match="subscriptions filter set"):
        await at.consumer(name="plain")


async def test_a_filter_changes_without_consumers_alone_and_brings_nothing_back(at: At) -> None:
    consumer = await at.consumer()
    await at.send(*some("us", "eu", "us"), batched=True)
    await at.send(*some("us", "eu"))
    found = await take(consumer, 2)
    with pytest.raises(Busy, match="while none is connected"):
        await at.backlogs.set_properties("s", {"filter": "region = 'us'"})
    await at.backlogs.set_properties("s", {"filter": WANTED, "other": "x"})
    await consumer.close()
    await at.backlogs.set_properties("s", {"filter": "region = 'us'"})
    consumer = await at.consumer(filter="region = 'us'")
    await at.send(("new", US))
    assert texts(await take(consumer, 1)) == ["new"]
    await until(lambda: at.subscription.cursor.mark.entry_id == 2)
    assert texts(found) == ["1", "1"]


@pytest.mark.parametrize("text", ["a =", "a = NULL", "a LIKE '%a%b%c%d%e'", "x" * 5000, "(" * 30 + "a" + ")" * 30])
async def test_a_wrong_filter_is_refused_before_anything_is_made(at: At, text: str) -> None:
    with pytest.raises(WrongValue, match="filter, at character"):
        await at.consumer(filter=text)
    await at.send(("x", EU))
    assert "s" not in at.running.brokers[0].topics[TOPIC].subscriptions
    for properties in ({"filter": text}, {"filter": "a", "filter.tags": "b"}):
        with pytest.raises(InvalidRequest):
            await at.backlogs.create_subscription("s", None, properties)


async def test_a_subscription_without_a_filter_has_nothing_of_it(at: At) -> None:
    consumer = await at.consumer(filter=None)
    await at.send(*some("us", "eu"))
    assert texts(await take(consumer, 2)) == ["0", "1"]
    assert at.filtering is None


# ---------------------------------------------------------------------------------------------- for operators
async def test_an_operator_sets_shows_and_tries_a_filter(at: At) -> None:
    async with AdminClient(f"magnetar://{at.running.brokers[0].endpoint}") as admin:
        await admin.create_topic("filtered")
        await admin.create_subscription("filtered", "s", properties={"other": "x"})
        await at.send(*some("us", "eu", "us"), batched=True)
        await at.send(*some("us", "us"), batched=True)
        await at.send(*some("eu", "eu"))
        assert await admin.try_filter("filtered", filter=WANTED) == FilterTrial(7, 3, 4, 1, 1, 0)
        assert await admin.try_filter("filtered", filter=WANTED, messages=2) == FilterTrial(2, 2, 2, 0, 0, 0)
        for wrong in ({"filter": "a ="}, {"filter": WANTED, "messages": 10_001}):
            with pytest.raises(InvalidRequest):
                await admin.try_filter("filtered", **wrong)
        assert await admin.subscription_filter("filtered", "s") == SubscriptionFilterState("", 0, 0, 0, 0)
        await admin.set_subscription_filter("filtered", "s", filter=f" {WANTED} ")
        assert await admin.subscription_properties("filtered", "s") == {"other": "x", "filter": WANTED}
        before = await admin.analyze_backlog("filtered", "s")
        assert (before.entries, before.messages, before.unwanted_entries, before.unwanted_messages) == (4, 7, 1, 4)
        consumer = await at.consumer()
        assert len(await take(consumer, 3)) == 3
        await until(lambda: at.filtering.judged == 7)
        assert await admin.subscription_filter("filtered", "s") == SubscriptionFilterState(WANTED, 7, 4, 1, 0)
        (shown,) = (await admin.topic_stats("filtered")).subscriptions
        assert (shown.filter, shown.judged, shown.filtered, shown.filtered_entries) == (WANTED, 7, 4, 1)
        after = await admin.analyze_backlog("filtered", "s")
        assert (after.messages, after.unwanted_entries, after.unwanted_messages) == (3, 0, 0)
        assert "The filter has looked at 7 messages, and wants 3." in (await admin.why_stuck("filtered", "s")).sentences
        with pytest.raises(Busy):
            await admin.set_subscription_filter("filtered", "s", filter="")
        await consumer.close()
        await admin.set_subscription_filter("filtered", "s", filter="")
        assert await admin.subscription_properties("filtered", "s") == {"other": "x"}
        assert at.filtering is None


async def test_how_far_a_filter_got_is_said_also_while_nothing_is_stuck(at: At) -> None:
    await at.consumer()
    await at.send(*some("us", "us", "us"))
    await until(lambda: at.filtering.judged == 3)
    async with AdminClient(f"magnetar://{at.running.brokers[0].endpoint}") as admin:
        found = await admin.why_stuck("filtered", "s")
    assert found.sentences == (
        "It has delivered everything.", "The filter has looked at 3 messages, and wants 0.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the SDK alone
async def test_a_reader_drops_what_is_not_wanted_by_itself(at: At) -> None:
    await at.send(*some("us", "eu", "us"), batched=True)
    await at.send(*some("us", "eu"))
    reader = await at.client.create_reader(TOPIC, MessageId.earliest, filter=WANTED, receiver_queue_size=2)
    assert texts([await reader.read_next(20_000) for _ in range(2)]) == ["1", "1"]
    with pytest.raises(Timeout):
        await reader.read_next(100)


async def test_consumers_of_a_topic_that_keeps_nothing_filter_by_themselves_and_agree(at: At) -> None:
    topic = "non-persistent://public/default/n"
    consumer = await at.client.subscribe(topic, "s", ConsumerType.Shared, filter=WANTED)
    for other in (None, "region = 'us'"):
        with pytest.raises(ConsumerBusy):
            await at.client.subscribe(topic, "s", ConsumerType.Shared, filter=other)
    producer = await at.client.create_producer(topic)
    for text, region in (("0", "us"), ("1", "eu")):
        await producer.send(text.encode(), properties={"region": region})
    assert texts(await take(consumer, 1)) == ["1"]
    assert consumer.statistics()["filtered_messages"] == 1


async def test_with_a_broker_that_does_not_filter_the_sdk_drops_and_acknowledges(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a broker of an older version, which stores the property and does nothing with it."""
    consumer = await at.consumer(filter=None)
    await consumer.close()
    monkeypatch.setattr(Subscription, "check_filter", lambda self, asked: None)
    consumer = await at.consumer()
    await at.send(*some("us", "eu", "us"), batched=True)
    await at.send(*some("us", "us"), batched=True)
    (message,) = await take(consumer, 1)
    assert texts([message]) == ["1"]
    await consumer.acknowledge(message)
    await until(lambda: at.subscription.cursor.mark == at.subscription.log.shape.last_position)
    assert consumer.statistics()["filtered_messages"] == 4
