"""Routes of namespaces (creation, properties, bundles, topics and backlogs), of tenants, and of the one cluster.

Also in this file, below its heading: permissions on namespaces, topics and subscriptions (permissions).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response

from ...metadata.records import BrokerRecord, GrantsRecord
from ...proto import operations as op
from ...proto.errors import NotFound
from ...proto.names import NamespaceName, TopicName, check_role
from ...proto.operations import Operation
from ...proto.policies import Policies, check_policies, check_properties, decode_policies
from ...proto.statistics import NamespaceInfo, Permissions
from ..access.authorizer import set_role_grant
from ..cluster.bundles_core import BUNDLES_PER_NAMESPACE_MAX, HASH_RANGE
from ..cluster.isolation_core import BrokerIsolation, read_isolation
from .call import NAMESPACE_PATH, TENANT_PATH, TOPIC_PATH, HttpError, RestRequest, register_route
from .policies import (
    POLICY_ROWS,
    UNSUPPORTED_NAMESPACE_POLICIES,
    AutoTopic,
    change_policies,
    check_own_cluster,
    convert_value,
    make_namespace_argument,
    make_quota_map,
    parse_namespace_policies,
    read_policies,
)

# --------------------------------------------------------------------------------------------------- permissions
# Permissions on namespaces, topics and subscriptions.


def _roles(found: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {role: list(actions) for role, actions in sorted(found.items())}


def _actions(call: RestRequest) -> list[str]:
    return call.parse_body(list[str])


@register_route("GET", NAMESPACE_PATH + "/permissions", "The grants of the namespace.", answer="{role: [action]}")
async def permissions_of_namespace(call: RestRequest) -> object:
    found = await call.call_local(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.roles)


@register_route(
    "GET", NAMESPACE_PATH + "/permissions/subscription", "The roles of subscriptions.", answer="{subscription: [role]}"
)
async def permissions_of_subscriptions(call: RestRequest) -> object:
    found = await call.call_local(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.subscriptions)


@register_route("POST", NAMESPACE_PATH + "/permissions/subscription/{subscription}",
    "The only roles of a subscription.",
       body="[role]")  # fmt: skip
async def grant_on_subscription(call: RestRequest) -> None:
    given = {"subscription": call.names["subscription"], "roles": _actions(call)}
    await _change(call, grant_subscription=given)


@register_route("POST", NAMESPACE_PATH + "/permissions/{role}", "Grants actions to a role.", body="[action]")
async def grant_on_namespace(call: RestRequest) -> None:
    await _change(call, grant={"role": call.names["role"], "actions": _actions(call)})


@register_route(
    "DELETE", NAMESPACE_PATH + "/permissions/{subscription}/{role}", "A role leaves the list of a subscription."
)
async def revoke_on_subscription(call: RestRequest) -> None:
    given = {"subscription": call.names["subscription"], "roles": [call.names["role"]]}
    await _change(call, revoke_subscription=given)


@register_route("POST", NAMESPACE_PATH + "/subscriptionAuthMode",
    "None, or Prefix: subscriptions are named by their role.",
       body='"None" | "Prefix"')  # fmt: skip
async def set_auth_mode(call: RestRequest) -> None:
    mode = call.parse_body(str).lower()
    if mode not in ("none", "prefix"):
        raise HttpError(f"the mode is None or Prefix, not {mode[:40]!r}", 412)
    await _change(call, prefix_mode=mode == "prefix")


async def _change(call: RestRequest, **change: Any) -> None:
    await call.call_local(op.CHANGE_PERMISSIONS, namespace=str(call.namespace), **change)


# ------------------------------------------------------------------ of a topic
@register_route(
    "GET", TOPIC_PATH + "/permissions", "The grants of the topic, and of its namespace.", answer="{role: [action]}"
)
async def permissions_of_topic(call: RestRequest) -> object:
    topic = call.topic.base
    own = await call.call_local(op.GET_PERMISSIONS, topic=topic.full)
    found = _roles((await call.call_local(op.GET_PERMISSIONS, namespace=str(topic.namespace_name))).roles)
    for role, actions in _roles(own.roles).items():
        found[role] = sorted({*found.get(role, ()), *actions})
    return found


@register_route("POST", TOPIC_PATH + "/permissions/{role}", "Grants actions on the topic to a role.", body="[action]")
async def grant_on_topic(call: RestRequest) -> None:
    grant = {"role": call.names["role"], "actions": _actions(call)}
    await call.call_local(op.CHANGE_PERMISSIONS, topic=call.topic.base.full, grant=grant)


# ------------------------------------------------------------------------------------------------------- tenants




class TenantInfo(msgspec.Struct):
    """The JSON body that describes a tenant. `adminRoles`: the roles that may administer the tenant; `allowedClusters`:
    the clusters in which its namespaces may be. None: the body does not say."""

    adminRoles: tuple[str, ...] | None = None
    allowedClusters: tuple[str, ...] | None = None


@register_route("GET", TENANT_PATH, "A tenant.", answer="{adminRoles, allowedClusters}")
async def get_tenant(call: RestRequest) -> object:
    found = await call.call_local(op.GET_TENANT, name=call.names["tenant"])
    return TenantInfo(found.admin_roles, found.allowed_clusters or (call.broker.config.cluster,))


@register_route("PUT", TENANT_PATH, "Makes a tenant.", body="{adminRoles, allowedClusters}")
async def create_tenant(call: RestRequest) -> None:
    await call.call_local(op.CREATE_TENANT, **_spec(call))


@register_route("POST", TENANT_PATH, "Changes a tenant.", body="{adminRoles, allowedClusters}")
async def update_tenant(call: RestRequest) -> None:
    await call.call_local(op.UPDATE_TENANT, **_spec(call))


def _spec(call: RestRequest) -> dict[str, object]:
    """Returns the arguments of a tenant operation, from the request. Raises HttpError (412) if the body names another
    cluster than this one."""
    given = TenantInfo() if call.has_empty_body else call.parse_body(TenantInfo)
    clusters, own = tuple(given.allowedClusters or ()), call.broker.config.cluster
    unknown = [each for each in clusters if each != own]
    if unknown:
        raise HttpError(f"there is no cluster {unknown[0][:100]!r} here, only {own!r}", 412)
    return {"name": call.names["tenant"], "admin_roles": given.adminRoles or (), "allowed_clusters": clusters}


@register_route("DELETE", TENANT_PATH, "Deletes a tenant; with `force` its namespaces and topics first.")
async def delete_tenant(call: RestRequest) -> None:
    name = call.names["tenant"]
    await call.authorize(op.DELETE_TENANT, name=name)
    if call.parse_flag("force"):
        for each in await call.call_local(op.LIST_NAMESPACES, name=name):
            await call.call_local(op.DELETE_NAMESPACE, name=each, force=True)
    await call.call_local(op.DELETE_TENANT, name=name)


# ------------------------------------------------------------------ the cluster
CLUSTER_PATH = "/admin/v2/clusters/{cluster}"


@register_route("GET", "/admin/v2/clusters", "The clusters: this one.", answer="[name]")
async def list_clusters(call: RestRequest) -> list[str]:
    return [call.broker.config.cluster]


@register_route("GET", CLUSTER_PATH, "Where clients reach the cluster.", answer="ClusterData")
async def get_cluster(call: RestRequest) -> object:
    call.check_cluster_in_path()
    mine = next((each for each in await call.broker.list_brokers() if each.name == call.broker.name), None)
    urls = mine.pulsar.get("", ()) if mine is not None else ()
    http = mine.http if mine is not None else ""
    return {
        "serviceUrl": http if http.startswith("http://") else None,
        "serviceUrlTls": http if http.startswith("https://") else None,
        "brokerServiceUrl": next((url for url in urls if url.startswith("pulsar://")), None),
        "brokerServiceUrlTls": next((url for url in urls if url.startswith("pulsar+ssl://")), None),
        "brokerClientTlsEnabled": False, "peerClusterNames": None, "migrated": False,
    }  # fmt: skip


@register_route(
    "PUT", CLUSTER_PATH, "Answers 204 for this cluster: it exists; another one cannot be made.", body="ClusterData"
)
async def create_cluster(call: RestRequest) -> None:
    """Answers a request to create a cluster. Accepts this broker's own cluster, although it exists already, because
    set-up scripts of client test suites send this request first. Refuses any other cluster. Raises HttpError (405) for
    such a cluster, and the errors of `RestRequest.authorize`."""
    await call.authorize(op.LIST_BROKERS)
    if call.names["cluster"] != call.broker.config.cluster:
        raise HttpError(f"there is one cluster here, {call.broker.config.cluster!r}; another one cannot be made", 405)


@register_route("GET", CLUSTER_PATH + "/peers", "None: clusters are not linked.", answer="[name]")
async def peers(call: RestRequest) -> list[str]:
    call.check_cluster_in_path()
    return []


@register_route("GET", CLUSTER_PATH + "/failureDomains", "None: racks of bookies are theirs.", answer="{}")
async def failure_domains(call: RestRequest) -> dict[str, object]:
    call.check_cluster_in_path()
    return {}


def _make_isolation_data(name: NamespaceName, asks: BrokerIsolation, brokers: Sequence[BrokerRecord]) -> object:
    """Returns Pulsar's form of a policy broker-isolation. Pulsar's brokers are patterns of addresses; here they are the
    addresses of the brokers that have the labels now."""
    addresses = {each.name: re.escape(each.http.partition("://")[2] or each.endpoint) for each in brokers}
    primary = [each.name for each in brokers if asks.is_primary(each)]
    secondary = [each.name for each in brokers if each.name not in primary and asks.is_fallback(each)]
    return {
        "namespaces": [re.escape(str(name))], "primary": sorted(addresses[each] for each in primary),
        "secondary": sorted(addresses[each] for each in secondary),
        "auto_failover_policy": {
            "policy_type": "min_available",
            "parameters": {"min_limit": str(asks.primaries_min), "usage_threshold": "100"},
        },
    }  # fmt: skip


async def _read_isolation(call: RestRequest, name: NamespaceName) -> BrokerIsolation | None:
    return read_isolation(await call.broker.policies.read_uninherited_policies(name, None))


@register_route(
    "GET", CLUSTER_PATH + "/namespaceIsolationPolicies",
    "The policies `brokerIsolation`, each by the name of its namespace, with the brokers that have the labels now.",
    answer="{namespace: NamespaceIsolationData}",
)  # fmt: skip
async def isolation_policies(call: RestRequest) -> dict[str, object]:
    """Returns the policies broker-isolation that are set for namespaces, in Pulsar's form. Reads one record for each
    namespace. Raises the errors of `RestRequest.authorize` and of the metadata."""
    call.check_cluster_in_path()
    await call.authorize(op.LIST_BROKERS)
    found, brokers, catalog = dict[str, object](), await call.broker.list_brokers(), call.broker.catalog
    for tenant in await catalog.list_tenants():
        for text in await catalog.list_namespaces(tenant):
            name = NamespaceName.parse(text)
            if (asks := await _read_isolation(call, name)) is not None:
                found[text] = _make_isolation_data(name, asks, brokers)
    return found


@register_route(
    "GET", CLUSTER_PATH + "/namespaceIsolationPolicies/{tenant}/{namespace}",
    "That of one namespace; 404: it has none.", answer="NamespaceIsolationData",
)  # fmt: skip
async def isolation_policy(call: RestRequest) -> object:
    """Returns the policy broker-isolation of one namespace, in Pulsar's form. Raises NotFound if it has none, and the
    errors of `RestRequest.authorize` and of the metadata."""
    call.check_cluster_in_path()
    await call.authorize(op.LIST_BROKERS)
    if (asks := await _read_isolation(call, call.namespace)) is None:
        raise NotFound(f"namespace {call.namespace} has no policy of isolation")
    return _make_isolation_data(call.namespace, asks, await call.broker.list_brokers())


NO_ADDRESS_PATTERNS = (
    "brokers are not chosen by patterns of their addresses, but by labels: start them with 'magnetar broker --labels "
    "tier=gold', and set 'magnetar namespaces set-broker-isolation TENANT/NAMESPACE --primary tier=gold --fallback "
    "LABELS --min-primaries N' (POST {namespace}/brokerIsolation) for each namespace"
)
_ISOLATION_POLICY = CLUSTER_PATH + "/namespaceIsolationPolicies/{policy}"


async def _refuse_address_patterns(call: RestRequest) -> None:
    """Raises HttpError (405): a policy of isolation by patterns of addresses is neither set nor deleted. Raises the
    errors of `RestRequest.authorize` before."""
    call.check_cluster_in_path()
    await call.authorize(op.LIST_BROKERS)
    raise HttpError(NO_ADDRESS_PATTERNS, 405)


@register_route("POST", _ISOLATION_POLICY, "405: labels choose the brokers of a namespace.", body="any")
async def set_isolation_policy(call: RestRequest) -> None:
    await _refuse_address_patterns(call)


@register_route("DELETE", _ISOLATION_POLICY, "405: `{N}/brokerIsolation` is deleted instead.")
async def delete_isolation_policy(call: RestRequest) -> None:
    await _refuse_address_patterns(call)


AUTO_PARTITIONS_MAX = 10_000


# ------------------------------------------------------------------ itself
@register_route(
    "GET", NAMESPACE_PATH, "The policies of a namespace, with every key that Pulsar has.", answer="Policies"
)
async def get_namespace(call: RestRequest) -> object:
    name, place = str(call.namespace), make_namespace_argument(call)
    spec = await call.call_local(op.GET_NAMESPACE, name=name)
    granted = await call.call_local(op.GET_PERMISSIONS, namespace=name)
    return _shown(call, spec, granted, await read_policies(call, place), await _properties(call))


def _shown(
    call: RestRequest, spec: NamespaceInfo, granted: Permissions, policies: Policies, noted: dict[str, str]
) -> dict[str, object]:
    cluster = call.broker.config.cluster
    found: dict[str, object] = {}
    for row in POLICY_ROWS:
        if row.key:
            value = row.show(policies)
            found[row.key] = value if not row.by_cluster else {} if value is None else {cluster: value}
    return {
        "auth_policies": {
            "namespace_auth": granted.roles, "destination_auth": {}, "subscription_auth_roles": granted.subscriptions,
        },
        "replication_clusters": [cluster], "bundles": _bundles(spec.bundles),
        "backlog_quota_map": make_quota_map(policies), "clusterDispatchRate": {}, "replicatorDispatchRate": {}, **found,
        "subscription_types_enabled": found["subscription_types_enabled"] or [],
        "autoTopicCreationOverride": _auto_topics(spec), "latency_stats_sample_rate": {}, "deleted": False,
        **{row.key: row.value for row in UNSUPPORTED_NAMESPACE_POLICIES if row.key and row.key not in found},
        "subscription_auth_mode": "Prefix" if granted.prefix_mode else "None",
        "schema_auto_update_compatibility_strategy": None,
        "deduplicationSnapshotIntervalSeconds": None, "properties": noted,
        "migrated": False, "dispatcherPauseOnAckStatePersistentEnabled": None,
        "entryFilters": None, "allowed_clusters": [],
    }  # fmt: skip


def _bundles(count: int) -> dict[str, object]:
    bounds = [min(-(-number * HASH_RANGE // count), HASH_RANGE - 1) for number in range(count + 1)]
    return {"boundaries": [f"0x{each:08x}" for each in bounds], "numBundles": count}


def _auto_topics(spec: NamespaceInfo) -> dict[str, object] | None:
    if not spec.is_creation_set and spec.auto_topic_creation and not spec.default_partitions:
        return None
    return {
        "allowAutoTopicCreation": spec.auto_topic_creation,
        "topicType": "partitioned" if spec.default_partitions else "non-partitioned",
        "defaultNumPartitions": spec.default_partitions or None,
    }


@register_route("PUT", NAMESPACE_PATH, "Makes a namespace.", body="Policies | BundlesData | empty")
async def create_namespace(call: RestRequest) -> None:
    given: Any = {} if call.has_empty_body else call.parse_body(dict[str, object])
    name = str(call.namespace)
    spec: dict[str, object] = {"name": name}
    await call.authorize(op.CREATE_NAMESPACE, **spec)
    check_own_cluster(call, convert_value(given.get("replication_clusters") or [], list[str], "replication_clusters"))
    spec["bundles"] = _count(given)
    if given.get("autoTopicCreationOverride"):
        spec |= _auto(convert_value(given["autoTopicCreationOverride"], AutoTopic, "autoTopicCreationOverride"))
    fields, grants = parse_namespace_policies(given), _grants(given)
    check_policies(decode_policies(msgspec.json.encode(fields).decode()))
    noted = check_properties(convert_value(given.get("properties") or {}, dict[str, str], "properties"))
    await call.call_local(op.CREATE_NAMESPACE, **spec)
    if fields:
        await change_policies(call, {"namespace": name}, fields)
    if noted:
        await _store_properties(call, noted)
    for role, actions in grants.items():
        await call.call_local(op.CHANGE_PERMISSIONS, namespace=name, grant={"role": role, "actions": actions})


def _count(given: Mapping[str, Any]) -> int:
    """Returns the number of bundles in the body; 0: the default. Raises HttpError (412) if the number is invalid."""
    bundles = given.get("bundles") or given
    count = convert_value(bundles, dict[str, object], "bundles").get("numBundles") or 0
    count = int(convert_value(count, int, "numBundles"))
    if not 0 <= count <= BUNDLES_PER_NAMESPACE_MAX:
        raise HttpError(f"numBundles is 1 to {BUNDLES_PER_NAMESPACE_MAX}, not {count}", 412)
    return count


def _grants(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the actions that the body grants, by role. Raises an error if a role or an action is invalid."""
    auth = convert_value(given.get("auth_policies") or {}, dict[str, object], "auth_policies")
    kind = dict[str, list[str]]
    found: dict[str, list[str]] = convert_value(auth.get("namespace_auth") or {}, kind, "auth_policies.namespace_auth")
    for role, actions in found.items():
        set_role_grant(GrantsRecord(), "", check_role(role), actions)
    return found


