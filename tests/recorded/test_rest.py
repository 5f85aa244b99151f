"""Every route of REST answers what is written in rest.txt: status, headers that programs read, bytes."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.broker.rest.http import Answer
from tests.recorded.recording import Recording, Scene, calls, scene, sorted_json

Ask = Callable[..., Awaitable[None]]
HEADERS = re.compile(r"content-type|location|www-authenticate|allow|x-pulsar-.*")
N, T, B, S = (
    "/admin/v2/namespaces/public/default", "/admin/v2/persistent/public/default/orders",
    "/admin/v2/persistent/public/default/bills", "/admin/v2/schemas/public/default/orders",
)  # fmt: skip
V3, BK = "/admin/v3/transactions", "/admin/v2/brokers"
SCHEMA = json.dumps({"type": "JSON", "properties": {"p": "1"}, "schema": json.dumps(
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
)})  # fmt: skip
OTHER = json.dumps({"type": "JSON", "properties": None, "schema": json.dumps(
    {"type": "record", "name": "R", "fields": [{"name": "b", "type": "int"}]}
)})  # fmt: skip

SHOP = json.dumps({
    "bundles": {"numBundles": 8}, "max_producers_per_topic": 3, "properties": {"a": "b"},
    "auth_policies": {"namespace_auth": {"web": ["produce"]}},
    "publishMaxMessageRate": {"standalone": {"publishThrottlingRateInMsg": 7}},
    "backlog_quota_map": {"destination_storage": {"limit": 100, "policy": "producer_exception"}},
})  # fmt: skip

OF_PROCESS = f"""
GET /healthz
GET /livez
GET /readyz
GET /status.html
GET /openapi.json
GET {BK}
GET {BK}/standalone
GET {BK}/elsewhere
GET {BK}/leaderBroker
GET {BK}/health
GET {BK}/ready
GET {BK}/configuration
GET {BK}/configuration/runtime
POST {BK}/configuration/message_ttl_s/60
POST {BK}/configuration/subscriptionTypesEnabled/Shared,Failover
POST {BK}/configuration/allowAutoTopicCreation/true
POST {BK}/configuration/max_message_bytes/60
POST {BK}/configuration/message_ttl_s/soon
POST {BK}/configuration/retention_minutes/5
GET {BK}/configuration/values
DELETE {BK}/configuration/message_ttl_s
DELETE {BK}/configuration/subscription_types
DELETE {BK}/configuration/auto_topic_creation
DELETE {BK}/configuration/listen
GET {BK}/internal-configuration
PUT /admin/v3/brokers/balance
GET /admin/v3/brokers/balance
GET /admin/v3/brokers/shared-limits
GET /admin/v3/brokers/shared-limits?here=true
GET /admin/v3/bundles
PUT /admin/v3/brokers/none/drain
DELETE /admin/v3/brokers/none/drain
DELETE /admin/v3/brokers/none
GET /admin/v2/bookies/all
GET /admin/v2/bookies/racks-info
GET /admin/v2/bookies/racks-info/none
GET /lookup/v2/topic/persistent/public/default/orders
GET /lookup/v2/topic/persistent/public/default/orders?listenerName=none
GET /lookup/v2/topic/persistent/public/default/orders/bundle
GET /lookup/v2/topic/persistent/public/default/none/bundle
GET /lookup/v2/service-url
GET /admin/v2/clusters
GET /admin/v2/clusters/standalone
GET /admin/v2/clusters/elsewhere
PUT /admin/v2/clusters/standalone {{}}
PUT /admin/v2/clusters/elsewhere {{}}
GET /admin/v2/clusters/standalone/peers
GET /admin/v2/clusters/standalone/failureDomains
GET /admin/v2/clusters/standalone/namespaceIsolationPolicies
GET /admin/v2/clusters/standalone/namespaceIsolationPolicies/public/default
POST /admin/v2/clusters/standalone/namespaceIsolationPolicies/mine {{"namespaces":["public/.*"],"primary":["b.*"]}}
DELETE /admin/v2/clusters/standalone/namespaceIsolationPolicies/mine
GET /admin/v2/none
PATCH /admin/v2/tenants
"""
OF_PLACES = f"""
GET /admin/v2/resourcegroups
PUT /admin/v2/resourcegroups/batch {{"publishRateInMsgs":100,"publishRateInBytes":-1}}
PUT /admin/v2/resourcegroups/batch {{"dispatchRateInBytes":2000}}
PUT /admin/v2/resourcegroups/wrong {{"publishRateInMsgs":"x"}}
PUT /admin/v2/resourcegroups/a%20b
GET /admin/v2/resourcegroups/batch
GET /admin/v2/resourcegroups/none
GET /admin/v2/resourcegroups
POST {N}/resourcegroup/none
POST {N}/resourcegroup/batch
GET {N}/resourcegroup
DELETE /admin/v2/resourcegroups/batch
DELETE {N}/resourcegroup
DELETE /admin/v2/resourcegroups/batch
DELETE /admin/v2/resourcegroups/batch
GET /admin/v2/tenants
PUT /admin/v2/tenants/acme {{"adminRoles":["ops","ops","dev"],"allowedClusters":["standalone"]}}
PUT /admin/v2/tenants/acme {{}}
PUT /admin/v2/tenants/other {{"allowedClusters":["elsewhere"]}}
PUT /admin/v2/tenants/a%20b
PUT /admin/v2/tenants/wrong {{"adminRoles":7}}
GET /admin/v2/tenants/acme
GET /admin/v2/tenants/none
POST /admin/v2/tenants/acme {{"adminRoles":["dev"]}}
POST /admin/v2/tenants/none {{}}
PUT /admin/v2/namespaces/acme/shop {SHOP}
PUT /admin/v2/namespaces/acme/shop
PUT /admin/v2/namespaces/acme/two {{"numBundles":2}}
PUT /admin/v2/namespaces/acme/wrong {{"numBundles":-2}}
PUT /admin/v2/namespaces/acme/wrong {{"retention_policies":{{"retentionTimeInMinutes":1,"retentionSizeInMB":0}}}}
PUT /admin/v2/namespaces/none/shop
GET /admin/v2/namespaces/acme
GET /admin/v2/namespaces/none
GET /admin/v2/namespaces/acme/shop
GET /admin/v2/namespaces/acme/two
GET {N}
GET /admin/v2/namespaces/acme/none
GET {N}/bundles
GET {N}/topics
GET {N}/topics?mode=ALL
GET {N}/topics?mode=none
GET {N}/autoTopicCreation
POST {N}/autoTopicCreation {{"allowAutoTopicCreation":true,"topicType":"partitioned","defaultNumPartitions":2}}
GET {N}/autoTopicCreation
POST {N}/autoTopicCreation {{"allowAutoTopicCreation":true,"topicType":"partitioned","defaultNumPartitions":0}}
POST {N}/autoTopicCreation {{"allowAutoTopicCreation":true,"topicType":"non-partitioned","defaultNumPartitions":2}}
POST {N}/autoTopicCreation {{"allowAutoTopicCreation":false}}
GET {N}/autoTopicCreation
DELETE {N}/autoTopicCreation
PUT {N}/properties {{"owner":"ada","tier":"1"}}
PUT {N}/properties {{"":"ada"}}
GET {N}/properties
PUT {N}/property/owner/eve%2Fbob
GET {N}/property/owner
GET {N}/property/none
DELETE {N}/property/tier
DELETE {N}/property/tier
DELETE {N}/properties
GET {N}/properties
GET {N}/permissions
POST {N}/permissions/web ["produce","consume"]
POST {N}/permissions/web ["fly"]
POST {N}/permissions/app ["consume"]
DELETE {N}/permissions/app
GET {N}/permissions
POST {N}/permissions/subscription/billing ["web","app"]
GET {N}/permissions/subscription
DELETE {N}/permissions/billing/app
DELETE {N}/permissions/billing/web
GET {N}/permissions/subscription
POST {N}/subscriptionAuthMode "Prefix"
POST {N}/subscriptionAuthMode "None"
POST {N}/subscriptionAuthMode "Other"
POST {T}/permissions/app ["produce"]
GET {T}/permissions
DELETE {T}/permissions/app
GET {T}/permissions
DELETE {N}/permissions/web
GET {N}/backlogQuotaMap
POST {N}/backlogQuota {{"limitSize":100,"policy":"producer_exception"}}
POST {N}/backlogQuota?backlogQuotaType=message_age {{"limitTime":60}}
POST {N}/backlogQuota?backlogQuotaType=none {{"limitTime":60}}
GET {N}/backlogQuotaMap
DELETE {N}/backlogQuota
GET {N}/backlogQuotaMap
DELETE {N}/backlogQuota?backlogQuotaType=message_age
DELETE {N}/backlogQuota?backlogQuotaType=none
GET {T}/backlogQuotaMap?applied=true
POST {T}/backlogQuota {{"limit":100}}
GET {T}/backlogQuotaMap
DELETE {T}/backlogQuota
GET {N}/replication
POST {N}/replication ["standalone"]
POST {N}/replication ["elsewhere"]
POST {N}/replication []
GET {T}/replication
GET {T}/replication?applied=true
POST {T}/replication ["standalone"]
DELETE {T}/replication
"""
FIXED = (
    "encryptionRequired", "offloadThreshold", "offloadThresholdInSeconds", "offloadDeletionLagMs", "offloadPolicies",
    "replicatorDispatchRate", "persistence/bookieAffinity", "antiAffinity",
)  # fmt: skip
OF_TOPICS = f"""
GET /admin/v2/persistent/public/default
GET /admin/v2/non-persistent/public/default
GET /admin/v2/persistent/public/none
PUT /admin/v2/persistent/public/default/plain {{"a":"b"}}
PUT /admin/v2/persistent/public/default/plain
PUT /admin/v2/persistent/public/none/plain
GET /admin/v2/persistent/public/default/plain/properties
PUT /admin/v2/persistent/public/default/plain/properties {{"c":"d"}}
DELETE /admin/v2/persistent/public/default/plain/properties?key=a
DELETE /admin/v2/persistent/public/default/plain/properties
GET /admin/v2/persistent/public/default/plain/properties
PUT /admin/v2/persistent/public/default/wide/partitions 2
PUT /admin/v2/persistent/public/default/wide/partitions 2
PUT /admin/v2/persistent/public/default/many/partitions {{"partitions":2,"properties":{{"a":"b"}}}}
PUT /admin/v2/persistent/public/default/none/partitions -2
PUT /admin/v2/persistent/public/default/none/partitions "x"
GET /admin/v2/persistent/public/default/partitioned
GET /admin/v2/persistent/public/default/wide/partitions
GET {T}/partitions
GET /admin/v2/persistent/public/default/none/partitions?checkAllowAutoCreation=true
GET /admin/v2/persistent/public/default/none/partitions
POST /admin/v2/persistent/public/default/wide/partitions 3
POST /admin/v2/persistent/public/default/wide/partitions 2
POST /admin/v2/persistent/public/default/wide/createMissedPartitions
POST {T}/createMissedPartitions
DELETE /admin/v2/persistent/public/default/wide
DELETE /admin/v2/persistent/public/default/many/partitions
DELETE /admin/v2/persistent/public/default/plain/partitions
DELETE /admin/v2/persistent/public/default/plain
DELETE /admin/v2/persistent/public/default/plain
DELETE {T}
GET /admin/v3/topics?contains=/none
GET /admin/v3/topics?sort=colour
GET {T}/stats
GET {T}/stats?getPreciseBacklog=true&excludePublishers=true&excludeConsumers=true
GET {T}/stats?getPreciseBacklog=perhaps
GET {B}/stats
GET /admin/v2/persistent/public/default/wide/stats
GET /admin/v2/persistent/public/default/wide/partitioned-stats
GET /admin/v2/persistent/public/default/wide/partitioned-stats?perPartition=false
GET {T}/partitioned-stats
GET /admin/v2/broker-stats/topics
GET {T}/subscription/billing/why
GET {T}/subscription/none/why
GET {T}/why-kept
GET {T}/ledgers
GET {T}/ledgers?limit=201
GET {T}/subscription/billing/cursor?buckets=2
GET {T}/subscription/billing/cursor?buckets=1001
PUT {T}/subscription/billing/filter?filter=region%20%3D%20'eu'
PUT {T}/subscription/billing/filter?filter=region%20%3D
GET {T}/subscription/billing/filter
PUT {T}/subscription/billing/filter
GET {T}/filter-trial?filter=region%20%3D%20'eu'
GET {T}/filter-trial?filter=region%20%3D%20'eu'&messages=10001
GET /admin/v3/metadata?node=/tenants
GET /admin/v3/metadata?node=/tenants/public
GET /admin/v3/metadata?node=tenants
GET /admin/v3/security
GET {T}/internalStats
GET /admin/v2/persistent/public/default/wide/partitioned-internalStats
GET {T}/partitioned-internalStats
GET {T}/internal-info
GET {T}/lastMessageId
GET /admin/v2/persistent/public/default/wide/lastMessageId
GET {T}/messageid/0
GET {T}/messageid/9999999999999
GET {T}/messageid/then
PUT {T}/backlogSize {{"ledgerId":-1,"entryId":-1}}
PUT {T}/backlogSize {{"ledgerId":-2,"entryId":-1}}
GET {T}/subscriptions
GET /admin/v2/persistent/public/default/none/subscriptions
PUT {T}/subscription/s1
PUT {T}/subscription/s1
PUT {T}/subscription/s2 "earliest"
PUT {T}/subscription/s3 {{"ledgerId":-1,"entryId":-1,"properties":{{"a":"b"}}}}
PUT {T}/subscription/s4 "sometime"
PUT {T}/subscription/s4 {{"ledgerId":-9,"entryId":-1}}
PUT /admin/v2/persistent/public/default/wide/subscription/s1
PUT /admin/v2/persistent/public/default/wide/subscription/s1
PUT /admin/v2/persistent/public/default/wide-partition-2/subscription/a0
GET /admin/v2/persistent/public/default/wide/subscriptions
DELETE /admin/v2/persistent/public/default/wide-partition-2/subscription/a0
GET {T}/subscription/s3/properties
PUT {T}/subscription/s3/properties {{"c":"d"}}
GET {T}/subscription/s3/properties
DELETE {T}/subscription/s3/properties
GET {T}/subscription/s3/properties
GET {T}/subscription/none/properties
GET {T}/subscription/s2/position/1
GET {T}/subscription/s2/position/9
GET {T}/subscription/s2/position/0
GET {T}/examinemessage
GET {T}/examinemessage?initialPosition=earliest&messagePosition=2
GET {T}/examinemessage?initialPosition=middle
GET {T}/ledger/{{ledger}}/entry/0
GET {T}/ledger/{{ledger}}/entry/9999
GET {T}/trace?ledger_id={{ledger}}&entry_id=0&batch_index=-1
GET {T}/trace?ledger_id=1&entry_id=x
POST {T}/cancel-delayed?ledger_id={{ledger}}&entry_id=0
POST {T}/cancel-delayed?ledger_id={{ledger}}&entry_id=0&batch_index=7
POST {T}/cancel-delayed?entry_id=0
POST {T}/cancel-delayed?ledger_id=1&entry_id=x
GET {T}/schedules
POST {T}/schedules/nightly {{"cron":"30 2 * * *","zone":"Europe/Berlin","payload":"close","key":"k"}}
POST {T}/schedules/nightly {{"everyMs":10000}}
POST {T}/schedules/never {{"cron":"0 0 30 2 *"}}
POST {T}/schedules/odd {{"everyMs":10000,"payloadBase64":"%"}}
POST {T}/schedules/nightly/pause
POST {T}/schedules/nightly/resume
POST {T}/schedules/none/run
DELETE {T}/schedules/nightly
DELETE {T}/schedules/nightly
GET {T}/subscription/s2/analyzeBacklog
POST {T}/subscription/s2/analyzeBacklog
POST {T}/subscription/s2/analyzeBacklog {{"ledgerId":1}}
POST {T}/subscription/s2/skip/1
POST {T}/subscription/s2/skip/-1
POST /admin/v2/persistent/public/default/wide/subscription/s1/skip/1
GET {T}/subscription/s2/analyzeBacklog
POST {T}/subscription/s2/skip_all
POST {T}/subscription/s2/resetcursor/0
POST {T}/subscription/s2/resetcursor/then
POST {T}/subscription/s2/resetcursor {{"ledgerId":-1,"entryId":-1,"isExcluded":false}}
POST {T}/subscription/s2/resetcursor {{"ledgerId":-1}}
POST {T}/subscription/s2/expireMessages/100
POST {T}/subscription/s2/expireMessages/0
POST {T}/subscription/s2/expireMessages {{"ledgerId":-1,"entryId":-1}}
POST {T}/all_subscription/expireMessages/100
DELETE {T}/subscription/s1
DELETE {T}/subscription/s1
DELETE {T}/subscription/billing
POST {N}/clearBacklog/s2
POST {N}/clearBacklog
POST {N}/clearBacklog/none
POST {N}/unsubscribe/s2
POST {N}/unsubscribe/none
GET {S}/schema
POST {S}/schema {SCHEMA}
POST {S}/schema {{"type":"AVRO","schema":"{{"}}
POST {S}/schema {{"type":"NONE"}}
GET {S}/schema
GET {S}/schema/0
GET {S}/schema/9
GET {S}/schema/x
GET {S}/schemas
GET {S}/metadata
POST {S}/compatibility {OTHER}
POST {S}/version {SCHEMA}
POST {S}/version {OTHER}
DELETE {S}/schema
GET {S}/schema
DELETE {S}/schema?force=true
PUT {T}/compaction
GET {T}/compaction
GET {T}/offload
PUT {T}/offload {{}}
"""
OF_TRANSACTIONS = f"""
GET {V3}/coordinators
GET {V3}/coordinatorStats?coordinatorId={{coordinator}}
GET {V3}/coordinatorStats
GET {V3}/coordinatorStats?coordinatorId=99
GET {V3}/coordinatorInternalStats/{{coordinator}}
POST {V3}/transactionCoordinator/replicas 16
POST {V3}/transactionCoordinator/replicas 4
GET {V3}/transactionMetadata/{{txn}}
GET {V3}/transactionMetadata/0/999999
GET {V3}/slowTransactions/0
GET {V3}/slowTransactions/99999999
GET {V3}/transactionInBufferStats/public/default/bills/{{txn}}
GET {V3}/transactionInPendingAckStats/public/default/orders/billing/{{txn}}
GET {V3}/transactionInPendingAckStats/public/default/orders/none/{{txn}}
GET {V3}/transactionBufferStats/public/default/bills
GET {V3}/transactionBufferStats/public/default/wide-partition-0
GET {V3}/pendingAckStats/public/default/orders/billing
GET {V3}/positionStatsInPendingAck/public/default/orders/billing/{{ledger}}/0
GET {V3}/positionStatsInPendingAck/public/default/orders/billing/99999/0
GET {V3}/pendingAckInternalStats/public/default/orders/billing
GET {V3}/transactionBufferInternalStats/public/default/bills
GET {V3}
GET {V3}?coordinatorId=x
GET {V3}/status
GET {V3}/id/{{txn}}
POST {V3}/id/{{txn}}/detach "none"
GET {V3}/halves
GET {V3}/halves?group=none
GET {V3}/halves/{{half}}
POST {V3}/halves/{{half}}/park
GET {V3}/halves?parked=true
POST {V3}/halves/{{half}}/revive
POST {V3}/halves/{{half}}/commit
POST {V3}/halves/{{half}}/rollback
POST {V3}/halves/{{other}}/rollback
GET {V3}/halves/{{other}}
POST {V3}/id/{{txn}}/abort
POST {V3}/abortTransaction/{{txn}}
"""
OF_ENDS = f"""
GET /admin/v2/broker-stats/topics
POST {T}/skipLost
POST {T}/skipLost?ledger=x
POST {T}/skipLost?forgotten=commit
POST {T}/skipLost?forgotten=x
PUT {T}/unload
PUT /admin/v2/persistent/public/default/wide/unload
POST {T}/trim
POST /admin/v2/persistent/public/default/none/trim
DELETE {T}/truncate
PUT {N}/unload
PUT {N}/0x00000000_0x40000000/unload
PUT {N}/none/unload
PUT {N}/none/split
PUT {N}/0x00000000_0x08000000/split
POST {T}/terminate
POST /admin/v2/persistent/public/default/wide/terminate
POST /admin/v2/persistent/public/default/wide/terminate/partitions
POST {T}/terminate/partitions
DELETE /admin/v2/namespaces/acme/two
DELETE /admin/v2/tenants/acme
DELETE /admin/v2/tenants/acme?force=true
DELETE /admin/v2/tenants/none
"""
POLICIES = {
    "bool": "true", "int": "5", "int | None": "5", "str": '"full"', "list": '["Shared"]', "list[str]": '["Shared"]',
    "Retention": '{"retentionTimeInMinutes":5,"retentionSizeInMB":6}',
    "Persistence": '{"bookkeeperEnsemble":1,"bookkeeperWriteQuorum":1,"bookkeeperAckQuorum":1}',
    "DispatchRate": '{"dispatchThrottlingRateInMsg":10,"ratePeriodInSecond":3}',
    "PublishRate": '{"publishThrottlingRateInMsg":10}',
    "StorageLimitBody": '{"limitSize":1000000,"policy":"producer_exception"}',
    "SubscribeRate": '{"subscribeThrottlingRatePerConsumer":10,"ratePeriodInSecond":3}',
    "AutoSubscription": '{"allowAutoSubscriptionCreation":false}',
    "DelayedDelivery": '{"active":false,"tickTime":5,"maxDeliveryDelayInMillis":6}',
    "BookieAffinity": '{"bookkeeperAffinityGroupPrimary":"fast,big","bookkeeperAffinityGroupSecondary":"slow"}',
    "BrokerIsolationLabels": '{"primaryLabels":["tier=gold"],"fallbackLabels":["*"],"primaryBrokersMin":2}',
    "InactiveTopics": '{"inactiveTopicDeleteMode":"delete_when_no_subscriptions","maxInactiveDurationSeconds":9,'
                      '"deleteWhileInactive":true}',
}  # fmt: skip
"""A value of each shape that a policy has in the document."""
TENANT = "/admin/v2/tenants/public"
PLACES = {
    N: "/namespaces/{tenant}/{namespace}/", T: "/{domain}/{tenant}/{namespace}/{topic}/", TENANT: "/tenants/{tenant}/",
}  # fmt: skip
"""Places that have policies, and how their paths are written in the document."""
WRONG = ('"x"', "-7", "{}", "")
UNORDERED = ("/openapi.json", "/admin/v2/broker-stats/topics")
UNSTEADY = ("/metrics", "/metrics/", f"{BK}/version", "/admin/v3/brokers/summaries")
"""What differs by version and by what the machine did; their status is written down."""


async def test_every_route_answers_what_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, called = Recording("rest.txt", tmp_path), set[tuple[str, str]]()
    async with scene(tmp_path, monkeypatch) as it:
        document = (await it.http.ask("GET", "/openapi.json")).json
        routes = [(method.upper(), path) for path, of in document["paths"].items() for method in of]

        async def ask(method: str, path: str, body: str = "") -> None:
            path = path.format(**it.names)
            answer = await it.http.ask(method, path, raw=body.encode())
            called.update((method, each) for verb, each in routes if verb == method and _is(each, path))
            recording.add(f"{method} {_unnamed(it, path)} {body}".rstrip(), _unnamed(it, _shown(path, answer)))

        for method, path, *body in calls(OF_PROCESS + OF_PLACES):
            await ask(method, path, *body)
        for base in (N, T, TENANT):
            await _policies(document["paths"], base, ask)
        for method, path, *body in calls(OF_TOPICS + OF_TRANSACTIONS):
            await ask(method, path, *body)
        await asyncio.sleep(0.3)
        for path in UNSTEADY:
            recording.add(f"GET {path}", str((await it.http.ask("GET", path)).status))
            called.add(("GET", path))
        for method, path, *body in calls(OF_ENDS):
            await ask(method, path, *body)
        missing = [route for route in routes if route not in called]
    assert not missing, "routes that this test does not call"
    recording.check()


async def _policies(paths: dict[str, Any], base: str, ask: Ask) -> None:
    """Sets, shows and removes each policy that the document has for the place `base`; also by values that are none."""
    of = PLACES[base]
    found: list[tuple[str, str, str]] = []  # name, the method that sets it, a value of its shape
    for path in sorted(paths):
        name, rows = path.partition(f"/admin/v2{of}")[2], {method.upper(): row for method, row in paths[path].items()}
        if name in FIXED or (name and "The policy" in str(rows.get("GET"))):
            verb = next(each for each in ("POST", "PUT") if each in rows)
            found.append((name, verb, POLICIES.get(rows[verb]["requestBody"]["description"], "true")))
    for name, verb, value in found:
        await ask("GET", f"{base}/{name}")
        await ask(verb, f"{base}/{name}", value)
        await ask("GET", f"{base}/{name}")
        await ask("GET", f"{base}/{name}?applied=true")
    await ask("GET", N)
    for name, verb, _ in found:
        for wrong in WRONG:
            await ask(verb, f"{base}/{name}", wrong)
        await ask("DELETE", f"{base}/{name}")
        await ask("GET", f"{base}/{name}")
    if base == TENANT:
        return
    await ask("DELETE", f"{base}/removeOffloadPolicies")
    await ask("POST", f"{base}/messageTTL?messageTTL=7")
    await ask("DELETE", f"{base}/messageTTL")


def _is(route: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), path.partition("?")[0]) is not None


def _shown(path: str, answer: Answer) -> str:
    headers = [f"{name}: {_in_order(name, value)}" for name, value in answer.headers.items() if HEADERS.fullmatch(name)]
    is_unordered = path in UNORDERED or (path.endswith("/properties") and answer.status == 200)
    body = sorted_json(answer.body) if is_unordered else answer.body.decode(errors="backslashreplace")
    return "\n".join([str(answer.status), *sorted(headers), body]).rstrip()


def _in_order(name: str, value: str) -> str:
    return ", ".join(sorted(value.split(", "))) if name == "allow" else value


def _unnamed(it: Scene, text: str) -> str:
    """The ids of the scene by their names."""
    for name, value in it.names.items():
        if "/" in value:
            text = text.replace(value, f"{{{name}}}").replace(f"({value.replace('/', ',')})", f"({{{name}}})")
    return text
