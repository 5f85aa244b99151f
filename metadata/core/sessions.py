"""The table of sessions: which are open, and the deadline of each without a sign of life.

    open ──touch──▶ open        the deadline becomes now + timeout
    open ──close──▶ ended       at once, by its owner
    open ──expire─▶ ended       the deadline has passed

A session without a deadline (that of a user in the same process) ends only by `close`; `abandon` gives it a deadline.
The driver that ends a session deletes its ephemerals after every commit that was accepted under it
(metadata/sqlite.py). An id that is missing from the table has expired; ids are never reused.

*A process that stood still does not judge*: a check more than LATE_S after a deadline means that this process was
stopped (a stopped machine, a blocked loop), and signs of life may be unread in its sockets. Then no session expires,
and every deadline moves by the lateness and one timeout. Guarded by test_sessions.py.
"""

from __future__ import annotations

import msgspec

from ...proto.errors import SessionExpired

LATE_S = 1.0
"""Seconds by which a timer is late when the process was stopped: a healthy event loop runs it within milliseconds."""


class _Session(msgspec.Struct):
    timeout_s: float
    deadline: float | None  # None: lives as long as this process


class Sessions:
    """The open sessions. Every `now` is the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.open_ones: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self.open_ones)

    def __contains__(self, session: str) -> bool:
        return session in self.open_ones

    def ids(self) -> list[str]:
        return list(self.open_ones)

    def open(self, session: str, timeout_s: float, now: float | None) -> None:
        """Adds a session with a deadline `timeout_s` after `now`; `now` None: without a deadline."""
        assert session, "a session has a name"
        assert session not in self.open_ones, f"session {session!r} is opened twice"
        assert timeout_s > 0
        self.open_ones[session] = _Session(timeout_s, None if now is None else now + timeout_s)

    def touch(self, session: str, now: float) -> float:
        """Records a sign of life; returns the timeout in seconds. Raises SessionExpired."""
        found = self.require(session)
        if found.deadline is not None:
            found.deadline = now + found.timeout_s
        return found.timeout_s

    def abandon(self, session: str, now: float) -> None:
        """Lets the session expire: its user left without closing it, and the deadline counts from now."""
        if session in self.open_ones:
            found = self.open_ones[session]
            found.deadline = now + found.timeout_s

    def require(self, session: str) -> _Session:
        """Raises SessionExpired unless the session is open."""
        found = self.open_ones.get(session)
        if found is None:
            raise SessionExpired(f"metadata session {session} has ended; open a new one", session=session)
        return found

    def close(self, session: str) -> bool:
        """Ends the session; returns whether it was open."""
        return self.open_ones.pop(session, None) is not None

    def next_deadline(self) -> float | None:
        return min((s.deadline for s in self.open_ones.values() if s.deadline is not None), default=None)

    def expire(self, now: float) -> list[str]:
        """Ends the sessions whose deadline has passed; returns their ids, in the order of their opening."""
        first = self.next_deadline()
        if first is None or now < first:
            return []
        if now - first > LATE_S:
            self._excuse(now - first)
            return []
        ended = [s for s, state in self.open_ones.items() if state.deadline is not None and state.deadline <= now]
        for session in ended:
            del self.open_ones[session]
        return ended

    def _excuse(self, late_s: float) -> None:
        for state in self.open_ones.values():
            if state.deadline is not None:
                state.deadline += late_s + state.timeout_s

    def check(self) -> None:
        for session, state in self.open_ones.items():
            assert session, "a session has a name"
            assert state.timeout_s > 0, f"{session}: a timeout is positive"
