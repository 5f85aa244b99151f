"""Routes of the policies of namespaces and topics: three for each row of the table of policies.

GET returns what is set there (204: nothing), with `applied=true` what is in force; POST (or PUT) sets it; DELETE makes
it inherited again. At the end are the policies that Pulsar has and Magnetar has not: they have one value, and refuse
any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ...proto import operations as op
from ...proto.policies import Policies, decode
from .call import NAMESPACE, TOPIC, BadRequest, Handler, RestRequest, register_route
from .policies import POLICIES, QUOTA_FIELDS, BacklogQuota, DispatchRate, Fields, PolicyRow, make_quota_map, parse_quota

Place = Callable[[RestRequest], dict[str, str]]


def namespace_argument(call: RestRequest) -> dict[str, str]:
    return {"namespace": str(call.namespace)}


def topic_argument(call: RestRequest) -> dict[str, str]:
    return {"topic": call.topic.base.full}


async def read_policies(call: RestRequest, place: dict[str, str], *, applied: bool = False) -> Policies:
    return decode(await call.call_local(op.GET_POLICIES, **place, applied=applied))


async def change_policies(
    call: RestRequest, place: dict[str, str], fields: Fields, removed: tuple[str, ...] = ()
) -> None:
    """Sets the policies in `fields`. Fields that are None, and those in `removed`, are removed, so that they are
    inherited again."""
    given = {name: value for name, value in fields.items() if value is not None}
    removed = (*removed, *(name for name, value in fields.items() if value is None))
    text = msgspec.json.encode(given).decode()
    await call.call_local(op.CHANGE_POLICIES, **place, set=text, remove=removed)


# ------------------------------------------------------------------ each row of the table
def _handlers(row: PolicyRow, place: Place, name: str) -> tuple[Handler, Handler, Handler]:
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
        handler.__name__ = f"{verb}_{name}"
    return show, take, remove


def _register(row: PolicyRow, name: str, base: str, place: Place, verb: str) -> None:
    path, kind = f"{base}/{name}", getattr(row.kind, "__name__", str(row.kind))
    show, take, remove = _handlers(row, place, name)
    register_route("GET", path, f"The policy {name}; 204: it is not set.", answer=kind)(show)
    register_route(verb, path, f"Sets the policy {name}.", body=kind)(take)
    register_route("DELETE", path, f"The policy {name} is inherited again.")(remove)


for _row in POLICIES:
    if _row.namespace:
        _register(_row, _row.namespace, NAMESPACE, namespace_argument, _row.verb)
    if _row.topic:
        _register(_row, _row.topic, TOPIC, topic_argument, _row.topic_verb)


# ------------------------------------------------------------------ quotas of backlogs
def _quotas(base: str, place: Place) -> None:
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
            raise BadRequest("backlogQuotaType is destination_storage or message_age", 412)
        left = await read_policies(call, place(call))
        other = left.backlog_quota_s if kind == "destination_storage" else left.backlog_quota_bytes
        await change_policies(
            call, place(call), {}, (*QUOTA_FIELDS[kind], *(() if other else ("backlog_quota_policy",)))
        )


def _kind(call: RestRequest) -> str:
    return call.query.get("backlogQuotaType", "destination_storage")


_quotas(NAMESPACE, namespace_argument)
_quotas(TOPIC, topic_argument)


# ------------------------------------------------------------------ replication: one cluster
@register_route("GET", NAMESPACE + "/replication", "The clusters that have the topics: this one.", answer="[name]")
async def get_replication(call: RestRequest) -> object:
    await read_policies(call, namespace_argument(call))
    return [call.broker.config.cluster]


@register_route("GET", TOPIC + "/replication", "204: a topic has none of its own; with `applied` this cluster.",
       answer="[name]")  # fmt: skip
async def get_replication_of_topic(call: RestRequest) -> object:
    await read_policies(call, topic_argument(call))
    return [call.broker.config.cluster] if call.parse_flag("applied") else None


def _replication(base: str, place: Place) -> None:
    @register_route("POST", base + "/replication", "Takes this cluster alone, and keeps nothing.", body="[name]")
    async def set_replication(call: RestRequest) -> None:
        clusters = call.parse_body(list[str])
        if not clusters:
            raise BadRequest("ClusterIds should not be null or empty", 412)
        check_own_cluster(call, clusters)
        await read_policies(call, place(call))


_replication(NAMESPACE, namespace_argument)
_replication(TOPIC, topic_argument)


@register_route("DELETE", TOPIC + "/replication", "Nothing to do: no topic has clusters of its own.")
async def remove_replication(call: RestRequest) -> None:
    await read_policies(call, topic_argument(call))


def check_own_cluster(call: RestRequest, clusters: list[str]) -> None:
    """Raises BadRequest (412) if `clusters` names another cluster than this one."""
    own = call.broker.config.cluster
    for each in clusters:
        if each != own:
            raise BadRequest(f"there is no cluster {each[:100]!r} here, only {own!r}: {NO_REPLICATION}", 412)


# ------------------------------------------------------------------ what has one value here
NO_REPLICATION = "there is no replication between clusters"
NO_STORAGE = "there is no tiered storage: ledgers stay on the bookies"
NO_GROUPS = "bookies have racks and no groups: `magnetar bookies set-rack` says where one is"
NO_STEERING = "which broker owns a bundle is not steered"
UNLIMITED = DispatchRate(0, 0)


class FixedPolicy(NamedTuple):
    """A policy of Pulsar that Magnetar does not support: GET returns a fixed value, any other value is refused, DELETE
    does nothing."""

    name: str  # last part of the path
    verb: str  # that sets it
    value: object
    why: str
    remove: str = ""  # last part of the path of DELETE; empty: there is none
    applied: object = None  # what is shown as in force, where that is another value


OF_NAMESPACES = (
    FixedPolicy("encryptionRequired", "POST", False, "producers encrypt or not: a broker cannot see it"),
    FixedPolicy("offloadThreshold", "PUT", -1, NO_STORAGE),
    FixedPolicy("offloadThresholdInSeconds", "PUT", -1, NO_STORAGE),
    FixedPolicy("offloadDeletionLagMs", "PUT", None, NO_STORAGE, "offloadDeletionLagMs"),
    FixedPolicy("offloadPolicies", "POST", None, NO_STORAGE, "removeOffloadPolicies"),
    FixedPolicy("replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate"),
    FixedPolicy("persistence/bookieAffinity", "POST", None, NO_GROUPS, "persistence/bookieAffinity"),
    FixedPolicy("antiAffinity", "POST", None, NO_STEERING, "antiAffinity"),
)
OF_TOPICS = (
    FixedPolicy("offloadPolicies", "POST", None, NO_STORAGE, "offloadPolicies"),
    FixedPolicy("replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate", UNLIMITED),
)


def _fixed(base: str, place: Place, row: FixedPolicy) -> None:
    async def show(call: RestRequest) -> object:
        await read_policies(call, place(call))
        return row.applied if row.applied is not None and call.parse_flag("applied") else row.value

    async def take(call: RestRequest) -> None:
        await read_policies(call, place(call))  # who may set, may read
        if (None if call.has_empty_body else call.parse_body(object)) != row.value:
            raise BadRequest(f"{row.name} cannot be set: {row.why}", 405)

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


for _each in OF_NAMESPACES:
    _fixed(NAMESPACE, namespace_argument, _each)
for _each in OF_TOPICS:
    _fixed(TOPIC, topic_argument, _each)
