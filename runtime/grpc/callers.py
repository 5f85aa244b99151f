"""The callers of one listener, and for how long they are admitted: the same at gRPC's listeners and at simulated ones.

    principal = await callers.admitted(caller, path)          or the guard's error, with a line of the audit log
    with callers.holding(principal, stream.break_off): …      breaks the stream off when the credentials hold no more

A stream ends when the credentials of its caller expire, and within LOOK_S after the guard says that they have lapsed.
The error is CredentialsExpired, so a client connects again, with credentials that hold or to be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...proto.errors import CredentialsExpired, MagnetarError
from ..access import LOCAL, Caller, Guard, Principal, PrincipalKind
from ..clock import Clock
from ..monitoring.audit import AuditLog

LOOK_S = 2.0

End = Callable[[MagnetarError], None]


class Callers:
    """The callers of one listener. Without a guard every caller is LOCAL."""

    def __init__(self, guard: Guard | None, clock: Clock) -> None:
        self._guard = guard
        self._clock = clock
        self._audit = AuditLog(clock)
        self._held: dict[object, tuple[Principal, End]] = {}
        self._next: asyncio.TimerHandle | None = None

    @property
    def asks(self) -> bool:
        return self._guard is not None

    async def admitted(self, caller: Caller, path: str) -> Principal:
        """Raises what the guard raises."""
        if self._guard is None:
            return LOCAL
        try:
            principal = await self._guard.authenticate(caller)
        except MagnetarError as refusal:
            self.refused(caller, path, refusal)
            raise
        try:
            self._guard.authorize(principal, path)
        except MagnetarError as refusal:
            self._audit.denied(principal, _act(path), "", refusal.message, caller.peer)
            raise
        return principal

    def refused(self, caller: Caller, path: str, refusal: MagnetarError) -> None:
        self._audit.refused(caller, _act(path), refusal.message)

    @contextmanager
    def holding(self, principal: Principal, end: End) -> Iterator[None]:
        key, timer = object(), self._expiry(principal, end)
        if principal.kind is PrincipalKind.CLIENT:
            self._held[key] = principal, end
            self._look_later()
        try:
            yield
        finally:
            self._held.pop(key, None)
            if timer is not None:
                timer.cancel()
            if not self._held and self._next is not None:
                self._next.cancel()
                self._next = None

    def _expiry(self, principal: Principal, end: End) -> asyncio.TimerHandle | None:
        if not principal.expires_ms:
            return None
        wait_s = max(0.0, (principal.expires_ms - self._clock.wall_ms()) / 1000)
        return asyncio.get_running_loop().call_later(wait_s, end, _ended("expired"))

    def _look_later(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        assert self._guard is not None
        self._next = None
        why: dict[tuple[Principal, bytes], str] = {}
        for key, (principal, end) in list(self._held.items()):
            known = principal, principal.proof
            if known not in why:
                why[known] = self._guard.lapsed(principal)
            if why[known]:
                del self._held[key]
                end(_ended(f"lapsed: {why[known]}"))
        if self._held:
            self._look_later()


def _act(path: str) -> str:
    return path.rpartition(".")[2].replace("/", ".")


def _ended(how: str) -> CredentialsExpired:
    return CredentialsExpired(f"the credentials of this connection have {how}: connect again with new ones")
