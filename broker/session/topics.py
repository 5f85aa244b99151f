"""Requests about topics, in any protocol, other than producing and consuming: owners, partitions, offsets, schemas, and
changes of a namespace's list of topics.

Any broker answers `look_up_owner`, `count_partitions` and `watch_topics`; `get_offsets` and `advance_subscription` are
answered by the topic's owner (NotOwner). Guarding tests: tests/broker/grpc/test_services.py,
tests/broker/cluster/test_topic_watch.py.

Also in this file, below its heading: requests of clients and operators about the schemas of topics (schemas).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from ...metadata.records import BrokerRecord
from ...proto.errors import InvalidRequest, MagnetarError, NotAllowed, NotFound, TopicNotFound
from ...proto.names import NamespaceName, TopicName, check_subscription_name
from ...proto.schema import Compatibility, SchemaInfo, SchemaVersion
from ...runtime.access import Principal
from ...runtime.alarm import EventLoopSlices
from ..access.authorizer import may_call_every_operation
from ..cluster.policy_cache import TopicAdded, TopicListChange, TopicRemoved, TopicsListed
from ..cluster.schema_registry import SchemaPolicies
from ..common.refusals import check_incarnation
from ..node.topic_manager import TopicManager
from ..topic.topic import Topic
from .backlogs import find_cumulative_ack_before, find_first_unacked_index

ASKED_TIMES_MAX = 1000
"""Most timestamps in one request for offsets: each costs some reads."""


class TopicOwner(msgspec.Struct, frozen=True):
    """The address of the broker that owns a topic, and whether that is the broker that answers."""

    endpoint: str  # HOST:PORT
    here: bool  # the broker that was asked


class PartitionsAndOwner(msgspec.Struct, frozen=True):
    """The number of partitions of a topic; 0 if it is not partitioned. `owner`: the owner of a topic that is not
    partitioned; None if it is not known."""

    count: int  # 0: the topic is not partitioned
    owner: TopicOwner | None = None  # of a topic without partitions, where it is known


class Offsets(msgspec.Struct, frozen=True):
    """Message indexes of a topic, as `TopicQueries.get_offsets` returns them."""

    earliest: int  # index of the oldest message that is stored
    end: int  # one past the index of the newest
    size: int  # bytes stored between them
    by_time: list[int] = []  # index of the first message at or after each time; `end` where there is none
    subscription: int = -1  # index of the first message that is not acknowledged; -1: not asked for
    aborted: int = 0  # messages of aborted transactions in the range that was asked for
    incarnation: int = 0  # of the topic; 0: not known


def find_listener_endpoint(broker: BrokerRecord, listener: str) -> str:
    """Returns the gRPC address (HOST:PORT) of the broker for clients that use the listener `listener` (empty: the
    default one). Raises NotFound if the broker has no `magnetar://` URL for this listener."""
    if not listener:
        return broker.endpoint
    urls = (url for url in broker.pulsar.get(listener, ()) if url.startswith("magnetar"))
    for url in urls:
        return url.partition("://")[2]
    named = f"{listener!r:.100}"
    raise NotFound(f"broker {broker.name} has no magnetar:// URL for the listener {named}: see pulsar_listeners")


class TopicQueries:
    """Answers requests of clients about topics: who owns a topic, its partitions, its message indexes (offsets), and
    which topics exist. Methods raise Unavailable if this broker has no ownership session, and the errors of the
    metadata."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def look_up_owner(self, topic: TopicName, listener: str = "") -> TopicOwner:
        """Returns the broker that owns a topic, even if the topic does not exist yet. `listener`: the name of the
        listener that the client uses; empty: the default one. Raises Unavailable if the owner is not known at the
        moment; NotFound if the owner has no listener of this name, or the namespace does not exist; and the other
        errors of `TopicManager.find_owner`."""
        owner = await self._broker.find_owner(topic)
        return TopicOwner(find_listener_endpoint(owner, listener), owner.name == self._broker.name)

    async def count_partitions(self, topic: TopicName, *, create: bool, by_use: bool = False) -> PartitionsAndOwner:
        """Returns the number of partitions of a topic, and for a topic without partitions its owner if it is known; for
        a partition returns 0 and no owner. `create`: creates the topic if it is missing and may be created, with the
        namespace's default number of partitions. `by_use`: if that number is 0, does not create the topic now, because
        its first use creates it. Raises TopicNotFound if the topic is missing and not created; TenantNotFound or
        NamespaceNotFound if its namespace is missing; NotAllowed if the namespace has its maximum of topics. Raises the
        errors of the metadata, too."""
        catalog = self._broker.catalog
        if topic.is_partition:
            return PartitionsAndOwner(0)  # a partition is used like a topic without partitions
        if not create:
            await catalog.get_namespace(topic.namespace_name)
            return PartitionsAndOwner(await catalog.count_existing_partitions(topic))
        count, owner = await catalog.count_or_create_partitions(topic, by_use=by_use), None
        if not count:
            with contextlib.suppress(MagnetarError):  # the look-up says why
                owner = await self.look_up_owner(topic)
        return PartitionsAndOwner(count, owner)

    async def get_offsets(
        self, name: TopicName, times_ms: Sequence[int] = (), subscription: str = "",
        aborted_in: tuple[int, int] = (0, 0), incarnation: int = 0,
    ) -> Offsets:  # fmt: skip
        """Returns message indexes of a topic: the first one, the end index, the index at each of `times_ms` (ms since
        the epoch), and the index of `subscription`. Creates this subscription if it is missing: durable, beginning at
        the earliest message.

        `aborted_in`: a range of indexes (first, end). The result says how many messages in this range belong to aborted
        transactions, so that a reader can distinguish these from lost ones. `incarnation`: the one that the caller
        means; 0: any. Raises InvalidRequest if there are more than ASKED_TIMES_MAX times; NotAllowed if the topic has
        partitions; TopicNotFound if it does not exist, or has another incarnation; Unavailable or NotOwner if this
        broker may not answer for the topic now; and the errors of reading the log and of
        `SubscriptionRegistry.subscribe`.
        """
        if len(times_ms) > ASKED_TIMES_MAX:
            raise InvalidRequest(f"{len(times_ms)} times in one request are more than {ASKED_TIMES_MAX}")
        topic = await self._one(name)
        check_incarnation(name, topic.incarnation, incarnation)
        shape, reader = topic.shown.shape, topic.shown.reader
        index = -1
        if subscription:
            check_subscription_name(subscription)
            index = await find_first_unacked_index(await topic.registry.subscribe(subscription, shape.start_position))
        by_time, turns = list[int](), EventLoopSlices(self._broker.world.clock)
        for time_ms in times_ms:
            by_time.append((await reader.find_position_by_time(time_ms)).first_index)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        topic.check_may_answer_end_of_topic()
        aborted = shape.count_aborted_messages(*aborted_in)
        made_ms = topic.incarnation
        return Offsets(shape.first_index, shape.end_index, shape.size, by_time, index, aborted, made_ms)

    async def _one(self, name: TopicName) -> Topic:
        """Loads a partition or a topic without partitions, and returns it. Raises NotAllowed if the topic has
        partitions; TopicNotFound if it does not exist."""
        try:
            return await self._broker.load_topic(name, create=False)
        except TopicNotFound:
            count = await self._broker.catalog.count_partitions(name) if not name.is_partition else 0
            if not count:
                raise
            first = name.with_partition(0)
            raise NotAllowed(f"{name} has {count} partitions, and offsets are of one: ask for {first}") from None

    async def advance_subscription(
        self, name: TopicName, subscription_name: str, index: int, incarnation: int = 0
    ) -> None:
        """Acknowledges, for a subscription, every message with an index below `index`; never moves the cursor
        backwards. The acknowledgement is durable when this method returns. `incarnation`: the one that the caller
        means; 0: any. Raises TopicNotFound if the topic has another one, SubscriptionNotFound, TransactionConflict if a
        message is acknowledged in an open transaction, or the errors of `get_offsets`."""
        topic = await self._one(name)
        check_incarnation(name, topic.incarnation, incarnation)
        subscription = topic.find_subscription(subscription_name)
        acked = await find_cumulative_ack_before(topic.shown, index, whole=False)
        if acked is not None:
            subscription.ack_cumulative(None, acked)
        await subscription.wait_durable()

    async def watch_topics(
        self, namespace: NamespaceName, after_revision: int, principal: Principal
    ) -> AsyncIterator[TopicListChange]:
        """Yields the list of the namespace's topics that the caller may look up, and then each change of this list,
        without a gap. `after_revision`: the revision of the list that the caller has already; then only the later
        changes are yielded.

        For a caller that may not look up all topics, `after_revision` is ignored: it always gets the list first. Topics
        that it may look up only after a later grant are not reported; it must watch again. The removal of a topic is
        reported only if the topic was reported before. Raises the errors of `TopicWatcher.watch_topics_of_namespace`,
        and Unavailable if the grants cannot be read; then the caller must watch again. """
        if may_call_every_operation(principal):
            async for told in self._broker.make_topic_watcher().watch_topics_of_namespace(namespace, after_revision):
                yield told
            return
        known: set[str] = set()
        tell_missing = await self._broker.access.is_administrator(principal, namespace.tenant)
        async for told in self._broker.make_topic_watcher().watch_topics_of_namespace(
            namespace, 0, tell_missing=tell_missing
        ):
            shown = await self._broker.access.make_topic_filter(principal, namespace)
            if isinstance(told, TopicsListed):
                known = {name for name in told.names if shown(name)}
                yield told._replace(names=[name for name in told.names if name in known])
            elif isinstance(told, TopicAdded) and shown(told.name):
                known.add(told.name)
                yield told
            elif isinstance(told, TopicRemoved) and told.name in known:
                known.remove(told.name)
                yield told


