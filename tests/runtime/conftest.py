"""The transports are tested on both event loops; everything else on the standard one."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

ON_BOTH_LOOPS = ("test_peers.py", "test_rpc.py", "test_threads.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
