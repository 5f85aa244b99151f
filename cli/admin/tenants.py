"""`magnetar tenants …`: the first part of a topic's name, and who administers it."""

from __future__ import annotations

import click

from ..common.lazy import Lazy, LazyGroup
from ..common.session import YES, Session, confirm, connected

tenants = LazyGroup(
    "tenants",
    {
        "list": Lazy(".admin.tenants", "list_", "Names of all tenants."),
        "create": Lazy(".admin.tenants", "create", "Make a tenant."),
        "get": Lazy(".admin.tenants", "get", "A tenant's settings."),
        "update": Lazy(".admin.tenants", "update", "Change a tenant's settings."),
        "stats": Lazy(".admin.tenants", "stats", "What a tenant holds."),
        "delete": Lazy(".admin.tenants", "delete", "Delete a tenant without namespaces."),
    },
    help="Tenants: the first part of a topic's name.\n\nExample: magnetar tenants create acme",
)

ROLES = click.option("-r", "--admin-roles", default="", metavar="ROLE,…", help="Refused: not enforced yet.")
CLUSTERS = click.option("-c", "--allowed-clusters", default="", metavar="CLUSTER,…", help="Refused: not enforced yet.")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@click.command("list")
@connected
def list_(session: Session) -> None:
    """Names of all tenants.

    Example: magnetar tenants list -o json
    """
    from ...proto import wire_pb2 as wire

    session.out.names(session.call("ListTenants", wire.Empty()).names, empty="no tenants")


@click.command()
@click.argument("tenant")
@ROLES
@CLUSTERS
@connected
def create(session: Session, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Make a tenant.

    Example: magnetar tenants create acme
    """
    from ...proto import wire_pb2 as wire

    spec = wire.TenantSpec(name=tenant, admin_roles=_split(admin_roles), allowed_clusters=_split(allowed_clusters))
    session.call("CreateTenant", spec)
    session.out.done(f"tenant {tenant} created", tenant=tenant)


@click.command()
@click.argument("tenant")
@connected
def get(session: Session, tenant: str) -> None:
    """A tenant's settings.

    Example: magnetar tenants get public
    """
    from ...proto import wire_pb2 as wire

    spec = session.call("GetTenant", wire.Name(name=tenant))
    session.out.record({"adminRoles": list(spec.admin_roles), "allowedClusters": list(spec.allowed_clusters)})


@click.command()
@click.argument("tenant")
@ROLES
@CLUSTERS
@connected
def update(session: Session, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Change a tenant's settings; what is not given is emptied. Roles and clusters are refused until they are enforced.

    Example: magnetar tenants update acme
    """
    from ...proto import wire_pb2 as wire

    spec = wire.TenantSpec(name=tenant, admin_roles=_split(admin_roles), allowed_clusters=_split(allowed_clusters))
    session.call("UpdateTenant", spec)
    session.out.done(f"tenant {tenant} updated", tenant=tenant)


@click.command()
@click.argument("tenant")
@connected
def stats(session: Session, tenant: str) -> None:
    """How many namespaces and topics a tenant holds.

    Example: magnetar tenants stats public
    """
    from ...proto import wire_pb2 as wire

    session.call("GetTenant", wire.Name(name=tenant))
    rows = []
    for namespace in session.call("ListNamespaces", wire.Name(name=tenant)).names:
        topics = session.call("ListTopics", wire.ListTopicsRequest(namespace=namespace)).names
        rows.append({"namespace": namespace, "topics": len(topics)})
    session.out.rows(rows, ("namespace", "topics"), empty=f"no namespaces in {tenant}")


@click.command()
@click.argument("tenant")
@YES
@connected
def delete(session: Session, tenant: str, yes: bool) -> None:
    """Delete a tenant. Refused while it has namespaces.

    Example: magnetar tenants delete acme
    """
    from ...proto import wire_pb2 as wire

    confirm(f"Delete tenant {tenant}", yes)
    session.call("DeleteTenant", wire.Name(name=tenant))
    session.out.done(f"tenant {tenant} deleted", tenant=tenant)
