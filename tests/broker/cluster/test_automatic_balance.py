"""Brokers balance their load by themselves: the leader, the loads, the moves, and what goes wrong on the way. The time
of the balance is virtual: a check is made when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.admin import AdminClient
from magnetar.asyncio import Client
from magnetar.broker.cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    BELIEVED_REPORTS_MIN,
    MOVED_BUNDLE_REST_S,
    MOVES_PER_BROKER_MAX,
)
from magnetar.broker.cluster.bundles_core import CROWDED_CHECKS_MIN, SPLIT_REST_S, parse_bundle_name
from magnetar.broker.server import Broker
from magnetar.broker.session import balancing
from magnetar.broker.session.administration import Administration
from magnetar.broker.session.balancing import AutomaticBalancer, describe_balance
from magnetar.broker.session.summaries import ClusterSummaries
from magnetar.metadata import paths
from magnetar.metadata.records import BalancerRecord
from magnetar.metadata.store import get_record
from magnetar.proto import operations as op
from magnetar.proto.errors import Unavailable, WrongProtocol
from magnetar.proto.names import NamespaceName
from magnetar.proto.policies import Policies
from magnetar.proto.statistics import BalanceStatus, MeasuredLoad
from magnetar.runtime.tasks import Tasks
from tests.support.cluster import Cluster, cluster

TOPICS = 40


class Balanced:
    """The brokers of a cluster, whose processes are as busy as they have topics, and their balancers. `checks` lets all
    of them check, and waits for the moves."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.now_s = 10 * MOVED_BUNDLE_REST_S
        self.brokers: dict[str, Broker] = {}
        self.balancers: dict[str, AutomaticBalancer] = {}
        self.moves = Tasks()
        self.busy_of: Callable[[Broker], float] = lambda broker: 1.0 * len(broker.topics)

    async def add(self, name: str, **changes: Any) -> Broker:
        broker = await self.running.add_broker(name=name, share_group="all", **changes)
        self.brokers[name] = broker
        self.balancers[name] = AutomaticBalancer(broker.topic_manager, lambda: self.now_s)
        return broker

    async def checks(self, count: int, *, only: Sequence[str] = (), wait: bool = True) -> None:
        for _ in range(count):
            self.now_s += BALANCE_CHECK_INTERVAL_S
            for broker in self.brokers.values():
                broker.topic_manager.balancing.busy = self.busy_of(broker)
            for name in only or list(self.balancers):
                await self.balancers[name].check(self.moves)
                if wait:
                    await self.moves.drain()

    @property
    def leaders(self) -> list[str]:
        return [name for name, each in self.brokers.items() if each.topic_manager.balancing.leads]

    @property
    def moved(self) -> int:
        return sum(each.topic_manager.balancing.moves for each in self.brokers.values())


@asynccontextmanager
async def balanced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Balanced]:
    """All topics are at the first of three brokers, whose bundles have all been there for long. A bundle counts as its
    topics do: what is published in a test differs from run to run."""
    monkeypatch.setattr(balancing, "compute_bundle_load", lambda sums: float(sums.topics))
    monkeypatch.setattr(
        "magnetar.broker.cluster.ownership.Ownership.measure_owned_s", lambda self, path: 2 * MOVED_BUNDLE_REST_S
    )
    async with cluster(folder, brokers=0) as running:
        found = Balanced(running)
        first = await found.add("first", namespace_bundles=16)
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            for number in range(TOPICS):
                await admin.create_topic(f"t{number}")
                await admin.topic_stats(f"t{number}")
        assert len(first.topics) == TOPICS
        for name in ("second", "third"):
            await found.add(name)
        yield found
        await found.moves.close()


async def load_all(found: Balanced, name: str = "second") -> None:
    """Clients open each topic where it is now."""
    async with AdminClient(f"magnetar://{found.brokers[name].endpoint}") as admin:
        for number in range(TOPICS):
            await admin.topic_stats(f"t{number}")


async def check_and_load(found: Balanced, checks: int) -> None:
    """What a broker was expected to get is measured there by the next check, as clients use it."""
    for _ in range(checks):
        await found.checks(1)
        await load_all(found)


