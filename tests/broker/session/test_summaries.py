"""What every face shows of a cluster: sums, pages of topics, and why something stays where it is."""

import asyncio
import contextlib
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from magnetar.asyncio import Client, ConsumerType
from magnetar.broker.cluster import ownership
from magnetar.broker.node import survey
from magnetar.broker.server import Broker
from magnetar.broker.session import summaries
from magnetar.broker.subscription.core.key_shared import KeyShared
from magnetar.cli.admin.cluster import make_broker_row
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.client.admin import AdminClient
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidRequest,
    SessionExpired,
    SubscriptionNotFound,
    TopicNotFound,
    Unauthenticated,
    Unavailable,
    WrongProtocol,
)
from magnetar.proto.names import compute_key_slot
from magnetar.proto.operations import Operation
from magnetar.proto.states import BacklogQuotaState, Blocked, LedgerStays
from magnetar.proto.statistics import TopicRow
from magnetar.proto.versions import PRODUCT
from magnetar.runtime.access import LOCAL_PRINCIPAL, Principal, PrincipalKind
from magnetar.runtime.metrics import MetricsPage
from magnetar.runtime.network import World
from tests.runtime.test_metrics import shown
from tests.support.cluster import Cluster, cluster


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SURVEY_CACHE_S", 0.0)


async def made(admin: AdminClient, topic: str, subscription: str) -> None:
    with contextlib.suppress(AlreadyExists):
        await admin.create_topic(topic)
    await admin.create_subscription(topic, subscription)


async def send(client: Client, topic: str, count: int) -> None:
    producer = await client.create_producer(topic)
    for _ in range(count):
        await producer.send(b"x")
    await producer.close()


async def test_every_broker_says_its_sums_and_one_that_is_away_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(share_group="all") for _ in range(2)]
        async with AdminClient(f"magnetar://{one.endpoint}") as admin, Client(f"magnetar://{one.endpoint}") as client:
            for number in range(12):
                await made(admin, f"t{number:02}", "s")
            await send(client, "t03", 5)
            found = await admin.broker_summaries()
            assert [each.name for each in found.brokers] == sorted(each.name for each in found.brokers)
            assert {each.endpoint for each in found.brokers} == {str(one.endpoint), str(two.endpoint)}
            assert sum(each.total.topics for each in found.brokers) == 12
            assert sum(each.total.backlog for each in found.brokers) == 5
            assert all(each.total.topics for each in found.brokers)
            rows = [row for each in found.brokers for row in each.by_backlog]
            assert [(row.name, row.backlog) for row in rows] == [("persistent://public/default/t03", 5)]
            assert not found.silent
            assert len((await admin.broker_summaries(here=True)).brokers) == 1


async def test_pages_of_topics_are_merged_from_all_brokers_and_none_is_shown_twice(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, _ = [await running.add_broker(share_group="all") for _ in range(2)]
        async with AdminClient(f"magnetar://{one.endpoint}") as admin, Client(f"magnetar://{one.endpoint}") as client:
            for number in range(9):
                await made(admin, f"t{number}", "s")
                await send(client, f"t{number}", number % 4 + 1)
            await made(admin, "other", "s")

            async def pages(**query: object) -> list[TopicRow]:
                shown, after = list[TopicRow](), ""
                while True:
                    page = await admin.topic_page(limit=4, after=after, **query)
                    assert page.found == (9 if query.get("contains") else 10)
                    shown += page.topics
                    after = page.next
                    if not after:
                        return shown
                    assert len(page.topics) == 4

            names = [each.name.rpartition("/")[2] for each in await pages()]
            assert names == ["other", *(f"t{number}" for number in range(9))]
            by_backlog = [(each.backlog, each.name[-2:]) for each in await pages(sort="backlog", contains="/t")]
            expected = sorted([(number % 4 + 1, f"t{number}") for number in range(9)], key=lambda x: (-x[0], x[1]))
            assert by_backlog == expected
            assert len({each.owner for each in await pages()}) == 2
            assert (await admin.topic_page(prefix="persistent://public/default/o")).found == 1
            oldest = await pages(sort="oldest_ms")
            assert oldest[-1].name.endswith("other"), "it has no oldest message"
            for wrong in ({"limit": 201}, {"sort": "colour"}, {"after": "x"}):
                with pytest.raises(InvalidRequest):
                    await admin.topic_page(**wrong)


async def test_a_broker_that_does_not_answer_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "OTHER_BROKERS_WAIT_S", 0.2)
    monkeypatch.setattr(summaries, "LATE_BROKERS_WAIT_S", 0.2)
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(name=name) for name in ("one", "two")]

        async def hang() -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(two.topic_manager.survey, "run_survey", hang)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            found = await admin.broker_summaries()
            assert ([each.name for each in found.brokers], found.silent) == (["one"], ("two",))
            assert (await admin.topic_page()).silent == ("two",)


