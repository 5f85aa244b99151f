"""The module `magnetar.inbox`: lets a consumer process each message once, in a database transaction of the application
(docs/outbox.md)."""

from __future__ import annotations

import importlib
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..common.checks import make_missing_extra

if TYPE_CHECKING:
    from ..model.message import Message
    from .django.inbox import DjangoInbox
    from .tables import SQLAlchemyInbox

__all__ = ["DjangoInbox", "SQLAlchemyInbox", "message_key"]

_PLACES = {"DjangoInbox": "django.inbox", "SQLAlchemyInbox": "tables"}

KEY_MAX = 255
"""Most characters of a stored key, which is a part of a unique index."""

KEPT_S = 7 * 86_400.0
"""Seconds for which a record is kept by default: longer than the time within which a message may be delivered again
(retention and TTL of its topic, and how long a subscription may be without a consumer)."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise make_missing_extra(error, f"magnetar.inbox.{name}") from error
    globals()[name] = value
    return value


def message_key(message: Message) -> str:
    """Returns a key of the message: its topic, producer name and sequence id as one text. A message that its producer
    sends again has the same key; a new message has another. The key is unique only if the producer has a fixed name, as
    the relays of an outbox have; otherwise use a key from the message itself, such as an order number or an id among
    its properties."""
    return f"{message.topic_name()}|{message.producer_name()}|{message.sequence_id()}"


def shorten_inbox_key(key: str) -> str:
    """Returns the form of the key that is stored: the key itself, or its hash if the key is longer than KEY_MAX."""
    return key if len(key) <= KEY_MAX else f"sha256:{sha256(key.encode()).hexdigest()}"
