"""Metadata records that this process cannot read, of a newer version or damaged. One does not stop work on the others.

A caller that reads many records (a listing, a watch, a round over all ledgers) reads each with `readable`: a record
that it cannot decode is None, as if it did not exist, and is noted here: logged once, counted, shown
(`magnetar_unreadable_…`). A caller that depends on one record, and would do wrong without it, uses `get_record`, which
raises DamagedRecord.

`UNREADABLE` is one for the process: its parts decode records alike. At most PATHS_MAX paths are kept.
Guards: tests/metadata/test_records.py, tests/bookie/repair/test_repair.py.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from . import paths
from .records import DamagedRecord, Record, decode
from .store import MetadataStore

_LOG = logging.getLogger("magnetar.metadata")

R = TypeVar("R", bound=Record)

PATHS_MAX = 1000
"""Paths and reasons, about 300 bytes each."""


class Unreadable:
    """The records that cannot be read now, by path."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}  # path → why
        self.skipped = 0

    def skip(self, path: str, error: DamagedRecord) -> None:
        self.skipped += 1
        if path not in self.paths and len(self.paths) < PATHS_MAX:
            _LOG.error("skipped, because it cannot be read here: %s", error)
            self.paths[path] = str(error)

    def forgive(self, path: str) -> None:
        """Ends the note on a record that was deleted, or can be read again."""
        self.paths.pop(path, None)

    def statistics(self) -> dict[str, int]:
        return {"records": len(self.paths), "skipped": self.skipped}


UNREADABLE = Unreadable()


async def readable(store: MetadataStore, path: str, cls: type[R]) -> tuple[R, int] | None:
    """The record and its version; None also when it cannot be read here, which is noted."""
    node = await store.get(path)
    if node is None:
        UNREADABLE.forgive(path)
        return None
    try:
        record = decode(node.value, cls, path)
    except DamagedRecord as error:
        UNREADABLE.skip(path, error)
        return None
    UNREADABLE.forgive(path)
    return record, node.version


def ledger_of(path: str) -> int | None:
    """Returns the ledger that the node is of; None if it is named otherwise, which is noted."""
    try:
        return paths.ledger_id(path.rpartition("/")[2])
    except ValueError as error:
        UNREADABLE.skip(path, DamagedRecord(f"{path} is no ledger's: {error}"))
        return None


def ledgers_in(folder: str, names: list[str]) -> list[int]:
    """Returns the ledgers that the nodes of a listing are of; a node that is named otherwise is noted."""
    return [ledger for name in names if (ledger := ledger_of(f"{folder}/{name}")) is not None]
