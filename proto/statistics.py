"""What administration answers: statistics and settings as frozen values, the same for brokers, protocols and clients.

Each value has a message of proto/wire.proto with fields of the same names (proto/translation.py). A unit is a part of
the name unless it is "messages" or "entries": `_bytes`, `_ms` (since the epoch for a time of day), `_s`. Counters run
since the owner loaded the topic. Closed sets of values are in proto/states.py. Guarding tests:
tests/client/admin/test_grpc_transport.py, tests/broker/grpc/test_stats.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from .names import Position
from .schema import Compatibility, SchemaInfo
from .states import (
    BacklogQuotaState,
    Blocked,
    CompactionState,
    KeyDistribution,
    LedgerState,
    LedgerStays,
    SubscriptionType,
    TopicState,
    TxnId,
    TxnState,
)

__all__ = (
    "BacklogAnalysis", "BacklogQuotaState", "Balance", "BalanceStatus", "BalancedBroker", "Blocked", "BookieInfo",
    "BriefTopicStats",
    "BrokerInfo", "BrokerScore", "BrokerSummary", "BundleMove", "BundlePage", "BundleRow",
    "ClusterSummary", "CompactionState", "CompactionStatus", "ConnectedRole", "ConsumerStats", "CoordinatorHalves",
    "CoordinatorTransactions", "CursorBucket", "CursorGap", "CursorShape", "DiedBroker", "DrainingSlot", "FilterTrial",
    "ForgottenTransaction", "GrantedLimit",
    "HalfDecision", "HalfState", "HalfStats", "HeldKey", "KeptLedger", "KeyDistribution", "LedgerCopies", "LedgerState",
    "LedgerStats", "LedgerStays", "LostOfSubscription", "LostRange", "MeasuredBundle",
    "MeasuredLoad", "MetadataNode", "NamespaceInfo", "NamespaceStats",
    "NamespaceSums", "OrphanLedger", "Orphans", "PendingOfTransaction", "Permissions", "ProducerStats", "RefusedCaller",
    "ResourceGroup", "SchemaTest", "SecurityDescription", "SharedLimit", "SharedLimits", "SharesAnswer",
    "SinkOfTransaction", "SkippedLost", "SlotRange", "StoredBundleBytes", "StoredPlaceBytes",
    "SubscriptionFilterState",
    "SubscriptionStats", "SubscriptionType", "TenantInfo", "TopicInternalStats", "TopicOffsets", "TopicPage",
    "TopicRow", "TopicSchema", "TopicState", "TopicStats", "TopicTransactions", "TransactionHere", "TransactionStats",
    "Unloaded", "WantedLimit", "WhyKept", "WhyStuck",
)  # fmt: skip


class _LazyFields:
    """Makes the fields of a value known to the functions of `dataclasses` when they are first asked for."""

    def __get__(self, _: object, kind: type[msgspec.Struct]) -> Mapping[str, dataclasses.Field[object]]:
        return _make_fields(kind)


@functools.cache
def _make_fields(kind: type[msgspec.Struct]) -> Mapping[str, dataclasses.Field[object]]:
    """Makes the fields of a class once: that takes as long as hundreds of values."""
    made: Any = dataclasses.make_dataclass(
        kind.__name__, [(each.name, each.type, _field_of(each)) for each in msgspec.structs.fields(kind)]
    )
    fields: Mapping[str, dataclasses.Field[object]] = made.__dataclass_fields__
    return fields


def _field_of(each: msgspec.structs.FieldInfo) -> object:
    return dataclasses.field() if each.required else dataclasses.field(default=each.default)


class Value(msgspec.Struct, frozen=True):
    """Base of all values of this module: frozen, with the fields of its class. `dataclasses.asdict`, `fields` and
    `replace` accept it like a dataclass. A struct is used because its class is made in a third of the time, and each
    command makes sixty of them when it starts."""

    __dataclass_fields__ = _LazyFields()



# ------------------------------------------------------------------------------------ tenants and namespaces
class TenantInfo(Value, frozen=True):
    """A tenant and its settings."""

    name: str
    admin_roles: tuple[str, ...] = ()  # may do everything in the tenant
    allowed_clusters: tuple[str, ...] = ()  # where it may have namespaces; none: everywhere


class Permissions(Value, frozen=True):
    """The permissions that roles have on a namespace or on a topic. For a topic only `roles` is set."""

    roles: Mapping[str, tuple[str, ...]]  # role → actions, such as "produce", "consume"
    subscriptions: Mapping[str, tuple[str, ...]]  # name → the only roles that may use it
    prefix_mode: bool  # names of subscriptions begin with their role


class NamespaceInfo(Value, frozen=True):
    """A namespace and its settings: how its topics are created, and into how many bundles they are divided."""

    name: str  # tenant/namespace
    bundles: int = 0  # hash ranges that brokers own; at creation 0: the broker's default
    auto_topic_creation: bool = True  # topics are made at first use
    default_partitions: int = 0  # of topics that are made so; 0: not partitioned
    is_creation_set: bool = False  # the two before were set, perhaps to their defaults


class Unloaded(Value, frozen=True):
    """The result of an unload: how many topics and bundles brokers have unloaded."""

    topics: int
    bundles: int


class SplitBundles(Value, frozen=True):
    """The result of a split: how many bundles the namespace has."""

    namespace: str
    bundles: int


class BundleRow(Value, frozen=True):
    """A bundle that a broker owns, with its loaded topics and its traffic. Rates are per second: of messages (`rate_…`)
    and of bytes (`throughput_…`)."""

    namespace: str
    bundle: str  # as 0x00000000_0x08000000
    broker: str  # the owner's name
    endpoint: str  # HOST:PORT
    topics: int  # that are loaded
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float


class BundlePage(Value, frozen=True):
    """The bundles that brokers own. `silent`: the brokers that did not answer, or are of an older release."""

    bundles: tuple[BundleRow, ...]
    silent: tuple[str, ...]


class BundleMove(Value, frozen=True):
    """A bundle that a balance moves. `load`: its messages and KiB per second, in and out, plus a tenth for each topic.
    """

    namespace: str
    bundle: str
    source: str  # the name of the broker that has it
    target: str  # … of the one that gets it
    load: float


class BalancedBroker(Value, frozen=True):
    """A broker that takes part in a balance: the load of its bundles before the moves, and after them."""

    broker: str
    before: float
    after: float


class Balance(Value, frozen=True):
    """The result of a balance: the bundles that moved (or would), and the loads of the brokers."""

    moves: tuple[BundleMove, ...]
    brokers: tuple[BalancedBroker, ...]


class MeasuredBundle(Value, frozen=True):
    """A bundle as its owner measures it for the balance."""

    path: str  # of its owner record
    load: float  # messages and KiB per second, in and out, plus a tenth for each topic
    topics: int  # that are loaded
    sessions: int  # producers and consumers
    owned_s: float  # seconds since the broker took it
    misplaced: bool = False  # its namespace does not let this broker own it


class CrowdedBundleRow(Value, frozen=True):
    """A bundle that carries more than it may. `hot_topic`: the topic to which most of that is due, so that a split does
    not help; "" if there is none."""

    path: str  # of its owner record
    why: str
    hot_topic: str = ""


class MeasuredLoad(Value, frozen=True):
    """The load of the broker that is asked. `bundles`: the misplaced ones, then the heaviest ones."""

    score: float  # 100 is all that the broker can do
    load: float  # of all its bundles
    window_s: float  # the measurement began so long ago
    bundles: tuple[MeasuredBundle, ...]
    crowded: tuple[CrowdedBundleRow, ...] = ()


class WantedLimit(Value, frozen=True):
    """What a broker reports of a limit that holds in sum over brokers. Both numbers are parts of the limit, 0 to 1."""

    limit: str  # what it is of
    wanted: float
    held: float  # what it may use until it has the answer


class GrantedLimit(Value, frozen=True):
    """What the leader answers a broker of a limit that holds in sum over brokers. Numbers are parts of the limit."""

    limit: str
    share: float  # that the broker may use
    wanted: float  # by all brokers together
    brokers: int  # that want a part


class ResourceGroup(Value, frozen=True):
    """A resource group: rates that all its namespaces share, in sum over brokers. 0: no limit."""

    name: str
    publish_rate_messages: int  # per second, as the others
    publish_rate_bytes: int
    dispatch_rate_messages: int
    dispatch_rate_bytes: int


RESOURCE_GROUP_RATES = (
    "publish_rate_messages", "publish_rate_bytes", "dispatch_rate_messages", "dispatch_rate_bytes",
)  # fmt: skip
"""The rates of a resource group, in the order of its fields."""


class StoredBundleBytes(Value, frozen=True):
    """What a broker reports of one of its bundles in a namespace with a limit of stored bytes."""

    namespace: str  # tenant/namespace
    bundle: str
    bytes: int  # that its topics store


class StoredPlaceBytes(Value, frozen=True):
    """What the leader answers of a namespace or a tenant with a limit of stored bytes."""

    place: str  # tenant, or tenant/namespace
    bytes: int  # that all of its topics store
    complete: bool  # nothing is missing in them


class SharesAnswer(Value, frozen=True):
    """What the leader answers to a report of a broker about limits in sum over brokers."""

    shares: tuple[GrantedLimit, ...]
    stored: tuple[StoredPlaceBytes, ...] = ()


class SharedLimit(Value, frozen=True):
    """A limit that holds in sum over brokers, at one broker. `share`, `used` and `wanted` are parts of the limit."""

    place: str  # tenant, or tenant/namespace
    policy: str  # the field of the policies
    limit: int  # messages or bytes a second, of all brokers; of stored bytes: in all
    broker: str
    share: float  # that this broker may use; of stored bytes: that it uses, and what is left
    used: float  # by this broker, until its last report
    wanted: float  # by all brokers together; of stored bytes: that all store; 0: not known
    brokers: int  # that want a part; 0: not known
    throttled: int  # how often something waited at this broker
    why: str  # why the broker has this share


class SharedLimits(Value, frozen=True):
    """The limits that hold in sum over brokers, at each broker with topics that they bound. `silent`: brokers that do
    not answer, or are of an older release."""

    limits: tuple[SharedLimit, ...]
    silent: tuple[str, ...]


class BrokerScore(Value, frozen=True):
    """A broker as the one that balances sees it."""

    broker: str
    score: float  # the slow average; 100 is all that the broker can do
    moving: int  # bundles that are on their way from it or to it


class HotTopic(Value, frozen=True):
    """A topic that makes its bundle crowded by itself. `advice`: what helps."""

    topic: str
    why: str
    advice: str


class BalanceStatus(Value, frozen=True):
    """What the automatic balance does. `leader`: the broker that balances, which counts `moves` and `failed` since it
    does; "" if none has been elected. The load of a bundle in `moving` is in points of its source's score."""

    is_on: bool
    leader: str
    moves: int
    failed: int
    brokers: tuple[BrokerScore, ...]
    moving: tuple[BundleMove, ...]
    splits: int = 0  # of namespaces, since it balances
    hot_topics: tuple[HotTopic, ...] = ()


