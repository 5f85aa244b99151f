"""Ledgers that nobody refers to go, safely; ledgers that are gone are said."""

import asyncio
from pathlib import Path

import pytest

from magnetar.broker.cluster.orphans import delete_orphans, find_orphans
from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.metadata import paths
from magnetar.metadata.records import (
    CompactedLedgerInfo,
    CursorRecord,
    DeduplicationStateLocation,
    DelayBucket,
    TopicRecord,
)
from magnetar.metadata.store import (
    NODES_PER_PAGE,
    DeleteNode,
    NodePage,
    PutNode,
    VersionedValue,
    get_record,
    put_record,
)
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import LedgerFenced, LedgerNotFound, MagnetarError, Unavailable
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
HOUR_MS = 3_600_000


def client(running: Cluster) -> LedgerClient:
    config = LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1)
    return LedgerClient(running.world, running.store.new_session(), config)


async def used(running: Cluster) -> None:
    """A topic with a subscription that has a cursor ledger."""
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    consumer = await TestConsumer(
        running.world, running.brokers[0], TOPIC, initial_position=wire.Subscribe.EARLIEST
    ).ready()
    await producer.send(b"1")
    await consumer.ack(await consumer.receive())


async def test_complaint_29_what_a_crash_left_behind_is_found_and_deleted_and_nothing_else(running: Cluster) -> None:
    await used(running)
    metadata, ledgers = running.store.new_session(), client(running)
    left = await ledgers.create(properties={"topic": TOPIC})
    of_cursor = await ledgers.create(properties={"topic": TOPIC, "cursor": "s"})
    unknown = await ledgers.create(properties={"topic": TOPIC, "index of": "something new"})
    now_ms = running.world.clock.wall_ms()
    assert not (await find_orphans(metadata, now_ms, 3600)).orphans, "somebody may be about to list it"
    found = await find_orphans(metadata, now_ms + HOUR_MS + 1000, 3600)
    assert {each.ledger_id for each in found.orphans} == {left.ledger_id, of_cursor.ledger_id}
    assert not found.missing
    assert await delete_orphans(metadata, ledgers, found.orphans) == found.orphans
    for gone in (left, of_cursor):
        with pytest.raises(LedgerNotFound):
            await ledgers.open(gone.ledger_id)
    assert (await ledgers.read_record(unknown.ledger_id)).ledger_id == unknown.ledger_id
    assert await find_orphans(metadata, now_ms + HOUR_MS + 1000, 3600) == ([], [])
    producer = await TestProducer(running.world, running.brokers[0], TOPIC, "after").opened()
    await producer.send(b"2")
    await ledgers.close()


async def test_a_ledger_of_a_log_is_an_orphan_whatever_its_record_says_of_how_it_was_written(running: Cluster) -> None:
    metadata, ledgers = running.store.new_session(), client(running)
    made = [
        (await ledgers.create(properties={"topic": TOPIC, **more})).ledger_id
        for more in ({"index": "7"}, {"index": "7", "durability": "memory"}, {"durability": "memory"})
    ]
    found = await find_orphans(metadata, running.world.clock.wall_ms() + HOUR_MS + 1000, 3600)
    assert [each.ledger_id for each in found.orphans] == made
    await ledgers.close()
    await metadata.close()


