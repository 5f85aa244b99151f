"""Namespaces: they themselves, their bundles, topics and backlogs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from google.protobuf.message import Message
from starlette.responses import PlainTextResponse, Response

from .....metadata.records import GrantsRecord
from .....proto import wire_pb2 as wire
from .....proto.errors import NotFound
from .....proto.names import NamespaceName, TopicName, check_role
from .....proto.policies import Policies, check, check_properties, decode
from ....access.permissions import grant
from ....cluster.core.bundles import BUNDLES_MAX, HASHES
from ..call import Call
from ..errors import BadRequest
from ..policies import POLICIES, AutoTopic, converted, fields_of_namespace, show_quotas
from ..table import NAMESPACE, route
from .permissions import Grant
from .policies import change, check_clusters, of_namespace, read

AUTO_PARTITIONS_MAX = 10_000


@route("GET", "/admin/v2/namespaces/{tenant}", "The namespaces of a tenant.", answer="[tenant/namespace]")
async def list_namespaces(call: Call) -> object:
    return sorted((await call.admin("ListNamespaces", wire.Name(name=call.names["tenant"]))).names)


# ------------------------------------------------------------------ itself
@route("GET", NAMESPACE, "The policies of a namespace, with every key that Pulsar has.", answer="Policies")
async def get_namespace(call: Call) -> object:
    name, place = str(call.namespace), of_namespace(call)
    spec = await call.admin("GetNamespace", wire.Name(name=name))
    granted = await call.admin("GetPermissions", wire.PermissionsRequest(namespace=name))
    return _shown(call, spec, granted, await read(call, place), await _properties(call))


def _shown(call: Call, spec: Any, granted: Any, policies: Policies, noted: dict[str, str]) -> dict[str, object]:
    cluster = call.broker.config.cluster
    found: dict[str, object] = {}
    for row in POLICIES:
        if row.key:
            value = row.show(policies)
            found[row.key] = value if not row.by_cluster else {} if value is None else {cluster: value}
    roles = {role: list(each.names) for role, each in granted.roles.items()}
    lists = {name: list(each.names) for name, each in granted.subscriptions.items()}
    return {
        "auth_policies": {"namespace_auth": roles, "destination_auth": {}, "subscription_auth_roles": lists},
        "replication_clusters": [cluster], "bundles": _bundles(spec.bundles),
        "backlog_quota_map": show_quotas(policies), "clusterDispatchRate": {}, "replicatorDispatchRate": {}, **found,
        "subscription_types_enabled": found["subscription_types_enabled"] or [],
        "autoTopicCreationOverride": _auto_topics(spec), "latency_stats_sample_rate": {}, "deleted": False,
        "encryption_required": False, "subscription_auth_mode": "Prefix" if granted.prefix_mode else "None",
        "offload_threshold": -1, "offload_threshold_in_seconds": -1, "offload_deletion_lag_ms": None,
        "offload_policies": None, "schema_auto_update_compatibility_strategy": None,
        "deduplicationSnapshotIntervalSeconds": None, "properties": noted,
        "resource_group_name": None, "migrated": False, "dispatcherPauseOnAckStatePersistentEnabled": None,
        "entryFilters": None, "allowed_clusters": [],
    }  # fmt: skip


def _bundles(count: int) -> dict[str, object]:
    bounds = [min(-(-number * HASHES // count), HASHES - 1) for number in range(count + 1)]
    return {"boundaries": [f"0x{each:08x}" for each in bounds], "numBundles": count}


def _auto_topics(spec: Any) -> dict[str, object] | None:
    if not spec.is_creation_set and not spec.auto_topic_creation_off and not spec.default_partitions:
        return None
    return {
        "allowAutoTopicCreation": not spec.auto_topic_creation_off,
        "topicType": "partitioned" if spec.default_partitions else "non-partitioned",
        "defaultNumPartitions": spec.default_partitions or None,
    }


@route("PUT", NAMESPACE, "Makes a namespace.", body="Policies | BundlesData | empty")
async def create_namespace(call: Call) -> None:
    given: Any = {} if call.is_empty else call.json(dict[str, object])
    name, spec = call.namespace, wire.NamespaceSpec(name=str(call.namespace))
    await call.authorize("Admin.CreateNamespace", spec)
    check_clusters(call, converted(given.get("replication_clusters") or [], list[str], "replication_clusters"))
    spec.bundles = _count(given)
    if given.get("autoTopicCreationOverride"):
        _take_auto_topics(spec, converted(given["autoTopicCreationOverride"], AutoTopic, "autoTopicCreationOverride"))
    fields, grants = fields_of_namespace(given), _grants(given)
    check(decode(msgspec.json.encode(fields).decode()))
    noted = check_properties(converted(given.get("properties") or {}, dict[str, str], "properties"))
    await call.admin("CreateNamespace", spec)
    if fields:
        await change(call, {"namespace": str(name)}, fields)
    if noted:
        await _note(call, noted)
    for role, actions in grants.items():
        granting = Grant(role=role, actions=actions)
        await call.admin("ChangePermissions", wire.ChangePermissionsRequest(namespace=str(name), grant=granting))


def _count(given: Mapping[str, Any]) -> int:
    """Returns the number of bundles that is asked for; 0: the default."""
    bundles = given.get("bundles") or given
    count = converted(bundles, dict[str, object], "bundles").get("numBundles") or 0
    count = int(converted(count, int, "numBundles"))
    if not 0 <= count <= BUNDLES_MAX:
        raise BadRequest(f"numBundles is 1 to {BUNDLES_MAX}, not {count}", 412)
    return count


def _grants(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns role → actions; checked."""
    auth = converted(given.get("auth_policies") or {}, dict[str, object], "auth_policies")
    kind = dict[str, list[str]]
    found: dict[str, list[str]] = converted(auth.get("namespace_auth") or {}, kind, "auth_policies.namespace_auth")
    for role, actions in found.items():
        grant(GrantsRecord(), "", check_role(role), actions)
    return found


