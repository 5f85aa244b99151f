"""The parts of a topic: in which order it calls them, and what of the log they hold, for which reason."""

from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.compaction import Compaction
from magnetar.broker.log.topic_log import TopicLog
from magnetar.broker.session import summaries
from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.broker.topic.dedup import Deduplication
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import TopicName
from magnetar.proto.states import LedgerStays
from tests.support.cluster import SMALL, Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
PARTS = (Deduplication, TopicTransactions, Compaction)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def record(of: type, method: str) -> None:
        honest = getattr(of, method)

        def recorded(*args: Any, **options: Any) -> Any:
            made.append(f"{of.__name__}.{method}")
            return honest(*args, **options)

        monkeypatch.setattr(of, method, recorded)

    for part in PARTS:
        for method in ("open", "run_due_work", "trim_limit", "stop", "close", "list_own_ledgers"):
            record(part, method)
    record(TopicLog, "open")
    record(TopicLog, "close")
    record(DurableCursor, "open")
    return made


async def test_a_topic_opens_its_parts_after_its_log_and_before_its_subscriptions(
    calls: list[str], running: Cluster
) -> None:
    await TestConsumer(running.world, running.brokers[0], TOPIC, "s").ready()
    await running.brokers[0].topic_manager.unload_topic(NAME)
    calls.clear()
    await running.brokers[0].topic_manager.load_topic(NAME)
    assert calls == ["TopicLog.open", *_each("open"), "DurableCursor.open"]


async def test_a_topic_stops_its_parts_before_it_closes_its_log_and_closes_them_after(
    calls: list[str], running: Cluster
) -> None:
    await running.brokers[0].topic_manager.load_topic(NAME)
    calls.clear()
    await running.brokers[0].topic_manager.unload_topic(NAME)
    first = list(dict.fromkeys(calls))
    assert first == [*_each("stop"), "TopicLog.close", *_each("close")]


async def test_a_lost_topic_stops_every_part_and_a_deleted_one_asks_for_their_ledgers(
    calls: list[str], running: Cluster
) -> None:
    topic = await running.brokers[0].topic_manager.load_topic(NAME)
    calls.clear()
    topic.log.abandon(Unavailable("by a test"))
    assert [each for each in calls if "stop" in each][: len(PARTS)] == _each("stop")
    await running.brokers[0].topic_manager.load_topic(NAME)
    calls.clear()
    await running.brokers[0].topic_manager.delete_topic(NAME, force=True)
    assert calls[-len(PARTS) :] == _each("list_own_ledgers")


async def test_each_part_is_looked_at_with_the_topic_and_asked_what_it_holds_before_a_trim(
    calls: list[str], running: Cluster
) -> None:
    topic = await running.brokers[0].topic_manager.load_topic(NAME)
    calls.clear()
    await running.brokers[0].topic_manager.maintain_topics()
    await topic.trim_ledgers()
    assert [each for each in calls if "run_due_work" in each] == _each("run_due_work")
    assert calls.index("Deduplication.run_due_work") < calls.index("Deduplication.trim_limit")


def _each(method: str) -> list[str]:
    return [f"{part.__name__}.{method}" for part in PARTS]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deduplication": True, "dedup_snapshot_entries": 1000}, LedgerStays.NOT_IN_SNAPSHOT),
        ({"compaction_threshold_bytes": 1 << 30}, LedgerStays.NOT_COMPACTED),
        ({}, None),
    ],
    ids=["deduplication", "compaction", "nothing"],
)
async def test_a_ledger_that_only_a_part_holds_stays_for_the_reason_of_the_part(
    tmp_path: Path, changes: dict[str, Any], reason: LedgerStays | None
) -> None:
    """The subscription has acknowledged all of it: it is not the reason."""
    async with cluster(tmp_path, **{"retention_minutes": 0, "retention_mib": 0, **changes}) as running:
        consumer = await TestConsumer(running.world, running.brokers[0], TOPIC, "s").ready()
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        await producer.send(b"0")
        await consumer.ack(await consumer.receive())
        topic = await running.brokers[0].topic_manager.load_topic(NAME)
        await topic.log.roll_ledger()
        assert SMALL.retention_minutes == 0
        assert [stays for _, stays in topic.list_reasons_ledgers_kept()] == [reason, LedgerStays.OPEN]
        shown = [ledger.stays for ledger in summaries.collect_internal_stats(topic, 0).ledgers]
        assert shown == [reason.value if reason is not None else "", LedgerStays.OPEN.value]
        gone = await topic.trim_ledgers()
        assert bool(gone) is (reason is None)