async def test_a_ledger_of_a_topics_own_state_is_an_orphan_only_while_no_record_names_it(running: Cluster) -> None:
    metadata, ledgers = running.store.new_session(), client(running)
    kinds = ({"cursor": "s"}, {"delays": "s"}, {"dedup": "snapshots"}, {"compacted": "true"})
    cursor, delays, dedup, compacted, replaced = [
        (await ledgers.create(properties={"topic": TOPIC, **kind})).ledger_id for kind in (*kinds, kinds[-1])
    ]
    late_ms = running.world.clock.wall_ms() + HOUR_MS + 1000
    found = await find_orphans(metadata, late_ms, 3600)
    assert [(each.ledger_id, each.subscription) for each in found.orphans] == [
        (cursor, "s"), (delays, "s"), (dedup, ""), (compacted, ""), (replaced, ""),
    ]  # fmt: skip
    topic = TopicRecord(
        dedup=DeduplicationStateLocation(mark_ledger=-1, mark_entry=-1, ledger_id=dedup), pending_deletion=(replaced,),
        compacted=CompactedLedgerInfo(ledger_id=compacted, horizon_ledger=-1, horizon_entry=-1, end_index=0),
    )  # fmt: skip
    bucket = DelayBucket(ledger_id=delays, entries=1, last_ms=0)
    await put_record(metadata, paths.topic("public", "default", "t"), topic)
    await put_record(
        metadata, paths.cursor("public", "default", "t", "s"), CursorRecord(ledger_id=cursor, delays=(bucket,))
    )
    assert await find_orphans(metadata, late_ms, 3600) == ([], [])
    assert await delete_orphans(metadata, ledgers, found.orphans, unexplained=True) == []
    await ledgers.close()


async def test_a_sweep_with_a_wrong_clock_deletes_nothing_that_it_has_not_seen_before(tmp_path: Path) -> None:
    async with cluster(tmp_path, orphan_age_s=0.3) as running:
        await used(running)
        ledgers, manager = client(running), running.brokers[0].topic_manager
        left = await ledgers.create(properties={"topic": TOPIC})
        await asyncio.sleep(0.35)  # old, as far as the wall clocks say
        await manager.delete_orphans_if_first_broker()
        assert (await ledgers.read_record(left.ledger_id)).ledger_id == left.ledger_id
        await asyncio.sleep(0.35)
        await manager.delete_orphans_if_first_broker()
        with pytest.raises(LedgerNotFound):
            await ledgers.read_record(left.ledger_id)
        await ledgers.close()


async def test_whoever_still_writes_an_orphan_can_confirm_nothing_after_it_went(running: Cluster) -> None:
    metadata, ledgers = running.store.new_session(), client(running)
    await put_record(metadata, paths.topic("public", "default", "t"), TopicRecord())
    writer = await ledgers.create(properties={"topic": TOPIC})
    await writer.append(b"before")
    found = await find_orphans(metadata, running.world.clock.wall_ms() + HOUR_MS + 1000, 3600)
    await delete_orphans(metadata, ledgers, found.orphans)
    with pytest.raises(MagnetarError) as raised:
        await writer.append(b"after")
    assert isinstance(raised.value, LedgerFenced) or not raised.value.definite
    await ledgers.close()


async def test_what_a_topic_refers_to_by_the_time_of_its_deletion_stays(running: Cluster) -> None:
    await used(running)
    metadata, ledgers = running.store.new_session(), client(running)
    writer = await ledgers.create(properties={"topic": TOPIC, "cursor": "s"})
    found = await find_orphans(metadata, running.world.clock.wall_ms() + HOUR_MS + 1000, 3600)
    assert [each.ledger_id for each in found.orphans] == [writer.ledger_id]
    path = paths.cursor("public", "default", "t", "s")
    record = await get_record(metadata, path, CursorRecord)
    assert record is not None
    await put_record(metadata, path, CursorRecord(ledger_id=writer.ledger_id, claim=record[0].claim))
    assert await delete_orphans(metadata, ledgers, found.orphans) == []
    await ledgers.close()


async def test_complaint_29_a_listed_ledger_that_is_gone_is_said_and_the_list_is_left_alone(running: Cluster) -> None:
    await used(running)
    metadata, ledgers = running.store.new_session(), client(running)
    path = paths.topic("public", "default", "t")
    record = await get_record(metadata, path, TopicRecord)
    assert record is not None
    await ledgers.delete(record[0].ledgers[-1].ledger_id)
    found = await find_orphans(metadata, running.world.clock.wall_ms(), 3600)
    assert [(each.ledger_id, each.topic) for each in found.missing] == [(record[0].ledgers[-1].ledger_id, TOPIC)]
    assert await get_record(metadata, path, TopicRecord) == record
    await ledgers.close()


LOST = ["gone", "damaged-path", "made-anew"]  # the topic's record


