"""Key_Shared: the messages of a key are outstanding at one consumer at a time, and are delivered in log order. After
it, the policy of Shared.

A key (the ordering key, else the key) is hashed to one of the slots 1 … 65535; in_log_order.py assigns each to an
owner. An entry *occupies* the slots of its keys: one, or all of its messages' when a producer has batched several keys.
What is known of a slot: its holder, how many entries are outstanding in it, and which ones wait for it.

The one rule (invariant 42; Pulsar S5, PIP-379): **a slot changes hands only while nothing is outstanding in it.** From
it follow:
- An entry goes out when in each of its slots no earlier one waits, and nothing is outstanding or all of it is at the
  consumer that gets the entry. One slot: its owner. Several: the holder of one of them, else the owner of the first
  message's slot.
- When the owner of a slot changes while entries are outstanding at the old one, the slot is *draining* (S10): what
  follows waits until they are acknowledged, given back, or their consumer leaves; then it goes to the new owner.
- What cannot go out waits here, and reading continues beyond it (S11), until what waits takes
  `key_shared_waiting_bytes` of memory. Pulsar stops at 20,000 entries; here it is bitmaps per slot, so that one stuck
  key with a million waiting messages (170 KB) delays no other key.
- What was given back waits in its slots as well, so it precedes what is newer of its keys, whichever consumer gets it.
- A message without a key has no order: an entry without any key occupies nothing, and any consumer gets it in turn.
- What waits and was not read since (a redelivery held back, a delayed message whose time has come) may be in any slot:
  nothing later goes out before it was read. It is read first.
- An entry for which `on_entry_failed` was called holds back, in each of its slots, what is after it, until it is done.
With `out_of_order` (S12) a slot changes hands at once, nothing is drained, and an entry occupies the slot of its first
message alone: all that waits in a slot waits for the same consumer, and for nothing else.

How it stays fast: an entry costs one check of its slot (key_slots.py). After a join or a leave every slot in use is
checked again, in slices (`rebalance_slots`), and all of them before the next entry goes out: with 50,000 slots in use
that is 30 ms of work. Guarding test: tests/broker/subscription/core/test_dispatch_walk.py, where the mutant M32 is
planted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from sortedcontainers import SortedSet

from ....proto.names import Position
from ....proto.states import Blocked
from .cursor_state import NO_POSITION
from .in_log_order import (
    HashRingSlotOwners,
    LogOrderPolicy,
    SlotOwners,
    SplitRangeSlotOwners,
    StickyRangeSlotOwners,
    to_key_shared_options,
    why_no_receiver,
)
from .key_slots import NO_WAITING_POSITIONS, KeySlotInUse, KeySlotTable
from .policy import (
    ActiveConsumerChanged,
    DispatcherEntry,
    HeldSlot,
    Member,
    PolicyStatistics,
    SlotDistribution,
    SlotInHandover,
    SubscriptionOptions,
)


class KeyShared:
    """The policy of Key_Shared subscriptions. Each key is hashed to a slot, and each slot is owned by one consumer, so
    that the messages of a key are delivered to one consumer, in order. The docstring of this module gives the rules."""

    individual: ClassVar = True
    is_order_guaranteed: ClassVar = True
    by_keys: ClassVar = True
    busy: ClassVar = Blocked.KEYS_BUSY
    is_looking_ahead = paced = False

    def __init__(self, options: SubscriptionOptions) -> None:
        asked, config = to_key_shared_options(options.asked), options.config
        self.sticky, self.out_of_order = asked.sticky, asked.out_of_order
        self.owners: SlotOwners = (
            StickyRangeSlotOwners() if self.sticky else SplitRangeSlotOwners() if config.key_shared_hash_ranges
            else HashRingSlotOwners()
        )
        self._waiting_bytes_max = config.key_shared_waiting_bytes
        self._members: dict[int, Member] = {}
        self.candidates: Collection[Member] = self._members.values()
        self.slots = self.waiting = KeySlotTable(self._target)
        self._in_use, self._loose = self.slots.of, self.slots.loose  # local names: read for each entry
        self.on_entries_released = self.slots.vacate_slots_of_entries
        self.on_entry_returned = self.slots.on_entry_returned
        self.on_entry_failed, self.on_failed_entry_done = self.slots.on_entry_failed, self.slots.on_failed_entry_done
        self.discard, self.discard_entries_of_ledger, self.discard_up_to = (
            self.slots.discard,
            self.slots.discard_entries_of_ledger,
            self.slots.discard_up_to,
        )
        self._owned: dict[int, Member | None] = {}  # slot → owner, of those that were asked for
        self._stale: list[int] = []  # slots to be checked, because owners have changed
        self._turn = 0  # the consumer that got the last entry without a key

    # ------------------------------------------------------------------ consumers
    def why_incompatible(self, newcomer: Member) -> str | None:
        asked = to_key_shared_options(newcomer.options)
        if (asked.sticky, asked.out_of_order) == (self.sticky, self.out_of_order):
            return None
        return "its consumers are of another Key_Shared mode, or differ on out-of-order delivery"

    def why_refused(self, newcomer: Member) -> str | None:
        return self.owners.why_refused(newcomer)

    def add_member(self, member: Member) -> None:
        self._members[member.id] = member
        self.slots.add_member(member)
        self.owners.add_member(member)
        self._owners_changed()

    def remove_member(self, member: Member) -> None:
        del self._members[member.id]
        self.owners.remove_member(member)
        self._owners_changed()
        self.slots.remove_member(member)

    def _owners_changed(self) -> None:
        self._owned = {}
        self._stale = list(self._in_use)

    def rebalance_slots(self, count: int) -> bool:
        """Checks up to `count` of the slots whose owner may have changed. Returns False if more slots must be checked;
        no entry is delivered before that is done."""
        for number in self._stale[-count:]:
            slot = self._in_use.get(number)
            if slot is None:
                continue
            if slot.outstanding:
                slot.draining = not self.out_of_order and slot.holder is not self._owner(number)
            if slot.waiting:
                self.slots.changed[number] = None
        del self._stale[-count:]
        return not self._stale

    # ------------------------------------------------------------------ handing out
    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked | None:
        if self._stale:
            self.rebalance_slots(len(self._stale))
        slots, position = entry.slots, entry.position
        if self.out_of_order:
            slots = slots[:1]
        if self.slots.entries and self._loose:
            unread = waited and self._loose.discard(position)
            if unread:
                self.slots.entries -= 1
                waited = False
            if slots and self._loose and self._loose.first_position() < position and not self.out_of_order:
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
            self.slots.remove_waiting_entry(position, slots)
        self.slots.occupy_slots_of_entry(position, slots, member)
        if len(slots) > 1:
            for number in slots:
                self._in_use[number].draining = member is not self._owner(number)
        return member

    def _stays(self, position: Position, slots: tuple[int, ...], waited: bool, unread: bool) -> Blocked | None:
        """Stores the entry as waiting and returns None. If there is no room for it, or if it is a new entry and no
        consumer could get a later one either, stores nothing and returns the reason."""
        if waited:
            return None
        if not unread:
            if self.is_full:
                return Blocked.KEYS_BUSY
            why = why_no_receiver(self.candidates)
            if why is not None:
                return why
        self.slots.add_waiting_entry(position, slots)
        return None

    def _owner(self, number: int) -> Member | None:
        try:
            return self._owned[number]
        except KeyError:
            owner = self._owned[number] = self.owners.find_owner(number)
            return owner

    def _taker(self, number: int, position: Position, waited: bool) -> Member | None:
        """Returns the consumer that gets an entry whose only slot is `number`; None if the entry has to wait."""
        slot = self._in_use.get(number)
        if slot is None or self.out_of_order:
            member = self._owned.get(number) or self._owner(number)
        elif (slot.failures is not None and slot.has_failure_before(position)) or (
            slot.waiting is not NO_WAITING_POSITIONS
            and slot.waiting
            and not (waited and slot.waiting.first_position() == position)
        ):
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
        """Returns the consumer that gets an entry with several slots now; None if the entry has to wait."""
        member = self._target_of_several(slots, position)
        return member if member is not None and member.may_receive else None

    def _target_of_several(self, slots: tuple[int, ...], position: Position) -> Member | None:
        """Returns the consumer that may get an entry with several slots; None if no consumer may get it yet."""
        holder: Member | None = None
        if not self.out_of_order:
            for number in slots:
                slot = self._in_use.get(number)
                if slot is None:
                    continue
                if (slot.waiting and slot.waiting.first_position() < position) or slot.has_failure_before(position):
                    return None
                if slot.outstanding:
                    if holder is not None and slot.holder is not holder:
                        return None
                    holder = slot.holder
        return holder if holder is not None else self._owner(slots[0])

    def _next_able(self) -> Member | None:
        """Returns the next consumer, in turn, that can receive an entry; None if no consumer can."""
        able = [member for member in self._members.values() if member.may_receive]
        if not able:
            return None
        chosen = next((member for member in able if member.id > self._turn), able[0])
        self._turn = chosen.id
        return chosen

    # ------------------------------------------------------------------ waiting
    def is_entry_waiting(self, entry: DispatcherEntry) -> bool:
        return self.slots.is_entry_waiting(entry.position, entry.slots)

    def next_ready_entries(self, count: int) -> Sequence[Position]:
        """Returns up to `count` waiting entries that could be delivered to their consumers now. Considers all slots
        evenly, so that a slot with many entries does not delay the others."""
        if self._stale and self.slots.entries:
            self.rebalance_slots(len(self._stale))
        return self.slots.next_ready_entries(count, self._members)

    def _target(self, number: int, slot: KeySlotInUse) -> Member | None:
        """Returns the consumer that may get the first waiting entry of the slot `number`; None if no consumer may get
        it yet."""
        if not slot.waiting:
            return None
        if self.slots.mixed:
            first = slot.waiting.first_position()
            slots = self.slots.mixed.get(first)
            if slots is not None:
                return self._target_of_several(slots, first) if slots[0] == number else None
        if slot.has_failure_before(slot.waiting.first_position()):
            return None
        if not slot.outstanding or self.out_of_order:
            return self._owner(number)
        return None if slot.draining else slot.holder

    def is_held_back_by_failure(self, position: Position) -> bool:
        return False  # other keys go on

    # ------------------------------------------------------------------ what becomes of an entry
    def clear(self) -> None:
        self._stale.clear()
        self.slots.clear()

    # ------------------------------------------------------------------ questions
    @property
    def is_full(self) -> bool:
        return self.slots.waiting_bytes >= self._waiting_bytes_max

    @property
    def waiting_entries_to_read(self) -> int:
        return len(self._loose)

    def advance_clock(self, now: float) -> None:
        pass

    def next_release_s(self) -> float:
        return 0.0

    def on_entries_passed_over(self, count: int) -> None:
        pass

    def take_active_changes(self) -> Sequence[ActiveConsumerChanged]:
        return ()

    def statistics(self) -> PolicyStatistics:
        mode = "STICKY" if self.sticky else "AUTO_SPLIT"
        keys = SlotDistribution(
            mode, self.out_of_order, self.slots.drained_total, self.slots_in_handover(), self.owners.list_ranges()
        )
        return PolicyStatistics(keys=keys)

    def find_held_slots(self, now_s: float) -> Sequence[HeldSlot]:
        return self.slots.find_held_slots(now_s)

    def slots_in_handover(self) -> list[SlotInHandover]:
        """Returns the slots that have a new owner, but still have outstanding entries at the old owner, sorted by
        number."""
        if self._stale:
            self.rebalance_slots(len(self._stale))
        return self.slots.slots_in_handover()

    def check(self, outstanding: set[Position]) -> None:
        self.slots.check(outstanding)


# -------------------------------------------------------------------------------------------------------- shared
# Shared: any consumer may get any entry; each entry is outstanding at one consumer at most. No order.
#
# Round robin over the consumers that can take something, ENTRIES_PER_TURN at a time (Pulsar T17); consumers of a
# smaller priority number come first, others only when none of those can. No cumulative acks: the entries before one may
# be outstanding at other consumers.
#
# Chunks of a message go to the consumer at which the earliest outstanding chunk of the message is, while that can take
# some (Pulsar PR4): it assembles them. While it cannot, another consumer gets the chunk and gives it back, and it is
# delivered again later. A consumer without the first chunk gives back the others too, so what counts is where the first
# one is now: a consumer that had it, and gave it back, gets no chunk on the ground of that.


ENTRIES_PER_TURN = 20


class OutstandingChunks:
    """The outstanding chunks of large messages, and the consumer at which each of them is outstanding. Each method
    costs O(log n) per chunk."""

    __slots__ = ("_of", "_order")

    def __init__(self) -> None:
        self._of: dict[Position, tuple[str, Member]] = {}
        self._order: SortedSet[tuple[str, Position]] = SortedSet()

    def add(self, uuid: str, position: Position, member: Member) -> None:
        """Adds a chunk of the message `uuid`, which is delivered to the consumer."""
        self._of[position] = uuid, member
        self._order.add((uuid, position))

    def remove(self, positions: Iterable[Position]) -> None:
        """Removes entries that are no longer outstanding. Ignores those that are no chunks."""
        for position in positions:
            if (chunk := self._of.pop(position, None)) is not None:
                self._order.discard((chunk[0], position))

    def find_assembler(self, uuid: str) -> Member | None:
        """Returns the consumer at which the earliest outstanding chunk of the message `uuid` is outstanding; None if no
        chunk is."""
        at = self._order.bisect_left((uuid, NO_POSITION))
        if at == len(self._order) or self._order[at][0] != uuid:
            return None
        return self._of[self._order[at][1]][1]

    def check(self, outstanding: set[Position]) -> None:
        assert self._of.keys() <= outstanding, "a chunk that is not outstanding is kept"
        assert {(uuid, position) for position, (uuid, _) in self._of.items()} == set(self._order), "the order is wrong"


class Shared(LogOrderPolicy):
    """The policy of Shared subscriptions: the consumers get entries in turn (round robin)."""

    individual: ClassVar = True
    is_order_guaranteed: ClassVar = False
    turn_entries: ClassVar = ENTRIES_PER_TURN  # that a consumer gets before the next one

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self.candidates: list[Member] = []  # by priority, then in order of joining
        self._current: Member | None = None
        self._left_in_turn = 0
        self._chunks: OutstandingChunks | None = None  # until there is a chunk: an empty set takes 2 KB

    def why_refused(self, newcomer: Member) -> str | None:
        return None

    def add_member(self, member: Member) -> None:
        insort(self.candidates, member, key=lambda each: (each.priority, each.id))
        self._left_in_turn = 0  # the newcomer may be a better one

    def remove_member(self, member: Member) -> None:
        self.candidates.remove(member)
        if self._current is member:
            self._current, self._left_in_turn = None, 0

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked:
        chunk_of = entry.chunk_of
        current = self._find_able_assembler(chunk_of) if chunk_of else None
        if current is None:
            current = self._current
            if (
                current is None or self._left_in_turn <= 0
                or current.permits <= 0 or current.paused or current.blocked
            ):  # fmt: skip
                current = self._next_member()
                if current is None:
                    return why_no_receiver(self.candidates) or Blocked.NO_PERMITS
                first = current.priority == self.candidates[0].priority  # else a better one may be able at any moment
                self._current, self._left_in_turn = current, self.turn_entries if first else 1
            self._left_in_turn -= 1
        if waited:
            self._goes_out(entry.position, waited)
        if chunk_of:
            self._chunks = self._chunks or OutstandingChunks()
            self._chunks.add(chunk_of, entry.position, current)
        return current

    def _find_able_assembler(self, uuid: str) -> Member | None:
        """Returns the consumer that assembles the message; None: none does, or it cannot receive an entry now."""
        member = self._chunks.find_assembler(uuid) if self._chunks is not None else None
        return member if member is not None and member.may_receive else None

    def on_entries_released(self, positions: Sequence[Position]) -> None:
        if self._chunks is not None:
            self._chunks.remove(positions)

    def on_entry_returned(self, position: Position) -> None:
        super().on_entry_returned(position)
        if self._chunks is not None:
            self._chunks.remove((position,))

    def clear(self) -> None:
        super().clear()
        self._chunks = None

    def check(self, outstanding: set[Position]) -> None:
        super().check(outstanding)
        if self._chunks is not None:
            self._chunks.check(outstanding)

    def _next_member(self) -> Member | None:
        """Returns the next consumer in turn that can receive an entry. Considers the first priority at which there is
        such a consumer. Returns None if there is none."""
        able = [member for member in self.candidates if member.may_receive]
        if not able:
            return None
        return self._choose_next([member for member in able if member.priority == able[0].priority])

    def _choose_next(self, able: list[Member]) -> Member:
        """Returns that of the consumers `able`, which have one priority, whose turn it is."""
        after = self._current.id if self._current is not None else -1
        return next((member for member in able if member.id > after), able[0])
