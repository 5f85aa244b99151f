"""Tenants and the one cluster."""

from __future__ import annotations

import msgspec

from .....proto import operations as op
from ..call import Call
from ..errors import BadRequest
from ..table import route

TENANT = "/admin/v2/tenants/{tenant}"


class TenantInfo(msgspec.Struct):
    """The body of a tenant."""

    adminRoles: tuple[str, ...] | None = None
    allowedClusters: tuple[str, ...] | None = None


@route("GET", TENANT, "A tenant.", answer="{adminRoles, allowedClusters}")
async def get_tenant(call: Call) -> object:
    found = await call.admin(op.GET_TENANT, name=call.names["tenant"])
    return TenantInfo(found.admin_roles, found.allowed_clusters or (call.broker.config.cluster,))


@route("PUT", TENANT, "Makes a tenant.", body="{adminRoles, allowedClusters}")
async def create_tenant(call: Call) -> None:
    await call.admin(op.CREATE_TENANT, **_spec(call))


@route("POST", TENANT, "Changes a tenant.", body="{adminRoles, allowedClusters}")
async def update_tenant(call: Call) -> None:
    await call.admin(op.UPDATE_TENANT, **_spec(call))


def _spec(call: Call) -> dict[str, object]:
    """Returns the tenant that is given. 412: a cluster that is not this one."""
    given = TenantInfo() if call.is_empty else call.json(TenantInfo)
    clusters, own = tuple(given.allowedClusters or ()), call.broker.config.cluster
    unknown = [each for each in clusters if each != own]
    if unknown:
        raise BadRequest(f"there is no cluster {unknown[0][:100]!r} here, only {own!r}", 412)
    return {"name": call.names["tenant"], "admin_roles": given.adminRoles or (), "allowed_clusters": clusters}


@route("DELETE", TENANT, "Deletes a tenant; with `force` its namespaces and topics first.")
async def delete_tenant(call: Call) -> None:
    name = call.names["tenant"]
    await call.authorize(op.DELETE_TENANT, name=name)
    if call.flag("force"):
        for each in await call.admin(op.LIST_NAMESPACES, name=name):
            await call.admin(op.DELETE_NAMESPACE, name=each, force=True)
    await call.admin(op.DELETE_TENANT, name=name)


# ------------------------------------------------------------------ the cluster
CLUSTER = "/admin/v2/clusters/{cluster}"


@route("GET", "/admin/v2/clusters", "The clusters: this one.", answer="[name]")
async def list_clusters(call: Call) -> list[str]:
    return [call.broker.config.cluster]


@route("GET", CLUSTER, "Where clients reach the cluster.", answer="ClusterData")
async def get_cluster(call: Call) -> object:
    call.check_cluster()
    mine = next((each for each in await call.broker.brokers() if each.name == call.broker.name), None)
    urls = mine.pulsar.get("", ()) if mine is not None else ()
    http = mine.http if mine is not None else ""
    return {
        "serviceUrl": http if http.startswith("http://") else None,
        "serviceUrlTls": http if http.startswith("https://") else None,
        "brokerServiceUrl": next((url for url in urls if url.startswith("pulsar://")), None),
        "brokerServiceUrlTls": next((url for url in urls if url.startswith("pulsar+ssl://")), None),
        "brokerClientTlsEnabled": False, "peerClusterNames": None, "migrated": False,
    }  # fmt: skip


@route("PUT", CLUSTER, "Answers 204 for this cluster: it exists; another one cannot be made.", body="ClusterData")
async def create_cluster(call: Call) -> None:
    """Accepts the creation of this broker's own cluster, which set-up scripts of client suites make first; refuses any
    other."""
    await call.authorize(op.LIST_BROKERS)
    if call.names["cluster"] != call.broker.config.cluster:
        raise BadRequest(f"there is one cluster here, {call.broker.config.cluster!r}; another one cannot be made", 405)


@route("GET", CLUSTER + "/peers", "None: clusters are not linked.", answer="[name]")
async def peers(call: Call) -> list[str]:
    call.check_cluster()
    return []


@route("GET", CLUSTER + "/failureDomains", "None: racks of bookies are theirs.", answer="{}")
async def failure_domains(call: Call) -> dict[str, object]:
    call.check_cluster()
    return {}


@route("GET", CLUSTER + "/namespaceIsolationPolicies", "None.", answer="{}")
async def isolation_policies(call: Call) -> dict[str, object]:
    call.check_cluster()
    return {}
