"""The admin client: every rpc of the Admin service as a typed method (asyncio: AdminClient; blocking: Admin).

    with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
        admin.create_topic("flights", partitions=4)
        print(admin.topic_stats("flights").end_index)

Questions about one topic go to the broker that owns it; all else to any. Errors are those of proto/errors.py
(TopicNotFound, Busy, …) as they are, because an administrator wants to read what the broker said. Names are checked
before anything is sent. Replies are the messages of proto/wire.proto.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.message import Message

from ..proto import wire_pb2 as wire
from ..proto.errors import MagnetarError, NotAllowed, NotFound
from ..proto.names import NamespaceName, TopicName, check_subscription_name, check_tenant_name
from ..proto.policies import Policies, decode, encode
from ..runtime.world import World
from .blocking.loop_thread import loop_thread
from .connect.connections import Connections
from .connect.service_url import parse_service_url
from .connect.world import client_world
from .model.message_id import MessageId
from .model.settings import ClientSettings

P = ParamSpec("P")
T = TypeVar("T")
_SERVICE = "Admin"
AT_ONCE = 16
"""Topics of a namespace that are acted on at the same time."""


class AdminClient:
    def __init__(self, service_url: str, *, timeout_s: float = 30.0, world: World | None = None) -> None:
        self._endpoints = parse_service_url(service_url)
        self._settings = ClientSettings(operation_timeout_s=timeout_s)
        self._world = world
        self._made: Connections | None = None

    @property
    def _connections(self) -> Connections:
        if self._made is None:
            self._made = Connections(self._world or client_world(), self._endpoints, self._settings)
            if self._world is None:
                self._made.leave_with_the_loop()
        return self._made

    async def _any(self, method: str, request: Message) -> Any:
        return await self._connections.ask(method, request, service=_SERVICE)

    async def _owner(self, topic: str, method: str, request: Message) -> Any:
        return await self._connections.ask_owner(TopicName.parse(topic), method, request, service=_SERVICE)

    # ------------------------------------------------------------------------------ tenants
    async def tenants(self) -> list[str]:
        return list((await self._any("ListTenants", wire.Empty())).names)

    async def create_tenant(
        self, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
    ) -> None:
        await self._any("CreateTenant", _tenant(name, admin_roles, allowed_clusters))

    async def tenant(self, name: str) -> wire.TenantSpec:
        spec: wire.TenantSpec = await self._any("GetTenant", wire.Name(name=check_tenant_name(name)))
        return spec

    async def update_tenant(
        self, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
    ) -> None:
        await self._any("UpdateTenant", _tenant(name, admin_roles, allowed_clusters))

    async def delete_tenant(self, name: str) -> None:
        await self._any("DeleteTenant", wire.Name(name=check_tenant_name(name)))

    # ------------------------------------------------------------------------------ namespaces
    async def namespaces(self, tenant: str) -> list[str]:
        return list((await self._any("ListNamespaces", wire.Name(name=check_tenant_name(tenant)))).names)

    async def create_namespace(self, name: str, spec: wire.NamespaceSpec | None = None) -> None:
        await self._any("CreateNamespace", _namespace(name, spec))

    async def namespace(self, name: str) -> wire.NamespaceSpec:
        spec: wire.NamespaceSpec = await self._any("GetNamespace", wire.Name(name=str(NamespaceName.parse(name))))
        return spec

    async def update_namespace(self, name: str, spec: wire.NamespaceSpec) -> None:
        await self._any("UpdateNamespace", _namespace(name, spec))

    async def delete_namespace(self, name: str, *, force: bool = False) -> None:
        request = wire.DeleteRequest(name=str(NamespaceName.parse(name)), force=force)
        await self._any("DeleteNamespace", request)

    async def unload_namespace(self, name: str, bundle: str = "") -> int:
        """Every broker gives its bundles up (or that one); the next lookups find new owners. How many topics."""
        request = wire.UnloadNamespaceRequest(namespace=str(NamespaceName.parse(name)), bundle=bundle)
        reply: wire.UnloadNamespaceReply = await self._any("UnloadNamespace", request)
        return reply.topics

    async def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Everything counts as acknowledged, by that subscription or by each; in how many topics and partitions."""
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
        """All of them, also when some fail; then the first failure. Where there is nothing to act on does not count."""
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
        """What the namespace lays down; `applied`: every field, with what is inherited from the broker."""
        return await self._policies(wire.PoliciesRequest(namespace=str(NamespaceName.parse(name)), applied=applied))

    async def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """The fields that are set get these values; the others stay."""
        request = wire.ChangePoliciesRequest(namespace=str(NamespaceName.parse(name)), set=encode(policies))
        await self._any("ChangePolicies", request)

    async def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """These fields are inherited again."""
        request = wire.ChangePoliciesRequest(namespace=str(NamespaceName.parse(name)), remove=fields)
        await self._any("ChangePolicies", request)

    async def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """As namespace_policies; what is inherited comes from the namespace, then from the broker."""
        return await self._policies(wire.PoliciesRequest(topic=_full(topic), applied=applied))

    async def set_topic_policies(self, topic: str, policies: Policies) -> None:
        await self._any("ChangePolicies", wire.ChangePoliciesRequest(topic=_full(topic), set=encode(policies)))

    async def remove_topic_policies(self, topic: str, *fields: str) -> None:
        await self._any("ChangePolicies", wire.ChangePoliciesRequest(topic=_full(topic), remove=fields))

    async def _policies(self, request: wire.PoliciesRequest) -> Policies:
        return decode((await self._any("GetPolicies", request)).policies)

    # ------------------------------------------------------------------------------ topics
    async def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Full names, sorted; `partitions`: single partitions instead of partitioned topics.

        With the non-persistent ones that have partitions or are in use.
        """
        request = wire.ListTopicsRequest(namespace=str(NamespaceName.parse(namespace)), partitions=partitions)
        return list((await self._any("ListTopics", request)).names)

    async def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        await self._any("CreateTopic", wire.TopicSpec(name=_full(topic), partitions=partitions))

    async def update_topic(self, topic: str, *, partitions: int) -> None:
        """More partitions, never fewer."""
        await self._any("UpdateTopic", wire.TopicSpec(name=_full(topic), partitions=partitions))

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        await self._any("DeleteTopic", wire.DeleteRequest(name=_full(topic), force=force))

    async def partitions(self, topic: str) -> int:
        """0: not partitioned. Raises TopicNotFound; creates nothing."""
        return await self._connections.partitions(TopicName.parse(topic), create=False)

    async def topic_stats(self, topic: str) -> wire.TopicStatsReply:
        reply: wire.TopicStatsReply = await self._owner(topic, "TopicStats", wire.Name(name=_full(topic)))
        return reply

    async def topic_internal_stats(self, topic: str) -> wire.TopicInternalStatsReply:
        name = wire.Name(name=_full(topic))
        reply: wire.TopicInternalStatsReply = await self._owner(topic, "TopicInternalStats", name)
        return reply

    async def unload_topic(self, topic: str) -> None:
        await self._owner(topic, "UnloadTopic", wire.Name(name=_full(topic)))

    async def trim_topic(self, topic: str) -> None:
        await self._owner(topic, "TrimTopic", wire.Name(name=_full(topic)))

    async def truncate_topic(self, topic: str) -> None:
        """Everything counts as acknowledged, and what is not written to is deleted."""
        await self._owner(topic, "TruncateTopic", wire.Name(name=_full(topic)))

    async def last_message_id(self, topic: str) -> MessageId:
        return MessageId.from_wire(await self._owner(topic, "LastMessageId", wire.Name(name=_full(topic))))

    async def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """Of the first message that arrived then or later; where the next will be, when there is none."""
        request = wire.MessageIdByTimeRequest(topic=_full(topic), publish_time_ms=publish_time_ms)
        return MessageId.from_wire(await self._owner(topic, "MessageIdByTime", request))

    async def backlog_size(self, topic: str, position: MessageId) -> int:
        """About how many bytes lie behind the message."""
        request = wire.BacklogSizeRequest(topic=_full(topic), position=position.to_wire())
        reply: wire.BacklogSizeReply = await self._owner(topic, "BacklogSize", request)
        return reply.bytes

    async def message(self, topic: str, ledger_id: int, entry_id: int) -> wire.Delivery:
        """The entry with its messages. InvalidRequest: there is none."""
        request = wire.GetMessageRequest(topic=_full(topic), ledger_id=ledger_id, entry_id=entry_id)
        reply: wire.PeekMessagesReply = await self._owner(topic, "GetMessage", request)
        return reply.entries[0]

    async def terminate_topic(self, topic: str) -> MessageId:
        """Seals it; the id of its last message."""
        return MessageId.from_wire(await self._owner(topic, "TerminateTopic", wire.Name(name=_full(topic))))

    # ------------------------------------------------------------------------------ subscriptions
    async def subscriptions(self, topic: str) -> list[str]:
        return list((await self._owner(topic, "ListSubscriptions", wire.Name(name=_full(topic)))).names)

    async def create_subscription(
        self, topic: str, name: str, position: MessageId | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """At `position` (default: latest)."""
        spec = wire.SubscriptionSpec(
            topic=_full(topic), name=check_subscription_name(name), position=(position or MessageId.latest).to_wire(),
            properties=dict(properties or {}),
        )  # fmt: skip
        await self._owner(topic, "CreateSubscription", spec)

    async def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        request = wire.DeleteSubscriptionRequest(topic=_full(topic), name=check_subscription_name(name), force=force)
        await self._owner(topic, "DeleteSubscription", request)

    async def subscription_properties(self, topic: str, name: str) -> dict[str, str]:
        request = wire.DeleteSubscriptionRequest(topic=_full(topic), name=check_subscription_name(name))
        reply: wire.SubscriptionSpec = await self._owner(topic, "GetSubscriptionProperties", request)
        return dict(reply.properties)

    async def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """These and no others."""
        request = wire.SubscriptionSpec(
            topic=_full(topic), name=check_subscription_name(name), properties=dict(properties)
        )
        await self._owner(topic, "SetSubscriptionProperties", request)

    async def reset_subscription(self, topic: str, name: str, to: MessageId | int) -> None:
        """To a message id, or to a publish time in ms since the epoch."""
        request = wire.ResetSubscriptionRequest(topic=_full(topic), name=check_subscription_name(name))
        if isinstance(to, MessageId):
            request.message_id.CopyFrom(to.to_wire())
        else:
            request.publish_time_ms = to
        await self._owner(topic, "ResetSubscription", request)

    async def expire_messages(self, topic: str, name: str, older_than_s: float) -> int:
        """What is older counts as acknowledged, by all subscriptions when `name` is empty; how many entries."""
        request = wire.ExpireMessagesRequest(topic=_full(topic), name=name, older_than_s=older_than_s)
        reply: wire.ExpireMessagesReply = await self._owner(topic, "ExpireMessages", request)
        return reply.entries

    async def analyze_backlog(self, topic: str, name: str) -> wire.AnalyzeBacklogReply:
        request = wire.DeleteSubscriptionRequest(topic=_full(topic), name=check_subscription_name(name))
        reply: wire.AnalyzeBacklogReply = await self._owner(topic, "AnalyzeBacklog", request)
        return reply

    async def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """-1: all; an empty name: of every subscription."""
        if name:
            check_subscription_name(name)
        request = wire.SkipMessagesRequest(topic=_full(topic), name=name, messages=messages)
        await self._owner(topic, "SkipMessages", request)

    async def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[wire.Delivery]:
        """The next entries of a subscription, which stay where they are."""
        request = wire.PeekMessagesRequest(topic=_full(topic), name=check_subscription_name(name), messages=messages)
        return list((await self._owner(topic, "PeekMessages", request)).entries)

    # ------------------------------------------------------------------------------ the cluster
    async def brokers(self) -> list[wire.BrokerStatus]:
        return list((await self._any("ListBrokers", wire.Empty())).brokers)

    async def bookies(self) -> list[wire.BookieStatus]:
        return list((await self._any("ListBookies", wire.Empty())).bookies)

    async def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            await made.close()

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _blocking(
    method: Callable[Concatenate[AdminClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Admin, P], T]:
    """The method with the same parameters, which waits."""

    @functools.wraps(method)
    def call(self: Admin, /, *arguments: P.args, **options: P.kwargs) -> T:
        return loop_thread().run(method(self._inner, *arguments, **options))

    return call


class Admin:
    """AdminClient's methods, blocking, in the process' loop thread."""

    def __init__(self, service_url: str, *, timeout_s: float = 30.0) -> None:
        self._inner = AdminClient(service_url, timeout_s=timeout_s)

    tenants = _blocking(AdminClient.tenants)
    create_tenant = _blocking(AdminClient.create_tenant)
    tenant = _blocking(AdminClient.tenant)
    update_tenant = _blocking(AdminClient.update_tenant)
    delete_tenant = _blocking(AdminClient.delete_tenant)

    namespaces = _blocking(AdminClient.namespaces)
    create_namespace = _blocking(AdminClient.create_namespace)
    namespace = _blocking(AdminClient.namespace)
    update_namespace = _blocking(AdminClient.update_namespace)
    delete_namespace = _blocking(AdminClient.delete_namespace)
    unload_namespace = _blocking(AdminClient.unload_namespace)
    clear_namespace_backlog = _blocking(AdminClient.clear_namespace_backlog)
    unsubscribe_namespace = _blocking(AdminClient.unsubscribe_namespace)

    namespace_policies = _blocking(AdminClient.namespace_policies)
    set_namespace_policies = _blocking(AdminClient.set_namespace_policies)
    remove_namespace_policies = _blocking(AdminClient.remove_namespace_policies)
    topic_policies = _blocking(AdminClient.topic_policies)
    set_topic_policies = _blocking(AdminClient.set_topic_policies)
    remove_topic_policies = _blocking(AdminClient.remove_topic_policies)

    topics = _blocking(AdminClient.topics)
    create_topic = _blocking(AdminClient.create_topic)
    update_topic = _blocking(AdminClient.update_topic)
    delete_topic = _blocking(AdminClient.delete_topic)
    partitions = _blocking(AdminClient.partitions)
    topic_stats = _blocking(AdminClient.topic_stats)
    topic_internal_stats = _blocking(AdminClient.topic_internal_stats)
    unload_topic = _blocking(AdminClient.unload_topic)
    trim_topic = _blocking(AdminClient.trim_topic)
    truncate_topic = _blocking(AdminClient.truncate_topic)
    last_message_id = _blocking(AdminClient.last_message_id)
    message_id_by_time = _blocking(AdminClient.message_id_by_time)
    backlog_size = _blocking(AdminClient.backlog_size)
    message = _blocking(AdminClient.message)
    terminate_topic = _blocking(AdminClient.terminate_topic)

    subscriptions = _blocking(AdminClient.subscriptions)
    create_subscription = _blocking(AdminClient.create_subscription)
    delete_subscription = _blocking(AdminClient.delete_subscription)
    subscription_properties = _blocking(AdminClient.subscription_properties)
    set_subscription_properties = _blocking(AdminClient.set_subscription_properties)
    reset_subscription = _blocking(AdminClient.reset_subscription)
    expire_messages = _blocking(AdminClient.expire_messages)
    analyze_backlog = _blocking(AdminClient.analyze_backlog)
    skip_messages = _blocking(AdminClient.skip_messages)
    peek_messages = _blocking(AdminClient.peek_messages)

    brokers = _blocking(AdminClient.brokers)
    bookies = _blocking(AdminClient.bookies)

    def close(self) -> None:
        loop_thread().run(self._inner.close())

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def _full(topic: str) -> str:
    return TopicName.parse(topic).full


def _tenant(name: str, admin_roles: Sequence[str], allowed_clusters: Sequence[str]) -> wire.TenantSpec:
    """NotAllowed: no broker keeps to roles or clusters yet."""
    if admin_roles or allowed_clusters:
        what = "admin_roles" if admin_roles else "allowed_clusters"
        raise NotAllowed(f"{what} of a tenant is not enforced yet, and is refused until it is; leave it out")
    return wire.TenantSpec(
        name=check_tenant_name(name), admin_roles=admin_roles, allowed_clusters=allowed_clusters
    )


def _namespace(name: str, spec: wire.NamespaceSpec | None) -> wire.NamespaceSpec:
    given = wire.NamespaceSpec()
    if spec is not None:
        given.CopyFrom(spec)
    given.name = str(NamespaceName.parse(name))
    return given
