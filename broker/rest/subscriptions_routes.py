"""Routes of the subscriptions of a topic, or of each of its partitions.

Also in this file, below its heading: routes of messages (messages).
"""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from ...proto import operations as op
from ...proto.compression import decompress, decompress_to_mapping
from ...proto.entry import MANY_PROPERTIES, EntryHeader, decode_properties, parse_entry
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import AlreadyExists, BackPressure, NotFound
from ...proto.names import LATEST, MessageId, Position
from ...runtime.budget import MemoryBudget
from ..log.unfolding import run_in_thread_if_slow
from ..session.backlogs import PEEK_MESSAGES_MAX
from .call import SUBSCRIPTION_PATH, TOPIC_PATH, HttpError, RestRequest, register_route


class ResetPosition(msgspec.Struct):
    """The JSON body of a request that resets a subscription: a message id (`batchIndex` -1: the whole entry). The body
    may also be Java's ResetCursorData, which has more keys. `isExcluded`, `excluded`: True to begin after this message,
    and not at it."""

    ledgerId: int
    entryId: int
    partitionIndex: int = -1
    batchIndex: int = -1
    isExcluded: bool = False
    excluded: bool = False
    properties: dict[str, str] | None = None


def _position(call: RestRequest, given: ResetPosition) -> MessageId:
    """Returns the message id in the body. Raises HttpError (412) if a number is out of range."""
    numbers = (given.ledgerId, given.entryId, given.partitionIndex, given.batchIndex)
    if any(not -1 <= each < 1 << 63 for each in numbers) or max(numbers[2:]) >= 1 << 31:
        raise HttpError(f"{numbers[0]}:{numbers[1]} is no message id", 412)
    return MessageId(given.ledgerId, given.entryId, given.partitionIndex, given.batchIndex)


@register_route("PUT", SUBSCRIPTION_PATH, "Makes a subscription at a message, `earliest` or `latest` (or nothing).",
       body='MessageId | "earliest" | "latest" | empty')  # fmt: skip
async def create_subscription(call: RestRequest) -> None:
    start, properties = _start(call)
    asked: dict[str, object] = {"name": call.names["subscription"], "properties": properties, "position": start}
    await call.authorize(op.CREATE_SUBSCRIPTION, topic=call.topic.full, **asked)
    partitions = await call.list_partitions()
    if not partitions:
        await call.call_local(op.CREATE_SUBSCRIPTION, topic=call.topic.full, **asked)
        return
    there = 0
    for each in partitions:
        try:
            await call.call_topic_owner(op.CREATE_SUBSCRIPTION, each, **asked)
        except AlreadyExists:
            there += 1
    if there == len(partitions):
        raise AlreadyExists(f"subscription {call.names['subscription']!r} of topic {call.topic} exists already")


def _start(call: RestRequest) -> tuple[MessageId, dict[str, str]]:
    if call.has_empty_body:
        return MessageId(*LATEST), {}
    if call.body.lstrip()[:1] == b'"':
        text = call.parse_body(str)
        if text not in ("earliest", "latest"):
            raise HttpError(f'the body is "earliest", "latest" or a message id, not {text[:40]!r}')
        return MessageId.parse(text), {}
    given = call.parse_body(ResetPosition)
    return _position(call, given), given.properties or {}


@register_route("POST", SUBSCRIPTION_PATH + "/resetcursor", "To a message.", body="MessageId + isExcluded", busy=412)
async def reset_to_message(call: RestRequest) -> None:
    given = call.parse_body(ResetPosition)
    to = _position(call, given)
    partitioned = not call.topic.is_partition and given.partitionIndex < 0 and given.ledgerId >= 0
    asked: dict[str, object] = {
        "name": call.names["subscription"], "message_id": to, "exclude": given.isExcluded or given.excluded,
    }  # fmt: skip
    await call.authorize(op.RESET_SUBSCRIPTION, topic=call.topic.full, **asked)
    if partitioned and to.ledger_id < LATEST.ledger_id and await call.list_partitions():
        raise HttpError(f"topic {call.topic} has partitions, and a message id is of one: name it", 405)
    await call.call_each_partition(op.RESET_SUBSCRIPTION, **asked)


