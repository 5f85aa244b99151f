"""Methods of AdminClient: tenants, namespaces, policies and properties of both levels, and the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.errors import MagnetarError, NotFound
from ...proto.names import TopicName, check_subscription_name, check_tenant_name
from ...proto.policies import Policies, decode, encode
from .grpc_transport import OperationCaller, full_namespace, full_topic
from .topics import skip_messages, topics

AT_ONCE = 16
"""Topics of a namespace that are acted on at the same time."""
BROKER_ASK_S = 5.0
"""Seconds that one broker may take to report how many topics it has loaded."""



async def create_tenant(
    self: OperationCaller, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
) -> None:
    """Creates a tenant. `admin_roles` may administer it; with `allowed_clusters` it may have namespaces only in
    those clusters. Raises InvalidName."""
    await self._call(op.CREATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))


async def update_tenant(
    self: OperationCaller, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
) -> None:
    """Replaces both settings of a tenant; a parameter that is left out becomes empty."""
    await self._call(op.UPDATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))


async def delete_tenant(self: OperationCaller, name: str) -> None:
    """Deletes a tenant. Raises Busy if it has namespaces."""
    await self._call(op.DELETE_TENANT, tenant=check_tenant_name(name))


# ------------------------------------------------------------------------------------ namespaces
async def namespaces(self: OperationCaller, tenant: str) -> list[str]:
    """Returns the namespaces of a tenant as tenant/namespace, sorted."""
    return await self._all(op.LIST_NAMESPACES, tenant=check_tenant_name(tenant))


async def create_namespace(
    self: OperationCaller, name: str, *, bundles: int = 0, auto_topic_creation: bool = True, default_partitions: int = 0
) -> None:
    """Creates a namespace. The parameters are those of NamespaceInfo."""
    await self._call(
        op.CREATE_NAMESPACE, namespace=full_namespace(name), bundles=bundles,
        auto_topic_creation=auto_topic_creation, default_partitions=default_partitions,
    )  # fmt: skip


async def update_namespace(
    self: OperationCaller, name: str, *, bundles: int | None = None, auto_topic_creation: bool | None = None,
    default_partitions: int | None = None, is_creation_set: bool | None = None,
) -> None:  # fmt: skip
    """Updates the settings of a namespace; a setting that is None stays as it is. The number of bundles is fixed
    at creation: raises InvalidRequest for another number."""
    old = await self._call(op.GET_NAMESPACE, namespace=full_namespace(name))
    if is_creation_set is None:
        is_creation_set = old.is_creation_set or not (auto_topic_creation is None and default_partitions is None)
    await self._call(
        op.UPDATE_NAMESPACE, namespace=old.name, bundles=old.bundles if bundles is None else bundles,
        auto_topic_creation=old.auto_topic_creation if auto_topic_creation is None else auto_topic_creation,
        default_partitions=old.default_partitions if default_partitions is None else default_partitions,
        is_creation_set=is_creation_set,
    )  # fmt: skip


async def unload_namespace(self: OperationCaller, name: str, bundle: str = "") -> values.Unloaded:
    """Unloads all bundles of a namespace, or the one named, from their brokers; the next lookups find new owners.
    """
    return await self._call(op.UNLOAD_NAMESPACE, namespace=full_namespace(name), bundle=bundle)


async def clear_namespace_backlog(self: OperationCaller, name: str, subscription: str = "") -> int:
    """Acknowledges everything for `subscription`, or for every subscription. Returns the number of topics and
    partitions."""
    return await _each_part(self, name, lambda topic: skip_messages(self, topic, subscription), persistent_only=True)


async def unsubscribe_namespace(self: OperationCaller, name: str, subscription: str, *, force: bool = False) -> int:
    """Deletes `subscription` from every topic that has it. Returns the number of topics and partitions."""
    asked = {"subscription": check_subscription_name(subscription), "force": force}
    return await _each_part(self, name, lambda topic: self._call(op.DELETE_SUBSCRIPTION, topic=topic, **asked))


async def _each_part(
    self: OperationCaller,
    namespace: str,
    act: Callable[[str], Coroutine[Any, Any, None]],
    *,
    persistent_only: bool = False,
) -> int:
    """Calls `act` for all topics, also after a failure; then raises the first failure. Returns for how many it
    succeeded; a topic for which it raises NotFound is not counted."""
    found = await topics(self, namespace, partitions=True)
    if persistent_only:
        found = [topic for topic in found if TopicName.parse(topic).persistent]
    done, failed = 0, list[tuple[str, MagnetarError]]()

    async def one(topic: str) -> None:
        nonlocal done
        try:
            await act(topic)
            done += 1
        except NotFound:
            pass
        except MagnetarError as error:
            failed.append((topic, error))

    for start in range(0, len(found), AT_ONCE):
        await asyncio.gather(*map(one, found[start : start + AT_ONCE]))
    if failed:
        topic, error = failed[0]
        text = f"{done} topics are done and {len(failed)} are not, the first {topic}: {error.message}"
        raise type(error)(text, **error.fields) from error
    return done


# ------------------------------------------------------------------------------------ policies and properties
async def namespace_policies(self: OperationCaller, name: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set for the namespace; with `applied` every policy, with what is inherited from
    the broker."""
    return decode(await self._call(op.GET_POLICIES, namespace=full_namespace(name), applied=applied))


