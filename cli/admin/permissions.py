"""`magnetar namespaces|topics grant-permission …`: who may do what, with pulsar-admin's verbs.

A grant replaces the actions that the role had at that place. What changes holds at once: who is connected and may not
be any more is disconnected within a second.
"""

from __future__ import annotations

import click
from click import option

from ..common.lazy import Lazy
from ..common.session import Session, verb

OF_NAMESPACES = {
    "grant-permission": Lazy(".admin.permissions", "grant_namespace", "Let a role produce or consume in it."),
    "revoke-permission": Lazy(".admin.permissions", "revoke_namespace", "Take that from a role."),
    "permissions": Lazy(".admin.permissions", "of_namespace", "Which roles may do what in it."),
    "grant-subscription-permission": Lazy(
        ".admin.permissions", "grant_subscription", "Only these roles may use a subscription."
    ),
    "revoke-subscription-permission": Lazy(".admin.permissions", "revoke_subscription", "Take a role off that list."),
    "subscription-permission": Lazy(".admin.permissions", "of_subscriptions", "The lists of its subscriptions."),
    "set-subscription-auth-mode": Lazy(
        ".admin.permissions", "set_auth_mode", "Whether subscriptions are named by their role."
    ),
    "get-subscription-auth-mode": Lazy(".admin.permissions", "get_auth_mode", "Show that."),
}
OF_TOPICS = {
    "grant-permission": Lazy(".admin.permissions", "grant_topic", "Let a role produce or consume."),
    "revoke-permission": Lazy(".admin.permissions", "revoke_topic", "Take that from a role."),
    "permissions": Lazy(".admin.permissions", "of_topic", "Which roles were granted what for the topic alone."),
}

ROLE = option("-r", "--role", required=True, metavar="ROLE")
ACTIONS = option(
    "-a", "--actions", required=True, metavar="ACTION,…", help="produce, consume (functions, sources, sinks, packages)."
)
SUBSCRIPTION = option("-s", "--subscription", required=True, metavar="NAME")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@verb(ROLE, ACTIONS, name="grant-permission")
def grant_namespace(session: Session, namespace: str, role: str, actions: str) -> None:
    """Let a role produce or consume in all topics of a namespace. It has these actions and no others there.

    Example: magnetar namespaces grant-permission acme/orders --role billing --actions consume
    """
    session.admin.grant_namespace_permission(namespace, role, _split(actions))
    _granted(session, role, actions, namespace)


@verb(ROLE, name="revoke-permission")
def revoke_namespace(session: Session, namespace: str, role: str) -> None:
    """Take from a role what it was granted at a namespace. What its topics grant it stays.

    Example: magnetar namespaces revoke-permission acme/orders --role billing
    """
    session.admin.revoke_namespace_permission(namespace, role)
    session.out.done(f"role {role} has no permission of its own in {namespace}", role=role, place=namespace)


@verb(name="permissions")
def of_namespace(session: Session, namespace: str) -> None:
    """Which roles may do what in a namespace.

    Example: magnetar namespaces permissions acme/orders
    """
    _roles(session, session.admin.namespace_permissions(namespace).roles, namespace)


@verb(ROLE, ACTIONS, name="grant-permission")
def grant_topic(session: Session, topic: str, role: str, actions: str) -> None:
    """Let a role produce to a topic or consume from it, with all its partitions.

    Example: magnetar topics grant-permission acme/orders/eu --role web --actions produce,consume
    """
    session.admin.grant_topic_permission(topic, role, _split(actions))
    _granted(session, role, actions, topic)


@verb(ROLE, name="revoke-permission")
def revoke_topic(session: Session, topic: str, role: str) -> None:
    """Take from a role what it was granted at a topic. What the namespace grants it stays.

    Example: magnetar topics revoke-permission acme/orders/eu --role web
    """
    session.admin.revoke_topic_permission(topic, role)
    session.out.done(f"role {role} has no permission of its own for {topic}", role=role, place=topic)


@verb(name="permissions")
def of_topic(session: Session, topic: str) -> None:
    """Which roles were granted what for a topic alone, beside what its namespace grants.

    Example: magnetar topics permissions acme/orders/eu
    """
    _roles(session, session.admin.topic_permissions(topic).roles, topic)


@verb(SUBSCRIPTION, option("-r", "--roles", required=True, metavar="ROLE,…"), name="grant-subscription-permission")
def grant_subscription(session: Session, namespace: str, subscription: str, roles: str) -> None:
    """Only these roles may use the subscription, in all topics of the namespace. They need `consume` too.

    Example: magnetar namespaces grant-subscription-permission acme/orders -s billing --roles billing,audit
    """
    session.admin.grant_subscription_permission(namespace, subscription, _split(roles))
    session.out.done(f"subscription {subscription} of {namespace} takes {roles}", subscription=subscription)


@verb(SUBSCRIPTION, ROLE, name="revoke-subscription-permission")
def revoke_subscription(session: Session, namespace: str, subscription: str, role: str) -> None:
    """Take a role off a subscription's list. With the last one the list goes: every role with `consume` may use it.

    Example: magnetar namespaces revoke-subscription-permission acme/orders -s billing --role audit
    """
    session.admin.revoke_subscription_permission(namespace, subscription, role)
    session.out.done(f"role {role} is not on the list of subscription {subscription}", subscription=subscription)


@verb(name="subscription-permission")
def of_subscriptions(session: Session, namespace: str) -> None:
    """Which roles may use which subscriptions. One that is not shown takes every role with `consume`.

    Example: magnetar namespaces subscription-permission acme/orders
    """
    found = session.admin.namespace_permissions(namespace).subscriptions
    rows = [{"subscription": name, "roles": ", ".join(roles)} for name, roles in sorted(found.items())]
    session.out.rows(rows, ("subscription", "roles"), empty=f"no subscription of {namespace} has a list of roles")


@verb(
    option("-m", "--subscription-auth-mode", "mode", required=True, type=click.Choice(["None", "Prefix"])),
    name="set-subscription-auth-mode",
)
def set_auth_mode(session: Session, namespace: str, mode: str) -> None:
    """Prefix: the name of a subscription is the role's, or begins with it and `-`.

    Example: magnetar namespaces set-subscription-auth-mode acme/orders --subscription-auth-mode Prefix
    """
    session.admin.set_subscription_prefix_mode(namespace, mode == "Prefix")
    session.out.done(f"subscriptions of {namespace}: mode {mode}", mode=mode)


@verb(name="get-subscription-auth-mode")
def get_auth_mode(session: Session, namespace: str) -> None:
    """Whether subscriptions are named by their role.

    Example: magnetar namespaces get-subscription-auth-mode acme/orders
    """
    on = session.admin.namespace_permissions(namespace).prefix_mode
    session.out.record({"subscriptionAuthMode": "Prefix" if on else "None"})


def _granted(session: Session, role: str, actions: str, place: str) -> None:
    session.out.done(f"role {role} may {actions} in {place}", role=role, place=place)


def _roles(session: Session, roles: object, place: str) -> None:
    assert isinstance(roles, dict), "a mapping of roles to actions"
    rows = [{"role": role, "actions": ", ".join(actions)} for role, actions in sorted(roles.items())]
    session.out.rows(rows, ("role", "actions"), empty=f"no role was granted anything at {place}")
