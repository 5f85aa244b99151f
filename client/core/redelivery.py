"""The entries that the broker is to deliver again, and when: negative acknowledgements (`NackTracker`) and
acknowledgement time-outs (`AckTimeoutTracker`). Also the groups in which acknowledgements are sent (`AckTracker`), the
detection of messages that the application has already (`DuplicateFilter`), and the permits of a consumer
(`ReceivePermits`).

Both trackers *watch* an entry until a time. An acknowledgement of the entry ends the watch; when the time comes,
`take_due` returns the entry once, never early. An entry that is watched a second time keeps its first time. The
trackers differ in the share of entries that are acknowledged before their time:

    AckTimeoutTracker   for time-outs: every received message is watched, and nearly every one is acknowledged
    NackTracker         for negative acks (Pulsar A6): nearly every entry reaches its time

`AckTimeoutTracker` keeps times in buckets of a tick. So a watch costs two dictionary entries and no timer, and ends at
most one tick late. The tracker is as large as the number of unacknowledged entries.

`NackTracker` may have the entries of an hour. A bucket is a roaring set per ledger, as wide as a 256th of the delay
(0.256 s at least: PIP-393's precision). So there are at most 257 buckets for a delay, however long it is, and an entry
is late by the width of a bucket at most. Memory: 2 × 2 bytes an entry at most (one in its bucket, one in the set of all
watched entries; less when they are dense), and about 300 bytes for each bucket and ledger.

The delay of an entry, by how often it was delivered again: client/model/settings.py. Guarding tests:
tests/client/core/test_cores.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pyroaring import BitMap

from ...proto.names import Position

NACK_PRECISION_MS = 256
NACK_BUCKETS_MAX = 256


class AckTimeoutTracker:
    """Tracks the entries that the application received, until they are acknowledged or their acknowledgement time-out
    is over. `watched`: these entries. `delay_s`: the time-out; `tick_s`: by how much it may end late. Times are seconds
    of a monotonic clock."""

    def __init__(self, delay_s: float, tick_s: float) -> None:
        assert delay_s >= 0 < tick_s, "delays are not negative"
        self._delay_s = delay_s
        self.tick_s = tick_s
        self.watched: dict[Position, int] = {}  # and its tick
        self._buckets: dict[int, dict[Position, None]] = {}

    def __len__(self) -> int:
        return len(self.watched)

    def track(self, position: Position, now: float, longer_s: float = 0.0) -> None:
        """Starts the time-out of the entry at `position`, prolonged by `longer_s` seconds. Does nothing if the entry is
        tracked already."""
        if position in self.watched:
            return
        tick = int((now + self._delay_s + longer_s) / self.tick_s) + 1
        self.watched[position] = tick
        self._buckets.setdefault(tick, {})[position] = None

    def discard(self, position: Position) -> None:
        tick = self.watched.pop(position, None)
        if tick is not None:
            bucket = self._buckets[tick]
            del bucket[position]
            if not bucket:
                del self._buckets[tick]

    def discard_up_to(self, position: Position) -> None:
        """Ends the tracking of all entries up to and including `position`."""
        for covered in [each for each in self.watched if each <= position]:
            self.discard(covered)

    def take_due(self, now: float) -> list[Position]:
        """Removes and returns the entries whose acknowledgement time-out is over at the time `now`."""
        current = int(now / self.tick_s)
        due: list[Position] = []
        for tick in sorted(tick for tick in self._buckets if tick <= current):
            due.extend(self._buckets.pop(tick))
        for position in due:
            del self.watched[position]
        return due

    def clear(self) -> None:
        self.watched.clear()
        self._buckets.clear()

    def check(self) -> None:
        assert sum(map(len, self._buckets.values())) == len(self.watched)
        assert all(position in self._buckets[tick] for position, tick in self.watched.items())


EntrySets = dict[int, BitMap]
"""Ledger id → the ids of some of its entries."""


def positions_of(sets: EntrySets) -> Iterator[Position]:
    return (Position(ledger_id, each) for ledger_id, some in sets.items() for each in some)


class NackTracker:
    """Tracks negatively acknowledged entries until their redelivery is due. `watched`: these entries. Times are whole
    milliseconds of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[int, EntrySets] = {}  # due time → entries
        self.watched: EntrySets = {}  # all of them

    def __len__(self) -> int:
        return sum(map(len, self.watched.values()))

    def __bool__(self) -> bool:
        return bool(self.watched)

    def __contains__(self, position: Position) -> bool:
        return position[0] in self.watched and position[1] in self.watched[position[0]]

    def track(self, position: Position, now_ms: int, delay_ms: int) -> None:
        """Makes the redelivery of the entry at `position` due after `delay_ms`, or up to a 256th of the delay (at least
        256 ms) later. Does nothing if the entry is tracked already."""
        ledger_id, entry_id = position
        watched = self.watched.get(ledger_id)
        if watched is None:
            watched = self.watched[ledger_id] = BitMap()
        elif entry_id in watched:
            return
        watched.add(entry_id)
        width = max(NACK_PRECISION_MS, -(-delay_ms // NACK_BUCKETS_MAX))
        due = -(-(now_ms + delay_ms) // width) * width
        bucket = self._buckets.setdefault(due, {})
        if ledger_id not in bucket:
            bucket[ledger_id] = BitMap()
        bucket[ledger_id].add(entry_id)

    def discard(self, position: Position) -> None:
        if position in self:
            for bucket in self._buckets.values():
                if position[0] in bucket and position[1] in bucket[position[0]]:
                    bucket[position[0]].remove(position[1])
            self._unwatch(position[0], BitMap([position[1]]))

    def discard_up_to(self, position: Position) -> None:
        """Ends the tracking of all entries up to and including `position`."""
        for ledger_id in [each for each in self.watched if each <= position[0]]:
            gone = self.watched[ledger_id]
            if ledger_id == position[0]:
                gone = gone & BitMap(range(position[1] + 1))
            gone = gone.copy()
            for bucket in self._buckets.values():
                if ledger_id in bucket:
                    bucket[ledger_id] -= gone
            self._unwatch(ledger_id, gone)

    def _unwatch(self, ledger_id: int, entries: BitMap) -> None:
        self.watched[ledger_id] -= entries
        if not self.watched[ledger_id]:
            del self.watched[ledger_id]
        if not self.watched:
            self._buckets.clear()

    def next_due_ms(self) -> int | None:
        """Returns the time in ms at which `take_due` must be called; None if no entry is tracked. The time may be
        early: `take_due` then returns no entries."""
        return min(self._buckets, default=None)

    def take_due(self, now_ms: int) -> EntrySets:
        """Removes and returns the entries whose redelivery is due at the time `now_ms`, by ledger; an empty dict if
        none is."""
        due: EntrySets = {}
        for time_ms in sorted(each for each in self._buckets if each <= now_ms):
            for ledger_id, entries in self._buckets.pop(time_ms).items():
                due[ledger_id] = due[ledger_id] | entries if ledger_id in due else entries
        for ledger_id, entries in due.items():
            if ledger_id in self.watched:
                self._unwatch(ledger_id, entries)
        return {ledger_id: entries for ledger_id, entries in due.items() if entries}

    def clear(self) -> None:
        self._buckets.clear()
        self.watched.clear()

    @property
    def memory_bytes(self) -> int:
        """Returns an estimate of the memory that the tracker uses, in bytes: the sets as CRoaring stores them, and
        their Python objects."""
        sets = [each for bucket in (*self._buckets.values(), self.watched) for each in bucket.values()]
        figures = [each.get_statistics() for each in sets]
        held = sum(each["n_bytes_array_containers"] + each["n_bytes_bitset_containers"] for each in figures)
        return int(held) + 300 * len(sets)

    def check(self) -> None:
        kept: EntrySets = {}
        for bucket in self._buckets.values():
            for ledger_id, entries in bucket.items():
                assert ledger_id not in kept or not kept[ledger_id] & entries, "an entry has two times"
                kept[ledger_id] = kept[ledger_id] | entries if ledger_id in kept else entries
        kept = {each: entries for each, entries in kept.items() if entries}
        assert kept == self.watched, "what is watched has a time"


# ---------------------------------------------------------------------------------------------------------- acks
# The ack tracker: acknowledgements are grouped for a while and sent together.
#
# Per entry it gathers batch indexes, as the bits of a number; when all messages of an entry are in, the entry is
# acknowledged as a whole, and never before. Whole entries go as one roaring set per ledger, so that lists and ranges
# cost a few bytes. A cumulative acknowledgement covers what is before it: single ones of before it are dropped.
# `take_ack_group` removes and returns what is to be sent; what was sent and lost with a stream is delivered again by
# the broker (at least once). The core calls it when the oldest has waited for `ack_group_s`, or when `pending_messages`
# reaches ACK_GROUP_MESSAGES (Pulsar's figures, A3).
# Guarding tests: tests/client/core/test_cores.py.


ACK_GROUP_MESSAGES = 1000
WHOLE_ENTRY = -1
"""Last index of a cumulative acknowledgement that covers its whole entry."""


class AckGroup(NamedTuple):
    """A group of acknowledgements that one request sends. `whole`: entries of which all messages are acknowledged.
    `parts`: entries of which only some messages are. `cumulative`: the position and batch index up to which everything
    is acknowledged; None: there is no cumulative acknowledgement."""

    whole: dict[int, BitMap]  # ledger → entries
    parts: dict[Position, int]  # entry → batch indexes, as bits
    cumulative: tuple[Position, int] | None  # the last batch index, or WHOLE_ENTRY

    def __bool__(self) -> bool:
        return bool(self.whole or self.parts or self.cumulative)


class AckTracker:
    """Collects the acknowledgements of one consumer until `take_ack_group` returns them as a group. `pending_messages`:
    how many were added since then; a cumulative one counts as one."""

    def __init__(self) -> None:
        self.pending_messages = 0
        self._whole: defaultdict[int, set[int]] = defaultdict(set)  # ledger → entries
        self._parts: dict[Position, int] = {}
        self._cumulative: tuple[Position, int] | None = None

    def acknowledge(self, position: Position, index: int, size: int) -> None:
        """Adds the acknowledgement of a message. `index`: its batch index; -1: the whole entry. `size`: the number of
        messages in the entry; 0: not known."""
        self.pending_messages += 1
        if index < 0 or size == 1:
            self._whole[position[0]].add(position[1])
            return
        bits = self._parts.get(position, 0) | 1 << index
        self._parts[position] = bits
        if size and bits == (1 << size) - 1:
            self._whole[position[0]].add(position[1])
            del self._parts[position]

    def acknowledge_bits(self, position: Position, bits: int, messages: int, size: int) -> None:
        """Adds the acknowledgement of several messages of one entry: bit i of `bits` is batch index i. `messages`: the
        number of set bits; `size`: the number of messages in the entry."""
        self.pending_messages += messages
        bits |= self._parts.get(position, 0)
        if bits == (1 << size) - 1:
            self._whole[position[0]].add(position[1])
            self._parts.pop(position, None)
        else:
            self._parts[position] = bits

    def acknowledge_cumulative(self, position: Position, index: int, size: int) -> None:
        """Adds the acknowledgement of all messages up to the one with batch index `index` (-1: the last) of the entry
        at `position`, which has `size` messages. Drops acknowledgements that this one covers; changes nothing if an
        earlier cumulative acknowledgement reaches further."""
        self.pending_messages += 1
        last = WHOLE_ENTRY if index < 0 or index + 1 == size else index
        if self._cumulative is None or _order(position, last) > _order(*self._cumulative):
            self._cumulative = position, last
        before = self._cumulative[0]
        kept: defaultdict[int, set[int]] = defaultdict(set)
        for ledger_id, entries in self._whole.items():
            left = {each for each in entries if (ledger_id, each) >= before}
            if left:
                kept[ledger_id] = left
        self._whole = kept
        self._parts = {each: bits for each, bits in self._parts.items() if each >= before}

    def take_ack_group(self) -> AckGroup:
        """Removes and returns all collected acknowledgements as one group; the group is empty if no acknowledgement
        waits."""
        whole = self._whole
        parts = {each: bits for each, bits in self._parts.items() if each[1] not in whole.get(each[0], ())}
        sets = {ledger_id: BitMap(entries) for ledger_id, entries in sorted(whole.items())}
        group = AckGroup(sets, parts, self._cumulative)
        self.clear()
        return group

    def clear(self) -> None:
        """Drops all collected acknowledgements."""
        self._whole = defaultdict(set)
        self._parts = {}
        self._cumulative = None
        self.pending_messages = 0

    def check(self) -> None:
        assert self.pending_messages or not (self._whole or self._parts or self._cumulative), "what is held is counted"


def _order(position: Position, last: int) -> tuple[Position, float]:
    return position, float("inf") if last == WHOLE_ENTRY else last


# ------------------------------------------------------------------------------------------------------- repeats
# What a new connection delivers again although the application has it.
#
# A cumulative acknowledgement does not say which delivery of a message it means. So an application that acknowledges
# cumulatively in transactions must not get a message again that it has: it would process both, in one transaction or in
# two, and the acknowledgement of what follows covers the second one. The broker cannot tell; the consumer can, because
# on Exclusive and Failover all comes in order: the application has what is before the first message that waited when
# the connection was lost. That is left out when it comes again.
#
# - What the broker has confirmed as acknowledged comes again only if its transaction was aborted, or the subscription
#   moved back. It is shown, with all that follows it; and the next acknowledgement gets a TransactionConflict, because
#   it would cover what the application has not seen again.
# - What was asked for again (an abort, a negative acknowledgement, a time-out, a seek) is shown.
# - A message before one that is withheld or incomplete may be shown twice: what is not shown must come.
# - An application that begins with such acknowledgements when it may have copies already, and one whose consumer was
#   deposed meanwhile (Failover), gets a TransactionConflict; after the abort all comes again.
# Guarding tests: tests/client/core/test_repeats.py, tests/client/transactions/test_transactions.py.


MessagePlace = tuple[int, int, float]
"""Ledger, entry, batch index: where a message is in the log. Batch index -1: the message is not in a batch."""
PLACE_BEFORE_ALL: MessagePlace = (-1, -1, -1)


class DuplicateFilter:
    """Detects messages that the broker delivers again after a reconnect although the application has them already. Only
    for consumers that get all messages in log order. `in_use`: set when the application acknowledges cumulatively in a
    transaction; until then no message counts as a repeat."""

    __slots__ = ("_confirmed", "_next", "in_use", "is_unsure", "until")

    def __init__(self) -> None:
        self.in_use = False  # the application acknowledges cumulatively in transactions
        self.is_unsure = False  # the application may have copies, or what another consumer processed
        self.until: MessagePlace | None = None  # what is before this comes again; None: all has come again
        self._next = PLACE_BEFORE_ALL  # the application has what is before this; PLACE_BEFORE_ALL: not known
        self._confirmed = PLACE_BEFORE_ALL  # what the broker has confirmed as acknowledged ends here

    def on_messages_queued(self, last: MessagePlace) -> None:
        """Fact: all messages up to and including the place `last` are in the receiver queue or were received by the
        application."""
        self._next = (last[0], last[1], last[2] + 1)

    def on_confirmed(self, place: MessagePlace) -> None:
        """Fact: the broker made a cumulative acknowledgement up to `place` durable, as a pending part of a
        transaction."""
        self._confirmed = max(self._confirmed, place)

    def on_reading_restarted(self, first: MessagePlace) -> None:
        """Fact: the application has received neither the message at `first` nor any message after it."""
        self._next = min(self._next, first)

    def on_lost(self) -> None:
        """Fact: the connection is lost, and the messages in the receiver queue were dropped. (`on_reading_restarted`
        must have reported the first of them.) Messages before that one are repeats when they come again."""
        if self._next != PLACE_BEFORE_ALL:
            self.until = self._next

    def on_consumer_inactive(self) -> None:
        """Fact: another consumer of the subscription became the active one, and may process the messages that this
        consumer has received."""
        if self._next != PLACE_BEFORE_ALL:
            self.is_unsure = True

    def clear(self) -> None:
        """Fact: the broker will deliver all unacknowledged messages again, and the application must get them again.
        Clears the filter."""
        self.until = None
        self.is_unsure = False
        self._next = self._confirmed = PLACE_BEFORE_ALL

    def find_end_of_repeats(self, first: MessagePlace) -> MessagePlace | None:
        """Fact: messages from the place `first` on were delivered. Returns the place before which they are repeats of
        messages that the application has; None if all of them must be passed to the application."""
        if first <= self._confirmed:
            self.clear()
            self.is_unsure = True
            return None
        until = self.until
        if until is not None and first >= until:
            self.until = until = None
        if until is None:
            return None
        if not self.in_use:
            self.is_unsure = True
            return None
        return until


# ------------------------------------------------------------------------------------------------------- permits
# Flow control: how many messages the broker may send. Permits are conserved: none is lost, none is made.
#
# A consumer grants its queue size when it subscribes; what the application took, or the client threw away, is granted
# again in blocks of at least a quarter of the queue: with half of it, consumers of Key_Shared that take turns ran out
# of permits, and a tenth of the messages waited at the broker for theirs. Permits end with the stream:
# `reset_for_new_stream` begins anew, and what came over an earlier stream gives none back.
#
# **The rule of both sides.** A delivery costs what its entry's head declares (proto/entry.py
# `count_declared_messages`), less the batch indexes that the delivery says are acknowledged. The broker charges that
# when it sends the entry (broker/subscription/core/dispatch.py), and the client gives back exactly that, whatever it
# makes of the entry: shown as a whole or in part, filtered, thrown away, a chunk, a dead letter, or damaged. An entry
# is never split, so a broker's count may go below zero by one entry, and later grants settle it. At every moment
#
#     at the broker + held by the client + used and not granted yet = the queue size
#
# where what is on its way counts for its sender's side of the stream. Guarding tests: tests/client/core/test_permits.py
# (both sides in one walk), tests/broker/subscription/core/test_dispatch_walk.py.


class ReceivePermits:
    """The permits of one consumer: the number of messages that the broker may still send to it. `lock` guards the
    counts, so that `count_used_permits` may be called from any thread. `stream`: the number of the present connection.
    """

    def __init__(self, queue_size: int, lock: AbstractContextManager[Any]) -> None:
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 4)
        self._lock = lock
        self._used = 0
        self._granted = 0  # to be told to the broker
        self.stream = 0  # they are those of this one, and begin anew with the next
        self.at_broker = 0  # granted and not charged yet
        self.queued = 0  # charged, and what they were charged for is not used yet

    def reset_for_new_stream(self) -> int:
        """Resets all counts, because a new connection has no permits yet. Returns the number of permits to grant first:
        the size of the receiver queue in messages."""
        with self._lock:
            self.stream += 1
            self._used = self._granted = self.queued = 0
            self.at_broker = self._size
            return self._size

    def resize_queue(self, queue_size: int) -> None:
        """Changes the size of the receiver queue to `queue_size` messages, at least 1. Later grants contain more or
        fewer permits by the difference."""
        with self._lock:
            self._used += max(1, queue_size) - self._size
            self._size = max(1, queue_size)
            self._block = max(1, self._size // 4)

    def count_received(self, messages: int) -> None:
        """Counts the permits that the broker has used for an entry that arrived: `messages` of them."""
        with self._lock:
            self.at_broker -= messages
            self.queued += messages

    def count_used_permits(self, messages: int, stream: int) -> bool:
        """Counts the permits of `messages` messages that left the receiver queue. Ignores messages of an earlier
        connection; `stream` is the number of theirs. Returns whether `grant` must be called soon. May be called from
        any thread."""
        with self._lock:
            if stream == self.stream:
                self.queued -= messages
                self._used += messages
                if self._used >= self._block:
                    self._granted += self._used
                    self.at_broker += self._used
                    self._used = 0
            return self._granted > 0

    def grant(self) -> int:
        """Returns the number of permits to grant to the broker now, and counts them as granted. Returns 0 if less than
        a quarter of the queue was used since the last grant."""
        with self._lock:
            granted, self._granted = self._granted, 0
            return granted

    def check(self) -> None:
        """Raises AssertionError if the sum of all permits differs from the queue size. Valid only when no delivery or
        grant is on its way."""
        assert self.queued >= 0, "more was given back than was charged"
        assert self.at_broker + self.queued + self._used in (self._size, 0), "permits were lost or made"
