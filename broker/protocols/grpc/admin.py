"""The Admin service of proto/wire.proto: translates and calls; decides nothing.

Tenants, namespaces and lists of topics come from the metadata and any broker answers. What concerns a loaded topic
(statistics, subscriptions, trim, terminate, unload, delete) is answered by its owner: NotOwner elsewhere, with the
owner's address in the field `owner`; ask Lookup first. For a partitioned topic name a partition. Deleting a partitioned
topic, or a namespace by force, asks the owners of the others itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from ....metadata.records import BrokerRecord, NamespaceRecord, TenantRecord
from ....proto import wire_pb2 as wire
from ....proto.errors import MagnetarError, NotFound
from ....proto.names import MessageId, NamespaceName, TopicName, check_role
from ....proto.policies import decode, encode
from ....runtime.access import Principal
from ....runtime.network import CallContext, Endpoint, rpc
from ....runtime.world import World
from ...access.core.table import Permission
from ...node.topic_manager import TopicManager
from ...session import statistics
from ...session.administration import Administration, Unloaded
from ...session.schemas import Schemas
from ...subscription.core.redelivery_backoff import TOPIC as DEAD_LETTER_TOPIC
from . import translate
from .examine import ExamineService, delivery
from .schemas import SchemaService
from .stats import fields
from .transactions import TransactionAdminService

_LOG = logging.getLogger("magnetar.broker")

PAGE_BYTES, PAGE_S = 1 << 20, 2.0
"""Of one answer with the statistics of a namespace: it ends after one of the two."""
STATS_AT_ONCE = 32
"""Topics of a namespace that are asked, and loaded perhaps, at a time."""
FORWARD_TIMEOUT_S = 30.0
"""Of a request that this broker passes on to the owner of a topic."""
LIST_TIMEOUT_S = 5.0
"""Of asking another broker what it has in memory: a list is not held up by one that hangs."""


class _OtherBrokers:
    """`OtherBrokers` of the administration, over the Admin service of each."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def delete_topic(self, broker: BrokerRecord, topic: TopicName, *, force: bool, incarnation: int) -> None:
        asked = wire.DeleteRequest(name=topic.full, force=force, incarnation=incarnation)
        await ask(self._world, broker.endpoint, "DeleteTopic", asked)

    async def check_delete(self, broker: BrokerRecord, topic: TopicName, *, force: bool) -> int:
        asked = wire.DeleteRequest(name=topic.full, force=force)
        checked: wire.DeleteCheck = await ask(self._world, broker.endpoint, "CheckDelete", asked)
        return checked.incarnation

    async def unload_namespace(self, broker: BrokerRecord, name: NamespaceName, bundle: str) -> Unloaded:
        asked = wire.UnloadNamespaceRequest(namespace=str(name), bundle=bundle, here=True)
        found = await ask(self._world, broker.endpoint, "UnloadNamespace", asked)
        return Unloaded(found.topics, found.bundles)

    async def topics_in_memory(self, broker: BrokerRecord, name: NamespaceName) -> Sequence[str]:
        asked = wire.ListTopicsRequest(namespace=str(name), in_memory_here=True)
        return list((await ask(self._world, broker.endpoint, "ListTopics", asked, timeout_s=LIST_TIMEOUT_S)).names)


async def ask(
    world: World, endpoint: str, method: str, request: Message, *, timeout_s: float = FORWARD_TIMEOUT_S
) -> Any:
    """The same question to the Admin service of another broker, with the rights of this one."""
    channel = world.network.connect(Endpoint.parse(endpoint))
    try:
        return await channel.call(rpc("Admin", method), request, timeout_s=timeout_s)
    finally:
        await channel.close()


