"""Policies that an operator sets for a namespace or a topic: their names, their checks and their form as JSON.

**Levels.** A field that is None is inherited: topic > namespace > tenant > broker (Pulsar B5). A row says at which of
them a policy is set: those of a tenant are what bounds all its namespaces together, and no other level has them. A
policy of a partitioned topic is set on the topic and applies to each of its partitions. On the wire and in the
metadata, policies are one JSON object with only the fields that are set: `{"message_ttl_s":600}`. The fields, with
their types and defaults, are in proto/applied.py; broker/common/config.py resolves the levels. **Values.** If a field
is a limit, 0 means "none" or "no limit". Only the retentions also have -1 (without limit). `check_policies` raises
InvalidRequest, whose text says what is wrong. **Names.** `POLICIES` is the table of all policies by Pulsar's names. A
row makes three commands for namespaces and three for topics (cli/admin/policies.py), and the routes of REST
(broker/rest/policies.py). The gRPC operations `GetPolicies` and `ChangePolicies` and AdminClient use the fields.

Guards: tests/proto/test_policies.py; tests/broker/test_new_policy.py makes a new policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, get_args

import msgspec

from .applied import Durability, KeyIndexPolicy, StoragePolicy
from .errors import InvalidRequest
from .policy_levels import Policies as Policies
from .schema import Compatibility
from .states import PULSAR_TYPE_NAMES

TENANT_LEVEL, NAMESPACE_LEVEL, TOPIC_LEVEL = "tenants", "namespaces", "topics"


class Field(NamedTuple):
    """One field of `Policies`, and the command line options that set it. `kind`: how the text of an option is
    converted."""

    name: str  # of proto/policies.py
    kind: str  # of UNIT_CONVERTERS (cli/admin/policies.py), or "on/off", or choices with | between
    flags: tuple[str, ...]
    help: str


class PolicyRestNames(NamedTuple):
    """The names of a policy in Pulsar's REST interface. The body of a policy with one field is a number or a boolean.
    If the body has another form, `BODY_CONVERTERS` of broker/rest/policies.py has the functions that convert it."""

    namespace: str  # last part of the path; empty: namespaces have none
    topic: str
    key: str  # in the JSON of a namespace; empty: it has none
    unit: int = 1  # how many of ours one of Pulsar's is
    verb: str = "POST"  # that sets it, for namespaces
    topic_verb: str = "POST"
    by_cluster: bool = False  # `key` has a map from the cluster
    tenant: str = ""  # last part of the path; empty: tenants have none


class PolicyDefinition(NamedTuple):
    """One policy: a row of the table `POLICIES`, with its fields, its help, and its names on the command line and in
    REST."""

    name: str  # set-NAME for topics
    fields: tuple[Field, ...]  # that are set together
    help: str
    example: str  # the options of set-NAME
    of_namespaces: str = ""  # set-NAME for namespaces, where pulsar-admin calls it differently
    note: str = ""
    levels: tuple[str, ...] = (NAMESPACE_LEVEL, TOPIC_LEVEL)  # that the command line offers
    rest: PolicyRestNames | None = None

    def name_at(self, level: str) -> str:
        """Returns the name of the policy on the command line at this level (NAMESPACE_LEVEL or TOPIC_LEVEL)."""
        return self.of_namespaces if level == NAMESPACE_LEVEL and self.of_namespaces else self.name


def _rates(prefix: str, messages: tuple[str, ...], size: tuple[str, ...]) -> tuple[Field, ...]:
    return (
        Field(f"{prefix}_messages", "limit", messages, "Messages a second; 0 or -1: no limit."),
        Field(f"{prefix}_bytes", "limit", size, "Bytes a second; 0 or -1: no limit."),
    )


def _storage(level: str) -> tuple[Field, ...]:
    return (
        Field(f"{level}_storage_bytes", "bytes limit", ("-l", "--limit", "--limitSize"), "100G, bytes; -1: none."),
        Field(f"{level}_storage_policy", STORAGE_POLICIES, ("-p", "--policy"), "What happens then."),
    )


def _number(name: str, flags: tuple[str, ...], what: str) -> tuple[Field, ...]:
    return (Field(name, "limit", flags, f"{what}; 0: any number."),)


_DISPATCH = (("-md", "--msg-dispatch-rate"), ("-bd", "--byte-dispatch-rate"))
QUOTA_POLICIES = "producer_request_hold|producer_exception|consumer_backlog_eviction"
INACTIVE_MODES = "delete_when_no_subscriptions|delete_when_subscriptions_caught_up"

COMPATIBILITIES = "|".join(Compatibility)
KEY_INDEXES = "|".join(get_args(KeyIndexPolicy))
DURABILITIES = "|".join(get_args(Durability))
STORAGE_POLICIES = "|".join(get_args(StoragePolicy))

POLICIES: tuple[PolicyDefinition, ...] = (
    PolicyDefinition("retention", (
        Field("retention_minutes", "minutes", ("-t", "--time"), "Acknowledged is kept: 10m, 2h, 3d; -1: for ever."),
        Field("retention_mib", "MiB", ("-s", "--size"), "… up to 100M, 10G; -1: without limit."),
    ), "How long acknowledged data is kept.", "-t 3d -s 10G",
       rest=PolicyRestNames("retention", "retention", "retention_policies")),
    PolicyDefinition("unsubscribed-retention", (
        Field("unsubscribed_minutes", "minutes", ("-t", "--time"), "Messages are kept: 10m, 2h, 3d; -1: for ever."),
        Field("unsubscribed_mib", "MiB", ("-s", "--size"), "… up to 100M, 10G, what is reached first; -1: any."),
    ), "What a topic keeps that has no durable subscription.", "-t 7d -s 1G",
       rest=PolicyRestNames("unsubscribedRetention", "unsubscribedRetention", "")),
    PolicyDefinition("message-ttl", (
        Field("message_ttl_s", "s", ("-ttl", "-t", "--messageTTL", "--ttl"), "Acknowledged after: 30s, 10m; 0: never."),
    ), "When an unacknowledged message expires.", "-ttl 10m",
       rest=PolicyRestNames("messageTTL", "messageTTL", "message_ttl_in_seconds")),
    PolicyDefinition("backlog-quota", (
        Field("backlog_quota_bytes", "bytes limit", ("-l", "--limit", "--limitSize"), "100M, 10G, bytes; -1: none."),
        Field("backlog_quota_s", "s", ("-lt", "--limitTime"), "Age of the oldest message: 10m, 3d; -1: none."),
        Field("backlog_quota_policy", QUOTA_POLICIES, ("-p", "--policy"), "What happens then."),
        Field("backlog_quota_counts_delayed", "on/off", ("--delayed/--no-delayed",), "Whether what is not due counts."),
    ), "What the slowest subscription may hold.", "-l 10G -p producer_exception"),
    PolicyDefinition("deduplication", (
        Field("deduplication", "on/off", (), "Of publishes, by producer name and sequence id."),
    ), "Drop what a producer sends twice.", "--enable",
       rest=PolicyRestNames("deduplication", "deduplicationEnabled", "deduplicationEnabled")),
    PolicyDefinition("deduplication-snapshot-interval", (
        Field("dedup_snapshot_s", "s", ("-i", "--interval"), "Between two snapshots: 30, 2m; 0: by entries alone."),
    ), "How often the sequence ids of producers are stored.", "-i 60", rest=PolicyRestNames(
        "deduplicationSnapshotInterval", "deduplicationSnapshotInterval", "deduplicationSnapshotIntervalSeconds"
    )),
    PolicyDefinition("max-message-size", (
        Field("max_message_bytes", "bytes", ("-m", "--max-message-size"), "Of one entry: 65536, 64K, 5M."),
    ), "The largest message.", "-m 1M", rest=PolicyRestNames("", "maxMessageSize", "")),
    PolicyDefinition("delayed-delivery", (
        Field("delayed_delivery", "on/off", (), "Messages may have a time before which they are not delivered."),
        Field("delayed_tick_ms", "ms", ("--time", "-t"), "So late at most, and so seldom looked: 50, 1000, 1s."),
        Field("max_delay_ms", "ms", ("--maxDelay", "-md"), "The longest delay: 10m, 7d; 0: any."),
    ), "Delayed messages.", "--enable --maxDelay 7d",
       rest=PolicyRestNames("delayedDelivery", "delayedDelivery", "delayed_delivery_policies")),
    PolicyDefinition("publish-rate", _rates(
        "publish_rate", ("-m", "--msg-publish-rate"), ("-b", "--byte-publish-rate")
    ), "How fast all its producers together may send.", "-m 1000 -b 10000000", rest=PolicyRestNames(
        "publishRate", "publishRate", "publishMaxMessageRate", by_cluster=True
    )),
    PolicyDefinition("dispatch-rate", _rates(
        "dispatch_rate", *_DISPATCH
    ), "How fast all its subscriptions together are served.", "-md 1000",
       rest=PolicyRestNames("dispatchRate", "dispatchRate", "topicDispatchRate", by_cluster=True)),
    PolicyDefinition("namespace-publish-rate", _rates(
        "namespace_publish_rate", ("-m", "--msg-publish-rate"), ("-b", "--byte-publish-rate")
    ), "How fast all topics of a namespace together are published to, at all brokers.", "-m 1000 -b 10000000",
       levels=(NAMESPACE_LEVEL,), rest=PolicyRestNames("namespacePublishRate", "", "")),
    PolicyDefinition("namespace-dispatch-rate", _rates(
        "namespace_dispatch_rate", *_DISPATCH
    ), "How fast all topics of a namespace together are served, at all brokers.", "-md 1000",
       levels=(NAMESPACE_LEVEL,), rest=PolicyRestNames("namespaceDispatchRate", "", "")),
    PolicyDefinition("tenant-publish-rate", _rates(
        "tenant_publish_rate", ("-m", "--msg-publish-rate"), ("-b", "--byte-publish-rate")
    ), "How fast all namespaces of a tenant together are published to, at all brokers.", "-m 1000 -b 10000000",
       levels=(TENANT_LEVEL,), rest=PolicyRestNames("", "", "", tenant="tenantPublishRate")),
    PolicyDefinition("tenant-dispatch-rate", _rates(
        "tenant_dispatch_rate", *_DISPATCH
    ), "How fast all namespaces of a tenant together are served, at all brokers.", "-md 1000",
       levels=(TENANT_LEVEL,), rest=PolicyRestNames("", "", "", tenant="tenantDispatchRate")),
    PolicyDefinition("subscription-dispatch-rate", _rates(
        "subscription_dispatch_rate", *_DISPATCH
    ), "How fast each subscription is served.", "-md 1000", rest=PolicyRestNames(
        "subscriptionDispatchRate", "subscriptionDispatchRate", "subscriptionDispatchRate", by_cluster=True
    )),
    PolicyDefinition("subscribe-rate", (
        Field("subscribe_rate", "limit", ("-sr", "--subscribe-rate"), "Times a period; 0 or -1: no limit."),
        Field("subscribe_rate_period_s", "s", ("-st", "--subscribe-rate-period"), "The period: 30, 1m."),
    ), "How often one consumer may subscribe.", "-sr 10 -st 30",
       rest=PolicyRestNames("subscribeRate", "subscribeRate", "clusterSubscribeRate", by_cluster=True)),
    PolicyDefinition("max-producers", _number(
        "max_producers", ("-p", "--max-producers", "--max-producers-per-topic"), "Connected to a topic"
    ), "How many producers.", "-p 100", "max-producers-per-topic",
       rest=PolicyRestNames("maxProducersPerTopic", "maxProducers", "max_producers_per_topic")),
    PolicyDefinition("max-consumers", _number(
        "max_consumers", ("-c", "--max-consumers", "--max-consumers-per-topic"), "Connected to a topic"
    ), "How many consumers.", "-c 100", "max-consumers-per-topic",
       rest=PolicyRestNames("maxConsumersPerTopic", "maxConsumers", "max_consumers_per_topic")),
    PolicyDefinition("max-consumers-per-subscription", _number(
        "max_consumers_per_subscription", ("-c", "--max-consumers", "--max-consumers-per-subscription"), "Connected"
    ), "How many consumers of one subscription.", "-c 10", rest=PolicyRestNames(
        "maxConsumersPerSubscription", "maxConsumersPerSubscription", "max_consumers_per_subscription"
    )),
    PolicyDefinition("max-subscriptions-per-topic", _number(
        "max_subscriptions", ("-s", "-m", "--max-subscriptions-per-topic"), "Of a topic"
    ), "How many subscriptions.", "-s 10", rest=PolicyRestNames(
        "maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic", "max_subscriptions_per_topic"
    )),
    PolicyDefinition("max-topics-per-namespace", _number(
        "max_topics", ("-t", "--max-topics-per-namespace"), "Topics and partitions"
    ), "How many topics, each partition counts.", "-t 1000", levels=(NAMESPACE_LEVEL,),
       rest=PolicyRestNames("maxTopicsPerNamespace", "", "max_topics_per_namespace")),
    PolicyDefinition("max-topics-per-tenant", _number(
        "max_tenant_topics", ("-t", "--max-topics-per-tenant"), "Topics and partitions"
    ), "How many topics all namespaces have, each partition counts.", "-t 1000", levels=(TENANT_LEVEL,),
       rest=PolicyRestNames("", "", "", tenant="maxTopicsPerTenant")),
    PolicyDefinition("resource-group", (
        Field("resource_group", "text", ("-rgn", "--resource-group-name"), "A group: 'magnetar resourcegroups list'."),
    ), "Which resource group's rates a namespace shares with others.", "-rgn batch", levels=(NAMESPACE_LEVEL,),
       rest=PolicyRestNames("resourcegroup", "", "resource_group_name")),
    PolicyDefinition("max-storage-per-namespace", _storage(NAMESPACE_LEVEL.removesuffix("s")),
        "How many bytes all topics of a namespace store.", "-l 100G -p producer_exception",
        note="; it holds in sum over brokers", levels=(NAMESPACE_LEVEL,),
        rest=PolicyRestNames("maxStoragePerNamespace", "", "")),
    PolicyDefinition("max-storage-per-tenant", _storage(TENANT_LEVEL.removesuffix("s")),
        "How many bytes all namespaces of a tenant store.", "-l 1T",
        note="; it holds in sum over brokers", levels=(TENANT_LEVEL,),
        rest=PolicyRestNames("", "", "", tenant="maxStoragePerTenant")),
    PolicyDefinition("auto-subscription-creation", (
        Field("auto_subscription_creation", "on/off", (), "A consumer's subscription is made when it connects."),
    ), "Whether consumers make subscriptions.", "--disable", rest=PolicyRestNames(
        "autoSubscriptionCreation", "autoSubscriptionCreation", "autoSubscriptionCreationOverride"
    )),
    PolicyDefinition("max-unacked-messages-per-consumer", _number(
        "max_unacked_per_consumer", ("-c", "-m", "--maxNum", "--max-unacked-messages-per-consumer"), "Messages"
    ), "What a consumer may hold without acknowledging.", "-m 10000", rest=PolicyRestNames(
        "maxUnackedMessagesPerConsumer", "maxUnackedMessagesOnConsumer", "max_unacked_messages_per_consumer"
    )),
    PolicyDefinition("max-unacked-messages-per-subscription", _number(
        "max_unacked_per_subscription", ("-c", "-m", "--maxNum", "--max-unacked-messages-per-subscription"), "Messages"
    ), "What all consumers of a subscription may hold.", "-m 100000", rest=PolicyRestNames(
        "maxUnackedMessagesPerSubscription", "maxUnackedMessagesOnSubscription", "max_unacked_messages_per_subscription"
    )),
    PolicyDefinition("inactive-topic-policies", (
        Field("inactive_s", "s", ("-t", "--max-inactive-duration"), "Deleted when unused for: 10m, 3d; 0: never."),
        Field("inactive_mode", INACTIVE_MODES, ("-m", "--delete-mode"), "What counts as unused."),
    ), "When an unused topic is deleted.", "-t 3d -m delete_when_no_subscriptions",
       rest=PolicyRestNames("inactiveTopicPolicies", "inactiveTopicPolicies", "inactive_topic_policies")),
    PolicyDefinition("subscription-expiration-time", (
        Field("subscription_expiration_s", "expiry", ("-t", "--time"), "Minutes, or 10m, 3d; 0: never."),
    ), "When a subscription without consumers is deleted.", "-t 7d",
       rest=PolicyRestNames("subscriptionExpirationTime", "", "subscription_expiration_time_minutes", unit=60)),
    PolicyDefinition("compaction-threshold", (
        Field("compaction_threshold_bytes", "bytes", ("-t", "--threshold"), "Uncompacted bytes: 100M; 0: by hand."),
    ), "When a topic is compacted by itself.", "-t 100M",
       rest=PolicyRestNames("compactionThreshold", "compactionThreshold", "compaction_threshold", verb="PUT")),
    PolicyDefinition("persistence", (
        Field("ensemble_size", "limit", ("-e", "--ensemble", "--bookkeeper-ensemble"), "Bookies of a ledger."),
        Field("write_quorum", "limit", ("-w", "--write-quorum", "--bookkeeper-write-quorum"), "Copies of an entry."),
        Field("ack_quorum", "limit", ("-a", "--ack-quorum", "--bookkeeper-ack-quorum"), "Synced before the ack."),
    ), "How many bookies and copies a ledger has.", "-e 3 -w 3 -a 2",
       note="; it holds from each topic's next ledger on; 'magnetar topics unload TOPIC' begins one now",
       rest=PolicyRestNames("persistence", "persistence", "persistence")),
    PolicyDefinition("dead-letter-policy", (
        Field("dead_letter_max_redeliver_count", "limit", ("-c", "--max-redeliver-count"), "0: no dead letters."),
        Field("dead_letter_topic", "text", ("-t", "--dead-letter-topic"), "Default: TOPIC-SUBSCRIPTION-DLQ."),
        Field("dead_letter_backoff_s", "ladder", ("-b", "--backoff"), "Waits, as 1s,10s,1m; or: rocketmq (16 steps)."),
    ), "When the server moves a message away.", "-c 16 -b rocketmq"),
    PolicyDefinition("subscription-types-enabled", (
        Field("subscription_types", "names", ("-t", "--types"), f"Of {', '.join(PULSAR_TYPE_NAMES)}."),
    ), "Which types consumers may ask for.", "-t Exclusive,Failover", rest=PolicyRestNames(
        "subscriptionTypesEnabled", "subscriptionTypesEnabled", "subscription_types_enabled"
    )),
    PolicyDefinition("schema-compatibility-strategy", (
        Field("schema_compatibility", COMPATIBILITIES, ("-c", "--compatibility"), "With those of the topic."),
    ), "What a new schema has to be.", "-c full_transitive", rest=PolicyRestNames(
        "schemaCompatibilityStrategy", "schemaCompatibilityStrategy", "schema_compatibility_strategy", verb="PUT",
        topic_verb="PUT",
    )),
    PolicyDefinition("schema-validation-enforce", (
        Field("schema_validation_enforced", "on/off", (), "No producer without a schema where there is one."),
    ), "Whether producers need the schema.", "--enable",
       rest=PolicyRestNames("schemaValidationEnforced", "schemaValidationEnforced", "schema_validation_enforced")),
    PolicyDefinition("is-allow-auto-update-schema", (
        Field("schema_auto_update", "on/off", (), "A producer's new schema is registered."),
    ), "Whether producers register schemas.", "--disable",
       rest=PolicyRestNames("isAllowAutoUpdateSchema", "", "is_allow_auto_update_schema")),
    PolicyDefinition("broker-isolation", (
        Field("primary_broker_labels", "names", ("-p", "--primary"), "Labels of its brokers: tier=gold,zone=a."),
        Field("fallback_broker_labels", "names", ("-f", "--fallback"), "Labels of others, while those are too few; *."),
        Field("primary_brokers_min", "limit", ("-m", "--min-primaries"), "Primary brokers that are enough: 1, 2."),
    ), "Which brokers serve a namespace, by their labels.", "-p tier=gold -f tier=silver -m 2",
       note="; bundles at other brokers move within minutes", levels=(NAMESPACE_LEVEL,),
       rest=PolicyRestNames("brokerIsolation", "", "")),
    PolicyDefinition("bookie-affinity-group", (
        Field("primary_bookie_groups", "names", ("-pg", "--primary-group"), "Groups of its bookies: fast,big."),
        Field("secondary_bookie_groups", "names", ("-sg", "--secondary-group"), "Others, where those are too few."),
    ), "Which bookies hold a namespace's ledgers, by their groups.", "-pg fast -sg big",
       note="; it holds from each topic's next ledger on", levels=(NAMESPACE_LEVEL,),
       rest=PolicyRestNames("persistence/bookieAffinity", "", "")),
    PolicyDefinition("key-index", (
        Field("key_index", KEY_INDEXES, ("-i", "--index"), "Of what each sealed ledger has an index."),
    ), "What 'topics find' finds without reading everything.", "-i keys+properties",
       rest=PolicyRestNames("keyIndex", "keyIndex", "key_index")),
    PolicyDefinition("durability", (
        Field("durability", DURABILITIES, ("-d", "--durability"), "When bookies answer: after their sync, or before."),
    ), "Whether a crash of all bookies may lose the newest messages.", "-d memory",
       rest=PolicyRestNames("durability", "durability", "durability")),
)  # fmt: skip


BACKOFF_STEPS_MAX = 100
"""The largest number of steps of a back-off ladder (the waits before the 1st, 2nd, … redelivery). RocketMQ's preset has
16."""


POLICY_NAMES: tuple[str, ...] = Policies.__struct_fields__
LEVELS_BY_POLICY: dict[str, tuple[str, ...]] = {field.name: row.levels for row in POLICIES for field in row.fields}
"""The levels at which each policy can be set, besides that of all brokers."""
PROPERTIES_MAX, PROPERTIES_BYTES_MAX = 1000, 64 << 10
"""The largest number of properties of a namespace or a topic, and the largest size of all their names and values
together, in bytes."""
BROKER_ISOLATION_FIELDS = ("primary_broker_labels", "fallback_broker_labels", "primary_brokers_min")
BOOKIE_AFFINITY_FIELDS = ("primary_bookie_groups", "secondary_bookie_groups")
ISOLATION_FIELDS = BROKER_ISOLATION_FIELDS + BOOKIE_AFFINITY_FIELDS
"""The fields that say which brokers serve a namespace, and which bookies hold its ledgers."""
BACKLOG_QUOTA_FIELDS = ("backlog_quota_bytes", "backlog_quota_s")
RETENTION_FIELD_PAIRS = (("retention_minutes", "retention_mib"), ("unsubscribed_minutes", "unsubscribed_mib"))
"""The pairs of fields, a time and a size, that must be set together."""
_SIGNED = {name for pair in RETENTION_FIELD_PAIRS for name in pair}
_INT_MAX = 1 << 62


def encode_policies(policies: Policies) -> str:
    """Returns the policies as JSON, with only the fields that are set."""
    return msgspec.json.encode(policies).decode()


class _Earlier(Policies, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """The policies as earlier versions wrote them, with the size of the backlog quota in MiB."""

    backlog_quota_mib: int | None = None


def decode_policies(text: str) -> Policies:
    """Decodes the policies of one level from JSON; "" has no policies. Converts the backlog quota in MiB of earlier
    versions to bytes. Raises InvalidRequest if the text is not valid."""
    try:
        if '"backlog_quota_mib"' not in text:
            return msgspec.json.decode(text or "{}", type=Policies)
        earlier = msgspec.json.decode(text, type=_Earlier)
        size = earlier.backlog_quota_bytes
        if size is None and earlier.backlog_quota_mib is not None:
            size = earlier.backlog_quota_mib << 20
        return Policies(**{name: getattr(earlier, name) for name in POLICY_NAMES} | {"backlog_quota_bytes": size})
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"these are no policies: {error}") from error


def check_level(policies: Policies, level: str) -> Policies:
    """Returns the policies unchanged. Raises InvalidRequest if one of them cannot be set at this level (TENANT_LEVEL,
    NAMESPACE_LEVEL or TOPIC_LEVEL)."""
    for name, levels in LEVELS_BY_POLICY.items():
        if level not in levels and getattr(policies, name) is not None:
            where, what = (each.removesuffix("s") for each in (levels[0], level))
            raise InvalidRequest(f"{name} is a policy of a {where}, and no {what} has one", setting=name)
    return policies


RESOURCE_GROUP_FIELDS = (
    "namespace_publish_rate_messages", "namespace_publish_rate_bytes", "namespace_dispatch_rate_messages",
    "namespace_dispatch_rate_bytes",
)  # fmt: skip
"""The fields that the record of a resource group has: what they say of a namespace holds for all namespaces of the
group together."""


def merge_policies(below: Policies, above: Policies) -> Policies:
    """Returns the policies with the fields that `above` sets, and the other fields of `below`."""
    given = {name: value for name in POLICY_NAMES if (value := getattr(above, name)) is not None}
    return msgspec.structs.replace(below, **given)


def complete_retention_pairs(policies: Policies) -> Policies:
    """Returns a copy of the policies in which time and size of each retention are both set, or neither. If only one of
    them is set and is not 0, the other becomes unlimited; if it is 0, the other becomes 0."""
    found = policies
    for pair in RETENTION_FIELD_PAIRS:
        minutes, mib = (getattr(policies, name) for name in pair)
        if (minutes is None) != (mib is None):
            other = -1 if minutes or mib else 0
            given = (other if value is None else value for value in (minutes, mib))
            found = msgspec.structs.replace(found, **dict(zip(pair, given, strict=True)))
    return found


def remove_policies(policies: Policies, *names: str) -> Policies:
    """Returns a copy of the policies in which the fields `names` are not set, so that they are inherited. If `names`
    contains a backlog quota and none is left, `backlog_quota_policy` is not set in the copy either."""
    left = msgspec.structs.replace(policies, **dict.fromkeys(names))
    if not {*BACKLOG_QUOTA_FIELDS} & {*names} or any(getattr(left, name) is not None for name in BACKLOG_QUOTA_FIELDS):
        return left
    return msgspec.structs.replace(left, backlog_quota_policy=None)


def check_properties(properties: dict[str, str]) -> dict[str, str]:
    """Returns the properties unchanged. Raises InvalidRequest if a name is empty, or if they are too many or too large
    together."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in properties.items())
    if "" in properties:
        raise InvalidRequest("a property has a key: KEY=VALUE")
    if len(properties) > PROPERTIES_MAX or size > PROPERTIES_BYTES_MAX:
        text = f"{len(properties)} properties of {size} bytes are too many: at most {PROPERTIES_MAX} are kept"
        raise InvalidRequest(f"{text}, of {PROPERTIES_BYTES_MAX} bytes together")
    return properties


