"""How far a copy is, per partition and per topic; and rates, from what was stored in the last seconds.

Plain values without a clock: `now` is seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...proto.names import Position, TopicName

RATE_OVER_S = 10.0


class Tally:
    """The progress of one partition. `lag`: messages that the source has and the destination has not, as of the last
    answer of the source, which counts entries: with batches it is an estimate from the batches that came. None: not
    known yet."""

    def __init__(self, topic: TopicName) -> None:
        self.topic = topic
        self.entries = self.messages = self.bytes = 0  # stored by this run
        self.stored: Position | None = None  # the newest entry of the source that the destination has
        self.lag: int | None = None
        self.complete = False
        self.note = ""  # why nothing is copied at the moment

    def add(self, position: Position, messages: int, size: int) -> None:
        self.stored = position
        self.entries += 1
        self.messages += messages
        self.bytes += size
        self.note = ""
        if self.lag is not None:
            self.lag = max(0, self.lag - messages)

    def left(self, count: int, *, entries: bool) -> None:
        """Notes what the source said is not acknowledged."""
        self.lag = round(count * self.messages / self.entries) if entries and self.entries else count


class Totals:
    """The progress of several partitions."""

    def __init__(self, tallies: Iterable[Tally]) -> None:
        self._tallies = list(tallies)
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self._tallies)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self._tallies)

    @property
    def lag(self) -> int | None:
        """Returns the lag of all. None: of some partition it is not known."""
        known = [each.lag for each in self._tallies if each.lag is not None]
        return sum(known) if len(known) == len(self._tallies) else None

    @property
    def complete(self) -> bool:
        return all(each.complete for each in self._tallies)

    @property
    def note(self) -> str:
        return next((each.note for each in self._tallies if each.note), "")

    def rate(self, now: float) -> float:
        """Messages per second; to be asked now and then."""
        self._samples.append((now, self.messages))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_OVER_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (self.messages - before) / (now - since) if now > since else 0.0

    def eta_s(self, rate: float) -> float | None:
        """Seconds until it has caught up; None: not known."""
        lag = self.lag
        if not lag:
            return None if lag is None else 0.0
        return lag / rate if rate > 0 else None
