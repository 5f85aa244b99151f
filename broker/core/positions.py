"""A set of positions in log order: one roaring bitmap per ledger.

What waits to be handed out is kept in it. A million positions of a contiguous stretch take 130 KB, a position that
stands alone in its ledger MAP_BYTES; `size_bytes` says how much, as an estimate that costs nothing to keep.
Guarding test: tests/broker/core/test_positions.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyroaring import BitMap

from ...proto.names import Position

SET_BYTES = 250
"""The set itself with its dictionary."""
MAP_BYTES = 280
"""A bitmap with one container and its place in the dictionary (measured with 100,000 of them: 277)."""
ENTRY_BYTES = 2
"""In a container; fewer where they are dense."""


class PositionSet:
    __slots__ = ("_entries", "_maps")

    def __init__(self) -> None:
        self._maps: dict[int, BitMap] = {}
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def __contains__(self, position: Position) -> bool:
        held = self._maps.get(position[0])
        return held is not None and position[1] in held

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in sorted(self._maps):
            for entry_id in self._maps[ledger_id]:
                yield Position(ledger_id, entry_id)

    @property
    def size_bytes(self) -> int:
        return SET_BYTES + len(self._maps) * MAP_BYTES + self._entries * ENTRY_BYTES

    def add(self, position: Position) -> bool:
        """False: it was in already."""
        ledger_id, entry_id = position
        held = self._maps.get(ledger_id)
        if held is None:
            self._maps[ledger_id] = BitMap((entry_id,))
        elif entry_id in held:
            return False
        else:
            held.add(entry_id)
        self._entries += 1
        return True

    def discard(self, position: Position) -> bool:
        """False: it was not in."""
        ledger_id, entry_id = position
        held = self._maps.get(ledger_id)
        if held is None or entry_id not in held:
            return False
        held.discard(entry_id)
        if not held:
            del self._maps[ledger_id]
        self._entries -= 1
        return True

    def first(self) -> Position:
        """The earliest one. There is one."""
        maps = self._maps
        ledger_id = min(maps) if len(maps) > 1 else next(iter(maps))
        return Position(ledger_id, maps[ledger_id].min())

    def take(self, count: int) -> list[Position]:
        """The earliest ones, which stay in."""
        found: list[Position] = []
        for ledger_id in sorted(self._maps):
            found += [Position(ledger_id, entry_id) for entry_id in self._maps[ledger_id][: count - len(found)]]
            if len(found) >= count:
                break
        return found

    def discard_set(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Those entries of the ledger are in no more; which."""
        held = self._maps.get(ledger_id)
        gone = held & entries if held is not None else BitMap()
        if held is not None and gone:
            held -= gone
            self._entries -= len(gone)
            if not held:
                del self._maps[ledger_id]
        return gone

    def discard_up_to(self, mark: Position) -> list[Position]:
        """Those up to and with `mark` are in no more; which."""
        gone: list[Position] = []
        for ledger_id in sorted(each for each in self._maps if each <= mark[0]):
            held = self._maps[ledger_id]
            end = mark[1] + 1 if ledger_id == mark[0] else held.max() + 1
            gone += [Position(ledger_id, entry_id) for entry_id in held[: held.rank(end - 1) if end > 0 else 0]]
            held.remove_range(0, max(0, end))
            if not held:
                del self._maps[ledger_id]
        self._entries -= len(gone)
        return gone

    def clear(self) -> None:
        self._maps.clear()
        self._entries = 0

    def check(self) -> None:
        assert self._entries == sum(map(len, self._maps.values())), "the count is not what the bitmaps hold"
        assert all(self._maps.values()), "an empty bitmap is kept"
