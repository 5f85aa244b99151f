"""Policies: what an operator sets for a namespace or a topic; everything else is inherited.

A field that is None is inherited: topic > namespace > broker (Pulsar B5). A policy of a partitioned topic is set on the
topic and applies to each of its partitions. On the wire and in the metadata tree policies are one JSON object with only
the fields that are set: `{"message_ttl_s":600}`. What the fields resolve to, and the brokers' defaults:
broker/common/applied.py. The commands that set them: cli/admin/policies.py.

0 means "none" or "no limit" wherever a field is a limit. Only the retentions also have -1 (without limit).
`check` raises InvalidRequest, which says what is wrong.
Guarding test: tests/proto/test_policies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from .errors import InvalidRequest
from .schema import Compatibility
from .subscription_types import TITLES

QuotaPolicy = Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"]
"""The reaction when the backlog quota is reached (Pulsar A17)."""

InactiveMode = Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"]
"""The condition under which a topic without producers and consumers counts as inactive (Pulsar T6)."""

if TYPE_CHECKING:
    TypeTitle = str
else:
    TypeTitle = Literal[TITLES]  # a subscription type

LADDERS_MAX = 100
"""Bound of the steps of a back-off ladder; RocketMQ's preset has 16."""


class Policies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """The policies of one level; a field that is None is inherited."""

    retention_minutes: int | None = None  # how long acknowledged data is kept; -1: for ever, 0: not at all
    retention_mib: int | None = None  # … and how much; -1: without limit, 0: not at all
    unsubscribed_minutes: int | None = None  # how long messages of a topic without a durable subscription are kept …
    unsubscribed_mib: int | None = None  # … and how many; -1: without limit, 0: not at all
    message_ttl_s: int | None = None  # an older unacknowledged message counts as acknowledged; 0: never
    backlog_quota_bytes: int | None = None  # of the slowest subscription; 0: none
    backlog_quota_s: int | None = None  # age of its oldest message; 0: none
    backlog_quota_policy: QuotaPolicy | None = None
    backlog_quota_counts_delayed: bool | None = None
    deduplication: bool | None = None
    dedup_snapshot_s: int | None = None  # between two snapshots of sequence ids; 0: by their entries alone
    max_message_bytes: int | None = None  # of one entry, at most the broker's
    delayed_delivery: bool | None = None
    delayed_tick_ms: int | None = None  # between two checks for due messages
    max_delay_ms: int | None = None  # 0: any
    publish_rate_messages: int | None = None  # per second and topic; 0: none, as in all that follow
    publish_rate_bytes: int | None = None
    dispatch_rate_messages: int | None = None  # per second, of all subscriptions of the topic together
    dispatch_rate_bytes: int | None = None
    subscription_dispatch_rate_messages: int | None = None  # per second, of each subscription
    subscription_dispatch_rate_bytes: int | None = None
    subscribe_rate: int | None = None  # how often one consumer may subscribe to a topic within a period
    subscribe_rate_period_s: int | None = None
    max_producers: int | None = None
    max_consumers: int | None = None
    max_consumers_per_subscription: int | None = None
    max_subscriptions: int | None = None
    auto_subscription_creation: bool | None = None  # when a consumer subscribes; off: NotFound
    max_topics: int | None = None  # of a namespace; partitions count
    max_unacked_per_consumer: int | None = None
    max_unacked_per_subscription: int | None = None
    inactive_s: int | None = None  # an unused topic is deleted after so long; 0: never
    inactive_mode: InactiveMode | None = None
    subscription_expiration_s: int | None = None  # one without consumers is deleted after so long; 0: never
    compaction_threshold_bytes: int | None = None  # compacted above so much uncompacted data; 0: on demand only
    ensemble_size: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    dead_letter_max_redeliver_count: int | None = None  # 0: no dead letters by the server
    dead_letter_topic: str | None = None  # "": TOPIC-SUBSCRIPTION-DLQ
    dead_letter_backoff_s: tuple[float, ...] | None = None  # wait before the 1st, 2nd, … redelivery; the last one stays
    subscription_types: tuple[TypeTitle, ...] | None = None  # that consumers may ask for
    schema_compatibility: Compatibility | None = None  # of a new schema with those of the topic
    schema_auto_update: bool | None = None  # a producer's new schema is registered; off: operators upload
    schema_validation_enforced: bool | None = None  # no producer without a schema where the topic has one


