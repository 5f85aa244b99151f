"""The metadata service of a simulation: as in production, but that answers get lost, and somebody sees every commit."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from magnetar.metadata.server import MetadataService
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.tree import CommitJob, EndSession
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.network import CallContext
from tests.simulation.verdict.observer import Observer

SILENT_S = 15.0
"""Longer than anybody waits for an answer."""


class ObservedStore(SqliteStore):
    """Tells the observer every transaction in the moment in which it is durable."""

    observer: Observer

    def _apply_done(self, job: Any, done: Any) -> None:
        if isinstance(job, CommitJob):
            for operation, version in zip(job.operations, done.versions, strict=True):
                self.observer.committed(operation, version)
        elif isinstance(job, EndSession):
            self.observer.session_ended(done)
        super()._apply_done(job, done)


class FaultyService(MetadataService):
    """`rates` may be changed while it runs. Half of what is lost breaks the call, half of it stays silent."""

    def __init__(self, store: ObservedStore, rng: random.Random) -> None:
        super().__init__(store)
        self._rng = rng
        self.rates: Mapping[str, float] = {}
        self.mute = False  # what is asked is done, and nobody hears of it
        self.node_of: dict[str, str] = {}  # session -> node, of those that have written something

    async def commit(self, request: wire.CommitRequest, context: CallContext) -> wire.CommitReply:
        self.node_of[request.session] = context.peer.partition("#")[0]
        if self._strikes("commit-lost"):
            await self._lose()
        reply = await super().commit(request, context)
        if self.mute:
            await asyncio.sleep(SILENT_S)
        if self._strikes("answer-lost"):
            await self._lose()
        return reply

    def _strikes(self, kind: str) -> bool:
        rate = self.rates.get(kind, 0.0)
        return bool(rate) and self._rng.random() < rate

    async def _lose(self) -> None:
        if self._rng.random() < 0.5:
            await asyncio.sleep(SILENT_S)
        raise ConnectionLost("the answer was lost")

    def sessions_of(self, node: str) -> list[str]:
        """Those that have not ended."""
        return [session for session in list(self._store._sessions.open_ones) if self.node_of.get(session) == node]

    async def end(self, session: str) -> None:
        await self._store.end_session(session)
