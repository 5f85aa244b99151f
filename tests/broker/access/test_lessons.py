"""What went wrong elsewhere, tried here: ids and names that belong to others, watches, and what a refusal costs."""

import ast
import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import paths
from magnetar.metadata.sqlite import LocalSession
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, NotFound, Unauthorized
from magnetar.runtime.network import find_rpc
from tests import layout
from tests.broker.access.roles import ROOT, Roles, roles
from tests.broker.access.test_grants import NAMESPACE, TOPIC

OTHERS = "persistent://other/orders/secret"


@pytest.fixture
async def acme(tmp_path: Path) -> AsyncIterator[Roles]:
    async with roles(tmp_path) as found:
        await found.grant("etl", "produce", "consume", namespace=NAMESPACE)
        yield found


async def test_an_id_of_another_topics_message_finds_nothing(acme: Roles) -> None:
    """The id is of a ledger; who may read one topic must not read another's by it, and no administrator by mistake."""
    places = {}
    for role, topic in (("etl", TOPIC), (ROOT, OTHERS)):
        producer = await acme.producer(role, topic)
        await producer.send(b"of " + topic.encode())
        places[topic] = await acme.call(role, "Admin.LastMessageId", wire.Name(name=topic))
    ledgers = {topic: _ledger(reply) for topic, reply in places.items()}
    assert ledgers[TOPIC] != ledgers[OTHERS]
    assert await _get(acme, "etl", TOPIC, ledgers[TOPIC])
    for ledger in (ledgers[OTHERS], *range(max(ledgers.values()) + 3), -1, 1 << 62):
        if ledger != ledgers[TOPIC]:
            for role in ("etl", ROOT):
                with pytest.raises(NotFound):
                    await _get(acme, role, TOPIC, ledger)


def _ledger(reply: Any) -> int:
    found = [value for field, value in reply.ListFields() if field.name in ("ledger_id", "position", "id")]
    return int(found[0] if isinstance(found[0], int) else found[0].ledger_id)


async def _get(acme: Roles, role: str, topic: str, ledger: int) -> Any:
    return await acme.call(role, "Admin.GetMessage", wire.GetMessageRequest(topic=topic, ledger_id=ledger, entry_id=0))


async def test_a_watch_names_no_topic_that_the_caller_may_not_look_up_also_when_it_is_deleted(acme: Roles) -> None:
    seen, hidden = f"persistent://{NAMESPACE}/seen", f"persistent://{NAMESPACE}/hidden"
    for topic in (seen, hidden):
        await acme.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=topic))
    await acme.grant("some", "consume", topic=seen)
    told: dict[str, list[str]] = {"some": [], "etl": [], ROOT: []}
    streams = {}
    for role in told:
        streams[role] = acme.world(role).network.connect(acme.broker.endpoint).stream(find_rpc("Broker", "WatchTopics"))
        await streams[role].send(wire.WatchTopicsRequest(namespace=NAMESPACE, after_revision=int(role == "some")))
        told[role] += list((await streams[role].receive())[0].topics.names)
    for topic in (hidden, seen):
        await acme.call(ROOT, "Admin.DeleteTopic", wire.DeleteRequest(name=topic))
    for role, stream in streams.items():
        while f"-{seen}" not in told[role]:
            async with asyncio.timeout(30):
                told[role] += [f"-{each.removed}" for each in await stream.receive() if each.removed]
        stream.cancel()
    assert told["some"] == [seen, f"-{seen}"]
    assert sorted(told["etl"]) == sorted(told[ROOT]) == sorted([hidden, seen, f"-{hidden}", f"-{seen}"])


async def test_a_watch_does_not_tell_whether_a_namespace_exists(acme: Roles) -> None:
    told = []
    for namespace in (NAMESPACE, "acme/ghost", "ghost/ghost"):
        stream = acme.world("stranger").network.connect(acme.broker.endpoint).stream(find_rpc("Broker", "WatchTopics"))
        await stream.send(wire.WatchTopicsRequest(namespace=namespace))
        told.append(list((await stream.receive())[0].topics.names))
        stream.cancel()
    assert told == [[], [], []]
    stream = acme.world("acme-admin").network.connect(acme.broker.endpoint).stream(find_rpc("Broker", "WatchTopics"))
    await stream.send(wire.WatchTopicsRequest(namespace="acme/ghost"))
    with pytest.raises(NotFound):
        await stream.receive()
    stream.cancel()


async def test_a_damaged_tenant_is_missing_in_the_lists_of_others_and_breaks_none(acme: Roles) -> None:
    await acme.running.store.new_session().put(paths.tenant("other"), b"{")
    assert list((await acme.call("acme-admin", "Admin.ListTenants")).names) == ["acme"]
    assert not (await acme.call("stranger", "Admin.ListTenants")).names
    listed = wire.ListTopicsRequest(namespace="other/orders")
    with contextlib.suppress(MagnetarError):
        assert not (await acme.call("stranger", "Admin.ListTopics", listed)).names
    assert "other" in (await acme.call(ROOT, "Admin.ListTenants")).names


