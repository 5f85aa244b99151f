"""How messages are shown: their text, a line each; with `-o json` one JSON object a line, so that streams can be piped.

A payload that is not UTF-8 is `payloadBase64` in JSON, and escaped (`\\xff`) in text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...proto import wire_pb2 as wire
    from ..common.output import Output


@dataclass(frozen=True, slots=True)
class Shown:
    topic: str
    message_id: str  # ledger:entry:partition:batch
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    redelivery_count: int
    payload: bytes


def received(message: Any) -> Shown:
    """A message as the SDK gives it."""
    return Shown(
        message.topic_name(),
        _id_text(message.message_id()),
        message.partition_key(),
        message.properties(),
        message.publish_timestamp(),
        message.redelivery_count(),
        message.data(),
    )


def _id_text(message_id: Any) -> str:
    parts = (message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())
    return ":".join(map(str, parts))


def decode_deliveries(entries: Iterable[wire.Delivery], topic: str) -> list[Shown]:
    """The messages in entries as a broker sends them, without those that are acknowledged already."""
    from ...proto.entry import decode_batch, parse_header, split_broker_part
    from ...proto.names import MessageId, TopicName

    partition = TopicName.parse(topic).partition
    found = []
    for entry in entries:
        client_part = split_broker_part(entry.entry)[2]
        header = parse_header(client_part)
        for at, (fields, payload) in enumerate(decode_batch(header, client_part)):
            if at not in entry.acked_batch_indexes:
                batch_index = at if header.batched else -1
                where = MessageId(entry.ledger_id, entry.entry_id, partition, batch_index)
                pairs = {pair.key: pair.value for pair in fields.properties}
                shown = Shown(topic, str(where), fields.partition_key, pairs, header.publish_time, 0, payload)
                found.append(shown)
    return found


def show(message: Shown, out: Output) -> None:
    print(as_json(message) if out.json else message.payload.decode("utf-8", "backslashreplace"), flush=True)


def as_json(message: Shown) -> str:
    record: dict[str, object] = {
        "topic": message.topic,
        "messageId": message.message_id,
        "key": message.key,
        "properties": dict(message.properties),
        "publishTime": message.publish_time_ms,
        "redeliveryCount": message.redelivery_count,
    }
    try:
        record["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        from base64 import b64encode

        record["payloadBase64"] = b64encode(message.payload).decode()
    return json.dumps(record, ensure_ascii=False)
