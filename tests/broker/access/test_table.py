"""Every rpc with every kind of role: what is denied is what the table says, and a denied call changes nothing."""

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.access.table_core import PERMISSION_RULES
from magnetar.metadata import paths
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, Unauthenticated, Unauthorized
from magnetar.proto.operations import Permission, PermissionRule, PermissionScope
from magnetar.runtime.logs import OPERATION_REPEATS_MAX
from magnetar.runtime.network import find_rpc
from tests.broker.access.roles import ROOT, Roles, roles

NAMESPACE = "acme/orders"
TOPIC = f"persistent://{NAMESPACE}/missing"
WHO = {
    "stranger": set(), "acme-admin": {"MANAGE", "PRODUCE", "CONSUME"}, "other-admin": set(),
    "p-namespace": {"PRODUCE"}, "c-namespace": {"CONSUME"}, "p-topic": {"PRODUCE"}, "c-topic": {"CONSUME"},
    "c-listed": {"CONSUME"}, "c-unlisted": {"CONSUME"}, ROOT: {"OPERATE", "MANAGE", "PRODUCE", "CONSUME"},
}  # fmt: skip
LISTED = "listed"
EVERY = {"Admin.SkipMessages", "Admin.ExpireMessages"}


@pytest.fixture
async def acme(tmp_path: Path) -> AsyncIterator[Roles]:
    async with roles(tmp_path) as found:
        await found.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=TOPIC))  # a grant's place exists
        for role, rights in WHO.items():
            place = {"topic": TOPIC} if role.endswith("-topic") else {"namespace": NAMESPACE}
            if role not in (ROOT, "acme-admin") and rights:
                await found.grant(role, *(each.lower() for each in rights), **place)
        await found.list_for(LISTED, "c-listed")
        yield found


def expected(role: str, path: str, rule: PermissionRule, subscription: str) -> bool:
    """Whether the role may: written without the code that decides."""
    permission, has = rule.permission.name, WHO[role]
    if rule.on is PermissionScope.PLACE and not subscription:
        permission = "MANAGE"
    if path in EVERY and not subscription:
        permission = "MANAGE"
    if permission in ("SHOWN", "OWN"):
        return True
    if permission == "LOOKUP":
        return bool(has & {"PRODUCE", "CONSUME"})
    if permission not in has:
        return False
    free = role in (ROOT, "acme-admin", "c-listed") or not rule.subscription
    return free or subscription != LISTED


def request_of(path: str, rule: PermissionRule, subscription: str) -> Any:
    kind = find_rpc(*path.split(".")).request
    given: dict[str, Any] = {}
    if rule.on is PermissionScope.TOPIC:
        given[rule.field] = f"{TOPIC}-not-there" if path in ("Admin.CreateTopic", "Admin.DeleteTopic") else TOPIC
    elif rule.on is PermissionScope.NAMESPACE:
        given[rule.field] = NAMESPACE
    elif rule.on is PermissionScope.TENANT:
        given[rule.field] = "acme"
    elif rule.on is PermissionScope.PLACE:
        given["namespace"] = NAMESPACE
    elif "name" in kind.DESCRIPTOR.fields_by_name:
        given["name"] = "ghost"
    if rule.subscription:
        given[rule.subscription] = subscription
    return kind(**given)


def test_each_rpc_has_one_rule_and_each_rule_an_rpc() -> None:
    rpcs = {f"{service}.{method.name}" for service in ("Broker", "Admin", "Transactions")
            for method in wire.DESCRIPTOR.services_by_name[service].methods}  # fmt: skip
    assert {path.partition(" ")[0] for path in PERMISSION_RULES} == rpcs
    frames = {path.partition(" ")[2] for path in PERMISSION_RULES if " " in path}
    assert frames == {"open_producer", "subscribe"}
    for path, rule in PERMISSION_RULES.items():
        named = path.partition(" ")
        kind = find_rpc(*named[0].split(".")).request
        if named[2] or kind.DESCRIPTOR.name in ("ReadRequests", "WatchTopicsRequests"):
            continue  # its items are asked where they open something
        for field in filter(None, (rule.field, rule.subscription)):
            assert field in kind.DESCRIPTOR.fields_by_name, f"{path} has no field {field}"


async def test_every_rpc_is_denied_to_whom_the_table_denies_it_and_changes_nothing_then(acme: Roles) -> None:
    wrong, tried = [], 0
    for path, rule in PERMISSION_RULES.items():
        if " " in path or find_rpc(*path.split(".")).streaming:
            continue
        for subscription in ("", "s", LISTED) if rule.subscription else ("",):
            request = request_of(path, rule, subscription)
            for role in sorted(WHO, key=lambda role: expected(role, path, rule, subscription)):  # denials first
                before = await tree(acme)
                may = await tells(acme, role, path, request)
                tried += 1
                if may != expected(role, path, rule, subscription):
                    wrong.append((path, role, subscription, may))
                if not may and before != await tree(acme):
                    wrong.append((path, role, subscription, "changed something"))
    assert not wrong, "\n".join(map(str, wrong))
    assert tried > 500


