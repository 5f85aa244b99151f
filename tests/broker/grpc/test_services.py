"""The services over real gRPC on loopback: each request of proto/wire.proto, what it promises and what it refuses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.catalog import CatalogLimits
from magnetar.broker.common.config import LedgerReplication
from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.log.reader import PositionAndIndex
from magnetar.metadata import paths
from magnetar.metadata.records import PoliciesRecord
from magnetar.metadata.store import put_record
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    AlreadyExists,
    ConsumerBusy,
    CorruptEntry,
    InvalidRequest,
    MessageTooLarge,
    NotAllowed,
    NotOwner,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
    Unavailable,
    from_wire,
)
from magnetar.proto.names import Position, TopicName
from magnetar.proto.policies import Policies
from magnetar.proto.policies import encode_policies as as_text
from magnetar.runtime.network import find_rpc
from tests.support.cluster import (
    Cluster,
    TestConsumer,
    TestProducer,
    Wire,
    client_part,
    cluster,
    one_by_one,
    payloads_of,
)

TOPIC = "persistent://public/default/t"
SHARED = wire.Subscribe.SHARED
EARLIEST = wire.Subscribe.EARLIEST


class Deployment:
    """One broker, one bookie, and a hand for each thing that a test does."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.world = running.world
        self.broker = running.brokers[0]
        self.channel = self.world.network.connect(self.broker.endpoint)

    async def call(self, method: str, request: Any, service: str = "Broker") -> Any:
        return await self.channel.call(find_rpc(service, method), request, timeout_s=20.0)

    async def admin(self, method: str, request: Any = None) -> Any:
        return await self.call(method, request if request is not None else wire.Empty(), "Admin")

    async def producer(self, topic: str = TOPIC, name: str = "p", **options: Any) -> TestProducer:
        return await TestProducer(self.world, self.broker, topic, name, **options).opened()

    async def consumer(self, topic: str = TOPIC, subscription: str = "s", **options: Any) -> TestConsumer:
        return await TestConsumer(self.world, self.broker, topic, subscription, **options).ready()

    async def filled(self, entries: int, batch: int = 1) -> TestProducer:
        producer = await self.producer()
        for number in range(entries):
            await producer.send(*[b"%d" % (number * batch + each) for each in range(batch)])
        return producer


# ------------------------------------------------------------------------------------------------ produce
async def test_a_producer_without_a_name_gets_one(deployment: Deployment) -> None:
    producer = await deployment.producer(name="")
    assert producer.answer.producer_name.startswith(deployment.broker.name)
    assert producer.answer.last_sequence_id == -1


async def test_refused_entries_are_answered_in_their_place(deployment: Deployment) -> None:
    producer = await deployment.producer()
    producer.publish(b"first")
    damaged = bytearray(client_part("p", 1, b"damaged"))
    damaged[-1] ^= 1
    producer.frame(publish=bytes(damaged))
    producer.sequence_id = 2
    producer.publish(b"middle")
    producer.publish(b"x" * (6 << 20))
    producer.publish(b"last")
    while len(producer.items) < 5:
        producer.items.extend(one_by_one(await producer.stream.receive()))
    kinds = [item.WhichOneof("kind") for item in producer.items]
    assert kinds == ["receipt", "failed", "receipt", "failed", "receipt"]
    answers = [getattr(item, kind) for item, kind in zip(producer.items, kinds, strict=True)]
    assert [answer.sequence_id for answer in answers] == [0, 1, 2, 3, 4]
    errors = [from_wire(item.failed.error) for item in producer.items if item.HasField("failed")]
    assert [type(error) for error in errors] == [CorruptEntry, MessageTooLarge]
    assert [item.receipt.index for item in producer.items if item.HasField("receipt")] == [0, 1, 2]


async def test_what_is_no_entry_at_all_ends_the_producer(deployment: Deployment) -> None:
    producer = await deployment.producer()
    producer.frame(publish=b"garbage")
    assert isinstance(from_wire(await producer.next("closed")), CorruptEntry)


# ------------------------------------------------------------------------------------------------ consume
async def test_an_exclusive_subscription_refuses_a_second_consumer_and_another_type(deployment: Deployment) -> None:
    await deployment.consumer()
    with pytest.raises(ConsumerBusy):
        await deployment.consumer()
    with pytest.raises(ConsumerBusy):
        await deployment.consumer(type=SHARED)
    with pytest.raises(NotAllowed, match="is durable"):
        await deployment.consumer(type=wire.Subscribe.FAILOVER, durable=False)


async def test_a_shared_subscription_takes_no_cumulative_ack(deployment: Deployment) -> None:
    await deployment.filled(1)
    consumer = await deployment.consumer(type=SHARED, initial_position=EARLIEST)
    with pytest.raises(NotAllowed):
        await consumer.ack(await consumer.receive(), cumulative=True)


