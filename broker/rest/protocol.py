"""The service of an HTTP listener: administration by Pulsar's REST v2, look-ups, metrics, health.

    rest = RestProtocol(broker, services)
    serving = await world.network.serve_bytes(endpoint, rest.serve, access)
    rest.shut_down()                                      idle connections end, the others after their answer

starlette and uvicorn are imported at the first connection, so an unused listener does not hold them in memory.
A request is authenticated by its own header (or the connection's certificate), and then calls the broker's services
(broker/grpc/checked.py): the same rights and the same audit log as over gRPC.
Guarding tests: tests/broker/rest/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...runtime.metrics import Measure, write_empty_metrics
from ...runtime.network import ByteStream
from ..node.topic_manager import TopicManager

if TYPE_CHECKING:
    from ..grpc.checked import AuthorizedService
    from .connection import HttpListener


class RestProtocol:
    """Serves the connections of an HTTP listener. `services`: the services "Admin" and "Broker", which check the
    caller's rights. `measure`: the function that writes the metrics page for `GET /metrics`."""

    def __init__(self, broker: TopicManager, services: Mapping[str, AuthorizedService]) -> None:
        self._broker = broker
        self._services = services
        self._connections: HttpListener | None = None
        self._loading = asyncio.Lock()
        self._shut_down = False
        self.measure: Measure = write_empty_metrics

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection until the client or the broker ends it. Raises ConnectionLost if the connection was
        lost."""
        async with self._loading:
            if self._connections is None:
                await self._broker.world.workers.load(f"{__package__}.application", f"{__package__}.connection")
                self._connections = self._open(stream)
        if not self._shut_down:
            await self._connections.serve(stream)

    def _open(self, stream: ByteStream) -> HttpListener:
        from .application import Application
        from .connection import HttpListener

        application = Application(self._broker, self._services, stream.guard, lambda: self.measure)
        return HttpListener(application, self._broker.world.clock, self._broker.config.first_frame_s)

    def shut_down(self) -> None:
        self._shut_down = True
        if self._connections is not None:
            self._connections.shut_down()
