"""Admin: AdminClient for programs without asyncio; the same methods, blocking."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..blocking.loop_thread import loop_thread
from ..common.closing import ClosedAfterWith
from .client import AdminClient

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AdminClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Admin, P], T]:
    """The method with the same parameters, blocking."""

    @functools.wraps(method)
    def call(self: Admin, /, *arguments: P.args, **options: P.kwargs) -> T:
        return loop_thread().run(method(self._inner, *arguments, **options))

    return call


class Admin(ClosedAfterWith):
    """Administration of a cluster, blocking: parameters, answers and errors of each method are AdminClient's.

        with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
            admin.create_topic("flights", partitions=4)

    It runs in the client's loop thread of this process; any thread may call it. Close it, or use a `with` statement.
    """

    def __init__(
        self, service_url: str, *, timeout_s: float = 30.0, authentication: object = None,
        tls_trust_certs_file_path: str = "",
    ) -> None:  # fmt: skip
        self._inner = AdminClient(
            service_url, timeout_s=timeout_s, authentication=authentication,
            tls_trust_certs_file_path=tls_trust_certs_file_path,
        )  # fmt: skip

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

    namespace_permissions = _blocking(AdminClient.namespace_permissions)
    topic_permissions = _blocking(AdminClient.topic_permissions)
    grant_namespace_permission = _blocking(AdminClient.grant_namespace_permission)
    revoke_namespace_permission = _blocking(AdminClient.revoke_namespace_permission)
    grant_topic_permission = _blocking(AdminClient.grant_topic_permission)
    revoke_topic_permission = _blocking(AdminClient.revoke_topic_permission)
    grant_subscription_permission = _blocking(AdminClient.grant_subscription_permission)
    revoke_subscription_permission = _blocking(AdminClient.revoke_subscription_permission)
    set_subscription_prefix_mode = _blocking(AdminClient.set_subscription_prefix_mode)

    namespace_policies = _blocking(AdminClient.namespace_policies)
    set_namespace_policies = _blocking(AdminClient.set_namespace_policies)
    remove_namespace_policies = _blocking(AdminClient.remove_namespace_policies)
    topic_policies = _blocking(AdminClient.topic_policies)
    set_topic_policies = _blocking(AdminClient.set_topic_policies)
    remove_topic_policies = _blocking(AdminClient.remove_topic_policies)
    namespace_properties = _blocking(AdminClient.namespace_properties)
    set_namespace_properties = _blocking(AdminClient.set_namespace_properties)
    remove_namespace_properties = _blocking(AdminClient.remove_namespace_properties)
    topic_properties = _blocking(AdminClient.topic_properties)
    set_topic_properties = _blocking(AdminClient.set_topic_properties)
    remove_topic_properties = _blocking(AdminClient.remove_topic_properties)

    topics = _blocking(AdminClient.topics)
    create_topic = _blocking(AdminClient.create_topic)
    update_topic = _blocking(AdminClient.update_topic)
    delete_topic = _blocking(AdminClient.delete_topic)
    partitions = _blocking(AdminClient.partitions)
    parts = _blocking(AdminClient.parts)
    owner = _blocking(AdminClient.owner)
    offsets = _blocking(AdminClient.offsets)
    topic_stats = _blocking(AdminClient.topic_stats)
    namespace_stats = _blocking(AdminClient.namespace_stats)
    topic_internal_stats = _blocking(AdminClient.topic_internal_stats)
    unload_topic = _blocking(AdminClient.unload_topic)
    trim_topic = _blocking(AdminClient.trim_topic)
    skip_lost = _blocking(AdminClient.skip_lost)
    truncate_topic = _blocking(AdminClient.truncate_topic)
    terminate_topic = _blocking(AdminClient.terminate_topic)
    compact = _blocking(AdminClient.compact)
    compaction_status = _blocking(AdminClient.compaction_status)
    last_message_id = _blocking(AdminClient.last_message_id)
    schema = _blocking(AdminClient.schema)
    schemas = _blocking(AdminClient.schemas)
    put_schema = _blocking(AdminClient.put_schema)
    schema_version = _blocking(AdminClient.schema_version)
    test_schema = _blocking(AdminClient.test_schema)
    delete_schemas = _blocking(AdminClient.delete_schemas)

    message_id_by_time = _blocking(AdminClient.message_id_by_time)
    backlog_size = _blocking(AdminClient.backlog_size)
    messages = _blocking(AdminClient.messages)
    nth_message = _blocking(AdminClient.nth_message)

    subscriptions = _blocking(AdminClient.subscriptions)
    create_subscription = _blocking(AdminClient.create_subscription)
    delete_subscription = _blocking(AdminClient.delete_subscription)
    subscription_properties = _blocking(AdminClient.subscription_properties)
    set_subscription_properties = _blocking(AdminClient.set_subscription_properties)
    reset_subscription = _blocking(AdminClient.reset_subscription)
    advance_subscription = _blocking(AdminClient.advance_subscription)
    expire_messages = _blocking(AdminClient.expire_messages)
    analyze_backlog = _blocking(AdminClient.analyze_backlog)
    skip_messages = _blocking(AdminClient.skip_messages)
    peek_messages = _blocking(AdminClient.peek_messages)

    transactions = _blocking(AdminClient.transactions)
    all_transactions = _blocking(AdminClient.all_transactions)
    transaction_at = _blocking(AdminClient.transaction_at)
    transaction = _blocking(AdminClient.transaction)
    abort_transaction = _blocking(AdminClient.abort_transaction)
    detach_transaction = _blocking(AdminClient.detach_transaction)
    halves = _blocking(AdminClient.halves)
    all_halves = _blocking(AdminClient.all_halves)
    half = _blocking(AdminClient.half)
    commit_half = _blocking(AdminClient.commit_half)
    rollback_half = _blocking(AdminClient.rollback_half)
    park_half = _blocking(AdminClient.park_half)
    revive_half = _blocking(AdminClient.revive_half)

    brokers = _blocking(AdminClient.brokers)
    bookies = _blocking(AdminClient.bookies)
    find_orphans = _blocking(AdminClient.find_orphans)

    def close(self) -> None:
        """Closes the connections."""
        loop_thread().run(self._inner.close())
