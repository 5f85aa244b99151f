"""Topics with durability=memory, and producers with acks=none and acks=one: what they promise, who says so, and what is
refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.bookie.adds import AddRequestHandler, VerifiedAddRequest
from magnetar.broker.topic.producer import FIRST_COPIES
from magnetar.broker.topic.topic import Topic
from magnetar.cli.run import metrics
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.common.errors import InvalidConfiguration, NotAllowedError, OperationNotSupported
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.transactions.process import Output
from magnetar.ledger import LedgerWriter, sender
from magnetar.ledger.metadata_core import is_answered_from_memory
from magnetar.metadata import paths, records
from magnetar.metadata.records import LedgerRecord, decode_record
from magnetar.proto.errors import InvalidRequest, NotAllowed, Unavailable
from magnetar.proto.names import TopicName
from magnetar.proto.policies import Policies
from magnetar.runtime.metrics import MetricsPage
from tests.compiled import replaces_code
from tests.support.cluster import Cluster, cluster
from tests.support.steps import take_until_quiet

NAMESPACE = "public/default"
TOPIC = f"persistent://{NAMESPACE}/fast"


async def all_of(consumer: Consumer) -> list[Any]:
    return await take_until_quiet(consumer.receive, 300)


async def compact(admin: AdminClient) -> None:
    await admin.compact(TOPIC)
    async with asyncio.timeout(10):
        while (await admin.compaction_status(TOPIC)).state.name == "RUNNING":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await admin.compaction_status(TOPIC)).state.name == "SUCCESS"


class Site:
    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.url = f"magnetar://{running.brokers[0].endpoint}"
        self.client, self.admin = aio.Client(self.url), AdminClient(self.url)

    async def policies(self, *, topic: str | None = None, **given: object) -> None:
        policies = Policies(**given)  # type: ignore[arg-type]
        if topic is None:
            await self.admin.set_namespace_policies(NAMESPACE, policies)
        else:
            await self.admin.set_topic_policies(topic, policies)

    async def topic(self) -> Topic:
        return await self.running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))

    async def ledgers(self) -> list[LedgerRecord]:
        found = []
        for name in await self.running.sessions[0].children(paths.LEDGERS):
            node = await self.running.sessions[0].get(f"{paths.LEDGERS}/{name}")
            found.append(decode_record(node.value, LedgerRecord, f"{paths.LEDGERS}/{name}"))
        return found


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with cluster(tmp_path) as running:
        made = Site(running)
        yield made
        await made.client.close()
        await made.admin.close()


# ------------------------------------------------------------------------------------------------- memory
async def test_only_the_ledgers_of_the_log_are_answered_from_memory(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of cursors, nor any other of the topic's own."""
    await site.policies(durability="memory")
    async with await site.client.create_producer(TOPIC, batching_enabled=False) as producer:
        consumer = await site.client.subscribe(TOPIC, "s", ack_receipt_enabled=True)
        for number in range(10):
            await producer.send(b"%d" % number)
        for message in await all_of(consumer):
            await consumer.acknowledge(message)
        topic = await site.topic()
        written = topic.log.replication
        assert written is not None
        assert written.unsynced
        found = {"cursor" in each.properties: is_answered_from_memory(each) for each in await site.ledgers()}
    assert found == {False: True, True: False}


async def test_the_policy_counts_for_a_topic_alone_and_from_its_next_ledger_on(site: Site) -> None:
    async with await site.client.create_producer(TOPIC, batching_enabled=False) as producer:
        await producer.send(b"synced")
        topic = await site.topic()
        for durability, unsynced in (("memory", True), ("disk", False)):
            await site.policies(topic=TOPIC, durability=durability)
            async with asyncio.timeout(10):
                while topic.is_durable_in_memory is not unsynced:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert topic.log.replication is not None
            assert topic.log.replication.unsynced is not unsynced, "the ledger that is written is not changed"
            await topic.maintenance.roll_ledger()
            await producer.send(b"next")
            assert topic.log.replication.unsynced is unsynced
        assert [span.last_entry for span in topic.log.shape.spans] == [0, 0, 0]


