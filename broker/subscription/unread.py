"""Determines which entries the filter of a subscription need not read: those that the key index of their sealed ledger
excludes.

    unread = UnreadEntries(filter.root, topic.key_indexes, wake)
    run = unread.find_run(log.shape, position)       None: the index is being read, and `wake` is called after it

A *run* is consecutive blocks of one ledger (broker/log/key_index_core.py) that may all have a wanted message, or that
all have none. The filter acknowledges a run that has none, without reading it (filtering.py). The read-ahead reads from
one run that may have some to the next (read_ahead.py): of a ledger that has nothing, only the index is read.

Rules
- **Never a wanted message.** An index proves that a block has none; what it does not know is read: a ledger that is
  open, or without an index, entries that do not parse, encrypted batches, publish times (`KeyIndex.find_candidates`,
  `hidden`). All chunks of a message have its properties and its key, so an index excludes all of them or none.
- The index is that of the topic's log. Subscriptions that read the compacted form get tombstones, and use no index.
- One look-up at a time, of one ledger: it reads the directory and a page for each text of the filter. It ends after
  LOOK_UP_S, or with an error: then the ledger is read.
- What was found holds for ever, because a sealed ledger does not change. That of the last LEDGERS_KEPT ledgers is kept.

Guarding tests: tests/broker/subscription/test_unread.py.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.errors import MagnetarError
from ...proto.filters import Node
from ...proto.names import Position
from ...runtime.tasks import Tasks
from ..log.key_index_core import DamagedKeyIndex, EntryRun
from ..log.key_indexes import KeyIndexes
from ..log.log_shape_core import LogShape, Span, run_end

_LOG = logging.getLogger("magnetar.broker.subscription")

LOOK_UP_S = 5.0
"""Seconds after which a ledger is read although its index has not answered."""
LEDGERS_KEPT = 8
"""Ledgers whose runs are kept, 300 KB each at most: that of the consumers, and those that are read ahead."""


class Run(NamedTuple):
    """The entries of a ledger from the requested one up to and including the entry id `last`. `is_excluded`: none of
    them has a wanted message."""

    last: int
    is_excluded: bool


class IndexedLedger:
    """The runs of one sealed ledger. `blocks`: its blocks, as its key index has them; `candidates`: the numbers of
    those blocks that may have a wanted message; `last_entry`: the id of its last entry."""

    __slots__ = ("_blocks", "_candidates", "_excluded", "_last_entry")

    def __init__(self, blocks: Sequence[EntryRun], candidates: BitMap, last_entry: int) -> None:
        self._blocks = blocks
        self._candidates = candidates
        self._excluded = BitMap(range(len(blocks))) - candidates
        self._last_entry = last_entry

    def find_run(self, entry_id: int) -> Run:
        """Returns the run from this entry on. An entry before the first block is in a run that is not excluded."""
        number = self._find_block(entry_id)
        if number < 0:
            return Run(self._last_entry, is_excluded=False)
        is_excluded = number in self._excluded
        end = run_end(self._excluded if is_excluded else self._candidates, number) + 1
        last = self._blocks[end].first_entry - 1 if end < len(self._blocks) else self._last_entry
        return Run(last, is_excluded)

    def find_indexes(self, first: int, last: int) -> tuple[int, int] | None:
        """Returns (the index of the first message of the entries from `first` to `last`, the index after their last
        message). Returns None unless these entries are whole blocks."""
        begin, end = self._find_block(first), self._find_block(last)
        following = self._blocks[end + 1].first_entry if end + 1 < len(self._blocks) else self._last_entry + 1
        if begin < 0 or self._blocks[begin].first_entry != first or following != last + 1:
            return None
        return self._blocks[begin].first_index, self._blocks[end].end_index

    def _find_block(self, entry_id: int) -> int:
        return bisect_right(self._blocks, entry_id, key=lambda each: each.first_entry) - 1


class UnreadEntries:
    """Determines which entries of a topic one filter need not read. `wake`: a function that is called after each
    look-up."""

    __slots__ = ("_expression", "_indexes", "_kept", "_looks_up", "_tasks", "_wake")

    def __init__(self, expression: Node, indexes: KeyIndexes, wake: Callable[[], None]) -> None:
        self._expression = expression
        self._indexes = indexes
        self._wake = wake
        self._kept: dict[int, IndexedLedger | None] = {}  # by ledger, the latest last; None: it has to be read
        self._looks_up = False
        self._tasks: Tasks | None = None

    def find_run(self, shape: LogShape, position: Position) -> Run | None:
        """Returns the run from the entry at `position` on. If the index of its ledger was not read yet, returns None,
        and starts a look-up unless one (also of another ledger) is in progress; the caller must ask again when `wake`
        is called. A ledger that is open or has no index is one run that is not excluded."""
        ledger_id, entry_id = position
        if ledger_id not in self._kept:
            span = shape.find_span_of_ledger(ledger_id)
            if span is None or span.open or not self._indexes.is_on or not self._indexes.describe_index(ledger_id):
                return Run(1 << 62, is_excluded=False)
            self._start_look_up(span)
            return None
        ledger = self._kept[ledger_id]
        return Run(1 << 62, is_excluded=False) if ledger is None else ledger.find_run(entry_id)

    def count_messages(self, shape: LogShape, first: Position, last_entry: int) -> int | None:
        """Returns how many messages of the entries from `first` to `last_entry` (inclusive, in the ledger of `first`)
        readers see. Returns None if these entries are not whole blocks, or their index was not read."""
        ledger = self._kept.get(first[0])
        found = ledger.find_indexes(first[1], last_entry) if ledger is not None else None
        return None if found is None else found[1] - found[0] - shape.count_aborted_messages(*found)

    def _start_look_up(self, span: Span) -> None:
        if not self._looks_up:
            self._looks_up = True
            if self._tasks is None:
                self._tasks = Tasks()
            self._tasks.spawn(self._look_up(span.ledger_id, span.last_entry), "key index of a filtered ledger")

    async def _look_up(self, ledger_id: int, last_entry: int) -> None:
        found: IndexedLedger | None = None
        try:
            async with asyncio.timeout(LOOK_UP_S):
                found = await self._open_ledger(ledger_id, last_entry)
        except (MagnetarError, DamagedKeyIndex) as error:
            self._indexes.on_index_unusable(ledger_id, error)
        except Exception as error:
            _LOG.warning("%s: the index of ledger %d is not used: %r", self._indexes.topic, ledger_id, error)
        finally:
            while len(self._kept) >= LEDGERS_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[ledger_id] = found
            self._looks_up = False
            self._wake()

    async def _open_ledger(self, ledger_id: int, last_entry: int) -> IndexedLedger | None:
        search = await self._indexes.open_index(ledger_id)
        if search is None:
            return None
        candidates = await search.find_candidates(self._expression, hidden=True)
        return IndexedLedger(search.index.blocks, candidates, last_entry)

    def stop(self) -> None:
        """Cancels the look-up in progress."""
        if self._tasks is not None:
            self._tasks.cancel()

    async def drain(self) -> None:
        """Waits until the look-up that `stop` has cancelled has ended. Must be called after `stop`."""
        if self._tasks is not None:
            await self._tasks.drain()