async def test_a_broker_that_does_not_answer_in_time_is_asked_once_more_and_is_late_if_it_answers_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "OTHER_BROKERS_WAIT_S", 0.2)
    monkeypatch.setattr(summaries, "LATE_BROKERS_WAIT_S", 20.0)
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(name=name) for name in ("one", "two")]
        take, asked = two.topic_manager.survey.run_survey, 0

        async def slow() -> survey.LoadedTopicsSurvey:
            nonlocal asked
            asked += 1
            await asyncio.sleep(60 if asked == 1 else 0)
            return await take()

        monkeypatch.setattr(two.topic_manager.survey, "run_survey", slow)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            found = await admin.broker_summaries()
            assert ([each.name for each in found.brokers], found.silent, found.late) == (["one", "two"], (), ("two",))
            found = await admin.broker_summaries()
            assert ([each.name for each in found.brokers], found.silent, found.late) == (["one", "two"], (), ())
            assert asked == 3


async def test_a_broker_that_refuses_the_own_token_of_the_one_that_asks_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two, _ = [await running.add_broker(name=name) for name in ("one", "two", "three")]

        async def refuse(world: object, endpoint: str, *_: object, **__: object) -> None:
            cause = Unauthenticated("expired") if endpoint == str(two.endpoint) else None
            raise Unavailable("not now") from cause

        monkeypatch.setattr(summaries, "call_operation_at_broker", refuse)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            found = await admin.broker_summaries()
            assert (found.silent, found.refusing) == (("three", "two"), ("two",))


def _make_older(monkeypatch: pytest.MonkeyPatch, *brokers: Broker) -> None:
    """Makes brokers answer as those of an older release, which has no such operation."""

    call = summaries.call_operation_at_broker

    async def ask(world: World, endpoint: str, operation: Operation[object], **arguments: object) -> object:
        if endpoint in {str(each.endpoint) for each in brokers}:
            raise WrongProtocol("no method /magnetar.wire.Admin/BrokerSummaries is served here")
        return await call(world, endpoint, operation, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(summaries, "call_operation_at_broker", ask)


async def test_a_broker_of_an_older_release_is_a_row_and_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(name=name) for name in ("one", "two")]
        _make_older(monkeypatch, two)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            found = await admin.broker_summaries()
            assert ([each.name for each in found.brokers], found.silent) == (["one", "two"], ())
            older = found.brokers[1]
            assert (older.endpoint, older.version, older.since_ms) == (str(two.endpoint), PRODUCT, 0)
            row = make_broker_row(asdict(older), 1)
            assert (row["broker"], row["version"], row["topics"], row["up"]) == ("two", PRODUCT, None, None)
            assert make_broker_row(asdict(found.brokers[0]), 1)["topics"] == 0
            assert (await admin.topic_page()).silent == ("two",), "what it has is missing there"


