"""The publishes of a topic that are not confirmed yet: one queue, from the first byte to the receipt.

    PENDING → SENT(ledger) → confirmed, in order, from the head
                 ↑      ↓ the ledger failed or ended
                 └── PENDING again (certainly not in the ended ledger), or confirmed (it is)

Rules (ledger protocol §3.3, §1.6; invariants 30 and 31)
- Entries are confirmed from the head of the queue only, so receipts leave in the order of the publishes.
- Sent entries form a prefix of the queue, all of one ledger, with entry ids that follow each other. Entries that arrive
  while no ledger takes entries, or has no room for more, wait after them.
- When the ledger ends at `last_entry` for good, sent entries up to it are in the log, and are confirmed. The others are
  certainly not in the log, and are sent to the next ledger, in the same order. So no entry is lost, doubled or
  reordered.
- An entry gets its index when it is queued. The queue keeps its order, so the index is right in any ledger.

The second part of the module has the sequence ids of an entry (`SequenceRange`).
Guarding tests: tests/broker/log/test_log_queue.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from pyroaring import BitMap64

from ...ledger.reader_core import PendingAppend


class QueuedPublish(PendingAppend):
    """A publish in flight. `index`: the index of its last message; `entry`: its entry id if it was sent to a ledger,
    else -1."""

    __slots__ = ("index",)

    def __init__(self) -> None:
        super().__init__((), 0)
        self.entry = self.index = -1


Q = TypeVar("Q", bound=QueuedPublish)


_NONE: deque[Any] = deque()
"""The queue of a topic without publishes. One for all of them, because it costs 700 bytes: never add to it."""


class LogQueue(Generic[Q]):
    """The publishes of one topic that are not confirmed, in order: first those that were sent to a ledger, then those
    that wait to be sent."""

    __slots__ = ("_sent", "end_index", "ledger_id", "next_entry", "pending")

    def __init__(self, end_index: int) -> None:
        self._sent: deque[Q] = _NONE
        self.pending: deque[Q] = _NONE  # not sent yet; only this class changes it
        self.end_index = end_index  # the next message's index
        self.ledger_id = -1  # that takes entries; -1: none at the moment
        self.next_entry = 0

    # ------------------------------------------------------------------ intents
    def add(self, queued: Q, count: int) -> None:
        """Adds a publish of `count` messages to the end of the queue, and gives its messages their indexes."""
        assert count > 0, "an entry holds at least one message"
        self.end_index += count
        queued.index, queued.entry = self.end_index - 1, -1
        if self.pending is _NONE:
            self._sent, self.pending = deque(), deque()
        self.pending.append(queued)

    def on_entry_sent(self) -> None:
        """Called when the writer of the ledger has accepted the first waiting publish: gives this publish its entry
        id."""
        queued = self.pending.popleft()
        queued.entry = self.next_entry
        self.next_entry += 1
        self._sent.append(queued)

    # ------------------------------------------------------------------ facts
    def start_ledger(self, ledger_id: int) -> None:
        """Starts a new ledger, to which publishes are sent from now on. The topic's record must name the ledger
        already."""
        assert self.ledger_id < 0, "one ledger takes entries at a time"
        assert not self._sent, "nothing is outstanding on another ledger"
        self.ledger_id, self.next_entry = ledger_id, 0

    def take_confirmed(self, last_entry: int) -> list[Q]:
        """Removes and returns the publishes that were sent with an entry id up to `last_entry`, because the ledger has
        stored them."""
        sent, found = self._sent, list[Q]()
        while sent and sent[0].entry <= last_entry:
            found.append(sent.popleft())
        return found

    def on_ledger_stopped(self) -> None:
        """Called when the ledger accepts no more entries, because it is full or has failed. The publishes that were
        sent to it stay in the queue until it is known which entry is its last one."""
        self.ledger_id = -1

    def end_ledger(self, last_entry: int) -> list[Q]:
        """Ends the ledger. `last_entry`: its last entry. Removes and returns the publishes that the ledger has stored.
        The other publishes that were sent to it will be sent again, before those that were never sent."""
        assert self.ledger_id < 0, "a ledger that ended takes no entries"
        stored: list[Q] = []
        while self._sent and self._sent[0].entry <= last_entry:
            stored.append(self._sent.popleft())
        while self._sent:
            queued = self._sent.pop()
            queued.entry, queued.header = -1, b""  # another ledger seals it anew
            self.pending.appendleft(queued)
        return stored

    def release_memory(self) -> None:
        """Called when no ledger is being written any more: gives back the memory of the queue if it is empty."""
        assert self.ledger_id < 0, "a ledger that is written needs the queue"
        if not self._sent and not self.pending:
            self._sent = self.pending = _NONE

    def take_all(self) -> list[Q]:
        """Removes and returns all publishes, in order: first those that were sent, whose outcome is unknown, then those
        that were not sent. After this call no ledger accepts entries of this queue."""
        left = [*self._sent, *self.pending]
        self._sent.clear()
        self.pending.clear()
        self.ledger_id = -1
        return left

    # ------------------------------------------------------------------ questions
    def __len__(self) -> int:
        return len(self._sent) + len(self.pending)

    @property
    def sent_entry_count(self) -> int:
        """Returns the number of publishes that are sent to a ledger and not confirmed."""
        return len(self._sent)

    def check(self) -> None:
        """Raises AssertionError unless the entry ids of sent publishes are consecutive, and indexes never decrease."""
        ids = [queued.entry for queued in self._sent]
        assert ids == list(range(self.next_entry - len(ids), self.next_entry)), "sent entries do not follow each other"
        indexes = [queued.index for queued in [*self._sent, *self.pending]]
        assert indexes == sorted(indexes), "indexes fall along the queue"
        assert not indexes or indexes[-1] < self.end_index, "an index was given twice"


# ------------------------------------------------------------------------------------------- sequence_range_core
# The sequence ids of one entry, from its header.


SEQUENCE_SPAN_MAX = 1 << 20
"""An entry with more sequence ids than this has too many to record each of them: some hundred bytes."""
SEQUENCE_ID_END = 1 << 63
"""The sequence ids of Pulsar's clients are below this number."""


class SequenceRange(NamedTuple):
    """The first and the last sequence id of an entry, from its header. For a chunk: also the uuid of its message, the
    number of the chunk (from 0), and the number of chunks."""

    first: int
    last: int
    uuid: str = ""
    chunk: int = 0
    chunks: int = 1

    @property
    def has_too_many_ids(self) -> bool:
        """Returns True if the range has more than SEQUENCE_SPAN_MAX sequence ids, or ids from SEQUENCE_ID_END on, so
        that they cannot be recorded one by one. (The header of an entry may declare any first and last id.)"""
        return self.last - self.first >= SEQUENCE_SPAN_MAX or self.last >= SEQUENCE_ID_END

    def add_sequence_ids_to(self, ids: BitMap64) -> None:
        """Adds each sequence id of the range to the set `ids`. Adds nothing if the range has too many ids."""
        if not self.has_too_many_ids:
            ids.add_range(self.first, self.last + 1)
