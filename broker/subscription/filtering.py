"""The filter of a subscription at the broker: messages that it does not want are acknowledged before they are assigned
to a consumer.

    filtering = SubscriptionFilter(wanted, …)                 with the subscription, or when an operator sets a filter
    filtering.ack_excluded_unread_entries(log, position)                           in the pump, before it reads new
    entries judged, entries = filtering.select_wanted_entries(entries, new=True, end=…)   … and before
    `Dispatcher.assign_entries`

Rules
- Each entry is judged once, in log order, when the pump reads it for the first time: `judged_up_to` is the last one. A
  delayed entry is judged again when it is due: the reading passed over it if it was delayed before the filter was set.
- **An entry in which nothing is wanted is acknowledged for this subscription.** It costs no permits and no rate, waits
  for no key, is never delayed and counts no failure: to the dispatcher it is a hole.
- **What is known to have nothing wanted is not looked into**: a batch by its summary (proto/summary.py), which is then
  neither decompressed nor parsed, and entries of a sealed ledger by its key index (`UnreadEntriesOfFilter`), which are
  not even read. It is acknowledged when the pump comes to it, like all else, and counted in `filtered_unread` too.
- **Of a mixed batch the unwanted messages are acknowledged by index**, if all consumers acknowledge by index. Otherwise
  it is shown whole and counted (`shown_unwanted`): a client that hides messages and acknowledges whole entries would
  never acknowledge it. The SDK drops the rest itself (client/consume/deliveries.py).
- The acknowledgements are kept in memory and written with the next write of the cursor. If they are lost, the entries
  are judged again, with the same result (proto/entry_filter.py). They are outside of any transaction.
- After a seek all entries are judged again (`restart_judging`), and after a change to a log of another form. What was
  filtered is not brought back by another filter: it is acknowledged.
- Judging ends with the slice of the pump, and after PUMPED_ENTRIES_MAX entries. An entry that takes long to unfold
  (broker/log/unfolding.py), the sooner the longer the filter is, is judged in a thread, and what follows it waits.

A subscription without a filter has no such object, and the pump does nothing for it. Guarding tests:
tests/broker/subscription/test_filtering.py, tests/broker/subscription/core/test_dispatch_walk.py.

Also in this file, below its heading: which entries the filter need not read (unread).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.entry import StoredEntryHead, parse_stored_head
from ...proto.entry_filter import EntryFilter
from ...proto.errors import CorruptEntry, MagnetarError
from ...proto.filters import Filter, FilterNode
from ...proto.names import EARLIEST, Position
from ...runtime.clock import Clock
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..log.cache import StoredEntry
from ..log.key_index_core import DamagedKeyIndex, EntryRun
from ..log.key_indexes import KeyIndexes
from ..log.log import ReadableLog
from ..log.log_shape_core import LedgerSpan, LogShape, find_end_of_contiguous
from ..log.unfolding import THREAD_UNFOLD_BYTES, is_entry_slow_to_parse, run_in_thread
from .acks import SubscriptionAcks, UnwantedMessages
from .core.dispatch import Dispatcher

_LOG = logging.getLogger("magnetar.broker.subscription")

ENTRY_ID_MAX = 1 << 62
FILTER_COST_CHARACTERS = 64
"""Characters of a filter that cost as much as unfolding: a filter of so many times as many judges batches in the event
loop up to that part of THREAD_UNFOLD_BYTES. Each of its searches may look at all the text of a batch."""


class SubscriptionFilter:
    """Judges the entries of one subscription by its filter, and acknowledges what the filter does not want. Its
    counters count since the filter was set or the topic was loaded."""

    __slots__ = (
        "_acks", "_aside", "_clock", "_dispatcher", "_found_aside", "_judge", "_on_acked", "_quick_bytes", "_tasks",
        "_unread", "_wake",
        "filtered", "filtered_entries", "filtered_unread", "judged", "judged_up_to", "shown_unwanted",
    )  # fmt: skip

    def __init__(
        self, wanted: Filter, dispatcher: Dispatcher, acks: SubscriptionAcks, clock: Clock, *,
        wake: Callable[[], None], on_acked: Callable[[], None], redriven_to: str = "",
        indexes: KeyIndexes | None = None,
    ) -> None:  # fmt: skip
        """`redriven_to`: see `EntryFilter`; `wake`: a function that runs the pump in the next turn; `on_acked`: one
        that is called after acknowledgements and has them stored with the next write of the cursor; `indexes`: those of
        the topic's ledgers."""
        self._judge = EntryFilter(wanted, redriven_to=redriven_to)
        self._quick_bytes = THREAD_UNFOLD_BYTES // (1 + len(wanted.text) // FILTER_COST_CHARACTERS)
        self._dispatcher = dispatcher
        self._acks = acks
        self._clock = clock
        self._wake = wake
        self._unread = None if indexes is None else UnreadEntriesOfFilter(wanted.root, indexes, wake)
        self._on_acked = on_acked
        self._tasks: Tasks | None = None  # of entries that are judged in a thread
        self._aside: Position | None = None  # the entry that is being judged in a thread
        self._found_aside: tuple[Position, int] | None = None
        self.judged_up_to = EARLIEST
        self.judged = 0  # messages
        self.filtered = 0  # messages that were not wanted, and acknowledged …
        self.filtered_entries = 0  # … whole entries of them
        self.filtered_unread = 0  # … messages that were not looked at; one an entry, where only a part of a block was
        self.shown_unwanted = 0  # messages that are not wanted, in batches that consumers get whole

    @property
    def filter(self) -> Filter:
        """The filter of the subscription."""
        return self._judge.filter

    def make_entry_filter(self, *, keeps_tombstones: bool) -> EntryFilter:
        """Returns a new judge of the same filter, for this subscription. `keeps_tombstones`: each tombstone is
        wanted."""
        return EntryFilter(self.filter, keeps_tombstones=keeps_tombstones, redriven_to=self._judge.redriven_to)

    def restart_judging(self, *, compacted: bool) -> None:
        """Resets the position up to which entries were judged, because the subscription was moved or reads another form
        of the log. `compacted`: it reads the compacted form, in which each tombstone is wanted."""
        self.judged_up_to = EARLIEST
        self._found_aside = None
        if compacted is not self._judge.keeps_tombstones:
            self._judge = self.make_entry_filter(keeps_tombstones=compacted)

    def ack_excluded_unread_entries(self, log: ReadableLog, position: Position) -> int | None:
        """Acknowledges, without reading them, the entries from `position` on that the key index of their ledger
        excludes. `position` is the next one to be read. Covers entries of one ledger that readers see by now. Returns
        how many entries were acknowledged; 0 if no index excludes the entry at `position`; None if the index must be
        read first, and then the pump is woken when it is read."""
        unread, shape = self._unread, log.shape
        if unread is None or log.is_compacted:
            return 0
        run = unread.find_run_from(shape, position)
        if run is None or not run.is_excluded:
            return 0 if run is not None else None
        (ledger_id, first), stable = position, shape.stable_position
        last = min(run.last, stable[1]) if stable[0] == ledger_id else run.last
        entries = BitMap(range(first, last + 1)) - (shape.hidden_entries_of_ledger(ledger_id) or BitMap())
        acked = self._acks.ack_unwanted({ledger_id: entries}, ())
        if acked:
            messages = unread.count_messages(shape, position, last) if acked == len(entries) else None
            messages = acked if messages is None else messages
            self.judged += messages
            self.filtered += messages
            self.filtered_unread += messages
            self.filtered_entries += acked
            self.judged_up_to = max(self.judged_up_to, Position(ledger_id, last))
            self._on_acked()
        return acked

    def find_next_to_read(self, log: ReadableLog, position: Position) -> Position | None:
        """Returns the first position at or after `position` that no key index excludes; the position after the last
        readable entry if all are excluded. Returns None if an index must be read first, and then the pump is woken when
        it is read."""
        if self._unread is None or log.is_compacted:
            return position
        while log.shape.has_visible_entry(position):
            run = self._unread.find_run_from(log.shape, position)
            if run is None or not run.is_excluded:
                return position if run is not None else None
            position = log.shape.position_after(Position(position[0], run.last))
        return position

    def find_last_to_read(self, log: ReadableLog, position: Position) -> int:
        """Returns the id of the last entry that a read from `position` on should return: the entry after it is
        excluded, or in another ledger; that of `position` itself if it is excluded. Returns ENTRY_ID_MAX if no key
        index says so."""
        run = None if self._unread is None or log.is_compacted else self._unread.find_run_from(log.shape, position)
        if run is None:
            return ENTRY_ID_MAX
        return position[1] if run.is_excluded else run.last

    def select_wanted_entries(
        self, entries: Sequence[StoredEntry], world: World, end: float, *, new: bool
    ) -> tuple[int, Sequence[StoredEntry]]:
        """Judges entries, and acknowledges what is not wanted. Returns (how many of them were judged, from the first
        one on; those of them that the dispatcher may assign).

        `new`: the entries are read in log order, and judged up to a gap, which was passed over or has to be judged
        first. Otherwise they are delivered again, and those are judged that were delayed. `end`: the monotonic time in
        seconds at which judging stops. If the first entry takes long, a thread judges it, and 0 is returned; the pump
        is woken when that is done."""
        wanted: list[StoredEntry] = []
        whole: dict[int, list[int]] = {}
        parts: list[UnwantedMessages] = []
        cursor, now = self._dispatcher.cursor, self._clock.monotonic
        by_index = all(member.acks_by_index for member in self._dispatcher.members.values())
        done, following = 0, entries[0].position if entries else EARLIEST
        for entry in entries:
            position = entry.position
            if new and position != following:
                break
            following = Position(position[0], position[1] + 1)
            if (position > self.judged_up_to) if new else entry.deliver_at_ms:
                unwanted = 0
                if not (cursor.acked and cursor.is_acked(position)):
                    found = self._find_unwanted_bits(entry, world)
                    if found is None:
                        break
                    unwanted = found
                    self.judged += entry.count if new else 0
                if new:
                    self.judged_up_to = position
                if unwanted and unwanted.bit_count() >= entry.count:
                    whole.setdefault(position[0], []).append(position[1])
                    self.filtered += entry.count
                    self.judged += 0 if new else entry.count  # delayed since before the filter was set
                    done += 1
                    if now() > end:
                        break
                    continue
                if unwanted and by_index:
                    parts.append(UnwantedMessages(position, unwanted, entry.count))
                if new and unwanted:
                    self._count_mixed(unwanted.bit_count(), hidden=by_index)
            wanted.append(entry)
            done += 1
            if now() > end:
                break
        if whole or parts:
            self.filtered_entries += self._acks.ack_unwanted({id_: BitMap(each) for id_, each in whole.items()}, parts)
            self._on_acked()
        return done, wanted

    def _count_mixed(self, messages: int, *, hidden: bool) -> None:
        if hidden:
            self.filtered += messages
        else:
            self.shown_unwanted += messages

    def on_shown_unwanted_acked(self, messages: int) -> None:
        """Called when unwanted messages that were delivered with their batch are acknowledged after all, because the
        rest of the batch has expired. Moves `messages` from one counter to the other."""
        self.shown_unwanted -= messages
        self.filtered += messages

    def find_unwanted_if_quick(self, entry: StoredEntry) -> int:
        """Returns which messages of the entry are not wanted, as bits (bit i: message i). Returns 0 if judging would
        take long, or the entry is damaged. Counts and acknowledges nothing."""
        try:
            head = parse_stored_head(entry.frames[-1])
        except CorruptEntry:
            return 0
        return 0 if self._takes_long(head, entry) else self._judge.find_unwanted_bits(head, entry.frames[-1])

    def _takes_long(self, head: StoredEntryHead, entry: StoredEntry) -> bool:
        metadata = head.metadata
        return metadata.HasField("num_messages_in_batch") and (
            is_entry_slow_to_parse(metadata)
            or max(metadata.uncompressed_size, len(entry.frames[-1])) > self._quick_bytes
        )

    def _find_unwanted_bits(self, entry: StoredEntry, world: World) -> int | None:
        """Returns which messages of the entry are not wanted, as bits; None if that takes long: a task finds it."""
        found = self._found_aside
        if found is not None and found[0] == entry.position:
            self._found_aside = None
            return found[1]
        data = entry.frames[-1]
        try:
            head = parse_stored_head(data)
        except CorruptEntry:
            return 0  # its consumer reports the damage
        if self._judge.excludes(head.metadata):
            self.filtered_unread += entry.count
            return (1 << entry.count) - 1
        if self._takes_long(head, entry):
            if self._aside is None:
                self._aside = entry.position
                if self._tasks is None:
                    self._tasks = Tasks()
                self._tasks.spawn(self._judge_aside(entry, world), "filter of a long entry")
            return None
        return self._judge.find_unwanted_bits(head, data)

    async def _judge_aside(self, entry: StoredEntry, world: World) -> None:
        asked, unwanted = self._judge, 0
        try:
            unwanted = await self.judge_stored_entry(entry, world)
        except Exception:
            _LOG.exception("entry %s cannot be judged: consumers get all of it", entry.position)
        finally:
            self._aside = None
            if asked is self._judge:
                self._found_aside = entry.position, unwanted
            self._wake()

    async def judge_stored_entry(self, entry: StoredEntry, world: World) -> int:
        """Judges an entry in a thread, and returns which of its messages are not wanted, as bits (bit i: message i).
        Counts and acknowledges nothing. Raises CorruptEntry if the head of the entry cannot be read."""
        judge = self.make_entry_filter(keeps_tombstones=self._judge.keeps_tombstones)
        data = entry.frames[-1]
        return await run_in_thread(world, judge.find_unwanted_bits, parse_stored_head(data), data)

    def stop(self) -> None:
        """Cancels the judging of a long entry and the reading of a key index."""
        if self._unread is not None:
            self._unread.stop()
        if self._tasks is not None:
            self._tasks.cancel()

    async def wait_stopped(self) -> None:
        """Waits until the tasks that `stop` has cancelled have ended. Must be called after `stop`."""
        if self._unread is not None:
            await self._unread.wait_stopped()
        if self._tasks is not None:
            await self._tasks.drain()