# ------------------------------------------------------------------------------------ topics
class ProducerStats(Value, frozen=True):
    """The statistics of a connected producer. `last_sequence_id` is -1 if the producer has published nothing."""

    name: str
    address: str
    messages: int
    bytes: int
    last_sequence_id: int
    role: str = ""  # under which it is connected; empty: without security
    connected_ms: int = 0  # since when, ms since the epoch; 0: the broker is older and does not say
    acks: str = ""  # what its program waits for: quorum, one or none; empty: the broker is older, it is quorum


class SlotRange(Value, frozen=True):
    """A range of the slots 0 … 65535 to which Key_Shared maps keys. Both ends are included."""

    first: int
    last: int


class ConsumerStats(Value, frozen=True):
    """The statistics of a connected consumer."""

    name: str
    address: str
    permits: int  # messages that may be sent to it
    unacked: int  # messages
    delivered_messages: int
    delivered_bytes: int
    redelivered_messages: int
    blocked: bool  # it holds as many unacknowledged messages as it may
    priority_level: int
    slots: tuple[SlotRange, ...]  # Key_Shared: what it owns
    role: str = ""  # under which it is connected; empty: without security
    connected_ms: int = 0  # since when, ms since the epoch; 0: the broker is older and does not say
    acked_ms: int = 0  # its last acknowledgement; 0: none since it connected


