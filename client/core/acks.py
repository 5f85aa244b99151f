"""The ack tracker: acknowledgements are grouped for a while and sent together.

Per entry it gathers batch indexes, as the bits of a number; when all messages of an entry are in, the entry is
acknowledged as a whole, and never before. Whole entries go as one roaring set per ledger, so that lists and ranges cost
a few bytes. A cumulative acknowledgement covers what is before it: single ones of before it are dropped. `take`
gives what is to be sent and forgets it; what was sent and lost with a stream is delivered again by the broker (at least
once).
The driver calls `take` every GROUP_S or when `pending` reaches GROUP_MESSAGES (Pulsar's figures, A3).
Guarding tests: tests/client/core/test_cores.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.names import Position

GROUP_S = 0.1
GROUP_MESSAGES = 1000
WHOLE = -1
"""Last index of a cumulative acknowledgement that covers its whole entry."""


class AckGroup(NamedTuple):
    """Acknowledgements that are sent together."""

    whole: dict[int, BitMap]  # ledger → entries
    parts: dict[Position, int]  # entry → batch indexes, as bits
    cumulative: tuple[Position, int] | None  # the last batch index, or WHOLE

    def __bool__(self) -> bool:
        return bool(self.whole or self.parts or self.cumulative)


class AckTracker:
    """Groups the acknowledgements of one consumer."""

    def __init__(self) -> None:
        self.pending = 0
        self._whole: defaultdict[int, set[int]] = defaultdict(set)  # ledger → entries
        self._parts: dict[Position, int] = {}
        self._cumulative: tuple[Position, int] | None = None

    def acknowledge(self, position: Position, index: int, size: int) -> None:
        """Acknowledges a message. `index` -1: the whole entry. `size`: messages in the entry, 0 when not known."""
        self.pending += 1
        if index < 0 or size == 1:
            self._whole[position[0]].add(position[1])
            return
        bits = self._parts.get(position, 0) | 1 << index
        self._parts[position] = bits
        if size and bits == (1 << size) - 1:
            self._whole[position[0]].add(position[1])
            del self._parts[position]

    def acknowledge_bits(self, position: Position, bits: int, messages: int, size: int) -> None:
        """Acknowledges so many messages of an entry of that size at once: the bits of their indexes."""
        self.pending += messages
        bits |= self._parts.get(position, 0)
        if bits == (1 << size) - 1:
            self._whole[position[0]].add(position[1])
            self._parts.pop(position, None)
        else:
            self._parts[position] = bits

    def acknowledge_cumulative(self, position: Position, index: int, size: int) -> None:
        self.pending += 1
        last = WHOLE if index < 0 or index + 1 == size else index
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

    def take(self) -> AckGroup:
        """Returns what to send now; an empty group when nothing waits."""
        whole = self._whole
        parts = {each: bits for each, bits in self._parts.items() if each[1] not in whole.get(each[0], ())}
        sets = {ledger_id: BitMap(entries) for ledger_id, entries in sorted(whole.items())}
        group = AckGroup(sets, parts, self._cumulative)
        self.clear()
        return group

    def clear(self) -> None:
        self._whole = defaultdict(set)
        self._parts = {}
        self._cumulative = None
        self.pending = 0

    def check(self) -> None:
        assert self.pending or not (self._whole or self._parts or self._cumulative), "what is held is counted"


def _order(position: Position, last: int) -> tuple[Position, float]:
    return position, float("inf") if last == WHOLE else last
