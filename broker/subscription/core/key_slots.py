"""The slots of a Key_Shared subscription that are in use: which entries are outstanding in each, which wait for it, and
which consumer may get the first waiting one.

    slots.occupy_slots_of_entry(position, numbers, member)     an entry is delivered
    slots.vacate_slots_of_entries(positions)    these entries are outstanding no more
    slots.add_waiting_entry(position, numbers)        it waits; until `remove_waiting_entry`, or one of `discard…`
    slots.changed[number] = None                the consumer for the first waiting entry is to be found again
    slots.next_ready_entries(count, members)    waiting entries that could go out now
    slots.find_held_slots(now_s)                slots whose oldest outstanding entry keeps others waiting

An entry *occupies* the slots of its keys, and waits in each of them. Five indexes follow from that, and change in this
module alone: the slots themselves, the outstanding entries with their slots, the waiting entries of several slots
(`mixed`), of no slot or of slots that are not known yet (`loose`), and for each consumer the slots whose first waiting
entry may go to it. The owner of a slot, and the consumer that may get an entry, are key_shared.py's rule (`target`).

A slot is checked again only when something in it has changed, so a stuck key costs nothing, however many entries wait
in it: they are bitmaps, 170 KB for a million entries. Guarding test: `check`, at each step of
tests/broker/subscription/core/test_dispatch_walk.py.

It is not recorded how long an entry has been outstanding. Each call of `find_held_slots` compares what is outstanding
with the call before. The outstanding entries are kept in the order of their delivery, so the first OLDEST_ENTRIES_MAX
of them contain those that are outstanding the longest. A slot is held since the call that first found its oldest
outstanding entry. The time begins anew when that entry is acknowledged, and not when a later one is. Guarding tests:
tests/broker/subscription/core/test_held_slots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

from pyroaring import BitMap

from ....proto.names import Position
from .in_log_order import why_no_receiver
from .policy import HeldSlot, Member, SlotInHandover
from .positions import BITMAP_ENTRY_BYTES, PositionSet

CHANGED_SLOTS_AT_ONCE = 1000
"""Slots whose first waiting entry is placed at once: half a millisecond."""
OLDEST_ENTRIES_MAX = 1000
"""Outstanding entries that a look for held slots examines, those first that were delivered first: 1 ms."""
MIXED_ENTRY_BYTES = 150
"""Bytes of a waiting entry of several keys, beside what it takes in each of its slots."""


NO_WAITING_POSITIONS = PositionSet()
"""The empty set, of a slot in which nothing has waited; never add to it. `is NO_WAITING_POSITIONS` costs less than a
length."""


class KeySlotInUse:
    """A slot of keys that is in use: at least one entry with a key of this slot is outstanding, or waits for its
    consumer."""

    __slots__ = ("blocked", "draining", "failures", "holder", "outstanding", "ready_for", "waiting")

    def __init__(self) -> None:
        self.holder: Member | None = None  # while something is outstanding
        self.outstanding = 0  # entries
        self.draining = False  # the holder is not the owner
        self.waiting = NO_WAITING_POSITIONS
        self.ready_for: Member | None = None  # who may get the first one that waits
        self.blocked = 0  # entries that came while it was draining, and wait
        self.failures: dict[Position, None] | None = None  # nothing after one of them goes out


    def has_failure_before(self, position: Position) -> bool:
        """Returns True if an entry of this slot before `position` has failed and is not acknowledged yet."""
        return self.failures is not None and min(self.failures) < position


class KeySlotTable:
    """The slots of keys that have outstanding or waiting entries. `target(number, slot)`: a function that returns the
    consumer that may get the first waiting entry of the slot; None if no consumer may get it yet. `entries`: how many
    entries wait."""

    def __init__(self, target: Callable[[int, KeySlotInUse], Member | None]) -> None:
        self.of: dict[int, KeySlotInUse] = {}
        self.mixed: dict[Position, tuple[int, ...]] = {}  # waiting entry → its slots, if it has several
        self.loose = PositionSet()  # waiting entries without a slot, or whose slots are not known yet
        self.changed: dict[int, None] = {}  # slots of which it has to be found out again who may get the first
        self.entries = 0  # that wait
        self.drained_total = 0
        self._target = target
        self._held: dict[Position, tuple[int, ...]] = {}  # outstanding entry → its slots
        self._failed: dict[Position, tuple[int, ...]] = {}  # entry that failed, until it is done → its slots
        self._ready: dict[int, dict[int, None]] = {}  # consumer → slots whose first waiting entry may go to it
        self._waiting_bytes = 0  # of the slots' sets and of `mixed`
        self._oldest: dict[int, tuple[Position, float]] = {}  # slot → its oldest outstanding entry, first seen when

    # ------------------------------------------------------------------ consumers
    def add_member(self, member: Member) -> None:
        """Adds a consumer, for which no slot is ready yet."""
        self._ready[member.id] = {}

    def remove_member(self, member: Member) -> None:
        """Removes a consumer. Its outstanding entries must have been removed from their slots before."""
        for number in self._ready.pop(member.id):
            self.of[number].ready_for = None

    # ------------------------------------------------------------------ outstanding entries
    def occupy_slots_of_entry(self, position: Position, numbers: tuple[int, ...], member: Member) -> None:
        """Called when an entry is delivered to the consumer. While the entry is outstanding, it occupies the slots
        `numbers` of its keys."""
        self._held[position] = numbers
        for number in numbers:
            slot = self.of.get(number)
            if slot is None:
                slot = self.of[number] = KeySlotInUse()
            slot.outstanding += 1
            if slot.holder is not member:
                slot.holder, slot.draining = member, False
                if slot.waiting is not NO_WAITING_POSITIONS and slot.waiting:
                    self.changed[number] = None

    def vacate_slots_of_entries(self, positions: Sequence[Position]) -> None:
        """Called when entries are no longer outstanding: they no longer occupy their slots."""
        held, slots = self._held, self.of
        for position in positions:
            for number in held.pop(position, ()):
                slot = slots[number]
                slot.outstanding -= 1
                if slot.outstanding == 0:
                    if slot.draining:
                        self.drained_total += 1
                    slot.holder, slot.draining, slot.blocked = None, False, 0
                    if slot.waiting is not NO_WAITING_POSITIONS and slot.waiting:
                        self.changed[number] = None
                    elif not slot.failures:
                        self._forget_slot(number, slot)

    def on_entry_returned(self, position: Position) -> None:
        """Called when an outstanding entry was given back and must be delivered again: from now on it waits in the
        slots of its keys."""
        numbers = self._held.get(position, ())
        self.vacate_slots_of_entries((position,))
        self.add_waiting_entry(position, numbers)

    # ------------------------------------------------------------------ entries that failed
    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        """Called when an outstanding entry has failed and is about to be given back. The later entries in its slots are
        held back until `on_failed_entry_done`. Returns those of the later entries that are outstanding."""
        numbers = self._held.get(position, ())
        self._failed[position] = numbers
        for number in numbers:
            slot = self.of[number]
            slot.failures = {**(slot.failures or {}), position: None}
            self.changed[number] = None
        own = set(numbers)
        return [each for each, slots in self._held.items() if each > position and not own.isdisjoint(slots)]

    def on_failed_entry_done(self, position: Position) -> None:
        """Called when a failed entry is acknowledged: it no longer holds back the later entries in its slots."""
        for number in self._failed.pop(position, ()):
            slot = self.of[number]
            del slot.failures[position]  # type: ignore[union-attr]
            slot.failures = slot.failures or None
            self.changed[number] = None
            if slot.waiting and (several := self.mixed.get(slot.waiting.first_position())):
                self.changed[several[0]] = None
            self._drop_unused((number,))

    # ------------------------------------------------------------------ waiting entries
    def add_waiting_entry(self, position: Position, slots: tuple[int, ...]) -> None:
        """Adds an entry that waits for delivery in these slots. `slots` is empty if the entry has no key, or if its
        slots are not known yet."""
        self.entries += 1
        if not slots:
            self.loose.add(position)
            return
        if len(slots) > 1:
            self.mixed[position] = slots
            self._waiting_bytes += MIXED_ENTRY_BYTES
        for number in slots:
            slot = self.of.get(number)
            if slot is None:
                slot = self.of[number] = KeySlotInUse()
            waiting = slot.waiting
            if not waiting:
                if waiting is NO_WAITING_POSITIONS:
                    waiting = slot.waiting = PositionSet()
                self.changed[number] = None
            else:
                self._waiting_bytes -= waiting.size_bytes
                if position < (first := waiting.first_position()):
                    self.changed[number] = None
                    if first in self.mixed:
                        self.changed[self.mixed[first][0]] = None  # where it is listed
            waiting.add(position)
            self._waiting_bytes += waiting.size_bytes

    def remove_waiting_entry(self, position: Position, slots: tuple[int, ...]) -> None:
        """Removes a waiting entry from its slots."""
        self.entries -= 1
        if len(slots) > 1 and self.mixed.pop(position, None) is not None:
            self._waiting_bytes -= MIXED_ENTRY_BYTES
        for number in slots:
            slot = self.of[number]
            waiting = slot.waiting
            self._waiting_bytes -= waiting.size_bytes
            waiting.discard(position)
            self._waiting_bytes += waiting.size_bytes if waiting else 0
            self.changed[number] = None

    def is_entry_waiting(self, position: Position, numbers: tuple[int, ...]) -> bool:
        """Returns True if the entry waits for a consumer. `numbers`: the slots of its keys; () if they are not
        known."""
        if numbers:
            slot = self.of.get(numbers[0])
            if slot is not None and position in slot.waiting:
                return True
        return position in self.loose

    def discard(self, position: Position) -> None:
        """Removes the entry if it waits; else does nothing. The caller need not know its slots."""
        if not self.entries:
            return
        if self.loose.discard(position):
            self.entries -= 1
            return
        slots = self.mixed.get(position) or next(
            ((number,) for number, slot in self.of.items() if position in slot.waiting), None
        )
        if slots is not None:
            self.remove_waiting_entry(position, slots)
            self._drop_unused(slots)

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> None:
        """Removes those of the `entries` of one ledger that wait, because they are acknowledged."""
        if not self.entries:
            return
        gone = self.loose.discard_entries_of_ledger(ledger_id, entries)
        for number, slot in list(self.of.items()):
            if slot.waiting:
                before = slot.waiting.size_bytes
                done = slot.waiting.discard_entries_of_ledger(ledger_id, entries)
                if done:
                    gone |= done
                    self._waiting_bytes += (slot.waiting.size_bytes if slot.waiting else 0) - before
                    self.changed[number] = None
                    self._drop_unused((number,))
        if self.mixed:
            for entry_id in gone:
                if self.mixed.pop(Position(ledger_id, entry_id), None) is not None:
                    self._waiting_bytes -= MIXED_ENTRY_BYTES
        self.entries -= len(gone)

    def discard_up_to(self, mark: Position) -> None:
        """Removes the waiting entries up to and including `mark`, because they are acknowledged."""
        if not self.entries:
            return
        gone = set(self.loose.discard_up_to(mark))
        for number, slot in list(self.of.items()):
            if slot.waiting and slot.waiting.first_position() <= mark:
                self._waiting_bytes -= slot.waiting.size_bytes
                gone.update(slot.waiting.discard_up_to(mark))
                self._waiting_bytes += slot.waiting.size_bytes if slot.waiting else 0
                self.changed[number] = None
                self._drop_unused((number,))
        for position in gone:
            if self.mixed.pop(position, None) is not None:
                self._waiting_bytes -= MIXED_ENTRY_BYTES
        self.entries -= len(gone)

    def _drop_unused(self, slots: Sequence[int]) -> None:
        for number in slots:
            slot = self.of[number]
            if not slot.outstanding and not slot.waiting and not slot.failures:
                self._forget_slot(number, slot)

    def _forget_slot(self, number: int, slot: KeySlotInUse) -> None:
        if slot.ready_for is not None:
            del self._ready[slot.ready_for.id][number]
        self.changed.pop(number, None)
        del self.of[number]

    # ------------------------------------------------------------------ which of them could go out
    def next_ready_entries(self, count: int, members: Mapping[int, Member]) -> Sequence[Position]:
        """Returns up to `count` waiting entries that could be delivered to their consumers now. Considers all slots
        evenly, so that a slot with many entries does not delay the others."""
        if not self.entries:
            return ()
        while True:
            self._place_changed()
            found = self._found(count, members)
            if found or not self.changed:
                return found

    def _found(self, count: int, members: Mapping[int, Member]) -> list[Position]:
        """Returns up to `count` waiting entries that could be delivered now. Considers only slots for which it is known
        which consumer may get their first entry."""
        found: list[Position] = []
        if self.loose and why_no_receiver(members.values()) is None:
            found += self.loose.first_positions(count)
        able = [id_ for id_, numbers in self._ready.items() if numbers and members[id_].may_receive]
        for id_ in able:
            self._take_ready(self._ready[id_], min(max(1, count // len(able)), members[id_].permits), found)
        found.sort()
        return found[:count]

    def _take_ready(self, numbers: dict[int, None], count: int, found: list[Position]) -> None:
        share = max(1, count // len(numbers))
        for number in list(islice(numbers, count)):
            if number in self.changed:
                continue  # it is settled in a later look
            waiting = self.of[number].waiting
            if share == 1:
                found.append(waiting.first_position())
            else:
                self._add_share(waiting.first_positions(share), found)
            del numbers[number]  # it is the last one the next time
            numbers[number] = None

    def _add_share(self, positions: list[Position], found: list[Position]) -> None:
        """Adds to `found` the first ones of `positions`, which can be delivered one after the other. Stops before an
        entry of several slots; if the first position is such an entry, adds only this one."""
        if not self.mixed:
            found += positions
            return
        for place, position in enumerate(positions):
            if place and position in self.mixed:
                return
            found.append(position)
            if position in self.mixed:
                return

    def _place_changed(self) -> None:
        """Finds, for some of the slots that have changed, the consumer that may get the first waiting entry."""
        if not self.changed:
            return
        if self.mixed or len(self.changed) <= CHANGED_SLOTS_AT_ONCE:  # an entry of several slots depends on all of them
            changed, self.changed = self.changed, {}
        else:
            changed = dict.fromkeys(self.changed.popitem()[0] for _ in range(CHANGED_SLOTS_AT_ONCE))  # the latest first
        if self.mixed:
            for number in list(changed):  # an entry of several slots is listed with the first of them
                slot = self.of.get(number)
                if slot is not None and slot.waiting and (several := self.mixed.get(slot.waiting.first_position())):
                    changed[several[0]] = None
        for number in changed:
            slot = self.of.get(number)
            if slot is None:
                continue
            target = self._target(number, slot)
            if target is slot.ready_for:
                continue
            if slot.ready_for is not None:
                del self._ready[slot.ready_for.id][number]
            if target is not None:
                self._ready[target.id][number] = None
            slot.ready_for = target

    def clear(self) -> None:
        """Removes all entries, waiting and outstanding ones, from all slots."""
        self.of.clear()
        self._held.clear()
        self._oldest.clear()
        self._failed.clear()
        self.mixed.clear()
        self.loose.clear()
        self.changed.clear()
        for numbers in self._ready.values():
            numbers.clear()
        self.entries = self._waiting_bytes = 0

    # ------------------------------------------------------------------ questions
    @property
    def waiting_bytes(self) -> int:
        """The memory in bytes that the positions of the waiting entries take."""
        return self._waiting_bytes + len(self.loose) * BITMAP_ENTRY_BYTES

    def find_held_slots(self, now_s: float) -> list[HeldSlot]:
        """Returns the slots in which entries wait until the oldest outstanding one is acknowledged, the longest held
        first. `now_s`: monotonic seconds. Looks at the slots of the OLDEST_ENTRIES_MAX entries that are outstanding for
        longest. A slot is held since the first call that found its oldest outstanding entry. An entry that was given
        back and delivered again counts as the same entry."""
        before, self._oldest = self._oldest, {}
        for position, numbers in islice(self._held.items(), OLDEST_ENTRIES_MAX):
            for number in numbers:
                if number not in self._oldest:
                    known = before.get(number)
                    self._oldest[number] = known if known and known[0] == position else (position, now_s)
        found = [self._describe_held(number, *oldest) for number, oldest in self._oldest.items()]
        return sorted((each for each in found if each.following_entries), key=lambda each: (each.since_s, each.slot))

    def _describe_held(self, number: int, oldest: Position, since_s: float) -> HeldSlot:
        slot = self.of[number]
        assert slot.holder is not None, "what is outstanding is at a consumer"
        return HeldSlot(number, slot.holder, oldest, since_s, slot.outstanding - 1 + len(slot.waiting))

    def slots_in_handover(self) -> list[SlotInHandover]:
        """Returns the slots that have a new owner, but still have outstanding entries at the old owner, sorted by
        number."""
        return [
            SlotInHandover(number, slot.outstanding, slot.blocked)
            for number, slot in sorted(self.of.items()) if slot.outstanding and slot.draining
        ]  # fmt: skip

    def check(self, outstanding: set[Position]) -> None:
        """Raises AssertionError if an invariant is broken: slots and entries agree; each slot is in use; each slot
        whose first waiting entry can be delivered is listed as ready."""
        assert not NO_WAITING_POSITIONS, "nothing is something"
        assert set(self._held) <= outstanding, "an entry is held without a consumer"
        counts: dict[int, int] = {}
        for slots in self._held.values():
            for number in slots:
                counts[number] = counts.get(number, 0) + 1
        waiting: set[Position] = set(self.loose)
        for number, slot in self.of.items():
            slot.waiting.check()
            assert slot.outstanding == counts.pop(number, 0), "a slot's count is wrong"
            assert slot.outstanding or slot.waiting or slot.failures, "a slot is kept that is not in use"
            assert set(slot.failures or ()) == {
                position for position, numbers in self._failed.items() if number in numbers
            }, "what failed in a slot is not known"
            assert (slot.holder is not None) == (slot.outstanding > 0), "a slot is held for nothing"
            assert slot.ready_for is None or number in self._ready[slot.ready_for.id], "a ready slot is not listed"
            waiting.update(slot.waiting)
        assert not counts, "an entry is in a slot that is not kept"
        assert not waiting & outstanding, "an entry is held and waits"
        assert len(waiting) == self.entries, "the count of waiting entries is wrong"
        assert set(self.mixed) <= waiting, "an entry of several slots is kept that does not wait"
        size = sum(slot.waiting.size_bytes for slot in self.of.values() if slot.waiting)
        assert self._waiting_bytes == size + MIXED_ENTRY_BYTES * len(self.mixed), "what waits is counted wrong"
        assert sum(map(len, self._ready.values())) == sum(
            slot.ready_for is not None for slot in self.of.values()
        ), "a slot is listed as ready that is not"
