"""The auditor's part of a rebalancing: plans moves (rebalance_core.py), has workers make them, notes what was moved.

    order     an operator's, a RebalanceRecord with what each bookie uses (`make_rebalance_order`, bookie/admin.py)
    step      resolve   a move whose mark is gone was made if the ledger's record says so, else it is undone
              plan      moves of the next ledgers, until `LEDGERS_AT_ONCE` are under way
              note      the record, by compare-and-set
              mark      the ledgers: a worker makes the copy, then it is named (repair_core.py `FILL_STEPS`)

The record is written before the marks, so whatever auditor goes on knows each move that may be under way: none is
counted twice or forgotten. One that was never marked is undone, and planned again in the next pass over all ledgers. A
pass in which nothing was moved is the last one. Stopped, no further copy is begun; a worker ends the ledger that it has
begun. Missing copies come first: a ledger with a mark is not planned, and few moves wait for a worker at a time. The
old copies are left to garbage collection (garbage.py, surplus copies). Guarded by
tests/bookie/maintenance/test_rebalance.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import msgspec

from ...metadata import paths
from ...metadata.records import (
    BookieRecord,
    LedgerRecord,
    RebalanceRecord,
    UnderReplicatedRecord,
    encode_record,
)
from ...metadata.store import (
    MetadataStore,
    get_readable_record,
    iterate_nodes,
    parse_ledger_ids,
    read_readable_records,
)
from ...proto.errors import BadVersion
from ...runtime.clock import Clock
from . import marks
from .rebalance_core import (
    BookieLoad,
    CopyMove,
    RebalanceEnd,
    Rebalancing,
    count_uncollected,
    list_named_bookies,
)
from .repair_core import RepairReason, make_move_mark, remove_moves

_LOG = logging.getLogger("magnetar.bookie.repair")

LEDGERS_AT_ONCE = 32
"""The largest number of ledgers with moves under way in the cluster: repairs wait for no more than these, and a stop
takes effect soon."""
LEDGERS_PER_STEP = 4096
"""The largest number of ledgers whose records a step reads: some hundred milliseconds."""
UNCOLLECTED_S = 86400.0
"""For so many seconds after a rebalancing a new one takes into account what the bookies have not collected: the longest
time until a compaction has freed it, with the default settings."""
_PAGE = 256

FindRack = Callable[[str], str]


class Rebalancer:
    """Carries out the order of a rebalancing, as a part of the auditor. `find_rack` returns the rack of a bookie."""

    def __init__(self, metadata: MetadataStore, clock: Clock, find_rack: FindRack) -> None:
        self._metadata = metadata
        self._clock = clock
        self._find_rack = find_rack
        self.under_way: frozenset[int] = frozenset()  # ledgers of which copies move now
        self._record: RebalanceRecord | None = None

    def statistics(self) -> dict[str, int]:
        """Returns how far the latest order is; zeros if this process is not the auditor."""
        record = self._record
        if record is None:
            return dict.fromkeys(REBALANCE_NUMBERS, 0)
        left = 0 if record.ended_ms else max(0, record.planned_bytes - record.bytes)
        values = (int(not record.ended_ms), len(self.under_way), record.ledgers, record.bytes, left, record.skipped)
        return dict(zip(REBALANCE_NUMBERS, values, strict=True))

    def reset(self) -> None:
        """Forgets what was read: this process is not the auditor any more."""
        self._record, self.under_way = None, frozenset()

    async def run_step(self) -> bool:
        """Goes on with the order, if there is one that has not ended. Returns whether there is. Raises the errors of
        the metadata."""
        found = await get_readable_record(self._metadata, paths.REBALANCE, RebalanceRecord)
        self._record = None if found is None else found[0]
        if found is None or (found[0].ended_ms and not found[0].moves):
            self.under_way = frozenset()
            return False
        record, version = found
        plan = await make_plan(self._metadata, record, self._find_rack)
        after = await self._resolve(record, plan)
        marked: list[UnderReplicatedRecord] = []
        if not after.ended_ms:
            after = await self._plan(after, plan, marked)
        used = {**after.used, **{bookie: load.used for bookie, load in plan.loads.items()}}
        after = msgspec.structs.replace(after, used=used)
        self.under_way = frozenset(map(int, after.moves))
        if after != record:
            try:
                await self._metadata.put(paths.REBALANCE, encode_record(after, paths.REBALANCE), version)
            except BadVersion:
                return True  # an operator changed the order: the next step reads it
            self._record = after
            if after.ended_ms and not record.ended_ms:
                told = "%d ledgers were moved to emptier bookies (%d bytes): %s"
                _LOG.info(told, after.ledgers, after.bytes, after.end)
        for mark in marked:
            await marks.change_repair_mark(self._metadata, mark.ledger_id, partial(_mark_if_unmarked, mark))
        return not after.ended_ms or bool(after.moves)

    # ------------------------------------------------------------------------------ what was made
    async def _resolve(self, record: RebalanceRecord, plan: Rebalancing) -> RebalanceRecord:
        """Returns the order without the moves that have ended, counted or undone."""
        moves, moved_off = dict(record.moves), dict(record.moved_off)
        made = made_bytes = skipped = 0
        for name, several in record.moves.items():
            if await self._is_under_way(int(name), several, stop=bool(record.ended_ms)):
                continue
            del moves[name]
            ledger = await self._read_ledger(int(name))
            done = [CopyMove(*each) for each in several if ledger is not None and _was_made(ledger, each)]
            for each in several:
                if CopyMove(*each) not in done:
                    plan.undo(CopyMove(*each))
                    skipped += 1
            for move in done:
                moved_off[move.source] = moved_off.get(move.source, 0) + move.bytes
            made += bool(done)
            made_bytes += sum(move.bytes for move in done)
        return msgspec.structs.replace(
            record, moves=moves, moved_off=moved_off, ledgers=record.ledgers + made, bytes=record.bytes + made_bytes,
            moved_in_pass=record.moved_in_pass + made, skipped=record.skipped + skipped,
        )  # fmt: skip

    async def _is_under_way(self, ledger: int, several: tuple[tuple[str, str, int], ...], *, stop: bool) -> bool:
        """Returns whether a worker may still make one of these moves: the mark has it, or a worker has the ledger's
        lock. `stop`: first takes them out of the mark; then a worker that looks at the mark makes none, and one that
        has looked at it has the lock."""
        found = await marks.read_repair_mark(self._metadata, ledger)
        is_marked = found is not None and any(
            found[0].bookies.get(source) == RepairReason.MOVING.value and found[0].moves.get(source) == target
            for source, target, _ in several
        )
        if is_marked and not stop:
            return True
        if is_marked:
            await marks.change_repair_mark(self._metadata, ledger, remove_moves)
        return await self._metadata.get(paths.repair_lock(ledger)) is not None

    async def _read_ledger(self, ledger: int) -> LedgerRecord | None:
        found = await get_readable_record(self._metadata, paths.ledger(ledger), LedgerRecord)
        return None if found is None else found[0]

    # ------------------------------------------------------------------------------ what is next
    async def _plan(
        self, record: RebalanceRecord, plan: Rebalancing, marked: list[UnderReplicatedRecord]
    ) -> RebalanceRecord:  # fmt: skip
        """Returns the order with the moves of the next ledgers, or ended. Adds the marks that these need to
        `marked`."""
        moves, position, ended = dict(record.moves), record.position, False
        if len(moves) < LEDGERS_AT_ONCE and plan.full_bookies:
            have = {*await marks.list_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS), *map(int, moves)}
            looked, ended = 0, True
            async for ledger in read_ledgers(self._metadata, position):
                position, looked = ledger.ledger_id, looked + 1
                several = [] if ledger.ledger_id in have else plan.plan_ledger(ledger)
                if several:
                    moves[str(ledger.ledger_id)] = tuple(several)
                    targets = {each.source: each.target for each in several}
                    marked.append(make_move_mark(ledger, targets, self._clock.wall_ms()))
                if len(moves) >= LEDGERS_AT_ONCE or looked >= LEDGERS_PER_STEP or not plan.full_bookies:
                    ended = False
                    break
        record = msgspec.structs.replace(record, moves=moves, position=position)
        if moves or (plan.full_bookies and not ended):
            return record
        if not plan.full_bookies:
            return self._ended(record, RebalanceEnd.REACHED)
        if record.moved_in_pass:
            return msgspec.structs.replace(record, position=-1, moved_in_pass=0)
        return self._ended(record, RebalanceEnd.EXHAUSTED)

    def _ended(self, record: RebalanceRecord, end: RebalanceEnd) -> RebalanceRecord:
        return msgspec.structs.replace(record, ended_ms=self._clock.wall_ms(), end=end.value)


REBALANCE_NUMBERS = (
    "rebalance_running", "rebalance_under_way", "rebalance_ledgers", "rebalance_bytes", "rebalance_bytes_left",
    "rebalance_skipped",
)  # fmt: skip
"""The names of the numbers of `Rebalancer.statistics`. All of them can fall: a new order begins at zero."""


def _mark_if_unmarked(wanted: UnderReplicatedRecord, now: UnderReplicatedRecord | None) -> UnderReplicatedRecord:
    return wanted if now is None else now


def _was_made(ledger: LedgerRecord, move: tuple[str, str, int]) -> bool:
    named = list_named_bookies(ledger)
    return move[0] not in named and move[1] in named


async def make_plan(metadata: MetadataStore, order: RebalanceRecord, find_rack: FindRack) -> Rebalancing:
    """Returns the plan of an order, with the bookies of the order that are registered now. Raises the errors of the
    metadata."""
    there = await marks.list_registered_bookies(metadata)
    departing = await marks.list_departing_bookies(metadata)
    loads = {
        bookie: BookieLoad(order.total[bookie], used, find_rack(bookie), there[bookie], bookie in departing)
        for bookie, used in order.used.items() if bookie in there
    }  # fmt: skip
    return Rebalancing(order.share, loads, order.group)


def make_rebalance_order(
    share: float, group: str, there: Mapping[str, BookieRecord], before: RebalanceRecord | None, now_ms: int
) -> RebalanceRecord:
    """Returns an order of now, with what each registered bookie uses. `before`: the latest order, of which the bookies
    may not have collected everything."""
    used = {bookie: each.total_bytes - each.free_bytes for bookie, each in there.items() if each.total_bytes > 0}
    left: dict[str, int] = {}
    if before is not None and now_ms - before.ended_ms <= 1000 * UNCOLLECTED_S:
        found = {
            bookie: count_uncollected(size, before.before.get(bookie, 0), used[bookie])
            for bookie, size in before.moved_off.items() if bookie in used
        }  # fmt: skip
        left = {bookie: size for bookie, size in found.items() if size}
    return RebalanceRecord(
        share=share, group=group, since_ms=now_ms, total={bookie: there[bookie].total_bytes for bookie in used},
        used={bookie: max(0, size - left.get(bookie, 0)) for bookie, size in used.items()}, before=used, moved_off=left,
    )  # fmt: skip


async def count_moves(metadata: MetadataStore, plan: Rebalancing) -> tuple[int, int, list[CopyMove]]:
    """Plans one pass over all ledgers, without a move. Returns (how many ledgers would move, how many bytes, the moves
    summed up by source and target). Raises the errors of the metadata."""
    ledgers = size = 0
    sums: dict[tuple[str, str], int] = {}
    marked = set(await marks.list_ledger_ids(metadata, paths.UNDER_REPLICATED_LEDGERS))
    async for ledger in read_ledgers(metadata):
        moves = [] if ledger.ledger_id in marked else plan.plan_ledger(ledger)
        ledgers += bool(moves)
        for move in moves:
            size += move.bytes
            sums[move.source, move.target] = sums.get((move.source, move.target), 0) + move.bytes
        if not plan.full_bookies:
            break
    return ledgers, size, [CopyMove(*pair, total) for pair, total in sums.items()]


async def read_ledgers(metadata: MetadataStore, after: int = -1) -> AsyncIterator[LedgerRecord]:
    """Yields the records of all ledgers with ids above `after`, ascending by id. Leaves out records that cannot be
    read. Raises the errors of the metadata."""
    segment = "" if after < 0 else f"{after:020d}"
    async for names in iterate_nodes(metadata, paths.LEDGERS, segment, _PAGE):
        wanted = [f"{ledger:020d}" for ledger in parse_ledger_ids(paths.LEDGERS, names)]
        for record in (await read_readable_records(metadata, paths.LEDGERS, LedgerRecord, wanted)).values():
            yield record
