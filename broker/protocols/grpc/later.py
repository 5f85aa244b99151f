"""Services whose code is loaded by their first caller: administration and transactions, which an idle broker does not
need. Guard: tests/cli/test_start.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ....runtime.network import rpcs_of
from ....runtime.workers import Workers
from ...node.topic_manager import TopicManager

Method = Callable[[Any, Any], Awaitable[Any]]


def attribute_of(method: str) -> str:
    """The name of a handler's method: of "ListTopics" `list_topics`."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in method).lstrip("_")


class Later:
    """Has the methods of the service `name` ("Admin"). The first call imports `module` and makes the service."""

    def __init__(self, name: str, workers: Workers, module: str, make: Callable[[], object]) -> None:
        self._workers = workers
        self._module = f"{__package__}.{module}"
        self._make = make
        self._service: object = None
        for method in rpcs_of(name):
            attribute = attribute_of(method)
            setattr(self, attribute, self._method(attribute))

    def _method(self, attribute: str) -> Method:
        async def call(asked: Any, context: Any) -> Any:
            if self._service is None:
                await self._workers.load(self._module)
                if self._service is None:  # no other call was faster
                    self._service = self._make()
            return await getattr(self._service, attribute)(asked, context)

        return call


def admin(broker: TopicManager) -> Later:
    def make() -> object:
        from .admin import AdminService

        return AdminService(broker)

    return Later("Admin", broker.world.workers, "admin", make)


def transactions(broker: TopicManager) -> Later:
    def make() -> object:
        from .transactions import TransactionService

        return TransactionService(broker)

    return Later("Transactions", broker.world.workers, "transactions", make)