async def test_a_skewed_load_is_balanced_in_few_moves_and_no_client_sees_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "magnetar.broker")
    async with balanced(tmp_path, monkeypatch) as found, AsyncPublisher(found) as published:
        await check_and_load(found, BELIEVED_REPORTS_MIN + 3)
        loads = [len(each.topics) for each in found.brokers.values()]
        assert sum(loads) == TOPICS
        assert max(loads) <= 1.35 * TOPICS / 3, loads
        assert 0 < found.moved <= 8
        assert found.leaders == ["first"]
        counted = found.brokers["first"].topic_manager.balancing.statistics()
        assert counted == {"leader": 1, "moves": found.moved, "moves_failed": 0}
        await published(5)
        before = found.moved
        await found.checks(12)
        assert found.moved <= before + 1, "it stays as it is"
    told = [each.getMessage() for each in caplog.records if " moves from first to " in each.getMessage()]
    assert len(told) == before
    assert "first is 40 % busy, second 0 %, all 13 % in the mean" in told[0]


async def test_a_load_that_is_skewed_ten_to_one_is_balanced_over_four_brokers_in_five_minutes_and_eight_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight topics have nine producers each, and count as ten; the others count as one."""

    def count(broker: Broker) -> float:
        return 0.5 * sum(1 + len(each.producers) for each in broker.topics.values())

    async with balanced(tmp_path, monkeypatch) as found:
        monkeypatch.setattr(balancing, "compute_bundle_load", lambda sums: float(sums.topics + sums.producers))
        await found.add("fourth")
        found.busy_of = count
        async with AsyncPublisher(found, each=9) as published:
            balanced_after, moved_after = list[int](), 0
            for check in range(90):
                before = found.moved
                await found.checks(1)
                if found.moved > before:
                    await load_all(found)
                    await published(1)
                    moved_after = check
                busy = [count(each) for each in found.brokers.values()]
                assert sum(busy) == 0.5 * (TOPICS + 8 * 9)
                if max(busy) <= 1.25 * sum(busy) / 4:
                    balanced_after.append(check)
            assert balanced_after == list(range(balanced_after[0], 90)), "from then on"
            assert balanced_after[0] < 30
            assert found.moved <= 8
            assert moved_after < 60, "no bundle goes to and fro"


def hold_moves(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No owner is asked for a move before the event is set."""
    go_on, unload = asyncio.Event(), Administration.unload_bundles

    async def wait(self: Administration, *arguments: Any) -> Any:
        if arguments[-1]:  # the broker that gets the bundle
            await go_on.wait()
        return await unload(self, *arguments)

    monkeypatch.setattr(Administration, "unload_bundles", wait)
    return go_on


class AsyncPublisher:
    """A program with producers on eight topics (`each`: of a topic), each of which sends when it is called."""

    def __init__(self, found: Balanced, name: str = "first", *, each: int = 1) -> None:
        self._each = each
        self._client = Client(f"magnetar://{found.brokers[name].endpoint}")

    async def __aenter__(self) -> AsyncPublisher:
        self._producers = [await self._client.create_producer(f"t{number % 8}") for number in range(8 * self._each)]
        self._running = asyncio.create_task(self._go_on())
        return self

    async def _go_on(self) -> None:
        while True:
            await self(1)

    async def __call__(self, count: int) -> None:
        for _ in range(count):
            await asyncio.gather(*(each.send(b"x") for each in self._producers))

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        (ended,) = await asyncio.gather(self._running, return_exceptions=True)
        await self._client.close()
        assert isinstance(ended, asyncio.CancelledError), f"a client saw {ended!r}"


async def test_the_leader_moves_what_is_misplaced_first_to_the_broker_that_may_have_it_and_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found, AsyncPublisher(found) as published:
        gold = await found.add("gold", labels="tier=gold")
        async with AdminClient(f"magnetar://{gold.endpoint}") as admin:
            await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        first = found.brokers["first"].topic_manager
        while not await first.list_misplaced_bundles():  # known there by its watch  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await found.checks(1)
        assert found.leaders == ["first"]
        assert found.moved == MOVES_PER_BROKER_MAX, "it waits for no averages"
        await found.checks(5)
        await published(3)
        await load_all(found)
        assert len(gold.topics) == TOPICS
        assert first.balancing.statistics()["moves_failed"] == 0
        moved = found.moved
        await found.checks(2 * BELIEVED_REPORTS_MIN)
        assert found.moved == moved, "it is the busiest one, and no other one may have any"
        answer = await Administration(first).unload_namespace(NamespaceName("public", "default"), here=False)
        assert answer.bundles > 0
        await load_all(found)
        assert len(gold.topics) == TOPICS