@route("DELETE", NAMESPACE, "Deletes a namespace; with `force` its topics first.")
async def delete_namespace(call: Call) -> None:
    asked = wire.DeleteRequest(name=str(call.namespace), force=call.flag("force"))
    await call.admin("DeleteNamespace", asked)


# ------------------------------------------------------------------ topics that are made by themselves
@route("GET", NAMESPACE + "/autoTopicCreation", "Whether topics are made at their first use; 204: as the broker says.",
       answer="AutoTopicCreationOverride")  # fmt: skip
async def get_auto_topics(call: Call) -> object:
    return _auto_topics(await call.admin("GetNamespace", wire.Name(name=str(call.namespace))))


@route("POST", NAMESPACE + "/autoTopicCreation", "Sets that, and how many partitions they get.",
       body="AutoTopicCreationOverride")  # fmt: skip
async def set_auto_topics(call: Call) -> None:
    spec = wire.NamespaceSpec(name=str(call.namespace))
    _take_auto_topics(spec, call.json(AutoTopic))
    await call.admin("UpdateNamespace", spec)


@route("DELETE", NAMESPACE + "/autoTopicCreation", "As the broker says.")
async def remove_auto_topics(call: Call) -> None:
    await call.admin("UpdateNamespace", wire.NamespaceSpec(name=str(call.namespace)))


def _take_auto_topics(spec: wire.NamespaceSpec, given: AutoTopic) -> None:
    """Takes the policy of automatic topics. 412: partitions of a type that has none, or fewer than one of the other; in
    Pulsar's words."""
    partitions = given.defaultNumPartitions or 0
    if given.allowAutoTopicCreation and (wrong := _wrong_partitions(given)):
        text = "Invalid configuration for autoTopicCreationOverride. the detail is [defaultNumPartitions]"
        raise BadRequest(f"{text} {wrong}", 412)
    spec.is_creation_set = True
    spec.auto_topic_creation_off = not given.allowAutoTopicCreation
    spec.default_partitions = partitions if given.allowAutoTopicCreation else 0


def _wrong_partitions(given: AutoTopic) -> str:
    """Returns the error text, or "" if the number of partitions is right."""
    partitions = given.defaultNumPartitions
    if given.topicType != "partitioned":
        return "is not allowed to be set when the type is non-partition." if partitions else ""
    if partitions is None:
        return "cannot be null when the type is partitioned."
    if partitions < 1:
        return "cannot be less than 1 for partition type."
    return f"cannot be larger than {AUTO_PARTITIONS_MAX}." if partitions > AUTO_PARTITIONS_MAX else ""


# ------------------------------------------------------------------ topics and bundles
@route("GET", NAMESPACE + "/topics",
       "The topics, partitions one by one; `mode`: PERSISTENT (the default), NON_PERSISTENT or ALL.",
       answer="[full name]")  # fmt: skip
async def topics_of_namespace(call: Call) -> object:
    mode = call.query.get("mode", "").upper() or "PERSISTENT"
    if mode not in ("ALL", "PERSISTENT", "NON_PERSISTENT"):
        raise BadRequest(f"mode is PERSISTENT, NON_PERSISTENT or ALL, not {mode[:40]!r}", 412)
    asked = wire.ListTopicsRequest(namespace=str(call.namespace), partitions=True)
    names = (await call.admin("ListTopics", asked)).names
    prefixes = {"ALL": "", "PERSISTENT": "persistent:", "NON_PERSISTENT": "non-persistent:"}
    return [name for name in names if name.startswith(prefixes[mode])]


