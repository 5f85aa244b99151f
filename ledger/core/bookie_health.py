"""The bookies that failed, were slow or sent damage lately: reads ask them last. Pure; one for all readers of a client.

Each event adds to the bookie's weight: `FAILED` (no answer, a broken connection) 1, `DAMAGED` (bytes that are not the
entry) 1, `SLOW` (another replica had to be asked meanwhile) ½. The weight is at most WEIGHT_MAX and halves every
`half_life_s`; below FORGET it is dropped. So one time-out is remembered for two half-lives, a bookie that always hangs
for four. The weight decides only the order: a bookie in trouble is asked last and never left out, because it may be the
only one that has the entry. New ensembles follow other rules (bookies.py: failures count, slowness does not). `counts`
never fall: bookie → kind → events. Guards: tests/ledger/core/test_bookie_health.py.
"""

from __future__ import annotations

import enum

WEIGHT_MAX = 4.0
FORGET = 0.25


class TroubleKind(enum.Enum):
    """A fault of a bookie; WEIGHTS says how much each counts."""

    FAILED = "failed"
    SLOW = "slow"
    DAMAGED = "damaged"


WEIGHTS = {TroubleKind.FAILED: 1.0, TroubleKind.SLOW: 0.5, TroubleKind.DAMAGED: 1.0}


class BookieHealth:
    """Weights of recent trouble by bookie. `now` is in seconds of any clock that does not go back."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._weights: dict[str, tuple[float, float]] = {}  # bookie: weight, at which moment
        self.counts: dict[str, dict[TroubleKind, int]] = {}

    def note(self, bookie: str, kind: TroubleKind, now: float) -> None:
        self._weights[bookie] = min(self._weight(bookie, now) + WEIGHTS[kind], WEIGHT_MAX), now
        counts = self.counts.setdefault(bookie, dict.fromkeys(TroubleKind, 0))
        counts[kind] += 1

    def forgive(self, bookie: str) -> None:
        """Drops the weight of a bookie that has restarted; its `counts` stay."""
        self._weights.pop(bookie, None)

    def weights(self, now: float) -> dict[str, float]:
        """Returns bookie → weight of at least FORGET; the larger, the later the bookie is asked."""
        found = {bookie: self._weight(bookie, now) for bookie in self._weights}
        self._weights = {bookie: self._weights[bookie] for bookie, weight in found.items() if weight >= FORGET}
        return {bookie: weight for bookie, weight in found.items() if weight >= FORGET}

    def _weight(self, bookie: str, now: float) -> float:
        weight, at = self._weights.get(bookie, (0.0, now))
        return weight * 0.5 ** (max(now - at, 0.0) / self._half_life_s) if self._half_life_s > 0 else 0.0
