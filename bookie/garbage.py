"""Garbage collection: when the data of a ledger may go (BookKeeper protocol §2.6, invariants 21, 22).

A ledger is *dead* when, in this order,
 1. it was here before the listing began (later arrivals are out of scope);
 2. the whole listing of the metadata succeeded and does not name it, and the cluster's instance is the cookie's;
 3. a direct read says that its record does not exist; in two passes at least `grace_s` apart;
 4. its tombstone is durable in the journal.
Then its entries are gone for readers, and a log all of whose ledgers are dead is deleted. Any error ends the pass and
deletes nothing. Live data in old logs is not moved.

`Collector.collect` runs one pass; the bookie calls it every `gc_interval_s`. Guarded by tests/bookie/test_garbage.py.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..metadata import paths, records
from ..metadata.store import MetadataStore
from ..runtime.clock import Clock
from .store.store import Store

log = logging.getLogger(__name__)


class Collected(NamedTuple):
    suspected: int  # dead for the first time, or not for long enough
    buried: list[int]
    logs_deleted: list[int]


class Collector:
    def __init__(self, store: Store, clock: Clock, instance: str, grace_s: float) -> None:
        self._store = store
        self._clock = clock
        self._instance = instance
        self._grace_s = grace_s
        self._suspects: dict[int, float] = {}  # ledger: when it was first seen dead

    async def collect(self, metadata: MetadataStore) -> Collected:
        """One pass. Errors of the metadata come through, and nothing was deleted."""
        local = sorted(self._store.descriptors.ledgers)
        await self._check_cluster(metadata)
        listed = {paths.ledger_id(name) for name in await metadata.children(paths.LEDGERS)}
        missing = [ledger for ledger in local if ledger not in listed]
        confirmed = [ledger for ledger in missing if await metadata.get(paths.ledger(ledger)) is None]
        now = self._clock.monotonic()
        self._suspects = {ledger: self._suspects.get(ledger, now) for ledger in confirmed}
        dead = [ledger for ledger, since in self._suspects.items() if since < now and now - since >= self._grace_s]
        if dead and not await self._store.bury(dead):
            return Collected(len(self._suspects), [], [])
        for ledger in dead:
            del self._suspects[ledger]
        deleted = await self._store.delete_dead_logs()
        if dead or deleted:
            log.info("buried %d ledgers, deleted %d entry logs", len(dead), len(deleted))
        return Collected(len(self._suspects), dead, deleted)

    async def _check_cluster(self, metadata: MetadataStore) -> None:
        found = await metadata.get(paths.CLUSTER)
        if found is None:
            raise ValueError(f"{paths.CLUSTER} is missing from the metadata: nothing is deleted")
        record = records.decode(found.value, records.ClusterRecord, paths.CLUSTER)
        if record.instance != self._instance:
            raise ValueError(f"the metadata is of cluster {record.instance}, not {self._instance}: nothing is deleted")
