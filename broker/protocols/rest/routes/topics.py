"""Topics: their lists, partitions, life, and compaction."""

from __future__ import annotations

import msgspec

from .....proto import operations as op
from .....proto.errors import InvalidRequest, NotFound
from .....proto.policies import check_properties
from ..call import Call
from ..errors import BadRequest
from ..table import TOPIC, route
from .messages import message_id
from .policies import NO_STORAGE

LIST = "/admin/v2/{domain:domain}/{tenant}/{namespace}"


class Partitioned(msgspec.Struct):
    """The body of a partitioned topic."""

    partitions: int
    properties: dict[str, str] | None = None


async def _names(call: Call, *, partitions: bool) -> list[str]:
    names = await call.admin(op.LIST_TOPICS, namespace=str(call.namespace), partitions=partitions)
    return [name for name in names if name.startswith(call.names["domain"] + ":")]


@route("GET", LIST, "The topics of a namespace, partitions one by one.", answer="[full name]")
async def list_topics(call: Call) -> object:
    return await _names(call, partitions=True)


@route("GET", LIST + "/partitioned", "The partitioned topics.", answer="[full name]")
async def list_partitioned(call: Call) -> object:
    single = set(await _names(call, partitions=True))
    return [name for name in await _names(call, partitions=False) if name not in single]


# ------------------------------------------------------------------ partitions
def _partitions(call: Call) -> int:
    """The number in the body: alone, or with properties. 406: it is below 1."""
    of_metadata = "partitioned-topic-metadata" in call.headers.get("content-type", "") or call.body[:1] == b"{"
    count = call.json(Partitioned).partitions if of_metadata else call.json(int)
    if count < 1:
        raise BadRequest(f"a partitioned topic has 1 partition or more, not {count}", 406)
    if count >= 1 << 31:
        raise BadRequest(f"{count} partitions are too many", 412)
    return count


@route("PUT", TOPIC + "/partitions", "Makes a partitioned topic.", body="int | {partitions, properties}")
async def create_partitioned(call: Call) -> None:
    count = _partitions(call)
    given = (call.json(Partitioned).properties or {}) if call.body[:1] == b"{" else {}
    check_properties(given)
    await call.admin(op.CREATE_TOPIC, name=call.topic.full, partitions=count)
    if given:
        await _note(call, given)


@route("GET", TOPIC + "/partitions",
       "How many partitions; 0: none. With `checkAllowAutoCreation` the topic is made where that is allowed.",
       answer="{partitions, deleted, properties}")  # fmt: skip
async def get_partitions(call: Call) -> object:
    create = call.flag("checkAllowAutoCreation")
    partitions = await call.admin(op.PARTITIONS, topic=call.topic.full, create=create)
    properties: dict[str, str] = {}
    if partitions:
        topic = call.topic.base
        properties = await call.broker.policies.properties(topic.namespace_name, topic)
    return {"partitions": partitions, "deleted": False, "properties": properties}


@route("POST", TOPIC + "/partitions", "More partitions.", body="int")
async def update_partitions(call: Call) -> None:
    try:
        await call.admin(op.UPDATE_TOPIC, name=call.topic.full, partitions=_partitions(call))
    except InvalidRequest as error:
        raise BadRequest(error.message, 422) from error


@route("DELETE", TOPIC + "/partitions", "Deletes a partitioned topic; `force` as of a topic without.", busy=412)
async def delete_partitioned(call: Call) -> None:
    asked: dict[str, object] = {"name": call.topic.full, "force": call.flag("force")}
    await call.authorize(op.DELETE_TOPIC, **asked)
    if not await call.partitions():
        raise NotFound(f"topic {call.topic} has no partitions")
    await call.admin(op.DELETE_TOPIC, **asked)


@route("POST", TOPIC + "/createMissedPartitions", "Nothing to do: partitions are made together.")
async def create_missing(call: Call) -> None:
    await call.authorize(op.UPDATE_TOPIC, name=call.topic.full)
    await call.partitions()


