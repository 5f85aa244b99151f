"""Limbo: a bookie that lost data serves what it has, says "unknown" for what it misses, and gets it back.

Entering is a matter of the start (store/boot.py): `upto` is the largest ledger id that was ever given out, durable
before the bookie serves.
"""

from __future__ import annotations

from ..metadata import paths
from ..metadata.records import CounterRecord
from ..metadata.store import MetadataStore
from ..metadata.update import get_record


async def highest_ledger(metadata: MetadataStore) -> int:
    """The largest ledger id that was ever given out, -1: none. Ids of a block that was taken count as given."""
    counter = await get_record(metadata, paths.LEDGER_IDS, CounterRecord)
    listed = [paths.ledger_id(name) for name in await metadata.children(paths.LEDGERS)]
    return max(-1 if counter is None else counter[0].next - 1, max(listed, default=-1))
