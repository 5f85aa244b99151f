"""Memory for appends: the entries of all ledgers of a client until every bookie that was sent a copy has answered.

An entry that is confirmed by its quorum stays in memory as long as another bookie has not answered: a bookie that hangs
holds what all ledgers sent it for `add_timeout_s`. So there is one bound for all ledgers together. A request is counted
once, however many copies of it are sent. Above the bound no ledger has room (`LedgerWriter.has_room`), and
`LedgerWriter.wait_room` returns when there is room again, first for the ledger that has waited longest. The wait always
ends: a bookie answers, or fails after `add_timeout_s`. Topics and compactions, which append much, wait. Cursors and
transactions are bounded by their callers, and refused only for the bounds of their own ledger: work that frees memory
must never wait for memory.
Guards: tests/ledger/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK_BYTES = 64 << 10
"""The number of bytes that a waiting ledger is expected to append. When memory is released, one waiting ledger is
called for each LOOK_BYTES that are free."""


class AppendMemory:
    """Counts the memory of the entries that a `LedgerClient` is appending to all its ledgers. `held` is their size and
    `limit` the bound, in bytes. This object refuses nothing: the caller must check `has_room` before it appends. Within
    one turn of the event loop `held` may exceed `limit`."""

    __slots__ = ("held", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit
        self.waiting: dict[Callable[[], None], None] = {}

    @property
    def has_room(self) -> bool:
        """True while `held` is below `limit`."""
        return self.held < self.limit

    def add_waiter(self, look: Callable[[], None]) -> None:
        """Registers the function `look`, which must not raise. It is called once, when there is room for an append
        again. Does nothing if `look` is registered already."""
        self.waiting.setdefault(look)

    def remove_waiter(self, look: Callable[[], None]) -> None:
        """Removes a function that `add_waiter` registered. Does nothing if it is not registered."""
        self.waiting.pop(look, None)

    def release(self, size: int) -> None:
        """Subtracts `size` bytes from `held`, and calls waiting functions if there is room now."""
        self.held -= size
        if self.waiting:
            self.notify_waiters()

    def notify_waiters(self) -> None:
        """Calls the functions that `add_waiter` registered, the oldest first, as long as there is room for more
        appends. Must be called after `held` was reduced."""
        room = self.limit - self.held
        while self.waiting and (room > 0 or not self.held):  # if nothing is held, no later release tells the rest
            look = next(iter(self.waiting))
            del self.waiting[look]
            look()
            room -= LOOK_BYTES
