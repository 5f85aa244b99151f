"""The dispatcher of one subscription: which entry goes to which consumer, and what to read next.

One machine for every subscription type. What differs, "who may get this entry", is a policy (policies/); reading,
permits, outstanding entries and redelivery are here, once.

    want = dispatcher.want()                    # Read(position) | Replay(positions) | Blocked
    deliveries = dispatcher.assign(entries)     # the entries that were read → (consumer, entry, count, acked indexes)

Rules
- Permits count messages, as the consumer is *shown* them: batch indexes acknowledged before cost none. A batch goes out
  while any permit is left, so permits may end below zero by one batch (invariant 43).
- An entry has at most one outstanding holder (invariant 41). It stays outstanding until it is acknowledged, given back
  (`redeliver`) or its consumer leaves; then it waits in the replay queue, in log order, before anything new is read.
- The redelivery count grows when an entry is given back, not when a consumer leaves (Pulsar A9). It is the cursor's.
- What the cursor has acknowledged is never delivered: `want` leaps over it, `assign` steps over it.
- While the cursor's holes take more memory than `memory_bytes_max` nothing is read behind the last of them: replays and
  what lies between go on, because they make it smaller.
- The read position only moves over entries that were assigned or are acknowledged; `assign` stops at the first entry
  that nobody may get, and says why (`Blocked`): the list of reasons is what `topics stats` shows.
Events are per entry. Guarding tests: tests/broker/core/test_dispatch.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pyroaring import BitMap
from sortedcontainers import SortedSet

from ...proto.names import Position
from .cursor import Cursor
from .log_shape import LogShape

REPLAY_ENTRIES_MAX = 100
"""Entries asked for in one replay: Pulsar's read batch (T17)."""


class Blocked(enum.Enum):
    """Why nobody gets the next message."""

    NO_CONSUMER = "no consumer is connected"
    NO_PERMITS = "no consumer has permits left"
    SLOW_CONSUMER = "the consumers with permits do not read what was sent to them"
    TOO_MANY_UNACKED = "the consumers hold as many unacknowledged messages as they may"
    HOLES = "what is acknowledged out of order takes all the memory that it may; older messages have to be acknowledged"
    THROTTLED = "the dispatch rate of the subscription, the topic or the broker is reached"
    CAUGHT_UP = "everything was delivered"


class Entry(Protocol):
    """What the machine must know of an entry."""

    @property
    def position(self) -> Position: ...
    @property
    def count(self) -> int:
        """Messages in it."""
        ...

    @property
    def size(self) -> int: ...


@dataclass(slots=True, eq=False)
class Member:
    """A consumer of the subscription, as the machine sees it."""

    id: int
    name: str
    priority: int = 0
    permits: int = 0
    paused: bool = False  # its connection does not take more at the moment
    outstanding: dict[Position, int] = field(default_factory=dict)  # position → messages, in order of delivery
    unacked: int = 0  # messages in `outstanding`
    reordered: bool = False  # an entry in `outstanding` may stand behind a later one
    delivered_messages: int = 0
    delivered_bytes: int = 0
    redelivered_messages: int = 0


class Read(NamedTuple):
    """Read on from here."""

    position: Position


class Replay(NamedTuple):
    """Read these again, in this order."""

    positions: tuple[Position, ...]


class Delivery(NamedTuple):
    member: Member
    entry: Entry
    redelivery_count: int
    acked_indexes: list[int]


class Policy(Protocol):
    """Who may join and who may get an entry. One per subscription; registered by type (policies/__init__.py)."""

    cumulative_acks: bool

    def joined(self, member: Member) -> None: ...
    def left(self, member: Member) -> None: ...
    def refuses(self, newcomer: Member) -> str | None:
        """Why the consumer may not join; None: it may."""
        ...

    def pick(self, entry: Entry) -> Member | Blocked: ...
    def blocked(self) -> Blocked | None:
        """Why no entry at all could go out now; None: one could."""
        ...