ANY_BROKER = "*"
"""In place of fallback labels: each broker."""
LABELS_MAX = 16
"""The largest number of labels of a broker, and of those that a policy asks for."""
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL = re.compile(r"[A-Za-z0-9._/-]{1,64}=[A-Za-z0-9._/-]{1,64}")


def parse_labels(text: str) -> tuple[str, ...]:
    """Returns the labels in a text such as "tier=gold,zone=a", sorted. They are not checked."""
    return tuple(sorted(label for each in text.split(",") if (label := each.strip())))


def check_labels(labels: Sequence[str], setting: str) -> None:
    """Raises InvalidRequest unless each label is NAME=VALUE, each name is there once, and they are at most LABELS_MAX.
    `setting`: what has the labels, for the error."""
    for each in labels:
        if not _LABEL.fullmatch(each):
            raise InvalidRequest(
                f"a label is NAME=VALUE, of letters, digits and . _ / -, at most 64 each, not {each[:200]!r}",
                setting=setting,
            )
    names = {each.partition("=")[0] for each in labels}
    if len(names) < len(labels) or len(labels) > LABELS_MAX:
        raise InvalidRequest(f"{setting} has each name once, and at most {LABELS_MAX} labels", setting=setting)


def check_bookie_groups(groups: Sequence[str], setting: str) -> None:
    """Raises InvalidRequest unless each group has a name of letters, digits and . _ -, no group is there twice, and
    they are at most LABELS_MAX. `setting`: what has the groups, for the error."""
    for each in groups:
        if not _GROUP.fullmatch(each):
            raise InvalidRequest(
                f"a group of bookies is a name of letters, digits and . _ -, at most 64, not {each[:200]!r}",
                setting=setting,
            )
    if len(set(groups)) < len(groups) or len(groups) > LABELS_MAX:
        raise InvalidRequest(f"each group is named once, and at most {LABELS_MAX} are", setting=setting)