class AdminService(ExamineService, SchemaService, TransactionAdminService):
    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._administration = Administration(broker, _OtherBrokers(broker.world))
        self._schemas = Schemas(broker)

    # ------------------------------------------------------------------ tenants
    async def list_tenants(self, request: wire.Empty, context: CallContext) -> wire.Names:
        administers = partial(self._broker.access.administers, context.principal)
        return wire.Names(names=[name for name in await self._broker.catalog.tenants() if await administers(name)])

    async def create_tenant(self, request: wire.TenantSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.create_tenant(request.name, _tenant(request))
        return wire.Empty()

    async def get_tenant(self, request: wire.Name, context: CallContext) -> wire.TenantSpec:
        record = await self._broker.catalog.tenant(request.name)
        return wire.TenantSpec(
            name=request.name, admin_roles=record.admin_roles, allowed_clusters=record.allowed_clusters
        )

    async def update_tenant(self, request: wire.TenantSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.update_tenant(request.name, _tenant(request))
        return wire.Empty()

    async def delete_tenant(self, request: wire.Name, context: CallContext) -> wire.Empty:
        await self._broker.catalog.delete_tenant(request.name)
        return wire.Empty()

    # ------------------------------------------------------------------ namespaces
    async def list_namespaces(self, request: wire.Name, context: CallContext) -> wire.Names:
        return wire.Names(names=await self._broker.catalog.namespaces(request.name))

    async def create_namespace(self, request: wire.NamespaceSpec, context: CallContext) -> wire.Empty:
        record = _namespace(request, self._broker.config.namespace_bundles)
        await self._broker.catalog.create_namespace(NamespaceName.parse(request.name), record)
        return wire.Empty()

    async def get_namespace(self, request: wire.Name, context: CallContext) -> wire.NamespaceSpec:
        record = await self._broker.catalog.namespace(NamespaceName.parse(request.name))
        return wire.NamespaceSpec(
            name=request.name, bundles=record.bundles,
            auto_topic_creation_off=not record.auto_topic_creation, default_partitions=record.default_partitions,
            is_creation_set=record.is_creation_set,
        )  # fmt: skip

    async def update_namespace(self, request: wire.NamespaceSpec, context: CallContext) -> wire.Empty:
        record = _namespace(request, self._broker.config.namespace_bundles)
        await self._broker.catalog.update_namespace(NamespaceName.parse(request.name), record)
        return wire.Empty()

    async def delete_namespace(self, request: wire.DeleteRequest, context: CallContext) -> wire.Empty:
        await self._administration.delete_namespace(NamespaceName.parse(request.name), force=request.force)
        return wire.Empty()

    async def unload_namespace(
        self, request: wire.UnloadNamespaceRequest, context: CallContext
    ) -> wire.UnloadNamespaceReply:
        name = NamespaceName.parse(request.namespace)
        found = await self._administration.unload_namespace(name, request.bundle, here=request.here)
        return wire.UnloadNamespaceReply(topics=found.topics, bundles=found.bundles)

    # ------------------------------------------------------------------ policies
    async def get_policies(self, request: wire.PoliciesRequest, context: CallContext) -> wire.PoliciesReply:
        found = await self._administration.policies(request.namespace, request.topic, applied=request.applied)
        return wire.PoliciesReply(policies=encode(found))

    async def change_policies(self, request: wire.ChangePoliciesRequest, context: CallContext) -> wire.Empty:
        given = decode(request.set)
        await self._check_letters(given.dead_letter_topic or "", context)
        await self._administration.change_policies(request.namespace, request.topic, given, request.remove)
        return wire.Empty()

    async def get_properties(self, request: wire.PlaceRequest, context: CallContext) -> wire.PropertiesReply:
        found = await self._administration.properties(request.namespace, request.topic)
        return wire.PropertiesReply(properties=found)

    async def change_properties(self, request: wire.ChangePropertiesRequest, context: CallContext) -> wire.Empty:
        await self._administration.change_properties(
            request.namespace, request.topic, request.set, request.remove, clear=request.clear
        )
        return wire.Empty()

    # ------------------------------------------------------------------ permissions
    async def get_permissions(self, request: wire.PermissionsRequest, context: CallContext) -> wire.PermissionsReply:
        found = await self._administration.permissions(request.namespace, request.topic)
        return wire.PermissionsReply(
            roles={role: wire.Names(names=actions) for role, actions in found.roles.items()},
            subscriptions={name: wire.Names(names=roles) for name, roles in found.subscriptions.items()},
            prefix_mode=found.prefix_mode,
        )

    async def change_permissions(self, request: wire.ChangePermissionsRequest, context: CallContext) -> wire.Empty:
        change = translate.permission_change(request)
        await self._administration.change_permissions(request.namespace, request.topic, change)
        return wire.Empty()

    async def _check_letters(self, topic: str, context: CallContext) -> None:
        """Unauthorized: who names a dead letter topic has to be able to publish there, because the broker will."""
        if topic:
            name = TopicName.parse(topic)
            await self._broker.access.require(context.principal, Permission.PRODUCE, topic=name, peer=context.peer)

    # ------------------------------------------------------------------ topics
    async def list_topics(self, request: wire.ListTopicsRequest, context: CallContext) -> wire.Names:
        """What is stored, and the non-persistent topics that brokers have in memory."""
        name = NamespaceName.parse(request.namespace)
        shown = await self._broker.access.shown(context.principal, name)
        if request.in_memory_here:
            return wire.Names(names=filter(shown, sorted(await self._administration.topics_in_memory(name))))
        found = await self._topics_of(name, context.principal, partitions=request.partitions)
        return wire.Names(names=filter(shown, found))

    async def _topics_of(self, name: NamespaceName, principal: Principal, *, partitions: bool) -> Sequence[str]:
        """A namespace that is missing has no topics for a caller who could not see any."""
        try:
            return await self._administration.topics(name, partitions=partitions)
        except NotFound:
            if await self._broker.access.administers(principal, name.tenant):
                raise
            return []

    async def create_topic(self, request: wire.TopicSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.create_topic(TopicName.parse(request.name), request.partitions)
        return wire.Empty()

    async def update_topic(self, request: wire.TopicSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.add_partitions(TopicName.parse(request.name), request.partitions)
        return wire.Empty()

    async def delete_topic(self, request: wire.DeleteRequest, context: CallContext) -> wire.Empty:
        name = TopicName.parse(request.name)
        await self._administration.delete_topic(name, force=request.force, incarnation=request.incarnation)
        return wire.Empty()

    async def check_delete(self, request: wire.DeleteRequest, context: CallContext) -> wire.DeleteCheck:
        found = await self._administration.check_delete(TopicName.parse(request.name), force=request.force)
        return wire.DeleteCheck(incarnation=found)

    async def topic_stats(self, request: wire.Name, context: CallContext) -> wire.TopicStatsReply:
        topic = await self._topic(request.name)
        found = await statistics.of_topic(topic, self._broker.endpoint, precise=request.precise_backlog)
        return wire.TopicStatsReply(**fields(found))

    async def namespace_stats(
        self, request: wire.NamespaceStatsRequest, context: CallContext
    ) -> wire.NamespaceStatsReply:
        """Of the caller's topics that are this broker's, loaded for it where they are not; a page of about a MiB. A
        topic that cannot be served now is left out: who asks for it alone learns why."""
        name = NamespaceName.parse(request.namespace)
        shown = await self._broker.access.shown(context.principal, name)
        found = wire.NamespaceStatsReply(
            here=self._broker.endpoint, brokers=[each.endpoint for each in await self._broker.brokers()]
        )
        names = [each for each in await self._administration.topics_here(name, request.after) if shown(each)]
        clock = self._broker.world.clock
        size, end_s = 0, clock.monotonic() + PAGE_S
        for start in range(0, len(names), STATS_AT_ONCE):
            part = names[start : start + STATS_AT_ONCE]
            for each in await asyncio.gather(*map(self._stats_of, part)):
                if each is not None:
                    found.topics.append(each)
                    size += each.ByteSize()
            if (size > PAGE_BYTES or clock.monotonic() > end_s) and part[-1] != names[-1]:
                found.next = part[-1]
                break
        return found

    async def _stats_of(self, name: str) -> wire.TopicStatsReply | None:
        try:
            topic = self._broker.loaded.get(name) or await self._topic(name)
            found = await statistics.of_topic(topic, self._broker.endpoint, ages=False)
            return wire.TopicStatsReply(**fields(found))
        except MagnetarError as error:
            _LOG.debug("no statistics of %s among those of its namespace: %s", name, error)
            return None

    async def topic_internal_stats(self, request: wire.Name, context: CallContext) -> wire.TopicInternalStatsReply:
        topic = await self._topic(request.name)
        return wire.TopicInternalStatsReply(**fields(statistics.internals(topic, self._broker.cache.bytes)))

    async def unload_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        await self._administration.unload_topic(TopicName.parse(request.name))
        return wire.Empty()

    async def trim_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        topic = await self._topic(request.name)
        await topic.trim()
        return wire.Empty()

    async def compact(self, request: wire.Name, context: CallContext) -> wire.Empty:
        await self._administration.compact(TopicName.parse(request.name))
        return wire.Empty()

    async def compaction_status(self, request: wire.Name, context: CallContext) -> wire.CompactionStatusReply:
        found = statistics.of_compaction(await self._topic(request.name))
        reply = wire.CompactionStatusReply(**fields(found))
        if found.ledger_id < 0:
            reply.ClearField("horizon")
        return reply

    async def terminate_topic(self, request: wire.Name, context: CallContext) -> wire.MessageId:
        topic = await self._topic(request.name)
        last = await topic.log.terminate()
        return wire.MessageId(
            ledger_id=last.ledger_id, entry_id=last.entry_id, partition=topic.name.partition, batch_index=-1
        )

    # ------------------------------------------------------------------ subscriptions
    async def list_subscriptions(self, request: wire.Name, context: CallContext) -> wire.Names:
        topic = await self._topic(request.name)
        return wire.Names(names=sorted(name for name, each in topic.subscriptions.items() if each.durable))

    async def create_subscription(self, request: wire.SubscriptionSpec, context: CallContext) -> wire.Empty:
        start = MessageId.from_wire(request.position) if request.HasField("position") else None
        await self._check_letters(request.properties.get(DEAD_LETTER_TOPIC, ""), context)
        await (await self._backlogs(request.topic)).create(request.name, start, dict(request.properties))
        return wire.Empty()

    async def get_subscription_properties(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.SubscriptionSpec:
        found = (await self._backlogs(request.topic)).properties(request.name)
        return wire.SubscriptionSpec(topic=request.topic, name=request.name, properties=found)

    async def set_subscription_properties(self, request: wire.SubscriptionSpec, context: CallContext) -> wire.Empty:
        await self._check_letters(request.properties.get(DEAD_LETTER_TOPIC, ""), context)
        await (await self._backlogs(request.topic)).set_properties(request.name, dict(request.properties))
        return wire.Empty()

    async def delete_subscription(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.Empty:
        topic = await self._topic(request.topic)
        await topic.unsubscribe(request.name, force=request.force)
        return wire.Empty()

    async def reset_subscription(self, request: wire.ResetSubscriptionRequest, context: CallContext) -> wire.Empty:
        to = MessageId.from_wire(request.message_id) if request.HasField("message_id") else None
        time_ms = request.publish_time_ms if request.HasField("publish_time_ms") else None
        backlogs = await self._backlogs(request.topic)
        await backlogs.reset(request.name, to, time_ms, inclusive=not request.exclude)
        return wire.Empty()

    async def skip_messages(self, request: wire.SkipMessagesRequest, context: CallContext) -> wire.Empty:
        await (await self._backlogs(request.topic)).skip(request.name, request.messages)
        return wire.Empty()

    async def peek_messages(self, request: wire.PeekMessagesRequest, context: CallContext) -> wire.PeekMessagesReply:
        shown = await (await self._backlogs(request.topic)).peek(request.name, request.messages)
        return wire.PeekMessagesReply(entries=map(delivery, shown))

    # ------------------------------------------------------------------ the cluster
    async def list_brokers(self, request: wire.Empty, context: CallContext) -> wire.BrokersReply:
        broker = self._broker
        return wire.BrokersReply(
            brokers=[
                wire.BrokerStatus(
                    name=each.name, endpoint=each.endpoint,
                    topics=len(broker.loaded) if each.name == broker.name else 0,
                )
                for each in await broker.brokers()
            ]
        )  # fmt: skip

    async def list_bookies(self, request: wire.Empty, context: CallContext) -> wire.BookiesReply:
        return wire.BookiesReply(
            bookies=[
                wire.BookieStatus(
                    id=each.bookie, endpoint=each.endpoint, read_only=each.read_only, rack=each.rack,
                    free_bytes=each.free_bytes, total_bytes=each.total_bytes,
                )
                for each in await self._broker.bookies()
            ]
        )  # fmt: skip


def _tenant(request: wire.TenantSpec) -> TenantRecord:
    """InvalidName: a role that no caller can have."""
    roles = tuple(dict.fromkeys(check_role(role) for role in request.admin_roles))
    return TenantRecord(admin_roles=roles, allowed_clusters=tuple(dict.fromkeys(request.allowed_clusters)))


def _namespace(request: wire.NamespaceSpec, bundles: int) -> NamespaceRecord:
    return NamespaceRecord(
        bundles=request.bundles or bundles,
        auto_topic_creation=not request.auto_topic_creation_off, default_partitions=request.default_partitions,
        is_creation_set=request.is_creation_set or request.auto_topic_creation_off or request.default_partitions > 0,
    )  # fmt: skip
