"""Ledger records in the metadata tree: one transition at a time, decided by content (core/metadata.py).

`apply` reads, asks the pure transition, and writes by compare-and-set until it is settled or refused; a write of
unknown outcome is read again and recognised (metadata/update.py). `apply_until` goes on trying while the metadata
does not answer, for a bounded time: used where giving up early would leave a ledger without an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...metadata import paths
from ...metadata.records import LedgerRecord, decode, encode
from ...metadata.store import MetadataStore, Versioned
from ...metadata.update import update
from ...proto.errors import LedgerNotFound, MagnetarError
from .core.metadata import Refused, Settled, Transition, Write

Decide = Callable[[LedgerRecord | None], Transition]


async def read(store: MetadataStore, ledger_id: int) -> LedgerRecord:
    """The record as it is now; LedgerNotFound."""
    path = paths.ledger(ledger_id)
    node = await store.get(path)
    if node is None:
        raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger=ledger_id)
    return decode(node.value, LedgerRecord, path)


async def apply(store: MetadataStore, ledger_id: int, decide: Decide) -> Settled | Refused:
    """The outcome as stored. Metadata errors pass through: the transition may have happened or not."""
    path = paths.ledger(ledger_id)
    refused: Refused | None = None

    def transform(node: Versioned | None) -> bytes | None:
        nonlocal refused
        answer = decide(decode(node.value, LedgerRecord, path) if node is not None else None)
        refused = answer if isinstance(answer, Refused) else None
        return encode(answer.record) if isinstance(answer, Write) else None

    node = await update(store, path, transform)
    if refused is not None:
        return refused
    assert node is not None, "a transition that was not refused leaves a record"
    return Settled(decode(node.value, LedgerRecord, path))


async def apply_until(
    store: MetadataStore, ledger_id: int, decide: Decide, *, timeout_s: float, retry_s: float
) -> Settled | Refused:
    """`apply`, again after retryable metadata errors; the last one is raised after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await apply(store, ledger_id, decide)
        except MagnetarError as error:
            if not error.retryable or asyncio.get_running_loop().time() + retry_s >= deadline:
                raise
        await asyncio.sleep(retry_s)