class DrainingSlot(Value, frozen=True):
    """A slot of keys that will move to another consumer. It moves when the messages already delivered are acknowledged.
    `blocked_attempts`: how many entries of the slot came meanwhile and wait."""

    slot: int
    unacked_entries: int
    blocked_attempts: int


class HeldKey(Value, frozen=True):
    """A slot of keys of a Key_Shared subscription in which entries wait for the oldest outstanding one to be
    acknowledged."""

    slot: int
    key: str  # of the oldest one; empty: the entry has none of its own, or is not in the broker's memory
    consumer: str  # that has it
    address: str
    since_ms: int  # ms since the epoch: when the broker first saw it as the oldest one; a look every 10 s
    following_entries: int  # of the slot: at the same consumer after it, or not delivered yet


class SubscriptionStats(Value, frozen=True):
    """The statistics of a subscription at one partition."""

    name: str
    type: SubscriptionType
    durable: bool
    backlog: int
    """The number of messages that are not acknowledged. It is exact if `precise` statistics were asked for. Otherwise
    an acknowledged batch after `mark_delete` counts as one message less."""
    backlog_bytes: int
    """Approximate size of everything that is stored after `mark_delete`, including what is acknowledged there or was
    aborted. The backlog quota bounds it."""
    oldest_ms: int  # when the oldest message of the backlog was published; 0: none, or its bookies did not say soon
    unacked: int  # messages that are delivered and not acknowledged
    mark_delete: Position  # everything up to it is acknowledged
    read_position: Position  # what is delivered next
    acked_ranges: int  # acknowledged after mark_delete
    consumers: tuple[ConsumerStats, ...]
    active_consumer: str  # Exclusive and Failover: its name
    blocked: Blocked
    blocked_on_unacked: bool
    dispatch_throttled: int  # times
    replay_entries: int  # entries that are delivered before any new one
    key_shared_mode: KeyDistribution
    allow_out_of_order_delivery: bool
    draining: tuple[DrainingSlot, ...]
    drained_total: int  # slots
    delayed: int  # messages in the backlog whose time has not come
    delayed_buckets: int  # of the delay index, on disk
    delayed_memory_bytes: int
    pending_transactions: int  # open ones that have acknowledged something
    pending_entries: int  # acknowledged in them; a cumulative acknowledgement counts as one
    held_keys: tuple[HeldKey, ...] = ()  # Key_Shared: those held longest, at most ten
    filter: str = ""  # by which the broker filters; empty: it does not
    judged: int = 0  # messages, since the filter was set or the topic was loaded
    filtered: int = 0  # messages of them that are not wanted, and acknowledged
    filtered_entries: int = 0  # entries in which nothing is wanted
    shown_unwanted: int = 0  # messages that are not wanted and not hidden: a consumer does not acknowledge by index
    filtered_unread: int = 0  # messages of `filtered` that were not looked at, by a summary or a key index
    expired: int = 0  # messages that were acknowledged because their own time had passed, since it was loaded


