"""Policies: what an operator sets for a namespace or a topic; everything else is inherited.

A field that is None is inherited: topic > namespace > broker (Pulsar B5). A policy of a partitioned topic is set on the
topic and applies to each of its partitions. On the wire and in the metadata tree policies are one JSON object with only
the fields that are set: `{"message_ttl_s":600}`. The fields, with their types and defaults: proto/applied.py. What they
resolve to: broker/common/config.py. The names by which operators set them: proto/policy_table.py.

0 means "none" or "no limit" wherever a field is a limit. Only the retentions also have -1 (without limit).
`check` raises InvalidRequest, which says what is wrong.
Guarding test: tests/proto/test_policies.py.
"""

from __future__ import annotations

import msgspec

from .errors import InvalidRequest
from .policy_levels import Policies as Policies

LADDERS_MAX = 100
"""Bound of the steps of a back-off ladder; RocketMQ's preset has 16."""


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
    """Decodes policies. Raises InvalidRequest if the text is not valid."""
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


def merge_policies(below: Policies, above: Policies) -> Policies:
    """Returns the policies with each field of `above` that is set, else the field of `below`."""
    given = {name: value for name in NAMES if (value := getattr(above, name)) is not None}
    return msgspec.structs.replace(below, **given)


def complete_retention(policies: Policies) -> Policies:
    """Returns the policies with both parts of retention set: if only the time is given, the size is unlimited, and vice
    versa."""
    found = policies
    for pair in RETENTIONS:
        minutes, mib = (getattr(policies, name) for name in pair)
        if (minutes is None) != (mib is None):
            other = -1 if minutes or mib else 0
            given = (other if value is None else value for value in (minutes, mib))
            found = msgspec.structs.replace(found, **dict(zip(pair, given, strict=True)))
    return found


def without(policies: Policies, *names: str) -> Policies:
    """Returns the policies without the fields `names`, which are then inherited."""
    return msgspec.structs.replace(policies, **dict.fromkeys(names))


def check_properties(properties: dict[str, str]) -> dict[str, str]:
    """Returns the properties unchanged. Raises InvalidRequest if a name is empty, or if they are more than an object
    may have."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in properties.items())
    if "" in properties:
        raise InvalidRequest("a property has a key: KEY=VALUE")
    if len(properties) > PROPERTIES_MAX or size > PROPERTIES_BYTES_MAX:
        text = f"{len(properties)} properties of {size} bytes are too many: at most {PROPERTIES_MAX} are kept"
        raise InvalidRequest(f"{text}, of {PROPERTIES_BYTES_MAX} bytes together")
    return properties


def check(policies: Policies) -> Policies:
    """Returns the policies unchanged. Raises InvalidRequest if a field has an invalid value, or fields contradict each
    other."""
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
