"""The entries on their way back to the dispatcher: what consumers give back, what a leaving consumer held, and what
aborted transactions had acknowledged.

It goes back in slices of RETURN_ENTRIES. Nothing is handed out before the last of it, so the order is the same as at
once, and 150,000 entries delay no other subscription. Guarding test: tests/broker/node/test_giving_back.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from ...proto.names import Position
from ...runtime.clock import Clock
from ..common.turns import Turns
from .core.dispatch import Dispatcher
from .core.policies.policy import Member
from .dead_letters import DeadLetters

RETURN_ENTRIES = 200
"""Entries given back between two readings of the clock: some tenths of a millisecond."""


class _Return(msgspec.Struct):
    """Entries that a consumer gives back, as far as it still holds them at their turn."""

    member: Member
    positions: deque[Position]
    counted: bool  # they count as given back
    leaves: bool  # the consumer is disconnected, and leaves the dispatcher with the last of them


class _Freed(msgspec.Struct):
    """Entries that an aborted transaction had acknowledged; each counts as given back."""

    positions: Iterator[Position]


class Returns:
    """The entries that go back to one subscription. `counting` counts that entries are given back, where a policy of
    the server does."""

    __slots__ = ("_clock", "_counting", "_dispatcher", "waiting")

    def __init__(self, dispatcher: Dispatcher, counting: Callable[[], DeadLetters | None], clock: Clock) -> None:
        self._clock = clock
        self._dispatcher = dispatcher
        self._counting = counting
        self.waiting: deque[_Return | _Freed] | None = None  # until there is one: an empty deque takes 700 bytes

    def __len__(self) -> int:
        return len(self.waiting or ())

    def add(self, member: Member, positions: Iterable[Position], *, counted: bool, leaves: bool = False) -> None:
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(_Return(member, deque(positions), counted, leaves))
        self.some()

    def freed(self, positions: Iterator[Position]) -> None:
        """Takes entries of an aborted transaction. They are not outstanding, and not pending any more."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(_Freed(positions))
        self.some()

    def freed_in_part(self, batches: Iterable[Position]) -> None:
        """Gives back entries of which an aborted transaction had some messages. Each counts as given back, also by a
        consumer that has the rest of it."""
        for position in batches:
            holder = self._dispatcher.holder(position)
            if holder is not None:
                self.add(holder, (position,), counted=True)
            else:
                self._dispatcher.cursor.given_back(position)

    def _some_freed(self, positions: Iterator[Position]) -> bool:
        """Gives RETURN_ENTRIES of them back. True: there are no more."""
        some, cursor = list(islice(positions, RETURN_ENTRIES)), self._dispatcher.cursor
        free = [position for position in some if not cursor.is_done(position)]
        if (counting := self._counting()) is not None:
            counting.given_back(free, at_once=self._dispatcher.ordered)  # in its place, and not later
        else:
            for position in free:
                cursor.given_back(position)
        self._dispatcher.freed(free)
        return len(some) < RETURN_ENTRIES

    def some(self) -> bool:
        """Gives RETURN_ENTRIES of them back. True: there are no more."""
        while self.waiting:
            first = self.waiting[0]
            if isinstance(first, _Freed):
                if not self._some_freed(first.positions):
                    return False
                self.waiting.popleft()
                continue
            member, some = first.member, list(islice(first.positions, RETURN_ENTRIES))
            for _ in some:
                first.positions.popleft()
            counted = first.counted
            if counted and self._dispatcher.ordered:
                some = self._dispatcher.fail(member, some)
            if counted and (counting := self._counting()) is not None:
                counting.given_back([each for each in some if each in member.outstanding])
                counted = False
            self._dispatcher.redeliver(member, some, counted=counted and not first.leaves)
            if first.positions:
                return False
            if first.leaves:
                self._dispatcher.leave(member)
            self.waiting.popleft()
        self.waiting = None
        return True

    def all(self) -> None:
        while not self.some():
            pass

    async def finish(self) -> None:
        """Gives all of them back, in turns with other work."""
        turns = Turns(self._clock)
        while not self.some():
            if turns.over:
                await turns.next()

    def forget(self) -> None:
        """Forgets everything: no consumer holds anything any more."""
        for each in self.waiting or ():
            if isinstance(each, _Freed):
                each.positions = iter(())
            else:
                each.positions.clear()
