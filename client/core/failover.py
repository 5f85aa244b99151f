"""The choice between several clusters (AutoClusterFailover). The first one is preferred. The first one is preferred.

    core = FailoverCore(3, failover_after=2, back_after=1)
    core.tried([False, True, True])       which of them answered in this round; the one to use now

The one in use is left after `failover_after` rounds in a row without an answer, for the first that answered; when none
did, it stays. The preferred one is taken again after `back_after` rounds in a row with an answer.
Guard: tests/client/core/test_failover.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class FailoverCore:
    """Chooses the cluster that a client uses."""

    def __init__(self, count: int, *, failover_after: int, back_after: int) -> None:
        assert count >= 1 <= min(failover_after, back_after), "there is a cluster, and a round changes something"
        self.current = 0
        self._count = count
        self._failover_after = failover_after
        self._back_after = back_after
        self._failures = 0  # of the one in use, in a row
        self._answers = 0  # of the preferred one, in a row, while another one is used

    def tried(self, answered: Sequence[bool]) -> int:
        assert len(answered) == self._count, "each of them was tried"
        self._failures = 0 if answered[self.current] else self._failures + 1
        self._answers = self._answers + 1 if answered[0] and self.current else 0
        if self._answers >= self._back_after:
            self._use(0)
        elif self._failures >= self._failover_after and any(answered):
            self._use(answered.index(True))
        return self.current

    def _use(self, which: int) -> None:
        self.current, self._failures, self._answers = which, 0, 0

    def check(self) -> None:
        assert 0 <= self.current < self._count
        assert self._answers < self._back_after, "the preferred one is used as soon as it may be"
        assert self.current or not self._answers
