"""The ledger library: how brokers write, read and recover ledgers on bookies.

The pages: docs/design/ledgers.md, docs/design/protocol.md.

Decisions are in the modules `*_core` (pure): `pending` decides which bookies store an entry and when it is confirmed,
placement_core.py which bookies a ledger gets, `writer`, `reader`, `recovery`, and `metadata` which transitions of the
record are allowed. The drivers carry them out: `handle` the writer, `reader`, `recovery`, `bookies` the table of
registered bookies and the connections, `client` the entry point to all of it.

The names are imported when they are first read: a command that asks a bookie needs its format alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bookies import LedgerConfig as LedgerConfig
    from .client import LedgerClient as LedgerClient
    from .handle import LedgerEnd as LedgerEnd
    from .handle import LedgerWriter as LedgerWriter
    from .reader import LedgerEntry as LedgerEntry
    from .reader import LedgerReader as LedgerReader

_PLACE_OF = {
    "LedgerClient": "client", "LedgerConfig": "bookies", "LedgerEnd": "handle", "LedgerEntry": "reader",
    "LedgerReader": "reader", "LedgerWriter": "handle",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_PLACE_OF[name]}", __name__), name)
    return value
