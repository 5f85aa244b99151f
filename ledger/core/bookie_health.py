"""Trouble: which bookies gave trouble lately, so that reads ask them last. Pure; one for all readers of a client.

What counts, and how much: `FAILED` (no answer, a broken connection) 1, `DAMAGED` (bytes that are not the entry) 1,
`SLOW` (another replica had to be asked meanwhile) ½. A bookie's weight is the sum, at most WEIGHT_MAX; it halves every
`half_life_s`, and below FORGET the bookie is as good as any. So one time-out is remembered for two half-lives, a bookie
that hangs all the time for four. The order is all that follows from it: a bookie that gives trouble is asked last and
not left out, for it may be the only one that has the entry. New ensembles are chosen by other rules (bookies.py: only
what failed counts, not what was slow). `counts` are for ever: by bookie and kind. Guards:
tests/ledger/core/test_bookie_health.py.
"""

from __future__ import annotations

import enum

WEIGHT_MAX = 4.0
FORGET = 0.25


class TroubleKind(enum.Enum):
    FAILED = "failed"
    SLOW = "slow"
    DAMAGED = "damaged"


WEIGHTS = {TroubleKind.FAILED: 1.0, TroubleKind.SLOW: 0.5, TroubleKind.DAMAGED: 1.0}


class BookieHealth:
    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._weights: dict[str, tuple[float, float]] = {}  # bookie: weight, at which moment
        self.counts: dict[str, dict[TroubleKind, int]] = {}

    def note(self, bookie: str, kind: TroubleKind, now: float) -> None:
        self._weights[bookie] = min(self._weight(bookie, now) + WEIGHTS[kind], WEIGHT_MAX), now
        counts = self.counts.setdefault(bookie, dict.fromkeys(TroubleKind, 0))
        counts[kind] += 1

    def forgive(self, bookie: str) -> None:
        """It has started anew."""
        self._weights.pop(bookie, None)

    def weights(self, now: float) -> dict[str, float]:
        """Of those that gave trouble and are not forgotten yet; the more, the later it is asked."""
        found = {bookie: self._weight(bookie, now) for bookie in self._weights}
        self._weights = {bookie: self._weights[bookie] for bookie, weight in found.items() if weight >= FORGET}
        return {bookie: weight for bookie, weight in found.items() if weight >= FORGET}

    def _weight(self, bookie: str, now: float) -> float:
        weight, at = self._weights.get(bookie, (0.0, now))
        return weight * 0.5 ** (max(now - at, 0.0) / self._half_life_s) if self._half_life_s > 0 else 0.0
