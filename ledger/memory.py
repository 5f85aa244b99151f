"""Memory for appends: what all ledgers of a client keep until every bookie that was sent a copy has answered.

An entry that is confirmed by its quorum stays in memory as long as another bookie has not answered: one that hangs
keeps what all ledgers sent it for `add_timeout_s`. So the bound holds for all ledgers together. A request is counted
once, however many copies of it travel. Past the bound no ledger has room (`LedgerWriter.has_room`), and
`LedgerWriter.wait_room` returns when there is room again, first for the ledger that has waited longest. Nothing waits
for good: a bookie answers, or fails after `add_timeout_s`. Who asks is what appends much: topics and compactions.
Cursors and transactions append what their callers bound, and are refused for the bounds of their own ledger alone: what
gives memory back never waits for memory.
Guards: tests/ledger/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_BYTES = 64 << 10
"""Bytes that a ledger that waited is expected to take: as many are told at once as there is room for."""


class AppendMemory:
    """The memory for appends of a `LedgerClient`. The entries of one turn of the loop may exceed the limit."""

    __slots__ = ("held", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit
        self.waiting: dict[Callable[[], None], None] = {}

    @property
    def has_room(self) -> bool:
        return self.held < self.limit

    def when_room(self, look: Callable[[], None]) -> None:
        """Calls `look` once, when there is room."""
        self.waiting.setdefault(look)

    def cancel(self, look: Callable[[], None]) -> None:
        self.waiting.pop(look, None)

    def release(self, size: int) -> None:
        self.held -= size
        if self.waiting:
            self.notify_waiting()

    def notify_waiting(self) -> None:
        """Tells those that wait, where there is room: after `held` fell."""
        room = self.limit - self.held
        while self.waiting and (room > 0 or not self.held):  # if nothing is held, no later release tells the rest
            look = next(iter(self.waiting))
            del self.waiting[look]
            look()
            room -= LOOK_BYTES
