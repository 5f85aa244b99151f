"""Readers at the end of a ledger: each waits at a bookie for the ledger's LAC to pass the one that it knows.

A READ_LAC with `count` > 0 and without FENCE is such a wait. It is answered, like any READ_LAC, as soon as

    the LAC is above `entry`             what the reader waits for
    the ledger is fenced, or in limbo    nobody may be writing any more: the reader looks at the metadata
    `count` milliseconds are over        more than WAIT_MS_MAX is BAD_REQUEST

A ledger that is unknown here is waited for as well: its first entry is on its way. `wake` comes after each sync of the
journal and looks at each ledger that is waited for, so at most WAITING_MAX wait; one more is BUSY. Nothing waits for a
tail, and one whose connection broke goes with its time. Guarded by tests/bookie/requests/test_tails.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...ledger.format.peer import RequestHead, Status
from ...runtime.network import Request
from ..store.store import Store

WAIT_MS_MAX = 60_000
WAITING_MAX = 1000
"""Each costs about 500 bytes and, per sync of the journal, a microsecond."""


class _Tail:
    __slots__ = ("head", "request", "timer")

    def __init__(self, request: Request, head: RequestHead) -> None:
        self.request = request
        self.head = head
        self.timer: asyncio.TimerHandle | None = None


class Tails:
    """`answer` answers a READ_LAC now."""

    def __init__(self, store: Store, answer: Callable[[Request, RequestHead], None]) -> None:
        self._store = store
        self._answer = answer
        self._ledgers: dict[int, dict[_Tail, None]] = {}
        self.waiting = 0

    def take(self, request: Request, head: RequestHead) -> Status:
        """OK: it is answered now or later. BUSY: too many wait. BAD_REQUEST: for too long."""
        if head.count > WAIT_MS_MAX:
            return Status.BAD_REQUEST
        if self._has_news(head.ledger, head.entry):
            self._answer(request, head)
            return Status.OK
        if self.waiting >= WAITING_MAX:
            return Status.BUSY
        tail = _Tail(request, head)
        loop = asyncio.get_running_loop()
        tail.timer = loop.call_later(head.count / 1000, self._end, tail)
        self._ledgers.setdefault(head.ledger, {})[tail] = None
        self.waiting += 1
        return Status.OK

    def wake(self) -> None:
        """LACs may have grown, ledgers may be fenced."""
        for ledger in list(self._ledgers):
            for tail in list(self._ledgers[ledger]):
                if self._has_news(ledger, tail.head.entry):
                    self._end(tail)

    def _has_news(self, ledger: int, known: int) -> bool:
        status, lac, _ = self._store.read_lac(ledger)
        if status is Status.OK:
            descriptor = self._store.descriptors.get(ledger)
            return lac > known or (descriptor is not None and descriptor.fenced)
        return status is not Status.NO_SUCH_LEDGER

    def _end(self, tail: _Tail) -> None:
        self._forget(tail)
        self._answer(tail.request, tail.head)

    def _forget(self, tail: _Tail) -> None:
        assert tail.timer is not None, "a tail waits with a timer"
        tail.timer.cancel()
        tails = self._ledgers[tail.head.ledger]
        del tails[tail]
        if not tails:
            del self._ledgers[tail.head.ledger]
        self.waiting -= 1

    def close(self) -> None:
        """Nobody is answered any more."""
        for tails in list(self._ledgers.values()):
            for tail in list(tails):
                self._forget(tail)
