"""gRPC and event loops that end.

gRPC's asyncio side has one queue of events for all event loops of a process, and whichever loop looks first hands an
event to the loop that it is for. Calls that are cancelled end a moment later; when their loop was closed meanwhile
(`asyncio.run` has returned), handing it over raises RuntimeError in a loop that has nothing to do with it, which logs
twenty lines, and the events that follow in the queue wait for the next one. Nobody waits for such an event: it is
dropped here. Guard: tests/client/blocking/test_leaving.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_seen: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def drop_late_events(loop: asyncio.AbstractEventLoop) -> None:
    """Events of gRPC that come after `loop` was closed are dropped. Costs nothing while it is open."""
    if loop in _seen:
        return
    _seen.add(loop)
    close, hand_over = loop.close, loop.call_soon_threadsafe

    def closed_for_grpc(callback: Callable[..., Any], *args: Any, **context: Any) -> Any:
        if (getattr(callback, "__module__", None) or "").startswith("grpc."):
            return None
        return hand_over(callback, *args, **context)

    def close_for_grpc() -> None:
        close()
        loop.call_soon_threadsafe = closed_for_grpc  # type: ignore[method-assign, assignment]

    loop.close = close_for_grpc  # type: ignore[method-assign]
