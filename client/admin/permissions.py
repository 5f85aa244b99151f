"""Methods of AdminClient: grants of roles, and the lists of subscriptions.

The rules are broker/access/core/rights.py's, the verbs pulsar-admin's. A grant replaces what the role had there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.names import check_subscription_name
from .transport import Caller, full_namespace, full_topic


async def namespace_permissions(self: Caller, name: str) -> values.Permissions:
    """Returns the permissions of roles in the namespace, and the lists of its subscriptions; not those granted for
    its topics."""
    return await self._call(op.GET_PERMISSIONS, namespace=full_namespace(name))


async def topic_permissions(self: Caller, topic: str) -> values.Permissions:
    """Returns the permissions granted for the topic alone, for all of its partitions."""
    return await self._call(op.GET_PERMISSIONS, topic=full_topic(topic))


async def grant_namespace_permission(self: Caller, name: str, role: str, actions: Sequence[str]) -> None:
    """Grants the role these actions ("produce", "consume", …) in place of those that it had there. InvalidRequest.
    """
    await _change(self, namespace=full_namespace(name), grant={"role": role, "actions": actions})


async def revoke_namespace_permission(self: Caller, name: str, role: str) -> None:
    """Revokes all that the role had at the namespace. Clients that are connected with it are disconnected within a
    second."""
    await _change(self, namespace=full_namespace(name), revoke=role)


async def grant_topic_permission(self: Caller, topic: str, role: str, actions: Sequence[str]) -> None:
    """Grants a role its actions, like grant_namespace_permission, for one topic and its partitions."""
    await _change(self, topic=full_topic(topic), grant={"role": role, "actions": actions})


async def revoke_topic_permission(self: Caller, topic: str, role: str) -> None:
    """Revokes all that the role had at the topic itself."""
    await _change(self, topic=full_topic(topic), revoke=role)


async def grant_subscription_permission(self: Caller, name: str, subscription: str, roles: Sequence[str]) -> None:
    """Lets only these roles use subscriptions of that name in the namespace; they need `consume` too."""
    change = {"subscription": check_subscription_name(subscription), "roles": roles}
    await _change(self, namespace=full_namespace(name), grant_subscription=change)


async def revoke_subscription_permission(self: Caller, name: str, subscription: str, role: str) -> None:
    """Removes the role from the list; with the last one every role with `consume` may use the subscription again.
    """
    change = {"subscription": check_subscription_name(subscription), "roles": [role]}
    await _change(self, namespace=full_namespace(name), revoke_subscription=change)


async def set_subscription_prefix_mode(self: Caller, name: str, on: bool) -> None:
    """Sets the prefix mode. On: the names of subscriptions in the namespace are the role's name, or begin with it
    and `-`."""
    await _change(self, namespace=full_namespace(name), prefix_mode=on)


async def _change(self: Caller, **change: object) -> None:
    await self._call(op.CHANGE_PERMISSIONS, **change)