@route("GET", NAMESPACE + "/bundles", "The bundles.", answer="BundlesData")
async def bundles(call: Call) -> object:
    return _bundles((await call.admin("GetNamespace", wire.Name(name=str(call.namespace)))).bundles)


# ------------------------------------------------------------------ properties
@route("GET", NAMESPACE + "/properties", "What users noted of the namespace.", answer="{key: value}")
async def properties(call: Call) -> object:
    return await _properties(call)


async def _properties(call: Call) -> dict[str, str]:
    found = await call.admin("GetProperties", wire.PlaceRequest(namespace=str(call.namespace)))
    return dict(found.properties)


async def _note(call: Call, properties: dict[str, str]) -> None:
    asked = wire.ChangePropertiesRequest(namespace=str(call.namespace), set=properties)
    await call.admin("ChangeProperties", asked)


@route("PUT", NAMESPACE + "/properties", "These are noted; others stay.", body="{key: value}")
async def set_properties(call: Call) -> None:
    await _note(call, call.json(dict[str, str]))


@route("DELETE", NAMESPACE + "/properties", "None is left.")
async def clear_properties(call: Call) -> None:
    await call.admin("ChangeProperties", wire.ChangePropertiesRequest(namespace=str(call.namespace), clear=True))


@route("GET", NAMESPACE + "/property/{key}", "One of them; 404: it is missing.", answer="text")
async def get_property(call: Call) -> Response:
    return PlainTextResponse(_one(call, await _properties(call)))


@route("PUT", NAMESPACE + "/property/{key}/{value}", "It is noted.")
async def set_property(call: Call) -> None:
    await _note(call, {call.names["key"]: call.names["value"]})


@route("DELETE", NAMESPACE + "/property/{key}", "It is gone; what it was. 404: it is missing.", answer="text")
async def remove_property(call: Call) -> Response:
    found = _one(call, await _properties(call))
    asked = wire.ChangePropertiesRequest(namespace=str(call.namespace), remove=[call.names["key"]])
    await call.admin("ChangeProperties", asked)
    return PlainTextResponse(found)


def _one(call: Call, properties: dict[str, str]) -> str:
    if (key := call.names["key"]) not in properties:
        raise NotFound(f"namespace {call.namespace} has no property {key[:100]!r}")
    return properties[key]


# ------------------------------------------------------------------ unloading
@route("PUT", NAMESPACE + "/unload", "Brokers give its topics back; the next look-up loads them.")
async def unload_namespace(call: Call) -> None:
    await _unload(call, call.namespace, "")


@route("PUT", NAMESPACE + "/{bundle}/unload", "One bundle is given back; `destinationBroker` is not looked at.")
async def unload_bundle(call: Call) -> None:
    await _unload(call, call.namespace, call.names["bundle"])


async def _unload(call: Call, name: NamespaceName, bundle: str) -> None:
    await call.admin("UnloadNamespace", wire.UnloadNamespaceRequest(namespace=str(name), bundle=bundle))


@route("POST", NAMESPACE + "/clearBacklog", "Every subscription of every topic has no backlog.")
async def clear_backlog(call: Call) -> None:
    await _clear(call, "")


@route("POST", NAMESPACE + "/clearBacklog/{subscription}", "The subscription has no backlog, of any topic.")
async def clear_backlog_of_subscription(call: Call) -> None:
    await _clear(call, call.names["subscription"])


async def _clear(call: Call, subscription: str) -> None:
    await _each_topic(call, lambda topic: ("SkipMessages", wire.SkipMessagesRequest(
        topic=topic, name=subscription, messages=-1
    )))  # fmt: skip


@route("POST", NAMESPACE + "/unsubscribe/{subscription}", "Deletes the subscription of every topic.", busy=412)
async def unsubscribe(call: Call) -> None:
    name = call.names["subscription"]
    await _each_topic(call, lambda topic: ("DeleteSubscription", wire.DeleteSubscriptionRequest(
        topic=topic, name=name
    )))  # fmt: skip


async def _each_topic(call: Call, asked: Callable[[str], tuple[str, Message]]) -> None:
    """Asks the owner of each persistent topic of a namespace; a topic without the subscription is passed over."""
    name = str(call.namespace)
    await call.authorize("Admin.GetNamespace", wire.Name(name=name))
    listed = await call.admin("ListTopics", wire.ListTopicsRequest(namespace=name, partitions=True))
    for topic in listed.names:
        if topic.startswith("persistent:"):
            with contextlib.suppress(NotFound):
                method, request = asked(topic)
                await call.anywhere(method, TopicName.parse(topic), request)
