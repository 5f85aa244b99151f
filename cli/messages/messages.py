"""How messages are shown: their text, one a line; with `-o json` one JSON object a line, so that streams can be piped.

A payload that is not UTF-8 is `payloadBase64` in JSON, and escaped (`\\xff`) in text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...client.admin import StoredMessage
    from ...client.model.message_id import MessageId
    from ..common.output import Output


@dataclass(frozen=True, slots=True)
class Shown:
    """A message as it is printed, from either client."""

    topic: str
    message_id: str  # ledger:entry:partition:batch
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    redelivery_count: int
    payload: bytes


def received(message: Any) -> Shown:
    """Returns a message of the SDK as it is shown."""
    return Shown(
        message.topic_name(),
        id_text(message.message_id()),
        message.partition_key(),
        message.properties(),
        message.publish_timestamp(),
        message.redelivery_count(),
        message.data(),
    )


def id_text(message_id: MessageId) -> str:
    parts = (message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())
    return ":".join(map(str, parts))


def stored(message: StoredMessage) -> Shown:
    """Returns a message of the admin client as it is shown."""
    place = id_text(message.message_id)
    return Shown(message.topic, place, message.key, message.properties, message.publish_time_ms, 0, message.payload)


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