# ------------------------------------------------------------------ topics that are made by themselves
@register_route("GET", NAMESPACE_PATH + "/autoTopicCreation",
    "Whether topics are made at their first use; 204: as the broker says.",
       answer="AutoTopicCreationOverride")  # fmt: skip
async def get_auto_topics(call: RestRequest) -> object:
    return _auto_topics(await call.call_local(op.GET_NAMESPACE, name=str(call.namespace)))


@register_route("POST", NAMESPACE_PATH + "/autoTopicCreation", "Sets that, and how many partitions they get.",
       body="AutoTopicCreationOverride")  # fmt: skip
async def set_auto_topics(call: RestRequest) -> None:
    name = str(call.namespace)
    await call.call_local(op.UPDATE_NAMESPACE, name=name, **_auto(call.parse_body(AutoTopic)))


@register_route("DELETE", NAMESPACE_PATH + "/autoTopicCreation", "As the broker says.")
async def remove_auto_topics(call: RestRequest) -> None:
    await call.call_local(op.UPDATE_NAMESPACE, name=str(call.namespace))


def _auto(given: AutoTopic) -> dict[str, object]:
    """Returns the fields of a namespace record for the policy of automatic topic creation. Raises HttpError (412),
    with Pulsar's text, if the number of partitions does not fit the topic type."""
    partitions = given.defaultNumPartitions or 0
    if given.allowAutoTopicCreation and (wrong := _wrong_partitions(given)):
        text = "Invalid configuration for autoTopicCreationOverride. the detail is [defaultNumPartitions]"
        raise HttpError(f"{text} {wrong}", 412)
    is_on = given.allowAutoTopicCreation
    return {
        "is_creation_set": True, "auto_topic_creation": is_on, "default_partitions": partitions if is_on else 0,
    }  # fmt: skip