async def test_a_ledger_answered_from_memory_has_each_entry_at_each_bookie(tmp_path: Path) -> None:
    async with cluster(tmp_path, bookies=3, ensemble_size=3, write_quorum=2, ack_quorum=2) as running:
        site = Site(running)
        await site.policies(durability="memory")
        async with await site.client.create_producer(TOPIC) as producer:
            await producer.send(b"x")
            (record,) = [each for each in await site.ledgers() if is_answered_from_memory(each)]
            assert (record.ensemble_size, record.write_quorum) == (2, 2)
            assert not (await site.topic()).log.is_degraded
        await site.client.close()
        await site.admin.close()


async def test_the_log_says_at_the_first_producer_that_messages_may_be_lost_and_the_statistics_show_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await site.policies(durability="memory")
    one = await site.client.create_producer(TOPIC)
    two = await site.client.create_producer(TOPIC, acks="none")
    said = [each for each in caplog.records if "durability=memory" in each.getMessage()]
    assert [each.levelname for each in said] == ["WARNING"]
    stats = await site.admin.topic_stats(TOPIC)
    assert stats.durability == "memory"
    assert sorted(each.acks for each in stats.producers) == ["none", "quorum"]
    summary = await site.admin.broker_summaries()
    assert [(each.name, each.in_memory) for each in summary.brokers[0].namespaces] == [(NAMESPACE, 1)]
    await one.close()
    await two.close()


async def test_deduplication_and_memory_exclude_each_other_at_one_level_and_across_levels(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="choose one of them"):
        await site.policies(durability="memory", deduplication=True)
    await site.policies(durability="memory")
    await site.admin.create_topic(TOPIC)
    await site.policies(topic=TOPIC, deduplication=True)
    with pytest.raises(NotAllowedError, match="durability=memory may lose stored messages"):
        await site.client.create_producer(TOPIC)


async def test_a_producer_that_is_connected_when_both_begin_to_count_is_refused_each_message(site: Site) -> None:
    await site.policies(deduplication=True)
    async with await site.client.create_producer(TOPIC) as producer:
        await producer.send(b"x")
        await site.policies(topic=TOPIC, durability="memory")
        topic = await site.topic()
        async with asyncio.timeout(10):
            while not topic.is_durable_in_memory:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(NotAllowedError, match="durability=memory may lose stored messages"):
            await producer.send(b"y")
        await site.policies(topic=TOPIC, durability="disk")
        async with asyncio.timeout(10):
            while topic.is_durable_in_memory:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await producer.send(b"z")


async def test_a_transaction_publishes_nothing_to_such_a_topic(site: Site) -> None:
    await site.policies(durability="memory")
    async with await site.client.create_producer(TOPIC) as producer:
        transaction = await site.client.transaction()
        with pytest.raises(NotAllowedError, match="transactions promise not to"):
            await producer.send(b"x", txn=transaction)
        await transaction.abort()
        with pytest.raises(NotAllowedError, match="transactions promise not to"):
            await site.client.half([Output(b"x", producer=producer)], group="g")
        await producer.send(b"y")


async def test_before_an_upgrade_is_finished_the_policy_is_refused_and_a_default_has_no_effect(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records._Written, "format", 1)
    with pytest.raises(NotAllowed, match="finish the upgrade first"):
        await site.policies(durability="memory")
    topic = await site.topic()
    topic.applied = replace(topic.applied, durability="memory")
    assert not topic.is_durable_in_memory


