"""Translates policies between Pulsar's REST API (names in paths, JSON bodies) and the fields of proto/policies.py, and
registers the routes of policies.

A row of POLICIES translates one policy of proto/policies.py in both directions. `take` returns the fields of Policies
for a body, or raises HttpError (412). `show` returns Pulsar's JSON for the fields, or None if they are not set. Pulsar
writes "no limit" as -1 in rates and quotas, Magnetar as 0. Rates over a period become rates per second, rounded up.

Each row has three routes for each level that has the policy: tenants, namespaces, topics. GET returns the policy that
is set there (204: it is not set), with `applied=true` the one in force; POST (or PUT) sets it; DELETE removes it, so
that it is inherited again. At the end of the file are the policies of Pulsar that Magnetar does not have: each has one
value, and a request to set another value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from ...proto import operations as op
from ...proto.applied import Durability, KeyIndexPolicy, QuotaPolicy, StoragePolicy
from ...proto.policies import POLICIES as TABLE
from ...proto.policies import Policies, PolicyDefinition, PolicyRestNames, decode_policies
from ...proto.schema import Compatibility
from ...proto.statistics import RESOURCE_GROUP_RATES
from .call import NAMESPACE_PATH, TENANT_PATH, TOPIC_PATH, HttpError, RestHandler, RestRequest, register_route

MIB = 1 << 20
_DELETE_MODES = ("delete_when_no_subscriptions", "delete_when_subscriptions_caught_up")


class Retention(msgspec.Struct):
    """The JSON body of Pulsar's retention policy. The time in minutes, and the size in MiB. Both numbers are 0 (no
    retention), or neither is; -1: no limit."""

    retentionTimeInMinutes: int = 0
    retentionSizeInMB: int = 0


class BacklogQuota(msgspec.Struct):
    """The JSON body of Pulsar's backlog quota. `limitSize`: in bytes (`limit`: the older name of this field);
    `limitTime`: in seconds; -1: no limit. `policy`: what happens when the quota is reached; None: the present policy
    stays."""

    limitSize: int | None = None
    limitTime: int | None = None
    policy: QuotaPolicy | None = None
    limit: int | None = None  # of old clients: `limitSize`


class StorageLimitBody(msgspec.Struct):
    """The JSON body of a limit of stored bytes of a namespace or a tenant. `limitSize`: in bytes; -1: no limit.
    `policy`: what happens at the limit; None: the present policy stays. Pulsar has no such policy."""

    limitSize: int
    policy: StoragePolicy | None = None


class Persistence(msgspec.Struct):
    """The JSON body of Pulsar's persistence policy: the number of bookies of a ledger (`bookkeeperEnsemble`), of the
    copies of an entry (`bookkeeperWriteQuorum`), and of those that confirm it (`bookkeeperAckQuorum`).
    `managedLedgerMaxMarkDeleteRate` is ignored."""

    bookkeeperEnsemble: int
    bookkeeperWriteQuorum: int
    bookkeeperAckQuorum: int
    managedLedgerMaxMarkDeleteRate: float = 0.0


class DispatchRate(msgspec.Struct):
    """The JSON body of Pulsar's dispatch rate policies. Each rate is for a period of `ratePeriodInSecond` seconds; -1:
    no limit. `relativeToPublishRate`: True is refused."""

    dispatchThrottlingRateInMsg: int = -1
    dispatchThrottlingRateInByte: int = -1
    ratePeriodInSecond: int = 1
    relativeToPublishRate: bool = False


class PublishRate(msgspec.Struct):
    """The JSON body of Pulsar's publish rate policy. Rates are per second; -1: no limit."""

    publishThrottlingRateInMsg: int = -1
    publishThrottlingRateInByte: int = -1


class SubscribeRate(msgspec.Struct):
    """The JSON body of Pulsar's subscribe rate policy. The rate is for a period of `ratePeriodInSecond` seconds; -1: no
    limit."""

    subscribeThrottlingRatePerConsumer: int = -1
    ratePeriodInSecond: int = 30


class AutoSubscription(msgspec.Struct):
    """The JSON body of Pulsar's policy for the automatic creation of subscriptions."""

    allowAutoSubscriptionCreation: bool


class AutoTopic(msgspec.Struct):
    """The JSON body of Pulsar's policy for the automatic creation of topics. `defaultNumPartitions`: only for the type
    "partitioned"."""

    allowAutoTopicCreation: bool
    topicType: Literal["partitioned", "non-partitioned", ""] | None = None
    defaultNumPartitions: int | None = None


class DelayedDelivery(msgspec.Struct):
    """The JSON body of Pulsar's delayed delivery policy. Both times are in ms; a `maxDeliveryDelayInMillis` of 0: no
    limit. `active`: whether messages may be delayed; `tickTime`: how exactly in time they are delivered."""

    active: bool = True
    tickTime: int = 1000
    maxDeliveryDelayInMillis: int = 0


