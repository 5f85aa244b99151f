"""Policies in Pulsar's form: what has no meaning is refused (tests/recorded/test_rest.py: what is set is shown)."""

import re
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.rest.call import HttpError
from magnetar.broker.rest.policies import (
    POLICY_ROWS,
    UNSUPPORTED_NAMESPACE_POLICIES,
    UNSUPPORTED_TOPIC_POLICIES,
    BacklogQuota,
    convert_value,
    make_quota_map,
    parse_namespace_policies,
    parse_quota,
)
from magnetar.proto.names import NamespaceName
from magnetar.proto.policies import POLICY_NAMES, Policies
from tests.broker.rest.http import V2, T, serving

NS = f"{V2}/namespaces/public/default"
RATE = {"dispatchThrottlingRateInMsg": 10, "dispatchThrottlingRateInByte": 2048, "ratePeriodInSecond": 1,
        "relativeToPublishRate": False}  # fmt: skip
GIVEN = {
    "encryptionRequired": True, "offloadThreshold": 100, "offloadThresholdInSeconds": 5, "offloadDeletionLagMs": 5,
    "offloadPolicies": {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "b"},
    "replicatorDispatchRate": RATE, "antiAffinity": "x",
}  # fmt: skip


async def test_what_is_not_here_shows_that_nothing_is_set_and_says_why_it_cannot_be(tmp_path: Path) -> None:
    assert {each.name for each in UNSUPPORTED_NAMESPACE_POLICIES} == set(GIVEN)
    async with serving(tmp_path) as (http, broker, _):
        await http.done("PUT", T)
        await http.done("PUT", f"{V2}/persistent/public/default/p/partitions", 2)
        before = await broker.topic_manager.policies.read_uninherited_policies(NamespaceName("public", "default"), None)
        of_topics = [(base, UNSUPPORTED_TOPIC_POLICIES) for base in (T, f"{V2}/persistent/public/default/p")]
        for base, rows in [(NS, UNSUPPORTED_NAMESPACE_POLICIES), *of_topics]:
            for row in rows:
                path = f"{base}/{row.name}"
                assert await http.get(path, 204 if row.value is None else 200) == row.value
                refused = await http.done(row.verb, path, GIVEN[row.name], 405)
                assert refused.reason == f"{row.name} cannot be set: {row.why}"
                await http.done(row.verb, path, row.value)
                if row.remove:
                    await http.done("DELETE", f"{base}/{row.remove}")
                assert await http.get(path, 204 if row.value is None else 200) == row.value
        for name in ("replicatorDispatchRate", "offloadPolicies"):
            await http.get(f"{T}none/{name}", 404)
            await http.done("POST", f"{T}none/{name}", GIVEN[name], 404)
        limits = await http.get(f"{T}/replicatorDispatchRate?applied=true")
        assert limits["dispatchThrottlingRateInMsg"] == limits["dispatchThrottlingRateInByte"] == 0
        refused = await http.done("PUT", f"{T}/offload", {"ledgerId": 1, "entryId": 1}, 405)
        assert "no tiered storage" in refused.reason
        assert (await http.get(f"{T}/offload"))["status"] == "NOT_RUN"
        assert (
            await broker.topic_manager.policies.read_uninherited_policies(NamespaceName("public", "default"), None)
            == before
            == Policies()
        )


def test_every_policy_has_a_row() -> None:
    fields = {name for row in POLICY_ROWS for name in row.fields}
    quotas = {name for name in POLICY_NAMES if name.startswith("backlog_quota")}
    letters = {name for name in POLICY_NAMES if name.startswith("dead_letter")}
    assert fields | quotas | letters == set(POLICY_NAMES)


def test_the_policies_of_a_namespace_are_taken_partly_filled() -> None:
    given = {
        "max_consumers_per_topic": 3, "retention_policies": {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5},
        "topicDispatchRate": {"standalone": {"dispatchThrottlingRateInMsg": 100, "ratePeriodInSecond": 7}},
        "backlog_quota_map": {"destination_storage": {"limitSize": 1 << 20}}, "deduplicationEnabled": None,
        "subscription_types_enabled": [], "offload_policies": {"anything": 1}, "brand_new": [1],
    }  # fmt: skip
    assert parse_namespace_policies(given) == {
        "max_consumers": 3, "retention_minutes": 5, "retention_mib": 5, "dispatch_rate_messages": 15,
        "dispatch_rate_bytes": 0, "backlog_quota_bytes": 1 << 20,
    }  # fmt: skip


