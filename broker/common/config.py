"""The settings of a broker (`BrokerConfig`): first those that change its behaviour, then those that change its
performance. The comment of each setting says what it limits and what it costs.

Also in this file: the policies in force for a topic, which are resolved from the policies of the topic, its namespace
and the broker (`resolve_policies_in_force`); and the settings that can change while brokers run
(`CHANGEABLE_POLICY_NAMES`, `RuntimeSettings`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ...ledger.handle import ENTRY_BYTES_MAX
from ...ledger.placement_core import ANY_GROUP, BookieGroups
from ...proto.applied import AppliedPolicies, Limit
from ...proto.errors import InvalidConfiguration, InvalidRequest
from ...proto.policies import (
    ISOLATION_FIELDS,
    RETENTION_FIELD_PAIRS,
    Policies,
    check_labels,
    check_policies,
    complete_retention_pairs,
    parse_labels,
)
from ...proto.states import COORDINATORS_MAX
from ...runtime.network import Endpoint

Positive = Annotated[int, Meta(ge=1)]

Seconds = Annotated[float, Meta(gt=0)]

MetricsLevel = Literal["auto", "all", "namespace", "none"]
OnOff = Literal["on", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_LISTEN_ENDPOINT = Endpoint("127.0.0.1", 7650)
MESSAGE_BYTES_LIMIT = ENTRY_BYTES_MAX - 1024
"""Largest message that a ledger takes, without what the broker puts in front. The log's entry ids are those of the
ledger only as long as the ledger refuses no entry for its size."""
SNAPSHOT_BYTES_LIMIT = 256 << 10
"""Most bytes of a snapshot: a node of the metadata holds 1 MiB, and all nodes are in its memory."""
RESULT_RETENTION_S_MIN = 60.0
"""Least seconds that results are kept, twice what an operation of a client takes with all its attempts, by default: a
repeated commit gets its answer."""


DELIVERY_BATCH_BYTES = 1 << 20
"""Most bytes that one consumer or range gets at once of what was read; `read_bytes` if that is less. A connection may
queue so much beyond its bound, and a role may still read so much after its right was revoked."""


class BrokerConfig(AppliedPolicies, frozen=True):
    """The settings of a broker. They include the default policies that namespaces and topics inherit."""

    # ---- behaviour
    name: str = ""  # in the registry of brokers; empty: a random one
    share_group: str = ""  # brokers of one group share what any is asked for; `magnetar broker`: those of `cluster`
    labels: str = ""  # NAME=VALUE,…, as tier=gold,zone=a: namespaces with a policy of isolation choose brokers by them
    cluster: str = "magnetar"  # what `allowed_clusters` of a tenant name
    authorization_allow_wildcards_matching: bool = False  # a role of a grant may be a pattern: `team-*`, `*-reader`
    listen: Endpoint = DEFAULT_LISTEN_ENDPOINT  # where clients connect; port 0 takes a free one
    advertised: Endpoint | None = None  # what lookups answer; none: the address that it listens at
    pulsar_listen: Endpoint | None = None  # where clients of Pulsar connect; port 0 takes a free one; none: nowhere
    pulsar_listeners: str = ""  # what their look-ups answer: NAME:URL,NAME:URL; none: as advertised; the first: to all
    http_listen: Endpoint | None = None  # of REST, look-ups, metrics and health; port 0: a free one; none: nowhere
    degraded_writes: bool = True  # with bookies missing, new ledgers have fewer copies, never below ack_quorum; or wait
    min_racks_per_write_quorum: Positive = 1  # racks of the copies of an entry, at most write_quorum
    enforce_min_racks: bool = False  # with too few racks publishing waits; or copies share racks, with a warning
    degraded_roll_s: float = 60.0  # such a ledger ends at this age, with the next publish: bookies may be back
    namespace_bundles: Positive = 32  # of new namespaces: so many brokers may share one; a node each, in use
    auto_topic_creation: bool = True  # a topic is made at its first look-up
    metrics_topics: MetricsLevel = "auto"  # on the page of metrics: auto, all, namespace, none (docs/metrics.md)
    balance: OnOff = "on"  # brokers of a share_group move bundles to the less busy ones; a request each 10 s
    split_bundle_topics: Limit = 1_000  # loaded topics of a bundle: with more its namespace is split; 0: no limit
    split_bundle_sessions: Limit = 1_000  # producers and consumers of a bundle, likewise; 0: no limit
    split_bundle_messages_s: Limit = 30_000  # in and out of a bundle, likewise; 0: no limit
    split_bundle_bytes_s: Limit = 100_000_000  # in and out of a bundle, likewise; 0: no limit
    split_bundles_max: Limit = 128  # bundles up to which brokers split a namespace by themselves; 0: they do not
    link_bytes_s: Limit = 0  # what its network carries a second: the balance counts a broker's share; 0: not counted
    max_tenants: Limit = 0  # of the cluster; concurrent creations may exceed it, as in all that follow; 0: any number
    max_namespaces_per_tenant: Limit = 0  # of each
    max_same_address_producers: Limit = 0  # of a topic from one host; all of one gateway are one; 0: any number
    max_same_address_consumers: Limit = 0  # … of all its subscriptions together
    subscription_policies: str = ""  # entry points of installed packages, by name: NAME,NAME; they run in the broker
    slow_publish_s: float = 0.5  # a slower publish is a line of the log, with the time at each station; 0: none
    roll_entries: Positive = 50_000  # a ledger ends with so many entries; fewer: finer trimming, more metadata
    roll_bytes: Positive = 2 << 30  # … or so many bytes
    roll_minutes: Positive = 240  # … or at this age, with the next publish; each topic at up to a fifth less
    cursor_flush_s: float = 1.0  # an ack without receipt is durable after so long; what a crash may redeliver
    cursor_roll_entries: Positive = 50_000  # a cursor ledger ends with so many entries …
    cursor_roll_bytes: Positive = 64 << 20  # … or so many bytes, if they are twice what is valid of them …
    cursor_live_share: float = 0.2  # … or when less of it is valid (from 4 MiB on); higher: whole states more often
    cursor_snapshot_bytes: int = 16 << 10  # of a state in the metadata: at a close, and while no bookies take a ledger
    cursor_memory_bytes: Positive = 64 << 20  # of one subscription's holes; above, it gets nothing new until they go
    compaction_memory_bytes: Positive = 256 << 20  # for keys, 200 bytes each; with more of them it reads more often
    compaction_retain_null_key: bool = False  # messages without a key survive compaction; or they are removed
    delayed_seal_entries: Positive = 50_000  # so many become a bucket on disk; 56 bytes each before
    delayed_memory_bytes: Positive = 16 << 20  # of what is not on disk; above, what is due soon goes there too
    trim_interval_s: float = 10.0  # between two checks of each topic; longer: later trimming and expiry
    orphan_sweep_s: float = 3600.0  # between two searches for ledgers that no record names; each reads all records
    orphan_age_s: float = 3600.0  # a younger ledger may be about to be listed; far above a session's time-out
    roll_idle_s: float = 60.0  # an acknowledged ledger ends when nothing was published for so long: it can be freed
    unload_idle_s: Limit = 1800  # an unused topic leaves the memory after so long, or its ledgers end; 0: neither
    broker_publish_rate_messages: Limit = 0  # per second, by all producers of this broker together; 0: no limit
    broker_publish_rate_bytes: Limit = 0  # … in bytes
    broker_dispatch_rate_messages: Limit = 0  # per second, by all subscriptions of this broker together; 0: no limit
    broker_dispatch_rate_bytes: Limit = 0  # … in bytes
    dedup_snapshot_entries: Positive = 1_000  # between two snapshots of sequence ids; more: a longer replay at a load
    dedup_producers: Positive = 10_000  # of a topic that left and are remembered; 100 bytes each, and in each snapshot
    dedup_inactive_minutes: Positive = 360  # a producer absent for so long is forgotten: it may publish twice
    key_shared_hash_ranges: bool = False  # AUTO_SPLIT halves ranges of hashes; else consistent hashing, which is evener
    key_shared_waiting_bytes: Positive = 16 << 20  # for what waits for its key's consumer, of one subscription
    transaction_coordinators: Positive = 16  # of the cluster; the first transaction fixes it for ever
    transaction_timeout_s: Seconds = 60.0  # an open transaction is aborted then, if its client names no other time
    transaction_timeout_s_max: Seconds = 900.0  # that a client may name; readers wait for an open one for so long
    transaction_prepared_s_max: Seconds = 86_400.0  # … of a prepared one, which survives its client
    transaction_lease_s: Seconds = 600.0  # ids that a client took ahead are void when they are not used by then
    transaction_open_max: Positive = 100_000  # of one coordinator, ids taken ahead included; 0.5 KB each
    transaction_open_per_role_max: Limit = 50_000  # … of one role; 0: any number
    transaction_result_retention_s: Seconds = 3_600.0  # a client may ask for so long how one ended; a bit or so each
    transaction_halves_per_group_max: Positive = 10_000  # half messages that are not decided, of one group; parked too
    transaction_half_bytes: Positive = 64 << 20  # … of one coordinator: in memory, and copied when its ledger ends
    transaction_half_check_after_s: Seconds = 10.0  # of silence, until its group is asked, if its program says no time
    transaction_half_pause_s: Seconds = 30.0  # to the next question; it doubles each time …
    transaction_half_pause_s_max: Seconds = 600.0  # … up to this
    transaction_half_answer_s: Seconds = 30.0  # a process of the group may take for an answer; then another is asked
    transaction_half_unknown_max: Positive = 15  # so many answers of UNKNOWN park a half message
    transaction_half_open_s: Seconds = 86_400.0  # … and this age
    reroute_timeout_s: float = 60.0  # of finding a new ledger when one fails; then the topic is given up
    drain_timeout_s: float = 10.0  # of giving its bundles to others when it stops; then they are released; 0: at once
    session_lost_grace_s: float = 30.0  # topics are served on without a session, or while no metadata listens; 0: not

    # ---- performance
    cache_bytes: int = 64 << 20  # memory of new entries, 0.5 KB each and bytes, for tailing; 0: read from bookies
    catch_up_cache_bytes: int = 16 << 20  # as that, of what was read last from bookies; subscriptions share it
    read_bytes: Positive = 4 << 20  # one read of a consumer that catches up; two and a half are in memory for each
    pending_bytes: Positive = 16 << 20  # unconfirmed publishes of one producer: its credit; above, the client waits
    client_memory_bytes: Limit = 0  # of all clients: what arrives, requests, answers; 0: its share
    append_memory_bytes: Positive = 512 << 20  # entries that a bookie has not answered; above, appends wait
    read_memory_bytes: Positive = 256 << 20  # read ahead for all subscriptions; above, the least used is read again
    state_memory_bytes: Limit = 0  # of topics, subscriptions, connections; above, the caches get less; 0: not looked at
    max_connections: Positive = 10_000  # of clients; gRPC refuses further ones
    max_streams_per_address: Positive = 1_000  # each client has one, and one for each read of a range
    first_frame_s: Seconds = 10.0  # a stream on which a client sends nothing for so long is cut
    unread_s: Seconds = 300.0  # … and one of which it takes nothing of what waits for it
    connection_ids: Positive = 50_000  # producers and consumers of one client's connection; 1 KB each, beside their own
    close_timeout_s: float = 5.0  # of ending one topic in order; later the next owner has to recover it
    close_grace_s: float = 1.0  # streams get so long to end when the broker closes

    @staticmethod
    def fill_values(values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `values`, the settings that the user gave by name, with each incomplete retention completed. A
        retention is a pair of settings, a time and a size; if only one of the two is given, the other gets the value
        that `complete_retention_pairs` gives it in policies."""
        given = {name: values.get(name) for pair in RETENTION_FIELD_PAIRS for name in pair}
        filled = complete_retention_pairs(Policies(**given))
        return {**values, **{name: getattr(filled, name) for name in given if getattr(filled, name) is not None}}

    def validate(self) -> None:
        """Checks the settings and their relations to each other. Raises InvalidConfiguration for the first invalid
        setting."""
        for pair in RETENTION_FIELD_PAIRS:
            minutes, mib = (getattr(self, name) for name in pair)
            if (minutes == 0) != (mib == 0):
                raise InvalidConfiguration(
                    f"{pair[0]} ({minutes}) and {pair[1]} ({mib}): both are 0 (not at all), or neither is; "
                    "-1: without limit", setting=pair[0],
                )  # fmt: skip
        if self.durability == "memory" and self.deduplication:
            raise InvalidConfiguration("durability=memory loses what deduplication promises", setting="durability")
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise InvalidConfiguration(
                f"ensemble_size ({self.ensemble_size}) >= write_quorum ({self.write_quorum}) >= "
                f"ack_quorum ({self.ack_quorum}) must hold"
            )
        if self.max_message_bytes > MESSAGE_BYTES_LIMIT:
            raise InvalidConfiguration(
                f"max_message_bytes ({self.max_message_bytes}) is above {MESSAGE_BYTES_LIMIT}, what a ledger takes",
                setting="max_message_bytes",
            )
        if not 0 < self.cursor_live_share < 0.5:
            raise InvalidConfiguration(
                f"cursor_live_share must be between 0 and 0.5, not {self.cursor_live_share}",
                setting="cursor_live_share",
            )
        if not 0 <= self.cursor_snapshot_bytes <= SNAPSHOT_BYTES_LIMIT:
            raise InvalidConfiguration(
                f"cursor_snapshot_bytes must be in 0 … {SNAPSHOT_BYTES_LIMIT}, not {self.cursor_snapshot_bytes}",
                setting="cursor_snapshot_bytes",
            )
        for name in (
            "cursor_flush_s", "degraded_roll_s", "trim_interval_s", "reroute_timeout_s",
            "close_timeout_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        try:
            check_policies(Policies(**{name: getattr(self, name) for name in ISOLATION_FIELDS}))
            check_labels(parse_labels(self.labels), "labels")
        except InvalidRequest as error:
            raise InvalidConfiguration(error.message, setting=error.fields.get("setting", "labels")) from error
        if self.transaction_coordinators > COORDINATORS_MAX:
            raise InvalidConfiguration(
                f"transaction_coordinators must be at most {COORDINATORS_MAX}, not {self.transaction_coordinators}",
                setting="transaction_coordinators",
            )
        if self.transaction_timeout_s > self.transaction_timeout_s_max:
            raise InvalidConfiguration(
                f"transaction_timeout_s ({self.transaction_timeout_s}) is above transaction_timeout_s_max",
                setting="transaction_timeout_s",
            )
        if self.transaction_half_pause_s > self.transaction_half_pause_s_max:
            raise InvalidConfiguration(
                f"transaction_half_pause_s ({self.transaction_half_pause_s}) is above transaction_half_pause_s_max",
                setting="transaction_half_pause_s",
            )
        if self.transaction_result_retention_s < RESULT_RETENTION_S_MIN:
            raise InvalidConfiguration(
                f"transaction_result_retention_s must be at least {RESULT_RETENTION_S_MIN:g}: clients ask for so long",
                setting="transaction_result_retention_s",
            )
        if self.session_lost_grace_s < 0:
            raise InvalidConfiguration("session_lost_grace_s must not be negative", setting="session_lost_grace_s")
        if self.slow_publish_s < 0:
            raise InvalidConfiguration("slow_publish_s must not be negative", setting="slow_publish_s")
        if self.drain_timeout_s < 0:
            raise InvalidConfiguration("drain_timeout_s must not be negative", setting="drain_timeout_s")


class LedgerReplication(msgspec.Struct, frozen=True):
    """The replication of a new ledger: the number of bookies (`ensemble_size`), the number of copies of each entry
    (`write_quorum`), the number of copies (`ack_quorum`) that must be synced before an entry is confirmed, and the
    groups of the bookies. `unsynced`: True if these copies need not be synced; only the log of a topic heeds it."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    groups: BookieGroups = ANY_GROUP
    unsynced: bool = False

    def __str__(self) -> str:
        return f"{self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}"


GetReplicationPolicy = Callable[[], Awaitable[LedgerReplication]]
"""Returns the replication of the next ledger. It is called before each new ledger, so a changed policy applies from the
next ledger on."""


# ------------------------------------------------------------------------------------------------------- applied
# The policies in force for a topic: every policy resolved, topic > namespace > broker (Pulsar B5).
#
# `AppliedPolicies` (proto/applied.py) is a value: code that decides by a policy reads `topic.applied` anew each time
# and never keeps a field of it. The broker's own level is its configuration, which has the same fields
# (`BrokerConfig`), and what was changed of it for all brokers while they run (`CHANGEABLE_POLICY_NAMES`).
# Inheritance is by field, but what is only sensible together is set together (`check` in proto/policies.py: both
# retentions, all three quorums). Kept current by broker/cluster/policy_cache.py: a changed policy applies to the next
# decision, without a restart or an unload; what was decided before stays.
# Guarding test: tests/broker/common/test_applied.py.


APPLIED_POLICY_NAMES = AppliedPolicies.__struct_fields__
UNCHANGEABLE_SETTINGS = ("max_message_bytes", "ensemble_size", "write_quorum", "ack_quorum")
"""Settings of a broker that hold while it runs: its frames are as large, and its own ledgers have as many copies."""
CHANGEABLE_POLICY_NAMES = tuple(name for name in APPLIED_POLICY_NAMES if name not in UNCHANGEABLE_SETTINGS)
"""Names of the policies that can change while brokers run, for all at once (PolicyCache)."""


class RuntimeSettings(msgspec.Struct, frozen=True):
    """The settings, other than policies, that an operator can change for all brokers while they run. A setting that is
    None has, at each broker, the value of its own configuration. `metrics_topics`: which topics have metrics of their
    own; `auto_topic_creation`: whether first use creates a topic; `balance`: whether brokers move bundles by
    themselves."""

    log_level: LogLevel | None = None  # of the whole process; debug costs processor time
    metrics_topics: MetricsLevel | None = None
    auto_topic_creation: bool | None = None
    balance: OnOff | None = None


RUNTIME_SETTING_NAMES = RuntimeSettings.__struct_fields__


def parse_runtime_settings(texts: Mapping[str, str]) -> RuntimeSettings:
    """Returns the runtime settings that are stored in `texts`, which has the stored values by name. A missing name
    gives None. So does a text that is not a valid value, because a later version may have stored it."""
    found = dict[str, Any]()
    for name in RUNTIME_SETTING_NAMES:
        with suppress(KeyError, msgspec.ValidationError):
            found[name] = getattr(msgspec.convert({name: texts[name]}, RuntimeSettings, strict=False), name)
    return RuntimeSettings(**found)


def resolve_policies_in_force(broker: AppliedPolicies, *levels: Policies) -> AppliedPolicies:
    """Returns the policies in force. Each policy has the value of the last one of `levels` (namespace, then topic) that
    sets it, else the value of the broker. `max_message_bytes` never exceeds the broker's value."""
    values = {name: getattr(broker, name) for name in APPLIED_POLICY_NAMES}
    for level in levels:
        for name in APPLIED_POLICY_NAMES:
            value = getattr(level, name)
            if value is not None:
                values[name] = value
    values["max_message_bytes"] = min(values["max_message_bytes"], broker.max_message_bytes)
    return AppliedPolicies(**values)


def make_policies_with_all_values(applied: AppliedPolicies) -> Policies:
    """Returns Policies in which no field is None: each field has its value in `applied`. This is the answer to a
    request for the policies in force."""
    return Policies(**{name: getattr(applied, name) for name in APPLIED_POLICY_NAMES})


VOLATILE_UNUSED_S = 60
"""Seconds without producers and consumers after which a non-persistent topic ends, where no policy says otherwise."""


def adapt_policies_to_non_persistent(applied: AppliedPolicies) -> AppliedPolicies:
    """Returns `applied`, adapted to a non-persistent topic. Such a topic stores nothing, so deduplication and
    compaction are off. It is deleted when it was unused for `inactive_s` seconds; VOLATILE_UNUSED_S if no policy sets
    them."""
    return replace(
        applied, inactive_s=applied.inactive_s or VOLATILE_UNUSED_S, inactive_mode="delete_when_no_subscriptions",
        deduplication=False, compaction_threshold_bytes=0,
    )  # fmt: skip
