"""Routes of topics: lists, partitions, creation and deletion, statistics, compaction; and routes of schemas.

A schema definition is text; for KEY_VALUE, an object with `key` and `value`, as pulsar-admin writes it. The path of a
schema has no domain, and means the persistent topic. A definition that is invalid for its type is answered with status
422.

Also in this file, below its heading: statistics of topics and partitions (statistics).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from ...proto import operations as op
from ...proto.errors import InvalidRequest, InvalidSchema, MagnetarError, NotFound, NotOwner
from ...proto.names import TopicName
from ...proto.policies import check_properties
from ...proto.pulsar_json import merge_records, schedule_to_json
from ...proto.schema import encode_version, format_schema_definition, make_schema_info
from ...proto.statistics import TopicSchema, TopicStats
from ...runtime.alarm import EventLoopSlices
from ..cluster.bundles_core import find_topic_bundle_name
from ..session import summaries
from ..session.administration import call_operation_at_broker
from ..topic.topic import Topic
from .call import TOPIC_PATH, HttpError, RestRequest, register_route
from .policies import NO_TIERED_STORAGE
from .stats import make_internal_stats_json, make_topic_stats_json
from .subscriptions_routes import make_message_id_json

T = TypeVar("T")
TOPIC_SCHEMAS_PATH = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"


class SchemaBody(msgspec.Struct):
    """The JSON form of a schema in requests. `type`: the name of a schema type; `schema`: the definition; `properties`
    may be null."""

    type: str
    schema: str | None = ""
    properties: dict[str, str] | None = None


def _topic(call: RestRequest) -> str:
    return TopicName.parse(f"persistent://{call.namespace}/{call.names['topic']}").base.full


def _given(call: RestRequest) -> dict[str, object]:
    """Returns the arguments `topic` and `schema` of an operation, from the request. Raises HttpError (422) if the
    definition is invalid."""
    given = call.parse_body(SchemaBody)
    try:
        info = make_schema_info(
            given.type, given.schema or "", given.properties or {}, TopicName.parse(_topic(call)).local
        )
    except InvalidSchema as error:
        raise HttpError(error.message, 422) from error
    return {"topic": _topic(call), "schema": info}


async def _valid(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except InvalidSchema as error:
        raise HttpError(error.message, 422) from error


def _shown_schema(found: TopicSchema) -> dict[str, object]:
    info = found.schema
    return {
        "version": found.version, "type": info.type.name if info.type else "BYTES",
        "timestamp": found.created_ms, "data": format_schema_definition(info), "properties": info.properties,
    }  # fmt: skip


@register_route("GET", TOPIC_SCHEMAS_PATH + "/schema", "The newest schema of the topic.",
       answer="{version, type, timestamp, data, properties}")  # fmt: skip
async def get_schema(call: RestRequest) -> object:
    return _shown_schema(await call.call_local(op.GET_SCHEMA, topic=_topic(call)))


@register_route(
    "GET",
    TOPIC_SCHEMAS_PATH + "/schema/{version}",
    "A version of it.",
    answer="{version, type, timestamp, data, properties}",
)
async def get_schema_version(call: RestRequest) -> object:
    version = encode_version(call.parse_number(call.names["version"], "a version"))
    return _shown_schema(await call.call_local(op.GET_SCHEMA, topic=_topic(call), version=version))


@register_route(
    "GET", TOPIC_SCHEMAS_PATH + "/schemas", "All versions that are not deleted.", answer="{getSchemaResponses: […]}"
)
async def list_schemas(call: RestRequest) -> object:
    found = await call.call_local(op.LIST_SCHEMAS, name=_topic(call))
    return {"getSchemaResponses": [_shown_schema(each) for each in found]}


@register_route("POST", TOPIC_SCHEMAS_PATH + "/schema",
    "Registers a schema. 409: it does not go with those of the topic.",
       body="{type, schema, properties}", answer="{version}")  # fmt: skip
async def post_schema(call: RestRequest) -> object:
    return {"version": await _valid(call.call_local(op.PUT_SCHEMA, **_given(call)))}


@register_route("DELETE", TOPIC_SCHEMAS_PATH + "/schema",
    "Deletes the schema; with `force` what decodes old messages, too.",
       answer="{version}")  # fmt: skip
async def delete_schema(call: RestRequest) -> object:
    version = await call.call_local(op.DELETE_SCHEMA, name=_topic(call), force=call.parse_flag("force"))
    return {"version": -1 if version is None else version}


@register_route("POST", TOPIC_SCHEMAS_PATH + "/compatibility", "Whether a schema could be registered.",
    body="{type, schema, properties}",
       answer="{compatibility, schemaCompatibilityStrategy}")  # fmt: skip
async def test_schema(call: RestRequest) -> object:
    found = await _valid(call.call_local(op.TEST_SCHEMA, **_given(call)))
    return {
        "compatibility": not found.refused,
        "schemaCompatibilityStrategy": found.compatibility.upper(),
    }


@register_route("POST", TOPIC_SCHEMAS_PATH + "/version", "The version of an equal schema.",
    body="{type, schema, properties}",
       answer="{version}")  # fmt: skip
async def find_schema(call: RestRequest) -> object:
    return {"version": await _valid(call.call_local(op.FIND_SCHEMA, **_given(call)))}


@register_route("GET", TOPIC_SCHEMAS_PATH + "/metadata",
    "The places of the versions; Magnetar has them in its metadata.",
       answer="{info, index}")  # fmt: skip
async def schema_metadata(call: RestRequest) -> object:
    found = await call.call_local(op.LIST_SCHEMAS, name=_topic(call))
    index = [{"ledgerId": -1, "entryId": -1, "version": each.version} for each in found]
    return {"info": index[-1] if index else None, "index": index}


@register_route("POST", TOPIC_PATH + "/cancel-delayed",
    "Delivers a delayed message to no subscription: `ledger_id`, `entry_id`, and of a batch perhaps `batch_index`.",
       answer="{cancelled, acknowledged}")  # fmt: skip
async def cancel_delayed(call: RestRequest) -> object:
    place = {  # what is missing is refused by the operation, which knows first whether the caller may ask
        each: call.parse_number(call.query.get(each) or "-1", each, least=-1)
        for each in ("ledger_id", "entry_id", "batch_index")
    }
    found = await call.call_local(op.CANCEL_DELAYED, topic=call.topic.full, **place)
    return {"cancelled": list(found.cancelled), "acknowledged": list(found.acknowledged)}


class ScheduleBody(msgspec.Struct):
    """The JSON form of a schedule in requests: one of `cron`, `everyMs` (an interval in ms) and `atMs` (a time in ms
    since the epoch). The payload is text (`payload`), or base64 (`payloadBase64`). `zone`: the time zone of `cron`;
    `missed`: what is done about missed fires ("skip", "last" or "all")."""

    cron: str = ""
    everyMs: int = 0
    atMs: int = 0
    zone: str = "UTC"
    payload: str = ""
    payloadBase64: str = ""
    key: str = ""
    properties: dict[str, str] | None = None
    missed: str = "skip"


@register_route("POST", TOPIC_PATH + "/schedules/{schedule}",
    "Creates a schedule: one of `cron`, `everyMs` and `atMs`.",
       body="{cron, everyMs, atMs, zone, payload, payloadBase64, key, properties, missed}")  # fmt: skip
async def create_schedule(call: RestRequest) -> None:
    given = call.parse_body(ScheduleBody)
    try:
        payload = b64decode(given.payloadBase64, validate=True) if given.payloadBase64 else given.payload.encode()
    except ValueError as error:
        raise HttpError(f"payloadBase64 is no base64: {error}") from error
    await call.call_local(
        op.CREATE_SCHEDULE, topic=call.topic.full, name=call.names["schedule"], cron=given.cron,
        every_ms=given.everyMs, at_ms=given.atMs, zone=given.zone, payload=payload, key=given.key,
        properties=given.properties or {}, missed=given.missed,
    )  # fmt: skip


@register_route("GET", TOPIC_PATH + "/schedules", "The schedules of a topic.", answer="[{name, cron, …, status}]")
async def list_schedules(call: RestRequest) -> object:
    return [schedule_to_json(each) for each in await call.call_local(op.LIST_SCHEDULES, topic=call.topic.full)]


# ---------------------------------------------------------------------------------------------------- statistics
# Statistics of topics and partitions (stats.py has their form).


StatsAndTopic = tuple[TopicStats, Topic | None]
"""The statistics of a topic, and the topic itself if it is loaded at this broker."""


async def _loaded(call: RestRequest, name: TopicName) -> Topic:
    """Returns the topic, after loading it at this broker. Raises TopicNotFound, NotFound if it is partitioned,
    NotOwner."""
    if await call.broker.catalog.count_existing_partitions(name) and not name.is_partition:
        raise NotFound(f"topic {name} has partitions: GET …/partitioned-stats, or name one of them")
    return await call.broker.load_topic(name)


async def _stats(call: RestRequest, name: TopicName) -> StatsAndTopic:
    topic = await _loaded(call, name)
    precise = call.parse_flag("getPreciseBacklog") or call.parse_flag("getEarliestTimeInBacklog")
    return await summaries.collect_topic_stats(topic, call.broker.endpoint, precise=precise), topic


def _shown(call: RestRequest, found: StatsAndTopic) -> dict[str, Any]:
    publishers, consumers = not call.parse_flag("excludePublishers"), not call.parse_flag("excludeConsumers")
    return make_topic_stats_json(*found, call.meters, publishers=publishers, consumers=consumers)


@register_route(
    "GET", TOPIC_PATH + "/stats", "Statistics of a topic without partitions, or of a partition.", answer="TopicStats"
)
async def stats(call: RestRequest) -> object:
    await call.authorize(op.TOPIC_STATS, name=call.topic.full)
    return _shown(call, await _stats(call, call.topic))


@register_route("GET", TOPIC_PATH + "/partitioned-stats",
    "The sums of all partitions; `perPartition=true`: and each of them.",
       answer="PartitionedTopicStats")  # fmt: skip
async def partitioned_stats(call: RestRequest) -> object:
    found = await _each(call)
    shown = {name.full: _shown(call, each) for name, each in found.items()}
    whole = merge_records(list(shown.values()))
    whole["averageMsgSize"] = whole["bytesInCounter"] / whole["msgInCounter"] if whole["msgInCounter"] else 0.0
    listed = shown if call.query.get("perPartition", "true").lower() != "false" else {}
    return {**whole, "metadata": {"partitions": await _count(call), "deleted": False}, "partitions": listed}


async def _count(call: RestRequest) -> int:
    return await call.broker.catalog.count_existing_partitions(call.topic)


async def _each(call: RestRequest) -> dict[TopicName, StatsAndTopic]:
    """Returns the statistics of each partition; partitions whose broker does not answer now are left out. Raises the
    error of the first partition if none is left, NotFound if the topic is not partitioned."""
    await call.authorize(op.TOPIC_STATS, name=call.topic.full)
    partitions = await call.list_partitions()
    if not partitions:
        raise NotFound(f"topic {call.topic} has no partitions: GET …/stats")
    found: dict[TopicName, StatsAndTopic] = {}
    for name in partitions:
        try:
            found[name] = await _anywhere(call, name)
        except MagnetarError:
            continue
    if not found:
        await _anywhere(call, partitions[0])
    return found


async def _anywhere(call: RestRequest, name: TopicName) -> StatsAndTopic:
    try:
        return await _stats(call, name)
    except NotOwner:
        owner = await call.broker.find_owner(name)
        return await call_operation_at_broker(call.broker.world, owner.endpoint, op.TOPIC_STATS, name=name.full), None


@register_route("GET", "/admin/v2/broker-stats/topics",
    "Statistics of the topics that are loaded in this broker, by bundle.",
       answer="{namespace: {bundle: {domain: {topic: TopicStats}}}}")  # fmt: skip
async def loaded_topics(call: RestRequest) -> object:
    await call.authorize(op.LIST_BROKERS)
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    turns = EventLoopSlices(call.broker.world.clock)
    for topic in list(call.broker.loaded.values()):
        namespace = topic.name.namespace_name
        bundle = find_topic_bundle_name(topic.name, (await call.broker.catalog.get_cached_namespace(namespace)).bundles)
        domain = "persistent" if topic.name.persistent else "non-persistent"
        of_bundle = found.setdefault(str(namespace), {}).setdefault(bundle, {}).setdefault(domain, {})
        of_bundle[topic.name.full] = _shown(
            call, (await summaries.collect_topic_stats(topic, call.broker.endpoint), topic)
        )
        if turns.is_slice_used_up:
            await turns.begin_slice()
    return found


# ------------------------------------------------------------------ internals
@register_route("GET", TOPIC_PATH + "/internalStats", "The ledgers and cursors of a topic, or of a partition.",
       answer="PersistentTopicInternalStats")  # fmt: skip
async def internals(call: RestRequest) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    return await _internals(call, call.topic)


async def _internals(call: RestRequest, name: TopicName) -> dict[str, Any]:
    topic = await _loaded(call, name)
    found = await summaries.collect_topic_stats(topic, call.broker.endpoint)
    return make_internal_stats_json(summaries.collect_internal_stats(topic, 0), found)


@register_route(
    "GET", TOPIC_PATH + "/partitioned-internalStats", "The same of each partition.", answer="{metadata, partitions}"
)
async def partitioned_internals(call: RestRequest) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    found = {}
    for name in await call.list_partitions():
        try:
            found[name.full] = await _internals(call, name)
        except NotOwner:
            owner, world = (await call.broker.find_owner(name)).endpoint, call.broker.world
            of_log = await call_operation_at_broker(world, owner, op.TOPIC_INTERNAL_STATS, name=name.full)
            found[name.full] = make_internal_stats_json(
                of_log, await call_operation_at_broker(world, owner, op.TOPIC_STATS, name=name.full)
            )
    return {"metadata": {"partitions": len(found), "deleted": False, "properties": {}}, "partitions": found}


@register_route(
    "GET", TOPIC_PATH + "/internal-info", "The ledgers as the metadata has them.", answer="ManagedLedgerInfo"
)
async def internal_info(call: RestRequest) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    found = await _internals(call, call.topic)
    ledgers = [
        {name: each[name] for name in ("ledgerId", "entries", "size", "timestamp")} | {"isOffloaded": False}
        for each in found["ledgers"]
    ]
    place = dict(zip(("ledgerId", "entryId"), map(int, found["lastConfirmedEntry"].split(":")), strict=True))
    cursors = {
        name: {"version": 0, "markDelete": each["markDeletePosition"], "cursorsLedgerId": -1}
        for name, each in found["cursors"].items()
    }
    return {
        "version": 0, "creationDate": None, "modificationDate": None, "ledgers": ledgers,
        "terminatedPosition": place if found["state"] == "Terminated" else None, "cursors": cursors,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- topics


TOPIC_LIST_PATH = "/admin/v2/{domain:domain}/{tenant}/{namespace}"


class PartitionedBody(msgspec.Struct):
    """The JSON body of a request that creates a partitioned topic."""

    partitions: int
    properties: dict[str, str] | None = None


async def _names(call: RestRequest, *, partitions: bool) -> list[str]:
    names = await call.call_local(op.LIST_TOPICS, namespace=str(call.namespace), partitions=partitions)
    return [name for name in names if name.startswith(call.names["domain"] + ":")]


@register_route("GET", TOPIC_LIST_PATH, "The topics of a namespace, partitions one by one.", answer="[full name]")
async def list_topics(call: RestRequest) -> object:
    return await _names(call, partitions=True)


@register_route("GET", TOPIC_LIST_PATH + "/partitioned", "The partitioned topics.", answer="[full name]")
async def list_partitioned(call: RestRequest) -> object:
    single = set(await _names(call, partitions=True))
    return [name for name in await _names(call, partitions=False) if name not in single]


# ------------------------------------------------------------------ partitions
def _partitions(call: RestRequest) -> int:
    """Returns the number of partitions in the body, which may also contain properties. Raises HttpError (406 if the
    number is below 1, 412 if it is too large)."""
    of_metadata = "partitioned-topic-metadata" in call.headers.get("content-type", "") or call.body[:1] == b"{"
    count = call.parse_body(PartitionedBody).partitions if of_metadata else call.parse_body(int)
    if count < 1:
        raise HttpError(f"a partitioned topic has 1 partition or more, not {count}", 406)
    if count >= 1 << 31:
        raise HttpError(f"{count} partitions are too many", 412)
    return count


@register_route("PUT", TOPIC_PATH + "/partitions", "Makes a partitioned topic.", body="int | {partitions, properties}")
async def create_partitioned(call: RestRequest) -> None:
    count = _partitions(call)
    given = (call.parse_body(PartitionedBody).properties or {}) if call.body[:1] == b"{" else {}
    check_properties(given)
    await call.call_local(op.CREATE_TOPIC, name=call.topic.full, partitions=count)
    if given:
        await _store_properties(call, given)


@register_route("GET", TOPIC_PATH + "/partitions",
       "How many partitions; 0: none. With `checkAllowAutoCreation` the topic is made where that is allowed.",
       answer="{partitions, deleted, properties}")  # fmt: skip
async def get_partitions(call: RestRequest) -> object:
    create = call.parse_flag("checkAllowAutoCreation")
    partitions = await call.call_local(op.PARTITIONS, topic=call.topic.full, create=create)
    properties: dict[str, str] = {}
    if partitions:
        topic = call.topic.base
        properties = await call.broker.policies.read_properties(topic.namespace_name, topic)
    return {"partitions": partitions, "deleted": False, "properties": properties}


@register_route("POST", TOPIC_PATH + "/partitions", "More partitions.", body="int")
async def update_partitions(call: RestRequest) -> None:
    try:
        await call.call_local(op.UPDATE_TOPIC, name=call.topic.full, partitions=_partitions(call))
    except InvalidRequest as error:
        raise HttpError(error.message, 422) from error


@register_route(
    "DELETE", TOPIC_PATH + "/partitions", "Deletes a partitioned topic; `force` as of a topic without.", busy=412
)
async def delete_partitioned(call: RestRequest) -> None:
    asked: dict[str, object] = {"name": call.topic.full, "force": call.parse_flag("force")}
    await call.authorize(op.DELETE_TOPIC, **asked)
    if not await call.list_partitions():
        raise NotFound(f"topic {call.topic} has no partitions")
    await call.call_local(op.DELETE_TOPIC, **asked)


@register_route("POST", TOPIC_PATH + "/createMissedPartitions", "Nothing to do: partitions are made together.")
async def create_missing(call: RestRequest) -> None:
    await call.authorize(op.UPDATE_TOPIC, name=call.topic.full)
    await call.list_partitions()


# ------------------------------------------------------------------ the topic
@register_route("PUT", TOPIC_PATH, "Makes a topic without partitions.", body="{key: value} | empty")
async def create_topic(call: RestRequest) -> None:
    given = {} if call.has_empty_body else check_properties(call.parse_body(dict[str, str]))
    await call.call_local(op.CREATE_TOPIC, name=call.topic.full)
    if given:
        await _store_properties(call, given)


async def _store_properties(call: RestRequest, properties: dict[str, str]) -> None:
    await call.call_local(op.CHANGE_PROPERTIES, topic=call.topic.base.full, set=properties)


@register_route("DELETE", TOPIC_PATH,
       "Deletes a topic without partitions; with `force` what is open in transactions is aborted first.",
       busy=412)  # fmt: skip
async def delete_topic(call: RestRequest) -> None:
    asked: dict[str, object] = {"name": call.topic.full, "force": call.parse_flag("force")}
    await call.authorize(op.DELETE_TOPIC, **asked)
    if await call.list_partitions():
        raise HttpError(f"topic {call.topic} has partitions: DELETE …/partitions", 409)
    await call.call_local(op.DELETE_TOPIC, **asked)


@register_route("POST", TOPIC_PATH + "/skipLost",
       "Passes over entries that every replica lost; of one `ledger`; by `force` also what a silent replica may have. "
       "With `forgotten` it skips nothing, and ends transactions whose outcomes are lost: by commit or abort.",
       answer="[{topic, ranges, subscriptions, forgotten}]")  # fmt: skip
async def skip_lost(call: RestRequest) -> object:
    only = call.query.get("ledger", "")
    ledger: dict[str, object] = {"ledger_id": call.parse_number(only, "the parameter ledger")} if only else {}
    if decision := call.query.get("forgotten", ""):
        ledger |= {"forgotten": decision, "ledger_id": op.NO_LEDGER}
    found = await call.call_each_partition(op.SKIP_LOST, force=call.parse_flag("force"), **ledger)
    topics = await call.list_partitions() or [call.topic]
    return [
        {
            "topic": topic.full,
            "ranges": [
                {
                    "ledgerId": each.ledger_id, "firstEntryId": each.first_entry, "lastEntryId": each.last_entry,
                    "firstIndex": each.first_index, "endIndex": each.end_index, "forced": each.forced,
                }
                for each in reply.ranges
            ],
            "subscriptions": {each.name: each.messages for each in reply.subscriptions},
            "forgotten": [
                {"txn": str(each.txn), "first": str(each.first), "entries": each.entries, "bytes": each.bytes}
                for each in reply.forgotten
            ],
        }
        for topic, reply in zip(topics, found, strict=True)
    ]  # fmt: skip


@register_route("POST", TOPIC_PATH + "/terminate", "It takes no more messages; its last one.", answer="MessageId")
async def terminate_topic(call: RestRequest) -> object:
    await call.check_unpartitioned(op.TERMINATE_TOPIC, "POST …/terminate/partitions")
    return make_message_id_json(await call.call_local(op.TERMINATE_TOPIC, name=call.topic.full))


@register_route("POST", TOPIC_PATH + "/terminate/partitions",
    "Its partitions take no more messages; the last one of each.",
       answer="{partition: MessageId}")  # fmt: skip
async def terminate_partitions(call: RestRequest) -> object:
    await call.authorize(op.TERMINATE_TOPIC, name=call.topic.full)
    if not await call.list_partitions():
        raise HttpError(f"topic {call.topic} has no partitions: POST …/terminate", 405)
    found = await call.call_each_partition(op.TERMINATE_TOPIC)
    return {str(number): make_message_id_json(each) for number, each in enumerate(found)}


@register_route("DELETE", TOPIC_PATH + "/properties", "The property of `key` is gone.")
async def remove_property(call: RestRequest) -> None:
    key = call.query.get("key", "")
    asked = {"topic": call.topic.base.full, "remove": [key]}
    await call.authorize(op.CHANGE_PROPERTIES, **asked)
    if not key:
        raise HttpError("the parameter key says which property", 412)
    await call.call_local(op.CHANGE_PROPERTIES, **asked)


# ------------------------------------------------------------------ compaction
@register_route("GET", TOPIC_PATH + "/compaction",
    "How the last compaction went; of partitions the one that is least done.",
       answer="{status, lastError}")  # fmt: skip
async def compaction_status(call: RestRequest) -> object:
    found = await call.call_each_partition(op.COMPACTION_STATUS)
    order = ("ERROR", "RUNNING", "NOT_RUN", "SUCCESS")
    least = min(found, key=lambda each: order.index(each.state) if each.state in order else 0)
    return {"status": least.state, "lastError": least.error}


@register_route("GET", TOPIC_PATH + "/offload", "There is no tiered storage.", answer="{status, lastError}")
async def offload_status(call: RestRequest) -> object:
    await call.authorize(op.COMPACTION_STATUS, name=call.topic.full)
    await call.list_partitions()
    return {"status": "NOT_RUN", "lastError": "", "firstUnoffloadedMessage": None}


@register_route("PUT", TOPIC_PATH + "/offload", "405: there is no tiered storage.", body="MessageId")
async def offload(call: RestRequest) -> None:
    await call.authorize(op.COMPACT, name=call.topic.full)
    await call.list_partitions()
    raise HttpError(f"nothing can be offloaded: {NO_TIERED_STORAGE}", 405)