class TopicTransactions(Value, frozen=True):
    """The transactions of a topic that has had at least one. `last_stable`: consumers of committed messages receive no
    message after this position."""

    last_stable: Position
    stable_index: int  # one past its last message
    open: int
    oldest: TxnId | None  # of the open ones, by its first entry
    oldest_ms: int  # its age
    aborted_entries: int  # that are kept
    aborted_bytes: int
    committed: int  # transactions that ended there since the topic was loaded
    aborted: int


class NamespaceStats(Value, frozen=True):
    """One page of a broker's statistics for a namespace."""

    topics: tuple[TopicStats, ...]
    next: str  # the next page follows it; empty: there is none
    here: str  # HOST:PORT of the broker that answered
    brokers: tuple[str, ...]  # of all of them
    brief_topics: tuple[BriefTopicStats, ...]  # in place of `topics`, if the request is brief


class BriefTopicStats(Value, frozen=True):
    """The statistics that a list of topics shows of a topic without partitions, or of one partition: a part of
    TopicStats. Rates are per second: of messages (`rate_…`) and of bytes (`throughput_…`)."""

    name: str
    messages_in: int
    messages_out: int
    storage_bytes: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    backlogs: dict[str, int]  # by subscription


class TopicStats(Value, frozen=True):
    """The statistics of a topic without partitions, or of one partition. Rates are averages of the last minute, in
    messages or bytes per second."""

    name: str
    owner: str  # HOST:PORT of its broker
    partitions: int
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    storage_bytes: int
    earliest_index: int  # of the oldest message that is kept
    end_index: int  # one past the newest
    producers: tuple[ProducerStats, ...]
    subscriptions: tuple[SubscriptionStats, ...]
    dropped: int  # messages of a non-persistent topic without a consumer that was ready
    quota: BacklogQuotaState
    expired_entries: int  # by age
    evicted_entries: int  # by the backlog quota
    publish_throttled: int  # times
    terminated: bool
    created_ms: int  # 0: not known
    published_ms: int  # the last publish since the topic was loaded; 0: none
    unsubscribed: str  # how long messages are kept without a durable subscription; empty: there is one, or none are
    transactions: TopicTransactions | None  # None: it has seen none
    key_index: str = "off"  # the policy: what sealed ledgers get an index of
    unindexed_ledgers: int = 0  # sealed ledgers that have no such index (yet); 0 if the policy is off
    durability: str = "disk"  # the policy: memory: a crash of all bookies may lose the newest messages


class LedgerStats(Value, frozen=True):
    """The statistics of one ledger of a topic's log."""

    ledger_id: int
    state: LedgerState
    entries: int
    bytes: int
    first_index: int  # of its first message
    bookies: tuple[str, ...]  # of its last ensemble
    stays: LedgerStays
    key_index: str = ""  # what its index has: keys, keys+properties; empty: there is none


class TopicInternalStats(Value, frozen=True):
    """The statistics of the log of a topic (of one partition). `replication` is "E/Qw/Qa", the ensemble size, write
    quorum and ack quorum of the ledger that is being written."""

    state: TopicState
    ledgers: tuple[LedgerStats, ...]
    last_confirmed: Position
    cache_bytes: int  # of the whole broker
    pending_adds: int  # entries that are not confirmed yet
    replication: str
    wanted_replication: str
    degraded: bool  # the two differ: there are too few bookies


class TopicOffsets(Value, frozen=True):
    """The range of message indexes in one partition: `earliest_index` is the index of the first stored message,
    `end_index` is one more than the index of the last message."""

    earliest_index: int
    end_index: int
    bytes: int  # stored between the two
    by_time: tuple[int, ...] = ()  # per time asked for: first index published then or later, `end_index` when none
    subscription_index: int = -1  # first that the subscription has not acknowledged; -1: none asked for
    aborted: int = 0  # of the range that was asked for: messages of aborted transactions, which no reader is shown
    incarnation: int = 0  # ms since the epoch, when the topic was made: one that is made anew has another. 0: not known


class CompactionStatus(Value, frozen=True):
    """The status of the last compaction of a topic (of one partition), and the compacted ledger from which readers read
    now. `to_look_at`: the estimate of `looked_at` at the end. `rounds`: how often the log was read to find the messages
    that stay."""

    state: CompactionState
    step: str  # where it is, or where it failed
    error: str
    looked_at: int  # messages, in both passes
    to_look_at: int
    rounds: int
    ledger_id: int  # that is read now; -1: none, and the next six are 0
    horizon: Position  # last entry that is compacted
    messages: int
    entries: int
    bytes: int
    end_index: int
    compacted_ms: int
    due_bytes: int  # published since