NAMES: tuple[str, ...] = Policies.__struct_fields__
OF_NAMESPACES: tuple[str, ...] = ("max_topics",)
"""Policies that a topic cannot have."""
PROPERTIES_MAX, PROPERTIES_BYTES_MAX = 1000, 64 << 10
"""Most keys of the properties of a namespace or a topic, and bytes of all keys and values together."""
RETENTIONS = (("retention_minutes", "retention_mib"), ("unsubscribed_minutes", "unsubscribed_mib"))
"""A time and a size, which are set together."""
_SIGNED = {name for pair in RETENTIONS for name in pair}
_INT_MAX = 1 << 62


def encode(policies: Policies) -> str:
    return msgspec.json.encode(policies).decode()


class _Earlier(Policies, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """Policies as earlier versions wrote them: the size of a quota was in MiB."""

    backlog_quota_mib: int | None = None


def decode(text: str) -> Policies:
    """Raises InvalidRequest when the text is no Policies."""
    try:
        if '"backlog_quota_mib"' not in text:
            return msgspec.json.decode(text or "{}", type=Policies)
        earlier = msgspec.json.decode(text, type=_Earlier)
        size = earlier.backlog_quota_bytes
        if size is None and earlier.backlog_quota_mib is not None:
            size = earlier.backlog_quota_mib << 20
        return Policies(**{name: getattr(earlier, name) for name in NAMES} | {"backlog_quota_bytes": size})
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"these are no policies: {error}") from error


def merged(below: Policies, above: Policies) -> Policies:
    """Returns policies with each field of `above` where it is set, else that of `below`."""
    given = {name: value for name in NAMES if (value := getattr(above, name)) is not None}
    return msgspec.structs.replace(below, **given)


def completed(policies: Policies) -> Policies:
    """Returns the policies with both parts of retention: by time alone it has no limit of size, and the other way
    round."""
    found = policies
    for pair in RETENTIONS:
        minutes, mib = (getattr(policies, name) for name in pair)
        if (minutes is None) != (mib is None):
            other = -1 if minutes or mib else 0
            given = (other if value is None else value for value in (minutes, mib))
            found = msgspec.structs.replace(found, **dict(zip(pair, given, strict=True)))
    return found


def without(policies: Policies, *names: str) -> Policies:
    """Returns the policies with these fields inherited again."""
    return msgspec.structs.replace(policies, **dict.fromkeys(names))


def check_properties(properties: dict[str, str]) -> dict[str, str]:
    """The properties themselves. InvalidRequest: one has no key, or they are more than a place may have."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in properties.items())
    if "" in properties:
        raise InvalidRequest("a property has a key: KEY=VALUE")
    if len(properties) > PROPERTIES_MAX or size > PROPERTIES_BYTES_MAX:
        text = f"{len(properties)} properties of {size} bytes are too many: at most {PROPERTIES_MAX} are kept"
        raise InvalidRequest(f"{text}, of {PROPERTIES_BYTES_MAX} bytes together")
    return properties


def check(policies: Policies) -> Policies:
    """The policies themselves. InvalidRequest: a field has an invalid value, or fields contradict each other."""
    for name in NAMES:
        value = getattr(policies, name)
        if isinstance(value, int) and not (-1 if name in _SIGNED else 0) <= value < _INT_MAX:
            least = "-1 (without limit), 0 (none)" if name in _SIGNED else "0 (none)"
            raise InvalidRequest(f"{name} is {least} or more, not {value}", setting=name)
    for pair in RETENTIONS:
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
    if len(ladder) > LADDERS_MAX or any(not 0 <= step <= 1e9 for step in ladder):
        raise InvalidRequest(f"a back-off ladder has at most {LADDERS_MAX} steps of 0 s or more each, not {ladder}")
    if policies.subscribe_rate_period_s == 0:
        raise InvalidRequest("subscribe_rate_period_s is 1 or more", setting="subscribe_rate_period_s")
    if policies.max_message_bytes == 0:
        raise InvalidRequest("max_message_bytes is 1 or more; remove it to inherit it", setting="max_message_bytes")
    return policies
