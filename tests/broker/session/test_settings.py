"""Settings that change while brokers run, where each is from, and what a broker says of itself."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magnetar.asyncio import Client
from magnetar.broker.common.config import BrokerConfig, RuntimeSettings, parse_runtime_settings
from magnetar.client.admin import AdminClient
from magnetar.client.common.errors import TopicNotFound
from magnetar.proto import operations as op
from magnetar.proto.errors import InvalidRequest, NotFound
from magnetar.proto.operations import Permission
from magnetar.runtime import config, logs
from tests.support.cluster import Cluster, cluster


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


def asking(running: Cluster) -> AdminClient:
    return AdminClient(f"magnetar://{running.brokers[0].endpoint}")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the watch of another broker
            await asyncio.sleep(0.01)


async def test_the_log_level_changes_without_a_restart_and_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str | None] = []
    monkeypatch.setattr(logs, "set_level", lambda level, source: levels.append(level))
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker() for _ in range(2)]
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            assert not levels, "nothing is changed: the level of the start is left alone"
            await admin.change_setting(name="log_level", value="debug")
            await until(lambda: levels == ["debug", "debug"])
            await admin.change_setting(name="max_producers", value="7")
            await until(lambda: two.topic_manager.policies.defaults.max_producers == 7)
            assert levels == ["debug", "debug"], "another change sets no level again"
            await running.add_broker()
            assert levels == ["debug"] * 3, "a broker that starts later has it too"
            await admin.remove_setting(name="log_level")
            await until(lambda: levels[3:] == [None] * 3)


@pytest.fixture
def started_at_info(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process that was started with `--log-level info`, whatever tests before have set."""
    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(logs, "_configured", "info")
    root.setLevel("INFO")
    yield
    root.setLevel(level)


@pytest.mark.usefixtures("started_at_info")
def test_a_level_is_that_of_the_start_again() -> None:
    logs.set_level("debug", "a test")
    assert logs.get_log_level() == "debug"
    logs.set_level(None, "a test")
    assert logs.get_log_level() == "info"


@pytest.mark.usefixtures("started_at_info")
def test_a_change_of_the_level_is_told_under_either_level(caplog: pytest.LogCaptureFixture) -> None:
    logs.set_level("error", "somebody")
    logs.set_level("error", "another one")
    logs.set_level(None, "somebody else")
    assert caplog.messages == [
        "the log level was info and is error now: somebody", "the log level was error and is info now: somebody else"
    ]


LINES = (
    r"127\.0\.0\.1:\d+ has connected, with gRPC", r"127\.0\.0\.1:\d+ has disconnected: ",
    r"topic persistent://public/default/t is loaded, in \d", r"topic persistent://public/default/t is unloaded, in \d",
    r"persistent://public/default/t: ledger \d+ begins at index 0, at bookies .*; before it: none of this owner",
    r"persistent://public/default/t: ledger \d+ begins at index 20, at .*; before it: ledger \d+, \d+ bytes",
    r"persistent://public/default/t: producer 'ada' is open: .*127\.0\.0\.1:\d+",
    r"persistent://public/default/t: producer 'ada' is closed: its client",
    r"persistent://public/default/t/s: consumer 'bob' is open: ", r".*t/s: consumer 'bob' is closed: its client",
    r"Admin\.TopicStats on persistent://public/default/t: .*: done", r"Admin\.TopicStats on .*none: .*: TopicNotFound",
)


async def test_debug_lines_tell_of_clients_topics_and_requests_and_of_no_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "magnetar")
    async with cluster(tmp_path) as running, asking(running) as admin:
        async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
            consumer = await client.subscribe("t", "s", consumer_name="bob")
            producer = await client.create_producer("t", producer_name="ada", batching_enabled=False)
            for _ in range(20):
                await producer.send(b"x")
                await consumer.acknowledge(await consumer.receive())
            (topic,) = running.brokers[0].topic_manager.loaded.values()
            await topic.log.roll_ledger()
            before = len(caplog.messages)
            for _ in range(20):
                await producer.send(b"y")
                await consumer.acknowledge(await consumer.receive())
            assert [each for each in caplog.messages[before:] if "default/t" in each] == []
            await producer.close()
            await consumer.close()
        await admin.topic_stats("t")
        with pytest.raises(NotFound):
            await admin.topic_stats("none")
        await admin.unload_topic("t")
    for line in LINES:
        assert [each for each in caplog.messages if re.match(line, each)], (line, caplog.messages)