async def test_what_all_brokers_take_is_for_super_users(acme: Roles) -> None:
    before = await tree(acme)
    for role in WHO:
        for path, request in (
            ("Admin.GetPolicies", wire.PoliciesRequest()),
            ("Admin.ChangePolicies", wire.ChangePoliciesRequest(set='{"max_topics": 1}')),
        ):
            assert await tells(acme, role, path, request) == (role == ROOT)
        assert (await tree(acme) == before) == (role != ROOT)


async def tells(acme: Roles, role: str, path: str, request: Any) -> bool:
    """Whether the caller may: any other error is the handler's."""
    try:
        await acme.call(role, path, request)
    except Unauthorized as error:
        return role not in str(error)  # it says to whom
    except MagnetarError:
        return True
    return True


async def tree(acme: Roles) -> dict[str, bytes]:
    store = acme.running.sessions[0]
    found = {}

    async def walk(path: str) -> None:
        node = await store.get(path)
        if node is not None:
            found[path] = node.value
        for child in await store.children(path):
            await walk(f"{path}/{child}")

    for root in (paths.TENANTS, paths.NAMESPACES, paths.POLICIES, paths.GRANTS, paths.PARTITIONED):
        await walk(root)
    for topic in await store.children(paths.topics("acme", "orders")):
        found[f"topic {topic}"] = b""
    return found


@pytest.mark.parametrize(("role", "produce", "consume", "listed"), [
    ("stranger", False, False, False), ("p-namespace", True, False, False), ("c-namespace", False, True, False),
    ("p-topic", True, False, False), ("c-topic", False, True, False), ("c-listed", False, True, True),
    ("c-unlisted", False, True, False), ("acme-admin", True, True, True), ("other-admin", False, False, False),
    (ROOT, True, True, True),
])  # fmt: skip
async def test_producers_consumers_readers_and_ranges_open_for_those_who_may(
    acme: Roles, role: str, produce: bool, consume: bool, listed: bool
) -> None:
    async def opens(what: Any) -> bool:
        try:
            await what
        except Unauthorized:
            return False
        return True

    assert await opens(acme.producer(role, TOPIC)) == produce
    assert await opens(acme.consumer(role, TOPIC, f"s-{role}")) == consume
    assert await opens(acme.consumer(role, TOPIC, f"reader-{role}", durable=False)) == consume
    assert await opens(acme.consumer(role, TOPIC, LISTED, type=wire.Subscribe.SHARED)) == listed
    first = acme.producer(role, TOPIC, "first", initial_subscription="first")
    assert await opens(first) == (produce and consume)
    letters = {"dead-letter.topic": "persistent://other/orders/elsewhere", "dead-letter.max-redeliver-count": "1"}
    elsewhere = acme.consumer(role, TOPIC, f"l-{role}", subscription_properties=letters)
    assert await opens(elsewhere) == (role == ROOT)
    stream = acme.world(role).network.connect(acme.broker.endpoint).stream(find_rpc("Broker", "Read"))
    await stream.send(wire.ReadRequest(request_id=1, topic=TOPIC, first_index=0, end_index=5))
    done = (await stream.receive())[-1].done
    assert ("may not consume from" in done.error.message) != consume


async def test_lists_show_what_the_caller_may_look_up_and_nothing_else(acme: Roles) -> None:
    hidden = f"persistent://{NAMESPACE}/hidden"
    await acme.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=hidden))

    async def topics(role: str, namespace: str = NAMESPACE) -> list[str]:
        return list((await acme.call(role, "Admin.ListTopics", wire.ListTopicsRequest(namespace=namespace))).names)

    async def watched(role: str) -> list[str]:
        stream = acme.world(role).network.connect(acme.broker.endpoint).stream(find_rpc("Broker", "WatchTopics"))
        await stream.send(wire.WatchTopicsRequest(namespace=NAMESPACE))
        return list((await stream.receive())[0].topics.names)

    for ask in (topics, watched):
        assert await ask("stranger") == []
        assert await ask("c-topic") == [TOPIC]
        assert await ask("c-namespace") == await ask("acme-admin") == await ask(ROOT) == sorted([hidden, TOPIC])
    assert await topics("stranger", "acme/not-there") == await topics("stranger", "ghost/orders") == []
    assert list((await acme.call("stranger", "Admin.ListTenants")).names) == []
    assert list((await acme.call("acme-admin", "Admin.ListTenants")).names) == ["acme"]
    assert list((await acme.call(ROOT, "Admin.ListTenants")).names) == ["acme", "other", "public"]


