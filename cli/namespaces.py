"""`magnetar namespaces …`: tenant/namespace, and the policies that its topics follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from .lazy import Lazy, LazyGroup
from .session import YES, Session, confirm, connected
from .units import duration, mebibytes

if TYPE_CHECKING:
    from ..proto import wire_pb2 as wire

namespaces = LazyGroup(
    "namespaces",
    {
        "list": Lazy(".namespaces", "list_", "Namespaces of a tenant."),
        "create": Lazy(".namespaces", "create", "Make a namespace."),
        "policies": Lazy(".namespaces", "policies", "A namespace's policies."),
        "update": Lazy(".namespaces", "update", "Change policies."),
        "set-persistence": Lazy(".persistence", "set_persistence", "How many bookies and copies a ledger has."),
        "get-persistence": Lazy(".persistence", "get_persistence", "… as it is set."),
        "remove-persistence": Lazy(".persistence", "remove_persistence", "… back to the brokers' default."),
        "topics": Lazy(".topics", "list_", "Topics of a namespace."),
        "stats": Lazy(".namespaces", "stats", "Messages, storage and backlog of its topics."),
        "delete": Lazy(".namespaces", "delete", "Delete a namespace."),
    },
    {"get": "policies", "set-retention": "update", "set-message-ttl": "update"},
    help="TENANT/NAMESPACE: its topics share policies.\n\nExample: magnetar namespaces create public/orders",
)

POLICIES = {
    "bundles": "bundles",
    "retention_time": "retention_minutes",
    "retention_size": "retention_mib",
    "message_ttl": "message_ttl_seconds",
    "ensemble": "ensemble_size",
    "write_quorum": "write_quorum",
    "ack_quorum": "ack_quorum",
    "default_partitions": "default_partitions",
}
"""Option → field of wire.NamespaceSpec."""


def policies_given(function: Callable[..., None]) -> Callable[..., None]:
    """The options that set a policy; what is not given comes as None."""
    number = click.IntRange(0)
    for option in (
        click.option("-b", "--bundles", type=click.IntRange(1), help="Hash ranges that brokers own (at creation)."),
        click.option(
            "-t",
            "--retention-time",
            callback=lambda _, __, text: duration(text, 60),
            help="Keep acknowledged: 10m, 2h, 3d; -1: for ever.",
        ),
        click.option(
            "-s",
            "--retention-size",
            callback=lambda _, __, text: mebibytes(text),
            help="… up to 100M, 10G; -1: without limit.",
        ),
        click.option(
            "-ttl",
            "--message-ttl",
            "--messageTTL",
            callback=lambda _, __, text: duration(text, 1),
            help="Acknowledge after: 30s, 10m.",
        ),
        click.option("-e", "--ensemble", type=number, help="Bookies of a ledger (0: the broker's default)."),
        click.option("-w", "--write-quorum", type=number, help="Copies of an entry."),
        click.option("-a", "--ack-quorum", type=number, help="Copies that are synced before the ack."),
        click.option("--default-partitions", type=number, help="Of topics made automatically; 0: not partitioned."),
        click.option("--auto-topic-creation/--no-auto-topic-creation", default=None, help="Make topics at first use."),
    ):
        function = option(function)
    return function


def _apply(spec: wire.NamespaceSpec, given: dict[str, Any]) -> None:
    """Sets what was given. Retention by time alone has no limit of size, and the other way round."""
    for option, value in given.items():
        if value is None:
            continue
        if option == "auto_topic_creation":
            spec.auto_topic_creation_off = not value
        else:
            setattr(spec, POLICIES[option], value)
    if spec.retention_minutes and not spec.retention_mib and given["retention_size"] is None:
        spec.retention_mib = -1
    if spec.retention_mib and not spec.retention_minutes and given["retention_time"] is None:
        spec.retention_minutes = -1
    if spec.ensemble_size and not spec.ensemble_size >= spec.write_quorum >= spec.ack_quorum:
        raise click.UsageError("ensemble ≥ write quorum ≥ ack quorum must hold, as in -e 3 -w 3 -a 2")


@click.command("list")
@click.argument("tenant", default="public")
@connected
def list_(session: Session, tenant: str) -> None:
    """Namespaces of a tenant (default public).

    Example: magnetar namespaces list public
    """
    from ..proto import wire_pb2 as wire

    session.out.names(session.call("ListNamespaces", wire.Name(name=tenant)).names, empty=f"no namespaces in {tenant}")


@click.command()
@click.argument("namespace")
@policies_given
@connected
def create(session: Session, namespace: str, **given: Any) -> None:
    """Make a namespace.

    Example: magnetar namespaces create public/orders --retention-time 3d
    """
    from ..proto import wire_pb2 as wire

    spec = wire.NamespaceSpec(name=namespace)
    _apply(spec, given)
    session.call("CreateNamespace", spec)
    session.out.done(f"namespace {namespace} created", namespace=namespace)


@click.command()
@click.argument("namespace")
@policies_given
@connected
def update(session: Session, namespace: str, **given: Any) -> None:
    """Change policies of a namespace; what is not given stays.

    Example: magnetar namespaces update public/default --retention-time 7d --retention-size 10G
    """
    from ..proto import wire_pb2 as wire

    if all(value is None for value in given.values()):
        raise click.UsageError("nothing to change; see 'magnetar namespaces update --help'")
    spec = session.call("GetNamespace", wire.Name(name=namespace))
    _apply(spec, given)
    session.call("UpdateNamespace", spec)
    session.out.done(f"namespace {namespace} updated", namespace=namespace)


@click.command()
@click.argument("namespace", default="public/default")
@connected
def policies(session: Session, namespace: str) -> None:
    """A namespace's policies.

    Example: magnetar namespaces policies public/default
    """
    from ..proto import wire_pb2 as wire

    spec = session.call("GetNamespace", wire.Name(name=namespace))
    shown = {field: getattr(spec, field) for field in POLICIES.values()}
    session.out.record({**shown, "auto_topic_creation": not spec.auto_topic_creation_off})


@click.command()
@click.argument("namespace", default="public/default")
@connected
def stats(session: Session, namespace: str) -> None:
    """Messages, storage and backlog of each topic of a namespace.

    Example: magnetar namespaces stats public/default
    """
    from ..proto import wire_pb2 as wire
    from .stats import COLUMNS, topic_stats

    topics = session.call("ListTopics", wire.ListTopicsRequest(namespace=namespace)).names
    rows = [topic_stats(session, topic) for topic in topics]
    session.out.rows(rows, COLUMNS, empty=f"no topics in {namespace}")


@click.command()
@click.argument("namespace")
@click.option("-f", "--force", is_flag=True, help="Delete its topics too.")
@YES
@connected
def delete(session: Session, namespace: str, force: bool, yes: bool) -> None:
    """Delete a namespace. Refused while it has topics, unless forced.

    Example: magnetar namespaces delete public/orders
    """
    from ..proto import wire_pb2 as wire

    confirm(f"Delete namespace {namespace}" + (" and all its topics" if force else ""), yes)
    session.call("DeleteNamespace", wire.DeleteRequest(name=namespace, force=force))
    session.out.done(f"namespace {namespace} deleted", namespace=namespace)
