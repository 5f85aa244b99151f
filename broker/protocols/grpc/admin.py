"""The Admin service of proto/wire.proto: translates and calls; decides nothing.

Tenants, namespaces and lists of topics come from the metadata and any broker answers. What concerns a loaded topic
(statistics, subscriptions, trim, terminate, unload, delete) is answered by its owner: NotOwner elsewhere, with the
owner's address in the field `owner`; ask Lookup first. For a partitioned topic name a partition. Deleting a partitioned
topic, or a namespace by force, asks the owners of the others itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from google.protobuf.message import Message

from ....metadata.records import BrokerRecord, NamespaceRecord, TenantRecord
from ....proto import wire_pb2 as wire
from ....proto.errors import Busy, InvalidRequest, MagnetarError, NotAllowed, NotFound, NotOwner
from ....proto.names import MessageId, NamespaceName, TopicName
from ....proto.policies import NAMES, OF_NAMESPACES, decode, encode
from ....runtime.network import CallContext, Endpoint, rpc
from ...common.applied import as_policies, resolve
from ...common.turns import Turns
from ...node.topic_manager import TopicManager
from ...session.start import mark_of, place_of
from ...topic import backlog
from . import stats
from .border import check_peek, check_skip
from .examine import ExamineService

FORWARD_TIMEOUT_S = 30.0
"""Of a request that this broker passes on to the owner of a topic."""
LIST_TIMEOUT_S = 5.0
"""Of asking another broker what it has in memory: a list is not held up by one that hangs."""

_LOG = logging.getLogger("magnetar.broker")


class AdminService(ExamineService):
    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    # ------------------------------------------------------------------ tenants
    async def list_tenants(self, request: wire.Empty, context: CallContext) -> wire.Names:
        return wire.Names(names=await self._broker.catalog.tenants())

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
        )  # fmt: skip

    async def update_namespace(self, request: wire.NamespaceSpec, context: CallContext) -> wire.Empty:
        record = _namespace(request, self._broker.config.namespace_bundles)
        await self._broker.catalog.update_namespace(NamespaceName.parse(request.name), record)
        return wire.Empty()

    async def delete_namespace(self, request: wire.DeleteRequest, context: CallContext) -> wire.Empty:
        name, catalog = NamespaceName.parse(request.name), self._broker.catalog
        volatile = await self._volatile(name, partitions=False)
        if request.force:
            for topic in [*await catalog.topics(name, partitions=False), *sorted(volatile)]:
                await self._delete_topic(TopicName.parse(topic), force=True)
        elif volatile:
            raise Busy(f"namespace {name} has non-persistent topics in use; delete them first, or use force")
        await catalog.delete_namespace(name)
        return wire.Empty()

    async def unload_namespace(
        self, request: wire.UnloadNamespaceRequest, context: CallContext
    ) -> wire.UnloadNamespaceReply:
        name = NamespaceName.parse(request.namespace)
        topics, bundles = await self._broker.unload_namespace(name, request.bundle)
        brokers = [] if request.here else await self._broker.brokers()
        others = [each for each in brokers if each.name != self._broker.name]
        asked = wire.UnloadNamespaceRequest(namespace=request.namespace, bundle=request.bundle, here=True)
        for found in await asyncio.gather(*(self._ask(other, "UnloadNamespace", asked) for other in others)):
            topics, bundles = topics + found.topics, bundles + found.bundles
        return wire.UnloadNamespaceReply(topics=topics, bundles=bundles)

    async def _ask(
        self, broker: BrokerRecord, method: str, request: Message, *, timeout_s: float = FORWARD_TIMEOUT_S
    ) -> Any:
        """Another broker."""
        channel = self._broker.world.network.connect(Endpoint.parse(broker.endpoint))
        try:
            return await channel.call(rpc("Admin", method), request, timeout_s=timeout_s)
        finally:
            await channel.close()

    # ------------------------------------------------------------------ policies
    async def _place(self, namespace: str, topic: str) -> tuple[NamespaceName, TopicName | None]:
        """Where policies are laid down, which exists. A partition has those of its topic."""
        if bool(namespace) == bool(topic):
            raise InvalidRequest("policies are those of a namespace or of a topic: name one of the two")
        if topic:
            name = TopicName.parse(topic).base
            await self._broker.catalog.existing_partitions(name)
            return name.namespace_name, name
        await self._broker.catalog.namespace(NamespaceName.parse(namespace))
        return NamespaceName.parse(namespace), None

    async def get_policies(self, request: wire.PoliciesRequest, context: CallContext) -> wire.PoliciesReply:
        if not request.namespace and not request.topic:
            return wire.PoliciesReply(policies=encode(as_policies(self._broker.config)))
        namespace, topic = await self._place(request.namespace, request.topic)
        found = await self._broker.policies.own(namespace, topic)
        if request.applied:
            levels = (found,) if topic is None else (await self._broker.policies.own(namespace, None), found)
            found = as_policies(resolve(self._broker.config, *levels))
        return wire.PoliciesReply(policies=encode(found))

    async def change_policies(self, request: wire.ChangePoliciesRequest, context: CallContext) -> wire.Empty:
        unknown = sorted(set(request.remove) - set(NAMES))
        if unknown:
            some = ", ".join(name[:100] for name in unknown[:3])
            raise InvalidRequest(f"there is no policy {some}; there are {', '.join(NAMES)}")
        namespace, topic = await self._place(request.namespace, request.topic)
        given = decode(request.set)
        of_namespaces = [name for name in OF_NAMESPACES if getattr(given, name) is not None]
        if topic is not None and of_namespaces:
            raise InvalidRequest(f"{of_namespaces[0]} is a policy of a namespace, and no topic has one")
        await self._broker.policies.change(namespace, topic, given, tuple(request.remove))
        return wire.Empty()

    # ------------------------------------------------------------------ topics
    async def list_topics(self, request: wire.ListTopicsRequest, context: CallContext) -> wire.Names:
        """What is stored, and the non-persistent topics that brokers have in memory."""
        name = NamespaceName.parse(request.namespace)
        if request.in_memory_here:
            return wire.Names(names=sorted(await self._in_memory_here(name)))
        stored = await self._broker.catalog.topics(name, partitions=request.partitions)
        return wire.Names(names=sorted([*stored, *await self._volatile(name, partitions=request.partitions)]))

    async def _in_memory_here(self, name: NamespaceName) -> set[str]:
        found, turns = set[str](), Turns()
        for topic in list(self._broker.loaded.values()):
            if not topic.name.persistent and topic.name.namespace_name == name:
                found.add(topic.name.full)
            if turns.over:
                await turns.next()
        return found

    async def _volatile(self, name: NamespaceName, *, partitions: bool) -> set[str]:
        """Non-persistent topics; those of a broker that does not answer in time are left out."""
        stored = set(await self._broker.catalog.volatile_topics(name, partitions=partitions))
        found = await self._in_memory_here(name)
        asked = wire.ListTopicsRequest(namespace=str(name), in_memory_here=True)
        others = [each for each in await self._broker.brokers() if each.name != self._broker.name]
        answers = await asyncio.gather(
            *(self._ask(other, "ListTopics", asked, timeout_s=LIST_TIMEOUT_S) for other in others),
            return_exceptions=True,
        )
        for other, answer in zip(others, answers, strict=True):
            if isinstance(answer, MagnetarError):
                _LOG.info("non-persistent topics of broker %s are not listed: %s", other.name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.update(answer.names)
        if not partitions:
            found = {full for full in found if TopicName.parse(full).base.full not in stored}
        return stored | found

    async def create_topic(self, request: wire.TopicSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.create_topic(TopicName.parse(request.name), request.partitions)
        return wire.Empty()

    async def update_topic(self, request: wire.TopicSpec, context: CallContext) -> wire.Empty:
        await self._broker.catalog.add_partitions(TopicName.parse(request.name), request.partitions)
        return wire.Empty()

    async def delete_topic(self, request: wire.DeleteRequest, context: CallContext) -> wire.Empty:
        await self._delete_topic(TopicName.parse(request.name), force=request.force)
        return wire.Empty()

    async def _delete_topic(self, topic: TopicName, *, force: bool) -> None:
        partitions = await self._broker.catalog.existing_partitions(topic)
        if topic.is_partition or not partitions:
            await self._delete_one(topic, force=force)
            return
        for number in range(partitions):
            try:
                await self._delete_one(topic.with_partition(number), force=force)
            except NotFound:
                continue  # an earlier attempt got so far
        await self._broker.catalog.forget_partitions(topic)

    async def _delete_one(self, topic: TopicName, *, force: bool) -> None:
        """By its owner, which may be another broker."""
        owner = await self._broker.lookup(topic)
        if owner.name == self._broker.name:
            await self._broker.delete(topic, force=force)
            return
        await self._ask(owner, "DeleteTopic", wire.DeleteRequest(name=topic.full, force=force))

    async def topic_stats(self, request: wire.Name, context: CallContext) -> wire.TopicStatsReply:
        topic = await self._topic(request.name)
        return await stats.of_topic(topic, self._broker.endpoint, precise=request.precise_backlog)

    async def topic_internal_stats(self, request: wire.Name, context: CallContext) -> wire.TopicInternalStatsReply:
        topic = await self._topic(request.name)
        return stats.internals(topic, self._broker.cache.bytes)

    async def unload_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        name = TopicName.parse(request.name)
        if name.full not in self._broker.loaded:  # it need not be loaded first
            await self._broker.catalog.existing_partitions(name)
            owner = await self._broker.lookup(name)
            if owner.name != self._broker.name:
                raise NotOwner(f"topic {name} is served by {owner.endpoint}; look it up again", owner=owner.endpoint)
        await self._broker.unload(name)
        return wire.Empty()

    async def trim_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        topic = await self._topic(request.name)
        await topic.trim()
        return wire.Empty()

    async def compact(self, request: wire.Name, context: CallContext) -> wire.Empty:
        topic = await self._topic(request.name)
        if not topic.compaction.start():
            raise Busy(f"topic {topic.name} is being compacted; see compaction-status", topic=topic.name)
        return wire.Empty()

    async def compaction_status(self, request: wire.Name, context: CallContext) -> wire.CompactionStatusReply:
        topic = await self._topic(request.name)
        return stats.of_compaction(topic)

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
        topic = await self._topic(request.topic)
        mark = None
        if request.HasField("position"):
            mark = mark_of(topic.log.shape, MessageId.from_wire(request.position), inclusive=True)[0]
        await topic.subscribe(request.name, mark, dict(request.properties), exclusive=True)
        return wire.Empty()

    async def get_subscription_properties(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.SubscriptionSpec:
        store = (await self._topic(request.topic)).subscription(request.name).store
        found = store.properties if store is not None else {}
        return wire.SubscriptionSpec(topic=request.topic, name=request.name, properties=found)

    async def set_subscription_properties(self, request: wire.SubscriptionSpec, context: CallContext) -> wire.Empty:
        topic = await self._topic(request.topic)
        if not topic.name.persistent:
            raise NotAllowed(f"topic {topic.name} keeps nothing, and no properties of subscriptions")
        await topic.set_properties(topic.subscription(request.name), dict(request.properties))
        return wire.Empty()

    async def delete_subscription(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.Empty:
        topic = await self._topic(request.topic)
        await topic.unsubscribe(request.name, force=request.force)
        return wire.Empty()

    async def reset_subscription(self, request: wire.ResetSubscriptionRequest, context: CallContext) -> wire.Empty:
        topic = await self._topic(request.topic)
        subscription = topic.subscription(request.name)
        if not (request.HasField("message_id") or request.HasField("publish_time_ms")):
            raise InvalidRequest("a subscription is reset to a message id or to a time")
        async with subscription.moving:
            if request.HasField("message_id"):
                place_id = MessageId.from_wire(request.message_id)
                mark, acked = await place_of(topic.log, place_id, inclusive=not request.exclude)
            else:
                place = await topic.log.reader.locate_time(request.publish_time_ms)
                mark, acked = topic.log.shape.before(place.position), 0
            await subscription.seek(mark, acked)
        return wire.Empty()

    async def skip_messages(self, request: wire.SkipMessagesRequest, context: CallContext) -> wire.Empty:
        check_skip(request.messages)
        topic = await self._topic(request.topic)
        names = [request.name] if request.name else [name for name, each in topic.subscriptions.items() if each.durable]
        for name in names:
            await backlog.skip(topic.log, topic.subscription(name), request.messages)
        return wire.Empty()

    async def peek_messages(self, request: wire.PeekMessagesRequest, context: CallContext) -> wire.PeekMessagesReply:
        check_peek(request.messages)
        topic = await self._topic(request.topic)
        subscription = topic.subscription(request.name)
        entries = await backlog.peek(topic.log, subscription, request.messages)
        return wire.PeekMessagesReply(
            entries=[
                wire.Delivery(
                    ledger_id=entry.position[0], entry_id=entry.position[1], entry=entry.payload,
                    acked_batch_indexes=subscription.cursor.acked_indexes(entry.position),
                )
                for entry in entries
            ]
        )  # fmt: skip

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
    """NotAllowed: who believes that roles or clusters are kept to would leave a tenant open to everybody."""
    for name, given in (("admin_roles", request.admin_roles), ("allowed_clusters", request.allowed_clusters)):
        if given:
            raise NotAllowed(f"{name} of a tenant is not enforced yet, and is refused until it is; leave it out")
    return TenantRecord()


def _namespace(request: wire.NamespaceSpec, bundles: int) -> NamespaceRecord:
    return NamespaceRecord(
        bundles=request.bundles or bundles,
        auto_topic_creation=not request.auto_topic_creation_off, default_partitions=request.default_partitions,
    )  # fmt: skip
