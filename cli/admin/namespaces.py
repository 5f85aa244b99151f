"""`magnetar tenants …` and `magnetar namespaces …`: the commands for tenants and namespaces: their administrators, and
the policies of their topics.

Also in this file, below its heading: `magnetar namespaces|topics grant-permission …` (permissions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click import option

from ...proto.policies import NAMESPACE_LEVEL, POLICIES, TENANT_LEVEL
from ..common.lazy import OPERATION_ROW, LazyCommand, LazyGroup
from ..common.session import CommandSession, confirm_deletion, session_command
from .policies import (
    COMMAND_ALIASES,
    change_policies,
    collect_given_policies,
    make_policy_commands,
    read_policies,
    with_options_for_policies,
)
from .policies import NAMESPACE_COMMANDS as PROPERTIES_OF_NAMESPACES

if TYPE_CHECKING:
    from ...proto.statistics import BundleRow

# --------------------------------------------------------------------------------------------------- permissions
# `magnetar namespaces|topics grant-permission …`: who may do what, with pulsar-admin's verbs.
#
# A grant replaces the actions that the role had at that place. What changes holds at once: who is connected and may not
# be any more is disconnected within a second.


PERMISSION_COMMANDS = {
    "grant-permission": LazyCommand(".admin.namespaces", "grant_namespace_permission",
    "Let a role produce or consume in it."),
    "revoke-permission": LazyCommand(".admin.namespaces", "revoke_role_on_namespace", "Take that from a role."),
    "permissions": LazyCommand(".admin.namespaces", "of_namespace", "Which roles may do what in it."),
    "grant-subscription-permission": LazyCommand(
        ".admin.namespaces", "grant_subscription", "Only these roles may use a subscription."
    ),
    "revoke-subscription-permission": LazyCommand(
        ".admin.namespaces", "revoke_subscription", "Take a role off that list."
    ),
    "subscription-permission": LazyCommand(".admin.namespaces", "list_roles_of_subscriptions",
    "The lists of its subscriptions."),
    "set-subscription-auth-mode": LazyCommand(
        ".admin.namespaces", "set_auth_mode", "Whether subscriptions are named by their role."
    ),
    "get-subscription-auth-mode": LazyCommand(".admin.namespaces", "get_mode_of_subscription_names", "Show that."),
}
TOPIC_PERMISSION_COMMANDS = {
    "grant-permission": LazyCommand(".admin.namespaces", "grant_role_on_topic", "Let a role produce or consume."),
    "revoke-permission": LazyCommand(".admin.namespaces", "revoke_role_on_topic", "Take that from a role."),
    "permissions": LazyCommand(".admin.namespaces", "of_topic", "Which roles were granted what for the topic alone."),
}

ROLE_OPTION = option("-r", "--role", required=True, metavar="ROLE")
ACTIONS_OPTION = option(
    "-a", "--actions", required=True, metavar="ACTION,…", help="produce, consume (functions, sources, sinks, packages)."
)
SUBSCRIPTION_OPTION = option("-s", "--subscription", required=True, metavar="NAME")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@session_command(ROLE_OPTION, ACTIONS_OPTION, name="grant-permission")
def grant_namespace_permission(session: CommandSession, namespace: str, role: str, actions: str) -> None:
    """Let a role produce or consume in all topics of a namespace. Afterwards the role has exactly these actions there.

    Example: magnetar namespaces grant-permission acme/orders --role billing --actions consume
    """
    session.admin.grant_namespace_permission(namespace, role, _split(actions))
    _granted(session, role, actions, namespace)


@session_command(ROLE_OPTION, name="revoke-permission")
def revoke_role_on_namespace(session: CommandSession, namespace: str, role: str) -> None:
    """Take from a role all that was granted to it in a namespace. What was granted to it for single topics stays.

    Example: magnetar namespaces revoke-permission acme/orders --role billing
    """
    session.admin.revoke_namespace_permission(namespace, role)
    session.out.print_result_text(
        f"role {role} has no permission of its own in {namespace}", role=role, place=namespace
    )


@session_command(name="permissions", watched=True)
def of_namespace(session: CommandSession, namespace: str) -> None:
    """List the roles that were granted something in a namespace, and which actions each role has.

    Example: magnetar namespaces permissions acme/orders
    """
    _roles(session, session.admin.namespace_permissions(namespace).roles, namespace)


@session_command(ROLE_OPTION, ACTIONS_OPTION, name="grant-permission")
def grant_role_on_topic(session: CommandSession, topic: str, role: str, actions: str) -> None:
    """Let a role produce to a topic, or consume from it, in all partitions of the topic.

    Example: magnetar topics grant-permission acme/orders/eu --role web --actions produce,consume
    """
    session.admin.grant_topic_permission(topic, role, _split(actions))
    _granted(session, role, actions, topic)


@session_command(ROLE_OPTION, name="revoke-permission")
def revoke_role_on_topic(session: CommandSession, topic: str, role: str) -> None:
    """Take from a role all that was granted to it for a topic. What was granted to it in the namespace stays.

    Example: magnetar topics revoke-permission acme/orders/eu --role web
    """
    session.admin.revoke_topic_permission(topic, role)
    session.out.print_result_text(f"role {role} has no permission of its own for {topic}", role=role, place=topic)


@session_command(name="permissions")
def of_topic(session: CommandSession, topic: str) -> None:
    """List the roles that were granted actions for this topic alone. Grants of the topic's namespace are not in the
    list.

    Example: magnetar topics permissions acme/orders/eu
    """
    _roles(session, session.admin.topic_permissions(topic).roles, topic)


@session_command(
    SUBSCRIPTION_OPTION, option("-r", "--roles", required=True, metavar="ROLE,…"), name="grant-subscription-permission"
)
def grant_subscription(session: CommandSession, namespace: str, subscription: str, roles: str) -> None:
    """Let only these roles use a subscription, in all topics of the namespace. The roles also need the action
    `consume`.

    Example: magnetar namespaces grant-subscription-permission acme/orders -s billing --roles billing,audit
    """
    session.admin.grant_subscription_permission(namespace, subscription, _split(roles))
    session.out.print_result_text(
        f"subscription {subscription} of {namespace} takes {roles}", subscription=subscription
    )


@session_command(SUBSCRIPTION_OPTION, ROLE_OPTION, name="revoke-subscription-permission")
def revoke_subscription(session: CommandSession, namespace: str, subscription: str, role: str) -> None:
    """Remove a role from the list of roles that may use a subscription. When the last role is removed, the list is
    deleted: then every role with the action `consume` may use the subscription.

    Example: magnetar namespaces revoke-subscription-permission acme/orders -s billing --role audit
    """
    session.admin.revoke_subscription_permission(namespace, subscription, role)
    session.out.print_result_text(
        f"role {role} is not on the list of subscription {subscription}", subscription=subscription
    )


@session_command(name="subscription-permission")
def list_roles_of_subscriptions(session: CommandSession, namespace: str) -> None:
    """List the subscriptions of a namespace that only certain roles may use, with these roles. A subscription that is
    not listed may be used by every role with the action `consume`.

    Example: magnetar namespaces subscription-permission acme/orders
    """
    found = session.admin.namespace_permissions(namespace).subscriptions
    rows = [{"subscription": name, "roles": ", ".join(roles)} for name, roles in sorted(found.items())]
    session.out.print_rows(rows, ("subscription", "roles"), empty=f"no subscription of {namespace} has a list of roles")


@session_command(
    option("-m", "--subscription-auth-mode", "mode", required=True, type=click.Choice(["None", "Prefix"])),
    name="set-subscription-auth-mode",
)
def set_auth_mode(session: CommandSession, namespace: str, mode: str) -> None:
    """Set whether a subscription's name must begin with its user's role. With Prefix, the name is the role's, or begins
    with the role and `-`; with None it is free.

    Example: magnetar namespaces set-subscription-auth-mode acme/orders --subscription-auth-mode Prefix
    """
    session.admin.set_subscription_prefix_mode(namespace, mode == "Prefix")
    session.out.print_result_text(f"subscriptions of {namespace}: mode {mode}", mode=mode)


@session_command(name="get-subscription-auth-mode")
def get_mode_of_subscription_names(session: CommandSession, namespace: str) -> None:
    """Show whether the names of subscriptions must begin with the role that uses them.

    Example: magnetar namespaces get-subscription-auth-mode acme/orders
    """
    on = session.admin.namespace_permissions(namespace).prefix_mode
    session.out.print_record({"subscriptionAuthMode": "Prefix" if on else "None"})


def _granted(session: CommandSession, role: str, actions: str, place: str) -> None:
    session.out.print_result_text(f"role {role} may {actions} in {place}", role=role, place=place)


def _roles(session: CommandSession, roles: object, place: str) -> None:
    assert isinstance(roles, dict), "a mapping of roles to actions"
    rows = [{"role": role, "actions": ", ".join(actions)} for role, actions in sorted(roles.items())]
    session.out.print_rows(rows, ("role", "actions"), empty=f"no role was granted anything at {place}")


# ---------------------------------------------------------------------------------------------------- namespaces


namespaces = LazyGroup(
    "namespaces",
    {
        "list": LazyCommand(".admin.namespaces", "list_", "Namespaces of a tenant."),
        "create": LazyCommand(".admin.namespaces", "create", "Make a namespace."),
        "policies": LazyCommand(".admin.namespaces", "policies", "A namespace's policies."),
        "update": LazyCommand(".admin.namespaces", "update", "Change policies."),
        "topics": LazyCommand(".admin.topics", "list_", "Topics of a namespace."),
        "stats": LazyCommand(".admin.namespaces", "stats", "Messages, storage, backlog and rates of its topics."),
        "delete": LazyCommand(".admin.namespaces", "delete", "Delete a namespace."),
        "bundles": LazyCommand(".admin.namespaces", "bundles", "The hash ranges that brokers own."),
        "unload": LazyCommand(
            ".admin.namespaces", "unload", "Let its brokers give it up; the next lookups find new owners."
        ),
        "clear-backlog": LazyCommand(
            ".admin.namespaces", "clear_backlog", "Acknowledge everything unseen, in all its topics."
        ),
        "unsubscribe": LazyCommand(".admin.namespaces", "unsubscribe", "Delete a subscription of all its topics."),
        "set-auto-topic-creation": LazyCommand(
            ".admin.namespaces", "set_topic_creation", "Whether and how topics are made at first use."
        ),
        "get-auto-topic-creation": LazyCommand(".admin.namespaces", "get_topic_creation", "Show that."),
        "remove-auto-topic-creation": LazyCommand(
            ".admin.namespaces", "remove_topic_creation", "Topics are made at first use."
        ),
        **PERMISSION_COMMANDS,
        **PROPERTIES_OF_NAMESPACES,
    },
    {"get": "policies", "delete-bookie-affinity-group": "remove-bookie-affinity-group", **COMMAND_ALIASES},
    policies=make_policy_commands(NAMESPACE_LEVEL),
    with_rows=True,
    help="TENANT/NAMESPACE: its topics share policies.\n\nExample: magnetar namespaces create public/orders",
)

NAMESPACE_INFO_FIELDS = ("bundles", "default_partitions", "auto_topic_creation")
"""Options that are fields of NamespaceInfo; all others are policies."""
CREATION_POLICIES = tuple(
    field._replace(flags=flags)
    for name, flags in (
        ("retention_minutes", ("-t", "--retention-time")),
        ("retention_mib", ("-s", "--retention-size")),
        ("message_ttl_s", ("-ttl", "--message-ttl", "--messageTTL")),
        ("ensemble_size", ("-e", "--ensemble")),
        ("write_quorum", ("-w", "--write-quorum")),
        ("ack_quorum", ("-a", "--ack-quorum")),
    )
    for field in (field for verb in POLICIES for field in verb.fields)
    if field.name == name
)
"""The policies that are usually set with a new namespace; the others have commands of their own."""


def with_policy_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds an option for each policy of a namespace. An option that the user does not give has the
    value None."""
    function = with_options_for_policies(CREATION_POLICIES)(function)
    for each in (
        option("-b", "--bundles", type=click.IntRange(1), help="Hash ranges that brokers own (at creation)."),
        option("--default-partitions", type=click.IntRange(0), help="Of topics made automatically; 0: none."),
        option("--auto-topic-creation/--no-auto-topic-creation", default=None, help="Make topics at first use."),
    ):
        function = each(function)
    return function


