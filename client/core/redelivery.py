"""Which entries are to be delivered again, and when: negative acknowledgements and acknowledgement time-outs.

Both are the same question, so one machine answers it: an entry is *watched* until a time; acknowledging it forgets it;
when the time comes it is given out once. Times are kept in buckets of a tick, so that a watch costs two dictionary
entries and no timer: an entry comes at most one tick late and never early. An entry that is watched again keeps
its first time.
"""

from __future__ import annotations

from ...proto.names import Position


class RedeliveryTracker:
    def __init__(self, delay_s: float, tick_s: float) -> None:
        assert delay_s >= 0 < tick_s, "delays are not negative"
        self._delay_s = delay_s
        self.tick_s = tick_s
        self._due: dict[Position, int] = {}
        self._buckets: dict[int, dict[Position, None]] = {}

    def __len__(self) -> int:
        return len(self._due)

    def watch(self, position: Position, now: float) -> None:
        if position in self._due:
            return
        tick = int((now + self._delay_s) / self.tick_s) + 1
        self._due[position] = tick
        self._buckets.setdefault(tick, {})[position] = None

    def forget(self, position: Position) -> None:
        tick = self._due.pop(position, None)
        if tick is not None:
            bucket = self._buckets[tick]
            del bucket[position]
            if not bucket:
                del self._buckets[tick]

    def forget_up_to(self, position: Position) -> None:
        for covered in [each for each in self._due if each <= position]:
            self.forget(covered)

    def take(self, now: float) -> list[Position]:
        """The entries that are due, forgotten from now on."""
        current = int(now / self.tick_s)
        due: list[Position] = []
        for tick in sorted(tick for tick in self._buckets if tick <= current):
            due.extend(self._buckets.pop(tick))
        for position in due:
            del self._due[position]
        return due

    def clear(self) -> None:
        self._due.clear()
        self._buckets.clear()

    def check(self) -> None:
        assert sum(map(len, self._buckets.values())) == len(self._due)
        assert all(position in self._buckets[tick] for position, tick in self._due.items())
