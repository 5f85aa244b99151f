"""Entries that are kept from the application because they cannot be decrypted (ConsumerCryptoFailureAction.FAIL).

An entry is withheld from its first delivery until it is decrypted, or acknowledged, or all is delivered again. In
between it is asked for again after the ack time-out, like what is not acknowledged in time. Its permits count
as held until then; without an ack time-out they stay held, and a full queue of such entries stops the consumer. No
cumulative ack covers it. Guards: tests/client/core/test_withheld.py, tests/client/crypto/test_end_to_end.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...proto.names import Position


class WithheldEntries:
    """The entries of one consumer that are kept from the application."""

    __slots__ = ("permits",)

    def __init__(self) -> None:
        self.permits: dict[Position, int] = {}  # 0: they were given back

    def __bool__(self) -> bool:
        return bool(self.permits)

    def add(self, place: Position, permits: int) -> None:
        self.permits[place] = self.permits.get(place, 0) + permits

    def asked_again(self, places: Iterable[Position]) -> int:
        """Returns the permits that are free now."""
        freed = 0
        for place in places:
            if place in self.permits:
                freed += self.permits[place]
                self.permits[place] = 0
        return freed

    def release(self, place: Position) -> int:
        """Releases an entry that is decrypted, or acknowledged; returns the permits that are free now."""
        return self.permits.pop(place, 0)

    def clear(self) -> int:
        """Forgets all, which come again; returns the permits that are free now."""
        freed = sum(self.permits.values())
        self.permits.clear()
        return freed

    def floor(self, place: Position) -> Position:
        """Returns how far a cumulative ack at `place` may go: before the first of them."""
        first = min((each for each in self.permits if each <= place), default=None)
        return place if first is None else Position(first[0], first[1] - 1)
