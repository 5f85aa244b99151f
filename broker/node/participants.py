"""The topics of the cluster, for coordinators that tell them how their transactions ended: here, or at their owner.

A topic that does not exist has nothing to settle. That is so only when the metadata says that it has no record: an
owner that could not be found, or that refuses, is asked again.
Guards: tests/broker/protocols/grpc/test_transactions.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from ...metadata.store import MetadataStore
from ...proto.errors import MagnetarError, NotAllowed, NotFound
from ...proto.names import TopicName
from ..common.transactions import Settlement
from ..log.ledger_list import path_of
from ..transaction.peers import Peers

SETTLE_S = 5.0
"""Seconds that one settlement at a topic here may take: a slow topic does not hold up the answers of others for longer.
"""
OWNERS_MAX = 10_000
"""Owners of topics that are remembered."""


@runtime_checkable
class Settles(Protocol):
    """A loaded topic that settles transactions."""

    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Settles; returns an answer for each: None when its outcome is durable at the topic; TimedOut. Idempotent."""


class Participants:
    """The participants of transactions. `load`: the topic, loaded here; NotOwner. `owner`: the endpoint of the broker
    that serves it; empty: this one."""

    def __init__(
        self, metadata: MetadataStore, load: Callable[[TopicName], Awaitable[object]],
        owner: Callable[[TopicName], Awaitable[str]], peers: Callable[[], Peers],
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._load = load
        self._owner = owner
        self._peers = peers
        self._owners: dict[str, str] = {}  # as they were last found

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Settles transactions at a topic, wherever it is served: `Topics` of broker/transaction/settling.py."""
        try:
            endpoint = self._owners.get(topic.full)
            if endpoint is None:
                endpoint = await self._owner(topic)
                if len(self._owners) >= OWNERS_MAX:
                    self._owners.clear()
                self._owners[topic.full] = endpoint
            if endpoint:
                errors = await self._peers().settle(endpoint, topic, settlements)
            else:
                errors = await self.settle_here(topic, settlements)
        except MagnetarError as error:
            errors = [error] * len(settlements)
        if any(errors):
            self._owners.pop(topic.full, None)
        if any(isinstance(error, NotFound) for error in errors) and await self._is_gone(topic):
            return [None if isinstance(error, NotFound) else error for error in errors]
        return errors

    async def _is_gone(self, topic: TopicName) -> bool:
        return await self._metadata.get(path_of(topic)) is None

    async def settle_here(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Settles transactions at a topic that this broker owns; each settlement has its own answer."""
        loaded = await self._load(topic)
        if not isinstance(loaded, Settles):
            raise NotAllowed(f"topic {topic} takes no transactions")
        return await loaded.settle(settlements, SETTLE_S)