def _wrong_partitions(given: AutoTopic) -> str:
    """Returns why the number of partitions does not fit the topic type, or "" if it does."""
    partitions = given.defaultNumPartitions
    if given.topicType != "partitioned":
        return "is not allowed to be set when the type is non-partition." if partitions else ""
    if partitions is None:
        return "cannot be null when the type is partitioned."
    if partitions < 1:
        return "cannot be less than 1 for partition type."
    return f"cannot be larger than {AUTO_PARTITIONS_MAX}." if partitions > AUTO_PARTITIONS_MAX else ""


# ------------------------------------------------------------------ topics and bundles
@register_route("GET", NAMESPACE_PATH + "/topics",
       "The topics, partitions one by one; `mode`: PERSISTENT (the default), NON_PERSISTENT or ALL.",
       answer="[full name]")  # fmt: skip
async def topics_of_namespace(call: RestRequest) -> object:
    mode = call.query.get("mode", "").upper() or "PERSISTENT"
    if mode not in ("ALL", "PERSISTENT", "NON_PERSISTENT"):
        raise HttpError(f"mode is PERSISTENT, NON_PERSISTENT or ALL, not {mode[:40]!r}", 412)
    names = await call.call_local(op.LIST_TOPICS, namespace=str(call.namespace), partitions=True)
    prefixes = {"ALL": "", "PERSISTENT": "persistent:", "NON_PERSISTENT": "non-persistent:"}
    return [name for name in names if name.startswith(prefixes[mode])]