async def test_topics_are_made_at_a_look_up_until_that_is_changed(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker() for _ in range(2)]
        url = f"magnetar://{one.endpoint}"
        async with AdminClient(url) as admin, Client(url) as client:
            await (await client.create_producer("before")).close()
            await admin.change_setting(name="allowAutoTopicCreation", value="false")
            await until(lambda: not two.topic_manager.catalog.auto_creation)
            with pytest.raises(TopicNotFound):
                await client.create_producer("after")
            late = await running.add_broker()
            assert not late.topic_manager.catalog.auto_creation
            await admin.remove_setting(name="auto_topic_creation")
            await until(lambda: all(each.topic_manager.catalog.auto_creation for each in running.brokers))
            await (await client.create_producer("after")).close()


async def test_each_setting_has_its_source_and_what_is_changed_is_dynamic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_SOURCES", {})
    file = tmp_path / "magnetar.toml"
    file.write_text("[broker]\nmax_consumers = 9\nmessage_ttl_s = 5\n")
    loaded = config.load_config(
        BrokerConfig, "broker", file=str(file), environment={"MAGNETAR_BROKER_MAX_PRODUCERS": "3"},
        overrides={"cluster": "here"},
    )  # fmt: skip
    assert loaded.max_producers == 3
    async with cluster(tmp_path, brokers=0) as running:
        await running.add_broker(max_consumers=9, max_producers=3, message_ttl_s=5, cluster="here", cache_bytes=1 << 20)
        async with asking(running) as admin:
            await admin.change_setting(name="message_ttl_s", value="60")
            found = {each.name: each for each in (await admin.describe_broker()).settings}
            sources = {name: each.source for name, each in found.items()}
            assert (sources["max_consumers"], sources["max_producers"], sources["cluster"]) == (
                "file", "environment", "option"
            )  # fmt: skip
            assert (sources["max_tenants"], sources["cache_bytes"]) == ("default", "option")
            assert (sources["message_ttl_s"], found["message_ttl_s"].value) == ("dynamic", "60")
            assert found["message_ttl_s"].dynamic
            assert not found["listen"].dynamic
            await admin.remove_setting(name="message_ttl_s")
            found = {each.name: each for each in (await admin.describe_broker()).settings}
            assert (found["message_ttl_s"].source, found["message_ttl_s"].value) == ("file", "5")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("listen", "h:1", "does not change while brokers run"), ("nonsense", "1", "does not change"),
        ("log_level", "loud", "log_level is one of debug, info, warning, error, not 'loud'"),
        ("message_ttl_s", "7d", "message_ttl_s is a number of seconds, such as 60, not '7d'"),
        ("deduplication", "1.5", "deduplication is true or false, not '1.5'"),
        ("schema_compatibility", "odd", "schema_compatibility is one of .*full.*, not 'odd'"),
        ("publish_rate_messages", "many", "publish_rate_messages is a whole number, not 'many'"),
        ("subscription_types", "Odd", "subscription_types is one of Exclusive, .* not 'Odd'"),
        ("log_level", "null", "has no value: to remove it"), ("message_ttl_s", "null", "has no value"),
        ("metrics_topics", "some", "metrics_topics is one of auto, all, namespace, none, not 'some'"),
    ],
)  # fmt: skip
async def test_what_cannot_change_is_refused_and_nothing_is_stored(
    tmp_path: Path, name: str, value: str, text: str
) -> None:
    async with cluster(tmp_path, brokers=1) as running, asking(running) as admin:
        with pytest.raises(InvalidRequest, match=text):
            await admin.change_setting(name=name, value=value)
        assert not [each for each in (await admin.describe_broker()).settings if each.source == "dynamic"]


def test_what_a_later_version_stored_is_passed_over() -> None:
    stored = {"log_level": "verbose", "new": "1", "auto_topic_creation": "false"}
    assert parse_runtime_settings(stored) == RuntimeSettings(auto_topic_creation=False)


async def test_a_broker_says_its_clock_and_where_its_tasks_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=1) as running, asking(running) as admin:
        found = await admin.describe_broker()
        assert (found.tasks, found.metrics) == ("", "")
        assert found.open_files_max > 0
        full = await admin.describe_broker(tasks=True, metrics=True)
        assert "broker-policies" in full.tasks
        assert "policy_cache.py" in full.tasks
        assert full.clock_ms >= found.clock_ms


def test_settings_are_for_super_users() -> None:
    for row in (op.DESCRIBE_BROKER, op.CHANGE_SETTING, op.REMOVE_SETTING):
        assert row.rule.permission is Permission.OPERATE
