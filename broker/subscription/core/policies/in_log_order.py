"""Waiting entries of the policies that hand them out in log order to any consumer that can take them: a set of
positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from pyroaring import BitMap

from .....proto.names import Position
from .....proto.states import Blocked
from ..positions import PositionSet
from .policy import ActiveChanged, Entry, Member, Statistics, SubscriptionOptions

NOTHING = PositionSet()
"""The waiting entries of a subscription in which nothing has failed; never add to it."""


class InLogOrder:
    """The half of `Policy` that Exclusive, Failover and Shared have in common."""

    keeps_order: ClassVar = True
    by_keys: ClassVar = False
    full = False  # only what was delivered before waits here, so its number is bounded by what was outstanding

    def __init__(self, options: SubscriptionOptions) -> None:
        self.waiting = PositionSet()
        self._failed = NOTHING

    def differs(self, newcomer: Member) -> str | None:
        return None

    def events(self) -> Sequence[ActiveChanged]:
        return ()

    def statistics(self) -> Statistics:
        return Statistics()

    def released(self, positions: Sequence[Position]) -> None:
        pass

    def returned(self, position: Position) -> None:
        self.waiting.add(position)

    def waits(self, entry: Entry) -> bool:
        return entry.position in self.waiting

    def ready(self, count: int) -> Sequence[Position]:
        return self.waiting.take(count) if self.waiting.entries else ()

    def failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        if self._failed is NOTHING:
            self._failed = PositionSet()
        self._failed.add(position)
        return [each for each in outstanding if each > position]

    def recovered(self, position: Position) -> None:
        self._failed.discard(position)

    def holds_back(self, position: Position) -> bool:
        return bool(self._failed) and position > self._failed.first()

    def done(self, position: Position) -> None:
        if self.waiting.entries:
            self.waiting.discard(position)

    def done_set(self, ledger_id: int, entries: BitMap) -> None:
        if self.waiting.entries:
            self.waiting.discard_set(ledger_id, entries)

    def done_up_to(self, mark: Position) -> None:
        if self.waiting.entries:
            self.waiting.discard_up_to(mark)

    def look_again(self, count: int) -> bool:
        return True

    def forget(self) -> None:
        self.waiting.clear()
        self._failed = NOTHING

    @property
    def unread_entries(self) -> int:
        return self.waiting.entries

    def _comes_later(self, position: Position) -> bool:
        """Whether a waiting entry goes before this one; any waiting entry precedes a new one."""
        return (self.waiting.entries > 0 and self.waiting.first() != position) or (
            self._failed is not NOTHING and self.holds_back(position)
        )

    def _goes_out(self, position: Position, waited: bool) -> None:
        if waited:
            self.waiting.discard(position)

    def check(self, outstanding: set[Position]) -> None:
        self.waiting.check()
        assert not any(position in self.waiting for position in outstanding), "an entry is held and waits"


def why_none(members: Iterable[Member]) -> Blocked | None:
    """Returns why none of them can take anything; None: one can."""
    why = Blocked.NO_CONSUMER
    for member in members:
        if member.permits > 0:
            if not member.paused and not member.blocked:
                return None
            why = Blocked.TOO_MANY_UNACKED if member.blocked else Blocked.SLOW_CONSUMER
        elif why is Blocked.NO_CONSUMER:
            why = Blocked.NO_PERMITS
    return why