class InactiveTopics(msgspec.Struct):
    """The JSON body of Pulsar's policy for inactive topics. A topic that was unused for `maxInactiveDurationSeconds`
    seconds is deleted if `deleteWhileInactive` is True; `inactiveTopicDeleteMode`: when it counts as unused."""

    inactiveTopicDeleteMode: str = _DELETE_MODES[0]
    maxInactiveDurationSeconds: int = 0
    deleteWhileInactive: bool = False


class BookieAffinity(msgspec.Struct):
    """The JSON body of Pulsar's bookie affinity group: the groups of bookies that hold a namespace's ledgers, and those
    that hold them where the first are too few; each NAME, or NAME,NAME."""

    bookkeeperAffinityGroupPrimary: str
    bookkeeperAffinityGroupSecondary: str | None = None


class BrokerIsolationLabels(msgspec.Struct):
    """The JSON body of the policy of isolation: the labels of the brokers that serve a namespace, NAME=VALUE, and of
    those that serve it while fewer than `primaryBrokersMin` brokers have these. Pulsar has names of brokers instead."""

    primaryLabels: list[str]
    fallbackLabels: list[str] = []
    primaryBrokersMin: int = 1


PolicyFields = dict[str, Any]
"""Fields of our policies: name → value."""


class PolicyRow(NamedTuple):
    """A row of the table from which the REST routes of policies are made: one policy. `namespace` and `topic`: the last
    part of the path of its routes for namespaces and for topics; "" if there is no such route. `key`: the key of the
    policy in the JSON of a namespace, "" if it has none. `kind`, `take` and `show`: as in BodyConverter; `fields`: the
    fields of Policies that it sets; `verb`, `topic_verb`: the HTTP method that sets it."""

    namespace: str
    topic: str
    key: str
    kind: Any
    fields: tuple[str, ...]
    take: Callable[[Any], PolicyFields]
    show: Callable[[Policies], object]
    verb: str  # that sets it, for namespaces
    by_cluster: bool  # `key` has a map from the cluster
    topic_verb: str
    tenant: str  # as `namespace`


def _bad_request(text: str) -> HttpError:
    return HttpError(text, 412)


_REASONS = {
    "subscription_expiration_s": "Invalid value for subscription expiration time",
    "dedup_snapshot_s": "interval must be greater than or equal to 0",
}
"""Texts of errors that programs compare with; all other policies have one common text."""


# ------------------------------------------------------------------ numbers and booleans
class BodyConverter(NamedTuple):
    """The type of a policy's JSON body (`kind`), and two functions: `take` converts a body to fields of Policies, and
    `show` converts Policies to a body."""

    kind: Any
    take: Callable[[Any], PolicyFields]
    show: Callable[[Policies], object]