@register_route("POST", SUBSCRIPTION_PATH + "/skip/{number}", "The next so many messages count as acknowledged.")
async def skip(call: RestRequest) -> None:
    number = call.parse_number(call.names["number"], "the number of messages")
    asked: dict[str, object] = {"name": call.names["subscription"], "messages": number}
    await call.check_unpartitioned(op.SKIP_MESSAGES, "skip messages of one of them", **asked)
    await call.call_local(op.SKIP_MESSAGES, topic=call.topic.full, **asked)


@register_route(
    "POST",
    SUBSCRIPTION_PATH + "/expireMessages",
    "Everything up to a message counts as acknowledged.",
    body="MessageId",
)
async def expire_to_message(call: RestRequest) -> None:
    asked = {"name": call.names["subscription"], "message_id": _position(call, call.parse_body(ResetPosition))}
    await call.call_local(op.EXPIRE_MESSAGES, topic=call.topic.full, **asked)


# ------------------------------------------------------------------ properties
@register_route("GET", SUBSCRIPTION_PATH + "/properties", "Its properties.", answer="{name: value}")
async def get_properties(call: RestRequest) -> object:
    asked = {"name": call.names["subscription"], "force": call.parse_flag("force")}
    return (await call.call_each_partition(op.GET_SUBSCRIPTION_PROPERTIES, **asked))[0]


@register_route("GET", SUBSCRIPTION_PATH + "/analyzeBacklog", "Counts the backlog by reading it.",
       answer="AnalyzeSubscriptionBacklogResult")  # fmt: skip
