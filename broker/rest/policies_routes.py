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
from .call import NAMESPACE, TOPIC, BadRequest, Call, Handler, route
from .policies import POLICIES, QUOTA_FIELDS, BacklogQuota, DispatchRate, Fields, Row, show_quotas, take_quota

Place = Callable[[Call], dict[str, str]]


def of_namespace(call: Call) -> dict[str, str]:
    return {"namespace": str(call.namespace)}


def of_topic(call: Call) -> dict[str, str]:
    return {"topic": call.topic.base.full}


async def read(call: Call, place: dict[str, str], *, applied: bool = False) -> Policies:
    return decode(await call.admin(op.GET_POLICIES, **place, applied=applied))


async def change(call: Call, place: dict[str, str], fields: Fields, removed: tuple[str, ...] = ()) -> None:
    """Sets the policies in `fields`; those that are None, and those in `removed`, are inherited again."""
    given = {name: value for name, value in fields.items() if value is not None}
    removed = (*removed, *(name for name, value in fields.items() if value is None))
    text = msgspec.json.encode(given).decode()
    await call.admin(op.CHANGE_POLICIES, **place, set=text, remove=removed)


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
@route("GET", NAMESPACE + "/replication", "The clusters that have the topics: this one.", answer="[name]")
async def get_replication(call: Call) -> object:
    await read(call, of_namespace(call))
    return [call.broker.config.cluster]


@route("GET", TOPIC + "/replication", "204: a topic has none of its own; with `applied` this cluster.",
       answer="[name]")  # fmt: skip
async def get_replication_of_topic(call: Call) -> object:
    await read(call, of_topic(call))
    return [call.broker.config.cluster] if call.flag("applied") else None


def _replication(base: str, place: Place) -> None:
    @route("POST", base + "/replication", "Takes this cluster alone, and keeps nothing.", body="[name]")
    async def set_replication(call: Call) -> None:
        clusters = call.json(list[str])
        if not clusters:
            raise BadRequest("ClusterIds should not be null or empty", 412)
        check_clusters(call, clusters)
        await read(call, place(call))


_replication(NAMESPACE, of_namespace)
_replication(TOPIC, of_topic)


@route("DELETE", TOPIC + "/replication", "Nothing to do: no topic has clusters of its own.")
async def remove_replication(call: Call) -> None:
    await read(call, of_topic(call))


def check_clusters(call: Call, clusters: list[str]) -> None:
    """Raises BadRequest (412) if another cluster than this one is named."""
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


class Fixed(NamedTuple):
    """A policy that Pulsar has and Magnetar has not: GET returns its one value, any other is refused, DELETE does
    nothing."""

    name: str  # last part of the path
    verb: str  # that sets it
    value: object
    why: str
    remove: str = ""  # last part of the path of DELETE; empty: there is none
    applied: object = None  # what is shown as in force, where that is another value


OF_NAMESPACES = (
    Fixed("encryptionRequired", "POST", False, "producers encrypt or not: a broker cannot see it"),
    Fixed("offloadThreshold", "PUT", -1, NO_STORAGE),
    Fixed("offloadThresholdInSeconds", "PUT", -1, NO_STORAGE),
    Fixed("offloadDeletionLagMs", "PUT", None, NO_STORAGE, "offloadDeletionLagMs"),
    Fixed("offloadPolicies", "POST", None, NO_STORAGE, "removeOffloadPolicies"),
    Fixed("replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate"),
    Fixed("persistence/bookieAffinity", "POST", None, NO_GROUPS, "persistence/bookieAffinity"),
    Fixed("antiAffinity", "POST", None, NO_STEERING, "antiAffinity"),
)
OF_TOPICS = (
    Fixed("offloadPolicies", "POST", None, NO_STORAGE, "offloadPolicies"),
    Fixed("replicatorDispatchRate", "POST", None, NO_REPLICATION, "replicatorDispatchRate", UNLIMITED),
)


def _fixed(base: str, place: Place, row: Fixed) -> None:
    async def show(call: Call) -> object:
        await read(call, place(call))
        return row.applied if row.applied is not None and call.flag("applied") else row.value

    async def take(call: Call) -> None:
        await read(call, place(call))  # who may set, may read
        if (None if call.is_empty else call.json(object)) != row.value:
            raise BadRequest(f"{row.name} cannot be set: {row.why}", 405)

    async def remove(call: Call) -> None:
        await read(call, place(call))

    called = row.name.replace("/", "_")
    for handler, act in ((show, "get"), (take, "set"), (remove, "remove")):
        handler.__name__ = f"{act}_{called}"
    what = "204: it is never set" if row.value is None else f"Always {msgspec.json.encode(row.value).decode()}"
    route("GET", f"{base}/{row.name}", f"{what}: {row.why}.", answer="bool | long | null")(show)
    route(row.verb, f"{base}/{row.name}", f"405 for any other value: {row.why}.", body="any")(take)
    if row.remove:
        route("DELETE", f"{base}/{row.remove}", "Nothing to do: it is never set.")(remove)


for _each in OF_NAMESPACES:
    _fixed(NAMESPACE, of_namespace, _each)
for _each in OF_TOPICS:
    _fixed(TOPIC, of_topic, _each)
