"""Policies in Pulsar's form: what is set is shown again, at namespaces and topics; what has no meaning is refused."""

from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.rest.call import BadRequest
from magnetar.broker.rest.policies import (
    OF_NAMESPACES,
    OF_TOPICS,
    POLICIES,
    BacklogQuota,
    PolicyRow,
    convert_value,
    make_quota_map,
    parse_namespace_policies,
    parse_quota,
)
from magnetar.proto.names import NamespaceName
from magnetar.proto.policies import NAMES, Policies
from tests.broker.rest.http import V2, T, serving

NS = f"{V2}/namespaces/public/default"
RATE = {"dispatchThrottlingRateInMsg": 10, "dispatchThrottlingRateInByte": 2048, "ratePeriodInSecond": 1,
        "relativeToPublishRate": False}  # fmt: skip
VALUES: dict[str, Any] = {
    "messageTTL": 60, "deduplication": True, "maxProducersPerTopic": 3, "maxConsumersPerTopic": 4,
    "maxConsumersPerSubscription": 5, "maxSubscriptionsPerTopic": 6, "maxTopicsPerNamespace": 7,
    "maxUnackedMessagesPerConsumer": 8, "maxUnackedMessagesPerSubscription": 9, "maxMessageSize": 1 << 20,
    "subscriptionExpirationTime": 10, "compactionThreshold": 1 << 30,
    "retention": {"retentionTimeInMinutes": -1, "retentionSizeInMB": 100},
    "unsubscribedRetention": {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1},
    "persistence": {"bookkeeperEnsemble": 3, "bookkeeperWriteQuorum": 2, "bookkeeperAckQuorum": 2,
                    "managedLedgerMaxMarkDeleteRate": 0.0},
    "publishRate": {"publishThrottlingRateInMsg": 100, "publishThrottlingRateInByte": -1},
    "dispatchRate": RATE, "subscriptionDispatchRate": RATE,
    "subscribeRate": {"subscribeThrottlingRatePerConsumer": 3, "ratePeriodInSecond": 30},
    "autoSubscriptionCreation": {"allowAutoSubscriptionCreation": False},
    "delayedDelivery": {"active": True, "tickTime": 100, "maxDeliveryDelayInMillis": 1000},
    "inactiveTopicPolicies": {"inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
                              "maxInactiveDurationSeconds": 100, "deleteWhileInactive": True},
    "subscriptionTypesEnabled": ["Shared", "Failover"], "schemaCompatibilityStrategy": "FORWARD",
    "deduplicationSnapshotInterval": 30, "isAllowAutoUpdateSchema": False, "schemaValidationEnforced": True,
}  # fmt: skip
UNSET = {
    "schemaCompatibilityStrategy": "UNDEFINED", "isAllowAutoUpdateSchema": True, "schemaValidationEnforced": False
}  # fmt: skip
"""What is shown where nothing is set; of the others nothing is."""


def _named(row: PolicyRow) -> str:
    return row.namespace or row.topic


async def test_each_policy_is_set_shown_and_removed_at_namespaces_and_topics(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _):
        await http.done("PUT", T)
        for row in POLICIES:
            value = VALUES[_named(row)]
            for base, name, verb in ((NS, row.namespace, row.verb), (T, row.topic, row.topic_verb)):
                if not name:
                    continue
                unset = UNSET.get(name)
                assert await http.get(f"{base}/{name}", 204 if unset is None else 200) == unset
                await http.done(verb, f"{base}/{name}", value)
                assert await http.get(f"{base}/{name}") == value, name
                await http.done("DELETE", f"{base}/{name}")
                assert await http.get(f"{base}/{name}", 204 if unset is None else 200) == unset
        await http.done("POST", f"{NS}/deduplicationSnapshotInterval", 0)
        assert await http.get(f"{NS}/deduplicationSnapshotInterval") == 0
        await http.done("POST", f"{NS}/deduplicationSnapshotInterval")  # as pulsar-admin removes it
        assert await http.get(f"{NS}/deduplicationSnapshotInterval", 204) is None
        await http.done("POST", f"{NS}/maxProducersPerTopic", None, 400)
        await http.done("POST", f"{T}/messageTTL?messageTTL=5")
        assert await http.get(f"{T}/messageTTL") == 5
        assert await http.get(f"{T}/maxProducers?applied=true") == 0


