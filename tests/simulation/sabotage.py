"""Ways to break Magnetar that the simulation must find; each names the guarantee that it takes away.

    with SABOTAGE["answer before the sync"]():
        outcome = run_seed(17)          # must have failures

They replace one function each, as long as the context lasts. A checker that was never seen to fail proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from magnetar.bookie.adds import AddRequestHandler
from magnetar.bookie.format.journal import RecordType
from magnetar.bookie.store.group_commit_core import ConfirmBlock
from magnetar.bookie.store.journal import Journal
from magnetar.bookie.store.store import Store
from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription.core.cursor_state import CursorChunkKey
from magnetar.broker.subscription.core.dispatch import TIME_AFTER_ALL_MS, Dispatcher
from magnetar.broker.subscription.core.policy import DispatcherEntry
from magnetar.broker.subscription.delays import DelayedDelivery
from magnetar.client.core.effects import (
    ProducerEffect,
)
from magnetar.client.core.producer import ProducerCore
from magnetar.ledger.client import LedgerClient
from magnetar.ledger.peer_format import BookieOperation, Status
from magnetar.ledger.writer_core import PendingAdds
from magnetar.proto.names import Position
from magnetar.runtime.sim.disk import SimFile, SimFiles

Sabotage = Callable[[], contextlib.AbstractContextManager[None]]
SABOTAGE: dict[str, Sabotage] = {}


def _sabotage(name: str) -> Callable[[Callable[[], Iterator[None]]], Sabotage]:
    def register(function: Callable[[], Iterator[None]]) -> Sabotage:
        SABOTAGE[name] = contextlib.contextmanager(function)
        return SABOTAGE[name]

    return register


@_sabotage("answer before the sync")
def _answer_early() -> Iterator[None]:
    """A bookie answers when the add is in memory (invariant 14)."""
    original = Store.seal_group

    def seal(store: Store, done: Callable[[bool], None]) -> None:
        done(True)
        original(store, lambda ok: None)

    with mock.patch.object(Store, "seal_group", seal):
        yield


@_sabotage("no sync of the journal")
def _no_sync() -> Iterator[None]:
    """A journal is not synced, direct or not: the bytes stay in the cache (invariants 5, 14)."""
    original = SimFile._sync

    def sync(file: SimFile, size: int) -> None:
        if not file.path.endswith(".jnl"):
            original(file, size)

    with mock.patch.object(SimFile, "_sync", sync):
        yield


@_sabotage("answer the block that is there first")
def _answer_out_of_order() -> Iterator[None]:
    """Of two blocks that are in the disk at once, the later one is answered before the hole in front of it is filled:
    a replay would end there (invariants 14, 15; direct I/O alone writes two at once)."""
    original = Journal._report_finished

    def land(journal: Journal) -> None:
        for flight in journal.core._flights:
            done = [w for sequence, w in journal._flying if sequence == flight.block.sequence and w.done()]
            if flight.synced is None and done and done[0].exception() is None:
                block, flight.block = flight.block, flight.block._replace(groups=())
                journal._answer([ConfirmBlock(block)])
        original(journal)

    with mock.patch.object(Journal, "_report_finished", land):
        yield


@_sabotage("no sync of directories")
def _no_directory_sync() -> Iterator[None]:
    """New files are synced, their names are not (found by power loss)."""
    with mock.patch.object(SimFiles, "sync_directory", return_value=None):
        yield


@_sabotage("forgotten fence")
def _forgotten_fence() -> Iterator[None]:
    """A fence is answered and obeyed in memory, and not journaled (invariant 15)."""
    original = Journal.enqueue_record

    def enqueue(journal: Journal, kind: Any, *rest: Any) -> Any:
        return None if kind is RecordType.FENCE else original(journal, kind, *rest)

    with mock.patch.object(Journal, "enqueue_record", enqueue):
        yield


@_sabotage("fence ignored")
def _fence_ignored() -> Iterator[None]:
    """A fenced ledger takes adds of its old writer (invariant 16)."""
    original = Store.add_entries

    def add_many(
        store: Store, ledger: int, key: bytes, entries: Any, size: int, lac: int, recovery: bool
    ) -> Any:
        return original(store, ledger, key, entries, size, lac, True)

    with mock.patch.object(Store, "add_entries", add_many):
        yield


@_sabotage("one status for all")
def _one_status() -> Iterator[None]:
    """A bookie answers for each entry of a request that it is stored, also for those that it refused (14)."""
    original = AddRequestHandler._refuse

    def refuse(adds: AddRequestHandler, batch: Any, status: Any) -> None:
        original(adds, batch, Status.OK if batch.head.op is BookieOperation.ADD_MANY else status)

    with mock.patch.object(AddRequestHandler, "_refuse", refuse):
        yield


@_sabotage("one ack is enough")
def _one_ack() -> Iterator[None]:
    """A writer confirms an entry with the first ack (invariant 5)."""
    original = PendingAdds.__init__

    def init(adds: PendingAdds[Any], *args: Any, **kwargs: Any) -> None:
        original(adds, *args, **kwargs)
        adds._ack_quorum = 1

    with mock.patch.object(PendingAdds, "__init__", init):
        yield


@_sabotage("take-over without recovery")
def _no_recovery() -> Iterator[None]:
    """A broker that takes a topic over believes what one bookie says, fences nobody, and closes nothing (29)."""
    with mock.patch.object(LedgerClient, "recover", LedgerClient.open):
        yield


@_sabotage("resend out of order")
def _resend_reversed() -> Iterator[None]:
    """A producer that has reconnected sends what is not answered newest first (invariant 31)."""
    original = ProducerCore.on_opened

    def opened(core: ProducerCore, *args: Any) -> list[ProducerEffect]:
        core._entries.unsent.reverse()
        return original(core, *args)

    with mock.patch.object(ProducerCore, "on_opened", opened):
        yield


@_sabotage("delays not heeded")
def _no_delays() -> Iterator[None]:
    """What is read before its time is handed out (Pulsar A12)."""
    original = Dispatcher.assign_entries

    def assign(dispatcher: Dispatcher, entries: Sequence[DispatcherEntry], now_ms: int = TIME_AFTER_ALL_MS) -> Any:
        return original(dispatcher, entries)

    with mock.patch.object(Dispatcher, "assign_entries", assign), mock.patch.object(DelayedDelivery, "delay_until"):
        yield


@_sabotage("cursor ahead of its acknowledgements")
def _cursor_ahead() -> Iterator[None]:
    """What is stored of a subscription says that one entry more is acknowledged than is (invariant 38)."""
    original = stored.encode_marker

    def ahead(mark: Position, rows: Mapping[CursorChunkKey, stored.CursorChunkPlace], sequence: int) -> list[bytes]:
        return original(Position(mark[0], mark[1] + 1) if mark[1] >= 0 else mark, {}, sequence)

    with mock.patch.object(stored, "encode_marker", ahead):
        yield
