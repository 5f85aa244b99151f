"""How grants change, with pulsar-admin's meaning: each function gives the record after the change, or InvalidRequest.

A grant replaces the actions that the role had there. To revoke what was not granted is no error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ...metadata.records import GrantsRecord
from ...proto.errors import InvalidRequest
from ...proto.names import check_role, check_subscription_name
from .core.rights import ACTIONS

GRANTS_MAX = 5000
"""Roles with grants in a namespace, its topics and subscriptions together: a record of the metadata holds 1 MiB."""

Granted = dict[str, tuple[str, ...]]


def grant(record: GrantsRecord, topic: str, role: str, actions: Sequence[str]) -> GrantsRecord:
    """Grants a role its actions. `topic`: its full name, without a partition; empty: the namespace."""
    unknown = sorted({each for each in actions if each not in ACTIONS})
    if unknown or not actions:
        raise InvalidRequest(f"actions are {', '.join(ACTIONS)}, not {', '.join(map(repr, unknown)) or 'none'}")
    given = {check_role(role): tuple(each for each in ACTIONS if each in actions)}
    if not topic:
        return _bounded(replace(record, roles={**record.roles, **given}))
    return _bounded(replace(record, topics={**record.topics, topic: {**record.topics.get(topic, {}), **given}}))


def revoke(record: GrantsRecord, topic: str, role: str) -> GrantsRecord:
    if not topic:
        return replace(record, roles=_without(record.roles, role))
    topics = {**record.topics, topic: _without(record.topics.get(topic, {}), role)}
    return replace(record, topics={name: granted for name, granted in topics.items() if granted})


def grant_subscription(record: GrantsRecord, subscription: str, roles: Sequence[str]) -> GrantsRecord:
    """Sets the roles that may use a subscription: these and no others. InvalidRequest if none is named."""
    if not roles:
        raise InvalidRequest("a subscription's list names at least one role; without a list it takes every consumer")
    named = tuple(dict.fromkeys(check_role(each) for each in roles))
    return _bounded(
        replace(record, subscriptions={**record.subscriptions, check_subscription_name(subscription): named})
    )


def revoke_subscription(record: GrantsRecord, subscription: str, roles: Collection[str]) -> GrantsRecord:
    """Removes roles from a subscription's list. With the last role the list goes, and the subscription takes every
    consumer again, as in Pulsar."""
    left = tuple(each for each in record.subscriptions.get(subscription, ()) if each not in roles)
    lists = {**record.subscriptions, subscription: left}
    return replace(record, subscriptions={name: roles for name, roles in lists.items() if roles})


def without_topic(record: GrantsRecord, topic: str) -> GrantsRecord:
    return replace(record, topics={name: granted for name, granted in record.topics.items() if name != topic})


def _without(granted: Granted, role: str) -> Granted:
    return {name: actions for name, actions in granted.items() if name != role}


def _bounded(record: GrantsRecord) -> GrantsRecord:
    count = len(record.roles) + sum(map(len, record.topics.values())) + sum(map(len, record.subscriptions.values()))
    if count > GRANTS_MAX:
        raise InvalidRequest(f"{count} grants in one namespace are more than {GRANTS_MAX}: grant at the namespace")
    return record