def _divide_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides the given options into the settings of the namespace itself, and policies, which a call of their own
    sets."""
    found = collect_given_policies(given)
    return {name: found.pop(name) for name in NAMESPACE_INFO_FIELDS if name in found}, found


@session_command(watched=True)
def list_(session: CommandSession, tenant: str = "public") -> None:
    """List the namespaces of a tenant (default public).

    Example: magnetar namespaces list public
    """
    session.out.print_names(session.admin.namespaces(tenant), empty=f"no namespaces in {tenant}")


@session_command(with_policy_options)
def create(session: CommandSession, namespace: str, **given: Any) -> None:
    """Create a namespace.

    Example: magnetar namespaces create public/orders --retention-time 3d
    """
    own, policies = _divide_options(given)
    session.admin.create_namespace(namespace, **own)
    if policies:
        change_policies(session, NAMESPACE_LEVEL, namespace, policies)
    session.out.print_result_text(f"namespace {namespace} created", namespace=namespace)


@session_command(with_policy_options)
def update(session: CommandSession, namespace: str, **given: Any) -> None:
    """Change policies of a namespace. Policies for which no option is given stay as they are.

    Example: magnetar namespaces update public/default --retention-time 7d --retention-size 10G
    """
    if all(value is None for value in given.values()):
        raise click.UsageError("nothing to change; see 'magnetar namespaces update --help'")
    own, policies = _divide_options(given)
    session.admin.update_namespace(namespace, **own)
    if policies:
        change_policies(session, NAMESPACE_LEVEL, namespace, policies)
    session.out.print_result_text(f"namespace {namespace} updated", namespace=namespace)


@session_command(option("-ap", "--applied", is_flag=True, help="With what the broker sets."), watched=True)
def policies(session: CommandSession, namespace: str = "public/default", *, applied: bool) -> None:
    """Show the policies that are set for a namespace, and how its topics are created.

    Example: magnetar namespaces policies public/default
    """
    import msgspec

    own = session.admin.namespace(namespace)
    found = msgspec.structs.asdict(read_policies(session, NAMESPACE_LEVEL, namespace, applied=applied))
    session.out.print_record(
        {
            "bundles": own.bundles,
            "default_partitions": own.default_partitions,
            "auto_topic_creation": own.auto_topic_creation,
            **{name: value for name, value in found.items() if value is not None},
        }
    )


@session_command(option("--sum", "sums", is_flag=True, help="And the sums, as the last row."), watched=True)
def stats(session: CommandSession, namespace: str = "public/default", *, sums: bool) -> None:
    """Show the messages, storage, backlog and rates (messages and bytes a second) of each topic of a namespace.

    \b
    Examples:
      magnetar namespaces stats public/default
      magnetar namespaces stats public/default --sum
    """
    from ...proto.names import TopicName
    from .stats import (
        COUNT_FIELDS,
        SUMMED_FIELDS,
        TOPIC_STATS_COLUMNS,
        make_topic_record,
        make_topic_row,
        sum_topic_records,
    )

    brief = session.out.kind in ("table", "name")  # which show TOPIC_STATS_COLUMNS only
    topics: dict[str, list[Any]] = {}
    admin = session.admin
    for each in admin.brief_namespace_stats(namespace) if brief else admin.namespace_stats(namespace):
        partitioned = "-partition-" in each.name  # most are not, and to parse a name costs as much as to read it
        topics.setdefault(TopicName.parse(each.name).base.full if partitioned else each.name, []).append(each)
    rows = [
        make_topic_row(topic, found) if brief else make_topic_record(session, topic, found)
        for topic, found in topics.items()
    ]
    if sums:
        rows.append(sum_topic_records(namespace, rows, COUNT_FIELDS if brief else SUMMED_FIELDS))
    session.out.print_rows(rows, TOPIC_STATS_COLUMNS, empty=f"no topics in {namespace}")


@session_command(option("-f", "--force", is_flag=True, help="Delete its topics too."))
def delete(session: CommandSession, namespace: str, force: bool, yes: bool) -> None:
    """Delete a namespace. Refused while the namespace has topics, unless --force is given.

    Example: magnetar namespaces delete public/orders
    """
    confirm_deletion(f"Delete namespace {namespace}" + (" and all its topics" if force else ""), yes)
    session.admin.delete_namespace(namespace, force=force)
    session.out.print_result_text(f"namespace {namespace} deleted", namespace=namespace)


BUNDLE_COLUMNS = ("bundle", "broker", "topics", "in", "out", "bytesIn", "bytesOut")


@session_command(watched=True)
def bundles(session: CommandSession, namespace: str = "public/default") -> None:
    """List the bundles of a namespace: the ranges of the hashes of topic names that brokers own. A super user also sees
    the owner of each bundle, the number of its loaded topics, and their rates per second; - for a bundle without an
    owner.

    \b
    Examples:
      magnetar namespaces bundles public/default
      magnetar namespaces bundles public/default --watch 2s
    """
    from ...broker.cluster.bundles_core import make_bundle_name
    from ...proto.errors import Unauthorized

    count = session.admin.namespace(namespace).bundles
    names = [make_bundle_name(number, count) for number in range(count)]
    try:
        page = session.admin.list_bundles(namespace=namespace)
    except Unauthorized:  # an administrator of the tenant, who does not see the brokers
        session.out.print_names(names, empty="no bundles")
        return
    owned = {each.bundle: each for each in page.bundles}
    rows = [_make_bundle_row(name, owned.get(name)) for name in names]
    session.out.print_rows(rows, BUNDLE_COLUMNS, empty="no bundles")
    for name in page.silent:
        click.echo(f"broker {name} does not answer, or is of an older release: its bundles are missing", err=True)


def _make_bundle_row(name: str, found: BundleRow | None) -> dict[str, Any]:
    if found is None:
        return {"bundle": name, **dict.fromkeys(BUNDLE_COLUMNS[1:])}
    return {
        "bundle": name, "broker": found.broker, "topics": found.topics, "in": found.rate_in, "out": found.rate_out,
        "bytesIn": found.throughput_in, "bytesOut": found.throughput_out,
    }  # fmt: skip


@session_command(
    option("-b", "--bundle", default="", help="Only this one, as 0x00000000_0x40000000."),
    option("--to", "destination", default="", metavar="BROKER", help="The broker that gets it: its name or address."),
)
def unload(session: CommandSession, namespace: str, bundle: str, destination: str) -> None:
    """Let every broker close its topics of a namespace and give them up. A topic gets a new owner when a client next
    looks it up; with --to it moves to that broker, and its clients are told so.

    \b
    Examples:
      magnetar namespaces unload public/default
      magnetar namespaces unload public/default --bundle 0x00000000_0x08000000 --to broker-2
    """
    found = session.admin.unload_namespace(namespace, bundle, destination=destination)
    done = f"moved to {destination}" if destination else "unloaded"
    text = f"{found.bundles} bundles of {namespace} with {found.topics} loaded topics {done}"
    session.out.print_result_text(text, namespace=namespace, bundles=found.bundles, topics=found.topics)


@session_command(
    option("-s", "--sub", "--subscription", "subscription", default="", help="Only this one; else each."),
    option("-f", "--force", "-y", "--yes", "yes", is_flag=True, help="Do not ask."),
)
def clear_backlog(session: CommandSession, namespace: str, subscription: str, yes: bool) -> None:
    """Acknowledge all messages that were not delivered yet, for one subscription or for each, in all topics of a
    namespace.

    Example: magnetar namespaces clear-backlog public/default -s billing -f
    """
    session.admin.namespace(namespace)
    whose = f"subscription {subscription}" if subscription else "every subscription"
    confirm_deletion(f"Acknowledge all messages of {whose} in {namespace}", yes)
    topics = session.admin.clear_namespace_backlog(namespace, subscription)
    text = f"the backlog of {whose} is cleared in {topics} topics of {namespace}"
    session.out.print_result_text(text, namespace=namespace, subscription=subscription, topics=topics)


@session_command(
    option("-s", "--sub", "--subscription", "subscription", required=True, help="Name of the subscription."),
    option("-f", "--force", is_flag=True, help="Although consumers are connected."),
)
def unsubscribe(session: CommandSession, namespace: str, subscription: str, force: bool, yes: bool) -> None:
    """Delete a subscription from every topic of a namespace that has it. Messages are not kept for this subscription
    any more.

    Example: magnetar namespaces unsubscribe public/default -s billing
    """
    session.admin.namespace(namespace)
    confirm_deletion(f"Delete subscription {subscription} of all topics of {namespace}", yes)
    topics = session.admin.unsubscribe_namespace(namespace, subscription, force=force)
    text = f"subscription {subscription} is deleted of {topics} topics of {namespace}"
    session.out.print_result_text(text, namespace=namespace, subscription=subscription, topics=topics)


@session_command(
    option("-e/-d", "--enable/--disable", "enabled", default=True, show_default=True, help="At first use."),
    option("-t", "--type", "kind", type=click.Choice(["partitioned", "non-partitioned"]), default="non-partitioned"),
    option("-n", "--num-partitions", "partitions", type=click.IntRange(1), default=None, help="Of partitioned ones."),
    name="set-auto-topic-creation",
)
def set_topic_creation(
    session: CommandSession, namespace: str, enabled: bool, kind: str, partitions: int | None
) -> None:
    """Set whether the topics of a namespace are created at their first use, and with how many partitions.

    Example: magnetar namespaces set-auto-topic-creation public/default --enable -t partitioned -n 4
    """
    if (kind == "partitioned") != (partitions is not None):
        raise click.UsageError("-t partitioned and -n NUMBER go together")
    _change_creation(session, namespace, enabled, partitions or 0)


@session_command(name="remove-auto-topic-creation")
def remove_topic_creation(session: CommandSession, namespace: str) -> None:
    """Remove the namespace's own setting: its topics are created at their first use, without partitions, if the broker
    allows that.

    Example: magnetar namespaces remove-auto-topic-creation public/default
    """
    _change_creation(session, namespace, True, 0, is_set=False)


def _change_creation(
    session: CommandSession, namespace: str, enabled: bool, partitions: int, *, is_set: bool = True
) -> None:  # fmt: skip
    session.admin.update_namespace(
        namespace, auto_topic_creation=enabled, default_partitions=partitions, is_creation_set=is_set
    )
    how = f"at first use, with {partitions} partitions" if partitions else "at first use, without partitions"
    text = f"topics of {namespace} are made {how if enabled else 'by hand'}"
    session.out.print_result_text(text, namespace=namespace, enabled=enabled, partitions=partitions)


@session_command(name="get-auto-topic-creation")
def get_topic_creation(session: CommandSession, namespace: str) -> None:
    """Show whether topics of a namespace are created at their first use, and with how many partitions (0: not
    partitioned).

    Example: magnetar namespaces get-auto-topic-creation public/default
    """
    own = session.admin.namespace(namespace)
    session.out.print_record({"enabled": own.auto_topic_creation, "partitions": own.default_partitions})


# ------------------------------------------------------------------------------------------------------- tenants
tenants = LazyGroup(
    "tenants",
    {
        "list": OPERATION_ROW,
        "create": LazyCommand(".admin.namespaces", "create_tenant", "Make a tenant."),
        "get": LazyCommand(".admin.namespaces", "get_tenant", "A tenant's settings."),
        "update": LazyCommand(".admin.namespaces", "update_tenant", "Change a tenant's settings."),
        "stats": LazyCommand(".admin.namespaces", "tenant_stats", "Topics and rates of a tenant's namespaces."),
        "delete": LazyCommand(".admin.namespaces", "delete_tenant", "Delete a tenant."),
    },
    policies=make_policy_commands(TENANT_LEVEL),
    with_rows=True,
    help="Tenants: the first part of a topic's name.\n\nExample: magnetar tenants create acme",
)

ROLES_OPTION = option("-r", "--admin-roles", default="", metavar="ROLE,…", help="Roles that may do everything in it.")
CLUSTERS_OPTION = option(
    "-c", "--allowed-clusters", default="", metavar="CLUSTER,…", help="Where it may have namespaces (none: everywhere)."
)


@session_command(ROLES_OPTION, CLUSTERS_OPTION)
def create_tenant(session: CommandSession, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Create a tenant.

    \b
    Examples:
      magnetar tenants create acme
      magnetar tenants create acme --admin-roles acme-admin
    """
    roles, clusters = _split(admin_roles), _split(allowed_clusters)
    session.admin.create_tenant(tenant, admin_roles=roles, allowed_clusters=clusters)
    session.out.print_result_text(f"tenant {tenant} created", tenant=tenant)