@register_route("GET", NAMESPACE_PATH + "/bundles", "The bundles.", answer="BundlesData")
async def bundles(call: RestRequest) -> object:
    return _bundles((await call.call_local(op.GET_NAMESPACE, name=str(call.namespace))).bundles)


# ------------------------------------------------------------------ properties
async def _properties(call: RestRequest) -> dict[str, str]:
    return await call.call_local(op.GET_PROPERTIES, namespace=str(call.namespace))


async def _store_properties(call: RestRequest, properties: dict[str, str]) -> None:
    await call.call_local(op.CHANGE_PROPERTIES, namespace=str(call.namespace), set=properties)


@register_route("GET", NAMESPACE_PATH + "/property/{key}", "One of them; 404: it is missing.", answer="text")
async def get_property(call: RestRequest) -> Response:
    return PlainTextResponse(_one(call, await _properties(call)))


@register_route("PUT", NAMESPACE_PATH + "/property/{key}/{value}", "It is noted.")
async def set_property(call: RestRequest) -> None:
    await _store_properties(call, {call.names["key"]: call.names["value"]})


@register_route(
    "DELETE", NAMESPACE_PATH + "/property/{key}", "It is gone; what it was. 404: it is missing.", answer="text"
)
async def remove_property(call: RestRequest) -> Response:
    found = _one(call, await _properties(call))
    await call.call_local(op.CHANGE_PROPERTIES, namespace=str(call.namespace), remove=[call.names["key"]])
    return PlainTextResponse(found)


