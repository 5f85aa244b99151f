"""Defects of the bookie: patches of its service, store and identity."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pyroaring import BitMap64

from magnetar.bookie.adds import AddRequestHandler, VerifiedAddRequest
from magnetar.bookie.maintenance import garbage
from magnetar.bookie.maintenance.garbage import GarbageCollector
from magnetar.bookie.maintenance.rebalance import Rebalancer
from magnetar.bookie.maintenance.rebalance_core import CopyMove, Rebalancing
from magnetar.bookie.maintenance.restore import LedgerCopyRestorer
from magnetar.bookie.service import BookieService
from magnetar.bookie.store import directories, identity
from magnetar.bookie.store.disk import IsolatedFiles
from magnetar.bookie.store.entrylog import mover as log_survey
from magnetar.bookie.store.identity import DirectoryVerdict
from magnetar.bookie.store.reads import ReadResult, StoreReader
from magnetar.bookie.store.state_log import StateLog
from magnetar.bookie.store.store import Store
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import BookieOperation, BookieRequestHead, Status
from magnetar.proto.errors import DataLost, MagnetarError, Unavailable
from magnetar.runtime.peer.server import ZmqPeerServer
from magnetar.runtime.sim import peers as sim_peers
from tests.mutants.ledgers import Stack, put


def damage_is_no_entry(stack: Stack) -> None:
    """M06: what a disk cannot read, or reads damaged, is answered as never stored."""
    honest = StoreReader._miss

    def miss(self: StoreReader, ledger: int, entry: int, damaged: bool = False) -> ReadResult:
        return honest(self, ledger, entry, False)

    put(stack, StoreReader, "_miss", miss)


def negative_answer_before_the_fence_is_synced(stack: Stack) -> None:
    """M08: a fencing request for what the bookie does not have is answered before the fence is synced."""
    honest = BookieService._fence

    def fence(self: BookieService, request: Any, head: BookieRequestHead, came: float) -> None:
        if head.op is BookieOperation.READ:
            result = self._store.read_from_memory(head.ledger, head.entry, head.count, head.bytes_max)
            missing = result is not None and result.status is not Status.OK
            if missing and self._store.fence(head.ledger, head.key) is Status.OK:
                self._intents.turn.append(lambda ok: None)
                self._read(request, head, came)
                return
        honest(self, request, head, came)

    put(stack, BookieService, "_fence", fence)


def amnesia(stack: Stack) -> None:
    """M09: a bookie that lost entries says that it never had them."""
    put(stack, StoreReader, "_in_limbo", lambda self, ledger: False)


class _Anybody(bytes):
    """Equal to every name."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def whoever_is_at_the_address(stack: Stack) -> None:
    """M16: a bookie is its address: any process at that address answers to any name."""
    for owner in (ZmqPeerServer, sim_peers.SimPeerServer):
        _put_anybody(stack, owner)


def _put_anybody(stack: Stack, owner: Any) -> None:
    honest = owner.__init__

    def init(self: Any, first: Any, second: Any, third: Any, name: bytes, *more: Any) -> None:
        honest(self, first, second, third, _Anybody(name), *more)

    put(stack, owner, "__init__", init)


def copies_without_recovery_flag(stack: Stack) -> None:
    """M20: entries that are copied to a bookie are added as a writer would, and a fenced ledger refuses them."""

    def add(
        self: Store, ledger: int, entry: int, key: bytes, stored: Any, size: int, lac: int, recovery: bool
    ) -> Status:
        return self.add_entries(ledger, key, ((entry, stored, size),), size, lac, False)

    put(stack, Store, "add_entry", add)


def _passes_by(stack: Stack, *errors: type[MagnetarError]) -> None:
    """A restore goes on after an entry that it cannot read anywhere, and calls the ledger whole."""
    honest = LedgerCopyRestorer._fill

    async def fill(self: LedgerCopyRestorer, reader: Any, record: Any, first: int, last: int, whole: Any) -> str | None:
        real = reader.read_stored

        async def read_stored(first: int, last: int, bytes_max: int) -> Any:
            try:
                return await real(first, last, bytes_max)
            except errors:
                raise _Lost from None

        reader.read_stored = read_stored
        try:
            for entry in range(first, last + 1):
                with contextlib.suppress(_Lost):
                    reason = await honest(self, reader, record, entry, entry, whole)
                    if reason is not None:
                        return reason
        finally:
            del reader.read_stored
        return None

    put(stack, LedgerCopyRestorer, "_fill", fill)


class _Lost(Exception):
    pass


def lost_everywhere_is_whole(stack: Stack) -> None:
    """M34: a restore skips entries that every replica is certain to lack (ours)."""
    _passes_by(stack, DataLost)


def found_nowhere_is_whole(stack: Stack) -> None:
    """M34b: limbo skips entries that no other bookie has (ours)."""
    _passes_by(stack, DataLost, Unavailable)


def limbo_without_fences(stack: Stack) -> None:
    """M07d: a bookie that lost its fences with its data takes adds of their old writers."""
    honest = StateLog.apply

    def apply(self: StateLog, fact: Any) -> None:
        before = self.fenced_upto
        honest(self, fact)
        self.fenced_upto = before

    put(stack, StateLog, "apply", apply)


