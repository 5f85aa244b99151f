"""Looks up all chunks of the message of which one entry is a chunk, for the dead letters.

Between the first and the last chunk of a message its producer publishes nothing else (client/core/chunking.py), and
other producers anything. So the log is read backwards from the entry to its producer's entry before the message, and
forwards until the message is whole. The cursor's mark ends the way back: what is before it is acknowledged. After chunk
0 the way back goes on for REPEATED_ENTRIES, because a producer repeats what has no receipt.

| what is found | answer |
|---|---|
| the chunks from 0 to the last | the run of them |
| no beginning, a gap, a damaged chunk, a later entry of the producer before the last chunk | None: it is never whole |
| the end of the log before the last chunk, which may be on its way | Unavailable; None after INCOMPLETE_MS |

Nothing is kept of what is read but the places. It costs the entries between the ends; dead letters are rare.
Guarding tests: tests/broker/subscription/test_letters_of_chunks.py, tests/broker/subscription/core/test_chunk_runs.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

from ...proto.entry import parse_header, parse_stored
from ...proto.errors import CorruptEntry, DataLost, Unavailable
from ...proto.names import Position
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from .core.chunk_runs import Chunk, Run, run_at, runs_of

WINDOW_ENTRIES = 256
"""Entries of one step backwards."""
READ_BYTES = 1 << 20
REPEATED_ENTRIES = 2000
SEARCH_ENTRIES_MAX = 200_000
"""Entries that one search reads, in both directions and of all messages that it looks for: some seconds. A chunk that
is not found by then counts as missing. A skip or seek among chunks of very many foreign messages costs no more."""
INCOMPLETE_MS = 3_600_000
"""Milliseconds without a chunk after which an incomplete message at the end of the log has no producer any more."""


class _Budget:
    """Entries that may still be read."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = SEARCH_ENTRIES_MAX


async def message_of(
    log: ReadableLog, entry: StoredEntry, mark: Position, now_ms: int, budget: _Budget | None = None
) -> Run | None:
    """The message that the chunk is of. Unavailable: the rest of it may still be stored."""
    search = _Search(log, entry, _Budget() if budget is None else budget)
    found = await search.before(mark)
    found.append(search.chunk(entry))
    latest_ms, went_on = entry.timestamp_ms, False
    async for each in search.after():
        if each.chunk_of == search.uuid:
            found.append(search.chunk(each))
            latest_ms = each.timestamp_ms
            if any(run.whole and entry.position in run.places for run in runs_of(found)):
                break
        elif search.is_of_producer(each):
            went_on = True
            break
    run, last = run_at(found, entry.position)
    if run.whole:
        return run
    if run.chunks and last and not went_on and search.at_end and now_ms - latest_ms < INCOMPLETE_MS:
        raise Unavailable(f"the message of the chunk {entry.position} is not complete yet")
    return None


async def divided_by(log: ReadableLog, mark: Position) -> list[Run]:
    """The messages of which the mark covers some chunks and not all. Looked for in the entry at the mark, and in those
    after it as far as one read goes."""
    shape, runs, seen, budget = log.shape, list[Run](), set[str](), _Budget()
    entries = list[StoredEntry]()
    if shape.readable(mark) and shape.hole(mark) is None:
        with suppress(DataLost):  # a message of which a chunk is lost is not whole: no mark divides it
            entries += [await log.reader.entry(mark)]
    following = shape.there(shape.after(mark))
    if shape.readable(following):
        with suppress(DataLost):
            entries += await log.reader.read(following, READ_BYTES)
    for entry in entries:
        if not entry.chunk_of or entry.chunk_of in seen or budget.left <= 0:
            continue
        seen.add(entry.chunk_of)
        try:
            run = await message_of(log, entry, Position(-1, -1), log.world.clock.wall_ms(), budget)
        except (Unavailable, DataLost):
            continue  # the rest is not here yet, or never will be
        if run is not None and run.places[0] <= mark < run.places[-1]:
            runs.append(run)
    return runs


async def rest_of(log: ReadableLog, mark: Position) -> list[Position]:
    """Returns the chunks after the mark of messages that it divides: a skip or an expiry of a part of a message means
    all of it."""
    return [place for run in await divided_by(log, mark) for place in run.places if place > mark]


async def before_whole(log: ReadableLog, mark: Position) -> Position:
    """The mark, or the one before the first message that it divides: who seeks into a message gets all of it."""
    return min([mark, *(log.shape.before(run.places[0]) for run in await divided_by(log, mark))])


class _Search:
    def __init__(self, log: ReadableLog, entry: StoredEntry, budget: _Budget) -> None:
        self._budget = budget
        self.uuid = entry.chunk_of
        self.at_end = False
        self._log = log
        self._entry = entry
        self._producer = parse_stored(entry.frames[-1]).metadata.producer_name

    def is_of_producer(self, entry: StoredEntry) -> bool:
        return parse_stored(entry.frames[-1]).metadata.producer_name == self._producer

    def chunk(self, entry: StoredEntry) -> Chunk:
        """Returns the chunk of an entry; -1 is the number of one that is damaged."""
        try:
            metadata = parse_header(entry.frames[-1]).metadata
        except CorruptEntry:
            return Chunk(entry.position, -1, 1)
        return Chunk(entry.position, metadata.chunk_id, metadata.num_chunks_from_msg)

    async def before(self, mark: Position) -> list[Chunk]:
        """Returns the chunks before the entry, in log order."""
        shape, found, left = self._log.shape, list[Chunk](), self._budget.left
        end = self._entry.position
        while left > 0 and (last := shape.before(end)) > mark and last < end and last.entry_id >= 0:
            first = max(Position(last.ledger_id, max(0, last.entry_id - WINDOW_ENTRIES + 1)), shape.after(mark))
            window = [each async for each in self._read(first, last)]
            self._budget.left -= len(window)
            for each in reversed(window):
                left -= 1
                if each.chunk_of == self.uuid:
                    chunk = self.chunk(each)
                    found.append(chunk)
                    if chunk.number == 0:
                        left = min(left, REPEATED_ENTRIES)
                elif self.is_of_producer(each):
                    left = 0
                    break
            end = first
        return found[::-1]

    async def after(self) -> AsyncIterator[StoredEntry]:
        shape, budget = self._log.shape, self._budget
        position = shape.after(self._entry.position)
        while budget.left > 0 and shape.readable(position := shape.there(position)):
            async for each in self._read(position, Position(position.ledger_id, (1 << 62) - 1), once=True):
                yield each
                budget.left -= 1
                position = shape.after(each.position)
        self.at_end = budget.left > 0

    async def _read(self, first: Position, last: Position, *, once: bool = False) -> AsyncIterator[StoredEntry]:
        """Yields entries of one ledger from `first` to `last`; `once`: of one read."""
        shape = self._log.shape
        position = shape.there(first)
        while position <= last and shape.readable(position):
            for each in await self._log.reader.read(position, READ_BYTES, last.entry_id):
                yield each
                position = shape.there(shape.after(each.position))
            if once:
                return