async def test_the_leader_dies_while_its_moves_run_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        await found.checks(BELIEVED_REPORTS_MIN - 1, only=["third", "first", "second"])
        assert found.leaders == ["third"]
        await found.checks(1, only=["third"], wait=False)
        assert len(found.moves) > 0 == len(found.brokers["second"].topics)
        await asyncio.sleep(0)  # the calls to the owner have begun
        found.moves.cancel()  # with the process
        await found.moves.drain()
        found.running.sessions[2].abandon()
        del found.balancers["third"]
        store = found.running.sessions[0]
        revision = await store.revision()
        async with asyncio.timeout(20):
            if await store.get(paths.BALANCER) is not None:
                async for _ in store.watch(paths.BALANCER, revision):
                    if await store.get(paths.BALANCER) is None:
                        break
        await found.checks(1)
        assert found.leaders == ["first", "third"], "the one that has died does not know of its end"
        found.brokers.pop("third")
        await check_and_load(found, BELIEVED_REPORTS_MIN + 3)
        loads = [len(each.topics) for each in found.brokers.values()]
        assert max(loads) <= 0.7 * TOPICS, loads


async def test_of_two_leaders_the_owner_lets_one_move_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leads(self: AutomaticBalancer) -> bool:
        return True

    monkeypatch.setattr(AutomaticBalancer, "_is_leader", leads)
    async with balanced(tmp_path, monkeypatch) as found:
        go_on = hold_moves(monkeypatch)
        await found.checks(BELIEVED_REPORTS_MIN, only=["second", "third"], wait=False)
        go_on.set()
        await found.moves.drain()
        states = [found.brokers[name].topic_manager.balancing for name in ("second", "third")]
        assert all(each.moves for each in states)
        assert sum(each.failed for each in states) * 2 == found.moved, "what one moved, the other did not"
        await load_all(found)
        assert sum(len(each.topics) for each in found.brokers.values()) == TOPICS, "each has one owner"


async def test_a_broker_that_drains_or_does_not_answer_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        asked = balancing.call_operation_at_broker

        async def call(world: Any, endpoint: str, operation: Any, **arguments: Any) -> Any:
            if endpoint == str(found.brokers["third"].endpoint):
                raise Unavailable("no answer")
            return await asked(world, endpoint, operation, **arguments)

        monkeypatch.setattr(balancing, "call_operation_at_broker", call)
        await Administration(found.brokers["first"].topic_manager).drain_broker("second")
        await found.brokers["second"].topic_manager.apply_drain_order()
        await found.checks(BELIEVED_REPORTS_MIN + 3)
        assert (found.leaders, found.moved) == (["first"], 0)
        await Administration(found.brokers["first"].topic_manager).undrain_broker("second")
        await found.brokers["second"].topic_manager.apply_drain_order()
        await found.checks(1)
        assert found.moved > 0
        await load_all(found)
        assert len(found.brokers["third"].topics) == 0 < len(found.brokers["second"].topics)


async def test_a_broker_of_an_older_release_or_with_loads_that_lie_gets_and_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        await found.add("fourth")
        asked = balancing.call_operation_at_broker

        async def call(world: Any, endpoint: str, operation: Any, **arguments: Any) -> Any:
            if operation is op.MEASURE_LOAD and endpoint == str(found.brokers["second"].endpoint):
                raise WrongProtocol("no method /magnetar.wire.Admin/MeasureLoad is served here")
            if operation is op.MEASURE_LOAD and endpoint == str(found.brokers["third"].endpoint):
                return MeasuredLoad(float("nan"), -1.0, float("inf"), ())
            if endpoint == str(found.brokers["fourth"].endpoint):
                raise ValueError("'here' is not HOST:PORT")
            return await asked(world, endpoint, operation, **arguments)

        monkeypatch.setattr(balancing, "call_operation_at_broker", call)
        await found.checks(BELIEVED_REPORTS_MIN + 3)
        assert (found.leaders, found.moved) == (["first"], 0)
        async with AdminClient(f"magnetar://{found.brokers['first'].endpoint}") as admin:
            assert [each.broker for each in (await admin.balance_status()).brokers] == ["first"]
        assert "the load that broker third reports does not count: its score is nan" in caplog.text