@pytest.mark.parametrize("what", LOST)
async def test_ledgers_of_a_topic_whose_record_is_lost_stay_until_an_operator_says_so(
    what: str, running: Cluster
) -> None:
    await used(running)
    metadata, ledgers = running.store.new_session(), client(running)
    path = paths.topic("public", "default", "t")
    found = await get_record(metadata, path, TopicRecord)
    node = await metadata.get(path)
    assert found is not None
    assert node is not None
    listed = {each.ledger_id for each in found[0].ledgers}
    cursor = paths.cursor("public", "default", "t", "s")
    moved = [] if what != LOST[1] else [PutNode(path.replace("/topics", "/topicr"), node.value)]
    await metadata.commit([DeleteNode(path), DeleteNode(cursor), *moved])
    if what == LOST[2]:
        late_ms = running.world.clock.wall_ms() + 1
        await put_record(metadata, path, TopicRecord(created_ms=late_ms))
        await put_record(metadata, cursor, CursorRecord(created_ms=late_ms))
    late_ms = running.world.clock.wall_ms() + HOUR_MS + 1000
    orphans = (await find_orphans(metadata, late_ms, 3600)).orphans
    assert listed <= {each.ledger_id for each in orphans}
    assert all(each.unexplained for each in orphans)
    assert await delete_orphans(metadata, ledgers, orphans) == []
    assert (await find_orphans(metadata, late_ms, 3600)).orphans == orphans
    assert await delete_orphans(metadata, ledgers, orphans, unexplained=True) == orphans
    await ledgers.close()


async def test_a_search_reads_ledgers_and_topics_in_pages_and_each_record_once(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, ledgers = running.store.new_session(), client(running)
    for number in range(7):
        await TestProducer(running.world, running.brokers[0], f"{TOPIC}-{number}").opened()
    left = await ledgers.create(properties={"topic": f"{TOPIC}-3"})
    monkeypatch.setattr("magnetar.metadata.store.iterate_nodes.__defaults__", ("", 2))
    monkeypatch.setattr("magnetar.broker.cluster.orphans.TOPICS_READ_AT_ONCE", 2)
    list_nodes, get = metadata.list_nodes, metadata.get
    pages, read = list[tuple[str, int]](), list[str]()

    async def counting_pages(folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        page = await list_nodes(folder, after, limit)
        pages.append((folder, len(page.names)))
        return page

    async def counting_reads(path: str) -> VersionedValue | None:
        read.append(path)
        return await get(path)

    metadata.list_nodes, metadata.get = counting_pages, counting_reads  # type: ignore[method-assign]
    found = await find_orphans(metadata, running.world.clock.wall_ms() + HOUR_MS + 1000, 3600)
    assert [each.ledger_id for each in found.orphans] == [left.ledger_id]
    assert max(count for _, count in pages) == 2
    topics = [path for path in read if path.startswith("/topics/")]
    assert len(topics) == len(set(topics)) + 1 == 8, "once each, and that of the orphan to explain it"
    await ledgers.close()


async def test_what_a_crash_in_the_deletion_of_a_topic_or_subscription_leaves_is_noted_and_goes(
    running: Cluster
) -> None:
    await used(running)
    broker = running.brokers[0]
    metadata = running.store.new_session()
    before = {paths.ledger_id(name) for name in await metadata.children(paths.LEDGERS)}
    original = LedgerClient.delete

    async def crash(self: LedgerClient, *ledger_ids: int) -> None:
        raise Unavailable("the process ends here")

    LedgerClient.delete = crash  # type: ignore[method-assign]
    try:
        with pytest.raises(Unavailable):
            await broker.topic_manager.delete_topic(TopicName.parse(TOPIC), force=True)
    finally:
        LedgerClient.delete = original  # type: ignore[method-assign]
    late_ms = running.world.clock.wall_ms() + HOUR_MS + 1000
    orphans = (await find_orphans(metadata, late_ms, 3600)).orphans
    assert {each.ledger_id for each in orphans} == before
    assert not any(each.unexplained for each in orphans)
    ledgers = client(running)
    assert await delete_orphans(metadata, ledgers, orphans) == orphans
    await ledgers.close()
