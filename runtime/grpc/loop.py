"""Drops gRPC's events for event loops that have ended.

gRPC's asyncio side has one queue of events for all event loops of a process, and the first loop that reads it passes
each event to the loop that waits for it. Calls that are cancelled end a moment later. When their loop was closed
meanwhile (`asyncio.run` has returned), passing the event raises RuntimeError in an unrelated loop: it logs twenty
lines, and the next events of the queue are delayed. No task waits for such an event: it is dropped here.
Guard: tests/client/blocking/test_leaving.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_seen: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def drop_late_events(loop: asyncio.AbstractEventLoop) -> None:
    """Drops events of gRPC that arrive after `loop` was closed. Costs nothing while it is open."""
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