# ------------------------------------------------------------------------------------------------- acks
async def test_a_send_with_acks_none_ends_before_the_broker_answers_and_the_message_arrives(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    honest = sender.AddSender._flush

    def late(self: sender.AddSender) -> None:  # the entry goes to no bookie
        if held.is_set():
            honest(self)
        else:
            self._loop.call_later(0.01, late, self)

    monkeypatch.setattr(sender.AddSender, "_flush", late)
    async with await site.client.create_producer(TOPIC, acks="none", batching_enabled=False) as producer:
        async with asyncio.timeout(10):
            ids = [await producer.send(b"%d" % number) for number in range(3)]
        assert {(each.ledger_id(), each.entry_id()) for each in ids} == {(-1, -1)}
        waits = asyncio.ensure_future(producer.flush())
        await asyncio.sleep(0.05)
        assert not waits.done(), "a flush waits for the broker"
        held.set()
        await asyncio.wait_for(waits, 10)
    consumer = await site.client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest)
    assert [each.data() for each in await all_of(consumer)] == [b"0", b"1", b"2"]


async def test_what_a_broker_refuses_with_acks_none_is_in_the_log_alone(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with await site.client.create_producer(TOPIC, acks="none", batching_enabled=False) as producer:
        await producer.send(b"taken")
        await producer.flush()
        await site.admin.terminate_topic(TOPIC)
        await producer.send(b"refused")
        await producer.flush()
    assert "1 messages that were sent with acks=none may be lost" in caplog.text


@pytest.mark.parametrize("acks", ["one", "none"])
async def test_acks_none_and_one_are_not_for_transactions_nor_for_a_topic_with_deduplication(
    site: Site, acks: str
) -> None:
    async with await site.client.create_producer(TOPIC, acks=acks) as producer:
        transaction = await site.client.transaction()
        with pytest.raises(OperationNotSupported, match=f"acks={acks}"):
            await producer.send(b"x", txn=transaction)
        with pytest.raises(OperationNotSupported, match=f"acks={acks}"):
            await producer.send(b"x", txn=transaction, properties={"a": "b"})
        await transaction.abort()
    await site.policies(deduplication=True)
    async with asyncio.timeout(10):
        topic = await site.topic()
        while not topic.applied.deduplication:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(NotAllowedError, match="acks=quorum"):
        await site.client.create_producer(TOPIC, acks=acks)


async def test_another_word_for_acks_is_refused_with_those_that_there_are(site: Site) -> None:
    with pytest.raises(InvalidConfiguration, match="quorum, one or none"):
        await site.client.create_producer(TOPIC, acks="all")


class SlowBookies:
    """While `held` is not set, no answer to an add counts but that of the bookie in the first slot. Of writers that are
    made after it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held, honest = asyncio.Event(), LedgerWriter._acked
        self.held.set()

        async def later(writer: LedgerWriter, adds: Any, place: tuple[int, str]) -> None:
            await self.held.wait()
            honest(writer, adds, place)

        def acked(writer: LedgerWriter, adds: Any, place: tuple[int, str]) -> None:
            if place[0] == 0 or self.held.is_set():
                honest(writer, adds, place)
            else:
                self.late.append(asyncio.ensure_future(later(writer, adds, place)))

        self.late: list[asyncio.Future[None]] = []
        patch.setattr(LedgerWriter, "_acked", acked)


@replaces_code
async def test_a_send_with_acks_one_ends_with_the_first_copy_and_only_the_quorum_shows_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that waits for the quorum does, beside it; a flush of either does."""
    async with cluster(tmp_path, bookies=3, ensemble_size=3, write_quorum=3, ack_quorum=2) as running:
        site, slow = Site(running), SlowBookies(monkeypatch)
        consumer = await site.client.subscribe(TOPIC, "s")
        one = await site.client.create_producer(TOPIC, acks="one", batching_enabled=False)
        safe = await site.client.create_producer(TOPIC, batching_enabled=False)
        assert (await safe.send(b"before")).entry_id() == 0
        slow.held.clear()
        async with asyncio.timeout(20):
            ids = [await one.send(b"%d" % number) for number in range(3)]
        assert {(each.ledger_id(), each.entry_id()) for each in ids} == {(-1, -1)}
        waits = [asyncio.ensure_future(each) for each in (safe.send(b"safe"), one.flush(), safe.flush())]
        assert [each.data() for each in await all_of(consumer)] == [b"before"]
        assert not any(each.done() for each in waits)
        assert (await site.topic()).log.shape.end_index == 1
        assert sorted(each.acks for each in (await site.admin.topic_stats(TOPIC)).producers) == ["one", "quorum"]
        slow.held.set()
        await asyncio.wait_for(asyncio.gather(*waits), 20)
        assert waits[0].result().entry_id() == 4
        assert [each.data() for each in await all_of(consumer)] == [b"0", b"1", b"2", b"safe"]
        await site.client.close()
        await site.admin.close()


async def test_a_topic_without_such_a_producer_asks_its_ledgers_for_no_first_copies(site: Site) -> None:
    async with await site.client.create_producer(TOPIC, batching_enabled=False) as producer:
        await producer.send(b"x")
        writer = (await site.topic()).log._appender.writer  # type: ignore[attr-defined]
        assert writer.tell_first_copies is None
        async with await site.client.create_producer(TOPIC, acks="one", batching_enabled=False) as other:
            await other.send(b"y")
        assert writer.tell_first_copies is not None


@replaces_code
async def test_what_had_one_copy_when_its_broker_lost_the_topic_is_counted_logged_and_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client still runs: it has kept what the quorum did not confirm, and what it sends next comes after that."""
    before, FIRST_COPIES.log_due_s = FIRST_COPIES.lost, 0.0
    async with cluster(tmp_path, bookies=3, ensemble_size=3, write_quorum=3, ack_quorum=2) as running:
        site, slow = Site(running), SlowBookies(monkeypatch)
        consumer = await site.client.subscribe(TOPIC, "s")
        one = await site.client.create_producer(TOPIC, acks="one", batching_enabled=False)
        await one.send(b"before")
        await one.flush()
        slow.held.clear()
        async with asyncio.timeout(20):
            for number in range(3):
                await one.send(b"%d" % number)
        assert FIRST_COPIES.lost == before
        (await site.topic()).log.abandon(Unavailable("a test"))
        assert FIRST_COPIES.lost == before + 3
        assert "were reported with one copy (acks=one), and their quorum failed" in caplog.text
        await metrics._broker(page := MetricsPage(), running.brokers[0], None)
        assert page.shown["magnetar_broker_first_copies_lost_total", ()] == before + 3
        slow.held.set()
        async with asyncio.timeout(60):
            await one.send(b"after")
            await one.flush()
        found = [each.data() for each in await all_of(consumer)]
        assert list(dict.fromkeys(found)) == [b"before", b"0", b"1", b"2", b"after"], "some may be there twice"
        await site.client.close()
        await site.admin.close()


@replaces_code
async def test_what_times_out_after_its_first_copy_is_in_the_log_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, bookies=3, ensemble_size=3, write_quorum=3, ack_quorum=2) as running:
        site, slow = Site(running), SlowBookies(monkeypatch)
        one = await site.client.create_producer(TOPIC, acks="one", batching_enabled=False, send_timeout_millis=1500)
        await one.send(b"before")
        await one.flush()
        slow.held.clear()
        await asyncio.wait_for(one.send(b"reported"), 20)
        await one.flush()  # when it has timed out
        assert "1 messages that were sent with acks=one may be lost" in caplog.text
        await site.client.close()
        await site.admin.close()


# ------------------------------------------------------------------------------------------------- pairs
async def test_a_topic_with_memory_is_compacted_gives_dead_letters_and_is_read_as_any_other(site: Site) -> None:
    await site.policies(durability="memory", dead_letter_max_redeliver_count=1)
    async with await site.client.create_producer(TOPIC, batching_enabled=False) as producer:
        for number in range(6):
            await producer.send(b"%d" % number, partition_key=f"k{number % 2}")
        shared = await site.client.subscribe(
            TOPIC, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest,
            negative_ack_redelivery_delay_ms=100,
        )  # fmt: skip
        letters = await site.client.subscribe(f"{TOPIC}-s-DLQ", "l", initial_position=InitialPosition.Earliest)
        for _ in range(12):  # each comes again once
            await shared.negative_acknowledge(await shared.receive(10_000))
        assert len({(await letters.receive(10_000)).data() for _ in range(6)}) == 6
        await compact(site.admin)
        compacted = await site.client.subscribe(
            TOPIC, "c", is_read_compacted=True, initial_position=InitialPosition.Earliest
        )
        assert [each.data() for each in await all_of(compacted)] == [b"4", b"5"]
    every = await site.ledgers()
    logs = [each for each in every if each.properties.keys() <= {"topic", "index", "durability"}]
    assert all(map(is_answered_from_memory, logs))
    assert {"cursor", "compacted"} <= {kind for each in every if each not in logs for kind in each.properties}
    assert not any(is_answered_from_memory(each) for each in every if each not in logs)


async def test_after_all_bookies_lost_the_newest_entries_the_topic_its_cursors_and_its_compacted_form_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie forgets what it answered last, as if it had been killed before the sync, and the broker dies too. What
    was delivered and compacted of it is gone; all that comes later is delivered once, and nothing else is lost."""
    kept, admit = 6, AddRequestHandler._admit

    def forgetting(self: AddRequestHandler, batch: VerifiedAddRequest) -> None:
        if batch.unsynced and batch.entry >= kept:
            self._answer_stored(batch, 0.0)
        else:
            admit(self, batch)

    monkeypatch.setattr(AddRequestHandler, "_admit", forgetting)
    async with cluster(tmp_path, brokers=2, durability="memory", cursor_flush_s=0.01) as running:
        site = Site(running)
        producer = await site.client.create_producer(TOPIC, batching_enabled=False)
        consumer = await site.client.subscribe(TOPIC, "s", ack_receipt_enabled=True)
        for number in range(10):
            await producer.send(b"%d" % number, partition_key=f"k{number}")
            if number == 4:
                await compact(site.admin)
        for number in range(10):
            message = await consumer.receive(10_000)
            assert message.data() == b"%d" % number
            await consumer.acknowledge(message)
        first = running.brokers[0]
        topic = first.topics[TOPIC]
        assert topic.log.shape.end_index == 10
        await topic.log._appender.writer.abandon()  # type: ignore[union-attr]
        assert first._serving is not None
        await first._serving.close()
        running.sessions[0].abandon()
        other = aio.Client(f"magnetar://{running.brokers[1].endpoint}")
        async with asyncio.timeout(60):
            again = await other.subscribe(TOPIC, "s")
            late = await other.create_producer(TOPIC, batching_enabled=False)
        shape = running.brokers[1].topics[TOPIC].log.shape
        assert shape.end_index == kept, "the newest are gone, for readers too"
        for number in range(20, 23):
            await late.send(b"%d" % number, partition_key="k")
        found = [(await again.receive(10_000)).data() for _ in range(3)]
        assert found == [b"20", b"21", b"22"], "what was acknowledged does not come again, and nothing new is skipped"
        reader = await other.create_reader(TOPIC, MessageId.earliest)
        read = [(await reader.read_next(10_000)).data() for _ in range(kept + 3)]
        assert read == [b"%d" % number for number in [*range(kept), 20, 21, 22]]
        admin = AdminClient(f"magnetar://{running.brokers[1].endpoint}")
        for compacts in (False, True):
            if compacts:
                await compact(admin)
            reader = await other.create_reader(TOPIC, MessageId.earliest, is_read_compacted=True)
            new = [b"22"] if compacts else [b"20", b"21", b"22"]
            read = [(await reader.read_next(10_000)).data() for _ in range(kept + len(new))]
            assert read == [*(b"%d" % number for number in range(kept)), *new]
        clients = (other, admin, site.client, site.admin)
        await asyncio.gather(*(each.close() for each in clients), return_exceptions=True)
