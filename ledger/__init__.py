"""The ledger library: how brokers write, read and recover ledgers on bookies.

The pages: docs/design/ledgers.md, docs/design/protocol.md.

Decisions are in the modules `*_core`, which are pure:

    writer_core.py      which bookies store an entry, when it is confirmed, where the ledger ends
    placement_core.py   which bookies a ledger gets
    reader_core.py      which bookie a read asks next
    recovery_core.py    where a ledger ends whose writer is gone
    metadata_core.py    which transitions of the record are allowed

The drivers carry the decisions out: handle.py and sender.py those of the writer, reader.py and recovery.py the others.
bookies.py has the table of registered bookies and the connections, client.py the entry point to all of it.

Each name of this package is imported when it is first read, because a command that asks a bookie needs only
peer_format.py.
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