async def test_a_refusal_says_what_was_denied_to_whom_and_nothing_about_what_exists(acme: Roles) -> None:
    texts = set()
    for topic in (TOPIC, f"persistent://{NAMESPACE}/ghost", "persistent://acme/ghost/x", "persistent://ghost/ns/x"):
        for path in ("Broker.Lookup", "Admin.TopicStats", "Admin.DeleteTopic"):
            kind = find_rpc(*path.split(".")).request
            field = "topic" if path == "Broker.Lookup" else "name"
            with pytest.raises(Unauthorized) as refused:
                await acme.call("stranger", path, kind(**{field: topic}))
            assert "client:stranger may not" in str(refused.value)
            texts.add((path, str(refused.value).replace(topic, "TOPIC")))
    assert len(texts) == 3, texts


async def test_without_a_role_nothing_is_answered(acme: Roles) -> None:
    channel = acme.running.world.network._inner.connect(acme.broker.endpoint)  # type: ignore[attr-defined]
    with pytest.raises(Unauthenticated):
        await channel.call(find_rpc("Broker", "Lookup"), wire.LookupRequest(topic=TOPIC), timeout_s=5.0)
    await channel.close()


async def test_an_identity_in_a_request_counts_for_nothing(acme: Roles) -> None:
    """The internal forms of a request, and names that a caller gives itself."""
    unload = wire.UnloadNamespaceRequest(namespace=NAMESPACE, here=True)
    with pytest.raises(Unauthorized):
        await acme.call("stranger", "Admin.UnloadNamespace", unload)
    in_memory = wire.ListTopicsRequest(namespace=NAMESPACE, in_memory_here=True)
    assert list((await acme.call("stranger", "Admin.ListTopics", in_memory)).names) == []
    with pytest.raises(Unauthorized):
        await acme.producer("stranger", TOPIC, "root", properties={"principal": ROOT})


async def test_the_audit_log_says_who_did_what_with_which_result(acme: Roles, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "magnetar.audit"):
        await acme.call("acme-admin", "Admin.CreateTopic", wire.TopicSpec(name=f"persistent://{NAMESPACE}/new"))
        with pytest.raises(MagnetarError):
            await acme.call("acme-admin", "Admin.CreateTopic", wire.TopicSpec(name=f"persistent://{NAMESPACE}/new"))
        await acme.grant("web", "produce", namespace=NAMESPACE, by="acme-admin")
        await acme.call("acme-admin", "Admin.TopicStats", wire.Name(name=TOPIC))
        for _ in range(15):
            with pytest.raises(Unauthorized):
                await acme.call("stranger", "Admin.DeleteTopic", wire.DeleteRequest(name=TOPIC, force=True))
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == "magnetar.audit"]
    acts = [(line["principal"], line["act"], line["on"], line["result"]) for line in lines]
    new = f"persistent://{NAMESPACE}/new"
    assert acts[:3] == [
        ("client:acme-admin", "Admin.CreateTopic", new, "done"),
        ("client:acme-admin", "Admin.CreateTopic", new, "AlreadyExists"),
        ("client:acme-admin", "Admin.ChangePermissions", NAMESPACE, "done"),
    ]
    denied = lines[3:]
    assert {(line["principal"], line["act"], line["on"], line["result"]) for line in denied} == {
        ("client:stranger", "manage", TOPIC, "denied")
    }
    assert len(denied) == 10, "a caller that tries again and again does not fill the log"
    assert all(line["from"].startswith("127.0.0.1") for line in lines)
    assert lines[2]["fields"] == ["namespace", "grant"]


def test_every_permission_is_used() -> None:
    assert {rule.permission for rule in PERMISSION_RULES.values()} == set(Permission)


async def test_a_role_with_a_grant_that_acts_in_a_loop_is_counted_and_no_act_of_an_administrator_is_left_out(
    acme: Roles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    caplog.set_level(logging.INFO, "magnetar.audit")
    for number in range(3 * OPERATION_REPEATS_MAX):
        subscription = {"topic": TOPIC, "name": f"s{number}"}
        await acme.call("c-topic", "Admin.CreateSubscription", wire.SubscriptionSpec(**subscription))
        await acme.call("c-topic", "Admin.DeleteSubscription", wire.DeleteSubscriptionRequest(**subscription))
        await acme.call("acme-admin", "Admin.CreateTopic", wire.TopicSpec(name=f"{TOPIC}{number}"))
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == "magnetar.audit"]
    acts = Counter((each["principal"], each["act"]) for each in lines)
    assert acts == {
        ("client:c-topic", "Admin.CreateSubscription"): OPERATION_REPEATS_MAX,
        ("client:c-topic", "Admin.DeleteSubscription"): OPERATION_REPEATS_MAX,
        ("client:acme-admin", "Admin.CreateTopic"): 3 * OPERATION_REPEATS_MAX,
    }
