"""Defects of what bookies keep for the day on which all metadata is lost, and of the tree that is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from msgspec import structs

from magnetar.bookie.maintenance.labels import LedgerLabels
from magnetar.bookie.store import identity
from magnetar.metadata import rebuild_core
from magnetar.metadata.rebuild_core import BookieHoldings, LedgerHolders
from magnetar.metadata.records import CookieRecord, Fragment, LedgerRecord
from tests.mutants.ledgers import Stack, put


def label_is_stored_later(stack: Stack) -> None:
    """M26h: the first add of a ledger does not wait until the ledger's label is synced."""
    honest = LedgerLabels.add_label

    async def add_label(self: LedgerLabels, record: LedgerRecord) -> None:
        asyncio.get_running_loop().call_later(
            1.0, lambda: self._tasks.closed or self._tasks.spawn(honest(self, record), "bookie-labels")
        )

    put(stack, LedgerLabels, "add_label", add_label)


def away_has_no_slot(stack: Stack) -> None:
    """M26i: a rebuilt ensemble has bookies that were read alone: they vote for one that is away and has the entry."""
    honest = rebuild_core.reconstruct_fragments

    def reconstruct(
        holders: LedgerHolders, hints: Sequence[Sequence[Fragment]], known: Collection[str]
    ) -> tuple[Fragment, ...]:
        return honest(holders, [], known)

    put(stack, rebuild_core, "reconstruct_fragments", reconstruct)


def ensemble_of_the_most(stack: Stack) -> None:
    """M26j: a rebuilt ensemble is that of most entries, also for those that others hold."""

    def find_uncovered(self: LedgerHolders, ensemble: Sequence[str], first: int, end: int, copies: int) -> int | None:
        return None

    put(stack, LedgerHolders, "find_uncovered", find_uncovered)


def tombstones_are_not_asked(stack: Stack) -> None:
    """M26k: a deleted ledger comes back if any bookie still has it, although another one has its tombstone."""
    honest = rebuild_core._Rebuild.__init__

    def begin(self: rebuild_core._Rebuild, holdings: Sequence[BookieHoldings], now_ms: int) -> None:
        honest(self, [structs.replace(each, tombstones=()) for each in holdings], now_ms)

    put(stack, rebuild_core._Rebuild, "__init__", begin)


def rebuilt_for_ever(stack: Stack) -> None:
    """M26l: a bookie that accepted a rebuilt tree accepts every other one too, at each start."""
    honest = identity.put_record

    async def put_record(metadata: object, path: str, record: CookieRecord, version: int) -> int:
        kept = structs.replace(record, rebuilt=True)
        return await honest(metadata, path, kept, version)  # type: ignore[arg-type]

    put(stack, identity, "put_record", put_record)
