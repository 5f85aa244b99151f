"""Defects of the SDK: patches of where received messages wait."""

from __future__ import annotations

import asyncio

from magnetar.client.inbox import Inbox
from tests.mutants.ledgers import Stack, put


def wake_up_dies_with_its_waiter(stack: Stack) -> None:
    """M41: a receive that is cancelled after it was woken keeps the wake-up call of another."""

    async def woken(self: Inbox) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._waiting.append(wake)
        try:
            await ready
        finally:
            self._forget(wake)

    put(stack, Inbox, "_woken", woken)