def _one(call: RestRequest, properties: dict[str, str]) -> str:
    if (key := call.names["key"]) not in properties:
        raise NotFound(f"namespace {call.namespace} has no property {key[:100]!r}")
    return properties[key]


# ------------------------------------------------------------------ unloading
@register_route("POST", NAMESPACE_PATH + "/clearBacklog", "Every subscription of every topic has no backlog.")
async def clear_backlog(call: RestRequest) -> None:
    await _clear(call, "")


@register_route(
    "POST", NAMESPACE_PATH + "/clearBacklog/{subscription}", "The subscription has no backlog, of any topic."
)
async def clear_backlog_of_subscription(call: RestRequest) -> None:
    await _clear(call, call.names["subscription"])


async def _clear(call: RestRequest, subscription: str) -> None:
    await _each_topic(call, op.SKIP_MESSAGES, name=subscription, messages=-1)


@register_route(
    "POST", NAMESPACE_PATH + "/unsubscribe/{subscription}", "Deletes the subscription of every topic.", busy=412
)
async def unsubscribe(call: RestRequest) -> None:
    await _each_topic(call, op.DELETE_SUBSCRIPTION, name=call.names["subscription"])


async def _each_topic(call: RestRequest, operation: Operation[None], **arguments: object) -> None:
    """Calls the operation for each persistent topic of a namespace; skips topics without that subscription."""
    name = str(call.namespace)
    await call.authorize(op.GET_NAMESPACE, name=name)
    for topic in await call.call_local(op.LIST_TOPICS, namespace=name, partitions=True):
        if topic.startswith("persistent:"):
            with contextlib.suppress(NotFound):
                await call.call_topic_owner(operation, TopicName.parse(topic), **arguments)
