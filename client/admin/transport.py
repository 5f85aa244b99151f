"""What carries the operations of proto/operations.py to a cluster: gRPC (client/admin/grpc_transport.py), or what a
program brings.

A method of AdminClient is a function of this package whose first parameter is a Caller, or follows from its row
(client/admin/rows.py); client/admin/client.py makes the class of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ...proto.names import NamespaceName, TopicName, check_subscription_name
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


class Caller:
    """Asks operations of a transport. `_timeout_s` bounds each of them with all its attempts."""

    _transport: Transport
    _timeout_s: float

    async def _call(self, operation: Operation[T], **arguments: object) -> T:
        return await self._transport.call(operation, arguments)

    async def _all(self, operation: Operation[tuple[T, ...]], **arguments: object) -> list[T]:
        found = await self._call(operation, **arguments)
        return list(found)


def full_topic(topic: str) -> str:
    return TopicName.parse(topic).full


def full_namespace(name: str) -> str:
    return str(NamespaceName.parse(name))


def of_subscription(topic: str, name: str) -> dict[str, str]:
    return {"topic": full_topic(topic), "subscription": check_subscription_name(name)}
