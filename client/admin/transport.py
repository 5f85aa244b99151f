"""What carries the operations of proto/operations.py to a cluster: gRPC (client/admin/grpc_transport.py), or what a
program brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ...proto.operation import Operation

T = TypeVar("T")


class Transport(Protocol):
    """Carries operations to the cluster. Belongs to one event loop.

    Arguments are what AdminClient passes by keyword, as plain values: text, numbers, MessageId, sequences, mappings.
    """

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        """Calls an operation, and returns the answer. `at`: HOST:PORT of the broker that is asked; empty: one that can
        answer.

        Raises the MagnetarError that the server answered with; Unavailable, ConnectionLost or TimedOut when none did
        within the time of the transport.
        """
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...