class LostRange(Value, frozen=True):
    """A range of entries of a partition that every replica has lost, and that readers skip."""

    ledger_id: int
    first_entry: int
    last_entry: int  # -1: to an end that is not known
    first_index: int
    end_index: int  # no message gets an index before it any more
    forced: bool  # a replica did not answer, and may have had some


class LostOfSubscription(Value, frozen=True):
    """How many lost messages a durable subscription had not acknowledged, and will not receive."""

    name: str
    messages: int  # that it had not acknowledged; -1: it is not known how many


class ForgottenTransaction(Value, frozen=True):
    """A transaction at a topic whose outcome is lost: the topic lost it, and the coordinator has forgotten it. Its
    entries, and all later ones, are held back until an operator decides (`skip_lost` with `forgotten`)."""

    txn: TxnId
    first: Position  # its first entry
    entries: int
    bytes: int


class SkippedLost(Value, frozen=True):
    """The result of `skip_lost`: the ranges of lost entries that readers skip now, and the durable subscriptions
    concerned. No ranges: no entry is lost. `forgotten`: the transactions whose outcomes are lost; with a decision,
    those that it ended."""

    ranges: tuple[LostRange, ...]
    subscriptions: tuple[LostOfSubscription, ...]
    forgotten: tuple[ForgottenTransaction, ...] = ()


class BacklogAnalysis(Value, frozen=True):
    """The backlog of a subscription at one partition, counted message by message."""

    entries: int
    messages: int
    acknowledged: int  # messages among these entries that are acknowledged
    bytes: int
    complete: bool  # False: it was too long to be read to its end
    unwanted_entries: int = 0  # of these entries: those in which the subscription's filter wants nothing
    unwanted_messages: int = 0  # of these messages: those that it does not want


class SubscriptionFilterState(Value, frozen=True):
    """The filter of a subscription at one partition, and its counters there. The fields are those of SubscriptionStats
    with these names."""

    filter: str
    judged: int
    filtered: int
    filtered_entries: int
    shown_unwanted: int
    filtered_unread: int = 0


class FilterTrial(Value, frozen=True):
    """What a filter does with the newest messages of one partition. A mixed entry has messages that are wanted and
    others: a consumer that does not acknowledge by index gets all of them."""

    messages: int  # that were judged
    wanted: int  # of them
    entries: int
    unwanted_entries: int
    mixed_entries: int
    unread: int  # messages of encrypted batches, which a broker cannot read: they count as wanted


class MessageState(Value, frozen=True):
    """The one state that a message has in a subscription: acknowledged, filtered (acknowledged, because the
    subscription's filter does not want it, or because it was sent back for another subscription alone), pending,
    delivered, held back, delayed, waiting or redelivery."""

    subscription: str
    state: str
    detail: str  # a sentence


class MessageTrace(Value, frozen=True):
    """What has become of a message: whether the topic has it, and its state in each subscription. If the topic does not
    have the message, `subscriptions` is empty."""

    stored: str  # a sentence
    subscriptions: tuple[MessageState, ...]


class CancelledMessage(Value, frozen=True):
    """A delayed message that was cancelled. `cancelled`: the subscriptions for which it was still delayed, and is
    acknowledged now; `acknowledged`: those for which it was acknowledged before, as by an earlier request."""

    cancelled: tuple[str, ...]
    acknowledged: tuple[str, ...]


class ScheduleStats(Value, frozen=True):
    """A schedule of a topic, and the history of its fires. Exactly one of `cron`, `every_ms` and `at_ms` is set. Times
    are in ms since the epoch; 0: there is none."""

    name: str
    cron: str
    every_ms: int
    at_ms: int
    zone: str
    payload: bytes
    key: str  # empty: none
    properties: dict[str, str]
    missed: str  # what happens to missed fires: skip, last or all
    status: str  # waits, paused, done; or why it cannot fire
    paused: bool
    created_ms: int
    next_ms: int
    last_ms: int  # the last fire
    fired: int  # messages
    dropped: int  # missed fires that were not made up for


class FoundEntry(Value, frozen=True):
    """A stored entry with messages that a search has found. `acked_batch_indexes`: the batch indexes of its messages
    that the search has not found. `acknowledged`: the batch indexes of messages that the subscription of the request
    has acknowledged."""

    ledger_id: int
    entry_id: int
    entry: bytes
    acked_batch_indexes: tuple[int, ...]
    acknowledged: tuple[int, ...] = ()


class FoundMessages(Value, frozen=True):
    """The answer of one search in a partition: the found entries, the newest first, and how far the search got.
    `before_index`: the index below which the next search must continue; 0: the search has looked at all messages.
    `why`: the reason why the search stopped before that."""

    entries: tuple[FoundEntry, ...]
    before_index: int
    messages: int  # that were looked at
    bytes: int
    unread: int  # messages that it could not look into: encrypted, chunks, damaged or too large
    why: str
    waiting: int  # messages after the begin of an open transaction: no consumer gets them before that ends
    skipped: int = 0  # messages that key indexes passed over; they were not read
    ledgers: int = 0  # that it came to; 0: no key index could help
    unindexed_ledgers: int = 0  # of these: sealed, and without a key index, so all of it was looked at
    tells_acknowledged: bool = False  # the entries say what the subscription of the request has acknowledged


