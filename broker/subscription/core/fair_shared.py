"""Fair delivery by key on a Shared subscription: the keys take turns, and each has a limit of its own.

    properties of the subscription             fair.by-key=true, fair.max-in-flight-per-key=N, fair.rate-per-key=R
    queues.choose_entries(count)               the waiting entries that go next, by turns
    queues.count_delivered_entry(position, …)  an entry is delivered; until `release_delivered_entries`
    queues.advance_clock(now)                  keys whose rate allows more may go again

The rule: of the entries that wait, the next one is of the key that was served least. The unit is the message
(start-time fair queueing): each key has a tag, which a delivery moves on by the entry's messages, and the smallest tag
is next. A key that begins to wait gets at least the tag that is being served, so idle time saves up nothing. An entry
goes to the consumer with the fewest unacknowledged messages, among those of the first priority that can receive: so it
does not wait at one consumer while another is idle. That looks at each consumer for each entry. Within a key the
earliest entry goes first, and no order is guaranteed.

A key is the slot (1 … 65535) of the ordering key, else of the key: two keys in one slot share its turns and limits.
Messages without a key share slot 0. An entry counts as a whole for the key of its first message.
- **In flight**: a key has at most `max_in_flight` unacknowledged messages; an entry goes out while one is left, so a
  batch may pass the limit by its own length.
- **Rate**: `rate` messages a second, at most one second's worth at once; an entry is never divided.
- **Window**: new entries are read, and wait here, before one that waits is delivered, while fewer than
  WAITING_ENTRIES_MAX wait, or as many as fit into `key_shared_waiting_bytes` by their mean size. Entries that a filter
  passes over count as if they waited, so that what it wants does not wait for the end of the log. What is beyond the
  window is not seen yet: a key whose messages are all there waits for it. While no key in the window may go, reading
  goes on until what is known of the waiting entries takes `key_shared_waiting_bytes`: they are bitmaps, 170 KB for a
  million of one key.
- **Chunks** of large messages are delivered as without the property: a consumer that holds some has to get the others.
- What waits and was not read since (a redelivery held back, a delayed message whose time has come) is read first.
A crash, or a new owner of the topic, knows of nothing in flight: the limits begin anew, and no message is lost by them.
The state is bounded by the slots, the window and what is outstanding.
Guarding tests: tests/broker/subscription/core/test_fair_shared.py, and the walk of
tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar

from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import Blocked
from .in_log_order import why_no_receiver
from .key_shared import Shared
from .policy import KEY_LIMIT_MAX, DispatcherEntry, KeyLimits, Member, SubscriptionOptions
from .positions import BITMAP_ENTRY_BYTES, PositionSet

WAITING_ENTRIES_MAX = 10_000
"""Entries that wait before one of them is delivered, if there are so many: 0.2 s of reading. Pulsar looks 20,000
entries ahead for Key_Shared."""
RATE_BURST_S = 1.0
"""Seconds of a key's rate that may go out at once."""
KEYLESS_SLOT = 0
"""The slot of messages without a key: keys have 1 … 65535."""
_SIZE_WEIGHT = 1 / 64


# --------------------------------------------------------------------------------------------------------- turns


class KeyQueue:
    """A key of a fair subscription that has outstanding or waiting entries, or has used up some of its rate."""

    __slots__ = ("cost", "in_flight", "looks_at", "paced", "paid_until", "tag", "turn", "waiting")

    def __init__(self, tag: float) -> None:
        self.waiting = PositionSet()
        self.in_flight = 0  # messages outstanding
        self.cost = 1  # messages of the entry that was delivered last: an estimate for the next one
        self.tag = tag  # messages served, in the count that all keys share
        self.paid_until = 0.0  # monotonic seconds: what went out is within the rate from then on
        self.turn = 0  # number of its item in the order of turns; 0: none
        self.paced = 0  # likewise, in the order of times …
        self.looks_at = 0.0  # … and the time there


