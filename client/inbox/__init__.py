"""The module `magnetar.inbox`: lets a consumer process each message once, in a database transaction of the application
(docs/outbox.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..common.checks import make_missing_extra

if TYPE_CHECKING:
    from .django.inbox import DjangoInbox
    from .keys import message_key
    from .tables import SQLAlchemyInbox

__all__ = ["DjangoInbox", "SQLAlchemyInbox", "message_key"]

_PLACES = {"DjangoInbox": "django.inbox", "SQLAlchemyInbox": "tables", "message_key": "keys"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise make_missing_extra(error, f"magnetar.inbox.{name}") from error
    globals()[name] = value
    return value