async def set_namespace_policies(self: OperationCaller, name: str, policies: Policies) -> None:
    """Sets policies of a namespace: the fields that are not None get these values; the others stay."""
    await self._call(op.CHANGE_POLICIES, namespace=full_namespace(name), set=encode(policies))


async def remove_namespace_policies(self: OperationCaller, name: str, *fields: str) -> None:
    """Removes these fields from the policies of a namespace: they are inherited again."""
    await self._call(op.CHANGE_POLICIES, namespace=full_namespace(name), remove=fields)


async def topic_policies(self: OperationCaller, topic: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set for a topic; with `applied` every policy, with what the topic inherits
    from its namespace, then from the broker."""
    return decode(await self._call(op.GET_POLICIES, topic=full_topic(topic), applied=applied))


async def set_topic_policies(self: OperationCaller, topic: str, policies: Policies) -> None:
    """Sets policies of a topic, like set_namespace_policies."""
    await self._call(op.CHANGE_POLICIES, topic=full_topic(topic), set=encode(policies))


async def remove_topic_policies(self: OperationCaller, topic: str, *fields: str) -> None:
    """Removes fields from the policies of a topic, like remove_namespace_policies."""
    await self._call(op.CHANGE_POLICIES, topic=full_topic(topic), remove=fields)


async def namespace_properties(self: OperationCaller, name: str) -> dict[str, str]:
    """Returns the properties of a namespace; none are inherited."""
    return await self._call(op.GET_PROPERTIES, namespace=full_namespace(name))


async def set_namespace_properties(self: OperationCaller, name: str, properties: Mapping[str, str]) -> None:
    """Sets properties of a namespace; its other properties stay. Raises InvalidRequest if they are too many or
    too long (proto/policies.py)."""
    await self._call(op.CHANGE_PROPERTIES, namespace=full_namespace(name), set=properties)


async def remove_namespace_properties(self: OperationCaller, name: str, *keys: str) -> None:
    """Removes properties of a namespace; without `keys` all of them. A missing key is ignored."""
    await self._call(op.CHANGE_PROPERTIES, namespace=full_namespace(name), remove=keys, clear=not keys)


async def topic_properties(self: OperationCaller, topic: str) -> dict[str, str]:
    """Returns the properties of a topic; a partition has those of its topic. None are inherited."""
    return await self._call(op.GET_PROPERTIES, topic=full_topic(topic))


async def set_topic_properties(self: OperationCaller, topic: str, properties: Mapping[str, str]) -> None:
    """Sets properties of a topic, like set_namespace_properties."""
    await self._call(op.CHANGE_PROPERTIES, topic=full_topic(topic), set=properties)


async def remove_topic_properties(self: OperationCaller, topic: str, *keys: str) -> None:
    """Removes properties of a topic, like remove_namespace_properties."""
    await self._call(op.CHANGE_PROPERTIES, topic=full_topic(topic), remove=keys, clear=not keys)


# ------------------------------------------------------------------------------------ the cluster
async def brokers(self: OperationCaller) -> list[values.BrokerInfo]:
    """Returns the registered brokers, each with its numbers of loaded topics and owned bundles; None if the broker
    did not answer within 5 s."""
    return await asyncio.gather(*map(partial(_broker, self), await self._all(op.LIST_BROKERS)))


async def _broker(self: OperationCaller, listed: values.BrokerInfo) -> values.BrokerInfo:
    try:
        async with asyncio.timeout(min(BROKER_ASK_S, self._timeout_s)):
            found = await self._transport.call(op.LIST_BROKERS, {}, at=listed.endpoint)
    except (MagnetarError, TimeoutError):
        found = ()
    own = next((each for each in found if each.endpoint == listed.endpoint), None)
    return own or values.BrokerInfo(listed.name, listed.endpoint, draining=listed.draining)


async def drain_broker(self: OperationCaller, name: str) -> None:
    """Lets a broker give what it owns to the other brokers of its group, and get nothing, until `undrain_broker`,
    also after a restart. It begins within some seconds; `brokers()` shows what is left. Raises NotFound."""
    await self._call(op.DRAIN_BROKER, name=name)


async def undrain_broker(self: OperationCaller, name: str) -> None:
    """Lets a broker get bundles again. Nothing comes back by itself. Raises NotFound."""
    await self._call(op.UNDRAIN_BROKER, name=name)


async def find_orphans(self: OperationCaller, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
    """Returns the orphaned ledgers. With `remove` they are fenced and deleted now, as brokers do every hour. With
    `unexplained` also those whose owner has no record, which no broker deletes by itself."""
    return await self._call(op.FIND_ORPHANS, remove=remove, unexplained=unexplained)



def _tenant(name: str, admin_roles: Sequence[str], allowed_clusters: Sequence[str]) -> dict[str, object]:
    return {"tenant": check_tenant_name(name), "admin_roles": admin_roles, "allowed_clusters": allowed_clusters}


# --------------------------------------------------------------------------------------------------- permissions
# Methods of AdminClient: grants of roles, and the lists of subscriptions.
#
# The rules are broker/access/table_core.py's, the verbs pulsar-admin's. A grant replaces what the role had there.


async def namespace_permissions(self: OperationCaller, name: str) -> values.Permissions:
    """Returns the permissions of roles in the namespace, and the roles of its restricted subscriptions.
    Permissions for single topics are not included."""
    return await self._call(op.GET_PERMISSIONS, namespace=full_namespace(name))


async def topic_permissions(self: OperationCaller, topic: str) -> values.Permissions:
    """Returns the permissions that were granted for this topic, with all its partitions. Those of its namespace
    are not included."""
    return await self._call(op.GET_PERMISSIONS, topic=full_topic(topic))


async def grant_namespace_permission(self: OperationCaller, name: str, role: str, actions: Sequence[str]) -> None:
    """Grants `role` these actions ("produce", "consume", …) at the namespace; they replace its earlier ones. Raises
    InvalidRequest."""
    await _change(self, namespace=full_namespace(name), grant={"role": role, "actions": actions})


async def revoke_namespace_permission(self: OperationCaller, name: str, role: str) -> None:
    """Revokes all permissions of `role` at the namespace. Its connected clients are disconnected within a second.
    """
    await _change(self, namespace=full_namespace(name), revoke=role)


async def grant_topic_permission(self: OperationCaller, topic: str, role: str, actions: Sequence[str]) -> None:
    """Grants `role` its actions like grant_namespace_permission, for one topic and its partitions."""
    await _change(self, topic=full_topic(topic), grant={"role": role, "actions": actions})


async def revoke_topic_permission(self: OperationCaller, topic: str, role: str) -> None:
    """Revokes all permissions of `role` at the topic itself."""
    await _change(self, topic=full_topic(topic), revoke=role)


async def grant_subscription_permission(
    self: OperationCaller, name: str, subscription: str, roles: Sequence[str]
) -> None:
    """Restricts subscriptions of that name in the namespace to `roles`, which also need `consume`."""
    change = {"subscription": check_subscription_name(subscription), "roles": roles}
    await _change(self, namespace=full_namespace(name), grant_subscription=change)


async def revoke_subscription_permission(self: OperationCaller, name: str, subscription: str, role: str) -> None:
    """Removes `role` from the roles of a restricted subscription. Without any, every role with `consume` may use it
    again."""
    change = {"subscription": check_subscription_name(subscription), "roles": [role]}
    await _change(self, namespace=full_namespace(name), revoke_subscription=change)


async def set_subscription_prefix_mode(self: OperationCaller, name: str, on: bool) -> None:
    """Sets the prefix mode. If it is on, a subscription of the namespace must be named like its role, or begin with
    the role and `-`."""
    await _change(self, namespace=full_namespace(name), prefix_mode=on)


async def _change(self: OperationCaller, **change: object) -> None:
    await self._call(op.CHANGE_PERMISSIONS, **change)