@session_command()
def get_tenant(session: CommandSession, tenant: str) -> None:
    """Show the settings of a tenant.

    Example: magnetar tenants get public
    """
    spec = session.admin.tenant(tenant)
    session.out.print_record({"adminRoles": list(spec.admin_roles), "allowedClusters": list(spec.allowed_clusters)})


@session_command(ROLES_OPTION, CLUSTERS_OPTION)
def update_tenant(session: CommandSession, tenant: str, admin_roles: str, allowed_clusters: str) -> None:
    """Change the settings of a tenant. A setting that is not given becomes empty.

    Example: magnetar tenants update acme --admin-roles acme-admin,root
    """
    roles, clusters = _split(admin_roles), _split(allowed_clusters)
    session.admin.update_tenant(tenant, admin_roles=roles, allowed_clusters=clusters)
    session.out.print_result_text(f"tenant {tenant} updated", tenant=tenant)


@session_command(option("--sum", "sums", is_flag=True, help="And the sums, as the last row."), watched=True)
def tenant_stats(session: CommandSession, tenant: str, *, sums: bool) -> None:
    """Show how many topics the namespaces of a tenant have, and their rates (messages and bytes a second). Only a super
    user is told the rates.

    \b
    Examples:
      magnetar tenants stats public
      magnetar tenants stats public --sum
    """
    from .stats import RATE_FIELDS

    admin = session.admin
    admin.tenant(tenant)
    rates = _rates_of_namespaces(session)
    rows = [{"namespace": each, "topics": len(admin.topics(each)), **dict(zip(RATE_FIELDS, rates(each), strict=True))}
            for each in admin.namespaces(tenant)]  # fmt: skip
    if sums:
        rows.append({"namespace": tenant, **{name: _sum_column(rows, name) for name in ("topics", *RATE_FIELDS)}})
    session.out.print_rows(rows, ("namespace", "topics", *RATE_FIELDS), empty=f"no namespaces in {tenant}")