async def test_a_leader_whose_process_was_stopped_asks_again_who_leads_before_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        await found.checks(BELIEVED_REPORTS_MIN - 1)
        asked, store = balancing.call_operation_at_broker, found.running.sessions[1]

        async def stop(world: Any, endpoint: str, operation: Any, **arguments: Any) -> Any:
            monkeypatch.setattr(balancing, "call_operation_at_broker", asked)
            node = await store.get(paths.BALANCER)
            assert node is not None
            await store.delete(paths.BALANCER, node.version)  # its session has ended
            await found.balancers["second"].check(found.moves)
            found.now_s += 60.0
            return await asked(world, endpoint, operation, **arguments)

        monkeypatch.setattr(balancing, "call_operation_at_broker", stop)
        await found.checks(1, only=["first"])
        assert (found.leaders, found.moved) == (["first", "second"], 0)
        await found.checks(1, only=["first"])
        assert (found.leaders, found.moved) == (["second"], 0)


async def test_a_bundle_whose_namespace_is_deleted_or_whose_target_closes_meanwhile_is_served_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        first = found.brokers["first"]
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            await admin.create_namespace("public/going")
            topics = [f"public/going/t{number}" for number in range(20)]
            for each in topics:
                await admin.create_topic(each)
                await admin.topic_stats(each)
            await Administration(first.topic_manager).unload_namespace(
                NamespaceName.parse("public/going"), here=False, destination="first"
            )
            for each in topics:
                await admin.topic_stats(each)
            assert len(first.topics) == TOPICS + len(topics)
            go_on = hold_moves(monkeypatch)
            await found.checks(BELIEVED_REPORTS_MIN, only=["first"], wait=False)
            moving = (await admin.balance_status()).moving
            assert {each.target for each in moving} >= {"second"}
            assert "public/going" in {each.namespace for each in moving}
            await admin.delete_namespace("public/going", force=True)
            await found.brokers["second"].close()
            go_on.set()
            await found.moves.drain()
            del found.brokers["second"], found.balancers["second"]
            told = await admin.balance_status()
            assert (told.moving, told.moves) == ((), len(moving))
            assert 0 < told.failed <= len(moving)
            assert "second" not in {each.name for each in await admin.brokers()}
        await load_all(found, "third")
        assert sum(len(each.topics) for each in found.brokers.values()) == TOPICS


async def test_the_source_drains_or_closes_while_its_bundles_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found, AsyncPublisher(found, "second") as published:
        go_on = hold_moves(monkeypatch)
        await found.checks(BELIEVED_REPORTS_MIN, only=["second"], wait=False)
        assert len(found.moves) > 0
        await Administration(found.brokers["second"].topic_manager).drain_broker("first")
        drain = asyncio.create_task(found.brokers["first"].topic_manager.apply_drain_order())
        go_on.set()
        await found.moves.drain()
        await drain
        await published(3)
        await found.checks(2, only=["second"])
        await found.brokers["first"].close()
        await published(3)
        del found.brokers["first"], found.balancers["first"]
        await load_all(found)
        assert sum(len(each.topics) for each in found.brokers.values()) == TOPICS, "each has one owner"


async def test_the_setting_turns_the_balance_off_and_on_while_brokers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        first = found.brokers["first"]
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            await admin.change_setting(name="balance", value="off")
            assert first.topic_manager.balance == "off"
            await found.checks(BELIEVED_REPORTS_MIN + 2)
            assert await admin.balance_status() == BalanceStatus(False, "first", 0, 0, (), ())
            await admin.remove_setting(name="balance")
            await found.checks(BELIEVED_REPORTS_MIN - 1)
            assert found.moved == 0, "the averages have begun anew"
            await found.checks(1)
        assert found.moved > 0


