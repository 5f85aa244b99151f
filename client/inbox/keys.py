"""The names of messages for their consumers, and how long they are kept."""

from __future__ import annotations

from hashlib import sha256

from ..model.message import Message

KEY_MAX = 255
"""Characters of a key: it is part of a unique index."""

KEPT_S = 7 * 86_400.0
"""Seconds that a key is kept by default: longer than any message may be delivered again (retention and TTL of its
topic, and how long a subscription may be away)."""


def message_key(message: Message) -> str:
    """Returns topic, producer and sequence id: a message that its producer sends again has the same one, a new message
    another. It is unique where the producer has a name of its own that stays, as relays of an outbox have; else give a
    key from the message itself: the number of an order, an id among its properties."""
    return f"{message.topic_name()}|{message.producer_name()}|{message.sequence_id()}"


def checked_key(key: str) -> str:
    """The key as it is stored: a long one by its hash."""
    return key if len(key) <= KEY_MAX else f"sha256:{sha256(key.encode()).hexdigest()}"