def _plain(policy: PolicyDefinition, rest: PolicyRestNames) -> BodyConverter:
    field, kind = policy.fields[0].name, bool if policy.fields[0].kind == "on/off" else int

    def take(value: Any) -> PolicyFields:
        if kind is int and not 0 <= value < 1 << 62:
            raise _bad_request(_REASONS.get(field, f"{rest.namespace or rest.topic} must be 0 or more"))
        return {field: value * rest.unit if kind is int else value}

    def show(policies: Policies) -> object:
        value = getattr(policies, field)
        return -(-value // rest.unit) if value is not None and kind is int else value

    return BodyConverter(kind, take, show)


# ------------------------------------------------------------------ objects
def _object(
    kind: Any, names: Mapping[str, str], check: Callable[[Any], None] = lambda given: None, *, whole: bool = False
) -> BodyConverter:
    """Returns the BodyConverter of a JSON object; `names` maps its keys to fields of Policies. The policy counts as not
    set
    if the first of these fields is not set, or with `whole`, if any is not."""

    def take(given: Any) -> PolicyFields:
        check(given)
        return {ours: getattr(given, name) for name, ours in names.items()}

    def show(policies: Policies) -> object:
        found = {name: getattr(policies, ours) for name, ours in names.items()}
        if None in [*found.values()][: None if whole else 1]:
            return None
        return kind(**{name: 0 if value is None else value for name, value in found.items()})

    return BodyConverter(kind, take, show)


def _check_retention(given: Retention) -> None:
    minutes, mib = given.retentionTimeInMinutes, given.retentionSizeInMB
    if min(minutes, mib) < -1 or (minutes == 0) != (mib == 0):
        raise _bad_request("retention is -1 (endless), 0 (none), or more; both are 0, or neither is")


def _retention(minutes: str, mib: str) -> BodyConverter:
    names = {"retentionTimeInMinutes": minutes, "retentionSizeInMB": mib}
    return _object(Retention, names, _check_retention)


def parse_quota(given: BacklogQuota, kind: str) -> PolicyFields:
    """Returns the fields of Policies for a backlog quota in Pulsar's JSON. `kind`: destination_storage or message_age.
    Raises HttpError (412) if `kind` is any other text, or a limit is 0 or too large."""
    size, fields = given.limitSize if given.limitSize is not None else given.limit, PolicyFields()
    if kind == "message_age":
        fields["backlog_quota_s"] = _limit(given.limitTime, "limitTime")
    elif kind == "destination_storage":
        bytes_ = _limit(size, "limitSize")
        fields["backlog_quota_bytes"] = bytes_
        if given.limitTime is not None and given.limitTime > 0:
            fields["backlog_quota_s"] = given.limitTime
    else:
        raise _bad_request("backlogQuotaType is destination_storage or message_age")
    if given.policy is not None:
        fields["backlog_quota_policy"] = given.policy
    return fields


def _limit(value: int | None, name: str) -> int:
    """Translates a limit of Pulsar to one of Magnetar, where 0 means no limit. Raises HttpError (412) if it is
    invalid."""
    if value is None or value < 0:
        return 0
    if not 0 < value < 1 << 62:
        raise _bad_request(f"{name} is above 0, or -1 for no limit, not {value}")
    return value


def make_quota_map(policies: Policies) -> dict[str, object]:
    """Returns the backlog quotas that `policies` sets, by kind (destination_storage, message_age), as Pulsar's JSON; {}
    if none is set."""
    policy, found = policies.backlog_quota_policy or "producer_request_hold", dict[str, object]()
    if policies.backlog_quota_bytes:
        found["destination_storage"] = _quota(policies.backlog_quota_bytes, -1, policy)
    if policies.backlog_quota_s:
        found["message_age"] = _quota(-1, policies.backlog_quota_s, policy)
    return found


def _quota(size: int, seconds: int, policy: str) -> dict[str, object]:
    return {"limit": size, "limitSize": size, "limitTime": seconds, "policy": policy}


def _check_persistence(given: Persistence) -> None:
    if not given.bookkeeperEnsemble >= given.bookkeeperWriteQuorum >= given.bookkeeperAckQuorum >= 1:
        raise _bad_request("bookkeeperEnsemble >= bookkeeperWriteQuorum >= bookkeeperAckQuorum >= 1 must hold")


def _a_second(rate: int, period_s: int) -> int:
    """Returns the rate per second, rounded up; 0: no limit. Raises HttpError (412) if the rate or the period is
    invalid."""
    if period_s < 1:
        raise _bad_request(f"ratePeriodInSecond is 1 or more, not {period_s}")
    if rate < -1 or rate >= 1 << 62:
        raise _bad_request(f"a rate is -1 (no limit) or more, not {rate}")
    return -(-max(0, rate) // period_s)


def _rate(kind: Any, by_messages: str, by_bytes: str, ours: str) -> BodyConverter:
    names = {by_messages: f"{ours}_messages", by_bytes: f"{ours}_bytes"}

    def take(given: Any) -> PolicyFields:
        if getattr(given, "relativeToPublishRate", False):
            raise _bad_request("relativeToPublishRate is not offered: name the rates")
        period_s = getattr(given, "ratePeriodInSecond", 1)
        return {field: _a_second(getattr(given, name), period_s) for name, field in names.items()}

    def show(policies: Policies) -> object:
        found = {name: getattr(policies, field) for name, field in names.items()}
        return None if {*found.values()} == {None} else kind(**{name: value or -1 for name, value in found.items()})

    return BodyConverter(kind, take, show)


_DISPATCH = DispatchRate, "dispatchThrottlingRateInMsg", "dispatchThrottlingRateInByte"


def _take_subscribe_rate(given: SubscribeRate) -> PolicyFields:
    _a_second(given.subscribeThrottlingRatePerConsumer, given.ratePeriodInSecond)
    return {
        "subscribe_rate": max(0, given.subscribeThrottlingRatePerConsumer),
        "subscribe_rate_period_s": given.ratePeriodInSecond,
    }


def _show_subscribe_rate(policies: Policies) -> object:
    if policies.subscribe_rate is None:
        return None
    return SubscribeRate(policies.subscribe_rate or -1, policies.subscribe_rate_period_s or 30)


def _check_delayed(given: DelayedDelivery) -> None:
    if not (0 <= given.tickTime < 1 << 62 and 0 <= given.maxDeliveryDelayInMillis < 1 << 62):
        raise _bad_request("tickTime and maxDeliveryDelayInMillis are 0 or more")


def _take_inactive(given: InactiveTopics) -> PolicyFields:
    mode, seconds = given.inactiveTopicDeleteMode, given.maxInactiveDurationSeconds
    if mode not in _DELETE_MODES or not 0 <= seconds < 1 << 62:
        raise _bad_request(
            f"inactiveTopicDeleteMode is one of {', '.join(_DELETE_MODES)}, and the duration is 0 or more"
        )
    return {"inactive_s": seconds if given.deleteWhileInactive else 0, "inactive_mode": mode}


def _show_inactive(policies: Policies) -> object:
    if policies.inactive_s is None:
        return None
    mode = policies.inactive_mode or _DELETE_MODES[0]
    return InactiveTopics(mode, policies.inactive_s, policies.inactive_s > 0)


def _take_compatibility(given: str) -> PolicyFields:
    """Returns the field of Policies for a schema compatibility strategy; its value is None for "UNDEFINED": the
    strategy is inherited."""
    if given.upper() == "UNDEFINED":
        return {"schema_compatibility": None}
    try:
        return {"schema_compatibility": Compatibility(given.lower()).value}
    except ValueError:
        known = ", ".join(each.name for each in Compatibility)
        raise _bad_request(f"a strategy is one of UNDEFINED, {known}, not {given[:40]!r}") from None


def _show_compatibility(policies: Policies) -> object:
    return "UNDEFINED" if policies.schema_compatibility is None else policies.schema_compatibility.upper()


def _word(field: str, words: Sequence[str]) -> BodyConverter:
    """Returns the BodyConverter of a policy that is one of `words`."""

    def take(given: str) -> PolicyFields:
        if given not in words:
            raise _bad_request(f"{field} is one of {', '.join(words)}, not {given[:40]!r}")
        return {field: given}

    return BodyConverter(str, take, lambda policies: getattr(policies, field))


def _boolean(field: str, default: bool) -> BodyConverter:
    """Returns the BodyConverter of a boolean policy; if the policy is not set, its default is returned."""

    def show(policies: Policies) -> object:
        value = getattr(policies, field)
        return default if value is None else value

    return BodyConverter(bool, lambda value: {field: value}, show)


def _take_snapshot_interval(value: int | None) -> PolicyFields:
    """Returns the field of Policies for the snapshot interval; its value is None for null, which Pulsar posts to a
    namespace instead of DELETE. Raises HttpError (412) if it is invalid."""
    if value is not None and not 0 <= value < 1 << 62:
        raise _bad_request(_REASONS["dedup_snapshot_s"])
    return {"dedup_snapshot_s": value}


def _take_types(given: list[str]) -> PolicyFields:
    return {"subscription_types": tuple(dict.fromkeys(given)) or None}


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


def _take_affinity(given: BookieAffinity) -> PolicyFields:
    primary, secondary = _split(given.bookkeeperAffinityGroupPrimary), _split(given.bookkeeperAffinityGroupSecondary)
    if not primary:
        raise _bad_request("bookkeeperAffinityGroupPrimary names a group of bookies, or several: NAME,NAME")
    return {"primary_bookie_groups": primary, "secondary_bookie_groups": secondary}


def _show_affinity(policies: Policies) -> object:
    primary, secondary = policies.primary_bookie_groups, policies.secondary_bookie_groups or ()
    return BookieAffinity(",".join(primary), ",".join(secondary) or None) if primary else None


def _take_isolation(given: BrokerIsolationLabels) -> PolicyFields:
    if not given.primaryLabels or not 1 <= given.primaryBrokersMin < 1 << 62:
        raise _bad_request("primaryLabels has a label, NAME=VALUE, and primaryBrokersMin is 1 or more")
    return {
        "primary_broker_labels": tuple(given.primaryLabels), "fallback_broker_labels": tuple(given.fallbackLabels),
        "primary_brokers_min": given.primaryBrokersMin,
    }  # fmt: skip


def _show_isolation(policies: Policies) -> object:
    primary, fallback = policies.primary_broker_labels, policies.fallback_broker_labels or ()
    return BrokerIsolationLabels([*primary], [*fallback], policies.primary_brokers_min or 1) if primary else None


def _take_group(given: str) -> PolicyFields:
    if not given:
        raise _bad_request("the name of a resource group is not empty")
    return {"resource_group": given}


def _storage(level: str) -> BodyConverter:
    names = f"{level}_storage_bytes", f"{level}_storage_policy"

    def take(given: StorageLimitBody) -> PolicyFields:
        fields: PolicyFields = {names[0]: _limit(given.limitSize, "limitSize")}
        return fields if given.policy is None else {**fields, names[1]: given.policy}

    def show(policies: Policies) -> object:
        size, policy = (getattr(policies, name) for name in names)
        return None if size is None else StorageLimitBody(size or -1, policy or "producer_request_hold")

    return BodyConverter(StorageLimitBody, take, show)


BODY_CONVERTERS: dict[str, BodyConverter] = {
    "retention": _retention("retention_minutes", "retention_mib"),
    "unsubscribed-retention": _retention("unsubscribed_minutes", "unsubscribed_mib"),
    "persistence": _object(Persistence, {
        "bookkeeperEnsemble": "ensemble_size", "bookkeeperWriteQuorum": "write_quorum",
        "bookkeeperAckQuorum": "ack_quorum",
    }, _check_persistence, whole=True),
    "deduplication-snapshot-interval": BodyConverter(
        int | None, _take_snapshot_interval, lambda policies: policies.dedup_snapshot_s
    ),
    "publish-rate": _rate(
        PublishRate, "publishThrottlingRateInMsg", "publishThrottlingRateInByte", "publish_rate"
    ),
    "dispatch-rate": _rate(*_DISPATCH, "dispatch_rate"),
    "namespace-publish-rate": _rate(
        PublishRate, "publishThrottlingRateInMsg", "publishThrottlingRateInByte", "namespace_publish_rate"
    ),
    "namespace-dispatch-rate": _rate(*_DISPATCH, "namespace_dispatch_rate"),
    "tenant-publish-rate": _rate(
        PublishRate, "publishThrottlingRateInMsg", "publishThrottlingRateInByte", "tenant_publish_rate"
    ),
    "tenant-dispatch-rate": _rate(*_DISPATCH, "tenant_dispatch_rate"),
    "resource-group": BodyConverter(str, _take_group, lambda policies: policies.resource_group or None),
    "max-storage-per-namespace": _storage("namespace"),
    "max-storage-per-tenant": _storage("tenant"),
    "subscription-dispatch-rate": _rate(*_DISPATCH, "subscription_dispatch_rate"),
    "subscribe-rate": BodyConverter(SubscribeRate, _take_subscribe_rate, _show_subscribe_rate),
    "auto-subscription-creation": _object(
        AutoSubscription, {"allowAutoSubscriptionCreation": "auto_subscription_creation"}
    ),
    "delayed-delivery": _object(DelayedDelivery, {
        "active": "delayed_delivery", "tickTime": "delayed_tick_ms", "maxDeliveryDelayInMillis": "max_delay_ms",
    }, _check_delayed),
    "inactive-topic-policies": BodyConverter(InactiveTopics, _take_inactive, _show_inactive),
    "subscription-types-enabled": BodyConverter(list[str], _take_types, lambda policies: policies.subscription_types),
    "schema-compatibility-strategy": BodyConverter(str, _take_compatibility, _show_compatibility),
    "key-index": _word("key_index", get_args(KeyIndexPolicy)),
    "durability": _word("durability", get_args(Durability)),
    "is-allow-auto-update-schema": _boolean("schema_auto_update", True),
    "schema-validation-enforce": _boolean("schema_validation_enforced", False),
    "bookie-affinity-group": BodyConverter(BookieAffinity, _take_affinity, _show_affinity),
    "broker-isolation": BodyConverter(BrokerIsolationLabels, _take_isolation, _show_isolation),
}  # fmt: skip
"""Shapes by the names of proto/policies.py: of bodies other than a number or a boolean, and of policies that are
returned even if they are not set."""
_ORDER = (
    "message-ttl", "retention", "unsubscribed-retention", "persistence", "deduplication",
    "deduplication-snapshot-interval", "publish-rate", "dispatch-rate", "subscription-dispatch-rate", "subscribe-rate",
    "auto-subscription-creation", "max-producers", "max-consumers", "max-consumers-per-subscription",
    "max-subscriptions-per-topic", "max-topics-per-namespace", "max-unacked-messages-per-consumer",
    "max-unacked-messages-per-subscription", "max-message-size", "subscription-expiration-time", "compaction-threshold",
    "delayed-delivery", "inactive-topic-policies", "subscription-types-enabled", "schema-compatibility-strategy",
    "is-allow-auto-update-schema", "schema-validation-enforce",
)  # fmt: skip
"""The order of the keys in the JSON of a namespace; others follow."""


def _rows() -> Iterator[PolicyRow]:
    for policy in sorted(TABLE, key=lambda each: _ORDER.index(each.name) if each.name in _ORDER else len(_ORDER)):
        if (rest := policy.rest) is not None:
            fields = tuple(each.name for each in policy.fields)
            shape = BODY_CONVERTERS.get(policy.name) or _plain(policy, rest)
            yield PolicyRow(
                rest.namespace, rest.topic, rest.key, shape.kind, fields, shape.take, shape.show, rest.verb,
                rest.by_cluster, rest.topic_verb, rest.tenant,
            )  # fmt: skip


POLICY_ROWS: tuple[PolicyRow, ...] = tuple(_rows())

QUOTA_FIELDS = {
    "destination_storage": ("backlog_quota_bytes",), "message_age": ("backlog_quota_s",),
}  # fmt: skip


def parse_namespace_policies(given: Mapping[str, Any]) -> PolicyFields:
    """Returns the fields of Policies for the policies in the JSON of a namespace. Ignores missing and unknown keys.
    Raises HttpError (400, 412) if a policy is invalid."""
    found = PolicyFields()
    for row in POLICY_ROWS:
        value = given.get(row.key) if row.key else None
        if row.by_cluster:
            for each in convert_value({} if value is None else value, dict[str, row.kind], row.key).values():  # type: ignore[name-defined]
                found |= row.take(each)
        elif value is not None and value != []:
            found |= row.take(convert_value(value, row.kind, row.key))
    for kind, quota in convert_value(given.get("backlog_quota_map") or {}, dict[str, BacklogQuota], "quotas").items():
        found |= parse_quota(quota, kind)
    return found


def convert_value(value: object, kind: Any, name: str) -> Any:
    """Returns `value`, converted to the type `kind`. Raises HttpError (400) if the value cannot be converted; the error
    text begins with `name`."""
    try:
        return msgspec.convert(value, kind, strict=False)  # numbers in quotes, as with Pulsar
    except msgspec.ValidationError as error:
        raise HttpError(f"{name}: {error}") from error


GetPolicyPlace = Callable[[RestRequest], dict[str, str]]


def make_namespace_argument(call: RestRequest) -> dict[str, str]:
    """Returns the argument that names the request's namespace in a call of an operation on policies."""
    return {"namespace": str(call.namespace)}


def make_tenant_argument(call: RestRequest) -> dict[str, str]:
    """Returns the argument that names the request's tenant in a call of an operation on policies."""
    return {"name": call.names["tenant"]}


def make_topic_argument(call: RestRequest) -> dict[str, str]:
    """Returns the argument that names the request's topic in a call of an operation on policies; for a partition, its
    partitioned topic."""
    return {"topic": call.topic.base.full}


async def read_policies(call: RestRequest, place: dict[str, str], *, applied: bool = False) -> Policies:
    """Returns the policies that are set for the tenant, namespace or topic `place` itself; with `applied`, those that
    are in force there. Raises Unauthorized if the caller may not see them, and the other errors of
    `RestRequest.call_local`."""
    operation = op.GET_TENANT_POLICIES if "name" in place else op.GET_POLICIES
    return decode_policies(await call.call_local(operation, **place, applied=applied))


async def change_policies(
    call: RestRequest, place: dict[str, str], fields: PolicyFields, removed: tuple[str, ...] = ()
) -> None:
    """Sets the policies in `fields` for the tenant, namespace or topic `place`. Removes those that are None in
    `fields`, and those that `removed` names, so that they are inherited again. Raises InvalidRequest if the policies
    contradict each other; Unauthorized if the caller may not change them; and the other errors of
    `RestRequest.call_local`."""
    given = {name: value for name, value in fields.items() if value is not None}
    removed = (*removed, *(name for name, value in fields.items() if value is None))
    text = msgspec.json.encode(given).decode()
    operation = op.CHANGE_TENANT_POLICIES if "name" in place else op.CHANGE_POLICIES
    await call.call_local(operation, **place, set=text, remove=removed)


# ------------------------------------------------------------------ each row of the table
def _handlers(row: PolicyRow, place: GetPolicyPlace, name: str) -> tuple[RestHandler, RestHandler, RestHandler]:
    async def show(call: RestRequest) -> object:
        return row.show(await read_policies(call, place(call), applied=call.parse_flag("applied")))

    async def take(call: RestRequest) -> None:
        given: Any = row.kind
        if name == "messageTTL" and "messageTTL" in call.query:
            value: Any = call.parse_number(call.query["messageTTL"], "messageTTL")
        else:
            value = call.parse_json(b"null", given) if call.has_empty_body else call.parse_body(given)
        await change_policies(call, place(call), row.take(value))

    async def remove(call: RestRequest) -> None:
        await change_policies(call, place(call), {}, row.fields)

    for handler, verb in ((show, "get"), (take, "set"), (remove, "remove")):
        handler.__name__ = f"{verb}_{name.replace('/', '_')}"
    return show, take, remove


def _register(row: PolicyRow, name: str, base: str, place: GetPolicyPlace, verb: str) -> None:
    path, kind = f"{base}/{name}", getattr(row.kind, "__name__", str(row.kind))
    show, take, remove = _handlers(row, place, name)
    register_route("GET", path, f"The policy {name}; 204: it is not set.", answer=kind)(show)
    register_route(verb, path, f"Sets the policy {name}.", body=kind)(take)
    register_route("DELETE", path, f"The policy {name} is inherited again.")(remove)


for _row in POLICY_ROWS:
    if _row.namespace:
        _register(_row, _row.namespace, NAMESPACE_PATH, make_namespace_argument, _row.verb)
    if _row.tenant:
        _register(_row, _row.tenant, TENANT_PATH, make_tenant_argument, _row.verb)
    if _row.topic:
        _register(_row, _row.topic, TOPIC_PATH, make_topic_argument, _row.topic_verb)


# ------------------------------------------------------------------ resource groups
class ResourceGroupBody(msgspec.Struct):
    """The JSON body of Pulsar's resource groups. Rates are per second; -1: no limit; None: the rate stays as it is."""

    publishRateInMsgs: int | None = None
    publishRateInBytes: int | None = None
    dispatchRateInMsgs: int | None = None
    dispatchRateInBytes: int | None = None


_GROUP_PATH = "/admin/v2/resourcegroups/{group}"


@register_route("GET", _GROUP_PATH, "The rates of a resource group; -1: no limit.", answer="ResourceGroup")
async def get_resource_group(call: RestRequest) -> object:
    found = await call.call_local(op.GET_RESOURCE_GROUP, name=call.names["group"])
    return ResourceGroupBody(*(getattr(found, rate) or -1 for rate in RESOURCE_GROUP_RATES))


@register_route("PUT", _GROUP_PATH, "Makes a resource group, or changes one.", body="ResourceGroup")
async def set_resource_group(call: RestRequest) -> None:
    given = ResourceGroupBody() if call.has_empty_body else call.parse_body(ResourceGroupBody)
    rates = dict(zip(RESOURCE_GROUP_RATES, msgspec.structs.astuple(given), strict=True))
    limits = {rate: _limit(value, rate) if value else 0 for rate, value in rates.items() if value is not None}
    await call.call_local(op.SET_RESOURCE_GROUP, name=call.names["group"], **limits)


@register_route("POST", NAMESPACE_PATH + "/resourcegroup/{group}", "The namespace is in the resource group.")
async def add_to_resource_group(call: RestRequest) -> None:
    await change_policies(call, make_namespace_argument(call), _take_group(call.names["group"]))


# ------------------------------------------------------------------ quotas of backlogs
def _quotas(base: str, place: GetPolicyPlace) -> None:
    @register_route("GET", base + "/backlogQuotaMap", "The quotas of backlogs, by kind.", answer="{kind: BacklogQuota}")
    async def get_backlog_quotas(call: RestRequest) -> object:
        return make_quota_map(await read_policies(call, place(call), applied=call.parse_flag("applied")))

    @register_route(
        "POST", base + "/backlogQuota", "Sets a quota; `backlogQuotaType` says of which kind.", body="BacklogQuota"
    )
    async def set_backlog_quota(call: RestRequest) -> None:
        await change_policies(call, place(call), parse_quota(call.parse_body(BacklogQuota), _kind(call)))

    @register_route("DELETE", base + "/backlogQuota", "The quota is inherited again.")
    async def remove_backlog_quota(call: RestRequest) -> None:
        kind = _kind(call)
        if kind not in QUOTA_FIELDS:
            raise HttpError("backlogQuotaType is destination_storage or message_age", 412)
        await change_policies(call, place(call), {}, QUOTA_FIELDS[kind])


def _kind(call: RestRequest) -> str:
    return call.query.get("backlogQuotaType", "destination_storage")


_quotas(NAMESPACE_PATH, make_namespace_argument)
_quotas(TOPIC_PATH, make_topic_argument)


# ------------------------------------------------------------------ replication: one cluster
@register_route("GET", NAMESPACE_PATH + "/replication", "The clusters that have the topics: this one.", answer="[name]")
async def get_replication(call: RestRequest) -> object:
    await read_policies(call, make_namespace_argument(call))
    return [call.broker.config.cluster]


@register_route("GET", TOPIC_PATH + "/replication", "204: a topic has none of its own; with `applied` this cluster.",
       answer="[name]")  # fmt: skip
async def get_replication_of_topic(call: RestRequest) -> object:
    await read_policies(call, make_topic_argument(call))
    return [call.broker.config.cluster] if call.parse_flag("applied") else None


def _replication(base: str, place: GetPolicyPlace) -> None:
    @register_route("POST", base + "/replication", "Takes this cluster alone, and keeps nothing.", body="[name]")
    async def set_replication(call: RestRequest) -> None:
        clusters = call.parse_body(list[str])
        if not clusters:
            raise HttpError("ClusterIds should not be null or empty", 412)
        check_own_cluster(call, clusters)
        await read_policies(call, place(call))


_replication(NAMESPACE_PATH, make_namespace_argument)
_replication(TOPIC_PATH, make_topic_argument)


@register_route("DELETE", TOPIC_PATH + "/replication", "Nothing to do: no topic has clusters of its own.")
async def remove_replication(call: RestRequest) -> None:
    await read_policies(call, make_topic_argument(call))


def check_own_cluster(call: RestRequest, clusters: list[str]) -> None:
    """Raises HttpError (412) if `clusters` names a cluster other than this broker's."""
    own = call.broker.config.cluster
    for each in clusters:
        if each != own:
            raise HttpError(f"there is no cluster {each[:100]!r} here, only {own!r}: {NO_REPLICATION}", 412)


# ------------------------------------------------------------------ what has one value here
NO_REPLICATION = "there is no replication between clusters"
UNENCRYPTED_STORED = "not built: an entry that is not encrypted is stored"
NO_TIERED_STORAGE = "there is no tiered storage: ledgers stay on the bookies"
NO_BUNDLE_STEERING = "namespaces are not kept apart from each other: brokerIsolation says which brokers serve one"
UNLIMITED_DISPATCH_RATE = DispatchRate(0, 0)


class UnsupportedPolicy(NamedTuple):
    """A policy of Pulsar that Magnetar does not support. Its GET route returns the fixed value `value`; a request to
    set any other value is refused for the reason `why`; DELETE does nothing."""

    name: str  # last part of the path
    verb: str  # that sets it
    value: object
    why: str
    remove: str = ""  # last part of the path of DELETE; empty: there is none
    applied: object = None  # what is shown as in force, where that is another value
    key: str = ""  # its name among all policies of a namespace; empty: it is not shown there


UNSUPPORTED_NAMESPACE_POLICIES = (
    UnsupportedPolicy("encryptionRequired", "POST", False, UNENCRYPTED_STORED, key="encryption_required"),
    UnsupportedPolicy("offloadThreshold", "PUT", -1, NO_TIERED_STORAGE, key="offload_threshold"),
    UnsupportedPolicy("offloadThresholdInSeconds", "PUT", -1, NO_TIERED_STORAGE, key="offload_threshold_in_seconds"),
    UnsupportedPolicy(
        "offloadDeletionLagMs", "PUT", None, NO_TIERED_STORAGE, "offloadDeletionLagMs", key="offload_deletion_lag_ms"
    ),
    UnsupportedPolicy(
        "offloadPolicies", "POST", None, NO_TIERED_STORAGE, "removeOffloadPolicies", key="offload_policies"
    ),
    UnsupportedPolicy("replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate"),
    UnsupportedPolicy("antiAffinity", "POST", None, NO_BUNDLE_STEERING, "antiAffinity"),
)
UNSUPPORTED_TOPIC_POLICIES = (
    UnsupportedPolicy("offloadPolicies", "POST", None, NO_TIERED_STORAGE, "offloadPolicies"),
    UnsupportedPolicy(
        "replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate", UNLIMITED_DISPATCH_RATE
    ),
)


def _fixed(base: str, place: GetPolicyPlace, row: UnsupportedPolicy) -> None:
    async def show(call: RestRequest) -> object:
        await read_policies(call, place(call))
        return row.applied if row.applied is not None and call.parse_flag("applied") else row.value

    async def take(call: RestRequest) -> None:
        await read_policies(call, place(call))  # who may set, may read
        if (None if call.has_empty_body else call.parse_body(object)) != row.value:
            raise HttpError(f"{row.name} cannot be set: {row.why}", 405)

    async def remove(call: RestRequest) -> None:
        await read_policies(call, place(call))

    called = row.name.replace("/", "_")
    for handler, act in ((show, "get"), (take, "set"), (remove, "remove")):
        handler.__name__ = f"{act}_{called}"
    what = "204: it is never set" if row.value is None else f"Always {msgspec.json.encode(row.value).decode()}"
    register_route("GET", f"{base}/{row.name}", f"{what}: {row.why}.", answer="bool | long | null")(show)
    register_route(row.verb, f"{base}/{row.name}", f"405 for any other value: {row.why}.", body="any")(take)
    if row.remove:
        register_route("DELETE", f"{base}/{row.remove}", "Nothing to do: it is never set.")(remove)


for _each in UNSUPPORTED_NAMESPACE_POLICIES:
    _fixed(NAMESPACE_PATH, make_namespace_argument, _each)
for _each in UNSUPPORTED_TOPIC_POLICIES:
    _fixed(TOPIC_PATH, make_topic_argument, _each)