async def test_a_topic_that_takes_no_publishes_for_its_quota_and_the_end_of_the_own_token_are_said(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, broker = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
    monkeypatch.setattr(broker, "world", replace(broker.world, own_token_ends_ms=lambda: 7))
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        await made(admin, "other", "s")
        await send(client, "t", 1)
        (found,) = (await admin.broker_summaries()).brokers
        assert (found.full, found.token_ends_ms) == ((), 7)
        page = MetricsPage()
        await MeasuredParts(broker=running.brokers[0])(page)
        assert shown(page)["magnetar_process_token_seconds"] < -1e9, "it ended in 1970"
        broker.loaded["persistent://public/default/t"].maintenance.quota = BacklogQuotaState.REFUSE
        (found,) = (await admin.broker_summaries()).brokers
        assert found.full == ("persistent://public/default/t",)


async def test_why_a_subscription_does_not_get_on_is_said_in_sentences(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        assert await admin.why_stuck("t", "s") == await admin.why_stuck("t", "s")
        (empty,) = (await admin.topic_stats("t")).subscriptions
        idle = await admin.why_stuck("t", "s")
        assert (empty.backlog, empty.blocked, idle.stuck, idle.blocked) == (0, Blocked.CAUGHT_UP, False, empty.blocked)
        await send(client, "t", 5)
        (full,) = (await admin.topic_stats("t")).subscriptions
        assert (full.backlog, full.blocked) == (5, Blocked.NO_CONSUMER)
        found = await admin.why_stuck("t", "s")
        assert (found.stuck, found.blocked) == (True, Blocked.NO_CONSUMER)
        assert found.sentences[0] == "No consumer is connected."
        assert "5 messages wait, the oldest for" in found.sentences[2]
        consumer = await client.subscribe("t", "s", consumer_name="ada", receiver_queue_size=1)
        await consumer.receive()
        held = await admin.why_stuck("t", "s")
        assert any("Consumer 'ada'" in each for each in held.sentences), held
        assert any("; it has acknowledged nothing since it connected " in each for each in held.sentences), held
        with pytest.raises(SubscriptionNotFound):
            await admin.why_stuck("t", "none")


async def test_entries_that_are_acknowledged_in_part_are_told_of_when_a_consumer_acknowledges_whole_ones(
    running: Cluster,
) -> None:
    url, broker = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        producer = await client.create_producer("t", batching_max_publish_delay_ms=1000)
        await asyncio.gather(*(producer.send(b"") for _ in range(3)))
        consumer = await client.subscribe("t", "s", ConsumerType.Shared, consumer_name="ada", ack_receipt_enabled=True)
        await consumer.acknowledge(await consumer.receive())
        (topic,) = broker.loaded.values()
        assert not [each for each in (await admin.why_stuck("t", "s")).sentences if "in part" in each]
        (member,) = [each.member for each in topic.subscriptions["s"].consumers.values()]
        member.acks_by_index = False
        assert (
            "1 entry is acknowledged in part, by consumers that acknowledge by index; 'ada' does not, and gets them "
            "whole."
        ) in (await admin.why_stuck("t", "s")).sentences


async def test_a_client_is_shown_with_its_role_since_when_it_is_connected_and_when_it_acknowledged_last(
    running: Cluster,
) -> None:
    url, broker = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
    began_ms = broker.world.clock.wall_ms()
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        producer = await client.create_producer("t")
        for _ in range(2):
            await producer.send(b"")
        consumer = await client.subscribe("t", "s", consumer_name="ada", ack_receipt_enabled=True)
        first, _ = [await consumer.receive() for _ in range(2)]
        (topic,) = broker.loaded.values()
        (member,), (sender,) = topic.subscriptions["s"].consumers.values(), topic.producers
        member.principal, sender.principal = Principal("billing", PrincipalKind.CLIENT), LOCAL_PRINCIPAL
        stats = await admin.topic_stats("t")
        (one,), (other,) = stats.subscriptions[0].consumers, stats.producers
        assert (one.role, other.role, one.acked_ms) == ("billing", "", 0)
        assert began_ms <= other.connected_ms <= one.connected_ms
        await consumer.acknowledge(first)
        (one,) = (await admin.topic_stats("t")).subscriptions[0].consumers
        assert one.acked_ms >= one.connected_ms
        held = [each for each in (await admin.why_stuck("t", "s")).sentences if "Consumer 'ada'" in each]
        assert re.search(r", role billing\) holds 1 message .*; its last acknowledgement came \d+ ", held[0])


async def test_what_consumers_got_is_counted_though_they_left(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        await send(client, "t", 4)
        (topic,) = running.brokers[0].topic_manager.loaded.values()
        subscription = topic.subscriptions["s"]
        for messages in (4, 8):
            consumer = await client.subscribe("t", "s", receiver_queue_size=10)
            for _ in range(4):
                await consumer.receive()
            got = subscription.deliveries
            assert got.messages == messages
            await consumer.close()
            assert subscription.deliveries == got
            assert not subscription.consumers


async def test_a_stuck_key_is_named_with_its_consumer_since_when_and_what_follows_it(running: Cluster) -> None:
    url, broker = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "s")
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", ConsumerType.KeyShared, consumer_name="ada")
        for key in ("stuck", "stuck", "moves", "stuck"):
            await producer.send(b"", partition_key=key)
        messages = [await consumer.receive() for _ in range(4)]
        await consumer.acknowledge(messages[2])
        (topic,) = broker.loaded.values()
        policy = topic.subscriptions["s"].dispatcher.policy
        now_s, now_ms = broker.world.clock.monotonic(), broker.world.clock.wall_ms()
        assert isinstance(policy, KeyShared)
        policy.slots._oldest.clear()
        policy.find_held_slots(now_s - 200)  # as if the broker had looked then
        (stats,) = (await admin.topic_stats("t")).subscriptions
        (held,) = stats.held_keys
        assert (held.slot, held.key, held.consumer) == (compute_key_slot(b"stuck"), "stuck", "ada")
        assert (held.address, held.following_entries) == (stats.consumers[0].address, 2)
        assert abs(now_ms - 200_000 - held.since_ms) < 60_000
        why = await admin.why_stuck("t", "s")
        assert why.stuck
        (told,) = [each for each in why.sentences if each.startswith(f"Key 'stuck' (slot {held.slot}) does not get on")]
        assert re.search(r": consumer 'ada' .* has had its oldest message for 3 minutes, and 2 entries of it w", told)
        page = MetricsPage()
        await MeasuredParts(broker=running.brokers[0])(page)
        name = 'magnetar_subscription_oldest_slot_seconds{subscription="s",topic="persistent://public/default/t"}'
        (line,) = [each for each in b"".join(page.series_chunks()).decode().splitlines() if each.startswith(name)]
        assert float(line.rpartition(" ")[2]) >= 200
        await consumer.acknowledge([messages[0], messages[1], messages[3]])
        await consumer.close()
        assert not (await admin.topic_stats("t")).subscriptions[0].held_keys


async def test_what_keeps_a_ledger_is_said_with_the_subscriptions_that_hold_it(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "slow")
        await made(admin, "t", "other")
        for _ in range(2):
            await send(client, "t", 5)
            await admin.unload_topic("t")
        await admin.skip_messages("t", "other", -1)
        first, *_, last = (await admin.why_kept("t")).ledgers
        assert first.stays is LedgerStays.NOT_ACKNOWLEDGED
        assert first.subscriptions == ("slow",)
        assert first.sentence.endswith("It waits for slow.")
        assert first.messages == 5
        assert last.stays is LedgerStays.OPEN


def test_each_reason_to_be_blocked_says_what_would_end_it() -> None:
    assert {*Blocked.reasons()} - {*summaries.HOW_BLOCK_ENDS} == {Blocked.CAUGHT_UP}


async def test_the_disk_of_the_metadata_is_told_where_the_metadata_knows_it(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin:
        found = await admin.broker_summaries()
        assert 0 < found.metadata_free_bytes < found.metadata_total_bytes
        assert (found.metadata_backup_ms, found.metadata_backup_every_ms, found.metadata_backup_failure) == (0, 0, "")
        running.store.last_backup_ms, running.store.backup_every_ms, running.store.backup_failure = 5, 7, "no room"
        found = await admin.broker_summaries()
        assert (found.metadata_backup_ms, found.metadata_backup_every_ms) == (5, 7)
        assert found.metadata_backup_failure == "no room"

        async def refuse() -> None:
            raise WrongProtocol("the server has no method Metadata/Disk")

        monkeypatch.setattr(running.sessions[0], "measure_disk", refuse)
        found = await admin.broker_summaries()
        assert (found.metadata_free_bytes, found.metadata_total_bytes, len(found.brokers)) == (0, 0, 1)


async def test_while_the_metadata_is_away_all_that_is_known_is_answered_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(name=name) for name in ("one", "two")]
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            await made(admin, "t", "s")
            found = await admin.broker_summaries()
            assert (found.metadata_away_ms, len(found.bookies)) == (0, 1)
            before_ms, bookies = one.topic_manager.world.clock.wall_ms(), found.bookies

            async def hang(path: str) -> list[str]:
                await asyncio.sleep(60)
                return []

            monkeypatch.setattr(running.sessions[0], "children", hang)
            monkeypatch.setattr(ownership, "METADATA_ANSWER_WAIT_S", 0.2)
            async with asyncio.timeout(30):
                found = await admin.broker_summaries()
            assert (found.metadata_away_ms, found.metadata_late, len(found.brokers)) == (0, True, 2)
            monkeypatch.setattr(ownership, "METADATA_SILENCE_S_MAX", 0.0)
            async with asyncio.timeout(30):
                found = await admin.broker_summaries()
                page = await admin.topic_page()
            assert 0 <= found.metadata_away_ms - before_ms + 5000 < 10_000, "it answered just now"
            assert ([each.name for each in found.brokers], found.bookies) == (["one", "two"], bookies)
            assert [each.name for each in page.topics] == ["persistent://public/default/t"]
            await two.close()
            one.topic_manager.suspend_ownership()  # its session is lost
            found = await admin.broker_summaries()
            assert ([each.name for each in found.brokers], found.silent) == (["one"], ("two",))
            await one.topic_manager.abandon_all_topics(SessionExpired("too long"))
            found = await admin.broker_summaries()
            assert found.metadata_away_ms
            assert [each.name for each in found.brokers] == ["one"]


async def test_a_row_of_a_topic_names_the_subscription_with_the_largest_backlog(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:
        await made(admin, "t", "fast")
        await made(admin, "t", "slow")
        await made(admin, "u", "done")
        await send(client, "t", 5)
        await admin.skip_messages("t", "fast", 3)
        rows = {each.name.rpartition("/")[2]: each for each in (await admin.topic_page()).topics}
        assert (rows["t"].backlog, rows["t"].slowest, rows["t"].slowest_backlog) == (7, "slow", 5)
        assert (rows["u"].backlog, rows["u"].slowest, rows["u"].slowest_backlog) == (0, "", 0)


async def test_the_number_of_partitions_of_a_topic_without_any_is_refused_and_says_why(running: Cluster) -> None:
    async with AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin:
        await admin.create_topic("t")
        with pytest.raises(InvalidRequest, match="was made without partitions, and stays so"):
            await admin.update_topic("t", partitions=2)
        with pytest.raises(TopicNotFound):
            await admin.update_topic("none", partitions=2)