# ------------------------------------------------------------------------------------------------------- schemas
# Requests of clients and operators about the schemas of topics; any broker answers.
#
# Guarding tests: tests/broker/grpc/test_schemas.py.


class SchemaVerdict(NamedTuple):
    """The answer whether a schema could be registered for a topic. `refused`: why it could not; empty: it could.
    `compatibility`: the rule that decides this."""

    refused: str  # why it could not be registered; empty: it could
    compatibility: Compatibility  # the rule


class SchemaQueries:
    """Answers requests about the schemas of topics. Methods raise Unavailable if this broker has no ownership session,
    and the errors of the metadata."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def get_schema(self, topic: TopicName, version: int | None = None, incarnation: int = 0) -> SchemaVersion:
        """Returns the schema of the topic with that version; None: the newest one. Raises SchemaNotFound if there is
        none; TopicNotFound if the topic has another incarnation than `incarnation`, before or after the read, because
        version numbers are valid in one incarnation only. Raises Unavailable without an ownership session, and the
        errors of the metadata."""
        check = self._broker.catalog.check_incarnation
        await check(topic, incarnation)
        found = await self._broker.schemas.get_schema(topic, version)
        await check(topic, incarnation)
        return found

    async def list_versions(self, topic: TopicName) -> list[SchemaVersion]:
        """Returns the schema versions of the topic that are not deleted, in order. Raises SchemaNotFound if there are
        none, NotAllowed if together they are too large for one answer. Raises Unavailable without an ownership session,
        and the errors of the metadata."""
        return await self._broker.schemas.list_versions(topic)

    async def register_schema(self, topic: TopicName, info: SchemaInfo, user: str, *, by_hand: bool = True) -> int:
        """Registers a schema for a topic, and returns its version. The namespace must exist; the topic need not exist.
        `user`: the role that is stored with the schema. `by_hand`: True if an operator registers the schema, which is
        allowed even if `schema_auto_update` is off. Raises IncompatibleSchema, InvalidRequest or NotAllowed if the
        schema may not be registered; OutcomeUnknown if it may be registered; TenantNotFound or NamespaceNotFound if the
        namespace does not exist. Raises Unavailable without an ownership session, and the errors of the metadata."""
        rules = await self._rules(topic)
        return await self._broker.schemas.register_schema(topic, info, rules, user=user, by_hand=by_hand)

    async def find_schema_version(self, topic: TopicName, info: SchemaInfo) -> int:
        """Returns the version of the topic's schema that is equal to `info`. Raises SchemaNotFound if none is equal;
        InvalidRequest if `info` is invalid. Raises Unavailable without an ownership session, and the errors of the
        metadata."""
        return await self._broker.schemas.find_schema_version(topic, info)

    async def judge_schema_compatibility(self, topic: TopicName, info: SchemaInfo) -> SchemaVerdict:
        """Returns why the schema could not be registered for the topic, or that it could, and the compatibility rule
        that decides this. Registers nothing. Raises InvalidRequest if `info` is invalid, NotAllowed if there are too
        many bytes to compare, TenantNotFound or NamespaceNotFound if the namespace does not exist. Raises Unavailable
        without an ownership session, and the errors of the metadata."""
        mode = (await self._rules(topic)).compatibility
        return SchemaVerdict(await self._broker.schemas.why_schema_refused(topic, info, mode) or "", mode)

    async def delete_schemas(self, topic: TopicName, *, force: bool) -> int | None:
        """Marks all schema versions of the topic as deleted; with `force`, also deletes their definitions. Returns the
        number of the newest one; None if the topic had no schema. Raises OutcomeUnknown if others keep changing the
        schemas. Raises Unavailable without an ownership session, and the errors of the metadata."""
        return await self._broker.schemas.delete_schemas(topic, force=force)

    async def _rules(self, topic: TopicName) -> SchemaPolicies:
        await self._broker.catalog.get_cached_namespace(topic.namespace_name)
        return SchemaPolicies.from_policies(await self._broker.policies.get_applied_policies(topic))
