"""The gRPC service Admin of proto/wire.proto: a method for each operation, which returns a plain value. Nothing is
decided here.

The value that a method returns is converted to the reply of its rpc, field by field (checked.py, proto/translation.py);
REST uses the value as it is. A new operation is a method here, and its row in proto/operations.py.

Tenants, namespaces and lists of topics come from the metadata, and any broker answers for them. Requests about a loaded
topic (statistics, subscriptions, trim, terminate, unload, delete) are answered by its owner. Other brokers raise
NotOwner, with the owner's address in the field `owner`. So callers ask Lookup first, and name a partition of a
partitioned topic. Deleting a partitioned topic, or a namespace by force, asks the other owners itself.

Also in this file, each below its heading: the part of the Admin service that inspects the messages of a topic and
removes them (examine); the part of the Admin service about schemas (schemas).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

from ...metadata.records import NamespaceRecord, Schedule, TenantRecord
from ...proto import statistics as values
from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, NotFound
from ...proto.names import MessageId, NamespaceName, Position, TopicName, check_role
from ...proto.operations import Permission
from ...proto.policies import decode_policies, encode_policies
from ...proto.schema import encode_version
from ...proto.statistics import (
    BacklogAnalysis,
    CancelledMessage,
    FoundMessages,
    MessageTrace,
    OrphanLedger,
    Orphans,
    ScheduleStats,
    SchemaTest,
    SkippedLost,
)
from ...proto.translation import make_reply_message
from ...runtime.access import Principal
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import CallContext
from ..node.topic_manager import TopicManager
from ..session import inspection, summaries
from ..session.administration import Administration
from ..session.backlogs import EntryWithHiddenMessages, SubscriptionAdministration
from ..session.balancing import balance_brokers, describe_balance, measure_load
from ..session.finding import FindRequest, find_messages, parse_criteria, try_filter
from ..session.schedules import ScheduleCatalog
from ..session.sharing import answer_report
from ..session.summaries import (
    ClusterSummaries,
    TopicPageQuery,
    describe_bookie,
    describe_filter,
    explain_kept_ledgers,
    explain_stuck_subscription,
    trace_message,
)
from ..session.topics import SchemaQueries
from ..subscription.core.redelivery_backoff import TOPIC_PROPERTY as DEAD_LETTER_TOPIC
from ..topic.statistics import estimate_backlog
from ..topic.topic import Topic
from . import translate
from .transactions import HalfMessageAdminService, TransactionAdminService

# ------------------------------------------------------------------------------------------------------- examine
# The part of the Admin service that inspects the messages of a topic and removes them: translates and calls.


class MessageAdminService:
    """Implements the rpcs of the gRPC service Admin that inspect the messages of a topic, and those that remove
    messages. A method raises the errors of the operation that it calls, and InvalidName for an invalid name in the
    request; the server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._administration = Administration(broker)

    async def _topic(self, name: str) -> Topic:
        return await self._administration.load_topic(TopicName.parse(name))

    async def _backlogs(self, topic: str) -> SubscriptionAdministration:
        return SubscriptionAdministration(await self._topic(topic))

    async def find_orphans(self, request: wire.FindOrphansRequest, context: CallContext) -> Orphans:
        """Returns the orphaned ledgers (no metadata record names them) and the missing ledgers (a record names them,
        but they do not exist). With `remove`, deletes the orphaned ledgers; with `unexplained` too, also those whose
        topic or subscription has no record, or a younger one. Any broker can answer this rpc. Raises the errors of
        `TopicManager.find_orphans`."""
        found, deleted = await self._broker.find_orphans(remove=request.remove, unexplained=request.unexplained)
        gone = {each.ledger_id for each in deleted}
        orphans = (
            OrphanLedger(
                each.ledger_id, each.topic, each.subscription, each.created_ms, each.ledger_id in gone,
                each.unexplained,
            )
            for each in found.orphans
        )  # fmt: skip
        missing = (OrphanLedger(each.ledger_id, each.topic, "", 0, False) for each in found.missing)
        return Orphans(tuple(orphans), tuple(missing))

    async def truncate_topic(self, request: wire.Name, context: CallContext) -> None:
        await (await self._topic(request.name)).truncate_topic()

    async def skip_lost(self, request: wire.SkipLostRequest, context: CallContext) -> SkippedLost:
        ledger_id = request.ledger_id if request.HasField("ledger_id") else -1
        topic = TopicName.parse(request.topic)
        if request.forgotten:
            return await self._administration.decide_forgotten_transactions(topic, request.forgotten)
        return await self._administration.skip_lost(topic, ledger_id, force=request.force)

    async def expire_messages(self, request: wire.ExpireMessagesRequest, context: CallContext) -> int:
        up_to = _position(request.message_id) if request.HasField("message_id") else None
        backlogs = await self._backlogs(request.topic)
        return await backlogs.expire_messages(request.name, request.older_than_s, up_to)

    async def examine_messages(self, request: wire.ExamineMessagesRequest, context: CallContext) -> list[wire.Delivery]:
        backlogs = await self._backlogs(request.topic)
        return [to_wire_delivery(await backlogs.read_nth_message(request.number or 1, from_latest=request.from_latest))]

    async def get_message(self, request: wire.GetMessageRequest, context: CallContext) -> list[wire.Delivery]:
        shown = await (await self._backlogs(request.topic)).read_message(Position(request.ledger_id, request.entry_id))
        return [to_wire_delivery(shown)]

    async def find_messages(self, request: wire.FindMessagesRequest, context: CallContext) -> FoundMessages:
        criteria = parse_criteria(request.key, request.property, request.text, request.where)
        bounds = request.since_ms, request.until_ms, request.before_index, request.limit, request.dry_run, (
            request.acknowledged_by
        )
        return await find_messages(self._broker, FindRequest(request.topic, criteria, *bounds), context)

    async def trace_message(self, request: wire.TraceMessageRequest, context: CallContext) -> MessageTrace:
        position = Position(request.ledger_id, request.entry_id)
        return await trace_message(await self._topic(request.topic), position, request.batch_index)

    async def cancel_delayed(self, request: wire.CancelDelayedRequest, context: CallContext) -> CancelledMessage:
        position, backlogs = Position(request.ledger_id, request.entry_id), await self._backlogs(request.topic)
        return await backlogs.cancel_delayed(position, request.batch_index)

    async def create_schedule(self, request: wire.CreateScheduleRequest, context: CallContext) -> None:
        schedule = Schedule(
            name=request.name, id="", topic_ms=0, cron=request.cron, every_ms=request.every_ms, at_ms=request.at_ms,
            zone=request.zone or "UTC", payload=request.payload, key=request.key or None,
            properties=dict(request.properties), missed=request.missed or "skip",
        )  # fmt: skip
        await ScheduleCatalog(self._broker).create_schedule(TopicName.parse(request.topic), schedule)

    async def list_schedules(self, request: wire.TopicName, context: CallContext) -> list[ScheduleStats]:
        return await ScheduleCatalog(self._broker).list_stats(TopicName.parse(request.topic))

    async def delete_schedule(self, request: wire.ScheduleName, context: CallContext) -> None:
        await ScheduleCatalog(self._broker).delete_schedule(TopicName.parse(request.topic), request.name)

    async def pause_schedule(self, request: wire.PauseScheduleRequest, context: CallContext) -> None:
        topic = TopicName.parse(request.topic)
        await ScheduleCatalog(self._broker).pause_schedule(topic, request.name, paused=request.paused)

    async def run_schedule(self, request: wire.ScheduleName, context: CallContext) -> None:
        await ScheduleCatalog(self._broker).run_schedule_now(TopicName.parse(request.topic), request.name)

    async def analyze_backlog(self, request: wire.DeleteSubscriptionRequest, context: CallContext) -> BacklogAnalysis:
        return BacklogAnalysis(*await (await self._backlogs(request.topic)).analyze_backlog(request.name))

    async def message_id_by_time(self, request: wire.MessageIdByTimeRequest, context: CallContext) -> MessageId:
        return await (await self._backlogs(request.topic)).find_message_by_time(request.publish_time_ms)

    async def backlog_size(self, request: wire.BacklogSizeRequest, context: CallContext) -> int:
        return (await self._backlogs(request.topic)).estimate_bytes_after(_position(request.position))

    async def last_message_id(self, request: wire.Name, context: CallContext) -> MessageId:
        return await (await self._backlogs(request.name)).find_last_message()


