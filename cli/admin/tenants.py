"""`magnetar tenants …`: the first part of a topic's name, and who administers it."""

from __future__ import annotations

from click import option

from ..common.lazy import ROW, LazyCommand, LazyGroup
from ..common.session import Session, confirm, session_command

tenants = LazyGroup(
    "tenants",
    {
        "list": ROW,
        "create": LazyCommand(".admin.tenants", "create", "Make a tenant."),
        "get": LazyCommand(".admin.tenants", "get", "A tenant's settings."),
        "update": LazyCommand(".admin.tenants", "update", "Change a tenant's settings."),
        "stats": LazyCommand(".admin.tenants", "stats", "What a tenant holds."),
        "delete": LazyCommand(".admin.tenants", "delete", "Delete a tenant without namespaces."),
    },
    with_rows=True,
    help="Tenants: the first part of a topic's name.\n\nExample: magnetar tenants create acme",
)

ROLES = option("-r", "--admin-roles", default="", metavar="ROLE,…", help="Roles that may do everything in it.")
CLUSTERS = option(
    "-c", "--allowed-clusters", default="", metavar="CLUSTER,…", help="Where it may have namespaces (none: everywhere)."
)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@session_command(ROLES, CLUSTERS)
def create(session: Session, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Make a tenant.

    Examples:
      magnetar tenants create acme
      magnetar tenants create acme --admin-roles acme-admin
    """
    roles, clusters = _split(admin_roles), _split(allowed_clusters)
    session.admin.create_tenant(tenant, admin_roles=roles, allowed_clusters=clusters)
    session.out.print_result_text(f"tenant {tenant} created", tenant=tenant)


@session_command()
def get(session: Session, tenant: str) -> None:
    """Show the settings of a tenant.

    Example: magnetar tenants get public
    """
    spec = session.admin.tenant(tenant)
    session.out.print_record({"adminRoles": list(spec.admin_roles), "allowedClusters": list(spec.allowed_clusters)})


@session_command(ROLES, CLUSTERS)
def update(session: Session, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Change the settings of a tenant. A setting that is not given becomes empty.

    Example: magnetar tenants update acme --admin-roles acme-admin,root
    """
    roles, clusters = _split(admin_roles), _split(allowed_clusters)
    session.admin.update_tenant(tenant, admin_roles=roles, allowed_clusters=clusters)
    session.out.print_result_text(f"tenant {tenant} updated", tenant=tenant)


@session_command(watched=True)
def stats(session: Session, tenant: str) -> None:
    """Show how many namespaces and topics a tenant has.

    Example: magnetar tenants stats public
    """
    admin = session.admin
    admin.tenant(tenant)
    rows = [{"namespace": each, "topics": len(admin.topics(each))} for each in admin.namespaces(tenant)]
    session.out.print_rows(rows, ("namespace", "topics"), empty=f"no namespaces in {tenant}")


@session_command()
def delete(session: Session, tenant: str, yes: bool) -> None:
    """Delete a tenant. Refused while the tenant has namespaces.

    Example: magnetar tenants delete acme
    """
    confirm(f"Delete tenant {tenant}", yes)
    session.admin.delete_tenant(tenant)
    session.out.print_result_text(f"tenant {tenant} deleted", tenant=tenant)