WRONG: list[tuple[str, Any, int]] = [
    ("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 1}, 412),
    ("retention", {"retentionTimeInMinutes": -2, "retentionSizeInMB": 1}, 412),
    ("persistence", {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 2, "bookkeeperAckQuorum": 1}, 412),
    ("persistence", {"bookkeeperEnsemble": 3}, 400),
    ("dispatchRate", {"ratePeriodInSecond": 0}, 412),
    ("dispatchRate", {"dispatchThrottlingRateInMsg": -5}, 412),
    ("dispatchRate", {"relativeToPublishRate": True}, 412),
    ("dispatchRate", {"dispatchThrottlingRateInMsg": "many"}, 400),
    ("subscribeRate", {"ratePeriodInSecond": -1}, 412),
    ("maxProducersPerTopic", -1, 412),
    ("deduplicationSnapshotInterval", -1, 412),
    ("maxProducersPerTopic", 1 << 64, 412),
    ("maxProducersPerTopic", 1.5, 400),
    ("maxProducersPerTopic", True, 400),
    ("deduplication", "yes", 400),
    ("delayedDelivery", {"tickTime": -1}, 412),
    ("inactiveTopicPolicies", {"inactiveTopicDeleteMode": "now"}, 412),
    ("autoSubscriptionCreation", {}, 400),
    ("schemaCompatibilityStrategy", "SIDEWAYS", 412),
    ("isAllowAutoUpdateSchema", "no", 400),
]


@pytest.mark.parametrize(("name", "value", "status"), WRONG)
def test_a_wrong_value_is_refused_with_its_name(name: str, value: Any, status: int) -> None:
    row = next(each for each in POLICY_ROWS if each.namespace == name)
    with pytest.raises(HttpError) as refused:
        row.take(convert_value(value, row.kind, name))
    assert refused.value.status_code == status


def test_quotas_below_one_byte_are_refused_and_minus_one_is_no_limit() -> None:
    assert parse_quota(BacklogQuota(limitSize=-1), "destination_storage") == {"backlog_quota_bytes": 0}
    assert parse_quota(BacklogQuota(limit=1), "destination_storage") == {"backlog_quota_bytes": 1}
    for given, kind in ((BacklogQuota(limitSize=0), "destination_storage"), (BacklogQuota(limitTime=1), "both")):
        with pytest.raises(HttpError):
            parse_quota(given, kind)
    assert make_quota_map(Policies()) == {}


async def test_pulsars_isolation_policies_show_the_brokers_that_have_the_labels_of_a_namespace(tmp_path: Path) -> None:
    every = f"{V2}/clusters/magnetar/namespaceIsolationPolicies"
    async with serving(tmp_path) as (http, _, running):
        assert await http.get(every) == {}
        await http.get(f"{every}/public/default", 404)
        gold = await running.add_broker(name="gold", labels="tier=gold", share_group="other")
        body = {"primaryLabels": ["tier=gold"], "fallbackLabels": ["*"], "primaryBrokersMin": 2}
        await http.done("POST", f"{NS}/brokerIsolation", body)
        shown = (await http.get(every))["public/default"]
        assert shown == await http.get(f"{every}/public/default")
        assert [re.fullmatch(each, str(gold.endpoint)) is not None for each in shown["primary"]] == [True]
        assert len(shown["secondary"]) == 1
        assert shown["namespaces"] == ["public/default"]
        assert shown["auto_failover_policy"] == {
            "policy_type": "min_available", "parameters": {"min_limit": "2", "usage_threshold": "100"},
        }  # fmt: skip
        await http.get(f"{V2}/clusters/none/namespaceIsolationPolicies", 404)
        given = {
            "namespaces": ["public/.*"], "primary": ["gold.*"], "secondary": [],
            "auto_failover_policy": {"policy_type": "min_available", "parameters": {"min_limit": "1"}},
        }  # fmt: skip
        for method, body_ in (("POST", given), ("DELETE", None)):
            refused = await http.ask(method, f"{every}/mine", body_)
            assert refused.status == 405
            assert "set-broker-isolation" in refused.body.decode()
        assert (await http.ask("POST", f"{V2}/clusters/none/namespaceIsolationPolicies/mine", given)).status == 404