@register_route(
    "POST", SUBSCRIPTION_PATH + "/analyzeBacklog", "The same.", body="empty", answer="AnalyzeSubscriptionBacklogResult"
)
async def analyze_backlog(call: RestRequest) -> object:
    if not call.has_empty_body:
        raise HttpError("the backlog is counted from its beginning: send no position", 412)
    asked = {"name": call.names["subscription"], "force": call.parse_flag("force")}
    found = await call.call_local(op.ANALYZE_BACKLOG, topic=call.topic.full, **asked)
    return {
        "entries": found.entries, "messages": found.messages, "markerMessages": 0,
        "filterRejectedEntries": found.unwanted_entries,
        "filterAcceptedEntries": found.entries - found.unwanted_entries, "filterRescheduledEntries": 0,
        "filterRejectedMessages": found.unwanted_messages,
        "filterAcceptedMessages": found.messages - found.unwanted_messages, "filterRescheduledMessages": 0,
        "aborted": not found.complete,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ messages
# Routes of messages: ids, and entries as Pulsar's tools read them: the payload, decompressed, with the rest in headers.
#
# The payload of a batch has all its messages, one after the other, as they are stored; `X-Pulsar-num-batch-message`
# says how many. An encrypted payload, and a chunk of a message, is returned as it is stored.
#
# A payload may decompress to a thousand times its size. Memory for it is reserved before (`PayloadResponse`), until it
# is sent; if there is none, the answer is 429 and the caller must repeat the request.


BODY_PIECE_BYTES = 64 << 10
"""A response is sent in pieces of this size in bytes."""
NAME_ONE_PARTITION = "name one of them"
HEADERS_BYTES_MAX = 16 << 10
"""Most bytes of all headers with the metadata of a message: Java's clients accept 64 KiB of headers."""


def make_message_id_json(found: MessageId) -> dict[str, int]:
    shown = {"ledgerId": found.ledger_id, "entryId": found.entry_id, "partitionIndex": found.partition}
    return shown if found.batch_index < 0 else {**shown, "batchIndex": found.batch_index}


@register_route("GET", TOPIC_PATH + "/lastMessageId", "The id of the last message.", answer="MessageId")
async def last_message_id(call: RestRequest) -> object:
    await call.check_unpartitioned(op.LAST_MESSAGE_ID, NAME_ONE_PARTITION)
    return make_message_id_json(await call.call_local(op.LAST_MESSAGE_ID, name=call.topic.full))


@register_route("GET", TOPIC_PATH + "/messageid/{milliseconds}", "The id of the first message published then or later.",
       answer="MessageId")  # fmt: skip
async def message_id_by_time(call: RestRequest) -> object:
    when = call.parse_number(call.names["milliseconds"], "the time in milliseconds")
    await call.check_unpartitioned(op.MESSAGE_ID_BY_TIME, NAME_ONE_PARTITION, publish_time_ms=when)
    return make_message_id_json(
        await call.call_local(op.MESSAGE_ID_BY_TIME, topic=call.topic.full, publish_time_ms=when)
    )


class _Place(msgspec.Struct):
    ledgerId: int
    entryId: int


@register_route(
    "PUT", TOPIC_PATH + "/backlogSize", "The bytes that are stored after a message.", body="MessageId", answer="long"
)
async def backlog_size(call: RestRequest) -> object:
    given = call.parse_body(_Place)
    if not (-1 <= given.ledgerId < 1 << 63 and -1 <= given.entryId < 1 << 63):
        raise HttpError("this is no message id", 412)
    return await call.call_local(
        op.BACKLOG_SIZE, topic=call.topic.full, position=Position(given.ledgerId, given.entryId)
    )


# ------------------------------------------------------------------ entries
@register_route(
    "GET", SUBSCRIPTION_PATH + "/position/{number}", "The n-th entry of the backlog, from 1.", answer="payload"
)
async def peek(call: RestRequest) -> Response:
    number = call.parse_number(call.names["number"], "the number", least=1)
    name, messages = call.names["subscription"], number
    await call.check_unpartitioned(op.PEEK_MESSAGES, NAME_ONE_PARTITION, name=name, messages=1)
    if number > PEEK_MESSAGES_MAX:
        raise HttpError(f"only the first {PEEK_MESSAGES_MAX} can be looked at", 412)
    while True:
        entries = await call.call_local(op.PEEK_MESSAGES, topic=call.topic.full, name=name, messages=messages)
        if len(entries) >= number:
            return await _entry(call, entries[number - 1])
        if messages == PEEK_MESSAGES_MAX or sum(_count(each) for each in entries) < messages:
            raise NotFound(f"the backlog has no entry {number} that can be looked at")
        messages = min(2 * messages, PEEK_MESSAGES_MAX)


def _count(found: Any) -> int:
    return parse_entry(found.entry)[1].num_messages


@register_route("GET", TOPIC_PATH + "/ledger/{ledger}/entry/{entry}", "An entry by its id.", answer="payload")
async def get_message(call: RestRequest) -> Response:
    ledger, entry = (call.parse_number(call.names[each], f"the {each}") for each in ("ledger", "entry"))
    found = await call.call_local(op.GET_MESSAGE, topic=call.topic.full, ledger_id=ledger, entry_id=entry)
    return await _entry(call, found[0])


@register_route("GET", TOPIC_PATH + "/examinemessage",
    "The n-th message from one end (`initialPosition`, `messagePosition`).",
       answer="payload")  # fmt: skip
async def examine_message(call: RestRequest) -> Response:
    start = call.query.get("initialPosition", "latest").lower()
    if start not in ("latest", "earliest"):
        raise HttpError("initialPosition is latest or earliest", 412)
    number = call.parse_number(call.query.get("messagePosition", "1"), "messagePosition", least=1)
    asked = {"from_latest": start == "latest", "number": number}
    await call.check_unpartitioned(op.EXAMINE_MESSAGES, NAME_ONE_PARTITION, **asked)
    return await _entry(call, (await call.call_local(op.EXAMINE_MESSAGES, topic=call.topic.full, **asked))[0])


async def _entry(call: RestRequest, found: Any) -> Response:
    """Returns the response with an entry as its body. Raises CorruptEntry if the payload cannot be decompressed,
    BackPressure if there is no memory for the decompressed payload."""
    index, header = parse_entry(found.entry)
    metadata = header.metadata
    headers: dict[str, str | None] = {"X-Pulsar-Message-ID": f"{found.ledger_id}:{found.entry_id}"}
    headers |= _headers(metadata)
    if index >= 0:
        headers["X-Pulsar-Broker-Entry-METADATA-index"] = str(index)
    is_folded = metadata.compression > 0 and not metadata.encryption_keys and metadata.num_chunks_from_msg <= 1
    size = header.uncompressed_size if is_folded else len(found.entry) - header.payload_offset
    if header.batched:
        headers["X-Pulsar-num-batch-message"] = str(header.num_messages)
        headers["X-Pulsar-batch-size"] = str(size)
    answer = PayloadResponse(call.broker.memory.answers, size)
    try:
        part = memoryview(found.entry)[header.payload_offset :]
        answer.payload = (
            await run_in_thread_if_slow(found.entry, call.broker.world, _unfolded, header, part) if is_folded else part
        )
    except BaseException:
        answer.release()
        raise
    # Java's admin client compares the case of names, which starlette's `headers` do not keep
    answer.raw_headers.extend(_encoded(headers))
    return answer


def _encoded(headers: dict[str, str | None]) -> list[tuple[bytes, bytes]]:
    """Encodes the headers that have a value, up to HEADERS_BYTES_MAX bytes together. The header X-Magnetar-Left-Out
    lists the names of those that are None or do not fit."""
    found, left_out, room = [], [], HEADERS_BYTES_MAX
    for name, value in headers.items():
        encoded = quote(value, safe=_SAFE).encode() if value and len(value) <= room else b""
        if 0 < len(encoded) <= room:
            room -= len(encoded)
            found.append((name.encode(), encoded))
        elif value != "":
            left_out.append(name)
    return [*found, (b"X-Magnetar-Left-Out", ", ".join(left_out).encode())] if left_out else found


def _unfolded(header: EntryHeader, part: memoryview) -> memoryview:
    if not header.uncompressed_size:
        return memoryview(decompress(header.metadata.compression, bytes(part), 0))
    return memoryview(decompress_to_mapping(header.metadata.compression, bytes(part), header.uncompressed_size))


class PayloadResponse(Response):
    """A response with the payload of a message. The payload is sent in pieces, as fast as the client reads. Memory for
    it stays reserved until it is sent."""

    def __init__(self, memory: MemoryBudget, size: int) -> None:
        """Reserves memory for a payload of `size` bytes. Raises BackPressure if there is none."""
        self._memory, self._size = memory, 0
        if memory.held + size > memory.limit:
            raise BackPressure(f"memory is short: a payload of {size} bytes has no room now, ask again")
        super().__init__(b"", 200, media_type="application/octet-stream")
        self._size = size
        memory.held += size
        self.payload: memoryview = memoryview(b"")
        self.headers["content-length"] = str(size)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for begin in range(0, self._size, BODY_PIECE_BYTES):
                body = bytes(self.payload[begin : begin + BODY_PIECE_BYTES])
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.release()

    def release(self) -> None:
        """Releases the reserved memory. Idempotent."""
        self._memory.held -= self._size
        self._size = 0


_SAFE = " !\"#$%&'()*+,/:;<=>?@[]^`{|}~\\"
"""Characters that are not quoted in a header."""


def _headers(metadata: MessageMetadata) -> dict[str, str | None]:
    """Returns the headers with the metadata of a message; None: the value is too large."""
    headers: dict[str, str | None] = {
        "X-Pulsar-publish-time": _time(metadata.publish_time),
        "X-Pulsar-producer-name": metadata.producer_name,
        "X-Pulsar-sequence-id": str(metadata.sequence_id),
        "X-Pulsar-uncompressed-size": str(metadata.uncompressed_size),
        "X-Pulsar-null-value": str(metadata.null_value).lower(),
        "X-Pulsar-encryption-algo": metadata.encryption_algo,
    }
    if metadata.event_time:
        headers["X-Pulsar-event-time"] = _time(metadata.event_time)
    if metadata.deliver_at_time:
        headers["X-Pulsar-deliver-at-time"] = _time(metadata.deliver_at_time)
    if metadata.HasField("partition_key"):
        headers["X-Pulsar-partition-key"] = metadata.partition_key
        headers["X-Pulsar-partition-key-b64-encoded"] = str(metadata.partition_key_b64_encoded).lower()
    if metadata.null_partition_key:
        headers["X-Pulsar-null-partition-key"] = "true"
    if metadata.HasField("ordering_key"):
        headers["X-Pulsar-Base64-ordering-key"] = b64encode(metadata.ordering_key).decode()
    if metadata.HasField("uuid"):
        headers |= {
            "X-Pulsar-uuid": metadata.uuid, "X-Pulsar-chunk-id": str(metadata.chunk_id),
            "X-Pulsar-num-chunks-from-msg": str(metadata.num_chunks_from_msg),
            "X-Pulsar-total-chunk-msg-size": str(metadata.total_chunk_msg_size),
        }  # fmt: skip
    if metadata.encryption_keys:
        headers["X-Pulsar-Is-Encrypted"] = "true"
    if len(metadata.properties) > MANY_PROPERTIES:
        headers["X-Pulsar-PROPERTY"] = None
    elif properties := decode_properties(metadata):
        headers["X-Pulsar-PROPERTY"] = msgspec.json.encode(properties).decode()
    return headers


def _time(milliseconds: int) -> str:
    """Returns a time as ISO 8601 in UTC, in the form of Java's DateFormatter; as a number if it is out of range."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
