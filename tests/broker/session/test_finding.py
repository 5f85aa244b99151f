"""A search of a topic at its owner: by a filter, in pieces, of what consumers may see. What has become of a message."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.session import finding
from magnetar.cli.admin.stats import make_subscription_rows, merge_subscriptions
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType
from magnetar.proto.errors import BackPressure, InvalidRequest, TopicNotFound
from magnetar.proto.states import Blocked
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/t"


def _url(running: Cluster) -> str:
    return f"magnetar://{running.brokers[0].endpoint}"


@pytest.mark.parametrize("batching", [False, True])
async def test_a_filter_finds_by_properties_and_by_the_fields_of_a_message(tmp_path: Path, batching: bool) -> None:
    async with cluster(tmp_path, roll_entries=7) as running, aio.Client(_url(running)) as client:
        async with await client.create_producer(TOPIC, "p", batching_enabled=batching) as producer:
            await asyncio.gather(*(
                producer.send(
                    b"x" * (each % 5), properties={"n": str(each), "even": str(each % 2 == 0)},
                    partition_key=f"k{each % 3}", event_timestamp=each,
                ) for each in range(30)
            ))  # fmt: skip
        async with AdminClient(_url(running)) as admin:
            for where, wanted in (
                ("n BETWEEN 3 AND 5", [5, 4, 3]), ("even AND n > 25", [28, 26]),
                ("message.key = 'k1' AND n < 6", [4, 1]),
                ("message.size = 4 AND NOT even", [29, 19, 9]), ("message.event_time = 7", [7]),
                ("message.producer = 'p' AND n = 0", [0]), ("message.schema_version IS NULL AND n = 1", [1]),
                ("message.ordering_key IS NULL AND n = 1", [1]), ("message.publish_time < 10", []), ("other = 1", []),
            ):  # fmt: skip
                found = await admin.find_messages("t", where=where)
                assert [each.index for each in found.messages] == wanted, where
                assert [int(each.properties["n"]) for each in found.messages] == wanted
                assert (found.looked_at, found.before_index, found.unread, found.why) == (30, 0, 0, "")
            found = await admin.find_messages("t", where="n > 3", key="k0", property="even=True", text="x")
            assert [each.index for each in found.messages] == [24, 18, 12, 6]


async def test_a_search_goes_on_where_the_one_before_it_stopped(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(_url(running)) as client, AdminClient(_url(running)) as admin:
        async with await client.create_producer(TOPIC) as producer:
            await asyncio.gather(*(producer.send(b"", properties={"n": str(each)}) for each in range(20)))
        found, before = list[int](), 0
        while True:
            part = await admin.find_messages("t", where="n > 0", limit=3, before_index=before)
            found += [each.index for each in part.messages]
            if not (before := part.before_index):
                break
            assert part.why == "it has 3 messages"
        assert found == [*range(19, 0, -1)]


async def test_messages_of_transactions_are_found_when_they_are_committed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(_url(running)) as client, AdminClient(_url(running)) as admin:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"1", partition_key="k")
        for commits in (False, True):
            txn = await client.transaction()
            await producer.send(b"2", partition_key="k", txn=txn)
            ordinary = await producer.send(b"3", partition_key="other")
            found = await admin.find_messages("t", key="k")
            assert [each.payload for each in found.messages] == [b"1"]
            assert found.waiting == 2, "of the transaction, and what follows it"
            trace = await admin.trace_message(
                "t", ledger_id=ordinary.ledger_id(), entry_id=ordinary.entry_id(), batch_index=-1
            )
            assert "open transaction" in trace.stored
            await (txn.commit("visible") if commits else txn.abort("visible"))
        assert [each.payload for each in (await admin.find_messages("t", key="k")).messages] == [b"2", b"1"]


async def test_wrong_and_too_many_searches_are_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, AdminClient(_url(running), timeout_s=4.0) as admin:
        with pytest.raises(TopicNotFound):
            await admin.find_messages("t", key="k")
        await admin.create_topic("t")
        with pytest.raises(InvalidRequest, match="at character 5") as refused:
            await admin.find_messages("t", where="a = NULL")
        assert refused.value.fields["position"] == "4"
        for wrong in ({"limit": finding.FOUND_MESSAGES_MAX + 1}, {"before_index": -1}, {"key": "k" * 1001}):
            with pytest.raises(InvalidRequest):
                await admin.find_messages("t", **wrong)  # type: ignore[arg-type]
        searched = running.brokers[0].topic_manager.searched
        searched.add(TOPIC)
        with pytest.raises(BackPressure, match="another search"):
            await admin.find_messages("t", key="k")
        searched.discard(TOPIC)
        assert (await admin.find_messages("t", key="k")).looked_at == 0
        assert not searched


async def test_a_message_has_one_state_in_each_subscription(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(_url(running)) as client, AdminClient(_url(running)) as admin:
        shared = {"consumer_type": ConsumerType.Shared, "receiver_queue_size": 3, "batch_index_ack_enabled": True}
        holder = await client.subscribe(TOPIC, "holder", consumer_name="c1", **shared)
        await admin.create_subscription(TOPIC, "alone")
        producer = await client.create_producer(TOPIC, batching_enabled=False)
        ids = [await producer.send(b"%d" % each) for each in range(5)]
        later = await producer.send(b"later", deliver_after=timedelta(hours=1))

        async def states(message_id: Any) -> dict[str, tuple[str, str]]:
            place = {"ledger_id": message_id.ledger_id(), "entry_id": message_id.entry_id(), "batch_index": -1}
            found = await admin.trace_message(TOPIC, **place)
            assert found.stored == "The topic has the message."
            return {each.subscription: (each.state, each.detail) for each in found.subscriptions}

        messages = [await holder.receive(30_000) for _ in range(3)]
        assert (await states(ids[0]))["alone"] == (
            "waiting", "It comes after what is before it: no consumer is connected."
        )  # fmt: skip
        state, detail = (await states(ids[0]))["holder"]
        assert (state, detail.partition(" (")[0]) == ("delivered", "Consumer 'c1'")
        assert (await states(later))["holder"][0] in ("delayed", "waiting")
        txn = await client.transaction()
        await holder.acknowledge(messages[2], txn=txn)
        assert (await states(ids[2]))["holder"] == ("pending", f"It is acknowledged when transaction {txn.id} commits.")
        await txn.commit()
        assert (await states(ids[2]))["holder"] == ("acknowledged", "Some messages before it are not.")
        await admin.skip_messages(TOPIC, "alone", 1)
        assert (await states(ids[0]))["alone"] == ("acknowledged", "Everything up to it is.")
        await holder.close()
        assert (await states(ids[1]))["holder"][0] == "waiting", "with the last consumer gone it begins anew"
        hidden = await client.transaction()
        unseen = await producer.send(b"in a transaction", txn=hidden)
        for place, sentence in (
            ((unseen.ledger_id(), unseen.entry_id()), "open transaction"),
            ((ids[0].ledger_id(), 10_000), "no such message yet"), ((1 << 40, 0), "no such message"),
            ((0, 0), "never had it, or it was deleted"),
        ):  # fmt: skip
            found = await admin.trace_message(TOPIC, ledger_id=place[0], entry_id=place[1], batch_index=-1)
            assert sentence in found.stored
            assert not found.subscriptions
        await admin.skip_messages(TOPIC, "alone")
        alone = next(each for each in (await admin.topic_stats(TOPIC)).subscriptions if each.name == "alone")
        assert alone.backlog == 0
        await admin.create_subscription(TOPIC, "new", MessageId.latest)
        why = await admin.why_stuck(TOPIC, "new")
        assert (why.stuck, why.blocked) == (True, Blocked.OPEN_TRANSACTION)
        assert why.sentences[0] == "What is left waits for an open transaction."
        assert why.sentences[-1].startswith(f"1 message waits for {hidden.id}, open for ")
        stats = await admin.topic_stats(TOPIC)
        new = next(each for each in stats.subscriptions if each.name == "new")
        assert (new.backlog, new.blocked) == (0, Blocked.OPEN_TRANSACTION)
        record = merge_subscriptions([stats])["new"]
        assert record["waitsForTransaction"]["txn"] == str(hidden.id)
        (row,) = make_subscription_rows({"new": record})
        assert row["blocked"].startswith(f"{Blocked.OPEN_TRANSACTION}: {hidden.id}, open for ")
        await hidden.abort("visible")
        assert not (await admin.why_stuck(TOPIC, "new")).stuck
        stats = await admin.topic_stats(TOPIC)
        assert {each.blocked for each in stats.subscriptions if each.name == "new"} == {Blocked.CAUGHT_UP}
        assert merge_subscriptions([stats])["new"]["waitsForTransaction"] == {}


async def test_a_search_says_of_each_message_whether_a_subscription_has_acknowledged_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with aio.Client(url) as client, AdminClient(url) as admin:
            consumer = await client.subscribe("t", "redrive", batch_index_ack_enabled=True)
            alone = await client.create_producer("t", batching_enabled=False)
            await alone.send(b"0")
            await alone.send(b"1")
            batched = await client.create_producer("t", batching_max_publish_delay_ms=5000)
            for number in (2, 3, 4):
                batched.send_nowait(b"%d" % number)
            await batched.flush()
            for _ in range(5):
                message = await consumer.receive(30_000)
                if message.data() in (b"1", b"3"):
                    await consumer.acknowledge(message)
            await consumer.close()
            found = (await admin.find_messages("t", acked_by="redrive")).messages
            assert {each.payload: each.is_acknowledged for each in found} == {
                b"0": False, b"1": True, b"2": False, b"3": True, b"4": False
            }  # fmt: skip
            for asked in ({}, {"acked_by": "none"}):
                found = (await admin.find_messages("t", **asked)).messages
                assert {each.is_acknowledged for each in found} == {None}