# --------------------------------------------------------------------------------------------------------------- unread
# Determines which entries the filter of a subscription need not read: those that the key index of their sealed ledger
# excludes.
#
#     unread = UnreadEntriesOfFilter(filter.root, topic.key_indexes, wake)
#     run = unread.find_run_from(log.shape, position)       None: the index is being read, and `wake` is called after it
#
# A *run* is consecutive blocks of one ledger (broker/log/key_index_core.py) that may all have a wanted message, or that
# all have none. The filter acknowledges a run that has none, without reading it. The read-ahead reads
# from one run that may have some to the next (read_ahead.py): of a ledger that has nothing, only the index is read.
#
# Rules
# - **Never a wanted message.** An index proves that a block has none; what it does not know is read: a ledger that is
#   open, or without an index, entries that do not parse, encrypted batches, publish times (`KeyIndex.find_candidates`,
#   `hidden`). All chunks of a message have its properties and its key, so an index excludes all of them or none.
# - The index is that of the topic's log. Subscriptions that read the compacted form get tombstones, and use no index.
# - One look-up at a time, of one ledger: it reads the directory and a page for each text of the filter. It ends after
#   INDEX_LOOK_UP_TIMEOUT_S, or with an error: then the ledger is read.
# - What was found holds for ever, because a sealed ledger does not change. That of the last CACHED_LEDGERS_MAX ledgers
#   is kept.
#
# Guarding tests: tests/broker/subscription/test_unread.py.


