"""Settings that change while brokers run: at every broker, kept over a restart, and with Pulsar's errors."""

import asyncio
import json
from pathlib import Path

import pytest

from magnetar.broker.common.config import APPLIED_POLICY_NAMES, CHANGEABLE_POLICY_NAMES, UNCHANGEABLE_SETTINGS
from magnetar.broker.server import Broker
from magnetar.broker.session.inspection import (
    CHANGEABLE_NAMES,
    PULSAR_SETTING_NAMES,
    SHOWN_SETTING_NAMES,
    find_settings_to_remove,
    list_changed_settings,
    parse_setting_value,
)
from magnetar.metadata.records import PoliciesRecord
from magnetar.proto.errors import InvalidRequest
from magnetar.proto.policies import Policies
from tests.broker.rest.http import V2, Http, T, serving

CONFIGURATION = f"{V2}/brokers/configuration"
RATE = "dispatchThrottlingRatePerTopicInMsg"
async def until(broker: Broker, name: str, value: object) -> None:
    async with asyncio.timeout(20):
        while getattr(broker.topic_manager.policies.defaults, name) != value:  # noqa: ASYNC110 - the watch of another broker
            await asyncio.sleep(0.01)


async def test_a_setting_changes_at_every_broker_for_topics_that_are_loaded_and_those_to_come(tmp_path: Path) -> None:
    async with serving(tmp_path, max_producers=5) as (http, broker, running):
        other = await running.add_broker(http_listen=broker._config.http_listen, max_producers=6)
        there = Http(other.http_url)
        await http.done("PUT", T)
        await http.get(f"{T}/stats")
        topic = next(iter(broker.topic_manager.loaded.values()))
        assert topic.applied.dispatch_rate_messages == 0
        await there.done("POST", f"{CONFIGURATION}/{RATE}/1000", status=200)
        await until(broker, "dispatch_rate_messages", 1000)
        assert topic.applied.dispatch_rate_messages == 1000
        assert other.topic_manager.policies.defaults.dispatch_rate_messages == 1000, "known when it is answered"
        for each in (http, there):
            assert await each.get(f"{CONFIGURATION}/values") == {RATE: "1000"}
            assert (await each.get(f"{CONFIGURATION}/runtime"))["dispatch_rate_messages"] == "1000"
        await http.done("PUT", f"{T}2")
        assert (await http.get(f"{T}2/dispatchRate?applied=true"))["dispatchThrottlingRateInMsg"] == 1000

        await http.done("POST", f"{T}/dispatchRate", {"dispatchThrottlingRateInMsg": 7})
        assert topic.applied.dispatch_rate_messages == 7, "what a topic has of its own stays"
        await http.done("POST", f"{CONFIGURATION}/max_producers/1", status=200)
        await until(other, "max_producers", 1)
        late = await running.add_broker(http_listen=broker._config.http_listen)
        assert late.topic_manager.policies.defaults.max_producers == 1, "also of a broker that starts after it"

        await there.done("DELETE", f"{CONFIGURATION}/max_producers", status=200)
        await there.done("DELETE", f"{CONFIGURATION}/{RATE}", status=200)
        await there.done("DELETE", f"{CONFIGURATION}/{RATE}", status=200)
        await until(broker, "dispatch_rate_messages", 0)
        assert (
            broker.topic_manager.policies.defaults.max_producers,
            other.topic_manager.policies.defaults.max_producers,
        ) == (5, 6)
        assert await http.get(f"{CONFIGURATION}/values") == {}
        await there.close()


def test_each_setting_has_one_name_that_is_shown_and_takes_what_it_shows() -> None:
    assert set(CHANGEABLE_POLICY_NAMES) | set(UNCHANGEABLE_SETTINGS) == set(APPLIED_POLICY_NAMES)
    assert len(set(SHOWN_SETTING_NAMES)) == len(SHOWN_SETTING_NAMES) == len(CHANGEABLE_NAMES)
    assert set(PULSAR_SETTING_NAMES) <= set(CHANGEABLE_NAMES)
    values = {
        "auto_subscription_creation": False, "inactive_mode": "delete_when_no_subscriptions", "message_ttl_s": 5,
        "subscription_types": ("Shared", "Failover"), "dead_letter_backoff_s": (1.0, 60.5), "dead_letter_topic": "a,b",
        "schema_compatibility": "forward", "retention_minutes": -1,
    }  # fmt: skip
    for name, value in values.items():
        texts = list_changed_settings(PoliciesRecord(policies=Policies(**{name: value})))  # type: ignore[arg-type]
        assert list(texts) == [PULSAR_SETTING_NAMES.get(name, name)]
        for spelt in (name, *texts):
            assert parse_setting_value(spelt, texts[PULSAR_SETTING_NAMES.get(name, name)]) == {name: value}
    off = PoliciesRecord(policies=Policies(auto_subscription_creation=False), properties={"log_level": "debug"})
    assert list_changed_settings(off) == {"allowAutoSubscriptionCreation": "false", "log_level": "debug"}


def test_retention_that_is_set_together_goes_together() -> None:
    """Or the half that is left would keep everything for ever."""
    assert (
        find_settings_to_remove("retention_minutes") == ("retention_minutes",
        "retention_mib") == find_settings_to_remove("retention_mib")
    )
    assert find_settings_to_remove(RATE) == ("dispatch_rate_messages",)
    with pytest.raises(InvalidRequest):
        find_settings_to_remove("nonsense")


async def test_retention_of_all_brokers_is_inherited_and_goes_again(http: Http) -> None:
    namespace = f"{V2}/namespaces/public/default/retention"
    await http.done("PUT", T)
    await http.done("POST", f"{CONFIGURATION}/retention_minutes/60", status=200)
    values = {"retention_minutes": "60", "retention_mib": "-1"}
    assert await http.get(f"{CONFIGURATION}/values") == values, json.dumps(values)
    assert (await http.get(f"{namespace}?applied=true"))["retentionTimeInMinutes"] == 60
    await http.done("DELETE", f"{CONFIGURATION}/retention_mib", status=200)
    assert (await http.get(f"{namespace}?applied=true"))["retentionTimeInMinutes"] == 0
