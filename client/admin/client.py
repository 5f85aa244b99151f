"""AdminClient: every operation of administration as a typed method, for asyncio.

Names are checked before anything is sent. Topics may be short: `orders` is persistent://public/default/orders. What
concerns single topics is per partition: name one (`orders-partition-0`), or ask each of `parts(topic)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.errors import (
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotFound,
    TimedOut,
    TopicNotFound,
    Unavailable,
)
from ...proto.names import TopicName, check_subscription_name, check_tenant_name
from ...proto.operation import Operation
from ...proto.policies import Policies, decode, encode
from ...proto.schema import SchemaInfo, version_bytes
from ...runtime.world import World
from ..common.checks import PATH, SECONDS, check_one
from ..common.closing import ClosedAfterAsyncWith
from ..model.message_id import MessageId
from .arguments import checked, taken
from .grpc_transport import GrpcTransport
from .permissions import PermissionAdmin, full_namespace, full_topic
from .rows import RowMethods
from .stored_messages import StoredMessage
from .transactions import TransactionAdmin
from .transport import Transport

T = TypeVar("T")
AT_ONCE = 16
"""Topics of a namespace that are acted on at the same time."""
BROKER_ASK_S = 5.0
"""Seconds that one broker may take to report how many topics it has loaded."""


@checked
class AdminClient(PermissionAdmin, TransactionAdmin, RowMethods, ClosedAfterAsyncWith):
    """Administration of a cluster, for asyncio: tenants, namespaces, policies, topics, subscriptions, brokers, bookies.

        async with magnetar.admin.AdminClient("magnetar://localhost:7650") as admin:
            await admin.create_topic("flights", partitions=4)
            print(await admin.topics(), await admin.subscriptions("flights-partition-0"))

    It connects by `service_url` as `Client` does, or by another `transport`. It belongs to one event loop; `Admin` has
    the same methods for programs without asyncio. Answers are the frozen dataclasses of proto/statistics.py.

    `timeout_s` bounds each operation with all its attempts. Errors are those of proto/errors.py as the server raised
    them: TenantNotFound, NamespaceNotFound, TopicNotFound, SubscriptionNotFound, AlreadyExists, Busy (in use),
    InvalidName and InvalidRequest (before anything is sent, where the client can tell), NotAllowed; Unavailable when
    no broker is reached; ConnectionLost and TimedOut leave open whether it happened.
    """

    def __init__(
        self, service_url: str = "", *, timeout_s: float = 30.0, world: World | None = None,
        transport: Transport | None = None, authentication: object = None, tls_trust_certs_file_path: str = "",
    ) -> None:  # fmt: skip
        timeout_s = taken("timeout_s", float, timeout_s)
        check_one("timeout_s", SECONDS, timeout_s)
        check_one("tls_trust_certs_file_path", PATH, tls_trust_certs_file_path)
        self._timeout_s = timeout_s
        self._transport = transport or GrpcTransport(
            service_url, timeout_s, world, authentication, tls_trust_certs_file_path
        )

    async def _call(self, operation: Operation[T], **arguments: object) -> T:
        return await self._transport.call(operation, arguments)

    async def _all(self, operation: Operation[tuple[T, ...]], **arguments: object) -> list[T]:
        found = await self._call(operation, **arguments)
        return list(found)

    # ------------------------------------------------------------------------------ tenants
    async def create_tenant(
        self, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
    ) -> None:
        """Creates a tenant. `admin_roles` may administer it; with `allowed_clusters` it has namespaces in those alone.
        InvalidName."""
        await self._call(op.CREATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))

    async def update_tenant(
        self, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
    ) -> None:
        """Replaces both settings; a parameter that is left out becomes empty."""
        await self._call(op.UPDATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))

    async def delete_tenant(self, name: str) -> None:
        """Deletes a tenant. Busy: it has namespaces."""
        await self._call(op.DELETE_TENANT, tenant=check_tenant_name(name))

    # ------------------------------------------------------------------------------ namespaces
    async def namespaces(self, tenant: str) -> list[str]:
        """Returns the namespaces of a tenant as tenant/namespace, sorted."""
        return await self._all(op.LIST_NAMESPACES, tenant=check_tenant_name(tenant))

    async def create_namespace(
        self, name: str, *, bundles: int = 0, auto_topic_creation: bool = True, default_partitions: int = 0
    ) -> None:
        """Creates a namespace. The parameters are those of NamespaceInfo."""
        await self._call(
            op.CREATE_NAMESPACE, namespace=full_namespace(name), bundles=bundles,
            auto_topic_creation=auto_topic_creation, default_partitions=default_partitions,
        )  # fmt: skip

    async def update_namespace(
        self, name: str, *, bundles: int | None = None, auto_topic_creation: bool | None = None,
        default_partitions: int | None = None, is_creation_set: bool | None = None,
    ) -> None:  # fmt: skip
        """Updates the settings of a namespace; None keeps a setting. The number of bundles is fixed at creation:
        InvalidRequest for another one."""
        old = await self.namespace(name)
        if is_creation_set is None:
            is_creation_set = old.is_creation_set or not (auto_topic_creation is None and default_partitions is None)
        await self._call(
            op.UPDATE_NAMESPACE, namespace=old.name, bundles=old.bundles if bundles is None else bundles,
            auto_topic_creation=old.auto_topic_creation if auto_topic_creation is None else auto_topic_creation,
            default_partitions=old.default_partitions if default_partitions is None else default_partitions,
            is_creation_set=is_creation_set,
        )  # fmt: skip

    async def unload_namespace(self, name: str, bundle: str = "") -> values.Unloaded:
        """Makes every broker give the bundles of a namespace up (or that one); the next lookups find new owners."""
        return await self._call(op.UNLOAD_NAMESPACE, namespace=full_namespace(name), bundle=bundle)

    async def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Acknowledges everything, for that subscription or for each; in how many topics and partitions."""
        return await self._each_part(name, lambda topic: self.skip_messages(topic, subscription), persistent_only=True)

    async def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes the subscription of every topic that has it; of how many topics and partitions."""
        check_subscription_name(subscription)
        return await self._each_part(
            name, lambda topic: self.delete_subscription(topic, subscription, force=force)
        )

    async def _each_part(
        self, namespace: str, act: Callable[[str], Coroutine[Any, Any, None]], *, persistent_only: bool = False
    ) -> int:
        """Acts on all topics, also when some fail; then raises the first failure. Returns how many; one where there is
        nothing to act on does not count."""
        topics = await self.topics(namespace, partitions=True)
        if persistent_only:
            topics = [topic for topic in topics if TopicName.parse(topic).persistent]
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

        for start in range(0, len(topics), AT_ONCE):
            await asyncio.gather(*map(one, topics[start : start + AT_ONCE]))
        if failed:
            topic, error = failed[0]
            text = f"{done} topics are done and {len(failed)} are not, the first {topic}: {error.message}"
            raise type(error)(text, **error.fields) from error
        return done

    # ------------------------------------------------------------------------------ policies
    async def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """The fields that are set for the namespace; `applied`: every field, inherited from the broker where unset."""
        return decode(await self._call(op.GET_POLICIES, namespace=full_namespace(name), applied=applied))

    async def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a namespace: the fields that are not None get these values; the others stay."""
        await self._call(op.CHANGE_POLICIES, namespace=full_namespace(name), set=encode(policies))

    async def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """Removes these fields from the policies of a namespace: they are inherited again."""
        await self._call(op.CHANGE_POLICIES, namespace=full_namespace(name), remove=fields)

    async def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """Returns the policies of a topic, like namespace_policies; a topic inherits from its namespace, then from the
        broker."""
        return decode(await self._call(op.GET_POLICIES, topic=full_topic(topic), applied=applied))

    async def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """Sets policies of a topic, like set_namespace_policies."""
        await self._call(op.CHANGE_POLICIES, topic=full_topic(topic), set=encode(policies))

    async def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """Removes fields from the policies of a topic, like remove_namespace_policies."""
        await self._call(op.CHANGE_POLICIES, topic=full_topic(topic), remove=fields)

    async def namespace_properties(self, name: str) -> dict[str, str]:
        """Returns the properties that its users noted of a namespace; nothing is inherited."""
        return await self._call(op.GET_PROPERTIES, namespace=full_namespace(name))

    async def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a namespace; others that it has stay. InvalidRequest: they are too many, or too long
        (proto/policies.py)."""
        await self._call(op.CHANGE_PROPERTIES, namespace=full_namespace(name), set=properties)

    async def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """Removes properties of a namespace. No key: all of them. A missing key does nothing."""
        await self._call(op.CHANGE_PROPERTIES, namespace=full_namespace(name), remove=keys, clear=not keys)

    async def topic_properties(self, topic: str) -> dict[str, str]:
        """Returns the properties of a topic, like namespace_properties; partitions have those of their topic."""
        return await self._call(op.GET_PROPERTIES, topic=full_topic(topic))

    async def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a topic, like set_namespace_properties."""
        await self._call(op.CHANGE_PROPERTIES, topic=full_topic(topic), set=properties)

    async def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """Removes properties of a topic, like remove_namespace_properties."""
        await self._call(op.CHANGE_PROPERTIES, topic=full_topic(topic), remove=keys, clear=not keys)

    # ------------------------------------------------------------------------------ topics
    async def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Returns the full names of the topics, sorted; `partitions`: single partitions instead of partitioned topics.

        With the non-persistent ones that have partitions or are in use.
        """
        return await self._all(op.LIST_TOPICS, namespace=full_namespace(namespace), partitions=partitions)

    async def update_topic(self, topic: str, *, partitions: int) -> None:
        """Gives a topic more partitions, never fewer."""
        await self._call(op.UPDATE_TOPIC, topic=full_topic(topic), partitions=partitions)

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic with all its partitions. Busy: it has producers or subscriptions, which `force` overrides.
        The topic that is there now is meant: one of its name that another program makes meanwhile stays."""
        name = full_topic(topic)
        meant = await self._call(op.CHECK_DELETE, topic=name, force=force)
        await self._call(op.DELETE_TOPIC, topic=name, force=force, incarnation=meant)

    async def partitions(self, topic: str) -> int:
        """Returns the number of partitions; 0: not partitioned, or a partition. Raises TopicNotFound; creates nothing.
        """
        name = TopicName.parse(topic)
        return 0 if name.is_partition else await self._call(op.PARTITIONS, topic=name.full)

    async def parts(self, topic: str) -> list[str]:
        """Returns the full names of the partitions; of a topic without partitions, or a partition, its own."""
        name = TopicName.parse(topic)
        return [name.with_partition(i).full for i in range(await self.partitions(topic))] or [name.full]

    async def owner(self, topic: str) -> str:
        """Returns HOST:PORT of the broker that serves the topic (a partition, or a topic without partitions)."""
        return await self._call(op.LOOKUP_TOPIC, topic=full_topic(topic))

    async def offsets(
        self, topic: str, *, publish_times_ms: Sequence[int] = (), subscription: str = "",
        aborted_in: tuple[int, int] = (0, 0), incarnation: int = 0,
    ) -> values.TopicOffsets:  # fmt: skip
        """Returns the indexes and size of one partition. `subscription` is created at the earliest message when it does
        not exist. `aborted_in`: a range of indexes (first, end), of which `aborted` is counted. `incarnation`: that an
        earlier answer named; TopicNotFound: the topic was deleted and made anew since, so that its indexes mean other
        messages."""
        return await self._call(
            op.OFFSETS, topic=full_topic(topic), publish_times_ms=tuple(publish_times_ms), subscription=subscription,
            aborted_first=aborted_in[0], aborted_end=aborted_in[1], incarnation=incarnation,
        )  # fmt: skip

    async def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Returns the statistics of one partition. `precise`: backlogs count batches message by message."""
        return await self._call(op.TOPIC_STATS, topic=full_topic(topic), precise_backlog=precise)

    async def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Returns the statistics of each partition, and each topic without partitions, sorted by name; without
        `oldest_ms`. One request to each broker, or more where many topics are, and one for each topic that no broker
        serves now."""
        name, found = full_namespace(namespace), dict[str, values.TopicStats]()
        page = await self._call(op.NAMESPACE_STATS, namespace=name, after="")
        others = [each for each in page.brokers if each != page.here]
        await self._pages(name, page.here, page, found)
        await asyncio.gather(*(self._pages(name, each, None, found) for each in others))
        for topic in await self.topics(namespace, partitions=True):
            if topic not in found:
                try:
                    found[topic] = await self.topic_stats(topic)
                except TopicNotFound:
                    continue  # it was deleted meanwhile
        return [found[topic] for topic in sorted(found)]

    async def _pages(
        self, namespace: str, broker: str, page: values.NamespaceStats | None, found: dict[str, values.TopicStats]
    ) -> None:
        """Adds to `found` what a broker has; `page`: the first page. What it leaves out is asked for topic by topic."""
        after = ""
        while True:
            if page is None:
                try:
                    page = await self._transport.call(
                        op.NAMESPACE_STATS, {"namespace": namespace, "after": after}, at=broker
                    )
                except (Unavailable, ConnectionLost, TimedOut):
                    return
            found.update((each.name, each) for each in page.topics)
            if not page.next:
                return
            after, page = page.next, None

    async def skip_lost(self, topic: str, *, ledger_id: int | None = None, force: bool = False) -> values.SkippedLost:
        """Passes over entries of one partition that every replica certainly lost, for all who read it: of all its
        ledgers, or of one. The topic is unloaded. NotAllowed: a replica that does not answer may have them; `force`
        gives those up too. What is passed over does not come back, also when such a replica does."""
        ledger = {} if ledger_id is None else {"ledger_id": ledger_id}
        return await self._call(op.SKIP_LOST, topic=full_topic(topic), force=force, **ledger)

    async def terminate_topic(self, topic: str) -> MessageId:
        """Terminates a topic: it can be read and not written. Returns the id of its last message."""
        found: MessageId = await self._call(op.TERMINATE_TOPIC, topic=full_topic(topic))
        return found

    async def last_message_id(self, topic: str) -> MessageId:
        """Returns the id of the last message; -1:-1 when there is none."""
        found: MessageId = await self._call(op.LAST_MESSAGE_ID, topic=full_topic(topic))
        return found

    async def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """The id of the first message that arrived then or later; the position of the next one when there is none."""
        place = {"topic": full_topic(topic), "publish_time_ms": publish_time_ms}
        found: MessageId = await self._call(op.MESSAGE_ID_BY_TIME, **place)
        return found

    async def backlog_size(self, topic: str, position: MessageId) -> int:
        """Returns about how many bytes are stored after the message."""
        return await self._call(op.BACKLOG_SIZE, topic=full_topic(topic), position=position)

    async def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """Returns the messages of an entry. Raises NotFound if there is no such entry."""
        return await self._all(op.GET_MESSAGE, topic=full_topic(topic), ledger_id=ledger_id, entry_id=entry_id)

    async def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Returns the n-th message, counted from 1, from the oldest message that is kept or from the newest. NotFound:
        there are fewer."""
        if number < 1:
            raise InvalidRequest(f"messages are counted from 1, not from {number}")
        place = {"topic": full_topic(topic), "from_latest": from_latest, "number": number}
        found: tuple[StoredMessage, ...] = await self._call(op.EXAMINE_MESSAGES, **place)
        return found[0]

    # ------------------------------------------------------------------------------ subscriptions
    async def create_subscription(
        self, topic: str, name: str, position: MessageId | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Creates a subscription at `position` (default: latest), whose message is delivered first."""
        await self._call(
            op.CREATE_SUBSCRIPTION, **_subscription(topic, name), position=position or MessageId.latest,
            properties=dict(properties or {}),
        )  # fmt: skip

    async def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties."""
        await self._call(op.SET_SUBSCRIPTION_PROPERTIES, **_subscription(topic, name), properties=dict(properties))

    async def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """Resets a subscription to a message id, or to a publish time in ms since the epoch. `exclusive`: the message
        itself is left out."""
        place = {"message_id": to, "exclude": exclusive} if isinstance(to, MessageId) else {"publish_time_ms": to}
        await self._call(op.RESET_SUBSCRIPTION, **_subscription(topic, name), **place)

    async def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges every message of the partition before `index`, durably. `incarnation`: of `offsets`."""
        await self._call(
            op.ADVANCE_SUBSCRIPTION, **_subscription(topic, name), index=index, incarnation=incarnation
        )

    async def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges what is older than so many seconds, or everything up to a message, for all subscriptions when
        `name` is empty; how many entries."""
        limit = {"message_id" if isinstance(older_than, MessageId) else "older_than_s": older_than}
        return await self._call(op.EXPIRE_MESSAGES, topic=full_topic(topic), subscription=name, **limit)

    async def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next ones unseen. -1: all; an empty name: of every subscription."""
        await self._call(
            op.SKIP_MESSAGES, topic=full_topic(topic), subscription=name and check_subscription_name(name),
            messages=messages,
        )  # fmt: skip

    async def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """Returns at most `messages` next messages of a subscription, without moving it."""
        found = await self._all(op.PEEK_MESSAGES, **_subscription(topic, name), messages=messages)
        return found[:messages]

    # ------------------------------------------------------------------------------ schemas
    async def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """The newest schema of a topic, or that version, which may be deleted. SchemaNotFound."""
        if version is not None and version < 0:
            raise InvalidRequest(f"versions of schemas are counted from 0, not {version}")
        return await self._call(op.GET_SCHEMA, topic=full_topic(topic), version=version_bytes(version))

    async def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers a schema; returns its version, which is that of an equal one. IncompatibleSchema, InvalidSchema."""
        return await self._call(op.PUT_SCHEMA, topic=full_topic(topic), schema=schema)

    async def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """Returns the version of the topic's schema that equals `schema`. Raises SchemaNotFound."""
        return await self._call(op.FIND_SCHEMA, topic=full_topic(topic), schema=schema)

    async def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Whether it could be registered, and by which rule. InvalidSchema."""
        return await self._call(op.TEST_SCHEMA, topic=full_topic(topic), schema=schema)

    async def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """The newest version that is deleted with this; None: there were none. Messages that were written with them
        can be decoded until `force` deletes the definitions."""
        return await self._call(op.DELETE_SCHEMA, topic=full_topic(topic), force=force)

    # ------------------------------------------------------------------------------ the cluster
    async def brokers(self) -> list[values.BrokerInfo]:
        """The registered brokers. Each reports its number of loaded topics; None: no answer within 5 s."""
        return await asyncio.gather(*map(self._broker, await self._all(op.LIST_BROKERS)))

    async def _broker(self, listed: values.BrokerInfo) -> values.BrokerInfo:
        try:
            async with asyncio.timeout(min(BROKER_ASK_S, self._timeout_s)):
                found = await self._transport.call(op.LIST_BROKERS, {}, at=listed.endpoint)
        except (MagnetarError, TimeoutError):
            found = ()
        own = next((each.topics for each in found if each.endpoint == listed.endpoint), None)
        return values.BrokerInfo(listed.name, listed.endpoint, own)

    async def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """Returns the orphans. `remove`: they are fenced and deleted now; brokers do it every hour. `unexplained`: also
        those whose owner has no record, which no broker deletes by itself."""
        return await self._call(op.FIND_ORPHANS, remove=remove, unexplained=unexplained)

    async def close(self) -> None:
        """Closes the connections."""
        await self._transport.close()


def _subscription(topic: str, name: str) -> dict[str, str]:
    return {"topic": full_topic(topic), "subscription": check_subscription_name(name)}


def _tenant(name: str, admin_roles: Sequence[str], allowed_clusters: Sequence[str]) -> dict[str, object]:
    return {"tenant": check_tenant_name(name), "admin_roles": admin_roles, "allowed_clusters": allowed_clusters}
