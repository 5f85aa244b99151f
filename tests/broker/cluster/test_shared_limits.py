"""Rates of a namespace and a tenant in sum over brokers: policies, shares at real brokers, moves, and what is shown."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from magnetar.admin import AdminClient, Policies
from magnetar.asyncio import Client
from magnetar.broker.cluster.shares_core import REST_SHARE
from magnetar.broker.node import topic_manager
from magnetar.broker.server import Broker
from magnetar.broker.session import sharing
from magnetar.broker.session.balancing import AutomaticBalancer
from magnetar.broker.session.sharing import LimitSharer, grant_limits
from magnetar.broker.topic.statistics import SharedRate
from magnetar.proto.errors import (
    AlreadyExists,
    Busy,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unauthorized,
    Unavailable,
    WrongProtocol,
)
from magnetar.proto.names import TopicName
from magnetar.runtime.tasks import Tasks
from tests.broker.access.roles import ROOT, roles
from tests.broker.rest.http import V2, serving
from tests.support.cluster import Cluster, cluster
from tests.support.processes import run_here

LIMIT = 1000


class Shared:
    """Brokers that share limits, of which the first one leads. An exchange is made when a test says so."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.brokers: dict[str, Broker] = {}
        self.sharers: dict[str, LimitSharer] = {}

    async def add(self, name: str, **changes: object) -> Broker:
        broker = self.brokers[name] = await self.running.add_broker(
            name=name, share_group="all", namespace_bundles=2, **changes
        )
        if len(self.brokers) == 1:
            await AutomaticBalancer(broker.topic_manager).check(Tasks())
        self.sharers[name] = LimitSharer(broker.topic_manager)
        return broker

    async def exchange(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            for each in self.sharers.values():
                each._brokers_read_s = float("-inf")
                await each.exchange()

    def publish_rate(self, name: str, place: str) -> SharedRate:
        """The publish rate of a namespace or tenant at the broker."""
        return next(each.publish for each in self.brokers[name].topic_manager.shared_rates if each.place == place)

    def waits(self, name: str, place: str) -> None:
        """Something waits at this broker for the rate, as its tokens are used up."""
        rate, now = self.publish_rate(name, place).rate, self.running.world.clock.monotonic()
        rate.throttled += 1
        rate.spend_tokens(1000 * LIMIT, 0, now)  # owed for long, however slow the machine is

    def rates(self, place: str) -> dict[str, float]:
        return {
            name: rate._buckets[0].rate  # type: ignore[union-attr]
            for name in self.brokers for rate in [self.publish_rate(name, place).rate]
        }  # fmt: skip


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges follow each other at once, and brokers make none by themselves."""

    async def never(_: LimitSharer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LimitSharer, "run", never)
    monkeypatch.setattr("magnetar.broker.cluster.shares_core.SURVEY_INTERVAL_S", 0.0)


@asynccontextmanager
async def shared(folder: Path, **changes: object) -> AsyncIterator[tuple[Shared, AdminClient]]:
    """Two brokers, each with a topic of public/default, and each with one of acme/a and acme/b. `changes`: of the first
    broker's settings."""
    async with cluster(folder, brokers=0) as running:
        found = Shared(running)
        await found.add("first", **changes)
        await found.add("second")
        async with AdminClient(f"magnetar://{found.brokers['first'].endpoint}") as admin:
            await admin.create_tenant("acme")
            for namespace in ("public/default", "acme/a", "acme/b"):
                if namespace != "public/default":
                    await admin.create_namespace(namespace, bundles=2)
                for number, broker in enumerate(found.brokers.values()):
                    await place(admin, namespace, number, str(broker.endpoint))
            yield found, admin


def name_topic(namespace: str, bundle: int) -> str:
    """The name of a topic in this bundle of two."""
    from magnetar.broker.cluster.bundles_core import compute_bundle_number

    names = (f"persistent://{namespace}/t{number}" for number in range(100))
    return next(name for name in names if compute_bundle_number(name, 2) == bundle)


async def place(admin: AdminClient, namespace: str, bundle: int, endpoint: str) -> str:
    """Makes a topic in the bundle, and moves that to the broker."""
    from magnetar.broker.cluster.bundles_core import make_bundle_name

    topic = name_topic(namespace, bundle)
    with suppress(AlreadyExists):
        await admin.create_topic(topic)
    await admin.topic_stats(topic)
    if endpoint not in await admin.owner(topic):
        await admin.unload_namespace(namespace, make_bundle_name(bundle, 2), destination=endpoint)
    await admin.topic_stats(topic)
    assert endpoint in await admin.owner(topic)
    return topic


async def test_the_busy_broker_gets_the_rate_of_its_namespace_and_the_sum_is_the_limit(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=LIMIT))
        for _ in range(6):
            found.waits("second", "public/default")
            await found.exchange(1)
        rates = found.rates("public/default")
        assert sum(rates.values()) == pytest.approx(LIMIT)
        assert rates["second"] == pytest.approx(LIMIT * (1 - REST_SHARE / 2))
        for _ in range(8):
            found.waits("first", "public/default")
            await found.exchange(1)
        rates = found.rates("public/default")
        assert rates["first"] > 0.7 * LIMIT
        assert sum(rates.values()) <= LIMIT + 1e-6