# ------------------------------------------------------------------ the topic
@route("PUT", TOPIC, "Makes a topic without partitions.", body="{key: value} | empty")
async def create_topic(call: Call) -> None:
    given = {} if call.is_empty else check_properties(call.json(dict[str, str]))
    await call.admin(op.CREATE_TOPIC, name=call.topic.full)
    if given:
        await _note(call, given)


async def _note(call: Call, properties: dict[str, str]) -> None:
    await call.admin(op.CHANGE_PROPERTIES, topic=call.topic.base.full, set=properties)


@route("DELETE", TOPIC,
       "Deletes a topic without partitions; with `force` what is open in transactions is aborted first.",
       busy=412)  # fmt: skip
async def delete_topic(call: Call) -> None:
    asked: dict[str, object] = {"name": call.topic.full, "force": call.flag("force")}
    await call.authorize(op.DELETE_TOPIC, **asked)
    if await call.partitions():
        raise BadRequest(f"topic {call.topic} has partitions: DELETE …/partitions", 409)
    await call.admin(op.DELETE_TOPIC, **asked)


@route("POST", TOPIC + "/skipLost",
       "Passes over entries that every replica lost; of one `ledger`; by `force` also what a silent replica may have.",
       answer="[{topic, ranges, subscriptions}]")  # fmt: skip
async def skip_lost(call: Call) -> object:
    only = call.query.get("ledger", "")
    ledger = {"ledger_id": call.number(only, "the parameter ledger")} if only else {}
    found = await call.each_partition(op.SKIP_LOST, force=call.flag("force"), **ledger)
    topics = await call.partitions() or [call.topic]
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
        }
        for topic, reply in zip(topics, found, strict=True)
    ]  # fmt: skip


@route("POST", TOPIC + "/terminate", "It takes no more messages; its last one.", answer="MessageId")
async def terminate_topic(call: Call) -> object:
    await call.one_partition(op.TERMINATE_TOPIC, "POST …/terminate/partitions")
    return message_id(await call.admin(op.TERMINATE_TOPIC, name=call.topic.full))


@route("POST", TOPIC + "/terminate/partitions", "Its partitions take no more messages; the last one of each.",
       answer="{partition: MessageId}")  # fmt: skip
async def terminate_partitions(call: Call) -> object:
    await call.authorize(op.TERMINATE_TOPIC, name=call.topic.full)
    if not await call.partitions():
        raise BadRequest(f"topic {call.topic} has no partitions: POST …/terminate", 405)
    found = await call.each_partition(op.TERMINATE_TOPIC)
    return {str(number): message_id(each) for number, each in enumerate(found)}


@route("DELETE", TOPIC + "/properties", "The property of `key` is gone.")
async def remove_property(call: Call) -> None:
    key = call.query.get("key", "")
    asked = {"topic": call.topic.base.full, "remove": [key]}
    await call.authorize(op.CHANGE_PROPERTIES, **asked)
    if not key:
        raise BadRequest("the parameter key says which property", 412)
    await call.admin(op.CHANGE_PROPERTIES, **asked)


# ------------------------------------------------------------------ compaction
@route("GET", TOPIC + "/compaction", "How the last compaction went; of partitions the one that is least done.",
       answer="{status, lastError}")  # fmt: skip
async def compaction_status(call: Call) -> object:
    found = await call.each_partition(op.COMPACTION_STATUS)
    order = ("ERROR", "RUNNING", "NOT_RUN", "SUCCESS")
    least = min(found, key=lambda each: order.index(each.state) if each.state in order else 0)
    return {"status": least.state, "lastError": least.error}


@route("GET", TOPIC + "/offload", "There is no tiered storage.", answer="{status, lastError}")
async def offload_status(call: Call) -> object:
    await call.authorize(op.COMPACTION_STATUS, name=call.topic.full)
    await call.partitions()
    return {"status": "NOT_RUN", "lastError": "", "firstUnoffloadedMessage": None}


@route("PUT", TOPIC + "/offload", "405: there is no tiered storage.", body="MessageId")
async def offload(call: Call) -> None:
    await call.authorize(op.COMPACT, name=call.topic.full)
    await call.partitions()
    raise BadRequest(f"nothing can be offloaded: {NO_STORAGE}", 405)
