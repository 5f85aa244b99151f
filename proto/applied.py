"""The table of all policies: the name, the type, the default and the meaning of each.

`AppliedPolicies` has the policies that are in force for a topic. The policies of one level, such as a namespace, have
the same fields, each of which may be None (`Policies`, proto/policy_levels.py). The names by which operators set them
are in proto/policies.py. A new policy is a line here and a row there.

Three defaults differ from Pulsar's:

- `inactive_s`: an unused topic is not deleted. Pulsar deletes one without subscriptions after 60 s, with all messages
  that were acknowledged to its producers and not read yet.
- `unsubscribed_minutes`: a topic without a durable subscription keeps its messages. Pulsar deletes them with the next
  ledger.
- `ensemble_size` is 3, so that one disk may fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .schema import Compatibility
from .states import PULSAR_TYPE_NAMES

QuotaPolicy = Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"]
"""What happens when the backlog quota is reached (Pulsar A17)."""

StoragePolicy = Literal["producer_request_hold", "producer_exception"]
"""What happens when a namespace or a tenant stores as many bytes as it may: producers wait, or are refused."""

InactiveMode = Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"]
"""When a topic without producers and consumers counts as inactive (Pulsar T6)."""

KeyIndexPolicy = Literal["off", "keys", "keys+properties"]
"""What the index of a sealed ledger has (broker/log/key_indexes.py)."""

Durability = Literal["disk", "memory"]
"""When bookies answer the entries of a topic's log: after the sync to their disks, or when they have them in memory."""

if TYPE_CHECKING:
    TypeTitle = str
else:
    TypeTitle = Literal[PULSAR_TYPE_NAMES]  # a subscription type

Positive = Annotated[int, Meta(ge=1)]
Limit = Annotated[int, Meta(ge=0)]
Unlimited = Annotated[int, Meta(ge=-1)]


