"""Ids of transactions that a coordinator gave ahead, in blocks: a transaction begins without a request.

    ids = LeasedIds()
    ids.take(now)           an id, or None: ask for `ids.wanted` more, of the next coordinator
    ids.leased(first, count, void_at, now)
    ids.runs_out            more should be asked for, while there still are some

A block is asked for when few are left. It is twice as large as the one before when that one was used
in time, and half as large when it became void: an idle client holds few. An id is taken in the first half of its lease
only: it is void when it is not used by the end of it. A coordinator that is lost voids all that it leased; it may be
there, and hold them open to the end of the lease, so the next block is small.
Any thread may call all of it.
Guard: tests/client/transactions/test_leased_ids.py.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

from ...proto.transactions import TxnId

FIRST, MOST = 8, 1024
"""Ids of a block: of the first one; and of the largest, 0.2 s of what one client begins at most."""


class LeasedIds:
    """The ids that coordinators leased to one client."""

    def __init__(self) -> None:
        self.wanted = FIRST
        self._lock = Lock()
        self._blocks: deque[tuple[TxnId, int, float]] = deque()  # next one, how many, when they are void

    def take(self, now: float) -> TxnId | None:
        with self._lock:
            while self._blocks:
                first, count, void_at = self._blocks.popleft()
                if now >= void_at:
                    self.wanted = max(FIRST, self.wanted // 2)
                    continue
                if count > 1:
                    self._blocks.appendleft((TxnId(first.most, first.least + 1), count - 1, void_at))
                return first
            return None

    def leased(self, first: TxnId, count: int, lease_s: float, asked_at: float) -> None:
        """Adds ids whose lease counts from when they were asked for."""
        assert count > 0, "a lease has ids"
        with self._lock:
            self._blocks.append((first, count, asked_at + lease_s / 2))
            if count >= self.wanted:
                self.wanted = min(MOST, 2 * self.wanted)

    def forget(self, coordinator: int) -> None:
        """Forgets the ids of a coordinator that aborted one of them, or is not where it was: those of a coordinator
        that was lost are void."""
        with self._lock:
            kept = deque(block for block in self._blocks if block[0].most != coordinator)
            if len(kept) < len(self._blocks):
                self._blocks, self.wanted = kept, FIRST

    @property
    def runs_out(self) -> bool:
        with self._lock:
            return sum(count for _, count, _ in self._blocks) < self.wanted // 4

    def check(self) -> None:
        assert FIRST <= self.wanted <= MOST, "blocks have their bounds"
        assert all(count > 0 for _, count, _ in self._blocks), "a block has ids"