async def test_an_ack_behind_the_end_is_refused(deployment: Deployment) -> None:
    await deployment.filled(1)
    consumer = await deployment.consumer(initial_position=EARLIEST)
    delivery = await consumer.receive()
    delivery.entry_id += 5
    with pytest.raises(InvalidRequest):
        await consumer.ack(delivery)


async def test_s14_a_readers_cursor_holds_no_data_and_dies_with_its_connection(deployment: Deployment) -> None:
    await deployment.filled(3)
    topic = deployment.broker.topics[TOPIC]
    start = wire.MessageId(ledger_id=-1, entry_id=-1, batch_index=-1)
    reader = await deployment.consumer(subscription="r", durable=False, permits=0, start=start)
    await topic.log.roll_ledger()
    await (await deployment.producer(name="q")).send(b"3")
    await topic.trim_ledgers(retained=False)
    assert topic.log.shape.first_index == 3, "nothing is kept for it"
    reader.permits(10)
    reader.requests = 1
    assert await reader.receive_payloads(1) == [b"3"]
    assert not await topic.registry._storage.metadata.children(paths.cursors("public", "default", "t"))
    await reader.ask(close=1)
    assert not topic.subscriptions
    lasting = await deployment.consumer(subscription="kept", initial_position=EARLIEST)
    assert await lasting.receive_payloads(1) == [b"3"]
    await topic.log.roll_ledger()
    await topic.trim_ledgers(retained=False)
    assert topic.log.shape.first_index == 3, "for a durable one it is"


async def test_s15_the_initial_position_counts_when_the_subscription_is_made_and_never_again(
    deployment: Deployment
) -> None:
    producer = await deployment.filled(2)
    early = await deployment.consumer(subscription="early", initial_position=EARLIEST)
    late = await deployment.consumer(subscription="late", permits=0)
    assert await early.receive_payloads(2) == [b"0", b"1"]
    await producer.send(b"2")
    await late.leave()
    again = await deployment.consumer(subscription="late", instance="x", initial_position=EARLIEST)
    assert await again.receive_payloads(1) == [b"2"]
    deliveries = [await early.receive()]
    await early.ack(*deliveries, cumulative=True)
    await early.leave()
    back = await deployment.consumer(subscription="early", initial_position=EARLIEST)
    await producer.send(b"3")
    assert await back.receive_payloads(1) == [b"3"]


async def test_a_topic_that_was_lost_says_nothing_of_its_end_and_takes_no_reader(deployment: Deployment) -> None:
    """It may have gone on elsewhere: a reader that believed it would miss what was acknowledged there."""
    await deployment.filled(1)
    topic = await deployment.broker.topic_manager.load_topic(TopicName.parse(TOPIC))
    asked = wire.OffsetsRequest(topic=TOPIC, publish_times_ms=[1])
    locate = topic.log.reader.find_position_by_time

    async def locate_while_it_is_lost(time_ms: int) -> PositionAndIndex:
        place = await locate(time_ms)
        topic.abandon(NotOwner("another broker has it"))
        return place

    topic.log.reader.find_position_by_time = locate_while_it_is_lost  # type: ignore[method-assign]
    with pytest.raises(NotOwner):
        await deployment.call("Offsets", asked)
    with pytest.raises(NotOwner):
        topic.registry.register_nondurable_subscription(
            topic.registry.make_nondurable_subscription("late", topic.log.shape.start_position)
        )


async def test_a_question_for_the_end_that_cannot_be_answered_says_why(deployment: Deployment) -> None:
    await deployment.filled(1)
    topic = await deployment.broker.topic_manager.load_topic(TopicName.parse(TOPIC))

    async def unreadable(position: Position) -> StoredEntry:
        raise Unavailable("no bookie answers")

    topic.log.reader.read_entry = unreadable  # type: ignore[method-assign]
    consumer = await deployment.consumer()
    consumer.frame(last_message_id=1)
    assert "no bookie answers" in (await consumer.next("done")).error.message