async def test_quotas_auto_creation_and_replication_have_their_own_forms(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _):
        await http.done("POST", f"{NS}/backlogQuota?backlogQuotaType=message_age", {"limitTime": 60})
        await http.done("POST", f"{NS}/backlogQuota", {"limitSize": (1 << 20) + 1, "policy": "producer_exception"})
        found = await http.get(f"{NS}/backlogQuotaMap")
        assert found["destination_storage"]["limitSize"] == (1 << 20) + 1
        assert found["message_age"] == {"limit": -1, "limitSize": -1, "limitTime": 60, "policy": "producer_exception"}
        await http.done("DELETE", f"{NS}/backlogQuota")
        assert set(await http.get(f"{NS}/backlogQuotaMap")) == {"message_age"}
        await http.done("DELETE", f"{NS}/backlogQuota?backlogQuotaType=message_age")
        assert await http.get(f"{NS}/backlogQuotaMap") == {}
        override = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 4}
        await http.done("POST", f"{NS}/autoTopicCreation", override)
        assert await http.get(f"{NS}/autoTopicCreation") == override
        await http.done("DELETE", f"{NS}/autoTopicCreation")
        assert await http.get(f"{NS}/autoTopicCreation", 204) is None


async def test_the_clusters_of_a_topic_are_this_one_and_another_one_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _):
        await http.done("PUT", T)
        assert await http.get(f"{NS}/replication") == ["magnetar"]
        assert await http.get(f"{T}/replication", 204) is None
        assert await http.get(f"{T}/replication?applied=true") == ["magnetar"]
        for place in (NS, T):
            await http.done("POST", f"{place}/replication", ["magnetar"])
            refused = await http.done("POST", f"{place}/replication", ["magnetar", "elsewhere"], 412)
            assert "no cluster 'elsewhere' here" in refused.reason
            assert "no replication between clusters" in refused.reason
            refused = await http.done("POST", f"{place}/replication", [], 412)
            assert refused.reason == "ClusterIds should not be null or empty"
        await http.done("DELETE", f"{T}/replication")
        await http.get(f"{T}none/replication", 404)
        await http.get(f"{V2}/namespaces/public/none/replication", 404)


GIVEN = {
    "encryptionRequired": True, "offloadThreshold": 100, "offloadThresholdInSeconds": 5, "offloadDeletionLagMs": 5,
    "offloadPolicies": {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "b"},
    "replicatorDispatchRate": RATE, "antiAffinity": "x",
    "persistence/bookieAffinity": {"bookkeeperAffinityGroupPrimary": "g"},
}  # fmt: skip


async def test_what_is_not_here_shows_that_nothing_is_set_and_says_why_it_cannot_be(tmp_path: Path) -> None:
    assert {each.name for each in OF_NAMESPACES} == set(GIVEN)
    async with serving(tmp_path) as (http, broker, _):
        await http.done("PUT", T)
        await http.done("PUT", f"{V2}/persistent/public/default/p/partitions", 2)
        before = await broker.topic_manager.policies.read_set_policies(NamespaceName("public", "default"), None)
        for base, rows in ((NS, OF_NAMESPACES), (T, OF_TOPICS), (f"{V2}/persistent/public/default/p", OF_TOPICS)):
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
            await broker.topic_manager.policies.read_set_policies(NamespaceName("public", "default"), None)
            == before
            == Policies()
        )


def test_every_policy_has_a_row_and_every_row_a_value_here() -> None:
    fields = {name for row in POLICIES for name in row.fields}
    quotas = {name for name in NAMES if name.startswith("backlog_quota")}
    letters = {name for name in NAMES if name.startswith("dead_letter")}
    assert fields | quotas | letters == set(NAMES)
    assert set(VALUES) == {_named(row) for row in POLICIES}


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
    row = next(each for each in POLICIES if each.namespace == name)
    with pytest.raises(BadRequest) as refused:
        row.take(convert_value(value, row.kind, name))
    assert refused.value.status_code == status


def test_quotas_below_one_byte_are_refused_and_minus_one_is_no_limit() -> None:
    assert parse_quota(BacklogQuota(limitSize=-1), "destination_storage") == {"backlog_quota_bytes": 0}
    assert parse_quota(BacklogQuota(limit=1), "destination_storage") == {"backlog_quota_bytes": 1}
    for given, kind in ((BacklogQuota(limitSize=0), "destination_storage"), (BacklogQuota(limitTime=1), "both")):
        with pytest.raises(BadRequest):
            parse_quota(given, kind)
    assert make_quota_map(Policies()) == {}