class FairKeyQueues:
    """The waiting entries of a fair subscription, by key, and the order in which they are delivered. It is the
    `waiting` of its policy, so it has the interface of a PositionSet. `of`: the queues by slot; `entries`: how many
    entries wait; `now`: monotonic seconds."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.of: dict[int, KeyQueue] = {}
        self.unread = PositionSet()  # waiting entries whose key is not known yet, and chunks
        self.entries = 0  # that wait
        self.now = 0.0  # monotonic seconds
        self._served = 0.0  # the smallest tag that waited when entries were chosen last
        self._held: dict[Position, tuple[int, int]] = {}  # outstanding entry → its slot, its messages
        self._turns: list[tuple[float, int, int]] = []  # a heap: tag, number of the item, slot
        self._times: list[tuple[float, int, int]] = []  # a heap: when the slot is looked at again, number, slot
        self._numbers = 0
        self._waiting_bytes = 0

    # ------------------------------------------------------------------ waiting entries
    def add_entry_of_key(self, position: Position, slot: int) -> None:
        """Adds a waiting entry of the key with this slot."""
        queue = self._queue(slot)
        self._waiting_bytes -= queue.waiting.size_bytes if queue.waiting else 0
        self.entries += queue.waiting.add(position)
        self._waiting_bytes += queue.waiting.size_bytes
        self._list(slot, queue)

    def _queue(self, slot: int) -> KeyQueue:
        queue = self.of.get(slot)
        if queue is None:
            queue = self.of[slot] = KeyQueue(self._served)
        return queue

    def is_waiting(self, position: Position, slot: int) -> bool:
        """Returns True if the entry waits: in the queue of the key with this slot, or among the entries whose key is
        not known because they were not read yet."""
        queue = self.of.get(slot)
        return (queue is not None and position in queue.waiting) or position in self.unread

    def remove_if_unread(self, position: Position) -> bool:
        """Removes an entry from those whose key is not known, because it was read. Returns False if it is not among
        them."""
        found = self.unread.discard(position)
        self.entries -= found
        return found

    def remove_waiting_entry(self, position: Position, slot: int) -> None:
        """Removes a waiting entry of the key with this slot, because it is delivered."""
        self._remove(slot, lambda waiting: [position] if waiting.discard(position) else [])

    def _remove(self, slot: int, remove: Callable[[PositionSet], Iterable[object]]) -> int:
        """Calls `remove`, which removes entries of the key and returns them. Returns how many there were."""
        queue = self.of[slot]
        before = queue.waiting.size_bytes if queue.waiting else 0
        gone = len(list(remove(queue.waiting)))
        self._waiting_bytes += (queue.waiting.size_bytes if queue.waiting else 0) - before
        self.entries -= gone
        self._forget_if_idle(slot, queue)
        return gone

    def discard(self, position: Position) -> bool:
        """Removes the entry if it waits, and returns True; else returns False. The caller need not know its key."""
        if not self.entries:
            return False
        if self.remove_if_unread(position):
            return True
        slot = next((number for number, queue in self.of.items() if position in queue.waiting), None)
        if slot is None:
            return False
        self.remove_waiting_entry(position, slot)
        return True

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> None:
        """Removes those of the `entries` of one ledger that wait, because they are acknowledged."""
        self.entries -= len(self.unread.discard_entries_of_ledger(ledger_id, entries))
        for slot in [number for number, queue in self.of.items() if queue.waiting.contains_any_of(ledger_id, entries)]:
            self._remove(slot, lambda waiting: waiting.discard_entries_of_ledger(ledger_id, entries))

    def discard_up_to(self, mark: Position) -> None:
        """Removes the waiting entries up to and including `mark`, because they are acknowledged."""
        self.entries -= len(self.unread.discard_up_to(mark))
        for slot in [
            number for number, queue in self.of.items() if queue.waiting and queue.waiting.first_position() <= mark
        ]:
            self._remove(slot, lambda waiting: waiting.discard_up_to(mark))

    def clear(self) -> None:
        """Removes all entries, waiting and outstanding ones. What the keys have used up of their rates still counts."""
        paid = {number: queue.paid_until for number, queue in self.of.items() if queue.paid_until > self.now}
        self.of.clear()
        self.unread.clear()
        self._held.clear()
        self._turns.clear()
        self._times.clear()
        self.entries = self._waiting_bytes = 0
        for number, paid_until in paid.items():
            self._queue(number).paid_until = paid_until
            self._forget_if_idle(number, self.of[number])

    # ------------------------------------------------------------------ outstanding entries
    def count_delivered_entry(self, position: Position, slot: int, messages: int) -> None:
        """Called when an entry of `messages` messages is delivered. It counts against the limits of its key until
        `release_delivered_entries`."""
        queue = self._queue(slot)
        self._held[position] = (slot, messages)
        queue.in_flight += messages
        queue.cost = messages
        queue.tag = max(queue.tag, self._served) + messages
        if self.limits.rate:
            queue.paid_until = max(queue.paid_until, self.now) + messages / self.limits.rate

    def release_delivered_entries(self, positions: Iterable[Position]) -> None:
        """Called when entries are no longer outstanding: they no longer count as in flight for their keys."""
        for position in positions:
            slot, messages = self._held.pop(position, (-1, 0))
            if slot < 0:
                continue  # a chunk
            queue = self.of[slot]
            queue.in_flight -= messages
            self._list(slot, queue)
            self._forget_if_idle(slot, queue)

    def add(self, position: Position) -> None:
        """Adds an entry that waits from now on, and is no longer outstanding if it was. If its key is not known, the
        entry is chosen to be read first, so that the key becomes known."""
        slot = self._held[position][0] if position in self._held else -1
        if slot < 0:
            self.entries += self.unread.add(position)
            return
        self.add_entry_of_key(position, slot)
        self.release_delivered_entries((position,))

    # ------------------------------------------------------------------ who is next
    def may_deliver_key(self, slot: int) -> bool:
        """Returns True if the limits of the key allow one more entry now."""
        queue = self.of.get(slot)
        return queue is None or self._may_go(queue)

    def _may_go(self, queue: KeyQueue) -> bool:
        return self._has_room(queue) and queue.paid_until - RATE_BURST_S <= self.now

    def _has_room(self, queue: KeyQueue) -> bool:
        return not self.limits.max_in_flight or queue.in_flight < self.limits.max_in_flight

    def _list(self, slot: int, queue: KeyQueue) -> None:
        """Puts the key into the order of turns, if something of it waits and may go now; else into the order of times,
        if its rate is what it waits for. What waits for room is listed by `release_delivered_entries`."""
        if queue.turn or not queue.waiting or not self._has_room(queue):
            return
        if queue.paid_until - RATE_BURST_S > self.now:
            self._look_again(slot, queue, queue.paid_until - RATE_BURST_S)
            return
        queue.tag = max(queue.tag, self._served)
        self._numbers += 1
        queue.turn = self._numbers
        heappush(self._turns, (queue.tag, queue.turn, slot))

    def _look_again(self, slot: int, queue: KeyQueue, at: float) -> None:
        """Puts the key into the order of times, unless it is there with an earlier time."""
        if queue.paced and queue.looks_at <= at:
            return
        self._numbers += 1
        queue.paced, queue.looks_at = self._numbers, at
        heappush(self._times, (at, queue.paced, slot))
        if len(self._times) > 1000 + 4 * len(self.of):
            self._drop_stale_times()

    def _drop_stale_times(self) -> None:
        self._times = [each for each in self._times if (kept := self.of.get(each[2])) and kept.paced == each[1]]
        heapify(self._times)

    def _forget_if_idle(self, slot: int, queue: KeyQueue) -> None:
        if queue.in_flight or queue.waiting:
            return
        if queue.paid_until > self.now:
            self._look_again(slot, queue, queue.paid_until)
            return
        del self.of[slot]

    def advance_clock(self, now: float) -> None:
        """Sets the time to `now` (monotonic seconds). Entries of keys whose rate allows more then may be chosen
        again."""
        self.now = now
        times = self._times
        while times and times[0][0] <= now:
            _, number, slot = heappop(times)
            queue = self.of.get(slot)
            if queue is not None and queue.paced == number:
                queue.paced = 0
                self._list(slot, queue)
                self._forget_if_idle(slot, queue)
                times = self._times

    def next_release_s(self) -> float:
        """Returns the seconds until the next key is considered again whose rate is used up; 0 if there is none, or no
        entry waits."""
        return max(0.0, self._times[0][0] - self.now) if self._times and self.entries else 0.0

    def choose_entries(self, count: int) -> list[Position]:
        """Returns up to `count` waiting entries that the limits of their keys allow now, sorted by position. The keys
        take turns. Entries whose key is not known are chosen first: they are read so that it becomes known. The chosen
        entries still wait."""
        found = self.unread.first_positions(count) if self.unread else []
        wanted = count - len(found)
        if wanted > 0:
            queues = self._first_in_turn(wanted)
            if len(queues) == wanted:
                found += [queue.waiting.first_position() for queue in queues]
            elif queues:
                found += self._share_out(queues, wanted)
        found.sort()
        return found

    def _first_in_turn(self, count: int) -> list[KeyQueue]:
        """Returns up to `count` keys in the order of turns. All of them may go."""
        first: list[tuple[int, KeyQueue]] = []
        while self._turns and len(first) < count:
            tag, number, slot = heappop(self._turns)
            queue = self.of.get(slot)
            if queue is None or queue.turn != number:
                continue  # it was forgotten meanwhile
            queue.turn = 0
            if tag < queue.tag or not queue.waiting or not self._may_go(queue):
                self._list(slot, queue)  # where it belongs now
            else:
                first.append((slot, queue))
        if first:
            self._served = max(self._served, first[0][1].tag)
        for slot, queue in first:
            self._list(slot, queue)
        return [queue for _, queue in first]

    def _share_out(self, queues: Sequence[KeyQueue], count: int) -> list[Position]:
        """Returns up to `count` entries of these keys, which are fewer than `count`, by turns."""
        share, found = 2 * count // len(queues) + 1, list[Position]()
        several = [iter(queue.waiting.first_positions(min(share, self._room(queue)))) for queue in queues]
        order = [(queue.tag, place) for place, queue in enumerate(queues)]
        heapify(order)
        while order and len(found) < count:
            tag, place = heappop(order)
            position = next(several[place], None)
            if position is not None:
                found.append(position)
                heappush(order, (tag + queues[place].cost, place))
        return found

    def _room(self, queue: KeyQueue) -> int:
        """Returns how many messages of the key its limits allow now; KEY_LIMIT_MAX: any number."""
        room = self.limits.max_in_flight - queue.in_flight if self.limits.max_in_flight else KEY_LIMIT_MAX
        if self.limits.rate:
            left_s = self.now + RATE_BURST_S - max(queue.paid_until, self.now)
            room = min(room, 1 + int(left_s * self.limits.rate))
        return room

    def set_limits(self, limits: KeyLimits) -> None:
        """Replaces the limits of the keys. Messages that are in flight or were delivered already count against the new
        ones."""
        self.limits = limits
        for slot, queue in list(self.of.items()):
            if not limits.rate:
                queue.paid_until = 0.0
            self._list(slot, queue)
            self._forget_if_idle(slot, queue)

    # ------------------------------------------------------------------ questions
    @property
    def waiting_bytes(self) -> int:
        """The memory in bytes of the waiting entries."""
        return self._waiting_bytes + len(self.unread) * BITMAP_ENTRY_BYTES

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: keys and entries agree; each key that waits and may go is in
        the order of turns, and each that waits for its rate in the order of times."""
        in_flight: dict[int, int] = {}
        for slot, messages in self._held.values():
            in_flight[slot] = in_flight.get(slot, 0) + messages
        turns = {number: slot for _, number, slot in self._turns}
        times = {number: slot for _, number, slot in self._times}
        for slot, queue in self.of.items():
            queue.waiting.check()
            assert queue.in_flight == in_flight.pop(slot, 0), "messages in flight of a key are counted wrong"
            assert queue.in_flight or queue.waiting or times.get(queue.paced) == slot, "an idle key is kept for ever"
            if queue.waiting and self._may_go(queue):
                listed = turns.get(queue.turn) == slot or times.get(queue.paced) == slot
                assert listed, "a key that may go has no turn"
            elif queue.waiting and self._has_room(queue):
                assert turns.get(queue.turn) == slot or times.get(queue.paced) == slot, "a key waits for no time"
        assert not in_flight, "an entry is in flight of a key that is not kept"
        assert self.entries == len(self.unread) + sum(len(queue.waiting) for queue in self.of.values()), "a wrong count"
        size = sum(queue.waiting.size_bytes for queue in self.of.values() if queue.waiting)
        assert self._waiting_bytes == size, "the size of what waits is counted wrong"

    def __contains__(self, position: Position) -> bool:
        return position in self.unread or any(position in queue.waiting for queue in self.of.values())


