"""Subscriptions of a topic, or of each partition of a partitioned one."""

from __future__ import annotations

import msgspec

from .....proto import operations as op
from .....proto.errors import AlreadyExists
from .....proto.names import LATEST, MessageId
from ..call import Call
from ..errors import BadRequest
from ..table import SUBSCRIPTION, route


class ResetTo(msgspec.Struct):
    """A message id; Java's ResetCursorData is one with more keys."""

    ledgerId: int
    entryId: int
    partitionIndex: int = -1
    batchIndex: int = -1
    isExcluded: bool = False
    excluded: bool = False
    properties: dict[str, str] | None = None


def _position(call: Call, given: ResetTo) -> MessageId:
    """Returns the position that is given. 412: it is no message id."""
    numbers = (given.ledgerId, given.entryId, given.partitionIndex, given.batchIndex)
    if any(not -1 <= each < 1 << 63 for each in numbers) or max(numbers[2:]) >= 1 << 31:
        raise BadRequest(f"{numbers[0]}:{numbers[1]} is no message id", 412)
    return MessageId(given.ledgerId, given.entryId, given.partitionIndex, given.batchIndex)


@route("PUT", SUBSCRIPTION, "Makes a subscription at a message, `earliest` or `latest` (or nothing).",
       body='MessageId | "earliest" | "latest" | empty')  # fmt: skip
async def create_subscription(call: Call) -> None:
    start, properties = _start(call)
    asked: dict[str, object] = {"name": call.names["subscription"], "properties": properties, "position": start}
    await call.authorize(op.CREATE_SUBSCRIPTION, topic=call.topic.full, **asked)
    partitions = await call.partitions()
    if not partitions:
        await call.admin(op.CREATE_SUBSCRIPTION, topic=call.topic.full, **asked)
        return
    there = 0
    for each in partitions:
        try:
            await call.anywhere(op.CREATE_SUBSCRIPTION, each, **asked)
        except AlreadyExists:
            there += 1
    if there == len(partitions):
        raise AlreadyExists(f"subscription {call.names['subscription']!r} of topic {call.topic} exists already")


def _start(call: Call) -> tuple[MessageId, dict[str, str]]:
    if call.is_empty:
        return MessageId(*LATEST), {}
    if call.body.lstrip()[:1] == b'"':
        text = call.json(str)
        if text not in ("earliest", "latest"):
            raise BadRequest(f'the body is "earliest", "latest" or a message id, not {text[:40]!r}')
        return MessageId.parse(text), {}
    given = call.json(ResetTo)
    return _position(call, given), given.properties or {}


@route("POST", SUBSCRIPTION + "/resetcursor", "To a message.", body="MessageId + isExcluded", busy=412)
async def reset_to_message(call: Call) -> None:
    given = call.json(ResetTo)
    to = _position(call, given)
    partitioned = not call.topic.is_partition and given.partitionIndex < 0 and given.ledgerId >= 0
    asked: dict[str, object] = {
        "name": call.names["subscription"], "message_id": to, "exclude": given.isExcluded or given.excluded,
    }  # fmt: skip
    await call.authorize(op.RESET_SUBSCRIPTION, topic=call.topic.full, **asked)
    if partitioned and to.ledger_id < LATEST.ledger_id and await call.partitions():
        raise BadRequest(f"topic {call.topic} has partitions, and a message id is of one: name it", 405)
    await call.each_partition(op.RESET_SUBSCRIPTION, **asked)


@route("POST", SUBSCRIPTION + "/skip/{number}", "The next so many messages count as acknowledged.")
async def skip(call: Call) -> None:
    number = call.number(call.names["number"], "the number of messages")
    asked: dict[str, object] = {"name": call.names["subscription"], "messages": number}
    await call.one_partition(op.SKIP_MESSAGES, "skip messages of one of them", **asked)
    await call.admin(op.SKIP_MESSAGES, topic=call.topic.full, **asked)


@route("POST", SUBSCRIPTION + "/expireMessages", "Everything up to a message counts as acknowledged.", body="MessageId")
async def expire_to_message(call: Call) -> None:
    asked = {"name": call.names["subscription"], "message_id": _position(call, call.json(ResetTo))}
    await call.admin(op.EXPIRE_MESSAGES, topic=call.topic.full, **asked)


# ------------------------------------------------------------------ properties
@route("GET", SUBSCRIPTION + "/properties", "Its properties.", answer="{name: value}")
async def get_properties(call: Call) -> object:
    asked = {"name": call.names["subscription"], "force": call.flag("force")}
    return (await call.each_partition(op.GET_SUBSCRIPTION_PROPERTIES, **asked))[0]


@route("GET", SUBSCRIPTION + "/analyzeBacklog", "Counts the backlog by reading it.",
       answer="AnalyzeSubscriptionBacklogResult")  # fmt: skip
@route("POST", SUBSCRIPTION + "/analyzeBacklog", "The same.", body="empty", answer="AnalyzeSubscriptionBacklogResult")
async def analyze_backlog(call: Call) -> object:
    if not call.is_empty:
        raise BadRequest("the backlog is counted from its beginning: send no position", 412)
    asked = {"name": call.names["subscription"], "force": call.flag("force")}
    found = await call.admin(op.ANALYZE_BACKLOG, topic=call.topic.full, **asked)
    return {
        "entries": found.entries, "messages": found.messages, "markerMessages": 0,
        "filterRejectedEntries": 0, "filterAcceptedEntries": found.entries, "filterRescheduledEntries": 0,
        "filterRejectedMessages": 0, "filterAcceptedMessages": found.messages, "filterRescheduledMessages": 0,
        "aborted": not found.complete,
    }  # fmt: skip