def _sum_column(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the sum of one number of the rows; None if it is not known of one of them."""
    known = [row[name] for row in rows]
    return None if None in known else sum(known)


def _rates_of_namespaces(session: CommandSession) -> Callable[[str], list[float | None]]:
    """Returns a function that returns the RATE_FIELDS of a namespace: of its loaded topics, for others have no traffic.
    They are None if the caller may not ask for them."""
    from ...proto.errors import Unauthorized

    try:
        summary = session.admin.broker_summaries()
    except Unauthorized:
        return lambda namespace: [None] * 4
    if summary.silent:
        click.echo(f"rates are without those of {', '.join(summary.silent)}: no answer", err=True)

    def rates(namespace: str) -> list[float | None]:
        here = [each for broker in summary.brokers for each in broker.namespaces if each.name == namespace]
        parts = ((each.rate_in, each.rate_out, each.throughput_in, each.throughput_out) for each in here)
        return [sum(numbers) for numbers in zip((0.0,) * 4, *parts, strict=True)]

    return rates


@session_command(option("-f", "--force", is_flag=True, help="Delete its namespaces and their topics too."))
def delete_tenant(session: CommandSession, tenant: str, force: bool, yes: bool) -> None:
    """Delete a tenant. Refused while the tenant has namespaces, unless --force is given.

    Example: magnetar tenants delete acme
    """
    confirm_deletion(f"Delete tenant {tenant}" + (", all its namespaces and all their topics" if force else ""), yes)
    if force:
        for each in session.admin.namespaces(tenant):
            session.admin.delete_namespace(each, force=True)
    session.admin.delete_tenant(tenant)
    session.out.print_result_text(f"tenant {tenant} deleted", tenant=tenant)


# ----------------------------------------------------------------------------------------------- resource groups
resource_groups = LazyGroup(
    "resourcegroups",
    {
        "list": OPERATION_ROW,
        "create": LazyCommand(".admin.namespaces", "create_resource_group", "Make a resource group."),
        "get": LazyCommand(".admin.namespaces", "get_resource_group", "The rates of a resource group."),
        "update": LazyCommand(".admin.namespaces", "update_resource_group", "Change rates of a resource group."),
        "delete": LazyCommand(".admin.namespaces", "delete_resource_group", "Delete a resource group."),
    },
    with_rows=True,
    help="Resource groups: rates that several namespaces share, in sum over brokers.\n\n"
    "Example: magnetar resourcegroups create batch --msg-publish-rate 10000",
)


def _rate_option(*names: str, what: str) -> Callable[[Any], Any]:
    return option(
        *names, type=click.IntRange(-1), default=None, metavar="N", help=f"{what} a second; 0 or -1: no limit."
    )


RESOURCE_GROUP_OPTIONS = (
    _rate_option("-mp", "--msg-publish-rate", what="Messages published"),
    _rate_option("-bp", "--byte-publish-rate", what="Bytes published"),
    _rate_option("-md", "--msg-dispatch-rate", what="Messages delivered"),
    _rate_option("-bd", "--byte-dispatch-rate", what="Bytes delivered"),
)
_RATES_BY_OPTION = {
    "msg_publish_rate": "publish_rate_messages", "byte_publish_rate": "publish_rate_bytes",
    "msg_dispatch_rate": "dispatch_rate_messages", "byte_dispatch_rate": "dispatch_rate_bytes",
}  # fmt: skip


def _collect_rates(options: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the arguments of `AdminClient.set_resource_group` for the options that were given."""
    return {_RATES_BY_OPTION[name]: max(0, value) for name, value in options.items() if value is not None}


@session_command(*RESOURCE_GROUP_OPTIONS, name="create")
def create_resource_group(session: CommandSession, group: str, **options: int | None) -> None:
    """Create a resource group. A rate that is not given has no limit. Namespaces get into the group with 'magnetar
    namespaces set-resource-group'; the rates hold for all of them together.

    Example: magnetar resourcegroups create batch --msg-publish-rate 10000
    """
    if group in session.admin.resource_groups():
        raise click.UsageError(f"resource group {group} exists: 'magnetar resourcegroups update' changes its rates")
    session.admin.set_resource_group(group, **_collect_rates(options))
    session.out.print_result_text(f"resource group {group} created", group=group)


@session_command(name="get")
def get_resource_group(session: CommandSession, group: str) -> None:
    """Show the rates of a resource group. 0: no limit.

    Example: magnetar resourcegroups get batch
    """
    found = session.admin.resource_group(group)
    session.out.print_record({
        "publishRateInMsgs": found.publish_rate_messages, "publishRateInBytes": found.publish_rate_bytes,
        "dispatchRateInMsgs": found.dispatch_rate_messages, "dispatchRateInBytes": found.dispatch_rate_bytes,
    })  # fmt: skip


@session_command(*RESOURCE_GROUP_OPTIONS, name="update")
def update_resource_group(session: CommandSession, group: str, **options: int | None) -> None:
    """Change rates of a resource group. A rate that is not given stays as it is.

    Example: magnetar resourcegroups update batch --msg-publish-rate 20000 --byte-publish-rate -1
    """
    session.admin.resource_group(group)
    session.admin.set_resource_group(group, **_collect_rates(options))
    session.out.print_result_text(f"resource group {group} updated", group=group)


@session_command(name="delete")
def delete_resource_group(session: CommandSession, group: str, yes: bool) -> None:
    """Delete a resource group. Refused while a namespace is in the group.

    Example: magnetar resourcegroups delete batch
    """
    confirm_deletion(f"Delete resource group {group}", yes)
    session.admin.delete_resource_group(group)
    session.out.print_result_text(f"resource group {group} deleted", group=group)
