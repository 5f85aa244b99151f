"""What operators look into: cursors, copies of ledgers, the metadata, and who is connected."""

import asyncio
import json

import pytest

from magnetar.asyncio import Client
from magnetar.client.admin import AdminClient
from magnetar.ledger.bookies import store_damage_report
from magnetar.metadata import paths
from magnetar.metadata.records import UnderReplicatedRecord, decode_record_of_any_class
from magnetar.metadata.store import NODE_ABSENT, put_record
from magnetar.proto.errors import InvalidRequest, SubscriptionNotFound
from magnetar.proto.names import Position
from magnetar.proto.states import LedgerState
from tests.support.cluster import Cluster


async def test_a_cursor_is_told_in_buckets_with_who_has_its_gaps(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        consumer = await client.subscribe("t", "s", consumer_name="ada")
        producer = await client.create_producer("t", batching_enabled=False)
        for number in range(10):
            await producer.send(b"%d" % number)
        got = [await consumer.receive() for _ in range(10)]
        for number in (0, 3, 9):
            await consumer.acknowledge(got[number])
        while len((found := await admin.describe_cursor("t", "s", buckets=3)).gaps) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert found.end == Position(found.mark_delete.ledger_id, 9)
        assert found.mark_delete.entry_id == 0
        of_buckets = [(each.first.entry_id, each.first_index, each.entries, each.acknowledged)
                      for each in found.buckets]  # fmt: skip
        assert of_buckets == [(1, 1, 3, 1), (4, 4, 3, 0), (7, 7, 3, 1)]
        assert [(each.first.entry_id, each.entries, each.consumer) for each in found.gaps] == [
            (4, 5, "ada"), (1, 2, "ada"),
        ]  # fmt: skip
        assert all(each.published_ms > 0 for each in found.gaps)
        for wrong in (-1, 1001):
            with pytest.raises(InvalidRequest):
                await admin.describe_cursor("t", "s", buckets=wrong)
        with pytest.raises(SubscriptionNotFound):
            await admin.describe_cursor("t", "none")


async def test_ledgers_name_the_bookies_whose_copies_are_missing_or_damaged(running: Cluster) -> None:
    broker = running.brokers[0]
    url = f"magnetar://{broker.endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        for _ in range(3):
            producer = await client.create_producer("t")
            await producer.send(b"x")
            await producer.close()
            await admin.unload_topic("t")
        whole = await admin.describe_ledgers("t")
        assert [each.missing for each in whole] == [{}] * len(whole)
        first, second = whole[0], whole[1]
        assert first.state is LedgerState.CLOSED
        assert (first.entries, len(first.bookies)) == (1, int(first.quorum[0]))
        metadata = broker.topic_manager.metadata
        mark = UnderReplicatedRecord(ledger_id=first.ledger_id, bookies={"gone": "lost"})
        await put_record(metadata, paths.under_replicated(first.ledger_id), mark, NODE_ABSENT)
        await store_damage_report(metadata, second.ledger_id, second.bookies[0], ((0, 0),))
        found = await admin.describe_ledgers("t")
        assert found[0].missing == {"gone": "lost"}
        assert found[0].bookies == (*first.bookies, "gone")
        assert found[1].missing == {second.bookies[0]: "damaged"}
        assert await admin.describe_ledgers("t", after=first.ledger_id, limit=1) == [found[1]]
        with pytest.raises(InvalidRequest):
            await admin.describe_ledgers("t", limit=201)


async def test_every_record_of_the_metadata_is_told_without_keys_and_tokens(running: Cluster) -> None:
    broker = running.brokers[0]
    url = f"magnetar://{broker.endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await (await client.create_producer("t")).send(b"x")
        metadata, waiting, kinds = broker.topic_manager.metadata, ["/"], set[str]()
        while waiting:
            path = waiting.pop()
            found = await admin.describe_metadata(node=path)
            assert not found.damage
            waiting += [f"{path.rstrip('/')}/{each}" for each in found.children]
            if not found.kind:
                continue
            kinds.add(found.kind)
            node = await metadata.get(path)
            assert node is not None
            record = decode_record_of_any_class(node.value, path)
            for name in ("key", "token"):
                assert json.loads(found.record).get(name, "…") in ("…", "")
                secret = getattr(record, name, "")
                assert not secret or str(secret) not in found.record
        assert {"LedgerRecord", "TopicRecord", "BookieRecord", "BrokerRecord", "ClusterRecord"} <= kinds
        first = await admin.describe_metadata(limit=2)
        assert (len(first.children), first.next) == (2, first.children[1])
        rest = await admin.describe_metadata(after=first.next)
        assert rest.children[0] > first.next
        assert (await admin.describe_metadata(node="/none")).version == -1
        await metadata.put("/brokers/broken", b"no")
        assert "too few" in (await admin.describe_metadata(node="/brokers/broken")).damage
        await metadata.delete("/brokers/broken")
        with pytest.raises(InvalidRequest):
            await admin.describe_metadata(node="topics")


async def test_who_is_connected_is_counted_by_credential(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await client.create_producer("t")
        await client.create_producer("u")
        await client.subscribe("t", "s")
        found = await admin.describe_security()
        assert [(each.kind, each.producers, each.consumers) for each in found.roles] == [("local", 2, 1)]
        assert found.refused == ()