# ------------------------------------------------------------------------------------------- read, offsets
async def test_index_ranges_are_read_in_order_across_ledgers(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running:
        deployment = Deployment(running)
        await deployment.filled(20, batch=3)
        assert len(deployment.broker.topics[TOPIC].log.shape.spans) > 3
        stream = Wire(deployment.world, deployment.broker, "Read")
        stream.stream.send_nowait(wire.ReadRequest(request_id=1, topic=TOPIC, first_index=4, end_index=50))
        found: list[bytes] = []
        while not (item := await _next(stream)).HasField("done"):
            found += payloads_of(item.entry.entry)
        assert found == [b"%d" % number for number in range(3, 51)]
        assert item.done.next_index == 50
        stream.stream.send_nowait(
            wire.ReadRequest(request_id=2, topic=TOPIC, first_index=0, end_index=60, bytes_max=1)
        )
        assert payloads_of((await _next(stream)).entry.entry) == [b"0", b"1", b"2"]
        assert (await _next(stream)).done.next_index == 3
        stream.stream.send_nowait(wire.ReadRequest(request_id=3, topic=TOPIC, first_index=60, end_index=99))
        assert (await _next(stream)).done.next_index == 60
        await stream.close()
        await deployment.channel.close()


async def _next(stream: Wire) -> Any:
    while not stream.items:
        stream.items.extend(await stream.stream.receive())
    return stream.items.popleft()


async def test_offsets_and_advancing_a_subscription(deployment: Deployment) -> None:
    await deployment.filled(4, batch=5)
    asked = wire.OffsetsRequest(topic=TOPIC, subscription="spark", publish_times_ms=[0, 1 << 60])
    answer = await deployment.call("Offsets", asked)
    assert (answer.earliest_index, answer.end_index, answer.subscription_index) == (0, 20, 0)
    assert list(answer.by_time) == [0, 20]
    assert answer.bytes > 0
    for index, expected in ((7, 7), (10, 10), (3, 10), (20, 20), (99, 20)):
        await deployment.call("AdvanceSubscription", wire.AdvanceSubscriptionRequest(
            topic=TOPIC, subscription="spark", index=index))  # fmt: skip
        assert (await deployment.call("Offsets", asked)).subscription_index == expected, index
    with pytest.raises(SubscriptionNotFound):
        await deployment.call("AdvanceSubscription", wire.AdvanceSubscriptionRequest(
            topic=TOPIC, subscription="other", index=1))  # fmt: skip


async def test_offsets_of_a_topic_with_partitions_say_what_to_ask_for(deployment: Deployment) -> None:
    await deployment.admin("CreateTopic", wire.TopicSpec(name="three", partitions=3))
    for method, request in (
        ("Offsets", wire.OffsetsRequest(topic="three")),
        ("AdvanceSubscription", wire.AdvanceSubscriptionRequest(topic="three", subscription="s", index=1)),
    ):
        with pytest.raises(NotAllowed, match=r"3 partitions.*three-partition-0"):
            await deployment.call(method, request)
    assert (await deployment.call("Offsets", wire.OffsetsRequest(topic="three-partition-0"))).end_index == 0
    with pytest.raises(TopicNotFound):
        await deployment.call("Offsets", wire.OffsetsRequest(topic="no-such-topic"))


# ------------------------------------------------------------------------------------------------ lookup
async def test_lookup_and_partitions(deployment: Deployment) -> None:
    answer = await deployment.call("Lookup", wire.LookupRequest(topic=TOPIC))
    assert answer.here
    assert answer.owner == str(deployment.broker.endpoint)
    with pytest.raises(TopicNotFound):
        await deployment.call("Partitions", wire.PartitionsRequest(topic="new"))
    assert (await deployment.call("Partitions", wire.PartitionsRequest(topic="new", create=True))).partitions == 0
    await deployment.admin("CreateTopic", wire.TopicSpec(name="parted", partitions=3))
    assert (await deployment.call("Partitions", wire.PartitionsRequest(topic="parted", create=True))).partitions == 3
    with pytest.raises(NotAllowed, match="3 partitions"):
        await deployment.producer("parted")
    with pytest.raises(TopicNotFound):
        await deployment.producer("parted-partition-3")
    producer = await deployment.producer("parted-partition-2")
    assert (await producer.send(b"x")).index == 0


# ------------------------------------------------------------------------------------------------ admin
async def test_t3_a_subscription_without_a_consumer_misses_nothing_of_added_partitions(deployment: Deployment) -> None:
    await deployment.admin("CreateTopic", wire.TopicSpec(name="many", partitions=1))
    first = "persistent://public/default/many-partition-0"
    spec = wire.SubscriptionSpec(topic=first, name="s", properties={"owner": "ada"})
    await deployment.admin("CreateSubscription", spec)
    await deployment.admin("UpdateTopic", wire.TopicSpec(name="many", partitions=3))
    for number in (1, 2):
        added = f"persistent://public/default/many-partition-{number}"
        await (await deployment.producer(added)).send(b"early")
        stats = await deployment.admin("TopicStats", wire.Name(name=added))
        assert [(each.name, each.backlog) for each in stats.subscriptions] == [("s", 1)]
        consumer = await deployment.consumer(added)  # a new one would begin at the end
        delivery = await consumer.receive()
        assert payloads_of(delivery.entry) == [b"early"]
        await consumer.ack(delivery)
        assert deployment.broker.topics[added].subscriptions["s"].store.properties == {"owner": "ada"}
        await deployment.broker.topic_manager.unload_topic(TopicName.parse(added))
        assert (await deployment.admin("TopicStats", wire.Name(name=added))).subscriptions[0].backlog == 0


async def test_t10_limits_of_tenants_namespaces_and_topics(deployment: Deployment) -> None:
    owned = deployment.broker.topic_manager
    limits = CatalogLimits(tenants=2, namespaces=1, topics=owned.catalog._limits.topics)
    owned.catalog._limits = limits
    await deployment.admin("CreateTenant", wire.TenantSpec(name="acme"))
    with pytest.raises(NotAllowed, match="2 tenants"):
        await deployment.admin("CreateTenant", wire.TenantSpec(name="more"))
    await deployment.admin("CreateNamespace", wire.NamespaceSpec(name="acme/ns"))
    with pytest.raises(NotAllowed, match="1 namespaces"):
        await deployment.admin("CreateNamespace", wire.NamespaceSpec(name="acme/more"))
    policies = as_text(Policies(max_topics=4))
    await deployment.admin("ChangePolicies", wire.ChangePoliciesRequest(namespace="acme/ns", set=policies))
    await deployment.admin("CreateTopic", wire.TopicSpec(name="acme/ns/parted", partitions=2))
    with pytest.raises(NotAllowed, match="2 topics, and 3 more are above the 4"):
        await deployment.admin("UpdateTopic", wire.TopicSpec(name="acme/ns/parted", partitions=5))
    with pytest.raises(AlreadyExists):
        await deployment.admin("CreateTopic", wire.TopicSpec(name="acme/ns/parted", partitions=9))
    await deployment.admin("UpdateTopic", wire.TopicSpec(name="acme/ns/parted", partitions=3))
    producer = await deployment.producer("acme/ns/made-by-use")
    with pytest.raises(NotAllowed, match="4 topics"):
        await deployment.call("Partitions", wire.PartitionsRequest(topic="acme/ns/no-more", create=True))
    with pytest.raises(NotAllowed, match="4 topics"):
        await deployment.producer("acme/ns/no-more")
    await producer.close()
    with pytest.raises(InvalidRequest, match="policy of a namespace"):
        await deployment.admin("ChangePolicies", wire.ChangePoliciesRequest(topic="acme/ns/parted", set=policies))


async def test_a_topic_is_not_loaded_again_while_its_record_goes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would confirm what is published into a ledger that no list names."""
    await deployment.filled(1)
    catalog = deployment.broker.topic_manager.catalog
    forget = catalog.delete_topic_record

    async def forget_with_a_guest(topic: TopicName, *more: Any) -> None:
        with pytest.raises(NotOwner):
            await deployment.producer(name="guest")
        await forget(topic, *more)

    monkeypatch.setattr(catalog, "delete_topic_record", forget_with_a_guest)
    await deployment.admin("DeleteTopic", wire.DeleteRequest(name=TOPIC, force=True))
    assert not await deployment.running.sessions[0].children("/ledgers")
    assert (await (await deployment.producer()).send(b"of the next topic")).index == 0


async def test_a_terminated_topic_is_read_and_not_written(deployment: Deployment) -> None:
    producer = await deployment.filled(2)
    last = await deployment.admin("TerminateTopic", wire.Name(name=TOPIC))
    assert last.entry_id == 1
    producer.publish(b"late")
    assert isinstance(from_wire((await producer.next("failed")).error), TopicTerminated)
    await deployment.admin("UnloadTopic", wire.Name(name=TOPIC))
    consumer = await deployment.consumer(initial_position=EARLIEST)
    assert await consumer.receive_payloads(2) == [b"0", b"1"]
    with pytest.raises(TopicTerminated, match="it can be read and not written"):
        await deployment.producer(name="q")


async def test_a_changed_persistence_holds_from_the_next_ledger_on_whoever_changed_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, bookies=2, roll_entries=2) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        log = broker.topics[TOPIC].log
        await producer.send(b"1")
        assert log.replication == LedgerReplication(1, 1, 1)
        changed = PoliciesRecord(policies=Policies(ensemble_size=2, write_quorum=2, ack_quorum=1))
        await put_record(running.store.new_session(), paths.namespace_policies("public", "default"), changed)
        while broker.topics[TOPIC].applied.ensemble_size == 1:  # noqa: ASYNC110
            await asyncio.sleep(0)  # until the watch has told it
        await producer.send(b"2")
        assert log.replication == LedgerReplication(1, 1, 1), "what is written already stays"
        await producer.send(b"3")
        assert log.replication == log.wanted_replication == LedgerReplication(2, 2, 1)
        assert not log.is_degraded
