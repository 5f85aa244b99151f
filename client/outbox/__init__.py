"""The module `magnetar.outbox`: messages that an application writes as rows in its own database transaction, and the
relay that sends them (docs/outbox.md).

Each name is loaded when it is first used, so that the rest of the SDK works without SQLAlchemy and Django."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..common.checks import make_missing_extra

if TYPE_CHECKING:
    from .destination_core import RelaySettings
    from .django import DjangoOutbox
    from .relay import Relay
    from .store import Lag
    from .tables import SQLAlchemyOutbox

__all__ = ["DjangoOutbox", "Lag", "Relay", "RelaySettings", "SQLAlchemyOutbox"]

_PLACES = {
    "DjangoOutbox": "django",
    "Lag": "store",
    "Relay": "relay",
    "RelaySettings": "destination_core",
    "SQLAlchemyOutbox": "tables",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise make_missing_extra(error, f"magnetar.outbox.{name}") from error
    globals()[name] = value
    return value