# -------------------------------------------------------------------------------------------------------- policy


class FairShared(Shared):
    """The policy of Shared subscriptions with the property fair.by-key. The keys take turns, and the consumer with the
    fewest unacknowledged messages gets the next entry."""

    by_keys: ClassVar = True
    turn_entries: ClassVar = 1
    busy: ClassVar = Blocked.KEY_LIMITS

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        limits = options.key_limits or KeyLimits()
        self.turns = FairKeyQueues(limits)
        self.waiting = self.turns  # type: ignore[assignment]  # its interface is that of a PositionSet
        self.paced = limits.rate > 0
        self._waiting_bytes_max = options.config.key_shared_waiting_bytes
        self._size = 0.0  # mean bytes of an entry that waits
        self._passed_over = 0.0  # entries that no consumer gets, among those that wait

    def _choose_next(self, able: list[Member]) -> Member:
        fewest = min(member.unacked for member in able)
        return super()._choose_next([member for member in able if member.unacked == fewest])

    def on_entries_released(self, positions: Sequence[Position]) -> None:
        super().on_entries_released(positions)
        self.turns.release_delivered_entries(positions)

    def advance_clock(self, now: float) -> None:
        self.turns.advance_clock(now)

    def next_release_s(self) -> float:
        return self.turns.next_release_s()

    def set_key_limits(self, limits: KeyLimits) -> None:
        """Replaces the limits of the keys; consumers may be connected."""
        self.turns.set_limits(limits)
        self.paced = limits.rate > 0

    def is_entry_waiting(self, entry: DispatcherEntry) -> bool:
        return self.turns.is_waiting(entry.position, _slot_of(entry))

    def next_ready_entries(self, count: int) -> Sequence[Position]:
        permits = sum([member.permits for member in self.candidates if member.may_receive])
        return self.turns.choose_entries(min(count, max(1, permits)))

    def on_entries_passed_over(self, count: int) -> None:
        if self.turns.entries:
            self._passed_over += count

    @property
    def is_looking_ahead(self) -> bool:  # type: ignore[override]
        fitting = self._waiting_bytes_max / self._size if self._size else WAITING_ENTRIES_MAX
        waiting = self.turns.entries
        return waiting < fitting and waiting + self._passed_over < WAITING_ENTRIES_MAX

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return self.turns.waiting_bytes >= self._waiting_bytes_max

    @property
    def waiting_entries_to_read(self) -> int:
        return len(self.turns.unread)

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked | None:  # type: ignore[override]
        if entry.chunk_of:
            return super().choose_member(entry, waited)
        turns, position, slot = self.turns, entry.position, _slot_of(entry)
        if not waited or turns.remove_if_unread(position):
            return self._stays(entry, slot, new=not waited)  # its turn comes when it is chosen
        if not turns.may_deliver_key(slot):
            return None
        choice = super().choose_member(entry, False)
        if type(choice) is Member:
            turns.count_delivered_entry(position, slot, entry.count)
            self._passed_over *= 1 - 1 / turns.entries  # none when nothing waits any more
            turns.remove_waiting_entry(position, slot)
        return choice

    def _stays(self, entry: DispatcherEntry, slot: int, *, new: bool) -> Blocked | None:
        """Stores the entry as waiting with its key and returns None. If it is new, and no consumer could get it or
        there is no room for it, stores nothing and returns the reason."""
        if new:
            why = self.busy if self.is_full else why_no_receiver(self.candidates)
            if why is not None:
                return why
        self._size += (entry.size - self._size) * (_SIZE_WEIGHT if self._size else 1)
        self.turns.add_entry_of_key(entry.position, slot)
        return None


def _slot_of(entry: DispatcherEntry) -> int:
    return entry.slots[0] if entry.slots else KEYLESS_SLOT