# ------------------------------------------------------------------------------------ schemas
class TopicSchema(Value, frozen=True):
    """A version of a topic's schema. `deleted`: it is only used to decode messages that were written with it."""

    version: int
    schema: SchemaInfo
    created_ms: int
    user: str  # the role that registered it
    deleted: bool = False


class SchemaTest(Value, frozen=True):
    """The result of a test whether a schema could be registered. `refused`: the reason why not; empty: it could.
    `compatibility`: the rule that was applied."""

    refused: str
    compatibility: Compatibility


# ------------------------------------------------------------------------------------ the cluster
class BrokerInfo(Value, frozen=True):
    """A registered broker. `topics`: how many topics it has loaded. `bundles`: how many bundles and transaction
    coordinators it owns. None: the broker did not answer."""

    name: str
    endpoint: str  # HOST:PORT
    topics: int | None = None
    bundles: int | None = None
    draining: bool = False  # it gets no bundles, and gives away what it owns
    labels: tuple[str, ...] = ()  # NAME=VALUE: by these namespaces choose their brokers


class TopicRow(Value, frozen=True):
    """A loaded topic, as a row of a list of topics. Its backlog is approximate, because no entry is read for it. Rates
    are averages between the last two times at which its broker counted all topics."""

    name: str
    owner: str  # HOST:PORT of its broker
    rate_in: float  # messages a second
    rate_out: float
    throughput_in: float  # bytes a second
    throughput_out: float
    storage_bytes: int
    backlog: int  # messages that its durable subscriptions have not acknowledged, together
    oldest_ms: int  # when the oldest of them arrived; 0: there is none, or it is not known yet
    producers: int
    consumers: int
    subscriptions: int  # durable ones
    slowest: str = ""  # the durable subscription with the largest backlog; empty: none has one
    slowest_backlog: int = 0


class NamespaceSums(Value, frozen=True):
    """The totals of a namespace's loaded topics at one broker. An empty `name`: the totals of all namespaces."""

    name: str
    topics: int
    subscriptions: int  # durable ones
    producers: int
    consumers: int
    rate_in: float  # messages a second
    rate_out: float
    throughput_in: float  # bytes a second
    throughput_out: float
    storage_bytes: int
    backlog: int  # messages, about
    in_memory: int = 0  # topics with durability=memory


class BrokerSummary(Value, frozen=True):
    """A broker with its totals, and its topics with the most traffic, with the largest backlog, and with the oldest
    message (at most 50 of each). If `since_ms` is 0, the broker is of an older release, and only `name`, `endpoint` and
    `version` are known (an empty version is not known either)."""

    name: str
    endpoint: str  # HOST:PORT
    version: str
    since_ms: int  # since the epoch: when it was started
    loop_busy: float  # share of the time for which its event loop computes; -1: not known
    connections: int  # of all ports of the process
    degraded: int  # topics whose ledger has fewer copies than asked for
    total: NamespaceSums
    namespaces: tuple[NamespaceSums, ...]
    by_traffic: tuple[TopicRow, ...]
    by_backlog: tuple[TopicRow, ...]
    by_age: tuple[TopicRow, ...]
    token_ends_ms: int = 0  # since the epoch: the end of its own token; 0: it has none, or no end
    full: tuple[str, ...] = ()  # at most 50 topics that take no publishes, because of their backlog quota
    certificate_ends_ms: int = 0  # since the epoch: of the first certificate that it shows to others; 0: it has none
    draining: bool = False  # it gives away what it owns, and gets nothing
    balances: bool = False  # it is the leader that balances the load of brokers, and the balance is on
    hot_topics: tuple[str, ...] = ()  # at most 50 topics that are too busy for their bundles, if it is that leader


class DiedBroker(Value, frozen=True):
    """A broker that is not registered and has not closed in order: it has died, or does not reach the metadata."""

    name: str
    endpoint: str  # HOST:PORT
    seen_ms: int  # since the epoch: when it was known to be registered last


class ClusterSummary(Value, frozen=True):
    """The summaries of all brokers that answered, to the first request or to the second; `silent` names the others.
    While the metadata does not answer, the brokers and bookies are those that the answering broker has read last."""

    brokers: tuple[BrokerSummary, ...]
    silent: tuple[str, ...]
    bookies: tuple[BookieInfo, ...] = ()
    metadata_away_ms: int = 0  # since the epoch: when the metadata answered last; 0: it answers
    refusing: tuple[str, ...] = ()  # those of `silent` that refuse the own token or certificate of this one
    late: tuple[str, ...] = ()  # those of `brokers` that answered only when they were asked again
    metadata_late: bool = False  # it did not answer in time, but answered something in the last seconds
    died: tuple[DiedBroker, ...] = ()
    metadata_total_bytes: int = 0  # of the disk with the metadata; 0: not known
    metadata_free_bytes: int = 0
    metadata_certificate_ends_ms: int = 0  # of the metadata service; 0: it has none, or does not say
    metadata_backup_ms: int = 0  # since the epoch: when the last copy of it was made; 0: none was, or it is not known
    metadata_backup_every_ms: int = 0  # how often the service makes a copy by itself; 0: never
    metadata_backup_failure: str = ""  # why its last copy failed; "": it did not
    metadata_refusal: str = ""  # why the metadata refuses commits (etcd's alarm NOSPACE); "": it does not


