"""The ack tracker: acknowledgements are grouped for a while and sent together.

Per entry it gathers batch indexes; when all messages of an entry are in, the entry is acknowledged as a whole. A
cumulative acknowledgement covers what is before it: single ones at or below it are dropped. `take` gives what is to be
sent and forgets it; what was sent and lost with a stream is delivered again by the broker (at least once).
The driver calls `take` every GROUP_S or when `pending` reaches GROUP_MESSAGES (Pulsar's figures).
"""

from __future__ import annotations

from typing import NamedTuple

from ...proto.names import Position

GROUP_S = 0.1
GROUP_MESSAGES = 1000


class AckedEntry(NamedTuple):
    """`indexes` empty: the whole entry."""

    position: Position
    indexes: tuple[int, ...]


class AckGroup(NamedTuple):
    individual: list[AckedEntry]
    cumulative: AckedEntry | None


class AckTracker:
    def __init__(self) -> None:
        self.pending = 0
        self._entries: dict[Position, set[int] | None] = {}  # None: the whole entry
        self._cumulative: tuple[Position, int] | None = None  # batch index, or a large number for the whole entry

    def acknowledge(self, position: Position, index: int, size: int) -> None:
        """`index` -1: the whole entry. `size`: messages in the entry, 0 when not known."""
        self.pending += 1
        if index < 0 or size == 1:
            self._entries[position] = None
            return
        indexes = self._entries.setdefault(position, set())
        if indexes is None:
            return
        indexes.add(index)
        if size and len(indexes) == size:
            self._entries[position] = None

    def acknowledge_cumulative(self, position: Position, index: int, size: int) -> None:
        self.pending += 1
        last = _WHOLE if index < 0 or index + 1 == size else index
        if self._cumulative is None or (position, last) > self._cumulative:
            self._cumulative = position, last
        for covered in [each for each in self._entries if each < self._cumulative[0]]:
            del self._entries[covered]

    def take(self) -> AckGroup:
        """What to send now; empty lists when nothing waits."""
        individual = [
            AckedEntry(position, () if indexes is None else tuple(sorted(indexes)))
            for position, indexes in self._entries.items()
        ]
        cumulative = None
        if self._cumulative is not None:
            position, last = self._cumulative
            cumulative = AckedEntry(position, () if last == _WHOLE else (last,))
        self.clear()
        return AckGroup(individual, cumulative)

    def clear(self) -> None:
        self._entries.clear()
        self._cumulative = None
        self.pending = 0

    def check(self) -> None:
        if self._cumulative is not None:
            assert all(position >= self._cumulative[0] for position in self._entries)


_WHOLE = 1 << 31
