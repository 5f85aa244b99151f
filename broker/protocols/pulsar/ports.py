"""The interface of a connection for its producers, consumers and requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from ....proto import pulsar_pb2 as pulsar
from ....proto.errors import MagnetarError
from ....runtime.files import Buffer
from ....runtime.network import CallContext
from ...node.topic_manager import TopicManager
from .names import ProducerNames


class Handler(Protocol):
    """A producer or a consumer; `id` is the client's number for it."""

    id: int


class Connection(Protocol):
    """A connection of Pulsar's protocol, as its producers, consumers and requests use it."""

    broker: TopicManager
    caller: CallContext
    client: str  # its name and version, as it says
    version: int  # of the protocol
    names: ProducerNames

    def send(self, data: bytes) -> None:
        """Sends one frame. The frames of one turn leave together."""
        ...

    def send_parts(self, parts: tuple[Buffer, ...], size: int) -> None:
        """Sends one frame of `size` bytes, in parts."""
        ...

    def error(
        self, request_id: int, error: MagnetarError, number: pulsar.ServerError | None = None
    ) -> None: ...
    def success(self, request_id: int) -> None: ...
    def held(self, size: int) -> None:
        """Counts so many bytes of entries more (or less) that wait for credit."""
        ...

    @property
    def full(self) -> bool:
        """Whether more than it should be of its deliveries has not left yet."""
        ...

    async def drained(self) -> None: ...
    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it; cancelled with the connection."""
        ...

    def leave_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it to its end in any case."""
        ...

    def break_off(self, error: MagnetarError) -> None:
        """Ends the connection."""
        ...

    def forget_producer(self, handler: Handler) -> None: ...
    def forget_consumer(self, handler: Handler) -> None: ...