async def test_any_broker_tells_what_the_leader_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        manager = found.brokers["second"].topic_manager
        assert (await describe_balance(manager, here=False)).leader == ""
        await found.checks(BELIEVED_REPORTS_MIN - 1)
        async with AdminClient(f"magnetar://{found.brokers['second'].endpoint}") as admin:
            told = await admin.balance_status()
            assert (told.is_on, told.leader, told.moves, told.failed) == (True, "first", 0, 0)
            assert [(each.broker, each.score) for each in told.brokers] == [
                ("first", 40.0), ("second", 0.0), ("third", 0.0)
            ]  # fmt: skip
            go_on = hold_moves(monkeypatch)
            await found.checks(1, wait=False)
            told = await admin.balance_status()
            assert len(told.moving) > 1
            assert {(each.namespace, each.source) for each in told.moving} == {("public/default", "first")}
            go_on.set()
            await found.moves.drain()
            assert (await admin.balance_status()).moving == ()
            told_of = (await admin.broker_summaries()).brokers
            assert {each.name: each.balances for each in told_of} == {"first": True, "second": False, "third": False}
            await admin.change_setting(name="balance", value="off")
            await found.checks(1)
            assert not any(each.balances for each in (await admin.broker_summaries()).brokers)
        record, _ = (await get_record(manager.metadata, paths.BALANCER, BalancerRecord)) or (None, 0)
        assert record is not None
        assert (record.broker, record.endpoint) == ("first", str(found.brokers["first"].endpoint))


async def test_the_balance_is_not_on_where_no_broker_has_a_group_or_the_upgrade_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        alone = await running.add_broker(name="alone")
        assert not (await describe_balance(alone.topic_manager, here=False)).is_on
        grouped = await running.add_broker(name="grouped", share_group="all")
        assert (await describe_balance(grouped.topic_manager, here=False)).is_on
        monkeypatch.setattr(balancing, "may_write_feature", lambda feature: False)
        assert not (await describe_balance(grouped.topic_manager, here=False)).is_on


async def test_a_broker_is_as_busy_as_its_processor_its_link_or_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        broker = await running.add_broker(share_group="all", link_bytes_s=1_000, state_memory_bytes=1 << 30)
        manager = broker.topic_manager
        async with AdminClient(f"magnetar://{broker.endpoint}") as admin:
            await admin.create_topic("t")
            await admin.topic_stats("t")
        found = await balancing.measure_load(manager)
        assert found.score < 1
        assert [each.topics for each in found.bundles] == [1]
        assert found.load == pytest.approx(balancing.LOAD_PER_TOPIC)
        assert found.window_s >= BALANCE_CHECK_INTERVAL_S
        manager.balancing.busy = 30.0
        assert (await balancing.measure_load(manager)).score == 30.0
        manager.state.bytes = 1 << 29
        assert (await balancing.measure_load(manager)).score == 50.0
        survey = await manager.survey.run_survey()
        survey.total.throughput_in, survey.total.throughput_out = 500.0, 250.0
        assert (await balancing.measure_load(manager)).score == 75.0


def limit_bundles(found: Balanced, **limits: int) -> None:
    for each in found.brokers.values():
        each.topic_manager.config = msgspec.structs.replace(each.topic_manager.config, **limits)


async def test_the_leader_splits_a_namespace_with_a_crowded_bundle_and_names_a_topic_that_is_too_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with balanced(tmp_path, monkeypatch) as found:
        manager, name = found.brokers["first"].topic_manager, NamespaceName("public", "default")
        assert (await manager.catalog.get_namespace(name)).bundles == 16
        limit_bundles(found, split_bundle_topics=3, split_bundles_max=32)
        await found.checks(CROWDED_CHECKS_MIN - 1)
        assert (await manager.catalog.get_namespace(name)).bundles == 16
        await found.checks(1)
        assert (await manager.catalog.get_namespace(name)).bundles == 32
        assert len(found.brokers["first"].topics) == TOPICS, "no topic was closed"
        bundles = [each.bundle for each in (await ClusterSummaries(manager).list_bundles(None, here=True)).bundles]
        assert {parse_bundle_name(each)[1] for each in bundles} == {32}
        found.now_s += SPLIT_REST_S
        await found.checks(CROWDED_CHECKS_MIN)
        assert (await manager.catalog.get_namespace(name)).bundles == 32, "as many as may be"
        limit_bundles(found, split_bundle_topics=0, split_bundle_sessions=8)
        async with AsyncPublisher(found, each=9) as published:
            await published(1)
            await found.checks(1)
            told = await describe_balance(manager, here=False)
            assert told.splits == 1
            assert {f"persistent://public/default/t{at}" for at in range(8)} >= {each.topic for each in told.hot_topics}
            assert "producers and consumers, 8 are the most" in told.hot_topics[0].why
            assert "partitions" in told.hot_topics[0].advice
            (summary,) = (await ClusterSummaries(manager).summarize_brokers(here=True)).brokers
            assert set(summary.hot_topics) == {each.topic for each in told.hot_topics}
