"""Policies of namespaces and topics: three routes for each row of the table of policies.

GET answers what is set there (204: nothing), with `applied=true` what is in force; POST (or PUT) sets; DELETE lets it
be inherited again. What Pulsar has and Magnetar has not is at the end: it shows its one value, and takes no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .....proto import wire_pb2 as wire
from .....proto.policies import Policies, decode
from ..call import Call
from ..errors import BadRequest
from ..policies import POLICIES, QUOTA_FIELDS, BacklogQuota, Fields, Row, show_quotas, take_quota
from ..table import NAMESPACE, TOPIC, Handler, route

Place = Callable[[Call], dict[str, str]]


def of_namespace(call: Call) -> dict[str, str]:
    return {"namespace": str(call.namespace)}


def of_topic(call: Call) -> dict[str, str]:
    return {"topic": call.topic.base.full}


async def read(call: Call, place: dict[str, str], *, applied: bool = False) -> Policies:
    found = await call.admin("GetPolicies", wire.PoliciesRequest(**place, applied=applied))
    return decode(found.policies)


async def change(call: Call, place: dict[str, str], fields: Fields, removed: tuple[str, ...] = ()) -> None:
    """A field that is None is inherited again."""
    given = {name: value for name, value in fields.items() if value is not None}
    removed = (*removed, *(name for name, value in fields.items() if value is None))
    text = msgspec.json.encode(given).decode()
    await call.admin("ChangePolicies", wire.ChangePoliciesRequest(**place, set=text, remove=removed))


# ------------------------------------------------------------------ each row of the table
def _handlers(row: Row, place: Place, name: str) -> tuple[Handler, Handler, Handler]:
    async def show(call: Call) -> object:
        return row.show(await read(call, place(call), applied=call.flag("applied")))

    async def take(call: Call) -> None:
        given: Any = row.kind
        if name == "messageTTL" and "messageTTL" in call.query:
            value: Any = call.number(call.query["messageTTL"], "messageTTL")
        else:
            value = call.decoded(b"null", given) if call.is_empty else call.json(given)
        await change(call, place(call), row.take(value))

    async def remove(call: Call) -> None:
        await change(call, place(call), {}, row.fields)

    for handler, verb in ((show, "get"), (take, "set"), (remove, "remove")):
        handler.__name__ = f"{verb}_{name}"
    return show, take, remove


def _register(row: Row, name: str, base: str, place: Place, verb: str) -> None:
    path, kind = f"{base}/{name}", getattr(row.kind, "__name__", str(row.kind))
    show, take, remove = _handlers(row, place, name)
    route("GET", path, f"The policy {name}; 204: it is not set.", answer=kind)(show)
    route(verb, path, f"Sets the policy {name}.", body=kind)(take)
    route("DELETE", path, f"The policy {name} is inherited again.")(remove)


for _row in POLICIES:
    if _row.namespace:
        _register(_row, _row.namespace, NAMESPACE, of_namespace, _row.verb)
    if _row.topic:
        _register(_row, _row.topic, TOPIC, of_topic, _row.topic_verb)


# ------------------------------------------------------------------ quotas of backlogs
def _quotas(base: str, place: Place) -> None:
    @route("GET", base + "/backlogQuotaMap", "The quotas of backlogs, by kind.", answer="{kind: BacklogQuota}")
    async def get_backlog_quotas(call: Call) -> object:
        return show_quotas(await read(call, place(call), applied=call.flag("applied")))

    @route("POST", base + "/backlogQuota", "Sets a quota; `backlogQuotaType` says of which kind.", body="BacklogQuota")
    async def set_backlog_quota(call: Call) -> None:
        await change(call, place(call), take_quota(call.json(BacklogQuota), _kind(call)))

    @route("DELETE", base + "/backlogQuota", "The quota is inherited again.")
    async def remove_backlog_quota(call: Call) -> None:
        kind = _kind(call)
        if kind not in QUOTA_FIELDS:
            raise BadRequest("backlogQuotaType is destination_storage or message_age", 412)
        left = await read(call, place(call))
        other = left.backlog_quota_s if kind == "destination_storage" else left.backlog_quota_bytes
        await change(call, place(call), {}, (*QUOTA_FIELDS[kind], *(() if other else ("backlog_quota_policy",))))


def _kind(call: Call) -> str:
    return call.query.get("backlogQuotaType", "destination_storage")


_quotas(NAMESPACE, of_namespace)
_quotas(TOPIC, of_topic)


# ------------------------------------------------------------------ replication: one cluster
def _replication(base: str, place: Place) -> None:
    @route("GET", base + "/replication", "The clusters that have the topics: this one.", answer="[name]")
    async def get_replication(call: Call) -> object:
        await read(call, place(call))
        return [call.broker.config.cluster]

    @route("POST", base + "/replication", "Takes this cluster alone.", body="[name]")
    async def set_replication(call: Call) -> None:
        check_clusters(call, call.json(list[str]))
        await read(call, place(call))


def check_clusters(call: Call, clusters: list[str]) -> None:
    """412: another one than this."""
    for each in clusters:
        if each != call.broker.config.cluster:
            raise BadRequest(f"there is no cluster {each[:100]!r} here, only {call.broker.config.cluster!r}", 412)


_replication(NAMESPACE, of_namespace)
_replication(TOPIC, of_topic)

# ------------------------------------------------------------------ what has one value here
FIXED: tuple[tuple[str, str, object, str], ...] = (
    ("encryptionRequired", "POST", False, "producers encrypt or not: a broker cannot see it"),
    ("offloadThreshold", "PUT", -1, "there is no tiered storage"),
    ("offloadThresholdInSeconds", "PUT", -1, "there is no tiered storage"),
    ("offloadPolicies", "POST", None, "there is no tiered storage"),
    ("replicatorDispatchRate", "POST", None, "there is no replication between clusters"),
)
"""Last part of the path, verb, value, why."""


def _fixed(base: str, place: Place, name: str, verb: str, value: object, why: str) -> None:
    async def show(call: Call) -> object:
        await read(call, place(call))
        return value

    async def take(call: Call) -> None:
        await read(call, place(call))
        if call.json(object) != value:
            raise BadRequest(f"{name} cannot be set: {why}", 405)

    show.__name__, take.__name__ = f"get_{name}", f"set_{name}"
    route("GET", f"{base}/{name}", f"One value: {why}.", answer="bool | long | null")(show)
    route(verb, f"{base}/{name}", f"Takes that value alone: {why}.", body="bool | long")(take)


for _each in FIXED:
    _fixed(NAMESPACE, of_namespace, *_each)