class TopicPage(Value, frozen=True):
    """One page of the list of loaded topics of all brokers. `silent` names the brokers that did not answer within a
    second."""

    topics: tuple[TopicRow, ...]
    next: str  # the next page is `after` it; empty: there is none
    found: int  # loaded topics that fit, on all pages
    silent: tuple[str, ...]


class BrokerSetting(Value, frozen=True):
    """A setting of a broker and its value. `source` says where the value comes from: default, file, environment, option
    (or a share of `memory_bytes`), or dynamic (changed for all brokers while they run). `dynamic`: whether the setting
    can be changed in that way."""

    name: str
    value: str
    source: str
    dynamic: bool


class BrokerDescription(Value, frozen=True):
    """The facts that a broker reports about itself to an operator: its clock, its limit of open files, and its
    settings. If they were asked for, also where each of its tasks waits, and its metrics."""

    name: str
    version: str
    clock_ms: int  # when it answered
    open_files_max: int
    settings: tuple[BrokerSetting, ...]
    tasks: str
    metrics: str


class WhyStuck(Value, frozen=True):
    """Why a subscription of one partition makes no progress, in sentences: what it waits for, and what would end the
    wait. `stuck` is False if it makes progress, or has delivered everything."""

    stuck: bool
    blocked: Blocked
    sentences: tuple[str, ...]


class KeptLedger(Value, frozen=True):
    """A ledger of a topic, and the reason why it is kept. `subscriptions`: those that have not acknowledged all of its
    messages."""

    ledger_id: int
    bytes: int
    messages: int
    stays: LedgerStays
    subscriptions: tuple[str, ...]
    sentence: str


class WhyKept(Value, frozen=True):
    """The ledgers of one partition, the oldest first, each with the reason why it is kept."""

    ledgers: tuple[KeptLedger, ...]


class CursorBucket(Value, frozen=True):
    """Consecutive entries of a topic's log, and how many of them a subscription has acknowledged, has acknowledged in
    an open transaction, or will get later (delayed). `first_index` is approximate: it assumes that messages are spread
    evenly within a ledger."""

    first: Position
    first_index: int
    entries: int
    acknowledged: int  # entries, as a whole
    pending: int  # entries that are acknowledged in a transaction that is open
    delayed: int  # entries whose time has not come


class CursorGap(Value, frozen=True):
    """Consecutive entries of one ledger that are not acknowledged although a later entry is."""

    first: Position
    entries: int
    consumer: str  # that has the first one; empty: none has it
    published_ms: int  # when the first one arrived; 0: its bookies did not say soon


class CursorShape(Value, frozen=True):
    """Which entries after `mark_delete` a subscription of one partition has acknowledged: at most 1,000 buckets with
    about the same number of entries, and the ten largest gaps. `end`: the last entry of the log."""

    mark_delete: Position
    end: Position
    buckets: tuple[CursorBucket, ...]
    gaps: tuple[CursorGap, ...]


class LedgerCopies(Value, frozen=True):
    """A ledger of a topic, and the bookies that should have its copies. If the ledger is open, `entries` and `bytes`
    count only confirmed entries."""

    ledger_id: int
    state: LedgerState
    quorum: str  # "E/Qw/Qa": bookies, copies, copies that are synced before a confirmation
    entries: int
    bytes: int
    created_ms: int
    closed_ms: int  # 0: it is not
    bookies: tuple[str, ...]  # of all its fragments
    missing: dict[str, str]  # bookie: why copies of it are missing there (lost, departing, …), or "damaged"


class MetadataNode(Value, frozen=True):
    """A node of the metadata tree, and a page of the names below it. Keys and tokens in `record` are hidden."""

    path: str
    kind: str  # class of its record; empty: the path is only a folder
    version: int  # -1: the path is only a folder
    record: str  # JSON
    damage: str  # why the record cannot be read; empty: it can
    children: tuple[str, ...]
    next: str  # the next page is `after` it; empty: there is none


class ConnectedRole(Value, frozen=True):
    """A credential with which producers and consumers are connected to a broker, and its role."""

    role: str  # empty: without security
    kind: str  # client, member, local or anonymous
    method: str  # token, basic or tls
    credential_id: str  # of a token its `jti`, of a certificate its serial number
    expires_ms: int  # 0: never
    producers: int
    consumers: int