class AppliedPolicies(msgspec.Struct, frozen=True):
    """The policies that are in force for a topic: for each field the value of the topic, otherwise of the namespace,
    otherwise of the tenant, otherwise of the broker. Code that decides by a policy must read it anew each time, because
    it may change."""

    retention_minutes: Unlimited = 0  # acknowledged data is kept so long; -1: for ever; both 0: not at all; costs disk
    retention_mib: Unlimited = 0  # … and up to so much of each topic, what is reached first; -1: without limit
    unsubscribed_minutes: Unlimited = 10_080  # a topic without durable subscriptions keeps messages so long; costs disk
    unsubscribed_mib: Unlimited = 1024  # … and up to so much, what is first; -1: without limit; both 0: not at all
    message_ttl_s: Limit = 0  # what is not acknowledged after so long counts as acknowledged; 0: never
    backlog_quota_bytes: Limit = 0  # bounds what the slowest subscription of a topic holds on disk; 0: nothing does
    backlog_quota_s: Limit = 0  # … and the age of its oldest message; 0: nothing does
    backlog_quota_policy: QuotaPolicy = "producer_request_hold"  # past it: wait, refuse, or give up the oldest
    backlog_quota_counts_delayed: bool = True  # off: the quota by size leaves out what is not due yet; disk fills
    deduplication: bool = False  # of publishes by producer and sequence id; costs a snapshot now and then
    dedup_snapshot_s: Limit = 120  # until its next snapshot of all producers, if anything was published; 0: any time
    max_message_bytes: Positive = 5 << 20  # of one entry; larger is refused
    delayed_delivery: bool = True  # messages may have a time before which no consumer gets them; off: at once
    delayed_tick_ms: Limit = 50  # at least, between two checks of what is due; higher: later, less often
    max_delay_ms: Limit = 0  # the longest delay that a producer may ask for; 0: any
    publish_rate_messages: Limit = 0  # per second and topic; past it producers get no credit; 0: no limit
    publish_rate_bytes: Limit = 0  # … in bytes
    dispatch_rate_messages: Limit = 0  # per second and topic, what comes again too; 0: no limit
    dispatch_rate_bytes: Limit = 0  # … in bytes
    namespace_publish_rate_messages: Limit = 0  # per second, of all topics of a namespace, at all brokers; 0: no limit
    namespace_publish_rate_bytes: Limit = 0  # … in bytes
    namespace_dispatch_rate_messages: Limit = 0  # … that are delivered, what comes again too; 0: no limit
    namespace_dispatch_rate_bytes: Limit = 0  # … in bytes
    tenant_publish_rate_messages: Limit = 0  # per second, of all namespaces of a tenant, at all brokers; 0: no limit
    tenant_publish_rate_bytes: Limit = 0  # … in bytes
    tenant_dispatch_rate_messages: Limit = 0  # … that are delivered, what comes again too; 0: no limit
    tenant_dispatch_rate_bytes: Limit = 0  # … in bytes
    resource_group: str = ""  # a namespace's: rates that all namespaces of the group share, at all brokers; empty: none
    namespace_storage_bytes: Limit = 0  # that all topics of a namespace store, at all brokers, once each; 0: no limit
    namespace_storage_policy: StoragePolicy = "producer_request_hold"  # at it: producers wait, or are refused
    tenant_storage_bytes: Limit = 0  # … that all namespaces of a tenant store
    tenant_storage_policy: StoragePolicy = "producer_request_hold"  # likewise
    subscription_dispatch_rate_messages: Limit = 0  # per second and subscription, what comes again too; 0: no limit
    subscription_dispatch_rate_bytes: Limit = 0  # … in bytes
    subscribe_rate: Limit = 0  # how often one consumer may subscribe to a topic within a period; 0: no limit
    subscribe_rate_period_s: Positive = 30  # that period; longer: a burst of so many costs a longer wait
    max_producers: Limit = 0  # connected to a topic at a time; 0: any number
    max_consumers: Limit = 0  # … of all its subscriptions
    max_consumers_per_subscription: Limit = 0  # … of one of them
    max_subscriptions: Limit = 0  # of a topic; each holds data until it has acknowledged it; 0: any number
    auto_subscription_creation: bool = True  # a consumer's subscription is made when it connects; off: by operators
    max_topics: Limit = 0  # of a namespace, each partition counts; 0: any number
    max_tenant_topics: Limit = 0  # of all namespaces of a tenant, likewise; costs a read of each when one is made
    max_unacked_per_consumer: Limit = 50_000  # messages; past it one of a shared type gets none until half; 0: any
    max_unacked_per_subscription: Limit = 200_000  # … and past it all of them, until half is acknowledged; 0: any
    inactive_s: Limit = 0  # a topic that was unused for so long is deleted; 0: never
    inactive_mode: InactiveMode = "delete_when_no_subscriptions"  # or also when all subscriptions have read everything
    subscription_expiration_s: Limit = 0  # one without consumers and pending acks is deleted after so long; 0: never
    compaction_threshold_bytes: Limit = 0  # a topic is compacted when so much is not compacted; 0: by hand
    ensemble_size: Positive = 3  # bookies over which a topic's ledger is striped
    write_quorum: Positive = 3  # copies of each entry; each costs its bytes on disk and network
    ack_quorum: Positive = 2  # synced copies before a publish is confirmed
    dead_letter_max_redeliver_count: Limit = 0  # after so many redeliveries the broker moves a message away; 0: never
    dead_letter_topic: str = ""  # where to; empty: TOPIC-SUBSCRIPTION-DLQ
    dead_letter_backoff_s: tuple[float, ...] = ()  # wait before the 1st, 2nd, … redelivery; the last one stays
    subscription_types: tuple[TypeTitle, ...] = PULSAR_TYPE_NAMES  # that consumers may ask for
    schema_compatibility: Compatibility = Compatibility.FULL  # of a producer's new schema with those of its topic
    schema_auto_update: bool = True  # a new schema of a producer is registered; off: operators upload it
    schema_validation_enforced: bool = False  # a producer without a schema is refused where the topic has one
    primary_broker_labels: tuple[str, ...] = ()  # a namespace's bundles are at brokers with all of these; none: at any
    fallback_broker_labels: tuple[str, ...] = ()  # … or all of these, while too few have those; *: any; none: nowhere
    primary_brokers_min: Positive = 1  # too few: below it; a bundle returns when there were enough for five minutes
    primary_bookie_groups: tuple[str, ...] = ()  # a ledger is on bookies of these groups; none: on any
    secondary_bookie_groups: tuple[str, ...] = ()  # … and of these only where those are too few
    key_index: KeyIndexPolicy = "off"  # sealed ledgers get one for searches; costs a read, 6 bytes a key and 1 MiB
    durability: Durability = "disk"  # memory: bookies answer before their sync; all of them at once lose the newest