def log_forgets_a_ledger(stack: Stack) -> None:
    """M25: what a log says of its ledgers is incomplete, and the collector takes it for dead."""
    honest = log_survey.read_extents

    def read_extents(*arguments: Any) -> Iterator[Any]:
        for extents in honest(*arguments):
            yield extents[:-1]

    put(stack, log_survey, "read_extents", read_extents)


def listing_is_believed(stack: Stack) -> None:
    """M26: a listing of the metadata that misses a ledger is enough to delete it: the collector reads no record."""
    honest = garbage.parse_ledger_ids

    def parse_ledger_ids(folder: str, names: list[str]) -> list[int]:
        return honest(folder, sorted(names)[:-1])

    async def confirmed(metadata: Any, ledgers: list[int]) -> list[int]:
        return ledgers

    put(stack, garbage, "parse_ledger_ids", parse_ledger_ids)
    put(stack, garbage, "_confirmed", confirmed)
    absence_is_proof(stack)


def absence_is_proof(stack: Stack) -> None:
    """M26b: a ledger without a record counts as deleted, also when its owner noted no deletion."""

    async def among(metadata: Any, ledgers: Any) -> BitMap64:
        return BitMap64(ledgers)

    put(stack, deletions, "find_deleted_ledgers", among)


def journal_is_not_noted(stack: Stack) -> None:
    """M27b: the metadata knows no position of a journal after that of its start: an older copy passes for a crash."""

    async def note_journal(*_: Any) -> bool:
        return True

    put(stack, identity, "store_journal_position", note_journal)


def added_disk_moves_ledgers(stack: Stack) -> None:
    """M27c: a directory that is added takes its share of all ledgers, also of those that are in another one."""
    put(stack, directories, "extend_generations", lambda known, count, upto: ((0, count),))


def failed_disk_is_written_on(stack: Stack) -> None:
    """M27d: after a failed sync of one of several disks its files are written on, as if nothing were unknown."""
    put(stack, IsolatedFiles, "check_writable", lambda self: None)


def failed_disk_takes_adds(stack: Stack) -> None:
    """M27e: a bookie with a failed disk takes adds to its ledgers, which come no further than the journal."""
    put(stack, Store, "failure", property(lambda self: None))
    honest = Store.add_entries

    def add(self: Store, *arguments: Any) -> Status:
        isolated, self._isolated = self._isolated, None
        try:
            return honest(self, *arguments)
        finally:
            self._isolated = isolated

    put(stack, Store, "add_entries", add)


def drops_without_a_second_look(stack: Stack) -> None:
    """M27f: surplus copies are dropped without a second look: a repair that asked in between names the bookie."""

    async def begin(self: GarbageCollector, surplus: BitMap64) -> int:
        self._store.dropping.update(surplus)
        if surplus:
            await self._store.record_dropped_copies()
        return len(surplus)

    put(stack, GarbageCollector, "_begin_dropping", begin)


def dropping_is_not_recorded(stack: Stack) -> None:
    """M27g: a bookie does not record that it dropped copies: it votes that their entries never existed."""

    async def nothing(self: Store) -> None:
        """Records nothing."""

    put(stack, Store, "record_dropped_copies", nothing)


def moves_that_help_nothing(stack: Stack) -> None:
    """M27h: a copy moves to any bookie that is not full, also where both are as far from each other afterwards."""

    def fits(self: Rebalancing, move: CopyMove) -> bool:
        return True

    put(stack, Rebalancing, "_improves", fits)


def moves_to_the_same_rack(stack: Stack) -> None:
    """M27i: a copy moves to a bookie whose rack has another copy of the entry."""
    put(stack, Rebalancing, "_keeps_racks", lambda *_: True)


def stopped_moves_are_not_counted(stack: Stack) -> None:
    """M27j: a rebalancing that is stopped does not wait for the copies that workers have begun."""
    honest = Rebalancer._is_under_way

    async def ended(self: Rebalancer, ledger: int, several: Any, *, stop: bool) -> bool:
        return await honest(self, ledger, several, stop=stop) and not stop

    put(stack, Rebalancer, "_is_under_way", ended)


def empty_disk_is_healthy(stack: Stack) -> None:
    """M27: a bookie whose directory is empty, or older than it was, starts as if nothing had happened."""
    honest = identity.judge_directory

    def judge(facts: Any) -> DirectoryVerdict:
        verdict = honest(facts)
        return DirectoryVerdict.START if verdict in (DirectoryVerdict.WIPED,
            DirectoryVerdict.ROLLED_BACK) and facts.cookie else verdict

    put(stack, identity, "judge_directory", judge)


def every_add_is_answered_from_memory(stack: Stack) -> None:
    """M99s: a bookie answers the adds of all ledgers before their sync, once one ledger is answered so."""
    honest = AddRequestHandler._admit
    seen = False

    def admit(self: AddRequestHandler, batch: VerifiedAddRequest) -> None:
        nonlocal seen
        seen = seen or batch.unsynced
        batch.unsynced = seen
        honest(self, batch)

    put(stack, AddRequestHandler, "_admit", admit)
