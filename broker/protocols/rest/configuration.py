"""Settings that change while brokers run, as Pulsar's `brokers …-dynamic-config` names and writes them.

They are the policies that namespaces inherit (`DYNAMIC`), and all brokers take them in the place of what each was
started with. One that Pulsar changes at run time, too, is shown by Pulsar's name; both names are taken. A value is
text: lists have commas.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....proto.policies import RETENTIONS, Policies
from ...common.applied import DYNAMIC
from .errors import BadRequest

PULSAR: dict[str, str] = {
    "auto_subscription_creation": "allowAutoSubscriptionCreation",
    "dispatch_rate_bytes": "dispatchThrottlingRatePerTopicInByte",
    "dispatch_rate_messages": "dispatchThrottlingRatePerTopicInMsg",
    "inactive_mode": "brokerDeleteInactiveTopicsMode",
    "max_topics": "maxTopicsPerNamespace",
    "publish_rate_bytes": "maxPublishRatePerTopicInBytes",
    "publish_rate_messages": "maxPublishRatePerTopicInMessages",
    "schema_auto_update": "isAllowAutoUpdateSchemaEnabled",
    "subscribe_rate": "subscribeThrottlingRatePerConsumer",
    "subscribe_rate_period_s": "subscribeRatePeriodPerConsumerInSecond",
    "subscription_dispatch_rate_bytes": "dispatchThrottlingRatePerSubscriptionInByte",
    "subscription_dispatch_rate_messages": "dispatchThrottlingRatePerSubscriptionInMsg",
    "subscription_types": "subscriptionTypesEnabled",
}
"""Ours → Pulsar's: of one meaning and one unit."""
_OURS = {theirs: ours for ours, theirs in PULSAR.items()} | {name: name for name in DYNAMIC}
_LISTS = ("dead_letter_backoff_s", "subscription_types")
SHOWN = tuple(PULSAR.get(name, name) for name in DYNAMIC)


def setting(name: str, act: str) -> str:
    """Returns our name of a setting. 412: it does not change at run time, or is unknown; as Pulsar says it."""
    if name not in _OURS:
        raise BadRequest(f"Can't {act} non-dynamic configuration", 412)
    return _OURS[name]


def taken(name: str, text: str) -> dict[str, Any]:
    """Returns the field of Policies that a value in the path sets. 412: it is no such value."""
    ours = setting(name, "update")
    value = [each.strip() for each in text.split(",") if each.strip()] if ours in _LISTS else text
    try:
        found = msgspec.convert({ours: value}, Policies, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRequest(f"Invalid dynamic-config value: {error}", 412) from error
    return {ours: getattr(found, ours)}


def removed(name: str) -> tuple[str, ...]:
    """Returns the fields that are inherited again: what is set together goes together."""
    ours = setting(name, "delete")
    return next((pair for pair in RETENTIONS if ours in pair), (ours,))


def shown(policies: Policies) -> dict[str, str]:
    """Returns the settings that are set, by name."""
    values = ((name, getattr(policies, name)) for name in DYNAMIC)
    return {PULSAR.get(name, name): written(value) for name, value in values if value is not None}


def written(value: object) -> str:
    """Returns a value as Java writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