async def test_a_changed_limit_holds_at_once_in_sum_and_a_removed_one_holds_back_nothing(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=LIMIT))
        for _ in range(4):
            found.waits("second", "public/default")
            await found.exchange(1)
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=10))
        await until(lambda: sum(found.rates("public/default").values()) == pytest.approx(10))
        await admin.remove_namespace_policies("public/default", "namespace_publish_rate_messages")
        await until(lambda: not any(each.topic_manager.shared_rates for each in found.brokers.values()))
        for broker in found.brokers.values():
            assert not any(topic.gate.limited for topic in broker.topics.values())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_the_rate_of_a_tenant_bounds_its_namespaces_together_and_no_others(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        given = Policies(tenant_publish_rate_bytes=LIMIT, tenant_dispatch_rate_messages=5)
        await admin.set_tenant_policies("acme", given)
        first = found.brokers["first"]
        await until(lambda: len(first.topic_manager.shared_rates) == 1)
        (rates,) = first.topic_manager.shared_rates
        bound = {name for name, topic in first.topics.items() if rates.publish.rate in topic.gate.limited}
        assert bound == {name_topic("acme/a", 0), name_topic("acme/b", 0)}
        await admin.create_subscription(name_topic("acme/a", 0), "s")
        assert rates.dispatch.rate in first.topics[name_topic("acme/a", 0)].find_subscription("s").pump.rates
        await admin.set_namespace_policies("acme/a", Policies(namespace_publish_rate_messages=LIMIT))
        topic = first.topics[name_topic("acme/a", 0)]
        await until(lambda: len(topic.gate.limited) == 2)


async def test_a_bundle_that_moves_and_a_topic_made_anew_are_bounded_by_the_same_rate(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("acme/a", Policies(namespace_publish_rate_messages=LIMIT))
        await found.exchange()
        first, second = found.brokers.values()
        topic = await place(admin, "acme/a", 0, str(second.endpoint))
        both = [second.topics[name_topic("acme/a", bundle)] for bundle in (0, 1)]
        assert both[0].gate.limited == both[1].gate.limited == (found.publish_rate("second", "acme/a").rate,)
        assert not first.topic_manager.shared_rates, "the first broker keeps nothing of what moved"
        del both
        before = found.publish_rate("second", "acme/a").rate
        await admin.delete_topic(topic)
        await admin.create_topic(topic)
        await admin.topic_stats(topic)
        assert second.topics[topic].gate.limited == (before,)


async def test_a_publish_waits_for_the_share_and_is_stored_when_that_grows(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin), Client(f"magnetar://{found.brokers['first'].endpoint}") as client:
        await admin.set_namespace_policies("acme/a", Policies(namespace_publish_rate_messages=40))
        topic = name_topic("acme/a", 1)
        await until(lambda: bool(found.brokers["second"].topics[topic].gate.limited))
        await found.exchange()
        async with await client.create_producer(topic, batching_enabled=False) as producer:
            sent = [asyncio.create_task(producer.send(b"x")) for _ in range(5)]
            await until(lambda: found.publish_rate("second", "acme/a").rate.throttled > 0)
            assert not all(each.done() for each in sent), "its share is one message a second"
            await found.exchange(2)
            await asyncio.gather(*sent)
        (row,) = [each for each in (await admin.shared_limits()).limits if each.broker == "second"]
        assert (row.place, row.policy, row.limit) == ("acme/a", "namespace_publish_rate_messages", 40)
        assert row.throttled > 0
        assert row.share >= 0.5


async def test_without_answers_each_has_an_equal_part_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=LIMIT))
        for _ in range(4):
            found.waits("second", "public/default")
            await found.exchange(1)
        for limit in ("SHRINK_AFTER_S", "GROW_AFTER_S"):
            monkeypatch.setattr(f"magnetar.broker.cluster.shares_core.{limit}", 0.0)
        monkeypatch.setattr(sharing, "SHRINK_AFTER_S", 0.0)

        async def is_older(self: LimitSharer, *_: object) -> None:
            raise WrongProtocol("no method /magnetar.wire.Admin/ShareLimits is served here")

        monkeypatch.setattr(LimitSharer, "_ask", is_older)
        with pytest.raises(WrongProtocol):
            await found.sharers["second"].exchange()
        await found.sharers["first"].exchange()
        assert found.rates("public/default") == pytest.approx({"first": LIMIT / 2, "second": LIMIT / 2})
        rows = (await admin.shared_limits()).limits
        assert len(rows) == 2
        assert all("each of 2 brokers has an equal part at most" in row.why for row in rows)


