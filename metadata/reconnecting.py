"""Consecutive sessions as one `MetadataStore`: for a process that goes on serving when its session is lost.

    serving ──suspend()──▶ suspended ──renew(session)──▶ serving … ──end()──▶ ended (SessionExpired, for ever)

The owner of the sessions calls `suspend` when one is lost, and `renew` with the next one. The ephemerals of the lost
session are deleted, now or soon; the owner makes them again. The rest of the tree is unchanged.

- *Suspended*, or lost without `suspend`: a call waits for the next session up to CALL_TIMEOUT_S, then Unavailable:
  definitely not done. So no bundle is claimed, and no ledger is begun (ledger protocol §3.2).
- A read that was in progress is repeated; a commit is ConnectionLost, *unknown*, and decided by content.
- A watch breaks with ConnectionLost; its reader lists again, as after any other break.

The owner closes the sessions. Guarded by tests/metadata/test_reconnecting.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from ..proto.errors import ConnectionLost, SessionExpired, Unavailable
from .session import CALL_TIMEOUT_S
from .store import Changed, MetadataStore, Operation, Reset, Versioned

T = TypeVar("T")


class ReconnectingStore(MetadataStore):
    """A store over one session at a time; its owner replaces the session."""

    def __init__(self, session: MetadataStore) -> None:
        self._session: MetadataStore = session
        self._lost: MetadataStore | None = None  # the last session that is known to be lost
        self._ended = False
        self._changed = asyncio.Event()  # there is a next session, or there will be none

    # -------------------------------------------------------------------------------------------- its owner's
    def suspend(self) -> None:
        """Lets calls wait: the session is lost."""
        self._lost = self._session
        self._changed.clear()

    def renew(self, session: MetadataStore) -> None:
        """Calls that wait use this session."""
        self._session = session
        self._changed.set()

    def end(self) -> None:
        """Ends for good: no further session follows, and every call, also one that waits, raises SessionExpired."""
        self._ended = True
        self._changed.set()

    @property
    def suspended(self) -> bool:
        return self._session is self._lost or self._ended

    # -------------------------------------------------------------------------------------------- calls
    async def _living(self) -> MetadataStore:
        if self.suspended and not self._ended:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._changed.wait()
            except TimeoutError:
                raise Unavailable(f"no metadata session for {CALL_TIMEOUT_S:g} s; try again") from None
        if self._ended:
            raise SessionExpired("the metadata session was lost, and no other one was made")
        return self._session

    def _note(self, session: MetadataStore) -> None:
        """Notes a loss of which a call learns before the owner."""
        if session is self._session and not self._ended:
            self.suspend()

    async def _read(self, ask: Callable[[MetadataStore], Awaitable[T]]) -> T:
        while True:
            session = self._session if not self.suspended else await self._living()
            try:
                return await ask(session)
            except SessionExpired:
                self._note(session)

    async def get(self, path: str) -> Versioned | None:
        session = self._session
        if session is not self._lost and not self._ended:  # most reads of a broker: without a question for the session
            try:
                return await session.get(path)
            except SessionExpired:
                self._note(session)
        return await self._read(lambda session: session.get(path))

    async def children(self, path: str) -> list[str]:
        return await self._read(lambda session: session.children(path))

    async def revision(self) -> int:
        return await self._read(lambda session: session.revision())

    async def commit(self, operations: Sequence[Operation]) -> list[int]:
        session = self._session
        if session is self._lost or self._ended:
            session = await self._living()
        try:
            return await session.commit(operations)
        except SessionExpired as error:
            self._note(session)
            raise ConnectionLost(f"the metadata session was lost with a write under way: {error}") from error

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Changed | Reset]:
        session = await self._living()
        try:
            async for change in session.watch(prefix, after_revision):
                yield change
        except SessionExpired as error:
            self._note(session)
            raise ConnectionLost(f"the watch on {prefix} broke with the metadata session: {error}") from error

    # -------------------------------------------------------------------------------------------- the session
    @property
    def session_id(self) -> str:
        return self._session.session_id

    async def wait_session_lost(self) -> None:
        """Waits for the loss of the current session."""
        await self._session.wait_session_lost()

    async def close(self) -> None:
        self.end()