def _check_isolation(policies: Policies) -> None:
    primary, fallback = policies.primary_broker_labels or (), policies.fallback_broker_labels or ()
    check_labels(primary, "primary_broker_labels")
    if fallback != (ANY_BROKER,):
        check_labels(fallback, "fallback_broker_labels")
    if fallback and not primary:
        raise InvalidRequest(
            "fallback_broker_labels needs primary_broker_labels: without them any broker serves the namespace",
            setting="fallback_broker_labels",
        )
    groups, others = policies.primary_bookie_groups or (), policies.secondary_bookie_groups or ()
    check_bookie_groups((*groups, *others), "primary_bookie_groups")
    if others and not groups:
        raise InvalidRequest(
            "secondary_bookie_groups needs primary_bookie_groups: without them any bookie holds the ledgers",
            setting="secondary_bookie_groups",
        )
    if policies.primary_brokers_min == 0:
        raise InvalidRequest("primary_brokers_min is 1 or more", setting="primary_brokers_min")


def check_policies(policies: Policies) -> Policies:
    """Returns the policies unchanged. Raises InvalidRequest if a field has an invalid value, or if fields contradict
    each other."""
    for name in POLICY_NAMES:
        value = getattr(policies, name)
        if isinstance(value, int) and not (-1 if name in _SIGNED else 0) <= value < _INT_MAX:
            least = "-1 (without limit), 0 (none)" if name in _SIGNED else "0 (none)"
            raise InvalidRequest(f"{name} is {least} or more, not {value}", setting=name)
    for pair in RETENTION_FIELD_PAIRS:
        minutes, mib = (getattr(policies, name) for name in pair)
        if (minutes is None) != (mib is None) or (minutes == 0) != (mib == 0):
            what = pair[0].removesuffix("_minutes")
            raise InvalidRequest(f"{what} needs both a time and a size (-1: without limit), or neither")
    quorums = (policies.ensemble_size, policies.write_quorum, policies.ack_quorum)
    given = [each for each in quorums if each is not None]
    if given:
        if len(given) < 3:
            raise InvalidRequest("give all of ensemble, write quorum and ack quorum: they belong together")
        ensemble, write, ack = given
        if not ensemble >= write >= ack >= 1:
            raise InvalidRequest(f"ensemble >= write quorum >= ack quorum >= 1 must hold, not {quorums}")
    if policies.subscription_types is not None and not policies.subscription_types:
        raise InvalidRequest("at least one subscription type must be allowed")
    ladder = policies.dead_letter_backoff_s or ()
    if len(ladder) > BACKOFF_STEPS_MAX or any(not 0 <= step <= 1e9 for step in ladder):
        raise InvalidRequest(
            f"a back-off ladder has at most {BACKOFF_STEPS_MAX} steps of 0 s or more each, not {ladder}"
        )
    _check_isolation(policies)
    if policies.subscribe_rate_period_s == 0:
        raise InvalidRequest("subscribe_rate_period_s is 1 or more", setting="subscribe_rate_period_s")
    if policies.durability == "memory" and policies.deduplication:
        raise InvalidRequest(
            "deduplication promises that a message is stored once, and with durability=memory a stored message may be "
            "lost: choose one of them", setting="durability",
        )  # fmt: skip
    if policies.max_message_bytes == 0:
        raise InvalidRequest("max_message_bytes is 1 or more; remove it to inherit it", setting="max_message_bytes")
    return policies
