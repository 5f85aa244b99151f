"""Key_Shared: the messages of a key are at one consumer at a time, and come in log order.

A key (the ordering key, else the key) is hashed to one of the slots 1 … 65535; slot_owners.py says whose each is. An
entry *occupies* the slots of its keys: one, or all of its messages' when a producer has batched several keys. What is
known of a slot: who holds it, how many entries are outstanding in it, and which ones wait for it.

The one rule (invariant 42; Pulsar S5, PIP-379): **a slot changes hands only while nothing is outstanding in it.** From
it follow:
- An entry goes out when in each of its slots no earlier one waits, and nothing is outstanding or all of it is at the
  consumer that gets the entry. One slot: at its owner. Several: at whoever holds one of them, else at the owner of the
  first message's slot.
- When the owner of a slot changes while entries are outstanding at the old one, the slot is *draining* (S10): what
  follows waits until they are acknowledged, given back, or their consumer leaves; then it goes to the new owner.
- What cannot go out waits here, and reading goes on behind it (S11), until what waits takes `waiting_bytes_max` of
  memory. Pulsar stops at 20,000 entries; here it is bitmaps per slot, so that one stuck key with a million messages
  behind it (170 KB) holds up nobody else.
- What was given back waits in its slots as well, so it precedes what is newer of its keys, whoever gets it.
- A message without a key has no order: an entry without any key occupies nothing, and goes to any consumer in turn.
- What waits and was not read since (a redelivery held back, a delayed message whose time has come) may be in any slot:
  nothing later goes out before it was read. It is read first.
With `out_of_order` (S12) a slot changes hands at once, nothing is drained, and an entry occupies the slot of its first
message alone: all that waits in a slot waits for the same consumer, and for nothing else.

How it stays fast: an entry costs one look at its slot. `_ready` keeps, for each consumer, the slots whose first waiting
entry may go to it; a slot is looked at again only when something in it has changed (`_changed`), so a stuck key costs
nothing, however many entries wait behind it. After a join or a leave every slot that is in use is looked at again, in
slices (`look_again`, SETTLED_AT_ONCE), and all of them before the next entry goes out: with 50,000 slots in use it held
the event loop for 30 ms.
Guarding test: tests/broker/subscription/core/test_dispatch_walk.py, where M32 is planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap

from .....proto.names import Position
from ..positions import ENTRY_BYTES, PositionSet
from .in_log_order import why_none
from .policy import Blocked, Entry, Member
from .slot_owners import SlotOwners

SETTLED_AT_ONCE = 1000
"""Slots whose first waiting entry is placed in one look: half a millisecond."""
MIXED_BYTES = 150
"""Of an entry of several keys that waits, beside what it takes in each of its slots."""


_NOTHING = PositionSet()
"""What waits for a slot that nothing waits for; never added to."""


class _Slot:
    """In use: something is outstanding in it, or waits for it."""

    __slots__ = ("blocked", "draining", "holder", "outstanding", "ready_for", "waiting")

    def __init__(self) -> None:
        self.holder: Member | None = None  # while something is outstanding
        self.outstanding = 0  # entries
        self.draining = False  # the holder is not the owner
        self.waiting = _NOTHING
        self.ready_for: Member | None = None  # who may get the first one that waits
        self.blocked = 0  # entries that came while it was draining, and wait


class Draining(NamedTuple):
    """A slot that waits to change hands, for the statistics."""

    slot: int
    outstanding_entries: int
    blocked_attempts: int


class KeyShared:
    individual = True

    def __init__(
        self, owners: SlotOwners, *, out_of_order: bool = False, sticky: bool = False, waiting_bytes_max: int = 16 << 20
    ) -> None:
        self.owners = owners
        self.sticky = sticky
        self.out_of_order = out_of_order
        self.drained_total = 0
        self._waiting_bytes_max = waiting_bytes_max
        self._members: dict[int, Member] = {}
        self._slots: dict[int, _Slot] = {}
        self._owned: dict[int, Member | None] = {}  # slot → owner, of those that were asked for
        self._held: dict[Position, tuple[int, ...]] = {}  # outstanding entry → its slots
        self._mixed: dict[Position, tuple[int, ...]] = {}  # waiting entry → its slots, if it has several
        self._loose = PositionSet()  # waiting entries without a slot, or whose slots are not known yet
        self._ready: dict[int, dict[int, None]] = {}  # consumer → slots whose first waiting entry may go to it
        self._changed: dict[int, None] = {}  # slots of which that has to be found out again
        self._stale: list[int] = []  # slots that are to be looked at, because owners have changed
        self._turn = 0  # the consumer that got the last entry without a key
        self.waiting_entries = 0
        self._waiting_bytes = 0  # of the slots' sets and of `_mixed`

    # ------------------------------------------------------------------ consumers
    def refuses(self, newcomer: Member) -> str | None:
        return self.owners.refuses(newcomer)

    def joined(self, member: Member) -> None:
        self._members[member.id] = member
        self._ready[member.id] = {}
        self.owners.join(member)
        self._owners_changed()

    def left(self, member: Member) -> None:
        del self._members[member.id]
        self.owners.leave(member)
        self._owners_changed()
        for number in self._ready.pop(member.id):
            self._slots[number].ready_for = None

    def _owners_changed(self) -> None:
        self._owned = {}
        self._stale = list(self._slots)

    def look_again(self, count: int) -> bool:
        """So many of the slots that may have another owner. False: there are more, and nothing goes out before."""
        for number in self._stale[-count:]:
            slot = self._slots.get(number)
            if slot is None:
                continue
            if slot.outstanding:
                slot.draining = not self.out_of_order and slot.holder is not self._owner(number)
            if slot.waiting:
                self._changed[number] = None
        del self._stale[-count:]
        return not self._stale

    # ------------------------------------------------------------------ handing out
    def pick(self, entry: Entry, waited: bool) -> Member | Blocked | None:
        if self._stale:
            self.look_again(len(self._stale))
        slots, position = entry.slots, entry.position
        if self.out_of_order:
            slots = slots[:1]
        if self._loose:
            unread = waited and self._loose.discard(position)
            if unread:
                self.waiting_entries -= 1
                waited = False
            if slots and self._loose and self._loose.first() < position and not self.out_of_order:
                return self._stays(position, slots, waited, unread)
        else:
            unread = False
        if len(slots) == 1:
            member = self._taker(slots[0], position, waited)
        elif slots:
            member = self._taker_of_several(slots, position)
        else:
            member = self._next_able()
        if member is None:
            return self._stays(position, slots, waited, unread)
        if not slots:
            return member
        if waited:
            self._stop_waiting(position, slots)
        self._held[position] = slots
        for number in slots:
            slot = self._slots.get(number)
            if slot is None:
                slot = self._slots[number] = _Slot()
            slot.outstanding += 1
            if slot.holder is not member:
                slot.holder = member
                slot.draining = len(slots) > 1 and member is not self._owner(number)
                if slot.waiting:
                    self._changed[number] = None
        return member

    def _stays(self, position: Position, slots: tuple[int, ...], waited: bool, unread: bool) -> Blocked | None:
        """It waits, if there is room; nothing new does when nobody could get anything behind it either."""
        if waited:
            return None
        if not unread:
            if self.full:
                return Blocked.KEYS_BUSY
            why = self.blocked()
            if why is not None:
                return why
        self._wait(position, slots)
        return None

    def _owner(self, number: int) -> Member | None:
        try:
            return self._owned[number]
        except KeyError:
            owner = self._owned[number] = self.owners.owner(number)
            return owner

    def _taker(self, number: int, position: Position, waited: bool) -> Member | None:
        """Who gets an entry of this one slot now."""
        slot = self._slots.get(number)
        if slot is None or self.out_of_order:
            member = self._owner(number)
        elif slot.waiting is not _NOTHING and slot.waiting and not (waited and slot.waiting.first() == position):
            return None
        elif not slot.outstanding:
            member = self._owner(number)
        elif slot.draining:
            slot.blocked += not waited
            return None
        else:
            member = slot.holder
        if member is None or member.permits <= 0 or member.paused or member.blocked:
            return None
        return member

    def _taker_of_several(self, slots: tuple[int, ...], position: Position) -> Member | None:
        member = self._target_of_several(slots, position)
        return member if member is not None and member.able else None

    def _target_of_several(self, slots: tuple[int, ...], position: Position) -> Member | None:
        """Whose the entry is, as long as nothing in its slots changes. None: nobody's yet."""
        holder: Member | None = None
        if not self.out_of_order:
            for number in slots:
                slot = self._slots.get(number)
                if slot is None:
                    continue
                if slot.waiting and slot.waiting.first() < position:
                    return None
                if slot.outstanding:
                    if holder is not None and slot.holder is not holder:
                        return None
                    holder = slot.holder
        return holder if holder is not None else self._owner(slots[0])

    def _next_able(self) -> Member | None:
        """Any consumer that can take something, each in its turn."""
        able = [member for member in self._members.values() if member.able]
        if not able:
            return None
        chosen = next((member for member in able if member.id > self._turn), able[0])
        self._turn = chosen.id
        return chosen

    # ------------------------------------------------------------------ waiting
    def _wait(self, position: Position, slots: tuple[int, ...]) -> None:
        self.waiting_entries += 1
        if not slots:
            self._loose.add(position)
            return
        if len(slots) > 1:
            self._mixed[position] = slots
            self._waiting_bytes += MIXED_BYTES
        for number in slots:
            slot = self._slots.get(number)
            if slot is None:
                slot = self._slots[number] = _Slot()
            waiting = slot.waiting
            if not waiting:
                if waiting is _NOTHING:
                    waiting = slot.waiting = PositionSet()
                self._changed[number] = None
            else:
                self._waiting_bytes -= waiting.size_bytes
                if position < (first := waiting.first()):
                    self._changed[number] = None
                    if first in self._mixed:
                        self._changed[self._mixed[first][0]] = None  # where it is listed
            waiting.add(position)
            self._waiting_bytes += waiting.size_bytes

    def _stop_waiting(self, position: Position, slots: tuple[int, ...]) -> None:
        self.waiting_entries -= 1
        if len(slots) > 1 and self._mixed.pop(position, None) is not None:
            self._waiting_bytes -= MIXED_BYTES
        for number in slots:
            slot = self._slots[number]
            waiting = slot.waiting
            self._waiting_bytes -= waiting.size_bytes
            waiting.discard(position)
            self._waiting_bytes += waiting.size_bytes if waiting else 0
            self._changed[number] = None

    def waits(self, entry: Entry) -> bool:
        slots = entry.slots
        if slots:
            slot = self._slots.get(slots[0])
            if slot is not None and entry.position in slot.waiting:
                return True
        return entry.position in self._loose

    def ready(self, count: int) -> Sequence[Position]:
        """A share for each slot, so that none with many entries keeps the others waiting."""
        if not self.waiting_entries:
            return ()
        if self._stale:
            self.look_again(len(self._stale))
        while True:
            self._settle()
            found = self._found(count)
            if found or not self._changed:
                return found

    def _found(self, count: int) -> list[Position]:
        """Among the slots that are settled."""
        found: list[Position] = []
        if self._loose and why_none(self._members.values()) is None:
            found += self._loose.take(count)
        able = [id_ for id_, numbers in self._ready.items() if numbers and self._members[id_].able]
        for id_ in able:
            self._take_ready(self._ready[id_], min(max(1, count // len(able)), self._members[id_].permits), found)
        found.sort()
        return found[:count]

    def _take_ready(self, numbers: dict[int, None], count: int, found: list[Position]) -> None:
        share = max(1, count // len(numbers))
        for number in list(islice(numbers, count)):
            if number in self._changed:
                continue  # it is settled in a later look
            waiting = self._slots[number].waiting
            if share == 1:
                found.append(waiting.first())
            else:
                self._add_share(waiting.take(share), found)
            del numbers[number]  # it is the last one the next time
            numbers[number] = None

    def _add_share(self, positions: list[Position], found: list[Position]) -> None:
        """Those that go out one after the other: an entry of several slots is looked at when it is the first."""
        if not self._mixed:
            found += positions
            return
        for place, position in enumerate(positions):
            if place and position in self._mixed:
                return
            found.append(position)
            if position in self._mixed:
                return

    def _settle(self) -> None:
        """Finds out to whom the first waiting entry of some changed slots may go."""
        if not self._changed:
            return
        if self._mixed or len(self._changed) <= SETTLED_AT_ONCE:  # an entry of several slots depends on all of them
            changed, self._changed = self._changed, {}
        else:
            changed = dict.fromkeys(self._changed.popitem()[0] for _ in range(SETTLED_AT_ONCE))  # the latest first
        if self._mixed:
            for number in list(changed):  # an entry of several slots is listed with the first of them
                slot = self._slots.get(number)
                if slot is not None and slot.waiting and (several := self._mixed.get(slot.waiting.first())):
                    changed[several[0]] = None
        for number in changed:
            slot = self._slots.get(number)
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

    def _target(self, number: int, slot: _Slot) -> Member | None:
        if not slot.waiting:
            return None
        if self._mixed:
            first = slot.waiting.first()
            slots = self._mixed.get(first)
            if slots is not None:
                return self._target_of_several(slots, first) if slots[0] == number else None
        if not slot.outstanding or self.out_of_order:
            return self._owner(number)
        return None if slot.draining else slot.holder

    # ------------------------------------------------------------------ what becomes of an entry
    def released(self, positions: Sequence[Position]) -> None:
        held, slots = self._held, self._slots
        for position in positions:
            for number in held.pop(position, ()):
                slot = slots[number]
                slot.outstanding -= 1
                if slot.outstanding == 0:
                    if slot.draining:
                        self.drained_total += 1
                    slot.holder, slot.draining, slot.blocked = None, False, 0
                    if slot.waiting:
                        self._changed[number] = None
                    else:
                        self._forget_slot(number, slot)

    def returned(self, position: Position) -> None:
        slots = self._held.get(position, ())
        self.released((position,))
        self._wait(position, slots)

    def _forget_slot(self, number: int, slot: _Slot) -> None:
        if slot.ready_for is not None:
            del self._ready[slot.ready_for.id][number]
        self._changed.pop(number, None)
        del self._slots[number]

    def done(self, position: Position) -> None:
        if not self.waiting_entries:
            return
        if self._loose.discard(position):
            self.waiting_entries -= 1
            return
        slots = self._mixed.get(position) or next(
            ((number,) for number, slot in self._slots.items() if position in slot.waiting), None
        )
        if slots is not None:
            self._stop_waiting(position, slots)
            self._drop_unused(slots)

    def done_set(self, ledger_id: int, entries: BitMap) -> None:
        if not self.waiting_entries:
            return
        gone = self._loose.discard_set(ledger_id, entries)
        for number, slot in list(self._slots.items()):
            if slot.waiting:
                before = slot.waiting.size_bytes
                done = slot.waiting.discard_set(ledger_id, entries)
                if done:
                    gone |= done
                    self._waiting_bytes += (slot.waiting.size_bytes if slot.waiting else 0) - before
                    self._changed[number] = None
                    self._drop_unused((number,))
        if self._mixed:
            for entry_id in gone:
                if self._mixed.pop(Position(ledger_id, entry_id), None) is not None:
                    self._waiting_bytes -= MIXED_BYTES
        self.waiting_entries -= len(gone)

    def done_up_to(self, mark: Position) -> None:
        if not self.waiting_entries:
            return
        gone = set(self._loose.discard_up_to(mark))
        for number, slot in list(self._slots.items()):
            if slot.waiting and slot.waiting.first() <= mark:
                self._waiting_bytes -= slot.waiting.size_bytes
                gone.update(slot.waiting.discard_up_to(mark))
                self._waiting_bytes += slot.waiting.size_bytes if slot.waiting else 0
                self._changed[number] = None
                self._drop_unused((number,))
        for position in gone:
            if self._mixed.pop(position, None) is not None:
                self._waiting_bytes -= MIXED_BYTES
        self.waiting_entries -= len(gone)

    def _drop_unused(self, slots: Sequence[int]) -> None:
        for number in slots:
            slot = self._slots[number]
            if not slot.outstanding and not slot.waiting:
                self._forget_slot(number, slot)

    def forget(self) -> None:
        self._slots.clear()
        self._held.clear()
        self._mixed.clear()
        self._loose.clear()
        self._changed.clear()
        self._stale.clear()
        for numbers in self._ready.values():
            numbers.clear()
        self.waiting_entries = self._waiting_bytes = 0

    # ------------------------------------------------------------------ questions
    def blocked(self) -> Blocked | None:
        return why_none(self._members.values())

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes + len(self._loose) * ENTRY_BYTES

    @property
    def full(self) -> bool:
        return self.waiting_bytes >= self._waiting_bytes_max

    @property
    def unread_entries(self) -> int:
        return len(self._loose)

    def draining(self) -> list[Draining]:
        if self._stale:
            self.look_again(len(self._stale))
        return [
            Draining(number, slot.outstanding, slot.blocked)
            for number, slot in sorted(self._slots.items()) if slot.outstanding and slot.draining
        ]  # fmt: skip

    def check(self, outstanding: set[Position]) -> None:
        """Slots and entries say the same of each other; a slot is in use; nothing ready is missing."""
        assert not _NOTHING, "nothing is something"
        assert set(self._held) <= outstanding, "an entry is held that nobody has"
        counts: dict[int, int] = {}
        for slots in self._held.values():
            for number in slots:
                counts[number] = counts.get(number, 0) + 1
        waiting: set[Position] = set(self._loose)
        for number, slot in self._slots.items():
            slot.waiting.check()
            assert slot.outstanding == counts.pop(number, 0), "a slot's count is wrong"
            assert slot.outstanding or slot.waiting, "a slot is kept that is not in use"
            assert (slot.holder is not None) == (slot.outstanding > 0), "a slot is held for nothing"
            assert slot.ready_for is None or number in self._ready[slot.ready_for.id], "a ready slot is not listed"
            waiting.update(slot.waiting)
        assert not counts, "an entry is in a slot that is not kept"
        assert not waiting & outstanding, "an entry is held and waits"
        assert len(waiting) == self.waiting_entries, "the count of waiting entries is wrong"
        assert set(self._mixed) <= waiting, "an entry of several slots is kept that does not wait"
        size = sum(slot.waiting.size_bytes for slot in self._slots.values() if slot.waiting)
        assert self._waiting_bytes == size + MIXED_BYTES * len(self._mixed), "what waits is counted wrong"
        assert sum(map(len, self._ready.values())) == sum(
            slot.ready_for is not None for slot in self._slots.values()
        ), "a slot is listed as ready that is not"
