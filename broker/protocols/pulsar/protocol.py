"""Pulsar's binary protocol: a listener's service, and what its connections share.

    serving = await world.network.serve_bytes(endpoint, PulsarProtocol(broker).serve, access)

A connection (connection.py) has producers (producer.py) and consumers (consumer.py) on the broker's sessions, and asks
for owners, partitions and topics (lookup.py), also as they change (topic_lists.py). The messages are those of
proto/pulsar.proto, in the frames of frames.py. They are loaded by the first connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.grpc.callers import Callers
from ....runtime.network import ByteStream
from ....runtime.unbroken import unbroken
from ...node.topic_manager import TopicManager
from .names import ProducerNames

if TYPE_CHECKING:
    from .frames import Spare


class PulsarProtocol:
    """The service of a listener of Pulsar's protocol."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._names = ProducerNames()
        self._spare: Spare | None = None
        self._callers: Callers | None = None  # of the listener

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection until either side ends it. Unauthenticated, InvalidRequest, ConnectionLost say why it
        ended."""
        if self._callers is None:
            self._callers = Callers(stream.guard, self._broker.world.clock)
        await self._broker.world.workers.load(f"{__package__}.connection")
        from .connection import Connection
        from .frames import Spare

        if self._spare is None:
            self._spare = Spare()
        connection = Connection(self._broker, stream, self._names, self._callers, self._spare)
        try:
            await connection.serve()
        finally:
            await unbroken(connection.end())
