"""Services that are loaded by their first caller have each rpc, and are made once."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.grpc import admin, transactions
from magnetar.broker.grpc.checked import LazyService, find_rpc_handlers, make_rpc_handler_name
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.network import list_rpc_names


@pytest.mark.parametrize(
    ("name", "parts"), [("Admin", admin.SERVICE_CLASSES), ("Transactions", transactions.SERVICE_CLASSES)]
)
def test_each_rpc_of_a_service_is_a_method_of_one_of_its_parts(name: str, parts: Sequence[type]) -> None:
    """Which nothing would notice before the first call of one that it has not."""
    wanted = {make_rpc_handler_name(method.name) for method in wire.DESCRIPTOR.services_by_name[name].methods}
    assert set(find_rpc_handlers(name, parts)) == wanted


class Slow:
    """Workers whose loading ends when the test says so."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.done = asyncio.Event()

    async def load(self, *modules: str) -> None:
        self.loaded += modules
        await self.done.wait()


async def test_first_calls_at_once_load_it_and_get_one_service() -> None:
    workers, made = Slow(), []

    def make() -> list[object]:
        async def list_tenants(request: Any, context: Any) -> Any:
            return request, len(made)

        made.append(1)
        return [SimpleNamespace(**dict.fromkeys(map(make_rpc_handler_name, list_rpc_names("Admin")), list_tenants))]

    service: Any = LazyService("Admin", workers, "admin", make)  # type: ignore[arg-type]
    calls = [asyncio.create_task(service.list_tenants(number, None)) for number in range(3)]
    await asyncio.sleep(0)
    assert made == [], "nothing is made before the code is there"
    assert set(workers.loaded) == {"magnetar.broker.grpc.admin"}
    workers.done.set()
    assert await asyncio.gather(*calls) == [(0, 1), (1, 1), (2, 1)]
    assert await service.list_tenants(3, None) == (3, 1)
    assert len(workers.loaded) == 3, "it is loaded by first calls alone"