async def test_metadata_that_does_not_answer_keeps_no_broker_from_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=LIMIT))
        await found.exchange()
        monkeypatch.setattr(sharing, "REPORT_TIMEOUT_S", 0.3)

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(sharing, "get_readable_record", never)
        monkeypatch.setattr(LimitSharer, "_read_brokers", never)
        found.sharers["second"]._leader_read_s = float("-inf")
        found.waits("second", "public/default")
        answered = found.brokers["second"].topic_manager.sharing.answered
        await found.sharers["second"].exchange()
        assert found.brokers["second"].topic_manager.sharing.answered == answered + 1
        assert found.rates("public/default")["second"] > 0.9 * LIMIT
        found.sharers["second"]._leader = None
        with pytest.raises(TimeoutError):
            await found.sharers["second"].exchange()


async def test_a_reached_limit_says_who_wants_how_much(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("public/default", Policies(namespace_publish_rate_messages=LIMIT))
        await found.exchange(1)
        for _ in range(6):
            found.waits("first", "public/default")
            found.waits("second", "public/default")
            await found.exchange(1)
        page = await admin.shared_limits()
        assert page.silent == ()
        assert [row.broker for row in page.limits] == ["first", "second"]
        for row in page.limits:
            assert row.share == pytest.approx(0.5)
            assert row.why == "2 brokers want 2 times the limit together: it is divided fairly"
        (row,) = (await admin.shared_limits(here=True)).limits
        assert row.broker == "first"


async def test_who_does_not_lead_and_what_is_no_report_is_refused(tmp_path: Path) -> None:
    from magnetar.broker.cluster.shares_core import ShareReport

    async with shared(tmp_path) as (found, _):
        await found.exchange(1)
        first, second = (each.topic_manager for each in found.brokers.values())
        with pytest.raises(Unavailable, match="does not divide limits"):
            grant_limits(second, ShareReport("third", "run", 1, {}))
        with pytest.raises(InvalidRequest, match="names a broker"):
            grant_limits(first, ShareReport("", "run", 1, {}))
        assert grant_limits(first, ShareReport("third", "run", 2, {})) == {}
        with pytest.raises(Unavailable, match="a later report"):
            grant_limits(first, ShareReport("third", "run", 1, {}))
        assert first.sharing.statistics()["leader"] == 1


async def test_policies_of_tenants_are_set_on_every_face_and_at_no_other_level(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), AdminClient(url := f"magnetar://{broker.endpoint}") as admin:
        path = f"{V2}/tenants/public/tenantPublishRate"
        assert (await http.ask("GET", path)).status == 204
        await http.done("POST", path, {"publishThrottlingRateInMsg": 7})
        assert (await http.get(path))["publishThrottlingRateInMsg"] == 7
        assert (await admin.tenant_policies("public")).tenant_publish_rate_messages == 7
        await admin.create_topic("t")
        topic = await broker.topic_manager.load_topic(TopicName.parse("t"))
        assert topic.applied.tenant_publish_rate_messages == 7
        assert (await admin.topic_policies("t", applied=True)).tenant_publish_rate_messages == 7

        async def run(*words: str) -> str:
            done = await asyncio.to_thread(run_here, *words, MAGNETAR_URL=url)
            assert done.code == 0, done.err
            return done.out

        assert "100" in await run("tenants", "set-tenant-dispatch-rate", "public", "-md", "100")
        shown = json.loads(await run("tenants", "get-tenant-dispatch-rate", "public", "-o", "json"))
        assert shown["tenant_dispatch_rate_messages"] == 100
        assert topic.applied.tenant_dispatch_rate_messages == 100
        await run("tenants", "remove-tenant-dispatch-rate", "public")
        assert (await admin.tenant_policies("public", applied=True)).tenant_dispatch_rate_messages == 0
        await http.done("DELETE", path)
        assert not topic.gate.limited
        for refused in (
            admin.set_namespace_policies("public/default", Policies(tenant_publish_rate_messages=1)),
            admin.set_topic_policies("t", Policies(namespace_publish_rate_messages=1)),
            admin.set_tenant_policies("public", Policies(message_ttl_s=1)),
            admin.remove_tenant_policies("public", "pigeons"),
        ):
            with pytest.raises(InvalidRequest):
                await refused
        with pytest.raises(NotFound):
            await admin.set_tenant_policies("nowhere", Policies(tenant_publish_rate_messages=1))


async def test_a_deleted_tenant_leaves_no_policies(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, broker, _), AdminClient(f"magnetar://{broker.endpoint}") as admin:
        await admin.create_tenant("acme")
        await admin.set_tenant_policies("acme", Policies(tenant_publish_rate_messages=1))
        await admin.delete_tenant("acme")
        await admin.create_tenant("acme")
        assert await admin.tenant_policies("acme") == Policies()


async def test_the_limits_of_a_tenant_are_set_by_super_users_and_seen_by_its_administrators(tmp_path: Path) -> None:
    from magnetar.proto import wire_pb2 as wire

    async with roles(tmp_path) as acme:
        given = '{"tenant_publish_rate_messages": 2}'
        for role, may in (("stranger", False), ("acme-admin", False), (ROOT, True)):
            request = wire.ChangeTenantPoliciesRequest(name="acme", set=given)
            if may:
                await acme.call(role, "Admin.ChangeTenantPolicies", request)
            else:
                with pytest.raises(Unauthorized):
                    await acme.call(role, "Admin.ChangeTenantPolicies", request)
        seen = wire.TenantPoliciesRequest(name="acme")
        assert "2" in (await acme.call("acme-admin", "Admin.GetTenantPolicies", seen)).policies
        with pytest.raises(Unauthorized):
            await acme.call("stranger", "Admin.GetTenantPolicies", seen)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_brokers_that_create_topics_at_once_make_as_many_as_the_namespace_may_have(
    tmp_path: Path, partitions: int
) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.create_namespace("acme/c")
        await admin.set_namespace_policies("acme/c", Policies(max_topics=6))
        catalogs = [each.topic_manager.catalog for each in found.brokers.values()]
        names = [TopicName.parse(f"persistent://acme/c/n{number}") for number in range(12)]
        made = await asyncio.gather(
            *(catalogs[at % 2].create_topic(name, partitions) for at, name in enumerate(names)), return_exceptions=True
        )
        assert len(await admin.topics("acme/c", partitions=True)) == 6
        assert sum(each is None for each in made) == 6 // max(1, partitions)
        assert all(each is None or isinstance(each, NotAllowed) for each in made)


async def test_topics_made_by_use_and_by_hand_stay_within_the_limit_of_their_tenant(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_tenant_policies("acme", Policies(max_tenant_topics=7))
        first, second = (each.topic_manager.catalog for each in found.brokers.values())
        names = [TopicName.parse(f"persistent://acme/{'ab'[number % 2]}/n{number}") for number in range(10)]
        made = await asyncio.gather(
            *(first.create_topic(name, 0) for name in names[:5]),
            *(second.ensure_topic_exists(name) for name in names[3:]), return_exceptions=True,
        )  # fmt: skip
        topics = [*await admin.topics("acme/a"), *await admin.topics("acme/b")]
        assert len(topics) == 7
        assert all(each is None or isinstance(each, NotAllowed | AlreadyExists) for each in made)
        with pytest.raises(NotAllowed, match="tenant acme has 7 topics, and 3 more are above the 7"):
            await admin.create_topic("acme/a/parted", partitions=3)
        await admin.create_topic("public/default/other")
        await second.ensure_topic_exists(TopicName.parse(topics[0]))


# ------------------------------------------------------------------------------------------------ resource groups


async def test_namespaces_of_a_resource_group_share_its_rate_at_all_brokers(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_resource_group("batch", publish_rate_messages=LIMIT)
        for namespace in ("acme/a", "public/default"):
            await admin.set_namespace_policies(namespace, Policies(resource_group="batch"))
        for broker in found.brokers.values():
            await until(lambda broker=broker: len(broker.topic_manager.shared_rates) == 1)  # type: ignore[misc]
            (rates,) = broker.topic_manager.shared_rates
            await until(
                lambda broker=broker, rates=rates: {  # type: ignore[misc]
                    name.split("/")[3] for name, topic in broker.topics.items()
                    if rates.publish.rate in topic.gate.limited
                } == {"a", "default"}
            )  # fmt: skip
        for _ in range(8):
            found.waits("first", "@batch")
            found.waits("second", "@batch")
            await found.exchange(1)
        assert found.rates("@batch") == pytest.approx({"first": LIMIT / 2, "second": LIMIT / 2})
        (row, _) = (await admin.shared_limits()).limits
        assert (row.place, row.policy, row.limit) == ("@batch", "group_publish_rate_messages", LIMIT)
        await admin.set_resource_group("batch", publish_rate_messages=10, dispatch_rate_bytes=7)
        await until(lambda: sum(found.rates("@batch").values()) == pytest.approx(10))
        assert (await admin.resource_group("batch")).dispatch_rate_bytes == 7
        assert (await admin.resource_group("batch")).publish_rate_messages == 10


async def test_a_namespace_that_leaves_its_group_or_changes_it_is_bounded_by_the_new_one_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        for group in ("one", "other"):
            await admin.set_resource_group(group, publish_rate_messages=LIMIT)
        await admin.set_namespace_policies("acme/a", Policies(resource_group="one", namespace_publish_rate_messages=5))
        topic = found.brokers["first"].topics[name_topic("acme/a", 0)]
        await until(lambda: {each.place for each in topic._shared_rates} == {"acme/a", "@one"})
        await admin.set_namespace_policies("acme/a", Policies(resource_group="other"))
        await until(lambda: {each.place for each in topic._shared_rates} == {"acme/a", "@other"})
        with pytest.raises(Busy, match="acme/a is in resource group"):
            await admin.delete_resource_group("other")
        await admin.delete_resource_group("one")
        await admin.remove_namespace_policies("acme/a", "resource_group")
        await until(lambda: {each.place for each in topic._shared_rates} == {"acme/a"})
        await admin.delete_resource_group("other")
        assert await admin.resource_groups() == []


async def test_resource_groups_are_pulsar_s_over_http_and_for_super_users(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), AdminClient(f"magnetar://{broker.endpoint}") as admin:
        path, of_namespace = f"{V2}/resourcegroups/batch", f"{V2}/namespaces/public/default/resourcegroup"
        assert (await http.ask("GET", path)).status == 404
        assert (await http.ask("POST", f"{of_namespace}/batch")).status == 412
        await http.done("PUT", path, {"publishRateInMsgs": 100, "dispatchRateInBytes": -1})
        await http.done("PUT", path, {"publishRateInBytes": 2000})
        assert await http.get(path) == {
            "publishRateInMsgs": 100, "publishRateInBytes": 2000, "dispatchRateInMsgs": -1, "dispatchRateInBytes": -1,
        }  # fmt: skip
        assert await http.get(f"{V2}/resourcegroups") == ["batch"]
        await http.done("POST", f"{of_namespace}/batch")
        assert await http.get(of_namespace) == "batch"
        assert (await http.get(f"{V2}/namespaces/public/default"))["resource_group_name"] == "batch"
        assert (await http.ask("DELETE", path)).status == 412
        await admin.create_topic("t")
        topic = await broker.topic_manager.load_topic(TopicName.parse("t"))
        assert len(topic.gate.limited) == 1
        await http.done("DELETE", of_namespace)
        assert not topic.gate.limited
        await http.done("DELETE", path)
        for wrong in (
            admin.set_topic_policies("t", Policies(resource_group="batch")), admin.set_resource_group("a/b"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest):
                await wrong


# --------------------------------------------------------------------------------------------- with other features


async def test_the_rate_of_an_isolated_namespace_is_all_for_the_brokers_that_serve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_manager, "EVICTION_WAIT_S", 0.0)
    async with shared(tmp_path, labels="tier=gold") as (found, admin):
        given = Policies(namespace_publish_rate_messages=LIMIT, primary_broker_labels=("tier=gold",))
        await admin.set_namespace_policies("acme/a", given)
        second = found.brokers["second"].topic_manager
        await until(lambda: len(second.shared_rates) == 1)
        for _ in range(4):
            found.waits("second", "acme/a")
            await found.exchange(1)
        while second.shared_rates:
            await second.evict_misplaced_bundles()
            await admin.topic_stats(name_topic("acme/a", 1))
        for _ in range(10):
            found.waits("first", "acme/a")
            await found.exchange(1)
        rate = found.publish_rate("first", "acme/a").rate._buckets[0]
        assert rate is not None
        assert rate.rate >= LIMIT * (1 - REST_SHARE)


async def test_a_namespace_that_is_divided_keeps_the_rate_and_its_shares(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("acme/a", Policies(namespace_publish_rate_messages=LIMIT))
        for _ in range(6):
            found.waits("first", "acme/a")
            await found.exchange(1)
        before = found.publish_rate("first", "acme/a"), found.rates("acme/a")
        await admin.split_bundles("acme/a", bundles=8)
        for bundle in range(2):
            await admin.topic_stats(name_topic("acme/a", bundle))
        assert found.publish_rate("first", "acme/a") is before[0]
        assert found.rates("acme/a") == before[1]
        found.waits("first", "acme/a")
        await found.exchange(1)
        assert sum(found.rates("acme/a").values()) <= LIMIT + 1e-6


async def test_a_rate_without_loaded_topics_is_given_back_and_comes_again_with_the_next_topic(tmp_path: Path) -> None:
    async with shared(tmp_path) as (found, admin):
        await admin.set_namespace_policies("acme/a", Policies(namespace_publish_rate_messages=LIMIT))
        first, topic = found.brokers["first"].topic_manager, name_topic("acme/a", 0)
        await until(lambda: len(first.shared_rates) == 1)
        for _ in range(6):
            found.waits("first", "acme/a")
            await found.exchange(1)
        await first.unload_topic(TopicName.parse(topic))
        gc.collect()
        assert first.shared_rates == []
        for _ in range(8):
            found.waits("second", "acme/a")
            await found.exchange(1)
        assert found.publish_rate("second", "acme/a").rate._buckets[0].rate >= LIMIT * (1 - REST_SHARE)  # type: ignore[union-attr]
        await admin.topic_stats(topic)
        assert len(first.shared_rates) == 1
        assert sum(found.rates("acme/a").values()) <= LIMIT * (1 + REST_SHARE)