def _position(given: wire.Position | wire.MessageId) -> Position:
    return Position(given.ledger_id, given.entry_id)


def to_wire_delivery(shown: EntryWithHiddenMessages) -> wire.Delivery:
    """Returns the entry `shown` as a wire message of type Delivery. Its `acked_batch_indexes` are the batch indexes of
    the messages that the caller must not see."""
    ledger_id, entry_id = shown.entry.position
    return wire.Delivery(
        ledger_id=ledger_id, entry_id=entry_id, entry=shown.entry.payload, acked_batch_indexes=shown.hidden
    )


# ------------------------------------------------------------------------------------------------------- schemas
# The part of the Admin service about schemas: translates and calls; decides nothing.


class SchemaAdminService:
    """Implements the rpcs of the gRPC service Admin about schemas. A method raises the errors of the operation that it
    calls, and InvalidName for an invalid name in the request; the server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._schemas = SchemaQueries(broker)

    async def list_schemas(self, request: wire.Name, context: CallContext) -> wire.SchemasReply:
        found = await self._schemas.list_versions(TopicName.parse(request.name))
        return wire.SchemasReply(schemas=map(translate.make_schema_reply, found))

    async def put_schema(self, request: wire.SchemaRequest, context: CallContext) -> wire.SchemaReply:
        topic, info = TopicName.parse(request.topic), translate.parse_schema_info(request.schema)
        version = await self._schemas.register_schema(topic, info, context.principal.name)
        return wire.SchemaReply(version=encode_version(version))

    async def find_schema(self, request: wire.SchemaRequest, context: CallContext) -> wire.SchemaReply:
        topic, info = TopicName.parse(request.topic), translate.parse_schema_info(request.schema)
        return wire.SchemaReply(version=encode_version(await self._schemas.find_schema_version(topic, info)))

    async def test_schema(self, request: wire.SchemaRequest, context: CallContext) -> SchemaTest:
        topic, info = TopicName.parse(request.topic), translate.parse_schema_info(request.schema)
        found = await self._schemas.judge_schema_compatibility(topic, info)
        return SchemaTest(found.refused, found.compatibility)

    async def delete_schema(self, request: wire.DeleteRequest, context: CallContext) -> wire.SchemaReply:
        deleted = await self._schemas.delete_schemas(TopicName.parse(request.name), force=request.force)
        return wire.SchemaReply(version=encode_version(deleted))


# --------------------------------------------------------------------------------------------------------- admin


_LOG = logging.getLogger("magnetar.broker")

STATS_PAGE_BYTES, STATS_PAGE_S = 1 << 20, 2.0
"""Size and time after which one reply with statistics of a namespace ends; the caller asks for the next page."""
STATS_REQUESTS_AT_ONCE = 32
"""Topics of a namespace whose statistics are read at a time; for that they may have to be loaded."""


class AdminService:
    """Implements the rpcs of the gRPC service Admin about tenants, namespaces, topics, subscriptions and brokers. A
    method raises the errors of the operation that it calls, and InvalidName for an invalid name in the request; the
    server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._administration = Administration(broker)
        self._summaries = ClusterSummaries(broker)

    async def _topic(self, name: str) -> Topic:
        return await self._administration.load_topic(TopicName.parse(name))

    async def _backlogs(self, topic: str) -> SubscriptionAdministration:
        return SubscriptionAdministration(await self._topic(topic))

    # ------------------------------------------------------------------ tenants
    async def list_tenants(self, request: wire.Empty, context: CallContext) -> list[str]:
        administers = partial(self._broker.access.is_administrator, context.principal)
        return [name for name in await self._broker.catalog.list_tenants() if await administers(name)]

    async def create_tenant(self, request: wire.TenantSpec, context: CallContext) -> None:
        await self._broker.catalog.create_tenant(request.name, _tenant(request))

    async def get_tenant(self, request: wire.Name, context: CallContext) -> values.TenantInfo:
        record = await self._broker.catalog.get_tenant(request.name)
        return values.TenantInfo(request.name, tuple(record.admin_roles), tuple(record.allowed_clusters))

    async def update_tenant(self, request: wire.TenantSpec, context: CallContext) -> None:
        await self._broker.catalog.update_tenant(request.name, _tenant(request))

    async def delete_tenant(self, request: wire.Name, context: CallContext) -> None:
        await self._broker.catalog.delete_tenant(request.name)

    # ------------------------------------------------------------------ namespaces
    async def list_namespaces(self, request: wire.Name, context: CallContext) -> list[str]:
        return await self._broker.catalog.list_namespaces(request.name)

    async def create_namespace(self, request: wire.NamespaceSpec, context: CallContext) -> None:
        record = _namespace(request, self._broker.config.namespace_bundles)
        await self._broker.catalog.create_namespace(NamespaceName.parse(request.name), record)

    async def get_namespace(self, request: wire.Name, context: CallContext) -> values.NamespaceInfo:
        record = await self._broker.catalog.get_namespace(NamespaceName.parse(request.name))
        creation = record.auto_topic_creation, record.default_partitions, record.is_creation_set
        return values.NamespaceInfo(request.name, record.bundles, *creation)

    async def update_namespace(self, request: wire.NamespaceSpec, context: CallContext) -> None:
        record = _namespace(request, 0)
        await self._broker.catalog.update_namespace(NamespaceName.parse(request.name), record)

    async def delete_namespace(self, request: wire.DeleteRequest, context: CallContext) -> None:
        await self._administration.delete_namespace(NamespaceName.parse(request.name), force=request.force)

    async def split_bundles(self, request: wire.SplitBundlesRequest, context: CallContext) -> values.SplitBundles:
        name = NamespaceName.parse(request.name)
        return values.SplitBundles(
            str(name),
            await self._administration.split_bundles(name, request.bundles, bundle=request.bundle, here=request.here),
        )

    async def unload_namespace(self, request: wire.UnloadNamespaceRequest, context: CallContext) -> values.Unloaded:
        name = NamespaceName.parse(request.namespace)
        return await self._administration.unload_namespace(
            name, request.bundle, here=request.here, destination=request.destination
        )

    # ------------------------------------------------------------------ policies
    async def get_policies(self, request: wire.PoliciesRequest, context: CallContext) -> str:
        found = await self._administration.get_policies(request.namespace, request.topic, applied=request.applied)
        return encode_policies(found)

    async def change_policies(self, request: wire.ChangePoliciesRequest, context: CallContext) -> None:
        given = decode_policies(request.set)
        await self._check_letters(given.dead_letter_topic or "", context)
        await self._administration.change_policies(request.namespace, request.topic, given, request.remove)

    async def get_tenant_policies(self, request: wire.TenantPoliciesRequest, context: CallContext) -> str:
        found = await self._administration.get_tenant_policies(request.name, applied=request.applied)
        return encode_policies(found)

    async def change_tenant_policies(self, request: wire.ChangeTenantPoliciesRequest, context: CallContext) -> None:
        given = decode_policies(request.set)
        await self._administration.change_tenant_policies(request.name, given, request.remove)

    async def list_resource_groups(self, request: wire.Empty, context: CallContext) -> list[str]:
        return await self._broker.policies.list_resource_groups()

    async def get_resource_group(self, request: wire.Name, context: CallContext) -> values.ResourceGroup:
        return await self._administration.get_resource_group(request.name)

    async def set_resource_group(self, request: wire.ResourceGroupSpec, context: CallContext) -> None:
        rates = {rate: getattr(request, rate) for rate in values.RESOURCE_GROUP_RATES if request.HasField(rate)}
        await self._administration.set_resource_group(request.name, rates)

    async def delete_resource_group(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.delete_resource_group(request.name)

    async def get_properties(self, request: wire.PlaceRequest, context: CallContext) -> dict[str, str]:
        return await self._administration.properties(request.namespace, request.topic)

    async def change_properties(self, request: wire.ChangePropertiesRequest, context: CallContext) -> None:
        await self._administration.change_properties(
            request.namespace, request.topic, request.set, request.remove, clear=request.clear
        )

    # ------------------------------------------------------------------ permissions
    async def get_permissions(self, request: wire.PermissionsRequest, context: CallContext) -> values.Permissions:
        found = await self._administration.get_permissions(request.namespace, request.topic)
        return values.Permissions(found.roles, found.subscriptions, found.prefix_mode)

    async def change_permissions(self, request: wire.ChangePermissionsRequest, context: CallContext) -> None:
        change = translate.parse_permission_change(request)
        await self._administration.change_permissions(request.namespace, request.topic, change)

    async def _check_letters(self, topic: str, context: CallContext) -> None:
        """Raises Unauthorized if the caller may not publish to `topic`, the dead letter topic in the request ("":
        none), to which the broker will publish."""
        if topic:
            name = TopicName.parse(topic)
            await self._broker.access.check_permission(
                context.principal, Permission.PRODUCE, topic=name, peer=context.peer
            )

    # ------------------------------------------------------------------ topics
    async def list_topics(self, request: wire.ListTopicsRequest, context: CallContext) -> list[str]:
        """Returns the sorted names of the topics of a namespace that the caller may look up. These are the stored
        topics, or with `in_memory_here` the non-persistent topics that this broker has loaded. With `after` and `limit`
        in the request, only the page of at most `limit` names after the name `after`. If the namespace does not exist,
        raises NotFound for an administrator of its tenant, and returns nothing for other callers."""
        name = NamespaceName.parse(request.namespace)
        shown = await self._broker.access.make_topic_filter(context.principal, name)
        if request.in_memory_here:
            return [*filter(shown, sorted(await self._administration.list_loaded_non_persistent_topics(name)))]
        names = await self._topics_of(name, context.principal, partitions=request.partitions)
        found = filter(shown, names[bisect_right(names, request.after) :] if request.after else names)
        return [*islice(found, request.limit or None)]

    async def _topics_of(self, name: NamespaceName, principal: Principal, *, partitions: bool) -> Sequence[str]:
        """Returns the topics of a namespace. If the namespace is missing, raises NotFound for its administrators, and
        returns no topics for other callers, who must not learn whether it exists."""
        try:
            return await self._administration.list_topics(name, partitions=partitions)
        except NotFound:
            if await self._broker.access.is_administrator(principal, name.tenant):
                raise
            return []

    async def create_topic(self, request: wire.TopicSpec, context: CallContext) -> None:
        await self._broker.catalog.create_topic(TopicName.parse(request.name), request.partitions)

    async def update_topic(self, request: wire.TopicSpec, context: CallContext) -> None:
        await self._broker.catalog.add_partitions(TopicName.parse(request.name), request.partitions)

    async def delete_topic(self, request: wire.DeleteRequest, context: CallContext) -> None:
        name = TopicName.parse(request.name)
        await self._administration.delete_topic(name, force=request.force, incarnation=request.incarnation)

    async def check_delete(self, request: wire.DeleteRequest, context: CallContext) -> int:
        return await self._administration.check_delete(TopicName.parse(request.name), force=request.force)

    async def topic_stats(self, request: wire.Name, context: CallContext) -> values.TopicStats:
        topic = await self._topic(request.name)
        return await summaries.collect_topic_stats(topic, self._broker.endpoint, precise=request.precise_backlog)

    async def namespace_stats(
        self, request: wire.NamespaceStatsRequest, context: CallContext
    ) -> wire.NamespaceStatsReply:
        """Returns one page (about STATS_PAGE_BYTES bytes, and at most about STATS_PAGE_S seconds of work) of
        statistics: of the topics that this broker owns and that the caller may look up. `next` in the reply names the
        last topic of the page, unless it is the last page. Loads topics that are not loaded. Leaves out a topic whose
        statistics cannot be read; `topic_stats` raises the error of such a topic."""
        name = NamespaceName.parse(request.namespace)
        shown = await self._broker.access.make_topic_filter(context.principal, name)
        found = wire.NamespaceStatsReply(
            here=self._broker.endpoint, brokers=[each.endpoint for each in await self._broker.list_brokers()]
        )
        names = [each for each in await self._administration.list_owned_topics(name, request.after) if shown(each)]
        clock = self._broker.world.clock
        size, end_s, turns = 0, clock.monotonic() + STATS_PAGE_S, EventLoopSlices(clock)
        for start in range(0, len(names), STATS_REQUESTS_AT_ONCE):
            part = names[start : start + STATS_REQUESTS_AT_ONCE]
            if all(each in self._broker.loaded for each in part):  # then nothing waits, and no task is needed
                stats = [await self._stats_of(each, request.brief) for each in part]
                if turns.is_slice_used_up:
                    await turns.begin_slice()
            else:
                stats = await asyncio.gather(*(self._stats_of(each, request.brief) for each in part))
            for each in stats:
                if each is not None:
                    (found.brief_topics if request.brief else found.topics).append(each)
                    size += each.ByteSize()
            if (size > STATS_PAGE_BYTES or clock.monotonic() > end_s) and part[-1] != names[-1]:
                found.next = part[-1]
                break
        return found

    async def _stats_of(self, name: str, brief: bool) -> Any:
        """Returns the statistics of one topic as a message for the reply; None if they cannot be read."""
        try:
            topic = self._broker.loaded.get(name) or await self._topic(name)
            if brief:
                return make_reply_message(wire.BriefTopicStats, summaries.collect_brief_topic_stats(topic))
            found = await summaries.collect_topic_stats(topic, self._broker.endpoint, ages=False)
        except MagnetarError as error:
            _LOG.debug("no statistics of %s among those of its namespace: %s", name, error)
            return None
        return make_reply_message(wire.TopicStatsReply, found)

    async def topic_internal_stats(self, request: wire.Name, context: CallContext) -> values.TopicInternalStats:
        return summaries.collect_internal_stats(await self._topic(request.name), self._broker.cache.bytes)

    async def unload_topic(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.unload_topic(TopicName.parse(request.name))

    async def trim_topic(self, request: wire.Name, context: CallContext) -> None:
        topic = await self._topic(request.name)
        await topic.trim_ledgers()

    async def compact(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.start_compaction(TopicName.parse(request.name))

    async def compaction_status(self, request: wire.Name, context: CallContext) -> wire.CompactionStatusReply:
        found = summaries.collect_compaction_stats(await self._topic(request.name))
        reply = cast(wire.CompactionStatusReply, make_reply_message(wire.CompactionStatusReply, found))
        if found.ledger_id < 0:
            reply.ClearField("horizon")
        return reply

    async def terminate_topic(self, request: wire.Name, context: CallContext) -> MessageId:
        topic = await self._topic(request.name)
        last = await topic.log.terminate()
        return MessageId(last.ledger_id, last.entry_id, topic.name.partition)

    # ------------------------------------------------------------------ subscriptions
    async def list_subscriptions(self, request: wire.Name, context: CallContext) -> list[str]:
        topic = await self._topic(request.name)
        return sorted(name for name, each in topic.subscriptions.items() if each.is_durable)

    async def create_subscription(self, request: wire.SubscriptionSpec, context: CallContext) -> None:
        start = MessageId.from_wire(request.position) if request.HasField("position") else None
        await self._check_letters(request.properties.get(DEAD_LETTER_TOPIC, ""), context)
        await (await self._backlogs(request.topic)).create_subscription(request.name, start, dict(request.properties))

    async def get_subscription_properties(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.SubscriptionSpec:
        found = (await self._backlogs(request.topic)).properties(request.name)
        return wire.SubscriptionSpec(topic=request.topic, name=request.name, properties=found)

    async def set_subscription_properties(self, request: wire.SubscriptionSpec, context: CallContext) -> None:
        await self._check_letters(request.properties.get(DEAD_LETTER_TOPIC, ""), context)
        await (await self._backlogs(request.topic)).set_properties(request.name, dict(request.properties))

    async def set_subscription_filter(
        self, request: wire.SetSubscriptionFilterRequest, context: CallContext
    ) -> None:
        await (await self._backlogs(request.topic)).set_filter(request.name, request.filter)

    async def get_subscription_filter(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> values.SubscriptionFilterState:
        return describe_filter((await self._topic(request.topic)).find_subscription(request.name))

    async def try_filter(self, request: wire.TryFilterRequest, context: CallContext) -> values.FilterTrial:
        return await try_filter(self._broker, request.topic, request.filter, request.messages, context)

    async def delete_subscription(self, request: wire.DeleteSubscriptionRequest, context: CallContext) -> None:
        topic = await self._topic(request.topic)
        await topic.registry.unsubscribe(request.name, force=request.force)

    async def reset_subscription(self, request: wire.ResetSubscriptionRequest, context: CallContext) -> None:
        to = MessageId.from_wire(request.message_id) if request.HasField("message_id") else None
        time_ms = request.publish_time_ms if request.HasField("publish_time_ms") else None
        backlogs = await self._backlogs(request.topic)
        await backlogs.reset_subscription(request.name, to, time_ms, inclusive=not request.exclude)

    async def skip_messages(self, request: wire.SkipMessagesRequest, context: CallContext) -> None:
        await (await self._backlogs(request.topic)).skip_messages(request.name, request.messages)

    async def peek_messages(self, request: wire.PeekMessagesRequest, context: CallContext) -> list[wire.Delivery]:
        shown = await (await self._backlogs(request.topic)).peek_messages(request.name, request.messages)
        return [*map(to_wire_delivery, shown)]

    # ------------------------------------------------------------------ overviews
    async def broker_summaries(
        self, request: wire.BrokerSummariesRequest, context: CallContext
    ) -> values.ClusterSummary:
        return await self._summaries.summarize_brokers(here=request.here)

    async def topic_page(self, request: wire.TopicPageRequest, context: CallContext) -> values.TopicPage:
        query = TopicPageQuery(request.prefix, request.contains, request.sort, request.after, request.limit)
        return await self._summaries.list_topic_page(query, here=request.here)

    async def why_stuck(self, request: wire.DeleteSubscriptionRequest, context: CallContext) -> values.WhyStuck:
        topic = await self._topic(request.topic)
        subscription = topic.find_subscription(request.name)
        log = topic.readable_log(uncommitted=subscription.reads_uncommitted)
        return explain_stuck_subscription(topic, subscription, estimate_backlog(log, subscription))

    async def why_kept(self, request: wire.Name, context: CallContext) -> values.WhyKept:
        return explain_kept_ledgers(await self._topic(request.name))

    # ------------------------------------------------------------------ the cluster
    async def describe_broker(
        self, request: wire.DescribeBrokerRequest, context: CallContext
    ) -> values.BrokerDescription:
        return await inspection.describe_broker(self._broker, tasks=request.tasks, metrics=request.metrics)

    async def describe_cursor(self, request: wire.DescribeCursorRequest, context: CallContext) -> values.CursorShape:
        topic = await self._topic(request.topic)
        return await inspection.describe_cursor(topic, topic.find_subscription(request.name), request.buckets)

    async def describe_ledgers(
        self, request: wire.DescribeLedgersRequest, context: CallContext
    ) -> list[values.LedgerCopies]:
        topic = await self._topic(request.topic)
        return await inspection.describe_ledgers(self._broker.metadata, topic, request.after, request.limit)

    async def describe_metadata(
        self, request: wire.DescribeMetadataRequest, context: CallContext
    ) -> values.MetadataNode:
        asked = request.node, request.after, request.limit
        return await inspection.describe_metadata(self._broker.metadata, *asked)

    async def describe_security(self, request: wire.Empty, context: CallContext) -> values.SecurityDescription:
        return await inspection.describe_security(self._broker)

    async def change_setting(self, request: wire.ChangeSettingRequest, context: CallContext) -> None:
        await inspection.change_setting(self._broker, request.name, request.value)

    async def remove_setting(self, request: wire.Name, context: CallContext) -> None:
        await inspection.remove_setting(self._broker, request.name)

    async def list_brokers(self, request: wire.Empty, context: CallContext) -> list[values.BrokerInfo]:
        return await self._administration.list_brokers()

    async def drain_broker(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.drain_broker(request.name)

    async def undrain_broker(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.undrain_broker(request.name)

    async def forget_broker(self, request: wire.Name, context: CallContext) -> None:
        await self._administration.forget_broker(request.name)

    async def list_bundles(self, request: wire.ListBundlesRequest, context: CallContext) -> values.BundlePage:
        name = NamespaceName.parse(request.namespace) if request.namespace else None
        return await ClusterSummaries(self._broker).list_bundles(name, here=request.here)

    async def balance_brokers(self, request: wire.BalanceBrokersRequest, context: CallContext) -> values.Balance:
        return await balance_brokers(self._broker, self._administration, dry_run=request.dry_run)

    async def measure_load(self, request: wire.Empty, context: CallContext) -> values.MeasuredLoad:
        return await measure_load(self._broker)

    async def balance_status(self, request: wire.BalanceStatusRequest, context: CallContext) -> values.BalanceStatus:
        return await describe_balance(self._broker, here=request.here)

    async def share_limits(
        self, request: wire.ShareLimitsRequest, context: CallContext
    ) -> values.SharesAnswer:
        wanted = [values.WantedLimit(each.limit, each.wanted, each.held) for each in request.limits]
        stored = [values.StoredBundleBytes(each.namespace, each.bundle, each.bytes) for each in request.stored]
        return answer_report(
            self._broker, request.broker, request.run, request.number, wanted, stored, list(request.places)
        )

    async def shared_limits(self, request: wire.SharedLimitsRequest, context: CallContext) -> values.SharedLimits:
        return await ClusterSummaries(self._broker).list_shared_limits(here=request.here)

    async def list_bookies(self, request: wire.Empty, context: CallContext) -> list[values.BookieInfo]:
        return [describe_bookie(each) for each in await self._broker.list_bookies()]


SERVICE_CLASSES = (
    AdminService,
    MessageAdminService,
    SchemaAdminService,
    TransactionAdminService,
    HalfMessageAdminService,
)
"""The Admin service: each of its rpcs is a method of one of them."""


def _tenant(request: wire.TenantSpec) -> TenantRecord:
    """Returns the record of a tenant. Raises InvalidName if no caller can have the name of a role in the request."""
    roles = tuple(dict.fromkeys(check_role(role) for role in request.admin_roles))
    return TenantRecord(admin_roles=roles, allowed_clusters=tuple(dict.fromkeys(request.allowed_clusters)))


def _namespace(request: wire.NamespaceSpec, bundles: int) -> NamespaceRecord:
    """Returns the record that the request describes. `bundles`: their number if the request has none."""
    return NamespaceRecord(
        bundles=request.bundles or bundles,
        auto_topic_creation=not request.auto_topic_creation_off, default_partitions=request.default_partitions,
        is_creation_set=request.is_creation_set or request.auto_topic_creation_off or request.default_partitions > 0,
    )  # fmt: skip