class Dispatcher:
    """`tracks` False: a reader. What it was sent is not outstanding; nothing is redelivered, and nothing piles up."""

    __slots__ = ("_cursor", "_memory_bytes_max", "_replay", "_shape", "_tracks", "members", "policy", "read_position")

    def __init__(
        self, shape: LogShape, cursor: Cursor, policy: Policy, *, tracks: bool = True,
        memory_bytes_max: float = float("inf"),
    ) -> None:  # fmt: skip
        self._tracks = tracks
        self._memory_bytes_max = memory_bytes_max
        self._shape = shape
        self._cursor = cursor
        self._replay: SortedSet[Position] = SortedSet()
        self.policy = policy
        self.members: dict[int, Member] = {}
        self.read_position = shape.after(cursor.mark)

    # ------------------------------------------------------------------ consumers
    def join(self, member: Member) -> None:
        """The caller asked `policy.refuses` first."""
        assert member.id not in self.members, "a consumer joins once"
        self.members[member.id] = member
        self.policy.joined(member)

    def leave(self, member: Member) -> None:
        """What it held goes back in log order; its redelivery counts stay as they are."""
        del self.members[member.id]
        self.policy.left(member)
        self._give_back(member, list(member.outstanding))

    def flow(self, member: Member, permits: int) -> None:
        member.permits += permits

    # ------------------------------------------------------------------ reading and handing out
    def want(self) -> Read | Replay | Blocked:
        blocked = self.policy.blocked()
        if blocked is not None:
            return blocked
        if self._replay:
            return Replay(tuple(self._replay.islice(0, REPLAY_ENTRIES_MAX)))
        self.read_position = self._cursor.next_unacked(self._shape.seat(self.read_position))
        if not self._shape.readable(self.read_position):
            return Blocked.CAUGHT_UP
        if self._full() and self.read_position > self._cursor.last_hole:
            return Blocked.HOLES
        return Read(self.read_position)

    def _full(self) -> bool:
        cursor = self._cursor
        return bool(cursor.acked or cursor.partial or cursor.counts) and cursor.memory_bytes > self._memory_bytes_max

    def assign(self, entries: Sequence[Entry]) -> list[Delivery]:
        """Hands out what was read, in order, until nobody may get the next one. What is left is read again later."""
        deliveries: list[Delivery] = []
        cursor, pick = self._cursor, self.policy.pick
        for entry in entries:
            position = entry.position
            replayed = position in self._replay if self._replay else False
            if not replayed and position < self.read_position:
                continue
            if cursor.partial:
                cursor.settle(position, entry.count)
            if cursor.is_acked(position):
                self._passed(position, replayed)
                continue
            member = pick(entry)
            if isinstance(member, Blocked):
                break
            deliveries.append(self._deliver(member, entry, replayed))
            self._passed(position, replayed)
        return deliveries

    def _deliver(self, member: Member, entry: Entry, replayed: bool) -> Delivery:
        position = entry.position
        assert position not in member.outstanding, "an entry has one outstanding holder"
        acked = self._cursor.acked_indexes(position)
        count = self._cursor.redeliveries(position)
        shown = entry.count - len(acked)
        if replayed:
            member.reordered = True
            member.redelivered_messages += shown
        if self._tracks:
            member.outstanding[position] = shown
            member.unacked += shown
        member.permits -= shown
        member.delivered_messages += shown
        member.delivered_bytes += entry.size
        return Delivery(member, entry, count, acked)

    def _passed(self, position: Position, replayed: bool) -> None:
        if replayed:
            self._replay.discard(position)
        if position >= self.read_position:
            self.read_position = Position(position[0], position[1] + 1)

    # ------------------------------------------------------------------ acknowledgements, after the cursor's
    def acked(self, member: Member | None, position: Position) -> None:
        """The entry is done: whoever holds it holds it no more, and it is not replayed."""
        if member is None or not self._drop(member, position):
            for other in self.members.values():
                if self._drop(other, position):
                    break
        if self._replay:
            self._replay.discard(position)

    def acked_set(self, member: Member | None, ledger_id: int, entries: BitMap) -> None:
        """Many entries of one ledger are done; the cost is that of the smaller of these and what is held."""
        holders = list(self.members.values()) if member is None else [member]
        holders += [other for other in self.members.values() if other not in holders]
        left = len(entries)
        for holder in holders:
            done = inside(holder.outstanding, ledger_id, entries)
            for position in done:
                self._drop(holder, position)
            left -= len(done)
            if not left:
                break
        if self._replay:
            for position in inside(self._replay, ledger_id, entries):
                self._replay.discard(position)

    def acked_messages(self, member: Member, position: Position, messages: int) -> None:
        """Part of an outstanding batch is done."""
        held = member.outstanding.get(position)
        if held is not None:
            messages = min(messages, held)
            member.outstanding[position] = held - messages
            member.unacked -= messages

    def acked_up_to(self, mark: Position) -> None:
        """Everything up to the mark is done."""
        for member in self.members.values():
            for position in self._held_up_to(member, mark):
                self._drop(member, position)
        while self._replay and self._replay[0] <= mark:
            self._replay.pop(0)
        self.read_position = max(self.read_position, self._shape.after(mark))

    @staticmethod
    def _held_up_to(member: Member, mark: Position) -> list[Position]:
        held: list[Position] = []
        for position in member.outstanding:
            if position <= mark:
                held.append(position)
            elif not member.reordered:
                break  # delivered in log order: all that follow are later
        return held

    @staticmethod
    def _drop(member: Member, position: Position) -> bool:
        messages = member.outstanding.pop(position, None)
        if messages is None:
            return False
        member.unacked -= messages
        if not member.outstanding:
            member.reordered = False
        return True

    # ------------------------------------------------------------------ redelivery
    def redeliver(
        self, member: Member, positions: Iterable[Position] | None, *, counted: bool = True
    ) -> None:
        """The consumer gives entries back (None: all it holds); what it does not hold is none of its business."""
        wanted = list(member.outstanding) if positions is None else positions
        given = [position for position in wanted if position in member.outstanding]
        for position in given:
            if counted and not self._cursor.is_acked(position):
                self._cursor.given_back(position)
        self._give_back(member, given)

    def _give_back(self, member: Member, positions: Iterable[Position]) -> None:
        for position in positions:
            self._drop(member, position)
            if not self._cursor.is_acked(position):
                self._replay.add(position)

    def lost(self, positions: Iterable[Position]) -> None:
        """These stand no longer in the log (trimmed): nothing to replay."""
        for position in positions:
            self._replay.discard(position)

    def seek(self) -> None:
        """The cursor was moved: nothing is outstanding any more, and reading starts over behind its mark."""
        for member in self.members.values():
            member.outstanding.clear()
            member.unacked, member.reordered = 0, False
        self._replay.clear()
        self.read_position = self._shape.after(self._cursor.mark)

    # ------------------------------------------------------------------ questions
    @property
    def unacked(self) -> int:
        return sum(member.unacked for member in self.members.values())

    @property
    def replay_entries(self) -> int:
        return len(self._replay)

    def check(self) -> None:
        """One holder per entry; nothing is both held and waiting; all of it lies before the read position."""
        seen: set[Position] = set()
        for member in self.members.values():
            held = set(member.outstanding)
            assert not held & seen, "an entry has two outstanding holders"
            seen |= held
            assert member.unacked == sum(member.outstanding.values()), "a consumer's unacked count is wrong"
        assert not seen & set(self._replay), "an entry is held and waits for redelivery"
        for position in seen | set(self._replay):
            assert position < self._shape.seat(self.read_position), "an entry was delivered beyond the read position"
        assert all(not self._cursor.is_acked(position) for position in self._replay), "an acked entry waits"


def inside(positions: Collection[Position], ledger_id: int, entries: BitMap) -> list[Position]:
    """Those of the positions that are in the set."""
    if len(positions) <= len(entries):
        return [each for each in positions if each[0] == ledger_id and each[1] in entries]
    return [each for each in (Position(ledger_id, entry_id) for entry_id in entries) if each in positions]
