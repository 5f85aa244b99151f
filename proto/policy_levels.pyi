"""Of policy_levels.py, for type checkers and editors; `python -m tests.stubs` writes it."""

import msgspec

from .applied import Durability, InactiveMode, KeyIndexPolicy, QuotaPolicy, StoragePolicy, TypeTitle
from .schema import Compatibility

class Policies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """The policies of one level; a field that is None is inherited."""

    retention_minutes: int | None = None
    retention_mib: int | None = None
    unsubscribed_minutes: int | None = None
    unsubscribed_mib: int | None = None
    message_ttl_s: int | None = None
    backlog_quota_bytes: int | None = None
    backlog_quota_s: int | None = None
    backlog_quota_policy: QuotaPolicy | None = None
    backlog_quota_counts_delayed: bool | None = None
    deduplication: bool | None = None
    dedup_snapshot_s: int | None = None
    max_message_bytes: int | None = None
    delayed_delivery: bool | None = None
    delayed_tick_ms: int | None = None
    max_delay_ms: int | None = None
    publish_rate_messages: int | None = None
    publish_rate_bytes: int | None = None
    dispatch_rate_messages: int | None = None
    dispatch_rate_bytes: int | None = None
    namespace_publish_rate_messages: int | None = None
    namespace_publish_rate_bytes: int | None = None
    namespace_dispatch_rate_messages: int | None = None
    namespace_dispatch_rate_bytes: int | None = None
    tenant_publish_rate_messages: int | None = None
    tenant_publish_rate_bytes: int | None = None
    tenant_dispatch_rate_messages: int | None = None
    tenant_dispatch_rate_bytes: int | None = None
    resource_group: str | None = None
    namespace_storage_bytes: int | None = None
    namespace_storage_policy: StoragePolicy | None = None
    tenant_storage_bytes: int | None = None
    tenant_storage_policy: StoragePolicy | None = None
    subscription_dispatch_rate_messages: int | None = None
    subscription_dispatch_rate_bytes: int | None = None
    subscribe_rate: int | None = None
    subscribe_rate_period_s: int | None = None
    max_producers: int | None = None
    max_consumers: int | None = None
    max_consumers_per_subscription: int | None = None
    max_subscriptions: int | None = None
    auto_subscription_creation: bool | None = None
    max_topics: int | None = None
    max_tenant_topics: int | None = None
    max_unacked_per_consumer: int | None = None
    max_unacked_per_subscription: int | None = None
    inactive_s: int | None = None
    inactive_mode: InactiveMode | None = None
    subscription_expiration_s: int | None = None
    compaction_threshold_bytes: int | None = None
    ensemble_size: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    dead_letter_max_redeliver_count: int | None = None
    dead_letter_topic: str | None = None
    dead_letter_backoff_s: tuple[float, ...] | None = None
    subscription_types: tuple[TypeTitle, ...] | None = None
    schema_compatibility: Compatibility | None = None
    schema_auto_update: bool | None = None
    schema_validation_enforced: bool | None = None
    primary_broker_labels: tuple[str, ...] | None = None
    fallback_broker_labels: tuple[str, ...] | None = None
    primary_brokers_min: int | None = None
    primary_bookie_groups: tuple[str, ...] | None = None
    secondary_bookie_groups: tuple[str, ...] | None = None
    key_index: KeyIndexPolicy | None = None
    durability: Durability | None = None
