"""The entries of its log that a subscription has in memory, and its reads from bookies.

    entries = buffer.get_requested_entries(want, end)  # the first of what the dispatcher wants; none: read them first
    buffer.add_waiting_entries(entries)                # they wait for their keys' consumers, until they are delivered
    buffer.discard_delivered_entries(deliveries)       # they were delivered

New entries are taken from the tail cache, else from what was read ahead: chunks of `read_bytes`, the next one while
this one is handed out, so two of them and a half are in memory. A chunk is long, because each read waits for turns of
the loop and for threads, however little it brings. A subscription that lags within the cache holds what comes next as
if it had been read: else the cache drops it just before it is wanted, and each chunk costs a read that nothing hides.

Entries that are handed out again were kept, or are in a cache, or are read in stretches; during that read nothing new
is taken, because they precede it (`reading_again`). At most `key_shared_waiting_bytes` and one read are kept; the entry
that has waited longest is dropped first, and read again when it is handed out. All subscriptions of the broker share
`read_memory_bytes` (broker/log/reader.py): reads are shorter when many have something, and what a subscription has
used least recently is dropped for another one's read.

What a filter need not read (filtering.py) is left out of the chunks: a read ends before it, and the next one begins
after it. While that is being looked up nothing is read ahead.

Key_Shared gets entries whose slots are known. An entry whose slots take long to find (unfolding.py) delays what follows
it, as an entry that is being read does.

A read that fails, for whatever reason, is retried after READ_RETRY_S. What was trimmed meanwhile is lost, and the
dispatcher is notified.
Guarding tests: tests/broker/node/test_end_to_end.py, tests/broker/subscription/test_subscription_timers.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from ...proto.errors import DataLost, MagnetarError
from ...proto.names import Position
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.config import DELIVERY_BATCH_BYTES, BrokerConfig
from ..common.retry import LogThrottle
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.log_shape_core import make_data_lost_error
from ..log.reader import ReadMemoryBudget
from ..log.unfolding import compute_key_slots
from .core.dispatch import Delivery, Dispatcher, PlannedRead, ReadForRedelivery

_LOG = logging.getLogger("magnetar.broker.subscription")

CHUNKS_AHEAD_MIN = 1.5
"""Chunks in memory below which the next one is read: a chunk is a little longer than `read_bytes`, so with 1 a read
began when the one before was handed out, and a consumer beside a producer waited most of its time for reads."""
CHUNK_ENTRIES_MAX = 200
"""Most entries that are given to the dispatcher at once. Together they have about DELIVERY_BATCH_BYTES."""
READ_GAP_ENTRIES_MAX = 16
"""Unwanted entries that are read between two wanted ones, rather than reading twice."""
LOST_ENTRIES_SKIPPED_MAX = 1000
"""Lost entries that are acknowledged in one step; the next one takes the next."""
READ_RETRY_S = 0.5
"""Seconds between two tries to read from bookies that do not answer."""


_NONE: deque[StoredEntry] = deque()
"""The empty read-ahead. One for all subscriptions, because it costs 700 bytes: never add to it."""


class ReadAheadBuffer:
    """The entries of a subscription that were read from the log in advance, and those that wait to be delivered again.

    `wake`: a function that runs the subscription's pump in the next turn of the event loop.
    `deliver_available_entries`: one that runs the pump at once. `lost`: a function that is called with DataLost if
    entries are lost; `discard`: one that acknowledges lost entries. `reading_again`: entries that wait for redelivery
    are being read."""

    __slots__ = (
        "_ahead", "_ahead_bytes", "_clock", "_config", "_counted", "_discard", "_dispatcher", "_hand_out", "_kept",
        "_kept_bytes", "_last_to_read", "_log", "_loop", "_lost", "_memory", "_most", "_next_to_read", "_reading",
        "_retry", "_seeks", "_subscription", "_tasks", "_throttle", "_unfolding", "_wake", "reading_again",
    )  # fmt: skip

    def __init__(
        self, subscription: str, log: ReadableLog, clock: Clock, config: BrokerConfig, dispatcher: Dispatcher,
        wake: Callable[[], None], deliver_available_entries: Callable[[], None], tasks: Tasks, memory: ReadMemoryBudget,
        lost: Callable[[MagnetarError], None], discard: Callable[[Sequence[Position]], None],
        find_next_to_read: Callable[[Position], Position | None], find_last_to_read: Callable[[Position], int],
    ) -> None:  # fmt: skip
        self._lost, self._discard = lost, discard
        self._next_to_read, self._last_to_read = find_next_to_read, find_last_to_read
        self._subscription = subscription
        self._log = log
        self._clock = clock
        self._config = config
        self._wake = wake
        self._hand_out = deliver_available_entries
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._memory = memory
        self._counted = 0  # bytes of this buffer in it
        self._most = min(DELIVERY_BATCH_BYTES, config.read_bytes)  # handed out at once
        self._loop = asyncio.get_running_loop()
        self._ahead = _NONE  # without a gap, but for what is not to be read
        self._ahead_bytes = 0
        self._kept: OrderedDict[Position, StoredEntry] | None = None  # the one that has waited longest first
        self._kept_bytes = 0
        self._reading = False
        self.reading_again = False
        self._unfolding = False  # the slots of an entry are being found
        self._retry: asyncio.TimerHandle | None = None  # after a read that failed
        self._throttle = LogThrottle(clock)
        self._seeks = 0  # a read that began before a seek is of no use after it

    def switch_log(self, log: ReadableLog) -> None:
        """Replaces the log from which entries are read. The entries in memory stay."""
        self._log = log

    def restart_with_log(self, log: ReadableLog) -> None:
        """Replaces the log from which entries are read. The entries in memory are dropped."""
        self._log = log
        self.clear()

    def clear(self) -> None:
        """Drops all entries in memory, and ignores the results of reads in progress. Called when the subscription
        continues at another position, or when no consumer is connected."""
        self._seeks += 1
        self.release_memory()

    def release_memory(self) -> None:
        """Drops all entries in memory. They are read again when the dispatcher needs them. Called by the read memory of
        the broker, when another subscription needs the memory."""
        self._kept, self._kept_bytes = None, 0
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        self._ahead, self._ahead_bytes = _NONE, 0
        self._count()

    def _count(self) -> None:
        """Tells the broker's read memory how many bytes this buffer has."""
        now = self._ahead_bytes + self._kept_bytes
        if now != self._counted:
            self._counted = now
            self._memory.set_used_bytes_of_holder(self, now)

    # ------------------------------------------------------------------ what is in memory
    def get_requested_entries(self, want: PlannedRead | ReadForRedelivery, end: float) -> Sequence[StoredEntry]:
        """Returns the first entries of the request `want`, at most CHUNK_ENTRIES_MAX, if they are in memory. If the
        first entry is not, returns no entries and starts a read; the pump is run when it is done. `end`: the monotonic
        time in seconds at which the computation of key slots stops, so that fewer entries may be returned."""
        entries = self._entries_from(want.position) if isinstance(want, PlannedRead) else self._again(want.positions)
        if not entries:
            self._start_read(want)
        elif self._dispatcher.policy.by_keys:
            return self._with_slots(entries, end)
        return entries

    def _with_slots(self, entries: Sequence[StoredEntry], end: float) -> Sequence[StoredEntry]:
        """Computes the key slots of the entries, and returns the entries up to the first one whose slots take long to
        compute. If that is the first of all, a task computes its slots."""
        found: list[StoredEntry] = []
        for entry in entries:
            if not entry.has_key_slots:
                if not entry.compute_key_slots_if_quick():
                    break
                if self._clock.monotonic() > end:
                    found.append(entry)
                    break
            found.append(entry)
        if not found and not self._unfolding:
            self._unfolding = True
            self._tasks.spawn(self._unfold(entries[0]), "slots of an entry")
        return found

    async def _unfold(self, entry: StoredEntry) -> None:
        try:
            entry.set_key_slots(await compute_key_slots(entry.frames[-1], self._log.world))
        except Exception as error:
            self._cannot_read(entry.position, error)
        else:
            self._wake()
        finally:
            self._unfolding = False

    def _entries_from(self, position: Position) -> Sequence[StoredEntry]:
        """Returns the consecutive entries in memory that begin at `position`."""
        ahead = self._ahead
        if ahead and ahead[0].position < position:
            while ahead and ahead[0].position < position:
                self._ahead_bytes -= ahead.popleft().size
            self._count()
        if not ahead or ahead[0].position != position:
            found = self._log.reader.read_cached(position, CHUNK_ENTRIES_MAX, self._most)
            if not found or not self._log.shape.has_visible_entry(self._log.shape.position_after(found[-1].position)):
                return found
            ahead = self._ahead = deque(found)  # more than is handed out at once: it lags
            self._ahead_bytes = sum(entry.size for entry in found)
            self._count()
        self._read_ahead()
        found = list(islice(ahead, CHUNK_ENTRIES_MAX))
        size = sum([entry.size for entry in found])
        while size > self._most and len(found) > 1:
            size -= found.pop().size
        return found

    def _again(self, positions: Sequence[Position]) -> Sequence[StoredEntry]:
        """Returns those first ones of the entries `positions`, which are redelivered, that are in memory, up to the
        first one that is not."""
        found: list[StoredEntry] = []
        kept: Mapping[Position, StoredEntry] = self._kept or {}
        for position in positions[:CHUNK_ENTRIES_MAX]:
            entry = kept.get(position) or self._log.reader.get(position)
            if entry is None:
                break
            found.append(entry)
        return found

    def add_waiting_entries(self, entries: Iterable[StoredEntry]) -> None:
        """Stores entries that wait for the consumers of their keys. If they take too much memory, drops the entries
        that have waited longest; these are read from the log again."""
        kept = self._kept
        if kept is None:
            kept = self._kept = OrderedDict()  # of a plain dict, taking the first gets slower the more were taken
        while self._kept_bytes > self._config.key_shared_waiting_bytes:
            # the oldest first: what was just read is wanted now
            self._kept_bytes -= kept.popitem(last=False)[1].memory_bytes
        for entry in entries:
            if entry.position not in kept:
                entry.copy_buffer_views()
                kept[entry.position] = entry
                self._kept_bytes += entry.memory_bytes
        self._count()

    def discard_delivered_entries(self, deliveries: Iterable[Delivery]) -> None:
        """Removes the entries from memory that were delivered."""
        if self._kept:
            for each in deliveries:
                kept = self._kept.pop(each.entry.position, None)
                if kept is not None:
                    self._kept_bytes -= kept.memory_bytes
            self._count()

    # ------------------------------------------------------------------ reading from bookies
    def _start_read(self, want: PlannedRead | ReadForRedelivery) -> None:
        if isinstance(want, ReadForRedelivery):
            first, last = find_contiguous_range(want.positions)
            self.reading_again = True
            self._tasks.spawn(self._read_again(first, last, frozenset(want.positions)), "read of what comes again")
        elif not self._reading:
            self._drop_ahead()
            self._read_soon(want.position)

    def _read_soon(self, position: Position) -> None:
        self._reading = True
        self._tasks.spawn(self._read(position), "read")

    def _read_ahead(self) -> None:
        """Reads the next entries while the present ones are being delivered: takes them from the tail cache before it
        evicts them, or reads them from bookies."""
        if (
            self._reading
            or not self._ahead
            or self._ahead_bytes > CHUNKS_AHEAD_MIN * self._memory.choose_read_size(self._config.read_bytes)
        ):
            return
        following = self._next_to_read(self._log.shape.position_after(self._ahead[-1].position))
        if following is None or not self._log.shape.has_visible_entry(following):
            return
        if found := self._log.reader.read_cached(following, 2 * CHUNK_ENTRIES_MAX, 2 * self._most):
            self._ahead.extend(found)
            self._ahead_bytes += sum(entry.size for entry in found)
            self._count()
        else:
            self._read_soon(following)

    async def _read(self, position: Position) -> None:
        seeks, before = self._seeks, self._ahead[-1].position if self._ahead else None
        try:
            if self._passes_over(position):
                return
            size = self._memory.choose_read_size(self._config.read_bytes)
            async with self._memory.reserve(size):
                entries = await self._log.reader.read(position, size, self._last_to_read(position))
        except DataLost as error:
            self._lost(self._lost_range(position, error))
            return
        except Exception as error:
            self._cannot_read(position, error)
            return
        finally:
            self._reading = False
        if seeks == self._seeks:
            last = self._ahead[-1].position if self._ahead else before
            if last != before and last is not None and self._log.shape.position_after(last) != position:
                self._drop_ahead()
            if self._ahead is _NONE:
                self._ahead = deque()
            self._ahead.extend(entries)
            self._ahead_bytes += sum(entry.size for entry in entries)
            self._count()
            self._read_ahead()
        self._hand_out()

    async def _read_again(self, first: Position, last: Position, wanted: Collection[Position]) -> None:
        try:
            if self._passes_over(first):
                return
            size = self._memory.choose_read_size(self._config.read_bytes)
            async with self._memory.reserve(size):
                entries = await self._log.reader.read(first, size, last.entry_id)
        except DataLost as error:
            self._lost(self._lost_range(first, error))
            return
        except Exception as error:
            self._cannot_read(first, error)
            return
        finally:
            self.reading_again = False
        self.add_waiting_entries([entry for entry in entries if entry.position in wanted])
        self._wake()

    def _passes_over(self, position: Position) -> bool:
        """Acknowledges the lost entries at `position`, if an operator has permitted to skip them. Returns False if no
        skipped entries are there."""
        last = self._log.shape.skipped_lost_range_end(position)
        if last is None:
            return False
        end = min(last[1], position[1] + LOST_ENTRIES_SKIPPED_MAX - 1)
        self._discard([Position(position[0], entry) for entry in range(position[1], end + 1)])
        return True

    def _lost_range(self, position: Position, error: DataLost) -> DataLost:
        """Returns the error for consumers. It names the whole range of lost entries, as far as it is known."""
        run = int(error.fields.get("first", position[1])), int(error.fields.get("last", position[1]))
        if self._throttle.should_log(error):
            _LOG.error("%s/%s: %s; its consumers are told", self._log.topic, self._subscription, error)
        told = make_data_lost_error(position[0], run, f"subscription {self._subscription!r} of {self._log.topic}: ")
        told.fields |= {"topic": str(self._log.topic), "subscription": self._subscription}
        return told

    def _cannot_read(self, position: Position, error: Exception) -> None:
        if not self._log.shape.has_visible_entry(position):
            self._dispatcher.discard_trimmed_entries((position,))  # trimmed meanwhile
            self._wake()
            return
        if self._throttle.should_log(error):
            unforeseen = None if isinstance(error, MagnetarError) else error
            _LOG.warning(
                "%s/%s: cannot read %s yet: %r", self._log.topic, self._subscription, position, error,
                exc_info=unforeseen,
            )  # fmt: skip
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(READ_RETRY_S, self._wake)

    def stop(self) -> None:
        """Drops all entries in memory, and prevents further tries to read. The caller must cancel the reads in
        progress."""
        self.release_memory()
        if self._retry is not None:
            self._retry.cancel()


def find_contiguous_range(positions: Sequence[Position]) -> tuple[Position, Position]:
    """Returns the first and the last position of a range of entries that one read can return. The range begins at the
    first of `positions`, and includes the next ones in the same ledger, each at most READ_GAP_ENTRIES_MAX entries after
    the one before."""
    first = last = positions[0]
    for position in positions:
        if position[0] != first[0] or position[1] - last[1] > READ_GAP_ENTRIES_MAX:
            break
        last = position
    return first, last