INDEX_LOOK_UP_TIMEOUT_S = 5.0
"""Seconds after which a ledger is read although its index has not answered."""
CACHED_LEDGERS_MAX = 8
"""Ledgers whose runs are kept, 300 KB each at most: that of the consumers, and those that are read ahead."""


class UnreadRun(NamedTuple):
    """The entries of a ledger from the requested one up to and including the entry id `last`. `is_excluded`: none of
    them has a wanted message."""

    last: int
    is_excluded: bool


class UnreadRunsOfLedger:
    """The runs of one sealed ledger. `blocks`: its blocks, as its key index has them; `candidates`: the numbers of
    those blocks that may have a wanted message; `last_entry`: the id of its last entry."""

    __slots__ = ("_blocks", "_candidates", "_excluded", "_last_entry")

    def __init__(self, blocks: Sequence[EntryRun], candidates: BitMap, last_entry: int) -> None:
        self._blocks = blocks
        self._candidates = candidates
        self._excluded = BitMap(range(len(blocks))) - candidates
        self._last_entry = last_entry

    def find_run(self, entry_id: int) -> UnreadRun:
        """Returns the run from this entry on. An entry before the first block is in a run that is not excluded."""
        number = self._find_block(entry_id)
        if number < 0:
            return UnreadRun(self._last_entry, is_excluded=False)
        is_excluded = number in self._excluded
        end = find_end_of_contiguous(self._excluded if is_excluded else self._candidates, number) + 1
        last = self._blocks[end].first_entry - 1 if end < len(self._blocks) else self._last_entry
        return UnreadRun(last, is_excluded)

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


