"""Messages: ids, and entries as Pulsar's tools read them: the payload, decompressed, with the rest in headers.

Of a batch the payload has all its messages, one after the other, as they are stored; `X-Pulsar-num-batch-message` says
how many. An encrypted payload is as it is.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from .....proto import wire_pb2 as wire
from .....proto.entry import decode_payload, open_entry
from .....proto.entry_pb2 import MessageMetadata
from .....proto.errors import NotFound
from ....session.backlogs import PEEK_MESSAGES_MAX
from ..call import Call
from ..errors import BadRequest
from ..table import SUBSCRIPTION, TOPIC, route


def message_id(found: Any) -> dict[str, int]:
    """Of wire.MessageId."""
    shown = {"ledgerId": found.ledger_id, "entryId": found.entry_id, "partitionIndex": found.partition}
    return shown if found.batch_index < 0 else {**shown, "batchIndex": found.batch_index}


@route("GET", TOPIC + "/lastMessageId", "The id of the last message.", answer="MessageId")
async def last_message_id(call: Call) -> object:
    await _one(call, "Admin.LastMessageId", wire.Name(name=call.topic.full))
    return message_id(await call.admin("LastMessageId", wire.Name(name=call.topic.full)))


@route("GET", TOPIC + "/messageid/{milliseconds}", "The id of the first message published then or later.",
       answer="MessageId")  # fmt: skip
async def message_id_by_time(call: Call) -> object:
    when = call.number(call.names["milliseconds"], "the time in milliseconds")
    asked = wire.MessageIdByTimeRequest(topic=call.topic.full, publish_time_ms=when)
    await _one(call, "Admin.MessageIdByTime", asked)
    return message_id(await call.admin("MessageIdByTime", asked))


async def _one(call: Call, method: str, asked: Any) -> None:
    """405: it is about a partition, and the topic has several."""
    await call.authorize(method, asked)
    if await call.partitions():
        raise BadRequest(f"topic {call.topic} has partitions: name one of them", 405)


class _Place(msgspec.Struct):
    ledgerId: int
    entryId: int


@route("PUT", TOPIC + "/backlogSize", "The bytes that are stored after a message.", body="MessageId", answer="long")
async def backlog_size(call: Call) -> object:
    given = call.json(_Place)
    if not (-1 <= given.ledgerId < 1 << 63 and -1 <= given.entryId < 1 << 63):
        raise BadRequest("this is no message id", 412)
    asked = wire.BacklogSizeRequest(topic=call.topic.full)
    asked.position.ledger_id, asked.position.entry_id = given.ledgerId, given.entryId
    return (await call.admin("BacklogSize", asked)).bytes


# ------------------------------------------------------------------ entries
@route("GET", SUBSCRIPTION + "/position/{number}", "The n-th entry of the backlog, from 1.", answer="payload")
async def peek(call: Call) -> Response:
    number = call.number(call.names["number"], "the number", least=1)
    asked = wire.PeekMessagesRequest(topic=call.topic.full, name=call.names["subscription"], messages=1)
    await _one(call, "Admin.PeekMessages", asked)
    if number > PEEK_MESSAGES_MAX:
        raise BadRequest(f"only the first {PEEK_MESSAGES_MAX} can be looked at", 412)
    asked.messages = number
    while True:
        entries = (await call.admin("PeekMessages", asked)).entries
        if len(entries) >= number:
            return await _entry(entries[number - 1])
        if asked.messages == PEEK_MESSAGES_MAX or sum(_count(each) for each in entries) < asked.messages:
            raise NotFound(f"the backlog has no entry {number} that can be looked at")
        asked.messages = min(2 * asked.messages, PEEK_MESSAGES_MAX)


def _count(found: Any) -> int:
    return open_entry(found.entry)[1].num_messages


@route("GET", TOPIC + "/ledger/{ledger}/entry/{entry}", "An entry by its id.", answer="payload")
async def get_message(call: Call) -> Response:
    ledger, entry = (call.number(call.names[each], f"the {each}") for each in ("ledger", "entry"))
    found = await call.admin("GetMessage", wire.GetMessageRequest(
        topic=call.topic.full, ledger_id=ledger, entry_id=entry
    ))  # fmt: skip
    return await _entry(found.entries[0])


@route("GET", TOPIC + "/examinemessage", "The n-th message from one end (`initialPosition`, `messagePosition`).",
       answer="payload")  # fmt: skip
async def examine_message(call: Call) -> Response:
    start = call.query.get("initialPosition", "latest").lower()
    if start not in ("latest", "earliest"):
        raise BadRequest("initialPosition is latest or earliest", 412)
    number = call.number(call.query.get("messagePosition", "1"), "messagePosition", least=1)
    asked = wire.ExamineMessagesRequest(topic=call.topic.full, from_latest=start == "latest", number=number)
    await _one(call, "Admin.ExamineMessages", asked)
    return await _entry((await call.admin("ExamineMessages", asked)).entries[0])


async def _entry(found: Any) -> Response:
    """CorruptEntry: the payload does not decompress."""
    index, header = open_entry(found.entry)
    metadata = header.metadata
    if metadata.encryption_keys:
        payload = found.entry[header.payload_offset :]
    else:
        payload = await asyncio.to_thread(decode_payload, header, found.entry)
    headers = {"X-Pulsar-Message-ID": f"{found.ledger_id}:{found.entry_id}", **_headers(metadata)}
    if index >= 0:
        headers["X-Pulsar-Broker-Entry-METADATA-index"] = str(index)
    if header.batched:
        headers["X-Pulsar-num-batch-message"] = str(header.num_messages)
        headers["X-Pulsar-batch-size"] = str(len(payload))
    answer = Response(bytes(payload), 200, media_type="application/octet-stream")
    for name, value in headers.items():
        if value:  # Java's admin client compares the case of names, which starlette's `headers` do not keep
            answer.raw_headers.append((name.encode(), quote(value, safe=_SAFE).encode()))
    return answer


_SAFE = " !\"#$%&'()*+,/:;<=>?@[]^`{|}~\\"
"""What a header may have as it is."""


def _headers(metadata: MessageMetadata) -> dict[str, str]:
    headers = {
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
    properties = {each.key: each.value for each in metadata.properties}
    if properties:
        headers["X-Pulsar-PROPERTY"] = msgspec.json.encode(properties).decode()
    return headers


def _time(milliseconds: int) -> str:
    """ISO 8601, UTC, as Java's DateFormatter writes it."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
