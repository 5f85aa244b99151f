"""Requests of a consumer that the broker answers by number, and what becomes of them when the connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...proto.errors import MagnetarError
from ..common.errors import translate
from ..connect.connections import Connections
from ..core.consumer import ConsumerCore
from ..core.state import State


class Requests:
    def __init__(self, connections: Connections, core: ConsumerCore) -> None:
        self._connections = connections
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._changed: asyncio.Future[None] | None = None  # it is connected, or finished

    async def ask(self, send: Callable[[int], object]) -> Any:
        """`send` sends the request under that number; once more over the next connection when this one breaks."""

        async def attempt() -> Any:
            while self._core.state is not State.CONNECTED:
                self.raise_if_closed()
                await self.changed()
            request_id = self._core.request()
            answer = self.expect(request_id)
            send(request_id)
            try:
                return await answer
            finally:
                self._answers.pop(request_id, None)

        return await self._connections.retry(attempt)

    def expect(self, request_id: int) -> asyncio.Future[Any]:
        answer = self._answers[request_id] = self._loop.create_future()
        return answer

    def answer(self, request_id: int, error: MagnetarError | None, result: Any) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    async def changed(self) -> None:
        """Returns when it is connected, or finished."""
        if self._changed is None:
            self._changed = self._loop.create_future()
        await asyncio.shield(self._changed)

    def tell_change(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def raise_if_closed(self) -> None:
        if self._core.error is not None:
            error = translate(self._core.error)
            raise type(error)(error.message) from error
