"""The ledger library: how brokers write, read and recover ledgers on bookies.

The pages: docs/design/ledgers.md, docs/design/protocol.md.

Decisions are in the modules `*_core` (pure): `striping` which bookies store an entry, `pending` which adds count,
`writer`, `reader`, `recovery`, `metadata` which transitions of the record are allowed. The drivers beside it carry them
out: `handle` the writer, `reader`, `recovery`, `bookies` which bookies are registered and how to reach them, `client`
the entry point to all of it.
"""

from .client import LedgerClient
from .config import LedgerConfig
from .handle import LedgerEnd, LedgerWriter
from .reader import LedgerEntry, LedgerReader

__all__ = ["LedgerClient", "LedgerConfig", "LedgerEnd", "LedgerEntry", "LedgerReader", "LedgerWriter"]
