"""What a method of AdminClient is given: a transport, and how names are checked before anything is sent.

A method is a function of this package whose first parameter is the Caller, or follows from its row
(client/admin/rows.py); client/admin/client.py makes the class of them.
"""

from __future__ import annotations

from typing import TypeVar

from ...proto.names import NamespaceName, TopicName, check_subscription_name
from ...proto.operation import Operation
from .transport import Transport

T = TypeVar("T")


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
