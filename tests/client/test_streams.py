"""Steps with state: exactly once, by partition, rebuilt from the log, fenced."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar import streams
from magnetar.asyncio import Client, Message
from magnetar.client.admin import AdminClient
from magnetar.proto.errors import ConnectionLost, Unauthorized
from magnetar.proto.policies import Policies
from tests.broker.access.roles import roles
from tests.support.cluster import Cluster, cluster

SOURCE, SINK, STATE = (f"persistent://public/default/{name}" for name in ("orders", "bills", "totals"))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


@pytest.fixture
async def client(running: Cluster) -> AsyncIterator[Client]:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        yield client


@pytest.fixture
async def admin(running: Cluster) -> AsyncIterator[AdminClient]:
    async with AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin:
        await admin.create_topic(SOURCE, partitions=2)
        yield admin


def counting(name: str = "counting", **options: Any) -> streams.App:
    app = streams.App(name)

    @app.step(SOURCE, SINK, state=STATE, **options)
    def count(message: Message, context: streams.Context) -> bytes:
        key = message.partition_key()
        context.state[key] = total = context.state.get(key, 0) + int(message.data())
        return b"%d" % total

    return app


async def sent(client: Client, first: int, count: int, keys: int = 5) -> Counter[str]:
    model = Counter[str]()
    producer = await client.create_producer(SOURCE)
    for number in range(first, first + count):
        await producer.send(b"%d" % number, partition_key=f"k{number % keys}")
        model[f"k{number % keys}"] += number
    await producer.close()
    return model


async def totals(client: Client) -> dict[str, int]:
    async with await client.create_table_view(STATE) as view:
        return {key: int(value) for key, value in view.items() if key != streams.OWNER_KEY}


async def test_each_message_counts_once_in_the_state_and_in_the_output_also_over_runs(
    client: Client, admin: AdminClient
) -> None:
    model = await sent(client, 0, 100)
    counted = await counting().run(client, admin, idle_timeout_ms=500)
    assert (counted.received, counted.acknowledged) == (100, 100)
    assert await totals(client) == model
    model += await sent(client, 100, 50)
    await counting().run(client, admin, idle_timeout_ms=500)
    assert await totals(client) == model
    reader = await client.create_reader(SINK, magnetar.MessageId.earliest)
    shown = dict[str, int]()
    for _ in range(150):
        message = await reader.read_next(30_000)
        assert int(message.data()) > shown.get(message.partition_key(), -1), "an output of a key is out of order"
        shown[message.partition_key()] = int(message.data())
    assert shown == model, "the last output of a key is its total"
    assert not await reader.has_message_available()


async def test_state_is_rebuilt_from_the_compacted_topic_and_deleted_keys_stay_deleted(
    client: Client, admin: AdminClient
) -> None:
    app = streams.App("closing")

    @app.step(SOURCE, SINK, state=STATE)
    def close(message: Message, context: streams.Context) -> None:
        key = message.partition_key()
        if message.data() == b"0":
            del context.state[key]
        else:
            assert key not in context.state
            context.state[key] = {"open": True}

    producer = await client.create_producer(SOURCE)
    for body in (b"1", b"0", b"1", b"0", b"1"):
        await producer.send(body, partition_key="k")
    await app.run(client, admin, idle_timeout_ms=300)
    for part in await admin.parts(STATE):
        await admin.compact(part)
    await producer.send(b"0", partition_key="k")
    await producer.send(b"1", partition_key="k")
    await app.run(client, admin, idle_timeout_ms=300)


async def test_a_worker_that_was_replaced_commits_nothing_and_the_state_is_that_of_the_other(
    client: Client, admin: AdminClient, running: Cluster
) -> None:
    """The first one hangs in its function with a state in memory; another one changes the state; then it goes on."""
    model = await sent(client, 1, 10, keys=1)
    hangs, goes_on = asyncio.Event(), asyncio.Event()
    slow = streams.App("slow")

    @slow.step(SOURCE, SINK, state=STATE, timeout=5)
    async def count(message: Message, context: streams.Context) -> None:
        key = message.partition_key()
        context.state[key] = context.state.get(key, 0) + int(message.data())
        if not hangs.is_set():
            hangs.set()
            await goes_on.wait()

    async with Client(f"magnetar://{running.brokers[0].endpoint}") as theirs:
        hanging = asyncio.create_task(slow.run(theirs, admin, idle_timeout_ms=1000))
        await hangs.wait()
        await counting("the other").run(client, admin, idle_timeout_ms=300)
        assert await totals(client) == model
        goes_on.set()
        counted = await hanging
    assert counted.aborted > 0
    assert await totals(client) == model + model, "it began again, from the state of the other"


async def test_a_failure_that_is_given_back_leaves_no_change(client: Client, admin: AdminClient) -> None:
    app, failed = streams.App("careful"), set[bytes]()

    @app.step(SOURCE, SINK, state=STATE, on_error="nack")
    def count(message: Message, context: streams.Context) -> None:
        context.state["calls"] = context.state.get("calls", 0) + 1
        if message.data() == b"3" and not failed:
            failed.add(message.data())
            raise ValueError("not now")

    producer = await client.create_producer(SOURCE)
    for number in range(6):
        await producer.send(b"%d" % number, partition_key="one")
    await app.run(client, admin, idle_timeout_ms=500)
    assert (await totals(client))["calls"] == 5


async def test_what_a_function_raises_ends_the_app_and_nothing_of_its_batch_counts(
    client: Client, admin: AdminClient
) -> None:
    app = streams.App("failing")

    @app.step(SOURCE, SINK, state=STATE)
    def count(message: Message, context: streams.Context) -> None:
        context.state[message.partition_key()] = 1
        raise magnetar.Timeout("the program's own")

    await sent(client, 0, 3, keys=1)
    with pytest.raises(magnetar.Timeout, match="own"):
        await app.run(client, admin, idle_timeout_ms=500)
    assert await totals(client) == {}


async def test_a_state_of_other_partitions_is_refused(client: Client, admin: AdminClient) -> None:
    await admin.create_topic(STATE, partitions=3)
    with pytest.raises(magnetar.InvalidConfiguration, match=r"has 3 partitions and its source .* has 2"):
        await counting().run(client, admin, idle_timeout_ms=100)
    app = counting()
    with pytest.raises(magnetar.InvalidConfiguration, match="another step has the state"):
        app.step("other", "sink", state=STATE)(print)


async def test_a_state_is_compacted_also_if_the_app_that_made_it_ended_there(
    client: Client, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(*_: object) -> None:
        raise ConnectionLost("the app ends here")

    with monkeypatch.context() as broken:
        broken.setattr(AdminClient, "set_topic_policies", crash)
        with pytest.raises(ConnectionLost):
            await counting().run(client, admin, idle_timeout_ms=100)
    assert await admin.partitions(STATE) == 2
    await counting().run(client, admin, idle_timeout_ms=100)
    assert (await admin.topic_policies(STATE)).compaction_threshold_bytes == streams.COMPACTION_BYTES


async def test_the_threshold_of_a_state_that_exists_stays_as_an_operator_set_it(
    client: Client, admin: AdminClient
) -> None:
    await admin.create_topic(STATE, partitions=2)
    for bytes_ in (0, 1 << 30):
        await admin.set_topic_policies(STATE, Policies(compaction_threshold_bytes=bytes_))
        await counting().run(client, admin, idle_timeout_ms=100)
        assert (await admin.topic_policies(STATE)).compaction_threshold_bytes == bytes_
    await admin.remove_topic_policies(STATE, "compaction_threshold_bytes")
    await admin.set_namespace_policies("public/default", Policies(compaction_threshold_bytes=1 << 20))
    await counting().run(client, admin, idle_timeout_ms=100)
    assert (await admin.topic_policies(STATE)).compaction_threshold_bytes is None


async def test_an_app_that_may_not_manage_its_state_uses_the_topic_that_is_there(tmp_path: Path) -> None:
    async with roles(tmp_path) as found:
        url, there = f"magnetar://{found.broker.endpoint}", "persistent://acme/orders"
        async with AdminClient(url, world=found.world("root")) as root:
            for topic in ("source", "state", "sink"):
                await root.create_topic(f"{there}/{topic}", partitions=2)
        await found.grant("app", "produce", "consume", namespace="acme/orders")
        app = streams.App("app")
        app.step(f"{there}/source", f"{there}/sink", state=f"{there}/state")(lambda message, context: message.data())
        world = found.world("app")
        async with Client(url, world=world) as client, AdminClient(url, world=world) as admin:
            producer = await client.create_producer(f"{there}/source")
            await producer.send(b"x", partition_key="k")
            assert (await app.run(client, admin, idle_timeout_ms=300)).committed == 1
            missing = streams.App("other")
            missing.step(f"{there}/source", f"{there}/sink", state=f"{there}/more")(lambda message, context: None)
            with pytest.raises(Unauthorized):
                await missing.run(client, admin, idle_timeout_ms=100)


def test_a_state_is_a_dictionary_of_json_whose_values_change_by_assignment_alone() -> None:
    state = streams.State()
    state["a"] = {"list": [1]}
    state["a"]["list"].append(2)
    assert state["a"] == {"list": [1]}
    state.add_message_changes()
    del state["a"]
    assert "a" not in state
    assert state.get("a") is None
    state.discard_message_changes()
    assert dict(state) == {"a": {"list": [1]}}
    with pytest.raises(TypeError):
        state["b"] = object()
    with pytest.raises(magnetar.InvalidConfiguration, match="not magnetar"):
        state[streams.OWNER_KEY] = 1
    with pytest.raises(KeyError):
        del state["missing"]
    state.commit_batch_changes()
    assert (state.batch_changes, state.committed) == ({}, {"a": b'{"list":[1]}'})