class RefusedCaller(Value, frozen=True):
    """A caller to whom a broker denied operations, and how often it did so in the last period of its audit log."""

    caller: str
    refusals: int


class SecurityDescription(Value, frozen=True):
    """The credentials with which clients are connected to the broker that was asked, and the callers to whom it denied
    operations, those with the most refusals first."""

    broker: str
    roles: tuple[ConnectedRole, ...]
    refused: tuple[RefusedCaller, ...]


class BookieInfo(Value, frozen=True):
    """A bookie, as its registration in the metadata describes it."""

    id: str  # UUID
    endpoint: str  # HOST:PORT
    read_only: bool
    rack: str
    free_bytes: int
    total_bytes: int
    group: str = ""  # by this namespaces choose their bookies


class OrphanLedger(Value, frozen=True):
    """A ledger that no topic and no cursor refers to any more. `subscription` is empty if it was a ledger of a
    topic."""

    ledger_id: int
    topic: str
    subscription: str
    created_ms: int
    deleted: bool  # just now, by this request
    unexplained: bool = False  # its owner has no record, or a younger one: only an operator deletes it


class Orphans(Value, frozen=True):
    """The result of a search for orphaned ledgers. `orphans`: the ledgers that no topic and no cursor refers to.
    `missing`: the ledgers that a topic refers to although they were deleted."""

    orphans: tuple[OrphanLedger, ...]
    missing: tuple[OrphanLedger, ...]


class SinkOfTransaction(Value, frozen=True):
    """The batch of a sink (the writer of a query) that a transaction writes. All fields are empty if there is none."""

    sink_id: str
    query_id: str
    batch: int
    run: str
    adopt: bool  # of a begin; here always False


class TransactionStats(Value, frozen=True):
    """A transaction, as its coordinator knows it."""

    txn: TxnId
    state: TxnState
    owner: str  # role that began it
    name: str  # of its holder; empty: none
    sink: SinkOfTransaction
    age_ms: int  # since its first use
    remaining_ms: int  # until it is aborted; 0: it has ended
    topics: tuple[str, ...]  # that joined; of an ended one those that have not stored the outcome
    reason: str  # why it is aborted
    address: str  # of the client that began it; empty: not known
    timeout_ms: int  # how long it may stay open


class CoordinatorTransactions(Value, frozen=True):
    """The transactions of one coordinator, the oldest first. `committed` and `aborted` are counted since a broker last
    took the coordinator over. `unsettled`: how many have ended, and have topics that have not stored the outcome."""

    items: tuple[TransactionStats, ...]
    open: int
    prepared: int
    unsettled: int
    epoch: int  # 0: it had no transaction so far
    committed: int
    aborted: int
    next_least: int  # of the next id
    done_below: int  # ids below it have ended, and every participant has stored how
    loading_ms: int  # since the epoch: when its broker began to take it over …
    loaded_ms: int  # … and when it served
    ledger_id: int  # that it writes, or that it read last; -1: it had none so far
    ledger_entries: int  # written by its broker: a snapshot, and what was decided since
    ledger_bytes: int


class HalfState(IntEnum):
    """The state of a half message that has not ended. WAITING: its program has not decided. ASKED: a program of its
    group was asked for the decision. COMMITTING: the decision is to commit. ENDING: its end is being stored. PARKED: it
    waits for an operator."""

    WAITING = 0
    ASKED = 1
    COMMITTING = 2
    ENDING = 3
    PARKED = 4


class HalfDecision(IntEnum):
    """An operator's decision about a half message: commit it, roll it back, park it (no program is asked any more), or
    revive it (programs of its group are asked again)."""

    COMMIT = 0
    ROLLBACK = 1
    PARK = 2
    REVIVE = 3


class HalfStats(Value, frozen=True):
    """A half message that has not ended, as its coordinator knows it."""

    half: TxnId
    state: HalfState
    owner: str  # role that prepared it
    group: str
    check_key: str
    age_ms: int
    unknown: int  # answers of programs of its group that they do not know its outcome yet
    members: int  # programs of its group that are connected
    bytes: int
    topics: tuple[str, ...]
    reason: str  # PARKED: why; else the last failure of a check or commit


class CoordinatorHalves(Value, frozen=True):
    """The half messages of one coordinator, the oldest first."""

    items: tuple[HalfStats, ...]
    open: int  # without the parked ones
    parked: int
    bytes: int  # of the messages of all


class PendingOfTransaction(Value, frozen=True):
    """The acknowledgements of a transaction for one subscription. They count when the transaction is committed."""

    name: str
    entries: int  # a cumulative acknowledgement counts as one
    up_to: Position | None  # acknowledged cumulatively


class TransactionHere(Value, frozen=True):
    """The part of a transaction at one topic: its entries, and the acknowledgements that wait for its end."""

    known: bool  # it has not ended there
    first: Position | None  # its first entry
    entries: int
    bytes: int
    holds: bool  # the last stable position is before that entry, so that readers wait for it …
    waiting: int  # … and do not get so many messages: its own, and all that follow
    subscriptions: tuple[PendingOfTransaction, ...]