async def test_the_traffic_of_a_role_without_grants_writes_no_lines_of_the_audit_log(
    acme: Roles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("magnetar.audit"), "propagate", True)
    with caplog.at_level(logging.INFO, "magnetar.audit"):
        for _ in range(50):
            await acme.call("stranger", "Transactions.Begin", wire.BeginRequest(coordinator=0, count=1))
            await acme.call("stranger", "Transactions.Status", wire.StatusRequest())
            await acme.call("stranger", "Admin.ListTenants")
        assert not caplog.records
        for _ in range(50):
            with pytest.raises(Unauthorized):
                await acme.call("stranger", "Admin.ListTransactions")
        assert 0 < len(caplog.records) <= 20
        await acme.call("acme-admin", "Admin.CreateNamespace", wire.NamespaceSpec(name="acme/audited"))
        assert "CreateNamespace" in caplog.records[-1].getMessage()


async def test_a_refusal_costs_the_same_work_whether_the_topic_exists_or_not(
    acme: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its time says nothing: the decision reads grants alone, before the broker looks at the topic."""
    await acme.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=TOPIC))
    read: list[str] = []
    right = LocalSession.get

    async def counted(self: Any, path: str) -> Any:
        read.append(path)
        return await right(self, path)

    monkeypatch.setattr(LocalSession, "get", counted)
    costs = {}
    for topic in (TOPIC, f"{TOPIC}-ghost"):
        for path, request in (
            ("Broker.Lookup", wire.LookupRequest(topic=topic)), ("Admin.TopicStats", wire.Name(name=topic)),
            ("Admin.DeleteTopic", wire.DeleteRequest(name=topic)),
        ):  # fmt: skip
            for _ in range(2):  # the first one reads what the next ones know
                read.clear()
                with pytest.raises(Unauthorized):
                    await acme.call("stranger", path, request)
            costs[topic, path] = [each.replace(topic, "TOPIC") for each in read if "session" not in each]
    read.clear()
    with pytest.raises(NotFound):
        await acme.call(ROOT, "Admin.TopicStats", wire.Name(name=f"{TOPIC}-ghost"))
    assert read, "the count would see it"
    for path in {each[1] for each in costs}:
        assert costs[TOPIC, path] == costs[f"{TOPIC}-ghost", path], path


def test_no_regular_expression_is_made_of_what_a_caller_says() -> None:
    """In servers; a pattern of a client's subscription is the client's own, and is compared there."""
    made = [
        f"{module.path}:{node.lineno}"
        for module in layout.modules("broker", "bookie", "metadata", "security", "runtime", "ledger", "proto")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr != "escape"
        and not isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    assert made == []


async def test_grants_that_are_given_at_once_are_all_kept(acme: Roles) -> None:
    names = [f"r{number}" for number in range(12)]
    await asyncio.gather(*(acme.grant(name, "consume", namespace=NAMESPACE) for name in names))
    shown = await acme.call(ROOT, "Admin.GetPermissions", wire.PermissionsRequest(namespace=NAMESPACE))
    assert set(shown.roles) == {*names, "etl"}


async def test_schemas_are_read_by_those_of_their_topic_and_written_by_its_producers(acme: Roles) -> None:
    await acme.grant("reader", "consume", namespace=NAMESPACE)
    text = wire.SchemaRequest(topic=TOPIC, schema=wire.SchemaInfo(type=1))
    asked = wire.GetSchemaRequest(topic=TOPIC)
    delete = wire.DeleteRequest(name=TOPIC)
    assert (await acme.call("etl", "Admin.PutSchema", text)).version == bytes(8)
    for role in ("etl", "reader"):
        assert (await acme.call(role, "Broker.GetSchema", asked)).version == bytes(8)
    refused = [("reader", "Admin.PutSchema", text), ("etl", "Admin.DeleteSchema", delete)]
    for path, request in (
        ("Broker.GetSchema", asked), ("Admin.ListSchemas", wire.Name(name=TOPIC)), ("Admin.PutSchema", text),
        ("Admin.FindSchema", text), ("Admin.TestSchema", text), ("Admin.DeleteSchema", delete),
    ):  # fmt: skip
        refused.append(("stranger", path, request))
    for role, path, request in refused:
        with pytest.raises(Unauthorized):
            await acme.call(role, path, request)


def test_no_request_of_a_caller_names_an_address_a_file_or_a_class() -> None:
    """So a broker neither connects, nor reads, nor loads what a caller says."""
    named = re.compile(r"url|uri|host|address|endpoint|path|file|folder|class|plugin|config|environment|env")
    seen: dict[str, list[str]] = {}
    services = [wire.DESCRIPTOR.services_by_name[name] for name in ("Broker", "Admin", "Transactions")]
    waiting = [each.input_type for service in services for each in service.methods]
    while waiting:
        message = waiting.pop()
        if message.full_name not in seen:
            names = [each.name for each in message.fields]
            seen[message.full_name] = [f"{message.name}.{name}" for name in names if named.search(name)]
            waiting += [each.message_type for each in message.fields if each.message_type]
    assert len(seen) >= 50
    assert not [field for fields in seen.values() for field in fields]
