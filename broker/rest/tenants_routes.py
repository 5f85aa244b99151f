"""Routes of tenants, permissions and the one cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...proto import operations as op
from .call import NAMESPACE, TOPIC, BadRequest, RestRequest, register_route

# --------------------------------------------------------------------------------------------------- permissions
# Permissions on namespaces, topics and subscriptions.


def _roles(found: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {role: list(actions) for role, actions in sorted(found.items())}


def _actions(call: RestRequest) -> list[str]:
    return call.parse_body(list[str])


@register_route("GET", NAMESPACE + "/permissions", "The grants of the namespace.", answer="{role: [action]}")
async def permissions_of_namespace(call: RestRequest) -> object:
    found = await call.call_local(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.roles)


@register_route(
    "GET", NAMESPACE + "/permissions/subscription", "The roles of subscriptions.", answer="{subscription: [role]}"
)
async def permissions_of_subscriptions(call: RestRequest) -> object:
    found = await call.call_local(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.subscriptions)


@register_route("POST", NAMESPACE + "/permissions/subscription/{subscription}", "The only roles of a subscription.",
       body="[role]")  # fmt: skip
async def grant_on_subscription(call: RestRequest) -> None:
    given = {"subscription": call.names["subscription"], "roles": _actions(call)}
    await _change(call, grant_subscription=given)


@register_route("POST", NAMESPACE + "/permissions/{role}", "Grants actions to a role.", body="[action]")
async def grant_on_namespace(call: RestRequest) -> None:
    await _change(call, grant={"role": call.names["role"], "actions": _actions(call)})


@register_route("DELETE", NAMESPACE + "/permissions/{subscription}/{role}", "A role leaves the list of a subscription.")
async def revoke_on_subscription(call: RestRequest) -> None:
    given = {"subscription": call.names["subscription"], "roles": [call.names["role"]]}
    await _change(call, revoke_subscription=given)


@register_route("POST", NAMESPACE + "/subscriptionAuthMode", "None, or Prefix: subscriptions are named by their role.",
       body='"None" | "Prefix"')  # fmt: skip
async def set_auth_mode(call: RestRequest) -> None:
    mode = call.parse_body(str).lower()
    if mode not in ("none", "prefix"):
        raise BadRequest(f"the mode is None or Prefix, not {mode[:40]!r}", 412)
    await _change(call, prefix_mode=mode == "prefix")


async def _change(call: RestRequest, **change: Any) -> None:
    await call.call_local(op.CHANGE_PERMISSIONS, namespace=str(call.namespace), **change)


# ------------------------------------------------------------------ of a topic
@register_route(
    "GET", TOPIC + "/permissions", "The grants of the topic, and of its namespace.", answer="{role: [action]}"
)
async def permissions_of_topic(call: RestRequest) -> object:
    topic = call.topic.base
    own = await call.call_local(op.GET_PERMISSIONS, topic=topic.full)
    found = _roles((await call.call_local(op.GET_PERMISSIONS, namespace=str(topic.namespace_name))).roles)
    for role, actions in _roles(own.roles).items():
        found[role] = sorted({*found.get(role, ()), *actions})
    return found


@register_route("POST", TOPIC + "/permissions/{role}", "Grants actions on the topic to a role.", body="[action]")
async def grant_on_topic(call: RestRequest) -> None:
    grant = {"role": call.names["role"], "actions": _actions(call)}
    await call.call_local(op.CHANGE_PERMISSIONS, topic=call.topic.base.full, grant=grant)


# ------------------------------------------------------------------------------------------------------- tenants


TENANT = "/admin/v2/tenants/{tenant}"


class TenantInfo(msgspec.Struct):
    """The JSON body that describes a tenant."""

    adminRoles: tuple[str, ...] | None = None
    allowedClusters: tuple[str, ...] | None = None


@register_route("GET", TENANT, "A tenant.", answer="{adminRoles, allowedClusters}")
async def get_tenant(call: RestRequest) -> object:
    found = await call.call_local(op.GET_TENANT, name=call.names["tenant"])
    return TenantInfo(found.admin_roles, found.allowed_clusters or (call.broker.config.cluster,))


@register_route("PUT", TENANT, "Makes a tenant.", body="{adminRoles, allowedClusters}")
async def create_tenant(call: RestRequest) -> None:
    await call.call_local(op.CREATE_TENANT, **_spec(call))


@register_route("POST", TENANT, "Changes a tenant.", body="{adminRoles, allowedClusters}")
async def update_tenant(call: RestRequest) -> None:
    await call.call_local(op.UPDATE_TENANT, **_spec(call))


def _spec(call: RestRequest) -> dict[str, object]:
    """Returns the arguments of a tenant operation, from the request. Raises BadRequest (412) if the body names another
    cluster than this one."""
    given = TenantInfo() if call.has_empty_body else call.parse_body(TenantInfo)
    clusters, own = tuple(given.allowedClusters or ()), call.broker.config.cluster
    unknown = [each for each in clusters if each != own]
    if unknown:
        raise BadRequest(f"there is no cluster {unknown[0][:100]!r} here, only {own!r}", 412)
    return {"name": call.names["tenant"], "admin_roles": given.adminRoles or (), "allowed_clusters": clusters}


@register_route("DELETE", TENANT, "Deletes a tenant; with `force` its namespaces and topics first.")
async def delete_tenant(call: RestRequest) -> None:
    name = call.names["tenant"]
    await call.authorize(op.DELETE_TENANT, name=name)
    if call.parse_flag("force"):
        for each in await call.call_local(op.LIST_NAMESPACES, name=name):
            await call.call_local(op.DELETE_NAMESPACE, name=each, force=True)
    await call.call_local(op.DELETE_TENANT, name=name)


# ------------------------------------------------------------------ the cluster
CLUSTER = "/admin/v2/clusters/{cluster}"


@register_route("GET", "/admin/v2/clusters", "The clusters: this one.", answer="[name]")
async def list_clusters(call: RestRequest) -> list[str]:
    return [call.broker.config.cluster]


@register_route("GET", CLUSTER, "Where clients reach the cluster.", answer="ClusterData")
async def get_cluster(call: RestRequest) -> object:
    call.check_cluster()
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
    "PUT", CLUSTER, "Answers 204 for this cluster: it exists; another one cannot be made.", body="ClusterData"
)
async def create_cluster(call: RestRequest) -> None:
    """Accepts the creation of this broker's own cluster, which set-up scripts of client suites request first; refuses
    any other cluster."""
    await call.authorize(op.LIST_BROKERS)
    if call.names["cluster"] != call.broker.config.cluster:
        raise BadRequest(f"there is one cluster here, {call.broker.config.cluster!r}; another one cannot be made", 405)


@register_route("GET", CLUSTER + "/peers", "None: clusters are not linked.", answer="[name]")
async def peers(call: RestRequest) -> list[str]:
    call.check_cluster()
    return []


@register_route("GET", CLUSTER + "/failureDomains", "None: racks of bookies are theirs.", answer="{}")
async def failure_domains(call: RestRequest) -> dict[str, object]:
    call.check_cluster()
    return {}


@register_route("GET", CLUSTER + "/namespaceIsolationPolicies", "None.", answer="{}")
async def isolation_policies(call: RestRequest) -> dict[str, object]:
    call.check_cluster()
    return {}