class UnreadEntriesOfFilter:
    """Determines which entries of a topic one filter need not read. `wake`: a function that is called after each
    look-up."""

    __slots__ = ("_expression", "_indexes", "_kept", "_looks_up", "_tasks", "_wake")

    def __init__(self, expression: FilterNode, indexes: KeyIndexes, wake: Callable[[], None]) -> None:
        self._expression = expression
        self._indexes = indexes
        self._wake = wake
        self._kept: dict[int, UnreadRunsOfLedger | None] = {}  # by ledger, the latest last; None: it has to be read
        self._looks_up = False
        self._tasks: Tasks | None = None

    def find_run_from(self, shape: LogShape, position: Position) -> UnreadRun | None:
        """Returns the run from the entry at `position` on. If the index of its ledger was not read yet, returns None,
        and starts a look-up unless one (also of another ledger) is in progress; the caller must ask again when `wake`
        is called. A ledger that is open or has no index is one run that is not excluded."""
        ledger_id, entry_id = position
        if ledger_id not in self._kept:
            span = shape.find_span_of_ledger(ledger_id)
            if span is None or span.open or not self._indexes.is_on or not self._indexes.describe_index(ledger_id):
                return UnreadRun(1 << 62, is_excluded=False)
            self._start_look_up(span)
            return None
        ledger = self._kept[ledger_id]
        return UnreadRun(1 << 62, is_excluded=False) if ledger is None else ledger.find_run(entry_id)

    def count_messages(self, shape: LogShape, first: Position, last_entry: int) -> int | None:
        """Returns how many messages of the entries from `first` to `last_entry` (inclusive, in the ledger of `first`)
        readers see. Returns None if these entries are not whole blocks, or their index was not read."""
        ledger = self._kept.get(first[0])
        found = ledger.find_indexes(first[1], last_entry) if ledger is not None else None
        return None if found is None else found[1] - found[0] - shape.count_aborted_messages(*found)

    def _start_look_up(self, span: LedgerSpan) -> None:
        if not self._looks_up:
            self._looks_up = True
            if self._tasks is None:
                self._tasks = Tasks()
            self._tasks.spawn(self._look_up(span.ledger_id, span.last_entry), "key index of a filtered ledger")

    async def _look_up(self, ledger_id: int, last_entry: int) -> None:
        found: UnreadRunsOfLedger | None = None
        try:
            async with asyncio.timeout(INDEX_LOOK_UP_TIMEOUT_S):
                found = await self._open_ledger(ledger_id, last_entry)
        except (MagnetarError, DamagedKeyIndex) as error:
            self._indexes.on_index_unusable(ledger_id, error)
        except Exception as error:
            _LOG.warning("%s: the index of ledger %d is not used: %r", self._indexes.topic, ledger_id, error)
        finally:
            while len(self._kept) >= CACHED_LEDGERS_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[ledger_id] = found
            self._looks_up = False
            self._wake()

    async def _open_ledger(self, ledger_id: int, last_entry: int) -> UnreadRunsOfLedger | None:
        search = await self._indexes.open_index(ledger_id)
        if search is None:
            return None
        candidates = await search.find_candidates(self._expression, hidden=True)
        return UnreadRunsOfLedger(search.index.blocks, candidates, last_entry)

    def stop(self) -> None:
        """Cancels the look-up in progress."""
        if self._tasks is not None:
            self._tasks.cancel()

    async def wait_stopped(self) -> None:
        """Waits until the look-up that `stop` has cancelled has ended. Must be called after `stop`."""
        if self._tasks is not None:
            await self._tasks.drain()
