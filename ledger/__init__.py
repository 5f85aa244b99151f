"""The ledger library: how brokers write, read and recover ledgers on bookies.

The pages: docs/design/ledgers.md, docs/design/protocol.md.

Decisions are in the modules `*_core` (pure): `pending` decides which bookies store an entry and when it is confirmed,
placement_core.py which bookies a ledger gets, `writer`, `reader`, `recovery`, and `metadata` which transitions of the
record are allowed. The drivers carry them out: `handle` the writer, `reader`, `recovery`, `bookies` the table of
registered bookies and the connections, `client` the entry point to all of it.
"""

from .client import LedgerClient
from .config import LedgerConfig
from .handle import LedgerEnd, LedgerWriter
from .reader import LedgerEntry, LedgerReader

__all__ = ["LedgerClient", "LedgerConfig", "LedgerEnd", "LedgerEntry", "LedgerReader", "LedgerWriter"]
