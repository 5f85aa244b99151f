"""The permission that each rpc of a broker needs: one row for each rpc, and for each frame that opens a producer or a
consumer.

The rows of administrative operations come from proto/operations.py. The permission is checked before the handler of an
rpc runs (broker/grpc/checked.py); on a stream, when a producer or a consumer is opened (broker/session/). A missing row
fails the start of a broker and tests/broker/access/test_table.py, which also tries every row with every kind of role.
docs/security.md shows this table (`python -m tests.docs.tables`).

Also in this file, below its heading: the rights of a role in a namespace (rights_core).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from ...proto.operations import (
    CONSUME_RULE,
    OPERATE_RULE,
    OPERATIONS,
    Permission,
    PermissionRule,
    PermissionScope,
    make_topic_rule,
)

_OWN = PermissionRule(Permission.OWN)

PERMISSION_RULES: Mapping[str, PermissionRule] = {
    "Broker.Connect open_producer": make_topic_rule(Permission.PRODUCE, "topic"),
    "Broker.Connect subscribe": make_topic_rule(Permission.CONSUME, "topic", "subscription"),
    "Broker.Read": CONSUME_RULE,
    "Broker.WatchTopics": PermissionRule(Permission.SHOWN, PermissionScope.NAMESPACE, "namespace"),
    "Transactions.Find": PermissionRule(Permission.SHOWN),
    "Transactions.Begin": _OWN,
    "Transactions.End": _OWN,
    "Transactions.Status": _OWN,
    "Transactions.CommitBatch": _OWN,
    "Transactions.SinkStatus": _OWN,
    "Transactions.PrepareHalf": _OWN,
    "Transactions.EndHalf": _OWN,
    "Transactions.WatchHalves": _OWN,
    "Transactions.Join": OPERATE_RULE,
    "Transactions.Settle": OPERATE_RULE,
    "Transactions.AbortOpen": OPERATE_RULE,
    **{f"{each.service}.{each.name}": each.rule for each in OPERATIONS.values()},
}


# --------------------------------------------------------------------------------------------------- rights_core
# The rights of a role in a namespace: the decision, from the grants and the tenant's administrators.
#
#     why_right_denied(role, AccessRight.CONSUME, rights, topic, subscription)  →  "" (permitted), or the reason
#
# The rules are Pulsar's (its PulsarAuthorizationProvider), with the differences named here:
#
# 1. An administrator of the tenant may do everything in it.
# 2. PRODUCE and CONSUME need the action of that name, granted at the namespace or at the topic. A partition has the
#    grants of its topic. LOOKUP needs one of the two.
# 3. A subscription with a list of roles takes those roles only, and they need CONSUME too. Without a list, or with an
#    empty one, it takes every role with CONSUME.
# 4. In prefix mode the name of a subscription is the role itself, or begins with the role and `-`. (Pulsar: it begins
#    with the role, so that role `a` may use `ab-x` of role `ab`.)
# 5. A pattern (`team-*`, `*-reader`, `*`) is a name like any other unless the setting
#    `authorization_allow_wildcards_matching` is on.
#
# There is no denial: a role may what any grant gives it. A role that may something cannot lose it by a further grant to
# another role, and nothing depends on the grants of another namespace (tests/broker/access/test_rights.py).


GRANT_ACTIONS = ("produce", "consume", "functions", "sources", "sinks", "packages")
"""Pulsar's. The last four are stored and shown; nothing of Magnetar asks for them."""

ActionsByRole = Mapping[str, tuple[str, ...]]
"""Role → actions."""


class AccessRight(Enum):
    """A right on a topic or a namespace. The value names the actions of which a grant must contain at least one."""

    LOOKUP = "produce or consume"
    PRODUCE = "produce"
    CONSUME = "consume"


class GrantsAndAdministrators(msgspec.Struct, frozen=True):
    """The grants of a namespace and the administrators of its tenant. Permissions in the namespace are decided from
    both. `roles`, `topics`: the granted actions by role, at the namespace and at each topic. `subscriptions`: the roles
    that may use a subscription, by its name. `prefix_mode`: True if the name of a subscription must begin with the role
    that uses it."""

    admins: frozenset[str] = frozenset()  # of the tenant
    roles: ActionsByRole = {}  # at the namespace
    topics: Mapping[str, ActionsByRole] = {}  # by the full name of the topic, without a partition
    subscriptions: Mapping[str, tuple[str, ...]] = {}
    prefix_mode: bool = False


def why_right_denied(
    role: str,
    right: AccessRight,
    rights: GrantsAndAdministrators,
    topic: str,
    subscription: str = "",
    *,
    wildcards: bool = False,
) -> str:
    """Returns the reason why the role does not have the right; "" if the role has the right. `rights`: the grants of
    the namespace; `topic`: the full name of a topic without partition; "": the right is needed at the namespace.
    `wildcards`: whether the roles in grants may contain `*`."""
    if not role:
        return "it has no role"
    if role in rights.admins:
        return ""
    wanted = ("produce", "consume") if right is AccessRight.LOOKUP else (right.value,)
    granted = (rights.roles, rights.topics.get(topic, {}))
    if not any(action in _actions(role, each, wildcards) for each in granted for action in wanted):
        return f"it was not granted {right.value}"
    if not subscription:
        return ""
    return _of_subscription(role, rights, subscription, wildcards)


def _of_subscription(role: str, rights: GrantsAndAdministrators, subscription: str, wildcards: bool) -> str:
    if rights.prefix_mode and subscription != role and not subscription.startswith(f"{role}-"):
        return f"subscriptions of this namespace are named by their role: {role} or {role}-…"
    allowed = rights.subscriptions.get(subscription, ())
    if allowed and not any(_names(each, role, wildcards) for each in allowed):
        return "the subscription takes the roles of its list only"
    return ""


def _actions(role: str, granted: ActionsByRole, wildcards: bool) -> set[str]:
    if not wildcards:
        return set(granted.get(role, ()))
    return {action for pattern, actions in granted.items() if _names(pattern, role, True) for action in actions}


def _names(pattern: str, role: str, wildcards: bool) -> bool:
    if pattern == role:
        return True
    if not wildcards or not pattern:
        return False
    if pattern.endswith("*"):
        return role.startswith(pattern[:-1])
    return pattern.startswith("*") and role.endswith(pattern[1:])
