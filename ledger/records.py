"""Ledger records in the metadata tree: one transition at a time, decided by content (core/metadata.py).

`apply` reads the record, asks the pure transition, and writes by compare-and-set until the answer is `Settled` or
`Refused`. After a write of unknown outcome it reads again, and the transition recognises its own write
(metadata/update.py, which also bounds and paces the attempts).
"""

from __future__ import annotations

from collections.abc import Callable

from ..metadata import paths
from ..metadata.records import LedgerRecord, decode, encode
from ..metadata.store import MetadataStore, Versioned
from ..metadata.update import get_record, update
from ..proto.errors import LedgerNotFound
from .core.metadata import RecordWrite, Refused, Settled, Transition

Decide = Callable[[LedgerRecord | None], Transition]


async def read(store: MetadataStore, ledger_id: int) -> LedgerRecord:
    """The record as it is stored now. Raises LedgerNotFound."""
    found = await get_record(store, paths.ledger(ledger_id), LedgerRecord)
    if found is None:
        raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger=ledger_id)
    return found[0]


async def apply(store: MetadataStore, ledger_id: int, decide: Decide, *, timeout_s: float) -> Settled | Refused:
    """The stored outcome. Raises the metadata's errors; the transition may then have happened or not."""
    path = paths.ledger(ledger_id)
    answer: Transition | None = None  # of the last attempt: what it wrote, or found, is stored

    def transform(node: Versioned | None) -> bytes | None:
        nonlocal answer
        answer = decide(decode(node.value, LedgerRecord, path) if node is not None else None)
        return encode(answer.record, path) if isinstance(answer, RecordWrite) else None

    await update(store, path, transform, deadline_s=timeout_s)
    assert answer is not None, "an update that returns has asked"
    return answer if isinstance(answer, Refused) else Settled(answer.record)
